"""Keep for a while what probes have found, and bring nearer what of it is on disk: by key, whoever asks how often.

    probe -> match -> keep(): each page once, until the latest end that was asked for
    a get has delivered it: spend() | its time has passed: end_due() | its room is needed: end_for(), the oldest first

An engine asks again and again for a request that waits, and makes no call for one that was given up. So no call owns
what it has asked for: the index does (csrc/index.h, "courtesies"), one pin a page, and an exception has nothing to
return. What is kept here is only which copies were begun ahead.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.clock import Clock
from stepwell.copies import Ahead, Copies
from stepwell.index import Index, Tier
from stepwell.lease import Match
from stepwell.room import Room

_SHARE: Final = 0.25
"""Of a tier's pages: what probes may keep there. The rest is for who saves."""
_SHARE_AHEAD: Final = 0.125
"""Of a tier's slots: what may be on its way there ahead of a get. Twice as much could be in it and not be kept."""


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A copy that a probe has begun. is_asked_for: by one with a lease: dropped once nobody asks for a page of it."""

    ahead: Ahead
    is_asked_for: bool


class ProbeLeases:
    """What the probes of a store keep, and the copies that they have begun.

    Invariant: of a tier's slots no more than `_SHARE_AHEAD` are taken by copies that were begun ahead and run, but for
        what probes in other threads begin at the same moment.
    Threads: any.
    """

    def __init__(self, index: Index, room: Room, copies: Copies, clock: Clock, *, queue_units: int) -> None:
        """Args: queue_units: of each of the mover's queues."""
        self._index = index
        self._room = room
        self._copies = copies
        self._clock = clock
        self._most_queued = queue_units // 2
        self._lock = threading.Lock()
        self._begun: list[_Begun] = []  # GUARDED_BY(_lock); those that may run still
        self.allowed: dict[Tier, int] = {}
        """How many pages probes may keep in each tier."""
        self.dropped = 0
        """Copies that were begun ahead and cancelled, for nobody asks for their pages any more."""
        self.pressed = 0
        """How often room was asked for that only probes could give."""

    def keep(self, match: Match, seconds: float) -> None:
        """Keep a match's pages for so long, as far as probes may: the leading ones rather than those behind."""
        if match.pages and seconds > 0:
            now = self._clock.monotonic()
            self._index.keep_until(match.lease_id(), now, now + seconds)

    def spend(self, keys: npt.NDArray[np.uint8], kind: int, delivered: npt.NDArray[np.bool_]) -> None:
        """Keep the pages no longer that a get has delivered: whoever asked for them, they have come."""
        self._index.spend(keys, kind, delivered)

    def read_ahead(self, match: Match, *, is_leased: bool) -> None:
        """Begin to bring a match's disk pages into memory: those that are not on their way, as far as there is room.

        Args:
            is_leased: keep() came before: what was not begun when nobody asks for them any more is dropped.
        """
        lacking = match.tiers.get(Tier.DISK, 0)
        for tier in (Tier.SHARED, Tier.HOST):
            if not lacking:
                return
            if not self._room.is_writable(tier) or (tier is Tier.HOST and self._room.stages_only):
                continue
            most = min(lacking, self._room_ahead(tier))
            begun, lacking = self._copies.read_ahead(match.lease_id(), tier, most)
            with self._lock:
                self._begun += [_Begun(each, is_leased) for each in begun]

    def end_due(self) -> None:
        """Keep no longer what has been kept for its time; drop what was to come for it. The keeper's round."""
        self._index.end_due_courtesies(self._clock.monotonic())
        self.allowed = {tier: max(1, int(_SHARE * self._room.most_pages(tier))) for tier in self._room.all_tiers}
        for tier, pages in self.allowed.items():
            self._index.allow_courtesies(tier, pages)
        with self._lock:
            self._begun = [each for each in self._begun if not each.ahead.core.done]
            unasked = [each for each in self._begun if self._is_unasked(each)]
            self._begun = [each for each in self._begun if each not in unasked]
            self.dropped += len(unasked)
        for each in unasked:
            each.ahead.core.cancel()

    def end_for(self, tier: Tier) -> bool:
        """Keep no longer, of what is in a tier, the half that was asked for longest ago. False: there is none."""
        self.pressed += 1
        if self._index.end_due_courtesies(self._clock.monotonic()):
            return True
        return self._index.end_older_courtesies(tier) > 0

    def end_in(self, tier: Tier) -> None:
        """Keep nothing in a tier any more."""
        while self._index.end_older_courtesies(tier):
            pass

    def end_all(self) -> None:
        """Keep nothing any more."""
        self._index.end_courtesies()

    def _is_unasked(self, begun: _Begun) -> bool:
        """Say whether nobody wants what is being brought: no probe that keeps it, and no load that has joined."""
        ahead = begun.ahead
        return begun.is_asked_for and not ahead.is_joined and not self._index.has_courtesy(ahead.pages)

    def _room_ahead(self, tier: Tier) -> int:
        """Say how many pages more may be begun for a tier. A page is one unit of the mover's work at most."""
        mover = self._copies.mover
        if mover is None:
            return 0
        with self._lock:
            self._begun = [each for each in self._begun if not each.ahead.core.done]
            running = sum(each.ahead.pages.size for each in self._begun if each.ahead.tier is tier)
        moved = mover.stats()
        queued = int(moved["queued_copy"] + moved["queued_io"])
        share = max(1, int(_SHARE_AHEAD * int(self._index.counts(tier)["capacity"])))
        return max(0, min(share - running, self._most_queued - queued))
