"""The contract of a tier, over stepwell's own tiers, and over such as fail."""

from __future__ import annotations

from pathlib import Path

from stepwell.clock import SystemClock
from stepwell.config import DiskTier, SharedTier
from stepwell.testing.contract import TierContract
from stepwell.testing.faulty import FaultyTier, seeded
from stepwell.testing.own_tiers import GEOMETRY, OwnTier, page_shape
from stepwell.testing.tier import Tier
from stepwell.tiers.disk import DiskVolumes
from stepwell.tiers.host import HostSlab
from stepwell.tiers.shared import SharedVolumes

SLOTS = 12
VOLUME_BYTES = 160 * 1024


def host_slab(_: Path) -> Tier:
    slab = HostSlab(page_shape(), capacity_bytes=SLOTS * 4096, page_bytes=GEOMETRY.page_bytes)
    return OwnTier(slab, lasts=False)


def shared_volumes(directory: Path) -> Tier:
    config = SharedTier(VOLUME_BYTES, str(directory), volume_bytes=VOLUME_BYTES)
    volumes = SharedVolumes(
        config, shape=page_shape(), fingerprint=GEOMETRY.fingerprint(), epoch=0, clock=SystemClock()
    )
    return OwnTier(volumes, lasts=True)


def disk_volumes(directory: Path) -> Tier:
    config = DiskTier(VOLUME_BYTES, str(directory), volume_bytes=VOLUME_BYTES)
    volumes = DiskVolumes(config, shape=page_shape(), fingerprint=GEOMETRY.fingerprint(), epoch=0, clock=SystemClock())
    return OwnTier(volumes, lasts=True)


class TestHostSlab(TierContract):
    def make(self, directory: Path) -> Tier:
        return host_slab(directory)


class TestSharedVolumes(TierContract):
    parent = Path("/dev/shm")
    examples = 20

    def make(self, directory: Path) -> Tier:
        return shared_volumes(directory)


class TestDiskVolumes(TierContract):
    examples = 20

    def make(self, directory: Path) -> Tier:
        return disk_volumes(directory)


class TestFaultyHostSlab(TierContract):
    may_fail = True

    def make(self, directory: Path) -> Tier:
        return FaultyTier(host_slab(directory), seeded(1, rate=0.2))


class TestFaultySharedVolumes(TierContract):
    parent = Path("/dev/shm")
    may_fail = True
    examples = 20

    def make(self, directory: Path) -> Tier:
        return FaultyTier(shared_volumes(directory), seeded(2, rate=0.1))
