"""What the doctor, the documentation and get_stats say of SGLang is so of the real one."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import sglang_here  # noqa: F401  # skips this module where SGLang is not

from stepwell.adapters.sglang import check

ROOT = Path(__file__).resolve().parents[4]


def test_the_installed_sglang_is_as_stepwell_uses_it() -> None:
    found = {each.subject: each for each in check.check_sglang()}
    parts = [f"SGLang {part}" for part in ("storage calls", "dynamic backend", "host pools", "configuration")]
    assert [found[part].found for part in (*parts, "SGLang weight updates")] == ["as stepwell uses them"] * 5
    assert found["SGLang"].verdict == "ok"


def test_every_flag_that_is_named_is_one_of_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = "".join((ROOT / name).read_text() for name in ("docs/sglang.md", "README.md")).replace("\\\n", " ")
    commands = [line for line in text.splitlines() if "sglang.launch_server" in line]
    flags = {flag for command in commands for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", command)}
    assert {"--hicache-size", "--hicache-storage-backend-extra-config", "--tp-size"} <= flags
    assert flags | {"--admin-api-key", "--hicache-mem-layout", "--dp-size"} <= set(parser._option_string_actions)


def test_sglangs_collector_takes_what_get_stats_returns() -> None:
    """unified_radix_cache.py:3702-3707, observability/metrics_collector.py:2382."""
    import prometheus_client
    from sglang.srt.observability.metrics_collector import StorageMetricsCollector

    from stepwell.adapters.sglang.storage import StepwellMetrics

    found = StepwellMetrics(prefetch_pgs=[4], prefetch_bandwidth=[2.5], stepwell={"pools": {}})
    assert not hasattr(found, "prefetch_stats")
    found.prefetch_stats = {}
    StorageMetricsCollector({"rank": "of this test"}).log_storage_metrics(found)
    text = prometheus_client.generate_latest().decode()
    assert 'sglang:prefetch_pgs_sum{rank="of this test"} 4.0' in text
    assert 'sglang:prefetch_bandwidth_sum{rank="of this test"} 2.5' in text
