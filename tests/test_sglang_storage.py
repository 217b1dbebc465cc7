"""The SGLang backend, on stand-ins of torch and SGLang: what its calls answer, and which bytes it moves.

Lines are those of SGLang 0.5.23.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sglang_pool_standin as standin
from sglang_pool_standin import (
    LAYOUTS,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PageOnlyPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StatePool,
    Tensor,
)
from stepwell import StepwellUsageError, Tier
from stepwell.adapters.sglang.bound import LastTimeout
from stepwell.errors import StoreClosedError
from stepwell.testing.faults import inject, wait_paused
from store_kit import Directories

BACKEND = {"backend_name": "stepwell", "module_path": "stepwell.adapters.sglang", "class_name": "StepwellStorage"}
Open = Callable[..., Any]


def hashes(count: int, chain: str = "a") -> list[str]:
    return [hashlib.sha256(f"{chain}{page}".encode()).hexdigest() for page in range(count)]


def pages_of(pool: Any, *pages: int) -> Tensor:
    size = pool.page_size
    return Tensor(np.concatenate([np.arange(page * size, (page + 1) * size) for page in pages]))


def fill(pool: Any, seed: int = 1) -> None:
    pool.kv_buffer.array.view(np.uint8)[...] = np.random.default_rng(seed).integers(
        0, 256, pool.kv_buffer.array.view(np.uint8).shape, np.uint8
    )


@pytest.fixture
def adapter() -> Iterator[Any]:
    with standin.installed() as module:
        yield module


@pytest.fixture
def open_storage(
    adapter: Any, directories: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """Open backends on the same directories; a restart is one more. Weights are files, and never change."""
    from stepwell.adapters.sglang.checkpoint import WeightsSource
    from stepwell.adapters.sglang.identity import EngineConfig

    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    engine = EngineConfig(weights=WeightsSource(path=str(checkpoint)), model_config={"layers": 3})
    engines = {"of": engine}
    monkeypatch.setattr(EngineConfig, "of_process", classmethod(lambda cls: engines["of"]))
    opened = []

    def open_one(*pools: Any, config: dict[str, Any] | None = None, tiers: str = "shared disk", **settings: Any) -> Any:
        given: dict[str, Any] = {"weights_static": True, "weights_id": "w", **settings}
        if "shared" in tiers:
            given.setdefault("shared", {"path": str(directories.shared), "capacity": "4MiB", "volume_bytes": "256KiB"})
        if "disk" in tiers:
            given.setdefault("disk", {"path": str(directories.disk), "capacity": "4MiB", "volume_bytes": "256KiB"})
        extra = {**BACKEND, "interface_v1": 1, "stepwell": given}
        storage = adapter.StepwellStorage(HiCacheStorageConfig(extra_config=extra, **(config or {})), {})
        opened.append(storage)
        storage.register_mem_pool_host(pools[0])
        storage.register_mem_host_pool_v2(pools[0], PoolName.KV)
        for name, pool in zip((PoolName.MAMBA, PoolName.SWA), pools[1:], strict=False):
            storage.register_mem_host_pool_v2(pool, name)
        storage.on_host_pools_registered()
        return storage

    yield open_one
    for storage in opened:
        storage.close()


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "'stepwell' is None"),
        ({"stepwell": {}}, "'stepwell' is {}"),
        ({"stepwel": {"host": "1MiB"}}, "'stepwel' is no key of it; did you mean stepwell"),
        ({"stepwell": {"shard": {}}}, "stepwell.shard names no setting; did you mean shared"),
        ({"stepwell": {"host": "1MiB", "leese": 1}}, "stepwell.leese names no setting; did you mean lease"),
        ({"stepwell": {"geometry": {}}}, "stepwell.geometry: SGLang says that itself"),
        ({"stepwell": {"lease": 1.0}}, "names no tier"),
        ({"stepwell": {"host": "1MiB", "lease": 0}}, "stepwell.lease is 0"),
        ({"stepwell": {"host": "1MiB", "weights_id": ""}}, "stepwell.weights_id is empty"),
        ({"stepwell": {"host": "1MiB", "load_bound": -1}}, "stepwell.load_bound is -1"),
        ({"stepwell": {"host": "1MiB", "load_bound": "sometimes"}}, "Invalid enum value 'sometimes'"),
        ({"stepwell": {"host": "1MiB", "weights_static": "yes"}}, "Expected `bool`"),
    ],
)
def test_what_the_extra_config_must_not_hold_is_refused_with_its_name(
    adapter: Any, extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(StepwellUsageError) as raised:
        adapter.read_settings({**BACKEND, **extra})
    assert said in str(raised.value)


def test_what_sglang_reads_of_a_file_is_what_it_reads_inline(adapter: Any) -> None:
    """SGLang reads @file.json, .toml and .yaml itself (hybrid_cache_controller.py:382-402): the backend sees a dict."""
    table = {"stepwell": {"shared": {"capacity": "8GiB"}, "disk": {"path": "/x", "capacity": "20GiB"}}}
    assert adapter.read_settings(table) == adapter.read_settings(json.loads(json.dumps(table)))


def test_a_wrong_setting_of_a_tier_is_named(open_storage: Open) -> None:
    with pytest.raises(StepwellUsageError, match="shared.capacity"):
        open_storage(MHATokenToKVPoolHost("page_first"), shared={"capacity": "many"})


def test_a_persistent_tier_wants_the_weights_watched_or_a_word_that_they_are_static(open_storage: Open) -> None:
    with pytest.raises(StepwellUsageError, match="weights_static"):
        open_storage(MHATokenToKVPoolHost("page_first"), weights_static=False)
    open_storage(MHATokenToKVPoolHost("page_first"), tiers="none", host="1MiB", weights_static=False)


# ---- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_bit_exact_to_other_slots(open_storage: Open, layout: str, page_size: int) -> None:
    pool = MHATokenToKVPoolHost(layout, page_size=page_size)
    fill(pool)
    storage = open_storage(pool)
    keys = hashes(5)
    want = [pool.element(page).copy() for page in (0, 2, 4, 6, 8)]
    assert storage.batch_set_v1(keys, pages_of(pool, 0, 2, 4, 6, 8)) == [True] * 5
    assert storage.batch_exists([*keys, "0" * 64]) == 5
    untouched = pool.kv_buffer.array.copy()
    assert storage.batch_get_v1(keys, pages_of(pool, 9, 7, 5, 3, 1)) == [True] * 5
    for page, element in zip((9, 7, 5, 3, 1), want, strict=True):
        assert np.array_equal(pool.element(page).view(np.uint16), element.view(np.uint16))
        pool.element(page)[...] = 0
    for page in (9, 7, 5, 3, 1):
        untouched_pool = MHATokenToKVPoolHost(layout, page_size=page_size)
        untouched_pool.kv_buffer.array[...] = untouched
        untouched_pool.element(page)[...] = 0
        untouched = untouched_pool.kv_buffer.array
    assert np.array_equal(pool.kv_buffer.array.view(np.uint16), untouched.view(np.uint16)), "other slots were written"


@pytest.mark.parametrize("other", LAYOUTS[1:])
def test_engines_of_different_layouts_share_pages(open_storage: Open, other: str) -> None:
    writer, reader = MHATokenToKVPoolHost(LAYOUTS[0]), MHATokenToKVPoolHost(other)
    fill(writer)
    keys = hashes(3)
    saved = open_storage(writer)
    assert all(saved.batch_set_v1(keys, pages_of(writer, 0, 1, 2)))
    saved.close()
    storage = open_storage(reader)
    assert storage.batch_exists(keys) == 3
    assert all(storage.batch_get_v1(keys, pages_of(reader, 3, 4, 5)))
    for page in range(3):
        assert np.array_equal(reader.element(3 + page).view(np.uint16), writer.element(page).view(np.uint16))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("layer_first", "page_first"), ("page_first", "page_first_direct"), ("page_first_direct", "page_first_direct")],
)
def test_latents_come_back_in_every_layout(open_storage: Open, writer: str, reader: str) -> None:
    source, target = MLATokenToKVPoolHost(writer), MLATokenToKVPoolHost(reader)
    fill(source)
    keys, mla = hashes(3), {"is_mla_model": True, "tp_rank": 0, "tp_size": 2}
    saved = open_storage(source, config=mla)
    assert all(saved.batch_set_v1(keys, pages_of(source, 0, 1, 2)))
    saved.close()
    storage = open_storage(target, config={**mla, "tp_rank": 1})  # a copy on every rank: one page for all
    assert storage.batch_exists(keys) == 3
    assert all(storage.batch_get_v1(keys, pages_of(target, 5, 4, 3)))
    for page in range(3):
        assert np.array_equal(target.element(5 - page).view(np.uint16), source.element(page).view(np.uint16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_that_were_given_as_tensors_are_those_that_are_copied_straight(open_storage: Open, layout: str) -> None:
    pool = MHATokenToKVPoolHost(layout, pages=48)
    fill(pool)
    storage = open_storage(pool)
    keys, others = hashes(20), hashes(20, "b")
    flat = [pool.get_data_page(page * pool.page_size) for page in range(20)]
    assert storage.batch_set(keys, flat)
    assert all(storage.batch_get_v1(keys, pages_of(pool, *range(20, 40))))
    for page in range(20):
        assert np.array_equal(pool.element(20 + page).view(np.uint16), pool.element(page).view(np.uint16))
    assert all(storage.batch_set_v1(others, pages_of(pool, *range(20))))
    got = storage.batch_get(others, [pool.get_dummy_flat_data_page() for _ in others])
    assert all(np.array_equal(a.array.view(np.uint16), b.array.view(np.uint16)) for a, b in zip(got, flat, strict=True))
    assert storage.batch_get(hashes(1, "c"), [pool.get_dummy_flat_data_page()]) == [None]
    assert not storage.set(hashes(1, "d")[0], Tensor(np.zeros(3, np.float16))), "a page of another size"
    assert not storage.exists(hashes(1, "d")[0])


def test_a_pool_that_lies_otherwise_than_its_layout_says_keeps_its_own_order(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    pool.layout, lies = "page_first_direct", pool  # addresses are the same, elements inside a page are not checked
    shifted = MHATokenToKVPoolHost("page_first")
    meta = shifted.get_page_buffer_meta
    shifted.get_page_buffer_meta = lambda indices: ([at + 64 for at in meta(indices)[0]], meta(indices)[1])  # type: ignore[method-assign]
    assert open_storage(lies)._members["kv"].pages.form == "canonical"
    assert open_storage(shifted)._members["kv"].pages.form == "pieces"


def test_states_are_kept_by_their_pieces(open_storage: Open) -> None:
    pool, states = MHATokenToKVPoolHost("page_first"), StatePool()
    fill(pool)
    rng = np.random.default_rng(2)
    states.temporal_buffer.array[...] = rng.random(states.temporal_buffer.array.shape, np.float32)
    states.conv_buffer.array[...] = rng.random(states.conv_buffer.array.shape)
    storage = open_storage(pool, states)
    keys = hashes(4)
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2, 3)))
    wrote = storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, Tensor(np.array([3, 5])), [keys[1], keys[3]])])
    assert wrote == {PoolName.MAMBA: [True, True]}
    read = storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, Tensor(np.array([8, 9])), [keys[3], keys[2]])])
    assert read == {PoolName.MAMBA: [True, False]}
    assert np.array_equal(states.temporal_buffer.array[8], states.temporal_buffer.array[5])
    assert np.array_equal(states.conv_buffer.array[8], states.conv_buffer.array[5])


def test_a_pool_that_only_hands_out_pages_is_kept_through_them(open_storage: Open) -> None:
    pool, side = MHATokenToKVPoolHost("page_first"), PageOnlyPool()
    side.pages[...] = np.random.default_rng(3).integers(0, 256, side.pages.shape)
    storage = open_storage(pool, side)
    keys = hashes(3)
    assert storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, pages_of(side, 0, 1, 2), keys)]) == {"mamba": [True] * 3}
    assert storage.batch_get_v2([PoolTransfer(PoolName.MAMBA, pages_of(side, 5, 4, 3), keys)]) == {"mamba": [True] * 3}
    assert np.array_equal(side.pages[[5, 4, 3]], side.pages[:3])


def test_host_indices_that_are_no_whole_pages_move_nothing(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    storage = open_storage(pool)
    keys = hashes(2)
    good = pages_of(pool, 0, 1)
    assert storage.batch_set_v1(keys, good) == [True, True]
    before = pool.kv_buffer.array.copy()
    for wrong in (good.array[1:], good.array + 1, good.array[::-1].copy(), good.array + pool.size):
        assert storage.batch_get_v1(keys, Tensor(wrong)) == [False, False]
        assert storage.batch_set_v1(hashes(2, "w"), Tensor(wrong)) == [False, False]
    assert np.array_equal(pool.kv_buffer.array.view(np.uint16), before.view(np.uint16))


# ---- what the calls answer ----------------------------------------------------------------------------------------


def test_what_is_there_already_counts_as_kept(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    keys = hashes(3)
    assert storage.batch_set_v1(keys[:2], pages_of(pool, 0, 1)) == [True, True]
    assert storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)) == [True] * 3


def test_the_run_ends_at_the_first_page_that_is_missing(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    keys = hashes(4)
    assert all(storage.batch_set_v1([keys[0], keys[1], keys[3]], pages_of(pool, 0, 1, 3)))
    assert storage.batch_exists(keys) == 2
    assert storage.batch_exists([]) == 0
    assert storage.batch_get_v1(keys, pages_of(pool, 4, 5, 6, 7)) == [True, True, False, True]


@pytest.mark.parametrize("odd", ["uneven", "not hex", "spaced", "padded"])
def test_a_name_that_is_no_hash_is_a_key_of_its_own(open_storage: Open, odd: str) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    storage = open_storage(pool)
    first, second = hashes(2)
    keys = {
        "uneven": [first[:62], f"00{second}"],  # as many characters together
        "not hex": ["x" * 64, second],
        "spaced": [f"{first[:30]}  {first[32:]}", second],
        "padded": [first[:62], f" {second} "],
    }[odd]
    assert storage.batch_set_v1(keys, pages_of(pool, 0, 1)) == [True, True]
    assert storage.batch_exists(keys) == 2
    assert [storage.exists(key) for key in keys] == [True, True]  # whatever it is asked with
    assert storage.batch_exists([first, second]) == 0
    other = keys[::-1]
    assert storage.batch_get_v1(other, pages_of(pool, 3, 2)) == [True, True]
    for to, page in ((2, 0), (3, 1)):
        got, want = (pool.get_data_page(at * pool.page_size) for at in (to, page))
        assert np.array_equal(got.array.view(np.uint16), want.array.view(np.uint16))


def test_prefix_hashes_name_the_parent_and_an_empty_list_the_first_page(open_storage: Open) -> None:
    """What precedes the keys, where SGLang passes it: hybrid_cache_controller.py:1432, cache_controller.py:1431."""
    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    keys = hashes(6)
    for first, extra in ((0, HiCacheStorageExtraInfo([])), (3, HiCacheStorageExtraInfo(keys[:3]))):
        assert all(storage.batch_set_v1(keys[first : first + 3], pages_of(pool, 0, 1, 2), extra))
    store = storage._members["kv"].store
    assert store.evict(Tier.SHARED, 2) == 2
    assert [store.state(bytes.fromhex(key))[Tier.SHARED].name for key in keys] == ["RESIDENT"] * 4 + ["ABSENT"] * 2


def test_a_get_that_follows_at_once_reads_each_page_from_disk_once(open_storage: Open) -> None:
    """SGLang asks, and gets what it was told of in the next call: hit query and fetch of cache_controller.py."""
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    storage = open_storage(pool)
    keys = hashes(6)
    want = [pool.element(page).copy() for page in range(3)]
    assert all(storage.batch_set_v1(keys[:3], pages_of(pool, 0, 1, 2)))
    store = storage._members["kv"].store
    assert store.flush()
    assert store.evict(Tier.SHARED, 3) == 3
    before = store.stats().tiers["disk"].bytes_read
    with ThreadPoolExecutor(1) as threads:
        with inject("mover.unit", "pause"):
            assert storage.batch_exists(keys) == 3
            wait_paused("mover.unit")
            begun = store.stats().transfers + len(store._copies.running())
            getting = threads.submit(storage.batch_get_v1, keys[:3], pages_of(pool, 9, 8, 7))
            while store.stats().transfers + len(store._copies.running()) == begun:
                assert not getting.done()
        assert getting.result() == [True] * 3
    assert store.stats().tiers["disk"].bytes_read - before == 3 * store._config.geometry.page_bytes
    for page, element in zip((9, 8, 7), want, strict=True):
        assert np.array_equal(pool.element(page).view(np.uint16), element.view(np.uint16))


def test_only_prefixes_that_every_pool_can_restore_are_offered(open_storage: Open) -> None:
    """As HiCacheFile answers, hicache_storage.py:891-950."""
    pool, states, window = MHATokenToKVPoolHost("page_first"), StatePool(), StatePool()
    storage = open_storage(pool, states, window)
    keys = hashes(6)
    assert all(storage.batch_set_v1(keys[:5], pages_of(pool, 0, 1, 2, 3, 4)))
    storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, Tensor(np.array([0, 1])), [keys[1], keys[3]])])
    storage.batch_set_v2([PoolTransfer(PoolName.SWA, Tensor(np.arange(4)), [keys[0], keys[1], keys[2], keys[4]])])
    trailing = PoolHitPolicy.TRAILING_PAGES
    state = PoolTransfer(PoolName.MAMBA, None, keys[-1:], trailing)
    result = storage.batch_exists_v2(keys, [state])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [2, 4])
    assert result.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4}
    sliding = PoolTransfer(PoolName.SWA, None, keys[-2:], trailing)
    result = storage.batch_exists_v2(keys, [state, sliding])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (2, [2])
    assert result.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4, PoolName.SWA: 3}
    every = PoolTransfer(PoolName.SWA, None, None, PoolHitPolicy.ALL_PAGES)
    result = storage.batch_exists_v2(keys, [every])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [1, 2, 3])
    groups = PoolTransfer(PoolName.SWA, None, None, PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_exists_v2(keys, [groups]).kv_hit_pages == 5
    assert storage.batch_exists_v2(hashes(3, "none"), [every]).kv_hit_pages == 0


@pytest.mark.parametrize(
    "other",
    [
        {"page_size": 8, "pages": 8},
        {"layers": 2},
        {"heads": 1},
        {"dim": 16},
        {"dtype": "float32"},
    ],
)
def test_a_page_of_another_kind_is_no_hit(open_storage: Open, other: dict[str, Any]) -> None:
    first = MHATokenToKVPoolHost("page_first")
    fill(first)
    keys = hashes(2)
    saved = open_storage(first)
    assert all(saved.batch_set_v1(keys, pages_of(first, 0, 1)))
    saved.close()
    pool = MHATokenToKVPoolHost("page_first", **other)
    storage = open_storage(pool)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, pages_of(pool, 0, 1)) == [False, False]


def test_a_rank_has_pages_of_its_own(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    keys = hashes(2)
    saved = open_storage(pool, config={"tp_rank": 0, "tp_size": 2})
    assert all(saved.batch_set_v1(keys, pages_of(pool, 0, 1)))
    assert open_storage(pool, config={"tp_rank": 1, "tp_size": 2}).batch_exists(keys) == 0


def test_each_rank_has_room_of_its_own_in_a_small_directory(open_storage: Open, tmp_path: Path) -> None:
    pool, keys = MHATokenToKVPoolHost("page_first"), hashes(4)
    disk = {"path": str(tmp_path / "small"), "capacity": "8MiB"}
    ranks = [
        open_storage(pool, tiers="none", disk=disk, config={"tp_rank": rank, "tp_size": 4}) for rank in range(4)
    ]
    for storage in ranks:
        assert storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2, 3)) == [True] * 4
    assert [storage.batch_exists(keys) for storage in ranks] == [4] * 4


def test_clear_drops_what_is_kept_and_close_keeps_it(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    keys = hashes(2)
    storage = open_storage(pool)
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1)))
    storage.close()
    storage.close()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, pages_of(pool, 0, 1)) == [False, False]
    again = open_storage(pool)
    assert again.batch_exists(keys) == 2
    again.clear()
    assert again.batch_exists(keys) == 0


def test_a_sidecar_that_is_registered_later_is_served(open_storage: Open) -> None:
    """hybrid_cache_controller.py:365-375: register_host_pool_entry after the attach."""
    pool, states = MHATokenToKVPoolHost("page_first"), StatePool()
    storage = open_storage(pool)
    one = [PoolTransfer(PoolName.MAMBA, Tensor(np.array([0])), hashes(1))]
    assert storage.batch_set_v2(one) == {PoolName.MAMBA: [False]}
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert storage.batch_set_v2(one) == {PoolName.MAMBA: [True]}


def test_a_closed_backend_takes_no_pool(open_storage: Open) -> None:
    """Nobody would close the store that it opened, nor let its directories go."""
    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    storage.close()
    for late in (
        lambda: storage.register_mem_host_pool_v2(StatePool(), PoolName.MAMBA),
        lambda: storage.register_mem_pool_host(pool),
        storage.on_host_pools_registered,
    ):
        with pytest.raises(StepwellUsageError, match="closed"):
            late()
    assert not storage._members


def test_a_pool_cannot_take_the_place_of_one_whose_pages_are_served(open_storage: Open) -> None:
    """Its pages would go to the other one's memory, and be said to have come."""
    pool, other = MHATokenToKVPoolHost("page_first"), MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    for again in (
        lambda: storage.register_mem_pool_host(other),
        lambda: storage.register_mem_host_pool_v2(other, PoolName.KV),
    ):
        with pytest.raises(StepwellUsageError, match="kv is registered already"):
            again()
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    assert storage.mem_pool_host is pool


@pytest.mark.parametrize("what", ["the weights change", "the backend is closed"])
def test_what_happens_while_a_late_pool_is_opened_is_not_missed(
    open_storage: Open, adapter: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It happens just before the pool's store would be one of those that are told."""
    storage, states = open_storage(MHATokenToKVPoolHost("page_first")), StatePool()
    one = [PoolTransfer(PoolName.MAMBA, Tensor(np.array([0])), hashes(1))]
    opened = []
    open_member = storage._open

    def disturbed(name: str, pool: Any) -> Any:
        opened.append(open_member(name, pool))
        storage.close() if "closed" in what else storage._weights.changed()
        return opened[-1]

    monkeypatch.setattr(storage, "_open", disturbed)
    if "closed" in what:
        with pytest.raises(StepwellUsageError, match="closed"):
            storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
        with pytest.raises(StoreClosedError):
            opened[0].store.stats()
    else:
        storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
        assert opened[0].store.epoch == storage._members["kv"].store.epoch
        assert storage.batch_set_v2(one) == {PoolName.MAMBA: [True]}


def test_pages_that_are_kept_between_a_change_of_the_weights_and_the_flush_are_not_served_after_it(
    open_storage: Open,
) -> None:
    """A backup that goes on over an update keeps pages of the old weights (cache_controller.py:1416-1436)."""
    from stepwell.adapters.sglang.weights import OneRank

    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool)
    keys = hashes(3)
    assert all(storage.batch_set_v1(keys[:1], pages_of(pool, 0)))
    with storage._weights.change(OneRank(can_agree=True)) as change:
        storage.batch_set_v1(keys[1:2], pages_of(pool, 1))
        change.finish(is_done=True, version=None)
    storage.batch_set_v1(keys[2:], pages_of(pool, 2))
    storage._weights.flushed()
    assert [storage.exists(key) for key in keys] == [False] * 3
    assert storage.batch_get_v1(keys, pages_of(pool, 3, 4, 5)) == [False] * 3
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    assert storage.batch_exists(keys) == 3


# ---- how long loading may take ------------------------------------------------------------------------------------


def test_a_hit_is_offered_as_far_as_sglang_waits_for_it(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timeout is base + per_ki_token * tokens / 1024 (unified_radix_cache.py)."""
    pool = MHATokenToKVPoolHost("page_first", page_size=16)
    for asked, seconds, per_page in (("prefetch-timeout", 1.0, 0.25 * 16 / 1024), (2.5, 2.5, 0.0)):
        storage = open_storage(pool, load_bound=asked)
        within = storage._members["kv"].bound.within()
        assert (within.seconds, within.per_page) == (seconds, per_page)
    assert open_storage(pool, load_bound=None)._members["kv"].bound.within() is None


def test_the_timeout_that_sglang_read_last_bounds_the_backend_that_is_made_next(
    open_storage: Open, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached over HTTP with timeouts of its own: SGLang reads them just before (storage_attachment.py:121-167)."""
    seen = LastTimeout()
    monkeypatch.setattr(adapter, "last_timeout", lambda: seen)
    pool = MHATokenToKVPoolHost("page_first", page_size=16)
    for given, per_page in (((0.5, 4.0), 4.0 * 16 / 1024), ((7.0, 0.0), 0.0)):
        seen.seconds = given
        opened = open_storage(pool)
        member = opened._members["kv"]
        assert (member.bound.within().seconds, member.bound.within().per_page) == (given[0], per_page)
        assert opened._deadline(member, 64) == given[0] + 64 * per_page
        opened.close()


def test_what_computing_costs_is_learned_from_the_calls(adapter: Any) -> None:
    now = [0.0]
    cost = adapter.RecomputeCost(lambda: now[0])
    bound = adapter.LoadBound("auto", prefetch=(1.0, 0.25), page_tokens=64, cost=cost)
    assert bound.within() == bound.patience
    for prompt in range(20):
        keys = [f"{prompt} {page}".encode() for page in range(10)]
        cost.missed(keys[2])
        now[0] += 0.5
        cost.missed(keys[2])  # asked again while the request waits: the first time counts
        now[0] += 0.3 + (prompt % 2)  # every other one waited for something else
        cost.kept(keys)
        cost.kept(keys)
    assert cost.seconds_per_page == pytest.approx(0.8 / 8)
    assert (bound.within().seconds, bound.within().per_page) == (0.0, pytest.approx(0.25 * 64 / 1024))
    for prompt in range(100):
        cost.missed(f"{prompt}".encode())
        now[0] += 0.001
        cost.kept([f"{prompt}".encode()])
    assert (bound.within().seconds, bound.within().per_page) == (0.0, pytest.approx(0.001))


def test_questions_that_nothing_follows_are_forgotten(adapter: Any) -> None:
    cost = adapter.RecomputeCost(lambda: 0.0)
    for number in range(10_000):
        cost.missed(number.to_bytes(4, "big"))
    assert len(cost._asked) == 4096


# ---- what get_stats shows -----------------------------------------------------------------------------------------


def test_get_stats_shows_what_was_delivered_missed_and_moved(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asserts the class and enters the lists in histograms (observability/metrics_collector.py:2388-2398)."""
    pool = MHATokenToKVPoolHost("page_first", page_size=4)
    fill(pool)
    storage = open_storage(pool)
    monkeypatch.setattr("stepwell.adapters.sglang.storage.SECONDS", 0.0)  # a new look at each call
    keys, page = hashes(5), pool.element(0).nbytes
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2, 3, 4)))
    assert all(storage.batch_set_v1(keys[:2], pages_of(pool, 0, 1)))
    assert storage.batch_exists([*keys, "0" * 64, "1" * 64]) == 5
    assert storage.batch_get_v1([*keys[:3], "0" * 64], pages_of(pool, 9, 8, 7, 6)) == [True, True, True, False]
    found = storage.get_stats()
    assert isinstance(found, standin.StorageMetrics)
    assert (found.prefetch_pgs, found.backup_pgs) == ([4], [5, 2])
    assert (len(found.prefetch_bandwidth), len(found.backup_bandwidth)) == (1, 1)  # of what moved
    shown = found.stepwell["pools"]["kv"]
    assert shown["hit_tokens"] == {"shared": 3 * 4}
    assert shown["miss_tokens"]["absent"] == 2 * 4
    assert shown["saved_tokens"] == 5 * 4
    assert shown["tiers"]["shared"]["resident_bytes"] == shown["tiers"]["disk"]["resident_bytes"] == 5 * page
    assert shown["tiers"]["shared"]["read_bytes"] >= 3 * page
    assert {call: each["count"] for call, each in shown["calls"].items()} == {"exists": 1, "get": 1, "set": 2}
    assert found.stepwell["epoch"] == storage._weights.current
    again = storage.get_stats()
    assert (again.prefetch_pgs, again.backup_pgs, again.prefetch_bandwidth, again.backup_bandwidth) == ([], [], [], [])
    assert again.stepwell["pools"]["kv"]["hit_tokens"] == {"shared": 3 * 4}
    again.prefetch_stats = {}  # as SGLang does (unified_radix_cache.py:3706)
    storage.close()
    assert storage.get_stats() is None


def test_get_stats_asks_the_stores_once_a_second(open_storage: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler asks in each of its rounds."""
    from stepwell import PageStore

    storage = open_storage(MHATokenToKVPoolHost("page_first"))
    clock, looks = [100.0], []
    stats = PageStore.stats
    monkeypatch.setattr("stepwell.adapters.sglang.storage.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(PageStore, "stats", lambda store: (looks.append(clock[0]), stats(store))[1])
    for at in (100.0, 100.5, 100.9, 101.0, 101.5):
        clock[0] = at
        assert storage.get_stats().stepwell["pools"]["kv"]["saved_tokens"] == 0
    assert looks == [100.0, 101.0]


def test_tokens_of_a_side_pool_are_those_of_the_pages_that_its_keys_name(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, side = MHATokenToKVPoolHost("page_first", page_size=4), StatePool()
    storage = open_storage(pool, side)
    transfer = PoolTransfer(PoolName.MAMBA, host_indices=pages_of(side, 0, 1), keys=hashes(2))
    assert storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True, True]}
    assert storage.get_stats().stepwell["pools"]["mamba"]["saved_tokens"] == 2 * 4


def test_a_store_that_cannot_be_asked_is_left_out_and_nothing_is_raised(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell import PageStore, StepwellError

    def refuse(store: PageStore) -> None:
        raise StepwellError("an assertion of the core failed")

    storage = open_storage(MHATokenToKVPoolHost("page_first"))
    monkeypatch.setattr(PageStore, "stats", refuse)
    assert storage.get_stats().stepwell["pools"] == {}


def test_metrics_are_registered_where_sglang_asks_for_storage_metrics(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_sglang_metrics import Client

    client = Client()
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", client)
    monkeypatch.setattr("stepwell.adapters.sglang.storage.SECONDS", 0.0)
    open_storage(MHATokenToKVPoolHost("page_first")).get_stats()
    assert not client.registry
    pool = MHATokenToKVPoolHost("page_first", page_size=4)
    storage = open_storage(pool, config={"enable_storage_metrics": True, "tp_rank": 1, "tp_size": 2})
    keys = hashes(3)
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    assert all(storage.batch_get_v1(keys, pages_of(pool, 3, 4, 5)))
    storage.get_stats()
    assert client.registry["stepwell_hit_tokens"].values == {("kv", "shared", "tp1"): 3 * 4}
    assert len(client.registry["stepwell_call_seconds"].observed[("kv", "get", "tp1")]) == 1
    storage.close()
    assert set(client.registry["stepwell_resident_bytes"].values.values()) == {0}


def test_sizes_that_do_not_go_together_are_said_once_at_attach(
    open_storage: Open, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MHATokenToKVPoolHost("page_first", pages=4096)  # 3 MiB, beside 4 MiB shared
    with caplog.at_level("WARNING", "stepwell"):
        open_storage(pool)
    assert caplog.text.count("shared beside a cache of 3 MiB in SGLang's host memory") == 1
    caplog.clear()
    with caplog.at_level("WARNING", "stepwell"):
        open_storage(pool, config={"tp_rank": 1, "tp_size": 2})  # said by the first rank, for all
        open_storage(MHATokenToKVPoolHost("page_first"))
    assert "SGLang's host memory" not in caplog.text


# ---- a disk that hangs --------------------------------------------------------------------------------------------


def test_a_page_whose_bytes_are_not_there_yet_is_not_called_kept(open_storage: Open) -> None:
    """SGLang counts True as backed up, and goes on behind it (cache_controller.py:1443-1450); nothing looks again."""
    pool, states = MHATokenToKVPoolHost("page_first"), StatePool()
    fill(pool)
    storage = open_storage(pool, states, tiers="disk", set_timeout=0.05)
    keys, state = hashes(1), PoolTransfer(PoolName.MAMBA, Tensor(np.array([3])), hashes(1))
    with inject("file.pwrite", "pause", nth=1):
        assert storage.batch_set_v1(keys, pages_of(pool, 0)) == [False]
        wait_paused("file.pwrite")
        assert storage.batch_set_v1(keys, pages_of(pool, 0)) == [False]
        assert not storage.batch_set(keys, [pool.get_data_page(0)])
        assert not storage.set(keys[0], pool.get_data_page(0))
        assert storage.batch_exists(keys) == 0
    with inject("file.pwrite", "pause", nth=1):
        assert storage.batch_set_v2([state]) == {PoolName.MAMBA: [False]}
        wait_paused("file.pwrite")
        assert storage.batch_set_v2([state]) == {PoolName.MAMBA: [False]}
    for member in storage._members.values():
        assert member.store.flush(30.0)
    assert storage.batch_set_v1(keys, pages_of(pool, 0)) == [True]
    assert storage.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
    assert storage.batch_exists(keys) == 1


def test_clear_keeps_sglangs_scheduler_no_longer_than_a_write_does(open_storage: Open) -> None:
    """It is called on the scheduler's thread (scheduler.py:5230): no request is served meanwhile."""
    pool, states = MHATokenToKVPoolHost("page_first"), StatePool()
    storage = open_storage(pool, states, tiers="disk", set_timeout=5.0)
    keys = hashes(3)
    storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2))
    storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, Tensor(np.arange(3)), keys)])
    brief = msgspec.structs.replace(storage._settings.adapter, set_timeout=0.1)
    storage._settings = msgspec.structs.replace(storage._settings, adapter=brief)
    with inject("volume.retire", "pause"):  # of every pool
        storage.clear()
        wait_paused("volume.retire")
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get_v1(keys, pages_of(pool, 3, 4, 5)) == [False] * 3
        assert sum(member.store.stats().tiers["disk"].owed for member in storage._members.values()) == 6
    for member in storage._members.values():
        member.store._tick()  # behind the rounds that stood in the disk
        assert member.store.stats().tiers["disk"].owed == 0


# ---- failures that SGLang's users have reported (docs/cases.md) ----------------------------------------------------


def test_a_batch_that_no_tier_takes_is_not_called_kept(open_storage: Open) -> None:
    """C021, sgl-project/sglang#27108."""
    pool = MHATokenToKVPoolHost("page_first")
    storage = open_storage(pool, tiers="disk")
    keys = hashes(4)
    with inject("file.pwrite", "errno", value=errno.ENOSPC):
        assert storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2, 3)) == [False] * 4
    assert storage.batch_exists(keys) == 0


def test_all_pools_and_ranks_together_stay_within_the_capacity_of_the_directory(
    open_storage: Open, directories: Directories
) -> None:
    """C033, sgl-project/sglang#32373."""
    pools = MHATokenToKVPoolHost("page_first", pages=64, page_size=16), StatePool(64)
    ranks = [open_storage(*pools, config={"tp_rank": rank, "tp_size": 2}) for rank in range(2)]
    for batch in range(40):
        for rank, storage in enumerate(ranks):
            keys = hashes(64, f"{batch}.{rank}.")
            storage.batch_set_v1(keys, pages_of(pools[0], *range(64)))
            storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, Tensor(np.arange(64)), keys)])
    members = [member for storage in ranks for member in storage._members.values()]
    assert len(members) == 4
    for name, directory in (("shared", directories.shared), ("disk", directories.disk)):
        held = [stats.capacity * member.pages.geometry.page_bytes for member in members
                if (stats := member.store.stats().tiers[name])]  # fmt: skip
        assert all(held), "each has its floor"
        assert sum(held) <= 4 << 20
        assert sum(path.stat().st_blocks * 512 for path in directory.glob("v-*.pages")) <= 4 << 20


def test_a_page_that_is_damaged_is_a_miss_heals_and_stops_nobody(open_storage: Open, directories: Directories) -> None:
    """C043, sgl-project/sglang#39269; SGLang's file backend serves the bit, and never mends the file."""
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    keys, page = hashes(3), pool.element(1).copy()
    first = open_storage(pool, tiers="disk")
    assert all(first.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    first.close()
    for path in directories.volumes("pages"):
        data = bytearray(path.read_bytes())
        at = data.find(np.ascontiguousarray(page[0, 0, 0]).tobytes())
        assert at >= 0, "the page lies in the volume"
        data[at] ^= 1
        path.write_bytes(bytes(data))
    storage = open_storage(pool, tiers="disk")
    assert storage.batch_get_v1(keys, pages_of(pool, 5, 6, 7)) == [True, False, True]
    assert storage.get_stats().stepwell["pools"]["kv"]["checksum_failures"] == 1
    assert storage.batch_exists(keys) == 1
    storage._members["kv"].store._tick()  # as the keeper does: the slot is rewritten and read back
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    assert storage.batch_get_v1(keys, pages_of(pool, 5, 6, 7)) == [True] * 3
    assert np.array_equal(pool.element(6).view(np.uint16), page.view(np.uint16))


@pytest.mark.parametrize("other", [{"dtype": "int16"}, {"layers": 2}, {"heads": 4, "dim": 4}, {"page_size": 2}])
def test_pages_of_another_dtype_or_shape_are_never_a_hit(open_storage: Open, other: dict[str, Any]) -> None:
    """C053, sgl-project/sglang#33268: SGLang's hashes carry none of it."""
    pool, keys = MHATokenToKVPoolHost("page_first"), hashes(3)
    first = open_storage(pool)
    assert all(first.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    first.close()
    stranger = MHATokenToKVPoolHost("page_first", **other)
    storage = open_storage(stranger)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, pages_of(stranger, 0, 1, 2)) == [False] * 3


def test_what_was_computed_with_other_weights_is_never_a_hit_nor_after_a_restart(open_storage: Open) -> None:
    """C057, sgl-project/sglang#26792."""
    pool, keys, later = MHATokenToKVPoolHost("page_first"), hashes(3), hashes(3, "later")
    storage = open_storage(pool)
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    weights = storage._weights
    weights.changed()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, pages_of(pool, 4, 5, 6)) == [False] * 3
    assert all(storage.batch_set_v1(later, pages_of(pool, 0, 1, 2)))
    assert storage.batch_exists(later) == 3
    assert storage.get_stats().stepwell["epoch_changes"] == 1
    storage.close()
    type(weights).__init__(weights)  # a new process
    again = open_storage(pool)
    assert again.batch_exists(keys) == 3, "the weights of the start are what they were"
    assert again.batch_exists(later) == 0, "nobody knows which weights these were of"


def take_version(weights: Any, version: str) -> None:
    """Update the weights to a version, as an engine of one rank does."""
    from stepwell.adapters.sglang.weights import OneRank

    with weights.change(OneRank(can_agree=True)) as change:
        change.finish(is_done=True, version=version)
    weights.flushed()


@pytest.mark.parametrize("tiers", ["shared", "disk"])
def test_a_version_that_is_given_again_after_a_restart_hits_what_was_kept_under_it(
    open_storage: Open, tiers: str
) -> None:
    """The engine starts with the weights that it was started with, and is told of the version once more."""
    pool = MHATokenToKVPoolHost("page_first")
    fill(pool)
    keys = hashes(3)
    for life in range(3):
        storage = open_storage(pool, tiers=tiers)
        weights = storage._weights
        base = storage.batch_exists(keys)
        assert base == (3 if life else 0), "pages of the start are those of the start"
        if life:
            assert all(storage.batch_get_v1(keys, pages_of(pool, 5, 6, 7)))
            assert pool.element(6).tobytes() == pool.element(1).tobytes()
        else:
            assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
        take_version(weights, "1")
        assert storage.batch_exists(keys) == 0, "no page was kept under version 1"
        take_version(weights, "2")
        assert storage.batch_exists(keys) == (3 if life else 0)
        if life:
            assert all(storage.batch_get_v1(keys, pages_of(pool, 5, 6, 7)))
            assert pool.element(6).tobytes() == pool.element(4).tobytes(), "what was computed with version 2"
        else:
            assert all(storage.batch_set_v1(keys, pages_of(pool, 3, 4, 5)))
        storage.close()
        type(weights).__init__(weights)  # a new process


def test_a_version_of_another_run_hits_nothing_after_a_restart(open_storage: Open) -> None:
    pool, keys = MHATokenToKVPoolHost("page_first"), hashes(3)
    for run, found in (("one", 0), ("another", 0), ("one", 3)):
        storage = open_storage(pool, weights_id=run)
        take_version(storage._weights, "2")
        assert storage.batch_exists(keys) == found
        assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
        weights = storage._weights
        storage.close()
        type(weights).__init__(weights)  # a new process


@pytest.mark.parametrize("dim", [576, 656])
def test_latents_of_odd_sizes_come_back(open_storage: Open, dim: int) -> None:
    """C089, sgl-project/sglang#31600."""
    pool = MLATokenToKVPoolHost("page_first", page_size=1, dim=dim)
    fill(pool)
    storage = open_storage(pool)
    keys, want = hashes(3), [pool.element(page).copy() for page in range(3)]
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    assert all(storage.batch_get_v1(keys, pages_of(pool, 5, 6, 7)))
    for page, element in enumerate(want):
        assert np.array_equal(pool.element(5 + page).view(np.uint16), element.view(np.uint16))


def test_requests_that_are_asked_for_again_and_again_and_then_aborted_keep_nothing_twice(open_storage: Open) -> None:
    """C027, sgl-project/sglang#9874: an abort makes no call of the backend; SGLang asks up to 8 times before."""
    pool, keys = MHATokenToKVPoolHost("page_first"), hashes(3)
    storage = open_storage(pool)
    assert all(storage.batch_set_v1(keys, pages_of(pool, 0, 1, 2)))
    for _ in range(8):
        assert storage.batch_exists(keys) == 3
    store = storage._members["kv"].store
    assert (store.stats().probed_pages, store.stats().leases) == (3, 0)
    assert all(storage.batch_get_v1(keys[:2], pages_of(pool, 5, 6)))
    assert store.stats().probed_pages == 1, "what was fetched is kept for no request any longer"
