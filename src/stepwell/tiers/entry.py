"""Enter a tier directory: may it be used, and the directory lock, with a deadline (FORMAT.md 1, 6)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepwell import _core
from stepwell.clock import Clock
from stepwell.errors import VolumeBusyError, VolumeError
from stepwell.tiers.locks import NotTaken, holder_of, try_lock
from stepwell.tiers.volume_files import DIRECTORY_LOCK

_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.02  # seconds between two tries at the directory lock

_OF_THE_MACHINE = frozenset(("/dev/shm", "/var/tmp", "/run/lock", "/run/shm", "/var/lock"))
"""Directories that others use too; so is all that lies directly in the root."""


@dataclass(frozen=True, slots=True)
class Offence:
    """Why a path cannot be a tier directory, and what mends it."""

    what: str
    remedy: str


def is_of_the_machine(path: str, status: _core.FileStat) -> bool:
    """Return whether others need a directory as it is, as they do /tmp: its owner and mode are not to be changed."""
    real = os.path.realpath(path)
    return bool(status.mode & stat.S_ISVTX) or os.path.dirname(real) == "/" or real in _OF_THE_MACHINE


def directory_offence(path: str, status: _core.FileStat) -> Offence | None:
    """Return why a path, as file_stat sees it, cannot be a tier directory of this user; None: it can.

    Raises:
        OSError: its file system cannot be looked at.
    """
    if status.is_symlink:
        return Offence("is a symbolic link", f"name the directory itself: {os.path.realpath(path)}")
    if not status.is_directory:
        return Offence("is not a directory", "name another, or remove it")
    below = f"name a directory of your own below it, e.g. {os.path.join(path, 'stepwell')}"
    is_shared = is_of_the_machine(path, status)
    if status.uid != os.geteuid():
        return Offence(
            f"belongs to user {status.uid}, this process runs as {os.geteuid()}",
            below if is_shared else "give each user a directory of its own",
        )
    if status.mode & (stat.S_IWGRP | stat.S_IWOTH):
        return Offence(
            f"can be written by others (mode {stat.S_IMODE(status.mode):04o})",
            below if is_shared else f"chmod 0700 {path}",
        )
    system = _core.file_statfs(path)
    if system.is_network:
        return Offence(
            f"is on a network file system (type {system.type:#x}), where one machine's locks and mappings mean nothing "
            "to another",
            "name a local directory",
        )
    return None


def check_directory(path: str) -> None:
    """Refuse a directory that is not this user's alone, or not of this machine alone.

    Raises:
        VolumeError: it is a symbolic link, no directory, another user's, writable by others, or on a network file
            system.
        OSError: it cannot be looked at (FileNotFoundError: it is not there).
    """
    offence = directory_offence(path, _core.file_stat(path))
    if offence is not None:
        raise VolumeError(f"{path} {offence.what}; {offence.remedy}")


@contextmanager
def directory_lock(
    directory: str, timeout: float, *, clock: Clock, wait: Callable[[float], None], flags: int = os.O_CREAT
) -> Iterator[None]:
    """Hold the directory lock.

    Args:
        directory: the tier directory.
        timeout: seconds for which it may be held by others.
        clock, wait: what time it is, and how to let it pass.
        flags: os.O_CREAT makes the lock file where it is missing; 0: for readers.

    Raises:
        VolumeBusyError: it was held by others for `timeout` seconds.
        VolumeError: its name is no regular file of ours, or is missing and is not to be made.
    """
    path = f"{directory}/{DIRECTORY_LOCK}"
    deadline = clock.monotonic() + timeout
    pause = _FIRST_WAIT
    while isinstance(lock := try_lock(path, flags=flags), NotTaken):
        if lock is NotTaken.ODD:
            raise VolumeError(f"{path} is not a regular file of this user; remove it")
        if lock is NotTaken.MISSING:
            raise VolumeError(f"{path} is missing")
        if clock.monotonic() >= deadline:
            raise VolumeBusyError(
                f"{path} was held for {timeout:g} s by {holder_of(path)};"
                " wait for that process, or end it if it is stopped"
            )
        wait(pause)
        pause = min(2 * pause, _LONGEST_WAIT)
    try:
        yield
    finally:
        lock.close()
