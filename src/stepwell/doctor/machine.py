"""Check what a machine gives every process: packages, processor, memory, limits, and what happens at logout."""

from __future__ import annotations

import os
import platform
import pwd
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from stepwell import _core
from stepwell.config import DiskTier, SharedTier, parse_size
from stepwell.doctor.findings import Finding, fail, ok, size_setting, warn
from stepwell.doctor.scratch import nearest_existing
from stepwell.effective import show_size, tier_capacity
from stepwell.settings import Settings
from stepwell.tiers.limits import MEMORY_MARGIN_BYTES, CgroupLimit, MemoryLimits
from stepwell.tiers.volume_files import list_directory

ENGINES: Final = ("sglang", "vllm", "torch")
ACCELERATORS: Final = re.compile(r"(jax-(cuda\d+|rocm\d*)-plugin|libtpu)$")
CAP_IPC_LOCK: Final = 14
CAP_SYS_ADMIN: Final = 21
DESCRIPTORS_OF_A_PROCESS: Final = 128  # interpreter, engine's own files and sockets, pipes
DESCRIPTORS_OF_SHARED: Final = 2  # a volume: lock, file
DESCRIPTORS_OF_DISK: Final = 5  # a volume: lock, metadata, pages, LMDB, and one while it is being read
MAPPINGS_OF_A_PROCESS: Final = 4096  # libraries, threads' stacks, arenas
DRIFT: Final = 32  # this part of what is free now comes and goes: advice that uses all of it is late at once
SYSTEM_UIDS: Final = 999  # SYS_UID_MAX where /etc/login.defs says nothing


@dataclass(frozen=True, slots=True)
class Needs:
    """What a configuration takes of a machine when all its tiers are full. Bytes, and counts of volumes.

    memory_bytes: host and shared, less what is in the shared directory already. shared: as configured.
    staging_bytes: for neighbours' pages, of which a store takes no more than a quarter of what is left.
    file_bytes: of the largest file.
    """

    host_bytes: int = 0
    shared_bytes: int = 0
    shared: SharedTier | None = None
    taken_bytes: int = 0
    staging_bytes: int = 0
    shared_volumes: int = 0
    disk_volumes: int = 0
    file_bytes: int = 0
    has_device: bool = False

    @property
    def memory_bytes(self) -> int:
        """Memory that is still to be taken."""
        return self.host_bytes + max(self.shared_bytes - self.taken_bytes, 0)

    def staged(self, room: int) -> int:
        """Return what staging takes of some room."""
        return min(self.staging_bytes, max(room, 0) // 4)

    @classmethod
    def of(cls, settings: Settings | None) -> Needs:
        """Return the needs of a configuration; of none: none."""
        if settings is None:
            return cls()
        config = settings.config
        volumes = dict.fromkeys(("shared", "disk"), 0)
        largest = taken = 0
        for tier, given in (("shared", config.shared), ("disk", config.disk)):
            if given is not None:
                capacity = tier_capacity(settings, tier)
                volumes[tier], largest = capacity.volumes, max(largest, capacity.volume_bytes)
        if config.shared is not None:
            taken = taken_bytes(config.shared)
        return cls(
            host_bytes=config.host_bytes() or 0,
            shared_bytes=parse_size(config.shared.capacity, name="shared.capacity") if config.shared else 0,
            shared=config.shared,
            taken_bytes=taken,
            staging_bytes=config.staging_bytes() or 0,
            shared_volumes=volumes["shared"],
            disk_volumes=volumes["disk"],
            file_bytes=largest,
            has_device=config.device is not None,
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """What of host and shared fits by every check of them, now. Never more than was asked.

    both_bytes: what the two may take together, whatever the file system of shared memory has.
    """

    needs: Needs
    host_bytes: int
    shared_bytes: int
    both_bytes: int

    @classmethod
    def of(cls, needs: Needs, limits: MemoryLimits) -> Fit:
        """Look at machine, cgroups and the file system of shared memory. Host keeps its size where shared can give."""
        total, available = limits.machine()
        groups = list(limits.cgroups())
        left = _steady(min([available, *(group.limit_bytes - group.used_bytes for group in groups)]))
        left -= needs.staged(left)
        both = min([total, *(group.limit_bytes for group in groups), left + needs.taken_bytes])
        shared = needs.shared_bytes
        if needs.shared is not None:
            system = _core.file_statfs(nearest_existing(os.path.abspath(os.path.expanduser(needs.shared.path))))
            free = system.free_bytes - system.free_bytes // DRIFT
            shared = min(shared, system.total_bytes, free + needs.taken_bytes)
        host = min(needs.host_bytes, left, both)
        if needs.shared_bytes and both - host < needs.shared_bytes // 8:
            host = min(host, max(both // 4, both - shared))
        return cls(needs, host, min(shared, both - host), both)

    @property
    def has_memory(self) -> bool:
        """Whether memory has all that was asked, so that only the file system is in the way, if anything is."""
        return self.needs.host_bytes + self.needs.shared_bytes <= self.both_bytes

    def remedy(self) -> str:
        """Return the settings that make it fit."""
        lines = []
        if self.needs.shared is not None and self.shared_bytes < self.needs.shared_bytes:
            if self.shared_bytes < 1 << 20:
                return "free -m  # then end what holds memory: there is none for the shared tier now"
            lines.append(capacity_setting("shared", self.needs.shared, self.shared_bytes))
        if self.host_bytes < self.needs.host_bytes:
            host = _round_down(self.host_bytes)
            lines.append(f"--set host={size_setting(host) if host >= 1 << 20 else 'none'}")
        return " ".join(lines) or "free -m  # now there is enough: what was in the way has gone meanwhile"


def capacity_setting(name: str, tier: SharedTier | DiskTier, nbytes: int) -> str:
    """Return the settings that give a tier a smaller capacity, and sizes within it where they are larger than that."""
    nbytes = _round_down(nbytes)
    lines = [f"--set {name}.capacity={size_setting(nbytes)}"]
    for part, size in (("volume_bytes", tier.volume_bytes), ("share", tier.share)):
        if size is not None and parse_size(size, name=f"{name}.{part}") > nbytes:
            lines.append(f"--set {name}.{part}={size_setting(nbytes // 8)}")
    return " ".join(lines)


def _round_down(nbytes: int) -> int:
    """Return a round size a little below: what is free changes all the time, and two lines should give one number."""
    unit = 1 << max(nbytes.bit_length() - 7, 0)
    return nbytes // unit * unit


def _steady(nbytes: int) -> int:
    """Return what of free memory is there in a moment too: less what others are left, and what comes and goes."""
    room = max(nbytes - MEMORY_MARGIN_BYTES, 0)
    return room - room // DRIFT


def taken_bytes(tier: SharedTier | DiskTier) -> int:
    """Return what the volumes in a tier's directory take; 0 where it cannot be looked at."""
    try:
        return list_directory(os.path.abspath(os.path.expanduser(tier.path))).total_bytes
    except OSError:
        return 0


def check_machine(settings: Settings | None, root: Path) -> Iterator[Finding]:
    """Check everything that is not about one directory. root: where /proc, /sys, /etc, /run are found."""
    needs = Needs.of(settings)
    yield from check_packages(needs)
    yield check_processor(root)
    yield from check_memory(needs, MemoryLimits(root))
    yield check_locked_memory(needs, root)
    yield check_huge_pages(needs, root)
    yield from check_limits(needs, root)


# ---- packages and processor ------------------------------------------------------------------------------------------


def check_packages(needs: Needs) -> Iterator[Finding]:
    """Check versions against what this package asks for, from metadata alone."""
    version = version_of("stepwell")
    if version is None:
        yield warn(
            "packages",
            "no metadata of stepwell can be read here: it runs from a directory, or this user may not read its install",
            why="what it needs, and whether that is here, is not known",
            remedy="pip install .  # in the checkout (or stepwell from an index), as, or for, the user that will run "
            "the engine",
        )
        return
    wanted: dict[str, str] = {}
    for line in metadata.requires("stepwell") or []:
        found = re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)", line)
        if found is not None and ("extra" not in line or found[1] == "jax"):
            wanted[found[1]] = found[2]
    shown = [f"stepwell {version}", f"python {platform.python_version()}"]
    for name, least in sorted(wanted.items()):
        have = version_of(name)
        if name == "jax" and not needs.has_device and have is None:
            continue
        if have is not None and _numbers(have) >= _numbers(least):
            if name != "jax":
                shown.append(f"{name} {have}")
            continue
        yield fail(
            f"package {name}",
            f"{'not installed' if have is None else have}; at least {least} is needed",
            why="the device tier needs it" if name == "jax" else "stepwell does not work without it",
            remedy=f"pip install '{name}>={least}'",
        )
    yield ok("packages", ", ".join(shown))
    jax = version_of("jax")
    if jax is not None:
        plugins = sorted({name for name in _installed() if ACCELERATORS.fullmatch(name)})
        backend = ", ".join(plugins) if plugins else "CPU backend only, no accelerator plugin is installed"
        yield ok("jax", f"jax {jax} ({backend})")
    engines = [f"{name} {version}" for name in ENGINES if (version := version_of(name)) is not None]
    yield ok("engines", ", ".join(engines) or f"none of {', '.join(ENGINES)} is installed here")


def version_of(name: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed() -> Iterator[str]:
    for distribution in metadata.distributions():
        yield str(distribution.metadata["Name"] or "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def check_processor(root: Path) -> Finding:
    """Say which implementations the core chose, and what the processor has."""
    crc, sha = _core.crc32c_implementation(), _core.sha256_implementation()
    words = set(re.findall(r"\w+", _line(root / "proc/cpuinfo", r"(?:flags|Features)\s*:(.*)") or ""))
    has = [name for name in ("sse4_2", "pclmulqdq", "avx2", "avx512f", "sha_ni", "crc32", "sha2") if name in words]
    found = f"checksums {crc}, hashes {sha}; {len(os.sched_getaffinity(0))} cores; {' '.join(has) or 'no flags seen'}"
    slow = [what for what, name in (("checksums", crc), ("hashes", sha)) if name == "portable"]
    if not slow:
        return ok("processor", found)
    return warn(
        "processor",
        found,
        why=f"{' and '.join(slow)} are computed without help of the processor, several times slower; "
        "every byte that is read is checked",
        remedy="qemu-system-x86_64 -cpu host ...  # let the virtual machine show its processor's flags, if it is one",
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def check_memory(needs: Needs, limits: MemoryLimits) -> Iterator[Finding]:
    """Check host and shared together against the machine, and against every cgroup above this process."""
    total, available = limits.machine()
    wanted = f"host {show_size(needs.host_bytes)} + shared {show_size(needs.shared_bytes)}"
    if needs.taken_bytes:
        wanted += f" ({show_size(needs.taken_bytes)} of it in use)"
    if needs.staging_bytes:
        wanted += f" + staging, at most {show_size(needs.staging_bytes)}"
    found = f"{show_size(available)} of {show_size(total)} available; {wanted}"
    room = available - MEMORY_MARGIN_BYTES
    if needs.host_bytes + needs.shared_bytes > total:
        yield fail(
            "memory", found, why="both lie in memory, and the machine has less", remedy=Fit.of(needs, limits).remedy()
        )
    elif needs.memory_bytes + needs.staged(room) > room:
        yield warn(
            "memory",
            found,
            why=f"with {show_size(MEMORY_MARGIN_BYTES)} left over for others, {show_size(max(room, 0))} can be had "
            "now: volumes that do not fit are refused, with numbers",
            remedy=Fit.of(needs, limits).remedy(),
        )
    else:
        yield ok("memory", found)
    groups = [group for group in limits.cgroups() if group.limit_bytes < total]
    if not groups:
        yield ok("memory cgroup", "no group above this process limits it below the machine's memory")
    for group in sorted(groups, key=lambda group: group.limit_bytes - group.used_bytes)[:1]:
        yield _check_cgroup(needs, group, Fit.of(needs, limits))


def _check_cgroup(needs: Needs, group: CgroupLimit, fit: Fit) -> Finding:
    room = group.limit_bytes - group.used_bytes - MEMORY_MARGIN_BYTES
    found = (
        f"{group.source}: {show_size(group.used_bytes)} of {show_size(group.limit_bytes)} in use, "
        f"{show_size(group.shmem_bytes)} of that on tmpfs; host and shared take {show_size(needs.memory_bytes)} more"
    )
    why = (
        "a page of tmpfs counts against the group of whoever touches it first, and going over the limit is an OOM "
        "kill, not an error"
    )
    wanted = needs.memory_bytes + needs.staging_bytes
    raised = group.used_bytes + wanted + 4 * MEMORY_MARGIN_BYTES  # others come and go meanwhile
    remedy = (
        f"echo {raised} > {group.source}  # as root; docker: --memory={size_setting(raised + (1 << 20))}; Kubernetes: "
        f"resources.limits.memory; or {fit.remedy()}"
    )
    if needs.host_bytes + needs.shared_bytes > group.limit_bytes:
        return fail("memory cgroup", found, why=f"{why}; stepwell refuses to open", remedy=remedy)
    if needs.memory_bytes + needs.staged(room) > room:
        return warn("memory cgroup", found, why=f"{why}; stepwell refuses volumes that do not fit", remedy=remedy)
    return ok("memory cgroup", found)


def check_locked_memory(needs: Needs, root: Path) -> Finding:
    """Say what may be locked: stepwell locks nothing, drivers that pin the host tier do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"RLIMIT_MEMLOCK {_limit(soft, size=True)} (hard {_limit(hard, size=True)})"
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", found)
    if has_capability(CAP_IPC_LOCK, root):
        return ok("locked memory", f"{found}, not applied: this process has CAP_IPC_LOCK")
    if not needs.has_device or soft >= needs.host_bytes:
        return ok("locked memory", f"{found}; stepwell locks nothing itself, and no driver pins more for it")
    kib = -(-needs.host_bytes // 1024)
    return warn(
        "locked memory",
        f"{found}; the host tier has {show_size(needs.host_bytes)}",
        why="stepwell locks nothing itself, but drivers that pin host memory for the device (TPU by vfio, RDMA, ROCm) "
        "are refused beyond the limit, and copies become slower or fail",
        remedy=_raise_limit("l", kib, hard, needs.host_bytes, "MEMLOCK", "memlock"),
    )


def has_capability(number: int, root: Path) -> bool:
    """Return whether this process has a capability in effect."""
    effective = int(_line(root / "proc/self/status", r"CapEff:\s*([0-9a-f]+)") or "0", 16)
    return bool(effective >> number & 1)


def check_huge_pages(needs: Needs, root: Path) -> Finding:
    """Look whether anonymous memory gets huge pages on request; on tmpfs they are nobody's to ask for here."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    anonymous, shmem = _chosen(folder / "enabled"), _chosen(folder / "shmem_enabled")
    found = f"anonymous memory: {anonymous or 'not in this kernel'}; tmpfs: {shmem or 'not in this kernel'}"
    if anonymous == "never":
        return warn(
            "huge pages",
            found,
            why="the host tier, the page table and the buffers of disk pages ask for them: with 4 KiB pages, gathering "
            "and scattering pieces of 1 to 16 KiB was measured at 0.4 to 0.9 of the speed, a disk at 0.4 to 0.6",
            remedy=f"echo madvise > {folder / 'enabled'}  # as root, on the host of a container",
        )
    return ok("huge pages", found)


# ---- limits of the process -------------------------------------------------------------------------------------------


def check_limits(needs: Needs, root: Path) -> Iterator[Finding]:
    """Check descriptors, mappings, sizes of files and of the address space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        DESCRIPTORS_OF_A_PROCESS
        + DESCRIPTORS_OF_SHARED * needs.shared_volumes
        + DESCRIPTORS_OF_DISK * needs.disk_volumes
    )
    found = (
        f"RLIMIT_NOFILE {_limit(soft)} (hard {_limit(hard)}); {wanted} are needed for {needs.shared_volumes} shared "
        f"and {needs.disk_volumes} disk volumes"
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield fail(
            "open files",
            found,
            why="without a descriptor no volume is made or adopted, and the engine's own files and sockets fail too",
            remedy=_raise_limit("n", wanted, hard, wanted, "NOFILE", "nofile"),
        )
    else:
        yield ok("open files", found)

    text = _read(root / "proc/sys/vm/max_map_count").strip()
    mappings = MAPPINGS_OF_A_PROCESS + needs.shared_volumes
    if text.isdecimal():
        found = f"vm.max_map_count {text}; {mappings} are needed, one a shared volume among them"
        if int(text) < mappings:
            yield fail(
                "mappings",
                found,
                why="a mapping that is refused is a volume, a thread or a library that does not come",
                remedy=f"sysctl -w vm.max_map_count={max(mappings, 65530)}  # as root, on the host of a container",
            )
        else:
            yield ok("mappings", found)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = f"RLIMIT_FSIZE {_limit(soft, size=True)}; the largest file of a volume has {show_size(needs.file_bytes)}"
    if soft != resource.RLIM_INFINITY and soft < needs.file_bytes:
        yield fail(
            "size of files",
            found,
            why="a process that makes a larger file is sent SIGXFSZ, or the call fails: no volume is made",
            # Of 512 bytes in sh, of 1024 in bash: there it is twice what is needed.
            remedy=_raise_limit("f", -(-needs.file_bytes // 512), hard, 2 * needs.file_bytes, "FSIZE", "fsize"),
        )
    else:
        yield ok("size of files", found)

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = needs.host_bytes + needs.shared_bytes
    if soft != resource.RLIM_INFINITY and soft < mapped:
        yield fail(
            "address space",
            f"RLIMIT_AS {_limit(soft, size=True)}; host and shared are {show_size(mapped)} of mappings",
            why="both are mapped into the process, and mapping fails beyond the limit",
            remedy=_raise_limit("v", 2 * mapped // 1024, hard, 2 * mapped, "AS", "as"),
        )


def check_logout(path: str, root: Path, *, uid: int | None = None) -> Finding | None:
    """Say whether logind will remove a user's files in /dev/shm at logout. None: they are not in its reach.

    Source: systemd clean-ipc.c (only /dev/shm, never for system users or root), user-record linger.
    """
    uid = os.geteuid() if uid is None else uid
    if not (os.path.realpath(path) + "/").startswith("/dev/shm/"):
        return None
    if not (root / "run/systemd/system").is_dir():  # as sd_booted(3) asks
        return ok("logout", "no systemd here: nobody removes files of /dev/shm at logout")
    limit = _line(root / "etc/login.defs", r"\s*SYS_UID_MAX\s+(\d+)")
    system = int(limit) if limit else SYSTEM_UIDS
    if uid <= system:
        return ok("logout", f"user {uid} is a system user (up to {system}): RemoveIPC of logind leaves its files alone")
    value, where = _remove_ipc(root)
    if value in ("no", "false", "0", "off"):
        return ok("logout", f"RemoveIPC={value} ({where}): files of /dev/shm stay")
    name = _user_name(uid)
    if (root / "var/lib/systemd/linger" / name).exists():
        return ok("logout", f"RemoveIPC={value} ({where}), but {name} lingers: never counted as logged out")
    return warn(
        "logout",
        f"RemoveIPC={value} ({where}), {name} (uid {uid}) is no system user and does not linger",
        why="when the last session of this user ends, logind deletes its files in /dev/shm, also under a running "
        "engine: the shared tier is lost",
        remedy=f"loginctl enable-linger {name}  # or RemoveIPC=no in /etc/systemd/logind.conf, or run as a system user",
    )


def _remove_ipc(root: Path) -> tuple[str, str]:
    """Return logind's RemoveIPC, and the file that says so: the last of logind.conf and its drop-ins by name."""
    folders = ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd")
    mains = [root / folder / "logind.conf" for folder in reversed(folders)]
    files = [next((path for path in mains if path.is_file()), mains[0])]
    drop_ins: dict[str, Path] = {}
    for folder in folders:  # of one name, the later folder's counts
        drop_ins |= {path.name: path for path in (root / folder / "logind.conf.d").glob("*.conf")}
    value, where = "yes", "systemd's default"
    for path in [*files, *(drop_ins[name] for name in sorted(drop_ins))]:
        for line in _read(path).splitlines():
            if found := re.fullmatch(r"\s*RemoveIPC\s*=\s*(\w+)\s*", line):
                value, where = found[1].lower(), str(path)
    return value, where


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _raise_limit(letter: str, units: int, hard: int, nbytes: int, unit_name: str, docker_name: str) -> str:
    """Return the line that raises a limit of this shell: the soft one where the hard one allows it."""
    others = f"systemd: Limit{unit_name}={nbytes}; docker: --ulimit {docker_name}={nbytes}"
    if hard == resource.RLIM_INFINITY or nbytes <= hard:
        return f"ulimit -S -{letter} {units}  # {others}"
    return f"prlimit --{docker_name}={nbytes}:{nbytes} --pid $$  # as root, the hard limit is in the way; {others}"


def _limit(value: int, *, size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return show_size(value) if size else str(value)


def _chosen(path: Path) -> str:
    """Return the word in brackets of a file as `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", _read(path))
    return found[1] if found else ""


def _line(path: Path, pattern: str) -> str | None:
    """Return the first group of the first line that matches."""
    for line in _read(path).splitlines():
        if found := re.match(pattern, line):
            return found[1]
    return None


def _read(path: Path) -> str:
    """Return a file's text; empty where we cannot have it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
