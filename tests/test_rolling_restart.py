"""Stores of one directory, round by round: who gives, who takes over, who is held up by whom."""

from __future__ import annotations

import logging
import os

import pytest

from stepwell.clock import ManualClock
from stepwell.config import SharedTier, StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Residency, Tier
from stepwell.tiers import volume_tier, volumes
from stepwell.tiers.locks import NotTaken, try_lock
from stepwell.tiers.volume_tier import VolumeTier
from store_kit import GEOMETRY, PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain

PAGES = 8


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orphans are taken at the next look after the one that saw them."""
    monkeypatch.setattr(volumes, "ORPHAN_PATIENCE_NS", 0)


def go_on(clock: ManualClock, *rigs: Rig) -> None:
    clock.advance(1.0)
    for rig in rigs:
        rig.round()


def tier_of(rig: Rig) -> VolumeTier:
    tier = rig.store._tiers[Tier.SHARED]
    assert isinstance(tier, VolumeTier)
    return tier


def held(rig: Rig) -> int:
    return len(tier_of(rig).members)


def fill(rig: Rig, clock: ManualClock, volumes: int) -> int:
    """Save chains until it holds so many volumes, pages in each; return how many chains there are."""
    number = 0
    left = 12  # chains, in the last volume
    while left:
        assert rig.save(chain(number, PAGES)).refused == 0
        number += 1
        left -= held(rig) == volumes
        if held(rig) < volumes and rig.store._index.claimable(Tier.SHARED) < 2 * PAGES:
            go_on(clock, rig)
    return number


def is_whole(rig: Rig, number: int) -> bool:
    return rig.store.cached(chain(number, PAGES), tiers=(Tier.SHARED,)) == PAGES * PAGE_TOKENS


def found(rig: Rig, chains: int) -> int:
    return sum(rig.load(chain(number, PAGES)) for number in range(chains))


def test_a_new_process_has_its_share_after_one_round_of_the_old_and_all_when_that_has_ended(
    open_rig: OpenRig, clock: ManualClock, no_patience: None
) -> None:
    old = open_rig(disk=0, clock=clock)
    chains = fill(old, clock, 4)
    resident = old.pages(Tier.SHARED)
    new = open_rig(disk=0, clock=clock)
    assert held(new) == 0
    go_on(clock, old, new)
    assert (held(old), held(new)) == (3, 1)
    assert found(new, chains) > 0, "what was given back is warm"
    assert new.save(chain(1000, PAGES)).refused == 0
    assert old.save(chain(1001, PAGES)).refused == 0
    old.close()
    go_on(clock, new)
    go_on(clock, new)
    assert held(new) == 4
    assert found(new, chains) >= 0.9 * resident
    assert new.load(chain(1001, PAGES)) == PAGES


def test_all_that_several_lack_is_given_back_in_one_round(
    open_rig: OpenRig, directories: Directories, clock: ManualClock
) -> None:
    def config(share: int) -> StoreConfig:
        shared = SharedTier(
            8 * VOLUME_BYTES, str(directories.shared), volume_bytes=VOLUME_BYTES, share=share * VOLUME_BYTES
        )
        return StoreConfig(geometry=GEOMETRY, shared=shared)

    old = open_rig(config(1), clock=clock)
    fill(old, clock, 8)
    others = [open_rig(config(3), clock=clock), open_rig(config(2), clock=clock)]
    go_on(clock, old)
    assert held(old) == 3
    go_on(clock, *others)
    assert [held(rig) for rig in others] == [3, 2]


def test_the_living_serve_what_the_dead_left_without_needing_room(
    open_rig: OpenRig, clock: ManualClock, no_patience: None
) -> None:
    lives, dies = open_rig(disk=0, clock=clock), open_rig(disk=0, clock=clock)
    assert dies.save(chain(1, PAGES)).refused == 0
    dies.close()
    go_on(clock, lives)
    go_on(clock, lives)
    assert lives.load(chain(1, PAGES)) == PAGES
    assert lives.store.check() == ""


def test_a_volume_that_a_lease_kept_is_used_again_when_nobody_wants_it(open_rig: OpenRig, clock: ManualClock) -> None:
    old = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    chains = fill(old, clock, 2)
    whole = [number for number in range(chains) if is_whole(old, number)]
    matches = [old.store.match(chain(number, PAGES)[:PAGE_TOKENS]) for number in whole]
    new = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    go_on(clock, old, new)
    assert (held(old), held(new)) == (2, 0), "each volume keeps pages that a match has pinned"
    assert sum(member.is_leaving for member in tier_of(old).members) == 1
    gone = [number for number in whole if not is_whole(old, number)]
    assert gone, "what no match has pinned has left"
    claimable = old.store._index.claimable(Tier.SHARED)
    new.close()
    go_on(clock, old)
    assert not any(member.is_leaving for member in tier_of(old).members)
    assert old.store._index.claimable(Tier.SHARED) >= claimable + len(gone)
    for match in matches:
        match.close()
    # The pages that left are not there for whoever comes next either.
    keys = [key.tobytes() for key in prefix_hashes(chain(gone[0], PAGES), page_tokens=PAGE_TOKENS)]
    assert old.store.state(keys[0])[Tier.SHARED] == Residency.RESIDENT
    assert old.store.state(keys[-1])[Tier.SHARED] == Residency.ABSENT
    old.close()
    later = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    assert later.store.state(keys[0])[Tier.SHARED] == Residency.RESIDENT
    assert later.store.state(keys[-1])[Tier.SHARED] == Residency.ABSENT


def test_a_round_goes_on_beside_one_that_was_stopped_with_the_directory_lock(
    open_rig: OpenRig, directories: Directories, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_tier, "BUSY_SECONDS", 0.0)
    rig = open_rig(disk=0)
    assert rig.save(chain(1, PAGES)).refused == 0
    lock = try_lock(f"{directories.shared}/directory.lock")
    assert not isinstance(lock, NotTaken)
    number = 2
    try:
        while free := rig.store._index.claimable(Tier.SHARED):
            assert rig.save(chain(number, min(free, PAGES))).refused == 0
            number += 1
        with caplog.at_level(logging.WARNING, "stepwell"):
            for _ in range(3):
                tier_of(rig)._full_at = None
                rig.round()
        assert caplog.text.count(f"directory.lock was held for 0.1 s by pid {os.getpid()} ") == 1
        assert rig.save(chain(number, PAGES)).refused == 0, "what was there has left its own volume"
        assert rig.load(chain(number, PAGES)) == PAGES
    finally:
        lock.close()
    tier_of(rig)._full_at = None
    rig.round()
    rig.store._room.make(Tier.SHARED, 2 * PAGES)
    assert rig.save(chain(1000, PAGES)).refused == 0
