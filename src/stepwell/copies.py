"""Decide what is copied from where to where: plans with their claims, handed to the mover and watched to their end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import Clock
from stepwell.index import ClaimOutcome, Index, Residency, Taken, Tier, tier_mask
from stepwell.lease import Match
from stepwell.mover import (
    POOL_COLUMN,
    SINK,
    SOURCE,
    STATUS_REASON,
    UNUSED,
    Inbox,
    Plan,
    Transfer,
    WorkClass,
    core_inbox,
    core_transfer,
)
from stepwell.pool import LentPool, PoolSlice, core_pool, pool_owner
from stepwell.room import Room
from stepwell.stats import Counters

U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

NONE: Final = int(ClaimOutcome.NONE)
NEW: Final = int(ClaimOutcome.NEW)
PENDING: Final = int(ClaimOutcome.PENDING)
PRESENT: Final = int(ClaimOutcome.PRESENT)
FULL: Final = int(ClaimOutcome.FULL)
REFUSED: Final = int(ClaimOutcome.REFUSED)
NOT_FULL: Final = 0xFFFFFFFF
_AHEAD_PAGES: Final = 128
"""Of one transfer of a read-ahead: who gets the first pages of a long run does not wait for the last."""
_MOST_USED: Final = 1024
"""Pages that one lookup may have written to disk: the rest waits for the next."""
_LOOK_SECONDS: Final = 1.0
"""How often who waits for a transfer to end looks whether it was given up."""
_CLAIMED_TIERS: Final = (Tier.HOST, Tier.SHARED, Tier.DISK)
# What arrays are compared with: with a member of an enum it takes numpy four times as long, to find that it is an int.
_HOST: Final = int(Tier.HOST)
_DISK: Final = int(Tier.DISK)
_OK: Final = _core.Status.ok.value
_IN_PLACE: Final = (int(Residency.RESIDENT), int(Residency.QUARANTINED))


@dataclass(slots=True)
class Epoch:
    """The epoch of the weights. turns: how often it has changed: what was computed before a change is not published
    after it, even if it is changed back. Written by PageStore.set_epoch alone.
    """

    number: int
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Awaited:
    """Which pages of a plan are still on their way into host memory, bool[n], under which claim numbers there,
    uint32[n], and the transfers that bring them: the plan begins once these are done.
    """

    rows: Bools
    numbers: U32
    after: list[_core.Transfer]

    def of(self, rows: Bools) -> Awaited | None:
        """Return what of it concerns some rows of the plan; None: nothing."""
        if not self.rows[rows].any():
            return None
        return Awaited(self.rows[rows], self.numbers[rows], self.after)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Which pages of a load's plan others bring nearer: for each row the tier or 0, uint8[n], its slot and claim number
    there, uint32[n], and the transfers that bring them: the load begins once these are done.
    """

    tiers: U8
    slots: U32
    numbers: U32
    after: list[_core.Transfer]


@dataclass(slots=True, eq=False)
class Ahead:
    """A copy of pages into a tier that was begun ahead of who loads them. is_joined: a load waits for it.

    was_done: at the last account().
    """

    core: _core.Transfer
    tier: Tier
    pages: U32
    numbers: U32
    is_joined: bool = False
    was_done: bool = False


@dataclass(slots=True)
class _Staged:
    """A copy of neighbours' pages into host memory. was_done: at the last account()."""

    pages: U32
    core: _core.Transfer
    was_done: bool = False


class _Watched(msgspec.Struct, frozen=True):
    transfer: Transfer
    core: _core.Transfer
    is_load: bool
    epoch: int
    roles: U8  # of its plan
    others: int  # mask of the tiers that it reads beside: in whose directories, neighbours' files; or what came nearer
    after: list[_core.Transfer]  # that it waits for

    def touches(self, tier: Tier) -> bool:
        """Whether it reads or writes a tier's directory: by its plan, in place of a source that failed, or a
        neighbour's."""
        return bool((self.roles[:, tier] != UNUSED).any() or (self.others | self.core.asked) >> tier & 1)


class Copies:
    """What moves in a store, from the plan to the last page counted.

    Invariant: each claim of a plan is either the mover's, which commits or aborts it, or was returned.
    Threads: any.
    """

    def __init__(self, index: Index, room: Room, counters: Counters, epoch: Epoch, clock: Clock) -> None:
        self._index = index
        self._room = room
        self._counters = counters
        self.epoch = epoch
        self._clock = clock
        self._mover: _core.Mover | None = None
        self._tags = itertools.count(1)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._left: list[tuple[_core.Transfer, U8]] = []  # given up, not ended; the roles of their pages
        self._staged: list[_Staged] = []  # GUARDED_BY(_lock); those that may still be waited for
        self._ahead: list[Ahead] = []  # GUARDED_BY(_lock); those that a load may join
        self.observe: Callable[..., Transfer] = Transfer
        """Makes what callers see of a batch; `stepwell.testing.stepped` has one that works while it waits."""

    @property
    def mover(self) -> _core.Mover | None:
        """What carries plans out; None before attach() and after detach()."""
        return self._mover

    def attach(self, mover: _core.Mover) -> None:
        """Hand plans to this mover from now on."""
        self._mover = mover

    def detach(self) -> _core.Mover | None:
        """Refuse every plan from now on. Returns the mover."""
        mover, self._mover = self._mover, None
        return mover

    @property
    def is_poisoned(self) -> bool:
        """Whether an assertion of the core failed, or there is no mover: nothing is written any more."""
        return self._mover is None or bool(self._mover.poisoned)

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        batch: _core.ClaimBatch,
        source: PoolSlice,
        turn: int,
        taken: Taken,
        *,
        inbox: Inbox | None = None,
        deadline: float | None = None,
    ) -> Transfer | None:
        """Submit the pages that have a new claim, as `taken` has; None: refused, and every claim is returned.

        Where the epoch has turned since `turn` they are: their bytes are of weights that their claims may not be of.
        """
        plan = Plan(*batch.plan_save(source.slots))
        if plan.pages.size == 0:
            return self.ended(inbox)
        transfer = None
        if turn == self.epoch.turns:
            transfer = self.submit(
                plan,
                pool=source.pool,
                work_class=WorkClass.SAVE,
                unpin_pages=True,
                inbox=inbox,
                deadline=deadline,
                taken=taken,
            )
        if transfer is None:
            taken.give_back()
        return transfer

    # ---- loading ----------------------------------------------------------------------------------------------------

    def load(
        self,
        match: Match,
        into: PoolSlice,
        taken: Taken,
        *,
        layer_order: bool = False,
        deadline: float | None = None,
        inbox: Inbox | None = None,
    ) -> Transfer:
        """Submit a load of a match's pages into the caller's pool, one slot a page; disk pages also go back up.

        Those that are on their way up already, begun ahead, are not read again: the load waits for them, and reads what
        does not come where it was found.

        Args:
            taken: nothing is in it; an exception that leaves its block ends the load.

        Returns:
            Transfer; one that is done at once, with the reason on every page, where the load was refused.
        """
        if match.epoch != self.epoch.number:
            self._counters.missed("epoch", match.pages)
            return self.ended(inbox, _core.Status.cancelled, pages=match.pages)
        lease = match.lease_id()
        ids, tiers, slots, awaited = self.locate(match)
        plan = _plan_from(ids, tiers, slots)
        plan.roles[:, POOL_COLUMN] = SINK
        plan.slots[:, POOL_COLUMN] = into.slots
        joined = self._join(lease, ids, tiers, taken)
        cold = tiers == _DISK if joined is None else (tiers == _DISK) & (joined.tiers == 0)
        has_claims = self._claim_way_up(plan, lease, cold, taken)
        taken.retain(lease)
        transfer = self.submit(
            plan,
            pool=into.pool,
            work_class=WorkClass.LOAD,
            layer_order=layer_order,
            lease=lease,
            deadline=deadline,
            unpin_pages=has_claims,
            is_load=True,
            inbox=inbox,
            awaited=awaited,
            joined=joined,
            taken=taken,
        )
        if transfer is None:
            taken.give_back()
            reason = _core.Status.poisoned if self._index.poisoned() else _core.Status.queue_full
            self._counters.missed(STATUS_REASON[reason.value], ids.size)
            return self.ended(inbox, reason, pages=int(ids.size))
        if match.epoch != self.epoch.number:  # changed while we looked: set_epoch may not have seen this load
            transfer.revoke()
            transfer.cancel()
        return transfer

    # ---- pages of neighbours ----------------------------------------------------------------------------------------

    def stage(self, plan: Plan, run: _core.ForeignRun, rows: U32, taken: Taken) -> bool:
        """Start copying neighbours' pages into host memory: page i from place rows[i] of a run, claimed as `taken` has.

        Returns:
            False: refused (the queue is full, ...); every claim of the plan is returned.
        """
        transfer = self.submit(
            plan, pool=None, work_class=WorkClass.LOAD, unpin_pages=True, run=run, run_rows=rows, taken=taken
        )
        core = None if transfer is None else core_transfer(transfer)
        if core is None:
            taken.give_back()
            return False
        with self._lock:
            self._staged.append(_Staged(plan.pages, core))
        return True

    def are_staged(self, pages: U32) -> Bools:
        """Say which pages a copy from a neighbour brings, or has just brought."""
        with self._lock:
            staged = list(self._staged)
        found = np.zeros(pages.size, dtype=np.bool_)
        for each in staged:
            found |= np.isin(pages, each.pages)
        return found

    def locate(self, match: Match) -> tuple[U32, U8, U32, Awaited | None]:
        """Say where a match's pages are: ids, tiers, slots, and which of them are still to come from a neighbour."""
        if not self._room.has_staging or Tier.HOST not in match.tiers:
            return *match.locations(), None
        ids, tiers, slots, numbers, states = self._index.lease_states(match.lease_id())
        rows = (tiers == _HOST) & (states != _IN_PLACE[0]) & (states != _IN_PLACE[1])
        if not np.count_nonzero(rows):
            return ids, tiers, slots, None
        with self._lock:
            staged = list(self._staged)
        after = [each.core for each in staged if np.isin(each.pages, ids[rows]).any()]
        return ids, tiers, slots, Awaited(rows, numbers, after)

    def _join(self, lease: int, ids: U32, tiers: U8, taken: Taken) -> _Joined | None:
        """Find the disk pages of a lease that copies begun ahead bring nearer, and pin them where they come.

        Returns:
            None: there are none. Else the copies are dropped by nobody but who closes a tier, and `taken` has the pins.
        """
        usable = self._room.readable
        with self._lock:
            ahead = [each for each in self._ahead if usable >> each.tier & 1]
        if not ahead or not np.count_nonzero(tiers == _DISK):
            return None
        joined = _Joined(np.zeros_like(tiers), np.zeros_like(ids), np.zeros_like(ids), [])
        for tier in sorted({each.tier for each in ahead}):
            bringing = [each for each in ahead if each.tier is tier]
            pages = np.concatenate([each.pages for each in bringing])
            order = np.argsort(pages, kind="stable")
            rows = np.searchsorted(pages[order], ids, side="right") - 1  # of a page begun twice: the later one
            rows = order[np.maximum(rows, 0)]
            is_coming = (pages[rows] == ids) & (tiers == _DISK) & (joined.tiers == 0)
            if not np.count_nonzero(is_coming):
                continue
            numbers = np.concatenate([each.numbers for each in bringing])[rows]
            batch = self._index.pin_copies(lease, tier, np.where(is_coming, numbers, np.uint32(0)), taken)
            pinned = batch.outcomes[:, tier] != NONE
            joined.tiers[pinned] = tier
            joined.slots[pinned], joined.numbers[pinned] = batch.slots[pinned, tier], numbers[pinned]
            owners = np.repeat(np.arange(len(bringing)), [each.pages.size for each in bringing])[rows[pinned]]
            for each in (bringing[owner] for owner in np.unique(owners).tolist()):
                each.is_joined = True
                joined.after.append(each.core)
        return joined if joined.after else None

    def read_ahead(self, lease: int, target: Tier, most: int) -> tuple[list[Ahead], int]:
        """Start bringing up to `most` of a lease's disk pages into a tier, that no nearer one has or is getting.

        Returns:
            The transfers, and how many pages at most found no room. No transfer where the mover's queue has none.
        """
        begun: list[Ahead] = []
        left = most
        while left:
            wanted = part = min(left, _AHEAD_PAGES)
            for is_first in (True, False):
                each, lacking = self._begin_ahead(lease, target, wanted)
                if each is not None:
                    begun.append(each)
                    left -= each.pages.size
                    part -= each.pages.size
                if lacking and is_first:
                    self._room.make(target, lacking)
                    wanted = lacking
                else:
                    break
            if part:  # no more of the lease's pages, no room for them, or none in the queue
                return begun, left if lacking else 0
        return begun, 0

    def _begin_ahead(self, lease: int, target: Tier, most: int) -> tuple[Ahead | None, int]:
        """Start one transfer of a read-ahead. Returns it, or None, and how many of the pages found no room."""
        nearer = self._room.readable & tier_mask(Tier.HOST, Tier.SHARED)
        with Taken(self._index) as taken:
            batch = self._index.claim_copies(lease, Tier.DISK, target, most, into=taken, unless=nearer)
            plan = _copy_plan(batch, Tier.DISK, target)
            if plan.pages.size == 0:
                return None, batch.lacking
            transfer = self.submit(plan, pool=None, work_class=WorkClass.LOAD, unpin_pages=True, taken=taken)
            core = None if transfer is None else core_transfer(transfer)
            if core is None:
                return None, 0
            each = Ahead(core, target, plan.pages, plan.numbers[:, target].copy())
            with self._lock:
                self._ahead.append(each)
            return each, batch.lacking

    def write_used(self, match: Match) -> None:
        """Start writing a match's pages to disk that are in shared memory only: this is their second use.

        Nothing where disk writes are not selective. What finds no room in the mover's queue waits for its next use.
        """
        if self._room.seen is None or match.pages == 0 or not self._room.is_writable(Tier.DISK):
            return
        lease = match.lease_id()
        full_at = self._write_used(lease, _MOST_USED)
        if full_at != NOT_FULL:
            self._room.make(Tier.DISK, min(match.pages, _MOST_USED) - full_at, is_bound=True)
            self._write_used(lease, _MOST_USED - full_at)

    def _write_used(self, lease: int, most: int) -> int:
        """Start writing up to `most` pages of a lease. Returns how many were claimed when the disk was full."""
        with Taken(self._index) as taken:
            batch = self._index.claim_copies(lease, Tier.SHARED, Tier.DISK, most, into=taken)
            plan = _copy_plan(batch, Tier.SHARED, Tier.DISK)
            if plan.pages.size == 0:
                return int(batch.full_at)
            transfer = self.submit(plan, pool=None, work_class=WorkClass.DEMOTE, unpin_pages=True, taken=taken)
            if transfer is not None:
                self._counters.selected(plan.pages.size, 0)
            return int(batch.full_at)

    def _claim_way_up(self, plan: Plan, lease: int, open_rows: Bools, taken: Taken) -> bool:
        """Give pages of the plan a place in shared memory, or where that is full in host memory.

        Returns:
            Whether there are claims, in `taken`; each has pinned its page.
        """
        has_claims = False
        for target in (Tier.SHARED, Tier.HOST):
            pages = int(np.count_nonzero(open_rows))
            if pages == 0:
                break
            if not self._room.is_writable(target) or (target is Tier.HOST and self._room.stages_only):
                continue
            self._room.make(target, pages)
            batch = self._index.claim_leased(lease, target, open_rows, into=taken)
            new = batch.outcomes[:, target] == NEW
            _take_claims(plan, batch, target, new)
            has_claims |= bool(np.count_nonzero(new))
            open_rows = open_rows & (batch.outcomes[:, target] == FULL)
        return has_claims

    # ---- between the device and what is below -----------------------------------------------------------------------

    def plan_promotion(self, lease: int, ids: U32, tiers: U8, slots: U32, rows: Bools) -> tuple[Plan, Bools]:
        """Claim host slots for the chosen pages of a lease, and for those that come from disk a place in shared memory
        beside.

        Returns:
            The plan, SINK in the host column where a slot was had; a row of a page that is in host memory is its check.
            And which rows a quarantined copy in host memory bars from there.
        """
        plan = _plan_from(ids, tiers, slots)
        if not rows.any():
            return plan, np.zeros(ids.size, dtype=np.bool_)
        self._room.make(Tier.HOST, int(rows.sum()))
        batch = self._index.claim_leased(lease, Tier.HOST, rows)
        staged = batch.outcomes[:, Tier.HOST] == NEW
        barred = batch.outcomes[:, Tier.HOST] == REFUSED
        _take_claims(plan, batch, Tier.HOST, staged)
        cold = staged & (tiers == _DISK)
        if self._room.is_writable(Tier.SHARED) and cold.any():
            self._room.make(Tier.SHARED, int(cold.sum()))
            batch = self._index.claim_leased(lease, Tier.SHARED, cold)
            both = batch.outcomes[:, Tier.SHARED] == NEW
            _take_claims(plan, batch, Tier.SHARED, both)
            self._index.unpin_pages(ids[both])  # the host claim's pin holds them
        return plan, barred

    def submit_promotion(self, plan: Plan, lease: int, awaited: Awaited | None = None) -> Transfer | None:
        """Start a promotion into host memory, or the check of what is there. Host pins, one a claim, stay with the
        caller until the pages are on the device.

        Returns:
            None: no room in the queue; every claim of the plan was returned.
        """
        self._index.retain(lease)
        transfer = self.submit(plan, pool=None, work_class=WorkClass.LOAD, lease=lease, awaited=awaited)
        if transfer is None:
            self.abort_claims(plan)
            self._index.unpin_pages(plan.pages[plan.roles[:, Tier.HOST] == SINK])
            self._index.release(lease)
        return transfer

    def submit_demotion(self, plan: Plan, pool: LentPool) -> Transfer | None:
        """Start writing gathered pages through; None: no room in the queue now, nothing was returned."""
        return self.submit(plan, pool=pool, work_class=WorkClass.SAVE, unpin_pages=True)

    # ---- the mover --------------------------------------------------------------------------------------------------

    def submit(
        self,
        plan: Plan,
        *,
        pool: LentPool | None,
        work_class: WorkClass,
        layer_order: bool = False,
        lease: int = 0,
        deadline: float | None = None,
        unpin_pages: bool = False,
        is_load: bool = False,
        inbox: Inbox | None = None,
        run: _core.ForeignRun | None = None,
        run_rows: U32 | None = None,
        awaited: Awaited | None = None,
        joined: _Joined | None = None,
        taken: Taken | None = None,
    ) -> Transfer | None:
        """Hand a plan to the mover; its claims and, if `lease`, one reference of that are the mover's then.

        Args:
            taken: what has these, and nothing else, until then.

        Returns:
            None: refused (the queue or the inbox is full, the core is poisoned, the store is closing); all is still the
            caller's.
        """
        mover = self._mover
        if mover is None:
            return None
        tag, epoch = next(self._tags), self.epoch.number
        after: list[_core.Transfer] = []
        others = 0 if run is None else tier_mask(*map(Tier, np.unique(run.tiers()[run_rows]).tolist()))
        if awaited is not None:
            plan.numbers[awaited.rows, Tier.HOST] = awaited.numbers[awaited.rows]
            after += awaited.after
        if joined is not None:
            rows = np.flatnonzero(joined.tiers)
            plan.slots[rows, joined.tiers[rows]] = joined.slots[rows]
            plan.numbers[rows, joined.tiers[rows]] = joined.numbers[rows]
            after += joined.after
            others |= tier_mask(*map(Tier, np.unique(joined.tiers[rows]).tolist()))
        core = mover.submit(
            plan.pages,
            plan.roles,
            plan.slots,
            plan.numbers,
            pool=None if pool is None else core_pool(pool),
            layer_order=layer_order,
            work_class=int(work_class),
            unpin_pages=unpin_pages,
            lease=lease,
            tag=tag,
            keep_alive=None if pool is None else pool_owner(pool),
            inbox=core_inbox(inbox),
            run=run,
            rows=run_rows,
            after=after,
            awaited=None if awaited is None else awaited.rows.astype(np.uint8),
            nearer=None if joined is None else joined.tiers,
            taken=taken,
        )
        if not isinstance(core, _core.Transfer):
            return None
        at = None if deadline is None else self._clock.monotonic() + deadline
        transfer = self.observe(core, self._clock, pages=plan.pages.size, deadline_at=at)
        with self._lock:
            self._watched[tag] = _Watched(transfer, core, is_load, epoch, plan.roles, others, after)
        return transfer

    def ended(
        self, inbox: Inbox | None, reason: _core.Status = _core.Status.ok, *, pages: int = 0
    ) -> Transfer:
        """Return a transfer of which no page was to move, or none could, and tell the inbox.

        Its tag is 0 where that was not to be told, or has no room.
        """
        tag, told = next(self._tags), core_inbox(inbox)
        is_told = told is not None and told.post(tag, pages, reason.value)
        return EndedTransfer(reason, self._clock, pages=pages, tag=tag if is_told else 0)

    def abort_claims(self, plan: Plan) -> None:
        """Return the claims of a plan."""
        for tier in _CLAIMED_TIERS:
            rows = plan.roles[:, tier] == SINK
            if rows.any():
                self._index.abort_many(plan.pages[rows], tier, plan.numbers[rows, tier])

    # ---- watching ---------------------------------------------------------------------------------------------------

    def running(self) -> list[_core.Transfer]:
        """Return what was submitted and not yet accounted."""
        with self._lock:
            return [watched.core for watched in self._watched.values()]

    def wait(self, core: _core.Transfer, timeout: float | None) -> bool:
        """Wait until a transfer has ended, or was given up. False: not within `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not core.wait(_LOOK_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())):
            with self._lock:
                is_left = any(core is left for left, _ in self._left)
            if is_left:
                return True
            if until is not None and time.monotonic() >= until:
                return core.done
        return True

    def enforce_deadlines(self) -> None:
        """Cancel what has passed its deadline."""
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            each.transfer.enforce_deadline()

    def cancel_all(self) -> None:
        """Let running loads end as misses with no byte able to land any more, and drop queued saves."""
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            if each.is_load:
                each.transfer.revoke()
            each.transfer.cancel()

    def cancel_tier(self, tier: Tier) -> None:
        """Let what reads or writes a tier end: what of it has not started does not start."""
        touching = self._touching(tier)
        for each in touching:
            each.transfer.cancel()

    def give_up(self, tier: Tier) -> None:
        """Let what reads or writes a tier end now, whether or not its calls return: as I/O errors.

        So do copies from neighbours, and who waits for them: a neighbour's files lie beside the tier's own.
        """
        stuck = self._touching(tier)
        for each in stuck:
            each.core.abandon(_core.Status.io_error)
        with self._lock:
            gone = [self._watched.pop(each.core.tag) for each in stuck if each.core.tag in self._watched]
            self._left = [*self._left, *((each.core, each.roles) for each in gone)]
            left = {id(core) for core, _ in self._left}
            self._staged = [each for each in self._staged if id(each.core) not in left]
            self._ahead = [each for each in self._ahead if id(each.core) not in left]
        self._count(gone)

    def left_behind(self, tier: Tier) -> int:
        """Return how many pages may be arriving in a tier that nobody should wait for: given up, in a call that has not
        returned."""
        with self._lock:
            self._left = [(core, roles) for core, roles in self._left if not core.done]
            left = list(self._left)
        return sum(int(((roles[:, tier] == SINK) & (core.landed() >> tier & 1 == 0)).sum()) for core, roles in left)

    def _touching(self, tier: Tier) -> list[_Watched]:
        """Return what reads or writes a tier, and what waits for a neighbour's page from its directory, or for one that
        was given up."""
        with self._lock:
            watched = list(self._watched.values())
            before = {id(core) for core, _ in self._left}
        before.update(id(each.core) for each in watched if each.touches(tier))
        return [each for each in watched if each.touches(tier) or not before.isdisjoint(map(id, each.after))]

    def account(self) -> None:
        """Count what done transfers delivered and what they did not, once each, and forget them."""
        with self._lock:
            done = [tag for tag, watched in self._watched.items() if watched.core.done]
            finished = [self._watched.pop(tag) for tag in done]
            # One that has just ended may still be waited for by who saw it running.
            self._staged = [each for each in self._staged if not each.was_done]
            for each in self._staged:
                each.was_done = each.core.done
            self._ahead = [each for each in self._ahead if not each.was_done]
            for begun in self._ahead:
                begun.was_done = begun.core.done
        self._count(finished)

    def _count(self, finished: Iterable[_Watched]) -> None:
        for watched in finished:
            if not watched.is_load:
                continue
            status_of_pages = watched.core.page_status()
            self._counters.delivered(_sources(watched.roles[status_of_pages == _OK]))
            if not status_of_pages.any():  # 0 is ok: most loads, and np.unique takes its time
                continue
            statuses, counts = np.unique(status_of_pages, return_counts=True)
            for status, count in zip(statuses.tolist(), counts.tolist(), strict=True):
                reason = STATUS_REASON.get(status)
                if reason == "deadline" and watched.epoch != self.epoch.number:
                    reason = "epoch"
                if reason is not None:
                    self._counters.missed(reason, count)


def _sources(roles: U8) -> dict[Tier, int]:
    """Count pages of a plan by the tier that they are read from."""
    return {tier: pages for tier in _CLAIMED_TIERS if (pages := int(np.count_nonzero(roles[:, tier] == SOURCE)))}


def _plan_from(ids: U32, tiers: U8, slots: U32) -> Plan:
    return Plan(ids, *_core.plan_sources(tiers, slots))


def _copy_plan(batch: _core.ClaimBatch, source: Tier, target: Tier) -> Plan:
    """Plan the copies that Index.claim_copies() claimed."""
    rows = np.flatnonzero(batch.outcomes[:, target] == NEW)  # a page that is named twice is claimed once
    plan = Plan.empty(batch.pages[rows])
    plan.roles[:, source], plan.roles[:, target] = SOURCE, SINK
    plan.slots[:] = batch.slots[rows]
    plan.numbers[:] = batch.numbers[rows]
    return plan


def _take_claims(plan: Plan, batch: _core.ClaimBatch, tier: Tier, rows: Bools) -> None:
    plan.roles[rows, tier] = SINK
    plan.slots[rows, tier] = batch.slots[rows, tier]
    plan.numbers[rows, tier] = batch.numbers[rows, tier]


class EndedTransfer(Transfer):
    """What was not begun: done at once, no page arrived, and why."""

    __slots__ = ("_reason", "_tag")

    def __init__(self, reason: _core.Status, clock: Clock, *, pages: int, tag: int) -> None:
        super().__init__(None, clock, pages=pages)
        self._reason = reason
        self._tag = tag

    @property
    def tag(self) -> int:
        """The number under which an inbox reports it, or 0."""
        return self._tag

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """Per page why it did not arrive."""
        return np.full(self.pages, self._reason.value, dtype=np.uint8)
