"""Use one store from eight threads, close it under them, open it again.

    python tests/store_stress.py [SECONDS [THREADS [SEED]]]

Threads save, load, match, pin, ask by key, evict, forget, verify and change the epoch. What they are served is what was
saved; a store that was closed says so; between two lives nothing is left and all adds up.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from stepwell.errors import LeaseClosedError, StoreClosedError
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.store import PageStore
from store_kit import AXES, GEOMETRY, PAGE_BYTES, PAGE_TOKENS, VOLUME_BYTES, Directories, assert_whole, chain, stamps

CHAINS, MOST_PAGES, LIFE_SECONDS = 24, 12, 3.0
TOKENS = [chain(number, MOST_PAGES) for number in range(CHAINS)]
ROWS = [stamps(tokens) for tokens in TOKENS]
KEYS = [prefix_hashes(tokens, page_tokens=PAGE_TOKENS) for tokens in TOKENS]


class Worker:
    """One thread, with a pool of its own in each life of the store."""

    def __init__(self, seed: int, done: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.rows = np.zeros((MOST_PAGES, PAGE_BYTES), np.uint8)
        self.done = done

    def live(self, store: PageStore) -> None:
        """Use the store until it is closed."""
        shape = (MOST_PAGES, GEOMETRY.layers, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        with contextlib.suppress(StoreClosedError):
            pool = store.lend(self.rows.reshape(shape), axes=AXES)
            while True:
                with contextlib.suppress(LeaseClosedError):  # closed between a match and its load
                    self.step(store, pool)

    def step(self, store: PageStore, pool: object) -> None:
        """Do one thing."""
        number, pages, roll = self.rng.randrange(CHAINS), self.rng.randrange(1, MOST_PAGES + 1), self.rng.random()
        tokens = TOKENS[number][: pages * PAGE_TOKENS]
        if roll < 0.35:
            self.rows[:pages] = ROWS[number][:pages]
            result = store.save(tokens, source=pool[:pages])  # type: ignore[index]
            assert result.transfer.wait(60.0)
            self.done["saved"] += result.transfer.ok_pages
        elif roll < 0.7:
            with store.match(tokens) as match:
                self.rows[:] = 0xEE
                deadline = 0.001 if roll < 0.4 else None
                order = "layer" if roll < 0.55 else "page"
                transfer = store.load(match, into=pool[: match.pages], order=order, deadline=deadline)  # type: ignore[index]
                assert transfer.wait(60.0) or deadline is not None
                self.check(number, np.flatnonzero(transfer.ok))
        elif roll < 0.78:
            self.rows[:] = 0xEE
            ok = store.load_keys(KEYS[number][:pages], into=pool[:pages])  # type: ignore[index]
            self.check(number, np.flatnonzero(ok))
        elif roll < 0.84:
            store.evict(self.rng.choice([Tier.HOST, Tier.SHARED, Tier.DISK]), pages)
        elif roll < 0.88:
            store.forget(tokens)
        elif roll < 0.91:
            store.pin(tokens, ttl=0.05).close()
        elif roll < 0.94:
            store.probe(KEYS[number][:pages], lease=0.01)
        elif roll < 0.96:
            store.state(KEYS[number][0].tobytes())
        elif roll < 0.98:
            assert store.check() == ""
        elif roll < 0.985:
            store.set_epoch(self.rng.randrange(2))
        elif roll < 0.99:
            store.verify()
        else:
            store.stats()

    def check(self, number: int, ok: np.ndarray) -> None:
        assert np.array_equal(self.rows[ok], ROWS[number][ok]), "wrong bytes were served"
        self.done["right"] += int(ok.size)


def run(seconds: float, threads: int, seed: int, base: Path) -> Counter[str]:
    """Let the store live several times; raise what a thread raised."""
    config = Directories(base / "shared", base / "disk").config(
        host=16 * 4096, shared=3 * VOLUME_BYTES, disk=4 * VOLUME_BYTES
    )
    done: Counter[str] = Counter()
    workers = [Worker(seed * 1000 + number, done) for number in range(threads)]
    failures: list[BaseException] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and not failures:
        store = PageStore(config)

        def live(worker: Worker, store: PageStore = store) -> None:
            try:
                worker.live(store)
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=live, args=(worker,)) for worker in workers]
        for thread in running:
            thread.start()
        stop = threading.Event()
        stop.wait(min(LIFE_SECONDS, max(0.0, until - time.monotonic())))
        if done["lives"] % 2 == 0:
            store.close()  # under them
        else:
            assert store.flush(60.0)
            store.close()
        for thread in running:
            thread.join()
        done["lives"] += 1
        with PageStore(config) as again:
            assert_whole(again)
            assert again.stats().checksum_failures == 0
    if failures:
        raise failures[0]
    return done


def main() -> None:
    """Run for as long as asked for, and print what was done."""
    faulthandler.enable()
    seconds, threads, seed = (*map(float, sys.argv[1:]), *(60.0, 8.0, 1.0)[len(sys.argv) - 1 :])
    base = Path(tempfile.mkdtemp(prefix="stepwell-stress-", dir="/dev/shm"))
    faulthandler.dump_traceback_later(seconds + 300, exit=True)
    try:
        print(dict(run(seconds, int(threads), int(seed), base)))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
