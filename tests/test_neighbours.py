"""Two stores on one directory hit each other's pages: never a wrong byte, whatever the owner does meanwhile.

Two stores of one process are two processes to the directory; where it matters, the owner is a process of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepwell as sw
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.mover import Transfer
from stepwell.rates import Flow
from stepwell.testing import faults
from stepwell.tiers import directory as tier_directory
from stepwell.tiers import neighbours
from store_kit import (
    PAGE_BYTES,
    PAGE_TOKENS,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    Tokens,
    chain,
    stamps,
    stamps_of,
)

MEDIA = pytest.mark.parametrize("sizes", [{"disk": 0}, {"shared": 0}, {}], ids=["shared", "disk", "both"])


def two(open_rig: OpenRig, **sizes: int) -> tuple[Rig, Rig]:
    """Open an owner and a reader on the same directories."""
    return open_rig(**sizes), open_rig(**sizes)


def keys_of(tokens: Tokens) -> np.ndarray:
    return prefix_hashes(tokens, page_tokens=PAGE_TOKENS)


@contextmanager
def copy_held(point: str = "foreign.read", nth: int = 1) -> Iterator[None]:
    """Hold the first copy from a neighbour at a point, until resume()."""
    with faults.inject(point, "pause", nth=nth):
        yield


def start_load(reader: Rig, tokens: Tokens, pages: int) -> Transfer:
    """Match all of some tokens and begin to load them."""
    with reader.store.match(tokens) as match:
        assert match.pages == pages
        reader.rows[:pages] = 0xEE
        return reader.store.load(match, into=reader.pool[:pages])


def assert_right(reader: Rig, transfer: Transfer, tokens: Tokens) -> int:
    """Wait; what is said to have come is right. Returns the pages of the prefix that came."""
    assert transfer.wait(30.0)
    ok = np.flatnonzero(transfer.ok)
    assert np.array_equal(reader.rows[ok], stamps(tokens)[ok])
    return transfer.ok_pages


# ---- hits ------------------------------------------------------------------------------------------------------------


@MEDIA
@pytest.mark.parametrize("order", ["page", "layer"])
def test_a_neighbours_page_is_a_hit(open_rig: OpenRig, sizes: dict[str, int], order: str) -> None:
    owner, reader = two(open_rig, **sizes)
    owner.save(chain(1, 9))
    assert reader.load(chain(1, 9)) == 0
    reader.round()
    assert reader.load(chain(1, 9), order=order) == 9
    stats = reader.store.stats()
    assert stats.neighbours.delivered == 9
    assert stats.hit_pages == {"host": 9}
    assert stats.delivered_pages == {"host": 9}
    assert reader.load(chain(1, 9), order=order) == 9  # from host memory now
    assert reader.store.stats().neighbours.delivered == 9


def test_what_is_ours_and_what_is_a_neighbours_continue_each_other(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig, disk=0)
    tokens = chain(1, 9)
    owner.save(tokens)
    for rows in (slice(0, 3), slice(6, 8)):  # by keys: tokens cannot leave a gap
        keys = keys_of(tokens)[rows]
        reader.rows[: len(keys)] = stamps_of(keys)
        assert (reader.store.save_keys(keys, source=reader.pool[: len(keys)]) == 0).all()
    reader.round()
    with reader.store.match(tokens) as match:
        assert [(first, pages, tier) for first, pages, tier in match.spans] == [
            (0, 3, Tier.SHARED), (3, 3, Tier.HOST), (6, 2, Tier.SHARED), (8, 1, Tier.HOST),
        ]  # fmt: skip
        reader.rows[:9] = 0xEE
        assert assert_right(reader, reader.store.load(match, into=reader.pool[:9]), tokens) == 9
    assert reader.store.stats().neighbours.delivered == 4


@pytest.mark.parametrize("lease", [0.0, 5.0])
def test_probe_counts_a_neighbours_pages_and_load_keys_brings_them(open_rig: OpenRig, lease: float) -> None:
    owner, reader = two(open_rig)
    tokens = chain(1, 6)
    keys = keys_of(tokens)
    owner.save(tokens)
    reader.round()
    with copy_held():
        probe = reader.store.probe(keys, lease=lease)
        assert probe.run == 6
        assert (probe.tiers == Tier.HOST).all()
        faults.wait_paused("foreign.read")
        faults.resume("foreign.read")
        assert reader.store.load_keys(keys, into=reader.pool[:6]).all()
    assert np.array_equal(reader.rows[:6], stamps(tokens))
    assert reader.store.stats().probed_pages == 0  # they have come


def test_probe_that_is_not_to_read_ahead_counts_what_is_here(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 6))
    reader.round()
    assert reader.store.probe(keys_of(chain(1, 6)), readahead=False).run == 0
    assert reader.store.flush(10.0)
    assert reader.store.stats().neighbours.delivered == 0


def test_what_a_neighbour_has_is_held_also_behind_a_gap(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 4))
    keys = keys_of(chain(1, 4))
    reader.round()
    asked = np.stack([keys[0], keys[0] ^ 1, keys[1], keys[2], keys[2] ^ 1])
    assert reader.store.holds(asked).tolist() == [True, False, True, True, False]


def test_a_probe_with_a_bound_stages_what_a_neighbour_has_only_as_far_as_that_is_here_in_time(
    open_rig: OpenRig,
) -> None:
    owner, reader = two(open_rig)
    tokens = chain(1, 6)
    keys = keys_of(tokens)
    owner.save(tokens)
    reader.round()
    reads = Flow.nothing().reads
    reads[0, 4 + Tier.SHARED] = reads[0, 4 + Tier.DISK] = (PAGE_BYTES * 10_000, int(10_000e9))  # a second a page
    told = replace(Flow.nothing(), reads=reads)
    reader.store._rates._flow = lambda: told
    probe = reader.store.probe(keys, within=0.5)
    assert (probe.run, probe.slow) == (0, 6)
    assert reader.store.stats().misses["slow"] == 6
    assert reader.store.stats().transfers == 0
    probe = reader.store.probe(keys, within=4.0, lease=0)
    assert (probe.run, probe.slow) == (4, 2)
    assert reader.store.flush(10.0)
    assert reader.store.stats().neighbours.delivered == 4


def test_keys_that_are_no_chain_are_found_each_on_its_own(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 3))
    owner.save(chain(2, 3))
    reader.round()
    keys = np.concatenate([keys_of(chain(1, 3))[1:], keys_of(chain(9, 2)), keys_of(chain(2, 3))[:2]])
    ok = reader.store.load_keys(keys, into=reader.pool[: len(keys)])
    assert ok.tolist() == [True, True, False, False, True, True]
    assert np.array_equal(reader.rows[: len(keys)][ok], stamps_of(keys)[ok])
    assert reader.load(chain(2, 3)) == 3  # and by tokens: what was found by key is of no known parent


def test_two_look_ups_share_one_copy(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    tokens = chain(1, 5)
    owner.save(tokens)
    reader.round()
    with copy_held():
        first, second = start_load(reader, tokens, 5), start_load(reader, tokens, 5)
        faults.wait_paused("foreign.read")
        assert not first.done
        assert not second.done
        faults.resume("foreign.read")
        assert assert_right(reader, first, tokens) == assert_right(reader, second, tokens) == 5
    assert reader.store.stats().neighbours.delivered == 5


def test_what_only_a_neighbour_has_is_saved_when_the_caller_saves_it(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 5))
    reader.round()
    assert reader.load(chain(1, 5)) == 5
    result = reader.save(chain(1, 5))
    assert (result.saved, result.present) == (5, 0)
    assert reader.pages(Tier.SHARED) == reader.pages(Tier.DISK) == 5


def test_an_orphan_that_nobody_has_adopted_is_read_and_an_adopted_one_is_ours(
    open_rig: OpenRig, directories: Directories
) -> None:
    reader = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    owner = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    owner.save(chain(1, 5))
    owner.close()
    reader.round()
    assert reader.load(chain(1, 5)) == 5
    assert reader.store.stats().neighbours.volumes == 1
    reader.store._tiers[Tier.SHARED].grow(reader.store._index, 10_000)  # adopts the orphan
    reader.round()
    assert reader.store.stats().neighbours.volumes == 0
    assert reader.store.stats().neighbours.pages == 0
    reader.store.evict(Tier.HOST, 100)
    with reader.store.match(chain(1, 5)) as match:
        assert match.tiers == {Tier.SHARED: 5}
    assert len(directories.volumes("vol")) == 2


def test_a_volume_that_becomes_ours_while_the_directory_is_listed_is_no_neighbours(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    tier, listed = rig.store._tiers[Tier.SHARED], neighbours.list_directory
    [first] = tier.members

    def list_behind_a_birth(path: str) -> Any:
        tier.grow(rig.store._index, 2 * first.count)
        return listed(path)

    monkeypatch.setattr(neighbours, "list_directory", list_behind_a_birth)
    assert rig.store._neighbours is not None
    for followed in rig.store._neighbours._followed:
        followed._changed_ns = -1  # as if something had changed
    rig.store._look_at_neighbours()
    assert len(tier.members) == 2
    assert rig.store.stats().neighbours.volumes == 0


def test_a_store_without_neighbours_has_no_staging_and_one_without_staging_no_neighbours(open_rig: OpenRig) -> None:
    owner = open_rig()
    owner.save(chain(1, 5))
    owner.round()
    assert "host" not in owner.store.stats().tiers
    reader = open_rig(staging=0)
    reader.round()
    assert reader.load(chain(1, 5)) == 0
    assert "host" not in reader.store.stats().tiers
    owner.round()
    assert "host" in owner.store.stats().tiers


def test_what_was_delivered_is_noted_for_its_owner(open_rig: OpenRig, directories: Directories) -> None:
    owner, reader = two(open_rig, disk=0)
    owner.save(chain(1, 3))
    reader.round()
    ours = owner.store._tiers[Tier.SHARED].directory  # type: ignore[attr-defined]
    theirs = reader.store._tiers[Tier.SHARED].directory  # type: ignore[attr-defined]
    ours.scan()
    assert ours.touched() == []
    assert reader.load(chain(1, 3)) == 3
    reader.round()
    theirs.touched()  # tells
    [held] = ours.held
    touched = ours.touched()
    assert sorted(slot for _, slot, _ in touched) == [0, 1, 2]
    assert {(volume_id.hex(), generation) for volume_id, _, generation in touched} == {(held.volume_id, 2)}


# ---- what the owner does meanwhile -----------------------------------------------------------------------------------


def evict_all(owner: Rig, path: Path) -> None:
    owner.store.clear()


def rewrite_all(owner: Rig, path: Path) -> None:
    """Other pages in the same slots."""
    owner.store.clear()
    for number in range(50, 80):
        owner.save(chain(number, 9))


def close_it(owner: Rig, path: Path) -> None:
    owner.close()


def remove_files(owner: Rig, path: Path) -> None:
    for suffix in ("vol", "pages", "meta", "lock"):
        for name in list(path.glob(f"v-*.{suffix}")):
            name.unlink()


def truncate_files(owner: Rig, path: Path) -> None:
    for suffix in ("vol", "pages", "meta"):
        for name in path.glob(f"v-*.{suffix}"):
            os.truncate(name, 4096)


def damage_pages(owner: Rig, path: Path) -> None:
    for name in [*path.glob("v-*.vol"), *path.glob("v-*.pages")]:
        data = np.memmap(name, mode="r+")
        first = struct.unpack_from("<Q", data[:4096].tobytes(), 136)[0] if name.suffix == ".vol" else 0
        data[first:] ^= 0xFF
        del data


DEEDS = [evict_all, rewrite_all, close_it, remove_files, truncate_files, damage_pages]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("medium", ["shared", "disk"])
def test_never_a_wrong_byte_whatever_the_owner_does_in_the_middle_of_a_copy(
    directories: Directories, open_rig: OpenRig, deed: Callable[[Rig, Path], None], nth: int, medium: str
) -> None:
    config = directories.config(**{"disk" if medium == "shared" else "shared": 0}, io_threads=1)
    owner, reader = Rig(config), open_rig(config)
    tokens = chain(1, 6)
    owner.save(tokens)
    reader.round()
    try:
        # Each page is read in four calls: record, checksums, bytes, generation. The first page is left in peace.
        with copy_held("file.pread", 4 + nth):
            transfer = start_load(reader, tokens, 6)
            faults.wait_paused("file.pread")
            deed(owner, getattr(directories, medium))
            faults.resume("file.pread")
            came = assert_right(reader, transfer, tokens)
        if deed in (close_it, remove_files):
            assert came == 6  # the files are open
            return
        assert 1 <= came < 6
        reader.round()
        assert reader.load(tokens) == came  # what did not come is not offered again
        stats = reader.store.stats()
        assert stats.misses["corrupt" if deed is damage_pages else "foreign-gone"] > 0
        assert stats.checksum_failures == 0  # ours: nothing here is damaged
    finally:
        owner.close()


@pytest.mark.parametrize("deed", [evict_all, rewrite_all, truncate_files, damage_pages])
def test_what_goes_between_the_look_up_and_the_copy_is_a_miss(
    directories: Directories, open_rig: OpenRig, deed: Callable[[Rig, Path], None]
) -> None:
    config = directories.config(disk=0)
    owner, reader = Rig(config), open_rig(config)
    tokens = chain(1, 6)
    owner.save(tokens)
    reader.round()
    try:
        with copy_held():
            match = reader.store.match(tokens)
            faults.wait_paused("foreign.read")
            deed(owner, directories.shared)
            faults.resume("foreign.read")
            assert reader.store.flush(10.0)
        assert match.pages == 6
        reader.rows[:6] = 0xEE
        assert assert_right(reader, reader.store.load(match, into=reader.pool[:6]), tokens) == 0
        match.close()
        assert reader.load(tokens) == 0
    finally:
        owner.close()


def test_a_damaged_page_is_refused_and_the_next_place_is_asked(open_rig: OpenRig, directories: Directories) -> None:
    owner, reader = two(open_rig)
    tokens = chain(1, 6)
    owner.save(tokens)
    reader.round()
    damage_pages(owner, directories.shared)
    assert reader.load(tokens) == 6  # from the owner's disk, if its shared memory was asked first
    refused = reader.store.stats().neighbours.refused
    for _ in range(2):
        reader.store.evict(Tier.HOST, 100)
        assert reader.load(tokens) == 6
    assert reader.store.stats().neighbours.refused == refused  # asked once each


def test_a_page_that_was_refused_is_taken_once_it_is_written_again(open_rig: OpenRig, directories: Directories) -> None:
    owner, reader = two(open_rig, disk=0)
    tokens = chain(1, 3)
    owner.save(tokens)
    reader.round()
    damage_pages(owner, directories.shared)
    assert reader.load(tokens) == 0
    while reader.store.stats().neighbours.pages:
        assert reader.load(tokens) == 0
    owner.store.clear()
    owner.save(tokens)
    reader.round()
    assert reader.load(tokens) == 3


def test_an_owner_that_evicts_what_is_known_is_no_promise(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 6))
    reader.round()
    assert reader.store.stats().neighbours.pages == 12
    owner.store.clear()
    reader.round()
    assert reader.store.stats().neighbours.pages == 0
    assert reader.load(chain(1, 6)) == 0


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_a_match_is_as_long_as_there_is_staging_for_it(open_rig: OpenRig) -> None:
    owner, reader = open_rig(), open_rig(staging=4 * 4096)
    tokens = chain(1, 10)
    owner.save(tokens)
    reader.round()
    with reader.store.match(tokens) as match:
        assert match.pages == 4
        with reader.store.match(chain(1, 10)) as again:
            assert again.pages == 4  # all of it is pinned: no more is promised
    assert reader.load(tokens) == 4
    owner.save(chain(2, 10))
    reader.round()
    assert reader.load(chain(2, 10)) == 4  # the least recently used made room
    assert reader.store.load_keys(keys_of(tokens), into=reader.pool[:10]).all()  # it waits: so piece by piece
    assert np.array_equal(reader.rows[:10], stamps(tokens))


def test_a_full_queue_ends_the_match_where_ours_ends(open_rig: OpenRig) -> None:
    owner, reader = open_rig(), open_rig(queue_units=16)
    owner.save(chain(1, 5))
    reader.save(chain(1, 2))
    reader.round()
    with copy_held("mover.unit", 0):
        held = [reader.store.save(chain(n, 1), source=reader.pool[:1]) for n in range(100, 130)]
        with reader.store.match(chain(1, 5)) as match:
            assert match.pages == 2
        faults._core.fault_clear()
    for result in held:
        result.transfer.wait()
    assert reader.load(chain(1, 5)) == 5


def test_a_deadline_holds_while_the_copy_is_waited_for(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    tokens = chain(1, 5)
    owner.save(tokens)
    reader.round()
    with copy_held():
        with reader.store.match(tokens) as match:
            reader.rows[:5] = 0xEE
            transfer = reader.store.load(match, into=reader.pool[:5], deadline=0.0)
        assert transfer.wait()
        assert transfer.ok_pages == 0
        assert transfer.source_released
        faults.wait_paused("foreign.read")
        faults.resume("foreign.read")
        assert reader.store.flush(10.0)
    assert (reader.rows[:5] == 0xEE).all()
    assert reader.load(tokens) == 5
    assert reader.store.stats().misses["deadline"] == 5


@pytest.mark.parametrize("how", ["cancel", "revoke", "close", "epoch", "keys"])
def test_nothing_leaks_from_a_load_that_ends_while_it_waits(open_rig: OpenRig, how: str) -> None:
    owner, reader = open_rig(), open_rig(close_timeout=0.0)
    tokens = chain(1, 5)
    owner.save(tokens)
    reader.round()
    with copy_held():
        if how == "keys":
            assert not reader.store.load_keys(keys_of(tokens), into=reader.pool[:5], deadline=0.0).any()
            faults.wait_paused("foreign.read")
            faults.resume("foreign.read")
            return
        transfer = start_load(reader, tokens, 5)
        faults.wait_paused("foreign.read")
        if how == "cancel":
            transfer.cancel()
        elif how == "revoke":
            transfer.revoke()
        elif how == "epoch":
            reader.store.set_epoch(7)
        else:
            closer = threading.Thread(target=reader.close)
            closer.start()
        faults.resume("foreign.read")
        if how == "close":
            closer.join()
        assert_right(reader, transfer, tokens)
    assert transfer.ok_pages == 0
    assert how == "close" or reader.load(tokens) == (0 if how == "epoch" else 5)


def test_pages_of_another_epoch_are_misses_at_once(open_rig: OpenRig) -> None:
    owner, reader = two(open_rig)
    owner.save(chain(1, 5))
    reader.round()
    reader.store.set_epoch(1)
    assert reader.load(chain(1, 5)) == 0
    owner.store.set_epoch(1)
    owner.save(chain(1, 5))
    reader.round()
    assert reader.load(chain(1, 5)) == 5
    reader.store.set_epoch(0)
    assert reader.load(chain(1, 5)) == 5


# ---- rings -----------------------------------------------------------------------------------------------------------


def ring(path: Path) -> tuple[int, int]:
    """Return where a volume's ring is and how many entries it has."""
    header = path.read_bytes()[:4096]
    return struct.unpack_from("<Q", header, 128)[0], struct.unpack_from("<I", header, 76)[0]


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)


def test_a_reader_that_has_fallen_behind_the_ring_reads_all_records(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_directory, "RING_ENTRIES", 64)
    owner, reader = two(open_rig, disk=0)
    reader.round()
    for number in range(12):
        owner.save(chain(number, 9))
    owner.store.evict(Tier.SHARED, 20)
    reader.round()
    assert reader.store.stats().neighbours.pages == 12 * 9 - 20
    assert sum(reader.load(chain(number, 9)) for number in range(12)) == 12 * 9 - 20


@pytest.mark.parametrize("counter", [0, 1, 5, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("slot", [0, 3, 1 << 20, 0xFFFFFFFF])
def test_a_hostile_ring_costs_nothing_but_a_look_at_the_records(
    open_rig: OpenRig, directories: Directories, counter: int, slot: int
) -> None:
    owner, reader = two(open_rig, disk=0)
    owner.save(chain(1, 6))
    reader.round()
    for path in directories.volumes("vol"):
        at, entries = ring(path)
        write_at(path, at + 64, struct.pack("<IIQ", slot, 0, 2) * entries)
        write_at(path, at, struct.pack("<Q", counter))
    for _ in range(3):
        reader.round()
    assert reader.load(chain(1, 6)) == 6


def test_a_volume_that_is_not_ours_to_read_is_passed_by(open_rig: OpenRig, directories: Directories) -> None:
    reader = open_rig(disk=0)
    name = directories.shared / f"v-{'ab' * 16}.vol"
    name.write_bytes(b"\0" * 8192)
    (directories.shared / f"v-{'cd' * 16}.vol").symlink_to(name)
    os.mkfifo(directories.shared / f"v-{'ef' * 16}.vol")
    reader.round()
    reader.round()
    assert reader.store.stats().neighbours.volumes == 0


def test_a_volume_whose_files_go_is_let_go(open_rig: OpenRig, directories: Directories) -> None:
    owner, reader = two(open_rig, disk=0)
    owner.save(chain(1, 6))
    reader.round()
    assert reader.store.stats().neighbours.volumes == 1
    for held in owner.store._tiers[Tier.SHARED].directory.held:  # type: ignore[attr-defined]
        (directories.shared / f"v-{held.volume_id}.vol").unlink()
    reader.round()
    assert reader.store.stats().neighbours == sw.stats.NeighbourStats()


# ---- processes -------------------------------------------------------------------------------------------------------


class Child:
    """A process of its own on the same directories; see neighbour_child.py."""

    def __init__(self, directories: Directories) -> None:
        script = Path(__file__).with_name("neighbour_child.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(directories.shared), str(directories.disk)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child(directories: Directories) -> Iterator[Child]:
    process = Child(directories)
    try:
        yield process
    finally:
        process.end()


def test_processes_hit_each_others_pages_stopped_killed_or_well(child: Child, open_rig: OpenRig) -> None:
    reader = open_rig()
    assert child.ask("save 1 9") == "9"
    reader.round()
    assert reader.load(chain(1, 9)) == 9
    reader.save(chain(2, 9))
    while child.ask("load 2 9") != "9":  # its keeper sees them within a few rounds
        pass
    child.process.send_signal(signal.SIGSTOP)
    reader.store.evict(Tier.HOST, 100)
    assert reader.load(chain(1, 9)) == 9
    child.process.kill()
    child.process.wait()
    reader.store.evict(Tier.HOST, 100)
    reader.round()
    assert reader.load(chain(1, 9)) == 9


def test_two_stores_that_evict_and_read_each_other_serve_right_bytes_only(open_rig: OpenRig) -> None:
    rigs = [open_rig(shared=2 * VOLUME_BYTES, disk=0, staging=16 * 4096) for _ in range(2)]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        rig, random = rigs[number], np.random.default_rng(number)
        try:
            for step in range(400):
                if step % 8 == 0:
                    rig.round()
                tokens = chain(int(random.integers(60)), int(random.integers(1, 13)))
                roll = random.random()
                if roll < 0.3:
                    rig.save(tokens)
                elif roll < 0.35:
                    rig.store.evict(Tier.SHARED, 40)
                else:
                    rig.load(tokens)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(rig.store.stats().neighbours.delivered for rig in rigs) > 50


@pytest.mark.parametrize("point", ["foreign.read", "file.pread"])
def test_a_read_that_fails_is_a_miss_and_nothing_of_ours_is_at_fault(open_rig: OpenRig, point: str) -> None:
    owner, reader = two(open_rig, disk=0)
    tokens = chain(1, 2)
    for fault in faults.fail_each(point, errno.EIO, most=40):
        owner.store.clear()
        owner.save(tokens)
        reader.store.clear()
        reader.round()
        with fault:
            reader.load(tokens)
        assert reader.store.check() == ""
    assert reader.store.stats().io_errors == 0


# ---- sequences -------------------------------------------------------------------------------------------------------


def both_round(*engines: Any) -> None:
    for engine in engines:
        engine.store._tick()


def test_a_sequence_loads_what_a_neighbour_has_computed(make_engine: Any) -> None:
    from sequence_kit import prompt

    owner, reader = make_engine(), make_engine()
    tokens = prompt(1, 26)
    owner.cache(tokens)
    both_round(reader)
    sequence = reader.open(tokens)
    assert (sequence.ready, sequence.loading) == (0, 24)
    reader.settle(sequence)
    assert sequence.ready == 24
    reader.verify(sequence)
    assert sequence.reused == {Tier.HOST: 24}
    reader.finish(sequence)
    reader.verify(sequence)
    sequence.close()
    assert reader.store.stats().neighbours.delivered == 6


def test_a_prefix_longer_than_the_staging_comes_piece_by_piece(make_engine: Any) -> None:
    from sequence_kit import prompt

    owner, reader = make_engine(), make_engine(host=3)
    tokens = prompt(1, 42)
    owner.cache(tokens)
    both_round(reader)
    sequence = reader.open(tokens)
    assert sequence.loading == 12
    reader.settle(sequence)
    assert sequence.ready == 40
    reader.verify(sequence)
    sequence.close()


@pytest.mark.parametrize("how", ["close", "suspend", "reset", "drop"])
def test_nothing_leaks_from_a_sequence_that_ends_while_a_neighbours_pages_come(make_engine: Any, how: str) -> None:
    from sequence_kit import StepFailedError, prompt, stamps

    owner, reader = make_engine(), make_engine()
    tokens = prompt(1, 26)
    owner.cache(tokens)
    both_round(reader)
    with copy_held():
        sequence = reader.open(tokens)
        faults.wait_paused("foreign.read")
        if how == "close":
            sequence.close()
        elif how == "suspend":
            sequence.suspend()
        elif how == "drop":
            del sequence
        else:
            with pytest.raises(StepFailedError):
                reader.write([0], [stamps(tokens)[0]], fail=True)
            reader.store.device.renew()
        faults.resume("foreign.read")
    assert reader.store.flush(10.0)
    again = reader.open(tokens)
    reader.settle(again)
    reader.verify(again)
    assert again.ready == 24


def test_a_sequence_computes_what_a_neighbour_lost_on_the_way(make_engine: Any) -> None:
    from sequence_kit import prompt

    owner, reader = make_engine(), make_engine()
    tokens = prompt(1, 26)
    owner.cache(tokens)
    both_round(reader)
    with copy_held():
        sequence = reader.open(tokens)
        faults.wait_paused("foreign.read")
        assert sequence.loading == 24
        owner.store.clear()
        faults.resume("foreign.read")
    reader.settle(sequence)
    assert (sequence.ready, sequence.loading, sequence.pending) == (0, 0, 0)
    reader.finish(sequence)
    reader.verify(sequence)
