"""Cases of kind 17 in docs/cases.md: arrays that share memory with pages, and readiness that JAX does not know of."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from device_kit import STACKED, join, read_slots
from sequence_kit import StampEngine, evict_all, prompt
from stepwell.errors import StalePoolError, StepwellUsageError
from stepwell.geometry import ITEMSIZES, PageGeometry
from stepwell.index import Tier
from stepwell.testing.faults import inject
from stepwell.tiers.device import DevicePool

MakeEngine = Callable[..., StampEngine]

SIZES = [(dtype, 64) for dtype in ITEMSIZES] + [("uint8", 4096), ("bfloat16", 1 << 20), ("uint8", 16 << 20)]


@pytest.mark.parametrize(("dtype", "page_bytes"), SIZES)
def test_pages_on_the_device_do_not_change_with_the_host_memory_they_came_from(dtype: str, page_bytes: int) -> None:
    """C116, jax-ml/jax#37830: device_put on CPU kept using the numpy memory, also where it was told not to."""
    geometry = PageGeometry(
        model="alias", revision="1", layers=1, kv_heads=1, head_dim=8 // ITEMSIZES[dtype], dtype=dtype,
        page_tokens=page_bytes // 16,
    )  # fmt: skip
    assert geometry.page_bytes == page_bytes
    pool = DevicePool(geometry, 2, axes=STACKED, max_step_bytes=2 * page_bytes)
    try:
        # Aligned as host slots are: what JAX would take as it is.
        memory = np.empty(2 * page_bytes + 4096, np.uint8)
        start = -memory.ctypes.data % 4096
        rows = memory[start : start + 2 * page_bytes].reshape(2, page_bytes)
        rows[:] = np.random.default_rng(page_bytes).integers(0, 256, rows.shape, dtype=np.uint8)
        given = rows.copy()
        pool.queue_scatter(np.array([0, 1]), rows, generation=pool.generation)
        rows[:] = 0x55  # evicted, and another page's now
        with pool.step() as handle:
            rows[:] = 0xAA
            arrays = [np.asarray(array) for array in read_slots(handle.arrays, np.array([0, 1], np.int32), 1)]
        found = join(geometry, STACKED, arrays)
        assert np.array_equal(found, given)
        rows[:] = 0x33
        with pool.step() as handle:
            again = [np.asarray(array) for array in read_slots(handle.arrays, np.array([0, 1], np.int32), 1)]
        assert np.array_equal(join(geometry, STACKED, again), given)
    finally:
        pool.close()


def test_host_pages_may_be_anothers_once_they_are_on_the_device(make_engine: MakeEngine) -> None:
    """C116, jax-ml/jax#38086: the same through the tiers: what is promoted stays, whatever becomes of its host slot."""
    engine = make_engine(device=32, host=8, shared=1)
    tokens = prompt(1, 29)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    sequence = engine.open(tokens)
    engine.settle(sequence)
    evict_all(engine.store, Tier.HOST)
    rows = engine.store._tiers[Tier.HOST].medium.view()  # type: ignore[attr-defined]
    rows[:] = 0x5A
    engine.verify(sequence, 28)
    for number in range(2, 4):
        engine.cache(prompt(number, 29))
    engine.verify(sequence, 28)


def test_what_is_read_after_the_barrier_is_all_there(make_engine: MakeEngine) -> None:
    """C119, vllm-project/tpu-inference#3546: generation went on from buffers that were half written.

    40 rounds with a mover that takes its time. The barrier: wait() (or promote()), then a step; scatters are part of
    the arrays' own history, so whatever is computed on them comes after.
    """
    engine = make_engine(device=16, host=16, shared=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)

    @jax.jit
    def consume(values: jax.Array) -> jax.Array:
        return jnp.sum(values.astype(jnp.float32), axis=tuple(range(1, values.ndim)))

    expected = None
    for _ in range(40):
        evict_all(engine.store, Tier.DEVICE, Tier.HOST)
        with inject("mover.before_copy", "delay", value=200):
            sequence = engine.open(tokens)
            while not sequence.settled:
                engine.store.device.wait([sequence], 120.0)
        assert sequence.ready == 32
        slots = np.resize(engine.block(sequence)[:8], 32).astype(np.int32)
        with engine.store.device.step() as pool:
            read = read_slots(pool.arrays, slots, engine.slot_axis)
            sums = [consume(array.swapaxes(0, engine.slot_axis)) for array in read]
        found = np.stack([np.asarray(each) for each in sums])
        expected = found if expected is None else expected
        assert np.array_equal(found, expected)
        engine.verify(sequence)
        sequence.close()


def test_without_the_barrier_there_is_nothing_to_read(make_engine: MakeEngine) -> None:
    """C119, google/tpu-sync commit b31cc54: who does not wait gets no slot, no array, and an error that says so."""
    engine = make_engine(device=16, host=16, shared=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    with engine.store.device.step() as pool:
        pass
    with pytest.raises(StalePoolError):
        pool.arrays  # noqa: B018
    with inject("mover.before_copy", "pause"):
        sequence = engine.open(tokens)
        assert (sequence.ready, sequence.loading) == (0, 32)
        with pytest.raises(StepwellUsageError, match="loading"):
            engine.store.extend([sequence], [33])
        with pytest.raises(StepwellUsageError):
            engine.store.publish([sequence], [33])
        assert (engine.block(sequence) == engine.scratch).all()
    engine.settle(sequence)
    engine.verify(sequence)
    assert sequence.ready == 32
