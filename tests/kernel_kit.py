"""What tests of checksums, hashes and copies share: a reference, memory with guards, and every way to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from stepwell import _core

Bytes = npt.NDArray[np.uint8]

CHECKSUMS = _core.crc32c_implementations()
HASHES = _core.sha256_implementations()
GUARD = 0xA5
GUARD_BYTES = 128

EDGES = (0, 8, 64, 128, 256, 1024, 2048, 3072, 4096)
"""Where the kernels change their ways: words, lines, small blocks, blocks, streaming, prefetching ahead."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of some bytes behind others, a byte at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


@contextmanager
def checksums_by(implementation: str) -> Iterator[None]:
    """Compute checksums and copy by one implementation."""
    assert _core.use_crc32c(implementation)
    try:
        yield
    finally:
        assert _core.use_crc32c(CHECKSUMS[0])


@contextmanager
def hashes_by(implementation: str) -> Iterator[None]:
    """Hash by one implementation."""
    assert _core.use_sha256(implementation)
    try:
        yield
    finally:
        assert _core.use_sha256(HASHES[0])


class Guarded:
    """Bytes at a given distance from a cache line, between guards.

    whole: all of it, to compare; inside: what a copy may touch, from `first` on.
    """

    def __init__(self, size: int, at: int = 0) -> None:
        self.whole = np.full(size + 2 * GUARD_BYTES + 64, GUARD, np.uint8)
        self.first = GUARD_BYTES + (at - self.whole.ctypes.data - GUARD_BYTES) % 64
        self.inside: Bytes = self.whole[self.first : self.first + size]

    def fill(self, random: np.random.Generator) -> None:
        """Put random bytes everywhere, guards too."""
        self.whole[:] = random.integers(0, 256, self.whole.size, dtype=np.uint8)
