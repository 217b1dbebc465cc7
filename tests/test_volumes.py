"""The directory protocol (FORMAT.md 1, 6, 7, 8), one process at a time or several stores in one."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from directory_child import SHAPES, VOLUME, AmpleLimits, TinyHeaders, make_directory
from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.errors import (
    BudgetError,
    ForkedError,
    StepwellError,
    StepwellUsageError,
    StoreClosedError,
    TierIOError,
    VolumeBusyError,
    VolumeError,
)
from stepwell.testing import powerloss
from stepwell.testing.faults import fail_each, inject, reached
from stepwell.tiers import birth, process_file, volumes
from stepwell.tiers.directory import DirectoryConfig, Full, HeldVolume, Machine, boot_id
from stepwell.tiers.entry import check_directory
from stepwell.tiers.limits import Limit
from stepwell.tiers.locks import NotTaken, try_lock
from stepwell.tiers.process_file import ProcessRecord
from stepwell.tiers.volumes import PATIENCE_NS, TierDirectory
from volume_kit import sealed

ID = "0123456789abcdef" * 2


class World:
    """One directory of one medium, and the stores that a test opens on it."""

    def __init__(self, medium: str, path: Path) -> None:
        self.medium = medium
        self.path = path
        self.suffixes = ["vol"] if medium == "shared" else ["meta", "pages"]
        self._opened: list[TierDirectory] = []

    def make(self, **config: object) -> TierDirectory:
        directory = make_directory(str(self.path), self.medium, **config)  # type: ignore[arg-type]
        self._opened.append(directory)
        return directory

    def open(self, **config: object) -> TierDirectory:
        directory = self.make(**config)
        directory.open()
        return directory

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in os.listdir(self.path) if name.startswith(prefix))

    def total(self) -> int:
        names = [name for name in self.names() if name[:2] in ("v-", "t-", "x-")]
        return sum((self.path / name).lstat().st_size for name in names)

    def files_of(self, volume_id: str, stage: str = "v") -> list[Path]:
        return [self.path / f"{stage}-{volume_id}.{suffix}" for suffix in self.suffixes]

    def metadata_of(self, volume_id: str) -> Path:
        return self.files_of(volume_id)[0]

    def assert_tidy(self) -> None:
        """No half-born or half-removed name; every volume has a lock, every lock a volume."""
        assert self.names("t-") == []
        assert self.names("x-") == []
        ids = {name[2:34] for name in self.names("v-")}
        for volume_id in ids:
            wanted = [f"v-{volume_id}.{suffix}" for suffix in ("lock", *self.suffixes)]
            assert [n for n in self.names(f"v-{volume_id}") if ".lmdb" not in n] == wanted

    def close(self) -> None:
        for directory in self._opened:
            directory.close()


@pytest.fixture(params=["disk", "shared"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "disk":
        made = World("disk", tmp_path / "tier")
        yield made
        made.close()
        return
    parent = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    made = World("shared", parent / "tier")
    try:
        yield made
        made.close()
    finally:
        shutil.rmtree(parent)


def grow(directory: TierDirectory) -> HeldVolume:
    outcome = directory.grow()
    assert isinstance(outcome, HeldVolume), outcome
    return outcome


def refused(directory: TierDirectory) -> Full:
    outcome = directory.grow()
    assert isinstance(outcome, Full), outcome
    return outcome


def open_descriptors(world: World) -> list[str]:
    """Return what this process has open in the directory, deleted files included."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # That of the listing itself.
    return sorted(link for link in links if link.startswith(f"{world.path}/"))


# Opening


def test_a_missing_directory_is_made_for_the_user_alone(world: World) -> None:
    world.open()
    assert stat.S_IMODE(world.path.stat().st_mode) == 0o700
    for name in world.names():
        assert stat.S_IMODE((world.path / name).stat().st_mode) == 0o600


def test_a_symbolic_link_to_a_directory_is_refused(world: World) -> None:
    target = world.path.with_name("target")
    target.mkdir(mode=0o700)
    world.path.symlink_to(target)
    with pytest.raises(VolumeError, match="symbolic link"):
        world.open()
    assert os.listdir(target) == []


def test_a_file_is_refused(world: World) -> None:
    world.path.touch()
    with pytest.raises(VolumeError, match="not a directory"):
        world.open()


def test_a_directory_without_a_parent_is_refused(world: World) -> None:
    world.path = world.path / "nowhere" / "tier"
    with pytest.raises(VolumeError, match=r"nowhere/tier has no parent directory"):
        world.open()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_is_refused(world: World, mode: int) -> None:
    world.path.mkdir()
    world.path.chmod(mode)
    with pytest.raises(VolumeError, match=rf"{mode:04o}\); chmod 0700 "):
        world.open()


@pytest.mark.parametrize("path", ["/dev/shm", "/tmp"])
def test_a_directory_of_the_machine_is_refused_and_not_to_be_changed(path: str) -> None:
    """`chmod 0700 /tmp` breaks a machine."""
    with pytest.raises(VolumeError) as refused:
        check_directory(path)
    assert str(refused.value).endswith(f"; name a directory of your own below it, e.g. {path}/stepwell")


def test_a_sticky_directory_is_refused_and_not_to_be_changed(world: World) -> None:
    world.path.mkdir()
    world.path.chmod(0o1777)
    with pytest.raises(VolumeError, match=rf"1777\); name a directory .* below it, e.g. {world.path}/stepwell"):
        world.open()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(world: World) -> None:
    world.path.mkdir(mode=0o700)
    os.chown(world.path, 12345, -1)
    with pytest.raises(VolumeError, match="belongs to user 12345"):
        world.open()


def test_a_network_file_system_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    nfs = SimpleNamespace(is_network=True, type=0x6969)
    monkeypatch.setattr(volumes._core, "file_statfs", lambda path: nfs)
    with pytest.raises(VolumeError, match=r"network file system .type 0x6969"):
        world.open()


def test_a_capacity_below_one_volume_is_refused_with_the_numbers(world: World) -> None:
    for capacity in (0, VOLUME - 1):
        config = replace(world.make()._config, capacity_bytes=capacity, floor_bytes=0)
        directory = TierDirectory(config, TinyHeaders(SHAPES["a"]))
        with pytest.raises(BudgetError, match=f"{capacity} bytes is smaller.*{VOLUME}"):
            directory.open()


def test_a_share_above_the_capacity_is_refused(world: World) -> None:
    with pytest.raises(BudgetError, match=f"share {5 * VOLUME} .* {4 * VOLUME}"):
        world.open(floor=5)


def test_a_volume_that_holds_no_page_is_refused(world: World) -> None:
    config = replace(world.make()._config, volume_bytes=8192, floor_bytes=0)
    with pytest.raises(BudgetError, match="8192 bytes holds no page"):
        TierDirectory(config, TinyHeaders(SHAPES["a"])).open()
    assert world.names("p-") == []


def test_a_capacity_above_what_the_machine_has_is_refused_with_its_source(world: World) -> None:
    class Small(AmpleLimits):
        def total(self, path: str) -> Limit:
            return Limit(3 * VOLUME, "memory.max of a container")

    match = f"{4 * VOLUME} bytes is more than {3 * VOLUME} bytes .memory.max of a container"
    with pytest.raises(BudgetError, match=match):
        world.open(machine=Machine(limits=Small()))


def test_the_limits_of_the_machine_are_asked_by_default(world: World) -> None:
    config = replace(world.make()._config, capacity_bytes=1 << 60)
    with pytest.raises(BudgetError, match=str(1 << 60)):
        TierDirectory(config, TinyHeaders(SHAPES["a"])).open()


def test_calls_before_open_and_after_close_are_misuse(world: World) -> None:
    directory = world.make()
    with pytest.raises(StoreClosedError):
        directory.grow()
    directory.open()
    directory.open()
    volume = grow(directory)
    directory.close()
    directory.close()
    with pytest.raises(StoreClosedError, match=r"is not open.*open a store on it with PageStore\(config\)"):
        directory.scan()
    with pytest.raises(StepwellUsageError):
        directory.give_back(volume)
    assert world.names("p-") == []


# Birth


def test_a_born_volume_is_whole_reserved_and_carries_its_header(world: World) -> None:
    clock = ManualClock(5000.0)
    directory = world.open(machine=Machine(clock=clock, limits=AmpleLimits()))
    volume = grow(directory)
    world.assert_tidy()
    assert not volume.is_adopted
    assert not volume.is_rebooted
    assert volume.total_bytes == directory.volume_bytes == world.total() <= VOLUME
    for path in world.files_of(volume.volume_id):
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    header = TinyHeaders(SHAPES["a"]).decode(
        world.metadata_of(volume.volume_id).read_bytes()[:4096],
        volume.header.metadata_bytes,
        volume.header.pages_bytes,
    )
    assert header.volume_id.hex() == volume.volume_id
    assert header.fingerprint == SHAPES["a"].fingerprint
    assert header.boot_id == boot_id()
    assert len(set(boot_id())) > 4
    assert header.birth_ns == clock.wall_ns() == volume.birth_ns
    assert header.kind == 1


def test_its_descriptors_make_a_volume_of_the_core(world: World) -> None:
    volume = grow(world.open())
    made = _core.Volume(
        SHAPES["a"],
        volume.header,
        volume.metadata.detach(),
        volume.pages.detach() if volume.pages else -1,
        volume.direct_io,
    )
    pages, damaged = made.recover()[0], made.recover()[-1]
    assert len(pages) == 0
    assert damaged == 0


def test_the_budget_is_one_for_all_stores_of_a_directory(world: World) -> None:
    first, second = world.open(floor=1), world.open(floor=1, fingerprint="b")
    for directory in (first, second, first, second):
        grow(directory)
        assert world.total() <= 4 * VOLUME
    full = refused(first)
    assert full.reason == "the directory is full"
    assert (full.needed_bytes, full.capacity_bytes) == (first.volume_bytes, 4 * VOLUME)
    assert full.total_bytes == world.total()
    assert full.free_bytes == 4 * VOLUME - world.total()
    assert {v.volume_id for v in first.held}.isdisjoint(v.volume_id for v in second.held)
    assert first.scan().held_by_others == 2


def test_each_process_keeps_to_its_own_capacity(world: World) -> None:
    large, small = world.open(capacity=4), world.open(capacity=2)
    grow(large)
    grow(small)
    assert refused(small).reason == "the directory is full"
    grow(large)
    assert world.total() <= 4 * VOLUME


def test_nobody_holds_more_than_its_whole_capacity(world: World) -> None:
    directory = world.open(capacity=1)
    grow(directory)
    assert refused(directory).reason == "this process holds its whole capacity"


def test_space_is_reserved_in_steps_with_a_look_before_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(birth, "STEP_BYTES", 8192)
    looks: list[str] = []

    class Shrinking(AmpleLimits):
        def available(self, path: str) -> Limit:
            looks.append(path)
            return Limit(8192 if len(looks) < 3 else 8, "MemAvailable")

    directory = world.open(machine=Machine(limits=Shrinking()))
    match = r"t-\w+\.(vol|pages): need \d+ bytes more, 8 bytes free .MemAvailable"
    with inject("file.reserve", "count"):
        with pytest.raises(BudgetError, match=match):
            directory.grow()
        assert reached("file.reserve") == 2
    assert looks == [str(world.path)] * 3
    assert world.names("t-") + world.names("v-") == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_a_budget_error_and_leaves_nothing(world: World, error: int) -> None:
    directory = world.open()
    match = f"file system refuses .{os.strerror(error)}"
    with inject("file.reserve", "errno", value=error), pytest.raises(BudgetError, match=match):
        directory.grow()
    assert world.names("t-") + world.names("v-") == []
    grow(directory)


def test_without_fallocate_zeros_are_written(world: World) -> None:
    directory = world.open()
    with inject("file.reserve", "errno", value=errno.EOPNOTSUPP):
        volume = grow(directory)
    for path in world.files_of(volume.volume_id):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_full_disk_without_fallocate_is_told_at_birth_and_leaves_nothing(world: World) -> None:
    """Zeros may be taken without blocks for them (delayed allocation): asked for with a sync."""
    directory = world.open()
    before = directory.scan()
    refused = pytest.raises(BudgetError, match="the file system refuses \\(No space left on device\\)")
    no_blocks = inject("file.sync", "errno", nth=1, value=errno.ENOSPC)
    with inject("file.reserve", "errno", value=errno.EOPNOTSUPP), no_blocks, refused:
        directory.grow()
    assert directory.scan() == before


def test_a_birth_that_fails_between_its_two_names_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    with make_directory(str(path), "disk") as directory:
        before = sorted(os.listdir(path))
        with inject("file.rename", "errno", nth=2, value=errno.EIO):
            with pytest.raises(TierIOError, match="disk tier: Input/output error"):
                directory.grow()
            assert reached("file.rename") == 2
        assert sorted(os.listdir(path)) == before


def test_the_name_that_makes_a_volume_of_files_is_given_last_and_taken_first(tmp_path: Path) -> None:
    """So that who dies in between leaves files that are none, and no volume without its pages."""
    with make_directory(str(tmp_path / "tier"), "disk") as directory:
        with powerloss.record() as first:
            volume = grow(directory)
        volume.close_files()
        with powerloss.record() as last:
            directory.remove(volume)
    renames = [[call for call in each.calls if call.kind is powerloss.Kind.RENAME] for each in (first, last)]
    given, taken = ([Path(call.path).suffix for call in calls] for calls in renames)
    assert given == [".pages", ".meta"]
    assert taken == [".meta", ".pages"]


def test_the_directory_lock_is_not_held_while_a_volume_is_filled(world: World) -> None:
    second = world.make(fingerprint="b", lock_timeout=0.0)

    class Nosy(AmpleLimits):
        def available(self, path: str) -> Limit:
            second.open()
            second.scan()
            return super().available(path)

    grow(world.open(machine=Machine(limits=Nosy())))
    assert second.view.total_bytes > 0
    world.assert_tidy()


def test_a_volume_being_born_counts_and_is_left_alone(world: World) -> None:
    second = world.make(capacity=2, fingerprint="b")
    seen: list[Full] = []

    class Nosy(AmpleLimits):
        def available(self, path: str) -> Limit:
            if not seen:
                second.open()
                grow(second)
                seen.append(refused(second))
            return super().available(path)

    grow(world.open(capacity=2, machine=Machine(limits=Nosy())))
    assert seen[0].reason == "the directory is full"
    world.assert_tidy()


def test_a_birth_that_cannot_get_the_directory_lock_gives_its_space_back(world: World) -> None:
    clock = ManualClock()
    taken: list[_core.Descriptor] = []

    class Greedy(AmpleLimits):
        def available(self, path: str) -> Limit:
            if not taken:
                lock = try_lock(f"{world.path}/directory.lock")
                assert not isinstance(lock, NotTaken)
                taken.append(lock)
            return super().available(path)

    machine = Machine(clock=clock, wait=clock.advance, limits=Greedy())
    directory = world.open(machine=machine)
    with pytest.raises(VolumeBusyError):
        directory.grow()
    assert world.total() == 0
    taken[0].close()
    directory.scan()
    assert world.names("t-") + world.names("v-") == []
    assert directory.counts.swept_leftovers == 1


# Adoption and orphans


def test_an_orphan_of_our_fingerprint_is_adopted_with_its_content(world: World) -> None:
    first = world.open()
    volume = grow(first)
    inode = world.metadata_of(volume.volume_id).stat().st_ino
    first.close()
    second = world.open()
    assert second.scan().orphans == 1
    (adopted,) = second.adopt()
    assert adopted.volume_id == volume.volume_id
    assert adopted.is_adopted
    assert not adopted.is_rebooted
    assert adopted.birth_ns == volume.birth_ns
    assert os.fstat(adopted.metadata.fileno()).st_ino == inode
    assert second.adopt() == []


def test_orphans_are_adopted_oldest_birth_first_up_to_our_capacity(world: World) -> None:
    clock = ManualClock()
    first = world.open(machine=Machine(clock=clock, limits=AmpleLimits()))
    births = []
    for _ in range(3):
        births.append(grow(first).volume_id)
        clock.advance(1.0)
    first.close()
    second = world.open()
    assert [volume.volume_id for volume in second.adopt()] == births


def test_a_living_neighbours_volume_is_left_alone(world: World) -> None:
    first, second = world.open(), world.open()
    grow(first)
    assert second.adopt() == []
    assert second.view.held_by_others == 1


def test_another_boot_is_noticed(world: World) -> None:
    first = world.open(machine=Machine(boot_id=lambda: b"B" * 16, limits=AmpleLimits()))
    grow(first)
    first.close()
    (adopted,) = world.open().adopt()
    assert adopted.is_rebooted


def test_an_orphan_is_taken_before_a_volume_is_born(world: World) -> None:
    first = world.open()
    volume = grow(first)
    first.close()
    second = world.open()
    assert grow(second).volume_id == volume.volume_id
    assert second.counts.born == 0


def test_an_orphan_of_another_fingerprint_stays_until_its_room_is_needed(world: World) -> None:
    clock = ManualClock()
    machine = Machine(clock=clock, limits=AmpleLimits())
    other = world.open(fingerprint="b", machine=machine)
    orphans = []
    for _ in range(2):
        orphans.append(grow(other).volume_id)
        clock.advance(1.0)
    other.close()
    directory = world.open()
    assert directory.adopt() == []
    grow(directory)
    grow(directory)
    assert directory.counts.evicted_orphans == 0
    grow(directory)
    assert directory.counts.evicted_orphans == 1
    assert not world.metadata_of(orphans[0]).exists()
    assert world.metadata_of(orphans[1]).exists()
    world.assert_tidy()


def test_no_orphan_is_evicted_where_that_would_not_make_room(world: World) -> None:
    other, neighbour = world.open(fingerprint="b"), world.open(fingerprint="c")
    orphan = grow(other)
    other.close()
    for _ in range(3):
        grow(neighbour)
    directory = world.open(capacity=2)
    assert refused(directory).reason == "the directory is full"
    assert world.metadata_of(orphan.volume_id).exists()


def test_an_orphan_of_another_medium_is_foreign(world: World) -> None:
    medium = "shared" if world.medium == "disk" else "disk"
    with make_directory(str(world.path), medium) as other:
        grow(other)
    directory = world.open(capacity=1)
    assert directory.adopt() == []
    assert directory.view.orphans == 1
    grow(directory)
    assert directory.counts.evicted_orphans == 1
    world.assert_tidy()


def test_a_capacity_that_shrank_is_kept_by_removing_orphans(world: World) -> None:
    clock = ManualClock()
    machine = Machine(clock=clock, limits=AmpleLimits())
    other = world.open(fingerprint="b", machine=machine)
    foreign = grow(other).volume_id
    other.close()
    first = world.open(machine=machine)
    births = []
    for _ in range(3):
        clock.advance(1.0)
        births.append(grow(first).volume_id)
    first.close()
    second = world.open(capacity=2)
    assert [volume.volume_id for volume in second.adopt()] == births[1:]
    assert not world.metadata_of(foreign).exists()
    assert world.total() <= 2 * VOLUME
    world.assert_tidy()


def test_a_volume_laid_out_for_a_smaller_alignment_is_not_read_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "tier")
    monkeypatch.setattr(volumes._core, "file_direct_alignment", lambda path: 512)
    with make_directory(path, "disk") as first:
        assert grow(first).header.alignment == 512
    monkeypatch.setattr(volumes._core, "file_direct_alignment", lambda path: 4096)
    with make_directory(path, "disk") as second:
        (adopted,) = second.adopt()
        assert not adopted.direct_io
        assert grow(second).direct_io
    config = replace(make_directory(path, "disk")._config, direct_io=False)
    with TierDirectory(config, TinyHeaders(SHAPES["a"])) as buffered:
        assert not any(volume.direct_io for volume in buffered.adopt())
    monkeypatch.setattr(volumes._core, "file_direct_alignment", lambda path: 0)
    with make_directory(path, "disk") as third:
        assert not any(volume.direct_io for volume in third.adopt())


# Giving back and removing


def test_a_volume_given_back_is_an_orphan_at_once(world: World) -> None:
    first, second = world.open(), world.open()
    volume = grow(first)
    first.give_back(volume)
    assert [v.volume_id for v in second.adopt()] == [volume.volume_id]
    with pytest.raises(StepwellUsageError):
        first.give_back(volume)
    assert first.counts.given_back == 1


def test_a_removed_volume_is_gone_with_its_lmdb(world: World) -> None:
    directory = world.open()
    volume, kept = grow(directory), grow(directory)
    lmdb = Path(volume.lmdb_path)
    for path in (lmdb, Path(f"{lmdb}-old")):
        path.mkdir()
        (path / "data.mdb").write_bytes(b"x" * 100)
    directory.remove(volume)
    assert world.names(f"v-{volume.volume_id}") == []
    assert directory.held == (kept,)
    world.assert_tidy()


def test_lmdb_without_its_volume_is_swept(world: World) -> None:
    directory = world.open()
    lmdb = world.path / f"v-{ID}.lmdb"
    lmdb.mkdir()
    (lmdb / "data.mdb").touch()
    directory.scan()
    assert not lmdb.exists()


def test_close_leaves_volumes_and_takes_the_process_file(world: World) -> None:
    directory = world.open()
    volume = grow(directory)
    assert len(world.names("p-")) == 2
    directory.close()
    assert world.names("p-") == []
    assert world.metadata_of(volume.volume_id).exists()


# What the dead leave


@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize("stage", ["t", "x"])
def test_half_born_and_half_removed_files_are_swept(
    world: World, stage: str, has_lock: bool
) -> None:
    directory = world.open()
    for path in world.files_of(ID, stage):
        path.write_bytes(b"x" * 5000)
    if has_lock:
        (world.path / f"v-{ID}.lock").touch()
    directory.scan()
    assert [name for name in world.names() if ID in name] == []
    assert directory.counts.swept_leftovers == 1


def test_half_born_files_with_a_living_parent_are_left(world: World) -> None:
    directory = world.open()
    for path in world.files_of(ID, "t"):
        path.write_bytes(b"x" * 5000)
    lock = try_lock(f"{world.path}/v-{ID}.lock", flags=os.O_CREAT)
    assert not isinstance(lock, NotTaken)
    assert directory.scan().total_bytes == 5000 * len(world.suffixes)
    lock.close()
    assert directory.scan().total_bytes == 0


def test_a_lock_without_files_is_swept(world: World) -> None:
    directory = world.open()
    (world.path / f"v-{ID}.lock").touch()
    directory.scan()
    assert world.names("v-") == []


def test_pages_without_metadata_are_no_volume(tmp_path: Path) -> None:
    with make_directory(str(tmp_path / "tier"), "disk") as directory:
        (tmp_path / "tier" / f"v-{ID}.pages").write_bytes(b"x" * 5000)
        (tmp_path / "tier" / f"t-{ID}.meta").write_bytes(b"x" * 5000)
        assert directory.scan().total_bytes == 0


def test_the_dead_processes_files_are_swept(world: World) -> None:
    directory = world.open()
    mine = world.names("p-")
    (world.path / f"p-{ID}.lock").touch()
    (world.path / f"p-{ID}.proc").write_bytes(b"x" * 4096)
    (world.path / f"p-{ID[::-1]}.proc").touch()
    directory.scan()
    assert world.names("p-") == mine
    assert directory.counts.swept_processes == 2


# What a hostile hand leaves


@pytest.mark.parametrize("content", [b"", b"x", b"STEPWELV" + b"\xff" * 6000])
def test_a_damaged_volume_is_removed(world: World, content: bytes) -> None:
    directory = world.open()
    for path in world.files_of(ID):
        path.write_bytes(content)
    (world.path / f"v-{ID}.lock").touch()
    assert directory.adopt() == []
    assert [name for name in world.names() if ID in name] == []
    assert directory.counts.swept_damaged == 1


def test_a_truncated_volume_is_removed_and_a_misnamed_one_too(world: World) -> None:
    first = world.open()
    truncated, misnamed = grow(first), grow(first)
    first.close()
    os.truncate(world.files_of(truncated.volume_id)[-1], 8192)
    for path in world.files_of(misnamed.volume_id):
        path.rename(str(path).replace(misnamed.volume_id, ID))
    second = world.open()
    assert second.adopt() == []
    assert second.counts.swept_damaged == 2
    world.assert_tidy()


def odd_directory(path: Path) -> None:
    path.mkdir()


def odd_symlink(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def odd_dangling_symlink(path: Path) -> None:
    path.symlink_to("nowhere")


def odd_fifo(path: Path) -> None:
    os.mkfifo(path)


def odd_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # The path of a socket has room for 107 bytes only.
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(path.name)
    finally:
        os.chdir(here)


def odd_hard_link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"x" * 100)
    os.link(path.parent / "elsewhere", path)


ODD = [odd_directory, odd_symlink, odd_dangling_symlink, odd_fifo, odd_socket, odd_hard_link]


@pytest.mark.parametrize("make_odd", ODD)
@pytest.mark.parametrize("suffix", ["vol", "meta", "pages", "lock"])
def test_a_name_that_is_no_regular_file_of_ours_is_never_opened(
    world: World, make_odd: Callable[[Path], None], suffix: str
) -> None:
    directory = world.open()
    make_odd(world.path / f"v-{ID}.{suffix}")
    assert directory.adopt() == []
    assert (world.path / f"v-{ID}.{suffix}").lstat()
    assert directory.view.total_bytes == 0
    assert directory.view.odd + directory.view.unusable == 1
    grow(directory)


@pytest.mark.parametrize("make_odd", ODD)
def test_a_volume_with_an_odd_lock_counts_and_is_left_alone(
    world: World, make_odd: Callable[[Path], None]
) -> None:
    first = world.open()
    volume = grow(first)
    first.close()
    lock = world.path / f"v-{volume.volume_id}.lock"
    lock.unlink()
    make_odd(lock)
    second = world.open()
    assert second.adopt() == []
    assert second.view.unusable == 1
    assert second.view.total_bytes == volume.total_bytes


@pytest.mark.parametrize("make_odd", ODD)
@pytest.mark.parametrize("suffix", ["lock", "proc"])
def test_an_odd_process_file_is_ignored(
    world: World, make_odd: Callable[[Path], None], suffix: str
) -> None:
    directory = world.open()
    make_odd(world.path / f"p-{ID}.{suffix}")
    directory.scan()
    assert directory.view.neighbours == ()


def test_an_odd_directory_lock_is_an_error(world: World) -> None:
    world.path.mkdir(mode=0o700)
    (world.path / "directory.lock").symlink_to("/etc/passwd")
    with pytest.raises(VolumeError, match=r"directory\.lock is not a regular file"):
        world.open()


def test_names_that_do_not_match_are_left_alone_and_not_counted(world: World) -> None:
    directory = world.open()
    strange = [
        f"v-{ID[:-1]}.vol", f"v-{ID.upper()}.vol", f"v-{ID}.vol~", f"v-{ID}", f"w-{ID}.vol",
        f"v-{ID}.vol\n", f"t-{ID}.lock", f"p-{ID}.vol", "README", "v-\udcff.vol",
    ]  # fmt: skip
    for name in strange:
        (world.path / name).write_bytes(b"x" * 100)
    before = world.names()
    assert directory.scan().total_bytes == 0
    assert world.names() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_left_alone(world: World) -> None:
    first = world.open()
    volume = grow(first)
    first.close()
    for path in world.files_of(volume.volume_id):
        os.chown(path, 12345, -1)
    second = world.open()
    assert second.adopt() == []
    assert second.view.odd == len(world.suffixes)
    assert world.metadata_of(volume.volume_id).exists()


def test_a_header_that_cannot_be_read_is_no_reason_to_remove_a_volume(world: World) -> None:
    first = world.open()
    volume = grow(first)
    first.close()
    second = world.open()
    for action, value in (("errno", errno.EIO), ("short", 0)):
        with inject("file.pread", action, value=value):  # type: ignore[arg-type]
            assert second.adopt() == []
        assert second.view.unreadable == 1
    assert [v.volume_id for v in second.adopt()] == [volume.volume_id]


def test_a_lock_file_that_somebody_removed_is_made_anew_by_its_holder(world: World) -> None:
    first, second = world.open(), world.open()
    volume = grow(first)
    lock = world.path / f"v-{volume.volume_id}.lock"
    lock.unlink()
    assert first.scan().lost_ids == ()
    assert lock.exists()
    assert second.adopt() == []
    first.give_back(volume)
    assert len(second.adopt()) == 1


def test_a_volume_whose_lock_another_process_got_is_reported_lost(world: World) -> None:
    first, second = world.open(), world.open()
    volume = grow(first)
    (world.path / f"v-{volume.volume_id}.lock").unlink()
    assert len(second.adopt()) == 1
    assert first.scan().lost_ids == (volume.volume_id,)
    with pytest.raises(VolumeBusyError, match="give it back"):
        first.remove(volume)
    first.give_back(volume)
    assert second.scan().lost_ids == ()
    world.assert_tidy()


def test_two_opens_of_a_removed_and_remade_lock_do_not_both_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first = try_lock(str(path), flags=os.O_CREAT)
    assert not isinstance(first, NotTaken)
    assert try_lock(str(path)) is NotTaken.HELD
    path.unlink()
    assert try_lock(str(path)) is NotTaken.MISSING
    second = try_lock(str(path), flags=os.O_CREAT)
    assert not isinstance(second, NotTaken)
    second.close()
    first.close()


def test_a_lock_on_a_name_that_changes_under_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    flock, swaps = _core.file_lock, [1, 2, 3]

    def swap_then_lock(fd: int) -> bool:
        if swaps:
            swaps.pop()
            path.unlink()
            path.touch()
        return flock(fd)

    monkeypatch.setattr(_core, "file_lock", swap_then_lock)
    lock = try_lock(str(path))
    assert not isinstance(lock, NotTaken)
    assert os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    lock.close()


# The directory lock


def test_a_directory_lock_held_too_long_is_an_error_that_names_its_holder(world: World) -> None:
    world.open()
    clock = ManualClock()
    lock = try_lock(f"{world.path}/directory.lock")
    assert not isinstance(lock, NotTaken)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    second = world.make(machine=Machine(clock=clock, wait=wait, limits=AmpleLimits()))
    match = rf"directory\.lock was held for 5 s by pid {os.getpid()} "
    with pytest.raises(VolumeBusyError, match=match):
        second.open()
    assert 5.0 <= sum(waits) <= 5.1
    assert len(waits) < 400
    lock.close()
    second.open()


def test_wanted_does_not_wait_for_the_directory_lock(world: World) -> None:
    directory = world.open()
    lock = try_lock(f"{world.path}/directory.lock")
    assert not isinstance(lock, NotTaken)
    assert directory.wanted() == 0
    lock.close()


# Wants


def test_a_starving_process_is_served_by_the_owner_furthest_above_its_floor(world: World) -> None:
    rich, richer = world.open(capacity=5, floor=1), world.open(capacity=5, floor=1)
    for directory in (rich, rich, richer, richer, richer):
        grow(directory)
    poor = world.open(capacity=5, floor=1, fingerprint="b")
    assert refused(poor).reason == "the directory is full"
    assert rich.wanted() == 0
    assert poor.wanted() == 0
    assert richer.wanted() == richer.volume_bytes
    richer.give_back(richer.held[0])
    assert rich.wanted() == 0, "an orphan is room enough"
    assert richer.wanted() == 0
    grow(poor)
    assert rich.scan().wanted_bytes == 0
    assert world.total() <= 5 * VOLUME


def test_what_was_given_back_for_a_neighbour_is_not_taken_above_the_floor(world: World) -> None:
    rich = world.open(floor=1)
    for _ in range(4):
        grow(rich)
    poor = world.open(floor=1)
    refused(poor)
    given = rich.held[0].volume_id
    rich.give_back(rich.held[0])
    full = refused(rich)
    assert full.reason == "a neighbour below its floor comes first"
    assert full.wanted_by_neighbours_bytes == poor.volume_bytes
    third = world.open(floor=1)
    assert rich.adopt() == []
    assert grow(poor).volume_id == given
    assert isinstance(third.grow(), Full)


def test_a_process_below_its_floor_takes_what_is_there_though_others_lack_more(
    world: World,
) -> None:
    rich = world.open()
    for _ in range(3):
        grow(rich)
    poorer, poor = world.open(floor=2), world.open(floor=1)
    poorer.publish_want(2 * poorer.volume_bytes)
    assert refused(rich).reason == "a neighbour below its floor comes first"
    grow(poor)
    assert refused(poor).total_bytes == world.total()


def test_an_owner_keeps_its_floor(world: World) -> None:
    first = world.open(floor=4)
    for _ in range(4):
        grow(first)
    poor = world.open(floor=1)
    refused(poor)
    assert first.wanted() == 0


def test_several_volumes_are_given_where_several_are_lacking(world: World) -> None:
    rich = world.open(floor=1)
    for _ in range(4):
        grow(rich)
    poor = world.open(floor=2)
    refused(poor)
    assert rich.wanted() == 2 * rich.volume_bytes
    for _ in range(2):
        rich.give_back(rich.held[0])
    grow(poor)
    assert poor.lacking_bytes == poor.volume_bytes
    assert rich.wanted() == 0
    grow(poor)
    assert poor.lacking_bytes == 0
    assert rich.scan().wanted_bytes == 0


def test_an_owner_that_does_not_answer_is_passed_over(world: World) -> None:
    now = [1000]
    machine = Machine(boottime_ns=lambda: now[0], limits=AmpleLimits())
    silent = world.open(machine=machine, capacity=5)
    second = world.open(machine=machine, capacity=5)
    for directory in (silent, silent, silent, second, second):
        grow(directory)
    poor = world.open(machine=machine, capacity=5)
    refused(poor)
    now[0] += PATIENCE_NS - 1
    assert second.wanted() == 0
    now[0] += 1
    assert second.wanted() == second.volume_bytes


def test_the_floor_is_counted_in_whole_volumes(world: World) -> None:
    config = replace(world.make()._config, floor_bytes=2 * VOLUME - 1)
    with TierDirectory(
        config, TinyHeaders(SHAPES["a"]), machine=Machine(limits=AmpleLimits())
    ) as directory:
        assert directory.floor_bytes == directory.volume_bytes == directory.lacking_bytes
        grow(directory)
        assert directory.lacking_bytes == 0


def test_a_want_ends_when_it_is_taken_back(world: World) -> None:
    rich = world.open()
    for _ in range(4):
        grow(rich)
    poor = world.open()
    poor.publish_want(poor.volume_bytes)
    assert rich.wanted() == rich.volume_bytes
    poor.publish_want(0)
    assert rich.wanted() == 0


# Process files


def record(**changes: object) -> ProcessRecord:
    plain = ProcessRecord(b"i" * 16, 7, b"b" * 16, 1 << 40, 5, 4, 1, 99)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_process_record_has_the_bytes_of_the_format() -> None:
    data = record().encode()
    assert len(data) == 100
    assert data[:16] == b"STEPWELP" + struct.pack("<II", 1, 0)
    assert data[16:56] == b"i" * 16 + struct.pack("<Q", 7) + b"b" * 16
    assert struct.unpack("<5Q", data[56:96]) == (1 << 40, 5, 4, 1, 99)
    assert struct.unpack("<I", data[96:]) == (_core.crc32c(data[:96]),)
    assert process_file.decode(data) == record()


def test_a_flipped_bit_makes_a_process_record_none() -> None:
    data = record().encode()
    for bit in range(800):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert process_file.decode(bytes(flipped)) is None
    assert process_file.decode(data[:99]) is None
    assert process_file.decode(b"") is None


def neighbour(world: World, data: bytes) -> _core.Descriptor:
    """Put the process file of a living neighbour into the directory; return its lock."""
    (world.path / f"p-{ID}.proc").write_bytes(data)
    lock = try_lock(f"{world.path}/p-{ID}.lock", flags=os.O_CREAT)
    assert not isinstance(lock, NotTaken)
    return lock


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        record(process_id=bytes.fromhex(ID)).encode()[:-1],
        record(process_id=b"another's id....").encode(),
    ],
)
def test_a_process_file_that_is_none_asks_for_nothing(world: World, data: bytes) -> None:
    directory = world.open()
    lock = neighbour(world, data)
    assert directory.scan().neighbours == ()
    for _ in range(4):
        grow(directory)
    assert directory.wanted() == 0
    lock.close()


def test_a_neighbour_that_wants_the_world_gets_no_more_than_what_is_above_the_floor(
    world: World,
) -> None:
    directory = world.open(floor=2)
    for _ in range(4):
        grow(directory)
    huge = (1 << 64) - 1
    greedy = record(
        process_id=bytes.fromhex(ID),
        floor_bytes=huge,
        held_bytes=0,
        want_bytes=huge,
        want_since_ns=0,
    )
    lock = neighbour(world, greedy.encode())
    assert directory.wanted() == 2 * directory.volume_bytes
    lock.close()


def test_a_want_is_no_more_than_what_lacks_by_the_process_own_figures(world: World) -> None:
    directory = world.open()
    for _ in range(4):
        grow(directory)
    sated = record(
        process_id=bytes.fromhex(ID), floor_bytes=VOLUME, held_bytes=VOLUME, want_bytes=VOLUME
    )
    lock = neighbour(world, sated.encode())
    assert directory.wanted() == 0
    lock.close()


# Faults and forks

Step = Callable[[World, TierDirectory], object]


def step_adopt(world: World, directory: TierDirectory) -> object:
    return directory.adopt()


def step_grow(world: World, directory: TierDirectory) -> object:
    return directory.grow()


def step_evict_and_grow(world: World, directory: TierDirectory) -> object:
    return directory.grow()


def step_remove(world: World, directory: TierDirectory) -> object:
    for volume in directory.held[:1]:
        directory.remove(volume)
    return None


def step_wanted(world: World, directory: TierDirectory) -> object:
    return directory.wanted()


def prepare(world: World, step: Step, number: int) -> TierDirectory:
    """Return an open directory, ready for the step; each round has one of its own."""
    round_ = World(world.medium, world.path.parent / f"{step.__name__}-{number}")
    world.path = round_.path
    if step is step_adopt:
        for fingerprint in "ab":
            with world.make(fingerprint=fingerprint) as other:
                grow(other)
    if step is step_evict_and_grow:
        with world.make(fingerprint="b") as other:
            for _ in range(4):
                grow(other)
    directory = world.open()
    if step in (step_remove, step_wanted):
        grow(directory)
    return directory


@pytest.mark.parametrize(
    ("step", "error"),
    [
        pytest.param(step, error, id=f"{step.__name__}-{errno.errorcode[error]}")
        for step, error in (
            (step_adopt, errno.EIO),
            (step_grow, errno.EIO),
            (step_grow, errno.ENOSPC),
            (step_evict_and_grow, errno.EROFS),
            (step_remove, errno.EIO),
            (step_remove, errno.EROFS),
            (step_wanted, errno.EIO),
        )
    ],
)
def test_a_step_that_fails_at_any_call_leaks_nothing_and_works_when_repeated(
    world: World, step: Step, error: int
) -> None:
    failures = 0
    for fault in fail_each("file.*", error):
        directory = prepare(world, step, fault.nth)
        held, descriptors = len(directory.held), open_descriptors(world)
        raised: StepwellError | None = None
        try:
            with fault:
                step(world, directory)
        except StepwellError as caught:
            raised = caught
        if raised is not None:
            failures += 1
            if isinstance(raised, TierIOError):
                assert raised.errno == error
            else:
                assert isinstance(raised, BudgetError)
                assert error == errno.ENOSPC
            assert str(world.path) in str(raised)
            if len(directory.held) == held:
                assert len(open_descriptors(world)) == len(descriptors)
        assert world.total() <= 4 * VOLUME
        assert step(world, directory) is not None or step is step_remove
        directory.scan()
        world.assert_tidy()
        if step is step_remove:
            assert directory.held == ()
            assert world.total() == 0
        elif step is not step_wanted:
            assert len(directory.held) >= held + 1
        directory.close()
        assert open_descriptors(world) == []
    assert failures > 0


def test_opening_that_fails_at_any_call_leaks_nothing_and_works_when_repeated(world: World) -> None:
    failures = 0
    for fault in fail_each("file.*", errno.EIO):
        world.path = world.path.with_name(f"open-{fault.nth}")
        directory, descriptors = world.make(), open_descriptors(world)
        raised: StepwellError | None = None
        try:
            with fault:
                directory.open()
        except StepwellError as caught:
            raised = caught
        if raised is not None:
            failures += 1
            assert str(world.path) in str(raised)
            assert len(open_descriptors(world)) == len(descriptors)
        directory.open()
        directory.scan()
        assert len(world.names("p-")) == 2
        world.assert_tidy()
        with fault:
            directory.close()
        assert len(open_descriptors(world)) == len(descriptors)
        with world.make() as later:
            later.scan()
        assert world.names("p-") == []
    assert failures > 5


def test_a_forked_child_can_only_close_and_that_does_nothing(world: World) -> None:
    directory = world.open()
    grow(directory)
    names = world.names()
    pid = os.fork()
    if pid == 0:
        try:
            directory.grow()
        except ForkedError:
            directory.close()
            os._exit(0 if world.names() == names else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert world.open().adopt() == []


def test_an_idle_look_costs_few_system_calls(world: World) -> None:
    directory, other = world.open(), world.open()
    for _ in range(2):
        grow(directory)
        grow(other)
    with inject("file.*", "count"):
        directory.wanted()
        calls = reached("file.*")
    # Each neighbour's volume: open, fstat, flock, close; each file: stat; each own lock: fstat,
    # stat.
    assert calls <= 45


def test_the_configuration_names_what_limits_its_medium() -> None:
    config = DirectoryConfig("/x", "disk", 1, 1, 1, b"f" * 32)
    assert type(config.limits()).__name__ == "DiskLimits"
    assert type(replace(config, medium="shared").limits()).__name__ == "MemoryLimits"


def test_a_volume_of_another_format_version_is_left_until_its_room_is_needed(world: World) -> None:
    first = world.open()
    held = grow(first)
    first.give_back(held)
    first.close()
    path = world.metadata_of(held.volume_id)
    with open(path, "r+b") as file:
        header = bytearray(file.read(4096))
        header[8:12] = (2).to_bytes(4, "little")
        file.seek(0)
        file.write(sealed(bytes(header)))
    second = world.open()
    assert second.adopt() == []
    assert path.exists()
    while isinstance(second.grow(), HeldVolume):
        pass
    assert not path.exists()
