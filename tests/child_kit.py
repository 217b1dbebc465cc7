"""A process of its own that obeys, line by line: an order is a JSON object on its standard input, as is the answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DIRECTORY_CHILD = Path(__file__).with_name("directory_child.py")


class Child:
    """A script that obeys: `ask` waits for the answer, `send` and `receive` leave time between.

    An answer that says what has "failed" fails the test, as does a process that has ended.
    """

    def __init__(self, script: Path, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Ask for something; `receive` has the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait(10)
            self._errors.seek(0)
            raise AssertionError(f"the process ended with {status}: {self._errors.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send and receive."""
        self.send(do, **arguments)
        return self.receive()

    def close(self) -> None:
        """Let it end, and wait for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._errors.close()
