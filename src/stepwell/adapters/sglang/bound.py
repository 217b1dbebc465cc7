"""Say how long loading a hit may take: what is slower than SGLang's patience, or than computing anew, is no hit.

    "prefetch-timeout"   SGLang's timeout policy: a base, and a term by the length
    "auto"               what computing was seen to take, at most that: learned from the time between a question about
                         pages that were missing and the call that keeps them
    a number             seconds
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

import stepwell as sw

Timeout = tuple[float, float]
"""Of SGLang's prefetches: seconds, and seconds per 1,024 tokens."""
DEFAULT_TIMEOUT: Final[Timeout] = (1.0, 0.25)  # hybrid_cache_controller.py:405-408
_MOST_ASKED: Final = 4096
"""Questions whose answer was a miss that are remembered; the oldest goes."""
_SAMPLES: Final = 64
"""Of the last ones: old prompts ran on other load."""
_LEAST_SAMPLES: Final = 8
_QUANTILE: Final = 0.1


class RecomputeCost:
    """Learn what computing a page costs, from SGLang's calls alone.

    A question about a prompt ends at its first missing page; once the prompt is computed, SGLang keeps that page and
    those behind it. The time between is that of computing them, and of whatever the request waited for: so the cost is
    a low quantile of what was seen, and never below the truth by more than a few lucky samples.

    Threads: any.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: OrderedDict[bytes, float] = OrderedDict()
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def missed(self, first_missing: bytes) -> None:
        """Note that a question ended at a page. The first time counts: SGLang asks again while the request waits."""
        with self._lock:
            self._asked.setdefault(first_missing, self._clock())
            if len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)

    def kept(self, keys: Sequence[bytes]) -> None:
        """Note that pages were computed, and are to be kept."""
        now = self._clock()
        with self._lock:
            if not self._asked:
                return
            for row, key in enumerate(keys):
                asked_at = self._asked.pop(key, None)
                if asked_at is not None:
                    self._samples.append((now - asked_at) / (len(keys) - row))

    @property
    def seconds_per_page(self) -> float | None:
        """What computing a page costs; None: not known yet."""
        with self._lock:
            if len(self._samples) < _LEAST_SAMPLES:
                return None
            return sorted(self._samples)[int(_QUANTILE * len(self._samples))]


class LastTimeout:
    """The prefetch timeout of the extra config that SGLang read last in this process; None: it has read none.

    SGLang takes it out of what a backend sees, and applies it after the backend is made, in the tree
    (unified_cache/storage_attachment.py:121-183). At the start and over HTTP alike it reads the text on the scheduler's
    main thread, and makes the backend next: so what was read last is what the backend that is being made belongs to.
    The plug-in listens there (plugin.py).
    """

    def __init__(self) -> None:
        self.seconds: Timeout | None = None


@functools.cache
def last_timeout() -> LastTimeout:
    """Return what SGLang read last in this process."""
    return LastTimeout()


class LoadBound:
    """How long loading a run of pages may take. Threads: any."""

    def __init__(
        self,
        asked: float | Literal["prefetch-timeout", "auto"] | None,
        *,
        prefetch: Timeout,
        page_tokens: int,
        cost: RecomputeCost,
    ) -> None:
        """Args: prefetch: SGLang's timeout, seconds and seconds per 1,024 tokens."""
        self._asked = asked
        self._patience = sw.Within(prefetch[0], prefetch[1] * page_tokens / 1024)
        self._cost = cost

    @property
    def patience(self) -> sw.Within:
        """SGLang's own."""
        return self._patience

    @property
    def learns(self) -> bool:
        """Whether the cost of computing is asked for."""
        return self._asked == "auto"

    def within(self) -> sw.Within | None:
        """Return the bound as it is now; None: no bound."""
        if self._asked is None:
            return None
        if isinstance(self._asked, int | float):
            return sw.Within(float(self._asked))
        learned = self._cost.seconds_per_page if self.learns else None
        if learned is None:
            return self._patience
        # The lower of two lines is no line. Computing is cheaper than SGLang's patience but for odd settings: then the
        # one from nothing is lower throughout, else the cheaper of both is asked for, which for short runs allows less.
        return sw.Within(0.0, min(learned, self._patience.per_page) if self._patience.per_page else learned)
