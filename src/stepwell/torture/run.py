"""Kill stores at work, start them again, and judge what comes back.

    world -> child at work --SIGKILL--> child that looks at every page, and works --SIGKILL--> ... --> one that closes
                              ledger: what it was acknowledged        judge: right, lost, wrong, phantom
"""

from __future__ import annotations

import fcntl
import random
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from stepwell import StepwellError, inspection, verification
from stepwell.endings import end_undisturbed, ended_in_order
from stepwell.torture.child import SCRIPT_STEPS, Report, Task
from stepwell.torture.damage import damage
from stepwell.torture.kennel import Child, Kennel
from stepwell.torture.ledger import Ledger, Line
from stepwell.torture.points import NEIGHBOUR_POINTS, POINTS, POWER_POINTS, occurrences
from stepwell.torture.results import MOST_PROBLEMS, Problem, Result, Row
from stepwell.torture.universe import Universe
from stepwell.torture.world import ARRANGEMENTS, Tiers, World

KILLS_A_WORLD: Final = 12
LOCK_SECONDS: Final = 10.0
LONGEST_WORK: Final = 0.4  # seconds from the first step to the kill
LONGEST_OPENING: Final = 0.06
NEIGHBOUR_SAVES: Final = 20  # of the one whose pages are to be read
NEIGHBOUR_SECONDS: Final = 20.0  # for which they are waited for, on a busy machine
STOPPED_SECONDS: Final = 0.02
SOON: Final = 0.002
ROUND: Final = 8  # kills of one of several children between two looks at all that they left


@dataclass(frozen=True, slots=True)
class TortureOptions:
    """What the command line asked for. minutes: in place of kills. world: only the one of this number."""

    kills: int = 50
    seed: int = 0
    tiers: Tiers | None = None
    processes: int = 1
    rolling: bool = False
    points: bool = False
    occurrences: int = 3
    damage: bool = False
    errors: bool = False
    minutes: float | None = None
    pages: int = 240
    page_bytes: int = 4096
    directory: str | None = None
    world: int | None = None
    sabotage: str = ""
    keep: bool = False

    def again(self, tiers: str, world: int) -> str:
        """Return the command that runs one world again."""
        words = [f"stepwell torture --seed {self.seed} --tiers {tiers} --world {world}"]
        if self.points:
            words += [f"--occurrences {self.occurrences}"]
        else:
            words += [f"--kills {self.kills}" if self.minutes is None else f"--minutes {self.minutes:g}"]
        if self.directory is not None:
            words += [f"--directory {shlex.quote(self.directory)}"]
        words += [f"--pages {self.pages} --page-bytes {self.page_bytes}"]
        words += [f"--processes {self.processes}"] * (self.processes > 1)
        words += [f"--{name}" for name in ("rolling", "points", "damage", "errors") if getattr(self, name)]
        return " ".join(words)


Advance = Callable[[int], None]


def torture(options: TortureOptions, advance: Advance = lambda kills: None) -> Result:
    """Run it all. advance: told of kills as they happen.

    Raises:
        OSError: nothing can be made in the directories.
    """
    began = time.monotonic()
    end = None if options.minutes is None else began + 60 * options.minutes
    universe = Universe.made(options.seed, pages=options.pages, page_bytes=options.page_bytes)
    problems: list[Problem] = []
    rows = []
    arrangements = ARRANGEMENTS if options.tiers is None else (options.tiers,)
    with ended_in_order():
        for at, tiers in enumerate(arrangements):
            kills = options.kills // len(arrangements) + (at < options.kills % len(arrangements))
            until = None if end is None else began + (end - began) * (at + 1) / len(arrangements)
            rows.append(_Run(options, universe, tiers, problems, advance).go(kills, until))
    settings: dict[str, object] = {name: getattr(options, name) for name in TortureOptions.__slots__ if name != "keep"}
    return Result(
        ok=all(row.is_well for row in rows),
        seconds=round(time.monotonic() - began, 1),
        settings=settings,
        rows=rows,
        problems=problems,
    )


def _undisturbed(kind: type[BaseException] | None, *reason: object) -> None:
    """Let nothing cut the removal of files short where a run is ended."""
    if kind is not None:
        end_undisturbed()


class _Run:
    """All worlds of one arrangement of tiers."""

    def __init__(
        self, options: TortureOptions, universe: Universe, tiers: Tiers, problems: list[Problem], advance: Advance
    ) -> None:
        self._options = options
        self._universe = universe
        self._tiers: Tiers = tiers
        self._problems = problems
        self._advance = advance
        self._row = Row(tiers)

    def go(self, kills: int, until: float | None) -> Row:
        """Run worlds until all kills are done, or the time is over."""
        number = 0 if self._options.world is None else self._options.world
        if self._options.points:
            return self._at_every_point(until)
        while True:
            left = kills - self._row.kills
            if (until is None and left <= 0) or (until is not None and time.monotonic() >= until):
                return self._row
            self._row.worlds += 1
            with self._world(number) as life:
                if self._options.processes > 1:
                    life.several(min(left, 2 * ROUND) if until is None else 2 * ROUND)
                else:
                    life.one_by_one(min(left, self._kills_a_world(kills)) if until is None else KILLS_A_WORLD)
            number += self._options.world is None

    def _at_every_point(self, until: float | None) -> Row:
        """Run two worlds for each point, roomy ones; a world that is asked for by its number is of one point."""
        for number, point in enumerate(POINTS):
            if (until is not None and time.monotonic() >= until) or self._options.world not in (None, 2 * number):
                continue
            self._row.points[point] = 0
            for anew in (True, False):
                self._row.worlds += 1
                processes = 2 if point in NEIGHBOUR_POINTS else 1
                with self._world(2 * number, is_durable=point in POWER_POINTS, processes=processes) as life:
                    life.die_at(point, anew=anew)
        return self._row

    def _kills_a_world(self, kills: int) -> int:
        """Let there be four worlds at least: every second is roomy."""
        return max(3, min(KILLS_A_WORLD, -(-kills // 4)))

    @contextmanager
    def _world(self, number: int, *, is_durable: bool = False, processes: int | None = None) -> Iterator[_Life]:
        options = self._options
        with ExitStack() as stack:
            disk = Path(tempfile.mkdtemp(prefix="stepwell-torture-", dir=options.directory))
            stack.callback(shutil.rmtree, disk, ignore_errors=True)
            memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
            shared = Path(tempfile.mkdtemp(prefix="stepwell-torture-", dir=memory))
            stack.callback(shutil.rmtree, shared, ignore_errors=True)
            world = World.chosen(
                number,
                options.seed,
                self._tiers,
                self._universe,
                directory=disk,
                shared_directory=shared,
                processes=options.processes if processes is None else processes,
                is_damaged=options.damage,
                has_errors=options.errors,
                is_durable=is_durable,
            )
            life = _Life(options, world, self._universe, self._row, self._problems, self._advance)
            stack.enter_context(life.kennel)
            stack.push(_undisturbed)
            before = len(self._problems)
            yield life
            if options.keep and len(self._problems) > before:
                last = self._problems[-1]
                text = f"{last.text}; kept in {disk} and {shared}"
                self._problems[-1] = msgspec.structs.replace(last, text=text)
                life.kennel.__exit__()
                stack.pop_all()


class _Life:
    """One world: who lives in it, what they were acknowledged, and what was found.

    Invariant: the ledger knows every line that anyone has said before a report is judged.
    """

    def __init__(
        self,
        options: TortureOptions,
        world: World,
        universe: Universe,
        row: Row,
        problems: list[Problem],
        advance: Advance,
    ) -> None:
        self._options = options
        self._world = world
        self._universe = universe
        self._row = row
        self._problems = problems
        self._advance = advance
        self._rng = random.Random(f"kills {options.seed} {world.tiers} {world.number}")
        self._ledger = Ledger(universe, world.is_roomy, knows_gone=world.processes == 1 and not world.is_harmed)
        self._unread: list[Line] = []
        self._noted: set[tuple[int, int]] = set()  # acknowledged pages that were counted
        self.kennel = Kennel(hears=self._hear)

    # ---- one process after the other --------------------------------------------------------------------------------

    def one_by_one(self, kills: int) -> None:
        """Kill one process after the other; each looks at what the one before it left. Then let one close."""
        for _ in range(kills):
            self._damage(is_used=False)
            child = self._start()
            if self._live_and_die(child):
                self._count_kill()
            self._judge_one_by_one(child)
            self._look_from_outside()
        self._finish()

    def _live_and_die(self, child: Child) -> bool:
        """Let a child come as far as chance will, and kill it. Returns whether it was at work until then."""
        roll, kennel = self._rng.random(), self.kennel
        if roll < 0.2:  # while it opens, recovers, looks
            kennel.hear(self._instant(LONGEST_OPENING), lambda: child.is_over)
        elif self._waited_for(child, "t"):
            kennel.hear(self._instant(LONGEST_WORK), lambda: child.is_over)
            self._damage(is_used=True)
            if roll < 0.45:  # in or after one kind of step
                what = self._rng.choice("abfghnvxz")
                count = child.said.get(what, 0)
                kennel.hear(LONGEST_WORK, lambda: child.is_over or child.said.get(what, 0) > count)
                kennel.hear(self._instant(SOON), lambda: child.is_over)
            elif roll > 0.88:  # while it closes
                kennel.tell_to_close(child)
                if self._waited_for(child, "q"):
                    kennel.hear(self._instant(LONGEST_OPENING), lambda: child.is_over)
            elif roll > 0.76:  # after it has stood still
                kennel.signal(child, signal.SIGSTOP)
                kennel.hear(self._instant(STOPPED_SECONDS))
        return self._end(child)

    def _instant(self, most: float) -> float:
        """Choose how long to wait: short times as often as long ones."""
        return float(10 ** self._rng.uniform(-3, 0) * most)

    def _judge_one_by_one(self, child: Child) -> None:
        lines, self._unread = self._unread, []
        for line in lines:
            if line.what == "R":
                self._judge(msgspec.json.decode(line.words[0], type=Report), is_all=True)
            else:
                self._ledger.apply([line])
        self._ledger.died(child.number)

    def _finish(self) -> None:
        """Look at what is left with a process that closes then, and at the directories after that."""
        child = self._start(steps=0)
        self._waited_for(child, "e")
        self._end(child)
        self._judge_one_by_one(child)
        self._look_from_outside(is_closed=True)

    # ---- several at a time ------------------------------------------------------------------------------------------

    def several(self, kills: int) -> None:
        """Kill one of several processes at a time; now and then all, and look at what they left."""
        living = [self._start(verifies=False) for _ in range(self._options.processes)]
        for kill in range(1, kills + 1):
            self.kennel.hear(self._instant(2 * LONGEST_WORK))
            self._damage(is_used=True)
            at = self._rng.randrange(len(living))
            old = living[at]
            if self._options.rolling:  # the new one comes before the old one goes
                new = self._start()
                if self._rng.random() < 0.7:
                    self._waited_for(new, "t")
            if self._rng.random() < 0.15:
                self.kennel.signal(old, signal.SIGSTOP)
                self.kennel.hear(self._instant(5 * STOPPED_SECONDS))
            elif self._rng.random() < 0.3:
                self.kennel.tell_to_close(old)
                if self._rng.random() < 0.5:
                    self._waited_for(old, "e")
            if self._end(old):
                self._count_kill()
            living[at] = new if self._options.rolling else self._start()
            self._look_at_budgets()
            if kill % ROUND == 0 or kill == kills:
                for child in living:
                    if self._end(child):
                        self._count_kill()
                self._damage(is_used=False)
                self._judge_all()
                self._look_from_outside()
                living = [] if kill == kills else [self._start(verifies=False) for _ in living]
        self._finish()

    def _judge_all(self) -> None:
        """Take into account what all have said, now that all are dead, and have somebody look."""
        lines, self._unread = self._unread, []
        self._ledger.apply(line for line in lines if line.what != "R")
        for line in lines:
            self._ledger.died(line.child)
        child = self._start(steps=0)
        self._waited_for(child, "t")
        self._end(child)
        self._judge_one_by_one(child)

    # ---- at a point -------------------------------------------------------------------------------------------------

    def die_at(self, point: str, *, anew: bool) -> None:
        """Let a process die at a point of the core, at its first arrival there, at its second, ... then look.

        anew: in directories without anything in them, so that it is at births too; else in what the ones before left.
        """
        for at, nth in enumerate(occurrences(self._options.occurrences)):
            if anew and at:
                self._clear_away()
            neighbour = self._start_neighbour() if point in NEIGHBOUR_POINTS else None
            child = self._start(point=point, nth=nth, steps=SCRIPT_STEPS)
            self._waited_for(child, "e")
            has_fired = self._end(child, may_die=True)
            if neighbour is None:
                self._judge_one_by_one(child)
            else:
                self._end(neighbour)
                self._judge_all()
            self._look_from_outside()
            if at % 2:
                self._finish()
            if has_fired:
                self._row.points[point] += 1
                self._count_kill()
            elif neighbour is None:  # else it depends on what the neighbour had, and another time it may
                break
        self._finish()

    def _start_neighbour(self) -> Child:
        """Start a process that works beside the one that is to die, and let it save something to be read."""
        neighbour = self._start()
        kennel = self.kennel
        if self._waited_for(neighbour, "t"):
            kennel.hear(NEIGHBOUR_SECONDS, lambda: neighbour.is_over or neighbour.said.get("a", 0) >= NEIGHBOUR_SAVES)
        return neighbour

    def _clear_away(self) -> None:
        """Begin again with directories that are not there."""
        for path in self._world.paths.values():
            shutil.rmtree(path, ignore_errors=True)
        self._ledger = Ledger(self._universe, self._ledger.is_roomy, self._ledger.knows_gone)
        self._noted.clear()

    # ---- children ---------------------------------------------------------------------------------------------------

    def _start(
        self, *, verifies: bool = True, steps: int | None = None, point: str = "", nth: int = 0, seed: int | None = None
    ) -> Child:
        number = self.kennel.next_number()
        task = Task(
            number=number,
            seed=self._rng.getrandbits(32) if seed is None else seed,
            epoch=self._ledger.epoch,
            has_begun=frozenset(self._ledger.begun),
            verifies=verifies,
            steps=steps,
            point=point,
            nth=nth,
            sabotage=self._options.sabotage if steps != 0 else "",
        )
        return self.kennel.start(self._world, self._universe, task)

    def _waited_for(self, child: Child, what: str) -> bool:
        """Wait until a child has said something. False: it has ended without, or hangs; then that is noted."""
        if self.kennel.wait_for(child, what):
            return True
        if not child.is_over:
            self._note("other", f"child {child.number} hangs; its threads:\n{self.kennel.stacks(child)}")
        return False

    def _end(self, child: Child, *, may_die: bool = False) -> bool:
        """Kill a child, or bury the one that has ended.

        Args:
            may_die: it may have died by a kill of its own.

        Returns:
            Whether it was killed: by us while it lived, or as asked.
        """
        was_over = child.is_over
        if was_over or child.said.get("e"):
            self.kennel.bury(child)
        else:
            self.kennel.kill(child)
        has_died = may_die and was_over and child.status == -signal.SIGKILL
        has_failed = bool(child.said.keys() & {"W", "K", "E"})
        if child.status not in (0, -signal.SIGKILL) and not has_failed:
            self._note("other", f"child {child.number} ended by itself with status {child.status}: {child.noise()}")
        elif child.status == -signal.SIGKILL and not (child.is_killed or may_die):
            self._note("other", f"child {child.number} was killed by someone else: out of memory? {child.noise()}")
        elif child.status == 0 and not child.said.get("e"):
            self._note("other", f"child {child.number} ended without closing: {child.noise()}")
        child.errors.close()
        return has_died or child.is_killed

    def _hear(self, line: Line) -> None:
        self._unread.append(line)
        if line.what == "b":
            self._ledger.apply([line])  # whoever looks from now on may find it
        elif line.what == "R" and self._world.processes > 1:
            self.kennel.hear_all()
        elif line.what == "W":
            self._note("wrong", line.words[0])
        elif line.what == "K":
            self._note("phantom", line.words[0])
        elif line.what == "E":
            self._note("other", line.words[0])

    def _count_kill(self) -> None:
        self._row.kills += 1
        self._advance(1)

    # ---- judging ----------------------------------------------------------------------------------------------------

    def _judge(self, report: Report, *, is_all: bool) -> None:
        """Compare what a child found with what it must, must not and may find. is_all: it could find all there is."""
        ledger, row, epoch = self._ledger, self._row, report.epoch
        row.judged += 1
        if report.first_hit >= 0:
            row.first_hits.append(report.first_hit)
        found: dict[tuple[str, str], list[int]] = {}
        for page, letter in enumerate(report.pages):
            name = (page, epoch)
            if letter == "w":
                found.setdefault(("wrong", "came back with other bytes"), []).append(page)
            elif letter == "r" and name not in ledger.begun:
                found.setdefault(("phantom", "were found, and nobody has saved them"), []).append(page)
            elif letter == "r" and name in ledger.gone:
                found.setdefault(("phantom", "came back, and they had been forgotten"), []).append(page)
            elif letter == "r":
                row.right += 1
            elif is_all and name in ledger.held:
                found.setdefault(("lost", "are gone, and were acknowledged"), []).append(page)
            elif is_all and name in ledger.acknowledged:
                row.allowed += 1
            if letter == "." and is_all:
                ledger.held.discard(name)
                ledger.acknowledged.discard(name)
        for (what, text), pages in found.items():
            named = ", ".join(map(str, pages[:8])) + (f" and {len(pages) - 8} more" if len(pages) > 8 else "")
            self._note(what, f"pages {named} {text} (epoch {epoch})", count=len(pages))
        for problem in report.problems:
            self._note("other", problem)
        row.checksum_failures += report.checksum_failures
        if report.checksum_failures and not self._world.is_harmed:
            self._note("other", f"{report.checksum_failures} checksums were wrong, and nobody damaged anything")
        row.acknowledged += len(ledger.acknowledged - self._noted)
        self._noted |= ledger.acknowledged

    def _look_at_budgets(self) -> None:
        """Compare what is in the directories with what may be."""
        for tier, path in self._world.paths.items():
            if self._world.is_harmed or not path.exists():
                continue
            total = inspection.inspect_directory(str(path)).total_bytes
            if total > self._world.capacities[tier]:
                self._note("other", f"{tier}: {total} bytes, and {self._world.capacities[tier]} are allowed")

    def _look_from_outside(self, *, is_closed: bool = False) -> None:
        """Look at the directories without a store: budgets, damage, and after a proper end what is left there."""
        self._wait_for_locks()
        self._look_at_budgets()
        for tier, path in self._world.paths.items():
            if self._world.is_harmed or not (path / "directory.lock").exists():  # killed before it made any
                continue
            try:
                checks = list(verification.verify_directory(str(path)))
                report = inspection.inspect_directory(str(path))
            except StepwellError as error:
                self._note("other", f"{tier}: {type(error).__name__}: {error}")
                continue
            for check in checks:
                if not check.is_well:
                    what = f"{check.condition} {check.why} {check.damaged}"
                    self._note("other", f"{tier}: volume {check.volume_id}: {what}")
            left = [*report.leftovers, *report.processes] if is_closed else []
            if left or report.strangers:
                self._note("other", f"{tier}: left behind: {left or report.strangers}")

    def _wait_for_locks(self) -> None:
        """Return once nobody holds a volume of the dead.

        A store's keeper starts readers of old LMDB environments: between fork and exec such a process has the locks
        too, and it was not killed.
        """
        end = time.monotonic() + LOCK_SECONDS
        for path in self._world.paths.values():
            for lock in path.glob("v-*.lock"):
                with suppress(FileNotFoundError), lock.open() as file:
                    while True:
                        try:
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            break
                        except BlockingIOError:
                            if time.monotonic() > end:
                                self._note("other", f"{lock} is still locked, and its holder is dead")
                                return
                            time.sleep(0.001)

    def _damage(self, *, is_used: bool) -> None:
        if not self._world.is_damaged:
            return
        for _ in range(self._rng.choice((0, 1, 1, 3))):
            if damage(self._world, self._rng, is_used=is_used):
                self._row.damages += 1

    def _note(self, what: str, text: str, *, count: int = 1) -> None:
        setattr(self._row, what, getattr(self._row, what) + count)
        if len(self._problems) < MOST_PROBLEMS:
            where = f"{self._world.tiers}, world {self._world.number}, kill {self._row.kills}"
            again = self._options.again(self._world.tiers, self._world.number)
            self._problems.append(Problem(what, f"{where}: {text}", again))
