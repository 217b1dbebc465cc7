"""Misuse raised after the store had taken something for the call, and so took it for good.

- An inbox that is none raised AttributeError when the claims were made: the pages of that save stayed on their way for
  ever, those of that load pinned.
- A ttl beyond all floats raised OverflowError when the pages were held already: they were never let go.
- device.wait() took a generator of sequences for none of them: it said that waiting longer was in vain.
- A deadline that is a Decimal raised TypeError when the load ran already; one in numpy's float16 never passed, as the
  clock's time is beyond all float16s.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import stepwell as sw
from sequence_kit import prompt
from stepwell.clock import ManualClock
from stepwell.testing.faults import inject
from store_kit import PAGE_TOKENS, OpenRig, assert_unpinned, assert_whole, chain

NO_SECONDS = [Decimal(1), "1", float("nan"), 1j]


@pytest.mark.parametrize("inbox", [7, [], sw.Inbox])
def test_an_inbox_that_is_none_is_refused_before_anything_is_claimed(open_rig: OpenRig, inbox: Any) -> None:
    rig = open_rig()
    tokens = chain(1, 4)
    with pytest.raises(sw.StepwellUsageError, match="give a stepwell.Inbox"):
        rig.store.save(tokens, source=rig.pool[:4], inbox=inbox)
    assert rig.store.stats().page_records == 0
    assert rig.save(tokens).saved == 4
    with pytest.raises(sw.StepwellUsageError, match="give a stepwell.Inbox"):
        rig.start_load(tokens, inbox=inbox)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


@pytest.mark.parametrize("ttl", [10**400, Decimal(1)], ids=["beyond all floats", "decimal"])
def test_a_ttl_that_cannot_be_is_refused_and_holds_nothing(open_rig: OpenRig, ttl: Any) -> None:
    rig = open_rig()
    rig.save(chain(1, 4))
    with pytest.raises(sw.StepwellUsageError, match="ttl"):
        rig.store.pin(chain(1, 4), ttl=ttl)
    stats = rig.store.stats()
    assert (stats.pins, stats.pinned_pages) == (0, 0)
    assert rig.store.clear() == 8


@pytest.mark.parametrize("seconds", NO_SECONDS)
def test_seconds_that_are_none_are_refused_before_anything_runs(open_rig: OpenRig, seconds: Any) -> None:
    rig = open_rig()
    rig.save(chain(1, 4))
    transfers = rig.store.stats().transfers
    for call in (
        lambda: rig.start_load(chain(1, 4), deadline=seconds),
        lambda: rig.store.load_keys([b"k"], into=rig.pool[:1], deadline=seconds),
        lambda: rig.store.save_keys([b"k"], source=rig.pool[:1], deadline=seconds),
        lambda: rig.store.probe([b"k"], lease=seconds),
        lambda: rig.store.flush(seconds),
    ):
        with pytest.raises(sw.StepwellUsageError, match="no number of seconds"):
            call()
    assert rig.store.stats().transfers == transfers


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, float, int])
def test_a_deadline_passes_whatever_kind_of_number_it_is(open_rig: OpenRig, kind: Callable[[int], Any]) -> None:
    clock = ManualClock(1e6 + 0.01)
    rig = open_rig(clock=clock)
    rig.save(chain(1, 4))
    pin = rig.store.pin(chain(1, 4), ttl=kind(1))
    assert pin.kept == 4 * PAGE_TOKENS
    with inject("mover.before_copy", "pause"):
        transfer = rig.start_load(chain(1, 4), deadline=kind(1))
        clock.advance(0.99)
        assert not transfer.done
        assert not pin.closed
        clock.advance(0.02)
        assert transfer.done
        assert pin.closed
    pin.close()


def test_what_is_no_sequence_is_refused_and_a_generator_of_sequences_is_waited_for(make_engine: Any) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 13))
    sequence = engine.open(prompt(1, 13))
    device = engine.store.device
    for wrong in ([None], "ab", [[sequence]]):
        with pytest.raises(sw.StepwellUsageError, match=r"give the sequences that open\(\) returned"):
            device.wait(wrong)
    with pytest.raises(sw.StepwellUsageError, match="timeout"):
        device.wait([sequence], timeout="1")
    assert device.wait(one for one in [sequence]) == [sequence]
    sequence.close()
