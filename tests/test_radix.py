"""The tree of tokens: what matches, where edges end, what is left when all has gone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from radix_kit import HOST, NO_PAGE, SEEDS, SHARED, TIERS, Pair, recover
from stepwell import _core
from stepwell.testing import index_model as m


def stretch(index: _core.Index, space: int, tokens: list[int], page_tokens: int) -> list[bytes]:
    """Save the whole pages of some tokens in the host tier; return their keys."""
    keys = m.prefix_hashes(SEEDS[space], tokens, page_tokens)
    batch = index.claim_absent(
        space, np.array(tokens, np.int32), np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32), 0, len(keys), 2
    )
    new = batch.outcomes[:, HOST] == m.NEW
    assert not index.commit_many(batch.pages[new], HOST, np.ascontiguousarray(batch.numbers[new, HOST])).any()
    index.unpin_pages(batch.pages[new])
    return keys


@pytest.mark.parametrize("page_tokens", [1, 3])
def test_a_chain_forks_at_every_page_wherever_in_the_page_the_tokens_differ(page_tokens: int) -> None:
    pages = 150  # more than the 64 that are compared at a time, twice
    base = list(range(pages * page_tokens))
    index = _core.Index(page_tokens)
    index.add_slots(HOST, 0, 40_000)
    index.open_namespace()
    stretch(index, 0, base, page_tokens)
    edges = 1
    for at in range(len(base)):
        other = [*base[:at], 10_000 + at, *base[at + 1 :]]
        shared = at // page_tokens
        assert index.match_length(0, np.array(other, np.int32), 2) == (shared, 0)
        stretch(index, 0, other[: (shared + 2) * page_tokens], page_tokens)
        # The first at a page cuts the chain there, but for the first page of all, where there is nothing to cut.
        edges += 1 + (shared > 0 and at % page_tokens == 0)
        assert index.nodes() == edges
        assert index.match_length(0, np.array(other, np.int32), 2) == (min(shared + 2, pages), 0)
        assert index.match_length(0, np.array(base, np.int32), 2) == (pages, 0)
    assert index.check() == ""


def test_a_pin_cuts_its_edge_at_every_page_and_later_pins_share_the_cuts() -> None:
    pages = 140
    tokens = np.arange(pages, dtype=np.int32)
    index = _core.Index(1)
    index.add_slots(HOST, 0, pages)
    index.open_namespace()
    stretch(index, 0, tokens.tolist(), 1)
    leases = [index.match_and_pin(0, tokens[: pages - n], 2).lease for n in range(pages)]
    assert index.nodes() == pages
    again = [index.match_and_pin(0, tokens[:n], 2).lease for n in range(1, pages + 1)]
    assert index.nodes() == pages
    assert index.counts(HOST)["pinned"] == pages
    # Pins follow both parts of a cut edge: each lease gives back all that it has taken, whoever cut it since.
    for n, first, second in zip(range(pages, 0, -1), leases, reversed(again), strict=True):
        for lease in (first, second):
            assert index.counts(HOST)["pinned"] == n
            assert len(index.lease_pages(lease, 0, pages)[0]) == n
            assert index.release(lease)
    assert index.counts(HOST)["pinned"] == 0
    assert len(index.take_victims(HOST, pages)) == pages
    assert (index.nodes(), index.pages()) == (0, 0)


def test_memory_does_not_grow_while_chains_come_and_go() -> None:
    index = _core.Index(2)
    index.add_slots(HOST, 0, 2000)
    index.open_namespace()
    sizes = []
    for turn in range(60):
        for number in range(20):
            first = [turn, number % 7]
            stretch(index, 0, first + [number] * (2 + number), 2)
            index.release(index.match_and_pin(0, np.array(first + [number] * (number // 2), np.int32), 2).lease)
        index.free_slots(HOST, index.take_victims(HOST, 2000))
        assert (index.nodes(), index.pages()) == (0, 0)
        sizes.append(index.bytes())
    assert max(sizes[10:]) <= max(sizes[:10])


@st.composite
def lies(draw: st.DrawFn) -> tuple[int, list[list[int]], list[tuple[int, int, int, int, int, int]]]:
    """Return tokens a page, chains, and records: chain and page of a key, of a parent, what is said of that, depth."""
    page_tokens = draw(st.integers(1, 2))
    tail = st.lists(st.integers(0, 1), min_size=5 * page_tokens, max_size=7 * page_tokens)
    chains = [[c, *draw(tail)] for c in (0, 1)]
    # Most are wrong together: every depth too high by as much, so that the records agree with one another.
    shift = draw(st.sampled_from([0, 1, 5]))
    records = []
    for _ in range(draw(st.integers(1, 12))):
        c, p = draw(st.integers(0, 1)), draw(st.integers(0, 4))
        if draw(st.integers(0, 2)):
            records.append((c, p, c, max(p - 1, 0), m.KNOWN if p > 0 else m.UNKNOWN, p + shift))
        else:
            depth = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 2**31, NO_PAGE]))
            records.append((c, p, draw(st.integers(0, 1)), draw(st.integers(0, 4)), draw(st.integers(0, 2)), depth))
    return page_tokens, chains, records


@given(lies(), st.randoms(use_true_random=False))
def test_records_that_lie_about_depth_and_parent_cost_hits_and_nothing_else(
    drawn: tuple[int, list[list[int]], list[tuple[int, int, int, int, int, int]]], rng: random.Random
) -> None:
    page_tokens, chains, records = drawn
    index = _core.Index(page_tokens)
    index.add_slots(HOST, 0, 1000)
    for seed in SEEDS:
        index.open_namespace(seed)
    honest = [9] * (6 * page_tokens)
    stretch(index, 1, honest, page_tokens)
    keys = [m.prefix_hashes(None, tokens, page_tokens) for tokens in chains]
    resident: set[bytes] = set()
    for first in range(0, len(records), 4):
        rows = records[first : first + 4]
        index.add_slots(SHARED, first, len(rows))
        accepted = recover(
            index, SHARED, np.arange(first, first + len(rows), dtype=np.uint32),
            [keys[c][p] for c, p, *_ in rows], [keys[c][p] for _, _, c, p, *_ in rows], [r[4] for r in rows],
            [r[5] for r in rows], 0,
        )  # fmt: skip
        for (c, p, *_), took in zip(rows, accepted, strict=True):
            assert took == (keys[c][p] not in resident)
            resident.add(keys[c][p])
        assert index.check() == ""
        chain = rng.randrange(2)
        if rng.randrange(2):
            stretch(index, 0, chains[chain][: rng.randrange(6) * page_tokens], page_tokens)
        found = index.match_and_pin(0, np.array(chains[chain], np.int32), 4)
        run = next((i for i, key in enumerate(keys[chain]) if key not in resident), len(keys[chain]))
        assert found.pages <= run
        if found.pages:
            pages, _, _ = index.lease_pages(found.lease, 0, found.pages)
            assert [label[0] for label in index.labels(pages)] == keys[chain][: found.pages]
            index.release(found.lease)
        assert index.match_length(1, np.array(honest, np.int32), 2) == (6, 0)
        assert index.check() == ""
    for tier in TIERS:
        index.free_slots(tier, index.take_victims(tier, 1000))
        assert index.counts(tier)["resident"] == 0
    assert (index.nodes(), index.pages()) == (0, 0)
    # What the lies kept back is gone with them: the same pages are saved and found as if nobody had lied.
    for tokens in chains:
        stretch(index, 0, tokens, page_tokens)
        assert index.match_length(0, np.array(tokens, np.int32), 2) == (len(tokens) // page_tokens, 0)


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_has_the_pages_and_the_edges_of_the_sorted_list(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(1 + seed % 3)
    try:
        for _ in range(250):
            pair.step(rng.randrange)
        pair.drain()
    except BaseException:
        print(f"seed {seed}, steps {pair.log}")
        print(f"replay: pytest '{__file__}::test_the_tree_has_the_pages_and_the_edges_of_the_sorted_list[{seed}]'")
        raise


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_tokens=st.integers(1, 3))
    def start(self, page_tokens: int) -> None:
        self.pair = Pair(page_tokens)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.pair.step(lambda n: data.draw(st.integers(0, n - 1)))

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
