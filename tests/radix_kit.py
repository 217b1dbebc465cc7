"""A sorted list of prefixes as the oracle of the tree of tokens, and an index driven beside it.

The list knows neither nodes nor ids. It keeps every page with a record as the tuple of all tokens up to its end: a
prefix stands directly before all that goes on from it, so that membership and children are a bisect each. Edges follow
from where they were cut: at a fork, and where a pin ended; a cut heals only when nothing follows it.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from stepwell import _core
from stepwell.testing import index_model as m

HOST, SHARED = 1, 2
TIERS = (HOST, SHARED)
SEEDS: tuple[bytes | None, ...] = (None, b"a" * 32, b"b" * 32)
BEYOND = 2**31  # sorts behind every token
NO_PAGE = 0xFFFFFFFF

Prefix = tuple[int, ...]
"""Epoch, namespace, then all tokens up to the end of a page; the first two alone are a root."""
Edge = tuple[int, ...]
Choose = Callable[[int], int]
"""Returns one of 0 .. n-1."""


@dataclass
class Page:
    """What is known of a page with a record."""

    resident: set[int] = field(default_factory=set)
    in_tree: bool = False
    linked: bool = False  # its parent is known, or that it has none
    placed: bool = False  # its depth is known


@dataclass
class Lease:
    prefix: Prefix
    spans: list[tuple[int, int, int]]  # first page, pages, tier


class SortedPrefixes:
    """Every page with a record, sorted by its tokens and all before them."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.order: list[Prefix] = []
        self.pages: dict[Prefix, Page] = {}
        self.cuts: set[Prefix] = set()  # pages at whose end their edge ends, although more follows in the tree
        self.leases: dict[int, Lease] = {}
        self.hashes: dict[Prefix, bytes] = {}

    # ---- the list ------------------------------------------------------------------------------

    def upto(self, prefix: Prefix, pages: int) -> Prefix:
        return prefix[: 2 + pages * self.page_tokens]

    def depth(self, prefix: Prefix) -> int:
        return (len(prefix) - 2) // self.page_tokens

    def parent(self, prefix: Prefix) -> Prefix:
        return prefix[: -self.page_tokens]

    def path(self, prefix: Prefix) -> list[Prefix]:
        return [self.upto(prefix, i + 1) for i in range(self.depth(prefix))]

    def find(self, prefix: Prefix) -> Page | None:
        at = bisect_left(self.order, prefix)
        return self.pages[prefix] if at < len(self.order) and self.order[at] == prefix else None

    def find_or_create(self, prefix: Prefix) -> Page:
        if self.find(prefix) is None:
            insort(self.order, prefix)
            self.pages[prefix] = Page()
        return self.pages[prefix]

    def children(self, prefix: Prefix) -> Iterator[Prefix]:
        """Yield the pages one deeper: all that begins alike stands together, one run for each next page."""
        at = bisect_right(self.order, prefix)
        while at < len(self.order) and self.order[at][: len(prefix)] == prefix:
            group = self.order[at][: len(prefix) + self.page_tokens]
            if self.order[at] == group:
                yield group
            at = bisect_left(self.order, (*group, BEYOND))

    def goes_on(self, prefix: Prefix) -> bool:
        return any(self.pages[child].in_tree for child in self.children(prefix))

    def key(self, prefix: Prefix) -> bytes:
        """Return the prefix hash, by hashlib."""
        known = self.hashes.get(prefix)
        if known is None:
            before = self.parent(prefix)
            prior = (SEEDS[prefix[1]] or b"") if self.depth(before) == 0 else self.key(before)
            tokens = struct.pack(f"<{self.page_tokens}I", *prefix[-self.page_tokens :])
            known = self.hashes[prefix] = hashlib.sha256(prior + tokens).digest()
        return known

    # ---- what comes ----------------------------------------------------------------------------

    def attach(self, prefix: Prefix) -> None:
        """Put a page with its tokens behind the page before it, which is in the tree."""
        page, before = self.find_or_create(prefix), self.parent(prefix)
        if page.in_tree:
            return
        if self.depth(before) > 0 and (self.goes_on(before) or self.is_edge_pinned(before)):
            self.cuts.add(before)
        page.in_tree = page.linked = page.placed = True

    def try_link(self, prefix: Prefix) -> bool:
        """Learn that the page before it is its parent, where depths allow to be sure of that."""
        page, parent = self.pages[prefix], self.pages[self.parent(prefix)]
        if page.linked:
            return True
        if page.placed and not parent.placed:
            if parent.linked:
                return False
            parent.placed = True
        page.placed = page.placed or parent.placed
        page.linked = True
        return True

    def sweep(self, prefix: Prefix) -> None:
        """Drop a page that is resident nowhere and has no known child; then its parent may be one."""
        while self.depth(prefix) > 0:
            page, before = self.find(prefix), self.parent(prefix)
            if page is None or page.resident or any(self.pages[child].linked for child in self.children(prefix)):
                return
            del self.order[bisect_left(self.order, prefix)]
            del self.pages[prefix]
            if not self.goes_on(before):
                self.cuts.discard(before)
            if not page.linked:
                return
            prefix = before

    def leave(self, prefix: Prefix, tier: int) -> None:
        self.pages[prefix].resident.remove(tier)
        self.sweep(prefix)

    # ---- what is asked -------------------------------------------------------------------------

    def spans(self, prefix: Prefix, usable: int) -> list[tuple[int, int, int]]:
        """Return the leading run of pages that are resident, by the fastest usable tier of each."""
        spans: list[tuple[int, int, int]] = []
        for depth, step in enumerate(self.path(prefix)):
            page = self.find(step)
            tiers = [tier for tier in TIERS if usable >> tier & 1 and page is not None and tier in page.resident]
            if not tiers:
                break
            if spans and spans[-1][2] == tiers[0]:
                spans[-1] = (spans[-1][0], spans[-1][1] + 1, tiers[0])
            else:
                spans.append((depth, 1, tiers[0]))
        return spans

    def pin(self, lease: int, prefix: Prefix, spans: list[tuple[int, int, int]]) -> None:
        self.leases[lease] = Lease(prefix, spans)
        for first, pages, _ in spans:
            self.cut(prefix, first)
            self.cut(prefix, first + pages)

    def cut(self, prefix: Prefix, depth: int) -> None:
        place = self.upto(prefix, depth)
        if depth > 0 and self.goes_on(place):
            self.cuts.add(place)

    def shorten(self, lease: int, pages: int) -> None:
        held = self.leases[lease]
        if pages < sum(n for _, n, _ in held.spans):
            self.cut(held.prefix, pages)
        held.spans = [(first, min(n, pages - first), tier) for first, n, tier in held.spans if first < pages]

    def is_pinned(self, prefix: Prefix, tier: int) -> bool:
        depth = self.depth(prefix) - 1
        return any(
            lease.prefix[: len(prefix)] == prefix
            and any(first <= depth < first + pages and t == tier for first, pages, t in lease.spans)
            for lease in self.leases.values()
        )

    def is_edge_pinned(self, prefix: Prefix) -> bool:
        return any(self.is_pinned(prefix, tier) for tier in TIERS)

    def edges(self) -> list[Edge]:
        """Return (epoch, namespace, first page, pages, pages in and below, residents by tier, parent's first page)."""
        below: dict[Prefix, int] = {}
        for prefix in reversed(self.order):  # what goes on from a prefix first
            if self.pages[prefix].in_tree:
                below[prefix] = below.get(prefix, 0) + 1
                before = self.parent(prefix)
                below[before] = below.get(before, 0) + below[prefix]
        starts: dict[Prefix, Prefix] = {}  # of the edge that a page lies on
        on_edge: dict[Prefix, list[Prefix]] = {}
        for prefix in self.order:  # a prefix before what goes on from it
            if not self.pages[prefix].in_tree:
                continue
            before = self.parent(prefix)
            is_first = self.depth(before) == 0 or before in self.cuts
            starts[prefix] = prefix if is_first else starts[before]
            on_edge.setdefault(starts[prefix], []).append(prefix)
        found = []
        for start, pages in on_edge.items():
            residents = [sum(tier in self.pages[page].resident for page in pages) for tier in range(m.TIERS)]
            before = self.parent(start)
            upper = self.depth(starts[before]) - 1 if before in starts else -1
            first = self.depth(start) - 1
            found.append((start[0], start[1], first, len(pages), below[start], *residents, upper))
        return sorted(found)


class Pair:
    """An index and the sorted list, driven together.

    Invariant: after each step they have the same pages, pins and edges.
    """

    def __init__(self, page_tokens: int) -> None:
        self.log: list[str] = []
        self.list = SortedPrefixes(page_tokens)
        self.index = _core.Index(page_tokens)
        self.spaces = [self.index.open_namespace(seed) for seed in SEEDS]
        assert self.spaces == list(range(len(SEEDS)))
        self.epoch = 0
        self.next_range = 1_000_000
        for tier in TIERS:
            self.index.add_slots(tier, 0, 20_000)

    # ---- choosing ------------------------------------------------------------------------------

    def chain(self, choose: Choose) -> Prefix:
        """Choose tokens: some that are known, cut anywhere, inside a page too, and others behind them."""
        root: Prefix = (self.epoch, choose(len(SEEDS)))
        known = [prefix for prefix in self.list.order if prefix[0] == self.epoch]
        if known and choose(8) > 0:
            base = known[choose(len(known))]
            root = base[: len(base) - choose(4)] if choose(2) == 0 and len(base) > 5 else base
            root = root[: 2 + choose(len(root) - 1)] if choose(3) == 0 else root
        tail = [choose(2) for _ in range(choose(3 * self.list.page_tokens + 1))]
        # The tree compares 64 pages at a time, and looks up what is known by key alone 32, 64, ... at a time.
        many = (17, 31, 63, 65, 130)[choose(5)] if choose(40) == 39 and len(self.list.order) < 150 else 0
        return (*root, *tail, *(len(tail) % 2,) * (many * self.list.page_tokens))

    def tiers(self, choose: Choose) -> int:
        return (6, 2, 4)[choose(3)]

    def tokens(self, prefix: Prefix) -> np.ndarray:
        return np.array(prefix[2:], np.int32)

    def whole(self, prefix: Prefix) -> Prefix:
        return self.list.upto(prefix, self.list.depth(prefix))

    def keys(self, prefixes: list[Prefix]) -> np.ndarray:
        joined = b"".join(self.list.key(prefix) for prefix in prefixes)
        return np.frombuffer(joined, np.uint8).reshape(len(prefixes), 32)

    def prefix_of(self, page: int) -> Prefix:
        """Return the tokens of the page with this id, from its key."""
        key, _, _, _, _, epoch = self.index.labels(np.array([page], np.uint32))[0]
        by_key = {(prefix[0], self.list.key(prefix)): prefix for prefix in self.list.order}
        return by_key[(epoch, key)]

    def settle(self, batch: _core.ClaimBatch, path: list[Prefix], tiers: int, kept: int, backwards: bool) -> None:
        """Commit what was claimed of the first `kept` pages, abort the rest; compare what the claim said."""
        assert batch.full_at == NO_PAGE
        rows = list(range(len(path)))
        for row in reversed(rows) if backwards else rows:
            for tier in TIERS:
                if not tiers >> tier & 1:
                    assert batch.outcomes[row, tier] == m.NONE
                    continue
                page = self.list.pages[path[row]]
                is_new = tier not in page.resident
                assert batch.outcomes[row, tier] == (m.NEW if is_new else m.PRESENT)
                if is_new:
                    call = self.index.commit if row < kept else self.index.abort
                    assert call(int(batch.pages[row]), tier, int(batch.numbers[row, tier])) == _core.Status.ok
                    if row < kept:
                        page.resident.add(tier)
        self.index.unpin_pages(batch.pages[(batch.outcomes == m.NEW).any(axis=1)])
        for prefix in path:
            self.list.sweep(prefix)

    # ---- steps ---------------------------------------------------------------------------------

    def save(self, choose: Choose) -> None:
        """Save the pages of some tokens from any page on; the rest of them never arrives."""
        tokens, tiers = self.chain(choose), self.tiers(choose)
        path = self.list.path(self.whole(tokens))
        first = choose(len(path) + 1) if choose(3) == 0 else 0
        batch = self.index.claim_absent(tokens[1], self.tokens(tokens), self.keys(path), first, len(path), tiers)
        if first == len(path):
            return
        for prefix in path:
            self.list.attach(prefix)
        kept = len(path) - first - (choose(len(path) - first + 1) if choose(3) == 0 else 0)
        self.settle(batch, path[first:], tiers, kept, choose(2) == 0)

    def save_by_key(self, choose: Choose) -> None:
        """Save pages by their keys alone: they have no tokens until a query brings them."""
        path = self.list.path(self.whole(self.chain(choose)))
        first = choose(len(path) + 1)
        if first == len(path):
            return
        tiers = self.tiers(choose)
        state = m.UNKNOWN if choose(3) == 0 else m.KNOWN if first > 0 else m.ROOT
        parent = self.list.key(path[first - 1]) if state == m.KNOWN else b""
        batch = self.index.claim_absent_keys(self.keys(path[first:]), 1, state, parent, tiers)
        if state == m.KNOWN:
            self.list.find_or_create(path[first - 1])
        for row, prefix in enumerate(path[first:]):
            page = self.list.find_or_create(prefix)
            if row > 0 or state == m.KNOWN:
                self.list.try_link(prefix)
            elif state == m.ROOT:
                page.linked = page.placed = True
        kept = len(path) - first - (choose(len(path) - first + 1) if choose(3) == 0 else 0)
        self.settle(batch, path[first:], tiers, kept, choose(2) == 0)
        if first > 0:
            self.list.sweep(path[first - 1])

    def recover(self, choose: Choose) -> None:
        """Take over the pages of a volume: keys, parents' keys and depths, no tokens."""
        path = self.list.path(self.whole(self.chain(choose)))
        first = choose(len(path) + 1)
        rows = path[first:][::-1] if choose(3) == 0 else path[first:]
        tier, is_parent_known = TIERS[choose(2)], choose(3) > 0
        if not rows:
            return
        slots = np.arange(self.next_range, self.next_range + len(rows), dtype=np.uint32)
        self.index.add_slots(tier, self.next_range, len(rows), closed=True)
        self.next_range += 1000
        states = [m.UNKNOWN if not is_parent_known else m.KNOWN if self.list.depth(r) > 1 else m.ROOT for r in rows]
        parents = [self.list.key(self.list.parent(r)) if states[i] == m.KNOWN else b"" for i, r in enumerate(rows)]
        accepted = recover(
            self.index, tier, slots, [self.list.key(r) for r in rows], parents, states,
            [self.list.depth(r) - 1 for r in rows], self.epoch,
        )  # fmt: skip
        expected = [(p := self.list.find(r)) is None or tier not in p.resident for r in rows]
        assert accepted == expected
        taken = [(r, s) for r, s, ok in zip(rows, states, accepted, strict=True) if ok]
        for prefix, _ in taken:
            self.list.find_or_create(prefix).resident.add(tier)
        for prefix, state in taken:
            page = self.list.pages[prefix]
            if page.linked or state == m.UNKNOWN:
                continue
            if state == m.ROOT:
                page.linked = page.placed = True
                continue
            if not any(self.list.pages[child].linked for child in self.list.children(prefix)):
                page.placed = True
            self.list.find_or_create(self.list.parent(prefix))
            self.list.try_link(prefix)
            self.list.sweep(self.list.parent(prefix))

    def match(self, choose: Choose) -> None:
        """Match and pin; what was known by key alone enters the tree with the tokens of the query."""
        tokens, usable = self.chain(choose), self.tiers(choose)
        spans = self.list.spans(tokens, usable)
        pages = sum(n for _, n, _ in spans)
        assert self.index.match_length(tokens[1], self.tokens(tokens), usable) == (pages, 0)
        got = self.index.match_and_pin(tokens[1], self.tokens(tokens), usable)
        assert (got.pages, got.pending, got.spans) == (pages, 0, spans)
        assert got.miss == (m.MISS_NONE if pages == self.list.depth(tokens) else m.MISS_ABSENT)
        prefix = self.list.upto(tokens, pages)
        for step in self.list.path(prefix):
            self.list.attach(step)
        if pages == 0:
            return
        ids, tiers, _ = self.index.lease_pages(got.lease, 0, pages)
        found = [label[0] for label in self.index.labels(ids)]
        assert found == [self.list.key(step) for step in self.list.path(prefix)]
        assert tiers.tolist() == [tier for _, n, tier in spans for _ in range(n)]
        self.list.pin(got.lease, prefix, spans)

    def look(self, choose: Choose) -> None:
        tokens, usable = self.chain(choose), self.tiers(choose)
        pages = sum(n for _, n, _ in self.list.spans(tokens, usable))
        assert self.index.match_length(tokens[1], self.tokens(tokens), usable) == (pages, 0)

    def release(self, choose: Choose) -> None:
        if not self.list.leases:
            return
        lease = sorted(self.list.leases)[choose(len(self.list.leases))]
        assert self.index.release(lease)
        del self.list.leases[lease]

    def shorten(self, choose: Choose) -> None:
        if not self.list.leases:
            return
        lease = sorted(self.list.leases)[choose(len(self.list.leases))]
        pages = choose(self.list.depth(self.list.leases[lease].prefix) + 1)
        self.index.shorten(lease, pages)
        self.list.shorten(lease, pages)

    def evict(self, choose: Choose) -> None:
        self.evict_from(TIERS[choose(2)], (1, 1, 2, 5, 100)[choose(5)])

    def evict_from(self, tier: int, n: int) -> None:
        """Take out pages of one tier: none that is pinned, and none before a page that goes on from it."""
        ids, slots, numbers = self.index.claim_victims(tier, n)
        victims = [self.prefix_of(int(page)) for page in ids]
        may_leave = {
            prefix
            for prefix in self.list.order
            if tier in self.list.pages[prefix].resident and not self.list.is_pinned(prefix, tier)
        }
        assert len(victims) == min(n, len(may_leave))
        gone: set[Prefix] = set()
        for prefix in victims:
            assert prefix in may_leave - gone
            below = [prefix]
            while below:
                deeper = [c for p in below for c in self.list.children(p) if self.list.pages[c].linked]
                assert not (set(deeper) & may_leave) - gone, "a page left before one that goes on from it"
                below = deeper
            gone.add(prefix)
        self.finish(tier, victims, ids, slots, numbers)

    def forget(self, choose: Choose) -> None:
        """Take out a chain past some of its pages: those that are not pinned, in the middle and behind a gap too."""
        tokens, tiers = self.chain(choose), self.tiers(choose)
        keep = choose(self.list.depth(tokens) + 1)
        chain = list(self.list.path(tokens))
        got = self.index.claim_chain(tokens[1], self.tokens(tokens), keep, tiers)
        for tier in TIERS:
            expected = [
                step
                for step in chain[keep:]
                if tiers >> tier & 1
                and self.list.find(step) is not None  # also behind one that is not there
                and tier in self.list.pages[step].resident
                and not self.list.is_pinned(step, tier)
            ]
            ids, slots, numbers = got[tier]
            assert [self.prefix_of(int(page)) for page in ids] == expected[::-1]
            got[tier] = (expected[::-1], ids, slots, numbers)
        for tier in TIERS:
            self.finish(tier, *got[tier])

    def damage(self, choose: Choose) -> None:
        """Lose one page anywhere, by damage that is mended."""
        tier = TIERS[choose(2)]
        there = [
            prefix
            for prefix in self.list.order
            if prefix[0] == self.epoch
            and tier in self.list.pages[prefix].resident
            and not self.list.is_pinned(prefix, tier)
        ]
        if not there:
            return
        prefix = there[choose(len(there))]
        found = self.index.match_keys_and_pin(self.keys([prefix]), 1, 1 << tier)
        [page], _, [slot] = self.index.lease_pages(found.lease, 0, 1)
        self.index.release(found.lease)
        assert self.index.quarantine(int(page), tier, int(slot))
        ids, slots, numbers = self.index.claim_quarantined(tier, 10)
        assert (ids.tolist(), slots.tolist()) == ([page], [slot])
        assert self.index.mend(int(page), tier, int(numbers[0]), True) == _core.Status.ok
        self.index.free_slots(tier, slots)
        self.list.leave(prefix, tier)

    def set_epoch(self, choose: Choose) -> None:
        epoch = choose(3) if choose(4) == 0 else self.epoch
        self.index.set_epoch(epoch)
        self.epoch = epoch

    def finish(
        self, tier: int, prefixes: list[Prefix], ids: np.ndarray, slots: np.ndarray, numbers: np.ndarray
    ) -> None:
        assert not self.index.finish_many(ids, tier, numbers).any()
        self.index.free_slots(tier, slots)
        for prefix in prefixes:
            self.list.leave(prefix, tier)

    # ---- comparing -----------------------------------------------------------------------------

    STEPS = (
        save, save, save, save_by_key, save_by_key, recover, recover, match, match, match, match, look,
        release, shorten, evict, forget, forget, damage, set_epoch,
    )  # fmt: skip

    def step(self, choose: Choose) -> None:
        action = self.STEPS[choose(len(self.STEPS))]
        self.log.append(action.__name__)
        action(self, choose)
        self.compare()

    def compare(self) -> None:
        assert self.index.check() == ""
        assert self.index.pages() == len(self.list.order)
        assert self.index.leases() == len(self.list.leases)
        for tier in TIERS:
            counts = self.index.counts(tier)
            there = [p for p in self.list.order if tier in self.list.pages[p].resident]
            assert counts["resident"] == len(there)
            assert counts["pinned"] == sum(self.list.is_pinned(p, tier) for p in there)
        edges = self.list.edges()
        assert edges_of(self.index) == edges
        assert self.index.nodes() == len(edges)

    def drain(self) -> None:
        """End and evict everything; then the tree is what it was."""
        for lease in self.list.leases:
            assert self.index.release(lease)
        self.list.leases.clear()
        for tier in TIERS:
            self.evict_from(tier, 100_000)
        assert not self.list.order
        assert (self.index.pages(), self.index.nodes()) == (0, 0)
        self.compare()


def edges_of(index: _core.Index) -> list[Edge]:
    parents, spaces, epochs, firsts, pages, below, residents, *_ = index.tree(1 << 30)
    rows = zip(parents, spaces, epochs, firsts, pages, below, residents, strict=True)
    return sorted(
        (int(epoch), int(space), int(first), int(n), int(under), *map(int, there), int(firsts[up]) if up >= 0 else -1)
        for up, space, epoch, first, n, under, there in rows
    )


def recover(
    index: _core.Index,
    tier: int,
    slots: np.ndarray,
    keys: list[bytes],
    parents: list[bytes],
    states: list[int],
    depths: list[int],
    epoch: int,
) -> list[bool]:
    """Give the index the records of a volume; return which it took."""
    n = len(keys)

    def columns(of: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        padded = np.frombuffer(b"".join(key.ljust(64, b"\0") for key in of), np.uint8).reshape(n, 64)
        return padded, np.array([len(key) for key in of], np.uint8)

    accepted = index.recover(
        tier, slots, *columns(keys), *columns(parents), np.array(states, np.uint8), np.array(depths, np.uint32),
        np.ones(n, np.uint8), np.full(n, epoch, np.uint64), np.arange(1, n + 1, dtype=np.uint64),
    )  # fmt: skip
    return [bool(took) for took in accepted]
