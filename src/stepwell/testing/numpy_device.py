"""Be a device pool of plain numpy arrays: the queue, steps and losses of the JAX pool without a compiler or a thread.

    engine:  with store.device.step() as handle:
                 handle.arrays = pool.write(handle.arrays, slots, pages)     donated: the old arrays are deleted

What is done at once here, and later with JAX: a gather's result is computed at its dispatch (and copied: what is
written afterwards does not change it). `refused` and `broken` are faults to inject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.arrangement import STACKED, Part
from stepwell.errors import GeometryError, StalePoolError
from stepwell.geometry import PageGeometry
from stepwell.tiers.device_pool import DEFAULT_BUCKETS, DEFAULT_OUTSTANDING_BYTES, DEFAULT_STEP_BYTES, LinearPool
from stepwell.tiers.device_queue import Readiness, Result, ScatterTicket, TicketState

Values = npt.NDArray[np.generic]
Pages = npt.NDArray[np.uint8]

_STORAGE: Final[dict[int, np.dtype[np.generic]]] = {
    size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)
}


class NumpyArray:
    """Hold values until they are donated: then every use raises, as that of a donated jax.Array does."""

    __slots__ = ("_values",)

    def __init__(self, values: Values) -> None:
        self._values: Values | None = values

    @property
    def values(self) -> Values:
        """The values, to be read.

        Raises: StalePoolError after donate().
        """
        if self._values is None:
            raise StalePoolError("this array was donated: use what the donation returned")
        return self._values

    def is_deleted(self) -> bool:
        """Return whether the array was donated."""
        return self._values is None

    def donate(self) -> NumpyArray:
        """Give the memory to another array, and be deleted.

        Raises: StalePoolError where it was donated before.
        """
        fresh = NumpyArray(self.values)
        self._values = None
        return fresh


NumpyArrays = tuple[NumpyArray, ...]


class NumpyResult:
    """Hold what a gather read. is_broken: its computation failed, and whoever waits for it is told."""

    __slots__ = ("_is_broken", "_pages")

    def __init__(self, pages: Values, *, is_broken: bool) -> None:
        self._pages = pages
        self._is_broken = is_broken

    def is_ready(self) -> bool:
        """Return at once whether it has been computed."""
        return True

    def block_until_ready(self) -> object:
        """Raise RuntimeError where its computation failed."""
        if self._is_broken:
            raise RuntimeError("the computation of a gather failed")
        return self

    def __array__(self) -> Values:
        return self._pages


class NumpyPool(LinearPool[NumpyArray]):
    """Be a pool of numpy arrays. Invariant, requirements and threads: LinearPool.

    refused: gathers that have no memory on the device; each is refused when it is dispatched, and the number falls.
    broken: gathers whose computation fails, which shows when they are waited for.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        pages: int,
        *,
        axes: str = STACKED,
        arrays: Sequence[NumpyArray] | None = None,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        max_step_bytes: int = DEFAULT_STEP_BYTES,
        max_outstanding_bytes: int = DEFAULT_OUTSTANDING_BYTES,
        readiness: Readiness | None = None,
    ) -> None:
        """Allocate the arrays, or take the engine's. Args, Raises: as LinearPool."""
        self.refused = 0
        self.broken = 0
        if geometry.itemsize not in _STORAGE:
            raise GeometryError(f"a numpy pool has no dtype of {geometry.itemsize} bytes for {geometry.dtype}")
        super().__init__(
            geometry,
            pages,
            storage_dtype=_STORAGE[geometry.itemsize],
            axes=axes,
            arrays=arrays,
            buckets=buckets,
            max_step_bytes=max_step_bytes,
            max_outstanding_bytes=max_outstanding_bytes,
            readiness=readiness,
        )

    # ---- an engine -----------------------------------------------------------------------------------------------

    def write(self, arrays: NumpyArrays, slots: Sequence[int], pages: Pages) -> NumpyArrays:
        """Donate the arrays and write canonical pages, uint8[n, page_bytes], into slots, as an engine's step does."""
        rows = pages.view(self.storage_dtype).reshape(len(slots), *self._row_shape)
        return self._write(arrays, np.asarray(slots), rows)

    def read(self, arrays: NumpyArrays, slots: Sequence[int]) -> Pages:
        """Read slots as canonical pages, uint8[n, page_bytes]; a copy."""
        return self._read(arrays, np.asarray(slots)).reshape(len(slots), -1).view(np.uint8)

    def peek(self, slots: Sequence[int]) -> Pages:
        """Read slots outside of any step: for who looks on, not for an engine. Requires: the pool is not reset."""
        assert self._arrays is not None, "a pool between two steps has its arrays"
        return self.read(self._arrays, slots)

    def awaited_slots(self) -> set[int]:
        """Return the slots that queued scatters are going to write, for who looks on."""
        return {
            slot
            for chunk in self._queue._chunks
            if isinstance(chunk.ticket, ScatterTicket) and chunk.ticket.state is TicketState.QUEUED
            for slot in chunk.slots[: chunk.count].tolist()
        }

    # ---- what LinearPool asks ------------------------------------------------------------------------------------

    def _programs(self) -> tuple[Callable[..., NumpyArrays], Callable[..., Result]]:
        # For each array: how its axes come into canonical order, slot first, and which part of a row it holds.
        order = tuple(self.arrangement.axes.index(name) for name in self.arrangement.canonical_axes)
        self._order = order
        self._places = [self._place(part) for part in self.arrangement.parts]
        return self._write, self._gather_pages

    def _place(self, part: Part) -> tuple[tuple[int | slice, ...], tuple[int, ...]]:
        """Say where in rows, [n, *_row_shape], an array's values are, and in which shape, the axis of slots left out.

        Rows of layers that are alike are indexed by layer and stream; others are flat, and cut.
        """
        layers, streams = self.arrangement.head_dims, self.arrangement.streams
        stream = slice(None) if part.stream is None else part.stream
        heads, dim = layers[part.layer or 0]
        tokens = self.arrangement.page_tokens
        if self.arrangement.is_even:
            layer = slice(None) if part.layer is None else part.layer
            shape = ((len(layers),) if part.layer is None else ()) + ((streams,) if part.stream is None else ())
            return (slice(None), layer, stream), (*shape, tokens, heads, dim)
        assert part.layer is not None, "Arrangement.of(): layers that differ are not stacked"
        sizes = [tokens * each_heads * each_dim for each_heads, each_dim in layers]
        first = streams * sum(sizes[: part.layer]) + (part.stream or 0) * sizes[part.layer]
        count = sizes[part.layer] * (streams if part.stream is None else 1)
        shape = (streams,) if part.stream is None else ()
        return (slice(None), slice(first, first + count)), (*shape, tokens, heads, dim)

    def _write(self, arrays: NumpyArrays, slots: npt.NDArray[np.integer], rows: Values) -> NumpyArrays:
        donated = tuple([array.donate() for array in arrays])
        for array, (place, shape) in zip(donated, self._places, strict=True):
            pages = array.values.transpose(self._order)
            pages[slots] = rows[place].reshape(len(slots), *shape)
        return donated

    def _read(self, arrays: NumpyArrays, slots: npt.NDArray[np.integer]) -> Values:
        rows = np.empty((len(slots), *self._row_shape), self.storage_dtype)
        for array, (place, _) in zip(arrays, self._places, strict=True):
            target = rows[place]
            target[:] = array.values.transpose(self._order)[slots].reshape(target.shape)
        return rows

    def _gather_pages(self, arrays: NumpyArrays, slots: npt.NDArray[np.integer]) -> NumpyResult:
        if self.refused:
            self.refused -= 1
            raise RuntimeError("no device memory for the result of a gather")
        is_broken = self.broken > 0
        self.broken -= is_broken
        pages = self._read(arrays, slots)
        pages.flags.writeable = False
        return NumpyResult(pages, is_broken=is_broken)

    def _zeros(self) -> NumpyArrays:
        return tuple(NumpyArray(np.zeros(shape, self.storage_dtype)) for shape in self.shapes)

    def _put(self, rows: Values) -> Values:
        return rows

    def _is_deleted(self, array: NumpyArray) -> bool:
        return array.is_deleted()

    def _misfit(self, array: object, part: Part, shape: tuple[int, ...]) -> str | None:
        if not isinstance(array, NumpyArray):
            return f"{part} is a {type(array).__name__}, not an array on a device"
        if array.is_deleted():
            return f"the array of {part} is deleted: donated, and not exchanged"
        values = array.values
        if values.shape != shape or values.dtype != self.storage_dtype:
            return f"{part} is {values.dtype}{list(values.shape)}, the pool is {self.storage_dtype}{list(shape)}"
        return None
