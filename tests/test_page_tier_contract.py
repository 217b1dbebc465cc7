"""What the store asks of a tier, over each tier there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepwell import _core
from stepwell.clock import SystemClock
from stepwell.config import DiskTier, SharedTier
from stepwell.testing.page_tier_contract import PageTierContract
from stepwell.tiers.base import PageTier
from stepwell.tiers.disk import DiskVolumes
from stepwell.tiers.host import HostSlab
from stepwell.tiers.shared import SharedVolumes
from store_kit import Directories

CAPACITY = 256 * 1024


def spoil_file(path: Path, page: np.ndarray) -> None:
    data = path.read_bytes()
    offset = data.index(page.tobytes()) + page.size // 2
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[offset] ^ 1]))
        file.flush()


class TestHostSlab(PageTierContract):
    def make(self, shape: _core.PageShape) -> PageTier:
        return HostSlab(shape, capacity_bytes=32 * 4096, page_bytes=self.geometry.page_bytes)


class VolumesContract(PageTierContract):
    lasts = True

    @pytest.fixture(autouse=True)
    def _place(self, directories: Directories) -> None:
        self.directories = directories


class TestSharedVolumes(VolumesContract):
    def make(self, shape: _core.PageShape) -> PageTier:
        config = SharedTier(CAPACITY, str(self.directories.shared), volume_bytes=CAPACITY)
        return SharedVolumes(config, shape=shape, fingerprint=self.geometry.fingerprint(), epoch=0, clock=SystemClock())

    def spoil(self, page: np.ndarray) -> None:
        [path] = self.directories.volumes("vol")
        spoil_file(path, page)


class TestDiskVolumes(VolumesContract):
    def make(self, shape: _core.PageShape) -> PageTier:
        config = DiskTier(CAPACITY, str(self.directories.disk), volume_bytes=CAPACITY)
        return DiskVolumes(config, shape=shape, fingerprint=self.geometry.fingerprint(), epoch=0, clock=SystemClock())

    def spoil(self, page: np.ndarray) -> None:
        [path] = self.directories.volumes("pages")
        spoil_file(path, page)
