"""Whole pages in and out of volumes, beside a plain copy and plain direct I/O in the same run.

    python benchmarks/bench_volume.py [--mib 256] [--shared /dev/shm] [--disk /tmp] [--json]

Rounds of all contestants are interleaved and the best of five is given: ratios within a run are
sound, absolute figures of a shared machine are not. `pread` and `pwrite` are calls of one page
from and to memory in pages of 4 KiB, `pread_huge` and `pwrite_huge` in huge pages.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from buffers import huge_buffers

from stepwell import _core

SHARED, DISK = 1, 2
ROUNDS = 5
LAYERS = 32
MIB = 1 << 20


class Bench:
    """One volume filled with pages of one size, and the plain ways to move the same bytes."""

    def __init__(self, directory: Path, medium: int, page_bytes: int, total_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.count = total_bytes // page_bytes
        shape = _core.PageShape([page_bytes // LAYERS] * LAYERS, bytes(32))
        alignment = 64 if medium == SHARED else 4096
        room = total_bytes + self.count * (192 + 16 + 4 * LAYERS) + MIB
        header = _core.VolumeHeader.plan(medium, shape, room, alignment, 4096)
        metadata = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.posix_fallocate(metadata, 0, header.metadata_bytes)
        os.pwrite(metadata, header.encode(), 0)
        pages = -1
        if medium == DISK:
            pages = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            os.posix_fallocate(pages, 0, header.pages_bytes)
        self.metadata, self.pages, self.header = metadata, pages, header
        self.volume = _core.Volume(shape, header, os.dup(metadata), pages, medium == DISK)
        self.volume.prefault(_core.StopFlag())
        self.scratch = _core.Scratch()
        # Eight source and target pages in turn: more than a cache of 32 MiB holds of large ones.
        self.memory = np.frombuffer(mmap.mmap(-1, 8 * page_bytes), dtype=np.uint8)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, 8 * page_bytes, dtype=np.uint8)
        self.huge = huge_buffers(8, page_bytes)
        for buffer in self.huge:
            buffer[:] = self.memory[:page_bytes].data
        self.plain = np.frombuffer(mmap.mmap(-1, total_bytes), dtype=np.uint8)
        self.plain[:] = 1
        self.keys = [b"page %d" % slot for slot in range(self.count)]

    def buffer(self, slot: int) -> np.ndarray:
        first = slot % 8 * self.page_bytes
        return self.memory[first : first + self.page_bytes]

    def far(self, slot: int) -> np.ndarray:
        first = slot * self.page_bytes
        return self.plain[first : first + self.page_bytes]

    def write(self, slot: int) -> None:
        key = self.keys[slot]
        status = self.volume.write_page(slot, self.buffer(slot), key=key, scratch=self.scratch)
        assert status == _core.Status.ok, status

    def read(self, slot: int) -> None:
        key = self.keys[slot]
        status = self.volume.read_page(slot, self.buffer(slot), key=key, scratch=self.scratch)
        assert status == _core.Status.ok, status

    def copy_out(self, slot: int) -> None:
        _core.stream_copy(self.far(slot), self.buffer(slot))

    def copy_in(self, slot: int) -> None:
        _core.stream_copy(self.buffer(slot), self.far(slot))

    def pwrite(self, slot: int) -> None:
        assert os.pwrite(self.pages, self.buffer(slot), slot * self.page_bytes) == self.page_bytes

    def pread(self, slot: int) -> None:
        buffers = [memoryview(self.buffer(slot))]
        assert os.preadv(self.pages, buffers, slot * self.page_bytes) == self.page_bytes

    def pwrite_huge(self, slot: int) -> None:
        assert os.pwrite(self.pages, self.huge[slot % 8], slot * self.page_bytes) == self.page_bytes

    def pread_huge(self, slot: int) -> None:
        assert os.preadv(self.pages, [self.huge[slot % 8]], slot * self.page_bytes) == self.page_bytes

    def rate(self, step: Callable[[int], None]) -> float:
        """Return GB/s of one pass over all slots."""
        start = time.perf_counter()
        for slot in range(self.count):
            step(slot)
        return self.count * self.page_bytes / (time.perf_counter() - start) / 1e9


def measure(directory: Path, medium: int, page_bytes: int, total_bytes: int) -> dict[str, float]:
    bench = Bench(directory, medium, page_bytes, total_bytes)
    steps: dict[str, Callable[[int], None]] = {"write_page": bench.write, "read_page": bench.read}
    if medium == SHARED:
        steps |= {"copy_out": bench.copy_out, "copy_in": bench.copy_in}
    best = dict.fromkeys(steps, 0.0)
    for _ in range(ROUNDS):
        for name, step in steps.items():
            best[name] = max(best[name], bench.rate(step))
    if medium == DISK:
        # Last, reads first: the plain writes overwrite the pages.
        for names in ("pread", "pread_huge"), ("pwrite", "pwrite_huge"):
            for _ in range(ROUNDS):
                for name in names:
                    best[name] = max(best.get(name, 0.0), bench.rate(getattr(bench, name)))
    os.close(bench.metadata)
    return best


def adoption_ms(directory: Path, medium: int, records: int) -> float:
    """Return the time to read and check `records` full records."""
    shape = _core.PageShape([64], bytes(32))
    alignment = 64 if medium == SHARED else 512
    room = records * (192 + 4 + 16 + alignment) + MIB
    header = _core.VolumeHeader.plan(medium, shape, room, alignment, 64)
    metadata = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.truncate(metadata, header.metadata_bytes)
    os.pwrite(metadata, header.encode(), 0)
    pages = -1
    if medium == DISK:
        pages = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.truncate(pages, header.pages_bytes)
    volume = _core.Volume(shape, header, metadata, pages, False)
    page, scratch = np.zeros(64, dtype=np.uint8), _core.Scratch()
    for slot in range(records):
        volume.write_page(slot, page, key=b"%032d" % slot, scratch=scratch)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        found = volume.recover()
        best = min(best, time.perf_counter() - start)
        assert len(found[0]) == records
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="bytes a volume holds, in MiB")
    parser.add_argument("--shared", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name, medium, directory in (
        ("shared", SHARED, arguments.shared),
        ("disk", DISK, arguments.disk),
    ):
        for page_bytes in (2 * MIB, MIB // 16):
            figures = measure(directory, medium, page_bytes, arguments.mib * MIB)
            results[f"{name} {page_bytes // 1024} KiB, GB/s"] = figures
        milliseconds = adoption_ms(directory, medium, arguments.records)
        results[f"{name} adoption of {arguments.records} records"] = {"ms": milliseconds}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for row, figures in results.items():
        print(f"{row:40s}", "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
