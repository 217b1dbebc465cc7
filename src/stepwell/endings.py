"""Let a command that is ended from outside take with it what it made: its children, its directories."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDINGS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP an exit inside the `with` block, as SIGINT is KeyboardInterrupt: what is open is left.

    A signal that is ignored (by nohup, say) stays so. Threads: the main thread.
    """
    before = {number: signal.getsignal(number) for number in ENDINGS}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_undisturbed() -> None:
    """Ignore what would cut the removal of files short: a second ctrl-C, or the hang-up behind it.

    Requires: inside ended_in_order(), which has them heard again.
    """
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
