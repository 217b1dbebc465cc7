"""Slabs and volumes as Python sees them; in depth they are tested in tests/cpp."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from stepwell import _core

FINGERPRINT = bytes(range(32))
LAYERS = [3000, 96, 1000]
PAGE_BYTES = sum(LAYERS)
SHARED, DISK = 1, 2
UNKNOWN_DEPTH = 2**32 - 1


def shape() -> _core.PageShape:
    return _core.PageShape(LAYERS, FINGERPRINT)


def page(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def slots_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint32)


class Files:
    """The files of a volume in a directory, made as the keeper makes them."""

    def __init__(self, directory: Path, medium: int, volume_bytes: int = 1 << 18) -> None:
        self.metadata_path = directory / "v.meta"
        self.pages_path = directory / "v.pages"
        alignment = 64 if medium == SHARED else 4096
        self.header = _core.VolumeHeader.plan(medium, shape(), volume_bytes, alignment, 64)
        self.header.volume_id = bytes(range(16))
        self.metadata_path.write_bytes(self.header.encode())
        os.truncate(self.metadata_path, self.header.metadata_bytes)
        if medium == DISK:
            self.pages_path.touch()
            os.truncate(self.pages_path, self.header.pages_bytes)

    def open(self) -> _core.Volume:
        direct = self.header.medium == DISK
        metadata = os.open(self.metadata_path, os.O_RDWR | os.O_CLOEXEC)
        pages = os.open(self.pages_path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT) if direct else -1
        data = os.pread(metadata, 4096, 0)
        header = _core.VolumeHeader.decode(
            data, self.header.metadata_bytes, self.header.pages_bytes
        )
        return _core.Volume(shape(), header, metadata, pages, direct)


@pytest.fixture(params=[SHARED, DISK], ids=["shared", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(tmp_path, request.param)


def test_a_volume_gives_back_what_was_written(files: Files) -> None:
    volume = files.open()
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert volume.does_io == (files.header.medium == DISK)
    assert volume.write_page(3, page(1), key=b"k" * 64, epoch=7) == _core.Status.ok
    assert volume.read_page(3, out, key=b"k" * 64, epoch=7) == _core.Status.ok
    assert np.array_equal(out, page(1))
    assert volume.read_page(3, out, key=b"k" * 64, epoch=8) == _core.Status.stale
    assert volume.read_page(4, out, key=b"k" * 64, epoch=7) == _core.Status.stale
    assert volume.read_page(2**20, out, key=b"k") == _core.Status.invalid
    del volume
    again = files.open()
    assert again.read_page(3, out, key=b"k" * 64, epoch=7) == _core.Status.ok


def test_adoption_returns_labels_generations_and_stamps(files: Files) -> None:
    volume = files.open()
    volume.write_page(5, page(1), key=b"first", epoch=2, parent_state=0, depth=0)
    volume.write_page(1, page(2), key=b"second", epoch=2, parent=b"first", parent_state=1, depth=1)
    volume.write_page(9, page(3), key=b"third", epoch=2)
    volume.write_page(9, page(3), key=b"third", epoch=2)
    volume.write_page(6, page(4), key=b"old", epoch=1)
    assert volume.write_recency(slots_of(9, 1), np.array([70, 80], np.uint64)) == _core.Status.ok
    del volume
    found = files.open().recover()
    slots, keys, key_lengths, parents, parent_lengths, states, depths, kinds, epochs = found[:9]
    stamps, generations, duplicate, damaged = found[9:]
    assert slots.tolist() == [1, 5, 6, 9]
    names = [bytes(key[:length]) for key, length in zip(keys, key_lengths, strict=True)]
    assert names == [b"second", b"first", b"old", b"third"]
    assert [bytes(p[:n]) for p, n in zip(parents, parent_lengths, strict=True)] == [
        b"first",
        b"",
        b"",
        b"",
    ]
    assert states.tolist() == [1, 0, 2, 2]
    assert depths.tolist() == [1, 0, UNKNOWN_DEPTH, UNKNOWN_DEPTH]
    assert kinds.tolist() == [1, 1, 1, 1]
    assert epochs.tolist() == [2, 2, 1, 2]
    assert stamps.tolist() == [80, 0, 0, 70]
    assert generations.tolist() == [2, 2, 2, 4]
    assert (duplicate, damaged) == (0, 0)
    assert keys.shape == (4, 64)
    assert keys.dtype == np.uint8


def test_an_empty_volume_recovers_to_empty_columns(files: Files) -> None:
    slots, keys, *_, damaged = files.open().recover()
    assert len(slots) == 0
    assert keys.shape == (0, 64)
    assert damaged == 0


def test_retire_says_for_each_slot_how_it_went(files: Files) -> None:
    volume = files.open()
    volume.write_page(0, page(1), key=b"k")
    statuses = volume.retire(slots_of(0, 1, volume.header.slots))
    assert statuses.tolist() == [
        int(_core.Status.ok),
        int(_core.Status.ok),
        int(_core.Status.invalid),
    ]
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert volume.read_page(0, out, key=b"k") == _core.Status.stale
    assert volume.rewrite_and_check(0) == _core.Status.ok


def test_a_neighbour_reads_the_page_it_learnt_of_and_no_other(files: Files) -> None:
    volume = files.open()
    volume.write_page(2, page(1), key=b"k", epoch=4)
    metadata = os.open(files.metadata_path, os.O_RDONLY)
    pages = os.open(files.pages_path, os.O_RDONLY | os.O_DIRECT) if volume.does_io else -1
    try:
        generation, record = _core.peek_record(files.header, metadata, 2)
        assert (generation, record.key, record.epoch, record.length) == (2, b"k", 4, PAGE_BYTES)
        assert _core.peek_record(files.header, metadata, 3) == (0, None)
        with pytest.raises(IndexError):
            _core.peek_record(files.header, metadata, files.header.slots)
        out = np.zeros(PAGE_BYTES + 1, dtype=np.uint8)[1:]  # no alignment at all
        for mapped in (False, True)[: 1 if volume.does_io else 2]:
            out[:] = 0
            assert (
                _core.read_foreign_page(
                    shape(),
                    files.header,
                    metadata,
                    pages,
                    2,
                    2,
                    out,
                    key=b"k",
                    epoch=4,
                    mapped=mapped,
                )
                == _core.Status.ok
            )
            assert np.array_equal(out, page(1))
        volume.retire(slots_of(2))
        status = _core.read_foreign_page(
            shape(), files.header, metadata, pages, 2, 2, out, key=b"k", epoch=4
        )
        assert status == _core.Status.stale
    finally:
        os.close(metadata)
        if pages >= 0:
            os.close(pages)


def test_a_set_numbers_its_volumes(files: Files) -> None:
    volumes = _core.VolumeSet(files.header.medium == DISK)
    volume = files.open()
    assert volumes.add(volume) == 0
    assert volumes.get(0) is volume
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert volumes.write_page(3, page(1), key=b"k") == _core.Status.ok
    assert volumes.read_page(3, out, key=b"k") == _core.Status.ok
    assert volumes.read_page(1 << 20 | 3, out, key=b"k") == _core.Status.invalid
    assert volumes.retire(slots_of(3, 1 << 20)).tolist() == [0, int(_core.Status.invalid)]
    with pytest.raises(ValueError, match="one medium"):
        _core.VolumeSet(files.header.medium == SHARED).add(volume)
    assert volumes.remove(0) is volume
    assert volumes.get(0) is None
    assert volumes.remove(0) is None


def test_damage_and_mixed_up_files_are_refused_with_the_reason(files: Files) -> None:
    data = bytearray(files.header.encode())
    sizes = files.header.metadata_bytes, files.header.pages_bytes
    assert _core.VolumeHeader.decode(bytes(data), *sizes).slots == files.header.slots
    with pytest.raises(ValueError, match="metadata file has 4096 bytes"):
        _core.VolumeHeader.decode(bytes(data), 4096, sizes[1])
    data[70] ^= 1
    with pytest.raises(ValueError, match="header checksum"):
        _core.VolumeHeader.decode(bytes(data), *sizes)
    with pytest.raises(ValueError, match="a header has 4096 bytes, not 4095"):
        _core.VolumeHeader.decode(bytes(data[:4095]), *sizes)
    files.header.epoch = 99
    volume_files = os.open(files.metadata_path, os.O_RDWR)
    with pytest.raises(RuntimeError):
        _core.Volume(shape(), files.header, volume_files, -1, False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(volume_files)  # the descriptor was taken, and closed with the failure


def test_header_fields_are_checked_when_set(files: Files) -> None:
    header = files.header
    header.boot_id, header.birth_ns, header.epoch = b"b" * 16, 5, 6
    header.fingerprint = FINGERPRINT
    again = _core.VolumeHeader.decode(header.encode(), header.metadata_bytes, header.pages_bytes)
    assert (again.volume_id, again.boot_id) == (bytes(range(16)), b"b" * 16)
    assert (again.birth_ns, again.epoch, again.fingerprint) == (5, 6, FINGERPRINT)
    with pytest.raises(ValueError, match="boot_id has 3 bytes, not 16"):
        header.boot_id = b"abc"
    with pytest.raises(ValueError, match="neither 1"):
        _core.VolumeHeader.plan(3, shape(), 1 << 20, 64)
    with pytest.raises(ValueError, match="holds no page"):
        _core.VolumeHeader.plan(SHARED, shape(), 1000, 64)


def test_the_boot_id_outlives_the_volume(files: Files) -> None:
    volume = files.open()
    assert volume.write_boot_id(b"0123456789abcdef") == _core.Status.ok
    assert files.open().header.boot_id == b"0123456789abcdef"


def test_a_label_that_no_record_can_hold_is_misuse(files: Files) -> None:
    volume = files.open()
    with pytest.raises(ValueError, match="key has 0 bytes"):
        volume.write_page(0, page(1), key=b"")
    with pytest.raises(ValueError, match="key has 65 bytes"):
        volume.write_page(0, page(1), key=b"k" * 65)
    with pytest.raises(ValueError, match="parent"):
        volume.write_page(0, page(1), key=b"k", parent=b"p")
    with pytest.raises(ValueError, match="parent state 3"):
        volume.write_page(0, page(1), key=b"k", parent_state=3)
    with pytest.raises(ValueError, match="page of 5 bytes, not 4096"):
        volume.write_page(0, np.zeros(5, dtype=np.uint8), key=b"k")
    assert volume.write_page(0, page(1), key=b"k", kind=2) == _core.Status.invalid


def test_prefault_stops_when_told(tmp_path: Path) -> None:
    volume = Files(tmp_path, SHARED).open()
    stop = _core.StopFlag()
    assert volume.prefault(stop) == _core.Status.ok
    stop.set()
    assert stop.is_set
    assert volume.prefault(stop) == _core.Status.cancelled


def test_a_truncated_volume_is_a_bus_fault_and_not_a_crash(tmp_path: Path) -> None:
    files = Files(tmp_path, SHARED)
    volume = files.open()
    volume.write_page(0, page(1), key=b"k")
    os.truncate(files.metadata_path, 0)
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert volume.read_page(0, out, key=b"k") == _core.Status.bus_fault
    assert volume.write_page(0, page(1), key=b"k") == _core.Status.bus_fault
    with pytest.raises(OSError, match="Input/output error"):
        volume.recover()


def test_a_slab_is_memory_that_python_may_look_at() -> None:
    slab = _core.Slab(shape(), 4)
    assert (slab.slots, slab.slot_bytes, slab.does_io) == (4, 4096, False)
    assert slab.write_page(2, page(1), key=b"k") == _core.Status.ok
    view = slab.view()
    assert view.shape == (4, 4096)
    assert view.ctypes.data == slab.address(0)
    assert slab.address(3) - slab.address(0) == 3 * 4096
    assert np.array_equal(view[2, :PAGE_BYTES], page(1))
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    assert slab.read_page(2, out, key=b"k") == _core.Status.ok
    view[2, 0] ^= 1
    assert slab.read_page(2, out, key=b"k") == _core.Status.checksum
    with pytest.raises(IndexError):
        slab.address(4)
    del slab
    gc.collect()
    view[:] = 1  # the view keeps the slab
    assert view.sum() == 4 * 4096


def test_pages_move_while_other_python_threads_run(files: Files) -> None:
    # A write stands at a fault point without the GIL, or this thread could not resume it.
    volume = files.open()
    results: list[_core.Status] = []
    _core.fault_arm("volume.after_bytes", "pause", 1)
    try:
        writer = threading.Thread(
            target=lambda: results.append(volume.write_page(1, page(1), key=b"k"))
        )
        writer.start()
        assert _core.fault_wait_paused("volume.after_bytes", 60)
        out = np.zeros(PAGE_BYTES, dtype=np.uint8)
        assert volume.read_page(1, out, key=b"k") == _core.Status.stale
        _core.fault_resume("volume.after_bytes")
        writer.join()
        assert results == [_core.Status.ok]
        assert volume.read_page(1, out, key=b"k") == _core.Status.ok
    finally:
        _core.fault_clear()
