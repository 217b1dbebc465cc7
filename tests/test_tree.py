"""The view of the radix tree shows each cached chain once, where its pages are, and says what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

import stepwell as sw
from stepwell import _core
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from store_kit import PAGE_TOKENS, OpenRig, chain


def together(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


def paths(tree: sw.Tree) -> set[tuple[int, tuple[int, ...]]]:
    """List (namespace, pages of each edge from the root on) of every edge."""
    out = set()
    for row in range(len(tree.parents)):
        lengths: list[int] = []
        at = row
        while at >= 0:
            lengths.insert(0, int(tree.pages[at]))
            at = int(tree.parents[at])
        assert int(tree.first_pages[row]) == sum(lengths[:-1])
        out.add((int(tree.namespaces[row]), tuple(lengths)))
    return out


def test_an_empty_store_has_an_empty_tree(open_rig: OpenRig) -> None:
    tree = open_rig().store.tree()
    assert (tree.edges, tree.tree_pages, tree.is_cut, tree.resident.shape) == (0, 0, False, (0, 4))


def test_branches_namespaces_and_tiers_are_shown(open_rig: OpenRig) -> None:
    rig = open_rig()
    system = chain(1, 5)
    rig.save(together(system, chain(2, 3)))
    rig.save(together(system, chain(3, 2)))
    rig.save(chain(4, 2), namespace=sw.Namespace(salt="tenant"))
    tree = rig.store.tree()
    assert paths(tree) == {(0, (5,)), (0, (5, 3)), (0, (5, 2)), (1, (2,))}
    assert (tree.edges, tree.tree_pages, tree.is_cut) == (4, 12, False)
    assert tree.resident[:, Tier.SHARED].tolist() == tree.pages.tolist()
    assert tree.resident[:, Tier.DISK].tolist() == tree.pages.tolist()
    assert tree.resident[:, [Tier.DEVICE, Tier.HOST]].sum() == 0
    trunk = int(np.flatnonzero(tree.pages == 5)[0])
    assert tree.pages_below[trunk] == 10
    assert set(tree.epochs.tolist()) == {rig.store.epoch}
    rig.store.evict(Tier.SHARED, 100)
    assert rig.store.tree().resident[:, Tier.SHARED].sum() == 0


def test_what_is_left_out_has_the_fewest_pages_below_it(open_rig: OpenRig) -> None:
    rig = open_rig()
    system = chain(1, 2)
    for number, pages in ((2, 1), (3, 9), (4, 4)):
        rig.save(together(system, chain(number, pages)))
    rig.save(chain(5, 3))
    tree = rig.store.tree(most=3)
    assert paths(tree) == {(0, (2,)), (0, (2, 9)), (0, (2, 4))}
    assert (tree.edges, tree.tree_pages, tree.is_cut) == (5, 19, True)
    assert tree.pages_below[0] == 16  # the trunk, with what is not shown


@pytest.mark.parametrize("most", [1, 7, 40, 65536])
def test_whatever_is_shown_is_a_tree_that_adds_up(most: int) -> None:
    rng = np.random.default_rng(0)
    index = _core.Index(1)
    index.add_slots(Tier.SHARED, 0, 10_000)
    space = index.open_namespace(None)
    chains = set()
    for _ in range(200):
        tokens = rng.integers(0, 3, rng.integers(1, 9), dtype=np.int32)
        keys = prefix_hashes(tokens, page_tokens=1, seed=None)
        batch = index.claim_absent(space, tokens, keys, 0, tokens.size, 1 << Tier.SHARED)
        new = np.flatnonzero(batch.outcomes[:, Tier.SHARED] == 1)
        ids = np.ascontiguousarray(batch.pages[new])
        index.commit_many(ids, Tier.SHARED, np.ascontiguousarray(batch.numbers[new, Tier.SHARED]))
        index.unpin_pages(ids)
        chains.update(tuple(tokens[:n].tolist()) for n in range(1, tokens.size + 1))
    tree = sw.Tree(*index.tree(most))
    assert tree.tree_pages == len(chains)
    assert tree.edges == index.nodes()
    assert len(tree.parents) == min(most, tree.edges)
    assert (tree.parents < np.arange(len(tree.parents))).all()
    below = tree.pages.astype(np.uint64)
    for row in range(len(tree.parents) - 1, -1, -1):
        if tree.parents[row] >= 0:
            below[tree.parents[row]] += below[row]
    assert (below <= tree.pages_below).all()
    if not tree.is_cut:
        assert below.tolist() == tree.pages_below.tolist()
        assert int(tree.pages.sum()) == len(chains)


@pytest.mark.parametrize("most", [0, 65537, True, 1.5])
def test_a_number_of_edges_out_of_range_is_refused(open_rig: OpenRig, most: int) -> None:
    with pytest.raises(sw.StepwellUsageError, match="most"):
        open_rig().store.tree(most=most)


def test_an_old_epoch_is_told_apart(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.save(chain(1, 2))
    rig.store.set_epoch(9)
    rig.save(chain(1, 3))
    tree = rig.store.tree()
    assert sorted(zip(tree.epochs.tolist(), tree.pages.tolist(), strict=True)) == [(0, 2), (9, 3)]


def test_a_page_shorter_than_its_tail_is_not_in_the_tree(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.save(chain(1, 2, tail=PAGE_TOKENS - 1))
    assert rig.store.tree().tree_pages == 2
