"""Memory that a caller lends: whatever its layout, its pages are the same; what does not fit is refused."""

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
    PAGE_BYTES,
    PAGE_TOKENS,
    SHARED_ONLY,
    Directories,
    OpenRig,
    chain,
    stamps,
)

SHAPE = _core.PageShape(list(GEOMETRY.layer_bytes), GEOMETRY.fingerprint())
SLOTS, PAGES = 10, 6
SIZES = {"layer": 2, "stream": 2, "slot": SLOTS, "token": PAGE_TOKENS, "head": 2, "dim": 32}
CHOSEN = [9, 0, 4, 3, 7, 1]


def canonical(arrays: list[np.ndarray], names: tuple[str, ...], missing: tuple[str, ...]) -> np.ndarray:
    """Return rows of canonical page bytes of arrays whose axes have these names, by plain numpy."""
    whole = np.stack(arrays).reshape(*[SIZES[name] for name in missing], *arrays[0].shape)
    order = [(*missing, *names).index(name) for name in ("slot", "layer", "stream", "token", "head", "dim")]
    return np.ascontiguousarray(whole.transpose(order)).reshape(SLOTS, PAGE_BYTES)


LAYOUTS = [
    "layer stream slot token head dim",
    "slot layer stream token head dim",
    "stream layer slot head token dim",
    "layer slot token stream head dim",
    "stream slot token head dim",  # an array a layer
    "layer slot token head dim",  # an array a stream
    "slot token head dim",  # an array a layer and stream
    "token head slot dim",
]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_pages_are_the_same_whatever_the_layout_of_the_pool(open_rig: OpenRig, axes: str) -> None:
    rig = open_rig(**SHARED_ONLY)
    names = tuple(axes.split())
    missing = tuple(name for name in ("layer", "stream") if name not in names)
    count = int(np.prod([SIZES[name] for name in missing], dtype=int))
    random = np.random.default_rng(1)
    arrays = [random.integers(0, 256, [SIZES[n] for n in names], dtype=np.uint8) for _ in range(count)]
    expected = canonical(arrays, names, missing)[CHOSEN]
    pool = rig.store.lend(arrays if count > 1 else arrays[0], axes=axes)
    rig.store.save(chain(1, PAGES), source=pool[CHOSEN]).transfer.wait()
    with rig.store.match(chain(1, PAGES)) as match:
        assert rig.store.load(match, into=rig.pool[:PAGES]).result(timeout=30.0) == PAGES
        assert np.array_equal(rig.rows[:PAGES], expected)
        before = [array.copy() for array in arrays]
        for array in arrays:
            array[:] = 0x55
        assert rig.store.load(match, into=pool[CHOSEN], order="layer").result(timeout=30.0) == PAGES
    after = canonical(arrays, names, missing)
    assert np.array_equal(after[CHOSEN], canonical(before, names, missing)[CHOSEN])
    assert (np.delete(after, CHOSEN, axis=0) == 0x55).all()  # slots that were not named are not touched


def test_a_pool_with_gaps_is_read_and_written_in_place_and_its_gaps_are_left_alone(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    wide = np.full((SLOTS, 2, 2, PAGE_TOKENS, 3, 40), 0x77, np.uint8)
    view = wide[..., :2, 4:36]
    rig.save(chain(1, PAGES))
    with rig.store.match(chain(1, PAGES)) as match:
        rig.store.load(match, into=rig.store.lend(view, axes=AXES)[:PAGES]).result(timeout=30.0)
    assert np.array_equal(view[:PAGES].reshape(PAGES, PAGE_BYTES), stamps(chain(1, PAGES)))
    view[:PAGES] = 0x77
    assert (wide == 0x77).all()


def test_pointers_lend_memory_that_has_no_array(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, PAGES))
    memory = np.zeros((2, 2, SLOTS, PAGE_TOKENS, 2, 32), np.uint8)
    stream_bytes = memory.strides[1]
    pool = rig.store.lend(
        PoolPointers(
            base=(memory.ctypes.data + stream_bytes * np.arange(4)).astype(np.uint64),
            slot_stride=memory.strides[2],
            token_stride=memory.strides[3],
            head_stride=memory.strides[4],
            slots=SLOTS,
            owner=memory,
        )
    )
    with rig.store.match(chain(1, PAGES)) as match:
        assert rig.store.load(match, into=pool[CHOSEN]).result(timeout=30.0) == PAGES
    rows = memory.transpose(2, 0, 1, 3, 4, 5).reshape(SLOTS, PAGE_BYTES)
    assert np.array_equal(rows[CHOSEN], stamps(chain(1, PAGES)))


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


def test_layers_of_different_sizes_round_trip(directories: Directories) -> None:
    geometry = PageGeometry(
        model="m", revision="r", layers=3, kv_heads=4, head_dim=8, dtype="float32", page_tokens=3,
        layer_head_dims=((1, 8), (4, 2), (2, 5)),
    )  # fmt: skip
    config = StoreConfig(geometry=geometry, shared=SharedTier("1MiB", str(directories.shared), volume_bytes="1MiB"))
    random = np.random.default_rng(0)
    arrays = [
        random.random((5, 3, heads, dim), dtype=np.float32) for heads, dim in geometry.head_dims for _ in range(2)
    ]
    copies = [np.zeros_like(array) for array in arrays]
    with PageStore(config) as store:
        store.save(chain(1, 5)[:15], source=store.lend(arrays)[:]).transfer.result(timeout=30.0)
        with store.match(chain(1, 5)[:15]) as match:
            assert store.load(match, into=store.lend(copies)[:], order="layer").result(timeout=30.0) == 5
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(array, copy)


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
