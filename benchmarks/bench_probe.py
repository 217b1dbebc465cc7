"""Measure what a probe costs a key: the first one, one that is repeated, and a get's end of what it keeps.

Run `python benchmarks/bench_probe.py [--json]`. Figures are microseconds a key; the median of interleaved rounds, with
the 10th and 90th percentile. Beside them stands the look-up of the same keys that pins and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from bench_index import HOST, USABLE, random_keys

from stepwell import _core

PAGES = 1 << 20
RUN = 8192
ROUNDS = 41
KV = 1


def filled(rng: np.random.Generator) -> tuple[_core.Index, np.ndarray]:
    """Return an index of a million pages in one tier, chains of RUN pages, and their keys."""
    index = _core.Index(16)
    index.add_slots(HOST, 0, PAGES)
    index.set_epoch(0)
    keys = random_keys(rng, PAGES)
    for first in range(0, PAGES, RUN):
        batch = index.claim_absent_keys(keys[first : first + RUN], KV, 0, b"", USABLE)
        index.commit_many(batch.pages, HOST, np.ascontiguousarray(batch.numbers[:, HOST]))
        index.unpin_pages(batch.pages)
    return index, keys.reshape(-1, RUN, 32)


def measure() -> dict[str, dict[str, float]]:
    """Return each figure: median, 10th and 90th percentile."""
    rng = np.random.default_rng(1)
    index, chains = filled(rng)
    figures: dict[str, list[float]] = {}
    all_came = np.ones(RUN, np.bool_)

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        call()
        figures.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e3 / RUN)

    for number in rng.permutation(len(chains))[:ROUNDS]:
        keys = chains[number]
        timed("look up", lambda keys=keys: index.probe(keys, KV, USABLE))
        for name in ("first", "repeated"):
            found = index.match_keys_and_pin(keys, KV, USABLE)
            timed(f"keep, {name}", lambda lease=found.lease: index.keep_until(lease, 0.0, 1.0))
            index.release(found.lease)
        timed("match, pin, release", lambda keys=keys: index.release(index.match_keys_and_pin(keys, KV, USABLE).lease))
        timed("spend", lambda keys=keys: index.spend(keys, KV, all_came))
    assert index.courtesies() == 0
    return {
        name: dict(zip(("us", "p10", "p90"), np.percentile(each, [50, 10, 90]).round(4).tolist(), strict=True))
        for name, each in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    for name, figure in found.items():
        print(f"{name:22} {figure['us']:.4f} us a key ({figure['p10']:.4f} to {figure['p90']:.4f})")


if __name__ == "__main__":
    main()
