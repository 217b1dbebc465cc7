"""Processes that the store's kill tests end: a zygote that forks them, before any store is opened in it.

The zygote reads a line `seed shared disk` for each child it is to fork, and answers with the child's pid; the child
answers with a line for each save once its transfer is done, and goes on. Between the two there is nothing but pipes.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np

from stepwell import health
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.index import Tier
from store_kit import GEOMETRY, PAGE_BYTES, PAGE_TOKENS, VOLUME_BYTES, Directories, Rig, chain, stamps

CHAINS, MOST_PAGES = 40, 12


def kill_config(shared: str, disk: str) -> StoreConfig:
    """Shared memory too small for all chains, a disk that holds them all: none is ever evicted from both."""
    return StoreConfig(
        geometry=GEOMETRY,
        host=16 * 4096,
        shared=SharedTier(VOLUME_BYTES, shared, volume_bytes=VOLUME_BYTES),
        disk=DiskTier("1MiB", disk, volume_bytes="1MiB"),
    )


def work(seed: int, shared: str, disk: str) -> None:
    """Save, load, evict for ever; say which chain is on which tiers up to where, before going on."""
    rng = random.Random(seed)
    rig = Rig(kill_config(shared, disk), slots=MOST_PAGES, keeper=True)
    while True:
        number, pages = rng.randrange(CHAINS), rng.randrange(1, MOST_PAGES + 1)
        roll = rng.random()
        if roll < 0.7:
            result = rig.save(chain(number, pages))
            if result.refused == 0 and result.pending == 0 and result.transfer.ok.all():
                os.write(1, f"{number} {pages}\n".encode())
        elif roll < 0.9:
            rig.load(chain(number, pages))
        else:
            rig.store.evict(Tier.SHARED, pages)


def zygote() -> None:
    """Fork a child for each line read; wait for its end before the next."""
    for line in sys.stdin:
        seed, shared, disk = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                work(int(seed), shared, disk)
            finally:
                os._exit(1)  # only an error ends the loop
        os.write(1, f"pid {pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


def truncate_world(when: str, shared: str, rounds: int) -> None:
    """Two threads load, two save, while this one truncates the volumes and mends their size. See test_store_kill.py."""
    # So many faults take a tier out of service, and then nothing is read there; this is about the faults.
    vars(health).update(MOST_ERRORS=1 << 30, QUARANTINE_FLOOR=1 << 30)
    if when == "before":
        faulthandler.enable()
    rig = Rig(Directories(Path(shared), Path("/nowhere")).config(shared=VOLUME_BYTES, disk=0), keeper=True)
    if when == "after":
        faulthandler.enable()
    failures: list[AssertionError] = []
    stop = threading.Event()
    turns = threading.Semaphore(0)  # one for each save and load that has ended
    loaded = [0]

    def run(seed: int, *, saves: bool) -> None:
        random = np.random.default_rng(seed)
        rows = np.zeros((MOST_PAGES, PAGE_BYTES), np.uint8)
        pool = rig.store.lend(
            rows.reshape(MOST_PAGES, GEOMETRY.layers, 2, PAGE_TOKENS, 2, 32), axes="slot layer stream token head dim"
        )
        try:
            while not stop.is_set():
                turns.release()
                tokens = chain(int(random.integers(CHAINS)), int(random.integers(1, MOST_PAGES + 1)))
                pages = tokens.size // PAGE_TOKENS
                if saves:
                    rows[:pages] = stamps(tokens)
                    rig.store.save(tokens, source=pool[:pages]).transfer.wait()
                    continue
                with rig.store.match(tokens) as match:
                    rows[:] = 0xEE
                    transfer = rig.store.load(match, into=pool[: match.pages])
                    transfer.wait()
                    ok = np.flatnonzero(transfer.ok)
                    assert np.array_equal(rows[ok], stamps(tokens)[ok]), "wrong bytes were served"
                    loaded[0] += ok.size
        except AssertionError as error:
            failures.append(error)
            stop.set()
            turns.release(1_000_000)

    threads = [threading.Thread(target=run, args=(i,), kwargs={"saves": i % 2 == 0}) for i in range(4)]
    for thread in threads:
        thread.start()
    [volume] = Path(shared).glob("v-*.vol")
    size = volume.stat().st_size
    rng = random.Random(1)
    for _ in range(rounds):
        os.truncate(volume, rng.randrange(size))
        for _ in range(rng.randrange(4)):
            turns.acquire()
        os.truncate(volume, size)
        rig.store._room.wake_keeper()  # what is quarantined comes back
        for _ in range(8):
            turns.acquire()
        if stop.is_set():
            break
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    stats = rig.store.stats()
    assert not stats.poisoned
    print(f"loaded {loaded[0]} met {stats.bus_faults + stats.checksum_failures + stats.io_errors}", flush=True)
    assert rig.store.check() == ""
    rig.close()


def main() -> None:
    """Run what the command line names."""
    match sys.argv[1:]:
        case ["zygote"]:
            zygote()
        case ["truncate", when, shared, rounds]:
            truncate_world(when, shared, int(rounds))


if __name__ == "__main__":
    main()
