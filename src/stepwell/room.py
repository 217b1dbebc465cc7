"""Decide what leaves a tier: make room for what is wanted, count what went, mend what was damaged, try what failed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import Backoff, Clock, SystemClock
from stepwell.errors import StepwellError, StepwellUsageError
from stepwell.health import Health, TierState, most_quarantined
from stepwell.index import ClaimOutcome, Index, Tier, tier_mask
from stepwell.keeper import Keepers
from stepwell.mover import Full
from stepwell.owed import RECORDS_AT_ONCE, Owed
from stepwell.seen import Seen
from stepwell.stats import Counters
from stepwell.tiers.base import PageTier
from stepwell.tiers.volume_tier import VolumeTier

_LASTING: Final = (Tier.SHARED, Tier.DISK)
"""Tiers that outlive the process."""
_NEW: Final = int(ClaimOutcome.NEW)
_DISK_BIT: Final = tier_mask(Tier.DISK)
_MENDED_AT_ONCE: Final = 16
_MEND_TRIES: Final = 6
"""Tries after which a slot that cannot be rewritten and read back is retired; with the waits below, 31 seconds."""
LEAVING_SECONDS: Final = 10.0
"""What who drops pages of the disk waits at most for their records to be retired: as who waits for a transfer there."""
_RECLAIM_SECONDS: Final = 1.0
"""What a round spends at most on retiring the records of what was dropped; the rest is the next one's."""
_MOST_PINNED: Final = 0.75
"""Of the pages that a tier has room for now: what may be pinned where it cannot grow."""


@dataclass(slots=True)
class _Mending:
    """What mending a tier's slots came to. Written by who runs the tier's round."""

    failed: dict[int, int] = field(default_factory=dict)  # slot -> tries that failed
    tries: Backoff = field(default_factory=Backoff)
    retired: int = 0


class Room:
    """The slots of a store's tiers, as far as they are to be had.

    Invariant: a slot is given to another page only after the record of the page before was retired.
    Threads: any.
    """

    def __init__(
        self,
        index: Index,
        tiers: Mapping[Tier, PageTier],
        counters: Counters,
        *,
        health: Health | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Args: tiers: the store's, but for the device; the mapping is looked at again at every call."""
        self._index = index
        self._tiers = tiers
        self._counters = counters
        self._clock = clock if clock is not None else SystemClock()
        self.health = health if health is not None else Health(self._clock, {})
        self._mending: dict[Tier, _Mending] = {tier: _Mending() for tier in Tier}
        self.owed = Owed(index, self._clock)
        self.has_device = False
        self.has_staging = False
        """Whether host memory has slots for neighbours' pages."""
        self.stages_only = False
        """Whether host memory is there for neighbours' pages alone: the store was given no host tier."""
        self.seen: Seen | None = None
        """What was saved once, where disk writes are selective; None: every save is written through."""
        self.keeper: Keepers | None = None
        self.end_probes: Callable[[Tier], bool] = lambda _: False
        """Ends some of the leases of probes that hold pages of a tier; False: there are none."""
        self._growth = threading.Condition()
        # GUARDED_BY(_growth), by tier: free slots asked for since the last round, of new memory, and of what leaves;
        # how many asked, and were answered; and whose round did not answer in time: nobody waits for it until it does.
        # And slots that are owed because their pages were dropped by who does not call files.
        self._wanted: dict[Tier, int] = {}
        self._wanted_gone: dict[Tier, int] = {}
        self._dropped: dict[Tier, int] = {}
        self._asked = dict.fromkeys(Tier, 0)
        self._answered = dict.fromkeys(Tier, 0)
        self._silent: set[Tier] = set()

    # ---- which tiers ------------------------------------------------------------------------------------------------

    @property
    def all_tiers(self) -> list[Tier]:
        """Every tier the store has, nearest to the computation first."""
        tiers = sorted(self._tiers)
        return [Tier.DEVICE, *tiers] if self.has_device else tiers

    @property
    def readable(self) -> int:
        """The mask of tiers that a load into the caller's memory can read: those in service."""
        mask, is_readable = 0, self.health.is_readable
        for tier in list(self._tiers):
            if is_readable(tier):
                mask |= 1 << tier
        return mask

    def is_writable(self, tier: Tier) -> bool:
        """Whether pages may be written to a tier: the store has it, and it serves."""
        return tier in self._tiers and self.health.is_writable(tier)

    @property
    def keeping(self) -> tuple[Tier, ...]:
        """Tiers that pages are written to and that pin() keeps them in: those that outlive the process, else host
        memory."""
        lasting = tuple([tier for tier in _LASTING if tier in self._tiers])
        return lasting or ((Tier.HOST,) if Tier.HOST in self._tiers else ())

    @property
    def write_through(self) -> tuple[Tier, ...]:
        """What a save can go to: those of `keeping` that can be written to now, maybe none; see meant_for().

        Raises:
            StepwellUsageError: the store has none of them.
        """
        keeping = self.keeping
        if not keeping:
            raise StepwellUsageError("this store has no host, shared or disk tier to save to")
        return tuple(filter(self.health.is_writable, keeping))

    def meant_for(self, keys: npt.NDArray[np.uint8], known: int = 0) -> npt.NDArray[np.uint8] | None:
        """Say which tiers each page of a save is meant for.

        Args:
            keys: of its pages. known: leading ones that are in shared memory or on their way: these are no use anew, so
                that an engine which saves a growing prompt chunk by chunk does not count as using it twice.

        Returns:
            None: all of write_through, also where shared memory cannot be written to now. Else a mask a page: with the
            disk where the page was saved before, and has left shared memory since.
        """
        if self.seen is None or not self.is_writable(Tier.SHARED):
            return None
        meant = np.full(len(keys), tier_mask(Tier.SHARED), dtype=np.uint8)
        meant[known:][self.seen.add(keys[known:])] |= tier_mask(Tier.DISK)
        return meant

    @staticmethod
    def pages_for(tier: Tier, pages: int, meant: npt.NDArray[np.uint8] | None) -> int:
        """Count those of a save's pages that are meant for a tier."""
        return pages if meant is None else int(np.count_nonzero(meant & (1 << tier)))

    def count_meant(self, outcomes: npt.NDArray[np.uint8], meant: npt.NDArray[np.uint8] | None) -> None:
        """Count what a save's claims came to, where disk writes are selective."""
        if meant is None:
            return
        written = outcomes[:, Tier.DISK] == _NEW
        held_back = (outcomes[:, Tier.SHARED] == _NEW) & (meant[: len(outcomes)] < _DISK_BIT)
        self._counters.selected(int(np.count_nonzero(written)), int(np.count_nonzero(held_back)))

    def pinnable(self, fraction: float) -> int:
        """Say how many pages pins may keep: a fraction of the smallest of `keeping` once it has grown, and never so
        much of what there is now that nothing else could be saved."""
        places = [self._tiers[tier] for tier in self.keeping]
        most = min((place.most_pages for place in places if place.most_pages > 0), default=0)
        present = max((self._index.counts(place.tier)["capacity"] for place in places), default=0)
        return min(int(fraction * most), int(_MOST_PINNED * present))

    def most_pages(self, tier: Tier) -> int:
        """Say how many pages a tier holds once it has grown; what it holds now where that is not known."""
        place = self._tiers.get(tier)
        return (0 if place is None else place.most_pages) or self._index.counts(tier)["capacity"]

    def medium(self, tier: Tier) -> _core.Medium | None:
        """Return what the mover copies from and to; None for a tier the store does not have, and for the device."""
        found = self._tiers.get(tier)
        return None if found is None else found.medium

    # ---- evicting ---------------------------------------------------------------------------------------------------

    def make(self, tier: Tier, pages: int, *, patience: float = 0.0, is_bound: bool = False) -> None:
        """See that `pages` slots are free: memory that was not taken yet comes first, then pages of lowest rank leave,
        then the leases of probes end.

        The first two happen ahead of need in the background; this is for what comes faster than that. A probe's lease
        is a courtesy: whoever asks for every key again and again would keep every page for ever
        (kvcache-ai/Mooncake#2187). A tier that takes no pages needs no room: there nothing leaves.

        Args:
            patience: seconds to wait for the keeper to take memory, where there may be some.
            is_bound: not to wait longer, come what may. Else LEAVING_SECONDS more, where evicting writes to files: the
                keeper does that, for a disk that hangs would keep who does.
        """
        if pages <= self._index.claimable(tier) or not self.health.is_writable(tier):
            return
        give_up_at = time.monotonic() + patience
        while self._index.claimable(tier) < pages:
            patience = give_up_at - time.monotonic()
            if self._grows(tier, pages, patience):
                continue
            if self._is_left_to_round(tier):
                self._ask_keeper(tier, patience if is_bound else LEAVING_SECONDS, gone=pages)
            else:
                self._make_leave(tier, pages)
                self.wake_keeper()
            return

    def _make_leave(self, tier: Tier, pages: int) -> None:
        """Evict until `pages` slots are free, and end leases of probes where that is not enough."""
        while (lacking := pages - self._index.claimable(tier)) > 0:
            self._evict_for_room(tier, lacking)
            if self._index.claimable(tier) >= pages or not self._ends_probes(tier, lacking):
                return

    def _ends_probes(self, tier: Tier, pages: int) -> bool:
        """End some leases of probes, where that lets pages be evicted. False: there are none, or it would not."""
        return self.owed.most_to_evict(tier, pages) == pages and self.end_probes(tier)

    def _evict_for_room(self, tier: Tier, pages: int) -> None:
        """Evict as evict() does, but not in vain: see Owed."""
        while (most := self.owed.most_to_evict(tier, pages)) > 0:
            with self._index.evict(tier, most, self.medium(tier)) as victims:
                self._retire(tier, victims)
                self._counters.evicted(tier, victims.size)
                if victims.size < most:
                    return
            pages -= most

    def _is_left_to_round(self, tier: Tier) -> bool:
        """Whether records of a tier's pages are retired by its round alone, and not by who calls the store."""
        return tier is Tier.DISK and self.keeper is not None and self.keeper.is_running

    def wake_keeper(self) -> None:
        """Ask for a round of the keeper, if there is one."""
        if self.keeper is not None:
            self.keeper.wake()

    def _grows(self, tier: Tier, pages: int, patience: float) -> bool:
        """Have the keeper take memory for `pages` free slots. True: it has tried, and there may be more."""
        place = self._tiers.get(tier)
        if place is None or not (place.may_grow and self.health.is_writable(tier)):
            return False
        return self._ask_keeper(tier, patience, grown=pages) and place.may_grow

    def _ask_keeper(self, tier: Tier, patience: float, *, grown: int = 0, gone: int = 0, dropped: int = 0) -> bool:
        """Ask a tier's round for free slots: of new memory, of what leaves, or of what was dropped and is owed.

        Returns: whether it has answered within `patience` seconds.
        """
        keeper = self.keeper
        if keeper is None:
            return False
        with self._growth:
            for wanted, pages in ((self._wanted, grown), (self._wanted_gone, gone)):
                if pages:
                    wanted[tier] = max(pages, wanted.get(tier, 0))
            self._dropped[tier] = self._dropped.get(tier, 0) + dropped
            self._asked[tier] += 1
            mine = self._asked[tier]
            keeper.wake()
            if patience <= 0 or not keeper.is_running or tier in self._silent or self.health.is_stuck(tier):
                return False
            self._growth.wait_for(lambda: self._answered[tier] >= mine or not keeper.is_running, patience)
            if self._answered[tier] < mine:
                self._silent.add(tier)
                return False
            return True

    def end_waits(self) -> None:
        """Let who waits for a round go: there is none any more."""
        with self._growth:
            self._growth.notify_all()

    def take_memory(self, tier: Tier) -> None:
        """Take the memory that was asked for since the last round, and make the room. The tier's round."""
        with self._growth:
            asked, pages, gone = self._asked[tier], self._wanted.pop(tier, 0), self._wanted_gone.pop(tier, 0)
            dropped = self._dropped.pop(tier, 0)
        left = 0
        try:
            if pages and self.is_writable(tier):
                self._tiers[tier].grow(self._index, pages)
            left = self._reclaim(tier, dropped)
            if gone and self.is_writable(tier):
                self._make_leave(tier, gone)
        finally:
            with self._growth:
                if left:
                    self._dropped[tier] = self._dropped.get(tier, 0) + left
                    self.wake_keeper()
                else:
                    self._answered[tier] = asked
                self._silent.discard(tier)
                self._growth.notify_all()

    def _reclaim(self, tier: Tier, slots: int) -> int:
        """Retire the records of slots that are owed because their pages were dropped. The tier's round.

        Returns: how many are left for the next round; none where the disk refuses: they are tried as all that are owed.
        """
        medium = self.medium(tier)
        until = self._clock.monotonic() + _RECLAIM_SECONDS
        while slots > 0 and medium is not None and self._clock.monotonic() < until:
            victims = self.owed.reclaim(tier, min(slots, RECORDS_AT_ONCE), medium)
            self.owed.note(tier, victims)
            if victims.owed == victims.size:
                return 0
            slots -= victims.size
        return slots if medium is not None else 0

    def tend(self, tier: Tier, *, low: float, high: float) -> bool:
        """Do a tier's background round: take memory, make room ahead of need, mend; or try it, where it does not serve.

        Args:
            low, high: fractions of its slots: fewer free than `low` are too few, and `high` are to be free then.

        Returns:
            Whether another round should come soon: pages of shared memory were used, or some are on their way.
        """
        if self.health.is_stuck(tier):
            return False
        is_busy = tier is Tier.SHARED and self._index.has_stamps(tier)
        self.take_memory(tier)
        counts = self._index.counts(tier)
        self.health.observe_quarantine(tier, counts["quarantined"], counts["capacity"])
        if self.health.of(tier).state is not TierState.READ_ONLY:  # there each try would fail, and count as its last
            self.mend(tier)
        self.owed.retry(tier, self.medium(tier))
        if self.health.is_due(tier):
            self.health.probed(tier, self.probe(tier))
        self._tick(tier, low, high)
        return is_busy or self._index.counts(tier)["arriving"] > 0

    def _tick(self, tier: Tier, low: float, high: float) -> None:
        """Have a tier do what is due, and evict what it asks for."""
        capacity = self._index.counts(tier)["capacity"]
        if self.is_writable(tier):
            low_pages, high_pages = (max(1, int(capacity * share)) for share in (low, high))
        elif capacity > 0:
            # Its volumes are of use to neighbours still: what they lack is given back, and nothing is evicted for us.
            low_pages = high_pages = 0
        else:
            return
        self._evict_for_room(tier, self._tiers[tier].tick(self._index, low_pages=low_pages, high_pages=high_pages))

    def evict(self, tier: Tier, pages: int, *, patience: float | None = None) -> int:
        """Take up to `pages` unpinned pages of lowest rank out of a tier. Returns how many went.

        Args: patience: see _free().
        """
        if pages <= 0 or not (tier in self._tiers or (tier is Tier.DEVICE and self.has_device)):
            return 0
        with self._index.evict(tier, pages, self.medium(tier)) as victims:
            return self._free(tier, victims, patience)

    def forget(self, name_space: int, tokens: npt.NDArray[np.int32], keep_pages: int) -> int:
        """Take the unpinned pages of a chain past its first ones out of every tier, but for those that a match wants
        again meanwhile. Returns how many went.

        They are chosen in all tiers at once: under one epoch, and with no save between two of them, which would be told
        that a page is where it leaves next.
        """
        tiers = self.all_tiers
        with contextlib.ExitStack() as taken:
            victims = [taken.enter_context(self._index.victims(tier, self.medium(tier))) for tier in tiers]
            self._index.forget(victims, name_space, tokens, keep_pages)
            return sum(self._free(tier, each) for tier, each in zip(tiers, victims, strict=True))

    def _free(self, tier: Tier, victims: _core.Victims, patience: float | None = None) -> int:
        """Let the slots of victims be given to other pages, but for those that are owed. By who calls the store.

        Records on disk are retired by the tier's round, for a disk that hangs would keep who does: the slots are owed
        until then.

        Args: patience: seconds to wait for that at most; None: LEAVING_SECONDS.

        Returns:
            How many pages went.
        """
        self._counters.evicted(tier, victims.size)
        if not self._is_left_to_round(tier):
            self._retire(tier, victims)
        elif victims.size:
            victims.owe()
            self._ask_keeper(tier, LEAVING_SECONDS if patience is None else patience, dropped=victims.size)
        return victims.size

    def _retire(self, tier: Tier, victims: _core.Victims) -> None:
        """Retire the records of victims here and now, and free their slots, but for those that are owed."""
        victims.free()
        self.owed.note(tier, victims)

    def full(self, tier: Tier, needed: int) -> Full:
        """Say with numbers that a tier is full."""
        counts = self._index.counts(tier)
        place = self._tiers.get(tier)
        why = self.health.of(tier).reason or (place.why_empty if isinstance(place, VolumeTier) else "")
        if not why and (owed := self.owed.count(tier)):
            why = f"{owed} slots are out of use until the records of the pages before can be written"
        return Full(
            tier=tier.name.lower(),
            needed=needed,
            free=counts["free"],
            evictable=max(0, counts["resident"] - counts["pinned"] - counts["held"]),
            leaving=counts["leaving"],
            pinned=counts["pinned"],
            held=counts["held"],
            why=why,
        )

    # ---- quarantine -------------------------------------------------------------------------------------------------

    def mend(self, tier: Tier) -> bool:
        """Let some quarantined slots that can be rewritten and read back into use again.

        One that cannot is tried again after 1, 2, 4, ... 60 seconds, and after `_MEND_TRIES` is retired: out of use for
        as long as its volume is.

        Returns:
            False: there are none left.
        """
        if self._index.counts(tier)["quarantined"] == 0:
            return False
        mending = self._mending[tier]
        now = self._clock.monotonic()
        if not mending.tries.is_due(now):
            return True
        medium = self.medium(tier)
        has_failed = False
        pages, slots, numbers = self._index.claim_quarantined(tier, _MENDED_AT_ONCE)
        for page, slot, number in zip(pages.tolist(), slots.tolist(), numbers.tolist(), strict=True):
            # A device slot is quarantined only with the whole pool, which has been replaced since.
            mended = medium is None or medium.rewrite_and_check(slot) == _core.Status.ok
            tries = 0 if mended else mending.failed.get(slot, 0) + 1
            is_retired = tries >= _MEND_TRIES
            self._index.mend(page, tier, number, mended, is_retired)
            mending.failed.pop(slot, None)
            if mended:
                self._index.free_slots(tier, np.array([slot], dtype=np.uint32))
            elif is_retired:
                mending.retired += 1
            else:
                mending.failed[slot] = tries
                has_failed = True
        if has_failed:
            mending.tries.failed(now)
        else:
            mending.tries.succeeded()
        return True

    def retired(self, tier: Tier) -> int:
        """Return how many slots of a tier are beyond mending."""
        return self._mending[tier].retired

    # ---- a tier that failed -----------------------------------------------------------------------------------------

    def probe(self, tier: Tier) -> str:
        """Write and read back one slot of a tier that does not serve. Returns "", or what failed."""
        pages, medium = self._tiers[tier], self.medium(tier)
        assert isinstance(pages, VolumeTier), "only volumes are taken out of service"
        assert isinstance(medium, _core.VolumeSet), "see above"
        try:
            pages.leave_suspect(self._index)  # they fail every try until they are opened anew
            if self._index.counts(tier)["capacity"] == 0:  # they were all it had, or reopening it has failed
                pages.reopen(self._index)
                self.forget_mending(tier)
        except (StepwellError, OSError) as error:
            return str(error)
        counts = self._index.counts(tier)
        quarantined, capacity = counts["quarantined"], counts["capacity"]
        if capacity == 0:
            return "no volume can be had"
        if quarantined > most_quarantined(capacity):
            return f"{quarantined} slots are in quarantine"
        slots = self._index.take_private(tier, 1)
        if slots is not None:
            status = medium.rewrite_and_check(int(slots[0]))
            self._index.free_private(tier, slots)
            return "" if status == _core.Status.ok else status.name
        slots = self._index.take_owed(tier, 1)
        if slots.size == 0:
            slots = self._index.take_victims(tier, 1)
            if slots.size == 0:
                return ""  # all is pinned: use will tell
            self._counters.evicted(tier, 1)
        status = medium.rewrite_and_check(int(slots[0]))
        if status == _core.Status.ok:
            self._index.free_slots(tier, slots)
        else:  # its record may be as it was
            self._index.owe_slots(tier, slots)
        return "" if status == _core.Status.ok else status.name

    def forget_mending(self, tier: Tier) -> None:
        """Take every slot of a tier for new: its volumes were attached anew."""
        self._mending[tier] = _Mending()
        self.owed.forget(tier)
