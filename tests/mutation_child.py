"""Serve from tier directories while somebody changes their files; obeys lines of JSON. See mutation_kit.py."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.errors import StepwellError
from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, Rig, chain, stamps

CHAINS, MOST_PAGES = 30, 12
CONFIG: dict[str, int] = {"host": 16 * 4096, "shared": 5 * VOLUME_BYTES, "disk": 6 * VOLUME_BYTES}
HANG_SECONDS = 50.0  # then every thread's place is printed, and the process ends


def threads_and_maps() -> dict[str, list[str]]:
    """What a store must not leave behind."""
    tasks, descriptors = [], []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            tasks.append((task / "comm").read_text().strip())
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/v-" in line]
    python = [thread.name for thread in threading.enumerate()]
    return {
        "threads": [name for name in tasks + python if name.startswith("sw-")],
        "files": [name for name in descriptors if "/v-" in name or "/p-" in name or "eventfd" in name],
        "maps": maps,
    }


class Server:
    """One store at a time, with what it serves compared."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig: Rig | None = None
        self.rows = {number: stamps(chain(number, MOST_PAGES)) for number in range(CHAINS)}

    def open(self, shared: str, disk: str) -> dict[str, Any]:
        """A refusal is an answer; a damaged directory may have one."""
        try:
            config = Directories(Path(shared), Path(disk)).config(**CONFIG)
            self.rig = Rig(config, slots=MOST_PAGES, keeper=True)
        except StepwellError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"refused": ""}

    def close(self) -> dict[str, Any]:
        """Close the store, and say what is left of it."""
        rig, self.rig = self.rig, None
        if rig is not None:
            rig.close()
        return {"left": threads_and_maps()}

    def work(self, count: int) -> dict[str, Any]:
        """Save, load, evict, forget. `refused` and misses are right answers; other bytes than a page's are not."""
        if self.rig is None:
            return {"right": 0, "saved": 0}
        right = saved = 0
        for _ in range(count):
            number, pages, roll = self.rng.randrange(CHAINS), self.rng.randrange(1, MOST_PAGES + 1), self.rng.random()
            tokens = chain(number, pages)
            if roll < 0.4:
                self.rig.rows[:pages] = self.rows[number][:pages]
                result = self.rig.store.save(tokens, source=self.rig.pool[:pages])
                assert result.transfer.wait(30.0)
                saved += result.transfer.ok_pages
            elif roll < 0.85:
                order = "layer" if roll < 0.6 else "page"
                transfer = self.rig.start_load(tokens, order=order)
                assert transfer.wait(30.0)
                ok = np.flatnonzero(transfer.ok)
                assert np.array_equal(self.rig.rows[ok], self.rows[number][ok]), "wrong bytes were served"
                right += ok.size
            elif roll < 0.93:
                self.rig.store.evict(self.rng.choice([Tier.HOST, Tier.SHARED, Tier.DISK]), pages)
            elif roll < 0.97:
                self.rig.store.forget(tokens)
            else:
                assert self.rig.store.check() == ""
        stats = self.rig.store.stats()
        assert not stats.poisoned
        return {
            "right": int(right),
            "saved": int(saved),
            "met": stats.checksum_failures + stats.bus_faults + stats.io_errors,
            "capacity": {name: tier.capacity for name, tier in stats.tiers.items()},
        }

    def settle(self) -> dict[str, Any]:
        """Nothing is under way, and all adds up."""
        if self.rig is None:
            return {}
        assert self.rig.store.flush(30.0)
        assert self.rig.store.check() == ""
        for name, tier in self.rig.store.stats().tiers.items():
            parts = tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined
            assert parts == tier.capacity, f"{name}: {tier}"
        return {}

    def present(self) -> dict[str, Any]:
        """Load every chain whole, page by page of its keys; say for each which pages came, and that they are right."""
        assert self.rig is not None
        found = {}
        for number, rows in self.rows.items():
            from stepwell.hashing import prefix_hashes

            keys = prefix_hashes(chain(number, MOST_PAGES), page_tokens=4)
            self.rig.rows[:] = 0xEE
            ok = self.rig.store.load_keys(keys, into=self.rig.pool[:MOST_PAGES])
            assert np.array_equal(self.rig.rows[ok], rows[ok]), "wrong bytes were served"
            found[number] = np.flatnonzero(ok).tolist()
        return {"found": found}


def main() -> None:
    """Obey until the input ends."""
    server = Server(int(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            answer = getattr(server, order.pop("do"))(**order)
        except Exception:
            answer = {"failed": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
