"""Work as an engine would, log what was acknowledged, look at every byte that comes back; until killed.

Forked from the process that kills, before any store is opened: what is imported is paid for once. Everything a child
says goes into one pipe, a line a write (ledger.py; and here):

    o              the store is open                     R JSON   what was found when it was opened (Report)
    t              it takes up work                      W TEXT   wrong bytes were served
    q              it is closing                         K TEXT   a page was found that must not be
    e              it has closed, and ends               E TEXT   something else is not as it must be
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec
import numpy as np

from stepwell import (
    Match,
    PageStore,
    Pinned,
    Residency,
    SaveOutcome,
    StepwellError,
    StoreConfig,
    Tier,
    Transfer,
)
from stepwell.torture.universe import AXES, MOST_PAGES, PAGE_TOKENS, Bytes, Chain, Universe
from stepwell.torture.world import World

REGIONS: Final = 6  # saves and loads that may be under way at a time
PATIENCE: Final = 45.0  # seconds for what should take milliseconds: beyond, it hangs
SCRIPT_STEPS: Final = 60  # of a child that ends by itself
LONE_TTL: Final = 3600.0
READER_PAUSE: Final = 0.0005  # seconds between two loads of the thread beside
ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE)
FAILING: Final = ("file.*", "volume.*", "file.pwrite", "file.pread", "file.open", "file.lock", "file.reserve")
POISON: Final = 0xEE  # in the memory that is loaded into

Names = dict[int, str]


class Report(msgspec.Struct, frozen=True):
    """What a child found in the directories when it had opened a store on them.

    pages: a letter a page: r right, w wrong, . not found. opened, first_hit: seconds since the fork; -1: no hit.
    problems: what else is not as it must be.
    """

    epoch: int
    pages: str
    opened: float
    first_hit: float
    checksum_failures: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Task:
    """What one child is to do.

    steps: of work, then it closes; None: for ever. verifies: whether it looks at every page first. has_begun: pages
    that somebody has begun to save, by epoch; of the others none may be found. point, nth: where it is to die.
    sabotage: how it is to break the store.
    """

    number: int
    seed: int
    epoch: int
    has_begun: frozenset[tuple[int, int]]
    verifies: bool = True
    steps: int | None = None
    point: str = ""
    nth: int = 0
    sabotage: str = ""


class FoundError(Exception):
    """Report something that must never be. what: the letter of its line."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


def live(world: World, universe: Universe, task: Task, *, pipe: int, control: int, errors: int) -> NoReturn:
    """Be a child: never returns, and runs nothing of the process it was forked from on the way out.

    Args:
        pipe: what it says goes there. control: a byte there, and it closes. errors: for what Python and the store
            print, and stacks.
    """
    code = 1
    try:
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        faulthandler.enable(errors)
        faulthandler.register(signal.SIGUSR1, file=errors, all_threads=True)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the one that kills
        logging.getLogger("stepwell").setLevel(logging.ERROR)
        os.set_blocking(control, False)
        worker = Worker(world, universe, task, pipe, control)
        worker.run()
        code = 0
    except FoundError as failure:
        _say(pipe, failure.what, str(failure))
    except BrokenPipeError:  # who listens has gone
        code = 1
    except BaseException:  # noqa: BLE001  (whatever it is, it is told: nothing above this would)
        _say(pipe, "E", traceback.format_exc()[-2500:])
    finally:
        os._exit(code)


def _say(pipe: int, what: str, text: str = "") -> None:
    line = f"{time.monotonic_ns()} {what} {text}".replace("\n", "\\n") + "\n"
    os.write(pipe, line.encode())


@dataclass(slots=True)
class _Moving:
    """A save or a load under way in one region of the pool. found_epoch: of a load, what its match was found under."""

    transfer: Transfer
    chain: int
    pages: int
    is_save: bool
    may_be_promised: bool = False
    is_hurried: bool = False


@dataclass(slots=True)
class _Region:
    """A part of the pool that one save or load uses. after: what was in it when a load with a deadline had ended."""

    first: int
    after: Bytes | None = None
    moving: _Moving | None = None
    slots: range = field(init=False)

    def __post_init__(self) -> None:
        self.slots = range(self.first, self.first + MOST_PAGES)


class Worker:
    """One child's store, and what it does with it.

    Invariant: a line that promises is written after the store has acknowledged; one that takes back, before it is
    asked.
    """

    def __init__(self, world: World, universe: Universe, task: Task, pipe: int, control: int) -> None:
        self._born = time.monotonic()
        self._world = world
        self._universe = universe
        self._task = task
        self._pipe = pipe
        self._control = control
        self._rng = random.Random(f"child {task.seed}")
        self._epoch = task.epoch
        self._begun = set(task.has_begun)
        self._regions = [_Region(MOST_PAGES * at) for at in range(REGIONS)]
        self._pins: list[tuple[int, Pinned]] = []
        self._rows = np.zeros((MOST_PAGES * REGIONS, universe.page_bytes), np.uint8)
        self._stopping = threading.Event()
        self._reader: threading.Thread | None = None
        self._failed: list[FoundError] = []
        self._store: PageStore
        self._is_alone = world.processes == 1

    def run(self) -> None:
        """Open, look, work, close; die on the way where a point is named."""
        with ExitStack() as stack:
            if self._task.point:
                from stepwell.testing.faults import inject

                stack.enter_context(inject(self._task.point, "kill", nth=self._task.nth))
            self._live()

    def _live(self) -> None:
        self._open()
        if self._task.verifies:
            self._say("R", msgspec.json.encode(self._look()).decode())
        self._say("t")
        if self._world.has_reader:
            self._reader = threading.Thread(target=self._read_beside, name="reader", daemon=True)
            self._reader.start()
        done = 0
        while (self._task.steps is None or done < self._task.steps) and not self._is_told_to_close():
            self._step()
            done += 1
            if self._failed:
                raise self._failed[0]
        self._drain()
        self._stopping.set()
        if self._reader is not None:
            self._reader.join(PATIENCE)
            if self._reader.is_alive():
                raise FoundError("E", f"a load did not end within {PATIENCE} s")
        self._say("q")
        self._store.close()
        self._say("e")

    # ---- opening and looking ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._world.has_errors and self._rng.random() < 0.3:
            with self._failing(), suppress(StepwellError), PageStore(self._configured()):
                pass  # a proper error, or a store that can be closed
        self._store = PageStore(self._configured())
        self._pool = self._store.lend(self._universe.shaped(self._rows), axes=AXES)
        if self._task.sabotage:
            from stepwell.testing import hooks

            getattr(hooks, self._task.sabotage)(self._store)
        self._say("o")

    def _configured(self) -> StoreConfig:
        return self._world.config(self._universe, self._epoch, self._rng.getrandbits(32))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Let system calls fail, all at some points of the core, or one of them."""
        from stepwell.testing.faults import inject

        error, nth = self._rng.choice(ERRORS), self._rng.choice((0, 1, 1, 2, 4, 9))
        with inject(self._rng.choice(FAILING), "errno", nth=nth, value=error):
            yield

    def _look(self) -> Report:
        """Ask for every page, by its key and as part of its chain, and compare it."""
        universe, store, problems = self._universe, self._store, []
        opened = time.monotonic() - self._born
        first_hit = -1.0
        pages = ["."] * len(universe.keys)
        for chain in self._some_chains():  # the way of an engine first: that is what a restart keeps waiting
            found, wrong = self._load_now(chain)
            for page in found:
                pages[page] = "r"
            for page in wrong:
                pages[page] = "w"
            if found and first_hit < 0:
                first_hit = time.monotonic() - self._born
        keys = np.frombuffer(b"".join(universe.keys), np.uint8).reshape(len(universe.keys), -1)
        rows = np.full((len(keys), universe.page_bytes), POISON, np.uint8)
        ok = store.load_keys(keys, into=store.lend(universe.shaped(rows), axes=AXES)[:])
        for page in np.flatnonzero(ok).tolist():
            is_right = np.array_equal(rows[page], universe.stamp(page, self._epoch))
            pages[page] = "r" if is_right and pages[page] != "w" else "w"
        problems += self._whole()
        return Report(
            epoch=self._epoch,
            pages="".join(pages),
            opened=opened,
            first_hit=first_hit,
            checksum_failures=store.stats().checksum_failures,
            problems=problems,
        )

    def _some_chains(self) -> list[Chain]:
        chains = self._universe.chains
        return [*self._rng.sample(chains, min(len(chains), 24)), *self._universe.strangers]

    def _load_now(self, chain: Chain) -> tuple[list[int], list[int]]:
        """Load what is cached of a chain. Returns (pages that were right, pages that were wrong)."""
        region = self._regions[0]
        region.after = None
        with self._store.match(chain.tokens, namespace=chain.namespace) as match:
            count = match.pages
            rows = self._rows[region.first : region.first + count]
            rows[:] = POISON
            transfer = self._store.load(match, into=self._pool[region.first : region.first + count])
        if not transfer.wait(PATIENCE):
            raise FoundError("E", f"a load did not end within {PATIENCE} s: {transfer!r}")
        right: list[int] = []
        wrong: list[int] = []
        for row in np.flatnonzero(transfer.ok).tolist():
            page = chain.pages[row]
            same = np.array_equal(rows[row], self._universe.stamp(page, self._epoch))
            (right if same else wrong).append(page)
        return right, wrong

    def _whole(self) -> list[str]:
        """Check that nothing moves, that each tier's slots add up, and the index's own invariants."""
        problems = []
        if not self._store.flush(PATIENCE):
            problems.append(f"transfers were not done within {PATIENCE} s")
        for name, tier in self._store.stats().tiers.items():
            parts = tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined
            if parts != tier.capacity:
                problems.append(f"{name}: the slots do not add up: {tier}")
            if tier.quarantined and not self._world.is_harmed:
                problems.append(f"{name}: {tier.quarantined} pages are quarantined, and nobody damaged them")
        wrong = self._store.check()
        if wrong:
            problems.append(f"the index: {wrong}")
        return problems

    # ---- working ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Do one thing, chosen by the seed."""
        roll = self._rng.random()
        for chance, act in self._acts():
            roll -= chance
            if roll < 0:
                act()
                return
        self._save()

    def _acts(self) -> list[tuple[float, Callable[[], None]]]:
        acts = [
            (0.22, self._load),
            (0.05, self._hurried_load),
            (0.05, self._forget),
            (0.04, self._evict),
            (0.04, self._pin),
            (0.04, self._by_keys),
            (0.03, self._drain),
            (0.02, self._check),
        ]
        if self._world.has_errors:
            acts += [(0.1, self._meet_errors)]
        if self._is_alone:
            acts += [(0.012, self._turn_epoch), (0.008, self._clear), (0.01, self._open_again)]
        return acts

    def _save(self) -> None:
        at, chain = self._some_chain()
        pages = self._rng.randrange(1, len(chain.pages) + 1)
        region = self._free_region()
        self._rows[region.first : region.first + pages] = self._universe.stamps(chain.pages[:pages], self._epoch)
        self._begins(at, pages)
        result = self._store.save(
            chain.tokens[: pages * PAGE_TOKENS],
            source=self._pool[region.first : region.first + pages],
            namespace=chain.namespace,
        )
        region.moving = _Moving(
            result.transfer, at, pages - result.refused, is_save=True, may_be_promised=result.pending == 0
        )
        if self._rng.random() < 0.4:
            self._finish(region)

    def _by_keys(self) -> None:
        """Save a chain under its keys, as an engine with hashes of its own does."""
        at, chain = self._some_chain()
        region = self._free_region()
        keys = [self._universe.keys[page] for page in chain.pages]
        rows = self._rows[region.first : region.first + len(keys)]
        rows[:] = self._universe.stamps(chain.pages, self._epoch)
        slots = self._pool[region.first : region.first + len(keys)]
        self._begins(at, len(keys))
        outcomes = self._store.save_keys(keys, source=slots, first_of_chain=True)
        stored = next((row for row, outcome in enumerate(outcomes) if outcome != SaveOutcome.STORED), len(keys))
        if stored:
            self._say("a", f"{at} {stored} {self._epoch}")
        rows[:] = POISON
        self._store.probe(keys, lease=self._rng.choice((0.0, 0.0, 0.0, 0.01)))
        ok = self._store.load_keys(keys, into=slots)
        self._compare(chain, np.flatnonzero(ok).tolist(), rows, "by its key")

    def _load(self, deadline: float | None = None) -> None:
        at, chain = self._some_chain(strangers=True)
        region = self._free_region()
        with self._store.match(chain.tokens, namespace=chain.namespace) as match:
            self._judge_match(chain, match)
            count = match.pages
            if count == 0:
                return
            self._rows[region.first : region.first + count] = POISON
            transfer = self._store.load(
                match,
                into=self._pool[region.first : region.first + count],
                order="layer" if self._rng.random() < 0.3 else "page",
                deadline=deadline,
            )
        region.moving = _Moving(transfer, at, count, is_save=False, is_hurried=deadline is not None)
        if self._rng.random() < 0.4:
            self._finish(region)

    def _hurried_load(self) -> None:
        self._load(deadline=10 ** self._rng.uniform(-5, -2.5))

    def _judge_match(self, chain: Chain, match: Match) -> None:
        """No page of a match may be one that nobody has saved."""
        if not self._is_alone:
            return  # another process may have saved it meanwhile
        for page in chain.pages[: match.pages]:
            if (page, self._epoch) not in self._begun:
                raise FoundError("K", f"page {page} was found under epoch {self._epoch}, and nobody has saved it")

    def _forget(self) -> None:
        at, chain = self._some_chain()
        keep = self._rng.randrange(0, len(chain.pages))
        self._drain()
        if self._rng.random() < 0.5:
            self._unpin()
        self._say("f", f"{at} {keep} {self._epoch}")
        is_certain = self._holds_nothing()
        self._store.forget(chain.tokens, namespace=chain.namespace, keep=keep * PAGE_TOKENS)
        # A record that cannot be written yet names its page until it can: a kill before that brings it back.
        is_certain &= not any(tier.owed for tier in self._store.stats().tiers.values())
        self._say("g" if is_certain else "n", f"{at} {keep} {self._epoch}")
        if is_certain:
            left = self._store.cached(chain.tokens, tiers=tuple(Tier), namespace=chain.namespace)
            if left > keep * PAGE_TOKENS:
                raise FoundError("K", f"{left} tokens of chain {at} are cached, and it was forgotten past page {keep}")

    def _evict(self) -> None:
        tiers = [Tier[name.upper()] for name in self._world.paths]
        tier = self._rng.choice(tiers)
        pages = self._rng.randrange(1, max(2, self._world.pages // 8))
        if tier is Tier.SHARED and len(tiers) == 2 and not self._world.selective:
            self._store.evict(tier, pages)  # whatever leaves is on disk
            return
        if not self._is_alone:
            return  # what others were promised may lie in volumes that this process has adopted
        self._drain()
        self._say("v", str(self._epoch))
        self._store.evict(tier, pages)
        self._say_what_is_held()

    def _say_what_is_held(self) -> None:
        # Beside a disk shared memory is small: what is there alone may have to leave.
        is_small = self._world.tiers == "both" and not self._world.selective
        keeping = (Tier.DISK,) if is_small else (Tier.SHARED, Tier.DISK)
        mask = 0
        for page in range(self._universe.known):
            state = self._store.state(self._universe.keys[page])
            if any(state[tier] is Residency.RESIDENT for tier in keeping):
                mask |= 1 << page
        self._say("h", f"{mask:x} {self._epoch}")

    def _holds_nothing(self) -> bool:
        """Whether no pin, no lease and no other process keeps a page from leaving."""
        is_free = self._is_alone and not self._pins and self._reader is None
        return is_free and self._store.stats().leases == 0

    def _clear(self) -> None:
        self._drain()
        self._unpin()
        self._say("v", str(self._epoch))
        is_certain = self._holds_nothing()
        self._store.clear()
        if is_certain:
            self._say("z", str(self._epoch))
        else:
            self._say_what_is_held()

    def _turn_epoch(self) -> None:
        if self._reader is not None:
            return  # it compares with the bytes of one epoch
        self._drain()
        epoch = self._rng.randrange(1, 4)
        if epoch != self._epoch:
            self._pins.clear()  # they end; set again, an epoch is the same
        self._say("x", str(epoch))
        self._store.set_epoch(epoch)
        self._epoch = epoch
        for chain in self._some_chains():
            with self._store.match(chain.tokens, namespace=chain.namespace) as match:
                self._judge_match(chain, match)

    def _pin(self) -> None:
        if len(self._pins) >= 3 or self._rng.random() < 0.2:
            self._check_pins()
            self._unpin()
            return
        at, chain = self._some_chain()
        pinned = self._store.pin(chain.tokens, ttl=LONE_TTL, namespace=chain.namespace)
        if pinned.tokens:
            self._pins.append((at, pinned))

    def _unpin(self) -> None:
        while self._pins:
            self._pins.pop()[1].close()

    def _check_pins(self) -> None:
        if self._world.is_harmed or not self._is_alone:
            return
        for at, pinned in self._pins:
            chain = self._universe.chains[at]
            tiers = tuple(Tier[name.upper()] for name in self._world.paths)
            left = self._store.cached(chain.tokens, tiers=tiers, namespace=chain.namespace)
            if left < pinned.tokens:
                raise FoundError("E", f"{pinned.tokens} tokens of chain {at} are pinned, {left} are left")

    def _meet_errors(self) -> None:
        """Do a few things while system calls fail: each ends in a value or a proper error, and all stays whole."""
        acts = (self._save, self._save, self._load, self._load, self._by_keys, self._evict, self._forget, self._drain)
        with self._failing():
            for _ in range(self._rng.randrange(1, 6)):
                with suppress(StepwellError):
                    self._rng.choice(acts)()
        self._check()

    def _check(self) -> None:
        self._drain()
        if self._rng.random() < 0.3:
            checked = self._store.verify()
            if checked.damaged and not self._world.is_harmed:
                raise FoundError("E", f"verify() found {checked.damaged} damaged pages, and nobody damaged them")
        if self._reader is None:
            problems = self._whole()
            if problems:
                raise FoundError("E", "; ".join(problems))

    def _open_again(self) -> None:
        if self._reader is not None:
            return  # it has the store
        self._drain()
        self._pins.clear()
        self._store.close()
        self._open()
        report = self._look()
        self._say("R", msgspec.json.encode(report).decode())

    # ---- what is under way ------------------------------------------------------------------------------------------

    def _free_region(self) -> _Region:
        region = self._rng.choice(self._regions)
        if region.moving is not None:
            self._finish(region)
        if region.after is not None:
            if not np.array_equal(region.after, self._rows[region.slots.start : region.slots.stop]):
                raise FoundError("W", "bytes landed in the caller's memory after a load's deadline")
            region.after = None
        return region

    def _drain(self) -> None:
        """Wait for all that is under way."""
        for region in self._regions:
            if region.moving is not None:
                self._finish(region)
        if not self._store.flush(PATIENCE):
            raise FoundError("E", f"transfers were not done within {PATIENCE} s")

    def _finish(self, region: _Region) -> None:
        moving, region.moving = region.moving, None
        assert moving is not None
        transfer = moving.transfer
        if not transfer.wait(PATIENCE):
            what = "save" if moving.is_save else "load"
            raise FoundError("E", f"a {what} was not done within {PATIENCE} s: {transfer!r}")
        if moving.is_save:
            if moving.may_be_promised and moving.pages and transfer.ok.all():
                self._say("a", f"{moving.chain} {moving.pages} {self._epoch}")
            return
        chain = self._chain(moving.chain)
        rows = self._rows[region.first : region.first + moving.pages]
        self._compare(chain, np.flatnonzero(transfer.ok).tolist(), rows, "as part of its chain")
        if moving.is_hurried:
            region.after = self._rows[region.slots.start : region.slots.stop].copy()

    def _compare(self, chain: Chain, which: list[int], rows: Bytes, how: str) -> None:
        for row in which:
            page = chain.pages[row]
            if not np.array_equal(rows[row], self._universe.stamp(page, self._epoch)):
                raise FoundError("W", f"page {page} was served {how} with other bytes under epoch {self._epoch}")

    def _begins(self, at: int, pages: int) -> None:
        self._begun.update((page, self._epoch) for page in self._universe.chains[at].pages[:pages])
        self._say("b", f"{at} {pages} {self._epoch}")

    def _chain(self, at: int) -> Chain:
        chains = self._universe.chains
        return chains[at] if at < len(chains) else self._universe.strangers[at - len(chains)]

    def _some_chain(self, *, strangers: bool = False) -> tuple[int, Chain]:
        chains = self._universe.chains
        at = self._rng.randrange(len(chains) + (len(self._universe.strangers) if strangers else 0))
        return at, self._chain(at)

    def _read_beside(self) -> None:
        """Load at random, beside the thread that does everything else."""
        rng = random.Random(f"reader {self._task.seed}")
        universe, store = self._universe, self._store
        rows = np.zeros((MOST_PAGES, universe.page_bytes), np.uint8)
        pool = store.lend(universe.shaped(rows), axes=AXES)
        try:
            while not self._stopping.wait(READER_PAUSE):
                chain = rng.choice(universe.chains)
                with store.match(chain.tokens, namespace=chain.namespace) as match:
                    rows[:] = POISON
                    transfer = store.load(match, into=pool[: match.pages])
                if not transfer.wait(PATIENCE):
                    raise FoundError("E", f"a load was not done within {PATIENCE} s: {transfer!r}")
                self._compare(chain, np.flatnonzero(transfer.ok).tolist(), rows, "to a second thread")
        except FoundError as failure:
            self._failed.append(failure)
        except Exception:  # noqa: BLE001  (whatever it is, it is told)
            self._failed.append(FoundError("E", traceback.format_exc()[-2500:]))

    def _say(self, what: str, text: str = "") -> None:
        _say(self._pipe, what, text)

    def _is_told_to_close(self) -> bool:
        try:
            return os.read(self._control, 1) != b""
        except BlockingIOError:
            return False
