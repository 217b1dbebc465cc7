"""A store whose tiers hold everything hits exactly what a trace repeats: one small page a block.

Traces: ../shared/traces beside the repository; the tests skip where they are not there.
"""

from __future__ import annotations

import itertools
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.store import PageStore
from store_kit import Directories

TRACES = Path(__file__).parents[2] / "shared" / "traces"
PAGE_BYTES = 64


@pytest.mark.parametrize(
    ("name", "accesses", "hits"),
    [
        ("mooncake_conversation.jsonl.xz", 288_500, 105_710),
        ("agentic_coding.jsonl.xz", 4_288_978, 4_124_869),
    ],
)
def test_an_unlimited_store_hits_what_the_trace_repeats(
    name: str, accesses: int, hits: int, directories: Directories
) -> None:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    geometry = PageGeometry.opaque(PAGE_BYTES, page_tokens=1, fingerprint={"trace": name})
    config = StoreConfig(
        geometry=geometry, shared=SharedTier(capacity="160MiB", path=str(directories.shared), volume_bytes="160MiB")
    )
    with PageStore(config) as store:
        rows = store.lend(np.zeros((4096, PAGE_BYTES), np.uint8))
        with lzma.open(path, "rt") as file:
            for line in file:
                blocks = np.array(json.loads(line)["hash_ids"], dtype=np.int32)
                with store.match(blocks) as match:
                    is_whole = match.pages == blocks.size
                if not is_whole:
                    result = store.save(blocks, source=rows[: blocks.size])
                    assert result.refused == 0
                    assert result.transfer.wait(10.0)
        stats = store.stats()
        assert stats.lookup_pages == accesses
        assert stats.hit_pages == {"shared": hits}
        assert stats.misses["absent"] == accesses - hits
        assert store.check() == ""


def test_selective_writes_put_on_disk_what_a_trace_uses_twice(directories: Directories) -> None:
    path = TRACES / "mooncake_conversation.jsonl.xz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    geometry = PageGeometry.opaque(PAGE_BYTES, page_tokens=1, fingerprint={"trace": path.name})
    config = StoreConfig(
        geometry=geometry,
        shared=SharedTier("1MiB", str(directories.shared), volume_bytes="1MiB"),  # about a tenth of what comes
        disk=DiskTier("64MiB", str(directories.disk), volume_bytes="64MiB", write="selective"),
    )
    uses: Counter[int] = Counter()
    with PageStore(config) as store:
        rows = store.lend(np.zeros((4096, PAGE_BYTES), np.uint8))
        with lzma.open(path, "rt") as file:
            for line in itertools.islice(file, 1500):
                blocks = np.array(json.loads(line)["hash_ids"], dtype=np.int32)
                uses.update(blocks.tolist())
                with store.match(blocks) as match:
                    is_whole = match.pages == blocks.size
                if not is_whole:
                    assert store.save(blocks, source=rows[: blocks.size]).refused == 0
                assert store.flush(10.0)
        stats = store.stats()
        written = stats.tiers["disk"].bytes_written // PAGE_BYTES
        used_twice = sum(count > 1 for count in uses.values())
        assert 0.98 * used_twice <= written <= used_twice < len(uses) / 2
        assert stats.evicted_pages["shared"] > stats.tiers["shared"].capacity
        assert stats.hit_pages["disk"] > 0
        assert store.check() == ""
