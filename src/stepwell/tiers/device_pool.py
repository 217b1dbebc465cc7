"""Own the pool of a device tier: a value with one owner, changed only inside steps; what its arrays are is left open.

The pool is a linear value. The engine's step donates it, so a store that reads it in the background
breaks (JAX 0.10.2: 137 of 142 gathers raised), and a stale handle does not always raise in JAX (not
without donation, not while a numpy view lives): it reads old bytes. Hence nothing here touches the
arrays except between entry and exit of a step, on the owner's thread, and each handle carries a
version of our own that is checked at each use.

    OPEN --step()--> STEPPING --exit, arrays exchanged--> OPEN
                     STEPPING --the block raised, or left arrays deleted or misshapen--> RESET
    RESET --renew()--> OPEN     (a generation later: work queued for the lost pool is failed)
    OPEN, RESET --close()--> CLOSED

Work is queued as tickets, from any thread, and dispatched in that order at the entry of the next
step or in drain():

    scatter   host rows -> padded copy of our own -> device -> slots   rows are free on return
    gather    slots -> arrays of our own, never donated -> host        slots are, once dispatched

A gather's result is in canonical page order: a row of it is a page as every lower tier stores it.

Batches are padded to buckets so that nothing recompiles. Padding reads and writes one hidden slot,
number `pages`, that no index knows: the arrays have pages + 1 slots. An engine may aim masked
writes of its own there.

How many arrays there are, and of which shapes, is the engine's choice (`arrangement.py`: one a stream,
one a layer, ...). They are one value all the same: lent, donated, checked and lost together, written
by one program and read by one, and a page's bytes are the same for each choice.

Which library the arrays are of is what a subclass says: JAX in `tiers/device.py`, numpy in tests.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from stepwell.arrangement import STACKED, Arrangement, Part
from stepwell.errors import (
    BudgetError,
    DeviceResetError,
    GeometryError,
    StalePoolError,
    StepwellUsageError,
    StoreClosedError,
)
from stepwell.geometry import PageGeometry
from stepwell.tiers.device_queue import (
    Chunk,
    Dispatched,
    GatherTicket,
    QueueFull,
    Readiness,
    Result,
    ResultReadiness,
    Rows,
    ScatterTicket,
    Slots,
    WorkQueue,
    device_error,
)

A = TypeVar("A")
"""An array of the pool: of a JAX pool a jax.Array."""

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_STEP_BYTES = 64 << 20
DEFAULT_OUTSTANDING_BYTES = 256 << 20
# Larger buckets are left out: above 32 MiB malloc maps fresh memory each time, and the faults cost
# more than the copy (a gather on CPU of 16 MiB 10 GB/s, of 64 MiB 0.7 GB/s).
MAX_CHUNK_BYTES = 16 << 20

_CLOSED = "the device pool was closed, with its store: open another one with PageStore(config)"
# JAX aliases host memory that is aligned to this, and copies it once more where it is not.
_HOST_ALIGNMENT = 64
_NO_MEMORY = (RuntimeError, MemoryError)
"""What a device without memory raises, or one that an earlier step has failed on: JAX the first, numpy the second."""


# ---- steps ---------------------------------------------------------------------------------------


class StepHandle(Generic[A]):
    """Lend the pool's arrays to one step; dead when the step ends."""

    __slots__ = ("_arrays", "_pool", "_version", "dispatched")

    def __init__(
        self, pool: LinearPool[A], version: int, arrays: tuple[A, ...], dispatched: Dispatched
    ) -> None:
        self._pool = pool
        self._version = version
        self._arrays = arrays
        self.dispatched = dispatched

    @property
    def arrays(self) -> tuple[A, ...]:
        """Return or exchange the arrays, as many as the pool has `shapes` and of those.

        Raises: StalePoolError once the step has ended.
        """
        self._check()
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Sequence[A]) -> None:
        self._check()
        self._arrays = tuple(arrays)

    def _check(self) -> None:
        if self._version != self._pool.version:
            raise StalePoolError(
                f"this handle is of version {self._version}, the pool is at {self._pool.version}: "
                "use the handle of the running step"
            )

    def _end(self) -> tuple[A, ...]:
        arrays, self._arrays = self._arrays, ()
        return arrays


@dataclass(frozen=True, slots=True)
class DevicePoolStats:
    """Count what a pool did and holds; a snapshot."""

    generation: int
    steps: int  # steps and drains that ended well
    resets: int
    scattered_pages: int
    gathered_pages: int
    queued_chunks: int
    outstanding_bytes: int
    copied_pools: int  # donations not honoured: somebody holds a view of the pool's arrays


class _PoolState(Enum):
    OPEN = "open"
    STEPPING = "stepping"
    RESET = "reset"
    CLOSED = "closed"


class LinearPool(ABC, Generic[A]):
    """Own the arrays of the device tier and the queue of work on them; knows slots, not keys.

    Invariant: outside a step the pool holds the only reference to its arrays.
    Requires: a slot that a queued gather names keeps its page until the gather is dispatched, and a
    slot that a queued scatter names is given to nobody else.

    Threads: queue_scatter, queue_gather, stats, close and tickets from any. step, drain, warm and
    renew from the owner: the first that used one of them; one that has ended can be followed.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        pages: int,
        *,
        storage_dtype: np.dtype[np.generic],
        axes: str = STACKED,
        arrays: Sequence[A] | None = None,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        max_step_bytes: int = DEFAULT_STEP_BYTES,
        max_outstanding_bytes: int = DEFAULT_OUTSTANDING_BYTES,
        readiness: Readiness | None = None,
    ) -> None:
        """Allocate the arrays, or take the engine's.

        Args:
            geometry: what a page is.
            pages: slots an index may use; the arrays have one more.
            storage_dtype: what the arrays keep.
            axes: of each array, out of layer, stream, slot, token, head and dim; what is not named
                of layer and stream is what the arrays stand for. See arrangement.py.
            arrays: the engine's own, of `shapes` and `storage_dtype`; zeros where None.
            buckets: page counts to compile for, ascending; those above max_step_bytes or
                MAX_CHUNK_BYTES are left out.
            max_step_bytes: what one entry or drain dispatches; at least one chunk.
            max_outstanding_bytes: of scatters not dispatched and gathers not released, together.
            readiness: who is asked whether a result is there; the result itself where None.

        Raises: GeometryError where axes or arrays do not fit; StepwellUsageError; BudgetError where
        the device has no memory for them.
        """
        if pages < 1 or not buckets or buckets[0] < 1 or sorted(set(buckets)) != list(buckets):
            raise StepwellUsageError(
                f"need pages >= 1 and ascending buckets >= 1, got {pages} and {tuple(buckets)}"
            )
        self.geometry = geometry
        self.arrangement = Arrangement.of(geometry, axes)
        self.pages = pages
        self.shapes = self.arrangement.shapes(pages + 1)
        self.storage_dtype = storage_dtype
        self.page_bytes = geometry.page_bytes
        self._row_shape = _row_shape(self.arrangement, geometry)
        most = min(MAX_CHUNK_BYTES, max_step_bytes)
        fitting = tuple(bucket for bucket in buckets if bucket * self.page_bytes <= most)
        self.buckets = fitting or (buckets[0],)
        self._max_step_bytes = max_step_bytes
        self._scatter, self._gather = self._programs()

        self._queue = WorkQueue(
            capacity_bytes=max_outstanding_bytes,
            page_bytes=self.page_bytes,
            readiness=readiness or ResultReadiness(),
        )
        self._lock = threading.Lock()  # guards the five below
        self._arrays: tuple[A, ...] | None = self._adopt(arrays)
        self._owner: threading.Thread | None = None
        self._state = _PoolState.OPEN
        self._version = 0
        self._resets = 0
        self._steps = 0  # the owner's alone, as the next
        self._copied_pools = 0

    # ---- what a library of arrays says of itself ---------------------------------------------------

    @abstractmethod
    def _programs(self) -> tuple[Callable[..., tuple[A, ...]], Callable[..., Result]]:
        """Return the two programs on all arrays at once.

        scatter(arrays, slots, rows): donate the arrays, and return them with rows in slots; a slot named twice gets
        any one of its rows. gather(arrays, slots): return a result of its own, canonical pages in the order of slots.
        """

    @abstractmethod
    def _zeros(self) -> tuple[A, ...]:
        """Make the arrays, of `shapes`. Raises RuntimeError or MemoryError where there is no memory for them."""

    @abstractmethod
    def _put(self, rows: npt.NDArray[np.generic]) -> object:
        """Start bringing rows, [bucket, *_row_shape], to the device. Nobody else refers to their memory."""

    @abstractmethod
    def _is_deleted(self, array: A) -> bool:
        """Return whether the array was donated."""

    @abstractmethod
    def _misfit(self, array: object, part: Part, shape: tuple[int, ...]) -> str | None:
        """Say why an array cannot be that part of this pool; None where it can."""

    def _start_copy(self, result: Result) -> None:
        """Start bringing a gather's result to the host."""

    # ---- what it says of the pool --------------------------------------------------------------------

    @property
    def scratch_slot(self) -> int:
        """Return the hidden slot: padding and masked writes go there, nothing reads it back."""
        return self.pages

    @property
    def generation(self) -> int:
        """Return a number that changes when the content is lost; work is queued for one of them."""
        return self._queue.generation

    @property
    def version(self) -> int:
        """Return a number that changes at each entry and exit; handles of another are stale."""
        return self._version

    @property
    def is_reset(self) -> bool:
        """Return whether the pool was lost and waits for renew()."""
        return self._state is _PoolState.RESET

    def stats(self) -> DevicePoolStats:
        """Return a snapshot of the counters; any thread."""
        queue = self._queue.stats()
        return DevicePoolStats(
            generation=self.generation,
            steps=self._steps,
            resets=self._resets,
            scattered_pages=queue.scattered_pages,
            gathered_pages=queue.gathered_pages,
            queued_chunks=queue.queued_chunks,
            outstanding_bytes=queue.outstanding_bytes,
            copied_pools=self._copied_pools,
        )

    # ---- queueing, from any thread ---------------------------------------------------------------

    def queue_scatter(
        self,
        slots: npt.NDArray[np.integer],
        source: Rows,
        *,
        rows: npt.NDArray[np.integer] | None = None,
        generation: int,
    ) -> ScatterTicket | QueueFull:
        """Copy host rows to the device and queue their way into slots.

        Args:
            slots: int64[n], distinct, below `pages`.
            source: uint8[m, >= page_bytes], a canonical page a row, such as a host slab.
            rows: int64[n], which rows of source; its first n where None.
            generation: of the pool, read when the slots were claimed.

        Returns: a ticket, or QueueFull. The ticket is FAILED from the start where the pool was lost
        since, or the device has no memory for the copy. A batch beyond the whole bound is taken
        when nothing else is outstanding. In any case the rows may be repainted at once.
        Raises: GeometryError, StepwellUsageError; nothing is queued then.
        Cost: one copy of the pages on this thread, without the GIL.
        """
        slots = self._check_slots(slots, distinct=True)
        rows = self._check_rows(source, rows, count=len(slots))
        spans = self._spans(len(slots))
        ticket = self._queue.scatter_ticket(slots, chunks=len(spans))
        if isinstance(ticket, QueueFull):
            return ticket
        try:
            chunks = [
                Chunk(
                    ticket=ticket,
                    slots=self._pad(slots[first:last], bucket),
                    count=last - first,
                    rows=self._stage(source, rows[first:last], bucket),
                )
                for first, last, bucket in spans
            ]
        except _NO_MEMORY as cause:  # for the copy
            ticket.fail(device_error(f"{len(slots)} pages could not be staged", cause))
            return ticket
        self._queue.push(chunks, generation=generation)
        return ticket

    def queue_gather(
        self, slots: npt.NDArray[np.integer], *, generation: int
    ) -> GatherTicket | QueueFull:
        """Queue a read of slots, as they are when it is dispatched.

        Args:
            slots: int64[n], below `pages`.
            generation: of the pool, read when the slots were claimed.

        Returns: a ticket, FAILED from the start where the pool was lost since; or QueueFull, as
        queue_scatter. Its bytes count until release().
        Raises: StepwellUsageError; nothing is queued then.
        """
        slots = self._check_slots(slots, distinct=False)
        spans = self._spans(len(slots))
        ticket = self._queue.gather_ticket(slots, chunks=len(spans))
        if isinstance(ticket, QueueFull):
            return ticket
        chunks = [
            Chunk(ticket, self._pad(slots[first:last], bucket), last - first, None)
            for first, last, bucket in spans
        ]
        self._queue.push(chunks, generation=generation)
        return ticket

    # ---- steps, on the owner's thread ------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[StepHandle[A]]:
        """Dispatch queued work, then lend the arrays to the engine until the block ends.

        The block may donate `handle.arrays` and must leave arrays of the same shape, dtype and
        sharding there. Where it raises, or leaves others, the pool is reset: queued tickets fail,
        dispatched results stay. `handle.dispatched` lists the tickets this entry finished.

        Raises: StalePoolError inside another step; DeviceResetError while the pool is lost, and on
        exit where what the block left is unusable; StepwellUsageError on another thread.
        """
        handle = self._enter()
        try:
            yield handle
        except BaseException as cause:
            self._reset(f"the step raised {type(cause).__name__}: {cause}")
            raise
        self._leave(handle)

    def drain(self) -> Dispatched:
        """Do the store's half of a step alone, within the bound of one step.

        Returns: what was dispatched; call again while stats().queued_chunks says there is more.
        Raises: as step().
        """
        with self.step() as handle:
            return handle.dispatched

    def warm(self) -> None:
        """Compile for every bucket, touching the hidden slot alone, so that no step waits for it.

        Raises: as step().
        """
        source = np.empty((0, self.page_bytes), np.uint8)
        none = np.empty(0, np.int64)
        with self.step() as handle:
            for bucket in self.buckets:
                slots = self._pad(none, bucket)
                rows = self._stage(source, none, bucket)
                handle.arrays = self._scatter(handle.arrays, slots, rows)
                self._gather(handle.arrays, slots).block_until_ready()

    def renew(self, arrays: Sequence[A] | None = None) -> None:
        """Put other arrays in place of those that were lost: the engine's, or zeros.

        Raises: StepwellUsageError where the pool is not reset; GeometryError; BudgetError where the
        device has no memory for zeros: the pool stays reset then.
        """
        self.check_owner()
        if not self.is_reset:
            raise StepwellUsageError(
                f"only a reset pool is renewed; this one is {self._state.value}"
            )
        fresh = self._adopt(arrays)
        with self._lock:
            if not self.is_reset:  # another thread has closed it meanwhile
                raise StoreClosedError(_CLOSED)
            self._arrays = fresh
            self._state = _PoolState.OPEN

    def close(self) -> None:
        """Fail what is queued and drop the arrays; results already dispatched stay. Idempotent.

        Threads: any.
        Raises: StepwellUsageError inside a step.
        """
        with self._lock:
            if self._state is _PoolState.STEPPING:
                raise StepwellUsageError("the device pool cannot be closed inside a step")
            self._state = _PoolState.CLOSED
            self._arrays = None
        self._queue.close()

    # ---- the inside of a step --------------------------------------------------------------------

    def check_owner(self) -> None:
        """Raise StepwellUsageError unless this thread owns the pool; the first that asks does."""
        current = threading.current_thread()
        with self._lock:
            if self._owner is None or not self._owner.is_alive():
                self._owner = current
            owner = self._owner
        if owner is not current:
            raise StepwellUsageError(
                f"the device pool belongs to thread {owner.name!r}; {current.name!r} may queue "
                "work, but only the owner may step, drain or renew"
            )

    def _enter(self) -> StepHandle[A]:
        self.check_owner()
        with self._lock:
            if self._state is _PoolState.STEPPING:
                raise StalePoolError(
                    "the pool is lent to a step that has not ended, and steps do not nest: leave its `with` block "
                    "before step(), drain(), wait() or warm()"
                )
            if self._state is _PoolState.RESET:
                raise DeviceResetError("the device pool was lost in a failed step; call renew()")
            arrays, self._arrays = self._arrays, None
            if arrays is None:
                raise StoreClosedError(_CLOSED)
            self._state = _PoolState.STEPPING
            self._version += 1
        handle = StepHandle(self, self._version, arrays, Dispatched())
        del arrays  # the handle's is the only reference while work is dispatched
        try:
            self._dispatch(handle)
        except BaseException as cause:
            self._reset(f"dispatching queued work raised {type(cause).__name__}: {cause}")
            if isinstance(cause, _NO_MEMORY):
                raise device_error("the device pool was lost dispatching work", cause) from cause
            raise
        return handle

    def _dispatch(self, handle: StepHandle[A]) -> None:
        """Dispatch queued chunks in order, up to the bound of a step."""
        scatters: list[ScatterTicket] = []
        gathers: list[GatherTicket] = []
        used_bytes = 0
        while (chunk := self._queue.head()) is not None:
            nbytes = len(chunk.slots) * self.page_bytes
            if used_bytes and used_bytes + nbytes > self._max_step_bytes:
                break
            used_bytes += nbytes
            # It leaves the queue once it is dispatched: one that raises is failed with the rest.
            if isinstance(chunk.ticket, ScatterTicket):
                self._dispatch_scatter(handle, chunk)
                if self._queue.done(chunk):
                    scatters.append(chunk.ticket)
            elif self._dispatch_gather(handle, chunk):
                gathers.append(chunk.ticket)
        handle.dispatched = Dispatched(tuple(scatters), tuple(gathers))

    def _dispatch_scatter(self, handle: StepHandle[A], chunk: Chunk) -> None:
        before = handle.arrays
        handle.arrays = self._scatter(before, chunk.slots, chunk.rows)
        self._copied_pools += not all(map(self._is_deleted, before))

    def _dispatch_gather(self, handle: StepHandle[A], chunk: Chunk) -> bool:
        """Dispatch one chunk; return whether its ticket is done. A refusal fails that alone."""
        try:
            result = self._gather(handle.arrays, chunk.slots)
        except _NO_MEMORY as cause:  # for the result; the pool is not donated
            pages = len(chunk.ticket.slots)
            chunk.ticket.fail(device_error(f"a gather of {pages} pages was refused", cause))
            return False
        self._start_copy(result)
        return self._queue.done(chunk, result)

    def _leave(self, handle: StepHandle[A]) -> None:
        arrays = handle._end()
        problem = self._problem(arrays)
        if problem is not None:
            self._reset(problem)
            raise DeviceResetError(f"the device pool was lost: {problem}; call renew()")
        self._steps += 1
        with self._lock:
            self._arrays = arrays
            self._state = _PoolState.OPEN
            self._version += 1

    def _reset(self, reason: str) -> None:
        """Drop the arrays and fail what is queued; dispatched results stay."""
        with self._lock:
            self._arrays = None
            self._state = _PoolState.RESET
            self._version += 1
            self._resets += 1
        self._queue.lose(f"the device pool was lost: {reason}")

    def _problem(self, arrays: Sequence[object]) -> str | None:
        """Say why arrays cannot be this pool's, None where they can."""
        parts = self.arrangement.parts
        if len(arrays) != len(parts):
            axes = " ".join(self.arrangement.axes)
            return f"{len(arrays)} arrays, axes {axes!r} of this geometry take {len(parts)}"
        seen: dict[int, Part] = {}
        for array, part, shape in zip(arrays, parts, self.shapes, strict=True):
            problem = self._misfit(array, part, shape)
            if problem is not None:
                return problem
            if id(array) in seen:  # as [zeros] * layers: it cannot be donated twice
                return f"{seen[id(array)]} and {part} are one array"
            seen[id(array)] = part
        return None

    def _adopt(self, arrays: Sequence[A] | None) -> tuple[A, ...]:
        if arrays is None:
            try:
                return self._zeros()
            except _NO_MEMORY as cause:
                raise BudgetError(
                    f"device: {self.pages} pages and the scratch slot of {self.page_bytes} bytes each cannot be had, "
                    f"lower device.pages: {cause}"
                ) from cause
        problem = self._problem(arrays)
        if problem is not None:
            raise GeometryError(f"these arrays cannot be the device pool: {problem}")
        return tuple(arrays)

    # ---- chunks ----------------------------------------------------------------------------------

    def _check_slots(self, slots: npt.NDArray[np.integer], *, distinct: bool) -> Slots:
        checked = np.array(slots, dtype=np.int64, ndmin=1)
        if checked.ndim != 1 or not len(checked):
            raise StepwellUsageError(f"need slots int64[n], n >= 1, got shape {np.shape(slots)}")
        if checked.min() < 0 or checked.max() >= self.pages:
            raise StepwellUsageError(
                f"slots reach from {checked.min()} to {checked.max()}, the pool has {self.pages}"
            )
        if distinct and len(np.unique(checked)) != len(checked):
            raise StepwellUsageError("a scatter names a slot twice")
        return checked

    def _check_rows(
        self, source: Rows, rows: npt.NDArray[np.integer] | None, *, count: int
    ) -> npt.NDArray[np.int64]:
        if source.ndim != 2 or source.dtype != np.uint8 or source.shape[1] < self.page_bytes:
            raise GeometryError(
                f"need uint8[m, >= {self.page_bytes}], got {source.dtype}{list(source.shape)}"
            )
        checked = np.arange(count) if rows is None else np.asarray(rows, dtype=np.int64)
        if checked.shape != (count,) or checked.min() < 0 or checked.max() >= len(source):
            raise StepwellUsageError(
                f"{count} slots need {count} rows of the {len(source)} of the source, got {checked}"
            )
        return checked

    def _spans(self, count: int) -> list[tuple[int, int, int]]:
        """Cut a batch into (first, last, bucket): largest buckets while they fill, then a rest."""
        largest = self.buckets[-1]
        return [
            (first, last, next(bucket for bucket in self.buckets if bucket >= last - first))
            for first in range(0, count, largest)
            for last in [min(first + largest, count)]
        ]

    def _pad(self, slots: Slots, bucket: int) -> npt.NDArray[np.int32]:
        padded = np.full(bucket, self.scratch_slot, np.int32)
        padded[: len(slots)] = slots
        return padded

    def _stage(self, source: Rows, rows: npt.NDArray[np.int64], bucket: int) -> object:
        """Copy rows, padded with zeros, into memory that nobody else refers to, and to the device."""
        nbytes = bucket * self.page_bytes
        memory = np.empty(nbytes + _HOST_ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % _HOST_ALIGNMENT
        own = memory[skip : skip + nbytes].reshape(bucket, self.page_bytes)
        count = len(rows)
        own[count:] = 0
        if source.shape[1] == self.page_bytes and source.flags.c_contiguous:
            np.take(source, rows, axis=0, out=own[:count], mode="clip")  # checked; "raise" buffers
        else:
            own[:count] = source[rows, : self.page_bytes]
        values = own.view(self.storage_dtype).reshape(bucket, *self._row_shape)
        return self._put(values)


def _row_shape(arrangement: Arrangement, geometry: PageGeometry) -> tuple[int, ...]:
    """Return the shape of a canonical page on the device: flat where its layers differ."""
    if not arrangement.is_even:
        return (geometry.page_bytes // geometry.itemsize,)
    return (geometry.layers, geometry.streams, geometry.page_tokens, *geometry.head_dims[0])
