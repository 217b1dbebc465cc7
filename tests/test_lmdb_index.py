"""The LMDB environment beside a disk volume costs at most its memory, whatever happens to it."""

from __future__ import annotations

import ast
import logging
import os
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepwell
from stepwell import _core
from stepwell.errors import ForkedError, StepwellUsageError, StoreClosedError
from stepwell.tiers import lmdb_index
from stepwell.tiers.lmdb_index import RECORD_BYTES, VolumeIndex

VOLUME = bytes(range(16))
HANGS = (sys.executable, "-c", "import signal; signal.pause()")


def key_of(number: int, size: int = 32) -> bytes:
    return number.to_bytes(8, "big").rjust(size, b"k")


class Records:
    """The slot records of a volume, written as FORMAT.md 3 says."""

    def __init__(self, slots: int) -> None:
        self.bytes = bytearray(RECORD_BYTES * slots)
        self.slots = slots

    def generation(self, slot: int) -> int:
        return int.from_bytes(self.bytes[slot * RECORD_BYTES :][:8], "little")

    def write(self, slot: int, key: bytes, depth: int = 0) -> None:
        generation = (self.generation(slot) | 1) + 1
        record = struct.pack("<QQBBBBIII", generation, 7, 1, len(key), 0, 0, depth, 4096, 0)
        record = (record + key.ljust(64, b"\0")).ljust(188, b"\0")
        record += _core.crc32c(record).to_bytes(4, "little")
        self.bytes[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record

    def free(self, slot: int) -> None:
        generation = self.generation(slot) | 1
        start = slot * RECORD_BYTES
        self.bytes[start : start + 8] = generation.to_bytes(8, "little")


def read(path: Path) -> dict[str, dict[bytes, Any]]:
    """Read a healthy, closed environment as a tool would."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=4) as env:
        found: dict[str, dict[bytes, Any]] = {}
        for name in ("index", "memory", "order", "meta"):
            handle = env.open_db(name.encode(), create=False)
            with env.begin() as txn, txn.cursor(db=handle) as cursor:
                found[name] = dict(cursor)
    found["index"] = {key: struct.unpack("<IQI", value) for key, value in found["index"].items()}
    found["memory"] = {key: struct.unpack("<Q", value)[0] for key, value in found["memory"].items()}
    return found


def index_of(path: Path, slots: int, **options: Any) -> VolumeIndex:
    return VolumeIndex(str(path), volume_id=VOLUME, slots=slots, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"v-{VOLUME.hex()}.lmdb"


def leave_behind(path: Path, pages: int = 300) -> list[bytes]:
    """Make an environment that remembers `pages` pages and has 64; return those, oldest first."""
    slots = pages + 64
    records = Records(slots)
    for slot in range(slots):
        records.write(slot, key_of(slot))
    index = index_of(path, slots)
    index.open(adopted=False)
    index.sync(records.bytes)
    for slot in range(pages):
        records.free(slot)
    index.sync(records.bytes)
    index.close()
    return [key_of(number) for number in range(pages)]


# -- records -> index


def test_index_says_what_the_records_say(path: Path) -> None:
    records = Records(5)
    records.write(0, key_of(10), depth=3)
    records.write(2, key_of(12, size=64), depth=2**32 - 1)
    records.write(3, b"x")
    records.free(3)
    index = index_of(path, 5)
    index.open(adopted=False)
    before = bytes(records.bytes)
    assert index.sync(records.bytes) == 2
    assert index.sync(records.bytes) == 0
    assert records.bytes == before
    index.close()
    found = read(path)
    assert found["index"] == {key_of(10): (0, 2, 3), key_of(12, size=64): (2, 2, 2**32 - 1)}
    assert found["memory"] == {}
    assert found["meta"] == {b"format": b"\1\0\0\0", b"volume": VOLUME}


def test_records_may_come_as_bytes_or_as_an_array(path: Path) -> None:
    records = Records(3)
    index = index_of(path, 3)
    index.open(adopted=False)
    dtype = np.dtype([("generation", "<u8"), ("rest", "V184")])
    for number, form in enumerate(
        (bytes, bytearray, memoryview, lambda b: np.frombuffer(b, dtype))
    ):
        records.write(1, key_of(number))
        assert index.sync(form(bytes(records.bytes))) == 1
    with pytest.raises(StepwellUsageError, match="191 bytes, 3 slots need 576"):
        index.sync(bytes(191))
    index.close()
    assert read(path)["index"] == {key_of(3): (1, 8, 0)}


def test_slot_used_again_deletes_the_old_key_and_remembers_it(path: Path) -> None:
    records = Records(2)
    records.write(0, key_of(1))
    index = index_of(path, 2)
    index.open(adopted=False)
    index.sync(records.bytes)
    records.write(0, key_of(2))
    assert index.sync(records.bytes) == 1
    index.close()
    found = read(path)
    assert found["index"] == {key_of(2): (0, 4, 0)}
    assert found["memory"] == {key_of(1): 1}


def test_key_that_moved_to_another_slot_stays_and_is_not_remembered(path: Path) -> None:
    for source, target in ((0, 3), (3, 0)):
        records = Records(4)
        records.write(source, key_of(1))
        index = index_of(path, 4)
        index.open(adopted=False)
        index.sync(records.bytes)
        records.write(source, key_of(2))
        records.write(target, key_of(1))
        assert index.sync(records.bytes) == 2
        index.close()
        found = read(path)
        assert found["index"] == {key_of(1): (target, 2, 0), key_of(2): (source, 4, 0)}
        assert found["memory"] == {}


def test_page_that_moves_costs_no_remembered_page_its_place(path: Path) -> None:
    records = Records(2)
    records.write(0, key_of(1))
    index = index_of(path, 2, memory_entries=1)
    index.open(adopted=False)
    index.remember([key_of(7)], [1])
    index.sync(records.bytes)
    records.free(0)
    records.write(1, key_of(1))
    index.sync(records.bytes)
    index.close()
    assert read(path)["memory"] == {key_of(7): 1}


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_key_of_two_slots_stays_until_both_have_left(path: Path, first_to_leave: int) -> None:
    records = Records(2)
    records.write(0, key_of(1))
    records.write(1, key_of(1))
    index = index_of(path, 2)
    index.open(adopted=False)
    index.sync(records.bytes)
    records.free(first_to_leave)
    index.sync(records.bytes)
    index.close()
    other = 1 - first_to_leave
    assert read(path)["index"] == {key_of(1): (other, 2, 0)}
    assert read(path)["memory"] == {}


def test_page_that_came_back_is_no_longer_remembered(path: Path) -> None:
    records = Records(1)
    index = index_of(path, 1)
    index.open(adopted=False)
    for step in (lambda: records.write(0, key_of(1)), lambda: records.free(0)):
        step()
        index.sync(records.bytes)
    records.write(0, key_of(1))
    index.sync(records.bytes)
    index.close()
    found = read(path)
    assert found["memory"] == found["order"] == {}
    assert found["index"] == {key_of(1): (0, 4, 0)}


@pytest.mark.parametrize("at", [8, 17, 20, 32, 63, 188])
def test_record_with_a_wrong_byte_holds_no_page_until_it_is_right(path: Path, at: int) -> None:
    records = Records(2)
    records.write(0, key_of(1))
    records.write(1, key_of(2))
    index = index_of(path, 2)
    index.open(adopted=False)
    records.bytes[at] ^= 0x80
    assert index.sync(records.bytes) == 1
    records.bytes[at] ^= 0x80
    assert index.sync(records.bytes) == 1
    index.close()
    assert sorted(read(path)["index"]) == [key_of(1), key_of(2)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 11), st.none() | st.integers(0, 15)), max_size=12),
        max_size=8,
    ),
    st.integers(0, 6),
)
def test_index_and_memory_equal_the_model_after_any_churn(
    tmp_path_factory: pytest.TempPathFactory,
    rounds: list[list[tuple[int, int | None]]],
    memory_entries: int,
) -> None:
    """Keys are unique among slots that hold a page, as a volume's writer keeps them."""
    path = tmp_path_factory.mktemp("churn") / "v.lmdb"
    records, held, remembered = Records(12), {}, {}
    index = index_of(path, 12, memory_entries=memory_entries)
    index.open(adopted=False)
    for changes in rounds:
        before = dict(held)
        for slot, number in changes:
            if number is None:
                records.free(slot)
                held.pop(slot, None)
            elif key_of(number) not in held.values():
                records.write(slot, key_of(number), depth=number)
                held[slot] = key_of(number)
        index.sync(records.bytes)
        present = set(held.values())
        for slot in sorted(before):
            if before[slot] not in present:
                remembered.pop(before[slot], None)
                remembered[before[slot]] = None
        for key in present:
            remembered.pop(key, None)
    index.close()
    found = read(path)
    assert found["index"] == {
        key: (slot, records.generation(slot), int.from_bytes(key[-8:], "big"))
        for slot, key in held.items()
    }
    # A page that came back leaves room that the bound had already cost an older one: a suffix.
    by_age = sorted(found["memory"], key=found["memory"].__getitem__)
    assert by_age == list(remembered)[len(remembered) - len(by_age) :]
    assert len(by_age) <= memory_entries
    expected_order = {stamp.to_bytes(8, "big") + key for key, stamp in found["memory"].items()}
    assert set(found["order"]) == expected_order


def test_memory_is_bounded_and_the_oldest_go_first(path: Path) -> None:
    records = Records(200)
    index = index_of(path, 200, memory_entries=50)
    index.open(adopted=False)
    for slot in range(200):
        records.write(slot, key_of(slot))
    index.sync(records.bytes)
    for slot in range(200):
        records.free(slot)
    index.sync(records.bytes)
    index.close()
    found = read(path)
    assert sorted(found["memory"]) == [key_of(slot) for slot in range(150, 200)]
    assert len(found["order"]) == 50


class CountingTransaction:
    """A write transaction that counts the keys of `index` it was asked to change."""

    def __init__(self, txn: Any, index: Any, counts: list[int]) -> None:
        self._txn, self._index, self._counts = txn, index, counts
        self._count = 0

    def __enter__(self) -> CountingTransaction:
        self._txn.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        self._counts.append(self._count)
        return self._txn.__exit__(*error)

    def put(self, *arguments: Any, db: Any) -> Any:
        self._count += db is self._index
        return self._txn.put(*arguments, db=db)

    def delete(self, *arguments: Any, db: Any) -> Any:
        self._count += db is self._index
        return self._txn.delete(*arguments, db=db)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)


class CountingEnvironment:
    def __init__(self, env: Any, counts: list[int]) -> None:
        self._env, self._counts, self._index = env, counts, None

    def open_db(self, name: bytes) -> Any:
        handle = self._env.open_db(name)
        if name == b"index":
            self._index = handle
        return handle

    def begin(self, **options: Any) -> Any:
        return CountingTransaction(self._env.begin(**options), self._index, self._counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


def test_no_transaction_changes_more_than_64_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    real = lmdb.open
    monkeypatch.setattr(
        lmdb_index.lmdb, "open", lambda *a, **k: CountingEnvironment(real(*a, **k), counts)
    )
    records = Records(1000)
    for slot in range(1000):
        records.write(slot, key_of(slot))
    index = index_of(path, 1000)
    index.open(adopted=False)
    counts.clear()
    assert index.sync(records.bytes) == 1000
    assert sum(counts) == 1000
    for slot in range(0, 1000, 2):
        records.free(slot)
    for slot in range(1, 1000, 2):
        records.write(slot, key_of(slot + 1000))
    assert index.sync(records.bytes) == 1000
    assert sum(counts) == 1000 + 1000 + 500
    assert max(counts) == 64
    assert index.sync(records.bytes) == 0
    index.close()


def test_sync_of_an_unchanged_volume_writes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(4)
    records.write(1, key_of(1))
    index = index_of(path, 4)
    index.open(adopted=False)
    index.sync(records.bytes)

    def refuse(*_: Any) -> None:
        raise AssertionError("a transaction")

    monkeypatch.setattr(index, "_transact", refuse)
    assert index.sync(records.bytes) == 0
    index.close()


# -- adoption


def test_adoption_streams_what_was_remembered_and_begins_anew(path: Path) -> None:
    keys = leave_behind(path)
    index = index_of(path, 10)
    remembered = index.open(adopted=True)
    assert remembered.reason == ""
    assert list(remembered.keys) == keys
    assert remembered.stamps.dtype == np.uint64
    assert remembered.stamps.tolist() == list(range(1, 301))
    assert not os.path.lexists(f"{path}-old")
    assert index.remember(remembered.keys, remembered.stamps) == 300
    index.close()
    found = read(path)
    assert found["index"] == {}
    assert found["memory"] == dict(zip(keys, range(1, 301), strict=True))

    again = index_of(path, 10, memory_entries=20)
    assert list(again.open(adopted=True).keys) == keys[-20:]
    again.close()


def test_pages_that_leave_later_are_newer_than_what_was_put_back(path: Path) -> None:
    records = Records(1)
    records.write(0, key_of(1))
    index = index_of(path, 1)
    index.open(adopted=False)
    index.sync(records.bytes)
    # A key that is in the index is no evicted page; only the newest that fit are kept.
    assert index.remember([key_of(1), key_of(2)], [5, 900]) == 1
    records.free(0)
    index.sync(records.bytes)
    index.close()
    assert read(path)["memory"] == {key_of(2): 900, key_of(1): 901}


def test_memory_stays_bounded_when_more_is_put_back(path: Path) -> None:
    index = index_of(path, 1, memory_entries=2)
    index.open(adopted=False)
    index.remember([key_of(1), key_of(2), key_of(3)], [3, 1, 2])
    index.remember([key_of(4)], [9])
    index.close()
    assert read(path)["memory"] == {key_of(1): 3, key_of(4): 9}


def test_volume_that_was_not_adopted_begins_with_nothing(path: Path) -> None:
    leave_behind(path)
    shutil.copytree(path, f"{path}-old")
    index = index_of(path, 10, reader=("/nonexistent",))
    remembered = index.open(adopted=False)
    assert (remembered.keys, remembered.reason) == ((), "")
    index.close()
    assert read(path)["memory"] == {}
    assert not os.path.lexists(f"{path}-old")


def test_holder_that_died_before_its_read_loses_nothing(path: Path) -> None:
    keys = leave_behind(path)
    path.rename(f"{path}-old")
    index = index_of(path, 10)
    assert list(index.open(adopted=True).keys) == keys
    index.close()
    assert not os.path.lexists(f"{path}-old")


def test_files_are_of_their_owner_alone_and_without_a_lock_file(path: Path) -> None:
    index = index_of(path, 1)
    index.open(adopted=False)
    assert os.listdir(path) == ["data.mdb"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "data.mdb").stat().st_mode) == 0o600
    index.close()


# -- damage


def truncate_to(fraction: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path / "data.mdb"
        os.truncate(data, int(data.stat().st_size * fraction))

    return damage


def overwrite_page(number: int, fill: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with open(path / "data.mdb", "r+b") as file:
            file.seek(4096 * number)
            file.write(bytes([fill]) * 4096)

    return damage


def overwrite_all_but_meta(path: Path) -> None:
    data = path / "data.mdb"
    noise = random.Random(5).randbytes(data.stat().st_size - 8192)
    with open(data, "r+b") as file:
        file.seek(8192)
        file.write(noise)


def directory_in_place_of_the_file(path: Path) -> None:
    (path / "data.mdb").unlink()
    (path / "data.mdb").mkdir()


def file_in_place_of_the_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"no environment")


def fifo_that_nobody_writes(path: Path) -> None:
    (path / "data.mdb").unlink()
    os.mkfifo(path / "data.mdb")


def dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def another_volume(path: Path) -> None:
    with lmdb.open(str(path), lock=False, max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"volume", bytes(16), db=env.open_db(b"meta", txn=txn))


def later_format(path: Path) -> None:
    with lmdb.open(str(path), lock=False, max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"\2\0\0\0", db=env.open_db(b"meta", txn=txn))


def key_too_long(path: Path) -> None:
    with lmdb.open(str(path), lock=False, max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"\0" * 8 + b"k" * 65, b"", db=env.open_db(b"order", txn=txn))


def stamp_too_large(path: Path) -> None:
    with lmdb.open(str(path), lock=False, max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"\xff" * 8 + b"k", b"", db=env.open_db(b"order", txn=txn))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(truncate_to(0.0), id="empty"),
        pytest.param(truncate_to(0.1), id="truncated-to-a-tenth"),
        pytest.param(truncate_to(0.5), id="truncated-to-a-half"),
        pytest.param(overwrite_all_but_meta, id="noise"),
        directory_in_place_of_the_file,
        file_in_place_of_the_directory,
        dangling_link,
        another_volume,
        later_format,
        key_too_long,
        stamp_too_large,
        shutil.rmtree,
    ],
)
def test_damage_costs_the_memory_and_nothing_else(
    path: Path, damage: Callable[[Path], None]
) -> None:
    leave_behind(path)
    damage(path)
    assert_only_memory_is_lost(path)


def test_truncated_file_kills_the_reader_in_place_of_this_process(path: Path) -> None:
    leave_behind(path)
    os.truncate(path / "data.mdb", 2 * 4096)  # the meta pages, and no page that they name
    assert assert_only_memory_is_lost(path) == "the reader died of SIGBUS"


def assert_only_memory_is_lost(path: Path, **options: Any) -> str:
    """Adopt, see nothing remembered and the reason, and a fresh environment that works."""
    records = Records(3)
    records.write(2, key_of(9))
    index = index_of(path, 3, **options)
    remembered = index.open(adopted=True)
    assert (remembered.keys, len(remembered.stamps)) == ((), 0)
    assert remembered.reason
    assert index.trouble == ""
    assert index.sync(records.bytes) == 1
    index.close()
    assert not os.path.lexists(f"{path}-old")
    assert read(path)["index"] == {key_of(9): (2, 2, 0)}
    return remembered.reason


def damages(seed: int) -> Iterator[Callable[[Path], None]]:
    chance = random.Random(seed)

    def flip_bits(path: Path) -> None:
        data = bytearray((path / "data.mdb").read_bytes())
        for _ in range(8):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (path / "data.mdb").write_bytes(data)

    for number in (0, 1, chance.randrange(2, 12)):
        yield overwrite_page(number, chance.choice([0, 255]))
    for _ in range(3):
        yield flip_bits


@pytest.mark.parametrize("seed", range(2))
def test_damage_that_may_go_unnoticed_never_reaches_this_process(
    tmp_path: Path, path: Path, seed: int
) -> None:
    """LMDB has no checksums: such a file may scan to its end. Whatever comes is within bounds."""
    leave_behind(tmp_path / "healthy")
    (tmp_path / "healthy").rename(path)
    with lmdb.open(str(path), lock=False, max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"volume", VOLUME, db=env.open_db(b"meta", txn=txn))
    healthy = (path / "data.mdb").read_bytes()
    for number, damage in enumerate(damages(seed)):
        shutil.rmtree(path)
        path.mkdir(mode=0o700)
        (path / "data.mdb").write_bytes(healthy)
        damage(path)
        index = index_of(path, 3)
        remembered = index.open(adopted=True)
        assert len(remembered.keys) == len(remembered.stamps), f"seed {seed}, damage {number}"
        assert all(1 <= len(key) <= 64 for key in remembered.keys)
        assert (remembered.reason == "") or not remembered.keys
        index.remember(remembered.keys, remembered.stamps)
        assert index.trouble == ""
        index.close()
        assert not os.path.lexists(f"{path}-old")


def test_read_that_hangs_in_the_kernel_is_ended(path: Path) -> None:
    leave_behind(path)
    fifo_that_nobody_writes(path)
    reason = assert_only_memory_is_lost(path, reader_timeout=1.0)
    assert "not done in 1 s" in reason or "SIGALRM" in reason


def test_reader_ends_its_own_hang_where_nobody_waits_for_it(path: Path) -> None:
    leave_behind(path)
    fifo_that_nobody_writes(path)
    command = [sys.executable, "-m", "stepwell.tiers.lmdb_reader", str(path), "10", "0.05"]
    assert subprocess.run(command, check=False).returncode == -14


def test_reader_that_hangs_is_killed_with_its_children(path: Path) -> None:
    """A grandchild keeps the pipe open: its end is not waited for."""
    leave_behind(path)
    hang = " ".join(("'" + part + "'") for part in HANGS)
    reason = assert_only_memory_is_lost(
        path, reader=("/bin/sh", "-c", f"{hang} & {hang}"), reader_timeout=0.2
    )
    assert reason == "the reader was not done in 0.2 s"


def test_reader_that_closed_its_output_and_hangs_is_killed(path: Path) -> None:
    leave_behind(path)
    code = "import os, signal; os.close(1); signal.pause()"
    reason = assert_only_memory_is_lost(
        path, reader=(sys.executable, "-c", code), reader_timeout=0.5
    )
    assert reason == "the reader was not done in 0.5 s"


@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGABRT", "SIGKILL"])
def test_reader_that_dies_of_a_signal_is_named(path: Path, name: str) -> None:
    leave_behind(path)
    reason = assert_only_memory_is_lost(path, reader=("/bin/sh", "-c", f"kill -{name[3:]} $$"))
    assert reason == f"the reader died of {name}"


HEAD = struct.pack("<8sI16sI", b"STEPWELM", 1, VOLUME, 1)
ENTRY = struct.pack("<QB7x64s", 1, 3, b"abc")


@pytest.mark.parametrize(
    "output",
    [
        b"",
        HEAD[:-1],
        HEAD,
        HEAD + ENTRY[:-1],
        HEAD + ENTRY + b"\0",
        HEAD[:-4] + b"\xff\xff\xff\xff" + ENTRY,
        b"X" + HEAD[1:] + ENTRY,
        HEAD[:8] + b"\2" + HEAD[9:] + ENTRY,
        HEAD + ENTRY[:8] + b"\0" + ENTRY[9:],
        HEAD + ENTRY[:8] + b"\x41" + ENTRY[9:],
        HEAD + ENTRY[:7] + b"\x80" + ENTRY[8:],
        HEAD + ENTRY * 100_000,
    ],
)
def test_output_of_the_reader_is_checked_field_by_field(
    tmp_path: Path, path: Path, output: bytes
) -> None:
    (tmp_path / "output").write_bytes(output)
    leave_behind(path, pages=1)
    assert_only_memory_is_lost(path, reader=("/bin/sh", "-c", f"cat {tmp_path}/output"))


def test_output_as_it_should_be_is_taken(tmp_path: Path, path: Path) -> None:
    """So that the refusals above are for what they changed."""
    (tmp_path / "output").write_bytes(HEAD + ENTRY)
    leave_behind(path, pages=1)
    index = index_of(path, 1, reader=("/bin/sh", "-c", f"cat {tmp_path}/output"))
    assert index.open(adopted=True).keys == (b"abc",)
    index.close()


def test_reader_that_cannot_be_started_costs_the_memory(path: Path) -> None:
    leave_behind(path)
    assert "nonexistent" in assert_only_memory_is_lost(path, reader=("/nonexistent",))


def test_old_environment_that_cannot_be_renamed_costs_the_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(path)

    def refuse(*_: str) -> None:
        raise OSError(5, "stub")

    monkeypatch.setattr(lmdb_index.os, "rename", refuse)
    assert "stub" in assert_only_memory_is_lost(path)


def test_reader_works_where_descriptors_are_many(path: Path) -> None:
    """select() takes none above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"descriptors are limited to {hard}")
    keys = leave_behind(path)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        while not held or held[-1] < 1100:
            held.append(os.open("/dev/null", os.O_RDONLY))
        index = index_of(path, 1)
        assert list(index.open(adopted=True).keys) == keys
        index.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reader_inherits_no_descriptor(tmp_path: Path, path: Path) -> None:
    leave_behind(path)
    with open(tmp_path / "lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        code = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1]); os._exit(1)"
        reason = assert_only_memory_is_lost(path, reader=(sys.executable, "-uc", code))
    assert reason == "the reader ended with status 1: ['0', '1', '2']"


# -- trouble while open


def test_full_map_grows_and_deletes_work(path: Path) -> None:
    """C052: LMDB raises MapFullError even on a delete."""
    records = Records(2000)
    index = index_of(path, 2000, map_bytes=1 << 16, map_limit_bytes=1 << 22)
    index.open(adopted=False)
    for slot in range(2000):
        records.write(slot, key_of(slot))
    assert index.sync(records.bytes) == 2000
    for slot in range(0, 2000, 2):
        records.free(slot)
    assert index.sync(records.bytes) == 1000
    for slot in range(0, 2000, 2):
        records.write(slot, key_of(slot + 5000))
    assert index.sync(records.bytes) == 1000
    assert index.trouble == ""
    index.close()
    assert len(read(path)["index"]) == 2000
    assert len(read(path)["memory"]) == 1000


def test_map_full_at_its_limit_begins_again_without_the_memory(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(201)
    records.write(200, b"stays")
    index = index_of(path, 201, map_bytes=1 << 18, map_limit_bytes=1 << 18)
    index.open(adopted=False)
    with caplog.at_level(logging.WARNING, "stepwell"):
        for number in range(4000):
            records.write(number % 200, key_of(number))
            if number % 200 == 199:
                index.sync(records.bytes)
    index.close()
    assert index.trouble == ""
    assert [record.message.count("the map is full") for record in caplog.records] == [1]
    found = read(path)
    assert {key: slot for key, (slot, _, _) in found["index"].items()} == {
        key_of(number): number % 200 for number in range(3800, 4000)
    } | {b"stays": 200}
    assert 0 < len(found["memory"]) < 3800


def test_map_too_small_for_the_index_is_given_up_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records(2000)
    for slot in range(2000):
        records.write(slot, key_of(slot))
    index = index_of(path, 2000, map_bytes=1 << 16, map_limit_bytes=1 << 16)
    index.open(adopted=False)
    with caplog.at_level(logging.WARNING, "stepwell"):
        for _ in range(3):
            assert index.sync(records.bytes) == 0
            assert index.remember([key_of(1)], [1]) == 0
    assert "MDB_MAP_FULL" in index.trouble
    assert len([r for r in caplog.records if "going on without it" in r.message]) == 1
    assert not os.path.lexists(path)
    index.close()


@pytest.mark.parametrize("error", [lmdb.CorruptedError("stub"), lmdb.DiskError("stub"), OSError(5)])
def test_any_lmdb_error_costs_the_memory_and_one_line(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    records = Records(1)
    records.write(0, key_of(1))
    index = index_of(path, 1)
    index.open(adopted=False)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(index, "_transact", fail)
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert index.sync(records.bytes) == 0
        assert index.sync(records.bytes) == 0
    assert str(error) in index.trouble
    assert len(caplog.records) == 1
    assert not os.path.lexists(path)
    index.close()


@pytest.mark.parametrize("adopted", [False, True])
def test_environment_that_cannot_be_begun_is_no_error(tmp_path: Path, adopted: bool) -> None:
    index = index_of(tmp_path / "absent" / "v.lmdb", 1)
    assert index.open(adopted=adopted).keys == ()
    assert "cannot begin" in index.trouble
    assert index.sync(bytes(RECORD_BYTES)) == 0
    index.close()


# -- use


def test_misuse_raises_and_changes_nothing(path: Path) -> None:
    with pytest.raises(StepwellUsageError, match="15 bytes"):
        VolumeIndex(str(path), volume_id=bytes(15), slots=1)
    for slots in (0, 2**24 + 1):
        with pytest.raises(StepwellUsageError, match="slots"):
            index_of(path, slots)
    with pytest.raises(StepwellUsageError, match="memory_entries"):
        index_of(path, 1, memory_entries=-1)
    index = index_of(path, 1)
    with pytest.raises(StepwellUsageError, match="before open"):
        index.sync(bytes(RECORD_BYTES))
    assert not path.exists()
    index.open(adopted=False)
    with pytest.raises(StepwellUsageError, match="opened twice"):
        index.open(adopted=False)
    for keys, stamps in (([b"a"], []), ([b""], [1]), ([b"a" * 65], [1]), ([b"a"], [2**63])):
        with pytest.raises(StepwellUsageError):
            index.remember(keys, stamps)
    index.close()
    index.close()
    with pytest.raises(StoreClosedError):
        index.sync(bytes(RECORD_BYTES))
    assert read(path)["memory"] == {}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_cannot_use_it_and_harms_nothing(path: Path) -> None:
    records = Records(2)
    records.write(0, key_of(1))
    index = index_of(path, 2)
    index.open(adopted=False)
    index.sync(records.bytes)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            index.sync(records.bytes)
        except ForkedError:
            index.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    records.write(1, key_of(2))
    assert index.sync(records.bytes) == 1
    index.close()
    assert len(read(path)["index"]) == 2


def test_one_module_imports_lmdb() -> None:
    package = Path(stepwell.__file__).parent
    importers = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "lmdb" for name in names):
                importers.add(file.relative_to(package).as_posix())
    assert importers == {"tiers/lmdb_index.py"}
