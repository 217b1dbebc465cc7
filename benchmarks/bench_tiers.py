"""Time pages between each pair of tiers through a whole store, beside the plainest copy of the same bytes in the same
run.

    python benchmarks/bench_tiers.py [--page-kib 2048] [--pages 128] [--rounds 5] [--disk DIR] [--output FILE]

Figures are payload GB/s, medians over interleaved rounds. `copy` is a non-temporal copy of as many bytes by one thread,
`memcpy` numpy's; `raw read` and `raw write` are O_DIRECT calls of one page at a time, from and to huge pages, by as
many threads as the store has I/O workers. Disk pages are read cold: by O_DIRECT. Checksums are on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from buffers import huge_buffers

from stepwell import _core
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore

IO_THREADS = 2


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def raw_disk(directory: Path, page_bytes: int, pages: int, *, write: bool) -> float:
    """Move pages by O_DIRECT with plain calls; seconds."""
    path = directory / "raw"
    flags = os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY)
    descriptor = os.open(path, flags, 0o600)
    buffers = huge_buffers(IO_THREADS, page_bytes)

    def run(worker: int) -> None:
        for page in range(worker, pages, IO_THREADS):
            if write:
                os.pwrite(descriptor, buffers[worker], page * page_bytes)
            else:
                os.preadv(descriptor, [buffers[worker]], page * page_bytes)

    try:
        with ThreadPoolExecutor(IO_THREADS) as pool:
            return timed(lambda: list(pool.map(run, range(IO_THREADS))) and None)
    finally:
        os.close(descriptor)


def rounds_of(store: PageStore, options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    page_bytes = options.page_kib << 10
    count = options.pages
    total = page_bytes * count
    tokens = np.arange(count, dtype=np.int32)
    source = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    lent, into = store.lend(source), store.lend(target)
    figures: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        figures.setdefault(name, []).append(total / seconds / 1e9)

    def load(expect: Tier) -> None:
        with store.match(tokens) as match:
            assert match.tiers == {expect: count}, match
            transfer = store.load(match, into=into[:])
            transfer.wait()
            assert transfer.ok.all()

    for _ in range(options.rounds):
        note("copy", timed(lambda: _core.stream_copy(target.reshape(-1), source.reshape(-1))))
        note("memcpy", timed(lambda: np.copyto(target, source)))
        note("raw write", raw_disk(directory, page_bytes, count, write=True))
        note("raw read", raw_disk(directory, page_bytes, count, write=False))
        saved = store.save(tokens, source=lent[:])
        start = time.perf_counter()
        while not saved.transfer.source_released:  # in shared memory: the first of the two stages
            saved.transfer.wait(0.0005)
        note("pool -> shared", time.perf_counter() - start)
        note("shared -> disk", timed(saved.transfer.wait))
        assert saved.transfer.ok.all()
        note("shared -> pool", timed(lambda: load(Tier.SHARED)))
        assert store.evict(Tier.SHARED, count) == count
        target.fill(0)
        note("disk -> shared + pool", timed(lambda: load(Tier.DISK)))
        assert np.array_equal(source, target)
        store.clear()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default=None)
    parser.add_argument("--output", default=None)
    options = parser.parse_args()
    total = options.page_kib * options.pages << 10
    shared = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=options.disk))
    geometry = PageGeometry.opaque(options.page_kib << 10, page_tokens=1, fingerprint={"benchmark": "tiers"})
    volume = total + (64 << 20)
    config = StoreConfig(
        geometry=geometry,
        shared=SharedTier(capacity=volume, path=str(shared / "tier"), volume_bytes=volume),
        disk=DiskTier(capacity=volume, path=str(disk / "tier"), volume_bytes=volume),
        io_threads=IO_THREADS,
    )
    try:
        with PageStore(config) as store:
            figures = rounds_of(store, options, disk)
    finally:
        shutil.rmtree(shared)
        shutil.rmtree(disk)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    limit = {
        "raw write": "raw write",
        "raw read": "raw read",
        "shared -> disk": "raw write",
        "disk -> shared + pool": "raw read",
    }
    result = {
        "benchmark": "tiers",
        "page_kib": options.page_kib,
        "pages": options.pages,
        "rounds": options.rounds,
        "gb_per_s": {name: round(value, 2) for name, value in medians.items()},
        "spread": {name: [round(min(values), 2), round(max(values), 2)] for name, values in figures.items()},
        "of_limit": {
            name: round(value / medians[limit.get(name, "copy")], 2) for name, value in medians.items()
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
