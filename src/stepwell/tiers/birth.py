"""Bring a new volume into a tier directory (FORMAT.md 7, Birth).

    begin (directory lock): v-<id>.lock held, t- files of full size: they count from here on
    fill  (no lock): space reserved in steps, header written
    name  (directory lock): t- renamed to v-, the file that makes it a volume last

Killed anywhere in between, it leaves t- files, or pages without metadata, and a free lock: the next
scan removes them.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field

from stepwell import _core
from stepwell.config import show_bytes
from stepwell.errors import BudgetError
from stepwell.tiers.directory import DirectoryConfig, Header
from stepwell.tiers.limits import Limits
from stepwell.tiers.locks import create_locked
from stepwell.tiers.volume_files import create_file, remove_until_failure, write_all

_LOG = logging.getLogger("stepwell")
STEP_BYTES = 64 << 20  # of a reservation, between two looks at the limits
_ZEROS = bytes(1 << 20)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class Birth:
    """A volume being born: its lock, and its t- files by suffix, in the order of their renames."""

    volume_id: str
    header: Header
    lock: _core.Descriptor
    files: dict[str, _core.Descriptor] = field(default_factory=dict)

    def close_files(self) -> None:
        """Close the files, not the lock."""
        for descriptor in self.files.values():
            descriptor.close()


@dataclass(frozen=True, slots=True)
class Midwife:
    """Carry out the steps of births in one directory. Threads: one at a time."""

    directory: str
    config: DirectoryConfig
    limits: Limits

    def begin(self, header: Header) -> Birth:
        """Make the lock and the files of a new volume. Requires: the directory lock.

        Raises:
            OSError: the file system failed; what was made is removed again.
        """
        volume_id = header.volume_id.hex()
        birth = Birth(volume_id, header, create_locked(f"{self.directory}/v-{volume_id}.lock"))
        is_complete = False
        try:
            for suffix, nbytes in self._sizes(header):
                birth.files[suffix] = create_file(f"{self.directory}/t-{volume_id}.{suffix}")
                _core.file_truncate(birth.files[suffix].fileno(), nbytes)
            is_complete = True
        finally:
            if not is_complete:
                self.undo(birth)
        return birth

    def fill(self, birth: Birth) -> None:
        """Reserve the space and write the header. Never under the directory lock.

        Raises:
            BudgetError: the space is not there: path, need, free, and what limits it.
            OSError: the file system failed otherwise.
        """
        for suffix, nbytes in self._sizes(birth.header):
            path = f"{self.directory}/t-{birth.volume_id}.{suffix}"
            self._reserve(birth.files[suffix].fileno(), path, nbytes)
        metadata = birth.files["vol" if self.config.medium == "shared" else "meta"]
        write_all(metadata.fileno(), birth.header.encode(), 0)

    def name(self, birth: Birth) -> None:
        """Give the files their names; the last makes it a volume. Requires: the directory lock."""
        for suffix in birth.files:
            stem = f"{birth.volume_id}.{suffix}"
            _core.file_rename(f"{self.directory}/t-{stem}", f"{self.directory}/v-{stem}")

    def empty(self, birth: Birth) -> bool:
        """Give up the space of a birth without touching a name, so without the directory lock.

        Returns:
            Whether all of it could be given up.
        """
        try:
            for descriptor in birth.files.values():
                _core.file_truncate(descriptor.fileno(), 0)
        except OSError:
            return False
        return True

    def undo(self, birth: Birth) -> bool:
        """Remove the names of a birth, the lock last, and close it. Requires: the directory lock.

        Returns:
            Whether all names are gone; what is left the next scan removes.
        """
        names = [f"{stage}-{birth.volume_id}.{suffix}" for suffix in birth.files for stage in "tv"]
        is_gone = remove_until_failure(self.directory, [*names, f"v-{birth.volume_id}.lock"])
        birth.close_files()
        birth.lock.close()
        return is_gone

    def _sizes(self, header: Header) -> tuple[tuple[str, int], ...]:
        """Return suffixes and sizes of the files, the one that makes it a volume last."""
        if self.config.medium == "shared":
            return (("vol", header.metadata_bytes),)
        return (("pages", header.pages_bytes), ("meta", header.metadata_bytes))

    def _reserve(self, fd: int, path: str, nbytes: int) -> None:
        is_zeroed = False
        for offset in range(0, nbytes, STEP_BYTES):
            step = min(STEP_BYTES, nbytes - offset)
            free = self.limits.available(self.directory)
            need = f"{path}: need {show_bytes(nbytes - offset)} more"
            if step > free.nbytes:
                raise BudgetError(
                    f"{need}, {show_bytes(free.nbytes)} free ({free.source});"
                    f" lower {self.config.medium}.capacity (now {show_bytes(self.config.capacity_bytes)})"
                )
            try:
                is_zeroed |= not _allocate(fd, offset, step)
                if is_zeroed and offset + step == nbytes:
                    # What was written may have no blocks yet: a full file system says so here, not under pages.
                    _core.file_sync(fd)
                    _LOG.warning("%s: the file system has no fallocate; space was taken by writing zeros", path)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise BudgetError(
                    f"{need}, the file system refuses ({error.strerror});"
                    f" {show_bytes(free.nbytes)} were free ({free.source})"
                ) from error


def _allocate(fd: int, offset: int, nbytes: int) -> bool:
    """Give a range of a file its blocks; by writing zeros where there is no fallocate.

    Returns:
        Whether there is: where zeros were written, blocks may still be lacking.
    """
    try:
        _core.file_reserve(fd, offset, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        for start in range(offset, offset + nbytes, len(_ZEROS)):
            write_all(fd, _ZEROS[: offset + nbytes - start], start)
        return False
    return True
