"""Damage volumes behind the tiers' backs: flipped bits, torn, cut, misplaced and mixed-up files."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepwell.torture.world import World

METADATA_SHARE: Final = 0.5  # of the damage goes to the first part of a file, where headers and records are
FIRST_PART: Final = 0.25


def damage(world: World, rng: random.Random, *, is_used: bool) -> str:
    """Damage one file of a world. is_used: stores are open, so that names stay and LMDB is left alone.

    Returns:
        What was done, "" where there was nothing to damage.
    """
    files = [path for tier in world.paths.values() for path in sorted(tier.glob("v-*.*")) if path.is_file()]
    volumes = [path for path in files if path.suffix in (".vol", ".meta", ".pages")]
    if not volumes:
        return ""
    path = rng.choice(volumes)
    acts = [_flip, _flip, _flip, _zero, _misplace, _cut, _grow]
    if not is_used:
        acts += [_mix_up, _lose, _spoil_beside]
    act = rng.choice(acts)
    with suppress(FileNotFoundError):  # a store has removed it meanwhile
        return f"{act.__name__[1:]} {path.name}: {act(path, rng)}"
    return ""


def _somewhere(path: Path, rng: random.Random) -> tuple[int, int]:
    """Return (an offset in a file, the size of it), mostly where it says what it holds."""
    size = path.stat().st_size
    within = int(size * FIRST_PART) if rng.random() < METADATA_SHARE else size
    return rng.randrange(max(1, within)), size


def _change(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), data, offset)


def _read(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return os.pread(file.fileno(), size, offset)


def _flip(path: Path, rng: random.Random) -> str:
    offsets = []
    for _ in range(rng.choice((1, 1, 8, 64))):
        offset, size = _somewhere(path, rng)
        byte = _read(path, offset, 1)
        if size and byte:
            _change(path, offset, bytes([byte[0] ^ 1 << rng.randrange(8)]))
            offsets.append(offset)
    return f"a bit at {offsets[:8]}"


def _zero(path: Path, rng: random.Random) -> str:
    offset, size = _somewhere(path, rng)
    length = min(rng.choice((1, 64, 512, 4096, 65536)), size - offset)
    _change(path, offset, bytes(max(0, length)))
    return f"{length} bytes at {offset}"


def _misplace(path: Path, rng: random.Random) -> str:
    """Write what belongs to one place to another, as a drive does that mixes up sectors."""
    length = rng.choice((192, 512, 4096))
    source, size = _somewhere(path, rng)
    target = rng.randrange(max(1, size))
    source, target = source // length * length, target // length * length
    _change(path, target, _read(path, source, min(length, size - target)))
    return f"{length} bytes of {source} to {target}"


def _cut(path: Path, rng: random.Random) -> str:
    size = rng.choice((0, rng.randrange(max(1, path.stat().st_size))))
    os.truncate(path, size)
    return f"to {size} bytes"


def _grow(path: Path, rng: random.Random) -> str:
    size = path.stat().st_size + rng.choice((1, 4096, 65536))
    os.truncate(path, size)
    return f"to {size} bytes"


def _mix_up(path: Path, rng: random.Random) -> str:
    """Exchange two files of a kind."""
    other = rng.choice(sorted(path.parent.glob(f"v-*{path.suffix}")))
    between = path.with_name("mixed-up")
    path.rename(between)
    if other != path:
        other.rename(path)
    between.rename(other)
    return f"with {other.name}"


def _lose(path: Path, rng: random.Random) -> str:
    lost = rng.choice([path, path.with_suffix(".lock")])
    lost.unlink()
    return lost.name


def _spoil_beside(path: Path, rng: random.Random) -> str:
    """Fill a piece of an LMDB file, or of a process file, with noise."""
    beside = sorted([*path.parent.glob("v-*.lmdb/*"), *path.parent.glob("p-*.proc")])
    if not beside:
        return "nothing"
    chosen = rng.choice(beside)
    offset = rng.randrange(max(1, chosen.stat().st_size))
    _change(chosen, offset, rng.randbytes(rng.choice((1, 64, 4096))))
    return f"{chosen.name} at {offset}"
