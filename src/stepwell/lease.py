"""Own pins: a lease is granted by one call, ends once, and everything it pinned is free again then."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from stepwell.errors import LeaseClosedError
from stepwell.index import ALL_TIERS, Index, MatchResult, Miss, Tier

_MISSES: Final = tuple(Miss)


class Match:
    """The longest usable cached prefix of some tokens, pinned where it is until this lease ends.

    Invariant: while open, every page of it stays RESIDENT in the tier that its span names.
    Threads: any one at a time. Ends by close(), by leaving the `with` block, or when it is dropped.
    """

    __slots__ = ("__weakref__", "_closed", "_index", "_page_tokens", "_result")

    def __init__(self, index: Index, result: MatchResult, page_tokens: int) -> None:
        self._index = index
        self._result = result
        self._page_tokens = page_tokens
        self._closed = False

    @property
    def pages(self) -> int:
        """Pages of the prefix; 0 is a miss from the first token on."""
        return self._result.pages

    @property
    def tokens(self) -> int:
        """Tokens of the prefix: pages times page tokens."""
        return self._result.pages * self._page_tokens

    @property
    def pending(self) -> int:
        """Tokens directly behind the prefix that another caller is bringing."""
        return self._result.pending * self._page_tokens

    @property
    def spans(self) -> list[tuple[int, int, Tier]]:
        """Runs of (first page, pages, the fastest tier that has them), in order."""
        return [(first, pages, ALL_TIERS[tier]) for first, pages, tier in self._result.spans]

    @property
    def tiers(self) -> dict[Tier, int]:
        """Pages by tier."""
        found: dict[Tier, int] = {}
        for _, pages, column in self._result.spans:
            tier = ALL_TIERS[column]
            found[tier] = found.get(tier, 0) + pages
        return found

    @property
    def miss(self) -> Miss:
        """Why the prefix ends where it does; NONE if it covers all whole pages."""
        return _MISSES[self._result.miss]

    @property
    def epoch(self) -> int:
        """The epoch that its pages were found under."""
        return self._result.epoch

    @property
    def closed(self) -> bool:
        """Whether the lease has ended."""
        return self._closed

    def is_of(self, index: Index) -> bool:
        """Tell whether this lease pins pages of that index. For the store."""
        return self._index is index

    def lease_id(self) -> int:
        """Return the index's number of this lease, 0 if nothing is pinned. For the store.

        Raises:
            LeaseClosedError: the lease has ended.
        """
        if self._closed:
            raise LeaseClosedError("this match was closed; its pages may be gone: match again")
        return self._result.lease

    def locations(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Return (page ids, tiers, slots) of the prefix, uint32[pages], uint8[pages], uint32[pages]. For the store."""
        lease = self.lease_id()
        if lease == 0:
            return np.zeros(0, np.uint32), np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        return self._index.lease_pages(lease, 0, self._result.pages)

    def close(self) -> None:
        """End the lease; its pins are returned. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._result.lease:
            self._index.release(self._result.lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def __repr__(self) -> str:
        where = ", ".join(f"{pages} {tier.name.lower()}" for tier, pages in self.tiers.items()) or "nothing"
        return f"<Match {self.tokens} tokens ({where}), {self.pending} pending{', closed' if self._closed else ''}>"
