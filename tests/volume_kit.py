"""A volume in a tier directory as the dead leave it, for tests that look at it, damage it, remove it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stepwell import _core, inspection, verification
from stepwell.tiers.reader import Lock
from stepwell.tiers.volume_files import header_checksum, list_directory

FINGERPRINT = bytes(range(32))
FREE = Lock(False, "")


def sealed(header: bytes) -> bytes:
    """Return a header of 4096 bytes with the checksum that belongs to it: the boot id counts as zeros."""
    return header[:-4] + header_checksum(header).to_bytes(4, "little")


class Volume:
    """A volume in a tier directory, written as its holder writes it, without a holder now."""

    def __init__(
        self,
        directory: Path,
        *,
        medium: int = 1,
        layers: tuple[int, ...] = (1000, 1000),
        pages: int = 4,
        slots: int = 8,
    ) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "directory.lock").touch(0o600)
        self.directory = directory
        self.layers = layers
        shape = _core.PageShape(list(layers), FINGERPRINT)
        alignment = 64 if medium == 1 else 512
        room = slots * (sum(layers) + alignment + 192 + 16 + 4 * len(layers)) + (5 << 12) + 64 * 17
        self.header = _core.VolumeHeader.plan(medium, shape, room, alignment, 64)
        self.header.volume_id = os.urandom(16)
        self.id = self.header.volume_id.hex()
        stem = directory / f"v-{self.id}"
        stem.with_suffix(".lock").touch(0o600)
        self.metadata = stem.with_suffix(".vol" if medium == 1 else ".meta")
        self.pages = stem.with_suffix(".vol" if medium == 1 else ".pages")
        self.pages.touch(0o600)
        os.truncate(self.pages, self.header.pages_bytes)
        self.metadata.touch(0o600)
        os.truncate(self.metadata, self.header.metadata_bytes)
        self.write_header(self.header.encode())
        random = np.random.default_rng(len(layers) + medium)
        self.rows = random.integers(0, 256, (pages, sum(layers)), dtype=np.uint8)
        self.keys = [bytes([slot, *range(1, 32)]) for slot in range(pages)]
        volume = self.open(shape)
        for slot, (key, row) in enumerate(zip(self.keys, self.rows, strict=True)):
            parent = self.keys[slot - 1] if slot else b""
            status = volume.write_page(
                slot, row, key=key, parent=parent, parent_state=1 if slot else 0, depth=slot, epoch=3
            )
            assert status == _core.Status.ok

    def open(self, shape: _core.PageShape) -> _core.Volume:
        pages = -1 if self.pages == self.metadata else os.open(self.pages, os.O_RDWR | os.O_CLOEXEC)
        return _core.Volume(shape, self.header, os.open(self.metadata, os.O_RDWR | os.O_CLOEXEC), pages)

    def write_header(self, data: bytes) -> None:
        self.patch(self.metadata, 0, data)

    def patch(self, path: Path, offset: int, data: bytes) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0] ^ (1 << bit)
            file.seek(offset)
            file.write(bytes([byte]))

    def record_at(self, slot: int) -> int:
        return self.header.records_offset + 192 * slot

    def page_at(self, slot: int) -> int:
        return self.header.pages_offset + self.header.slot_bytes * slot

    def report(self) -> inspection.VolumeReport:
        names = list_directory(str(self.directory)).volumes[self.id]
        return inspection.report_volume(str(self.directory), names, FREE, geometries={})

    def check(self) -> verification.VolumeCheck:
        [check] = verification.verify_directory(str(self.directory))
        return check
