"""Show a tier of stepwell's own as a `testing.tier.Tier`: its slots in an index, its bytes under the real mover.

The index claims, publishes and frees; the mover copies, makes checksums and compares them; what is left here is names:
a slot of `Tier` is a number that this gives out, so that the real one may be looked at beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.errors import StepwellUsageError, TierIOError
from stepwell.geometry import PageGeometry
from stepwell.index import ClaimOutcome, Index, tier_mask
from stepwell.mover import POOL_COLUMN, SINK, SOURCE, Plan
from stepwell.pool import core_pool, lend_canonical
from stepwell.testing.tier import MOST_KEY_BYTES, Full, Record, page_checksum
from stepwell.tiers.base import PageTier

GEOMETRY: Final = PageGeometry(
    model="contract", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=16
)
_KIND: Final = 1
_PARENT_UNKNOWN: Final = 2
_LONG_SECONDS: Final = 60.0
_MISSES: Final = frozenset({_core.Status.checksum.value, _core.Status.stale.value})


@dataclass(slots=True)
class _Held:
    """A page that has a slot.

    lease: its pin once it is committed, so that it leaves only when it is freed. is_leaving: the index has let it go,
    and its record could not be written yet.
    """

    key: bytes
    page_id: int
    real_slot: int
    number: int
    data: bytes | None = None
    checksum: int = 0
    lease: int = 0
    is_leaving: bool = False


class OwnTier:
    """A tier of stepwell's under an index and a mover of its own.

    Invariant: each committed page is pinned by one lease of the index: what take_victims finds is what is being freed.
    Raises: AssertionError where the index or the mover does what must not be: two pages in one slot, a lost page.
    Threads: any; one call at a time goes in.
    """

    def __init__(self, tier: PageTier, geometry: PageGeometry = GEOMETRY, *, lasts: bool) -> None:
        self._shape = page_shape(geometry)
        self._tier = tier
        self._lasts = lasts
        self._index = Index(geometry.page_tokens)
        tier.open(self._index)
        try:
            media = {tier.tier.name.lower(): tier.medium}
            self._mover = _core.Mover(self._index, self._shape, **media, copy_threads=1, io_threads=1)  # type: ignore[arg-type]
        except BaseException:
            tier.close(self._index)
            raise
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._closed = False
        self._adopt()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the geometry."""
        return self._shape.page_bytes

    @property
    def capacity_pages(self) -> int:
        """Slots of the index."""
        return self._index.counts(self._tier.tier)["capacity"]

    @property
    def lasts(self) -> bool:
        """As was said."""
        return self._lasts

    def claim(self, keys: Sequence[bytes]) -> list[int] | Full:
        """Claim in the index, one page after the other; where one is refused, abort those before it."""
        with self._lock:
            self._refuse_closed()
            here = {held.key for held in self._held.values()}
            for place, key in enumerate(keys):
                if not 1 <= len(key) <= MOST_KEY_BYTES or key in here or key in keys[:place]:
                    raise StepwellUsageError(f"key {key!r}: give 1 to {MOST_KEY_BYTES} bytes that are not here yet")
            claimed: list[_Held] = []
            for key in keys:
                held = self._claim(key)
                if held is None:
                    for other in claimed:
                        self._abort(other)
                    return Full(len(keys), self._index.claimable(self._tier.tier))
                claimed.append(held)
            return [self._name(held) for held in claimed]

    def write(self, slot: int, page: bytes) -> None:
        """Keep the bytes for commit(): one transfer copies and publishes."""
        with self._lock:
            held = self._claimed(slot)
            if len(page) != self.page_bytes:
                raise StepwellUsageError(f"a page of {len(page)} bytes; this tier's have {self.page_bytes}")
            held.data = bytes(page)

    def commit(self, slot: int, checksum: int) -> None:
        """Have the mover copy the page and commit its claim, then pin it."""
        with self._lock:
            held = self._claimed(slot)
            if held.data is None:
                raise StepwellUsageError(f"slot {slot} was not written")
            status = self._write(held)
            if status != _core.Status.ok:
                # The mover has aborted the claim; the caller still has it until it is given back.
                again = self._claim(held.key)
                assert again is not None, "the slot of a failed write is not free again"
                held.page_id, held.real_slot, held.number = again.page_id, again.real_slot, again.number
                raise TierIOError(f"slot {slot}: {status.name}")
            held.checksum = checksum
            self._pin(held)

    def abort(self, slot: int) -> None:
        """Abort the claim."""
        with self._lock:
            self._abort(self._claimed(slot))
            del self._held[slot]

    def read(self, slot: int) -> bytes | None:
        """Load the page through the mover, which verifies it, and compare the caller's checksum too."""
        with self._lock:
            held = self._committed(slot)
            page = None if held.is_leaving else self._read(held)
            return page if page is not None and page_checksum(held.key, page) == held.checksum else None

    def free(self, slot: int) -> None:
        """Let the page go: of all that is resident it alone is not pinned; or mend its slot where it is quarantined."""
        with self._lock:
            held = self._committed(slot)
            if not held.is_leaving:
                self._index.release(held.lease)
                self._take_out(held)
            self._retire(slot, held)
            slots = np.array([held.real_slot], np.uint32)
            self._index.free_slots(self._tier.tier, slots)
            del self._held[slot]
            assert self._index.check() == ""

    def recover(self) -> list[Record]:
        """Return what is committed."""
        with self._lock:
            self._refuse_closed()
            return [Record(slot, held.key, held.checksum) for slot, held in self._held.items() if held.lease]

    def close(self) -> None:
        """Close as the store does."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for held in self._held.values():
                if held.lease and not held.is_leaving:
                    self._index.release(held.lease)
            self._mover.drain(10.0, True)
            del self._mover
            self._tier.close(self._index)

    def _adopt(self) -> None:
        """Pin what the tier has recovered, and let go what can no longer be read."""
        pages, _ = self._index.pin_resident(self._tier.tier, None, self.capacity_pages)
        labels = self._index.labels(pages)
        self._index.unpin_pages(pages)
        for page_id, label in zip(pages, labels, strict=True):
            held = _Held(key=label[0], page_id=int(page_id), real_slot=0, number=0)
            self._pin(held)
            self._name(held)
        for slot, held in list(self._held.items()):
            page = self._read(held)
            if page is None:
                self.free(slot)
            else:
                held.checksum = page_checksum(held.key, page)

    def _claim(self, key: bytes) -> _Held | None:
        tier = self._tier.tier
        batch = self._index.claim_absent_keys(_row(key), _KIND, _PARENT_UNKNOWN, b"", tier_mask(tier))
        outcome = ClaimOutcome(int(batch.outcomes[0, tier]))
        if outcome is not ClaimOutcome.NEW:
            assert outcome is ClaimOutcome.FULL, f"a key that is absent: {outcome.name}"
            return None
        held = _Held(key, int(batch.pages[0]), int(batch.slots[0, tier]), int(batch.numbers[0, tier]))
        taken = {other.real_slot for other in self._held.values()}
        assert held.real_slot not in taken, f"slot {held.real_slot} was given twice"
        return held

    def _take_out(self, held: _Held) -> None:
        """Have the one page that is not pinned leave the index, or its slot mended where the page is quarantined."""
        tier = self._tier.tier
        slots = self._index.take_victims(tier, 2)
        if slots.size == 0:
            pages, slots, numbers = self._index.claim_quarantined(tier, 2)
            for page, real_slot, number in zip(pages, slots, numbers, strict=True):
                status = self._tier.medium.rewrite_and_check(int(real_slot))
                assert status == _core.Status.ok, f"a slot could not be mended: {status.name}"
                self._index.mend(int(page), tier, int(number), True)
        assert slots.tolist() == [held.real_slot], f"slots {slots.tolist()} left, not {held.real_slot}"

    def _retire(self, slot: int, held: _Held) -> None:
        """Write in the volume that the slot is free, so that nobody finds its page there again."""
        held.is_leaving = True
        if not isinstance(self._tier.medium, _core.Slab):
            status = _core.Status(int(self._tier.medium.retire(np.array([held.real_slot], np.uint32))[0]))
            if status != _core.Status.ok:
                raise TierIOError(f"slot {slot} could not be retired: {status.name}")

    def _name(self, held: _Held) -> int:
        slot = next(number for number in range(self.capacity_pages) if number not in self._held)
        self._held[slot] = held
        return slot

    def _abort(self, held: _Held) -> None:
        ids = np.array([held.page_id], np.uint32)
        self._index.abort_many(ids, self._tier.tier, np.array([held.number], np.uint32))
        self._index.unpin_pages(ids)

    def _pin(self, held: _Held) -> None:
        found = self._index.match_keys_and_pin(_row(held.key), _KIND, tier_mask(self._tier.tier))
        assert found.pages == 1, f"key {held.key!r} is committed and is not found"
        held.lease = found.lease
        [held.page_id], _, [held.real_slot] = (
            list(map(int, part)) for part in self._index.lease_pages(found.lease, 0, 1)
        )

    def _write(self, held: _Held) -> _core.Status:
        plan = Plan.empty(np.array([held.page_id], np.uint32))
        plan.roles[0, POOL_COLUMN], plan.roles[0, self._tier.tier] = SOURCE, SINK
        plan.slots[0, self._tier.tier], plan.numbers[0, self._tier.tier] = held.real_slot, held.number
        assert held.data is not None
        return self._run(plan, np.frombuffer(held.data, np.uint8).reshape(1, -1), unpin=True)

    def _read(self, held: _Held) -> bytes | None:
        plan = Plan.empty(np.array([held.page_id], np.uint32))
        plan.roles[0, POOL_COLUMN], plan.roles[0, self._tier.tier] = SINK, SOURCE
        plan.slots[0, self._tier.tier] = held.real_slot
        out = np.full((1, self.page_bytes), 0xEE, np.uint8)
        self._index.retain(held.lease)
        status = self._run(plan, out, lease=held.lease)
        if status.value in _MISSES:
            return None
        if status != _core.Status.ok:
            raise TierIOError(f"key {held.key!r}: {status.name}")
        return out.tobytes()

    def _run(self, plan: Plan, rows: npt.NDArray[np.uint8], *, lease: int = 0, unpin: bool = False) -> _core.Status:
        transfer = self._mover.submit(
            plan.pages,
            plan.roles,
            plan.slots,
            plan.numbers,
            pool=core_pool(lend_canonical(self._shape, rows)),
            unpin_pages=unpin,
            lease=lease,
            keep_alive=rows,
        )
        assert isinstance(transfer, _core.Transfer), f"refused: {transfer}"
        assert transfer.wait(_LONG_SECONDS), "a transfer did not end"
        return _core.Status(int(transfer.page_status()[0]))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StepwellUsageError("this tier is closed")

    def _of(self, slot: int, *, committed: bool) -> _Held:
        self._refuse_closed()
        held = self._held.get(slot)
        if held is None or bool(held.lease) != committed:
            raise StepwellUsageError(f"slot {slot} is not {'committed' if committed else 'claimed'}")
        return held

    def _claimed(self, slot: int) -> _Held:
        return self._of(slot, committed=False)

    def _committed(self, slot: int) -> _Held:
        return self._of(slot, committed=True)


def page_shape(geometry: PageGeometry = GEOMETRY) -> _core.PageShape:
    """Return the shape of a geometry's pages, as tiers are made with."""
    return _core.PageShape(list(geometry.layer_bytes), geometry.fingerprint())


def _row(key: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(key, np.uint8).reshape(1, -1)
