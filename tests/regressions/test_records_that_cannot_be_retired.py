"""A record that could not be written when its page left (EIO, ENOSPC) stayed as it was, and the slot counted as free.

A restart found the page again, one that was forgotten too: for as long as no other page was written to that slot.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from restart_kit import left_by_a_death
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.errors import VolumeBusyError
from stepwell.hashing import prefix_hashes
from stepwell.health import MOST_PROBE_SECONDS
from stepwell.index import Residency, Tier
from stepwell.testing.faults import inject, resume, wait_paused
from stepwell.testing.pages import flip
from store_kit import (
    DISK_ONLY,
    PAGE_TOKENS,
    SHARED_ONLY,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    chain,
    stamps,
)
from test_rolling_restart import fill, go_on, held

ONLY = {Tier.SHARED: SHARED_ONLY, Tier.DISK: DISK_ONLY}
TIERS = pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])


@contextmanager
def records_refused(error: int = errno.EIO, *, nth: int = 0) -> Iterator[None]:
    """Let records of pages that leave not be written."""
    with inject("volume.retire", "errno", nth=nth, value=error):
        yield


def owed(rig: Rig, tier: Tier) -> int:
    return rig.store.stats().tiers[tier.name.lower()].owed


def free(rig: Rig, tier: Tier) -> int:
    return rig.store.stats().tiers[tier.name.lower()].free


def mend(rig: Rig, clock: ManualClock) -> None:
    """Let the back-off of every tier pass, and have its round."""
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()


@contextmanager
def left_by_a_death_of(directories: Directories, tmp_path: Path, open_rig: OpenRig, tier: Tier) -> Iterator[Rig]:
    """Open what a death of all processes leaves at this instant."""
    left = left_by_a_death(directories, tmp_path / "left")
    rig = open_rig(left.config(**ONLY[tier]))
    yield rig
    rig.close()


LEAVE: dict[str, Callable[[Rig, Tier], int]] = {
    "evict": lambda rig, tier: rig.store.evict(tier, 3),
    "forget": lambda rig, tier: rig.store.forget(chain(1, 3)),
    "clear": lambda rig, tier: rig.store.clear(),
}


@TIERS
@pytest.mark.parametrize("leave", LEAVE.values(), ids=list(LEAVE))
def test_a_page_that_left_is_not_found_after_a_crash(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, tier: Tier, leave: Callable[[Rig, Tier], int]
) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 3))
    capacity = free(rig, tier) + 3
    with records_refused(errno.ENOSPC):
        assert leave(rig, tier) == 3, "they are gone all the same"
        assert rig.store.match(chain(1, 3)).pages == 0
        assert (owed(rig, tier), free(rig, tier)) == (3, capacity - 3), "nobody gets a slot whose record stays"
        assert rig.store.check() == ""
    mend(rig, clock)
    assert (owed(rig, tier), free(rig, tier)) == (0, capacity)
    with left_by_a_death_of(directories, tmp_path, open_rig, tier) as after:
        assert after.store.match(chain(1, 3)).pages == 0
        assert after.pages(tier) == 0


@TIERS
def test_a_page_that_another_was_saved_beside_is_not_found_after_a_crash(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, tier: Tier
) -> None:
    """A slot that was not used again is where the record stood for good."""
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 2))
    with records_refused(nth=1):
        assert rig.store.forget(chain(1, 2)) == 2
    assert rig.save(chain(2, 4)).saved == 4
    mend(rig, clock)
    with left_by_a_death_of(directories, tmp_path, open_rig, tier) as after:
        assert after.load(chain(2, 4)) == 4
        assert after.pages(tier) == 4


@TIERS
def test_a_save_that_finds_no_room_takes_no_slot_whose_record_stays(open_rig: OpenRig, tier: Tier) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    capacity = free(rig, tier)
    rig.save(chain(1, capacity))
    with records_refused():
        refused = rig.save(chain(2, 2))
        assert (refused.saved, refused.refused) == (0, 2)
        assert refused.full is not None
        assert "records of the pages before" in refused.full.why
    mend(rig, clock)
    assert rig.save(chain(2, 2)).saved == 2
    assert rig.load(chain(2, 2)) == 2


@TIERS
def test_nothing_more_is_evicted_in_vain(open_rig: OpenRig, tier: Tier) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    capacity = free(rig, tier)
    rig.save(chain(1, capacity))
    with records_refused():
        rig.save(chain(2, 2))
        for number in range(3, 20):
            rig.save(chain(number, 2))
            rig.round()
        assert rig.pages(tier) == capacity - 2, "the clock stands: it was tried once"
        clock.advance(1.0)
        rig.save(chain(20, 2))
        rig.save(chain(21, 2))
        assert rig.pages(tier) == capacity - 3, "then one page at a time"
    mend(rig, clock)
    assert owed(rig, tier) == 0
    assert rig.save(chain(20, 8)).saved == 8, "and as before once a record could be written"


@TIERS
def test_records_are_tried_ever_more_seldom(open_rig: OpenRig, tier: Tier) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 1))
    tries: list[float] = []
    with records_refused():
        rig.store.forget(chain(1, 1))
        began, before = clock.monotonic(), _core.fault_reached("volume.retire")
        for _ in range(2 * 200):
            rig.round()
            if (now := _core.fault_reached("volume.retire")) > before:
                tries.append(clock.monotonic() - began)
                before = now
            clock.advance(0.5)
    assert tries == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0]
    mend(rig, clock)
    assert owed(rig, tier) == 0


def test_a_record_that_stays_for_good_keeps_no_other_waiting(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 3))
    with records_refused():
        rig.store.forget(chain(1, 3))
    with records_refused(nth=1):
        rig.round()
        assert owed(rig, Tier.DISK) == 3
        clock.advance(1.0)
        rig.round()
    assert owed(rig, Tier.DISK) == 0


@TIERS
def test_a_quarantined_page_is_not_found_after_a_crash_once_its_slot_is_free(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, tier: Tier
) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 3))
    assert flip(directories.shared if tier is Tier.SHARED else directories.disk, stamps(chain(1, 3))[-1].tobytes())
    assert rig.store.verify().damaged == 1
    capacity = rig.store.stats().tiers[tier.name.lower()].capacity
    with records_refused():
        mend(rig, clock)
        found = rig.store.stats().tiers[tier.name.lower()]
        assert (found.quarantined, found.free) == (1, capacity - 3)
    mend(rig, clock)
    assert free(rig, tier) == capacity - 2
    with left_by_a_death_of(directories, tmp_path, open_rig, tier) as after:
        assert after.pages(tier) == 2
        assert after.load(chain(1, 3)) == 2


def test_a_save_whose_record_could_not_be_taken_back_is_not_found_after_a_crash(
    open_rig: OpenRig, directories: Directories, tmp_path: Path
) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    capacity = free(rig, Tier.DISK)
    with inject("volume.after_publish", "pause", nth=1):
        transfer = rig.save(chain(1, 1), wait=False).transfer
        wait_paused("volume.after_publish")
        _core.fault_arm("file.pwrite", "errno", 0, errno.EIO)  # neither the ring nor the record can be written
        resume("volume.after_publish")
        assert transfer.wait(10.0)
        assert transfer.ok_pages == 0
        assert (owed(rig, Tier.DISK), free(rig, Tier.DISK)) == (1, capacity - 1)
    mend(rig, clock)
    assert free(rig, Tier.DISK) == capacity
    with left_by_a_death_of(directories, tmp_path, open_rig, Tier.DISK) as after:
        assert after.pages(Tier.DISK) == 0


@TIERS
def test_a_store_that_closes_tries_once_more(open_rig: OpenRig, tier: Tier) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 3))
    with records_refused():
        rig.store.forget(chain(1, 3))
        rig.round()
    rig.close()
    assert open_rig(**ONLY[tier]).pages(tier) == 0


@TIERS
@pytest.mark.parametrize("still", [True, False], ids=["that fails still", "that was mended"])
def test_what_was_forgotten_is_not_found_in_a_tier_that_is_reopened(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, tier: Tier, still: bool
) -> None:
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock)
    rig.save(chain(1, 3))
    rig.save(chain(2, 2))
    with records_refused():
        rig.store.forget(chain(1, 3))
        if still:
            assert rig.store.reopen(tier).pages == 2
    if not still:
        assert rig.store.reopen(tier).pages == 2
    assert owed(rig, tier) == (3 if still else 0)
    assert rig.store.match(chain(1, 3)).pages == 0
    assert rig.load(chain(2, 2)) == 2
    mend(rig, clock)
    with left_by_a_death_of(directories, tmp_path, open_rig, tier) as after:
        assert after.pages(tier) == 2


@TIERS
def test_a_tier_that_cannot_be_reopened_yet_is_whole(open_rig: OpenRig, tier: Tier) -> None:
    """Its pages have left the index then, with their records: these are retired before another page has the slot."""
    clock = ManualClock()
    rig = open_rig(**ONLY[tier], clock=clock, close_timeout=0.1)
    rig.save(chain(1, 3))
    rig.save(chain(2, 2))
    with rig.store.match(chain(2, 2)) as match:
        assert match.pages == 2
        with records_refused(), pytest.raises(VolumeBusyError):
            rig.store._tiers[tier].reopen(rig.store._index)  # type: ignore[attr-defined]
    assert rig.store.check() == ""
    mend(rig, clock)
    assert owed(rig, tier) == 0


def given_back(open_rig: OpenRig, clock: ManualClock, *, still: bool) -> tuple[Rig, Rig, list[bytes]]:
    """Have one process give a volume to another, after pages of each of its volumes were forgotten and their records
    were not retired. still: they cannot be retired while it is given back either."""
    old = open_rig(disk=0, clock=clock)
    chains = fill(old, clock, 4)
    forgotten: list[bytes] = []
    gone = 0
    with records_refused():
        for number in range(0, chains, 2):
            gone += old.store.forget(chain(number, 8), keep=16)
            keys = prefix_hashes(chain(number, 8), page_tokens=PAGE_TOKENS)
            forgotten += [key.tobytes() for key in keys[4:]]
        old.round()
        clock.advance(1.0)
        old.round()
        assert owed(old, Tier.SHARED) == gone > 0
        new = open_rig(disk=0, clock=clock)
        clock.advance(1.0)
        if still:
            old.round()
    if not still:
        old.round()  # two seconds after the last try is when the next one is due
    clock.advance(0.5)
    new.round()
    assert (held(old), held(new)) == (3, 1)
    assert 0 < owed(old, Tier.SHARED) < gone, "but those of the volume that was given back"
    return old, new, forgotten


def test_a_volume_that_is_given_back_is_tried_once_more(open_rig: OpenRig) -> None:
    clock = ManualClock()
    old, new, forgotten = given_back(open_rig, clock, still=False)
    assert new.pages(Tier.SHARED) > 0
    state = new.store._index.state
    assert all(state(key, 1)[Tier.SHARED] == Residency.ABSENT for key in forgotten)
    mend(old, clock)
    assert owed(old, Tier.SHARED) == 0


def test_a_volume_is_given_back_whether_or_not_its_records_can_be_retired(open_rig: OpenRig) -> None:
    clock = ManualClock()
    old, _, _ = given_back(open_rig, clock, still=True)
    assert old.store.check() == ""
    mend(old, clock)


def test_a_volume_that_stays_after_all_is_used_where_its_records_are_retired(
    open_rig: OpenRig, directories: Directories, tmp_path: Path
) -> None:
    clock = ManualClock()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    chains = fill(rig, clock, 2)
    matches = [rig.store.match(chain(number, 8)[:PAGE_TOKENS]) for number in range(chains)]
    other = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    resident = rig.pages(Tier.SHARED)
    go_on(clock, rig)
    left = resident - rig.pages(Tier.SHARED)
    assert left > 0, "what no match has pinned has left the volume that is to be given back"
    other.close()
    with records_refused():
        go_on(clock, rig)
        assert owed(rig, Tier.SHARED) == left
    mend(rig, clock)
    assert owed(rig, Tier.SHARED) == 0
    for match in matches:
        match.close()
    after = open_rig(left_by_a_death(directories, tmp_path / "left").config(shared=2 * VOLUME_BYTES, disk=0))
    assert after.pages(Tier.SHARED) == resident - left
    after.close()
