"""Look into a tier directory and its volumes as a reader: of nobody's locks, no mapping, nothing trusted.

For tools: `inspection`, `verification` and `removal` stand on it. Volume locks are only tried, while the directory lock
is held, and let go at once: a store that adopts looks under the directory lock too, so it never meets one of ours.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import SystemClock
from stepwell.errors import VolumeBusyError, VolumeError
from stepwell.tiers.entry import check_directory, directory_lock
from stepwell.tiers.locks import NotTaken, flock_holders, process_named, try_lock
from stepwell.tiers.scan import is_other_format
from stepwell.tiers.volume_files import (
    DIRECTORY_LOCK,
    Listing,
    VolumeNames,
    list_directory,
    open_ours,
    read_first_bytes,
)

RECORDS_AT_ONCE: Final = 1 << 17  # 24 MiB of records: what one volume can make us hold, whatever its header says
LOCK_SECONDS: Final = 1.0
EPOCHS_NAMED: Final = 64  # a forged volume may name as many as it has pages

Column: TypeAlias = npt.NDArray[Any]
Condition: TypeAlias = Literal["readable", "other format", "damaged", "unreadable", "gone"]


# ---- names and locks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lock:
    """Whether a lock has a holder (None: that is not known), and how that is known."""

    is_held: bool | None
    why: str


@dataclass(slots=True)
class View:
    """Names and locks of a directory, as of one moment; note: why not all locks could be tried."""

    listing: Listing
    volume_locks: dict[str, Lock] = field(default_factory=dict)
    process_locks: dict[str, Lock] = field(default_factory=dict)
    note: str = ""


def look(path: str, *, lock_seconds: float = LOCK_SECONDS) -> View:
    """List a tier directory and try its locks, under the directory lock if it can be had.

    Raises:
        VolumeError: it is no tier directory, or one that a store would refuse.
        OSError: it cannot be looked at.
    """
    check_directory(path)
    listing = list_directory(path)
    try:
        _core.file_stat(f"{path}/{DIRECTORY_LOCK}")
    except FileNotFoundError:
        if not listing.volumes and not listing.processes:
            found = "is empty" if not listing.strangers else "holds none of stepwell's names"
            raise VolumeError(f"{path} {found}: no tier directory, or not yet one") from None
    try:
        with reader_lock(path, lock_seconds):
            view = View(list_directory(path))
            _try_locks(path, view, _tried)
    except (VolumeBusyError, VolumeError) as error:
        view = View(listing, note=f"locks were not tried: {error}")
        _try_locks(path, view, _seen)
    return view


@contextmanager
def reader_lock(path: str, seconds: float, *, flags: int = 0) -> Iterator[None]:
    """Hold the directory lock, where there is one.

    Raises:
        VolumeBusyError, VolumeError: as `directory_lock`.
    """

    def wait(pause: float) -> None:
        threading.Event().wait(pause)

    with directory_lock(path, seconds, clock=SystemClock(), wait=wait, flags=flags):
        yield


def _try_locks(path: str, view: View, judge: Callable[[str, Mapping[tuple[int, int], int] | None], Lock]) -> None:
    holders: Mapping[tuple[int, int], int] | None = None
    with suppress(OSError):
        holders = flock_holders()
    for volume_id in view.listing.volumes:
        view.volume_locks[volume_id] = judge(f"{path}/v-{volume_id}.lock", holders)
    for process_id in view.listing.processes:
        view.process_locks[process_id] = judge(f"{path}/p-{process_id}.lock", holders)


def _tried(path: str, holders: Mapping[tuple[int, int], int] | None) -> Lock:
    """Try a lock and let it go. Requires: the directory lock is held, so nobody meets ours."""
    try:
        lock = try_lock(path)
    except OSError as error:
        return Lock(None, f"its lock cannot be tried: {error.strerror}")
    match lock:
        case NotTaken.HELD:
            return Lock(True, f"its lock is held by {_holder(path, holders)}")
        case NotTaken.MISSING:
            return Lock(None, "it has no lock file")
        case NotTaken.ODD:
            return Lock(None, "its lock is no regular file of this user with one name")
        case _:
            lock.close()
            return Lock(False, "nobody holds its lock")


def _seen(path: str, holders: Mapping[tuple[int, int], int] | None) -> Lock:
    """Say what /proc/locks shows of a lock, touching nothing: a holder that it shows is one."""
    try:
        status = _core.file_stat(path)
    except OSError:
        return Lock(None, "it has no lock file")
    if holders is not None and (status.device, status.inode) in holders:
        return Lock(True, f"its lock is held by {_holder(path, holders)}")
    return Lock(None, "its lock was not tried, and nobody visible here holds it")


def _holder(path: str, holders: Mapping[tuple[int, int], int] | None) -> str:
    try:
        status = _core.file_stat(path)
    except OSError:
        return "a process that is leaving"
    pid = (holders or {}).get((status.device, status.inode))
    return "a process that is not visible here" if pid is None else process_named(pid)


def explain(error: Exception, path: str) -> str:
    """Return a failure as a sentence that names the path."""
    if isinstance(error, FileNotFoundError):
        return f"{path} is not there"
    if isinstance(error, OSError):
        return f"{path}: {error.strerror or error}"
    return str(error)


# ---- one volume ------------------------------------------------------------------------------------------------------


class NotReadableError(Exception):
    """Carry why a volume is not read: its condition, a sentence."""

    def __init__(self, condition: Condition, why: str) -> None:
        super().__init__(why)
        self.condition: Condition = condition


def open_volume(
    path: str, names: VolumeNames, *, direct: bool = False
) -> tuple[_core.VolumeHeader, _core.VolumeReader]:
    """Open a volume's files and check its header against them.

    direct: read pages past the page cache where that is possible: a check of all of them would push out what is warm.

    Raises:
        NotReadableError: says why.
    """
    name = names.metadata_name
    assert name is not None, "a volume has a metadata file"
    pages = _core.Descriptor(-1)
    metadata = _core.Descriptor(-1)
    try:
        metadata = open_ours(f"{path}/{name}", os.O_RDONLY)
        data = read_first_bytes(metadata, f"{path}/{name}")
        if is_other_format(data):
            version = int.from_bytes(data[8:12], "little")
            raise NotReadableError("other format", f"its header is of format version {version}, not 1")
        pages_bytes = 0
        if name.endswith(".meta") and names.pages_name is not None:
            pages = open_ours(f"{path}/{names.pages_name}", os.O_RDONLY)
            pages_bytes = _core.file_fstat(pages.fileno()).size
        header = _core.VolumeHeader.decode(data, _core.file_fstat(metadata.fileno()).size, pages_bytes)
        if header.volume_id.hex() != names.volume_id:
            raise NotReadableError("damaged", f"its header says it is volume {header.volume_id.hex()}")
        if (header.medium == 1) != name.endswith(".vol"):
            raise NotReadableError("damaged", f"its header says medium {header.medium}, its name {name}")
        if direct and header.medium == 2:
            pages = _opened_direct(f"{path}/{names.pages_name}", header, pages)
        return header, _core.VolumeReader(header, metadata.detach(), pages.detach() if header.medium == 2 else -1)
    except FileNotFoundError:
        raise NotReadableError("gone", "it was removed or renamed while it was looked at") from None
    except OSError as error:
        raise NotReadableError("unreadable", f"it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise NotReadableError("damaged", str(error)) from error
    finally:
        metadata.close()
        pages.close()


def _opened_direct(path: str, header: _core.VolumeHeader, pages: _core.Descriptor) -> _core.Descriptor:
    try:
        alignment = _core.file_direct_alignment(path)
        if alignment == 0 or header.alignment % alignment != 0:
            return pages
        direct = open_ours(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return pages
    pages.close()
    return direct


@dataclass(frozen=True, slots=True)
class Slots:
    """What the slots of a volume hold: resident + odd + never_written + worn + damaged = all.

    odd: free, or being written. worn: never used again, their generation is at its limit. damaged: their record is
    none. epochs: (epoch, pages), at most 64. first_stamp, last_stamp: when the page used longest ago and the one used
    last were used, ns since 1970 (0: unknown; small numbers count uses, in a volume of an older version).
    Which pages a living process holds in quarantine it knows alone: `Stats` says it.
    """

    resident: int = 0
    odd: int = 0
    never_written: int = 0
    worn: int = 0
    damaged: int = 0
    epochs: tuple[tuple[int, int], ...] = ()
    first_stamp: int = 0
    last_stamp: int = 0


@dataclass(frozen=True, slots=True)
class Records:
    """The records of some slots in columns, as `VolumeReader.read_records` gives them."""

    slots: Column
    keys: Column
    key_lengths: Column
    parents: Column
    parent_lengths: Column
    parent_states: Column
    depths: Column
    kinds: Column
    epochs: Column
    stamps: Column
    generations: Column
    damaged: Column
    empty: _core.EmptySlots

    def key(self, row: int) -> str:
        """Return the key of a row in hexadecimal digits."""
        return self.keys[row, : self.key_lengths[row]].tobytes().hex()


def read_records(reader: _core.VolumeReader) -> Iterator[Records]:
    """Read the records of a volume piece by piece.

    Raises:
        NotReadableError: the file is shorter than it was, or the file system failed.
    """
    slots = reader.slots
    for first in range(0, slots, RECORDS_AT_ONCE):
        try:
            yield Records(*reader.read_records(first, min(RECORDS_AT_ONCE, slots - first)))
        except OSError as error:
            why = f"records from slot {first} on cannot be read: {error.strerror}"
            raise NotReadableError("unreadable", why) from error


def count_slots(reader: _core.VolumeReader) -> Slots:
    """Count what the slots of a volume hold.

    Raises:
        NotReadableError: its records cannot be read.
    """
    resident = odd = never = worn = damaged = 0
    first, last = 0, 0
    epochs: Counter[int] = Counter()
    for records in read_records(reader):
        resident += records.slots.size
        odd += records.empty.odd
        never += records.empty.never_written
        worn += records.empty.worn
        damaged += records.damaged.size
        named, pages = np.unique(records.epochs, return_counts=True)
        for epoch, count in zip(named.tolist(), pages.tolist(), strict=True):
            if epoch in epochs or len(epochs) < EPOCHS_NAMED:
                epochs[epoch] += count
        stamps = records.stamps[records.stamps > 0]
        if stamps.size:
            first = min(first or int(stamps.min()), int(stamps.min()))
            last = max(last, int(stamps.max()))
    return Slots(
        resident=int(resident),
        odd=odd,
        never_written=never,
        worn=worn,
        damaged=int(damaged),
        epochs=tuple(sorted(epochs.items())),
        first_stamp=first,
        last_stamp=last,
    )
