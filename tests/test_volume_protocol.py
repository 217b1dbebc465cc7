"""The page protocol between real processes: a writer that is killed, and a reader that never stops.

The replay of every prefix of the writer's stores is tests/cpp/test_protocol.cpp.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import volume_writer
from stepwell import _core

SHARED, DISK = 1, 2
SLOTS = 24


class Files:
    """The files of one volume, as a neighbour opens them."""

    def __init__(self, directory: Path, medium: int) -> None:
        self.metadata_path = directory / ("v.vol" if medium == SHARED else "v.meta")
        self.pages_path = directory / "v.pages" if medium == DISK else None
        shape = volume_writer.shape()
        alignment = 64 if medium == SHARED else 4096
        room = SLOTS * (volume_writer.PAGE_BYTES + 4096 + 500) + 40960
        self.header = _core.VolumeHeader.plan(medium, shape, room, alignment, 64)
        self.metadata_path.touch(0o600)
        os.truncate(self.metadata_path, self.header.metadata_bytes)
        self.metadata = os.open(self.metadata_path, os.O_RDWR | os.O_CLOEXEC)
        os.pwrite(self.metadata, self.header.encode(), 0)
        self.pages = -1
        if self.pages_path is not None:
            self.pages_path.touch(0o600)
            os.truncate(self.pages_path, self.header.pages_bytes)
            self.pages = os.open(self.pages_path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        os.close(self.metadata)
        if self.pages >= 0:
            os.close(self.pages)

    def arguments(self) -> list[str]:
        paths = [self.metadata_path, self.pages_path]
        return [str(path) for path in paths if path is not None]


@contextmanager
def volume_files(directory: Path, medium: int) -> Iterator[Files]:
    files = Files(directory, medium)
    try:
        yield files
    finally:
        files.close()


class Neighbour:
    """Reads pages of the volume at random and counts outcomes; a wrong byte fails at once."""

    def __init__(self, files: Files, seed: int) -> None:
        self.files = files
        self.shape = volume_writer.shape()
        self.choose = random.Random(seed)
        self.out = np.zeros(volume_writer.PAGE_BYTES, dtype=np.uint8)
        self.stamps = {
            key: volume_writer.stamp(key)
            for key in map(volume_writer.key_of, range(volume_writer.KEYS))
        }
        self.outcomes: Counter[str] = Counter()

    def read(self) -> None:
        files = self.files
        slot = self.choose.randrange(files.header.slots)
        generation, record = _core.peek_record(files.header, files.metadata, slot)
        if record is None:
            self.outcomes["free"] += 1
            return
        mapped = files.pages < 0 and self.choose.random() < 0.5
        status = _core.read_foreign_page(
            self.shape,
            files.header,
            files.metadata,
            files.pages,
            slot,
            generation,
            self.out,
            key=record.key,
            mapped=mapped,
        )
        if status == _core.Status.ok:
            assert np.array_equal(self.out, self.stamps[record.key]), (slot, generation)
        # Nothing is damaged here: what was rewritten under the reader is stale, never corrupt.
        assert status in (_core.Status.ok, _core.Status.stale), (slot, generation, status)
        self.outcomes[status.name] += 1


class Writer:
    """A writer process and its progress."""

    def __init__(self, files: Files) -> None:
        script = Path(volume_writer.__file__)
        command = [sys.executable, str(script), *files.arguments()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.adopted = json.loads(self.process.stdout.readline())
        os.set_blocking(self.process.stdout.fileno(), False)
        self.progress = 0

    def look(self) -> int:
        """Return how many batches of pages it has published."""
        assert self.process.stdout is not None
        self.progress += len(self.process.stdout.read() or b"")
        assert self.process.poll() is None, "the writer ended by itself"
        return self.progress

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize(("medium", "kills"), [(SHARED, 40), (DISK, 12)])
def test_a_killed_writer_leaves_only_right_pages_and_a_reader_sees_no_other(
    tmp_path: Path, medium: int, kills: int
) -> None:
    seed = 20261130 + medium
    choose = random.Random(seed)
    with volume_files(tmp_path, medium) as files:
        neighbour = Neighbour(files, seed)
        recovered = 0
        generations = np.zeros(files.header.slots, dtype=np.uint64)
        for _ in range(kills):
            writer = Writer(files)
            try:
                assert writer.adopted["wrong"] == [], f"seed {seed}"
                recovered += writer.adopted["pages"]
                # Around 50 ms of the writer's own progress, at no particular step of it.
                batches = choose.randrange(2, 60)
                while writer.look() < batches:
                    neighbour.read()
            finally:
                writer.kill()
            now = [
                _core.peek_record(files.header, files.metadata, slot)[0]
                for slot in range(files.header.slots)
            ]
            after = np.array(now, dtype=np.uint64)
            assert (after >= generations).all(), f"a generation went back, seed {seed}"
            generations = after
        volume = volume_writer.open_volume(*files.arguments())
        count, wrong = volume_writer.wrong_pages(volume)
        assert wrong == []
        assert recovered + count > kills * files.header.slots // 3
        assert neighbour.outcomes["ok"] > kills
        assert generations.max() > 100


@pytest.mark.parametrize("medium", [SHARED, DISK])
@pytest.mark.parametrize(
    "point",
    [
        "volume.begin",
        "volume.odd",
        "volume.after_bytes",
        "volume.after_checksums",
        "volume.after_record",
        "volume.after_publish",
        "volume.after_ring",
    ],
)
def test_a_writer_killed_at_a_step_loses_that_page_and_nothing_else(
    tmp_path: Path, medium: int, point: str
) -> None:
    with volume_files(tmp_path, medium) as files:
        arguments = repr(files.arguments())
        program = f"""
import volume_writer
from stepwell import _core
volume = volume_writer.open_volume(*{arguments})
for number in range(6):
    key = volume_writer.key_of(number)
    assert volume.write_page(number, volume_writer.stamp(key), key=key) == _core.Status.ok
_core.fault_arm({point!r}, "kill", 1)
key = volume_writer.key_of(10)
volume.write_page(3, volume_writer.stamp(key), key=key)
"""
        directory = Path(volume_writer.__file__).parent
        ended = subprocess.run([sys.executable, "-c", program], cwd=directory, check=False)
        assert ended.returncode == -signal.SIGKILL
        volume = volume_writer.open_volume(*files.arguments())
        count, wrong = volume_writer.wrong_pages(volume)
        assert wrong == []
        published = point in ("volume.after_publish", "volume.after_ring")
        assert count == (6 if point == "volume.begin" or published else 5)
        out = np.zeros(volume_writer.PAGE_BYTES, dtype=np.uint8)
        old, new = volume_writer.key_of(3), volume_writer.key_of(10)
        found = [volume.read_page(3, out, key=key) == _core.Status.ok for key in (old, new)]
        assert found == [point == "volume.begin", published]
