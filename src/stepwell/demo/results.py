"""Say what a run of the demo came to: checks, acts, moments, measurements, and on what machine. JSON and the HTML
report are made of this alone.
"""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import msgspec

from stepwell.demo.scenario import Measured, Sizes, Summary

TIERS = ("device", "host", "shared", "disk")

TIERED = ("served", "shared", "disk")
"""The acts that are served through all four tiers, the negative control apart."""

_PACKAGES = ("stepwell", "numpy", "jax", "jaxlib", "lmdb", "msgspec")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold. holds: None where this run cannot tell. equal, close: positions compared."""

    name: str
    holds: bool | None
    detail: str
    equal: int = 0
    close: int = 0

    @property
    def verdict(self) -> str:
        """Return it in words."""
        return "not judged" if self.holds is None else "holds" if self.holds else "FAILS"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """When something happened: seconds since the demo began.

    what: "started" (a process), "opened" (its store), "serving" (its times count from here), "served", "killed",
    "ended", "removed" (the shared memory).
    """

    at: float
    act: str
    what: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation, as the act "served" answered it. turn: from 1."""

    request: int
    user: str
    turn: int
    said: str
    answer: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run was made. cores: those that this process may use; load: processes that wanted one, over a minute,
    when the run began; versions: of packages.
    """

    processor: str
    cores: int
    memory_bytes: int
    load: float
    kernel: str
    python: str
    versions: dict[str, str]
    shared_file_system: str
    disk_file_system: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a demo. ok: no check fails. answers: of a model with a vocabulary.

    begun: date and time, UTC. page_tokens, page_bytes: of the model's KV. measured: loads and computations with nothing
    else running, where a report was asked for; measured_load: the machine's over the minute before that ended;
    gpu_tokens_per_second: what the user states.
    """

    ok: bool
    seconds: float
    model: str
    requests: int
    trace: str | None
    notes: list[str]
    checks: list[Check]
    runs: dict[str, Summary]
    answers: list[Answer]
    moments: list[Moment]
    begun: str = ""
    page_tokens: int = 0
    page_bytes: int = 0
    sizes: Sizes | None = None
    machine: Machine | None = None
    measured: list[Measured] = []
    measured_load: float | None = None
    gpu_tokens_per_second: float | None = None

    @property
    def verdict(self) -> str:
        """Return what the checks come to, in words."""
        if not self.ok:
            return "it does not hold"
        return "all of it holds" if all(check.holds for check in self.checks) else "all that was judged holds"

    def moment(self, act: str, what: str) -> float | None:
        """Return when something happened first, None where it did not."""
        return next((moment.at for moment in self.moments if (moment.act, moment.what) == (act, what)), None)


def now() -> str:
    """Return date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def look_at_machine(shared: Path, disk: Path) -> Machine:
    """Describe this machine. shared, disk: where the tiers lie; a parent that exists is looked at."""
    return Machine(
        processor=_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load=round(os.getloadavg()[0], 2),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions={name: metadata.version(name) for name in _PACKAGES if _is_installed(name)},
        shared_file_system=_file_system(shared),
        disk_file_system=_file_system(disk),
    )


def _field(path: Path, name: str) -> str:
    """Return the first value of a "name : value" file; empty where there is none."""
    if not path.exists():
        return ""
    lines = (line.partition(":") for line in path.read_text(errors="replace").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds a path: that of the deepest mount point above it."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    real, best, kind = os.path.realpath(path), "", "unknown"
    for line in mounts.read_text(errors="replace").splitlines():
        _, point, name, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")  # a blank in it is \040
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind
