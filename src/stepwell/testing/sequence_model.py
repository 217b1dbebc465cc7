"""Say what sequences promise: what one of them owns, what its four numbers are, and what publish() comes to.

Like model.py this has no bytes and no threads. A sequence is told what the store model finds for it, and which slots it
was given; it says what must follow, and refuses with `BrokenPromise` what no rule allows. The promises:

    1  ready + loading + pending + missing are its tokens; while it has not begun to compute, one token at least is
       missing.                                                                                                numbers
    2  What it finds is the longest run that some tier has, ready as far as the device has it.                  looked
    3  A slot is private to one sequence, or is one cached page: then it may be in many.                          owns
    4  What it has once it keeps: its slots stay as they are until it ends, is suspended, or is lost.       same_slots
    5  extend() gives all that was asked for, or nothing.                                                     extended
    6  publish(): the first who computes a page publishes it; any other is told that his is a duplicate, and it stays
       his own; after a change of the weights it publishes nothing.                                            publish
    7  A page that it published stays on the device while it is open.                                          claimed
    8  suspend(), close() and a lost pool take all it has, once; resume() begins again with all tokens.           ends
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stepwell.index import Tier
from stepwell.testing.model import ABSENT, QUARANTINED, BrokenPromise, Found, States


class State(Enum):
    """Where a sequence stands; drawn at the head of sequence.py."""

    MATCHED = "matched"
    COMPUTING = "computing"
    SUSPENDED = "suspended"
    LOST = "lost"


class Hold(Enum):
    """What a slot is to the sequence that has it."""

    FOUND = "found"  # a cached page, pinned where it was found
    CLAIMED = "claimed"  # the page is on its way to the device: this sequence computes it
    PUBLISHED = "published"  # the page is resident: this sequence computed it, and keeps it there
    PRIVATE = "private"  # no page's


@dataclass(slots=True)
class Place:
    """One page of a sequence on the device. content: what the slot holds; None: nothing was computed yet."""

    slot: int
    hold: Hold
    content: bytes | None = None


@dataclass(slots=True, eq=False)
class SequenceModel:
    """One open sequence.

    Invariant: `places` is its block table; the first `ready` of them hold their tokens' KV.

    path: the branches that its whole pages take. extra: tokens behind them. keys: of the whole pages. epoch, turn: of
    the weights when it was opened or resumed.
    """

    page_tokens: int
    path: tuple[int, ...]
    extra: int
    space: int
    keys: tuple[bytes, ...]
    epoch: int
    turn: int
    state: State = State.MATCHED
    waits: bool = True
    places: list[Place] = field(default_factory=list)
    ready: int = 0  # pages
    target: int = 0  # pages that are ready or being loaded
    pending: int = 0  # pages
    computed: int = 0  # tokens
    published: int = 0  # pages that publish() is done with
    leased: list[tuple[bytes, int]] = field(default_factory=list)  # pages and the tiers they are pinned in
    claimed: list[bytes] = field(default_factory=list)  # published pages, pinned wherever they are
    private: int = 0  # places that are no page's

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.path) * self.page_tokens + self.extra

    @property
    def is_usable(self) -> bool:
        """Whether it may hold something on the device."""
        return self.state in (State.MATCHED, State.COMPUTING)

    @property
    def usable_keys(self) -> tuple[bytes, ...]:
        """The pages that it may find: its last token is left to compute."""
        return self.keys[: (self.tokens - 1) // self.page_tokens]

    def numbers(self) -> tuple[int, int, int, int]:
        """Say what ready, loading, pending and missing are (1)."""
        ready, loading, pending = (
            pages * self.page_tokens for pages in (self.ready, self.target - self.ready, self.pending)
        )
        missing = self.tokens - ready - loading - pending
        if missing < (self.state is State.MATCHED):
            raise BrokenPromise(f"{self.tokens} tokens: {ready} ready, {loading} loading, {pending} pending")
        return ready, loading, pending, missing

    # ---- finding -----------------------------------------------------------------------------------------------------

    def looked(self, found: Found, target: int, states: Callable[[bytes], States], slots: Sequence[int]) -> None:
        """Take what a look found (2), and say what it pins.

        Args:
            target: pages that it says it has or loads. states: what pages are now. slots: its block table.
        """
        on_device = [tier == Tier.DEVICE for tier in found.tiers]
        ready = on_device.index(False) if False in on_device else found.pages
        if len(slots) != ready:
            raise BrokenPromise(f"{len(slots)} pages are ready, the device has {ready} of {found}")
        if ready < self.ready:
            raise BrokenPromise(f"{self.ready} pages were ready, {ready} are")
        if ready and [place.slot for place in self.places] != list(slots[: len(self.places)]):
            raise BrokenPromise(f"pages that were ready are in {slots}, and were in {self.places}")
        expected = found.pages if self.waits else ready
        pending = found.pending if self.waits else 0
        pinned = found.pages
        if target != expected:
            # A quarantined copy in host memory bars the way there: what is behind is computed.
            is_barred = self.waits and ready <= target < found.pages
            if not (is_barred and states(self.keys[target])[Tier.HOST] == QUARANTINED):
                raise BrokenPromise(f"{target} pages are ready or loading, {found} says {expected}")
            pending, pinned = 0, target
        self.places = [Place(slot, Hold.FOUND) for slot in slots]
        self.ready = self.published = ready
        self.target, self.pending = target, pending
        self.leased = list(zip(self.keys[:pinned], found.tiers, strict=False))

    def stop_waiting(self) -> None:
        """Have what is not ready be its own to compute."""
        self.target, self.pending = self.ready, 0

    # ---- computing ---------------------------------------------------------------------------------------------------

    def begin_computing(self) -> None:
        """Have it look for nothing any more, and pin what is ready alone: it is given pages to compute into."""
        if self.state is State.MATCHED:
            self.state = State.COMPUTING
            self.stop_waiting()
            self.leased = self.leased[: self.ready]
            self.computed = self.ready * self.page_tokens

    def extended(self, pages: int, slots: Sequence[int], claimed: Callable[[int], bool]) -> None:
        """Take the slots of its first `pages` pages (5). claimed: whether a page's claim is this sequence's."""
        had = len(self.places)
        if len(slots) != max(had, pages):
            raise BrokenPromise(f"a sequence of {had} pages asked for {pages} and has {len(slots)}")
        if pages <= had:
            return
        for page in range(had, pages):
            hold = Hold.CLAIMED if claimed(page) else Hold.PRIVATE
            self.private += hold is Hold.PRIVATE
            self.places.append(Place(slots[page], hold))

    def publish(self, pages: int, turn: int, state: Callable[[bytes], int]) -> tuple[list[bytes], int]:
        """Say what publishing the first `pages` pages comes to (6): the pages that are new on the device, and how many
        are duplicates.

        Args:
            turn: of the weights now. state: what a page is on the device.
        """
        first, fresh, duplicates = self.published, [], 0
        if pages <= first:
            return [], 0
        self.published = self.ready = self.target = pages
        if turn != self.turn:
            return [], 0
        for page in range(first, pages):
            place, key = self.places[page], self.keys[page]
            if place.hold is Hold.CLAIMED or (place.hold is Hold.PRIVATE and state(key) == ABSENT):
                self.private -= place.hold is Hold.PRIVATE
                place.hold = Hold.PUBLISHED
                fresh.append(key)
            elif place.hold is Hold.PRIVATE:
                duplicates += 1
        self.claimed += fresh
        return fresh, duplicates

    # ---- ending ------------------------------------------------------------------------------------------------------

    def ends(self, state: State) -> list[bytes]:
        """Give everything back (8). Returns the pages whose claims are given up."""
        given_up = [key for place, key in zip(self.places, self.keys, strict=False) if place.hold is Hold.CLAIMED]
        self.state = state
        self.places, self.leased, self.claimed = [], [], []
        self.ready = self.target = self.pending = self.computed = self.published = self.private = 0
        return given_up

    # ---- all of them -------------------------------------------------------------------------------------------------

    def same_slots(self, slots: Sequence[int]) -> None:
        """Hold its block table to (4)."""
        if [place.slot for place in self.places] != list(slots):
            raise BrokenPromise(f"the pages of a sequence are in slots {slots}, and were in {self.places}")

    def key_of(self, page: int) -> bytes | None:
        """Return the key that a slot is cached under; None: it is private, or not yet to be read."""
        return self.keys[page] if self.places[page].hold in (Hold.FOUND, Hold.PUBLISHED) else None


def owns(sequences: Sequence[SequenceModel]) -> None:
    """Hold the slots of all sequences to (3)."""
    owners: dict[int, tuple[int, bytes] | None] = {}
    for each in sequences:
        for page, place in enumerate(each.places):
            key = each.key_of(page)
            owner = None if key is None else (each.epoch, key)
            if place.slot in owners and (owner is None or owners[place.slot] != owner):
                raise BrokenPromise(f"slot {place.slot} has two owners: {owners[place.slot]} and {owner}")
            owners[place.slot] = owner
