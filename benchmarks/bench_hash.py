"""Measure the prefix-hash chain: ns a token, from arrays and lists, beside hashlib.

Variants take turns within a round; figures are medians over the rounds. Prints JSON.

    python benchmarks/bench_hash.py [--rounds 11] [--tokens 131072]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.hashing import as_tokens, prefix_hashes

PAGES = (16, 64)


def by_hashlib(tokens: npt.NDArray[np.int32], page_tokens: int) -> list[bytes]:
    data, step, prior, out = memoryview(tokens).cast("B"), 4 * page_tokens, b"", []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(prior)
        digest.update(data[start : start + step])
        prior = digest.digest()
        out.append(prior)
    return out


def measure(page_tokens: int, tokens: npt.NDArray[np.int32], rounds: int) -> dict[str, object]:
    listed = tokens.tolist()
    variants: dict[str, Callable[[], object]] = {
        "chain": lambda: _core.hash_chain(None, tokens, page_tokens),
        "prefix_hashes_array": lambda: prefix_hashes(tokens, page_tokens=page_tokens),
        "prefix_hashes_list": lambda: prefix_hashes(listed, page_tokens=page_tokens),
        "as_tokens_list": lambda: as_tokens(listed),
        "hashlib": lambda: by_hashlib(tokens, page_tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, work in variants.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(taken) / tokens.size * 1e9 for name, taken in times.items()}
    return {
        "page_tokens": page_tokens,
        "ns_per_token": {name: round(value, 2) for name, value in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=131072)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 128_000, options.tokens, dtype=np.int32)
    result = {
        "machine": platform.machine(),
        "sha256": _core.sha256_implementation(),
        "tokens": options.tokens,
        "pages": [measure(page_tokens, tokens, options.rounds) for page_tokens in PAGES],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
