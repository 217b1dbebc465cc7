"""Describe a host pool of SGLang to stepwell: which bytes are a page, and where each page's bytes lie.

Three forms, the first that fits a pool:

    canonical   plain MHA and MLA pools, in any of their layouts: (layer, K or V, token, head, dim), whatever the
                layout, so engines whose layouts differ share pages; copied straight from and to SGLang's buffer
    pieces      every other pool that says where a page lies (get_page_buffer_meta): its pieces in its own order, copied
                straight; shared by engines with the same class and layout
    flat        a pool that can only hand out pages (get_data_page, set_from_flat_data_page): copied once more

What a pool says of itself is not believed: addresses of pages spread over the pool are compared with the description.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import stepwell as sw

Extra = tuple[tuple[str, str | int], ...]

DTYPES: Final = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
    "torch.uint8": "uint8",
}
_MOST_DIM: Final = 1 << 20  # of a PageGeometry
_NO_ADDRESSES: Final = (NotImplementedError, ValueError, AssertionError, AttributeError, TypeError)
"""What SGLang's pools raise where they cannot name addresses: of this layout, or without a buffer."""
_LOG = logging.getLogger("stepwell")


class Indices(Protocol):
    """A torch tensor of host indices, as much of it as is used here."""

    dtype: Any

    def detach(self) -> Indices:
        """Return it without what autograd knows of it."""

    def cpu(self) -> Indices:
        """Return it in host memory."""

    def numpy(self) -> npt.NDArray[np.int64]:
        """View it as an array."""


class HostPool(Protocol):
    """A host pool of SGLang 0.5.23 (mem_cache/pool_host/base.py:162), as much of it as every pool has."""

    layout: str
    page_size: int
    size: int

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]] | None:
        """Return addresses and sizes of the pieces of some pages, page after page; None: the pool has no bytes."""

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        """Return a page as a tensor."""

    def get_dummy_flat_data_page(self) -> Any:
        """Return a zeroed tensor as large as a page."""

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        """Write a page."""


@dataclass(frozen=True, slots=True)
class Whose:
    """What the engine says of the bytes, beside what the pool says: `identity.py` makes it."""

    model: str
    revision: str
    shard: tuple[int, int]
    extra: Extra


@dataclass(frozen=True, slots=True)
class PoolPages:
    """The pages of one host pool.

    geometry: of a page. pointers: where they lie, None where pages are only handed out (form flat). flat: how pages
    that SGLang hands out as flat tensors lie in rows of [n, page_bytes], given those rows. page_tokens: host indices a
    page. pages: in the pool.
    """

    form: str
    geometry: sw.PageGeometry
    pointers: sw.PoolPointers | None
    flat: Callable[[npt.NDArray[np.uint8]], sw.PoolPointers | npt.NDArray[np.uint8]]
    page_tokens: int
    pages: int

    def slots(self, indices: Indices, count: int) -> npt.NDArray[np.int64]:
        """Return which pages of the pool some host indices name: int64[count].

        Raises:
            StepwellUsageError: they are no tensor of whole numbers, or not `count` whole pages within the pool; copying
                would spoil others' bytes.
        """
        import torch

        if not isinstance(indices, torch.Tensor):
            raise sw.StepwellUsageError(f"host indices are {_kind(indices)}, not a tensor")
        rows: npt.NDArray[np.int64]
        try:
            rows = indices.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # torch: of a dtype that numpy has not, on a device without bytes
            raise sw.StepwellUsageError(f"host indices of dtype {indices.dtype} cannot be read: {error}") from error
        if rows.dtype.kind not in "iu":
            raise sw.StepwellUsageError(f"host indices are of dtype {rows.dtype}, not whole numbers")
        if rows.shape != (count * self.page_tokens,):
            raise sw.StepwellUsageError(
                f"{count} keys of pages of {self.page_tokens} tokens, but host indices of shape {list(rows.shape)}"
            )
        by_page = rows.reshape(count, self.page_tokens)
        slots = by_page[:, 0] // self.page_tokens
        if count and (
            (by_page != (slots * self.page_tokens)[:, None] + np.arange(self.page_tokens)).any()
            or int(slots.min()) < 0
            or int(slots.max()) >= self.pages
        ):
            raise sw.StepwellUsageError(f"host indices do not name whole pages of the pool's {self.pages}")
        return slots


def describe(pool: HostPool, name: str, whose: Whose, *, zero_copy: bool) -> PoolPages:
    """Say what a page of a host pool is and where each lies.

    Args:
        pool: with its buffer allocated. name: SGLang's for it ("kv", "mamba", ...), part of the fingerprint.
        zero_copy: False: SGLang hands pages of this pool out as flat tensors (the generic calls).

    Raises:
        StepwellUsageError: the pool has no bytes of its own, or its pages cannot be described: with the field and what
            it is.
    """
    _check_pool(pool, name)
    if getattr(pool, "dcp_size", 1) > 1:
        raise sw.StepwellUsageError(
            f"host pool {name}: SGLang has decode context parallelism (DCP) for its file and mooncake backends only"
        )
    canonical = _canonical(pool, name, whose)
    if canonical is not None:
        return canonical
    extra = (*_extra(pool, name, whose), ("class", type(pool).__qualname__), ("layout", str(pool.layout)))
    if zero_copy:
        try:
            pieces = _pieces(pool, name, whose, extra)
        except _NO_ADDRESSES as error:  # SGLang: not in this layout
            _LOG.info("host pool %s names no addresses (%s): its pages are copied once more", name, error)
        else:
            return pieces
    return _flat(pool, name, whose, extra)


def _check_pool(pool: Any, name: str) -> None:
    """Refuse a pool whose numbers are none, before anything is divided by them."""
    tokens = 1 if getattr(pool, "page_size", 1) is None else _number(pool, name, "page_size", default=1)
    size = _number(pool, name, "size")
    if size % tokens:
        raise sw.StepwellUsageError(f"{_pool(pool, name)}: size is {size}, no multiple of page_size {tokens}")
    if not isinstance(layout := getattr(pool, "layout", None), str) or not layout:
        raise sw.StepwellUsageError(f"{_pool(pool, name)}: layout is {layout!r}, not the name of one")


def _number(pool: Any, name: str, field: str, *, default: int | None = None) -> int:
    """Return a field of a pool that counts something there must be.

    Raises:
        StepwellUsageError: it is missing, or no whole number above 0.
    """
    value: Any = getattr(pool, field, default)
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise sw.StepwellUsageError(f"{_pool(pool, name)}: {field} is {value!r}; it must be a whole number above 0")
    return number


def _geometry(pool: object, name: str, **fields: Any) -> sw.PageGeometry:
    """Return a geometry; what it refuses is said of the pool."""
    try:
        return sw.PageGeometry(**fields)
    except sw.StepwellUsageError as error:
        raise sw.StepwellUsageError(f"{_pool(pool, name)}: {error}") from error


def _pool(pool: object, name: str) -> str:
    return f"host pool {name} ({type(pool).__qualname__})"


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


# ---- canonical -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Strides:
    """A buffer [streams][...]: byte strides of a page, a layer, a token and a head; and of a stream."""

    stream: int
    page: int
    layer: int
    token: int
    head: int

    def bases(self, start: int, layers: int, streams: int) -> npt.NDArray[np.uint64]:
        """Return the address of page 0, layer-major."""
        at = [start + layer * self.layer + stream * self.stream for layer in range(layers) for stream in range(streams)]
        return np.array(at, dtype=np.uint64)


def _strides(layout: str, *, layers: int, tokens: int, heads: int, dim: int, item: int, stream: int) -> _Strides | None:
    """Return the strides of a layout of pool_host/mha.py:333-358, mla.py:308-329; None: another layout.

    stream: bytes from K to V.
    """
    head = dim * item
    row = heads * head
    match layout:
        case "page_first":  # [token of the pool, layer, head, dim]
            return _Strides(stream, tokens * layers * row, row, layers * row, head)
        case "page_first_direct":  # [page, layer, token, head, dim]
            return _Strides(stream, tokens * layers * row, tokens * row, row, head)
        case "page_head":  # [page, head, token, layer, dim]
            return _Strides(stream, tokens * layers * row, head, layers * head, tokens * layers * head)
    return None


def _canonical(pool: Any, name: str, whose: Whose) -> PoolPages | None:
    """Describe a plain MHA or MLA pool; None: it is none, or lies otherwise than its layout says."""
    kind = f"{type(pool).__module__}.{type(pool).__qualname__}"
    if getattr(pool, "storage_format_tag", None) is not None:
        return None
    if kind.endswith(".mha.MHATokenToKVPoolHost"):
        streams, heads, dim = 2, _number(pool, name, "head_num"), _number(pool, name, "head_dim")
        if _number(pool, name, "v_head_dim", default=dim) != dim:
            return None
    elif kind.endswith(".mla.MLATokenToKVPoolHost"):
        streams, heads, dim = 1, 1, _number(pool, name, "kv_cache_dim")
    else:
        return None
    buffer: Any = getattr(pool, "kv_buffer", None)
    layers, tokens = _number(pool, name, "layer_num"), int(pool.page_size)
    if isinstance(buffer, list | tuple):  # one a layer
        return None
    if not hasattr(buffer, "data_ptr"):
        raise sw.StepwellUsageError(f"{_pool(pool, name)}: kv_buffer is {_kind(buffer)}, not a tensor")
    item = int(buffer.element_size())
    dtype = DTYPES.get(str(buffer.dtype), "uint8")
    width = dim if dtype != "uint8" else dim * item  # of an element the geometry knows
    pages = int(pool.size) // tokens
    page_of_stream = layers * tokens * heads * dim * item
    if (has := int(buffer.numel()) * item) < (needs := streams * pages * page_of_stream):
        raise sw.StepwellUsageError(
            f"{_pool(pool, name)}: kv_buffer has {has} bytes, and size {pool.size} with layer_num {layers}, {heads} "
            f"heads of {dim} and {item} bytes a number makes {needs}"
        )
    in_pool = _strides(
        pool.layout, layers=layers, tokens=tokens, heads=heads, dim=dim, item=item, stream=pages * page_of_stream
    )
    flat = _strides(pool.layout, layers=layers, tokens=tokens, heads=heads, dim=dim, item=item, stream=page_of_stream)
    row = heads * dim * item
    if pool.layout == "layer_first":  # [layer, token of the pool, head, dim]
        in_pool = _Strides(pages * page_of_stream, tokens * row, pages * tokens * row, row, dim * item)
        flat = _Strides(page_of_stream, streams * page_of_stream, tokens * row, row, dim * item)
    if in_pool is None or flat is None:
        return None
    geometry = _geometry(
        pool,
        name,
        model=whose.model,
        revision=whose.revision,
        layers=layers,
        kv_heads=heads,
        head_dim=width,
        dtype=dtype,
        page_tokens=tokens,
        streams=streams,
        shard=whose.shard,
        extra=_sorted((*_extra(pool, name, whose), ("form", "canonical"))),
    )

    def pointers(start: int, strides: _Strides, slots: int, page: int, owner: object) -> sw.PoolPointers:
        return sw.PoolPointers(
            base=strides.bases(start, layers, streams),
            slot_stride=page,
            token_stride=strides.token,
            head_stride=strides.head,
            slots=slots,
            owner=owner,
        )

    lent = pointers(int(buffer.data_ptr()), in_pool, pages, in_pool.page, buffer)
    if not _agrees(pool, geometry, lent, pages):
        _LOG.warning("host pool %s (%s) lies otherwise than %s: its pages keep its own order", name, kind, pool.layout)
        return None

    def in_rows(rows: npt.NDArray[np.uint8]) -> sw.PoolPointers:
        return pointers(rows.ctypes.data, flat, rows.shape[0], rows.strides[0], rows)

    return PoolPages("canonical", geometry, lent, in_rows, tokens, pages)


def _agrees(pool: HostPool, geometry: sw.PageGeometry, lent: sw.PoolPointers, pages: int) -> bool:
    """Whether the bytes of some pages are those that SGLang names for them."""
    try:
        return all(_spans(*_meta(pool, page)) == _spans(*_addresses(geometry, lent, page)) for page in _spread(pages))
    except _NO_ADDRESSES:
        return False


def _addresses(
    geometry: sw.PageGeometry, lent: sw.PoolPointers, page: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return address and size of every head of a page, as a description has them."""
    heads, dim = geometry.kv_heads, geometry.head_dim * geometry.itemsize
    base = lent.base.astype(np.int64)[:, None, None] + page * int(lent.slot_stride)
    token = np.arange(geometry.page_tokens, dtype=np.int64)[None, :, None] * int(lent.token_stride)
    head = np.arange(heads, dtype=np.int64)[None, None, :] * int(lent.head_stride)
    at = (base + token + head).reshape(-1)
    return at, np.full(at.size, dim, dtype=np.int64)


def _spans(at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the runs of bytes that pieces cover together, (first, end)."""
    order = np.argsort(at, kind="stable")
    first, end = at[order], (at + sizes)[order]
    breaks = np.flatnonzero(first[1:] != end[:-1]) + 1
    starts = np.concatenate([[0], breaks])
    ends = np.concatenate([breaks, [at.size]]) - 1
    return list(zip(first[starts].tolist(), end[ends].tolist(), strict=True))


# ---- pieces --------------------------------------------------------------------------------------------------------


def _pieces(pool: HostPool, name: str, whose: Whose, extra: Extra) -> PoolPages:
    """Describe a pool by the pieces that it names for its pages.

    Raises:
        ValueError: they do not lie at equal distances; NotImplementedError and others: SGLang's.
    """
    tokens = int(getattr(pool, "page_size", 1) or 1)
    pages = int(pool.size) // tokens
    base, sizes = _meta(pool, 0)
    stride = _meta(pool, 1)[0] - base if pages > 1 else np.zeros_like(base)
    for page in _spread(pages):
        at, these = _meta(pool, page)
        if at.shape != base.shape or (at != base + page * stride).any() or (these != sizes).any():
            raise ValueError(f"page {page} of {pages} does not lie at a multiple of the distance of the first two")
    geometry = _geometry(
        pool,
        name,
        model=whose.model,
        revision=whose.revision,
        layers=base.size,
        kv_heads=1,
        head_dim=1,
        dtype="uint8",
        page_tokens=1,
        streams=1,
        shard=whose.shard,
        layer_head_dims=tuple(_as_heads(int(size)) for size in sizes),
        extra=_sorted((*extra, ("form", "pieces"), ("tokens", tokens))),
    )
    heads = np.array([dims[1] for dims in geometry.head_dims], dtype=np.int64)
    owner = [getattr(pool, each, None) for each in ("kv_buffer", "temporal_buffer", "conv_buffer")]
    lent = sw.PoolPointers(
        base=base.astype(np.uint64), slot_stride=stride, token_stride=sizes, head_stride=heads, slots=pages,
        owner=(pool, owner),
    )  # fmt: skip
    return PoolPages("pieces", geometry, lent, _no_flat, tokens, pages)


def _as_heads(size: int) -> tuple[int, int]:
    """Split a piece into heads of equal size that a geometry can hold."""
    heads = -(-size // _MOST_DIM)
    while size % heads:
        heads += 1
    return heads, size // heads


def _no_flat(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    raise sw.StepwellUsageError("SGLang hands no flat pages of this pool out")


def _meta(pool: HostPool, page: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return addresses and sizes of the pieces of a page, as SGLang has them.

    Raises:
        ValueError: the pool has no bytes.
    """
    import torch

    tokens = int(getattr(pool, "page_size", 1) or 1)
    found = pool.get_page_buffer_meta(torch.arange(page * tokens, (page + 1) * tokens, dtype=torch.int64))
    if not found or not found[0]:
        raise ValueError("the pool has no bytes of its own")
    try:
        at, sizes = (np.array(each, dtype=np.int64) for each in found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"get_page_buffer_meta answers no two lists of numbers ({error})") from error
    if at.shape != sizes.shape or at.ndim != 1 or int(at.min()) <= 0 or int(sizes.min()) <= 0:
        raise ValueError(f"get_page_buffer_meta answers {at.tolist()[:4]} and {sizes.tolist()[:4]} for page {page}")
    return at, sizes


def _spread(pages: int) -> Sequence[int]:
    """Return some pages: the first ones, one in the middle, the last."""
    return sorted({0, min(1, pages - 1), min(2, pages - 1), pages // 2, pages - 1})


# ---- flat ----------------------------------------------------------------------------------------------------------


def _flat(pool: HostPool, name: str, whose: Whose, extra: Extra) -> PoolPages:
    """Describe a pool by the size of the pages that it hands out.

    Raises:
        StepwellUsageError: it hands none out.
    """
    tokens = int(getattr(pool, "page_size", 1) or 1)
    try:
        page, first = pool.get_dummy_flat_data_page(), pool.get_data_page(0, flat=True)
        nbytes, others = (int(each.numel()) * int(each.element_size()) for each in (page, first))
    except (NotImplementedError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise sw.StepwellUsageError(
            f"host pool {name} ({type(pool).__qualname__}, layout {pool.layout}) names neither addresses nor pages "
            f"({error!r}): its pages cannot be kept; use another --hicache-mem-layout"
        ) from error
    if nbytes != others:
        raise sw.StepwellUsageError(
            f"{_pool(pool, name)}, layout {pool.layout}: get_dummy_flat_data_page makes {nbytes} bytes, get_data_page "
            f"{others}"
        )
    if nbytes == 0:
        raise sw.StepwellUsageError(f"host pool {name} ({type(pool).__qualname__}) has pages of no bytes")
    meaning = {
        **dict(extra), "form": "flat", "model": whose.model, "revision": whose.revision,
        "shard": f"{whose.shard[0]} of {whose.shard[1]}",
    }  # fmt: skip
    geometry = sw.PageGeometry.opaque(nbytes, page_tokens=tokens, fingerprint=meaning)
    return PoolPages("flat", geometry, None, lambda rows: rows, tokens, int(pool.size) // tokens)


def _extra(pool: Any, name: str, whose: Whose) -> Extra:
    """Return what every form's fingerprint holds beside the geometry."""
    found: dict[str, str | int] = dict(whose.extra)
    found["pool"] = name
    found["pool_dtype"] = str(getattr(pool, "dtype", ""))
    if (tag := getattr(pool, "storage_format_tag", None)) is not None:
        found["storage_format_tag"] = str(tag)
    for field in ("start_layer", "end_layer"):  # of a pipeline stage
        if (value := getattr(pool, field, None)) is not None:
            found[field] = int(value)
    return tuple(found.items())


def _sorted(extra: Extra) -> Extra:
    return tuple(sorted(extra))
