"""What the tests of the store share: small pages whose bytes follow from their key, a store with a pool beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.clock import Clock
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import Tier
from stepwell.mover import SaveResult, Transfer
from stepwell.store import PageStore

PAGE_TOKENS = 4
GEOMETRY = PageGeometry(
    model="stamped", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=PAGE_TOKENS
)
PAGE_BYTES = GEOMETRY.page_bytes
VOLUME_BYTES = 256 * 1024
BOTH = {"shared": VOLUME_BYTES, "disk": VOLUME_BYTES}
SHARED_ONLY = {"shared": VOLUME_BYTES, "disk": 0}
DISK_ONLY = {"shared": 0, "disk": VOLUME_BYTES}
AXES = "slot layer stream token head dim"

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Directories:
    """A tier directory in memory and one on disk; neither exists yet."""

    shared: Path
    disk: Path

    def names(self) -> list[str]:
        return sorted(p.name for d in (self.shared, self.disk) if d.exists() for p in d.iterdir())

    def volumes(self, suffix: str) -> list[Path]:
        return sorted(p for d in (self.shared, self.disk) if d.exists() for p in d.glob(f"v-*.{suffix}"))

    def config(
        self, *, host: int = 0, shared: int = 4 * VOLUME_BYTES, disk: int = 4 * VOLUME_BYTES, **others: Any
    ) -> StoreConfig:
        """Configure the tiers that have a capacity."""
        return StoreConfig(
            geometry=GEOMETRY,
            host=host or None,
            shared=SharedTier(shared, str(self.shared), volume_bytes=VOLUME_BYTES) if shared else None,
            disk=DiskTier(disk, str(self.disk), volume_bytes=VOLUME_BYTES) if disk else None,
            **others,
        )


def chain(number: int, pages: int, *, tail: int = 0) -> Tokens:
    """Return the tokens of a chain of its own: no two numbers share a page."""
    return np.arange(pages * PAGE_TOKENS + tail, dtype=np.int32) + number * 100_000


def stamps_of(keys: npt.NDArray[np.uint8]) -> Bytes:
    """Return the bytes that the pages of some keys have: uint8[n, PAGE_BYTES]."""
    rows = np.empty((len(keys), PAGE_BYTES), np.uint8)
    for row, key in zip(rows, keys, strict=True):
        words = np.frombuffer(key.tobytes().ljust(16, b"\0")[:16], np.uint64)
        row[:] = np.frombuffer(np.random.Philox(key=words).random_raw(PAGE_BYTES // 8).tobytes(), np.uint8)
    return rows


def stamps(tokens: Tokens, namespace: Namespace | None = None, seed: bytes | None = None) -> Bytes:
    """Return the bytes that the pages of some tokens have."""
    return stamps_of(prefix_hashes(tokens, page_tokens=PAGE_TOKENS, seed=namespace.seed() if namespace else seed))


class Rig:
    """A store and a pool of the caller's beside it.

    Invariant: what `save` writes is what `stamps` says, and `load` fails a test that is served anything else.
    The keeper's thread is ended unless `keeper` is given: then its rounds come only from `round`.
    """

    def __init__(
        self, config: StoreConfig, *, slots: int = 256, clock: Clock | None = None, keeper: bool = False
    ) -> None:
        self.rows = np.zeros((slots, PAGE_BYTES), np.uint8)
        self.store = PageStore(config, clock=clock)
        if not keeper:
            assert self.store._keeper is not None
            self.store._keeper.stop()
        shape = (slots, GEOMETRY.layers, 2, PAGE_TOKENS, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.pool = self.store.lend(self.rows.reshape(shape), axes=AXES)

    def save(self, tokens: Tokens, *, namespace: Namespace | None = None, wait: bool = True) -> SaveResult:
        """Save the whole pages of some tokens."""
        pages = tokens.size // PAGE_TOKENS
        self.rows[:pages] = stamps(tokens, namespace)
        result = self.store.save(tokens, source=self.pool[:pages], namespace=namespace)
        if wait:
            result.transfer.wait()
        return result

    def start_load(self, tokens: Tokens, *, namespace: Namespace | None = None, **how: Any) -> Transfer:
        """Begin to load what is cached of some tokens into the first slots, over bytes that are no page's."""
        with self.store.match(tokens, namespace=namespace) as match:
            self.rows[: match.pages] = 0xEE
            return self.store.load(match, into=self.pool[: match.pages], **how)

    def load(self, tokens: Tokens, *, namespace: Namespace | None = None, **how: Any) -> int:
        """Load what is cached of some tokens, compare it, and return how many pages of the prefix came."""
        transfer = self.start_load(tokens, namespace=namespace, **how)
        assert transfer.wait()
        ok = np.flatnonzero(transfer.ok)
        assert np.array_equal(self.rows[ok], stamps(tokens, namespace)[ok]), "wrong bytes were served"
        return transfer.ok_pages

    def round(self) -> None:
        """Do one round of the keeper's, here and now."""
        self.store._tick()

    def pages(self, tier: Tier) -> int:
        """Return how many pages are resident in a tier."""
        return self.store.stats().tiers[tier.name.lower()].resident

    def close(self) -> None:
        """Close the store."""
        self.store.close()


OpenRig = Callable[..., Rig]
"""The fixture of conftest.py."""


def assert_whole(store: PageStore) -> None:
    """Check that the capacity of each tier adds up, that nothing is under way or pinned, and that the index agrees."""
    assert store.flush(timeout=30.0)
    assert store.check() == ""
    for name, tier in store.stats().tiers.items():
        parts = tier.free + tier.arriving + tier.resident + tier.leaving + tier.quarantined
        assert parts == tier.capacity, f"{name}: {tier}"
        assert tier.arriving == 0, f"{name}: {tier}"
        assert tier.leaving == 0, f"{name}: {tier}"


def assert_unpinned(store: PageStore) -> None:
    """Check that no lease and no transfer holds anything."""
    stats = store.stats()
    assert stats.leases == 0
    assert {name: tier.pinned for name, tier in stats.tiers.items()} == dict.fromkeys(stats.tiers, 0)
