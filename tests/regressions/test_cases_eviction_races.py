"""Cases of kind 2 in docs/cases.md: eviction, promotion and prefetch that meet."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import numpy as np
import pytest

from case_kit import Box, config_of, tokens_of
from sequence_kit import PAGE_TOKENS, GatherGate, StampEngine, evict_all, flip_bit, prompt
from sequence_kit import stamps as device_stamps
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.testing.faults import inject, resume, wait_paused
from store_kit import SHARED_ONLY, VOLUME_BYTES, Directories, OpenRig, assert_whole, chain, stamps

MakeEngine = Callable[..., StampEngine]


def test_slots_that_a_load_is_on_its_way_to_are_freed_by_nobody(make_engine: MakeEngine) -> None:
    """C011, sgl-project/sglang#35769: an insert freed the slots that a queued copy was about to write.

    The 1,000 random interleavings are tests/test_sequence_random.py's.
    """
    engine = make_engine(device=24, shared=0, disk=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    with inject("mover.before_copy", "pause", nth=1):
        loading = engine.open(tokens)
        wait_paused("mover.before_copy")
        engine.store.set_epoch("x")  # what is on its way is nobody's any more,
        computing = engine.open(tokens[:25])
        assert computing.missing == 25
        engine.finish(computing)  # and the same prefix comes as pages of another's making
        assert engine.store.check() == ""
    engine.settle(loading)
    engine.verify(computing, 25)
    assert loading.ready == 0
    engine.land()
    other = engine.open(tokens)
    assert other.ready == 24
    engine.verify(other)


def test_a_prefix_computed_beside_its_own_load_is_found_once(make_engine: MakeEngine) -> None:
    """C011, sgl-project/sglang#35769: A(8 pages) is under way, another request brings A(6 pages)."""
    engine = make_engine(device=24, shared=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    with inject("mover.before_copy", "pause", nth=1):
        loading = engine.open(tokens)
        wait_paused("mover.before_copy")
        other = engine.open(tokens[:25])
        assert (loading.loading, other.pending + other.loading) == (32, 24)
        assert engine.store.evict(Tier.DEVICE, 24) == 0
    engine.settle(loading)
    engine.settle(other)
    assert (loading.ready, other.ready) == (32, 24)
    engine.verify(loading)
    engine.verify(other)
    assert engine.store.stats().tiers["device"].resident == 8
    assert np.array_equal(engine.block(loading)[:6], engine.block(other)[:6])


def test_a_load_is_not_done_before_anything_of_it_was_done(open_rig: OpenRig) -> None:
    """C012, sgl-project/sglang#9397: 0 of 0 planned pages counted as all of them."""
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 4))
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 4))
        for _ in range(100):
            assert not transfer.done
            assert not transfer.wait(0)
            assert (transfer.ok_pages, transfer.layers_done) == (0, 0)
    assert transfer.wait(120.0)
    assert transfer.ok_pages == 4


def test_a_sequence_is_not_ready_before_its_pages_are(make_engine: MakeEngine) -> None:
    """C012, sgl-project/sglang#9397: asked at once and again and again, a prefetch says that it is under way."""
    engine = make_engine()
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    with inject("mover.unit", "pause"):
        sequence = engine.open(prompt(1, 17))
        for _ in range(100):
            sequence.promote()
            assert (sequence.ready, sequence.loading) == (0, 16)
        assert engine.store.device.wait([sequence], 0.0) == []
    engine.settle(sequence)
    assert sequence.ready == 16
    engine.verify(sequence)


def test_what_lies_behind_a_page_that_is_gone_is_no_hit(make_engine: MakeEngine, directories: Directories) -> None:
    """C013, sgl-project/sglang#30106: a suffix from storage was hung under a prefix that only the device had."""
    engine = make_engine(device=24, shared=0, disk=1)
    store = engine.store
    whole, head = prompt(1, 33), prompt(1, 17)
    engine.cache(whole)
    evict_all(store, Tier.DEVICE, Tier.HOST)
    for page in device_stamps(head)[:4]:
        flip_bit(directories.disk, page)
    store.verify()
    for _ in range(4):
        store._tick()  # the damaged pages' slots are free again: on disk there is only the suffix
    gate = GatherGate.of(store)
    first = engine.serve(head)  # on the device alone: its write-through stands
    second = engine.open(whole)
    engine.settle(second)
    assert second.ready == 32
    engine.verify(second)
    first.close()
    second.close()
    gate.open()
    engine.land()
    evict_all(store, Tier.DEVICE)
    assert store.cached(whole, tiers=(Tier.HOST, Tier.DISK)) == 32  # backed up in the meantime
    store.forget(head)
    assert store.cached(whole, tiers=tuple(Tier)) == 0
    with store.match(whole) as match:
        assert match.pages == 0
    assert store.check() == ""


def test_what_can_leave_a_tier_depends_on_that_tier_alone(make_engine: MakeEngine) -> None:
    """C014, sgl-project/sglang#19212: a page counted as a leaf of host memory because its child had left the device."""
    engine = make_engine(device=8, host=8, shared=0)
    store = engine.store
    tokens = prompt(1, 13)  # x, y, z and a tail
    engine.cache(tokens)
    evict_all(store, Tier.DEVICE)
    assert store.cached(tokens, tiers=(Tier.HOST,)) == 12
    assert store.evict(Tier.HOST, 1) == 1  # z
    engine.cache(tokens)  # x and y are loaded, z is computed and backed up
    assert store.cached(tokens, tiers=(Tier.HOST,)) == 12
    assert store.evict(Tier.DEVICE, 2) == 2  # z and y, and x stays
    assert store.cached(tokens, tiers=(Tier.DEVICE,)) == 4
    for left in (8, 4, 0):  # z, y, x
        assert store.evict(Tier.HOST, 1) == 1
        assert store.cached(tokens, tiers=(Tier.HOST,)) == left
    assert store.evict(Tier.HOST, 1) == 0
    assert store.check() == ""


@pytest.mark.parametrize("how", ["one page", "page by page", "layer by layer", "keys"])
def test_no_read_of_any_kind_is_of_a_page_that_left_meanwhile(open_rig: OpenRig, how: str) -> None:
    """C016, kvcache-ai/Mooncake#850: a lease by time was shorter than the read that it guarded.

    Other tiers: tests/test_store.py::test_a_slow_reader_gets_its_bytes_while_others_write_ten_times_the_capacity.
    """
    rig = open_rig(**SHARED_ONLY, low_watermark=0.0, copy_threads=1)
    pages = 1 if how == "one page" else 16
    tokens = chain(1, pages)
    rig.save(tokens)
    writer = np.zeros((8, rig.rows.shape[1]), np.uint8)
    pool = rig.store.lend(writer.reshape(8, 2, 2, 4, 2, 32), axes="slot layer stream token head dim")
    capacity = rig.store.stats().tiers["shared"].capacity
    ok: list[np.ndarray] = []

    def read() -> None:
        if how == "keys":
            keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS)
            ok.append(rig.store.load_keys(keys, into=rig.pool[:pages]))
            return
        with rig.store.match(tokens) as match:
            order = "layer" if how == "layer by layer" else "page"
            transfer = rig.store.load(match, into=rig.pool[:pages], order=order)  # type: ignore[arg-type]
        transfer.wait(120.0)
        ok.append(transfer.ok)

    rig.rows[:pages] = 0xEE
    reader = threading.Thread(target=read)
    with inject("mover.before_copy", "pause", nth=1):
        reader.start()
        wait_paused("mover.before_copy")
        for number in range(100, 100 + 10 * capacity // 8):
            writer[:] = stamps(chain(number, 8))
            rig.store.save(chain(number, 8), source=pool[:])
        resume("mover.before_copy")
        reader.join(120.0)
    [landed] = ok
    assert landed.all()
    assert np.array_equal(rig.rows[:pages], stamps(tokens))


UNTIL_COMMIT = ["mover.before_copy", "volume.odd", "volume.after_bytes", "volume.after_record", "mover.after_copy"]


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
@pytest.mark.parametrize("point", UNTIL_COMMIT)
def test_a_key_is_seen_only_once_its_bytes_are_there(open_rig: OpenRig, tier: Tier, point: str) -> None:
    """C017, kvcache-ai/Mooncake#2799: keys were there before their bytes were, and stayed when these failed."""
    rig = open_rig(**{"shared": 0, "disk": 0, tier.name.lower(): VOLUME_BYTES})
    keys = prefix_hashes(chain(1, 4), page_tokens=PAGE_TOKENS)
    stop = threading.Event()
    hits: list[int] = []

    def poll() -> None:
        while not stop.is_set():
            with rig.store.match(chain(1, 4)) as match:
                hits.append(match.pages)
            hits.append(rig.store.probe(keys, lease=0.0).run)

    readers = [threading.Thread(target=poll) for _ in range(4)]
    with inject(point, "pause"):
        saving = rig.save(chain(1, 4), wait=False)
        wait_paused(point)
        for reader in readers:
            reader.start()
        while len(hits) < 200:
            continue
        stop.set()
        for reader in readers:
            reader.join()
        assert set(hits) == {0}
    assert saving.transfer.wait(120.0)
    assert rig.load(chain(1, 4)) == 4
    free = rig.store.stats().tiers[tier.name.lower()].free
    with inject("volume.after_record", "errno", nth=1, value=errno.EIO):
        failed = rig.save(chain(2, 1))
    assert not failed.transfer.ok.any()
    assert rig.load(chain(2, 1)) == 0
    rig.round()
    assert rig.store.stats().tiers[tier.name.lower()].free == free
    assert_whole(rig.store)


@pytest.mark.parametrize("keeps", ["keeps", "drops"])
def test_what_cannot_be_backed_up_is_dropped_and_called_so(make_engine: MakeEngine, keeps: str) -> None:
    """C021, sgl-project/sglang#27108: a backup of nothing into a host that was all pinned counted as done."""
    engine = make_engine(device=4, host=4, shared=0)
    store = engine.store
    engine.cache(prompt(9, 16))
    blockers = store.match(prompt(9, 16))
    assert blockers.pages == 4
    evict_all(store, Tier.DEVICE)
    engine.cache(prompt(1, 16))  # four pages on the device, none of them in host memory
    assert store.stats().tiers["device"].resident == 4
    other = engine.open(prompt(2, 8))
    extended = store.extend([other], [8])
    assert extended.ok.all()
    assert store.cached(prompt(1, 17), tiers=(Tier.HOST,)) == 0
    assert store.cached(prompt(1, 17), tiers=(Tier.DEVICE,)) == 8
    if keeps == "keeps":  # and where there is nothing to drop it is a value with numbers
        held = engine.open(prompt(1, 17))
        refused = store.extend([held], [17])
        assert not refused.ok[0]
        assert refused.full is not None
        assert refused.full.evictable == 0
        held.close()
    blockers.close()
    engine.finish(other)
    engine.verify(other, 8)


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_what_was_written_last_is_not_what_leaves_first(directories: Directories, tier: str, restart: bool) -> None:
    """C022, kvcache-ai/Mooncake#3097: a new bucket entered with the time 0 and was the next victim."""
    config = config_of(directories, **{tier: 16})  # four chains of four pages
    box = Box(config)
    for number in (1, 2, 3, 4):
        box.save(tokens_of(number, 16))
    for number in (1, 2, 3, 4):  # touched at t1..t4
        box.store.match(tokens_of(number, 16)).close()
    if restart:
        box.store.close()
        box = Box(config)
    box.save(tokens_of(5, 16))
    where = Tier[tier.upper()]
    assert [box.cached(tokens_of(number, 16), where) for number in (1, 2, 3, 4, 5)] == [0, 4, 4, 4, 4]
    if restart:
        box.store.close()
        box = Box(config)
    box.save(tokens_of(6, 16))
    assert [box.cached(tokens_of(number, 16), where) for number in (1, 2, 3, 4, 5, 6)] == [0, 0, 4, 4, 4, 4]
    box.store.close()


def test_a_promotion_leaves_its_pages_in_memory(directories: Directories) -> None:
    """C023, taco-project/FlexKV#121: what had been read from SSD never entered the cache in memory."""
    with Box(config_of(directories, shared=16, disk=16)) as box:
        box.save(tokens_of(1, 32))
        box.store.evict(Tier.SHARED, 8)
        assert box.load(tokens_of(1, 32)) == 8
        assert box.store.flush(120.0)
        assert box.cached(tokens_of(1, 32), Tier.SHARED) == 8
        read = box.store.stats().tiers["disk"].bytes_read
        with inject("file.pread", "errno", value=errno.EIO):
            assert box.load(tokens_of(1, 32)) == 8
        assert box.store.stats().tiers["disk"].bytes_read == read


def test_any_lengths_in_the_tiers_are_extended(directories: Directories) -> None:
    """C023, taco-project/FlexKV#24: a save failed where memory held a longer prefix than the SSD."""
    with Box(config_of(directories, shared=16, disk=16)) as box:
        box.save(tokens_of(1, 32))
        box.store.evict(Tier.DISK, 4)
        assert [box.cached(tokens_of(1, 40), tier) for tier in (Tier.SHARED, Tier.DISK)] == [8, 4]
        assert box.save(tokens_of(1, 40)).transfer.ok.all()
        assert [box.cached(tokens_of(1, 40), tier) for tier in (Tier.SHARED, Tier.DISK)] == [10, 10]
        box.store.evict(Tier.SHARED, 7)
        assert box.save(tokens_of(1, 48)).transfer.ok.all()
        assert [box.cached(tokens_of(1, 48), tier) for tier in (Tier.SHARED, Tier.DISK)] == [12, 12]
        assert box.load(tokens_of(1, 48)) == 12
