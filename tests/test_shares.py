"""How the processes of a directory share its budget: floors, orphans, who starts, who lives, who is one too many."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from directory_child import VOLUME, AmpleLimits, make_directory
from stepwell.errors import StepwellError, VolumeBusyError, VolumeError
from stepwell.testing.faults import inject, reached
from stepwell.tiers.directory import Full, HeldVolume, Machine
from stepwell.tiers.limits import Limit
from stepwell.tiers.locks import NotTaken, try_lock
from stepwell.tiers.volumes import KEEPER_LOCK_SECONDS, LEAVE_LOCK_SECONDS, ORPHAN_PATIENCE_NS, TierDirectory

Open = Callable[..., TierDirectory]
CHILD = Path(__file__).with_name("directory_child.py")


class Time:
    """A clock that all processes share, turned by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def machine(self) -> Machine:
        return Machine(boottime_ns=lambda: self.now, limits=AmpleLimits())


@pytest.fixture
def path() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    yield parent / "tier"
    shutil.rmtree(parent)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def open_directory(path: Path, time: Time) -> Iterator[Open]:
    opened: list[TierDirectory] = []

    def make(**config: object) -> TierDirectory:
        config.setdefault("machine", time.machine())
        directory = make_directory(str(config.pop("path", path)), "shared", **config)  # type: ignore[arg-type]
        directory.open()
        opened.append(directory)
        return directory

    yield make
    for directory in opened:
        directory.close()


def leave(open_directory: Open, count: int, **config: object) -> list[str]:
    """Leave orphans, as one that holds the whole directory and dies."""
    with open_directory(**config) as dead:
        for _ in range(count):
            assert isinstance(dead.grow(), HeldVolume)
        return [volume.volume_id for volume in dead.held]


def total(path: Path) -> int:
    return sum((path / name).stat().st_size for name in os.listdir(path) if name.startswith(("v-", "t-", "x-")))


def fill_up(directory: TierDirectory) -> int:
    """Take what lacks to the floor; return how many volumes were born for that."""
    before = directory.counts.born
    while directory.lacking_bytes > 0:
        assert isinstance(directory.grow(), HeldVolume)
    return directory.counts.born - before


def answer(directory: TierDirectory) -> int:
    """Give back what a neighbour wants, and return how many volumes that were."""
    given, wanted = 0, directory.wanted()
    while wanted > 0:
        wanted -= directory.held[0].total_bytes
        directory.give_back(directory.held[0])
        given += 1
    return given


# ---- who starts ------------------------------------------------------------------------------------------------------


def test_eight_that_have_come_before_one_adopts_each_get_an_eighth(open_directory: Open) -> None:
    leave(open_directory, 33, capacity=32)  # a volume takes a little less than was asked for
    group = [open_directory(capacity=32, floor=4) for _ in range(8)]
    for directory in group:
        directory.adopt()
        assert len(directory.held) in (4, 5)
    assert sum(len(directory.held) for directory in group) == 33
    assert sum(directory.counts.born for directory in group) == 0


def test_who_came_first_and_took_all_gives_seven_eighths_back_at_once(open_directory: Open) -> None:
    leave(open_directory, 33, capacity=32)
    first = open_directory(capacity=32, floor=4)
    assert len(first.adopt()) == 33
    others = [open_directory(capacity=32, floor=4) for _ in range(7)]
    for directory in others:
        assert directory.adopt() == []
        assert isinstance(directory.grow(), Full)
    assert answer(first) == 28
    assert sum(fill_up(directory) for directory in others) == 0
    assert [len(directory.held) for directory in (first, *others)] == [5] + [4] * 7


def test_a_process_takes_no_more_than_its_floor_before_it_has_looked_again(open_directory: Open) -> None:
    leave(open_directory, 4)
    first = open_directory(floor=1)
    assert len(first.adopt_to_floor()) == 1
    second = open_directory(floor=2)
    assert len(first.adopt()) == 1, "two are what the second lacks"
    assert len(second.adopt()) == 2


def test_only_one_of_its_fingerprint_takes_all_at_its_start(open_directory: Open) -> None:
    left = leave(open_directory, 4)
    assert {volume.volume_id for volume in open_directory(floor=1).adopt()} == set(left)


def test_one_that_has_come_and_not_asked_yet_is_left_its_floor(open_directory: Open) -> None:
    rich = open_directory(floor=1)
    assert isinstance(rich.grow(), HeldVolume)
    comes = open_directory(floor=2)
    assert isinstance(rich.grow(), HeldVolume)
    full = rich.grow()
    assert isinstance(full, Full)
    assert full.reason == "a neighbour below its floor comes first"
    for _ in range(2):
        assert isinstance(comes.grow(), HeldVolume)


def test_a_volume_that_a_neighbour_is_filling_is_not_counted_as_lacking(open_directory: Open) -> None:
    rich, seen = open_directory(floor=1), []

    class Nosy(AmpleLimits):
        def available(self, path: str) -> Limit:
            rich.scan()
            seen.append([record.held_bytes for record in rich.view.neighbours])
            return super().available(path)

    comes = open_directory(floor=1, machine=Machine(limits=Nosy()))
    assert isinstance(comes.grow(), HeldVolume)
    assert seen[0] == [comes.volume_bytes]
    rich.scan()
    assert [record.held_bytes for record in rich.view.neighbours] == [comes.held_bytes]


def test_a_floor_above_its_own_capacity_reserves_no_more_than_that(open_directory: Open) -> None:
    open_directory(capacity=2, floor=2)
    rich = open_directory(floor=1)
    assert rich.scan().neighbours[0].floor_bytes == 2 * rich.volume_bytes
    for _ in range(2):
        assert isinstance(rich.grow(), HeldVolume)
    assert isinstance(rich.grow(), Full)


# ---- one too many ----------------------------------------------------------------------------------------------------


def test_one_too_many_is_full_takes_nobodys_floor_and_gets_its_own_when_one_ends(
    open_directory: Open, path: Path
) -> None:
    group = [open_directory(floor=1, fingerprint="ab"[n % 2]) for n in range(4)]
    for directory in group:
        assert isinstance(directory.grow(), HeldVolume)
    surplus = open_directory(floor=1, fingerprint="c")
    full = surplus.grow()
    assert isinstance(full, Full)
    assert full.reason == "the directory is full"
    assert [answer(directory) for directory in group] == [0] * 4
    group[0].close()
    assert isinstance(surplus.grow(), HeldVolume), "the orphan of another model makes room"
    assert total(path) <= 4 * VOLUME


# ---- who lives -------------------------------------------------------------------------------------------------------


def test_an_orphan_is_left_a_second_to_who_may_start_and_then_taken(open_directory: Open, time: Time) -> None:
    lives = open_directory(floor=1)
    assert isinstance(lives.grow(), HeldVolume)
    left = leave(open_directory, 2)
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS - 1
    lives.scan()
    assert lives.adopt_left() == []
    time.now += 1
    lives.scan()
    assert [volume.volume_id for volume in lives.adopt_left()] == left
    assert lives.scan().left_ids == ()
    assert lives.adopt_left() == []


def test_one_below_its_floor_takes_orphans_at_once(open_directory: Open) -> None:
    lives = open_directory(floor=1)
    [left] = leave(open_directory, 1)
    taken = lives.grow()
    assert isinstance(taken, HeldVolume)
    assert taken.volume_id == left


def test_the_living_take_each_their_part_of_what_is_left(open_directory: Open, time: Time) -> None:
    group = [open_directory(capacity=12, floor=1) for _ in range(3)]
    for directory in group:
        assert isinstance(directory.grow(), HeldVolume)
    leave(open_directory, 9, capacity=12)
    for directory in group:
        directory.scan()
    time.now += ORPHAN_PATIENCE_NS
    for directory in group:
        directory.scan()
    assert [len(directory.adopt_left()) for directory in group] == [3, 3, 3]


def test_what_is_left_is_not_taken_from_one_that_lacks_its_floor(open_directory: Open, time: Time) -> None:
    lives = open_directory(floor=1)
    assert isinstance(lives.grow(), HeldVolume)
    leave(open_directory, 3)
    stopped = open_directory(floor=2, fingerprint="b")  # and says nothing any more
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS
    lives.scan()
    assert len(lives.adopt_left()) == 1, "two volumes are kept for it"
    stopped.close()
    lives.scan()
    assert len(lives.adopt_left()) == 2


def test_orphans_of_another_model_are_not_taken(open_directory: Open, time: Time) -> None:
    lives = open_directory(floor=1)
    leave(open_directory, 2, fingerprint="b")
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS
    assert lives.scan().left_ids == ()
    assert lives.adopt_left() == []


def test_orphans_are_seen_anew_where_one_was_taken_meanwhile(open_directory: Open, time: Time) -> None:
    lives = open_directory(floor=1)
    [left] = leave(open_directory, 1)
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS
    other = open_directory(floor=1)
    [volume] = other.adopt()
    lives.scan()
    other.give_back(volume)
    assert lives.scan().left_ids == (), f"{left} is an orphan since now"


# ---- nobody waits for one that was stopped ---------------------------------------------------------------------------


def test_a_living_process_waits_little_for_who_was_stopped_with_the_directory_lock(
    open_directory: Open, path: Path, time: Time
) -> None:
    waited: list[float] = []
    clock = [0.0]

    class Turned:
        def monotonic(self) -> float:
            return clock[0]

        def wall_ns(self) -> int:
            return 1

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds

    machine = Machine(clock=Turned(), wait=wait, boottime_ns=lambda: time.now, limits=AmpleLimits())
    lives = open_directory(floor=1, machine=machine)
    volume = lives.grow()
    assert isinstance(volume, HeldVolume)
    leave(open_directory, 1)
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS
    lives.scan()
    lock = try_lock(f"{path}/directory.lock")
    assert not isinstance(lock, NotTaken)
    try:
        assert lives.wanted() == 0
        assert lives.adopt_left() == []
        with pytest.raises(VolumeBusyError, match=f"pid {os.getpid()} "):
            lives.grow(lock_timeout=KEEPER_LOCK_SECONDS)
        lives.give_back(volume)  # needs no lock
        assert sum(waited) < 3 * KEEPER_LOCK_SECONDS
        waited.clear()
        lives.close()
        assert sum(waited) < LEAVE_LOCK_SECONDS + 0.1
    finally:
        lock.close()
    assert open_directory().scan().neighbours == ()


# ---- one directory by several names ----------------------------------------------------------------------------------


def check_one(open_directory: Open, path: Path, alias: str) -> None:
    """Two stores that name a directory each in its own way are two processes of one directory."""
    first = open_directory(floor=1)
    assert isinstance(first.grow(), HeldVolume)
    second = open_directory(path=alias, floor=1)
    assert second.adopt() == []
    assert isinstance(second.grow(), HeldVolume)
    assert second.scan().held_by_others == 1
    assert len(second.view.neighbours) == 1
    while isinstance(first.grow(), HeldVolume):
        assert total(path) <= 4 * VOLUME
    assert isinstance(second.grow(), Full)
    assert {v.volume_id for v in first.held}.isdisjoint(v.volume_id for v in second.held)


def test_a_relative_path_names_the_same_directory(
    open_directory: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    check_one(open_directory, path, path.name)


def test_a_path_through_a_symbolic_link_names_the_same_directory(open_directory: Open, path: Path) -> None:
    link = path.parent / "link"
    link.symlink_to(path.parent)
    check_one(open_directory, path, f"{link}/{path.name}")
    link.with_name("directly").symlink_to(path)
    with pytest.raises(VolumeError, match="symbolic link"):
        open_directory(path=link.with_name("directly"))


def in_namespaces(options: list[str], script: str, **values: str) -> subprocess.CompletedProcess[str]:
    """Run Python in namespaces of its own, as a container has them."""
    return subprocess.run(
        ["unshare", *options, sys.executable, "-c", script, *values.values()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=CHILD.parent,
    )


def needs_namespaces(*options: str) -> None:
    try:
        done = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        pytest.skip(f"unshare cannot be run: {error}")
    if done.returncode != 0:
        pytest.skip(f"no namespaces of one's own here: {done.stderr.strip()}")


TAKE = """
import json, os, sys
from directory_child import make_directory
from stepwell.tiers.directory import HeldVolume
directory = make_directory(sys.argv[1], "shared", floor=1)
directory.open()
adopted = len(directory.adopt())
grown = isinstance(directory.grow(), HeldVolume)
view = directory.scan()
print(json.dumps([os.getpid(), adopted, grown, view.held_by_others, [r.pid for r in view.neighbours]]))
sys.stdout.flush()
"""


def test_a_process_of_another_pid_namespace_is_a_neighbour_like_any(open_directory: Open, path: Path) -> None:
    needs_namespaces("--pid", "--fork")
    first = open_directory(floor=1)
    assert isinstance(first.grow(), HeldVolume)
    # It is process 1 of its own; here another has that number.
    done = in_namespaces(["--pid", "--fork"], TAKE + "directory.close()", path=str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[1, 0, true, 1, [{os.getpid()}]]\n"
    # The same that ends as it is: nothing of it is alive, and its volume an orphan.
    done = in_namespaces(["--pid", "--fork"], TAKE + "os._exit(0)", path=str(path))
    assert done.stdout == f"[1, 1, true, 1, [{os.getpid()}]]\n", done.stderr
    assert first.scan().neighbours == ()
    assert (first.view.held_by_others, first.view.orphans) == (0, 2)
    assert len(first.adopt()) == 2


def test_two_of_the_same_pid_in_two_namespaces_do_not_take_each_other_for_themselves(
    open_directory: Open, path: Path
) -> None:
    needs_namespaces("--pid", "--fork")
    script = TAKE + (
        "import subprocess\n"
        "done = subprocess.run(['unshare', '--pid', '--fork', sys.executable, '-c', sys.argv[2], sys.argv[1]],"
        " capture_output=True, text=True, timeout=50)\n"
        "print(done.stdout, end='')\n"
    )
    done = in_namespaces(["--pid", "--fork"], script, path=str(path), inner=TAKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 0, true, 0, []]\n[1, 0, true, 1, [1]]\n"


def test_a_bind_mount_names_the_same_directory(open_directory: Open, path: Path) -> None:
    needs_namespaces("--mount")
    first = open_directory(floor=1)
    assert isinstance(first.grow(), HeldVolume)
    alias = path.parent / "alias"
    alias.mkdir()
    mount = "import subprocess, sys\nsubprocess.run(['mount', '--bind', sys.argv[2], sys.argv[1]], check=True)\n"
    done = in_namespaces(["--mount"], mount + TAKE, alias=str(alias), path=str(path))
    if "mount:" in done.stderr:
        pytest.skip(f"no bind mounts here: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f", 0, true, 1, [{os.getpid()}]]\n")
    first.scan()
    assert (first.view.held_by_others, first.view.orphans) == (0, 1)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_what_adopting_took_before_it_failed_is_held(open_directory: Open, time: Time) -> None:
    lives = open_directory(floor=1)
    assert isinstance(lives.grow(), HeldVolume)
    leave(open_directory, 2)
    lives.scan()
    time.now += ORPHAN_PATIENCE_NS
    lives.scan()
    calls = 0
    with inject("file.open", "count"):
        lives.scan()


        calls = reached("file.open")
    with inject("file.open", "errno", nth=calls + 2, value=5), pytest.raises(StepwellError):
        lives.adopt_left()
    assert len(lives.held) == 2
    lives.scan()
    assert len(lives.adopt_left()) == 1
