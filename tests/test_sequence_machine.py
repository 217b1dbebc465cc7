"""Random operations on the sequences of a store, beside everything else that is done to it, against the models of both.

The longer runs are the driver's: `python -m stepwell.testing`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stepwell.index import Miss, Tier
from stepwell.testing.driver import Failure, Totals, command, draw, play, shrink
from stepwell.testing.model import ABSENT, QUARANTINED, RESIDENT, BrokenPromise, Found, States
from stepwell.testing.operations import operations_of
from stepwell.testing.sequence_model import Hold, Place, SequenceModel, State, owns
from stepwell.testing.sequence_operations import SequenceOperations
from stepwell.testing.world import Shape

SHAPES = (
    Shape(geometry=1, host=4, shared=1, disk=1, device=8, step_pages=64),
    Shape(geometry=1, host=4, shared=1, disk=1, selective=True, device=12, step_pages=1),
    Shape(geometry=1, host=3, shared=1, disk=0, device=6, step_pages=64),
    Shape(geometry=0, host=6, shared=0, disk=1, device=8, step_pages=2),
    Shape(geometry=1, host=5, shared=0, disk=0, device=8, step_pages=64),
)
STEPS = 800
P = 4
KEYS = (b"a", b"b", b"c")


@pytest.fixture(scope="module")
def done() -> Counter[str]:
    """What all runs of this file have done."""
    return Counter()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_store_with_sequences_keeps_its_promises(shape: Shape, seed: int, done: Counter[str]) -> None:
    random_ = random.Random(f"{seed}.{shape}")
    totals = Totals()
    try:
        play(shape, seed, draw(shape, random_, STEPS), totals)
    except Failure as failure:
        failure.add_note(command(shrink(failure).steps))
        raise
    done.update(totals.operations)


def test_every_operation_was_done(done: Counter[str]) -> None:
    rare = {"damage_held"}  # a page of an open match in host memory, with nothing on its way: once in 500 steps
    lacking = set(operations_of(SequenceOperations)) - set(done) - rare
    assert not lacking or not done, f"no run has done {sorted(lacking)}"


# ---- what the model of a sequence refuses ----------------------------------------------------------------------------


def opened(tokens: int = 14) -> SequenceModel:
    return SequenceModel(P, (0, 0, 0)[: tokens // P], tokens % P, 0, KEYS, epoch=0, turn=0)


def nowhere(_: bytes) -> States:
    return (ABSENT,) * 4


def found(*tiers: Tier, pending: int = 0) -> Found:
    return Found(len(tiers), [int(tier) for tier in tiers], pending, Miss.ABSENT)


def computing(pages: int = 3, claimed: tuple[int, ...] = (0, 1, 2)) -> SequenceModel:
    model = opened()
    model.begin_computing()
    model.extended(pages, list(range(pages)), claimed.__contains__)
    return model


def test_what_is_ready_is_what_the_device_has_of_what_was_found() -> None:
    model = opened()
    model.looked(found(Tier.DEVICE, Tier.SHARED, pending=1), 2, nowhere, [5])
    assert model.numbers() == (4, 4, 4, 2)
    assert model.leased == [(b"a", Tier.DEVICE), (b"b", Tier.SHARED)]
    with pytest.raises(BrokenPromise, match="pages are ready"):
        opened().looked(found(Tier.SHARED), 1, nowhere, [5])
    with pytest.raises(BrokenPromise, match="ready or loading"):
        opened().looked(found(Tier.SHARED), 0, nowhere, [])


def test_a_quarantined_copy_in_host_memory_ends_what_is_loaded() -> None:
    model = opened()
    model.looked(found(Tier.SHARED, Tier.SHARED), 1, lambda _: (ABSENT, QUARANTINED, RESIDENT, ABSENT), [])
    assert model.numbers() == (0, 4, 0, 10)
    assert model.leased == [(b"a", Tier.SHARED)]


def test_what_was_ready_stays_ready_in_its_slot() -> None:
    model = opened()
    model.looked(found(Tier.DEVICE), 1, nowhere, [5])
    with pytest.raises(BrokenPromise, match="were ready"):
        model.looked(found(), 0, nowhere, [])
    with pytest.raises(BrokenPromise, match="that were ready"):
        model.looked(found(Tier.DEVICE), 1, nowhere, [6])
    with pytest.raises(BrokenPromise, match="are in slots"):
        model.same_slots([6])


def test_a_sequence_gets_all_it_asks_for_or_nothing() -> None:
    model = computing(pages=1)
    model.extended(0, [0], {1}.__contains__)
    with pytest.raises(BrokenPromise, match="asked for 3 and has 2"):
        model.extended(3, [0, 1], {1}.__contains__)
    model.extended(3, [0, 1, 2], {1}.__contains__)
    assert [place.hold for place in model.places] == [Hold.CLAIMED, Hold.CLAIMED, Hold.PRIVATE]


def test_the_first_who_computed_a_page_publishes_it_once() -> None:
    model = computing(claimed=(0,))
    assert model.publish(2, 0, lambda key: RESIDENT if key == b"b" else ABSENT) == ([b"a"], 1)
    assert model.publish(3, 0, lambda _: ABSENT) == ([b"c"], 0)
    assert model.publish(3, 0, lambda _: ABSENT) == ([], 0)
    assert (model.claimed, model.private) == ([b"a", b"c"], 1)


def test_after_a_change_of_the_weights_nothing_is_published() -> None:
    model = computing()
    assert model.publish(3, 1, lambda _: ABSENT) == ([], 0)
    assert model.numbers() == (12, 0, 0, 2)


def test_ending_gives_up_what_was_claimed() -> None:
    model = computing(claimed=(0, 2))
    model.publish(1, 0, lambda _: ABSENT)
    assert model.ends(State.SUSPENDED) == [b"c"]
    assert model.numbers() == (0, 0, 0, 14)
    assert (model.places, model.claimed, model.private) == ([], [], 0)


def test_two_sequences_share_a_slot_only_as_one_cached_page() -> None:
    one, other = opened(), opened()
    one.places = [Place(3, Hold.FOUND)]
    other.places = [Place(3, Hold.PUBLISHED)]
    owns([one, other])
    for bad in (Place(3, Hold.PRIVATE), Place(3, Hold.CLAIMED)):
        other.places = [bad]
        with pytest.raises(BrokenPromise, match="two owners"):
            owns([one, other])
    other.places = [Place(4, Hold.FOUND), Place(3, Hold.FOUND)]
    with pytest.raises(BrokenPromise, match="two owners"):
        owns([one, other])
