"""Pages into and out of a device pool, whatever arrays it is cut into, beside a plain copy in the same run.

    python benchmarks/bench_device.py [--pages 64] [--layers 32] [--page-kib 1024] [--rounds 9] [--json] [--quick]

A scatter is queue_scatter (the copy into staging memory) and a drain, until the arrays are there; a gather is
queue_gather, a drain and its host views. Warm is the CPU time that compiling all shapes took, once. Rounds of all
arrangements are interleaved and medians are given: ratios within a run are sound, absolute figures of a shared machine
are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from stepwell.geometry import PageGeometry
from stepwell.tiers.device import DevicePool
from stepwell.tiers.device_queue import GatherTicket, ScatterTicket

ARRANGEMENTS = (
    "layer slot token head dim",
    "stream slot token head dim",
    "slot token head stream dim",
    "head slot token dim",
)
TOKENS, HEADS = 16, 8


class Bench:
    """One pool, and the pages that go through it."""

    def __init__(self, geometry: PageGeometry, axes: str, pages: int) -> None:
        self.slots = np.random.default_rng(1).permutation(4 * pages)[:pages]
        self.rows = np.random.default_rng(2).integers(0, 256, (pages, geometry.page_bytes), dtype=np.uint8)
        nbytes = self.rows.nbytes
        self.pool = DevicePool(geometry, 4 * pages, axes=axes, max_step_bytes=nbytes, max_outstanding_bytes=2 * nbytes)
        start = time.process_time()
        self.pool.warm()
        self.warm_seconds = time.process_time() - start

    def scatter(self) -> None:
        ticket = self.pool.queue_scatter(self.slots, self.rows, generation=0)
        assert isinstance(ticket, ScatterTicket)
        with self.pool.step() as handle:
            jax.block_until_ready(handle.arrays)

    def gather(self) -> None:
        ticket = self.pool.queue_gather(self.slots, generation=0)
        assert isinstance(ticket, GatherTicket)
        self.pool.drain()
        views = ticket.host_views()
        assert np.array_equal(views[0][0], self.rows[0])
        ticket.release()


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--page-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it runs: 8 pages of 2 layers, one round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pages, arguments.layers, arguments.page_kib, arguments.rounds = 8, 2, 16, 1
    head_dim = arguments.page_kib * 1024 // (arguments.layers * 2 * TOKENS * HEADS * 2)
    geometry = PageGeometry(
        model="bench", revision="1", layers=arguments.layers, kv_heads=HEADS, head_dim=head_dim, dtype="bfloat16",
        page_tokens=TOKENS,
    )  # fmt: skip
    benches = {axes: Bench(geometry, axes, arguments.pages) for axes in ARRANGEMENTS}
    rows = benches[ARRANGEMENTS[0]].rows
    target = np.empty_like(rows)
    times: dict[str, dict[str, list[float]]] = {axes: {"scatter": [], "gather": []} for axes in ARRANGEMENTS}
    copies = []
    for bench in benches.values():
        bench.scatter()
        bench.gather()
    for _ in range(arguments.rounds):
        copies.append(seconds(lambda: np.copyto(target, rows)))
        for axes, bench in benches.items():
            times[axes]["scatter"].append(seconds(bench.scatter))
            times[axes]["gather"].append(seconds(bench.gather))
    copy = statistics.median(copies)
    results: dict[str, dict[str, float]] = {f"copy of {rows.nbytes >> 10} KiB": {"ms": copy * 1e3}}
    for axes, kinds in times.items():
        figures: dict[str, float] = {}
        for kind, taken in kinds.items():
            figures[f"{kind} ms"] = statistics.median(taken) * 1e3
            figures[f"{kind} / copy"] = statistics.median(taken) / copy
        results[axes] = figures | {"warm CPU s": benches[axes].warm_seconds}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for row, figures in results.items():
        print(f"{row:30s}", "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
