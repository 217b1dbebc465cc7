"""Follow the volumes of a tier directory that are not ours: other processes', and those of the dead that nobody took.

    names of the directory --attach--> Foreign (csrc/foreign.h) --poll--> which pages are where, to be copied from
                           <--detach-- the volume has gone, has become ours, or cannot be read

Nothing is locked, mapped or written here: what an owner does meanwhile is its own affair (FORMAT.md 4).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from stepwell import _core
from stepwell.clock import Clock
from stepwell.tiers.scan import is_other_format
from stepwell.tiers.volume_files import VolumeNames, list_directory, open_ours, read_first_bytes
from stepwell.tiers.volumes import TierDirectory

_LOG = logging.getLogger("stepwell")
_UNSETTLED_SECONDS: Final = 0.1
"""For so long after a change of a directory its names are listed at every look: times of files are only as fine as the
kernel's tick, so that a second change may show none."""
_DROPPED_SECONDS: Final = 60.0
"""For so long a volume that failed is not followed: a medium that was mended serves again, for a few reads."""
_MOST_VOLUMES: Final = 256
"""Volumes of a directory that are followed: each takes a descriptor or two."""


class HasDirectory(Protocol):
    """A tier of volumes, as far as it matters here."""

    @property
    def directory(self) -> TierDirectory:
        """This process's part in the tier's directory; another one once the tier was reopened."""
        ...

    @property
    def is_joined(self) -> bool:
        """Whether `directory.held` is all that is ours: not while the tier is being opened or reopened."""
        ...


class _Followed:
    """One tier directory, seen by one of its processes.

    Invariant: attached are volumes of our fingerprint that this process does not hold.
    """

    def __init__(
        self, tier: HasDirectory, medium: int, fingerprint: bytes, foreign: _core.Foreign
    ) -> None:
        self._tier = tier
        self._medium = medium
        self._fingerprint = fingerprint
        self._foreign = foreign
        self.attached: dict[str, int] = {}
        self._passed: dict[str, float] = {}  # looked at, and not to be followed until then
        self._try_again_at = float("inf")  # the first of these
        self._own: frozenset[str] = frozenset()
        self._changed_ns = -1
        self._unsettled_until = float("-inf")
        self._is_closed = False
        self.others = 0
        """Process files beside ours."""

    @property
    def directory(self) -> TierDirectory:
        """Our part in it now."""
        return self._tier.directory

    def look(self, now: float) -> None:
        """Attach and detach, if the directory or what we hold of it has changed."""
        own = self._own_now()
        if own is None:
            return
        try:
            changed_ns = os.stat(self.directory.path).st_mtime_ns
        except OSError:
            changed_ns = -1
        if changed_ns != self._changed_ns:
            self._unsettled_until = now + _UNSETTLED_SECONDS
        elif own == self._own and self._unsettled_until <= now < self._try_again_at:
            return
        try:
            listing = list_directory(self.directory.path)
        except FileNotFoundError:
            self.detach_all()
            return
        except OSError:  # what is attached stays; the next look tries again
            return
        if self._is_closed:  # while we were in a call that did not answer
            return
        own_after = self._own_now()
        if own_after is None:  # what is listed may become ours, or be ours no more
            return
        own |= own_after
        self._changed_ns, self._own = changed_ns, own
        self.others = max(0, len(listing.processes) - 1)
        volumes = {name: names for name, names in listing.volumes.items() if names.metadata_name is not None}
        for volume_id in [known for known in self.attached if known in own or known not in volumes]:
            self._foreign.detach(self.attached.pop(volume_id))
        self._passed = {name: until for name, until in self._passed.items() if name in volumes and until > now}
        self._try_again_at = min(self._passed.values(), default=float("inf"))
        for volume_id, names in volumes.items():
            if volume_id not in own and volume_id not in self.attached and volume_id not in self._passed:
                if len(self.attached) >= _MOST_VOLUMES:
                    break
                self._attach(names)

    def _own_now(self) -> frozenset[str] | None:
        """Return the volumes that are ours; None while that is not known."""
        directory = self.directory
        own = frozenset(volume.volume_id for volume in directory.held)
        return own if self._tier.is_joined and self.directory is directory else None

    def _attach(self, names: VolumeNames) -> None:
        """Open a volume and hand its files over. What is no volume of ours is passed by until it has gone."""
        name = names.metadata_name
        assert name is not None, "look() leaves out what is no volume"
        path = self.directory.path
        metadata, pages = _core.Descriptor(-1), _core.Descriptor(-1)
        try:
            metadata = open_ours(f"{path}/{name}", os.O_RDONLY)
            data = read_first_bytes(metadata, f"{path}/{name}")
            if is_other_format(data):
                self._passed[names.volume_id] = float("inf")
                return
            pages_bytes = 0
            if names.pages_name is not None:
                pages = self._open_pages(f"{path}/{names.pages_name}")
                pages_bytes = _core.file_fstat(pages.fileno()).size
            header = _core.VolumeHeader.decode(data, _core.file_fstat(metadata.fileno()).size, pages_bytes)
            if (header.volume_id.hex(), header.medium, header.fingerprint) != (
                names.volume_id,
                self._medium,
                self._fingerprint,
            ):
                self._passed[names.volume_id] = float("inf")
                return
            pages_fd = pages.detach() if header.medium == 2 else -1
            self.attached[names.volume_id] = self._foreign.attach(header, metadata.detach(), pages_fd)
        except ValueError:  # its header is damaged, or it is of another shape or no file of ours
            self._passed[names.volume_id] = float("inf")
        except OSError:  # gone, or not to be opened now: the next look tries again
            self._changed_ns = -1
        finally:
            metadata.close()
            pages.close()

    def _open_pages(self, path: str) -> _core.Descriptor:
        """Open a file of pages, past the page cache where its owner writes so (it does where it can)."""
        if self.directory.direct_io:
            with suppress(OSError):  # not this file, then: through the page cache
                return open_ours(path, os.O_RDONLY | os.O_DIRECT)
        return open_ours(path, os.O_RDONLY)

    def drop(self, numbers: Sequence[int], now: float) -> None:
        """Follow some volumes no longer for a minute: what made their reads fail may have passed by then."""
        for volume_id in [known for known, number in self.attached.items() if number in numbers]:
            _LOG.warning(
                "volume %s of a neighbour in %s cannot be read, or too many of its pages are damaged: its pages are "
                "misses here; it is tried again after %g s",
                volume_id,
                self.directory.path,
                _DROPPED_SECONDS,
            )
            self._foreign.detach(self.attached.pop(volume_id))
            self._passed[volume_id] = now + _DROPPED_SECONDS
            self._try_again_at = min(self._try_again_at, now + _DROPPED_SECONDS)

    def close(self) -> None:
        """Let every volume go, and take no other."""
        self._is_closed = True
        self.detach_all()

    def detach_all(self) -> None:
        """Let every volume go."""
        for number in list(self.attached.values()):
            self._foreign.detach(number)
        self.attached.clear()
        self._changed_ns = -1
        self.others = 0


class Neighbours:
    """All volumes of a store's tier directories that it does not hold.

    Invariant: as of the last round, the pages that `foreign` knows are those of volumes that lie in the directories.
    Threads: round and close one at a time (the keeper, then the store's close); the rest any.
    """

    def __init__(
        self,
        foreign: _core.Foreign,
        tiers: Sequence[tuple[HasDirectory, int]],
        *,
        fingerprint: bytes,
        clock: Clock,
    ) -> None:
        """Args: tiers: each with its medium as headers write it; their directories are open."""
        self._foreign = foreign
        self._clock = clock
        self._followed = [_Followed(tier, medium, fingerprint, foreign) for tier, medium in tiers]

    @property
    def volumes(self) -> int:
        """Volumes that are followed."""
        return sum(len(followed.attached) for followed in self._followed)

    @property
    def are_alive(self) -> bool:
        """Whether other processes have files in the directories: what they publish is to be seen soon."""
        return any(followed.others for followed in self._followed)

    def round(self) -> None:
        """Look at the directories, then at what the volumes in them have to tell. Cost where nothing has changed: a
        stat a directory and a read of 8 bytes a volume."""
        now = self._clock.monotonic()
        for followed in self._followed:
            followed.look(now)
        if self.volumes == 0:
            return
        self._note_touches()
        failed = self._foreign.poll()
        if failed:
            for followed in self._followed:
                followed.drop(failed, now)

    def _note_touches(self) -> None:
        """Tell the owners, by their directories, which pages were had from them since the last round."""
        volume_ids, slots, generations = self._foreign.take_touches()
        if not volume_ids:
            return
        named = [volume_id.hex() for volume_id in volume_ids]
        for followed in self._followed:
            rows = [row for row, name in enumerate(named) if name in followed.attached]
            if rows:
                followed.directory.note_touches([volume_ids[row] for row in rows], slots[rows], generations[rows])

    def close(self) -> None:
        """Let every volume go, for good. Idempotent. A round may be stuck in a call meanwhile."""
        for followed in self._followed:
            followed.close()
