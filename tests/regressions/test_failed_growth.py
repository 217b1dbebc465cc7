"""A volume that could not be read while the tier grew left its slots in the index: the next volume overlapped them."""

from __future__ import annotations

import contextlib
import errno

import pytest

from stepwell.clock import ManualClock
from stepwell.errors import StepwellError
from stepwell.index import Tier
from stepwell.testing.faults import fail_each
from store_kit import VOLUME_BYTES, Directories, OpenRig, assert_whole, chain


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_a_tier_that_failed_to_take_an_orphan_takes_it_in_the_next_round(
    directories: Directories, open_rig: OpenRig, tier: Tier
) -> None:
    for fault in fail_each("file.pread", errno.EIO):
        here = Directories(
            *(path.with_name(f"{path.name}{fault.nth}") for path in (directories.shared, directories.disk))
        )
        config = here.config(**{"shared": 0, "disk": 0, tier.name.lower(): 2 * VOLUME_BYTES})
        clock = ManualClock()
        taker, giver = open_rig(config, clock=clock), open_rig(config)
        giver.save(chain(1, 8))
        giver.close()
        for number in range(10, 29):
            taker.save(chain(number, 8))  # more than one volume holds
        for is_last in (False, True):
            clock.advance(100.0)
            with fault if not is_last else contextlib.nullcontext(), contextlib.suppress(StepwellError, OSError):
                taker.round()
            assert_whole(taker.store)
            members = taker.store._tiers[tier].members  # type: ignore[attr-defined]
            capacity = taker.store.stats().tiers[tier.name.lower()].capacity
            assert capacity == sum(member.count for member in members), f"call {fault.nth}"
            taker.save(chain(30, 4))
        # An orphan whose header could not be read is the first to go where room is needed; any other is taken, warm.
        is_gone = len(here.volumes("lock")) == 2 and taker.load(chain(1, 8)) == 0
        assert is_gone or taker.load(chain(1, 8)) == 8, f"call {fault.nth}"
        taker.close()
