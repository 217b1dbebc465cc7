"""Hold pages on a local disk: volumes of a metadata file, a page file, and a derived LMDB environment beside them."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import DiskTier
from stepwell.index import Index, Tier
from stepwell.tiers.directory import Machine
from stepwell.tiers.lmdb_index import RECORD_BYTES, VolumeIndex
from stepwell.tiers.volume_files import open_ours
from stepwell.tiers.volume_tier import Member, VolumeTier

_LOG = logging.getLogger("stepwell")
RECENCY_SECONDS: Final = 60.0
"""Between two writes of what was used when and of the LMDB copy of the index, and at close: for the disk's wear."""


class _Opening:
    """Open the LMDB environment of one member in a thread.

    Requires: `end` is called, and nothing else touches the environment before it has returned.
    """

    def __init__(self, member: Member) -> None:
        held = member.held
        self.number = member.number
        self._index = VolumeIndex(held.lmdb_path, volume_id=bytes.fromhex(held.volume_id), slots=member.count)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(held.is_adopted,), name="sw-lmdb", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it still reads."""
        return self._thread.is_alive()

    def end(self) -> VolumeIndex:
        """Return the environment; where it was still reading, closed and the old one left as it is."""
        self._stop.set()
        self._thread.join()
        return self._index

    def _run(self, adopted: bool) -> None:
        remembered = self._index.open(adopted=adopted, stop=self._stop)
        if remembered.keys:
            self._index.remember(remembered.keys, remembered.stamps)


class DiskVolumes(VolumeTier):
    """The disk tier. The page file is never mapped; the records are the truth, LMDB is derived from them.

    Invariant: a member's LMDB environment is opened after the member came, under the volume's lock, and closed before
    the lock is released. No look-up, no open and no round of the keeper waits for it or asks it: reading the old one
    takes 0.3 s, and 10 s where its reader hangs, so a thread of its own, `sw-lmdb`, does it, one member at a time.
    """

    def __init__(
        self,
        config: DiskTier,
        *,
        shape: _core.PageShape,
        fingerprint: bytes,
        epoch: int,
        clock: Clock,
        machine: Machine | None = None,
    ) -> None:
        super().__init__(
            Tier.DISK,
            config,
            shape=shape,
            fingerprint=fingerprint,
            epoch=epoch,
            clock=clock,
            recency_seconds=RECENCY_SECONDS,
            machine=machine,
        )
        self._indexes: dict[int, VolumeIndex] = {}
        self._opening: _Opening | None = None
        self.has_lmdb = True
        """Whether members get an LMDB environment beside them; where tests want no thread, they do not."""

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Do what every volume tier does, then have the LMDB environments of new members opened."""
        evict = super().tick(index, low_pages=low_pages, high_pages=high_pages)
        if self._opening is not None and not self._opening.is_running:
            self._indexes[self._opening.number] = self._opening.end()
            self._opening = None
        for member in self.members if self.has_lmdb else ():
            if self._opening is None and member.number not in self._indexes:
                self._opening = _Opening(member)
        return evict

    def _after_recency(self, member: Member) -> None:
        beside = self._indexes.get(member.number)
        if beside is None:
            return
        try:
            records = self._records(member)
        except (OSError, ValueError) as error:  # the name is another file's now: what is beside the others goes on
            # As text: who keeps log records would keep the error, its frames and with them the volume.
            _LOG.warning("disk tier: not brought up to date: %s: %s", member.held.lmdb_path, str(error))
            return
        beside.sync(records)

    def _records(self, member: Member) -> bytes:
        """Read the volume's slot records, through a descriptor of its own.

        Raises:
            OSError, ValueError: the file at the volume's name is not the volume's, or was cut.
        """
        path = f"{self.directory.path}/v-{member.held.volume_id}.meta"
        descriptor = open_ours(path, os.O_RDONLY)
        try:
            wanted, start = RECORD_BYTES * member.count, member.volume.header.records_offset
            parts: list[bytes] = []
            while wanted > 0:
                part = _core.file_pread(descriptor.fileno(), wanted, start)
                if not part:
                    raise OSError(errno.EIO, "it ends within its records", path)
                parts.append(part)
                wanted, start = wanted - len(part), start + len(part)
            return b"".join(parts)
        finally:
            descriptor.close()

    def _before_detach(self, member: Member) -> None:
        if self._opening is not None and self._opening.number == member.number:
            self._indexes[member.number] = self._opening.end()
            self._opening = None
        beside = self._indexes.pop(member.number, None)
        if beside is not None:
            beside.close()
