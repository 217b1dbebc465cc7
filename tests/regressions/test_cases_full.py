"""Cases of kind 6 in docs/cases.md: no room, on a disk, in shared memory, in an LMDB map."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from case_kit import bytes_of_volumes, child_script, run_child
from doctor_kit import mounted, needs_root
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.errors import BudgetError
from stepwell.index import Tier
from stepwell.store import PageStore
from store_kit import GEOMETRY, VOLUME_BYTES, Directories, OpenRig, assert_whole, chain

FILLER = """
rig = Rig(StoreConfig(geometry=GEOMETRY, disk=DiskTier(6 << 20, {path!r}, volume_bytes=1 << 20)), keeper=True)
failed = newest = 0
for number in range(6 * 1024 // 8):
    newest = number if rig.save(chain({first} + number, 8)).transfer.ok.all() else newest
    failed += rig.load(chain({first} + newest, 8)) != 8
rig.store.flush()
assert failed == 0, failed
assert rig.store.check() == ""
print(rig.store.stats().tiers["disk"].capacity, rig.store.verify().damaged, flush=True)
sys.stdin.read()
rig.close()
"""


@needs_root
def test_two_processes_that_are_each_below_their_cap_share_a_small_disk(tmp_path: Path) -> None:
    """C046, kvcache-ai/Mooncake#2419: each counted itself alone, and the file system was full."""
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs") as point:
        children = []
        for number in (0, 1):
            script = FILLER.format(path=str(point / f"d{number}"), first=10_000 * number)
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", child_script(Directories(point, point), script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            pages = [child.stdout.readline().split() for child in children if child.stdout]
            used = sum(bytes_of_volumes(point / f"d{number}") for number in (0, 1))
        finally:
            for child in children:
                child.communicate("")
        assert [child.returncode for child in children] == [0, 0]
        assert all(int(capacity) > 0 and damaged == "0" for capacity, damaged in pages), pages
        assert used > 6 << 20  # more than either's cap: what they shared was short


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
@pytest.mark.parametrize("what", ["files", "locks too"])
def test_files_that_somebody_removed_are_no_room_that_is_left(
    open_rig: OpenRig, directories: Directories, tier: Tier, what: str
) -> None:
    """C048, LMCache/LMCache#1981: the first eviction ended the engine, for its file had gone already.

    Half the volumes are removed behind the store's back. It is not told, finds out, lets go of them (their room on the
    file system with them), and fills new ones.
    """
    cap = 4 * VOLUME_BYTES
    rig = open_rig(**{"shared": 0, "disk": 0, tier.name.lower(): cap}, low_watermark=0.0, high_watermark=0.0)
    name = tier.name.lower()
    number = 0
    while len(rig.store._tiers[tier].members) < 4:  # type: ignore[attr-defined]
        rig.save(chain(number, 8))
        rig.round()
        number += 1
    capacity = rig.store.stats().tiers[name].capacity
    saved = number
    files = directories.volumes("vol" if tier is Tier.SHARED else "pages")
    gone = [path.stem for path in files[:2]]
    for path in files[0].parent.iterdir():
        if path.stem in gone and path.is_file() and (what == "locks too" or path.suffix != ".lock"):
            path.unlink()
    for each in range(saved):
        rig.load(chain(each, 8))  # compares what came
    rig.store._tiers[tier]._looked_at = float("-inf")  # type: ignore[attr-defined]  # else within 0.2 s
    rig.round()
    for each in range(1000, 1000 + 2 * capacity // 8):
        assert rig.save(chain(each, 8)).refused == 0
        rig.round()
        assert rig.load(chain(each, 8)) == 8
    held = {member.held.volume_id for member in rig.store._tiers[tier].members}  # type: ignore[attr-defined]
    assert not held & {stem.removeprefix("v-") for stem in gone}
    assert len(held) == 4
    deleted = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}") and gone[0] in os.readlink(f"/proc/self/fd/{fd}")
    ]
    assert deleted == [], "what was removed still takes room"
    assert bytes_of_volumes(files[0].parent) <= cap
    assert rig.store.stats().tiers[name].capacity == capacity
    assert_whole(rig.store)
    rig.close()
    rig = open_rig(**{"shared": 0, "disk": 0, name: cap})
    assert rig.pages(tier) > capacity // 2
    assert rig.load(chain(999 + 2 * capacity // 8, 8)) == 8


@needs_root
def test_a_tier_larger_than_its_tmpfs_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """C049, lists.freedesktop.org wayland-devel 2013-10 011515: a sparse file, and SIGBUS when it was touched."""
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs") as point:
        config = StoreConfig(geometry=GEOMETRY, shared=SharedTier("16MiB", str(point / "s"), volume_bytes="4MiB"))
        with pytest.raises(BudgetError) as refused:
            PageStore(config)
        for word in (f"{point / 's'}: capacity 16777216 bytes is more than 4194304 bytes", "lower shared.capacity"):
            assert word in str(refused.value)
        assert bytes_of_volumes(point / "s") == 0


@needs_root
def test_a_tmpfs_that_others_fill_harms_no_page_that_was_reserved(tmp_path: Path) -> None:
    """C049, bylizhao.github.io 2023-12-25: the same, with room that was there at first."""
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs") as point:
        script = (
            f"rig = Rig(StoreConfig(geometry=GEOMETRY, shared=SharedTier('3MiB', {str(point / 's')!r}, "
            "volume_bytes='3MiB')), keeper=True)\n"
            f"filler = open({str(point / 'other')!r}, 'wb', buffering=0)\n"
            "try:\n    while True: filler.write(bytes(4096))\nexcept OSError as error: assert error.errno == 28\n"
            "pages = rig.store.stats().tiers['shared'].capacity\n"
            "for number in range(2 * pages // 8):\n"
            "    assert rig.save(chain(number, 8)).transfer.ok.all()\n"
            "    assert rig.load(chain(number, 8)) == 8\n"
            "stats = rig.store.stats(); assert stats.bus_faults == stats.io_errors == 0, stats\n"
            "rig.close(); print(pages)"
        )
        done = run_child(Directories(point, point), script)
        assert done.returncode == 0, (done.returncode, done.stderr)
        assert int(done.stdout) > 1500


def test_a_full_directory_is_no_reason_to_raise(open_rig: OpenRig) -> None:
    """C047, LMCache/LMCache#4664: no cap, or one that nobody kept; here a tier without a capacity does not exist.

    The bytes on disk at all times: tests/test_store.py::test_a_capacity_is_kept_at_all_times_and_the_newest_pages_stay.
    """
    with pytest.raises(TypeError, match="capacity"):
        DiskTier()  # type: ignore[call-arg]
    rig = open_rig(shared=0, disk=VOLUME_BYTES)
    for number in range(100):
        assert rig.save(chain(number, 8)).refused == 0
    assert rig.load(chain(99, 8)) == 8
