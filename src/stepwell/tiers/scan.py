"""Look at a tier directory under its lock: who holds what, what is free to take.

On the way, what the dead left half done is swept away. FORMAT.md 7 (scan, the first half of
adoption) and 8 (reading process files).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from stepwell import _core
from stepwell.tiers import process_file
from stepwell.tiers.cold import ColdCounts, header_reason
from stepwell.tiers.directory import Header
from stepwell.tiers.locks import NotTaken, is_current, is_ours, try_lock
from stepwell.tiers.process_file import ProcessRecord
from stepwell.tiers.volume_files import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Listing,
    VolumeNames,
    header_checksum,
    list_directory,
    open_ours,
    read_header,
    remove_files,
    remove_lmdb,
)

# The first 4096 bytes, the size of the metadata file, the size of the page file.
Decode = Callable[[bytes, int, int], Header]


@dataclass(slots=True)
class Sweep:
    """Counts of what scans removed, or failed to: each failure is tried again by the next scan.

    cold: volumes that cannot be used, by reason.
    """

    leftovers: int = 0
    damaged: int = 0
    processes: int = 0
    failed: int = 0
    cold: ColdCounts = field(default_factory=ColdCounts)


@dataclass(slots=True)
class Orphan:
    """A volume without a holder. Its lock is ours while the directory lock is; longer if taken."""

    names: VolumeNames
    lock: _core.Descriptor
    header: Header | None  # None: it could not be read this time

    @property
    def birth_ns(self) -> int:
        """When it was born; an unreadable one counts as the oldest."""
        return 0 if self.header is None else self.header.birth_ns


@dataclass(slots=True)
class Found:
    """A tier directory as one scan found it. True for as long as the directory lock is held.

    orphans: oldest first. held_by_others: volumes of living neighbours. unusable: volumes whose
    lock cannot be one.
    lost: volumes of ours whose lock name is another file now, held by another. gone: those whose files
    somebody removed. renewed: new locks of volumes of ours whose lock file somebody had removed; the
    caller's.
    """

    listing: Listing = field(default_factory=Listing)
    orphans: list[Orphan] = field(default_factory=list)
    neighbours: list[ProcessRecord] = field(default_factory=list)
    held_by_others: int = 0
    unusable: int = 0
    lost: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    renewed: dict[str, _core.Descriptor] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What counts toward every process's capacity."""
        return self.listing.total_bytes

    @property
    def orphan_bytes(self) -> int:
        """What nobody holds, of any fingerprint."""
        return sum(orphan.names.total_bytes for orphan in self.orphans)

    @property
    def wanted_bytes(self) -> int:
        """What living neighbours lack to their floors and say they cannot get."""
        return sum(wanted_of(record) for record in self.neighbours)

    @property
    def lacking_bytes(self) -> int:
        """What living neighbours lack to their floors, whether they say so yet or not.

        One that has just come lacks all of its floor, and has not asked for it: what it will ask for
        is left to it.
        """
        return sum(lacking_of(record) for record in self.neighbours)

    def spare_bytes(self, capacity_bytes: int) -> int:
        """What could be taken without anybody giving back: free room, and orphans."""
        return max(capacity_bytes - self.total_bytes, 0) + self.orphan_bytes

    def taken(self, orphan: Orphan) -> None:
        """Take an orphan off the list; its lock is the caller's."""
        self.orphans.remove(orphan)

    def close(self) -> None:
        """Let go of the locks that nobody took."""
        for orphan in self.orphans:
            orphan.lock.close()
        for lock in self.renewed.values():
            lock.close()


def lacking_of(record: ProcessRecord) -> int:
    """Return the bytes a process lacks to its floor by its own figures."""
    return max(min(record.floor_bytes, record.capacity_bytes) - record.held_bytes, 0)


def wanted_of(record: ProcessRecord) -> int:
    """Return the bytes a process wants, at most what it lacks by its own figures."""
    return min(record.want_bytes, lacking_of(record))


class OtherFormatError(ValueError):
    """Report a volume that another version of stepwell wrote."""


class ColdError(ValueError):
    """Report a volume that cannot be used, and the reason by its name (cold.py)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def is_other_format(data: bytes) -> bool:
    """Tell whether a header is a whole one of another format version: magic right, its own checksum right."""
    return (
        len(data) == HEADER_BYTES
        and data[:8] == b"STEPWELV"
        and int.from_bytes(data[8:12], "little") != FORMAT_VERSION
        and int.from_bytes(data[-4:], "little") == header_checksum(data)
    )


@dataclass(slots=True)
class Scanner:
    """Scan one directory for one process. Requires: the directory lock is held for each call."""

    directory: str
    decode: Decode
    sweep: Sweep

    def scan(
        self, found: Found, *, own: Mapping[str, _core.Descriptor], own_process: str | None
    ) -> None:
        """Fill `found`.

        Args:
            found: a new one; the caller closes it, also where this raises.
            own: volume ids that this process holds or gives birth to, with their locks.
            own_process: id of this process's file.

        Raises:
            OSError: the directory or a lock in it cannot be looked at.
        """
        found.listing = list_directory(self.directory)
        for names in list(found.listing.volumes.values()):
            if names.volume_id not in own:
                self._look_at(found, names)
        for volume_id, lock in own.items():
            self._look_after(found, volume_id, lock)
        found.orphans.sort(key=lambda orphan: (orphan.birth_ns, orphan.names.volume_id))
        for process_id in found.listing.processes:
            if process_id != own_process:
                self._look_at_process(found, process_id)

    def _look_after(self, found: Found, volume_id: str, lock: _core.Descriptor) -> None:
        """Lock a volume of ours anew if somebody removed its lock (a cleaner of old files).

        One whose files were removed is gone: open, they take room that nobody counts, and the next process finds
        nothing of them.
        """
        names = found.listing.volumes.get(volume_id)
        if names is None or not names.is_whole:
            found.gone.append(volume_id)
            return
        path = f"{self.directory}/v-{volume_id}.lock"
        if is_current(lock, path):
            return
        renewed = try_lock(path, flags=os.O_CREAT)
        if isinstance(renewed, NotTaken):
            found.lost.append(volume_id)
        else:
            found.renewed[volume_id] = renewed

    def _look_at(self, found: Found, names: VolumeNames) -> None:
        """Find out if an id has a holder; remove what is no volume, list what is an orphan."""
        lock_path = f"{self.directory}/v-{names.volume_id}.lock"
        is_volume = names.metadata_name is not None
        # A volume always has a lock file; where somebody removed it, a new one lets it be taken and
        # removed like any.
        lock = try_lock(lock_path, flags=os.O_CREAT if is_volume else 0)
        match lock:
            case NotTaken.HELD:
                found.held_by_others += is_volume
            case NotTaken.ODD:
                found.unusable += 1
            case NotTaken.MISSING:
                self._remove_leftovers(found, names, None)
            case _:
                self._look_at_free(found, names, lock)

    def _look_at_free(self, found: Found, names: VolumeNames, lock: _core.Descriptor) -> None:
        listed = False
        names.has_lock = True
        try:
            header: Header | None = None
            if names.metadata_name is not None:
                self._remove_quietly(names, names.leftovers())
                try:
                    header = self._header_of(names, names.metadata_name)
                except OSError:
                    header = None
                except OtherFormatError as error:
                    header = None  # readable by another version of stepwell: nobody's damage
                    self.sweep.cold.note(names.volume_id, "format", str(error))
                except ColdError as error:
                    self.sweep.cold.note(names.volume_id, error.reason, f"{error}; removed")
                    if self.remove_volume(names):
                        found.listing.volumes.pop(names.volume_id)
                        self.sweep.damaged += 1
                    return
                found.orphans.append(Orphan(names, lock, header))
                listed = True
            else:
                self._remove_leftovers(found, names, lock)
        finally:
            if not listed:
                lock.close()

    def _header_of(self, names: VolumeNames, metadata_name: str) -> Header:
        data = read_header(self.directory, metadata_name)
        pages = names.files[names.pages_name] if names.pages_name else 0
        if is_other_format(data):
            version = int.from_bytes(data[8:12], "little")
            raise OtherFormatError(
                f"it is of format version {version}, this stepwell reads {FORMAT_VERSION}; left as it is until its "
                "room is needed"
            )
        try:
            header = self.decode(data, names.files[metadata_name], pages)
        except ValueError as error:
            raise ColdError(*header_reason(data, names.files[metadata_name], pages, str(error))) from error
        if header.volume_id.hex() != names.volume_id:
            raise ColdError("replaced", f"{metadata_name} says it is volume {header.volume_id.hex()}")
        return header

    def _remove_leftovers(
        self, found: Found, names: VolumeNames, lock: _core.Descriptor | None
    ) -> None:
        """Remove what is half born or half removed, the lock last."""
        has_anything = bool(names.files) or lock is not None
        if self.remove_volume(names):
            found.listing.volumes.pop(names.volume_id)
            self.sweep.leftovers += has_anything

    def remove_volume(self, names: VolumeNames) -> bool:
        """Remove all files of a volume id whose lock is ours or is not there.

        Returns:
            Whether all are gone; if not, what is left counts on and the next scan tries again.
        """
        try:
            self.remove_volume_or_raise(names)
        except OSError:
            self.sweep.failed += 1
            return False
        return True

    def remove_volume_or_raise(self, names: VolumeNames) -> None:
        """Remove all files of a volume id whose lock is ours or is not there: FORMAT.md 7, Death.

        Raises:
            OSError: some are left; `names` says which, and the call may be repeated.
        """
        for name in sorted(names.files, key=_metadata_first):
            if name.startswith("v-"):
                dead = "x" + name[1:]
                _core.file_rename(f"{self.directory}/{name}", f"{self.directory}/{dead}")
                names.files[dead] = names.files.pop(name)
        for name in list(names.files):
            remove_files(self.directory, [name])
            del names.files[name]
        remove_lmdb(self.directory, names.lmdb)
        if names.has_lock:
            remove_files(self.directory, [f"v-{names.volume_id}.lock"])

    def _remove_quietly(self, names: VolumeNames, files: list[str]) -> None:
        for name in files:
            try:
                remove_files(self.directory, [name])
            except OSError:
                self.sweep.failed += 1
            else:
                del names.files[name]
                self.sweep.leftovers += 1

    def _look_at_process(self, found: Found, process_id: str) -> None:
        lock_path = f"{self.directory}/p-{process_id}.lock"
        file_path = f"{self.directory}/p-{process_id}.proc"
        lock = try_lock(lock_path)
        match lock:
            case NotTaken.HELD:
                record = read_process(file_path)
                if record is not None and record.process_id.hex() == process_id:
                    found.neighbours.append(record)
            case NotTaken.ODD:
                return
            case NotTaken.MISSING:
                self._remove_process(file_path)
            case _:
                try:
                    self._remove_process(file_path, lock_path)
                finally:
                    lock.close()

    def _remove_process(self, *paths: str) -> None:
        try:
            for path in paths:
                # What a dead process did not make it did not leave: a link, a directory, another user's file stays.
                with suppress(FileNotFoundError):
                    if is_ours(_core.file_stat(path)):
                        _core.file_unlink(path)
        except OSError:
            self.sweep.failed += 1
        else:
            self.sweep.processes += 1


def _metadata_first(name: str) -> tuple[bool, str]:
    return name.endswith(".pages"), name


def read_process(path: str) -> ProcessRecord | None:
    """Return a neighbour's record; None where its file is none: then it asks for nothing."""
    try:
        descriptor = open_ours(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        return process_file.read(descriptor.fileno())
    except OSError:
        return None
    finally:
        descriptor.close()
