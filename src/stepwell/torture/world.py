"""Choose the circumstances of some kills: which tiers, how much room, how many processes, in which directories."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from stepwell import DiskTier, SharedTier, StoreConfig
from stepwell.torture.universe import Universe

Tiers = Literal["shared", "disk", "both"]
ARRANGEMENTS: Final[tuple[Tiers, ...]] = ("shared", "disk", "both")
METADATA_BYTES: Final = 64 << 10  # of a volume, beside 256 bytes a page; generously


@dataclass(frozen=True, slots=True)
class World:
    """Some directories and what stores are opened on them with; one kill follows another in it.

    is_roomy: each page fits into the lasting tiers at once, for every process, so that nothing acknowledged may be
    lost; else pages leave all the time, and volumes too where there are several processes. volumes: how many each
    process's part of the capacity is taken in. has_reader: a thread loads beside the one that does everything else.
    """

    number: int
    seed: int
    tiers: Tiers
    directory: Path
    shared_directory: Path
    page_bytes: int
    pages: int
    is_roomy: bool
    is_damaged: bool
    processes: int
    volumes: int
    direct_io: bool
    selective: bool
    host_pages: int
    has_reader: bool

    @classmethod
    def chosen(
        cls,
        number: int,
        seed: int,
        tiers: Tiers,
        universe: Universe,
        *,
        directory: Path,
        shared_directory: Path,
        processes: int,
        is_damaged: bool,
    ) -> World:
        """Choose a world by its number and the run's seed; every second one is roomy."""
        rng = random.Random(f"world {seed} {tiers} {number}")
        is_roomy = number % 2 == 0 and not is_damaged
        return cls(
            number=number,
            seed=seed,
            tiers=tiers,
            directory=directory,
            shared_directory=shared_directory,
            page_bytes=universe.page_bytes,
            pages=len(universe.keys),
            is_roomy=is_roomy,
            is_damaged=is_damaged,
            processes=processes,
            volumes=rng.choice((1, 1, 3, 5)),
            direct_io=rng.random() < 0.7,
            selective=tiers == "both" and rng.random() < 0.25,
            host_pages=rng.choice((0, 0, 16)),
            has_reader=rng.random() < 0.3,
        )

    @property
    def paths(self) -> dict[str, Path]:
        """The tier directories by tier."""
        found = {}
        if self.tiers != "disk":
            found["shared"] = self.shared_directory / "shared"
        if self.tiers != "shared":
            found["disk"] = self.directory / "disk"
        return found

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes that each tier directory may hold."""
        return {tier: self._capacity(tier)[0] for tier in self.paths}

    def config(self, universe: Universe, epoch: int) -> StoreConfig:
        """Return what a process opens its store with."""
        paths = self.paths
        shared = disk = None
        if "shared" in paths:
            capacity, volume = self._capacity("shared")
            shared = SharedTier(capacity, str(paths["shared"]), volume_bytes=volume, share=volume)
        if "disk" in paths:
            capacity, volume = self._capacity("disk")
            disk = DiskTier(
                capacity,
                str(paths["disk"]),
                volume_bytes=volume,
                share=volume,
                direct_io=self.direct_io,
                write="selective" if self.selective else "through",
            )
        return StoreConfig(
            geometry=universe.geometry,
            epoch=epoch,
            host=self.host_pages * 4096 * -(-self.page_bytes // 4096) or None,
            shared=shared,
            disk=disk,
            io_threads=1 + self.number % 2,
            close_timeout=30.0,
        )

    def _capacity(self, tier: str) -> tuple[int, int]:
        """Return (capacity, volume) of a tier in bytes."""
        part = 1.4 if self.is_roomy else 0.5
        if self.tiers == "both" and tier == "shared":
            part = 0.4  # what leaves shared memory is on disk
        if self.selective:
            part = max(part, 1.4) if self.is_roomy else part
        slot = 4096 * -(-self.page_bytes // 4096)
        each = -(-int(part * self.pages) // self.volumes)
        volume = METADATA_BYTES + max(each, 16) * (slot + 256)
        several = self.processes > 1
        count = self.volumes * (self.processes + 2) if several and self.is_roomy else self.volumes
        return volume * max(count, self.processes + 1 if several else 1), volume
