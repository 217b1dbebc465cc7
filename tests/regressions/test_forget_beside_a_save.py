"""forget() chose what leaves tier by tier: a save that came between two of them was told that its pages are on disk,
where they left next. Found by recorded histories (stepwell.testing.recorder)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepwell.hashing import prefix_hashes
from stepwell.index import Index, Residency, Tier
from store_kit import PAGE_TOKENS, OpenRig, chain

PAGES = 4
TOKENS = chain(1, PAGES)


class Interrupted:
    """An index at which another caller comes right after the first choice of pages to forget."""

    def __init__(self, index: Index, other: Callable[[], object]) -> None:
        self._index, self._others = index, [other]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def forget(self, *given: Any) -> object:
        chosen = self._index.forget(*given)
        while self._others:
            self._others.pop()()
        return chosen


def test_a_save_after_a_forget_keeps_its_pages_in_every_tier(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.save(TOKENS)
    room = rig.store._room
    index = room._index
    room._index = Interrupted(index, lambda: rig.save(TOKENS))  # type: ignore[assignment]
    assert rig.store.forget(TOKENS) > 0
    room._index = index
    rig.store.flush()
    for key in prefix_hashes(TOKENS, page_tokens=PAGE_TOKENS):
        state = rig.store.state(key.tobytes())
        assert state[Tier.SHARED] == state[Tier.DISK] == Residency.RESIDENT
