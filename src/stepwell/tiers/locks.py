"""Take flocks on names in a directory, and say who has them.

Source of the rules: FORMAT.md 6, each of them a measured failure. The descriptors close in a forked
child by themselves (csrc/file.h), so a lock lives exactly as long as its holder.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from enum import Enum

from stepwell import _core

_TRIES = 16
# What open(2) says of a name that is no regular file of ours: a symbolic link, a socket or device,
# another user's.
_ODD = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM, errno.EISDIR})


class NotTaken(Enum):
    """Why a lock was not taken."""

    HELD = "held"  # by a living process, or by this one through another descriptor
    MISSING = "missing"  # no such name
    ODD = "odd"  # the name is not a regular file of ours


def is_ours(status: _core.FileStat) -> bool:
    """Return whether a file may be one of this protocol: regular, ours, with one name."""
    return status.is_regular and status.uid == os.geteuid() and status.links == 1


def try_lock(path: str, *, flags: int = 0) -> _core.Descriptor | NotTaken:
    """Take the flock of the file at `path` without waiting.

    Args:
        path: the lock file.
        flags: os.O_CREAT to make it where it is missing (os.O_EXCL: only then).

    Returns:
        The descriptor that holds the lock, or why there is none.

    Raises:
        OSError: the file system failed (FileExistsError with O_EXCL).
    """
    for _ in range(_TRIES):
        try:
            fd = _core.file_open(path, os.O_RDONLY | os.O_NONBLOCK | flags, 0o600)
        except FileNotFoundError:
            return NotTaken.MISSING
        except OSError as error:
            if error.errno in _ODD:
                return NotTaken.ODD
            raise
        descriptor = _core.Descriptor(fd)
        try:
            outcome = _lock_opened(descriptor, path)
        except OSError:
            descriptor.close()
            raise
        if outcome is None:
            return descriptor
        descriptor.close()
        if outcome is not NotTaken.MISSING:
            return outcome
        # The name went away, or means another file now, between open and flock: what was locked is
        # nobody's lock.
    return NotTaken.HELD


def create_locked(path: str) -> _core.Descriptor:
    """Make a new lock file and hold it. Requires: the directory lock, so that nobody is first.

    Raises:
        OSError: the file system failed; the name is not left behind, if that can be helped.
    """
    try:
        lock = try_lock(path, flags=os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise
    except OSError:
        with suppress(OSError):  # A free lock without files is swept by the next scan.
            _core.file_unlink(path)
        raise
    if isinstance(lock, NotTaken):
        raise OSError(errno.EBUSY, f"a new lock file is {lock.value}", path)
    return lock


def _lock_opened(descriptor: _core.Descriptor, path: str) -> NotTaken | None:
    opened = _core.file_fstat(descriptor.fileno())
    if opened.links > 0 and not is_ours(opened):
        return NotTaken.ODD
    if not _core.file_lock(descriptor.fileno()):
        return NotTaken.HELD
    return None if is_current(descriptor, path) else NotTaken.MISSING


def is_current(descriptor: _core.Descriptor, path: str) -> bool:
    """Return whether `path` still names the file that a descriptor holds."""
    opened = _core.file_fstat(descriptor.fileno())
    try:
        named = _core.file_stat(path)
    except FileNotFoundError:
        return False
    return (opened.device, opened.inode) == (named.device, named.inode)


def holder_of(path: str) -> str:
    """Return who holds the flock of `path`, for messages: "pid 12 (python)"."""
    try:
        status = _core.file_stat(path)
        holders = flock_holders()
    except OSError:
        return "a process that cannot be named (no /proc/locks)"
    pid = holders.get((status.device, status.inode))
    return "a process that is not visible here, or has just let go" if pid is None else process_named(pid)


def flock_holders() -> dict[tuple[int, int], int]:
    """Return device and inode -> pid of each flock that this pid namespace shows: more may be held than it shows.

    Raises:
        OSError: there is no /proc/locks.
    """
    holders: dict[tuple[int, int], int] = {}
    with open("/proc/locks", encoding="ascii", errors="replace") as lines:
        for line in lines:
            # "1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF"
            fields = line.split()
            if len(fields) < 6 or fields[1] != "FLOCK":
                continue
            major, minor, inode = fields[5].split(":")
            holders[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = int(fields[4])
    return holders


def process_named(pid: int) -> str:
    """Return a pid with the name of its program."""
    if pid <= 0:
        return "a process of another pid namespace"
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            # A process names itself: what would steer a terminal, or begin a line of a log, is told as an escape.
            return f"pid {pid} ({printable(comm.read().strip())})"
    except OSError:
        return f"pid {pid}"


def printable(text: str) -> str:
    """Return what others chose as it may stand in a message: what is not printable as an escape."""
    return text if text.isprintable() else ascii(text)[1:-1]
