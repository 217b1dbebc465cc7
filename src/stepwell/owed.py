"""Get slots back whose records could not be retired, and evict nothing in vain meanwhile.

    page leaves -> its record is retired -> slot free
                -> the record cannot be written (EIO, ENOSPC) -> slot owed -> tried again -> slot free
                -> dropped from the disk by a call of the store's user -> slot owed -> the tier's round retires it

An owed slot is nobody's: a page written there would be served, but one that never comes would leave the record as it
is, and after a crash a page that was forgotten would be found again. The index counts it as leaving.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

from stepwell import _core
from stepwell.clock import Backoff, Clock
from stepwell.index import Index, Tier

_LOG = logging.getLogger("stepwell")
RECORDS_AT_ONCE: Final = 256
"""Records that a round retires at most: on a disk a write each, some milliseconds in all."""
_SAY_AGAIN_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Tried:
    """What came of it in one tier.

    retries: of owed slots. room: evictions of which no slot came free. failures: calls to retire the records of pages
    that left which failed; errno: of the last one, until somebody asked for it. in_hand: slots that were owed, and
    whose records are being retired: for long, where the disk hangs. turns: how often some were taken in hand.
    """

    retries: Backoff = field(default_factory=Backoff)
    room: Backoff = field(default_factory=Backoff)
    said_at: float = float("-inf")
    failures: int = 0
    errno: int = 0
    in_hand: int = 0
    turns: int = 0


class Owed:
    """When to try again in each tier.

    Threads: retry() and reclaim() by the tier's round; the others any.
    """

    def __init__(self, index: Index, clock: Clock) -> None:
        self._index = index
        self._clock = clock
        self._tried = {tier: _Tried() for tier in Tier}
        self._lock = threading.Lock()  # of the counts

    def retry(self, tier: Tier, medium: _core.Medium | None) -> None:
        """Try to retire the records of owed slots, if it is time: at once, then after 1, 2, 4, ... 60 seconds."""
        tried, now = self._tried[tier], self._clock.monotonic()
        owed = self._index.counts(tier)["owed"]
        if owed == 0 or medium is None:
            self.forget(tier)
            return
        if not tried.retries.is_due(now):
            return
        # One first: a disk that refuses may take seconds to say so. It is another one each time.
        tried_one = self.reclaim(tier, 1, medium)
        if tried_one.owed < tried_one.size:
            self.reclaim(tier, RECORDS_AT_ONCE, medium)
            self.forget(tier)
            return
        tried.retries.failed(now)
        if now - tried.said_at >= _SAY_AGAIN_SECONDS:
            tried.said_at = now
            _LOG.warning(
                "%s tier: the records of %d pages that left cannot be written: their slots stay out of use, and a "
                "process that starts before they are finds these pages again. They are tried again by themselves; look "
                "at dmesg and at the file system",
                tier,
                owed,
            )

    def reclaim(self, tier: Tier, slots: int, medium: _core.Medium) -> _core.Victims:
        """Retire the records of up to so many owed slots, in turn, and free those. Returns what became of them."""
        tried = self._tried[tier]
        tried.turns += 1
        tried.in_hand = slots
        try:
            with self._index.reclaim(tier, slots, medium) as victims:
                victims.free()
                return victims
        finally:
            tried.in_hand = 0

    def count(self, tier: Tier) -> int:
        """Say how many slots are owed: those whose records are being retired count until they are."""
        tried = self._tried[tier]
        while True:
            before = tried.in_hand, tried.turns
            counts = self._index.counts(tier)
            if before == (tried.in_hand, tried.turns):  # else they may count neither here nor there
                return min(counts["leaving"], counts["owed"] + before[0])

    def most_to_evict(self, tier: Tier, pages: int) -> int:
        """Say how many of `pages` may be evicted to make room: all, but where the last ones left no slot free one at a
        time, and ever more seldom. A disk that refuses records would have all its pages evicted in vain."""
        room = self._tried[tier].room
        if not room.has_failed:
            return pages
        return min(pages, 1) if room.is_due(self._clock.monotonic()) else 0

    def note(self, tier: Tier, victims: _core.Victims) -> None:
        """Take what became of the slots of pages that left."""
        tried = self._tried[tier]
        if victims.errors:
            with self._lock:
                tried.failures += victims.errors
                tried.errno = victims.error
        if victims.owed < victims.size:
            tried.room.succeeded()
        elif victims.owed:
            tried.room.failed(self._clock.monotonic())

    def failures(self, tier: Tier) -> int:
        """Return how many calls to retire the records of pages that left have failed."""
        return self._tried[tier].failures

    def take_errno(self, tier: Tier) -> int:
        """Return the errno of the last of them since the call before; 0: there was none, or it is not known."""
        tried = self._tried[tier]
        with self._lock:
            number, tried.errno = tried.errno, 0
        return number

    def forget(self, tier: Tier) -> None:
        """Take it that a tier's records can be written: none is owed, or its volumes were attached anew."""
        tried = self._tried[tier]
        tried.retries.succeeded()
        tried.room.succeeded()
