"""The command: `python -m stepwell.testing --seed N --steps M`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from stepwell.testing.driver import (
    EPISODE_STEPS,
    Failure,
    NoPlaceError,
    Totals,
    collect_seldom,
    command,
    place,
    read,
    replay,
    show,
    shrink,
    whole,
)
from stepwell.testing.jobs import DiedError, EpisodeError, in_turn, side_by_side


def parser() -> argparse.ArgumentParser:
    """Return the command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m stepwell.testing",
        description="Do random operations on stores, each in a small world of its own, and hold each step to the model "
        "of what stepwell promises (stepwell/testing/model.py). The same seed gives the same run. The exit code is 0 "
        "only if nothing was found; a finding is shrunk, and printed with the command that does it again.",
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="decides the run (default 1)")
    made.add_argument("--steps", type=_count, default=100_000, metavar="M", help="that have something to do, at least")
    made.add_argument(
        "--state", type=Path, metavar="FILE", help="go on with the run that FILE has, and write there how far it got"
    )
    made.add_argument("--seconds", type=_seconds, metavar="S", help="end this slice after S seconds; for --state")
    made.add_argument(
        "--jobs",
        type=_jobs,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that run episodes side by side (default: the processors that there are); the run is the same",
    )
    made.add_argument("--episode", type=_count, metavar="N", help="run this episode of the seed alone, in this process")
    made.add_argument("--replay", metavar="STEPS", help="do these steps instead: as a finding prints them, or a file")
    made.add_argument(
        "--hypothesis", action="store_true", help="let hypothesis choose the steps: slower, and it shrinks further"
    )
    made.add_argument("--json", action="store_true", help="print the summary as JSON")
    return made


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def _jobs(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return seconds


class MisuseError(Exception):
    """What was given cannot be used; the message says why."""


def _text(path: Path) -> str:
    """Read a file: a device or a pipe might never end."""
    if path.exists() and not path.is_file():
        raise MisuseError(f"{path} is no file")
    return path.read_text()


class State:
    """How far a run got, in a file: seed, and totals after a whole number of episodes."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path = path
        self.seed = seed
        self.totals = Totals()
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            known = json.loads(_text(path))
        except FileNotFoundError:
            return
        except OSError as error:
            raise MisuseError(f"{path} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise MisuseError(f"{path} is no state of a run: {error!r}; give another file") from error
        try:
            seed, self.totals = whole(known["seed"]), Totals.of(known)
        except (ValueError, KeyError, TypeError) as error:
            raise MisuseError(f"{path} is no state of a run: {error!r}; give another file") from error
        if seed != self.seed:
            raise MisuseError(f"{path} is of seed {seed}, not {self.seed}: give another file, or that seed")

    def write(self) -> None:
        """Put down how far it is: all of it at once, or nothing."""
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(summary(self.seed, self.totals)))
            fresh.replace(self._path)
        except (OSError, ValueError) as error:
            fresh.unlink(missing_ok=True)
            raise MisuseError(f"{self._path} cannot be written: {error}") from error


def summary(seed: int, totals: Totals) -> dict[str, Any]:
    """Say what a run has done."""
    speed = round(totals.steps / totals.seconds) if totals.seconds else 0
    return {"seed": seed, **totals.known(), "steps_per_second": speed}


def say(failure: Failure, where: str) -> None:
    """Print a finding, and the steps that lead to it."""
    print(f"\n{where}: {failure}\n", file=sys.stderr)
    print(f"shrinking {len(failure.steps) - 1} steps ...", file=sys.stderr)
    small = shrink(failure)
    for step in small.steps:
        print(f"  {show(step)}", file=sys.stderr)
    print(f"\n{small}\nagain: {command(small.steps)}", file=sys.stderr)


def say_ended(seed: int, ended: EpisodeError | DiedError) -> None:
    """Print how an episode ended: what it found, or that its process died."""
    where = f"seed {seed}, episode {ended.number}"
    if isinstance(ended, EpisodeError) and ended.cause is not None:
        say(ended.cause, where)
        return
    print(f"\n{where}: {ended}", file=sys.stderr)
    if isinstance(ended, EpisodeError):
        print("its steps, done again in another process, found nothing", file=sys.stderr)
    print(f"again: python -m stepwell.testing --seed {seed} --episode {ended.number}", file=sys.stderr)


def run(state: State, steps: int, seconds: float | None, jobs: int) -> bool:
    """Run episodes until there are so many steps, or so many seconds have passed. Returns whether all is well.

    Raises:
        KeyboardInterrupt: what was done until the episode before is in the state.
        MisuseError: the state cannot be written.
        NoPlaceError.
    """
    state.write()  # before any work is done in vain
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    place()
    totals, until = state.totals, None if seconds is None else time.monotonic() + seconds
    jobs = min(jobs, math.ceil((steps - totals.steps) / EPISODE_STEPS))
    if jobs > 1:
        episodes = side_by_side(state.seed, totals.episodes, jobs)
    else:
        episodes = in_turn(state.seed, totals.episodes)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}/s"))
    with Progress(*columns, TimeRemainingColumn(), transient=True) as progress, contextlib.closing(episodes):
        task = progress.add_task("", total=steps, completed=totals.steps, rate=0)
        began, before, spent = time.perf_counter(), totals.steps, totals.seconds
        while totals.steps < steps and (until is None or time.monotonic() < until):
            try:
                totals.add(next(episodes))
            except (EpisodeError, DiedError) as ended:
                progress.stop()
                say_ended(state.seed, ended)
                return False
            passed = time.perf_counter() - began
            totals.seconds = spent + passed
            progress.update(task, completed=totals.steps, rate=round((totals.steps - before) / passed))
            state.write()
    return True


def run_hypothesis(seed: int, steps: int) -> bool:
    """Let hypothesis choose the steps. Returns whether all is well."""
    from rich.progress import Progress

    from stepwell.testing import machine

    began = time.perf_counter()
    with Progress(transient=True) as progress:
        task = progress.add_task("steps", total=steps)
        try:
            done = machine.run(steps, first_seed=seed, told=lambda count: progress.update(task, completed=count))
        except Exception:  # noqa: BLE001 whatever the store did: it is printed
            progress.stop()
            traceback.print_exc()
            return False
    spent = time.perf_counter() - began
    print(f"{done.total()} steps of hypothesis, {done[True]} of them with something to do, in {spent:.0f} s")
    return True


def show_summary(state: State, *, as_json: bool) -> None:
    """Print what was done."""
    found = summary(state.seed, state.totals)
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"{found['steps']} steps in {found['episodes']} episodes of {EPISODE_STEPS}, {found['seconds']:.0f} s, "
        f"{found['steps_per_second']} steps/s; each was held to the model, and to the bytes"
    )
    print("  " + ", ".join(f"{name} {count}" for name, count in found["operations"].items()))
    print("  pages: " + ", ".join(f"{name} {count}" for name, count in found["counted"].items()))


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Its exit code: 0 nothing was found, 1 something, or nobody read what was, 2 misuse, 130 ended by ctrl-C.
    """
    made = parser()
    given = made.parse_args(arguments)
    logging.disable(logging.ERROR)  # what the stores say of the failures that they are given
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has ctrl-C ignored in what it puts into the background
        signal.signal(number, signal.default_int_handler)
    if given.hypothesis and (given.state is not None or given.seconds is not None):
        made.error("--hypothesis has no --state and no --seconds")
    if given.episode is not None and (given.state is not None or given.hypothesis):
        made.error("--episode has no --state and no --hypothesis")
    try:
        code = run_given(given)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # whoever read the output stopped early (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 1
    except ModuleNotFoundError as error:
        made.error(f"{error}: pip install 'stepwell[testing]'")
    except (MisuseError, NoPlaceError) as error:
        made.error(str(error))
    except KeyboardInterrupt:
        return 130


def run_given(given: argparse.Namespace) -> int:
    """Do what the arguments say. Returns the exit code."""
    if given.replay is not None:
        return run_replay(given.replay)
    if given.hypothesis:
        return 0 if run_hypothesis(given.seed, given.steps) else 1
    return run_seed(given)


def run_replay(given: str) -> int:
    """Do steps again. Returns the exit code."""
    try:
        steps = read(given if "(" in given else _text(Path(given)))
    except (OSError, ValueError) as error:
        raise MisuseError(f"--replay: {error}") from error
    try:
        replay(steps)
    except Failure as failure:
        print(f"{failure}", file=sys.stderr)
        return 1
    print("nothing was found")
    return 0


def run_seed(given: argparse.Namespace) -> int:
    """Run what a seed says, and show what was done. Returns the exit code."""
    state = State(given.state, given.seed)
    code = 130
    if given.episode is not None:
        state.totals.episodes, given.steps, given.jobs = given.episode, 1, 1
    with contextlib.suppress(KeyboardInterrupt):
        code = 0 if run(state, given.steps, given.seconds, given.jobs) else 1
    show_summary(state, as_json=given.json)
    return code


if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
