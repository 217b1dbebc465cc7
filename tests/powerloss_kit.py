"""Work on a disk tier while its calls are recorded, and look at what each power loss would have left of it.

    python tests/powerloss_kit.py --states 20000 --seed 1      the long form; prints figures

What must hold in every state, with durability "power": a page that was on disk when the store said so is found, with
the right bytes; a page that nobody had begun to save is not; the index agrees with itself.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.clock import ManualClock
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Residency, Tier
from stepwell.testing.powerloss import Call, Disk, Kind, Loss, Recording, record
from store_kit import GEOMETRY, PAGE_TOKENS, Rig, chain, stamps_of

CHAINS = 12
PAGES = 6  # the longest chain
VOLUME = 106 * 1024  # about 20 pages
VOLUMES = 3

KEYS = [prefix_hashes(chain(number, PAGES), page_tokens=PAGE_TOKENS) for number in range(CHAINS)]
ALL_KEYS = np.concatenate(KEYS)
ALL_BYTES = stamps_of(ALL_KEYS)


def config_of(disk: str, shared: str | None = None, **how: Any) -> StoreConfig:
    """Configure a small disk tier, with a shared tier above it or without."""
    return StoreConfig(
        geometry=GEOMETRY,
        shared=SharedTier(2 * VOLUME, shared, volume_bytes=VOLUME) if shared else None,
        disk=DiskTier(VOLUMES * VOLUME, disk, volume_bytes=VOLUME, **how),
    )


@dataclass
class Truth:
    """What must be found and what may be, by how many calls were made: bool[keys] from a position on."""

    musts: list[tuple[int, np.ndarray]] = field(default_factory=lambda: [(0, np.zeros(len(ALL_KEYS), np.bool_))])
    mays: list[tuple[int, np.ndarray]] = field(default_factory=lambda: [(0, np.zeros(len(ALL_KEYS), np.bool_))])

    def at(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (must be found, may be found) after so many calls."""
        must = next(mask for start, mask in reversed(self.musts) if start <= position)
        may = next(mask for start, mask in reversed(self.mays) if start <= position)
        return must, may


class Worker:
    """Save, evict, forget, close and open, and keep account of what each moment promises."""

    def __init__(self, recording: Recording, rng: random.Random, disk: str, shared: str | None, **how: Any) -> None:
        self.recording = recording
        self.rng = rng
        self.truth = Truth()
        self._config = config_of(disk, shared, durability="power", **how)
        self._unsafe = config_of(disk, shared, durability="process", **how)
        self.is_promising = True
        self.rig = Rig(self._config, clock=ManualClock())

    def on_disk(self) -> np.ndarray:
        """Return which pages the store calls resident on disk: with durability power that is a promise."""
        state = self.rig.store.state
        return np.array([state(key.tobytes())[Tier.DISK] is Residency.RESIDENT for key in ALL_KEYS])

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Do something: meanwhile only what stays all the time is promised, then what is there after.

        What is done here calls `look` after each call of the store that may evict.
        """
        start, self._stays = self.recording.position, self.truth.musts[-1][1]
        self._told: list[tuple[int, np.ndarray]] = []
        yield
        after = self.look()
        self.truth.musts += [(start, self._stays), *self._told, (self.recording.position, after)]

    def look(self) -> np.ndarray:
        """Note what is gone."""
        here = self.on_disk()
        self._stays = self._stays & here
        return here

    def save(self, numbers: Sequence[int]) -> None:
        """Save chains at once, and take what each promises as soon as its transfer is done."""
        pages = [self.rng.randint(1, PAGES) for _ in numbers]
        may = self.truth.mays[-1][1].copy()
        for number, count in zip(numbers, pages, strict=True):
            may[number * PAGES : number * PAGES + count] = True
        self.truth.mays.append((self.recording.position, may))
        rows, first, results = self.rig.rows, 0, []
        for number, count in zip(numbers, pages, strict=True):
            rows[first : first + count] = ALL_BYTES[number * PAGES : number * PAGES + count]
            results.append(self.rig.store.save(chain(number, count), source=self.rig.pool[first : first + count]))
            first += count
            self.look()
        for result in results:
            result.transfer.wait()
            if self.is_promising:
                here = self.on_disk()  # looked at first: others go on, and what comes later is promised later
                self._told.append((self.recording.position, here))

    def step(self) -> None:
        """Do one thing."""
        rng, store = self.rng, self.rig.store
        what = rng.choices(("save", "evict", "forget", "clear", "reopen", "promise nothing"), (12, 2, 2, 0.5, 1, 1))[0]
        with self.moment():
            match what:
                case "save":
                    self.save(rng.sample(range(CHAINS), rng.randint(1, 4)))
                case "evict":
                    store.evict(Tier.DISK, rng.randint(1, 12))
                case "forget":
                    store.forget(chain(rng.randrange(CHAINS), PAGES), keep=PAGE_TOKENS * rng.randrange(PAGES))
                case "clear":
                    store.clear()
                case "reopen":
                    self.open(is_promising=True)
                case _:  # what a process of durability "process" leaves is promised once it is adopted
                    self.open(is_promising=False)
                    self.look()
                    self.save(rng.sample(range(CHAINS), 2))
                    self.open(is_promising=True)

    def open(self, *, is_promising: bool) -> None:
        """Close the store, and open one of the other durability or the same."""
        self.rig.close()
        self.is_promising = is_promising
        self.rig = Rig(self._config if is_promising else self._unsafe, clock=ManualClock())


def work(base: Path, seed: int, steps: int, *, shared: str | None = None, **how: Any) -> tuple[list[Call], Truth]:
    """Work on base/disk for some steps; return the calls that were made, and what they promise."""
    with record() as recording:
        worker = Worker(recording, random.Random(seed), str(base / "disk"), shared, **how)
        try:
            for _ in range(steps):
                worker.step()
            truth = Truth(list(worker.truth.musts), list(worker.truth.mays))
            end = recording.position
        finally:
            worker.rig.close()
    return recording.calls[:end], truth


def syncs_of(calls: Sequence[Call]) -> dict[str, list[int]]:
    """Say what each sync is for: positions in the log by purpose.

    taken bytes, taken records, name: of a volume that comes into use. free: of slots that were freed, before they are
    written again. bytes, records: of pages that were written. directory: the tier directory's own name.
    """
    names: dict[tuple[int, int], str] = {}
    found: dict[str, list[int]] = {}
    last: dict[str, tuple[str, int]] = {}  # of a volume: the kind and the position of its last sync
    for position, call in enumerate(calls):
        if call.kind is Kind.CREATE:
            names[call.file] = call.path
        elif call.kind is Kind.SYNC_DIRECTORY and not call.path.endswith("/disk"):
            found.setdefault("directory", []).append(position)
        elif call.kind is Kind.SYNC_DIRECTORY:
            records = max(at for kind, at in last.values() if kind == "meta")
            [volume] = [volume for volume, (_, at) in last.items() if at == records]
            found.setdefault("name", []).append(position)
            bytes_ = max(at for at in found["bytes"] if at < records and _volume(names[calls[at].file]) == volume)
            for purpose, at in (("bytes", bytes_), ("records", records)):
                found[purpose].remove(at)
                found.setdefault(f"taken {purpose}", []).append(at)
        elif call.kind is Kind.SYNC:
            volume, suffix = _volume(names[call.file]), names[call.file].rpartition(".")[2]
            if suffix == "pages":
                purpose = "bytes"
            else:
                purpose = "records" if last.get(volume, ("", 0))[0] == "pages" else "free"
            found.setdefault(purpose, []).append(position)
            last[volume] = suffix, position
    return found


def _volume(path: str) -> str:
    return path.rpartition("/")[2][2:34]


@dataclass
class Figures:
    """What a replay came to. wrong, phantom, lost: by state, for a message; empty where all holds."""

    states: int = 0
    promised: int = 0
    found: int = 0
    torn: int = 0  # pages that a checksum gave away: none of them promised
    cold: int = 0
    failures: list[str] = field(default_factory=list)


def check(wreck_at: Path, must: np.ndarray, may: np.ndarray, figures: Figures, where: str) -> None:
    """Open a store on a state and compare every page with what must and may be there."""
    rig = Rig(config_of(str(wreck_at / "disk")), clock=ManualClock())
    try:
        rig.rows[: len(ALL_KEYS)] = 0xEE
        ok = rig.store.load_keys(ALL_KEYS, into=rig.pool[: len(ALL_KEYS)])
        right = (rig.rows[: len(ALL_KEYS)] == ALL_BYTES).all(axis=1)
        stats = rig.store.stats()
        disk = rig.store._tiers[Tier.DISK]
        figures.states += 1
        figures.promised += int(must.sum())
        figures.found += int((must & ok).sum())
        figures.cold += disk.directory.counts.swept_damaged  # type: ignore[attr-defined]
        for name, bad in (("wrong", ok & ~right), ("lost", must & ~ok), ("phantom", ok & ~may)):
            if bad.any():
                figures.failures.append(f"{where}: {name} pages {np.flatnonzero(bad).tolist()}")
        figures.torn += stats.checksum_failures
        if stats.io_errors:
            figures.failures.append(f"{where}: {stats.io_errors} calls failed")
        if problem := rig.store.check():
            figures.failures.append(f"{where}: {problem}")
    finally:
        rig.close()


def replay(
    base: Path, calls: Sequence[Call], truth: Truth, *, seed: int, states: int, scratch: Path, stop: int = 20
) -> Figures:
    """Look at `states` of the states that a power loss may leave after each prefix of the calls, spread evenly.

    Every prefix is seen with all lost, if there are that many states; the rest are chosen at random. Ends after `stop`
    failures.
    """
    chance, figures, disk = random.Random(seed), Figures(), Disk(base)
    losses = (Loss.ALL, Loss.SECTORS, Loss.FILES, Loss.SECTORS, Loss.NONE)
    done = 0
    for position in range(len(calls) + 1):
        if position:
            disk.apply(calls[position - 1])
        due = states * (position + 1) // (len(calls) + 1)
        for each in range(due - done):
            loss = losses[each % len(losses)] if states > len(calls) else chance.choice(losses)
            scratch.mkdir(mode=0o700)
            try:
                disk.crash(chance, loss).write(scratch)
                check(scratch, *truth.at(position), figures, f"after call {position}, loss {loss.value}")
            finally:
                shutil.rmtree(scratch)
            if len(figures.failures) >= stop:
                return figures
        done = due
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=20000)
    parser.add_argument("--steps", type=int, default=60, help="of a recording")
    parser.add_argument("--recordings", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", default=None, help="a directory on the file system to record on")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    is_good = True
    memory = Path(tempfile.mkdtemp(prefix="stepwell-powerloss-", dir="/dev/shm"))
    try:
        for number in range(options.recordings):
            seed = options.seed + number
            base = Path(tempfile.mkdtemp(prefix="stepwell-powerloss-", dir=options.disk))
            shared = str(memory / f"shared{number}") if number % 2 else None
            try:
                calls, truth = work(base, seed, options.steps, shared=shared, direct_io=number % 4 < 2)
            finally:
                shutil.rmtree(base)
            start = time.monotonic()
            found = replay(
                base, calls, truth, seed=seed, states=options.states // options.recordings, scratch=memory / "wreck"
            )
            print(
                f"seed {seed}: {len(calls)} calls, {found.states} states in {time.monotonic() - start:.0f} s, "
                f"{found.found} of {found.promised} promised pages found, "
                f"{found.torn} torn ones seen, {found.cold} volumes cold",
                flush=True,
            )
            for failure in found.failures:
                print("  " + failure)
            is_good &= not found.failures
    finally:
        shutil.rmtree(memory)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
