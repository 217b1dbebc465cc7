"""Make another tier fail at chosen calls: errors, short writes, wrong bytes, delays, a crash. For tests.

    FaultyTier(tier, scripted(TierFault("commit", "error", nth=3)))     the third commit fails
    FaultyTier(tier, seeded(7, rate=0.1))                               one call in ten fails; each run the same ones

Not `testing.faults`, which makes the system calls of stepwell's core fail: this stands between a tier and its caller,
whatever the tier is.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

from stepwell.errors import StepwellUsageError
from stepwell.testing.tier import Full, Record, Tier, TierAround

Call = Literal["claim", "write", "commit", "abort", "read", "free", "recover", "*"]
TierAction = Literal["error", "short", "corrupt", "delay", "crash", "crash_after"]

_T = TypeVar("_T")
_CALLS_OF: Final[dict[str, tuple[str, ...]]] = {"short": ("write",), "corrupt": ("write", "read")}


class TierCrashedError(Exception):
    """Report a call of a tier that has crashed: make another one at the same place."""


@dataclass(frozen=True, slots=True)
class TierFault:
    """Say what happens at the nth call of a name, counted from 1; 0: at each. "*" counts all calls.

    action:
        error: nothing is done, and OSError(error) is raised.
        short: half of the page is written, and OSError(error) is raised.
        corrupt: half of the page is written, or one bit of what is read is another, and nobody is told.
        delay: FaultyTier's wait() is called first.
        crash, crash_after: nothing is done, or all of it; from then on nothing reaches the tier.
    """

    call: Call
    action: TierAction
    nth: int = 0
    error: int = errno.EIO

    def __post_init__(self) -> None:
        if self.call not in get_args(Call) or self.action not in get_args(TierAction) or self.nth < 0:
            raise StepwellUsageError(
                f"{self}: give a call of {', '.join(get_args(Call))}, an action of {', '.join(get_args(TierAction))}, "
                "and nth >= 0"
            )
        if self.call not in _CALLS_OF.get(self.action, (self.call,)):
            raise StepwellUsageError(f"{self}: {self.action} is for {' and '.join(_CALLS_OF[self.action])}")


# Says for each call, in the order in which they come, which fault is due. Threads: FaultyTier asks one at a time.
Chooser = Callable[[str], TierFault | None]


def scripted(*faults: TierFault) -> Chooser:
    """Choose these faults, each at its call; of several that are due at once the first."""
    counts: Counter[str] = Counter()

    def choose(name: str) -> TierFault | None:
        counts.update((name, "*"))
        return next(
            (fault for fault in faults if fault.call in (name, "*") and fault.nth in (0, counts[fault.call])), None
        )

    return choose


def seeded(seed: int, *, rate: float, actions: Sequence[TierAction] = ("error", "short")) -> Chooser:
    """Choose, at each call with a chance of `rate`, one of the actions that it can have; the seed decides."""
    if not 0 <= rate <= 1 or not set(actions) <= set(get_args(TierAction)):
        raise StepwellUsageError(f"rate {rate} of {tuple(actions)}; give 0 to 1, and actions of {get_args(TierAction)}")
    dice = random.Random(seed)
    calls: dict[str, Call] = {call: call for call in get_args(Call)}

    def choose(name: str) -> TierFault | None:
        able = [action for action in actions if name in _CALLS_OF.get(action, (name,))]
        return TierFault(calls[name], dice.choice(able)) if dice.random() < rate and able else None

    return choose


class FaultyTier(TierAround):
    """Do what another tier does, but for the calls at which a fault is due.

    Invariant: where none is, each call reaches the tier once, unchanged; close() always does.
    Args:
        choose: scripted() or seeded(), or your own.
        wait: what a delay calls: stand there, or let something else go on.
    Threads: as the tier.
    """

    def __init__(self, tier: Tier, choose: Chooser, *, wait: Callable[[], None] = lambda: None) -> None:
        super().__init__(tier)
        self.faults_met = 0
        self.has_crashed = False
        self._choose = choose
        self._wait = wait
        self._lock = threading.Lock()

    def claim(self, keys: Sequence[bytes]) -> list[int] | Full:
        """Claim, or fail."""
        return self._pass_on("claim", lambda: self.tier.claim(keys))

    def write(self, slot: int, page: bytes) -> None:
        """Write; or half of the page, with an error or without."""
        fault = self._meet("write")
        if fault is None or fault.action not in ("short", "corrupt"):
            return self._finish(fault, lambda: self.tier.write(slot, page))
        self.tier.write(slot, page[: len(page) // 2] + bytes(len(page) - len(page) // 2))
        if fault.action == "short":
            raise OSError(fault.error, f"{os.strerror(fault.error)} (injected in the middle of a write)")
        return None

    def commit(self, slot: int, checksum: int) -> None:
        """Commit, or fail."""
        self._pass_on("commit", lambda: self.tier.commit(slot, checksum))

    def abort(self, slot: int) -> None:
        """Abort, or fail."""
        self._pass_on("abort", lambda: self.tier.abort(slot))

    def read(self, slot: int) -> bytes | None:
        """Read, fail, or return a page of which one bit is another."""
        fault = self._meet("read")
        page = self._finish(fault, lambda: self.tier.read(slot))
        if fault is None or fault.action != "corrupt" or not page:
            return page
        return bytes([page[0] ^ 1]) + page[1:]

    def free(self, slot: int) -> None:
        """Free, or fail."""
        self._pass_on("free", lambda: self.tier.free(slot))

    def recover(self) -> list[Record]:
        """Recover, or fail."""
        return self._pass_on("recover", self.tier.recover)

    def _pass_on(self, name: str, call: Callable[[], _T]) -> _T:
        return self._finish(self._meet(name), call)

    def _meet(self, name: str) -> TierFault | None:
        """Take the fault that is due at this call, if one is."""
        with self._lock:
            self._refuse_crashed(name)
            fault = self._choose(name)
            if fault is not None:
                self.faults_met += 1
                self.has_crashed = fault.action in ("crash", "crash_after")
            return fault

    def _finish(self, fault: TierFault | None, call: Callable[[], _T]) -> _T:
        if fault is None or fault.action not in ("error", "delay", "crash", "crash_after"):
            return call()
        if fault.action == "delay":
            self._wait()
            return call()
        if fault.action == "error":
            raise OSError(fault.error, f"{os.strerror(fault.error)} (injected: {fault.call})")
        if fault.action == "crash_after":
            call()
        raise TierCrashedError(
            f"{fault.call}: the tier crashed {'after' if fault.action == 'crash_after' else 'before'} it"
        )

    def _refuse_crashed(self, name: str) -> None:
        if self.has_crashed:
            raise TierCrashedError(f"{name}: the tier has crashed; make another one at its place")
