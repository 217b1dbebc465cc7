"""Say how much a tier may reserve before the machine, a container's limit or a file system says no.

A page of tmpfs counts against the memory cgroup of whoever touches it first, and going over that
limit is an OOM kill, not an error (measured: posix_fallocate above a v1 limit ended in SIGKILL). So
whoever reserves memory looks first: at the file system, at the machine, and at every ancestor
cgroup, v1 or v2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from stepwell import _core

T = TypeVar("T")

# Left over by every reservation in memory, for what else the machine or the container does
# meanwhile: one step of another process's reservation (64 MiB, volumes.py), which looks at the same
# numbers at the same time.
MEMORY_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes, and what sets it."""

    nbytes: int
    source: str


def memory_limit() -> Limit:
    """Return what this process may take of memory at most: the least of the machine's and its cgroups' limits.

    Raises:
        OSError: /proc cannot be read.
    """
    return MemoryLimits().memory()


class Limits(Protocol):
    """Answer what a reservation at a path may take. Threads: any."""

    def total(self, path: str) -> Limit:
        """Return the most that could ever be reserved at `path`."""

    def available(self, path: str) -> Limit:
        """Return what may be reserved at `path` now."""


class DiskLimits:
    """The limits of files on a disk: those of the file system."""

    def total(self, path: str) -> Limit:
        """Return the size of the file system."""
        return Limit(_core.file_statfs(path).total_bytes, f"size of the file system of {path}")

    def available(self, path: str) -> Limit:
        """Return the free space of the file system, without what is kept for root."""
        return Limit(_core.file_statfs(path).free_bytes, f"free space of the file system of {path}")


class MemoryLimits:
    """The limits of files in memory: of file system, machine, and every cgroup above this process.

    Args:
        root: where /proc and the cgroup mounts are found; tests give a tree of their own.
        margin_bytes: left free by `available`.
    """

    def __init__(self, root: Path = Path("/"), *, margin_bytes: int = MEMORY_MARGIN_BYTES) -> None:
        self._root = root
        self._margin_bytes = margin_bytes

    def memory(self) -> Limit:
        """Return the least of the machine's memory and the cgroups' limits."""
        limits = [Limit(self._meminfo("MemTotal"), "MemTotal")]
        limits.extend(self._groups(_limit_of_cgroup1, _limit_of_cgroup2))
        return min(limits, key=_nbytes)

    def machine(self) -> tuple[int, int]:
        """Return the machine's memory and what of it may be had without swapping, bytes."""
        return self._meminfo("MemTotal"), self._meminfo("MemAvailable")

    def total(self, path: str) -> Limit:
        """Return the least of the file system's size, the machine's memory, the cgroups' limits."""
        size = Limit(_core.file_statfs(path).total_bytes, f"size of the file system of {path}")
        return min(size, self.memory(), key=_nbytes)

    def available(self, path: str) -> Limit:
        """Return the least that file system, machine and cgroups leave; memory less the margin."""
        limits = [Limit(self._meminfo("MemAvailable") - self._margin_bytes, "MemAvailable")]
        limits.extend(
            Limit(group.limit_bytes - group.used_bytes - self._margin_bytes, group.source)
            for group in self.cgroups()
        )
        limits.append(
            Limit(_core.file_statfs(path).free_bytes, f"free space of the file system of {path}")
        )
        least = min(limits, key=_nbytes)
        return Limit(max(least.nbytes, 0), least.source)

    def _meminfo(self, field: str) -> int:
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        raise OSError(f"/proc/meminfo has no {field}")

    def cgroups(self) -> Iterator[CgroupLimit]:
        """Yield every memory cgroup with a limit, from this process's own up to the mount."""
        return self._groups(_read_cgroup1, _read_cgroup2)

    def _groups(self, read1: Callable[[Path], T | None], read2: Callable[[Path], T | None]) -> Iterator[T]:
        """Yield what is read of each memory cgroup with a limit, v1 or v2."""
        mounts = list(self._cgroup_mounts())
        for line in _read(self._root / "proc/self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if controllers == "":
                read, wanted = read2, "cgroup2"
            elif "memory" in controllers.split(","):
                read, wanted = read1, "cgroup"
            else:
                continue
            for kind, mount_root, mount_point in mounts:
                if kind == wanted:
                    yield from self._ancestors(read, mount_root, mount_point, group)

    def _ancestors(
        self, read: Callable[[Path], T | None], mount_root: str, mount_point: str, group: str
    ) -> Iterator[T]:
        top = self._root / mount_point.lstrip("/")
        # Inside a container the mount may show only a part of the hierarchy; a group outside of it
        # is seen as its top.
        below = _relative(group, mount_root)
        here = top / below if below else top
        while True:
            found = read(here)
            if found is not None:
                yield found
            if here == top:
                return
            here = here.parent

    def _cgroup_mounts(self) -> Iterator[tuple[str, str, str]]:
        """Yield (type, root, mount point) of the mounts that may hold memory cgroups."""
        for line in _read(self._root / "proc/self/mountinfo").splitlines():
            left, separator, right = line.partition(" - ")
            fields, kind = left.split(" "), right.split(" ")
            if not separator or len(fields) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
                yield kind[0], unescape(fields[3]), unescape(fields[4])


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """One memory cgroup with a limit.

    used_bytes: without what the kernel can drop at once, inactive file pages. shmem_bytes: of these, files on tmpfs.
    source: the file that holds the limit.
    """

    limit_bytes: int
    used_bytes: int
    source: str
    shmem_bytes: int = 0


def _nbytes(limit: Limit) -> int:
    return limit.nbytes


def _limit_of_cgroup2(group: Path) -> Limit | None:
    # Above memory.high a group is throttled and reclaimed rather than killed: to a cache that is a
    # limit all the same.
    limits = [
        (value, name)
        for name in ("memory.max", "memory.high")
        if (value := _number(group / name)) is not None
    ]
    if not limits:
        return None
    value, name = min(limits)
    return Limit(value, f"{group / name}")


def _read_cgroup2(group: Path) -> CgroupLimit | None:
    limit = _limit_of_cgroup2(group)
    if limit is None:
        return None
    used = _number(group / "memory.current") or 0
    dropped, shmem = _stat(group, "inactive_file", "shmem", at_most=used)
    return CgroupLimit(limit.nbytes, used - dropped, limit.source, shmem)


def _limit_of_cgroup1(group: Path) -> Limit | None:
    limit = _number(group / "memory.limit_in_bytes")
    return None if limit is None else Limit(limit, f"{group / 'memory.limit_in_bytes'}")


def _read_cgroup1(group: Path) -> CgroupLimit | None:
    limit = _limit_of_cgroup1(group)
    if limit is None:
        return None
    used = _number(group / "memory.usage_in_bytes") or 0
    dropped, shmem = _stat(group, "total_inactive_file", "total_shmem", at_most=used)
    return CgroupLimit(limit.nbytes, used - dropped, limit.source, shmem)


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no such file or it says `max`."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _stat(group: Path, *fields: str, at_most: int) -> list[int]:
    """Return some fields of a group's statistics, 0 where it has no such field: the kernel adds them up to be read."""
    found = dict.fromkeys(fields, 0)
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in found and value.isdecimal():
            found[name] = min(int(value), at_most)
    return list(found.values())


def _read(path: Path) -> str:
    """Return a file's text; empty where we cannot have it: then it sets no limit that we know."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _relative(group: str, mount_root: str) -> str:
    """Return `group` as a path below `mount_root`; empty where it is that, or is not below it."""
    if ".." in group.split("/"):
        return ""
    root = mount_root.rstrip("/") + "/"
    return group[len(root) :].strip("/") if group.startswith(root) else ""


def unescape(field: str) -> str:
    """Undo the octal escapes of mountinfo."""
    for escape, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(escape, character)
    return field
