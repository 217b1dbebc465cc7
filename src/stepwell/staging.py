"""Continue a look-up with pages that a neighbour has: claim them in host memory, start the copy, count them as found.

    own run ends --find--> a run of pages that are here or with a neighbour --claim--> ARRIVING in host, pinned by the
    lease of the match --stage--> the mover reads them (FORMAT.md 4); a load of the match begins once they are there

A page on its way may fail to come: then the load ends before it, and the next look-up is not offered it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.copies import NEW, PENDING, Copies
from stepwell.index import ClaimBatch, Index, MatchResult, Miss, Taken, Tier
from stepwell.mover import SINK, Plan
from stepwell.room import Room

_HASH_BYTES: Final = 32
_OPEN_ENDS: Final = (Miss.ABSENT, Miss.PENDING)


class Staging:
    """What look-ups do about pages that only a neighbour has.

    Invariant: a page that a match counts and that is not resident here is the sink of a transfer that was submitted.
    Threads: any.
    """

    def __init__(self, index: Index, room: Room, copies: Copies, foreign: _core.Foreign) -> None:
        self._index = index
        self._room = room
        self._copies = copies
        self._foreign = foreign

    def extend(
        self,
        found: MatchResult,
        name_space: int,
        seed: bytes | None,
        tokens: npt.NDArray[np.int32],
        usable: int,
        into: Taken,
    ) -> MatchResult:
        """Continue a match of tokens, whose lease `into` has; what is returned takes its place.

        Cost: none where no neighbour's page is known; else the hashes of what continues it, and 32 pages' at least.
        """
        if not self._is_worth_it(found):
            return found
        prior = seed if found.pages == 0 else self._index.lease_key(found.lease, found.pages - 1)
        if prior is not None and len(prior) != _HASH_BYTES:
            return found
        run = self._foreign.find_run(self._index, prior, tokens, found.pages, found.epoch, usable)
        return self._take(
            found,
            run,
            lambda claims: self._index.extend_match(
                found, name_space, tokens, run.keys(), run.offered(), usable, Tier.HOST, into=into, claims=claims
            ),
        )

    def extend_keys(
        self,
        found: MatchResult,
        keys: npt.NDArray[np.uint8],
        kind: int,
        usable: int,
        into: Taken,
        *,
        most: Callable[[_core.ForeignRun], int] | None = None,
    ) -> MatchResult:
        """Continue a match of leading keys; as extend().

        Args: most: says how many leading pages of a run to take; None: all.
        """
        if not self._is_worth_it(found) or found.pages == len(keys):
            return found
        run = self._foreign.find_keys(self._index, keys[found.pages :], kind, found.epoch, usable)
        pages = run.pages if most is None else most(run)
        if pages == 0:
            return found
        return self._take(
            found,
            run,
            lambda claims: self._index.extend_match_keys(
                found,
                run.keys()[:pages],
                kind,
                run.offered()[:pages],
                usable,
                Tier.HOST,
                into=into,
                claims=claims,
            ),
        )

    @property
    def has_offers(self) -> bool:
        """Whether any neighbour's page is known, and could be brought."""
        return bool(self._foreign.pages > 0) and self._room.has_staging

    def offers(self, keys: npt.NDArray[np.uint8], kind: int) -> bool:
        """Say whether the page of the first key can be had all the same: a neighbour has it, or it has just come."""
        return self.offered(keys[:1], kind) > 0

    def offered(self, keys: npt.NDArray[np.uint8], kind: int) -> int:
        """Say how many leading keys can be had so."""
        if len(keys) == 0 or self._foreign.pages == 0:
            return 0
        found = self._foreign.find_keys(self._index, keys, kind, self._copies.epoch.number, self._room.readable)
        return int(found.pages)

    def _is_worth_it(self, found: MatchResult) -> bool:
        return self.has_offers and Miss(found.miss) in _OPEN_ENDS

    def _take(
        self, found: MatchResult, run: _core.ForeignRun, claim: Callable[[Taken], tuple[MatchResult, ClaimBatch]]
    ) -> MatchResult:
        if run.pages == 0:
            return found
        self._room.make(Tier.HOST, run.foreign)
        with Taken(self._index) as claims:
            extended, batch = claim(claims)
            outcome = batch.outcomes[:, Tier.HOST]
            new = np.flatnonzero(outcome == NEW).astype(np.uint32)
            joined = np.flatnonzero(outcome == PENDING)
            last = extended.pages - found.pages  # rows from there on are not to be had
            if joined.size:
                on_their_way = self._copies.are_staged(batch.pages[joined])
                if not on_their_way.all():  # somebody else's copy: not ours to promise
                    last = int(joined[on_their_way.argmin()])
            plan = Plan.empty(batch.pages[new])
            plan.roles[:, Tier.HOST] = SINK
            plan.slots[:], plan.numbers[:] = batch.slots[new], batch.numbers[new]
            if new.size and not self._copies.stage(plan, run, new, claims):
                last = min(last, int(new[0]))
            return self._index.shorten_match(extended, found.pages + last)
