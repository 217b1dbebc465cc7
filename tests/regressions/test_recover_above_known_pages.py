"""A volume recovered into a tier, of pages that another tier already knows as parents, crashed the process.

Pages with known descendants enter the rank one by one, below their nearest resident ancestor; where an ancestor of the
same batch had not entered yet, its place in the list was read before it had one.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stepwell.hashing import prefix_hashes
from stepwell.index import Index, Tier

PAGES = 4


def recover(index: Index, tier: Tier, keys: np.ndarray, stamps: list[int]) -> np.ndarray:
    wide = np.zeros((PAGES, 64), np.uint8)
    wide[:, :32] = keys
    parents = np.zeros((PAGES, 64), np.uint8)
    parents[1:] = wide[:-1]
    return index.recover(
        tier,
        np.arange(PAGES, dtype=np.uint32),
        wide,
        np.full(PAGES, 32, np.uint8),
        parents,
        np.array([0, *[32] * (PAGES - 1)], np.uint8),
        np.array([0, *[1] * (PAGES - 1)], np.uint8),
        np.arange(PAGES, dtype=np.uint32),
        np.ones(PAGES, np.uint8),
        np.zeros(PAGES, np.uint64),
        np.array(stamps, np.uint64),
    )


@pytest.mark.parametrize("stamps", list(itertools.permutations(range(1, PAGES + 1))), ids=str)
def test_a_chain_known_from_disk_is_recovered_in_shared_memory_whatever_its_stamps(stamps: tuple[int, ...]) -> None:
    keys = prefix_hashes(np.arange(PAGES, dtype=np.int32), page_tokens=1)
    index = Index(1)
    for tier in (Tier.DISK, Tier.SHARED):
        index.add_slots(tier, 0, PAGES)
    assert recover(index, Tier.DISK, keys, list(range(1, PAGES + 1))).all()
    assert recover(index, Tier.SHARED, keys, list(stamps)).all()
    assert index.check() == ""
    # Prefix-closed whatever the stamps say: the deepest page leaves first.
    assert index.rank_order(Tier.SHARED).tolist() == list(reversed(range(PAGES)))
