"""Decide: what is saved where, what is loaded from where. What leaves is room.py's, what is copied copies.py's.

    save   tokens -> prefix hashes -> claims -> plan -> mover         match  tokens -> tree, then hashes -> pinned spans
    load   pinned spans -> claims (disk pages go back to shared) -> plan -> mover -> the caller's pool

Python decides on batches, C++ works on arrays; the GIL is released in every call that copies, hashes, walks or waits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import Clock, SystemClock, as_seconds
from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig, parse_size
from stepwell.copies import NEW, PENDING, PRESENT, Copies, Epoch
from stepwell.errors import (
    ForkedError,
    GeometryError,
    PoisonedError,
    StepwellError,
    StepwellUsageError,
    StoreClosedError,
    VolumeBusyError,
)
from stepwell.hashing import MAX_KEY_BYTES, Keys, Namespace, Tokens, as_keys, as_tokens, epoch_number, hash_chain
from stepwell.health import LOG_SECONDS, Calls, Health
from stepwell.index import NO_TIER, Index, Residency, Taken, Tier, tier_mask
from stepwell.keeper import INTERVAL, LIVELY_INTERVAL, Keepers
from stepwell.lease import Match
from stepwell.mover import (
    SOURCE,
    STATUS_REASON,
    Inbox,
    Plan,
    SaveOutcome,
    SaveResult,
    Transfer,
    WorkClass,
)
from stepwell.pins import Pinned, Pins
from stepwell.pool import LentPool, PoolArray, PoolPointers, PoolSlice, lend
from stepwell.probes import ProbeLeases
from stepwell.rates import UNIT_BYTES, Flow, Rates, Within, as_within, foreign_lanes
from stepwell.room import Room
from stepwell.rounds import LEFT_BEHIND, Leaving, Round
from stepwell.seen import Seen
from stepwell.staging import Staging
from stepwell.stats import Counters, NeighbourStats, Stats, TierStats, Tree
from stepwell.tiers.base import PageTier
from stepwell.tiers.directory import Machine
from stepwell.tiers.disk import DiskVolumes
from stepwell.tiers.host import HostSlab
from stepwell.tiers.limits import MemoryLimits
from stepwell.tiers.neighbours import Neighbours
from stepwell.tiers.shared import SharedVolumes
from stepwell.tiers.volume_tier import VolumeTier

if TYPE_CHECKING:
    from stepwell.sequence import Extended, ManagedDevice, Sequence, Sequences
    from stepwell.tiers.device_pool import LinearPool

Order = Literal["page", "layer"]

KIND_KV: Final = 1
_STORED: Final = int(SaveOutcome.STORED)
_REFUSED: Final = int(SaveOutcome.REFUSED)
_VERIFY_PAGES: Final = 64
_GROWTH_SECONDS: Final = 2.0
"""What a save waits at most for memory that was not taken yet: rather that than evict, or refuse, beside free capacity.
Measured: 64 MiB of tmpfs are taken in 20 ms."""
_POISONED: Final = (
    "an assertion of the core failed ({}): the store serves misses only. Close it, open another one, and report this"
)
_LOG = logging.getLogger("stepwell")
_LOOK_AGAIN_SECONDS: Final = 0.05
_ROUND_SECONDS: Final = 10.0
"""What close() waits at most for background rounds, and then for the tiers to be let go of."""
_LET_GO_SECONDS: Final = 2.0
"""What it waits for the other tiers where one's background round has not returned."""
_DAMAGED: Final = [status for status, reason in STATUS_REASON.items() if reason == "corrupt"]
_NEIGHBOURS: Final = "neighbours"
_FIRST_LOOK_SECONDS: Final = 0.2
"""For so long the constructor reads what neighbours have; what is left then is the keeper's."""
_MOST_FOREIGN: Final = 1 << 18
"""Neighbours' pages that are kept in mind, at about 100 bytes each where there are so many."""
_RECORDS_AHEAD: Final = 8192
"""Page records that the keeper keeps ready: a long new prompt should not pay for the first touch of their memory."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How many leading keys are cached, and in which tier each of them is.

    run: keys. tiers: uint8[run] of Tier. slow: keys behind these that are cached, and not offered: they would not be
    here in time.
    """

    run: int
    tiers: npt.NDArray[np.uint8]
    slow: int = 0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a pass over a tier's pages found: pages read, and of these damaged (now quarantined)."""

    pages: int
    damaged: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """What reopening a tier came to, in pages: capacity now; recovered and usable; damaged or duplicate, freed."""

    tier: Tier
    capacity: int
    pages: int
    freed: int


class PageStore:
    """Keep pages of KV cache in tiers, and find them by prefix.

    Invariants: those of README, "How it works". A lookup returns right bytes or a miss; what is pinned stays; per tier
    free + arriving + resident + leaving + quarantined = capacity.

    Threads: any, all calls. Not usable in a forked child (ForkedError): use spawn.
    Asyncio: match, save and load do not wait; `await` the transfer that save and load return. What waits says so, and
    goes through a thread: `await asyncio.to_thread(store.flush)`; opening a store too. See docs/async.md.
    A context manager: close() finishes or cancels what runs, within config.close_timeout.

    Raises (constructor): StepwellUsageError, BudgetError, VolumeError, VolumeBusyError, TierIOError; then nothing is
    left behind.
    """

    def __init__(self, config: StoreConfig, *, clock: Clock | None = None) -> None:
        self._keeper: Keepers | None = None  # last to come: with it the store is open
        if not isinstance(config, StoreConfig):
            raise StepwellUsageError(f"config: give a StoreConfig, not {type(config).__name__}")
        self._config = config.checked()
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._pid = os.getpid()
        self._closed = False
        self._rounds: dict[Tier, Round] = {}
        self._lock = threading.Lock()
        self._closing = threading.RLock()  # a signal handler may close what is being closed
        geometry = config.geometry
        self._page_tokens = geometry.page_tokens
        self._fingerprint = geometry.fingerprint()
        self._shape = _core.PageShape(list(geometry.layer_bytes), self._fingerprint)
        self._epoch = Epoch(epoch_number(config.epoch))
        self._turning = threading.Lock()  # one change of the epoch at a time
        self._index = Index(geometry.page_tokens)
        self._index.set_epoch(self._epoch.number)
        self._counters = Counters()
        self._namespaces: dict[bytes | None, int] = {}
        _core.guard_install()
        self._tiers: dict[Tier, PageTier] = {}
        self._health = Health(self._clock, _directories(config))
        self._room = room = Room(self._index, self._tiers, self._counters, health=self._health, clock=self._clock)
        self._has_said_poison = False
        self._failed_jobs = 0
        self._said_failure_at = float("-inf")
        pinnable = config.pin_fraction
        self._pins = Pins(self._index, self._clock, lambda: room.pinnable(pinnable), self._page_tokens)
        self._copies = Copies(self._index, self._room, self._counters, self._epoch, self._clock)
        flow = weakref.WeakMethod(self._flow)  # a store that is dropped ends at once, and its threads with it
        self._rates = Rates(
            self._clock,
            lambda: ask() if (ask := flow()) is not None else Flow.nothing(),
            page_bytes=geometry.page_bytes,
            workers=(config.copy_threads, config.io_threads),
        )
        self._probes = ProbeLeases(
            self._index, self._room, self._copies, self._clock, queue_units=config.queue_units
        )
        end_for = weakref.WeakMethod(self._probes.end_for)
        room.end_probes = lambda tier: (end := end_for()) is not None and end(tier)
        self._sequences: Sequences | None = None
        self._device: ManagedDevice | None = None
        self._slab: HostSlab | None = None  # the host tier, or what is to be one once a neighbour is there
        self._foreign: _core.Foreign | None = None
        self._neighbours: Neighbours | None = None
        self._staging: Staging | None = None
        try:
            self._open_tiers()
            self._index.set_keeping(tier_mask(*self._room.keeping))
            foreign = self._open_neighbours()
            self._copies.attach(
                _core.Mover(
                    self._index,
                    self._shape,
                    host=None if self._slab is None else self._slab.medium,
                    shared=self._room.medium(Tier.SHARED),
                    disk=self._room.medium(Tier.DISK),
                    **self._workers(),
                    queue_units=config.queue_units,
                    unit_bytes=UNIT_BYTES,
                    foreign=foreign,
                )
            )
            self._open_device()
            marks = (config.low_watermark, config.high_watermark)
            self._rounds = {tier: Round(tier, self._room, self._clock, marks) for tier in self._tiers}
            rounds = {tier.name.lower(): self._rounds[tier].run for tier in _directories(config)}
            if self._neighbours is not None:
                rounds[_NEIGHBOURS] = self._look_at_neighbours
            self._probes.end_due()  # it has looked at the tiers then
            self._keeper = Keepers(self._tick_store, rounds, used=Tier.SHARED.name.lower())
            self._room.keeper = self._keeper
            self._look_once()
            self._begin_rounds(self._keeper)
        except BaseException:
            self._shut(0.0)
            raise
        _OPEN_STORES.add(self)

    def __repr__(self) -> str:
        if self._keeper is None:
            return "<PageStore: not open>"
        name = f"PageStore {self._config.geometry.model} {self._config.geometry.revision}"
        if os.getpid() != self._pid:
            return f"<{name}: of another process>"
        if self._closed:
            return f"<{name}: closed>"
        counts = {tier: self._index.counts(tier) for tier in self._room.all_tiers}
        tiers = ", ".join(f"{tier.name.lower()} {n['resident']}/{n['capacity']}" for tier, n in counts.items())
        return f"<{name}: pages in {tiers}{', poisoned' if self._index.poisoned() else ''}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store cannot be sent to another process: send its config and open it there")

    # ---- memory lent by the caller --------------------------------------------------------------------------------

    def lend(
        self, source: PoolArray | Seq[PoolArray] | PoolPointers, *, axes: str | None = None
    ) -> LentPool:
        """Describe a pool of the caller's for save and load; see `stepwell.pool.lend`. Nothing is copied."""
        self._use()
        return lend(self._config.geometry, self._shape, source, axes=axes)

    # ---- simple calls -----------------------------------------------------------------------------------------------

    def save(
        self,
        tokens: Tokens,
        *,
        source: PoolSlice,
        namespace: Namespace | None = None,
        inbox: Inbox | None = None,
    ) -> SaveResult:
        """Keep the pages of some tokens: write them through to every tier that outlives the process.

        Args:
            tokens: int32[n] (other integers are converted). Only whole pages are saved; the tail stays the caller's.
            source: where the pages are now, one slot a whole page, in order.
            namespace: adapter, salt: pages of different namespaces never match each other.
            inbox: gets the completion, of the saved pages; one that is full refuses them, and gets none
                (`transfer.tag` is 0).

        Returns:
            SaveResult. Pages that are here already, or that another caller is bringing, are not copied again. Never
            waits for bytes; for memory that a tier has not taken yet, up to two seconds, and for room on a disk that
            hangs up to ten. `source` may be overwritten once `result.transfer.source_released`. The transfer is done
            when each page is resident in every tier that this save writes it to; with selective disk writes that is
            shared memory alone for a page that was not saved before.

        Raises:
            TokenError, GeometryError, StepwellUsageError: tokens, source or inbox do not fit; nothing was changed.

        Cost: hashing 4-8 ns a token, one walk; the copies happen on the mover's threads.
        """
        self._use()
        turn = self._epoch.turns
        checked = as_tokens(tokens)
        pages = checked.size // self._page_tokens
        self._check_slice("source", source)
        _check_inbox(inbox)
        if len(source) != pages:
            raise GeometryError(
                f"{checked.size} tokens are {pages} whole pages of {self._page_tokens} tokens, "
                f"the source names {len(source)} slots"
            )
        if pages == 0:
            return SaveResult(0, 0, 0, 0, self._copies.ended(inbox))
        name_space, seed = self._namespace(namespace)
        keys = hash_chain(checked, page_tokens=self._page_tokens, seed=seed)
        targets = self._room.write_through
        if not targets:
            return self._refuse_save(name_space, checked, pages, inbox)
        mask = tier_mask(*targets)
        with Taken(self._index) as taken:
            # Touch and pin what is here of this chain, so that making room for its tail does not take its head. A match
            # pins each page in one tier alone: each tier that is to make room gets one of its own, and the chain, where
            # its pages lie in one and the other, one more.
            with Taken(self._index) as head:
                if len(targets) > 1:
                    self._index.match_and_pin(name_space, checked, mask, into=head)
                known = {
                    tier: self._index.match_and_pin(name_space, checked, tier_mask(tier), into=head) for tier in targets
                }
                in_shared = known.get(Tier.SHARED)
                meant = self._room.meant_for(keys, 0 if in_shared is None else in_shared.pages + in_shared.pending)
                for tier, here in known.items():
                    wanted = self._room.pages_for(tier, pages, meant) - here.pages
                    self._room.make(tier, wanted, patience=_GROWTH_SECONDS)
                batch = self._index.claim_absent(name_space, checked, keys, 0, pages, mask, meant, into=taken)
            full = None
            looked_at = min(pages, batch.full_at)
            self._room.count_meant(batch.outcomes[:looked_at], meant)
            saved, present, pending = batch.tally(looked_at)
            refused = pages - looked_at
            transfer = self._copies.save(batch, source, turn, taken, inbox=inbox)
            if transfer is None:
                refused, saved = refused + saved, 0
                transfer = self._copies.ended(inbox)
            for tier in targets:
                lacking = refused + batch.full_rows(tier, looked_at)
                if full is None and lacking and not self._index.poisoned():
                    full = self._room.full(tier, lacking)
            self._counters.saved(saved, refused)
            self._count_skipped(targets, saved)
            return SaveResult(saved, present, pending, refused, transfer, full)

    def _refuse_save(
        self, name_space: int, tokens: npt.NDArray[np.int32], pages: int, inbox: Inbox | None
    ) -> SaveResult:
        """Say what a save comes to while no tier can be written to."""
        here, _ = self._index.match_length(name_space, tokens, self._room.readable)
        refused = pages - here
        self._counters.saved(0, refused)
        self._count_skipped((), refused)
        full = self._room.full(self._room.keeping[0], refused) if refused else None
        return SaveResult(0, here, 0, refused, self._copies.ended(inbox), full)

    def _count_skipped(self, targets: tuple[Tier, ...], pages: int) -> None:
        if pages and len(targets) < len(self._room.keeping):
            self._counters.skipped([tier for tier in self._room.keeping if tier not in targets], pages)

    def match(self, tokens: Tokens, *, namespace: Namespace | None = None) -> Match:
        """Find the longest cached prefix of some tokens and pin it.

        Args:
            tokens: int32[n]; whole pages count.
            namespace: as in save.

        Returns:
            Match, a lease: close it (or leave its `with` block) when the pages have been loaded. An empty match is a
            miss. Never waits: a plain `with` is right in an asyncio loop too.

        Raises:
            TokenError: tokens of a wrong dtype or range.

        Cost: about 1 us for 1k tokens, 20 us for 128k where the tree knows them; hashing for those past the tree's end.
        """
        self._use()
        checked = as_tokens(tokens)
        name_space, seed = self._namespace(namespace)
        usable = self._room.readable
        with Taken(self._index) as taken:
            result = self._index.match_and_pin(name_space, checked, usable, into=taken)
            if self._staging is not None:
                result = self._staging.extend(result, name_space, seed, checked, usable, taken)
            match = Match(self._index, result, self._page_tokens)
            asked = checked.size // self._page_tokens
            self._counters.looked_up(asked, match.tiers, match.miss, result.pending)
            self._copies.write_used(match)
            taken.hand_on()  # the match's own from here on; where we do not come to here, it finds its lease ended
            return match

    def cached(self, tokens: Tokens, *, tiers: Collection[Tier], namespace: Namespace | None = None) -> int:
        """Say how many leading tokens some tiers hold now, the device too: for a scheduler, or to look.

        Nothing is pinned, touched or counted, so that a moment later it may be otherwise.

        Args:
            tokens, namespace: as in match.
            tiers: each page is in at least one of them; a tier that this store has not holds nothing.

        Returns: tokens of whole pages.

        Raises:
            TokenError: tokens of a wrong dtype or range.
            StepwellUsageError: what is no Tier.

        Cost: as match.
        """
        self._use()
        for tier in tiers:
            if not isinstance(tier, Tier):
                raise StepwellUsageError(f"tiers: {tier!r} is no Tier; give e.g. (Tier.DEVICE, Tier.HOST)")
        checked = as_tokens(tokens)
        name_space, _ = self._namespace(namespace)
        pages, _ = self._index.match_length(name_space, checked, tier_mask(*tiers))
        return int(pages) * self._page_tokens

    def load(
        self,
        match: Match,
        *,
        into: PoolSlice,
        order: Order = "page",
        deadline: float | None = None,
        inbox: Inbox | None = None,
    ) -> Transfer:
        """Copy a match's pages into the caller's pool, each layer verified as it lands.

        Args:
            match: open; it may be closed as soon as this returns (the transfer holds pins of its own).
            into: one slot a page, in order; the pool must be writable.
            order: "page": page by page; "layer": all pages of layer 0, then of layer 1, ...: watch `layers_done`.
            deadline: seconds from now. When it has passed, wait() returns with no byte able to land any more; pages
                that had not landed are misses.
            inbox: gets the completion; one that is full refuses the load (every page is queue_full) and gets none
                (`transfer.tag` is 0).

        Returns:
            Transfer; `ok_pages` is the usable prefix. Pages found on disk also go back to shared memory on the way.

        Raises:
            LeaseClosedError, GeometryError, StepwellUsageError: nothing was started.
        """
        self._use()
        deadline = _seconds("deadline", deadline)
        _check_inbox(inbox)
        if order not in ("page", "layer"):
            raise StepwellUsageError(f"order: {order!r} is neither 'page' nor 'layer'")
        self._check_target(into)
        if not match.is_of(self._index):
            raise StepwellUsageError("the match is of another store")
        match.lease_id()  # raises where it has ended
        if len(into) != match.pages:
            raise GeometryError(f"the match has {match.pages} pages, the target names {len(into)} slots")
        if match.pages == 0:
            return self._copies.ended(inbox)
        with Taken(self._index) as taken:
            return self._copies.load(
                match, into, taken, layer_order=order == "layer", deadline=deadline, inbox=inbox
            )

    # ---- keys (an engine's own hashes) -------------------------------------------------------------------------------

    def probe(
        self,
        keys: Keys,
        *,
        kind: int = KIND_KV,
        lease: float = 1.0,
        readahead: bool = True,
        within: Within | float | None = None,
    ) -> Probe:
        """Say how many leading keys are cached, and hold them for a while.

        Args:
            keys: uint8[n, k] with k <= 64, or bytes of one length. kind: the kind byte.
            lease: seconds for which the pages found stay where they are, so that a load_keys that follows finds them.
                By key: asked for again, a page stays until the later end, as one that is asked for last; a load_keys
                that delivers it, whoever asked, ends that. It also ends before its time where a tier needs the room and
                has nothing else to give, where probes keep more than a quarter of a tier or 262,144 pages (what was
                asked for longest ago first, of one run the last page first), and with the epoch.
            readahead: start bringing pages that are only on disk into shared memory (or host memory) at once: up to an
                eighth of it at a time, and what the mover's queue has room for. What was not begun when no lease keeps
                them any more is dropped.
            within: what loading may take, in seconds or as Within: the run ends where that would take longer, behind
                what is under way already and as fast as the tiers have been lately. What is cut off is a miss: nothing
                of it is held, or read ahead.

        Returns:
            Probe(run, tiers, slow).
        """
        self._use()
        checked = as_keys(keys)
        _check_kind(kind)
        lease = as_seconds("lease", lease)
        bound = None if within is None else as_within(within)
        match, slow = self._match_in_time(checked, kind, is_staging=readahead, within=bound)
        with match:
            _, tiers, _ = match.locations()
            pending = match.pending // self._page_tokens
            self._counters.looked_up(len(checked), match.tiers, match.miss, pending, slow=slow)
            self._copies.write_used(match)
            self._probes.keep(match, lease)
            if readahead:
                self._probes.read_ahead(match, is_leased=lease > 0)
            return Probe(match.pages, tiers, slow)

    def _match_keys(self, keys: npt.NDArray[np.uint8], kind: int, *, is_staging: bool) -> Match:
        """Find the leading keys that are cached and pin them. is_staging: also those that a neighbour has."""
        return self._match_in_time(keys, kind, is_staging=is_staging, within=None)[0]

    def _match_in_time(
        self, keys: npt.NDArray[np.uint8], kind: int, *, is_staging: bool, within: Within | None
    ) -> tuple[Match, int]:
        """Find and pin as _match_keys() does, but only what would be loaded within a bound.

        Returns: the match, and how many pages behind it would not be.
        """
        usable, slow = self._room.readable, 0
        with Taken(self._index) as taken:
            result = found = self._index.match_keys_and_pin(keys, kind, usable, into=taken)
            if within is not None and found.pages:
                offered = self._rates.cut_spans([(tier, pages) for _, pages, tier in found.spans], within)
                slow = found.pages - offered
                result = self._index.shorten_match(found, offered)

            def in_time(run: _core.ForeignRun) -> int:
                nonlocal slow
                if within is None:
                    return run.pages
                offered = self._rates.cut(foreign_lanes(run.tiers(), run.offered()), within, first=found.pages)
                slow = run.pages - offered
                return offered

            if self._staging is not None and is_staging and slow == 0:
                result = self._staging.extend_keys(result, keys, kind, usable, taken, most=in_time)
            match = Match(self._index, result, self._page_tokens)
            taken.hand_on()
            return match, slow

    def load_keys(
        self, keys: Keys, *, into: PoolSlice, kind: int = KIND_KV, deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Load the pages of some keys, each on its own: a missing one does not end the rest. Waits.

        In an asyncio loop: `await asyncio.to_thread(store.load_keys, keys, into=...)`. A task cancelled there leaves
        the thread at work, and `into` in use, until the call is over: give it a deadline.

        Args:
            keys: as in probe; those that come, or are found damaged, are kept for no probe any longer.
            into: one slot a key.
            deadline: seconds; when it has passed the call returns and no byte can land any more.

        Returns:
            ok: bool[n]; where False the slot's bytes are undefined.
        """
        self._use()
        checked = as_keys(keys)
        _check_kind(kind)
        self._check_target(into)
        if len(into) != len(checked):
            raise GeometryError(f"{len(checked)} keys, the target names {len(into)} slots")
        deadline = _seconds("deadline", deadline)
        ok = np.zeros(len(checked), dtype=np.bool_)
        spent = np.zeros(len(checked), dtype=np.bool_)
        limit = None if deadline is None else self._clock.monotonic() + deadline
        running: list[tuple[int, Transfer]] = []
        at = 0
        with Taken(self._index) as taken:  # by ctrl-C, for one, it ends all loads: the memory is the caller's again
            while at < len(checked):
                with self._match_keys(checked[at:], kind, is_staging=True) as match:
                    self._copies.write_used(match)
                    if match.pages:
                        left = None if limit is None else self._left(limit)
                        target = into[at : at + match.pages]
                        running.append((at, self._copies.load(match, target, taken, deadline=left)))
                at += match.pages
                # More than staging holds: what is in it has to land first.
                if match.pages and self._staging is not None and self._staging.offers(checked[at : at + 1], kind):
                    for _, transfer in running:
                        transfer.wait()
                    continue
                at += 1
            for first, transfer in running:
                transfer.wait()
                ok[first : first + transfer.pages] = transfer.ok
                # A page that was found bad is nobody's hope any more, and held it could not be mended.
                spent[first : first + transfer.pages] = transfer.ok | np.isin(transfer.status, _DAMAGED)
        self._probes.spend(checked, kind, spent)
        return ok

    def save_keys(
        self,
        keys: Keys,
        *,
        source: PoolSlice,
        parent: bytes | None = None,
        first_of_chain: bool = False,
        kind: int = KIND_KV,
        deadline: float | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Keep pages under an engine's own keys. Waits until they are resident, or the deadline.

        Also for those that another call has begun to write.

        In an asyncio loop: asyncio.to_thread, as load_keys.

        Args:
            keys: as in probe; consecutive keys are taken as a chain (each the parent of the next).
            source: one slot a key. parent: key before the first one, if known; first_of_chain: there is none.
            deadline: seconds. A tier that is expected to take longer is left out, as is any that loads wait for: what
                no tier takes is refused at once.

        Returns:
            uint8[n] of SaveOutcome: stored, present, refused; pending: another call is bringing it, and had not when
            this one returned.
        """
        self._use()
        turn = self._epoch.turns
        checked = as_keys(keys)
        _check_kind(kind)
        deadline = _seconds("deadline", deadline)
        self._check_slice("source", source)
        if len(source) != len(checked):
            raise GeometryError(f"{len(checked)} keys, the source names {len(source)} slots")
        if parent is not None and first_of_chain:
            raise StepwellUsageError("a page that has a parent is not the first of its chain")
        if parent is not None and not 1 <= len(parent) <= MAX_KEY_BYTES:
            raise StepwellUsageError(f"parent has {len(parent)} bytes: a key has 1 to {MAX_KEY_BYTES}")
        state = 1 if parent is not None else 0 if first_of_chain else 2
        limit = None if deadline is None else self._clock.monotonic() + deadline
        targets = self._shed(self._room.write_through, len(checked), deadline)
        result = np.full(len(checked), _REFUSED, dtype=np.uint8)
        if not targets:
            result[self._index.probe(checked, kind, self._room.readable)[1] != NO_TIER] = SaveOutcome.PRESENT
            refused = int(np.count_nonzero(result == _REFUSED))
            self._counters.saved(0, refused)
            self._count_skipped(targets, refused)
            return result
        mask = tier_mask(*targets)
        meant = None
        with Taken(self._index) as taken:
            # Touch and pin what is here of these keys, so that making room for the rest does not take it.
            with Taken(self._index) as here_now:
                found = self._index.match_keys_and_pin(checked, kind, mask, into=here_now)
                for tier in targets:
                    here = found.pages if len(targets) == 1 else self._index.probe(checked, kind, tier_mask(tier))[0]
                    meant = self._room.meant_for(checked, here) if tier is Tier.SHARED else meant
                    wanted = self._room.pages_for(tier, len(checked), meant) - here
                    patience = _GROWTH_SECONDS if limit is None else min(_GROWTH_SECONDS, self._left(limit))
                    self._room.make(tier, wanted, patience=patience, is_bound=limit is not None)
                batch = self._index.claim_absent_keys(checked, kind, state, parent or b"", mask, meant, into=taken)
            self._room.count_meant(batch.outcomes, meant)
            outcomes = batch.outcomes
            new = (outcomes == NEW).any(axis=1)
            here = (outcomes == PRESENT).any(axis=1) & ~new
            result[here] = SaveOutcome.PRESENT
            left = None if limit is None else self._left(limit)
            transfer = self._copies.save(batch, source, turn, taken, deadline=left)
            if transfer is not None:
                # By ctrl-C, for one, `taken` ends it: the source is the caller's again when we leave.
                if not transfer.wait():
                    transfer.revoke()
                if transfer.pages:
                    landed = transfer.ok
                    rows = np.flatnonzero(new)
                    result[rows[landed]] = SaveOutcome.STORED
        awaited = np.flatnonzero((outcomes == PENDING).any(axis=1) & ~new & ~here)
        if awaited.size:
            result[awaited] = self._await_others(checked[awaited], kind, limit)
        stored = int(np.count_nonzero(result == _STORED))
        self._counters.saved(stored, int(np.count_nonzero(result == _REFUSED)))
        self._count_skipped(targets, stored)
        return result

    def _await_others(
        self, keys: npt.NDArray[np.uint8], kind: int, limit: float | None
    ) -> npt.NDArray[np.uint8]:
        """Wait for pages that other calls bring, or this one under the same key. Returns uint8[n] of SaveOutcome."""

        def look() -> npt.NDArray[np.uint8]:
            found = np.full(len(keys), _REFUSED, dtype=np.uint8)
            found[[Residency.ARRIVING in self._index.state(key.tobytes(), kind) for key in keys]] = SaveOutcome.PENDING
            found[self._index.probe(keys, kind, self._room.readable)[1] != NO_TIER] = SaveOutcome.PRESENT
            return found

        outcomes = look()
        for core in self._copies.running():
            if SaveOutcome.PENDING not in outcomes:
                break
            if not self._copies.wait(core, None if limit is None else self._left(limit)):
                break
            outcomes = look()
        return outcomes

    def holds(self, keys: Keys, *, kind: int = KIND_KV) -> npt.NDArray[np.bool_]:
        """Say of each key by itself whether its page could be loaded now, from here or from a neighbour.

        For pages of which only some are needed (the last ones of a prefix): `probe` ends at the first that is missing.
        Nothing is pinned, used or brought: what is said may be over with the call.

        Args:
            keys: as in probe.

        Returns:
            bool[n].
        """
        self._use()
        checked = as_keys(keys)
        _check_kind(kind)
        _, tiers = self._index.probe(checked, kind, self._room.readable)
        here: npt.NDArray[np.bool_] = tiers != NO_TIER
        if self._staging is not None and self._staging.has_offers:
            at = 0
            while at < len(checked):
                run = 0 if here[at] else self._staging.offered(checked[at:], kind)
                here[at : at + run] = True
                at += max(1, run)
        return here

    def _left(self, limit: float) -> float:
        """Say how many seconds are left until a moment of the store's clock."""
        return max(0.0, limit - self._clock.monotonic())

    def _shed(self, tiers: tuple[Tier, ...], pages: int, deadline: float | None) -> tuple[Tier, ...]:
        """Leave out the tiers that a save should not go to now: loads come first, and it would come too late."""
        left_out = self._rates.shed(tiers, pages, deadline)
        for reason in left_out.values():
            self._counters.shed(reason, pages)
        return tuple(tier for tier in tiers if tier not in left_out)

    def state(self, key: bytes, *, kind: int = KIND_KV) -> dict[Tier, Residency]:
        """Say what a key's page is in each tier, from local memory only."""
        self._use()
        _check_kind(kind)
        found = self._index.state(key, kind)
        return {tier: Residency(found[tier]) for tier in Tier}

    # ---- sequences (managed device tier) -----------------------------------------------------------------------------

    @property
    def device(self) -> ManagedDevice:
        """The managed device tier: step(), drain(), renew().

        Raises:
            StepwellUsageError: the store has none.
        """
        self._use()
        if self._device is None:
            raise StepwellUsageError("this store has no device tier: give StoreConfig(device=DeviceTier(pages=...))")
        return self._device

    def open(
        self, tokens: Tokens, *, namespace: Namespace | None = None, request_id: str | None = None
    ) -> Sequence:
        """Open a sequence on the device tier: match its prefix in every tier and start loading what the device lacks.

        Args:
            tokens: int32[n], the prompt; n >= 1. At least the last token is left to compute.
            namespace: as in save. request_id: for messages.

        Returns:
            Sequence; never waits. `.ready .loading .pending .missing` say how many of its tokens are where.
        """
        return self.open_many([tokens], namespace=namespace, request_ids=[request_id])[0]

    def open_many(
        self,
        prompts: Seq[Tokens],
        *,
        namespace: Namespace | None = None,
        request_ids: Seq[str | None] | None = None,
    ) -> list[Sequence]:
        """Open several sequences at once; see open()."""
        sequences = self._running()
        checked = [as_tokens(tokens) for tokens in prompts]
        if any(tokens.size == 0 for tokens in checked):
            raise StepwellUsageError("a sequence needs at least one token")
        names = list(request_ids) if request_ids is not None else [None] * len(checked)
        if len(names) != len(checked):
            raise StepwellUsageError(f"{len(checked)} prompts, {len(names)} request ids")
        name_space, seed = self._namespace(namespace)
        return [
            sequences.open(tokens, name_space, seed, name) for tokens, name in zip(checked, names, strict=True)
        ]

    def extend(self, sequences: Seq[Sequence], upto: Seq[int]) -> Extended:
        """Give each sequence device pages for its first `upto` tokens, to compute into.

        Returns:
            Extended(ok: bool[n], full: Full | None). A sequence gets all it lacks or nothing; what it asks for and does
            not get is Full, a value with numbers.

        Raises:
            LeaseClosedError, DeviceResetError, StepwellUsageError (still loading).
        """
        return self._running().extend(sequences, upto)

    def append(self, sequences: Seq[Sequence], tokens: Tokens) -> None:
        """Add one generated token to each sequence: int32[n]. Its page becomes known when it is full."""
        self._running().append(sequences, as_tokens(tokens))

    def publish(self, sequences: Seq[Sequence], computed: Seq[int]) -> tuple[int, int]:
        """Make full pages among the first `computed` tokens of each sequence findable, and write them through.

        Requires: the computation that writes them was dispatched, and its arrays are in the pool (its step has ended).

        Returns:
            (published, duplicates) in pages; a duplicate is a page that another sequence published first: this one's
            copy stays private. The partial tail stays private too.
        """
        return self._running().publish(sequences, computed)

    def block_tables(self, sequences: Seq[Sequence], out: npt.NDArray[np.int32]) -> None:
        """Write each sequence's device slots into `out: int32[n, m]`, the rest of a row being the scratch slot."""
        self._running().block_tables(sequences, out)

    # ---- care -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that pages are saved and found under."""
        return self._epoch.number

    def set_epoch(self, epoch: int | str) -> None:
        """Change the epoch of the weights: pages of any other are misses from now on, and leave first.

        Those that have not left are found again once the epoch is theirs, also after a restart in between. Running
        loads end as misses, queued saves are dropped, pins and leases of probes end; those of the same epoch, set
        again, live on.
        """
        self._use()
        number = epoch_number(epoch)
        with self._turning, self._sequences.lock if self._sequences is not None else contextlib.nullcontext():
            # In this order: what a save claims under the new epoch finds the turn counted, and a match of pages of the
            # old one is never taken for one of the new.
            has_changed = number != self._epoch.number
            self._epoch.turns += has_changed
            self._index.set_epoch(number)
            self._epoch.number = number
        if has_changed:
            self._pins.end_all()
        self._copies.cancel_all()

    def pin(self, tokens: Tokens, *, ttl: float, namespace: Namespace | None = None) -> Pinned:
        """Keep the pages of some tokens from being lost to eviction, for a while.

        While the pin lives, the last copy of a page of the prefix in the lasting tiers (shared, disk; host in a store
        that has neither) does not leave; the others may, so it may be demoted. forget() passes its pages by, clear()
        leaves one copy. Nothing is brought nearer. A damaged page is lost, pin or not, and kept again once it is saved
        again. A volume that a pin keeps pages in is given back to a neighbour only when the pin has ended.

        Args:
            tokens: int32[n]; whole pages count.
            ttl: seconds, on the store's clock. Pins end in a background round, within a quarter of a second.
            namespace: as in save.

        Returns:
            Pinned. It covers what is cached of the prefix now, and nothing that is saved later: `tokens` are kept at
            once; `pending` ones are on their way (a save that runs) or in another tier only, and kept once they are in
            a lasting one. Pinned again, the prefix is kept until the later of both ends. More than config.pin_fraction
            allows is refused whole: `tokens` is 0 and `full` has the numbers.
            Pins are the process's: after a restart they are gone; a change of the epoch ends them.

        Raises:
            TokenError, StepwellUsageError: tokens that are none; a ttl that is not positive and finite.

        Cost: as match, and about 30 ns a page that no pin covered before.
        """
        self._use()
        checked = as_tokens(tokens)
        name_space, _ = self._namespace(namespace)
        return self._pins.pin(name_space, checked, ttl)

    def evict(self, tier: Tier, pages: int) -> int:
        """Drop up to `pages` unpinned pages of lowest rank from one tier. Returns how many were dropped.

        A disk that hangs, and what a crash brings back then: as clear().

        Raises:
            StepwellUsageError: what is no Tier; nothing was dropped.
        """
        self._use()
        if not isinstance(tier, Tier):
            raise StepwellUsageError(f"evict: {tier!r} is no Tier; give e.g. Tier.HOST")
        return self._room.evict(tier, pages)

    def forget(self, tokens: Tokens, *, namespace: Namespace | None = None, keep: int = 0) -> int:
        """Drop the pages of some tokens past the first `keep` tokens from every tier; pinned ones stay (match and pin).

        Also those behind a page that is not cached, which no match finds until it is saved again. What probes keep of
        them they keep no longer. A disk that hangs, and what a crash brings back then: as clear().

        Returns:
            Copies dropped, over all tiers.
        """
        self._use()
        checked = as_tokens(tokens)
        name_space, seed = self._namespace(namespace)
        # A match grafts what only hashes know, so that a recovered chain can be named by its tokens.
        with Taken(self._index) as taken:
            self._index.match_and_pin(name_space, checked, self._room.readable, into=taken)
        keep_pages = -(-keep // self._page_tokens)
        keys = hash_chain(checked, page_tokens=self._page_tokens, seed=seed)[keep_pages:]
        self._probes.spend(keys, KIND_KV, np.ones(len(keys), dtype=np.bool_))
        return self._room.forget(name_space, checked, keep_pages)

    def clear(self, *, deadline: float | None = None) -> int:
        """Drop every unpinned page from every tier; a pin()'s pages keep one copy. Returns copies dropped.

        Leases of probes end: they are a courtesy to a load that was not asked for yet.

        What is dropped no look-up of this process finds from then on. Its records on disk are retired in the
        background, and this waits for that: where it returns in time, and no slot is `owed` (stats()), a crash does not
        bring it back. A disk that hangs, or refuses, keeps nobody longer: the slots stay owed until the records are
        retired, and a crash before that brings those pages back, as does a neighbour that reads them meanwhile.

        Args:
            deadline: seconds to wait for that at most; None: ten.
        """
        self._use()
        deadline = _seconds("deadline", deadline)
        self._probes.end_all()
        return sum(
            self._room.evict(tier, self._index.counts(tier)["capacity"], patience=deadline)
            for tier in self._room.all_tiers
        )

    def reopen(self, tier: Tier) -> Reopened:
        """Attach a tier's volumes anew, now: close its files, join its directory, recover what it holds. Waits.

        For a tier that was mended, while it is out of service or read-only: it is tried by itself, but only ever more
        seldom, and with the files that it had. Not before it is mended: where a read-only tier cannot be attached anew,
        the pages that were read there still are misses until it can be. Loads and promotions from it that are under way
        end as misses; the other tiers serve on. In an asyncio loop: `await asyncio.to_thread(store.reopen, tier)`.

        Args:
            tier: SHARED or DISK.

        Returns:
            Reopened. It serves again: what is found there is found by every match from now on.

        Raises:
            VolumeBusyError: pages of the tier are pinned by open matches or sequences, or are in a call that does not
                return: nothing was changed but that it is out of service, and it is tried again by itself.
            BudgetError, VolumeError, TierIOError: as when the store is opened; the tier stays out of service, without a
                volume, and is tried again by itself.
            PoisonedError: as stats(); nothing was changed.
            StepwellUsageError: the store has no such tier, or it has no files.
        """
        mover = self._use()
        pages = self._tiers.get(tier) if isinstance(tier, Tier) else None
        if not isinstance(pages, VolumeTier):
            names = ", ".join(f"Tier.{each.name}" for each in _directories(self._config))
            raise StepwellUsageError(f"reopen: {tier!r}; give a tier with files that this store has: {names or 'none'}")
        round_ = self._rounds[tier]
        with round_.held(_ROUND_SECONDS) as is_held:
            if not is_held:
                raise VolumeBusyError(f"{tier} tier: its background round has not returned for {_ROUND_SECONDS:g} s")
            self._use()  # closed meanwhile: the tier must not come back
            self._raise_if_poisoned()
            self._health.take_out(tier, "it is being reopened")
            self._share_states(mover)
            self._copies.cancel_tier(tier)
            self._probes.end_in(tier)
            limit = time.monotonic() + self._config.close_timeout
            while self._is_in_use(tier) and time.monotonic() < limit:
                time.sleep(_LOOK_AGAIN_SECONDS)
            try:
                found = pages.reopen(self._index)
            except (StepwellError, OSError) as error:
                self._health.reopen_failed(tier, str(error))
                raise
            finally:
                self._room.forget_mending(tier)
            self._health.reopened(tier)
            self._share_states(mover)
        return Reopened(tier, self._index.counts(tier)["capacity"], found.pages, found.freed)

    def _is_in_use(self, tier: Tier) -> bool:
        counts = self._index.counts(tier)
        return bool(counts["arriving"] or counts["leaving"] - counts["owed"] or counts["pinned"])

    def verify(self) -> VerifyResult:
        """Read every page of host, shared and disk and check it; damaged ones are quarantined. Waits.

        In an asyncio loop: `await asyncio.to_thread(store.verify)`. A tier that is out of service is passed by.

        Raises:
            PoisonedError: as stats().

        Cost: all bytes of all tiers are read once, through the mover, behind loads.
        """
        self._use()
        total = damaged = 0
        for tier in list(self._tiers):
            if not self._health.is_readable(tier):
                continue
            after: int | None = None
            while True:
                with Taken(self._index) as taken:
                    ids, slots = self._index.pin_resident(tier, after, _VERIFY_PAGES, into=taken)
                    if ids.size == 0:
                        break
                    after = int(ids[-1])
                    plan = Plan.empty(ids)  # without a sink: each page is checked where it is
                    plan.roles[:, tier], plan.slots[:, tier] = SOURCE, slots
                    transfer: Transfer | None = None
                    try:
                        transfer = self._copies.submit(plan, pool=None, work_class=WorkClass.DEMOTE)
                        if transfer is not None:
                            transfer.wait()
                    except BaseException:  # ctrl-C, for one
                        if transfer is not None:
                            transfer.cancel()
                        raise
                self._use()  # closed meanwhile: not all was read
                self._raise_if_poisoned()
                if transfer is None:
                    raise StepwellUsageError("the mover's queue is full; verify again when it is quieter")
                status = transfer.status
                bad = int(np.isin(status, _DAMAGED).sum())
                total += int((status == _core.Status.ok.value).sum()) + bad  # the rest was cancelled, not read
                damaged += bad
        return VerifyResult(total, damaged)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every transfer submitted before this call is done. False: not within `timeout` seconds.

        In an asyncio loop: `await asyncio.to_thread(store.flush)`, or await each transfer.
        Pages published on a device tier are included once their gather was dispatched: by the engine's next step, or
        drain().
        """
        self._use()
        timeout = _seconds("timeout", timeout)
        limit = None if timeout is None else self._clock.monotonic() + timeout
        if self._sequences is not None and not self._sequences.wait_landed(timeout):
            return False
        for core in self._copies.running():
            left = None if limit is None else max(0.0, limit - self._clock.monotonic())
            if not self._copies.wait(core, left):
                return False
        self._copies.account()
        return True

    def quiesce(self, timeout: float | None = None) -> bool:
        """Wait until nothing moves, without refusing new work. False: not within `timeout` seconds."""
        return self.flush(timeout)

    def stats(self) -> Stats:
        """Show what the store holds and has done.

        Raises:
            PoisonedError: an assertion of the core failed; the store serves misses only.
        """
        mover = self._use()
        self._raise_if_poisoned()
        self._copies.account()
        moved, flow = mover.stats(), self._flow()
        counters = self._counters
        with counters.lock:
            return Stats(
                tiers={tier.name.lower(): self._tier_stats(tier, moved, flow) for tier in self._room.all_tiers},
                lookups=counters.lookups,
                lookup_pages=counters.lookup_pages,
                hit_pages={str(tier): pages for tier, pages in counters.hit_pages.items()},
                delivered_pages={str(tier): pages for tier, pages in counters.delivered_pages.items()},
                misses=dict(counters.misses),
                saved_pages=counters.saved_pages,
                refused_pages=counters.refused_pages,
                shed_pages=dict(counters.shed_pages),
                evicted_pages={str(tier): pages for tier, pages in counters.evicted_pages.items()},
                checksum_failures=moved["checksum_failures"],
                io_errors=moved["io_errors"],
                bus_faults=moved["bus_faults"],
                retried_pages=moved["retried_pages"],
                rescued_pages=moved["rescued_pages"],
                failed_jobs=moved["failed_units"],
                transfers=moved["transfers"],
                queued=moved["queued_copy"] + moved["queued_io"],
                page_records=self._index.pages(),
                tree_edges=self._index.nodes(),
                leases=self._index.leases(),
                held_back_pages=counters.held_back_pages,
                second_use_pages=counters.second_use_pages,
                pins=self._pins.count(),
                pinned_pages=self._index.held_pages(),
                probed_pages=self._index.courtesies(),
                neighbours=NeighbourStats(**self._foreign.counts()) if self._foreign is not None else NeighbourStats(),
                poisoned=False,
            )

    def tree(self, *, most: int = 4096) -> Tree:
        """Show the tree of cached prefixes: the `most` edges with the most pages on and below them.

        Args:
            most: edges, 1 to 65536. A chosen edge's parents are chosen too.

        Cost: every lookup and save waits meanwhile: about 30 ns for each edge of the tree, and as much for each page of
        the chosen edges. For a report or a debugger, not for a loop.
        """
        self._use()
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= 65536:
            raise StepwellUsageError(f"most: {most!r} is no number of edges within 1..65536")
        return Tree(*self._index.tree(most))

    def check(self) -> str:
        """Verify the index's invariants by a full scan; "" or what is wrong. For tests and `verify`."""
        self._refuse_child()
        return self._index.check()

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._closed

    def close(self) -> None:
        """Finish what runs, cancel the rest after config.close_timeout, and give everything back. Idempotent.

        Shared and disk pages stay for the next process. Matches may still be closed afterwards. Waits: in an asyncio
        loop, `await asyncio.to_thread(store.close)`; transfers that are awaited end as done.

        A call on a tier's files that does not return keeps no one: within two seconds more (and where a background
        round, or the files themselves while they are closed, do not answer, ten more for each) close() returns without
        it. The thread that is in it is left, with its memory, its descriptors and the locks of the volumes, so that
        nothing it still writes can meet another process; all that goes when the call returns, or with the process.

        Raises:
            StepwellUsageError: inside a step of the device tier; nothing is changed then.
            PoisonedError: an assertion of the core failed; everything was given back all the same.
        """
        if os.getpid() != self._pid:
            self._closed = True
            return
        with self._closing:
            if self._closed:
                return
            mover = self._copies.mover
            self._shut(self._config.close_timeout)
            if self._index.poisoned():
                raise PoisonedError(_POISONED.format(self._say_poison(mover)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*(() if kind is None else (PoisonedError,))):  # not over what the block raised
            self.close()

    def __del__(self) -> None:
        # Without a keeper the constructor raised, and has given everything back itself. One that is closed may outlive
        # the modules that it would need, at the interpreter's end.
        if self._keeper is not None and not self._closed:
            with contextlib.suppress(PoisonedError):  # it was said in the log
                self.close()

    # ---- opening and closing --------------------------------------------------------------------------------------

    # What `stepwell.testing.stepped` answers otherwise, to decide itself what runs when, and on which arrays.

    def _workers(self) -> dict[str, int]:
        """Say how many threads the mover has, by queue."""
        return {"copy_threads": self._config.copy_threads, "io_threads": self._config.io_threads}

    def _flow(self) -> Flow:
        """Say what the mover has moved, and how long that took."""
        mover = self._copies.mover
        return Flow.nothing() if mover is None else Flow(**mover.flow())

    def _machine(self) -> Machine:
        """Say what volumes ask of the machine."""
        return Machine(clock=self._clock)

    def _begin_rounds(self, keeper: Keepers) -> None:
        """Have background rounds from now on."""
        keeper.start()

    def _begin_landing(self, sequences: Sequences) -> None:
        """Have gathers of the device tier landed from now on."""
        sequences.begin_landing()

    def _make_pool(self, device: DeviceTier) -> LinearPool[Any]:
        """Make the pool of the device tier. Only here is jax imported, through the one module that does."""
        from stepwell.tiers.device import DevicePool

        return DevicePool(
            self._config.geometry,
            device.pages,
            axes=device.axes,
            max_step_bytes=parse_size(device.step_bytes, name="device.step_bytes"),
        )

    def _open_tiers(self) -> None:
        config = self._config
        host = config.host_bytes()
        if host is not None:
            self._slab = HostSlab(self._shape, capacity_bytes=host, page_bytes=config.geometry.page_bytes)
            self._tiers[Tier.HOST] = self._slab
        if config.shared is not None:
            self._tiers[Tier.SHARED] = SharedVolumes(
                config.shared,
                shape=self._shape,
                fingerprint=self._fingerprint,
                epoch=self._epoch.number,
                clock=self._clock,
                machine=self._machine(),
            )
        if config.disk is not None:
            self._tiers[Tier.DISK] = DiskVolumes(
                config.disk,
                shape=self._shape,
                fingerprint=self._fingerprint,
                epoch=self._epoch.number,
                clock=self._clock,
                machine=self._machine(),
            )
        # Disk first: its records name parents for what shared memory holds, and the other way round it does not matter.
        for tier in sorted(self._tiers, reverse=True):
            self._tiers[tier].open(self._index)
        if config.disk is not None and config.disk.write == "selective":
            assert config.shared is not None, "checked(): selective writes have a shared tier"
            capacity = sum(parse_size(tier.capacity) for tier in (config.shared, config.disk))
            self._room.seen = Seen(capacity // config.geometry.page_bytes)

    def _open_neighbours(self) -> _core.Foreign | None:
        """Have what is needed to read neighbours' pages; their volumes are looked for once all is open."""
        config = self._config
        staging = config.staging_bytes()
        if staging is None:
            return None
        if self._slab is None:
            if config.staging is None:
                staging = min(staging, MemoryLimits().memory().nbytes // 4)
            if staging < config.geometry.page_bytes:
                _LOG.warning("the machine has no memory left to stage neighbours' pages in: they are misses here")
                return None
            self._slab = HostSlab(
                self._shape, capacity_bytes=staging, page_bytes=config.geometry.page_bytes, name="staging"
            )
            self._room.stages_only = True
        else:
            self._room.has_staging = True
        self._foreign = _core.Foreign(self._shape, _MOST_FOREIGN)
        tiers = [
            (tier, 1 if tier.tier is Tier.SHARED else 2)
            for tier in self._tiers.values()
            if isinstance(tier, VolumeTier)
        ]
        self._neighbours = Neighbours(
            self._foreign, tiers, fingerprint=self._fingerprint, clock=self._clock
        )
        self._staging = Staging(self._index, self._room, self._copies, self._foreign)
        return self._foreign

    def _look_at_neighbours(self) -> bool:
        """Learn what neighbours have; with the first of them, the staging becomes a tier.

        Returns: False: nothing is to be done before it is due.
        """
        if self._neighbours is None:
            return False
        self._neighbours.round()
        if self._keeper is not None:
            self._keeper.pace(_NEIGHBOURS, LIVELY_INTERVAL if self._neighbours.are_alive else INTERVAL)
        if self._neighbours.volumes and not self._room.has_staging:
            assert self._slab is not None, "neighbours are followed where their pages can be staged"
            self._slab.open(self._index)
            self._tiers[Tier.HOST] = self._slab
            marks = (self._config.low_watermark, self._config.high_watermark)
            self._rounds[Tier.HOST] = Round(Tier.HOST, self._room, self._clock, marks)
            self._room.has_staging = True
        return False

    def _look_once(self) -> None:
        """Learn what neighbours have before the first look-up, not with the keeper's first round: in a rolling restart
        the first requests are theirs. Whatever fails here is tried again by the keeper.

        Requires: no keeper runs yet.
        """
        if self._neighbours is None or self._foreign is None:
            return
        limit = time.monotonic() + _FIRST_LOOK_SECONDS
        try:
            self._look_at_neighbours()
            known = 0
            while known < self._foreign.pages and time.monotonic() < limit:  # a poll reads so many records, not all
                known = self._foreign.pages
                self._neighbours.round()
        except (StepwellError, OSError, MemoryError) as error:
            _LOG.info("neighbours' pages are misses until the next look: %s", error)

    def _open_device(self) -> None:
        device = self._config.device
        if device is None:
            return
        from stepwell.sequence import ManagedDevice, Sequences

        slab = self._room.medium(Tier.HOST)
        assert isinstance(slab, _core.Slab), "checked(): a device tier has a host tier"
        pool = self._make_pool(device)
        self._index.add_slots(Tier.DEVICE, 0, device.pages)
        self._room.has_device = True
        self._sequences = Sequences(
            self._index, self._room, self._copies, self._counters, pool, slab, self._shape, self._staging
        )
        self._device = ManagedDevice(self._sequences, pool)
        self._begin_landing(self._sequences)

    def _running(self) -> Sequences:
        self._use()
        if self._sequences is None:
            raise StepwellUsageError("sequences need a device tier: give StoreConfig(device=DeviceTier(pages=...))")
        return self._sequences

    def _shut(self, timeout: float) -> None:
        if self._sequences is not None:
            self._sequences.close_pool()
        self._closed = True
        _OPEN_STORES.discard(self)
        has_stopped = self._keeper is None or self._keeper.stop(_ROUND_SECONDS)
        self._room.end_waits()
        if self._sequences is not None:
            self._sequences.stop()
        mover = self._copies.detach()
        if mover is not None:
            mover.drain(timeout, True)
            self._copies.account()
            mover.drain_retired()
        self._probes.end_all()
        self._pins.end_all()
        if self._neighbours is not None:
            self._neighbours.close()
        if mover is not None and mover.stuck:  # a worker may be in them for ever
            LEFT_BEHIND[id(mover)] = (self._foreign, self._slab)
        self._let_go(mover, patience=_ROUND_SECONDS if has_stopped else _LET_GO_SECONDS)

    def _let_go(self, mover: _core.Mover | None, *, patience: float) -> None:
        """Close the tiers, each in a thread of its own; those whose files do not answer are left to it."""
        leaving = [
            Leaving(self._tiers[tier], self._rounds.get(tier), self._index, mover)
            for tier in sorted(self._tiers, reverse=True)
        ]
        limit = time.monotonic() + (0.0 if mover is not None and mover.stuck else patience)
        left = [each.name for each in leaving if not each.wait(limit)]
        if left:
            _LOG.error(
                "%s: a call on its files does not return: its thread is left behind with its volumes, locked, until it "
                "does or this process ends; no process takes them over before",
                ", ".join(left),
            )
        with contextlib.ExitStack() as raising:  # each was closed, whatever happened to the others
            for each in leaving:
                raising.callback(each.raise_error)

    def _use(self) -> _core.Mover:
        """Return the mover; raise where the store cannot be used."""
        self._refuse_child()
        mover = self._copies.mover
        if self._closed or mover is None:
            raise StoreClosedError(
                "the store was closed: open another one with PageStore(config); it finds what was committed to shared "
                "memory and disk"
            )
        if self._keeper is not None:
            self._keeper.note_use()
        return mover

    def _raise_if_poisoned(self) -> None:
        mover = self._copies.mover
        if self._index.poisoned() or (mover is not None and mover.poisoned):
            raise PoisonedError(_POISONED.format(self._say_poison(mover)))

    def _say_poison(self, mover: _core.Mover | None) -> str:
        """Log once that the store serves misses only. Returns what failed, as far as that is known."""
        reason = (mover.poison_reason if mover is not None else "") or "an assertion of the index"
        if not self._has_said_poison:
            self._has_said_poison = True
            _LOG.error("%s", _POISONED.format(reason))
        return reason

    def _refuse_child(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this store was opened by process {self._pid}; a forked child cannot use it: open one of its own "
                "(spawn)"
            )

    def _check_slice(self, name: str, given: PoolSlice) -> None:
        if not isinstance(given, PoolSlice):
            raise StepwellUsageError(
                f"{name}: give slots of a lent pool, `pool = store.lend(array)` and then `pool[slots]`, "
                f"not {type(given).__name__}"
            )
        if given.pool.fingerprint != self._fingerprint:
            raise GeometryError(
                f"{name}: the pool was lent for the geometry {given.pool.fingerprint.hex()[:16]}, "
                f"this store's is {self._fingerprint.hex()[:16]}; lend it to this store"
            )
        low, high, _ = _core.slot_range(given.slots, given.pool.slots)
        if low < 0 or high >= given.pool.slots:
            raise StepwellUsageError(f"{name}: slots are not all within the pool's 0..{given.pool.slots - 1}")

    def _check_target(self, into: PoolSlice) -> None:
        self._check_slice("into", into)
        if not into.pool.writable:
            raise StepwellUsageError("into: the pool is read-only; lend memory that can be written")

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def _namespace(self, namespace: Namespace | None) -> tuple[int, bytes | None]:
        if namespace is not None and not isinstance(namespace, Namespace):
            raise StepwellUsageError(
                f"namespace: {namespace!r} is no Namespace; give e.g. stepwell.Namespace(salt={namespace!r})"
            )
        seed = None if namespace is None else namespace.seed()
        with self._lock:
            known = self._namespaces.get(seed)
            if known is None:
                known = self._namespaces[seed] = self._index.open_namespace(seed)
        return known, seed

    # ---- the keeper's round ------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Do every background round here and now; the first that raises raises when all have run."""
        failures: list[StepwellError | OSError] = []
        rounds = (self._rounds[tier].run for tier in _directories(self._config))
        for run in (self._tick_store, self._look_at_neighbours, *rounds):
            try:
                run()
            except (StepwellError, OSError) as error:
                failures.append(error)
        try:
            if failures:
                raise failures[0]
        finally:
            del failures  # else it and the traceback keep each other, and what a frame holds, alive

    def _tick_store(self) -> bool:
        """Do what is due apart from the tiers' rounds: leases, deadlines, health. Touches no file.

        Returns:
            False: there is nothing to do again before it is due.
        """
        self._probes.end_due()
        self._pins.end_due()
        self._copies.enforce_deadlines()
        mover = self._copies.mover
        if mover is not None:
            self._look_after(mover)
            self._rates.observe()
            mover.drain_retired()
        self._copies.account()
        self._index.prepare(_RECORDS_AHEAD)
        if Tier.HOST in self._rounds:
            self._rounds[Tier.HOST].run()
        return False

    def _look_after(self, mover: _core.Mover) -> None:
        """Take tiers that fail out of service, and say what else went wrong."""
        moved, now = mover.stats(), self._clock.monotonic()
        page_bytes = self._config.geometry.page_bytes
        for tier, each in list(self._rounds.items()):
            reads, writes = moved["read_errors"][tier], self._write_errors(tier, moved)
            number = self._room.owed.take_errno(tier) or moved["write_errno"][tier]
            done = (moved["bytes_read"][tier] + moved["bytes_written"][tier]) // page_bytes
            calls = Calls(done + reads + writes, reads, writes, moved["read_errno"][tier], number)
            self._health.observe_calls(tier, calls)
            self._health.observe_round(tier, each.seconds())
        for tier in self._health.observe_workers(mover.calls()):
            self._copies.give_up(tier)  # also what came since: by a match of before
        self._share_states(mover)
        if mover.poisoned:
            self._say_poison(mover)
        if moved["failed_units"] > self._failed_jobs:
            self._failed_jobs = moved["failed_units"]
            if now - self._said_failure_at >= LOG_SECONDS:
                self._said_failure_at = now
                _LOG.warning(
                    "an exception ended a batch of pages (%s): they are misses, or not saved; %d such batches so far",
                    mover.failure,
                    self._failed_jobs,
                )

    def _share_states(self, mover: _core.Mover) -> None:
        """Tell the core which tiers a load may ask where its first source has failed."""
        mover.set_readable(self._room.readable)

    def _write_errors(self, tier: Tier, moved: dict[str, list[int]]) -> int:
        """Count the writes to a tier that failed: of pages, and of the records of those that left."""
        return moved["write_errors"][tier] + self._room.owed.failures(tier)

    def _tier_stats(self, tier: Tier, moved: dict[str, list[int]], flow: Flow) -> TierStats:
        place = self._tiers.get(tier)
        recovered, cold = (place.recovered_pages, place.cold) if isinstance(place, VolumeTier) else (0, {})
        counts, health = self._index.counts(tier), self._health.of(tier)
        rate = self._rates.of(tier)
        return TierStats(
            capacity=counts["capacity"],
            free=counts["free"],
            arriving=counts["arriving"],
            resident=counts["resident"],
            leaving=counts["leaving"],
            quarantined=counts["quarantined"],
            pinned=counts["pinned"],
            held=counts["held"],
            owed=self._room.owed.count(tier),
            bytes_read=moved["bytes_read"][tier],
            bytes_written=moved["bytes_written"][tier],
            recovered=recovered,
            cold=cold,
            state=health.state.value,
            reason=health.reason,
            trips=health.trips,
            read_errors=moved["read_errors"][tier],
            write_errors=self._write_errors(tier, moved),
            retired=self._room.retired(tier),
            skipped=self._counters.skipped_pages.get(tier, 0),
            read_seconds=float(flow.reads[:, tier, 1].sum()) / 1e9,
            write_seconds=float(flow.writes[:, tier, 1].sum()) / 1e9,
            read_rate=rate.read_rate,
            write_rate=rate.write_rate,
            wait_seconds=rate.wait,
            expected_seconds=rate.expected,
            too_slow=rate.is_too_slow,
        )


def _seconds(name: str, given: float | None) -> float | None:
    return None if given is None else as_seconds(name, given)


def _check_inbox(inbox: Inbox | None) -> None:
    if inbox is not None and not isinstance(inbox, Inbox):
        raise StepwellUsageError(f"inbox: give a stepwell.Inbox, not {type(inbox).__name__}")


def _check_kind(kind: int) -> None:
    if not 0 <= kind <= 255:
        raise StepwellUsageError(f"kind: {kind} is no byte")


def _directories(config: StoreConfig) -> dict[Tier, str]:
    """Return the directory of each tier that can be taken out of service."""
    tiers: dict[Tier, SharedTier | DiskTier | None] = {Tier.SHARED: config.shared, Tier.DISK: config.disk}
    return {tier: given.path for tier, given in tiers.items() if given is not None}


_OPEN_STORES: weakref.WeakSet[PageStore] = weakref.WeakSet()


@atexit.register
def _close_open_stores() -> None:
    """Close what the program did not, so that its threads end before the interpreter does."""
    for store in list(_OPEN_STORES):
        with contextlib.suppress(PoisonedError):  # it was said in the log
            store.close()
