"""LMDB beside a disk volume: whatever happened to it, a restart serves every page, and loses that memory at most."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.config import StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.tiers import disk, lmdb_index
from stepwell.tiers.disk import DiskVolumes
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain


def disk_of(rig: Rig) -> DiskVolumes:
    tier = rig.store._tiers[Tier.DISK]
    assert isinstance(tier, DiskVolumes)
    return tier


def settle(rig: Rig) -> lmdb_index.VolumeIndex:
    """Let the keeper have the environment opened; return it."""
    tier = disk_of(rig)
    while not tier._indexes:
        rig.round()
        if tier._opening is not None:
            tier._opening._thread.join()
    [beside] = tier._indexes.values()
    return beside


def keys_of(number: int, pages: int) -> set[bytes]:
    return {key.tobytes() for key in prefix_hashes(chain(number, pages), page_tokens=PAGE_TOKENS)}


def remembered(environment: Path) -> set[bytes]:
    volume_id = bytes.fromhex(environment.stem[2:])
    stream = lmdb_index.read_environment(str(environment), limit_entries=1 << 16)
    return set(lmdb_index._parse(stream, volume_id=volume_id, limit_entries=1 << 16).keys)


def left_behind(directories: Directories, open_rig: OpenRig) -> tuple[StoreConfig, Path]:
    """Leave a volume of chains 0 to 2, and an environment that remembers the pages of chain 3."""
    config = directories.config(shared=0, disk=VOLUME_BYTES)
    rig = open_rig(config)
    settle(rig)
    rig.save(chain(3, 4))
    tier = disk_of(rig)
    tier._recency_at = float("-inf")
    rig.round()  # its copy of the index has the pages, so that it sees them leave
    rig.store.evict(Tier.DISK, 4)
    for number in range(3):
        rig.save(chain(number, 4))
    rig.close()
    [environment] = directories.disk.glob("v-*.lmdb")
    assert remembered(environment) == keys_of(3, 4)
    return config, environment


def test_what_an_environment_remembers_outlives_a_restart(directories: Directories, open_rig: OpenRig) -> None:
    config, environment = left_behind(directories, open_rig)
    for _ in range(3):
        rig = open_rig(config)
        settle(rig)
        rig.close()
        assert remembered(environment) == keys_of(3, 4)
        assert not environment.with_name(environment.name + "-old").exists()


def remove(environment: Path, aside: Path) -> None:
    shutil.rmtree(environment)


def cut(environment: Path, aside: Path) -> None:
    os.truncate(environment / "data.mdb", 5000)


def empty(environment: Path, aside: Path) -> None:
    os.truncate(environment / "data.mdb", 0)


def garble(environment: Path, aside: Path) -> None:
    data = environment / "data.mdb"
    data.write_bytes(os.urandom(data.stat().st_size))


def garble_behind_the_meta_pages(environment: Path, aside: Path) -> None:
    data = environment / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[:8192] + b"\xa5" * (len(whole) - 8192))


def make_file(environment: Path, aside: Path) -> None:
    shutil.rmtree(environment)
    environment.write_bytes(b"a file")


def make_data_a_directory(environment: Path, aside: Path) -> None:
    (environment / "data.mdb").unlink()
    (environment / "data.mdb").mkdir()


def make_fifo(environment: Path, aside: Path) -> None:
    shutil.rmtree(environment)
    os.mkfifo(environment)


def make_data_a_fifo(environment: Path, aside: Path) -> None:
    (environment / "data.mdb").unlink()
    os.mkfifo(environment / "data.mdb")


def make_link(environment: Path, aside: Path) -> None:
    shutil.rmtree(environment)
    environment.symlink_to(aside)


def make_data_a_link(environment: Path, aside: Path) -> None:
    (environment / "data.mdb").unlink()
    (environment / "data.mdb").symlink_to(aside / "data.mdb")


def make_data_a_second_name(environment: Path, aside: Path) -> None:
    (environment / "data.mdb").unlink()
    os.link(aside / "data.mdb", environment / "data.mdb")


@pytest.mark.parametrize(
    "harm",
    [
        remove,
        cut,
        empty,
        garble,
        garble_behind_the_meta_pages,
        make_file,
        make_data_a_directory,
        make_fifo,
        make_data_a_fifo,
        make_link,
        make_data_a_link,
        make_data_a_second_name,
    ],
)
def test_a_lost_or_damaged_environment_costs_its_memory_and_no_page(
    directories: Directories,
    open_rig: OpenRig,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path, Path], None],
) -> None:
    config, environment = left_behind(directories, open_rig)
    aside = directories.disk.parent / "aside"  # another's: an environment of its own
    aside.mkdir()
    (aside / "data.mdb").write_bytes(b"precious" * 4096)
    harm(environment, aside)
    # A fifo without a writer stops the reader for good: the bound is what ends it.
    monkeypatch.setattr(disk, "VolumeIndex", functools.partial(lmdb_index.VolumeIndex, reader_timeout=3.0))
    rig = open_rig(config)
    assert [rig.load(chain(number, 4)) for number in range(3)] == [4, 4, 4]  # before anybody has looked at it
    beside = settle(rig)
    assert beside.trouble == ""
    rig.save(chain(4, 4))
    assert [rig.load(chain(number, 4)) for number in (0, 1, 2, 4)] == [4, 4, 4, 4]
    assert (aside / "data.mdb").read_bytes() == b"precious" * 4096
    rig.close()
    assert remembered(environment) <= keys_of(3, 4)
    assert [p.name for p in directories.disk.glob("*-old*")] == []


READERS = {
    "hangs": "exec sleep 100000",
    "dies of SIGBUS": "kill -BUS $$",
    "is killed": "kill -KILL $$",
    "fails": "exit 3",
    "writes without end": "exec cat /dev/zero",
    "closes its output and hangs": "exec >&-; exec sleep 100000",
}


@pytest.mark.parametrize("what", READERS)
def test_a_reader_that_does_not_come_back_holds_up_neither_opening_nor_rounds_nor_close(
    directories: Directories, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its own bound is hours here: a test that waited for it would not end."""
    config, environment = left_behind(directories, open_rig)
    real = lmdb_index.VolumeIndex
    reader = ("/bin/sh", "-c", READERS[what])
    monkeypatch.setattr(disk, "VolumeIndex", functools.partial(real, reader=reader, reader_timeout=1e4))
    rig = open_rig(config)
    for _ in range(3):
        rig.round()
        assert [rig.load(chain(number, 4)) for number in range(3)] == [4, 4, 4]
    rig.save(chain(5, 4))
    if "hangs" in what:
        assert disk_of(rig)._opening is not None
        assert disk_of(rig)._opening.is_running
    rig.close()
    monkeypatch.setattr(disk, "VolumeIndex", real)
    rig = open_rig(config)
    settle(rig)
    assert [rig.load(chain(number, 4)) for number in (0, 1, 2, 5)] == [4, 4, 4, 4]
    rig.close()
    # Stopped by close, it lost nothing: the old environment was left for whoever comes next.
    assert remembered(environment) <= keys_of(3, 4)
    assert remembered(environment) == keys_of(3, 4) or "hangs" not in what
