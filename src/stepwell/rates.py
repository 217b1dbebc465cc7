"""Say how long it takes to read from a tier and to write to it: what is slower than computing anew is not offered.

    mover: bytes, time, queues --observe--> moving averages --expected--> seconds until page i is there --cut--> hit run

Averages are of what loads read and of what saves and demotions write, by lane: a tier's own pages, or a neighbour's
beside them. Where nothing was measured yet, and where that was long ago, a lane counts as fast: only use tells. A tier
that is too slow and therefore not read from is tried again every TRY_SECONDS by one run of a few pages.

Here is only the estimating, on the store's clock; store.py asks it, the mover feeds it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.clock import Clock, as_seconds
from stepwell.errors import StepwellUsageError
from stepwell.index import Tier
from stepwell.mover import WorkClass

_LOG = logging.getLogger("stepwell")

LANES: Final = 8
"""A column of the mover (0: the lent pool), and 4 more a neighbour's pages beside that tier: csrc/mover.h."""
UNIT_BYTES: Final = 4 << 20
"""What a worker moves in one go, about: what waits behind it waits for so much at most, or for one page."""
HALF_LIFE_SECONDS: Final = 3.0
"""A sample that comes so long after the last one weighs as much as all before it: a disk that slows down is noticed in
seconds, and so is one that has recovered."""
FORGET_SECONDS: Final = 300.0
"""A lane that nothing was measured of for so long counts as unmeasured."""
TRY_SECONDS: Final = 10.0
"""How often a tier that is too slow to be offered is tried by one run, and by one save."""
SAMPLE_BYTES: Final = 1 << 20
SAMPLE_SECONDS: Final = 0.5
"""A sample has so many bytes or took so long: one read of a small page, alone, says little of a disk."""
STALL_SECONDS: Final = 0.25
"""A read that has run for so long says already that its lane is no faster."""
MOST_LOADS_SECONDS: Final = 1.0
"""A save is refused where loads that wait, alone, need longer than this: it would take its turns from them."""
LOG_SECONDS: Final = 60.0

_COPY: Final = 0
_IO: Final = 1
_POOL: Final = 0
_BEHIND: Final = 0.6
"""Units of other classes that go between those of loads: 3 of 8 turns beside 5 (csrc/queue.h)."""
_READ: Final = 0
_WRITE: Final = 1
_OF_QUEUE: Final = tuple(
    np.array([(lane == Tier.DISK or lane >= 4) == (queue == _IO) for lane in range(LANES)]) for queue in (_COPY, _IO)
)
"""Which lanes a queue has: files that are not mapped, and neighbours', are read and written by the I/O workers."""

U64 = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Lanes = npt.NDArray[np.uint8]


def foreign_lanes(tiers: npt.NDArray[np.uint8], offered: npt.NDArray[np.uint8]) -> Lanes:
    """Return the lanes of a run of pages: a neighbour's where `offered`; the others are here, and cost nothing more."""
    return np.where(offered != 0, tiers + np.uint8(4), np.uint8(_POOL)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Within:
    """Say how long loading a run of pages may take: `seconds`, and `per_page` seconds more for each page of it.

    That is what computing the run costs, or the time that an engine waits for one before it gives up (SGLang's is
    `prefetch_timeout_base + prefetch_timeout_per_ki_token * tokens / 1024`).

    Raises (constructor): StepwellUsageError where one is no number of seconds, or negative.
    """

    seconds: float
    per_page: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "per_page"):
            given = as_seconds(f"Within.{name}", getattr(self, name))
            if given < 0:
                raise StepwellUsageError(f"Within.{name}: {given:g} is in the past; give 0 or more seconds")

    def of(self, pages: int) -> Floats:
        """Return what a run of 1, 2, ... `pages` pages may take, seconds, float64[pages]."""
        return self.seconds + self.per_page * np.arange(1, pages + 1, dtype=np.float64)


def as_within(given: Within | float) -> Within:
    """Return seconds as a bound that does not grow with the run.

    Raises: StepwellUsageError.
    """
    return given if isinstance(given, Within) else Within(as_seconds("within", given))


@dataclass(frozen=True, slots=True)
class Flow:
    """What a mover has moved, and what waits, at one moment; see `_core.Mover.flow`.

    reads, writes: [class, lane, (bytes, ns)]. waits: [queue, class, (units, ns)]. queued: bytes, [class, lane].
    running: the slowest unit of a load under way, [lane, (bytes, ns)]. All uint64.
    """

    reads: U64
    writes: U64
    waits: U64
    queued: U64
    running: U64

    @classmethod
    def nothing(cls) -> Flow:
        """Return that of a mover that has done nothing."""
        shapes = ((3, LANES, 2), (3, LANES, 2), (2, 3, 2), (3, LANES), (LANES, 2))
        return cls(*(np.zeros(shape, np.uint64) for shape in shapes))


@dataclass(frozen=True, slots=True)
class TierRate:
    """How fast a tier is. read_rate, write_rate: bytes a second of one worker, 0: not known. wait: seconds that loads
    from it have lain in their queue, lately. expected: seconds until one page would be here, if it were asked for now.
    is_too_slow: at the last probe with a bound it was; then none of its pages was offered.
    """

    read_rate: float
    write_rate: float
    wait: float
    expected: float
    is_too_slow: bool


@dataclass(slots=True)
class _Average:
    """A moving average on a logarithmic scale: a sample that is ten times as slow weighs as one ten times as fast."""

    value: float = 0.0  # seconds a byte; 0: unmeasured
    at: float = float("-inf")
    new_bytes: int = 0
    new_seconds: float = 0.0

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """Take what was moved since the last call, and how long it took."""
        self.new_bytes += nbytes
        self.new_seconds += seconds
        if self.new_bytes < SAMPLE_BYTES and self.new_seconds < SAMPLE_SECONDS:
            return
        sample = self.new_seconds / max(self.new_bytes, 1)
        self.new_bytes, self.new_seconds = 0, 0.0
        if sample <= 0:
            return
        kept = 0.5 ** ((now - self.at) / HALF_LIFE_SECONDS) if self.known(now) else 0.0
        self.value = sample if kept == 0 else math.exp(kept * math.log(self.value) + (1 - kept) * math.log(sample))
        self.at = now

    def known(self, now: float) -> float:
        """Return seconds a byte; 0 where nothing is known."""
        return self.value if now - self.at < FORGET_SECONDS else 0.0


@dataclass(slots=True)
class _Slow:
    """A lane that is too slow to be offered. expected, allowed: seconds to its first page, at the last look."""

    expected: float = 0.0
    allowed: float = 0.0
    is_now: bool = False
    tried_at: float = float("-inf")
    said_at: float = float("-inf")
    unsaid: int = 0


@dataclass(slots=True)
class _State:
    """GUARDED_BY Rates._lock."""

    seen: Flow = field(default_factory=Flow.nothing)
    rates: tuple[list[_Average], list[_Average]] = field(
        default_factory=lambda: ([_Average() for _ in range(LANES)], [_Average() for _ in range(LANES)])
    )
    # What is in `rates`, as arrays: [read or write, lane].
    costs: Floats = field(default_factory=lambda: np.zeros((2, LANES)))
    costs_at: Floats = field(default_factory=lambda: np.full((2, LANES), float("-inf")))
    waits: list[float] = field(default_factory=lambda: [0.0, 0.0])  # by queue
    waits_at: list[float] = field(default_factory=lambda: [float("-inf")] * 2)
    slow: list[_Slow] = field(default_factory=lambda: [_Slow() for _ in range(LANES)])
    saves_tried_at: dict[Tier, float] = field(default_factory=dict)


class Rates:
    """How long loads and saves take, from what the mover has done.

    Threads: any.
    """

    def __init__(self, clock: Clock, flow: Callable[[], Flow], *, page_bytes: int, workers: tuple[int, int]) -> None:
        """Args: flow: asks the mover. workers: that copy, and that do I/O."""
        self._clock = clock
        self._flow = flow
        self._page_bytes = page_bytes
        self._workers = tuple(max(1, count) for count in workers)
        self._unit_pages = max(1, UNIT_BYTES // page_bytes)
        self._lock = threading.Lock()
        self._state = _State()

    # ---- being told -------------------------------------------------------------------------------------------------

    def observe(self) -> Flow:
        """Take what the mover has done since the last call. Returns how it is now."""
        with self._lock:
            now, state = self._clock.monotonic(), self._state
            seen, flow = state.seen, self._flow()  # under the lock: one look does not overtake another
            state.seen = flow
            if _moved(flow) == _moved(seen):  # as at most looks
                return flow
            load = flow.reads[WorkClass.LOAD].astype(np.int64) - seen.reads[WorkClass.LOAD].astype(np.int64)
            save = (flow.writes.astype(np.int64) - seen.writes.astype(np.int64))[WorkClass.SAVE :].sum(axis=0)
            for averages, moved in zip(state.rates, (load, save), strict=True):
                for lane in np.flatnonzero(moved[:, 1] > 0).tolist():
                    averages[lane].add(int(moved[lane, 0]), int(moved[lane, 1]) / 1e9, now)
            state.costs = np.array([[each.value for each in averages] for averages in state.rates])
            state.costs_at = np.array([[each.at for each in averages] for averages in state.rates])
            for queue in (_COPY, _IO):
                units, ns = (flow.waits[queue, WorkClass.LOAD] - seen.waits[queue, WorkClass.LOAD]).tolist()
                if units:
                    kept = 0.5 ** ((now - state.waits_at[queue]) / HALF_LIFE_SECONDS)
                    state.waits[queue] = kept * state.waits[queue] + (1 - kept) * ns / units / 1e9
                    state.waits_at[queue] = now
        return flow

    # ---- asking -----------------------------------------------------------------------------------------------------

    def expected(self, lanes: Lanes, page_bytes: int | None = None) -> Floats:
        """Say in how many seconds each page of a run would be here, if it were asked for now.

        Args:
            lanes: uint8[n], of each page its tier, or 4 + tier where a neighbour has it. page_bytes: the store's.

        Returns:
            float64[n]: behind what waits and runs already, read by all workers of its queue, those of the two queues
            side by side. 0 for pages of lanes that nothing is known of, but for what is before them.
        """
        return self._expected(self.observe(), lanes, page_bytes or self._page_bytes)

    def _expected(self, flow: Flow, lanes: Lanes, page_bytes: int) -> Floats:
        result = np.zeros(lanes.size)
        reads, writes = self._costs(flow)
        for queue, is_mine in enumerate(_OF_QUEUE):
            rows = np.flatnonzero(is_mine[lanes])
            if rows.size == 0:
                continue
            ahead, others = flow.queued[WorkClass.LOAD][is_mine], flow.queued[WorkClass.SAVE :].sum(axis=0)[is_mine]
            waiting, nbytes = float(ahead @ reads[is_mine]), float(ahead.sum())
            between, most = float(others @ writes[is_mine]), float(others.sum())
            workers = self._workers[queue]
            own = _in_turn(page_bytes * reads[lanes[rows]], max(1, UNIT_BYTES // page_bytes), workers)
            if most:
                passing = _BEHIND * (nbytes + page_bytes * np.arange(1, rows.size + 1)) + workers * UNIT_BYTES
                own += between * np.minimum(1.0, passing / most) / workers
            result[rows] = own + waiting / workers
        return result

    def _costs(self, flow: Flow) -> tuple[Floats, Floats]:
        """Return what reading and writing a byte costs, seconds, by lane; 0: not known."""
        with self._lock:
            costs, at = self._state.costs, self._state.costs_at
        reads, writes = np.where(self._clock.monotonic() - at < FORGET_SECONDS, costs, 0.0)
        for lane in np.flatnonzero(flow.running[:, 1] >= STALL_SECONDS * 1e9).tolist():
            nbytes, ns = flow.running[lane].tolist()
            reads[lane] = max(reads[lane], ns / 1e9 / max(nbytes, 1))
        return reads, writes

    def cut(self, lanes: Lanes, within: Within, *, first: int = 0) -> int:
        """Say how many leading pages of a run to offer: the longest run that is here in time.

        Args:
            lanes: as in expected(). first: pages of the hit before them, that were asked about already.

        Returns:
            Pages. Of a tier that is too slow for its first one, and of which nothing was read for TRY_SECONDS, a few
            all the same.
        """
        return self._cut(self.observe(), lanes, within, first) if lanes.size else 0

    def cut_spans(self, spans: Sequence[tuple[int, int]], within: Within) -> int:
        """Say how many leading pages of a run to offer, as cut(); spans: (lane, pages), at least one.

        Cost: 40 us where all of it is in time by far, however long it is; else 200 us for 100 pages.
        """
        flow = self.observe()
        reads, writes = self._costs(flow)
        pages = sum(count for _, count in spans)
        # At most, by one worker and behind all that waits.
        longest = self._page_bytes * sum(count * float(reads[lane]) for lane, count in spans)
        if flow.queued.any():
            longest += float(flow.queued[WorkClass.LOAD] @ reads + flow.queued[WorkClass.SAVE :].sum(axis=0) @ writes)
        if longest <= within.seconds + within.per_page * pages:
            with self._lock:
                for lane, _ in spans:
                    self._state.slow[lane].is_now = False
            return pages
        return self._cut(flow, np.repeat(*np.array(spans, dtype=np.int64).T).astype(np.uint8), within, 0)

    def _cut(self, flow: Flow, lanes: Lanes, within: Within, first: int) -> int:
        at = np.maximum.accumulate(self._expected(flow, lanes, self._page_bytes))
        allowed = within.of(first + lanes.size)[first:]
        in_time = np.flatnonzero(at <= allowed)
        pages = int(in_time[-1]) + 1 if in_time.size else 0
        served = np.unique(lanes[:pages]).tolist()
        with self._lock:
            for lane in served:
                self._state.slow[lane].is_now = False
        if pages == lanes.size or (lane := int(lanes[pages])) in served:
            return pages
        tried = self._call_slow(lane, float(at[pages]), float(allowed[pages]), flow)
        same = lanes[pages : pages + tried] == lane
        return pages + (tried if same.all() else int(same.argmin())) if same.size else pages

    def _call_slow(self, lane: int, expected: float, allowed: float, flow: Flow) -> int:
        """Note that a lane is too slow for its first page, and say so. Returns how many of its pages to try all the
        same."""
        is_idle = int(flow.queued[WorkClass.LOAD][lane]) == 0
        with self._lock:
            now, slow = self._clock.monotonic(), self._state.slow[lane]
            if not slow.is_now:
                slow.is_now = True
                slow.tried_at = max(slow.tried_at, self._state.rates[_READ][lane].at)
            slow.expected, slow.allowed = expected, allowed
            tries = is_idle and now - slow.tried_at >= TRY_SECONDS
            if tries:
                slow.tried_at = now
            if is_quiet := now - slow.said_at < LOG_SECONDS:
                slow.unsaid += 1
            else:
                more, slow.unsaid, slow.said_at = slow.unsaid, 0, now
        if not is_quiet:
            _LOG.warning(
                "%s: too slow: a page is expected after %.3g s, and %.3g s are allowed: its pages are misses%s. "
                "One run every %g s tries it",
                _lane_name(lane),
                expected,
                allowed,
                f" ({more} probes more since the last line)" if more else "",
                TRY_SECONDS,
            )
        return self._unit_pages if tries else 0

    def shed(self, tiers: Sequence[Tier], pages: int, deadline: float | None) -> dict[Tier, str]:
        """Say to which tiers a save should not go now, and why.

        Args:
            tiers: that it would go to, the nearest first. deadline: seconds, or None.

        Returns:
            "loads" where those that wait need MOST_LOADS_SECONDS or more, for they come first; "deadline" where it is
            expected to pass before the pages are written there. None of the tiers that are too slow for a deadline is
            left out for more than TRY_SECONDS without a try.
        """
        flow = self.observe()
        reads, writes = self._costs(flow)
        left_out: dict[Tier, str] = {}
        begun = 0.0
        for tier in tiers:
            queue = _IO if tier is Tier.DISK else _COPY
            is_mine, workers = _OF_QUEUE[queue], self._workers[queue]
            loads = float(flow.queued[WorkClass.LOAD][is_mine] @ reads[is_mine]) / workers
            if loads > MOST_LOADS_SECONDS:
                left_out[tier] = "loads"
                continue
            if deadline is None:
                continue
            ahead = float(flow.queued[WorkClass.SAVE :].sum(axis=0)[is_mine] @ writes[is_mine]) / workers
            units = -(-pages // self._unit_pages)
            own = pages * self._page_bytes * float(writes[tier]) / min(workers, max(1, units))
            if begun + loads + ahead + own > deadline and not self._tries_save(tier, flow):
                left_out[tier] = "deadline"
            else:
                begun += loads + ahead + own
        return left_out

    def _tries_save(self, tier: Tier, flow: Flow) -> bool:
        """Say whether a save may try a tier that is too slow: nothing is being written there, and was not lately."""
        if int(flow.queued[WorkClass.SAVE :].sum(axis=0)[tier]):
            return False
        with self._lock:
            now = self._clock.monotonic()
            last = max(self._state.rates[_WRITE][tier].at, self._state.saves_tried_at.get(tier, float("-inf")))
            if now - last < TRY_SECONDS:
                return False
            self._state.saves_tried_at[tier] = now
            return True

    def of(self, tier: Tier) -> TierRate:
        """Say how fast a tier is."""
        expected = float(self.expected(np.array([tier], dtype=np.uint8))[0])
        with self._lock:
            now, state = self._clock.monotonic(), self._state
            read, write = (averages[tier].known(now) for averages in state.rates)
            return TierRate(
                read_rate=1 / read if read else 0.0,
                write_rate=1 / write if write else 0.0,
                wait=state.waits[_IO if tier is Tier.DISK else _COPY],
                expected=expected,
                is_too_slow=state.slow[tier].is_now,
            )


def _moved(flow: Flow) -> tuple[bytes, bytes, bytes]:
    """Return what has been moved as bytes: of such small arrays they are compared in a tenth of the time."""
    return flow.reads.tobytes(), flow.writes.tobytes(), flow.waits.tobytes()


def _in_turn(seconds: Floats, unit_pages: int, workers: int) -> Floats:
    """Return when each page of a run is done, units of so many pages being taken by the workers in turn."""
    rounds = -(-seconds.size // (unit_pages * workers))
    grid = np.zeros(rounds * workers * unit_pages)
    grid[: seconds.size] = seconds
    units = grid.reshape(rounds, workers, unit_pages)
    each = units.sum(axis=2)
    before: Floats = each.cumsum(axis=0) - each
    done: Floats = (before[:, :, None] + units.cumsum(axis=2)).ravel()
    return done[: seconds.size]


def _lane_name(lane: int) -> str:
    return f"{Tier(lane)} tier" if lane < 4 else f"neighbours' pages in the {Tier(lane - 4)} tier"
