"""What drops pages (evict, forget, clear) retired their records on the caller's thread: on a disk that hangs, the
caller hung with it, an engine's scheduler for one. So did a save that had to evict.

Every test here ends only because the call does: a thread stands in the disk until the test lets it go on.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from restart_kit import left_by_a_death
from stepwell import room as room_module
from stepwell.index import Tier
from stepwell.testing.faults import inject, resume, wait_paused
from store_kit import BOTH, DISK_ONLY, Directories, OpenRig, Rig, chain

HANGS = "volume.retire"
LEAVE: dict[str, Callable[[Rig], int]] = {
    "evict": lambda rig: rig.store.evict(Tier.DISK, 3),
    "forget": lambda rig: rig.store.forget(chain(1, 3)),
    "clear": lambda rig: rig.store.clear(),
}
DROPS = pytest.mark.parametrize("leave", LEAVE.values(), ids=list(LEAVE))


@pytest.fixture(autouse=True)
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have who drops pages wait for a hundredth of what it does."""
    monkeypatch.setattr(room_module, "LEAVING_SECONDS", 0.1)


def owed(rig: Rig) -> int:
    return rig.store.stats().tiers["disk"].owed


@DROPS
def test_who_drops_pages_goes_on_and_they_are_gone(open_rig: OpenRig, leave: Callable[[Rig], int]) -> None:
    rig = open_rig(**DISK_ONLY, keeper=True)
    rig.save(chain(1, 3))
    with inject(HANGS, "pause", nth=1):
        assert leave(rig) == 3
        wait_paused(HANGS)
        assert rig.store.match(chain(1, 3)).pages == 0
        assert rig.pages(Tier.DISK) == 0
        assert owed(rig) == 3, "and it is said that the disk does not have it"
        assert leave(rig) == 0, "nobody waits a second time"
    rig.round()  # behind the one that stood in the disk
    assert owed(rig) == 0
    assert rig.store.stats().tiers["disk"].leaving == 0


@DROPS
def test_records_are_retired_when_the_call_returns(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    leave: Callable[[Rig], int],
) -> None:  # fmt: skip
    monkeypatch.setattr(room_module, "LEAVING_SECONDS", 30.0)
    rig = open_rig(**DISK_ONLY, keeper=True)
    rig.save(chain(1, 3))
    assert leave(rig) == 3
    assert owed(rig) == 0
    left = left_by_a_death(directories, tmp_path / "left")
    after = open_rig(left.config(**DISK_ONLY))
    assert after.pages(Tier.DISK) == 0
    after.close()


@DROPS
def test_what_a_crash_brings_back_is_what_was_owed(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, leave: Callable[[Rig], int]
) -> None:
    rig = open_rig(**DISK_ONLY, keeper=True)
    rig.save(chain(1, 3))
    with inject(HANGS, "pause", nth=1):
        leave(rig)
        wait_paused(HANGS)
        left = left_by_a_death(directories, tmp_path / "hung")
        after = open_rig(left.config(**DISK_ONLY))
        assert after.load(chain(1, 3)) == 3, "and their bytes are right"
        after.close()
    rig.round()
    left = left_by_a_death(directories, tmp_path / "mended")
    after = open_rig(left.config(**DISK_ONLY))
    assert after.pages(Tier.DISK) == 0
    after.close()


def test_a_slot_whose_record_stands_in_the_disk_is_nobodys(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, keeper=True)
    capacity = rig.store.stats().tiers["disk"].free
    rig.save(chain(1, 3))
    with inject(HANGS, "pause", nth=1):
        rig.store.clear()
        wait_paused(HANGS)
        assert rig.store.stats().tiers["disk"].free == capacity - 3
        assert rig.store.check() == ""
        assert rig.save(chain(2, 2)).saved == 2
        assert rig.load(chain(2, 2)) == 2
    rig.round()
    assert rig.store.stats().tiers["disk"].free == capacity - 2


def test_the_other_tiers_are_emptied_all_the_same(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH, keeper=True)
    rig.save(chain(1, 3))
    with inject("file.pwrite", "pause", nth=1):
        assert rig.store.clear(deadline=0.0) == 6
        assert rig.store.match(chain(1, 3)).pages == 0
        wait_paused("file.pwrite")
    rig.round()
    assert owed(rig) == 0


def test_a_save_that_finds_no_room_is_refused_within_its_bound(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, keeper=True)
    capacity = rig.store.stats().tiers["disk"].free
    rig.save(chain(1, capacity))
    with inject(HANGS, "pause", nth=1):
        refused = rig.save(chain(2, 2))
        assert (refused.saved, refused.refused) == (0, 2)
        wait_paused(HANGS)
        keys = np.arange(64, dtype=np.uint8).reshape(2, 32)
        rig.store.save_keys(keys, source=rig.pool[0:2])
    rig.round()
    assert rig.save(chain(2, 2)).saved == 2
    assert rig.load(chain(2, 2)) == 2


@DROPS
def test_records_that_the_disk_refuses_are_owed_and_tried_again(
    open_rig: OpenRig, leave: Callable[[Rig], int]
) -> None:
    rig = open_rig(**DISK_ONLY, keeper=True)
    rig.save(chain(1, 3))
    with inject(HANGS, "errno", value=errno.EIO):
        assert leave(rig) == 3
        assert owed(rig) == 3
        assert rig.store.stats().tiers["disk"].write_errors >= 3, "they count against the tier"
    assert rig.store._keeper is not None
    rig.store._keeper.stop()
    rig.store._room.owed._tried[Tier.DISK].retries.succeeded()  # its wait has passed
    rig.round()
    assert owed(rig) == 0


def test_close_goes_on_where_somebody_waits_for_a_round_that_never_comes(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell import store as store_module

    monkeypatch.setattr(store_module, "_ROUND_SECONDS", 0.1)
    monkeypatch.setattr(room_module, "LEAVING_SECONDS", 3600.0)
    rig = open_rig(**DISK_ONLY, keeper=True)
    rig.save(chain(1, 3))
    with inject(HANGS, "pause", nth=1):
        dropping = threading.Thread(target=rig.store.clear)
        dropping.start()
        wait_paused(HANGS)
        rig.close()
        dropping.join()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("sw-")]
        resume(HANGS)
    for thread in threads:
        thread.join()


def test_pages_that_are_dropped_while_the_store_is_used_are_never_served_wrong(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH, keeper=True)
    for number in range(40):
        rig.save(chain(number, 4))
        if number % 4 == 3:
            rig.store.clear()
        assert rig.load(chain(number, 4)) in (0, 4)
    rig.store.clear()
    assert rig.store.stats().tiers["disk"].resident == 0
    assert rig.store.check() == ""
