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
    process's part of the capacity is taken in; 1: for ever, else each start chooses anew, as it does all that may
    differ from one start to the next. has_reader: a thread loads beside the one that does everything else. is_damaged,
    has_errors: files are damaged, system calls fail. is_durable: every start has durability "power", else some have.
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
    has_errors: bool
    is_durable: bool
    processes: int
    volumes: int
    selective: bool
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
        has_errors: bool,
        is_durable: bool,
    ) -> World:
        """Choose a world by its number and the run's seed; every second one is roomy."""
        rng = random.Random(f"world {seed} {tiers} {number}")
        is_roomy = number % 2 == 0 and not (is_damaged or has_errors)
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
            has_errors=has_errors,
            is_durable=is_durable,
            processes=processes,
            volumes=rng.choice((1, 3)),
            selective=tiers == "both" and rng.random() < 0.25,
            has_reader=rng.random() < 0.3,
        )

    @property
    def is_harmed(self) -> bool:
        """Whether pages may be lost because somebody or something harms them."""
        return self.is_damaged or self.has_errors

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
        return {tier: self._capacity(tier) for tier in self.paths}

    def config(self, universe: Universe, epoch: int, seed: int) -> StoreConfig:
        """Return what a process opens its store with; the seed chooses what may differ from start to start."""
        rng = random.Random(f"config {seed}")
        paths = self.paths
        shared = disk = None
        if "shared" in paths:
            capacity, volume = self._capacity("shared"), self._volume("shared", rng)
            shared = SharedTier(capacity, str(paths["shared"]), volume_bytes=volume, share=volume)
        if "disk" in paths:
            capacity, volume = self._capacity("disk"), self._volume("disk", rng)
            disk = DiskTier(
                capacity,
                str(paths["disk"]),
                volume_bytes=volume,
                share=volume,
                direct_io=rng.random() < 0.7,
                write="selective" if self.selective else "through",
                durability="power" if rng.random() < 0.3 or self.is_durable else "process",
            )
        return StoreConfig(
            geometry=universe.geometry,
            epoch=epoch,
            host=rng.choice((0, 0, 16 * self._slot_bytes)) or None,
            shared=shared,
            disk=disk,
            copy_threads=rng.choice((1, 1, 2)),
            io_threads=rng.choice((1, 2)),
            close_timeout=30.0,
        )

    @property
    def _slot_bytes(self) -> int:
        """A page's place with the coarsest alignment that a file system may want."""
        return 4096 * -(-self.page_bytes // 4096)

    def _part(self, tier: str) -> float:
        """Return how much of all pages a process's part of a tier holds."""
        if self.tiers == "both" and tier == "shared" and not (self.selective and self.is_roomy):
            return 0.4  # what leaves shared memory is on disk
        if not self.is_roomy:
            return 0.5
        return 1.4 if self.volumes == 1 else 2.2  # volumes of several sizes leave a rest that none fits into

    def _volume(self, tier: str, rng: random.Random | None = None) -> int:
        """Return the bytes of a volume: a third or a fifth of a process's part; without rng the larger."""
        split = 1 if self.volumes == 1 else 3 if rng is None else rng.choice((3, 5))
        pages = max(16, -(-int(self._part(tier) * self.pages) // split))
        return METADATA_BYTES + pages * (self._slot_bytes + 256)

    def _capacity(self, tier: str) -> int:
        """Return the bytes that a tier's directory may hold: a process's part, for each of them and two more."""
        parts = self.volumes if self.processes == 1 else self.volumes * (self.processes + 2)
        if self.processes > 1 and not self.is_roomy:
            parts = max(self.volumes, self.processes + 1)  # a volume for each, and for the one that comes
        return self._volume(tier) * parts
