"""Measure the index from Python: match, insert, victims, probe, memory.

Run `python benchmarks/bench_index.py [--json]`. Beside each match stands the plainest code for the
same bytes (the tokens compared by numpy); a figure is the median of interleaved rounds, with the
10th and 90th percentile. A match includes the release of its lease; applying its touch, which the
index defers, is measured apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from stepwell import _core

PAGE_TOKENS = 16
HOST = 1
USABLE = 1 << HOST


def timed(call: Callable[[], object], *, rounds: int, calls: int = 1) -> list[float]:
    """Return microseconds a call, one figure a round."""
    out = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        out.append((time.perf_counter_ns() - start) / calls / 1e3)
    return out


def summary(figures: list[float]) -> dict[str, float]:
    low, median, high = np.percentile(figures, [10, 50, 90])
    return {
        "us": round(float(median), 3),
        "p10": round(float(low), 3),
        "p90": round(float(high), 3),
    }


def save(index: _core.Index, space: int, tokens: np.ndarray, keys: np.ndarray) -> None:
    """Claim and commit the whole chain."""
    batch = index.claim_absent(space, tokens, keys, 0, len(keys), USABLE)
    new = batch.outcomes[:, HOST] == 1
    pages = batch.pages[new]
    index.commit_many(pages, HOST, np.ascontiguousarray(batch.numbers[new, HOST]))
    index.unpin_pages(pages)


def random_keys(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 256, (n, 32), dtype=np.uint8)


def fill(index: _core.Index, space: int, rng: np.random.Generator, nodes: int, pages: int) -> None:
    """Add chains of `pages` pages until the tree has `nodes` edges more."""
    for _ in range(nodes):
        tokens = rng.integers(0, 128_000, pages * PAGE_TOKENS, dtype=np.int32)
        save(index, space, tokens, random_keys(rng, pages))


def bench_match(rng: np.random.Generator) -> dict[str, object]:
    index = _core.Index(PAGE_TOKENS)
    index.add_slots(HOST, 0, 1_000_000)
    space = index.open_namespace()
    fill(index, space, rng, 100_000, 2)
    out: dict[str, object] = {"nodes": index.nodes()}
    for length in (1024, 8192, 32768, 131072):
        tokens = rng.integers(0, 128_000, length, dtype=np.int32)
        keys = random_keys(rng, length // PAGE_TOKENS)
        save(index, space, tokens, keys)
        query = tokens.copy()
        other = tokens.copy()

        def match(query: np.ndarray = query) -> None:
            index.release(index.match_and_pin(space, query, USABLE).lease)

        def plainest(query: np.ndarray = query, other: np.ndarray = other) -> None:
            np.array_equal(query, other)

        index.rank_order(HOST)  # applies the log of touches
        calls = max(10, 200_000 // length)
        ours, plain, touch = [], [], []
        for _ in range(41):
            ours += timed(match, rounds=1, calls=calls)
            plain += timed(plainest, rounds=1, calls=calls)
        pages = length // PAGE_TOKENS
        for _ in range(21):
            index.release(index.match_and_pin(space, query, USABLE).lease)
            touch += timed(lambda: index.claim_victims(HOST, 0), rounds=1)
        out[f"match_and_release_{length}"] = summary(ours)
        out[f"array_equal_{length}"] = summary(plain)
        out[f"touch_ns_a_page_{length}"] = round(summary(touch)["us"] * 1e3 / pages, 1)
    return out


def bench_insert(rng: np.random.Generator) -> dict[str, object]:
    index = _core.Index(PAGE_TOKENS)
    index.add_slots(HOST, 0, 1_000_000)
    space = index.open_namespace()
    fill(index, space, rng, 100_000, 2)
    claims, commits = [], []
    for _ in range(31):
        tokens = rng.integers(0, 128_000, 131072, dtype=np.int32)
        keys = random_keys(rng, 8192)
        index.prepare(8192)  # as the keeper does
        start = time.perf_counter_ns()
        batch = index.claim_absent(space, tokens, keys, 0, 8192, USABLE)
        claims.append((time.perf_counter_ns() - start) / 1e3)
        pages, numbers = batch.pages, np.ascontiguousarray(batch.numbers[:, HOST])
        start = time.perf_counter_ns()
        index.commit_many(pages, HOST, numbers)
        commits.append((time.perf_counter_ns() - start) / 1e3)
        index.unpin_pages(pages)
    return {"insert_128k": summary(claims), "commit_8192_one_by_one": summary(commits)}


def bench_million(rng: np.random.Generator) -> dict[str, object]:
    index = _core.Index(PAGE_TOKENS)
    index.add_slots(HOST, 0, 1_048_576)
    space = index.open_namespace()
    some_keys = []
    for _ in range(1_000_000 // 1000):
        tokens = rng.integers(0, 128_000, 1000 * PAGE_TOKENS, dtype=np.int32)
        keys = random_keys(rng, 1000)
        some_keys.append(keys[rng.integers(0, 1000)])
        save(index, space, tokens, keys)
    probe_keys = np.ascontiguousarray(np.stack(some_keys))
    order = rng.permutation(len(probe_keys))
    probe_keys = np.ascontiguousarray(probe_keys[order])
    probe = timed(lambda: index.probe(probe_keys, 1, USABLE), rounds=101)
    victims = []
    for _ in range(51):
        start = time.perf_counter_ns()
        pages, _, numbers = index.claim_victims(HOST, 1000)
        victims.append((time.perf_counter_ns() - start) / 1e3)
        index.keep_many(pages, HOST, numbers)
    return {
        "pages": index.pages(),
        "bytes_a_page": round(index.bytes() / index.pages(), 1),
        "probe_1000_keys": summary(probe),
        "victims_1000_of_1M": summary(victims),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    results = {**bench_match(rng), **bench_insert(rng), **bench_million(rng)}
    if arguments.json:
        print(json.dumps(results))
        return
    for name, figure in results.items():
        print(f"{name:28} {figure}")


if __name__ == "__main__":
    main()
