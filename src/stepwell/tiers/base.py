"""State the contract of a tier: a place that holds pages in slots.

A tier's bytes move in C++ (csrc/medium.h: prepare_read, begin_write, finish_write, retire); which page is in which slot
is the index's. What is left to a tier is where its memory comes from and goes to:

    open -> its slots are in the index, with the pages that were found there (recovered)
    tick -> called by the keeper: make room ahead of need, give back, keep order on disk
    close -> the memory is given up; what may outlive the process does

The suites that every tier passes are `stepwell.testing.page_tier_contract`, and `stepwell.testing.contract`, which
anyone can point at a tier of their own: what that must do is `stepwell.testing.tier.Tier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stepwell import _core
from stepwell.index import Index, Tier


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a tier found when it opened, in pages: recovered and usable; damaged or duplicate, freed. Neither: those of
    other epochs."""

    pages: int
    freed: int


class PageTier(Protocol):
    """A tier as the store and its keeper see it.

    Threads: open and close by the store's constructor and close(); tick by the keeper. Nothing here is on a data path.
    """

    @property
    def tier(self) -> Tier:
        """Which tier this is."""

    @property
    def medium(self) -> _core.Medium:
        """What the mover copies from and to. Valid from construction to close()."""

    def open(self, index: Index) -> Recovered:
        """Add this tier's slots to the index, and the pages found in them.

        Raises:
            BudgetError, VolumeError, VolumeBusyError, FingerprintError, TierIOError: with the numbers and the remedy.
        """

    @property
    def most_pages(self) -> int:
        """Pages that the tier holds once all its capacity is taken; 0 while that is not known."""

    @property
    def may_grow(self) -> bool:
        """Whether there may be more memory to take; False once there was none, until the keeper finds some."""

    def grow(self, index: Index, free_pages: int) -> None:
        """Take memory until `free_pages` slots are free, as far as there is any. By the keeper."""

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Do what is due: grow if fewer than `low_pages` slots are free and there is room, give back what neighbours
        lack.

        Returns:
            Pages that should be evicted from this tier now to have `high_pages` free; 0 where growing did it.
        """

    def close(self, index: Index) -> None:
        """Give the memory up. Requires: the mover is joined, no page is pinned. Idempotent."""
