"""Hold pages in shared memory: volumes in a tmpfs directory that outlive the process."""

from __future__ import annotations

import logging
from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import SharedTier
from stepwell.index import Index, Tier
from stepwell.tiers.directory import Machine
from stepwell.tiers.volume_tier import VolumeTier

RECENCY_SECONDS: Final = 0.0
"""Between two writes of what was used when: each round of the keeper. Plain stores, no system call."""


_LOG = logging.getLogger("stepwell")


class SharedVolumes(VolumeTier):
    """The shared tier. The mapping of each volume stays inside csrc, behind the SIGBUS guard.

    Where someone has replaced the guard's signal handler, mappings are left and pread and pwrite take over, from the
    next round on.
    """

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
        self._has_left_mappings = False

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Do what every volume tier does, and look whether the SIGBUS handler is still ours."""
        if not self._has_left_mappings and not _core.guard_is_ours():
            self._has_left_mappings = True
            _LOG.warning(
                "shared tier: another SIGBUS handler was installed over stepwell's; pages are read and written by "
                "pread and pwrite from now on (slower). Install yours before the store opens, or chain to the one "
                "before"
            )
        evict = super().tick(index, low_pages=low_pages, high_pages=high_pages)
        if self._has_left_mappings:
            for member in self.members:
                member.volume.leave_mapping()
        return evict
