"""Read and write the file by which the processes of a directory know each other (FORMAT.md 8).

One writer, read by pread; alive as long as its lock is held, which is the directory protocol's
business (volumes.py). What another process wrote is a hint: it is checked, bounded, and never
followed further than an eviction.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell import _core
from stepwell.tiers.locks import create_locked
from stepwell.tiers.volume_files import create_file, remove_until_failure, write_all

MAGIC = b"STEPWELP"
VERSION = 1
RECORD_BYTES = 100
RING_OFFSET = 4096
RING_ENTRIES = 1024
MOST_RING_ENTRIES = 1 << 16  # what a file may say that it has
_ENTRIES_OFFSET = RING_OFFSET + 64
_ENTRY_BYTES = 32
FILE_BYTES = _ENTRIES_OFFSET + _ENTRY_BYTES * RING_ENTRIES

#        magic version zero id  pid boot capacity floor held want want_since
_RECORD = struct.Struct("<8s I I 16s Q 16s Q Q Q Q Q")
_CHECKSUM = struct.Struct("<I")
_RING = struct.Struct("<Q I I")
#       volume id, slot, zero, generation
_TOUCH = struct.Struct("<16s I I Q")
_READ_TRIES = 3


Touch = tuple[bytes, int, int]
"""A page that was used: volume id, slot, and the generation under which it was read."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What a process says of itself. want_since_ns: CLOCK_BOOTTIME, 0 while nothing is wanted."""

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

    A record that is being rewritten may come torn, though it is written by one pwrite: so a bad one
    is read again.
    """
    for _ in range(_READ_TRIES):
        record = decode(_core.file_pread(fd, RECORD_BYTES, 0))
        if record is not None:
            return record
    return None


def read_touches(fd: int, *, after: int | None) -> tuple[int, list[Touch]]:
    """Return the touch ring's counter, and the entries that were appended since it was `after`.

    Args:
        after: the counter as it was read the last time; None: never, and then there are no entries.

    Returns:
        At most RING_ENTRIES of them, the newest; the rest was missed. What they say is unchecked,
        and one that is being written may come torn. (0, []) where there is no ring.

    Raises:
        OSError: the file cannot be read.
    """
    head = _core.file_pread(fd, _RING.size, RING_OFFSET)
    if len(head) != _RING.size:
        return 0, []
    counter, entries, _ = _RING.unpack(head)
    # A counter that went back is another ring, or none: its entries are as old as they may be.
    if not 1 <= entries <= MOST_RING_ENTRIES or after is None or counter <= after:
        return counter, []
    first = max(after, counter - min(entries, RING_ENTRIES))
    touches: list[Touch] = []
    while first < counter:  # twice at most: to the end of the ring, and from its start
        place = first % entries
        count = min(counter - first, entries - place)
        data = _core.file_pread(fd, count * _ENTRY_BYTES, _ENTRIES_OFFSET + place * _ENTRY_BYTES)
        whole = len(data) // _ENTRY_BYTES * _ENTRY_BYTES
        touches += [(volume, slot, generation) for volume, slot, _, generation in _TOUCH.iter_unpack(data[:whole])]
        first += count
    return counter, touches


@dataclass(slots=True)
class OwnProcessFile:
    """This process's own file in a directory, and the lock that shows it alive. touched: entries ever appended."""

    directory: str
    process_id: str
    lock: _core.Descriptor
    file: _core.Descriptor
    touched: int = 0

    @classmethod
    def create(cls, directory: str, record: ProcessRecord) -> OwnProcessFile:
        """Make the file with its first record. Requires: the directory lock.

        Raises:
            OSError: the file system failed; what was made is removed again.
        """
        process_id = record.process_id.hex()
        stem = f"{directory}/p-{process_id}"
        lock = create_locked(f"{stem}.lock")
        file = _core.Descriptor(-1)
        is_complete = False
        try:
            file = create_file(f"{stem}.proc")
            _core.file_truncate(file.fileno(), FILE_BYTES)
            write_all(file.fileno(), _RING.pack(0, RING_ENTRIES, 0), RING_OFFSET)
            write_all(file.fileno(), record.encode(), 0)
            is_complete = True
        finally:
            if not is_complete:
                remove_until_failure(directory, cls._names(process_id))
                file.close()
                lock.close()
        return cls(directory, process_id, lock, file)

    def write(self, record: ProcessRecord) -> None:
        """Replace the record."""
        write_all(self.file.fileno(), record.encode(), 0)

    def append_touches(self, touches: Sequence[Touch]) -> None:
        """Append to the touch ring, of more than it holds the last: the entries, then the counter.

        Raises:
            OSError: the file system failed; what is between two counters is read as it is.
        """
        touches = touches[-RING_ENTRIES:]
        data = b"".join(_TOUCH.pack(volume, slot, 0, generation) for volume, slot, generation in touches)
        place = self.touched % RING_ENTRIES
        tail = (RING_ENTRIES - place) * _ENTRY_BYTES
        write_all(self.file.fileno(), data[:tail], _ENTRIES_OFFSET + place * _ENTRY_BYTES)
        write_all(self.file.fileno(), data[tail:], _ENTRIES_OFFSET)
        self.touched += len(touches)
        write_all(self.file.fileno(), _RING.pack(self.touched, RING_ENTRIES, 0), RING_OFFSET)

    def remove(self) -> bool:
        """Remove the names. Requires: the directory lock. Returns: whether both are gone."""
        return remove_until_failure(self.directory, self._names(self.process_id))

    def close(self) -> None:
        """Close both: from here on the process counts as gone."""
        self.file.close()
        self.lock.close()

    @staticmethod
    def _names(process_id: str) -> tuple[str, str]:
        return f"p-{process_id}.proc", f"p-{process_id}.lock"
