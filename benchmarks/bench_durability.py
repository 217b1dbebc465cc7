"""Time saves to disk with both durabilities beside the plainest writes of the same bytes, in the same run.

    python benchmarks/bench_durability.py [--page-kib 2048] [--pages 128] [--rounds 7] [--disk DIR] [--quick]

Figures are payload GB/s, medians over interleaved rounds; `of_raw` are medians of each round's ratio. `raw` is O_DIRECT
calls of one page at a time by as many threads as the store has I/O workers, over blocks that were written before;
`raw + sync` ends with one fdatasync. `process`, `power`: a save of all pages from a pool until its transfer is done, on
a disk tier without shared memory above it; gathered, checksummed and recorded on the way. syncs: of a save of all pages
at once, and of as many saves of one page each that wait at the same time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from stepwell.config import DiskTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.pool import LentPool
from stepwell.store import PageStore
from stepwell.testing.faults import inject, reached

IO_THREADS = 2


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class RawFile:
    """Pages written by plain O_DIRECT calls."""

    def __init__(self, path: Path, page_bytes: int, pages: int) -> None:
        self._page_bytes, self._pages = page_bytes, pages
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, page_bytes * pages)
        self._buffers = [mmap.mmap(-1, page_bytes) for _ in range(IO_THREADS)]

    def write(self, *, sync: bool) -> None:
        def run(worker: int) -> None:
            for page in range(worker, self._pages, IO_THREADS):
                os.pwrite(self._fd, self._buffers[worker], page * self._page_bytes)

        with ThreadPoolExecutor(IO_THREADS) as pool:
            list(pool.map(run, range(IO_THREADS)))
        if sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def open_store(
    directory: Path, page_kib: int, pages: int, durability: Literal["process", "power"]
) -> PageStore:
    volume = (page_kib * pages << 10) + (64 << 20)
    geometry = PageGeometry.opaque(page_kib << 10, page_tokens=1, fingerprint={"benchmark": "durability"})
    disk = DiskTier(volume, str(directory / durability), volume_bytes=volume, durability=durability)
    return PageStore(StoreConfig(geometry=geometry, disk=disk, io_threads=IO_THREADS))


def save_all(store: PageStore, source: LentPool, tokens: np.ndarray) -> None:
    transfer = store.save(tokens, source=source[0 : tokens.size]).transfer
    transfer.wait()
    assert transfer.ok.all()
    assert transfer.landed(Tier.DISK).all()


def save_singly(store: PageStore, source: LentPool, pages: int) -> None:
    """Save chains of one page each, all of them before the first is waited for."""
    chains = [np.array([1_000_000 + page], np.int32) for page in range(pages)]
    saves = [store.save(chain, source=source[page : page + 1]) for page, chain in enumerate(chains)]
    for save in saves:
        save.transfer.wait()
        assert save.transfer.ok.all()


def count_syncs(action: Callable[[], object]) -> int:
    with inject("file.sync", "count"):
        action()
        return reached("file.sync")


def run(directory: Path, options: argparse.Namespace) -> dict[str, object]:
    page_bytes, pages = options.page_kib << 10, options.pages
    total = page_bytes * pages
    tokens = np.arange(pages, dtype=np.int32)
    rows = np.random.default_rng(0).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    raw = RawFile(directory / "raw", page_bytes, pages)
    figures: dict[str, list[float]] = {}
    with (
        open_store(directory, options.page_kib, pages, "process") as process,
        open_store(directory, options.page_kib, pages, "power") as power,
    ):
        lent = {store: store.lend(rows) for store in (process, power)}
        ways: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("raw", lambda: raw.write(sync=False), lambda: None),
            ("process", lambda: save_all(process, lent[process], tokens), process.clear),
            ("raw + sync", lambda: raw.write(sync=True), lambda: None),
            ("power", lambda: save_all(power, lent[power], tokens), power.clear),
        ]
        for number in range(options.rounds + 1):
            for name, action, after in ways:
                seconds = timed(action)
                after()
                if number > 0:  # the first writes blocks that were never written
                    figures.setdefault(name, []).append(total / seconds / 1e9)
        whole = count_syncs(lambda: save_all(power, lent[power], tokens))
        power.clear()
        single = count_syncs(lambda: save_singly(power, lent[power], pages))
    raw.close()

    def ratio(name: str, limit: str) -> float:
        return round(statistics.median(a / b for a, b in zip(figures[name], figures[limit], strict=True)), 2)

    return {
        "benchmark": "durability",
        "page_kib": options.page_kib,
        "pages": pages,
        "rounds": options.rounds,
        "gb_per_s": {name: round(statistics.median(values), 2) for name, values in figures.items()},
        "spread": {name: [round(min(values), 2), round(max(values), 2)] for name, values in figures.items()},
        "of_raw": {
            "process": ratio("process", "raw"),
            "power": ratio("power", "raw"),
            "power of raw + sync": ratio("power", "raw + sync"),
        },
        "syncs": {
            "one save": whole,
            "saves of one page": single,
            "a page of one save": round(whole / pages, 4),
            "a page of saves of one page": round(single / pages, 4),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", default=None)
    parser.add_argument("--quick", action="store_true", help="a few small pages: that it runs")
    options = parser.parse_args()
    if options.quick:
        options.page_kib, options.pages, options.rounds = 64, 64, 1
    directory = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir=options.disk))
    try:
        print(json.dumps(run(directory, options), indent=2))
    finally:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
