"""Let threads use one real store, record every call with its result, and have the history checked.

    python -m stepwell.testing.recorder [--seed 1] [--rounds 1000000 | --seconds 60] [--kind crowded|roomy|memory|disk]

The store is the product: its mover's threads and its keeper run. Tiers have room for a few pages, so that they are full
all the time and pages leave, come back and are brought up; a store of kind `roomy` loses none by itself, and there
every miss must have its reason. A seed gives the same calls by the same threads; in which order they meet is the
machine's choice, so that a run is not the same again, and a violation comes with the calls that show it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.errors import PoisonedError
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.testing import faults
from stepwell.testing.history import Checked, Failed, Record, Reopened, check
from stepwell.testing.page_model import PageModel
from stepwell.testing.workers import GEOMETRY, PAGE_BYTES, Recorder, Watch, Worker, chains

_HANG_SECONDS: Final = 240.0
"""After so long threads count as ones that never end; most calls that wait for ever say so sooner."""


# ---- stores ----------------------------------------------------------------------------------------------------------


_METADATA_PAGES: Final = 11
"""What a volume of few pages has beside them, in pages."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A configuration. Capacities in pages, 0: no such tier; evicts: more pages are saved than it has room for."""

    host: int
    shared: int
    disk: int
    evicts: bool

    def config(self, base: Path, epoch: int) -> StoreConfig:
        """Configure a store below a directory."""
        shared, disk = (pages and (pages + _METADATA_PAGES) * PAGE_BYTES for pages in (self.shared, self.disk))
        return StoreConfig(
            geometry=GEOMETRY,
            host=self.host * PAGE_BYTES or None,
            shared=SharedTier(shared, str(base / "shared"), volume_bytes=shared) if shared else None,
            disk=DiskTier(disk, str(base / "disk"), volume_bytes=disk) if disk else None,
            epoch=epoch,
            staging=None if self.host else 0,
        )

    def model(self) -> PageModel:
        """Return what its pages are held to."""
        sizes = {Tier.HOST: self.host, Tier.SHARED: self.shared, Tier.DISK: self.disk}
        return PageModel(tuple(int(tier) for tier, pages in sizes.items() if pages), evicts=self.evicts)


KINDS: Final = {
    "crowded": Kind(host=3, shared=7, disk=11, evicts=True),
    "roomy": Kind(host=4, shared=90, disk=90, evicts=False),
    "memory": Kind(host=12, shared=0, disk=0, evicts=True),
    "shared": Kind(host=0, shared=9, disk=0, evicts=True),
    "disk": Kind(host=3, shared=0, disk=11, evicts=True),
}


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. calls: of each thread between two barriers. lives: between two openings of the store, so many.

    delays: microseconds by fault point, to widen what is between two steps.
    """

    seed: int
    kind: str = "crowded"
    threads: int = 4
    calls: int = 25
    barriers: int = 3
    lives: int = 2
    delays: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Run:
    """What came of a run."""

    plan: Plan
    records: list[Record]
    checked: Checked

    @property
    def violations(self) -> list[str]:
        """What is wrong, each with the calls that show it, and how to see it again; [] where all holds."""
        again = f"again: {replay(self.plan)}"
        return [f"{violation}\n    seed {self.plan.seed}; {again}" for violation in self.checked.violations]


def replay(plan: Plan) -> str:
    """Return the command that makes the same calls again."""
    size = f"--kind {plan.kind} --threads {plan.threads} --calls {plan.calls}{' --delays' if plan.delays else ''}"
    return f"python -m stepwell.testing.recorder --seed {plan.seed} --same-seed --rounds 20 {size}"


def record(plan: Plan, *, prepare: Callable[[PageStore], None] = lambda _: None) -> list[Record]:
    """Let threads use a store as a plan says. Returns what they did; nothing is left behind.

    Args:
        prepare: is done to each store before it is used: break it, to see whether that is found.
    """
    kind, universe, recorder = KINDS[plan.kind], chains(), Recorder()
    *workers, looker = (
        Worker(thread, recorder, universe, seed=plan.seed * 1000 + thread, evicts=kind.evicts)
        for thread in range(plan.threads + 1)
    )
    base = Path(tempfile.mkdtemp(prefix="sw-history-", dir="/dev/shm"))
    epoch = 0
    try:
        for life in range(plan.lives):
            before = recorder.stamp()
            # That it was poisoned is in the records by then.
            with (
                contextlib.suppress(PoisonedError),
                PageStore(kind.config(base, epoch)) as store,
                _delays(plan.delays),
            ):
                if life:
                    number, after = recorder.number(), recorder.stamp()
                    recorder.records.append(
                        Record(number, plan.threads, "reopen", (), before, after, after, Reopened())
                    )
                prepare(store)
                watch = Watch(store)
                for worker in [*workers, looker]:
                    worker.join_store(store, watch)
                looker.look()
                for _ in range(plan.barriers):
                    _together(workers, plan.calls)
                    for worker in workers:
                        worker.let_go()
                    looker.look()
                    recorder.records.extend(_unsound(store, recorder))
                looker.forget()
                epoch = store.epoch
            for worker in [*workers, looker]:
                worker.settle_leases()
    finally:
        shutil.rmtree(base)
    for worker in [*workers, looker]:
        recorder.records.extend(worker.records)
    return sorted(recorder.records, key=lambda each: each.invoked)


def run(plan: Plan, *, prepare: Callable[[PageStore], None] = lambda _: None) -> Run:
    """Record and check; see record()."""
    records = record(plan, prepare=prepare)
    return Run(plan, records, check(records, KINDS[plan.kind].model()))


def _together(workers: Sequence[Worker], calls: int) -> None:
    """Have the workers make some calls each, in threads of their own.

    Raises:
        TimeoutError: one does not come back. Its stack is on stderr; the store is of no use any more.
    """
    threads = [threading.Thread(target=worker.work, args=(calls,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _HANG_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        raise TimeoutError(f"a call has not returned for {_HANG_SECONDS:g} s")


def _unsound(store: PageStore, recorder: Recorder) -> Iterator[Record]:
    """Yield what is wrong with a store that nobody uses: its index, its sums, what is pinned still."""
    found = [store.check()]
    try:
        stats = store.stats()
    except PoisonedError as error:
        at = recorder.stamp()
        yield Record(recorder.number(), -1, "stats", (), at, at, at, Failed(str(error)))
        return
    if stats.checksum_failures or stats.io_errors or stats.failed_jobs:
        found.append(
            f"{stats.checksum_failures} wrong checksums, {stats.io_errors} I/O errors, {stats.failed_jobs} failures"
        )
    for name, tier in stats.tiers.items():
        if tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined != tier.capacity:
            found.append(f"{name}: {tier}")
    for text in filter(None, found):
        at = recorder.stamp()
        yield Record(recorder.number(), -1, "stats", (), at, at, at, Failed(text))


@contextlib.contextmanager
def _delays(points: Sequence[tuple[str, int]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, microseconds in points:
            stack.enter_context(faults.inject(name, "delay", value=microseconds))
        yield


DELAYS: Final = (
    ("mover.before_copy", 200),
    ("mover.after_copy", 200),
    ("mover.after_commit", 200),
    ("volume.odd", 100),
    ("volume.after_bytes", 200),
    ("volume.after_publish", 200),
    ("volume.retire", 300),
    ("file.pread", 300),
)
"""Where time passes in a run with delays: between bytes, record, publishing and commit, and at retiring a record."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run histories until told to stop; print what cannot be. Returns the exit code: 0 where all holds."""
    parser = argparse.ArgumentParser(prog="python -m stepwell.testing.recorder", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="histories; each with the seed after")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--same-seed", action="store_true", help="the same calls in each")
    parser.add_argument("--kind", choices=[*KINDS], default=None, help="of store; without, each in turn")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--calls", type=int, default=25, help="of each thread between two barriers")
    parser.add_argument("--delays", action="store_true", help="let time pass at points of the core")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.seconds
    calls = steps = configurations = rounds = 0
    for number in range(given.rounds):
        if time.monotonic() >= until:
            break
        seed = given.seed + (0 if given.same_seed else number)
        kind = given.kind or [*KINDS][seed % len(KINDS)]
        plan = Plan(seed, kind, given.threads, given.calls, delays=DELAYS if given.delays else ())
        done = run(plan)
        rounds += 1
        calls += len(done.records)
        steps += done.checked.steps
        configurations += done.checked.configurations
        if done.violations:
            print("\n".join(done.violations))
            print(f"after {calls} calls in {rounds} histories")
            return 1
    print(f"{rounds} histories, {calls} calls, {steps} steps, {configurations} configurations: all of it has an order")
    return 0


if __name__ == "__main__":
    logging.getLogger("stepwell").setLevel(logging.ERROR)  # that a directory is on a tmpfs, and the like
    sys.exit(main())
