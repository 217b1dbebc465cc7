"""Hold pages on a local disk: volumes of a metadata file, a page file, and a derived LMDB environment beside them."""

from __future__ import annotations

from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import DiskTier
from stepwell.index import Tier
from stepwell.tiers.volume_tier import VolumeTier
from stepwell.tiers.directory import Machine

RECENCY_SECONDS: Final = 60.0
"""How often the order of pages and the LMDB copy of the index are written, and at close: for the wear of the disk."""


class DiskVolumes(VolumeTier):
    """The disk tier. The page file is never mapped; the records are the truth, LMDB is derived from them."""

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
