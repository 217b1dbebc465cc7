"""The contract of a tier, over stepwell's own tiers, and over such as fail."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepwell.clock import SystemClock
from stepwell.config import DiskTier, SharedTier
from stepwell.errors import StepwellError
from stepwell.testing import faults
from stepwell.testing.contract import TierContract
from stepwell.testing.faulty import FaultyTier, seeded
from stepwell.testing.file_calls import Failure
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


class CoreFailure(Failure):
    """The nth call of the core's file layer fails."""

    def fails(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> bool:
        fault = faults.Fault("file.*", errno.EIO, self.nth)
        try:
            with fault:
                call(*args, **kwargs)
        except (OSError, StepwellError):
            return True
        finally:
            self.reached = "file.*" if fault.has_fired else ""
        return False


class VolumesContract(TierContract):
    """The calls that can fail are made in C++."""

    examples = 20

    def failures(self) -> Iterator[Failure]:
        for nth in range(1, 1000):
            failure = CoreFailure(nth)
            yield failure
            if not failure.reached:
                return


class TestHostSlab(TierContract):
    def make(self, directory: Path) -> Tier:
        return host_slab(directory)


class TestSharedVolumes(VolumesContract):
    parent = Path("/dev/shm")

    def make(self, directory: Path) -> Tier:
        return shared_volumes(directory)


class TestDiskVolumes(VolumesContract):
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
