"""Cases of kind 1 in docs/cases.md: wrong bytes served as if they were the right ones."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from case_kit import Box, bad_read, config_of, tokens_of
from sequence_kit import PAGE_TOKENS, StampEngine, evict_all, prompt
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.testing.faults import inject
from store_kit import DISK_ONLY, PAGE_BYTES, VOLUME_BYTES, Directories, OpenRig, chain, stamps

MakeEngine = Callable[..., StampEngine]


@pytest.mark.parametrize("bad", [0, 2])
def test_a_failed_read_cuts_the_hit_and_its_page_is_never_a_foreign_one(open_rig: OpenRig, bad: int) -> None:
    """C001, ai-dynamo/dynamo#15079: a transfer that failed was completed as if it had loaded."""
    rig = open_rig(**DISK_ONLY, io_threads=1)
    rig.save(chain(1, 4))
    with rig.store.match(chain(1, 4)) as match:
        rig.rows[:4] = stamps(chain(9, 4))  # another request's pages are where these are to land
        with bad_read(bad):
            transfer = rig.store.load(match, into=rig.pool[:4])
            assert transfer.wait(120.0)
    assert transfer.ok_pages == bad
    assert np.flatnonzero(~transfer.ok).tolist() == [bad]
    assert np.array_equal(rig.rows[:4][transfer.ok], stamps(chain(1, 4))[transfer.ok])
    stats = rig.store.stats()
    assert (stats.io_errors, stats.misses["corrupt"]) == (2, 1)  # the read of all, and the page's own
    assert rig.store.cached(chain(1, 4), tiers=(Tier.DISK,)) == bad * 4
    rig.round()
    assert rig.store.stats().tiers["disk"].free == stats.tiers["disk"].free + 1


@pytest.mark.parametrize("bad", [0, 2])
def test_a_sequence_never_sees_the_slot_of_a_page_that_failed_to_load(make_engine: MakeEngine, bad: int) -> None:
    """C001, ai-dynamo/dynamo#15079: the same through the device tier, whose slots hold other requests' pages."""
    engine = make_engine(device=8, shared=0, disk=1, io_threads=1)
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    engine.cache(prompt(2, 31))  # in every slot of the device
    evict_all(engine.store, Tier.DEVICE, Tier.HOST)
    with bad_read(bad):
        sequence = engine.open(prompt(1, 17))
        engine.settle(sequence)
    assert sequence.ready == bad * PAGE_TOKENS
    engine.verify(sequence)
    engine.finish(sequence)
    engine.verify(sequence, 17)


@jax.jit
def slow_zero(x: jax.Array) -> jax.Array:
    """Return 0, which nobody knows before some milliseconds of computing."""
    for _ in range(6):
        x = jnp.tanh(x @ x)
    return x[0, 0] * 0


def test_a_backup_follows_the_computation_of_its_pages(make_engine: MakeEngine) -> None:
    """C002, vllm-project/vllm#45704: pages were copied out before the kernel that writes them had run.

    30 rounds; published while the program that writes the pages still runs.
    """
    engine = make_engine(device=128)
    store = engine.store
    seed = jnp.zeros((256, 256), jnp.float32)
    late = 0
    for number in range(30):
        tokens = prompt(number + 1, 9)
        sequence = engine.open(tokens)
        assert store.extend([sequence], [9]).ok.all()
        zero = slow_zero(seed)
        with store.device.step() as pool:
            pool.arrays = tuple(array + zero for array in pool.arrays)
        engine.compute({sequence: 9})
        store.publish([sequence], [9])
        store.device.drain()
        late += not zero.is_ready()
        sequence.close()
    assert late, "no backup overtook its computation: make slow_zero() slower"
    assert store.flush(120.0)
    evict_all(store, Tier.DEVICE, Tier.HOST)
    for number in range(30):
        sequence = engine.open(prompt(number + 1, 9))
        engine.settle(sequence)
        assert sequence.ready == 8
        engine.verify(sequence)
        sequence.close()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "another thread"])
def test_an_array_of_jax_is_saved_as_it_is_once_computed(open_rig: OpenRig, elsewhere: bool) -> None:
    """C002, vllm-project/vllm#45704: 60 rounds of a save of an array whose program was dispatched a moment before."""
    rig = open_rig(shared=VOLUME_BYTES, disk=0)

    @jax.jit
    def compute(x: jax.Array, salt: jax.Array) -> jax.Array:
        return (jnp.sin(x + salt) * 1e6).astype(jnp.int32).astype(jnp.uint8)

    given = jax.random.normal(jax.random.key(0), (4, 2, 2, 4, 2, 32), jnp.float32)
    seed, late = jnp.zeros((256, 256), jnp.float32), 0
    for number in range(60):
        array = compute(given, slow_zero(seed) + number)
        late += not array.is_ready()

        def back_up(number: int = number, array: Any = array) -> None:
            source = rig.store.lend(array, axes="slot layer stream token head dim")[:4]
            rig.store.save(chain(number, 4), source=source).transfer.wait()

        if elsewhere:
            thread = threading.Thread(target=back_up)
            thread.start()
            thread.join()
        else:
            back_up()
        with rig.store.match(chain(number, 4)) as match:
            assert rig.store.load(match, into=rig.pool[:4]).result(120.0) == 4
        assert np.array_equal(rig.rows[:4], np.asarray(array).reshape(4, PAGE_BYTES)), number
    assert late, "no save overtook its computation: make slow_zero() slower"


@pytest.mark.parametrize("short", [PAGE_BYTES - 1, PAGE_BYTES // 2, 0])
def test_a_read_that_comes_back_short_is_finished_or_a_miss(open_rig: OpenRig, short: int) -> None:
    """C004, kvcache-ai/Mooncake#3066: a short read was taken for the whole page."""
    rig = open_rig(**DISK_ONLY, io_threads=1)
    rig.save(chain(1, 4))
    with bad_read(1, "short", short):
        ok = rig.load(chain(1, 4))  # compares what came
    # What direct I/O cannot go on from (an odd offset, where the file system minds) is a miss.
    assert ok in {PAGE_BYTES // 2: (4,), PAGE_BYTES - 1: (1, 4), 0: (1,)}[short]
    rig.load(chain(1, 4))


def test_a_batch_is_not_completed_by_what_is_left_of_a_failed_one(open_rig: OpenRig, directories: Directories) -> None:
    """C004, kvcache-ai/Mooncake#3066: completions of a batch that had failed were taken for the next one's."""
    rig = open_rig(**DISK_ONLY)
    other = np.full((8, PAGE_BYTES), 0xEE, np.uint8)
    pool = rig.store.lend(other.reshape(8, 2, 2, 4, 2, 32), axes="slot layer stream token head dim")
    rig.save(chain(1, 8))
    rig.save(chain(2, 8))
    (file,) = directories.volumes("pages")
    os.truncate(file, len(file.read_bytes().rstrip(b"\0")) - 1)  # one of the pages is not there to its end
    with rig.store.match(chain(2, 8)) as match:
        failing = rig.start_load(chain(1, 8))
        following = rig.store.load(match, into=pool[:])
        assert failing.wait(120.0)
        assert following.wait(120.0)
    assert int((~failing.ok).sum()) + int((~following.ok).sum()) == 1
    assert np.array_equal(rig.rows[:8][failing.ok], stamps(chain(1, 8))[failing.ok])
    assert np.array_equal(other[following.ok], stamps(chain(2, 8))[following.ok])


UNEVEN = PageGeometry(
    model="uneven", revision="1", layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4,
    layer_head_dims=((2, 8), (2, 16), (1, 8)),
)  # fmt: skip


@pytest.mark.parametrize("sizes", [{"host": 16}, {"shared": 16}, {"disk": 16}], ids=lambda sizes: next(iter(sizes)))
@pytest.mark.parametrize("order", ["page", "layer"])
def test_each_layer_has_a_stride_and_a_size_of_its_own(
    directories: Directories, sizes: dict[str, int], order: str
) -> None:
    """C006, google/tpu-sync commit 5a08315: all layers were addressed with the stride of the first.

    Layers of 256, 512 and 128 bytes; on the device: tests/test_device_layers.py.
    """
    assert UNEVEN.layer_bytes == (256, 512, 128)
    assert UNEVEN.page_bytes == 896
    with Box(config_of(directories, UNEVEN, **sizes)) as box:
        box.save(tokens_of(1, 64))
        assert box.load(tokens_of(1, 64), order=order) == 16


@pytest.mark.parametrize("failing", [False, True], ids=["", "one write in ten fails"])
def test_what_a_match_names_is_delivered_whole(directories: Directories, failing: bool) -> None:
    """C007, kvcache-ai/Mooncake#3465: keys were reported as present on SSD, and their values came back empty."""
    config = config_of(directories, shared=8, disk=64)
    with Box(config) as box:
        for number in range(10):
            if failing:
                of_run = 1 + number % 8
                of_page = of_run + 1 + 6 * (number % 4)  # six or seven for each page
                with (
                    inject("file.pwrite", "errno", nth=of_run, value=errno.EIO),
                    inject("file.pwrite", "errno", nth=of_page, value=errno.EIO),
                ):
                    box.save(tokens_of(number, 16))
            else:
                box.save(tokens_of(number, 16))
        assert box.store.flush(120.0)
        reported = delivered = 0
        for number in range(10):
            with box.store.match(tokens_of(number, 16)) as match:
                reported += match.pages
            delivered += box.load(tokens_of(number, 16))
        assert (reported, delivered) == (delivered, reported)
        assert reported == 40 or (failing and 0 < reported < 40)


def test_a_save_that_gave_up_binds_its_key_to_no_slot(make_engine: MakeEngine) -> None:
    """C009, google/tpu-sync commit 60bb6a6: a key stayed bound to a device slot that was another's by then."""
    engine = make_engine(device=8, host=4, shared=0)
    store = engine.store
    engine.cache(prompt(9, 17))  # host memory is full,
    blockers = store.match(prompt(9, 17))
    assert blockers.pages == 4  # and all of it pinned
    evict_all(store, Tier.DEVICE)
    engine.cache(prompt(1, 5))  # its write-through gives up
    assert store.cached(prompt(1, 5), tiers=(Tier.HOST,)) == 0
    evict_all(store, Tier.DEVICE)
    engine.cache(prompt(2, 32))  # in every slot of the device, the first one's too
    evict_all(store, Tier.DEVICE)
    again = engine.serve(prompt(1, 5))
    blockers.close()
    store.evict(Tier.HOST, 4)
    again.suspend()
    again.resume()
    engine.settle(again)
    again.close()
    evict_all(store, Tier.DEVICE)
    engine.cache(prompt(1, 5))
    evict_all(store, Tier.DEVICE)
    found = engine.open(prompt(1, 9))
    engine.settle(found)
    assert found.ready == 4
    engine.verify(found)
