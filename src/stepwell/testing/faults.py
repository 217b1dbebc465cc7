"""Make a running core fail, stall or die at its named points (csrc/fault.h). For tests.

A point is a name, "file.pwrite"; "file.*" means every point with that prefix, "*" every point.
Rules are the process's, not a thread's: one test at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self

from stepwell import _core

Action = Literal["count", "errno", "short", "kill", "stop", "pause", "delay"]


@contextmanager
def inject(name: str, action: Action, *, nth: int = 0, value: int = 0) -> Iterator[None]:
    """Do `action` at the nth time (0: each time) that a point is reached inside the `with` block.

    Args:
        name: the point or points.
        action: count: nothing; errno: fail with errno `value`; short: move only `value` bytes;
        kill, stop: a signal to
            this process; pause: stand there until `resume`; delay: for `value` microseconds.
        nth: counted from here on.
        value: see action.

    Leaving the block drops all rules, also those of a block around it, and lets whoever is paused
    go on.
    """
    _core.fault_arm(name, action, nth, value)
    try:
        yield
    finally:
        _core.fault_clear()


class Fault:
    """The failure of one round of `fail_each`: armed inside its `with` block, and only there."""

    def __init__(self, name: str, error: int, nth: int) -> None:
        self.nth = nth
        self.has_fired = False
        self._name = name
        self._error = error

    def __enter__(self) -> Self:
        _core.fault_arm(self._name, "errno", self.nth, self._error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.has_fired = _core.fault_reached(self._name) >= self.nth
        _core.fault_clear()


def fail_each(name: str, error: int, *, most: int = 1000) -> Iterator[Fault]:
    """Yield faults that fail the 1st, 2nd, ... operation at a point, until one does not fire.

        for fault in fail_each("file.*", errno.EIO):
            with fault:
                operation_under_test()
            check_what_must_hold(fault.has_fired)

    Args:
        name: the point or points.
        error: the errno to fail with.
        most: rounds after which it is taken that the operation never ends.

    Source: SQLite's anomaly tests (sqlite.org/testing.html, 3).
    """
    for nth in range(1, most + 1):
        fault = Fault(name, error, nth)
        yield fault
        if not fault.has_fired:
            return
    raise AssertionError(f"after {most} rounds {name} is still reached")


def reached(name: str) -> int:
    """Return how often a point was reached inside the block of `inject`."""
    return _core.fault_reached(name)


def resume(name: str) -> None:
    """Let the threads that are paused at a point go on, once."""
    _core.fault_resume(name)


def wait_paused(name: str, *, timeout: float = 10.0) -> None:
    """Return once a thread is paused at a point.

    Raises:
        AssertionError: none was within `timeout` seconds.
    """
    if not _core.fault_wait_paused(name, timeout):
        raise AssertionError(f"nobody came to {name} within {timeout:g} s")
