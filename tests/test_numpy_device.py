"""The pool of numpy arrays, where it is not what every pool is: tests/test_device.py asks both kinds the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from device_kit import ARRANGEMENTS, BY_LAYER, PER_LAYER, STACKED, cut
from sequence_kit import GEOMETRY, PAGE_TOKENS, config, prompt
from stepwell.errors import BudgetError, DeviceResetError, GeometryError, StalePoolError
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.testing.numpy_device import NumpyArray, NumpyArrays, NumpyPool
from stepwell.testing.stepped import SteppedStore
from stepwell.tiers.device_queue import GatherTicket
from store_kit import Directories

UNEVEN = PageGeometry(
    model="uneven", revision="1", layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=2,
    layer_head_dims=((2, 8), (2, 16), (1, 8)),
)  # fmt: skip
PROMPT = prompt(1, 4 * PAGE_TOKENS + 1)


def painted(geometry: PageGeometry, pages: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (pages, geometry.page_bytes), dtype=np.uint8)


@pytest.mark.parametrize(
    ("geometry", "axes"), [*((GEOMETRY, axes) for axes in ARRANGEMENTS), *((UNEVEN, axes) for axes in BY_LAYER)]
)
def test_pages_lie_in_the_arrays_as_their_axes_say(geometry: PageGeometry, axes: str) -> None:
    pool = NumpyPool(geometry, 5, axes=axes)
    pages = painted(geometry, 5)
    with pool.step() as handle:
        handle.arrays = pool.write(handle.arrays, [4, 2, 0, 1, 3], pages[[4, 2, 0, 1, 3]])
        for array, expected in zip(handle.arrays, cut(geometry, axes, pages, pool.storage_dtype), strict=True):
            slots = np.moveaxis(array.values, pool.arrangement.axes.index("slot"), 0)
            np.testing.assert_array_equal(slots[:5], np.moveaxis(expected, pool.arrangement.axes.index("slot"), 0))
        np.testing.assert_array_equal(pool.read(handle.arrays, [3, 0]), pages[[3, 0]])


def test_arrays_that_were_donated_raise_at_each_use() -> None:
    pool = NumpyPool(GEOMETRY, 4)
    with pool.step() as handle:
        old = handle.arrays
        handle.arrays = pool.write(old, [1], painted(GEOMETRY, 1))
        with pytest.raises(StalePoolError, match="donated"):
            _ = old[0].values
        with pytest.raises(StalePoolError, match="donated"):
            pool.write(old, [1], painted(GEOMETRY, 1))
    assert not pool.is_reset
    scatter = pool.queue_scatter(np.array([2]), painted(GEOMETRY, 1), generation=0)
    with pool.step() as handle:
        assert handle.dispatched.scatters == (scatter,)
        kept = handle.arrays
    pool.queue_scatter(np.array([2]), painted(GEOMETRY, 1), generation=0)
    pool.drain()
    with pytest.raises(StalePoolError, match="donated"):  # the pool's own scatter donates too
        _ = kept[0].values


Leave = Callable[[NumpyArrays], tuple[object, ...]]


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (lambda arrays: arrays[:-1], "arrays, axes '.*' of this geometry take"),
        (lambda arrays: (*arrays[:-1], NumpyArray(arrays[-1].values[1:])), "pool is uint32"),
        (lambda arrays: (*arrays[:-1], NumpyArray(arrays[-1].values.view(np.int32))), "int32"),
        (lambda arrays: (*arrays[:-1], arrays[-1].values), "not an array on a device"),
        (lambda arrays: (*arrays[:-1], arrays[0]), "are one array"),
        (lambda arrays: (arrays[-1].donate(), arrays)[1], "the array of .* is deleted"),
    ],
)
def test_numpy_arrays_that_cannot_be_the_pool_lose_it(leave: Leave, complaint: str) -> None:
    pool = NumpyPool(GEOMETRY, 4)
    with pytest.raises(DeviceResetError, match=complaint), pool.step() as handle:
        handle.arrays = leave(handle.arrays)  # type: ignore[assignment]
    assert pool.is_reset
    pool.renew()
    with pool.step() as handle:
        assert not pool.read(handle.arrays, [0, 1, 2, 3]).any()


def test_a_pool_takes_arrays_of_its_engine_and_no_others() -> None:
    shapes = NumpyPool(GEOMETRY, 4).shapes
    pool = NumpyPool(GEOMETRY, 4, arrays=[NumpyArray(np.full(shape, 7, np.uint32)) for shape in shapes])
    with pool.step() as handle:
        assert (pool.read(handle.arrays, [2]).view(np.uint32) == 7).all()
    with pytest.raises(GeometryError, match="cannot be the device pool"):
        NumpyPool(GEOMETRY, 4, arrays=[NumpyArray(np.zeros(3, np.uint32))] * len(shapes))


def test_a_pool_larger_than_memory_is_refused_with_its_numbers() -> None:
    with pytest.raises(BudgetError, match="1125899906842624 pages.*lower device.pages"):
        NumpyPool(GEOMETRY, 1 << 50)


def test_a_refused_gather_fails_at_its_dispatch_and_a_broken_one_when_it_is_waited_for() -> None:
    pool = NumpyPool(GEOMETRY, 4)
    pool.refused = pool.broken = 1
    tickets = [pool.queue_gather(np.array([slot]), generation=0) for slot in range(3)]
    assert pool.drain().gathers == tuple(tickets[1:])
    for ticket, problem in zip(tickets, ("no device memory", "computation of a gather failed", None), strict=True):
        assert isinstance(ticket, GatherTicket)
        if problem is None:
            ticket.wait()
        else:
            with pytest.raises(DeviceResetError, match=problem):
                ticket.wait()
    assert not pool.is_reset
    assert pool.refused == pool.broken == 0


def test_a_stepped_store_lands_gathers_only_when_told(directories: Directories) -> None:
    with SteppedStore(config(directories), seed=1) as store:
        assert store.device.pool_for_testing().__class__ is NumpyPool
        sequence = store.open(PROMPT)
        assert store.extend([sequence], [PROMPT.size]).ok.all()
        assert store.publish([sequence], [PROMPT.size]) == (4, 0)
        assert not store.land()  # it is queued: the engine's next step dispatches it
        store.device.drain()
        assert not store.mover.step()
        assert store.stats().tiers["shared"].arriving == 4
        assert store.land()
        assert not store.land()
        store.mover.run_until_idle()
        assert store.stats().tiers["shared"].resident == 4
        assert store.match(PROMPT).tiers == {Tier.SHARED: 4}


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_stepped_store_that_is_closed_returns_what_was_not_landed(directories: Directories, dispatched: bool) -> None:
    store = SteppedStore(config(directories), seed=1)
    sequence = store.open(PROMPT)
    store.extend([sequence], [PROMPT.size])
    store.publish([sequence], [PROMPT.size])
    if dispatched:
        store.device.drain()
    store.close()
    assert store._index.counts(Tier.SHARED)["arriving"] == 0
    assert store._index.counts(Tier.SHARED)["pinned"] == 0


CODE = """
import sys
sys.modules["jax"] = None                                     # importing it fails
import numpy as np
from stepwell import DeviceTier, PageGeometry, StoreConfig
from stepwell.testing.stepped import SteppedStore

geometry = PageGeometry(model="m", revision="1", layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=4)
store = SteppedStore(StoreConfig(geometry=geometry, device=DeviceTier(pages=4), host=1 << 16), seed=1)
with store, store.open(np.arange(9, dtype=np.int32)) as sequence:
    store.extend([sequence], [9])
    with store.device.step():
        pass
    print(store.publish([sequence], [9]))
"""


def test_a_stepped_store_needs_no_jax() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "(2, 0)\n", done.stderr


def test_axes_that_an_arrangement_lacks_are_refused_as_by_any_pool() -> None:
    with pytest.raises(GeometryError, match="not all alike"):
        NumpyPool(UNEVEN, 4, axes=STACKED)
    assert len(NumpyPool(UNEVEN, 4, axes=PER_LAYER).shapes) == 3
