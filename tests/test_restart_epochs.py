"""Pages of other epochs outlive a restart as they outlive a change of the epoch: unreachable, the first to leave, and
found again once the epoch is theirs."""

from __future__ import annotations

import logging

import pytest
from msgspec import structs

from stepwell.config import StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, Tokens, assert_whole, chain, stamps

each_tier = pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK], ids=str)


def one_tier(directories: Directories, tier: Tier, *, volumes: int = 1, epoch: int = 0) -> StoreConfig:
    sizes = {"shared": 0, "disk": 0, tier.name.lower(): volumes * VOLUME_BYTES}
    return directories.config(**sizes, epoch=epoch, low_watermark=0.0)


def save(rig: Rig, tokens: Tokens) -> int:
    """Save pages as the weights of the store's epoch computed them; return how many are not refused."""
    pages = tokens.size // PAGE_TOKENS
    rig.rows[:pages] = stamps(tokens) ^ rig.store.epoch
    result = rig.store.save(tokens, source=rig.pool[:pages])
    assert result.transfer.wait()
    return result.saved + result.present


def load(rig: Rig, tokens: Tokens) -> int:
    """Load what is cached: it must be what the weights of the store's epoch computed. Return how many pages came."""
    transfer = rig.start_load(tokens)
    assert transfer.wait()
    assert (rig.rows[: transfer.ok_pages] == stamps(tokens)[: transfer.ok_pages] ^ rig.store.epoch).all()
    return transfer.ok_pages


def fill(rig: Rig, tier: Tier, *, first: int) -> list[int]:
    """Save chains of four pages, the first of that number, until the tier is full. Return their numbers."""
    numbers: list[int] = []
    while rig.store.stats().tiers[tier.name.lower()].free >= 4:
        numbers.append(first + len(numbers))
        assert save(rig, chain(numbers[-1], 4)) == 4
    return numbers


def order(rig: Rig, tier: Tier) -> list[bytes]:
    """Return the keys of a tier's pages of whatever epoch, the first to leave first."""
    index = rig.store._index
    ids, slots = index.pin_resident(tier, None, 1 << 20)
    key_of = {slot: label[0] for slot, label in zip(slots.tolist(), index.labels(ids), strict=True)}
    index.unpin_pages(ids)
    return [key_of[slot] for slot in index.rank_order(tier).tolist()]


@each_tier
def test_pages_of_an_epoch_are_found_after_restarts_under_others(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    rig = open_rig(one_tier(directories, tier, epoch=1))
    assert save(rig, chain(1, 4)) == 4
    rig.store.set_epoch(2)
    assert save(rig, chain(2, 4)) == 4
    rig.close()
    for epoch in (1, 3, 2):
        rig = open_rig(one_tier(directories, tier, epoch=epoch))
        assert load(rig, chain(1, 4)) == (4 if epoch == 1 else 0)
        assert load(rig, chain(2, 4)) == (4 if epoch == 2 else 0)
        for other in (1, 2, 1):
            rig.store.set_epoch(other)
            assert load(rig, chain(other, 4)) == 4
            assert load(rig, chain(3 - other, 4)) == 0
        rig.close()


@each_tier
def test_a_page_of_two_epochs_is_two_pages_after_a_restart(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    rig = open_rig(one_tier(directories, tier, epoch=1))
    for epoch in (1, 2, 3):
        rig.store.set_epoch(epoch)
        assert save(rig, chain(1, 4)) == 4
    rig.close()
    rig = open_rig(one_tier(directories, tier, epoch=2))
    assert rig.pages(tier) == 12
    for epoch in (2, 1, 3, 2):
        rig.store.set_epoch(epoch)
        assert load(rig, chain(1, 4)) == 4
    assert rig.store.verify().damaged == 0


@each_tier
def test_recovered_pages_of_other_epochs_leave_before_any_of_this_one(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    """Also where they were used later than all of these."""
    rig = open_rig(one_tier(directories, tier, epoch=1))
    assert save(rig, chain(1, 4)) == 4
    rig.store.set_epoch(2)
    old = fill(rig, tier, first=100)
    rig.close()
    rig = open_rig(one_tier(directories, tier, epoch=1))
    new = range(200, 200 + len(old))
    for number in new:
        assert save(rig, chain(number, 4)) == 4
    assert load(rig, chain(1, 4)) == 4
    assert [load(rig, chain(number, 4)) for number in new] == [4] * len(new)
    rig.store.set_epoch(2)
    assert sum(load(rig, chain(number, 4)) for number in old) <= 4


@each_tier
def test_a_process_that_draws_an_epoch_at_each_start_is_never_refused_a_page(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    """Nobody names such an epoch again: what is of it gives way, however much has come together."""
    rig = open_rig(one_tier(directories, tier, volumes=2, epoch=1))
    kept = chain(1, 4)
    assert save(rig, kept) == 4
    rig.close()
    for epoch in range(2, 8):
        rig = open_rig(one_tier(directories, tier, volumes=2, epoch=epoch))
        rig.round()
        capacity = rig.store.stats().tiers[tier.name.lower()].capacity
        for number in range(capacity // 8):
            assert save(rig, chain(epoch * 100 + number, 4)) == 4
        assert all(load(rig, chain(epoch * 100 + number, 4)) == 4 for number in range(capacity // 8))
        assert_whole(rig.store)
        rig.close()
    assert len(directories.volumes("meta" if tier is Tier.DISK else "vol")) <= 2


@each_tier
def test_pages_of_other_epochs_in_several_volumes_leave_in_the_order_of_their_use(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    rig = open_rig(one_tier(directories, tier, volumes=3, epoch=1))
    while len(rig.store._tiers[tier].members) < 3:  # type: ignore[attr-defined]
        rig.store._tiers[tier].grow(rig.store._index, 10_000)
    numbers = fill(rig, tier, first=100)
    for number in numbers[::3]:  # whatever volume they are in
        assert load(rig, chain(number, 4)) == 4
    rig.store.set_epoch(2)
    expected = order(rig, tier)
    rig.close()
    rig = open_rig(one_tier(directories, tier, volumes=3, epoch=2))
    assert order(rig, tier) == expected
    rig.store.set_epoch(1)
    assert order(rig, tier) == expected
    first = {key.tobytes() for key in prefix_hashes(chain(numbers[1], 4), page_tokens=PAGE_TOKENS)}
    assert set(expected[:4]) == first


@each_tier
def test_pages_of_other_epochs_are_counted_apart_from_those_that_are_found(
    directories: Directories, open_rig: OpenRig, tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(one_tier(directories, tier, epoch=1))
    save(rig, chain(1, 4))
    rig.store.set_epoch(2)
    save(rig, chain(1, 3))
    rig.close()
    with caplog.at_level(logging.WARNING, "stepwell"):
        rig = open_rig(one_tier(directories, tier, epoch=1))
    stats = rig.store.stats().tiers[tier.name.lower()]
    assert (stats.resident, stats.recovered, stats.cold) == (7, 4, {"epoch": 3})
    assert "epoch: 3 pages are of another epoch than 1; kept for it until room is needed" in caplog.text
    assert rig.store.reopen(tier).pages == 4


@each_tier
def test_forget_passes_by_recovered_pages_of_other_epochs_and_clear_does_not(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    rig = open_rig(one_tier(directories, tier, epoch=1))
    for epoch in (1, 2):
        rig.store.set_epoch(epoch)
        save(rig, chain(1, 4))
    rig.close()
    rig = open_rig(one_tier(directories, tier, epoch=2))
    assert rig.store.forget(chain(1, 4)) == 4
    rig.store.set_epoch(1)
    assert load(rig, chain(1, 4)) == 4
    rig.store.set_epoch(3)
    assert rig.store.clear() == 4
    rig.close()
    rig = open_rig(one_tier(directories, tier, epoch=1))
    assert load(rig, chain(1, 4)) == 0


@each_tier
def test_an_adopted_orphan_has_its_pages_of_other_epochs_too(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    """A living process takes the volume of one that has ended: of the pages that it reads as a neighbour's until then,
    those of an epoch that neither is in are found once it is set."""
    config = structs.replace(one_tier(directories, tier, volumes=2), staging=VOLUME_BYTES)
    writer = open_rig(structs.replace(config, epoch=1))
    save(writer, chain(1, 4))
    writer.store.set_epoch(2)
    save(writer, chain(1, 3))
    living = open_rig(structs.replace(config, epoch=2))
    save(living, chain(7, 4))
    writer.close()
    living.store._tiers[tier].grow(living.store._index, 10_000)
    assert living.pages(tier) == 11
    assert load(living, chain(1, 4)) == 3
    assert load(living, chain(7, 4)) == 4
    living.store.set_epoch(1)
    assert load(living, chain(1, 4)) == 4
    assert load(living, chain(7, 4)) == 0
