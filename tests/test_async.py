"""Await transfers and inboxes in asyncio loops: what comes back, what a deadline and a cancel leave, and that no loop,
thread, descriptor or pin is lost on the way."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import math
import os
import random
import re
import resource
import select
import signal
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepwell as sw
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.errors import ForkedError, StepwellUsageError, StoreClosedError
from stepwell.testing.faults import inject, resume, wait_paused
from stepwell.waker import wait_told
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, Tokens, assert_unpinned, chain, stamps

PATIENCE = 60.0  # seconds no machine needs
QUEUE_FULL = int(_core.Status.queue_full)
DOC = Path(__file__).parents[1] / "docs" / "async.md"


def eventfds() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that lists
            continue
        if target == "anon_inode:[eventfd]":
            found.append(name)
    return sorted(found)


async def turn() -> None:
    """Return once every task that was ready has run up to its next wait."""
    told = asyncio.Event()
    asyncio.get_running_loop().call_soon(told.set)
    await told.wait()


async def patiently(what: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(what, PATIENCE)


async def waiting_task(what: Awaitable[Any]) -> asyncio.Task[Any]:
    """Start a task that awaits, and return once it does."""

    async def wait() -> Any:
        return await what

    task = asyncio.create_task(wait())
    await turn()
    assert not task.done()
    return task


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads, and raise what went wrong in any of them."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child that dies where it hangs; return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def rig(open_rig: OpenRig) -> Rig:
    """A store on shared memory with one chain of eight pages saved."""
    opened = open_rig(disk=0)
    assert opened.save(chain(1, 8)).saved == 8
    return opened


# ---- await transfer --------------------------------------------------------------------------------------------------


def test_awaiting_returns_the_transfer_with_its_pages_landed(rig: Rig) -> None:
    async def load() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8))
            waiting = await waiting_task(transfer)
        assert await patiently(waiting) is transfer
        assert transfer.done
        assert transfer.ok_pages == 8

    asyncio.run(load())
    assert np.array_equal(rig.rows[:8], stamps(chain(1, 8)))


def test_a_save_is_awaited_by_its_transfer(rig: Rig) -> None:
    async def save() -> None:
        with inject("mover.unit", "pause"):
            result = rig.save(chain(2, 8), wait=False)
            waiting = await waiting_task(result.transfer)
        assert await patiently(waiting) is result.transfer
        assert result.transfer.ok.all()

    asyncio.run(save())
    assert rig.load(chain(2, 8)) == 8


def test_what_is_done_already_is_awaited_without_a_descriptor(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = rig.start_load(chain(1, 8))
    loaded.wait()
    empty = rig.start_load(chain(7, 8))
    with sw.Inbox(1) as inbox:
        first = rig.start_load(chain(1, 8), inbox=inbox)
        refused = rig.start_load(chain(1, 8), inbox=inbox)
        first.wait()

    async def look() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "add_reader", lambda *_: pytest.fail("a descriptor for nothing"))
        for transfer, pages in ((loaded, 8), (empty, 0), (refused, 0)):
            assert await transfer is transfer
            assert transfer.ok_pages == pages

    asyncio.run(look())
    assert empty.pages == 0
    assert refused.pages == 8
    assert (refused.status == QUEUE_FULL).all()


def test_a_page_that_fails_is_a_value_and_result_raises_it(rig: Rig) -> None:
    async def load() -> None:
        with inject("mover.before_copy", "pause", nth=3):
            transfer = rig.start_load(chain(1, 8))
            waiting = await waiting_task(transfer)
            wait_paused("mover.before_copy")
            transfer.cancel()
        await patiently(waiting)
        assert transfer.ok_pages < 8
        with pytest.raises(sw.StepwellError, match="cancelled"):
            transfer.result(0)

    asyncio.run(load())


@pytest.mark.parametrize("order", ["page", "layer"])
def test_no_byte_lands_once_an_await_has_met_its_deadline(rig: Rig, order: str) -> None:
    async def load() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8), order=order, deadline=0.02)
            assert await patiently(transfer) is transfer
            assert transfer.done
            rig.rows[:] = 0xAB

    asyncio.run(load())
    assert rig.store.flush(PATIENCE)
    assert (rig.rows == 0xAB).all()


def test_a_clock_turned_by_hand_ends_an_await_at_the_keepers_next_round(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(disk=0, clock=clock)
    rig.save(chain(1, 8))

    async def load() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8), deadline=1000.0)
            waiting = await waiting_task(transfer)
            rig.round()
            await turn()
            assert not waiting.done()
            clock.advance(1000.0)
            rig.round()
            await patiently(waiting)
            assert transfer.ok_pages == 0

    asyncio.run(load())


@pytest.mark.parametrize("deadline", [math.inf, 1e300])
def test_a_deadline_past_all_bounds_is_none(rig: Rig, deadline: float) -> None:
    async def load() -> None:
        with inject("mover.unit", "pause"):
            waiting = await waiting_task(rig.start_load(chain(1, 8), deadline=deadline))
        assert (await patiently(waiting)).ok_pages == 8

    asyncio.run(load())


def test_a_new_epoch_ends_an_await_and_a_wait_although_the_bytes_are_stalled(rig: Rig) -> None:
    async def load() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8))
            waiting = await waiting_task(transfer)
            in_thread = await waiting_task(asyncio.to_thread(transfer.wait, PATIENCE))
            rig.store.set_epoch(2)
            await patiently(waiting)
            assert await in_thread
            assert transfer.ok_pages == 0

    asyncio.run(load())


def test_several_awaits_of_one_loop_share_one_descriptor_which_goes_with_the_last(rig: Rig) -> None:
    before = eventfds()

    async def load() -> None:
        loop_own = eventfds()
        with inject("mover.unit", "pause"):
            transfers = [rig.start_load(chain(1, 8)) for _ in range(3)]
            waiting = [await waiting_task(transfer) for transfer in transfers for _ in range(2)]
            assert len(eventfds()) == len(loop_own) + 1
        assert await patiently(asyncio.gather(*waiting)) == [t for t in transfers for _ in range(2)]
        assert await patiently(asyncio.gather(*transfers)) == transfers
        assert eventfds() == loop_own

    asyncio.run(load())
    assert eventfds() == before


def test_loops_of_several_threads_await_one_transfer(rig: Rig) -> None:
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))
        begun = threading.Barrier(5)

        async def load() -> int:
            waiting = await waiting_task(transfer)
            begun.wait(PATIENCE)
            return int((await patiently(waiting)).ok_pages)

        def work(number: int) -> None:
            if number < 4:
                assert asyncio.run(load()) == 8
            else:
                begun.wait(PATIENCE)
                wait_paused("mover.unit")
                resume("mover.unit")

        run_threads(5, work)


def test_a_cancelled_await_detaches_and_leaves_nothing_behind(rig: Rig) -> None:
    async def load() -> None:
        loop_own, threads = eventfds(), threading.active_count()
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8), deadline=PATIENCE)
            waiting = await waiting_task(transfer)
            stays = await waiting_task(transfer)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(eventfds()) == len(loop_own) + 1  # of the one that stays
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await transfer
            stays.cancel()
            await asyncio.wait({stays})
            assert eventfds() == loop_own
            assert threading.active_count() == threads
            assert not transfer.done
        assert (await patiently(transfer)).ok_pages == 8

    asyncio.run(load())
    assert np.array_equal(rig.rows[:8], stamps(chain(1, 8)))


def test_no_byte_lands_once_a_cancelled_await_was_followed_by_revoke(rig: Rig) -> None:
    async def load() -> None:
        transfer = rig.start_load(chain(1, 8))
        try:
            await transfer
        except asyncio.CancelledError:
            transfer.revoke()
            rig.rows[:] = 0xAB
            raise

    async def main() -> None:
        with inject("mover.unit", "pause"):
            task = await waiting_task(load())
            wait_paused("mover.unit")
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()

    asyncio.run(main())
    assert rig.store.flush(PATIENCE)
    assert (rig.rows == 0xAB).all()


def test_a_wait_that_is_cancelled_or_timed_out_gives_its_token_up() -> None:
    class Silent:
        """Never tell, and note what was taken and given up."""

        def __init__(self) -> None:
            self.taken: list[int] = []
            self.given_up: list[int] = []

        def watch(self, _: _core.Waker, token: int, /) -> bool:
            self.taken.append(token)
            return True

        def unwatch(self, _: _core.Waker, token: int, /) -> None:
            self.given_up.append(token)

    async def wait() -> None:
        silent = Silent()
        await patiently(wait_told(silent, 0.0))
        waiting = [await waiting_task(wait_told(silent)) for _ in range(3)]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert len(set(silent.taken)) >= 3
        assert silent.given_up == silent.taken

    asyncio.run(wait())


def test_a_loop_closed_in_mid_await_leaves_nothing_behind(rig: Rig) -> None:
    before = eventfds()
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # "Task was destroyed but it is pending!"
        gone = weakref.ref(loop)

        async def load() -> None:
            await transfer

        task = loop.create_task(load())
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert not task.done()
        assert len(eventfds()) == len(before) + 1
        loop.close()
        del loop, task
        gc.collect()
        assert gone() is None
        assert eventfds() == before
    assert transfer.wait(PATIENCE)


def test_a_loop_without_add_reader_and_no_loop_at_all_are_refused_with_a_way_out(rig: Rig) -> None:
    class Proactor(asyncio.SelectorEventLoop):
        def add_reader(self, *_: Any) -> None:
            raise NotImplementedError

    before = eventfds()
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))

        async def load() -> None:
            await transfer

        with (
            asyncio.Runner(loop_factory=Proactor) as runner,
            pytest.raises(StepwellUsageError, match=r"Proactor has no add_reader.*to_thread\(transfer.wait\)"),
        ):
            runner.run(load())
        with pytest.raises(StepwellUsageError, match=r"running asyncio loop.*transfer\.wait\(\)"):
            transfer.__await__().send(None)
    assert transfer.wait(PATIENCE)
    assert eventfds() == before


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_uvloop_serves_as_well(directories: Directories) -> None:
    def child() -> None:  # its first loop leaves a pipe and a fork handler in the process for good
        import uvloop

        rig = Rig(directories.config(disk=0))
        rig.save(chain(1, 8))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(load(rig))
        rig.close()

    async def load(rig: Rig) -> None:
        with sw.Inbox(8) as inbox:
            own = eventfds()
            with inject("mover.unit", "pause"):
                transfers = [rig.start_load(chain(1, 8), inbox=inbox, deadline=d) for d in (None, math.inf, 0.02)]
                cancelled, waiting = [await waiting_task(transfer) for transfer in transfers[:2]]
                cancelled.cancel()
                await asyncio.wait({cancelled})
                await patiently(transfers[2])
                assert not transfers[0].done
            assert (await patiently(waiting)).ok_pages == 8
            got: list[int] = []
            while len(got) < 3:
                got += (await patiently(inbox.get()))[0].tolist()
            assert sorted(got) == sorted(transfer.tag for transfer in transfers)
            assert eventfds() == own

    assert in_child(child) == 0


def test_no_descriptor_left_is_said_and_harms_nothing(rig: Rig) -> None:
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))

        async def load() -> None:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                with pytest.raises(sw.StepwellError, match=r"await needs an eventfd: .*open files.*ulimit -n"):
                    await transfer
                with pytest.raises(sw.StepwellError, match=r"an inbox needs an eventfd: .*open files.*ulimit -n"):
                    sw.Inbox(1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            waiting = await waiting_task(transfer)
            wait_paused("mover.unit")
            resume("mover.unit")
            assert await patiently(waiting) is transfer

        asyncio.run(load())


def test_wait_refuses_a_timeout_that_is_no_number_and_takes_a_past_one_for_a_look(rig: Rig) -> None:
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 8))
        with pytest.raises(StepwellUsageError, match="timeout: nan"):
            transfer.wait(math.nan)
        assert not transfer.wait(-1.0)
        assert not transfer.wait(0)
    assert transfer.wait(math.inf)
    with pytest.raises(StepwellUsageError, match="timeout: nan"):
        rig.start_load(chain(9, 1)).wait(math.nan)


# ---- inbox -----------------------------------------------------------------------------------------------------------


def test_get_waits_for_completions_and_takes_each_once(rig: Rig) -> None:
    async def receive() -> None:
        with sw.Inbox(8) as inbox:
            with inject("mover.unit", "pause"):
                transfers = [rig.start_load(chain(1, 8), inbox=inbox) for _ in range(3)]
                waiting = await waiting_task(inbox.get(1))
            got = [await patiently(waiting)]
            while len(got) < 3:
                got.append(await patiently(inbox.get(1)))
            assert sorted(int(tags[0]) for tags, _, _ in got) == sorted(t.tag for t in transfers)
            assert [(int(ok[0]), int(status[0])) for _, ok, status in got] == [(8, 0)] * 3

    asyncio.run(receive())


def test_a_loop_over_an_inbox_ends_when_it_is_closed(rig: Rig) -> None:
    async def main() -> None:
        inbox = sw.Inbox(8)
        got: list[int] = []
        has_all = asyncio.Event()

        async def receive() -> None:
            async for tags, _, _ in inbox:
                got.extend(tags.tolist())
                if len(got) == 3:
                    has_all.set()

        receiving = await waiting_task(receive())
        sent = [rig.start_load(chain(1, 8), inbox=inbox).tag for _ in range(3)]
        await patiently(has_all.wait())
        await turn()
        assert not receiving.done()
        inbox.close()
        await patiently(receiving)
        assert sorted(got) == sorted(sent)
        assert (await inbox.get())[0].size == 0

    asyncio.run(main())


def test_closing_an_inbox_ends_every_get_in_every_loop(rig: Rig) -> None:
    inbox = sw.Inbox(8)
    begun = threading.Barrier(4)

    async def receive() -> None:
        waiting = [await waiting_task(inbox.get()) for _ in range(2)]
        begun.wait(PATIENCE)
        for got in await patiently(asyncio.gather(*waiting)):
            assert got[0].size == 0

    def work(number: int) -> None:
        if number < 3:
            asyncio.run(receive())
        else:
            begun.wait(PATIENCE)
            inbox.close()

    run_threads(4, work)


def test_several_consumers_in_several_loops_get_each_completion_once(rig: Rig) -> None:
    inbox = sw.Inbox(200)
    sent: list[int] = []
    got: list[int] = []

    async def receive() -> None:
        async def consume() -> None:
            while (tags := (await inbox.get(1))[0]).size:
                got.extend(tags.tolist())
                if len(got) == 200:
                    inbox.close()

        await patiently(asyncio.gather(*(consume() for _ in range(3))))

    def work(number: int) -> None:
        if number < 2:
            asyncio.run(receive())
        else:
            sent.extend(rig.start_load(chain(1, 2), inbox=inbox).tag for _ in range(200))

    run_threads(3, work)
    assert sorted(got) == sorted(sent)


def test_a_full_inbox_refuses_until_get_has_made_room(rig: Rig) -> None:
    async def receive() -> None:
        with sw.Inbox(1) as inbox:
            first = rig.start_load(chain(1, 8), inbox=inbox)
            refused = rig.start_load(chain(1, 8), inbox=inbox)
            assert (refused.status == QUEUE_FULL).all()
            tags, _, _ = await patiently(inbox.get())
            assert tags.tolist() == [first.tag]
            second = rig.start_load(chain(1, 8), inbox=inbox)
            assert (await patiently(second)).ok_pages == 8
            assert (await patiently(inbox.get()))[0].tolist() == [second.tag]

    asyncio.run(receive())


def test_each_call_that_is_given_an_inbox_has_one_completion_there(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, shared=VOLUME_BYTES)
    whole = rig.store.stats().tiers["shared"].capacity
    assert rig.save(chain(1, whole)).saved == whole
    calls: dict[int, tuple[int, int]] = {}  # by tag: ok pages, status

    def save(tokens: Tokens, inbox: sw.Inbox) -> sw.SaveResult:
        return rig.store.save(tokens, source=rig.pool[: tokens.size // PAGE_TOKENS], inbox=inbox)

    async def receive() -> None:
        with sw.Inbox(16) as inbox:
            got: dict[int, tuple[int, int]] = {}
            loaded = await patiently(rig.start_load(chain(1, 8), inbox=inbox))
            calls[loaded.tag] = (8, 0)
            calls[rig.start_load(chain(7, 8), inbox=inbox).tag] = (0, 0)  # nothing was found
            calls[save(chain(1, 0, tail=2), inbox).transfer.tag] = (0, 0)  # no whole page
            present = save(chain(1, 8), inbox)
            assert present.present == 8
            calls[present.transfer.tag] = (0, 0)
            with rig.store.match(chain(1, whole)) as match:
                refused = save(chain(2, 8), inbox)
                assert (refused.saved, refused.refused) == (0, 8)
                calls[refused.transfer.tag] = (0, 0)
                rig.store.set_epoch(2)
                late = rig.store.load(match, into=rig.pool[:whole], inbox=inbox)
            assert (late.status == int(_core.Status.cancelled)).all()
            calls[late.tag] = (0, int(_core.Status.cancelled))
            rig.rows[:1] = stamps(chain(3, 1))
            calls[save(chain(3, 1), inbox).transfer.tag] = (1, 0)  # into the room of an old epoch's pages
            assert 0 not in calls
            assert len(calls) == 7
            while len(got) < len(calls):
                for tag, ok, status in zip(*(await patiently(inbox.get())), strict=True):
                    assert int(tag) not in got
                    got[int(tag)] = (int(ok), int(status))
            assert got == calls
            assert inbox.poll()[0].size == 0
            assert repr(inbox) == "<Inbox: 0 to poll, 0 under way, 16 of 16 free>"

    asyncio.run(receive())


def test_a_transfer_that_no_inbox_tells_of_is_done_and_has_the_tag_0(rig: Rig) -> None:
    present, absent = chain(1, 8), chain(2, 8)
    with sw.Inbox(1) as inbox:
        first = rig.start_load(present, inbox=inbox)
        assert first.wait(PATIENCE)
        for is_closed in (False, True):
            if is_closed:
                inbox.close()
            loads = [rig.start_load(tokens, inbox=inbox) for tokens in (present, absent)]
            saves = [rig.store.save(tokens, source=rig.pool[:8], inbox=inbox) for tokens in (present, absent)]
            assert [(save.present, save.refused) for save in saves] == [(8, 0), (0, 8)]
            for transfer in [*loads, *(save.transfer for save in saves)]:
                assert transfer.tag == 0
                assert transfer.done
            assert (loads[0].status == QUEUE_FULL).all()
            if not is_closed:
                assert repr(inbox) == "<Inbox: 1 to poll, 0 under way, 0 of 1 free>"
                assert inbox.poll()[0].tolist() == [first.tag]
                assert rig.start_load(absent, inbox=inbox).tag != 0
    assert_unpinned(rig.store)
    assert rig.start_load(absent).tag == 0


def test_a_load_that_the_movers_queue_refuses_has_its_completion_too(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, queue_units=16)
    rig.save(chain(1, 8))
    with sw.Inbox(64) as inbox:
        with inject("mover.unit", "pause"):
            transfers = [rig.start_load(chain(1, 8), inbox=inbox) for _ in range(40)]
            refused = [transfer for transfer in transfers if transfer.done]
            assert refused
            tags, ok_pages, status = inbox.poll()
            assert tags.tolist() == [transfer.tag for transfer in refused]
            assert not ok_pages.any()
            assert (status == QUEUE_FULL).all()
        assert rig.store.flush(PATIENCE)
        assert sorted([*tags.tolist(), *inbox.poll()[0].tolist()]) == sorted(transfer.tag for transfer in transfers)


def test_what_had_nothing_to_move_wakes_who_waits_on_the_inbox(rig: Rig) -> None:
    async def main() -> None:
        with sw.Inbox(8) as inbox:
            waiting = await waiting_task(inbox.get())
            empty = rig.start_load(chain(7, 8), inbox=inbox)
            assert (await patiently(waiting))[0].tolist() == [empty.tag]

    asyncio.run(main())


def test_a_cancelled_get_takes_nothing_and_leaves_nothing(rig: Rig) -> None:
    async def receive() -> None:
        with sw.Inbox(8) as inbox:
            own = eventfds()
            with inject("mover.unit", "pause"):
                transfer = rig.start_load(chain(1, 8), inbox=inbox)
                waiting = await waiting_task(inbox.get())
                waiting.cancel()
                await asyncio.wait({waiting})
                assert eventfds() == own
            await patiently(transfer)
            assert (await patiently(inbox.get()))[0].tolist() == [transfer.tag]

    asyncio.run(receive())


def test_an_inbox_can_be_polled_with_poll(rig: Rig) -> None:
    with sw.Inbox(8) as inbox:
        waiting = select.poll()
        waiting.register(inbox.fileno(), select.POLLIN)
        assert waiting.poll(0) == []
        sent = [rig.start_load(chain(1, 8), inbox=inbox).tag for _ in range(3)]
        got: list[int] = []
        while len(got) < 3:
            assert waiting.poll(PATIENCE * 1000) == [(inbox.fileno(), select.POLLIN)]
            got += inbox.poll()[0].tolist()
        assert sorted(got) == sorted(sent)
        assert waiting.poll(0) == []


def test_the_callers_own_reader_on_an_inbox_and_get_do_not_meet(rig: Rig) -> None:
    async def receive() -> None:
        loop = asyncio.get_running_loop()
        with sw.Inbox(8) as inbox:
            seen = asyncio.Event()

            def look() -> None:
                seen.set()
                loop.remove_reader(inbox.fileno())

            with inject("mover.unit", "pause"):
                loop.add_reader(inbox.fileno(), look)
                transfer = rig.start_load(chain(1, 8), inbox=inbox)
                waiting = await waiting_task(inbox.get())
            await patiently(seen.wait())
            assert (await patiently(waiting))[0].tolist() == [transfer.tag]

    asyncio.run(receive())


@pytest.mark.parametrize("capacity", [0, -1, 1 << 21])
def test_an_inbox_of_no_or_endless_room_is_refused(capacity: int) -> None:
    with pytest.raises(StepwellUsageError, match=f"capacity: {capacity}; give at least 1"):
        sw.Inbox(capacity)
    with sw.Inbox(1) as inbox, pytest.raises(StepwellUsageError, match="most: 0"):
        inbox.poll(0)


# ---- calls that wait, from a loop ------------------------------------------------------------------------------------


def test_calls_that_wait_go_through_a_thread(directories: Directories) -> None:
    rig = Rig(directories.config())
    keys = [b"key%d" % number for number in range(4)]

    async def serve() -> None:
        store = rig.store
        rig.rows[:4] = 7
        saved = await asyncio.to_thread(store.save_keys, keys, source=rig.pool[:4])
        assert (saved == sw.SaveOutcome.STORED).all()
        loads = [asyncio.to_thread(store.load_keys, keys, into=rig.pool[4 * n : 4 * n + 4]) for n in range(1, 5)]
        for ok in await patiently(asyncio.gather(*loads)):
            assert ok.all()
        assert (rig.rows[:20] == 7).all()
        assert await asyncio.to_thread(store.flush)
        verified, flushed = await asyncio.gather(asyncio.to_thread(store.verify), asyncio.to_thread(store.flush))
        assert verified.pages == 8
        assert verified.damaged == 0
        assert flushed
        await asyncio.to_thread(store.close)
        assert store.closed

    asyncio.run(serve())


def test_a_call_in_a_thread_outlives_its_cancelled_task_and_ends_before_the_loop(rig: Rig) -> None:
    keys = [b"key%d" % number for number in range(4)]
    rig.rows[:4] = 7
    rig.store.save_keys(keys, source=rig.pool[:4])
    rig.rows[4:8] = 0

    async def serve() -> None:
        with inject("mover.unit", "pause"):
            task = await waiting_task(asyncio.to_thread(rig.store.load_keys, keys, into=rig.pool[4:8]))
            wait_paused("mover.unit")
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()

    asyncio.run(serve())  # joins the thread
    assert (rig.rows[4:8] == 7).all()


def test_closing_the_store_in_a_thread_ends_what_is_awaited(directories: Directories) -> None:
    rig = Rig(directories.config(disk=0, close_timeout=0.0))
    rig.save(chain(1, 8))

    async def serve() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8))
            waiting = await waiting_task(transfer)
            wait_paused("mover.unit")
            closing = asyncio.create_task(asyncio.to_thread(rig.store.close))
            await turn()
        await patiently(closing)
        assert await patiently(waiting) is transfer
        assert transfer.done

    asyncio.run(serve())


# ---- forked children -------------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_so_by_a_transfer_and_an_inbox_and_never_waits(rig: Rig) -> None:
    with inject("mover.unit", "pause"), sw.Inbox(8) as inbox:
        transfer = rig.start_load(chain(1, 8), inbox=inbox, deadline=PATIENCE)
        wait_paused("mover.unit")
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            transfer.wait()

        waiting = threading.Thread(target=wait)
        waiting.start()
        begun.wait()

        async def get() -> None:
            await inbox.get()

        async def load() -> None:
            await transfer

        def child() -> None:
            calls: list[Callable[[], Any]] = [
                lambda: transfer.done,
                transfer.wait,
                lambda: transfer.wait(0),
                lambda: transfer.status,
                lambda: transfer.ok_pages,
                lambda: transfer.landed(0),
                lambda: transfer.seconds,
                transfer.result,
                transfer.cancel,
                transfer.revoke,
                transfer.enforce_deadline,
                lambda: asyncio.run(load()),
                lambda: asyncio.run(get()),
                inbox.poll,
                inbox.fileno,
                inbox.close,
                lambda: inbox.closed,
            ]
            for call in calls:
                with pytest.raises(ForkedError, match=r"(transfer|inbox) of process \d+ was used in its child.*spawn"):
                    call()
            assert repr(transfer) == f"<Transfer {transfer.tag}: 8 pages, of another process>"
            assert repr(inbox) == "<Inbox: of another process>"
            assert transfer.pages == 8
            assert not transfer.source_released

        assert in_child(child) == 0
        resume("mover.unit")
        assert transfer.wait(PATIENCE)
        waiting.join()
        assert inbox.poll()[0].tolist() == [transfer.tag]


def test_a_store_of_a_forked_childs_own_refuses_its_parents_inbox(rig: Rig, directories: Directories) -> None:
    with sw.Inbox(8) as inbox:

        def child() -> None:
            other = Rig(Directories(directories.shared.with_name("child"), directories.disk).config(disk=0))
            other.rows[:8] = stamps(chain(1, 8))
            result = other.store.save(chain(1, 8), source=other.pool[:8], inbox=inbox)
            assert (result.saved, result.refused) == (0, 8)
            assert other.save(chain(1, 8)).saved == 8
            assert (other.start_load(chain(1, 8), inbox=inbox).status == QUEUE_FULL).all()
            assert other.start_load(chain(7, 8), inbox=inbox).tag == 0
            assert_unpinned(other.store)
            other.close()

        assert in_child(child) == 0
        assert rig.start_load(chain(1, 8), inbox=inbox).wait(PATIENCE)
        assert inbox.poll()[0].size == 1


def test_what_a_forked_child_lets_go_of_does_not_wake_or_silence_its_parents_loop(rig: Rig) -> None:
    async def load() -> None:
        with inject("mover.unit", "pause"):
            transfer = rig.start_load(chain(1, 8))
            coroutine = wait_for(transfer)
            task = asyncio.create_task(coroutine)
            await turn()

            def child() -> None:
                coroutine.close()
                gc.collect()

            assert in_child(child) == 0
            await turn()
            assert not task.done()
        await patiently(task)
        assert transfer.ok_pages == 8

    async def wait_for(transfer: sw.Transfer) -> None:
        await transfer

    asyncio.run(load())


# ---- repr ------------------------------------------------------------------------------------------------------------


def test_a_transfer_and_an_inbox_say_what_they_are(rig: Rig) -> None:
    inbox = sw.Inbox(4)
    assert repr(inbox) == "<Inbox: 0 to poll, 0 under way, 4 of 4 free>"
    with inject("mover.before_copy", "pause", nth=3):
        transfer = rig.start_load(chain(1, 8), inbox=inbox)
        wait_paused("mover.before_copy")
        assert repr(transfer) == f"<Transfer {transfer.tag}: 2 of 8 pages ok, under way>"
        assert repr(inbox) == "<Inbox: 0 to poll, 1 under way, 3 of 4 free>"
        transfer.revoke()
        assert repr(transfer) == f"<Transfer {transfer.tag}: 2 of 8 pages ok, done, deadline>"
    assert rig.store.flush(PATIENCE)
    assert repr(inbox) == "<Inbox: 1 to poll, 0 under way, 3 of 4 free>"
    inbox.close()
    assert repr(inbox) == "<Inbox: closed>"
    refused = rig.start_load(chain(1, 8), inbox=inbox)
    assert repr(refused) == "<Transfer 0: 0 of 8 pages ok, done, queue_full>"
    assert repr(rig.start_load(chain(9, 1))) == "<Transfer 0: 0 of 0 pages ok, done>"
    rig.store.close()
    assert "done" in repr(transfer)


def test_a_store_says_what_it_is_open_closed_forked_or_never_opened(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, host=1 << 16)
    rig.save(chain(1, 8))
    capacity = {name: tier.capacity for name, tier in rig.store.stats().tiers.items()}
    said = f"<PageStore stamped 1: pages in host 0/{capacity['host']}, shared 8/{capacity['shared']}>"
    assert repr(rig.store) == said

    def look(_: int) -> None:
        for _ in range(100):
            assert repr(rig.store) in (said, "<PageStore stamped 1: closed>")

    def child() -> None:
        assert repr(rig.store) == "<PageStore stamped 1: of another process>"

    assert in_child(child) == 0
    run_threads(3, lambda number: look(number) if number else rig.close())
    assert repr(rig.store) == "<PageStore stamped 1: closed>"
    with pytest.raises(StoreClosedError, match=r"was closed: open another one with PageStore\(config\)"):
        rig.store.match(chain(1, 8))
    half = sw.PageStore.__new__(sw.PageStore)
    with pytest.raises(StepwellUsageError, match="give a StoreConfig"):
        half.__init__(7)  # type: ignore[misc, arg-type]
    assert repr(half) == "<PageStore: not open>"


# ---- everything at once ----------------------------------------------------------------------------------------------


def test_hundreds_of_awaits_in_four_loops_with_random_cancels_leave_nothing(rig: Rig) -> None:
    before, threads = eventfds(), threading.active_count()
    slots, rounds, pages = 4, 40, 8
    expected = stamps(chain(1, 8))
    inbox = sw.Inbox(32)

    async def one(number: int, slot: int, random_of_thread: random.Random) -> None:
        rows = slice(8 + (slots * number + slot) * pages, 8 + (slots * number + slot + 1) * pages)
        for _ in range(rounds):
            rig.rows[rows] = 0xEE
            with rig.store.match(chain(1, 8)) as match:
                transfer = rig.store.load(
                    match,
                    into=rig.pool[rows],
                    order=random_of_thread.choice(["page", "layer"]),
                    deadline=random_of_thread.choice([None, 0.0, 0.0005, PATIENCE]),
                    inbox=random_of_thread.choice([None, inbox]),
                )
            other, task = (asyncio.ensure_future(transfer) for _ in range(2))
            for _ in range(random_of_thread.randrange(3)):
                await turn()
            if random_of_thread.random() < 0.5:
                task.cancel()
            try:
                await task
                ok = transfer.ok
            except asyncio.CancelledError:
                transfer.revoke()
                ok = transfer.ok
            assert np.array_equal(rig.rows[rows][ok], expected[ok])
            rig.rows[rows] = 0xAB  # no byte lands any more
            await other
            await turn()
            assert (rig.rows[rows] == 0xAB).all()

    async def consume() -> None:
        async for _ in inbox:
            await turn()

    async def serve(number: int) -> None:
        random_of_thread = random.Random(number)
        consumers = [asyncio.create_task(consume()) for _ in range(2)]
        await asyncio.gather(*(one(number, slot, random_of_thread) for slot in range(slots)))
        for consumer in consumers:
            consumer.cancel()
        await asyncio.wait(consumers)

    of_inbox = inbox.fileno()
    run_threads(4, lambda number: asyncio.run(serve(number)))
    inbox.close()
    assert rig.store.flush(PATIENCE)
    assert rig.store.stats().leases == 0
    assert threading.active_count() == threads
    assert set(eventfds()) - set(before) == {str(of_inbox)}


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_snippets_of_the_page_run(directories: Directories) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {"shared_dir": str(directories.shared), "disk_dir": str(directories.disk)}
    for block in blocks:
        exec(compile(block, str(DOC), "exec"), names)
    store = names["store"]
    assert isinstance(store, sw.PageStore)
    assert store.closed
    names.clear()  # the functions among them hold it
