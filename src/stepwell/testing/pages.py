"""Name pages and say what is in them: prompts as paths in a tree, keys that follow from those, bytes that follow from
keys."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace, prefix_hashes

PAGE_TOKENS: Final = 4
GEOMETRIES: Final = (
    PageGeometry(model="w", revision="1", layers=2, kv_heads=4, head_dim=64, dtype="float32", page_tokens=PAGE_TOKENS),
    PageGeometry(model="w", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=PAGE_TOKENS),
    PageGeometry.opaque(5000, fingerprint={"model": "w"}, page_tokens=PAGE_TOKENS),
)
"""Pages of 16 KiB, of which a volume holds a dozen; of 1 KiB; and of rows of bytes whose number is odd."""
OPAQUE: Final = 2
"""Which of them has no layers."""
NAMESPACES: Final = (None, Namespace(adapter="a"), Namespace(salt="a"))

Steps = tuple[int, ...]
"""A path in the tree of prompts: the branch at each page."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of a path and a namespace, and the keys of its whole pages."""

    tokens: npt.NDArray[np.int32]
    namespace: Namespace | None
    keys: tuple[bytes, ...]
    rows: Bytes  # the keys as an array


@functools.lru_cache(maxsize=4096)
def prefix(path: Steps, space: int) -> Prefix:
    """Return what a path names. Pages of different branches differ in their last token alone; a few tokens that are no
    whole page follow."""
    tokens = [token for branch in path for token in (7, 7, 7, branch)] + [9] * (len(path) % 3)
    array = np.array(tokens, np.int32)
    namespace = NAMESPACES[space]
    rows = prefix_hashes(array, page_tokens=PAGE_TOKENS, seed=namespace.seed() if namespace else None)
    return Prefix(array, namespace, tuple(row.tobytes() for row in rows), rows)


@functools.lru_cache(maxsize=4096)
def content(page_bytes: int, epoch: int, key: bytes) -> Bytes:
    """Return the bytes of a page: they follow from its key and its epoch, and no two places of it are alike."""
    seed = np.frombuffer(hashlib.sha256(epoch.to_bytes(8, "little") + key).digest(), np.uint64)
    words = np.arange(-(-page_bytes // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (words * np.uint64(0x9E3779B97F4A7C15) + seed[0]) * (seed[1] | np.uint64(1))
    found: Bytes = (mixed ^ (mixed >> np.uint64(29))).view(np.uint8)[:page_bytes].copy()
    return found


def flip(directory: Path, page: bytes) -> bool:
    """Change one bit of each place in the files of a tier that holds a page. Returns whether there was one."""
    is_changed = False
    middle = len(page) // 2
    for path in filter(Path.is_file, directory.glob("v-*")):
        data = path.read_bytes()
        at = data.find(page)
        while at >= 0:
            with path.open("r+b") as file:
                file.seek(at + middle)
                file.write(bytes([page[middle] ^ 1]))
            is_changed = True
            at = data.find(page, at + 1)
    return is_changed
