"""A backend as it is deployed with an engine, and what is asked of the engine's answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from backends import Flags, Store, named
from engine_kit import Answered, EngineProcess

Start = Callable[..., Any]

PROMPT: Final = 400
HIT: Final = 384  # 24 of its 25 pages: the last token is always computed (managers/schedule_batch.py:1766)
TOLERANCE: Final = 0.05  # of a logprob in bfloat16, where the work is cut otherwise


@dataclass(frozen=True)
class Deployment:
    """A backend as it is deployed. arguments: of SGLang, with it."""

    store: Store
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> Flags:
        """What SGLang is given to choose it."""
        return self.store.flags()

    def with_settings(self, **settings: Any) -> Deployment:
        """Give stepwell further settings of its own."""
        return replace(self, store=replace(self.store, settings={**self.store.settings, **settings}))

    def start(self, start: Start, model: Path, **more: Any) -> EngineProcess:
        """Start an engine."""
        engine: EngineProcess = start(model, backend=self.flags, **{**self.arguments, **more})
        return engine


# A: the host pool is a buffer, and stepwell the L2 (README). B: SGLang keeps a host tier, and stepwell what is below.
_BUFFER: Final = {"hicache_host_memory_mode": "buffer_only"}
_DEPLOYMENTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "file": ("file", {}),
    "file-buffer": ("file", _BUFFER),
    "A": ("stepwell", _BUFFER),
    "B": ("stepwell-disk", {}),
}


def deployed(name: str, *, disk: Path, memory: Path) -> Deployment:
    """Give a deployment its folders."""
    store, arguments = _DEPLOYMENTS[name]
    return Deployment(named(store, disk=disk, memory=memory), arguments)


def over(*names: str, more: tuple[str, ...] = ()) -> Any:
    """Parametrize a test over deployments; more: those that CI leaves out."""
    values = [*names, *(pytest.param(name, marks=pytest.mark.long) for name in more)]
    return pytest.mark.parametrize("deployment", values, indirect=True)


def prompt(seed: int) -> list[int]:
    """Make a prompt of random tokens."""
    choose = random.Random(seed)
    return [choose.randrange(4, 512) for _ in range(PROMPT)]


def assert_from_storage(answered: Answered, warm: Answered) -> None:
    """Hold an answer whose prompt came from storage to one whose prompt was on the device: to the last bit."""
    assert answered.storage == HIT, answered.details
    assert answered.tokens == warm.tokens
    assert answered.logprobs == warm.logprobs


def until_found(engine: EngineProcess, tokens: list[int], **options: Any) -> Answered:
    """Ask again until a neighbour's pages have been seen: a store looks for them now and then, not at each question."""
    for _ in range(50):
        answered = engine.generate(tokens, **options)
        if answered.storage == HIT:
            return answered
        engine.flush()
    raise AssertionError(f"what another process stored was not found: {answered.details}")


def assert_close(one: Answered, other: Answered) -> None:
    """Hold an answer to another up to rounding: each logprob, up to where the tokens part."""
    assert is_close(one, other), (one, other)


def is_close(one: Answered, other: Answered) -> bool:
    """Tell whether two answers are the same up to rounding. The first token must agree, or be as likely."""
    for mine, theirs, *logprobs in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        if not math.isclose(*logprobs, abs_tol=TOLERANCE):
            return False
        if mine != theirs:
            return True
    return True
