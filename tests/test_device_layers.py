"""Engines that keep one array a layer: their pages go through all tiers and back, those of unequal layers too."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from device_kit import BY_LAYER, PER_LAYER, STACKED
from sequence_kit import GEOMETRY, PAGE_TOKENS, MakeEngine, StampEngine, Tokens, Values, evict_all, prompt
from stepwell.config import DeviceTier, StoreConfig
from stepwell.errors import GeometryError
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.sequence import Sequence
from stepwell.settings import from_mapping
from store_kit import Directories

UNEVEN = PageGeometry(
    model="uneven", revision="s", layers=3, kv_heads=2, head_dim=8, dtype="float32", page_tokens=PAGE_TOKENS,
    layer_head_dims=((2, 8), (2, 16), (1, 8)),
)  # fmt: skip
TOKENS = prompt(1, 33)  # 8 pages and a token


def painted(geometry: PageGeometry, pages: int) -> Values:
    """Return pages no value of which is like another."""
    elements = geometry.page_bytes // 4
    return np.random.default_rng(3).permutation(pages * elements).astype(np.float32).reshape(pages, elements)


def compute(engine: StampEngine, tokens: Tokens, pages: Values) -> None:
    """Serve a prompt whose KV is given, and write it through."""
    with engine.open(tokens) as sequence:
        assert engine.store.extend([sequence], [tokens.size]).ok.all()
        engine.write(engine.block(sequence)[: len(pages)].tolist(), list(pages))
        assert engine.store.publish([sequence], [tokens.size]) == (len(pages), 0)
    engine.land()


def loaded(engine: StampEngine, tokens: Tokens) -> Sequence:
    sequence = engine.open(tokens)
    engine.settle(sequence)
    return sequence


def assert_holds(engine: StampEngine, sequence: Sequence, pages: Values) -> None:
    found = engine.read(engine.block(sequence)[: len(pages)].tolist())
    np.testing.assert_array_equal(found.reshape(pages.shape), pages)


@pytest.mark.parametrize("axes", BY_LAYER)
def test_layers_of_different_sizes_go_through_every_tier_and_back(
    make_engine: MakeEngine, directories: Directories, axes: str
) -> None:
    """Where one layer's size was taken for all, wrong bytes came back for every other layer."""
    pages = painted(UNEVEN, 8)
    first = make_engine(geometry=UNEVEN, disk=1)
    assert len(set(first.store.device.shapes)) == 3
    compute(first, TOKENS, pages)
    with loaded(first, TOKENS) as sequence:
        assert sequence.reused == {Tier.DEVICE: 32}
        assert_holds(first, sequence, pages)
    for found, evicted in (
        (Tier.SHARED, (Tier.DEVICE, Tier.HOST)),
        (Tier.HOST, (Tier.DEVICE,)),
        (Tier.DISK, (Tier.DEVICE, Tier.HOST, Tier.SHARED)),
    ):
        evict_all(first.store, *evicted)
        with loaded(first, TOKENS) as sequence:
            assert sequence.reused == {found: 32}
            assert_holds(first, sequence, pages)
    first.store.close()
    second = make_engine(geometry=UNEVEN, disk=1)
    with loaded(second, TOKENS) as sequence:
        assert sequence.reused == {Tier.SHARED: 32}
        assert_holds(second, sequence, pages)
    second.store.close()
    shutil.rmtree(directories.shared)
    third = make_engine(geometry=UNEVEN, disk=1)
    with loaded(third, TOKENS) as sequence:
        assert sequence.reused == {Tier.DISK: 32}
        assert_holds(third, sequence, pages)


@pytest.mark.parametrize("axes", [STACKED])
@pytest.mark.parametrize("other", BY_LAYER)
def test_what_an_engine_with_stacked_layers_stored_one_with_a_list_of_layers_finds(
    make_engine: MakeEngine, other: str
) -> None:
    engine = make_engine()
    engine.cache(TOKENS)
    engine.store.close()
    engine = make_engine(axes=other)
    with loaded(engine, TOKENS) as sequence:
        assert sequence.reused == {Tier.SHARED: 32}
        engine.verify(sequence, 32)
    engine.cache(prompt(2, 17))
    engine.store.close()
    engine = make_engine()
    with loaded(engine, prompt(2, 17)) as sequence:
        assert sequence.ready == 16
        engine.verify(sequence)


def test_pages_of_other_layers_are_not_found(make_engine: MakeEngine) -> None:
    """Three layers of the same sizes in another order are another model's."""
    engine = make_engine(geometry=UNEVEN, axes=PER_LAYER)
    compute(engine, TOKENS, painted(UNEVEN, 8))
    engine.store.close()
    turned = PageGeometry(
        model="uneven", revision="s", layers=3, kv_heads=2, head_dim=8, dtype="float32", page_tokens=PAGE_TOKENS,
        layer_head_dims=((1, 8), (2, 16), (2, 8)),
    )  # fmt: skip
    with make_engine(geometry=turned, axes=PER_LAYER).open(TOKENS) as sequence:
        assert sequence.missing == 33


def test_a_narrow_dtype_is_kept_as_its_bits_in_every_layer(make_engine: MakeEngine) -> None:
    geometry = PageGeometry(
        model="narrow", revision="s", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=PAGE_TOKENS,
        layer_head_dims=((2, 8), (1, 32)),
    )  # fmt: skip
    engine = make_engine(geometry=geometry, axes="slot token head stream dim")
    assert engine.store.device.dtype == np.uint16
    assert engine.store.device.shapes == ((17, 4, 2, 2, 8), (17, 4, 1, 2, 32))
    pages = np.random.default_rng(1).integers(0, 2**32, (8, geometry.page_bytes // 4), np.uint32).view(np.float32)
    compute(engine, TOKENS, pages)
    evict_all(engine.store, Tier.DEVICE)
    with loaded(engine, TOKENS) as sequence:
        found = engine.read(engine.block(sequence)[:8].tolist())
    np.testing.assert_array_equal(found.view(np.uint32), pages.view(np.uint32))


@pytest.mark.parametrize(
    ("axes", "geometry", "words"),
    [
        ("layer slot token head", GEOMETRY, "do not name slot, token, head and dim once"),
        ("slot slot token head dim", GEOMETRY, "do not name"),
        ("slot token head dim layers", GEOMETRY, "do not name"),
        ("", GEOMETRY, "do not name"),
        (None, GEOMETRY, "do not name"),
        (STACKED, UNEVEN, "not all alike.*'stream slot token head dim'"),
        (PER_LAYER, PageGeometry.opaque(64, page_tokens=4, fingerprint={"a": 1}), "opaque"),
    ],
)
def test_axes_that_fit_no_pool_are_refused_before_anything_is_opened(
    axes: str, geometry: PageGeometry, words: str
) -> None:
    config = StoreConfig(geometry=geometry, device=DeviceTier(pages=4, axes=axes), host="1MiB")
    with pytest.raises(GeometryError, match=words):
        config.checked()


def test_axes_are_a_setting_like_others() -> None:
    values = {
        "geometry": {name: getattr(GEOMETRY, name) for name in ("model", "revision", "layers", "kv_heads", "head_dim")}
        | {"dtype": "float32", "page_tokens": 4},
        "device": {"pages": 4, "axes": PER_LAYER},
        "host": "1MiB",
    }
    assert from_mapping(values).device == DeviceTier(pages=4, axes=PER_LAYER)
