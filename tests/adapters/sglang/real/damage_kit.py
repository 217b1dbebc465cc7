"""Damage what a backend has stored, whatever its format: find bytes of a page in its files, and change those files.

A row of a page (one token's K in one layer) lies in one piece in every host layout, and so in whatever stores pages as
they are. A backend that changes the bytes (compresses, encrypts) would need a way of its own.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backends import Store


@dataclass(frozen=True)
class Place:
    """Where a row was found."""

    path: Path
    offset: int


def find(store: Store, rows: list[bytes]) -> list[Place]:
    """Find every copy of these rows in the backend's files."""
    return [place for path in _files(store) for place in _within(path, rows)]


def flip(places: list[Place]) -> None:
    """Change one bit at each place."""
    for place in places:
        with open(place.path, "r+b", buffering=0) as file:
            file.seek(place.offset)
            byte = file.read(1)[0]
            file.seek(place.offset)
            file.write(bytes([byte ^ 0x10]))


def cut(places: list[Place]) -> None:
    """End each file in the first of its places."""
    for path in {place.path for place in places}:
        os.truncate(path, min(place.offset for place in places if place.path == path) + 1)


def lengthen(places: list[Place], count: int) -> None:
    """Add bytes to the end of each file."""
    for path in {place.path for place in places}:
        with open(path, "ab") as file:
            file.write(b"\xa5" * count)


def _files(store: Store) -> list[Path]:
    return [path for folder in store.folders if folder.exists() for path in sorted(folder.rglob("*")) if path.is_file()]


def _within(path: Path, rows: list[bytes]) -> Iterator[Place]:
    if path.stat().st_size == 0:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        for row in rows:
            start = content.find(row)
            while start >= 0:
                yield Place(path, start)
                start = content.find(row, start + 1)


def anywhere(store: Store, count: int, choose: random.Random) -> list[Place]:
    """Choose places in the files that hold anything, small ones as often as large ones."""
    files = [path for path in _files(store) if path.stat().st_size]
    return [Place(path, choose.randrange(path.stat().st_size)) for path in (choose.choice(files) for _ in range(count))]
