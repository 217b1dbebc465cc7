"""Reach behind the tiers: what tests and the demo's negative control do to a running store. The product has no such
switch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell.store import PageStore
from stepwell.tiers.device_queue import QueueFull, ScatterTicket


def swap_staged_pages(store: PageStore) -> None:
    """Put, in each promotion, the last page of the one before it in place of its own last page, behind every check.

    The negative control of end-to-end comparisons: bytes are verified until they are handed to the device pool, so
    nothing but the result can tell. (Two pages of one sequence changing places would not do: their keys carry their
    positions, and attention is a sum.) Requires: a store with a device tier, before its first step.
    """
    pool = store.device.pool_for_testing()
    queue = pool.queue_scatter
    before: list[npt.NDArray[np.uint8]] = []

    def swapped(
        slots: npt.NDArray[np.integer],
        source: npt.NDArray[np.uint8],
        *,
        rows: npt.NDArray[np.integer] | None = None,
        generation: int,
    ) -> ScatterTicket | QueueFull:
        pages = source[: len(slots)].copy() if rows is None else source[rows].copy()
        last = pages[-1].copy()
        if before:
            pages[-1] = before.pop()
        before.append(last)
        return queue(slots, pages, generation=generation)

    pool.queue_scatter = swapped  # type: ignore[method-assign]
