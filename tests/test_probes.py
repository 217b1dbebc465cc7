"""What a probe finds is kept by key: once, until the latest end asked for, a get that brings it, or want of room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sequence_kit import flip_bit
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.testing.faults import inject, wait_paused
from store_kit import (
    PAGE_TOKENS,
    SHARED_ONLY,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    assert_unpinned,
    assert_whole,
    chain,
    stamps_of,
)

HOST_PAGES = 64
A_QUARTER = HOST_PAGES // 4
LONG = 1e6
Keys = np.ndarray


def keys_of(*numbers: int) -> Keys:
    return np.array([list(number.to_bytes(8, "big") * 3) for number in numbers], np.uint8)


def numbers_kept(rig: Rig) -> dict[int, float]:
    """Return the numbers of the keys that probes keep, and until when: what was asked for longest ago first."""
    ids, until = rig.store._index.list_courtesies()
    assert rig.store.stats().probed_pages == len(ids)
    labels = rig.store._index.labels(ids)
    return {int.from_bytes(key[:8], "big"): at for (key, *_), at in zip(labels, until.tolist(), strict=True)}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=0.0)


@pytest.fixture
def open_rig(open_rig: OpenRig) -> Iterator[OpenRig]:
    """The fixture of conftest.py, for stores whose probes may keep what they have found until the test is over."""
    rigs: list[Rig] = []

    def make(*tiers: object, **how: object) -> Rig:
        rigs.append(open_rig(*tiers, **how))
        return rigs[-1]

    yield make
    for each in rigs:
        if not each.store.closed:
            each.store._probes.end_all()


@pytest.fixture
def rig(open_rig: OpenRig, clock: ManualClock) -> Iterator[Rig]:
    """A store with 64 pages of host memory, which is full of keys 0 to 63, used in this order."""
    made: Rig = open_rig(host=HOST_PAGES * 4096, shared=0, disk=0, clock=clock, low_watermark=0.0)
    save(made, keys_of(*range(HOST_PAGES)))
    yield made
    assert made.store.check() == ""


def save(rig: Rig, keys: Keys) -> None:
    rig.rows[: len(keys)] = stamps_of(keys)
    assert (rig.store.save_keys(keys, source=rig.pool[: len(keys)]) != 2).all()


def get(rig: Rig, keys: Keys) -> list[bool]:
    rig.rows[: len(keys)] = 0xEE
    ok = rig.store.load_keys(keys, into=rig.pool[: len(keys)])
    assert np.array_equal(rig.rows[: len(keys)][ok], stamps_of(keys)[ok]), "wrong bytes were served"
    return ok.tolist()  # type: ignore[no-any-return]


# ---- per key ---------------------------------------------------------------------------------------------------------


def test_a_probe_that_is_repeated_refreshes_its_lease_and_does_not_stack(rig: Rig, clock: ManualClock) -> None:
    for _ in range(1000):
        assert rig.store.probe(keys_of(1, 2, 3), lease=5.0).run == 3
        clock.advance(0.01)
    stats = rig.store.stats()
    assert (stats.probed_pages, stats.leases, stats.tiers["host"].pinned) == (3, 0, 3)
    clock.advance(4.9)
    rig.round()
    assert len(numbers_kept(rig)) == 3
    clock.advance(0.1)
    rig.round()
    assert_unpinned(rig.store)


@pytest.mark.parametrize("leases", [(10.0, 1.0), (1.0, 10.0)])
def test_a_page_is_kept_until_the_latest_of_the_ends_that_were_asked_for(
    rig: Rig, clock: ManualClock, leases: tuple[float, float]
) -> None:
    for lease in leases:
        rig.store.probe(keys_of(1, 2), lease=lease)
    clock.advance(9.9)
    rig.round()
    assert numbers_kept(rig) == {2: 10.0, 1: 10.0}
    rig.store.evict(Tier.HOST, HOST_PAGES)
    assert rig.pages(Tier.HOST) == 2
    clock.advance(0.1)
    rig.round()
    assert rig.store.evict(Tier.HOST, HOST_PAGES) == 2


def test_a_longer_and_a_shorter_probe_of_a_chain_and_one_that_shares_its_beginning_are_one(
    rig: Rig, clock: ManualClock
) -> None:
    rig.store.probe(keys_of(1, 2, 3), lease=10.0)
    clock.advance(1.0)
    rig.store.probe(keys_of(1, 2, 3, 4, 5), lease=5.0)
    assert numbers_kept(rig) == {5: 6.0, 4: 6.0, 3: 10.0, 2: 10.0, 1: 10.0}
    rig.store.probe(keys_of(1), lease=20.0)
    rig.store.probe(keys_of(1, 2, 9), lease=1.0)
    assert numbers_kept(rig) == {5: 6.0, 4: 6.0, 3: 10.0, 9: 2.0, 2: 10.0, 1: 21.0}
    for seconds, left in ((1.0, {1, 2, 3, 4, 5}), (4.0, {1, 2, 3}), (4.0, {1}), (11.0, set())):
        clock.advance(seconds)
        rig.round()
        assert set(numbers_kept(rig)) == left


def test_a_key_that_is_named_twice_is_kept_once(rig: Rig) -> None:
    assert rig.store.probe(keys_of(1, 2, 1, 2), lease=LONG).run == 4
    assert numbers_kept(rig) == {2: LONG, 1: LONG}
    assert get(rig, keys_of(1, 2)) == [True, True]
    assert_unpinned(rig.store)


def test_what_is_kept_is_not_evicted_but_goes_with_forget_and_clear(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 3))
    rig.store.probe(prefix_hashes(chain(1, 3), page_tokens=PAGE_TOKENS), lease=LONG)
    rig.save(chain(2, 3))
    assert rig.store.evict(Tier.SHARED, 3) == 3
    assert rig.store.forget(chain(1, 3), keep=PAGE_TOKENS) == 2
    assert (rig.load(chain(1, 3)), rig.store.evict(Tier.SHARED, 3)) == (1, 0)
    assert rig.store.clear() == 1
    assert rig.load(chain(1, 3)) == 0


def test_a_lease_without_end_ends_with_the_store(rig: Rig, clock: ManualClock) -> None:
    rig.store.probe(keys_of(1, 2), lease=float("inf"))
    clock.advance(1e9)
    rig.round()
    assert len(numbers_kept(rig)) == 2
    rig.close()
    assert rig.store._index.courtesies() == 0
    assert rig.store.check() == ""


# ---- a get -----------------------------------------------------------------------------------------------------------


def test_a_get_ends_what_is_kept_of_the_keys_that_it_brings_and_no_others(rig: Rig) -> None:
    rig.store.probe(keys_of(*range(12)), lease=LONG)
    rig.store.probe(keys_of(0, 1, 20), lease=LONG)
    assert get(rig, keys_of(*range(4, 8))) == [True] * 4  # in the middle
    assert set(numbers_kept(rig)) == {*range(4), *range(8, 12), 20}
    assert get(rig, keys_of(0, 50, 99, 20)) == [True, True, False, True]
    assert set(numbers_kept(rig)) == {1, 2, 3, *range(8, 12)}
    assert get(rig, keys_of(*range(12))) == [True] * 12
    assert_unpinned(rig.store)


def test_a_get_that_brings_nothing_ends_nothing(rig: Rig) -> None:
    rig.store.probe(keys_of(1, 2), lease=LONG)
    with inject("mover.unit", "pause"):
        assert not rig.store.load_keys(keys_of(1, 2), into=rig.pool[:2], deadline=0.0).any()
        wait_paused("mover.unit")
    assert rig.store.flush()
    assert set(numbers_kept(rig)) == {1, 2}
    assert get(rig, keys_of(1, 2)) == [True, True]
    assert_unpinned(rig.store)


def test_a_page_that_a_get_finds_damaged_is_kept_no_longer_and_can_be_saved_again(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1, 2, 3))
    rig.store.probe(keys_of(1, 2, 3), lease=LONG)
    flip_bit(directories.shared, stamps_of(keys_of(2))[0])
    assert get(rig, keys_of(1, 2, 3)) == [True, False, True]
    assert numbers_kept(rig) == {}
    rig.round()
    save(rig, keys_of(2))
    assert get(rig, keys_of(2)) == [True]


def test_a_load_of_a_match_ends_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 3))
    rig.store.probe(prefix_hashes(chain(1, 3), page_tokens=PAGE_TOKENS), lease=LONG)
    assert rig.load(chain(1, 3)) == 3
    assert rig.store.stats().probed_pages == 3


def test_a_get_of_another_kind_ends_nothing(rig: Rig) -> None:
    rig.store.probe(keys_of(1), lease=LONG)
    assert not rig.store.load_keys(keys_of(1), into=rig.pool[:1], kind=2).any()
    assert set(numbers_kept(rig)) == {1}


# ---- how much --------------------------------------------------------------------------------------------------------


def test_probes_keep_a_quarter_of_a_tier_and_of_a_run_its_beginning(rig: Rig) -> None:
    rig.store.probe(keys_of(*range(HOST_PAGES)), lease=LONG)
    assert set(numbers_kept(rig)) == set(range(A_QUARTER))
    rig.store.probe(keys_of(*range(40, 44)), lease=LONG)
    assert set(numbers_kept(rig)) == {*range(A_QUARTER - 4), *range(40, 44)}  # what was asked for longest ago went
    rig.store.probe(keys_of(*range(4)), lease=LONG)
    rig.store.probe(keys_of(*range(50, 60)), lease=LONG)
    assert set(numbers_kept(rig)) == {0, 1, 2, 3, 40, 41, *range(50, 60)}
    assert rig.store.evict(Tier.HOST, HOST_PAGES) == HOST_PAGES - A_QUARTER


def test_what_is_kept_in_one_tier_does_not_count_in_another(open_rig: OpenRig) -> None:
    rig = open_rig(host=16 * 4096, shared=0, disk=VOLUME_BYTES, low_watermark=0.0)
    rig.round()
    save(rig, keys_of(*range(12)))
    assert rig.store.probe(keys_of(*range(12)), lease=LONG, readahead=False).tiers.tolist() == [Tier.DISK] * 12
    assert len(numbers_kept(rig)) == 12
    assert get(rig, keys_of(20, 0, 1, 2, 3, 4, 5)) == [False] + [True] * 6  # into host memory, and no longer kept
    rig.store.probe(keys_of(*range(6)), lease=LONG, readahead=False)
    assert set(numbers_kept(rig)) == {0, 1, 2, 3, *range(6, 12)}


def test_no_more_than_a_number_is_kept_of_ever_so_large_a_tier() -> None:
    most = 1 << 18
    index = _core.Index(1)
    index.add_slots(Tier.DISK, 0, 2 * most)
    index.set_epoch(0)
    numbers = np.arange(most + 1000, dtype=np.uint64)
    keys = numbers.view(np.uint8).reshape(-1, 8)
    batch = index.claim_absent_keys(keys, 1, 0, b"", 1 << Tier.DISK)
    index.commit_many(batch.pages, Tier.DISK, np.ascontiguousarray(batch.numbers[:, Tier.DISK]))
    index.unpin_pages(batch.pages)
    for first in range(0, len(keys), 8192):
        found = index.match_keys_and_pin(keys[first : first + 8192], 1, 1 << Tier.DISK)
        index.keep_until(found.lease, 0.0, 1.0)
        index.release(found.lease)
    assert index.courtesies() == most
    assert index.list_courtesies()[0].size == most
    assert index.counts(Tier.DISK)["pinned"] == most
    assert index.end_due_courtesies(1.0) == most
    assert index.counts(Tier.DISK)["pinned"] == 0


def test_where_room_lacks_what_was_asked_for_longest_ago_goes_first(rig: Rig) -> None:
    rig.store.probe(keys_of(*range(8)), lease=LONG)
    rig.store.probe(keys_of(*range(8, 16)), lease=LONG)
    save(rig, keys_of(*range(100, 100 + HOST_PAGES - 16)))
    assert len(numbers_kept(rig)) == 16, "others could leave"
    with rig.store.match(np.zeros(0, np.int32)):
        save(rig, keys_of(*range(100, 100 + HOST_PAGES - 14)))
    assert set(range(8, 16)) <= set(numbers_kept(rig))
    assert len(numbers_kept(rig)) < 16


# ---- the rest of a store ---------------------------------------------------------------------------------------------


def test_a_change_of_the_epoch_ends_what_is_kept(rig: Rig) -> None:
    rig.store.probe(keys_of(1, 2, 3), lease=LONG)
    rig.store.set_epoch(0)
    assert len(numbers_kept(rig)) == 3, "it was this one"
    rig.store.set_epoch(7)
    assert_unpinned(rig.store)
    rig.store.set_epoch(0)
    assert_unpinned(rig.store)


def test_what_is_kept_does_not_hold_up_the_reopening_of_a_tier(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1, 2, 3))
    rig.store.probe(keys_of(1, 2, 3), lease=LONG)
    assert rig.store.reopen(Tier.SHARED).pages == 3
    assert rig.store.check() == ""
    assert rig.store.probe(keys_of(1, 2, 3), lease=LONG).run == 3


def test_threads_that_probe_get_save_and_end_leave_nothing_kept(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_PAGES * 4096, shared=0, disk=2 * VOLUME_BYTES, low_watermark=0.0, slots=512)
    save(rig, keys_of(*range(HOST_PAGES)))
    stop = threading.Event()

    def ask(seed: int) -> int:
        random = np.random.default_rng(seed)
        runs = 0
        while not stop.is_set():
            first = int(random.integers(HOST_PAGES - 8))
            keys = keys_of(*range(first, first + int(random.integers(1, 8))))
            runs += rig.store.probe(keys, lease=float(random.choice([0.0, 1e-4, 1.0]))).run
        return runs

    def end(seed: int) -> int:
        while not stop.is_set():
            rig.round()
            rig.store.probe(keys_of(seed), lease=0.0)
        return 1

    def use(seed: int) -> int:
        random = np.random.default_rng(seed)
        rows = slice(seed * 16, seed * 16 + 8)
        came = 0
        for _ in range(300):
            keys = keys_of(*(random.permutation(HOST_PAGES * 2)[:8].tolist()))
            if random.integers(2):
                came += int(rig.store.load_keys(keys, into=rig.pool[rows]).sum())
            else:
                rig.rows[rows] = stamps_of(keys)
                came += int((rig.store.save_keys(keys, source=rig.pool[rows]) == 0).sum())
        return came

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(each, seed) for seed, each in enumerate((ask, ask, end))]
        try:
            using = [threads.submit(use, seed) for seed in range(3)]
            assert all(each.result() > 0 for each in using)
        finally:
            stop.set()
        assert all(each.result() > 0 for each in asking)
    assert_whole(rig.store)
    rig.store._probes.end_all()
    assert_unpinned(rig.store)
    assert rig.store.check() == ""


# ---- reading ahead ---------------------------------------------------------------------------------------------------


def on_disk(open_rig: OpenRig, pages: int, **how: object) -> Rig:
    """A store whose pages 0 to `pages` - 1 are on disk alone."""
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=16 * VOLUME_BYTES, slots=512, **how)
    rig.round()
    for first in range(0, pages, 64):
        save(rig, keys_of(*range(first, min(pages, first + 64))))
    rig.store.evict(Tier.SHARED, 10_000)
    assert rig.pages(Tier.DISK) >= pages
    return rig


def test_a_probe_reads_no_more_ahead_than_an_eighth_of_a_tier(open_rig: OpenRig) -> None:
    rig = on_disk(open_rig, 200)
    share = rig.store.stats().tiers["shared"].capacity // 8
    assert 8 < share < 100
    keys = keys_of(*range(200))
    with inject("mover.unit", "pause"):
        assert rig.store.probe(keys, lease=0.0).run == 200
        assert rig.store.stats().tiers["shared"].arriving == share
        assert rig.store.probe(keys, lease=0.0).run == 200
        assert rig.store.probe(keys_of(*range(100, 200)), lease=0.0).run == 100
        assert rig.store.stats().tiers["shared"].arriving == share
    assert rig.store.flush()
    assert rig.pages(Tier.SHARED) == share
    rig.store.probe(keys, lease=0.0)  # what came makes room for what is next
    assert rig.store.flush()
    assert rig.pages(Tier.SHARED) == 2 * share
    assert_unpinned(rig.store)


def test_a_probe_reads_no_more_ahead_than_half_of_the_movers_queue(open_rig: OpenRig) -> None:
    rig = on_disk(open_rig, 20, queue_units=16)
    with inject("mover.unit", "pause"):
        assert rig.store.probe(keys_of(*range(20)), lease=0.0).run == 20
        assert 0 < rig.store.stats().tiers["shared"].arriving <= 8
    assert rig.store.flush()


def test_a_probe_that_is_repeated_begins_no_copy_twice(open_rig: OpenRig) -> None:
    rig = on_disk(open_rig, 8, host=HOST_PAGES * 4096)
    with inject("mover.unit", "pause"):
        rig.store.probe(keys_of(*range(8)), lease=0.0)
        begun = rig.store.stats().transfers
        for _ in range(10):
            rig.store.probe(keys_of(*range(8)), lease=0.0)
        stats = rig.store.stats()
        assert stats.transfers == begun
        assert (stats.tiers["shared"].arriving, stats.tiers["host"].arriving) == (8, 0)
    assert rig.store.flush()
    assert rig.pages(Tier.SHARED) == 8


def test_what_is_on_its_way_to_another_tier_is_not_begun_again(open_rig: OpenRig) -> None:
    rig = on_disk(open_rig, 8, host=HOST_PAGES * 4096, low_watermark=0.0)
    capacity = rig.store.stats().tiers["shared"].capacity
    others = keys_of(*range(1000, 1000 + capacity))
    for first in range(0, capacity, 64):
        save(rig, others[first : first + 64])
    assert rig.pages(Tier.SHARED) == capacity
    held = rig.store._index.match_keys_and_pin(others, 1, 1 << Tier.SHARED)
    assert held.pages == capacity
    with inject("mover.unit", "pause"):
        rig.store.probe(keys_of(*range(8)), lease=0.0)
        arriving = rig.store.stats().tiers
        assert (arriving["host"].arriving, arriving["shared"].arriving) == (8, 0)
        rig.store._index.release(held.lease)
        rig.store.evict(Tier.SHARED, capacity)
        rig.store.probe(keys_of(*range(8)), lease=0.0)
        arriving = rig.store.stats().tiers
        assert (arriving["host"].arriving, arriving["shared"].arriving) == (8, 0)
    assert rig.store.flush()
    assert (rig.pages(Tier.HOST), rig.pages(Tier.SHARED)) == (8, 0)


def test_a_copy_begun_ahead_that_is_cancelled_keeps_no_get(open_rig: OpenRig) -> None:
    rig = on_disk(open_rig, 4)
    with ThreadPoolExecutor(1) as pool:
        with inject("mover.unit", "pause"):
            rig.store.probe(keys_of(*range(4)), lease=LONG)
            wait_paused("mover.unit")
            running = pool.submit(get, rig, keys_of(*range(4)))
            for each in rig.store._copies._ahead:
                each.core.cancel()
        assert running.result() == [True] * 4


def test_what_was_not_read_ahead_in_time_is_dropped(open_rig: OpenRig, clock: ManualClock) -> None:
    rig = on_disk(open_rig, 12, clock=clock, io_threads=1)
    with inject("mover.unit", "pause"):
        rig.store.probe(keys_of(*range(6)), lease=1.0)
        wait_paused("mover.unit")
        rig.store.probe(keys_of(*range(6, 12)), lease=1.0)
        clock.advance(0.5)
        rig.store.probe(keys_of(0), lease=1.0)
        rig.round()
        assert rig.store._probes.dropped == 0
        clock.advance(0.5)
        rig.round()
        assert rig.store._probes.dropped == 1, "somebody still asks for a page of the first"
    assert rig.store.flush()
    assert [rig.store.state(keys_of(number)[0].tobytes())[Tier.SHARED].name for number in (0, 5, 6, 11)] == [
        "RESIDENT", "RESIDENT", "ABSENT", "ABSENT",
    ]  # fmt: skip
    clock.advance(1.0)
    rig.round()
    assert_unpinned(rig.store)
