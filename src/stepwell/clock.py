"""Give the store its time, so that tests can turn it by hand."""

from __future__ import annotations

import math
import numbers
import time
from typing import Protocol

from stepwell.errors import StepwellUsageError


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
