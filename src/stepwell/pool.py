"""Describe memory that a caller lends: any strided pool of pages on the CPU.

A lent pool stays the caller's. Transfers read and write it in place, without a copy on the way, in whatever layout it
has; only what lies *inside* a head (its `dim` values) must be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.errors import GeometryError, StepwellUsageError
from stepwell.geometry import PageGeometry

_INNER_AXES = ("slot", "token", "head", "dim")
_OUTER_AXES = ("layer", "stream")


class SupportsDLPack(Protocol):
    """An array of another library that can be viewed without a copy."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        """Return a DLPack capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (device type, device id); 1 is the CPU."""


PoolArray = npt.NDArray[np.generic] | SupportsDLPack | memoryview


@dataclass(frozen=True, slots=True)
class PoolPointers:
    """Lend memory by address, for engines that have no array object for it.

    base: uint64[layers * streams] addresses of slot 0, index layer * streams + stream. slot_stride, token_stride,
    head_stride: bytes, one int for all or int64[layers * streams]. slots: pages in the pool. owner: kept alive while
    transfers use the pool.
    Requires: the memory stays mapped until the last transfer that names it has released it.
    """

    base: npt.NDArray[np.uint64]
    slot_stride: int | npt.NDArray[np.int64]
    token_stride: int | npt.NDArray[np.int64]
    head_stride: int | npt.NDArray[np.int64]
    slots: int
    owner: object = None
    writable: bool = True


class LentPool:
    """A pool lent by the caller, with the geometry it was checked against.

    Invariant: the memory described lies inside the arrays given, which this object keeps alive.
    Threads: any; it is immutable.
    """

    __slots__ = ("_core_pool", "_fingerprint", "_owner", "_slots", "_writable")

    def __init__(
        self, core_pool: _core.Pool, owner: object, slots: int, *, fingerprint: bytes, writable: bool
    ) -> None:
        self._core_pool = core_pool
        self._owner = owner
        self._slots = slots
        self._fingerprint = fingerprint
        self._writable = writable

    def __repr__(self) -> str:
        return f"<LentPool: {self._slots} slots, {'writable' if self._writable else 'read-only'}>"

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the geometry that the memory was checked against."""
        return self._fingerprint

    @property
    def writable(self) -> bool:
        """Whether pages can be loaded into it."""
        return self._writable

    @property
    def slots(self) -> int:
        """Pages the pool has room for."""
        return self._slots

    def __len__(self) -> int:
        return self._slots

    def __getitem__(self, slots: slice | Sequence[int] | npt.NDArray[np.integer]) -> PoolSlice:
        """Name some slots of the pool, in order: `pool[3:7]`, `pool[[9, 2, 5]]`, `pool[int64 array]`.

        Raises:
            StepwellUsageError: a slot outside the pool, or named twice.
        """
        if isinstance(slots, slice):
            if slots.stop is not None and slots.stop > self._slots:
                raise StepwellUsageError(
                    f"slots: {slots.start or 0}:{slots.stop} ends outside the pool's 0..{self._slots - 1}"
                )
            chosen = np.arange(*slots.indices(self._slots), dtype=np.int64)
        else:
            given = np.asarray(slots)
            if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
                raise StepwellUsageError(f"slots: need a 1-D array of ints, got {given.dtype}{list(given.shape)}")
            chosen = given.astype(np.int64)
        low, high, are_distinct = _core.slot_range(chosen, self._slots)
        if low < 0 or high >= self._slots:
            raise StepwellUsageError(f"slots: {low}..{high} are not all within the pool's 0..{self._slots - 1}")
        if not are_distinct:
            raise StepwellUsageError("slots: a slot is named twice")
        return PoolSlice(self, chosen)


class PoolSlice(msgspec.Struct, frozen=True):
    """Some slots of a lent pool, in order: the i-th is where the i-th page comes from or goes to."""

    pool: LentPool
    slots: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.slots.size)

    def __getitem__(self, part: slice) -> PoolSlice:
        return PoolSlice(self.pool, self.slots[part])


def core_pool(lent: LentPool) -> _core.Pool:
    """Return the core's description of a lent pool. For the store."""
    return lent._core_pool


def pool_owner(lent: LentPool) -> object:
    """Return what a transfer must keep alive. For the store."""
    return lent._owner


def _each(source: PoolArray | Sequence[PoolArray]) -> Sequence[PoolArray]:
    # A memoryview counts as a sequence too, of its items.
    if isinstance(source, Sequence) and not isinstance(source, memoryview):
        return source
    return [source]


def lend(
    geometry: PageGeometry,
    shape: _core.PageShape,
    source: PoolArray | Sequence[PoolArray] | PoolPointers,
    *,
    axes: str | None = None,
) -> LentPool:
    """Check memory against a geometry and describe it for the mover.

    Args:
        geometry: what a page is. shape: the same, as the core has it.
        source: one array, or one per layer, stream, or (layer-major) layer and stream; or PoolPointers.
        axes: the names of each array's axes in order, out of `layer stream slot token head dim`; those of layer and
            stream that are missing are what the arrays of the sequence stand for. Default: "layer stream slot token
            head dim" for one array, and whatever fits for several. An opaque page: "slot byte".

    Raises:
        GeometryError: shape, strides, dtype or count of the arrays do not fit; names both.
        StepwellUsageError: memory on another device than the CPU, read-only where that matters is refused at load.
    """
    if isinstance(source, PoolPointers):
        return _from_pointers(geometry, shape, source)
    arrays = [_view(array) for array in _each(source)]
    if not arrays:
        raise GeometryError(f"no arrays were given for {geometry.layers} layers of {geometry.streams} streams")
    if geometry.is_opaque:
        return _lend_opaque(geometry, shape, arrays, source)
    views = list(_streams(geometry, arrays, axes))
    slots = views[0].shape[0]
    streams = geometry.streams
    for number, view in enumerate(views):
        layer, stream = divmod(number, streams)
        heads, dim = geometry.head_dims[layer]
        want = (slots, geometry.page_tokens, heads, dim)
        if view.shape != want:
            raise GeometryError(
                f"layer {layer} stream {stream}: the pool's [slot, token, head, dim] is {list(view.shape)}, "
                f"the geometry's is {list(want)}"
            )
        if view.dtype.itemsize != geometry.itemsize:
            raise GeometryError(
                f"the pool's dtype {view.dtype} has {view.dtype.itemsize} bytes, "
                f"the geometry's {geometry.dtype} has {geometry.itemsize}"
            )
        if view.strides[3] != view.dtype.itemsize:
            raise GeometryError(f"layer {layer} stream {stream}: the values of a head are not contiguous")
    as_ints = np.array([v.strides for v in views], dtype=np.int64)
    writable = all(v.flags.writeable for v in views)
    core = _core.Pool(
        shape,
        streams,
        base=np.array([v.ctypes.data for v in views], dtype=np.uint64),
        slot_stride=np.ascontiguousarray(as_ints[:, 0]),
        outer_stride=np.ascontiguousarray(as_ints[:, 1]),
        inner_stride=np.ascontiguousarray(as_ints[:, 2]),
        outer_count=np.array([v.shape[1] for v in views], dtype=np.uint32),
        inner_count=np.array([v.shape[2] for v in views], dtype=np.uint32),
        piece_bytes=np.array([v.shape[3] * v.dtype.itemsize for v in views], dtype=np.uint64),
        slots=slots,
        writable=writable,
    )
    return LentPool(core, (source, arrays), slots, fingerprint=shape.fingerprint, writable=writable)


def _view(array: PoolArray) -> npt.NDArray[np.generic]:
    """Return a numpy view of an array without copying."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, memoryview):
        return np.asarray(array)
    try:
        device = array.__dlpack_device__()
    except AttributeError as error:
        raise StepwellUsageError(
            f"cannot lend a {type(array).__name__}: give numpy, a DLPack array, a memoryview or PoolPointers"
        ) from error
    if device[0] != 1:
        raise StepwellUsageError(
            f"cannot lend memory of device type {device[0]}: only the CPU's; use a managed device tier for the rest"
        )
    return np.from_dlpack(array)  # type: ignore[arg-type]


def _streams(
    geometry: PageGeometry, arrays: list[npt.NDArray[np.generic]], axes: str | None
) -> Iterator[npt.NDArray[np.generic]]:
    """Yield one [slot, token, head, dim] view per layer and stream, layer-major."""
    names = tuple(axes.split()) if axes is not None else _default_axes(geometry, arrays)
    if sorted(names) != sorted(set(names)) or not set(_INNER_AXES) <= set(names) <= {*_INNER_AXES, *_OUTER_AXES}:
        raise GeometryError(
            f"axes {axes!r}: need slot, token, head and dim once, and at most layer and stream beside them"
        )
    missing = [name for name in _OUTER_AXES if name not in names]
    sizes = {"layer": geometry.layers, "stream": geometry.streams}
    expected = int(np.prod([sizes[name] for name in missing], dtype=np.int64)) if missing else 1
    if len(arrays) != expected:
        raise GeometryError(
            f"{len(arrays)} arrays with axes {' '.join(names)!r}, but the geometry has {geometry.layers} layers and "
            f"{geometry.streams} streams: that takes {expected}"
        )
    order = [names.index(name) for name in (*[n for n in _OUTER_AXES if n in names], *_INNER_AXES)]
    present = [name for name in _OUTER_AXES if name in names]
    for array in arrays:
        if array.ndim != len(names):
            raise GeometryError(f"an array of {array.ndim} axes was given for axes {' '.join(names)!r}")
    turned = [array.transpose(order) for array in arrays]
    for array in turned:
        for position, name in enumerate(present):
            if array.shape[position] != sizes[name]:
                raise GeometryError(f"axis {name} has {array.shape[position]}, the geometry has {sizes[name]}")
    for layer in range(geometry.layers):
        for stream in range(geometry.streams):
            at = {"layer": layer, "stream": stream}
            number = 0
            for name in missing:
                number = number * sizes[name] + at[name]
            yield turned[number][tuple(at[name] for name in present)]


def _default_axes(geometry: PageGeometry, arrays: list[npt.NDArray[np.generic]]) -> tuple[str, ...]:
    if len(arrays) == 1 and arrays[0].ndim == 6:
        return (*_OUTER_AXES, *_INNER_AXES)
    if len(arrays) == geometry.streams and arrays[0].ndim == 5:
        return ("layer", *_INNER_AXES)
    if len(arrays) == geometry.layers and arrays[0].ndim == 5:
        return ("stream", *_INNER_AXES)
    if arrays[0].ndim == 4:
        return _INNER_AXES
    raise GeometryError(
        f"cannot tell the axes of {len(arrays)} arrays of shape {list(arrays[0].shape)}; "
        "name them, e.g. axes='layer slot token head dim'"
    )


def _lend_opaque(
    geometry: PageGeometry, shape: _core.PageShape, arrays: list[npt.NDArray[np.generic]], source: object
) -> LentPool:
    if len(arrays) != 1 or arrays[0].ndim != 2:
        raise GeometryError(f"an opaque pool is one array [slot, byte], got {len(arrays)} arrays")
    array = arrays[0]
    row = array.shape[1] * array.dtype.itemsize
    if row != geometry.page_bytes or array.strides[1] != array.dtype.itemsize:
        raise GeometryError(
            f"a row of the pool is {row} bytes{'' if row != geometry.page_bytes else ', not contiguous'}, "
            f"the geometry's page is {geometry.page_bytes} contiguous bytes"
        )
    return lend_canonical(shape, array, owner=source)


def _from_pointers(geometry: PageGeometry, shape: _core.PageShape, given: PoolPointers) -> LentPool:
    if geometry.is_opaque:
        raise GeometryError(
            "PoolPointers describe [token, head, dim] pages; lend an opaque pool as one array [slot, byte]"
        )
    count = geometry.layers * geometry.streams
    base = np.ascontiguousarray(given.base, dtype=np.uint64)
    if base.shape != (count,):
        raise GeometryError(
            f"{base.size} addresses, but {geometry.layers} layers of {geometry.streams} streams take {count}"
        )
    heads = np.array([geometry.head_dims[i // geometry.streams] for i in range(count)], dtype=np.uint64)

    def spread(value: int | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype=np.int64), (count,)))

    core = _core.Pool(
        shape,
        geometry.streams,
        base=base,
        slot_stride=spread(given.slot_stride),
        outer_stride=spread(given.token_stride),
        inner_stride=spread(given.head_stride),
        outer_count=np.full(count, geometry.page_tokens, dtype=np.uint32),
        inner_count=np.ascontiguousarray(heads[:, 0].astype(np.uint32)),
        piece_bytes=np.ascontiguousarray(heads[:, 1] * np.uint64(geometry.itemsize)),
        slots=given.slots,
        writable=given.writable,
    )
    return LentPool(core, given.owner, given.slots, fingerprint=shape.fingerprint, writable=given.writable)


def lend_canonical(
    shape: _core.PageShape, rows: npt.NDArray[np.generic], *, owner: object = None
) -> LentPool:
    """Describe rows of canonical page bytes, [n, ...] with page_bytes contiguous bytes a row, as a pool."""
    writable = bool(rows.flags.writeable)
    sizes = np.array(shape.layer_bytes, dtype=np.uint64)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    zeros = np.zeros(sizes.size, dtype=np.int64)
    ones = np.ones(sizes.size, dtype=np.uint32)
    core = _core.Pool(
        shape,
        1,
        base=np.uint64(rows.ctypes.data) + offsets,
        slot_stride=np.full(sizes.size, rows.strides[0], dtype=np.int64),
        outer_stride=zeros,
        inner_stride=zeros,
        outer_count=ones,
        inner_count=ones,
        piece_bytes=sizes,
        slots=rows.shape[0],
        writable=writable,
    )
    return LentPool(core, (rows, owner), rows.shape[0], fingerprint=shape.fingerprint, writable=writable)
