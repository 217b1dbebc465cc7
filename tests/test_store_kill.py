"""What a death leaves: every page that is found again is right, and every page that was acknowledged is found again."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store_child import CHAINS, MOST_PAGES, kill_config
from store_kit import Directories, OpenRig, chain

HERE = Path(__file__).parent
KILLS_A_DIRECTORY = 10


class Zygote:
    """A process that forks a saver for each call. Its pipes carry lines; see store_child.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "store_child.py"), "zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, seed: int, directories: Directories, lines: int) -> list[tuple[int, int]]:
        """Start a saver, kill it when it has acknowledged so many saves, and return all that it acknowledged."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed} {directories.shared} {directories.disk}\n")
        self._process.stdin.flush()
        acknowledged: list[tuple[int, int]] = []
        pid = 0
        is_killed = False
        for line in self._process.stdout:
            words = line.split()
            if words[0] == "pid":
                pid = int(words[1])
            elif words[0] == "ended":
                assert int(words[1]) == -signal.SIGKILL, f"the saver ended by itself (seed {seed})"
                return acknowledged
            else:
                acknowledged.append((int(words[0]), int(words[1])))
            if pid and len(acknowledged) >= lines and not is_killed:
                os.kill(pid, signal.SIGKILL)
                is_killed = True
        raise AssertionError("the zygote has gone")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def wait_for_locks(directories: Directories) -> None:
    """Return once nobody holds a volume of the dead.

    The saver's keeper may have been starting the reader of an old LMDB environment: between fork and exec that process
    has the locks too, and it was not killed.
    """
    for lock in directories.volumes("lock"):
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.mark.parametrize("world", range(10))
def test_after_a_kill_every_hit_is_right_and_what_was_acknowledged_is_found(
    directories: Directories, zygote: Zygote, open_rig: OpenRig, world: int
) -> None:
    """10 kills in each of 10 directories, at instants that follow from the seed and from how the two processes run."""
    rng = random.Random(world)
    promised: dict[int, int] = {}
    for kill in range(KILLS_A_DIRECTORY):
        for number, pages in zygote.kill_one(world * 1000 + kill, directories, rng.randrange(1, 30)):
            promised[number] = max(promised.get(number, 0), pages)
        wait_for_locks(directories)
        rig = open_rig(kill_config(str(directories.shared), str(directories.disk)), slots=MOST_PAGES)
        found = {number: rig.load(chain(number, MOST_PAGES)) for number in range(CHAINS)}
        lost = {number: (found[number], pages) for number, pages in promised.items() if found[number] < pages}
        assert lost == {}, f"world {world} kill {kill}: (found, acknowledged) {lost}"
        assert rig.store.check() == ""
        for tier in rig.store.stats().tiers.values():
            assert tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined == tier.capacity
        rig.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_truncating_a_volume_under_its_users_kills_nobody_and_serves_nothing_wrong(
    directories: Directories, when: str
) -> None:
    """faulthandler takes SIGBUS before or after the store does."""
    done = subprocess.run(
        [sys.executable, str(HERE / "store_child.py"), "truncate", when, str(directories.shared), "400"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    words = done.stdout.split()
    assert int(words[1]) > 0, f"nothing was loaded: {done.stdout}"
    assert int(words[3]) > 0, f"no damage was met: {done.stdout}"
