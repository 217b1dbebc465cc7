"""Measure what selective disk writes save and cost on a trace: hits and bytes written, against write-through.

Run `python benchmarks/bench_selective.py --trace FILE [--quick] [--json]` with a Mooncake trace (.jsonl or .jsonl.xz).
One small page a block, so figures are counts: each request is matched, loaded, and saved where it was not whole. Sizes
are shares of the trace's distinct blocks. The limit beside them is a store that holds everything. Without a trace a
stream of prompts is made, half of them one-off.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.store import PageStore

PAGE_BYTES = 64
SLOT_BYTES = {"shared": 276, "disk": 724}  # what a page of 64 bytes takes with its record, about
VOLUME_OVERHEAD = 96 << 10


@dataclass(frozen=True)
class Outcome:
    hit_ratio: float
    shared_hits: int
    disk_hits: int
    disk_pages_written: int
    shared_pages: int
    disk_pages: int


def read_trace(path: Path, most: int) -> list[np.ndarray]:
    """Read the block ids of each request."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        lines = (line for line, _ in zip(file, range(most), strict=False))
        return [np.array(json.loads(line)["hash_ids"], dtype=np.int32) for line in lines]


def made_up(requests: int) -> list[np.ndarray]:
    """Make prompts of 20 blocks: half of them one-off, half the next turn of one of 50 conversations."""
    rng = np.random.default_rng(0)
    turns = np.zeros(50, dtype=np.int32)
    out = []
    for number in range(requests):
        if number % 2:
            out.append(np.arange(20, dtype=np.int32) + 10_000_000 + number * 20)
            continue
        user = int(rng.integers(50))
        turns[user] += 1
        out.append(np.arange(4 * turns[user], dtype=np.int32) + user * 100_000)
    return out


def replay(
    prompts: list[np.ndarray], *, shares: tuple[float, float], write: Literal["through", "selective"]
) -> Outcome:
    """Serve the prompts one after another through a store of a shared and a disk tier."""
    distinct = len(np.unique(np.concatenate(prompts)))
    geometry = PageGeometry.opaque(PAGE_BYTES, page_tokens=1, fingerprint={"bench": "selective"})
    pages = {name: max(64, int(distinct * share)) for name, share in zip(("shared", "disk"), shares, strict=True)}
    shared_bytes, disk_bytes = (VOLUME_OVERHEAD + pages[name] * SLOT_BYTES[name] for name in ("shared", "disk"))
    with (
        tempfile.TemporaryDirectory(prefix="sw-bench-", dir="/dev/shm") as shared,
        tempfile.TemporaryDirectory(prefix="sw-bench-") as disk,
        PageStore(
            StoreConfig(
                geometry=geometry,
                shared=SharedTier(shared_bytes, shared, volume_bytes=shared_bytes),
                disk=DiskTier(disk_bytes, disk, volume_bytes=disk_bytes, direct_io=False, write=write),
            )
        ) as store,
    ):
        longest = max(prompt.size for prompt in prompts)
        rows = store.lend(np.zeros((longest, PAGE_BYTES), np.uint8))
        for prompt in prompts:
            with store.match(prompt) as match:
                whole = match.pages == prompt.size
                store.load(match, into=rows[: match.pages]).wait()
            if not whole:
                store.save(prompt, source=rows[: prompt.size]).transfer.wait()
            store.flush()
        stats = store.stats()
        return Outcome(
            hit_ratio=round(sum(stats.hit_pages.values()) / stats.lookup_pages, 4),
            shared_hits=stats.hit_pages.get("shared", 0),
            disk_hits=stats.hit_pages.get("disk", 0),
            disk_pages_written=stats.tiers["disk"].bytes_written // PAGE_BYTES,
            shared_pages=stats.tiers["shared"].capacity,
            disk_pages=stats.tiers["disk"].capacity,
        )


def limit(prompts: list[np.ndarray]) -> float:
    """Return the hit ratio of a store that holds everything."""
    seen: set[int] = set()
    hits = accesses = 0
    for prompt in prompts:
        known = np.array([int(block) in seen for block in prompt])
        hits += int(known.size if known.all() else known.argmin())
        accesses += prompt.size
        seen.update(prompt.tolist())
    return round(hits / accesses, 4)


def measure(prompts: list[np.ndarray], sizes: tuple[tuple[float, float], ...]) -> Iterator[dict[str, object]]:
    most = limit(prompts)
    for shares in sizes:
        for write in ("through", "selective"):
            outcome = replay(prompts, shares=shares, write=write)
            yield {"shared, disk": shares, "write": write, "limit": most, **vars(outcome)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    requests = 200 if args.quick else args.requests
    prompts = made_up(requests) if args.trace is None else read_trace(args.trace, requests)
    sizes = ((0.1, 0.4),) if args.quick else ((0.02, 0.08), (0.1, 0.4), (0.1, 0.9), (0.25, 0.9))
    rows = list(measure(prompts, sizes))
    if args.json:
        trace = "made up" if args.trace is None else args.trace.name
        print(json.dumps({"trace": trace, "requests": len(prompts), "runs": rows}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
