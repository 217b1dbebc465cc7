"""A geometry says what a page's bytes are, and its fingerprint tells any two apart."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell import _core
from stepwell.errors import GeometryError
from stepwell.geometry import ITEMSIZES, PageGeometry

# Of one size each: which of two formats of eight bits a value has is a matter of the fingerprint alone.
NUMPY_DTYPES = {
    "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16,
    "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8, "int8": np.int8, "uint8": np.uint8,
}  # fmt: skip
BASE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "revision": "r1",
    "layers": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "page_tokens": 16,
}


def geometry(**changes: Any) -> PageGeometry:
    return PageGeometry(**{**BASE, **changes})


def test_sizes_follow_from_the_fields() -> None:
    it = geometry()
    assert it.itemsize == 2
    assert it.layer_bytes == (2 * 16 * 8 * 128 * 2,) * 32
    assert it.page_bytes == 2 * 1024 * 1024
    assert geometry(streams=1, dtype="fp8_e4m3").page_bytes == 512 * 1024
    assert not it.is_opaque


def test_layers_may_differ() -> None:
    it = geometry(layers=3, layer_head_dims=((8, 128), (1, 576), (4, 64)))
    assert it.layer_bytes == tuple(2 * 16 * 2 * n for n in (1024, 576, 256))
    assert it.page_bytes == sum(it.layer_bytes)


def test_an_opaque_page_has_pieces_of_64_kib_the_last_one_shorter() -> None:
    it = PageGeometry.opaque(150_000, page_tokens=64, fingerprint={"model": "m", "layout": 3})
    assert it.is_opaque
    assert it.layer_bytes == (65536, 65536, 18928)
    assert it.layers == 3
    assert it.page_bytes == 150_000
    whole = PageGeometry.opaque(131072, page_tokens=64, fingerprint={"model": "m"})
    assert whole.layer_bytes == (65536, 65536)
    assert PageGeometry.opaque(1, page_tokens=1, fingerprint={"m": ""}).layer_bytes == (1,)


@given(
    st.sampled_from(sorted(ITEMSIZES)),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=5),
    st.booleans(), st.integers(1, 2), st.integers(1, 33), st.integers(0, 3),
)  # fmt: skip
def test_sizes_are_those_of_numpys_arrays(
    dtype: str, pairs: list[tuple[int, int]], is_alike: bool, streams: int, page_tokens: int, rank: int
) -> None:
    pairs = pairs[:1] * len(pairs) if is_alike else pairs
    it = geometry(
        layers=len(pairs), kv_heads=pairs[0][0], head_dim=pairs[0][1], dtype=dtype, page_tokens=page_tokens,
        streams=streams, layer_head_dims=None if is_alike else tuple(pairs), shard=(rank, 4),
    )  # fmt: skip
    layers = [np.empty((streams, page_tokens, heads, dim), NUMPY_DTYPES[dtype]) for heads, dim in pairs]
    assert it.layer_bytes == tuple(layer.nbytes for layer in layers)
    assert it.page_bytes == sum(layer.nbytes for layer in layers)
    assert it.itemsize == layers[0].itemsize
    shape = _core.PageShape(list(it.layer_bytes), it.fingerprint())
    assert (shape.layers, shape.page_bytes, tuple(shape.layer_bytes)) == (it.layers, it.page_bytes, it.layer_bytes)


@given(st.integers(1, 400_000))
def test_the_pieces_of_an_opaque_page_are_its_bytes_cut_every_64_kib(page_bytes: int) -> None:
    it = PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint={"m": 1})
    row = np.empty(page_bytes, np.uint8)
    assert it.layer_bytes == tuple(row[at : at + 65536].nbytes for at in range(0, page_bytes, 65536))


VARIANTS = [
    {},
    {"model": "llama-3.1-8c"},
    {"revision": "r2"},
    {"layers": 33},
    {"kv_heads": 4},
    {"head_dim": 64},
    *({"dtype": dtype} for dtype in ITEMSIZES if dtype != "bfloat16"),
    {"page_tokens": 32},
    {"streams": 1},
    {"shard": (0, 2)},
    {"shard": (1, 2)},
    {"layer_head_dims": ((8, 128),) * 32},
    {"layer_head_dims": ((4, 128),) * 32},
    {"extra": (("rope", "yarn"),)},
    {"extra": (("rope", "yarn-4"),)},
    {"extra": (("rope", 4),)},
    {"extra": (("rope", "4"),)},
    {"extra": (("a", "b"), ("rope", "yarn"))},
    {"model": "llama-3.1-8br1", "revision": "x"},
    {"model": "llama-3.1-8b", "revision": "r1x"},
]


def test_geometries_that_differ_in_one_field_have_different_fingerprints() -> None:
    prints = [geometry(**changes).fingerprint() for changes in VARIANTS]
    prints += [
        PageGeometry.opaque(size, page_tokens=tokens, fingerprint=names).fingerprint()
        for size, tokens, names in [
            (65536, 16, {"a": "b"}),
            (65537, 16, {"a": "b"}),
            (65536, 17, {"a": "b"}),
            (65536, 16, {"a": "c"}),
            (65536, 16, {"ab": ""}),
            (65536, 16, {"a": "b", "c": 1}),
            (65536, 16, {"a": "b", "c": "1"}),
        ]
    ]
    assert all(len(fingerprint) == 32 for fingerprint in prints)
    assert len(set(prints)) == len(prints)
    assert {field.name for field in dataclasses.fields(PageGeometry)} == {
        *BASE,
        "streams",
        "shard",
        "layer_head_dims",
        "extra",
        "opaque_bytes",
    }, "a new field needs a variant above"


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
NAMES = st.dictionaries(
    TEXT, st.text(st.characters(codec="utf-8"), max_size=8) | st.integers(-5, 5), max_size=3
)
ANY = st.builds(
    PageGeometry,
    model=TEXT,
    revision=TEXT,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(list(ITEMSIZES)),
    page_tokens=st.integers(1, 3),
    streams=st.integers(1, 2),
    shard=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    extra=NAMES.map(lambda names: tuple(sorted(names.items()))),
)


@given(ANY, ANY)
def test_fingerprints_are_equal_exactly_where_geometries_are(
    a: PageGeometry, b: PageGeometry
) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


def test_the_order_of_an_opaque_fingerprint_does_not_matter() -> None:
    a = PageGeometry.opaque(10, page_tokens=1, fingerprint={"x": 1, "y": "2"})
    b = PageGeometry.opaque(10, page_tokens=1, fingerprint={"y": "2", "x": 1})
    assert a == b
    assert a.fingerprint() == b.fingerprint()


def test_the_fingerprint_stays() -> None:
    # A change here makes every existing volume foreign: raise FINGERPRINT_FORMAT and say so.
    assert (
        geometry().fingerprint().hex()
        == "7f6ea5640c2f59e3321bde3076bad49c09d1dd8f0695e21343ff04c20d0e2de2"
    )


def test_the_fingerprint_does_not_depend_on_the_process() -> None:
    program = (
        "from stepwell.geometry import PageGeometry\n"
        "names = {'b': 1, 'a': 'x', 'c': 'y'}\n"
        "print(PageGeometry.opaque(9, page_tokens=1, fingerprint=names).fingerprint().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "77")
    }
    here = PageGeometry.opaque(9, page_tokens=1, fingerprint={"a": "x", "b": 1, "c": "y"})
    assert outputs == {here.fingerprint().hex()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model has 0 bytes"),
        ({"model": 7}, "model is 7"),
        ({"model": "\ud800"}, "not valid Unicode"),
        ({"revision": "r" * 5000}, "revision has 5000 bytes"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": 65537}, "layers is 65537"),
        ({"layers": True}, "layers is True"),
        ({"layers": 2.0}, r"layers is 2\.0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"head_dim": 2**21}, "head_dim is 2097152"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"streams": 3}, "streams is 3"),
        ({"dtype": "bf16"}, "dtype 'bf16' is unknown"),
        ({"dtype": ["float32"]}, "is unknown"),
        ({"shard": (1, 1)}, "shard is"),
        ({"shard": (-1, 1)}, "shard is"),
        ({"shard": [0, 1]}, "shard is"),
        ({"shard": (False, 1)}, "shard is"),
        ({"layer_head_dims": ((8, 128),)}, "layer_head_dims is"),
        ({"layers": 1, "layer_head_dims": ((8, 0),)}, r"layer_head_dims\[0\]\[1\] is 0"),
        ({"layers": 1, "layer_head_dims": ((8,),)}, r"layer_head_dims\[0\] is"),
        ({"extra": [("a", "b")]}, "extra is"),
        ({"extra": (("a",),)}, "extra holds"),
        ({"extra": (("a", 1.5),)}, r"extra\['a'\] is 1\.5"),
        ({"extra": (("b", 1), ("a", 1))}, "not sorted"),
        ({"extra": (("a", 1), ("a", 1))}, "not sorted and unique"),
        ({"opaque_bytes": -1}, "opaque_bytes is -1"),
        ({"opaque_bytes": 100}, r"use PageGeometry\.opaque"),
        ({"page_tokens": 2**20}, "lower page_tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_field_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        geometry(**changes)


@pytest.mark.parametrize(
    ("page_bytes", "fingerprint", "message"),
    [
        (0, {"a": 1}, "page_bytes is 0"),
        (2**32, {"a": 1}, "page_bytes is 4294967296"),
        (10, {}, "at least one entry"),
        (10, [("a", 1)], "not a mapping"),
        (10, {1: "a"}, "a name in fingerprint is 1"),
        (10, {"a": None}, r"extra\['a'\] is None"),
    ],
)
def test_an_opaque_page_that_cannot_be_is_refused(
    page_bytes: int, fingerprint: Any, message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint=fingerprint)


def test_a_geometry_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry().layers = 3  # type: ignore[misc]
