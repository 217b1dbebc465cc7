"""The device pool: linear, ordered, and right whatever the engine does between two steps."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from device_kit import ARRANGEMENTS, BY_LAYER, PER_LAYER, STACKED, Arrays, cut, join, read_slots, write_slots
from stepwell import _core
from stepwell.errors import (
    DeviceResetError,
    GeometryError,
    StalePoolError,
    StepwellUsageError,
    StoreClosedError,
    TokenError,
)
from stepwell.geometry import PageGeometry
from stepwell.hashing import as_tokens
from stepwell.pool import core_pool, lend_canonical
from stepwell.testing.numpy_device import NumpyArray, NumpyPool
from stepwell.tiers.device import DevicePool
from stepwell.tiers.device_queue import (
    GatherTicket,
    QueueFull,
    Result,
    ResultReadiness,
    ScatterTicket,
    TicketState,
)


def geometry(dtype: str = "float32", **changes: int) -> PageGeometry:
    sizes = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_tokens": 4, **changes}
    return PageGeometry(model="stamps", revision="1", dtype=dtype, **sizes)


def uneven(dtype: str = "float32") -> PageGeometry:
    """Layers of 256, 512 and 128 bytes a page in float32."""
    return PageGeometry(
        model="stamps", revision="1", layers=3, kv_heads=2, head_dim=8, dtype=dtype, page_tokens=2,
        layer_head_dims=((2, 8), (2, 16), (1, 8)),
    )  # fmt: skip


def named(case: tuple[Callable[..., object], ...]) -> str:
    return ", ".join(getattr(part, "__name__", part) for part in case)


AnyPool = DevicePool | NumpyPool
CASES = [*((geometry, axes) for axes in ARRANGEMENTS), *((uneven, axes) for axes in BY_LAYER)]


def painted(pool: AnyPool, stamps: list[int]) -> np.ndarray:
    """Return one page of bytes for each stamp; every byte depends on the stamp and its place."""
    return np.stack(
        [
            np.random.default_rng(stamp).integers(0, 256, pool.page_bytes, dtype=np.uint8)
            for stamp in stamps
        ]
    )


def scattered(pool: AnyPool, slots: list[int], pages: np.ndarray) -> ScatterTicket:
    ticket = pool.queue_scatter(np.array(slots), pages, generation=pool.generation)
    assert isinstance(ticket, ScatterTicket)
    return ticket


def gathered(pool: AnyPool, slots: list[int]) -> GatherTicket:
    ticket = pool.queue_gather(np.array(slots), generation=pool.generation)
    assert isinstance(ticket, GatherTicket)
    return ticket


def pages_of(ticket: GatherTicket) -> np.ndarray:
    return np.concatenate(ticket.host_views())


def slot_axis(pool: AnyPool) -> int:
    return pool.arrangement.axes.index("slot")


def values_of(pool: AnyPool, pages: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return what each array of the pool holds of some pages."""
    return cut(pool.geometry, " ".join(pool.arrangement.axes), pages, pool.storage_dtype)


def engine_write(pool: AnyPool, arrays: Arrays, slot: int, page: np.ndarray) -> Arrays:
    """Donate the pool and write one canonical page, as an engine's step does."""
    if isinstance(pool, NumpyPool):
        return pool.write(arrays, [slot], page[None])
    return write_slots(arrays, np.array([slot]), values_of(pool, page[None]), slot_axis(pool))


def engine_read(pool: AnyPool, arrays: Arrays, slot: int) -> np.ndarray:
    """Return one canonical page."""
    if isinstance(pool, NumpyPool):
        return pool.read(arrays, [slot])[0]
    found = [np.asarray(array) for array in read_slots(arrays, np.array([slot]), slot_axis(pool))]
    return join(pool.geometry, " ".join(pool.arrangement.axes), found)[0]


def cropped(array: jax.Array | NumpyArray) -> jax.Array | NumpyArray:
    """Return an array that is too short."""
    return NumpyArray(array.values[1:]) if isinstance(array, NumpyArray) else array[1:]


class Gate(ResultReadiness):
    """Hold results back until the test opens the gate; nobody may wait at a closed one."""

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.is_open = True

    def is_ready(self, result: Result) -> bool:
        return self.is_open or id(result) in self.opened

    def wait(self, result: Result) -> None:
        assert self.is_ready(result), "waited for a result that is not ready"
        super().wait(result)


# ---- the schedule --------------------------------------------------------------------------------


@dataclass
class Queued:
    ticket: ScatterTicket
    slots: list[int]
    stamps: list[int]  # of a scatter


@dataclass
class Landing:
    ticket: GatherTicket
    stamps: list[int]  # what the slots held when the gather was dispatched


@dataclass
class Schedule:
    """Drive a pool at random beside a dict that says what each slot holds."""

    pool: AnyPool
    gate: Gate
    random: np.random.Generator
    content: dict[int, int] = field(default_factory=dict)  # slot -> stamp; absent = zeros
    queue: list[Queued] = field(default_factory=list)
    landing: list[Landing] = field(default_factory=list)
    stamps: int = 0
    checked: int = 0
    seen_full: int = 0

    def expected(self, stamps: list[int]) -> np.ndarray:
        pages = painted(self.pool, stamps)
        pages[np.array(stamps) == 0] = 0
        return pages

    def pick(self) -> list[int]:
        count = int(self.random.integers(1, 12))
        return [int(slot) for slot in self.random.permutation(self.pool.pages)[:count]]

    def outstanding(self) -> int:
        pages = sum(len(queued.slots) for queued in self.queue)
        return (pages + sum(len(landing.stamps) for landing in self.landing)) * self.pool.page_bytes

    def accept(
        self, result: ScatterTicket | QueueFull, slots: list[int], stamps: list[int]
    ) -> None:
        if isinstance(result, QueueFull):
            assert result.outstanding_bytes == self.outstanding()
            assert result.outstanding_bytes + result.needed_bytes > result.capacity_bytes
            self.seen_full += 1
        else:
            self.queue.append(Queued(result, slots, stamps))

    def scatter(self) -> None:
        slots = self.pick()
        stamps = [self.stamps + 1 + i for i in range(len(slots))]
        self.stamps += len(slots)
        slab = self.random.integers(0, 256, (20, self.pool.page_bytes + 32), dtype=np.uint8)
        rows = self.random.permutation(20)[: len(slots)]
        slab[rows, : self.pool.page_bytes] = painted(self.pool, stamps)
        result = self.pool.queue_scatter(
            np.array(slots), slab, rows=rows, generation=self.pool.generation
        )
        slab[:] = 0xEE  # released by the return: repainting must change nothing
        self.accept(result, slots, stamps)

    def gather(self) -> None:
        slots = self.pick()
        result = self.pool.queue_gather(np.array(slots), generation=self.pool.generation)
        if isinstance(result, GatherTicket):
            assert not result.ready()
        self.accept(result, slots, [])

    def settle(self, dispatched: tuple[ScatterTicket, ...]) -> None:
        """Follow what an entry dispatched, in queue order."""
        for ticket in dispatched:
            queued = self.queue.pop(0)
            assert queued.ticket is ticket
            if isinstance(ticket, GatherTicket):
                now = [self.content.get(slot, 0) for slot in queued.slots]
                self.landing.append(Landing(ticket, now))
            else:
                self.content.update(zip(queued.slots, queued.stamps, strict=True))

    def in_order(self, scatters: tuple[ScatterTicket, ...], gathers: tuple[GatherTicket, ...]):
        done = {id(ticket) for ticket in (*scatters, *gathers)}
        return tuple(queued.ticket for queued in self.queue if id(queued.ticket) in done)

    def step(self) -> None:
        with self.pool.step() as handle:
            done = handle.dispatched
            self.settle(self.in_order(done.scatters, done.gathers))
            busy = {slot for queued in self.queue for slot in queued.slots}
            for slot in (slot for slot in self.pick() if slot not in busy):
                self.stamps += 1
                page = painted(self.pool, [self.stamps])[0]
                handle.arrays = engine_write(self.pool, handle.arrays, slot, page)
                self.content[slot] = self.stamps
        with pytest.raises(StalePoolError):
            _ = handle.arrays

    def drain(self) -> None:
        done = self.pool.drain()
        self.settle(self.in_order(done.scatters, done.gathers))

    def lose(self, how: int) -> None:
        """Lose the pool in one of the ways an engine can."""
        page = painted(self.pool, [1])[0]
        with self.pool.step() as handle:
            done = handle.dispatched
            self.settle(self.in_order(done.scatters, done.gathers))
            if how == 0:
                engine_write(self.pool, handle.arrays, 0, page)
                raise ZeroDivisionError
            if how == 1:
                engine_write(self.pool, handle.arrays, 0, page)  # donated, not exchanged
            else:
                handle.arrays = (*handle.arrays[:-1], cropped(handle.arrays[-1]))

    def fail(self) -> None:
        before = self.pool.generation
        how = int(self.random.integers(3))
        with pytest.raises(DeviceResetError if how else ZeroDivisionError):
            self.lose(how)
        for queued in self.queue:
            assert queued.ticket.state is TicketState.FAILED
            assert isinstance(queued.ticket.error, DeviceResetError)
        self.queue.clear()
        self.content.clear()
        with pytest.raises(DeviceResetError), self.pool.step():
            pass
        self.pool.renew()
        assert self.pool.generation != before

    def land(self, *, everything: bool = False) -> None:
        """Open the gate for some of the results, in any order; each holds what it held then."""
        for index in self.random.permutation(len(self.landing)):
            landing = self.landing[index]
            if everything or self.random.random() < 0.5:
                assert not landing.ticket.ready()
                self.gate.opened |= {id(result) for result, _ in landing.ticket._results}
                assert landing.ticket.ready()
                np.testing.assert_array_equal(
                    pages_of(landing.ticket), self.expected(landing.stamps)
                )
                landing.ticket.release()
                self.gate.opened.clear()
                self.checked += 1
        self.landing = [
            landing for landing in self.landing if landing.ticket.state is not TicketState.RELEASED
        ]


@pytest.mark.parametrize("kind", [DevicePool, NumpyPool])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        (geometry(), STACKED),
        (geometry("bfloat16"), STACKED),
        (geometry(), PER_LAYER),
        (geometry("bfloat16"), "head slot token dim"),
        (uneven("bfloat16"), PER_LAYER),
        (uneven(), "slot token head stream dim"),
    ],
)
def test_every_gathered_page_carries_the_stamp_it_had_at_dispatch(
    shape: PageGeometry, axes: str, seed: int, kind: type[AnyPool]
) -> None:
    gate = Gate()
    pool = kind(
        shape,
        24,
        axes=axes,
        buckets=(1, 2, 4),
        max_step_bytes=(6 if seed % 2 else 60) * shape.page_bytes,
        max_outstanding_bytes=70 * shape.page_bytes,
        readiness=gate,
    )
    gate.is_open = False
    schedule = Schedule(pool, gate, np.random.default_rng(seed))
    moves = [schedule.scatter, schedule.gather, schedule.step, schedule.drain, schedule.land]
    for _ in range(250):
        index = schedule.random.choice(6, p=[0.2, 0.25, 0.25, 0.1, 0.17, 0.03])
        (schedule.fail if index == 5 else moves[index])()
        stats = pool.stats()
        assert stats.outstanding_bytes == schedule.outstanding()
        assert stats.copied_pools == 0
    while pool.stats().queued_chunks:
        schedule.drain()
    schedule.land(everything=True)
    assert not schedule.queue
    assert schedule.checked > 20
    assert pool.stats().outstanding_bytes == 0
    assert pool.stats().resets > 0
    gate.is_open = True
    everything = gathered(pool, list(range(pool.pages)))
    while everything.state is TicketState.QUEUED:
        pool.drain()
    np.testing.assert_array_equal(
        pages_of(everything),
        schedule.expected([schedule.content.get(slot, 0) for slot in range(pool.pages)]),
    )


# ---- order and linearity -------------------------------------------------------------------------


SHAPES = [(geometry, STACKED), (geometry, PER_LAYER), (uneven, "head slot token dim")]


@pytest.fixture(params=[(kind, *shape) for kind in (DevicePool, NumpyPool) for shape in SHAPES], ids=named)
def pool(request: pytest.FixtureRequest) -> Iterator[AnyPool]:
    kind, make, axes = request.param
    pool = kind(make(), 32, axes=axes)
    yield pool
    pool.close()


@pytest.fixture(params=SHAPES, ids=named)
def jax_pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    make, axes = request.param
    pool = DevicePool(make(), 32, axes=axes)
    yield pool
    pool.close()


def test_work_is_dispatched_in_the_order_it_was_queued(pool: AnyPool) -> None:
    old, new = painted(pool, [1]), painted(pool, [2])
    first = scattered(pool, [3], old)
    before = gathered(pool, [3])
    second = scattered(pool, [3], new)
    after = gathered(pool, [3])
    done = pool.drain()
    assert done.scatters == (first, second)
    assert done.gathers == (before, after)
    np.testing.assert_array_equal(pages_of(before), old)
    np.testing.assert_array_equal(pages_of(after), new)


def test_a_gather_outlives_any_number_of_donations(pool: AnyPool) -> None:
    """In the background, on a pool that steps donate, 137 of 142 gathers raised."""
    tickets = []
    scattered(pool, [0], painted(pool, [1000]))
    for stamp in range(100):
        tickets.append(gathered(pool, [0]))
        with pool.step() as handle:
            handle.arrays = engine_write(pool, handle.arrays, 0, painted(pool, [stamp])[0])
    for number, ticket in enumerate(tickets):
        expected = painted(pool, [number - 1 if number else 1000])
        np.testing.assert_array_equal(pages_of(ticket), expected)


def test_views_of_a_result_do_not_make_donation_copy(pool: AnyPool) -> None:
    held = gathered(pool, [0, 1])
    pool.drain()
    views = held.host_views()
    for _ in range(3):
        scattered(pool, [0], painted(pool, [1]))
        pool.drain()
    assert pool.stats().copied_pools == 0
    assert not np.concatenate(views).any()


def test_padding_leaves_no_stray_host_memory_in_the_hidden_slot(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 0xEE, dtype))
        scattered(pool, [0, 1, 2], painted(pool, [1, 2, 3]))
    with pool.step() as handle:
        assert not engine_read(pool, handle.arrays, pool.scratch_slot).any()


def test_a_view_of_the_pool_itself_is_counted_as_a_copied_pool(jax_pool: DevicePool) -> None:
    with jax_pool.step() as handle:
        view = np.asarray(handle.arrays[-1])
    scattered(jax_pool, [0], painted(jax_pool, [1]))
    check = gathered(jax_pool, [0])
    jax_pool.drain()
    assert jax_pool.stats().copied_pools == 1
    np.testing.assert_array_equal(pages_of(check), painted(jax_pool, [1]))
    assert not view.any()
    del view
    gc.collect()
    scattered(jax_pool, [0], painted(jax_pool, [2]))
    jax_pool.drain()
    assert jax_pool.stats().copied_pools == 1


def test_a_handle_is_stale_after_its_step_and_in_the_next(pool: AnyPool) -> None:
    with pool.step() as first:
        kept = first.arrays
    with pytest.raises(StalePoolError, match="handle of the running step"):
        _ = first.arrays
    with pool.step() as second:
        with pytest.raises(StalePoolError):
            _ = first.arrays
        with pytest.raises(StalePoolError):
            first.arrays = kept
        assert second.arrays[0] is kept[0]
    assert pool.stats().resets == 0


def test_steps_do_not_nest(pool: AnyPool) -> None:
    with pool.step() as handle:
        with pytest.raises(StalePoolError, match="do not nest"), pool.step():
            pass
        with pytest.raises(StalePoolError, match="do not nest"):
            pool.drain()
        with pytest.raises(StepwellUsageError, match="inside a step"):
            pool.close()
        assert len(handle.arrays) == len(pool.shapes)
    assert pool.stats().steps == 1
    assert pool.stats().resets == 0


def test_only_the_owner_steps_until_it_has_ended(pool: AnyPool) -> None:
    pool.drain()
    caught: list[Exception] = []
    queued: list[GatherTicket] = []

    def elsewhere() -> None:
        queued.append(gathered(pool, [1]))
        for call in (pool.drain, pool.warm, pool.renew):
            try:
                call()
            except StepwellUsageError as error:
                caught.append(error)

    thread = threading.Thread(target=elsewhere, name="not-the-engine")
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [StepwellUsageError] * 3
    assert "not-the-engine" in str(caught[0])
    assert pool.drain().gathers == tuple(queued)


def test_an_owner_that_has_ended_can_be_followed(pool: AnyPool) -> None:
    thread = threading.Thread(target=pool.drain)
    thread.start()
    thread.join()
    pool.drain()
    assert pool.stats().steps == 2


def test_another_thread_may_wait_for_a_gather_that_is_still_queued(pool: AnyPool) -> None:
    scattered(pool, [5], painted(pool, [5]))
    ticket = gathered(pool, [5])
    seen: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: seen.append(pages_of(ticket)))
    thread.start()
    pool.drain()
    thread.join()
    np.testing.assert_array_equal(seen[0], painted(pool, [5]))


def test_threads_that_queue_find_their_own_pages_while_an_engine_steps(pool: AnyPool) -> None:
    wrong: list[str] = []

    def producer(number: int) -> None:
        slots = list(range(number * 8, number * 8 + 8))
        for turn in range(25):
            pages = painted(pool, [1000 * number + 8 * turn + i for i in range(8)])
            scattered(pool, slots, pages)
            pages_before = pages.copy()
            pages[:] = 0xEE
            ticket = gathered(pool, slots)
            if not np.array_equal(pages_of(ticket), pages_before):
                wrong.append(f"producer {number}, turn {turn}")
            ticket.release()

    producers = [threading.Thread(target=producer, args=(number,)) for number in range(3)]
    for thread in producers:
        thread.start()
    page = painted(pool, [1])[0]
    while any(thread.is_alive() for thread in producers):
        with pool.step() as handle:
            handle.arrays = engine_write(pool, handle.arrays, 31, page)
    assert wrong == []
    assert pool.stats().gathered_pages == 3 * 25 * 8
    assert pool.stats().outstanding_bytes == 0


# ---- loss ----------------------------------------------------------------------------------------


def test_a_lost_pool_fails_what_is_queued_and_keeps_what_is_dispatched(pool: AnyPool) -> None:
    scattered(pool, [1], painted(pool, [1]))
    dispatched = gathered(pool, [1])
    pool.drain()
    late_gather = late_scatter = None

    def failing_step() -> None:
        nonlocal late_gather, late_scatter
        with pool.step():
            late_gather = gathered(pool, [1])
            late_scatter = scattered(pool, [2], painted(pool, [2]))
            raise KeyError

    with pytest.raises(KeyError):
        failing_step()
    assert pool.is_reset
    assert late_scatter is not None
    assert late_gather is not None
    assert late_scatter.state is TicketState.FAILED
    assert late_gather.ready()
    with pytest.raises(DeviceResetError, match="KeyError"):
        late_gather.wait()
    np.testing.assert_array_equal(pages_of(dispatched), painted(pool, [1]))


def test_work_for_a_lost_generation_never_reaches_the_new_pool(pool: AnyPool) -> None:
    lost = pool.generation
    with pytest.raises(KeyError), pool.step():
        raise KeyError
    pool.renew()
    late = pool.queue_scatter(np.array([1]), painted(pool, [1]), generation=lost)
    late_gather = pool.queue_gather(np.array([1]), generation=lost)
    assert isinstance(late, ScatterTicket)
    assert isinstance(late_gather, GatherTicket)
    assert late.state is late_gather.state is TicketState.FAILED
    check = gathered(pool, [1])
    assert pool.drain().scatters == ()
    assert not pages_of(check).any()


def test_a_pool_is_renewed_with_the_engines_arrays_and_only_when_lost(jax_pool: DevicePool) -> None:
    with pytest.raises(StepwellUsageError, match="only a reset pool"):
        jax_pool.renew()
    with pytest.raises(KeyError), jax_pool.step():
        raise KeyError
    with pytest.raises(GeometryError, match="float16"):
        jax_pool.renew([jnp.zeros(shape, jnp.float16) for shape in jax_pool.shapes])
    jax_pool.renew([jnp.full(shape, number + 1.0) for number, shape in enumerate(jax_pool.shapes)])
    check = gathered(jax_pool, [4])
    jax_pool.drain()
    for number, values in enumerate(values_of(jax_pool, pages_of(check))):
        assert (values == number + 1).all()


def test_a_new_pool_may_be_the_engines_arrays(jax_pool: DevicePool) -> None:
    own = [jnp.full(shape, number + 1.0) for number, shape in enumerate(jax_pool.shapes)]
    taken = DevicePool(jax_pool.geometry, 32, axes=" ".join(jax_pool.arrangement.axes), arrays=own)
    own.clear()
    scattered(taken, [3], painted(taken, [3]))
    check = gathered(taken, [2, 3])
    taken.drain()
    assert taken.stats().copied_pools == 0
    first, second = pages_of(check)
    np.testing.assert_array_equal(second, painted(taken, [3])[0])
    for number, values in enumerate(values_of(taken, first[None])):
        assert (values == number + 1).all()


def with_last(change: Callable[[jax.Array], object]) -> Callable[[Arrays], tuple[object, ...]]:
    """Change the last array alone: one that is not the pool's loses all."""
    return lambda arrays: (*arrays[:-1], change(arrays[-1]))


@pytest.mark.parametrize(
    ("leave", "complaint"),
    [
        (lambda arrays: arrays[:-1], "arrays, axes '.*' of this geometry take"),
        (lambda arrays: (*arrays, arrays[0]), "arrays, axes '.*' of this geometry take"),
        (with_last(lambda array: array.astype(jnp.int32)), "int32"),
        (with_last(lambda array: array[1:]), "pool is float32"),
        (with_last(np.asarray), "not an array on a device"),
        (with_last(lambda array: array.delete() or array), "the array of .*[12] is deleted"),
    ],
)
def test_arrays_that_cannot_be_the_pool_lose_it(
    jax_pool: DevicePool, leave: Callable[[Arrays], Arrays], complaint: str
) -> None:
    with pytest.raises(DeviceResetError, match=complaint), jax_pool.step() as handle:
        handle.arrays = leave(handle.arrays)
    assert jax_pool.is_reset
    jax_pool.renew()
    check = gathered(jax_pool, [0])
    jax_pool.drain()
    assert not pages_of(check).any()


def test_arrays_of_other_layers_are_refused_by_name() -> None:
    pool = DevicePool(uneven(), 4, axes=PER_LAYER)
    assert pool.shapes == ((2, 5, 2, 2, 8), (2, 5, 2, 2, 16), (2, 5, 2, 1, 8))
    with pytest.raises(DeviceResetError, match=r"layer 0 is float32\[2, 5, 2, 2, 16\]"), pool.step() as handle:
        handle.arrays = (handle.arrays[1], handle.arrays[0], handle.arrays[2])


def test_one_array_is_not_taken_for_two() -> None:
    """As `[zeros] * layers` gives them: the first donation would fail."""
    pool = DevicePool(geometry(), 4, axes=PER_LAYER)
    zeros = jnp.zeros(pool.shapes[0])
    with pytest.raises(DeviceResetError, match="layer 0 and layer 1 are one array"), pool.step() as handle:
        handle.arrays = (zeros,) * 3
    with pytest.raises(GeometryError, match="layer 0 and layer 1 are one array"):
        pool.renew([zeros] * 3)
    assert pool.is_reset


def test_a_gather_that_does_not_materialise_fails_alone(pool: AnyPool) -> None:
    class Broken(ResultReadiness):
        def wait(self, result: Result) -> None:
            raise RuntimeError("out of device memory")

    ticket = gathered(pool, [1])
    pool.drain()
    pool._queue.readiness = Broken()
    with pytest.raises(DeviceResetError, match="out of device memory"):
        ticket.wait()
    pool._queue.readiness = ResultReadiness()
    assert ticket.state is TicketState.FAILED
    assert pool.stats().outstanding_bytes == 0
    assert not pool.is_reset
    check = gathered(pool, [1])
    pool.drain()
    check.wait()


def test_a_gather_declared_failed_is_not_dispatched(pool: AnyPool) -> None:
    ticket = gathered(pool, [1])
    ticket.fail(DeviceResetError("the sequence is gone"))
    assert pool.drain().gathers == ()
    with pytest.raises(DeviceResetError, match="sequence is gone"):
        ticket.host_views()


def test_a_gather_that_fails_while_it_is_dispatched_stays_failed(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = gathered(pool, [1])
    gather = pool._gather

    def failing(*arguments: object) -> jax.Array:
        ticket.fail(DeviceResetError("the sequence is gone"))
        return gather(*arguments)

    monkeypatch.setattr(pool, "_gather", failing)
    assert pool.drain().gathers == ()
    assert ticket.state is TicketState.FAILED
    assert pool.stats().queued_chunks == 0
    assert pool.stats().outstanding_bytes == 0


def test_close_fails_what_is_queued_and_ends_the_pool(pool: AnyPool) -> None:
    ticket = scattered(pool, [1], painted(pool, [1]))
    pool.close()
    pool.close()
    assert ticket.state is TicketState.FAILED
    assert pool.stats().outstanding_bytes == 0
    with pytest.raises(StoreClosedError, match=r"open another one with PageStore\(config\)"), pool.step():
        pass
    late = pool.queue_gather(np.array([1]), generation=pool.generation)
    assert isinstance(late, GatherTicket)
    assert late.state is TicketState.FAILED


def refuse(*_: object) -> None:
    raise RuntimeError("RESOURCE_EXHAUSTED")


def test_a_scatter_that_cannot_be_dispatched_loses_the_pool_and_fails_all(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = gathered(pool, [1])
    broken = scattered(pool, [1], painted(pool, [1]))
    after = gathered(pool, [1])
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_scatter", refuse)
        with pytest.raises(DeviceResetError, match="RESOURCE_EXHAUSTED"):
            pool.drain()
    assert pool.is_reset
    assert not pages_of(before).any()
    assert broken.state is after.state is TicketState.FAILED
    before.release()
    assert pool.stats().outstanding_bytes == 0
    pool.renew()
    pool.drain()


def test_a_gather_that_cannot_be_dispatched_fails_alone(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = gathered(pool, list(range(32)))
    scatter = scattered(pool, [1], painted(pool, [1]))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_gather", refuse)
        assert pool.drain().scatters == (scatter,)
    assert isinstance(refused.error, DeviceResetError)
    check = gathered(pool, [1])
    pool.drain()
    np.testing.assert_array_equal(pages_of(check), painted(pool, [1]))


def test_pages_that_cannot_be_staged_are_a_failed_ticket(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_stage", refuse)
    ticket = scattered(pool, [1], painted(pool, [1]))
    assert ticket.state is TicketState.FAILED
    assert pool.stats().outstanding_bytes == 0
    assert pool.stats().queued_chunks == 0
    pool.drain()


def test_any_thread_may_close_an_idle_pool(pool: AnyPool) -> None:
    pool.drain()
    thread = threading.Thread(target=pool.close)
    thread.start()
    thread.join()
    with pytest.raises(StoreClosedError):
        pool.drain()


def test_a_pool_closed_while_it_is_renewed_stays_closed(
    pool: AnyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), pool.step():
        raise KeyError
    monkeypatch.setattr(pool, "_adopt", lambda arrays: pool.close())
    with pytest.raises(StoreClosedError):
        pool.renew()
    with pytest.raises(StoreClosedError):
        pool.drain()


# ---- bounds and misuse ---------------------------------------------------------------------------


def test_a_full_queue_says_so_with_numbers_and_takes_nothing() -> None:
    shape = geometry()
    pool = DevicePool(shape, 32, max_outstanding_bytes=4 * shape.page_bytes)
    held = gathered(pool, [0, 1, 2])
    refused = pool.queue_scatter(np.array([3, 4]), painted(pool, [1, 2]), generation=0)
    assert refused == QueueFull(2 * shape.page_bytes, 3 * shape.page_bytes, 4 * shape.page_bytes)
    with pytest.raises(StepwellUsageError, match="queued gather"):
        held.release()
    pool.drain()
    assert isinstance(pool.queue_gather(np.array([3, 4]), generation=0), QueueFull)
    held.release()
    held.release()
    with pytest.raises(StepwellUsageError, match="after its release"):
        held.wait()
    assert pool.stats().outstanding_bytes == 0
    whole = gathered(pool, list(range(32)))
    assert pool.drain().gathers == (whole,)


def test_one_entry_dispatches_no_more_than_its_bound() -> None:
    shape = geometry()
    pool = DevicePool(shape, 32, buckets=(1, 2), max_step_bytes=4 * shape.page_bytes)
    tickets = [scattered(pool, [2 * i, 2 * i + 1], painted(pool, [1, 2])) for i in range(5)]
    assert pool.drain().scatters == tuple(tickets[:2])
    with pool.step() as handle:
        assert handle.dispatched.scatters == tuple(tickets[2:4])
    assert pool.drain().scatters == tuple(tickets[4:])


def test_buckets_beyond_the_bound_of_a_step_are_left_out() -> None:
    shape = geometry()
    assert DevicePool(shape, 8, max_step_bytes=5 * shape.page_bytes).buckets == (1, 2, 4)
    assert DevicePool(shape, 8, max_step_bytes=1).buckets == (1,)
    large = geometry(layers=4, kv_heads=8, head_dim=128, page_tokens=128)
    assert large.page_bytes == 4 << 20
    assert DevicePool(large, 2).buckets == (1, 2, 4)


def test_misuse_is_refused_and_changes_nothing(pool: AnyPool) -> None:
    page = painted(pool, [1])
    for slots in ([], [-1], [32], [[1]]):
        with pytest.raises(StepwellUsageError):
            pool.queue_scatter(np.array(slots, np.int64), page, generation=0)
        with pytest.raises(StepwellUsageError):
            pool.queue_gather(np.array(slots, np.int64), generation=0)
    with pytest.raises(StepwellUsageError, match="twice"):
        pool.queue_scatter(np.array([1, 1]), painted(pool, [1, 2]), generation=0)
    for rows in ([1], [-1], [0, 0]):
        with pytest.raises(StepwellUsageError, match="rows"):
            pool.queue_scatter(np.array([1]), page, rows=np.array(rows), generation=0)
    with pytest.raises(StepwellUsageError, match="rows"):
        pool.queue_scatter(np.array([1, 2]), page, generation=0)
    for source in (page[:, 1:], page[0], page.view(np.int8)):
        with pytest.raises(GeometryError):
            pool.queue_scatter(np.array([1]), source, generation=0)
    assert pool.stats().queued_chunks == 0
    assert pool.stats().outstanding_bytes == 0


def test_a_pool_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(StepwellUsageError):
        DevicePool(geometry(), 0)
    for buckets in ((), (0, 1), (2, 1), (1, 1)):
        with pytest.raises(StepwellUsageError):
            DevicePool(geometry(), 4, buckets=buckets)
    with pytest.raises(GeometryError, match="opaque"):
        DevicePool(PageGeometry.opaque(64, page_tokens=1, fingerprint={"a": 1}), 4)
    with pytest.raises(GeometryError, match="opaque"):
        DevicePool(PageGeometry.opaque(64, page_tokens=1, fingerprint={"a": 1}), 4, axes=PER_LAYER)
    with pytest.raises(GeometryError, match=r"not all alike.*one array a layer"):
        DevicePool(uneven(), 4)
    with pytest.raises(GeometryError, match="cannot be the device pool"):
        DevicePool(geometry(), 4, arrays=[jnp.zeros(3)] * 2)


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((CASES[0], dtype) for dtype in ("float32", "bfloat16", "float16", "fp8_e4m3", "int8")),
        *((case, "bfloat16") for case in CASES[1:]),
    ],
)
def test_a_scatter_works_in_place_and_makes_no_pass_over_the_pool(
    case: tuple[Callable[[str], PageGeometry], str], dtype: str
) -> None:
    make, axes = case
    shape = make(dtype)
    pool = DevicePool(shape, 4096, axes=axes)
    with pool.step() as handle:
        slots = np.zeros(2, np.int32)
        rows = np.zeros((2, *pool._row_shape), pool.storage_dtype)
        compiled = pool._scatter.lower(handle.arrays, slots, rows).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4097 * shape.page_bytes
    assert memory.temp_size_in_bytes < 4 * shape.page_bytes


@pytest.mark.parametrize(
    ("shape", "axes"), [(geometry(), STACKED), (geometry(layers=7), PER_LAYER), (uneven(), PER_LAYER)]
)
def test_nothing_compiles_after_warm_and_before_it_two_programs_a_bucket(shape: PageGeometry, axes: str) -> None:
    pool = DevicePool(shape, 101, axes=axes, buckets=(1, 2, 4, 8))
    new = pool._scatter._cache_size(), pool._gather._cache_size()
    pool.warm()
    before = pool._scatter._cache_size(), pool._gather._cache_size()
    for count in range(1, 30):
        scattered(pool, list(range(count)), painted(pool, list(range(count))))
        gathered(pool, list(range(count)))
    while pool.stats().queued_chunks:
        pool.drain()
    assert (pool._scatter._cache_size(), pool._gather._cache_size()) == before
    assert before == (new[0] + 4, new[1] + 4)


def test_padding_touches_no_slot_that_an_index_knows() -> None:
    pool = DevicePool(geometry(), 5, buckets=(8,))
    pages = painted(pool, [1, 2, 3, 4, 5])
    scattered(pool, [0, 1, 2, 3, 4], pages)
    pool.drain()
    pool.warm()
    scattered(pool, [2], painted(pool, [9]))
    check = gathered(pool, [0, 1, 2, 3, 4])
    pool.drain()
    pages[2] = painted(pool, [9])
    np.testing.assert_array_equal(pages_of(check), pages)


# ---- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "logical", "storage"),
    [
        ("float32", jnp.float32, np.float32),
        ("bfloat16", jnp.bfloat16, np.uint16),
        ("float16", jnp.float16, np.uint16),
        ("fp8_e5m2", jnp.float8_e5m2, np.uint8),
        ("int8", np.int8, np.int8),
    ],
)
def test_narrow_floats_are_kept_as_integers_and_read_as_floats(
    dtype: str, logical: type, storage: type
) -> None:
    pool = DevicePool(geometry(dtype), 4)
    assert pool.storage_dtype == storage
    values = jnp.arange(8).astype(logical)
    stored = jax.jit(pool.as_storage)(values)
    assert stored.dtype == storage
    np.testing.assert_array_equal(jax.jit(pool.as_logical)(stored), values)


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_page_is_the_same_bytes_in_every_arrangement(
    case: tuple[Callable[[str], PageGeometry], str], dtype: str
) -> None:
    """(layer, stream, token, head, dim), which is the order of every lower tier; numpy cuts and joins beside it."""
    make, axes = case
    pool = DevicePool(make(dtype), 9, axes=axes)
    empty = cut(pool.geometry, axes, np.zeros((10, pool.page_bytes), np.uint8), pool.storage_dtype)
    assert tuple(array.shape for array in empty) == pool.shapes
    stamped = painted(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    scattered(pool, [7, 2, 0, 5, 8], stamped[:5])
    with pool.step() as handle:
        written = [np.array(array) for array in handle.arrays]
        for slot, page in ((3, 5), (2, 6), (1, 7)):
            handle.arrays = engine_write(pool, handle.arrays, slot, stamped[page])
    found = join(pool.geometry, axes, written)
    np.testing.assert_array_equal(found[[7, 2, 0, 5, 8]], stamped[:5])
    assert not found[[1, 3, 4, 6, 9]].any()
    ticket = gathered(pool, [8, 1, 2, 3, 4])
    pool.drain()
    np.testing.assert_array_equal(pages_of(ticket)[:4], stamped[[4, 7, 6, 5]])
    assert not pages_of(ticket)[4].any()


def test_the_core_reads_a_gathered_page_where_it_lies(pool: AnyPool) -> None:
    pages = painted(pool, [1, 2, 3])
    scattered(pool, [4, 5, 6], pages)
    ticket = gathered(pool, [6, 4, 5])
    pool.drain()
    (rows,) = ticket.host_views()
    assert not rows.flags.writeable
    shape = _core.PageShape(list(pool.geometry.layer_bytes), pool.geometry.fingerprint())
    lent = core_pool(lend_canonical(shape, rows))
    target = np.empty(pool.page_bytes, np.uint8)
    for slot, page in enumerate(pages[[2, 0, 1]]):
        lent.gather(slot, target)
        np.testing.assert_array_equal(target, page)


SHARDED = """
import dataclasses, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from stepwell.errors import DeviceResetError, GeometryError
from stepwell.geometry import PageGeometry
from stepwell.tiers.device import DevicePool
mesh = Mesh(np.array(jax.devices()), ("heads",))
assert mesh.size == 4
shape = PageGeometry(model="m", revision="1", layers=3, kv_heads=8, head_dim=8, dtype="bfloat16",
                     page_tokens=4)
axes, layers = sys.argv[1:]
if layers == "uneven":
    shape = dataclasses.replace(shape, layer_head_dims=((8, 8), (4, 16), (8, 4)))
spec = P(*("heads" if name == "head" else None for name in axes.split()))
pool = DevicePool(shape, 16, axes=axes, sharding=NamedSharding(mesh, spec))
pages = np.random.default_rng(0).integers(0, 256, (5, pool.page_bytes), dtype=np.uint8)
pool.queue_scatter(np.array([9, 1, 4, 7, 0]), pages, generation=0)
ticket = pool.queue_gather(np.array([0, 9, 3, 4]), generation=0)
step = jax.jit(lambda arrays: tuple(a + 0 for a in arrays), donate_argnums=0)
for _ in range(2):
    with pool.step() as handle:
        assert len(handle.arrays[0].sharding.device_set) == 4
        handle.arrays = step(handle.arrays)
expected = pages[[4, 0, 0, 2]]
expected[2] = 0
assert (np.concatenate(ticket.host_views()) == expected).all()
assert pool.stats().copied_pools == 0
try:
    with pool.step() as handle:
        handle.arrays = tuple(jax.device_put(a, jax.devices()[0]) for a in handle.arrays)
except DeviceResetError as error:
    assert "placed as" in str(error), error
assert pool.is_reset
pool.renew()
try:
    spec = P(*("heads" if name == "slot" else None for name in axes.split()))
    DevicePool(shape, 15, axes=axes, sharding=NamedSharding(mesh, spec))
except GeometryError:
    print("sharded pool ok")
"""


@pytest.mark.parametrize(
    ("axes", "layers"), [(STACKED, "even"), ("slot token head stream dim", "even"), (PER_LAYER, "uneven")]
)
def test_a_pool_divided_among_devices_by_heads_holds_the_same_pages(axes: str, layers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, axes, layers],
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sharded pool ok" in done.stdout


def test_tokens_may_be_an_array_of_jax() -> None:
    assert as_tokens(jnp.arange(3)).tolist() == [0, 1, 2]
    assert as_tokens(jnp.arange(3)).dtype == np.int32
    with pytest.raises(TokenError, match="token 1 is -1"):
        as_tokens(jnp.array([5, -1]))
    with pytest.raises(TokenError, match="dtype float32"):
        as_tokens(jnp.array([5.0]))
