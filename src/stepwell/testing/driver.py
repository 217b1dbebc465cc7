"""Drive a store with a seed, without hypothesis: episodes of a few thousand steps each, every one of them checked.

An episode is a world of a shape of its own, decided by the seed and the episode's number alone: what was done before it
changes nothing, so that a run can be ended at any time and gone on with, and a failure is replayed by its steps.
"""

from __future__ import annotations

import ast
import itertools
import random
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

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


# ---- steps as text ---------------------------------------------------------------------------------------------------


def show(step: Step) -> str:
    """Return one step as a line of text: `save(who=0, path=(0, 2), space=1)`."""
    name, arguments = step
    return f"{name}({', '.join(f'{key}={_plain(value)!r}' for key, value in arguments.items())})"


def _plain(value: object) -> object:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read(text: str) -> Steps:
    """Return the steps of a text: one a line, or parted by semicolons.

    Raises:
        ValueError: it is none, or a step that nobody knows.
    """
    steps: Steps = []
    known = operations_of(SequenceOperations).keys() | {"begin"}
    try:
        body = ast.parse(text).body
        for statement in body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
                raise ValueError(f"{ast.unparse(statement)!r} is no step")
            steps.append((call.func.id, {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}))
    except SyntaxError as error:
        raise ValueError(f"no steps: {error}") from error
    for name, _ in steps:
        if name not in known:
            raise ValueError(f"{name} is no step; there are {', '.join(sorted(known))}")
    if not steps or steps[0][0] != "begin":
        raise ValueError("the first step has to be begin(...), which makes the world")
    return steps


def command(steps: Steps) -> str:
    """Return the command that does steps again."""
    return f"python -m stepwell.testing --replay {shlex.quote('; '.join(map(show, steps)))}"


# ---- worlds ----------------------------------------------------------------------------------------------------------


def kinds_of(shape: Shape) -> tuple[type[World], type[Operations]]:
    """Return what a world of a shape is, and what is done in it."""
    return (SequenceWorld, SequenceOperations) if shape.device else (World, Operations)


@contextmanager
def world(shape: Shape, seed: int) -> Iterator[World]:
    """Make a world in directories of its own."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="sw-test-", dir=memory if memory.is_dir() else None))
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
    for chosen in random_.choices(names, cum_weights=weights, k=count):
        arguments = operations[chosen].arguments
        yield chosen, {key: values[int(random_.random() * len(values))] for key, values in arguments.items()}


def play(shape: Shape, seed: int, steps: Iterable[Step], totals: Totals) -> None:
    """Do steps in a new world, and check after each.

    Raises: Failure.
    """
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


def replay(steps: Steps) -> None:
    """Do recorded steps again.

    Raises: Failure, as they did.
    """
    (_, begin), *rest = steps
    given = dict(begin)
    seed = given.pop("seed")
    play(Shape(**given), seed, rest, Totals())


# ---- shrinking -------------------------------------------------------------------------------------------------------


def shrink(failure: Failure, *, seconds: float = SHRINK_SECONDS) -> Failure:
    """Leave out steps that a failure does not need, as long as one of its kind remains.

    Source: delta debugging; Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).
    """
    until = time.monotonic() + seconds
    kind = type(failure.cause)
    begin = failure.steps[0]

    def fails(rest: Steps) -> Failure | None:
        try:
            replay([begin, *rest])
        except Failure as found:
            return found if isinstance(found.cause, kind) else None
        return None

    best = failure
    # The end is needed most often, and the beginning hardly ever: halves of it go first.
    tail = len(best.steps) // 2
    while tail > 0 and time.monotonic() < until:
        found = fails(best.steps[1 + tail :])
        if found is None:
            tail //= 2
        else:
            best, tail = found, len(found.steps) // 2
    parts = 2
    while len(best.steps) > 1 and time.monotonic() < until:
        rest = best.steps[1:]
        size = max(1, len(rest) // parts)
        for at in range(0, len(rest), size):
            found = fails(rest[:at] + rest[at + size :])
            if found is not None:
                best, parts = found, max(parts - 1, 2)
                break
            if time.monotonic() >= until:
                return best
        else:
            if size == 1:
                return best
            parts = min(2 * parts, len(rest))
    return best
