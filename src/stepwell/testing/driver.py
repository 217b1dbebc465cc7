"""Drive a store with a seed, without hypothesis: episodes of a few thousand steps each, every one of them checked.

An episode is a world of a shape of its own, decided by the seed and the episode's number alone: what was done before it
changes nothing, so that a run can be ended at any time and gone on with, and a failure is replayed by its steps.
"""

from __future__ import annotations

import ast
import gc
import itertools
import os
import random
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from stepwell.testing.operations import Operations, operations_of
from stepwell.testing.sequence_operations import SequenceOperations
from stepwell.testing.sequence_world import SequenceWorld
from stepwell.testing.world import Shape, World

EPISODE_STEPS: Final = 4000
SIZES: Final = (
    (4, 1, 1),
    (4, 1, 1),
    (3, 1, 0),
    (6, 0, 1),
    (5, 0, 0),
    (0, 1, 1),
    (0, 2, 0),
    (0, 0, 2),
    (0, 1, 2),
)
"""Host slots, shared volumes, disk volumes."""
SHARED_PART: Final = 0.15
DEVICE_PART: Final = 0.35
"""Of the worlds of one process whose store has what a device tier needs."""
SELECTIVE_PART: Final = 0.3
SHRINK_SECONDS: Final = 120.0
MEMORY: Final = Path("/dev/shm")
WORLD_BYTES: Final = 64 << 20
"""More than the files of any world have."""

Step = tuple[str, dict[str, Any]]
Steps = list[Step]


class Failure(Exception):  # noqa: N818 a finding, not an error of the driver's
    """A store did what it may not. steps: that led there, the first one makes the world."""

    def __init__(self, steps: Steps, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.steps = steps
        self.cause = cause


@dataclass
class Totals:
    """What a run has done so far: steps that had something to do, and those that had not; what came of them."""

    steps: int = 0
    idle: int = 0
    episodes: int = 0
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Self:
        """Read what was written down. Raises: ValueError, KeyError, TypeError."""
        steps, idle, episodes = (whole(known[key]) for key in ("steps", "idle", "episodes"))
        operations, counted = (Counter(dict(known[key])) for key in ("operations", "counted"))
        for number in (*operations.values(), *counted.values()):
            whole(number)
        return cls(steps, idle, episodes, float(known["seconds"]), operations, counted)

    def known(self) -> dict[str, Any]:
        """Return all of it as JSON can have it."""
        return {
            "steps": self.steps,
            "idle": self.idle,
            "episodes": self.episodes,
            "seconds": round(self.seconds, 3),
            "operations": dict(self.operations.most_common()),
            "counted": dict(self.counted),
        }

    def add(self, other: Totals) -> None:
        """Take what another part of the run has done, but for how long it took: it may have run beside this one."""
        self.steps += other.steps
        self.idle += other.idle
        self.episodes += other.episodes
        self.operations.update(other.operations)
        self.counted.update(other.counted)


def whole(number: Any) -> int:
    """Check that a number that was written down is a whole one. Raises: TypeError."""
    if not isinstance(number, int):
        raise TypeError(f"{number!r} is no whole number")
    return number


# ---- steps as text ---------------------------------------------------------------------------------------------------


def show(step: Step) -> str:
    """Return one step as a line of text: `save(who=0, path=(0, 2), space=1)`."""
    name, arguments = step
    return f"{name}({', '.join(f'{key}={_plain(value)!r}' for key, value in arguments.items())})"


def _plain(value: object) -> object:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read(text: str) -> Steps:
    """Return the steps of a text: one a line, or parted by semicolons. Nothing of it is run.

    Raises:
        ValueError: it is none, or a step that nobody knows, or with what it may not have.
    """
    steps: Steps = []
    try:
        for statement in ast.parse(text).body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
                raise ValueError(f"what begins at {statement.lineno}:{statement.col_offset + 1} is no step")
            steps.append((call.func.id, {each.arg or "**": ast.literal_eval(each.value) for each in call.keywords}))
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"no steps: {error}") from error
    known = operations_of(SequenceOperations).keys() | {"begin"}
    for name, _ in steps:
        if name not in known:
            raise ValueError(f"{name} is no step; there are {', '.join(sorted(known))}")
    if not steps or steps[0][0] != "begin":
        raise ValueError("the first step has to be begin(...), which makes the world")
    check_steps(steps)
    return steps


def check_steps(steps: Steps) -> None:
    """Check that steps are those of a world that there can be.

    Raises: ValueError.
    """
    shape, _ = begun(steps[0])
    operations = operations_of(kinds_of(shape)[1])
    for name, given in steps[1:]:
        if name not in operations:
            raise ValueError(f"{name} is no step of a world that begin({', '.join(steps[0][1])}) makes")
        known = operations[name].arguments
        if given.keys() != known.keys():
            raise ValueError(f"{name} is given ({', '.join(given)}), it has ({', '.join(known)})")
        for key, value in given.items():
            if not any(type(value) is type(each) and value == each for each in known[key]):
                raise ValueError(f"{name}: {key} is never {value!r:.80}, but for example {known[key][0]!r}")


def begun(step: Step) -> tuple[Shape, int]:
    """Return the world that a step begin(...) makes: its shape and its seed.

    Raises: ValueError: there can be none.
    """
    given = dict(step[1])
    defaults = {**asdict(Shape()), "seed": 0}
    if "seed" not in given or not given.keys() <= defaults.keys():
        raise ValueError(f"begin is given ({', '.join(given)}), it has a seed, and of ({', '.join(defaults)}) any")
    for key, value in given.items():
        if type(value) is not type(defaults[key]):
            raise ValueError(f"begin: {key} is never {value!r:.80}, but for example {defaults[key]!r}")
    seed = given.pop("seed")
    shape = Shape(**given)
    shape.check()
    return shape, seed


def command(steps: Steps) -> str:
    """Return the command that does steps again."""
    return f"python -m stepwell.testing --replay {shlex.quote('; '.join(map(show, steps)))}"


# ---- worlds ----------------------------------------------------------------------------------------------------------


def kinds_of(shape: Shape) -> tuple[type[World], type[Operations]]:
    """Return what a world of a shape is, and what is done in it."""
    return (SequenceWorld, SequenceOperations) if shape.device else (World, Operations)


class NoPlaceError(Exception):
    """There is no room to make a world in."""


def place() -> Path:
    """Return where worlds are made: in memory, where that has room. On another file system the same seed may give
    another run, for pages may need more room there.

    Raises: NoPlaceError.
    """
    places = (MEMORY, Path(tempfile.gettempdir()))
    for each in places:
        with suppress(OSError):
            if os.access(each, os.W_OK | os.X_OK) and shutil.disk_usage(each).free >= WORLD_BYTES:
                return each
    raise NoPlaceError(f"worlds need {WORLD_BYTES >> 20} MiB free in {' or '.join(map(str, places))}; set TMPDIR")


@contextmanager
def world(shape: Shape, seed: int) -> Iterator[World]:
    """Make a world in directories of its own."""
    directory = Path(tempfile.mkdtemp(prefix="sw-test-", dir=place()))
    made = None
    try:
        made = kinds_of(shape)[0](shape, seed=seed, directory=directory)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(directory, ignore_errors=True)


def shape_of(random_: random.Random) -> Shape:
    """Draw the shape of a world: any subset of the tiers that something can be saved to."""
    host, shared, disk = random_.choice(SIZES)
    selective = bool(shared and disk and random_.random() < SELECTIVE_PART)
    stores = 2 if shared + disk > 0 and random_.random() < SHARED_PART else 1
    if host and stores == 1 and random_.random() < DEVICE_PART:
        device, step_pages = random_.choice((6, 8, 12)), random_.choice((1, 64))
        return Shape(random_.choice((0, 1, 1, 1)), host, shared, disk, selective, 1, device, step_pages)
    return Shape(random_.choice((0, 0, 0, 1, 2)), host, stores * shared, stores * disk, selective, stores)


def draw(shape: Shape, random_: random.Random, count: int) -> Iterator[Step]:
    """Draw steps for a world of a shape."""
    operations = operations_of(kinds_of(shape)[1])
    names = list(operations)
    weights = list(itertools.accumulate(operations[each].weight for each in names))
    arguments = {
        each: [(key, values, len(values)) for key, values in operations[each].arguments.items()] for each in names
    }
    number = random_.random
    for chosen in random_.choices(names, cum_weights=weights, k=count):
        yield chosen, {key: values[int(number() * choices)] for key, values, choices in arguments[chosen]}


def play(shape: Shape, seed: int, steps: Iterable[Step], totals: Totals) -> None:
    """Do steps in a new world, and check after each.

    Raises: Failure, NoPlaceError.
    """
    place()
    done: Steps = [("begin", {**asdict(shape), "seed": seed})]
    try:
        with world(shape, seed) as it:
            operations = kinds_of(shape)[1](it)
            for step in steps:
                done.append(step)
                name, arguments = step
                if operations.do(name, arguments):
                    totals.steps += 1
                    totals.operations[name] += 1
                else:
                    totals.idle += 1
            operations.end()
            for caller in it.callers:
                totals.counted.update(caller.counted)
    except Exception as error:
        raise Failure(done, error) from error
    totals.episodes += 1


def episode(seed: int, number: int, totals: Totals, *, steps: int = EPISODE_STEPS) -> None:
    """Run one episode.

    Raises: Failure.
    """
    random_ = random.Random(f"{seed}.{number}")
    shape = shape_of(random_)
    play(shape, random_.randrange(1 << 30), draw(shape, random_, steps), totals)


def collect_seldom() -> None:
    """Have Python look for cycles seldom, and never among what is there now: a tenth of an episode's time goes into it
    else. Worlds end what they open, so that little is left to be found. For a process that runs episodes alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def replay(steps: Steps) -> None:
    """Do recorded steps again.

    Raises: Failure, as they did.
    """
    shape, seed = begun(steps[0])
    play(shape, seed, steps[1:], Totals())


# ---- shrinking -------------------------------------------------------------------------------------------------------


def shrink(failure: Failure, *, seconds: float = SHRINK_SECONDS) -> Failure:
    """Leave out steps that a failure does not need, and make the rest plainer, while a failure of its kind remains.

    Ctrl-C ends it early, with what it has by then.

    Source: delta debugging; Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).
    """
    best = failure
    with suppress(KeyboardInterrupt):
        for each in _smaller(failure, time.monotonic() + seconds):
            best = each
    return best


def _smaller(best: Failure, until: float) -> Iterator[Failure]:
    """Yield ever smaller failures of a kind."""
    kind = type(best.cause)

    def fails(steps: Steps) -> Failure | None:
        try:
            replay(steps)
        except Failure as found:
            return found if isinstance(found.cause, kind) else None
        return None

    # The end is needed most often, and the beginning hardly ever: halves of it go first.
    tail = len(best.steps) // 2
    while tail > 0 and time.monotonic() < until:
        found = fails([best.steps[0], *best.steps[1 + tail :]])
        if found is None:
            tail //= 2
        else:
            best, tail = found, len(found.steps) // 2
            yield best
    size = len(best.steps) // 4
    while size > 0:
        is_smaller = False
        end = len(best.steps)
        while end > 1:
            first = max(1, end - size)
            if time.monotonic() >= until:
                return
            found = fails([*best.steps[:first], *best.steps[end:]])
            if found is not None:
                best, is_smaller = found, True
                yield best
            end = min(first, len(best.steps))
        size = size // 2 or int(is_smaller)
    for at, (_, arguments) in enumerate(best.steps):
        for key in arguments if at < len(best.steps) else ():
            for plainer in _plainer(best.steps, at, key):
                if time.monotonic() >= until:
                    return
                found = fails(plainer)
                if found is not None:
                    best = found
                    yield best
                    break


def _plainer(steps: Steps, at: int, key: str) -> Iterator[Steps]:
    """Yield the same steps with one argument of one of them changed to a plainer value, the plainest first."""
    name, given = steps[at]
    value = given[key]
    if at == 0:
        plain = [{**asdict(Shape(host=0, shared=0, disk=0)), "seed": 0}[key]]
    elif key == "path":
        plain = [(0,) * pages for pages in range(1, len(value) + 1)] + [value[:pages] for pages in range(1, len(value))]
    else:
        plain = [operations_of(SequenceOperations)[name].arguments[key][0]]
    for each in plain:
        changed = [*steps[:at], (name, {**given, key: each}), *steps[at + 1 :]]
        with suppress(ValueError):
            check_steps(changed)
            if each != value:
                yield changed
