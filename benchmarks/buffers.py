"""Memory for direct I/O, as the core's workers have it."""

from __future__ import annotations

import mmap

import numpy as np

HUGE_PAGE = 2 << 20


def huge_buffers(count: int, size: int) -> list[memoryview]:
    """Return buffers that begin on a huge page each: a disk is told of one piece of memory then, not of hundreds."""
    room = -(-size // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, count * room + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    return [memoryview(memory)[first + i * room :][:size] for i in range(count)]
