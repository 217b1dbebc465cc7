"""A storage backend in a dictionary, by which the kits are tried without stepwell: what SGLang asks, and no more."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

PAGES: dict[str, bytes] = {}  # of this process: what a tree stored, the next one in the same process finds


class MemoryStorage(HiCacheStorage):
    """Keep pages in `PAGES`. A page is what get_page_buffer_meta points to, in its order, or a flat tensor's bytes."""

    def __init__(self, config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        self.suffix = f"_{config.tp_rank}_{config.tp_size}"

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for key, pieces in zip(keys, self._pieces(keys, host_indices), strict=True):
            PAGES[key + self.suffix] = b"".join(ctypes.string_at(address, size) for address, size in pieces)
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        found = []
        for key, pieces in zip(keys, self._pieces(keys, host_indices), strict=True):
            page, start = PAGES.get(key + self.suffix), 0
            found.append(page is not None)
            for address, size in pieces if page is not None else ():
                ctypes.memmove(address, page[start : start + size], size)
                start += size
        return found

    def _pieces(self, keys: list[str], host_indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        pieces = list(zip(addresses, sizes, strict=True))
        each = len(pieces) // len(keys)
        return [pieces[start : start + each] for start in range(0, len(pieces), each)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        page = PAGES.get(key + self.suffix)
        if page is None:
            return None
        target_location.view(torch.uint8).view(-1)[:] = torch.frombuffer(bytearray(page), dtype=torch.uint8)
        return target_location

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        PAGES[key + self.suffix] = bytes(value.contiguous().view(torch.uint8).numpy())
        return True

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)
        return True

    def exists(self, key: str) -> bool:
        return key + self.suffix in PAGES

    def clear(self) -> bool:
        PAGES.clear()
        return True

    def close(self) -> None:
        """Do nothing: what is in `PAGES` is to outlive a detach."""
