"""Keep prefixes for a while: what PageStore.pin() grants, until its time has passed or it is closed.

What may not leave is the index's business (csrc/index.h, "holds"); here is only for how long.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from stepwell.clock import Clock, as_seconds
from stepwell.errors import StepwellUsageError
from stepwell.index import Index, Taken

MOST_PINS: Final = 65536
"""Pins that live at a time. Each is a few hundred bytes here; what they cover is bounded by config.pin_fraction."""


@dataclass(frozen=True, slots=True)
class PinsFull:
    """Say why a pin was refused: it needs `needed` pages more than the `pinned` ones, and `allowed` may be pinned.

    pins: how many live; at most 65536 do.
    """

    needed: int
    pinned: int
    allowed: int
    pins: int


class Pinned:
    """A prefix that is not lost to eviction until its time has passed: see PageStore.pin().

    Invariant: dropping the object changes nothing: the pin lives until its time has passed, close(), a change of the
    epoch, or the store's end. Threads: any.
    """

    __slots__ = ("_end", "_extent", "_page_tokens", "full", "pending", "tokens")

    def __init__(
        self,
        tokens: int,
        pending: int,
        full: PinsFull | None,
        *,
        page_tokens: int,
        extent: Callable[[], tuple[int, int]],
        end: Callable[[], None],
    ) -> None:
        self.tokens: Final = tokens
        """Leading tokens that were kept at once."""
        self.pending: Final = pending
        """Tokens directly behind that were on their way, or in another tier: kept once they are where pins keep."""
        self.full: Final = full
        """Why nothing was pinned although something is cached; None where it was pinned."""
        self._page_tokens = page_tokens
        self._extent = extent
        self._end = end

    @property
    def kept(self) -> int:
        """Leading tokens that the pin keeps now; 0 when it has ended."""
        return self._extent()[0] * self._page_tokens

    @property
    def closed(self) -> bool:
        """Whether the pin has ended."""
        return self._extent() == (0, 0)

    def close(self) -> None:
        """End the pin now; its pages count as just used. A second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{self.pending} pending" if self.full is None else f"refused: {self.full}"
        return f"<Pinned {self.tokens} tokens, {state}{', closed' if self.closed else ''}>"


@dataclass(frozen=True, slots=True)
class _Live:
    hold: int
    ends_at: float


class Pins:
    """The pins of a store that live.

    Invariant: each has one owner's share in a hold of the index, given back once.
    Threads: any. In a forked child every pin has ended: locks may be held there for good, and the pages are the
        parent's.
    """

    def __init__(self, index: Index, clock: Clock, allowed: Callable[[], int], page_tokens: int) -> None:
        """Args: allowed: how many pages may be pinned now."""
        self._index = index
        self._clock = clock
        self._allowed = allowed
        self._page_tokens = page_tokens
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._next_end = math.inf

    def pin(self, name_space: int, tokens: npt.NDArray[np.int32], ttl: float) -> Pinned:
        """Pin what is here or on its way of some tokens, for `ttl` seconds.

        Raises:
            StepwellUsageError: a ttl that is no positive, finite number.
        """
        seconds = as_seconds("ttl", ttl)
        if not 0 < seconds < math.inf:
            raise StepwellUsageError(f"ttl: {ttl!r} is no number of seconds above 0; a pin has to end")
        allowed = self._allowed()
        if self.count() >= MOST_PINS:
            return self._nothing(PinsFull(0, self._index.held_pages(), allowed, self.count()))
        with Taken(self._index) as taken:
            found = self._index.hold(name_space, tokens, allowed, into=taken)
            if found.hold == 0:
                full = PinsFull(found.added, found.held, allowed, self.count()) if found.refused else None
                return self._nothing(full)
            live = _Live(found.hold, self._clock.monotonic() + seconds)
            number = next(self._numbers)
            pinned = Pinned(
                found.pages * self._page_tokens,
                found.pending * self._page_tokens,
                None,
                page_tokens=self._page_tokens,
                extent=lambda: self._extent(number),
                end=lambda: self._end(number),
            )
            with self._lock:
                self._next_end = min(self._next_end, live.ends_at)
                # In this order, with nothing between that ctrl-C could end: the hold has one owner at any time.
                self._live[number] = live
                taken.hand_on()
            return pinned

    def end_due(self) -> None:
        """End the pins whose time has passed."""
        now = self._clock.monotonic()
        with self._lock:
            if now < self._next_end:
                return
            due = [number for number, live in self._live.items() if live.ends_at <= now]
        for number in due:
            self._end(number)
        with self._lock:
            self._next_end = min((live.ends_at for live in self._live.values()), default=math.inf)

    def end_all(self) -> None:
        """End every pin."""
        with self._lock:
            numbers = list(self._live)
        for number in numbers:
            self._end(number)

    def count(self) -> int:
        """Count the pins that live."""
        with self._lock:
            return len(self._live)

    def _nothing(self, full: PinsFull | None) -> Pinned:
        return Pinned(0, 0, full, page_tokens=self._page_tokens, extent=lambda: (0, 0), end=lambda: None)

    def _end(self, number: int) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            live = self._live.pop(number, None)
        if live is not None:
            self._index.unhold(live.hold)  # false after a change of the epoch, which has ended it

    def _extent(self, number: int) -> tuple[int, int]:
        if self._pid != os.getpid():
            return 0, 0
        with self._lock:
            live = self._live.get(number)
        if live is None or live.ends_at <= self._clock.monotonic():
            return 0, 0
        return self._index.hold_extent(live.hold)
