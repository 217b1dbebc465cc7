"""Cases of kind 7 in docs/cases.md: another geometry, another model, other weights than those of the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from case_kit import CASE_GEOMETRY, Box, config_of, tokens_of
from sequence_kit import StampEngine, evict_all, prompt
from stepwell.index import Tier
from stepwell.testing.faults import inject, wait_paused
from store_kit import Directories

MakeEngine = Callable[..., StampEngine]
OTHERS: list[dict[str, Any]] = [
    {"dtype": "fp8_e4m3", "head_dim": 16},  # a page of as many bytes
    {"dtype": "float16"},
    {"model": "other"},
    {"revision": "2"},
    {"kv_heads": 4, "head_dim": 4},
    {"layers": 4, "head_dim": 4},
    {"streams": 1, "head_dim": 16},
    {"page_tokens": 8, "head_dim": 4},
    {"shard": (0, 2)},
    {"shard": (1, 2)},
    {"layer_head_dims": ((2, 4), (2, 12))},
    {"extra": (("rope", "x4"),)},
    {"extra": (("attention", "window"),)},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: " ".join(other))
def test_pages_of_another_geometry_are_neither_found_nor_removed(
    directories: Directories, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    """C053, sgl-project/sglang#33268: bf16 pages were served to an fp8 run, for the storage key had no dtype."""
    strange = replace(CASE_GEOMETRY, **other)
    assert strange.page_bytes == CASE_GEOMETRY.page_bytes
    sizes = {"shared": 16, "disk": 16, "volumes": 2}
    with Box(config_of(directories, **sizes)) as box:
        box.save(tokens_of(1, 32))
    before = {path: path.read_bytes() for path in (*directories.volumes("vol"), *directories.volumes("pages"))}
    with Box(config_of(directories, strange, **sizes)) as box:
        assert box.load(tokens_of(1, 32)) == 0
        for name in ("shared", "disk"):
            tier = box.store.stats().tiers[name]
            assert (tier.resident, tier.cold) == (0, {"fingerprint": 1})
        for path in before:
            [line] = [line for line in caplog.messages if path.stem.removeprefix("v-") in line]
            assert "fingerprint: " in line
        box.save(tokens_of(2, 16))
    assert {path: path.read_bytes() for path in before} == before
    with Box(config_of(directories, **sizes)) as box:
        assert box.load(tokens_of(1, 32)) == 8


def test_ranks_of_another_split_share_nothing(directories: Directories) -> None:
    """C055, vllm-project/vllm#55191: reads of equal size gave another rank's heads when the split had changed.

    Sharing over splits is a feature to come; until then there is nothing to mix up. 1 -> 2 and back 2 -> 1.
    """
    whole = replace(CASE_GEOMETRY, kv_heads=4)
    halves = [replace(whole, kv_heads=2, shard=(rank, 2)) for rank in (0, 1)]
    assert halves[0].page_bytes * 2 == whole.page_bytes
    sizes = {"shared": 32, "disk": 32, "volumes": 4}
    for first, second in ((whole, halves[0]), (whole, halves[1]), (halves[0], halves[1]), (halves[1], whole)):
        with Box(config_of(directories, first, **sizes)) as box:
            box.save(tokens_of(1, 16))
        with Box(config_of(directories, second, **sizes)) as box:
            found = box.load(tokens_of(1, 16))  # what is found is compared with this geometry's own stamps
            assert found == 0 or box.geometry == whole
            box.store.forget(tokens_of(1, 16))


def test_new_weights_find_nothing_of_the_old_ones_in_any_tier(make_engine: MakeEngine) -> None:
    """C057, sgl-project/sglang#26792: after an update of the weights the KV of the old ones came back from disk."""
    engine = make_engine(device=24, host=16, shared=1, disk=1)
    store = engine.store
    engine.cache(prompt(1, 33))
    evict_all(store, Tier.DEVICE, Tier.HOST, Tier.SHARED)
    with inject("mover.before_copy", "pause", nth=3):
        loading = engine.open(prompt(1, 33))  # two pages are there, and one under way
        wait_paused("mover.before_copy")
        store.set_epoch("weights 2")
        assert store.cached(prompt(1, 33), tiers=tuple(Tier)) == 0
    engine.settle(loading)
    assert loading.ready == 0
    for _ in range(2):
        again = engine.open(prompt(1, 33))
        assert (again.ready, again.loading, again.missing) == (0, 0, 33)
        again.close()
        assert store.flush(120.0)
    engine.cache(prompt(1, 33))
    engine.verify(engine.serve(prompt(1, 33)), 33)


@pytest.mark.parametrize("epoch", [2, "weights 2"])
def test_new_weights_find_nothing_of_the_old_ones_after_a_restart(
    directories: Directories, epoch: int | str
) -> None:
    """C057, sgl-project/sglang#29443: nor does the next process."""
    sizes = {"shared": 16, "disk": 16}
    with Box(config_of(directories, **sizes, epoch=1)) as box:
        box.save(tokens_of(1, 32))
        with inject("mover.unit", "pause"):
            late = box.save(tokens_of(2, 32), wait=False)
            box.store.set_epoch(epoch)
        assert late.transfer.wait(120.0)
        assert not late.transfer.ok.any()
        assert (box.load(tokens_of(1, 32)), box.load(tokens_of(2, 32))) == (0, 0)
    with Box(config_of(directories, **sizes, epoch=epoch)) as box:
        assert (box.load(tokens_of(1, 32)), box.load(tokens_of(2, 32))) == (0, 0)
        assert box.save(tokens_of(3, 64)).saved == 16  # their space is free
