"""A probe's lease held its pages in every tier, but was only ended for room in the tier that it found them in: a save
was refused by a full disk for the sake of pages that the probe had found in host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Rig, chain

HOST_PAGES = 8


def test_a_courtesy_does_not_keep_a_page_in_a_tier_that_is_full(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(host=HOST_PAGES * 4096, shared=0, disk=VOLUME_BYTES)
    rig.round()
    capacity = rig.store.stats().tiers["disk"].capacity
    rig.save(chain(1, HOST_PAGES))
    keys = prefix_hashes(chain(1, HOST_PAGES), page_tokens=PAGE_TOKENS)
    assert rig.store.load_keys(keys, into=rig.pool[:HOST_PAGES]).all()
    found = rig.store.probe(keys, lease=100.0)
    assert np.array_equal(found.tiers, [Tier.HOST] * HOST_PAGES)
    result = rig.save(chain(2, capacity))
    assert (result.saved, result.refused, result.full) == (capacity, 0, None)
