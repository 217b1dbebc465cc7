"""Decide which process owns which volume of a tier directory (FORMAT.md 1, 6, 7, 8).

A directory has one budget for the host; its space is taken in volumes, each with one holder. Nobody
runs it: whoever takes the directory lock looks at the names (scan.py), sweeps away what the dead
left, and takes what it may have.

    (no names) -birth-> t- -filled, renamed-> v- held -give back, death of the holder-> v- orphan
    -adoption-> v- held
                                              v- held, or an orphan whose room is needed -> x- ->
                                              (no names)

What is inside a volume is not known here, but for its header (`HeaderFormat`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.config import show_bytes
from stepwell.errors import (
    BudgetError,
    ForkedError,
    StepwellError,
    StepwellUsageError,
    StoreClosedError,
    TierIOError,
    VolumeBusyError,
    VolumeError,
)
from stepwell.tiers.birth import Birth, Midwife
from stepwell.tiers.cold import ColdCounts, fingerprint_text
from stepwell.tiers.directory import (
    MEMORY_FILE_SYSTEMS,
    DirectoryConfig,
    DirectoryCounts,
    DirectoryView,
    Full,
    Header,
    HeaderFormat,
    HeldVolume,
    Machine,
)
from stepwell.tiers.entry import check_directory, directory_lock
from stepwell.tiers.process_file import OwnProcessFile, ProcessRecord, Touch
from stepwell.tiers.scan import Found, Orphan, Scanner, Sweep, wanted_of
from stepwell.tiers.touches import Touches
from stepwell.tiers.volume_files import (
    VolumeNames,
    create_file,
    open_directory,
    open_ours,
    remove_until_failure,
)

# An owner that does not answer a want (stopped, or stuck) is passed over after this long.
PATIENCE_NS = 1_000_000_000
# An orphan that nobody needed is left this long to whoever may be starting in place of the dead.
ORPHAN_PATIENCE_NS = 1_000_000_000
# What a living process's keeper waits at most for the directory lock: it has other duties, and comes
# again. A neighbour that was stopped with the lock in its hands costs it no more.
KEEPER_LOCK_SECONDS = 0.1
# To name a volume that was filled, and to leave: worth a longer wait, not a stopped neighbour's.
LEAVE_LOCK_SECONDS = 0.5
# To look whether somebody lacks something.
LOOK_LOCK_SECONDS = 0.02


class TierDirectory:
    """One process's part in a tier directory.

    Invariant: every volume in `held` is locked by this process and by no other; total <= capacity
    whenever this process has added to the total; names are made and removed only under the
    directory lock, and nothing is filled under it.

    Threads: one call at a time (the store's constructor, then its keeper, then close), but for
    note_touches, which any thread may call.
    A forked child can do nothing with it but close it, which does nothing there.
    """

    def __init__(
        self, config: DirectoryConfig, headers: HeaderFormat, *, machine: Machine | None = None
    ) -> None:
        self._config = config
        self._headers = headers
        self._machine = machine or Machine()
        self._path = os.path.abspath(config.path)
        self._limits = self._machine.limits or config.limits()
        self._boot_id = self._machine.boot_id()
        self._pid = os.getpid()
        self._is_open = False
        # Found by open(): the alignment of slots, whether pages can go past the page cache, whether
        # files are memory, what a volume of this plan takes, and the floor in whole volumes of that
        # size.
        self._alignment = 64
        self._direct_io = False
        self._is_in_memory = False
        self._volume_bytes = 0
        self._floor_bytes = 0
        self._held: dict[str, HeldVolume] = {}
        self._process: OwnProcessFile | None = None
        self._opened = _core.Descriptor(-1)  # the directory: while it is open no other gets its inode number
        self._birth_bytes = 0  # of the volume being born: its files count, and its lock is ours
        self._want_bytes = 0
        self._want_since_ns = 0
        self._orphan_since_ns: dict[str, int] = {}  # those of our fingerprint
        self._touches = Touches(self._path)
        self._sweep = Sweep()
        self._counts = DirectoryCounts()
        self._view = DirectoryView()
        self._scanner = Scanner(self._path, headers.decode, self._sweep)
        self._midwife = Midwife(self._path, config, self._limits)

    # Opening and closing

    def open(self) -> None:
        """Check directory and capacity, then join the processes of the directory. Idempotent.

        Raises:
            VolumeError: the path is a symbolic link, no directory, another user's, writable by
                others, or on a network file system.
            BudgetError: the capacity holds no volume, or is more than the machine has.
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
                self._join()
        self._is_open = True

    def rejoin(self) -> None:
        """Make the directory anew, if it is not there, and join it as open() does: for one that `is_removed`.

        What is still held is lost: it is to be given back.

        Raises:
            VolumeError, VolumeBusyError, TierIOError: as open(); nothing was changed, and it may be called again.
        """
        with self._working():
            self._check_directory()
            with self._session():
                process, opened = self._process, self._opened
                self._join()
            opened.close()
            if process is not None:
                process.close()

    def _join(self) -> None:
        """Look at the file system, and say in the directory that we are there. Requires: the directory lock."""
        if self._config.medium == "disk":
            self._probe_direct_io()
        self._plan()
        opened = open_directory(self._path)
        try:
            record = self._record(bytes.fromhex(self._machine.new_id()))
            self._process = OwnProcessFile.create(self._path, record)
        except BaseException:
            opened.close()
            raise
        self._opened = opened

    def close(self) -> None:
        """Let go of all volumes, which become orphans, and leave. Idempotent.

        Does nothing in a forked child: there it has nothing.
        """
        if os.getpid() != self._pid or not self._is_open:
            return
        self._is_open = False
        self._opened.close()
        for volume in list(self._held.values()):
            self._release(volume)
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with self._translated(), self._directory_lock(self._at_most(LEAVE_LOCK_SECONDS)):
                self._counts.failed_removals += not process.remove()
        except StepwellError:
            # The next scan of a living process removes it: its lock is free from here on.
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

    # What this process has and saw

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
    def is_in_memory(self) -> bool:
        """Whether the directory's files are memory (tmpfs, ramfs); known once open."""
        return self._is_in_memory

    @property
    def direct_io(self) -> bool:
        """Whether the file system takes pages past the page cache; known once open."""
        return self._direct_io

    @property
    def is_removed(self) -> bool:
        """Whether the path is not the directory that was joined any more: somebody removed it, or put another there."""
        if not self._is_open:
            return False
        try:
            named = os.stat(self._path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # it cannot be said now
            return False
        opened = os.fstat(self._opened.fileno())
        return (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino)

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
            dropped_touches=self._touches.dropped,
        )

    @property
    def cold(self) -> ColdCounts:
        """What was not found again in it, and why."""
        return self._sweep.cold

    # Taking and leaving volumes

    def scan(self) -> DirectoryView:
        """Look at the directory, sweep away what the dead left, and return what is there.

        Raises:
            VolumeBusyError, TierIOError: as open().
        """
        with self._working(), self._session():
            return self._view

    def adopt_to_floor(self) -> list[HeldVolume]:
        """Take orphans of our fingerprint up to our floor, oldest birth first: for a process that starts.

        Where the directory holds more than our capacity, orphans are removed until it does not:
        those of other fingerprints first, oldest first, then ours.

        Returns:
            The volumes taken.

        Raises:
            VolumeBusyError, TierIOError: as open(); what was taken before that is in `held`.
        """
        with self._working(), self._session() as found:
            ours, foreign = self._orphans(found)
            self._evict_until(found, self._config.capacity_bytes, [*foreign, *ours])
            taken = self._adopt_some(found, most_bytes=self.lacking_bytes)
        self._publish()
        return taken

    def adopt(self) -> list[HeldVolume]:
        """Take all orphans of our fingerprint that this process may have, oldest birth first.

        It may have its floor, and above it what living neighbours do not lack to theirs.

        Returns, Raises: as adopt_to_floor.
        """
        taken = self.adopt_to_floor()
        with self._working(), self._session() as found:
            taken += self._adopt_some(found, most_bytes=self._config.capacity_bytes)
        self._publish()
        return taken

    def adopt_left(self) -> list[HeldVolume]:
        """Take our part of the orphans that nobody has taken for a while: for a process that lives.

        Who starts in place of the dead finds them until then. The part is what is left, divided by
        the processes that live, so that whoever looks first does not get all.

        Returns:
            The volumes taken; none while another holds the directory lock.

        Raises:
            TierIOError: a system call failed; what was taken before that is in `held`.
        """
        left = set(self._view.left_ids)
        if not left:
            return []
        try:
            with self._working(), self._session(LOOK_LOCK_SECONDS) as found:
                living = len(found.neighbours) + 1
                count = -(-len(left) // living)
                taken = self._adopt_some(found, most_bytes=self._config.capacity_bytes, ids=left, most=count)
        except VolumeBusyError:
            return []
        self._publish()
        return taken

    def grow(self, *, lock_timeout: float | None = None) -> HeldVolume | Full:
        """Get one more volume: an orphan of our fingerprint, else a new one.

        Orphans of other fingerprints are evicted where their room is needed. Where this process is
        below its floor and gets nothing, its process file says so: see `wanted`.

        Args:
            lock_timeout: seconds for which others may hold the directory lock; None: as configured.

        Returns:
            The volume, or Full with the numbers.

        Raises:
            BudgetError: the space is not there although the capacity allows it: path, need, free,
                and what limits it.
            VolumeBusyError, TierIOError: as open(). Nothing is left behind that the next scan,
                of whichever process, does not remove.
        """
        with self._working():
            with self._session(lock_timeout) as found:
                outcome = self._take_or_begin(found)
                if isinstance(outcome, Birth):
                    self._note_birth(self._volume_bytes)  # before others look: they count what we lack
            if isinstance(outcome, Birth):
                try:
                    outcome = self._finish(outcome)
                finally:
                    self._note_birth(0)
        if isinstance(outcome, Full):
            self._note_want(self.lacking_bytes)
        else:
            self._note_want(min(self._want_bytes, self.lacking_bytes))
        return outcome

    def give_back(self, volume: HeldVolume) -> None:
        """Let go of a volume: it becomes an orphan, warm for whoever takes it. Never waits.

        Requires: the `_core.Volume` on it is dropped, and its mapping with it.
        """
        self._require_held(volume)
        self._release(volume)
        self._counts.given_back += 1
        self._publish()

    def remove(self, volume: HeldVolume) -> None:
        """Remove a volume with all its files and its LMDB environment.

        Requires: as give_back.

        Raises:
            TierIOError: a file could not be removed; the volume is still held, and remove may be
                called again.
            VolumeBusyError: as open(), or the volume was lost to another process; nothing was done.
        """
        self._require_held(volume)
        with self._working(), self._session() as found:
            if volume.volume_id in found.lost:
                raise VolumeBusyError(
                    f"volume {volume.volume_id} is held by another process, since somebody removed"
                    " its lock file; give it back"
                )
            names = found.listing.volumes.get(volume.volume_id) or VolumeNames(volume.volume_id)
            names.has_lock = True
            self._scanner.remove_volume_or_raise(names)
            self._release(volume)
        self._counts.removed += 1
        self._publish()

    # What neighbours want

    def wanted(self) -> int:
        """Return how many bytes this process should give back now for a neighbour below its floor.

        That is what starving neighbours lack beyond free room and orphans, if this process is the
        one furthest above its floor; one that does not answer is passed over after a while.

        Returns:
            Bytes of whole volumes, at most what is above this process's floor; 0 also while
            another holds the directory lock.

        Raises:
            TierIOError: a system call failed.
        """
        try:
            with self._working(), self._session(LOOK_LOCK_SECONDS) as found:
                missing = found.wanted_bytes - found.spare_bytes(self._config.capacity_bytes)
                if missing <= 0 or not self._is_my_turn(found):
                    return 0
                return self._giveable_bytes(missing)
        except VolumeBusyError:
            return 0

    def publish_want(self, nbytes: int) -> None:
        """Say in the process file that `nbytes` are lacking and cannot be had; 0: nothing.

        grow() says it by itself; this is for who knows better.
        """
        with self._working():
            self._note_want(nbytes)

    # What neighbours use

    def note_touches(
        self,
        volume_ids: Sequence[bytes],
        slots: Sequence[int] | npt.NDArray[np.uint32],
        generations: Sequence[int] | npt.NDArray[np.uint64],
    ) -> None:
        """Remember that pages of neighbours' volumes were used; `Touches.note` has the arguments. Threads: any."""
        self._touches.note(volume_ids, slots, generations)

    def touched(self) -> list[Touch]:
        """Tell owners what note_touches was given, and return what neighbours used of our volumes.

        Returns:
            (volume id, slot, generation) of volumes held by this process, since the last call; at
            most RING_ENTRIES for each neighbour of the last scan. Slots and generations are
            what a neighbour wrote, unchecked. A neighbour that was not seen before tells only what
            comes from now on.
        """
        self._check_process()
        if self._process is not None and not self._touches.tell(self._process):
            self._counts.failed_publications += 1
        neighbours = [record.process_id.hex() for record in self._view.neighbours]
        return self._touches.read(neighbours, of={bytes.fromhex(volume_id) for volume_id in self._held})

    # Checks of open()

    def _check_directory(self) -> None:
        try:
            _core.file_stat(self._path)
        except FileNotFoundError:
            if not os.path.isdir(os.path.dirname(self._path)):
                raise VolumeError(f"{self._path} has no parent directory; make it first") from None
            with suppress(FileExistsError):  # A neighbour may make it at the same time.
                _core.file_mkdir(self._path, 0o700)
        check_directory(self._path)
        self._is_in_memory = _core.file_statfs(self._path).type in MEMORY_FILE_SYSTEMS

    def _check_capacity(self) -> None:
        config = self._config
        if config.capacity_bytes < max(config.volume_bytes, 1):
            raise BudgetError(
                f"{self._path}: capacity {show_bytes(config.capacity_bytes)} is smaller than one volume"
                f" of {show_bytes(config.volume_bytes)}; raise {config.medium}.capacity"
            )
        if config.floor_bytes > config.capacity_bytes:
            raise BudgetError(
                f"{self._path}: share {show_bytes(config.floor_bytes)} is more than the capacity of"
                f" {show_bytes(config.capacity_bytes)}; lower {config.medium}.share"
            )
        limit = self._limits.total(self._path)
        if config.capacity_bytes > limit.nbytes:
            raise BudgetError(
                f"{self._path}: capacity {show_bytes(config.capacity_bytes)} is more than"
                f" {show_bytes(limit.nbytes)} ({limit.source}); lower {config.medium}.capacity"
            )

    def _probe_direct_io(self) -> None:
        """Find the alignment that the file system wants. Requires: the directory lock."""
        # An empty file is asked: the directory may be full, and every byte of a t- name counts.
        name = f"t-{self._machine.new_id()}.pages"
        try:
            create_file(f"{self._path}/{name}").close()
            alignment = _core.file_direct_alignment(f"{self._path}/{name}")
        finally:
            remove_until_failure(self._path, [name])
        self._direct_io = alignment > 0
        self._alignment = max(alignment, 512) if self._direct_io else 4096

    def _plan(self) -> None:
        config = self._config
        try:
            header = self._new_header()
        except ValueError as error:
            raise BudgetError(
                f"{self._path}: a volume of {config.volume_bytes} bytes holds no page ({error});"
                f" raise {config.medium}.volume_bytes"
            ) from error
        self._volume_bytes = header.metadata_bytes + header.pages_bytes
        self._floor_bytes = self._volume_bytes * max(config.floor_bytes // config.volume_bytes, 1)

    def _new_header(self) -> Header:
        return self._headers.plan(
            medium=self._config.medium_number,
            volume_bytes=self._config.volume_bytes,
            alignment=self._alignment,
        )

    # Steps of taking. Requires: the directory lock, but for _finish.

    def _orphans(self, found: Found) -> tuple[list[Orphan], list[Orphan]]:
        """Return the orphans that we could use, and the others; each oldest first."""
        ours: list[Orphan] = []
        foreign: list[Orphan] = []
        for orphan in found.orphans:
            if self._is_ours(orphan.header):
                ours.append(orphan)
                continue
            foreign.append(orphan)
            if orphan.header is not None:
                text = fingerprint_text(orphan.header, self._new_header(), self._config.fingerprint)
                self._sweep.cold.note(orphan.names.volume_id, "fingerprint", text)
        return ours, foreign

    def _is_ours(self, header: Header | None) -> bool:
        config = self._config
        return (
            header is not None
            and header.fingerprint == config.fingerprint
            and header.kind == config.kind
            and header.medium == config.medium_number
        )

    def _refusal(self, found: Found, nbytes: int) -> str | None:
        """Return why this process may not take `nbytes` more, None if it may.

        Up to its floor it may. Above, only what leaves enough for the living that are below theirs,
        also those that have just come: otherwise whoever looks first takes what was given back for
        another, or all that the dead of eight have left.
        """
        held = self.held_bytes
        if held + nbytes > self._config.capacity_bytes:
            return "this process holds its whole capacity"
        lacking = found.lacking_bytes
        if held + nbytes <= self._floor_bytes or lacking == 0:
            return None
        if found.spare_bytes(self._config.capacity_bytes) - nbytes < lacking:
            return "a neighbour below its floor comes first"
        return None

    def _adopt_some(
        self, found: Found, *, most_bytes: int, ids: set[str] | None = None, most: int | None = None
    ) -> list[HeldVolume]:
        """Take orphans of our fingerprint: at most so many bytes and volumes, of these ids (None: any)."""
        taken: list[HeldVolume] = []
        for orphan in self._orphans(found)[0]:
            nbytes = orphan.names.total_bytes
            if most is not None and len(taken) >= most:
                break
            if ids is not None and orphan.names.volume_id not in ids:
                continue
            if nbytes <= most_bytes and self._refusal(found, nbytes) is None:
                volume = self._take(found, orphan)
                if volume is not None:
                    most_bytes -= nbytes
                    taken.append(volume)
        return taken

    def _take_or_begin(self, found: Found) -> HeldVolume | Birth | Full:
        """Take an orphan, or make room and begin a birth, or say why not."""
        needed, capacity = self._volume_bytes, self._config.capacity_bytes
        ours, foreign = self._orphans(found)
        for orphan in ours:
            if self._refusal(found, orphan.names.total_bytes) is None:
                volume = self._take(found, orphan)
                if volume is not None:
                    return volume
                foreign.append(orphan)  # Of no use to us either: its room is.
        refusal = self._refusal(found, needed)
        if refusal is None:
            evictable = sum(orphan.names.total_bytes for orphan in foreign)
            if found.total_bytes - evictable + needed <= capacity:
                self._evict_until(found, capacity - needed, foreign)
            if found.total_bytes + needed <= capacity:
                return self._midwife.begin(self._named_header())
            refusal = "the directory is full"
        return Full(
            needed_bytes=needed,
            free_bytes=max(capacity - found.total_bytes, 0),
            total_bytes=found.total_bytes,
            capacity_bytes=capacity,
            held_bytes=self.held_bytes,
            wanted_by_neighbours_bytes=found.wanted_bytes,
            reason=refusal,
        )

    def _take(self, found: Found, orphan: Orphan) -> HeldVolume | None:
        """Make an orphan ours. None: its files are not what they were; it stays an orphan."""
        assert orphan.header is not None
        try:
            volume = self._open_volume(orphan.header, orphan.lock, is_adopted=True)
        except ValueError:
            return None
        found.taken(orphan)
        self._counts.adopted += 1
        return volume

    def _open_volume(
        self, header: Header, lock: _core.Descriptor, *, is_adopted: bool
    ) -> HeldVolume:
        """Open the files of a volume whose lock we have, and hold it.

        Raises:
            OSError: a file cannot be opened.
            ValueError: a file is not a regular file of ours.
        """
        stem = f"{self._path}/v-{header.volume_id.hex()}"
        # Not past the page cache where it was laid out for a smaller alignment than is wanted here.
        is_aligned = header.alignment % self._alignment == 0
        direct = self._config.direct_io and self._direct_io and is_aligned
        pages: _core.Descriptor | None = None
        if self._config.medium == "shared":
            direct = False
            metadata = open_ours(f"{stem}.vol", os.O_RDWR)
        else:
            metadata = open_ours(f"{stem}.meta", os.O_RDWR)
            try:
                pages = open_ours(f"{stem}.pages", os.O_RDWR | (os.O_DIRECT if direct else 0))
            except (OSError, ValueError):
                metadata.close()
                raise
        volume = HeldVolume(
            volume_id=header.volume_id.hex(),
            header=header,
            metadata=metadata,
            pages=pages,
            direct_io=direct,
            is_adopted=is_adopted,
            is_rebooted=header.boot_id != self._boot_id,
            lmdb_path=f"{stem}.lmdb",
            lock=lock,
        )
        self._held[volume.volume_id] = volume
        return volume

    def _evict_until(self, found: Found, most_bytes: int, orphans: list[Orphan]) -> None:
        """Remove orphans, in the order given, until the directory holds at most `most_bytes`."""
        for orphan in orphans:
            if found.total_bytes <= most_bytes:
                return
            if self._scanner.remove_volume(orphan.names):
                found.listing.volumes.pop(orphan.names.volume_id)
                self._counts.evicted_orphans += 1
            found.taken(orphan)
            orphan.lock.close()

    def _named_header(self) -> Header:
        """Return the header of a new volume."""
        header = self._new_header()
        header.volume_id = bytes.fromhex(self._machine.new_id())
        header.fingerprint = self._config.fingerprint
        header.kind = self._config.kind
        header.epoch = self._config.epoch
        header.boot_id = self._boot_id
        header.birth_ns = self._machine.clock.wall_ns()
        return header

    def _finish(self, birth: Birth) -> HeldVolume:
        """Fill a volume without the directory lock, name it, and hold it."""
        is_named = False
        try:
            self._midwife.fill(birth)
            with self._directory_lock(self._at_most(LEAVE_LOCK_SECONDS)):
                self._midwife.name(birth)
            is_named = True
        finally:
            if not is_named:
                self._abandon(birth)
        birth.close_files()
        try:
            volume = self._open_volume(birth.header, birth.lock, is_adopted=False)
        except (OSError, ValueError) as error:
            # It exists, whole and empty: an orphan that the next grow() takes.
            birth.lock.close()
            if isinstance(error, ValueError):
                raise VolumeError(str(error)) from error
            raise
        self._counts.born += 1
        return volume

    def _abandon(self, birth: Birth) -> None:
        """Give up a birth: its space at once, its names if the directory lock can be had."""
        is_gone = self._midwife.empty(birth)
        try:
            with self._directory_lock(self._at_most(KEEPER_LOCK_SECONDS)):
                is_gone &= self._midwife.undo(birth)
        except (StepwellError, OSError):
            # The next scan removes the names: the lock is free from here on.
            is_gone = False
            birth.close_files()
            birth.lock.close()
        self._counts.failed_removals += not is_gone

    # Wants

    def _is_my_turn(self, found: Found) -> bool:
        """Whether this process gives: it is furthest above its floor, or next to a silent one."""
        assert self._process is not None
        excesses = [(record.excess_bytes, record.process_id.hex()) for record in found.neighbours]
        mine = (max(self.held_bytes - self._floor_bytes, 0), self._process.process_id)
        rank = sorted([*excesses, mine], reverse=True).index(mine)
        since = min(record.want_since_ns for record in found.neighbours if wanted_of(record) > 0)
        return self._machine.boottime_ns() - since >= rank * PATIENCE_NS

    def _giveable_bytes(self, missing: int) -> int:
        """Return the bytes of whole volumes above the floor, until `missing` is reached."""
        left, given = self.held_bytes, 0
        for size in sorted(volume.total_bytes for volume in self._held.values()):
            if given >= missing or left - size < self._floor_bytes:
                break
            left -= size
            given += size
        return given

    def _note_birth(self, nbytes: int) -> None:
        self._birth_bytes = nbytes
        self._publish()

    def _note_want(self, nbytes: int) -> None:
        if nbytes == 0:
            self._want_since_ns = 0
        elif self._want_bytes == 0:
            self._want_since_ns = self._machine.boottime_ns()
        self._want_bytes = nbytes
        self._publish()

    def _publish(self) -> None:
        """Write the process file: a hint to neighbours, so a failure is counted, not raised."""
        process = self._process
        if process is None:
            return
        try:
            process.write(self._record(bytes.fromhex(process.process_id)))
        except OSError:
            self._counts.failed_publications += 1

    def _record(self, process_id: bytes) -> ProcessRecord:
        return ProcessRecord(
            process_id=process_id,
            pid=self._pid,
            boot_id=self._boot_id,
            capacity_bytes=self._config.capacity_bytes,
            floor_bytes=self._floor_bytes,
            held_bytes=self.held_bytes + self._birth_bytes,
            want_bytes=self._want_bytes,
            want_since_ns=self._want_since_ns,
        )

    # What every call stands on

    def _release(self, volume: HeldVolume) -> None:
        del self._held[volume.volume_id]
        volume.close_files()
        volume.lock.close()

    def _require_held(self, volume: HeldVolume) -> None:
        self._check_process()
        if self._held.get(volume.volume_id) is not volume:
            raise StepwellUsageError(f"volume {volume.volume_id} is not held by {self._path}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"{self._path} is open in pid {self._pid}; open it in this process")

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._check_process()
        if not self._is_open:
            raise StoreClosedError(
                f"the directory {self._path} is not open, or not any more: open a store on it with PageStore(config)"
            )
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
            medium = self._config.medium
            message = f"{medium} tier: {error.strerror or error}"
            if error.errno == errno.EROFS:
                message += f"; mount it writable, or set {medium}.path to a directory on another mount"
            raise TierIOError(error.errno, message, error.filename or self._path) from error

    @contextmanager
    def _session(self, timeout: float | None = None) -> Iterator[Found]:
        """Hold the directory lock over a scan and what follows from it."""
        with self._directory_lock(self._config.lock_timeout if timeout is None else timeout):
            found = Found()
            try:
                self._scanner.scan(
                    found,
                    own={volume.volume_id: volume.lock for volume in self._held.values()},
                    own_process=self._process.process_id if self._process else None,
                )
                while found.renewed:
                    volume_id, lock = found.renewed.popitem()
                    self._held[volume_id].lock.close()
                    self._held[volume_id].lock = lock
                self._view = replace(_view_of(found), left_ids=self._left_ids(found))
                yield found
            finally:
                found.close()

    def _left_ids(self, found: Found) -> tuple[str, ...]:
        """Return which orphans of our fingerprint have been orphans for a while, as far as we have seen."""
        now, known = self._machine.boottime_ns(), self._orphan_since_ns
        ours = [orphan.names.volume_id for orphan in found.orphans if self._is_ours(orphan.header)]
        self._orphan_since_ns = {volume_id: known.get(volume_id, now) for volume_id in ours}
        return tuple(
            volume_id for volume_id, since in self._orphan_since_ns.items() if now - since >= ORPHAN_PATIENCE_NS
        )

    def _at_most(self, seconds: float) -> float:
        return min(self._config.lock_timeout, seconds)

    def _directory_lock(self, timeout: float) -> AbstractContextManager[None]:
        return directory_lock(self._path, timeout, clock=self._machine.clock, wait=self._machine.wait)


def _view_of(found: Found) -> DirectoryView:
    return DirectoryView(
        total_bytes=found.total_bytes,
        held_by_others=found.held_by_others,
        orphans=len(found.orphans),
        orphan_bytes=found.orphan_bytes,
        neighbours=tuple(found.neighbours),
        wanted_bytes=found.wanted_bytes,
        odd=len(found.listing.odd),
        unusable=found.unusable,
        unreadable=sum(orphan.header is None for orphan in found.orphans),
        lost_ids=(*found.lost, *found.gone),
    )
