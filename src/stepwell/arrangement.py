"""Say how the device's KV pool is cut into arrays, and in which order the axes of each one lie.

    axes                              arrays of the tuple                     engines that keep their pool so
    layer slot token head dim         one a stream: (keys, values)            a scan over stacked layers
    stream slot token head dim        one a layer                             a loop over a list of layers
    slot token head stream dim        one a layer, a head's V beside its K    vLLM on TPU, in bfloat16
    head slot token dim               one a layer and stream (k0, v0, k1, ...)  MaxText
    layer stream slot token head dim  one                                     -

The rule is that of `store.lend`: what is not named of layer and stream is what the arrays of the
tuple stand for, layer by layer. The bytes of a page are the same for all of them: what one
engine has stored another one finds, whatever arrays it keeps.

Source of the shapes in use: vllm-project/tpu-inference ragged_paged_attention/v3/kernel.py,
[pages, page, 2 * heads / packing, packing, dim] with packing 2 for bfloat16; MaxText
inference/paged_attention.py, [heads, pages, page, dim] for keys and for values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepwell.errors import GeometryError
from stepwell.geometry import HeadDims, PageGeometry

STACKED: Final = "layer slot token head dim"
"""The default: layers stacked, one array a stream."""

_NEEDED: Final = ("slot", "token", "head", "dim")
_CHOSEN: Final = ("layer", "stream")


@dataclass(frozen=True, slots=True)
class Part:
    """Say which layer and which stream one array holds; None where it holds all of them, as an axis."""

    layer: int | None
    stream: int | None

    def __str__(self) -> str:
        named = (("layer", self.layer), ("stream", self.stream))
        return " ".join(f"{name} {number}" for name, number in named if number is not None) or "all layers"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Describe the arrays of a pool but for its number of slots.

    Invariant: `axes` names slot, token, head and dim once, layer and stream at most once; it names
    layer only where all of `head_dims`, (kv_heads, head_dim) by layer, are equal.
    """

    axes: tuple[str, ...]
    head_dims: HeadDims
    streams: int
    page_tokens: int

    @classmethod
    def of(cls, geometry: PageGeometry, axes: str) -> Arrangement:
        """Check axes against a geometry.

        Raises: GeometryError where they are no such axes, or the geometry's pages cannot lie so.
        """
        names = tuple(axes.split()) if isinstance(axes, str) else ()
        known = {*_NEEDED, *_CHOSEN}
        if len(set(names)) != len(names) or not set(_NEEDED) <= set(names) <= known:
            raise GeometryError(
                f"device: axes {axes!r} do not name slot, token, head and dim once, and at most layer and stream "
                f"beside them; give e.g. {STACKED!r}, or 'stream slot token head dim' for one array a layer"
            )
        if geometry.is_opaque:
            raise GeometryError("device: opaque pages have no layers of heads to lay out in arrays of a device")
        if "layer" in names and len(set(geometry.head_dims)) != 1:
            raise GeometryError(
                f"device: axes {axes!r} stack layers that are not all alike, (kv_heads, head_dim) by layer are "
                f"{geometry.head_dims}; leave layer out for one array a layer, e.g. 'stream slot token head dim'"
            )
        return cls(names, geometry.head_dims, geometry.streams, geometry.page_tokens)

    @property
    def is_even(self) -> bool:
        """Return whether all layers are alike."""
        return len(set(self.head_dims)) == 1

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return what each array holds, in the order of the tuple."""
        layers = (None,) if "layer" in self.axes else range(len(self.head_dims))
        streams = (None,) if "stream" in self.axes else range(self.streams)
        return tuple(Part(layer, stream) for layer in layers for stream in streams)

    @property
    def canonical_axes(self) -> tuple[str, ...]:
        """Return the axes of one array in the order in which lower tiers keep pages, slot first."""
        return ("slot", *(name for name in _CHOSEN if name in self.axes), "token", "head", "dim")

    def shapes(self, slots: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each array of a pool of so many slots, the hidden one included."""
        shapes = []
        for part in self.parts:
            heads, dim = self.head_dims[part.layer or 0]
            sizes = {
                "layer": len(self.head_dims), "stream": self.streams,
                "slot": slots, "token": self.page_tokens, "head": heads, "dim": dim,
            }  # fmt: skip
            shapes.append(tuple(sizes[name] for name in self.axes))
        return tuple(shapes)
