"""The suite that every tier passes, and that anyone can point at their own.

    pytest --stepwell-tier package.module:make

needs no file of tests. Or subclass it, and let pytest collect that:

    class TestMyTier(TierContract):
        def make(self, directory: Path) -> Tier: ...          # called again for each test, and again after a crash

What must hold is said in `stepwell.testing.tier.Tier`. A test that a tier cannot be put to says why it was skipped.
"""

from __future__ import annotations

from stepwell.testing.calls_contract import CallsContract
from stepwell.testing.faults_contract import FaultsContract
from stepwell.testing.lasting_contract import LastingContract
from stepwell.testing.misuse_contract import MisuseContract


class TierContract(CallsContract, MisuseContract, LastingContract, FaultsContract):
    """What holds for every tier. Subclass it and answer `make`; the other attributes are `TierSuite`'s."""

    def test_calls_in_any_order_do_what_the_model_says(self) -> None:
        from stepwell.testing.tier_machine import run_tier_machine  # imports hypothesis, which no other test needs

        run_tier_machine(self.make, parent=self.parent, may_fail=self.may_fail, examples=self.examples)
