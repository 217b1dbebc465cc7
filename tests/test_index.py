"""The index, case by case: what it refuses, what it keeps, what it says."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from stepwell import _core
from stepwell.index import Taken, Tier
from stepwell.testing import index_model as m
from stepwell.testing.index_model import prefix_hashes

HOST, SHARED = 1, 2
NO_PAGE = 0xFFFFFFFF
Status = _core.Status


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


class Chain:
    """An index of one-token pages with one chain, and short ways to move its pages."""

    def __init__(self, *tokens: int, slots: int = 16, tiers: tuple[int, ...] = (HOST, SHARED)):
        self.index = _core.Index(1)
        self.space = self.index.open_namespace()
        for tier in tiers:
            self.index.add_slots(tier, 0, slots)
        self.tokens = np.array(tokens, np.int32)
        self.keys = self.keys_of(self.tokens)

    @staticmethod
    def keys_of(tokens: np.ndarray) -> np.ndarray:
        keys = prefix_hashes(None, tokens.tolist(), 1)
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)

    def save(self, tier: int, tokens: np.ndarray | None = None) -> np.ndarray:
        tokens = self.tokens if tokens is None else tokens
        batch = self.index.claim_absent(
            self.space, tokens, self.keys_of(tokens), 0, len(tokens), 1 << tier
        )
        new = batch.outcomes[:, tier] == m.NEW
        pages, numbers = batch.pages[new], np.ascontiguousarray(batch.numbers[new, tier])
        assert not self.index.commit_many(pages, tier, numbers).any()
        self.index.unpin_pages(pages)
        return batch.pages.copy()

    def match(self, usable: int = 15) -> _core.MatchResult:
        return self.index.match_and_pin(self.space, self.tokens, usable)

    def snapshot(self) -> tuple[object, ...]:
        states = tuple(self.index.state(key.tobytes(), 1) for key in self.keys)
        counts = tuple(tuple(self.index.counts(tier).items()) for tier in range(4))
        orders = tuple(tuple(self.index.rank_order(tier).tolist()) for tier in range(4))
        return states, counts, orders, self.index.pages(), self.index.leases()


# ---- misuse is refused and changes nothing -------------------------------------------------------


def test_second_release_of_a_lease_is_refused() -> None:
    chain = Chain(1, 2, 3)
    chain.save(HOST)
    first, second = chain.match(), chain.match()
    assert chain.index.release(first.lease)
    before = chain.snapshot()
    assert not chain.index.release(first.lease)
    assert not chain.index.release(12345 << 32)
    assert chain.snapshot() == before
    assert chain.index.counts(HOST)["pinned"] == 3
    assert chain.index.release(second.lease)
    assert chain.index.counts(HOST)["pinned"] == 0


def test_lease_id_is_not_used_again() -> None:
    chain = Chain(1)
    chain.save(HOST)
    ids = set()
    for _ in range(10):
        lease = chain.match().lease
        ids.add(lease)
        chain.index.release(lease)
    assert len(ids) == 10


def test_what_a_claim_brings_is_pinned_before_it_has_come_and_what_others_bring_is_not() -> None:
    chain = Chain(1, 2, 3, 4)
    chain.save(SHARED)
    lease = chain.match(1 << SHARED).lease
    batch = chain.index.claim_leased(lease, HOST, np.array([True, True, True, False]))
    first, second, third = batch.numbers[:3, HOST].tolist()
    pages = batch.pages[:3]
    assert chain.index.commit(int(pages[0]), HOST, first) == Status.ok
    with Taken(chain.index) as taken:
        pinned = chain.index.pin_copies(lease, HOST, array(first, second, third + 1, 1), taken)
        assert pinned.outcomes[:, HOST].tolist() == [m.PRESENT, m.PENDING, 0, 0]
        assert pinned.slots[:2, HOST].tolist() == batch.slots[:2, HOST].tolist()
        assert pinned.numbers[:, HOST].tolist() == [first, second, 0, 0]
        assert pinned.pages.tolist() == [*pages[:2].tolist(), NO_PAGE, NO_PAGE]
        for page, number in zip(pages[1:].tolist(), (second, third), strict=True):
            assert chain.index.commit(page, HOST, number) == Status.ok
        chain.index.unpin_pages(pages)
        assert chain.index.counts(HOST)["pinned"] == 2
        with pytest.raises(ValueError, match="fewer numbers"):
            chain.index.pin_copies(lease, HOST, array(first), taken)
    assert chain.index.counts(HOST)["pinned"] == 0
    assert chain.index.check() == ""


def test_retained_lease_needs_as_many_releases_as_owners() -> None:
    chain = Chain(1)
    chain.save(HOST)
    lease = chain.match().lease
    chain.index.retain(lease)
    assert chain.index.release(lease)
    assert chain.index.counts(HOST)["pinned"] == 1
    assert chain.index.release(lease)
    assert not chain.index.release(lease)


@pytest.mark.parametrize("call", ["retain", "shorten", "lease_pages", "claim_leased"])
def test_call_on_a_dead_lease_raises(call: str) -> None:
    chain = Chain(1, 2)
    chain.save(HOST)
    lease = chain.match().lease
    chain.index.release(lease)
    arguments = {"retain": (), "shorten": (1,), "lease_pages": (0, 2), "claim_leased": (SHARED,)}
    before = chain.snapshot()
    with pytest.raises(ValueError, match="not live"):
        getattr(chain.index, call)(lease, *arguments[call])
    assert chain.snapshot() == before


def test_stale_number_settles_nothing() -> None:
    chain = Chain(1)
    chain.save(HOST)
    pages, slots, numbers = chain.index.claim_victims(HOST, 1)
    page, number = int(pages[0]), int(numbers[0])
    lease = chain.match().lease  # wanted again: kept
    before = chain.snapshot()
    assert chain.index.finish(page, HOST, number) == Status.stale
    assert chain.index.keep(page, HOST, number) == Status.stale
    assert chain.index.commit(page, HOST, number) == Status.stale
    assert chain.index.abort(page, HOST, number) == Status.stale
    assert chain.index.commit(NO_PAGE, HOST, 1) == Status.stale
    assert chain.snapshot() == before
    chain.index.release(lease)
    # It leaves again under another number; the first claimant still cannot finish it.
    pages, slots, numbers = chain.index.claim_victims(HOST, 1)
    assert numbers[0] != number
    assert chain.index.finish(page, HOST, number) == Status.stale
    assert chain.index.finish(page, HOST, int(numbers[0])) == Status.ok
    chain.index.free_slots(HOST, slots)
    assert chain.index.check() == ""


def test_claim_of_an_earlier_page_of_the_same_id_is_stale() -> None:
    chain = Chain(1)
    keys, tokens = chain.keys, chain.tokens
    first = chain.index.claim_absent(chain.space, tokens, keys, 0, 1, 1 << HOST)
    page, number = int(first.pages[0]), int(first.numbers[0, HOST])
    assert chain.index.abort(page, HOST, number) == Status.ok
    chain.index.unpin_pages(first.pages)
    assert chain.index.pages() == 0
    for value in range(2, 5000):  # ids come round
        tokens = np.array([value], np.int32)
        batch = chain.index.claim_absent(
            chain.space, tokens, Chain.keys_of(tokens), 0, 1, 1 << HOST
        )
        reused = int(batch.pages[0])
        assert reused != page or chain.index.commit(page, HOST, number) == Status.stale
        chain.index.abort(reused, HOST, int(batch.numbers[0, HOST]))
        chain.index.unpin_pages(batch.pages)
        if reused == page:
            return
    pytest.fail("the id was never used again")


def test_unpin_of_more_pins_than_there_are_is_refused_whole() -> None:
    chain = Chain(1, 2)
    batch = chain.index.claim_absent(chain.space, chain.tokens, chain.keys, 0, 2, 1 << HOST)
    first, second = batch.pages.tolist()
    before = chain.snapshot()
    for pages in ((first, second, first), (second, NO_PAGE), (first, first)):
        with pytest.raises(ValueError, match="no pin"):
            chain.index.unpin_pages(array(*pages))
        assert chain.snapshot() == before
    chain.index.unpin_pages(array(first, second))


def test_pin_of_a_lease_is_not_returned_by_unpin_pages() -> None:
    chain = Chain(1)
    pages = chain.save(HOST)
    lease = chain.index.match_keys_and_pin(chain.keys, 1, 1 << HOST).lease
    with pytest.raises(ValueError, match="no pin"):
        chain.index.unpin_pages(pages)
    assert chain.index.counts(HOST)["pinned"] == 1
    assert chain.index.release(lease)


def test_slot_is_given_back_once_and_by_its_holder() -> None:
    chain = Chain(1)
    chain.save(HOST)
    private = chain.index.take_private(HOST, 2)
    pages, slots, numbers = chain.index.claim_victims(HOST, 1)
    chain.index.finish(int(pages[0]), HOST, int(numbers[0]))
    before = chain.snapshot()
    for call, given in (
        ("free_slots", private),
        ("free_private", slots),
        ("free_slots", array(int(slots[0]), int(slots[0]))),
        ("free_private", array(int(private[0]), int(private[0]))),
        ("free_slots", array(999)),
    ):
        with pytest.raises(ValueError, match="is not"):
            getattr(chain.index, call)(HOST, given)
        assert chain.snapshot() == before
    assert before[1][HOST][3] == ("resident", 0)
    assert chain.index.counts(HOST)["leaving"] == 1  # on its way back still counts
    chain.index.free_slots(HOST, slots)
    chain.index.free_private(HOST, private)
    assert chain.index.counts(HOST)["free"] == 16


def test_arguments_out_of_range_raise() -> None:
    chain = Chain(1, 2)
    index = chain.index
    with pytest.raises(ValueError, match="page_tokens"):
        _core.Index(0)
    with pytest.raises(ValueError, match="namespace"):
        index.match_and_pin(7, chain.tokens, 15)
    with pytest.raises(ValueError, match="mask"):
        index.match_and_pin(chain.space, chain.tokens, 16)
    with pytest.raises(ValueError, match="tier"):
        index.counts(4)
    with pytest.raises(ValueError, match="overlaps"):
        index.add_slots(HOST, 15, 2)
    with pytest.raises(ValueError, match="no slot range"):
        index.close_slots(HOST, 1)
    with pytest.raises(ValueError, match="fewer tokens"):
        index.claim_absent(chain.space, chain.tokens[:1], chain.keys, 0, 2, 2)
    with pytest.raises(ValueError, match="fewer keys"):
        index.claim_absent(chain.space, chain.tokens, chain.keys[:1], 0, 2, 2)
    with pytest.raises(ValueError, match="1 to 64"):
        index.state(b"k" * 65, 1)
    with pytest.raises(ValueError, match="32 bytes"):
        index.open_namespace(b"short")


# ---- match ---------------------------------------------------------------------------------------


def test_partial_page_is_not_matched() -> None:
    index = _core.Index(4)
    index.add_slots(HOST, 0, 8)
    space = index.open_namespace()
    tokens = np.arange(12, dtype=np.int32)
    keys = np.frombuffer(b"".join(prefix_hashes(None, tokens.tolist(), 4)), np.uint8).reshape(3, 32)
    batch = index.claim_absent(space, tokens, keys, 0, 3, 2)
    index.commit_many(batch.pages, HOST, np.ascontiguousarray(batch.numbers[:, HOST]))
    for length, pages in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3)):
        assert index.match_length(space, tokens[:length], 2) == (pages, 0)
    longer = np.concatenate([tokens, tokens])
    assert index.match_length(space, longer, 2) == (3, 0)
    tokens[5] = 99
    assert index.match_length(space, tokens, 2) == (1, 0)


def test_match_stops_at_the_first_gap_and_says_why() -> None:
    chain = Chain(1, 2, 3, 4)
    batch = chain.index.claim_absent(chain.space, chain.tokens, chain.keys, 0, 4, 1 << HOST)
    for i in (0, 1, 3):
        chain.index.commit(int(batch.pages[i]), HOST, int(batch.numbers[i, HOST]))
    match = chain.match()
    assert (match.pages, match.pending, match.miss) == (2, 2, m.MISS_PENDING)
    chain.index.commit(int(batch.pages[2]), HOST, int(batch.numbers[2, HOST]))
    assert chain.match().miss == m.MISS_NONE
    slot = int(chain.index.lease_pages(match.lease, 1, 1)[2][0])
    assert chain.index.quarantine(int(batch.pages[1]), HOST, slot)
    match = chain.match()
    assert (match.pages, match.miss) == (1, m.MISS_QUARANTINED)
    match = chain.match(1 << SHARED)
    assert (match.pages, match.miss, match.lease) == (0, m.MISS_ABSENT, 0)


def test_spans_name_the_fastest_usable_tier_and_pin_only_there() -> None:
    chain = Chain(1, 2, 3, 4)
    chain.save(SHARED)
    chain.save(HOST, chain.tokens[:2])
    match = chain.match()
    assert match.spans == [(0, 2, HOST), (2, 2, SHARED)]
    assert chain.index.counts(HOST)["pinned"] == 2
    assert chain.index.counts(SHARED)["pinned"] == 2
    pages, _, _ = chain.index.claim_victims(SHARED, 10)
    assert len(pages) == 2  # those that are pinned in host may leave shared
    chain.index.shorten(match.lease, 3)
    assert chain.index.counts(SHARED)["pinned"] == 1
    chain.index.shorten(match.lease, 1)
    assert [chain.index.counts(t)["pinned"] for t in (HOST, SHARED)] == [1, 0]
    assert chain.index.check() == ""


def test_pages_known_by_key_are_found_through_their_hashes_and_then_by_tokens() -> None:
    tokens = np.arange(3000, dtype=np.int32)
    chain = Chain(*tokens.tolist(), slots=4096)
    batch = chain.index.claim_absent_keys(chain.keys, 1, m.ROOT, b"", 1 << HOST)
    chain.index.commit_many(batch.pages, HOST, np.ascontiguousarray(batch.numbers[:, HOST]))
    assert chain.index.nodes() == 0
    assert chain.index.match_length(chain.space, tokens, 2) == (3000, 0)
    assert chain.index.nodes() == 0
    match = chain.match()
    assert match.pages == 3000
    assert chain.index.nodes() == 1
    assert chain.index.lease_pages(match.lease, 0, 3000)[0].tolist() == batch.pages.tolist()
    other = chain.index.open_namespace(b"x" * 32)
    assert chain.index.match_length(other, tokens, 2) == (0, 0)
    assert chain.index.check() == ""


def test_opaque_keys_of_other_lengths_are_matched_by_tokens_only() -> None:
    for length in (1, 16, 33, 64):
        index = _core.Index(1)
        index.add_slots(HOST, 0, 8)
        space = index.open_namespace()
        tokens = np.arange(3, dtype=np.int32)
        keys = np.zeros((3, length), np.uint8)
        keys[:, -1] = (1, 2, 3)
        batch = index.claim_absent(space, tokens, keys, 0, 3, 2)
        index.commit_many(batch.pages, HOST, np.ascontiguousarray(batch.numbers[:, HOST]))
        assert index.match_length(space, tokens, 2) == (3, 0)
        assert index.probe(keys, 1, 2)[0] == 3
        assert index.labels(batch.pages)[2][:2] == (keys[2].tobytes(), keys[1].tobytes())
        assert index.check() == ""


def test_key_that_does_not_belong_to_its_tokens_is_refused() -> None:
    chain = Chain(1, 2, 3)
    chain.save(HOST)
    lies = chain.keys.copy()
    lies[1] = 7
    batch = chain.index.claim_absent(chain.space, chain.tokens, lies, 0, 3, 1 << SHARED)
    assert batch.outcomes[:, SHARED].tolist() == [m.NEW, m.REFUSED, m.NONE]
    assert batch.full_at == 1
    swapped = chain.keys[[0, 2, 1]].copy()
    other = np.array([1, 9, 9], np.int32)
    batch = chain.index.claim_absent(chain.space, other, swapped, 1, 3, 1 << SHARED)
    assert batch.outcomes[0, SHARED] == m.REFUSED
    assert chain.index.check() == ""


# ---- eviction ------------------------------------------------------------------------------------


def test_pinned_page_is_not_evicted() -> None:
    chain = Chain(1, 2, 3, tiers=(HOST,))
    chain.save(HOST)
    lease = chain.index.match_and_pin(chain.space, chain.tokens[:2], 2).lease
    pages, _, numbers = chain.index.claim_victims(HOST, 10)
    assert len(pages) == 1
    assert chain.index.keep(int(pages[0]), HOST, int(numbers[0])) == Status.ok
    chain.index.release(lease)
    assert len(chain.index.claim_victims(HOST, 2)[0]) == 2
    assert len(chain.index.claim_victims(HOST, 10)[0]) == 1
    assert len(chain.index.claim_victims(HOST, 10)[0]) == 0


def test_deeper_page_leaves_first_and_a_touched_path_leaves_last() -> None:
    chain = Chain(1, 2, 3, tiers=(HOST,))
    chain.save(HOST)
    other = np.array([1, 7, 8], np.int32)
    chain.save(HOST, other)
    chain.index.release(chain.match().lease)
    pages, _, _ = chain.index.claim_victims(HOST, 10)
    left = [chain.index.labels(array(int(page)))[0][0] for page in pages]
    own, others = Chain.keys_of(chain.tokens), Chain.keys_of(other)
    assert left == [key.tobytes() for key in (others[2], others[1], own[2], own[1], own[0])]


def test_pages_leave_in_the_order_of_use_however_many_are_used_between_two_evictions() -> None:
    chain = Chain(0, slots=1000, tiers=(HOST,))
    paths = [np.array([token], np.int32) for token in range(1000)]
    slots = []
    for path in paths:
        chain.save(HOST, path)
        lease = chain.index.match_and_pin(chain.space, path, 15).lease
        slots += chain.index.lease_pages(lease, 0, 1)[2].tolist()
        chain.index.release(lease)
    used = np.random.default_rng(0).permutation(1000)
    for number in used:
        chain.index.release(chain.index.match_and_pin(chain.space, paths[number], 15).lease)
    assert chain.index.take_victims(HOST, 1000).tolist() == [slots[number] for number in used]


def test_victims_of_one_range_only_come_from_it() -> None:
    chain = Chain(1, 2, 3, 4, slots=2, tiers=(HOST,))
    chain.index.add_slots(HOST, 100, 2)
    chain.save(HOST)
    _, slots, _ = chain.index.claim_victims(HOST, 10, 100)
    assert sorted(slots.tolist()) == [100, 101]
    chain.index.close_slots(HOST, 100)
    assert chain.index.drop_slots(HOST, 100) == 2
    assert chain.index.counts(HOST)["capacity"] == 4


def test_page_of_another_epoch_is_a_miss_and_leaves_first() -> None:
    chain = Chain(1, 2, tiers=(HOST,))
    old = chain.save(HOST)
    held = chain.match()
    claimed = chain.index.claim_leased(held.lease, HOST)
    assert claimed.outcomes[:, HOST].tolist() == [m.PRESENT, m.PRESENT]
    chain.index.set_epoch(5)
    assert chain.match().pages == 0
    assert chain.index.state(chain.keys[0].tobytes(), 1) == (0, 0, 0, 0)
    assert chain.index.lease_pages(held.lease, 0, 9)[0].tolist() == old.tolist()
    chain.save(HOST)
    chain.index.release(held.lease)
    pages, _, _ = chain.index.claim_victims(HOST, 2)
    assert sorted(pages.tolist()) == sorted(old.tolist())
    assert chain.match().pages == 2
    assert chain.index.check() == ""


def test_full_tier_stops_a_claim_and_leaves_no_record_behind() -> None:
    chain = Chain(1, 2, 3, 4, 5, slots=2, tiers=(HOST,))
    batch = chain.index.claim_absent(chain.space, chain.tokens, chain.keys, 0, 5, 1 << HOST)
    assert batch.outcomes[:, HOST].tolist() == [m.NEW, m.NEW, m.FULL, m.NONE, m.NONE]
    assert batch.full_at == 2
    assert batch.pages[2:].tolist() == [NO_PAGE] * 3
    assert chain.index.pages() == 2
    assert chain.index.take_private(HOST, 1) is None


# ---- poison, threads -----------------------------------------------------------------------------


def test_poisoned_index_misses_and_refuses_and_still_takes_everything_back() -> None:
    chain = Chain(1, 2)
    chain.save(HOST)
    held = chain.match()
    pending = chain.index.claim_leased(held.lease, SHARED)
    chain.index.poison()
    assert chain.index.poisoned()
    match = chain.match()
    assert (match.pages, match.miss, match.lease) == (0, m.MISS_POISONED, 0)
    assert chain.index.match_length(chain.space, chain.tokens, 15) == (0, 0)
    assert chain.index.match_keys_and_pin(chain.keys, 1, 15).miss == m.MISS_POISONED
    assert chain.index.probe(chain.keys, 1, 15)[0] == 0
    assert chain.index.state(chain.keys[0].tobytes(), 1) == (0, 0, 0, 0)
    batch = chain.index.claim_absent(chain.space, chain.tokens, chain.keys, 0, 2, 4)
    assert batch.outcomes[0, SHARED] == m.REFUSED
    assert chain.index.take_private(HOST, 1) is None
    for page, number in zip(
        pending.pages.tolist(), pending.numbers[:, SHARED].tolist(), strict=True
    ):
        assert chain.index.abort(page, SHARED, number) == Status.ok
    assert chain.index.release(held.lease)
    assert chain.index.check() == ""


def test_matches_from_many_python_threads_agree() -> None:
    tokens = list(range(500))
    chain = Chain(*tokens, slots=1000)
    chain.save(HOST)
    results: list[int] = []

    def look() -> None:
        for _ in range(50):
            match = chain.match()
            results.append(match.pages)
            chain.index.release(match.lease)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [500] * 200
    assert chain.index.check() == ""


def test_move_table_is_the_models() -> None:
    table = _core.move_table()
    names = _core.move_names()
    assert names == list(m.MOVES)
    assert _core.residency_names() == ["absent", "arriving", "resident", "leaving", "quarantined"]
    for row, name in enumerate(names):
        source, target = m.MOVES[name]
        expected = [target if residency == source else 255 for residency in range(5)]
        assert table[row].tolist() == expected


# ---- words -----------------------------------------------------------------------------------------------------------


def test_a_tier_is_its_name_in_text_and_its_number_everywhere_else() -> None:
    assert f"{Tier.DISK} {Tier.HOST:>6} {Tier.SHARED!s}" == "disk   host shared"
    assert repr(Tier.DISK) == "<Tier.DISK: 3>"
    assert json.dumps([Tier.DISK]) == "[3]"
    assert np.array([Tier.DISK, Tier.HOST], np.uint8).tolist() == [3, 1]
    assert (np.array([1, 3], np.uint8) == Tier.DISK).tolist() == [False, True]
    assert np.arange(4)[Tier.DISK] == Tier.DISK == 3
