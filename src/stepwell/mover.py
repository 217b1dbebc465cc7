"""Carry out transfers: the Python face of the mover, and what a caller sees of a batch of page copies.

The mover itself is C++ (csrc/mover.h): named workers, bounded weighted queues, and continuations as data, so that
nobody has to poll for the state to be right. A `Transfer` only observes; dropping it, or a cancelled await, detaches.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Generator
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import Clock
from stepwell.errors import (
    ChecksumError,
    ForkedError,
    PoisonedError,
    StepwellError,
    StepwellUsageError,
    TierIOError,
)
from stepwell.waker import wait_told

POOL_COLUMN: Final = 0
_MOST_COMPLETIONS: Final = 1 << 20

# What Inbox.poll takes: tags, ok pages, statuses.
Completions = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], npt.NDArray[np.uint8]]

UNUSED: Final = 0
SOURCE: Final = 1
SINK: Final = 2


class WorkClass(IntEnum):
    """What a unit of work is for; loads go before saves, saves before demotions, none starves."""

    LOAD = 0
    SAVE = 1
    DEMOTE = 2


STATUS_REASON: Final = {
    _core.Status.io_error.value: "corrupt",
    _core.Status.checksum.value: "corrupt",
    _core.Status.stale.value: "corrupt",
    _core.Status.bus_fault.value: "corrupt",
    _core.Status.deadline.value: "deadline",
    _core.Status.cancelled.value: "deadline",
    _core.Status.queue_full.value: "full",
    _core.Status.full.value: "full",
    _core.Status.closed.value: "full",
    _core.Status.poisoned.value: "poisoned",
    _core.Status.invalid.value: "corrupt",
    _core.Status.failed.value: "full",
    _core.Status.gone.value: "foreign-gone",
}


class Plan(msgspec.Struct, frozen=True):
    """Say for each page of a batch where it comes from and where it goes.

    Columns are the pool, then host, shared, disk. pages: uint32[n]. roles: uint8[n, 4] of UNUSED, SOURCE, SINK: one
    source; where there is no sink, the page is checked where it is.
    slots: uint32[n, 4]. numbers: uint32[n, 4], claim numbers of tier sinks and of leaving sources.
    """

    pages: npt.NDArray[np.uint32]
    roles: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]

    @classmethod
    def empty(cls, pages: npt.NDArray[np.uint32]) -> Plan:
        """Start a plan for some pages with nothing to do."""
        count = pages.size
        return cls(
            pages=np.ascontiguousarray(pages, dtype=np.uint32),
            roles=np.zeros((count, 4), dtype=np.uint8),
            slots=np.zeros((count, 4), dtype=np.uint32),
            numbers=np.zeros((count, 4), dtype=np.uint32),
        )


class Inbox:
    """Receive the completions of one submitter: pass it to save and load; poll it, or await it in an asyncio loop.

    Invariant: each save or load that is given it and returns a transfer with a tag gets one completion: at once where
    nothing was to move or the load was refused. Its room is taken first, so none is lost. An inbox that is full, or
    closed, refuses what was to move instead of growing; then, and where nothing was to move, the transfer is done, its
    tag is 0, and no completion comes.
    Tags are numbers of one store: give each store an inbox of its own.
    A context manager: close().
    Args: capacity: completions, 1 to 2^20: transfers under way and told, but not polled yet.
    Raises: StepwellUsageError, or StepwellError where no descriptor is left for it.
    Threads: any, and any number of consumers and loops; each completion is delivered once. In a forked child:
        ForkedError.
    """

    __slots__ = ("_core_inbox",)

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= _MOST_COMPLETIONS:
            raise StepwellUsageError(
                f"capacity: {capacity}; give at least 1 and at most {_MOST_COMPLETIONS} completions, as many as "
                "transfers may be under way"
            )
        try:
            self._core_inbox = _core.Inbox(capacity)
        except OSError as error:
            raise StepwellError(
                f"an inbox needs an eventfd: {error}; raise the limit of open files (ulimit -n)"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            if self.closed:
                return "<Inbox: closed>"
            capacity, reserved, ready = self._core_inbox.counts()
        except ForkedError:
            return "<Inbox: of another process>"
        return f"<Inbox: {ready} to poll, {reserved - ready} under way, {capacity - reserved} of {capacity} free>"

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._core_inbox.closed

    def poll(self, most: int = 256) -> Completions:
        """Take up to `most` completions without waiting.

        Returns:
            (tags: uint64[n], as `Transfer.tag`; ok pages: uint32[n], not the leading ones alone; status: uint8[n], 0
            or the first failure's `_core.Status`), of the transfer's pages: a save's are those it stores.
        """
        if most < 1:
            raise StepwellUsageError(f"most: {most}; give at least 1")
        return self._core_inbox.poll(most)

    async def get(self, most: int = 256) -> Completions:
        """Wait in an asyncio loop until there are completions, and take up to `most`.

        Returns:
            As poll(); empty only where the inbox is closed. Cancelled, it has taken none.
        """
        while True:
            found = self.poll(most)
            if found[0].size or self.closed:
                return found
            await wait_told(self._core_inbox)

    async def __aiter__(self) -> AsyncIterator[Completions]:
        """Yield what get() returns, until the inbox is closed."""
        while (found := await self.get())[0].size:
            yield found

    def fileno(self) -> int:
        """Return an eventfd that is readable while completions wait: for select, poll or any event loop.

        Only look whether it is readable: poll() reads it. It is the inbox's, and goes with it.
        """
        return self._core_inbox.fileno()

    def close(self) -> None:
        """Drop what waits, refuse what comes, and end every get() and `async for`. Idempotent."""
        self._core_inbox.close()


def core_inbox(inbox: Inbox | None) -> _core.Inbox | None:
    """Return the core's half. For the store."""
    return None if inbox is None else inbox._core_inbox


class Transfer:
    """Observe a batch of page copies: `wait()` in a thread, `await transfer` in an asyncio loop, or an `Inbox`.

    Invariant: what the batch decides does not depend on whether anyone observes it.
    Threads: any, and any number of them, of loops and of awaits. Dropping the object detaches; it never waits. In a
        forked child: ForkedError, unless nothing was to move.
    """

    __slots__ = ("_clock", "_core_transfer", "_deadline_at", "_pages")

    def __init__(
        self,
        core_transfer: _core.Transfer | None,
        clock: Clock,
        *,
        pages: int,
        deadline_at: float | None = None,
    ) -> None:
        self._core_transfer = core_transfer
        self._clock = clock
        self._deadline_at = deadline_at
        self._pages = pages

    def __repr__(self) -> str:
        core = self._core_transfer
        try:
            statuses, is_over = self.status, core is None or core.decided
        except ForkedError:
            return f"<Transfer {self.tag}: {self._pages} pages, of another process>"
        arrived = int((statuses == _core.Status.ok.value).sum())
        text = f"<Transfer {self.tag}: {arrived} of {self._pages} pages ok, {'done' if is_over else 'under way'}"
        failed = statuses[~np.isin(statuses, (_core.Status.ok.value, _core.Status.pending.value))]
        return f"{text}, {_core.Status(int(failed[0])).name}>" if failed.size else f"{text}>"

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until done in an asyncio loop, and return the transfer itself; failed pages are values, as in wait().

        A deadline holds as in wait(): no byte lands after the await has returned. No thread waits, and nothing is
        polled: the mover wakes the loop through a descriptor that the loop has only while someone in it awaits.
        Cancelling the await only detaches: bytes go on landing, in pool slots that are still lent. Call revoke() before
        the slots are given to another.

        Raises:
            StepwellUsageError: no asyncio loop runs here, or one without add_reader. StepwellError: no descriptor is
                left for it.
        """
        core = self._core_transfer
        while core is not None and not self.done:
            left = None if self._deadline_at is None else max(0.0, self._deadline_at - self._clock.monotonic())
            yield from wait_told(core, left).__await__()
        return self

    @property
    def pages(self) -> int:
        """Pages in the batch."""
        return self._pages

    @property
    def tag(self) -> int:
        """The number under which an inbox reports this transfer; 0 where none does: it is done already.

        That is one that was refused, or had nothing to move, and was given no inbox, or one without room.
        """
        return 0 if self._core_transfer is None else self._core_transfer.tag

    @property
    def done(self) -> bool:
        """Whether every page is decided, or the deadline has decided the rest."""
        self.enforce_deadline()
        return self._core_transfer is None or self._core_transfer.decided

    @property
    def source_released(self) -> bool:
        """Whether the caller's memory will not be touched any more."""
        return self._core_transfer is None or self._core_transfer.source_released

    @property
    def layers_done(self) -> int:
        """Layers that have landed, verified, for every page that did not fail. Never waits."""
        return 0 if self._core_transfer is None else self._core_transfer.layers_done

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """Per page a `_core.Status` value, uint8[pages]; pending (1) where undecided."""
        if self._core_transfer is None:
            return np.zeros(0, dtype=np.uint8)
        return self._core_transfer.page_status()

    def landed(self, column: int) -> npt.NDArray[np.bool_]:
        """Per page whether it arrived in one sink, or was found right there: 0 the pool, else a Tier; bool[pages]."""
        if self._core_transfer is None:
            return np.zeros(0, dtype=np.bool_)
        bits: npt.NDArray[np.bool_] = (self._core_transfer.landed() >> column) & 1 == 1
        return bits

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Per page whether it arrived, verified, bool[pages]. A load's target is undefined where False."""
        arrived: npt.NDArray[np.bool_] = self.status == _core.Status.ok.value
        return arrived

    @property
    def ok_pages(self) -> int:
        """Length of the leading run of pages that arrived: the usable prefix of a load."""
        ok = self.ok
        return int(ok.size if ok.all() else ok.argmin())

    @property
    def bytes_moved(self) -> int:
        """Payload bytes copied so far."""
        return 0 if self._core_transfer is None else self._core_transfer.bytes_moved

    @property
    def seconds(self) -> float:
        """Seconds from submit to done; 0 before."""
        return 0.0 if self._core_transfer is None else self._core_transfer.seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done.

        Args:
            timeout: seconds, None for no limit but the transfer's own deadline; 0 or less looks without waiting.

        Returns:
            True when done: every page is decided. After a deadline has passed no byte can land in the caller's memory.

        Raises:
            StepwellUsageError: timeout is no number.
        """
        if timeout is not None and math.isnan(timeout):
            raise StepwellUsageError("timeout: nan would never pass; give seconds, or None to wait until done")
        core = self._core_transfer
        if core is None:
            return True
        limit = timeout
        if self._deadline_at is not None:
            left = max(0.0, self._deadline_at - self._clock.monotonic())
            limit = left if limit is None else min(limit, left)
        if core.wait_decided(limit):
            return True
        self.enforce_deadline()
        return core.decided  # it may have ended since

    def enforce_deadline(self) -> None:
        """Close the gate if the deadline has passed: then no byte can land any more."""
        core = self._core_transfer
        if core is None or self._deadline_at is None or core.decided:
            return
        if self._clock.monotonic() >= self._deadline_at:
            core.close_gate()

    def cancel(self) -> None:
        """Stop what has not started; what is being copied finishes. Everything claimed is returned either way."""
        if self._core_transfer is not None:
            self._core_transfer.cancel()

    def revoke(self) -> None:
        """Give up at once: when this returns no byte can land in the caller's memory. Pages not landed are misses."""
        if self._core_transfer is not None:
            self._core_transfer.close_gate()

    def result(self, timeout: float | None = None) -> int:
        """Wait, and return the usable prefix in pages; raise what went wrong if it is shorter than the batch.

        Raises:
            TimeoutError: not done in time. ChecksumError, TierIOError, PoisonedError, StepwellError: of the first bad
                page.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"transfer of {self._pages} pages not done within {timeout} s")
        usable = self.ok_pages
        if usable == self._pages:
            return usable
        status = _core.Status(int(self.status[usable]))
        message = f"page {usable} of {self._pages}: {status.name}"
        if status in (_core.Status.checksum, _core.Status.stale):
            raise ChecksumError(message)
        if status in (_core.Status.io_error, _core.Status.bus_fault):
            raise TierIOError(message)
        if status is _core.Status.poisoned:
            raise PoisonedError(message)
        raise StepwellError(message)


def core_transfer(transfer: Transfer) -> _core.Transfer | None:
    """Return the core's half, None where nothing was to move. For the store."""
    return transfer._core_transfer


class SaveOutcome(IntEnum):
    """What became of one key of save_keys: written by this call, here already, not written, or on its way by another
    call still: nobody knows yet."""

    STORED = 0
    PRESENT = 1
    REFUSED = 2
    PENDING = 3


class SaveResult(msgspec.Struct, frozen=True):
    """What became of a save, in pages; saved + present + pending + refused = whole pages of the tokens.

    saved: claimed by this call, their bytes under way. present: here already. pending: another caller is bringing them.
    refused: no room (`full` says where and how much). transfer: of the saved pages alone: done when they are resident
    in every tier they go to, or have failed (`transfer.ok`); at once where there are none, whatever is refused, or
    pending: those are the other caller's to wait for. The source may be written to again once
    `transfer.source_released`.
    """

    saved: int
    present: int
    pending: int
    refused: int
    transfer: Transfer
    full: Full | None = None


class Full(msgspec.Struct, frozen=True):
    """Say why there was no room: a value, not an error.

    tier: its name. needed: pages that found no slot. free, evictable, leaving: pages at that moment. pinned: pages that
    lookups and transfers hold. held: those whose last lasting copy a pin() keeps.
    why: where it is out of service or read-only, what for, or why it has no volume; then the numbers are not what
    keeps pages out.
    """

    tier: str
    needed: int
    free: int
    evictable: int
    leaving: int
    pinned: int
    held: int
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.tier} tier takes no pages: {self.why}; {self.needed} pages were refused"
        return (
            f"{self.tier} tier full: need {self.needed} pages, {self.free} free, {self.evictable} evictable, "
            f"{self.pinned} pinned by lookups and transfers, {self.held} kept by pin(), {self.leaving} leaving"
        )
