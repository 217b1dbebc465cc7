"""Run episodes side by side, each in one of several processes; what they did comes back in the order of their numbers.

    side_by_side(): numbers --stdin--> worker: episode(seed, number) --lines of JSON--> totals, or the steps that failed

Faults are armed for a whole process, so that worlds side by side need one each. A worker ends when its stdin does: it
does not outlive whoever began it by more than an episode.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from stepwell.testing.driver import Failure, NoPlaceError, Totals, collect_seldom, episode, read, replay, show

_AHEAD: Final = 2
"""Episodes that are begun, for each worker, before the first one has come back: they are not equally long."""
_END_SECONDS: Final = 10.0


class DiedError(Exception):
    """The process of an episode ended in the midst of it. number: of the episode."""

    def __init__(self, number: int, code: int) -> None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        super().__init__(f"its process died: {how}")
        self.number = number


class EpisodeError(Exception):
    """An episode failed in its worker. number: of the episode. cause: as it came again here, where it did."""

    def __init__(self, number: int, says: str, cause: Failure | None) -> None:
        super().__init__(says)
        self.number = number
        self.cause = cause


class _Worker:
    """One process that runs episodes of a seed, one at a time."""

    def __init__(self, seed: int) -> None:
        # Out of the terminal's group: ctrl-C is told to workers by whoever began them, once.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def run(self, number: int) -> dict[str, Any]:
        """Have it run an episode. Returns what it says of it. Raises: DiedError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise DiedError(number, self._process.wait())
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        """Have it leave its episode, and what that has made; one that starts still has made nothing, and dies of it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait until it has ended."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def in_turn(seed: int, first: int) -> Generator[Totals, None, None]:
    """Run episodes of a seed from the first one on, without end, in this process.

    Yields: what each did. Raises: EpisodeError: the next one found something. NoPlaceError.
    """
    for number in itertools.count(first):
        totals = Totals()
        try:
            episode(seed, number, totals)
        except Failure as failure:
            raise EpisodeError(number, str(failure), failure) from failure
        yield totals


def side_by_side(seed: int, first: int, jobs: int) -> Generator[Totals, None, None]:
    """Run episodes of a seed from the first one on, without end, in so many processes; close it to end them.

    Yields:
        What each did, in the order of their numbers, as one process would have: episodes begun ahead of the last one
        that was asked for are lost.

    Raises:
        EpisodeError: the next one found something. DiedError: its process died. NoPlaceError.
    """
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers: list[_Worker] = []

    def run(number: int) -> dict[str, Any]:
        worker = free.get()
        try:
            return worker.run(number)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(jobs, "sw-episodes") as pool:
        try:
            for _ in range(jobs):
                workers.append(_Worker(seed))
                free.put(workers[-1])
            begun: deque[Future[dict[str, Any]]] = deque(
                pool.submit(run, number) for number in range(first, first + _AHEAD * jobs)
            )
            while True:
                said = begun.popleft().result()
                begun.append(pool.submit(run, first + len(begun) + 1))
                yield _told(first, said)
                first += 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.end()


def _told(number: int, said: dict[str, Any]) -> Totals:
    """Return what a worker did.

    Raises: EpisodeError, NoPlaceError.
    """
    if "no place" in said:
        raise NoPlaceError(said["no place"])
    if "failed" in said:
        try:
            replay(read(said["failed"]))
        except Failure as failure:
            raise EpisodeError(number, said["says"], failure) from failure
        raise EpisodeError(number, said["says"], None)
    return Totals.of(said)


def _say(seed: int, number: int) -> dict[str, Any]:
    totals = Totals()
    try:
        episode(seed, number, totals)
    except Failure as failure:
        return {"failed": "\n".join(map(show, failure.steps)), "says": str(failure)}
    except NoPlaceError as error:
        return {"no place": str(error)}
    return totals.known()


def main(seed: int) -> int:
    """Be a worker: run the episodes whose numbers come in. Returns the exit code."""
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    collect_seldom()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what prints does not come between the lines
        for line in sys.stdin:
            print(json.dumps(_say(seed, int(line))), file=out, flush=True)
        return 0
    return 130


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
