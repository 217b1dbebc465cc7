"""A tier that fails goes out of service with one line in the log; the rest serves on, and it comes back."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from case_kit import bad_read
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.errors import PoisonedError, StepwellUsageError, TierIOError, VolumeBusyError
from stepwell.health import MOST_ERRORS, MOST_PROBE_SECONDS, STUCK_SECONDS, Calls, Health, most_quarantined
from stepwell.index import Tier
from stepwell.keeper import Keeper, Keepers
from stepwell.mover import SaveOutcome
from stepwell.store import PageStore, Reopened
from stepwell.testing.faults import inject, resume, wait_paused
from stepwell.tiers.directory import Full as DirectoryFull
from stepwell.tiers.directory import HeldVolume
from stepwell.tiers.volume_tier import GROW_RETRY, VolumeTier
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

TWO_ON_DISK = {"shared": 0, "disk": 2 * VOLUME_BYTES}  # room beside a volume whose header cannot be read
MANY = MOST_ERRORS + 8  # pages


def state(rig: Rig, tier: Tier = Tier.DISK) -> str:
    return rig.store.stats().tiers[tier.name.lower()].state


def flip(directories: Directories, suffix: str, pages: np.ndarray, tokens: np.ndarray) -> None:
    """Flip a bit in the middle of some pages of a chain, behind the tier's back."""
    [path] = directories.volumes(suffix)
    data = path.read_bytes()
    with path.open("r+b") as file:
        for page in pages:
            where = stamps(tokens)[page].tobytes()
            assert data.count(where) == 1
            at = data.index(where) + PAGE_BYTES // 2
            file.seek(at)
            file.write(bytes([data[at] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


# ---- calls that fail -------------------------------------------------------------------------------------------------


def test_a_tier_whose_reads_fail_is_misses_and_the_rest_serves_on(
    open_rig: OpenRig, directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock)
    rig.save(chain(1, MANY))
    rig.store.evict(Tier.SHARED, MANY)
    rig.save(chain(2, 4))
    with inject("file.pread", "errno", value=errno.EIO):
        assert rig.load(chain(1, MANY)) == 0
        rig.round()
        assert state(rig) == "out"
        found = lines(caplog, "disk tier")
        assert len(found) == 1
        for part in (str(directories.disk), "out of service", "EIO", "dmesg", "store.reopen(stepwell.Tier.DISK)"):
            assert part in found[0]
        assert rig.load(chain(2, 4)) == 4, "what shared memory holds is served"
        saved = rig.save(chain(3, 4))
        assert (saved.saved, saved.refused) == (4, 0)
        assert saved.transfer.ok.all()
        assert rig.load(chain(3, 4)) == 4
        stats = rig.store.stats().tiers["disk"]
        assert (stats.trips, stats.skipped) == (1, 4)
        assert "EIO" in stats.reason
        assert stats.read_errors >= MANY
        clock.advance(1.0)
        rig.round()
        assert state(rig) == "out", "it was tried, and failed again"
        assert len(lines(caplog, "disk tier")) == 1
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()
    assert state(rig) == "serving"
    assert len(lines(caplog, "serves again")) == 1
    rig.round()  # what was quarantined is mended, a few slots a round
    assert rig.save(chain(1, 4)).transfer.ok.all()
    rig.store.evict(Tier.SHARED, 100)
    assert rig.load(chain(1, 4)) == 4


def test_pages_of_a_tier_that_is_out_are_kept_and_found_when_it_is_back(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 4))
    rig.save(chain(2, MANY))
    with inject("file.pread", "errno", value=errno.EIO):
        rig.load(chain(2, MANY))
        rig.round()
        with rig.store.match(chain(1, 4)) as match:
            assert match.pages == 0
        saved = rig.save(chain(3, 2))
        assert (saved.saved, saved.refused) == (0, 2)
        assert saved.full is not None
        assert "out of service" not in str(saved.full)
        assert "takes no pages" in str(saved.full)
        keys = [b"a" * 16, b"b" * 16]
        assert rig.store.save_keys(keys, source=rig.pool[:2]).tolist() == [SaveOutcome.REFUSED] * 2
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()
    assert rig.load(chain(1, 4)) == 4


def test_one_error_takes_no_tier_out_of_service(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock(), io_threads=1)
    rig.save(chain(1, MANY))
    with bad_read(7):
        assert rig.load(chain(1, MANY)) == 7
    rig.round()
    assert state(rig) == "serving"


def test_a_tier_that_errs_and_then_works_is_seen_although_no_page_is_lost(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock(), io_threads=1)
    rig.save(chain(1, 2))
    for number in range(MOST_ERRORS):
        assert state(rig) == "serving"
        with inject("file.pread", "errno", nth=1 + number % 3, value=errno.EIO):  # checksums, records, bytes of both
            assert rig.load(chain(1, 2)) == 2
        rig.round()
        stats = rig.store.stats()
        assert (stats.io_errors, stats.tiers["disk"].read_errors) == (number + 1, number + 1)
    assert state(rig) == "out"
    assert "EIO" in rig.store.stats().tiers["disk"].reason


def test_writes_and_records_that_fail_and_then_work_are_counted(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock(), io_threads=1)
    for call in range(1, 8):  # odd, bytes, checksums, records, even, ring entries, counter
        with inject("file.pwrite", "errno", nth=call, value=errno.EIO):
            assert rig.save(chain(call, 2)).transfer.ok.all()
        assert rig.store.stats().tiers["disk"].write_errors == call
    for call in range(1, 4):  # records, ring entries, counter
        with inject("file.pwrite", "errno", nth=call, value=errno.EIO):
            assert rig.store.evict(Tier.DISK, 2) == 2
        stats = rig.store.stats().tiers["disk"]
        assert (stats.write_errors, stats.owed) == (7 + call, 0)
    rig.round()
    assert state(rig) == "serving"


def test_errors_that_are_long_past_do_not_count(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    for number in range(4):
        half = MOST_ERRORS // 2
        rig.save(chain(number, half))
        with inject("file.pread", "errno", value=errno.EIO):
            rig.load(chain(number, half))
            rig.round()
        assert state(rig) == "serving"
        for _ in range(4):
            clock.advance(10.0)
            rig.round()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=["ENOSPC", "EROFS", "EDQUOT"])
def test_a_tier_that_cannot_be_written_is_read_on(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    with inject("file.pwrite", "errno", value=error):
        assert not rig.save(chain(2, 2)).transfer.ok.any()
        rig.round()
        assert state(rig) == "read-only"
        [line] = lines(caplog, "disk tier")
        assert errno.errorcode[error] in line
        assert "read-only" in line
        assert rig.load(chain(1, 4)) == 4, "reads go on"
        saved = rig.save(chain(3, 4))
        assert saved.transfer.ok.all()
        assert rig.store.stats().tiers["disk"].skipped == 4
        clock.advance(2.0)
        rig.round()
        assert state(rig) == "read-only"
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()
    assert state(rig) == "serving"
    assert rig.save(chain(4, 4)).transfer.ok.all()
    assert rig.pages(Tier.DISK) >= 8


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_however_many_writes_find_no_room_reads_go_on(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 4))
    with inject("file.pwrite", "errno", value=error):
        rig.save(chain(2, MANY))
        for _ in range(6):
            rig.round()
            assert state(rig) == "read-only"
            clock.advance(2.0)
        assert errno.errorcode[error] in rig.store.stats().tiers["disk"].reason
        assert len(lines(caplog, "disk tier")) == 1
        assert rig.load(chain(1, 4)) == 4


def test_a_read_only_tier_whose_reads_fail_too_goes_out_and_that_is_said(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock())
    rig.save(chain(1, MANY))
    with inject("file.pwrite", "errno", value=errno.EROFS):
        rig.save(chain(2, 2))
        rig.round()
        assert state(rig) == "read-only"
    with inject("file.pread", "errno", value=errno.EIO):
        rig.load(chain(1, MANY))
        rig.round()
        assert state(rig) == "out"
    assert "EIO" in lines(caplog, "out of service")[0]


def test_nothing_leaves_a_tier_that_takes_no_pages(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock, low_watermark=0.5, high_watermark=0.5)
    capacity = rig.store.stats().tiers["disk"].capacity
    rig.save(chain(1, 3 * capacity // 4))
    with inject("file.pwrite", "errno", value=errno.EROFS):
        rig.save(chain(2, 2))
        rig.store._look_after(rig.store._copies.mover)  # type: ignore[arg-type]
        assert state(rig) == "read-only"
        kept = rig.pages(Tier.DISK)
        for number in range(3, 6):
            rig.save(chain(number, capacity // 2))
            clock.advance(2.0)
            rig.round()
        assert rig.pages(Tier.DISK) == kept


def test_trying_a_full_read_only_tier_costs_no_page(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, rig.store.stats().tiers["disk"].capacity))
    with inject("file.pwrite", "errno", value=errno.EROFS):
        rig.save(chain(2, 2))
        rig.store._look_after(rig.store._copies.mover)  # type: ignore[arg-type]
        kept = rig.pages(Tier.DISK)
        for _ in range(5):
            clock.advance(MOST_PROBE_SECONDS)
            rig.round()
        health = rig.store._health.of(Tier.DISK)
        assert (health.state, health.probes) == ("read-only", 5)
        assert rig.pages(Tier.DISK) == kept
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()


def test_a_store_whose_only_tier_is_read_only_knows_what_it_has(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock())
    rig.save(chain(1, 4))
    with inject("file.pwrite", "errno", value=errno.EROFS):
        rig.save(chain(2, 2))
        rig.round()
        again = rig.save(chain(1, 4))
        assert (again.saved, again.present, again.refused) == (0, 4, 0)
        new = rig.save(chain(3, 4))
        assert (new.saved, new.present, new.refused) == (0, 0, 4)
        assert rig.load(chain(1, 4)) == 4


def test_a_tier_that_fails_again_and_again_is_tried_ever_more_seldom_and_not_reported_each_time(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock)
    waits = []
    for number in range(5):
        with inject("file.pwrite", "errno", value=errno.ENOSPC):
            rig.save(chain(number, 1))
            rig.round()
        began = clock.monotonic()
        while state(rig) != "serving":
            clock.advance(0.5)
            rig.round()
        waits.append(clock.monotonic() - began)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0]
    assert len(lines(caplog, "is read-only")) < 5


def test_opening_a_store_on_a_failing_tier_raises(open_rig: OpenRig, directories: Directories) -> None:
    """Loud at the start, when somebody looks: only a tier that has served is taken out of service."""
    with inject("file.pread", "errno", value=errno.EIO), pytest.raises(TierIOError, match="Input/output"):
        open_rig(**DISK_ONLY)
    open_rig(**DISK_ONLY)


# ---- reopen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_reopen_attaches_a_tier_anew_and_finds_what_it_held(open_rig: OpenRig, tier: Tier) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=2 * VOLUME_BYTES, clock=ManualClock())
    rig.save(chain(1, 6))
    capacity = rig.store.stats().tiers[tier.name.lower()].capacity
    assert rig.store.reopen(tier) == Reopened(tier, capacity, 6, 0)
    assert state(rig, tier) == "serving"
    assert_whole(rig.store)
    rig.store.evict(Tier.SHARED if tier is Tier.DISK else Tier.DISK, 100)
    assert rig.load(chain(1, 6)) == 6
    assert rig.save(chain(2, 6)).transfer.ok.all()


def test_a_worker_that_goes_from_one_call_to_the_next_is_not_stuck() -> None:
    clock = ManualClock()
    health = Health(clock, {Tier.DISK: "/directory"})
    for serial in range(60):
        assert health.observe_workers([(serial, Tier.DISK)]) == set()
        clock.advance(1.0)
    assert health.of(Tier.DISK).trips == 0


def test_reopen_does_not_find_a_damaged_page_again(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**DISK_ONLY, clock=ManualClock())
    rig.save(chain(1, 4))
    flip(directories, "pages", np.array([3]), chain(1, 4))
    assert rig.load(chain(1, 4)) == 3
    assert rig.store.stats().tiers["disk"].quarantined == 1
    assert rig.store.reopen(Tier.DISK).pages == 3


def test_reopen_brings_back_a_tier_that_is_out_of_service(open_rig: OpenRig) -> None:
    rig = open_rig(**TWO_ON_DISK, clock=ManualClock())
    rig.save(chain(1, 4))
    rig.save(chain(2, MANY))
    with inject("file.pread", "errno", value=errno.EIO):
        rig.load(chain(2, MANY))
        rig.round()
        assert state(rig) == "out"
        with pytest.raises(TierIOError):
            rig.store.reopen(Tier.DISK)
        assert state(rig) == "out"
        assert rig.load(chain(1, 4)) == 0
        assert rig.save(chain(3, 4)).refused == 4
    found = rig.store.reopen(Tier.DISK)
    assert found.pages == 4 + MANY, "the records of what could not be read could not be freed: it is verified when read"
    assert rig.load(chain(1, 4)) == 4
    assert rig.load(chain(2, MANY)) == MANY
    assert rig.store.stats().tiers["disk"].quarantined == 0


def test_a_tier_that_a_failed_reopen_left_without_a_volume_comes_back_by_itself(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**TWO_ON_DISK, clock=clock)
    rig.save(chain(1, 4))
    with inject("file.pread", "errno", value=errno.EIO), pytest.raises(TierIOError):
        rig.store.reopen(Tier.DISK)
    assert rig.store.stats().tiers["disk"].capacity == 0
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()
    assert state(rig) == "serving"
    assert rig.load(chain(1, 4)) == 4


def test_a_reopen_that_fails_says_why_in_the_stats_and_once_in_the_log(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(**TWO_ON_DISK, clock=ManualClock())
    rig.save(chain(1, 4))
    with inject("file.pread", "errno", value=errno.EIO):
        for _ in range(2):
            with pytest.raises(TierIOError):
                rig.store.reopen(Tier.DISK)
            assert "Input/output" in rig.store.stats().tiers["disk"].reason
            assert state(rig) == "out"
    assert len(lines(caplog, "reopening it failed")) == 1
    rig.store.reopen(Tier.DISK)
    assert rig.store.stats().tiers["disk"].reason == ""
    assert len(lines(caplog, "serves again")) == 1


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_reopening_a_tier_that_serves_warns_of_nothing_and_counts_its_pages_once(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, tier: Tier
) -> None:
    rig = open_rig(**BOTH, clock=ManualClock())
    rig.save(chain(1, 4))
    caplog.clear()
    for _ in range(3):
        rig.store.reopen(tier)
        assert rig.store.stats().tiers[tier.name.lower()].recovered == 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_advised_fits_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    paths = {Tier.SHARED: "/dev/shm/x", Tier.DISK: "/d"}
    for tier in paths:
        for number in (errno.EIO, 0):
            Health(ManualClock(), paths).observe_calls(tier, Calls(MOST_ERRORS, MOST_ERRORS, 0, number, 0))
    assert len(lines(caplog, "out of service")) == 4
    assert all("disk tier" in line for line in lines(caplog, "smartctl"))
    Health(ManualClock(), paths).observe_calls(Tier.DISK, Calls(1, 0, 1, 0, errno.EROFS))
    [line] = lines(caplog, "is read-only")
    assert "once it is mended: before, that costs" in line


def test_reopen_is_refused_while_pages_of_the_tier_are_pinned(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock, close_timeout=0.0)
    rig.save(chain(1, 4))
    with rig.store.match(chain(1, 4)) as match:
        with pytest.raises(VolumeBusyError, match="4 pages are pinned"):
            rig.store.reopen(Tier.DISK)
        assert match.pages == 4
    assert rig.store.stats().tiers["disk"].capacity > 0
    assert rig.store.reopen(Tier.DISK).pages == 4
    assert rig.load(chain(1, 4)) == 4


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE, Tier.SHARED, 3, "disk"])
def test_reopen_of_what_has_no_files_is_misuse(open_rig: OpenRig, tier: object) -> None:
    rig = open_rig(host=16 * PAGE_BYTES, **DISK_ONLY)
    with pytest.raises(StepwellUsageError, match=r"Tier\.DISK"):
        rig.store.reopen(tier)  # type: ignore[arg-type]


def test_reopen_under_load_serves_right_bytes_or_misses(open_rig: OpenRig) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=2 * VOLUME_BYTES, keeper=True)
    for number in range(8):
        rig.save(chain(number, 4))
    stop = threading.Event()
    wrong: list[int] = []

    def use(first: int) -> None:
        rows = np.zeros((4, PAGE_BYTES), np.uint8)
        pool = rig.store.lend(rows.reshape(4, 2, 2, PAGE_TOKENS, 2, 32), axes="slot layer stream token head dim")
        number = 0
        while not stop.is_set():
            tokens = chain(first + number % 4, 4)
            number += 1
            with rig.store.match(tokens) as match:
                transfer = rig.store.load(match, into=pool[: match.pages])
            transfer.wait()
            ok = np.flatnonzero(transfer.ok)
            if not np.array_equal(rows[ok], stamps(tokens)[ok]):
                wrong.append(number)
            rows[:] = stamps(tokens)
            rig.store.save(tokens, source=pool[:]).transfer.wait()

    users = [threading.Thread(target=use, args=(4 * seed,)) for seed in range(2)]
    for user in users:
        user.start()
    for tier in (Tier.DISK, Tier.SHARED, Tier.DISK, Tier.SHARED):
        assert rig.store.reopen(tier).capacity > 0
    stop.set()
    for user in users:
        user.join()
    assert wrong == []
    assert_whole(rig.store)
    assert_unpinned(rig.store)


# ---- another tier is asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["page", "layer"])
@pytest.mark.parametrize("bad", [[0], [2], [0, 1, 2, 3, 4, 5]])
def test_what_is_bad_in_shared_memory_is_had_from_disk_within_the_same_load(
    open_rig: OpenRig, directories: Directories, order: str, bad: list[int]
) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 6))
    flip(directories, "vol", np.array(bad), chain(1, 6))
    transfer = rig.start_load(chain(1, 6), order=order)
    assert transfer.wait()
    assert transfer.ok_pages == 6
    assert np.array_equal(rig.rows[:6], stamps(chain(1, 6)))
    assert transfer.layers_done == 2
    rig.store.flush()
    stats = rig.store.stats()
    assert (stats.checksum_failures, stats.retried_pages, stats.rescued_pages) == (len(bad),) * 3
    assert stats.misses["corrupt"] == 0
    assert stats.tiers["shared"].quarantined == len(bad)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def test_a_load_by_keys_asks_another_tier_too(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    from stepwell.hashing import prefix_hashes

    keys = prefix_hashes(chain(1, 4), page_tokens=PAGE_TOKENS)
    flip(directories, "vol", np.array([1]), chain(1, 4))
    assert rig.store.load_keys(keys, into=rig.pool[:4]).all()
    assert np.array_equal(rig.rows[:4], stamps(chain(1, 4)))


def test_what_is_bad_in_both_tiers_cuts_the_hit_there_and_is_asked_for_once(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 6))
    for suffix in ("vol", "pages"):
        flip(directories, suffix, np.array([3]), chain(1, 6))
    assert rig.load(chain(1, 6)) == 3
    rig.store.flush()
    stats = rig.store.stats()
    assert (stats.checksum_failures, stats.retried_pages, stats.rescued_pages) == (2, 1, 0)
    assert stats.misses["corrupt"] == 1
    assert {name: tier.quarantined for name, tier in stats.tiers.items()} == {"shared": 1, "disk": 1}
    assert_unpinned(rig.store)
    rig.round()
    assert rig.save(chain(1, 6)).saved == 1
    assert rig.load(chain(1, 6)) == 6


def test_a_tier_that_is_out_of_service_is_not_asked(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**BOTH, clock=ManualClock())
    rig.save(chain(2, MANY))
    rig.store.evict(Tier.SHARED, MANY)
    rig.save(chain(1, 4))
    with inject("file.pread", "errno", value=errno.EIO):
        rig.load(chain(2, MANY))
        rig.round()
    assert state(rig) == "out"
    flip(directories, "vol", np.array([1]), chain(1, 4))
    assert rig.load(chain(1, 4)) == 1
    assert rig.store.stats().retried_pages == 0


def test_a_second_try_keeps_the_deadline(open_rig: OpenRig, directories: Directories) -> None:
    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock)
    rig.save(chain(1, 3))
    flip(directories, "vol", np.array([1]), chain(1, 3))
    with inject("file.pread", "pause"):
        transfer = rig.start_load(chain(1, 3), deadline=1.0)
        wait_paused("file.pread")
        clock.advance(1.0)
        assert transfer.wait()
        rig.rows[:] = 0xAB
    rig.store.flush()
    assert (rig.rows == 0xAB).all()
    assert transfer.ok_pages == 1
    assert_unpinned(rig.store)


def test_a_cancelled_load_asks_no_other_tier(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 3))
    flip(directories, "vol", np.array([0, 1, 2]), chain(1, 3))
    with inject("mover.before_copy", "pause", nth=1):
        transfer = rig.start_load(chain(1, 3))
        wait_paused("mover.before_copy")
        transfer.cancel()
    assert transfer.wait()
    assert transfer.ok_pages == 0
    assert_whole(rig.store)
    assert_unpinned(rig.store)


# ---- quarantine ------------------------------------------------------------------------------------------------------


def test_too_much_in_quarantine_takes_the_tier_out_until_it_is_mended(
    open_rig: OpenRig, directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = open_rig(**SHARED_ONLY, clock=clock)
    capacity = rig.store.stats().tiers["shared"].capacity
    bad = most_quarantined(capacity) + 1
    rig.save(chain(1, bad))
    rig.save(chain(2, 2))
    flip(directories, "vol", np.arange(bad), chain(1, bad))
    assert rig.load(chain(1, bad)) == 0
    rig.round()
    assert state(rig, Tier.SHARED) == "out"
    assert "in quarantine" in lines(caplog, "out of service")[0]
    rig.round()
    clock.advance(1.0)
    rig.round()
    stats = rig.store.stats().tiers["shared"]
    assert (stats.state, stats.quarantined, stats.free) == ("serving", 0, capacity - 2)
    assert rig.load(chain(2, 2)) == 2
    assert rig.save(chain(1, bad)).transfer.ok.all(), "its capacity is back"


def test_a_page_or_two_in_quarantine_take_no_small_tier_out(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 4))
    flip(directories, "vol", np.array([0, 1]), chain(1, 4))
    rig.load(chain(1, 4))
    with inject("volume.*", "errno", value=errno.EIO):
        rig.round()
    assert state(rig, Tier.SHARED) == "serving"


def test_a_slot_that_cannot_be_mended_is_tried_again_and_then_retired(
    open_rig: OpenRig, directories: Directories
) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 2))
    flip(directories, "pages", np.array([0]), chain(1, 2))
    rig.load(chain(1, 2))
    waits = []
    with inject("file.pwrite", "errno", value=errno.EIO):
        began, before = clock.monotonic(), 0
        while rig.store.stats().tiers["disk"].retired == 0:
            rig.round()
            tried = _core.fault_reached("file.pwrite")
            if tried != before:
                waits.append(clock.monotonic() - began)
                began, before = clock.monotonic(), tried
            clock.advance(0.5)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    stats = rig.store.stats().tiers["disk"]
    assert (stats.quarantined, stats.retired) == (1, 1)
    clock.advance(1000.0)
    rig.round()
    assert rig.store.stats().tiers["disk"].quarantined == 1, "retired is retired"
    assert rig.store.reopen(Tier.DISK).pages >= 1
    assert rig.store.stats().tiers["disk"].retired == 0, "its volume was attached anew"


def test_a_slot_that_can_be_mended_later_is_mended_later(open_rig: OpenRig, directories: Directories) -> None:
    clock = ManualClock()
    rig = open_rig(**DISK_ONLY, clock=clock)
    rig.save(chain(1, 2))
    flip(directories, "pages", np.array([0]), chain(1, 2))
    rig.load(chain(1, 2))
    with inject("file.pwrite", "errno", value=errno.EIO):
        rig.round()
        rig.round()
    assert rig.store.stats().tiers["disk"].quarantined == 1
    clock.advance(1.0)
    rig.round()
    assert rig.store.stats().tiers["disk"].quarantined == 0
    assert rig.save(chain(1, 2)).saved == 1
    assert rig.load(chain(1, 2)) == 2


# ---- calls that do not return ----------------------------------------------------------------------------------------


def look_until_stuck(rig: Rig, clock: ManualClock) -> None:
    rig.round()
    clock.advance(STUCK_SECONDS)
    rig.round()


def test_a_read_that_does_not_return_takes_the_tier_out_and_ends_who_waits(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock, close_timeout=0.0)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    rig.save(chain(2, 4))
    with inject("file.pread", "pause", nth=1):
        transfer = rig.start_load(chain(1, 4))
        wait_paused("file.pread")
        look_until_stuck(rig, clock)
        assert transfer.wait(), "without a deadline of its own"
        assert transfer.ok_pages == 0
        rig.rows[:4] = 0xAB  # the engine has its memory back
        assert state(rig) == "out"
        assert "has not returned" in lines(caplog, "out of service")[0]
        assert rig.store.flush()
        assert rig.load(chain(2, 4)) == 4
        assert rig.save(chain(3, 4)).transfer.ok.all()
        clock.advance(1000.0)
        rig.round()
        assert state(rig) == "out", "while it stands there nothing is tried"
        with pytest.raises(VolumeBusyError):
            rig.store.reopen(Tier.DISK)
    rig.store.flush()
    until_idle(rig)
    assert (stamps(chain(3, 4)) == rig.rows[:4]).all(), "what the call read late landed nowhere"
    clock.advance(MOST_PROBE_SECONDS)
    rig.round()
    rig.round()
    assert state(rig) == "serving"
    assert rig.load(chain(1, 4)) == 4
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def until_idle(rig: Rig) -> None:
    """Wait until no worker is in a call."""
    mover = rig.store._copies.mover
    assert mover is not None
    while any(column >= 0 for _, column in mover.calls()):
        pass


def test_a_write_that_does_not_return_ends_a_save_and_its_inbox_is_told(open_rig: OpenRig) -> None:
    from stepwell.mover import Inbox

    clock = ManualClock()
    rig = open_rig(**BOTH, clock=clock)
    with Inbox(4) as inbox, inject("file.pwrite", "pause", nth=1):
        rig.rows[:4] = stamps(chain(1, 4))
        result = rig.store.save(chain(1, 4), source=rig.pool[:4], inbox=inbox)
        wait_paused("file.pwrite")
        look_until_stuck(rig, clock)
        assert result.transfer.wait()
        assert result.transfer.source_released
        tags, _, status = inbox.poll()
        assert tags.tolist() == [result.transfer.tag]
        assert status.tolist() == [_core.Status.io_error.value]
        assert rig.load(chain(1, 4)) == 4, "shared memory has it"
        resume("file.pwrite")
        until_idle(rig)
        assert inbox.poll()[0].size == 0, "told once"
    assert_whole(rig.store)
    assert_unpinned(rig.store)


@contextmanager
def hung(rig: Rig, point: str, work: Callable[[], object]) -> Iterator[None]:
    """Have a worker stand in a call on the disk's files."""
    with inject(point, "pause", nth=1):
        work()
        wait_paused(point)
        yield


@pytest.mark.parametrize("point", ["file.pread", "file.pwrite"])
def test_close_returns_although_a_call_does_not_and_keeps_the_volumes_until_it_does(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    rig = open_rig(**BOTH, close_timeout=0.1)
    rig.save(chain(1, 4))
    rig.store.evict(Tier.SHARED, 4)
    work: dict[str, Callable[[], object]] = {
        "file.pread": lambda: rig.start_load(chain(1, 4)),
        "file.pwrite": lambda: rig.save(chain(2, 4), wait=False),
    }
    with hung(rig, point, work[point]):
        rig.close()
        assert "left behind" in lines(caplog, "does not return")[0]
        other = open_rig(shared=2 * VOLUME_BYTES, disk=2 * VOLUME_BYTES)
        recovered = {name: tier.recovered for name, tier in other.store.stats().tiers.items()}
        assert not any(recovered.values()), "nobody may have a volume that a late write can still reach"
        assert other.load(chain(1, 4)) == 4, "it is read on, as any neighbour's"
        assert other.save(chain(3, 4)).transfer.ok.all()
        other.close()
        closers = [thread for thread in threading.enumerate() if thread.name.startswith("sw-close-")]
        assert closers
        resume(point)
        for closer in closers:
            closer.join()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=2 * VOLUME_BYTES)
    assert rig.load(chain(1, 4)) == 4
    assert rig.load(chain(3, 4)) == 4
    rig.load(chain(2, 4))


@pytest.mark.parametrize("point", ["file.reserve", "file.list"])
def test_close_returns_although_a_background_round_does_not(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    from stepwell import store as store_module

    monkeypatch.setattr(store_module, "_ROUND_SECONDS", 0.1)
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=0, keeper=True, close_timeout=0.1)
    with inject(point, "pause", nth=1):
        for number in range(24):
            rig.save(chain(number, 16), wait=False)
        wait_paused(point)
        rig.close()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("sw-")]
        resume(point)
    for thread in threads:
        thread.join()
    assert open_rig(**SHARED_ONLY).store.stats().tiers["shared"].capacity > 0


def test_close_returns_although_the_tiers_files_do_not_answer(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell import store as store_module

    monkeypatch.setattr(store_module, "_ROUND_SECONDS", 0.1)
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    with inject("file.pwrite", "pause", nth=1):  # the order of pages is written at close
        rig.close()
        wait_paused("file.pwrite")
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("sw-close-")]
        resume("file.pwrite")
    for thread in threads:
        thread.join()
    assert open_rig(**BOTH).load(chain(1, 4)) == 4


def test_a_process_ends_although_a_call_does_not_return(directories: Directories, open_rig: OpenRig) -> None:
    from test_store_faults import run_script

    script = (
        "import msgspec; rig.store._config = msgspec.structs.replace(rig.store._config, close_timeout=0.1)\n"
        "from stepwell.testing.faults import wait_paused\nfrom stepwell import _core\n"
        "rig.save(chain(1, 4)); rig.store.evict(Tier.SHARED, 4)\n"
        "_core.fault_arm('file.pread', 'pause', 1, 0)\n"
        "rig.start_load(chain(1, 4)); wait_paused('file.pread')\n"
    )
    done = run_script(script, directories)
    assert done.returncode == 0, done.stderr
    assert "left behind" in done.stderr
    assert open_rig(**BOTH).load(chain(1, 4)) == 4


# ---- workers, rounds, poison -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["mover.unit", "mover.before_copy", "mover.after_copy", "mover.after_commit"])
def test_a_worker_survives_an_exception_in_any_job(open_rig: OpenRig, point: str) -> None:
    rig = open_rig(**BOTH)
    for nth in range(1, 8):
        with inject(point, "errno", nth=nth, value=errno.ENOMEM):
            rig.save(chain(nth, 3))
            rig.load(chain(nth, 3))
            rig.store.evict(Tier.SHARED, 3)
            rig.load(chain(nth, 3))
        rig.round()
        assert_whole(rig.store)
        assert_unpinned(rig.store)
        assert rig.save(chain(nth, 3)).transfer.ok.all()
        assert rig.load(chain(nth, 3)) == 3
    stats = rig.store.stats()
    assert stats.failed_jobs > 0
    assert stats.tiers["disk"].state == stats.tiers["shared"].state == "serving"


def test_a_batch_that_an_exception_ended_is_said_once_and_its_pages_are_misses(
    open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(**SHARED_ONLY, clock=ManualClock())
    rig.save(chain(1, 4))
    with inject("mover.before_copy", "errno", nth=3, value=errno.ENOMEM):
        transfer = rig.start_load(chain(1, 4))
        assert transfer.wait()
    assert transfer.ok_pages == 2
    rig.round()
    rig.round()
    assert len(lines(caplog, "an exception ended")) == 1
    assert rig.store.stats().misses["full"] == 2
    assert rig.load(chain(1, 4)) == 4, "nothing is wrong with them"


def test_a_poisoned_store_misses_refuses_and_closes(
    directories: Directories, no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(directories.config(host=16 * PAGE_BYTES, **BOTH))
    rig.save(chain(1, 4))
    held = rig.store.match(chain(1, 4))
    with inject("mover.assertion", "errno", nth=1, value=1):
        assert rig.load(chain(1, 4)) == 0
    store = rig.store
    rig.round()
    rig.round()
    assert len(lines(caplog, "misses only")) == 1
    assert store.match(chain(1, 4)).pages == 0
    assert store.cached(chain(1, 4), tiers=(Tier.SHARED,)) == 0
    transfer = store.load(held, into=rig.pool[:4])
    assert transfer.wait()
    assert transfer.ok_pages == 0
    saved = store.save(chain(2, 4), source=rig.pool[:4])
    assert (saved.saved, saved.present, saved.pending, saved.refused) == (0, 0, 0, 4)
    assert saved.transfer.wait()
    keys = [b"a" * 16, b"b" * 16]
    assert store.probe(keys).run == 0
    assert not store.load_keys(keys, into=rig.pool[:2]).any()
    assert store.save_keys(keys, source=rig.pool[:2]).tolist() == [SaveOutcome.REFUSED] * 2
    store.state(keys[0])
    assert store.pin(chain(1, 4), ttl=1.0).tokens == 0
    assert store.flush(10.0)
    assert store.quiesce(10.0)
    store.evict(Tier.SHARED, 1)
    store.forget(chain(1, 4))
    store.clear()
    store.set_epoch(7)
    store.tree()
    for call in (store.stats, store.verify, lambda: store.reopen(Tier.SHARED), lambda: store.reopen(Tier.DISK)):
        with pytest.raises(PoisonedError, match="misses only"):
            call()
    held.close()
    assert "poisoned" in repr(store)
    with pytest.raises(PoisonedError, match="misses only"):
        store.close()
    store.close()
    assert store.closed
    again = Rig(directories.config(**BOTH))
    assert again.save(chain(2, 4)).transfer.ok.all()
    again.close()


def test_a_block_that_raised_is_not_told_of_the_poison_instead(directories: Directories, no_leaks: None) -> None:
    def use(error: Exception | None) -> None:
        with PageStore(directories.config(**BOTH)) as store:
            store._index.poison()
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        use(KeyError())
    with pytest.raises(PoisonedError):
        use(None)


def test_the_keeper_survives_whatever_a_round_raises(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Semaphore(0)

    class Owner:
        def __init__(self) -> None:
            self.errors = [RuntimeError("one"), KeyError("two"), OSError("three"), RuntimeError("one")]

        def tick(self) -> bool:
            done.release()
            if self.errors:
                raise self.errors.pop(0)
            return False

    owner = Owner()
    keeper = Keeper(owner.tick, interval=0.0)
    keeper.start()
    for _ in range(6):
        done.acquire()
    assert keeper.stop()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "background round: RuntimeError: one",
        "background round: KeyError: 'two'",
        "background round: OSError: three",
    ]


def test_an_error_that_names_another_volume_each_time_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Semaphore(0)

    class Owner:
        errors = 0

        def tick(self) -> bool:
            done.release()
            self.errors += 1
            number = errno.EROFS if self.errors < 6 else errno.EIO
            raise OSError(number, os.strerror(number), f"{os.urandom(16).hex()}.lock")

    owner = Owner()
    keeper = Keeper(owner.tick, interval=0.0)
    keeper.start()
    for _ in range(9):
        done.acquire()
    assert keeper.stop()
    assert len(lines(caplog, "Read-only")) == 1
    assert len(lines(caplog, "Input/output")) == 1


def test_growth_that_fails_is_not_tried_at_once_again(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(shared=0, disk=4 * VOLUME_BYTES, clock=clock)
    pages, index = rig.store._tiers[Tier.DISK], rig.store._index
    assert isinstance(pages, VolumeTier)
    pages._directory.grow = broken_growth  # type: ignore[method-assign]
    lacking = index.counts(Tier.DISK)["capacity"] + 1
    with pytest.raises(TierIOError, match="broken"):
        pages.grow(index, lacking)
    for _ in range(3):
        pages.grow(index, lacking)
        pages.tick(index, low_pages=lacking, high_pages=lacking)
    assert not pages.may_grow, "a save does not wait for it"
    clock.advance(GROW_RETRY)
    with pytest.raises(TierIOError, match="broken"):
        pages.grow(index, lacking)


def broken_growth(lock_timeout: float | None = None) -> HeldVolume | DirectoryFull:
    raise TierIOError(errno.EROFS, "broken", "/")


def test_a_round_that_does_not_return_keeps_no_other_from_running() -> None:
    class Owner:
        def __init__(self) -> None:
            self.release = threading.Event()
            self.stuck, self.others = threading.Semaphore(0), threading.Semaphore(0)

        def tick(self) -> bool:
            self.others.release()
            return False

        def disk(self) -> bool:
            self.stuck.release()
            return self.release.wait()

    owner = Owner()
    keepers = Keepers(owner.tick, {"disk": owner.disk, "shared": owner.tick}, used="shared")
    keepers.start()
    owner.stuck.acquire()
    for _ in range(6):
        keepers.wake()
        owner.others.acquire()
    assert not keepers.stop(0.0)
    owner.release.set()
    assert keepers.stop()


def test_a_tier_whose_round_fails_keeps_no_others_round_from_running(open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=VOLUME_BYTES, clock=clock, low_watermark=0.5, high_watermark=0.5)
    for number in range(6):
        rig.save(chain(number, 16))
    rig.store._tiers[Tier.DISK]._directory.wanted = broken  # type: ignore[attr-defined]
    capacity = rig.store.stats().tiers["shared"].capacity
    clock.advance(10.0)
    with pytest.raises(TierIOError, match="broken"):
        rig.round()
    assert rig.store.stats().tiers["shared"].capacity > capacity


def broken() -> int:
    raise TierIOError(errno.EIO, "broken", "/")

