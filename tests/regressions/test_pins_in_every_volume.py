"""A page pinned in each volume took a whole tier out of service when a neighbour lacked room, and helped no one.

A volume that was to be given back and kept a pinned page never came free. It was passed over for the next one, which
kept one as well, and so on: half a second each, until no volume took a save, and what was not pinned was gone from all
of them. The neighbour got none.
"""

from __future__ import annotations

from stepwell.clock import ManualClock
from stepwell.index import Tier
from store_kit import PAGE_TOKENS, VOLUME_BYTES, OpenRig, chain

PAGES = 8


def test_volumes_that_keep_pins_stay_in_service_and_are_given_back_when_these_have_ended(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    saved = 0
    while len(rig.store._tiers[Tier.SHARED].members) < 2 or rig.store._index.claimable(Tier.SHARED) >= PAGES:
        assert rig.save(chain(saved, PAGES)).refused == 0
        saved += 1
        clock.advance(10.0)
        rig.round()
    pins = [rig.store.pin(chain(number, PAGES)[:PAGE_TOKENS], ttl=3600.0) for number in range(saved)]
    pins = [pin for pin in pins if pin.tokens]  # some had left by then
    resident = rig.pages(Tier.SHARED)

    neighbour = open_rig(shared=2 * VOLUME_BYTES, disk=0, clock=clock)
    assert neighbour.store.stats().tiers["shared"].capacity == 0
    for _ in range(10):
        clock.advance(10.0)
        rig.round()
    assert rig.save(chain(1000, PAGES)).refused == 0
    assert rig.load(chain(1000, PAGES)) == PAGES
    assert rig.pages(Tier.SHARED) >= resident - 2 * PAGES

    for pin in pins:
        assert pin.kept == PAGE_TOKENS
        pin.close()
    clock.advance(10.0)
    rig.round()
    neighbour.round()
    assert neighbour.save(chain(2000, PAGES)).refused == 0
