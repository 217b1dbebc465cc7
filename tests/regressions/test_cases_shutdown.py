"""Cases of kind 9 in docs/cases.md: waits without an end, closing, and who holds the GIL meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from case_kit import CASE_GEOMETRY, Box, config_of, tokens_of
from sequence_kit import StampEngine, evict_all, prompt
from stepwell.index import Tier
from stepwell.mover import Inbox
from stepwell.testing.faults import fail_each, inject, reached, resume, wait_paused
from store_kit import BOTH, VOLUME_BYTES, Directories, OpenRig, Rig, chain, stamps

MakeEngine = Callable[..., StampEngine]


def test_a_load_without_staging_memory_ends_and_does_not_spin(make_engine: MakeEngine) -> None:
    """C064, LMCache/LMCache#2942: an allocation was tried for ever where nothing could be freed."""
    engine = make_engine(device=8, host=2, shared=0, disk=1)
    store = engine.store
    engine.cache(prompt(9, 9))
    engine.cache(prompt(1, 17))
    evict_all(store, Tier.DEVICE, Tier.HOST)
    filler = engine.open(prompt(9, 9))
    engine.settle(filler)  # host memory holds its two pages
    held = store.match(prompt(9, 9))
    assert held.tiers.get(Tier.HOST) == 2
    transfers = store.stats().transfers
    sequence = engine.open(prompt(1, 17))
    assert store.device.wait([sequence], 120.0) in ([], [sequence])
    for _ in range(20):
        sequence.promote()
    assert store.stats().transfers - transfers <= 4  # nothing is tried again and again
    assert sequence.ready < 16
    sequence.compute() if not sequence.settled else None
    assert store.extend([sequence], [17]).ok.all()
    engine.compute({sequence: 17})
    engine.verify(sequence, 17)
    held.close()


def test_a_load_goes_past_a_full_memory(open_rig: OpenRig) -> None:
    """C064, LMCache/LMCache#2942: the same without a device: no staging is needed, and none is waited for."""
    rig = open_rig(**BOTH, low_watermark=0.0)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    held = [rig.store.match(chain(1, 4))]  # on disk
    while rig.store.stats().tiers["shared"].free:
        rig.save(chain(100 + len(held), 4))
        held.append(rig.store.match(chain(100 + len(held), 4)))
    with inject("mover.unit", "count"):
        assert rig.load(chain(1, 4), deadline=60.0) == 4
        assert reached("mover.unit") <= 4
    for match in held:
        match.close()


def threads_of_ours() -> list[str]:
    """Return the names of this process's threads that stepwell has started."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended since
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    names += [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("sw-"))


def test_opening_and_closing_in_every_way_leaves_no_thread(open_rig: OpenRig, directories: Directories) -> None:
    """C067, kvcache-ai/Mooncake#2115: a thread that was not joined ended the process at every clean shutdown.

    36 rounds of six ways; 200 of one: tests/test_store_faults.py::test_opening_and_closing_200_times_leaks_nothing.
    """
    before = threads_of_ours()
    for number in range(36):
        rig = Rig(directories.config(host=16 * 4096, **BOTH), keeper=number % 2 == 0)
        rig.save(chain(number, 2), wait=number % 3 == 0)
        match number % 6:
            case 0:
                rig.close()
                rig.close()
            case 1:
                closer = threading.Thread(target=rig.close)
                closer.start()
                closer.join()
            case 2:
                del rig
            case 3:
                with rig.store:
                    rig.save(chain(number, 4), wait=False)
            case 4:
                closers = [threading.Thread(target=rig.close) for _ in range(3)]
                for closer in closers:
                    closer.start()
                for closer in closers:
                    closer.join()
            case 5:
                held = rig.store.match(chain(number, 2))
                rig.close()
                held.close()
    assert threads_of_ours() == before


def test_a_constructor_that_fails_half_way_leaves_no_thread(directories: Directories, no_leaks: None) -> None:
    """C067, kvcache-ai/Mooncake#2115: the end of what was only half begun."""
    before = threads_of_ours()
    for fault in fail_each("file.*", 5):
        with fault:
            try:
                rig = Rig(directories.config(**BOTH))
            except Exception:
                rig = None
        if rig is not None:
            rig.close()
        del rig
        assert threads_of_ours() == before, fault.nth


def test_two_ranks_that_agree_on_the_shorter_end_stay_alike(directories: Directories, tmp_path: Path) -> None:
    """C068, sgl-project/sglang#30760: ranks that decided each for itself waited for each other in a collective.

    Nothing here is collective: each rank's call says which pages it has, the engine takes the minimum (here: through a
    pipe), and forget(keep=) makes both alike. 200 steps, one in five with a failure on rank 1 only.
    """
    ranks = [
        Box(
            config_of(
                Directories(directories.shared / str(rank), directories.disk / str(rank)),
                replace(CASE_GEOMETRY, shard=(rank, 2)),
                host=48,
            )
        )
        for rank in (0, 1)
    ]
    read, write = os.pipe()
    random = np.random.default_rng(5)
    try:
        for step in range(200):
            tokens = tokens_of(int(random.integers(8)), 4 * int(random.integers(1, 9)))
            fails = random.random() < 0.2
            done = []
            for rank, box in enumerate(ranks):
                blocked = None
                if fails and rank == 1:  # no allocation succeeds there
                    blocked = box.store._index.take_private(Tier.HOST, box.store.stats().tiers["host"].free)
                if step % 3 == 2:
                    box.store.evict(Tier.HOST, 3)
                result = box.save(tokens)
                if blocked is not None:
                    box.store._index.free_private(Tier.HOST, blocked)
                assert result.pending == 0
                done.append(box.cached(tokens, Tier.HOST))
            os.write(write, bytes([done[1]]))
            agreed = min(done[0], os.read(read, 1)[0])
            for box in ranks:
                box.store.forget(tokens, keep=4 * agreed)
            # What a failure had evicted on one rank alone is agreed on at the next look, as here.
            for number in range(8):
                whole = tokens_of(number, 32)
                shorter = min(box.cached(whole, Tier.HOST) for box in ranks)
                for box in ranks:
                    box.store.forget(whole, keep=4 * shorter)
            states = [
                [box.cached(tokens_of(number, 32), Tier.HOST) for number in range(8)] for box in ranks
            ]
            assert states[0] == states[1], step
    finally:
        os.close(read)
        os.close(write)
        for box in ranks:
            box.store.close()


def _drop_store(rig: Rig) -> None:
    rig.pool = None  # type: ignore[assignment]
    del rig.store


def _drop_transfer(rig: Rig) -> None:
    rig.transfer = None  # type: ignore[attr-defined]


BLOCKING: dict[str, Callable[[Rig], object]] = {
    "close": lambda rig: rig.store.close(),
    "drop the store": _drop_store,
    "drop a transfer": _drop_transfer,
    "clear": lambda rig: rig.store.clear(),
    "a round of the keeper": lambda rig: rig.round(),
    "forget": lambda rig: rig.store.forget(chain(1, 4)),
    "flush": lambda rig: rig.store.flush(120.0),
    "wait": lambda rig: rig.transfer.wait(120.0),  # type: ignore[attr-defined]
    "verify": lambda rig: rig.store.verify(),
    "cancel": lambda rig: rig.transfer.cancel(),  # type: ignore[attr-defined]
    "new weights": lambda rig: rig.store.set_epoch(2),
}


@pytest.mark.parametrize("call", BLOCKING)
def test_nothing_holds_the_interpreter_while_it_stands_in_io(
    directories: Directories, no_leaks: None, call: str
) -> None:
    """C069, LMCache/LMCache#4676: a destructor that waited for I/O held the GIL, and with it the whole server.

    If one did, this thread could not let the I/O go on, and the test would never end.
    """
    rig = Rig(directories.config(**BOTH, io_threads=1))
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    turns = [0]
    with inject("file.pread", "pause", nth=1):
        rig.transfer = rig.start_load(chain(1, 4))  # type: ignore[attr-defined]
        wait_paused("file.pread")
        thread = threading.Thread(target=BLOCKING[call], args=(rig,))
        thread.start()
        for _ in range(10_000):  # Python runs on
            turns[0] += 1
        resume("file.pread")
        thread.join(120.0)
        assert not thread.is_alive()
    assert turns[0] == 10_000
    if hasattr(rig, "store"):
        rig.close()


@pytest.mark.parametrize("point", ["file.unmap", "file.close", "file.pwrite", "file.unlink", "file.lock"])
@pytest.mark.parametrize("how", ["close", "drop the store"])
def test_every_system_call_of_a_close_is_made_without_the_interpreter(
    directories: Directories, no_leaks: None, point: str, how: str
) -> None:
    """C069, LMCache/LMCache#4676: each call that can stand, in closing and in destructors."""
    rig = Rig(directories.config(host=16 * 4096, **BOTH))
    rig.save(chain(1, 4))
    with inject(point, "pause", nth=1):
        thread = threading.Thread(target=BLOCKING[how], args=(rig,))
        thread.start()
        while thread.is_alive() and not reached(point):
            thread.join(0.001)
        if thread.is_alive():
            wait_paused(point)
        resume(point)
        thread.join(120.0)
        assert not thread.is_alive()
    if hasattr(rig, "store"):
        rig.close()


def test_what_is_freed_by_a_workers_end_runs_python_in_no_worker(directories: Directories, no_leaks: None) -> None:
    """C070, pybind/pybind11#1446: a destructor joined a thread that waited for the GIL. 40 rounds.

    Completions go to an inbox, no worker calls Python; what a transfer kept alive is dropped by a Python thread.
    """
    ended: list[int] = []

    class Owner(np.ndarray):  # its end is Python code
        def __del__(self) -> None:
            ended.append(threading.get_ident())

    for number in range(40):
        rig = Rig(directories.config(shared=VOLUME_BYTES, disk=0))
        inbox = Inbox(16)
        for each in range(4):
            rows = np.zeros((2, 2, 2, 4, 2, 32), np.uint8).view(Owner)
            tokens = chain(100 * number + each, 2)
            rows[:] = stamps(tokens).reshape(rows.shape)
            pool = rig.store.lend(rows, axes="slot layer stream token head dim")
            rig.store.save(tokens, source=pool[:2], inbox=inbox)
            del rows, pool
        if number % 2:
            rig.close()
        del rig
        inbox.close()
    assert len(ended) >= 160
    assert set(ended) == {threading.get_ident()}


def test_python_runs_while_another_thread_waits(open_rig: OpenRig) -> None:
    """C070, google/tpu-sync commit 9947ac9: who polled for an end held the GIL while he slept."""
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    waited = []
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 4))
        waiter = threading.Thread(target=lambda: waited.append(transfer.wait(120.0)))
        waiter.start()
        assert sum(len(str(number)) for number in range(20_000)) > 0
        assert not waited
    waiter.join()
    assert waited == [True]
    assert np.array_equal(rig.rows[:4], stamps(chain(1, 4)))
