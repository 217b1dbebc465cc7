"""Random interleavings of everything sequences do on a pool of JAX, against a model.

Each page on the device is the one that its tokens, namespace and weights say, whatever happened before. The mover is
stepped and the keeper called by hand, so that a seed decides all: a failure is replayed by running its test alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from device_kit import PER_LAYER, STACKED
from sequence_kit import (
    PAGE_BYTES,
    PAGE_TOKENS,
    READ_PAGES,
    StampEngine,
    StepFailedError,
    SteppedJaxStore,
    Tokens,
    Values,
    assert_adds_up,
    assert_all_returned,
    config,
    damage_host,
    flip_bit,
    prompt,
    stamps,
)
from stepwell.errors import StepwellUsageError
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import Tier
from stepwell.sequence import Sequence
from store_kit import Directories

SEEDS = 6
OPERATIONS = 150
NAMESPACES = (None, Namespace(adapter="other"))


@dataclass
class Modelled:
    """What the model knows of one sequence. expected: its pages once it computes, those that were found first."""

    sequence: Sequence
    seed: bytes | None
    tokens: list[int]
    epoch: int  # of the pages that it may find
    turn: int
    is_suspended: bool = False
    is_computing: bool = False
    computed: int = 0
    published: int = 0
    expected: list[Values] = field(default_factory=list)

    def array(self) -> Tokens:
        return np.array(self.tokens, np.int32)


class Machine:
    """Do random operations on a store and its sequences, and say what must hold after each."""

    def __init__(self, store: SteppedJaxStore, seed: int, directories: Directories) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.directories = directories
        self.engine = StampEngine(store)
        self.mover = store.mover
        self.live: list[Modelled] = []
        self.published: set[tuple[int, bytes]] = set()
        self.turn = 0
        self.counts: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        return int(self.store.epoch)

    def stamps(self, tokens: Tokens, seed: bytes | None, epoch: int) -> Values:
        return stamps(tokens, (seed or b"") + epoch.to_bytes(8, "little"))

    def run(self, operations: int) -> None:
        weighted: list[tuple[float, Callable[[], Any]]] = [
            (12, self.open), (8, self.promote), (2, self.give_up), (10, self.extend), (10, self.step),
            (0.5, self.fail_step),
            (10, self.publish), (5, self.append), (3, self.suspend), (6, self.resume), (9, self.close), (6, self.evict),
            (6, self.drain), (4, self.wait), (10, self.move), (3, self.tick), (0.5, self.change_epoch),
            (2, self.damage), (2, self.damage_host), (14, self.serve),
        ]  # fmt: skip
        weights = [weight for weight, _ in weighted]
        for _ in range(operations):
            operation = self.random.choices([op for _, op in weighted], weights)[0]
            self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1
            operation()
            self.check()

    # ---- operations --------------------------------------------------------------------------------------------------

    def pick(self, condition: Callable[[Modelled], bool] = lambda _: True) -> Modelled | None:
        found = [m for m in self.live if condition(m)]
        return self.random.choice(found) if found else None

    def usable(self, m: Modelled) -> bool:
        return not m.is_suspended and not m.sequence.lost

    def open(self) -> None:
        if len(self.live) >= 6:
            return
        length = self.random.randint(1, 30)
        tokens = prompt(self.random.randint(1, 3), length)
        if self.random.random() < 0.3:
            branch = self.random.randint(0, length)
            tokens[branch:] = prompt(self.random.randint(3, 4), length - branch)
        namespace = self.random.choice(NAMESPACES)
        sequence = self.store.open(tokens, namespace=namespace)
        seed = None if namespace is None else namespace.seed()
        self.live.append(Modelled(sequence, seed, tokens.tolist(), self.epoch, self.turn))

    def promote(self) -> None:
        if m := self.pick(self.usable):
            m.sequence.promote()

    def give_up(self) -> None:
        if m := self.pick(lambda m: self.usable(m) and bool(m.sequence.pending or m.sequence.stalled)):
            m.sequence.compute()
            assert m.sequence.pending == 0

    def extend(self, only: Modelled | None = None) -> None:
        chosen = [only] if only else [m for m in self.live if self.usable(m) and self.random.random() < 0.4]
        upto = [self.random.choice((len(m.tokens), self.random.randint(1, len(m.tokens) + 3))) for m in chosen]
        blocked = [
            bool(m.sequence._promotions) and -(-n // PAGE_TOKENS) > m.sequence._page_count
            for m, n in zip(chosen, upto, strict=True)
        ]
        before = [(m.sequence._page_count, m.sequence.ready) for m in chosen]
        if any(blocked):
            with pytest.raises(StepwellUsageError, match="loading"):
                self.store.extend([m.sequence for m in chosen], upto)
            assert before == [(m.sequence._page_count, m.sequence.ready) for m in chosen]
            return
        result = self.store.extend([m.sequence for m in chosen], upto)
        assert (result.full is None) == bool(result.ok.all())
        for m, n, ok, (had, ready) in zip(chosen, upto, result.ok.tolist(), before, strict=True):
            wanted = -(-n // PAGE_TOKENS)
            assert m.sequence._page_count == (max(had, wanted) if ok else had)
            if ok and wanted > had and not m.is_computing:
                m.is_computing = True
                m.computed = ready
                m.published = ready // PAGE_TOKENS
                m.expected = list(self.stamps(m.array()[:ready], m.seed, m.epoch))
                assert sum(m.sequence.reused.values()) == ready

    def step(self) -> None:
        if self.store.device.is_reset:
            return
        plan: dict[Sequence, tuple[int, list[Values]]] = {}
        for m in self.live:
            if not (self.usable(m) and m.is_computing) or self.random.random() < 0.2:
                continue
            most = min(m.sequence._page_count * PAGE_TOKENS, len(m.tokens))
            if m.computed >= most:
                continue
            upto = self.random.choice((most, most, self.random.randint(m.computed + 1, most)))
            first = m.computed // PAGE_TOKENS
            fresh = self.stamps(m.array()[:upto], m.seed, self.epoch)  # with the weights of now
            rest = m.computed % PAGE_TOKENS
            if rest:  # what earlier steps wrote of the page stays
                fresh[first][:, :, :rest] = m.expected[first][:, :, :rest]
            m.expected[first:] = list(fresh[first:])
            m.computed = upto
            plan[m.sequence] = (first, m.expected[first:])
        if not plan:
            return
        slots: list[int] = []
        pages: list[Values] = []
        for sequence, (first, rows) in plan.items():
            slots += self.engine.block(sequence)[first : first + len(rows)].tolist()
            pages += rows
        self.engine.write(slots, pages)
        self.landed()

    def fail_step(self) -> None:
        if self.store.device.is_reset:
            return
        with pytest.raises(StepFailedError):
            self.engine.write([self.engine.scratch], [np.zeros_like(self.stamps(prompt(1, 1), None, 0)[0])], fail=True)
        for m in self.live:
            assert m.sequence.lost != m.is_suspended
        if self.random.random() < 0.7:
            self.store.device.renew()
        self.landed()

    def publish(self) -> None:
        chosen = [m for m in self.live if self.usable(m) and m.is_computing and self.random.random() < 0.7]
        computed = [self.random.choice((m.computed, m.computed, self.random.randint(0, m.computed))) for m in chosen]
        fresh = 0
        for m, tokens in zip(chosen, computed, strict=True):
            pages = tokens // PAGE_TOKENS
            if m.turn == self.turn:
                fresh += max(0, pages - m.published)
                keys = prefix_hashes(m.array(), page_tokens=PAGE_TOKENS, seed=m.seed)
                self.published.update((self.epoch, key.tobytes()) for key in keys[:pages])
            m.published = max(m.published, pages)
        published, duplicates = self.store.publish([m.sequence for m in chosen], computed)
        assert published + duplicates == fresh
        for m in chosen:
            assert m.sequence.ready == m.published * PAGE_TOKENS

    def append(self) -> None:
        chosen = [m for m in self.live if not m.sequence.lost and len(m.tokens) < 60 and self.random.random() < 0.5]
        tokens = [self.random.randint(0, 3) for _ in chosen]
        self.store.append([m.sequence for m in chosen], np.array(tokens, np.int32))
        for m, token in zip(chosen, tokens, strict=True):
            m.tokens.append(token)
            assert np.array_equal(m.sequence.tokens, m.array())

    def suspend(self) -> None:
        if m := self.pick(self.usable):
            m.sequence.suspend()
            m.is_suspended, m.is_computing = True, False

    def resume(self) -> None:
        if m := self.pick(lambda m: not self.usable(m)) or (self.random.random() < 0.1 and self.pick()):
            m.sequence.resume()
            m.is_suspended = m.is_computing = False
            m.epoch, m.turn = self.epoch, self.turn

    def close(self) -> None:
        if m := self.pick():
            self.random.choice((m.sequence.close, m.sequence.abort))()
            self.live.remove(m)

    def serve(self) -> None:
        """Bring one sequence as far as it gets."""
        if m := self.pick(self.usable):
            for _ in range(20):
                self.mover.run_until_idle()
                self.drain()
                m.sequence.promote()
                if not m.sequence.loading or m.sequence.stalled:
                    break
            if self.usable(m):
                self.extend(m)
                self.step()
                self.publish()

    def evict(self) -> None:
        self.store.evict(self.random.choice(list(Tier)), self.random.choice((1, 3, 3, 100)))

    def drain(self) -> None:
        if self.store.device.is_reset:
            self.store.device.renew()
        self.store.device.drain()
        self.landed()

    def wait(self) -> None:
        """Look once: nothing lands while nobody steps the mover."""
        if self.store.device.is_reset:
            return
        chosen = [m.sequence for m in self.live if self.usable(m) and self.random.random() < 0.5]
        settled = self.store.device.wait(chosen, 0.0)
        assert settled == [sequence for sequence in chosen if sequence.settled]
        self.landed()

    def landed(self) -> None:
        """Hand over what was dispatched."""
        while self.store.land():
            pass

    def move(self) -> None:
        for _ in range(self.random.choice((1, 2, 8, 1000))):
            if not self.mover.step():
                break

    def tick(self) -> None:
        self.store.tick()

    def change_epoch(self) -> None:
        epoch = self.random.randint(0, 1)
        self.turn += epoch != self.epoch
        self.store.set_epoch(epoch)

    def damage(self) -> None:
        """Flip a bit of a page that shared memory or disk may hold."""
        if m := self.pick():
            pages = self.stamps(m.array(), m.seed, m.epoch)[: len(m.tokens) // PAGE_TOKENS]
            directory = self.random.choice((self.directories.shared, self.directories.disk))
            if len(pages):
                flip_bit(directory, self.random.choice(pages), must=False)

    def damage_host(self) -> None:
        """Flip a bit of a page that host memory may hold, and that no request has had checked on its way up."""
        m = self.pick()
        if m and not any(sequence._promotions for sequence in self.store._sequences._each_open()):
            for page in self.stamps(m.array(), m.seed, m.epoch)[: len(m.tokens) // PAGE_TOKENS]:
                damage_host(self.store, page, must=False)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for m in self.live:
            assert_adds_up(m.sequence)
            if not self.usable(m):
                assert (m.sequence.ready, m.sequence.loading, m.sequence.pending) == (0, 0, 0)
            elif not m.is_computing:
                assert m.sequence.ready < len(m.tokens)
                keys = prefix_hashes(m.array(), page_tokens=PAGE_TOKENS, seed=m.seed)
                for key in keys[: m.sequence.ready // PAGE_TOKENS]:
                    assert (m.epoch, key.tobytes()) in self.published, "a page is ready that nobody has published"
        self.check_slots()
        if self.random.random() < 0.3:
            assert self.store.check() == ""
        if self.random.random() < 0.15 and not self.store.device.is_reset and (m := self.pick(self.usable)):
            self.verify(m)

    def check_slots(self) -> None:
        """A slot is in two block tables only as one cached page."""
        owners: dict[int, bytes | None] = {}
        for m in filter(self.usable, self.live):
            block = self.engine.block(m.sequence)
            keys = prefix_hashes(m.array(), page_tokens=PAGE_TOKENS, seed=m.seed)
            for page, row in enumerate(m.sequence._block):
                slot = int(row["slot"])
                assert block[page] == slot
                key = keys[page].tobytes() if row["hold"] in (0, 2) else None
                assert slot not in owners or (key is not None and owners[slot] == key), f"slot {slot} has two owners"
                owners[slot] = key

    def verify(self, m: Modelled) -> None:
        """Compare what the device holds for a sequence with what the model says."""
        count = m.computed if m.is_computing else m.sequence.ready
        slots = self.engine.block(m.sequence)[: -(-count // PAGE_TOKENS)].tolist()
        found = self.engine.read(slots)
        expected = m.expected if m.is_computing else list(self.stamps(m.array()[:count], m.seed, m.epoch))
        assert len(slots) <= READ_PAGES
        for page, values in enumerate(found):
            valid = min(PAGE_TOKENS, count - page * PAGE_TOKENS)
            same = np.array_equal(values[:, :, :valid], expected[page][:, :, :valid])
            assert same, f"page {page} of {m.sequence!r} holds wrong bytes"
        self.landed()

    def end(self) -> None:
        """Check every sequence, close all, and see that nothing is held."""
        self.drain()
        for m in filter(self.usable, self.live):
            self.verify(m)
        for m in self.live:
            m.sequence.close()
        self.drain()
        self.mover.run_until_idle()
        self.store.tick()
        assert_all_returned(self.store)
        for index in range(2):  # and what is cached is right still
            sequence = self.store.open(prompt(index + 1, 33))
            m = Modelled(sequence, None, prompt(index + 1, 33).tolist(), self.epoch, self.turn)
            while sequence.loading and not sequence.stalled:
                self.mover.run_until_idle()
                self.drain()
            self.verify(m)
            sequence.close()


@pytest.fixture
def stepped(directories: Directories, seed: int, step_pages: int) -> Iterator[SteppedJaxStore]:
    """A store whose mover has no threads and whose keeper runs when it is told to."""
    below = 0 if seed % 5 == 4 else 1  # a fifth has nothing below host memory
    sizes = config(
        directories, device=16, host=6, shared=below, disk=below, step_bytes=step_pages * PAGE_BYTES,
        axes=(STACKED, PER_LAYER)[seed // 2 % 2],
    )  # fmt: skip
    with SteppedJaxStore(sizes, seed=seed) as store:
        yield store


@pytest.mark.parametrize(("seed", "step_pages"), [(seed, (1, 64)[seed % 2]) for seed in range(SEEDS)])
def test_no_interleaving_serves_a_wrong_page_or_keeps_a_slot(
    stepped: SteppedJaxStore, directories: Directories, seed: int, step_pages: int
) -> None:
    machine = Machine(stepped, seed, directories)
    try:
        machine.run(OPERATIONS)
        machine.end()
    except BaseException as error:
        error.add_note(f"seed {seed}, after {machine.counts}; replay: pytest '{__file__}' -k '[{seed}-{step_pages}]'")
        raise
