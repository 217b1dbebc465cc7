"""Hold a store to its model: a stepped store, what a caller holds of it, and what must be true after every step.

    operation (operations.py) -> store and model -> see():   every page's state -> model.see(): is each change allowed?
                                                 -> poll():  what has ended -> are its bytes right?
                                                 -> check(): do the slots add up?

The store is the real one, with its real core and real files; only threads and time are taken from it (stepped.py).
Nothing here depends on anything but the shape and the operations: the same ones give the same run, byte for byte.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import Tier
from stepwell.lease import Match
from stepwell.mover import Transfer, core_transfer
from stepwell.pins import Pinned
from stepwell.pool import LentPool, PoolSlice, lend_canonical
from stepwell.testing.model import ARRIVING, BrokenPromise, States, Step, StoreModel, name
from stepwell.testing.stepped import SteppedStore

KV: Final = 1
PARENT_KNOWN: Final = 1
OK: Final = _core.Status.ok.value
PAGE_TOKENS: Final = 4
VOLUME_BYTES: Final = 256 * 1024
POOL_SLOTS: Final = 64
MOST_PAGES: Final = 5
HOST_SLOT_BYTES: Final = 4096
UNTOUCHED: Final = 0x5A
"""What a caller's memory is filled with where no byte may land any more."""

Path_ = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]

GEOMETRIES: Final = (
    PageGeometry(model="w", revision="1", layers=2, kv_heads=4, head_dim=64, dtype="float32", page_tokens=PAGE_TOKENS),
    PageGeometry(model="w", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=PAGE_TOKENS),
    PageGeometry.opaque(5000, fingerprint={"model": "w"}, page_tokens=PAGE_TOKENS),
)
"""Pages of 16 KiB, of which a volume holds a dozen; of 1 KiB; and of rows of bytes whose number is odd."""
NAMESPACES: Final = (None, Namespace(adapter="a"), Namespace(salt="a"))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a world is made of.

    geometry: index into GEOMETRIES. host: slots. shared, disk: volumes. selective: disk writes are. stores: on the same
    directories, each as a process of its own would have it.
    """

    geometry: int = 0
    host: int = 4
    shared: int = 1
    disk: int = 1
    selective: bool = False
    stores: int = 1


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of a path and a namespace, and the keys of its whole pages."""

    tokens: npt.NDArray[np.int32]
    namespace: Namespace | None
    keys: tuple[bytes, ...]
    rows: Bytes  # the keys as an array


@functools.lru_cache(maxsize=4096)
def prefix(path: Path_, space: int) -> Prefix:
    """Return what a path names. Pages of different branches differ in their last token alone; a few tokens that are no
    whole page follow."""
    tokens = [token for branch in path for token in (7, 7, 7, branch)] + [9] * (len(path) % 3)
    array = np.array(tokens, np.int32)
    namespace = NAMESPACES[space]
    rows = prefix_hashes(array, page_tokens=PAGE_TOKENS, seed=namespace.seed() if namespace else None)
    return Prefix(array, namespace, tuple(row.tobytes() for row in rows), rows)


@functools.lru_cache(maxsize=4096)
def content(page_bytes: int, epoch: int, key: bytes) -> Bytes:
    """Return the bytes of a page: they follow from its key and its epoch, and no two places of it are alike."""
    seed = np.frombuffer(hashlib.sha256(epoch.to_bytes(8, "little") + key).digest(), np.uint64)
    words = np.arange(-(-page_bytes // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (words * np.uint64(0x9E3779B97F4A7C15) + seed[0]) * (seed[1] | np.uint64(1))
    found: Bytes = (mixed ^ (mixed >> np.uint64(29))).view(np.uint8)[:page_bytes].copy()
    return found


@dataclass(slots=True)
class Running:
    """A transfer under way, and what of the caller's and the model's it holds.

    claimed: keys it brings somewhere. tiers: where a load reads each page; () for a save. excused: it was cancelled, or
    its deadline has passed, or the world failed it: its pages need not come. slots: of the caller's pool.
    """

    transfer: Transfer
    core: _core.Transfer
    epoch: int
    keys: tuple[bytes, ...]
    claimed: list[bytes]
    tiers: list[int]
    slots: list[int]
    excused: bool = False
    is_late: bool = False
    damaged: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class Held:
    """An open match."""

    match: Match
    epoch: int
    keys: tuple[bytes, ...]
    tiers: list[int]


class Caller:
    """One process's use of its store: the store, the model that it is held to, a pool, and what is open.

    Invariant: between two steps the model says of every page of the present epoch where it is.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.page_bytes = world.geometry.page_bytes
        self.rows = np.zeros((POOL_SLOTS, self.page_bytes), np.uint8)
        self.free: list[int] = []
        self.counted = {"hits": 0, "looked up": 0, "evicted": 0, "saved": 0, "loaded": 0, "quarantined": 0}
        self.epoch = 0
        self.open({})

    # ---- the store ---------------------------------------------------------------------------------------------------

    def open(self, found: Mapping[bytes, Collection[int]], *, at_least: bool = False) -> None:
        """Open the store; it must find these pages, and with `at_least` may find others that were on their way."""
        world = self.world
        self.store = SteppedStore(world.config(self.epoch), clock=world.clock, seed=next(world.seeds))
        self.index = self.store._index
        self.state = self.index.state
        self.store.mover.before, self.store.mover.after = self.claimed, self.landed
        self.expected: tuple[Step, Callable[[], None]] | None = None
        self.tiers = [int(tier) for tier in self.store._room.all_tiers]
        self.lasting = [int(tier) for tier in self.store._room.keeping]
        self.pool: LentPool = lend_canonical(self.store._shape, self.rows)
        self.free = list(range(POOL_SLOTS))
        self.running: list[Running] = []
        self.held: list[Held] = []
        self.pins: list[tuple[Pinned, list[bytes], float]] = []
        self.probed: list[tuple[float, tuple[bytes, ...]]] = []
        self.model = StoreModel(
            [Tier(tier) for tier in self.tiers],
            [Tier(tier) for tier in self.lasting],
            is_ordered=world.shape.stores == 1,
        )
        self.model.epoch = self.epoch
        here = self.dump()
        for key, tiers in found.items():
            if not set(tiers) <= here.get(key, set()) and world.shape.stores == 1:
                raise BrokenPromise(f"page {name(key)} was in {tiers} before the restart, and is in {here.get(key)}")
        if not at_least:
            for key, each in here.items():
                if not each <= set(found.get(key, ())) and world.shape.stores == 1:
                    raise BrokenPromise(f"page {name(key)} is in {each} after the restart, and was in {found.get(key)}")
        self.appear()

    def appear(self) -> None:
        """Have the model take over where pages are, in the order in which they leave."""
        for tier in self.tiers:
            for key, epoch, parent, state in self.labels(tier).values():
                if epoch == self.epoch and state == PARENT_KNOWN:
                    self.model.link([parent, key])
            self.model.appear(tier, self.leaving_order(tier))

    def labels(self, tier: int) -> dict[int, tuple[bytes, int, bytes, int]]:
        """Say what is resident in a tier, by slot: (key, epoch, parent, parent's state)."""
        ids, slots = self.index.pin_resident(tier, None, 1 << 20)
        labels = self.index.labels(ids)
        self.index.unpin_pages(ids)
        return {
            slot: (key, epoch, parent, state)
            for slot, (key, parent, state, _, _, epoch) in zip(slots.tolist(), labels, strict=True)
        }

    def dump(self) -> dict[bytes, set[int]]:
        """Say which pages of the present epoch are resident where."""
        here: dict[bytes, set[int]] = {}
        for tier in self.tiers:
            for key, epoch, _, _ in self.labels(tier).values():
                if epoch == self.epoch:
                    here.setdefault(key, set()).add(tier)
        return here

    def leaving_order(self, tier: int) -> list[bytes]:
        """Return the keys of the pages of this epoch in a tier, the first to leave first; what pin() keeps last."""
        labels = self.labels(tier)
        named = [labels[slot] for slot in self.index.rank_order(tier).tolist()]
        return [key for key, epoch, _, _ in named if epoch == self.epoch]

    # ---- the caller's memory -----------------------------------------------------------------------------------------

    def take(self, pages: int) -> list[int] | None:
        """Take slots of the pool; None where too many are in use."""
        if len(self.free) < pages:
            return None
        taken, self.free = self.free[:pages], self.free[pages:]
        return taken

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> PoolSlice:
        """Write pages into slots, and name these."""
        for slot, key in zip(slots, keys, strict=True):
            self.rows[slot] = content(self.page_bytes, self.epoch, key)
        return self.pool[np.array(slots, np.int64)]

    def blank(self, slots: Sequence[int]) -> PoolSlice:
        """Put what is no page's into slots, and name these."""
        self.rows[slots] = UNTOUCHED
        return self.pool[np.array(slots, np.int64)]

    def is_right(self, slot: int, key: bytes, epoch: int) -> bool:
        """Say whether a slot holds a page."""
        return bool(self.rows[slot].tobytes() == content(self.page_bytes, epoch, key).tobytes())

    # ---- after a step ------------------------------------------------------------------------------------------------

    def see(self, step: Step, keys: Iterable[bytes] | None = None) -> list[bytes]:
        """Look where pages are now, and have the model judge what has changed.

        Args:
            keys: those that may have changed; None: all that are known, and those that the step wanted.

        Returns:
            Those of the wanted ones that began to arrive somewhere.
        """
        state, model = self.state, self.model
        looked_at = [*model.pages, *step.wanted] if keys is None else keys
        now: dict[bytes, States] = {key: state(key, KV) for key in looked_at}
        coming = [key for key in step.wanted if self._comes(model.states(key), now[key])] if step.wanted else []
        model.see(now, step)
        return coming

    @staticmethod
    def _comes(before: States, now: States) -> bool:
        return any(was != ARRIVING and became == ARRIVING for was, became in zip(before, now, strict=True))

    def unit(self) -> bool:
        """Run one unit of the mover, and judge what it did. False: none was waiting."""
        has_run = self.store.mover.step()
        if not has_run:
            self.model.carried.clear()
        return has_run

    @property
    def soft(self) -> set[bytes]:
        """Pages that may stay although nobody has pinned them."""
        return self.model.courtesies | self.model.carried

    @contextmanager
    def waiting(self, step: Step, *, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Do inside the `with` block what claims pages and then waits for them: the claims are judged before the first
        unit runs.

        Args:
            then: what follows from the claims, in the model.
        """
        self.expected = (step, then)
        yield
        self.claimed()
        self.poll()

    def claimed(self) -> None:
        """Judge what was claimed, before a unit runs."""
        if self.expected is not None:
            (step, then), self.expected = self.expected, None
            self.see(step)
            then()

    def landed(self) -> None:
        """Judge what a unit of the mover has done."""
        moving = [key for key, page in self.model.pages.items() if ARRIVING in page.at]
        for each in self.running:
            if each.tiers and each.epoch == self.epoch:
                moving.extend(each.keys)
        excused = any(each.excused for each in self.running)
        before = self.model.counts
        quarantined = sum(row[4] for row in before)
        self.note_damage()
        self.see(Step(lands=True, gives_up=excused or self.world.is_failing or self.has_damage), moving)
        self.counted["quarantined"] += sum(row[4] for row in self.model.counts) - quarantined
        self.poll()

    @property
    def has_damage(self) -> bool:
        """Whether a page that is read now may turn out to be damaged: what was to be made from it does not arrive."""
        return any(each.damaged for each in self.running) or any(any(p.damaged) for p in self.model.pages.values())

    def note_damage(self) -> None:
        """Note of each load which of its pages are damaged somewhere."""
        for each in self.running:
            if each.epoch == self.epoch:
                each.damaged.update(key for key in each.keys if any(self.model.know(key).damaged))
                self.model.forget_unknown(each.keys)

    def start(
        self, transfer: Transfer, keys: Sequence[bytes], tiers: list[int], slots: list[int], claimed: list[bytes]
    ) -> None:
        """Take a transfer for one under way: the model pins what it holds."""
        core = core_transfer(transfer)
        if core is None:
            self.free.extend(slots)
            return
        self.model.claim(claimed, +1)
        if tiers:
            self.model.pin(keys, tiers, +1)
        self.running.append(Running(transfer, core, self.epoch, tuple(keys), claimed, tiers, slots))
        self.note_damage()

    def poll(self) -> None:
        """Check what has been decided, and return what has ended."""
        for each in self.running:
            if not each.tiers and not each.is_late and each.transfer.source_released:
                self.rows[each.slots] = UNTOUCHED  # the caller may write there again
                each.is_late = True
        for each in [each for each in self.running if each.core.decided]:
            if each.tiers and not each.is_late:
                self._decided(each)
            if each.core.done:
                self._ended(each)

    def _decided(self, each: Running) -> None:
        each.is_late = True
        for slot, key, status in zip(each.slots, each.keys, each.transfer.status.tolist(), strict=True):
            if status == OK:
                if not self.is_right(slot, key, each.epoch):
                    raise BrokenPromise(f"wrong bytes were served for page {name(key)}")
                self.counted["loaded"] += 1
            elif not (each.excused or self.world.is_failing or each.damaged or each.epoch != self.epoch):
                raise BrokenPromise(f"page {name(key)} was pinned, and did not come: {_core.Status(status).name}")
            self.rows[slot] = UNTOUCHED  # it is the caller's again

    def _ended(self, each: Running) -> None:
        self.running.remove(each)
        if any((self.rows[slot] != UNTOUCHED).any() for slot in (each.slots if each.tiers else ())):
            raise BrokenPromise("bytes landed in memory that had been given back")
        self.free.extend(each.slots)
        self.rows[each.slots] = UNTOUCHED
        if each.epoch == self.epoch:
            self.model.claim(each.claimed, -1)
            if each.tiers:
                self.model.pin(each.keys, each.tiers, -1)

    def excuse(self, which: Iterable[Running] | None = None) -> None:
        """Expect nothing any more of transfers: they were cancelled."""
        for each in self.running if which is None else which:
            each.excused = True

    def soften(self) -> None:
        """Have the model know which pages stay as a courtesy: those that probes hold until their lease has passed, and
        what they have begun to bring nearer has come."""
        now, states = self.world.clock.monotonic(), self.model.states
        self.probed = [
            (at, keys) for at, keys in self.probed if at > now or any(ARRIVING in states(key) for key in keys)
        ]
        self.model.courtesies = {key for _, keys in self.probed for key in keys}

    def check(self) -> None:
        """Hold the slots of every tier to what the model says."""
        for tier in self.tiers:
            counts = self.index.counts(tier)
            self.model.adds_up(tier, counts, others=self.world.strangers(self))

    def audit(self) -> None:
        """Scan the index, and compare the order in which pages leave with the model's."""
        found = self.store.check()
        if found:
            raise BrokenPromise(f"the index is not whole: {found}")
        if not self.model.is_ordered:
            return
        for tier in self.tiers:
            order, expected = self.leaving_order(tier), self.model.order[tier]
            if order[: len(expected)] != expected:
                shown = [list(map(name, each)) for each in (order, expected)]
                raise BrokenPromise(f"pages leave {Tier(tier)} in the order {shown[0]}, the model says {shown[1]}")

    def settle(self) -> int:
        """Run what is under way to its end; nothing may be left. Returns the number of units."""
        count = 0
        while self.unit():
            count += 1
        self.poll()
        if self.running:
            raise BrokenPromise(f"nothing is left to do, and {len(self.running)} transfers have not ended")
        moving = [name(key) for key, page in self.model.pages.items() if ARRIVING in page.at]
        if moving:
            raise BrokenPromise(f"nothing is left to do, and pages {moving} have not arrived")
        return count

    def let_go(self) -> None:
        """Close what is open."""
        for held in self.held:
            held.match.close()
            if held.epoch == self.epoch:
                self.model.pin(held.keys, held.tiers, -1)
        self.held.clear()


class World:
    """One or several stores on the same directories, a clock, and the seeds of what the stores choose.

    A context manager: it makes the directories and removes them.
    """

    def __init__(self, shape: Shape, *, seed: int, directory: Path) -> None:
        self.shape = shape
        self.geometry = GEOMETRIES[shape.geometry]
        self.directory = directory
        self.shared, self.disk = directory / "shared", directory / "disk"
        self.clock = ManualClock()
        self.seeds = itertools.count(seed)
        self.is_failing = False
        self.callers = [Caller(self, number) for number in range(shape.stores)]

    def config(self, epoch: int) -> StoreConfig:
        """Return the configuration of the stores."""
        shape = self.shape
        return StoreConfig(
            geometry=self.geometry,
            host=shape.host * self._host_slot() or None,
            shared=SharedTier(shape.shared * VOLUME_BYTES, str(self.shared), volume_bytes=VOLUME_BYTES)
            if shape.shared
            else None,
            disk=DiskTier(
                shape.disk * VOLUME_BYTES,
                str(self.disk),
                volume_bytes=VOLUME_BYTES,
                write="selective" if shape.selective else "through",
            )
            if shape.disk
            else None,
            epoch=epoch,
        )

    def _host_slot(self) -> int:
        return -(-self.geometry.page_bytes // HOST_SLOT_BYTES) * HOST_SLOT_BYTES

    def strangers(self, caller: Caller) -> int:
        """Say how many slots of a tier may be of pages that the caller's model does not know."""
        return 1 << 30 if caller.model.others or self.shape.stores > 1 else 0

    def crash(self, caller: Caller) -> None:
        """Kill the process: its files stay as they are at this instant, and the next one opens them."""
        found = caller.model.crash()
        kept = self.directory / "kept"
        kept.mkdir()
        for each in (self.shared, self.disk):
            if each.exists():
                shutil.copytree(each, kept / each.name)
        self._close(caller)
        for each in (self.shared, self.disk):
            shutil.rmtree(each, ignore_errors=True)
            if (kept / each.name).exists():
                (kept / each.name).rename(each)
        kept.rmdir()
        caller.open(found)

    def reopen(self, caller: Caller) -> None:
        """Close the store and open it again: what had not arrived may have, or not."""
        arriving = any(ARRIVING in page.at for page in caller.model.pages.values())
        found = caller.model.crash()
        self._close(caller)
        caller.open(found, at_least=arriving)

    def _close(self, caller: Caller) -> None:
        for held in caller.held:
            held.match.close()
        caller.store.close()

    def close(self) -> None:
        """Close every store; nothing may be held then."""
        for caller in self.callers:
            for held in caller.held:
                held.match.close()
            caller.store.close()
