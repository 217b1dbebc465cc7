"""Calls that overlapped set_epoch() crossed epochs: pages of the old weights were served, or published, under the new
ones.

set_epoch() changed the store's epoch before the index's. A match in between was labelled with the new one and found
pages of
the old one; a save that began before the change claimed its pages after it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.mover import SaveOutcome
from store_kit import PAGE_TOKENS, OpenRig, chain, stamps
from turned_kit import Turned


def test_a_match_within_a_change_of_epoch_is_not_served_after_it(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, epoch=1)
    tokens = chain(1, 8)
    rig.save(tokens)
    for when in ("before", "after"):
        found: list[Any] = []
        Turned(rig, "set_epoch", **{when: lambda found=found: found.append(rig.store.match(tokens))})
        rig.store.set_epoch(2)
        with found[0] as match:
            assert rig.store.load(match, into=rig.pool[: match.pages]).ok_pages == 0
        rig.store.set_epoch(1)


def test_pages_of_a_save_that_began_before_a_change_of_epoch_are_not_found_after_it(
    open_rig: OpenRig,
) -> None:
    rig = open_rig(disk=0, epoch=1)
    tokens = chain(1, 8)
    for when in ("before", "after"):
        Turned(rig, "claim_absent", **{when: lambda: rig.store.set_epoch(2)})
        result = rig.save(tokens)
        assert result.saved + result.present + result.pending + result.refused == 8
        with rig.store.match(tokens) as match:
            assert match.pages == 0, "bytes of the old weights were published under the new epoch"
        rig.store.clear()
        rig.store.set_epoch(1)


class StoppedError(Exception):
    """Stands for another thread that does not come further for now."""


def test_what_is_saved_within_a_change_of_epoch_is_not_found_after_it(open_rig: OpenRig) -> None:
    """The index has the new epoch, and the change is not over: a save that began before claims its pages now."""
    rig = open_rig(disk=0, epoch=1)
    tokens = chain(1, 8)

    def stop() -> None:
        raise StoppedError

    def begin_to_change() -> None:
        Turned(rig, "set_epoch", after=stop)
        with suppress(StoppedError):
            rig.store.set_epoch(2)

    Turned(rig, "claim_absent", before=begin_to_change)
    rig.save(tokens)
    rig.store.set_epoch(2)
    with rig.store.match(tokens) as match:
        assert match.pages == 0, "bytes of the old weights were published under the new epoch"


def test_keys_saved_before_a_change_of_epoch_are_not_found_after_it(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, epoch=1)
    tokens = chain(1, 8)
    keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS)
    rig.rows[:8] = stamps(tokens)
    Turned(rig, "claim_absent_keys", before=lambda: rig.store.set_epoch(2))
    outcome = rig.store.save_keys(keys, source=rig.pool[:8])
    assert (outcome == SaveOutcome.REFUSED).all()
    assert rig.store.probe(keys, lease=0).run == 0


def test_keys_found_before_a_change_of_epoch_are_not_loaded_after_it(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, epoch=1)
    tokens = chain(1, 8)
    rig.save(tokens)
    keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS)
    Turned(rig, "match_keys_and_pin", after=lambda: rig.store.set_epoch(2))
    assert not np.any(rig.store.load_keys(keys, into=rig.pool[:8]))
    assert rig.store.flush(30.0)
    assert rig.store.stats().tiers[Tier.SHARED.name.lower()].pinned == 0
