"""Ctrl-C at a chosen moment: KeyboardInterrupt in the n-th place where Python looks for signals in some modules."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any

LOOKS = ("RESUME", "JUMP_BACKWARD", "CALL")
"""Python looks for signals when it has done one of these: a function begins, a loop goes on, a call returns."""

Done = tuple[str, int | None]
"""An instruction, and where the handler begins that an exception finds there."""


class Interrupter:
    """Raises KeyboardInterrupt in the n-th such place; a destructor is passed by, as what it raises goes nowhere.

    has_fired: whether there are so many. where: the function and the line.
    """

    def __init__(self, nth: int, modules: tuple[ModuleType, ...]) -> None:
        self._left = nth
        self._files = {module.__file__ for module in modules}
        self._done: dict[FrameType, Done] = {}  # what each frame has done last
        self._known: dict[CodeType, dict[int, Done]] = {}
        self.has_fired = False
        self.where = ""

    def run(self, call: Callable[[], object]) -> None:
        """Call, and take what is raised here."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            assert self.has_fired
        finally:
            sys.settrace(before)
            self._done.clear()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._look(frame)
        return self._step

    def _look(self, frame: FrameType) -> None:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = _instructions(code)
        (done, handler), now = self._done.get(frame, ("", None)), self._known[code][frame.f_lasti]
        self._done[frame] = now
        # What is raised here is raised at the next instruction; Python raises it at the one that it has done. Where the
        # two have not the same handler (the last call in a `with` block, and the way out of it), it is not the same.
        if done.startswith(LOOKS) and handler == now[1]:
            self._left -= 1
            if self._left == 0:
                self.has_fired, self.where = True, f"{code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt


def _instructions(code: CodeType) -> dict[int, Done]:
    read = dis.Bytecode(code)
    handlers = {
        offset: each.target for each in read.exception_entries for offset in range(each.start, each.end, 2)
    }
    return {each.offset: (each.opname, handlers.get(each.offset)) for each in read}
