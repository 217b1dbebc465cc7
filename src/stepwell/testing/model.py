"""Say what stepwell promises: the whole store as a dict.

Whoever reads only this file knows what a store does with a page. The model has no bytes and no threads, and counts
slots without placing them. What is the store's to choose (which copy is made first, how many pages leave to make room)
it is told in `see`; it refuses with `BrokenPromise` what no rule allows. So this file says what a store may do; that
what was asked for is also done (a save that was not refused arrives, a page that is forgotten leaves) operations.py
asks of it, in the words of this file, and caller.py compares the bytes.

Words. A page is the KV cache of some tokens of a prompt. Its key follows from its namespace (whose prompts these are)
and from all tokens up to its last one, or is given to save_keys by who vouches for that: the pages of a prompt are a
chain, in which each one continues its parent, and two namespaces share none. Tiers, the nearest to the computation
first: DEVICE (its memory, where sequences also compute into slots of their own), HOST (memory of the process), SHARED
(memory that outlives it), DISK. The keeping ones are those that saves write to: all but DEVICE. The epoch says with
which weights a page was computed; its user sets it. A step is one call, or one round of the store's own work, as if
nobody did anything else meanwhile; what threads see is held to the same rules by recorder.py, which looks for an order
of their calls.

    call                       what it does with pages
    save, save_keys            wants each page of a chain in each keeping tier where it is ABSENT; makes room for it
    match, load, load_keys     finds the leading run (5), pins it where it was found, brings its bytes to the caller,
                               and may bring copies nearer, for which room is made
    probe                      finds the run, keeps it (13), and may bring copies nearer
    pin                        keeps the leading pages that are here or on their way, each where a keeping tier has it
    forget, evict, clear       take out the pages of a chain; those that are next to leave; all that may leave
    set_epoch; open, crash     make pages of other epochs misses (12); find what a process has left (8)

    what keeps a page          where                       until                             yields to
    a match, a load (`pins`)   in the tier it was found    it is closed, its epoch ends      damage
    a transfer (`claims`)      in every tier               it has ended                      damage
    pin() (`holds`)            the last keeping copy       let go, its time, its epoch ends  damage
    a probe (`asked`)          in every tier               see 13                            damage, room, forget, clear

The promises, each with the place where it is held to:

    1  Immutable: a page is its key. A save writes nothing in a tier that has it, in whatever state.        claimable
    2  Resident means readable: complete, of this epoch, and verified when it arrived; who loads it verifies it
       again. Nothing is resident that did not arrive, nothing is brought that nobody wants, and after a step
       no page is LEAVING.                                                                                        see
    3  A pinned page stays where it is pinned, unless it is found damaged. A pin() keeps the last copy in a
       keeping tier.                                                                                           _leave
    4  Slots add up: free + arriving + resident + leaving + quarantined = capacity.                           adds_up
    5  A match ends at the first page that no tier has. It says why, and finds each page in the nearest tier.    find
    6  Full is returned, not raised: a page is refused only where nothing more could leave. Pages that are
       saved together do not have to leave for one another, nor those that the store is carrying.        may_refuse
    7  A page whose transfer failed is ABSENT there, as before it; one that was given up may arrive still.         see
    8  The end of a process (not of the machine) keeps what was resident in shared memory and on disk, of
       whatever epoch, and brings back nothing else but what was quarantined, or is owed (11).                  crash
    9  A damaged copy is found by who reads it, is quarantined, and is not offered again by this process; the
       other tiers' copies are.                                                                             find, see
    10 The page that leaves for room is the one used longest ago, and never before a page that continues it and
       may leave; one whose parent is nowhere when it arrives leaves first. Those that probes keep, and those that
       the store is carrying, may be passed by.                                                      _leave, _arrival
    11 What is forgotten is in no tier afterwards, but for what is pinned; evict and clear take only what may
       leave (Step.named, operations.py). That the end of the process does not bring it back (8) holds from
       when its slot is no longer owed, that is, its record is gone from the disk too (stats() counts those that
       are): where the disk hangs, these calls return before.                                                  _leave
    12 A page of another epoch is a miss, and pins end with their epoch. Once the epoch is its own again, also
       after a restart, it is found unless it has left.                                                   turn, crash
    13 What a probe has found stays: each page once, until the latest end that was asked for, or until a get
       has brought it, or found it damaged. It may end before where a tier needs the room and has nothing else
       to give, and does where probes would keep more of a tier than they may: what was asked for longest ago
       first. Forget, clear and the end of the epoch end it.                                       ask, deliver, keep

A page is used by every look-up that finds it, every save that names it, and every pin(). What a load delivers, and that
no byte lands after its deadline or in memory that was given back, is held to in caller.py; it compares bytes. `world`
holds a store to this file after every step; `index_model` has the same for the index alone, to the last id.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from stepwell.index import Miss, Residency, Tier

ABSENT, ARRIVING, RESIDENT, LEAVING, QUARANTINED = range(5)
assert [each.name for each in Residency] == ["ABSENT", "ARRIVING", "RESIDENT", "LEAVING", "QUARANTINED"]
TIERS = len(Tier)

States = tuple[int, ...]
"""The residency of one page, by tier."""
NOWHERE: States = (ABSENT,) * TIERS
UNPINNED = [0] * TIERS
_COUNTED = (("arriving", ARRIVING), ("resident", RESIDENT), ("quarantined", QUARANTINED))


class BrokenPromise(AssertionError):  # noqa: N818 it is what it says
    """The store did what no rule allows."""


@dataclass(slots=True)
class Page:
    """One page. Invariant: it is known while it is somewhere, wanted by somebody, or continued by a known page."""

    parent: bytes | None = None  # None: it is the first of its chain, or nobody has said
    children: int = 0
    at: States = NOWHERE
    pins: list[int] = field(default_factory=lambda: [0] * TIERS)  # of leases, where they found it
    claims: int = 0  # of transfers that bring it somewhere: they hold it in every tier
    holds: int = 0  # of pin()
    damaged: list[bool] = field(default_factory=lambda: [False] * TIERS)  # nobody has read it since
    is_left: bool = False  # whoever brings it has given it up (caller.py): it comes, and keeps nothing

    def is_pinned(self, tier: int) -> bool:
        """Say whether it must stay in a tier: somebody reads it there, or it is on its way to another."""
        return self.pins[tier] > 0 or self.claims > 0 or (ARRIVING in self.at and not self.is_left)


class Found(NamedTuple):
    """What a match says: pages of the prefix, the tier of each, how many more it would be once those that are on their
    way have arrived, why it ends."""

    pages: int
    tiers: list[int]
    pending: int
    miss: Miss


class After(NamedTuple):
    """What is left of a process: its pages, by tier; and copies that are damaged. Of these, what was in quarantine may
    be found again, for nothing on the medium says so: who reads it finds the damage anew. others: the same of other
    epochs."""

    pages: dict[bytes, set[int]]
    damaged: set[tuple[bytes, int]]
    others: dict[int, After]


class Step(msgspec.Struct, frozen=True):
    """What one step may do, beside what it must.

    wanted: pages that may be brought somewhere. named: pages that the caller takes out himself. room: others may leave
    for them. lands: what is on its way may arrive. gives_up: it may be lost on the way. mends: quarantined slots may be
    freed. fails: calls on files fail, so that a page may be found unreadable. returns: pages that may appear, by tier,
    for a volume was adopted. spares: what probes keep stays, whatever room is made: nobody waits for that room.
    """

    wanted: Collection[bytes] = ()
    named: Collection[bytes] = ()
    room: bool = False
    lands: bool = False
    gives_up: bool = False
    mends: bool = False
    fails: bool = False
    returns: Mapping[bytes, Collection[int]] = MappingProxyType({})
    spares: bool = False


NOTHING = Step()


class StoreModel:
    """A store's pages of the present epoch, and what is known of those of others.

    Invariant: `order[tier]` has the resident pages of a tier but those that a pin() has there alone, the first to leave
    first; of two pages of one chain, the one that continues the other stands before it. Pinned ones keep their place,
    and are passed by.

    Args:
        keeping: the tiers that a save writes to and that pin() keeps pages in.
        is_ordered: whether everything that uses pages goes through this model; else who leaves first is not judged.
    """

    def __init__(self, keeping: Sequence[Tier], *, is_ordered: bool = True) -> None:
        self.keeping = [int(tier) for tier in keeping]
        self.is_ordered = is_ordered
        self.epoch = 0
        self.pages: dict[bytes, Page] = {}
        self.others: dict[int, dict[bytes, Page]] = {}
        self.order: list[list[bytes]] = [[] for _ in range(TIERS)]
        self.counts = [[0] * len(Residency) for _ in range(TIERS)]  # of `pages`, by tier and residency
        self.left: Counter[int] = Counter()  # pages that have left, by tier
        self.damages = 0
        self.quarantined = 0
        self.holds: dict[bytes, int] = {}  # last page of a pinned chain -> pins
        self.asked: dict[bytes, float] = {}  # pages that probes keep, until when: those asked for longest ago first
        # Pages that may stay while others leave that were used later, as those of probes may: those of sequences, whose
        # pins are not all seen (sequence_world.py), and those that the store brings nearer by itself (caller.py).
        self.courtesies: set[bytes] = set()
        self.carried: set[bytes] = set()

    # ---- what can be asked -------------------------------------------------------------------------------------------

    def states(self, key: bytes) -> States:
        """Say what a page is in each tier."""
        page = self.pages.get(key)
        return NOWHERE if page is None else page.at

    def nearest(self, key: bytes, usable: Sequence[int]) -> tuple[int | None, Miss]:
        """Say in which tier a page is read, the one nearest to the computation; or why in none. usable: in order."""
        states = self.states(key)
        if states == NOWHERE:
            return None, Miss.ABSENT
        is_pending = is_quarantined = False
        for tier in usable:
            residency = states[tier]
            if residency in (RESIDENT, LEAVING):
                return tier, Miss.NONE
            is_pending |= residency == ARRIVING
            is_quarantined |= residency == QUARANTINED
        if is_pending:
            return None, Miss.PENDING
        return None, Miss.QUARANTINED if is_quarantined else Miss.ABSENT

    def find(self, keys: Sequence[bytes], usable: Sequence[int]) -> Found:
        """Say what a match of a chain finds (5): the leading run of pages that are in some usable tier."""
        tiers: list[int] = []
        miss = Miss.NONE
        for key in keys:
            tier, miss = self.nearest(key, usable)
            if tier is None:
                break
            tiers.append(tier)
        pending = 0
        if miss is Miss.PENDING:
            for key in keys[len(tiers) :]:
                tier, why = self.nearest(key, usable)
                if tier is None and why is not Miss.PENDING:
                    break
                pending += 1
        return Found(len(tiers), tiers, pending, miss)

    def claimable(self, key: bytes, tiers: Iterable[int]) -> list[int]:
        """Say where a save of a page writes it: only where it is not, and is not on its way (1)."""
        states = self.states(key)
        return [tier for tier in tiers if states[tier] == ABSENT]

    def may_refuse(self, tier: int, free: int, keys: Collection[bytes]) -> bool:
        """Say whether a tier may refuse a page (6): no slot is free, and every page in it has to stay, or is one of
        those that are saved together."""
        return free == 0 and all(
            self.pages[key].is_pinned(tier) or key in keys or key in self.carried for key in self.order[tier]
        )

    def kept(self, keys: Iterable[bytes]) -> int:
        """Count the leading pages that a keeping tier has: what a pin() of them keeps now."""
        count = 0
        for key in keys:
            if not self._is_kept(self.pages.get(key)):
                break
            count += 1
        return count

    def held_pages(self) -> int:
        """Count the pages that some pin() covers."""
        return sum(page.holds > 0 for page in self.pages.values())

    def adds_up(self, tier: int, counts: Mapping[str, int], *, others: int = 0) -> None:
        """Hold a tier's slots to (4). others: slots of pages of other epochs, and those a sequence computes into."""
        used = counts["arriving"] + counts["resident"] + counts["leaving"] + counts["quarantined"]
        if counts["free"] + used != counts["capacity"]:
            raise BrokenPromise(f"{Tier(tier)}: slots do not add up: {counts}")
        known = self.counts[tier]
        for name, residency in _COUNTED:
            if not known[residency] <= counts[name] <= known[residency] + others:
                raise BrokenPromise(f"{Tier(tier)}: {counts[name]} slots are {name}, {known[residency]} pages are")

    # ---- use: what makes a page stay longer --------------------------------------------------------------------------

    def link(self, keys: Sequence[bytes]) -> None:
        """Learn that pages follow one another: their tokens, or the caller of save_keys, say so."""
        for parent, key in itertools.pairwise(keys):
            page = self.know(key)
            if page.parent is None:
                page.parent = parent
                self.know(parent).children += 1

    def is_rooted(self, keys: Sequence[bytes]) -> bool:
        """Say whether pages are known to follow one another from the first page of a chain."""
        known = [self.pages.get(key) for key in keys]
        return all(page is not None for page in known) and all(
            page is not None and page.parent == parent for parent, page in zip(keys, known[1:], strict=False)
        )

    def use(self, key: bytes) -> None:
        """Use a page, and with it what it continues: from its tail to its head, so that the head leaves last (10)."""
        for each in self._chain(key):
            page = self.pages.get(each)
            for tier, residency in enumerate(NOWHERE if page is None else page.at):
                if residency == RESIDENT and each in (order := self.order[tier]):
                    order.remove(each)
                    order.append(each)

    def use_path(self, keys: Sequence[bytes]) -> None:
        """Use a chain given by its tokens."""
        if keys:
            self.link(keys)
            self.use(keys[-1])
            self.forget_unknown(keys)

    def use_keys(self, keys: Sequence[bytes]) -> None:
        """Use pages given by their keys, in turn: of those that are known to follow one another the last one alone,
        which takes the others with it."""
        for place, key in enumerate(keys):
            after = self.pages.get(keys[place + 1]) if place + 1 < len(keys) else None
            if after is None or after.parent != key:
                self.use(key)

    # ---- pins --------------------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes], tiers: Sequence[int], change: int) -> None:
        """Count (+1) or return (-1) a lease's pins: each page stays in the tier it was found in (3)."""
        for key, tier in zip(keys, tiers, strict=True):
            self.know(key).pins[tier] += change
        if change < 0:
            self.forget_unknown(keys)

    def claim(self, keys: Iterable[bytes], change: int) -> None:
        """Count or return the pins of a transfer that brings pages somewhere."""
        keys = list(keys)
        for key in keys:
            self.know(key).claims += change
        if change < 0:
            self.forget_unknown(keys)

    def coverable(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the leading pages that are somewhere or on their way: those that a pin() covers."""
        return list(itertools.takewhile(lambda key: {ARRIVING, RESIDENT, LEAVING} & set(self.states(key)), keys))

    def hold(self, keys: Sequence[bytes]) -> list[bytes]:
        """Pin a chain with pin(): its leading pages that are somewhere or on their way. Returns these."""
        chain = self.coverable(keys)
        if chain:
            self.use_path(chain)
            self.holds[chain[-1]] = self.holds.get(chain[-1], 0) + 1
            if self.holds[chain[-1]] == 1:
                for key in chain[::-1]:
                    self.pages[key].holds += 1
                    self._settle(key)
        return chain

    def unhold(self, chain: Sequence[bytes]) -> None:
        """End a pin(): its pages may leave again; those that it had kept from leaving, as ones just used."""
        if not chain or chain[-1] not in self.holds:
            return
        self.holds[chain[-1]] -= 1
        if self.holds[chain[-1]] == 0:
            del self.holds[chain[-1]]
            for key in chain:
                self.pages[key].holds -= 1
                self._settle(key)
            self.forget_unknown(chain)

    # ---- leases of probes --------------------------------------------------------------------------------------------

    def ask(self, keys: Sequence[bytes], now: float, until: float, allowed: Mapping[int, int]) -> None:
        """Keep the pages that a probe has found, until then (13). allowed: how many in each tier."""
        if not keys or until <= now:
            return
        self.end_due(now)
        for key in reversed(keys):  # the last page of a run is of no use without those before it
            self.asked[key] = max(until, self.asked.pop(key, until))
        for tier, most in allowed.items():
            here = [key for key in self.asked if self.states(key)[tier] == RESIDENT]
            for key in here[: max(0, len(here) - most)]:
                del self.asked[key]

    def deliver(self, keys: Iterable[bytes]) -> None:
        """Keep pages no longer that a get has brought, whoever has asked for them."""
        for key in keys:
            self.asked.pop(key, None)

    def end_due(self, now: float) -> None:
        """Keep no longer what was kept until now."""
        self.asked = {key: until for key, until in self.asked.items() if until > now}

    def keep(self, kept: Mapping[bytes, float], *, may_end: bool) -> None:
        """Take over what probes keep; refuse what differs. may_end: some may have ended before their time, for room."""
        if may_end:
            self.asked = {key: until for key, until in self.asked.items() if key in kept}
        if list(kept.items()) != list(self.asked.items()):
            shown = [[(name(key), until) for key, until in each.items()] for each in (kept, self.asked)]
            raise BrokenPromise(f"probes keep {shown[0]}, the model says {shown[1]}")

    # ---- moves -------------------------------------------------------------------------------------------------------

    def see(self, now: Mapping[bytes, States], step: Step = NOTHING) -> None:
        """Take over what pages are now, in each tier, after a step; refuse what the step may not have done.

        A page that left a tier and is wanted there again within one step (RESIDENT, then ARRIVING) does both: it leaves
        first, and may then be a new page.

        Args:
            now: every page that has changed, at least.
        """
        gone: list[list[bytes]] = [[] for _ in range(TIERS)]
        moves: list[tuple[bytes, int, int]] = []
        for key, states in now.items():
            for tier, (was, became) in enumerate(zip(self.states(key), states, strict=True)):
                if was == became:
                    continue
                if was == RESIDENT and became in (ABSENT, ARRIVING, LEAVING):
                    gone[tier].append(key)
                if was != RESIDENT or became != ABSENT:
                    moves.append((key, tier, became))
        if any(gone):
            # One that pin() keeps and that leaves one tier of two may have done so first: then it stays in the other.
            last = {key for left in gone for key in left if self.pages[key].holds}
            for tier in range(TIERS):
                if gone[tier]:
                    self._leave(tier, gone[tier], step, last)
            for left in gone:  # one that is nowhere now is a new page where it is wanted again
                self.forget_unknown(left)
        for key, tier, became in moves:
            self._move(key, tier, became, step)
        self.forget_unknown(now)

    def _move(self, key: bytes, tier: int, became: int, step: Step) -> None:
        page = self.know(key)
        was = page.at[tier]
        allowed = False
        if became == ARRIVING and was in (ABSENT, QUARANTINED):  # nobody brings what nobody wants
            allowed = key in step.wanted and (was == ABSENT or step.mends)
        elif became == RESIDENT and was == ARRIVING:
            allowed = step.lands
        elif became == ABSENT and was == ARRIVING:  # as if it had not been begun (7)
            allowed = step.gives_up
        elif became == RESIDENT and was == ABSENT:  # claimed and landed in one step, or its volume was adopted
            allowed = (key in step.wanted and step.lands) or tier in step.returns.get(key, ())
        elif became == QUARANTINED and was in (RESIDENT, ARRIVING):  # who reads what is damaged (9)
            allowed = page.damaged[tier] or step.fails
        elif became == ABSENT and was == QUARANTINED:  # its slot was rewritten and read back
            allowed = step.mends
        if not allowed:
            raise BrokenPromise(
                f"page {name(key)} in {Tier(tier)}: {Residency(was).name} -> {Residency(became).name}, and {step} "
                "does not say why"
            )
        self._put(page, tier, became)
        self._settle(key)

    def _put(self, page: Page, tier: int, residency: int) -> None:
        self.counts[tier][page.at[tier]] -= 1
        self.counts[tier][residency] += 1
        self.quarantined += (residency == QUARANTINED) - (page.at[tier] == QUARANTINED)
        page.at = (*page.at[:tier], residency, *page.at[tier + 1 :])
        self.damages -= page.damaged[tier]
        page.damaged[tier] = False
        page.is_left &= ARRIVING in page.at

    def _leave(self, tier: int, gone: list[bytes], step: Step, last: Collection[bytes]) -> None:
        """Let pages leave a tier together: no pinned one (3), none before another that was used longer ago (10)."""
        for key in gone:
            page = self.pages[key]
            if page.is_pinned(tier):
                raise BrokenPromise(f"page {name(key)} left {Tier(tier)}, where it is pinned")
            if key not in step.named and not step.room:
                raise BrokenPromise(f"page {name(key)} left {Tier(tier)}, and nobody made room ({step})")
            if key in self.asked and step.spares:
                raise BrokenPromise(f"page {name(key)} left {Tier(tier)}, where a probe keeps it ({step})")
        chosen = {key for key in gone if key not in step.named}
        soft = self.courtesies.union(self.asked, self.carried, last)
        for key in self.order[tier] if self.is_ordered else ():
            if not chosen:
                break
            if key in chosen:
                chosen.remove(key)
            elif not self.pages[key].is_pinned(tier) and key not in step.named and key not in soft:
                first = min(chosen, key=lambda each: self._place(tier, each))
                raise BrokenPromise(f"page {name(first)} left {Tier(tier)} before {name(key)}, used longer ago")
        if self.is_ordered and chosen:
            raise BrokenPromise(f"page {name(min(chosen))} left {Tier(tier)}, which was the last copy of a pinned page")
        self.left[tier] += len(gone)
        for key in gone:
            self._put(self.pages[key], tier, ABSENT)
        for key in gone:
            self._settle(key)
            if tier in self.keeping and self.pages[key].holds and not self._is_kept(self.pages[key]):
                raise BrokenPromise(f"page {name(key)} left {Tier(tier)}: pin() kept it, and no keeping tier has it")

    def _place(self, tier: int, key: bytes) -> int:
        return self.order[tier].index(key) if key in self.order[tier] else -1

    def _settle(self, key: bytes) -> None:
        """Have the page stand in the order of each tier where it may leave, and only there."""
        page = self.pages[key]
        kept = [tier for tier in self.keeping if page.at[tier] == RESIDENT] if page.holds else []
        for tier, order in enumerate(self.order):
            may_leave = page.at[tier] == RESIDENT and kept != [tier]
            if may_leave == (key in order):
                continue
            if may_leave:
                order.insert(self._arrival(tier, key), key)
            else:
                order.remove(key)

    def _arrival(self, tier: int, key: bytes) -> int:
        """Say where a page enters the order: as one just used, but before what it continues. One that continues a page
        which is nowhere cannot be found by a match, and leaves first."""
        page, order = self.pages[key], self.order[tier]
        if page.parent is not None and page.children == 0 and not any(self.pages[page.parent].at):
            return 0
        for ancestor in self._chain(page.parent):
            if ancestor in order:
                return order.index(ancestor)
        return len(order)

    # ---- damage, epochs, crashes -------------------------------------------------------------------------------------

    def damage(self, key: bytes, tier: int) -> None:
        """Have the bytes of a page be wrong in a tier, unknown to the store."""
        if self.states(key)[tier] == RESIDENT and not self.pages[key].damaged[tier]:
            self.pages[key].damaged[tier] = True
            self.damages += 1

    @property
    def has_damage(self) -> bool:
        """Whether a page that is read now may turn out to be damaged."""
        return self.damages > 0

    def damaged_in(self, key: bytes) -> tuple[bool, ...]:
        """Say by tier whether a page is damaged, and nobody has found it out."""
        page = self.pages.get(key)
        return (False,) * TIERS if page is None else tuple(page.damaged)

    def turn(self, epoch: int) -> dict[bytes, Page]:
        """Change the epoch: pages of another are misses, its pins have ended. Returns what may come back."""
        if epoch == self.epoch:
            return self.pages
        self.others[self.epoch] = self.pages
        self.epoch = epoch
        known = self.others.pop(epoch, {})
        self._empty()
        return known

    def crash(self, others: Mapping[int, Mapping[bytes, Collection[int]]]) -> After:
        """End the process, however: what it holds is gone with it (8).

        Args:
            others: where pages of other epochs are resident, by epoch: which of them have left is not followed.

        Returns:
            What the next one finds: every page that a keeping tier other than HOST has, and no other.
        """
        tiers = [tier for tier in self.keeping if tier != Tier.HOST]
        here = {key: [tier for tier in tiers if page.at[tier] == RESIDENT] for key, page in self.pages.items()}
        found = After(_here(here, tiers), _damaged(self.pages, tiers), {})
        for epoch, pages in self.others.items():
            found.others[epoch] = After(_here(others.get(epoch, {}), tiers), _damaged(pages, tiers), {})
        self.others.clear()
        self._empty()
        return found

    def _empty(self) -> None:
        self.pages = {}
        self.order = [[] for _ in range(TIERS)]
        self.damages = self.quarantined = 0
        self.counts = [[0] * len(Residency) for _ in range(TIERS)]
        self.holds.clear()
        self.asked.clear()
        self.courtesies.clear()
        self.carried.clear()

    def appear_of(
        self, epoch: int, pages: Mapping[bytes, Collection[int]], damaged: Collection[tuple[bytes, int]]
    ) -> None:
        """Take over the pages of another epoch that the tiers have after a restart, and which of them are damaged."""
        self.others[epoch] = {
            key: Page(
                at=tuple(RESIDENT if tier in tiers else ABSENT for tier in range(TIERS)),
                damaged=[(key, tier) in damaged for tier in range(TIERS)],
            )
            for key, tiers in pages.items()
        }

    def appear(self, tier: int, keys: Sequence[bytes]) -> None:
        """Take over the pages that a tier has after a restart or a change of the epoch, the first to leave first."""
        for key in keys:
            self._put(self.know(key), tier, RESIDENT)
            self.order[tier].append(key)

    def remember(self, before: Mapping[bytes, Page]) -> None:
        """Take over what pages continue, as far as it was known before: those in between may be nowhere now."""
        for key in list(self.pages):
            page = before.get(key)
            while page is not None and page.parent is not None and self.pages[key].parent is None:
                self.link([page.parent, key])
                key, page = page.parent, before.get(page.parent)

    def stand(self, key: bytes, states: States) -> None:
        """Take over a page that is not resident, but is not nowhere: it is on its way still, or its slot is
        quarantined."""
        for tier, residency in enumerate(states):
            if residency in (ARRIVING, QUARANTINED):
                self._put(self.know(key), tier, residency)

    # ---- records -----------------------------------------------------------------------------------------------------

    def know(self, key: bytes) -> Page:
        """Return what is known of a page; from now on something is."""
        page = self.pages.get(key)
        if page is None:
            page = self.pages[key] = Page()
        return page

    def forget_unknown(self, keys: Iterable[bytes]) -> None:
        """Drop what is known of pages that are nowhere, that nobody wants and that no known page continues."""
        for key in keys:
            page = self.pages.get(key)
            while page is not None and not (
                page.at != NOWHERE or page.children or page.claims or page.holds or page.pins != UNPINNED
            ):
                del self.pages[key]
                if page.parent is None:
                    break
                key, page = page.parent, self.pages[page.parent]
                page.children -= 1

    def _chain(self, key: bytes | None) -> Iterator[bytes]:
        """Yield a page and what it continues, as far as that is known."""
        while key is not None:
            yield key
            key = self.pages[key].parent if key in self.pages else None

    def _is_kept(self, page: Page | None) -> bool:
        return page is not None and any(page.at[tier] == RESIDENT for tier in self.keeping)


def _here(pages: Mapping[bytes, Collection[int]], tiers: Collection[int]) -> dict[bytes, set[int]]:
    return {key: here for key, at in pages.items() if (here := set(at).intersection(tiers))}


def _damaged(pages: Mapping[bytes, Page], tiers: Collection[int]) -> set[tuple[bytes, int]]:
    return {
        (key, tier)
        for key, page in pages.items()
        for tier in tiers
        if page.damaged[tier] or page.at[tier] == QUARANTINED
    }


def name(key: bytes) -> str:
    """Return a key as a message shows it."""
    return key.hex()[:8]
