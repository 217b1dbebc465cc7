"""The tier of the README, in a directory of its own, and pytest run there on it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stepwell.testing.tier import Tier

README = Path(__file__).parents[1] / "README.md"


def readme_tier() -> str:
    """Return the program of README's section "Test a tier of your own"."""
    section = README.read_text().partition("## Test a tier of your own\n")[2].partition("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return str(code)


def tier_class(code: str) -> type[Tier]:
    """Return the class of a program like README's."""
    names: dict[str, type[Tier]] = {}
    exec(compile(code, str(README), "exec"), names)
    return names["DirectoryTier"]


def changed(code: str, *changes: tuple[str, str]) -> str:
    """Return a program with a fault: each of the texts, which is there once, in place of another."""
    for old, new in changes:
        assert code.count(old) == 1, f"{code.count(old)} times in the program: {old}"
        code = code.replace(old, new)
    return code


@dataclass(frozen=True)
class Run:
    """What pytest said. outcomes: by the test's name, with its parameters."""

    code: int
    output: str
    outcomes: dict[str, str]

    def named(self, outcome: str) -> set[str]:
        """Return the tests that ended so, without parameters."""
        return {name.partition("[")[0] for name, found in self.outcomes.items() if found == outcome}


def run_pytest(directory: Path, *arguments: str) -> Run:
    """Run pytest as a user does who has nothing but this directory."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280)
    found = re.findall(r"^\S+::(test_[^ ]+(?: \w+\])?) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout, re.MULTILINE)
    return Run(done.returncode, done.stdout + done.stderr, {name: outcome.lower() for name, outcome in found})
