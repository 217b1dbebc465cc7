"""The model of a store: its order is an LRU cache's, what it promises can be broken, and each breach is told."""

from __future__ import annotations

import random

import cachetools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.hashing import prefix_hashes
from stepwell.index import Miss, Tier
from stepwell.testing.model import (
    ABSENT,
    ARRIVING,
    NOWHERE,
    QUARANTINED,
    RESIDENT,
    BrokenPromise,
    States,
    Step,
    StoreModel,
)
from store_kit import PAGE_TOKENS, OpenRig, chain

SLOTS = 6
LANDS = Step(lands=True)
ROOM = Step(room=True)


def at(**tiers: int) -> States:
    """Say what a page is in some tiers; in the others it is absent."""
    return tuple(tiers.get(str(tier), ABSENT) for tier in Tier)


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def holding(*keys: bytes, tier: Tier = Tier.SHARED, keeping: tuple[Tier, ...] = (Tier.SHARED,)) -> StoreModel:
    """Return a model with pages in a tier, the first used longest ago."""
    model = StoreModel(keeping)
    for each in keys:
        model.see({each: at(**{str(tier): ARRIVING})}, Step(wanted=[each]))
        model.see({each: at(**{str(tier): RESIDENT})}, LANDS)
    return model


# ---- the order in which pages leave: cachetools' LRU is the oracle ---------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=80))
@settings(max_examples=200)
def test_the_model_of_one_tier_has_the_order_of_an_lru_cache(calls: list[tuple[bool, int]]) -> None:
    oracle: cachetools.LRUCache[bytes, bool] = cachetools.LRUCache(SLOTS)
    model = StoreModel((Tier.SHARED,))
    for is_save, number in calls:
        page = key(number)
        if page in oracle:
            assert oracle[page]  # a use
            model.use_path([page])
        elif is_save:
            if len(oracle) == SLOTS:
                victim, _ = oracle.popitem()
                model.see({victim: NOWHERE}, ROOM)  # it refuses any other
            oracle[page] = True
            model.see({page: at(shared=ARRIVING)}, Step(wanted=[page]))
            model.see({page: at(shared=RESIDENT)}, LANDS)
        assert set(model.order[Tier.SHARED]) == set(oracle)
    assert model.order[Tier.SHARED] == [oracle.popitem()[0] for _ in range(len(oracle))]


@pytest.mark.parametrize("seed", range(4))
def test_a_store_of_one_tier_is_an_lru_cache(open_rig: OpenRig, seed: int) -> None:
    """Prompts of one page: nothing continues anything."""
    rig = open_rig(host=SLOTS * 4096, shared=0, disk=0)
    oracle: cachetools.LRUCache[int, bool] = cachetools.LRUCache(SLOTS)
    rng = random.Random(seed)
    for _ in range(300):
        number = rng.randrange(12)
        if rng.random() < 0.5:
            assert rig.load(chain(number, 1)) == (number in oracle)
            oracle.get(number)
        else:
            rig.save(chain(number, 1))
            oracle[number] = True
        for each in range(12):
            here = rig.store.cached(chain(each, 1), tiers=(Tier.HOST,)) > 0
            assert here == (each in oracle), f"page {each}"


# ---- promises, and what breaks them ----------------------------------------------------------------------------------

A, B, C = key(1), key(2), key(3)


def test_what_nobody_wants_does_not_arrive() -> None:
    with pytest.raises(BrokenPromise, match="ABSENT -> ARRIVING"):
        StoreModel((Tier.SHARED,)).see({A: at(shared=ARRIVING)})


def test_what_did_not_arrive_is_not_resident() -> None:
    with pytest.raises(BrokenPromise, match="ABSENT -> RESIDENT"):
        StoreModel((Tier.SHARED,)).see({A: at(shared=RESIDENT)}, LANDS)


def test_what_is_on_its_way_is_not_lost_without_a_reason() -> None:
    model = StoreModel((Tier.SHARED,))
    model.see({A: at(shared=ARRIVING)}, Step(wanted=[A]))
    with pytest.raises(BrokenPromise, match="ARRIVING -> ABSENT"):
        model.see({A: NOWHERE}, LANDS)
    model.see({A: NOWHERE}, Step(gives_up=True))
    assert model.pages == {}


def test_a_pinned_page_does_not_leave() -> None:
    model = holding(A, B)
    model.pin([A], [Tier.SHARED], +1)
    with pytest.raises(BrokenPromise, match="pinned"):
        model.see({A: NOWHERE}, ROOM)
    model.see({B: NOWHERE}, ROOM)  # the other one may, although it was used later


def test_a_page_that_is_on_its_way_elsewhere_does_not_leave() -> None:
    model = holding(A, keeping=(Tier.SHARED, Tier.DISK))
    model.see({A: at(shared=RESIDENT, disk=ARRIVING)}, Step(wanted=[A]))
    with pytest.raises(BrokenPromise, match="pinned"):
        model.see({A: at(disk=ARRIVING)}, ROOM)


def test_the_page_used_longest_ago_leaves_first() -> None:
    model = holding(A, B)
    with pytest.raises(BrokenPromise, match="used longer ago"):
        model.see({B: NOWHERE}, ROOM)


def test_no_page_leaves_before_those_that_continue_it() -> None:
    model = StoreModel((Tier.SHARED,))
    model.link([A, B])
    for page in (A, B):
        model.see({page: at(shared=ARRIVING)}, Step(wanted=[page]))
        model.see({page: at(shared=RESIDENT)}, LANDS)
    assert model.order[Tier.SHARED] == [B, A]
    with pytest.raises(BrokenPromise, match="used longer ago"):
        model.see({A: NOWHERE}, ROOM)


def test_nobody_leaves_where_no_room_was_made() -> None:
    with pytest.raises(BrokenPromise, match="nobody made room"):
        holding(A).see({A: NOWHERE})


def test_a_pin_keeps_the_last_keeping_copy_and_no_other() -> None:
    model = holding(A, keeping=(Tier.SHARED, Tier.DISK))
    model.see({A: at(shared=RESIDENT, disk=ARRIVING)}, Step(wanted=[A]))
    model.see({A: at(shared=RESIDENT, disk=RESIDENT)}, LANDS)
    assert model.hold([A, B]) == [A]
    model.see({A: at(disk=RESIDENT)}, ROOM)
    with pytest.raises(BrokenPromise, match="last copy"):
        model.see({A: NOWHERE}, ROOM)
    alone = holding(A)
    alone.hold([A])
    with pytest.raises(BrokenPromise, match=r"pin\(\) kept it"):
        alone.see({A: NOWHERE}, Step(named=[A]))


def test_a_page_that_is_not_damaged_is_not_quarantined() -> None:
    model = holding(A)
    with pytest.raises(BrokenPromise, match="RESIDENT -> QUARANTINED"):
        model.see({A: at(shared=QUARANTINED)}, LANDS)
    model.damage(A, Tier.SHARED)
    model.see({A: at(shared=QUARANTINED)}, LANDS)
    assert model.find([A], [Tier.SHARED]).miss is Miss.QUARANTINED
    with pytest.raises(BrokenPromise, match="QUARANTINED -> ABSENT"):
        model.see({A: NOWHERE}, LANDS)
    model.see({A: NOWHERE}, Step(mends=True))


def test_a_match_ends_at_the_first_page_that_no_tier_has_and_says_why() -> None:
    model = holding(A, keeping=(Tier.SHARED, Tier.DISK))
    model.see({B: at(shared=ARRIVING)}, Step(wanted=[B]))
    model.see({C: at(disk=ARRIVING)}, Step(wanted=[C]))
    both = [Tier.SHARED, Tier.DISK]
    assert tuple(model.find([A, B, C], both)) == (1, [Tier.SHARED], 2, Miss.PENDING)
    model.see({C: at(disk=RESIDENT)}, LANDS)
    assert tuple(model.find([A, B, C], both)) == (1, [Tier.SHARED], 2, Miss.PENDING)
    assert tuple(model.find([A, key(9), C], both)) == (1, [Tier.SHARED], 0, Miss.ABSENT)
    assert tuple(model.find([A], [Tier.DISK])) == (0, [], 0, Miss.ABSENT)


def test_a_crash_leaves_what_was_resident_in_a_keeping_tier() -> None:
    model = holding(A, keeping=(Tier.SHARED, Tier.DISK))
    model.see({B: at(shared=ARRIVING)}, Step(wanted=[B]))
    model.see({C: at(host=ARRIVING)}, Step(wanted=[C]))
    model.see({C: at(host=RESIDENT)}, LANDS)
    assert model.crash({}).pages == {A: {Tier.SHARED}}
    assert model.pages == {}


def test_a_crash_leaves_what_is_resident_in_other_epochs() -> None:
    model = holding(A, B, keeping=(Tier.SHARED, Tier.DISK))
    model.damage(B, Tier.SHARED)
    model.turn(1)
    found = model.crash({0: {A: {Tier.HOST, Tier.SHARED}}})
    assert found.pages == {}
    assert found.others[0].pages == {A: {Tier.SHARED}}
    assert found.others[0].damaged == {(B, Tier.SHARED)}
    assert model.others == {}
    model.appear_of(0, {A: {Tier.SHARED}}, set())
    assert model.turn(0)[A].at[Tier.SHARED] == RESIDENT


def test_another_epoch_has_none_of_the_pages() -> None:
    model = holding(A)
    model.turn(1)
    assert model.find([A], [Tier.SHARED]).pages == 0
    assert A in model.turn(0)


COUNTS = {"capacity": 4, "free": 3, "arriving": 0, "resident": 1, "leaving": 0, "quarantined": 0}


@pytest.mark.parametrize("wrong", [{"leaving": 1}, {"resident": 2, "free": 2}, {"arriving": 1, "free": 2}])
def test_slots_that_do_not_add_up_are_told(wrong: dict[str, int]) -> None:
    model = holding(A)
    model.adds_up(Tier.SHARED, COUNTS)
    with pytest.raises(BrokenPromise):
        model.adds_up(Tier.SHARED, {**COUNTS, **wrong})


def test_a_tier_refuses_only_where_every_page_has_to_stay() -> None:
    model = holding(A, B)
    assert not model.may_refuse(Tier.SHARED, 0, [])
    model.pin([A], [Tier.SHARED], +1)
    assert not model.may_refuse(Tier.SHARED, 0, [])
    assert model.may_refuse(Tier.SHARED, 0, [B])
    assert not model.may_refuse(Tier.SHARED, 1, [B])


def test_keys_of_the_model_are_those_of_the_store(open_rig: OpenRig) -> None:
    """What the world names a page, the store's index knows it as."""
    rig = open_rig(shared=1 << 18, disk=0)
    rig.save(chain(1, 2))
    keys = prefix_hashes(chain(1, 2), page_tokens=PAGE_TOKENS)
    states = [rig.store.state(each.tobytes()) for each in keys]
    assert [state[Tier.SHARED] for state in states] == [RESIDENT, RESIDENT]
