"""Copies between pools of any layout and canonical pages, against numpy: right bytes, right checksums, nothing beside.

A pool is drawn with its memory: the order of its axes in memory and in the array, gaps, axes that run backwards, any
alignment, arrays a layer or a stream. numpy reads the same memory through strides of its own.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_kit import CHECKSUMS, EDGES, Bytes, Guarded, checksums_by, crc32c
from stepwell import _core
from stepwell.config import SharedTier, StoreConfig
from stepwell.geometry import ITEMSIZES, PageGeometry
from stepwell.pool import LentPool, PoolPointers, core_pool, lend
from stepwell.store import PageStore

DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "uint8": np.uint8,
}
HEAD_BYTES = sorted({max(1, edge + d) for edge in EDGES for d in (-8, -1, 0, 1, 8)})
PADS = (0, 0, 0, 1, 8, 24, 64)


@dataclass
class Layout:
    """Where a geometry's values lie in some memory: one array or several, as numpy sees them and as they are lent."""

    geometry: PageGeometry
    slots: int
    memory: list[Guarded]
    names: tuple[str, ...]  # axes of each array
    strides: list[dict[str, int]]
    offsets: list[int]  # of slot 0, token 0 ... within each memory's `inside`
    as_pointers: bool

    def array(self, number: int, memory: Bytes | None = None) -> np.ndarray:
        """Return one array over its memory, or over a copy of that."""
        layer = number // (1 if "layer" in self.names else self.geometry.streams if "stream" not in self.names else 1)
        layer = layer if "layer" not in self.names else 0
        heads, dim = self.geometry.head_dims[layer]
        sizes = self.sizes(heads, dim)
        place = self.memory[number]
        return np.ndarray(
            [sizes[name] for name in self.names],
            DTYPES[self.geometry.dtype],
            (place.whole if memory is None else memory).data,
            place.first + self.offsets[number],
            [self.strides[number][name] for name in self.names],
        )

    def sizes(self, heads: int, dim: int) -> dict[str, int]:
        it = self.geometry
        return {
            "layer": it.layers, "stream": it.streams, "slot": self.slots,
            "token": it.page_tokens, "head": heads, "dim": dim,
        }  # fmt: skip

    def stream(self, layer: int, stream: int, copies: list[Bytes] | None = None) -> np.ndarray:
        """Return [slot, token, head, dim] of one layer and stream."""
        missing = [name for name in ("layer", "stream") if name not in self.names]
        at = {"layer": layer, "stream": stream}
        number = 0
        for name in missing:
            number = number * {"layer": self.geometry.layers, "stream": self.geometry.streams}[name] + at[name]
        array = self.array(number, None if copies is None else copies[number])
        index = tuple(at[name] if name in at else slice(None) for name in self.names)
        left = [name for name in self.names if name not in at]
        return array[index].transpose([left.index(name) for name in ("slot", "token", "head", "dim")])

    def streams(self) -> list[tuple[int, int]]:
        return list(itertools.product(range(self.geometry.layers), range(self.geometry.streams)))

    def layer_bytes(self, slot: int, layer: int) -> bytes:
        """Return the canonical bytes of a layer, by numpy."""
        return b"".join(self.stream(layer, s)[slot].tobytes() for s in range(self.geometry.streams))

    def page(self, slot: int) -> bytes:
        return b"".join(self.layer_bytes(slot, layer) for layer in range(self.geometry.layers))

    def write(self, copies: list[Bytes], slot: int, page: Bytes) -> None:
        """Put a canonical page into copies of the memory, by numpy."""
        start = 0
        for layer, stream in self.streams():
            into = self.stream(layer, stream, copies)[slot]
            into[...] = page[start : start + into.nbytes].copy().view(into.dtype).reshape(into.shape)
            start += into.nbytes
        assert start == page.size

    def copies(self) -> list[Bytes]:
        return [memory.whole.copy() for memory in self.memory]

    def lend(self, store: PageStore | None = None) -> LentPool:
        source: object = [self.array(number) for number in range(len(self.memory))]
        if self.as_pointers:
            views = [self.stream(layer, stream) for layer, stream in self.streams()]
            strides = np.array([view.strides for view in views], np.int64)
            source = PoolPointers(
                base=np.array([view.__array_interface__["data"][0] for view in views], np.uint64),
                slot_stride=strides[:, 0],
                token_stride=strides[:, 1],
                head_stride=strides[:, 2],
                slots=self.slots,
                owner=self.memory,
            )
        axes = " ".join(self.names)
        if store is not None:
            return store.lend(source, axes=axes)  # type: ignore[arg-type]
        return lend(self.geometry, shape_of(self.geometry), source, axes=axes)  # type: ignore[arg-type]


def shape_of(geometry: PageGeometry) -> _core.PageShape:
    return _core.PageShape(list(geometry.layer_bytes), geometry.fingerprint())


@st.composite
def geometries(draw: st.DrawFn, *, page_tokens: int | None = None) -> PageGeometry:
    """Draw pages of any dtype, of one or two streams, of layers alike or not, from one byte to some 30 KB."""
    dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
    layers = draw(st.integers(1, 3))

    def heads_and_dim() -> tuple[int, int]:
        dim = max(1, draw(st.sampled_from(HEAD_BYTES)) // ITEMSIZES[dtype])
        return draw(st.integers(1, 3 if dim < 600 else 1)), dim

    pairs = tuple(heads_and_dim() for _ in range(layers)) if draw(st.booleans()) else None
    heads, dim = heads_and_dim()
    return PageGeometry(
        model="m", revision="r", layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype,
        page_tokens=page_tokens or draw(st.integers(1, 3)), streams=draw(st.integers(1, 2)), layer_head_dims=pairs,
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, geometry: PageGeometry) -> Layout:
    """Draw where the pages of a geometry lie."""
    slots = draw(st.integers(1, 3))
    outer = [name for name in ("layer", "stream") if name == "stream" or geometry.layer_head_dims is None]
    outer = [name for name in outer if draw(st.booleans())]
    in_memory = [*draw(st.permutations([*outer, "slot", "token", "head"])), "dim"]
    names = tuple(draw(st.permutations(in_memory)))
    counts = {"layer": geometry.layers, "stream": geometry.streams}
    arrays = int(np.prod([counts[name] for name in counts if name not in outer], dtype=int))
    layout = Layout(geometry, slots, [], names, [], [], draw(st.booleans()))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    pads = {name: draw(st.sampled_from(PADS)) for name in in_memory[:-1]}
    backwards = {name for name in in_memory[:-1] if draw(st.integers(0, 3)) == 0}
    for number in range(arrays):
        layer = 0 if "layer" in outer else number // (1 if "stream" in outer else geometry.streams)
        sizes = layout.sizes(*geometry.head_dims[layer])
        extent = sizes["dim"] * geometry.itemsize
        strides, start = {"dim": geometry.itemsize}, 0
        for name in reversed(in_memory[:-1]):
            step = extent + pads[name]
            extent = step * (sizes[name] - 1) + extent
            strides[name] = -step if name in backwards else step
            start += step * (sizes[name] - 1) if name in backwards else 0
        memory = Guarded(extent, draw(st.sampled_from((0, 1, 2, 4, 8, 16, 32, 63))))
        memory.fill(random)
        layout.memory.append(memory)
        layout.strides.append(strides)
        layout.offsets.append(start)
    return layout


POOLS = geometries().flatmap(layouts)
PLACES = st.integers(0, 63)


@pytest.mark.parametrize("implementation", CHECKSUMS)
@settings(max_examples=50)
@given(POOLS, st.data(), PLACES)
def test_gather_reads_the_page_that_numpy_reads_and_touches_nothing_else(
    implementation: str, layout: Layout, data: st.DataObject, place: int
) -> None:
    pool = core_pool(layout.lend())
    slot = data.draw(st.integers(0, layout.slots - 1))
    before, page = layout.copies(), layout.page(slot)
    target = Guarded(len(page), place)
    expected = target.whole.copy()
    expected[target.first : target.first + len(page)] = np.frombuffer(page, np.uint8)
    with checksums_by(implementation):
        checksums = pool.gather(slot, target.inside)
        assert np.array_equal(target.whole, expected)
        assert checksums.tolist() == [crc32c(layout.layer_bytes(slot, i)) for i in range(layout.geometry.layers)]
        target.inside[:] = 0
        pool.gather_unchecked(slot, target.inside)
    assert np.array_equal(target.whole, expected)
    assert all(np.array_equal(memory.whole, was) for memory, was in zip(layout.memory, before, strict=True))


@pytest.mark.parametrize("implementation", CHECKSUMS)
@settings(max_examples=50)
@given(POOLS, st.data(), PLACES)
def test_scatter_writes_the_page_that_numpy_writes_and_touches_nothing_else(
    implementation: str, layout: Layout, data: st.DataObject, place: int
) -> None:
    pool = core_pool(layout.lend())
    slot = data.draw(st.integers(0, layout.slots - 1))
    source = Guarded(layout.geometry.page_bytes, place)
    source.fill(np.random.default_rng(place))
    given_page, before = source.whole.copy(), layout.copies()
    expected = layout.copies()
    layout.write(expected, slot, source.inside)
    with checksums_by(implementation):
        checksums = pool.scatter(slot, source.inside)
        assert all(np.array_equal(memory.whole, now) for memory, now in zip(layout.memory, expected, strict=True))
        assert checksums.tolist() == [crc32c(layout.layer_bytes(slot, i)) for i in range(layout.geometry.layers)]
        for memory, was in zip(layout.memory, before, strict=True):
            memory.whole[:] = was
        pool.scatter_unchecked(slot, source.inside)
    assert all(np.array_equal(memory.whole, now) for memory, now in zip(layout.memory, expected, strict=True))
    assert np.array_equal(source.whole, given_page)


@settings(max_examples=30)
@given(
    st.sampled_from((1, 63, 64, 65_535, 65_536, 65_537, 131_073)) | st.integers(1, 3000), st.integers(0, 70), PLACES,
    st.booleans(), st.booleans(), st.integers(0, 2), st.sampled_from(CHECKSUMS),
)  # fmt: skip
def test_an_opaque_page_is_copied_as_it_lies_and_checked_in_pieces(
    page_bytes: int, gap: int, place: int, is_signed: bool, is_backwards: bool, slot: int, implementation: str
) -> None:
    it = PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint={"of": "test"})
    memory, page = Guarded(3 * (page_bytes + gap), place), Guarded(page_bytes, 63 - place)
    memory.fill(np.random.default_rng(page_bytes))
    rows = memory.inside.reshape(3, -1)[:: -1 if is_backwards else 1, :page_bytes]
    pool = core_pool(lend(it, shape_of(it), rows.view(np.int8) if is_signed else rows))
    expected = page.whole.copy()
    expected[page.first : page.first + page_bytes] = rows[slot]
    with checksums_by(implementation):
        checksums = pool.gather(slot, page.inside)
        assert np.array_equal(page.whole, expected)
        pieces = [rows[slot, at : at + 65536].tobytes() for at in range(0, page_bytes, 65536)]
        assert checksums.tolist() == [crc32c(piece) for piece in pieces]
        page.inside[:] ^= 0x5A
        after = memory.whole.copy()
        after[memory.first : memory.first + memory.inside.size].reshape(3, -1)[
            2 - slot if is_backwards else slot, :page_bytes
        ] ^= 0x5A
        pool.scatter(slot, page.inside)
    assert np.array_equal(memory.whole, after)


AXES = ("layer", "stream", "slot", "token", "head", "dim")
ORDERS = [
    order
    for outer in (AXES[:2], AXES[:1], AXES[1:2], ())
    for order in itertools.permutations((*outer, *AXES[2:]))
]


def test_a_value_lies_in_the_page_where_numpys_strides_put_it_whatever_the_order_of_the_axes() -> None:
    it = PageGeometry(
        model="m", revision="r", layers=2, kv_heads=3, head_dim=7, dtype="bfloat16", page_tokens=5, streams=2
    )
    sizes = dict(zip(AXES, (2, 2, 3, 5, 3, 7), strict=True))
    shape = shape_of(it)
    stamps = np.arange(np.prod(list(sizes.values())), dtype=np.uint16).reshape(*sizes.values())
    page = np.zeros(it.page_bytes, np.uint8)
    canonical = page.view(np.uint16).reshape(2, 2, 5, 3, 7)
    assert canonical.strides[0] == it.layer_bytes[0]
    assert len(ORDERS) == 720 + 120 + 120 + 24
    for order in ORDERS:
        missing = [name for name in AXES[:2] if name not in order]
        # Values of a head must be neighbours; where "dim" stands in the array is the array's matter.
        in_memory = [*missing, *(name for name in order if name != "dim"), "dim"]
        stored = np.ascontiguousarray(stamps.transpose([AXES.index(name) for name in in_memory]))
        whole = stored.transpose([in_memory.index(name) for name in (*missing, *order)])
        arrays = list(whole.reshape(-1, *whole.shape[len(missing) :])) if len(missing) == 1 else [whole]
        if len(missing) == 2:
            arrays = [whole[i, j] for i in range(2) for j in range(2)]
        pool = core_pool(lend(it, shape, arrays, axes=" ".join(order)))
        for slot in range(3):
            pool.gather(slot, page)
            assert np.array_equal(canonical, stamps[:, :, slot]), order


@settings(max_examples=40)
@given(
    geometries(page_tokens=2), st.data(), st.sampled_from(["page", "layer"]),
    st.sampled_from(CHECKSUMS), st.sampled_from(CHECKSUMS), st.integers(0, 2**32), st.booleans(),
)  # fmt: skip
def test_a_page_that_was_changed_where_it_lay_is_reported_and_all_else_arrives_in_any_layout(
    geometry: PageGeometry, data: st.DataObject, order: str, saved_by: str, loaded_by: str, place: int, is_changed: bool
) -> None:
    """Slots that failed have undefined bytes; every other byte is what it was, or what it should be."""
    source, target = data.draw(layouts(geometry)), data.draw(layouts(geometry))
    tokens = np.arange(2 * source.slots, dtype=np.int32)
    pages = [source.page(slot) for slot in range(source.slots)]
    loaded = min(source.slots, target.slots)
    with tempfile.TemporaryDirectory(prefix="sw-test-", dir="/dev/shm") as directory:
        config = StoreConfig(geometry=geometry, shared=SharedTier("1MiB", directory, volume_bytes="1MiB"))
        with PageStore(config) as store:
            with checksums_by(saved_by):
                pool = source.lend(store)
                assert store.save(tokens, source=pool[:]).transfer.result(timeout=30.0) == source.slots
            # A smaller page is found in many places of a file.
            is_changed = is_changed and geometry.page_bytes >= 16
            bad = place % loaded if is_changed else -1
            if is_changed:
                flip(Path(directory), pages[bad], place % len(pages[bad]))
            expected = target.copies()
            for slot in range(loaded):
                target.write(expected, slot, np.frombuffer(pages[slot], np.uint8))
            with checksums_by(loaded_by), store.match(tokens[: 2 * loaded]) as match:
                transfer = store.load(match, into=target.lend(store)[:loaded], order=order)  # type: ignore[arg-type]
                assert transfer.wait(timeout=30.0)
    assert transfer.ok.tolist() == [slot != bad for slot in range(loaded)]
    got = target.copies()
    if is_changed:
        for memory in (got, expected):
            target.write(memory, bad, np.zeros(geometry.page_bytes, np.uint8))
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def flip(directory: Path, page: bytes, at: int) -> None:
    """Change one bit of a page in the volume that has it."""
    [path] = directory.glob("v-*.vol")
    found = path.read_bytes().index(page) + at
    with path.open("r+b") as file:
        file.seek(found)
        [byte] = file.read(1)
        file.seek(found)
        file.write(bytes([byte ^ 1 << at % 8]))
