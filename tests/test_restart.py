"""A restart keeps the order in which pages leave, names what it does not find again and why, and fills nothing."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from restart_kit import left_by_a_death, order_of
from stepwell import _core
from stepwell import store as store_module
from stepwell.clock import ManualClock
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.tiers.directory import Machine
from stepwell.tiers.volume_files import header_checksum
from store_kit import GEOMETRY, PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain

HERE = Path(__file__).parent


@pytest.fixture
def copies() -> Iterator[Path]:
    """A directory in memory for what deaths leave."""
    parent = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    try:
        yield parent
    finally:
        shutil.rmtree(parent)


def branch(number: int, at: int, pages: int) -> np.ndarray:
    """Return a chain that leaves chain `number` after `at` pages, and is `pages` long."""
    tokens = chain(number, pages)
    tokens[at * PAGE_TOKENS :] += 50_000
    return tokens


def small_volumes(directories: Directories, *, shared: int = 0, disk: int = 0) -> StoreConfig:
    """Configure volumes of about 45 pages, so that a chain, its prefixes and the touches of it go across several."""
    size = 128 * 1024
    return StoreConfig(
        geometry=GEOMETRY,
        shared=SharedTier(shared * size, str(directories.shared), volume_bytes=size) if shared else None,
        disk=DiskTier(disk * size, str(directories.disk), volume_bytes=size) if disk else None,
    )


def use_at_random(rig: Rig, rng: random.Random, *, steps: int, tier: Tier) -> None:
    """Save, load and evict chains that share prefixes, now and then with a round of the keeper."""
    for _ in range(steps):
        number, pages = rng.randrange(12), rng.randrange(1, 12)
        tokens = branch(number, rng.randrange(pages), pages) if rng.random() < 0.4 else chain(number, pages)
        roll = rng.random()
        if roll < 0.5:
            rig.save(tokens)
        elif roll < 0.8:
            rig.load(tokens)
        elif roll < 0.9:
            rig.store.evict(tier, rng.randrange(1, 6))
        else:
            rig.round()


@pytest.mark.parametrize("seed", range(6))
def test_victim_order_in_shared_memory_is_the_same_after_a_death(
    directories: Directories, copies: Path, open_rig: OpenRig, seed: int
) -> None:
    rig = open_rig(small_volumes(directories, shared=3), clock=ManualClock())
    use_at_random(rig, random.Random(seed), steps=60, tier=Tier.SHARED)
    assert len(directories.volumes("vol")) > 1
    rig.round()  # at most 100 ms later
    left = left_by_a_death(directories, copies)
    expected = order_of(rig, Tier.SHARED)
    rig.close()
    again = open_rig(small_volumes(left, shared=3))
    assert len(expected) > 20
    assert order_of(again, Tier.SHARED) == expected


def test_victim_order_is_the_same_after_sigkill(directories: Directories, open_rig: OpenRig) -> None:
    """The others here copy what a death would leave; this one is a death."""
    done = subprocess.run(
        [sys.executable, str(HERE / "restart_child.py"), "order", str(directories.shared)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    rig = open_rig(directories.config(shared=6 * VOLUME_BYTES, disk=0))
    expected = done.stdout.split()
    assert len(expected) > 20
    assert [key.hex() for key in order_of(rig, Tier.SHARED)] == expected


def test_victim_order_on_disk_is_the_same_after_a_close(directories: Directories, open_rig: OpenRig) -> None:
    rig = open_rig(small_volumes(directories, disk=4), clock=ManualClock())
    use_at_random(rig, random.Random(7), steps=60, tier=Tier.DISK)
    assert len(directories.volumes("meta")) > 1
    expected = order_of(rig, Tier.DISK)
    rig.close()
    again = open_rig(small_volumes(directories, disk=4))
    assert order_of(again, Tier.DISK) == expected


def test_victim_order_on_disk_lacks_at_most_the_last_minute_after_a_death(
    directories: Directories, copies: Path, open_rig: OpenRig
) -> None:
    clock = ManualClock()
    rig = open_rig(small_volumes(directories, disk=4), clock=clock)
    use_at_random(rig, random.Random(8), steps=60, tier=Tier.DISK)
    clock.advance(61)
    rig.round()
    expected = order_of(rig, Tier.DISK)
    for number in range(6):
        rig.load(chain(number, 2))
    rig.round()  # within the minute: not written
    left = left_by_a_death(directories, copies)
    rig.close()
    again = open_rig(small_volumes(left, disk=4))
    assert order_of(again, Tier.DISK) == expected


def test_both_tiers_keep_their_order_at_once(directories: Directories, copies: Path, open_rig: OpenRig) -> None:
    clock = ManualClock()
    rig = open_rig(small_volumes(directories, shared=2, disk=4), clock=clock)
    use_at_random(rig, random.Random(9), steps=80, tier=Tier.SHARED)
    clock.advance(61)
    rig.round()
    left = left_by_a_death(directories, copies)
    expected = {tier: order_of(rig, tier) for tier in (Tier.SHARED, Tier.DISK)}
    rig.close()
    again = open_rig(small_volumes(left, shared=2, disk=4))
    assert {tier: order_of(again, tier) for tier in (Tier.SHARED, Tier.DISK)} == expected
    assert again.store.check() == ""


def test_volumes_of_two_processes_are_adopted_in_the_order_of_use(
    directories: Directories, copies: Path, open_rig: OpenRig
) -> None:
    config = directories.config(shared=8 * VOLUME_BYTES, disk=0)
    first, second = open_rig(config), open_rig(config)
    for number in range(8):
        rig = first if number % 2 == 0 else second
        rig.save(chain(number, 2))
        rig.round()
    for number in (2, 1):
        rig = first if number % 2 == 0 else second
        rig.load(chain(number, 2))
        rig.round()
    left = left_by_a_death(directories, copies)
    first.close()
    second.close()
    again = open_rig(left.config(shared=8 * VOLUME_BYTES, disk=0))
    keys = {number: keys_of(number, 2) for number in range(8)}
    expected = [key for number in (0, 3, 4, 5, 6, 7, 2, 1) for key in reversed(keys[number])]
    assert order_of(again, Tier.SHARED) == expected


def test_a_living_process_ranks_an_orphan_by_last_use(directories: Directories, open_rig: OpenRig) -> None:
    config = directories.config(shared=4 * VOLUME_BYTES, disk=0)
    living, dying = open_rig(config), open_rig(config)
    for number in range(6):
        (living if number % 2 == 0 else dying).save(chain(number, 2))
    dying.close()
    living.store._tiers[Tier.SHARED].grow(living.store._index, 1 << 20)
    assert living.store.stats().tiers["shared"].recovered == 6
    expected = [key for number in range(6) for key in reversed(keys_of(number, 2))]
    assert order_of(living, Tier.SHARED) == expected


def keys_of(number: int, pages: int) -> list[bytes]:
    return [key.tobytes() for key in prefix_hashes(chain(number, pages), page_tokens=PAGE_TOKENS)]


# ---- why a volume is cold --------------------------------------------------------------------------------------------


def saved(directories: Directories, open_rig: OpenRig, *, tier: Tier, chains: int = 4) -> StoreConfig:
    """Leave one volume of some chains behind."""
    sizes = {"shared": VOLUME_BYTES, "disk": 0} if tier is Tier.SHARED else {"shared": 0, "disk": VOLUME_BYTES}
    config = directories.config(**sizes)
    rig = open_rig(config)
    for number in range(chains):
        rig.save(chain(number, 4))
    rig.close()
    return config


def metadata_of(directories: Directories, tier: Tier) -> Path:
    [path] = directories.volumes("vol" if tier is Tier.SHARED else "meta")
    return path


def patch_header(path: Path, at: int, value: bytes) -> None:
    """Change a header so that its checksum is right."""
    data = bytearray(path.read_bytes()[:4096])
    data[at : at + len(value)] = value
    data[4092:] = header_checksum(bytes(data)).to_bytes(4, "little")
    with path.open("r+b") as file:
        file.write(data)


def replace_volume(directories: Directories, tier: Tier) -> None:
    patch_header(metadata_of(directories, tier), 16, b"\1" * 16)


def truncate(directories: Directories, tier: Tier) -> None:
    path = metadata_of(directories, tier)
    os.truncate(path, path.stat().st_size - 4096)


def cut_header(directories: Directories, tier: Tier) -> None:
    os.truncate(metadata_of(directories, tier), 100)


def grow(directories: Directories, tier: Tier) -> None:
    path = metadata_of(directories, tier)
    os.truncate(path, path.stat().st_size + 4096)


def damage_header(directories: Directories, tier: Tier) -> None:
    with metadata_of(directories, tier).open("r+b") as file:
        file.seek(300)
        file.write(b"x")


def make_version_2(directories: Directories, tier: Tier) -> None:
    patch_header(metadata_of(directories, tier), 8, (2).to_bytes(4, "little"))


def other_fingerprint(directories: Directories, tier: Tier) -> None:
    patch_header(metadata_of(directories, tier), 32, b"\7" * 32)


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
@pytest.mark.parametrize(
    ("harm", "reason", "said"),
    [
        (replace_volume, "replaced", "says it is volume 0101"),
        (truncate, "truncated", "its header says"),
        (cut_header, "truncated", "ends after 100 bytes"),
        (grow, "grown", "its header says"),
        (damage_header, "header", "header checksum"),
        (make_version_2, "format", "format version 2, this stepwell reads 1"),
        (other_fingerprint, "fingerprint", "of fingerprint 0707070707070707, ours of"),
    ],
)
def test_a_volume_that_cannot_be_used_is_cold_and_its_reason_named(
    directories: Directories,
    open_rig: OpenRig,
    caplog: pytest.LogCaptureFixture,
    tier: Tier,
    harm: Callable[[Directories, Tier], None],
    reason: str,
    said: str,
) -> None:
    config = saved(directories, open_rig, tier=tier)
    volume_id = metadata_of(directories, tier).stem[2:]
    harm(directories, tier)
    caplog.clear()
    rig = open_rig(config)
    stats = rig.store.stats().tiers[tier.name.lower()]
    assert (stats.recovered, stats.resident, stats.cold) == (0, 0, {reason: 1})
    lines = [record.getMessage() for record in caplog.records if volume_id in record.getMessage()]
    assert len([line for line in lines if f"{reason}: " in line and said in line]) == 1, lines
    rig.round()
    assert rig.store.stats().tiers[tier.name.lower()].cold == {reason: 1}  # however often it is seen
    assert rig.load(chain(0, 4)) == 0
    rig.save(chain(0, 4))
    assert rig.load(chain(0, 4)) == 4


def test_another_shape_of_pages_is_named_by_what_differs(
    directories: Directories, open_rig: OpenRig, caplog: pytest.LogCaptureFixture
) -> None:
    config = saved(directories, open_rig, tier=Tier.SHARED)
    store = PageStore(structs.replace(config, geometry=replace(GEOMETRY, layers=4)))
    store.close()
    assert "its pages have 1024 bytes in 2 layers, ours 2048 in 4" in caplog.text


def test_pages_of_another_volume_are_found_mixed_up(
    directories: Directories, open_rig: OpenRig, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata and pages have the sizes and the fingerprint that they should: only reading tells."""
    config = saved(directories, open_rig, tier=Tier.DISK)
    [pages] = directories.volumes("pages")
    pages.write_bytes(os.urandom(pages.stat().st_size))
    rig = open_rig(config)
    stats = rig.store.stats().tiers["disk"]
    assert (stats.recovered, stats.cold) == (0, {"mixed-up": 1})
    assert "mixed-up: its pages are not those that its records are about (or were never written" in caplog.text
    assert rig.load(chain(0, 4)) == 0
    assert rig.save(chain(0, 4)).refused == 0
    assert rig.load(chain(0, 4)) == 4


def test_two_volumes_whose_pages_were_exchanged_are_both_cold(
    directories: Directories, open_rig: OpenRig, copies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a backup put back by halves leaves them: every file is whole, of its size and its fingerprint."""
    config = directories.config(shared=0, disk=2 * VOLUME_BYTES)
    rig = open_rig(config)
    chains = 0
    while len(rig.store._tiers[Tier.DISK].members) < 2 or chains < 40:  # type: ignore[attr-defined]
        rig.save(chain(chains, 4))
        rig.round()
        chains += 1
    rig.close()
    first, second = directories.volumes("pages")
    aside = copies / "aside"
    aside.write_bytes(first.read_bytes())
    first.write_bytes(second.read_bytes())
    second.write_bytes(aside.read_bytes())
    rig = open_rig(config)
    stats = rig.store.stats().tiers["disk"]
    assert (stats.recovered, stats.cold) == (0, {"mixed-up": 2})
    assert caplog.text.count("mixed-up: its pages are not those that its records are about (or were never written") == 2
    assert sum(rig.load(chain(number, 4)) for number in range(chains)) == 0
    assert rig.save(chain(0, 4)).refused == 0
    assert rig.load(chain(0, 4)) == 4


def test_one_damaged_page_does_not_make_a_volume_mixed_up(directories: Directories, open_rig: OpenRig) -> None:
    config = saved(directories, open_rig, tier=Tier.DISK)
    [pages] = directories.volumes("pages")
    with pages.open("r+b") as file:
        file.write(b"\xff" * 4096)  # the first pages
    rig = open_rig(config)
    assert rig.store.stats().tiers["disk"].cold == {}
    assert sum(rig.load(chain(number, 4)) for number in range(4)) > 0
    assert rig.store.stats().checksum_failures > 0


def test_damaged_records_are_counted(directories: Directories, open_rig: OpenRig) -> None:
    config = saved(directories, open_rig, tier=Tier.SHARED)
    path = metadata_of(directories, Tier.SHARED)
    header = _core.VolumeHeader.decode(path.read_bytes()[:4096], path.stat().st_size, 0)
    harmed = 0
    with path.open("r+b") as file:
        for slot in range(header.slots):
            file.seek(header.records_offset + 192 * slot)
            generation = int.from_bytes(file.read(8), "little")
            if generation and generation % 2 == 0 and harmed < 2:
                file.seek(header.records_offset + 192 * slot + 33)
                file.write(b"\xaa\xbb")
                harmed += 1
    stats = open_rig(config).store.stats().tiers["shared"]
    assert (stats.recovered, stats.cold) == (14, {"records": 2})


# ---- boot id, damage of metadata -------------------------------------------------------------------------------------


def harm_at_random(path: Path, rng: random.Random, *, flips: int, first: int = 0, last: int | None = None) -> None:
    size = path.stat().st_size if last is None else last
    with path.open("r+b") as file:
        for _ in range(flips):
            at = rng.randrange(first, size)
            file.seek(at)
            byte = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(at)
            file.write(bytes([byte]))


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_after_another_boot_no_page_is_served_unverified(
    directories: Directories,
    open_rig: OpenRig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tier: Tier,
) -> None:
    """Bits flip everywhere but in the header; whatever is served is right (Rig.load compares), and counters tell."""
    config = saved(directories, open_rig, tier=tier, chains=6)
    path = metadata_of(directories, tier)
    before = path.read_bytes()[160:176]
    rng = random.Random(1)
    harm_at_random(path, rng, flips=60, first=4096)
    for pages in directories.volumes("pages"):
        harm_at_random(pages, rng, flips=60)
    monkeypatch.setattr(store_module, "Machine", lambda clock: Machine(clock=clock, boot_id=lambda: b"\5" * 16))
    caplog.set_level(logging.INFO, "stepwell")
    rig = open_rig(config)
    lines = [line for line in caplog.messages if "another boot" in line]
    assert len(lines) == 1
    assert "each page is verified before it is served" in lines[0]
    served = sum(rig.load(chain(number, 4)) for number in range(6))
    stats = rig.store.stats()
    lost = 24 - served
    assert lost > 0
    assert stats.checksum_failures + sum(stats.tiers[tier.name.lower()].cold.values()) > 0
    rig.close()
    assert path.read_bytes()[160:176] == b"\5" * 16 != before
    caplog.clear()
    open_rig(config)
    assert not [line for line in caplog.messages if "another boot" in line]  # it is of this boot now


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_torn_metadata_loses_pages_and_serves_no_wrong_one(
    directories: Directories, open_rig: OpenRig, copies: Path, tier: Tier
) -> None:
    """Records, checksums, recency and ring as a crash may leave them: blocks of zeros, of old content, of noise."""
    config = saved(directories, open_rig, tier=tier, chains=6)
    name = metadata_of(directories, tier).name
    parent = directories.shared if tier is Tier.SHARED else directories.disk
    whole = copies / "whole"
    shutil.copytree(parent, whole)
    data = (parent / name).read_bytes()
    header = _core.VolumeHeader.decode(data[:4096], len(data), sum(p.stat().st_size for p in parent.glob("v-*.pages")))
    end = header.pages_offset or len(data)
    rng = random.Random(2)
    lost = 0
    for _ in range(25):
        shutil.rmtree(parent)
        shutil.copytree(whole, parent)
        with (parent / name).open("r+b") as file:
            for _ in range(rng.randrange(1, 4)):
                size = rng.choice([8, 16, 192, 512, 4096])
                at = rng.randrange(4096, end - size) // 8 * 8
                file.seek(at)
                source = rng.randrange(4096, end - size) // 8 * 8
                file.write(rng.choice([b"\0" * size, rng.randbytes(size), data[source : source + size]]))
        rig = open_rig(config)
        lost += 24 - sum(rig.load(chain(number, 4)) for number in range(6))
        rig.save(chain(9, 4))
        assert rig.load(chain(9, 4)) == 4
        assert rig.store.check() == ""
        rig.close()
    assert lost > 0


# ---- many restarts ---------------------------------------------------------------------------------------------------


def contents(directory: Path) -> tuple[list[str], int]:
    """Return names, ids left out and the process file of who lives, and the bytes they take."""
    names = sorted(p.name for p in directory.iterdir() if not p.name.startswith("p-"))
    return names, sum(p.stat().st_size for p in directory.iterdir() if not p.name.startswith("p-"))


def test_70_restarts_do_not_fill_shared_memory(directories: Directories, open_rig: OpenRig) -> None:
    """56 of them by SIGKILL at random instants while it saves; another store lives beside it, and nothing of it goes.

    cases.md C041: /dev/shm filled with what dead servers left.
    """
    config = directories.config(shared=6 * VOLUME_BYTES, disk=0)
    neighbour = open_rig(config)
    neighbour.save(chain(500, 8))
    [own] = [p.name for p in directories.shared.glob("v-*.vol")]
    with subprocess.Popen(
        [sys.executable, str(HERE / "restart_child.py"), str(directories.shared)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        rng = random.Random(3)
        sizes, names = [], []
        for restart in range(70):
            is_killed = restart % 5 != 4
            print(restart, "kill" if is_killed else "close", file=child.stdin, flush=True)
            pid = int(child.stdout.readline())
            saves = rng.randrange(1, 25)
            for _ in range(saves):
                assert child.stdout.readline() == "saved\n"
            if is_killed:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)
            while (line := child.stdout.readline()) == "saved\n":
                pass
            assert line == f"ended {-signal.SIGKILL if is_killed else 0}\n"
            found, size = contents(directories.shared)
            names.append(found)
            sizes.append(size)
            assert len(list(directories.shared.glob("p-*.proc"))) <= 2, "process files of the dead stay"
        child.stdin.close()
        assert child.wait(timeout=60) == 0
    assert max(sizes) <= 6 * VOLUME_BYTES
    assert sizes[20:] == [sizes[20]] * 50
    assert names[20:] == [names[20]] * 50
    assert own in names[-1]
    assert neighbour.load(chain(500, 8)) == 8
    neighbour.round()
    assert neighbour.store.check() == ""
    rig = open_rig(config)
    assert len(list(directories.shared.glob("p-*.proc"))) == 2
    rig.close()
