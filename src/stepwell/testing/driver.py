"""Drive a store with a seed, without hypothesis: episodes of a few thousand steps each, every one of them checked.

An episode is a world of a shape of its own, decided by the seed and the episode's number alone: what was done before it
changes nothing, so that a run can be ended at any time and gone on with, and a failure is replayed by its steps.
"""

from __future__ import annotations

import itertools
import random
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
Steps = list[tuple[str, dict[str, Any]]]


class Failure(Exception):  # noqa: N818 a finding, not an error of the driver's
    """A store did what it may not. steps: that led there, the first one makes the world."""

    def __init__(self, steps: Steps, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.steps = steps
        self.cause = cause


@dataclass
class Totals:
    """What a run has done so far."""

    steps: int = 0
    idle: int = 0
    episodes: int = 0
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)


def shape_of(random_: random.Random) -> Shape:
    """Draw the shape of a world: any subset of the tiers that something can be saved to."""
    host, shared, disk = random_.choice(SIZES)
    selective = bool(shared and disk and random_.random() < 0.3)
    stores = 2 if shared + disk > 0 and random_.random() < 0.15 else 1
    if stores == 2:
        shared, disk = 2 * shared, 2 * disk
    return Shape(random_.choice((0, 0, 0, 1, 2)), host, shared, disk, selective, stores)


@contextmanager
def world(shape: Shape, seed: int) -> Iterator[World]:
    """Make a world in directories of its own."""
    directory = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    made = None
    try:
        made = World(shape, seed=seed, directory=directory)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(directory, ignore_errors=True)


def draw(random_: random.Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw steps."""
    operations = operations_of(Operations)
    names = list(operations)
    weights = list(itertools.accumulate(operations[each].weight for each in names))
    for chosen in random_.choices(names, cum_weights=weights, k=count):
        each = operations[chosen]
        yield chosen, {key: values[int(random_.random() * len(values))] for key, values in each.arguments.items()}


def play(shape: Shape, seed: int, steps: Iterable[tuple[str, dict[str, Any]]], totals: Totals) -> None:
    """Do steps in a new world, and check after each."""
    done: Steps = [("begin", {**asdict(shape), "seed": seed})]
    with world(shape, seed) as it:
        operations = Operations(it)
        try:
            for name, arguments in steps:
                done.append((name, arguments))
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


def shrink(steps: Steps, kind: type[BaseException], *, seconds: float = 60.0) -> Steps:
    """Leave out what a failure does not need: delta debugging over the steps after the first.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).
    """
    until = time.monotonic() + seconds
    first, rest = steps[0], steps[1:]

    def fails(candidate: Steps) -> Steps | None:
        try:
            replay([first, *candidate])
        except Failure as failure:
            return failure.steps[1:] if isinstance(failure.cause, kind) else None
        return None

    parts = 2
    while len(rest) >= 1 and time.monotonic() < until:
        size = max(1, len(rest) // parts)
        for at in range(0, len(rest), size):
            shorter = fails(rest[:at] + rest[at + size :])
            if shorter is not None:
                rest, parts = shorter, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(rest))
    return [first, *rest]


def replay(steps: Steps) -> None:
    """Do recorded steps again.

    Raises: Failure, as they did.
    """
    (_, begin), *rest = steps
    given = dict(begin)
    seed = given.pop("seed")
    play(Shape(**given), seed, rest, Totals())


def episode(seed: int, number: int, totals: Totals, *, steps: int = EPISODE_STEPS) -> None:
    """Run one episode."""
    random_ = random.Random(f"{seed}.{number}")
    shape = shape_of(random_)
    play(shape, random_.randrange(1 << 30), draw(random_, steps), totals)
