"""Ctrl-C in the middle of a call leaves nothing claimed, nothing pinned, and nothing that still uses the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from interrupt_kit import Interrupter
from stepwell import copies, lease, pins, probes, room, staging, store
from stepwell.clock import ManualClock
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.testing.faults import inject, resume, wait_paused
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, Tokens, assert_unpinned, assert_whole, chain

MODULES = (store, copies, room, staging, lease, pins, probes)
PAGES = 3
PIN_SECONDS = 10.0
PROBE_SECONDS = 10.0


def keys_of(tokens: Tokens) -> np.ndarray:
    return prefix_hashes(tokens, page_tokens=PAGE_TOKENS)


def save(rig: Rig, tokens: Tokens) -> None:
    rig.store.save(tokens, source=rig.pool[:PAGES])


def save_keys(rig: Rig, tokens: Tokens) -> None:
    rig.store.save_keys(keys_of(tokens), source=rig.pool[:PAGES])


def match(rig: Rig, tokens: Tokens) -> None:
    rig.store.match(tokens).close()


def load(rig: Rig, tokens: Tokens) -> None:
    with rig.store.match(tokens) as found:
        rig.store.load(found, into=rig.pool[: found.pages])


def load_keys(rig: Rig, tokens: Tokens) -> None:
    rig.store.load_keys(keys_of(tokens), into=rig.pool[:PAGES])


def probe(rig: Rig, tokens: Tokens) -> None:
    rig.store.probe(keys_of(tokens), lease=0.0)


def probe_with_lease(rig: Rig, tokens: Tokens) -> None:
    rig.store.probe(keys_of(tokens), lease=PROBE_SECONDS)


def evict(rig: Rig, tokens: Tokens) -> None:
    rig.store.evict(Tier.SHARED, PAGES)


def clear(rig: Rig, tokens: Tokens) -> None:
    rig.store.clear()


def forget(rig: Rig, tokens: Tokens) -> None:
    rig.store.forget(tokens, keep=PAGE_TOKENS)


def pin(rig: Rig, tokens: Tokens) -> None:
    rig.store.pin(tokens, ttl=PIN_SECONDS)


def assert_nothing_is_left(rig: Rig) -> None:
    mover = rig.store._copies.mover
    assert mover is not None
    assert mover.drain(30.0)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def interrupt_everywhere(rig: Rig, prepare: Callable[[int], Tokens], call: Callable[[Rig, Tokens], None]) -> int:
    """Interrupt a call at each place in turn, until it is over before. Returns how many there are."""
    for nth in range(1, 10_000):
        tokens = prepare(nth)
        interrupter = Interrupter(nth, MODULES)
        interrupter.run(lambda tokens=tokens: call(rig, tokens))  # type: ignore[misc]
        try:
            assert_nothing_is_left(rig)
        except AssertionError as error:
            error.add_note(f"interrupted at {interrupter.where}, place {nth}")
            raise
        if not interrupter.has_fired:
            return nth - 1
    raise AssertionError("the call does not end")


@pytest.mark.parametrize("call", [save, save_keys])
def test_an_interrupted_save_returns_its_claims(open_rig: OpenRig, call: Callable[[Rig, Tokens], None]) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)

    def prepare(nth: int) -> Tokens:
        rig.store.clear()
        rig.save(chain(nth, 1))
        return chain(nth, PAGES)

    assert interrupt_everywhere(rig, prepare, call) > 30


@pytest.mark.parametrize("call", [match, load, load_keys, probe])
def test_an_interrupted_look_up_or_load_returns_its_pins_and_claims(
    open_rig: OpenRig, call: Callable[[Rig, Tokens], None]
) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    tokens = chain(1, PAGES)
    rig.save(tokens)

    def prepare(nth: int) -> Tokens:
        rig.store.evict(Tier.SHARED, PAGES)  # from disk, so that they go back up
        return tokens

    assert interrupt_everywhere(rig, prepare, call) > 5
    assert rig.load(tokens) == PAGES


@pytest.mark.parametrize("call", [probe_with_lease, load_keys])
def test_what_a_probe_keeps_ends_in_its_time_however_probes_and_gets_are_interrupted(
    open_rig: OpenRig, call: Callable[[Rig, Tokens], None]
) -> None:
    clock = ManualClock()
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES, clock=clock)
    tokens = chain(1, PAGES)
    rig.save(tokens)
    for nth in range(1, 10_000):
        rig.store.evict(Tier.SHARED, PAGES)
        rig.store.probe(keys_of(tokens), lease=PROBE_SECONDS, readahead=False)
        interrupter = Interrupter(nth, MODULES)
        interrupter.run(lambda: call(rig, tokens))
        assert rig.store._copies.mover is not None
        assert rig.store._copies.mover.drain(30.0)
        assert rig.store.stats().probed_pages in (0, PAGES), interrupter.where
        clock.advance(PROBE_SECONDS)
        rig.round()
        assert_nothing_is_left(rig)
        if not interrupter.has_fired:
            break
    assert nth > 20
    assert rig.load(tokens) == PAGES


def test_an_interrupted_second_use_returns_its_claims(open_rig: OpenRig, directories: Directories) -> None:
    config = directories.config(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    assert config.disk is not None
    rig = open_rig(msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, write="selective")))

    def prepare(nth: int) -> Tokens:
        rig.store.clear()
        rig.save(chain(nth, PAGES))
        return chain(nth, PAGES)

    assert interrupt_everywhere(rig, prepare, match) > 20


@pytest.mark.parametrize("call", [match, probe, load_keys])
def test_an_interrupted_look_up_of_a_neighbours_pages_returns_their_claims(
    open_rig: OpenRig, call: Callable[[Rig, Tokens], None]
) -> None:
    sizes = {"shared": 2 * VOLUME_BYTES, "disk": 0}
    owner, reader = open_rig(**sizes), open_rig(**sizes)
    owner.save(chain(1, PAGES))
    reader.round()

    def prepare(nth: int) -> Tokens:
        reader.store.clear()
        assert reader.store.cached(chain(1, PAGES), tiers=(Tier.HOST, Tier.SHARED)) == 0
        return chain(1, PAGES)

    assert interrupt_everywhere(reader, prepare, call) > 20
    assert reader.load(chain(1, PAGES)) == PAGES


@pytest.mark.parametrize("call", [evict, clear, forget])
def test_slots_of_what_leaves_are_free_whatever_ends_the_call(
    open_rig: OpenRig, call: Callable[[Rig, Tokens], None]
) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    tokens = chain(1, PAGES)

    def prepare(nth: int) -> Tokens:
        rig.save(tokens)
        return tokens

    assert interrupt_everywhere(rig, prepare, call) > 10
    call(rig, tokens)
    assert rig.pages(Tier.SHARED) == (1 if call is forget else 0)


def test_an_interrupted_pin_ends_with_its_time_and_takes_no_other_with_it(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(shared=VOLUME_BYTES, disk=0, clock=clock)
    tokens = chain(1, PAGES)
    rig.save(tokens)
    ttl = 1e6
    other = rig.store.pin(tokens, ttl=ttl)

    def prepare(nth: int) -> Tokens:
        clock.advance(PIN_SECONDS)
        rig.round()
        assert rig.store.stats().pins == 1
        assert other.kept == tokens.size
        return tokens

    assert interrupt_everywhere(rig, prepare, pin) > 10
    prepare(0)
    other.close()
    assert rig.store._index.holds() == 0


# ---- what was handed to the mover already ----------------------------------------------------------------------------


@contextmanager
def interrupted_behind_submit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have ctrl-C come as soon as the mover has a plan, whose first copy is held until the call has ended."""

    def interrupted(*arguments: object, **named: object) -> None:
        wait_paused("mover.before_copy")
        raise KeyboardInterrupt

    with inject("mover.before_copy", "pause", nth=1), monkeypatch.context() as patch:
        patch.setattr(rig.store._copies, "observe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield
        resume("mover.before_copy")


def test_no_byte_lands_once_a_load_was_interrupted(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=0)
    rig.save(chain(1, PAGES))
    with rig.store.match(chain(1, PAGES)) as found:
        rig.rows[:] = 0xEE
        with interrupted_behind_submit(rig, monkeypatch):
            rig.store.load(found, into=rig.pool[:PAGES])
    assert_nothing_is_left(rig)
    assert (rig.rows == 0xEE).all()
    assert rig.load(chain(1, PAGES)) == PAGES


def test_no_byte_lands_once_a_load_by_keys_was_interrupted(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=0)
    rig.save(chain(1, PAGES))
    begin = rig.store._copies.load

    def interrupted(*arguments: Any, **named: Any) -> None:
        begin(*arguments, **named)
        wait_paused("mover.before_copy")
        raise KeyboardInterrupt

    rig.rows[:] = 0xEE
    with inject("mover.before_copy", "pause", nth=1):
        monkeypatch.setattr(rig.store._copies, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_keys(rig, chain(1, PAGES))
        monkeypatch.undo()
        resume("mover.before_copy")
    assert_nothing_is_left(rig)
    assert (rig.rows == 0xEE).all()
    assert rig.load(chain(1, PAGES)) == PAGES


@pytest.mark.parametrize("call", [save, save_keys])
def test_the_source_is_not_read_once_a_save_was_interrupted(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, call: Callable[[Rig, Tokens], None]
) -> None:
    rig = open_rig(shared=VOLUME_BYTES, disk=0)
    with interrupted_behind_submit(rig, monkeypatch):
        call(rig, chain(1, PAGES))
    rig.rows[:] = 0xEE
    assert_nothing_is_left(rig)
    assert rig.load(chain(1, PAGES)) == 0
    assert rig.save(chain(1, PAGES)).saved == PAGES
    assert rig.load(chain(1, PAGES)) == PAGES
