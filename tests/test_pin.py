"""A pinned prefix outlives eviction, forget and clear, and only for its time; it is bounded."""

from __future__ import annotations

import numpy as np
import pytest

import stepwell as sw
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.index import Tier
from stepwell.pins import MOST_PINS, PinsFull
from stepwell.testing.faults import inject, resume, wait_paused
from store_kit import PAGE_BYTES, PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain

HOST_BYTES = 64 * PAGE_BYTES


def crowd(rig: Rig, first: int, pages: int, *, at_a_time: int = 16) -> None:
    """Save other chains, `pages` pages in all, and let the keeper make room."""
    for number in range(first, first + pages // at_a_time):
        assert rig.save(chain(number, at_a_time)).refused == 0
        rig.round()


def test_a_pinned_prefix_outlives_any_number_of_other_pages(open_rig: OpenRig) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    pinned, other = chain(1, 20), chain(2, 20)
    rig.save(pinned)
    rig.save(other)
    pin = rig.store.pin(pinned, ttl=60.0)
    assert (pin.tokens, pin.pending, pin.full) == (20 * PAGE_TOKENS, 0, None)
    crowd(rig, 10, 8 * rig.store.stats().tiers["disk"].capacity)
    assert rig.load(pinned) == 20
    assert rig.load(other) == 0
    assert pin.kept == 20 * PAGE_TOKENS
    pin.close()


def test_a_pinned_page_may_leave_one_tier_while_another_has_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 6)
    rig.save(tokens)
    with rig.store.pin(tokens, ttl=60.0):
        assert rig.store.evict(Tier.SHARED, 100) == 6
        assert rig.store.evict(Tier.DISK, 100) == 0  # they are the last
        assert rig.store.stats().tiers["disk"].held == 6
        assert rig.load(tokens) == 6  # and back in shared memory by that
        assert rig.store.stats().tiers["disk"].held == 0
        assert rig.store.evict(Tier.DISK, 100) == 6
        assert rig.store.evict(Tier.SHARED, 100) == 0
        assert rig.load(tokens) == 6
    assert rig.store.evict(Tier.SHARED, 100) == 6


def test_without_a_lasting_tier_host_memory_keeps_what_is_pinned(open_rig: OpenRig) -> None:
    rig = open_rig(host=HOST_BYTES, shared=0, disk=0)
    tokens = chain(1, 4)
    rig.save(tokens)
    with rig.store.pin(tokens, ttl=60.0) as pin:
        assert pin.tokens == 4 * PAGE_TOKENS
        assert rig.store.evict(Tier.HOST, 100) == 0
    assert rig.store.evict(Tier.HOST, 100) == 4


def test_forget_and_clear_leave_what_is_pinned(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 6, tail=1)
    longer = np.concatenate([tokens[: 6 * PAGE_TOKENS], chain(9, 3)])
    rig.save(longer)
    with rig.store.pin(tokens, ttl=60.0):
        assert rig.store.forget(longer) == 2 * 3  # what lies behind goes, in both tiers
        assert (rig.pages(Tier.SHARED), rig.pages(Tier.DISK)) == (6, 6)
        assert rig.store.clear() == 6  # one copy of each
        assert rig.load(tokens) == 6
    assert rig.store.forget(tokens) == 2 * 6


def test_a_pin_ends_when_its_time_has_passed(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(clock=clock)
    tokens = chain(1, 3)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=10.0)
    clock.advance(9.9)
    rig.round()
    assert (pin.kept, pin.closed, rig.store.stats().pins) == (3 * PAGE_TOKENS, False, 1)
    clock.advance(0.2)
    assert pin.closed
    rig.round()
    assert (rig.store.stats().pins, rig.store.stats().pinned_pages) == (0, 0)
    assert rig.store.clear() == 6
    pin.close()


def test_pinned_again_it_is_kept_until_the_later_end(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(clock=clock)
    tokens = chain(1, 3)
    rig.save(tokens)
    short, long = rig.store.pin(tokens, ttl=10.0), rig.store.pin(tokens, ttl=20.0)
    assert rig.store.stats().pinned_pages == 3
    clock.advance(15.0)
    rig.round()
    assert (short.closed, long.closed) == (True, False)
    assert rig.store.clear() == 3
    long.close()
    assert rig.store.clear() == 3


def test_dropping_the_answer_does_not_end_the_pin(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(clock=clock)
    rig.save(chain(1, 3))
    rig.store.pin(chain(1, 3), ttl=10.0)
    assert rig.store.stats().pins == 1
    clock.advance(10.0)
    rig.round()
    assert rig.store.stats().pins == 0


def test_pages_whose_save_still_runs_are_kept_once_they_are_there(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 4)
    with inject("mover.before_copy", "pause", nth=1):
        saving = rig.save(tokens, wait=False)
        wait_paused("mover.before_copy")
        pin = rig.store.pin(tokens, ttl=60.0)
        resume("mover.before_copy")
    assert (pin.tokens, pin.pending) == (0, 4 * PAGE_TOKENS)
    saving.transfer.wait()
    assert pin.kept == 4 * PAGE_TOKENS
    assert rig.store.clear() == 4
    pin.close()


def test_what_is_saved_behind_a_pin_is_not_pinned(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 6)
    rig.save(tokens[: 2 * PAGE_TOKENS])
    pin = rig.store.pin(tokens, ttl=60.0)
    assert pin.tokens == 2 * PAGE_TOKENS
    rig.save(tokens)
    rig.store.clear()
    assert rig.load(tokens) == 2
    pin.close()


def test_a_prefix_that_is_not_cached_pins_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    pin = rig.store.pin(chain(1, 3), ttl=60.0)
    assert (pin.tokens, pin.pending, pin.full, pin.closed) == (0, 0, None, True)
    assert rig.store.stats().pins == 0


def test_more_than_the_fraction_is_refused_with_numbers(open_rig: OpenRig) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=2 * VOLUME_BYTES, pin_fraction=0.1)
    allowed = rig.store.stats().tiers["shared"].capacity // 10
    tokens, other = chain(1, allowed), chain(2, 1)
    rig.save(tokens)
    rig.save(other)
    first = rig.store.pin(tokens, ttl=60.0)
    assert first.tokens == tokens.size
    refused = rig.store.pin(other, ttl=60.0)
    assert refused.full == PinsFull(needed=1, pinned=allowed, allowed=allowed, pins=1)
    assert (refused.tokens, refused.closed) == (0, True)
    again = rig.store.pin(tokens, ttl=60.0)  # adds nothing
    assert again.tokens == tokens.size
    first.close()
    again.close()
    assert rig.store.pin(other, ttl=60.0).tokens == other.size


def test_what_a_new_store_has_just_saved_can_be_pinned_though_its_tiers_have_hardly_grown(open_rig: OpenRig) -> None:
    """The limit was a quarter of what had been taken: the system prompt that was saved first could not be pinned."""
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=16 * VOLUME_BYTES)
    present = rig.store.stats().tiers["shared"].capacity
    tokens = chain(1, present * 3 // 4)
    rig.save(tokens)
    assert rig.store.pin(tokens, ttl=60.0).tokens == tokens.size
    more = chain(2, 1)
    rig.save(more)
    assert rig.store.pin(more, ttl=60.0).full is not None, "a tier could be filled with pins"


def test_the_number_of_pins_is_bounded(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_PINS == 65536
    monkeypatch.setattr("stepwell.pins.MOST_PINS", 2)
    rig = open_rig()
    rig.save(chain(1, 1))
    pins = [rig.store.pin(chain(1, 1), ttl=60.0) for _ in range(3)]
    assert [pin.tokens for pin in pins] == [PAGE_TOKENS, PAGE_TOKENS, 0]
    assert pins[2].full is not None
    assert pins[2].full.pins == 2


def test_a_change_of_the_epoch_ends_pins(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 3)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=60.0)
    rig.store.set_epoch(7)
    assert pin.closed
    assert (rig.store.stats().pins, rig.store.stats().pinned_pages) == (0, 0)
    assert rig.store.clear() == 6
    rig.store.set_epoch(0)
    assert pin.closed


def test_the_same_epoch_set_again_ends_no_pin(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 3)
    rig.save(tokens)
    with rig.store.pin(tokens, ttl=60.0) as pin:
        rig.store.set_epoch(rig.store.epoch)
        assert pin.kept == tokens.size


def test_a_damaged_page_is_lost_and_kept_again_once_it_is_saved_again(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0)
    tokens = chain(1, 4)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=60.0)
    with rig.store.match(tokens) as match:
        ids, tiers, slots = match.locations()
    assert rig.store._index.quarantine(int(ids[1]), int(tiers[1]), int(slots[1]))
    assert pin.kept == PAGE_TOKENS
    rig.round()  # mends the slot
    assert rig.store.check() == ""
    rig.save(tokens)
    assert pin.kept == 4 * PAGE_TOKENS
    rig.store.clear()
    assert rig.load(tokens) == 4
    pin.close()


def test_pins_are_gone_after_a_restart(directories: Directories, open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 3)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=3600.0)
    rig.close()
    pin.close()
    rig = open_rig(directories.config())
    assert rig.store.stats().pins == 0
    assert rig.load(tokens) == 3
    assert rig.store.clear() == 6


def test_a_recovered_prefix_can_be_pinned_by_its_tokens(directories: Directories, open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens = chain(1, 3)
    rig.save(tokens)
    rig.close()
    rig = open_rig(directories.config())
    pin = rig.store.pin(tokens, ttl=60.0)
    assert pin.tokens == 3 * PAGE_TOKENS
    rig.store.clear()
    assert rig.load(tokens) == 3
    pin.close()


def test_namespaces_pin_apart(open_rig: OpenRig) -> None:
    rig = open_rig()
    tokens, tenant = chain(1, 3), sw.Namespace(salt="tenant")
    rig.save(tokens)
    rig.save(tokens, namespace=tenant)
    pin = rig.store.pin(tokens, ttl=60.0, namespace=tenant)
    rig.store.clear()
    assert rig.load(tokens) == 0
    assert rig.load(tokens, namespace=tenant) == 3
    pin.close()


def test_a_full_tier_says_how_much_pins_keep(open_rig: OpenRig) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=0, pin_fraction=0.9)
    capacity = rig.store.stats().tiers["shared"].capacity
    pages = capacity * 9 // 10
    for number in range(pages // 9):
        rig.save(chain(number, 9))
        rig.store.pin(chain(number, 9), ttl=60.0)
    held = rig.store.stats().tiers["shared"].held
    result = rig.save(chain(999, capacity))
    assert result.full is not None
    assert result.saved == capacity - held
    assert result.full.evictable <= capacity - held  # those just saved, at most


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan"), float("inf"), True, "10"])
def test_a_pin_without_an_end_is_refused(open_rig: OpenRig, ttl: float) -> None:
    rig = open_rig()
    with pytest.raises(sw.StepwellUsageError, match="ttl"):
        rig.store.pin(chain(1, 1), ttl=ttl)


@pytest.mark.parametrize("fraction", [-0.1, 0.95, float("nan")])
def test_a_fraction_that_leaves_no_room_is_refused(directories: Directories, fraction: float) -> None:
    with pytest.raises(sw.StepwellUsageError, match="pin_fraction"):
        directories.config(pin_fraction=fraction).checked()


def test_a_lost_range_takes_its_pinned_pages_along(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0)
    tokens = chain(1, 3)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=60.0)
    index = rig.store._index
    assert index.take_victims(Tier.SHARED, 100).size == 0
    slots = index.take_victims(Tier.SHARED, 100, None, True)
    medium = rig.store._room.medium(Tier.SHARED)
    assert isinstance(medium, _core.VolumeSet)
    medium.retire(slots)
    index.free_slots(Tier.SHARED, slots)
    assert (slots.size, pin.kept, index.check()) == (3, 0, "")
    pin.close()


def test_a_volume_that_another_process_took_is_let_go_pins_or_not(directories: Directories, open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(shared=VOLUME_BYTES, disk=0, clock=clock)
    tokens = chain(1, 3)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=3600.0)
    (lock,) = directories.shared.glob("v-*.lock")
    lock.unlink()  # somebody tidied up
    second = open_rig(shared=VOLUME_BYTES, disk=0)
    assert second.load(tokens) == 3
    clock.advance(10.0)
    rig.round()
    assert rig.store.stats().tiers["shared"].capacity == 0
    assert pin.kept == 0
    pin.close()
