"""With selective writes a page goes to disk at its second use: not before, and not more than once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import stepwell as sw
from sequence_kit import StampEngine, prompt
from sequence_kit import config as engine_config
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.seen import Seen
from stepwell.testing.faults import inject
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain, stamps


@pytest.fixture
def open_selective(directories: Directories, open_rig: OpenRig) -> OpenRig:
    def make(**sizes: Any) -> Rig:
        config = directories.config(**sizes)
        assert config.disk is not None
        return open_rig(msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, write="selective")))

    return make


def on_disk(rig: Rig) -> int:
    assert rig.store.flush(timeout=30.0)
    return rig.pages(Tier.DISK)


def test_a_first_save_goes_to_shared_memory_only(open_selective: OpenRig) -> None:
    rig = open_selective()
    result = rig.save(chain(1, 5))
    assert (result.saved, result.refused, result.full) == (5, 0, None)
    assert (rig.pages(Tier.SHARED), on_disk(rig)) == (5, 0)
    stats = rig.store.stats()
    assert (stats.held_back_pages, stats.second_use_pages, stats.tiers["disk"].bytes_written) == (5, 0, 0)


def test_a_page_that_is_found_is_written_to_disk_once(open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 5)
    rig.save(tokens)
    for _ in range(3):
        assert rig.load(tokens[: 3 * PAGE_TOKENS]) == 3
        assert on_disk(rig) == 3
    assert rig.store.stats().second_use_pages == 3
    rig.store.evict(Tier.SHARED, 100)
    assert rig.load(tokens) == 3  # from disk, the bytes compared


@pytest.mark.parametrize("call", ["probe", "load_keys"])
def test_finding_by_keys_is_a_use_too(open_selective: OpenRig, call: str) -> None:
    rig = open_selective()
    tokens = chain(1, 4)
    rig.save(tokens)
    keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS, seed=None)
    if call == "probe":
        assert rig.store.probe(keys, lease=0.0).run == 4
    else:
        assert rig.store.load_keys(keys, into=rig.pool[:4]).all()
    assert on_disk(rig) == 4


def test_a_growing_prompt_that_is_saved_chunk_by_chunk_is_one_use(open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 8)
    for pages in (2, 4, 8, 8):
        rig.save(tokens[: pages * PAGE_TOKENS])
    assert on_disk(rig) == 0
    assert rig.store.stats().held_back_pages == 8


def test_chunks_that_are_saved_while_the_one_before_is_on_its_way_are_one_use(open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 8)
    rig.rows[:8] = stamps(tokens)
    with inject("mover.before_copy", "delay", value=1000):
        for pages in (2, 4, 8):
            rig.store.save(tokens[: pages * PAGE_TOKENS], source=rig.pool[:pages])
    assert on_disk(rig) == 0
    assert rig.load(tokens) == 8


def test_a_page_that_left_shared_memory_and_is_saved_again_goes_to_disk_at_once(open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 4)
    rig.save(tokens)
    rig.store.evict(Tier.SHARED, 100)
    assert rig.load(tokens) == 0
    rig.save(chain(2, 4))
    result = rig.save(tokens)
    assert result.transfer.ok.all()
    assert (rig.pages(Tier.SHARED), rig.pages(Tier.DISK)) == (8, 4)  # done: in both
    assert rig.store.stats().second_use_pages == 4


def test_keys_are_saved_by_the_same_rule(open_selective: OpenRig) -> None:
    rig = open_selective()
    keys = np.arange(4 * 12, dtype=np.uint8).reshape(4, 12)
    rig.rows[:4] = 7
    assert (rig.store.save_keys(keys, source=rig.pool[:4]) == sw.SaveOutcome.STORED).all()
    assert on_disk(rig) == 0
    rig.store.evict(Tier.SHARED, 100)
    assert (rig.store.save_keys(keys, source=rig.pool[:4]) == sw.SaveOutcome.STORED).all()
    assert on_disk(rig) == 4


def test_one_off_prompts_do_not_push_used_ones_off_the_disk(open_selective: OpenRig) -> None:
    rig = open_selective(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    tokens = chain(1, 10)
    rig.save(tokens)
    rig.load(tokens)
    assert on_disk(rig) == 10
    for number in range(2, 40):
        rig.save(chain(number, 16))
        rig.round()
    assert on_disk(rig) == 10
    assert rig.load(tokens) == 10


def test_a_full_disk_makes_room_for_what_is_used(open_selective: OpenRig) -> None:
    rig = open_selective(shared=4 * VOLUME_BYTES, disk=VOLUME_BYTES)
    capacity = rig.store.stats().tiers["disk"].capacity
    for number in range(1, 2 + capacity // 16):
        rig.save(chain(number, 16))
        assert rig.load(chain(number, 16)) == 16
        rig.store.flush(timeout=30.0)
    last = chain(1 + capacity // 16, 16)
    rig.store.evict(Tier.SHARED, 10_000)
    assert rig.load(last) == 16


def test_a_write_that_fails_is_tried_at_the_next_use(open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 3)
    rig.save(tokens)
    with inject("file.pwrite*", "errno", value=5):
        rig.load(tokens)
        rig.store.flush(timeout=30.0)
    assert rig.load(tokens) == 3
    assert on_disk(rig) == 3


def test_what_was_seen_is_forgotten_by_a_restart(directories: Directories, open_selective: OpenRig) -> None:
    rig = open_selective()
    tokens = chain(1, 3)
    rig.save(tokens)
    rig.close()
    rig = open_selective()
    assert rig.load(tokens) == 3  # recovered, and this is a use
    assert on_disk(rig) == 3
    rig.save(chain(2, 3))
    rig.close()
    rig = open_selective()
    rig.store.evict(Tier.SHARED, 100)
    rig.save(chain(2, 3))
    assert on_disk(rig) == 3


@pytest.fixture
def selective_engine(directories: Directories) -> Iterator[StampEngine]:
    config = engine_config(directories, disk=2)
    assert config.disk is not None
    config = msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, write="selective"))
    with sw.PageStore(config) as store:
        yield StampEngine(store)
        assert store.check() == ""


def test_what_sequences_publish_goes_by_the_same_rule(selective_engine: StampEngine) -> None:
    store = selective_engine.store
    selective_engine.cache(prompt(1, 13))
    stats = store.stats()
    assert (stats.tiers["shared"].resident, stats.tiers["disk"].resident, stats.held_back_pages) == (3, 0, 3)
    selective_engine.cache(prompt(1, 13))
    assert store.flush(timeout=30.0)
    assert store.stats().tiers["disk"].resident == 3
    assert store.stats().second_use_pages == 3


def test_what_a_sequence_computes_anew_goes_to_disk_at_once(selective_engine: StampEngine) -> None:
    store = selective_engine.store
    selective_engine.cache(prompt(1, 13))
    store.clear()
    selective_engine.cache(prompt(1, 13))
    stats = store.stats()
    assert (stats.tiers["shared"].resident, stats.tiers["disk"].resident, stats.second_use_pages) == (3, 3, 3)


def test_a_sequence_that_is_suspended_and_resumed_is_one_use(selective_engine: StampEngine) -> None:
    sequence = selective_engine.serve(prompt(1, 13))
    selective_engine.land()
    sequence.suspend()
    sequence.resume()
    selective_engine.settle(sequence)
    sequence.close()
    assert selective_engine.store.flush(timeout=30.0)
    assert selective_engine.store.stats().tiers["disk"].resident == 0


def test_published_pages_can_be_pinned_before_they_have_left_the_device(selective_engine: StampEngine) -> None:
    store = selective_engine.store
    sequence = selective_engine.serve(prompt(1, 13))
    pin = store.pin(prompt(1, 13), ttl=60.0)
    assert (pin.tokens, pin.pending) == (0, 12)
    selective_engine.land()
    assert store.flush(timeout=30.0)
    assert pin.kept == 12
    sequence.close()
    store.clear()
    assert pin.kept == 12
    pin.close()


def test_write_through_counts_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.save(chain(1, 3))
    rig.load(chain(1, 3))
    stats = rig.store.stats()
    assert (stats.held_back_pages, stats.second_use_pages) == (0, 0)


def test_selective_writes_need_a_shared_tier(directories: Directories) -> None:
    disk = sw.DiskTier(VOLUME_BYTES, str(directories.disk), write="selective")
    config = msgspec.structs.replace(directories.config(shared=0), disk=disk)
    with pytest.raises(sw.StepwellUsageError, match="give shared"):
        config.checked()


def test_another_way_to_write_is_refused(directories: Directories) -> None:
    disk = sw.DiskTier(VOLUME_BYTES, str(directories.disk), write="sometimes")  # type: ignore[arg-type]
    config = msgspec.structs.replace(directories.config(), disk=disk)
    with pytest.raises(sw.StepwellUsageError, match="'sometimes' is neither"):
        config.checked()


@pytest.mark.parametrize("length", [1, 8, 12, 32, 64])
def test_seen_knows_keys_of_any_length_and_takes_none_for_another(length: int) -> None:
    seen = Seen(1000)
    keys = np.zeros((200, length), np.uint8)
    keys[:, 0] = np.arange(200)  # small differences, no hashes
    assert not seen.add(keys[:100]).any()
    known = seen.add(keys)
    assert known[:100].sum() >= 95  # one may have taken another's place
    assert not known[100:].any()


def test_seen_remembers_twice_what_the_tiers_hold() -> None:
    seen = Seen(20_000)
    keys = np.random.default_rng(0).integers(0, 256, (40_000, 32), np.uint8)
    seen.add(keys)
    assert seen.add(keys).mean() > 0.7
