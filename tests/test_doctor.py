"""The doctor: each of its lines is provoked, and its advice followed with success."""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doctor_kit import (
    GEOMETRY_TEXT,
    Tree,
    as_user,
    follow,
    line_of,
    look,
    mounted,
    needs_root,
    run_doctor,
    settings_of,
)
from stepwell.config import parse_size
from stepwell.doctor import directories as directory_checks
from stepwell.doctor import machine
from stepwell.doctor.directories import Mount, probe_direct_io, probe_sync
from stepwell.doctor.machine import check_logout
from stepwell.effective import show_size

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
SMALL = ["shared.capacity=8MiB", "shared.volume_bytes=4MiB"]  # with the example's pages of 2 MiB


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


@pytest.fixture
def memory(directories: Any) -> Path:
    """A directory on a tmpfs; the tier directory in it does not exist yet."""
    return Path(directories.shared).parent


def shared_at(path: Path, *more: str) -> list[str]:
    return [f"shared.path={path}", *SMALL, *more]


# Configuration


def test_a_configuration_that_holds_is_told_with_its_file_and_tiers(tmp_path: Path, memory: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(f"host = '1MiB'\n[shared]\ncapacity = '8MiB'\npath = '{memory}/s'\n{GEOMETRY_TEXT}")
    found = look([], path=file)
    assert found["configuration"].verdict == "ok"
    assert f"file {file}, named by the caller; tiers host, shared; pages of 4 KiB" in found["configuration"].found


def test_a_configuration_that_is_refused_fails_and_the_machine_is_checked_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("host = '1MiB'\nhots = 3\n")
    code, found = run_doctor("--config", str(file), "--no-round")
    assert code == 1
    assert found["configuration"].verdict == "fail"
    assert "s.toml:2: hots names no setting; did you mean host?" in found["configuration"].found
    assert "open files" in found
    file.write_text("host = '1MiB'\n")  # what the message says
    code, found = run_doctor("--config", str(file), "--no-round")
    assert (code, found["configuration"].verdict) == (0, "ok")


def test_without_a_configuration_an_example_is_checked_and_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = look([])["configuration"]
    assert found.verdict == "warn"
    assert "no tier is named" in found.found
    assert re.search(r"--set (\S+)", found.remedy)[1] == "shared.capacity=8GiB"  # type: ignore[index]
    assert look(["shared.capacity=8GiB"])["configuration"].verdict == "ok"


def test_directories_given_as_arguments_go_over_the_configuration(tmp_path: Path, memory: Path) -> None:
    found = look([], shared=str(memory / "s"), disk=str(tmp_path / "d"))
    assert "256 MiB" in found["shared capacity"].found
    assert "1 GiB" in found["disk capacity"].found
    found = look(SMALL, shared=str(memory / "s"))
    assert "8 MiB" in found["shared capacity"].found
    assert str(memory / "s") in found["shared directory"].found


# Packages and processor


@pytest.mark.parametrize(("have", "words"), [("1.26.4", "1.26.4; at least 2 is needed"), (None, "not installed")])
def test_a_package_that_is_missing_or_too_old_fails(
    monkeypatch: pytest.MonkeyPatch, have: str | None, words: str
) -> None:
    real = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: have if name == "numpy" else real(name))
    found = look(["host=1MiB"])["package numpy"]
    assert (found.verdict, line_of(found)) == ("fail", "pip install 'numpy>=2'")
    assert words in found.found


def test_where_its_own_metadata_cannot_be_read_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nowhere)
    found = look(["host=1MiB"])
    assert (found["packages"].verdict, line_of(found["packages"])) == ("warn", "pip install .")
    assert found["memory"].verdict == "ok"


def test_jax_is_missed_only_where_the_device_tier_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: None if name == "jax" else real(name))
    assert "package jax" not in look(["host=1MiB"])
    found = look(["host=1MiB", "device.pages=4"])["package jax"]
    assert (found.verdict, line_of(found)) == ("fail", "pip install 'jax>=0.6'")


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.version_of
    monkeypatch.setattr(machine, "version_of", lambda name: {"lmdb": "1.10", "jax": "0.10.2"}.get(name, real(name)))
    found = look(["host=1MiB", "device.pages=4"])
    assert not any(subject.startswith("package ") for subject in found)
    assert "lmdb 1.10" in found["packages"].found


def test_a_processor_without_help_for_checksums_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "checksums" in look(["host=1MiB"])["processor"].found
    core = SimpleNamespace(crc32c_implementation=lambda: "portable", sha256_implementation=lambda: "sha-ni")
    monkeypatch.setattr(machine, "_core", core)
    found = look(["host=1MiB"])["processor"]
    assert found.verdict == "warn"
    assert "checksums are computed without help" in found.why


# Memory


def test_more_memory_than_the_machine_has_fails(tree: Tree, memory: Path) -> None:
    tree.memory(4 * GIB, 3 * GIB)
    asked = [f"shared.path={memory}/s", "shared.capacity=8GiB", "host=1GiB"]
    found = look(asked, root=tree.root)
    assert found["memory"].verdict == "fail"
    assert "3 GiB of 4 GiB available; host 1 GiB + shared 8 GiB" in found["memory"].found
    assert look([*asked, *settings_of(found["memory"])], root=tree.root)["memory"].verdict == "ok"


@pytest.mark.parametrize(("shared", "host"), [(100, 2), (100, 20), (100, 90), (20, 20), (8, 20), (1, 90), (0, 90)])
@pytest.mark.parametrize("available", [2, 12, 22])
def test_all_checks_of_memory_give_one_advice_that_mends_them_all_and_raises_nothing(
    tree: Tree, memory: Path, shared: int, host: int, available: int
) -> None:
    tree.memory(24 * GIB, available * GIB)
    tree.cgroup2("/", {"/": {"memory.max": f"{23 * GIB}\n", "memory.current": f"{GIB}\n"}})
    asked = [f"host={host}GiB", *([f"shared.path={memory}/s", f"shared.capacity={shared}GiB"] if shared else [])]
    found = look(asked, root=tree.root)
    bad = [found[name] for name in ("memory", "memory cgroup", "shared capacity") if name in found]
    bad = [finding for finding in bad if finding.verdict != "ok"]
    assert bad
    advice = set(settings_of(bad[0]) if "echo" not in bad[0].remedy else re.findall(r"--set (\S+)", bad[0].remedy))
    for finding in bad:
        assert set(re.findall(r"--set (\S+)", finding.remedy)) == advice
    for setting in advice:
        name, _, value = setting.partition("=")
        given = {"host": host, "shared.capacity": shared}[name]
        assert parse_size(value, name=name) < given * GIB
    again = look([*asked, *advice], root=tree.root)
    assert {again[name].verdict for name in ("memory", "memory cgroup", "shared capacity") if name in again} == {"ok"}


def test_the_host_tier_keeps_its_size_where_shared_memory_can_give(tree: Tree, memory: Path) -> None:
    tree.memory(24 * GIB, 22 * GIB)
    asked = [f"shared.path={memory}/s", "shared.capacity=8GiB"]
    for host, changed in (("18GiB", {"shared.capacity"}), ("21GiB", {"host"})):
        found = look([*asked, f"host={host}"], root=tree.root)["memory"]
        settings = dict(setting.split("=") for setting in settings_of(found))
        assert settings.keys() == changed
    assert parse_size(settings["host"], name="host") > 12 * GIB  # what the shared tier leaves


def test_more_memory_than_is_available_now_is_warned_of(tree: Tree, memory: Path) -> None:
    tree.memory(16 * GIB, GIB)
    asked = [f"shared.path={memory}/s", "shared.capacity=2GiB", "host=64MiB"]
    found = look(asked, root=tree.root)
    assert found["memory"].verdict == "warn"
    again = look([*asked, *settings_of(found["memory"])], root=tree.root)
    assert {again[subject].verdict for subject in ("memory", "shared capacity")} == {"ok"}


def test_staging_is_memory_too(tree: Tree, memory: Path) -> None:
    tree.memory(16 * GIB, 4 * GIB)
    asked = [f"shared.path={memory}/s", "shared.capacity=3584MiB"]
    assert look([*asked, "staging=0"], root=tree.root)["memory"].verdict == "ok"
    found = look([*asked, "staging=1GiB"], root=tree.root)["memory"]
    assert (found.verdict, "shared 3.50 GiB + staging, at most 1 GiB" in found.found) == ("warn", True)
    again = look([*asked, "staging=1GiB", *settings_of(found)], root=tree.root)["memory"]
    assert again.verdict == "ok"


def test_what_lies_in_the_directory_already_is_not_asked_for_again(tree: Tree, memory: Path) -> None:
    tier = memory / "s"
    tier.mkdir(mode=0o700)
    volume = tier / f"v-{'0' * 32}.vol"
    volume.touch(mode=0o600)
    os.truncate(volume, 900 * MIB)  # a hole: nothing is taken
    tree.memory(4 * GIB, 300 * MIB)
    found = look([f"shared.path={tier}", "shared.capacity=1GiB"], root=tree.root)
    assert found["memory"].verdict == "ok"
    assert "900 MiB of it in use" in found["memory"].found


def test_a_tight_cgroup_is_named_with_what_tmpfs_takes_of_it(tree: Tree, memory: Path) -> None:
    tree.memory(16 * GIB, 12 * GIB)
    tree.cgroup2(
        "/pod/job",
        {
            "/pod": {
                "memory.max": f"{GIB}\n",
                "memory.current": f"{400 * MIB}\n",
                "memory.stat": f"anon 1\nshmem {300 * MIB}\ninactive_file 0\n",
            },
            "/pod/job": {"memory.max": "max\n"},
        },
    )
    asked = [f"shared.path={memory}/s", "shared.capacity=2GiB"]
    found = look(asked, root=tree.root)["memory cgroup"]
    assert found.verdict == "fail"
    assert "/sys/fs/cgroup/pod/memory.max: 400 MiB of 1 GiB in use, 300 MiB of that on tmpfs" in found.found
    assert "OOM kill" in found.why
    smaller = re.search(r"--set (shared.capacity=\S+)", found.remedy)
    assert smaller is not None
    again = look([*asked, smaller[1]], root=tree.root)
    assert {again[subject].verdict for subject in ("memory cgroup", "shared capacity")} == {"ok"}
    follow(found)  # writes memory.max
    assert look(asked, root=tree.root)["memory cgroup"].verdict == "ok"


def test_a_cgroup_with_too_little_left_is_warned_of(tree: Tree, memory: Path) -> None:
    tree.memory(16 * GIB, 12 * GIB)
    tree.cgroup2("/", {"/": {"memory.max": f"{GIB}\n", "memory.current": f"{800 * MIB}\n"}})
    found = look([f"shared.path={memory}/s", "shared.capacity=512MiB"], root=tree.root)["memory cgroup"]
    assert found.verdict == "warn"
    follow(found)
    assert look([f"shared.path={memory}/s", "shared.capacity=512MiB"], root=tree.root)["memory cgroup"].verdict == "ok"


@needs_root
def test_a_live_cgroup_of_version_1_is_found_and_its_line_mends_it(memory: Path) -> None:
    own = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    group = Path(f"/sys/fs/cgroup/memory{own[1] if own else ''}/stepwell-test-{os.getpid()}")
    if own is None:
        pytest.skip("there are no memory cgroups of version 1 here")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a cgroup cannot be made here: {error.strerror}")
    try:
        limit = group / "memory.limit_in_bytes"
        limit.write_text(str(512 * MIB))
        enter = f"echo $$ > {group}/cgroup.procs"
        asked = ["--no-round", "--shared", f"{memory}/s", "--set", "shared.capacity=1GiB"]
        code, found = run_doctor(*asked, shell=enter)
        assert code == 1
        assert found["memory cgroup"].verdict == "fail"
        assert f"{limit}: " in found["memory cgroup"].found
        assert found["shared capacity"].verdict == "fail"
        assert f"at most 512 MiB ({limit})" in found["shared capacity"].found
        code, again = run_doctor(*asked, "--set", settings_of(found["shared capacity"])[0], shell=enter)
        assert again["shared capacity"].verdict != "fail"
        follow(found["memory cgroup"])
        code, found = run_doctor(*asked, shell=enter)
        assert (code, found["memory cgroup"].verdict, found["shared capacity"].verdict) == (0, "ok", "ok")
    finally:
        group.rmdir()


def test_huge_pages_that_nobody_gets_are_told(tree: Tree) -> None:
    file = tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    found = look(["host=1MiB"], root=tree.root)["huge pages"]
    assert found.verdict == "warn"
    follow(found)
    assert file.read_text() == "madvise\n"  # the kernel shows that as:
    file.write_text("always [madvise] never\n")
    assert look(["host=1MiB"], root=tree.root)["huge pages"].verdict == "ok"


def test_a_machine_that_cannot_be_looked_at_is_a_finding(tree: Tree) -> None:
    (tree.root / "proc/meminfo").unlink()
    found = look(["host=64MiB"], root=tree.root)["machine"]
    assert found.verdict == "fail"
    assert "meminfo" in found.found
    Tree(tree.root)  # follows the advice: it is readable
    assert "machine" not in look(["host=64MiB"], root=tree.root)


# Limits of the process


def without(capability: str) -> str:
    """Return the words that start a program without a capability."""
    return f'exec setpriv --bounding-set -{capability} --inh-caps -{capability} "$@"\n'


@needs_root
def test_little_locked_memory_matters_only_where_a_driver_pins_the_host_tier() -> None:
    if subprocess.run(["setpriv", "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no setpriv")
    soft = "ulimit -S -l 64\n"
    drop = without("ipc_lock")
    asked = ["--no-round", "--set", "host=4MiB", "--set", "device.pages=4"]
    _, found = run_doctor(*asked, shell=soft)
    assert "CAP_IPC_LOCK" in found["locked memory"].found
    _, found = run_doctor(*asked[:3], shell=soft + drop)
    assert found["locked memory"].verdict == "ok"
    _, found = run_doctor(*asked, shell=soft + drop)
    assert found["locked memory"].verdict == "warn"
    assert "RLIMIT_MEMLOCK 64 KiB" in found["locked memory"].found
    _, found = run_doctor(*asked, shell=soft + line_of(found["locked memory"]) + "\n" + drop)
    assert found["locked memory"].verdict == "ok"


@needs_root
def test_a_hard_limit_in_the_way_is_raised_by_root(memory: Path) -> None:
    hard = "ulimit -n 130\n"
    tried = subprocess.run(["bash", "-c", f"{hard}prlimit --nofile=200:200 --pid $$"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("this root has no CAP_SYS_RESOURCE")
    asked = ["--no-round", "--shared", f"{memory}/s", "--set", "shared.capacity=64MiB", "--set",
             "shared.volume_bytes=3MiB"]  # fmt: skip
    code, found = run_doctor(*asked, shell=hard)
    assert (code, found["open files"].verdict) == (1, "fail")
    assert line_of(found["open files"]).startswith("prlimit --nofile=")
    code, found = run_doctor(*asked, shell=hard + line_of(found["open files"]))
    assert (code, found["open files"].verdict) == (0, "ok")


@pytest.mark.parametrize(
    ("subject", "limit", "asked"),
    [
        ("open files", "ulimit -S -n 140", ["shared.capacity=64MiB", "shared.volume_bytes=3MiB"]),
        ("size of files", "ulimit -S -f 4096", ["shared.capacity=64MiB", "shared.volume_bytes=32MiB"]),
        ("address space", "ulimit -S -v 16777216", ["shared.capacity=9GiB", "host=9GiB"]),
    ],
)
def test_a_limit_of_the_process_that_is_too_low_fails_and_its_line_raises_it(
    memory: Path, subject: str, limit: str, asked: list[str]
) -> None:
    arguments = ["--no-round", "--shared", f"{memory}/s", *(word for text in asked for word in ("--set", text))]
    code, found = run_doctor(*arguments, shell=limit)
    assert (code, found[subject].verdict) == (1, "fail")
    _, again = run_doctor(*arguments, shell=f"{limit}\n{line_of(found[subject])}")
    assert again.get(subject) is None or again[subject].verdict == "ok"


def test_the_descriptors_that_a_store_takes_are_those_that_are_counted(open_rig: Any) -> None:
    from store_kit import VOLUME_BYTES, chain

    before = len(os.listdir("/proc/self/fd"))
    rig = open_rig(shared=8 * VOLUME_BYTES, disk=8 * VOLUME_BYTES, host=0)
    for number in range(60):
        rig.save(chain(number, 64))
        rig.round()
    from stepwell.index import Tier

    shared, disk = (len(rig.store._tiers[tier].members) for tier in (Tier.SHARED, Tier.DISK))
    assert (shared, disk) == (8, 8)
    taken = len(os.listdir("/proc/self/fd")) - before
    assert taken <= machine.DESCRIPTORS_OF_SHARED * shared + machine.DESCRIPTORS_OF_DISK * disk + 8


def test_few_mappings_fail(tree: Tree, memory: Path) -> None:
    tree.write("proc/sys/vm/max_map_count", "1024\n")
    found = look(["host=1MiB"], root=tree.root)["mappings"]
    assert found.verdict == "fail"
    assert line_of(found) == "sysctl -w vm.max_map_count=65530"
    tree.write("proc/sys/vm/max_map_count", "65530\n")
    assert look(["host=1MiB"], root=tree.root)["mappings"].verdict == "ok"


# Logout


def logind(tree: Tree) -> None:
    (tree.root / "run/systemd/system").mkdir(parents=True)
    tree.write("etc/login.defs", "# system\nSYS_UID_MAX\t\t  499\n")


def test_logind_takes_the_files_of_a_user_who_logs_out(tree: Tree) -> None:
    logind(tree)
    found = check_logout("/dev/shm/stepwell", tree.root, uid=12345)
    assert found is not None
    assert found.verdict == "warn"
    assert "systemd's default" in found.found
    assert line_of(found) == "loginctl enable-linger 12345"
    tree.write("var/lib/systemd/linger/12345", "")  # what that line does
    found = check_logout("/dev/shm/stepwell", tree.root, uid=12345)
    assert found is not None
    assert found.verdict == "ok"


@pytest.mark.parametrize(
    ("files", "verdict"),
    [
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, "warn"),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, "ok"),
        ({"usr/lib/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, "ok"),
        ({"usr/lib/systemd/logind.conf": "[Login]\nRemoveIPC=no\n", "etc/systemd/logind.conf": "[Login]\n"}, "warn"),
        ({"etc/systemd/logind.conf": "RemoveIPC=no", "etc/systemd/logind.conf.d/9.conf": "RemoveIPC=yes"}, "warn"),
        (
            {
                "usr/lib/systemd/logind.conf.d/9.conf": "RemoveIPC=yes",
                "etc/systemd/logind.conf.d/9.conf": "RemoveIPC=0",
            },
            "ok",
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/9.conf": "RemoveIPC=yes",
                "etc/systemd/logind.conf.d/1.conf": "RemoveIPC=0",
            },
            "warn",
        ),
    ],
)
def test_the_last_word_on_remove_ipc_counts(tree: Tree, files: dict[str, str], verdict: str) -> None:
    logind(tree)
    for name, text in files.items():
        tree.write(name, text)
    found = check_logout("/dev/shm/x/y", tree.root, uid=12345)
    assert found is not None
    assert found.verdict == verdict


def test_system_users_machines_without_logind_and_other_places_are_not_touched(tree: Tree) -> None:
    found = check_logout("/dev/shm/x", tree.root, uid=12345)
    assert found is not None
    assert "no systemd here" in found.found
    logind(tree)
    for uid in (0, 499):
        found = check_logout("/dev/shm/x", tree.root, uid=uid)
        assert found is not None
        assert found.verdict == "ok"
    assert check_logout("/run/x", tree.root, uid=12345) is None


# Directories: who may write them


def test_a_directory_that_is_not_there_yet_is_fine(memory: Path) -> None:
    found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, "not there yet" in found.found) == ("ok", True)
    assert not (memory / "s").exists()


def test_a_directory_without_a_parent_fails(memory: Path) -> None:
    found = look(shared_at(memory / "a" / "s"))["shared directory"]
    assert found.verdict == "fail"
    follow(found)
    assert look(shared_at(memory / "a" / "s"))["shared directory"].verdict == "ok"


def test_a_directory_on_no_file_system_for_files_fails() -> None:
    found = look(["disk.path=/proc/x", "disk.capacity=64MiB"])
    assert "disk capacity" not in found
    assert found["disk file system"].verdict == "fail"
    assert "/proc/x is on no file system for files: proc on /proc" in found["disk file system"].found


def test_nobody_is_told_to_change_a_directory_of_the_machine(memory: Path) -> None:
    (memory / "s").mkdir()
    (memory / "s").chmod(0o1777)
    for path in (str(memory / "s"), "/tmp"):
        found = look([f"disk.path={path}", "disk.capacity=64MiB"])["disk directory"]
        assert (found.verdict, found.remedy) == (
            "fail", f"--set disk.path={path}/stepwell  # others need {path} as it is"
        )  # fmt: skip


def test_a_directory_that_others_may_write_fails(memory: Path) -> None:
    (memory / "s").mkdir()
    (memory / "s").chmod(0o777)
    found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, line_of(found)) == ("fail", f"chmod 0700 {memory / 's'}")
    follow(found)
    found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, f"user {os.geteuid()}, mode 0700" in found.found) == ("ok", True)


def test_a_symbolic_link_fails_and_its_target_is_named(memory: Path) -> None:
    (memory / "real").mkdir(mode=0o700)
    (memory / "s").symlink_to(memory / "real")
    asked = shared_at(memory / "s")
    found = look(asked)["shared directory"]
    assert (found.verdict, "is a symbolic link" in found.found) == ("fail", True)
    assert look([*asked, *settings_of(found)])["shared directory"].verdict == "ok"


def test_a_file_fails(memory: Path) -> None:
    (memory / "s").touch()
    found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, "is not a directory" in found.found) == ("fail", True)


@needs_root
def test_a_directory_of_another_user_fails_until_it_is_given_back(memory: Path) -> None:
    (memory / "s").mkdir(mode=0o700)
    os.chown(memory / "s", 12345, 12345)
    found = look(shared_at(memory / "s"))["shared directory"]
    assert found.verdict == "fail"
    assert "belongs to user 12345, this process runs as 0" in found.found
    assert "setpriv --reuid=12345" in found.remedy
    memory.chmod(0o755)
    with as_user(12345):
        assert look(shared_at(memory / "s"))["shared directory"].verdict == "ok"
    follow(found)
    assert look(shared_at(memory / "s"))["shared directory"].verdict == "ok"


@needs_root
def test_a_directory_that_its_owner_cannot_write_fails(memory: Path) -> None:
    (memory / "s").mkdir()
    (memory / "s").chmod(0o500)
    os.chown(memory / "s", 12345, -1)
    memory.chmod(0o755)
    with as_user(12345):
        found = look(shared_at(memory / "s"))["shared directory"]
        assert (found.verdict, "mode 0500" in found.found) == ("fail", True)
        os.chmod(memory / "s", int(line_of(found).split()[1], 8))
        assert look(shared_at(memory / "s"))["shared directory"].verdict == "ok"


@needs_root
def test_a_directory_that_this_user_may_not_make_fails(memory: Path) -> None:
    memory.chmod(0o755)
    with as_user(12345):
        found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, "user 12345 may not make it" in found.found) == ("fail", True)
    follow(found)
    with as_user(12345):
        assert look(shared_at(memory / "s"))["shared directory"].verdict == "ok"


@needs_root
def test_a_directory_above_that_this_user_may_not_enter_fails(memory: Path) -> None:
    (memory / "s").mkdir(mode=0o700)
    os.chown(memory / "s", 12345, -1)
    memory.chmod(0o700)
    with as_user(12345):
        found = look(shared_at(memory / "s"))["shared directory"]
    assert (found.verdict, f"user 12345 may not enter {memory} (mode 0700)" in found.found) == ("fail", True)
    follow(found)
    with as_user(12345):
        found = look(shared_at(memory / "s"))["shared directory"]
        assert found.verdict == "ok", found


@needs_root
def test_a_read_only_mount_fails_until_it_is_remounted(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "ro,size=16m", "tmpfs") as point:
        asked = shared_at(point / "s")
        found = look(asked)["shared directory"]
        assert (found.verdict, f"{point} (tmpfs), mounted read-only" in found.found) == ("fail", True)
        follow(found)
        assert look(asked)["shared directory"].verdict == "ok"


def test_a_network_file_system_fails(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.tiers import entry

    (tmp_path / "d").mkdir(mode=0o700)
    core = SimpleNamespace(**{name: getattr(entry._core, name) for name in dir(entry._core)})
    core.file_statfs = lambda _: SimpleNamespace(is_network=True, type=0x6969, total_bytes=TIB, free_bytes=TIB)
    monkeypatch.setattr(entry, "_core", core)
    monkeypatch.setattr(directory_checks, "_core", core)
    found = look([f"disk.path={tmp_path}/d", "disk.capacity=1GiB"])["disk directory"]
    assert found.verdict == "fail"
    assert "network file system (type 0x6969)" in found.found
    assert found.remedy.startswith("--set disk.path=DIR")


@pytest.mark.parametrize("what", ["open", pytest.param("foreign", marks=needs_root)])
def test_a_parent_in_which_others_may_rename_is_warned_of(memory: Path, what: str) -> None:
    parent = memory / "p"
    parent.mkdir()
    if what == "open":
        parent.chmod(0o777)
    else:
        os.chown(parent, 12345, -1)
    asked = shared_at(parent / "s")
    found = look(asked)["shared parents"]
    assert found.verdict == "warn"
    follow(found)
    assert "shared parents" not in look(asked)


# What they lie on


def test_a_shared_tier_on_a_disk_is_warned_of(tmp_path: Path) -> None:
    if Mount.of(str(tmp_path), Path("/")).kind == "tmpfs":
        pytest.skip("temporary files are on a tmpfs here")
    asked = shared_at(tmp_path / "s")
    found = look(asked)["shared file system"]
    assert (found.verdict, "is not in memory" in found.found) == ("warn", True)
    assert look([*asked, *settings_of(found)])["shared file system"].verdict == "ok"


def test_a_disk_tier_in_memory_fails(memory: Path) -> None:
    asked = [f"disk.path={memory}/d", "disk.capacity=64MiB"]
    found = look(asked)["disk file system"]
    assert (found.verdict, "is memory, not a disk" in found.found) == ("fail", True)
    if "DIR" not in found.remedy:
        assert look([*asked, *settings_of(found)])["disk file system"].verdict == "ok"


@pytest.mark.parametrize("kind", ["shared", "disk"])
def test_a_store_opens_on_the_wrong_medium_and_says_so(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    import stepwell as sw
    from store_kit import GEOMETRY

    if Mount.of(str(tmp_path), Path("/")).kind == "tmpfs":
        pytest.skip("temporary files are on a tmpfs here")
    for place, is_wrong in ((memory, kind == "disk"), (tmp_path, kind == "shared")):
        caplog.clear()
        path = str(place / kind)
        shared = sw.SharedTier("1MiB", path) if kind == "shared" else None
        disk = sw.DiskTier("1MiB", path) if kind == "disk" else None
        sw.PageStore(sw.StoreConfig(geometry=GEOMETRY, shared=shared, disk=disk)).close()
        said = [record.getMessage() for record in caplog.records if f"{kind} tier: {path} is on" in record.getMessage()]
        assert bool(said) == is_wrong
        assert all(f"Set {kind}.path" in message for message in said)


@needs_root
def test_the_layer_of_a_container_is_warned_of(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted(tmp_path / "m", "-t", "overlay", "-o", layers, "overlay") as point:
        found = look([f"disk.path={point}/d", "disk.capacity=64MiB"])["disk file system"]
        assert (found.verdict, found.remedy.startswith(f"docker run -v {point}/d:")) == ("warn", True)
        (tmp_path / "volume").mkdir()
        with mounted(point / "d", "--bind", str(tmp_path / "volume")):  # what that line does
            found = look([f"disk.path={point}/d", "disk.capacity=64MiB"])["disk file system"]
            assert found.verdict == "ok"


# Room


@needs_root
def test_a_small_tmpfs_fails_until_it_is_made_larger(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as point:
        arguments = ["--shared", f"{point}/s", "--set", "shared.capacity=32MiB"]
        code, found = run_doctor(*arguments, "--no-round")
        assert (code, found["shared capacity"].verdict) == (1, "fail")
        assert f"at most 8 MiB (size of the file system of {point})" in found["shared capacity"].found
        _, smaller = run_doctor(*arguments, "--no-round", "--set", "shared.capacity=8MiB")
        assert smaller["shared capacity"].verdict == "ok"
        follow(found["shared capacity"])
        code, found = run_doctor(*arguments)
        assert (code, found["shared capacity"].verdict, found["shared round"].verdict) == (0, "ok", "ok")
        assert os.listdir(point) == []


@needs_root
def test_a_tmpfs_that_others_fill_is_warned_of(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as point:
        (point / "other").write_bytes(bytes(20 * MIB))
        asked = [f"shared.path={point}/s", "shared.capacity=16MiB"]
        found = look(asked)["shared capacity"]
        assert (found.verdict, "12 MiB can be had now (free space" in found.found) == ("warn", True)
        follow(found)
        assert look(asked)["shared capacity"].verdict == "ok"


def test_in_a_container_without_rights_the_line_is_the_container_s(
    tree: Tree, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write(".dockerenv", "")
    tree.write("proc/self/status", "CapEff:\t00000000a80425fb\n")
    found = look([f"shared.path={memory}/s", "shared.capacity=100TiB"], root=tree.root)
    assert found["shared capacity"].verdict == "fail"
    tree.memory(200 * TIB, 200 * TIB)
    found = look([f"shared.path={memory}/s", "shared.capacity=100TiB"], root=tree.root)
    assert found["shared capacity"].remedy.startswith("docker run --shm-size=")
    assert "emptyDir with medium: Memory" in found["shared capacity"].remedy


def test_more_disk_than_there_is_fails(tmp_path: Path) -> None:
    asked = [f"disk.path={tmp_path}/d", "disk.capacity=9000TiB", "disk.volume_bytes=1TiB", "disk.share=2TiB"]
    found = look(asked)
    if found["disk file system"].verdict == "fail":
        pytest.skip("temporary files are on a tmpfs here")
    assert found["disk capacity"].verdict == "fail"
    again = look([*asked, *settings_of(found["disk capacity"])])["disk capacity"]
    assert again.verdict == "ok"


def test_a_capacity_is_told_in_volumes_of_the_size_that_was_asked_for(memory: Path) -> None:
    found = look([f"shared.path={memory}/s", "shared.capacity=256MiB"])["shared capacity"]
    assert found.found.startswith("256 MiB: 4 volumes of 64 MiB (pages of 2 MiB fill 62.09 MiB of each), ")


def test_a_volume_that_holds_no_page_fails(memory: Path) -> None:
    asked = [f"shared.path={memory}/s", "shared.capacity=4MiB", "shared.volume_bytes=1MiB"]
    found = look(asked)["shared capacity"]
    assert (found.verdict, "holds no page" in found.found) == ("fail", True)
    assert look([*asked, *settings_of(found)])["shared capacity"].verdict == "ok"


@needs_root
def test_too_few_inodes_fail_until_there_are_more(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=64m,nr_inodes=12", "tmpfs") as point:
        found = look(shared_at(point / "s"))["shared inodes"]
        assert found.verdict == "fail"
        follow(found)
        assert "shared inodes" not in look(shared_at(point / "s"))


# Direct I/O


def test_direct_io_is_probed_by_a_write_and_a_read(tmp_path: Path) -> None:
    probe = probe_direct_io(str(tmp_path))
    found = look([f"disk.path={tmp_path}/d", "disk.capacity=64MiB"])
    if found["disk file system"].verdict == "fail" or probe.error:
        pytest.skip("no direct I/O here")
    assert (found["disk direct I/O"].verdict, f"alignment {probe.alignment}" in found["disk direct I/O"].found) == (
        "ok", True,
    )  # fmt: skip
    assert os.listdir(tmp_path) == []
    odd = ["model=m", "revision=r", "layers=1", "kv_heads=1", "head_dim=67", "dtype=uint8", "page_tokens=16"]
    found = look([f"disk.path={tmp_path}/d", "disk.capacity=64MiB", *(f"geometry.{text}" for text in odd)])
    assert "pages of 2144 bytes take " in found["disk direct I/O"].found


@needs_root
def test_a_file_system_without_direct_io_is_warned_of(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 64 * MIB)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no mkfs.ext4")
    # A journal of all data takes no direct I/O.
    with mounted(tmp_path / "m", "-o", "loop,data=journal", str(image)) as point:
        asked = [f"disk.path={point}/d", "disk.capacity=16MiB"]
        found = look(asked)["disk direct I/O"]
        assert (found.verdict, "refused" in found.found) == ("warn", True)
        off = re.search(r"--set (disk\.direct_io=false)", found.remedy)
        assert off is not None
        assert look([*asked, off[1]])["disk direct I/O"].verdict == "ok"
        code, with_round = run_doctor("--disk", f"{point}/d", "--set", "disk.capacity=16MiB")
        assert with_round["disk round"].verdict == "ok", with_round["disk round"]
        assert code == 0


# Durability power


def test_a_sync_is_timed_where_saves_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [f"disk.path={tmp_path}/d", "disk.capacity=64MiB"]
    assert "disk durability" not in look(asked)
    asked.append("disk.durability=power")
    monkeypatch.setattr(directory_checks, "probe_sync", lambda directory: 0.0015)
    found = look(asked)["disk durability"]
    assert (found.verdict, "a sync took 1.500 ms" in found.found) == ("ok", True)
    monkeypatch.setattr(directory_checks, "probe_sync", lambda directory: 1e-6)
    found = look(asked)["disk durability"]
    assert (found.verdict, "ignores syncs" in found.why) == ("warn", True)
    other = re.search(r"--set (disk\.durability=process)", found.remedy)
    assert other is not None
    assert "disk durability" not in look([*asked, other[1]])


def test_the_probe_of_syncs_leaves_nothing(tmp_path: Path) -> None:
    assert probe_sync(str(tmp_path)) > 0
    assert os.listdir(tmp_path) == []


# The mount table


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/shm/x", "ramfs"), ("/dev/shmx", "ext4"), ("/dev/shm", "ramfs"), ("/my data/x", "xfs"), ("/", "ext4")],
)
def test_the_mount_of_a_path_is_the_longest_above_it_and_the_last_of_several(tree: Tree, path: str, kind: str) -> None:
    tree.write(
        "proc/self/mountinfo",
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / /dev/shm rw - tmpfs tmpfs rw\n"
        "3 1 0:2 / /dev/shm rw,nosuid master:1 - ramfs ramfs rw\n4 1 0:3 / /my\\040data rw - xfs /dev/sdb rw\n"
        "nonsense\n",
    )
    assert Mount.of(path, tree.root).kind == kind


def test_sizes_are_shown_for_people() -> None:
    assert [show_size(n) for n in (0, 1023, 1024, 3 * MIB // 2, 8 * GIB)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.50 MiB",
        "8 GiB",
    ]


def test_the_modes_that_the_doctor_looks_at_are_those_of_the_store(memory: Path) -> None:
    import stepwell as sw
    from store_kit import GEOMETRY

    (memory / "s").mkdir(mode=0o700)
    (memory / "s").chmod(0o770)
    found = look(shared_at(memory / "s"))["shared directory"]
    with pytest.raises(sw.errors.VolumeError) as refused:
        sw.PageStore(sw.StoreConfig(geometry=GEOMETRY, shared=sw.SharedTier("1MiB", f"{memory}/s")))
    assert found.found in str(refused.value)
    assert line_of(found) in str(refused.value)
    assert stat.S_IMODE((memory / "s").stat().st_mode) == 0o770
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
