"""Ctrl-C at a chosen moment: KeyboardInterrupt in the n-th place where Python looks for signals in some modules."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any

LOOKS = ("RESUME", "JUMP_BACKWARD", "CALL", "BEFORE_WITH")
"""Python looks for signals when it has done one of these: a function begins, a loop goes on, a call returns."""


class Interrupter:
    """Raises KeyboardInterrupt in the n-th such place; a destructor is passed by, as what it raises goes nowhere.

    has_fired: whether there are so many. where: the function and the line.
    """

    def __init__(self, nth: int, modules: tuple[ModuleType, ...]) -> None:
        self._left = nth
        self._files = {module.__file__ for module in modules}
        self._done: dict[FrameType, str] = {}  # what each frame has done last
        self._names: dict[CodeType, dict[int, str]] = {}
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
        if code not in self._names:
            self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
        done, self._done[frame] = self._done.get(frame, ""), self._names[code][frame.f_lasti]
        if done.startswith(LOOKS):
            self._left -= 1
            if self._left == 0:
                self.has_fired, self.where = True, f"{code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
