"""Say what one page of a store may do, step by step: the sequential specification that recorded histories are held to.

Each rule is a promise of the design (section 7, "The life of a page"), named where it stands. A step is what one call
came to for one page: a call on many pages is many steps, of one page each, because nothing is promised about several
pages at one instant but that a prefix has no gap, and that is looked at when a history is cut into pages.

The bytes of a page are the number of the save that brought them. Real callers save equal bytes under one key; here they
differ, so that it can be seen whose were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, NamedTuple

from stepwell.index import ClaimOutcome, Tier

ANY_TIER: Final = -1
ANY_SAVE: Final = -1
ANY_EPOCH: Final = -1
EVERYTHING: Final = -2


class Copy(NamedTuple):
    """Bytes of the page in one tier."""

    epoch: int
    tier: int
    save: int


class Coming(NamedTuple):
    """Bytes on their way into one tier, by a claim that will be committed or aborted once. number: of the save."""

    epoch: int
    tier: int
    save: int
    number: int


class Lease(NamedTuple):
    """A match that is open, by its number: it pins the page in one tier."""

    number: int
    epoch: int
    tier: int


@dataclass(frozen=True, slots=True)
class Page:
    """What is known of one page.

    copies: RESIDENT. promoted: what a load may have brought up from disk since, unseen. coming: ARRIVING.
    leases: pins of matches. holds: pins by time, by number; they end with the epoch.
    """

    epoch: int = 0
    copies: frozenset[Copy] = frozenset()
    promoted: frozenset[Copy] = frozenset()
    coming: frozenset[Coming] = frozenset()
    leases: frozenset[Lease] = frozenset()
    holds: frozenset[int] = frozenset()


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A save asked for the page: what each tier said, as (tier, ClaimOutcome). save: its number."""

    save: int
    outcomes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Land:
    """What a claim of a save came to in one tier: the page is RESIDENT there, or is not."""

    save: int
    tier: int
    is_here: bool


@dataclass(frozen=True, slots=True)
class Find:
    """A lookup found the page. tier: where, or ANY_TIER. save: whose bytes were delivered, or ANY_SAVE.

    lease: the number of the match that pins it from now on, or 0. epoch: under which it says that it was found.
    """

    tier: int = ANY_TIER
    save: int = ANY_SAVE
    lease: int = 0
    epoch: int = ANY_EPOCH


@dataclass(frozen=True, slots=True)
class Miss:
    """A lookup did not find the page."""


@dataclass(frozen=True, slots=True)
class Release:
    """A match ended, and all that was loaded by it."""

    lease: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A pin by time found the page in a lasting tier, and keeps it."""

    number: int


@dataclass(frozen=True, slots=True)
class Unhold:
    """A pin by time ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget or clear came by. is_certain: nobody else used the page meanwhile.

    tier: of this epoch in all tiers, ANY_TIER, is what forget drops. Clear drops those of all epochs: EVERYTHING where
    nobody is there to bring it up meanwhile, else one tier after another.
    """

    is_certain: bool
    tier: int = ANY_TIER


@dataclass(frozen=True, slots=True)
class Turn:
    """The epoch was set."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Restart:
    """The store was closed, with nothing under way, and opened again under the same epoch."""


Step = Claim | Land | Find | Miss | Release | Hold | Unhold | Drop | Turn | Restart


@dataclass(frozen=True, slots=True)
class PageModel:
    """The rules for stores of one configuration.

    tiers: that the store has. evicts: whether a page may leave for want of room; without, a miss is a lost page.
    """

    tiers: tuple[int, ...]
    evicts: bool

    @property
    def lasting(self) -> tuple[int, ...]:
        """Tiers that pages are saved to: those that outlive the process, else host memory."""
        return tuple(tier for tier in self.tiers if tier in (Tier.SHARED, Tier.DISK)) or self.tiers

    def begin(self) -> Page:
        """Return the state of a page that nobody has saved."""
        return Page()

    def apply(self, page: Page, step: Step) -> Iterable[Page]:
        """Return what the page may be after a step; nothing: this cannot be what came of it."""
        match step:
            case Claim():
                found = self._claim(page, step)
            case Land():
                found = self._land(page, step)
            case Find():
                found = self._find(page, step)
            case Miss():
                found = self._miss(page)
            case Release():
                leases = frozenset(each for each in page.leases if each.number != step.lease)
                found = iter([replace(page, leases=leases)])
            case Hold():
                found = (self._held(each, step) for tier in self.lasting for each in self._seen(page, tier, ANY_SAVE))
            case Unhold():
                found = iter([replace(page, holds=page.holds - {step.number})])
            case Drop():
                found = self._drop(page, step)
            case Turn():
                # Promises 2, and "epochs never mix": what was is kept under its epoch and is a miss under any other.
                holds = page.holds if step.epoch == page.epoch else frozenset()
                found = iter([replace(page, epoch=step.epoch, holds=holds)])
            case Restart():
                found = self._restart(page)
        return [self._with_promotions(each) for each in found]

    # Promises 1 and 2, bytes first, then publish; and the first publishes: of two claims of one tier one is new, until
    # it is aborted or what it brought has left.
    def _claim(self, page: Page, step: Claim) -> Iterator[Page]:
        here = [page]
        present = [tier for tier, outcome in step.outcomes if outcome == ClaimOutcome.PRESENT]
        for tier, outcome in step.outcomes:
            match outcome:
                case ClaimOutcome.PRESENT:
                    here = [after for each in here for after in self._seen(each, tier, ANY_SAVE)]
                case ClaimOutcome.PENDING:
                    here = [after for each in here for after in self._coming(each, tier)]
                case ClaimOutcome.NEW | ClaimOutcome.FULL:
                    here = [after for each in here for after in self._absent(each, tier)]
                    here = [each for each in here if not self._is_coming(each, tier)]
        for each in here:
            sources = {step.save}
            # A page that is in shared memory, and lacks its disk copy only, is written from there.
            if Tier.SHARED in present:
                sources = {copy.save for copy in each.copies if copy.epoch == page.epoch and copy.tier == Tier.SHARED}
            for source in sources:
                claims = frozenset(
                    Coming(page.epoch, tier, source if tier == Tier.DISK else step.save, step.save)
                    for tier, outcome in step.outcomes
                    if outcome == ClaimOutcome.NEW
                )
                yield replace(each, coming=each.coming | claims)

    # Promise 7: a failed transfer leaves the tier as it was. A claim ends once.
    def _land(self, page: Page, step: Land) -> Iterator[Page]:
        for claim in page.coming:
            if (claim.number, claim.tier) != (step.save, step.tier):
                continue
            after = replace(page, coming=page.coming - {claim})
            if step.is_here:
                after = replace(after, copies=after.copies | {Copy(claim.epoch, claim.tier, claim.save)})
            yield after

    # Promises 1 and 2: what is found is complete, of this epoch, and the bytes of the save that was published.
    def _find(self, page: Page, step: Find) -> Iterator[Page]:
        if step.epoch not in (ANY_EPOCH, page.epoch):
            return
        for tier in self.tiers if step.tier == ANY_TIER else (step.tier,):
            for after in self._seen(page, tier, step.save):
                if step.lease:
                    after = replace(after, leases=after.leases | {Lease(step.lease, page.epoch, tier)})
                yield after

    # Promises 3 and 5: a page that is pinned, or that nothing can have evicted, is found.
    def _miss(self, page: Page) -> Iterator[Page]:
        left = [page]
        for tier in self.tiers:
            left = [after for each in left for after in self._absent(each, tier)]
        yield from left

    # Forget and clear pass by what is pinned, and what is on its way.
    def _drop(self, page: Page, step: Drop) -> Iterator[Page]:
        def is_meant(copy: Copy) -> bool:
            if step.tier == ANY_TIER:
                return copy.epoch == page.epoch
            return step.tier in (EVERYTHING, copy.tier)

        meant = [copy for copy in page.copies if is_meant(copy)]
        free = [copy for copy in meant if not self._is_pinned(page, copy)]
        if step.is_certain and len(free) == len(meant) and not page.holds:
            promoted = frozenset(copy for copy in page.promoted if not is_meant(copy))
            yield replace(page, copies=page.copies - set(free), promoted=promoted)
            return
        # Where pages leave by themselves it makes no difference which of them left here.
        for size in [0] if self.evicts else range(len(free) + 1):
            for gone in combinations(free, size):
                after = replace(page, copies=page.copies - set(gone))
                if size == 0 or not page.holds or self._is_kept(after):
                    yield after

    # Promise 8, of a store that was closed: what was acknowledged in a lasting tier is there again, of whatever epoch.
    def _restart(self, page: Page) -> Iterator[Page]:
        copies, promoted = (
            frozenset(copy for copy in each if copy.tier != Tier.HOST) for each in (page.copies, page.promoted)
        )
        yield Page(epoch=page.epoch, copies=copies, promoted=promoted)

    # ---- what may have happened unseen ------------------------------------------------------------------------------

    def _with_promotions(self, page: Page) -> Page:
        """Add what a load may bring up from disk from now on: into shared memory, or where that is full, the host."""
        if Tier.DISK not in self.tiers:
            return page
        above = [tier for tier in self.tiers if tier < Tier.DISK]
        coming = {claim.tier for claim in page.coming if claim.epoch == page.epoch}
        below = [copy for copy in page.copies if copy.epoch == page.epoch and copy.tier == Tier.DISK]
        more = {Copy(copy.epoch, tier, copy.save) for copy in below for tier in above if tier not in coming}
        return replace(page, promoted=page.promoted | more) if more else page

    def _seen(self, page: Page, tier: int, save: int) -> Iterator[Page]:
        """Yield the page as it must be where it is RESIDENT in a tier, with these bytes or any."""
        for copy in page.copies:
            if (copy.epoch, copy.tier) == (page.epoch, tier) and save in (ANY_SAVE, copy.save):
                yield page
        for copy in page.promoted:
            if (copy.epoch, copy.tier) == (page.epoch, tier) and save in (ANY_SAVE, copy.save):
                for after in self._absent(page, tier):
                    yield replace(after, copies=after.copies | {copy})

    def _absent(self, page: Page, tier: int) -> Iterator[Page]:
        """Yield the page as it must be where it is not RESIDENT in a tier, nor anything but on its way there."""
        here = frozenset(copy for copy in page.copies if (copy.epoch, copy.tier) == (page.epoch, tier))
        if all(self._may_leave(page, copy) for copy in here):
            promoted = frozenset(copy for copy in page.promoted if (copy.epoch, copy.tier) != (page.epoch, tier))
            yield replace(page, copies=page.copies - here, promoted=promoted)

    def _may_leave(self, page: Page, copy: Copy) -> bool:
        if not self.evicts and copy.tier in self.lasting:
            return False
        if self._is_pinned(page, copy):
            return False
        return not page.holds or copy.tier not in self.lasting or self._is_kept(page, but=copy)

    @staticmethod
    def _is_pinned(page: Page, copy: Copy) -> bool:
        return any((lease.epoch, lease.tier) == (copy.epoch, copy.tier) for lease in page.leases)

    def _is_kept(self, page: Page, *, but: Copy | None = None) -> bool:
        """Say whether a lasting tier has, or may have, the page without one of its copies."""
        return any(
            copy.epoch == page.epoch and copy.tier in self.lasting and (but is None or copy.tier != but.tier)
            for copy in page.copies | page.promoted
        )

    @staticmethod
    def _is_coming(page: Page, tier: int) -> bool:
        return any((claim.epoch, claim.tier) == (page.epoch, tier) for claim in page.coming)

    def _coming(self, page: Page, tier: int) -> Iterator[Page]:
        """Yield the page as it must be where it is ARRIVING in a tier: by a save's claim, or a load that brings it."""
        if self._is_coming(page, tier):
            yield page
        elif any((copy.epoch, copy.tier) == (page.epoch, tier) for copy in page.promoted):
            yield from self._absent(page, tier)

    @staticmethod
    def _held(page: Page, step: Hold) -> Page:
        return replace(page, holds=page.holds | {step.number})
