"""A step that fails takes the device pool with it: sequences are lost, nothing else is, and the books stay whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import jax.numpy as jnp
import pytest

from device_kit import PER_LAYER, STACKED, Arrays
from sequence_kit import (
    PAGE_BYTES,
    GatherGate,
    MakeEngine,
    StampEngine,
    StepFailedError,
    assert_all_returned,
    prompt,
)
from stepwell.errors import DeviceResetError, GeometryError, StalePoolError, StepwellUsageError
from stepwell.index import Tier
from stepwell.sequence import Sequence
from test_sequence import STATES, gather_copying, gather_queued, gather_running, name

pytestmark = pytest.mark.parametrize("axes", [STACKED, PER_LAYER])


def fail_a_step(engine: StampEngine) -> None:
    with pytest.raises(StepFailedError), engine.store.device.step():
        raise StepFailedError("the engine failed")


def resumed(engine: StampEngine, sequence: Sequence) -> Sequence:
    sequence.resume()
    engine.settle(sequence)
    engine.verify(sequence)
    return sequence


@pytest.mark.parametrize("state", STATES, ids=name)
def test_whatever_was_in_flight_a_failed_step_loses_the_device_alone(
    make_engine: MakeEngine, state: Callable[[StampEngine, ExitStack], Sequence]
) -> None:
    engine = make_engine(device=28, host=12, step_bytes=2 * PAGE_BYTES)
    store = engine.store
    with ExitStack() as stack:
        sequence = state(engine, stack)
        was_suspended = state.__name__ == "suspended"
        fail_a_step(engine)
        assert store.device.is_reset
        assert store.check() == ""
        assert sequence.lost != was_suspended
        assert store.stats().tiers["device"].resident == 0
        assert (sequence.ready, sequence.loading, sequence.pending) == (0, 0, 0)
        store.device.renew()
    for other in store._sequences._each_open():
        if other is not sequence:
            other.close()
    resumed(engine, sequence)
    engine.finish(sequence)
    engine.verify(sequence, 33)
    sequence.close()
    assert_all_returned(store)


@pytest.mark.parametrize(
    ("state", "lands"), [(gather_queued, False), (gather_running, True), (gather_copying, True)], ids=str
)
def test_what_was_gathered_before_the_failure_lands_and_what_was_not_is_lost(
    make_engine: MakeEngine, state: Callable[[StampEngine, ExitStack], Sequence], lands: bool
) -> None:
    engine = make_engine(device=16)
    with ExitStack() as stack:
        sequence = state(engine, stack)
        if state is gather_queued:  # a failing step dispatches what is queued first: lose the pool without one
            engine.store.device.pool_for_testing()._reset("as a failed computation does")
            engine.store._sequences._notice_reset()
        else:
            fail_a_step(engine)
    engine.store.device.renew()
    assert engine.store.flush(30.0)
    assert engine.store.stats().tiers["shared"].resident == (8 if lands else 0)
    engine.store.device.drain()
    assert engine.store.stats().tiers["device"].free == 16
    sequence.resume()
    engine.settle(sequence)
    assert sequence.ready == (32 if lands else 0)
    engine.verify(sequence)


def test_a_lost_sequence_says_so_and_is_resumed_or_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 17))
    first, second = engine.open(prompt(1, 17)), engine.serve(prompt(2, 9))
    engine.store.extend([first], [17])
    with pytest.raises(StepFailedError):
        engine.compute({first: 17}, fail=True)
    for misuse in (
        lambda: engine.store.extend([first], [17]),
        lambda: engine.store.publish([first], [17]),
        lambda: engine.store.append([first], [1]),
        lambda: engine.block(first),
        first.promote,
        first.compute,
        first.suspend,
    ):
        with pytest.raises(DeviceResetError, match="resume"):
            misuse()
    with pytest.raises(DeviceResetError, match="renew"):
        engine.store.device.drain()
    with pytest.raises(DeviceResetError, match="renew"), engine.store.device.step():
        pass
    engine.store.device.renew()
    second.close()
    assert not second.lost
    resumed(engine, first)
    assert first.ready == 16
    assert not first.lost


def test_misuse_while_the_pool_is_lost_loses_nothing_more(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 17))
    fail_a_step(engine)
    sequence = engine.open(prompt(1, 17))  # begins to load into host memory
    with pytest.raises(DeviceResetError), engine.store.device.step():
        pass
    assert not sequence.lost
    engine.store.device.renew()
    engine.settle(sequence)
    assert sequence.ready == 16
    engine.verify(sequence)


def test_steps_do_not_nest_and_an_old_handle_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.serve(prompt(1, 9))
    with engine.store.device.step() as pool, pytest.raises(StalePoolError), engine.store.device.step():
        pass
    with pytest.raises(StalePoolError):
        _ = pool.arrays
    assert not engine.store.device.is_reset
    engine.verify(sequence, 9)


def deleted(arrays: Arrays) -> Arrays:
    for array in arrays:
        array.delete()
    return arrays


def last_deleted(arrays: Arrays) -> Arrays:
    arrays[-1].delete()
    return arrays


def misshapen(arrays: Arrays) -> Arrays:
    return tuple(jnp.zeros((2, 2), jnp.float32) for _ in arrays)


def last_of_another_dtype(arrays: Arrays) -> Arrays:
    return (*arrays[:-1], arrays[-1].astype(jnp.bfloat16))


def one_missing(arrays: Arrays) -> Arrays:
    return arrays[:-1]


def one_twice(arrays: Arrays) -> Arrays:
    return (*arrays[:-1], arrays[0])


@pytest.mark.parametrize(
    "leave", [deleted, last_deleted, misshapen, last_of_another_dtype, one_missing, one_twice], ids=name
)
def test_a_step_that_leaves_unusable_arrays_is_a_failed_step(
    make_engine: MakeEngine, leave: Callable[[Arrays], Arrays]
) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 17))
    sequence = engine.open(prompt(1, 17))
    with pytest.raises(DeviceResetError, match="renew"), engine.store.device.step() as pool:
        pool.arrays = leave(pool.arrays)
    assert sequence.lost
    engine.store.device.renew()
    resumed(engine, sequence)
    assert sequence.reused == {Tier.SHARED: 16}


def test_a_gather_that_fails_on_the_device_returns_its_claims(make_engine: MakeEngine) -> None:
    engine = make_engine()

    class Failing(GatherGate):
        def wait(self, result: object) -> None:
            raise RuntimeError("INTERNAL: the computation failed")

    sequence = engine.serve(prompt(1, 17))
    engine.store.device.pool_for_testing()._queue.readiness = Failing()
    engine.land()
    tiers = engine.store.stats().tiers
    assert (tiers["shared"].resident, tiers["shared"].arriving, tiers["device"].resident) == (0, 0, 4)
    engine.verify(sequence, 17)
    assert engine.store.check() == ""


def test_many_failed_steps_leave_no_slot_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(device=16)
    engine.cache(prompt(1, 33))
    sequence = engine.open(prompt(1, 33))
    for _ in range(10):
        engine.settle(sequence)
        assert sequence.ready == 32
        assert engine.store.extend([sequence], [44]).ok.all()
        with pytest.raises(StepFailedError):
            engine.compute({sequence: 33}, fail=True)
        engine.store.device.renew()
        sequence.resume()
        assert engine.store.check() == ""
    engine.settle(sequence)
    engine.verify(sequence)


def test_the_engine_may_renew_a_lost_pool_with_arrays_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    device = engine.store.device
    engine.cache(prompt(1, 17))
    sequence = engine.open(prompt(1, 17))
    with pytest.raises(StepwellUsageError, match="only a reset pool"):
        device.renew()
    fail_a_step(engine)
    with pytest.raises(GeometryError, match="cannot be the device pool"):
        device.renew(tuple(jnp.zeros(shape[1:], device.dtype) for shape in device.shapes))
    assert device.is_reset
    device.renew(tuple(jnp.full(shape, 7, device.dtype) for shape in device.shapes))
    assert (engine.read([0]) == 7).all()
    resumed(engine, sequence)
    assert sequence.reused == {Tier.SHARED: 16}
