"""Derive what the report shows from what a run recorded: what came when, what a kill cost, where loading pays.

Every number in a chart is made here or is in the run itself; the charts only place it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.demo.results import TIERED, TIERS, Report
from stepwell.demo.scenario import Measured, Served, TreeEdge
from stepwell.demo.tree import pages_below

ACTS = {
    "unbounded": "Oracle 1: unbounded device",
    "recompute": "Oracle 2: no reuse",
    "served": "Four tiers, then SIGKILL",
    "shared": "Warm from shared memory",
    "swapped": "Negative control",
    "disk": "Warm from disk",
    "measured": "Measured alone",
}
SOURCES = (*TIERS, "computed")
MOST_BINS = 96


def sources(served: Served) -> dict[str, int]:
    """Return the tokens of a prompt by where they came from: a tier, or "computed"."""
    found = {tier: served.found.get(tier, 0) for tier in TIERS}
    return found | {"computed": served.prompt - sum(found.values())}


def largest_source(served: Served) -> str:
    """Return the tier in which most of the prefix was found, "computed" where nothing was."""
    return max(served.found, key=lambda tier: served.found[tier]) if any(served.found.values()) else "computed"


# ---- over time ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """An act on the run's clock: seconds since the demo began. What did not happen is None."""

    act: str
    started: float
    opened: float | None
    serving: float | None
    served: float | None
    killed: float | None
    ended: float

    @property
    def title(self) -> str:
        """Return what to call it."""
        return ACTS.get(self.act, self.act)


def spans(report: Report) -> list[Span]:
    """Return the acts in the order in which they began."""
    found = []
    for moment in report.moments:
        if moment.what == "started":
            ended = report.moment(moment.act, "ended")
            found.append(
                Span(
                    act=moment.act,
                    started=moment.at,
                    opened=report.moment(moment.act, "opened"),
                    serving=report.moment(moment.act, "serving"),
                    served=report.moment(moment.act, "served"),
                    killed=report.moment(moment.act, "killed"),
                    ended=max(moment.at, report.seconds if ended is None else ended),
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class Bin:
    """Prompt tokens whose request had its first token between two moments, by source."""

    start: float
    end: float
    act: str
    requests: int
    tokens: dict[str, int]


def tokens_over_time(report: Report) -> list[Bin]:
    """Return the bins in which something was served, in order; a bin holds requests of one act."""
    width = bin_width(report)
    gathered: dict[tuple[int, str], list[Served]] = {}
    for act, run in report.runs.items():
        serving = report.moment(act, "serving") or 0.0
        for served in run.served:
            number = int((serving + served.admitted + served.first_token) / width)
            gathered.setdefault((number, act), []).append(served)
    return [
        Bin(
            start=number * width,
            end=(number + 1) * width,
            act=act,
            requests=len(mine),
            tokens={source: sum(sources(one)[source] for one in mine) for source in SOURCES},
        )
        for (number, act), mine in sorted(gathered.items(), key=lambda item: item[0][0])
    ]


def bin_width(report: Report) -> float:
    """Return a width of 1, 2 or 5 times a power of ten seconds that makes at most MOST_BINS bins of a run."""
    least = max(report.seconds, 1e-3) / MOST_BINS
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= least * (1 - 1e-9))


# ---- the kill and the return ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Return:
    """How an act came back after something was taken away.

    since: when that was, on the run's clock; steps: (what, seconds since then), in order. open_seconds: how long the
    store took to open. first_found: tokens by tier of the first request that found something.
    """

    act: str
    what: str
    since: float
    steps: tuple[tuple[str, float], ...]
    open_seconds: float
    first_found: dict[str, int]
    reused: dict[str, int]


def returns(report: Report) -> list[Return]:
    """Return the return after SIGKILL and the one after shared memory was removed, as far as they happened."""
    found = []
    taken = (("shared", "SIGKILL", ("served", "killed")), ("disk", "the removal of shared memory", ("disk", "removed")))
    for act, what, (of, moment) in taken:
        since, run = report.moment(of, moment), report.runs.get(act)
        if since is None or run is None:
            continue
        steps = [
            (step, at - since)
            for step, at in (
                ("process started", report.moment(act, "started")),
                ("store open", report.moment(act, "opened")),
                ("ready to serve", report.moment(act, "serving")),
            )
            if at is not None
        ]
        serving = report.moment(act, "serving")
        hits = [one for one in run.served if any(one.found.values())]
        first = min(hits, key=lambda one: one.admitted + one.wait, default=None)
        if serving is not None and first is not None:
            admitted = serving - since + first.admitted
            steps.append(("first prefix on the device", admitted + first.wait))
            steps.append(("its first token", admitted + first.first_token))
        found.append(
            Return(
                act=act,
                what=what,
                since=since,
                steps=tuple(steps),
                open_seconds=run.opened,
                first_found={} if first is None else {tier: first.found.get(tier, 0) for tier in TIERS},
                reused={tier: run.reused_tokens.get(tier, 0) for tier in TIERS},
            )
        )
    return found


# ---- load or compute ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds for a prefix of n tokens: fixed + n * per_token."""

    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        """Return the seconds for a number of tokens."""
        return self.fixed + tokens * self.per_token


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured alone for one source: medians of (tokens, seconds) by length, and the line through them.

    cost: None where there are fewer than two lengths.
    """

    source: str
    points: tuple[tuple[int, float], ...]
    samples: int
    cost: Cost | None


def curves(measured: Sequence[Measured]) -> list[Curve]:
    """Return a curve for each source that was measured, tiers from the nearest on, then what was computed."""
    found = []
    for source in SOURCES:
        mine = [one for one in measured if one.source == source]
        lengths = sorted({one.tokens for one in mine})
        points = tuple((n, statistics.median(one.seconds for one in mine if one.tokens == n)) for n in lengths)
        if points:
            found.append(Curve(source, points, len(mine), fit(points)))
    return found


def fit(points: Sequence[tuple[int, float]]) -> Cost | None:
    """Fit a line by least squares, through the origin where it would begin below it, flat where it would fall."""
    if len(points) < 2:
        return None
    mean_n = statistics.fmean(n for n, _ in points)
    mean_s = statistics.fmean(s for _, s in points)
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    per_token = sum((n - mean_n) * (s - mean_s) for n, s in points) / spread
    if per_token <= 0:
        return Cost(mean_s, 0.0)
    if mean_s - per_token * mean_n < 0:
        return Cost(0.0, sum(n * s for n, s in points) / sum(n * n for n, _ in points))
    return Cost(mean_s - per_token * mean_n, per_token)


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Which prefixes load faster than they are computed: from `first` tokens on, up to `last` (None: without end).

    first None: none does.
    """

    first: float | None
    last: float | None = None


def break_even(load: Cost, compute: Cost) -> BreakEven:
    """Compare two costs over all lengths above 0."""
    fixed, per_token = load.fixed - compute.fixed, compute.per_token - load.per_token
    if fixed <= 0:
        last = None if per_token >= 0 else fixed / per_token
        return BreakEven(None if last == 0 else 0.0, last or None)
    return BreakEven(fixed / per_token) if per_token > 0 else BreakEven(None)


def modelled(report: Report) -> Cost | None:
    """Return the cost of computing on the device whose rate the user states: nothing fixed, the same for each token."""
    rate = report.gpu_tokens_per_second
    return None if rate is None else Cost(0.0, 1 / rate)


def bytes_per_token(report: Report) -> float:
    """Return how many bytes of KV a token has; 0 where the run does not say."""
    return report.page_bytes / report.page_tokens if report.page_tokens else 0.0


# ---- the tree -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One edge, placed: left and width in pages of the whole tree, top and height in pages of depth."""

    edge: TreeEdge
    left: int
    width: int


def place(edges: Sequence[TreeEdge]) -> list[Cell]:
    """Lay edges out as an icicle: an edge is as wide as all pages from it downwards, children side by side under it."""
    width = pages_below(edges)
    free: dict[int | None, int] = {None: 0}
    cells = []
    for number, edge in enumerate(edges):
        left = free[edge.parent]
        free[edge.parent] = left + width[number]
        free[number] = left
        cells.append(Cell(edge, left, width[number]))
    return cells


def pages_by_tier(edges: Sequence[TreeEdge]) -> dict[str, int]:
    """Return how many pages of a tree are nearest in each tier; "" for those that no match would find."""
    found = dict.fromkeys((*TIERS, ""), 0)
    for edge in edges:
        for tier, pages in edge.nearest:
            found[tier] = found.get(tier, 0) + pages
    return found


def verified_bytes(report: Report, act: str) -> dict[str, int]:
    """Return the bytes that an act read from each tier below the device: each was checked against its checksum."""
    run = report.runs[act]
    return {tier: run.bytes_read.get(tier, 0) for tier in TIERS[1:]}


def totals(report: Report) -> dict[str, int]:
    """Return the prompt tokens of the acts with tiers by source."""
    served = [one for act in TIERED if act in report.runs for one in report.runs[act].served]
    return {source: sum(sources(one)[source] for one in served) for source in SOURCES}
