"""A call with a deadline returns only when no byte can still land in the engine's pages, and none that lands in ours is
taken for right if the engine changed its own meanwhile.

A worker stands still at each point of a batch in turn; the call returns by a clock that is turned by hand and what a
round of the keeper does; the engine has other use for its pages; the worker goes on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.index import Tier
from stepwell.mover import SaveOutcome
from stepwell.testing.faults import inject, wait_paused
from store_kit import BOTH, DISK_ONLY, SHARED_ONLY, OpenRig, Rig, assert_unpinned, stamps_of
from test_store_keys import STORED, keys_of, load, save

PAGES = 4
REFILLED = 0xAB
DEADLINE = 1000.0
PATIENCE = 60.0
TRIES = 3000
READS = ("file.pread", "mover.unit", "mover.before_copy", "mover.after_copy", "mover.after_commit")
WRITES = ("file.pwrite", *READS[1:], "volume.begin", "volume.odd", "volume.after_bytes", "volume.after_checksums")
SIZES = {"disk": DISK_ONLY, "shared": SHARED_ONLY, "both": BOTH}

Answer = list[int] | list[bool]


class Call:
    """A call of the engine's that runs in a thread of its own until it returns."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(call()))
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it has returned."""
        return not self._thread.is_alive()

    def answer(self, look: Callable[[], None] = lambda: None) -> Answer:
        """Wait for the call, and return what it returned. look: what a keeper does meanwhile, now and then."""
        for _ in range(TRIES):
            look()
            self._thread.join(PATIENCE / TRIES)
            if not self._thread.is_alive():
                return self._answers[0]
        raise AssertionError("the call did not return")


def late(rig: Rig, clock: ManualClock, point: str, nth: int, call: Callable[[], Answer]) -> Answer | None:
    """Make a call while a worker stands still, let its deadline pass, and refill the pages; then let the worker go on.

    Returns: what the call returned; None: no worker came there so often.
    """
    with inject(point, "pause", nth=nth):
        running = Call(call)
        while not _core.fault_wait_paused(point, PATIENCE / TRIES):
            if running.has_ended:
                return None

        def look() -> None:  # the worker may stand there before the call has begun to wait
            clock.advance(DEADLINE)
            rig.store._copies.enforce_deadlines()  # as a round of the keeper does

        answer = running.answer(look)
        rig.rows[:] = REFILLED
    assert rig.store.flush(PATIENCE)
    return answer


def at_every_moment(
    points: tuple[str, ...], rig: Rig, clock: ManualClock, call: Callable[[], Answer], again: Callable[[], object]
) -> Iterator[tuple[str, Answer]]:
    """Do late() at the first, second, ... time that a worker comes to each point, until none comes.

    Args: again: makes the store what it was before. Yields: which moment it was, and what the call returned.
    """
    for point in points:
        for nth in itertools.count(1):
            again()
            answer = late(rig, clock, point, nth, call)
            if answer is None:
                break
            yield f"{point} {nth}", answer


@pytest.mark.parametrize("tier", SIZES)
def test_a_read_that_comes_late_changes_nothing_that_was_refilled(open_rig: OpenRig, tier: str) -> None:
    clock = ManualClock()
    rig = open_rig(**SIZES[tier], clock=clock)
    keys = keys_of(*range(PAGES))
    save(rig, keys)

    def again() -> None:
        if tier == "both":  # from disk, and into shared memory on the way
            rig.store.flush()
            rig.store.evict(Tier.SHARED, PAGES)

    def call() -> Answer:
        return load(rig, keys, deadline=DEADLINE)

    moments = []
    for moment, answer in at_every_moment(READS, rig, clock, call, again):
        moments.append(moment)
        assert (rig.rows == REFILLED).all(), f"a byte landed late: {moment}, after {answer}"
        assert load(rig, keys) == [True] * PAGES
    assert len(moments) > PAGES
    assert_unpinned(rig.store)


@pytest.mark.parametrize("tier", SIZES)
def test_a_page_that_is_changed_after_a_save_gave_up_is_found_as_it_was_or_not_at_all(
    open_rig: OpenRig, tier: str
) -> None:
    clock = ManualClock()
    rig = open_rig(**SIZES[tier], clock=clock)
    keys = keys_of(*range(PAGES))

    def again() -> None:
        rig.store.flush()
        rig.store.clear()

    def call() -> Answer:
        return save(rig, keys, deadline=DEADLINE)

    moments = []
    for moment, answer in at_every_moment(WRITES, rig, clock, call, again):
        moments.append(moment)
        found = load(rig, keys)  # compares the bytes of what it finds
        stored = [outcome == STORED for outcome in answer]
        assert all(found[row] for row in range(PAGES) if stored[row]), f"{moment}: {answer}, but found {found}"
    assert len(moments) > PAGES
    assert_unpinned(rig.store)


def test_a_disk_that_never_answers_keeps_no_call_with_a_deadline(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY)
    save(rig, keys_of(*range(PAGES)))
    with inject("file.pread", "pause"):
        assert load(rig, keys_of(*range(PAGES)), deadline=0.05) == [False] * PAGES
        rig.rows[:] = REFILLED
        wait_paused("file.pread")
        assert load(rig, keys_of(0), deadline=0.0) == [False]
        rig.rows[:] = REFILLED
    rig.store.flush()
    assert (rig.rows == REFILLED).all()


def test_a_full_disk_that_never_answers_keeps_no_save_with_a_deadline(open_rig: OpenRig) -> None:
    """Evicting writes records: that is the keeper's then, not the caller's."""
    rig = open_rig(**DISK_ONLY, keeper=True, low_watermark=0.0, high_watermark=0.0)
    capacity = rig.store.stats().tiers["disk"].capacity
    for first in range(0, capacity, 64):
        save(rig, keys_of(*range(first, min(first + 64, capacity))))
    assert rig.pages(Tier.DISK) > capacity - PAGES  # the keeper has one free, ahead of need
    with inject("file.pwrite", "pause"):
        assert save(rig, keys_of(*range(10_000, 10_000 + PAGES)), deadline=0.05) == [SaveOutcome.REFUSED] * PAGES
        wait_paused("file.pwrite")
    rig.store.flush()
    rig.round()  # after the keeper's, which ends only now: a tier that is silent is not waited for
    assert save(rig, keys_of(*range(20_000, 20_000 + PAGES)), deadline=PATIENCE) == [STORED] * PAGES


def test_what_a_gone_save_left_is_found_as_it_was(open_rig: OpenRig) -> None:
    """A page that was gathered before the deadline goes on to its tier: it is the page of before."""
    rig = open_rig(**DISK_ONLY)
    keys = keys_of(1)
    with inject("volume.after_bytes", "pause"):
        running = Call(lambda: save(rig, keys, deadline=0.0))
        running.answer()
        rig.rows[:] = REFILLED
    rig.store.flush()
    rig.rows[:] = 0
    ok = rig.store.load_keys(keys, into=rig.pool[:1])
    assert not ok[0] or np.array_equal(rig.rows[:1], stamps_of(keys))
