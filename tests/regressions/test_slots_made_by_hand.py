"""A PoolSlice that did not come from a pool's [] was not checked: slot 2**32 + 1 was taken for slot 1, and its bytes
saved.
"""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import PoolSlice
from stepwell.errors import StepwellUsageError
from store_kit import OpenRig, chain


@pytest.mark.parametrize("slot", [-1, 256, 2**32 + 1])
def test_a_slot_outside_the_pool_is_refused(open_rig: OpenRig, slot: int) -> None:
    rig = open_rig(disk=0)
    tokens = chain(1, 1)
    beyond = PoolSlice(rig.pool, np.array([slot]))
    with pytest.raises(StepwellUsageError, match="slots"):
        rig.store.save(tokens, source=beyond)
    rig.save(tokens)
    with rig.store.match(tokens) as match, pytest.raises(StepwellUsageError, match="slots"):
        rig.store.load(match, into=beyond)
