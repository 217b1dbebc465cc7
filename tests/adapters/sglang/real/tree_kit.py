"""SGLang's radix tree with its controller, its threads and its host pools, on the CPU, without an engine around it.

What a scheduler does with them for one request is done here step by step: insert, write through, evict, match, fetch
from storage, load back (managers/scheduler.py:3342, managers/schedule_policy.py:1517). Every wait is bounded.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

_PAUSE = threading.Event()  # never set: its wait lets SGLang's threads run
SECONDS = 30  # of any wait; what it waits for takes milliseconds


@dataclass(frozen=True)
class Shape:
    """A model and how its pages lie. layout: of the host pool. core: the tree's, rust or python."""

    layout: str = "page_first"
    attention: str = "mha"
    page: int = 16
    core: str = "rust"
    dtype: torch.dtype = torch.bfloat16
    layers: int = 3
    heads: int = 2
    head_dim: int = 64
    latent: int = 128
    rope: int = 32
    model: Path | None = None
    served: str = "tiny"
    write_policy: str = "write_through"
    device_pages: int = 64
    host_ratio: float = 2.0


class Tree:
    """A tree over pools of its own, with a storage backend or without. Close it: its threads go then.

    A page's bytes on the device are written by `fill` and read by `read`; nothing here interprets them.
    """

    def __init__(self, shape: Shape, backend: backends.Flags | None) -> None:
        self.shape = shape
        options = backend.arguments() if backend is not None else {}
        # Without an engine nobody resolves the arguments; the names are those of its command line.
        arguments = ServerArgs(
            model_path=str(shape.model),
            served_model_name=shape.served,
            device="cpu",
            page_size=shape.page,
            enable_hierarchical_cache=True,
            hicache_ratio=shape.host_ratio,
            hicache_mem_layout=shape.layout,
            hicache_io_backend="direct" if shape.layout == "page_first_direct" else "kernel",
            hicache_write_policy=shape.write_policy,
            hicache_storage_prefetch_policy="wait_complete",
            **options,
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        tokens = shape.device_pages * shape.page
        if shape.attention == "mha":
            self.pool: Any = MHATokenToKVPool(
                size=tokens,
                page_size=shape.page,
                dtype=shape.dtype,
                head_num=shape.heads,
                head_dim=shape.head_dim,
                layer_num=shape.layers,
                device="cpu",
                enable_memory_saver=False,
            )
        else:
            self.pool = MLATokenToKVPool(
                size=tokens,
                page_size=shape.page,
                dtype=shape.dtype,
                kv_lora_rank=shape.latent,
                qk_rope_head_dim=shape.rope,
                layer_num=shape.layers,
                device="cpu",
                enable_memory_saver=False,
            )
        if shape.page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(tokens, shape.dtype, "cpu", self.pool, need_sort=False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                tokens, shape.page, shape.dtype, "cpu", self.pool, need_sort=False
            )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, tokens, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=shape.core,
        )
        self.cache = UnifiedRadixCache(params)
        assert shape.core in type(self.cache.tree_core).__name__.lower() or shape.core == "python"
        self.cache.init_hicache(arguments, params)
        self._requests = 0

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def host_pool(self) -> Any:
        """The host pool of K and V, or of latents."""
        return self.controller.mem_pool_host.anchor_entry.host_pool

    @property
    def storage(self) -> Any:
        """The storage backend itself."""
        return self.controller.storage_backend

    def fill(self, tokens: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take slots for these tokens and fill them with random bytes. Returns: slots, bytes."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None, "the device pool of this test is too small"
        random = torch.Generator().manual_seed(seed)
        for buffer in self.device_buffers():
            raw = buffer.view(torch.uint8).view(buffer.shape[0], -1)
            raw[slots] = torch.randint(256, (len(tokens), raw.shape[1]), dtype=torch.uint8, generator=random)
        return slots, self.read(slots)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Read what these slots hold, in all layers: uint8[tokens, bytes]."""
        views = [buffer.view(torch.uint8).view(buffer.shape[0], -1)[slots] for buffer in self.device_buffers()]
        return torch.cat(views, dim=1)

    def insert(self, tokens: list[int], slots: torch.Tensor, known: int = 0) -> None:
        """Insert a finished request's tokens, and wait until they are written through to host and storage.

        known: of the first tokens, whose slots are the tree's own.
        """
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots, prev_prefix_len=known))
        self.settle()

    def settle(self) -> None:
        """Poll as the scheduler does until nothing is on its way to the host, to the device or to storage."""
        cache = self.cache

        def settled() -> bool:
            return not (cache.ongoing_write_through or cache.ongoing_load_back or cache.ongoing_backup)

        self._poll(settled, "a write-through that never ended")

    def match(self, tokens: list[int]) -> Any:
        """Match a prompt, as the tree has it now."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def device_slots(self, tokens: list[int]) -> torch.Tensor:
        """Look up where on the device this prompt's prefix lies."""
        found = self.match(tokens)
        return self.cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]

    def evict_device(self) -> None:
        """Drop everything from the device that is on the host."""
        self.cache.evict(EvictParams(num_tokens=self.shape.device_pages * self.shape.page))
        self.settle()

    def reset(self) -> None:
        """Drop device and host, as flush_cache does (managers/scheduler.py:5518)."""
        self.settle()
        self.cache.reset()
        self.allocator.clear()

    def load_back(self, tokens: list[int]) -> int:
        """Bring a prompt's prefix from host to device. Returns: its tokens that are on the device then."""
        found = self.match(tokens)
        if found.host_hit_length:
            assert self.cache.load_back(found.best_match_node), "SGLang would not load back"
            self.cache.ready_to_load_host_cache()
            self.settle()
        return int(self.match(tokens).device_prefix_len)

    def prefetch(self, tokens: list[int]) -> int:
        """Fetch from storage to host what of a prompt the tree has not. Returns: how many tokens came."""
        found = self.match(tokens)
        known = found.device_prefix_len + found.host_hit_length
        self._requests += 1
        request = CacheRequestHandle(f"request-{self._requests}", 0)
        self.cache.prefetch_from_storage(
            request,
            found.last_host_node,
            array("q", tokens[known:]),
            self.cache.get_last_hash_value(found.last_host_node),
            self.cache.get_prefix_hash_values(found.last_host_node)
            if self.cache.hicache_storage_pass_prefix_keys
            else None,
        )
        self._poll(lambda: self.cache.check_prefetch_progress(request), "a prefetch that never ended")
        return int(self.cache.pop_prefetch_loaded_tokens(request))

    def restore(self, tokens: list[int]) -> torch.Tensor:
        """Bring a prompt from storage, through the host, to the device. Returns: its prefix's bytes there."""
        self.prefetch(tokens)
        self.load_back(tokens)
        return self.read(self.device_slots(tokens))

    def attach(self, backend: backends.Flags) -> tuple[bool, str]:
        """Attach a backend at run time, as PUT /hicache/storage-backend does."""
        return self.cache.attach_storage_backend(
            backend.name,
            storage_backend_extra_config_json=backend.arguments()["hicache_storage_backend_extra_config"],
            served_model_name=self.shape.model,
        )

    def detach(self) -> tuple[bool, str]:
        """Detach the backend at run time."""
        self.settle()
        return self.cache.detach_storage_backend()

    def close(self) -> None:
        """Detach the backend, and end the controller's threads."""
        self.cache.shutdown()
        self.cache.release_host_resources()
        # It is called again as Python ends (unified_radix_cache.py:580), and would keep every tree's memory until then.
        atexit.unregister(self.cache.shutdown)

    def scramble_device(self) -> None:
        """Have no byte left on the device: what is read there later, was brought there."""
        for buffer in self.device_buffers():
            buffer.view(torch.uint8).fill_(0xA5)

    def scramble(self) -> None:
        """The same on device and host."""
        self.scramble_device()
        self.host_pool.kv_buffer.view(torch.uint8).fill_(0xA5)

    def device_buffers(self) -> list[torch.Tensor]:
        if self.shape.attention == "mha":
            return [*self.pool.k_buffer, *self.pool.v_buffer]
        return list(self.pool.kv_buffer)

    def _poll(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        self.cache.check_hicache_events()
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: nothing for {SECONDS} s. {self._state()}")
            _PAUSE.wait(0.001)
            self.cache.check_hicache_events()

    def _state(self) -> str:
        cache = self.cache
        counts = {name: len(getattr(cache, name)) for name in _ONGOING}
        alive = {
            name: thread.is_alive()
            for name, thread in vars(self.controller).items()
            if name.endswith("_thread") and thread is not None
        }
        return f"under way: {counts}; threads alive: {alive}"


_ONGOING = ("ongoing_write_through", "ongoing_load_back", "ongoing_backup", "ongoing_prefetch")


@contextlib.contextmanager
def tree(shape: Shape, backend: backends.Flags | None) -> Iterator[Tree]:
    """Open a tree, and close it."""
    opened = Tree(shape, backend)
    try:
        yield opened
    finally:
        opened.close()


def prompt(count: int, seed: int = 1) -> list[int]:
    """Make a prompt of random tokens."""
    random = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(4, 512, (count,), generator=random)]


def configure_process() -> None:
    """Do what the process of a scheduler does as it starts: load the plugins (managers/scheduler.py:6323).

    Once a process; before any tree.
    """
    import sglang.srt.managers.scheduler  # noqa: F401  # by which a plugin knows whose process it is in
    from sglang.srt.plugins import load_plugins

    load_plugins()
