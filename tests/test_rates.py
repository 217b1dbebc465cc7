"""Do no harm: a hit that would come too late is a miss, and a save that would come too late, or before loads, is none.

How fast a tier is comes from a hand-made account of what the mover did, and from a clock that is turned by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from stepwell.clock import ManualClock
from stepwell.errors import StepwellUsageError
from stepwell.index import Tier
from stepwell.mover import WorkClass
from stepwell.rates import (
    FORGET_SECONDS,
    HALF_LIFE_SECONDS,
    LOG_SECONDS,
    STALL_SECONDS,
    TRY_SECONDS,
    UNIT_BYTES,
    Flow,
    Rates,
    Within,
    foreign_lanes,
)
from stepwell.testing.faults import inject, wait_paused
from stepwell.testing.stepped import SteppedStore
from store_kit import AXES, BOTH, GEOMETRY, PAGE_BYTES, PAGE_TOKENS, Directories, OpenRig
from test_store_keys import PRESENT, REFUSED, STORED, keys_of, load, save

PAGE = 1 << 20
MIB = 1 << 20
UNIT_PAGES = UNIT_BYTES // PAGE
HOST, SHARED, DISK = int(Tier.HOST), int(Tier.SHARED), int(Tier.DISK)


class Mover:
    """What a mover says that it has done and has to do."""

    def __init__(self) -> None:
        self.flow = Flow.nothing()

    def read(self, lane: int, nbytes: int, seconds: float) -> None:
        """Loads have read from a lane."""
        reads = self.flow.reads.copy()
        reads[WorkClass.LOAD, lane] += np.array([nbytes, seconds * 1e9], np.uint64)
        self.set(reads=reads)

    def wrote(self, lane: int, nbytes: int, seconds: float, work_class: WorkClass = WorkClass.SAVE) -> None:
        """Saves have written to a lane."""
        writes = self.flow.writes.copy()
        writes[work_class, lane] += np.array([nbytes, seconds * 1e9], np.uint64)
        self.set(writes=writes)

    def queue(self, work_class: WorkClass, lane: int, nbytes: int) -> None:
        """So much waits and runs."""
        queued = self.flow.queued.copy()
        queued[work_class, lane] = nbytes
        self.set(queued=queued)

    def run(self, lane: int, nbytes: int, seconds: float) -> None:
        """A load runs, and has for so long."""
        running = self.flow.running.copy()
        running[lane] = np.array([nbytes, seconds * 1e9], np.uint64)
        self.set(running=running)

    def wait(self, queue: int, units: int, seconds: float) -> None:
        """Loads have waited."""
        waits = self.flow.waits.copy()
        waits[queue, WorkClass.LOAD] += np.array([units, seconds * 1e9], np.uint64)
        self.set(waits=waits)

    def set(self, **parts: np.ndarray) -> None:
        old = self.flow
        self.flow = Flow(
            **{name: parts.get(name, getattr(old, name)) for name in ("reads", "writes", "waits", "queued", "running")}
        )


class Bench:
    """Rates of one copying and two I/O workers, a clock, and a mover that says what it is told to."""

    def __init__(self, *, workers: tuple[int, int] = (1, 2)) -> None:
        self.clock = ManualClock()
        self.mover = Mover()
        self.rates = Rates(self.clock, lambda: self.mover.flow, page_bytes=PAGE, workers=workers)

    def expected(self, *lanes: int) -> list[float]:
        return [round(float(each), 6) for each in self.rates.expected(np.array(lanes, np.uint8))]

    def cut(self, within: Within, *lanes: int, first: int = 0) -> int:
        return self.rates.cut(np.array(lanes, np.uint8), within, first=first)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---- how long it takes -----------------------------------------------------------------------------------------------


def test_a_tier_that_nothing_was_read_from_counts_as_fast(bench: Bench) -> None:
    assert bench.expected(HOST, SHARED, DISK, 4 + DISK) == [0.0] * 4
    assert bench.cut(Within(0.0), *[DISK] * 100) == 100
    assert bench.rates.of(Tier.DISK).read_rate == 0.0


def test_a_page_takes_what_those_before_it_took(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    assert bench.expected(*[SHARED] * 5) == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert bench.rates.of(Tier.SHARED).read_rate == pytest.approx(100 * MIB)
    assert bench.rates.of(Tier.SHARED).expected == pytest.approx(0.01)


def test_workers_of_one_queue_take_units_in_turn(bench: Bench) -> None:
    bench.mover.read(DISK, 10 * MIB, 0.1)
    at = bench.expected(*[DISK] * (3 * UNIT_PAGES))
    one = [0.01 * (page + 1) for page in range(UNIT_PAGES)]
    assert at == pytest.approx(one + one + [each + 0.01 * UNIT_PAGES for each in one])


def test_tiers_of_different_queues_load_side_by_side(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    bench.mover.read(DISK, 10 * MIB, 1.0)
    assert bench.expected(SHARED, DISK, SHARED, DISK) == [0.01, 0.1, 0.02, 0.2]


def test_a_neighbours_pages_have_a_speed_of_their_own(bench: Bench) -> None:
    bench.mover.read(4 + SHARED, 10 * MIB, 1.0)
    assert bench.expected(SHARED, 4 + SHARED, 4 + DISK) == [0.0, 0.1, 0.1]
    lanes = foreign_lanes(np.array([SHARED, 77, DISK], np.uint8), np.array([1, 0, 1], np.uint8))
    assert lanes.tolist() == [4 + SHARED, 0, 4 + DISK]


def test_what_is_queued_comes_first(bench: Bench) -> None:
    bench.mover.read(DISK, 10 * MIB, 0.1)
    bench.mover.queue(WorkClass.LOAD, DISK, 20 * MIB)
    assert bench.expected(DISK) == [0.11]  # by two workers
    assert bench.expected(SHARED) == [0.0]  # another queue


def test_saves_pass_loads_by_their_turns_alone(bench: Bench) -> None:
    bench.mover.read(DISK, 10 * MIB, 0.1)
    bench.mover.wrote(DISK, 10 * MIB, 0.1)
    bench.mover.queue(WorkClass.SAVE, DISK, 1000 * MIB)
    # One unit that a worker is in, and 3 turns beside 5.
    assert bench.expected(DISK) == [pytest.approx(0.01 + (0.6 * 0.01 + 2 * 0.01 * UNIT_PAGES) / 2)]
    bench.mover.queue(WorkClass.SAVE, DISK, MIB)
    assert bench.expected(DISK) == [pytest.approx(0.01 + 0.01 / 2)]


def test_only_what_loads_read_tells_how_fast_loads_are(bench: Bench) -> None:
    reads = bench.mover.flow.reads.copy()
    reads[WorkClass.SAVE, SHARED] = reads[WorkClass.DEMOTE, SHARED] = (10 * MIB, int(100e9))  # as slow as the disk
    bench.mover.set(reads=reads)
    assert bench.expected(SHARED) == [0.0]


def test_a_read_that_has_not_come_back_makes_its_tier_slow_at_once(bench: Bench) -> None:
    bench.mover.read(DISK, 100 * MIB, 0.1)
    assert bench.expected(DISK) == [0.001]
    bench.mover.run(DISK, 4 * MIB, 8.0)
    assert bench.expected(DISK) == [2.0]
    bench.mover.run(DISK, 0, 0.0)
    assert bench.expected(DISK) == [0.001]


# ---- moving averages -------------------------------------------------------------------------------------------------


def test_a_new_sample_weighs_by_the_time_since_the_last_one(bench: Bench) -> None:
    bench.mover.read(DISK, 100 * MIB, 1.0)
    bench.rates.observe()
    bench.clock.advance(HALF_LIFE_SECONDS)
    bench.mover.read(DISK, MIB, 1.0)
    assert bench.expected(DISK) == [pytest.approx(0.1)]  # half way between 0.01 and 1, as factors
    for _ in range(12):
        bench.clock.advance(HALF_LIFE_SECONDS)
        bench.mover.read(DISK, 100 * MIB, 1.0)
        bench.rates.observe()
    assert bench.expected(DISK) == [pytest.approx(0.01, rel=0.01)]


def test_a_small_read_alone_says_nothing_yet(bench: Bench) -> None:
    bench.mover.read(DISK, 1000, 0.2)
    assert bench.expected(DISK) == [0.0]
    bench.mover.read(DISK, 1000, 0.3)
    assert bench.expected(DISK) == [pytest.approx(0.5 / 2000 * PAGE)]


def test_reads_that_only_fail_are_slow(bench: Bench) -> None:
    bench.mover.read(DISK, 0, 30.0)
    assert bench.cut(Within(1.0), DISK) == 0


def test_what_was_measured_long_ago_is_forgotten(bench: Bench) -> None:
    bench.mover.read(DISK, MIB, 10.0)
    assert bench.expected(DISK) == [10.0]
    bench.clock.advance(FORGET_SECONDS)
    assert bench.expected(DISK) == [0.0]


def test_the_wait_of_loads_is_averaged_by_queue(bench: Bench) -> None:
    bench.mover.wait(1, 4, 2.0)
    assert bench.rates.of(Tier.DISK).wait == 0.5
    assert bench.rates.of(Tier.SHARED).wait == 0.0
    bench.clock.advance(HALF_LIFE_SECONDS)
    bench.mover.wait(1, 1, 0.1)
    assert bench.rates.of(Tier.DISK).wait == pytest.approx(0.3)


# ---- cutting ---------------------------------------------------------------------------------------------------------


def test_a_run_is_cut_where_it_would_come_too_late(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    assert bench.cut(Within(0.035), *[SHARED] * 10) == 3
    assert bench.cut(Within(0.1), *[SHARED] * 10) == 10


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("per_page", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("waiting", [0, 10 * MIB])
def test_a_run_given_by_its_spans_is_cut_as_page_by_page(seconds: float, per_page: float, waiting: int) -> None:
    spans = [(SHARED, 3), (DISK, 6), (SHARED, 2), (4 + DISK, 1)]
    offered = []
    for is_by_spans in (True, False):
        bench = Bench()
        bench.mover.read(SHARED, 10 * MIB, 0.1)
        bench.mover.read(DISK, 10 * MIB, 1.0)
        bench.mover.queue(WorkClass.LOAD, DISK, waiting)
        bench.mover.queue(WorkClass.SAVE, SHARED, waiting)
        within = Within(seconds, per_page)
        lanes = [lane for lane, pages in spans for _ in range(pages)]
        offered.append(bench.rates.cut_spans(spans, within) if is_by_spans else bench.cut(within, *lanes))
    assert offered[0] == offered[1]


def test_the_bound_grows_with_the_run(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    assert bench.cut(Within(0.02, per_page=0.005), *[SHARED] * 10) == 4
    assert bench.cut(Within(0.0, per_page=0.01), *[SHARED] * 10) == 10
    assert bench.cut(Within(0.0, per_page=0.009), *[SHARED] * 10) == 0


def test_a_long_run_may_be_worth_a_wait_that_a_short_one_is_not(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    bench.mover.queue(WorkClass.LOAD, SHARED, 10 * MIB)
    within = Within(0.0, per_page=0.02)
    assert bench.cut(within, *[SHARED] * 9) == 0
    assert bench.cut(within, *[SHARED] * 10) == 10


def test_a_late_page_ends_the_run_before_pages_of_a_faster_tier(bench: Bench) -> None:
    bench.mover.read(SHARED, 10 * MIB, 0.1)
    bench.mover.read(DISK, MIB, 10.0)
    assert bench.cut(Within(1.0), SHARED, SHARED, DISK, SHARED, SHARED) == 2


def test_a_run_goes_on_with_the_time_that_the_pages_before_it_have(bench: Bench) -> None:
    bench.mover.read(4 + DISK, 10 * MIB, 1.0)
    within = Within(0.0, per_page=0.05)
    assert bench.cut(within, *[4 + DISK] * 4) == 0
    assert bench.cut(within, *[4 + DISK] * 4, first=4) == 4


# ---- a tier that is too slow -----------------------------------------------------------------------------------------


def test_a_tier_that_is_too_slow_is_tried_by_a_short_run_now_and_then(bench: Bench) -> None:
    bench.mover.read(DISK, MIB, 10.0)
    within = Within(1.0)
    assert bench.cut(within, *[DISK] * 50) == 0
    assert bench.rates.of(Tier.DISK).is_too_slow
    bench.clock.advance(TRY_SECONDS)
    assert bench.cut(within, *[DISK] * 50) == UNIT_PAGES
    assert bench.cut(within, *[DISK] * 50) == 0  # one run
    bench.clock.advance(TRY_SECONDS)
    assert bench.cut(within, DISK, DISK, SHARED) == 2  # its own pages
    bench.mover.read(DISK, 100 * MIB, 0.1)
    assert bench.cut(within, *[DISK] * 50) == 50
    assert not bench.rates.of(Tier.DISK).is_too_slow


def test_a_tier_that_is_read_from_already_needs_no_try(bench: Bench) -> None:
    bench.mover.read(DISK, MIB, 10.0)
    assert bench.cut(Within(1.0), DISK) == 0
    bench.mover.queue(WorkClass.LOAD, DISK, MIB)
    bench.clock.advance(TRY_SECONDS)
    assert bench.cut(Within(1.0), DISK) == 0


def test_a_tier_that_serves_a_part_is_not_too_slow(bench: Bench) -> None:
    bench.mover.read(DISK, MIB, 1.0)
    assert bench.cut(Within(2.5), *[DISK] * 9) == 2
    assert not bench.rates.of(Tier.DISK).is_too_slow


def test_a_tier_that_is_too_slow_is_told_of_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="stepwell")
    bench.mover.read(DISK, MIB, 10.0)
    for _ in range(5):
        bench.cut(Within(1.0), DISK)
    [line] = caplog.messages
    assert line.startswith("disk tier: too slow: a page is expected after 10 s, and 1 s are allowed")
    bench.clock.advance(LOG_SECONDS)
    bench.cut(Within(1.0), DISK)
    assert "(4 probes more since the last line)" in caplog.messages[1]
    bench.mover.read(4 + DISK, MIB, 10.0)
    bench.cut(Within(1.0), 4 + DISK)
    assert caplog.messages[2].startswith("neighbours' pages in the disk tier: too slow")


@pytest.mark.parametrize("given", [float("nan"), -1.0, "soon", None, True])
def test_what_is_no_bound_is_refused(given: object) -> None:
    for arguments in ((given,), (1.0, given)):
        with pytest.raises(StepwellUsageError, match=r"Within\.(seconds|per_page)"):
            Within(*arguments)  # type: ignore[arg-type]


# ---- saves -----------------------------------------------------------------------------------------------------------


def test_a_save_that_would_come_too_late_is_shed_tier_by_tier(bench: Bench) -> None:
    both = (Tier.SHARED, Tier.DISK)
    assert bench.rates.shed(both, 100, 0.0) == {}  # nothing is known
    bench.mover.wrote(SHARED, 10 * MIB, 0.1)
    bench.mover.wrote(DISK, 10 * MIB, 1.0)
    assert bench.rates.shed(both, 8, None) == {}
    # 8 pages: 0.08 s in shared memory, and then 0.4 s on disk by two workers.
    assert bench.rates.shed(both, 8, 0.49) == {}
    assert bench.rates.shed(both, 8, 0.4) == {Tier.DISK: "deadline"}
    assert bench.rates.shed(both, 8, 0.07) == {Tier.SHARED: "deadline", Tier.DISK: "deadline"}


def test_saves_and_demotions_that_wait_come_before_the_next(bench: Bench) -> None:
    bench.mover.wrote(DISK, 10 * MIB, 0.1, WorkClass.DEMOTE)
    assert bench.rates.shed((Tier.DISK,), 1, 0.05) == {}
    bench.mover.queue(WorkClass.SAVE, DISK, 10 * MIB)
    assert bench.rates.shed((Tier.DISK,), 1, 0.05) == {Tier.DISK: "deadline"}


def test_a_save_is_shed_where_loads_wait_long_whatever_its_deadline(bench: Bench) -> None:
    bench.mover.read(DISK, 10 * MIB, 1.0)
    bench.mover.queue(WorkClass.LOAD, DISK, 20 * MIB)
    assert bench.rates.shed((Tier.SHARED, Tier.DISK), 1, None) == {}  # one second, by two workers
    bench.mover.queue(WorkClass.LOAD, DISK, 21 * MIB)
    assert bench.rates.shed((Tier.SHARED, Tier.DISK), 1, None) == {Tier.DISK: "loads"}


def test_a_tier_that_saves_are_kept_from_is_tried_now_and_then(bench: Bench) -> None:
    bench.mover.wrote(DISK, MIB, 10.0)
    assert bench.rates.shed((Tier.DISK,), 1, 1.0) == {Tier.DISK: "deadline"}
    bench.clock.advance(TRY_SECONDS)
    bench.mover.queue(WorkClass.SAVE, DISK, MIB)
    assert bench.rates.shed((Tier.DISK,), 1, 1.0) == {Tier.DISK: "deadline"}  # one is being written
    bench.mover.queue(WorkClass.SAVE, DISK, 0)
    assert bench.rates.shed((Tier.DISK,), 1, 1.0) == {}
    assert bench.rates.shed((Tier.DISK,), 1, 1.0) == {Tier.DISK: "deadline"}


# ---- the store -------------------------------------------------------------------------------------------------------


class SteppedRig:
    """A stepped store whose tiers are as fast as its mover is told to say, with pages 1, 2, 3 in shared memory and on
    disk, 4, 5, 6 on disk alone."""

    def __init__(self, directories: Directories) -> None:
        self.clock = ManualClock()
        self.store = SteppedStore(directories.config(**BOTH), clock=self.clock, seed=1)
        self.mover = Mover()
        self.rows = np.zeros((64, PAGE_BYTES), np.uint8)
        shape = (64, GEOMETRY.layers, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.pool = self.store.lend(self.rows.reshape(shape), axes=AXES)
        self.tell()
        assert save(self, keys_of(4, 5, 6)) == [STORED] * 3  # type: ignore[arg-type]
        self.store.evict(Tier.SHARED, 3)
        assert save(self, keys_of(1, 2, 3)) == [STORED] * 3  # type: ignore[arg-type]

    def tell(self) -> None:
        """Let the store know what the mover says now."""
        self.store.flow = self.mover.flow

    def slow(self, lane: int, seconds_a_page: float) -> None:
        """Have a tier's pages take so long."""
        self.mover.read(lane, MIB, seconds_a_page * MIB / PAGE_BYTES)
        self.mover.wrote(lane, MIB, seconds_a_page * MIB / PAGE_BYTES)
        self.tell()


@pytest.fixture
def rig(directories: Directories) -> Iterator[SteppedRig]:
    made = SteppedRig(directories)
    yield made
    made.store.close()


KEYS = keys_of(1, 2, 3, 4, 5, 6, 7)


def test_a_probe_offers_what_is_here_in_time(rig: SteppedRig) -> None:
    assert rig.store.probe(KEYS, within=0.0).run == 6
    rig.slow(DISK, 1.0)
    probe = rig.store.probe(KEYS, within=0.5)
    assert (probe.run, probe.tiers.tolist(), probe.slow) == (3, [SHARED] * 3, 3)
    probe = rig.store.probe(KEYS, within=Within(0.5, per_page=0.5))
    assert (probe.run, probe.slow) == (6, 0)
    assert rig.store.probe(KEYS).run == 6


def test_pages_that_are_not_offered_are_misses_with_a_reason_of_their_own(rig: SteppedRig) -> None:
    rig.slow(DISK, 1.0)
    before = rig.store.stats()
    rig.store.probe(KEYS, within=0.5)
    stats = rig.store.stats()
    assert stats.misses["slow"] == 3
    assert stats.misses["absent"] - before.misses["absent"] == 1
    assert sum(stats.hit_pages.values()) + sum(stats.misses.values()) == stats.lookup_pages
    assert stats.tiers["disk"].too_slow
    assert stats.tiers["disk"].expected_seconds == pytest.approx(1.0)
    assert stats.tiers["disk"].read_rate == pytest.approx(PAGE_BYTES)
    assert stats.tiers["disk"].write_rate == pytest.approx(PAGE_BYTES)
    assert not stats.tiers["shared"].too_slow


def test_pages_that_are_not_offered_are_neither_held_nor_read_ahead(rig: SteppedRig) -> None:
    rig.slow(DISK, 1.0)
    rig.store.probe(KEYS, within=0.5, lease=10.0)
    stats = rig.store.stats()
    assert stats.queued == 0
    assert (stats.tiers["shared"].pinned, stats.tiers["disk"].pinned) == (3, 3)  # a lease by keys: in every tier
    assert rig.store.evict(Tier.DISK, 6) == 3
    rig.store.probe(KEYS, within=0.5, lease=0.0)


def test_a_tier_that_is_too_slow_for_the_first_page_holds_nothing(rig: SteppedRig) -> None:
    rig.slow(DISK, 1.0)
    rig.slow(SHARED, 1.0)
    probe = rig.store.probe(KEYS, within=0.5, lease=10.0)
    assert (probe.run, probe.tiers.tolist(), probe.slow) == (0, [], 6)
    assert rig.store.stats().leases == 0


def test_a_bound_that_is_none_is_refused_and_changes_nothing(rig: SteppedRig) -> None:
    for bad in (-1.0, float("nan"), "soon"):
        with pytest.raises(StepwellUsageError, match="within|Within"):
            rig.store.probe(KEYS, within=bad)  # type: ignore[arg-type]
    assert rig.store.stats().leases == 0


def test_a_save_that_would_miss_its_deadline_is_refused_at_once(rig: SteppedRig) -> None:
    rig.slow(SHARED, 1.0)
    rig.slow(DISK, 1.0)
    assert save(rig, keys_of(1, 8, 9), deadline=0.5) == [PRESENT, REFUSED, REFUSED]  # type: ignore[arg-type]
    stats = rig.store.stats()
    assert stats.queued == 0
    assert stats.refused_pages == 2
    assert stats.shed_pages == {"loads": 0, "deadline": 6}  # of three pages, in two tiers
    assert save(rig, keys_of(8), deadline=5.0) == [STORED]  # type: ignore[arg-type]


def test_a_save_goes_to_the_tiers_that_have_the_time(rig: SteppedRig) -> None:
    rig.slow(DISK, 1.0)
    assert save(rig, keys_of(8), deadline=0.5) == [STORED]  # type: ignore[arg-type]
    state = rig.store.state(keys_of(8)[0].tobytes())
    assert (state[Tier.SHARED].name, state[Tier.DISK].name) == ("RESIDENT", "ABSENT")
    assert rig.store.stats().tiers["disk"].skipped == 1
    assert save(rig, keys_of(8)) == [STORED]  # type: ignore[arg-type]
    assert rig.store.state(keys_of(8)[0].tobytes())[Tier.DISK].name == "RESIDENT"


def test_a_save_does_not_take_turns_from_loads_that_wait(rig: SteppedRig) -> None:
    rig.slow(DISK, 1.0)
    rig.mover.queue(WorkClass.LOAD, DISK, 100 * PAGE_BYTES)
    rig.tell()
    assert save(rig, keys_of(8)) == [STORED]  # type: ignore[arg-type]
    assert rig.store.stats().shed_pages == {"loads": 1, "deadline": 0}
    assert rig.store.state(keys_of(8)[0].tobytes())[Tier.DISK].name == "ABSENT"


def test_a_store_measures_its_own_tiers(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    save(rig, keys_of(1, 2, 3))
    rig.store.evict(Tier.SHARED, 3)
    assert load(rig, keys_of(1, 2, 3)) == [True] * 3
    disk = rig.store.stats().tiers["disk"]
    assert disk.read_seconds > 0
    assert disk.write_seconds > 0
    assert disk.read_rate == 0.0  # three small pages say nothing yet


def test_a_disk_that_stalls_serves_nothing_within_a_bound(open_rig: OpenRig) -> None:
    """The real mover, held in one read: as long as it has run is as long as a page takes at least."""
    rig = open_rig(shared=0)
    save(rig, keys_of(1, 2, 3))
    with inject("file.pread", "pause"):
        with rig.store._match_keys(keys_of(1), 1, is_staging=False) as match:
            running = rig.store.load(match, into=rig.pool[:1])
        wait_paused("file.pread")
        while rig.store._flow().running[DISK, 1] < STALL_SECONDS * 1e9:
            assert not running.done
        assert rig.store.probe(keys_of(2, 3), lease=0, within=0.01).run == 0
        assert rig.store.probe(keys_of(2, 3), lease=0).run == 2
    assert running.wait()
    assert rig.store.probe(keys_of(2, 3), lease=0, within=0.01).run == 2
