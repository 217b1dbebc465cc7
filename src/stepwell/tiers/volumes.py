"""Decide which process owns which volume of a tier directory: the protocol of FORMAT.md 1, 6, 7 and 8.

A directory has one budget for the host; its space is taken in volumes, each with one holder. Nobody runs it: whoever
takes the directory lock looks at the names (scan.py), sweeps away what the dead left, and takes what it may have.

    (no names) -birth-> t- -filled, renamed-> v- held -give back, death of the holder-> v- orphan -adoption-> v- held
                                              v- held, or an orphan whose room is needed -> x- -> (no names)

What is inside a volume is not known here, but for its header (`HeaderFormat`).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from stepwell import _core
from stepwell.clock import Clock, SystemClock
from stepwell.errors import (
    BudgetError,
    ForkedError,
    StepwellError,
    StoreClosedError,
    TierIOError,
    VolumeBusyError,
    VolumeError,
)
from stepwell.tiers import process_file
from stepwell.tiers.limits import DiskLimits, Limits, MemoryLimits
from stepwell.tiers.locks import NotTaken, holder_of, try_lock
from stepwell.tiers.process_file import ProcessRecord
from stepwell.tiers.scan import Found, Header, Orphan, Scanner, Sweep, wanted_of
from stepwell.tiers.volume_files import DIRECTORY_LOCK, VolumeNames, open_ours, remove_files

STEP_BYTES = 64 << 20  # of a reservation, between two looks at the limits
RING_ENTRIES = 4096
# An owner that does not answer a want (stopped, or stuck) is passed over after this long by the next one.
PATIENCE_NS = 1_000_000_000
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.02  # seconds between two tries at the directory lock
_ZEROS = bytes(1 << 20)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class HeaderFormat(Protocol):
    """Make and check headers. The one of the core is `CoreHeaders`."""

    def plan(self, *, medium: int, volume_bytes: int, alignment: int) -> Header:
        """Lay out a volume of at most `volume_bytes` in all its files. Raises ValueError where not one page fits."""

    def decode(self, data: bytes, metadata_bytes: int, pages_bytes: int) -> Header:
        """Check a header against itself and the sizes of the files. Raises ValueError with what is wrong."""


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

    clock: deadlines and births. boottime_ns: a clock that all processes share. wait: let seconds pass.
    limits: what may be reserved; None: those of the medium.
    """

    clock: Clock = field(default_factory=SystemClock)
    boottime_ns: Callable[[], int] = _boottime_ns
    wait: Callable[[float], None] = _wait
    boot_id: Callable[[], bytes] = boot_id
    new_id: Callable[[], str] = _new_id
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """What one process wants of a tier directory. Sizes in bytes, times in seconds.

    capacity_bytes: of the whole directory, all processes together, as this process is configured.
    volume_bytes: the most one volume takes in all its files. floor_bytes: what this process may claim from neighbours
    that have more than their floor; rounded down to whole volumes, at least one. fingerprint, kind, epoch: of the pages.
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
    lock_timeout: float = 5.0

    @property
    def medium_number(self) -> int:
        """The medium as headers write it."""
        return 1 if self.medium == "shared" else 2


@dataclass(frozen=True, slots=True)
class Full:
    """No volume could be had: what one takes, what is free, what the directory holds, and why."""

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

    Invariant: its lock is held from the making of this object to give_back, remove or close of the directory.
    Whoever builds a `_core.Volume` on it takes `metadata.detach()` and `pages.detach()`, and drops that volume first.
    """

    volume_id: str
    header: Header
    metadata: _core.Descriptor
    pages: _core.Descriptor | None  # None: they are in the metadata file
    direct_io: bool  # pages is opened with O_DIRECT
    is_adopted: bool  # it may hold pages; False: just born, all zeros
    is_rebooted: bool  # last opened for writing in another boot: the header's boot id is to be rewritten
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
    """What the last scan saw. odd: names that match and are no regular file of ours, left alone. unusable: volumes
    whose lock cannot be one, left alone. unreadable: orphans whose header could not be read this time.
    lost_ids: volumes of ours that another process now holds too, because somebody removed the lock's name.
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


@dataclass(slots=True)
class DirectoryCounts:
    """What this process did in the directory since it opened it."""

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


@dataclass(slots=True)
class _Birth:
    """A volume being born: its lock, and its t- files by suffix in the order of their renames, sized, not yet filled."""

    volume_id: str
    header: Header
    lock: _core.Descriptor
    files: dict[str, _core.Descriptor] = field(default_factory=dict)

    def close(self) -> None:
        for descriptor in self.files.values():
            descriptor.close()
        self.lock.close()


@dataclass(slots=True)
class _Process:
    """This process's own file and the lock that shows it alive."""

    process_id: str
    lock: _core.Descriptor
    file: _core.Descriptor

    @property
    def names(self) -> tuple[str, str]:
        return f"p-{self.process_id}.proc", f"p-{self.process_id}.lock"

    def close(self) -> None:
        self.file.close()
        self.lock.close()


class TierDirectory:
    """One process's part in a tier directory.

    Invariant: every volume in `held` is locked by this process and by no other; total <= capacity whenever this process
    has added to the total; names are made and removed only under the directory lock; nothing is filled under it.

    Threads: one call at a time (the store's constructor, then its keeper, then close).
    A forked child can do nothing with it but close it, which does nothing there.
    """

    def __init__(
        self, config: DirectoryConfig, headers: HeaderFormat, *, machine: Machine | None = None
    ) -> None:
        self._config = config
        self._headers = headers
        self._machine = machine or Machine()
        self._path = os.path.abspath(config.path)
        self._limits: Limits = self._machine.limits or (
            MemoryLimits() if config.medium == "shared" else DiskLimits()
        )
        self._boot_id = self._machine.boot_id()
        self._pid = os.getpid()
        self._is_open = False
        # Set by open(): alignment of slots, whether pages go past the page cache, the size of a volume of this plan.
        self._alignment = 64
        self._direct_io = False
        self._volume_bytes = 0
        self._floor_bytes = 0
        self._held: dict[str, HeldVolume] = {}
        self._process: _Process | None = None
        self._want_bytes = 0
        self._want_since_ns = 0
        self._sweep = Sweep()
        self._counts = DirectoryCounts()
        self._view = DirectoryView()
        self._scanner = Scanner(self._path, headers.decode, self._sweep)

    # ---- Opening and closing

    def open(self) -> None:
        """Check the directory and the capacity, then join the processes of the directory. Idempotent.

        Raises:
            VolumeError: the path is a symbolic link, no directory, another user's, writable by others, or remote.
            BudgetError: the capacity holds no volume, or is more than the machine has; with the numbers.
            VolumeBusyError: the directory lock was held until the deadline; names its holder.
            TierIOError: a system call failed.
        """
        self._check_process()
        if self._is_open:
            return
        with self._translated():
            self._check_directory()
            self._check_capacity()
            with self._session():
                if self._config.medium == "disk":
                    self._probe_direct_io()
                self._plan()
                self._process = self._join()
        self._is_open = True

    def close(self) -> None:
        """Let go of all volumes, which become orphans, and leave. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or not self._is_open:
            return
        self._is_open = False
        for volume in list(self._held.values()):
            self._release(volume)
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with self._translated(), self._directory_lock(self._config.lock_timeout):
                remove_files(self._path, process.names)
        except StepwellError:
            # The next scan of a living process removes what is left: its lock is free from here on.
            self._counts.failed_removals += 1
        finally:
            process.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- What this process has and saw

    @property
    def path(self) -> str:
        """The directory."""
        return self._path

    @property
    def held(self) -> tuple[HeldVolume, ...]:
        """The volumes of this process, in the order in which it took them."""
        return tuple(self._held.values())

    @property
    def held_bytes(self) -> int:
        """What they count toward the directory's total."""
        return sum(volume.total_bytes for volume in self._held.values())

    @property
    def volume_bytes(self) -> int:
        """What a volume born by this process takes; known once open."""
        return self._volume_bytes

    @property
    def floor_bytes(self) -> int:
        """The floor in whole volumes of that size; known once open."""
        return self._floor_bytes

    @property
    def lacking_bytes(self) -> int:
        """What this process lacks to its floor."""
        return max(self._floor_bytes - self.held_bytes, 0)

    @property
    def view(self) -> DirectoryView:
        """What the last scan saw."""
        return self._view

    @property
    def counts(self) -> DirectoryCounts:
        """What this process did in the directory since it opened it."""
        return replace(
            self._counts,
            swept_leftovers=self._sweep.leftovers,
            swept_damaged=self._sweep.damaged,
            swept_processes=self._sweep.processes,
            failed_removals=self._counts.failed_removals + self._sweep.failed,
        )

    # ---- Taking volumes

    def scan(self) -> DirectoryView:
        """Look at the directory, sweep away what the dead left, and return what is there.

        Raises:
            VolumeBusyError, TierIOError: as open().
        """
        with self._working(), self._session():
            pass
        return self._view

    def adopt(self) -> list[HeldVolume]:
        """Take all orphans of our fingerprint that this process may have, oldest birth first.

        Where the directory holds more than our capacity, orphans are removed first until it does not: those of other
        fingerprints, oldest first, then ours.

        Returns:
            The volumes taken.

        Raises:
            VolumeBusyError, TierIOError: as open(); nothing that was taken is lost, it is in `held`.
        """
        taken: list[HeldVolume] = []
        with self._working(), self._session() as found:
            self._evict_until(found, self._config.capacity_bytes, self._foreign(found))
            self._evict_until(found, self._config.capacity_bytes, self._ours(found))
            for orphan in self._ours(found):
                if self._refusal(found, orphan.names.total_bytes) is None:
                    volume = self._take(found, orphan)
                    if volume is not None:
                        taken.append(volume)
        self._publish()
        return taken

    def grow(self) -> HeldVolume | Full:
        """Get one more volume: an orphan of our fingerprint, else a new one, evicting orphans of others for room.

        Where this process is below its floor and gets nothing, its process file says so (`wanted` of the neighbours).

        Returns:
            The volume, or Full with the numbers.

        Raises:
            BudgetError: the space is not there although the capacity allows it: path, need, free, and what limits it.
            VolumeBusyError, TierIOError: as open(). Nothing is left behind, or the next scan removes it.
        """
        with self._working():
            with self._session() as found:
                outcome = self._take_or_begin(found)
            if isinstance(outcome, _Birth):
                outcome = self._finish(outcome)
        self._note_want(self.lacking_bytes if isinstance(outcome, Full) else None)
        return outcome

    def give_back(self, volume: HeldVolume) -> None:
        """Let go of a volume: it becomes an orphan, warm for whoever takes it. Never waits.

        Requires: the `_core.Volume` on it is dropped, with its mapping.
        """
        self._require_held(volume)
        self._release(volume)
        self._counts.given_back += 1
        self._publish()

    def remove(self, volume: HeldVolume) -> None:
        """Remove a volume with all its files and its LMDB environment.

        Requires: as give_back.

        Raises:
            TierIOError: a file could not be removed; the volume is still held, and remove may be called again.
            VolumeBusyError: as open(); nothing was done.
        """
        with self._working(), self._session() as found:
            self._require_held(volume)
            names = found.listing.volumes.get(volume.volume_id) or VolumeNames(volume.volume_id)
            names.has_lock = True
            self._scanner.remove_volume_or_raise(names)
            found.listing.volumes.pop(volume.volume_id, None)
            self._release(volume)
        self._counts.removed += 1
        self._publish()

    # ---- What neighbours want

    def wanted(self) -> int:
        """Return how many bytes this process should give back now, because a neighbour is below its floor.

        That is what starving neighbours lack beyond free room and orphans, if this process is the one furthest above its
        floor; a process that does not answer is passed over after a while by the next. At most what this process has above
        its floor, in bytes of whole volumes; 0 also while another holds the directory lock.

        Raises:
            TierIOError: a system call failed.
        """
        try:
            with self._working(), self._session(timeout=0.0) as found:
                missing = found.wanted_bytes - found.spare_bytes(self._config.capacity_bytes)
                if missing <= 0 or not self._is_my_turn(found):
                    return 0
                return self._giveable_bytes(missing)
        except VolumeBusyError:
            return 0

    def publish_want(self, nbytes: int) -> None:
        """Say in the process file that `nbytes` are lacking and cannot be had (0: nothing). grow() says it by itself."""
        with self._working():
            self._note_want(nbytes)

    # ---- Checks of open()

    def _check_directory(self) -> None:
        try:
            status = _core.file_stat(self._path)
        except FileNotFoundError:
            try:
                _core.file_mkdir(self._path, 0o700)
            except FileExistsError:
                pass  # A neighbour made it first.
            status = _core.file_stat(self._path)
        if status.is_symlink:
            raise VolumeError(f"{self._path} is a symbolic link; name the directory itself")
        if not status.is_directory:
            raise VolumeError(f"{self._path} is not a directory")
        if status.uid != os.geteuid():
            raise VolumeError(
                f"{self._path} belongs to user {status.uid}, this process runs as {os.geteuid()}; give each its own"
            )
        if status.mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise VolumeError(
                f"{self._path} can be written by others (mode {stat.S_IMODE(status.mode):04o}); chmod it to 0700"
            )
        system = _core.file_statfs(self._path)
        if system.is_network:
            raise VolumeError(
                f"{self._path} is on a network file system (type {system.type:#x}), where locks and mappings of one"
                " machine mean nothing to another; name a local directory"
            )

    def _check_capacity(self) -> None:
        capacity = self._config.capacity_bytes
        if capacity < max(self._config.volume_bytes, 1):
            raise BudgetError(
                f"{self._path}: capacity {capacity} bytes is smaller than one volume of {self._config.volume_bytes} bytes;"
                f" raise {self._config.medium}.capacity"
            )
        if self._config.floor_bytes > capacity:
            raise BudgetError(
                f"{self._path}: share {self._config.floor_bytes} bytes is more than the capacity of {capacity} bytes"
            )
        limit = self._limits.total(self._path)
        if capacity > limit.nbytes:
            raise BudgetError(
                f"{self._path}: capacity {capacity} bytes is more than {limit.nbytes} bytes ({limit.source});"
                f" lower {self._config.medium}.capacity"
            )

    def _probe_direct_io(self) -> None:
        """Find the alignment that the file system wants. Requires: the directory lock, so that the probe is nobody's."""
        name = f"t-{self._machine.new_id()}.pages"
        path = f"{self._path}/{name}"
        descriptor = self._create(path)
        try:
            process_file.write_all(descriptor.fileno(), _ZEROS[:4096], 0)
            alignment = _core.file_direct_alignment(path)
        finally:
            descriptor.close()
            remove_files(self._path, [name])
        self._direct_io = alignment > 0
        self._alignment = max(alignment, 512) if alignment > 0 else 4096

    def _plan(self) -> None:
        try:
            header = self._new_header()
        except ValueError as error:
            raise BudgetError(
                f"{self._path}: a volume of {self._config.volume_bytes} bytes holds no page: {error}"
            ) from error
        self._volume_bytes = header.metadata_bytes + header.pages_bytes
        volumes = max(self._config.floor_bytes // self._config.volume_bytes, 1)
        self._floor_bytes = volumes * self._volume_bytes

    def _new_header(self) -> Header:
        return self._headers.plan(
            medium=self._config.medium_number,
            volume_bytes=self._config.volume_bytes,
            alignment=self._alignment,
        )

    def _join(self) -> _Process:
        """Make this process's file. Requires: the directory lock."""
        process_id = self._machine.new_id()
        lock_path = f"{self._path}/p-{process_id}.lock"
        lock = self._locked_new(lock_path)
        try:
            file = self._create(f"{self._path}/p-{process_id}.proc")
        except OSError:
            self._undo_names([os.path.basename(lock_path)])
            lock.close()
            raise
        process = _Process(process_id, lock, file)
        try:
            process_file.initialise(file.fileno(), self._record(process_id))
        except OSError:
            self._undo_names(process.names)
            process.close()
            raise
        return process

    # ---- Steps of taking

    def _ours(self, found: Found) -> list[Orphan]:
        return [orphan for orphan in found.orphans if self._is_ours(orphan)]

    def _foreign(self, found: Found) -> list[Orphan]:
        return [orphan for orphan in found.orphans if not self._is_ours(orphan)]

    def _is_ours(self, orphan: Orphan) -> bool:
        header = orphan.header
        return (
            header is not None
            and header.fingerprint == self._config.fingerprint
            and header.kind == self._config.kind
            and header.medium == self._config.medium_number
        )

    def _refusal(self, found: Found, nbytes: int) -> str | None:
        """Return why this process may not take `nbytes` more, None if it may.

        Up to its floor it may. Above, only what leaves enough for the neighbours that are below theirs and say so:
        otherwise whoever looks first would take what was given back for another.
        """
        held = self.held_bytes
        if held + nbytes > self._config.capacity_bytes:
            return "this process holds its whole capacity"
        if held + nbytes <= self._floor_bytes:
            return None
        left = found.spare_bytes(self._config.capacity_bytes) - nbytes
        if found.wanted_bytes > 0 and left < found.wanted_bytes:
            return "a neighbour below its floor comes first"
        return None

    def _take(self, found: Found, orphan: Orphan) -> HeldVolume | None:
        """Make an orphan ours. None: its files cannot be opened (any more); it stays an orphan."""
        assert orphan.header is not None
        try:
            volume = self._open_volume(orphan.header, orphan.lock, is_adopted=True)
        except ValueError:
            return None
        found.taken(orphan)
        self._held[volume.volume_id] = volume
        self._counts.adopted += 1
        return volume

    def _open_volume(
        self, header: Header, lock: _core.Descriptor, *, is_adopted: bool
    ) -> HeldVolume:
        stem = f"{self._path}/v-{header.volume_id.hex()}"
        if self._config.medium == "shared":
            metadata, pages = open_ours(f"{stem}.vol", os.O_RDWR), None
        else:
            metadata = open_ours(f"{stem}.meta", os.O_RDWR)
            try:
                direct = self._is_direct(header)
                pages = open_ours(f"{stem}.pages", os.O_RDWR | (os.O_DIRECT if direct else 0))
            except (OSError, ValueError):
                metadata.close()
                raise
        return HeldVolume(
            volume_id=header.volume_id.hex(),
            header=header,
            metadata=metadata,
            pages=pages,
            direct_io=pages is not None and self._is_direct(header),
            is_adopted=is_adopted,
            is_rebooted=header.boot_id != self._boot_id,
            lmdb_path=f"{stem}.lmdb",
            lock=lock,
        )

    def _is_direct(self, header: Header) -> bool:
        """Whether its pages can go past the page cache: not if it was laid out for a smaller alignment than is needed here."""
        return self._direct_io and header.alignment % self._alignment == 0

    def _take_or_begin(self, found: Found) -> HeldVolume | _Birth | Full:
        """Under the directory lock: take an orphan, or make room and begin a birth, or say why not."""
        refusal: str | None = None
        for orphan in self._ours(found):
            refusal = self._refusal(found, orphan.names.total_bytes)
            if refusal is None:
                volume = self._take(found, orphan)
                if volume is not None:
                    return volume
        needed, capacity = self._volume_bytes, self._config.capacity_bytes
        refusal = refusal or self._refusal(found, needed)
        foreign = self._foreign(found)
        if refusal is None:
            evictable = sum(orphan.names.total_bytes for orphan in foreign)
            if found.total_bytes - evictable + needed > capacity:
                refusal = "the directory is full"
        if refusal is None:
            self._evict_until(found, capacity - needed, foreign)
            if found.total_bytes + needed <= capacity:
                return self._begin()
            refusal = "the directory is full, and orphans in it cannot be removed"
        return Full(
            needed_bytes=needed,
            free_bytes=max(capacity - found.total_bytes, 0),
            total_bytes=found.total_bytes,
            capacity_bytes=capacity,
            held_bytes=self.held_bytes,
            wanted_by_neighbours_bytes=found.wanted_bytes,
            reason=refusal,
        )

    def _evict_until(self, found: Found, most_bytes: int, orphans: list[Orphan]) -> None:
        """Remove orphans in the order given until the directory holds at most `most_bytes`."""
        for orphan in orphans:
            if found.total_bytes <= most_bytes:
                return
            if self._scanner.remove_volume(orphan.names):
                found.listing.volumes.pop(orphan.names.volume_id, None)
                self._counts.evicted_orphans += 1
            found.taken(orphan)
            orphan.lock.close()

    # ---- Birth

    def _begin(self) -> _Birth:
        """Make the names of a new volume: from here on its size counts. Requires: the directory lock."""
        volume_id = self._machine.new_id()
        header = self._new_header()
        header.volume_id = bytes.fromhex(volume_id)
        header.fingerprint = self._config.fingerprint
        header.kind = self._config.kind
        header.boot_id = self._boot_id
        header.birth_ns = self._machine.clock.wall_ns()
        header.epoch = self._config.epoch
        birth = _Birth(volume_id, header, self._locked_new(f"{self._path}/v-{volume_id}.lock"))
        try:
            for suffix, nbytes in self._sizes(header):
                birth.files[suffix] = self._create(f"{self._path}/t-{volume_id}.{suffix}")
                _core.file_truncate(birth.files[suffix].fileno(), nbytes)
        except OSError:
            self._undo_birth_names(birth)
            birth.close()
            raise
        return birth

    def _sizes(self, header: Header) -> tuple[tuple[str, int], ...]:
        """Suffixes and sizes of a volume's files, in the order in which they get their names: the one that counts last."""
        if self._config.medium == "shared":
            return (("vol", header.metadata_bytes),)
        return (("pages", header.pages_bytes), ("meta", header.metadata_bytes))

    def _finish(self, birth: _Birth) -> HeldVolume:
        """Fill a volume without the directory lock, then name it."""
        is_named = False
        try:
            for suffix, nbytes in self._sizes(birth.header):
                self._reserve(birth.files[suffix], f"{self._path}/t-{birth.volume_id}.{suffix}", nbytes)
            metadata = birth.files["vol" if self._config.medium == "shared" else "meta"]
            process_file.write_all(metadata.fileno(), birth.header.encode(), 0)
            with self._directory_lock(self._config.lock_timeout):
                for suffix in birth.files:
                    stem = f"{birth.volume_id}.{suffix}"
                    _core.file_rename(f"{self._path}/t-{stem}", f"{self._path}/v-{stem}")
            is_named = True
        finally:
            if not is_named:
                self._abandon(birth)
        return self._own(birth)

    def _own(self, birth: _Birth) -> HeldVolume:
        for descriptor in birth.files.values():
            descriptor.close()
        try:
            volume = self._open_volume(birth.header, birth.lock, is_adopted=False)
        except (OSError, ValueError) as error:
            # It exists, whole and empty: an orphan that the next grow() takes.
            birth.lock.close()
            if isinstance(error, ValueError):
                raise VolumeError(str(error)) from error
            raise
        self._held[volume.volume_id] = volume
        self._counts.born += 1
        return volume

    def _reserve(self, descriptor: _core.Descriptor, path: str, nbytes: int) -> None:
        """Allocate a file in steps, looking at the limits before each.

        Raises:
            BudgetError: a step is more than what is free, or the file system said so.
            OSError: the file system failed otherwise.
        """
        for offset in range(0, nbytes, STEP_BYTES):
            step = min(STEP_BYTES, nbytes - offset)
            free = self._limits.available(self._path)
            if step > free.nbytes:
                raise BudgetError(
                    f"{path}: need {nbytes - offset} bytes more, {free.nbytes} free ({free.source});"
                    f" lower {self._config.medium}.capacity, now {self._config.capacity_bytes}"
                )
            try:
                _allocate(descriptor.fileno(), offset, step)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise BudgetError(
                    f"{path}: need {nbytes - offset} bytes more, the file system has no room ({error.strerror});"
                    f" {free.nbytes} were free ({free.source})"
                ) from error

    def _abandon(self, birth: _Birth) -> None:
        """Give up a birth: its space at once, its names under the directory lock if that can be had."""
        for descriptor in birth.files.values():
            try:
                _core.file_truncate(descriptor.fileno(), 0)
            except OSError:
                self._counts.failed_removals += 1
        try:
            with self._directory_lock(self._config.lock_timeout):
                self._undo_birth_names(birth)
        except (StepwellError, OSError):
            # Any scan removes them: the lock is free from here on, and a t- name, or pages without metadata, no volume.
            self._counts.failed_removals += 1
        finally:
            birth.close()

    def _undo_birth_names(self, birth: _Birth) -> None:
        files = [f"{stage}-{birth.volume_id}.{suffix}" for suffix in birth.files for stage in "tv"]
        self._undo_names([*files, f"v-{birth.volume_id}.lock"])

    def _undo_names(self, names: list[str] | tuple[str, ...]) -> None:
        """Remove names of ours after an error, in this order; what cannot be removed is left to the next scan."""
        for name in names:
            try:
                remove_files(self._path, [name])
            except OSError:
                self._counts.failed_removals += 1
                return

    def _create(self, path: str) -> _core.Descriptor:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        return _core.Descriptor(_core.file_open(path, flags, 0o600))

    def _locked_new(self, path: str) -> _core.Descriptor:
        """Make a lock file and lock it. Requires: the directory lock, so nobody else can have locked it first."""
        try:
            lock = try_lock(path, flags=os.O_CREAT | os.O_EXCL)
        except OSError as error:
            if not isinstance(error, FileExistsError):
                self._undo_names([os.path.basename(path)])
            raise
        if isinstance(lock, NotTaken):
            raise OSError(errno.EBUSY, "a new lock file is not ours", path)
        return lock

    # ---- Wants

    def _is_my_turn(self, found: Found) -> bool:
        """Whether this process gives: the one furthest above its floor, or the next where that one does not answer."""
        assert self._process is not None
        excesses = [(-record.excess_bytes, record.process_id.hex()) for record in found.neighbours]
        mine = (-max(self.held_bytes - self._floor_bytes, 0), self._process.process_id)
        rank = sorted([*excesses, mine]).index(mine)
        since = min(
            record.want_since_ns for record in found.neighbours if wanted_of(record) > 0
        )
        return self._machine.boottime_ns() - since >= rank * PATIENCE_NS

    def _giveable_bytes(self, missing: int) -> int:
        """Return the bytes of whole volumes, up to about `missing`, that leave this process at its floor or above."""
        left, given = self.held_bytes, 0
        for size in sorted(volume.total_bytes for volume in self._held.values()):
            if given >= missing or left - size < self._floor_bytes:
                break
            left -= size
            given += size
        return given

    def _note_want(self, nbytes: int | None) -> None:
        """Publish what is lacking; None: as much as before, less what has come since."""
        if nbytes is None:
            nbytes = min(self._want_bytes, self.lacking_bytes)
        if nbytes > 0 and self._want_bytes == 0:
            self._want_since_ns = self._machine.boottime_ns()
        if nbytes == 0:
            self._want_since_ns = 0
        self._want_bytes = nbytes
        self._publish()

    def _publish(self) -> None:
        """Write the process file. It is a hint to neighbours: a failure is counted, and the next change writes it again."""
        process = self._process
        if process is None:
            return
        try:
            record = self._record(process.process_id)
            process_file.write_all(process.file.fileno(), record.encode(), 0)
        except OSError:
            self._counts.failed_publications += 1

    def _record(self, process_id: str) -> ProcessRecord:
        return ProcessRecord(
            process_id=bytes.fromhex(process_id),
            pid=self._pid,
            boot_id=self._boot_id,
            capacity_bytes=self._config.capacity_bytes,
            floor_bytes=self._floor_bytes,
            held_bytes=self.held_bytes,
            want_bytes=self._want_bytes,
            want_since_ns=self._want_since_ns,
        )

    # ---- Locks and guards of every call

    def _release(self, volume: HeldVolume) -> None:
        del self._held[volume.volume_id]
        volume.close_files()
        volume.lock.close()

    def _require_held(self, volume: HeldVolume) -> None:
        self._check_process()
        if self._held.get(volume.volume_id) is not volume:
            raise StoreClosedError(f"volume {volume.volume_id} is not held by this directory any more")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"{self._path} was opened by pid {self._pid}; open it anew in this process")

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._check_process()
        if not self._is_open:
            raise StoreClosedError(f"the directory {self._path} is not open")
        with self._translated():
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn a failed system call into an error that names tier and path."""
        try:
            yield
        except TierIOError:
            raise
        except OSError as error:
            message = f"{self._config.medium} tier: {error.strerror or error}"
            raise TierIOError(error.errno, message, error.filename or self._path) from error

    @contextmanager
    def _session(self, timeout: float | None = None) -> Iterator[Found]:
        """Hold the directory lock over a scan and what follows from it."""
        with self._directory_lock(self._config.lock_timeout if timeout is None else timeout):
            found = Found()
            try:
                own = {volume_id: volume.lock for volume_id, volume in self._held.items()}
                process_id = self._process.process_id if self._process else None
                self._scanner.scan(found, own=own, own_process=process_id)
                self._renew(found)
                self._view = _view_of(found)
                yield found
            finally:
                found.close()

    def _renew(self, found: Found) -> None:
        while found.renewed:
            volume_id, lock = found.renewed.popitem()
            self._held[volume_id].lock.close()
            self._held[volume_id].lock = lock

    @contextmanager
    def _directory_lock(self, timeout: float) -> Iterator[None]:
        """Hold the directory lock.

        Raises:
            VolumeBusyError: it was held by others for `timeout` seconds.
        """
        path = f"{self._path}/{DIRECTORY_LOCK}"
        deadline = self._machine.clock.monotonic() + timeout
        pause = _FIRST_WAIT
        while True:
            lock = try_lock(path, flags=os.O_CREAT)
            if lock is NotTaken.ODD:
                raise VolumeError(f"{path} is not a regular file of this user; remove it")
            if not isinstance(lock, NotTaken):
                break
            if self._machine.clock.monotonic() >= deadline:
                raise VolumeBusyError(
                    f"{path} was held for {timeout:g} s by {holder_of(path)}; wait for it, or end it if it is stopped"
                )
            self._machine.wait(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
        try:
            yield
        finally:
            lock.close()


def _view_of(found: Found) -> DirectoryView:
    return DirectoryView(
        total_bytes=found.total_bytes,
        held_by_others=found.held_by_others,
        orphans=len(found.orphans),
        orphan_bytes=found.orphan_bytes,
        neighbours=tuple(found.neighbours),
        wanted_bytes=found.wanted_bytes,
        odd=found.listing.odd,
        unusable=found.unusable,
        unreadable=sum(orphan.header is None for orphan in found.orphans),
        lost_ids=tuple(found.lost),
    )


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    """Give a range of a file its blocks; by writing zeros where the file system knows no fallocate."""
    try:
        _core.file_reserve(fd, offset, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        for start in range(offset, offset + nbytes, len(_ZEROS)):
            end = min(start + len(_ZEROS), offset + nbytes)
            process_file.write_all(fd, _ZEROS[: end - start], start)
