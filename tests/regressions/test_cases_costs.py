"""Cases of kind 12 in docs/cases.md: cliffs of speed, told by what is done and not by a clock."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from case_kit import Box, config_of, tokens_of
from sequence_kit import GatherGate, StampEngine, evict_all, prompt
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.mover import Transfer
from stepwell.testing.faults import inject, reached, wait_paused
from store_kit import VOLUME_BYTES, Directories, OpenRig, assert_unpinned, assert_whole, chain

MakeEngine = Callable[..., StampEngine]


def test_many_pages_are_few_files_and_a_lookup_asks_none(directories: Directories) -> None:
    """C081, kvcache-ai/Mooncake#971: a file for each object. 2,048 pages of 4 KiB; speeds: benchmarks/."""
    geometry = PageGeometry.opaque(4096, page_tokens=1, fingerprint={"of": "cases"})
    with Box(config_of(directories, geometry, disk=2048), slots=512) as box:
        box.store._tick()
        with inject("file.*", "count"):
            for number in range(4):
                assert box.save(tokens_of(number, 512)).saved == 512
            assert reached("file.pwrite") > 0
            assert box.store.stats().tiers["disk"].bytes_written == 2048 * 4096
            for name in ("open", "close", "rename", "unlink", "mkdir", "stat", "list"):
                assert reached(f"file.{name}") == 0, name
        files = [path for path in directories.disk.rglob("*") if path.is_file()]
        assert len(files) < 20
        with inject("file.*", "count"):
            with box.store.match(tokens_of(0, 512)) as match:
                assert match.pages == 512
            assert reached("file.*") == 0


def test_a_miss_costs_one_look_into_the_index(open_rig: OpenRig) -> None:
    """C082, sgl-project/sglang#31398: a lookup that found nothing in storage had waited and allocated for it first."""
    rig = open_rig(host=64 * 4096, shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    rig.save(chain(1, 8))
    before = rig.store.stats()
    threads = threading.active_count()
    with inject("*", "count"):
        for number in range(1000):
            with rig.store.match(chain(10 + number, 256)) as match:
                assert match.pages == 0
        assert reached("*") == 0  # no system call, no unit of the mover's
    after = rig.store.stats()
    assert (after.transfers, after.tiers, after.page_records, after.tree_edges) == (
        before.transfers, before.tiers, before.page_records, before.tree_edges,
    )  # fmt: skip
    assert after.misses["absent"] - before.misses["absent"] == 256_000
    assert threading.active_count() == threads


def test_a_submission_never_waits_for_room_in_a_queue(open_rig: OpenRig) -> None:
    """C084, vllm-project/vllm#29013: the 1,001st copy waited for the first. 5,000 loads and the workers stand."""
    rig = open_rig(shared=VOLUME_BYTES, disk=0, queue_units=1024)
    rig.save(chain(1, 1))
    transfers: list[Transfer] = []
    with inject("mover.unit", "pause"):
        with rig.store.match(chain(1, 1)) as match:
            for _ in range(5000):
                transfers.append(rig.store.load(match, into=rig.pool[:1]))
        wait_paused("mover.unit")
        busy = [transfer for transfer in transfers if transfer.done]
        assert len(busy) >= 5000 - 1024 - 3
        assert all(transfer.ok_pages == 0 for transfer in busy)
        assert len(transfers) - len(busy) >= 1024
    assert rig.store.flush(120.0)
    assert rig.store.stats().misses["full"] == len(busy)
    assert_whole(rig.store)
    assert_unpinned(rig.store)


def pages_in_page_cache(path: Path) -> int:
    """Return how many pages of a file the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        result = libc.mincore(ctypes.addressof(first), size, found)
        del first
    assert result == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in found.raw)


def test_pages_on_disk_are_not_kept_in_the_page_cache_too(open_rig: OpenRig, directories: Directories) -> None:
    """C086, sgl-project/sglang#21880: cached file pages count against the container's memory, and reclaim took 5 s."""
    rig = open_rig(shared=0, disk=VOLUME_BYTES)
    [member] = rig.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
    if not member.held.direct_io:
        pytest.skip("this file system has no direct I/O")
    [path] = directories.volumes("pages")
    for number in range(8):
        rig.save(chain(number, 8))
        assert rig.load(chain(number, 8)) == 8
    assert pages_in_page_cache(path) == 0
    path.read_bytes()
    assert pages_in_page_cache(path) > 0  # who does read it through the cache is seen


def test_a_backup_is_begun_while_its_pages_are_computed(make_engine: MakeEngine) -> None:
    """C087, sgl-project/sglang-jax#1411: the scheduler's thread waited for the device to gather what it backed up."""
    engine = make_engine(device=16)
    store = engine.store
    @jax.jit
    def long(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x), x)[0, 0] * 0

    seed = jnp.zeros((192, 192), jnp.float32)
    long(seed).block_until_ready()
    gate = GatherGate.of(store)  # nobody may wait for a result before we say so
    sequence = engine.open(prompt(1, 9))
    assert store.extend([sequence], [9]).ok.all()
    zero = long(seed)
    with store.device.step() as pool:
        pool.arrays = tuple(array + zero for array in pool.arrays)
    engine.compute({sequence: 9})
    assert store.publish([sequence], [9]) == (2, 0)
    store.device.drain()
    assert store.stats().tiers["shared"].resident == 0
    sequence.close()
    gate.open()
    assert store.flush(120.0)
    evict_all(store, Tier.DEVICE, Tier.HOST)
    again = engine.open(prompt(1, 9))
    engine.settle(again)
    assert again.ready == 8
    engine.verify(again)
    assert np.isfinite(engine.read([0])).all()
