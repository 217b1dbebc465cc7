"""Strain one tier directory with many processes: kills, stops, eight starters, a rolling restart; say what came of it.

    python tests/neighbours_stress.py [kills] [starters] [rolling] [--seconds 60] [--medium shared] [--seed 1]

Each process is a store that saves and loads pages whose bytes follow from their key. Beside them one looks at the sum
of the directory's sizes, with and without the directory lock. A line of JSON a scenario; exit code 0 if all holds:
no wrong byte, no process that ends but those that were killed, never more than the capacity, no call that waits for the
dead, each its share, the new one warm. test_neighbours_stress.py runs the quick form.
"""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.tiers.volume_tier import VolumeTier
from store_kit import GEOMETRY, PAGE_TOKENS, VOLUME_BYTES, Rig, Tokens, chain, stamps

VOLUMES = 32
FEW_CHAINS, MANY_CHAINS, MOST_PAGES = 120, 700, 16  # a part of the directory, and more than it holds
LONGEST_CALL = 4.0
"""Seconds. A save waits two for memory that a tier may still take; who waited for the dead would wait five."""
START_SECONDS = 60.0  # within which a process of a busy machine must have said something


def config_of(path: str, medium: str, share: int, revision: str) -> StoreConfig:
    """Configure one process of a directory of 32 volumes; processes of another revision share no pages with it."""
    given: dict[str, Any] = {"share": share * VOLUME_BYTES, "volume_bytes": VOLUME_BYTES}
    geometry = PageGeometry(
        model=GEOMETRY.model,
        revision=revision,
        layers=GEOMETRY.layers,
        kv_heads=GEOMETRY.kv_heads,
        head_dim=GEOMETRY.head_dim,
        dtype=GEOMETRY.dtype,
        page_tokens=PAGE_TOKENS,
    )
    capacity = VOLUMES * VOLUME_BYTES
    if medium == "shared":
        return StoreConfig(geometry=geometry, shared=SharedTier(capacity, path, **given))
    return StoreConfig(geometry=geometry, disk=DiskTier(capacity, path, **given))


# ---- a process of the directory --------------------------------------------------------------------------------------


class Model:
    """A store whose pages have bytes of their own: those of another model, found under the same key, are wrong."""

    def __init__(self, config: StoreConfig) -> None:
        self._rig = Rig(config, slots=MOST_PAGES, keeper=True)
        self._mask = np.uint8(int(config.geometry.revision) + 1)

    @property
    def store(self) -> PageStore:
        return self._rig.store

    def save(self, tokens: Tokens) -> int:
        pages = tokens.size // PAGE_TOKENS
        self._rig.rows[:pages] = stamps(tokens) ^ self._mask
        result = self.store.save(tokens, source=self._rig.pool[:pages])
        result.transfer.wait()
        return result.saved

    def load(self, tokens: Tokens) -> int:
        transfer = self._rig.start_load(tokens)
        transfer.wait()
        ok = np.flatnonzero(transfer.ok)
        assert np.array_equal(self._rig.rows[ok], stamps(tokens)[ok] ^ self._mask), "wrong bytes were served"
        return transfer.ok_pages


def say(**what: Any) -> None:
    """Write a line that comes whole, whoever else writes to the pipe."""
    os.write(1, (json.dumps(what) + "\n").encode())


def work(name: int, path: str, medium: str, share: int, revision: str, seed: int, chains: int) -> None:
    """Save and load for ever; say five times a second what came of it."""
    began = time.monotonic()
    faulthandler.dump_traceback_later(15.0)  # who hangs in opening says where
    rng = random.Random(seed)
    model = Model(config_of(path, medium, share, revision))
    tier = Tier.SHARED if medium == "shared" else Tier.DISK
    faulthandler.cancel_dump_traceback_later()
    say(name=name, event="open", seconds=time.monotonic() - began)
    asked = hits = saved = 0
    slowest, said = 0.0, 0.0
    while True:
        number, pages = int(chains * rng.random() ** 2), rng.randrange(1, MOST_PAGES + 1)
        before = time.monotonic()
        if rng.random() < 0.5:
            saved += model.save(chain(number, pages))
        else:
            asked += MOST_PAGES
            hits += model.load(chain(number, MOST_PAGES))
        now = time.monotonic()
        slowest = max(slowest, now - before)
        if now - said > 0.2:
            volumes = model.store._tiers[tier]
            assert isinstance(volumes, VolumeTier)
            say(
                name=name,
                event="state",
                asked=asked,
                hits=hits,
                saved=saved,
                slowest=slowest,
                resident=model.store.stats().tiers[str(tier)].resident,
                volumes=len(volumes.members),
                adopted=volumes.directory.counts.adopted,
            )
            said, slowest, asked, hits = now, 0.0, 0, 0


def zygote() -> None:
    """Fork a process for each line read; end with the input, and all of them with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    pids = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                work(**order)
            except BaseException as error:
                traceback.print_exc()
                say(name=order["name"], event="failed", error=f"{type(error).__name__}: {str(error)[:200]}")
            finally:
                os._exit(1)
        pids.append(pid)
        say(name=order["name"], event="pid", pid=pid)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


# ---- who watches -----------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """What one process has said so far."""

    name: int
    revision: str
    started: float
    pid: int = 0
    opened: float | None = None  # seconds after it was started
    hit: float | None = None  # seconds until the first page was found
    state: dict[str, Any] = field(default_factory=dict)
    slowest: float = 0.0
    loaded: int = 0
    saved: int = 0
    killed: bool = False


class Budget:
    """Look at the directory's total for as long as it lives."""

    def __init__(self, path: Path) -> None:
        self._path, self._stop = path, threading.Event()
        self.most = {"locked": 0, "unlocked": 0}
        self.looks = {"locked": 0, "unlocked": 0}
        self.late = 0.0  # seconds by which this thread's own short waits were late: the machine's part of what is slow
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Budget:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(0.002):
            self.late = max(self.late, time.monotonic() - before - 0.002)
            self._look("unlocked")
            with open(self._path / "directory.lock") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass
                else:
                    self._look("locked")
            before = time.monotonic()

    def _look(self, how: str) -> None:
        """Without the lock names change meanwhile: what is not the same before and after was no instant."""
        try:
            before = sorted(os.listdir(self._path))
            names = [name for name in before if re.fullmatch(r"[vtx]-\w+\.(vol|meta|pages|lock)", name)]
            total = sum((self._path / name).stat().st_size for name in names)
            if how == "unlocked" and sorted(os.listdir(self._path)) != before:
                return
        except FileNotFoundError:
            return
        self.most[how] = max(self.most[how], total)
        self.looks[how] += 1


class Crowd:
    """The processes of one directory, and what they say."""

    def __init__(self, path: Path, medium: str, seed: int, *, chains: int) -> None:
        self.path, self.medium, self.chains = path, medium, chains
        self.rng = random.Random(seed)
        self.processes: dict[int, Process] = {}
        self.failures: list[str] = []
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._zygote = subprocess.Popen(
            [sys.executable, __file__, "zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            self._lines.put(json.loads(line))

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            self.kill(process)
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._reader.join()
        self._zygote.stdout.close()

    def start(self, *, share: int, revision: str = "1") -> Process:
        """Start a process; it opens the directory by itself."""
        process = Process(len(self.processes), revision, time.monotonic())
        self.processes[process.name] = process
        order = {
            "name": process.name,
            "path": str(self.path),
            "medium": self.medium,
            "share": share,
            "revision": revision,
            "seed": self.rng.randrange(1 << 30),
            "chains": self.chains,
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        self.until(lambda: process.pid > 0)
        return process

    def kill(self, process: Process) -> None:
        if process.pid and not process.killed:
            process.killed = True
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.failures.append(f"process {process.name} had ended by itself")

    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.killed]

    def until(self, is_so: Callable[[], bool], seconds: float = START_SECONDS) -> bool:
        """Take in what is said until something is so. False: not within `seconds`, or something failed."""
        deadline = time.monotonic() + seconds
        while not is_so():
            left = deadline - time.monotonic()
            if left <= 0 or self.failures:
                return False
            try:
                self._take(self._lines.get(timeout=left))
            except queue.Empty:
                return False
        return True

    def hear(self, seconds: float) -> None:
        """Take in what is said in some seconds."""
        self.until(lambda: False, seconds)

    def _take(self, line: dict[str, Any]) -> None:
        process, now = self.processes[line["name"]], time.monotonic()
        since = now - process.started
        match line["event"]:
            case "pid":
                process.pid = line["pid"]
            case "open":
                process.opened = line["seconds"]
            case "failed":
                if not process.killed:
                    self.failures.append(f"process {process.name} failed: {line['error']}")
            case "state":
                process.state = line
                process.slowest = max(process.slowest, line["slowest"])
                process.loaded += line["hits"]
                process.saved = line["saved"]
                if process.hit is None and line["hits"] > 0:
                    process.hit = since


def closing_check(crowd: Crowd, revision: str) -> dict[str, int]:
    """Open what is left of a model, and read every page of it. Requires: all were killed."""
    for path in crowd.path.glob("v-*.lock"):
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who was killed may not have ended yet
    with PageStore(config_of(str(crowd.path), crowd.medium, VOLUMES // 8, revision)) as store:
        checked = store.verify()
        if checked.damaged or store.check():
            crowd.failures.append(f"{checked.damaged} damaged pages are left; {store.check()}")
        return {"pages": checked.pages, "damaged": checked.damaged}


def result(scenario: str, crowd: Crowd, budget: Budget, **figures: Any) -> dict[str, Any]:
    """Put together what is to be said of a scenario, and judge what holds for all of them."""
    processes = list(crowd.processes.values())
    slowest = max((process.slowest for process in processes), default=0.0)
    capacity = VOLUMES * VOLUME_BYTES
    if max(budget.most.values()) > capacity:
        crowd.failures.append(f"the directory had {budget.most} bytes of {capacity}")
    return {
        "scenario": scenario,
        "medium": crowd.medium,
        "processes": len(processes),
        "loaded_pages": sum(process.loaded for process in processes),
        "saved_pages": sum(process.saved for process in processes),
        "slowest_call_s": round(slowest, 3),
        "machine_late_s": round(budget.late, 3),
        "capacity_bytes": capacity,
        "most_bytes": budget.most,
        "looks": budget.looks,
        **figures,
        "failures": crowd.failures,
    }


def kills(path: Path, medium: str, seconds: float, seed: int) -> dict[str, Any]:
    """Four processes of two models; one is killed every second, every third after it was stopped for a second."""
    with Crowd(path, medium, seed, chains=FEW_CHAINS) as crowd:
        share = VOLUMES // 8
        for number in range(4):
            crowd.start(share=share, revision=str(number % 2))
        crowd.until(lambda: all(process.state for process in crowd.living()))
        opened: list[float] = []
        first_hits: list[float] = []
        killed = 0
        with Budget(path) as budget:
            deadline = time.monotonic() + seconds
            while (killed < 3 or time.monotonic() < deadline) and not crowd.failures:
                victim = crowd.rng.choice(crowd.living())
                if killed % 3 == 2:
                    os.kill(victim.pid, signal.SIGSTOP)
                    crowd.hear(1.0)
                crowd.kill(victim)
                killed += 1
                comes = crowd.start(share=share, revision=victim.revision)
                crowd.hear(1.0 - crowd.rng.random() * 0.2)
                crowd.until(lambda process=comes: process.opened is not None and process.hit is not None)  # type: ignore[misc]
                if comes.opened is None or comes.hit is None:
                    crowd.failures.append(f"process {comes.name} found nothing: opened {comes.opened}, hit {comes.hit}")
                    break
                opened.append(comes.opened)
                first_hits.append(comes.hit)
        for process in crowd.living():
            crowd.kill(process)
        figures = {
            "kills": killed,
            "open_s": spread(opened),
            "first_hit_s": spread(first_hits),
            "left": [closing_check(crowd, revision) for revision in "01"],
        }
        return result("kills", crowd, budget, **figures)


def starters(path: Path, medium: str, seconds: float, seed: int) -> dict[str, Any]:
    """Eight start at once on what one has left; each must end with its share, an eighth, and find pages."""
    with Crowd(path, medium, seed, chains=MANY_CHAINS) as crowd:
        before = crowd.start(share=VOLUMES // 8)
        crowd.until(lambda: before.state.get("volumes", 0) == VOLUMES)
        had = before.state.get("volumes", 0)
        crowd.kill(before)
        with Budget(path) as budget:
            group = [crowd.start(share=VOLUMES // 8) for _ in range(8)]
            began = time.monotonic()
            is_even = crowd.until(
                lambda: all(process.state.get("volumes", 0) >= VOLUMES // 8 for process in group), seconds
            )
            even = time.monotonic() - began
            is_found = crowd.until(lambda: all(process.hit is not None for process in group), seconds)
        if not is_even:
            crowd.failures.append(f"not each has its share: {[process.state.get('volumes') for process in group]}")
        if not is_found:
            crowd.failures.append(f"not each finds pages: {[process.hit for process in group]}")
        figures = {
            "volumes_before": had,
            "all_have_their_share_s": round(even, 2),
            "volumes": [process.state.get("volumes") for process in group],
            "first_hit_s": spread([process.hit for process in group if process.hit is not None]),
        }
        return result("starters", crowd, budget, **figures)


def rolling(path: Path, medium: str, seconds: float, seed: int) -> dict[str, Any]:
    """An old process that holds the whole capacity; a new one comes, the old one ends: how soon is the new one warm?"""
    with Crowd(path, medium, seed, chains=MANY_CHAINS) as crowd:
        old = crowd.start(share=VOLUMES // 8)
        if not crowd.until(lambda: old.state.get("volumes", 0) == VOLUMES):
            crowd.failures.append(f"the old process has {old.state.get('volumes')} volumes")
        had = old.state.get("resident", 0)
        with Budget(path) as budget:
            new = crowd.start(share=VOLUMES // 8)
            crowd.until(lambda: new.state.get("volumes", 0) >= VOLUMES // 8, seconds)
            floor = time.monotonic() - new.started
            crowd.kill(old)
            ended = time.monotonic()
            is_warm = crowd.until(lambda: new.state.get("resident", 0) >= 0.9 * had, seconds)
            warm = time.monotonic() - ended
        if not is_warm:
            crowd.failures.append(f"the new process has {new.state.get('resident')} pages, the old one had {had}")
        figures = {
            "volumes_of_the_old": VOLUMES,
            "pages_of_the_old": had,
            "new_has_its_share_s": round(floor, 2),
            "new_is_warm_after_the_old_ended_s": round(warm, 2),
            "adopted": new.state.get("adopted"),
        }
        return result("rolling", crowd, budget, **figures)


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the largest of some seconds."""
    if not values:
        return {}
    return {"median": round(float(np.median(values)), 3), "most": round(max(values), 3)}


SCENARIOS: dict[str, Callable[[Path, str, float, int], dict[str, Any]]] = {
    "kills": kills,
    "starters": starters,
    "rolling": rolling,
}


def main() -> int:
    """Run what the command line names, each on a new directory."""
    if sys.argv[1:] == ["zygote"]:
        zygote()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of kills; the most that the others take (60)")
    parser.add_argument("--medium", choices=("shared", "disk"), default="shared")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    is_well = True
    for name in arguments.scenarios or SCENARIOS:
        above = "/dev/shm" if arguments.medium == "shared" else None
        parent = Path(tempfile.mkdtemp(prefix="stepwell-stress-", dir=above))
        try:
            said = SCENARIOS[name](parent / "tier", arguments.medium, arguments.seconds, arguments.seed)
        finally:
            shutil.rmtree(parent)
        if said["slowest_call_s"] - said["machine_late_s"] > LONGEST_CALL:
            said["failures"].append("a call waited")
        print(json.dumps(said), flush=True)
        is_well &= not said["failures"]
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
