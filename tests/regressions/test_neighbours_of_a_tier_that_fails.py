"""A neighbour's files lie on the same medium as our tier's: what befalls the tier holds for them too.

A read of theirs that did not return kept every load behind it waiting for ever; while our tier was out of service its
directory was still read, for their pages; a tier that was reopened took its own volumes for a neighbour's; and a volume
of which one read had failed was passed by until it was removed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepwell import health
from stepwell.clock import ManualClock
from stepwell.health import STUCK_SECONDS
from stepwell.index import Tier
from stepwell.mover import Transfer
from stepwell.testing import faults
from stepwell.tiers.volumes import TierDirectory
from store_kit import Directories, OpenRig, Rig, chain, stamps

TIERS = pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])


def only(tier: Tier) -> dict[str, int]:
    return {"disk" if tier is Tier.SHARED else "shared": 0}


def start_load(reader: Rig, pages: int) -> Transfer:
    with reader.store.match(chain(1, pages)) as match:
        assert match.pages == pages
        return reader.store.load(match, into=reader.pool[:pages])


@TIERS
def test_a_neighbours_page_that_does_not_come_keeps_no_load_waiting(open_rig: OpenRig, tier: Tier) -> None:
    clock = ManualClock()
    owner, reader = open_rig(**only(tier)), open_rig(**only(tier), clock=clock, io_threads=1)
    owner.save(chain(1, 3))
    reader.save(chain(2, 3))
    reader.round()
    with faults.inject("foreign.read", "pause", nth=1):
        first = start_load(reader, 3)
        faults.wait_paused("foreign.read")
        second = start_load(reader, 3)
        reader.round()
        clock.advance(STUCK_SECONDS)
        reader.round()
        assert first.wait(10.0), "without a deadline of its own"
        assert second.wait(10.0)
        assert first.ok_pages == second.ok_pages == 0
        assert reader.store.stats().tiers[tier.name.lower()].state == "out"
        assert reader.load(chain(1, 3)) == 0, "what is on its way for ever is promised to nobody"
        assert reader.store.flush(10.0)
        reader.rows[:3] = 0xAB
        faults.resume("foreign.read")
    for transfer in (first, second):
        core = transfer._core_transfer
        assert core is not None
        assert core.wait(10.0)
    assert (reader.rows[:3] == 0xAB).all()
    reader.round()
    clock.advance(100.0)
    reader.round()
    reader.round()
    assert reader.load(chain(1, 3)) == 3
    assert reader.store.check() == ""


def test_a_sequence_goes_on_without_a_neighbours_page_that_does_not_come(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sequence_kit import prompt

    owner, reader = make_engine(), make_engine()
    tokens = prompt(1, 26)
    owner.cache(tokens)
    reader.store._tick()
    with faults.inject("foreign.read", "pause", nth=1):
        sequence = reader.open(tokens)
        faults.wait_paused("foreign.read")
        monkeypatch.setattr(health, "STUCK_SECONDS", 0.0)
        reader.store._tick()
        assert reader.store.flush(10.0)
        assert reader.store.device.wait([sequence]) == [], "nothing moves, so that it does not wait"
        assert (sequence.ready, sequence.loading) == (0, 0)
        sequence.close()
        faults.resume("foreign.read")
    while reader.store.stats().leases > 0:  # the copy that was given up keeps its lease until its call has returned
        pass


@TIERS
def test_neighbours_of_a_tier_that_is_out_of_service_are_not_read(open_rig: OpenRig, tier: Tier) -> None:
    owner, reader = open_rig(), open_rig()
    owner.save(chain(1, 3))
    reader.round()
    reader.store._health.take_out(tier, "a test")
    reader.store._tick_store()
    assert reader.load(chain(1, 3)) == 3, "the other tier's directory has them"
    owner.store.evict(Tier.SHARED if tier is Tier.DISK else Tier.DISK, 100)
    reader.store.evict(Tier.HOST, 100)
    reader.store._look_at_neighbours()
    before = reader.store.stats().neighbours
    assert reader.load(chain(1, 3)) == 0
    reader.store.probe(np.zeros((1, 32), np.uint8), lease=0.0)
    assert reader.store.stats().neighbours == before
    reader.store.reopen(tier)
    assert reader.load(chain(1, 3)) == 3


def test_what_is_queued_when_a_tier_goes_out_of_service_is_not_read(open_rig: OpenRig) -> None:
    owner, reader = open_rig(shared=0), open_rig(shared=0, io_threads=1)
    owner.save(chain(1, 3))
    reader.round()
    with faults.inject("mover.unit", "pause", nth=1):
        transfer = start_load(reader, 3)
        faults.wait_paused("mover.unit")
        reader.store._health.take_out(Tier.DISK, "a test")
        reader.store._tick_store()
        faults.resume("mover.unit")
    assert transfer.wait(10.0)
    assert transfer.ok_pages == 0
    neighbours = reader.store.stats().neighbours
    assert (neighbours.delivered, neighbours.refused, neighbours.stale) == (0, 0, 0)


@TIERS
def test_a_tier_that_was_reopened_has_no_neighbour_but_its_neighbours(open_rig: OpenRig, tier: Tier) -> None:
    owner, reader = open_rig(**only(tier)), open_rig(**only(tier))
    owner.save(chain(1, 3))
    reader.save(chain(2, 3))
    reader.store.reopen(tier)
    for _ in range(2):
        reader.round()
    neighbours = reader.store.stats().neighbours
    assert (neighbours.volumes, neighbours.pages) == (1, 3)
    ours = owner.store._tiers[tier].directory  # type: ignore[attr-defined]
    ours.scan()
    ours.touched()
    assert reader.load(chain(1, 3)) == 3
    reader.store._look_at_neighbours()
    reader.store._tiers[tier].directory.touched()  # type: ignore[attr-defined]  # tells
    assert len(ours.touched()) == 3, "its owner is told what was read"


def test_a_volume_that_could_not_be_read_is_tried_again(open_rig: OpenRig, directories: Directories) -> None:
    clock = ManualClock()
    owner, reader = open_rig(disk=0), open_rig(disk=0, clock=clock)
    owner.save(chain(1, 3))
    reader.round()
    with faults.inject("file.pread", "errno", value=errno.EIO):
        reader.store._look_at_neighbours()
    assert reader.store.stats().neighbours.volumes == 0
    assert reader.load(chain(1, 3)) == 0
    for _ in range(100):
        clock.advance(1.0)
        reader.store._look_at_neighbours()
    assert reader.load(chain(1, 3)) == 3
    assert np.array_equal(reader.rows[:3], stamps(chain(1, 3)))


def test_no_memory_while_a_load_is_begun_behind_a_copy_costs_that_load_alone(open_rig: OpenRig) -> None:
    owner, reader = open_rig(disk=0), open_rig(disk=0)
    owner.save(chain(1, 3))
    reader.round()
    with faults.inject("foreign.read", "pause", nth=1):
        transfer = start_load(reader, 3)
        faults.wait_paused("foreign.read")
        faults._core.fault_arm("mover.begin_after", "errno", 1, errno.ENOMEM)
        faults.resume("foreign.read")
        assert transfer.wait(10.0)
    assert transfer.ok_pages == 0
    assert reader.load(chain(1, 3)) == 3, "the store is not poisoned"


@TIERS
@pytest.mark.parametrize("step", ["open", "adopt_to_floor", "adopt", "close"])
def test_a_look_while_a_tier_is_reopened_takes_nothing_of_its_own_for_a_neighbours(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, tier: Tier, step: str
) -> None:
    lone = open_rig(**only(tier))
    lone.save(chain(1, 9))
    whole = getattr(TierDirectory, step)
    seen = []

    def look_before(directory: TierDirectory, *given: Any) -> Any:
        lone.store._look_at_neighbours()
        done = whole(directory, *given)
        lone.store._look_at_neighbours()
        seen.append(lone.store.stats().neighbours.volumes)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(TierDirectory, step, look_before)
        lone.store.reopen(tier)
    assert set(seen) == {0}
    lone.round()
    assert lone.store.stats().neighbours.volumes == 0
    assert lone.load(chain(1, 9)) == 9
