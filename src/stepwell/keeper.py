"""Run the store's background rounds in threads: `sw-keeper`, `sw-keeper-<tier>` for each tier that has files, and
`sw-keeper-neighbours` where neighbours' pages are read.

What a round does is the store's; here is only when: at once when woken, every 80 ms while the store is used (what was
used when is written then, for who adopts its volumes), every 50 ms while neighbours live (what they publish is found
within 100 ms), and every quarter of a second otherwise, so that probe leases end, deadlines hold, and what a neighbour
lacks is given back within a second. Tiers have threads of their own so that one whose files do not answer keeps nobody
else's round from running.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Final

from stepwell.errors import StepwellError

_LOG = logging.getLogger("stepwell")
INTERVAL = 0.25
BUSY_INTERVAL = 0.08
"""Seconds between two rounds while the store is used: a death loses the order of at most the last 100 ms."""
_SAY_AGAIN_SECONDS: Final = 60.0
_MOST_SAID: Final = 256
_VARYING: Final = re.compile(r"[0-9a-f]{32}|\d+")
LIVELY_INTERVAL = 0.05


class Keeper:
    """Call `tick`, a bound method, from one thread until stopped. It says whether there will be more to do soon.

    Invariant: never two ticks at once; a tick that raises is logged (each kind at most once a minute) and the next
    one runs. The thread does not keep the method's owner alive: it ends when that has gone.
    """

    def __init__(
        self,
        tick: Callable[[], bool],
        *,
        name: str = "sw-keeper",
        interval: float = INTERVAL,
        busy_interval: float = BUSY_INTERVAL,
    ) -> None:
        self._tick = weakref.WeakMethod(tick)
        self._interval = interval
        self._busy_interval = busy_interval
        self._event = threading.Event()  # set by wake(), and by the first use while idle
        self._is_wanted = False
        self._is_used = False
        self._is_idle = False
        self._stopping = False
        self._said: dict[str, float] = {}  # by kind of error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether there will be another round."""
        return self._thread.is_alive() and not self._stopping

    def pace(self, interval: float) -> None:
        """Have rounds at most `interval` seconds apart from now on. Threads: the keeper's."""
        self._interval = interval

    def wake(self) -> None:
        """Ask for a round now. Threads: any."""
        self._is_wanted = True
        if not self._event.is_set():  # else the thread has not looked yet, and that takes no lock
            self._event.set()

    def note_use(self) -> None:
        """Say that the store is used: a round comes within 80 ms. Threads: any. Cost: 0.05 us, the first one 5."""
        if not self._is_used:
            self._is_used = True
            if self._is_idle:
                self._event.set()

    def ask_to_stop(self) -> None:
        """End the thread after the round it is in, without waiting."""
        self._stopping = True
        self._event.set()

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread after the round it is in; wait for it, at most `timeout` seconds. Idempotent.

        Returns:
            Whether it has ended; one that is stuck in a call ends when that returns.
        """
        self.ask_to_stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive() or self._thread is threading.current_thread()

    def _run(self) -> None:
        is_busy = False
        while not self._stopping:
            self._is_idle = not is_busy  # before the look at _is_used: a use is seen here, or sees that
            is_busy = is_busy or self._is_used
            self._event.wait(min(self._busy_interval, self._interval) if is_busy else self._interval)
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
            except Exception as error:  # noqa: BLE001 whatever it is, the rounds after it keep the store going
                self._say(error)
            del tick  # while this thread waits, the owner may go

    def _say(self, error: Exception) -> None:
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        # What goes wrong again is the same although it names another volume, or another number of bytes.
        number = error.errno if isinstance(error, OSError) else None
        kind = f"{number} {_VARYING.sub('*', text)}"
        if now - self._said.get(kind, float("-inf")) < _SAY_AGAIN_SECONDS:
            return
        self._said = {said: at for said, at in self._said.items() if now - at < _SAY_AGAIN_SECONDS}
        if len(self._said) >= _MOST_SAID:
            return
        self._said[kind] = now
        is_the_worlds = isinstance(error, (StepwellError, OSError))
        _LOG.warning("background round: %s", text, exc_info=None if is_the_worlds else error)


class Keepers:
    """The keeper threads of one store: its own, one for each tier that has files, and one that looks at neighbours."""

    def __init__(self, tick: Callable[[], bool], rounds: Mapping[str, Callable[[], bool]], *, used: str) -> None:
        """Args: tick: the store's own. rounds: the tiers', by name. All bound methods; the owners outlive the threads
        or end them. used: the tier, if it is one of them, whose rounds come faster while the store is used."""
        by_name = {name: Keeper(each, name=f"sw-keeper-{name}") for name, each in rounds.items()}
        self._by_name = by_name
        self._keepers = [Keeper(tick), *by_name.values()]
        self._used = by_name.get(used)

    def start(self) -> None:
        """Start the threads."""
        for keeper in self._keepers:
            keeper.start()

    @property
    def is_running(self) -> bool:
        """Whether there will be another round of each."""
        return all(keeper.is_running for keeper in self._keepers)

    def wake(self) -> None:
        """Ask for a round of each now. Threads: any."""
        for keeper in self._keepers:
            keeper.wake()

    def note_use(self) -> None:
        """Say that the store is used; see Keeper.note_use."""
        if self._used is not None:
            self._used.note_use()

    def pace(self, name: str, interval: float) -> None:
        """Have the rounds of one name at most `interval` seconds apart from now on. Threads: that keeper's."""
        self._by_name[name].pace(interval)

    def stop(self, timeout: float | None = None) -> bool:
        """End the threads after the rounds they are in; wait for all of them, at most `timeout` seconds. Idempotent.

        Returns:
            Whether they have ended.
        """
        for keeper in self._keepers:
            keeper.ask_to_stop()
        until = None if timeout is None else time.monotonic() + timeout
        ended = [keeper.stop(None if until is None else max(0.0, until - time.monotonic())) for keeper in self._keepers]
        return all(ended)
