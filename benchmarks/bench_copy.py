"""Measure gather, scatter and checksummed copies against the limit of the same run.

The limit is a non-temporal copy of as many contiguous bytes. Variants take turns within a round;
figures are medians over the rounds. Prints JSON: GB/s and the ratio to the limit, for each size
of piece.

    python benchmarks/bench_copy.py [--rounds 11] [--mib 64]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stepwell import _core

PIECES = (1024, 16 * 1024, 64 * 1024, 2 * 1024 * 1024)
STREAMS = 2
POOL_MIB = 512


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def layers_for(piece: int) -> int:
    """Pages of about 2 MiB, but no more than 64 layers and no fewer than one."""
    return max(1, min(64, 2 * 1024 * 1024 // (STREAMS * piece)))


def layer_first_pool(memory: npt.NDArray[np.uint8], piece: int) -> tuple[_core.Pool, int, int]:
    """Lay a pool [layers, streams, slots, piece] over memory; return it, slots, page bytes."""
    layers = layers_for(piece)
    count = layers * STREAMS
    slots = memory.size // (count * piece)
    address = memory.__array_interface__["data"][0]
    base = np.array([address + i * slots * piece for i in range(count)], np.uint64)
    signed = np.full(count, piece, np.int64)
    zero, one = np.zeros(count, np.int64), np.ones(count, np.uint32)
    shape = _core.PageShape([STREAMS * piece] * layers, bytes(32))
    size = np.full(count, piece, np.uint64)
    pool = _core.Pool(shape, STREAMS, base, signed, zero, zero, one, one, size, slots, True)
    return pool, slots, count * piece


def measure(
    piece: int, memory: npt.NDArray[np.uint8], flat: npt.NDArray[np.uint8], rounds: int
) -> dict[str, object]:
    pool, slots, page_bytes = layer_first_pool(memory, piece)
    pages = flat.reshape(-1)[: flat.size // page_bytes * page_bytes].reshape(-1, page_bytes)
    order = np.random.default_rng(0).permutation(slots)[: len(pages)].tolist()
    pages = pages[: len(order)]
    total = pages.size
    rows = memory[: slots * page_bytes].reshape(-1, slots, piece)
    contiguous, target = memory[:total], pages.reshape(-1)

    def over_slots(copy: Callable[[int, npt.NDArray[np.uint8]], object]) -> Callable[[], None]:
        def work() -> None:
            for page, slot in zip(pages, order, strict=True):
                copy(slot, page)

        return work

    def by_numpy(slot: int, page: npt.NDArray[np.uint8]) -> None:
        page.reshape(-1, piece)[:] = rows[:, slot]

    variants: dict[str, Callable[[], object]] = {
        "limit": lambda: _core.stream_copy(target, contiguous),
        "memcpy": lambda: np.copyto(target, contiguous),
        "crc32c_copy": lambda: _core.crc32c_copy(target, contiguous),
        "crc32c": lambda: _core.crc32c(contiguous),
        "gather": over_slots(pool.gather),
        "gather_unchecked": over_slots(pool.gather_unchecked),
        "gather_numpy": over_slots(by_numpy),
        "scatter": over_slots(pool.scatter),
        "scatter_unchecked": over_slots(pool.scatter_unchecked),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        work()
    for _ in range(rounds):
        for name, work in variants.items():
            times[name].append(seconds(work))
    speed = {name: total / statistics.median(taken) / 1e9 for name, taken in times.items()}
    return {
        "piece_bytes": piece,
        "page_bytes": page_bytes,
        "copied_bytes": total,
        "gb_per_s": {name: round(value, 2) for name, value in speed.items()},
        "of_limit": {name: round(value / speed["limit"], 2) for name, value in speed.items()},
        "limit_spread": round(max(times["limit"]) / min(times["limit"]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mib", type=int, default=64, help="bytes a variant copies in a round")
    options = parser.parse_args()
    memory = np.full(POOL_MIB << 20, 1, np.uint8)
    flat = np.full(options.mib << 20, 2, np.uint8)
    result = {
        "machine": platform.machine(),
        "crc32c": _core.crc32c_implementation(),
        "rounds": options.rounds,
        "pieces": [measure(piece, memory, flat, options.rounds) for piece in PIECES],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
