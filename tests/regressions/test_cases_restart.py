"""Cases of kind 5 in docs/cases.md: a process that was killed, and the one after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from case_kit import bytes_of_volumes, run_child
from stepwell.index import Tier
from store_kit import DISK_ONLY, PAGE_BYTES, VOLUME_BYTES, Directories, OpenRig, assert_whole, chain


@pytest.mark.parametrize("tier", ["shared", "disk"])
def test_what_was_acknowledged_before_a_kill_is_found_and_right(
    directories: Directories, open_rig: OpenRig, tier: str
) -> None:
    """C039, LMCache/LMCache#562: after a restart the files were there, and nothing in them was found.

    40 of 64 pages are acknowledged; kills at other instants: tests/test_store_kill.py.
    """
    sizes = {"shared": 0, "disk": 0} | {tier: VOLUME_BYTES}
    done = run_child(
        directories,
        f"rig = Rig(directories.config(**{sizes!r}))\n"
        "for number in range(5): assert rig.save(chain(number, 8)).transfer.ok.all()\n"
        "for number in range(5, 8):\n"
        "    mine = slice(8 * number, 8 * number + 8)\n"
        "    rig.rows[mine] = stamps(chain(number, 8))\n"
        "    rig.store.save(chain(number, 8), source=rig.pool[mine])\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert done.returncode == -9, done.stderr
    rig = open_rig(**sizes)
    resident = rig.pages(Tier[tier.upper()])
    found = [rig.load(chain(number, 8)) for number in range(8)]  # compares what came
    assert found[:5] == [8] * 5
    assert sum(found) <= resident <= 64
    assert rig.store.stats().checksum_failures == 0
    assert_whole(rig.store)


def test_the_disk_in_use_is_known_after_a_kill(directories: Directories, open_rig: OpenRig) -> None:
    """C040, LMCache/LMCache#4564: usage began at 0 again, and the cap was passed."""
    cap = 4 * VOLUME_BYTES
    fill = (
        f"rig = Rig(directories.config(shared=0, disk={cap}), keeper=False)\n"
        f"for number in range({{first}}, {{first}} + {cap * 9 // 10 // (8 * PAGE_BYTES)}):\n"
        "    rig.save(chain(number, 8)); rig.round()\n"
        f"    assert bytes_of_volumes(directories.disk) <= {cap}\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for first in (0, 1000):
        done = run_child(directories, fill.format(first=first))
        assert done.returncode == -9, done.stderr
    assert bytes_of_volumes(directories.disk) <= cap
    rig = open_rig(shared=0, disk=cap)
    assert rig.pages(Tier.DISK) == sum(rig.load(chain(n, 8)) for n in [*range(200), *range(1000, 1200)])
    assert rig.load(chain(1000 + cap * 9 // 10 // (8 * PAGE_BYTES) - 1, 8)) == 8  # the newest


GHOSTS = """
for round in range(20):
    pid = os.fork()
    if pid == 0:
        try:
            rig = Rig(directories.config(shared=2 * VOLUME_BYTES, disk=0), keeper=True)
            if round: assert rig.load(chain(round - 1, 4)) == 4
            assert rig.save(chain(round, 4)).transfer.ok.all()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, round
    print(bytes_of_volumes(directories.shared), flush=True)
"""


def test_twenty_kills_leave_no_more_than_one_volume(directories: Directories, open_rig: OpenRig) -> None:
    """C041, vllm-project/vllm#57303: each boot had a name of its own in /dev/shm, and 70 of them filled it."""
    neighbour = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    neighbour.save(chain(900, 4))
    before = {path: path.stat().st_ino for path in directories.volumes("vol")}
    done = run_child(directories, GHOSTS)
    assert done.returncode == 0, done.stderr
    sizes = set(done.stdout.split())
    assert len(sizes) == 1, sizes
    assert {path: path.stat().st_ino for path in before} == before
    assert neighbour.load(chain(900, 4)) == 4
    neighbour.close()
    again = open_rig(shared=2 * VOLUME_BYTES, disk=0)  # adopts what the last one left, and ours
    assert again.load(chain(19, 4)) == 4


def damage(path: Path, how: str, page_at: int) -> None:
    match how:
        case "truncated to nothing":
            os.truncate(path, 0)
        case "truncated in the page":
            os.truncate(path, page_at + PAGE_BYTES // 2)
        case "without permission":
            path.chmod(0)
        case "a directory":
            path.unlink()
            path.mkdir()


DAMAGE = ["truncated to nothing", "truncated in the page", "without permission", "a directory"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_is_damaged_costs_its_pages_and_no_worker(
    directories: Directories, open_rig: OpenRig, how: str
) -> None:
    """C043, sgl-project/sglang#39269: one short file ended the thread that read, and no later prefetch came back."""
    rig = open_rig(**DISK_ONLY)
    rig.save(chain(1, 8))
    rig.save(chain(2, 8))
    [path] = directories.volumes("pages")
    header = rig.store._tiers[Tier.DISK].members[0].volume.header  # type: ignore[attr-defined]
    size = path.stat().st_size
    damage(path, how, header.pages_offset + 3 * header.slot_bytes)
    hit = rig.load(chain(1, 8))
    assert hit == {"truncated to nothing": 0, "truncated in the page": 3}.get(how, 8)  # an open file stays readable
    for _ in range(3):
        assert rig.load(chain(1, 8)) == hit
    failures = rig.store.stats().io_errors
    assert (failures > 0) == (hit < 8)
    if path.is_file():
        path.chmod(0o600)
        os.truncate(path, size)
        for _ in range(4):
            rig.round()
        assert rig.save(chain(1, 8)).transfer.ok.all()
        assert rig.load(chain(1, 8)) == 8
    rig.close()
    if path.is_dir():
        path.rmdir()


@pytest.mark.parametrize("how", DAMAGE)
def test_only_what_was_lost_is_lost_to_the_next_process(
    directories: Directories, open_rig: OpenRig, how: str
) -> None:
    """C043, sgl-project/sglang#39269: of two volumes one is damaged, and the pages of the other are found."""
    sizes = {"shared": 0, "disk": 2 * VOLUME_BYTES}
    rig = open_rig(**sizes)
    tier = rig.store._tiers[Tier.DISK]
    chains = 0
    while len(tier.members) < 2 or chains < 20:  # type: ignore[attr-defined]
        rig.save(chain(chains, 8))
        rig.round()
        chains += 1
    header = tier.members[0].volume.header  # type: ignore[attr-defined]
    found = [rig.load(chain(number, 8)) for number in range(chains)]
    rig.close()
    path, other = directories.volumes("pages")
    damage(path, how, header.pages_offset + 3 * header.slot_bytes)
    before = other.read_bytes()
    rig = open_rig(**sizes)
    after = [rig.load(chain(number, 8)) for number in range(chains)]  # compares what came
    if how == "without permission" and os.geteuid() == 0:  # nothing is, to root
        assert after == found
    else:
        assert 0 < sum(after) < sum(found)
        assert all(now <= then for now, then in zip(after, found, strict=True))
    assert other.read_bytes() == before
    rig.round()
    assert rig.save(chain(900, 2)).transfer.ok.all()
    assert rig.load(chain(900, 2)) == 2
    rig.close()
    if path.is_dir():
        path.rmdir()
