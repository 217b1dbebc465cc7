"""Show what a store holds and has done: numbers derived from the index and the mover, and misses by reason."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.index import Miss, Tier

MISS_REASONS: Final = ("absent", "pending", "deadline", "corrupt", "epoch", "foreign-gone", "full", "poisoned", "slow")
SHED_REASONS: Final = ("loads", "deadline")
_MISS_NAME: Final = {
    Miss.ABSENT: "absent",
    Miss.PENDING: "pending",
    Miss.QUARANTINED: "corrupt",
    Miss.POISONED: "poisoned",
}


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in pages (free + arriving + resident + leaving + quarantined = capacity) and bytes copied since open.

    pinned: resident pages that a lease or transfer holds. held: those whose last lasting copy a pin() keeps here.
    owed: slots of `leaving` that stay out of use until the record of the page before is written: a crash before that
        brings the page back.
    bytes_read, bytes_written: payload.
    recovered: pages found again in volumes that were adopted. cold: what was not, by reason (docs/directories.md):
    volumes that could not be used, and for epoch, records and duplicate, pages. Those of another epoch are resident.
    state: "serving", "read-only" or "out" (of service), and the reason. trips: how often it was not serving.
    read_errors, write_errors: calls on its files that failed. retired: slots in quarantine that are beyond mending.
    skipped: pages that saves did not write here because it took none, or would have taken too long.
    read_seconds, write_seconds: of its workers, in units of work that read or wrote here: each page has an equal share
    of the time of its unit.
    read_rate, write_rate: bytes a second of one worker, a moving average of loads and of saves; 0: not known.
    wait_seconds: moving average of what loads from here have lain in the queue. expected_seconds: until a page would be
    loaded, if it were asked for now. too_slow: at the last probe with a bound it was, and its pages were misses.
    """

    capacity: int
    free: int
    arriving: int
    resident: int
    leaving: int
    quarantined: int
    pinned: int
    held: int
    owed: int
    bytes_read: int
    bytes_written: int
    state: str
    reason: str
    trips: int
    read_errors: int
    write_errors: int
    retired: int
    skipped: int
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    read_rate: float = 0.0
    write_rate: float = 0.0
    wait_seconds: float = 0.0
    expected_seconds: float = 0.0
    too_slow: bool = False
    recovered: int = 0
    cold: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NeighbourStats:
    """Pages of other processes' volumes, and of those that nobody has adopted.

    volumes, pages: known now. delivered: pages that were copied from them since open. stale: that had been freed or
    rewritten when they were to be read. refused: that were damaged or unreadable, and are not asked for again.
    left_out: known and forgotten, for there were too many.
    """

    volumes: int = 0
    pages: int = 0
    delivered: int = 0
    stale: int = 0
    refused: int = 0
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds and has done since it opened.

    tiers: by name. lookups, lookup_pages: calls that matched, whole pages they asked for. hit_pages: pages they found,
    by tier. delivered_pages: pages that load and load_keys put into the caller's pool, by the tier they were found in,
    whether a match counted them or not; a rescued page counts for the tier that was to have it.
    misses: pages not found or not delivered, by reason; hit pages - failed deliveries + misses = lookup pages.
    retried_pages, rescued_pages: pages that a load found bad in one tier and asked another for, and got from there.
    shed_pages: pages that saves did not write to some tier, or at all, by reason: `loads` were waiting, or the
    `deadline` was expected to pass.
    failed_jobs: units of work that an exception ended (no memory, most likely).
    bytes are payload bytes. queued: units of work that wait. page_records, tree_edges, leases: the index's size.
    pins, pinned_pages: pins by time that live, and pages that they cover. probed_pages: what leases of probes keep.
    held_back_pages, second_use_pages: with selective disk writes, pages saved to shared memory only, and pages written
    to disk because they were used a second time.
    neighbours: what is known and had of other processes' pages; those that are had are hits in the host tier.
    """

    tiers: dict[str, TierStats]
    lookups: int
    lookup_pages: int
    hit_pages: dict[str, int]
    delivered_pages: dict[str, int]
    misses: dict[str, int]
    saved_pages: int
    refused_pages: int
    shed_pages: dict[str, int]
    evicted_pages: dict[str, int]
    checksum_failures: int
    io_errors: int
    bus_faults: int
    retried_pages: int
    rescued_pages: int
    failed_jobs: int
    transfers: int
    queued: int
    page_records: int
    tree_edges: int
    leases: int
    pins: int
    pinned_pages: int
    probed_pages: int
    held_back_pages: int
    second_use_pages: int
    neighbours: NeighbourStats
    poisoned: bool


@dataclass(frozen=True, slots=True)
class Tree:
    """The radix tree at one moment: a row is an edge, a stretch of pages without a branch; parents come first.

    parents: int32[n], the row of the edge that it continues, -1 behind a root. namespaces: uint32[n], numbers in the
    order in which the store met them. epochs: uint64[n]. first_pages, pages: uint32[n], the depth of the first page and
    how many lie on the edge. pages_below: uint64[n], pages on it and on everything below it, shown or not.
    resident: uint32[n, 4], pages resident in each Tier; a page may be in several, and a recovered page is in the tree
    once it has been looked up.
    edges, tree_pages: of the whole tree.
    """

    parents: npt.NDArray[np.int32]
    namespaces: npt.NDArray[np.uint32]
    epochs: npt.NDArray[np.uint64]
    first_pages: npt.NDArray[np.uint32]
    pages: npt.NDArray[np.uint32]
    pages_below: npt.NDArray[np.uint64]
    resident: npt.NDArray[np.uint32]
    edges: int
    tree_pages: int

    @property
    def is_cut(self) -> bool:
        """Whether edges were left out: those with the fewest pages on and below them."""
        return self.edges > len(self.parents)


@dataclass(slots=True)
class Counters:
    """Count what cannot be read off the index: lookups and why pages were missed. Threads: any."""

    lookups: int = 0
    lookup_pages: int = 0
    saved_pages: int = 0
    refused_pages: int = 0
    held_back_pages: int = 0
    second_use_pages: int = 0
    hit_pages: dict[Tier, int] = field(default_factory=dict)
    delivered_pages: dict[Tier, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    evicted_pages: dict[Tier, int] = field(default_factory=dict)
    skipped_pages: dict[Tier, int] = field(default_factory=dict)
    shed_pages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHED_REASONS, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def looked_up(self, asked: int, found: Mapping[Tier, int], miss: Miss, pending: int, *, slow: int = 0) -> None:
        """Count one lookup of `asked` pages that found some, by tier; the rest missed for one reason, but for `slow`
        ones, which were not offered."""
        missed = asked - sum(found.values())
        with self.lock:
            self.lookups += 1
            self.lookup_pages += asked
            for tier, pages in found.items():
                self.hit_pages[tier] = self.hit_pages.get(tier, 0) + pages
            self.misses["slow"] += slow
            missed -= slow
            if missed:
                waiting = min(pending, missed)
                self.misses["pending"] += waiting
                reason = "absent" if miss is Miss.PENDING else _MISS_NAME.get(miss, "absent")
                self.misses[reason] += missed - waiting

    def missed(self, reason: str, pages: int) -> None:
        """Count pages that a lookup had promised and a load did not deliver."""
        with self.lock:
            self.misses[reason] += pages

    def delivered(self, found: Mapping[Tier, int]) -> None:
        """Count pages that a load has put into the caller's pool, by the tier that they were found in."""
        with self.lock:
            for tier, pages in found.items():
                self.delivered_pages[tier] = self.delivered_pages.get(tier, 0) + pages

    def evicted(self, tier: Tier, pages: int) -> None:
        """Count pages dropped from a tier."""
        if not pages:
            return
        with self.lock:
            self.evicted_pages[tier] = self.evicted_pages.get(tier, 0) + pages

    def skipped(self, tiers: Iterable[Tier], pages: int) -> None:
        """Count pages that a save did not write to tiers that take none."""
        with self.lock:
            for tier in tiers:
                self.skipped_pages[tier] = self.skipped_pages.get(tier, 0) + pages

    def shed(self, reason: str, pages: int) -> None:
        """Count pages that a save did not write to a tier, so that others may be served."""
        with self.lock:
            self.shed_pages[reason] += pages

    def selected(self, written: int, held_back: int) -> None:
        """Count pages written to disk for a second use, and pages not written for it was their first."""
        with self.lock:
            self.second_use_pages += written
            self.held_back_pages += held_back

    def saved(self, pages: int, refused: int) -> None:
        """Count pages accepted and refused by a save."""
        with self.lock:
            self.saved_pages += pages
            self.refused_pages += refused
