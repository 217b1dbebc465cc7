"""A tier whose files fail keeps nobody waiting, and comes back, also where it is not the plan that names it.

A call that hung ended the transfers whose plans named the tier. A load that asked it as its second source, and one that
waited for a neighbour's page, waited for ever. And a tier that a failed sync took out was tried with the volume that
the sync had failed on, for ever.
"""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

from stepwell import rounds
from stepwell.clock import ManualClock
from stepwell.config import DiskTier, StoreConfig
from stepwell.errors import VolumeBusyError
from stepwell.health import MOST_PROBE_SECONDS
from stepwell.index import Tier
from stepwell.testing.faults import inject, resume, wait_paused
from stepwell.tiers.volume_tier import VolumeTier
from store_kit import (
    GEOMETRY,
    PAGE_BYTES,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    assert_unpinned,
    assert_whole,
    chain,
)
from test_degrade import flip, look_until_stuck, state
from test_store_faults import run_script

MANY = 24


def until_ended(rig: Rig) -> None:
    """Wait until the last transfer has ended, also of those that were given up."""
    mover = rig.store._copies.mover
    assert mover is not None
    assert mover.drain(-1.0)


def test_a_second_source_that_does_not_return_ends_the_load(open_rig: OpenRig, directories: Directories) -> None:
    clock = ManualClock()
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES, clock=clock)
    rig.save(chain(1, 4))
    flip(directories, "vol", np.array([1]), chain(1, 4))
    with inject("file.pread", "pause", nth=1):
        transfer = rig.start_load(chain(1, 4))
        wait_paused("file.pread")
        look_until_stuck(rig, clock)
        assert state(rig) == "out"
        assert transfer.wait(5.0), "shared memory alone was its source; the disk was asked in its place"
        assert transfer.ok.tolist() == [True, False, True, True]
        assert rig.store.flush(5.0)
        resume("file.pread")
        until_ended(rig)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def test_a_neighbours_file_that_does_not_answer_ends_the_load_that_waits_for_it(open_rig: OpenRig) -> None:
    clock = ManualClock()
    owner = open_rig(shared=0, disk=4 * VOLUME_BYTES)
    rig = open_rig(shared=0, disk=4 * VOLUME_BYTES, clock=clock)
    owner.save(chain(1, 4))
    rig.round()
    with inject("foreign.read", "pause", nth=1):
        transfer = rig.start_load(chain(1, 4))
        wait_paused("foreign.read")
        look_until_stuck(rig, clock)
        assert state(rig) == "out"
        assert transfer.wait(5.0)
        assert transfer.ok_pages == 0
        assert rig.store.flush(5.0)
        resume("foreign.read")
        until_ended(rig)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def power(directories: Directories) -> StoreConfig:
    disk = DiskTier(4 * VOLUME_BYTES, str(directories.disk), volume_bytes=VOLUME_BYTES, durability="power")
    return StoreConfig(geometry=GEOMETRY, disk=disk)


@pytest.mark.parametrize("volumes", [1, 3])
def test_a_durable_tier_that_a_failed_sync_took_out_comes_back_by_itself(
    open_rig: OpenRig, directories: Directories, volumes: int
) -> None:
    clock = ManualClock()
    rig = Rig(power(directories), clock=clock)
    try:
        rig.save(chain(0, 2))
        for number in range(1, volumes):
            rig.save(chain(100 + number, 40))
            rig.round()
            clock.advance(3.0)
            clock.advance(31.0)
            rig.round()
        with inject("file.sync", "errno", nth=1, value=errno.EIO):
            assert not rig.save(chain(1, MANY)).transfer.ok.any()
        rig.store._tick_store()
        assert state(rig) == "out"
        for _ in range(3):
            clock.advance(MOST_PROBE_SECONDS)
            rig.round()
        assert state(rig) == "serving"
        assert rig.load(chain(0, 2)) == 2, "what was acknowledged is there"
        assert rig.save(chain(1, MANY)).transfer.ok.all()
        assert_whole(rig.store)
    finally:
        rig.close()


def test_an_exception_while_pages_are_settled_costs_pages_and_not_the_store(
    directories: Directories, no_leaks: None
) -> None:
    with_power = Rig(power(directories))
    for nth in (1, 2, 3):
        with inject("mover.after_commit", "errno", nth=nth, value=errno.ENOMEM):
            with_power.save(chain(nth, 3))
        assert with_power.save(chain(nth, 3)).transfer.ok.all()
        assert with_power.load(chain(nth, 3)) == 3
    assert with_power.store.stats().failed_jobs == 3
    assert_whole(with_power.store)
    with_power.close()


def test_what_a_hung_call_kept_alive_goes_when_it_returns(open_rig: OpenRig) -> None:
    rig = open_rig(host=16 * PAGE_BYTES, shared=0, disk=VOLUME_BYTES, close_timeout=0.0)
    rig.save(chain(1, 4))
    with inject("file.pread", "pause", nth=1):
        rig.start_load(chain(1, 4))
        wait_paused("file.pread")
        rig.close()
        assert rounds.LEFT_BEHIND
        closers = [thread for thread in threading.enumerate() if thread.name.startswith("sw-close-")]
        resume("file.pread")
        for closer in closers:
            closer.join()
    assert not rounds.LEFT_BEHIND


def test_a_page_forgotten_after_a_refused_reopen_does_not_come_back(
    open_rig: OpenRig, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(shared=0, disk=VOLUME_BYTES, clock=ManualClock())
    rig.save(chain(1, 4))
    rig.save(chain(2, 4))
    tier = rig.store._tiers[Tier.DISK]
    assert isinstance(tier, VolumeTier)
    held = []
    monkeypatch.setattr(tier, "_stamp_recency_now", lambda _: held.append(rig.store.match(chain(1, 4))))
    with pytest.raises(VolumeBusyError):
        tier.reopen(rig.store._index)
    monkeypatch.undo()
    held[0].close()
    assert rig.load(chain(1, 4)) == 4
    rig.store.forget(chain(2, 4))
    rig.close()
    again = open_rig(shared=0, disk=VOLUME_BYTES)
    assert again.load(chain(2, 4)) == 0
    assert again.load(chain(1, 4)) == 4


@pytest.mark.parametrize("point", ["file.pread", "file.pwrite"])
def test_a_call_that_returns_while_the_interpreter_ends_aborts_no_process(
    directories: Directories, open_rig: OpenRig, point: str
) -> None:
    script = (
        "import atexit, msgspec; rig.store._config = msgspec.structs.replace(rig.store._config, close_timeout=0.0)\n"
        "from stepwell.testing.faults import wait_paused\nfrom stepwell import _core\n"
        "rig.save(chain(1, 4)); rig.store.evict(Tier.SHARED, 4)\n"
        f"_core.fault_arm('{point}', 'pause', 1, 0)\n"
        f"rig.start_load(chain(1, 4)) if '{point}' == 'file.pread' else rig.save(chain(2, 4), wait=False)\n"
        f"wait_paused('{point}'); rig.close(); atexit.register(_core.fault_clear)\n"
    )
    done = run_script(script, directories)
    assert done.returncode == 0, done.stderr
    assert open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES).load(chain(1, 4)) == 4
