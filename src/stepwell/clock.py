"""Give the store its time, so that tests can turn it by hand."""

from __future__ import annotations

import math
import numbers
import time
from dataclasses import dataclass
from typing import Final, Protocol

from stepwell.errors import StepwellUsageError

_LEAST_WAIT: Final = 1.0
_MOST_WAIT: Final = 60.0


def as_seconds(name: str, given: float) -> float:
    """Return a number of seconds as a float, whose sum with a clock's time is exact enough; numpy's float16 is not.

    Raises:
        StepwellUsageError: it is none, or not a number (nan): nothing would ever be later.
    """
    is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    try:
        seconds = float(given) if is_number else math.nan
    except OverflowError:  # an int beyond all floats
        seconds = math.copysign(math.inf, 1 if given > 0 else -1)
    if math.isnan(seconds):
        raise StepwellUsageError(f"{name}: {given!r} is no number of seconds; nothing would ever be later")
    return seconds


class Clock(Protocol):
    """Say what time it is. Threads: any."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences mean anything."""

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as the machine believes."""


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Return `time.time_ns()`."""
        return time.time_ns()


@dataclass(slots=True)
class Backoff:
    """When something that fails is tried again: after 1, 2, 4, ... 60 seconds.

    Threads: any; of two that report at once one counts.
    """

    wait: float = _LEAST_WAIT
    due_at: float = float("-inf")

    @property
    def has_failed(self) -> bool:
        """Whether the last try failed."""
        return self.due_at > float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether it is time to try."""
        return now >= self.due_at

    def failed(self, now: float) -> None:
        """Take it that a try failed."""
        self.due_at = now + self.wait
        self.wait = min(2 * self.wait, _MOST_WAIT)

    def succeeded(self) -> None:
        """Take it that a try worked, or that there is nothing to try any more."""
        self.wait, self.due_at = _LEAST_WAIT, float("-inf")


class ManualClock:
    """A clock that moves only when it is told to. For tests."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        """Return the time set by hand, seconds."""
        return self._now

    def wall_ns(self) -> int:
        """Return the same time as nanoseconds."""
        return int(self._now * 1e9)

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
