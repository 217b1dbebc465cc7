"""A save pinned what was there of its chain in the nearest tier alone: where all else on the disk was pinned, room for
its tail was made of its own head, which was then written there again."""

from __future__ import annotations

from collections.abc import Callable

from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Rig, chain

HEAD = 10


def test_room_for_the_tail_is_not_made_of_the_head(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=VOLUME_BYTES)
    rig.round()
    capacity = rig.store.stats().tiers["disk"].capacity
    rig.save(chain(1, HEAD))
    rig.save(chain(2, capacity - HEAD))
    rig.store.evict(Tier.SHARED, 1000)
    rig.load(chain(1, HEAD))  # it goes back up, and is in both
    with rig.store.match(chain(2, capacity - HEAD)):  # pinned on the disk
        before = rig.store.stats().tiers["disk"]
        assert before.free == 0
        result = rig.save(chain(1, 2 * HEAD))
        assert (result.saved, result.refused) == (HEAD, 0)
        assert rig.store.stats().tiers["disk"].bytes_written == before.bytes_written
        assert rig.store.cached(chain(1, 2 * HEAD), tiers=(Tier.DISK,)) == chain(1, HEAD).size
