"""Show stepwell's own mover as a `testing.mover.Mover`: its sources are pages of a tier, its targets a lent pool.

Pages are put by a save, and copied by loads, each as the store submits them: under a lease of the index, observed by a
`stepwell.mover.Transfer`, told of by an inbox. With or without threads (testing/stepped.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import SystemClock
from stepwell.errors import StepwellUsageError
from stepwell.index import ClaimOutcome, Index, tier_mask
from stepwell.mover import POOL_COLUMN, SINK, SOURCE, Plan, Transfer
from stepwell.pool import core_pool, lend_canonical
from stepwell.testing.mover import Copy, Full, MoverTransfer, Outcome
from stepwell.testing.stepped import SteppedMover
from stepwell.tiers.base import PageTier

SOURCES: Final = 24
_KIND: Final = 1
_PARENT_UNKNOWN: Final = 2
_LONG_SECONDS: Final = 60.0
_QUEUE_UNITS: Final = 24
_PAGES_A_UNIT: Final = 2
_OUTCOMES: Final = {
    _core.Status.ok: Outcome.LANDED,
    _core.Status.pending: Outcome.PENDING,
    _core.Status.cancelled: Outcome.CANCELLED,
    _core.Status.deadline: Outcome.CANCELLED,
    _core.Status.checksum: Outcome.FAILED,
    _core.Status.stale: Outcome.FAILED,
    _core.Status.io_error: Outcome.FAILED,
}

Spoil = Callable[[int], None]
"""Change a bit of the page that lies in a slot of a tier."""


@dataclass(frozen=True, slots=True)
class _Put:
    """What a source is. lease: its pin."""

    key: bytes
    lease: int


class OwnMover:
    """A mover of stepwell's over one tier, and an index of its own.

    Args:
        tier: what the sources are pages of; it is closed with the mover.
        shape: of its pages.
        threads: 0: each unit runs in wait(), or in close(), on the thread that calls it, in the order that `seed` says.
        spoil: see there.

    Threads: any; with 0 threads one, and then a unit runs in poll() too.
    """

    def __init__(
        self, tier: PageTier, shape: _core.PageShape, *, threads: int, spoil: Spoil | None = None, seed: int = 1
    ) -> None:
        self.layer_bytes: Sequence[int] = list(shape.layer_bytes)
        self.sources = SOURCES
        # Each batch under way waits as one unit or more, or is a unit in the hands of a worker.
        self.most_transfers = _QUEUE_UNITS + 2 * threads
        self._shape = shape
        self._tier = tier
        self._spoil = spoil
        self._index = Index(1)
        tier.open(self._index)
        try:
            media = {tier.tier.name.lower(): tier.medium}
            self._mover = _core.Mover(
                self._index,
                shape,
                **media,  # type: ignore[arg-type]
                copy_threads=threads,
                io_threads=threads,
                queue_units=_QUEUE_UNITS,
                unit_bytes=_PAGES_A_UNIT * shape.page_bytes,
            )
        except BaseException:
            tier.close(self._index)
            raise
        self.stepped = SteppedMover(self._mover, seed=seed) if threads == 0 else None
        self._clock = SystemClock()
        self._inbox = _core.Inbox(1 << 16)
        self._lock = threading.Lock()
        self._puts = 0
        self._put: dict[int, _Put] = {}
        self._has_closed: bool | None = None

    def put(self, source: int, page: bytes) -> None:
        """Save the page under a key of its own; the one before leaves."""
        with self._lock:
            self._refuse_closed()
            if not 0 <= source < self.sources or len(page) != self._shape.page_bytes:
                raise StepwellUsageError(
                    f"source {source}, {len(page)} bytes: give one of {self.sources}, a whole page"
                )
            self._puts += 1
            key = self._puts.to_bytes(8, "little")
            tier = self._tier.tier
            self._make_room()
            batch = self._index.claim_absent_keys(_rows([key]), _KIND, _PARENT_UNKNOWN, b"", tier_mask(tier))
            assert batch.outcomes[0, tier] == ClaimOutcome.NEW, "no slot for a source"
            plan = Plan.empty(batch.pages)
            plan.roles[:, POOL_COLUMN], plan.roles[:, tier] = SOURCE, SINK
            plan.slots[:, tier], plan.numbers[:, tier] = batch.slots[:, tier], batch.numbers[:, tier]
            rows = np.frombuffer(page, np.uint8).reshape(1, -1)
            pool = core_pool(lend_canonical(self._shape, rows))
            saved = self._mover.submit(
                plan.pages, plan.roles, plan.slots, plan.numbers, pool=pool, unpin_pages=True, keep_alive=rows
            )
            assert isinstance(saved, _core.Transfer), f"refused: {saved}"
            self._run(saved.wait, _LONG_SECONDS)
            assert saved.page_status().tolist() == [_core.Status.ok.value], "a source could not be saved"
            if source in self._put:
                self._index.release(self._put[source].lease)
            self._put[source] = _Put(key, self._pin([key]))

    def spoil(self, source: int) -> None:
        """Change a bit in host memory, or in the files of a volume."""
        slot, medium = self._slot(source), self._tier.medium
        if isinstance(medium, _core.Slab):
            medium.view()[slot, self._shape.page_bytes // 2] ^= 1
        else:
            assert self._spoil is not None, "nothing says where its pages lie"
            self._spoil(slot)

    def lose(self, source: int) -> bool:
        """Free the record of a page that the index has: whoever reads it finds it gone. Not in host memory."""
        if isinstance(self._tier.medium, _core.Slab):
            return False
        statuses = self._tier.medium.retire(np.array([self._slot(source)], np.uint32))
        return bool(statuses[0] == _core.Status.ok)

    def submit(
        self,
        copies: Sequence[Copy],
        *,
        into: npt.NDArray[np.uint8],
        tag: int,
        by_layer: bool = False,
        deadline: float | None = None,
    ) -> MoverTransfer | Full:
        """Pin the sources, and load them."""
        with self._lock:
            self._refuse_closed()
            rows = [copy.row for copy in copies]
            if len(set(rows)) < len(rows) or not all(0 <= row < len(into) for row in rows):
                raise StepwellUsageError(f"rows {rows}: give each once, of {len(into)}")
            if not all(copy.source in self._put for copy in copies):
                raise StepwellUsageError("a source that was not put")
            keys = [self._put[copy.source].key for copy in copies]
            tier = self._tier.tier
            lease = self._pin(keys)
            pages, _, slots = self._index.lease_pages(lease, 0, len(keys))
            plan = Plan.empty(pages)
            plan.roles[:, POOL_COLUMN], plan.roles[:, tier] = SINK, SOURCE
            plan.slots[:, POOL_COLUMN], plan.slots[:, tier] = rows, slots
            at = self._clock.monotonic()
            core = self._mover.submit(
                plan.pages,
                plan.roles,
                plan.slots,
                plan.numbers,
                pool=core_pool(lend_canonical(self._shape, into)),
                layer_order=by_layer,
                lease=lease,
                tag=tag,
                inbox=self._inbox,
                keep_alive=into,
            )
            if isinstance(core, _core.Status):
                self._index.release(lease)
                assert core is _core.Status.queue_full, f"refused: {core.name}"
                return Full(len(copies), 0)
        observed = Transfer(
            core, self._clock, pages=len(copies), deadline_at=None if deadline is None else at + deadline
        )
        return _OwnTransfer(self, observed)

    def poll(self) -> list[int]:
        """Poll the inbox. Without threads a unit runs first."""
        if self.stepped is not None:
            self.stepped.step()
        tags, _, _ = self._inbox.poll(1 << 16)
        return [int(tag) for tag in tags]

    def close(self, timeout: float) -> bool:
        """Drain the mover, as the store does."""
        with self._lock:
            if self._has_closed is None:
                if self.stepped is not None and timeout > 0:
                    self.stepped.run_until_idle()
                self._has_closed = self._mover.drain(timeout, True)
                for put in self._put.values():
                    self._index.release(put.lease)
                self._mover.join()
                self._tier.close(self._index)
            return self._has_closed

    def _run(self, wait: Callable[[float], bool], timeout: float) -> bool:
        """Wait; where no worker does anything, do it here: with no time, one unit, else until it is over."""
        if self.stepped is None:
            return wait(timeout)
        while not wait(0.0):
            if not self.stepped.step() or timeout <= 0:
                break
        return wait(0.0)

    def _make_room(self) -> None:
        """Have a slot free: of all pages only those that others were put in place of are not pinned."""
        tier = self._tier.tier
        if self._index.claimable(tier) == 0:
            slots = self._index.take_victims(tier, 1)
            if not isinstance(self._tier.medium, _core.Slab):
                self._tier.medium.retire(slots)
            self._index.free_slots(tier, slots)

    def _pin(self, keys: Sequence[bytes]) -> int:
        found = self._index.match_keys_and_pin(_rows(keys), _KIND, tier_mask(self._tier.tier))
        assert found.pages == len(keys), "a source is not where it was put"
        return found.lease

    def _slot(self, source: int) -> int:
        return int(self._index.lease_pages(self._put[source].lease, 0, 1)[2][0])

    def _refuse_closed(self) -> None:
        if self._has_closed is not None:
            raise StepwellUsageError("this mover is closed")


class _OwnTransfer:
    def __init__(self, mover: OwnMover, transfer: Transfer) -> None:
        self._mover = mover
        self._transfer = transfer

    @property
    def outcomes(self) -> Sequence[Outcome]:
        return [_OUTCOMES[_core.Status(int(status))] for status in self._transfer.status]

    @property
    def layers_done(self) -> int:
        return self._transfer.layers_done

    def wait(self, timeout: float) -> bool:
        return self._mover._run(self._transfer.wait, timeout)

    def cancel(self) -> None:
        self._transfer.cancel()

    def revoke(self) -> None:
        self._transfer.revoke()


def _rows(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
