"""Run a store without threads of its own: its mover one unit at a time, in an order that a seed decides, and its
background rounds when they are called."""

from __future__ import annotations

import random
from typing import Protocol

from stepwell.clock import Clock
from stepwell.config import StoreConfig
from stepwell.keeper import Keepers
from stepwell.store import PageStore

COPY_QUEUE = 0
IO_QUEUE = 1


class Steppable(Protocol):
    """Run one unit of a queue on the calling thread, as a Mover with 0 threads does."""

    def step(self, queue: int, /) -> bool:
        """Run one unit of `queue`. Returns False where none was waiting."""


class SteppedMover:
    """Interleave the two queues of a mover that has no threads.

    Invariant: bytes move, and claims are decided, only inside `step` and `run_until_idle`; the
    same seed and the same submissions give the same order. Which worker would have come first
    is thus an input, and a state machine can let a match, a cancel or a fault fall between any
    two units.

    Args:
        mover: a Mover made with `copy_threads=0, io_threads=0`.
        seed: decides the order.

    Threads: one at a time.
    """

    def __init__(self, mover: Steppable, *, seed: int) -> None:
        self._mover = mover
        self._random = random.Random(seed)
        self.steps = 0

    def step(self, queue: int | None = None) -> bool:
        """Run one unit: of `queue`, or of the queue that the seed says, else of the other.

        Returns: whether a unit was waiting.
        """
        if queue is None:
            first = self._random.choice((COPY_QUEUE, IO_QUEUE))
            ran = self._mover.step(first) or self._mover.step(IO_QUEUE - first)
        else:
            ran = self._mover.step(queue)
        self.steps += ran
        return ran

    def run_until_idle(self, *, limit: int = 1_000_000) -> int:
        """Run units until none is waiting.

        Returns: how many were run.
        Raises: RuntimeError after `limit` units: something keeps submitting.
        """
        for count in range(limit):
            if not self.step():
                return count
        raise RuntimeError(f"mover not idle after {limit} units")


class SteppedStore(PageStore):
    """A store in which nothing moves and no background round runs until it is told to.

    `mover` steps it; `tick()` does every background round. What waits for bytes (flush, load_keys, save_keys, verify,
    Transfer.wait) waits for ever here unless nothing is under way: run `mover.run_until_idle()` first. With a device
    tier its lander (`sw-device`) still is a thread.

    Args:
        seed: decides the order of the mover's units.
    """

    def __init__(self, config: StoreConfig, *, clock: Clock | None = None, seed: int) -> None:
        super().__init__(config, clock=clock)
        mover = self._copies.mover
        assert mover is not None, "the store is open"
        self.mover = SteppedMover(mover, seed=seed)

    def tick(self) -> None:
        """Do every background round here and now."""
        self._tick()

    def _workers(self) -> dict[str, int]:
        return {"copy_threads": 0, "io_threads": 0}

    def _begin_rounds(self, keeper: Keepers) -> None:
        """Have them by tick() alone."""
