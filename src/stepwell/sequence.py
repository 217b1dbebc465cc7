"""Own all that a running request holds on the device: cached pages, pages under way, private pages it computes into.

    open -> match -> [ready | loading | pending | missing] -> extend -> (engine computes) -> publish -> ... -> close
                        loading: shared, disk -> host slot -> scatter at the next step -> RESIDENT on the device
                                 what is in host memory already is checked there first

    open(), resume() --> MATCHED --extend()--> COMPUTING    MATCHED looks again as pages land, COMPUTING never does: the
    MATCHED, COMPUTING --suspend()--> SUSPENDED             engine has written into its slots
    MATCHED, COMPUTING --a step failed--> LOST              SUSPENDED and LOST hold nothing: resume() or close()
    any --close(), abort()--> CLOSED

Everything here is bookkeeping on arrays, called by the engine's thread; bytes move on the mover's threads and in the
device pool's steps. Whatever is in flight, close and abort return everything exactly once.
"""

from __future__ import annotations

import collections
import logging
import operator
import queue
import threading
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import SystemClock, as_seconds
from stepwell.copies import Awaited, Copies
from stepwell.errors import DeviceResetError, LeaseClosedError, StepwellUsageError
from stepwell.hashing import as_tokens, prefix_hashes
from stepwell.index import ClaimOutcome, Index, Taken, Tier, tier_mask
from stepwell.lease import Match
from stepwell.mover import POOL_COLUMN, SINK, SOURCE, Full, Plan, Transfer
from stepwell.pool import lend_canonical
from stepwell.room import Room
from stepwell.staging import Staging
from stepwell.stats import Counters
from stepwell.tiers.device_pool import LinearPool, StepHandle
from stepwell.tiers.device_queue import GatherTicket, QueueFull, ScatterTicket, TicketState

if TYPE_CHECKING:
    from stepwell.tiers.device import Arrays, Handle

_LOG = logging.getLogger("stepwell")
_NEW: Final = int(ClaimOutcome.NEW)
_PENDING: Final = int(ClaimOutcome.PENDING)
_PRESENT: Final = int(ClaimOutcome.PRESENT)
_LOWER_TIERS: Final = (Tier.HOST, Tier.SHARED, Tier.DISK)
_RETRY_SECONDS: Final = 0.005
"""Seconds until a gather that the mover's queue had no room for is offered again, and between two looks at what gives
no sign when it ends: pages written through, transfers behind the oldest."""

_MOST_FAILURES: Final = 1
"""Promotions of one sequence that an exception may end: the pages are as good as before, so they are asked for again; a
process without memory would ask for ever."""
_STOP_SECONDS: Final = 10.0
"""What close() waits at most for the device to end what was dispatched."""

U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

# What a device slot is to the sequence that has it in its block.
_FOUND: Final = 0  # a cached page, pinned by the sequence's lease
_CLAIMED: Final = 1  # ARRIVING, computed by this sequence; pinned by its claim
_PUBLISHED: Final = 2  # RESIDENT, computed by this sequence; pinned once
_PRIVATE: Final = 3  # no page's
_PAGE: Final = np.dtype([("slot", np.int32), ("id", np.uint32), ("number", np.uint32), ("hold", np.uint8)])


class _State(Enum):
    """Where a sequence stands; drawn at the head of this file."""

    MATCHED = "matched"
    COMPUTING = "computing"
    SUSPENDED = "suspended"
    LOST = "lost"
    CLOSED = "closed"


@dataclass(slots=True)
class _Promotion:
    """Pages of one sequence on their way to the device: claimed there, copied into host memory or checked where they
    are in it, then scattered.

    transfer: that copies or checks; None when it is over. holds_host: our host claims pin each page once more.
    ticket: the scatter, once the device pool has copied the host rows.
    """

    ids: U32
    device_slots: U32
    device_numbers: U32
    host_slots: U32
    transfer: Transfer | None
    holds_host: bool
    ticket: ScatterTicket | None = None

    def keep(self, rows: Bools) -> None:
        """Go on with some of the pages."""
        self.ids, self.device_slots = self.ids[rows], self.device_slots[rows]
        self.device_numbers, self.host_slots = self.device_numbers[rows], self.host_slots[rows]


@dataclass(slots=True, eq=False)
class _Gather:
    """Pages that were published and are gathered to be written through."""

    ticket: GatherTicket
    plan: Plan


def _rows_of(plan: Plan, rows: slice) -> Plan:
    """Return some pages of a plan, with slots of its own."""
    return Plan(plan.pages[rows], plan.roles[rows], plan.slots[rows].copy(), plan.numbers[rows])


class Sequence:
    """All that one request holds on the device.

    Invariants: its block names one device slot a page, each pinned or private to this sequence; pages below `ready`
    hold their tokens' KV; ready + loading + pending + missing = tokens.
    Threads: the engine's. A context manager; close() is idempotent and returns everything once. One that is dropped is
    closed by the next step or drain.
    """

    __slots__ = (
        "__weakref__",
        "_epoch_turn",
        "_failures",
        "_found",
        "_key_count",
        "_key_rows",
        "_landed",
        "_lease",
        "_length",
        "_name_space",
        "_owner",
        "_page_count",
        "_page_rows",
        "_pending_pages",
        "_promotions",
        "_published",
        "_ready_pages",
        "_seed",
        "_stalled",
        "_state",
        "_target_pages",
        "_tokens",
        "_waits",
        "request_id",
    )

    def __init__(
        self,
        owner: Sequences,
        tokens: npt.NDArray[np.int32],
        name_space: int,
        seed: bytes | None,
        request_id: str | None,
    ) -> None:
        self._owner = owner
        self._tokens = tokens.copy()
        self._length = tokens.size
        self._key_rows = prefix_hashes(tokens, page_tokens=owner.page_tokens, seed=seed)
        self._key_count = len(self._key_rows)
        self._name_space = name_space
        self._seed = seed
        self._epoch_turn = owner.copies.epoch.turns
        self._state = _State.MATCHED
        self._page_rows: npt.NDArray[np.void] = np.empty(0, dtype=_PAGE)
        self._page_count = 0
        self._lease: Match | None = None
        self._promotions: list[_Promotion] = []
        self._landed: list[U32] = []  # pages that a promotion brought: pinned until the next look pins them by lease
        self._waits = True  # for pages that others bring, or that find no room yet
        self._stalled = False
        self._failures = 0  # promotions that an exception in a worker ended
        self._ready_pages = 0
        self._target_pages = 0
        self._pending_pages = 0
        self._published = 0  # pages that publish() is done with
        self._found: npt.NDArray[np.uint8] = np.empty(
            0, dtype=np.uint8
        )  # by page of the prefix: the tier where it was found
        self.request_id = request_id

    # ---- what the engine asks ---------------------------------------------------------------------------------------

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All tokens so far, int32[n]; a view."""
        return self._tokens[: self._length]

    @property
    def ready(self) -> int:
        """Leading tokens whose KV is on the device, usable by what is dispatched next."""
        return self._ready_pages * self._owner.page_tokens

    @property
    def loading(self) -> int:
        """Tokens behind `ready` that are on their way from a lower tier."""
        return (self._target_pages - self._ready_pages) * self._owner.page_tokens

    @property
    def pending(self) -> int:
        """Tokens behind those that another sequence is computing or loading: wait for them (promote()) or compute
        them."""
        return self._pending_pages * self._owner.page_tokens

    @property
    def missing(self) -> int:
        """Tokens that nobody has: this sequence's to compute."""
        return self._length - self.ready - self.loading - self.pending

    @property
    def reused(self) -> dict[Tier, int]:
        """Tokens of the prefix by the tier in which open() or promote() found them; once computing, only those that
        were had."""
        pages = np.bincount(self._found, minlength=len(Tier)) * self._owner.page_tokens
        return {tier: int(pages[tier]) for tier in Tier if pages[tier]}

    @property
    def lost(self) -> bool:
        """Whether a failed step took the device pool and this sequence's pages with it: resume() or close() it."""
        return self._state is _State.LOST

    @property
    def closed(self) -> bool:
        """Whether the sequence has ended."""
        return self._state is _State.CLOSED

    @property
    def settled(self) -> bool:
        """Whether nothing is loading or pending: what `ready` lacks is this sequence's to compute."""
        return not (self.loading or self.pending)

    @property
    def stalled(self) -> bool:
        """Whether loading cannot go on: every slot it could use is pinned by running sequences. Suspend one, or
        compute()."""
        return self._stalled

    def promote(self) -> None:
        """Look again for pages that others have finished, and go on loading. Nothing once this sequence computes.

        Raises: LeaseClosedError, DeviceResetError; StepwellUsageError while suspended.
        """
        self._owner.promote(self)

    def compute(self) -> None:
        """Stop waiting: what is neither ready nor on its way becomes missing, this sequence's to compute.

        Raises: as promote().
        """
        self._owner.give_up_waiting(self)

    def suspend(self) -> None:
        """Give back everything on the device and keep the tokens: preemption. Published pages stay cached.

        Raises: LeaseClosedError, DeviceResetError.
        """
        self._owner.suspend(self)

    def resume(self) -> None:
        """Open again after suspend(), or after the pool was lost, with all tokens so far.

        Raises: LeaseClosedError.
        """
        self._owner.resume(self)

    def abort(self) -> None:
        """End the request; unpublished pages are dropped. The same as close()."""
        self.close()

    def close(self) -> None:
        """Return everything. Idempotent."""
        self._owner.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A collection may come at any point of any thread: nothing is done here that takes a lock.
        if getattr(self, "_state", _State.CLOSED) is not _State.CLOSED:
            self._owner.dropped(self)

    def __repr__(self) -> str:
        return (
            f"<{self._name} {self._state.value}, {self._length} tokens: {self.ready} ready, "
            f"{self.loading} loading, {self.pending} pending, {self.missing} missing>"
        )

    @property
    def _name(self) -> str:
        """What messages call it."""
        return "Sequence" if self.request_id is None else f"Sequence {self.request_id}"

    # ---- arrays that grow --------------------------------------------------------------------------------------------

    @property
    def _block(self) -> npt.NDArray[np.void]:
        """Its device pages, one _PAGE a row; a view."""
        return self._page_rows[: self._page_count]

    @property
    def _keys(self) -> npt.NDArray[np.uint8]:
        """The prefix hashes of its full pages; a view."""
        return self._key_rows[: self._key_count]

    def _append_pages(self, rows: npt.NDArray[np.void]) -> None:
        self._page_rows = _with_room(self._page_rows, self._page_count, len(rows))
        self._page_rows[self._page_count : self._page_count + len(rows)] = rows
        self._page_count += len(rows)

    def _append_token(self, token: int) -> None:
        self._tokens = _with_room(self._tokens, self._length, 1)
        self._tokens[self._length] = token
        self._length += 1
        page_tokens, count = self._owner.page_tokens, self._key_count
        if self._length // page_tokens > count:
            prior = self._key_rows[count - 1].tobytes() if count else self._seed
            page = self._tokens[count * page_tokens : (count + 1) * page_tokens]
            self._key_rows = _with_room(self._key_rows, count, 1)
            self._key_rows[count] = prefix_hashes(page, page_tokens=page_tokens, seed=prior)[0]
            self._key_count += 1

    def _stop_waiting(self) -> None:
        """What is not ready is this sequence's to compute. Requires: no promotion runs."""
        self._pending_pages = 0
        self._target_pages = self._ready_pages
        self._stalled = False


def _with_room(array: npt.NDArray[Any], used: int, more: int) -> npt.NDArray[Any]:
    """Return an array that starts with the first `used` rows of this one and has room for `more` behind them."""
    if used + more <= len(array):
        return array
    grown = np.empty((max(64, 2 * used, used + more), *array.shape[1:]), dtype=array.dtype)
    grown[:used] = array[:used]
    return grown


def _as_counts(call: str, sequences: Seq[Sequence], counts: Seq[int]) -> list[int]:
    """Return token counts, one a sequence, as ints.

    Raises: StepwellUsageError where they are not whole numbers >= 0, or not as many as the sequences.
    """
    if len(counts) != len(sequences):
        raise StepwellUsageError(f"{call}: {len(sequences)} sequences, {len(counts)} token counts; give one for each")
    try:
        whole = [operator.index(count) for count in counts]
    except TypeError as cause:
        raise StepwellUsageError(f"{call}: token counts are whole numbers, got {list(counts)}") from cause
    if whole and min(whole) < 0:
        raise StepwellUsageError(f"{call}: a sequence has no {min(whole)} tokens; counts are from its first token on")
    return whole


def _timeout(given: float | None) -> float | None:
    seconds = None if given is None else as_seconds("timeout", given)
    if seconds is not None and seconds < 0:
        raise StepwellUsageError(f"timeout must be seconds >= 0 or None, got {seconds}")
    return seconds


@dataclass(frozen=True, slots=True)
class Extended:
    """Which sequences got the pages they asked for, bool[n]; if not all, why."""

    ok: Bools
    full: Full | None


class Sequences:
    """All sequences of a store, and the store's half of the device tier.

    Invariant: a device slot is free, or of a page, or private to one open sequence; each page pin is one row of one
    sequence's block, promotion or landed pages, or one queued or running gather's.
    Threads: the engine's thread calls; `sw-device` waits for gathers and hands them to the mover. `lock` guards
    sequences, and makes a publish and a change of the epoch come one after the other.
    """

    def __init__(
        self,
        index: Index,
        room: Room,
        copies: Copies,
        counters: Counters,
        pool: LinearPool[Any],
        slab: _core.Slab,
        shape: _core.PageShape,
        staging: Staging | None = None,
    ) -> None:
        self.page_tokens = index.page_tokens
        self.lock = threading.RLock()
        self._index = index
        self._room = room
        self.copies = copies
        self._staging = staging
        self._counters = counters
        self._pool = pool
        self._generation = pool.generation  # of the pool whose pages are in the books
        self._rows = slab.view()
        self._shape = shape
        self._is_mending = False  # pages of a lost pool were pinned; their slots come back when they no longer are
        # In the order of opening: the first gets room first. Weak, so that one that is dropped comes to `_dropped`.
        self._open: dict[int, weakref.ref[Sequence]] = {}
        self._dropped: collections.deque[Sequence] = collections.deque()
        self._gathers: queue.SimpleQueue[_Gather | None] = queue.SimpleQueue()
        self._unlanded: list[_Gather] = []  # GUARDED_BY(_landed)
        self._landed = threading.Condition()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- opening and loading -----------------------------------------------------------------------------------------

    def open(
        self, tokens: npt.NDArray[np.int32], name_space: int, seed: bytes | None, request_id: str | None
    ) -> Sequence:
        """Open a sequence; never waits."""
        sequence = Sequence(self, tokens, name_space, seed, request_id)
        with self.lock:
            self._open[id(sequence)] = weakref.ref(sequence)
            self._look(sequence, is_first=True)
            if sequence._lease is not None:
                self.copies.write_used(sequence._lease)
        return sequence

    def promote(self, sequence: Sequence) -> None:
        """Look again, and go on loading."""
        with self.lock:
            self._check(sequence)
            if sequence._state is _State.MATCHED and not self._advance(sequence) and not sequence._promotions:
                self._look(sequence)

    def give_up_waiting(self, sequence: Sequence) -> None:
        """Take what is not under way as missing."""
        with self.lock:
            self._check(sequence)
            sequence._waits = False
            sequence._pending_pages = 0
            if not sequence._promotions:
                sequence._stop_waiting()

    def wait(self, sequences: Seq[Sequence], timeout: float | None) -> list[Sequence]:
        """Do the store's half until one of some sequences is settled, nothing moves any more, or time is over."""
        timeout = _timeout(timeout)
        clock = SystemClock()
        until = None if timeout is None else clock.monotonic() + timeout
        while True:
            self.drain()
            with self.lock:
                # Before the look: what is seen moving here may have landed by then, and the look has missed it.
                was_moving = self._is_moving()
                for sequence in sequences:
                    self._check(sequence)
                    if not sequence.settled:
                        self.promote(sequence)
                settled = [sequence for sequence in sequences if sequence.settled]
                is_moving = (was_moving or self._is_moving()) and not self.copies.is_poisoned
                if settled or not sequences or not is_moving:
                    return settled
            left = _RETRY_SECONDS if until is None else min(_RETRY_SECONDS, until - clock.monotonic())
            if left <= 0:
                return []
            self._wait_a_moment(left)

    def _wait_a_moment(self, seconds: float) -> None:
        """Wait for the oldest transfer that a sequence waits for; where there is none, for a gather to land."""
        with self.lock:
            transfers = [p.transfer for s in self._each_open() for p in s._promotions if p.transfer is not None]
        if transfers:
            transfers[0].wait(seconds)
            return
        if self._thread is None:
            self.land()
            return
        with self._landed:
            self._landed.wait(seconds)

    def _look(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Match the prefix in all tiers, take what the device has, start loading what it lacks.

        At least one token is left to compute: its logits are what the engine wants.
        """
        if sequence._epoch_turn != self.copies.epoch.turns:
            # It goes on with what it holds; pages found now would be of other weights.
            self._unpin_landed(sequence)
            sequence._stop_waiting()
            return
        usable = sequence.tokens[: sequence._length - 1]
        everywhere = tier_mask(Tier.DEVICE) | self._room.readable
        with Taken(self._index) as taken:
            found = self._index.match_and_pin(sequence._name_space, usable, everywhere, into=taken)
            if self._staging is not None and sequence._waits:
                found = self._staging.extend(found, sequence._name_space, sequence._seed, usable, everywhere, taken)
            match = Match(self._index, found, self.page_tokens)
            taken.hand_on()
        ids, tiers, slots, awaited = self.copies.locate(match)
        on_device = tiers == Tier.DEVICE
        ready = int(ids.size if on_device.all() else on_device.argmin())
        old, sequence._lease = sequence._lease, match
        if old is not None:
            old.close()
        self._unpin_landed(sequence)
        if is_first:
            asked = usable.size // self.page_tokens
            self._counters.looked_up(asked, match.tiers, match.miss, match.pending // self.page_tokens)
        known = sequence._found[: 0 if is_first else ids.size]
        sequence._found = np.concatenate([known, tiers[known.size :]])
        rows = np.zeros(ready, dtype=_PAGE)  # _FOUND
        rows["slot"], rows["id"] = slots[:ready], ids[:ready]
        sequence._page_count = 0
        sequence._append_pages(rows)
        sequence._ready_pages = sequence._published = ready
        sequence._target_pages = ids.size
        sequence._pending_pages = match.pending // self.page_tokens
        sequence._stalled = False
        if not sequence._waits:
            sequence._stop_waiting()
        elif ready < ids.size:
            sequence._stalled = not self._load(sequence, ids, tiers, slots, awaited)

    def _load(
        self, sequence: Sequence, ids: U32, tiers: npt.NDArray[np.uint8], slots: U32, awaited: Awaited | None
    ) -> bool:
        """Start promoting the pages that are not on the device. False: nothing moves, and there is no slot to start
        with."""
        assert sequence._lease is not None
        lease = sequence._lease.lease_id()
        wanted = tiers != Tier.DEVICE
        # Before the claims too: what one of them finds pending may have landed by the time they are all made.
        was_moving = self._is_moving()
        self._room.make(Tier.DEVICE, int(wanted.sum()))
        batch = self._index.claim_leased(lease, Tier.DEVICE, wanted)
        outcome = batch.outcomes[:, Tier.DEVICE]
        new = outcome == _NEW
        staged = new & (tiers == Tier.HOST)
        plan, barred = self.copies.plan_promotion(lease, ids, tiers, slots, new & ~staged)
        copied = new & (plan.roles[:, Tier.HOST] == SINK)
        if barred.any():
            # Whoever pins the page keeps its damaged copy from being mended: not we. From there on, all is computed.
            past = np.arange(ids.size) >= barred.argmax()
            self._return(plan, np.flatnonzero(copied & past))
            wanted, staged, copied = wanted & ~past, staged & ~past, copied & ~past
        dropped = new & ~staged & ~copied  # no staging slot for these now: another round takes them
        self._abort_claimed(ids[dropped], batch.numbers[dropped, Tier.DEVICE])
        if barred.any():
            self._shorten(sequence, int(barred.argmax()))
            if not wanted.any():
                return True
        started = [
            self._start(sequence, lease, plan, rows, batch, awaited) for rows in (staged, copied) if rows.any()
        ]
        if not all(started):  # the mover's queue is full: the next look tries again
            return True
        return bool(sequence._promotions) or bool((outcome == _PENDING).any()) or was_moving or self._is_moving()

    def _shorten(self, sequence: Sequence, pages: int) -> None:
        """Have no more of what was found than so many pages; what is behind them is missing."""
        assert sequence._lease is not None
        self._index.shorten(sequence._lease.lease_id(), pages)
        sequence._found = sequence._found[:pages]
        sequence._target_pages = pages
        sequence._pending_pages = 0

    def _is_moving(self) -> bool:
        """Whether something is under way that will free slots."""
        return (
            self._is_mending
            or any(sequence._promotions for sequence in self._each_open())
            or any(self._index.counts(tier)["arriving"] > self.copies.left_behind(tier) for tier in _LOWER_TIERS)
        )

    def _start(
        self,
        sequence: Sequence,
        lease: int,
        plan: Plan,
        rows: Bools,
        batch: _core.ClaimBatch,
        awaited: Awaited | None,
    ) -> bool:
        """Start copying some rows of a plan, or checking them. False: no room for it, their claims are returned."""
        ids, numbers = np.ascontiguousarray(plan.pages[rows]), batch.numbers[rows, Tier.DEVICE]
        part = Plan(ids, plan.roles[rows], plan.slots[rows], plan.numbers[rows])
        transfer = self.copies.submit_promotion(part, lease, None if awaited is None else awaited.of(rows))
        if transfer is None:
            self._abort_claimed(ids, numbers)
            return False
        sequence._promotions.append(
            _Promotion(
                ids=ids,
                device_slots=batch.slots[rows, Tier.DEVICE],
                device_numbers=numbers,
                host_slots=part.slots[:, Tier.HOST],
                transfer=transfer,
                holds_host=bool((part.roles[:, Tier.HOST] == SINK).any()),
            )
        )
        return True

    def _advance(self, sequence: Sequence) -> bool:
        """Move a sequence's promotions on; when all are over, look again, and say so."""
        if not sequence._promotions:
            return False
        sequence._promotions = [p for p in sequence._promotions if not self._is_over(p, sequence)]
        if sequence._promotions:
            return False
        if sequence._lease is not None and self._index.counts(Tier.HOST)["quarantined"]:
            # A check may have found damage: mended, the slot can take the page from a lower tier at once.
            self._index.shorten(sequence._lease.lease_id(), sequence._ready_pages)
            self._room.mend(Tier.HOST)
        if sequence._failures > _MOST_FAILURES:
            sequence._waits = False
        self._look(sequence)
        return True

    def _is_over(self, promotion: _Promotion, sequence: Sequence) -> bool:
        """Take one promotion as far as it goes without waiting; True when it is over."""
        if promotion.ticket is None:
            if promotion.transfer is not None and not promotion.transfer.done:
                return False
            if promotion.transfer is not None:
                sequence._failures += bool((promotion.transfer.status == _core.Status.failed.value).any())
            self._queue_scatter(promotion)
        if promotion.ids.size == 0:
            return True
        if promotion.ticket is None or promotion.ticket.state is TicketState.QUEUED:
            return False
        if promotion.ticket.state is TicketState.DISPATCHED:
            self._index.commit_many(promotion.ids, Tier.DEVICE, promotion.device_numbers)
            sequence._landed.append(
                promotion.ids
            )  # with the pins of their claims, so that nobody takes them before the next look
        else:
            self._abort_claimed(promotion.ids, promotion.device_numbers)
        return True

    def _queue_scatter(self, promotion: _Promotion) -> None:
        """Hand landed pages to the device pool; pages that did not land, or are damaged, give their device slots
        back."""
        if promotion.transfer is not None:
            landed = promotion.transfer.landed(Tier.HOST)
            lost = promotion.ids[~landed]
            if promotion.holds_host:
                self._index.unpin_pages(lost)
            self._abort_claimed(lost, promotion.device_numbers[~landed])
            promotion.keep(landed)
            promotion.transfer = None
        if promotion.ids.size == 0:
            return
        ticket = self._pool.queue_scatter(
            promotion.device_slots.astype(np.int64),
            self._rows,
            rows=promotion.host_slots.astype(np.int64),
            generation=self._pool.generation,
        )
        if isinstance(ticket, QueueFull):
            return  # the next round offers them again
        promotion.ticket = ticket
        if promotion.holds_host:  # the pool has copied the rows: the host slots may be used for other pages again
            self._index.unpin_pages(promotion.ids)
            promotion.holds_host = False

    def _drop(self, promotion: _Promotion) -> None:
        """Give a promotion up. What is being copied lands in host memory and stays there as a cached page.

        A scatter that is half dispatched may be dropped: whoever gets its slots writes them later in the pool's order.
        """
        ticket = promotion.ticket
        if ticket is not None and ticket.state is TicketState.QUEUED:
            ticket.fail(DeviceResetError("the sequence that loaded these pages has ended"))
        if ticket is not None and ticket.state is TicketState.DISPATCHED:
            self._index.commit_many(promotion.ids, Tier.DEVICE, promotion.device_numbers)
            self._index.unpin_pages(promotion.ids)
        else:
            self._abort_claimed(promotion.ids, promotion.device_numbers)
        if promotion.holds_host:
            self._index.unpin_pages(promotion.ids)

    def _abort_claimed(self, ids: U32, numbers: U32) -> None:
        """Return claims on the device and the pins that came with them."""
        if ids.size:
            self._index.abort_many(ids, Tier.DEVICE, numbers)
            self._index.unpin_pages(ids)

    def _unpin_landed(self, sequence: Sequence) -> None:
        for ids in sequence._landed:
            self._index.unpin_pages(ids)
        sequence._landed = []

    # ---- computing ---------------------------------------------------------------------------------------------------

    def extend(self, sequences: Seq[Sequence], upto: Seq[int]) -> Extended:
        """Give each sequence device pages for its first `upto` tokens; all it lacks, or none."""
        ok = np.zeros(len(sequences), dtype=np.bool_)
        full: Full | None = None
        with self.lock:
            pages = [-(-tokens // self.page_tokens) for tokens in _as_counts("extend", sequences, upto)]
            for sequence, wanted in zip(sequences, pages, strict=True):
                self._check(sequence)
                if sequence._promotions and wanted > sequence._page_count:
                    raise StepwellUsageError(f"{sequence!r} is loading: device.wait() for it, or close it")
            for number, (sequence, wanted) in enumerate(zip(sequences, pages, strict=True)):
                refused = self._extend(sequence, wanted)
                ok[number] = refused is None
                full = full or refused
        return Extended(ok, full)

    def _extend(self, sequence: Sequence, pages: int) -> Full | None:
        first = sequence._page_count
        lacking = pages - first
        if lacking <= 0:
            return None
        self._room.make(Tier.DEVICE, lacking)
        rows = np.zeros(lacking, dtype=_PAGE)
        rows["hold"] = _PRIVATE
        known = min(pages, sequence._key_count)
        if known > first and sequence._epoch_turn == self.copies.epoch.turns:
            batch = self._index.claim_absent(
                sequence._name_space, sequence.tokens, sequence._keys, first, known, tier_mask(Tier.DEVICE)
            )
            new = np.flatnonzero(batch.outcomes[:, Tier.DEVICE] == _NEW)
            rows["hold"][new] = _CLAIMED
            rows["id"][new] = batch.pages[new]
            rows["slot"][new] = batch.slots[new, Tier.DEVICE]
            rows["number"][new] = batch.numbers[new, Tier.DEVICE]
        private = np.flatnonzero(rows["hold"] == _PRIVATE)
        if private.size:
            slots = self._index.take_private(Tier.DEVICE, private.size)
            if slots is None:
                claimed = rows[rows["hold"] == _CLAIMED]
                self._abort_claimed(claimed["id"].copy(), claimed["number"].copy())
                return self._room.full(Tier.DEVICE, lacking)
            rows["slot"][private] = slots
        if sequence._state is _State.MATCHED:
            self._begin_computing(sequence)
        sequence._append_pages(rows)
        return None

    def _begin_computing(self, sequence: Sequence) -> None:
        """From here on the sequence looks for nothing, and holds in lower tiers nothing."""
        sequence._state = _State.COMPUTING
        sequence._stop_waiting()
        sequence._found = sequence._found[: sequence._ready_pages]
        if sequence._lease is not None and sequence._lease.pages > sequence._ready_pages:
            self._index.shorten(sequence._lease.lease_id(), sequence._ready_pages)

    def append(self, sequences: Seq[Sequence], tokens: npt.NDArray[np.integer]) -> None:
        """Add one generated token to each sequence; to suspended ones too."""
        given = as_tokens(tokens)
        if given.size != len(sequences):
            raise StepwellUsageError(f"{len(sequences)} sequences, {given.size} tokens")
        with self.lock:
            for sequence in sequences:
                self._check_live(sequence)
            for sequence, token in zip(sequences, given.tolist(), strict=True):
                sequence._append_token(token)

    def publish(self, sequences: Seq[Sequence], computed: Seq[int]) -> tuple[int, int]:
        """Publish full pages whose computation was dispatched, and write them through."""
        published = duplicates = 0
        counts = _as_counts("publish", sequences, computed)
        with self.lock:
            for sequence, tokens in zip(sequences, counts, strict=True):
                self._check(sequence)
                if tokens > sequence._page_count * self.page_tokens or tokens > sequence._length:
                    raise StepwellUsageError(
                        f"{tokens} tokens computed, but {sequence!r} has {sequence._page_count} pages"
                    )
            for sequence, tokens in zip(sequences, counts, strict=True):
                new, double = self._publish(sequence, tokens // self.page_tokens)
                published += new
                duplicates += double
        return published, duplicates

    def _publish(self, sequence: Sequence, upto: int) -> tuple[int, int]:
        first = sequence._published
        if upto <= first:
            return 0, 0
        sequence._published = upto
        if sequence._state is _State.COMPUTING:
            sequence._ready_pages = sequence._target_pages = upto
        if sequence._epoch_turn != self.copies.epoch.turns:
            return 0, 0
        rows = sequence._block[first:upto]
        before = rows["hold"].copy()
        claimed = rows[before == _CLAIMED]
        if claimed.size:
            self._index.commit_many(claimed["id"].copy(), Tier.DEVICE, claimed["number"].copy())
            rows["hold"][before == _CLAIMED] = _PUBLISHED
        private = np.flatnonzero(before == _PRIVATE)
        if private.size:
            outcomes, ids = self._index.publish_private_many(
                sequence._name_space,
                sequence.tokens,
                sequence._keys,
                (first + private).astype(np.uint32),
                Tier.DEVICE,
                rows["slot"][private].astype(np.uint32),
            )
            won = private[outcomes == _NEW]
            rows["id"][won], rows["hold"][won] = ids[outcomes == _NEW], _PUBLISHED
        fresh = np.flatnonzero((rows["hold"] == _PUBLISHED) & (before != _PUBLISHED))
        self._write_through(sequence, first + fresh)
        return fresh.size, private.size - (fresh.size - claimed.size)

    def _write_through(self, sequence: Sequence, pages: npt.NDArray[np.intp]) -> None:
        """Gather what was published, page numbers ascending, and write it to the tiers that outlive the process, else
        to host memory."""
        mask = tier_mask(*self._room.write_through) if self._room.keeping else 0
        if not pages.size or not mask:
            return
        first, last = int(pages[0]), int(pages[-1]) + 1
        chosen = self._room.meant_for(sequence._keys[pages])
        for tier in _LOWER_TIERS:
            if mask & (1 << tier):
                self._room.make(tier, self._room.pages_for(tier, pages.size, chosen))
        meant = None
        if chosen is not None:
            meant = np.full(last - first, tier_mask(Tier.SHARED), dtype=np.uint8)
            meant[pages - first] = chosen
        batch = self._index.claim_absent(
            sequence._name_space, sequence.tokens, sequence._keys, first, last, mask, meant
        )
        self._room.count_meant(batch.outcomes, meant)
        new = batch.outcomes == _NEW
        claims = Plan(batch.pages, np.where(new, SINK, 0).astype(np.uint8), batch.slots, batch.numbers)
        is_new = new.any(axis=1)
        is_mine = np.zeros(last - first, dtype=np.bool_)
        is_mine[pages - first] = True
        self._return(
            claims, np.flatnonzero(is_new & ~is_mine)
        )  # published by another sequence, which writes them through
        rows = np.flatnonzero(is_new & is_mine)
        there = is_new | ((batch.outcomes == _PENDING) | (batch.outcomes == _PRESENT)).any(axis=1)
        refused = int((is_mine & ~there).sum())
        if rows.size and not self._gather(sequence, first + rows, claims, rows):
            refused += rows.size
            rows = rows[:0]
        self._counters.saved(rows.size, refused)

    def _gather(
        self, sequence: Sequence, pages: npt.NDArray[np.intp], claims: Plan, rows: npt.NDArray[np.intp]
    ) -> bool:
        """Queue a gather for some rows of claims; False: no room for it, the claims are returned."""
        ticket = self._pool.queue_gather(
            sequence._block["slot"][pages].astype(np.int64), generation=self._pool.generation
        )
        if isinstance(ticket, QueueFull):
            self._return(claims, rows)
            return False
        plan = Plan(claims.pages[rows], claims.roles[rows], claims.slots[rows], claims.numbers[rows])
        plan.roles[:, POOL_COLUMN] = SOURCE
        plan.slots[:, POOL_COLUMN] = np.arange(rows.size)
        gather = _Gather(ticket, plan)
        with self._landed:
            self._unlanded.append(gather)
        self._gathers.put(gather)
        return True

    def _return(self, plan: Plan, rows: npt.NDArray[np.intp]) -> None:
        if rows.size:
            self._give_up(Plan(plan.pages[rows], plan.roles[rows], plan.slots[rows], plan.numbers[rows]))

    def _give_up(self, plan: Plan) -> None:
        """Return claims in lower tiers and their pins."""
        self.copies.abort_claims(plan)
        self._index.unpin_pages(plan.pages)

    def block_tables(self, sequences: Seq[Sequence], out: npt.NDArray[np.int32]) -> None:
        """Write each sequence's device slots into a row of `out: int32[n, m]`; the rest of a row is the scratch
        slot."""
        if out.ndim != 2 or out.shape[0] < len(sequences) or out.dtype != np.int32:
            raise StepwellUsageError(
                f"block tables: need int32[>= {len(sequences)}, m], got {out.dtype}{list(out.shape)}"
            )
        for sequence in sequences:
            self._check(sequence)
            if sequence._page_count > out.shape[1]:
                raise StepwellUsageError(
                    f"block tables: {sequence._page_count} pages do not fit rows of {out.shape[1]}"
                )
        out[:] = self._pool.scratch_slot
        for row, sequence in enumerate(sequences):
            out[row, : sequence._page_count] = sequence._block["slot"]

    # ---- the device's step -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[StepHandle[Any]]:
        """Lend the pool's arrays to one engine step; the store's half is done on entry."""
        self._pool.check_owner()
        self._collect()
        try:
            with self._pool.step() as handle:
                self._collect()
                yield handle
        finally:
            self._notice_reset()

    def drain(self) -> None:
        """Do the store's half without a step: for an idle engine, and before it decides what to compute."""
        self._pool.check_owner()
        self._collect()
        try:
            self._pool.drain()
            while self._pool.stats().queued_chunks:
                self._pool.drain()
        finally:
            self._notice_reset()
        self._collect()

    def _collect(self) -> None:
        """Close what was dropped, and move every promotion on."""
        with self.lock:
            while self._dropped:
                self.close(self._dropped.popleft())
            self._is_mending = self._is_mending and self._room.mend(Tier.DEVICE)
            for sequence in self._each_open():
                self._advance(sequence)

    def _notice_reset(self) -> None:
        """Take the pool's loss into the books, once: device pages are gone, sequences are lost, slots come back."""
        with self.lock:
            if self._pool.generation == self._generation:
                return
            self._generation = self._pool.generation
            for sequence in self._each_open():
                if sequence._state is not _State.SUSPENDED:
                    self._give_back(sequence, _State.LOST)
            self._index.free_slots(Tier.DEVICE, self._index.take_victims(Tier.DEVICE, self._pool.pages))
            # Pages of gathers under way are still pinned: their content on the device is gone all the same.
            ids, slots = self._index.pin_resident(Tier.DEVICE, None, self._pool.pages)
            for page, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                self._index.quarantine(page, Tier.DEVICE, slot)
            self._index.unpin_pages(ids)
            self._is_mending |= bool(ids.size)

    # ---- ending ------------------------------------------------------------------------------------------------------

    def suspend(self, sequence: Sequence) -> None:
        """Give back the device's half, keep the tokens."""
        with self.lock:
            self._check_live(sequence)
            self._give_back(sequence, _State.SUSPENDED)

    def resume(self, sequence: Sequence) -> None:
        """Open again with all tokens so far."""
        with self.lock:
            if sequence._state is _State.CLOSED:
                raise LeaseClosedError(f"{sequence._name} was closed; open() another")
            self._give_back(sequence, _State.MATCHED)
            sequence._epoch_turn = self.copies.epoch.turns
            sequence._waits = True
            self._look(sequence, is_first=True)

    def _each_open(self) -> list[Sequence]:
        return [sequence for found in list(self._open.values()) if (sequence := found()) is not None]

    def dropped(self, sequence: Sequence) -> None:
        """Keep a sequence that nobody refers to any more until the next step or drain closes it. Threads: any; no lock.
        """
        self._dropped.append(sequence)

    def close(self, sequence: Sequence) -> None:
        """Return everything once."""
        with self.lock:
            if sequence._state is not _State.CLOSED:
                self._open.pop(id(sequence), None)
                self._give_back(sequence, _State.CLOSED)

    def _give_back(self, sequence: Sequence, state: _State) -> None:
        """Return all that a sequence holds, and leave it in another state."""
        sequence._state = state
        for promotion in sequence._promotions:
            self._drop(promotion)
        sequence._promotions = []
        self._unpin_landed(sequence)
        block = sequence._block
        claimed = block[block["hold"] == _CLAIMED]
        self._abort_claimed(claimed["id"].copy(), claimed["number"].copy())
        self._index.unpin_pages(block["id"][block["hold"] == _PUBLISHED])
        self._index.free_private(Tier.DEVICE, block["slot"][block["hold"] == _PRIVATE].astype(np.uint32))
        if sequence._lease is not None:
            sequence._lease.close()
            sequence._lease = None
        sequence._page_count = 0
        sequence._ready_pages = sequence._published = 0
        sequence._stop_waiting()

    def _check(self, sequence: Sequence) -> None:
        """Raise unless the sequence is open, here and now."""
        self._check_live(sequence)
        if sequence._state is _State.SUSPENDED:
            raise StepwellUsageError(f"{sequence!r}: resume() it first")

    def _check_live(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise StepwellUsageError(f"give the sequences that open() returned, not {type(sequence).__name__}")
        if sequence._owner is not self:
            raise StepwellUsageError(f"{sequence!r} is of another store")
        if sequence._state is _State.CLOSED:
            raise LeaseClosedError(f"{sequence._name} was closed; open() another")
        if sequence._state is _State.LOST:
            raise DeviceResetError("the device pool was lost in a failed step; resume() or close() the sequence")

    def close_pool(self) -> None:
        """Fail queued scatters and gathers, and refuse steps from now on.

        Raises: StepwellUsageError inside a step; nothing is changed then.
        """
        self._pool.close()

    def stop(self) -> None:
        """Close every sequence and end sw-device; gathers that were dispatched are with the mover then. Requires:
        close_pool()."""
        with self.lock:
            for sequence in self._each_open():
                self.close(sequence)
        self._stopping.set()
        self._gathers.put(None)
        if self._thread is None:
            self._land_gathers()
        else:
            self._thread.join(_STOP_SECONDS)  # it may wait for a device that does not answer

    # ---- landing gathers: the sw-device thread -----------------------------------------------------------------------

    def begin_landing(self) -> None:
        """Have gathers landed from now on, by a thread, sw-device. Without it: by land() alone, and at stop()."""
        self._thread = threading.Thread(target=self._land_gathers, name="sw-device", daemon=True)
        self._thread.start()

    def land(self) -> bool:
        """Hand the oldest gather to the mover, here and now, if it was dispatched; the device may be waited for.

        Returns: whether there was one. Requires: begin_landing() was not called.
        """
        with self._landed:
            if not self._unlanded or self._unlanded[0].ticket.state is TicketState.QUEUED:
                return False
        return self._land_next()

    def _land_gathers(self) -> None:
        """Wait for gathers in the order of their dispatch and hand them to the mover. The sw-device thread."""
        while self._land_next():
            pass

    def _land_next(self) -> bool:
        """Wait for the next gather and hand it to the mover. False: none will come."""
        gather = self._gathers.get()
        if gather is None:
            return False
        self._land(gather)
        with self._landed:
            self._unlanded.remove(gather)
            self._landed.notify_all()
        return True

    def _land(self, gather: _Gather) -> None:
        """Wait for one gather and hand it to the mover; where it failed, return its claims.

        Whatever is raised costs the pages that the mover has not got, and neither the thread nor the gathers after it.
        """
        try:
            views = gather.ticket.host_views()
        except Exception as error:  # noqa: BLE001 lost, or JAX could not bring the result to the host, or worse
            self._note_failed_gather(error)
            gather.ticket.release()
            self._give_up(gather.plan)
            return
        hold = _Hold(gather.ticket)
        first = 0
        try:
            for view in views:
                plan = _rows_of(gather.plan, slice(first, first + len(view)))
                plan.slots[:, POOL_COLUMN] = np.arange(len(view))
                self._submit_gather(plan, view, hold)
                first += len(view)
        except Exception as error:  # noqa: BLE001 no memory, most likely
            self._note_failed_gather(error)
            self._give_up(_rows_of(gather.plan, slice(first, None)))

    def _note_failed_gather(self, error: Exception) -> None:
        if not isinstance(error, (DeviceResetError, RuntimeError, MemoryError)):
            _LOG.warning("pages that were published are not written through: %r", error)

    def wait_landed(self, timeout: float | None) -> bool:
        """Wait until every gather that was dispatched is with the mover. Queued ones wait for the engine's next step or
        drain."""

        def is_landed() -> bool:
            return all(gather.ticket.state is TicketState.QUEUED for gather in self._unlanded)

        if self._thread is None:
            while self.land():
                pass
            return True
        with self._landed:
            return self._landed.wait_for(is_landed, timeout)

    def _submit_gather(self, plan: Plan, view: npt.NDArray[np.uint8], hold: _Hold) -> None:
        pool = lend_canonical(self._shape, view, owner=(view, hold))
        while self.copies.submit_demotion(plan, pool) is None:
            # The mover's queue is full: it empties without us. At close, and where it never will, the pages are given
            # up; so they are without a thread of our own, since who has none may be the one who steps the mover.
            if self.copies.is_poisoned or self._thread is None or self._stopping.wait(_RETRY_SECONDS):
                self._give_up(plan)
                return


class ManagedDevice:
    """The device tier as the engine's thread sees it: a linear value, lent for one step at a time.

        with store.device.step() as pool:            # applies staged promotions, gathers published pages
            pool.arrays = engine_step(pool.arrays)    # the engine computes; on exit the arrays are exchanged

    Invariant: outside a step nobody holds the arrays. Threads: the engine's, always the same one.
    """

    def __init__(self, sequences: Sequences, pool: LinearPool[Any]) -> None:
        self._sequences = sequences
        self._pool = pool

    @property
    def pages(self) -> int:
        """Slots of the pool; the arrays have one more, the scratch slot."""
        return self._pool.pages

    @property
    def scratch_slot(self) -> int:
        """The hidden slot that an engine's masked writes may go to."""
        return self._pool.scratch_slot

    @property
    def is_reset(self) -> bool:
        """Whether a failed step took the arrays, and renew() is due."""
        return self._pool.is_reset

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each array of `handle.arrays`, in order; DeviceTier.axes says what they are."""
        return self._pool.shapes

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the arrays keep: the geometry's dtype, or, on CPU, an unsigned integer as wide as a narrow float."""
        return self._pool.storage_dtype

    def step(self) -> AbstractContextManager[Handle]:
        """Lend the arrays for one engine step: `handle.arrays`, a tuple of arrays of `shapes` and `dtype`.

        If the block raises, or leaves a deleted array or one of another kind behind, the tier is reset: its pages are
        absent, open sequences are `lost`, and renew() gives it a new pool.

        Raises: StalePoolError, DeviceResetError, StepwellUsageError as `LinearPool.step`.
        """
        return self._sequences.step()

    def drain(self) -> None:
        """Do the store's half of a step alone: what has landed is put on the device, gathers are dispatched."""
        self._sequences.drain()

    def wait(self, sequences: Seq[Sequence], timeout: float | None = None) -> list[Sequence]:
        """Do the store's half until one of these sequences is settled: for an engine that has nothing to compute.

        Args:
            timeout: seconds, None for no limit.

        Returns:
            Those that are settled, in the order given. None of them: time is over, or nothing moves that would help,
            so waiting longer is in vain: each is `stalled`, or pending on what another sequence has yet to compute.
            Compute that, suspend() one, or compute() one.

        Raises: as drain(); as promote() for a sequence that is suspended, lost or closed; StepwellUsageError.
        Threads: the engine's. Cost: sleeps until a transfer ends, for 5 ms at most at a time.
        """
        return self._sequences.wait(list(sequences), timeout)

    def pool_for_testing(self) -> LinearPool[Any]:
        """Return the pool itself: for hooks of stepwell.testing, never for an engine."""
        return self._pool

    def warm(self) -> None:
        """Compile all shapes now, so that no step waits for a compiler."""
        self._pool.warm()

    def renew(self, arrays: Arrays | None = None) -> None:
        """Replace the arrays of a pool that was reset by the engine's own, of `shapes` and `dtype`, or by zeros;
        sequences may resume() then.

        Raises: StepwellUsageError where the pool is not reset, GeometryError where the arrays do not fit, BudgetError
        where the device has no memory for zeros; the pool stays reset then.
        """
        self._pool.renew(arrays)


class _Hold:
    """Release a gather's device memory when the last transfer that reads it has retired."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: GatherTicket) -> None:
        self._ticket = ticket

    def __del__(self) -> None:
        self._ticket.release()


__all__ = ["Extended", "ManagedDevice", "Sequence", "Sequences"]
