"""Saves that came faster than a volume a round of the keeper evicted each other, or were refused, beside capacity that
nobody had taken: of a first prompt of half the capacity one page in sixteen was kept.
"""

from __future__ import annotations

import pytest

from stepwell.index import Tier
from store_kit import VOLUME_BYTES, OpenRig, chain


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_a_save_of_most_of_the_capacity_into_an_empty_tier_is_kept_whole(
    open_rig: OpenRig, tier: Tier
) -> None:
    name = tier.name.lower()
    rig = open_rig(**{"shared": 0, "disk": 0, name: 5 * VOLUME_BYTES}, slots=1024, keeper=True)
    pages = 3 * rig.store.stats().tiers[name].capacity
    result = rig.save(chain(1, pages))
    assert (result.saved, result.refused) == (pages, 0)
    assert rig.load(chain(1, pages)) == pages


def test_a_burst_of_saves_evicts_nothing_while_there_is_capacity(open_rig: OpenRig) -> None:
    rig = open_rig(shared=5 * VOLUME_BYTES, disk=0, slots=1024, keeper=True)
    each = rig.store.stats().tiers["shared"].capacity // 2
    assert [rig.save(chain(number, each)).refused for number in range(8)] == [0] * 8
    assert rig.store.stats().evicted_pages == {}
    assert [rig.load(chain(number, each)) for number in range(8)] == [each] * 8


def test_a_save_waits_for_no_memory_where_a_neighbour_has_it_all(open_rig: OpenRig) -> None:
    first = open_rig(shared=2 * VOLUME_BYTES, disk=0, slots=1024, keeper=True)
    pages = 2 * first.store.stats().tiers["shared"].capacity
    assert first.save(chain(1, pages)).refused == 0
    second = open_rig(shared=2 * VOLUME_BYTES, disk=0, slots=1024)
    result = second.save(chain(2, 4))
    assert (result.saved, result.refused) == (0, 4)
