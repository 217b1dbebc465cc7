"""What the store's tiers hold beyond `contract`: quarantine and mending, epochs, pins, the keeper's rounds.

It is for tiers whose bytes move in C++ (`stepwell.tiers.base`). Subclass `PageTierContract`, say what is asked there,
and let pytest collect it:

    class TestMyTier(PageTierContract):
        lasts = True                                          # its pages outlive close()
        def make(self, shape) -> PageTier: ...                # at the same place each time
        def spoil(self, page) -> None: ...                    # damage it behind the tier's back; None: nobody can

What a page is follows from `geometry`. The checks use what the store uses: the tier's slots in an index, its medium
under the real mover. They need no fixtures; a subclass may use its own in `setup_method`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.geometry import PageGeometry
from stepwell.index import ClaimOutcome, Index, Residency, Tier, tier_mask
from stepwell.mover import POOL_COLUMN, SINK, SOURCE, Plan
from stepwell.pool import core_pool, lend_canonical
from stepwell.tiers.base import PageTier, Recovered

PAGES = 8


@dataclass(frozen=True)
class OpenTier:
    """A tier that is open, with an index and a mover of its own, and memory to copy from and to."""

    tier: PageTier
    index: Index
    mover: _core.Mover
    shape: _core.PageShape
    recovered: Recovered

    def keys(self, first: int, pages: int) -> npt.NDArray[np.uint8]:
        """Return the keys of a chain of its own."""
        numbers = np.arange(first, first + pages, dtype=np.uint64)
        return np.ascontiguousarray(numbers.view(np.uint8).reshape(pages, 8))

    def content(self, first: int, pages: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of these pages: they follow from the key."""
        rows = np.empty((pages, self.shape.page_bytes), np.uint8)
        for row, number in zip(rows, range(first, first + pages), strict=True):
            row[:] = np.random.default_rng(number).integers(0, 256, row.size, dtype=np.uint8)
        return rows

    def claim(self, first: int, pages: int) -> _core.ClaimBatch:
        """Claim a slot for each page that is absent."""
        return self.index.claim_absent_keys(self.keys(first, pages), 1, 2, b"", tier_mask(self.tier.tier))

    def write(self, first: int, pages: int) -> npt.NDArray[np.uint8]:
        """Claim, fill and commit pages. Returns the outcome of each, uint8[pages] of `_core.Status`."""
        batch = self.claim(first, pages)
        new = batch.outcomes[:, self.tier.tier] == int(ClaimOutcome.NEW)
        assert new.all(), f"{int((~new).sum())} of {pages} pages got no slot"
        plan = Plan.empty(batch.pages)
        plan.roles[:, POOL_COLUMN], plan.slots[:, POOL_COLUMN] = SOURCE, np.arange(pages)
        plan.roles[:, self.tier.tier] = SINK
        plan.slots[:, self.tier.tier] = batch.slots[:, self.tier.tier]
        plan.numbers[:] = batch.numbers
        return self._run(plan, self.content(first, pages), unpin=True)

    def read(self, first: int, pages: int) -> tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Load the leading run that is here. Returns (its length, outcomes, the bytes that came)."""
        found = self.index.match_keys_and_pin(self.keys(first, pages), 1, tier_mask(self.tier.tier))
        out = np.full((pages, self.shape.page_bytes), 0xEE, np.uint8)
        if found.pages == 0:
            return 0, np.zeros(0, np.uint8), out
        ids, tiers, slots = self.index.lease_pages(found.lease, 0, found.pages)
        plan = Plan.empty(ids)
        rows = np.arange(ids.size)
        plan.roles[rows, tiers], plan.slots[rows, tiers] = SOURCE, slots
        plan.roles[:, POOL_COLUMN], plan.slots[:, POOL_COLUMN] = SINK, rows
        return found.pages, self._run(plan, out, lease=found.lease), out

    def assert_read(self, first: int, pages: int) -> None:
        """Check that all these pages are here, and right."""
        found, status, out = self.read(first, pages)
        assert found == pages, f"{found} of {pages} pages were found"
        assert (status == _core.Status.ok.value).all(), f"outcomes {status.tolist()}"
        assert np.array_equal(out, self.content(first, pages)), "wrong bytes were read"

    def evict(self, pages: int) -> int:
        """Let pages of lowest rank leave: record first, then the slot. Returns how many went."""
        slots = self.index.take_victims(self.tier.tier, pages)
        if not isinstance(self.tier.medium, _core.Slab):
            self.tier.medium.retire(slots)
        self.index.free_slots(self.tier.tier, slots)
        return int(slots.size)

    def assert_whole(self, *, resident: int) -> None:
        """Check that the slots add up, that the index agrees, and that so many pages are here."""
        counts = self.index.counts(self.tier.tier)
        parts = sum(counts[name] for name in ("free", "arriving", "resident", "leaving", "quarantined"))
        assert parts == counts["capacity"], f"{counts}"
        assert counts["resident"] == resident, f"{counts}"
        assert self.index.check() == ""

    def _run(
        self, plan: Plan, rows: npt.NDArray[np.uint8], *, lease: int = 0, unpin: bool = False
    ) -> npt.NDArray[np.uint8]:
        transfer = self.mover.submit(
            plan.pages,
            plan.roles,
            plan.slots,
            plan.numbers,
            pool=core_pool(lend_canonical(self.shape, rows)),
            unpin_pages=unpin,
            lease=lease,
            keep_alive=rows,
        )
        assert isinstance(transfer, _core.Transfer), f"refused: {transfer}"
        assert transfer.wait(60.0), "a transfer did not end"
        return transfer.page_status()


class PageTierContract:
    """What holds for every tier of the store. Attributes and `make` are the subclass's to answer.

    geometry: of the pages; each of a few KiB. lasts: whether pages outlive close() and are found by the next tier made
    at the same place. spoil: damages the page of these bytes behind an open tier's back; None where nobody can.
    Requires: room for 2 * PAGES pages at least.
    """

    geometry: ClassVar[PageGeometry] = PageGeometry(
        model="contract", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=16
    )
    lasts: ClassVar[bool] = False
    spoil: Callable[[npt.NDArray[np.uint8]], None] | None = None

    def make(self, shape: _core.PageShape) -> PageTier:
        """Return a tier that is not open yet, at the same place each time."""
        raise NotImplementedError

    @contextmanager
    def opened(self, *, epoch: int = 0) -> Iterator[OpenTier]:
        """Open a tier as the store does, and close it as the store does."""
        shape = _core.PageShape(list(self.geometry.layer_bytes), self.geometry.fingerprint())
        tier = self.make(shape)
        index = Index(self.geometry.page_tokens)
        index.set_epoch(epoch)
        recovered = tier.open(index)
        media = {tier.tier.name.lower(): tier.medium}
        mover = _core.Mover(index, shape, **media, copy_threads=1, io_threads=1)  # type: ignore[arg-type]
        try:
            yield OpenTier(tier, index, mover, shape, recovered)
        finally:
            mover.drain(10.0, True)
            del mover
            tier.close(index)

    def test_its_slots_are_free_once_it_is_open(self) -> None:
        with self.opened() as it:
            counts = it.index.counts(it.tier.tier)
            assert counts["capacity"] >= 2 * PAGES
            assert counts["free"] == counts["capacity"]
            assert it.recovered.pages == 0
            it.assert_whole(resident=0)

    def test_what_was_written_is_read_back_verified(self) -> None:
        with self.opened() as it:
            assert (it.write(1, PAGES) == _core.Status.ok.value).all()
            it.assert_whole(resident=PAGES)
            it.assert_read(1, PAGES)
            assert it.read(100, 1)[0] == 0

    def test_a_claim_that_is_aborted_gives_its_slot_back_and_publishes_nothing(self) -> None:
        with self.opened() as it:
            batch = it.claim(1, PAGES)
            assert it.index.counts(it.tier.tier)["arriving"] == PAGES
            assert it.read(1, PAGES)[0] == 0, "a page that is arriving was found"
            it.index.abort_many(batch.pages, it.tier.tier, np.ascontiguousarray(batch.numbers[:, it.tier.tier]))
            it.index.unpin_pages(batch.pages)
            it.assert_whole(resident=0)
            assert it.index.counts(it.tier.tier)["free"] == it.index.counts(it.tier.tier)["capacity"]

    def test_a_full_tier_says_so(self) -> None:
        with self.opened() as it:
            capacity = it.index.counts(it.tier.tier)["capacity"]
            batch = it.claim(1, capacity + 3)
            outcomes = batch.outcomes[:, it.tier.tier]
            assert (outcomes[:capacity] == int(ClaimOutcome.NEW)).all()
            assert (outcomes[capacity:] == int(ClaimOutcome.FULL)).all()
            slots = batch.slots[:capacity, it.tier.tier]
            assert np.unique(slots).size == capacity, "a slot was given twice"
            numbers = np.ascontiguousarray(batch.numbers[:capacity, it.tier.tier])
            it.index.abort_many(np.ascontiguousarray(batch.pages[:capacity]), it.tier.tier, numbers)
            it.index.unpin_pages(np.ascontiguousarray(batch.pages[:capacity]))
            it.assert_whole(resident=0)

    def test_what_leaves_is_gone_and_its_slots_serve_others(self) -> None:
        with self.opened() as it:
            capacity = it.index.counts(it.tier.tier)["capacity"]
            for round_number in range(3):
                first = 1000 * round_number
                it.write(first, capacity)
                it.assert_read(first, capacity)
                assert it.evict(capacity) == capacity
                assert it.read(first, capacity)[0] == 0
                it.assert_whole(resident=0)

    def test_a_pinned_page_does_not_leave(self) -> None:
        with self.opened() as it:
            it.write(1, PAGES)
            found = it.index.match_keys_and_pin(it.keys(1, PAGES), 1, tier_mask(it.tier.tier))
            assert it.evict(PAGES) == 0
            it.index.release(found.lease)
            assert it.evict(PAGES) == PAGES

    def test_what_lasts_is_recovered_and_what_left_is_not(self) -> None:
        with self.opened() as it:
            it.write(1, PAGES)
            it.write(100, PAGES)
            assert it.read(100, PAGES)[0] == PAGES  # used later: the other chain leaves first
            assert it.evict(PAGES) == PAGES
        with self.opened() as it:
            assert it.recovered.pages == (PAGES if self.lasts else 0)
            it.assert_whole(resident=it.recovered.pages)
            assert it.read(1, PAGES)[0] == 0
            if self.lasts:
                it.assert_read(100, PAGES)
            it.write(1, PAGES)
            it.assert_read(1, PAGES)

    def test_pages_of_another_epoch_are_misses_until_it_is_set_again_also_after_a_restart(self) -> None:
        with self.opened() as it:
            it.write(1, PAGES)
            it.index.set_epoch(5)
            assert it.read(1, PAGES)[0] == 0
            it.assert_whole(resident=PAGES)
            if not self.lasts:
                return
        with self.opened(epoch=5) as it:
            assert (it.recovered.pages, it.recovered.freed) == (0, 0)
            assert it.read(1, PAGES)[0] == 0
            it.assert_whole(resident=PAGES)
            it.index.set_epoch(0)
            it.assert_read(1, PAGES)

    def test_a_damaged_page_is_a_miss_and_its_slot_is_mended(self) -> None:
        if self.spoil is None:
            return
        with self.opened() as it:
            it.write(1, PAGES)
            self.spoil(it.content(1, PAGES)[2])
            found, status, _ = it.read(1, PAGES)
            assert found == PAGES
            wanted = [_core.Status.ok.value] * PAGES
            wanted[2] = _core.Status.checksum.value
            assert status.tolist() == wanted
            assert it.index.counts(it.tier.tier)["quarantined"] == 1
            assert it.read(1, PAGES)[0] == 2
            [page], [slot], [number] = it.index.claim_quarantined(it.tier.tier, 10)
            assert it.tier.medium.rewrite_and_check(int(slot)) == _core.Status.ok
            it.index.mend(int(page), it.tier.tier, int(number), True)
            it.index.free_slots(it.tier.tier, np.array([slot], np.uint32))
            it.assert_whole(resident=PAGES - 1)
            it.write(3, 1)
            it.assert_read(1, PAGES)

    def test_a_round_of_the_keeper_asks_for_evictions_only_when_slots_are_short(self) -> None:
        with self.opened() as it:
            assert it.tier.tick(it.index, low_pages=1, high_pages=2) == 0
            while it.index.claimable(it.tier.tier) > 0:
                it.write(10_000 + it.index.counts(it.tier.tier)["resident"], 1)
            wanted = it.tier.tick(it.index, low_pages=1, high_pages=2)
            free = it.index.claimable(it.tier.tier)
            assert wanted == max(0, 2 - free), "neither grown nor asked for what is missing"

    def test_close_is_idempotent(self) -> None:
        with self.opened() as it:
            it.write(1, PAGES)
            it.mover.drain(10.0, True)
            it.tier.close(it.index)
            it.tier.close(it.index)

    def test_a_residency_is_told_by_key(self) -> None:
        with self.opened() as it:
            it.write(1, 1)
            state = it.index.state(it.keys(1, 1).tobytes(), 1)
            assert [Residency(state[tier]) for tier in Tier if tier is not it.tier.tier] == [Residency.ABSENT] * 3
            assert Residency(state[it.tier.tier]) is Residency.RESIDENT
