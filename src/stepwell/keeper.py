"""Run the store's background round in one thread, `sw-keeper`.

What a round does is the store's (`PageStore._tick`); here is only when: at once when woken, and every quarter of a
second so that probe leases end, deadlines hold, and what a neighbour lacks is given back within a second.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from stepwell.errors import StepwellError

_LOG = logging.getLogger("stepwell")
INTERVAL = 0.25


class Keeper:
    """Call `tick`, a bound method, from one thread until stopped.

    Invariant: never two ticks at once; a tick that raises StepwellError or OSError is logged (once for each message)
    and the next one runs. The thread does not keep the method's owner alive: it ends when that has gone.
    """

    def __init__(self, tick: Callable[[], None], *, interval: float = INTERVAL) -> None:
        self._tick = weakref.WeakMethod(tick)
        self._interval = interval
        self._wanted = threading.Event()
        self._stopping = False
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="sw-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether there will be another round."""
        return self._thread.is_alive() and not self._stopping

    def wake(self) -> None:
        """Ask for a round now. Threads: any."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread after the round it is in; wait for it. Idempotent."""
        self._stopping = True
        self._wanted.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wanted.wait(self._interval)
            self._wanted.clear()
            tick = self._tick()
            if self._stopping or tick is None:
                return
            try:
                tick()
            except (StepwellError, OSError) as error:
                text = f"{type(error).__name__}: {error}"
                if text not in self._said and len(self._said) < 256:
                    self._said.add(text)
                    _LOG.warning("background round: %s", text)
            del tick  # while this thread waits, the owner may go
