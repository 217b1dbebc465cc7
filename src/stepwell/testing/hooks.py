"""Reach behind the tiers: what tests and the demo's negative control do to a running store. The product has no such switch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.store import PageStore
from stepwell.tiers.device_queue import QueueFull, ScatterTicket


def swap_staged_pages(store: PageStore) -> None:
    """Make each promotion of two or more pages put the first two into each other's slots, behind every check.

    The negative control of end-to-end comparisons: bytes are verified until they are handed to the device pool, so nothing but
    the result can tell. Requires: a store with a device tier, before its first step.
    """
    pool = store.device.pool_for_testing()
    queue = pool.queue_scatter

    def swapped(
        slots: npt.NDArray[np.integer],
        source: npt.NDArray[np.uint8],
        *,
        rows: npt.NDArray[np.integer] | None = None,
        generation: int,
    ) -> ScatterTicket | QueueFull:
        order = np.arange(len(slots))
        order[:2] = order[:2][::-1]
        chosen = order if rows is None else rows[order]
        return queue(slots, source, rows=chosen, generation=generation)

    pool.queue_scatter = swapped  # type: ignore[method-assign]
