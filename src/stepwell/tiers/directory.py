"""Say what one process wants of a tier directory, what it holds, what the machine is to it.

Values only; what is done with them is in volumes.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from stepwell import _core
from stepwell.clock import Clock, SystemClock
from stepwell.tiers.limits import DiskLimits, Limits, MemoryLimits
from stepwell.tiers.process_file import ProcessRecord

RING_ENTRIES = 4096  # of a new volume's append ring
# What statfs calls file systems whose files are memory: tmpfs, ramfs.
MEMORY_FILE_SYSTEMS = frozenset({0x01021994, 0x858458F6})


class Header(Protocol):
    """What the directory protocol reads and writes of a volume's header (FORMAT.md 2.1)."""

    volume_id: bytes
    fingerprint: bytes
    boot_id: bytes
    kind: int
    birth_ns: int
    epoch: int

    @property
    def medium(self) -> int:
        """1 shared, 2 disk."""

    @property
    def layers(self) -> int:
        """Checksummed pieces of a page."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def alignment(self) -> int:
        """Alignment of a slot, bytes."""

    @property
    def metadata_bytes(self) -> int:
        """Size of the `.vol` or `.meta` file."""

    @property
    def pages_bytes(self) -> int:
        """Size of the `.pages` file, 0 in shared."""

    def encode(self) -> bytes:
        """Return the 4096 bytes of the header."""


class HeaderFormat(Protocol):
    """Make and check headers: all that the directory knows of a volume's content.

    The one of the core is `CoreHeaders`.
    """

    def plan(self, *, medium: int, volume_bytes: int, alignment: int) -> Header:
        """Lay out a volume of at most `volume_bytes` in all its files.

        Raises:
            ValueError: not one page fits.
        """

    def decode(self, data: bytes, metadata_bytes: int, pages_bytes: int) -> Header:
        """Check a header against itself and the sizes of the files.

        Raises:
            ValueError: says what is wrong.
        """


@dataclass(frozen=True, slots=True)
class CoreHeaders:
    """Headers of volumes that hold pages of one shape, as csrc/volume.h lays them out."""

    shape: _core.PageShape

    def plan(self, *, medium: int, volume_bytes: int, alignment: int) -> _core.VolumeHeader:
        """Lay out a volume for pages of this shape."""
        return _core.VolumeHeader.plan(medium, self.shape, volume_bytes, alignment, RING_ENTRIES)

    def decode(self, data: bytes, metadata_bytes: int, pages_bytes: int) -> _core.VolumeHeader:
        """Check a header, of whatever shape."""
        return _core.VolumeHeader.decode(data, metadata_bytes, pages_bytes)


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """What one process wants of a tier directory. Sizes in bytes, times in seconds.

    capacity_bytes: of the whole directory, all processes together, as this process is configured.
    volume_bytes: the most that one volume takes in all its files.
    floor_bytes: what this process may claim from neighbours that have more than their floor; in
    whole volumes, at least one.
    fingerprint, kind, epoch: of the pages.
    direct_io: open pages past the page cache where the file system can (disk only).
    lock_timeout: how long the directory lock may be waited for.
    """

    path: str
    medium: Literal["shared", "disk"]
    capacity_bytes: int
    volume_bytes: int
    floor_bytes: int
    fingerprint: bytes
    epoch: int = 0
    kind: int = 1
    direct_io: bool = True
    lock_timeout: float = 5.0

    @property
    def medium_number(self) -> int:
        """The medium as headers write it."""
        return 1 if self.medium == "shared" else 2

    def limits(self) -> Limits:
        """Return what limits a reservation on this medium."""
        return MemoryLimits() if self.medium == "shared" else DiskLimits()


@dataclass(frozen=True, slots=True)
class Full:
    """No volume could be had: what one takes, what is free, what is taken, and why."""

    needed_bytes: int
    free_bytes: int
    total_bytes: int
    capacity_bytes: int
    held_bytes: int
    wanted_by_neighbours_bytes: int
    reason: str


@dataclass(eq=False, slots=True)
class HeldVolume:
    """A volume that this process is the holder of, with its files open.

    Invariant: its lock is held from the making of this object to give_back, remove, or close of the
    directory. Whoever builds a `_core.Volume` on it takes `metadata.detach()` and `pages.detach()`,
    and drops that volume before any of the three.
    """

    volume_id: str
    header: Header
    metadata: _core.Descriptor
    pages: _core.Descriptor | None  # None: they are in the metadata file
    direct_io: bool  # pages is opened with O_DIRECT
    is_adopted: bool  # it may hold pages; False: just born, all zeros
    is_rebooted: bool  # last opened for writing in another boot: its boot id is to be rewritten
    lmdb_path: str  # where its LMDB environment is, or belongs
    lock: _core.Descriptor

    @property
    def birth_ns(self) -> int:
        """When it was born, wall clock."""
        return self.header.birth_ns

    @property
    def total_bytes(self) -> int:
        """What it counts toward the directory's total."""
        return self.header.metadata_bytes + self.header.pages_bytes

    def close_files(self) -> None:
        """Close the descriptors that nobody has taken."""
        self.metadata.close()
        if self.pages is not None:
            self.pages.close()


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """What the last scan saw.

    odd: names that match and are no regular files of ours, left alone.
    unusable: volumes whose lock name is no regular file of ours, left alone.
    unreadable: orphans whose header could not be read this time.
    lost_ids: volumes of ours that another process holds too, because somebody removed the lock's
    name, or whose files somebody removed: to be given back at once, nothing more may be written to
    them.
    left_ids: orphans of our fingerprint that have been seen as such for ORPHAN_PATIENCE_NS.
    """

    total_bytes: int = 0
    held_by_others: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    neighbours: tuple[ProcessRecord, ...] = ()
    wanted_bytes: int = 0
    odd: int = 0
    unusable: int = 0
    unreadable: int = 0
    lost_ids: tuple[str, ...] = ()
    left_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class DirectoryCounts:
    """What this process did in the directory since it opened it.

    swept: what the dead had left. failed: removals that the next scan tries again, and records of
    this process that the next change writes again. dropped_touches: of neighbours' pages, that their
    owners are not told of, because there were more than the ring takes.
    """

    born: int = 0
    adopted: int = 0
    given_back: int = 0
    removed: int = 0
    evicted_orphans: int = 0
    swept_leftovers: int = 0
    swept_damaged: int = 0
    swept_processes: int = 0
    failed_removals: int = 0
    failed_publications: int = 0
    dropped_touches: int = 0


def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the machine."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


def _boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _new_id() -> str:
    return os.urandom(16).hex()


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the protocol asks of the machine, so that tests can answer in its place.

    clock: deadlines and births. boottime_ns: a clock that all processes share.
    wait: let seconds pass. limits: what may be reserved; None: those of the medium.
    """

    clock: Clock = field(default_factory=SystemClock)
    boottime_ns: Callable[[], int] = _boottime_ns
    wait: Callable[[float], None] = _wait
    boot_id: Callable[[], bytes] = boot_id
    new_id: Callable[[], str] = _new_id
    limits: Limits | None = None
