"""SGLang's tree over its host pools and a storage backend: what comes back is what was computed, bit by bit.

The parts are SGLang's: UnifiedRadixCache (unified_radix_cache.py), HybridCacheController with its threads
(hybrid_cache/hybrid_cache_controller.py), the host pools (pool_host/mha.py, mla.py), the core of the tree in Rust or in
Python (unified_cache/tree_core_registry.py). The device is host memory, and the copies between the two are cpu/'s.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
import torch
from backends import THRESHOLD_TOKENS, Flags, Store
from tree_kit import Shape, Tree, configure_process, prompt, tree

configure_process()

PAGES = 6
STORES = [
    pytest.param("file", marks=pytest.mark.long),
    pytest.param("memory", marks=pytest.mark.long),
    "stepwell-shared",
    "stepwell-disk",
]
CHECKING = ["stepwell-shared", "stepwell-disk", "stepwell"]

# pool_host/mla.py has no page_head; hf3fs and others name these four (server_args: --hicache-mem-layout).
LAYOUTS = {
    "mha": ["layer_first", "page_first", "page_first_direct", "page_head"],
    "mla": ["layer_first", "page_first", "page_first_direct"],
}


@dataclass(frozen=True)
class Case:
    """A combination: which page sizes, cores and interfaces are tried with which layout."""

    shape: Shape
    v1: bool

    def __str__(self) -> str:
        shape = self.shape
        return f"{shape.attention}-{shape.layout}-{shape.page}-{shape.core}-{'v1' if self.v1 else 'generic'}"


# What CI tries with every layout; all of it is tried by hand.
USUAL = {(16, "rust", True), (64, "python", True), (1, "rust", False)}
CASES = [
    pytest.param(
        Case(Shape(attention=attention, layout=layout, page=page, core=core), v1),
        marks=() if (page, core, v1) in USUAL else pytest.mark.long,
    )
    for attention, layouts in LAYOUTS.items()
    for layout, page, core, v1 in itertools.product(layouts, (1, 16, 64), ("rust", "python"), (True, False))
]


@pytest.fixture
def case(request: pytest.FixtureRequest, model: Path) -> Case:
    """A combination, for the model in its folder."""
    return replace(request.param, shape=replace(request.param.shape, model=model))


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("case", CASES, ids=str, indirect=True)
def test_a_page_comes_back_from_host_and_from_storage_as_it_was(case: Case, store: Store) -> None:
    # SGLang loads no fewer than 10 tokens back from the host (unified_radix_cache.py:576), nor than its threshold from
    # storage.
    count = max(PAGES * case.shape.page, THRESHOLD_TOKENS + 8)
    tokens = prompt(count + case.shape.page // 2)
    whole = tokens[:count]
    flags = store.flags(v1=case.v1)
    with tree(case.shape, flags) as first:
        slots, computed = first.fill(whole, seed=1)
        first.insert(whole, slots)
        first.evict_device()
        assert len(first.device_slots(tokens)) == 0
        first.scramble_device()
        assert first.load_back(tokens) == len(whole)
        assert torch.equal(first.read(first.device_slots(tokens)), computed)

        first.reset()
        first.scramble()
        assert torch.equal(first.restore(tokens), computed)
    with tree(case.shape, flags) as second:
        second.scramble()
        assert torch.equal(second.restore(tokens), computed)


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_backend_is_attached_and_detached_and_cleared_while_the_tree_lives(store: Store, model: Path) -> None:
    shape = Shape(model=model)
    tokens = prompt(PAGES * shape.page)
    with tree(shape, None) as only:
        slots, computed = only.fill(tokens, seed=2)
        only.insert(tokens, slots)
        # Pages that were in the tree before get their hashes now (unified_cache/storage_attachment.py:294), and are
        # written when they are inserted again.
        attached, message = only.attach(store.flags())
        assert attached, message
        only.reset()
        again, computed = only.fill(tokens, seed=2)
        only.insert(tokens, again)
        detached, message = only.detach()
        assert detached, message
        only.reset()
        assert only.prefetch(tokens) == 0
        attached, message = only.attach(store.flags())
        assert attached, message
        only.scramble()
        assert torch.equal(only.restore(tokens), computed)
        only.reset()
        assert only.cache.clear_storage_backend()
        assert only.prefetch(tokens) == 0


@pytest.mark.parametrize("store", ["stepwell-disk"], indirect=True)
def test_loads_are_bound_by_the_timeouts_that_were_given_when_the_backend_was_attached(
    store: Store, model: Path
) -> None:
    # A backend is not told of them: unified_cache/storage_attachment.py:121 takes them out, :181 tells the tree.
    flags = store.flags()
    later = Flags(flags.name, flags.extra | {"prefetch_timeout_base": 3, "prefetch_timeout_per_ki_token": 8})
    shape = Shape(model=model)
    with tree(shape, flags) as only:
        for base, per_ki_token in ((1.0, 0.25), (3.0, 8.0)):
            patience = only.storage._members["kv"].bound.patience
            assert (patience.seconds, patience.per_page) == (base, per_ki_token * shape.page / 1024)
            cache = only.cache
            assert (cache.prefetch_timeout_base, cache.prefetch_timeout_per_page) == (base, patience.per_page)
            assert only.detach()[0]
            attached, message = only.attach(later)
            assert attached, message


@pytest.mark.parametrize("store", STORES, indirect=True)
@pytest.mark.parametrize("core", ["rust", "python"])
def test_whatever_was_inserted_evicted_and_fetched_every_prefix_has_its_own_bytes(
    store: Store, core: str, model: Path
) -> None:
    shape = Shape(model=model, core=core, device_pages=48, host_ratio=1.5)
    choose = random.Random(3)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    trunks = [prompt(2 * shape.page, seed=seed) for seed in range(3)]
    prompts = [choose.choice(trunks) + prompt(choose.randint(1, 3) * shape.page, seed=10 + n) for n in range(8)]
    for _ in range(2):
        with tree(shape, store.flags()) as only:
            for _ in range(40):
                tokens = choose.choice(prompts)
                if choose.random() < 0.15:
                    only.evict_device()
                if choose.random() < 0.1:
                    only.reset()
                    only.scramble()
                only.prefetch(tokens)
                have = only.load_back(tokens)
                _serve(only, tokens, have, known)


@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.long), *CHECKING], indirect=True)
def test_a_backend_that_fails_at_random_costs_hits_and_nothing_else(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # hicache_storage.py:519: SGLang puts this around any backend, to delay and to fail its calls.
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    shape = Shape(model=model)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    with tree(shape, store.flags()) as only:
        for seed in range(30):
            tokens = prompt(PAGES * shape.page, seed=seed % 3)
            only.prefetch(tokens)
            _serve(only, tokens, only.load_back(tokens), known)
            only.reset()
            only.scramble()


def _serve(only: Tree, tokens: list[int], have: int, known: dict[tuple[int, ...], torch.Tensor]) -> None:
    """Hold what the tree has of a prompt to what was computed before, compute the rest, and insert it.

    known: by prefix up to a page's end, the bytes of that page.
    """
    page = only.shape.page
    if only.allocator.available_size() < len(tokens) - have:
        only.evict_device()
        have = only.load_back(tokens)
    slots = only.device_slots(tokens)
    assert len(slots) == have
    got = only.read(slots)
    for end in range(page, have + 1, page):
        assert torch.equal(got[end - page : end], known[tuple(tokens[:end])]), f"page {end // page - 1} is another's"
    if have == len(tokens):
        return
    rest = only.allocator.alloc(len(tokens) - have)
    assert rest is not None
    buffers = [buffer.view(torch.uint8).view(buffer.shape[0], -1) for buffer in only.device_buffers()]
    for end in range(have + page, len(tokens) + 1, page):
        key = tuple(tokens[:end])
        where = rest[end - page - have : end - have]
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        for buffer in buffers:
            buffer[where] = torch.randint(256, (page, buffer.shape[1]), dtype=torch.uint8, generator=generator)
        known[key] = only.read(where)
    only.insert(tokens, torch.cat([slots, rest]), known=have)
