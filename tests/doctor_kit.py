"""What the tests of the doctor share: run it, find a line, follow its advice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepwell.doctor.diagnose import diagnose
from stepwell.doctor.findings import Finding
from stepwell.doctor.machine import Needs, check_packages

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="mounts, owners and hard limits take root")
GEOMETRY_TEXT = """
[geometry]
model = "m"
revision = "r"
layers = 2
kv_heads = 2
head_dim = 32
dtype = "uint8"
page_tokens = 16
"""


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}


def run_doctor(*arguments: str, shell: str = "", cwd: Path | None = None) -> tuple[int, dict[str, Finding]]:
    """Run `stepwell doctor --json` behind some lines of shell; return its exit code and its findings by subject."""
    command = f'{shell}\nexec "$@"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "stepwell.cli", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=cwd,
        check=False,
    )
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["findings"]
    return done.returncode, by_subject([Finding(**row) for row in rows])


def look(arguments: Sequence[str], *, root: Path = Path("/"), **how: Any) -> dict[str, Finding]:
    """Run the checks in this process, without the round; return the findings by subject."""
    how.setdefault("with_round", False)
    return by_subject(list(diagnose(environ={}, arguments=list(arguments), root=root, **how)))


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.subject: finding for finding in findings}
    for finding in findings:
        assert finding.found
        assert bool(finding.why) == bool(finding.remedy) == (finding.verdict != "ok"), finding
    return found


def settings_of(finding: Finding) -> list[str]:
    """Return the NAME=VALUE of a remedy that names settings."""
    words = finding.remedy.partition("#")[0].split()
    assert words[0::2] == ["--set"] * (len(words) // 2), finding.remedy
    return words[1::2]


def line_of(finding: Finding) -> str:
    """Return the shell line of a remedy."""
    assert not finding.remedy.startswith("--"), finding.remedy
    return finding.remedy.partition("#")[0].strip()


def follow(finding: Finding) -> None:
    """Run the shell line of a remedy."""
    subprocess.run(["bash", "-ec", line_of(finding)], check=True, capture_output=True)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Be somebody else for a while, who may not read this interpreter's library: what checks import comes before."""
    list(check_packages(Needs()))
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class Tree:
    """A root with the files that the doctor reads, those of this machine where a test does not write its own."""

    COPIED = ("proc/meminfo", "proc/cpuinfo", "proc/self/status", "proc/self/mountinfo", "proc/sys/vm/max_map_count")

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in self.COPIED:
            self.write(name, Path("/", name).read_text())
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def memory(self, total: int, available: int) -> None:
        self.write("proc/meminfo", f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n")

    def cgroup2(self, group: str, limits: dict[str, dict[str, str]]) -> None:
        """Write groups: path -> file -> text."""
        self.write("proc/self/cgroup", f"0::{group}\n")
        self.write(
            "proc/self/mountinfo",
            Path("/proc/self/mountinfo").read_text()
            + "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
        )
        for path, files in limits.items():
            for name, text in files.items():
                self.write(f"sys/fs/cgroup{path}/{name}", text)


@contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[Path]:
    """Mount something for a while; skip the test where that is not allowed."""
    point.mkdir(exist_ok=True)
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
