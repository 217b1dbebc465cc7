"""Say what the index must do: residency, claims, pins, rank, epochs and slots in plain dicts.

This is the specification. It is slow, has no tree and no threads, and defers nothing; what it says,
`csrc/index.cc` must do. Names, not ids: a page is (key, kind, epoch). Which slot, id or number a
claim gets is the index's choice, so the model is told (`Grant`), and raises `ModelError` where the
choice was not free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TIERS = 4
ABSENT, ARRIVING, RESIDENT, LEAVING, QUARANTINED = range(5)
NONE, NEW, PENDING, PRESENT, FULL, REFUSED = range(6)
MISS_NONE, MISS_ABSENT, MISS_PENDING, MISS_QUARANTINED, MISS_POISONED = range(5)
ROOT, KNOWN, UNKNOWN = range(3)
KV = 1
NO_TIER = 255
NOT_FULL = 0xFFFFFFFF

# move: (from, to). The same table as csrc/residency.h.
MOVES: dict[str, tuple[int, int]] = {
    "claim": (ABSENT, ARRIVING),
    "commit": (ARRIVING, RESIDENT),
    "abort": (ARRIVING, ABSENT),
    "claim_victim": (RESIDENT, LEAVING),
    "finish": (LEAVING, ABSENT),
    "keep": (LEAVING, RESIDENT),
    "quarantine": (RESIDENT, QUARANTINED),
    "mend": (QUARANTINED, ABSENT),
}


class ModelError(AssertionError):
    """The index chose what it may not: a slot that is not free, a move that is not legal."""


class PageName(NamedTuple):
    """What identifies a page."""

    key: bytes
    kind: int
    epoch: int


class Grant(NamedTuple):
    """What the index gave a claim."""

    page: int
    slot: int
    number: int


GrantOf = Callable[[int, int], Grant]
"""Row and tier of a claim -> what the index gave."""


@dataclass(slots=True)
class Page:
    """One record. Invariant: it lives while it is somewhere, pinned, or a parent."""

    name: PageName
    id: int | None = None
    parent: PageName | None = None
    parent_state: int = UNKNOWN
    depth: int | None = None
    residency: list[int] = field(default_factory=lambda: [ABSENT] * TIERS)
    slot: list[int | None] = field(default_factory=lambda: [None] * TIERS)
    number: list[int] = field(default_factory=lambda: [0] * TIERS)
    handed_out: list[bool] = field(default_factory=lambda: [False] * TIERS)
    claim_pins: int = 0
    holds: int = 0
    lease_pins: int = 0  # page by page, all tiers
    tier_pins: list[int] = field(default_factory=lambda: [0] * TIERS)

    def is_pinned(self, tier: int) -> bool:
        """Say whether the page must stay in `tier`."""
        return self.claim_pins + self.lease_pins + self.tier_pins[tier] > 0


@dataclass(slots=True)
class TierSlots:
    """The slots of one tier. Invariant: each is free, private, returning, owed, or one page's."""

    ranges: dict[int, int] = field(default_factory=dict)  # first -> count
    closed: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    private: set[int] = field(default_factory=set)
    returning: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)  # their records could not be retired
    rank: list[PageName] = field(default_factory=list)  # first to leave first
    staying: list[PageName] = field(default_factory=list)  # last copies of held pages

    def range_of(self, slot: int) -> int:
        """Return the first slot of the range that `slot` lies in."""
        return next(first for first, count in self.ranges.items() if first <= slot < first + count)

    def claimable(self) -> int:
        """Count the free slots of open ranges."""
        return sum(self.range_of(slot) not in self.closed for slot in self.free)

    def take(self, slot: int) -> None:
        """Take a free slot that the index chose."""
        if slot not in self.free or self.range_of(slot) in self.closed:
            raise ModelError(f"slot {slot} was given and is not free")
        self.free.remove(slot)


@dataclass(slots=True)
class Lease:
    """Pins that end together: (page, tier) in order; from `whole_from` on each holds its page in all tiers."""

    pins: list[tuple[PageName, int]]
    whole_from: int
    owners: int = 1


@dataclass(slots=True)
class Hold:
    """A pin by time, over the chain of pages that ends with `end`."""

    end: PageName
    owners: int = 1


class Held(NamedTuple):
    """What a hold must say."""

    pages: int
    pending: int
    added: int
    held: int
    refused: bool


@dataclass(slots=True)
class Matched:
    """What a match must say."""

    pages: int
    pending: int
    miss: int
    spans: list[tuple[int, int, int]]
    pins: list[tuple[PageName, int]]


class Claimed(NamedTuple):
    """What a claim must say."""

    outcomes: list[list[int]]
    full_at: int


def prefix_hashes(seed: bytes | None, tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Hash each full page of `tokens` on top of the one before."""
    keys: list[bytes] = []
    prior = seed or b""
    for first in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = b"".join(int(t).to_bytes(4, "little") for t in tokens[first : first + page_tokens])
        prior = hashlib.sha256(prior + page).digest()
        keys.append(prior)
    return keys


def bits(tiers: int) -> list[int]:
    """List the tiers of a mask."""
    return [tier for tier in range(TIERS) if tiers >> tier & 1]


class IndexModel:
    """The index as a dict of pages.

    Invariant: after every call, per tier, free + arriving + resident + leaving + quarantined =
    capacity; the rank holds exactly the resident pages; of two resident pages of one chain the
    ancestor leaves later.
    """

    def __init__(self) -> None:
        self.pages: dict[PageName, Page] = {}
        self.tiers = [TierSlots() for _ in range(TIERS)]
        self.leases: dict[int, Lease] = {}
        self.epoch = 0
        self.is_poisoned = False
        self.keeping: tuple[int, ...] = (2, 3)
        self.holds: dict[int, Hold] = {}
        self.courtesies: dict[PageName, float] = {}  # until when; the oldest first
        self.allowed = [1 << 62] * TIERS

    # ---- slots ---------------------------------------------------------------------------------

    def add_slots(self, tier: int, first: int, count: int) -> None:
        """Add a range of free slots."""
        self.tiers[tier].ranges[first] = count
        self.tiers[tier].free.update(range(first, first + count))

    def close_slots(self, tier: int, first: int) -> None:
        """Give out no slot of the range from now on."""
        self.tiers[tier].closed.add(first)

    def drop_slots(self, tier: int, first: int) -> int:
        """Remove the range if all its slots are free; return how many are not."""
        slots = self.tiers[tier]
        members = set(range(first, first + slots.ranges[first]))
        used = len(members - slots.free)
        if used == 0:
            slots.free -= members
            del slots.ranges[first]
            slots.closed.discard(first)
        return used

    def counts(self, tier: int) -> dict[str, int]:
        """Count the slots of a tier by what they are."""
        slots = self.tiers[tier]
        by_residency = [0] * 5
        pinned = 0
        for page in self.pages.values():
            by_residency[page.residency[tier]] += 1
            pinned += page.residency[tier] == RESIDENT and page.is_pinned(tier)
        return {
            "capacity": sum(slots.ranges.values()),
            "free": len(slots.free),
            "arriving": by_residency[ARRIVING] + len(slots.private),
            "resident": by_residency[RESIDENT],
            "leaving": by_residency[LEAVING] + len(slots.returning) + len(slots.owed),
            "quarantined": by_residency[QUARANTINED],
            "pinned": pinned,
            "held": len(slots.staying),
            "owed": len(slots.owed),
        }

    # ---- moves, rank, records ------------------------------------------------------------------

    def _move(self, page: Page, tier: int, move: str) -> None:
        source, target = MOVES[move]
        if page.residency[tier] != source:
            raise ModelError(f"{move} of a page in residency {page.residency[tier]}")
        page.residency[tier] = target
        if source == RESIDENT:
            self._order_of(page, tier).remove(page.name)
        if target == RESIDENT:
            self._enter_rank(page, tier)
        self._settle(page)

    def ancestors(self, page: Page) -> Iterable[Page]:
        """Yield the pages before `page` in its chain, nearest first, as far as they are known."""
        while page.parent is not None:
            page = self.pages[page.parent]
            yield page

    def _children(self, name: PageName) -> int:
        return sum(page.parent == name for page in self.pages.values())

    def _enter_rank(self, page: Page, tier: int) -> None:
        """Rank as just used, but never above an ancestor; what no match can reach leaves first."""
        rank = self.tiers[tier].rank
        is_old = page.name.epoch != self.epoch
        parent = self.pages[page.parent] if page.parent is not None else None
        is_cut_off = parent is not None and not any(parent.residency)
        old_pages = sum(name.epoch != self.epoch for name in rank)  # they come first
        if (is_old or is_cut_off) and self._children(page.name) == 0:
            rank.insert(0 if is_old else old_pages, page.name)
            return
        for ancestor in self.ancestors(page):
            if ancestor.name in rank:
                rank.insert(rank.index(ancestor.name), page.name)
                return
        rank.insert(old_pages if is_old else len(rank), page.name)

    def touch(self, page: Page) -> None:
        """Use a path again: from tail to head, so that an ancestor leaves after its descendants."""
        if page.name.epoch != self.epoch:
            return
        for used in (page, *self.ancestors(page)):
            for tier in range(TIERS):
                if used.residency[tier] == RESIDENT:
                    order = self._order_of(used, tier)
                    order.remove(used.name)
                    order.append(used.name)

    def _drop_if_dead(self, page: Page | None) -> None:
        while page is not None and page.name in self.pages:
            is_pinned = page.claim_pins + page.lease_pins + page.holds > 0
            if any(page.residency) or is_pinned or self._children(page.name) > 0:
                return
            del self.pages[page.name]
            page = self.pages[page.parent] if page.parent is not None else None

    def _find(self, key: bytes, kind: int = KV) -> Page | None:
        return self.pages.get(PageName(key, kind, self.epoch))

    def _find_or_create(self, name: PageName) -> Page:
        return self.pages.setdefault(name, Page(name))

    def _by_id(self, page_id: int) -> Page | None:
        return next((page for page in self.pages.values() if page.id == page_id), None)

    def _try_link(self, page: Page, parent: Page) -> bool:
        """Link a page of unknown parent, where depths allow it and no cycle arises."""
        if page.parent_state != UNKNOWN:
            return page.parent == parent.name
        if page is parent:
            return False
        if page.depth is not None and parent.depth is not None:
            if page.depth != parent.depth + 1:
                return False
        elif page.depth is not None:
            if page.depth == 0 or parent.parent_state != UNKNOWN:
                return False
            parent.depth = page.depth - 1
        elif parent.depth is not None:
            page.depth = parent.depth + 1
        elif page in self.ancestors(parent):
            return False
        page.parent, page.parent_state = parent.name, KNOWN
        return True

    def _put_on_path(self, keys: Sequence[bytes], depth: int) -> Page:
        """Make page `depth` of a chain given by tokens known with its parent and depth."""
        page = self._find_or_create(PageName(keys[depth], KV, self.epoch))
        page.depth = depth
        if depth == 0:
            page.parent_state = ROOT
        else:
            page.parent, page.parent_state = PageName(keys[depth - 1], KV, self.epoch), KNOWN
        return page

    # ---- epochs --------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make pages of other epochs misses that leave first."""
        if epoch == self.epoch:
            return
        for hold in sorted(self.holds, key=lambda hold: hold & 0xFFFFFFFF):
            self._end_hold(hold)
        for name in list(self.courtesies):
            self._end_courtesy(name)
        self.epoch = epoch
        for slots in self.tiers:
            slots.rank.sort(key=lambda name: name.epoch == epoch)

    # ---- match ---------------------------------------------------------------------------------

    @staticmethod
    def _standing(page: Page | None, usable: int) -> tuple[int | None, int]:
        """Return (fastest usable tier or None, the worst reason why not)."""
        if page is None:
            return None, MISS_ABSENT
        for wanted in (RESIDENT, LEAVING):
            for tier in bits(usable):
                if page.residency[tier] == wanted:
                    return tier, MISS_NONE
        states = {page.residency[tier] for tier in bits(usable)}
        if ARRIVING in states:
            return None, MISS_PENDING
        return None, MISS_QUARANTINED if QUARANTINED in states else MISS_ABSENT

    def look(self, keys: Sequence[bytes], usable: int, kind: int = KV) -> Matched:
        """Say what a match of the chain would find, without making it."""
        if self.is_poisoned:
            return Matched(0, 0, MISS_POISONED, [], [])
        found = Matched(0, 0, MISS_NONE, [], [])
        for key in keys:
            page = self._find(key, kind)
            tier, miss = self._standing(page, usable)
            if found.miss == MISS_NONE and tier is not None and page is not None:
                if found.spans and found.spans[-1][2] == tier:
                    first, pages, _ = found.spans[-1]
                    found.spans[-1] = (first, pages + 1, tier)
                else:
                    found.spans.append((found.pages, 1, tier))
                found.pins.append((page.name, tier))
                found.pages += 1
                continue
            if found.miss == MISS_NONE:
                found.miss = miss
            if found.miss != MISS_PENDING or (tier is None and miss != MISS_PENDING):
                break
            found.pending += 1
        return found

    def _keep_leaving(self, pins: Sequence[tuple[PageName, int]]) -> None:
        for name, tier in reversed(pins):
            if self.pages[name].residency[tier] == LEAVING:
                self._move(self.pages[name], tier, "keep")

    def match(self, keys: Sequence[bytes], usable: int, lease: int) -> Matched:
        """Pin the longest usable prefix of a chain given by tokens, tier by tier."""
        found = self.look(keys, usable)
        if found.pages == 0:
            return found
        for depth in range(found.pages):
            self._put_on_path(keys, depth)
        self._keep_leaving(found.pins)
        for name, tier in found.pins:
            self.pages[name].tier_pins[tier] += 1
        self.leases[lease] = Lease(found.pins[:], whole_from=found.pages)
        self.touch(self.pages[found.pins[-1][0]])
        return found

    def match_keys(self, keys: Sequence[bytes], kind: int, usable: int, lease: int) -> Matched:
        """Pin the longest usable run of keys, page by page."""
        found = self.look(keys, usable, kind)
        names = [name for name, _ in found.pins]
        for name, tier in found.pins:
            if self.pages[name].residency[tier] == LEAVING:
                self._move(self.pages[name], tier, "keep")
            self.pages[name].lease_pins += 1
        for place, name in enumerate(names):
            if place + 1 == len(names) or self.pages[names[place + 1]].parent != name:
                self.touch(self.pages[name])
        if found.pages:
            self.leases[lease] = Lease(found.pins[:], whole_from=0)
        return found

    def extend(
        self,
        found: Matched,
        lease: int,
        chain: Sequence[bytes],
        kind: int,
        offered: Sequence[int],
        usable: int,
        staging: int,
        grant: GrantOf,
        *,
        by_tokens: bool,
    ) -> tuple[Matched, list[int]]:
        """Take a match further along the rest of its chain: what is usable, arriving in `staging`, or offered and then
        claimed there.

        Args:
            lease: the match's, or the number of the one that is made.

        Returns:
            What the match says now, and a row's outcome each.
        """
        outcomes = [NONE] * len(offered)
        if self.is_poisoned or not offered:
            return found, outcomes
        longer = Matched(found.pages, 0, MISS_ABSENT, found.spans[:], found.pins[:])
        last: Page | None = None
        for row, key in enumerate(chain[found.pages :]):
            page = self._find(key, kind)
            if page is None and not (offered[row] and self.tiers[staging].claimable()):
                break
            if by_tokens:
                page = last = self._put_on_path(chain, found.pages + row)
            else:
                page = page or self._find_or_create(PageName(key, kind, self.epoch))
            outcomes[row], tier = self._extend_row(page, longer, row, offered[row], usable, staging, grant)
            if outcomes[row] == NONE:
                if not by_tokens:
                    self._drop_if_dead(page)
                break
            page.lease_pins += 1
            longer.pins.append((page.name, tier))
            if longer.spans and longer.spans[-1][2] == tier:
                first, pages, _ = longer.spans[-1]
                longer.spans[-1] = (first, pages + 1, tier)
            else:
                longer.spans.append((longer.pages, 1, tier))
            longer.pages += 1
            if not by_tokens:
                self.touch(page)
        if longer.pages > found.pages:
            known = self.leases.setdefault(lease, Lease([], whole_from=0))
            known.pins = longer.pins[:]
        if last is not None:
            self.touch(last)
            self._drop_if_dead(last)
        if longer.pages == found.pages:
            return found, outcomes
        if longer.pages == len(chain):
            longer.miss = MISS_NONE
        return longer, outcomes

    def _extend_row(
        self, page: Page, found: Matched, row: int, is_offered: int, usable: int, staging: int, grant: GrantOf
    ) -> tuple[int, int]:
        """Return (outcome, tier) of one row; NONE: the match ends before it."""
        tier, miss = self._standing(page, usable)
        if tier is not None:
            if page.residency[tier] == LEAVING:
                self._move(page, tier, "keep")
            return PRESENT, tier
        if page.residency[staging] == ARRIVING:
            return PENDING, staging
        if miss != MISS_ABSENT or not is_offered:
            found.miss, found.pending = miss, int(miss == MISS_PENDING)
            return NONE, staging
        if self._claim(page, staging, lambda: grant(row, staging)) != NEW:
            return NONE, staging
        page.claim_pins += 1
        return NEW, staging

    def _unpin(self, lease: Lease, pins: Sequence[tuple[PageName, int]], first: int) -> None:
        for place, (name, tier) in enumerate(pins, first):
            if place >= lease.whole_from:
                self.pages[name].lease_pins -= 1
            else:
                self.pages[name].tier_pins[tier] -= 1
        for name, _ in pins:
            self._drop_if_dead(self.pages.get(name))

    def retain(self, lease: int) -> None:
        """Add an owner."""
        self.leases[lease].owners += 1

    def release(self, lease: int) -> bool:
        """Drop one owner, and with the last one the pins. False: not live."""
        held = self.leases.get(lease)
        if held is None:
            return False
        held.owners -= 1
        if held.owners == 0:
            del self.leases[lease]
            self._unpin(held, held.pins, 0)
        return True

    def shorten(self, lease: int, pages: int) -> None:
        """Give up the pins past `pages`."""
        held = self.leases[lease]
        dropped, held.pins = held.pins[pages:], held.pins[:pages]
        self._unpin(held, dropped, len(held.pins))

    # ---- courtesies ----------------------------------------------------------------------------

    def keep_until(self, lease: int, now: float, until: float) -> None:
        """Keep a lease's pages, once each, until the later end; where it is too much, the oldest go."""
        self.end_due_courtesies(now)
        if until <= now:
            return
        names = dict.fromkeys(name for name, _ in self.leases[lease].pins if name.epoch == self.epoch)
        for name in reversed(names):
            before = self.courtesies.pop(name, None)
            self.pages[name].lease_pins += before is None
            self.courtesies[name] = until if before is None else max(before, until)
        for tier in range(TIERS):
            here = self._kept_for_probes(tier)
            most = min(self.allowed[tier], 3 * self.counts(tier)["capacity"] // 4)
            for name in here[: max(0, len(here) - most)]:
                self._end_courtesy(name)

    def spend(self, keys: Sequence[bytes], kind: int, rows: Sequence[bool]) -> int:
        """End the courtesies of the keys whose rows are true. Returns how many there were."""
        named = {PageName(key, kind, self.epoch) for key, row in zip(keys, rows, strict=True) if row}
        ended = [name for name in self.courtesies if name in named]
        for name in ended:
            self._end_courtesy(name)
        return len(ended)

    def end_due_courtesies(self, now: float) -> int:
        """End those whose end has come. Returns how many."""
        ended = [name for name, until in self.courtesies.items() if until <= now]
        for name in ended:
            self._end_courtesy(name)
        return len(ended)

    def end_older_courtesies(self, tier: int) -> int:
        """End the older half of those in a tier. Returns how many."""
        here = self._kept_for_probes(tier)
        ended = here[: len(here) - len(here) // 2]
        for name in ended:
            self._end_courtesy(name)
        return len(ended)

    def _kept_for_probes(self, tier: int) -> list[PageName]:
        return [name for name in self.courtesies if self.pages[name].residency[tier] == RESIDENT]

    def _end_courtesy(self, name: PageName) -> None:
        del self.courtesies[name]
        self.pages[name].lease_pins -= 1
        self._drop_if_dead(self.pages[name])

    # ---- holds ---------------------------------------------------------------------------------

    def _order_of(self, page: Page, tier: int) -> list[PageName]:
        slots = self.tiers[tier]
        return slots.staying if page.name in slots.staying else slots.rank

    def _kept_in(self, page: Page) -> list[int]:
        return [tier for tier in self.keeping if page.residency[tier] == RESIDENT]

    def _settle(self, page: Page) -> None:
        """Keep the last copy of a held page out of the rank, and only that."""
        for tier in range(TIERS):
            staying = self.tiers[tier].staying
            must_stay = page.holds > 0 and self._kept_in(page) == [tier]
            if must_stay and page.name not in staying:
                self.tiers[tier].rank.remove(page.name)
                staying.append(page.name)
            elif not must_stay and page.name in staying:
                staying.remove(page.name)
                self._enter_rank(page, tier)

    def _rescue(self, page: Page | None) -> None:
        if page is None or page.holds == 0 or self._kept_in(page):
            return
        leaving = [tier for tier in self.keeping if page.residency[tier] == LEAVING]
        if leaving:
            self._move(page, leaving[0], "keep")

    def _path_of(self, end: Page) -> list[Page]:
        return [end, *self.ancestors(end)]

    def extent(self, hold: int) -> tuple[int, int]:
        """Say how many leading pages of a hold are kept, and how many behind them it covers."""
        if hold not in self.holds:
            return 0, 0
        path = self._path_of(self.pages[self.holds[hold].end])[::-1]
        kept = next((i for i, page in enumerate(path) if not self._kept_in(page)), len(path))
        return kept, len(path) - kept

    def hold(self, keys: Sequence[bytes], most_pages: int, hold: int) -> Held:
        """Cover the leading pages that are somewhere or on their way; `hold` is the index's id for it."""
        held = sum(page.holds > 0 for page in self.pages.values())
        covered = 0
        for key in [] if self.is_poisoned else keys:
            page = self._find(key)
            if page is None or not {ARRIVING, RESIDENT, LEAVING} & set(page.residency):
                break
            covered += 1
        if covered == 0:
            return Held(0, 0, 0, held, refused=False)
        for depth in range(covered):
            end = self._put_on_path(keys, depth)
        self.touch(end)
        path = self._path_of(end)
        added = sum(page.holds == 0 for page in path)
        if added and held + added > most_pages:
            return Held(0, 0, added, held, refused=True)
        if hold in self.holds:
            self.holds[hold].owners += 1
        else:
            self.holds[hold] = Hold(end.name)
            for page in path:
                page.holds += 1
                self._rescue(page)
                self._settle(page)
        return Held(*self.extent(hold), added, held + added, refused=False)

    def unhold(self, hold: int) -> bool:
        """Drop one owner, and with the last one the hold. False: not live."""
        if hold not in self.holds:
            return False
        self.holds[hold].owners -= 1
        if self.holds[hold].owners == 0:
            self._end_hold(hold)
        return True

    def _end_hold(self, hold: int) -> None:
        end = self.pages[self.holds.pop(hold).end]
        for page in self._path_of(end)[::-1]:
            page.holds -= 1
            self._settle(page)
        self._drop_if_dead(end)

    # ---- claims --------------------------------------------------------------------------------

    def _claim(self, page: Page, tier: int, grant: Callable[[], Grant]) -> int:
        match page.residency[tier]:
            case 0:  # ABSENT
                if self.tiers[tier].claimable() == 0:
                    return FULL
                given = grant()
                self.tiers[tier].take(given.slot)
                self._move(page, tier, "claim")
                page.id, page.slot[tier], page.number[tier] = given.page, given.slot, given.number
                return NEW
            case 1:  # ARRIVING
                return PENDING
            case 2:  # RESIDENT
                return PRESENT
            case 3:  # LEAVING
                self._move(page, tier, "keep")
                return PRESENT
            case _:
                return REFUSED

    def _claim_row(self, page: Page, tiers: int, row: int, grant: GrantOf) -> list[int]:
        outcomes = [NONE] * TIERS
        for tier in bits(tiers):
            outcomes[tier] = self._claim(page, tier, lambda tier=tier: grant(row, tier))  # type: ignore[misc]
        return outcomes

    def claim_absent(
        self,
        keys: Sequence[bytes],
        first_page: int,
        row_tiers: Sequence[int],
        grant: GrantOf,
    ) -> Claimed:
        """Claim the pages from `first_page` on where ABSENT, each in its tiers; stop where nothing is possible."""
        rows = [[NONE] * TIERS for _ in keys[first_page:]]
        full_at = NOT_FULL
        last: Page | None = None
        for depth, key in enumerate(keys if rows else []):
            row = depth - first_page
            tiers = row_tiers[row] if row >= 0 else 0
            page = self._find(key)
            if (
                page is None
                and row >= 0
                and not any(self.tiers[t].claimable() for t in bits(tiers))
            ):
                for tier in bits(tiers):
                    rows[row][tier] = FULL
                full_at = depth
                break
            page = last = self._put_on_path(keys, depth)
            if row < 0:
                continue
            rows[row] = self._claim_row(page, tiers, row, grant)
            if NEW in rows[row]:
                page.claim_pins += 1
            if not {NEW, PENDING, PRESENT} & set(rows[row]):
                full_at = depth
                break
        if last is not None:
            self.touch(last)
            self._drop_if_dead(last)
        return Claimed(rows, full_at)

    def claim_absent_keys(
        self,
        keys: Sequence[bytes],
        kind: int,
        parent_state: int,
        parent: bytes,
        tiers: int,
        grant: GrantOf,
    ) -> Claimed:
        """Claim keys that follow one another, without tokens."""
        rows: list[list[int]] = []
        full_at = NOT_FULL
        made: list[Page] = []

        def find_or_create(key: bytes) -> Page:
            page = self._find(key, kind)
            if page is None:
                page = self._find_or_create(PageName(key, kind, self.epoch))
                made.append(page)
            return page

        before = find_or_create(parent) if parent_state == KNOWN and keys else None
        for row, key in enumerate(keys):
            page = find_or_create(key)
            is_chained = before is not None and self._try_link(page, before)
            if (
                row == 0
                and parent_state == ROOT
                and page.parent_state == UNKNOWN
                and not page.depth
            ):
                page.parent_state, page.depth = ROOT, 0
            if before is not None and not is_chained:
                self.touch(before)
            rows.append(self._claim_row(page, tiers, row, grant))
            if NEW in rows[row]:
                page.claim_pins += 1
            if not {NEW, PENDING, PRESENT} & set(rows[row]) and full_at == NOT_FULL:
                full_at = row
            before = page
        if before is not None:
            self.touch(before)
        for page in reversed(made):
            self._drop_if_dead(page)
        return Claimed(rows, full_at)

    def claim_leased(self, lease: int, tier: int, grant: GrantOf) -> Claimed:
        """Claim the pages of a lease that are ABSENT in `tier`."""
        rows = []
        full_at = NOT_FULL
        for row, (name, _) in enumerate(self.leases[lease].pins):
            rows.append(self._claim_row(self.pages[name], 1 << tier, row, grant))
            if NEW in rows[row]:
                self.pages[name].claim_pins += 1
            if rows[row][tier] in (FULL, REFUSED) and full_at == NOT_FULL:
                full_at = row
        return Claimed(rows, full_at)

    def copies_lacking(
        self, lease: int, source: int, target: int, most: int, unless: int
    ) -> tuple[list[PageName], int]:
        """Name pages of a lease that are RESIDENT in `source`, ABSENT in `target`, and that no tier of `unless` has or
        is getting; and how many more there is no room for."""
        pages = [self.pages[name] for name, _ in self.leases[lease].pins]
        nearer = [tier for tier in range(TIERS) if unless >> tier & 1]
        lacking = [
            page.name
            for page in pages
            if page.residency[source] == RESIDENT
            and page.residency[target] == ABSENT
            and not any(page.residency[tier] in (ARRIVING, RESIDENT, LEAVING) for tier in nearer)
        ][:most]
        room = min(len(lacking), self.tiers[target].claimable())
        return lacking[:room], len(lacking) - room

    def claim_copies(self, names: Sequence[PageName], target: int, grant: GrantOf) -> None:
        """Claim pages in `target`."""
        for row, name in enumerate(names):
            self._claim_row(self.pages[name], 1 << target, row, grant)
            self.pages[name].claim_pins += 1

    def _claimed(self, page_id: int, tier: int, number: int, residency: int) -> Page | None:
        page = self._by_id(page_id)
        if page is None or page.number[tier] != number or page.residency[tier] != residency:
            return None
        return page

    def _release_slot(self, page: Page, tier: int, where: set[int]) -> None:
        slot = page.slot[tier]
        if slot is None:
            raise ModelError(f"{page.name} has no slot in tier {tier}")
        where.add(slot)
        page.slot[tier] = None

    def commit(self, page_id: int, tier: int, number: int) -> bool:
        """ARRIVING -> RESIDENT. False: stale."""
        page = self._claimed(page_id, tier, number, ARRIVING)
        if page is not None:
            self._move(page, tier, "commit")
        return page is not None

    def abort(self, page_id: int, tier: int, number: int) -> bool:
        """ARRIVING -> ABSENT, the slot free at once. False: stale."""
        page = self._claimed(page_id, tier, number, ARRIVING)
        if page is not None:
            self._move(page, tier, "abort")
            self._release_slot(page, tier, self.tiers[tier].free)
            self._drop_if_dead(page)
        return page is not None

    def unpin(self, page_ids: Sequence[int]) -> bool:
        """Return the pins of claims, all or (False) none."""
        pages = [self._by_id(page_id) for page_id in page_ids]
        for page in pages:
            if page is None or page.claim_pins < pages.count(page):
                return False
        for page in pages:
            if page is not None:
                page.claim_pins -= 1
        for page in pages:
            self._drop_if_dead(page)
        return True

    # ---- eviction ------------------------------------------------------------------------------

    def victims(
        self, tier: int, n: int, only_range: int | None, *, even_held: bool = False
    ) -> list[PageName]:
        """Say which pages leave next."""
        slots = self.tiers[tier]
        out: list[PageName] = []
        for name in slots.rank + (slots.staying if even_held else []):
            page = self.pages[name]
            slot = page.slot[tier]
            if len(out) == n or slot is None:
                break
            if page.is_pinned(tier) or (
                only_range is not None and slots.range_of(slot) != only_range
            ):
                continue
            out.append(name)
        return out

    def chain_victims(
        self, keys: Sequence[bytes], keep_pages: int, tiers: int
    ) -> list[list[PageName]]:
        """Say which pages past `keep_pages` leave when a chain is forgotten, deepest first: behind a gap, too."""
        out: list[list[PageName]] = [[] for _ in range(TIERS)]
        for key in reversed(keys[keep_pages:]):
            page = self._find(key)
            if page is None or page.holds > 0:
                continue
            for tier in bits(tiers):
                if page.residency[tier] == RESIDENT and not page.is_pinned(tier):
                    out[tier].append(page.name)
        return out

    def leave(self, name: PageName, tier: int, number: int) -> None:
        """RESIDENT -> LEAVING, under the number that the index gave."""
        page = self.pages[name]
        self._move(page, tier, "claim_victim")
        page.number[tier] = number

    def finish(self, page_id: int, tier: int, number: int) -> bool:
        """LEAVING -> ABSENT, the slot on its way back. False: stale."""
        page = self._claimed(page_id, tier, number, LEAVING)
        if page is not None:
            self._finish(page, tier)
        return page is not None

    def take_victim(self, name: PageName, tier: int) -> None:
        """RESIDENT -> LEAVING -> ABSENT in one, the slot on its way back."""
        page = self.pages[name]
        self._move(page, tier, "claim_victim")
        self._finish(page, tier)
        self._rescue(self.pages.get(name))

    def _finish(self, page: Page, tier: int) -> None:
        self._move(page, tier, "finish")
        self._release_slot(page, tier, self.tiers[tier].returning)
        self._drop_if_dead(page)

    def keep(self, page_id: int, tier: int, number: int) -> bool:
        """LEAVING -> RESIDENT. False: stale."""
        page = self._claimed(page_id, tier, number, LEAVING)
        if page is not None:
            self._move(page, tier, "keep")
        return page is not None

    def free_slots(self, tier: int, slots: Sequence[int]) -> bool:
        """Make slots that were on their way back free, all or (False) none."""
        returning = self.tiers[tier].returning
        if len(set(slots)) != len(slots) or not returning.issuperset(slots):
            return False
        returning.difference_update(slots)
        self.tiers[tier].free.update(slots)
        return True

    def owe_slots(self, tier: int, slots: Sequence[int]) -> bool:
        """Keep slots that were on their way back, or free, from everybody, all or (False) none."""
        of = self.tiers[tier]
        if not (of.returning | of.free).issuperset(slots):
            return False
        of.returning.difference_update(slots)
        of.free.difference_update(slots)
        of.owed.update(slots)
        return True

    def take_owed(self, tier: int, n: int, slots: Sequence[int]) -> None:
        """Put owed slots that the index chose on their way back."""
        of = self.tiers[tier]
        if len(slots) != min(n, len(of.owed)) or len(set(slots)) != len(slots) or not of.owed.issuperset(slots):
            raise ModelError(f"of {len(of.owed)} owed slots {n} were asked for, and {slots} given")
        of.owed.difference_update(slots)
        of.returning.update(slots)

    def quarantine(self, name: PageName, tier: int) -> bool:
        """Take a page whose bytes are wrong out of use. False: it is not there."""
        page = self.pages.get(name)
        if page is None or page.residency[tier] not in (RESIDENT, LEAVING):
            return False
        if page.residency[tier] == LEAVING:
            self._move(page, tier, "keep")
        self._move(page, tier, "quarantine")
        page.handed_out[tier] = False
        self._rescue(page)
        return True

    def mendable(self, tier: int) -> set[PageName]:
        """Say which quarantined pages can be handed out."""
        return {
            page.name
            for page in self.pages.values()
            if page.residency[tier] == QUARANTINED
            and not page.handed_out[tier]
            and not page.is_pinned(tier)
        }

    def hand_out(self, name: PageName, tier: int, number: int) -> None:
        """Hand a quarantined page out for mending."""
        self.pages[name].handed_out[tier] = True
        self.pages[name].number[tier] = number

    def mend(
        self, page_id: int, tier: int, number: int, *, mended: bool, retired: bool = False
    ) -> bool:
        """QUARANTINED -> ABSENT if mended; else it can be handed out again, unless it is retired. False: stale."""
        page = self._claimed(page_id, tier, number, QUARANTINED)
        if page is None or not page.handed_out[tier]:
            return False
        page.number[tier] += 1
        page.handed_out[tier] = retired and not mended
        if mended:
            self._move(page, tier, "mend")
            self._release_slot(page, tier, self.tiers[tier].returning)
            self._drop_if_dead(page)
        return True

    # ---- private slots -------------------------------------------------------------------------

    def take_private(self, tier: int, slots: Sequence[int] | None, n: int) -> bool:
        """Take n private slots that the index chose, or none where there is no room."""
        if self.is_poisoned or self.tiers[tier].claimable() < n:
            return False
        if slots is None or len(slots) != n:
            raise ModelError(f"{n} private slots were refused with room for them")
        for slot in slots:
            self.tiers[tier].take(slot)
        self.tiers[tier].private.update(slots)
        return True

    def free_private(self, tier: int, slots: Sequence[int]) -> bool:
        """Free private slots, all or (False) none."""
        private = self.tiers[tier].private
        if len(set(slots)) != len(slots) or not private.issuperset(slots):
            return False
        private.difference_update(slots)
        self.tiers[tier].free.update(slots)
        return True

    def publish_private(self, keys: Sequence[bytes], tier: int, slot: int, page_id: int) -> int:
        """Give a private slot the place of the last page of a chain."""
        for depth in range(len(keys)):
            page = self._put_on_path(keys, depth)
        self.touch(page)
        page.id = page_id
        if page.residency[tier] != ABSENT:
            return self._claim(page, tier, lambda: Grant(page_id, slot, 0))
        self.tiers[tier].private.remove(slot)
        page.slot[tier] = slot
        page.number[tier] += 1
        self._move(page, tier, "claim")
        self._move(page, tier, "commit")
        page.claim_pins += 1
        return NEW

    # ---- what can be asked ---------------------------------------------------------------------

    def state(self, key: bytes, kind: int = KV) -> tuple[int, ...]:
        """Return the residency of a key by tier."""
        page = self._find(key, kind)
        return (
            tuple(page.residency)
            if page is not None and not self.is_poisoned
            else (ABSENT,) * TIERS
        )

    def probe(self, keys: Sequence[bytes], kind: int, usable: int) -> tuple[int, list[int]]:
        """Return the leading run of RESIDENT keys, and each one's fastest tier."""
        tiers = []
        for key in keys:
            state = self.state(key, kind)
            tiers.append(next((t for t in bits(usable) if state[t] == RESIDENT), NO_TIER))
        run = next((i for i, tier in enumerate(tiers) if tier == NO_TIER), len(tiers))
        return run, tiers

    def rank_order(self, tier: int) -> list[int | None]:
        """Return the slots of the resident pages, first to leave first."""
        slots = self.tiers[tier]
        return [self.pages[name].slot[tier] for name in slots.rank + slots.staying]
