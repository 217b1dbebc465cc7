"""State the contract of a tier as anyone can write one: a place that holds pages of bytes in slots, each under a key.

    claim -> CLAIMED -write, commit-> COMMITTED -free-> free          (abort: CLAIMED -> free)

`stepwell.testing.contract` is the suite for it, `pytest --stepwell-tier package.module:make` runs it. Stepwell's own
tiers, whose bytes move in C++ (`stepwell.tiers.base`), pass the same suite behind `own_tiers.OwnTier`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stepwell import _core

MOST_KEY_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Full:
    """Say that there is no room: a value, not an error. needed, free: pages."""

    needed: int
    free: int


@dataclass(frozen=True, slots=True)
class Record:
    """Describe a committed page. checksum: what commit() was given, or what page_checksum() makes of the page."""

    slot: int
    key: bytes
    checksum: int


def page_checksum(key: bytes, page: bytes) -> int:
    """Return the CRC-32C of a page under its key, 32 bits: the same bytes under another key have another one."""
    return _core.crc32c(page, _core.crc32c(bytes([len(key)]) + key))


class Tier(Protocol):
    """Hold `capacity_pages` pages of `page_bytes` bytes, each in a slot of its own, under a key of its own.

    It has write() and read() of a page's bytes, not addresses: a file, an object of a service, or memory of a device
    has no address in common, and what must hold can be said of bytes.

    Who checks: the caller makes a checksum of key and bytes (`page_checksum`) before they leave, and gives it to
    commit(). The tier keeps it with the page, and compares it in each read() with the bytes that it is about to
    return: a page that was torn, damaged or mixed up is None. The suite compares what it gets once more, with what it
    wrote.

    Outcomes are values (Full, None). Misuse raises StepwellUsageError and changes nothing: a slot that is none or is
    not in the state that a call asks for; a key that is here already, is empty or longer than 64 bytes; a page of
    another length; any call but close() after close(). The world failing raises an OSError (TierIOError is one): the
    slot is what it was before, what was not committed is not published, and the caller calls again or gives the slot
    back. Only the bytes that a failing write() or free() leaves are open; a page that free() has lost so is None.

    Threads: any, all methods. The caller keeps one slot to one thread while it claims, writes or frees it; readers of
    a committed slot may be many, and have ended before it is freed.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of each page."""

    @property
    def capacity_pages(self) -> int:
        """Slots: 8 at least for the suite."""

    @property
    def lasts(self) -> bool:
        """Whether committed pages outlive the process: all that they need lies in the directory they were made in."""

    def claim(self, keys: Sequence[bytes]) -> list[int] | Full:
        """Take a slot for each key, or none at all.

        Returns:
            Slots in the order of the keys, 0 <= slot < capacity_pages, none of which is claimed or committed; Full
            where fewer are free.
        """

    def write(self, slot: int, page: bytes) -> None:
        """Put the page's bytes into a claimed slot. Nobody can read them yet. Again before commit() replaces them."""

    def commit(self, slot: int, checksum: int) -> None:
        """Publish a claimed slot that was written: from now on it can be read, and outlives the process if `lasts`.

        Args:
            checksum: of the key and of the bytes as the caller has them.
        """

    def abort(self, slot: int) -> None:
        """Give a claimed slot back; nothing of it is ever found."""

    def read(self, slot: int) -> bytes | None:
        """Return the bytes of a committed slot, or None where they no longer have their checksum."""

    def free(self, slot: int) -> None:
        """Drop a committed page, and give its slot back, also of one that is None. Then nobody finds it again."""

    def recover(self) -> list[Record]:
        """Return the pages that are committed, in any order: in a new tier those that were found at its place.

        After a crash these are committed ones, whole, and each whose commit() had returned.
        """

    def close(self) -> None:
        """Give everything up: claims, threads, descriptors; what lasts stays. Idempotent."""


class TierAround:
    """What stands before another tier, and passes some of its calls on otherwise. Threads: as the tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    @property
    def page_bytes(self) -> int:
        """The tier's."""
        return self.tier.page_bytes

    @property
    def capacity_pages(self) -> int:
        """The tier's."""
        return self.tier.capacity_pages

    @property
    def lasts(self) -> bool:
        """The tier's."""
        return self.tier.lasts

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()


MakeTier = Callable[[Path], Tier]


def missing_parts(value: object) -> list[str]:
    """Return the names that a value lacks to be a Tier, sorted."""
    return sorted(name for name in _parts() if name not in dir(value))


def _parts() -> list[str]:
    return [name for name in vars(Tier) if not name.startswith("_")]
