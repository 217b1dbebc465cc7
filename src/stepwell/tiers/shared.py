"""Hold pages in shared memory: volumes in a tmpfs directory that outlive the process."""

from __future__ import annotations

from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import SharedTier
from stepwell.index import Tier
from stepwell.tiers.volume_tier import VolumeTier
from stepwell.tiers.directory import Machine

RECENCY_SECONDS: Final = 0.25
"""How often the order of pages is stamped: plain stores, no system call a page."""


class SharedVolumes(VolumeTier):
    """The shared tier. The mapping of each volume stays inside csrc, behind the SIGBUS guard."""

    def __init__(
        self,
        config: SharedTier,
        *,
        shape: _core.PageShape,
        fingerprint: bytes,
        epoch: int,
        clock: Clock,
        machine: Machine | None = None,
    ) -> None:
        super().__init__(
            Tier.SHARED,
            config,
            shape=shape,
            fingerprint=fingerprint,
            epoch=epoch,
            clock=clock,
            recency_seconds=RECENCY_SECONDS,
            machine=machine,
        )
