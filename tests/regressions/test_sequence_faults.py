"""Faults that sequences had, each as it was found.

Until a sequence computes it looks again as pages land; afterwards its block is what the engine has written into. What
it holds is returned once, and what was computed with other weights is published under no epoch.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sequence_kit import (
    PAGE_BYTES,
    GatherGate,
    MakeEngine,
    assert_all_returned,
    evict_all,
    prompt,
    stamps,
)
from stepwell.errors import DeviceResetError, LeaseClosedError, PoisonedError
from stepwell.index import Tier
from stepwell.testing import faults


def test_promote_after_computing_keeps_the_block(make_engine: MakeEngine) -> None:
    """It matched again: the last full page left the block, and a duplicate's private slot was lost."""
    engine = make_engine(device=28)
    first, second = engine.open(prompt(1, 16)), engine.open(prompt(1, 16))
    engine.finish(first)
    second.compute()
    engine.store.extend([second], [16])
    engine.compute({second: 16})
    engine.store.publish([second], [16])
    for sequence in (first, second):
        before = engine.block(sequence).tolist()
        sequence.promote()
        assert (sequence.ready, engine.block(sequence).tolist()) == (16, before)
        engine.verify(sequence, 16)


def test_pages_computed_under_one_epoch_are_not_published_after_it_is_changed_back(make_engine: MakeEngine) -> None:
    """Epochs were compared, not whether one had changed: pages of the weights between were served as those of now."""
    engine = make_engine(device=28)
    tokens = prompt(1, 17)
    sequence = engine.open(tokens)
    engine.store.extend([sequence], [17])
    engine.store.set_epoch(1)
    engine.compute({sequence: 17})
    engine.store.set_epoch(0)
    assert engine.store.publish([sequence], [17]) == (0, 0)
    other = engine.open(tokens)
    assert (other.ready, other.loading) == (0, 0)
    sequence.close()
    other.promote()
    assert other.missing == 17


def test_a_load_overtaken_by_another_epoch_keeps_what_was_ready(make_engine: MakeEngine) -> None:
    """The next look was in the new epoch's tree: pages that the sequence held were taken from it."""
    engine = make_engine(device=28)
    engine.cache(prompt(1, 17))
    engine.store.evict(Tier.DEVICE, 1)
    sequence = engine.open(prompt(1, 17))
    assert (sequence.ready, sequence.loading) == (12, 4)
    engine.store.set_epoch(1)
    engine.settle(sequence)
    assert sequence.ready == 12
    engine.verify(sequence)


def test_claims_of_a_refused_transfer_are_returned(make_engine: MakeEngine) -> None:
    """All numbers of a page were passed where those of one tier are wanted: it raised, and sw-device ended with it."""
    engine = make_engine(disk=1)
    engine.store.device.pool_for_testing()._queue.capacity_bytes = PAGE_BYTES
    gate = GatherGate.of(engine.store)
    held = engine.serve(prompt(1, 17))
    engine.store.device.drain()
    assert engine.serve(prompt(2, 17)).ready == 16  # its gather finds no room
    assert engine.store.stats().refused_pages == 4
    gate.open()
    assert engine.store.flush(30.0)
    held.close()


def test_a_promotion_that_the_mover_refuses_is_tried_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported as stalled, and its host claims were lost."""
    engine = make_engine()
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(engine.store._copies, "submit", lambda *_, **__: None)
        sequence = engine.open(prompt(1, 17))
        assert (sequence.loading, sequence.stalled) == (16, False)
        assert engine.store.stats().tiers["host"].arriving == 0
    engine.settle(sequence)
    engine.verify(sequence, 16)


def test_a_sequence_suspended_while_loading_frees_its_device_slots(make_engine: MakeEngine) -> None:
    """They stayed claimed until the load had landed: preempting it freed nothing."""
    engine = make_engine(device=8)
    engine.cache(prompt(1, 29))
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(prompt(1, 29))
        faults.wait_paused("mover.before_copy")
        sequence.suspend()
        assert engine.store.stats().tiers["device"].free == 8
    sequence.resume()
    engine.settle(sequence)
    engine.verify(sequence, 28)


def test_a_load_whose_host_copies_land_while_it_is_planned_is_not_stalled(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was pending when it was claimed, and nothing moving a moment later, was taken for a device without room."""
    engine = make_engine(device=8)
    engine.cache(prompt(1, 29))
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(prompt(1, 29))
        faults.wait_paused("mover.before_copy")
        sequence.suspend()
        plan_promotion = engine.store._copies.plan_promotion

        def plan_while_it_lands(*arguments: object) -> object:
            plan = plan_promotion(*arguments)  # type: ignore[arg-type]
            faults._core.fault_clear()
            assert engine.store.quiesce(30.0)
            return plan

        monkeypatch.setattr(engine.store._copies, "plan_promotion", plan_while_it_lands)
        sequence.resume()
    assert not sequence.stalled
    monkeypatch.undo()
    engine.settle(sequence)
    engine.verify(sequence, 28)


def test_drain_dispatches_a_batch_longer_than_a_step(make_engine: MakeEngine) -> None:
    """It stopped where an entry had finished no whole batch."""
    engine = make_engine(step_bytes=PAGE_BYTES)
    engine.cache(prompt(1, 33))
    assert engine.store.stats().tiers["shared"].resident == 8
    evict_all(engine.store, Tier.DEVICE)
    sequence = engine.open(prompt(1, 33))
    assert engine.store.quiesce(30.0)
    engine.store.device.drain()
    assert sequence.ready == 32


def test_a_step_refused_while_the_pool_is_lost_takes_no_sequence(make_engine: MakeEngine) -> None:
    """The loss was taken into the books again at each refused step: sequences opened since were lost too."""
    engine = make_engine()
    with pytest.raises(ZeroDivisionError), engine.store.device.step():
        raise ZeroDivisionError
    sequence = engine.open(prompt(1, 9))
    with pytest.raises(DeviceResetError), engine.store.device.step():
        pass
    assert not sequence.lost
    engine.store.device.renew()
    engine.finish(sequence)


def test_two_lost_pools_in_a_row_give_all_slots_back(make_engine: MakeEngine) -> None:
    """The second loss, with no page pinned, forgot those that the first had left to mend."""
    engine = make_engine(device=8)
    gate = GatherGate.of(engine.store)
    engine.serve(prompt(1, 17)).close()
    engine.store.device.drain()  # the gather runs, and pins its pages
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), engine.store.device.step():
            raise ZeroDivisionError
        engine.store.device.renew()
    assert engine.store.stats().tiers["device"].quarantined == 4
    gate.open()
    assert_all_returned(engine.store)
    assert engine.store.stats().tiers["shared"].resident == 4


def test_pages_that_landed_wait_for_the_rest_of_the_load(make_engine: MakeEngine) -> None:
    """They were unpinned as they landed: another sequence's need of room took them, and the load began again."""
    engine = make_engine(device=8, host=8)
    tokens = prompt(1, 25)
    engine.cache(tokens)
    evict_all(engine.store, Tier.DEVICE)
    with engine.open(tokens[:13]) as head:  # three pages in host memory, three in shared memory alone
        engine.settle(head)
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(tokens)
        faults.wait_paused("mover.before_copy")
        check = sequence._promotions[0].transfer
        assert check is not None
        assert check.wait(30.0)
        sequence.promote()  # queues the three
        engine.store.device.drain()  # puts them on the device
        other = engine.open(prompt(2, 20))
        assert not engine.store.extend([other], [20]).ok[0]
        assert engine.store.stats().tiers["device"].resident == 3
    engine.settle(sequence)
    engine.verify(sequence, 24)


def test_a_sequence_that_computes_holds_nothing_in_lower_tiers(make_engine: MakeEngine) -> None:
    """Its lease went on pinning pages that it had given up waiting for, in host and shared memory."""
    engine = make_engine(device=6)
    engine.cache(prompt(1, 21))
    evict_all(engine.store, Tier.DEVICE)
    sequence = engine.open(prompt(1, 21))
    sequence.compute()
    engine.settle(sequence)
    sequence.suspend()
    blocker = engine.serve(prompt(2, 16))
    engine.land()
    sequence.resume()
    sequence.compute()
    engine.settle(sequence)
    blocker.close()
    assert sequence.ready == 8
    assert engine.store.stats().tiers["host"].pinned == 3
    assert engine.store.extend([sequence], [12]).ok.all()
    assert engine.store.stats().tiers["host"].pinned == 1  # the page that it claimed to compute


def test_compute_is_final_while_a_part_is_loading(make_engine: MakeEngine) -> None:
    """The look after the load made pending pages pending again."""
    engine = make_engine(device=28)
    engine.cache(prompt(1, 9))
    evict_all(engine.store, Tier.DEVICE)
    loading = engine.open(prompt(1, 17))
    assert loading.loading == 8
    computing = engine.open(prompt(1, 17))
    engine.settle(computing)
    engine.store.extend([computing], [17])
    loading.compute()
    engine.settle(loading)
    assert (loading.ready, loading.pending, loading.missing) == (8, 0, 9)
    assert engine.finish(loading) == (0, 2)
    engine.verify(loading, 17)


def test_a_close_inside_a_step_is_refused_whole(make_engine: MakeEngine) -> None:
    """The store was half closed: its threads and volumes stayed."""
    engine = make_engine()
    with engine.store.device.step(), pytest.raises(ValueError, match="inside a step"):
        engine.store.close()
    engine.cache(prompt(1, 9))
    engine.store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sw-")]


def test_a_load_that_hangs_does_not_hold_the_close_of_a_store(make_engine: MakeEngine) -> None:
    """It was waited for without a limit, before the mover was told to cancel."""
    engine = make_engine(close_timeout=0.0)
    engine.cache(prompt(1, 33))
    evict_all(engine.store, Tier.DEVICE)
    with faults.inject("mover.before_copy", "pause"):
        sequence = engine.open(prompt(1, 33))
        faults.wait_paused("mover.before_copy")
        engine.store._sequences.close_pool()
        engine.store._sequences.stop()  # returns while the load hangs
        assert sequence.closed
    engine.store.close()


def test_one_ended_sequence_in_a_call_changes_none(make_engine: MakeEngine) -> None:
    """Those before it in the list had been changed."""
    engine = make_engine()
    good, ended = engine.open(prompt(1, 9)), engine.open(prompt(2, 9))
    ended.close()
    with pytest.raises(LeaseClosedError):
        engine.store.append([good, ended], [1, 1])
    with pytest.raises(LeaseClosedError):
        engine.store.extend([good, ended], [9, 9])
    assert (good.tokens.size, engine.store.stats().tiers["device"].arriving) == (9, 0)


def test_a_poisoned_core_does_not_hang_a_flush(make_engine: MakeEngine) -> None:
    """sw-device offered the gathered pages to a mover that refuses all, again and again."""
    engine = make_engine()
    engine.serve(prompt(1, 9)).close()
    engine.store._index.poison()
    engine.store.device.drain()
    assert engine.store.flush(30.0)
    counts = engine.store._index.counts(Tier.SHARED)
    assert (counts["arriving"], counts["pinned"]) == (0, 0)
    with pytest.raises(PoisonedError):
        engine.store.close()


def test_reused_counts_no_page_that_was_computed(make_engine: MakeEngine) -> None:
    """Pages that were found and could not be had stayed counted."""
    engine = make_engine(device=8)
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    blocker = engine.serve(prompt(2, 24))
    sequence = engine.open(prompt(1, 17))
    engine.settle(sequence)
    assert sequence.stalled
    sequence.compute()
    blocker.close()
    engine.land()
    engine.finish(sequence)
    assert sequence.reused == {Tier.SHARED: 8}
    assert np.array_equal(engine.read(engine.block(sequence)[:4].tolist()), stamps(sequence.tokens[:16]))
