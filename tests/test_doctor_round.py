"""The doctor's round: write, evict, kill, restart, read, in directories of its own, of which nothing is left."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doctor_kit import clean_environment, follow, line_of, look, mounted, needs_root, run_doctor
from stepwell.doctor import round as doctor_round
from stepwell.doctor.round import METADATA_BYTES, PAGES, _Child
from stepwell.doctor.scratch import LOCK, PREFIX, parent_of, scratch_beside, sweep
from stepwell.doctor.worker import ActFailedError, Spec, config_of, contents, load_and_compare, save_all
from stepwell.index import Tier
from stepwell.store import PageStore
from store_kit import Directories, OpenRig, chain

MIB = 1 << 20
PAGE_BYTES = 8192


def round_of(arguments: list[str], **how: Any) -> dict[str, Any]:
    """Run everything, the round too; return the round's findings."""
    return {subject: found for subject, found in look(arguments, with_round=True, **how).items() if "round" in subject}


def asked(directories: Directories, *more: str) -> list[str]:
    return [
        f"shared.path={directories.shared}", "shared.capacity=32MiB", f"disk.path={directories.disk}",
        "disk.capacity=64MiB", "host=8MiB", *more,
    ]  # fmt: skip


def left_over(directories: Directories) -> list[str]:
    return [
        str(path)
        for parent in (directories.shared.parent, directories.disk.parent)
        for path in parent.rglob(f"{PREFIX}*")
    ]


def test_every_configured_tier_is_written_killed_and_read_with_bytes_and_time(directories: Directories) -> None:
    found = round_of(asked(directories, "device.pages=8"))
    assert {subject: finding.verdict for subject, finding in found.items()} == dict.fromkeys(
        ["host round", "shared round", "disk round", "device round"], "ok"
    ), found
    assert "16 MiB written in" in found["shared round"].found
    assert "4 pages evicted, SIGKILL, opened again in" in found["shared round"].found
    assert "8 MiB read and compared in" in found["shared round"].found
    assert "16 MiB read and compared in" in found["disk round"].found
    assert (
        "jax on cpu: computed, written through to shared, dropped, brought back: 128 KiB" in found["device round"].found
    )
    assert left_over(directories) == []
    assert not directories.shared.exists()
    assert not directories.disk.exists()


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_one_tier_alone_is_tried_too(directories: Directories, tier: str) -> None:
    path = getattr(directories, tier)
    found = round_of([f"{tier}.path={path}", f"{tier}.capacity=64MiB"])
    assert list(found) == [f"{tier} round"]
    assert found[f"{tier} round"].verdict == "ok", found


def test_a_device_without_a_tier_below_gets_its_pages_back_from_host_memory() -> None:
    found = round_of(["host=64MiB", "device.pages=8"])
    assert found["host round"].verdict == "ok"
    assert found["device round"].verdict == "ok", found
    assert "written through to host, dropped, brought back" in found["device round"].found


def test_the_user_s_pages_are_not_touched(directories: Directories, open_rig: OpenRig) -> None:
    rig = open_rig(host=0)
    rig.save(chain(1, 40))

    def state() -> dict[str, tuple[int, int, int]]:
        paths = [*directories.shared.iterdir(), *directories.disk.rglob("*")]
        return {str(path): (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before, content = state(), {path: path.read_bytes() for path in directories.shared.glob("v-*.vol")}
    found = round_of(asked(directories))
    assert {finding.verdict for finding in found.values()} == {"ok"}, found
    assert state() == before
    assert {path: path.read_bytes() for path in content} == content
    assert rig.load(chain(1, 40)) == 40
    assert left_over(directories) == []


@needs_root
def test_where_the_directory_is_a_mount_of_its_own_the_round_lies_in_it(tmp_path: Path) -> None:
    with mounted(tmp_path / "s", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs") as point:
        assert parent_of(str(point)) == str(point)
        found = round_of([f"shared.path={point}", "shared.capacity=32MiB"])
        assert found["shared round"].verdict == "ok", found
        assert os.listdir(point) == []


@needs_root
def test_a_file_system_with_little_room_gets_smaller_pages_and_one_without_is_told(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as point:
        arguments = [f"shared.path={point}/s", "shared.capacity=3MiB"]
        found = round_of(arguments)
        assert found["shared round"].verdict == "ok", found
        assert "to stay small" in found["round"].found
        (point / "other").write_bytes(bytes(3 * MIB + 900 * 1024))
        found = round_of(arguments)
        assert found["shared round"].verdict == "fail"
        assert "the smallest round takes 1.04 MiB" in found["shared round"].found
        listed = subprocess.run(
            ["bash", "-c", line_of(found["shared round"])], capture_output=True, text=True, check=True
        )
        assert str(point) in listed.stdout
        (point / "other").unlink()
        assert round_of(arguments)["shared round"].verdict == "ok"


@needs_root
def test_where_not_even_a_directory_can_be_made_the_round_fails_until_it_can(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=64m,nr_inodes=1", "tmpfs") as point:
        arguments = [f"shared.path={point}/s", "shared.capacity=32MiB"]
        found = look(arguments, with_round=True)
        assert found["shared round"].verdict == "fail"
        assert "nothing can be made beside" in found["shared round"].found
        assert line_of(found["shared round"]) == f"df -hi {point}"
        follow(found["shared inodes"])
        assert look(arguments, with_round=True)["shared round"].verdict == "ok"


def test_a_writer_that_was_not_killed_is_told(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(_Child):
        def kill(self) -> int:
            super().kill()
            return 3

    monkeypatch.setattr(doctor_round, "_Child", Ending)
    found = round_of([f"shared.path={directories.shared}", "shared.capacity=64MiB"])
    assert found["shared round"].found == "the writer ended by itself, with 3"


def test_a_directory_that_must_be_mended_first_is_not_tried(directories: Directories) -> None:
    directories.shared.touch()
    found = round_of([f"shared.path={directories.shared}", "shared.capacity=32MiB"])
    assert (found["shared round"].verdict, found["shared round"].found) == ("fail", "not tried")


# What goes wrong in it


@pytest.fixture
def spec(directories: Directories) -> Spec:
    return Spec(
        pages=PAGES,
        page_bytes=PAGE_BYTES,
        shared=str(directories.shared),
        disk=str(directories.disk),
        volume_bytes=PAGES * PAGE_BYTES + METADATA_BYTES,
    )


def write_and_kill(spec: Spec) -> None:
    writer = _Child("write", spec)
    assert writer.line()["evicted"] == PAGES // 2
    assert writer.kill() == -signal.SIGKILL


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_bytes_that_are_not_those_written_are_found(directories: Directories, spec: Spec, tier: str) -> None:
    write_and_kill(spec)
    [file] = directories.volumes("vol" if tier == "shared" else "pages")
    content = bytearray(file.read_bytes())
    at = content.find(contents(1, PAGE_BYTES)[0].tobytes())
    assert at > 0 or tier == "disk"
    content[at + 100] ^= 1
    file.write_bytes(content)
    told = _Child("read", spec).result()
    assert re.fullmatch(r"1 of [48] pages could not be read", told["error"]), told


def test_bytes_that_no_checksum_refuses_are_compared_too(spec: Spec) -> None:
    rows = contents(PAGES, PAGE_BYTES)
    with PageStore(config_of(spec)) as store:
        save_all(store, rows)
        load_and_compare(store, Tier.SHARED, rows)
        rows[-1, -1] ^= 1
        with pytest.raises(ActFailedError, match="the bytes read are not the bytes written"):
            load_and_compare(store, Tier.SHARED, rows)


def test_pages_that_are_gone_are_told(directories: Directories, spec: Spec) -> None:
    write_and_kill(spec)
    for file in directories.shared.iterdir():
        file.unlink()
    told = _Child("read", spec).result()
    assert told["error"] == "of 4 pages, found {'disk': 4}"


def test_a_store_that_does_not_open_is_told_with_its_message(spec: Spec, directories: Directories) -> None:
    directories.shared.mkdir()
    directories.shared.chmod(0o777)
    told = _Child("write", spec).result()
    assert told["error"].startswith("VolumeError: ")
    assert told["error"].endswith(f"chmod 0700 {directories.shared}")


def test_a_child_that_ends_without_a_word_or_says_nothing_is_told(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_round.sys, "executable", "/bin/false")
    told = _Child("write", spec).result()
    assert told["error"].startswith("ended with 1")
    monkeypatch.setattr(doctor_round.sys, "executable", "/nowhere/python")
    told = _Child("write", spec).result()
    assert told["error"] == "/nowhere/python cannot be started: No such file or directory"
    monkeypatch.undo()
    monkeypatch.setattr(doctor_round, "ACT_SECONDS", 0.0)
    told = _Child("write", spec).result()
    assert told["error"] == "no word within 0 s"


def test_what_fails_in_a_child_is_a_finding_that_fails(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(_Child):
        def __init__(self, act: str, spec: Spec) -> None:
            super().__init__("nonsense", spec)

    monkeypatch.setattr(doctor_round, "_Child", Broken)
    found = round_of(asked(directories, "device.pages=8"))
    assert {finding.verdict for finding in found.values()} == {"fail"}
    assert "KeyError" in found["host round"].found
    assert left_over(directories) == []


@needs_root
def test_a_limit_on_the_size_of_files_fails_the_round_and_its_line_mends_it(directories: Directories) -> None:
    arguments = ["--shared", str(directories.shared), "--set", "shared.capacity=64MiB"]
    limit = "ulimit -S -f 1024"
    code, found = run_doctor(*arguments, shell=limit)
    assert code == 1
    assert {found[subject].verdict for subject in ("size of files", "shared round")} == {"fail"}
    code, found = run_doctor(*arguments, shell=f"{limit}\n{line_of(found['size of files'])}")
    assert (code, found["shared round"].verdict) == (0, "ok")
    assert left_over(directories) == []


# Leaving


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_doctor_that_is_interrupted_leaves_nothing(directories: Directories, number: signal.Signals) -> None:
    doctor = subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", "doctor", *(w for text in asked(directories) for w in ("--set", text))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean_environment(),
    )
    assert doctor.stdout is not None
    for line in doctor.stdout:
        if "host round" in line:  # the volumes' round is next
            break
    doctor.send_signal(number)
    doctor.stdout.read()
    assert doctor.wait() in (128 + number, 130)
    doctor.stdout.close()
    assert left_over(directories) == []


HOLD = "import sys; from stepwell.doctor.scratch import scratch_beside\n" \
       "with scratch_beside(sys.argv[1]) as made: print(made, flush=True); sys.stdin.read()"  # fmt: skip


@pytest.fixture
def holder(directories: Directories) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directories.shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_doctor_left_the_next_one_removes_and_a_living_one_s_it_leaves(
    directories: Directories, holder: subprocess.Popen[str]
) -> None:
    assert holder.stdout is not None
    made = Path(holder.stdout.readline().strip())
    parent = str(directories.shared.parent)
    assert made.parent == Path(parent)
    assert sweep(parent) == 0
    assert made.exists()
    holder.kill()
    holder.wait()
    assert made.exists()
    with scratch_beside(str(directories.shared)) as other:
        assert not made.exists()
        with open(f"{other}/{LOCK}") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert left_over(directories) == []


def test_a_child_ends_when_its_doctor_is_gone(spec: Spec) -> None:
    child = _Child("write", spec)
    child.line()
    stdin = child._process.stdin if child._process else None
    assert stdin is not None
    stdin.close()  # as the kernel does for a doctor that was killed
    assert child._process is not None
    assert child._process.wait(60) == 0
    child.kill()
