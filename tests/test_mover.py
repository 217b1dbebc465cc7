"""The mover through its binding, over real media: a slab, a mapped volume, a disk volume."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell import _core
from stepwell.testing.stepped import SteppedMover

POOL, HOST, SHARED, DISK = range(4)
LAYER_BYTES = [4096, 1024, 3072]
PAGE_BYTES = sum(LAYER_BYTES)
SLOTS = 32
PATIENCE = 60.0  # seconds no machine needs
UNUSED, SOURCE, SINK = (int(r) for r in (_core.Role.unused, _core.Role.source, _core.Role.sink))
OK, CHECKSUM, DEADLINE, POISONED = (
    int(s)
    for s in (
        _core.Status.ok,
        _core.Status.checksum,
        _core.Status.deadline,
        _core.Status.poisoned,
    )
)


def content(page: int) -> np.ndarray:
    return np.random.default_rng(page).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def make_volume(shape: Any, directory: Path, medium: int) -> Any:
    header = _core.VolumeHeader.plan(medium, shape, 1 << 20, 64 if medium == 1 else 512, 64)
    header.volume_id = bytes(range(16))
    header.fingerprint = bytes(32)
    header.boot_id = bytes(16)

    def make(name: str, size: int, head: bytes) -> int:
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, head, 0)
        return descriptor

    metadata = make(f"{medium}.meta", header.metadata_bytes, header.encode())
    pages = make(f"{medium}.pages", header.pages_bytes, b"") if medium == 2 else -1
    return _core.Volume(shape, header, metadata, pages, False)


class Memory(np.ndarray):
    """An array that can be watched as it goes."""


@dataclass
class Batch:
    """The arrays of a submit, and the lease that pins its sources."""

    pages: np.ndarray
    roles: np.ndarray
    slots: np.ndarray
    numbers: np.ndarray
    lease: int = 0

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.pages, self.roles, self.slots, self.numbers


class World:
    """An index, three tiers, a lent pool and a mover (stepped, unless threads are given)."""

    def __init__(self, directory: Path, copy_threads: int = 0, io_threads: int = 0) -> None:
        self.shape = _core.PageShape(LAYER_BYTES, bytes(32))
        self.index = _core.Index(16)
        self.host = _core.Slab(self.shape, SLOTS)
        self.shared = _core.VolumeSet(False)
        self.disk = _core.VolumeSet(True)
        for tier, volumes, medium in ((SHARED, self.shared, 1), (DISK, self.disk, 2)):
            number = volumes.add(make_volume(self.shape, directory, medium))
            self.index.add_slots(tier, number << 20, SLOTS)
        self.index.add_slots(HOST, 0, SLOTS)
        self.memory = np.zeros((SLOTS, PAGE_BYTES), np.uint8).view(Memory)
        self.pool = self.layout(self.memory)
        self.where: dict[int, list[int]] = {}
        self.mover = _core.Mover(
            self.index,
            self.shape,
            host=self.host,
            shared=self.shared,
            disk=self.disk,
            copy_threads=copy_threads,
            io_threads=io_threads,
            queue_units=8,
            unit_bytes=4 * PAGE_BYTES,
        )

    def layout(self, memory: np.ndarray, *, writable: bool = True) -> Any:
        layers = np.array(LAYER_BYTES)
        strides = np.full(len(layers), memory.strides[0], np.int64)
        ones = np.ones(len(layers), np.uint32)
        return _core.Pool(
            self.shape,
            1,
            (memory.ctypes.data + np.cumsum(layers) - layers).astype(np.uint64),
            strides,
            layers.astype(np.int64),
            layers.astype(np.int64),
            ones,
            ones,
            layers.astype(np.uint64),
            memory.shape[0],
            writable,
        )

    @staticmethod
    def keys(pages: list[int]) -> np.ndarray:
        return np.array([[p & 255, p >> 8, 7] for p in pages], np.uint8)

    def claim(self, pages: list[int], tiers: tuple[int, ...]) -> Batch:
        """Claim pages; roles and slots of the pool column are left to the caller."""
        keys = self.keys(pages)
        claims = self.index.claim_absent_keys(keys, 1, 2, b"", sum(1 << t for t in tiers))
        new = claims.outcomes == 1
        roles = np.where(new, SINK, UNUSED).astype(np.uint8)
        for page, row, is_new in zip(pages, claims.slots, new, strict=True):
            where = self.where.setdefault(page, [0, 0, 0, 0])
            where[:] = [int(s) if n else w for s, n, w in zip(row, is_new, where, strict=True)]
        return Batch(claims.pages, roles, np.where(new, claims.slots, 0), claims.numbers)

    def save_batch(self, pages: list[int], tiers: tuple[int, ...]) -> Batch:
        batch = self.claim(pages, tiers)
        batch.roles[:, POOL] = SOURCE
        batch.slots[:, POOL] = range(len(pages))
        for slot, page in enumerate(pages):
            self.memory[slot] = content(page)
        return batch

    def load_batch(self, pages: list[int], source: int, sinks: tuple[int, ...] = ()) -> Batch:
        """Pin pages in `source`, claim them in `sinks`: pool slot i gets pages[i]."""
        match = self.index.match_keys_and_pin(self.keys(pages), 1, 1 << source)
        assert match.pages == len(pages)
        batch = self.claim(pages, sinks)
        batch.pages = self.index.lease_pages(match.lease, 0, len(pages))[0]
        batch.lease = match.lease
        batch.roles[:, POOL] = SINK
        batch.slots[:, POOL] = range(len(pages))
        batch.roles[:, source] = SOURCE
        batch.slots[:, source] = [self.where[page][source] for page in pages]
        return batch

    def submit(self, batch: Batch, **options: Any) -> Any:
        arguments = batch.arguments()
        result = self.mover.submit(*arguments, pool=self.pool, lease=batch.lease, **options)
        assert isinstance(result, _core.Transfer), result
        return result

    def run(self, transfer: Any) -> Any:
        SteppedMover(self.mover, seed=1).run_until_idle()
        assert transfer.wait(PATIENCE)
        return transfer

    def save(self, pages: list[int], tiers: tuple[int, ...]) -> Any:
        transfer = self.run(self.submit(self.save_batch(pages, tiers), unpin_pages=True))
        assert transfer.page_status().tolist() == [OK] * len(pages)
        return transfer

    def check_settled(self) -> None:
        assert self.index.check() == ""
        assert self.index.leases() == 0
        for tier in (HOST, SHARED, DISK):
            counts = self.index.counts(tier)
            assert counts["arriving"] == counts["leaving"] == counts["pinned"] == 0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path)
    _core.fault_clear()


@pytest.fixture
def threaded(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, copy_threads=1, io_threads=2)
    yield made
    _core.fault_clear()
    made.mover.drain(PATIENCE, close=True)


@pytest.mark.parametrize("layer_order", [False, True])
@pytest.mark.parametrize("tier", [HOST, SHARED, DISK])
def test_what_was_saved_is_loaded_as_it_was(world: World, tier: int, layer_order: bool) -> None:
    pages = [3, 1, 4, 15, 9, 2, 6]
    world.save(pages, (tier,))
    world.memory[:] = 0xEE
    transfer = world.run(
        world.submit(world.load_batch(pages, tier), layer_order=layer_order, tag=8)
    )
    assert transfer.page_status().tolist() == [OK] * 7
    assert transfer.landed().tolist() == [1 << POOL] * 7
    assert (transfer.layers_done, transfer.pages, transfer.tag) == (3, 7, 8)
    assert transfer.bytes_moved == 7 * PAGE_BYTES
    assert transfer.done
    assert transfer.source_released
    for slot, page in enumerate(pages):
        np.testing.assert_array_equal(world.memory[slot], content(page))
    assert (np.asarray(world.memory[7:]) == 0xEE).all()
    world.check_settled()


def test_a_save_to_three_tiers_survives_in_each_of_them(world: World) -> None:
    world.save([1, 2, 3], (HOST, SHARED, DISK))
    out = np.zeros(PAGE_BYTES, np.uint8)
    for page in (1, 2, 3):
        key = bytes([page, 0, 7])
        for tier, medium in ((HOST, world.host), (SHARED, world.shared), (DISK, world.disk)):
            status = medium.read_page(world.where[page][tier], out, key=key)
            assert status == _core.Status.ok
            np.testing.assert_array_equal(out, content(page))
    stats = world.mover.stats()
    assert stats["bytes_read"] == (3 * PAGE_BYTES, 0, 3 * PAGE_BYTES, 0)
    assert stats["bytes_written"] == (0, 3 * PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert (stats["commits"], stats["aborts"], stats["transfers"]) == (9, 0, 1)
    world.check_settled()


def test_a_page_damaged_on_disk_fails_alone_and_is_quarantined(
    world: World, tmp_path: Path
) -> None:
    world.save([1, 2, 3], (DISK,))
    slot = world.where[2][DISK] & ((1 << 20) - 1)
    with open(tmp_path / "2.pages", "r+b") as file:
        file.seek(slot * 8192 + 4096 + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    transfer = world.run(
        world.submit(world.load_batch([1, 2, 3], DISK, (SHARED,)), unpin_pages=True)
    )
    assert transfer.page_status().tolist() == [OK, CHECKSUM, OK]
    assert world.index.state(bytes([2, 0, 7]))[SHARED] == 0
    assert world.index.counts(DISK)["quarantined"] == 1
    assert world.mover.stats()["checksum_failures"] == 1
    world.check_settled()


def check_batch(world: World, pages: list[int], tier: int) -> Batch:
    """Pin pages in a tier, to be read there and copied nowhere."""
    batch = world.load_batch(pages, tier)
    batch.roles[:, POOL] = UNUSED
    return batch


@pytest.mark.parametrize("tier", [HOST, SHARED, DISK])
def test_a_check_reads_a_page_where_it_is_and_copies_nothing(world: World, tier: int) -> None:
    world.save([1, 2, 3], (tier,))
    before = world.mover.stats()["bytes_written"]
    transfer = world.run(world.submit(check_batch(world, [1, 2, 3], tier)))
    assert transfer.page_status().tolist() == [OK] * 3
    assert transfer.landed().tolist() == [1 << tier] * 3
    assert (transfer.bytes_moved, transfer.source_released) == (0, True)
    stats = world.mover.stats()
    assert stats["bytes_read"][tier] == 3 * PAGE_BYTES
    assert stats["bytes_written"] == before
    world.check_settled()


@pytest.mark.parametrize("layer", range(3))
def test_a_check_quarantines_what_is_damaged_and_that_alone(world: World, layer: int) -> None:
    world.save([1, 2, 3], (HOST,))
    world.host.view()[world.where[2][HOST], sum(LAYER_BYTES[: layer + 1]) - 1] ^= 1
    transfer = world.run(world.submit(check_batch(world, [1, 2, 3], HOST)))
    assert transfer.page_status().tolist() == [OK, CHECKSUM, OK]
    assert transfer.landed().tolist() == [1 << HOST, 0, 1 << HOST]
    assert world.index.counts(HOST)["quarantined"] == 1
    assert world.mover.stats()["checksum_failures"] == 1
    world.check_settled()


def test_a_check_of_a_truncated_volume_is_a_bus_fault_not_a_crash(world: World, tmp_path: Path) -> None:
    assert _core.guard_install()
    world.save([1, 2], (SHARED,))
    os.truncate(tmp_path / "1.meta", 4096)
    transfer = world.run(world.submit(check_batch(world, [1, 2], SHARED)))
    assert transfer.page_status().tolist() == [int(_core.Status.bus_fault)] * 2
    assert transfer.landed().tolist() == [0, 0]
    assert not world.mover.poisoned


def test_a_check_that_is_cancelled_says_nothing_of_its_pages(world: World) -> None:
    world.save([1, 2], (HOST,))
    transfer = world.submit(check_batch(world, [1, 2], HOST))
    transfer.cancel()
    world.run(transfer)
    assert transfer.page_status().tolist() == [int(_core.Status.cancelled)] * 2
    assert transfer.landed().tolist() == [0, 0]
    assert world.index.counts(HOST)["quarantined"] == 0
    world.check_settled()


def test_a_check_of_the_caller_s_memory_is_refused(world: World) -> None:
    batch = world.save_batch([1], (HOST,))
    batch.roles[:, HOST] = UNUSED
    assert world.mover.submit(*batch.arguments(), pool=world.pool) == _core.Status.invalid


def test_a_volume_truncated_behind_the_mapping_is_a_bus_fault_not_a_crash(
    world: World, tmp_path: Path
) -> None:
    assert _core.guard_install()
    world.save([1, 2], (SHARED,))
    os.truncate(tmp_path / "1.meta", 4096)
    transfer = world.run(world.submit(world.load_batch([1, 2], SHARED)))
    assert transfer.page_status().tolist() == [int(_core.Status.bus_fault)] * 2
    assert world.mover.stats()["bus_faults"] == 2
    assert not world.mover.poisoned


def test_a_buffer_repainted_after_close_gate_stays_painted_although_a_stalled_pread_completes(
    threaded: World,
) -> None:
    world = threaded
    world.save([1, 2, 3], (DISK,))
    _core.fault_arm("file.pread", "pause")
    transfer = world.submit(world.load_batch([1, 2, 3], DISK, (SHARED,)), unpin_pages=True)
    assert _core.fault_wait_paused("file.pread", PATIENCE)
    transfer.close_gate()
    assert transfer.page_status().tolist() == [DEADLINE] * 3
    assert not transfer.done
    world.memory[:] = 0x5A
    _core.fault_clear()
    assert transfer.wait(PATIENCE)
    assert (np.asarray(world.memory) == 0x5A).all()
    assert transfer.page_status().tolist() == [DEADLINE] * 3
    assert transfer.landed().tolist() == [1 << SHARED] * 3
    world.check_settled()


def test_memory_is_kept_alive_until_its_transfer_has_ended(world: World) -> None:
    world.save([1], (SHARED,))
    memory = np.zeros((1, PAGE_BYTES), np.uint8).view(Memory)
    gone = weakref.ref(memory)
    batch = world.load_batch([1], SHARED)
    pool = world.layout(memory)
    arguments = batch.arguments()
    transfer = world.mover.submit(*arguments, pool=pool, lease=batch.lease, keep_alive=memory)
    del memory, pool, transfer  # a dropped handle changes nothing
    gc.collect()
    assert gone() is not None
    assert world.mover.drain_retired() == 0
    assert world.mover.step(0)
    kept = gone()
    assert kept is not None
    np.testing.assert_array_equal(kept[0], content(1))
    del kept
    assert world.mover.drain_retired() == 1
    gc.collect()
    assert gone() is None


def test_a_refused_transfer_keeps_nothing_alive_and_consumes_nothing(world: World) -> None:
    inbox = _core.Inbox(0)
    batch = world.save_batch([1, 2], (SHARED,))
    watched = np.zeros(1).view(Memory)
    gone = weakref.ref(watched)
    result = world.mover.submit(
        *batch.arguments(), pool=world.pool, keep_alive=watched, inbox=inbox
    )
    assert result == _core.Status.queue_full
    del watched
    gc.collect()
    assert gone() is None
    assert world.index.counts(SHARED)["arriving"] == 2
    world.run(world.submit(batch, unpin_pages=True))
    world.check_settled()


def test_a_full_queue_is_a_value(world: World) -> None:
    transfers = []
    for page in range(9):
        batch = world.save_batch([page], (SHARED,))
        transfers.append((batch, world.mover.submit(*batch.arguments(), pool=world.pool)))
    assert [isinstance(t, _core.Transfer) for _, t in transfers] == [True] * 8 + [False]
    refused, status = transfers[-1]
    assert status == _core.Status.queue_full
    assert world.mover.stats()["queued_copy"] == 8
    assert world.mover.step(0)
    world.run(world.submit(refused))
    assert world.index.counts(SHARED)["resident"] == 9


@pytest.mark.parametrize("name", ["roles", "slots", "numbers"])
def test_arrays_of_a_wrong_shape_are_misuse_and_change_nothing(world: World, name: str) -> None:
    batch = world.save_batch([1, 2], (SHARED,))
    arrays = {n: getattr(batch, n) for n in ("roles", "slots", "numbers")}
    arrays[name] = arrays[name][:, :3].copy()
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 3\)"):
        world.mover.submit(
            batch.pages, arrays["roles"], arrays["slots"], arrays["numbers"], pool=world.pool
        )
    assert world.index.counts(SHARED)["arriving"] == 2
    world.run(world.submit(batch, unpin_pages=True))
    world.check_settled()


def test_a_page_that_does_not_exist_is_misuse(world: World) -> None:
    batch = world.save_batch([1], (SHARED,))
    with pytest.raises(ValueError, match="no page"):
        world.mover.submit(
            np.array([1 << 20], np.uint32), batch.roles, batch.slots, batch.numbers, pool=world.pool
        )
    without_pool = world.mover.submit(*batch.arguments())
    assert without_pool == _core.Status.invalid


def test_completions_come_to_their_submitter_as_arrays(world: World) -> None:
    inbox = _core.Inbox(4)
    poller = select.poll()
    poller.register(inbox.fileno(), select.POLLIN)
    assert poller.poll(0) == []
    world.submit(world.save_batch([1, 2], (SHARED,)), unpin_pages=True, tag=7, inbox=inbox)
    cancelled = world.submit(world.save_batch([3], (SHARED,)), tag=2**63, inbox=inbox)
    cancelled.cancel()
    world.run(cancelled)
    assert poller.poll(0) == [(inbox.fileno(), select.POLLIN)]
    tags, ok_pages, statuses = inbox.poll()
    assert tags.tolist() == [7, 2**63]
    assert ok_pages.tolist() == [2, 0]
    assert statuses.tolist() == [OK, int(_core.Status.cancelled)]
    assert (tags.dtype, ok_pages.dtype, statuses.dtype) == (np.uint64, np.uint32, np.uint8)
    assert poller.poll(0) == []
    inbox.close()
    empty = np.zeros((0, 4), np.uint32)
    nothing = np.zeros(0, np.uint32)
    result = world.mover.submit(nothing, empty.astype(np.uint8), empty, empty, inbox=inbox)
    assert result == _core.Status.closed


def test_an_event_loop_can_wait_on_an_inbox(threaded: World) -> None:
    world = threaded
    inbox = _core.Inbox(4)

    async def save() -> list[int]:
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        loop.add_reader(inbox.fileno(), told.set)
        world.submit(world.save_batch([1, 2], (SHARED, DISK)), unpin_pages=True, inbox=inbox)
        await asyncio.wait_for(told.wait(), PATIENCE)
        loop.remove_reader(inbox.fileno())
        return [int(n) for n in inbox.poll()[1]]

    assert asyncio.run(save()) == [2]


def test_wait_says_false_when_time_is_up_and_can_be_interrupted(world: World) -> None:
    class InterruptedHereError(Exception):
        pass

    def handler(_number: int, _frame: object) -> None:
        raise InterruptedHereError

    transfer = world.submit(world.save_batch([1], (SHARED,)), unpin_pages=True)
    assert not transfer.wait(0)
    assert not transfer.wait(-1)
    assert transfer.seconds == 0
    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.main_thread().ident
    assert main is not None
    sender = threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGUSR1))

    def wait_for_ever() -> None:
        sender.start()
        transfer.wait()  # nobody steps the mover: only the signal can end it

    try:
        with pytest.raises(InterruptedHereError):
            wait_for_ever()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    world.run(transfer)
    assert transfer.seconds > 0


def test_the_mover_keeps_its_index_and_media_alive(world: World) -> None:
    world.save([1, 2], (HOST, SHARED, DISK))
    batch = world.load_batch([1, 2], DISK)
    mover, pool, memory = world.mover, world.pool, world.memory
    world.__dict__.clear()
    gc.collect()
    arguments = batch.arguments()
    transfer = mover.submit(*arguments, pool=pool, lease=batch.lease, keep_alive=memory)
    assert SteppedMover(mover, seed=0).run_until_idle() == 1
    assert transfer.page_status().tolist() == [OK, OK]
    np.testing.assert_array_equal(memory[1], content(2))


def test_a_mover_that_goes_with_work_queued_decides_it(world: World) -> None:
    inbox = _core.Inbox(4)
    transfer = world.submit(world.save_batch([1, 2], (SHARED, DISK)), unpin_pages=True, inbox=inbox)
    del world.mover
    gc.collect()
    assert transfer.done
    assert transfer.page_status().tolist() == [int(_core.Status.cancelled)] * 2
    assert inbox.poll()[2].tolist() == [int(_core.Status.cancelled)]
    world.check_settled()


def test_drain_finishes_or_cancels_and_closes(world: World) -> None:
    first = world.submit(world.save_batch([1], (SHARED,)), unpin_pages=True)
    assert world.mover.drain(PATIENCE)
    assert first.page_status().tolist() == [OK]
    second = world.submit(world.save_batch([2], (SHARED,)), unpin_pages=True)
    assert not world.mover.drain(0.0, close=True)
    assert second.page_status().tolist() == [int(_core.Status.cancelled)]
    batch = world.save_batch([3], (SHARED,))
    assert world.mover.submit(*batch.arguments(), pool=world.pool) == _core.Status.closed


def test_an_exception_in_a_worker_costs_its_own_pages_and_no_others(world: World) -> None:
    _core.fault_arm("mover.after_copy", "errno", 2, 5)
    transfer = world.run(world.submit(world.save_batch([1, 2, 3], (SHARED,)), unpin_pages=True))
    failed = int(_core.Status.failed)
    assert transfer.page_status().tolist() == [OK, failed, failed]
    assert not world.mover.poisoned
    assert not world.index.poisoned()
    stats = world.mover.stats()
    assert (stats["commits"], stats["aborts"], stats["failed_units"]) == (1, 2, 1)
    assert "mover.after_copy" in world.mover.failure
    again = world.run(world.submit(world.save_batch([2, 3], (SHARED,)), unpin_pages=True))
    assert again.page_status().tolist() == [OK, OK]
    world.check_settled()


def test_a_failed_assertion_in_a_worker_poisons_and_decides_every_page(world: World) -> None:
    world.save([4], (SHARED,))
    _core.fault_arm("mover.assertion", "errno", 1, 5)
    transfer = world.run(world.submit(world.save_batch([1, 2, 3], (SHARED,)), unpin_pages=True))
    assert transfer.page_status().tolist() == [POISONED] * 3
    assert world.mover.poisoned
    assert world.index.poisoned()
    stats = world.mover.stats()
    assert (stats["commits"], stats["aborts"]) == (1, 3)
    empty = np.zeros((0, 4), np.uint32)
    nothing = np.zeros(0, np.uint32)
    result = world.mover.submit(nothing, empty.astype(np.uint8), empty, empty)
    assert result == _core.Status.poisoned


def test_workers_are_named(threaded: World) -> None:
    threaded.save([1], (SHARED, DISK))
    names: list[str] = []
    while len(names) < 3:  # each names itself as it starts, and one may have had nothing to do yet
        found = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
        names = sorted(name for name in found if name.startswith("sw-"))
    assert names == ["sw-copy-0", "sw-io-0", "sw-io-1"]
    with pytest.raises(ValueError, match="give both or neither"):
        _core.Mover(threaded.index, threaded.shape, copy_threads=1, io_threads=0)


def interleaving(directory: Path, seed: int) -> list[tuple[int, ...]]:
    """Save and load side by side; return what was resident on disk after each step."""
    directory.mkdir()
    world = World(directory)
    world.save([1, 2, 3, 4], (DISK,))
    stepped = SteppedMover(world.mover, seed=seed)
    saves = [world.submit(world.save_batch([p], (SHARED, DISK))) for p in (11, 12, 13)]
    loads = [world.submit(world.load_batch([p], DISK, (HOST,))) for p in (1, 2, 3, 4)]
    seen = []
    while stepped.step():
        seen.append(tuple(int(t.done) for t in saves + loads))
    assert stepped.steps == len(seen) == 10
    assert seen[-1] == (1,) * 7
    return seen


def test_a_stepped_mover_takes_the_order_of_its_seed(tmp_path: Path) -> None:
    orders = [interleaving(tmp_path / f"{n}", seed=n % 8) for n in range(16)]
    assert orders[:8] == orders[8:]
    assert len({str(order) for order in orders}) > 1


def test_run_until_idle_stops_at_its_limit() -> None:
    class Endless:
        def step(self, queue: int) -> bool:
            return queue >= 0

    with pytest.raises(RuntimeError, match="not idle after 5 units"):
        SteppedMover(Endless(), seed=0).run_until_idle(limit=5)
