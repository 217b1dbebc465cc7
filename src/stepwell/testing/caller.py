"""Use a store as one process does, and hold it to the model after every step: what is open, what is under way, and the
memory lent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from stepwell import _core
from stepwell.index import Tier
from stepwell.lease import Match
from stepwell.mover import Transfer, core_transfer
from stepwell.pins import Pinned
from stepwell.pool import LentPool, PoolSlice, lend_canonical
from stepwell.testing.model import (
    ARRIVING,
    NOWHERE,
    RESIDENT,
    TIERS,
    After,
    BrokenPromise,
    States,
    Step,
    StoreModel,
    name,
)
from stepwell.testing.pages import content, flip
from stepwell.testing.stepped import SteppedStore
from stepwell.testing.tally import Tally

if TYPE_CHECKING:
    from stepwell.testing.world import World

KV: Final = 1
PARENT_KNOWN: Final = 1
OK: Final = _core.Status.ok.value
POOL_SLOTS: Final = 64
UNTOUCHED: Final = 0x5A
"""What a caller's memory is filled with where no byte may land any more."""
EVERYTHING: Final = 1 << 30
NOTHING_LEFT: Final = After({}, set(), {})


@dataclass(slots=True)
class Running:
    """A transfer under way, and what of the caller's and the model's it holds.

    claimed: keys it brings somewhere. tiers: where a load reads each page; [] for a save. slots: of the caller's pool.
    excused: it was cancelled, its deadline has passed, or the world failed it: its pages need not come. is_over: the
    caller's memory is the caller's again. doubtful: pages that need not come: damaged, or a neighbour's.
    """

    transfer: Transfer
    core: _core.Transfer
    epoch: int
    keys: tuple[bytes, ...]
    claimed: list[bytes]
    tiers: list[int]
    slots: list[int]
    excused: bool = False
    is_over: bool = False
    doubtful: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class Held:
    """An open match."""

    match: Match
    epoch: int
    keys: tuple[bytes, ...]
    tiers: list[int]


class Caller:
    """One process's use of its store.

    Invariant: between two steps the model says of every page of the present epoch where it is.
    """

    counts_all = True
    """Whether all look-ups and saves of the store are the caller's, and counted."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.page_bytes = world.geometry.page_bytes
        self.rows = np.zeros((POOL_SLOTS, self.page_bytes), np.uint8)
        self.untouched = bytes([UNTOUCHED]) * self.page_bytes
        self.counted = dict.fromkeys(("looked up", "hits", "saved", "loaded", "evicted", "quarantined"), 0)
        self.epoch = 0
        self.open(NOTHING_LEFT)

    # ---- the store ---------------------------------------------------------------------------------------------------

    def open(self, found: After, *, at_least: bool = False) -> None:
        """Open the store: it must find these pages, and with `at_least` may find others that were on their way."""
        world = self.world
        self.store = SteppedStore(
            world.config(self.epoch), clock=world.clock, seed=next(world.seeds), new_id=world.new_id
        )
        self.index, self.state = self.store._index, self.store._index.state
        self.store.mover.before, self.store.mover.after = self.claimed, self.landed
        self.pool: LentPool = lend_canonical(self.store._shape, self.rows)
        self._tiers: list[int] = []
        self._known_tiers = 0
        self.place = self.tiers
        self.free = list(range(POOL_SLOTS))
        self.rows.fill(UNTOUCHED)
        self.running: list[Running] = []
        self.held: list[Held] = []
        self.pins: list[tuple[Pinned, list[bytes], float]] = []
        self.expected: tuple[Step, Callable[[], None]] | None = None
        self.has_cancelled = False  # also what the store itself had begun
        self.pressed = 0  # how often only probes could give room, until the last look
        self.tally = Tally()
        self.tally.is_blind = self.tally.is_unsure = world.is_shared
        self.tally.has_failed = bool(found.damaged)
        self.begin_model()
        others = self.dump_others()
        for epoch in {self.epoch, *found.others, *others}:
            is_own = epoch == self.epoch
            here = self.dump() if is_own else others.get(epoch, {})
            left = found if is_own else found.others.get(epoch, NOTHING_LEFT)
            if world.is_shared:
                world.known_to_somebody(epoch, here)
            else:
                self.compare(left, here, at_least=at_least)
            if not is_own and here:
                self.model.appear_of(epoch, here, left.damaged)
                self.tally.is_blind = True
        self.appear()
        for key, tier in found.damaged:
            self.model.damage(key, tier)

    @property
    def tiers(self) -> list[int]:
        """The tiers that the store has: memory to stage neighbours' pages in becomes one with the first of them."""
        if len(self.store._tiers) != self._known_tiers:
            self._known_tiers = len(self.store._tiers)
            self._tiers = [int(tier) for tier in self.store._room.all_tiers]
        return self._tiers

    @property
    def usable(self) -> list[int]:
        """The tiers that can be read now."""
        mask = self.store._room.readable
        return [tier for tier in range(TIERS) if mask >> tier & 1]

    def begin_model(self) -> None:
        """Have the model know nothing."""
        self.keeping = [int(tier) for tier in self.store._room.keeping]
        self.model = StoreModel([Tier(tier) for tier in self.keeping], is_ordered=not self.world.is_shared)
        self.model.epoch = self.epoch
        self.model.left = self.tally.evicted

    def compare(self, found: After, here: Mapping[bytes, Collection[int]], *, at_least: bool) -> None:
        """Compare what a store has after a restart with what it must have."""
        for key, tiers in found.pages.items():
            if not tiers <= set(here.get(key, ())):
                raise BrokenPromise(f"page {name(key)} was in {tiers} before, and is in {here.get(key)}")
        for key, each in () if at_least else here.items():
            more = [tier for tier in each if tier not in found.pages.get(key, ()) and (key, tier) not in found.damaged]
            if more:
                raise BrokenPromise(f"page {name(key)} is in {more} now, and was not before")

    def labels(self, tier: int) -> dict[int, tuple[bytes, int, bytes, int]]:
        """Say what is resident in a tier, by slot: (key, epoch, parent, parent's state)."""
        ids, slots = self.index.pin_resident(tier, None, EVERYTHING)
        labels = self.index.labels(ids)
        self.index.unpin_pages(ids)
        return {
            slot: (key, epoch, parent, state)
            for slot, (key, parent, state, _, _, epoch) in zip(slots.tolist(), labels, strict=True)
        }

    def dump(self) -> dict[bytes, set[int]]:
        """Say which pages of the present epoch are resident where."""
        return self._dump().get(self.epoch, {})

    def dump_others(self) -> dict[int, dict[bytes, set[int]]]:
        """Say by epoch which pages of others are resident where."""
        return {epoch: here for epoch, here in self._dump().items() if epoch != self.epoch}

    def _dump(self) -> dict[int, dict[bytes, set[int]]]:
        here: dict[int, dict[bytes, set[int]]] = {}
        for tier in self.tiers:
            for key, epoch, _, _ in self.labels(tier).values():
                here.setdefault(epoch, {}).setdefault(key, set()).add(tier)
        return here

    def leaving_order(self, tier: int) -> list[bytes]:
        """Return the keys of the pages of this epoch in a tier, the first to leave first; what pin() keeps last."""
        labels = self.labels(tier)
        named = [labels[slot] for slot in self.index.rank_order(tier).tolist()]
        return [key for key, epoch, _, _ in named if epoch == self.epoch]

    def appear(self) -> None:
        """Have the model take over where pages are, in the order in which they leave."""
        for tier in self.tiers:
            for key, epoch, parent, state in self.labels(tier).values():
                if epoch == self.epoch and state == PARENT_KNOWN:
                    self.model.link([parent, key])
            self.model.appear(tier, self.leaving_order(tier))

    # ---- the caller's memory -----------------------------------------------------------------------------------------

    def take(self, pages: int) -> list[int] | None:
        """Take slots of the pool; None where too many are in use, or none is asked for."""
        if len(self.free) < pages or pages == 0:
            return None
        taken, self.free = self.free[:pages], self.free[pages:]
        return taken

    def give_back(self, slots: list[int]) -> None:
        """Return slots of the pool."""
        self.rows[slots] = UNTOUCHED
        self.free.extend(slots)

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> PoolSlice:
        """Write pages into slots, and name these."""
        for slot, key in zip(slots, keys, strict=True):
            self.rows[slot] = content(self.page_bytes, self.epoch, key)
        return self.pool[np.array(slots, np.int64)]

    def blank(self, slots: Sequence[int]) -> PoolSlice:
        """Name slots, which hold what is no page's: those that nobody uses do."""
        return self.pool[np.array(slots, np.int64)]

    def is_right(self, slot: int, key: bytes, epoch: int) -> bool:
        """Say whether a slot holds a page."""
        return bool(self.rows[slot].tobytes() == content(self.page_bytes, epoch, key).tobytes())

    def damage(self, key: bytes, tier: int) -> bool:
        """Change one bit of a page in a tier, behind the store's back. False: it is not there."""
        if self.model.states(key)[tier] != RESIDENT:
            return False
        page = content(self.page_bytes, self.epoch, key).tobytes()
        if tier == Tier.HOST:
            slab = self.store._slab
            assert slab is not None, "the tier is there"
            found = [row for row in slab.medium.view() if row[: self.page_bytes].tobytes() == page]
            for row in found:
                row[self.page_bytes // 2] ^= 1
            is_changed = bool(found)
        else:
            is_changed = flip(self.world.shared if tier == Tier.SHARED else self.world.disk, page)
        if is_changed:
            self.model.damage(key, tier)
            self.tally.has_failed = True
        return is_changed

    # ---- after a step ------------------------------------------------------------------------------------------------

    def see(self, step: Step, keys: Iterable[bytes] | None = None) -> list[bytes]:
        """Look where pages are now, and have the model judge what has changed.

        Args:
            keys: known ones that may have changed; None: all that are known, and those that the step wanted.

        Returns:
            Those of the wanted ones that began to arrive somewhere.
        """
        state, model, world = self.state, self.model, self.world
        pages = model.pages
        known = pages.items() if keys is None else [(key, pages[key]) for key in keys]
        now: dict[bytes, States] = {key: became for key, page in known if (became := state(key, KV)) != page.at}
        for key in () if keys is not None else (*step.wanted, *step.returns):
            if key not in pages and (became := state(key, KV)) != NOWHERE:
                now[key] = became
        coming = [key for key in step.wanted if key in now and _begins(model.states(key), now[key])]
        if world.is_failing:
            step = world.leniently(step)
        if not now:
            return []
        model.see(now, step)
        if world.is_shared:
            world.note(self.epoch, now)
        return coming

    def unit(self) -> bool:
        """Run one unit of the mover, and judge what it did. False: none was waiting."""
        has_run = self.store.mover.step()
        if not has_run:
            self.model.carried.clear()
            self.has_cancelled = False
        return has_run

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
        if self.world.is_shared:  # a neighbour's pages are claimed as there is room to stage them, while others land
            self.see(replace(step, lands=True, gives_up=True))
        self.poll()

    def claimed(self) -> None:
        """Judge what was claimed, before a unit runs."""
        if self.expected is not None:
            (step, then), self.expected = self.expected, None
            self.see(step)
            then()

    def landed(self) -> None:
        """Judge what a unit of the mover has done."""
        model = self.model
        moving: list[bytes] | None = None  # anybody, where a page may be found damaged
        if not (self.world.is_failing or model.has_damage):
            moving = [key for key, page in model.pages.items() if ARRIVING in page.at]
        self.doubt()
        before = model.quarantined
        self.see(Step(lands=True, gives_up=self.may_lose), moving)
        self.counted["quarantined"] += max(0, model.quarantined - before)
        if not self.world.is_failing:
            self.tally.quarantined += max(0, model.quarantined - before)
        self.poll()

    @property
    def may_lose(self) -> bool:
        """Whether what is on its way may be lost: a transfer was cancelled, or what it reads may be damaged or gone."""
        return (
            self.world.is_failing
            or self.world.is_shared
            or self.model.has_damage
            or self.model.quarantined > 0
            or self.has_cancelled
            or any(each.excused or each.doubtful for each in self.running)
        )

    def doubt(self) -> None:
        """Note of each load which of its pages are damaged somewhere: it may ask other tiers for them, and pins them
        there then."""
        if self.model.has_damage:
            for each in self.running:
                if each.epoch == self.epoch:
                    each.doubtful.update(key for key in each.keys if any(self.model.damaged_in(key)))
                    self.model.carried.update(each.doubtful)

    def start(
        self, transfer: Transfer, keys: Sequence[bytes], tiers: list[int], slots: list[int], claimed: list[bytes]
    ) -> Running | None:
        """Take a transfer for one under way: the model pins what it holds. None: nothing is."""
        core = core_transfer(transfer)
        if core is None:
            self.tally.undelivered += transfer.pages
            self.give_back(slots)
            return None
        self.model.claim(claimed, +1)
        if tiers:
            self.model.pin(keys, tiers, +1)
        each = Running(transfer, core, self.epoch, tuple(keys), claimed, tiers, slots)
        # An open match keeps its pages where they are; what is found damaged meanwhile does not come all the same.
        each.doubtful.update(
            key for key, tier in zip(keys, tiers, strict=bool(tiers)) if self.model.states(key)[tier] != RESIDENT
        )
        self.model.carried.update(each.doubtful)
        self.join(keys, tiers)
        self.running.append(each)
        self.doubt()
        return each

    def join(self, keys: Sequence[bytes], tiers: Sequence[int | None]) -> None:
        """Let pages stay that a load finds on disk and that were begun to come nearer ahead of it: it waits for these,
        and keeps them where they come until it has ended."""
        for key, tier in zip(keys, tiers, strict=False):
            nearer = self.model.states(key)[Tier.HOST : Tier.DISK]
            if tier == Tier.DISK and (ARRIVING in nearer or RESIDENT in nearer):
                self.model.carried.add(key)

    def misses(self) -> int:
        """Return how many pages the store has counted as missed; what stats() says of them is held to the tally's."""
        self.poll()
        self.store._copies.account()
        return sum(self.store._counters.misses.values())

    def delivered(self) -> Counter[str]:
        """Return how many pages the store has counted as delivered, by tier."""
        self.poll()
        self.store._copies.account()
        return Counter({tier.name.lower(): pages for tier, pages in self.store._counters.delivered_pages.items()})

    def poll(self) -> None:
        """Check what has been decided, and return what has ended."""
        for each in self.running[:]:
            if not each.is_over:
                if not each.tiers and each.transfer.source_released:
                    self.rows[each.slots] = UNTOUCHED  # the caller may write there again
                    each.is_over = True
                elif each.tiers and each.core.decided:
                    self._decided(each)
            if each.core.done:
                self._ended(each)

    def _decided(self, each: Running) -> None:
        each.is_over = True
        for slot, key, status in zip(each.slots, each.keys, each.transfer.status.tolist(), strict=True):
            if status == OK:
                if not self.is_right(slot, key, each.epoch):
                    raise BrokenPromise(f"wrong bytes were served for page {name(key)}")
                self.counted["loaded"] += 1
            elif not (each.excused or self.world.is_failing or key in each.doubtful or each.epoch != self.epoch):
                raise BrokenPromise(f"page {name(key)} was pinned, and did not come: {_core.Status(status).name}")
            self.rows[slot] = UNTOUCHED

    def _ended(self, each: Running) -> None:
        self.running.remove(each)
        if any(self.rows[slot].tobytes() != self.untouched for slot in each.slots):
            raise BrokenPromise("bytes landed in memory that had been given back")
        self.free.extend(each.slots)
        if each.tiers:
            came = each.core.page_status() == OK
            self.tally.undelivered += int((~came).sum())
            self.tally.deliver(tier for tier, has_come in zip(each.tiers, came.tolist(), strict=True) if has_come)
        if each.epoch == self.epoch:
            self.model.claim(each.claimed, -1)
            if each.tiers:
                self.model.pin(each.keys, each.tiers, -1)

    def excuse(self, which: Iterable[Running] | None = None) -> None:
        """Expect nothing any more of transfers: they were cancelled."""
        for each in self.running if which is None else which:
            each.excused = True

    @property
    def soft(self) -> set[bytes]:
        """Pages that may stay although nobody has pinned them."""
        return self.model.courtesies.union(self.model.asked, self.model.carried)

    @property
    def has_pressed(self) -> bool:
        """Whether room was asked for in this step that only probes could give."""
        return self.store._probes.pressed > self.pressed

    def kept(self) -> dict[bytes, float]:
        """Say what probes keep, and until when: what was asked for longest ago first."""
        ids, until = self.index.list_courtesies()
        return {key: at for (key, *_), at in zip(self.index.labels(ids), until.tolist(), strict=True)}

    def allowed(self) -> dict[int, int]:
        """Say how many pages probes may keep in each tier: a quarter of it, and three of four of those there now."""
        allowed = self.store._probes.allowed
        return {
            tier: min(allowed.get(Tier(tier), EVERYTHING), 3 * self.index.counts(tier)["capacity"] // 4)
            for tier in self.tiers
        }

    def check(self) -> None:
        """Hold what probes keep, and the slots of every tier, to what the model says."""
        if self.model.asked or self.index.courtesies():
            self.model.keep(self.kept(), may_end=self.has_pressed)
        self.pressed = self.store._probes.pressed
        others = self.strangers
        for tier in self.tiers:
            self.model.adds_up(tier, self.index.counts(tier), others=others)

    @property
    def strangers(self) -> int:
        """How many slots of a tier may be of pages that the model does not know."""
        return EVERYTHING if self.model.others or self.world.is_shared or self.world.is_failing else 0

    def audit(self) -> None:
        """Scan the index, and compare the order in which pages leave with the model's."""
        found = self.store.check()
        if found:
            raise BrokenPromise(f"the index is not whole: {found}")
        if not self.model.is_ordered or self.world.is_failing:
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
        for pin, chain, _ in self.pins:
            pin.close()
            self.model.unhold(chain)
        self.pins.clear()


def _begins(before: States, now: States) -> bool:
    return ARRIVING in now and any(
        was != ARRIVING and became == ARRIVING for was, became in zip(before, now, strict=True)
    )
