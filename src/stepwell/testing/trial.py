"""Carry out a trial of a tier: pages whose bytes follow from numbers, a tier at a place, and what it must have now."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from stepwell.errors import StepwellUsageError
from stepwell.testing.place import Place
from stepwell.testing.tier import Full, MakeTier, Record, Tier, TierAround, missing_parts, page_checksum

_T = TypeVar("_T")
_MOST_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a number, in its nth version: its key follows from the number, its bytes from both."""

    number: int
    page_bytes: int
    version: int = 0

    @property
    def key(self) -> bytes:
        """Its key."""
        return f"key {self.number}".encode()

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return _bytes_of(self.number, self.version, self.page_bytes)

    @property
    def checksum(self) -> int:
        """What is given to commit()."""
        return page_checksum(self.key, self.data)


@lru_cache(maxsize=256)
def _bytes_of(number: int, version: int, count: int) -> bytes:
    return random.Random(f"{number} {version}").randbytes(count)


class PatientTier(TierAround):
    """Call another tier again where it fails: for suites over tiers that fail at random. Threads: as the tier."""

    def claim(self, keys: Sequence[bytes]) -> list[int] | Full:
        """Claim until it does not fail."""
        return _patiently(lambda: self.tier.claim(keys))

    def write(self, slot: int, page: bytes) -> None:
        """Write until it does not fail."""
        _patiently(lambda: self.tier.write(slot, page))

    def commit(self, slot: int, checksum: int) -> None:
        """Commit until it does not fail."""
        _patiently(lambda: self.tier.commit(slot, checksum))

    def abort(self, slot: int) -> None:
        """Abort until it does not fail."""
        _patiently(lambda: self.tier.abort(slot))

    def read(self, slot: int) -> bytes | None:
        """Read until it does not fail."""
        return _patiently(lambda: self.tier.read(slot))

    def free(self, slot: int) -> None:
        """Free until it does not fail."""
        _patiently(lambda: self.tier.free(slot))

    def recover(self) -> list[Record]:
        """Recover until it does not fail."""
        return _patiently(self.tier.recover)


def _patiently(call: Callable[[], _T]) -> _T:
    for _ in range(_MOST_TRIES):
        try:
            return call()
        except OSError as error:
            last = error
    raise AssertionError(f"it failed {_MOST_TRIES} times in a row") from last


class Trial:
    """A tier at a place, and the pages that it must have: `pages`, by slot.

    Invariant: put(), drop() and the like keep `pages`; assert_whole() holds the tier against it.
    """

    def __init__(self, place: Place, make: MakeTier, *, is_patient: bool = False) -> None:
        self.place = place
        self.pages: dict[int, Page] = {}
        self._make = make
        self._is_patient = is_patient
        self.tier = self._made()

    def _made(self) -> Tier:
        tier = self._make(self.place.directory)
        missing = missing_parts(tier)
        if missing:
            raise StepwellUsageError(
                f"make() returned {tier!r}, which is not a Tier: it has no {', '.join(missing)}; "
                "see stepwell.testing.tier.Tier"
            )
        return PatientTier(tier) if self._is_patient else tier

    def page(self, number: int, version: int = 0) -> Page:
        """Return a page of this tier's size."""
        return Page(number, self.tier.page_bytes, version)

    def claim(self, page: Page) -> int:
        """Claim a slot for a page, which must be had."""
        slots = self.tier.claim([page.key])
        assert not isinstance(slots, Full), (
            f"{slots}, where {self.tier.capacity_pages - len(self.pages)} slots are free"
        )
        assert len(slots) == 1, f"claim of one key returned {slots}"
        assert slots[0] not in self.pages, f"slot {slots[0]} was given twice"
        return slots[0]

    def put(self, number: int, version: int = 0) -> int:
        """Claim, write and commit a page. Returns its slot."""
        page = self.page(number, version)
        slot = self.claim(page)
        self.tier.write(slot, page.data)
        self.tier.commit(slot, page.checksum)
        self.pages[slot] = page
        return slot

    def fill(self, first: int, version: int = 0) -> None:
        """Put pages until the tier is full, which it must be at its capacity."""
        for number in range(first, first + self.tier.capacity_pages - len(self.pages)):
            self.put(number, version)

    def drop(self, slot: int) -> None:
        """Free a committed page."""
        self.tier.free(slot)
        del self.pages[slot]

    def assert_whole(self) -> None:
        """Check that just these pages are here, that each is right, and that all other slots can be claimed."""
        self.assert_pages()
        room = self.tier.capacity_pages - len(self.pages)
        spare = [f"spare {number}".encode() for number in range(room + 1)]
        slots = self.tier.claim(spare[:room])
        assert not isinstance(slots, Full), f"{slots}, where {room} slots must be free: a slot was not given back"
        assert sorted({*slots, *self.pages}) == list(range(self.tier.capacity_pages)), (
            f"slots {sorted(slots)} for {room} keys beside {sorted(self.pages)}: each of "
            f"{self.tier.capacity_pages} slots once"
        )
        full = self.tier.claim(spare[room:])
        assert full == Full(needed=1, free=0), f"claim of one more page in a full tier: {full}"
        for slot in slots:
            self.tier.abort(slot)

    def assert_pages(self) -> None:
        """Check that just these pages are here, and that each is right."""
        wanted = {(slot, page.key, page.checksum) for slot, page in self.pages.items()}
        found = {(record.slot, record.key, record.checksum) for record in self.tier.recover()}
        assert found == wanted, (
            f"recover() lacks {sorted(wanted - found)}, and should not have {sorted(found - wanted)}"
        )
        for slot, page in self.pages.items():
            assert_bytes(self.tier.read(slot), page)

    def reopen(self, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Close the tier, do something to its files, and make it again at its place."""
        self.tier.close()
        meanwhile()
        self.tier = self._made()
        self.adopt()

    def crash(self, kept: Path | None = None) -> None:
        """Make the tier again on what was in its files at this instant, or then: as after a kill of the process."""
        kept = kept or self.place.keep()
        self.tier.close()
        self.place.go_back(kept)
        self.tier = self._made()
        self.adopt()

    def adopt(self) -> None:
        """Learn by their keys in which slots the pages are now: a restart may move them."""
        if not self.pages:
            return
        at = {record.key: record.slot for record in self.tier.recover()}
        self.pages = {at.get(page.key, slot): page for slot, page in self.pages.items()}

    @contextmanager
    def refused(self, what: str) -> Iterator[None]:
        """Check that a block raises StepwellUsageError. That nothing changed is assert_whole()'s to see."""
        message = None
        try:
            yield
        except StepwellUsageError as error:
            message = str(error)
        assert message is not None, f"{what}: no StepwellUsageError"
        assert message, f"{what}: a StepwellUsageError that says nothing"


class Story:
    """A few pages that come and go, for a crash in the middle of it.

    kept: what keep() found in the directory. sure_then: what was committed then, by key. under_way_then: what was just
    being committed or freed.
    """

    def __init__(self, trial: Trial) -> None:
        self.kept: Path | None = None
        self.sure_then: dict[bytes, Page] = {}
        self.under_way_then: Page | None = None
        self._sure: dict[bytes, Page] = {}
        self._under_way: Page | None = None
        self._trial = trial

    def keep(self) -> None:
        """Keep what a crash at this instant would leave."""
        self.kept = self._trial.place.keep()
        self.sure_then = dict(self._sure)
        self.under_way_then = self._under_way

    def tell(self) -> None:
        """Put pages, give one up, drop some, put one of their keys again; at the end one of two is left."""
        first = self._put(1)
        second = self._put(2)
        given_up = self._trial.page(3)
        slot = self._trial.claim(given_up)
        self._trial.tier.write(slot, given_up.data)
        self._trial.tier.abort(slot)
        self._drop(first, 1)
        self._put(1, version=1)
        self._drop(second, 2)

    def _put(self, number: int, version: int = 0) -> int:
        page = self._trial.page(number, version)
        slot = self._trial.claim(page)
        self._trial.tier.write(slot, page.data)
        self._under_way = page
        self._trial.tier.commit(slot, page.checksum)
        self._sure[page.key] = page
        self._under_way = None
        return slot

    def _drop(self, slot: int, number: int) -> None:
        self._under_way = self._sure.pop(self._trial.page(number).key)
        self._trial.tier.free(slot)
        self._under_way = None


def assert_bytes(found: bytes | None, page: Page) -> None:
    """Check that what was read is this page."""
    assert found is not None, f"{page.key!r} is not served: its bytes are not what was written"
    assert len(found) == page.page_bytes, f"{page.key!r}: {len(found)} of {page.page_bytes} bytes were read"
    if found != page.data:
        wrong = [at for at, (left, right) in enumerate(zip(found, page.data, strict=True)) if left != right]
        raise AssertionError(
            f"{page.key!r}: wrong bytes were read, {len(wrong)} of {page.page_bytes}, the first at {wrong[0]}"
        )
