"""Let SGLang 0.5.23 move pages between its device pool and its host pool where there is no GPU.

Its copies between the two are CUDA kernels (pool_host/mha.py:424, :579; pool_host/mla.py:696, :996). Here they are
index copies of torch, one per layer, from the same rows to the same rows; what is above them (the tree, the controller,
the threads, the host pools with their layouts, the storage backend) is SGLang's own. So the kernels are not tried, and
nothing else is left out.

SGLang calls `register` in each of its processes: it is an entry point of the group `sglang.srt.plugins`
(plugins/__init__.py), of the distribution beside this file, which is found where this folder is on PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

import torch

Index = tuple[Any, ...]


def register() -> None:
    """Replace the copies, and what pins host memory. Twice is once."""
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    if getattr(base.HostKVCache, "_on_cpu", False):
        return
    base.HostKVCache._on_cpu = True
    _refuse_pins(base.HostKVCache)
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mha
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_mha
    mla.MLATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mla
    mla.MLATokenToKVPoolHost.load_to_device_per_layer = _load_mla


def _refuse_pins(host_pool: Any) -> None:
    """Have host pools made without pinned memory, whatever they are asked for: cudaHostRegister is what pins it."""
    create = host_pool.__init__

    def unpinned(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options | {"pin_memory": False})

    host_pool.__init__ = unpinned


def _rows(pool: Any, layer: int, tokens: torch.Tensor) -> Index:
    """Say where a layer of these tokens lies in the host pool's K or V, or in its latents."""
    page, within = tokens // pool.page_size, tokens % pool.page_size
    places: dict[str, Index] = {
        "layer_first": (layer, tokens),  # layer token ...
        "page_first": (tokens, layer),  # token layer ...
        "page_first_direct": (page, layer, within),  # page layer token-in-page ...
        "page_head": (page, slice(None), within, layer),  # page head token-in-page layer dim
    }
    return places[pool.layout]


def _back_up_mha(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer in range(pool.layer_num):
        rows = _rows(pool, layer, host_indices)
        pool.k_buffer[rows] = pool.device_k_buffers[layer][device_indices]
        pool.v_buffer[rows] = pool.device_v_buffers[layer][device_indices]


def _load_mha(
    pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer: int, io_backend: str, **_: Any
) -> None:
    rows = _rows(pool, layer, host_indices)
    pool.device_k_buffers[layer][device_indices] = pool.k_buffer[rows]
    pool.device_v_buffers[layer][device_indices] = pool.v_buffer[rows]


def _back_up_mla(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer in range(pool.layer_num):
        latents = pool.kv_buffer[_rows(pool, layer, host_indices)]
        pool.kv_buffer[_rows(pool, layer, host_indices)] = device_pool.kv_buffer[layer][device_indices].view_as(latents)


def _load_mla(
    pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer: int, io_backend: str, **_: Any
) -> None:
    device = device_pool.kv_buffer[layer]
    device[device_indices] = pool.kv_buffer[_rows(pool, layer, host_indices)].view(-1, *device.shape[1:])
