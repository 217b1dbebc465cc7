"""Durability: what was acknowledged is found after power loss, whatever of the unsynced calls has reached the disk.

tests/powerloss_kit.py has the long form.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerloss_kit import ALL_BYTES, ALL_KEYS, PAGES, Figures, Truth, check, config_of, replay, syncs_of, work
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.config import DiskTier, StoreConfig
from stepwell.errors import StepwellUsageError, TierIOError
from stepwell.index import Residency, Tier
from stepwell.testing.faults import fail_each, inject, reached, resume, wait_paused
from stepwell.testing.powerloss import Call, Disk, Kind, Loss, record
from store_kit import GEOMETRY, VOLUME_BYTES, Directories, OpenRig, Rig, assert_whole, chain

CHANCE = random.Random(0)
NOTHING = Call(Kind.SYNC)  # of no file


# ---- the model of a disk ---------------------------------------------------------------------------------------------


def disk_of(*calls: Call) -> Disk:
    disk = Disk("/b")
    for call in calls:
        disk.apply(call)
    return disk


def create(name: str, number: int) -> Call:
    return Call(Kind.CREATE, (1, number), f"/b/{name}")


def write(number: int, offset: int, data: bytes) -> Call:
    return Call(Kind.WRITE, (1, number), offset=offset, data=data)


def sync(number: int) -> Call:
    return Call(Kind.SYNC, (1, number))


SYNC_NAMES = Call(Kind.SYNC_DIRECTORY, path="/b")


def test_a_sync_makes_bytes_durable_and_a_directory_sync_the_name() -> None:
    whole = [create("f", 1), write(1, 0, b"abc")]
    assert disk_of(*whole, sync(1)).crash(CHANCE, Loss.ALL).files == {}
    assert disk_of(*whole, SYNC_NAMES).crash(CHANCE, Loss.ALL).files == {"f": b""}
    assert disk_of(*whole, sync(1), SYNC_NAMES).crash(CHANCE, Loss.ALL).files == {"f": b"abc"}
    assert disk_of(*whole).crash(CHANCE, Loss.NONE).files == {"f": b"abc"}


def test_each_sector_may_be_as_any_write_since_the_sync_left_it() -> None:
    durable = [create("f", 1), write(1, 0, b"a" * 1024), sync(1), SYNC_NAMES]
    disk = disk_of(*durable, write(1, 256, b"b" * 512), write(1, 0, b"c" * 300))
    seen = {disk.crash(CHANCE, Loss.SECTORS).files["f"] for _ in range(500)}
    first = {b"a" * 512, b"a" * 256 + b"b" * 256, b"c" * 300 + b"b" * 212}
    second = {b"a" * 512, b"b" * 256 + b"a" * 256}
    assert seen == {one + other for one in first for other in second}


def test_changes_of_names_are_kept_or_lost_in_order() -> None:
    names = [Call(Kind.RENAME, path="/b/t", target="/b/v"), create("u", 2), Call(Kind.UNLINK, path="/b/v")]
    disk = disk_of(create("t", 1), SYNC_NAMES, *names)
    seen = {tuple(disk.crash(CHANCE, Loss.SECTORS).files) for _ in range(200)}
    assert seen == {("t",), ("v",), ("u", "v"), ("u",)}


def test_a_file_that_was_not_synced_may_have_any_size_it_had() -> None:
    def resize(size: int) -> Call:
        return Call(Kind.RESIZE, (1, 1), offset=size)

    disk = disk_of(create("f", 1), SYNC_NAMES, resize(600), write(1, 0, b"x" * 600), resize(100))
    sizes = {len(disk.crash(CHANCE, Loss.SECTORS).files["f"]) for _ in range(200)}
    assert sizes == {0, 600, 100}
    assert disk.crash(CHANCE, Loss.NONE).files == {"f": b"x" * 100}


def test_the_recorder_notes_what_changes_a_file_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    with record() as recording:
        fd = _core.file_open(path, os.O_RDWR | os.O_CREAT, 0o600)
        _core.file_truncate(fd, 10)
        _core.file_pwrite(fd, b"abc", 4)
        _core.file_pread(fd, 3, 4)
        with inject("file.pwrite", "errno", value=errno.EIO), pytest.raises(OSError, match="Input/output"):
            _core.file_pwrite(fd, b"not", 0)
        with inject("file.pwrite", "short", value=2):
            _core.file_pwrite(fd, b"xyz", 0)
        _core.file_sync(fd)
        _core.file_close(_core.file_open(path, os.O_RDWR | os.O_CREAT, 0o600))  # it is there: made once
        _core.file_rename(path, path + "2")
        _core.file_sync_directory(str(tmp_path))
        assert recording.position == 7
        _core.file_close(fd)
    calls = [(call.kind.name, call.offset, call.data) for call in recording.calls]
    assert calls == [
        ("CREATE", 0, b""),
        ("RESIZE", 10, b""),
        ("WRITE", 4, b"abc"),
        ("WRITE", 0, b"xy"),
        ("SYNC", 0, b""),
        ("RENAME", 0, b""),
        ("SYNC_DIRECTORY", 0, b""),
    ]
    assert recording.calls[5].target == path + "2"
    _core.file_unlink(path + "2")
    assert _core.record_count() == 0


# ---- every prefix ----------------------------------------------------------------------------------------------------


@pytest.fixture
def wreck(directories: Directories, caplog: pytest.LogCaptureFixture) -> Path:
    """Where states are made real: in memory, for speed, which a disk tier warns of each time."""
    caplog.set_level(logging.ERROR, "stepwell")
    return directories.shared.parent / "wreck"


@pytest.mark.parametrize(("seed", "has_shared", "direct_io"), [(1, False, True), (2, True, False)])
def test_what_was_on_disk_is_found_after_a_power_loss_at_any_call(
    directories: Directories, tmp_path: Path, wreck: Path, seed: int, has_shared: bool, direct_io: bool
) -> None:
    shared = str(directories.shared) if has_shared else None
    calls, truth = work(tmp_path, seed, 15, shared=shared, direct_io=direct_io)
    found = replay(tmp_path, calls, truth, seed=seed, states=2 * (len(calls) + 1), scratch=wreck)
    assert found.failures == []
    assert found.promised > 2000, "the work promised too little to prove anything"
    assert found.torn > 0, "no state was torn"


@pytest.mark.parametrize(
    "purpose", ["directory", "name", "bytes", "records", "taken bytes", "taken records"]
)
def test_leaving_out_a_sync_is_seen(tmp_path: Path, wreck: Path, purpose: str) -> None:
    calls, truth = work(tmp_path, 2, 8)
    gone = set(syncs_of(calls)[purpose])
    assert gone
    mutant = [NOTHING if position in gone else call for position, call in enumerate(calls)]
    found = replay(tmp_path, mutant, truth, seed=1, states=len(calls) + 1, scratch=wreck, stop=1)
    assert found.failures


def saved_again_elsewhere(base: Path, first: int) -> tuple[list[Call], Truth]:
    """Free a page in one volume, begin to write another over it, save it into the other volume; then power is lost."""
    clock = ManualClock()
    with record() as recording:
        rig = Rig(config_of(str(base / "disk"), durability="power"), clock=clock)
        for number in range(6):
            rig.save(chain(number, PAGES))
            clock.advance(1)
            rig.round()
        held = [member.held for member in rig.store._tiers[Tier.DISK].members]  # type: ignore[attr-defined]
        rig.close()
        volumes = []
        shape = _core.PageShape(list(GEOMETRY.layer_bytes), GEOMETRY.fingerprint())
        for each in held[:2]:
            stem = str(base / "disk" / f"v-{each.volume_id}")
            metadata, pages = (_core.file_open(f"{stem}.{suffix}", os.O_RDWR) for suffix in ("meta", "pages"))
            volumes.append(_core.Volume(shape, each.header, metadata, pages, durable=True))
        one, other = volumes[first], volumes[1 - first]
        slots, keys, *_ = one.recover()
        other.retire(np.zeros(1, np.uint32))
        key = keys[-1, :32].tobytes()
        row = next(row for row, known in enumerate(ALL_KEYS) if known.tobytes() == key)
        one.retire(slots[-1:].copy())
        with inject("volume.after_bytes", "errno", value=errno.EIO):
            status = one.write_page(int(slots[-1]), ALL_BYTES[row - 1], key=b"another")
            assert status == _core.Status.io_error
        assert other.write_page(0, ALL_BYTES[row], key=key) == _core.Status.ok
        end = recording.position
        del one, other, volumes
    must = np.arange(len(ALL_KEYS)) == row
    return recording.calls[:end], Truth([(0, np.zeros_like(must)), (end, must)], [(0, np.ones_like(must))])


def test_a_freed_page_that_comes_back_never_hides_the_one_saved_since(tmp_path: Path, wreck: Path) -> None:
    lost = []
    for first in (0, 1):
        base = tmp_path / str(first)
        base.mkdir()
        calls, truth = saved_again_elsewhere(base, first)
        disk, mutant = Disk(base), Disk(base)
        free = set(syncs_of(calls)["free"])
        assert free
        for position, call in enumerate(calls):
            disk.apply(call)
            mutant.apply(NOTHING if position in free else call)
        lost += _failures(mutant, truth, wreck)
        assert _failures(disk, truth, wreck) == []
    assert lost, "without the sync of what is freed nothing was lost: it is not needed, or this does not show it"


def _failures(disk: Disk, truth: Truth, wreck: Path) -> list[str]:
    figures, chance = Figures(), random.Random(3)
    must, may = truth.musts[-1][1], truth.mays[-1][1]
    for number in range(40):
        wreck.mkdir()
        disk.crash(chance, list(Loss)[number % 4]).write(wreck)
        check(wreck, must, may, figures, str(number))
        shutil.rmtree(wreck)
    return figures.failures


def test_a_damaged_page_stays_gone_once_its_slot_is_mended(tmp_path: Path) -> None:
    with record() as recording:
        rig = Rig(config_of(str(tmp_path / "disk"), durability="power"), clock=ManualClock())
        rig.save(chain(1, 2))
        [member] = rig.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
        assert member.volume.rewrite_and_check(0) == _core.Status.ok
        end, at = recording.position, member.volume.header.records_offset
        name = f"disk/v-{member.held.volume_id}.meta"
        del member
        rig.close()
    disk = Disk(tmp_path)
    for call in recording.calls[:end]:
        disk.apply(call)
    generation = disk.crash(CHANCE, Loss.ALL).files[name][at : at + 8]
    assert int.from_bytes(generation, "little") % 2 == 1


def test_the_boot_id_is_rewritten_within_one_sector_that_no_checksum_covers(tmp_path: Path, open_rig: Any) -> None:
    rig = open_rig(shared=0)
    rig.save(chain(1, 2))
    [member] = rig.store._tiers[Tier.DISK].members
    with record() as recording:
        assert member.volume.write_boot_id(b"B" * 16) == _core.Status.ok
    [call] = recording.calls
    assert (call.kind, call.offset, call.data) == (Kind.WRITE, 160, b"B" * 16)


# ---- how many syncs, and when ----------------------------------------------------------------------------------------


@pytest.fixture
def power(directories: Directories) -> Callable[..., StoreConfig]:
    """Configure a disk tier whose pages survive power loss, alone or below a shared one."""

    def make(*, shared: bool = False, **others: Any) -> StoreConfig:
        plain = directories.config(shared=4 * VOLUME_BYTES if shared else 0, **others)
        disk = DiskTier(8 * VOLUME_BYTES, str(directories.disk), volume_bytes=VOLUME_BYTES, durability="power")
        return StoreConfig(geometry=GEOMETRY, shared=plain.shared, disk=disk, **others)

    return make


def syncs(rig: Rig) -> int:
    return sum(member.volume.syncs for member in rig.store._tiers[Tier.DISK].members)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", [False, True], ids=["disk", "shared and disk"])
def test_a_save_costs_two_syncs_however_many_pages_it_has(
    open_rig: OpenRig, power: Callable[..., StoreConfig], shared: bool
) -> None:
    rig = open_rig(power(shared=shared))
    rig.save(chain(0, 1))
    before = syncs(rig)
    assert rig.save(chain(1, 40)).transfer.ok.all()
    assert syncs(rig) - before == 2


def test_saves_that_wait_share_their_syncs(
    open_rig: OpenRig, power: Callable[..., StoreConfig]
) -> None:
    rig = open_rig(power())
    rig.save(chain(0, 1))
    with inject("volume.settle", "pause", nth=1):
        first = rig.save(chain(1, 3), wait=False)
        wait_paused("volume.settle")
        # The other worker goes on writing: the caller's memory is free, and nothing of it is acknowledged.
        rest = []
        for number in range(2, 7):
            rest.append(rig.save(chain(number, 3), wait=False))
            while not rest[-1].transfer.source_released:
                rest[-1].transfer.wait(0.001)
        assert not any(save.transfer.done for save in [first, *rest])
        before = syncs(rig)
        resume("volume.settle")
        for save in [first, *rest]:
            assert save.transfer.wait(30.0)
            assert save.transfer.ok.all()
    assert syncs(rig) - before == 4  # of the first save and of all the others
    assert [rig.load(chain(number, 3)) for number in range(1, 7)] == [3] * 6


def test_without_it_nothing_is_synced(open_rig: OpenRig, directories: Directories) -> None:
    with inject("file.sync*", "count"):
        rig = open_rig(shared=0)
        rig.save(chain(0, 8))
        rig.round()
        rig.close()
        assert reached("file.sync*") == 0
        assert reached("file.pwrite") > 0


def test_a_page_is_resident_on_disk_only_once_it_is_durable(
    open_rig: OpenRig, power: Callable[..., StoreConfig]
) -> None:
    rig = open_rig(power(shared=True))
    with inject("volume.settle", "pause"):
        save = rig.save(chain(0, 2), wait=False)
        wait_paused("volume.settle")
        assert rig.pages(Tier.SHARED) == 2
        assert rig.pages(Tier.DISK) == 0
        assert not save.transfer.done
        assert not save.transfer.landed(Tier.DISK).any()
        resume("volume.settle")
        save.transfer.wait()
    assert save.transfer.landed(Tier.DISK).all()
    assert rig.pages(Tier.DISK) == 2


# ---- when it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["file.sync", "volume.settle", "volume.after_bytes_sync", "volume.after_sync"])
def test_pages_whose_sync_fails_are_not_acknowledged_and_not_found(
    open_rig: OpenRig, power: Callable[..., StoreConfig], directories: Directories, point: str
) -> None:
    clock = ManualClock()
    rig = open_rig(power(), clock=clock)
    assert rig.save(chain(0, 2)).transfer.ok.all()
    for number, fault in enumerate(fail_each(point, errno.EIO), 1):
        with fault:
            save = rig.save(chain(number, 3))
        assert save.transfer.ok.all() != fault.has_fired, number
        assert rig.pages(Tier.DISK) == (2 if fault.has_fired else 5)
        assert rig.load(chain(number, 3)) == (0 if fault.has_fired else 3)
        assert_whole(rig.store)
        # A volume that a sync failed on is let go, and opened anew: what was acknowledged is in it.
        clock.advance(1.0)
        rig.round()
        rig.round()
        assert rig.load(chain(0, 2)) == 2
        if not fault.has_fired:
            rig.store.forget(chain(number, 3))
    rig.close()
    again = open_rig(power())
    assert again.load(chain(0, 2)) == 2
    assert again.pages(Tier.DISK) == 2


def test_a_volume_takes_no_page_after_a_failed_sync_until_it_is_opened_anew(
    open_rig: OpenRig, power: Callable[..., StoreConfig], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    rig = open_rig(power(), clock=clock)
    rig.save(chain(0, 2))
    with inject("file.sync", "errno", nth=1, value=errno.EIO):
        assert not rig.save(chain(1, 2)).transfer.ok.any()
    [member] = rig.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
    assert member.volume.is_suspect
    assert not rig.save(chain(2, 2)).transfer.ok.any()
    assert rig.load(chain(0, 2)) == 2  # read on
    clock.advance(1.0)
    del member
    rig.round()
    rig.round()
    assert "a sync of volume" in caplog.text
    assert rig.save(chain(2, 2)).transfer.ok.all()
    assert rig.load(chain(0, 2)) == 2
    assert_whole(rig.store)


def test_a_store_does_not_open_on_what_it_cannot_make_durable(
    open_rig: OpenRig, power: Callable[..., StoreConfig], directories: Directories
) -> None:
    rig = open_rig(directories.config(shared=0))
    rig.save(chain(0, 2))
    rig.close()
    for fault in fail_each("file.sync*", errno.EIO):
        with fault:
            if fault.nth <= 4:  # the directory's name, bytes, records, names in it
                with pytest.raises(TierIOError):
                    Rig(power())
            else:
                open_rig(power()).close()
    again = open_rig(power())
    assert again.load(chain(0, 2)) == 2


def test_a_cancelled_save_leaves_nothing_unsettled(
    open_rig: OpenRig, power: Callable[..., StoreConfig]
) -> None:
    rig = open_rig(power())
    with inject("mover.after_copy", "pause", nth=2):
        save = rig.save(chain(0, 4), wait=False)
        wait_paused("mover.after_copy")
        save.transfer.cancel()
        resume("mover.after_copy")
        save.transfer.wait()
    assert not save.transfer.ok.any()
    assert rig.pages(Tier.DISK) == 0
    assert rig.store.state(ALL_KEYS[0].tobytes())[Tier.DISK] is Residency.ABSENT
    assert_whole(rig.store)
    assert rig.save(chain(0, 4)).transfer.ok.all()


def test_the_setting_is_one_of_two(tmp_path: Path) -> None:
    disk = DiskTier("1MiB", str(tmp_path), durability="fsync")  # type: ignore[arg-type]
    with pytest.raises(StepwellUsageError, match="disk.durability: 'fsync' is neither 'process' nor 'power'"):
        StoreConfig(geometry=GEOMETRY, disk=disk).checked()
