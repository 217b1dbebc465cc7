"""Use a mover as its contract says, and remember what each row of the memory must be. For `mover_contract`."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepwell.testing.mover import Copy, Full, Mover, MoverTransfer, Outcome

PATIENCE: Final = 60.0
"""Seconds that no machine needs."""
USED: Final = 18
"""Sources that are put from the start."""
_MOST_LOOKS: Final = 1_000_000
_UNTOUCHED: Final = 0x5A
_DEADLINES: Final = (None, None, None, 0.0, 0.0001, 0.005)


@dataclass(slots=True, eq=False)
class Batch:
    """A batch under way. pages: what each of its sources was when it was submitted. bad: those that were spoiled."""

    tag: int
    copies: Sequence[Copy]
    pages: list[bytes]
    transfer: MoverTransfer
    is_over: bool = False
    bad: frozenset[int] = frozenset()

    def has_row(self, row: int) -> bool:
        """Whether the batch has not been finished, and has this row."""
        return not self.is_over and any(copy.row == row for copy in self.copies)


class MoverTrial:
    """A mover, memory to lend it, and what is known of both.

    Invariant: each row of `memory` that no batch under way has is what `kept` says: nobody may write there.
    Threads: any for what is called once a batch; each row is one thread's.
    """

    def __init__(self, mover: Mover, *, rows: int) -> None:
        self.mover = mover
        self.page_bytes = sum(mover.layer_bytes)
        self.memory = np.full((rows, self.page_bytes), _UNTOUCHED, np.uint8)
        self.log: list[str] = []
        self._kept: list[bytes | None] = [self.memory[row].tobytes() for row in range(rows)]
        self._lock = threading.Lock()
        self._tags = 0
        self._accepted: set[int] = set()
        self._told: Counter[int] = Counter()
        self._pages: dict[int, bytes] = {}
        self._versions = 0
        for source in range(USED):
            self.put(source)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def put(self, source: int) -> None:
        """Have a new page be a source."""
        self._versions += 1
        page = np.random.default_rng(self._versions).integers(0, 256, self.page_bytes, np.uint8).tobytes()
        self.mover.put(source, page)
        self._pages[source] = page

    def sixteen(self) -> list[Copy]:
        """Name the first sixteen sources, and as many rows."""
        return [Copy(source, source) for source in range(16)]

    def try_submit(
        self, copies: Sequence[Copy], *, by_layer: bool = False, deadline: float | None = None
    ) -> Batch | Full:
        """Submit a batch; where the mover is full, its rows must stay as they are."""
        with self._lock:
            self._tags += 1
            tag = self._tags
        before = [self._kept[copy.row] for copy in copies]
        for copy in copies:
            self._kept[copy.row] = None
        found = self.mover.submit(copies, into=self.memory, tag=tag, by_layer=by_layer, deadline=deadline)
        if isinstance(found, Full):
            for copy, kept in zip(copies, before, strict=True):
                self._kept[copy.row] = kept
            return found
        with self._lock:
            self._accepted.add(tag)
        return Batch(tag, copies, [self._pages[copy.source] for copy in copies], found)

    def submit(self, copies: Sequence[Copy], *, by_layer: bool = False, deadline: float | None = None) -> Batch:
        """Submit a batch for which there is room, once what was given up has been put down."""
        for _ in range(_MOST_LOOKS):
            found = self.try_submit(copies, by_layer=by_layer, deadline=deadline)
            if not isinstance(found, Full):
                return found
            assert self._accepted - set(self._told), f"it has told of all its batches, and says {found}"
            self.poll()
        raise AssertionError("it is full for ever")

    @staticmethod
    def end(batch: Batch, how: str) -> None:
        """Cancel or revoke a batch; any other way is its own."""
        if how == "cancel":
            batch.transfer.cancel()
        elif how == "revoke":
            batch.transfer.revoke()

    def finish(self, batch: Batch) -> None:
        """Wait until a batch is over, and look at its rows."""
        assert batch.transfer.wait(PATIENCE), f"a batch of {len(batch.copies)} pages is not over after {PATIENCE:g} s"
        self.check(batch)

    def take_back(self, batch: Batch) -> None:
        """Write to the rows of a batch that is over, as whoever lent them may."""
        for copy in batch.copies:
            self.memory[copy.row] = _UNTOUCHED
            self._kept[copy.row] = self.memory[copy.row].tobytes()

    def poll(self) -> None:
        """Take the completions that are there."""
        tags = self.mover.poll()
        with self._lock:
            self._told.update(tags)

    def close(self, timeout: float) -> bool:
        """Close the mover."""
        return self.mover.close(timeout)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Look at the rows of a batch that is over: what has landed is right. From now on nothing may land there."""
        outcomes = batch.transfer.outcomes
        assert len(outcomes) == len(batch.copies), f"{len(outcomes)} outcomes of {len(batch.copies)} pages"
        for copy, page, outcome in zip(batch.copies, batch.pages, outcomes, strict=True):
            row = self.memory[copy.row].tobytes()
            assert outcome is not Outcome.PENDING, f"a batch is over, and its page for row {copy.row} is pending"
            assert outcome is not Outcome.LANDED or row == page, f"row {copy.row} has landed, and is not its source"
            self._kept[copy.row] = row
        batch.is_over = True

    def check_all(self) -> None:
        """See that no row has changed that is not lent."""
        for row, kept in enumerate(self._kept):
            assert kept is None or self.memory[row].tobytes() == kept, f"row {row} changed, and is in no batch"

    def check_layers(self, batch: Batch, done: int) -> None:
        """See that the first layers of each page that has not failed are there."""
        size = sum(self.mover.layer_bytes[:done])
        right = [
            self.memory[copy.row, :size].tobytes() == page[:size]
            for copy, page in zip(batch.copies, batch.pages, strict=True)
        ]
        for copy, is_right, outcome in zip(batch.copies, right, batch.transfer.outcomes, strict=True):
            assert is_right or outcome is Outcome.FAILED, f"{done} layers are done, and row {copy.row} has them not"

    def check_told(self) -> None:
        """See that each batch was told of once. Requires: the mover is closed."""
        self.poll()
        never = sorted(self._accepted - set(self._told))
        assert never == [], f"batches {never} are over, and were not told of"
        assert set(self._told) <= self._accepted, f"{sorted(set(self._told) - self._accepted)}: of no batch"
        often = sorted(tag for tag, count in self._told.items() if count > 1)
        assert often == [], f"batches {often} were told of more than once"

    # ---- random orders ----------------------------------------------------------------------------------------------

    def play(self, chance: random.Random, *, steps: int) -> None:
        """Do calls in a random order; what has ended is looked at, and its rows are taken back."""
        live: list[Batch] = []
        named: list[Batch] = []  # not told of yet: their sources are left alone
        spoiled: set[int] = set()
        ended: set[int] = set()  # were in a batch while they were spoiled: to be put anew
        for _ in range(steps):
            verb = chance.choice(("submit", "submit", "submit", "look", "cancel", "revoke", "finish", "poll", "spoil"))
            self.log.append(verb)
            if verb == "submit":
                rows = [row for row in range(len(self.memory)) if not any(batch.has_row(row) for batch in live)]
                pages = chance.randint(1, 16)
                sources = [source for source in range(USED) if source not in ended]
                if len(rows) < pages or len(sources) < pages:
                    continue
                copies = list(map(Copy, chance.sample(sources, pages), chance.sample(rows, pages)))
                found = self.try_submit(copies, by_layer=chance.random() < 0.5, deadline=chance.choice(_DEADLINES))
                if isinstance(found, Batch):
                    live.append(found)
                    named.append(found)
                    found.bad = frozenset(spoiled & {copy.source for copy in copies})
                    ended |= found.bad
            elif verb == "poll":
                self.poll()
                named = [batch for batch in named if batch.tag not in self._told]
                busy = {copy.source for batch in named for copy in batch.copies}
                for source in sorted(ended - busy):
                    self.put(source)
                    ended.discard(source)
                    spoiled.discard(source)
            elif verb == "spoil":
                busy = {copy.source for batch in named for copy in batch.copies}
                idle = [source for source in range(USED) if source not in busy | spoiled]
                if idle and len(spoiled) < 3:
                    spoiled.add(source := chance.choice(idle))
                    self.mover.spoil(source)
            elif live:
                batch = chance.choice(live)
                self.end(batch, verb)
                if batch.transfer.wait(PATIENCE if verb == "finish" else 0.0):
                    self._settle(batch)
                    live.remove(batch)
            self.check_all()
        for batch in live:
            self.finish(batch)

    def _settle(self, batch: Batch) -> None:
        self.check(batch)
        for copy, outcome in zip(batch.copies, batch.transfer.outcomes, strict=True):
            is_bad = copy.source in batch.bad
            wrong = Outcome.LANDED if is_bad else Outcome.FAILED
            assert outcome is not wrong, f"{'a spoiled' if is_bad else 'a whole'} source: {outcome.name}"
        self.take_back(batch)
