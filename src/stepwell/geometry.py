"""Say what the bytes of a page are: its layers, their sizes, and a fingerprint of all of it.

The canonical order of a page is (layer, stream, token, head, dim), whatever the layout of the pool
it came from. Two pages are interchangeable only if their fingerprints are equal. A geometry is
declared, never guessed from a shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from stepwell.errors import GeometryError

__all__ = ["OPAQUE_PIECE_BYTES", "PageGeometry"]

ITEMSIZES: Final[Mapping[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

OPAQUE_PIECE_BYTES: Final = 64 * 1024
"""The layers of an opaque page are pieces of this size, the last one shorter (FORMAT.md 2.3)."""

FINGERPRINT_FORMAT: Final = 1
"""Grows with any change to the encoding below: old volumes are then of another fingerprint."""

MAX_PAGE_BYTES: Final = 2**32 - 1  # a record holds the length of a page as u32 (FORMAT.md 2.2)
MAX_LAYERS: Final = 2**16  # FORMAT.md 2.1
MAX_COUNT: Final = 2**20  # heads, dims, tokens, ranks: beyond it, someone mixed up arguments
MAX_TEXT_BYTES: Final = 4096

Extra = tuple[tuple[str, str | int], ...]
HeadDims = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGeometry:
    """Describe the bytes of a page of `page_tokens` tokens.

    Invariant: a geometry that exists is valid; its `layer_bytes` are positive and sum to
    `page_bytes`, which is below 4 GiB.

    Args:
        model: Name of the model whose KV this is.
        revision: Revision of its weights, as stable as the name of a commit.
        layers: Number of layers (of an opaque page: of its pieces).
        kv_heads: KV heads a layer of this shard holds.
        head_dim: Elements of a head.
        dtype: Logical name, a key of `ITEMSIZES`: fp8_e4m3 is not fp8_e5m2.
        page_tokens: Tokens of a page.
        streams: 2 for keys and values, 1 where both are one (MLA).
        shard: (rank, ranks) of the tensor-parallel split that this page holds.
        layer_head_dims: Per layer (kv_heads, head_dim), for models whose layers differ; else None.
        extra: Whatever else decides the bytes: sorted (name, value) pairs, e.g. (("rope", "x4"),).
        opaque_bytes: Size of a page of rows of bytes; 0 for a page of layers. Use `opaque()`.

    Raises:
        GeometryError: A field of a wrong type or out of range; the message names field and value.
    """

    model: str
    revision: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_tokens: int
    streams: int = 2
    shard: tuple[int, int] = (0, 1)
    layer_head_dims: HeadDims | None = None
    extra: Extra = ()
    opaque_bytes: int = 0

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        _check_text("revision", self.revision)
        _check_count("layers", self.layers, MAX_LAYERS)
        _check_count("kv_heads", self.kv_heads)
        _check_count("head_dim", self.head_dim)
        _check_count("page_tokens", self.page_tokens)
        _check_count("streams", self.streams, 2)
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZES:
            known = ", ".join(ITEMSIZES)
            raise GeometryError(f"dtype {self.dtype!r} is unknown: use one of {known}")
        _check_shard(self.shard)
        _check_layer_head_dims(self.layer_head_dims, self.layers)
        _check_extra(self.extra)
        if not _is_int(self.opaque_bytes) or not 0 <= self.opaque_bytes <= MAX_PAGE_BYTES:
            raise GeometryError(f"opaque_bytes is {self.opaque_bytes!r}: use PageGeometry.opaque()")
        if self.is_opaque and self.layers != len(self.layer_bytes):
            raise GeometryError(
                f"layers is {self.layers}, but an opaque page of {self.opaque_bytes} bytes has "
                f"{len(self.layer_bytes)} pieces: use PageGeometry.opaque()"
            )
        if self.page_bytes > MAX_PAGE_BYTES:
            raise GeometryError(
                f"a page has {self.page_bytes} bytes, at most {MAX_PAGE_BYTES} fit: "
                f"lower page_tokens (now {self.page_tokens})"
            )

    @classmethod
    def opaque(
        cls, page_bytes: int, *, page_tokens: int, fingerprint: Mapping[str, str | int]
    ) -> PageGeometry:
        """Describe a page that an engine lends as bytes, in an order of its own.

        Args:
            page_bytes: Size of a page.
            page_tokens: Tokens of a page.
            fingerprint: Everything that decides what the bytes mean (model, revision, dtype,
                layout, shard, how keys are made). What is left out here can be mixed up.

        Returns:
            A geometry whose layers are pieces of 64 KiB, the last one shorter.

        Raises:
            GeometryError: A size out of range, or an empty fingerprint.
        """
        _check_count("page_bytes", page_bytes, MAX_PAGE_BYTES)
        if not isinstance(fingerprint, Mapping) or not fingerprint:
            raise GeometryError(
                f"fingerprint {fingerprint!r} is not a mapping with at least one entry: "
                "name what decides the meaning of the bytes"
            )
        for name in fingerprint:
            _check_text("a name in fingerprint", name)  # before they are sorted
        return cls(
            model="opaque",
            revision="opaque",
            layers=-(-page_bytes // OPAQUE_PIECE_BYTES),
            kv_heads=1,
            head_dim=1,
            dtype="uint8",
            page_tokens=page_tokens,
            streams=1,
            extra=tuple(sorted(fingerprint.items())),
            opaque_bytes=page_bytes,
        )

    @property
    def is_opaque(self) -> bool:
        """Tell whether a page is rows of bytes rather than layers of heads."""
        return self.opaque_bytes > 0

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def head_dims(self) -> HeadDims:
        """Return (kv_heads, head_dim) of every layer."""
        return self.layer_head_dims or ((self.kv_heads, self.head_dim),) * self.layers

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Return the size of each layer in canonical order."""
        if self.is_opaque:
            full, rest = divmod(self.opaque_bytes, OPAQUE_PIECE_BYTES)
            return (OPAQUE_PIECE_BYTES,) * full + ((rest,) if rest else ())
        unit = self.streams * self.page_tokens * self.itemsize
        return tuple(unit * heads * dim for heads, dim in self.head_dims)

    @property
    def page_bytes(self) -> int:
        """Return the size of a page."""
        return self.opaque_bytes or sum(self.layer_bytes)

    def fingerprint(self) -> bytes:
        """Return 32 bytes that differ wherever two geometries differ in any field.

        SHA-256 of: the name of the encoding, its version, then each field by name and value, in
        order of declaration. Every value is a tag byte, its length as u64 little-endian and its
        bytes; a tuple holds its values in turn. So no two geometries have the same encoding.
        """
        encoded = bytearray(b"stepwell geometry\x00")
        _encode(encoded, FINGERPRINT_FORMAT)
        for field in fields(self):
            _encode(encoded, field.name)
            _encode(encoded, getattr(self, field.name))
        return hashlib.sha256(encoded).digest()


def _encode(out: bytearray, value: object) -> None:
    """Append one tagged, length-prefixed value."""
    if value is None:
        tag, body = b"n", b""
    elif isinstance(value, str):
        tag, body = b"s", value.encode()
    elif isinstance(value, int):
        tag, body = b"i", str(value).encode()
    elif isinstance(value, tuple):
        inner = bytearray()
        for item in value:
            _encode(inner, item)
        tag, body = b"t", bytes(inner)
    else:
        raise TypeError(f"cannot encode {value!r}")
    out += tag + len(body).to_bytes(8, "little") + body


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: object, most: int = MAX_COUNT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise GeometryError(f"{name} is {value!r}: give an int from 1 to {most}")


def _check_text(name: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, str):
        raise GeometryError(f"{name} is {value!r}: give a text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise GeometryError(f"{name} is {value!r}: not valid Unicode ({error.reason})") from error
    if not least <= size <= MAX_TEXT_BYTES:
        raise GeometryError(f"{name} has {size} bytes: give {least} to {MAX_TEXT_BYTES}")


def _check_shard(shard: object) -> None:
    if isinstance(shard, tuple) and len(shard) == 2 and all(map(_is_int, shard)):
        rank, ranks = shard
        if 0 <= rank < ranks <= MAX_COUNT:
            return
    raise GeometryError(f"shard is {shard!r}: give a tuple (rank, ranks) with 0 <= rank < ranks")


def _check_layer_head_dims(dims: object, layers: int) -> None:
    if dims is None:
        return
    if not isinstance(dims, tuple) or len(dims) != layers:
        raise GeometryError(
            f"layer_head_dims is {dims!r}: give a tuple of {layers} pairs (kv_heads, head_dim), "
            "one a layer"
        )
    for layer, pair in enumerate(dims):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise GeometryError(
                f"layer_head_dims[{layer}] is {pair!r}: give a tuple (kv_heads, head_dim)"
            )
        _check_count(f"layer_head_dims[{layer}][0]", pair[0])
        _check_count(f"layer_head_dims[{layer}][1]", pair[1])


def _check_extra(extra: object) -> None:
    if not isinstance(extra, tuple):
        raise GeometryError(f"extra is {extra!r}: give a tuple of (name, value) pairs")
    names = []
    for pair in extra:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise GeometryError(f"extra holds {pair!r}: give (name, value) pairs")
        name, value = pair
        _check_text("a name in extra", name)
        if isinstance(value, str):
            _check_text(f"extra[{name!r}]", value, least=0)
        elif not _is_int(value):
            raise GeometryError(f"extra[{name!r}] is {value!r}: give a text or an int")
        names.append(name)
    if names != sorted(set(names)):
        raise GeometryError(f"extra names {names!r} are not sorted and unique")
