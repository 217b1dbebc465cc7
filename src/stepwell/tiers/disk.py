"""Hold pages on a local disk: volumes of a metadata file, a page file, and a derived LMDB environment beside them."""

from __future__ import annotations

import os
from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import DiskTier
from stepwell.index import Index, Tier
from stepwell.tiers.directory import Machine
from stepwell.tiers.lmdb_index import RECORD_BYTES, VolumeIndex
from stepwell.tiers.volume_tier import Member, VolumeTier

RECENCY_SECONDS: Final = 60.0
"""Between two writes of what was used when and of the LMDB copy of the index, and at close: for the disk's wear."""


class DiskVolumes(VolumeTier):
    """The disk tier. The page file is never mapped; the records are the truth, LMDB is derived from them.

    Invariant: a member's LMDB environment is opened by the keeper's round after the member came, under the volume's
    lock, and closed before the lock is released. No look-up waits for it or asks it.
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

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Do what every volume tier does, then open the LMDB environments of new members."""
        evict = super().tick(index, low_pages=low_pages, high_pages=high_pages)
        for member in self.members:
            if member.number not in self._indexes:
                self._indexes[member.number] = self._open_index(member)
        return evict

    @staticmethod
    def _open_index(member: Member) -> VolumeIndex:
        beside = VolumeIndex(
            member.held.lmdb_path, volume_id=bytes.fromhex(member.held.volume_id), slots=member.count
        )
        remembered = beside.open(adopted=member.held.is_adopted)
        if remembered.keys:
            beside.remember(remembered.keys, remembered.stamps)
        return beside

    def _after_recency(self, member: Member) -> None:
        beside = self._indexes.get(member.number)
        if beside is not None:
            beside.sync(self._records(member))

    def _records(self, member: Member) -> bytes:
        """Read the volume's slot records, through a descriptor of its own."""
        path = f"{self.directory.path}/v-{member.held.volume_id}.meta"
        descriptor = _core.Descriptor(_core.file_open(path, os.O_RDONLY, 0))
        try:
            wanted, start = RECORD_BYTES * member.count, member.volume.header.records_offset
            parts: list[bytes] = []
            while wanted > 0:
                part = _core.file_pread(descriptor.fileno(), wanted, start)
                if not part:
                    raise OSError(f"{path} ends within its records")
                parts.append(part)
                wanted, start = wanted - len(part), start + len(part)
            return b"".join(parts)
        finally:
            descriptor.close()

    def _before_detach(self, member: Member) -> None:
        beside = self._indexes.pop(member.number, None)
        if beside is not None:
            beside.close()
