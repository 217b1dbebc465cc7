"""A volume that could not be read while the tier grew left its slots in the index: the next volume overlapped them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

import pytest

from stepwell.clock import ManualClock
from stepwell.errors import StepwellError
from stepwell.index import Tier
from stepwell.testing.faults import fail_each
from store_kit import VOLUME_BYTES, Rig, assert_whole, chain


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_a_tier_that_failed_to_take_an_orphan_takes_it_later(open_rig: Callable[..., Rig], tier: str) -> None:
    sizes = {"shared": 0, "disk": 0, tier: 2 * VOLUME_BYTES}
    clock = ManualClock()
    taker, giver = (
        open_rig(
            **sizes,
            clock=clock,
        ),
        open_rig(**sizes),
    )
    giver.save(chain(1, 8))
    giver.close()
    for fault in fail_each("file.*", errno.EIO):
        for number in range(10, 30):
            taker.save(chain(number, 8))  # more than one volume holds
        clock.advance(100.0)
        with fault, contextlib.suppress(StepwellError, OSError):  # as the keeper does, but for its log line
            taker.round()
        assert_whole(taker.store)
        [stats] = taker.store.stats().tiers.values()
        assert stats.capacity == sum(member.count for member in taker.store._tiers[Tier[tier.upper()]].members)
    assert taker.load(chain(1, 8)) == 8
