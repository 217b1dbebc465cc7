"""Give each test of a suite a tier at a fresh place, and the ways in which a tier is used there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from stepwell.testing import file_calls
from stepwell.testing.place import Place
from stepwell.testing.tier import Tier
from stepwell.testing.trial import Trial

PAGES = 5


class TierSuite:
    """What the parts of `TierContract` share; `make` is the subclass's to answer.

    may_fail: whether calls may raise OSError without the suite having asked for it; they are made again then.
    parent: the directory in which those that make() is given are made; None: where the system has temporary ones.
    examples: how many random orders of calls are tried.
    """

    may_fail: ClassVar[bool] = False
    parent: ClassVar[Path | None] = None
    examples: ClassVar[int] = 100

    def make(self, directory: Path) -> Tier:
        """Return a tier in this directory: empty, or as another one made there has left it."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Have a fresh directory."""
        self.place = Place(self.parent)
        self._trial: Trial | None = None

    def teardown_method(self) -> None:
        """Close the tier, and take the directory away."""
        try:
            if self._trial is not None:
                self._trial.tier.close()
        finally:
            self._trial = None
            self.place.remove()

    def start(self) -> Trial:
        """Make the tier of a test."""
        self._trial = Trial(self.place, self.make, is_patient=self.may_fail)
        return self._trial

    def start_lasting(self) -> Trial:
        """Make the tier of a test about what lasts."""
        it = self.start()
        if not it.tier.lasts:
            pytest.skip("nothing of this tier outlives it (lasts is False)")
        return it

    def use(self, it: Trial) -> None:
        """Leave some pages, and the traces of others."""
        for number in range(PAGES):
            it.put(number)
        it.drop(next(slot for slot, page in it.pages.items() if page.number == 2))
        it.tier.abort(it.claim(it.page(PAGES)))

    def failures(self) -> Iterator[file_calls.Failure]:
        """Yield failures of file calls, until none is left to fail."""
        for failure in file_calls.fail_each_call():
            yield failure
            if failure.nth == 1 and not failure.reached:
                pytest.skip("it makes no file calls from Python here: there is nothing that could fail")
