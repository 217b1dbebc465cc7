"""Processes of one tier directory, stopped or killed at every call of the file layer."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from child_kit import DIRECTORY_CHILD, Child
from directory_child import VOLUME, AmpleLimits, make_directory
from stepwell.errors import VolumeBusyError
from stepwell.tiers.directory import HeldVolume, Machine
from stepwell.tiers.volumes import PATIENCE_NS, TierDirectory

# After a death, a starving process is served within so many rounds of: owners answer, the starving
# one asks.
ROUNDS = 3


@pytest.fixture(scope="module")
def poor() -> Iterator[Child]:
    child = Child(DIRECTORY_CHILD, "worker")
    yield child
    child.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Child]:
    child = Child(DIRECTORY_CHILD, "zygote")
    yield child
    child.close()


@pytest.fixture(params=["shared", "disk"])
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base() -> Iterator[Path]:
    # For both media: the protocol is the same on every file system, and in memory a call costs
    # less.
    path = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def total(path: Path) -> int:
    sizes = 0
    for name in os.listdir(path):
        if name[:2] in ("v-", "t-", "x-"):
            try:
                sizes += (path / name).lstat().st_size
            except FileNotFoundError:
                continue  # Removed by a living process meanwhile.
    return sizes


def locked_by(pid: int, path: Path) -> set[str]:
    """Return the ids of the volumes whose lock a stopped process holds, as the kernel sees it."""
    names = {
        (path / name).stat().st_ino: name for name in os.listdir(path) if name.endswith(".lock")
    }
    held = set()
    for entry in os.listdir(f"/proc/{pid}/fdinfo"):
        for line in Path(f"/proc/{pid}/fdinfo/{entry}").read_text().splitlines():
            # "lock:	1: FLOCK  ADVISORY  WRITE 1234 fd:00:5678 0 EOF"
            fields = line.split()
            if fields and fields[0] == "lock:" and fields[2] == "FLOCK":
                held.add(names.get(int(fields[6].split(":")[-1]), ""))
    return {name[2:34] for name in held if name.startswith("v-")}


def ids(directory: TierDirectory) -> set[str]:
    return {volume.volume_id for volume in directory.held}


def assert_tidy(path: Path, processes: int) -> None:
    names = sorted(os.listdir(path))
    assert [name for name in names if name[:2] in ("t-", "x-")] == []
    whole = {".lock", ".vol"}, {".lock", ".meta", ".pages"}
    for volume_id in {name[2:34] for name in names if name.startswith("v-")}:
        assert {name[34:] for name in names if name.startswith(f"v-{volume_id}")} in whole, names
    assert len([name for name in names if name.startswith("p-")]) == 2 * processes


def full_directory(path: Path, medium: str) -> TierDirectory:
    """Fill a directory of four volumes: two held by the one returned, two orphans.

    Its floor is one. One orphan is of its fingerprint, the other is not.
    """
    with make_directory(str(path), medium, fingerprint="b") as other:
        assert isinstance(other.grow(), HeldVolume)
    rich = make_directory(str(path), medium)
    rich.open()
    for _ in range(3):
        assert isinstance(rich.grow(), HeldVolume)
    rich.give_back(rich.held[-1])
    return rich


def answer(rich: TierDirectory) -> None:
    """Give back what a neighbour wants."""
    while rich.wanted() > 0:
        rich.give_back(rich.held[0])


class Sweep:
    """Rounds of: a full directory, a victim struck at its n-th call, and what must hold then."""

    def __init__(self, base: Path, medium: str, poor: Child, zygote: Child) -> None:
        self.base, self.medium, self.poor, self.zygote = base, medium, poor, zygote

    def begin(self, nth: int) -> None:
        self.path = self.base / str(nth)
        self.rich = full_directory(self.path, self.medium)

    def spawn(self, nth: int, action: str) -> None:
        path = str(self.path)
        self.zygote.send("spawn", path=path, medium=self.medium, nth=nth, action=action)

    def open_poor(self, *, lock_timeout: float) -> dict[str, Any]:
        return self.poor.ask(
            "open",
            path=str(self.path),
            medium=self.medium,
            fingerprint="c",
            lock_timeout=lock_timeout,
        )

    def serve(self) -> bool:
        """Let the poor one ask while the rich one answers; return whether it got its volume."""
        self.open_poor(lock_timeout=5.0)
        for _ in range(ROUNDS):
            held = self.poor.ask("grow")["held"]
            assert total(self.path) <= 4 * VOLUME
            if held:
                break
            answer(self.rich)
        assert ids(self.rich).isdisjoint(held)
        return bool(held)

    def end(self) -> None:
        self.rich.scan()
        assert_tidy(self.path, 2)
        self.rich.close()
        self.poor.ask("close")
        shutil.rmtree(self.path)


def test_a_process_stopped_at_any_call_harms_nobody_and_its_death_frees_what_it_held(
    base: Path, medium: str, poor: Child, zygote: Child
) -> None:
    sweep, busy = Sweep(base, medium, poor, zygote), 0
    for nth in range(1, 1000):
        sweep.begin(nth)
        sweep.spawn(nth, "stop")
        victim = zygote.receive()
        if victim["outcome"] != "stopped":
            assert victim == {"outcome": "exited", "code": 0}
            sweep.rich.close()
            break
        # Meanwhile whoever comes is served, or told that the directory is busy, and by whom.
        asked = sweep.open_poor(lock_timeout=0.0)
        held: list[str] = []
        if "busy" in asked:
            busy += 1
            assert f"pid {victim['pid']} " in asked["busy"]
            if busy % 20 == 1:  # who lives goes on
                assert sweep.rich.wanted() == 0
                assert sweep.rich.adopt_left() == []
                with pytest.raises(VolumeBusyError, match=f"pid {victim['pid']} "):
                    sweep.rich.grow(lock_timeout=0.0)
        else:
            poor.ask("grow")
            answer(sweep.rich)
            held = poor.ask("grow")["held"]
        assert total(sweep.path) <= 4 * VOLUME
        owners = [ids(sweep.rich), set(held), locked_by(victim["pid"], sweep.path)]
        assert sum(len(owned) for owned in owners) == len(set().union(*owners)), owners
        assert zygote.ask("end")["outcome"] == "killed"
        assert sweep.serve(), f"not served after a stop at {nth}"
        sweep.end()
    assert nth > 100, "the scenario has hardly begun"
    assert 0 < busy < nth, "stopped both with and without the directory lock"


def test_an_owner_that_is_stopped_is_passed_over_and_keeps_what_it_holds(base: Path, medium: str) -> None:
    now = [1_000_000]
    machine = Machine(boottime_ns=lambda: now[0], limits=AmpleLimits())
    stopped, path = Child(DIRECTORY_CHILD, "worker"), base / "tier"
    try:
        stopped.ask("open", path=str(path), medium=medium, capacity=5)
        for _ in range(3):
            held = stopped.ask("grow")["held"]
        with make_directory(str(path), medium, capacity=5, machine=machine) as second:
            for _ in range(2):
                assert isinstance(second.grow(), HeldVolume)
            with make_directory(str(path), medium, capacity=5, machine=machine, fingerprint="b") as poor:
                stopped.process.send_signal(signal.SIGSTOP)
                assert not isinstance(poor.grow(), HeldVolume)
                answer(second)
                assert not isinstance(poor.grow(), HeldVolume), "it is the turn of the one that is stopped"
                now[0] += PATIENCE_NS
                answer(second)
                assert isinstance(poor.grow(), HeldVolume)
                assert total(path) <= 5 * VOLUME
                stopped.process.send_signal(signal.SIGCONT)
                assert stopped.ask("answer") == {"answer": 0, "held": held}
    finally:
        stopped.process.send_signal(signal.SIGCONT)
        stopped.close()


def test_a_process_killed_while_others_work_leaves_budget_owners_and_names_in_order(
    base: Path, medium: str, poor: Child, zygote: Child
) -> None:
    # Every call is struck above; here it is the others' work at the same time that counts, so a
    # sample is enough.
    sweep = Sweep(base, medium, poor, zygote)
    for nth in range(1, 1000, 7):
        sweep.begin(nth)
        sweep.spawn(nth, "kill")
        is_served = sweep.serve()
        victim = zygote.receive()
        assert total(sweep.path) <= 4 * VOLUME
        assert is_served or sweep.serve(), f"not served after a kill at {nth}"
        sweep.end()
        if victim["outcome"] != "killed":
            assert victim["code"] == 0
            break
    assert nth > 100, "the scenario has hardly begun"


def holds_a_lock(pid: int) -> bool:
    """Whether a process has a lock file open."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").endswith(".lock"):
                return True
        except FileNotFoundError:  # closed since
            continue
    return False


def test_a_forked_child_keeps_no_lock_of_a_parent_that_is_killed(base: Path, medium: str) -> None:
    parent, path = Child(DIRECTORY_CHILD, "worker"), base / "tier"
    parent.ask("open", path=str(path), medium=medium)
    volume_id = parent.ask("grow")["held"][0]
    forked = parent.ask("fork")["answer"]
    try:
        with make_directory(str(path), medium) as directory:
            assert directory.adopt() == []
            parent.process.send_signal(signal.SIGKILL)
            parent.process.wait()
            while holds_a_lock(forked):  # it may not have run at all since it was forked
                os.sched_yield()
            assert Path(f"/proc/{forked}").exists()
            assert [volume.volume_id for volume in directory.adopt()] == [volume_id]
            assert directory.view.neighbours == ()
    finally:
        os.kill(forked, signal.SIGKILL)
        parent.close()


def test_the_end_of_a_forked_child_harms_nothing(base: Path, medium: str) -> None:
    parent, path = Child(DIRECTORY_CHILD, "worker"), base / "tier"
    try:
        parent.ask("open", path=str(path), medium=medium)
        held = parent.ask("grow")["held"]
        assert parent.ask("fork_and_end")["answer"] == 0
        with make_directory(str(path), medium) as directory:
            assert directory.adopt() == []
            assert len(directory.view.neighbours) == 1
        assert parent.ask("scan")["held"] == held
        assert parent.ask("grow")["answer"] == "grown"
    finally:
        parent.close()


def test_processes_that_come_and_go_at_once_keep_the_budget(base: Path, medium: str) -> None:
    path, workers = base / "tier", [Child(DIRECTORY_CHILD, "worker") for _ in range(3)]
    path.mkdir(mode=0o700)
    try:
        for round_ in range(12):
            for number, worker in enumerate(workers):
                name = "ab"[(round_ + number) % 2]
                worker.send("open", path=str(path), medium=medium, fingerprint=name)
                for do in ("adopt", "grow", "answer", "grow", "give", "answer", "grow", "scan"):
                    worker.send(do)
            held: list[str] = []
            for worker in workers:
                for _ in range(9):
                    last = worker.receive()
                    assert total(path) <= 4 * VOLUME
                assert last["answer"]["total"] <= 4 * VOLUME
                held += last["held"]
            assert len(held) == len(set(held))
    finally:
        for worker in workers:
            worker.close()
    with make_directory(str(path), medium) as directory:
        directory.adopt()
        assert_tidy(path, 1)
