"""The store against a model in a dict: whatever is saved, evicted, forgotten, closed, opened again, the two agree."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.config import StoreConfig
from stepwell.hashing import Namespace, prefix_hashes
from stepwell.index import Tier
from stepwell.lease import Match
from stepwell.pins import Pinned
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, Rig, assert_whole

NAMESPACES = (None, Namespace(adapter="a"), Namespace(salt="a"))

# A chain is a path in a tree of three branches and five levels: prefixes are shared, and part.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)
namespaces = st.sampled_from(NAMESPACES)


def tokens_of(path: list[int]) -> np.ndarray:
    return np.concatenate([np.arange(PAGE_TOKENS, dtype=np.int32) + 10 * branch for branch in path])


class StoreMachine(RuleBasedStateMachine):
    """Invariant: `here` holds (epoch, key) of every page on disk, which is large enough to lose none by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
        self.directories = Directories(self.parent / "shared", self.parent / "disk")
        self.here: set[tuple[int, bytes]] = set()
        self.epoch = 0
        self.leases: list[Match] = []
        self.pins: list[tuple[Pinned, set[tuple[int, bytes]]]] = []

    @initialize(host=st.booleans(), shared=st.booleans())
    def begin(self, host: bool, shared: bool) -> None:
        """Open the first store; which tiers stand above the disk is the machine's choice."""
        self.sizes = {"host": 8 * 4096 if host else 0, "shared": VOLUME_BYTES if shared else 0}
        self.reopen()

    def config(self) -> StoreConfig:
        return self.directories.config(**self.sizes, disk=4 * VOLUME_BYTES, epoch=self.epoch)

    def keys(self, path: list[int], namespace: Namespace | None) -> list[tuple[int, bytes]]:
        seed = namespace.seed() if namespace else None
        hashes = prefix_hashes(tokens_of(path), page_tokens=PAGE_TOKENS, seed=seed)
        return [(self.epoch, key.tobytes()) for key in hashes]

    def expected(self, path: list[int], namespace: Namespace | None) -> int:
        missing = [key not in self.here for key in self.keys(path, namespace)]
        return missing.index(True) if any(missing) else len(missing)

    @rule(path=paths, namespace=namespaces)
    def save(self, path: list[int], namespace: Namespace | None) -> None:
        """Every page that was not there is saved, and all are then on disk."""
        keys = self.keys(path, namespace)
        result = self.rig.save(tokens_of(path), namespace=namespace)
        assert result.refused == 0
        assert result.saved + result.present == len(keys)
        assert result.saved >= sum(key not in self.here for key in keys)
        assert result.transfer.ok.all()
        self.here.update(keys)

    @rule(path=paths, namespace=namespaces, order=st.sampled_from(["page", "layer"]))
    def load(self, path: list[int], namespace: Namespace | None, order: str) -> None:
        """Exactly the prefix that is there comes, and it is right."""
        assert self.rig.load(tokens_of(path), namespace=namespace, order=order) == self.expected(path, namespace)

    @rule(path=paths, namespace=namespaces)
    def hold(self, path: list[int], namespace: Namespace | None) -> None:
        """A match finds the prefix too, and may be held."""
        match = self.rig.store.match(tokens_of(path), namespace=namespace)
        assert match.pages == self.expected(path, namespace)
        self.leases.append(match)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        self.leases.pop(which % len(self.leases)).close()

    @rule(path=paths, namespace=namespaces)
    def pin(self, path: list[int], namespace: Namespace | None) -> None:
        """A pin covers the prefix that is there; what is saved behind it later is not pinned."""
        pin = self.rig.store.pin(tokens_of(path), ttl=3600.0, namespace=namespace)
        covered = self.keys(path, namespace)[: self.expected(path, namespace)]
        if pin.full is None:
            assert (pin.tokens, pin.pending) == (len(covered) * PAGE_TOKENS, 0)
            self.pins.append((pin, set(covered)))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 100))
    def unpin(self, which: int) -> None:
        self.pins.pop(which % len(self.pins))[0].close()

    def pinned(self) -> set[tuple[int, bytes]]:
        return set().union(*(covered for _, covered in self.pins))

    @rule(pages=st.integers(0, 20), tier=st.sampled_from([Tier.HOST, Tier.SHARED]))
    def evict(self, pages: int, tier: Tier) -> None:
        """What leaves the tiers above is still on disk."""
        assert self.rig.store.evict(tier, pages) <= pages

    @precondition(lambda self: not self.leases)
    @rule(path=paths, namespace=namespaces, keep=st.integers(0, 3))
    def forget(self, path: list[int], namespace: Namespace | None, keep: int) -> None:
        """The named pages past `keep` go from every tier, but for pinned ones; a chain through them ends at the gap."""
        self.rig.store.flush()
        self.rig.store.forget(tokens_of(path), namespace=namespace, keep=keep * PAGE_TOKENS)
        self.here.difference_update(set(self.keys(path, namespace)[keep:]) - self.pinned())

    @precondition(lambda self: not self.leases)
    @rule()
    def clear(self) -> None:
        self.rig.store.flush()
        self.rig.store.clear()
        self.here &= self.pinned()

    @rule(epoch=st.integers(0, 2))
    def set_epoch(self, epoch: int) -> None:
        """Pages of another epoch are misses; those of an epoch that comes back are there again."""
        self.rig.store.flush()
        self.rig.store.set_epoch(epoch)
        if epoch != self.epoch:
            assert all(pin.closed for pin, _ in self.pins)
            self.pins.clear()
        self.epoch = epoch

    @rule()
    def round(self) -> None:
        self.rig.round()

    @rule()
    def reopen(self) -> None:
        """What is on disk under this epoch survives; what is of others is freed."""
        self.let_all_go()
        if hasattr(self, "rig"):
            self.rig.close()
        self.pins.clear()
        self.rig = Rig(self.config(), slots=8)
        self.here = {page for page in self.here if page[0] == self.epoch}

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "rig"):
            assert_whole(self.rig.store)
            assert self.rig.pages(Tier.DISK) == len(self.here)
            assert self.rig.store.stats().checksum_failures == 0
            assert self.rig.store.stats().pinned_pages == len(self.pinned())
            assert all(pin.kept == len(covered) * PAGE_TOKENS for pin, covered in self.pins)

    def let_all_go(self) -> None:
        for match in self.leases:
            match.close()
        self.leases.clear()

    def teardown(self) -> None:
        self.let_all_go()
        if hasattr(self, "rig"):
            self.rig.close()
        shutil.rmtree(self.parent)


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None, print_blob=True
)


@pytest.mark.usefixtures("no_leaks")
class TestStoreAgainstItsModel(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """Found bugs print the steps that lead to them."""
