"""The touch ring (FORMAT.md 8): who reads a neighbour's page tells its owner, and the owner keeps it warm."""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from directory_child import make_directory
from stepwell.clock import ManualClock
from stepwell.errors import StepwellUsageError
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.testing.faults import inject, reached
from stepwell.testing.powerloss import Kind, record
from stepwell.tiers.directory import HeldVolume
from stepwell.tiers.process_file import FILE_BYTES, RING_ENTRIES, RING_OFFSET
from stepwell.tiers.volume_tier import VolumeTier
from stepwell.tiers.volumes import TierDirectory
from store_kit import PAGE_TOKENS, VOLUME_BYTES, OpenRig, Rig, chain

Pair = tuple[TierDirectory, TierDirectory, bytes]


@pytest.fixture
def path() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    yield parent / "tier"
    shutil.rmtree(parent)


@pytest.fixture
def pair(path: Path) -> Iterator[Pair]:
    """An owner of a volume, who has seen its neighbour and its ring; that neighbour; the volume's id."""
    with make_directory(str(path), "shared") as owner, make_directory(str(path), "shared") as reader:
        volume = owner.grow()
        assert isinstance(volume, HeldVolume)
        owner.scan()
        assert owner.touched() == []
        yield owner, reader, bytes.fromhex(volume.volume_id)


def process_file(path: Path, reader: TierDirectory) -> Path:
    assert reader._process is not None
    return path / f"p-{reader._process.process_id}.proc"


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_an_owner_is_told_once_what_a_neighbour_read_in_its_volumes(pair: Pair) -> None:
    owner, reader, volume = pair
    reader.note_touches([volume, b"x" * 16, volume], [3, 4, 5], np.array([2, 2, 8], np.uint64))
    assert owner.touched() == [], "it is told in the reader's next round"
    assert reader.touched() == []
    assert owner.touched() == [(volume, 3, 2), (volume, 5, 8)]
    assert owner.touched() == []


def test_the_counter_of_a_ring_is_written_behind_its_entries(pair: Pair) -> None:
    _, reader, volume = pair
    reader.note_touches([volume], [3], [2])
    with record() as recording:
        reader.touched()
    offsets = [call.offset for call in recording.calls if call.kind is Kind.WRITE]
    assert offsets[-1] == RING_OFFSET
    assert RING_OFFSET not in offsets[:-1]


def test_a_page_used_twice_in_a_round_is_told_of_once_as_the_later(pair: Pair) -> None:
    owner, reader, volume = pair
    reader.note_touches([volume] * 3, [1, 2, 1], [2, 2, 4])
    reader.touched()
    assert owner.touched() == [(volume, 2, 2), (volume, 1, 4)]


def test_the_ring_goes_round(pair: Pair) -> None:
    owner, reader, volume = pair
    for first in range(0, 5 * RING_ENTRIES, 700):
        slots = list(range(first, first + 700))
        reader.note_touches([volume] * 700, slots, [2] * 700)
        reader.touched()
        assert [slot for _, slot, _ in owner.touched()] == slots


def test_of_more_than_the_ring_holds_an_owner_that_is_late_gets_the_newest(pair: Pair) -> None:
    owner, reader, volume = pair
    for first in range(0, 3 * RING_ENTRIES, 512):
        reader.note_touches([volume] * 512, range(first, first + 512), [2] * 512)
        reader.touched()
    assert [slot for _, slot, _ in owner.touched()] == list(range(2 * RING_ENTRIES, 3 * RING_ENTRIES))


def test_what_is_noted_between_two_rounds_is_bounded_and_the_rest_counted(pair: Pair) -> None:
    owner, reader, volume = pair
    reader.note_touches([volume] * 3000, range(3000), [2] * 3000)
    assert reader.counts.dropped_touches == 3000 - RING_ENTRIES
    reader.touched()
    assert len(owner.touched()) == RING_ENTRIES


def test_what_a_neighbour_read_before_it_was_seen_is_old(path: Path) -> None:
    with make_directory(str(path), "shared") as reader:
        reader.note_touches([b"v" * 16], [1], [2])
        reader.touched()
        with make_directory(str(path), "shared") as owner:
            volume = owner.grow()
            assert isinstance(volume, HeldVolume)
            owner.scan()
            assert owner.touched() == []
            reader.note_touches([bytes.fromhex(volume.volume_id)], [1], [2])
            reader.touched()
            assert len(owner.touched()) == 1


def test_what_fits_no_entry_is_misuse_and_nothing_is_noted(pair: Pair) -> None:
    owner, reader, volume = pair
    for volumes, slots, generations in (
        ([volume, b"short"], [1, 1], [2, 2]),
        ([volume, volume], [1, -1], [2, 2]),
        ([volume, volume], [1, 1 << 32], [2, 2]),
        ([volume, volume], [1, 1], [2, 1 << 64]),
    ):
        with pytest.raises(StepwellUsageError, match="16 bytes"):
            reader.note_touches(volumes, slots, generations)
    with pytest.raises(ValueError, match="argument"):
        reader.note_touches([volume], [1, 2], [2])
    reader.touched()
    assert owner.touched() == []


def test_a_ring_that_cannot_be_written_or_read_costs_its_touches(pair: Pair) -> None:
    owner, reader, volume = pair
    reader.note_touches([volume], [1], [2])
    with inject("file.pwrite", "errno", value=5):
        reader.touched()
    assert reader.counts.failed_publications == 1
    reader.note_touches([volume], [2], [2])
    reader.touched()
    with inject("file.pread", "errno", value=5):
        assert owner.touched() == []
    reader.note_touches([volume], [3], [2])
    reader.touched()
    assert owner.touched() == [], "the counter was lost with it, so it is as one not met before"
    reader.note_touches([volume], [4], [2])
    reader.touched()
    assert owner.touched() == [(volume, 4, 2)]


HEADS = [
    struct.pack("<QII", counter, entries, 0)
    for counter in (0, 1, 5, RING_ENTRIES + 1, 1 << 40, (1 << 64) - 1)
    for entries in (0, 1, 3, RING_ENTRIES, 1 << 16, (1 << 16) + 1, (1 << 32) - 1)
]


@pytest.mark.parametrize("size", [0, 50, RING_OFFSET, RING_OFFSET + 10, RING_OFFSET + 64 + 40, FILE_BYTES])
def test_a_hostile_ring_is_read_within_bounds(pair: Pair, path: Path, size: int) -> None:
    owner, reader, volume = pair
    file, dice = process_file(path, reader), random.Random(size)
    for head in HEADS:
        data = bytearray(file.read_bytes()[:100].ljust(FILE_BYTES, b"\0"))
        data[RING_OFFSET : RING_OFFSET + 16] = struct.pack("<QII", 0, RING_ENTRIES, 0)
        with open(file, "r+b") as stream:  # as it was before
            stream.write(data)
        owner.touched()
        for entry in range(RING_ENTRIES):
            place = RING_OFFSET + 64 + 32 * entry
            data[place : place + 32] = dice.choice([volume + dice.randbytes(16), dice.randbytes(32)])
        data[RING_OFFSET : RING_OFFSET + 16] = head
        with open(file, "r+b") as stream:
            stream.write(data[:size])
            stream.truncate(size)
        with inject("file.*", "count"):
            touches = owner.touched()
            assert reached("file.*") <= 6
        assert len(touches) <= RING_ENTRIES
        assert {touch[0] for touch in touches} <= {volume}


@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory"])
def test_a_process_file_that_is_none_is_not_opened(pair: Pair, path: Path, kind: str) -> None:
    owner, reader, _ = pair
    file = process_file(path, reader)
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "symlink":
        file.symlink_to("/etc/passwd")
    else:
        file.mkdir()
    assert owner.touched() == []
    if kind == "directory":
        file.rmdir()
    else:
        file.unlink()


# ---- what an owner does with it --------------------------------------------------------------------------------------


def volume_tier(rig: Rig) -> VolumeTier:
    tier = rig.store._tiers[Tier.SHARED]
    assert isinstance(tier, VolumeTier)
    return tier


def entries_of(rig: Rig, number: int, pages: int) -> tuple[list[bytes], list[int], list[int]]:
    """Return volume ids, slots and generations of the pages of a chain, as a neighbour reads them in the records."""
    keys = [key.tobytes() for key in prefix_hashes(chain(number, pages), page_tokens=PAGE_TOKENS)]
    found: dict[bytes, tuple[bytes, int, int]] = {}
    for member in volume_tier(rig).members:
        header = member.volume.header
        path = Path(volume_tier(rig).directory.path) / f"v-{member.held.volume_id}.vol"
        data = path.read_bytes()[header.records_offset : header.records_offset + 192 * header.slots]
        for slot in range(header.slots):
            record = data[192 * slot : 192 * slot + 192]
            generation = int.from_bytes(record[:8], "little")
            if generation and generation % 2 == 0:
                found[record[32 : 32 + record[17]]] = (bytes.fromhex(member.held.volume_id), slot, generation)
    rows = [found[key] for key in keys]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def filled(open_rig: OpenRig, clock: ManualClock) -> tuple[Rig, Rig, int]:
    """An owner of one volume that is full of chains of 8 pages, 0 the oldest; a neighbour; how many chains."""
    owner = open_rig(shared=VOLUME_BYTES, disk=0, clock=clock)
    chains = owner.store.stats().tiers["shared"].capacity // 8
    for number in range(chains):
        assert owner.save(chain(number, 8)).refused == 0
    neighbour = open_rig(shared=VOLUME_BYTES, disk=0, clock=clock)
    go_on(owner, clock)
    return owner, neighbour, chains


def go_on(rig: Rig, clock: ManualClock) -> None:
    clock.advance(1.0)
    rig.round()


def test_what_a_neighbour_reads_stays_and_what_nobody_reads_leaves(open_rig: OpenRig) -> None:
    clock = ManualClock()
    owner, neighbour, chains = filled(open_rig, clock)
    volume_tier(neighbour).directory.note_touches(*entries_of(owner, 0, 8))
    go_on(neighbour, clock)
    go_on(owner, clock)
    owner.save(chain(chains, 8))
    owner.save(chain(chains + 1, 8))
    assert owner.load(chain(0, 8)) == 8
    assert owner.load(chain(1, 8)) < 8


def test_a_touch_of_a_page_that_has_changed_since_is_none(open_rig: OpenRig) -> None:
    clock = ManualClock()
    owner, neighbour, chains = filled(open_rig, clock)
    volumes, slots, generations = entries_of(owner, 0, 8)
    told = volume_tier(neighbour).directory
    told.note_touches(volumes, slots, [generation + 2 for generation in generations])
    told.note_touches(volumes[:2], [1 << 20, (1 << 32) - 1], [2, 2])
    go_on(neighbour, clock)
    go_on(owner, clock)
    owner.save(chain(chains, 8))
    owner.save(chain(chains + 1, 8))
    assert owner.load(chain(0, 8)) < 8
    assert owner.store.check() == ""


def test_a_touch_keeps_the_ancestors_of_its_page_too(open_rig: OpenRig) -> None:
    clock = ManualClock()
    owner, neighbour, chains = filled(open_rig, clock)
    volumes, slots, generations = entries_of(owner, 0, 8)
    volume_tier(neighbour).directory.note_touches(volumes[5:6], slots[5:6], generations[5:6])
    go_on(neighbour, clock)
    go_on(owner, clock)
    owner.save(chain(chains, 8))
    owner.save(chain(chains + 1, 8))
    assert owner.load(chain(0, 8)) == 6
    assert owner.store.check() == ""


def test_touches_of_what_the_owner_has_not_or_in_any_order_change_nothing_else(open_rig: OpenRig) -> None:
    clock = ManualClock()
    owner, neighbour, _ = filled(open_rig, clock)
    volumes, _, generations = entries_of(owner, 3, 8)
    dice = random.Random(1)
    for _ in range(20):
        order = [dice.randrange(8) for _ in range(30)]
        volume_tier(neighbour).directory.note_touches(
            [volumes[i] for i in order], [dice.randrange(300) for _ in order], [generations[i] for i in order]
        )
        go_on(neighbour, clock)
        go_on(owner, clock)
        assert owner.store.check() == ""
    member = volume_tier(owner).members[0]
    empty = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
    assert owner.store._index.touch(member.volume, *empty)[1] == 0
    with pytest.raises(ValueError, match="length"):
        owner.store._index.touch(member.volume, np.zeros(1, np.uint32), np.zeros(2, np.uint64))
