"""What the tests of reported cases share: a store of any geometry with its pool, tiers of a few pages, child processes.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import Tier
from stepwell.mover import SaveResult
from stepwell.store import PageStore
from stepwell.testing.faults import Action, inject
from stepwell.tiers.directory import CoreHeaders
from store_kit import GEOMETRY, Directories

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]
HOST_SLOT_BYTES = 4096
CASE_GEOMETRY = PageGeometry(
    model="cases", revision="1", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4
)
"""Pages of 512 bytes."""


def volume_bytes_for(geometry: PageGeometry, tier: Tier, pages: int, place: Path) -> int:
    """Return the size of a volume that has room for exactly `pages`, in a directory of `place`."""
    shape = _core.PageShape(list(geometry.layer_bytes), geometry.fingerprint())
    medium, alignment = 1, 64
    if tier is Tier.DISK:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            medium, alignment = 2, _core.file_direct_alignment(file.name)
        alignment = max(alignment, 512) if alignment else 4096
    low, high = 1, 1 << 40
    while low < high:  # the smallest size whose plan has that many slots
        middle = (low + high) // 2
        try:
            slots = CoreHeaders(shape).plan(medium=medium, volume_bytes=middle, alignment=alignment).slots
        except ValueError:
            slots = 0
        low, high = (low, middle) if slots >= pages else (middle + 1, high)
    return low


@contextmanager
def bad_read(page: int, action: Action = "errno", value: int = errno.EIO) -> Iterator[None]:
    """Spoil each read of the bytes of one page, whose transfer is read from disk by one worker in one run: the one that
    is of all pages of the run, and the page's own, where the first has failed. Three reads each: checksums, records,
    bytes, and record, checksums, bytes."""
    of_run, own = 3, 3 + 3 * page + 3
    with inject("file.pread", action, nth=of_run, value=value), inject("file.pread", action, nth=own, value=value):
        yield


def config_of(
    directories: Directories,
    geometry: PageGeometry = CASE_GEOMETRY,
    *,
    host: int = 0,
    shared: int = 0,
    disk: int = 0,
    volumes: int = 1,
    **others: Any,
) -> StoreConfig:
    """Configure tiers by pages: shared and disk in `volumes` volumes each."""
    slot = -(-geometry.page_bytes // HOST_SLOT_BYTES) * HOST_SLOT_BYTES
    sizes = {
        tier: volume_bytes_for(geometry, tier, -(-pages // volumes), path.parent)
        for tier, pages, path in ((Tier.SHARED, shared, directories.shared), (Tier.DISK, disk, directories.disk))
        if pages
    }
    others = {"low_watermark": 0.0, "high_watermark": 0.0} | others
    return StoreConfig(
        geometry=geometry,
        host=host * slot or None,
        shared=SharedTier(volumes * sizes[Tier.SHARED], str(directories.shared), volume_bytes=sizes[Tier.SHARED])
        if shared
        else None,
        disk=DiskTier(volumes * sizes[Tier.DISK], str(directories.disk), volume_bytes=sizes[Tier.DISK])
        if disk
        else None,
        **others,
    )


def tokens_of(number: int, count: int) -> Tokens:
    """Return tokens that no other number has."""
    return np.arange(count, dtype=np.int32) + number * 100_000


class Box:
    """A store of any geometry without its keeper, and rows of canonical pages beside it, each with its key's stamp.

    Invariant: what `save` writes is what `stamps` says, and `load` fails a test that is served anything else.
    """

    def __init__(self, config: StoreConfig, *, slots: int = 64, **how: Any) -> None:
        self.geometry = config.geometry
        self.store = PageStore(config, **how)
        assert self.store._keeper is not None
        self.store._keeper.stop()
        # Each layer and stream is an array of its own, whatever its size: [slot, token, head, dim] of raw elements.
        raw = {1: np.uint8, 2: np.uint16, 4: np.uint32}[self.geometry.itemsize]
        if self.geometry.is_opaque:
            self.arrays = [np.zeros((slots, self.geometry.page_bytes), np.uint8)]
        else:
            self.arrays = [
                np.zeros((slots, self.geometry.page_tokens, heads, dim), raw)
                for heads, dim in self.geometry.head_dims
                for _ in range(self.geometry.streams)
            ]
        self.pool = self.store.lend(self.arrays if len(self.arrays) > 1 else self.arrays[0])

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def stamps(self, tokens: Tokens, namespace: Namespace | None = None) -> Bytes:
        """Return the bytes that the pages of some tokens have: uint8[pages, page_bytes]."""
        seed = namespace.seed() if namespace else None
        keys = prefix_hashes(tokens, page_tokens=self.geometry.page_tokens, seed=seed)
        rows = np.empty((len(keys), self.geometry.page_bytes), np.uint8)
        for row, key in zip(rows, keys, strict=True):
            row[:] = np.random.Generator(np.random.Philox(key=key[:16].view(np.uint64))).integers(
                0, 256, row.size, dtype=np.uint8
            )
        return rows

    def write(self, rows: Bytes) -> None:
        """Put canonical pages into the first slots of the pool."""
        at = 0
        for array in self.arrays:
            nbytes = array[0].nbytes
            array[: len(rows)] = rows[:, at : at + nbytes].copy().view(array.dtype).reshape(len(rows), *array.shape[1:])
            at += nbytes

    def read(self, pages: int) -> Bytes:
        """Return the first slots of the pool as canonical pages."""
        rows = [a[:pages].view(np.uint8).reshape(pages, a[0].nbytes) for a in self.arrays]
        return np.concatenate(rows, axis=1)

    def save(self, tokens: Tokens, *, namespace: Namespace | None = None, wait: bool = True) -> SaveResult:
        """Save the whole pages of some tokens."""
        rows = self.stamps(tokens, namespace)
        self.write(rows)
        result = self.store.save(tokens, source=self.pool[: len(rows)], namespace=namespace)
        if wait:
            result.transfer.wait()
        return result

    def load(self, tokens: Tokens, *, namespace: Namespace | None = None, **how: Any) -> int:
        """Load what is cached of some tokens over foreign bytes, compare it; return how many leading pages came."""
        with self.store.match(tokens, namespace=namespace) as match:
            self.write(np.full((match.pages, self.geometry.page_bytes), 0xEE, np.uint8))
            transfer = self.store.load(match, into=self.pool[: match.pages], **how)
        assert transfer.wait(120.0)
        ok = np.flatnonzero(transfer.ok)
        assert np.array_equal(
            self.read(transfer.pages)[ok], self.stamps(tokens, namespace)[: transfer.pages][ok]
        ), "wrong bytes were served"
        return transfer.ok_pages

    def pages(self, tier: Tier) -> int:
        """Return how many pages are resident in a tier."""
        return self.store.stats().tiers[tier.name.lower()].resident

    def capacity(self, tier: Tier) -> int:
        """Return how many pages a tier has room for now."""
        return self.store.stats().tiers[tier.name.lower()].capacity

    def cached(self, tokens: Tokens, *tiers: Tier) -> int:
        """Return how many leading pages some tiers hold."""
        return self.store.cached(tokens, tiers=tiers) // self.geometry.page_tokens

    def assert_adds_up(self) -> None:
        """Free, arriving, resident, leaving and quarantined pages make up the capacity of each tier, at this moment."""
        assert self.store.check() == ""
        for name, tier in self.store.stats().tiers.items():
            parts = tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined
            assert parts == tier.capacity, (name, tier)


def bytes_of_volumes(path: Path) -> int:
    """Add up the files of the volumes in a tier directory: what counts against its capacity."""
    return sum(file.lstat().st_size for file in path.glob("[vtx]-*") if ".lmdb" not in file.name)


def child_script(directories: Directories, text: str) -> str:
    """Return a script that has `directories`, this kit and store_kit at hand."""
    return (
        f"import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom store_kit import *\nfrom case_kit import *\n"
        f"directories = Directories(Path({str(directories.shared)!r}), Path({str(directories.disk)!r}))\n{text}"
    )


def run_child(directories: Directories, text: str, *, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", child_script(directories, text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


__all__ = [
    "CASE_GEOMETRY",
    "GEOMETRY",
    "Box",
    "bytes_of_volumes",
    "child_script",
    "config_of",
    "run_child",
    "tokens_of",
    "volume_bytes_for",
]
