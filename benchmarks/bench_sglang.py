"""Time what SGLang asks of a storage backend, through its real host pool, of three backends side by side.

    python benchmarks/bench_sglang.py [--rounds 7] [--mib 256] [--page-kib 64 2048] [--layout page_first layer_first]
        [--place shm disk] [--disk DIR] [--shm DIR] [--keep] [--quick] [--skip-without-sglang]

Runs where SGLang 0.5.23 is installed, with or without a GPU; its MHATokenToKVPoolHost lies in host memory either way.

stepwell: StepwellStorage by batch_set_v1 and batch_get_v1, as cache_controller.py:1116 and :1412 call it; checksums on.
    On /dev/shm a shared tier alone; on disk a disk tier alone ("disk") and a shared tier above it ("shared + disk").
HiCacheFile: SGLang's own, by the generic calls that the controller makes for it, counted with what they copy:
    get_data_page and batch_set (:1403), get_dummy_flat_data_page, batch_get and set_from_flat_data_page (:1130).
plain: one file a page, 8 threads, pwritev and preadv straight between the pieces of get_page_buffer_meta and the file,
    a temporary name and a rename a page; no checksum, no eviction.
limit: on /dev/shm one thread's memcpy of as many bytes from one half of the pool to the other.

All in batches of 128 pages (STORAGE_BATCH_SIZE); GB/s of payload, medians over rounds in which the backends take turns,
and each round's ratio. `set + sync` counts one syncfs after all pages, for each; what others left dirty was synced
before. `get` on disk is cold: after a syncfs every file of each backend had POSIX_FADV_DONTNEED, mincore said that none
of a peer's bytes was left in the page cache, the store's memory tiers were emptied, and its counters said that all
bytes of the timed call came from disk (it reads by O_DIRECT). What a disk's own cache holds is beyond that. `hit` is
what a request waits for: batch_exists of all keys, then get of all, from the same state. `exists`: one batch_exists of
1,000 keys, all there, and with the second half missing. Pages that were read are compared with those that were written,
outside the time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.util
import json
import logging
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import kept

BATCH = 128  # STORAGE_BATCH_SIZE, hicache_storage.py:21
PLAIN_THREADS = 8
EXISTS_KEYS = 1000
EXISTS_REPEATS = 5
LEASE = 2.0  # seconds; shorter than the default, for a round ends when it is over
SHAPES = {  # Llama-3.1-8B: 16 tokens on one GPU; 4 tokens of one of 8 tensor-parallel ranks
    2048: {"layers": 32, "heads": 8, "dim": 128, "tokens": 16},
    64: {"layers": 32, "heads": 1, "dim": 128, "tokens": 4},
}
LIBC = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Say what is not installed; None: all is there."""
    for name in ("torch", "sglang"):
        if importlib.util.find_spec(name) is None:
            return name
    return None


def import_sglang() -> None:
    """Import what is timed; where torch has no CUDA, PyPI's torchvision needs schemas of its own operators for it."""
    logging.disable(logging.WARNING)
    import torch

    if not torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # they are there
            import_sglang.library = library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
            library.define("nms(Tensor dets, Tensor scores, float t) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float t) -> Tensor")
    importlib.import_module("sglang.srt.mem_cache.pool_host.mha")
    torch.set_num_threads(1)  # as a process does that runs a model on a GPU: model_runner.py:1279


def make_pool(page_kib: int, pages: int, layout: str) -> Any:
    """Return a host pool of SGLang with `pages` pages of random bytes and as many of zeros after them."""
    import torch
    from sglang.srt.mem_cache import device_pool_info as info
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    shape = SHAPES[page_kib]
    layers, heads, dim, tokens = (shape[name] for name in ("layers", "heads", "dim", "tokens"))
    device = [[torch.zeros(tokens, heads, dim, dtype=torch.bfloat16) for _ in range(layers)] for _ in "kv"]
    buffers = info.MHABufferInfo(
        buffers=info.KVBuffers(
            layout=info.KVBufferLayout.NHD,
            k=tuple(device[0]),
            v=tuple(device[1]),
            k_data_ptrs=torch.zeros(layers, dtype=torch.uint64),
            v_data_ptrs=torch.zeros(layers, dtype=torch.uint64),
        ),
        page_size=tokens,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        buffers, 1.0, 0, tokens, layout, pin_memory=False, device_capacity_tokens=tokens, start_layer=0,
        end_layer=layers, host_token_capacity=2 * pages * tokens,
    )  # fmt: skip
    bytes_of(pool).random_(0, 256)
    halves(pool)[1].zero_()
    return pool


def bytes_of(pool: Any) -> Any:
    """View a pool's buffer as bytes."""
    import torch

    return pool.kv_buffer.view(torch.uint8)


def halves(pool: Any) -> tuple[Any, Any]:
    """View the pages that are written and the pages that are read into."""
    axis = 2 if pool.layout == "layer_first" else 1
    whole = bytes_of(pool)
    half = whole.shape[axis] // 2
    return whole.narrow(axis, 0, half), whole.narrow(axis, half, half)


class Backend(Protocol):
    """What is timed. indices: host indices of all keys' pages."""

    directory: Path

    def set(self, keys: list[str], indices: Any) -> None:
        """Keep pages; all of them, or it raises."""

    def get(self, keys: list[str], indices: Any) -> None:
        """Load pages; all of them, or it raises."""

    def exists(self, keys: list[str]) -> int:
        """Return how many leading pages are there."""

    def cool(self) -> None:
        """Drop what memory holds of the pages; those on disk stay."""

    def read_from_disk(self) -> int | None:
        """Return the bytes read from disk so far; None: it does not know."""

    def empty(self) -> None:
        """Drop all pages."""

    def close(self) -> None:
        """End."""


def batches(keys: list[str], indices: Any, page_tokens: int) -> Iterator[tuple[list[str], Any]]:
    """Cut as the controller does (cache_controller.py:1422)."""
    for first in range(0, len(keys), BATCH):
        part = keys[first : first + BATCH]
        yield part, indices[first * page_tokens : (first + len(part)) * page_tokens]


def storage_config(extra: dict[str, Any]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="benchmark", extra_config=extra,
    )  # fmt: skip


class Stepwell:
    """StepwellStorage. tiers: its table of settings."""

    def __init__(self, directory: Path, pool: Any, tiers: dict[str, Any]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from stepwell.adapters.sglang import identity, storage

        def of_benchmark(config: Any) -> Any:  # no engine runs in this process that could say it
            source = identity.WeightsSource(path="benchmark")
            return identity.identity(config, engine=identity.EngineConfig(weights=source, model_config={}))

        self.directory = directory
        self._tokens = pool.page_size
        storage.identity = of_benchmark  # type: ignore[assignment]
        # No load_bound: a hit that would come too late for SGLang is timed too.
        own = {"weights_static": True, "weights_id": "benchmark", "lease": LEASE, "load_bound": None}
        table = {**own, **tiers}
        extra = {"backend_name": "stepwell", "module_path": "stepwell.adapters.sglang", "class_name": "StepwellStorage"}
        self._storage = storage.StepwellStorage(storage_config({**extra, "interface_v1": 1, "stepwell": table}), {})
        self._storage.register_mem_pool_host(pool)
        self._storage.register_mem_host_pool_v2(pool, PoolName.KV)
        self._storage.on_host_pools_registered()
        self._store = self._storage._members["kv"].store

    def set(self, keys: list[str], indices: Any) -> None:
        for part, where in batches(keys, indices, self._tokens):
            if not all(self._storage.batch_set_v1(part, where, None)):
                raise RuntimeError("stepwell kept less than it was given")

    def get(self, keys: list[str], indices: Any) -> None:
        for part, where in batches(keys, indices, self._tokens):
            if not all(self._storage.batch_get_v1(part, where, None)):
                raise RuntimeError("stepwell delivered less than it was asked for")

    def exists(self, keys: list[str]) -> int:
        return self._storage.batch_exists(keys, None)

    def cool(self) -> None:
        from stepwell import Tier

        tiers = self._store.stats().tiers
        for name, tier in (("host", Tier.HOST), ("shared", Tier.SHARED)):
            if "disk" in tiers and name in tiers:
                self._store.quiesce(60)
                self._store.evict(tier, tiers[name].capacity)

    def read_from_disk(self) -> int | None:
        disk = self._store.stats().tiers.get("disk")
        return None if disk is None else disk.bytes_read

    def quiesce(self) -> None:
        """Wait for what runs in the background, so that it does not run under what is timed next."""
        self._store.quiesce(60)

    def empty(self) -> None:
        deadline = time.monotonic() + 60
        while any(tier.resident for tier in self._store.stats().tiers.values()):  # what exists() holds goes after LEASE
            if time.monotonic() > deadline:
                raise RuntimeError("pages stay pinned")
            time.sleep(0.05)
            self._store.quiesce(60)
            self._storage.clear()

    def close(self) -> None:
        self._storage.close()


class SglangFile:
    """SGLang's HiCacheFile, as its controller calls it."""

    def __init__(self, directory: Path, pool: Any) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        self.directory = directory
        self._pool = pool
        self._storage = HiCacheFile(storage_config({"file_storage_path": str(directory)}))

    def set(self, keys: list[str], indices: Any) -> None:
        tokens = self._pool.page_size
        for part, where in batches(keys, indices, tokens):
            data = [self._pool.get_data_page(where[i * tokens]) for i in range(len(part))]
            if not self._storage.batch_set(part, data):
                raise RuntimeError("HiCacheFile kept less than it was given")

    def get(self, keys: list[str], indices: Any) -> None:
        tokens = self._pool.page_size
        for part, where in batches(keys, indices, tokens):
            targets = [self._pool.get_dummy_flat_data_page() for _ in part]
            data = self._storage.batch_get(part, targets)
            for i in range(len(part)):
                if data[i] is None:
                    raise RuntimeError("HiCacheFile delivered less than it was asked for")
                self._pool.set_from_flat_data_page(where[i * tokens], data[i])

    def exists(self, keys: list[str]) -> int:
        return int(self._storage.batch_exists(keys, None))

    def cool(self) -> None:
        pass

    def read_from_disk(self) -> int | None:
        return None

    def empty(self) -> None:
        remove_files(self.directory)

    def close(self) -> None:
        pass


class Plain:
    """One file a page, written and read with vectored calls by a few threads."""

    def __init__(self, directory: Path, pool: Any) -> None:
        self.directory = directory
        self._pool = pool
        self._bytes = memoryview(bytes_of(pool).reshape(-1).numpy())
        self._start = pool.kv_buffer.data_ptr()
        self._threads = ThreadPoolExecutor(PLAIN_THREADS)

    def _pages(self, count: int, indices: Any) -> list[list[memoryview]]:
        at, sizes = self._pool.get_page_buffer_meta(indices)
        start, whole = self._start, self._bytes
        pieces = [whole[first - start : first - start + size] for first, size in zip(at, sizes, strict=True)]
        each = len(pieces) // count
        return [pieces[i * each : (i + 1) * each] for i in range(count)]

    def _write(self, key: str, pieces: list[memoryview]) -> None:
        temporary = f"{self.directory}/.{key}.tmp"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            written = os.pwritev(file, pieces, 0)
        finally:
            os.close(file)
        if written != sum(map(len, pieces)):
            raise RuntimeError(f"{temporary}: {written} bytes written")
        os.rename(temporary, f"{self.directory}/{key}")

    def _read(self, key: str, pieces: list[memoryview]) -> None:
        file = os.open(f"{self.directory}/{key}", os.O_RDONLY)
        try:
            read = os.preadv(file, pieces, 0)
        finally:
            os.close(file)
        if read != sum(map(len, pieces)):
            raise RuntimeError(f"{key}: {read} bytes read")

    def _all(self, move: Callable[[str, list[memoryview]], None], keys: list[str], indices: Any) -> None:
        def run(worker: int) -> None:
            for page in range(worker, len(part), PLAIN_THREADS):
                move(part[page], pieces[page])

        for part, where in batches(keys, indices, self._pool.page_size):
            pieces = self._pages(len(part), where)
            list(self._threads.map(run, range(PLAIN_THREADS)))

    def set(self, keys: list[str], indices: Any) -> None:
        self._all(self._write, keys, indices)

    def get(self, keys: list[str], indices: Any) -> None:
        self._all(self._read, keys, indices)

    def exists(self, keys: list[str]) -> int:
        for count, key in enumerate(keys):
            if not os.path.exists(f"{self.directory}/{key}"):
                return count
        return len(keys)

    def cool(self) -> None:
        pass

    def read_from_disk(self) -> int | None:
        return None

    def empty(self) -> None:
        remove_files(self.directory)

    def close(self) -> None:
        self._threads.shutdown()


def remove_files(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def sync(directory: Path) -> None:
    """Write what a directory's file system holds only in memory."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if LIBC.syncfs(file) != 0:
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(file)


def drop_page_cache(directory: Path) -> int:
    """Write every file and drop it from the page cache; return the bytes that stay there (mapped ones do)."""
    sync(directory)
    left = 0
    for path in directory.rglob("*"):
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
                resident = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
                first = ctypes.c_char.from_buffer(view)
                done = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view)), resident)
                del first
                if done != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
                left += sum(byte & 1 for byte in bytes(resident)) * mmap.PAGESIZE
    return left


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def names(tag: str, count: int) -> list[str]:
    """Return page hashes as SGLang has them."""
    return [hashlib.sha256(f"{tag} {page}".encode()).hexdigest() for page in range(count)]


class Cell:
    """One place, page size and layout: rounds in which backends take turns."""

    def __init__(self, place: str, root: Path, shm: Path, page_kib: int, pages: int, layout: str) -> None:
        import torch

        self.place, self.page_kib, self.pages, self.layout = place, page_kib, pages, layout
        self._root = root
        self._payload = page_kib * pages << 10
        self._pool = make_pool(page_kib, pages, layout)
        tokens = self._pool.page_size
        everything = torch.arange(2 * pages * tokens)
        self._source, self._target = everything[: pages * tokens], everything[pages * tokens :]
        # As much again as the payload in whole volumes: room for slots' alignment and watermarks.
        capacity = 2 * self._payload + (256 << 20)
        tier = {"capacity": capacity, "volume_bytes": capacity // 2}
        shared = {**tier, "path": str(shm / f"{place}-shared")}
        disk = {**tier, "path": str(root / "stepwell-disk")}
        files = {name: root / name for name in ("sglang-file", "plain")}
        for directory in files.values():
            directory.mkdir()
        self.backends: dict[str, Backend] = {}
        if place == "shm":
            self.backends["stepwell"] = Stepwell(shm, self._pool, {"shared": shared})
        else:
            only = {**disk, "path": str(root / "stepwell-only")}
            self.backends["stepwell"] = Stepwell(root / "stepwell-only", self._pool, {"disk": only})
            both = {"shared": shared, "disk": disk}
            self.backends["stepwell shared + disk"] = Stepwell(root / "stepwell-disk", self._pool, both)
        self.backends["HiCacheFile"] = SglangFile(files["sglang-file"], self._pool)
        self.backends["plain"] = Plain(files["plain"], self._pool)
        self.figures: dict[str, dict[str, list[float]]] = {}
        self.cached: dict[str, int] = {}

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()
        self.backends.clear()

    def _note(self, call: str, name: str, value: float) -> None:
        self.figures.setdefault(call, {}).setdefault(name, []).append(value)

    def _rate(self, call: str, name: str, spent: float) -> None:
        self._note(call, name, self._payload / spent / 1e9)

    def _cool(self, name: str, backend: Backend) -> None:
        backend.cool()
        if self.place == "disk":
            self.cached[name] = left = drop_page_cache(backend.directory)
            if left and not isinstance(backend, Stepwell):
                raise RuntimeError(f"{name}: {left} bytes of its files stay in the page cache: is {self._root} a disk?")

    def _read(self, call: str, name: str, backend: Backend, action: Callable[[], object], *, is_cold: bool) -> None:
        """Time a read into the zeroed half, check what it brought."""
        import torch

        source, target = halves(self._pool)
        target.zero_()
        before = backend.read_from_disk()
        self._rate(call, name, seconds(action))
        after = backend.read_from_disk()
        if is_cold and before is not None and after is not None and after - before < self._payload:
            raise RuntimeError(f"{name}: {after - before} of {self._payload} bytes came from disk")
        if not torch.equal(source, target):
            raise RuntimeError(f"{name}: other bytes came back")

    def round(self, number: int) -> None:
        """Let each backend do each thing once; who begins, differs by round."""
        keys = names(f"{self.page_kib} {self.layout} {number}", self.pages)
        turn = number % len(self.backends)
        order = [*list(self.backends.items())[turn:], *list(self.backends.items())[:turn]]
        source, target = halves(self._pool)
        if self.place == "shm":
            self._rate("copy", "limit", seconds(lambda: target.copy_(source)))
        for name, backend in order:
            sync(self._root)
            spent = seconds(lambda backend=backend: backend.set(keys, self._source))
            if self.place == "disk":
                synced = spent + seconds(lambda: sync(self._root))
                self._rate("set, no sync", name, spent)
                self._rate("set + sync", name, synced)
            else:
                self._rate("set", name, spent)
        is_disk = self.place == "disk"
        for call in ("get", "hit"):
            for name, backend in order:
                self._cool(name, backend)

                def read(backend: Backend = backend, call: str = call) -> None:
                    if call == "hit" and backend.exists(keys) != len(keys):
                        raise RuntimeError("a page is missing")
                    backend.get(keys, self._target)

                self._read(call, name, backend, read, is_cold=is_disk)
                if isinstance(backend, Stepwell):
                    backend.quiesce()
        if self.pages >= EXISTS_KEYS:
            half = keys[: EXISTS_KEYS // 2]
            asked = {"exists": keys[:EXISTS_KEYS], "exists, half there": [*half, *names("absent", EXISTS_KEYS // 2)]}
            for call, these in asked.items():
                for _ in range(EXISTS_REPEATS):
                    for name, backend in order:
                        there: list[int] = []
                        spent = seconds(lambda b=backend, t=there, k=these: t.append(b.exists(k)))
                        if there[0] != (len(half) if call != "exists" else EXISTS_KEYS):
                            raise RuntimeError(f"{name} says that {there[0]} pages exist")
                        self._note(call, name, spent * 1e6)
                        if isinstance(backend, Stepwell):
                            backend.quiesce()
        for _, backend in order:
            backend.empty()

    def forget_figures(self) -> None:
        """Drop the figures of a first round, in which memory and blocks are touched for the first time."""
        self.figures.clear()

    def result(self) -> dict[str, Any]:
        rates = {call: by for call, by in self.figures.items() if not call.startswith("exists")}
        waits = {call: by for call, by in self.figures.items() if call.startswith("exists")}
        ours = [name for name in self.backends if name.startswith("stepwell")]
        peers = [name for name in self.backends if not name.startswith("stepwell")]

        def ratios(by: dict[str, list[float]], mine: str, peer: str, *, is_time: bool) -> list[float]:
            pairs = zip(by[mine], by[peer], strict=True)
            each = [b / a if is_time else a / b for a, b in pairs]
            return [round(statistics.median(each), 2), round(min(each), 2), round(max(each), 2)]

        return {
            "place": self.place,
            "page_kib": self.page_kib,
            "layout": self.layout,
            "pages": self.pages,
            "gb_per_s": {c: {n: spread(v, 2) for n, v in by.items()} for c, by in rates.items()},
            "us_per_1000_keys": {c: {n: spread(v, 0) for n, v in by.items()} for c, by in waits.items()},
            "times_as_fast": {
                call: {
                    mine: {peer: ratios(by, mine, peer, is_time=call in waits) for peer in peers} for mine in ours
                }
                for call, by in self.figures.items()
                if call != "copy"
            },
            "left_in_page_cache": self.cached,
        }


def spread(values: list[float], digits: int) -> list[float]:
    """Return median, least and most."""
    return [round(one, digits) for one in (statistics.median(values), min(values), max(values))]


def run(options: argparse.Namespace) -> dict[str, Any]:
    import sglang
    import torch

    cells = []
    load = os.getloadavg()[0]
    for place in options.place:
        for page_kib in options.page_kib:
            for layout in options.layout:
                beside = options.shm if place == "shm" else options.disk
                shm = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=options.shm))
                root = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=beside))
                try:
                    cell = Cell(place, root, shm, page_kib, (options.mib << 10) // page_kib, layout)
                    try:
                        for number in range(options.rounds + 1):
                            cell.round(number)
                            if number == 0 and not options.quick:
                                cell.forget_figures()
                        cells.append(cell.result())
                    finally:
                        cell.close()
                finally:
                    shutil.rmtree(shm)
                    shutil.rmtree(root)
                del cell
                gc.collect()
                print(kept.sglang_table({"cells": cells[-1:]}), file=sys.stderr)
    return {
        "benchmark": "sglang",
        "rounds": options.rounds,
        "batch": BATCH,
        "sglang": sglang.__version__,
        "torch": torch.__version__,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "cells": cells,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="payload of a round")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 2048], choices=sorted(SHAPES))
    parser.add_argument("--layout", nargs="+", default=["page_first", "layer_first"])
    parser.add_argument("--place", nargs="+", default=["shm", "disk"], choices=["shm", "disk"])
    parser.add_argument("--disk", default=str(kept.RESULTS), help="a directory on a disk (default: beside the results)")
    parser.add_argument("--shm", default="/dev/shm", help="a directory in shared memory")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/sglang.json")
    parser.add_argument("--table", action="store_true", help="print a table, not JSON")
    parser.add_argument("--quick", action="store_true", help="one round of few pages: that it runs")
    parser.add_argument("--skip-without-sglang", action="store_true", help="where SGLang is missing: say so, exit 0")
    options = parser.parse_args()
    if (name := missing()) is not None:
        outcome = "skipped" if options.skip_without_sglang else "cannot run"
        print(f"{outcome}: {name} is not installed for {sys.executable}; run it where SGLang 0.5.23 is")
        return 0 if options.skip_without_sglang else 1
    if options.quick:
        options.rounds, options.mib, options.layout = 0, 64, ["page_first"]
    kept.machine()
    import_sglang()
    result = run(options)
    if options.keep:
        kept.keep("sglang", result)
    print(kept.sglang_table(result) if options.table else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
