"""A sequence that an engine drops without close() keeps its device pages pinned until the store closes; a Match does
not.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np

from stepwell.config import DeviceTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.store import PageStore
from store_kit import Directories

GEOMETRY = PageGeometry(model="dropped", revision="1", layers=2, kv_heads=2, head_dim=8, dtype="float32", page_tokens=4)


def test_a_dropped_sequence_returns_its_pages(directories: Directories) -> None:
    shared = SharedTier("1MiB", str(directories.shared), volume_bytes=512 * 1024)
    with PageStore(StoreConfig(geometry=GEOMETRY, device=DeviceTier(pages=16), host=65536, shared=shared)) as store:
        sequence = store.open(np.arange(33, dtype=np.int32))
        assert store.extend([sequence], [32]).ok.all()
        gone = weakref.ref(sequence)
        del sequence
        gc.collect()
        store.device.drain()
        assert gone() is None
        assert store.stats().tiers["device"].free == 16
