"""Queue work on a device pool: from any thread, in order, bounded, for one generation.

A batch of pages is a ticket. The pool cuts it into chunks of a compiled shape; its owner takes them
from the head, dispatches them, and a ticket is done when its last chunk is.

    QUEUED --last chunk dispatched--> DISPATCHED --release() of a gather--> RELEASED
    QUEUED | DISPATCHED --pool lost, refused, did not materialise--> FAILED

Nothing here knows JAX: a result is whatever can be waited for and seen as a numpy array.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stepwell.errors import DeviceResetError, StepwellUsageError

Rows = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]


class Result(Protocol):
    """What a dispatched gather gives: a jax.Array of its own, one canonical page an entry."""

    def is_ready(self) -> bool:
        """Return at once whether it has been computed."""
        ...

    def block_until_ready(self) -> object:
        """Wait until it has been computed; raise what its computation raised."""
        ...

    def __array__(self) -> npt.NDArray[np.generic]: ...


class Readiness(Protocol):
    """Answer whether a result is there; tests pass a gate of theirs."""

    def is_ready(self, result: Result) -> bool:
        """Return at once whether wait() would return at once."""
        ...

    def wait(self, result: Result) -> None:
        """Block until the result is there; raise RuntimeError where it never will be."""
        ...


class ResultReadiness:
    """Ask the result itself."""

    def is_ready(self, result: Result) -> bool:
        """Return at once whether wait() would return at once."""
        return result.is_ready()

    def wait(self, result: Result) -> None:
        """Block until the result is there, without the GIL; raise what its computation raised."""
        result.block_until_ready()


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Say that a batch was not taken, and the numbers; nothing was copied, nothing changed."""

    needed_bytes: int
    outstanding_bytes: int
    capacity_bytes: int


class TicketState(Enum):
    """Say where a ticket stands; drawn at the head of this file."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    FAILED = "failed"
    RELEASED = "released"


class Ticket:
    """Follow a batch of pages through the queue. Changed under the queue's lock alone."""

    def __init__(self, queue: WorkQueue, slots: Slots, *, chunks: int, held_bytes: int) -> None:
        self.slots = slots
        self.state = TicketState.QUEUED
        self.error: DeviceResetError | None = None
        self._queue = queue
        self._left_queue = threading.Event()
        self._chunks_left = chunks
        self._held_bytes = held_bytes  # what it counts against the queue's bound

    def fail(self, error: DeviceResetError) -> None:
        """Declare that the batch will never be done; nothing after it is FAILED or RELEASED.

        A chunk of it that is queued is passed over.
        """
        self._queue.fail(self, error)


class ScatterTicket(Ticket):
    """Follow pages on their way into slots.

    DISPATCHED: any computation dispatched later on the pool reads them.
    """


class GatherTicket(Ticket):
    """Follow pages on their way out of slots, and own what they arrive in.

    DISPATCHED: the slots may be overwritten. The result holds device memory until release().
    Threads: one at a time waits, reads and releases; the pool's owner dispatches meanwhile.
    """

    def __init__(self, queue: WorkQueue, slots: Slots, *, chunks: int, held_bytes: int) -> None:
        super().__init__(queue, slots, chunks=chunks, held_bytes=held_bytes)
        self._results: list[tuple[Result, int]] = []
        self._views: list[Rows] = []

    def ready(self) -> bool:
        """Return at once whether wait() would return, or raise, at once."""
        if self.state is TicketState.DISPATCHED:
            return all(self._queue.readiness.is_ready(result) for result, _ in self._results)
        return self.state is not TicketState.QUEUED

    def wait(self) -> None:
        """Block until the pages are there; while the gather is queued, until it is dispatched too.

        Raises: DeviceResetError where the pool was lost first or the pages' computation failed;
        StepwellUsageError after release().
        """
        self._left_queue.wait()
        if self.state is TicketState.DISPATCHED:
            try:
                for result, _ in self._results:
                    self._queue.readiness.wait(result)
            except RuntimeError as cause:  # what JAX raises for a computation that failed
                self.fail(device_error(f"a gather of {len(self.slots)} pages failed", cause))
        if self.error is not None:
            raise self.error
        if self.state is TicketState.RELEASED:
            raise StepwellUsageError("a gather was read after its release")

    def host_views(self) -> list[Rows]:
        """Return the pages as canonical rows, in the order of `slots`; waits as wait() does.

        Returns: read-only uint8[k, page_bytes] arrays, k adding up to n. On CPU they are views of
        the result, which is never donated; elsewhere JAX's copy on the host. Read until release().
        """
        self.wait()
        if not self._views:
            self._views = [_rows_of(np.asarray(result))[:count] for result, count in self._results]
        return self._views

    def release(self) -> None:
        """Drop the result and give its bytes back to the queue's bound; idempotent.

        Raises: StepwellUsageError while queued.
        """
        self._queue.release(self)


AnyTicket = ScatterTicket | GatherTicket


@dataclass(frozen=True, slots=True)
class Chunk:
    """Be a piece of a ticket in a compiled shape."""

    ticket: AnyTicket
    slots: npt.NDArray[np.int32]  # padded to a bucket
    count: int  # real pages among them
    rows: object | None  # of a scatter: the pool's own copy, on the device


@dataclass(frozen=True, slots=True)
class Dispatched:
    """List the tickets whose last chunk one entry or drain dispatched, in queue order."""

    scatters: tuple[ScatterTicket, ...] = ()
    gathers: tuple[GatherTicket, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Count what went through a queue and what it holds; a snapshot."""

    scattered_pages: int
    gathered_pages: int
    queued_chunks: int
    outstanding_bytes: int


class WorkQueue:
    """Hold chunks in the order in which their batches came.

    Invariant: outstanding_bytes is the sum over tickets that are QUEUED, and gathers DISPATCHED and
    not released. A queued chunk is of the current generation.

    Threads: any; head and done from the pool's owner. The lock is held over nothing that waits.
    """

    def __init__(self, *, capacity_bytes: int, page_bytes: int, readiness: Readiness) -> None:
        self.readiness = readiness
        self.generation = 0
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()  # guards all below, and every ticket; a collection under it may release one
        self._chunks: deque[Chunk] = deque()
        self._outstanding_bytes = 0
        self._scattered_pages = 0
        self._gathered_pages = 0
        self._is_closed = False

    def stats(self) -> QueueStats:
        """Return a snapshot of the counters."""
        with self._lock:
            return QueueStats(
                scattered_pages=self._scattered_pages,
                gathered_pages=self._gathered_pages,
                queued_chunks=len(self._chunks),
                outstanding_bytes=self._outstanding_bytes,
            )

    def scatter_ticket(self, slots: Slots, *, chunks: int) -> ScatterTicket | QueueFull:
        """Reserve room for a batch. A batch beyond the whole bound is taken if it is alone."""
        nbytes = len(slots) * self.page_bytes
        return self._reserve(nbytes) or ScatterTicket(self, slots, chunks=chunks, held_bytes=nbytes)

    def gather_ticket(self, slots: Slots, *, chunks: int) -> GatherTicket | QueueFull:
        """Reserve room for a batch, as scatter_ticket."""
        nbytes = len(slots) * self.page_bytes
        return self._reserve(nbytes) or GatherTicket(self, slots, chunks=chunks, held_bytes=nbytes)

    def push(self, chunks: Sequence[Chunk], *, generation: int) -> None:
        """Queue all chunks of one ticket; fail it where the pool was lost since `generation`."""
        with self._lock:
            if generation == self.generation and not self._is_closed:
                self._chunks.extend(chunks)
                return
            now = "closed" if self._is_closed else f"at {self.generation}"
            message = f"work was queued for generation {generation} of the device pool; it is {now}"
            self._fail(chunks[0].ticket, DeviceResetError(message))

    def head(self) -> Chunk | None:
        """Return the next chunk and leave it queued; drop those of tickets that have failed."""
        with self._lock:
            while self._chunks and self._chunks[0].ticket.state is TicketState.FAILED:
                self._chunks.popleft()
            return self._chunks[0] if self._chunks else None

    def done(self, chunk: Chunk, result: Result | None = None) -> bool:
        """Take the dispatched head out; return whether its ticket is DISPATCHED by that."""
        ticket = chunk.ticket
        with self._lock:
            self._chunks.popleft()
            if isinstance(ticket, ScatterTicket):
                self._scattered_pages += chunk.count
            else:
                self._gathered_pages += chunk.count
            if ticket.state is not TicketState.QUEUED:
                return False
            if isinstance(ticket, GatherTicket) and result is not None:
                ticket._results.append((result, chunk.count))
            ticket._chunks_left -= 1
            if ticket._chunks_left:
                return False
            ticket.state = TicketState.DISPATCHED
            if isinstance(ticket, ScatterTicket):
                self._give_back(ticket)
            ticket._left_queue.set()
            return True

    def fail(self, ticket: Ticket, error: DeviceResetError) -> None:
        """Make a ticket FAILED, unless it is that or RELEASED."""
        with self._lock:
            self._fail(ticket, error)

    def release(self, ticket: GatherTicket) -> None:
        """Drop what a ticket holds; see GatherTicket.release."""
        with self._lock:
            if ticket.state is TicketState.QUEUED:
                raise StepwellUsageError("a queued gather has nothing to release; fail() it")
            if ticket.state is TicketState.DISPATCHED:
                ticket.state = TicketState.RELEASED
            ticket._results = []
            ticket._views = []
            self._give_back(ticket)

    def lose(self, message: str) -> None:
        """Begin another generation: fail all that is queued; what is dispatched stays."""
        with self._lock:
            self.generation += 1
            chunks, self._chunks = self._chunks, deque()
            for chunk in chunks:
                if chunk.ticket.state is TicketState.QUEUED:
                    self._fail(chunk.ticket, DeviceResetError(message))

    def close(self) -> None:
        """Fail all that is queued and all that will be."""
        with self._lock:
            self._is_closed = True
        self.lose("the device pool was closed")

    def _reserve(self, nbytes: int) -> QueueFull | None:
        with self._lock:
            outstanding = self._outstanding_bytes
            if outstanding and outstanding + nbytes > self.capacity_bytes:
                return QueueFull(nbytes, outstanding, self.capacity_bytes)
            self._outstanding_bytes += nbytes
        return None

    def _give_back(self, ticket: Ticket) -> None:
        self._outstanding_bytes -= ticket._held_bytes
        ticket._held_bytes = 0

    def _fail(self, ticket: Ticket, error: DeviceResetError) -> None:
        if ticket.state in (TicketState.FAILED, TicketState.RELEASED):
            return
        ticket.state = TicketState.FAILED
        ticket.error = error
        self._give_back(ticket)
        if isinstance(ticket, GatherTicket):
            ticket._results = []
        ticket._left_queue.set()


def device_error(message: str, cause: BaseException) -> DeviceResetError:
    """Return an error to be raised later, with its cause."""
    error = DeviceResetError(f"{message}: {cause}")
    error.__cause__ = cause
    return error


def _rows_of(pages: npt.NDArray[np.generic]) -> Rows:
    return pages.reshape(len(pages), -1).view(np.uint8)
