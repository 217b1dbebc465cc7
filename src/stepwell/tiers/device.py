"""Hold the device tier's arrays in JAX: two jitted programs, and what JAX may and may not do with memory.

The pool is `tiers/device_pool.py`; here is what is peculiar to JAX.

The copy of host rows is needed: on CPU jit and device_put alias 64-byte-aligned numpy memory, even
with may_alias=False (measured), so a row repainted after dispatch would change what lands. The
canonical order of a gather's result was also the fastest one measured (64 pages of 32 KiB: 0.2 ms, in
the pool's own order 0.3 ms).

On CPU the pool keeps floats narrower than 32 bits as unsigned integers, because XLA upcasts the
whole pool for one bf16 scatter (one 16 KiB page in a pool of 16,384: 160 ms, as uint16 0.03 ms).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepwell.arrangement import STACKED, Arrangement, Part
from stepwell.errors import GeometryError
from stepwell.geometry import PageGeometry
from stepwell.tiers.device_pool import (
    DEFAULT_BUCKETS,
    DEFAULT_OUTSTANDING_BYTES,
    DEFAULT_STEP_BYTES,
    LinearPool,
    StepHandle,
)
from stepwell.tiers.device_queue import Readiness, Result

Arrays = tuple[jax.Array, ...]
Handle = StepHandle[jax.Array]

# Names of a PageGeometry that JAX spells differently.
_DTYPE_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_NARROW_STORAGE: dict[int, np.dtype[np.generic]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


def logical_dtype(name: str) -> np.dtype[np.generic]:
    """Return the dtype a geometry names. Raises GeometryError for a name JAX does not know."""
    try:
        return np.dtype(jnp.dtype(_DTYPE_NAMES.get(name, name)))
    except TypeError as cause:
        raise GeometryError(f"JAX has no dtype {name!r}") from cause


def storage_dtype(logical: np.dtype[np.generic], *, platform: str) -> np.dtype[np.generic]:
    """Return the dtype the pool keeps: on CPU an unsigned integer for narrow floats."""
    if platform == "cpu" and jnp.issubdtype(logical, jnp.floating):
        return _NARROW_STORAGE.get(logical.itemsize, logical)
    return logical


class DevicePool(LinearPool[jax.Array]):
    """Be a pool of JAX arrays. Invariant, requirements and threads: LinearPool."""

    def __init__(
        self,
        geometry: PageGeometry,
        pages: int,
        *,
        axes: str = STACKED,
        arrays: Sequence[jax.Array] | None = None,
        sharding: Sharding | None = None,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        max_step_bytes: int = DEFAULT_STEP_BYTES,
        max_outstanding_bytes: int = DEFAULT_OUTSTANDING_BYTES,
        readiness: Readiness | None = None,
    ) -> None:
        """Allocate the arrays, or take the engine's.

        Args:
            sharding: of each array, slots undivided; the first device where None.
            others: as LinearPool.

        Raises: as LinearPool; GeometryError where the sharding does not fit.
        """
        self.sharding = sharding or SingleDeviceSharding(jax.devices()[0])
        self.logical_dtype = logical_dtype(geometry.dtype)
        super().__init__(
            geometry,
            pages,
            storage_dtype=storage_dtype(self.logical_dtype, platform=_platform(self.sharding)),
            axes=axes,
            arrays=arrays,
            buckets=buckets,
            max_step_bytes=max_step_bytes,
            max_outstanding_bytes=max_outstanding_bytes,
            readiness=readiness,
        )

    def as_logical(self, values: jax.Array) -> jax.Array:
        """Reinterpret stored values as logical ones, inside jit or out.

        Cost: nothing on what was read from a few slots; on a whole pool on CPU a pass over it.
        """
        if self.storage_dtype == self.logical_dtype:
            return values
        return jax.lax.bitcast_convert_type(values, self.logical_dtype)

    def as_storage(self, values: jax.Array) -> jax.Array:
        """Reinterpret logical values as the pool keeps them, inside jit or out."""
        if self.storage_dtype == self.logical_dtype:
            return values
        return jax.lax.bitcast_convert_type(values, self.storage_dtype)

    # ---- what LinearPool asks ------------------------------------------------------------------------

    def _programs(self) -> tuple[Callable[..., Arrays], Callable[..., Result]]:
        self._rows_sharding = _rows_sharding(self.sharding, self.arrangement)
        scatter, gather = _programs(self.sharding, self._rows_sharding, self.arrangement)
        return scatter, cast("Callable[..., Result]", gather)  # JAX's stubs lack is_ready

    def _zeros(self) -> Arrays:
        return tuple(
            jnp.zeros(shape, self.storage_dtype, device=self.sharding) for shape in self.shapes
        )

    def _put(self, rows: npt.NDArray[np.generic]) -> jax.Array:
        placed: jax.Array = jax.device_put(rows, self._rows_sharding)
        return placed

    def _is_deleted(self, array: jax.Array) -> bool:
        return bool(array.is_deleted())

    def _start_copy(self, result: Result) -> None:
        cast("jax.Array", result).copy_to_host_async()

    def _misfit(self, array: object, part: Part, shape: tuple[int, ...]) -> str | None:
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            return f"{part} is a {type(array).__name__}, not an array on a device"
        if array.is_deleted():
            return f"the array of {part} is deleted: donated, and not exchanged"
        if array.shape != shape or array.dtype != self.storage_dtype:
            return (
                f"{part} is {array.dtype}{list(array.shape)}, the pool is "
                f"{self.storage_dtype}{list(shape)}"
            )
        if not array.sharding.is_equivalent_to(self.sharding, array.ndim):
            return f"{part} is placed as {array.sharding}, the pool as {self.sharding}"
        return None


# ---- programs ------------------------------------------------------------------------------------


def _platform(sharding: Sharding) -> str:
    devices: frozenset[jax.Device] = frozenset(sharding.device_set)
    return str(next(iter(devices)).platform)


def _rows_sharding(sharding: Sharding, arrangement: Arrangement) -> Sharding:
    """Place rows [bucket, layer, stream, token, head, dim] as the pool's axes are placed.

    Flat rows are on every device: a part of one is no part of each layer.
    """
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    if not isinstance(sharding, NamedSharding):
        raise GeometryError(f"need a NamedSharding or SingleDeviceSharding, got {sharding}")
    if len(sharding.spec) > len(arrangement.axes):
        raise GeometryError(f"{sharding.spec} is longer than the axes {arrangement.axes}")
    divided = dict(zip(arrangement.axes, sharding.spec, strict=False))
    if divided.get("slot") is not None:
        raise GeometryError(f"slots cannot be divided among devices, got {sharding.spec}")
    names = ("layer", "stream", "token", "head", "dim") if arrangement.is_even else ()
    spec = PartitionSpec(None, *(divided.get(name) for name in names))  # type: ignore[no-untyped-call]
    return NamedSharding(sharding.mesh, spec)


@lru_cache(maxsize=16)
def _programs(
    sharding: Sharding, rows_sharding: Sharding, arrangement: Arrangement
) -> tuple[Callable[..., Arrays], Callable[..., jax.Array]]:
    """Make the two jitted programs; pools of one placement share them and their compilations.

    Each moves all arrays at once: there is one of each a bucket, however many layers there are.
    """
    slot_axis = arrangement.axes.index("slot")

    # A page at a time: XLA updates the donated arrays in place and needs no other memory. One
    # scatter of all pages transposes them first, into as much memory again (64 pages of 1 MiB on
    # CPU, stacked: 95 ms against 16 ms; 32 arrays of a layer: 40 ms against 12 ms).
    def scatter(arrays: Arrays, slots: jax.Array, rows: jax.Array) -> Arrays:
        def write(index: jax.Array, arrays: Arrays) -> Arrays:
            place = [jnp.zeros((), slots.dtype)] * len(arrangement.axes)
            place[slot_axis] = slots[index]
            page = jax.lax.dynamic_index_in_dim(rows, index, keepdims=False)
            return tuple(
                jax.lax.dynamic_update_slice(array, piece, place)
                for array, piece in zip(arrays, _pieces(page, arrangement), strict=True)
            )

        written: Arrays = jax.lax.fori_loop(0, len(slots), write, arrays)
        return written

    def gather(arrays: Arrays, slots: jax.Array) -> jax.Array:
        where = (*(slice(None),) * slot_axis, slots)
        return _rows(
            [array.at[where].get(mode="promise_in_bounds") for array in arrays], arrangement
        )

    return (
        jax.jit(scatter, donate_argnums=0, out_shardings=(sharding,) * len(arrangement.parts)),
        jax.jit(gather, out_shardings=rows_sharding),
    )


def _pieces(page: jax.Array, arrangement: Arrangement) -> list[jax.Array]:
    """Cut one canonical page into what each array holds of it, axes as the array's, one slot long."""
    canonical = arrangement.canonical_axes
    order = [canonical.index(name) for name in arrangement.axes]
    layers = [page] if "layer" in arrangement.axes else _layers(page, arrangement)
    stream_axis = 1 if "layer" in arrangement.axes else 0
    pieces = []
    for layer in layers:
        streams = [layer]
        if "stream" not in arrangement.axes:
            streams = [
                jax.lax.index_in_dim(layer, stream, stream_axis, keepdims=False)
                for stream in range(arrangement.streams)
            ]
        pieces += [jnp.transpose(stream[None], order) for stream in streams]
    return pieces


def _layers(page: jax.Array, arrangement: Arrangement) -> list[jax.Array]:
    """Cut one canonical page into its layers, [stream, token, head, dim] each."""
    if arrangement.is_even:
        return [page[layer] for layer in range(len(arrangement.head_dims))]
    layers, first = [], 0
    for heads, dim in arrangement.head_dims:
        shape = (arrangement.streams, arrangement.page_tokens, heads, dim)
        layers.append(page[first : first + math.prod(shape)].reshape(shape))
        first += math.prod(shape)
    return layers


def _rows(taken: list[jax.Array], arrangement: Arrangement) -> jax.Array:
    """Join what was taken of each array, its axes as they are, to canonical pages: _pieces, undone."""
    order = [arrangement.axes.index(name) for name in arrangement.canonical_axes]
    layers = [jnp.transpose(pages, order) for pages in taken]
    is_stacked = "layer" in arrangement.axes
    if "stream" not in arrangement.axes:
        streams = arrangement.streams
        layers = [
            jnp.stack(layers[first : first + streams], axis=2 if is_stacked else 1)
            for first in range(0, len(layers), streams)
        ]
    if is_stacked:
        return layers[0]
    if arrangement.is_even:
        return jnp.stack(layers, axis=1)
    return jnp.concatenate([layer.reshape(len(layer), -1) for layer in layers], axis=1)
