"""The writer of test_volume_protocol.py: adopts a volume, rewrites stamped pages until killed.

Usage: volume_writer.py METADATA [PAGES]. Writes one byte to standard output for each 32 pages
published, and a line of JSON first: what it found when it adopted the volume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys

import numpy as np

from stepwell import _core

LAYERS = [6000, 1, 10383]
PAGE_BYTES = sum(LAYERS)
KEYS = 64
PROGRESS_PAGES = 32


def shape() -> _core.PageShape:
    return _core.PageShape(LAYERS, bytes(range(32)))


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"page %d" % number).digest()


def stamp(key: bytes) -> np.ndarray:
    """Return the bytes that the page of a key has and no other page: a wrong byte shows."""
    return np.frombuffer(hashlib.shake_128(key).digest(PAGE_BYTES), dtype=np.uint8)


def open_volume(metadata_path: str, pages_path: str | None = None) -> _core.Volume:
    """Open the volume as its one writer does."""
    metadata = os.open(metadata_path, os.O_RDWR | os.O_CLOEXEC)
    pages, pages_bytes = -1, 0
    if pages_path is not None:
        pages = os.open(pages_path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        pages_bytes = os.fstat(pages).st_size
    data = os.pread(metadata, 4096, 0)
    header = _core.VolumeHeader.decode(data, os.fstat(metadata).st_size, pages_bytes)
    return _core.Volume(shape(), header, metadata, pages, pages >= 0)


def wrong_pages(volume: _core.Volume) -> tuple[int, list[str]]:
    """Adopt the volume: return how many pages it holds and what is wrong with them."""
    slots, keys, key_lengths, *_, damaged = volume.recover()
    wrong = [f"{damaged} damaged records"] if damaged else []
    out = np.zeros(PAGE_BYTES, dtype=np.uint8)
    for slot, key, length in zip(slots, keys, key_lengths, strict=True):
        name = bytes(key[:length])
        status = volume.read_page(int(slot), out, key=name)
        if status != _core.Status.ok or not np.array_equal(out, stamp(name)):
            wrong.append(f"slot {slot}: {status}")
    return len(slots), wrong


def main() -> None:
    volume = open_volume(*sys.argv[1:])
    count, wrong = wrong_pages(volume)
    os.write(1, json.dumps({"pages": count, "wrong": wrong}).encode() + b"\n")
    pages = {key: stamp(key) for key in map(key_of, range(KEYS))}
    names = list(pages)
    choose = random.Random(os.getpid())
    scratch = _core.Scratch()
    slots = volume.header.slots
    for written in itertools.count(1):
        key = choose.choice(names)
        slot = choose.randrange(slots)
        if choose.random() < 0.05:
            volume.retire(np.array([slot], dtype=np.uint32))
        status = volume.write_page(slot, pages[key], key=key, scratch=scratch)
        if status != _core.Status.ok:
            raise SystemExit(f"write failed: {status}")
        if written % PROGRESS_PAGES == 0:
            os.write(1, b".")


if __name__ == "__main__":
    main()
