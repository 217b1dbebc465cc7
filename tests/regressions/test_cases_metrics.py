"""Cases of kind 15 in docs/cases.md: counters that say something else than what happened."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from case_kit import CASE_GEOMETRY, Box, bad_read, config_of, tokens_of
from stepwell.hashing import Namespace
from stepwell.index import Tier
from store_kit import Directories


def test_every_counter_is_the_callers_own_tally(directories: Directories) -> None:
    """C104, LMCache/LMCache#2574: the hit counter was 0 while the log was full of hits. 100 calls, results known."""
    page = CASE_GEOMETRY.page_bytes
    random = np.random.default_rng(11)
    with Box(config_of(directories, shared=32, disk=64)) as box:
        tally: Counter[str] = Counter()
        for _ in range(100):
            tokens = tokens_of(int(random.integers(6)), 4 * int(random.integers(1, 9)))
            match random.integers(4):
                case 0:
                    shared, disk = (box.cached(tokens, tier) for tier in (Tier.SHARED, Tier.DISK))
                    before = {tier: box.pages(tier) for tier in (Tier.SHARED, Tier.DISK)}
                    result = box.save(tokens)
                    tally["saved"] += result.saved
                    tally["refused"] += result.refused
                    for tier, known in ((Tier.SHARED, shared), (Tier.DISK, disk)):
                        wanted = tokens.size // 4 - known
                        tally[f"written {tier}"] += wanted * page
                        tally[f"evicted {tier}"] += before[tier] + wanted - box.pages(tier)
                case 1:
                    with box.store.match(tokens) as found:
                        tiers = found.tiers
                    tally["lookups"] += 1
                    tally["asked"] += tokens.size // 4
                    tally["absent"] += tokens.size // 4 - sum(tiers.values())
                    for tier, pages in tiers.items():
                        tally[f"hit {tier}"] += pages
                case 2:
                    tally["evicted shared"] += box.store.evict(Tier.SHARED, int(random.integers(6)))
                case 3:
                    other = Namespace(salt="nobody")
                    assert box.load(tokens, namespace=other) == 0
                    tally["lookups"] += 1
                    tally["asked"] += tokens.size // 4
                    tally["absent"] += tokens.size // 4
        stats = box.store.stats()
        assert (stats.lookups, stats.lookup_pages) == (tally["lookups"], tally["asked"])
        assert stats.hit_pages == {name: tally[f"hit {name}"] for name in stats.hit_pages}
        assert sum(stats.hit_pages.values()) == tally["hit shared"] + tally["hit disk"] > 0
        assert stats.misses == dict.fromkeys(stats.misses, 0) | {"absent": tally["absent"]}
        assert (stats.saved_pages, stats.refused_pages) == (tally["saved"], tally["refused"])
        for name in ("shared", "disk"):
            assert stats.evicted_pages.get(name, 0) == tally[f"evicted {name}"], name
            assert stats.tiers[name].bytes_written == tally[f"written {name}"], name
        assert stats.tiers["shared"].bytes_read == tally["written disk"]  # each byte goes on from there, verified
        assert (stats.io_errors, stats.checksum_failures) == (0, 0)


def test_errors_are_counted_where_they_are_returned(directories: Directories) -> None:
    """C104, vllm-project/production-stack#818: counter and answer come from one event."""
    with Box(config_of(directories, disk=16, io_threads=1)) as box:
        box.save(tokens_of(1, 16))
        with bad_read(0):
            assert box.load(tokens_of(1, 16)) == 0
        stats = box.store.stats()
        # Two calls: the read of all pages of the load, and the one page's own.
        assert (stats.io_errors, stats.misses["corrupt"], stats.hit_pages["disk"]) == (2, 1, 4)


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_capacity_and_use_are_right_before_the_first_call(directories: Directories, tier: str) -> None:
    """C106, kvcache-ai/Mooncake#3069: after a restart the capacity was 0."""
    config = config_of(directories, **{tier: 32})
    with Box(config) as box:
        box.save(tokens_of(1, 48))
        before = box.store.stats().tiers[tier]
    with Box(config) as box:
        after = box.store.stats().tiers[tier]
    assert (after.capacity, after.resident, after.free) == (before.capacity, before.resident, before.free)
    assert (after.capacity, after.resident) == (32, 12)
