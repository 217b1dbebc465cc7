"""Reach behind the tiers: what tests, and the negative controls of demo and torture, do to a running store. The product
has no such switch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.index import Taken, Tier
from stepwell.mover import Transfer
from stepwell.pool import PoolSlice
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


def swap_saved_pages(store: PageStore) -> None:
    """Take, in each save of two pages or more, the last two of them from each other's place: checksums are right then.

    A negative control: what is served is not what was saved under its key.
    """
    save = store._copies.save

    def swapped(
        batch: _core.ClaimBatch, source: PoolSlice, turn: int, taken: Taken, **how: Any
    ) -> Transfer | None:
        order = np.arange(len(source))
        order[-2:] = order[-2:][::-1]
        return save(batch, source.pool[source.slots[order]], turn, taken, **how)

    store._copies.save = swapped  # type: ignore[method-assign]


def lose_saved_pages(store: PageStore) -> None:
    """Take back the record of the last page of each save once it is acknowledged: a restart finds nothing there.

    A negative control: what was acknowledged is lost, and only a restart shows it.
    """
    save = store._copies.save

    def losing(
        batch: _core.ClaimBatch, source: PoolSlice, turn: int, taken: Taken, **how: Any
    ) -> Transfer | None:
        transfer = save(batch, source, turn, taken, **how)
        if transfer is not None and transfer.pages and transfer.wait(30.0):
            for tier in store._room.keeping:
                medium = store._room.medium(tier)
                if isinstance(medium, _core.VolumeSet):
                    medium.retire(np.ascontiguousarray(batch.slots[-1:, tier]))
        return transfer

    store._copies.save = losing  # type: ignore[method-assign]


def return_dropped_pages(store: PageStore) -> None:
    """Give the slots of what leaves free, and leave its records as they are: a restart brings the pages back.

    A negative control: what was forgotten is found again.
    """

    def freeing(tier: Tier, victims: _core.Victims, patience: float | None = None) -> int:
        store._index.free_slots(tier, victims)
        return victims.size

    store._room._free = freeing  # type: ignore[method-assign]
