"""Stores and the ways in which processes begin: fork, spawn, forkserver, exec; parents that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from fork_child import CHILDREN, config_of, held, serve
from stepwell.tiers.volume_tier import VolumeTier
from store_kit import Directories, OpenRig, chain

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_opens_a_store_of_its_own_beside_its_parents(
    open_rig: OpenRig, directories: Directories, method: str
) -> None:
    rig = open_rig(config_of(str(directories.shared)), keeper=True)
    rig.save(chain(1, 8))
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=serve, args=(str(directories.shared), 2, there))
    child.start()
    try:
        its_volumes, loaded = here.recv()
        assert loaded == 8
        assert its_volumes
        assert set(its_volumes).isdisjoint(held(rig))
        assert rig.load(chain(1, 8)) == 8
        here.send("end")
    finally:
        child.join()
    assert child.exitcode == 0
    assert rig.load(chain(1, 8)) == 8
    for number in range(3, 10):
        assert rig.save(chain(number, 8)).refused == 0
    here.close()
    there.close()
    child.close()
    # What multiprocessing keeps for the next child would be a leak to the test's own check.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["fork", "multiprocessing", "exec", "subprocess"])
def test_children_that_outlive_a_killed_parent_keep_nothing_of_its_store(
    open_rig: OpenRig, directories: Directories, kind: str
) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_child.py")), kind, str(directories.shared)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids: set[int] = set()
    running: set[int] = set()
    try:
        saved = False
        while not (saved and len(running) == CHILDREN):
            word, _, pid = parent.stdout.readline().strip().partition(" ")
            assert word in ("child", "runs", "saved"), "the parent ended"
            saved |= word == "saved"
            pids |= {int(pid)} if word == "child" else set()
            running |= {int(pid)} if word == "runs" else set()
        assert running == pids
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        rig = open_rig(config_of(str(directories.shared)))
        # All that there is, at once, and warm.
        tier = next(tier for tier in rig.store._tiers.values() if isinstance(tier, VolumeTier))
        assert sorted(held(rig)) == sorted(path.name[2:34] for path in directories.volumes("vol"))
        assert tier.directory.view.held_by_others == 0
        assert tier.directory.view.neighbours == ()
        assert rig.load(chain(1, 8)) == 8
        assert rig.store.verify().damaged == 0
        for pid in pids:
            assert os.readlink(f"/proc/{pid}/exe")  # it lives: of one that has ended there is none
    finally:
        if parent.returncode is None:
            parent.kill()
            parent.wait()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        parent.stdout.read()  # until they have ended
        parent.stdout.close()
