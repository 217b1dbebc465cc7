"""What the store promises: what was saved is found, right, in the fastest tier, and room is made by rank, exactly."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stepwell.clock import ManualClock
from stepwell.errors import LeaseClosedError
from stepwell.hashing import Namespace
from stepwell.index import Miss, Tier
from stepwell.store import PageStore
from stepwell.testing.faults import inject, wait_paused
from store_kit import (
    PAGE_BYTES,
    PAGE_TOKENS,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    assert_unpinned,
    assert_whole,
    chain,
    stamps,
)

HOST_BYTES = 64 * 4096  # 64 slots: a slot of the slab is 4 KiB
ONE_VOLUME = {"shared": VOLUME_BYTES, "disk": VOLUME_BYTES}
TIERS = {
    "host": {"host": HOST_BYTES, "shared": 0, "disk": 0},
    "shared": {"shared": VOLUME_BYTES, "disk": 0},
    "disk": {"shared": 0, "disk": VOLUME_BYTES},
    "shared+disk": ONE_VOLUME,
    "all": {"host": HOST_BYTES, **ONE_VOLUME},
}
each_tier = pytest.mark.parametrize("sizes", [pytest.param(sizes, id=name) for name, sizes in TIERS.items()])
each_single_tier = pytest.mark.parametrize(
    ("tier", "sizes"), [pytest.param(Tier[name.upper()], TIERS[name], id=name) for name in ("host", "shared", "disk")]
)


def capacity(rig: Rig, tier: Tier) -> int:
    return rig.store.stats().tiers[tier.name.lower()].capacity


def fill(rig: Rig, tier: Tier, *, first: int = 1) -> list[int]:
    """Fill a tier with chains of 8 pages (a shorter one last) and return their numbers, oldest first."""
    numbers, left = [], capacity(rig, tier) - rig.pages(tier)
    while left > 0:
        numbers.append(first + len(numbers))
        rig.save(chain(numbers[-1], min(8, left)))
        left -= 8
    return numbers


# Saving and finding


@each_tier
def test_what_was_saved_is_found_and_right(open_rig: OpenRig, sizes: dict[str, int]) -> None:
    rig = open_rig(**sizes)
    result = rig.save(chain(1, 12))
    assert (result.saved, result.present, result.pending, result.refused) == (12, 0, 0, 0)
    assert result.transfer.ok.all()
    assert rig.load(chain(1, 12)) == 12
    assert rig.load(chain(2, 12)) == 0


@each_tier
@pytest.mark.parametrize("order", ["page", "layer"])
def test_either_order_delivers_every_layer(open_rig: OpenRig, sizes: dict[str, int], order: str) -> None:
    rig = open_rig(**sizes)
    rig.save(chain(1, 12))
    transfer = rig.start_load(chain(1, 12), order=order)
    assert transfer.wait()
    assert transfer.layers_done == 2
    assert transfer.ok_pages == 12
    assert np.array_equal(rig.rows[:12], stamps(chain(1, 12)))


def test_a_save_goes_through_to_shared_and_disk(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME)
    rig.save(chain(1, 5))
    assert [rig.pages(tier) for tier in (Tier.HOST, Tier.SHARED, Tier.DISK)] == [0, 5, 5]


def test_a_match_names_the_fastest_tier_of_each_page(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 6))
    assert rig.store.evict(Tier.SHARED, 2) == 2
    with rig.store.match(chain(1, 6)) as match:
        assert match.spans == [(0, 4, Tier.SHARED), (4, 2, Tier.DISK)]
        assert match.miss is Miss.NONE
        assert match.tokens == 6 * PAGE_TOKENS


def test_pages_loaded_from_disk_return_to_shared_memory(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 6))
    assert rig.store.evict(Tier.SHARED, 6) == 6
    assert rig.load(chain(1, 6)) == 6
    rig.store.flush()
    assert rig.pages(Tier.SHARED) == 6
    assert rig.store.stats().tiers["disk"].resident == 6


def test_pages_loaded_from_disk_go_to_host_memory_where_shared_is_full(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME, low_watermark=0.0)
    *others, last = fill(rig, Tier.SHARED)
    leases = [rig.store.match(chain(number, 8)) for number in others]
    rig.store.match(chain(last, 8)).close()  # the youngest on disk
    gone = rig.store.evict(Tier.SHARED, 8)  # the last chain, which is on disk too
    rig.save(chain(1000, gone))
    leases.append(rig.store.match(chain(1000, gone)))
    assert rig.load(chain(last, gone)) == gone
    rig.store.flush()
    assert rig.pages(Tier.HOST) == gone
    assert rig.load(chain(last, gone)) == gone
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("sizes", [TIERS["shared"], TIERS["disk"], ONE_VOLUME])
def test_a_restart_finds_what_was_saved(open_rig: OpenRig, sizes: dict[str, int]) -> None:
    rig = open_rig(**sizes)
    rig.save(chain(1, 12))
    rig.close()
    rig = open_rig(**sizes)
    assert all(tier.resident == 12 for tier in rig.store.stats().tiers.values())  # C106: right before any operation
    assert rig.load(chain(1, 12)) == 12


def test_what_another_load_brings_back_up_is_not_brought_to_host_memory_too(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME)
    rig.save(chain(1, 8))
    assert rig.store.evict(Tier.SHARED, 8) == 8
    with inject("mover.unit", "pause"):
        transfers = [rig.start_load(chain(1, 8)) for _ in range(2)]
        wait_paused("mover.unit")
    assert all(transfer.wait() and transfer.ok.all() for transfer in transfers)
    assert [rig.pages(tier) for tier in (Tier.HOST, Tier.SHARED)] == [0, 8]


def test_host_memory_is_lost_at_a_restart(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["host"])
    rig.save(chain(1, 4))
    rig.close()
    assert open_rig(**TIERS["host"]).load(chain(1, 4)) == 0


def test_a_page_is_saved_once(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 4))
    again = rig.save(chain(1, 6))
    assert (again.saved, again.present, again.refused) == (2, 4, 0)
    assert rig.pages(Tier.SHARED) == 6


def test_a_page_that_another_brings_is_pending(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    with inject("mover.unit", "pause"):
        first = rig.save(chain(1, 4), wait=False)
        wait_paused("mover.unit")
        with rig.store.match(chain(1, 4)) as match:
            assert (match.pages, match.pending, match.miss) == (0, 4 * PAGE_TOKENS, Miss.PENDING)
        second = rig.save(chain(1, 4), wait=False)
        assert (second.saved, second.pending) == (0, 4)
    assert first.transfer.wait()
    assert rig.load(chain(1, 4)) == 4


def test_the_tail_of_a_page_stays_private(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    result = rig.save(chain(1, 3, tail=PAGE_TOKENS - 1))
    assert result.saved == 3
    assert rig.load(chain(1, 3, tail=PAGE_TOKENS - 1)) == 3
    short = rig.save(chain(2, 0, tail=1))
    assert (short.saved, short.transfer.done) == (0, True)
    assert rig.load(chain(2, 0, tail=1)) == 0


def test_a_prefix_is_found_in_a_longer_chain_and_up_to_where_it_parts(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    rig.save(chain(1, 8))
    assert rig.load(chain(1, 5)) == 5
    other = chain(1, 8).copy()
    other[5 * PAGE_TOKENS + 1] += 1
    assert rig.load(other) == 5
    rig.save(other)
    assert rig.load(other) == 8
    assert rig.load(chain(1, 8)) == 8


def test_tokens_may_be_a_list(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    rig.save(chain(1, 3))
    with rig.store.match(chain(1, 3).tolist()) as match:
        assert match.pages == 3


def test_the_source_may_be_written_to_once_it_is_released(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    result = rig.save(chain(1, 8), wait=False)
    while not result.transfer.source_released:
        pass
    rig.rows[:8] = 0
    result.transfer.wait()
    assert rig.load(chain(1, 8)) == 8


# Namespaces and epochs


def test_namespaces_never_match_each_other(open_rig: OpenRig) -> None:  # C058
    rig = open_rig(**ONE_VOLUME)
    names = [
        None,
        Namespace(adapter="X"),
        Namespace(salt="X"),
        Namespace(adapter="", salt="X"),
        Namespace(adapter="X", salt=""),
        Namespace(adapter="a", salt="bc"),
        Namespace(adapter="ab", salt="c"),
        Namespace(adapter="", salt=""),
    ]
    for number, name in enumerate(names):
        assert rig.load(chain(1, 2), namespace=name) == 0, f"{name} found pages of {names[:number]}"
        rig.save(chain(1, 2), namespace=name)
    for name in names:
        assert rig.load(chain(1, 2), namespace=name) == 2


def test_pages_of_another_epoch_are_misses_at_once(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME)
    rig.save(chain(1, 4))
    rig.store.set_epoch("second weights")
    assert rig.load(chain(1, 4)) == 0
    assert rig.save(chain(1, 4)).saved == 4
    assert rig.load(chain(1, 4)) == 4


def test_pages_of_another_epoch_leave_first(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"], low_watermark=0.0)
    fill(rig, Tier.SHARED)
    rig.store.set_epoch(1)
    rig.save(chain(500, 8))
    fresh = capacity(rig, Tier.SHARED) - 16
    for number in range(501, 501 + fresh // 8):
        rig.save(chain(number, 8))
    assert rig.load(chain(500, 8)) == 8


def test_a_match_made_before_the_epoch_changed_delivers_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 4))
    with rig.store.match(chain(1, 4)) as match:
        rig.store.set_epoch(1)
        rig.rows[:4] = 0xEE
        transfer = rig.store.load(match, into=rig.pool[:4])
        assert transfer.wait()
    assert transfer.ok_pages == 0
    assert (rig.rows[:4] == 0xEE).all()
    assert rig.store.stats().misses["epoch"] == 4


def test_running_loads_end_as_misses_when_the_epoch_changes(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 4))
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 4))
        wait_paused("mover.unit")
        rig.store.set_epoch(1)
        assert transfer.wait()
        rig.rows[:4] = 0xEE
    rig.store.flush()
    assert transfer.ok_pages == 0
    assert (rig.rows[:4] == 0xEE).all()
    assert rig.store.stats().misses["epoch"] == 4


def test_queued_saves_are_dropped_when_the_epoch_changes(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    with inject("mover.unit", "pause"):
        result = rig.save(chain(1, 4), wait=False)
        wait_paused("mover.unit")
        rig.store.set_epoch(1)
    assert result.transfer.wait()
    assert not result.transfer.ok.any()
    assert rig.pages(Tier.SHARED) == 0


def test_what_is_saved_after_the_epoch_changed_is_recovered_under_it(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 4))
    rig.store.set_epoch(7)
    rig.save(chain(2, 4))
    rig.close()
    rig = open_rig(**ONE_VOLUME, epoch=7)
    assert rig.load(chain(2, 4)) == 4
    assert rig.load(chain(1, 4)) == 0
    assert rig.pages(Tier.DISK) == 8
    rig.store.set_epoch(0)
    assert rig.load(chain(1, 4)) == 4
    assert rig.load(chain(2, 4)) == 0


def test_a_volume_adopted_after_the_epoch_changed_is_recovered_under_the_new_one(
    open_rig: OpenRig, directories: Directories
) -> None:
    """The other store's volume becomes an orphan; who takes it has changed its epoch since it was opened."""
    sizes = {"shared": 2 * VOLUME_BYTES, "disk": 0}
    taker, giver = open_rig(**sizes), open_rig(**sizes, epoch=7)
    giver.save(chain(1, 4))
    giver.close()
    taker.store.set_epoch(7)
    fill(taker, Tier.SHARED, first=10)
    taker.round()
    assert taker.load(chain(1, 4)) == 4


# Pins


def test_a_pinned_page_is_not_evicted(open_rig: OpenRig) -> None:  # C018
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 4))
    rig.save(chain(2, 4))
    with rig.store.match(chain(1, 4)) as match:
        assert rig.store.stats().tiers["shared"].pinned == 4
        assert rig.store.evict(Tier.SHARED, 1000) == 4
        assert rig.store.clear() == 4 + 4  # on disk only the other chain, and the head's copies that nobody reads
        transfer = rig.store.load(match, into=rig.pool[:4])
        assert transfer.wait()
        assert transfer.ok_pages == 4
        assert np.array_equal(rig.rows[:4], stamps(chain(1, 4)))


def test_a_match_may_be_closed_while_its_load_runs(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"], low_watermark=0.0)
    rig.save(chain(1, 4))
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 4))  # closes the match before it returns
        wait_paused("mover.unit")
        assert rig.store.clear() == 0
    assert transfer.wait()
    assert transfer.ok_pages == 4
    assert np.array_equal(rig.rows[:4], stamps(chain(1, 4)))


@each_single_tier
def test_a_slow_reader_gets_its_bytes_while_others_write_ten_times_the_capacity(
    open_rig: OpenRig, tier: Tier, sizes: dict[str, int]
) -> None:  # C016
    rig = open_rig(**sizes, slots=64)
    writer = np.zeros((8, PAGE_BYTES), np.uint8)
    pool = rig.store.lend(writer.reshape(8, 2, 2, PAGE_TOKENS, 2, 32), axes="slot layer stream token head dim")
    rig.save(chain(1, 16))
    with inject("mover.before_copy", "pause", nth=8):
        transfer = rig.start_load(chain(1, 16), order="layer" if tier is Tier.HOST else "page")
        wait_paused("mover.before_copy")
        for number in range(100, 100 + 10 * capacity(rig, tier) // 8):
            # The workers may all stand at the fault: what is asked is that nothing of the reader's is given to others.
            writer[:] = stamps(chain(number, 8))
            rig.store.save(chain(number, 8), source=pool[:])
    assert transfer.wait()
    assert transfer.ok_pages == 16
    assert np.array_equal(rig.rows[:16], stamps(chain(1, 16)))


def test_lookups_that_load_nothing_leave_nothing_pinned(open_rig: OpenRig) -> None:  # C024
    rig = open_rig(**TIERS["host"], low_watermark=0.0)
    rig.save(chain(1, 8))
    for _ in range(100):
        with rig.store.match(chain(1, 8)) as match:
            assert match.pages == 8
        rig.store.match(chain(1, 8))  # dropped
    assert_unpinned(rig.store)
    total = capacity(rig, Tier.HOST)
    for number in range(2, 2 + total // 8):
        assert rig.save(chain(number, 8)).refused == 0


def test_a_lease_ends_once(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    rig.save(chain(1, 4))
    first, second = rig.store.match(chain(1, 4)), rig.store.match(chain(1, 4))
    first.close()
    first.close()
    assert rig.store.stats().tiers["shared"].pinned == 4
    with pytest.raises(LeaseClosedError, match="closed"):
        rig.store.load(first, into=rig.pool[:4])
    second.close()
    assert_unpinned(rig.store)


# Room


@each_single_tier
def test_evict_drops_exactly_what_was_asked(open_rig: OpenRig, tier: Tier, sizes: dict[str, int]) -> None:  # C031
    rig = open_rig(**sizes, low_watermark=0.0)
    for number in range(5):
        rig.save(chain(number, 10))
    assert rig.store.evict(tier, 10) == 10
    assert rig.pages(tier) == 40
    assert rig.store.evict(tier, 0) == 0
    assert rig.store.evict(tier, -3) == 0
    assert rig.pages(tier) == 40
    assert rig.store.evict(tier, 1000) == 40
    assert rig.pages(tier) == 0
    assert rig.store.evict(Tier.DEVICE, 5) == 0  # there is none


def test_a_miss_is_counted_once_however_often_one_looks(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0)
    rig.save(chain(1, 8))
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))
        wait_paused("mover.unit")
        rig.store.set_epoch(1)
    assert transfer.wait()  # decided; its misses are counted once it has ended
    assert rig.store.flush(30.0)
    looks = [rig.store.stats().misses for _ in range(3)]
    assert sum(looks[0].values()) > 0
    assert looks == looks[:1] * 3


def test_the_slot_of_a_page_that_leaves_is_nobodys_before_its_record_is_freed(open_rig: OpenRig) -> None:
    rig = open_rig(host=0, shared=0, low_watermark=0.0)
    rig.save(chain(0, 10))
    free = rig.store.stats().tiers["disk"].free
    with inject("volume.retire", "pause", nth=1):
        evicting = threading.Thread(target=rig.store.evict, args=(Tier.DISK, 1))
        evicting.start()
        wait_paused("volume.retire")
        during = rig.store.stats().tiers["disk"]
    evicting.join()
    assert (during.free, during.leaving) == (free, 1)
    assert rig.store.stats().tiers["disk"].free == free + 1


def test_evicting_takes_the_tail_before_the_head_and_the_oldest_chain_first(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    for number in (1, 2, 3):
        rig.save(chain(number, 6))
    rig.load(chain(1, 6))  # now the youngest
    assert rig.store.evict(Tier.SHARED, 8) == 8
    assert [rig.load(chain(number, 6)) for number in (2, 3, 1)] == [0, 4, 6]


def test_a_full_tier_keeps_what_was_used_last(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    total = capacity(rig, Tier.SHARED)
    for number in range(3 * total // 8):
        assert rig.save(chain(number, 8)).refused == 0
        assert rig.load(chain(number, 8)) == 8
    assert rig.load(chain(0, 8)) == 0


def test_making_room_for_a_tail_does_not_take_its_head(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"], low_watermark=0.0)
    rig.save(chain(900, 8))
    fill(rig, Tier.SHARED)
    result = rig.save(chain(900, 24))
    assert (result.saved, result.present) == (16, 8)
    assert rig.load(chain(900, 24)) == 24


def test_making_room_for_a_tail_that_does_not_fit_takes_none_of_its_head(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["host"], slots=128, low_watermark=0.0)
    rig.save(chain(1, 60))
    result = rig.save(chain(1, 100))
    assert (result.saved, result.present, result.refused) == (4, 60, 36)


def test_a_chain_longer_than_the_tier_is_saved_as_far_as_it_fits(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["host"], slots=128, low_watermark=0.0)
    result = rig.save(chain(1, 100))
    assert (result.saved, result.refused) == (64, 36)
    assert result.full is not None
    assert (result.full.tier, result.full.needed, result.full.free) == ("host", 36, 0)
    assert rig.load(chain(1, 100)) == 64


def test_a_save_into_pinned_memory_is_refused_with_the_numbers(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"], low_watermark=0.0)
    leases = [rig.store.match(chain(number, 8)) for number in fill(rig, Tier.SHARED)]
    pinned = capacity(rig, Tier.SHARED)
    result = rig.save(chain(900, 3))
    assert (result.saved, result.refused) == (0, 3)
    assert result.full is not None
    assert str(result.full) == (
        f"shared tier full: need 3 pages, 0 free, 0 evictable, {pinned} pinned by lookups and transfers, "
        "0 kept by pin(), 0 leaving"
    )
    assert rig.store.stats().refused_pages == 3
    for lease in leases:
        lease.close()
    assert rig.save(chain(900, 3)).saved == 3


def test_what_shared_memory_has_no_room_for_still_goes_to_disk(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME, low_watermark=0.0)
    leases = [rig.store.match(chain(number, 8)) for number in fill(rig, Tier.SHARED)]
    rig.store.evict(Tier.DISK, 8)
    result = rig.save(chain(900, 3))
    assert (result.saved, result.refused) == (3, 0)
    assert result.transfer.ok.all()
    assert result.full is not None
    assert (result.full.tier, result.full.needed) == ("shared", 3)
    assert rig.load(chain(900, 3)) == 3
    for lease in leases:
        lease.close()


def test_a_reader_that_probes_all_the_time_does_not_stop_a_writer(open_rig: OpenRig) -> None:  # C036
    rig = open_rig(**TIERS["host"])
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            for number in range(8):
                rig.store.match(chain(number, 8)).close()

    prober = threading.Thread(target=probe)
    prober.start()
    try:
        refused = sum(rig.save(chain(number, 8)).refused for number in range(200))
    finally:
        stop.set()
        prober.join()
    assert refused == 0
    assert rig.save(chain(200, 8)).refused == 0
    assert rig.load(chain(200, 8)) == 8


def total_bytes(path: Path) -> int:
    """Add up a directory's files; one that is renamed while we look is looked at again."""
    while True:
        try:
            return sum(entry.lstat().st_size for entry in path.glob("[vtx]-*") if ".lmdb" not in entry.name)
        except FileNotFoundError:
            continue


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_a_capacity_is_kept_at_all_times_and_the_newest_pages_stay(
    open_rig: OpenRig, directories: Directories, tier: Tier
) -> None:  # C047
    cap = 4 * VOLUME_BYTES
    rig = open_rig(**{"shared": 0, "disk": 0, tier.name.lower(): cap}, keeper=True)
    path = directories.shared if tier is Tier.SHARED else directories.disk
    written = 0
    while written < 10 * cap:
        number = written // (64 * PAGE_BYTES)
        rig.save(chain(number, 64))
        written += 64 * PAGE_BYTES
        # LMDB's files beside the volumes are not part of the budget (FORMAT.md 1).
        assert total_bytes(path) <= cap
        assert rig.load(chain(number, 64)) == 64
    assert capacity(rig, tier) * PAGE_BYTES < cap


def test_a_tier_grows_by_volumes_while_there_is_room(open_rig: OpenRig) -> None:
    rig = open_rig(shared=3 * VOLUME_BYTES, disk=0)
    one = capacity(rig, Tier.SHARED)
    for number in range(3 * one // 8):
        rig.save(chain(number, 8))
        rig.round()
    assert capacity(rig, Tier.SHARED) == 3 * one


# Forgetting


def test_forget_drops_a_chain_from_every_tier_and_nothing_else(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 6))
    rig.save(chain(2, 6))
    assert rig.store.forget(chain(1, 6)) == 12
    assert (rig.load(chain(1, 6)), rig.load(chain(2, 6))) == (0, 6)
    assert rig.store.forget(chain(1, 6)) == 0


def test_forget_keeps_the_pages_of_the_first_tokens(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    rig.save(chain(1, 6))
    assert rig.store.forget(chain(1, 6), keep=2 * PAGE_TOKENS + 1) == 3
    assert rig.load(chain(1, 6)) == 3


def test_forget_leaves_what_another_chain_shares_only_as_far_as_it_was_named(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    other = np.concatenate([chain(1, 3), chain(2, 3)])
    rig.save(chain(1, 6))
    rig.save(other)
    assert rig.store.forget(other, keep=3 * PAGE_TOKENS) == 3
    assert (rig.load(other), rig.load(chain(1, 6))) == (3, 6)


def test_what_was_forgotten_is_not_recovered(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 6))
    rig.save(chain(2, 6))
    rig.store.forget(chain(1, 6))
    rig.close()
    rig = open_rig(**ONE_VOLUME)
    assert (rig.load(chain(1, 6)), rig.load(chain(2, 6))) == (0, 6)


def test_a_recovered_chain_can_be_forgotten_by_its_tokens(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    rig.save(chain(1, 6))
    rig.close()
    rig = open_rig(**ONE_VOLUME)
    assert rig.store.forget(chain(1, 6)) == 12


def test_a_pinned_page_is_not_forgotten(open_rig: OpenRig) -> None:
    rig = open_rig(**TIERS["shared"])
    rig.save(chain(1, 6))
    with rig.store.match(chain(1, 3)):
        assert rig.store.forget(chain(1, 6)) == 3
    assert rig.load(chain(1, 6)) == 3


def test_clear_empties_every_tier(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME)
    rig.save(chain(1, 6))
    assert rig.store.clear() == 12
    assert [rig.pages(tier) for tier in (Tier.HOST, Tier.SHARED, Tier.DISK)] == [0, 0, 0]
    assert rig.save(chain(1, 6)).saved == 6


# Counting


def test_counters_equal_the_callers_own_tally(open_rig: OpenRig) -> None:  # C104
    rig = open_rig(**ONE_VOLUME, low_watermark=0.0)
    rig.save(chain(1, 6))
    rig.save(chain(1, 8))
    rig.load(chain(1, 8))
    rig.store.evict(Tier.SHARED, 3)
    rig.load(chain(1, 10))
    rig.load(chain(2, 5))
    rig.store.flush()
    stats = rig.store.stats()
    assert (stats.saved_pages, stats.refused_pages) == (8, 0)
    assert (stats.lookups, stats.lookup_pages) == (3, 8 + 10 + 5)
    assert stats.hit_pages == {"shared": 8 + 5, "disk": 3}
    assert stats.delivered_pages == {"shared": 8 + 5, "disk": 3}
    assert stats.misses == dict.fromkeys(stats.misses, 0) | {"absent": 2 + 5}
    assert stats.evicted_pages == {"shared": 3}
    assert stats.tiers["disk"].bytes_read == 3 * PAGE_BYTES
    assert stats.tiers["disk"].bytes_written == 8 * PAGE_BYTES
    assert (stats.checksum_failures, stats.io_errors, stats.bus_faults, stats.poisoned) == (0, 0, 0, False)


def test_verify_reads_every_page_and_finds_nothing_wrong(open_rig: OpenRig) -> None:
    rig = open_rig(**ONE_VOLUME)
    for number in range(9):
        rig.save(chain(number, 8))
    found = rig.store.verify()
    assert (found.pages, found.damaged) == (144, 0)
    assert_unpinned(rig.store)


# Many at once


def test_threads_that_save_load_evict_and_forget_are_never_served_wrong(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, **ONE_VOLUME, keeper=True)

    def work(seed: int) -> int:
        random = np.random.default_rng(seed)
        rows = np.zeros((24, PAGE_BYTES), np.uint8)
        pool = rig.store.lend(rows.reshape(24, 2, 2, PAGE_TOKENS, 2, 32), axes="slot layer stream token head dim")
        loaded = 0
        for _ in range(150):
            tokens = chain(int(random.integers(12)), int(random.integers(1, 25)))
            pages = tokens.size // PAGE_TOKENS
            match random.choice(["save", "save", "load", "load", "load", "evict", "forget", "leave"]):
                case "save":
                    rows[:pages] = stamps(tokens)
                    result = rig.store.save(tokens, source=pool[:pages])
                    result.transfer.wait()  # what was saved here is in `rows`
                case "load":
                    with rig.store.match(tokens) as match:
                        rows[:] = 0xEE
                        transfer = rig.store.load(
                            match, into=pool[: match.pages], order=random.choice(["page", "layer"])
                        )
                        transfer.wait()
                        ok = np.flatnonzero(transfer.ok)
                        assert np.array_equal(rows[ok], stamps(tokens)[ok])
                        loaded += ok.size
                case "evict":
                    rig.store.evict(Tier(int(random.integers(1, 4))), int(random.integers(20)))
                case "forget":
                    rig.store.forget(tokens, keep=int(random.integers(tokens.size)))
                case "leave":
                    rig.store.match(tokens).close()
        return loaded

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4))) > 0
    assert_whole(rig.store)
    assert_unpinned(rig.store)
    assert rig.store.verify().damaged == 0


def test_leases_of_probes_end_by_the_clock(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**TIERS["shared"], clock=clock)
    rig.save(chain(1, 4))
    from stepwell.hashing import prefix_hashes

    rig.store.probe(prefix_hashes(chain(1, 4), page_tokens=PAGE_TOKENS), lease=5.0)
    rig.round()
    assert rig.store.stats().probed_pages == 4
    clock.advance(5.0)
    rig.round()
    assert_unpinned(rig.store)


def test_the_calls_of_a_store_name_the_class_that_they_give_and_take() -> None:
    names = {name: str(inspect.signature(getattr(PageStore, name))) for name in ("open", "open_many", "extend")}
    assert names["open"].endswith("-> 'Sequence'")
    assert names["open_many"].endswith("-> 'list[Sequence]'")
    assert "sequences: 'Seq[Sequence]'" in names["extend"]
