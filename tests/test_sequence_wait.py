"""Waiting for sequences: it ends when one can be computed, or when waiting is in vain, and never later than told."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from sequence_kit import MakeEngine, StampEngine, StepFailedError, evict_all, prompt
from stepwell.errors import DeviceResetError, LeaseClosedError, StalePoolError, StepwellUsageError
from stepwell.index import Tier
from stepwell.sequence import Sequence
from stepwell.testing import faults


def cached_below(engine: StampEngine, *numbers: int, tokens: int = 17) -> list[Sequence]:
    """Open sequences whose prefixes are in shared memory alone."""
    for number in numbers:
        engine.cache(prompt(number, tokens))
    evict_all(engine.store, Tier.DEVICE)
    return [engine.open(prompt(number, tokens)) for number in numbers]


def paused(engine: StampEngine, stack: ExitStack) -> Sequence:
    """Open a sequence whose load stands still until the stack is closed."""
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    stack.enter_context(faults.inject("mover.before_copy", "pause"))
    sequence = engine.open(prompt(1, 17))
    faults.wait_paused("mover.before_copy")
    return sequence


@pytest.mark.parametrize("host", [4, 16], ids=["in waves", "at once"])
def test_waiting_ends_when_a_prefix_is_on_the_device(make_engine: MakeEngine, host: int) -> None:
    engine = make_engine(device=28, host=host)
    (sequence,) = cached_below(engine, 1, tokens=65)
    assert not sequence.settled
    assert engine.store.device.wait([sequence], 30.0) == [sequence]
    assert sequence.settled
    assert (sequence.ready, sequence.missing) == (64, 1)
    engine.verify(sequence, 64)


def test_waiting_needs_no_limit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequences = cached_below(engine, 1, 2)
    waiting = list(sequences)
    while waiting:
        settled = engine.store.device.wait(waiting)
        assert settled
        waiting = [sequence for sequence in waiting if sequence not in settled]
    for sequence in sequences:
        engine.verify(sequence, 16)


def test_waiting_ends_at_once_for_what_can_be_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with ExitStack() as stack:
        loading = paused(engine, stack)
        fresh, computing = engine.open(prompt(2, 9)), engine.serve(prompt(3, 9))
        assert engine.store.device.wait([loading, fresh, computing]) == [fresh, computing]
        assert loading.loading == 16
    assert engine.store.device.wait([loading], 30.0) == [loading]


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_waiting_ends_in_time_where_nothing_lands(make_engine: MakeEngine, seconds: float) -> None:
    engine = make_engine()
    with ExitStack() as stack:
        sequence = paused(engine, stack)
        assert engine.store.device.wait([sequence], seconds) == []
        assert sequence.loading == 16
    assert engine.store.device.wait([sequence], 30.0) == [sequence]
    engine.verify(sequence, 16)


def test_a_wait_that_has_begun_ends_when_pages_land(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with ExitStack() as stack:
        sequence = paused(engine, stack)
        sequences = engine.store._sequences
        assert sequences is not None
        wait, moments = sequences._wait_a_moment, []

        def wait_a_moment(seconds: float) -> None:
            moments.append(seconds)
            if len(moments) >= 3:  # a page a time
                faults.resume("mover.before_copy")
            wait(seconds)

        monkeypatch.setattr(sequences, "_wait_a_moment", wait_a_moment)
        stack.callback(monkeypatch.undo)
        assert engine.store.device.wait([sequence], 30.0) == [sequence]
        assert len(moments) >= 3
        assert all(0 < seconds <= 0.005 for seconds in moments)
    engine.verify(sequence, 16)


def test_waiting_for_what_another_has_yet_to_compute_is_in_vain(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = engine.open(prompt(1, 17)), engine.open(prompt(1, 17))
    assert engine.store.extend([first], [17]).ok.all()
    second.promote()
    assert second.pending == 16
    assert engine.store.device.wait([second]) == []
    engine.finish(first)
    assert engine.store.device.wait([second]) == [second]
    assert second.ready == 16
    engine.verify(second, 16)


def test_waiting_for_what_another_is_loading_ends_when_it_has_landed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first, second = (*cached_below(engine, 1), engine.open(prompt(1, 17)))
    assert engine.store.device.wait([second], 30.0) == [second]
    engine.verify(second, 16)
    assert engine.store.device.wait([first]) == [first]


def test_waiting_for_a_stalled_sequence_is_in_vain_until_one_is_suspended(make_engine: MakeEngine) -> None:
    engine = make_engine(device=6, host=16)
    first, second = cached_below(engine, 1, 2)
    assert engine.store.device.wait([first], 30.0) == [first]
    assert engine.store.device.wait([second]) == []
    assert second.stalled
    first.suspend()
    assert engine.store.device.wait([second], 30.0) == [second]
    engine.verify(second, 16)


def test_a_computed_rest_is_not_waited_for(make_engine: MakeEngine) -> None:
    engine = make_engine(device=6, host=16)
    first, second = cached_below(engine, 1, 2)
    assert engine.store.device.wait([first], 30.0) == [first]
    assert engine.store.device.wait([second]) == []
    second.compute()
    assert engine.store.device.wait([second]) == [second]
    assert (second.loading, second.pending) == (0, 0)


def test_waiting_for_nothing_ends_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with ExitStack() as stack:
        paused(engine, stack)
        assert engine.store.device.wait([]) == []


def test_a_failed_load_is_waited_for_no_longer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(prompt(1, 17))
        faults.wait_paused("mover.before_copy")
        engine.store.set_epoch(7)  # running loads end as misses
    assert engine.store.device.wait([sequence], 30.0) == [sequence]
    assert (sequence.ready, sequence.missing) == (0, 17)


def test_misuse_of_waiting_is_said_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    device = engine.store.device
    suspended, closed = engine.open(prompt(1, 9)), engine.open(prompt(2, 9))
    suspended.suspend()
    closed.close()
    with pytest.raises(StepwellUsageError, match="resume"):
        device.wait([suspended], 1.0)
    with pytest.raises(LeaseClosedError, match="^Sequence was closed; open"):
        device.wait([closed], 1.0)
    with pytest.raises(StepwellUsageError, match="another store"):
        device.wait([make_engine().open(prompt(1, 9))], 1.0)
    for seconds in (-1.0, math.nan):
        with pytest.raises(StepwellUsageError, match="timeout"):
            device.wait([], seconds)
    with device.step(), pytest.raises(StalePoolError, match="leave its `with` block"):
        device.wait([], 1.0)
    found: list[Exception] = []

    def wait() -> None:
        try:
            device.wait([], 1.0)
        except StepwellUsageError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert "belongs to thread" in str(found)


def test_waiting_for_a_lost_sequence_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open(prompt(1, 9))
    with pytest.raises(StepFailedError):
        engine.write([engine.scratch], [np.zeros((2, 2, 4, 2, 4), np.float32)], fail=True)
    with pytest.raises(DeviceResetError, match="renew"):
        engine.store.device.wait([sequence], 1.0)
    engine.store.device.renew()
    with pytest.raises(DeviceResetError, match="resume"):
        engine.store.device.wait([sequence], 1.0)
    sequence.resume()
    assert engine.store.device.wait([sequence], 1.0) == [sequence]
