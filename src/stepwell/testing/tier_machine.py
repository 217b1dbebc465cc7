"""Call a tier in any order, rightly and wrongly, beside a model in a dict: a hypothesis state machine.

What a tier promises of single calls is `_Taken` and the rules below: what each may return follows from the dict alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from stepwell.errors import StepwellUsageError
from stepwell.testing.place import Place
from stepwell.testing.tier import Full, MakeTier, Tier
from stepwell.testing.trial import Page, PatientTier, Trial, assert_bytes

_T = TypeVar("_T")
_MOST_STEPS = 40
_MOST_FILLED = 4096
# Few, so that keys come again.
_NUMBERS = st.integers(0, 9)
_FILLER = 1000


@dataclass(slots=True)
class _Taken:
    """What a slot that is taken holds. checksum: what commit() was given; is_right: whether the bytes have it."""

    page: Page
    is_written: bool = False
    is_committed: bool = False
    is_right: bool = True
    checksum: int = 0


class TierMachine(RuleBasedStateMachine):
    """Call a tier and the model; compare after every step.

    may_fail: whether calls may raise OSError: then nothing has changed.
    """

    slots: Bundle[int] = Bundle("slots")

    def __init__(self, make: MakeTier, *, parent: Path | None, may_fail: bool) -> None:
        super().__init__()
        self._place = Place(parent)
        self._may_fail = may_fail
        self._taken: dict[int, _Taken] = {}
        self._version = 0
        self._trial: Trial | None = None
        self._make = make

    def teardown(self) -> None:
        """Close the tier, and take its directory away."""
        try:
            if self._trial is not None:
                self._trial.tier.close()
        finally:
            self._trial = None
            self._place.remove()

    @initialize(leave=st.none() | st.integers(0, 4))
    def start(self, leave: int | None) -> None:
        """Make the tier, and have all but a few slots claimed, unless it is to stay empty."""
        self._trial = Trial(self._place, self._make)
        if leave is not None and 8 <= self._tier.capacity_pages <= _MOST_FILLED:
            pages = [self._page(_FILLER + number) for number in range(self._tier.capacity_pages - leave)]
            slots = PatientTier(self._tier).claim([page.key for page in pages])
            assert not isinstance(slots, Full), f"claim of {len(pages)} pages in an empty tier: {slots}"
            self._take(slots, pages)

    @rule(target=slots, numbers=st.lists(_NUMBERS, min_size=1, max_size=3))
    def claim(self, numbers: list[int]) -> MultipleResults[int]:
        """Claim slots for keys; some may be here already, or come twice."""
        self._version += 1
        pages = [self._page(number) for number in numbers]
        keys = [page.key for page in pages]
        here = {taken.page.key for taken in self._taken.values()}
        if here & set(keys) or len(set(keys)) < len(keys):
            self._refused("claim of a key that is here", lambda: self._tier.claim(keys))
            return multiple()
        slots = self._called(lambda: self._tier.claim(keys))
        free = self._tier.capacity_pages - len(self._taken)
        if slots is None:
            return multiple()
        if len(keys) > free:
            assert slots == Full(needed=len(keys), free=free), f"claim of {len(keys)} pages, {free} free: {slots}"
            return multiple()
        assert not isinstance(slots, Full), f"claim of {len(keys)} pages, {free} free: {slots}"
        self._take(slots, pages)
        return multiple(*slots)

    @rule(target=slots, number=_NUMBERS)
    def put(self, number: int) -> MultipleResults[int]:
        """Claim, write and commit at once: what comes after that is had in fewer steps."""
        claimed = self.claim([number])
        assert isinstance(claimed, MultipleResults)
        for slot in claimed.values:
            self.write(slot, is_short=False)
            self.commit(slot, is_right=True)
        return claimed

    @rule(slot=slots, is_short=st.just(False) | st.booleans())
    def write(self, slot: int, is_short: bool) -> None:
        """Write the page of a slot, or one of another length."""
        taken = self._taken.get(slot)
        data = (taken.page if taken else self._page(0)).data[is_short:]
        if taken is None or taken.is_committed or is_short:
            self._refused(f"write of {len(data)} bytes to slot {slot}", lambda: self._tier.write(slot, data))
            return
        if not self._done(lambda: self._tier.write(slot, data)):
            PatientTier(self._tier).write(slot, data)  # what a failed one leaves is open
        taken.is_written = True

    @rule(slot=slots, is_right=st.just(True) | st.booleans())
    def commit(self, slot: int, is_right: bool) -> None:
        """Commit a slot, with the checksum of its page or of another: then it must not be served."""
        taken = self._taken.get(slot)
        checksum = (taken.page if taken else self._page(0)).checksum ^ (not is_right)
        if taken is None or taken.is_committed or not taken.is_written:
            self._refused(f"commit of slot {slot}", lambda: self._tier.commit(slot, checksum))
        elif self._done(lambda: self._tier.commit(slot, checksum)):
            taken.is_committed, taken.is_right, taken.checksum = True, is_right, checksum

    @rule(slot=slots)
    def abort(self, slot: int) -> None:
        """Abort a claim."""
        taken = self._taken.get(slot)
        if taken is None or taken.is_committed:
            self._refused(f"abort of slot {slot}", lambda: self._tier.abort(slot))
        elif self._done(lambda: self._tier.abort(slot)):
            del self._taken[slot]

    @rule(slot=slots)
    def free(self, slot: int) -> None:
        """Free a committed page."""
        taken = self._taken.get(slot)
        if taken is None or not taken.is_committed:
            self._refused(f"free of slot {slot}", lambda: self._tier.free(slot))
            return
        if not self._done(lambda: self._tier.free(slot)):
            PatientTier(self._tier).free(slot)  # what a failed one leaves is open
        del self._taken[slot]

    @rule(slot=slots)
    def read(self, slot: int) -> None:
        """Read a slot, which may be none; those that are committed are read after every step."""
        taken = self._taken.get(slot)
        if taken is None or not taken.is_committed:
            self._refused(f"read of slot {slot}", lambda: self._tier.read(slot))

    @rule(slot=slots, at=st.integers(0, 15))
    def damage(self, slot: int, at: int) -> None:
        """Flip a bit of a committed page in the files, where it is found there."""
        taken = self._taken.get(slot)
        if taken is not None and taken.is_committed and taken.is_right:
            taken.is_right = not self._place.damage(taken.page.data, at=at)

    @rule(target=slots, crashes=st.booleans())
    def restart(self, crashes: bool) -> MultipleResults[int]:
        """Make the tier again where it was, after close() or a crash."""
        assert self._trial is not None
        if crashes:
            self._trial.crash()
        else:
            self._trial.reopen()
        must = {taken.page.key: taken for taken in self._taken.values() if taken.is_committed and self._tier.lasts}
        self._taken = {}
        for record in PatientTier(self._tier).recover():
            assert record.key in must, f"{record} was recovered; committed were {sorted(must)}"
            taken = self._taken[record.slot] = must.pop(record.key)
            if taken.checksum != taken.page.checksum == record.checksum:
                # The checksum that was given was not the page's; a tier that makes its own has the page, and right.
                taken.checksum, taken.is_right = record.checksum, True
        # A page that has not its checksum may be dropped at once.
        lost = sorted(key for key, taken in must.items() if taken.is_right)
        assert not lost, f"committed and not recovered: {lost}"
        return multiple(*self._taken)

    @invariant()
    def agrees(self) -> None:
        """Hold what is committed against the model, and read it."""
        if self._trial is None:
            return
        tier = PatientTier(self._tier)
        committed = {slot: taken for slot, taken in self._taken.items() if taken.is_committed}
        wanted = sorted((slot, taken.page.key, taken.checksum) for slot, taken in committed.items())
        found = sorted((record.slot, record.key, record.checksum) for record in tier.recover())
        assert found == wanted, f"recover(): {found}; committed are {wanted}"
        for slot, taken in committed.items():
            data = tier.read(slot)
            if taken.is_right:
                assert_bytes(data, taken.page)
            else:
                assert data is None, f"slot {slot} does not have its checksum, and was served"

    @property
    def _tier(self) -> Tier:
        assert self._trial is not None, "start() comes first"
        return self._trial.tier

    def _page(self, number: int) -> Page:
        return Page(number, self._tier.page_bytes, self._version)

    def _take(self, slots: list[int], pages: list[Page]) -> None:
        assert len(slots) == len(set(slots)) == len(pages), f"claim of {len(pages)} pages: {slots}"
        again = sorted(self._taken.keys() & set(slots))
        assert not again, f"slots {again} were given twice"
        assert all(0 <= slot < self._tier.capacity_pages for slot in slots), f"slots {slots}"
        self._taken |= {slot: _Taken(page) for slot, page in zip(slots, pages, strict=True)}

    def _called(self, call: Callable[[], _T]) -> _T | None:
        """Return what a call returns; None where it failed, and may."""
        try:
            return call()
        except OSError:
            if not self._may_fail:
                raise
            return None

    def _done(self, call: Callable[[], None]) -> bool:
        def report() -> bool:
            call()
            return True

        return self._called(report) is not None

    def _refused(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except StepwellUsageError:
            return
        except OSError:
            if not self._may_fail:
                raise
            return
        raise AssertionError(f"{what}: no StepwellUsageError")


def run_tier_machine(make: MakeTier, *, parent: Path | None, may_fail: bool, examples: int) -> None:
    """Try so many random orders of calls; a failure is shrunk to a few, and printed as a program."""
    run_state_machine_as_test(
        lambda: TierMachine(make, parent=parent, may_fail=may_fail),  # type: ignore[arg-type] # it may be a factory
        settings=settings(
            max_examples=examples,
            stateful_step_count=_MOST_STEPS,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
