"""Wake an asyncio loop when something of the core has come about: one descriptor a loop, only while someone waits.

    a worker -> Watchers.tell -> Waker (an eventfd) -> loop.add_reader -> the futures of those that were told
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from typing import Final, Protocol

from stepwell import _core
from stepwell.errors import StepwellError, StepwellUsageError


class Watched(Protocol):
    """Be something of the core that tells a waker, once, when there is something to see."""

    def watch(self, waker: _core.Waker, token: int, /) -> bool:
        """Tell the waker this token when there is something to see. False: there is already, and nothing was taken."""

    def unwatch(self, waker: _core.Waker, token: int, /) -> None:
        """Give up a token; one that was told is no matter."""


async def wait_told(watched: Watched, timeout: float | None = None) -> None:
    """Wait until there is something to see, or `timeout` seconds have passed: which of them, the caller looks.

    Cancelled or left in any other way, it leaves no descriptor, callback or timer behind.

    Raises:
        StepwellUsageError: no asyncio loop runs here, or one without add_reader. StepwellError: no descriptor is left.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise StepwellUsageError(
            "await needs a running asyncio loop: elsewhere use transfer.wait(), or poll an Inbox by its fileno()"
        ) from None
    known = _WAKERS.get(loop)
    waker = known() if known is not None else None
    if waker is None:
        waker = _LoopWaker(loop)
        _WAKERS[loop] = weakref.ref(waker)
    await waker.wait(watched, timeout)


class _LoopWaker:
    """Hold a loop's descriptor.

    Invariant: it is open, and the loop watches it, from the first wait to the end of the last one that overlaps it.
    The loop keeps this object alive by its reader, this object the futures: what a loop that was closed in mid-wait
    leaves is a cycle, and goes with it.
    Threads: the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        try:
            self._core = _core.Waker()
        except OSError as error:
            raise StepwellError(
                f"await needs an eventfd: {error}; raise the limit of open files (ulimit -n)"
            ) from error
        self._fileno = self._core.fileno()
        self._pid = os.getpid()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        try:
            loop.add_reader(self._fileno, self._tell)
        except NotImplementedError:
            self._core.close()
            raise StepwellUsageError(
                f"{type(loop).__name__} has no add_reader, which await needs: run a selector loop or uvloop, or "
                "await asyncio.to_thread(transfer.wait)"
            ) from None

    async def wait(self, watched: Watched, timeout: float | None) -> None:
        """Wait until `watched` tells, or for `timeout` seconds."""
        token = next(self._tokens)
        future = self._waiting[token] = self._loop.create_future()
        timer: asyncio.TimerHandle | None = None
        try:
            if not watched.watch(self._core, token):
                return
            if timeout is not None:
                timer = self._loop.call_later(timeout, _set, future)
            await future
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(watched, token)

    def _leave(self, watched: Watched, token: int) -> None:
        del self._waiting[token]
        if self._pid != os.getpid():
            return  # a forked child: eventfd and epoll are its parent's too
        watched.unwatch(self._core, token)
        if not self._waiting:
            _WAKERS.pop(self._loop, None)
            self._loop.remove_reader(self._fileno)
            self._core.close()

    def _tell(self) -> None:
        for token in self._core.drain():
            future = self._waiting.get(token)
            if future is not None:
                _set(future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# A loop has no place for it, and nothing else knows all that await in it. Only loops in mid-wait are here.
_WAKERS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_LoopWaker]]] = (
    weakref.WeakKeyDictionary()
)
