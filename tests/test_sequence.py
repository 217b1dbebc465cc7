"""Sequences: what a request holds on the device is right, is had from wherever it is, and is returned once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from device_kit import PER_LAYER, STACKED
from sequence_kit import (
    PAGE_BYTES,
    PAGE_TOKENS,
    GatherGate,
    MakeEngine,
    StampEngine,
    assert_adds_up,
    assert_all_returned,
    evict_all,
    flip_bit,
    namespaces,
    prompt,
    stamps,
)
from stepwell.errors import LeaseClosedError, StepwellUsageError, StoreClosedError
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.sequence import Sequence
from stepwell.testing import faults
from stepwell.tiers.device_queue import TicketState
from store_kit import Directories

pytestmark = pytest.mark.parametrize("axes", [STACKED, PER_LAYER])

# ---- opening ---------------------------------------------------------------------------------------------------------


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


def test_open_never_waits_for_a_page(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(prompt(1, 17))
        faults.wait_paused("mover.before_copy")
        assert (sequence.ready, sequence.loading) == (0, 16)
        engine.store.device.drain()
        sequence.promote()
        assert (sequence.ready, sequence.loading) == (0, 16)
    engine.settle(sequence)
    engine.verify(sequence, 16)


def test_namespaces_do_not_share_pages(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28)
    tokens = prompt(1, 9)
    for namespace in namespaces():
        sequence = engine.open(tokens, namespace=namespace)
        assert sequence.missing == 9
        engine.finish(sequence)
    for namespace in namespaces():
        sequence = engine.open(tokens, namespace=namespace)
        assert sequence.ready == 8
        engine.verify(sequence)


# ---- promotion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [Tier.HOST, Tier.SHARED, Tier.DISK])
def test_a_prefix_is_promoted_from_each_tier(make_engine: MakeEngine, where: Tier) -> None:
    engine = make_engine(disk=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    if where is Tier.HOST:
        engine.settle(engine.open(tokens))
        for sequence in engine.store._sequences._each_open():
            sequence.close()
        evict_all(engine.store, Tier.DEVICE)
    elif where is Tier.DISK:
        evict_all(engine.store, Tier.SHARED)
    sequence = engine.open(tokens)
    assert sequence.reused == {where: 32}
    engine.settle(sequence)
    assert sequence.reused == {where: 32}
    engine.verify(sequence, 32)
    if where is Tier.DISK:  # hot again: a load from disk leaves a copy in shared memory
        assert engine.store.stats().tiers["shared"].resident == 8


def test_a_prefix_that_lies_in_all_tiers_is_counted_where_each_page_was_found(make_engine: MakeEngine) -> None:
    engine = make_engine(device=16, host=16, shared=1, disk=1)
    store, tokens = engine.store, prompt(1, 37)  # 9 pages and a token
    engine.cache(tokens)
    store.evict(Tier.DEVICE, 6)  # the deepest leave first: 3 stay on the device
    engine.settle(engine.open(tokens[:21]))  # 5 pages: two of them through host memory
    for sequence in store._sequences._each_open():
        sequence.close()
    store.evict(Tier.DEVICE, 2)
    store.evict(Tier.SHARED, 2)  # 7 left in shared memory, two on disk alone
    sequence = engine.open(tokens)
    assert sequence.reused == {Tier.DEVICE: 12, Tier.HOST: 8, Tier.SHARED: 8, Tier.DISK: 8}
    assert (sequence.ready, sequence.loading, sequence.missing) == (12, 24, 1)
    engine.settle(sequence)
    engine.verify(sequence, 36)
    assert sum(sequence.reused.values()) == 36
    engine.finish(sequence)
    engine.verify(sequence, 37)


def test_a_prefix_larger_than_the_staging_memory_comes_in_waves(make_engine: MakeEngine) -> None:
    engine = make_engine(device=16, host=3)
    tokens = prompt(1, 49)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    sequence = engine.open(tokens)
    seen = set()
    while sequence.loading:
        assert not sequence.stalled
        assert_adds_up(sequence)
        seen.add(sequence.ready)
        assert engine.store.quiesce(30.0)
        engine.store.device.drain()
    assert len(seen) >= 4
    assert sequence.reused == {Tier.SHARED: 48}
    engine.verify(sequence, 48)


def test_a_prefix_larger_than_the_device_stalls_and_is_computed_from_there(make_engine: MakeEngine) -> None:
    engine = make_engine(device=8, host=16)
    tokens = prompt(1, 33)
    engine.cache(tokens[:17])
    engine.cache(prompt(2, 13))
    other = engine.open(prompt(2, 17))  # holds three of eight pages
    assert other.ready == 12
    engine.settle(sequence := engine.open(tokens[:17]))
    assert sequence.ready == 16
    third = engine.open(prompt(2, 33))
    assert third.ready == 12
    sequence.close()
    engine.cache(prompt(3, 17))
    evict_all_but_pinned(engine)
    held = engine.open(tokens[:17])
    engine.settle(held)
    assert held.ready == 16
    waiting = engine.open(prompt(3, 17))
    engine.settle(waiting)
    assert waiting.stalled
    assert (waiting.ready, waiting.loading, waiting.missing) == (4, 12, 1)
    waiting.compute()
    assert not waiting.stalled
    assert (waiting.ready, waiting.loading, waiting.missing) == (4, 0, 13)
    assert not engine.store.extend([waiting], [17]).ok[0]  # no room to compute into either
    held.suspend()
    assert engine.finish(waiting) == (3, 0)
    engine.verify(waiting, 17)
    assert waiting.reused == {Tier.SHARED: 4}


def evict_all_but_pinned(engine: StampEngine) -> None:
    engine.store.evict(Tier.DEVICE, 1 << 20)


def test_suspending_one_sequence_lets_a_stalled_one_load(make_engine: MakeEngine) -> None:
    engine = make_engine(device=6, host=16)
    engine.cache(prompt(1, 17))
    engine.cache(prompt(2, 17))
    evict_all(engine.store, Tier.DEVICE)
    first, second = engine.open(prompt(1, 17)), engine.open(prompt(2, 17))
    engine.settle(first)
    engine.settle(second)
    assert first.ready == 16
    assert second.stalled
    first.suspend()
    second.promote()
    assert not second.stalled
    engine.settle(second)
    engine.verify(second, 16)


def test_two_sequences_load_one_prefix_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 33))
    evict_all(engine.store, Tier.DEVICE)
    before = engine.store.stats().tiers["host"].bytes_written
    first, second = engine.open(prompt(1, 33)), engine.open(prompt(1, 33))
    engine.settle(first)
    engine.settle(second)
    assert engine.store.stats().tiers["host"].bytes_written - before == 8 * PAGE_BYTES
    engine.verify(first, 32)
    engine.verify(second, 32)
    assert engine.block(first).tolist() == engine.block(second).tolist()


def test_a_full_device_queue_delays_a_load_and_loses_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28, host=24)
    engine.cache(prompt(1, 17))
    engine.cache(prompt(2, 17))
    evict_all(engine.store, Tier.DEVICE)
    engine.store.device.pool_for_testing()._queue.capacity_bytes = 4 * PAGE_BYTES
    sequences = [engine.open(prompt(1, 17)), engine.open(prompt(2, 17))]
    assert engine.store.quiesce(30.0)
    for sequence in sequences:
        sequence.promote()  # the second finds no room behind the first
    tickets = [promotion.ticket for sequence in sequences for promotion in sequence._promotions]
    assert [ticket is None for ticket in tickets] == [False, True]
    for sequence in sequences:
        engine.settle(sequence)
        engine.verify(sequence, 16)


def test_a_load_longer_than_one_step_takes_several(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28, host=24, step_bytes=2 * PAGE_BYTES)
    engine.cache(prompt(1, 33))
    evict_all(engine.store, Tier.DEVICE)
    sequence = engine.open(prompt(1, 33))
    assert engine.store.quiesce(30.0)
    steps = 0
    while sequence.loading:
        with engine.store.device.step():
            steps += 1
    assert steps == 4
    engine.verify(sequence, 32)


# ---- loads that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_page_damaged_in_shared_memory_ends_the_prefix_there(
    make_engine: MakeEngine, directories: Directories, bad: int
) -> None:
    engine = make_engine()
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    flip_bit(directories.shared, stamps(tokens)[bad])
    sequence = engine.open(tokens)
    assert sequence.loading == 32
    engine.settle(sequence)
    assert (sequence.ready, sequence.missing) == (4 * bad, 33 - 4 * bad)
    assert engine.store.stats().checksum_failures == 1
    engine.verify(sequence)
    engine.finish(sequence)
    engine.verify(sequence, 33)
    assert sequence.reused == ({Tier.SHARED: 4 * bad} if bad else {})


def test_a_page_damaged_in_shared_memory_comes_from_disk(make_engine: MakeEngine, directories: Directories) -> None:
    engine = make_engine(disk=1)
    tokens = prompt(1, 33)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    flip_bit(directories.shared, stamps(tokens)[2])
    sequence = engine.open(tokens)
    engine.settle(sequence)
    assert sequence.ready == 32
    engine.verify(sequence, 32)


def test_a_page_damaged_on_disk_is_computed_again(make_engine: MakeEngine, directories: Directories) -> None:
    engine = make_engine(shared=0, disk=1)
    tokens = prompt(1, 17)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    flip_bit(directories.disk, stamps(tokens)[1])
    sequence = engine.open(tokens)
    engine.settle(sequence)
    assert (sequence.ready, sequence.missing) == (4, 13)
    engine.finish(sequence)
    engine.verify(sequence, 17)


# ---- two sequences on one prefix -------------------------------------------------------------------------------------


def test_what_another_sequence_computes_is_pending_until_it_publishes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = prompt(1, 17)
    first = engine.open(tokens)
    assert engine.store.extend([first], [17]).ok.all()
    second = engine.open(tokens)
    assert (second.ready, second.pending, second.missing) == (0, 16, 1)
    engine.compute({first: 8})
    assert engine.store.publish([first], [8]) == (2, 0)
    second.promote()
    assert (second.ready, second.pending, second.missing) == (8, 8, 1)
    engine.compute({first: 17})
    assert engine.store.publish([first], [17]) == (2, 0)
    second.promote()
    assert (second.ready, second.pending, second.missing) == (16, 0, 1)
    assert second.reused == {Tier.DEVICE: 16}
    engine.verify(second, 16)


@pytest.mark.parametrize("end", [Sequence.abort, Sequence.suspend, Sequence.close])
def test_what_the_first_sequence_gives_up_the_second_computes(
    make_engine: MakeEngine, end: Callable[[Sequence], None]
) -> None:
    engine = make_engine()
    first, second = engine.open(prompt(1, 17)), engine.open(prompt(1, 17))
    engine.store.extend([first], [17])
    second.promote()
    assert second.pending == 16
    engine.compute({first: 17})  # written and not published: nobody else may read it
    end(first)
    second.promote()
    assert (second.pending, second.missing) == (0, 17)
    assert engine.finish(second) == (4, 0)
    engine.verify(second, 17)


@pytest.mark.parametrize("winner", [0, 1])
def test_a_page_computed_twice_is_published_once(make_engine: MakeEngine, winner: int) -> None:
    engine = make_engine(device=28)
    pair = [engine.open(prompt(1, 17)), engine.open(prompt(1, 17))]
    pair[1].compute()
    assert engine.store.extend(pair, [17, 17]).ok.all()
    engine.compute(dict.fromkeys(pair, 17))
    first, second = pair[winner], pair[1 - winner]
    published, duplicates = engine.store.publish([first], [17])
    others = engine.store.publish([second], [17])
    if winner == 0:
        assert (published, duplicates) == (4, 0)
        assert others == (0, 4)
    else:  # the first had claimed them: this copy stays private
        assert (published, duplicates) == (0, 4)
        assert others == (4, 0)
    claimer = pair[0]
    assert not set(engine.block(pair[0])[:5].tolist()) & set(engine.block(pair[1])[:5].tolist())
    third = engine.open(prompt(1, 17))
    assert engine.block(third)[:4].tolist() == engine.block(claimer)[:4].tolist()
    for sequence in (*pair, third):
        engine.verify(sequence, 16)
    stats = engine.store.stats().tiers["device"]
    assert (stats.resident, stats.arriving) == (4, 6)
    pair[0].close()
    pair[1].close()
    engine.verify(third, 16)
    third.close()
    engine.land()
    assert engine.store.stats().tiers["shared"].resident == 4


def test_nothing_is_brought_below_of_another_ones_page_between_two_of_ones_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one, other = engine.open(prompt(1, 13)), engine.open(prompt(1, 13))
    for sequence, tokens in ((one, 4), (other, 8), (one, 13)):  # so that the page in the middle is the other one's
        assert engine.store.extend([sequence], [tokens]).ok.all()
    engine.compute({one: 13, other: 8})
    assert engine.store.publish([other], [8]) == (1, 1)
    engine.land()
    other.close()
    evict_all(engine.store, Tier.SHARED)  # the page of the middle is on the device alone
    assert engine.store.publish([one], [13]) == (2, 1)
    engine.land()
    shared = engine.store.stats().tiers["shared"]
    assert (shared.resident, shared.arriving) == (2, 0)
    engine.verify(one, 13)


# ---- extend ----------------------------------------------------------------------------------------------------------


def test_extend_gives_all_or_nothing_and_says_what_was_lacking(make_engine: MakeEngine) -> None:
    engine = make_engine(device=8)
    a, b, c = engine.open(prompt(1, 20)), engine.open(prompt(2, 20)), engine.open(prompt(3, 12))
    extended = engine.store.extend([a, b, c], [20, 20, 12])
    assert extended.ok.tolist() == [True, False, True]
    assert extended.full is not None
    assert (extended.full.tier, extended.full.needed, extended.full.free) == ("device", 5, 3)
    assert "need 5 pages, 3 free" in str(extended.full)
    stats = engine.store.stats().tiers["device"]
    assert (stats.arriving, stats.free, stats.pinned) == (8, 0, 0)
    assert engine.store.check() == ""
    a.close()
    assert engine.store.extend([b], [20]).ok.all()
    assert engine.finish(b) == (5, 0)
    engine.verify(b, 20)


def test_extend_evicts_what_nobody_holds(make_engine: MakeEngine) -> None:
    engine = make_engine(device=8)
    engine.cache(prompt(1, 32))
    assert engine.store.stats().tiers["device"].free == 0
    sequence = engine.serve(prompt(2, 20))
    engine.verify(sequence, 20)
    kept = engine.open(prompt(1, 32))
    assert kept.ready == 12  # the head of the older chain stayed


def test_extend_asks_for_nothing_it_has(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open(prompt(1, 9))
    for upto in (0, 4, 9, 9, 3):
        assert engine.store.extend([sequence], [upto]).ok.all()
    assert sequence._page_count == 3
    assert engine.store.stats().tiers["device"].arriving == 3


def test_extend_may_go_past_the_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open(prompt(1, 5))
    assert engine.store.extend([sequence], [14]).ok.all()
    for token in range(9):
        engine.store.append([sequence], [900 + token])
    engine.compute({sequence: 14})
    assert engine.store.publish([sequence], [14]) == (3, 0)
    engine.verify(sequence, 14)


@pytest.mark.parametrize(
    ("counts", "message"),
    [([9.0], "whole numbers"), ([-1], "no -1 tokens"), ([9, 9], "1 sequences, 2 token counts"), (["9"], "whole")],
)
def test_counts_that_are_no_counts_change_nothing(make_engine: MakeEngine, counts: list[int], message: str) -> None:
    engine = make_engine()
    sequence = engine.open(prompt(1, 9))
    with pytest.raises(StepwellUsageError, match=f"extend.*{message}"):
        engine.store.extend([sequence], counts)
    assert (engine.block(sequence) == engine.scratch).all()
    assert engine.store.extend([sequence], np.array([9])).ok.all()  # type: ignore[arg-type]
    with pytest.raises(StepwellUsageError, match=f"publish.*{message}"):
        engine.store.publish([sequence], counts)
    assert sequence.ready == 0
    engine.compute({sequence: 9})
    assert engine.store.publish([sequence], np.array([9])) == (2, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, "r1"])
def test_a_message_names_the_sequence_where_it_has_a_name(make_engine: MakeEngine, name: str | None) -> None:
    sequence = make_engine().open(prompt(1, 9), request_id=name)
    called = "Sequence" if name is None else "Sequence r1"
    assert repr(sequence).startswith(f"<{called} matched, 9 tokens")
    sequence.close()
    for use in (sequence.promote, sequence.resume):
        with pytest.raises(LeaseClosedError, match=f"^{called} was closed; open"):
            use()


def test_misuse_of_one_sequence_changes_none(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28)
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    good, closed, loading = engine.open(prompt(2, 9)), engine.open(prompt(3, 9)), engine.open(prompt(1, 17))
    closed.close()
    assert loading.loading
    with pytest.raises(StepwellUsageError, match="loading"):
        engine.store.extend([good, loading], [9, 17])
    with pytest.raises(LeaseClosedError):
        engine.store.extend([good, closed], [9, 9])
    with pytest.raises(LeaseClosedError):
        engine.store.append([good, closed], [1, 2])
    assert engine.store.extend([good], [9]).ok.all()
    engine.compute({good: 9})
    with pytest.raises(StepwellUsageError, match="10 tokens computed"):
        engine.store.publish([good, good], [9, 10])
    assert good.ready == 0
    out = np.full((2, 2), 7, np.int32)
    with pytest.raises(StepwellUsageError, match="do not fit"):
        engine.store.block_tables([good], out)
    assert (out == 7).all()
    with pytest.raises(StepwellUsageError, match="block tables"):
        engine.store.block_tables([good], out.astype(np.int64))  # type: ignore[arg-type]
    assert good.tokens.size == 9


def test_a_suspended_sequence_is_resumed_before_it_is_used(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.serve(prompt(1, 9))
    sequence.suspend()
    sequence.suspend()
    for misuse in (
        lambda: engine.store.extend([sequence], [9]),
        lambda: engine.store.publish([sequence], [8]),
        sequence.promote,
        sequence.compute,
    ):
        with pytest.raises(StepwellUsageError, match="resume"):
            misuse()
    engine.store.append([sequence], [5])
    sequence.resume()
    assert (sequence.ready, sequence.missing) == (8, 2)
    engine.verify(sequence)


def test_a_sequence_of_another_store_is_refused(make_engine: MakeEngine, directories: Directories) -> None:
    one, two = make_engine(shared=0, disk=1), make_engine()
    sequence = one.open(prompt(1, 9))
    with pytest.raises(StepwellUsageError, match="another store"):
        two.store.extend([sequence], [9])


def test_block_tables_name_every_page_and_else_the_scratch_slot(make_engine: MakeEngine) -> None:
    engine = make_engine()
    a, b = engine.serve(prompt(1, 9)), engine.serve(prompt(2, 13))
    out = np.full((3, 5), -1, np.int32)
    engine.store.block_tables([b, a], out)
    assert (out[0, 4:] == engine.scratch).all()
    assert (out[1, 3:] == engine.scratch).all()
    assert (out[2] == engine.scratch).all()
    used = [*out[0, :4].tolist(), *out[1, :3].tolist()]
    assert len(set(used)) == 7
    assert max(used) < engine.scratch


# ---- append and publish ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", namespaces(), ids=str)
@pytest.mark.parametrize("start", [1, 3, 4, 5])
def test_generated_pages_have_the_keys_of_the_whole_text(
    make_engine: MakeEngine, start: int, namespace: object
) -> None:
    engine = make_engine()
    sequence = engine.open(prompt(1, start), namespace=namespace)
    generated = np.random.default_rng(start).integers(0, 1 << 31, 150, dtype=np.int64)
    for token in generated:
        engine.store.append([sequence], [int(token)])
    whole = np.concatenate([prompt(1, start), generated.astype(np.int32)])
    assert np.array_equal(sequence.tokens, whole)
    seed = None if namespace is None else namespace.seed()  # type: ignore[attr-defined]
    assert np.array_equal(sequence._keys, prefix_hashes(whole, page_tokens=PAGE_TOKENS, seed=seed))


def test_generated_pages_are_found_by_the_next_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.serve(prompt(1, 6))
    for token in range(10):  # decode: a token, a step, a publish
        engine.store.append([sequence], [700 + token])
        total = sequence.tokens.size
        assert engine.store.extend([sequence], [total]).ok.all()
        engine.compute({sequence: total})
        assert engine.store.publish([sequence], [total]) == (int(total % 4 == 0), 0)
    engine.verify(sequence, 16)
    turn = np.concatenate([sequence.tokens, prompt(2, 5)])
    sequence.close()
    engine.land()
    evict_all(engine.store, Tier.DEVICE)
    following = engine.open(turn)
    engine.settle(following)
    assert following.ready == 16
    engine.verify(following)


def test_published_pages_are_written_through_to_shared_memory_and_disk(make_engine: MakeEngine) -> None:
    engine = make_engine(disk=1)
    tokens = prompt(1, 18)
    sequence = engine.serve(tokens)
    device = engine.store.stats().tiers["device"]
    assert (device.resident, device.arriving) == (4, 1)  # the partial tail is private
    assert engine.store.stats().tiers["shared"].arriving == 4
    engine.land()
    tiers = engine.store.stats().tiers
    assert (tiers["shared"].resident, tiers["disk"].resident) == (4, 4)
    assert engine.store.stats().saved_pages == 4
    sequence.close()
    assert engine.store.verify().damaged == 0
    for lost in ((Tier.DEVICE,), (Tier.DEVICE, Tier.HOST, Tier.SHARED)):
        evict_all(engine.store, *lost)
        again = engine.open(tokens)
        engine.settle(again)
        assert again.ready == 16
        engine.verify(again)
        again.close()


def test_pages_that_a_full_shared_tier_refuses_are_dropped_with_the_device_copy(make_engine: MakeEngine) -> None:
    engine = make_engine(device=80, shared=1)
    store = engine.store
    held = prompt(9, 64 * PAGE_TOKENS)
    rows = np.zeros((64, PAGE_BYTES), np.uint8)
    shape = (64, 2, 2, PAGE_TOKENS, 2, 4)
    lent = store.lend(rows.view(np.float32).reshape(shape), axes="slot layer stream token head dim")
    assert store.save(held, source=lent[:64]).saved == 64
    assert store.flush(30.0)
    with store.match(held) as match:
        assert match.pages == 64
        sequence = engine.serve(prompt(1, 9))
        assert store.stats().refused_pages == 2
        engine.land()
        engine.verify(sequence, 9)
        sequence.close()
        found = engine.open(prompt(1, 9))
        assert found.ready == 8
        found.close()
        evict_all(store, Tier.DEVICE)
        gone = engine.open(prompt(1, 9))
        assert gone.missing == 9
        gone.close()


def test_a_page_stays_on_the_device_while_its_gather_is_queued(make_engine: MakeEngine) -> None:
    engine = make_engine(device=8)
    engine.serve(prompt(1, 16)).close()  # four gathers queued, no step since
    assert engine.store.stats().tiers["device"].pinned == 4
    assert engine.store.evict(Tier.DEVICE, 8) == 0
    other = engine.open(prompt(2, 20))
    extended = engine.store.extend([other], [20])
    assert not extended.ok[0]
    assert extended.full is not None
    assert (extended.full.free, extended.full.evictable) == (4, 0)
    engine.land()
    assert engine.store.stats().tiers["device"].pinned == 0
    engine.finish(other)
    back = engine.open(prompt(1, 17))
    engine.settle(back)
    assert back.ready == 12 or back.stalled
    engine.verify(back)


def test_a_full_gather_queue_refuses_the_write_through_and_nothing_else(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.store.device.pool_for_testing()._queue.capacity_bytes = 2 * PAGE_BYTES
    first, second = engine.serve(prompt(1, 17)), engine.open(prompt(2, 9))
    engine.store.extend([second], [9])
    gate = GatherGate.of(engine.store)
    engine.compute({second: 9})  # the first's gather is under way and holds the queue
    assert engine.store.publish([second], [9]) == (2, 0)
    assert engine.store.stats().refused_pages == 2
    gate.open()
    engine.verify(second, 9)
    engine.land()
    assert engine.store.stats().tiers["shared"].resident == 4
    first.close()
    assert engine.store.check() == ""


# ---- epochs ----------------------------------------------------------------------------------------------------------


def test_sequences_of_another_epoch_go_on_and_publish_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28)
    tokens = prompt(1, 17)
    engine.cache(prompt(2, 9))
    old = engine.open(tokens)
    extended_before = engine.open(prompt(2, 17))
    assert extended_before.ready == 8
    engine.store.extend([old, extended_before], [17, 17])
    engine.store.set_epoch("next")
    engine.compute({old: 17, extended_before: 17})
    assert engine.store.publish([old, extended_before], [17, 17]) == (0, 0)
    assert (old.ready, extended_before.ready) == (16, 16)
    engine.verify(old, 17)
    engine.verify(extended_before, 17)
    new = engine.open(tokens)
    assert new.missing == 17
    assert engine.finish(new) == (4, 0)
    engine.store.append([old], [3])
    assert engine.store.extend([old], [21]).ok.all()
    engine.verify(old, 17)
    old.suspend()
    old.resume()  # of this epoch from here on
    assert old.ready == 16
    assert engine.block(old)[:4].tolist() == engine.block(new)[:4].tolist()


def test_a_load_that_an_epoch_overtakes_ends_as_a_miss(make_engine: MakeEngine) -> None:
    engine = make_engine(device=28)
    engine.cache(prompt(1, 17))
    engine.store.evict(Tier.DEVICE, 2)
    sequence = engine.open(prompt(1, 17))
    assert (sequence.ready, sequence.loading) == (8, 8)
    engine.store.set_epoch(1)
    engine.settle(sequence)
    assert (sequence.ready, sequence.missing) == (8, 9)
    engine.verify(sequence)
    assert engine.finish(sequence) == (0, 0)
    engine.verify(sequence, 17)


# ---- every state, every end ------------------------------------------------------------------------------------------


def _cached(engine: StampEngine) -> Sequence:
    engine.cache(prompt(1, 33))
    evict_all(engine.store, Tier.DEVICE)
    return engine.open(prompt(1, 33))


def copying(engine: StampEngine, stack: ExitStack) -> Sequence:
    engine.cache(prompt(1, 33))
    evict_all(engine.store, Tier.DEVICE)
    stack.enter_context(faults.inject("mover.before_copy", "pause"))
    sequence = engine.open(prompt(1, 33))
    faults.wait_paused("mover.before_copy")
    return sequence


def landed(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = _cached(engine)
    assert engine.store.quiesce(30.0)
    return sequence


def scatter_queued(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = landed(engine, stack)
    sequence.promote()
    assert sequence._promotions[0].ticket.state is TicketState.QUEUED
    return sequence


def scatter_half_dispatched(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = scatter_queued(engine, stack)
    engine.store.device.pool_for_testing().drain()
    assert sequence._promotions[0].ticket.state is TicketState.QUEUED
    assert sequence._promotions[0].ticket._chunks_left == 3
    return sequence


def scatter_dispatched(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = scatter_queued(engine, stack)
    while sequence._promotions[0].ticket.state is TicketState.QUEUED:
        engine.store.device.pool_for_testing().drain()
    return sequence


def ready(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = _cached(engine)
    engine.settle(sequence)
    return sequence


def pending(engine: StampEngine, stack: ExitStack) -> Sequence:
    first = engine.open(prompt(1, 33))
    engine.store.extend([first], [16])
    return engine.open(prompt(1, 33))


def extended(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = engine.open(prompt(1, 33))
    assert engine.store.extend([sequence], [38]).ok.all()
    return sequence


def computed(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = extended(engine, stack)
    engine.compute({sequence: 33})
    return sequence


def gather_queued(engine: StampEngine, stack: ExitStack) -> Sequence:
    return engine.serve(prompt(1, 33))


def gather_running(engine: StampEngine, stack: ExitStack) -> Sequence:
    stack.callback(GatherGate.of(engine.store).open)
    sequence = engine.serve(prompt(1, 33))
    engine.store.device.drain()
    return sequence


def gather_copying(engine: StampEngine, stack: ExitStack) -> Sequence:
    stack.enter_context(faults.inject("mover.before_copy", "pause"))
    sequence = engine.serve(prompt(1, 33))
    engine.store.device.drain()
    faults.wait_paused("mover.before_copy")
    return sequence


def with_duplicates(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = engine.open(prompt(1, 33))
    engine.serve(prompt(1, 17))
    engine.store.extend([sequence], [33])
    engine.compute({sequence: 33})
    assert engine.store.publish([sequence], [33]) == (4, 4)
    return sequence


def suspended(engine: StampEngine, stack: ExitStack) -> Sequence:
    sequence = engine.serve(prompt(1, 33))
    sequence.suspend()
    return sequence


STATES = [
    copying, landed, scatter_queued, scatter_half_dispatched, scatter_dispatched, ready, pending, extended, computed,
    gather_queued, gather_running, gather_copying, with_duplicates, suspended,
]  # fmt: skip


def name(function: Callable[..., object]) -> str:
    return function.__name__


@pytest.mark.parametrize("end", [Sequence.close, Sequence.suspend, Sequence.resume], ids=name)
@pytest.mark.parametrize("state", STATES, ids=name)
def test_whatever_is_in_flight_everything_is_returned_once(
    make_engine: MakeEngine, state: Callable[[StampEngine, ExitStack], Sequence], end: Callable[[Sequence], None]
) -> None:
    engine = make_engine(device=28, host=12, step_bytes=2 * PAGE_BYTES)
    store = engine.store
    with ExitStack() as stack:
        sequence = state(engine, stack)
        end(sequence)
        assert store.check() == ""
        if end is not Sequence.resume:
            assert (sequence.ready, sequence.loading, sequence.pending) == (0, 0, 0)
            assert sequence.missing == sequence.tokens.size
        end(sequence)
        assert store.check() == ""
        for other in store._sequences._each_open():
            if other is not sequence:
                other.close()
    if sequence.closed:
        sequence = engine.open(prompt(1, 33))
    else:
        sequence.resume()
    engine.settle(sequence)
    engine.verify(sequence)
    engine.finish(sequence)
    engine.verify(sequence, 33)
    sequence.close()
    sequence.close()
    assert_all_returned(store)


@pytest.mark.parametrize("state", STATES, ids=name)
def test_a_store_closes_whatever_is_in_flight_and_another_finds_what_landed(
    make_engine: MakeEngine, state: Callable[[StampEngine, ExitStack], Sequence]
) -> None:
    engine = make_engine(device=28, host=12, step_bytes=2 * PAGE_BYTES)
    with ExitStack() as stack:
        sequence = state(engine, stack)
        closing = threading.Thread(target=engine.store.close)
        closing.start()
    closing.join(30.0)
    assert not closing.is_alive()
    assert sequence.closed
    sequence.close()
    with pytest.raises(StoreClosedError):
        engine.store.open(prompt(1, 5))
    assert engine.store._index.check() == ""
    counts = engine.store._index.counts(Tier.DEVICE)
    assert (counts["arriving"], counts["pinned"], counts["leaving"]) == (0, 0, 0)
    assert engine.store._index.leases() == 0
    again = make_engine(device=28)
    found = again.open(prompt(1, 33))
    again.settle(found)
    again.verify(found)


def test_a_load_given_up_half_way_writes_into_no_slot_of_others(make_engine: MakeEngine) -> None:
    engine = make_engine(device=9, host=9, step_bytes=2 * PAGE_BYTES)
    with ExitStack() as stack:
        sequence = scatter_half_dispatched(engine, stack)
        sequence.suspend()
    other = engine.open(prompt(2, 36))
    engine.finish(other)  # in every slot
    engine.store.device.drain()
    engine.verify(other, 36)


def test_suspending_frees_the_device_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(device=9, host=9)
    with ExitStack() as stack:
        sequence = copying(engine, stack)
        assert engine.store.stats().tiers["device"].free == 1
        sequence.suspend()
        assert engine.store.stats().tiers["device"].free == 9
        other = engine.open(prompt(2, 36))
        assert engine.store.extend([other], [36]).ok.all()
    engine.finish(other)
    engine.verify(other, 36)


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_only_the_engines_thread_steps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.cache(prompt(1, 9))
    raised: list[Exception] = []

    def elsewhere() -> None:
        for misuse in (engine.store.device.drain, lambda: engine.store.device.step().__enter__()):
            try:
                misuse()
            except StepwellUsageError as error:
                raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(raised) == 2
    assert "belongs to thread" in str(raised[0])
    sequence = engine.open(prompt(1, 9))
    engine.verify(sequence, 8)


def test_a_store_is_not_closed_inside_a_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.serve(prompt(1, 9))
    with engine.store.device.step(), pytest.raises(StepwellUsageError, match="inside a step"):
        engine.store.close()
    assert not engine.store.closed
    engine.land()
    engine.verify(sequence, 9)
