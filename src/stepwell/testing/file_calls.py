"""Stand at each file call that Python code makes in this thread: fail it, or look at what is there. For tests.

    with before_call(3, look) as calls: work      look() runs just before the third; calls.reached says which that was
    for failure in fail_each_call():              the first, the second, ... fails, until none is left
        if failure.fails(tier.free, slot): ...    it raised an OSError; else it got by without, or swallowed it
    with files_end_at(6000): work                 a write that goes beyond is cut short there, and the next one fails

The first two see what Python calls (open, write, os.replace, mmap.flush, ...), whoever imported it from where: the
interpreter tells each call into C (sys.setprofile). What C does by itself they do not see; stepwell's own has
`testing.faults`.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, ParamSpec

_P = ParamSpec("_P")
_MODULES: Final = frozenset({"_io", "io", "mmap", "posix"})
_NAMES: Final = frozenset(
    [
        "open",
        "read",
        "readinto",
        "readinto1",
        "readall",
        "readline",
        "readlines",
        "pread",
        "preadv",
        "write",
        "writelines",
        "writev",
        "pwrite",
        "pwritev",
        "flush",
        "fsync",
        "fdatasync",
        "rename",
        "replace",
        "link",
        "symlink",
        "unlink",
        "remove",
        "truncate",
        "ftruncate",
        "posix_fallocate",
        "mkdir",
        "rmdir",
        "listdir",
        "scandir",
        "sendfile",
        "copy_file_range",
        "close",
        "__exit__",
    ]
)
# A close that fails has closed all the same: these are let through, and fail afterwards.
_CLOSING: Final = frozenset({"close", "__exit__"})


@dataclass(slots=True)
class Calls:
    """Count the calls of a block. reached: the name of the n-th one, once it was reached; else empty."""

    count: int = 0
    reached: str = ""


class Failure:
    """The failure of one round of fail_each_call. nth: which file call fails. reached: its name, empty before."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.reached = ""

    def fails(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> bool:
        """Make a call in which the nth file call fails with EIO, and no other. Returns whether it raised OSError."""
        calls = Calls()

        def watch(_: FrameType, event: str, function: object) -> None:
            name = _file_call(event, function)
            if not name or (event == "c_return") != (name in _CLOSING):
                return
            calls.count += 1
            if calls.count == self.nth:
                self.reached = name
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected: {name})")

        with _profiled(watch):
            try:
                call(*args, **kwargs)
            except OSError:
                return True
        return False


def fail_each_call() -> Iterator[Failure]:
    """Yield failures, of the 1st, 2nd, ... file call, until one is not reached. Threads: the calling one alone."""
    for nth in itertools.count(1):
        failure = Failure(nth)
        yield failure
        if not failure.reached:
            return


@contextmanager
def before_call(nth: int, look: Callable[[], None]) -> Iterator[Calls]:
    """Run `look` just before the nth file call of the block. Threads: the calling one alone, and what it calls."""
    calls = Calls()

    def watch(_: FrameType, event: str, function: object) -> None:
        name = _file_call(event, function)
        if not name or event != "c_call":
            return
        calls.count += 1
        if calls.count == nth:
            calls.reached = name
            look()

    with _profiled(watch):
        yield calls


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Have nothing be written behind the first `size` bytes of a file in the block, however long it is: a write across
    that offset moves the bytes before it, one from there on fails with EFBIG. Also what C writes.

    Threads: all of the process are concerned.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@contextmanager
def _profiled(watch: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def _file_call(event: str, function: object) -> str:
    """Return the name of the file call that an event is about, or nothing."""
    if event not in ("c_call", "c_return"):
        return ""
    # Both are of every builtin: a function has its module, a method the object that it is bound to.
    name: str = function.__name__  # type: ignore[attr-defined]
    owner = function.__self__  # type: ignore[attr-defined]
    module: str | None = function.__module__ or type(owner).__module__
    return name if name in _NAMES and module in _MODULES else ""
