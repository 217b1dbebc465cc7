"""Keep the LMDB environment beside a disk volume: its index for tools, the policy's memory.

Derived, never the truth, never asked on a look-up (FORMAT.md 9). Any trouble with it costs the
memory of pages that left and nothing else: no LMDB error reaches the caller. This is the one module
that imports lmdb.

A damaged LMDB file raises SIGBUS, SIGABRT or SIGSEGV, hangs, or scans to its end with wrong content
(measured: 31 of 31 truncated files SIGBUS). So a file that this process did not make is never
opened by this process: `open` has an exec'd child (lmdb_reader.py) read it, and begins a new one.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import lmdb
import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.errors import ForkedError, StepwellUsageError, StoreClosedError
from stepwell.tiers.locks import printable

__all__ = ["RECORD_BYTES", "Remembered", "VolumeIndex", "read_environment"]

_LOG = logging.getLogger("stepwell")

RECORD_BYTES: Final = 192
BATCH_RECORDS: Final = 64
"""Records a transaction: longer ones keep Python threads waiting (measured: 10 ms for 4,096)."""

FORMAT: Final = 1
MAX_KEY_BYTES: Final = 64
MAX_SLOTS: Final = 2**24
MAX_STAMP: Final = 2**63 - 1
_PAGE_BYTES: Final = 4096

_RECORD = np.dtype(
    {"names": ["generation"], "formats": ["<u8"], "offsets": [0], "itemsize": RECORD_BYTES}
)
# A slot record's fields up to its length, FORMAT.md 2.2.
_RECORD_HEAD: Final = struct.Struct("<QQBBBBII")
_RECORD_KEY_AT: Final = 32
_RECORD_CHECKSUM_AT: Final = 188

_INDEX_VALUE: Final = struct.Struct("<IQI")  # slot, generation, depth
_STAMP: Final = struct.Struct("<Q")

# What the child writes: a head, then one fixed entry for each remembered page.
_STREAM_HEAD: Final = struct.Struct("<8sI16sI")  # magic, format, volume id, count
_STREAM_MAGIC: Final = b"STEPWELM"
_STREAM_ENTRY = np.dtype(
    {
        "names": ["stamp", "key_bytes", "key"],
        "formats": ["<u8", "u1", f"V{MAX_KEY_BYTES}"],
        "offsets": [0, 8, 16],
        "itemsize": 80,
    }
)
_STREAM_ENTRY_STRUCT: Final = struct.Struct(f"<QB7x{MAX_KEY_BYTES}s")

_STOP_SECONDS: Final = 0.05

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Remembered:
    """Hold what an old environment remembered of pages that had left, the oldest first.

    Attributes:
        keys: One for each page, 1 to 64 bytes, none twice.
        stamps: uint64[n]; larger = left later.
        reason: What was lost and why; "" if nothing was.
    """

    keys: tuple[bytes, ...]
    stamps: npt.NDArray[np.uint64]
    reason: str


@dataclass(frozen=True, slots=True)
class _Page:
    """Hold what a slot record says of the page in its slot."""

    slot: int
    generation: int
    depth: int
    key: bytes


class VolumeIndex:
    """Own the LMDB environment beside one disk volume.

        new --open--> open --close--> closed
                       └─ trouble: off (files removed, one log line, calls do nothing) --close-->

    Invariant while open: `index` maps a key to slot s only if the last synced record of s holds a
    page of that key, and then `memory` does not have the key. Of two slots with one key the first
    that was synced is in `index`, the other one is looked at again at each sync.

    Sub-databases, FORMAT.md 9:
        index    key -> slot u32, generation u64, depth u32
        memory   key -> stamp u64                   of pages that left, at most `memory_entries`
        order    stamp u64 big-endian, key -> ""    the same pages, the oldest first
        meta     "format" -> u32, "volume" -> the volume's id

    Requires: the volume's lock is held from open to close.
    Threads: one, the keeper. After a fork the child must not use it (ForkedError).
    """

    def __init__(
        self,
        path: str,
        *,
        volume_id: bytes,
        slots: int,
        memory_entries: int = 65536,
        map_bytes: int | None = None,
        map_limit_bytes: int | None = None,
        reader: Sequence[str] | None = None,
        reader_timeout: float = 10.0,
    ) -> None:
        """Remember the arguments; `open` touches the files.

        Args:
            path: The environment's directory, `v-<id>.lmdb`. `<path>-old` is used too.
            volume_id: 16 bytes.
            slots: Of the volume, 1 to 2^24.
            memory_entries: Upper bound of remembered pages.
            map_bytes: First size of the map (address space; the file grows as it is used). Default:
                what the entries need at worst.
            map_limit_bytes: The map doubles up to this size. Default: 8 times the first.
            reader: Command of the child that reads an old environment; directory, entries and
                seconds are appended.
            reader_timeout: Seconds after which the child is killed.
        """
        if len(volume_id) != 16:
            raise StepwellUsageError(f"volume_id has {len(volume_id)} bytes, needs 16")
        if not 1 <= slots <= MAX_SLOTS:
            raise StepwellUsageError(f"slots is {slots}, needs 1 to {MAX_SLOTS}")
        if memory_entries < 0:
            raise StepwellUsageError(f"memory_entries is {memory_entries}, needs 0 or more")
        # 256 bytes: an entry of a 64-byte key with its node, twice over, as B-tree pages may be
        # half empty.
        needed = 2**20 + 256 * (slots + 2 * memory_entries)
        first = needed if map_bytes is None else map_bytes
        self._map_bytes = -(-first // _PAGE_BYTES) * _PAGE_BYTES
        self._map_limit_bytes = 8 * self._map_bytes if map_limit_bytes is None else map_limit_bytes
        self._path = path
        self._volume_id = bytes(volume_id)
        self._memory_entries = memory_entries
        if reader is None:
            reader = (sys.executable, "-P", "-m", "stepwell.tiers.lmdb_reader")
        self._reader = tuple(reader)
        self._reader_timeout = reader_timeout
        self._state = "new"
        self._trouble = ""
        self._was_begun_again = False
        self._pid = 0
        self._next_stamp = 1
        self._env: lmdb.Environment | None = None
        # By slot, as last synced: the generation (0: no page) and the key, which a reused slot's
        # record has no more.
        self._generations = np.zeros(slots, np.uint64)
        self._keys = np.zeros(slots, f"V{MAX_KEY_BYTES}")
        self._key_bytes = np.zeros(slots, np.uint8)

    @property
    def trouble(self) -> str:
        """Say why the environment was given up; "" while it is in use."""
        return self._trouble

    def open(self, *, adopted: bool, stop: threading.Event | None = None) -> Remembered:
        """Read what an old environment remembers, remove it, and begin a new one.

        Args:
            adopted: The volume had another holder, whose environment may be there. Otherwise
                whatever is there is removed unread.
            stop: Once set, the reader is killed and the old environment left for whoever comes next; close() is all
                that may follow.

        Returns:
            What was remembered; nothing and the reason where the old environment is absent,
            damaged, of another volume, or kills or stops its reader. A new environment that cannot
            be made is logged, see `trouble`.

        Cost: with `adopted` a child process, 0.2 to 0.5 s, at most `reader_timeout`.
        """
        if self._state != "new":
            raise StepwellUsageError(f"{self._path}: opened twice; make another VolumeIndex")
        self._state = "open"
        self._pid = os.getpid()
        remembered = Remembered((), np.zeros(0, np.uint64), "")
        try:
            if adopted:
                remembered = self._read_old(stop or threading.Event())
                if stop is not None and stop.is_set():
                    self.close()
                    return _nothing("its reader was stopped")  # or had just ended: nobody takes it over now
            _remove_environment(self._path)
            self._create()
        except (lmdb.Error, OSError) as error:
            self._give_up("cannot begin an environment", error)
        return remembered

    def sync(self, records: npt.NDArray[np.void] | bytes | bytearray | memoryview) -> int:
        """Bring `index` to what the volume's records say; keys of pages that left go to `memory`.

        Args:
            records: The slot records, 192 bytes each, one for each slot, as bytes or as an array.
                They may have been read while pages were written: a record with a wrong checksum
                counts as no page, until the next sync.

        Returns:
            How many slots changed; 0 after LMDB trouble.

        Raises:
            StepwellUsageError: Another number of bytes.

        Cost: 100,000 slots that did not change 1 ms; a changed one about 10 us.
        """
        array = self._as_records(records)
        if self._environment() is None:
            return 0
        try:
            try:
                return self._sync(array)
            except lmdb.MapFullError:
                # Nothing here is worth more room than the limit: without the memory it fits, or it
                # is given up.
                if not self._was_begun_again:
                    self._was_begun_again = True
                    _LOG.warning(
                        "%s: the map is full at its limit of %d bytes; begun again, "
                        "the memory of evicted pages is lost",
                        self._path,
                        self._map_limit_bytes,
                    )
                self._start_fresh()
                return self._sync(array)
        except (lmdb.Error, OSError) as error:
            self._give_up("cannot write", error)
            return 0

    def remember(
        self, keys: Sequence[bytes], stamps: npt.NDArray[np.uint64] | Sequence[int]
    ) -> int:
        """Put into `memory` what an earlier environment remembered, but for keys in `index`.

        Args:
            keys: 1 to 64 bytes each.
            stamps: One for each key, below 2^63. The largest `memory_entries` of them are kept.

        Returns:
            How many entries were put; 0 after LMDB trouble.
        """
        values = [int(stamp) for stamp in stamps]
        if len(values) != len(keys):
            raise StepwellUsageError(f"{len(keys)} keys and {len(values)} stamps")
        for key, stamp in zip(keys, values, strict=True):
            if not 1 <= len(key) <= MAX_KEY_BYTES or not 0 <= stamp <= MAX_STAMP:
                raise StepwellUsageError(
                    f"key of {len(key)} bytes with stamp {stamp}: needs 1 to 64 and below 2^63"
                )
        if self._environment() is None:
            return 0
        newest = sorted(zip(values, keys, strict=True))[max(0, len(keys) - self._memory_entries) :]
        if newest:
            self._next_stamp = max(self._next_stamp, newest[-1][0] + 1)
        try:
            return sum(self._transact(self._put_memory, batch) for batch in _batches(newest))
        except (lmdb.Error, OSError) as error:
            self._give_up("cannot write", error)
            return 0

    def close(self) -> None:
        """Close the environment and leave its files beside the volume. Idempotent."""
        self._state = "closed"
        env, self._env = self._env, None
        # In a forked child the parent's environment is only let go of: with lock=False that touches
        # no file.
        if env is not None and os.getpid() == self._pid:
            env.close()

    # -- the environment ---------------------------------------------------------------------------

    def _environment(self) -> lmdb.Environment | None:
        """Return the environment, None after trouble; raise where the caller may not use it."""
        if self._state == "new":
            raise StepwellUsageError(f"{self._path}: used before open()")
        if self._state == "closed":
            raise StoreClosedError(f"{self._path}: used after close(); open another one")
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._path}: opened by process {self._pid}, used in its child {os.getpid()}"
            )
        return self._env

    def _create(self) -> None:
        """Begin a new environment. Requires: nothing is at the path."""
        os.mkdir(self._path, 0o700)
        self._env = lmdb.open(
            self._path,
            map_size=self._map_bytes,
            subdir=True,
            mode=0o600,
            max_dbs=4,
            lock=False,
            sync=False,  # durability `process`: a kernel crash may cost the memory
            metasync=False,
        )
        _close_on_exec(f"{self._path}/data.mdb")
        self._index = self._env.open_db(b"index")
        self._memory = self._env.open_db(b"memory")
        self._order = self._env.open_db(b"order")
        meta = self._env.open_db(b"meta")
        with self._env.begin(write=True) as txn:
            txn.put(b"format", FORMAT.to_bytes(4, "little"), db=meta)
            txn.put(b"volume", self._volume_id, db=meta)

    def _start_fresh(self) -> None:
        """Begin again with an empty environment; the next sync writes every record."""
        self._close_environment()
        _remove_environment(self._path)
        self._generations[:] = 0
        self._create()

    def _close_environment(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _give_up(self, what: str, error: Exception) -> None:
        """Go on without an environment: close it, remove its files, say so once."""
        self._close_environment()
        self._trouble = f"{what}: {error}"
        try:
            _remove_environment(self._path)
        except OSError as second:
            self._trouble += f"; its files stay: {second}"
        _LOG.warning(
            "%s: %s; going on without it, the memory of evicted pages is lost",
            self._path,
            self._trouble,
        )

    def _transact(
        self, work: Callable[[lmdb.Transaction, Sequence[_Item]], _Result], batch: Sequence[_Item]
    ) -> _Result:
        """Do `work` in one transaction, again with a larger map while it does not fit.

        Copy-on-write needs free pages for a delete too (LMDB raises MapFullError on one), so
        deletes come this way as well.
        """
        while True:
            env = self._env
            assert env is not None
            try:
                with env.begin(write=True) as txn:
                    return work(txn, batch)
            except lmdb.MapFullError:
                larger = min(2 * self._map_bytes, self._map_limit_bytes)
                if larger <= self._map_bytes:
                    raise
                env.set_mapsize(larger)
                self._map_bytes = larger

    # -- records -> index --------------------------------------------------------------------------

    def _as_records(
        self, records: npt.NDArray[np.void] | bytes | bytearray | memoryview
    ) -> npt.NDArray[np.void]:
        size = records.nbytes if isinstance(records, np.ndarray | memoryview) else len(records)
        expected = RECORD_BYTES * len(self._generations)
        if size != expected:
            raise StepwellUsageError(
                f"records have {size} bytes, {len(self._generations)} slots need {expected}"
            )
        if isinstance(records, np.ndarray):
            records = np.ascontiguousarray(records).reshape(-1).view(np.uint8).data
        return np.frombuffer(records, _RECORD)

    def _sync(self, records: npt.NDArray[np.void]) -> int:
        generations = records["generation"].copy()  # the caller's buffer stays as it is
        generations[generations & 1 != 0] = 0  # odd: the slot is free or being written
        candidates: list[int] = np.flatnonzero(generations != self._generations).tolist()
        arriving: list[_Page] = []
        leaving: list[tuple[int, bytes]] = []
        for slot in candidates:
            page = _decode(slot, records[slot].tobytes()) if generations[slot] else None
            if page is not None:
                arriving.append(page)
            if self._generations[slot]:
                key = self._keys[slot].tobytes()[: self._key_bytes[slot]]
                if page is None or page.key != key:
                    leaving.append((slot, key))
        moved = {page.key for page in arriving}
        changed: set[int] = set()

        def remove(txn: lmdb.Transaction, batch: Sequence[tuple[int, bytes]]) -> None:
            for _, key in batch:
                txn.delete(key, db=self._index)
                if key not in moved:
                    self._put_order(txn, key, min(self._next_stamp, MAX_STAMP))
                    self._next_stamp += 1
            self._drop_oldest(txn)

        # All that leaves goes first: then a key found in `index` at another slot belongs to a page
        # that is still there.
        for removed in _batches(leaving):
            self._transact(remove, removed)
            slots = [slot for slot, _ in removed]
            self._generations[slots] = 0
            changed.update(slots)
        for batch in _batches(arriving):
            put = self._transact(self._put_pages, batch)
            if put:
                slots = [page.slot for page in put]
                self._generations[slots] = [page.generation for page in put]
                padded = b"".join(page.key.ljust(MAX_KEY_BYTES, b"\0") for page in put)
                self._keys[slots] = np.frombuffer(padded, self._keys.dtype)
                self._key_bytes[slots] = [len(page.key) for page in put]
                changed.update(slots)
        return len(changed)

    def _put_pages(self, txn: lmdb.Transaction, batch: Sequence[_Page]) -> list[_Page]:
        """Put pages into `index` and return them, without those whose key another slot has."""
        put = []
        for page in batch:
            there = txn.get(page.key, db=self._index)
            if there is not None and int.from_bytes(there[:4], "little") != page.slot:
                continue
            value = _INDEX_VALUE.pack(page.slot, page.generation, page.depth)
            txn.put(page.key, value, db=self._index)
            self._forget(txn, page.key)
            put.append(page)
        return put

    # -- memory ------------------------------------------------------------------------------------

    def _put_memory(self, txn: lmdb.Transaction, batch: Sequence[tuple[int, bytes]]) -> int:
        count = 0
        for stamp, key in batch:
            if txn.get(key, db=self._index) is None:
                self._put_order(txn, key, stamp)
                count += 1
        self._drop_oldest(txn)
        return count

    def _put_order(self, txn: lmdb.Transaction, key: bytes, stamp: int) -> None:
        self._forget(txn, key)
        txn.put(key, _STAMP.pack(stamp), db=self._memory)
        txn.put(stamp.to_bytes(8, "big") + key, b"", db=self._order)

    def _forget(self, txn: lmdb.Transaction, key: bytes) -> None:
        stamp = txn.get(key, db=self._memory)
        if stamp is not None:
            txn.delete(key, db=self._memory)
            txn.delete(bytes(stamp)[::-1] + key, db=self._order)

    def _drop_oldest(self, txn: lmdb.Transaction) -> None:
        excess = txn.stat(self._memory)["entries"] - self._memory_entries
        if excess <= 0:
            return
        with txn.cursor(db=self._order) as cursor:
            while excess > 0 and cursor.first():
                txn.delete(cursor.key()[8:], db=self._memory)
                cursor.delete()
                excess -= 1

    # -- the old environment -----------------------------------------------------------------------

    def _read_old(self, stop: threading.Event) -> Remembered:
        """Have the child read the environment of the volume's last holder."""
        old = self._path + "-old"
        limit = _STREAM_HEAD.size + _STREAM_ENTRY.itemsize * self._memory_entries
        command = (*self._reader, old, str(self._memory_entries), str(self._reader_timeout))
        try:
            # `old` alone: the last holder died between its rename and the read.
            if os.path.lexists(self._path):
                _remove(old)
                os.rename(self._path, old)
            elif not os.path.lexists(old):
                return _nothing("no environment was beside the volume")
            stream = _output_of(command, limit_bytes=limit, timeout=self._reader_timeout, stop=stop)
            return _parse(stream, volume_id=self._volume_id, limit_entries=self._memory_entries)
        except _StoppedError:
            return _nothing("its reader was stopped")
        except (OSError, ValueError) as error:
            _LOG.warning("%s: the memory of evicted pages is lost: %s", self._path, error)
            return _nothing(str(error))


def _nothing(reason: str) -> Remembered:
    return Remembered((), np.zeros(0, np.uint64), reason)


def _batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), BATCH_RECORDS):
        yield items[start : start + BATCH_RECORDS]


def _decode(slot: int, record: bytes) -> _Page | None:
    """Return the page of a record; None where the key length or the checksum is wrong."""
    generation, _, _, key_bytes, _, _, depth, _ = _RECORD_HEAD.unpack_from(record)
    if not 1 <= key_bytes <= MAX_KEY_BYTES:
        return None
    checksum = int.from_bytes(record[_RECORD_CHECKSUM_AT:], "little")
    if _core.crc32c(record[:_RECORD_CHECKSUM_AT]) != checksum:
        return None
    return _Page(slot, generation, depth, record[_RECORD_KEY_AT : _RECORD_KEY_AT + key_bytes])


def _parse(stream: bytes, *, volume_id: bytes, limit_entries: int) -> Remembered:
    """Return what the child's output says; raise ValueError where a field is out of bounds."""
    if len(stream) < _STREAM_HEAD.size:
        raise ValueError(f"the reader's output ends after {len(stream)} bytes")
    magic, version, volume, count = _STREAM_HEAD.unpack_from(stream)
    if magic != _STREAM_MAGIC or version != FORMAT:
        raise ValueError(f"the reader's output begins with {magic!r}, format {version}")
    if volume != volume_id:
        raise ValueError(f"the environment is of volume {volume.hex()}, not {volume_id.hex()}")
    expected = _STREAM_HEAD.size + _STREAM_ENTRY.itemsize * count
    if count > limit_entries or len(stream) != expected:
        raise ValueError(f"the reader's output of {len(stream)} bytes says it has {count} entries")
    entries = np.frombuffer(stream, _STREAM_ENTRY, offset=_STREAM_HEAD.size)
    entries = entries[np.argsort(entries["stamp"], kind="stable")]
    sizes, stamps = entries["key_bytes"], entries["stamp"]
    if count and (sizes.min() < 1 or sizes.max() > MAX_KEY_BYTES or stamps.max() > MAX_STAMP):
        raise ValueError("the reader's output has a key or a stamp out of bounds")
    newest: dict[bytes, int] = {}
    for raw, size, stamp in zip(entries["key"], sizes.tolist(), stamps.tolist(), strict=True):
        key = raw.tobytes()[:size]
        newest.pop(key, None)  # so that the order of the dict stays that of the stamps
        newest[key] = stamp
    return Remembered(tuple(newest), np.array(list(newest.values()), np.uint64), "")


class _StoppedError(Exception):
    """Report that nobody waits for a reader any more."""


def _output_of(command: Sequence[str], *, limit_bytes: int, timeout: float, stop: threading.Event) -> bytes:
    """Run a command and return its output; it is dead, and its children with it, when this returns.

    Raises:
        _StoppedError: `stop` was set meanwhile; it is looked at every 50 ms.
        ValueError: It failed, died of a signal, wrote more than `limit_bytes`, or was not done in
            time.
        OSError: It could not be started.
    """
    deadline = time.monotonic() + timeout
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        close_fds=True,
        start_new_session=True,  # one group to kill, and no signal of a terminal meets it
    ) as process:
        assert process.stdout is not None
        output = bytearray()
        try:
            poll = select.poll()  # select() refuses descriptors above 1,023
            poll.register(process.stdout, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                if stop.is_set():
                    raise _StoppedError
                if not poll.poll(1000 * min(_STOP_SECONDS, left)):
                    continue
                part = os.read(process.stdout.fileno(), 2**18)
                if not part:
                    break
                output += part
                if len(output) > limit_bytes:
                    raise ValueError(f"the reader wrote more than {limit_bytes} bytes")
            while process.poll() is None:
                if stop.wait(_STOP_SECONDS):
                    raise _StoppedError
                if time.monotonic() >= deadline:
                    raise ValueError(f"the reader was not done in {timeout:g} s")
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        raise ValueError(f"the reader died of {signal.Signals(-process.returncode).name}")
    if process.returncode > 0:
        text = printable(output[:200].decode("ascii", "replace").strip())
        raise ValueError(f"the reader ended with status {process.returncode}: {text}")
    return bytes(output)


def read_environment(path: str, *, limit_entries: int) -> bytes:
    """Return the newest remembered pages of an environment, as `VolumeIndex.open` takes them.

    Raises:
        OSError, ValueError: Not an environment, or one with fields out of bounds.

    Requires: a process that may die here: a damaged file raises SIGBUS, SIGABRT or SIGSEGV, or
    never returns.
    """
    try:
        env = lmdb.open(path, readonly=True, create=False, subdir=True, max_dbs=4, lock=False)
        with closing(env):
            return _read(env, limit_entries)
    except lmdb.Error as error:
        raise ValueError(str(error)) from error


def _read(env: lmdb.Environment, limit_entries: int) -> bytes:
    meta = env.open_db(b"meta", create=False)
    order = env.open_db(b"order", create=False)
    entries = bytearray()
    count = 0
    # Views, not bytes: a damaged size must not be copied before it is looked at.
    with env.begin(buffers=True) as txn:
        version = int.from_bytes(_exactly(txn.get(b"format", db=meta), 4), "little")
        if version != FORMAT:
            raise ValueError(f"format {version}, this is {FORMAT}")
        volume = _exactly(txn.get(b"volume", db=meta), 16)
        with txn.cursor(db=order) as cursor:
            # From the newest back, at most limit_entries: B-tree pages that form a ring end too.
            for view in cursor.iterprev(keys=True, values=False):
                if count == limit_entries:
                    break
                size = len(view) - 8
                if not 1 <= size <= MAX_KEY_BYTES:
                    raise ValueError(f"a key of {size} bytes")
                entry = bytes(view)
                stamp = int.from_bytes(entry[:8], "big")
                entries += _STREAM_ENTRY_STRUCT.pack(stamp, size, entry[8:])
                count += 1
    return _STREAM_HEAD.pack(_STREAM_MAGIC, FORMAT, volume, count) + bytes(entries)


def _exactly(view: bytes | memoryview | None, size: int) -> bytes:
    if view is None or len(view) != size:
        raise ValueError(f"a value of {'no' if view is None else len(view)} bytes, needs {size}")
    return bytes(view)


def _close_on_exec(path: str) -> None:
    """Keep this process's descriptors of a file from programs that it starts: LMDB's own opens say nothing of that."""
    wanted = os.stat(path)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by another thread meanwhile, or the one that lists
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                os.set_inheritable(int(name), False)


def _remove_environment(path: str) -> None:
    """Remove an environment and the old one beside it, whatever they are; none is right too.

    Requires: the volume's lock is held. Raises: OSError.
    """
    _remove(path)
    _remove(path + "-old")


def _remove(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)
