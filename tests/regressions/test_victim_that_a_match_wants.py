"""A save was refused though pages could have left: between the claim of the victims and their end a match wanted one
again and kept it, and nobody looked for another. Now nothing comes in between: victims leave in one step.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.index import Tier
from store_kit import OpenRig, Rig, chain


class WantedAgain:
    """An index whose victims are wanted by a match the moment after they were chosen."""

    def __init__(self, rig: Rig, matched: list[Any]) -> None:
        self._index = rig.store._index
        self._rig, self._matched = rig, matched

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._index, name)
        if name not in ("claim_victims", "evict"):
            return call

        def chosen(*arguments: Any) -> Any:
            victims = call(*arguments)
            self._matched.append(self._rig.store.match(chain(0, 8)))
            return victims

        return chosen


def test_a_match_of_the_pages_that_leave_does_not_refuse_a_save(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig(host=16 * 4096, shared=0, disk=0)  # slots are aligned to 4 KiB
    rig.save(chain(0, 8))
    rig.save(chain(1, 8))
    matched: list[Any] = []
    monkeypatch.setattr(rig.store._room, "_index", WantedAgain(rig, matched))
    result = rig.save(chain(2, 8))
    monkeypatch.undo()
    assert [match.pages for match in matched] == [0], "what has left is a miss"
    for match in matched:
        match.close()
    assert (result.saved, result.refused) == (8, 0)
    counts = rig.store.stats().tiers[Tier.HOST.name.lower()]
    assert (counts.resident, counts.pinned) == (16, 0)
