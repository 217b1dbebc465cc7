"""Sequences: what a request holds on the device is right, is had from wherever it is, and is returned once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from sequence_kit import (
    PAGE_TOKENS,
    StampEngine,
    assert_adds_up,
    assert_all_returned,
    config,
    evict_all,
    prompt,
)
from store_kit import Directories

from stepwell.index import Tier
from stepwell.store import PageStore

MakeEngine = Callable[..., StampEngine]


@pytest.fixture
def make_engine(directories: Directories) -> Iterator[MakeEngine]:
    """Open stores with an engine each: `make_engine(device=, host=, shared=, disk=)`; each must end whole."""
    opened: list[PageStore] = []

    def make(**sizes: int) -> StampEngine:
        store = PageStore(config(directories, **sizes))
        opened.append(store)
        return StampEngine(store)

    yield make
    try:
        for store in opened:
            if not store.closed:
                for sequence in list(store._sequences._open):
                    sequence.close()
                if store.device.is_reset:
                    store.device.renew()
                assert_all_returned(store)
    finally:
        for store in opened:
            store.close()


# ---- opening -------------------------------------------------------------------------------------------------------------


def test_open_finds_nothing_in_an_empty_store(make_engine: MakeEngine) -> None:
    sequence = make_engine().open(prompt(1, 10))
    assert (sequence.ready, sequence.loading, sequence.pending, sequence.missing) == (0, 0, 0, 10)
    assert sequence.reused == {}


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9])
def test_at_least_the_last_token_is_left_to_compute(make_engine: MakeEngine, tokens: int) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 12))
    sequence = engine.open(prompt(1, tokens))
    engine.settle(sequence)
    assert sequence.ready == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert sequence.missing == tokens - sequence.ready >= 1
    engine.verify(sequence)


def test_published_pages_are_ready_on_the_device_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.serve(prompt(1, 13))
    second = engine.open(prompt(1, 13))
    assert second.ready == 12
    assert second.reused == {Tier.DEVICE: 12}
    engine.verify(second)
    engine.verify(first, 13)
    assert engine.block(first)[:3].tolist() == engine.block(second)[:3].tolist()


def test_pages_evicted_from_the_device_come_back_from_shared_memory(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 25))
    evict_all(engine.store, Tier.DEVICE)
    sequence = engine.open(prompt(1, 25))
    assert (sequence.ready, sequence.loading, sequence.missing) == (0, 24, 1)
    engine.settle(sequence)
    assert (sequence.ready, sequence.missing) == (24, 1)
    assert sequence.reused == {Tier.SHARED: 24}
    engine.verify(sequence)
    assert_adds_up(sequence)
