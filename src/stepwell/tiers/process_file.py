"""Read and write the file by which the processes of a tier directory know of each other (FORMAT.md 8).

One writer, read by pread; alive as long as its lock is held, which is the directory protocol's business (volumes.py).
What another process wrote is a hint: it is checked, bounded, and never followed further than an eviction.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

from stepwell import _core

MAGIC = b"STEPWELP"
VERSION = 1
RECORD_BYTES = 100
RING_OFFSET = 4096
RING_ENTRIES = 1024
FILE_BYTES = RING_OFFSET + 64 + 32 * RING_ENTRIES

#        magic version zero id  pid boot capacity floor held want want_since
_RECORD = struct.Struct("<8s I I 16s Q 16s Q Q Q Q Q")
_CHECKSUM = struct.Struct("<I")
_RING = struct.Struct("<Q I I")
_READ_TRIES = 3


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What a process says of itself. Sizes in bytes; want_since_ns: CLOCK_BOOTTIME, 0 while nothing is wanted."""

    process_id: bytes
    pid: int
    boot_id: bytes
    capacity_bytes: int
    floor_bytes: int
    held_bytes: int
    want_bytes: int = 0
    want_since_ns: int = 0

    @property
    def excess_bytes(self) -> int:
        """What it holds above its floor; 0 at or below."""
        return max(self.held_bytes - self.floor_bytes, 0)

    def encode(self) -> bytes:
        """Return the first 100 bytes of the file."""
        data = _RECORD.pack(
            MAGIC,
            VERSION,
            0,
            self.process_id,
            self.pid,
            self.boot_id,
            self.capacity_bytes,
            self.floor_bytes,
            self.held_bytes,
            self.want_bytes,
            self.want_since_ns,
        )
        return data + _CHECKSUM.pack(_core.crc32c(data))


def decode(data: bytes) -> ProcessRecord | None:
    """Return the record in the first 100 bytes of a process file, None where they are not one."""
    if len(data) != RECORD_BYTES:
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, _RECORD.size)
    if checksum != _core.crc32c(data[: _RECORD.size]):
        return None
    magic, version, _, *fields = _RECORD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    return ProcessRecord(*fields)


def read(fd: int) -> ProcessRecord | None:
    """Return the record of an open process file, None where it has none.

    A record that is being rewritten may come torn, though it is written by one pwrite: so a bad one is read again.
    """
    for _ in range(_READ_TRIES):
        record = decode(_core.file_pread(fd, RECORD_BYTES, 0))
        if record is not None:
            return record
    return None


def initialise(fd: int, record: ProcessRecord) -> None:
    """Give a new process file its size, an empty touch ring and its first record."""
    _core.file_truncate(fd, FILE_BYTES)
    write_all(fd, _RING.pack(0, RING_ENTRIES, 0), RING_OFFSET)
    write_all(fd, record.encode(), 0)


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
