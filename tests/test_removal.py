"""What gc removes, what it never removes, and what happens where others are at work or it is killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_kit import DIRECTORY_CHILD, Child
from directory_child import make_directory
from stepwell import _core, inspection, removal
from stepwell.cli import main
from stepwell.clock import ManualClock
from stepwell.errors import StepwellUsageError, VolumeBusyError, VolumeError
from stepwell.testing.faults import inject
from stepwell.tiers.locks import try_lock
from store_kit import Directories
from volume_kit import FINGERPRINT, Volume

HERE = Path(__file__).parent
ALL = removal.Selection(orphans=True)


@pytest.fixture
def place(directories: Directories) -> Path:
    return directories.shared


@pytest.fixture(params=["shared", "disk"])
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(DIRECTORY_CHILD, "worker")
    yield child
    child.close()


class Collector:
    """A process that forks removals (removal_child.py)."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "removal_child.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def send(self, path: Path, *, kill: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"path": str(path), "kill": kill}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def collectors() -> Iterator[list[Collector]]:
    both = [Collector(), Collector()]
    yield both
    for collector in both:
        collector.close()


def orphans(place: Path, medium: str, count: int) -> list[str]:
    """Leave volumes of a process that has closed its directory."""
    with make_directory(str(place), medium, capacity=8, floor=count) as directory:
        for _ in range(count):
            directory.grow()
        return [volume.volume_id for volume in directory.held]


def remove(place: Path, selection: removal.Selection = ALL, **options: Any) -> removal.Removed:
    return removal.remove(removal.plan_removal(str(place), selection, **options), **options)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


# ---- what goes -------------------------------------------------------------------------------------------------------


def test_without_yes_nothing_is_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [orphan] = orphans(place, "shared", 1)
    before = names(place)
    assert main(["gc", str(place), "--orphans"]) == 0
    assert names(place) == before
    out = capsys.readouterr().out
    assert f"remove volume {orphan}" in out
    assert "add --yes" in out
    assert main(["gc", str(place), "--yes"]) == 0  # nothing is chosen
    assert names(place) == before
    assert main(["gc", str(place), "--orphans", "--yes"]) == 0
    assert names(place) == ["directory.lock"]
    assert "freed" in capsys.readouterr().out


def test_orphans_go_and_what_a_living_process_holds_stays(place: Path, medium: str, child: Child) -> None:
    dead = orphans(place, medium, 2)
    child.ask("open", path=str(place), medium=medium, capacity=8, fingerprint="b")
    held = [child.ask("grow")["held"][0], *child.ask("grow")["held"][1:]]
    size = sum(path.stat().st_size for path in place.glob("v-*") if path.name[2:34] in dead)
    removed = remove(place)
    assert sorted(removed.volumes) == sorted(dead)
    assert removed.nbytes == size
    assert removed.failed == ()
    left = inspection.inspect_directory(str(place))
    assert sorted(volume.volume_id for volume in left.volumes) == sorted(held)
    assert left.is_well
    assert child.ask("scan")["answer"] == {"total": left.total_bytes, "orphans": 0, "unusable": 0}


def test_what_the_dead_left_half_done_goes_without_being_chosen(place: Path, child: Child) -> None:
    [orphan] = orphans(place, "shared", 1)
    child.ask("open", path=str(place), medium="shared")
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    ids = [f"{number:032x}" for number in range(5)]
    (place / f"t-{ids[0]}.vol").write_bytes(b"half born")
    (place / f"v-{ids[0]}.lock").touch(0o600)
    (place / f"x-{ids[1]}.meta").write_bytes(b"half removed")
    (place / f"v-{ids[2]}.pages").write_bytes(b"pages without metadata")
    (place / f"v-{ids[3]}.lock").touch(0o600)
    (place / f"v-{ids[4]}.lmdb").mkdir()
    (place / f"v-{ids[4]}.lmdb" / "data.mdb").write_bytes(b"no volume")
    (place / f"t-{orphan}.pages").write_bytes(b"beside a volume")
    (place / "notes.txt").write_text("mine")
    plan = removal.plan_removal(str(place), removal.Selection())
    assert plan.volumes == ()
    removed = removal.remove(plan)
    assert removed.failed == ()
    assert names(place) == ["directory.lock", "notes.txt", f"v-{orphan}.lock", f"v-{orphan}.vol"]
    assert removed.nbytes > len(b"half born" + b"half removed" + b"pages without metadata" + b"beside a volume")


def test_what_is_not_ours_stays_and_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphans(place, "shared", 1)
    outside = place.parent / "outside"
    outside.write_bytes(b"mine")
    link = place / f"v-{'0' * 32}.vol"
    link.symlink_to(outside)
    hard = place / f"t-{'1' * 32}.vol"
    os.link(outside, hard)
    (place / "model.safetensors").touch()
    proc = place / f"p-{'2' * 32}.proc"
    proc.symlink_to(outside)
    assert main(["gc", str(place), "--orphans", "--yes"]) == 0
    out = capsys.readouterr().out
    for path in (link, hard, proc, place / "model.safetensors"):
        assert f"leave {path.name}" in out
    assert link.is_symlink()
    assert proc.is_symlink()
    assert outside.read_bytes() == hard.read_bytes() == b"mine"


def test_each_choice_chooses_and_all_must_hold(place: Path) -> None:
    first, second, other = Volume(place, medium=2), Volume(place), Volume(place)
    second.header.fingerprint = bytes(32)
    second.write_header(second.header.encode())
    data = other.header.encode()[:8] + (7).to_bytes(4, "little") + other.header.encode()[12:-4]
    other.write_header(data + _core.crc32c(data).to_bytes(4, "little"))
    damaged = Volume(place)
    damaged.write_header(b"no header")

    def chosen(**choice: Any) -> set[str]:
        clock = ManualClock(time.time() + 3 * 86400)
        plan = removal.plan_removal(str(place), removal.Selection(**choice), clock=clock)
        return {volume.volume_id for volume in plan.volumes}

    everything = {first.id, second.id, other.id, damaged.id}
    assert chosen() == set()
    assert chosen(orphans=True) == everything
    assert chosen(other_format=True) == {other.id, damaged.id}
    assert chosen(fingerprint=FINGERPRINT.hex()) == {first.id}
    assert chosen(fingerprint="0" * 8) == {second.id}
    assert chosen(older_than=2 * 86400) == everything
    assert chosen(older_than=4 * 86400) == set()
    assert chosen(epoch_not=3) == set()
    assert chosen(epoch_not=4) == {first.id, second.id}
    assert chosen(epoch_not=4, fingerprint="0" * 64) == {second.id}
    assert chosen(epoch_not=4, fingerprint="0" * 64, older_than=4 * 86400) == set()
    assert chosen(orphans=True, other_format=True) == {other.id, damaged.id}


@pytest.mark.parametrize("choice", [{"fingerprint": "abc"}, {"fingerprint": "XY" * 8}, {"older_than": -1.0}])
def test_a_choice_out_of_range_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(StepwellUsageError):
        removal.Selection(**choice)


@pytest.mark.parametrize("option", [["--older-than", "7"], ["--older-than", "-1d"], ["--fingerprint", "12"]])
def test_the_command_line_refuses_it_too(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["gc", "/nowhere", *option])
    assert raised.value.code == 2
    assert option[0] in capsys.readouterr().err


# ---- what stays ------------------------------------------------------------------------------------------------------


def test_a_volume_adopted_since_the_plan_stays(place: Path, medium: str, child: Child) -> None:
    dead = orphans(place, medium, 2)
    plan = removal.plan_removal(str(place), ALL)
    assert len(plan.volumes) == 2
    child.ask("open", path=str(place), medium=medium, capacity=8)
    assert sorted(child.ask("adopt")["held"]) == sorted(dead)
    removed = removal.remove(plan)
    assert removed.volumes == ()
    assert {kept.why for kept in removed.kept} == {"a living process holds it now"}
    assert inspection.inspect_directory(str(place)).is_well


def test_a_volume_that_changed_since_the_plan_stays(place: Path) -> None:
    volume = Volume(place)
    plan = removal.plan_removal(str(place), removal.Selection(epoch_not=5))
    assert len(plan.volumes) == 1
    writer = volume.open(_core.PageShape(list(volume.layers), FINGERPRINT))
    row = np.zeros(sum(volume.layers), np.uint8)
    assert writer.write_page(7, row, key=b"new", parent_state=0, depth=0, epoch=5) == _core.Status.ok
    del writer
    removed = removal.remove(plan)
    assert removed.volumes == ()
    assert [kept.why for kept in removed.kept] == ["no longer as planned: holds pages of epoch 5"]


def test_a_volume_without_a_lock_file_stays(place: Path) -> None:
    volume = Volume(place)
    plan = removal.plan_removal(str(place), ALL)
    (place / f"v-{volume.id}.lock").unlink()
    [kept] = removal.remove(plan).kept
    assert "no lock file" in kept.why
    assert removal.plan_removal(str(place), ALL).volumes == ()
    assert volume.metadata.exists()
    assert not (place / f"v-{volume.id}.lock").exists()


def test_a_volume_of_this_process_stays(place: Path, medium: str) -> None:
    with make_directory(str(place), medium) as directory:
        directory.grow()
        assert remove(place).volumes == ()
        assert inspection.inspect_directory(str(place)).volumes[0].lock.is_held
    assert len(remove(place).volumes) == 1


def test_a_directory_lock_that_is_held_stops_the_removal(place: Path) -> None:
    orphans(place, "shared", 1)
    plan = removal.plan_removal(str(place), ALL)
    before = names(place)
    lock = try_lock(str(place / "directory.lock"))
    assert isinstance(lock, _core.Descriptor)
    try:
        with pytest.raises(VolumeBusyError, match=f"pid {os.getpid()}"):
            removal.remove(plan, lock_seconds=0.0)
        assert removal.plan_removal(str(place), ALL, lock_seconds=0.0).volumes == ()  # nothing shows that it is dead
    finally:
        lock.close()
    assert names(place) == before


def test_what_is_no_tier_directory_is_not_touched(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(VolumeError, match="none of stepwell's names"):
        remove(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]


def test_a_removal_that_fails_says_so_and_the_next_one_finishes_it(
    place: Path, medium: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [orphan] = orphans(place, medium, 1)
    with inject("file.unlink", "errno", nth=1, value=errno.EACCES):
        assert main(["gc", str(place), "--orphans", "--yes"]) == 1
    assert f"volume {orphan} is not wholly removed: Permission denied" in capsys.readouterr().out
    assert remove(place).failed == ()
    assert names(place) == ["directory.lock"]


# ---- others at work --------------------------------------------------------------------------------------------------


def test_killed_at_any_call_it_leaves_what_the_next_one_removes(
    place: Path, medium: str, collectors: list[Collector]
) -> None:
    collector, nth = collectors[0], 0
    while True:
        nth += 1
        dead = orphans(place, medium, 2)
        collector.send(place, kill=nth)
        answer = collector.receive()
        if "code" not in answer:
            break
        assert answer["code"] == -signal.SIGKILL
        report = inspection.inspect_directory(str(place))
        assert report.is_well, report  # a volume is whole, or it is none
        assert {volume.volume_id for volume in report.volumes} <= set(dead)
        assert remove(place).failed == ()
        assert names(place) == ["directory.lock"]
    assert nth > 20
    assert sorted(answer["volumes"]) == sorted(dead)


def test_two_removals_and_a_store_that_adopts_share_a_directory(
    place: Path, medium: str, child: Child, collectors: list[Collector]
) -> None:
    adopted = collected = 0
    for _ in range(12):
        dead = set(orphans(place, medium, 4))
        for collector in collectors:
            collector.send(place)
        child.send("open", path=str(place), medium=medium, capacity=8, floor=4)
        child.receive()
        held = set(child.ask("adopt")["held"])
        answers = [collector.receive() for collector in collectors]
        gone = [volume for answer in answers for volume in answer["volumes"]]
        assert [answer["failed"] for answer in answers] == [[], []]
        assert len(gone) == len(set(gone))  # each was removed by one
        assert set(gone) | held == dead
        assert not set(gone) & held
        report = inspection.inspect_directory(str(place))
        assert report.is_well
        assert {v.volume_id for v in report.volumes if v.lock.is_held} == held == {v.volume_id for v in report.volumes}
        adopted += len(held)
        collected += len(gone)
        child.ask("close")
        remove(place)
        assert names(place) == ["directory.lock"]
    assert adopted + collected == 48


def test_a_living_birth_is_left_alone(place: Path, child: Child) -> None:
    # Stopped between two calls of a birth, a process holds the lock of what it makes.
    zygote = Child(DIRECTORY_CHILD, "zygote")
    try:
        stopped = 0
        for nth in range(1, 400):
            outcome = zygote.ask("spawn", path=str(place), medium="disk", nth=nth, action="stop")
            if outcome["outcome"] != "stopped":
                break
            before = {path.name for path in place.glob("?-*") if path.name[0] in "tv"}
            try:
                report = inspection.inspect_directory(str(place), lock_seconds=0.0)
                removal.remove(removal.plan_removal(str(place), ALL, lock_seconds=0.0), lock_seconds=0.0)
            except (VolumeBusyError, VolumeError):
                report = None  # it was stopped while it held the directory lock, or before there was a directory
            if report is not None:
                kept = {name for v in report.volumes if v.lock.is_held for name in v.files}
                kept |= {name for leftover in report.leftovers if not leftover.is_dead for name in leftover.names}
                after = {path.name for path in place.glob("?-*")} if place.exists() else set()
                assert kept & before <= after, nth
                stopped += bool(kept)
            zygote.ask("end")
            if place.exists() and names(place):
                remove(place)
        assert stopped > 3
    finally:
        zygote.close()
