"""Make a world for a store: directories, a clock, seeds, one or several processes, and what goes wrong outside of them.

    operation (operations.py) -> store and model -> see():   every page's state -> model.see(): is each change allowed?
                                                 -> poll():  what has ended -> are its bytes right?
                                                 -> check(): do the slots add up?

The stores are the real ones, with the real core and real files; only threads and time are taken from them (stepped.py).
Nothing here depends on anything but the shape, the seed and the operations: the same ones give the same run.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.index import Tier
from stepwell.testing.caller import Caller
from stepwell.testing.model import ARRIVING, BrokenPromise, States, Step, name
from stepwell.testing.pages import GEOMETRIES, OPAQUE

VOLUME_BYTES: Final = 256 * 1024
HOST_SLOT_BYTES: Final = 4096
_MOST_ROUNDS: Final = 60
_MOST: Final = 64
_BETWEEN_TRIES: Final = 61.0
"""Seconds: a tier that failed is tried again at least so often."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a world is made of.

    geometry: index into GEOMETRIES. host: slots. shared, disk: volumes. selective: disk writes are. stores: on the same
    directories, each as a process of its own would have it. device: slots; step_pages: what one step moves of them.
    """

    geometry: int = 0
    host: int = 4
    shared: int = 1
    disk: int = 1
    selective: bool = False
    stores: int = 1
    device: int = 0
    step_pages: int = 64

    def check(self) -> None:
        """Check that there can be such a world.

        Raises: ValueError.
        """
        volumes = [each for each in (self.shared, self.disk) if each]
        if not (
            0 <= self.geometry < len(GEOMETRIES)
            and all(0 <= each <= _MOST for each in (self.host, self.shared, self.disk, self.device))
            and (self.host or volumes)
            and 1 <= self.stores <= _MOST
            and (self.stores == 1 or volumes)
            and all(each >= self.stores for each in volumes)
            and not (self.selective and len(volumes) < 2)
            and 1 <= self.step_pages <= _MOST
            and not (self.device and (not self.host or self.stores > 1 or self.geometry == OPAQUE))
        ):
            raise ValueError(f"there is no such world: {self}")


class World:
    """One or several stores on the same directories, a clock, and the seeds of what the stores choose.

    Args: directory: an empty one, which the caller removes.
    """

    def __init__(self, shape: Shape, *, seed: int, directory: Path) -> None:
        self.shape = shape
        self.geometry = GEOMETRIES[shape.geometry]
        self.directory = directory
        self.shared, self.disk = directory / "shared", directory / "disk"
        self.clock = ManualClock()
        self.seeds = itertools.count(seed)
        self._names = random.Random(f"{seed} volumes")
        self.is_failing = False
        self.failing_steps = 0
        self.ever: set[tuple[int, bytes]] = set()  # pages that were resident in a lasting tier of some process
        self.callers: list[Caller] = []
        for number in range(shape.stores):
            self.callers.append(self.make_caller(number))

    def make_caller(self, number: int) -> Caller:
        """Begin one of the processes."""
        return Caller(self, number)

    def new_id(self) -> str:
        """Name a volume. Names decide which volume comes first, and so which of several calls the nth one is."""
        return self._names.randbytes(16).hex()

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self.shape.stores > 1

    def config(self, epoch: int) -> StoreConfig:
        """Return the configuration of the stores."""
        shape = self.shape
        shared = SharedTier(shape.shared * VOLUME_BYTES, str(self.shared), volume_bytes=VOLUME_BYTES)
        disk = DiskTier(
            shape.disk * VOLUME_BYTES,
            str(self.disk),
            volume_bytes=VOLUME_BYTES,
            write="selective" if shape.selective else "through",
        )
        return StoreConfig(
            geometry=self.geometry,
            host=shape.host * self.host_slot_bytes or None,
            shared=shared if shape.shared else None,
            disk=disk if shape.disk else None,
            staging=4 * self.host_slot_bytes if self.is_shared and not shape.host else None,
            epoch=epoch,
        )

    @property
    def host_slot_bytes(self) -> int:
        """What a page takes in host memory."""
        return -(-self.geometry.page_bytes // HOST_SLOT_BYTES) * HOST_SLOT_BYTES

    # ---- several processes -------------------------------------------------------------------------------------------

    def note(self, epoch: int, now: Mapping[bytes, States]) -> None:
        """Note what some process has, or is about to have, in a lasting tier: another one may find it there."""
        for key, states in now.items():
            if states[Tier.SHARED] or states[Tier.DISK]:
                self.ever.add((epoch, key))

    def known_to_somebody(self, epoch: int, keys: Iterable[bytes]) -> None:
        """Check that pages that are found were saved by somebody."""
        for key in keys:
            if (epoch, key) not in self.ever:
                raise BrokenPromise(f"page {name(key)} was found, and nobody has saved it in epoch {epoch}")

    def adoptable(self, epoch: int) -> dict[bytes, tuple[int, ...]]:
        """Say what may appear in a process: all that any has had, for volumes change hands."""
        return {key: (Tier.SHARED, Tier.DISK) for at, key in self.ever if at == epoch} if self.is_shared else {}

    def check_budget(self) -> None:
        """Check that the volumes of all processes together are no more than a directory may hold."""
        for directory, most in ((self.shared, self.shape.shared), (self.disk, self.shape.disk)):
            names = os.listdir(directory) if directory.exists() else []
            volumes = len({each.partition(".")[0] for each in names if each.startswith("v-")})
            if volumes > most:
                raise BrokenPromise(f"{directory.name} holds {volumes} volumes, its capacity is {most}")

    # ---- crashes -----------------------------------------------------------------------------------------------------

    def crash(self, caller: Caller) -> None:
        """Kill the process: its files stay as they are at this instant, and the next one opens them.

        Requires: it is the only one.
        """
        found = caller.model.crash(caller.dump_others())
        kept = self.directory / "kept"
        kept.mkdir()
        for each in (self.shared, self.disk):
            if each.exists():
                _copy(each, kept / each.name)
        self._close(caller)
        for each in (self.shared, self.disk):
            shutil.rmtree(each, ignore_errors=True)
            if (kept / each.name).exists():
                (kept / each.name).rename(each)
        kept.rmdir()
        caller.open(found)

    def reopen(self, caller: Caller) -> None:
        """Close the store and open it again: what had not arrived may have, or not."""
        model = caller.model
        known = (page for pages in (model.pages, *model.others.values()) for page in pages.values())
        arriving = any(ARRIVING in page.at for page in known)
        found = model.crash(caller.dump_others())
        self._close(caller)
        caller.open(found, at_least=arriving)

    @staticmethod
    def _close(caller: Caller) -> None:
        for held in caller.held:
            held.match.close()
        caller.store.mover.before = caller.store.mover.after = lambda: None
        caller.store.close()

    # ---- files that fail ---------------------------------------------------------------------------------------------

    def fail(self, point: str, error: int, *, nth: int, steps: int) -> None:
        """Have calls on files fail during the next steps: all at a fault point, or the nth alone."""
        self.is_failing, self.failing_steps = True, steps
        for caller in self.callers:
            caller.tally.has_failed = caller.tally.is_blind = caller.tally.is_unsure = True
        _core.fault_arm(point, "errno", nth, error)

    def leniently(self, step: Step) -> Step:
        """Allow what may follow from calls that fail."""
        return replace(step, gives_up=True, mends=True, room=True, fails=True, spares=False)

    def heal(self) -> None:
        """Have files serve again, and every tier with them; the model takes over what is left.

        Nothing may be there that was not, and neither a tier nor a slot may be out of service for good.
        """
        _core.fault_clear()
        for caller in self.callers:
            caller.excuse()
            caller.settle()
            caller.let_go()
            pages = caller.model.pages
            before = {key: {tier for tier, at in enumerate(page.at) if at} for key, page in caller.model.pages.items()}
            for _ in range(_MOST_ROUNDS):
                self.clock.advance(_BETWEEN_TRIES)
                caller.store.tick()
                if all(tier.state == "serving" and not tier.owed for tier in caller.store.stats().tiers.values()):
                    break
            else:
                raise BrokenPromise(f"a tier does not serve again, or a slot: {caller.store.stats().tiers}")
            caller.settle()
            here = caller.dump()
            damaged = {key: caller.model.damaged_in(key) for key in before}
            for key, tiers in here.items():
                more = tiers - before.get(key, set())
                if more and not self.is_shared:
                    raise BrokenPromise(f"page {name(key)} is in {more} after files had failed, and was not")
            others = caller.model.others
            caller.begin_model()
            caller.model.others = others
            caller.appear()
            for key in before:
                caller.model.stand(key, caller.state(key, 1))
            caller.model.remember(pages)
            for key, tiers in here.items():
                for tier in tiers:
                    if damaged.get(key, (False,) * 4)[tier]:
                        caller.model.damage(key, tier)
        self.is_failing = False

    def close(self) -> None:
        """Close every store."""
        _core.fault_clear()
        for caller in self.callers:
            self._close(caller)


def _copy(source: Path, target: Path) -> None:
    """Copy a directory. An index, which is written beside the store, may be renamed or removed meanwhile; then it is
    left out."""
    try:
        shutil.copytree(source, target)
    except shutil.Error as error:
        if any(".lmdb" not in str(name) for name, *_ in error.args[0]):
            raise
