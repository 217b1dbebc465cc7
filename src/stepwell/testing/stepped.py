"""Run a store without threads of its own: its mover one unit at a time, in an order that a seed decides, and its
background rounds, and what it does with gathers of a device tier, when they are called."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import DeviceTier, StoreConfig, parse_size
from stepwell.index import Tier
from stepwell.keeper import Keepers
from stepwell.mover import Transfer
from stepwell.rates import Flow
from stepwell.sequence import Sequences
from stepwell.store import PageStore
from stepwell.testing.numpy_device import NumpyPool
from stepwell.tiers.device_pool import LinearPool
from stepwell.tiers.directory import Machine
from stepwell.tiers.disk import DiskVolumes

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
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        """What looks on: called before each look for a unit, and after each unit that ran, whoever asked for it."""

    def step(self, queue: int | None = None) -> bool:
        """Run one unit: of `queue`, or of the queue that the seed says, else of the other.

        Returns: whether a unit was waiting.
        """
        self.before()
        if queue is None:
            first = self._random.choice((COPY_QUEUE, IO_QUEUE))
            ran = self._mover.step(first) or self._mover.step(IO_QUEUE - first)
        else:
            ran = self._mover.step(queue)
        self.steps += ran
        if ran:
            self.after()
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


class SteppedTransfer(Transfer):
    """A transfer of a stepped store: who waits does the work."""

    __slots__ = ("_mover",)

    def __init__(self, mover: SteppedMover, core: _core.Transfer, clock: Clock, **given: Any) -> None:
        super().__init__(core, clock, **given)
        self._mover = mover

    def wait(self, timeout: float | None = None) -> bool:
        """Step the mover until every page is decided; with a timeout of 0 or less only look.

        Returns: False where nothing is left to do and it is not: what it waits for is nobody's.
        """
        while not self.done and (timeout is None or timeout > 0):
            if not self._mover.step():
                return self.done
        return self.done


class SteppedStore(PageStore):
    """A store in which nothing moves and no background round runs until it is told to.

    `mover` steps it; `tick()` does every background round; `land()` hands one gather of the device tier to the mover.
    What waits for a transfer (flush, load_keys, save_keys, verify, Transfer.wait) steps the mover itself until the
    transfer is decided, and lands gathers where it waits for these. A device tier is of numpy arrays.

    `flow`, where a test sets it, is what the store believes of how fast its tiers are.

    Args:
        seed: decides the order of the mover's units.
        new_id: names volumes: which comes first is an input too. Stores that share directories share it; None: names
            that nobody else has.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock | None = None,
        seed: int,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.flow: Flow | None = None
        self._new_id = new_id
        super().__init__(config, clock=clock)
        mover = self._copies.mover
        assert mover is not None, "the store is open"
        self.mover = SteppedMover(mover, seed=seed)
        self._copies.observe = functools.partial(SteppedTransfer, self.mover)
        self._copies.wait = self._wait  # type: ignore[method-assign]
        disk = self._tiers.get(Tier.DISK)
        if isinstance(disk, DiskVolumes):
            disk.has_lmdb = False  # no look-up asks it, and reading an old one takes a thread and a process

    def tick(self) -> None:
        """Do every background round here and now."""
        self._tick()

    def land(self) -> bool:
        """Hand the oldest dispatched gather to the mover. Returns whether there was one."""
        return self._sequences is not None and self._sequences.land()

    def settle(self) -> None:
        """Land every dispatched gather and run the mover until it is idle."""
        self.mover.run_until_idle()
        while self.land():
            self.mover.run_until_idle()

    def _wait(self, core: _core.Transfer, timeout: float | None) -> bool:
        """Step until a transfer has ended. False: it has not, and nothing is left to do."""
        while not core.done:
            if not self.mover.step():
                return core.done
        return True

    def _flow(self) -> Flow:
        """Say what the mover has moved, in no time: nothing is slow but what a test says is."""
        return self.flow if self.flow is not None else Flow.nothing()

    def _workers(self) -> dict[str, int]:
        return {"copy_threads": 0, "io_threads": 0}

    def _machine(self) -> Machine:
        machine = super()._machine()
        return machine if self._new_id is None else replace(machine, new_id=self._new_id)

    def _begin_rounds(self, keeper: Keepers) -> None:
        """Have them by tick() alone."""

    def _begin_landing(self, sequences: Sequences) -> None:
        """Have it by land() alone."""

    def _make_pool(self, device: DeviceTier) -> LinearPool[Any]:
        step_bytes = parse_size(device.step_bytes, name="device.step_bytes")
        return NumpyPool(self._config.geometry, device.pages, axes=device.axes, max_step_bytes=step_bytes)
