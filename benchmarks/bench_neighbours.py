"""Time what a process has of its neighbours' pages: how soon it finds them, how fast they come, what a look-up costs.

    python benchmarks/bench_neighbours.py [--quick] [--page-kib 2048] [--pages 32] [--rounds 7] [--output FILE]

latency: from the end of a save in another process to the first match that finds it, milliseconds, with the keepers as
they are.
load: payload GB/s, medians of interleaved rounds: own shared memory to the pool; a neighbour's to the pool, by host
memory (two copies, verified twice); the same again from host memory; beside a non-temporal copy of the same bytes, and
one read of these bytes by pread, which is how a neighbour's are read, and through a mapping that is new.
match: microseconds of a look-up that misses, with no neighbour's page known and with many.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stepwell import _core
from stepwell.config import SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def config(directory: str, page_bytes: int, pages: int, **others: object) -> StoreConfig:
    volume = page_bytes * (pages + 1) + (1 << 20) + pages * 4096
    return StoreConfig(
        geometry=PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint={"benchmark": "neighbours"}),
        shared=SharedTier(capacity=4 * volume, path=directory, volume_bytes=volume, share=volume),
        **others,  # type: ignore[arg-type]
    )


def read_pages(descriptor: int, pages: np.ndarray) -> None:
    for number, page in enumerate(pages):
        os.preadv(descriptor, [page], number * page.size)


def tokens_of(number: int, pages: int) -> np.ndarray:
    return np.arange(pages, dtype=np.int32) + number * 1_000_000


def publisher(directory: str, page_bytes: int) -> None:
    """Save one page for each line, and say when it was there."""
    with PageStore(config(directory, page_bytes, 512)) as store:
        lent = store.lend(np.ones((1, page_bytes), np.uint8))
        print("ready", flush=True)
        for line in sys.stdin:
            assert store.save(tokens_of(int(line), 1), source=lent[:]).transfer.wait()
            print(time.monotonic(), flush=True)


def latencies(directory: str, rounds: int) -> list[float]:
    """Return milliseconds from publication to the first hit."""
    page_bytes = 64 << 10
    found = []
    arguments = [sys.executable, __file__, "--publisher", directory, "--page-kib", str(page_bytes >> 10)]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline().strip() == "ready"
        with PageStore(config(directory, page_bytes, 512)) as store:
            time.sleep(0.6)  # until the keeper has seen that it is not alone
            for number in range(rounds):
                time.sleep(0.001 * (number * 7 % 50))  # anywhere between two rounds of the keeper
                child.stdin.write(f"{number}\n")
                child.stdin.flush()
                published = float(child.stdout.readline())
                while not store.match(tokens_of(number, 1)).pages:
                    time.sleep(0.0005)
                found.append((time.monotonic() - published) * 1e3)
    finally:
        child.stdin.close()
        child.wait()
    return found


def loads(directory: str, page_bytes: int, pages: int, rounds: int) -> dict[str, float]:
    """Return GB/s by way."""
    total = page_bytes * pages
    figures: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        figures.setdefault(name, []).append(total / seconds / 1e9)

    source = np.random.default_rng(0).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    with (
        PageStore(config(directory, page_bytes, pages)) as owner,
        PageStore(config(directory, page_bytes, pages, staging=page_bytes * (pages + 1))) as reader,
    ):
        into = {store: store.lend(target) for store in (owner, reader)}

        def load(store: PageStore, number: int, expect: Tier) -> None:
            with store.match(tokens_of(number, pages)) as match:
                assert match.tiers == {expect: pages}, match
                transfer = store.load(match, into=into[store][:])
                transfer.wait()
                assert transfer.ok.all()

        for number in range(rounds + 1):
            assert owner.save(tokens_of(number, pages), source=owner.lend(source)[:]).transfer.wait()
            reader._tick()
            target.fill(0)
            figures_before = {name: list(values) for name, values in figures.items()}
            note("copy", timed(lambda: _core.stream_copy(target.reshape(-1), source.reshape(-1))))
            note("own shared -> pool", timed(partial(load, owner, number, Tier.SHARED)))
            note("neighbour -> host -> pool", timed(partial(load, reader, number, Tier.HOST)))
            assert np.array_equal(source, target)
            note("the same from host", timed(partial(load, reader, number, Tier.HOST)))
            [path] = [p for p in Path(directory).glob("v-*.vol") if p.stat().st_size > total][:1]
            with path.open("rb") as file:
                note("pread", timed(partial(read_pages, file.fileno(), target)))
                mapping = mmap.mmap(file.fileno(), total, prot=mmap.PROT_READ)
                fresh = np.frombuffer(mapping, np.uint8)
                note("new mapping", timed(partial(np.copyto, target.reshape(-1), fresh)))
                del fresh
                mapping.close()
            if number == 0:  # the first round pays for first touches
                figures = figures_before
            owner.clear()
            reader.clear()
    return {name: round(statistics.median(values), 2) for name, values in figures.items()}


def look_ups(directory: str, pages: int) -> dict[str, float]:
    """Return microseconds of a match of 1024 tokens that nobody has."""
    page_bytes = 4096
    figures = {}
    with (
        PageStore(config(directory, page_bytes, pages)) as owner,
        PageStore(config(directory, page_bytes, 64)) as reader,
    ):
        reader._tick()
        unknown = [tokens_of(1000 + i, 1024) for i in range(200)]
        figures["0 known"] = min(timed(lambda: [reader.match(t).close() for t in unknown]) for _ in range(5))
        lent = owner.lend(np.zeros((pages, page_bytes), np.uint8))
        owner.save(tokens_of(0, pages), source=lent[:]).transfer.wait()
        reader._tick()
        known = reader.stats().neighbours.pages
        figures[f"{known} known"] = min(timed(lambda: [reader.match(t).close() for t in unknown]) for _ in range(5))
    return {name: round(seconds / 200 * 1e6, 2) for name, seconds in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page-kib", type=int, default=2048)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", default=None)
    parser.add_argument("--publisher", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publisher is not None:
        publisher(options.publisher, options.page_kib << 10)
        return 0
    pages, rounds, published = (8, 3, 20) if options.quick else (options.pages, options.rounds, 200)
    root = Path(tempfile.mkdtemp(prefix="stepwell-bench-", dir="/dev/shm"))
    try:
        found = sorted(latencies(str(root / "latency"), published))
        result = {
            "benchmark": "neighbours",
            "page_kib": options.page_kib,
            "pages": pages,
            "rounds": rounds,
            "latency_ms": {
                "rounds": published,
                "p50": round(found[len(found) // 2], 1),
                "p95": round(found[len(found) * 95 // 100], 1),
                "max": round(found[-1], 1),
            },
            "load_gb_per_s": loads(str(root / "load"), options.page_kib << 10, pages, rounds),
            "match_us": look_ups(str(root / "match"), 2000 if options.quick else 100_000),
        }
    finally:
        shutil.rmtree(root)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
