"""Name, find and remove the files of volumes in a tier directory (FORMAT.md 1).

Everything here is done by a holder of the directory lock, but for opening a volume that one holds.
The directory may hold
anything: names that do not match are not looked at, and what is not a regular file of ours is never
opened or followed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell import _core
from stepwell.tiers.locks import is_ours

DIRECTORY_LOCK = "directory.lock"
HEADER_BYTES = 4096
FORMAT_VERSION = 1

_VOLUME_NAME = re.compile(r"([vtx])-([0-9a-f]{32})\.(vol|meta|pages)", re.ASCII)
_LOCK_NAME = re.compile(r"v-([0-9a-f]{32})\.lock", re.ASCII)
_LMDB_NAME = re.compile(r"v-([0-9a-f]{32})\.lmdb(?:-old)?", re.ASCII)
_PROCESS_NAME = re.compile(r"p-([0-9a-f]{32})\.(?:lock|proc)", re.ASCII)


@dataclass(slots=True)
class VolumeNames:
    """The names of one volume id: files with their sizes, the lock, the LMDB directories."""

    volume_id: str
    files: dict[str, int] = field(default_factory=dict)
    has_lock: bool = False
    lmdb: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """What it counts toward the directory's total."""
        return sum(self.files.values())

    @property
    def metadata_name(self) -> str | None:
        """The name whose being there makes it a volume; None: there is none, only leftovers."""
        for suffix in ("vol", "meta"):
            name = f"v-{self.volume_id}.{suffix}"
            if name in self.files:
                return name
        return None

    @property
    def pages_name(self) -> str | None:
        """The name of its page file, where its pages have a file of their own."""
        name = f"v-{self.volume_id}.pages"
        return name if name in self.files else None

    @property
    def is_whole(self) -> bool:
        """Whether all files of a volume are there by name."""
        name = self.metadata_name
        return name is not None and (name.endswith(".vol") or self.pages_name is not None)

    def leftovers(self) -> list[str]:
        """Return the files of no volume: half born, half removed, or pages without metadata."""
        complete = {self.metadata_name, self.pages_name} if self.metadata_name else set()
        return [name for name in self.files if name not in complete]


@dataclass(slots=True)
class Listing:
    """The names of a tier directory, sorted out. odd: those that match and are no files of ours. strangers: others."""

    volumes: dict[str, VolumeNames] = field(default_factory=dict)
    processes: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """What counts toward every process's capacity."""
        return sum(names.total_bytes for names in self.volumes.values())

    def forget(self, volume_id: str) -> None:
        """Drop a volume whose files are gone."""
        self.volumes.pop(volume_id, None)


def list_directory(directory: str) -> Listing:
    """List a tier directory.

    Raises:
        OSError: the directory, or a file in it, cannot be looked at.
    """
    listing = Listing()
    processes: set[str] = set()
    for name in _core.file_list(directory):
        if match := _VOLUME_NAME.fullmatch(name):
            _add_file(listing, directory, name, match[2])
        elif match := _LOCK_NAME.fullmatch(name):
            _names_of(listing, match[1]).has_lock = True
        elif match := _LMDB_NAME.fullmatch(name):
            _names_of(listing, match[1]).lmdb.append(name)
        elif match := _PROCESS_NAME.fullmatch(name):
            processes.add(match[1])
        elif name != DIRECTORY_LOCK:
            listing.strangers.append(name)
    listing.processes = sorted(processes)
    return listing


def _names_of(listing: Listing, volume_id: str) -> VolumeNames:
    return listing.volumes.setdefault(volume_id, VolumeNames(volume_id))


def _add_file(listing: Listing, directory: str, name: str, volume_id: str) -> None:
    try:
        status = _core.file_stat(f"{directory}/{name}")
    except FileNotFoundError:
        return
    if is_ours(status):
        _names_of(listing, volume_id).files[name] = status.size
    else:
        listing.odd.append(name)


def open_ours(path: str, flags: int) -> _core.Descriptor:
    """Open a regular file of ours, without following or waiting.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else.
    """
    descriptor = _core.Descriptor(_core.file_open(path, flags | os.O_NONBLOCK, 0o600))
    try:
        if not is_ours(_core.file_fstat(descriptor.fileno())):
            raise ValueError(f"{path} is not a regular file of this user with one name")
    except (OSError, ValueError):
        descriptor.close()
        raise
    return descriptor


def open_directory(path: str) -> _core.Descriptor:
    """Open a directory, to know it again."""
    return _core.Descriptor(_core.file_open(path, os.O_RDONLY | os.O_DIRECTORY, 0o600))


def create_file(path: str) -> _core.Descriptor:
    """Make a new file, 0600, open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    return _core.Descriptor(_core.file_open(path, flags, 0o600))


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`.

    Raises:
        OSError: the file system failed, or took nothing at all.
    """
    done = 0
    while done < len(data):
        moved = _core.file_pwrite(fd, data[done:], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "a write moved nothing")
        done += moved


def header_checksum(header: bytes) -> int:
    """Return the checksum that belongs into a header of 4096 bytes, FORMAT.md 2.1: the boot id counts as zeros."""
    return _core.crc32c(header[:160] + bytes(16) + header[176:-4])


def read_header(directory: str, name: str) -> bytes:
    """Return the first 4096 bytes of a volume's metadata, fewer where the file is shorter.

    Raises:
        OSError: the file system failed, or gave less than the file has: that is no reason to call a
        header damaged.
        ValueError: the name is not a regular file of ours.
    """
    descriptor = open_ours(f"{directory}/{name}", os.O_RDONLY)
    try:
        return read_first_bytes(descriptor, f"{directory}/{name}")
    finally:
        descriptor.close()


def read_first_bytes(descriptor: _core.Descriptor, path: str) -> bytes:
    """Return what read_header does, of an open file; `path` is for the message.

    Raises:
        OSError: as read_header.
    """
    size = _core.file_fstat(descriptor.fileno()).size
    data = b""
    while len(data) < min(size, HEADER_BYTES):
        more = _core.file_pread(descriptor.fileno(), HEADER_BYTES - len(data), len(data))
        if not more:
            raise OSError(errno.EIO, "short read", path)
        data += more
    return data


def remove_files(directory: str, names: Iterable[str]) -> None:
    """Unlink files; one that is gone already is as good as removed."""
    for name in names:
        try:
            _core.file_unlink(f"{directory}/{name}")
        except FileNotFoundError:
            continue


def remove_until_failure(directory: str, names: Iterable[str]) -> bool:
    """Remove files in this order, as far as the file system lets us.

    Returns:
        Whether all are gone. What is left is for the next scan, which needs the order kept.
    """
    try:
        remove_files(directory, names)
    except OSError:
        return False
    return True


def remove_lmdb(directory: str, names: Iterable[str]) -> None:
    """Remove LMDB directories with the files in them. What is no directory is left alone."""
    for name in names:
        path = f"{directory}/{name}"
        try:
            if not _core.file_stat(path).is_directory:
                continue
            remove_files(path, _core.file_list(path))
            _core.file_rmdir(path)
        except FileNotFoundError:
            continue
