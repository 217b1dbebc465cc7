"""Show what the stores of a rank do: a dict for get_stats, and metrics on the registry of prometheus-client.

    calls --note--> Calls                                       } at most once a second
    PageStore.stats() + Calls.taken() --snapshot_of--> a dict   } --differences--> counters, gauges, a histogram

SGLang's metrics live in the scheduler's process; where it serves several of them, prometheus-client keeps their values
in files of PROMETHEUS_MULTIPROC_DIR, from which its server reads (observability/metrics_collector.py:343). So these are
plain Counter, Gauge and Histogram objects, as SGLang's own: a custom collector would be asked in no process but this.
Nothing here raises into SGLang: metrics that cannot be registered or written are left out, with one line in the log.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal, Protocol

import stepwell as sw

Call = Literal["exists", "get", "set"]
Snapshot = dict[str, Any]

SECONDS: Final = 1.0
"""How old a snapshot may be. SGLang asks in each round of its scheduler, thousands of times a second when idle."""
BOUNDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Of the histogram of durations, seconds, inclusive: from a look into the index to SGLang's patience."""
_MOST_WAITING: Final = 4096
"""Durations and batches that wait to be asked for; older ones are left out of the histograms, not of the sums."""
_CALLS: Final[tuple[Call, ...]] = ("exists", "get", "set")
_LOG = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class Batch:
    """One read or write of pages: how many were asked for, how many bytes were moved, and what it took."""

    pages: int
    nbytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """The bandwidth, GB/s, as SGLang's StorageMetrics has it."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class Calls:
    """Note what the calls of one pool's store took. Threads: any."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._lock = threading.Lock()
        self._counts = {call: [0] * (len(BOUNDS) + 1) for call in _CALLS}
        self._seconds = dict.fromkeys(_CALLS, 0.0)
        self._waiting: dict[Call, deque[float]] = {call: deque(maxlen=_MOST_WAITING) for call in _CALLS}
        self._batches: dict[Call, deque[Batch]] = {call: deque(maxlen=_MOST_WAITING) for call in ("get", "set")}

    def note(self, call: Call, seconds: float, *, pages: int = 0, moved: int = 0) -> None:
        """Note a call, and of one that moves pages how many it was asked for and how many it moved."""
        with self._lock:
            self._counts[call][bisect_left(BOUNDS, seconds)] += 1
            self._seconds[call] += seconds
            self._waiting[call].append(seconds)
            if call in self._batches and pages:
                self._batches[call].append(Batch(pages, moved * self._page_bytes, seconds))

    def histograms(self) -> dict[Call, dict[str, Any]]:
        """Return of each kind of call how many there were, their seconds, and how many took at most each bound."""
        with self._lock:
            found: dict[Call, dict[str, Any]] = {}
            for call, counts in self._counts.items():
                sums = [sum(counts[: place + 1]) for place in range(len(counts))]
                buckets = {**dict(zip(map(str, BOUNDS), sums, strict=False)), "+Inf": sums[-1]}
                found[call] = {"count": sums[-1], "seconds": self._seconds[call], "buckets": buckets}
            return found

    def take_durations(self) -> dict[Call, list[float]]:
        """Take the durations noted since the last time."""
        with self._lock:
            taken = {call: list(waiting) for call, waiting in self._waiting.items()}
            for waiting in self._waiting.values():
                waiting.clear()
            return taken

    def take_batches(self, call: Literal["get", "set"]) -> list[Batch]:
        """Take the batches noted since the last time."""
        with self._lock:
            taken = list(self._batches[call])
            self._batches[call].clear()
            return taken


class RankOf(Protocol):
    """What is read of SGLang's HiCacheStorageConfig (mem_cache/hicache_storage.py:28)."""

    tp_rank: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dp_rank: int


def rank_label(config: RankOf) -> str:
    """Name a rank among those whose metrics meet on one server: tp0, tp1.pp2, tp0.dp3."""
    parts = [f"tp{config.tp_rank}"]
    if config.pp_size > 1:
        parts.append(f"pp{config.pp_rank}")
    if config.attn_cp_size > 1:
        parts.append(f"cp{config.attn_cp_rank}")
    if config.dp_rank:
        parts.append(f"dp{config.dp_rank}")
    return ".".join(parts)


def snapshot_of(stats: sw.Stats, calls: Calls, *, page_bytes: int, page_tokens: int) -> Snapshot:
    """Say what a pool's store holds and has done, as plain numbers and texts.

    Args:
        page_tokens: of the KV pages whose hashes are the keys, also for a side pool.
    """

    def tokens(pages: Mapping[str, int]) -> dict[str, int]:
        return {name: count * page_tokens for name, count in pages.items()}

    return {
        "page_tokens": page_tokens,
        "page_bytes": page_bytes,
        "hit_tokens": tokens(stats.delivered_pages),
        "miss_tokens": tokens(stats.misses),
        "shed_tokens": tokens(stats.shed_pages),
        "evicted_tokens": tokens(stats.evicted_pages),
        "saved_tokens": stats.saved_pages * page_tokens,
        "refused_tokens": stats.refused_pages * page_tokens,
        "checksum_failures": stats.checksum_failures,
        "io_errors": stats.io_errors,
        "queued_units": stats.queued,
        "tiers": {
            name: {
                "capacity_bytes": tier.capacity * page_bytes,
                "resident_bytes": tier.resident * page_bytes,
                "read_bytes": tier.bytes_read,
                "written_bytes": tier.bytes_written,
                "expected_seconds": tier.expected_seconds,
                "too_slow": tier.too_slow,
                "serving": tier.state != "out",
                "state": tier.state,
                "reason": tier.reason,
            }
            for name, tier in stats.tiers.items()
        },
        "calls": calls.histograms(),
    }


# ---- prometheus ------------------------------------------------------------------------------------------------------

_BY_TIER: Final = ("pool", "tier", "rank")
_BY_REASON: Final = ("pool", "reason", "rank")
_BY_POOL: Final = ("pool", "rank")
_COUNTERS: Final = {
    "stepwell_hit_tokens": ("Tokens loaded into SGLang's host pool, by the tier that had them.", _BY_TIER),
    "stepwell_miss_tokens": (
        "Tokens asked for and not had, by reason; SGLang may ask several times for one request.", _BY_REASON,
    ),
    "stepwell_shed_tokens": ("Tokens that saves did not write to a tier, so that loads are served.", _BY_REASON),
    "stepwell_evicted_tokens": ("Tokens dropped from a tier for room.", _BY_TIER),
    "stepwell_saved_tokens": ("Tokens written to any tier.", _BY_POOL),
    "stepwell_refused_tokens": ("Tokens that no tier took.", _BY_POOL),
    "stepwell_read_bytes": ("Payload bytes read from a tier.", _BY_TIER),
    "stepwell_written_bytes": ("Payload bytes written to a tier.", _BY_TIER),
    "stepwell_checksum_failures": ("Pages found damaged, which were misses.", _BY_POOL),
    "stepwell_io_errors": ("Calls on files that failed.", _BY_POOL),
    "stepwell_epoch_changes": ("Changes of the weights' epoch: pages of another one are misses.", ("rank",)),
}  # fmt: skip
_GAUGES: Final = {
    "stepwell_capacity_bytes": ("What a tier can hold now.", _BY_TIER),
    "stepwell_resident_bytes": ("What a tier holds.", _BY_TIER),
    "stepwell_expected_seconds": ("Until a page would be loaded from a tier, if it were asked for now.", _BY_TIER),
    "stepwell_too_slow": ("1: a tier's pages are misses, since loading them would pass the bound.", _BY_TIER),
    "stepwell_serving": ("0: a tier is out of service.", _BY_TIER),
    "stepwell_queued_units": ("Units of work that wait for the mover.", _BY_POOL),
}
_HISTOGRAM: Final = "stepwell_call_seconds"
_OF_POOL: Final = {
    "saved_tokens": "stepwell_saved_tokens",
    "refused_tokens": "stepwell_refused_tokens",
    "checksum_failures": "stepwell_checksum_failures",
    "io_errors": "stepwell_io_errors",
}
_OF_LABEL: Final = {
    "hit_tokens": ("stepwell_hit_tokens", "tier"),
    "miss_tokens": ("stepwell_miss_tokens", "reason"),
    "shed_tokens": ("stepwell_shed_tokens", "reason"),
    "evicted_tokens": ("stepwell_evicted_tokens", "tier"),
}
_OF_TIER: Final = {"read_bytes": "stepwell_read_bytes", "written_bytes": "stepwell_written_bytes"}
_NOW_OF_TIER: Final = ("capacity_bytes", "resident_bytes", "expected_seconds", "too_slow", "serving")
_TROUBLE: Final = (OSError, ValueError, TypeError, AttributeError, RuntimeError)
"""What prometheus-client raises: no room for its files, a name that is taken, labels that are others."""

Labels = tuple[tuple[str, str], ...]


@functools.cache
def _families(client: ModuleType) -> dict[str, Any]:
    """Register the metrics, once a process: a backend that is attached again goes on counting in them.

    Raises: whatever the client does.
    """
    counters = {name: client.Counter(name, text, labels) for name, (text, labels) in _COUNTERS.items()}
    # Several processes write one file each; of a series that two have written, the last word counts, as SGLang's.
    gauges = {
        name: client.Gauge(name, text, labels, multiprocess_mode="mostrecent")
        for name, (text, labels) in _GAUGES.items()
    }
    calls = client.Histogram(_HISTOGRAM, "What a call on a store took.", ("pool", "call", "rank"), buckets=BOUNDS)
    return {**counters, **gauges, _HISTOGRAM: calls}


class Exporter:
    """Write snapshots to prometheus-client's registry. Threads: one at a time."""

    def __init__(self, rank: str, *, client: ModuleType | None = None) -> None:
        """Args: client: the module; by default prometheus_client, where it is installed."""
        self._rank = rank
        self._seen: dict[tuple[str, Labels], float] = {}
        self._gauges: set[tuple[str, Labels]] = set()
        self._metrics: dict[str, Any] | None = None
        try:
            if client is None:
                # Only now: it looks at PROMETHEUS_MULTIPROC_DIR when it is imported, which SGLang sets at its start.
                client = importlib.import_module("prometheus_client")
            self._metrics = _families(client)
        except ImportError:
            _LOG.info("prometheus-client is not installed: stepwell's metrics are in get_stats alone")
        except _TROUBLE as error:
            _LOG.warning("stepwell's metrics are not on prometheus-client's registry: %s", error)

    @property
    def is_registered(self) -> bool:
        """Whether anything is written."""
        return self._metrics is not None

    def publish(self, snapshot: Snapshot, durations: Mapping[str, Mapping[Call, list[float]]]) -> None:
        """Advance counters by what is new since the last snapshot, set gauges, and enter durations.

        Args: durations: by pool.
        """
        if self._metrics is None:
            return
        try:
            for name, labels, value in _counters_of(snapshot):
                self._advance(name, labels, value)
            for name, labels, value in _gauges_of(snapshot):
                self._set(name, labels, value)
            for pool, calls in durations.items():
                for call, seconds in calls.items():
                    child = self._child(_HISTOGRAM, (("pool", pool), ("call", call)))
                    for each in seconds:
                        child.observe(each)
        except _TROUBLE as error:
            self._metrics = None
            _LOG.warning("stepwell's metrics are no longer written: %s", error)

    def close(self) -> None:
        """Set the gauges to 0: the stores they were about are closed. Idempotent."""
        try:
            for name, labels in self._gauges if self._metrics is not None else ():
                self._child(name, labels).set(0)
        except _TROUBLE as error:
            _LOG.warning("stepwell's metrics are no longer written: %s", error)
        self._metrics = None

    def _child(self, name: str, labels: Labels) -> Any:
        assert self._metrics is not None, "asked only where there are some"
        return self._metrics[name].labels(**dict(labels), rank=self._rank)

    def _advance(self, name: str, labels: Labels, value: float) -> None:
        key = name, labels
        child, before = self._child(name, labels), self._seen.get(key, 0)
        if value > before:
            child.inc(value - before)
            self._seen[key] = value

    def _set(self, name: str, labels: Labels, value: float) -> None:
        self._child(name, labels).set(value)
        self._gauges.add((name, labels))


def _counters_of(snapshot: Snapshot) -> Iterator[tuple[str, Labels, float]]:
    yield "stepwell_epoch_changes", (), snapshot["epoch_changes"]
    for pool, found in snapshot["pools"].items():
        mine = ("pool", pool)
        for field, name in _OF_POOL.items():
            yield name, (mine,), found[field]
        for field, (name, label) in _OF_LABEL.items():
            for value, count in found[field].items():
                yield name, (mine, (label, value)), count
        for tier, of_tier in found["tiers"].items():
            for field, name in _OF_TIER.items():
                yield name, (mine, ("tier", tier)), of_tier[field]


def _gauges_of(snapshot: Snapshot) -> Iterator[tuple[str, Labels, float]]:
    for pool, found in snapshot["pools"].items():
        yield "stepwell_queued_units", (("pool", pool),), found["queued_units"]
        for tier, of_tier in found["tiers"].items():
            for field in _NOW_OF_TIER:
                yield f"stepwell_{field}", (("pool", pool), ("tier", tier)), float(of_tier[field])
