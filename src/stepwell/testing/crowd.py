"""Let threads loose on a tier: writers and readers of pages whose bytes are known, each held to what it may see."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from stepwell.errors import StepwellUsageError
from stepwell.testing.tier import Full, Tier
from stepwell.testing.trial import Page, assert_bytes

LONG_SECONDS: Final = 120.0
_SWITCH_SECONDS: Final = 1e-5
_LOOK_SECONDS: Final = 0.1


def run_together(jobs: Sequence[Callable[[threading.Event], None]], *, what: str) -> None:
    """Run each job on a thread of its own, all begun at once, switched often.

    Args:
        jobs: each is given an event; once it is set, because another has failed, it ends.

    Raises:
        What the first of them raised; AssertionError where one has not ended after two minutes.
    """
    barrier = threading.Barrier(len(jobs))
    errors: list[BaseException] = []
    over = threading.Event()

    def run(job: Callable[[threading.Event], None]) -> None:
        try:
            barrier.wait()
            job(over)
        except BaseException as error:  # noqa: BLE001 whatever it is, it is raised where the test sees it
            errors.append(error)
            over.set()

    # Daemons: one that hangs is told below, and must not keep the process.
    threads = [threading.Thread(target=run, args=(job,), name=f"{what}-{n}", daemon=True) for n, job in enumerate(jobs)]
    with _often_switched():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_SECONDS)
    over.set()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"{what}: a call has not returned for {LONG_SECONDS:g} s"


@contextmanager
def _often_switched() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Crowd:
    """Threads that put, read and free pages of one tier.

    Invariant: what is in `_served` is committed, and is freed only while nobody reads it; the tier is called without a
    lock of this class.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Condition()
        self._held: set[int] = set()
        self._served: dict[int, tuple[Page, int]] = {}  # by slot: the page, and how many read it

    def write(self, writer: int, rounds: int, over: threading.Event) -> None:
        """Put pages of one's own, and free one's oldest where the tier is full; at the end all of them."""
        dice = random.Random(writer)
        mine: list[int] = []
        for number in range(rounds):
            if over.is_set():
                return
            page = Page(writer * 100_000 + number, self._tier.page_bytes)
            slots = self._tier.claim([page.key])
            if isinstance(slots, Full):
                if mine:
                    self._free(mine.pop(0), over)
                continue
            [slot] = slots
            with self._lock:
                assert slot not in self._held, f"slot {slot} was given to two threads"
                self._held.add(slot)
            self._tier.write(slot, page.data)
            if dice.random() < 0.2:
                with self._lock:
                    self._held.remove(slot)
                self._tier.abort(slot)
                continue
            self._tier.commit(slot, page.checksum)
            assert_bytes(self._tier.read(slot), page)
            with self._lock:
                self._served[slot] = (page, 0)
            mine.append(slot)
        for slot in mine:
            self._free(slot, over)

    def read(self, reader: int, rounds: int, over: threading.Event) -> None:
        """Read pages of everybody."""
        dice = random.Random(-reader)
        for _ in range(rounds):
            if over.is_set():
                return
            with self._lock:
                if not self._served:
                    continue
                slot = dice.choice(list(self._served))
                page, readers = self._served[slot]
                self._served[slot] = (page, readers + 1)
            try:
                assert_bytes(self._tier.read(slot), page)
            finally:
                with self._lock:
                    page, readers = self._served[slot]
                    self._served[slot] = (page, readers - 1)
                    self._lock.notify_all()

    def _free(self, slot: int, over: threading.Event) -> None:
        with self._lock:
            while self._served[slot][1] > 0:
                self._lock.wait(_LOOK_SECONDS)
                if over.is_set():
                    return
            del self._served[slot]
            self._held.remove(slot)
        self._tier.free(slot)


def claim_all(tier: Tier, name: str, slots: list[int], over: threading.Event) -> None:
    """Claim one slot after the other until the tier is full."""
    while not over.is_set():
        claimed = tier.claim([f"{name} {len(slots)}".encode()])
        if isinstance(claimed, Full):
            return
        slots += claimed
        assert len(slots) <= tier.capacity_pages, f"one thread was given {len(slots)} slots of {tier.capacity_pages}"


def read_until_committed(
    tier: Tier, slot: int, page: Page, is_being_committed: threading.Event, over: threading.Event
) -> None:
    """Read a slot that another thread writes and commits, until the page is there; before, it is refused."""
    while not over.is_set():
        try:
            found = tier.read(slot)
        except StepwellUsageError:
            continue
        assert is_being_committed.is_set(), "a slot that is not committed was read"
        assert_bytes(found, page)
        return


def claim_one(tier: Tier, key: bytes, slots: list[int], _: threading.Event) -> None:
    """Claim one key that others claim too: one has it, the others are refused."""
    try:
        claimed = tier.claim([key])
    except StepwellUsageError:
        return
    assert not isinstance(claimed, Full), f"{claimed} in an empty tier"
    slots += claimed


def abort_all(tier: Tier, slots: list[int], _: threading.Event) -> None:
    """Give claims back."""
    for slot in slots:
        tier.abort(slot)


def write_and_commit(
    tier: Tier, slot: int, page: Page, is_being_committed: threading.Event, _: threading.Event
) -> None:
    """Publish a page that others try to read meanwhile."""
    tier.write(slot, page.data)
    is_being_committed.set()
    tier.commit(slot, page.checksum)
