"""Start children by fork, hear what they say, stop and kill them, and let none outlive this process."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from stepwell.torture.child import Task, live
from stepwell.torture.ledger import Line
from stepwell.torture.universe import Universe
from stepwell.torture.world import World

PATIENCE: Final = 90.0  # seconds without the line that is waited for: the child hangs
STACK_SECONDS: Final = 5.0
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG


@dataclass(slots=True)
class Child:
    """A process that works. lines: what it has said and nobody has taken yet; said: their kinds, ever.

    status: as waitstatus_to_exitcode() says, once it has ended. is_killed: by us.
    """

    number: int
    pid: int
    pipe: int
    control: int
    errors: IO[bytes]
    lines: list[Line] = field(default_factory=list)
    said: dict[str, int] = field(default_factory=dict)
    rest: bytes = b""
    is_over: bool = False  # its pipe has ended: it is dead, and what it forked has let go
    is_killed: bool = False
    status: int | None = None

    def noise(self, most: int = 3000) -> str:
        """Return the end of what it, or Python in it, printed."""
        self.errors.seek(0)
        return self.errors.read()[-most:].decode(errors="replace").strip()


class Kennel:
    """The children that live.

    Invariant: a child's pid is ours to signal until it is reaped, which happens only in `bury`.
    Use as a context manager: all that live are killed at its end.
    """

    def __init__(self, *, hears: Callable[[Line], None]) -> None:
        """Args: hears: told of each line as it comes, before anyone else."""
        self._hears = hears
        self._children: list[Child] = []
        self._born = 0
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Kennel:
        return self

    def __exit__(self, *reason: object) -> None:
        for child in list(self._children):
            self.kill(child)

    @property
    def children(self) -> list[Child]:
        """Those that were started and not buried."""
        return list(self._children)

    def next_number(self) -> int:
        """Return the number of the child that comes next."""
        return self._born

    def start(self, world: World, universe: Universe, task: Task) -> Child:
        """Fork a child."""
        reads, pipe = os.pipe()
        control, tells = os.pipe()
        # Both processes move its position: what is written goes to its end all the same.
        errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        parent = os.getpid()
        self._born += 1
        pid = os.fork()
        if pid == 0:
            try:
                self._libc.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() == parent:  # else it has died before it could be said
                    live(world, universe, task, pipe=pipe, control=control, errors=errors.fileno())
            finally:
                os._exit(1)
        os.close(pipe)
        os.close(control)
        os.set_blocking(reads, False)
        child = Child(task.number, pid, reads, tells, errors)
        self._children.append(child)
        return child

    def hear(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Take what children say, for some seconds or until something holds. Returns whether it does."""
        end = time.monotonic() + seconds
        while not until():
            left = end - time.monotonic()
            open_pipes = [child for child in self._children if not child.is_over]
            if left <= 0 or not open_pipes:
                if left > 0:
                    time.sleep(left)
                return until()
            poll = select.poll()
            for child in open_pipes:
                poll.register(child.pipe, select.POLLIN)
            ready = {number for number, _ in poll.poll(left * 1000)}
            for child in open_pipes:
                if child.pipe in ready:
                    self._read(child)
        return True

    def hear_all(self) -> None:
        """Take what has been said up to now."""
        for child in self._children:
            if not child.is_over:
                self._read(child)

    def wait_for(self, child: Child, what: str) -> bool:
        """Wait until a child has said something. False: it has ended, or hangs."""
        count = child.said.get(what, 0)
        self.hear(PATIENCE, lambda: child.said.get(what, 0) > count or child.is_over)
        return child.said.get(what, 0) > count

    def tell_to_close(self, child: Child) -> None:
        """Ask a child to close its store and to end."""
        with suppress(BrokenPipeError):
            os.write(child.control, b"c")

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a child that was not buried."""
        os.kill(child.pid, number)

    def kill(self, child: Child) -> None:
        """Kill a child, take what it said, and bury it."""
        child.is_killed = True
        os.kill(child.pid, signal.SIGKILL)
        self.bury(child)

    def bury(self, child: Child) -> None:
        """Wait for the end of a child that is ending, and take its last lines.

        Requires: it was killed, or its pipe has ended; or it ends by itself.
        """
        _, status = os.waitpid(child.pid, 0)
        child.status = os.waitstatus_to_exitcode(status)
        # What it had forked holds the pipe, and its locks, until it runs a program of its own.
        self.hear(PATIENCE, lambda: child.is_over)
        self._children.remove(child)
        os.close(child.pipe)
        os.close(child.control)

    def stacks(self, child: Child) -> str:
        """Return where the threads of a child that hangs are."""
        at = child.errors.seek(0, os.SEEK_END)
        os.kill(child.pid, signal.SIGCONT)
        os.kill(child.pid, signal.SIGUSR1)
        end, size = time.monotonic() + STACK_SECONDS, -1
        while size != (size := child.errors.seek(0, os.SEEK_END)) or (size == at and time.monotonic() < end):
            self.hear(0.1)  # until nothing more comes
        child.errors.seek(at)
        text = [child.errors.read().decode(errors="replace")]
        for task in sorted(Path(f"/proc/{child.pid}/task").iterdir()):
            with suppress(OSError):
                name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
                call = (task / "syscall").read_text().split(" ", 1)[0].strip()
                text.append(f"{name}: in {where or 'user code'}, system call {call}")
        return "\n".join(text)

    def _read(self, child: Child) -> None:
        while True:
            try:
                part = os.read(child.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                child.is_over = True  # a line that was cut off by its death was not said
                return
            *lines, child.rest = (child.rest + part).split(b"\n")
            for text in lines:
                line = Line.read(child.number, text)
                child.lines.append(line)
                child.said[line.what] = child.said.get(line.what, 0) + 1
                self._hears(line)
