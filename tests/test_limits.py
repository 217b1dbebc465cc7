"""What a memory tier may reserve: the least of file system, machine and every cgroup above."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from stepwell import _core
from stepwell.tiers import limits
from stepwell.tiers.limits import DiskLimits, MemoryLimits

MIB = 1 << 20


@pytest.fixture(autouse=True)
def file_system(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    system = SimpleNamespace(total_bytes=900 * MIB, free_bytes=800 * MIB)
    monkeypatch.setattr(limits._core, "file_statfs", lambda path: system)
    return system


class Tree:
    """A root with /proc and cgroup mounts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 716800 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, *, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write(
            "proc/self/mountinfo",
            "20 1 0:5 / /proc rw - proc proc rw\n"
            f"30 20 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
        )

    def v1(self, group: str, *, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"5:cpu,cpuacct:/other\n4:memory:{group}\n0::/unused\n")
        self.write(
            "proc/self/mountinfo",
            f"29 20 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"30 20 0:26 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "31 20 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        )

    def limits(self) -> MemoryLimits:
        return MemoryLimits(self.root, margin_bytes=10 * MIB)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_cgroups_machine_and_file_system_limit(
    tree: Tree, file_system: SimpleNamespace
) -> None:
    assert tree.limits().total("/x").nbytes == 900 * MIB
    available = tree.limits().available("/x")
    assert (available.nbytes, available.source) == ((700 - 10) * MIB, "MemAvailable")
    file_system.free_bytes = 5 * MIB
    available = tree.limits().available("/x")
    assert (available.nbytes, available.source) == (5 * MIB, "free space of the file system of /x")
    file_system.total_bytes = 2000 * MIB
    assert tree.limits().total("/x").source == "MemTotal"


def test_every_ancestor_of_a_v2_group_limits(tree: Tree) -> None:
    tree.v2("/pod/container/job")
    tree.write("sys/fs/cgroup/pod/container/job/memory.max", "max\n")
    tree.write("sys/fs/cgroup/pod/container/memory.max", f"{500 * MIB}\n")
    tree.write("sys/fs/cgroup/pod/container/memory.current", f"{100 * MIB}\n")
    tree.write("sys/fs/cgroup/pod/memory.max", f"{600 * MIB}\n")
    tree.write("sys/fs/cgroup/pod/memory.current", f"{300 * MIB}\n")
    assert tree.limits().total("/x").nbytes == 500 * MIB
    available = tree.limits().available("/x")
    assert available.nbytes == (600 - 300 - 10) * MIB
    assert available.source.endswith("/sys/fs/cgroup/pod/memory.max")


def test_memory_high_limits_like_memory_max(tree: Tree) -> None:
    tree.v2("/")
    tree.write("sys/fs/cgroup/memory.max", f"{500 * MIB}\n")
    tree.write("sys/fs/cgroup/memory.high", f"{400 * MIB}\n")
    tree.write("sys/fs/cgroup/memory.current", f"{100 * MIB}\n")
    assert tree.limits().total("/x").nbytes == 400 * MIB
    assert tree.limits().available("/x").nbytes == 290 * MIB


def test_file_pages_that_can_be_dropped_do_not_count(tree: Tree) -> None:
    tree.v2("/")
    tree.write("sys/fs/cgroup/memory.max", f"{500 * MIB}\n")
    tree.write("sys/fs/cgroup/memory.current", f"{450 * MIB}\n")
    tree.write("sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {200 * MIB}\nfile 7\n")
    assert tree.limits().available("/x").nbytes == (500 - 250 - 10) * MIB


def test_every_ancestor_of_a_v1_group_limits(tree: Tree) -> None:
    tree.v1("/process/child")
    base = "sys/fs/cgroup/memory"
    tree.write(f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    tree.write(f"{base}/memory.usage_in_bytes", f"{999 * MIB}\n")
    tree.write(f"{base}/process/memory.limit_in_bytes", f"{300 * MIB}\n")
    tree.write(f"{base}/process/memory.usage_in_bytes", f"{280 * MIB}\n")
    tree.write(f"{base}/process/memory.stat", f"total_inactive_file {90 * MIB}\n")
    tree.write(f"{base}/process/child/memory.limit_in_bytes", f"{400 * MIB}\n")
    tree.write(f"{base}/process/child/memory.usage_in_bytes", f"{10 * MIB}\n")
    assert tree.limits().total("/x").nbytes == 300 * MIB
    available = tree.limits().available("/x")
    assert available.nbytes == (300 - 190 - 10) * MIB
    assert "process/memory.limit_in_bytes" in available.source


@pytest.mark.parametrize("group", ["/docker/abc/job", "/docker/abc", "/elsewhere", "/../sibling"])
def test_a_mount_that_shows_a_part_of_the_hierarchy_is_followed_to_its_top(
    tree: Tree, group: str
) -> None:
    tree.v1(group, mount_root="/docker/abc")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{300 * MIB}\n")
    assert tree.limits().total("/x").nbytes == 300 * MIB


def test_usage_above_the_limit_leaves_nothing_rather_than_less(tree: Tree) -> None:
    tree.v2("/")
    tree.write("sys/fs/cgroup/memory.max", f"{5 * MIB}\n")
    tree.write("sys/fs/cgroup/memory.current", f"{7 * MIB}\n")
    assert tree.limits().available("/x").nbytes == 0


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3\n4 5 6", "36 35 98:0 / /x rw - cgroup2"])
def test_a_mount_table_that_makes_no_sense_sets_no_limit(tree: Tree, text: str) -> None:
    tree.write("proc/self/cgroup", "nonsense\n0::/a\n")
    tree.write("proc/self/mountinfo", text)
    assert tree.limits().total("/x").nbytes == 900 * MIB


def test_spaces_in_a_mount_point_are_read(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("proc/self/mountinfo", r"30 20 0:26 / /my\040groups rw - cgroup2 cgroup2 rw")
    tree.write("my groups/memory.max", f"{7 * MIB}\n")
    assert tree.limits().total("/x").nbytes == 7 * MIB


def test_a_disk_is_limited_by_its_file_system(file_system: SimpleNamespace) -> None:
    assert DiskLimits().total("/x").nbytes == 900 * MIB
    assert DiskLimits().available("/x").nbytes == 800 * MIB


def test_this_machine_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memory = MemoryLimits()
    assert 0 < memory.available("/dev/shm").nbytes <= memory.total("/dev/shm").nbytes
    assert DiskLimits().total("/").nbytes == _core.file_statfs("/").total_bytes
