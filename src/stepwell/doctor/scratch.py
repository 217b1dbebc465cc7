"""Make directories to try things in, on the file system of a tier directory, never inside the user's pages.

    PARENT/.stepwell-doctor-XXXXXXXX/doctor.lock     held while the doctor lives: what is free is swept by the next

Beside the tier directory; inside of it where that is a mount of its own, or its parent cannot be written: names that
are not of the directory protocol are not looked at there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    directory = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    try:
        lock = create_locked(f"{directory}/{LOCK}")
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            lock.close()
    finally:
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
            continue
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()
        swept += 1
    return swept
