"""The contract of a mover, over stepwell's own: with threads and without, from host memory and from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stepwell import _core
from stepwell.clock import SystemClock
from stepwell.config import DiskTier
from stepwell.testing.mover import Mover
from stepwell.testing.mover_contract import MoverContract
from stepwell.testing.own_mover import OwnMover
from stepwell.tiers.disk import DiskVolumes
from stepwell.tiers.host import HostSlab

SLOTS = 64
FINGERPRINT = bytes(range(32))


def host_mover(layer_bytes: Sequence[int], *, threads: int) -> Mover:
    shape = _core.PageShape(list(layer_bytes), FINGERPRINT)
    slot_bytes = -(-shape.page_bytes // 4096) * 4096
    slab = HostSlab(shape, capacity_bytes=SLOTS * slot_bytes, page_bytes=shape.page_bytes)
    return OwnMover(slab, shape, threads=threads)


def disk_mover(layer_bytes: Sequence[int], directory: Path, *, threads: int) -> Mover:
    shape = _core.PageShape(list(layer_bytes), FINGERPRINT)
    volume_bytes = 160 * 1024 + SLOTS * 2 * max(4096, shape.page_bytes)
    config = DiskTier(volume_bytes, str(directory), volume_bytes=volume_bytes)
    volumes = DiskVolumes(config, shape=shape, fingerprint=FINGERPRINT, epoch=0, clock=SystemClock())

    def spoil(slot: int) -> None:
        [member] = volumes.members
        at = (slot - member.base) * member.volume.header.slot_bytes + shape.page_bytes // 2
        with (directory / f"v-{member.held.volume_id}.pages").open("r+b") as file:
            file.seek(at)
            changed = bytes([file.read(1)[0] ^ 1])
            file.seek(at)
            file.write(changed)

    return OwnMover(volumes, shape, threads=threads, spoil=spoil)


class TestThreadedMover(MoverContract):
    def make(self, layer_bytes: Sequence[int]) -> Mover:
        return host_mover(layer_bytes, threads=2)


class TestSteppedMover(MoverContract):
    is_single = True

    def make(self, layer_bytes: Sequence[int]) -> Mover:
        return host_mover(layer_bytes, threads=0)


class TestThreadedMoverOfDiskPages(MoverContract):
    examples = 5

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._directory, self._made = tmp_path, 0

    def make(self, layer_bytes: Sequence[int]) -> Mover:
        self._made += 1
        return disk_mover(layer_bytes, self._directory / str(self._made), threads=1)
