"""Check the directory of a volume tier: who may write it, what it lies on, how much room there is, direct I/O."""

from __future__ import annotations

import mmap
import os
import stat
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell import _core
from stepwell.config import DiskTier, SharedTier, parse_size, volume_bytes
from stepwell.doctor.findings import Finding, fail, ok, size_setting, warn
from stepwell.doctor.machine import (
    CAP_SYS_ADMIN,
    DRIFT,
    Fit,
    Needs,
    capacity_setting,
    check_logout,
    has_capability,
    taken_bytes,
)
from stepwell.doctor.scratch import may_write, nearest_existing, parent_of, scratch_beside
from stepwell.effective import show_size, tier_capacity
from stepwell.settings import Settings
from stepwell.tiers.entry import directory_offence, is_of_the_machine
from stepwell.tiers.limits import DiskLimits, Limits, MemoryLimits, unescape

IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs")
NOT_FOR_FILES: Final = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "pstore",
     "mqueue", "binfmt_misc", "efivarfs", "fusectl")
)
_SYNCS: Final = 9
_NO_SYNC_SECONDS: Final = 5e-6
"""No request to a device comes back so soon: a file system that ignores syncs (a tmpfs, overlayfs with `volatile`)."""
PLACES_ON_DISK: Final = ("/var/cache", "/var/tmp", "/var/lib")


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a path is on. options: of the mount and of its file system."""

    point: str
    kind: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, path: str, root: Path) -> Mount:
        """Return the mount with the longest point above a path; of several on one point, the last."""
        real = os.path.realpath(path)
        found = cls("/", "unknown", ())
        for line in (root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
            left, separator, right = line.partition(" - ")
            fields, kind = left.split(" "), right.split(" ")
            if not separator or len(fields) < 6 or len(kind) < 3:
                continue
            point = unescape(fields[4])
            is_above = (real + "/").startswith(point.rstrip("/") + "/")
            if is_above and len(point) >= len(found.point):
                found = cls(point, kind[0], (*fields[5].split(","), *kind[2].split(",")))
        return found


@dataclass(frozen=True, slots=True)
class DirectIo:
    """What a file system does with O_DIRECT. alignment: as it states it, 0: refused. error: of a write and a read."""

    alignment: int
    error: str


def check_directory(settings: Settings, tier: str, root: Path) -> Iterator[Finding]:
    """Check the directory of "shared" or "disk". Where it cannot be one, nothing more is looked at."""
    given = settings.config.shared if tier == "shared" else settings.config.disk
    assert given is not None
    path = os.path.abspath(os.path.expanduser(given.path))
    try:
        mount = Mount.of(nearest_existing(path), root)
        fitness = _check_owner(tier, path, mount)
        yield fitness
        if fitness.verdict == "fail":
            return
        yield from _check_parents(tier, path)
        kind = _check_kind(tier, given, path, mount, root)
        yield kind
        if kind.verdict == "fail":
            return
        yield from _check_room(settings, tier, given, path, mount, root)
        if isinstance(given, DiskTier):
            yield _check_direct_io(settings, given, path)
            if given.durability == "power":
                yield _check_sync(path)
        elif (finding := check_logout(path, root)) is not None:
            yield finding
    except OSError as error:
        yield fail(
            f"{tier} directory",
            f"{error.filename or path}: {error.strerror}",
            why="a store meets the same error",
            remedy=f"ls -ld {path} {os.path.dirname(path)}  # then mend what it shows, or --set {tier}.path=DIR",
        )


# ---- owner, mode, mount ----------------------------------------------------------------------------------------------


def _check_owner(tier: str, path: str, mount: Mount) -> Finding:
    subject, user = f"{tier} directory", os.geteuid()
    if "ro" in mount.options:
        return fail(
            subject,
            f"{path} is on {mount.point} ({mount.kind}), mounted read-only",
            why="volumes are made, written and removed there",
            remedy=f"mount -o remount,rw {mount.point}  # as root; or --set {tier}.path=DIR on another mount",
        )
    for parent in reversed(Path(path).parents):
        if parent.is_dir() and not os.access(parent, os.X_OK, effective_ids=True):
            return fail(
                subject,
                f"user {user} may not enter {parent} (mode {stat.S_IMODE(parent.stat().st_mode):04o}), above {path}",
                why="what is in it is not there for this user",
                remedy=f"chmod a+x {parent}  # as its owner; or --set {tier}.path=DIR elsewhere",
            )
    if not os.path.lexists(path):
        return _check_missing(tier, path)
    status = _core.file_stat(path)
    offence = directory_offence(path, status)
    if offence is not None:
        remedy = offence.remedy
        if status.is_symlink:
            remedy = f"--set {tier}.path={os.path.realpath(path)}"
        elif not status.is_directory or _core.file_statfs(path).is_network:
            remedy = f"--set {tier}.path=DIR  # {remedy}"
        elif is_of_the_machine(path, status):
            remedy = f"--set {tier}.path={os.path.join(path, 'stepwell')}  # others need {path} as it is"
        elif status.uid != user:
            remedy = (
                f"chown -R {user} {path}  # as root; or run this as user {status.uid} "
                f"(setpriv --reuid={status.uid} --clear-groups stepwell doctor), or --set {tier}.path=DIR"
            )
        return fail(subject, f"{path} {offence.what}", why="a store refuses to open there", remedy=remedy)
    if not may_write(path) or not os.access(path, os.R_OK, effective_ids=True):
        return fail(
            subject,
            f"{path} cannot be read and written by its owner (mode {stat.S_IMODE(status.mode):04o})",
            why="volumes are made, written and removed there",
            remedy=f"chmod 0700 {path}",
        )
    return ok(subject, f"{path}: user {status.uid}, mode {stat.S_IMODE(status.mode):04o}")


def _check_missing(tier: str, path: str) -> Finding:
    subject, parent = f"{tier} directory", os.path.dirname(path)
    if not os.path.isdir(parent):
        return fail(
            subject,
            f"{path}: its parent {parent} is not there",
            why="a store makes the directory itself, not what is above it",
            remedy=f"mkdir -p {parent}",
        )
    if not may_write(parent):
        return fail(
            subject,
            f"{path} is not there, and user {os.geteuid()} may not make it in {parent}",
            why="a store makes it when it opens",
            remedy=f"install -d -m 0700 -o {os.geteuid()} {path}  # as root",
        )
    return ok(subject, f"{path}: not there yet, will be made, mode 0700")


def _check_parents(tier: str, path: str) -> Iterator[Finding]:
    """Look for directories above whose names others may change: they could put another directory in the place."""
    for parent in Path(path).parents:
        status = parent.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            what = f"{parent} can be written by anybody and is not sticky (mode {stat.S_IMODE(status.st_mode):04o})"
            remedy = f"chmod +t {parent}"
        elif status.st_uid not in (0, os.geteuid()):
            what = f"{parent} belongs to user {status.st_uid}"
            remedy = f"chown {os.geteuid()} {parent}  # as root; or --set {tier}.path=DIR elsewhere"
        else:
            continue
        yield warn(
            f"{tier} parents",
            what,
            why="who may rename the directory can take the tier away, or keep a store from opening",
            remedy=remedy,
        )


# ---- what it lies on -------------------------------------------------------------------------------------------------


def _check_kind(tier: str, given: SharedTier | DiskTier, path: str, mount: Mount, root: Path) -> Finding:
    subject = f"{tier} file system"
    found = f"{mount.kind} on {mount.point} ({','.join(dict.fromkeys(mount.options))})"
    if mount.kind in NOT_FOR_FILES:
        return fail(
            subject,
            f"{path} is on no file system for files: {found}",
            why="what is there is the kernel's own; no volume can be made",
            remedy=f"--set {tier}.path={'/dev/shm/stepwell' if tier == 'shared' else _place_on_disk(root)}",
        )
    if isinstance(given, SharedTier):
        if mount.kind in IN_MEMORY:
            return ok(subject, found)
        in_memory = Mount.of("/dev/shm", root).kind in IN_MEMORY
        size = size_setting(2 * parse_size(given.capacity, name="shared.capacity"))
        return warn(
            subject,
            f"{found} is not in memory",
            why="what is stored in shared memory is written to that file system too: slower, and it wears a disk",
            remedy="--set shared.path=/dev/shm/stepwell"
            if in_memory
            else f"mount -t tmpfs -o size={size[:-2]},mode=1777 tmpfs /dev/shm  # as root; then shared.path below it",
        )
    if mount.kind in IN_MEMORY:
        return fail(
            subject,
            f"{found} is memory, not a disk",
            why="its pages count as memory, which the disk tier does not look at: up to disk.capacity of it, then an "
            "OOM kill; and a reboot loses them",
            remedy=f"--set disk.path={_place_on_disk(root)}",
        )
    if mount.kind == "overlay":
        return warn(
            subject,
            f"{found} is the writable layer of a container",
            why="it goes with the container, and direct I/O and alignment are those of a layer below",
            remedy=f"docker run -v {path}:{path} ...  # or a hostPath or local volume in Kubernetes, mounted there",
        )
    return ok(subject, found)


def _place_on_disk(root: Path) -> str:
    for place in PLACES_ON_DISK:
        if os.path.isdir(place) and Mount.of(place, root).kind not in (*IN_MEMORY, "overlay"):
            return f"{place}/stepwell"
    return "DIR  # on a local disk"


# ---- room ------------------------------------------------------------------------------------------------------------


def _check_room(
    settings: Settings, tier: str, given: SharedTier | DiskTier, path: str, mount: Mount, root: Path
) -> Iterator[Finding]:
    """Check the capacity against what the file system has (shared: and machine and cgroups), in all and now."""
    subject = f"{tier} capacity"
    capacity = parse_size(given.capacity, name=f"{tier}.capacity")
    at = nearest_existing(path)
    limits: Limits = MemoryLimits(root) if tier == "shared" else DiskLimits()
    total, free = limits.total(at), limits.available(at)
    system = _core.file_statfs(at)
    taken = taken_bytes(given)
    holds = tier_capacity(settings, tier)
    tokens = holds.pages * settings.config.geometry.page_tokens
    page = show_size(settings.config.geometry.page_bytes)
    fill = f" (pages of {page} fill {show_size(holds.volume_bytes)} of each)" if holds.pages else ""
    found = (
        f"{show_size(capacity)}: {holds.volumes} volumes of {show_size(volume_bytes(given, name=tier))}{fill}, "
        f"{tokens:,} tokens; file system {show_size(system.total_bytes)}, {show_size(system.free_bytes)} free"
    )
    if taken:
        found += f"; {show_size(taken)} taken already"
    if holds.pages == 0:
        size = 4 * settings.config.geometry.page_bytes + (1 << 20)
        yield fail(
            subject,
            f"{found}: a volume holds no page",
            why="a store refuses to open",
            remedy=f"--set {tier}.capacity={size_setting(8 * size)} --set {tier}.volume_bytes={size_setting(size)}",
        )
    elif capacity > total.nbytes:
        yield fail(
            subject,
            f"{found}; at most {show_size(total.nbytes)} ({total.source})",
            why="a store refuses to open with a capacity that can never be had",
            remedy=_more_room(settings, given, mount, root, of_system=total.nbytes == system.total_bytes),
        )
    elif capacity > free.nbytes + taken:
        yield warn(
            subject,
            f"{found}; {show_size(free.nbytes)} can be had now ({free.source})",
            why="volumes beyond that are refused, with numbers, until somebody frees space",
            remedy=_more_room(settings, given, mount, root, of_system=free.nbytes == system.free_bytes),
        )
    else:
        yield ok(subject, found)
    status = os.statvfs(at)
    needed = 3 * holds.volumes + 16
    if status.f_files and status.f_favail < needed:
        yield fail(
            f"{tier} inodes",
            f"{status.f_favail} of {status.f_files} free; {needed} are needed for {holds.volumes} volumes",
            why="a file that cannot be made is a volume that cannot be",
            remedy=f"mount -o remount,nr_inodes={status.f_files + needed} {mount.point}  # as root"
            if mount.kind == "tmpfs"
            else f"df -i {mount.point}  # then remove files there, or --set {tier}.path=DIR elsewhere",
        )


def _more_room(
    settings: Settings, given: SharedTier | DiskTier, mount: Mount, root: Path, *, of_system: bool
) -> str:
    """Return the line that makes a capacity fit, by every check of it, now: a larger tmpfs where only that limits, else
    a smaller capacity.
    """
    system, taken = _core.file_statfs(mount.point), taken_bytes(given)
    if isinstance(given, DiskTier):
        free = system.free_bytes - system.free_bytes // DRIFT
        return capacity_setting("disk", given, min(system.total_bytes, free + taken))
    fit = Fit.of(Needs.of(settings), MemoryLimits(root))
    smaller = fit.remedy()
    if not of_system or mount.kind != "tmpfs" or not fit.has_memory:
        return smaller
    capacity = parse_size(given.capacity, name="shared.capacity")
    used = system.total_bytes - system.free_bytes
    mib = -(-(capacity + max(used - taken, 0)) >> 20) + 1
    remount = f"mount -o remount,size={mib}m {mount.point}"
    if is_container(root) and not has_capability(CAP_SYS_ADMIN, root):
        return (
            f"docker run --shm-size={mib}m ...  # Kubernetes: an emptyDir with medium: Memory and sizeLimit: {mib}Mi, "
            f"mounted at {mount.point}; or {smaller}"
        )
    return f"{remount}  # as root; docker: --shm-size={mib}m; or {smaller}"


def is_container(root: Path) -> bool:
    """Return whether this looks like the inside of a container."""
    marks = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
    return any((root / mark).exists() for mark in marks)


# ---- direct I/O ------------------------------------------------------------------------------------------------------


def probe_direct_io(directory: str) -> DirectIo:
    """Ask a file system for its alignment, then write one block past the page cache and read it back.

    Raises:
        OSError: a file cannot be made there.
    """
    name = f"{directory}/direct"
    _core.file_close(_core.file_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        alignment = _core.file_direct_alignment(name)
        if alignment == 0:
            return DirectIo(0, "refused")
        return DirectIo(alignment, _write_and_read(name, max(alignment, 4096)))
    finally:
        _core.file_unlink(name)


def _write_and_read(name: str, nbytes: int) -> str:
    """Return what went wrong; empty: nothing."""
    content = os.urandom(nbytes)
    fd = -1
    with mmap.mmap(-1, nbytes) as written, mmap.mmap(-1, nbytes) as read:  # aligned to a page of memory
        written.write(content)
        try:
            fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            if os.pwritev(fd, [written], 0) != nbytes or os.preadv(fd, [read], 0) != nbytes:
                return "a short write or read"
        except OSError as error:
            return str(error.strerror)
        finally:
            if fd >= 0:
                os.close(fd)
        return "" if read[:] == content else "other bytes were read than written"


def _check_direct_io(settings: Settings, given: DiskTier, path: str) -> Finding:
    with scratch_beside(path) as scratch:
        probe = probe_direct_io(scratch)
    where = f"{parent_of(path)}: alignment {probe.alignment} bytes" if probe.alignment else parent_of(path)
    works = probe.alignment > 0 and not probe.error
    if not given.direct_io:
        found = "works" if works else f"does not work ({probe.error})"
        return ok("disk direct I/O", f"{where}; it {found}; disk.direct_io = false: pages go through the page cache")
    if not works:
        return warn(
            "disk direct I/O",
            f"{where}; {probe.error}",
            why="pages go through the page cache: reads of 512 KiB and more were measured at a third to a half of the "
            "speed, and the cache counts against a memory cgroup",
            remedy="--set disk.path=DIR  # on a file system with O_DIRECT (ext4, xfs); or --set disk.direct_io=false",
        )
    page = settings.config.geometry.page_bytes
    padded = -(-page // max(probe.alignment, 512)) * max(probe.alignment, 512)
    lost = f", pages of {page} bytes take {padded}" if padded > page else ""
    return ok("disk direct I/O", f"{where}, one block written and read back{lost}")


# ---- durability power ------------------------------------------------------------------------------------------------


def probe_sync(directory: str) -> float:
    """Write a block and sync it a few times; return the median of the seconds that a sync took.

    Raises:
        OSError: a file cannot be made, written or synced there.
    """
    name = f"{directory}/sync"
    fd = _core.file_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        took = []
        for number in range(_SYNCS):
            _core.file_pwrite(fd, bytes([number]) * 4096, 0)
            began = time.perf_counter()
            _core.file_sync(fd)
            took.append(time.perf_counter() - began)
        _core.file_sync_directory(directory)
    finally:
        _core.file_close(fd)
        _core.file_unlink(name)
    return statistics.median(took)


def _check_sync(path: str) -> Finding:
    with scratch_beside(path) as scratch:
        took = probe_sync(scratch)
    found = f"{parent_of(path)}: power; a sync took {took * 1000:.3f} ms, a save waits for two or three"
    if took < _NO_SYNC_SECONDS:
        return warn(
            "disk durability",
            found,
            why="that is too soon for any device: this file system ignores syncs (overlayfs with `volatile` does), and "
            "a power loss takes pages that were acknowledged",
            remedy="--set disk.path=DIR  # on a file system that syncs; or --set disk.durability=process",
        )
    return ok("disk durability", found)
