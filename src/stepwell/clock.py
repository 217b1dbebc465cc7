"""Give the store its time, so that tests can turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


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
