"""Host memory between the device and what is below, as it was found.

Pages that were in host memory already went to the device unread: a damaged one served wrong KV, and no counter moved.
And where a store had nothing below host memory, nothing was ever written there: what left the device was lost.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sequence_kit import (
    PAGE_BYTES,
    PAGE_TOKENS,
    MakeEngine,
    StampEngine,
    SteppedJaxStore,
    Tokens,
    assert_all_returned,
    config,
    damage_host,
    evict_all,
    prompt,
    stamps,
)
from stepwell.errors import PoisonedError
from stepwell.index import Tier
from stepwell.testing import faults
from stepwell.testing.stepped import SteppedMover
from store_kit import Directories

TOKENS = prompt(1, 13)  # three pages, and one token to compute
PAGES = 3


def in_host_alone(engine: StampEngine, tokens: Tokens = TOKENS) -> None:
    """Bring a prompt's pages into host memory, and off the device."""
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    if Tier.SHARED in engine.store._tiers:
        sequence = engine.open(tokens)
        engine.settle(sequence)
        sequence.close()
        evict_all(engine.store, Tier.DEVICE)
    assert engine.store.stats().tiers["host"].resident == (tokens.size - 1) // PAGE_TOKENS


def host_read(engine: StampEngine) -> int:
    return int(engine.store.stats().tiers["host"].bytes_read)


# ---- checked before they are put on the device -----------------------------------------------------------------------


def test_a_page_found_in_host_memory_is_read_and_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    in_host_alone(engine)
    before = host_read(engine)
    sequence = engine.open(TOKENS)
    engine.settle(sequence)
    assert sequence.reused == {Tier.HOST: PAGES * PAGE_TOKENS}
    assert host_read(engine) - before == PAGES * PAGE_BYTES
    assert engine.store.stats().checksum_failures == 0
    engine.verify(sequence)


@pytest.mark.parametrize("page", range(PAGES))
def test_a_page_damaged_in_host_memory_is_had_from_below(make_engine: MakeEngine, page: int) -> None:
    engine = make_engine()
    in_host_alone(engine)
    damage_host(engine.store, stamps(TOKENS)[page])
    before = engine.store.stats().tiers["shared"].bytes_read
    sequence = engine.open(TOKENS)
    engine.settle(sequence)
    stats = engine.store.stats()
    assert stats.checksum_failures == 1
    assert stats.tiers["shared"].bytes_read - before == PAGE_BYTES
    assert sequence.ready == PAGES * PAGE_TOKENS
    engine.verify(sequence)
    assert engine.store.verify().damaged == 0


@pytest.mark.parametrize("page", range(PAGES))
def test_a_page_damaged_in_host_memory_alone_is_computed_again(make_engine: MakeEngine, page: int) -> None:
    engine = make_engine(shared=0)
    in_host_alone(engine)
    damage_host(engine.store, stamps(TOKENS)[page])
    sequence = engine.open(TOKENS)
    engine.settle(sequence)
    assert engine.store.stats().checksum_failures == 1
    assert (sequence.ready, sequence.loading, sequence.pending) == (page * PAGE_TOKENS, 0, 0)
    engine.finish(sequence)
    engine.verify(sequence, TOKENS.size)


def test_a_damaged_page_that_another_request_pins_is_computed_and_holds_nobody_up(make_engine: MakeEngine) -> None:
    """Its slot cannot be mended while it is pinned, so the page cannot come by way of host memory."""
    engine = make_engine()
    in_host_alone(engine)
    pin = engine.store.match(TOKENS)
    damage_host(engine.store, stamps(TOKENS)[1])
    first, second = engine.open(TOKENS), engine.open(TOKENS)
    engine.settle(first)
    engine.settle(second)
    for sequence in (first, second):
        assert (sequence.ready, sequence.stalled, sequence.settled) == (PAGE_TOKENS, False, True)
        engine.finish(sequence)
        engine.verify(sequence, TOKENS.size)
        sequence.close()
    pin.close()
    engine.land()
    evict_all(engine.store, Tier.DEVICE)
    engine.store._tick()
    sequence = engine.open(TOKENS)  # mended, now that nobody pins it
    engine.settle(sequence)
    assert sequence.ready == PAGES * PAGE_TOKENS
    engine.verify(sequence)


@pytest.mark.parametrize("below", [Tier.SHARED, Tier.DISK])
def test_what_is_behind_a_page_that_is_barred_is_not_loaded_and_its_claims_come_back(
    make_engine: MakeEngine, below: Tier
) -> None:
    engine = make_engine(shared=1, disk=1)
    tokens = prompt(1, 25)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    head = engine.open(TOKENS)
    engine.settle(head)
    head.close()
    evict_all(engine.store, Tier.DEVICE, *([Tier.SHARED] if below is Tier.DISK else []))
    with engine.store.match(TOKENS):
        damage_host(engine.store, stamps(TOKENS)[1])
        assert engine.store.verify().damaged == 1
        sequence = engine.open(tokens)  # one page in host memory, one that is barred from there, four below
        engine.settle(sequence)
        assert (sequence.ready, sequence.missing, sequence.stalled) == (PAGE_TOKENS, 21, False)
        tiers = engine.store.stats().tiers
        assert (tiers["host"].resident, tiers["host"].arriving, tiers["shared"].arriving) == (2, 0, 0)
        engine.finish(sequence)
        engine.verify(sequence, 25)


def test_wait_ends_for_a_request_whose_page_is_damaged(make_engine: MakeEngine) -> None:
    engine = make_engine()
    in_host_alone(engine)
    with engine.store.match(TOKENS):
        damage_host(engine.store, stamps(TOKENS)[0])
        sequence = engine.open(TOKENS)
        assert engine.store.device.wait([sequence], 60.0) == [sequence]
        assert sequence.ready == 0


# ---- nothing is kept by a check that does not end well ---------------------------------------------------------------


@pytest.fixture
def stepped(directories: Directories) -> Iterator[Callable[..., SteppedJaxStore]]:
    """Open stores whose mover has no threads and whose keeper does not run."""
    opened: list[SteppedJaxStore] = []

    def make(**sizes: Any) -> SteppedJaxStore:
        opened.append(SteppedJaxStore(config(directories, **sizes), seed=1))
        return opened[-1]

    yield make
    for store in opened:
        if not store.closed:
            assert_all_returned(store)
        store.close()


def publish_stepped(store: SteppedJaxStore) -> tuple[StampEngine, SteppedMover]:
    """Put TOKENS into host memory, and off the device."""
    engine, mover = StampEngine(store), store.mover
    sequence = engine.open(TOKENS)
    engine.finish(sequence)
    sequence.close()
    store.device.drain()
    store.settle()
    evict_all(store, Tier.DEVICE)
    assert store.stats().tiers["host"].resident == PAGES
    return engine, mover


def test_nothing_reaches_the_device_before_its_check(stepped: Callable[..., SteppedJaxStore]) -> None:
    store = stepped(shared=0)
    engine, mover = publish_stepped(store)
    sequence = engine.open(TOKENS)
    store.device.drain()
    assert (sequence.ready, sequence.loading) == (0, PAGES * PAGE_TOKENS)
    mover.run_until_idle()
    store.device.drain()
    assert (sequence.ready, sequence.loading) == (PAGES * PAGE_TOKENS, 0)
    engine.verify(sequence)
    sequence.close()


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_that_ends_during_a_check_keeps_nothing(
    stepped: Callable[..., SteppedJaxStore], steps: int, is_damaged: bool
) -> None:
    store = stepped(shared=0)
    engine, mover = publish_stepped(store)
    if is_damaged:
        damage_host(store, stamps(TOKENS)[1])
    sequence = engine.open(TOKENS)
    for _ in range(steps):
        mover.step()
    sequence.close()
    store.device.drain()
    mover.run_until_idle()
    assert_all_returned(store)
    assert store.stats().checksum_failures == is_damaged


def test_a_check_that_finds_the_queue_full_keeps_nothing_and_is_tried_again(
    stepped: Callable[..., SteppedJaxStore],
) -> None:
    store = stepped(shared=0)
    engine, mover = publish_stepped(store)
    submit = store._copies.submit
    store._copies.submit = lambda *arguments, **named: None  # type: ignore[method-assign, assignment]
    sequence = engine.open(TOKENS)
    assert (sequence.ready, sequence.loading, sequence.stalled) == (0, PAGES * PAGE_TOKENS, False)
    assert store.stats().tiers["device"].arriving == 0
    store._copies.submit = submit  # type: ignore[method-assign]
    sequence.promote()
    mover.run_until_idle()
    store.device.drain()
    assert sequence.ready == PAGES * PAGE_TOKENS
    sequence.close()


def test_an_assertion_that_fails_at_a_check_serves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(shared=0)
    in_host_alone(engine)
    with faults.inject("mover.assertion", "errno", nth=1, value=errno.EIO):
        sequence = engine.open(TOKENS)
        check = sequence._promotions[0].transfer
        assert check is not None
        assert check.wait(60.0)
    assert engine.store.device.wait([sequence], 60.0) == [sequence]
    assert sequence.ready == 0
    sequence.close()
    with pytest.raises(PoisonedError):
        engine.store.close()


def test_a_worker_that_fails_once_at_a_check_is_asked_again(make_engine: MakeEngine) -> None:
    engine = make_engine(shared=0)
    in_host_alone(engine)
    with faults.inject("mover.unit", "errno", nth=1, value=errno.ENOMEM):
        sequence = engine.open(TOKENS)
        engine.settle(sequence)
    assert sequence.ready == PAGES * PAGE_TOKENS
    engine.verify(sequence)
    sequence.close()


def test_a_worker_that_fails_at_every_check_ends_in_computing(make_engine: MakeEngine) -> None:
    engine = make_engine(shared=0)
    in_host_alone(engine)
    with faults.inject("mover.unit", "errno", value=errno.ENOMEM):
        sequence = engine.open(TOKENS)
        assert engine.store.device.wait([sequence], 60.0) == [sequence]
        assert faults.reached("mover.unit") == 2
    assert sequence.ready == 0
    sequence.close()
    assert not engine.store.stats().poisoned


# ---- host memory as the last tier ------------------------------------------------------------------------------------


def test_with_nothing_below_it_host_memory_keeps_what_leaves_the_device(make_engine: MakeEngine) -> None:
    """Rounds of more prompts than the device holds: the second is served from host memory."""
    engine = make_engine(device=8, host=64, shared=0)
    for number in range(6):
        engine.cache(prompt(number, 21))
    for number in range(6):
        sequence = engine.open(prompt(number, 21))
        engine.settle(sequence)
        assert sequence.ready == 20
        engine.verify(sequence)
        sequence.close()
    host = engine.store.stats().tiers["host"]
    assert (host.bytes_written, host.bytes_read > 0) == (30 * PAGE_BYTES, True)


@pytest.mark.parametrize("host", [1, 2, 3, 5])
def test_a_small_host_evicts_and_starves_nobody(make_engine: MakeEngine, host: int) -> None:
    engine = make_engine(device=12, host=host, shared=0)
    for round_ in range(3):
        for number in range(4):
            sequence = engine.serve(prompt(number, 21))
            engine.verify(sequence, 21)
            sequence.close()
            if round_ != 1:
                engine.land()
    engine.land()
    stats = engine.store.stats().tiers["host"]
    assert 0 < stats.resident <= host


def test_requests_side_by_side_on_a_small_host_all_end(make_engine: MakeEngine) -> None:
    engine = make_engine(device=24, host=4, shared=0)
    for _ in range(4):
        sequences = [engine.open(prompt(number, 17)) for number in range(4)]
        for sequence in sequences:
            engine.settle(sequence)
            engine.finish(sequence)
            engine.verify(sequence, 17)
        for sequence in sequences:
            sequence.close()
        engine.store.evict(Tier.DEVICE, 1 << 20)
    engine.land()
    assert engine.store.stats().tiers["host"].resident > 0


def test_with_a_lasting_tier_host_memory_stays_a_staging_area(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(TOKENS)
    tiers = engine.store.stats().tiers
    assert (tiers["host"].bytes_written, tiers["shared"].bytes_written) == (0, PAGES * PAGE_BYTES)
