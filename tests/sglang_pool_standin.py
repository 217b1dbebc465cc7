"""A small stand-in for what the SGLang adapter touches of torch and of SGLang 0.5.23, where they are not installed.

It has the shapes and addresses of SGLang's host pools (mem_cache/pool_host/mha.py:326-358, 690-770, 817-877;
mla.py:307-329, 1159-1283), on numpy. tests/adapters/sglang runs the adapter under the real ones.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Tensor:
    """A numpy array with the methods of a CPU tensor that the adapter calls."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def cpu(self) -> Tensor:
        return self

    detach = cpu

    def numpy(self) -> np.ndarray:
        return self.array

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(str(dtype).removeprefix("torch.")))

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.array.reshape(*shape))

    def flatten(self) -> Tensor:
        return Tensor(self.array.flatten())

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def copy_(self, other: Tensor) -> Tensor:
        self.array[...] = other.array
        return self


class MHATokenToKVPoolHost:
    """Keys and values of `layers` layers; `pages` pages of `page_size` tokens."""

    dcp_size = 1
    storage_format_tag: str | None = None

    def __init__(
        self, layout: str, *, page_size: int = 4, pages: int = 16, layers: int = 3, heads: int = 2, dim: int = 8,
        dtype: str = "float16",
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.page_num, self.size = layout, page_size, pages, pages * page_size
        self.layer_num, self.head_num, self.head_dim, self.v_head_dim = layers, heads, dim, dim
        self.start_layer, self.end_layer = 0, layers
        shape = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page_size, heads, dim),
            "page_head": (2, pages, heads, page_size, layers, dim),
        }[layout]
        self.kv_buffer = Tensor(np.zeros(shape, dtype))
        self.dtype = self.kv_buffer.dtype

    def _of_page(self, index: int) -> tuple[Any, ...]:
        page = index // self.page_size
        tokens = slice(index, index + self.page_size)
        return {
            "layer_first": (slice(None), slice(None), tokens),
            "page_first": (slice(None), tokens),
            "page_first_direct": (slice(None), slice(page, page + 1)),
            "page_head": (slice(None), slice(page, page + 1)),
        }[self.layout]

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        page = Tensor(self.kv_buffer.array[self._of_page(index)])
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(np.zeros(self.get_data_page(0).shape, self.kv_buffer.array.dtype))

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        at = self._of_page(index)
        self.kv_buffer.array[at] = data_page.array.reshape(self.kv_buffer.array[at].shape)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        base, row = self.kv_buffer.data_ptr(), self.head_num * self.head_dim * self.kv_buffer.element_size()
        half = self.layer_num * self.size * row
        at = []
        for index in indices.array.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                starts = [base + index * row + layer * self.size * row for layer in range(self.layer_num)]
            else:
                starts = [base + index * self.layer_num * row]
            at += [start + stream * half for start in starts for stream in range(2)]
        size = self.page_size * row * (1 if self.layout == "layer_first" else self.layer_num)
        return at, [size] * len(at)

    def element(self, page: int) -> np.ndarray:
        """Return a page as [stream, layer, token, head, dim], whatever the layout."""
        part = self.kv_buffer.array[self._of_page(page * self.page_size)]
        order = {
            "layer_first": (0, 1, 2, 3, 4),
            "page_first": (0, 2, 1, 3, 4),
            "page_first_direct": (0, 2, 3, 4, 5),
            "page_head": (0, 4, 3, 2, 5),
        }[self.layout]
        if part.ndim == 6:
            part = part[:, 0]
            order = tuple(axis - (axis > 1) for axis in order)
        return part.transpose(order)


class MLATokenToKVPoolHost:
    """One latent a token and layer."""

    dcp_size = 1
    storage_format_tag: str | None = None

    def __init__(self, layout: str, *, page_size: int = 4, pages: int = 16, layers: int = 3, dim: int = 12) -> None:
        self.layout, self.page_size, self.page_num, self.size = layout, page_size, pages, pages * page_size
        self.layer_num, self.kv_cache_dim, self.start_layer, self.end_layer = layers, dim, 0, layers
        shape = {
            "layer_first": (layers, self.size, 1, dim),
            "page_first": (self.size, layers, 1, dim),
            "page_first_direct": (pages, layers, page_size, 1, dim),
        }[layout]
        self.kv_buffer = Tensor(np.zeros(shape, np.float16))
        self.dtype = self.kv_buffer.dtype

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        base, row = self.kv_buffer.data_ptr(), self.kv_cache_dim * self.kv_buffer.element_size()
        at = []
        for index in indices.array.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                at += [base + index * row + layer * self.size * row for layer in range(self.layer_num)]
            else:
                at.append(base + index * self.layer_num * row)
        size = self.page_size * row * (1 if self.layout == "layer_first" else self.layer_num)
        return at, [size] * len(at)

    def element(self, page: int) -> np.ndarray:
        """Return a page as [layer, token, dim], whatever the layout."""
        tokens = slice(page * self.page_size, (page + 1) * self.page_size)
        array = self.kv_buffer.array
        if self.layout == "layer_first":
            return array[:, tokens, 0]
        if self.layout == "page_first":
            return array[tokens, :, 0].transpose(1, 0, 2)
        return array[page, :, :, 0]


for _class in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
    _class.__module__ = f"standin.{_class.__name__[:3].lower()}"


class StatePool:
    """States of two sizes a slot, as Mamba layers have them: pieces in buffers of their own, one index a page."""

    layout = "page_first"
    page_size = 1
    dtype = "torch.float32"

    def __init__(self, slots: int = 12) -> None:
        self.size = slots
        self.temporal_buffer = Tensor(np.zeros((slots, 40), np.float32))
        self.conv_buffer = Tensor(np.zeros((slots, 7), np.float16))

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        at, sizes = [], []
        for index in indices.array.tolist():
            for buffer in (self.temporal_buffer, self.conv_buffer):
                row = buffer.array.strides[0]
                at.append(buffer.data_ptr() + index * row)
                sizes.append(row)
        return at, sizes


class PageOnlyPool:
    """A pool that hands out pages and names no addresses."""

    layout = "layer_first"
    dtype = "torch.uint8"

    def __init__(self, *, page_size: int = 4, pages: int = 12) -> None:
        self.page_size, self.size = page_size, pages * page_size
        self.pages = np.zeros((pages, 96), np.uint8)

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return Tensor(self.pages[index // self.page_size].copy())

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor(np.zeros(96, np.uint8))

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        self.pages[index // self.page_size] = data_page.array


class PoolName(str, enum.Enum):  # noqa: UP042 - as SGLang has it (hicache_storage.py:79)
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    DRAFT = "draft"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, enum.Enum):  # noqa: UP042 - as SGLang has it (hicache_storage.py:123)
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "served"
    dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    extra_config: dict[str, Any] | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


@dataclass
class StorageMetrics:
    """As SGLang has it (observability/metrics_collector.py:2190)."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage:
    """The base class; `register_mem_pool_host` and the rest are overridden."""


def _torch() -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    torch.uint8, torch.int64 = "torch.uint8", "torch.int64"  # type: ignore[attr-defined]
    torch.from_numpy = Tensor  # type: ignore[attr-defined]
    torch.arange = lambda *bounds, dtype=None: Tensor(np.arange(*bounds, dtype=np.int64))  # type: ignore[attr-defined]
    return torch


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Have torch and SGLang's storage interface be the stand-ins, and yield the adapter's storage module."""
    storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    for each in (
        HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer,
        PoolTransferResult,
    ):  # fmt: skip
        setattr(storage, each.__name__, each)
    collector = types.ModuleType("sglang.srt.observability.metrics_collector")
    collector.StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    modules = {"torch": _torch(), storage.__name__: storage, collector.__name__: collector}
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability"):
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = []  # a package of which nothing else is found
    ours = [name for name in sys.modules if name.startswith("stepwell.adapters.sglang")]
    before = {name: sys.modules.get(name) for name in (*modules, *ours)}
    for name in ours:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        import stepwell.adapters.sglang.storage as adapter

        yield adapter
    finally:
        for name in [name for name in sys.modules if name.startswith(("stepwell.adapters.sglang", "sglang", "torch"))]:
            if before.get(name) is None:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if module is not None})
