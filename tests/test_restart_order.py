"""The order in which pages leave is the same after a restart: the index, its stamps, and volumes of stamps by slot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.hashing import prefix_hashes
from stepwell.index import Index, Tier, tier_mask

SLOTS = 8
SECOND = 1_000_000_000
NOW = 1_800_000_000 * SECOND


class Process:
    """An index as a process has it, and what its keeper wrote: a stamp for each slot."""

    def __init__(self, *, volumes: int, tier: Tier = Tier.SHARED) -> None:
        self.tier = tier
        self.index = Index(1)
        self.space = self.index.open_namespace(None)
        self.volumes = volumes
        self.written: dict[int, int] = {}
        for number in range(volumes):
            self.index.add_slots(tier, number * SLOTS, SLOTS)

    def save(self, tokens: list[int]) -> None:
        keys = prefix_hashes(np.array(tokens, np.int32), page_tokens=1)
        row = np.array(tokens, np.int32)
        batch = self.index.claim_absent(self.space, row, keys, 0, len(tokens), tier_mask(self.tier))
        outcomes = batch.outcomes[:, self.tier]
        new = np.flatnonzero(outcomes == 1)
        self.index.commit_many(batch.pages[new], self.tier, batch.numbers[new, self.tier])
        self.index.unpin_pages(batch.pages[new])

    def use(self, tokens: list[int]) -> None:
        found = self.index.match_and_pin(self.space, np.array(tokens, np.int32), tier_mask(self.tier))
        if found.lease:
            self.index.release(found.lease)

    def evict(self, pages: int) -> None:
        self.index.free_slots(self.tier, self.index.take_victims(self.tier, pages))

    def stamp(self, at_once: int = 3) -> None:
        while self.index.has_stamps(self.tier):
            slots, stamps = self.index.take_stamps(self.tier, at_once)
            self.written.update(zip(slots.tolist(), stamps.tolist(), strict=True))

    def order(self) -> list[bytes]:
        """Keys of all pages, the first to leave first. They leave: it is the last that is asked."""
        pages, _, _ = self.index.claim_victims(self.tier, 1 << 20)
        return [key for key, *_ in self.index.labels(pages)]

    def records(self) -> list[tuple[int, tuple, int]]:
        """Slot, label and written stamp of each page. They leave."""
        pages, slots, _ = self.index.claim_victims(self.tier, 1 << 20)
        labels = self.index.labels(pages)
        return [(slot, label, self.written.get(slot, 0)) for slot, label in zip(slots.tolist(), labels, strict=True)]


def adopt(index: Index, tier: Tier, base: int, records: list[tuple[int, tuple, int]]) -> int:
    """Give an index one volume's records, at slots from `base` on; return how many it took."""

    def wide(rows: list[bytes]) -> np.ndarray:
        joined = b"".join(row.ljust(64, b"\0") for row in rows)
        return np.frombuffer(joined, np.uint8).reshape(len(rows), 64).copy()

    keys = [label[0] for _, label, _ in records]
    parents = [label[1] or b"" for _, label, _ in records]
    index.add_slots(tier, base, SLOTS)
    accepted = index.recover(
        tier,
        np.array([base + slot % SLOTS for slot, _, _ in records], np.uint32),
        wide(keys),
        np.array([len(key) for key in keys], np.uint8),
        wide(parents),
        np.array([len(parent) for parent in parents], np.uint8),
        np.array([label[2] for _, label, _ in records], np.uint8),
        np.array([label[4] for _, label, _ in records], np.uint32),
        np.array([label[3] for _, label, _ in records], np.uint8),
        np.array([label[5] for _, label, _ in records], np.uint64),
        np.array([stamp for _, _, stamp in records], np.uint64),
    )
    assert index.check() == ""
    return int(accepted.sum())


def restart(processes: list[Process], shuffle: Callable[[list], None], *, now: int = NOW) -> Process:
    """Let one new process adopt all volumes of the dead ones, in any order."""
    again = Process(volumes=0, tier=processes[0].tier)
    again.index.stand_clock_at(now)
    volumes = []
    for process in processes:
        records = process.records()
        for number in range(process.volumes):
            volumes.append([record for record in records if record[0] // SLOTS == number])
    shuffle(volumes)
    again.volumes = len(volumes)
    for number, records in enumerate(volumes):
        shuffle(records)
        if records:
            adopt(again.index, again.tier, number * SLOTS, records)
    return again


def chains() -> st.SearchStrategy[list[int]]:
    """Token paths of a small tree: they share prefixes."""
    return st.lists(st.integers(0, 1), min_size=1, max_size=5)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), chains()),
        st.tuples(st.just("use"), chains()),
        st.tuples(st.just("evict"), st.integers(1, 3)),
        st.tuples(st.just("stamp"), st.integers(1, 5)),
        st.tuples(st.just("clock"), st.integers(0, 20)),
    ),
    max_size=40,
)


def perform(process: Process, steps: list[tuple]) -> None:
    clock = NOW
    process.index.stand_clock_at(clock)
    for verb, value in steps:
        if verb == "clock":
            clock += value  # by less than pages are apart, or not at all: stamps come to lie side by side
            process.index.stand_clock_at(clock)
        else:
            getattr(process, verb)(value)
    process.stamp()
    assert process.index.check() == ""


@settings(max_examples=100)
@given(steps=STEPS, seed=st.integers(0, 1000), tier=st.sampled_from([Tier.SHARED, Tier.DISK]))
def test_the_order_after_a_restart_is_the_order_before_whatever_was_done(
    steps: list[tuple], seed: int, tier: Tier
) -> None:
    first, twin = Process(volumes=3, tier=tier), Process(volumes=3, tier=tier)
    for process in (first, twin):
        perform(process, steps)
    again = restart([first], random.Random(seed).shuffle, now=NOW + SECOND)
    again.stamp()
    expected = twin.order()
    third = restart([again], random.Random(seed).shuffle, now=NOW + SECOND)  # and once more
    assert third.order() == expected


class Uses:
    """The simplest model of last use: one list for all processes; a use moves a chain to the end, its head last."""

    def __init__(self) -> None:
        self.order: list[bytes] = []

    def use(self, keys: list[bytes], here: set[bytes]) -> None:
        for key in reversed(keys):
            if key in here:
                self.order.remove(key)
                self.order.append(key)

    def save(self, keys: list[bytes], here: set[bytes]) -> None:
        self.use(keys, here)
        for key in keys:
            if key not in here:
                above = [self.order.index(other) for other in keys[: keys.index(key)] if other in self.order]
                self.order.insert(min(above, default=len(self.order)), key)
                here.add(key)


@settings(max_examples=100)
@given(data=st.data())
def test_volumes_of_several_processes_merge_by_last_use(data: st.DataObject) -> None:
    processes = [Process(volumes=5) for _ in range(3)]
    here: list[set[bytes]] = [set() for _ in processes]
    uses, clock = Uses(), NOW
    for _ in range(data.draw(st.integers(1, 25))):
        clock += SECOND
        which = data.draw(st.integers(0, 2))
        tokens = [100 * which, *data.draw(chains())]  # each process has a tree of its own
        keys = [key.tobytes() for key in prefix_hashes(np.array(tokens, np.int32), page_tokens=1)]
        process = processes[which]
        process.index.stand_clock_at(clock)
        if data.draw(st.booleans()) and len(here[which] | set(keys)) <= 5 * SLOTS:
            process.save(tokens)
            uses.save(keys, here[which])
        else:
            process.use(tokens)
            known = next((i for i, key in enumerate(keys) if key not in here[which]), len(keys))
            uses.use(keys[:known], here[which])
        process.stamp()  # a round of its keeper: what is in the log is used now, at the latest
    again = restart(processes, data.draw(st.randoms()).shuffle, now=clock)
    assert again.order() == uses.order


@settings(max_examples=60)
@given(steps=STEPS, more=STEPS, seed=st.integers(0, 1000))
def test_an_orphan_adopted_later_finds_its_place_among_what_is_resident(
    steps: list[tuple], more: list[tuple], seed: int
) -> None:
    """Its pages may be of chains that are here, as ancestors or as descendants: the ancestor leaves later."""
    dead, living = Process(volumes=2), Process(volumes=2)
    perform(dead, steps)
    perform(living, more)
    living.index.stand_clock_at(NOW + SECOND)
    records = dead.records()
    random.Random(seed).shuffle(records)
    stamp_of = {label[0]: stamp for _, label, stamp in records}
    before = dict(zip(*living_order(living), strict=True))
    for number in range(2):
        mine = [record for record in records if record[0] // SLOTS == number]
        adopt(living.index, living.tier, (2 + number) * SLOTS, mine)
    after = living.order()
    kept = [key for key in after if key in before]
    # Whatever was lifted was lifted as an ancestor; of the rest the order is that before.
    roots = {key for key in kept if not is_ancestor(key, [label for _, label, _ in records])}
    assert [key for key in kept if key in roots] == [key for key in before if key in roots]
    assert set(after) == before.keys() | stamp_of.keys()


def living_order(process: Process) -> tuple[list[bytes], list[int]]:
    slots = process.index.rank_order(process.tier).tolist()
    ids, pinned = process.index.pin_resident(process.tier, None, 1 << 20)
    labels = process.index.labels(ids)
    process.index.unpin_pages(ids)
    key_of = {slot: label[0] for slot, label in zip(pinned.tolist(), labels, strict=True)}
    return [key_of[slot] for slot in slots], slots


def is_ancestor(key: bytes, labels: list[tuple]) -> bool:
    parents = {label[0]: label[1] for label in labels}
    for start in parents:
        at: bytes | None = start
        for _ in range(8):
            at = parents.get(at) if at else None
            if at == key:
                return True
    return False


def test_stamps_from_the_future_count_as_now_and_keep_their_order() -> None:
    process = Process(volumes=1)
    process.index.stand_clock_at(NOW)
    for i in range(4):
        process.save([i])
    process.stamp()
    before = process.records()
    future = [(slot, label, stamp + 300 * 365 * 86400 * SECOND) for slot, label, stamp in before[2:]]
    again = Process(volumes=0)
    again.index.stand_clock_at(NOW)
    adopt(again.index, Tier.SHARED, 0, before[:2] + future)
    again.index.stand_clock_at(NOW + SECOND)
    again.index.add_slots(Tier.SHARED, 100, 4)
    again.save([77])
    fresh = prefix_hashes(np.array([77], np.int32), page_tokens=1)[0].tobytes()
    assert again.order() == [*(label[0] for _, label, _ in before), fresh]


def test_stamps_from_the_future_keep_no_page_above_one_that_is_used_later() -> None:
    """A volume whose clock was wrong is adopted, and then one that was used since by another process."""
    wrong, right = Process(volumes=1), Process(volumes=1)
    for process, clock in ((wrong, NOW), (right, NOW + 2 * SECOND)):
        process.index.stand_clock_at(clock)
        process.save([int(process is right)])
        process.stamp()
    future = [(slot, label, stamp + 365 * 86400 * SECOND) for slot, label, stamp in wrong.records()]
    again = Process(volumes=0)
    again.index.stand_clock_at(NOW + SECOND)
    adopt(again.index, Tier.SHARED, 0, future)
    again.index.stand_clock_at(NOW + 3 * SECOND)
    adopt(again.index, Tier.SHARED, SLOTS, right.records())
    keys = [prefix_hashes(np.array([i], np.int32), page_tokens=1)[0].tobytes() for i in (0, 1)]
    assert again.order() == keys


def test_a_clock_that_goes_back_changes_no_order() -> None:
    process = Process(volumes=1)
    for i, clock in enumerate((NOW, NOW - 3600 * SECOND, 1, NOW + 1, NOW - SECOND)):
        process.index.stand_clock_at(clock)
        process.save([i])
    process.use([2])
    assert process.index.check() == ""
    process.stamp()
    keys = [prefix_hashes(np.array([i], np.int32), page_tokens=1)[0].tobytes() for i in (0, 1, 3, 4, 2)]
    assert restart([process], lambda rows: None, now=NOW).order() == keys


def test_counters_of_an_older_version_rank_below_all_stamps_and_in_their_order() -> None:
    old, new = Process(volumes=1), Process(volumes=1)
    for process, tokens in ((old, range(6)), (new, range(10, 13))):
        process.index.stand_clock_at(NOW)
        for i in tokens:
            process.save([i])
        process.stamp()
    expected = [label[0] for _, label, _ in old.records()]
    old = Process(volumes=1)
    old.index.stand_clock_at(NOW)
    for i in range(6):
        old.save([i])
    old.written = {slot: 1 + slot for slot in range(SLOTS)}
    again = restart([old, new], lambda rows: None)
    assert again.order()[:6] == expected


@pytest.mark.parametrize("pages", [50_000])
def test_many_pages_with_one_stamp_cost_no_more_than_a_sort(pages: int) -> None:
    """Of a volume whose recency was lost, or of hostile ones: all stamps are equal, or lie side by side."""
    keys = np.zeros((pages, 64), np.uint8)
    keys[:, :4] = np.arange(pages, dtype=np.uint32).view(np.uint8).reshape(pages, 4)
    for value in (0, 5, (1 << 62) - 1, (1 << 64) - 1):
        index = Index(1)
        index.add_slots(Tier.DISK, 0, pages)
        none = np.zeros(pages, np.uint8)
        accepted = index.recover(
            Tier.DISK, np.arange(pages, dtype=np.uint32), keys, none + 8, np.zeros_like(keys), none, none + 2,
            np.full(pages, 0xFFFFFFFF, np.uint32), none + 1, np.zeros(pages, np.uint64),
            np.full(pages, value, np.uint64),
        )  # fmt: skip
        assert accepted.all()
        order = index.rank_order(Tier.DISK)
        for slot in itertools.islice(order.tolist(), 0, None, 5000):
            key = keys[slot : slot + 1, :8].copy()
            found = index.match_keys_and_pin(key, 1, tier_mask(Tier.DISK))
            index.release(found.lease)
        assert index.check() == ""


def test_what_overflows_the_list_of_changes_is_written_all_the_same() -> None:
    pages = 20_000
    tokens = np.arange(pages, dtype=np.int32)
    keys = prefix_hashes(tokens, page_tokens=1)
    index = Index(1)
    space = index.open_namespace(None)
    index.add_slots(Tier.SHARED, 0, pages)
    batch = index.claim_absent(space, tokens, keys, 0, pages, tier_mask(Tier.SHARED))
    index.commit_many(batch.pages, Tier.SHARED, batch.numbers[:, Tier.SHARED].copy())
    index.unpin_pages(batch.pages)
    written: dict[int, int] = {}
    for _ in range(3):  # the list holds half of them
        slots, stamps = index.take_stamps(Tier.SHARED, 1000)
        written.update(zip(slots.tolist(), stamps.tolist(), strict=True))
        found = index.match_and_pin(space, tokens, tier_mask(Tier.SHARED))
        index.release(found.lease)
    rounds = 0
    while index.has_stamps(Tier.SHARED):
        slots, stamps = index.take_stamps(Tier.SHARED, 1000)
        assert slots.size <= 1000
        written.update(zip(slots.tolist(), stamps.tolist(), strict=True))
        rounds += 1
    assert len(written) == pages
    order = index.rank_order(Tier.SHARED).tolist()
    assert sorted(order, key=written.__getitem__) == order
    assert len(set(written.values())) == pages
