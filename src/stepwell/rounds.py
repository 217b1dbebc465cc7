"""Do the background round of one tier, and close it: a tier is not closed while its round is in a call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from stepwell import _core
from stepwell.clock import Clock
from stepwell.errors import StepwellError
from stepwell.index import Index, Tier
from stepwell.room import Room
from stepwell.tiers.base import PageTier
from stepwell.tiers.host import HostSlab

LEFT_BEHIND: Final[dict[int, tuple[_core.Foreign | None, HostSlab | None]]] = {}
"""What a worker whose call has not returned may still touch, by its mover."""


class Round:
    """The background round of one tier.

    Invariant: never two at once, none while the tier is reopened, and none once it was closed.
    """

    def __init__(self, tier: Tier, room: Room, clock: Clock, marks: tuple[float, float]) -> None:
        self._tier = tier
        self._room = room
        self._clock = clock
        self._low, self._high = marks
        self._lock = threading.Lock()
        self._began: float | None = None
        self._has_ended = False

    def end(self) -> None:
        """Have no round any more. Requires: held()."""
        self._has_ended = True

    def run(self) -> bool:
        """Do one round.

        Returns:
            Whether there may be more to write soon: pages of shared memory were used, or some are on their way.
        """
        with self._lock:
            if self._has_ended:
                return False
            self._began = self._clock.monotonic()
            try:
                return self._room.tend(self._tier, low=self._low, high=self._high)
            except (StepwellError, OSError) as error:
                self._room.health.observe_error(self._tier, error)
                raise
            finally:
                self._began = None

    def seconds(self) -> float:
        """Say for how long the round under way has run; 0 where there is none."""
        began = self._began
        return 0.0 if began is None else self._clock.monotonic() - began

    @contextlib.contextmanager
    def held(self, timeout: float) -> Iterator[bool]:
        """Keep rounds away inside the `with` block.

        Args: timeout: seconds to wait for the one under way; -1: no limit. Yields: False where it did not end in time.
        """
        is_held = self._lock.acquire(timeout=timeout)
        try:
            yield is_held
        finally:
            if is_held:
                self._lock.release()


class Leaving:
    """The closing of one tier, in a thread `sw-close-<tier>`; it waits for workers, and for a round, in a call.

    Nothing of the store but what is named here is kept alive by it. Threads: the closer's; run() its own.
    """

    def __init__(self, pages: PageTier, round_: Round | None, index: Index, mover: _core.Mover | None) -> None:
        self.name = f"{pages.tier} tier"
        self._pages = pages
        self._round = round_
        self._index = index
        self._mover = mover
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"sw-close-{pages.tier}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            if not (mover is not None and mover.stuck) and (round_ is None or round_.seconds() == 0.0):
                self._run()

    def _run(self) -> None:
        try:
            if self._mover is not None and self._mover.stuck:
                self._mover.drain(-1.0, True)
            LEFT_BEHIND.pop(id(self._mover), None)
            with self._round.held(-1.0) if self._round is not None else contextlib.nullcontext():
                if self._round is not None:
                    self._round.end()
                self._pages.close(self._index)
        except Exception as error:  # noqa: BLE001 raised again by who waits
            self._error = error

    def wait(self, limit: float) -> bool:
        """Wait until it has ended, at most until `limit`. False: it has not."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, limit - time.monotonic()))
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        """Raise what closing raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
