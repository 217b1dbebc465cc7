"""forget() chose what leaves tier by tier: where the epoch changed between two tiers it dropped pages of the old epoch
from one and those of the new epoch, which nobody had forgotten under it, from the other."""

from __future__ import annotations

import threading

from stepwell.index import Tier
from stepwell.testing.faults import inject, wait_paused
from store_kit import OpenRig, chain

PAGES = 4


def test_a_forget_is_of_one_epoch_in_every_tier(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.store.set_epoch(1)
    rig.save(chain(1, PAGES))
    rig.store.set_epoch(0)
    rig.save(chain(1, PAGES))
    with inject("volume.retire", "pause", nth=1):
        forgetting = threading.Thread(target=rig.store.forget, args=(chain(1, PAGES),))
        forgetting.start()
        wait_paused("volume.retire")
        rig.store.set_epoch(1)
    forgetting.join()
    for tier in (Tier.SHARED, Tier.DISK):
        assert rig.store.cached(chain(1, PAGES), tiers=(tier,)) == chain(1, PAGES).size, tier
    rig.store.set_epoch(0)
    assert rig.store.cached(chain(1, PAGES), tiers=(Tier.SHARED, Tier.DISK)) == 0
