"""What is damaged or meant for others is not served, and is stored again: HiCacheFile shows each fault, stepwell none.

The same steps run over both. HiCacheFile (hicache_storage.py:702-1108) keeps a file a page, named by SGLang's hash, the
served name and the rank; what is in it is not looked at, nor what it is of.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import damage_kit
import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
import torch
from backends import Store
from tree_kit import Shape, Tree, configure_process, prompt, tree

configure_process()

PAGES = 6
BOTH = pytest.mark.parametrize("store", ["file", "stepwell-shared", "stepwell-disk"], indirect=True)


@pytest.fixture
def shape(model: Path) -> Shape:
    """A model and its pages."""
    return Shape(model=model)


@BOTH
def test_a_changed_bit_is_not_served(store: Store, shape: Shape) -> None:
    tokens, computed = _store(store, shape)
    places = damage_kit.find(store, _rows(shape, computed, page=2))
    assert places, "the page's bytes are not in the files of this backend"
    damage_kit.flip(places)
    with tree(shape, store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        if store.checks:
            assert len(got) <= 2 * shape.page
            assert torch.equal(got, computed[: len(got)])
        else:  # hicache_storage.py:835: read, and that is all
            assert len(got) == len(tokens)
            assert not torch.equal(got, computed)


def _mend(after: Tree) -> None:
    """Wait until the keeper has rewritten what is in quarantine and read it back: then the slot is free."""
    store, pause = after.storage._members["kv"].store, threading.Event()
    for _ in range(600):
        if not any(tier.quarantined for tier in store.stats().tiers.values()):
            return
        pause.wait(0.05)
    pytest.fail("a slot stays in quarantine")


@pytest.mark.parametrize("store", ["stepwell-shared", "stepwell-disk"], indirect=True)
def test_a_page_with_a_changed_bit_is_stored_again(store: Store, shape: Shape) -> None:
    tokens, computed = _store(store, shape)
    damage_kit.flip(damage_kit.find(store, _rows(shape, computed, page=2)))
    with tree(shape, store.flags()) as after:
        after.restore(tokens)
        _mend(after)
        _compute_again(after, tokens)
    with tree(shape, store.flags()) as healed:
        healed.scramble()
        assert torch.equal(healed.restore(tokens), computed)


@BOTH
def test_a_page_that_was_cut_short_is_stored_again(store: Store, shape: Shape) -> None:
    tokens, computed = _store(store, shape)
    damage_kit.cut(damage_kit.find(store, _rows(shape, computed, page=0)))
    with tree(shape, store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        assert torch.equal(got, computed[: len(got)])
        assert len(got) < len(tokens)
        _compute_again(after, tokens)
    with tree(shape, store.flags()) as healed:
        healed.scramble()
        got = healed.restore(tokens)
        if store.checks:
            assert torch.equal(got, computed)
        else:  # hicache_storage.py:873: what exists is not written; :839: and reading it raises
            assert len(got) == 0
            assert healed.storage.exists(_first_hash(healed, tokens))


@BOTH
def test_a_file_that_has_grown_serves_no_byte_that_was_not_stored(store: Store, shape: Shape) -> None:
    tokens, computed = _store(store, shape)
    damage_kit.lengthen(damage_kit.find(store, _rows(shape, computed, page=0)), 4096)
    with tree(shape, store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        assert torch.equal(got, computed[: len(got)])
        if not store.checks:  # hicache_storage.py:839 asks for no more than it wants, and does not see the rest
            assert len(got) == len(tokens)


def _other_dtype(shape: Shape) -> Shape:
    return replace(shape, dtype=torch.float16)


def _fewer_layers(shape: Shape) -> Shape:
    return replace(shape, layers=shape.layers - 1)


def _more_layers(shape: Shape) -> Shape:
    return replace(shape, layers=shape.layers + 1)


def _other_heads(shape: Shape) -> Shape:
    """As many bytes a token, in half as many heads of twice the size."""
    return replace(shape, heads=shape.heads // 2, head_dim=shape.head_dim * 2)


@BOTH
@pytest.mark.parametrize("other", [_other_dtype, _fewer_layers, _other_heads])
def test_pages_of_another_kind_are_not_served(store: Store, shape: Shape, other: Callable[[Shape], Shape]) -> None:
    tokens, _ = _store(store, shape)
    with tree(other(shape), store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        if store.checks:
            assert len(got) == 0
            assert after.storage.batch_exists([_first_hash(after, tokens)]) == 0
        else:  # hicache_storage.py:733: the name of a file says neither
            assert len(got) == len(tokens)


@BOTH
def test_pages_of_a_model_with_more_layers_are_a_miss_and_not_an_error(store: Store, shape: Shape) -> None:
    tokens, _ = _store(store, shape)
    with tree(_more_layers(shape), store.flags()) as after:
        assert len(after.restore(tokens)) == 0
        # HiCacheFile says that it has the page, and fails to read it (hicache_storage.py:839), each time it is asked.
        assert after.storage.exists(_first_hash(after, tokens)) == (not store.checks)


@BOTH
@pytest.mark.parametrize(
    ("stored", "asked"), [("page_first", "layer_first"), ("layer_first", "page_head"), ("page_head", "page_first")]
)
def test_pages_of_another_host_layout_are_turned_or_missed(store: Store, shape: Shape, stored: str, asked: str) -> None:
    tokens, computed = _store(store, replace(shape, layout=stored))
    with tree(replace(shape, layout=asked), store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        assert len(got) == len(tokens)  # stepwell's pages have one order, whatever the host's is
        assert torch.equal(got, computed) == store.checks  # hicache_storage.py:835: K read as V, and tokens as layers


@BOTH
def test_pages_of_another_model_are_not_served(store: Store, shape: Shape, tmp_path: Path) -> None:
    from model_kit import Llama

    tokens, _ = _store(store, shape)
    other = Llama(seed=9).write(tmp_path / "other")
    with tree(replace(shape, model=other, served="another"), store.flags()) as after:
        assert len(after.restore(tokens)) == 0


@pytest.mark.parametrize("store", ["stepwell-shared", "stepwell-disk", "stepwell"], indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_bits_change_in_whatever_file_no_wrong_byte_is_served(store: Store, shape: Shape, seed: int) -> None:
    tokens, computed = _store(store, shape)
    choose = random.Random(seed)
    places = damage_kit.anywhere(store, 200, choose)
    damage_kit.flip(places)
    with tree(shape, store.flags()) as after:
        after.scramble()
        got = after.restore(tokens)
        assert torch.equal(got, computed[: len(got)])


def _store(store: Store, shape: Shape) -> tuple[list[int], torch.Tensor]:
    """Compute a prompt, have it stored, and end the tree. Returns: its tokens, its bytes."""
    tokens = prompt(PAGES * shape.page)
    with tree(shape, store.flags()) as before:
        slots, computed = before.fill(tokens, seed=1)
        before.insert(tokens, slots)
        before.reset()
        before.scramble()
        assert torch.equal(before.restore(tokens), computed), "it was not stored"
    return tokens, computed


def _compute_again(after: Tree, tokens: list[int]) -> None:
    """What an engine does with what was not found: compute it, and insert it."""
    after.reset()
    slots, _ = after.fill(tokens, seed=1)
    after.insert(tokens, slots)


def _rows(shape: Shape, computed: torch.Tensor, *, page: int) -> list[bytes]:
    """Give each token's first row (K of the first layer) of a page: as it lies, in one piece, wherever it is kept."""
    width = shape.head_dim * shape.dtype.itemsize
    tokens = computed[page * shape.page : (page + 1) * shape.page]
    return [bytes(row[:width].numpy()) for row in tokens]


def _first_hash(opened: Tree, tokens: list[int]) -> str:
    from array import array

    from sglang.srt.mem_cache.utils import get_storage_hash_str

    first, *_ = get_storage_hash_str(array("q", tokens), page_size=opened.shape.page)
    return str(first)
