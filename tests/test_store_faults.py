"""What the store does when the world fails: a miss or a precise error, no wrong byte, no leak, and it goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fail_every_call import FAULTS, OPERATIONS, fail_nth
from stepwell.clock import ManualClock
from stepwell.errors import BudgetError, ForkedError, PoisonedError, StepwellError, StoreClosedError
from stepwell.health import MOST_PROBE_SECONDS
from stepwell.index import Tier
from stepwell.testing.faults import fail_each, inject, resume, wait_paused
from store_kit import (
    BOTH,
    DISK_ONLY,
    PAGE_BYTES,
    PAGE_TOKENS,
    SHARED_ONLY,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    Rig,
    assert_unpinned,
    assert_whole,
    chain,
    stamps,
)

ERRORS = pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])


# The n-th call fails


@ERRORS
@pytest.mark.parametrize("is_warm", [False, True], ids=["empty", "warm"])
def test_an_open_that_fails_anywhere_says_so_and_leaves_nothing(
    directories: Directories, open_rig: OpenRig, error: int, is_warm: bool
) -> None:
    if is_warm:
        rig = open_rig(**BOTH)
        rig.save(chain(1, 8))
        rig.close()
    descriptors = set(os.listdir("/proc/self/fd"))
    for fault in fail_each("file.*", error):
        rig = None
        with fault, contextlib.suppress(StepwellError):
            rig = open_rig(**BOTH)
        if rig is not None:
            assert rig.load(chain(1, 8)) in ((0, 8) if is_warm else (0,))
            assert_whole(rig.store)
            rig.close()
        left = set(os.listdir("/proc/self/fd")) - descriptors
        assert not left, f"call {fault.nth}: {[os.readlink(f'/proc/self/fd/{name}') for name in left]}"
    rig = open_rig(**BOTH)
    assert rig.save(chain(2, 8)).saved == 8
    assert rig.load(chain(2, 8)) == 8
    if is_warm:
        assert rig.load(chain(1, 8)) == 8, "a failed open lost what was there"


@pytest.mark.parametrize("sizes", [BOTH, SHARED_ONLY, DISK_ONLY], ids=["both", "shared", "disk"])
@pytest.mark.parametrize("point", ["file.*", "volume.*"])
@ERRORS
def test_saves_loads_and_evictions_survive_a_failure_anywhere(
    open_rig: OpenRig, sizes: dict[str, int], point: str, error: int
) -> None:
    clock = ManualClock()
    rig = open_rig(**sizes, clock=clock)
    for fault in fail_each(point, error):
        number = fault.nth
        with fault:
            rig.save(chain(number, 3))
            rig.load(chain(number, 3))  # compares what came
            rig.store.evict(Tier.SHARED, 2)
            rig.load(chain(number, 3))
            rig.store.forget(chain(number, 3), keep=PAGE_TOKENS)
            rig.store.flush()
        rig.round()  # a tier that had no room is read-only now
        clock.advance(MOST_PROBE_SECONDS)
        rig.round()  # it was tried, and is not
        assert {tier.state for tier in rig.store.stats().tiers.values()} == {"serving"}
        assert_whole(rig.store)
        assert_unpinned(rig.store)
        # What the failed calls left is right, or gone; and the next save finds everything in order.
        rig.load(chain(number, 3))
        assert rig.save(chain(number, 3)).transfer.ok.all()
        assert rig.load(chain(number, 3)) == 3
    assert not rig.store.stats().poisoned


@pytest.mark.parametrize("sizes", [BOTH, DISK_ONLY], ids=["both", "disk"])
def test_short_transfers_are_completed(open_rig: OpenRig, sizes: dict[str, int]) -> None:
    rig = open_rig(**sizes)
    with inject("file.pwrite", "short", value=512):  # what O_DIRECT can go on from
        assert rig.save(chain(1, 3)).transfer.ok.all()
    with inject("file.pread", "short", value=512):
        assert rig.load(chain(1, 3)) == 3


@ERRORS
def test_a_close_that_fails_anywhere_gives_everything_back(open_rig: OpenRig, error: int) -> None:
    for fault in fail_each("file.*", error):
        rig = open_rig(**BOTH)
        rig.save(chain(fault.nth, 3))
        with fault, contextlib.suppress(StepwellError):
            rig.close()
        rig = open_rig(**BOTH)
        assert rig.load(chain(fault.nth, 3)) == 3
        rig.close()


@ERRORS
def test_the_keepers_round_survives_a_failure_anywhere(open_rig: OpenRig, error: int) -> None:
    clock = ManualClock()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=2 * VOLUME_BYTES, clock=clock, low_watermark=0.4, high_watermark=0.5)
    for fault in fail_each("file.*", error):
        for number in range(8):
            rig.save(chain(number, 12))
        clock.advance(100.0)  # all that is due, is due
        with fault, contextlib.suppress(StepwellError, OSError):  # as the keeper does, but for its log line
            rig.round()
        assert_whole(rig.store)
        if fault.nth > 200:
            break
    clock.advance(100.0)
    rig.round()
    assert rig.save(chain(100, 8)).transfer.ok.all()
    assert rig.load(chain(100, 8)) == 8


def test_a_full_disk_is_a_save_that_fails_not_a_store_that_ends(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY)
    rig.save(chain(1, 4))
    with inject("file.pwrite", "errno", value=errno.ENOSPC):
        result = rig.save(chain(2, 4))
        assert not result.transfer.ok.any()
        with pytest.raises(StepwellError, match="page 0 of 4"):
            result.transfer.result(timeout=30.0)
        assert rig.load(chain(1, 4)) == 4
        assert rig.load(chain(2, 4)) == 0
    assert rig.store.stats().io_errors > 0
    assert rig.save(chain(2, 4)).transfer.ok.all()
    assert rig.load(chain(2, 4)) == 4


def test_a_page_that_cannot_be_read_is_not_offered_for_ever(open_rig: OpenRig) -> None:
    """A lookup that said hit cannot loop: what failed to load is gone, or served by another tier."""
    rig = open_rig(**DISK_ONLY)
    rig.save(chain(1, 4))
    with inject("file.pread", "errno", value=errno.EIO):
        assert rig.load(chain(1, 4)) == 0
        rig.store.flush()
        assert rig.load(chain(1, 4)) == 0
        with rig.store.match(chain(1, 4)) as match:
            assert match.pages == 0, "a page that failed is still offered"
    rig.round()
    assert rig.save(chain(1, 4)).transfer.ok.all()
    assert rig.load(chain(1, 4)) == 4


# Damage


def flip(path: Path, where: bytes) -> None:
    """Flip a bit in the middle of the only place in a file where some bytes are."""
    data = path.read_bytes()
    assert data.count(where) == 1
    offset = data.index(where) + len(where) // 2
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[offset] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize(("tier", "suffix"), [(Tier.SHARED, "vol"), (Tier.DISK, "pages")])
@pytest.mark.parametrize("order", ["page", "layer"])
def test_a_flipped_bit_is_a_miss_that_is_counted_quarantined_and_mended(
    open_rig: OpenRig, directories: Directories, tier: Tier, suffix: str, order: str
) -> None:
    rig = open_rig(**(SHARED_ONLY if tier is Tier.SHARED else DISK_ONLY))
    name = tier.name.lower()
    rig.save(chain(1, 6))
    [path] = directories.volumes(suffix)
    flip(path, stamps(chain(1, 6))[3].tobytes())
    assert rig.load(chain(1, 6), order=order) == 3
    stats = rig.store.stats()
    assert stats.checksum_failures == 1
    assert stats.misses["corrupt"] == 1
    assert stats.tiers[name].quarantined == 1
    # Behind the gap nothing is reported, although it is there (invariant 5).
    assert rig.load(chain(1, 6)) == 3
    rig.round()
    stats = rig.store.stats()
    assert (stats.tiers[name].quarantined, stats.tiers[name].resident) == (0, 5)
    again = rig.save(chain(1, 6))
    assert (again.saved, again.present) == (1, 5)
    assert rig.load(chain(1, 6)) == 6


def test_what_is_damaged_in_shared_memory_is_served_from_disk(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    [path] = directories.volumes("vol")
    flip(path, stamps(chain(1, 4))[0].tobytes())
    assert rig.load(chain(1, 4)) == 4
    stats = rig.store.stats()
    assert (stats.checksum_failures, stats.retried_pages, stats.rescued_pages) == (1, 1, 1)
    assert stats.misses["corrupt"] == 0
    rig.round()
    rig.load(chain(1, 4))
    rig.store.flush()
    assert rig.pages(Tier.SHARED) == 4


@pytest.mark.parametrize("suffix", ["vol", "meta"])
def test_damaged_records_are_misses_after_a_restart_and_the_rest_is_right(
    open_rig: OpenRig, directories: Directories, suffix: str
) -> None:
    sizes = SHARED_ONLY if suffix == "vol" else DISK_ONLY
    rig = open_rig(**sizes)
    for number in range(8):
        rig.save(chain(number, 6))
    rig.close()
    [path] = directories.volumes(suffix)
    data = bytearray(path.read_bytes())
    random = np.random.default_rng(0)
    for offset in random.integers(4096, 4096 + 192 * 48, 12):
        data[offset] ^= 1 << int(random.integers(8))
    path.write_bytes(data)
    rig = open_rig(**sizes)
    found = [rig.load(chain(number, 6)) for number in range(8)]
    assert 0 < sum(found) < 48
    assert_whole(rig.store)
    for number in range(8):
        rig.save(chain(number, 6))
        assert rig.load(chain(number, 6)) == 6


@pytest.mark.parametrize("damage", ["header", "empty", "short", "zeros", "noise"])
@pytest.mark.parametrize("suffix", ["vol", "meta", "pages"])
def test_a_corrupt_volume_costs_a_cold_start_and_nothing_else(
    open_rig: OpenRig, directories: Directories, suffix: str, damage: str
) -> None:
    sizes = SHARED_ONLY if suffix == "vol" else DISK_ONLY
    rig = open_rig(**sizes)
    rig.save(chain(1, 6))
    rig.close()
    [path] = directories.volumes(suffix)
    size = path.stat().st_size
    match damage:
        case "header":
            with path.open("r+b") as file:
                file.write(b"garbage!")
        case "empty":
            os.truncate(path, 0)
        case "short":
            os.truncate(path, size // 2)
        case "zeros":
            path.write_bytes(bytes(size))
        case "noise":
            path.write_bytes(np.random.default_rng(0).bytes(size))
    rig = open_rig(**sizes)
    rig.load(chain(1, 6))  # compares what came
    rig.round()
    assert_whole(rig.store)
    assert rig.save(chain(2, 6)).transfer.ok.all()
    assert rig.load(chain(2, 6)) == 6


def test_a_truncated_volume_is_a_miss(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 4))
    [path] = directories.volumes("vol")
    size = path.stat().st_size
    os.truncate(path, 0)
    assert rig.load(chain(1, 4)) == 0
    assert rig.store.stats().bus_faults > 0
    assert not rig.save(chain(2, 4)).transfer.ok.any()
    with rig.store.match(chain(1, 4)) as match:
        assert match.pages == 0, "a page that failed is still offered"
    os.truncate(path, size)
    rig.round()
    assert_whole(rig.store)


# Deadlines against a world that stands still


@pytest.mark.parametrize("order", ["page", "layer"])
def test_no_byte_lands_once_a_deadline_has_passed(open_rig: OpenRig, order: str) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 6))
    with inject("file.pread", "pause"):
        transfer = rig.start_load(chain(1, 6), order=order, deadline=1.0)
        wait_paused("file.pread")
        assert not transfer.wait(timeout=0)
        clock.advance(1.0)
        assert transfer.wait()
        rig.rows[:] = 0xAB  # the engine has its memory back
    rig.store.flush()
    assert (rig.rows == 0xAB).all()
    assert transfer.ok_pages == 0
    assert rig.store.stats().misses["deadline"] == 6
    assert rig.load(chain(1, 6)) == 6


def test_a_deadline_that_passes_half_way_keeps_what_has_landed(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**SHARED_ONLY, clock=clock)
    rig.save(chain(1, 6))
    with inject("mover.before_copy", "pause", nth=4):
        transfer = rig.start_load(chain(1, 6), deadline=1.0)
        wait_paused("mover.before_copy")
        clock.advance(2.0)
        assert transfer.wait()
        assert transfer.ok_pages == 3
        rig.rows[3:] = 0xAB
    rig.store.flush()
    assert transfer.ok_pages == 3
    assert np.array_equal(rig.rows[:3], stamps(chain(1, 3)))
    assert (rig.rows[3:] == 0xAB).all()


def test_the_keeper_enforces_a_deadline_that_nobody_waits_for(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**SHARED_ONLY, clock=clock)
    rig.save(chain(1, 4))
    with inject("mover.unit", "pause"):
        transfer = rig.start_load(chain(1, 4), deadline=1.0)
        wait_paused("mover.unit")
        clock.advance(1.0)
        rig.round()
        rig.rows[:] = 0xAB
    rig.store.flush()
    assert (rig.rows == 0xAB).all()
    assert transfer.done
    assert transfer.ok_pages == 0


def test_layers_land_in_their_order(open_rig: OpenRig) -> None:
    """`layers_done` says 1 only when layer 0 of every page is there, verified."""
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 6))
    seen = []
    with rig.store.match(chain(1, 6)) as match:
        rig.rows[:6] = 0xEE
        transfer = rig.store.load(match, into=rig.pool[:6], order="layer")
        while not transfer.done:
            layers = transfer.layers_done
            half = PAGE_BYTES // 2
            if layers >= 1:
                assert np.array_equal(rig.rows[:6, :half], stamps(chain(1, 6))[:, :half])
            seen.append(layers)
    assert transfer.layers_done == 2
    assert seen == sorted(seen)


def test_a_save_that_is_cancelled_returns_its_claims(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    with inject("mover.unit", "pause"):
        result = rig.save(chain(1, 4), wait=False)
        wait_paused("mover.unit")
        result.transfer.cancel()
    assert result.transfer.wait()
    assert not result.transfer.ok.any()
    assert (rig.pages(Tier.SHARED), rig.pages(Tier.DISK)) == (0, 0)
    assert rig.save(chain(1, 4)).saved == 4


def test_a_queue_that_is_full_refuses_at_once_and_returns_every_claim(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY, queue_units=16)
    rig.save(chain(1, 4))
    with inject("mover.unit", "pause"):
        running = [rig.start_load(chain(1, 4)) for _ in range(40)]
        refused = [transfer for transfer in running if transfer.done]
        assert refused
        assert all(transfer.ok_pages == 0 for transfer in refused)
        late = rig.save(chain(2, 4), wait=False)
        assert (late.saved, late.refused) == (0, 4)
    rig.store.flush()
    assert rig.store.stats().misses["full"] == 4 * len(refused)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def test_a_bug_in_a_worker_makes_the_store_miss_and_say_so(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 4))
    with inject("mover.assertion", "errno", nth=1, value=errno.EINVAL):
        transfer = rig.start_load(chain(1, 4))
        assert transfer.wait()
    assert transfer.ok_pages == 0
    assert rig.store.match(chain(1, 4)).pages == 0
    with pytest.raises(PoisonedError, match="misses only"):
        rig.store.stats()
    with pytest.raises(PoisonedError, match="misses only"):
        rig.close()
    rig.close()
    assert open_rig(**SHARED_ONLY).load(chain(1, 4)) == 4


# The ends of a process


def run_script(text: str, directories: Directories, *, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    head = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom store_kit import *\n"
        f"directories = Directories(Path({str(directories.shared)!r}), Path({str(directories.disk)!r}))\n"
        "rig = Rig(directories.config(shared=VOLUME_BYTES, disk=VOLUME_BYTES), keeper=True)\n"
    )
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", head + text], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    ("script", "returncode"),
    [
        ("rig.save(chain(1, 4))", 0),
        ("for i in range(20): rig.save(chain(i, 6), wait=False); rig.pool", 0),
        ("m = rig.store.match(chain(1, 4)); rig.save(chain(1, 4)); n = rig.store.match(chain(1, 4))", 0),
        ("rig.save(chain(1, 4)); raise RuntimeError('main')", 1),
        ("import threading; t = threading.Thread(target=sys.exit); t.start(); t.join(); rig.save(chain(1, 4))", 0),
        ("rig.save(chain(1, 4)); import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("rig.save(chain(1, 4)); import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()", 130),
        ("rig.save(chain(1, 4)); rig.close(); rig.close()", 0),
        ("rig.save(chain(1, 4)); store = rig.store; del rig", 0),
        ("import sys; sys.store = rig.store; sys.rig = rig; rig.save(chain(1, 4))", 0),
    ],
)
def test_a_process_that_never_closes_its_store_ends(
    directories: Directories, open_rig: OpenRig, script: str, returncode: int
) -> None:  # C065
    done = run_script(script, directories)
    if returncode == 130:  # KeyboardInterrupt ends Python by the signal
        assert done.returncode in (-2, 130), done.stderr
    else:
        assert done.returncode == returncode, done.stderr
    assert "Fatal" not in done.stderr
    assert "leaked" not in done.stderr
    open_rig(**BOTH).save(chain(900, 2))  # nobody holds anything any more


def test_a_forked_child_is_refused_and_harms_nothing(open_rig: OpenRig) -> None:  # C072
    rig = open_rig(**BOTH, keeper=True)
    rig.save(chain(1, 4))
    held = rig.store.match(chain(1, 4))
    calls: list[Callable[[], object]] = [
        lambda: rig.store.match(chain(1, 4)),
        lambda: rig.store.save(chain(2, 4), source=rig.pool[:4]),
        lambda: rig.store.load(held, into=rig.pool[:4]),
        lambda: rig.store.probe([b"k"]),
        lambda: rig.store.load_keys([b"k"], into=rig.pool[:1]),
        lambda: rig.store.save_keys([b"k"], source=rig.pool[:1]),
        lambda: rig.store.evict(Tier.SHARED, 1),
        lambda: rig.store.forget(chain(1, 4)),
        rig.store.clear,
        rig.store.stats,
        rig.store.flush,
        rig.store.verify,
        lambda: rig.store.set_epoch(3),
        lambda: rig.store.lend(rig.rows),
    ]
    for ending in ("_exit", "exit"):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = b""
            try:
                for call in calls:
                    try:
                        call()
                        said += b"?"
                    except ForkedError:
                        said += b"F"
                rig.store.close()
                os.write(write, said)
                if ending == "exit":
                    del held
                    import atexit

                    atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.close(write)
        said = os.read(read, 100)
        os.close(read)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert said == b"F" * len(calls)
        for number in range(10, 30):
            assert rig.save(chain(number, 4)).transfer.ok.all()
            assert rig.load(chain(number, 4)) == 4
    held.close()
    assert rig.load(chain(1, 4)) == 4


def test_a_subprocess_inherits_nothing_and_a_lock_ends_with_its_store(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        held = [os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")]
        assert not [path for path in held if str(directories.shared) in path or str(directories.disk) in path]
        rig.close()
        rig = open_rig(**BOTH)
        assert rig.load(chain(1, 4)) == 4
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()


def test_opening_and_closing_200_times_leaks_nothing(open_rig: OpenRig, directories: Directories) -> None:  # C067
    for number in range(200):
        rig = open_rig(host=16 * 4096, **BOTH, keeper=number % 2 == 0)
        if number % 20 == 0:
            rig.save(chain(number, 3))
        rig.close()
        rig.close()
    assert len(directories.volumes("vol")) == 1
    assert len(directories.volumes("pages")) == 1
    assert [name for name in directories.names() if name.startswith(("p-", "t-", "x-"))] == []


def test_a_store_that_is_dropped_without_close_gives_everything_back(directories: Directories, no_leaks: None) -> None:
    rig = Rig(directories.config(**BOTH), keeper=True)
    rig.save(chain(1, 4))
    del rig
    rig = Rig(directories.config(**BOTH), keeper=True)
    assert rig.load(chain(1, 4)) == 4
    rig.close()


def test_a_store_can_be_closed_by_another_thread_while_others_use_it(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH, keeper=True)
    started = threading.Barrier(3)
    errors: list[StoreClosedError] = []

    def use(seed: int) -> None:
        started.wait()
        rows = np.zeros((4, PAGE_BYTES), np.uint8)
        try:
            pool = rig.store.lend(rows.reshape(4, 2, 2, PAGE_TOKENS, 2, 32), axes="slot layer stream token head dim")
            for number in range(100_000):
                tokens = chain(seed * 1000 + number % 30, 4)
                rows[:] = stamps(tokens)
                rig.store.save(tokens, source=pool[:]).transfer.wait()
                with rig.store.match(tokens) as match:
                    rig.store.load(match, into=pool[: match.pages]).wait()
        except StoreClosedError as error:
            errors.append(error)

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(2)]
    for user in users:
        user.start()
    started.wait()
    closer = threading.Thread(target=rig.close)
    closer.start()
    for thread in (*users, closer):
        thread.join()
    assert len(errors) == 2  # any other is an unhandled exception of its thread, and fails the test


def test_two_stores_in_one_process_on_the_same_directories_share_one_budget(
    open_rig: OpenRig, directories: Directories
) -> None:
    sizes = {"shared": 2 * VOLUME_BYTES, "disk": 2 * VOLUME_BYTES}
    first, second = open_rig(**sizes), open_rig(**sizes)
    assert len(directories.volumes("vol")) == 2
    first.save(chain(1, 4))
    second.save(chain(2, 4))
    assert (first.load(chain(1, 4)), second.load(chain(2, 4))) == (4, 4)
    third = open_rig(**sizes)  # no room: it serves nothing, and says so
    assert {third.store.stats().tiers[name].capacity for name in ("shared", "disk")} == {0}
    refused = third.save(chain(3, 4))
    assert (refused.saved, refused.refused) == (0, 4)
    third.close()
    first.close()
    second.round()
    assert second.load(chain(2, 4)) == 4
    total = sum(p.stat().st_size for p in directories.shared.glob("v-*"))
    assert total <= 2 * VOLUME_BYTES


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_a_stalled_read_does_not_hold_up_a_probe_or_a_save_elsewhere(open_rig: OpenRig, tier: str) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    with inject("file.pread", "pause", nth=1):
        transfer = rig.start_load(chain(1, 4))
        wait_paused("file.pread")
        with rig.store.match(chain(1, 4)) as match:
            assert match.pages == 4
        resume("file.pread")
    assert transfer.wait()
    assert transfer.ok_pages == 4


# Every call of the file layer in turn: tests/fail_every_call.py has all of it, here is a sample


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        (operation, fault)
        for number, operation in enumerate(OPERATIONS)
        for fault in (list(FAULTS)[number % len(FAULTS)], list(FAULTS)[(number + 5) % len(FAULTS)])
    ],
)
def test_whichever_call_fails_or_is_short_nothing_is_wrong_left_or_broken(
    no_leaks: None, operation: str, fault: str
) -> None:
    for nth in (1, 4, 12):
        fail_nth(operation, fault, nth)


# Machines that are small


def test_a_tmpfs_that_is_full_refuses_with_numbers(tmp_path: Path, no_leaks: None) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode()!r}")
    try:
        directories = Directories(shared=small / "shared", disk=tmp_path / "disk")
        with pytest.raises(BudgetError, match="shared"):
            Rig(directories.config(shared=8 * VOLUME_BYTES, disk=0))
        rig = Rig(directories.config(shared=3 * VOLUME_BYTES, disk=0))
        (small / "other").write_bytes(bytes(700 * 1024))  # somebody else takes the room that is left
        for number in range(12):
            rig.save(chain(number, 24))
            rig.round()
        stats = rig.store.stats().tiers["shared"]
        assert (stats.state, stats.capacity) == ("serving", rig.store._room._tiers[Tier.SHARED].members[0].count)
        assert rig.load(chain(11, 24)) == 24
        rig.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_directory_that_becomes_read_only_is_read_on(tmp_path: Path, no_leaks: None) -> None:
    place = tmp_path / "place"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode()!r}")
    clock = ManualClock()
    try:
        directories = Directories(shared=tmp_path / "shared", disk=place / "disk")
        rig = Rig(directories.config(shared=0, disk=2 * VOLUME_BYTES), clock=clock)
        rig.save(chain(1, 4))
        # What the kernel makes of a disk that fails: the descriptors stay, and every write through them is EROFS.
        remounted = subprocess.run(["mount", "-o", "remount,ro", str(place)], capture_output=True)
        if remounted.returncode != 0:  # files that are open for writing keep it from that here: the fault instead
            with inject("file.pwrite", "errno", value=errno.EROFS):
                assert not rig.save(chain(2, 4)).transfer.ok.any()
                rig.round()
                assert rig.store.stats().tiers["disk"].state == "read-only"
                assert rig.load(chain(1, 4)) == 4
        else:
            assert not rig.save(chain(2, 4)).transfer.ok.any()
            rig.round()
            assert rig.store.stats().tiers["disk"].state == "read-only"
            assert rig.load(chain(1, 4)) == 4
            subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        clock.advance(MOST_PROBE_SECONDS)
        rig.round()
        assert rig.store.stats().tiers["disk"].state == "serving"
        assert rig.save(chain(2, 4)).transfer.ok.all()
        rig.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_small_memory_cgroup_refuses_with_numbers_and_nobody_is_killed(
    directories: Directories, no_leaks: None
) -> None:
    group = Path(f"/sys/fs/cgroup/memory/stepwell-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error}")
    script = (
        "import os, sys\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom store_kit import *\nfrom stepwell.errors import BudgetError\n"
        f"directories = Directories(Path({str(directories.shared)!r}), Path({str(directories.disk)!r}))\n"
        "try:\n"
        "    Rig(directories.config(shared=1 << 30, disk=0))\n"
        "except BudgetError as error:\n"
        "    assert 'cgroup' in str(error), error\n"
        "    print('refused:', error)\n"
        "rig = Rig(directories.config(shared=4 * VOLUME_BYTES, disk=0))\n"
        "assert rig.save(chain(1, 4)).transfer.ok.all() and rig.load(chain(1, 4)) == 4\n"
        "rig.close()\nprint('alive')\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout
    assert "alive" in done.stdout
