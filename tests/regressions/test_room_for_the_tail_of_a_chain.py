"""A save pinned what was there of its chain in the nearest tier alone: room for its tail on the disk was made of its own
head, which was then written there again."""

from __future__ import annotations

from collections.abc import Callable

from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Rig, chain


def test_room_for_the_tail_is_not_made_of_the_head(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=VOLUME_BYTES)
    rig.round()
    capacity = rig.store.stats().tiers["disk"].capacity
    rig.save(chain(1, 10))
    rig.save(chain(2, capacity - 10))
    rig.load(chain(2, capacity - 10))
    before = rig.store.stats().tiers["disk"].bytes_written
    result = rig.save(chain(1, 20))
    assert (result.saved, result.refused) == (10, 0)
    assert rig.store.stats().tiers["disk"].bytes_written - before == 10 * rig.store._config.geometry.page_bytes
    assert rig.store.cached(chain(1, 20), tiers=(Tier.DISK,)) == chain(1, 20).size
