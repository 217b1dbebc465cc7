"""Count beside a store what it says that it has done, and hold its statistics to that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from stepwell.index import Miss, Tier
from stepwell.stats import Stats
from stepwell.testing.model import BrokenPromise

if TYPE_CHECKING:
    from stepwell.testing.caller import Caller

_REASON = {Miss.ABSENT: "absent", Miss.PENDING: "absent", Miss.QUARANTINED: "corrupt"}
"""Why a page was missed that is not on its way itself; behind one that is, what is not on its way is absent."""


class Tally:
    """What a store must have counted since it was opened.

    Invariant: every page that was asked for is a hit in one tier, or a miss for one reason; a hit that was not
    delivered is a miss beside. A page that a load delivered is counted once, for the tier that it was found in.
    """

    def __init__(self) -> None:
        self.lookups = self.lookup_pages = 0
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.undelivered = 0
        self.delivered: Counter[str] = Counter()
        self.saved = self.refused = 0
        self.evicted: Counter[int] = Counter()
        self.quarantined = 0
        self.has_failed = False  # calls on files did, or a page was damaged: numbers of errors are not judged
        self.is_blind = False  # pages may have left that the model does not know
        self.is_unsure = False  # why a page was missed may be known to the store alone

    def looked_up(self, asked: int, tiers: list[int], miss: Miss, pending: int) -> None:
        """Count a look-up: where its pages were found, and why it ended."""
        self.lookups += 1
        self.lookup_pages += asked
        self.hits.update(Tier(tier).name.lower() for tier in tiers)
        missed = asked - len(tiers)
        if missed:
            waiting = min(pending, missed)
            self.misses["pending"] += waiting
            self.misses[_REASON.get(miss, "absent")] += missed - waiting

    def deliver(self, tiers: Iterable[int]) -> None:
        """Count pages that came with a load, by the tier that each was found in."""
        self.delivered.update(Tier(tier).name.lower() for tier in tiers)

    def save(self, stored: int, refused: int) -> None:
        """Count a save."""
        self.saved += stored
        self.refused += refused

    def check(self, it: Caller) -> None:
        """Hold the statistics of a store to what was counted."""
        it.poll()
        found = it.store.stats()
        self._check_errors(found, it)
        if not it.counts_all:
            return
        says: dict[str, tuple[object, object]] = {
            "lookups": (found.lookups, self.lookups),
            "lookup_pages": (found.lookup_pages, self.lookup_pages),
            "hit_pages": (_more_than_0(found.hit_pages), _more_than_0(self.hits)),
            "delivered_pages": (_more_than_0(found.delivered_pages), _more_than_0(self.delivered)),
            "saved_pages": (found.saved_pages, self.saved),
            "refused_pages": (found.refused_pages, self.refused),
            "pins": (found.pins, len(it.pins)),
            "probed_pages": (found.probed_pages, len(it.model.asked)),
            "pinned_pages": (found.pinned_pages, it.model.held_pages()),
            "failed_jobs, bus_faults, poisoned": ((found.failed_jobs, found.bus_faults, found.poisoned), (0, 0, False)),
            "all misses": (sum(found.misses.values()), sum(self.misses.values()) + self.undelivered),
        }
        if not self.is_blind:
            says["evicted_pages"] = (
                _more_than_0(found.evicted_pages),
                _more_than_0({Tier(tier).name.lower(): pages for tier, pages in self.evicted.items()}),
            )
        if not self.has_failed:
            trouble = found.checksum_failures, found.io_errors, found.retried_pages, found.rescued_pages
            says["checksum_failures, io_errors, retried_pages, rescued_pages"] = (trouble, (0, 0, 0, 0))
        for what, (said, counted) in says.items():
            if said != counted:
                raise BrokenPromise(f"stats() says {what} {said}, and it is {counted}")
        for reason in ("absent", "pending"):
            if not self.is_unsure and found.misses[reason] != self.misses[reason]:
                raise BrokenPromise(f"stats() says {found.misses} of misses, and of look-ups they are {self.misses}")

    def _check_errors(self, found: Stats, it: Caller) -> None:
        if found.checksum_failures < self.quarantined and not it.world.is_shared:
            raise BrokenPromise(f"{found.checksum_failures} checksums failed, {self.quarantined} pages are quarantined")
        if found.rescued_pages > found.retried_pages:
            raise BrokenPromise(f"{found.rescued_pages} of {found.retried_pages} pages that were retried were rescued")
        if not it.world.shape.selective and (found.held_back_pages or found.second_use_pages):
            raise BrokenPromise(f"disk writes are not selective, and stats() says {found}")
        if it.counts_all and found.leases and not (it.held or it.running or found.queued):
            raise BrokenPromise(f"nothing is open, and there are {found.leases} leases")
        for name, tier in found.tiers.items():
            counts = it.index.counts(Tier[name.upper()])
            if {each: getattr(tier, each) for each in counts} != counts:
                raise BrokenPromise(f"{tier} is said of {name}, of which the index says {counts}")
            trouble = tier.trips, tier.read_errors, tier.write_errors, tier.retired, tier.skipped, tier.owed
            if not self.has_failed and (tier.state != "serving" or any(trouble)):
                raise BrokenPromise(f"{name} has not failed, and stats() says {tier}")


def _more_than_0(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
