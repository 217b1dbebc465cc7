"""An engine's own keys: runs of them are probed and held, each is loaded and saved on its own."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.clock import ManualClock
from stepwell.errors import GeometryError, StepwellUsageError
from stepwell.hashing import prefix_hashes
from stepwell.index import Residency, Tier
from stepwell.mover import SaveOutcome
from stepwell.testing.faults import inject, wait_paused
from store_kit import (
    BOTH,
    PAGE_TOKENS,
    SHARED_ONLY,
    OpenRig,
    Rig,
    assert_unpinned,
    chain,
    stamps,
    stamps_of,
)

STORED, PRESENT, REFUSED = (int(o) for o in (SaveOutcome.STORED, SaveOutcome.PRESENT, SaveOutcome.REFUSED))


def keys_of(*numbers: int, size: int = 24) -> np.ndarray:
    return np.array([list(number.to_bytes(8, "big") * (size // 8)) for number in numbers], np.uint8)


def save(rig: Rig, keys: np.ndarray, **how: object) -> list[int]:
    rig.rows[: len(keys)] = stamps_of(keys)
    return rig.store.save_keys(keys, source=rig.pool[: len(keys)], **how).tolist()  # type: ignore[arg-type]


def load(rig: Rig, keys: np.ndarray, **how: object) -> list[bool]:
    rig.rows[: len(keys)] = 0xEE
    ok = rig.store.load_keys(keys, into=rig.pool[: len(keys)], **how)  # type: ignore[arg-type]
    assert np.array_equal(rig.rows[: len(keys)][ok], stamps_of(keys)[ok]), "wrong bytes were served"
    return ok.tolist()  # type: ignore[no-any-return]


def test_saved_keys_are_stored_in_every_lasting_tier_and_load(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    assert save(rig, keys_of(1, 2, 3)) == [STORED] * 3
    assert (rig.pages(Tier.SHARED), rig.pages(Tier.DISK)) == (3, 3)
    assert load(rig, keys_of(1, 2, 3)) == [True] * 3


def test_loading_keys_leaves_holes_where_keys_are_missing(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 3, 4, 7))
    assert load(rig, keys_of(0, 1, 2, 3, 4, 5, 6, 7)) == [False, True, False, True, True, False, False, True]
    assert load(rig, keys_of(9)) == [False]
    assert load(rig, keys_of()[:0].reshape(0, 24)) == []


def test_a_probe_counts_leading_keys_only_and_names_their_tiers(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2, 3, 5))
    rig.store.evict(Tier.SHARED, 1)
    probe = rig.store.probe(keys_of(1, 2, 3, 4, 5), lease=0)
    assert probe.run == 3
    assert probe.tiers.tolist() == [Tier.SHARED] * 3
    assert rig.store.probe(keys_of(4, 5), lease=0).run == 0


def test_a_probe_holds_what_it_found_until_its_lease_ends_by_the_clock(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**SHARED_ONLY, clock=clock)
    save(rig, keys_of(1, 2, 3))
    assert rig.store.probe(keys_of(1, 2, 3), lease=5.0).run == 3
    clock.advance(4.9)
    rig.round()
    assert rig.store.evict(Tier.SHARED, 10) == 0
    assert load(rig, keys_of(1, 2, 3)) == [True] * 3
    clock.advance(0.2)
    rig.round()
    assert_unpinned(rig.store)
    assert rig.store.evict(Tier.SHARED, 10) == 3


def test_a_probe_without_a_lease_holds_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1, 2))
    rig.store.probe(keys_of(1, 2), lease=0)
    assert_unpinned(rig.store)


def test_probe_leases_that_run_when_the_store_closes_are_returned(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1, 2))
    rig.store.probe(keys_of(1, 2), lease=3600.0)
    rig.close()
    assert open_rig(**SHARED_ONLY).store.probe(keys_of(1, 2), lease=0).run == 2


def test_a_probe_reads_ahead_from_disk_into_shared_memory(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2, 3))
    rig.store.evict(Tier.SHARED, 3)
    assert rig.store.probe(keys_of(1, 2, 3), lease=0, readahead=False).run == 3
    rig.store.flush()
    assert rig.pages(Tier.SHARED) == 0
    assert rig.store.probe(keys_of(1, 2, 3), lease=0).tiers.tolist() == [Tier.DISK] * 3
    rig.store.flush()
    assert rig.pages(Tier.SHARED) == 3
    assert_unpinned(rig.store)


def test_keys_that_are_here_are_present_and_only_the_rest_is_stored(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2))
    assert save(rig, keys_of(1, 2, 3)) == [PRESENT, PRESENT, STORED]
    assert save(rig, keys_of(4, 4)) == [STORED, PRESENT]


def test_keys_for_which_there_is_no_room_are_refused_each_on_its_own(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY, low_watermark=0.0)
    total = rig.store.stats().tiers["shared"].capacity
    many = keys_of(*range(100, 100 + total))
    assert save(rig, many) == [STORED] * total
    held = rig.store._index.match_keys_and_pin(many, 1, rig.store._room.readable)  # as a load of them would
    assert save(rig, keys_of(1, 100, 2)) == [REFUSED, PRESENT, REFUSED]
    assert rig.store.stats().refused_pages == 2
    rig.store._index.release(held.lease)
    assert save(rig, keys_of(1, 100, 2)) == [STORED, PRESENT, STORED]


def test_saving_the_tail_of_a_chain_does_not_evict_its_head(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY, low_watermark=0.0)
    total = rig.store.stats().tiers["shared"].capacity
    save(rig, keys_of(1, 2, 3), first_of_chain=True)
    save(rig, keys_of(*range(100, 100 + total - 3)), first_of_chain=True)
    assert save(rig, keys_of(1, 2, 3, 4, 5), first_of_chain=True) == [PRESENT] * 3 + [STORED] * 2
    assert load(rig, keys_of(1, 2, 3, 4, 5)) == [True] * 5


def test_a_save_whose_deadline_passes_is_refused_and_no_longer_reads_the_source(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    with inject("mover.unit", "pause"):
        assert save(rig, keys_of(1, 2), deadline=0.0) == [REFUSED] * 2
        rig.rows[:2] = 0
    rig.store.flush()
    assert load(rig, keys_of(1, 2)) == [False, False]


def test_a_load_whose_deadline_passes_leaves_the_target_alone(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1, 2))
    with inject("mover.unit", "pause"):
        assert load(rig, keys_of(1, 2), deadline=0.0) == [False, False]
        rig.rows[:2] = 0xAA
        wait_paused("mover.unit")
    rig.store.flush()
    assert (rig.rows[:2] == 0xAA).all()
    assert rig.store.stats().misses["deadline"] == 2


@pytest.mark.parametrize("size", [8, 16, 24, 32, 64])
def test_keys_of_any_length_survive_a_restart(open_rig: OpenRig, size: int) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2, size=size))
    rig.close()
    rig = open_rig(**BOTH)
    assert load(rig, keys_of(1, 2, 3, size=size)) == [True, True, False]


def test_kinds_are_apart(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    save(rig, keys_of(1))
    assert rig.store.probe(keys_of(1), kind=2, lease=0).run == 0
    assert load(rig, keys_of(1), kind=2) == [False]


def test_pages_saved_by_prefix_hash_are_found_by_tokens_and_the_other_way_round(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    keys = prefix_hashes(chain(1, 4), page_tokens=PAGE_TOKENS)
    rig.rows[:4] = stamps(chain(1, 4))
    rig.store.save_keys(keys, source=rig.pool[:4], first_of_chain=True)
    assert rig.load(chain(1, 4)) == 4
    rig.save(chain(2, 4))
    assert load(rig, prefix_hashes(chain(2, 4), page_tokens=PAGE_TOKENS)) == [True] * 4


def test_the_state_of_a_key_is_told_per_tier(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1))
    rig.store.evict(Tier.SHARED, 1)
    state = rig.store.state(keys_of(1).tobytes())
    assert (state[Tier.SHARED], state[Tier.DISK]) == (Residency.ABSENT, Residency.RESIDENT)
    assert set(rig.store.state(keys_of(2).tobytes()).values()) == {Residency.ABSENT}


def test_each_key_is_held_or_not_whatever_lies_before_it(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 3, 4))
    rig.store.evict(Tier.SHARED, 1)
    assert rig.store.holds(keys_of(0, 1, 2, 3, 4)).tolist() == [False, True, False, True, True]
    assert rig.store.holds(keys_of(3), kind=2).tolist() == [False]
    assert_unpinned(rig.store)
    rig.store.set_epoch(9)
    assert not rig.store.holds(keys_of(1, 3, 4)).any()


def test_another_epoch_knows_no_keys_of_this_one(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2))
    rig.store.set_epoch(9)
    assert rig.store.probe(keys_of(1, 2), lease=0).run == 0
    assert load(rig, keys_of(1, 2)) == [False, False]
    assert save(rig, keys_of(1, 2)) == [STORED, STORED]


def test_misuse_is_refused_and_changes_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    with pytest.raises(GeometryError, match="2 keys, the source names 3"):
        rig.store.save_keys(keys_of(1, 2), source=rig.pool[:3])
    with pytest.raises(GeometryError, match="2 keys, the target names 3"):
        rig.store.load_keys(keys_of(1, 2), into=rig.pool[:3])
    with pytest.raises(StepwellUsageError, match="not the first"):
        rig.store.save_keys(keys_of(1), source=rig.pool[:1], parent=b"x", first_of_chain=True)
    with pytest.raises(StepwellUsageError, match=r"uint8\[n, 1\.\.64\]"):
        rig.store.probe(np.zeros((2, 65), np.uint8))
    with pytest.raises(StepwellUsageError, match="one length"):
        rig.store.probe([b"a", b"bc"])
    with pytest.raises(StepwellUsageError, match="parent has 65 bytes"):
        rig.store.save_keys(keys_of(1), source=rig.pool[:1], parent=b"x" * 65)
    with pytest.raises(StepwellUsageError, match="kind"):
        rig.store.save_keys(keys_of(1), source=rig.pool[:1], kind=300)
    assert rig.store.stats().page_records == 0
