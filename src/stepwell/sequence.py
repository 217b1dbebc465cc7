"""Own all that a running request holds on the device: cached pages, pages under way, private pages it computes into.

    open -> match -> [ready | loading | pending | missing] -> extend -> (engine computes) -> publish -> ... -> close
                        loading: shared, disk -> host slot -> scatter at the next step -> RESIDENT on the device

Everything here is bookkeeping on arrays, called by the engine's thread; bytes move on the mover's threads and in the device
pool's steps. Whatever is in flight, close and abort return everything exactly once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.errors import DeviceResetError, LeaseClosedError, StepwellUsageError
from stepwell.hashing import as_tokens, prefix_hashes
from stepwell.index import ClaimOutcome, Index, Tier, tier_mask
from stepwell.lease import Match
from stepwell.mover import POOL_COLUMN, SINK, SOURCE, Full, Plan, Transfer
from stepwell.pool import LentPool, lend_canonical
from stepwell.tiers.device import DevicePool, StepHandle
from stepwell.tiers.device_queue import GatherTicket, QueueFull, ScatterTicket, TicketState

_NEW = int(ClaimOutcome.NEW)
_PENDING = int(ClaimOutcome.PENDING)
_FULL = int(ClaimOutcome.FULL)

U32 = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]


class Decider(Protocol):
    """What sequences ask of the store, which alone decides what leaves and what moves."""

    def make_room(self, tier: Tier, pages: int) -> None:
        """Evict so that `pages` slots of a tier are free, as far as unpinned pages allow."""

    def full(self, tier: Tier, needed: int) -> Full:
        """Say with numbers that a tier is full."""

    def plan_promotion(self, lease: int, ids: U32, tiers: npt.NDArray[np.uint8], slots: U32, rows: Bools) -> Plan:
        """Claim host slots for the chosen pages of a lease; SINK in the host column where one was had."""

    def submit_promotion(self, plan: Plan, lease: int) -> Transfer | None:
        """Start a promotion; None: no room, every claim of the plan is returned."""

    def submit_demotion(self, plan: Plan, pool: LentPool) -> Transfer | None:
        """Start writing gathered pages through; None: no room now, nothing was returned."""

    def abort_claims(self, plan: Plan) -> None:
        """Return the claims of a plan."""

    def looked_up(self, match: Match, asked: int) -> None:
        """Count a lookup."""

    def write_through_mask(self) -> int:
        """Tiers to which published pages are written."""

    @property
    def epoch(self) -> int:
        """The epoch that pages are published under now."""


@dataclass(slots=True)
class _Promotion:
    """Pages of one sequence on their way to the device: claimed there and in host memory, copied, then scattered."""

    ids: U32
    device_slots: U32
    device_numbers: U32
    host_slots: U32
    host_pinned: Bools  # our host claim pinned the page once more
    transfer: Transfer | None
    core_landed: npt.NDArray[np.bool_] | None = None
    ticket: ScatterTicket | None = None


@dataclass(slots=True, eq=False)
class _Gather:
    """Pages that were published and are gathered to be written through."""

    ticket: GatherTicket
    plan: Plan


class Sequence:
    """All that one request holds on the device.

    Invariant: `block` names one device slot a page; pages below `ready` hold their tokens' KV, pinned or private to this sequence.
    Threads: the engine's. A context manager; close() is idempotent and returns everything once.
    """

    __slots__ = (
        "__weakref__",
        "_block",
        "_claims",
        "_closed",
        "_epoch",
        "_keys",
        "_lease",
        "_length",
        "_lost",
        "_name_space",
        "_owner",
        "_pending_pages",
        "_pinned",
        "_private",
        "_promotions",
        "_published",
        "_ready_pages",
        "_reused",
        "_seed",
        "_seen_pages",
        "_stalled",
        "_target_pages",
        "_tokens",
        "request_id",
    )  # fmt: skip

    def __init__(
        self, owner: Sequences, tokens: npt.NDArray[np.int32], name_space: int, seed: bytes | None, request_id: str | None
    ) -> None:
        self._owner = owner
        self._tokens = tokens.copy()
        self._length = tokens.size
        self._keys = prefix_hashes(tokens, page_tokens=owner.page_tokens, seed=seed)
        self._name_space = name_space
        self._seed = seed
        self._epoch = owner.decider.epoch
        self._block: list[int] = []
        self._lease: Match | None = None
        self._claims: dict[int, tuple[int, int]] = {}  # page -> (id, number): ARRIVING, computed by this sequence
        self._private: set[int] = set()  # pages whose slot has no key
        self._pinned: list[int] = []  # page ids pinned once each
        self._promotions: list[_Promotion] = []
        self._ready_pages = 0
        self._target_pages = 0
        self._pending_pages = 0
        self._published = 0
        self._reused: dict[Tier, int] = {}
        self._seen_pages = 0  # counted in _reused
        self._closed = False
        self._lost = False
        self._stalled = False
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
        return max(0, self._target_pages - self._ready_pages) * self._owner.page_tokens

    @property
    def pending(self) -> int:
        """Tokens behind those that another sequence is computing or loading: wait for them (promote()) or compute them."""
        return self._pending_pages * self._owner.page_tokens

    @property
    def missing(self) -> int:
        """Tokens that nobody has: this sequence's to compute."""
        return max(0, self._length - self.ready - self.loading - self.pending)

    @property
    def reused(self) -> dict[Tier, int]:
        """Tokens of the prefix by the tier in which open() or promote() found them."""
        return {tier: pages * self._owner.page_tokens for tier, pages in self._reused.items()}

    @property
    def lost(self) -> bool:
        """Whether a failed step took the device pool and this sequence's pages with it: resume() or close() it."""
        return self._lost

    @property
    def closed(self) -> bool:
        """Whether the sequence has ended."""
        return self._closed

    @property
    def stalled(self) -> bool:
        """Whether loading cannot go on: every device slot is pinned by running sequences. Suspend one, or compute()."""
        return self._stalled

    def promote(self) -> None:
        """Look again for pages that others have finished, and go on loading."""
        self._owner.promote(self)

    def compute(self) -> None:
        """Stop waiting: what is neither ready nor on its way becomes missing, this sequence's to compute."""
        self._owner.give_up_waiting(self)

    def suspend(self) -> None:
        """Give back everything on the device and keep the tokens: preemption. Published pages stay cached."""
        self._owner.suspend(self)

    def resume(self) -> None:
        """Open again after suspend(), or after the pool was lost, with all tokens so far."""
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

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id or ''} {self._length} tokens: {self.ready} ready, {self.loading} loading, "
            f"{self.pending} pending, {self.missing} missing>"
        )


@dataclass(frozen=True, slots=True)
class Extended:
    """Which sequences got the pages they asked for, bool[n]; if not all, why."""

    ok: Bools
    full: Full | None


class Sequences:
    """All sequences of a store, and the store's half of the device tier.

    Invariant: a device slot is free, or of a page, or private to one open sequence; each id in a sequence's `_pinned` is one page pin.
    Threads: the engine's thread calls; `sw-device` waits for gathers and hands them to the mover. `lock` guards the lists.
    """

    def __init__(self, decider: Decider, index: Index, pool: DevicePool, slab: _core.Slab, shape: _core.PageShape) -> None:
        self.decider = decider
        self.page_tokens = index.page_tokens
        self._index = index
        self._pool = pool
        self._slab = slab
        self._rows = slab.view()
        self._shape = shape
        self._open: set[Sequence] = set()
        self._orphans: list[_Promotion] = []  # of sequences that closed while loading
        self._moving = 0  # promotions under way, of all sequences
        self._lock = threading.RLock()
        self._gathers: queue.SimpleQueue[_Gather | None] = queue.SimpleQueue()
        self._unlanded: list[_Gather] = []  # GUARDED_BY(_landed)
        self._landed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._land_gathers, name="sw-device", daemon=True)
        self._thread.start()

    # ---- opening and loading ------------------------------------------------------------------------------------------

    def open(
        self, tokens: npt.NDArray[np.int32], name_space: int, seed: bytes | None, request_id: str | None
    ) -> Sequence:
        """Open a sequence; never waits."""
        sequence = Sequence(self, tokens, name_space, seed, request_id)
        with self._lock:
            self._open.add(sequence)
            self._look(sequence, first=True)
        return sequence

    def promote(self, sequence: Sequence) -> None:
        """Look again, and go on loading."""
        self._check(sequence)
        with self._lock:
            self._advance(sequence)
            if len(sequence._block) == sequence._ready_pages and not sequence._promotions:
                self._look(sequence, first=False)

    def give_up_waiting(self, sequence: Sequence) -> None:
        """Take what is not under way as missing."""
        self._check(sequence)
        with self._lock:
            sequence._pending_pages = 0
            if not sequence._promotions:
                sequence._target_pages = sequence._ready_pages
                sequence._stalled = False

    def _look(self, sequence: Sequence, *, first: bool) -> None:
        """Match the prefix in all tiers, take what the device has, start loading what it lacks.

        At least one token is left to compute: its logits are what the engine wants.
        """
        usable = sequence.tokens[: max(0, sequence._length - 1)]
        mask = tier_mask(*Tier)
        match = Match(self._index, self._index.match_and_pin(sequence._name_space, usable, mask), self.page_tokens)
        ids, tiers, slots = match.locations()
        on_device = tiers == Tier.DEVICE
        run = int(ids.size if on_device.all() else on_device.argmin())
        old, sequence._lease = sequence._lease, match
        if old is not None:
            old.close()
        self._unpin(sequence)
        if first:
            asked = sequence._length // self.page_tokens
            self.decider.looked_up(match, asked)
        if first:
            sequence._reused, sequence._seen_pages = {}, 0
        fresh = tiers[sequence._seen_pages :]
        for tier in Tier:
            found = int((fresh == tier).sum())
            if found:
                sequence._reused[tier] = sequence._reused.get(tier, 0) + found
        sequence._seen_pages = max(sequence._seen_pages, ids.size)
        sequence._block = slots[:run].astype(np.int64).tolist()
        sequence._ready_pages = sequence._published = run
        sequence._pending_pages = match.pending // self.page_tokens
        sequence._target_pages = ids.size
        sequence._stalled = run < ids.size and not self._load(sequence, ids, tiers, slots)

    def _load(self, sequence: Sequence, ids: U32, tiers: npt.NDArray[np.uint8], slots: U32) -> bool:
        """Start promoting the pages that are not on the device. False: nothing is under way, and nothing can be started."""
        assert sequence._lease is not None
        lease = sequence._lease.lease_id()
        wanted = tiers != Tier.DEVICE
        self.decider.make_room(Tier.DEVICE, int(wanted.sum()))
        batch = self._index.claim_leased(lease, Tier.DEVICE, wanted)
        outcome = batch.outcomes[:, Tier.DEVICE]
        new = outcome == _NEW
        if not new.any():
            return bool((outcome == _PENDING).any()) or self._moving > 0
        staged = new & (tiers == Tier.HOST)
        plan = self.decider.plan_promotion(lease, ids, tiers, slots, new & ~staged)
        copied = new & (plan.roles[:, Tier.HOST] == SINK)
        dropped = new & ~staged & ~copied
        if dropped.any():  # no staging slot for these now: another round takes them
            self._index.abort_many(ids[dropped], Tier.DEVICE, batch.numbers[dropped, Tier.DEVICE])
            self._index.unpin_pages(ids[dropped])
        if staged.any():
            self._start(sequence, ids, staged, batch, slots, None)
        if copied.any():
            part = Plan(
                np.ascontiguousarray(ids[copied]), plan.roles[copied], plan.slots[copied], plan.numbers[copied]
            )
            transfer = self.decider.submit_promotion(part, lease)
            if transfer is None:
                self._index.abort_many(ids[copied], Tier.DEVICE, batch.numbers[copied, Tier.DEVICE])
                self._index.unpin_pages(ids[copied])  # the device claim's pin
            else:
                self._start(sequence, ids, copied, batch, plan.slots[:, Tier.HOST], transfer)
        return bool(sequence._promotions) or self._moving > 0

    def _start(
        self,
        sequence: Sequence,
        ids: U32,
        rows: Bools,
        batch: _core.ClaimBatch,
        host_slots: U32,
        transfer: Transfer | None,
    ) -> None:
        count = int(rows.sum())
        sequence._promotions.append(
            _Promotion(
                ids=np.ascontiguousarray(ids[rows]),
                device_slots=batch.slots[rows, Tier.DEVICE],
                device_numbers=batch.numbers[rows, Tier.DEVICE],
                host_slots=host_slots[rows],
                host_pinned=np.full(count, transfer is not None),
                transfer=transfer,
            )
        )
        self._moving += 1

    def _advance(self, sequence: Sequence) -> None:
        """Move a sequence's promotions on; when all have landed, look again."""
        if not sequence._promotions:
            return
        still = [p for p in sequence._promotions if not self._advance_promotion(p)]
        finished = len(still) < len(sequence._promotions)
        sequence._promotions = still
        if finished and not still:
            self._look(sequence, first=False)

    def _advance_promotion(self, promotion: _Promotion) -> bool:
        """Take one promotion as far as it goes without waiting; True when it is over."""
        if promotion.ticket is None:
            if promotion.transfer is not None and not promotion.transfer.done:
                return False
            self._queue_scatter(promotion)
            if promotion.ticket is None:
                return promotion.ids.size == 0 and self._over()
        ticket = promotion.ticket
        if ticket.state is TicketState.QUEUED:
            return False
        if ticket.state is TicketState.FAILED:
            self._index.abort_many(promotion.ids, Tier.DEVICE, promotion.device_numbers)
        else:
            self._index.commit_many(promotion.ids, Tier.DEVICE, promotion.device_numbers)
        self._index.unpin_pages(promotion.ids)
        promotion.ids = promotion.ids[:0]
        return self._over()

    def _over(self) -> bool:
        self._moving -= 1
        return True

    def _queue_scatter(self, promotion: _Promotion) -> None:
        """Hand landed pages to the device pool; pages that did not land give their device slots back."""
        if promotion.transfer is not None:
            landed = promotion.transfer.landed(Tier.HOST)
            self._index.unpin_pages(promotion.ids[~landed & promotion.host_pinned])
            lost = promotion.ids[~landed]
            self._index.abort_many(lost, Tier.DEVICE, promotion.device_numbers[~landed])
            self._index.unpin_pages(lost)
            for name in ("ids", "device_slots", "device_numbers", "host_slots", "host_pinned"):
                setattr(promotion, name, getattr(promotion, name)[landed])
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
            return
        # The pool has copied the rows: the host slots may be used for other pages again.
        self._index.unpin_pages(promotion.ids[promotion.host_pinned])
        promotion.ticket = ticket

    # ---- computing ----------------------------------------------------------------------------------------------------

    def extend(self, sequences: Seq[Sequence], upto: Seq[int]) -> Extended:
        """Give each sequence device pages for its first `upto` tokens; all it lacks, or none."""
        ok = np.zeros(len(sequences), dtype=np.bool_)
        full: Full | None = None
        with self._lock:
            for number, (sequence, tokens) in enumerate(zip(sequences, upto, strict=True)):
                self._check(sequence)
                refused = self._extend(sequence, -(-tokens // self.page_tokens))
                ok[number] = refused is None
                full = full or refused
        return Extended(ok, full)

    def _extend(self, sequence: Sequence, pages: int) -> Full | None:
        first = len(sequence._block)
        lacking = pages - first
        if lacking <= 0:
            return None
        if sequence._promotions:
            raise StepwellUsageError(f"{sequence!r} is loading: wait until `loading` is 0, or close it")
        self.decider.make_room(Tier.DEVICE, lacking)
        known = min(pages, sequence._length // self.page_tokens)
        slots = [-1] * lacking
        claims: dict[int, tuple[int, int]] = {}
        if known > first and sequence._epoch == self.decider.epoch:
            batch = self._index.claim_absent(
                sequence._name_space, sequence.tokens, sequence._keys, first, known, tier_mask(Tier.DEVICE)
            )
            for row in np.flatnonzero(batch.outcomes[:, Tier.DEVICE] == _NEW).tolist():
                slots[row] = int(batch.slots[row, Tier.DEVICE])
                claims[first + row] = (int(batch.pages[row]), int(batch.numbers[row, Tier.DEVICE]))
        holes = [row for row, slot in enumerate(slots) if slot < 0]
        private = self._index.take_private(Tier.DEVICE, len(holes)) if holes else np.zeros(0, np.uint32)
        if private is None:
            if claims:
                ids = np.array([page for page, _ in claims.values()], dtype=np.uint32)
                numbers = np.array([number for _, number in claims.values()], dtype=np.uint32)
                self._index.abort_many(ids, Tier.DEVICE, numbers)
                self._index.unpin_pages(ids)
            return self.decider.full(Tier.DEVICE, lacking)
        for row, slot in zip(holes, private.tolist(), strict=True):
            slots[row] = slot
            sequence._private.add(first + row)
        sequence._claims.update(claims)
        sequence._pinned.extend(page for page, _ in claims.values())
        sequence._block.extend(slots)
        # What was neither ready nor under way is this sequence's to compute now.
        sequence._pending_pages = 0
        sequence._target_pages = sequence._ready_pages
        sequence._stalled = False
        return None

    def append(self, sequences: Seq[Sequence], tokens: npt.NDArray[np.integer]) -> None:
        """Add one generated token to each sequence."""
        given = as_tokens(tokens)
        if given.size != len(sequences):
            raise StepwellUsageError(f"{len(sequences)} sequences, {given.size} tokens")
        for sequence, token in zip(sequences, given.tolist(), strict=True):
            self._check(sequence)
            if sequence._length == sequence._tokens.size:
                grown = np.empty(max(64, 2 * sequence._tokens.size), dtype=np.int32)
                grown[: sequence._length] = sequence.tokens
                sequence._tokens = grown
            sequence._tokens[sequence._length] = token
            sequence._length += 1
            whole = sequence._length // self.page_tokens
            have = len(sequence._keys)
            if whole > have:
                prior = sequence._keys[-1].tobytes() if have else sequence._seed
                fresh = prefix_hashes(
                    sequence._tokens[have * self.page_tokens : whole * self.page_tokens],
                    page_tokens=self.page_tokens,
                    seed=prior,
                )
                sequence._keys = np.concatenate([sequence._keys, fresh])

    def publish(self, sequences: Seq[Sequence], computed: Seq[int]) -> tuple[int, int]:
        """Publish full pages whose computation was dispatched, and write them through."""
        published = duplicates = 0
        with self._lock:
            for sequence, tokens in zip(sequences, computed, strict=True):
                self._check(sequence)
                if tokens > len(sequence._block) * self.page_tokens or tokens > sequence._length:
                    raise StepwellUsageError(
                        f"{tokens} tokens computed, but {sequence!r} has {sequence._length} tokens and "
                        f"{len(sequence._block)} pages"
                    )
                new, double = self._publish(sequence, min(tokens, sequence._length) // self.page_tokens)
                published += new
                duplicates += double
        return published, duplicates

    def _publish(self, sequence: Sequence, upto: int) -> tuple[int, int]:
        first = sequence._published
        if upto <= first or sequence._epoch != self.decider.epoch:
            return 0, 0
        fresh: list[int] = []
        claimed = [page for page in range(first, upto) if page in sequence._claims]
        if claimed:
            ids = np.array([sequence._claims[page][0] for page in claimed], dtype=np.uint32)
            numbers = np.array([sequence._claims.pop(page)[1] for page in claimed], dtype=np.uint32)
            statuses = self._index.commit_many(ids, Tier.DEVICE, numbers)
            fresh += [page for page, status in zip(claimed, statuses.tolist(), strict=True) if status == 0]
        duplicates = 0
        for page in range(first, upto):
            if page not in sequence._private:
                continue
            outcome, page_id = self._index.publish_private(
                sequence._name_space, sequence.tokens, sequence._keys, page, Tier.DEVICE, sequence._block[page]
            )
            if outcome == _NEW:
                sequence._private.discard(page)
                sequence._pinned.append(page_id)
                fresh.append(page)
            else:
                duplicates += 1
        sequence._published = upto
        sequence._ready_pages = max(sequence._ready_pages, upto)
        sequence._target_pages = max(sequence._target_pages, sequence._ready_pages)
        self._write_through(sequence, sorted(fresh))
        return len(fresh), duplicates

    def _write_through(self, sequence: Sequence, pages: list[int]) -> None:
        """Gather what was published and write it to the tiers that outlive the device."""
        mask = self.decider.write_through_mask()
        if not pages or not mask:
            return
        first, last = pages[0], pages[-1] + 1
        for tier in Tier:
            if mask & (1 << tier):
                self.decider.make_room(tier, len(pages))
        batch = self._index.claim_absent(
            sequence._name_space, sequence.tokens, sequence._keys, first, last, mask
        )
        new = (batch.outcomes == _NEW)
        mine = np.zeros(last - first, dtype=np.bool_)
        mine[[page - first for page in pages]] = True
        plan_all = Plan(batch.pages, np.where(new, SINK, 0).astype(np.uint8), batch.slots, batch.numbers)
        rows = np.flatnonzero(new.any(axis=1))
        foreign = rows[~mine[rows]]  # pages another sequence published: it writes them through
        if foreign.size:
            self._return(plan_all, foreign)
        rows = rows[mine[rows]]
        if rows.size == 0:
            return
        slots = np.array([sequence._block[first + row] for row in rows.tolist()], dtype=np.int64)
        ticket = self._pool.queue_gather(slots, generation=self._pool.generation)
        if isinstance(ticket, QueueFull):
            self._return(plan_all, rows)
            return
        plan = Plan(batch.pages[rows], plan_all.roles[rows], batch.slots[rows], batch.numbers[rows])
        plan.roles[:, POOL_COLUMN] = SOURCE
        plan.slots[:, POOL_COLUMN] = np.arange(rows.size)
        gather = _Gather(ticket, plan)
        with self._landed:
            self._unlanded.append(gather)
        self._gathers.put(gather)

    def _return(self, plan: Plan, rows: npt.NDArray[np.intp]) -> None:
        part = Plan(plan.pages[rows], plan.roles[rows], plan.slots[rows], plan.numbers[rows])
        self.decider.abort_claims(part)
        self._index.unpin_pages(part.pages)

    def block_tables(self, sequences: Seq[Sequence], out: npt.NDArray[np.int32]) -> None:
        """Write each sequence's device slots into a row of `out: int32[n, m]`; the rest of a row is the scratch slot."""
        if out.ndim != 2 or out.shape[0] < len(sequences) or out.dtype != np.int32:
            raise StepwellUsageError(
                f"block tables: need int32[>= {len(sequences)}, m], got {out.dtype}{list(out.shape)}"
            )
        out[:] = self._pool.scratch_slot
        for row, sequence in enumerate(sequences):
            self._check(sequence)
            block = sequence._block
            if len(block) > out.shape[1]:
                raise StepwellUsageError(f"block tables: {len(block)} pages do not fit rows of {out.shape[1]}")
            out[row, : len(block)] = block

    # ---- the device's step ----------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[StepHandle]:
        """Lend the pool's arrays to one engine step; the store's half is done on entry."""
        self._collect()
        try:
            with self._pool.step() as handle:
                self._collect()
                yield handle
        finally:
            if self._pool.is_reset:
                self._reset()

    def drain(self) -> None:
        """Do the store's half without a step: for an idle engine, and before it decides what to compute."""
        self._collect()
        try:
            while True:
                done = self._pool.drain()
                if not done.scatters and not done.gathers:
                    break
        finally:
            if self._pool.is_reset:
                self._reset()
        self._collect()

    def _collect(self) -> None:
        """Move every promotion on."""
        with self._lock:
            self._orphans = [p for p in self._orphans if not self._advance_promotion(p)]
            for sequence in list(self._open):
                self._advance(sequence)

    def _reset(self) -> None:
        """Take the pool's loss into the books: device pages are gone, sequences are lost, slots come back once."""
        with self._lock:
            for sequence in list(self._open):
                self._give_back(sequence)
                sequence._lost = True
            self._collect()
            pages, slots, numbers = self._index.claim_victims(Tier.DEVICE, self._pool.pages)
            self._index.finish_many(pages, Tier.DEVICE, numbers)
            self._index.free_slots(Tier.DEVICE, slots)
            # Pages of gathers under way are still pinned: their content on the device is gone all the same.
            ids, slots = self._index.pin_resident(Tier.DEVICE, None, self._pool.pages)
            for page, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                self._index.quarantine(page, Tier.DEVICE, slot)
            self._index.unpin_pages(ids)

    # ---- ending -------------------------------------------------------------------------------------------------------

    def suspend(self, sequence: Sequence) -> None:
        """Give back the device's half, keep the tokens."""
        self._check(sequence)
        with self._lock:
            self._give_back(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Open again with all tokens so far."""
        if sequence._closed:
            raise LeaseClosedError(f"sequence {sequence.request_id or ''} was closed")
        with self._lock:
            self._give_back(sequence)
            sequence._lost = False
            sequence._epoch = self.decider.epoch
            self._open.add(sequence)
            self._look(sequence, first=True)

    def close(self, sequence: Sequence) -> None:
        """Return everything once."""
        with self._lock:
            if sequence._closed:
                return
            sequence._closed = True
            self._open.discard(sequence)
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._orphans += sequence._promotions
        sequence._promotions = []
        if sequence._claims:
            ids = np.array([page for page, _ in sequence._claims.values()], dtype=np.uint32)
            numbers = np.array([number for _, number in sequence._claims.values()], dtype=np.uint32)
            sequence._claims = {}
            self._index.abort_many(ids, Tier.DEVICE, numbers)
        if sequence._private:
            slots = np.array([sequence._block[page] for page in sorted(sequence._private)], dtype=np.uint32)
            sequence._private = set()
            self._index.free_private(Tier.DEVICE, slots)
        self._unpin(sequence)
        if sequence._lease is not None:
            sequence._lease.close()
            sequence._lease = None
        sequence._block = []
        sequence._ready_pages = sequence._target_pages = sequence._pending_pages = sequence._published = 0

    def _unpin(self, sequence: Sequence) -> None:
        if sequence._pinned:
            pinned, sequence._pinned = sequence._pinned, []
            self._index.unpin_pages(np.array(pinned, dtype=np.uint32))

    def _check(self, sequence: Sequence) -> None:
        if sequence._closed:
            raise LeaseClosedError(f"sequence {sequence.request_id or ''} was closed")
        if sequence._lost:
            raise DeviceResetError("the device pool was lost in a failed step; resume() or close() the sequence")

    def stop(self) -> None:
        """Close every sequence, fail queued gathers, end sw-device. Requires: the engine's thread."""
        with self._lock:
            for sequence in list(self._open):
                self.close(sequence)
        self._pool.close()
        self._stopping.set()
        self._gathers.put(None)
        self._thread.join()
        with self._lock:
            for promotion in self._orphans:
                if promotion.transfer is not None:
                    promotion.transfer.wait()
            self._orphans = [p for p in self._orphans if not self._advance_promotion(p)]

    def _land_gathers(self) -> None:
        """Wait for gathers in the order of their dispatch and hand them to the mover. The sw-device thread."""
        while True:
            gather = self._gathers.get()
            if gather is None:
                return
            self._land(gather)
            with self._landed:
                self._unlanded.remove(gather)
                self._landed.notify_all()

    def _land(self, gather: _Gather) -> None:
        """Wait for one gather and hand it to the mover; where it failed, return its claims."""
        try:
            views = gather.ticket.host_views()
        except DeviceResetError:
            gather.ticket.release()
            self.decider.abort_claims(gather.plan)
            self._index.unpin_pages(gather.plan.pages)
            return
        hold = _Hold(gather.ticket)
        first = 0
        for view in views:
            rows = slice(first, first + len(view))
            first += len(view)
            plan = Plan(
                gather.plan.pages[rows], gather.plan.roles[rows], gather.plan.slots[rows].copy(), gather.plan.numbers[rows]
            )
            plan.slots[:, POOL_COLUMN] = np.arange(len(view))
            self._submit_gather(plan, view, hold)

    def wait_landed(self, timeout: float | None) -> bool:
        """Wait until every gather that was dispatched is with the mover. Queued ones wait for the engine's next step or drain."""

        def is_landed() -> bool:
            return all(gather.ticket.state is TicketState.QUEUED for gather in self._unlanded)

        with self._landed:
            return self._landed.wait_for(is_landed, timeout)

    def _submit_gather(self, plan: Plan, view: npt.NDArray[np.uint8], hold: _Hold) -> None:
        pool = lend_canonical(self._shape, view, owner=(view, hold))
        while True:
            if self.decider.submit_demotion(plan, pool) is not None:
                return
            # The mover's queue is full: it empties without us. At close the pages are given up.
            if self._stopping.wait(0.005):
                self.decider.abort_claims(plan)
                self._index.unpin_pages(plan.pages)
                return


class ManagedDevice:
    """The device tier as the engine's thread sees it: a linear value, lent for one step at a time.

        with store.device.step() as pool:            # staged promotions are applied, gathers of published pages dispatched
            pool.arrays = engine_step(pool.arrays)    # the engine computes, and may donate; on exit the arrays are exchanged

    Invariant: outside a step nobody holds the arrays. Threads: the engine's, always the same one.
    """

    def __init__(self, sequences: Sequences, pool: DevicePool) -> None:
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

    def step(self) -> AbstractContextManager[StepHandle]:
        """Lend the arrays for one engine step: `handle.arrays`, [layers, pages + 1, page_tokens, kv_heads, head_dim] a stream.

        If the block raises, or leaves deleted or other arrays behind, the tier is reset: its pages are absent, open sequences are
        `lost`, and renew() gives it a new pool.

        Raises: StalePoolError, DeviceResetError, StepwellUsageError as `DevicePool.step`.
        """
        return self._sequences.step()

    def drain(self) -> None:
        """Do the store's half of a step alone: what has landed is put on the device, gathers are dispatched."""
        self._sequences.drain()

    def pool_for_testing(self) -> DevicePool:
        """Return the pool itself: for hooks of stepwell.testing, never for an engine."""
        return self._pool

    def warm(self) -> None:
        """Compile all shapes now, so that no step waits for a compiler."""
        self._pool.warm()

    def renew(self) -> None:
        """Replace the arrays of a pool that was reset by zeros; sequences may resume() then."""
        self._pool.renew()


class _Hold:
    """Release a gather's device memory when the last transfer that reads it has retired."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: GatherTicket) -> None:
        self._ticket = ticket

    def __del__(self) -> None:
        self._ticket.release()


__all__ = ["Extended", "ManagedDevice", "Sequence", "Sequences"]
