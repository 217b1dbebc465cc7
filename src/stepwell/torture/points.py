"""Name the fault points of the core (csrc/fault.h), at each of which a process is killed in turn."""

from __future__ import annotations

from typing import Final

POINTS: Final = (
    "file.close",
    "file.direct_alignment",
    "file.fstat",
    "file.list",
    "file.lock",
    "file.map",
    "file.mkdir",
    "file.open",
    "file.pread",
    "file.pwrite",
    "file.rename",
    "file.reserve",
    "file.rmdir",
    "file.stat",
    "file.statfs",
    "file.sync",
    "file.sync_directory",
    "file.truncate",
    "file.unlink",
    "file.unlock",
    "file.unmap",
    "foreign.read",
    "mover.after_commit",
    "mover.after_copy",
    "mover.assertion",
    "mover.before_copy",
    "mover.begin_after",
    "mover.unit",
    "volume.after_bytes",
    "volume.after_bytes_sync",
    "volume.after_checksums",
    "volume.after_publish",
    "volume.after_record",
    "volume.after_ring",
    "volume.after_sync",
    "volume.begin",
    "volume.odd",
    "volume.retire",
    "volume.settle",
)

POWER_POINTS: Final = frozenset(
    ("file.sync", "file.sync_directory", "volume.after_bytes_sync", "volume.after_sync", "volume.settle")
)
"""Those on the way of durability "power" alone, or mostly."""

NEIGHBOUR_POINTS: Final = frozenset(("foreign.read", "mover.begin_after"))
"""Those on the way of a neighbour's pages: somebody must be there who has some."""


def occurrences(most: int) -> list[int]:
    """Return which arrivals at a point to kill at: all of the first few, then ever fewer, up to `most` of them."""
    found = [1]
    while len(found) < most:
        found.append(found[-1] + max(1, found[-1] // 2))
    return found
