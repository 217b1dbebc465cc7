"""Cases of kind 3 in docs/cases.md: pins, references and locks that are not given back, or twice."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from case_kit import Box, config_of, tokens_of
from stepwell.errors import LeaseClosedError
from stepwell.index import Tier
from stepwell.testing.faults import inject, wait_paused
from store_kit import BOTH, Directories, OpenRig, assert_unpinned, assert_whole, chain


def test_what_was_looked_up_and_never_loaded_is_not_pinned(directories: Directories) -> None:
    """C024, LMCache/LMCache#1034: what a lookup had pinned stayed pinned where nobody loaded it."""
    with Box(config_of(directories, host=16)) as box:
        box.save(tokens_of(1, 32))
        for _ in range(100):
            with box.store.match(tokens_of(1, 32)) as match:
                assert match.pages == 8
        assert box.store.stats().tiers["host"].pinned == 0
        assert box.save(tokens_of(2, 64)).saved == 16
        assert box.pages(Tier.HOST) == 16


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_memory_returns_once_whichever_hold_ends_last(directories: Directories, order: tuple[int, ...]) -> None:
    """C025, LMCache/LMCache#987: memory was lost where the reference went before the pin."""
    with Box(config_of(directories, host=8)) as box:
        store = box.store
        box.save(tokens_of(1, 4))
        first, second = store.match(tokens_of(1, 4)), store.match(tokens_of(1, 4))
        pinned = store.pin(tokens_of(1, 4), ttl=60.0)
        assert pinned.tokens == 4
        holds = [first.close, second.close, pinned.close, lambda: store.match(tokens_of(1, 4)).close()]
        held = {0, 1, 2}
        for step in order:
            holds[step]()
            held.discard(step)
            gone = store.evict(Tier.HOST, 8)
            assert gone == (0 if held else 1) or box.pages(Tier.HOST) == 0
            assert store.stats().tiers["host"].free == (7 if held else 8)
            assert store.check() == ""
        assert store.stats().tiers["host"].free == 8
        assert box.save(tokens_of(2, 32)).saved == 8


@pytest.mark.parametrize("state", ["queued", "at page 2 of 4", "done and not consumed"])
def test_a_load_that_is_given_up_returns_everything_once(open_rig: OpenRig, state: str) -> None:
    """C027, sgl-project/sglang#9874: prefetches of aborted requests kept their pages until none was left.

    A sequence's states, 14 of them and every end: tests/test_sequence.py::
    test_whatever_is_in_flight_everything_is_returned_once.
    """
    rig = open_rig(**BOTH, io_threads=1, copy_threads=1)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    before = rig.store.stats().tiers
    if state == "done and not consumed":
        rig.start_load(chain(1, 4)).wait(120.0)
    else:
        point, nth = ("mover.unit", 1) if state == "queued" else ("mover.before_copy", 2)
        with inject(point, "pause", nth=nth):
            transfer = rig.start_load(chain(1, 4))
            wait_paused(point)
            transfer.revoke()
            transfer.cancel()
    assert rig.store.flush(120.0)
    assert_whole(rig.store)
    assert_unpinned(rig.store)
    rig.store.evict(Tier.SHARED, 4)
    assert rig.store.stats().tiers["shared"].free == before["shared"].free
    assert rig.store.stats().queued == 0
    assert rig.load(chain(1, 4)) == 4


def test_loads_given_up_at_random_leave_no_budget_behind(open_rig: OpenRig) -> None:
    """C027, sgl-project/sglang#9874: 300 rounds."""
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    rig.save(chain(2, 4))
    random = np.random.default_rng(1)
    for _ in range(300):
        rig.store.evict(Tier.SHARED, int(random.integers(5)))
        transfer = rig.start_load(chain(int(random.integers(1, 3)), 4))
        for _ in range(int(random.integers(3))):
            transfer.done  # noqa: B018
        if random.random() < 0.8:
            transfer.cancel()
        if random.random() < 0.5:
            transfer.revoke()
    assert_whole(rig.store)
    assert_unpinned(rig.store)
    for number in (1, 2):
        assert rig.load(chain(number, 4)) == 4


def test_a_load_ended_from_two_sides_frees_each_page_once(open_rig: OpenRig) -> None:
    """C029, sgl-project/sglang#13483: the tail of an early end was freed twice, and had two owners then. 200 rounds."""
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    barrier = threading.Barrier(2)
    loads: list = []

    def other_side() -> None:
        for _ in range(200):
            barrier.wait()
            loads[-1].cancel()
            loads[-1].revoke()
            barrier.wait()

    ender = threading.Thread(target=other_side)
    ender.start()
    for _ in range(200):
        rig.store.evict(Tier.SHARED, 4)
        loads.append(rig.start_load(chain(1, 4)))
        barrier.wait()
        loads[-1].revoke()
        loads[-1].cancel()
        barrier.wait()
        assert loads.pop().wait(120.0)
    ender.join()
    assert_whole(rig.store)  # no slot is free twice, or free and somebody's
    assert_unpinned(rig.store)
    assert rig.load(chain(1, 4)) == 4


def test_a_second_release_is_refused_at_once(open_rig: OpenRig) -> None:
    """C029, LMCache/LMCache#2559: a count below zero was set to zero, and the page had two owners."""
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    index = rig.store._index
    match = rig.store.match(chain(1, 4))
    lease = match.lease_id()
    held = rig.store.match(chain(1, 4))
    match.close()
    assert not index.release(lease)
    with pytest.raises(LeaseClosedError):
        match.lease_id()
    ids, _, _ = held.locations()
    with pytest.raises(ValueError, match="no pin"):
        index.unpin_pages(ids)  # these pins are the lease's
    assert rig.store.stats().tiers["shared"].pinned == 4
    held.close()
    assert_unpinned(rig.store)
    assert rig.store.check() == ""
