"""Cases of kind 11 in docs/cases.md: memory and descriptors that grow, and space that is used twice."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

from case_kit import Box, bytes_of_volumes, config_of, tokens_of
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.mover import Transfer
from stepwell.testing.faults import inject, wait_paused
from store_kit import VOLUME_BYTES, Directories, OpenRig, chain


def resident_bytes() -> int:
    """Return what of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow_with_what_comes_and_goes(directories: Directories) -> None:
    """C077, sgl-project/sglang#19332: records kept views of large lists, and with them every list there ever was.

    P = 64; 2,000 prompts of 16 pages through a tier of 64: 32,000 pages come and go, 500 times what fits.
    """
    geometry = PageGeometry(
        model="long", revision="1", layers=1, kv_heads=1, head_dim=1, dtype="uint8", page_tokens=64
    )
    with Box(config_of(directories, geometry, host=64)) as box:
        source = box.pool[:16]

        def cycle(first: int, count: int) -> None:
            for number in range(first, first + count):
                tokens = tokens_of(number % 20_000, 1024)
                box.store.save(tokens, source=source).transfer.wait()
                box.store.match(tokens).close()
                if number % 64 == 0:
                    box.store._tick()

        cycle(0, 500)
        before, stats = resident_bytes(), box.store.stats()
        tracemalloc.start()
        try:
            cycle(500, 100)
            traced, _ = tracemalloc.get_traced_memory()
            cycle(600, 200)
            again, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert again - traced < 64 << 10
        cycle(800, 1200)
        after = box.store.stats()
        assert (after.page_records, after.tree_edges) == (stats.page_records, stats.tree_edges)
        assert after.tiers["host"].resident == 64
        assert (after.leases, after.queued) == (0, 0)
        assert resident_bytes() - before < 5 << 20


def test_readers_of_what_has_left_keep_no_space_on_the_disk(open_rig: OpenRig, directories: Directories) -> None:
    """C078, redpanda-data/redpanda#3334: files were removed while readers had them open, and the disk was full of them.

    Nothing is unlinked to evict: a slot is used again once nobody reads it. 16 readers stand while the cap is written
    three times over.
    """
    cap = 2 * VOLUME_BYTES
    rig = open_rig(shared=0, disk=cap, low_watermark=0.0)
    rig.save(chain(1, 16))
    files, descriptors = len(directories.names()), len(os.listdir("/proc/self/fd"))
    readers: list[Transfer] = []
    with inject("mover.unit", "pause"):
        for each in range(1, 17):
            with rig.store.match(chain(1, each)) as match:
                readers.append(rig.store.load(match, into=rig.pool[:each]))
        wait_paused("mover.unit")
        assert rig.store.evict(Tier.DISK, 1 << 20) == 0
        assert bytes_of_volumes(directories.disk) <= cap
    for reader in readers:
        assert reader.wait(120.0)
    for number in range(100, 100 + 3 * cap // (8 * 1024)):
        assert rig.save(chain(number, 8)).refused == 0
        assert bytes_of_volumes(directories.disk) <= cap
    assert len(directories.names()) == files
    assert len(os.listdir("/proc/self/fd")) == descriptors
