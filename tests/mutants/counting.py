"""Count what a run of pytest did up to its first failure: tests, and examples and steps of hypothesis in the last one.

A plugin (`-p counting`) for run.py, which reads the counts also where the run crashed: they lie in a mapped file, named
by the option --mutant-counts. Nothing is shrunk: the first failure is all that is wanted.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.stateful
import pytest
from hypothesis import Phase, settings
from hypothesis.errors import StopTest, UnsatisfiedAssumption

# Machines of tests that draw their steps from a seed of their own: a call of this method is a step.
_MACHINES = {"test_index_model": ("Pair", "step"), "test_sequence_random": ("Machine", "step")}
_COUNTS = struct.Struct("<QQQ?")
_BYTES = 4096


@dataclass(slots=True)
class Counts:
    """What a run did: tests begun; examples and steps of the one that runs, or failed; which one that is."""

    tests: int = 0
    examples: int = 0
    steps: int = 0
    has_failed: bool = False
    name: str = ""

    @classmethod
    def read(cls, path: Path) -> Counts:
        """Read what a run, dead or alive, has counted."""
        data = path.read_bytes()
        name = data[_COUNTS.size :].rstrip(b"\0").decode(errors="replace")
        return cls(*_COUNTS.unpack_from(data), name)


def make_file(path: Path) -> None:
    """Make the file that a run is to count in."""
    path.write_bytes(bytes(_BYTES))


class Counter:
    """The plugin's state: `counts`, as it lies in the file."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.counts = Counts()

    def write(self) -> None:
        """Bring the file up to date."""
        counts = self.counts
        _COUNTS.pack_into(self._memory, 0, counts.tests, counts.examples, counts.steps, counts.has_failed)

    def begin(self, name: str) -> None:
        """A test begins."""
        self.counts = Counts(self.counts.tests + 1, name=name)
        self._memory[_COUNTS.size :] = name.encode()[: _BYTES - _COUNTS.size].ljust(_BYTES - _COUNTS.size, b"\0")
        self.write()

    def counted(self, example: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what hypothesis calls once an example."""

        @functools.wraps(example)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.counts.has_failed:
                self.counts.examples += 1
                self.write()
            try:
                return example(*args, **kwargs)
            except (StopTest, UnsatisfiedAssumption):
                raise
            except BaseException:
                self.counts.has_failed = True
                self.write()
                raise

        return run

    def stepped(self) -> None:
        """A state machine has done a step."""
        if not self.counts.has_failed:
            self.counts.steps += 1
            self.write()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutant-counts", required=True, help="the file to count in")


def pytest_configure(config: pytest.Config) -> None:
    only_find = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", phases=only_find, report_multiple_bugs=False, derandomize=True, database=None, deadline=None
    )
    settings.load_profile("mutants")
    counter = Counter(Path(config.getoption("--mutant-counts")))
    config.stash[_COUNTER] = counter
    # A state machine's test is made when it runs, so that no hook of pytest sees it.
    make = hypothesis.stateful.get_state_machine_test
    check = hypothesis.stateful.RuleBasedStateMachine.check_invariants

    def make_counted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.hypothesis.inner_test = counter.counted(made.hypothesis.inner_test)
        return made

    def check_counted(machine: Any, *args: Any, **kwargs: Any) -> Any:
        counter.stepped()
        return check(machine, *args, **kwargs)

    hypothesis.stateful.get_state_machine_test = make_counted
    hypothesis.stateful.RuleBasedStateMachine.check_invariants = check_counted  # type: ignore[method-assign]


_COUNTER = pytest.StashKey[Counter]()


def pytest_collection_finish(session: pytest.Session) -> None:
    counter = session.config.stash[_COUNTER]
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        if module.__name__ in _MACHINES:
            class_name, name = _MACHINES[module.__name__]
            machine = getattr(module, class_name)
            setattr(machine, name, _counting_steps(counter, getattr(machine, name)))


def _counting_steps(counter: Counter, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        counter.stepped()
        return step(*args, **kwargs)

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    counter = item.config.stash[_COUNTER]
    counter.begin(item.nodeid)
    test = getattr(item, "obj", None)
    if hasattr(test, "hypothesis"):
        test.hypothesis.inner_test = counter.counted(test.hypothesis.inner_test)
