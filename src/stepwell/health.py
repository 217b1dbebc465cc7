"""Decide whether a volume tier serves: what takes it out of service, when it is tried again, and what is said of it.

    SERVING   --no room, read-only, over quota--------------------------> READ_ONLY   reads go on, nothing is written
    SERVING, READ_ONLY  --failing calls, a call that does not return,
                          too much in quarantine------------------------> OUT         its pages are misses, and are kept
    READ_ONLY, OUT      --a page written and read back, or reopen()-----> SERVING     tried after 1, 2, 4, ... 60 s

Here is only the deciding, on counts and on the store's clock; room.py asks it, store.py feeds it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from stepwell.clock import Clock
from stepwell.index import Tier

_LOG = logging.getLogger("stepwell")

WINDOW_SECONDS: Final = 30.0
MOST_ERRORS: Final = 16
ERROR_SHARE: Final = 0.25
"""A tier goes out of service where in the window at least so many calls failed, and so great a share of all: one EIO is
a bad sector, and what a busy disk with a few of them serves beside is worth having."""
STUCK_SECONDS: Final = 10.0
"""A call on a tier's files that has not returned for so long counts as one that never will. Write-back on a busy disk
takes seconds."""
STUCK_ROUND_SECONDS: Final = 120.0
"""The same of a background round, which takes memory: 4 GiB of shared memory take 20 s where each page is slow."""
QUARANTINE_SHARE: Final = 0.01
QUARANTINE_FLOOR: Final = 16
"""Slots in quarantine, above this share and this number: then the medium, and not a page, is bad."""
PROBE_SECONDS: Final = 1.0
MOST_PROBE_SECONDS: Final = 60.0
LOG_SECONDS: Final = 60.0

_NO_ROOM: Final = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)
_GONE: Final = (errno.ENXIO, errno.ENODEV, errno.ESHUTDOWN)
_REMEDY: Final = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "raise the quota, or free space",
    errno.EROFS: "remount it read-write (see dmesg for why it is not)",
    errno.EIO: "look at dmesg and at the device (smartctl)",
}
_REMEDY_IN_MEMORY: Final = "look at dmesg, and at the memory of the machine and of the control group"


class TierState(StrEnum):
    """Whether a tier serves: all, reads only, nothing."""

    SERVING = "serving"
    READ_ONLY = "read-only"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class Calls:
    """What a tier's calls came to since the store opened: how many in all, which failed, and the last errno of each
    kind (0: not known)."""

    calls: int
    read_errors: int
    write_errors: int
    read_errno: int
    write_errno: int


@dataclass(frozen=True, slots=True)
class TierHealth:
    """How a tier is. reason: why it does not serve, "" where it does. trips: how often it was taken out of service or
    made read-only. probes: how often it was tried since."""

    state: TierState = TierState.SERVING
    reason: str = ""
    trips: int = 0
    probes: int = 0


@dataclass(slots=True)
class _Place:
    """One tier. GUARDED_BY Health._lock."""

    path: str
    state: TierState = TierState.SERVING
    reason: str = ""
    trips: int = 0
    probes: int = 0
    window: deque[tuple[float, Calls]] = field(default_factory=deque)  # without those that found no room
    no_room: int = 0  # writes that found none: they make it read-only, and take no reads away
    stuck_since: dict[int, tuple[int, float]] = field(default_factory=dict)  # worker -> (call, first seen)
    is_stuck: bool = False
    wait: float = PROBE_SECONDS
    probe_at: float = 0.0
    back_at: float = float("-inf")
    is_by_hand: bool = False  # it served when it was taken out to be reopened: nothing is wrong with it
    said_at: float = float("-inf")
    said: TierState = TierState.SERVING
    unsaid: int = 0
    has_said_failure: bool = False  # to be reopened, since it served last


class Health:
    """The states of a store's volume tiers.

    Invariant: a tier that is not among them serves. Threads: any.
    """

    def __init__(self, clock: Clock, paths: Mapping[Tier, str]) -> None:
        """Args: paths: the directory of each tier that can fail."""
        self._clock = clock
        self._lock = threading.Lock()
        nothing = Calls(0, 0, 0, 0, 0)
        began = clock.monotonic()
        self._places = {tier: _Place(path, window=deque([(began, nothing)])) for tier, path in paths.items()}

    # ---- asking -----------------------------------------------------------------------------------------------------

    def of(self, tier: Tier) -> TierHealth:
        """Say how a tier is."""
        place = self._places.get(tier)
        if place is None:
            return TierHealth()
        with self._lock:
            return TierHealth(place.state, place.reason, place.trips, place.probes)

    def is_readable(self, tier: Tier) -> bool:
        """Whether pages may be read there."""
        place = self._places.get(tier)
        return place is None or place.state is not TierState.OUT

    def is_writable(self, tier: Tier) -> bool:
        """Whether pages may be written there."""
        place = self._places.get(tier)
        return place is None or place.state is TierState.SERVING

    def is_stuck(self, tier: Tier) -> bool:
        """Whether a call there has not returned for STUCK_SECONDS: nothing else may be tried."""
        place = self._places.get(tier)
        return place is not None and place.is_stuck

    def is_due(self, tier: Tier) -> bool:
        """Whether it is time to try a tier that does not serve."""
        place = self._places.get(tier)
        if place is None or place.state is TierState.SERVING or place.is_stuck:
            return False
        return self._clock.monotonic() >= place.probe_at

    # ---- being told -------------------------------------------------------------------------------------------------

    def observe_calls(self, tier: Tier, now: Calls) -> None:
        """Take what a tier's calls came to so far; called at least every WINDOW_SECONDS."""
        place = self._places.get(tier)
        if place is None:
            return
        with self._lock:
            at = self._clock.monotonic()
            before = place.window[-1][1]
            new = now.write_errors - place.no_room - before.write_errors
            found_no_room = new > 0 and now.write_errno in _NO_ROOM
            if found_no_room:
                place.no_room += new
            now = replace(now, calls=now.calls - place.no_room, write_errors=now.write_errors - place.no_room)
            place.window.append((at, now))
            while len(place.window) > 1 and place.window[1][0] <= at - WINDOW_SECONDS:
                place.window.popleft()
            first = place.window[0][1]
            if found_no_room and place.state is TierState.SERVING:
                reason = f"a write failed: {_named(now.write_errno)}"
                self._trip(tier, place, TierState.READ_ONLY, reason, now.write_errno)
            failed = now.read_errors + now.write_errors - first.read_errors - first.write_errors
            tried = max(now.calls - first.calls, failed)
            if place.state is TierState.OUT or failed < MOST_ERRORS or failed < ERROR_SHARE * tried:
                return
            number = now.read_errno if now.read_errors > before.read_errors else now.write_errno or now.read_errno
            reason = f"{failed} of {tried} calls failed within {WINDOW_SECONDS:g} s, the last one: {_named(number)}"
            self._trip(tier, place, TierState.OUT, reason, number)

    def observe_workers(self, calls: Sequence[tuple[int, int]]) -> set[Tier]:
        """Take which call each worker is in: (serial number, tier). Returns the tiers that are stuck."""
        at = self._clock.monotonic()
        stuck: set[Tier] = set()
        with self._lock:
            for tier, place in self._places.items():
                mine = {worker: serial for worker, (serial, column) in enumerate(calls) if column == tier}
                seen = place.stuck_since
                place.stuck_since = {
                    worker: seen[worker] if worker in seen and seen[worker][0] == serial else (serial, at)
                    for worker, serial in mine.items()
                }
                longest = max((at - since for _, since in place.stuck_since.values()), default=0.0)
                was_stuck, place.is_stuck = place.is_stuck, longest >= STUCK_SECONDS
                if was_stuck and not place.is_stuck:
                    place.probe_at = at
                if place.is_stuck:
                    stuck.add(tier)
                if place.is_stuck and not was_stuck:
                    reason = f"a call on its files has not returned for {longest:.0f} s"
                    if place.state is not TierState.OUT:
                        self._trip(tier, place, TierState.OUT, reason, errno.EIO)
        return stuck

    def observe_round(self, tier: Tier, seconds: float) -> None:
        """Take how long the background round that runs has run."""
        place = self._places.get(tier)
        if place is None or seconds < STUCK_ROUND_SECONDS or place.state is TierState.OUT:
            return
        with self._lock:
            reason = f"its background round has not returned for {seconds:.0f} s"
            self._trip(tier, place, TierState.OUT, reason, errno.EIO)

    def observe_quarantine(self, tier: Tier, quarantined: int, capacity: int) -> None:
        """Take how many slots of a tier are in quarantine."""
        place = self._places.get(tier)
        if place is None or place.state is TierState.OUT or quarantined <= most_quarantined(capacity):
            return
        with self._lock:
            reason = f"{quarantined} of {capacity} slots are in quarantine, more than {most_quarantined(capacity)}"
            self._trip(tier, place, TierState.OUT, reason, errno.EIO)

    def observe_error(self, tier: Tier, error: BaseException) -> None:
        """Take an error of a background round: one that says that the device has gone takes the tier out of service."""
        place = self._places.get(tier)
        number = error.errno if isinstance(error, OSError) else None
        if place is None or number not in _GONE or place.state is TierState.OUT:
            return
        with self._lock:
            self._trip(tier, place, TierState.OUT, f"its directory fails: {_named(number)}", number)

    def take_out(self, tier: Tier, reason: str) -> None:
        """Take a tier out of service by hand, without a word in the log: it is being reopened."""
        place = self._places[tier]
        with self._lock:
            place.is_by_hand = place.state is TierState.SERVING
            place.state, place.reason = TierState.OUT, reason
            place.probe_at = self._clock.monotonic() + place.wait

    # ---- trying again -----------------------------------------------------------------------------------------------

    def probed(self, tier: Tier, failure: str) -> None:
        """Take what trying a tier came to: "" where a page was written and read back."""
        place = self._places.get(tier)
        if place is None:
            return
        with self._lock:
            place.probes += 1
            at = self._clock.monotonic()
            if failure:
                place.wait = min(2 * place.wait, MOST_PROBE_SECONDS)
                place.probe_at = at + place.wait
                return
            self._come_back(tier, place, at)

    def reopened(self, tier: Tier) -> None:
        """Take it that a tier was attached anew, and works."""
        place = self._places[tier]
        with self._lock:
            place.wait = PROBE_SECONDS
            self._come_back(tier, place, self._clock.monotonic())

    def reopen_failed(self, tier: Tier, failure: str) -> None:
        """Take it that a tier that was taken out to be attached anew was not, and why."""
        place = self._places[tier]
        with self._lock:
            is_new, place.has_said_failure, place.is_by_hand = not place.has_said_failure, True, False
            place.state, place.reason = TierState.OUT, f"reopening it failed: {failure}"
            if is_new:
                _LOG.warning(
                    "%s tier: %s is out of service: %s. It is tried again by itself", tier, place.path, place.reason
                )

    def _come_back(self, tier: Tier, place: _Place, at: float) -> None:
        was, place.state, place.reason = place.state, TierState.SERVING, ""
        place.window = deque([(at, place.window[-1][1])])  # what failed before is past
        place.stuck_since.clear()
        place.is_stuck = False
        place.back_at = at
        if was is not TierState.SERVING and (place.unsaid == 0 or place.has_said_failure):
            level = logging.INFO if place.is_by_hand else logging.WARNING
            _LOG.log(level, "%s tier: %s serves again", tier, place.path)
        place.is_by_hand = place.has_said_failure = False

    def _trip(self, tier: Tier, place: _Place, state: TierState, reason: str, number: int) -> None:
        at = self._clock.monotonic()
        place.state, place.reason = state, reason
        place.trips += 1
        # One that came back a moment ago has not recovered: it is tried ever more seldom.
        place.wait = min(2 * place.wait, MOST_PROBE_SECONDS) if at - place.back_at < LOG_SECONDS else PROBE_SECONDS
        place.probe_at = at + place.wait
        is_worse = state is TierState.OUT and place.said is TierState.READ_ONLY
        if at - place.said_at < LOG_SECONDS and not is_worse:
            place.unsaid += 1
            return
        more = f" ({place.unsaid} times more since the last line)" if place.unsaid else ""
        place.said_at, place.said, place.unsaid = at, state, 0
        is_read = state is TierState.READ_ONLY
        what = "is read-only" if is_read else "is out of service"
        is_of_medium = number == errno.EIO or number not in _REMEDY
        remedy = _REMEDY_IN_MEMORY if is_of_medium and tier is Tier.SHARED else _REMEDY.get(number, _REMEDY[errno.EIO])
        _LOG.warning(
            "%s tier: %s %s: %s%s. The other tiers serve on; it is tried again by itself. To mend it: %s; "
            "store.reopen(stepwell.Tier.%s) tries at once, once it is mended%s",
            tier,
            place.path,
            what,
            reason,
            more,
            remedy,
            tier.name,
            ": before, that costs the pages that are read there still" if is_read else "",
        )


def most_quarantined(capacity: int) -> int:
    """Return how many slots of a tier may be in quarantine while it serves."""
    return max(QUARANTINE_FLOOR, int(capacity * QUARANTINE_SHARE))


def _named(number: int | None) -> str:
    if not number:
        return "an I/O error"
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
