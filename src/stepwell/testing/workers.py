"""Threads that use a store and write down every call with its result: what recorder.py sets to work.

Pages say which save wrote them, so that a read shows whose bytes it was given. What a save claimed, page by page, is
told to no caller: it is seen where the store hands it to the mover.
"""

from __future__ import annotations

import itertools
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import ClaimOutcome, Tier
from stepwell.lease import Match
from stepwell.mover import SaveOutcome, Transfer, core_transfer
from stepwell.pins import Pinned
from stepwell.pool import LentPool, PoolSlice
from stepwell.store import Order, PageStore
from stepwell.testing.history import (
    NOTHING,
    TORN,
    Cleared,
    Evicted,
    Failed,
    Forgot,
    Kept,
    Loaded,
    LoadedKeys,
    Matched,
    Probed,
    Record,
    Released,
    Result,
    Saved,
    Turned,
    Unpinned,
    Verified,
)

PAGE_TOKENS: Final = 4
LAYERS: Final = 2
GEOMETRY: Final = PageGeometry(
    model="history", revision="1", layers=LAYERS, kv_heads=2, head_dim=256, dtype="uint8", page_tokens=PAGE_TOKENS
)
PAGE_BYTES: Final = GEOMETRY.page_bytes
LAYER_WORDS: Final = PAGE_BYTES // LAYERS // 8
AXES: Final = "slot layer stream token head dim"
WAIT_SECONDS: Final = 60.0
"""How long a call may take before it counts as one that waits for ever."""
EPOCHS: Final = 2

Bytes = npt.NDArray[np.uint8]


# ---- pages that say what they are ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens whose whole pages have these keys, and these numbers in the history."""

    tokens: npt.NDArray[np.int32]
    namespace: Namespace | None
    keys: npt.NDArray[np.uint8]
    pages: tuple[int, ...]


def chains() -> list[Chain]:
    """Return chains that share prefixes, and one with the same tokens in a namespace of its own: 20 pages in all."""
    numbers: dict[bytes, int] = {}
    found = []
    for parts, namespace in (
        ((1, 2, 3, 4, 5), None),
        ((1, 2, 6, 7), None),
        ((1, 2, 3, 8, 9, 10), None),
        ((11, 12, 13), None),
        ((1, 2, 3, 4, 5), Namespace(adapter="a")),
    ):
        tokens = np.concatenate([np.arange(PAGE_TOKENS, dtype=np.int32) + 100 * part for part in parts])
        seed = None if namespace is None else namespace.seed()
        keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS, seed=seed)
        pages = tuple(numbers.setdefault(key.tobytes(), len(numbers)) for key in keys)
        found.append(Chain(tokens, namespace, keys, pages))
    return found


_PATTERN: Final = np.random.default_rng(5).integers(1, 1 << 63, (LAYERS, LAYER_WORDS), dtype=np.uint64)


def bytes_of(page: int, save: int) -> Bytes:
    """Return what a save writes for a page: uint8[PAGE_BYTES]. Each layer says both numbers, and depends on both."""
    words = _PATTERN * np.uint64(2 * save + 1) + np.uint64(page)
    words[:, 0], words[:, 1] = page, save
    return words.reshape(-1).view(np.uint8)


def save_of(page: int, row: Bytes) -> int:
    """Say which save wrote what was delivered as a page; TORN where none did."""
    save = int(row[8:16].view(np.uint64)[0])
    return save if 0 < save < 1 << 40 and np.array_equal(row, bytes_of(page, save)) else TORN


# ---- what a store does not tell its caller -------------------------------------------------------------------------


class _Seen(threading.local):
    """What one thread has claimed and begun since it was last asked."""

    def __init__(self) -> None:
        self.claims: list[tuple[_core.ClaimBatch, Transfer | None]] = []
        self.moves: list[_core.Transfer] = []


class Watch:
    """See what a store claims and moves for each thread: which pages of a save were new is not told to its caller.

    Threads: each sees what it did itself.
    """

    def __init__(self, store: PageStore) -> None:
        self._seen = seen = _Seen()
        save, submit = store._copies.save, store._copies.submit

        def watched_save(
            batch: _core.ClaimBatch, source: PoolSlice, turn: int, taken: _core.Taken, **how: Any
        ) -> Transfer | None:
            transfer = save(batch, source, turn, taken, **how)
            seen.claims.append((batch, transfer))
            return transfer

        def watched_submit(*given: Any, **named: Any) -> Transfer | None:
            transfer = submit(*given, **named)
            core = None if transfer is None else core_transfer(transfer)
            if core is not None:
                seen.moves.append(core)
            return transfer

        store._copies.save = watched_save  # type: ignore[method-assign]
        store._copies.submit = watched_submit  # type: ignore[method-assign]

    def take_claims(self) -> list[tuple[_core.ClaimBatch, Transfer | None]]:
        """Take what this thread's saves have claimed since."""
        taken, self._seen.claims = self._seen.claims, []
        return taken

    def take_moves(self) -> list[_core.Transfer]:
        """Take the transfers that this thread has begun since."""
        taken, self._seen.moves = self._seen.moves, []
        return taken


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    """A match under its number. moves: what was loaded by it. closing: the stamp before it was closed."""

    number: int
    match: Match
    pages: tuple[int, ...]
    moves: list[_core.Transfer] = field(default_factory=list)
    closing: int | None = None


@dataclass(slots=True)
class _Open:
    """A call that has returned and may still hold something: transfers, or a lease until the store is closed."""

    record: Record
    moves: list[_core.Transfer]
    is_leased: bool


@dataclass(slots=True)
class Recorder:
    """The records of all threads, and the counter of their stamps.

    Threads: stamp() and number() any; each worker has a list of its own.
    """

    stamps: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    records: list[Record] = field(default_factory=list)

    def stamp(self) -> int:
        """Return the next stamp; one atomic step under the GIL."""
        return next(self.stamps)

    def number(self) -> int:
        """Return the number of the next call."""
        return next(self.numbers)


class Worker:
    """One thread: it draws a call, makes it, and writes down what came of it."""

    def __init__(
        self, thread: int, recorder: Recorder, universe: Sequence[Chain], *, seed: int, evicts: bool
    ) -> None:
        """Args: evicts: whether it asks for pages to leave, now and then."""
        self._thread = thread
        self._recorder = recorder
        self._chains = universe
        self._random = random.Random(seed)
        longest = max(len(chain.pages) for chain in universe)
        self._rows = np.zeros((longest, PAGE_BYTES), np.uint8)
        self._open: list[_Open] = []
        self._matches: list[_Found] = []
        self._pins: list[tuple[Record, Pinned]] = []
        self.records: list[Record] = []
        self._acts: list[tuple[int, Callable[[], None]]] = [
            (30, self._save),
            (30, self._read),
            (6, self._keep_match),
            (8, self._load_kept),
            (8, self._release_kept),
            (8, self._load_keys),
            (6, self._save_keys),
            (6, self._probe),
            (6, self._pin),
            (5, self._unpin),
            (10, self._forget),
            (1, self._verify),
            (1, self._turn),
            (1, self._flush),
            (1, self._clear),
            *([(6, self._evict)] if evicts else []),
        ]

    def join_store(self, store: PageStore, watch: Watch) -> None:
        """Use this store from now on."""
        shape = (len(self._rows), LAYERS, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self._store, self._watch = store, watch
        self._pool: LentPool = store.lend(self._rows.reshape(shape), axes=AXES)

    def work(self, calls: int) -> None:
        """Make some calls."""
        weights = [weight for weight, _ in self._acts]
        acts = self._random.choices([act for _, act in self._acts], weights, k=calls)
        for act in acts:
            self._settle()
            try:
                act()
            except Exception:  # noqa: BLE001 whatever is raised is what the history is to show
                at = self._recorder.stamp()
                self._note(act.__name__.strip("_"), (), at, at, Failed(traceback.format_exc(limit=-6)))
                return

    def let_go(self) -> None:
        """End matches and pins, and wait for all that was begun. Requires: work() has returned."""
        while self._matches:
            self._release(self._matches.pop())
        while self._pins:
            self._end_pin(*self._pins.pop())
        for each in self._open:
            for core in each.moves:
                self._wait(core)
        self._settle()

    def settle_leases(self) -> None:
        """Write down that what probes held is free. Requires: the store is closed."""
        for each in self._open:
            self.records.append(replace(each.record, settled=self._recorder.stamp()))
        self._open.clear()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _prefix(self) -> tuple[Chain, int]:
        chain = self._random.choice(self._chains)
        return chain, self._random.randint(1, len(chain.pages))

    def _save(self) -> None:
        chain, count = self._prefix()
        number, pages = self._fill(chain, count)
        invoked = self._recorder.stamp()
        tokens = chain.tokens[: count * PAGE_TOKENS]
        result = self._store.save(tokens, source=self._pool[:count], namespace=chain.namespace)
        returned = self._recorder.stamp()
        told = (result.saved, result.present, result.pending, result.refused)
        self._note_save("save", number, pages, invoked, returned, told)

    def _save_keys(self) -> None:
        chain, count = self._prefix()
        number, pages = self._fill(chain, count)
        deadline = self._random.choice([None, None, 0.0, 0.001])
        invoked = self._recorder.stamp()
        outcomes = self._store.save_keys(
            chain.keys[:count], source=self._pool[:count], first_of_chain=True, deadline=deadline
        )
        returned = self._recorder.stamp()
        kinds = [int((outcomes == kind).sum()) for kind in SaveOutcome]
        told = (
            kinds[SaveOutcome.STORED],
            kinds[SaveOutcome.PRESENT],
            kinds[SaveOutcome.PENDING],
            kinds[SaveOutcome.REFUSED],
        )
        self._note_save("save_keys", number, pages, invoked, returned, told, had_deadline=deadline is not None)

    def _fill(self, chain: Chain, count: int) -> tuple[int, tuple[int, ...]]:
        number, pages = self._recorder.number(), chain.pages[:count]
        for row, page in enumerate(pages):
            self._rows[row] = bytes_of(page, number)
        return number, pages

    def _note_save(
        self,
        call: str,
        number: int,
        pages: tuple[int, ...],
        invoked: int,
        returned: int,
        told: tuple[int, int, int, int],
        *,
        had_deadline: bool = False,
    ) -> None:
        moves = self._watch.take_moves()
        for core in moves:
            self._wait(core)
        settled = self._recorder.stamp()
        claims: list[tuple[tuple[int, int], ...]] = []
        landed: list[tuple[int, ...]] = []
        for batch, begun in self._watch.take_claims():
            looked_at = min(len(batch.outcomes), batch.full_at)
            outcomes = batch.outcomes[:looked_at]
            moved = None if begun is None else core_transfer(begun)
            bits = iter([] if moved is None else moved.landed().tolist())
            for row in outcomes.tolist():
                kinds = tuple((tier, kind) for tier, kind in enumerate(row) if kind != ClaimOutcome.NONE)
                has_new = any(kind == ClaimOutcome.NEW for _, kind in kinds)
                mask = next(bits, 0) if has_new else 0
                claims.append(kinds)
                landed.append(tuple(tier for tier, kind in kinds if kind == ClaimOutcome.NEW and mask >> tier & 1))
        result = Saved(tuple(claims), tuple(landed), told, had_deadline)
        self._note(call, pages, invoked, returned, result, number, settled)

    def _match(self, chain: Chain, count: int) -> _Found:
        number, pages = self._recorder.number(), chain.pages[:count]
        invoked = self._recorder.stamp()
        match = self._store.match(chain.tokens[: count * PAGE_TOKENS], namespace=chain.namespace)
        returned = self._recorder.stamp()
        tiers = tuple(int(tier) for _, length, tier in match.spans for _ in range(length))
        self._note("match", pages, invoked, returned, Matched(tiers, match.epoch), number)
        return _Found(number, match, pages[: match.pages])

    def _load(self, found: _Found, *, deadline: float | None, closes: bool = False) -> None:
        """Load a match. closes: end it as soon as the load has begun."""
        order: Order = self._random.choice(["page", "layer"])
        self._rows[:] = 0xEE
        invoked = self._recorder.stamp()
        target = self._pool[: len(found.pages)]
        transfer = self._store.load(found.match, into=target, order=order, deadline=deadline)
        if closes:
            found.closing = self._recorder.stamp()
            found.match.close()
        if not transfer.wait(WAIT_SECONDS):
            raise TimeoutError(f"a load of {len(found.pages)} pages has not ended: {transfer!r}")
        ok = transfer.ok
        before = self._rows.copy()
        returned = self._recorder.stamp()
        found.moves += self._watch.take_moves()
        names = tuple("" if ok[i] else _core.Status(int(s)).name for i, s in enumerate(transfer.status))
        saves = tuple(save_of(page, before[row]) if ok[row] else NOTHING for row, page in enumerate(found.pages))
        if deadline is not None:  # whatever is still under way may not touch the memory any more
            for core in found.moves:
                self._wait(core)
        came_late = not np.array_equal(before, self._rows)
        loaded = Loaded(found.number, saves, names, deadline is not None, came_late)
        self._note("load", found.pages, invoked, returned, loaded)

    def _some_deadline(self) -> float | None:
        return self._random.choice([None, None, None, 0.0, 0.0005])

    def _release(self, found: _Found) -> None:
        invoked = self._recorder.stamp() if found.closing is None else found.closing
        found.match.close()
        for core in found.moves:
            self._wait(core)
        self._note("close", found.pages, invoked, self._recorder.stamp(), Released(found.number))

    def _read(self) -> None:
        found = self._match(*self._prefix())
        if found.pages:
            self._load(found, deadline=self._some_deadline(), closes=self._random.random() < 0.4)
        self._release(found)

    def _keep_match(self) -> None:
        if len(self._matches) < 2:
            self._matches.append(self._match(*self._prefix()))

    def _load_kept(self) -> None:
        if self._matches:
            found = self._random.choice(self._matches)
            if found.pages:
                self._load(found, deadline=self._some_deadline())

    def _release_kept(self) -> None:
        if self._matches:
            self._release(self._matches.pop(0))

    def _load_keys(self) -> None:
        chain, count = self._prefix()
        deadline = self._random.choice([None, None, 0.0005])
        self._rows[:] = 0xEE
        invoked = self._recorder.stamp()
        ok = self._store.load_keys(chain.keys[:count], into=self._pool[:count], deadline=deadline)
        before = self._rows.copy()
        returned = self._recorder.stamp()
        pages = chain.pages[:count]
        saves = tuple(save_of(page, before[row]) if ok[row] else NOTHING for row, page in enumerate(pages))
        self._note("load_keys", pages, invoked, returned, LoadedKeys(saves, deadline is not None), settled=None)

    def _probe(self) -> None:
        chain, count = self._prefix()
        lease = self._random.choice([0.0, 0.0, 0.0, 0.01])
        readahead = self._random.random() < 0.5
        invoked = self._recorder.stamp()
        found = self._store.probe(chain.keys[:count], lease=lease, readahead=readahead)
        returned = self._recorder.stamp()
        tiers = tuple(int(tier) for tier in found.tiers)
        self._note(
            "probe", chain.pages[:count], invoked, returned, Probed(tiers), settled=None, is_leased=lease > 0
        )

    def _pin(self) -> None:
        if len(self._pins) >= 2:
            return
        chain, count = self._prefix()
        number = self._recorder.number()
        invoked = self._recorder.stamp()
        pin = self._store.pin(chain.tokens[: count * PAGE_TOKENS], ttl=3600.0, namespace=chain.namespace)
        returned = self._recorder.stamp()
        kept = pin.tokens // PAGE_TOKENS
        # Until it has ended nobody knows how long it keeps what was on its way: it is written down then.
        pending = pin.pending // PAGE_TOKENS
        record = Record(number, self._thread, "pin", chain.pages[:count], invoked, returned, 0, Kept(kept, pending))
        self._pins.append((record, pin))

    def _unpin(self) -> None:
        if self._pins:
            self._end_pin(*self._pins.pop(0))

    def _end_pin(self, begun: Record, pin: Pinned) -> None:
        invoked = self._recorder.stamp()
        pin.close()
        returned = self._recorder.stamp()
        self.records.append(replace(begun, settled=returned))
        result = begun.result
        kept = begun.pages[: result.pages] if isinstance(result, Kept) else ()
        self._note("unpin", kept, invoked, returned, Unpinned(begun.number))

    def _forget(self) -> None:
        self._forget_chain(*self._prefix(), self._random.choice([0, 0, 1, 2]))

    def _forget_chain(self, chain: Chain, count: int, keep: int) -> None:
        invoked = self._recorder.stamp()
        copies = self._store.forget(
            chain.tokens[: count * PAGE_TOKENS], namespace=chain.namespace, keep=keep * PAGE_TOKENS
        )
        self._note("forget", chain.pages[:count], invoked, self._recorder.stamp(), Forgot(copies, keep))

    def _evict(self) -> None:
        tier = self._random.choice([Tier.HOST, Tier.SHARED, Tier.DISK])
        asked = self._random.randint(1, 8)
        invoked = self._recorder.stamp()
        copies = self._store.evict(tier, asked)
        self._note("evict", (), invoked, self._recorder.stamp(), Evicted(int(tier), asked, copies))

    def _clear(self) -> None:
        if self._random.random() < 0.3:
            invoked = self._recorder.stamp()
            copies = self._store.clear()
            self._note("clear", (), invoked, self._recorder.stamp(), Cleared(copies))

    def _verify(self) -> None:
        invoked = self._recorder.stamp()
        found = self._store.verify()
        self._note("verify", (), invoked, self._recorder.stamp(), Verified(found.pages, found.damaged))

    def _turn(self) -> None:
        epoch = self._random.randrange(EPOCHS)
        invoked = self._recorder.stamp()
        self._store.set_epoch(epoch)
        self._note("set_epoch", (), invoked, self._recorder.stamp(), Turned(epoch))

    def _flush(self) -> None:
        if not self._store.flush(WAIT_SECONDS):
            raise TimeoutError("flush has not ended")

    def look(self) -> None:
        """Read every page, by tokens and by keys, while nobody else does anything."""
        for chain in self._chains:
            found = self._match(chain, len(chain.pages))
            if found.pages:
                self._load(found, deadline=None)
            self._release(found)

    def forget(self) -> None:
        """Forget a chain, while nobody else does anything: the next life of the store must not find it."""
        self._forget_chain(self._chains[0], len(self._chains[0].pages), 0)

    # ---- writing down -----------------------------------------------------------------------------------------------

    def _note(
        self,
        call: str,
        pages: tuple[int, ...],
        invoked: int,
        returned: int,
        result: Result,
        number: int | None = None,
        settled: int | None = 0,
        *,
        is_leased: bool = False,
    ) -> None:
        """Write a call down. settled: its stamp; 0: that of the return; None: when what it began has ended."""
        number = self._recorder.number() if number is None else number
        record = Record(number, self._thread, call, pages, invoked, returned, settled or returned, result)
        if settled is None:
            self._open.append(_Open(record, self._watch.take_moves(), is_leased))
        else:
            self.records.append(record)

    def _settle(self) -> None:
        """Write down which of the calls that were open hold nothing any more."""
        for each in [each for each in self._open if not each.is_leased]:
            if all(core.done for core in each.moves):
                self._open.remove(each)
                self.records.append(replace(each.record, settled=self._recorder.stamp()))

    @staticmethod
    def _wait(core: _core.Transfer) -> None:
        if not core.wait(WAIT_SECONDS):
            raise TimeoutError("a transfer has not ended")
