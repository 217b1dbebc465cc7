"""Bad input: a precise error at once or a miss; nothing changed, nothing leaked."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepwell.clock import ManualClock
from stepwell.config import DiskTier, HostTier, SharedTier, StoreConfig
from stepwell.errors import (
    BudgetError,
    GeometryError,
    LeaseClosedError,
    StepwellUsageError,
    StoreClosedError,
    TierIOError,
    TokenError,
    VolumeBusyError,
    VolumeError,
)
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.testing.faults import inject
from stepwell.tiers import entry
from store_kit import (
    BOTH,
    GEOMETRY,
    PAGE_BYTES,
    PAGE_TOKENS,
    SHARED_ONLY,
    VOLUME_BYTES,
    Directories,
    OpenRig,
    assert_whole,
    chain,
)

# Tokens


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.zeros(8, np.float32), "float32"),
        (np.zeros(8, np.bool_), "bool"),
        (np.array(["a"] * 8), "dtype"),
        (np.zeros((2, 4), np.int32), r"shape \(2, 4\)"),
        (np.array([1, 2, -3, 4], np.int32), "token 2 is -3"),
        (np.array([1, 2, 3, 2**31], np.int64), "token 3 is 2147483648"),
        (np.array([1, 2**32 + 1, 3, 4], np.uint64), "token 1 is 4294967297"),
        ([1, 2, 3, 2**70], "token 3 is 1180591620717411303424"),
        ([1, 2, 3, 4.0], "token 3 is 4.0"),
        ([1, 2, True, 4], "token 2 is True"),
        ([1, None, 3, 4], "token 1 is None"),
    ],
)
def test_tokens_that_are_none_are_refused_by_every_call(open_rig: OpenRig, tokens: Any, words: str) -> None:
    rig = open_rig(**SHARED_ONLY)
    for call in (
        lambda: rig.store.save(tokens, source=rig.pool[:1]),
        lambda: rig.store.match(tokens),
        lambda: rig.store.forget(tokens),
    ):
        with pytest.raises(TokenError, match=words):
            call()
    stats = rig.store.stats()
    assert (stats.page_records, stats.lookups, stats.saved_pages, stats.leases) == (0, 0, 0, 0)


def test_fewer_or_more_slots_than_pages_are_refused_and_both_are_named(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    with pytest.raises(GeometryError, match=r"14 tokens are 3 whole pages of 4 tokens, the source names 4 slots"):
        rig.store.save(chain(1, 3, tail=2), source=rig.pool[:4])
    with pytest.raises(GeometryError, match=r"1 tokens are 0 whole pages of 4 tokens, the source names 1 slots"):
        rig.store.save(chain(1, 0, tail=1), source=rig.pool[:1])
    rig.save(chain(1, 3))
    with rig.store.match(chain(1, 3)) as match, pytest.raises(GeometryError, match="3 pages, the target names 2"):
        rig.store.load(match, into=rig.pool[:2])
    with rig.store.match(chain(1, 3)) as match, pytest.raises(StepwellUsageError, match="order: 'row'"):
        rig.store.load(match, into=rig.pool[:3], order="row")  # type: ignore[arg-type]


def test_no_tokens_are_no_pages(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    assert rig.store.save([], source=rig.pool[:0]).saved == 0
    with rig.store.match([]) as match:
        assert match.pages == 0
        assert rig.store.load(match, into=rig.pool[:0]).wait()
    assert rig.store.forget([]) == 0


def test_an_epoch_that_is_none_is_refused_and_changes_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 3))
    for epoch in (-1, 2**64, 1.5, None, True):
        with pytest.raises(StepwellUsageError, match="epoch"):
            rig.store.set_epoch(epoch)  # type: ignore[arg-type]
    assert rig.load(chain(1, 3)) == 3


# After the end


def test_a_closed_store_refuses_every_call_and_closes_again(open_rig: OpenRig) -> None:
    rig = open_rig(**BOTH)
    rig.save(chain(1, 3))
    held = rig.store.match(chain(1, 3))
    rig.close()
    store = rig.store
    calls: list[Callable[[], object]] = [
        lambda: store.match(chain(1, 3)),
        lambda: store.save(chain(1, 3), source=rig.pool[:3]),
        lambda: store.load(held, into=rig.pool[:3]),
        lambda: store.lend(rig.rows),
        lambda: store.probe([b"k"]),
        lambda: store.load_keys([b"k"], into=rig.pool[:1]),
        lambda: store.save_keys([b"k"], source=rig.pool[:1]),
        lambda: store.state(b"k"),
        lambda: store.evict(Tier.SHARED, 1),
        lambda: store.forget(chain(1, 3)),
        store.clear,
        store.verify,
        store.flush,
        store.quiesce,
        store.stats,
        lambda: store.set_epoch(1),
        lambda: store.open([1, 2]),
        lambda: store.device,
    ]
    for call in calls:
        with pytest.raises(StoreClosedError, match="closed"):
            call()
    held.close()
    held.close()
    store.close()
    assert store.closed


def test_a_store_cannot_be_pickled_and_says_what_to_send(open_rig: OpenRig) -> None:
    with pytest.raises(TypeError, match="send its config and open it there"):
        pickle.dumps(open_rig().store)


def test_a_match_that_was_closed_is_refused(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 3))
    with rig.store.match(chain(1, 3)) as match:
        pass
    for call in (match.lease_id, match.locations, lambda: rig.store.load(match, into=rig.pool[:3])):
        with pytest.raises(LeaseClosedError, match="match again"):
            call()


def test_a_match_of_another_store_is_refused(open_rig: OpenRig) -> None:
    rig = open_rig(host=64 * 4096, shared=0, disk=0)
    other = open_rig(**SHARED_ONLY)
    rig.save(chain(1, 3))
    with rig.store.match(chain(1, 3)) as match, pytest.raises(StepwellUsageError, match="another store"):
        other.store.load(match, into=other.pool[:3])


def test_sequences_need_a_device_tier(open_rig: OpenRig) -> None:
    rig = open_rig(**SHARED_ONLY)
    with pytest.raises(StepwellUsageError, match="device"):
        rig.store.open([1, 2, 3])
    with pytest.raises(StepwellUsageError, match="device"):
        _ = rig.store.device


# Capacities


@pytest.mark.parametrize("name", ["host", "shared", "disk"])
@pytest.mark.parametrize(
    ("capacity", "volume", "words"),
    [
        (0, None, "{name}: capacity 0 bytes is less than one page of {page} bytes"),
        (PAGE_BYTES - 1, None, "less than one page"),
        ("1024TiB", "64MiB", r"1125899906842624 bytes \(1,048,576.0 GiB\) is more than \d+ bytes \([\d,.]+ GiB\) \("),
    ],
)
def test_a_capacity_that_cannot_be_had_is_refused_with_the_numbers(
    directories: Directories, name: str, capacity: Any, volume: Any, words: str
) -> None:
    tiers: dict[str, Any] = {
        "host": HostTier(capacity),
        "shared": SharedTier(capacity, str(directories.shared), volume_bytes=volume),
        "disk": DiskTier(capacity, str(directories.disk), volume_bytes=volume),
    }
    with pytest.raises(BudgetError, match=words.format(name=name, page=PAGE_BYTES)) as refused:
        PageStore(StoreConfig(geometry=GEOMETRY, **{name: tiers[name]}))
    if capacity == "1024TiB":
        assert f"lower {name}.capacity" in str(refused.value)
    assert directories.names() == []


@pytest.mark.parametrize("name", ["shared", "disk"])
def test_a_capacity_below_one_volume_is_refused(directories: Directories, name: str) -> None:
    kind = SharedTier if name == "shared" else DiskTier
    tier = kind("1MiB", str(getattr(directories, name)), volume_bytes="2MiB")
    with pytest.raises(BudgetError, match=rf"{name}: capacity 1048576 bytes is smaller than one volume of 2097152"):
        PageStore(StoreConfig(geometry=GEOMETRY, **{name: tier}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["shared", "disk"])
def test_a_volume_that_holds_no_page_is_refused(directories: Directories, name: str) -> None:
    kind = SharedTier if name == "shared" else DiskTier
    tier = kind("1MiB", str(getattr(directories, name)), volume_bytes=8192)
    with pytest.raises(BudgetError, match=rf"holds no page.*raise {name}\.volume_bytes"):
        PageStore(StoreConfig(geometry=GEOMETRY, **{name: tier}))  # type: ignore[arg-type]


def test_a_capacity_beyond_the_cgroup_is_refused_and_names_the_limit(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell.tiers import limits

    limit = limits.Limit(1 << 20, "/sys/fs/cgroup/pod/memory.max")
    monkeypatch.setattr(limits.MemoryLimits, "memory", lambda _: limit)
    with pytest.raises(BudgetError, match=r"more than 1048576 bytes \(/sys/fs/cgroup/pod/memory.max\)"):
        PageStore(directories.config(shared=8 * VOLUME_BYTES, disk=0))
    with pytest.raises(BudgetError, match=r"host: .*more than 1048576 bytes \(/sys/fs/cgroup/pod/memory.max\)"):
        PageStore(directories.config(host=8 * VOLUME_BYTES, shared=0, disk=0))


def test_no_tier_at_all_is_refused() -> None:
    with pytest.raises(StepwellUsageError, match="no tier"):
        PageStore(StoreConfig(geometry=GEOMETRY))


# Directories


@pytest.fixture(params=["shared", "disk"])
def place(request: pytest.FixtureRequest, directories: Directories) -> tuple[str, Path, StoreConfig]:
    name: str = request.param
    config = directories.config(**{"shared": 0, "disk": 0, name: VOLUME_BYTES})
    return name, getattr(directories, name), config


Place = tuple[str, Path, StoreConfig]


def test_a_symbolic_link_is_refused(place: Place) -> None:
    _, path, config = place
    target = path.with_name("target")
    target.mkdir(mode=0o700)
    path.symlink_to(target)
    with pytest.raises(VolumeError, match="symbolic link"):
        PageStore(config)
    assert list(target.iterdir()) == []


def test_a_file_is_refused(place: Place) -> None:
    _, path, config = place
    path.touch()
    with pytest.raises(VolumeError, match="not a directory"):
        PageStore(config)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(place: Place) -> None:
    _, path, config = place
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(VolumeError, match="belongs to user 12345"):
        PageStore(config)
    assert list(path.iterdir()) == []


def test_a_directory_that_others_can_write_is_refused(place: Place) -> None:
    _, path, config = place
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(VolumeError, match="chmod 0700 "):
        PageStore(config)


def test_a_network_file_system_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, config = place
    nfs = SimpleNamespace(is_network=True, type=0x6969)
    core = SimpleNamespace(**{name: getattr(entry._core, name) for name in dir(entry._core)})
    core.file_statfs = lambda _: nfs
    monkeypatch.setattr(entry, "_core", core)
    with pytest.raises(VolumeError, match="network file system"):
        PageStore(config)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=lambda e: errno.errorcode[e])
@pytest.mark.parametrize("point", ["file.mkdir", "file.open", "file.truncate", "file.reserve"])
def test_a_directory_that_cannot_be_written_is_named_with_its_error(place: Place, error: int, point: str) -> None:
    name, path, config = place
    with (
        inject(point, "errno", value=error),
        pytest.raises((TierIOError, BudgetError, VolumeError)) as refused,
    ):
        PageStore(config)
    assert str(path) in str(refused.value) or str(path) in str(refused.value.__cause__)
    if isinstance(refused.value, TierIOError):
        assert refused.value.errno == error
        assert name in str(refused.value)
        assert (f"or set {name}.path to a directory on another mount" in str(refused.value)) == (error == errno.EROFS)
    PageStore(config).close()


def test_a_parent_that_does_not_exist_is_named(directories: Directories) -> None:
    missing = directories.disk / "a" / "b"
    config = StoreConfig(geometry=GEOMETRY, disk=DiskTier(VOLUME_BYTES, str(missing), volume_bytes=VOLUME_BYTES))
    with pytest.raises((TierIOError, VolumeError), match=str(directories.disk / "a")):
        PageStore(config)


def test_one_bad_directory_leaves_nothing_of_the_other_tier_behind(directories: Directories, open_rig: OpenRig) -> None:
    directories.shared.touch()
    with pytest.raises(VolumeError, match="not a directory"):
        PageStore(directories.config(host=16 * 4096, **BOTH))
    directories.shared.unlink()
    assert_whole(open_rig(**BOTH).store)


# Volumes of others


def test_a_volume_that_another_holds_is_left_alone(open_rig: OpenRig, directories: Directories) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    rig.save(chain(1, 3))
    rig.close()
    [volume] = directories.volumes("vol")
    before = volume.read_bytes()
    with volume.with_suffix(".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
        assert rig.store.stats().tiers["shared"].recovered == 0
        assert rig.load(chain(1, 3)) == 3, "it is read, as any neighbour's"
        assert len(directories.volumes("vol")) == 2
        rig.save(chain(1, 3))
        rig.close()
        assert volume.read_bytes() == before
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    assert rig.load(chain(1, 3)) == 3  # twice there now, once kept
    assert rig.pages(Tier.SHARED) == 3


class _Hasty(ManualClock):
    """A clock that a second passes on at each look."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_a_directory_whose_lock_is_held_is_busy_and_its_holder_is_named(directories: Directories) -> None:
    PageStore(directories.config(**SHARED_ONLY)).close()
    with (directories.shared / "directory.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(VolumeBusyError, match=rf"directory\.lock was held .*{os.getpid()}"):
            PageStore(directories.config(**SHARED_ONLY), clock=_Hasty())
    PageStore(directories.config(**SHARED_ONLY)).close()


def test_pages_of_another_geometry_are_not_found_and_their_volume_stays_while_there_is_room(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    rig.save(chain(1, 3))
    rig.close()
    other = PageGeometry(
        model="other", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=PAGE_TOKENS
    )
    config = StoreConfig(geometry=other, shared=directories.config(shared=2 * VOLUME_BYTES, disk=0).shared)
    with PageStore(config) as store:
        assert store.match(chain(1, 3)).pages == 0
        assert len(directories.volumes("vol")) == 2
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    assert rig.load(chain(1, 3)) == 3


def test_a_number_is_no_tier_to_evict_from_and_nothing_leaves(open_rig: OpenRig) -> None:
    rig = open_rig(host=8 * 4096)
    rig.save(chain(1, 4))
    with pytest.raises(StepwellUsageError, match="no Tier"):
        rig.store.evict(2, 1)  # type: ignore[arg-type]
    assert rig.pages(Tier.SHARED) == 4
