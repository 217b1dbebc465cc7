"""The index against its specification, `stepwell.testing.index_model`: they agree after every step."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from stepwell import _core
from stepwell.testing import index_model as m
from stepwell.testing.index_model import Grant, IndexModel, PageName, prefix_hashes

PAGE_TOKENS = 2
SEEDS: tuple[bytes | None, ...] = (None, b"s" * 32)
RANGES = ((0, 0, 3), (1, 0, 4), (2, 0, 3), (2, 100, 3), (3, 7, 6))  # tier, first, count

Choose = Callable[[int], int]
"""Returns one of 0 .. n-1."""


def key_array(keys: list[bytes]) -> np.ndarray:
    if not keys:
        return np.zeros((0, 32), np.uint8)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)


class Pair:
    """An index and its model, driven together.

    Invariant: after each step they agree on everything that can be asked.
    """

    def __init__(self) -> None:
        self.index = _core.Index(PAGE_TOKENS)
        self.model = IndexModel()
        self.spaces = [self.index.open_namespace(seed) for seed in SEEDS]
        self.claims: list[tuple[int, int, int]] = []  # page, tier, number: of any age, any kind
        self.pins: list[int] = []
        self.leases: list[int] = []
        self.holds: list[int] = []
        self.private: list[tuple[int, int]] = []
        self.returning: list[tuple[int, int]] = []
        self.keys: set[tuple[bytes, int]] = set()
        self.now = 0.0
        self.log: list[str] = []
        for tier, first, count in RANGES:
            self.index.add_slots(tier, first, count)
            self.model.add_slots(tier, first, count)

    # ---- choosing ------------------------------------------------------------------------------

    def chain(self, choose: Choose) -> tuple[int, np.ndarray, list[bytes]]:
        """Choose a namespace and up to four pages of tokens; return them with their keys."""
        space = choose(2)
        values = [choose(2) for _ in range(choose(4) + 1)]
        tokens = np.repeat(np.array(values, np.int32), PAGE_TOKENS)
        keys = prefix_hashes(SEEDS[space], tokens.tolist(), PAGE_TOKENS)
        self.keys.update((key, 1) for key in keys)
        return self.spaces[space], tokens, keys

    def grant(self, batch: _core.ClaimBatch) -> m.GrantOf:
        pages, slots, numbers = batch.pages, batch.slots, batch.numbers

        def of(row: int, tier: int) -> Grant:
            return Grant(int(pages[row]), int(slots[row, tier]), int(numbers[row, tier]))

        return of

    def check_claim(
        self, batch: _core.ClaimBatch, expected: m.Claimed, *, is_pinning: bool
    ) -> None:
        assert batch.outcomes.tolist() == expected.outcomes
        assert batch.full_at == expected.full_at
        for row, outcomes in enumerate(expected.outcomes):
            page = int(batch.pages[row])
            assert (page != 0xFFFFFFFF) == bool({m.NEW, m.PENDING, m.PRESENT} & set(outcomes))
            for tier, outcome in enumerate(outcomes):
                if outcome == m.NEW:
                    self.claims.append((page, tier, int(batch.numbers[row, tier])))
            if is_pinning and m.NEW in outcomes:
                self.pins.append(page)

    # ---- steps ---------------------------------------------------------------------------------

    def match(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        usable = choose(16)
        got = self.index.match_and_pin(space, tokens, usable)
        want = self.model.match(keys, usable, got.lease)
        self.check_match(got, want)
        if choose(3) == 0:
            offered, staging = self.offer(choose, len(keys) - got.pages)
            longer, batch = self.index.extend_match(
                got, space, tokens, key_array(keys[got.pages :]), offered, usable, staging
            )
            self.check_extension(got, longer, batch, want, keys, 1, offered, usable, staging, by_tokens=True)

    def offer(self, choose: Choose, rows: int) -> tuple[np.ndarray, int]:
        """Choose which pages somebody else has, and where they would come to."""
        return np.array([choose(4) > 0 for _ in range(rows)], np.uint8), choose(4)

    def check_extension(
        self,
        got: _core.MatchResult,
        longer: _core.MatchResult,
        batch: _core.ClaimBatch,
        want: m.Matched,
        keys: list[bytes],
        kind: int,
        offered: np.ndarray,
        usable: int,
        staging: int,
        *,
        by_tokens: bool,
    ) -> None:
        want, outcomes = self.model.extend(
            want, longer.lease, keys, kind, offered.tolist(), usable, staging, self.grant(batch), by_tokens=by_tokens
        )
        assert got.lease in (0, longer.lease)
        assert (longer.pages, longer.pending, longer.miss) == (want.pages, want.pending, want.miss)
        assert longer.spans == want.spans
        for row, outcome in enumerate(outcomes):
            assert outcome == max(batch.outcomes[row], key=lambda outcome: outcome != m.NONE)
            if outcome == m.NEW:
                self.claims.append((int(batch.pages[row]), staging, int(batch.numbers[row, staging])))
                self.pins.append(int(batch.pages[row]))
        if longer.lease and not got.lease:
            self.leases.append(longer.lease)
        if longer.lease:
            pages, tiers, slots, numbers, residencies = self.index.lease_states(longer.lease)
            assert [(self.name_of(int(page)), int(tier)) for page, tier in zip(pages, tiers, strict=True)] == want.pins
            for (name, tier), slot, number, residency in zip(want.pins, slots, numbers, residencies, strict=True):
                page = self.model.pages[name]
                assert (page.slot[tier], page.number[tier], page.residency[tier]) == (slot, number, residency)
            last = self.index.lease_pages(longer.lease, longer.pages - 1, 1)
            assert [int(array[0]) for array in last] == [int(array[-1]) for array in (pages, tiers, slots)]
            assert self.index.lease_key(longer.lease, longer.pages - 1) == want.pins[-1][0].key

    def check_match(self, got: _core.MatchResult, want: m.Matched) -> None:
        assert (got.pages, got.pending, got.miss) == (want.pages, want.pending, want.miss)
        assert got.spans == want.spans
        assert (got.lease != 0) == (got.pages != 0)
        if got.lease:
            self.leases.append(got.lease)

    def some_keys(self, choose: Choose) -> tuple[list[bytes], int, int, bytes]:
        _, _, keys = self.chain(choose)
        first = choose(len(keys))
        kind = 1 + choose(2)
        state = m.UNKNOWN if choose(3) == 0 else m.ROOT if first == 0 else m.KNOWN
        parent = keys[first - 1] if state == m.KNOWN else b""
        self.keys.update((key, kind) for key in keys)
        return keys[first:], kind, state, parent

    def match_keys(self, choose: Choose) -> None:
        keys, kind, _, _ = self.some_keys(choose)
        usable = choose(16)
        got = self.index.match_keys_and_pin(key_array(keys), kind, usable)
        want = self.model.match_keys(keys, kind, usable, got.lease)
        self.check_match(got, want)
        if choose(3) == 0:
            offered, staging = self.offer(choose, len(keys) - got.pages)
            longer, batch = self.index.extend_match_keys(
                got, key_array(keys[got.pages :]), kind, offered, usable, staging
            )
            self.check_extension(got, longer, batch, want, keys, kind, offered, usable, staging, by_tokens=False)

    def look(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        usable = choose(16)
        want = self.model.look(keys, usable)
        assert self.index.match_length(space, tokens, usable) == (want.pages, want.pending)
        run, tiers = self.index.probe(key_array(keys), 1, usable)
        assert (run, tiers.tolist()) == self.model.probe(keys, 1, usable)

    def retain(self, choose: Choose) -> None:
        if not self.leases:
            return
        lease = self.leases[choose(len(self.leases))]
        if lease in self.model.leases:
            self.index.retain(lease)
            self.model.retain(lease)
        else:
            with pytest.raises(ValueError, match="not live"):
                self.index.retain(lease)

    def release(self, choose: Choose) -> None:
        if self.leases:
            lease = self.leases[choose(len(self.leases))]  # often one that was released before
            assert self.index.release(lease) == self.model.release(lease)

    def release_all(self, choose: Choose) -> None:
        del choose
        for lease in list(self.model.leases):
            while lease in self.model.leases:
                assert self.index.release(lease)
                self.model.release(lease)
        self.leases.clear()

    def shorten(self, choose: Choose) -> None:
        live = [lease for lease in self.leases if lease in self.model.leases]
        if live:
            lease, pages = live[choose(len(live))], choose(4)
            self.index.shorten(lease, pages)
            self.model.shorten(lease, pages)

    def claim_absent(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        first, tiers = choose(len(keys) + 1), choose(16)
        meant = [tiers] * (len(keys) - first)
        row_tiers = None
        if choose(3) == 0:
            row_tiers = np.array([1 << choose(4) for _ in meant], np.uint8)
            meant = [tiers & int(row) for row in row_tiers]
        batch = self.index.claim_absent(
            space, tokens, key_array(keys), first, len(keys), tiers, row_tiers
        )
        expected = self.model.claim_absent(keys, first, meant, self.grant(batch))
        self.check_claim(batch, expected, is_pinning=True)

    def claim_absent_keys(self, choose: Choose) -> None:
        keys, kind, state, parent = self.some_keys(choose)
        tiers = choose(16)
        batch = self.index.claim_absent_keys(key_array(keys), kind, state, parent, tiers)
        expected = self.model.claim_absent_keys(keys, kind, state, parent, tiers, self.grant(batch))
        self.check_claim(batch, expected, is_pinning=True)

    def claim_leased(self, choose: Choose) -> None:
        live = [lease for lease in self.leases if lease in self.model.leases]
        if live:
            lease, tier = live[choose(len(live))], choose(4)
            batch = self.index.claim_leased(lease, tier)
            expected = self.model.claim_leased(lease, tier, self.grant(batch))
            self.check_claim(batch, expected, is_pinning=True)

    def claim_copies(self, choose: Choose) -> None:
        live = [lease for lease in self.leases if lease in self.model.leases]
        if not live:
            return
        lease, most = live[choose(len(live))], choose(4)
        source = choose(4)
        target = (source + 1 + choose(3)) % 4
        unless = choose(16) if choose(2) else 0
        want, lacking = self.model.copies_lacking(lease, source, target, most, unless)
        batch = self.index.claim_copies(lease, source, target, most, unless=unless)
        assert batch.lacking == lacking
        assert [self.name_of(int(page)) for page in batch.pages] == want
        assert batch.slots[:, source].tolist() == [self.model.pages[n].slot[source] for n in want]
        self.model.claim_copies(want, target, self.grant(batch))
        for page, number in zip(batch.pages.tolist(), batch.numbers[:, target].tolist(), strict=True):
            self.claims.append((page, target, number))
            self.pins.append(page)

    def keep_until(self, choose: Choose) -> None:
        live = [lease for lease in self.leases if lease in self.model.leases]
        if live:
            lease, until = live[choose(len(live))], self.now + choose(4)
            self.index.keep_until(lease, self.now, until)
            self.model.keep_until(lease, self.now, until)

    def spend(self, choose: Choose) -> None:
        keys, kind, _, _ = self.some_keys(choose)
        rows = np.array([choose(3) > 0 for _ in keys], np.bool_)
        assert self.index.spend(key_array(keys), kind, rows) == self.model.spend(keys, kind, rows.tolist())

    def pass_time(self, choose: Choose) -> None:
        self.now += choose(2)
        assert self.index.end_due_courtesies(self.now) == self.model.end_due_courtesies(self.now)

    def end_older_courtesies(self, choose: Choose) -> None:
        tier = choose(4)
        assert self.index.end_older_courtesies(tier) == self.model.end_older_courtesies(tier)

    def allow_courtesies(self, choose: Choose) -> None:
        tier, pages = choose(4), choose(6)
        self.model.allowed[tier] = pages
        self.index.allow_courtesies(tier, pages)

    def hold(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        most = (0, 2, 3, 100, 100, 100)[choose(6)]
        got = self.index.hold(space, tokens, most)
        want = self.model.hold(keys, most, got.hold)
        assert m.Held(got.pages, got.pending, got.added, got.held, got.refused) == want
        assert (got.hold == 0) == (want.pages + want.pending == 0)
        if got.hold:
            self.holds.append(got.hold)

    def unhold(self, choose: Choose) -> None:
        if self.holds:
            hold = self.holds[choose(len(self.holds))]  # often one that has ended
            assert self.index.unhold(hold) == self.model.unhold(hold)

    def unhold_all(self, choose: Choose) -> None:
        if choose(4) == 0:
            for hold in self.holds:
                while self.model.unhold(hold):
                    assert self.index.unhold(hold)
                assert not self.index.unhold(hold)
            self.holds.clear()

    def settle(self, choose: Choose) -> None:
        """Commit, abort, finish, keep or mend under a number of any age."""
        if not self.claims:
            return
        page, tier, number = self.claims[-1 - choose(min(8, len(self.claims)))]
        verb = ("commit", "commit", "commit", "abort", "finish", "finish", "keep", "mend")[
            choose(8)
        ]
        if verb == "mend":
            mended, retired = choose(4) > 0, choose(2) > 0
            want = self.model.mend(page, tier, number, mended=mended, retired=retired)
            got = self.index.mend(page, tier, number, mended, retired)
        else:
            want = getattr(self.model, verb)(page, tier, number)
            got = getattr(self.index, verb)(page, tier, number)
        assert got == (_core.Status.ok if want else _core.Status.stale)

    def commit_all(self, choose: Choose) -> None:
        del choose
        for page, tier, number in self.claims:
            want = self.model.commit(page, tier, number)
            got = self.index.commit_many(
                np.array([page], np.uint32), tier, np.array([number], np.uint32)
            )
            assert got[0] == (_core.Status.ok if want else _core.Status.stale)

    def unpin(self, choose: Choose) -> None:
        n = min(choose(3) + 1, len(self.pins))
        if n:
            pages = [self.pins[choose(len(self.pins))] for _ in range(n)]
            if self.model.unpin(pages):
                self.index.unpin_pages(np.array(pages, np.uint32))
                for page in pages:
                    self.pins.remove(page)
            else:
                with pytest.raises(ValueError, match="no pin"):
                    self.index.unpin_pages(np.array(pages, np.uint32))

    def unpin_all(self, choose: Choose) -> None:
        del choose
        self.index.unpin_pages(np.array(self.pins, np.uint32))
        assert self.model.unpin(self.pins)
        self.pins.clear()

    def name_of(self, page: int) -> PageName:
        key, _, _, kind, _, epoch = self.index.labels(np.array([page], np.uint32))[0]
        return PageName(key, kind, epoch)

    def victims_wanted(self, choose: Choose) -> tuple[int, int, int | None]:
        """Choose a tier, how many, and maybe the range they must come from."""
        tier, n = choose(4), choose(4)
        if choose(3) != 0:
            return tier, n, None
        tier, first, *_ = RANGES[choose(len(RANGES))]
        return (tier, n, first) if first in self.model.tiers[tier].ranges else (tier, n, None)

    def take_victims(self, choose: Choose) -> None:
        tier, n, first = self.victims_wanted(choose)
        even_held = choose(4) == 0
        want = self.model.victims(tier, n, first, even_held=even_held)
        slots = [self.model.pages[name].slot[tier] for name in want]
        assert self.index.take_victims(tier, n, first, even_held).tolist() == slots
        for name in want:
            self.model.take_victim(name, tier)

    def victims(self, choose: Choose) -> None:
        tier, n, first = self.victims_wanted(choose)
        want = self.model.victims(tier, n, first)
        pages, slots, numbers = self.index.claim_victims(tier, n, first)
        assert [self.name_of(int(page)) for page in pages] == want
        self.left(want, tier, (pages, slots, numbers))

    def left(self, names: list[PageName], tier: int, got: tuple[np.ndarray, ...]) -> None:
        pages, slots, numbers = got
        for name, page, slot, number in zip(names, pages, slots, numbers, strict=True):
            assert self.model.pages[name].slot[tier] == slot
            self.model.pages[name].id = int(page)
            self.model.leave(name, tier, int(number))
            self.claims.append((int(page), tier, int(number)))

    def forget(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        keep, tiers = choose(3), choose(16)
        want = self.model.chain_victims(keys, keep, tiers)
        got = self.index.claim_chain(space, tokens, keep, tiers)
        for tier in range(m.TIERS):
            assert [self.name_of(int(page)) for page in got[tier][0]] == want[tier]
            self.left(want[tier], tier, got[tier])

    def free_slots(self, choose: Choose) -> None:
        tier = choose(4)
        slots = sorted(self.model.tiers[tier].returning)
        if choose(4) == 0:  # one that is not on its way back
            slots.append(choose(4))
        if self.model.free_slots(tier, slots):
            self.index.free_slots(tier, np.array(slots, np.uint32))
        else:
            with pytest.raises(ValueError, match="not on its way back"):
                self.index.free_slots(tier, np.array(slots, np.uint32))

    def owe_slots(self, choose: Choose) -> None:
        tier = choose(4)
        of = self.model.tiers[tier]
        slots = sorted(of.returning)[: choose(4)]
        if choose(4) == 0:  # one that is free, or a page's
            slots.append(choose(4))
        if self.model.owe_slots(tier, slots):
            self.index.owe_slots(tier, np.array(slots, np.uint32))
        else:
            with pytest.raises(ValueError, match="neither on its way back nor free"):
                self.index.owe_slots(tier, np.array(slots, np.uint32))

    def take_owed(self, choose: Choose) -> None:
        tier, n = choose(4), choose(4)
        self.model.take_owed(tier, n, self.index.take_owed(tier, n).tolist())

    def quarantine(self, choose: Choose) -> None:
        tier = choose(4)
        there = sorted(p.name for p in self.model.pages.values() if p.residency[tier] != m.ABSENT)
        if there and choose(3) == 0:
            page = self.model.pages[there[choose(len(there))]]
            if page.id is None:
                return
            slot = page.slot[tier]
            assert not self.index.quarantine(page.id, tier, slot + 1)  # of a read that began before the page came here
            assert self.index.quarantine(page.id, tier, slot) == self.model.quarantine(
                page.name, tier
            )
            assert not self.index.quarantine(page.id, tier, slot)

    def hand_out(self, choose: Choose) -> None:
        tier = choose(4)
        want = self.model.mendable(tier)
        pages, _, numbers = self.index.claim_quarantined(tier, 100)
        assert {self.name_of(int(page)) for page in pages} == want
        for page, number in zip(pages, numbers, strict=True):
            self.model.hand_out(self.name_of(int(page)), tier, int(number))
            self.claims.append((int(page), tier, int(number)))

    def take_private(self, choose: Choose) -> None:
        tier, n = choose(4), choose(3)
        slots = self.index.take_private(tier, n)
        taken = self.model.take_private(tier, None if slots is None else slots.tolist(), n)
        assert taken == (slots is not None)

    def free_private(self, choose: Choose) -> None:
        tier = choose(4)
        slots = sorted(self.model.tiers[tier].private)[: choose(3)]
        if choose(4) == 0:
            slots.append(choose(4))
        if self.model.free_private(tier, slots):
            self.index.free_private(tier, np.array(slots, np.uint32))
        else:
            with pytest.raises(ValueError, match="not a private slot"):
                self.index.free_private(tier, np.array(slots, np.uint32))

    def publish(self, choose: Choose) -> None:
        space, tokens, keys = self.chain(choose)
        tier = choose(4)
        private = sorted(self.model.tiers[tier].private)
        if not private:
            return
        got, page = self.index.publish_private(
            space, tokens, key_array(keys), len(keys) - 1, tier, private[0]
        )
        assert got == self.model.publish_private(keys, tier, private[0], page)
        if got == m.NEW:
            self.pins.append(page)

    def set_epoch(self, choose: Choose) -> None:
        if choose(4) == 0:
            epoch = choose(2)
            self.index.set_epoch(epoch)
            self.model.set_epoch(epoch)

    def close_range(self, choose: Choose) -> None:
        """Retire a range for good, where it can be, and add it afresh."""
        tier, first, count = RANGES[choose(len(RANGES))]
        if choose(4) > 0:
            return
        if first not in self.model.tiers[tier].ranges:
            self.index.add_slots(tier, first, count)
            self.model.add_slots(tier, first, count)
            return
        self.index.close_slots(tier, first)
        self.model.close_slots(tier, first)
        assert self.index.drop_slots(tier, first) == self.model.drop_slots(tier, first)

    STEPS = (
        match, match, match, match_keys, look, retain, release, release, release_all, shorten,
        claim_absent, claim_absent, claim_absent_keys, claim_leased, claim_copies, settle, settle, settle,
        keep_until, keep_until, keep_until, spend, pass_time, end_older_courtesies, allow_courtesies,
        hold, hold, hold, unhold, unhold, unhold_all,
        commit_all, unpin, unpin_all, victims, take_victims, forget, free_slots, free_slots, owe_slots, take_owed,
        quarantine, hand_out, take_private, free_private, publish, set_epoch, close_range,
    )  # fmt: skip

    def step(self, choose: Choose) -> None:
        action = self.STEPS[choose(len(self.STEPS))]
        self.log.append(action.__name__)
        action(self, choose)
        self.compare()

    # ---- comparing -----------------------------------------------------------------------------

    def compare(self) -> None:
        assert self.index.check() == ""
        for tier in range(m.TIERS):
            counts = self.index.counts(tier)
            assert counts == self.model.counts(tier)
            assert counts["capacity"] == sum(
                counts[s] for s in ("free", "arriving", "resident", "leaving", "quarantined")
            )
            assert self.index.rank_order(tier).tolist() == self.model.rank_order(tier)
        assert self.index.pages() == len(self.model.pages)
        assert self.index.leases() == len(self.model.leases)
        assert self.index.holds() == len(self.model.holds)
        assert self.index.held_pages() == sum(page.holds > 0 for page in self.model.pages.values())
        for hold in self.holds:
            assert self.index.hold_extent(hold) == self.model.extent(hold)
        kept, until = self.index.list_courtesies()
        assert [(self.name_of(int(page)), at) for page, at in zip(kept, until.tolist(), strict=True)] == list(
            self.model.courtesies.items()
        )
        assert self.index.courtesies() == len(self.model.courtesies)
        assert all(self.index.has_courtesy(kept[place : place + 1]) for place in range(len(kept)))
        for key, kind in self.keys:
            assert self.index.state(key, kind) == self.model.state(key, kind)
        for lease, held in self.model.leases.items():
            pages, tiers, slots = self.index.lease_pages(lease, 0, 100)
            assert [
                (self.name_of(int(page)), int(tier))
                for page, tier in zip(pages, tiers, strict=True)
            ] == held.pins
            found = [None if slot == 0xFFFFFFFF else slot for slot in slots.tolist()]  # a copy that failed to come
            assert found == [self.model.pages[name].slot[t] for name, t in held.pins]

    def drain(self) -> None:
        """End everything; then nothing may be left but what is resident."""
        self.release_all(lambda n: 0)
        self.unhold_all(lambda n: 0)
        self.index.end_courtesies()
        self.model.end_due_courtesies(float("inf"))
        self.commit_all(lambda n: 0)
        self.unpin_all(lambda n: 0)
        for page, tier, number in self.claims:
            assert self.model.finish(page, tier, number) == (
                self.index.finish(page, tier, number) == _core.Status.ok
            )
        for tier in range(m.TIERS):
            self.model.take_owed(tier, 1000, self.index.take_owed(tier, 1000).tolist())
            for slots, give in (
                (self.model.tiers[tier].returning, "free_slots"),
                (self.model.tiers[tier].private, "free_private"),
            ):
                given = sorted(slots)
                getattr(self.index, give)(tier, np.array(given, np.uint32))
                assert getattr(self.model, give)(tier, given)
            pages, slots_out, numbers = self.index.claim_victims(tier, 1000)
            self.left(self.model.victims(tier, 1000, None), tier, (pages, slots_out, numbers))
            for page, number in zip(pages.tolist(), numbers.tolist(), strict=True):
                assert self.index.finish(page, tier, number) == _core.Status.ok
                assert self.model.finish(page, tier, number)
        self.compare()
        for tier in range(m.TIERS):
            counts = self.index.counts(tier)
            assert counts["resident"] == counts["arriving"] == counts["pinned"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_index_says_what_the_model_says(seed: int) -> None:
    rng = random.Random(seed)
    for round_number in range(6):
        pair = Pair()
        try:
            for _ in range(120):
                pair.step(rng.randrange)
            pair.drain()
        except BaseException:
            print(f"seed {seed}, round {round_number}, steps {pair.log}")
            print(f"replay: pytest '{__file__}::test_index_says_what_the_model_says[{seed}]'")
            raise


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.pair.step(lambda n: data.draw(st.integers(0, n - 1)))

    def teardown(self) -> None:
        self.pair.drain()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
