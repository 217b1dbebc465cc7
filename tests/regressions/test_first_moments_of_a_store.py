"""What a store finds, and says, in its first moments beside others: a rolling restart is nothing to warn of.

A store found no neighbour's page before its keeper's first round, a quarter of a second after it was open; and it
warned that it had no volume, and of settings to change, a moment before a neighbour gave it its share.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from stepwell.clock import ManualClock
from stepwell.tiers.neighbours import Neighbours
from stepwell.tiers.volume_tier import EMPTY_SECONDS
from store_kit import VOLUME_BYTES, OpenRig, chain

MEDIA = pytest.mark.parametrize("sizes", [{"disk": 0}, {"shared": 0}], ids=["shared", "disk"])


@MEDIA
def test_a_store_knows_its_neighbours_pages_when_it_is_open(open_rig: OpenRig, sizes: dict[str, int]) -> None:
    owner = open_rig(**sizes)
    owner.save(chain(1, 9))
    reader = open_rig(**sizes)
    assert reader.load(chain(1, 9)) == 9


@pytest.mark.parametrize("error", [OSError(5, "no"), MemoryError()])
def test_a_first_look_that_fails_keeps_no_store_from_opening(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    owner = open_rig(disk=0)
    owner.save(chain(1, 9))

    def fail(self: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Neighbours, "round", fail)
        reader = open_rig(disk=0)
    assert reader.load(chain(1, 9)) == 0
    reader.round()
    assert reader.load(chain(1, 9)) == 9


@MEDIA
def test_a_store_without_a_volume_says_so_only_when_none_has_come_in_time(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, sizes: dict[str, int]
) -> None:
    caplog.set_level(logging.WARNING, logger="stepwell")
    clock = ManualClock()
    tier = "shared" if "disk" in sizes else "disk"
    sizes = {**sizes, tier: VOLUME_BYTES}
    owner = open_rig(**sizes)
    owner.save(chain(1, 3))
    late = open_rig(**sizes, clock=clock)
    late.round()
    assert caplog.messages == []
    refused = late.save(chain(2, 3), wait=False)
    assert refused.full is not None
    assert "this process holds no volume: others hold the directory" in str(refused.full)
    clock.advance(EMPTY_SECONDS)
    late.round()
    late.round()
    assert [text for text in caplog.messages if "has had no room for a volume" in text] == caplog.messages
    assert len(caplog.messages) == 1
    owner.close()
    clock.advance(EMPTY_SECONDS)
    late.round()
    late.round()
    assert late.save(chain(2, 3)).full is None
    assert len(caplog.messages) == 1
