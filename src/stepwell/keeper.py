"""Run the store's background round in one thread, `sw-keeper`.

What a round does is the store's (`PageStore._tick`); here is only when: at once when woken, every 80 ms while the store
is used (what was used when is written then, for who adopts its volumes), and every quarter of a second while it is not,
so that probe leases end, deadlines hold, and what a neighbour lacks is given back within a second.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from stepwell.errors import StepwellError

_LOG = logging.getLogger("stepwell")
INTERVAL = 0.25
BUSY_INTERVAL = 0.08
"""Seconds between two rounds while the store is used: a death loses the order of at most the last 100 ms."""


class Keeper:
    """Call `tick`, a bound method, from one thread until stopped. It says whether there will be more to do soon.

    Invariant: never two ticks at once; a tick that raises StepwellError or OSError is logged (once for each message)
    and the next one runs. The thread does not keep the method's owner alive: it ends when that has gone.
    """

    def __init__(
        self, tick: Callable[[], bool], *, interval: float = INTERVAL, busy_interval: float = BUSY_INTERVAL
    ) -> None:
        self._tick = weakref.WeakMethod(tick)
        self._interval = interval
        self._busy_interval = busy_interval
        self._event = threading.Event()  # set by wake(), and by the first use while idle
        self._is_wanted = False
        self._is_used = False
        self._is_idle = False
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
        self._is_wanted = True
        self._event.set()

    def note_use(self) -> None:
        """Say that the store is used: a round comes within 80 ms. Threads: any. Cost: 0.05 us, the first one 5."""
        if not self._is_used:
            self._is_used = True
            if self._is_idle:
                self._event.set()

    def stop(self) -> None:
        """End the thread after the round it is in; wait for it. Idempotent."""
        self._stopping = True
        self._event.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        is_busy = False
        while not self._stopping:
            self._is_idle = not is_busy  # before the look at _is_used: a use is seen here, or sees that
            is_busy = is_busy or self._is_used
            self._event.wait(self._busy_interval if is_busy else self._interval)
            self._event.clear()
            if self._is_used and not (is_busy or self._is_wanted or self._stopping):
                is_busy = True
                continue  # it was the first use that ended the wait: the round comes after more of them
            self._is_wanted = False
            was_used, self._is_used = self._is_used, False
            tick = self._tick()
            if self._stopping or tick is None:
                return
            try:
                is_busy = tick() or was_used  # what was used just now may be noted in the index only by the next round
            except (StepwellError, OSError) as error:
                text = f"{type(error).__name__}: {error}"
                if text not in self._said and len(self._said) < 256:
                    self._said.add(text)
                    _LOG.warning("background round: %s", text)
            del tick  # while this thread waits, the owner may go
