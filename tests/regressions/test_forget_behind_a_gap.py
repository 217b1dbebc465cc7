"""forget() ended at the first page that was not there: those behind it stayed, and came back once that was saved again.

Recovered pages are outside the tree, and so are those saved by key: there the pages of the tokens were looked up by
hash only as far as they follow each other, as a match does it. Found by recorded histories (stepwell.testing.recorder).
"""

from __future__ import annotations

import pytest

from stepwell.hashing import prefix_hashes
from stepwell.index import Residency, Tier
from store_kit import PAGE_TOKENS, OpenRig, Rig, chain, stamps

PAGES = 40  # more than are hashed at once
GAP = 2
TOKENS = chain(1, PAGES)
KEYS = prefix_hashes(TOKENS, page_tokens=PAGE_TOKENS)


def save_behind_a_gap(rig: Rig) -> None:
    """Save the pages behind the first two by their keys."""
    rig.rows[: PAGES - GAP] = stamps(TOKENS)[GAP:]
    rig.store.save_keys(KEYS[GAP:], source=rig.pool[: PAGES - GAP], parent=KEYS[GAP - 1].tobytes())


def on_disk(rig: Rig) -> list[int]:
    return [i for i, key in enumerate(KEYS) if rig.store.state(key.tobytes())[Tier.DISK] is Residency.RESIDENT]


@pytest.mark.parametrize("restarts", [False, True], ids=["", "after a restart"])
def test_pages_behind_a_gap_are_forgotten(open_rig: OpenRig, restarts: bool) -> None:
    rig = open_rig(host=0, shared=0)
    save_behind_a_gap(rig)
    if restarts:
        rig.close()
        rig = open_rig(host=0, shared=0)
    assert on_disk(rig) == list(range(GAP, PAGES))
    assert rig.store.forget(TOKENS, keep=5 * PAGE_TOKENS) == PAGES - 5
    assert on_disk(rig) == [2, 3, 4]
    assert rig.store.forget(TOKENS) == 3
    assert on_disk(rig) == []
    rig.save(TOKENS[: GAP * PAGE_TOKENS])
    assert rig.load(TOKENS) == GAP
