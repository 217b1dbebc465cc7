"""A load joins the copies that were begun ahead: it reads no page again that is on its way up, and what does not come
is read where it was found, as if nobody had begun to bring it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sequence_kit import flip_bit
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.config import StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Residency, Tier
from stepwell.mover import Inbox, Transfer
from stepwell.testing.faults import inject, wait_paused
from stepwell.testing.stepped import COPY_QUEUE, IO_QUEUE, SteppedStore
from store_kit import (
    AXES,
    GEOMETRY,
    PAGE_BYTES,
    PAGE_TOKENS,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    assert_unpinned,
    assert_whole,
    chain,
    stamps,
)

PAGES = 8
TOKENS = chain(1, PAGES)
KEYS = prefix_hashes(TOKENS, page_tokens=PAGE_TOKENS)
LONG = 1e6


class Stepped:
    """A stepped store whose pages are on disk alone."""

    def __init__(self, config: StoreConfig, tokens: np.ndarray) -> None:
        self.clock = ManualClock(start=0.0)
        self.store = SteppedStore(config, clock=self.clock, seed=1)
        pages = tokens.size // PAGE_TOKENS
        self.rows = np.zeros((2 * pages, PAGE_BYTES), np.uint8)
        shape = (2 * pages, GEOMETRY.layers, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.pool = self.store.lend(self.rows.reshape(shape), axes=AXES)
        self.store.tick()
        self.rows[:pages] = stamps(tokens)
        for first in range(0, pages, PAGES):
            part = slice(first, min(pages, first + PAGES))
            self.store.save(tokens[: part.stop * PAGE_TOKENS], source=self.pool[: part.stop]).transfer.wait()
            self.store.settle()
            self.store.evict(Tier.SHARED, 10_000)
        self.tokens = tokens
        self.read_before = self.bytes_read()

    def bytes_read(self) -> int:
        return self.store.stats().tiers["disk"].bytes_read

    @property
    def pages_read(self) -> float:
        """How many pages were read from disk since the store was made."""
        return (self.bytes_read() - self.read_before) / PAGE_BYTES

    def get(self, keys: np.ndarray = KEYS, **how: float) -> list[bool]:
        self.rows[: len(keys)] = 0xEE
        ok = self.store.load_keys(keys, into=self.pool[: len(keys)], **how)
        assert np.array_equal(self.rows[: len(keys)][ok], stamps(self.tokens)[: len(keys)][ok]), "wrong bytes"
        return ok.tolist()  # type: ignore[no-any-return]

    def begin(self, **how: object) -> Transfer:
        """Begin to load all pages; nothing has moved yet."""
        self.rows[:] = 0xEE
        with self.store.match(self.tokens) as match:
            return self.store.load(match, into=self.pool[: match.pages], **how)  # type: ignore[arg-type]

    def came(self, transfer: Transfer) -> list[bool]:
        ok = transfer.ok
        assert np.array_equal(self.rows[: ok.size][ok], stamps(self.tokens)[: ok.size][ok]), "wrong bytes were served"
        return ok.tolist()  # type: ignore[no-any-return]

    def states(self, tier: Tier) -> list[Residency]:
        return [self.store.state(key.tobytes())[tier] for key in KEYS]


@pytest.fixture
def open_stepped(directories: Directories) -> Iterator[object]:
    made: list[Stepped] = []

    def make(tokens: np.ndarray = TOKENS, **sizes: object) -> Stepped:
        given = {"shared": 2 * VOLUME_BYTES, "disk": 16 * VOLUME_BYTES, **sizes}
        made.append(Stepped(directories.config(**given), tokens))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.store._probes.end_all()
        each.store.settle()
        assert_whole(each.store)
        assert_unpinned(each.store)
        assert each.store.check() == ""
        each.store.close()


@pytest.fixture
def rig(open_stepped: object) -> Stepped:
    """A store whose eight pages are on disk alone."""
    return open_stepped()  # type: ignore[operator, no-any-return]


# ---- each byte once --------------------------------------------------------------------------------------------------


def test_a_get_right_after_a_probe_reads_each_page_from_disk_once(rig: Stepped) -> None:
    assert rig.store.probe(KEYS, lease=LONG).run == PAGES
    assert rig.get() == [True] * PAGES
    assert rig.pages_read == PAGES
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * PAGES


def test_a_load_by_tokens_joins_what_a_probe_has_begun(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    assert rig.pages_read == PAGES
    assert rig.store.stats().hit_pages["disk"] >= PAGES


@pytest.mark.parametrize("order", ["page", "layer"])
def test_pages_that_are_on_their_way_and_others_come_in_one_load(rig: Stepped, order: str) -> None:
    rig.store.load_keys(KEYS[:2], into=rig.pool[:2])  # in shared memory from here on
    rig.store.probe(KEYS[:5], lease=0.0)
    transfer = rig.begin(order=order)
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    assert transfer.layers_done == GEOMETRY.layers
    assert rig.pages_read == PAGES
    rig.store.settle()
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * PAGES


def test_what_comes_to_host_memory_is_joined_there(open_stepped: object) -> None:
    rig = open_stepped(host=64 * 4096, low_watermark=0.0)  # type: ignore[operator]
    rig.store.evict(Tier.HOST, 10_000)
    capacity = rig.store.stats().tiers["shared"].capacity
    private = rig.store._index.take_private(Tier.SHARED, capacity)
    rig.store.probe(KEYS, lease=0.0)
    assert rig.states(Tier.HOST) == [Residency.ARRIVING] * PAGES
    assert rig.get() == [True] * PAGES
    assert rig.pages_read == PAGES
    rig.store._index.free_private(Tier.SHARED, private)


def test_two_gets_join_the_same_copy(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    first = rig.begin()
    second = rig.begin()
    assert first.wait()
    assert second.wait()
    assert (rig.came(first), rig.came(second)) == ([True] * PAGES, [True] * PAGES)
    assert rig.pages_read == PAGES


def test_a_get_while_the_disk_is_slow_reads_nothing_twice(open_rig: OpenRig) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=16 * VOLUME_BYTES)
    rig.round()
    rig.save(TOKENS)
    rig.store.evict(Tier.SHARED, 10_000)
    before = rig.store.stats().tiers["disk"].bytes_read
    with ThreadPoolExecutor(1) as pool:
        with inject("mover.unit", "pause"):
            rig.store.probe(KEYS, lease=LONG)
            wait_paused("mover.unit")
            running = pool.submit(rig.start_load, TOKENS)
            transfer = running.result()
            assert not transfer.done
        assert transfer.wait()
    assert transfer.ok_pages == PAGES
    assert np.array_equal(rig.rows[:PAGES], stamps(TOKENS))
    assert rig.store.stats().tiers["disk"].bytes_read - before == PAGES * PAGE_BYTES
    rig.store._probes.end_all()


# ---- who waits for what ----------------------------------------------------------------------------------------------


def test_a_load_waits_for_the_part_of_a_long_run_that_it_needs(
    open_stepped: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.copies._AHEAD_PAGES", 3)
    rig = open_stepped()  # type: ignore[operator]
    rig.store.probe(KEYS, lease=0.0)
    assert rig.states(Tier.SHARED) == [Residency.ARRIVING] * PAGES
    parts = [each.core for each in rig.store._copies._ahead]
    assert [part.pages for part in parts] == [3, 3, 2]
    with rig.store.match(TOKENS[: 2 * PAGE_TOKENS]) as match:
        transfer = rig.store.load(match, into=rig.pool[:2])
    while not parts[0].done:
        assert rig.store.mover.step(IO_QUEUE)
    while not transfer.done:  # it is no longer behind what else is to be read
        assert rig.store.mover.step(COPY_QUEUE)
    assert rig.came(transfer) == [True] * 2
    assert not parts[1].done


def test_what_a_load_waits_for_is_not_dropped_when_the_lease_ends(rig: Stepped) -> None:
    rig.store.probe(KEYS[:4], lease=1.0)
    rig.store.probe(KEYS[4:], lease=1.0)
    with rig.store.match(TOKENS[: 2 * PAGE_TOKENS]) as match:
        transfer = rig.store.load(match, into=rig.pool[:2])
    rig.clock.advance(2.0)
    rig.store.tick()
    assert rig.store._probes.dropped == 1, "nobody waits for the others"
    assert transfer.wait()
    assert transfer.ok_pages == 2
    rig.store.settle()
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * 4 + [Residency.ABSENT] * 4
    assert rig.pages_read == 4


def test_what_has_come_for_a_load_does_not_leave_before_it_was_read(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    [ahead] = [each.core for each in rig.store._copies._ahead]
    while not ahead.done:
        assert rig.store.mover.step(IO_QUEUE)
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * PAGES
    assert rig.store.evict(Tier.SHARED, 10_000) == 0
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    assert rig.pages_read == PAGES
    assert rig.store.evict(Tier.SHARED, 10_000) == PAGES


# ---- what does not come ----------------------------------------------------------------------------------------------


def test_what_is_cancelled_on_its_way_is_read_from_disk(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    for each in rig.store._copies._ahead:
        each.core.cancel()
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    assert rig.pages_read == PAGES


def test_what_fails_on_its_way_is_read_from_disk(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    with inject("mover.before_copy", "errno", value=errno.EIO):
        assert rig.store.mover.step(IO_QUEUE)
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES


def test_what_cannot_be_told_to_have_come_is_read_from_disk(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    with inject("mover.begin_after", "errno", value=errno.ENOMEM):
        assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    assert rig.pages_read == 2 * PAGES


def test_what_has_come_damaged_is_read_from_disk(rig: Stepped, directories: Directories) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    [ahead] = [each.core for each in rig.store._copies._ahead]
    while not ahead.done:
        assert rig.store.mover.step(IO_QUEUE)
    flip_bit(directories.shared, stamps(TOKENS)[3])
    assert transfer.wait()
    assert rig.came(transfer) == [True] * PAGES
    tiers = rig.store.stats().tiers
    assert (tiers["shared"].quarantined, tiers["disk"].quarantined) == (1, 0)
    assert rig.pages_read == PAGES + 1


def test_a_page_that_is_damaged_on_disk_is_quarantined_once_and_a_miss(
    rig: Stepped, directories: Directories
) -> None:
    flip_bit(directories.disk, stamps(TOKENS)[3])
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    assert transfer.wait()
    assert rig.came(transfer) == [number != 3 for number in range(PAGES)]
    assert _core.Status(int(transfer.status[3])) is _core.Status.checksum
    tiers = rig.store.stats().tiers
    assert (tiers["shared"].quarantined, tiers["disk"].quarantined) == (0, 1)
    assert rig.store.stats().misses["corrupt"] == 1
    assert rig.store.probe(KEYS, lease=0.0).run == 3


# ---- deadlines, refusals, tiers that go ------------------------------------------------------------------------------


def test_a_load_whose_deadline_passes_while_it_waits_leaves_the_target_alone(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin(deadline=1.0)
    rig.clock.advance(2.0)
    assert transfer.done
    rig.rows[:PAGES] = 0xAA
    rig.store.settle()
    assert (rig.rows[:PAGES] == 0xAA).all()
    assert rig.store.stats().misses["deadline"] == PAGES
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * PAGES
    assert_unpinned(rig.store)


def test_a_load_that_is_cancelled_while_it_waits_gives_everything_back(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    transfer.cancel()
    rig.store.settle()
    assert not transfer.ok.any()
    assert rig.states(Tier.SHARED) == [Residency.RESIDENT] * PAGES
    assert_unpinned(rig.store)


def test_a_load_that_is_refused_pins_nothing(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    with Inbox(1) as inbox, rig.store.match(TOKENS) as match:
        first = rig.store.load(match, into=rig.pool[:PAGES], inbox=inbox)
        refused = rig.store.load(match, into=rig.pool[:PAGES], inbox=inbox)
        assert refused.done
        assert {_core.Status(int(status)) for status in refused.status} == {_core.Status.queue_full}
        assert first.wait()
    rig.store.settle()
    assert rig.store.evict(Tier.SHARED, 10_000) == PAGES
    assert_unpinned(rig.store)


def test_a_load_ends_with_the_tier_that_it_reads_from_instead(rig: Stepped) -> None:
    rig.store.probe(KEYS, lease=0.0)
    transfer = rig.begin()
    [ahead] = [each.core for each in rig.store._copies._ahead]
    while not ahead.done:
        assert rig.store.mover.step(IO_QUEUE)
    rig.store._copies.account()  # the copy is known no more
    rig.store._copies.cancel_tier(Tier.SHARED)
    rig.store.settle()
    assert not transfer.ok.any()
    assert_unpinned(rig.store)
