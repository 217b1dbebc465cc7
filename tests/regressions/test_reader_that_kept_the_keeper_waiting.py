"""Who adopted disk volumes gave nothing back while old LMDB environments were read.

The keeper waited for the process that reads one: half a second each on a quiet machine, four where others computed, ten
where it hung; 32 volumes one after the other in one round. Meanwhile a neighbour below its floor waited, and so did
each save that asked for room.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest

from stepwell.clock import ManualClock
from stepwell.index import Tier
from stepwell.tiers import disk
from stepwell.tiers.disk import DiskVolumes
from stepwell.tiers.lmdb_index import VolumeIndex
from store_kit import VOLUME_BYTES, Directories, OpenRig, Rig, chain

HANGS = (sys.executable, "-S", "-c", "import signal; signal.pause()")


def disk_of(rig: Rig) -> DiskVolumes:
    tier = rig.store._tiers[Tier.DISK]
    assert isinstance(tier, DiskVolumes)
    return tier


def go_on(clock: ManualClock, *rigs: Rig) -> None:
    clock.advance(1.0)
    for rig in rigs:
        rig.round()


def test_a_reader_that_hangs_keeps_no_round_waiting_and_no_volume_from_being_given_back(
    open_rig: OpenRig, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    sizes = {"shared": 0, "disk": 2 * VOLUME_BYTES}
    first = open_rig(**sizes, clock=clock)
    number = 0
    while len(disk_of(first).members) < 2:
        assert first.save(chain(number, 8)).refused == 0
        number += 1
        go_on(clock, first)
    first.save(chain(number, 8))
    go_on(clock, first)
    first.close()

    with monkeypatch.context() as patched:
        patched.setattr(disk, "VolumeIndex", partial(VolumeIndex, reader=HANGS))
        second = open_rig(**sizes, clock=clock)
        assert len(disk_of(second).members) == 2
        for _ in range(5):
            go_on(clock, second)
        reading = disk_of(second)._opening
        assert reading is not None
        assert reading.is_running, "one is being read, as long as that takes"
        assert disk_of(second)._indexes == {}
        neighbour = open_rig(**sizes, clock=clock)
        go_on(clock, second, neighbour)
        assert [len(disk_of(rig).members) for rig in (second, neighbour)] == [1, 1]
        second.close()
        neighbour.close()
        assert not reading.is_running
    assert list(directories.disk.glob("*-old")), "what was not read is left to the next holder"

    third = open_rig(**sizes, clock=clock)
    while len(disk_of(third)._indexes) < 2:  # each is read at last
        go_on(clock, third)
        os.sched_yield()
    assert not list(directories.disk.glob("*-old"))
