"""What the tests of device pools share: pages as bytes, cut into the arrays of a pool by numpy alone, and an engine's
programs on such arrays. Whether the pool cuts them so too is what the tests ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np
import numpy.typing as npt

from stepwell.geometry import PageGeometry

STACKED = "layer slot token head dim"
PER_LAYER = "stream slot token head dim"
ARRANGEMENTS = (
    STACKED,
    PER_LAYER,
    "slot token head stream dim",
    "head slot token dim",
    "layer stream slot token head dim",
    "token dim layer head slot",
)
BY_LAYER = tuple(axes for axes in ARRANGEMENTS if "layer" not in axes)

Pages = npt.NDArray[np.uint8]
Array = npt.NDArray[np.generic]
Arrays = tuple[jax.Array, ...]


def views(geometry: PageGeometry, axes: str, arrays: Sequence[Array]) -> Iterator[Array]:
    """Yield where each layer and stream lies in a pool's arrays: views [slot, token, head, dim], canonical order."""
    names = axes.split()
    for layer in range(geometry.layers):
        for stream in range(geometry.streams):
            number = 0 if "layer" in names else layer
            if "stream" not in names:
                number = number * geometry.streams + stream
            chosen = {"layer": layer, "stream": stream}
            view = arrays[number][tuple(chosen.get(name, slice(None)) for name in names)]
            left = [name for name in names if name not in chosen]
            yield view.transpose([left.index(name) for name in ("slot", "token", "head", "dim")])


def cut(geometry: PageGeometry, axes: str, pages: Pages, dtype: npt.DTypeLike) -> tuple[Array, ...]:
    """Return what the arrays of a pool hold of canonical pages, uint8[n, page_bytes]: the pages are its slots."""
    names = axes.split()
    sizes = {"layer": geometry.layers, "stream": geometry.streams, "slot": len(pages), "token": geometry.page_tokens}
    arrays = []
    for heads, dim in geometry.head_dims if "layer" not in names else geometry.head_dims[:1]:
        shape = [(sizes | {"head": heads, "dim": dim})[name] for name in names]
        arrays += [np.zeros(shape, dtype) for _ in range(1 if "stream" in names else geometry.streams)]
    first = 0
    for view in views(geometry, axes, arrays):
        nbytes = view[0].size * view.itemsize
        view[:] = pages[:, first : first + nbytes].copy().view(dtype).reshape(view.shape)
        first += nbytes
    assert first == geometry.page_bytes
    return tuple(arrays)


def join(geometry: PageGeometry, axes: str, arrays: Sequence[Array]) -> Pages:
    """Return the canonical pages that the arrays of a pool hold, one a slot: cut(), undone."""
    parts = [np.ascontiguousarray(view).reshape(len(view), -1) for view in views(geometry, axes, arrays)]
    return np.concatenate(parts, axis=1).view(np.uint8)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def write_slots(arrays: Arrays, slots: jax.Array, pieces: Sequence[jax.Array], slot_axis: int) -> Arrays:
    """Donate the pool and write what cut() gives into some slots, as an engine's step does."""
    where = (*(slice(None),) * slot_axis, slots)
    return tuple(array.at[where].set(piece) for array, piece in zip(arrays, pieces, strict=True))


@partial(jax.jit, static_argnums=2)
def read_slots(arrays: Arrays, slots: jax.Array, slot_axis: int) -> Arrays:
    """Read some slots into arrays of their own, for join()."""
    where = (*(slice(None),) * slot_axis, slots)
    return tuple(array[where] for array in arrays)
