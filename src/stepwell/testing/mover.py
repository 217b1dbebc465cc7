"""State the contract of a mover as anyone can write one: it copies pages in the background, into memory that is lent.

    submit -> waiting -> copying -> over: each page has LANDED, FAILED or is CANCELLED   (Full: nothing of it is done)

`stepwell.testing.mover_contract` is the suite for it, `pytest --stepwell-mover package.module:make` runs it. Stepwell's
own mover, whose sources are pages of a tier, passes the same suite behind `own_mover.OwnMover`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stepwell.testing.tier import Full

__all__ = ["Copy", "Full", "MakeMover", "Mover", "MoverTransfer", "Outcome", "missing_parts"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One page of a batch: from a source to a row of the memory that is lent. No row is named twice in a batch."""

    source: int
    row: int


class Outcome(Enum):
    """What became of one page of a batch. LANDED: all its bytes are there, and are right."""

    PENDING = "pending"
    LANDED = "landed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class MoverTransfer(Protocol):
    """Observe one batch.

    An outcome that is not PENDING does not change any more; where it is not LANDED, the row may hold anything. Once the
    batch is over nothing lands in the memory that was lent for it: it is the caller's again. Threads: any.
    """

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """What became of each page so far, in the order of the batch."""

    @property
    def layers_done(self) -> int:
        """Leading layers whose bytes are there, and right, for each page that has not failed. It only grows.

        Once a batch is over of which a page has landed it is the number of layers. In a batch by layers it grows
        meanwhile; in one by pages it may.
        """

    def wait(self, timeout: float) -> bool:
        """Wait until the batch is over, at most `timeout` seconds; 0 looks. Returns whether it is.

        A batch whose deadline has passed is over, also where a page is being copied: first see that it does not land.
        """

    def cancel(self) -> None:
        """Begin no page any more; one that is being copied may land still. The batch is over soon."""

    def revoke(self) -> None:
        """End the batch: once this has returned nothing lands, and it is over. Pages not landed are CANCELLED."""


class Mover(Protocol):
    """Copy pages of `layer_bytes` from sources of its own to rows of memory that a caller lends.

    A source is wherever the mover reads from: memory, a file, a device. It keeps a checksum of each page from put() on,
    and compares it with what it has copied: a page that is not what was put has FAILED, and costs no other page.

    Outcomes are values (Full, Outcome). Misuse raises StepwellUsageError and changes nothing: a source that was not
    put, a row that is none, a row that is named twice, any call but close(), poll() and those of a transfer after
    close().

    Threads: any, all methods; put(), spoil() and lose() only while no batch names the source.
    """

    @property
    def layer_bytes(self) -> Sequence[int]:
        """Bytes of each layer of a page; they lie one behind the other."""

    @property
    def sources(self) -> int:
        """Pages that may be put: 24 at least for the suite; it copies up to 16 in a batch."""

    @property
    def most_transfers(self) -> int:
        """Batches that may be under way at once; for the suite, 200 at most."""

    def put(self, source: int, page: bytes) -> None:
        """Have a page be a source, 0 <= source < sources, in place of what was there."""

    def spoil(self, source: int) -> None:
        """Change one bit of a source behind the mover's own back, as damage does. For tests."""

    def lose(self, source: int) -> bool:
        """Have a source be gone, so that reading it fails. For tests. False: that cannot happen to this mover's."""

    def submit(
        self,
        copies: Sequence[Copy],
        *,
        into: npt.NDArray[np.uint8],
        tag: int,
        by_layer: bool = False,
        deadline: float | None = None,
    ) -> MoverTransfer | Full:
        """Copy pages; does not wait.

        Args:
            copies: one at least.
            into: uint8[rows, page bytes], each row contiguous: lent until the batch is over.
            tag: what poll() says when it is over.
            by_layer: the first layer of all pages, then the second.
            deadline: seconds from now, after which nothing lands: pages that have not landed are CANCELLED. 0 has
                passed.

        Returns:
            Full where as many batches are under way as may be: nothing of it is done, and no tag is told.
        """

    def poll(self) -> list[int]:
        """Return the tags of batches that are over and were not told of before, without waiting: each once.

        One that was revoked, or whose deadline has passed, may be told of only when the mover has put it down.
        """

    def close(self, timeout: float) -> bool:
        """Take no batch any more, wait until all are over, at most `timeout` seconds, then cancel the rest.

        Returns:
            Whether all came to their own end in time; False: the rest was cancelled, though what was being copied may
            have landed yet. Either way every batch is over, and told of by poll(). Again: the same answer.
        """


MakeMover = Callable[[Sequence[int]], Mover]


def missing_parts(value: object) -> list[str]:
    """Return the names that a value lacks to be a Mover, sorted."""
    return sorted(name for name in vars(Mover) if not name.startswith("_") and name not in dir(value))
