"""wait() said False of a transfer that was done, and of one whose deadline was no number; then bytes landed after it.

The transfer ended between the core's wait and the look at the deadline; and nothing is later than a NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepwell.errors import StepwellUsageError
from stepwell.hashing import prefix_hashes
from stepwell.testing import faults
from store_kit import PAGE_TOKENS, OpenRig, chain


def test_a_transfer_that_ends_as_its_deadline_is_looked_at_is_done(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0)
    tokens = chain(1, 8)
    rig.save(tokens)
    transfer = rig.start_load(tokens, deadline=60.0)
    core = transfer._core_transfer
    assert core is not None

    class Late:
        """Its wait gives up just before the transfer ends."""

        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def wait(self, timeout: float | None) -> bool:
            assert core.wait(60.0)
            return False

    transfer._core_transfer = Late()  # type: ignore[assignment]
    assert transfer.wait()


def test_a_deadline_that_is_no_number_is_refused(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0)
    tokens = chain(1, 8)
    rig.save(tokens)
    keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS)
    never = float("nan")
    with faults.inject("file.pread", "pause"):
        with pytest.raises(StepwellUsageError, match="deadline"):
            rig.start_load(tokens, deadline=never).wait()
        with pytest.raises(StepwellUsageError, match="deadline"):
            rig.store.load_keys(keys, into=rig.pool[:8], deadline=never)
        with pytest.raises(StepwellUsageError, match="deadline"):
            rig.store.save_keys(np.invert(keys), source=rig.pool[:8], deadline=never)
        with pytest.raises(StepwellUsageError, match="lease"):
            rig.store.probe(keys, lease=never)
