"""The SGLang backend's metrics: counters advance by what is new, and nothing of them is raised into SGLang.

Lines are those of SGLang 0.5.23.
"""

from __future__ import annotations

import copy
import logging
import types
from collections import Counter
from typing import Any

import pytest

from stepwell import Limit
from stepwell.adapters.sglang import metrics
from stepwell.adapters.sglang.memory import warnings_of
from stepwell.adapters.sglang.metrics import BOUNDS, Calls, Exporter, rank_label

GIB = 1 << 30


class _Family:
    """A metric of a stand-in of prometheus-client: it refuses what the real one refuses."""

    def __init__(self, registry: dict[str, Any], name: str, documentation: str, labelnames: Any, **_: Any) -> None:
        if name in registry:
            raise ValueError(f"Duplicated timeseries in CollectorRegistry: {name}")
        registry[name] = self
        self.labelnames = tuple(labelnames)
        self.values: Counter[tuple[str, ...]] = Counter()
        self.observed: dict[tuple[str, ...], list[float]] = {}
        self.fails = False

    def labels(self, **labels: str) -> Any:
        assert set(labels) == set(self.labelnames)
        key = tuple(labels[name] for name in self.labelnames)

        def inc(value: float) -> None:
            assert value > 0
            if self.fails:
                raise OSError(28, "No space left on device")
            self.values[key] += value

        def put(value: float) -> None:
            self.values[key] = value

        self.values.setdefault(key, 0)
        return types.SimpleNamespace(inc=inc, set=put, observe=self.observed.setdefault(key, []).append)


class Client(types.ModuleType):
    """The stand-in of the module."""

    def __init__(self) -> None:
        super().__init__("prometheus_client")
        self.registry: dict[str, _Family] = {}

    def _make(self, *given: Any, **more: Any) -> _Family:
        return _Family(self.registry, *given, **more)

    Counter = Gauge = Histogram = _make


def snapshot(hits: int = 0, *, resident: int = 0, epoch_changes: int = 0) -> metrics.Snapshot:
    tier = {
        "capacity_bytes": 100, "resident_bytes": resident, "read_bytes": hits * 2, "written_bytes": 7,
        "expected_seconds": 0.25, "too_slow": True, "serving": True,
    }  # fmt: skip
    pool = {
        "hit_tokens": {"shared": hits}, "miss_tokens": {"absent": 5, "slow": 2}, "shed_tokens": {"loads": 0},
        "evicted_tokens": {}, "saved_tokens": 3, "refused_tokens": 0, "checksum_failures": 1, "io_errors": 0,
        "queued_units": 4, "tiers": {"shared": tier},
    }  # fmt: skip
    return {"epoch_changes": epoch_changes, "pools": {"kv": pool}}


def test_counters_advance_by_what_is_new_and_gauges_say_what_is() -> None:
    client = Client()
    exporter = Exporter("tp0", client=client)
    exporter.publish(snapshot(8, resident=60), {"kv": {"get": [0.5, 0.25]}})
    exporter.publish(snapshot(8, resident=50), {"kv": {"get": []}})
    exporter.publish(snapshot(20, resident=40, epoch_changes=1), {})
    found = client.registry
    assert found["stepwell_hit_tokens"].values == {("kv", "shared", "tp0"): 20}
    assert found["stepwell_read_bytes"].values == {("kv", "shared", "tp0"): 40}
    assert found["stepwell_miss_tokens"].values == {("kv", "absent", "tp0"): 5, ("kv", "slow", "tp0"): 2}
    assert found["stepwell_shed_tokens"].values == {("kv", "loads", "tp0"): 0}, "there before its first count"
    assert found["stepwell_resident_bytes"].values == {("kv", "shared", "tp0"): 40}
    assert found["stepwell_too_slow"].values == {("kv", "shared", "tp0"): 1}
    assert found["stepwell_epoch_changes"].values == {("tp0",): 1}
    assert found["stepwell_call_seconds"].observed == {("kv", "get", "tp0"): [0.5, 0.25]}


def test_a_backend_that_is_attached_again_goes_on_counting_where_the_last_one_ended() -> None:
    client = Client()
    first = Exporter("tp0", client=client)
    first.publish(snapshot(8, resident=60), {})
    first.close()
    assert client.registry["stepwell_resident_bytes"].values == {("kv", "shared", "tp0"): 0}
    second = Exporter("tp0", client=client)  # its stores count from 0
    second.publish(snapshot(2, resident=10), {})
    assert client.registry["stepwell_hit_tokens"].values == {("kv", "shared", "tp0"): 10}
    assert client.registry["stepwell_resident_bytes"].values == {("kv", "shared", "tp0"): 10}


def test_ranks_of_one_process_count_side_by_side() -> None:
    client = Client()
    for rank in ("tp0", "tp1"):
        Exporter(rank, client=client).publish(snapshot(8), {})
    assert client.registry["stepwell_hit_tokens"].values == {("kv", "shared", "tp0"): 8, ("kv", "shared", "tp1"): 8}


def test_a_name_that_somebody_else_has_costs_the_metrics_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.Gauge("stepwell_serving", "somebody's", ())
    with caplog.at_level(logging.WARNING, "stepwell"):
        exporter = Exporter("tp0", client=client)
    assert not exporter.is_registered
    assert "Duplicated timeseries" in caplog.text
    exporter.publish(snapshot(8), {"kv": {"get": [1.0]}})
    exporter.close()


def test_a_full_disk_under_the_metrics_ends_them_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    exporter = Exporter("tp0", client=client)
    client.registry["stepwell_hit_tokens"].fails = True
    with caplog.at_level(logging.WARNING, "stepwell"):
        exporter.publish(snapshot(8), {})
        exporter.publish(snapshot(9), {})
    assert caplog.text.count("No space left on device") == 1
    assert not exporter.is_registered


def test_without_prometheus_client_there_are_no_metrics_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    exporter = Exporter("tp0")
    assert not exporter.is_registered
    exporter.publish(snapshot(8), {})
    exporter.close()


def test_prometheus_client_itself_takes_them_and_shows_them() -> None:
    client = pytest.importorskip("prometheus_client")
    exporter = Exporter("tp3.pp1")
    assert exporter.is_registered
    seen = copy.deepcopy(snapshot(8, resident=60))
    exporter.publish(seen, {"kv": {"get": [0.002, 20.0]}})
    text = client.generate_latest().decode()
    assert 'stepwell_hit_tokens_total{pool="kv",rank="tp3.pp1",tier="shared"} 8.0' in text
    assert 'stepwell_resident_bytes{pool="kv",rank="tp3.pp1",tier="shared"} 60.0' in text
    assert 'stepwell_call_seconds_bucket{call="get",le="0.003",pool="kv",rank="tp3.pp1"} 1.0' in text
    assert 'stepwell_call_seconds_count{call="get",pool="kv",rank="tp3.pp1"} 2.0' in text
    again = Exporter("tp3.pp1")
    assert again.is_registered, "the registry has them already: they are used again"


def test_names_have_underscores_alone_and_begin_with_stepwell() -> None:
    client = Client()
    Exporter("tp0", client=client)
    assert client.registry
    assert all(name.startswith("stepwell_") and name.replace("_", "").isalpha() for name in client.registry)


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_each_call_once_within_its_bound() -> None:
    calls = Calls(page_bytes=1000)
    for seconds in (0.0, BOUNDS[0], BOUNDS[3], 100.0):
        calls.note("exists", seconds)
    found = calls.histograms()["exists"]
    assert found["count"] == 4
    assert found["seconds"] == pytest.approx(100.0 + BOUNDS[0] + BOUNDS[3])
    assert [found["buckets"][str(bound)] for bound in BOUNDS] == [2, 2, 2] + [3] * (len(BOUNDS) - 3)
    assert found["buckets"]["+Inf"] == 4
    assert calls.take_durations()["exists"] == [0.0, BOUNDS[0], BOUNDS[3], 100.0]
    assert calls.take_durations()["exists"] == []


def test_batches_are_told_once_and_their_bandwidth_is_of_what_was_moved() -> None:
    calls = Calls(page_bytes=1_000_000)
    calls.note("get", 0.5, pages=10, moved=4)
    calls.note("get", 0.0, pages=1, moved=1)
    first, second = calls.take_batches("get")
    assert (first.pages, first.nbytes, first.gigabytes_per_second) == (10, 4_000_000, 0.008)
    assert second.gigabytes_per_second == 0.0, "a clock that did not move says nothing"
    assert calls.take_batches("get") == []


def test_what_nobody_asks_for_is_bounded() -> None:
    calls = Calls(page_bytes=1)
    for number in range(10_000):
        calls.note("get", 0.0, pages=number + 1)
    assert [batch.pages for batch in calls.take_batches("get")] == list(range(10_000 - 4096 + 1, 10_001))
    assert len(calls.take_durations()["get"]) == 4096
    assert calls.histograms()["get"]["count"] == 10_000


@pytest.mark.parametrize(
    ("ranks", "label"),
    [
        ({"tp_rank": 0}, "tp0"),
        ({"tp_rank": 3, "pp_rank": 1, "pp_size": 2}, "tp3.pp1"),
        ({"tp_rank": 1, "attn_cp_rank": 1, "attn_cp_size": 2, "dp_rank": 2}, "tp1.cp1.dp2"),
    ],
)
def test_a_rank_has_a_name_of_its_own(ranks: dict[str, int], label: str) -> None:
    given = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dp_rank": 0, **ranks}
    assert rank_label(types.SimpleNamespace(**given)) == label


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "ranks", "shared", "mode", "said"),
    [
        (4, 1, 40, "cache", []),
        (4, 1, None, "cache", []),
        (4, 1, 7, "cache", ["7.0 GiB shared beside a cache of 4.0 GiB"]),
        (4, 2, 12, "cache", ["12.0 GiB shared beside a cache of 8.0 GiB"]),
        (4, 1, 7, "buffer_only", []),
        (4, 1, None, "buffer_only", ["no shared tier"]),
        (40, 1, 60, "buffer_only", ["40.0 GiB of 1 rank(s) and 60.0 GiB shared are more than 64.0 GiB"]),
        (20, 4, None, "cache", ["80.0 GiB of 4 rank(s) and 0 MiB shared are more than 64.0 GiB"]),
        (40, 1, 60, "cache", ["are more than 64.0 GiB (MemTotal)", "60.0 GiB shared beside a cache of 40.0 GiB"]),
    ],
)
def test_sizes_that_do_not_go_together_are_named(
    host: int, ranks: int, shared: int | None, mode: str, said: list[str]
) -> None:
    found = warnings_of(
        host * GIB,
        ranks=ranks,
        shared_bytes=None if shared is None else shared * GIB,
        mode=mode,
        memory=Limit(64 * GIB, "MemTotal"),
    )
    assert len(found) == len(said)
    for finding, part in zip(found, said, strict=True):
        assert finding.verdict == "warn"
        assert part in finding.found
        assert finding.remedy
