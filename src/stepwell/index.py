"""Say what is where: the index of pages by tokens and by key, and the words of its answers.

The index itself is C++ (csrc/index.h): a radix tree over tokens, a page table, and per page and tier a residency, a
slot, a claim number and pins, all under one mutex that is never held over a copy. Ids never travel unclaimed: what a
match returns is pinned, what a claim returns is the claimant's until it is committed or aborted. A call that may be
ended by any exception (ctrl-C comes as one) has both put down in a `Taken`, which returns what was not handed on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from stepwell._core import ClaimBatch, Index, MatchResult, Taken, move_table

__all__ = [
    "ALL_TIERS",
    "ClaimBatch",
    "ClaimOutcome",
    "Index",
    "MatchResult",
    "Miss",
    "Move",
    "Residency",
    "Taken",
    "Tier",
    "legal_move",
    "tier_mask",
]


class Tier(IntEnum):
    """A tier; smaller is nearer to the computation. In text it is its name: f"{Tier.DISK}" is "disk"."""

    DEVICE = 0
    HOST = 1
    SHARED = 2
    DISK = 3

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


ALL_TIERS: Final = tuple(Tier)


class Residency(IntEnum):
    """What a page is in one tier. The legal moves are csrc/residency.h."""

    ABSENT = 0
    ARRIVING = 1
    RESIDENT = 2
    LEAVING = 3
    QUARANTINED = 4


NO_TIER: Final = 0xFF
"""In place of a tier, in what the core says of a page: none, as csrc/index.cc has it."""


class Move(IntEnum):
    """A move of a residency."""

    CLAIM = 0
    COMMIT = 1
    ABORT = 2
    CLAIM_VICTIM = 3
    FINISH = 4
    KEEP = 5
    QUARANTINE = 6
    MEND = 7


class Miss(IntEnum):
    """Why a match ended where it did, in csrc/index.h's numbers."""

    NONE = 0
    ABSENT = 1
    PENDING = 2
    QUARANTINED = 3
    POISONED = 4


class ClaimOutcome(IntEnum):
    """What a claim of one page in one tier came to, in csrc/index.h's numbers."""

    NONE = 0
    NEW = 1
    PENDING = 2
    PRESENT = 3
    FULL = 4
    REFUSED = 5


def tier_mask(*tiers: Tier) -> int:
    """Return the bits of some tiers."""
    mask = 0
    for tier in tiers:
        mask |= 1 << tier
    return mask


def legal_move(move: Move, before: Residency) -> Residency | None:
    """Return the residency after a move, or None where the table forbids it."""
    after = int(move_table()[move, before])
    return None if after == 0xFF else Residency(after)
