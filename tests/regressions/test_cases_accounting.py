"""Cases of kind 4 in docs/cases.md: capacities, and how much an eviction frees."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from case_kit import Box, config_of, tokens_of
from sequence_kit import StampEngine, evict_all, prompt
from stepwell.geometry import PageGeometry
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from store_kit import Directories

MakeEngine = Callable[..., StampEngine]


def test_an_eviction_frees_what_was_asked_and_says_how_much(directories: Directories) -> None:
    """C031, sgl-project/sglang#4987: the loop that evicts counted nothing and emptied the tier."""
    with Box(config_of(directories, host=100), slots=100) as box:
        box.save(tokens_of(1, 400))
        assert box.store.evict(Tier.HOST, 10) == 10
        assert box.pages(Tier.HOST) == 90
        assert box.store.evict(Tier.HOST, 0) == 0
        assert box.pages(Tier.HOST) == 90
        assert box.store.evict(Tier.HOST, 1000) == 90
        assert box.pages(Tier.HOST) == 0


def test_capacity_adds_up_after_every_step_whatever_the_lengths(directories: Directories) -> None:
    """C032, sgl-project/sglang#10637: the evictable size drifted with pages of more than one token. 1,500 steps."""
    geometry = PageGeometry(
        model="wide", revision="1", layers=1, kv_heads=1, head_dim=2, dtype="uint8", page_tokens=16
    )
    random = np.random.default_rng(3)
    base = tokens_of(1, 64)
    with Box(config_of(directories, geometry, host=16)) as box:
        assert box.load(base[:15]) == 0
        for step in range(1500):
            length = int(random.choice([1, 15, 16, 17, 31, 33, 64]))
            tokens = base[:length].copy()
            shared = int(random.integers(length + 1))
            tokens[shared:] += 1_000_000 * int(random.integers(3))
            match random.integers(4):
                case 0 | 1:
                    result = box.save(tokens)
                    assert result.saved + result.present + result.refused == length // 16
                case 2:
                    assert box.load(tokens) <= length // 16
                case 3:
                    wanted = int(random.integers(6))
                    assert box.store.evict(Tier.HOST, wanted) <= wanted
            if step % 10:
                tier = box.store.stats().tiers["host"]
                assert tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined == 16, step
            else:
                box.assert_adds_up()
        resident = box.pages(Tier.HOST)
        assert box.store.evict(Tier.HOST, 16) == resident
        assert box.store.stats().tiers["host"].free == 16


def test_who_asks_for_everything_all_the_time_does_not_stop_a_writer(directories: Directories) -> None:
    """C036, kvcache-ai/Mooncake#2187: probes of all keys renewed their leases for ever, and no page could leave."""
    with Box(config_of(directories, host=64)) as box:
        chains = [tokens_of(number, 32) for number in range(8)]
        for tokens in chains:
            box.save(tokens)
        keys = [prefix_hashes(tokens, page_tokens=4) for tokens in chains]
        stop, probes = threading.Event(), [0]

        def probe() -> None:
            while not stop.is_set():
                for each in keys:
                    box.store.probe(each, lease=60.0)  # longer than the test
                    probes[0] += 1

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            while probes[0] < 100:
                continue
            for number in range(100, 150):
                result = box.save(tokens_of(number, 32))
                assert result.saved == 8, result.full
                assert box.cached(tokens_of(number, 32), Tier.HOST) == 8
        finally:
            stop.set()
            prober.join()


def test_who_only_looks_renews_nothing(directories: Directories) -> None:
    """C036, kvcache-ai/Mooncake#2187: what leaves is what was used least lately, not what was asked for least."""
    with Box(config_of(directories, host=16)) as box:
        box.save(tokens_of(1, 32))
        box.save(tokens_of(2, 32))
        key = bytes(prefix_hashes(tokens_of(1, 32), page_tokens=4)[7])
        for _ in range(100):
            assert box.cached(tokens_of(1, 32), Tier.HOST) == 8
            assert box.store.state(key)[Tier.HOST].name == "RESIDENT"
        assert box.save(tokens_of(3, 32)).saved == 8
        assert [box.cached(tokens_of(number, 32), Tier.HOST) for number in (1, 2, 3)] == [0, 8, 8]


def test_a_probe_is_a_use_and_what_is_probed_for_ever_still_leaves(directories: Directories) -> None:
    """C036, kvcache-ai/Mooncake#2187: all keys were probed all the time, and nothing was old enough to leave."""
    with Box(config_of(directories, host=16)) as box:
        keys = {}
        for number in (1, 2):
            box.save(tokens_of(number, 32))
            keys[number] = prefix_hashes(tokens_of(number, 32), page_tokens=4)
        for _ in range(100):
            for number in (2, 1):
                assert box.store.probe(keys[number], lease=0.0).run == 8
        assert box.save(tokens_of(3, 32)).saved == 8
        assert [box.cached(tokens_of(number, 32), Tier.HOST) for number in (1, 2, 3)] == [8, 0, 8]


def test_a_host_that_is_smaller_than_the_device_makes_room_for_what_leaves_it(make_engine: MakeEngine) -> None:
    """C038, sgl-project/sglang#16909: a small host was full of copies of what the device still had, and freed none."""
    engine = make_engine(device=32, host=8, shared=0)
    store = engine.store
    for number in range(8):
        engine.cache(prompt(number, 16))
    assert store.stats().tiers["device"].resident == 32
    assert store.stats().tiers["host"].resident >= 7  # the keeper may have freed one ahead of need
    for left in range(31, -1, -1):
        assert store.evict(Tier.DEVICE, 1) == 1
        assert store.stats().tiers["device"].resident == left
        assert store.check() == ""
    again = engine.serve(prompt(9, 32))
    engine.verify(again, 32)
    engine.land()
    assert store.stats().refused_pages == 0
    again.close()
    evict_all(store, Tier.DEVICE)
    assert store.cached(prompt(9, 32), tiers=(Tier.HOST,)) == 32
