"""Make directories to try things in, on the file system of a tier directory, never inside the user's pages.

    PARENT/.stepwell-doctor-XXXXXXXX/doctor.lock     held while the doctor lives: what is free is swept by the next,
                                                     and what is empty

Beside the tier directory; inside of it where that is a mount of its own, or its parent cannot be written: names that
are not of the directory protocol are not looked at there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stepwell import _core
from stepwell.tiers.locks import NotTaken, create_locked, try_lock

PREFIX: Final = ".stepwell-doctor-"
LOCK: Final = "doctor.lock"


def nearest_existing(path: str) -> str:
    """Return the path, or the nearest directory above it that is there."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def parent_of(path: str) -> str:
    """Return where a directory to try things in belongs, for the tier directory at `path`."""
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        return parent
    is_same = os.stat(path).st_dev == os.stat(parent).st_dev
    return parent if is_same and may_write(parent) else path


def may_write(directory: str) -> bool:
    """Return whether this process may make names in a directory."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=True)


@contextmanager
def scratch_beside(path: str) -> Iterator[str]:
    """Make a directory to try things in, and remove it with all that is in it.

    Raises:
        OSError: it cannot be made.
    """
    parent = parent_of(path)
    sweep(parent)
    directory, lock = _make(parent)
    try:
        yield directory
    finally:
        _remove(directory)
        lock.close()


def _make(parent: str) -> tuple[str, _core.Descriptor]:
    while True:
        directory = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        try:
            return directory, create_locked(f"{directory}/{LOCK}")
        except OSError:
            if os.path.isdir(directory):  # else another doctor swept it away before it had a lock
                shutil.rmtree(directory, ignore_errors=True)
                raise


def _remove(directory: str) -> None:
    """Remove a directory, the lock last: if this is cut short, the next doctor still finds it, and it free."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(directory, ignore_errors=True)


def sweep(parent: str) -> int:
    """Remove what doctors that were killed have left; return how many."""
    swept = 0
    for directory in Path(parent).glob(f"{PREFIX}*"):
        try:
            status = _core.file_stat(str(directory))
            if not status.is_directory or status.uid != os.geteuid():
                continue
            lock = try_lock(str(directory / LOCK))
        except OSError:  # it has gone meanwhile
            continue
        if isinstance(lock, NotTaken):
            if lock is NotTaken.MISSING:  # a doctor was killed at its first or its last step
                with suppress(OSError):
                    os.rmdir(directory)
                    swept += 1
            continue
        _remove(str(directory))
        lock.close()
        swept += 1
    return swept
