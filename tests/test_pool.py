"""Memory that a caller lends: what can be lent, and how what does not fit is refused (layouts: test_kernels.py)."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import _core
from stepwell.config import SharedTier, StoreConfig
from stepwell.errors import GeometryError, StepwellUsageError
from stepwell.geometry import PageGeometry
from stepwell.pool import LentPool, PoolPointers, lend
from stepwell.store import PageStore
from store_kit import (
    AXES,
    GEOMETRY,
    PAGE_TOKENS,
    SHARED_ONLY,
    Directories,
    OpenRig,
    chain,
    stamps,
)

SHAPE = _core.PageShape(list(GEOMETRY.layer_bytes), GEOMETRY.fingerprint())
SLOTS = 10


@pytest.mark.parametrize("page_bytes", [1, 511, 4095, 4097, 65536, 65537, 200_003])
def test_an_opaque_page_of_any_size_round_trips(directories: Directories, page_bytes: int) -> None:  # C089, C091
    geometry = PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint={"of": "test"})
    config = StoreConfig(
        geometry=geometry,
        shared=SharedTier("4MiB", str(directories.shared), volume_bytes="4MiB"),
        disk=directories.config(disk=8 << 20).disk,
    )
    config = StoreConfig(
        geometry=geometry,
        shared=config.shared,
        disk=type(config.disk)("4MiB", str(directories.disk), volume_bytes="4MiB"),  # type: ignore[misc, call-arg]
    )
    data = np.random.default_rng(page_bytes).integers(0, 256, (4, page_bytes), dtype=np.uint8)
    out = np.zeros((6, page_bytes), np.uint8)
    with PageStore(config) as store:
        store.save([1, 2, 3, 4], source=store.lend(data)[:]).transfer.result(timeout=30.0)
        for evicted in (0, 4):
            store.evict(_tier("shared"), evicted)
            out[:] = 0xEE
            with store.match([1, 2, 3, 4]) as match:
                assert store.load(match, into=store.lend(out)[1:5]).result(timeout=30.0) == 4
            assert np.array_equal(out[1:5], data)
            assert (out[[0, 5]] == 0xEE).all()  # canaries on both sides


def _tier(name: str) -> int:
    from stepwell.index import Tier

    return Tier[name.upper()]


def test_opaque_rows_with_gaps_between_them_are_read_and_written_in_place(directories: Directories) -> None:
    geometry = PageGeometry.opaque(4096, page_tokens=1, fingerprint={"of": "test"})
    shared = SharedTier("1MiB", str(directories.shared), volume_bytes="1MiB")
    wide = np.random.default_rng(1).integers(0, 256, (4, 5000), dtype=np.uint8)
    out = np.full((4, 5000), 0xEE, np.uint8)
    with PageStore(StoreConfig(geometry=geometry, shared=shared)) as store:
        store.save([1, 2, 3, 4], source=store.lend(wide[:, :4096])[:]).transfer.result(timeout=30.0)
        with store.match([1, 2, 3, 4]) as match:
            assert store.load(match, into=store.lend(out[:, :4096])[:]).result(timeout=30.0) == 4
    assert np.array_equal(out[:, :4096], wide[:, :4096])
    assert (out[:, 4096:] == 0xEE).all()


def test_a_memoryview_and_a_dlpack_array_can_be_lent() -> None:
    class OnCpu:
        def __init__(self, array: np.ndarray) -> None:
            self._array = array

        def __dlpack__(self, **how: object) -> object:
            return self._array.__dlpack__(**how)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    array = np.zeros((2, 2, SLOTS, PAGE_TOKENS, 2, 32), np.uint8)
    assert lend(GEOMETRY, SHAPE, memoryview(array)).slots == SLOTS
    assert lend(GEOMETRY, SHAPE, OnCpu(array)).slots == SLOTS


# What does not fit

FIT = (2, 2, SLOTS, PAGE_TOKENS, 2, 32)


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "words"),
    [
        ((2, 2, SLOTS, 5, 2, 32), "uint8", None, ["[10, 5, 2, 32]", "[10, 4, 2, 32]"]),
        ((2, 2, SLOTS, 4, 3, 32), "uint8", None, ["[10, 4, 3, 32]", "[10, 4, 2, 32]"]),
        ((2, 2, SLOTS, 4, 2, 16), "uint16", None, ["[10, 4, 2, 16]", "[10, 4, 2, 32]"]),
        (FIT, "uint16", None, ["uint16", "2 bytes", "uint8", "1"]),
        ((3, 2, SLOTS, 4, 2, 32), "uint8", None, ["axis layer has 3", "geometry has 2"]),
        ((2, 1, SLOTS, 4, 2, 32), "uint8", None, ["axis stream has 1", "geometry has 2"]),
        ((SLOTS, 4, 2, 32), "uint8", None, ["1 arrays", "2 layers and 2 streams", "4"]),
        ((2, 2), "uint8", None, ["cannot tell the axes", "[2, 2]"]),
        (FIT, "uint8", "slot token head dim", ["1 arrays", "takes 4"]),
        (FIT, "uint8", "slot slot layer stream head dim", ["once"]),
        (FIT, "uint8", "slot layer stream token head", ["once"]),
        (FIT, "uint8", "slot layer stream token head dim page", ["at most layer and stream"]),
        (FIT[:5], "uint8", "layer stream slot token head dim", ["5 axes"]),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_and_both_sides_are_named(
    shape: tuple[int, ...], dtype: str, axes: str | None, words: list[str]
) -> None:
    with pytest.raises(GeometryError) as refused:
        lend(GEOMETRY, SHAPE, np.zeros(shape, dtype), axes=axes)
    for word in words:
        assert word in str(refused.value)


def test_heads_whose_values_are_not_contiguous_are_refused() -> None:
    with pytest.raises(GeometryError, match="not contiguous"):
        lend(GEOMETRY, SHAPE, np.zeros((2, 2, SLOTS, 4, 2, 64), np.uint8)[..., ::2])


def test_arrays_of_different_sizes_are_refused() -> None:
    arrays = [np.zeros((SLOTS + (i == 3), 4, 2, 32), np.uint8) for i in range(4)]
    with pytest.raises(GeometryError, match=r"layer 1 stream 1.*\[11, 4, 2, 32\].*\[10, 4, 2, 32\]"):
        lend(GEOMETRY, SHAPE, arrays)
    with pytest.raises(GeometryError, match="arrays"):
        lend(GEOMETRY, SHAPE, [])


def test_an_opaque_pool_that_does_not_fit_is_refused() -> None:
    geometry = PageGeometry.opaque(100, page_tokens=1, fingerprint={"a": 1})
    shape = _core.PageShape(list(geometry.layer_bytes), geometry.fingerprint())
    with pytest.raises(GeometryError, match=r"99 bytes.*100 contiguous"):
        lend(geometry, shape, np.zeros((4, 99), np.uint8))
    with pytest.raises(GeometryError, match=r"not contiguous.*100 contiguous"):
        lend(geometry, shape, np.zeros((4, 200), np.uint8)[:, ::2])
    with pytest.raises(GeometryError, match="one array"):
        lend(geometry, shape, [np.zeros((4, 100), np.uint8)] * 2)
    with pytest.raises(GeometryError, match="one array"):
        lend(geometry, shape, PoolPointers(np.zeros(1, np.uint64), 1, 1, 1, 1))


def test_pointers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(GeometryError, match="3 addresses, but 2 layers of 2 streams take 4"):
        lend(GEOMETRY, SHAPE, PoolPointers(np.zeros(3, np.uint64), 1, 1, 1, 1))


def test_memory_of_another_device_is_refused() -> None:
    class OnGpu:
        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("must not be asked")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(StepwellUsageError, match="device type 2: only the CPU's"):
        lend(GEOMETRY, SHAPE, OnGpu())
    with pytest.raises(StepwellUsageError, match="cannot lend a dict"):
        lend(GEOMETRY, SHAPE, {})  # type: ignore[arg-type]


@pytest.fixture
def pool() -> LentPool:
    return lend(GEOMETRY, SHAPE, np.zeros(FIT, np.uint8))


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([0, SLOTS], "0..10 are not all within the pool's 0..9"),
        ([-1], "-1..-1"),
        ([3, 4, 3], "named twice"),
        ([1.5], "ints"),
        ([[1, 2]], "1-D"),
        ([True, False], "ints"),
        ([2**63], "ints|within"),
    ],
)
def test_slots_outside_the_pool_or_named_twice_are_refused(pool: LentPool, slots: list[object], words: str) -> None:
    with pytest.raises(StepwellUsageError, match=words):
        pool[slots]  # type: ignore[index]


def test_a_slice_names_slots_as_python_does(pool: LentPool) -> None:
    assert pool[2:8:2].slots.tolist() == [2, 4, 6]
    assert pool[-3:].slots.tolist() == [7, 8, 9]
    assert pool[[]].slots.tolist() == []
    assert len(pool[:][3:5]) == 2
    assert len(pool) == SLOTS


def test_read_only_memory_can_be_saved_from_and_not_loaded_into(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    frozen = stamps(chain(1, 4)).reshape(4, 2, 2, PAGE_TOKENS, 2, 32)
    frozen.flags.writeable = False
    pool = rig.store.lend(frozen, axes=AXES)
    assert rig.store.save(chain(1, 4), source=pool[:]).transfer.result(timeout=30.0) == 4
    with (
        rig.store.match(chain(1, 4)) as match,
        pytest.raises(StepwellUsageError, match="read-only"),
    ):
        rig.store.load(match, into=pool[:])
    with pytest.raises(StepwellUsageError, match="read-only"):
        rig.store.load_keys([b"k"], into=pool[:1])


def test_a_pool_lent_for_another_geometry_is_refused(open_rig: OpenRig) -> None:
    """As many layers, but larger ones: taken on trust it would be read past its end."""
    rig = open_rig(**SHARED_ONLY)
    small = PageGeometry(
        model="other", revision="1", layers=2, kv_heads=1, head_dim=8, dtype="uint8", page_tokens=PAGE_TOKENS
    )
    shape = _core.PageShape(list(small.layer_bytes), small.fingerprint())
    pool = lend(small, shape, np.zeros((2, 2, SLOTS, PAGE_TOKENS, 1, 8), np.uint8))
    rig.save(chain(1, 4))
    with rig.store.match(chain(1, 4)) as match, pytest.raises(GeometryError, match="lent for the geometry"):
        rig.store.load(match, into=pool[:4])
    with pytest.raises(GeometryError, match="lent for the geometry"):
        rig.store.save(chain(2, 4), source=pool[:4])
    with pytest.raises(GeometryError, match="lent for the geometry"):
        rig.store.save_keys([b"k"], source=pool[:1])
    with pytest.raises(GeometryError, match="lent for the geometry"):
        rig.store.load_keys([b"k"], into=pool[:1])


def test_a_lent_pool_says_what_it_is(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0)
    assert repr(rig.pool) == "<LentPool: 256 slots, writable>"
    rig.rows.flags.writeable = False
    read_only = rig.rows.reshape(256, GEOMETRY.layers, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
    assert repr(rig.store.lend(read_only, axes=AXES)) == "<LentPool: 256 slots, read-only>"
