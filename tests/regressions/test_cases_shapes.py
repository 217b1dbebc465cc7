"""Cases of kind 13 in docs/cases.md: page sizes, alignment, odd dtypes and counts of heads."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from case_kit import Box, config_of, tokens_of
from sequence_kit import StampEngine, prompt
from stepwell.config import DiskTier, StoreConfig
from stepwell.errors import GeometryError, LeaseClosedError
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.tiers import volumes
from store_kit import Directories

MakeEngine = Callable[..., StampEngine]


def test_data_and_scales_of_a_page_move_together(directories: Directories) -> None:
    """C088, sgl-project/sglang#36121: half-width data was moved and its scales were not.

    A page of data (uint8, two values a byte) and scales (fp8, one for 16 values) is lent as one row of bytes: its size
    is that of the buffers, and a part of it is refused. Side buffers as a kind of page of their own come with hybrid
    models.
    """
    data = np.random.default_rng(1).integers(0, 256, (16, 4 * 2 * 64 // 2), dtype=np.uint8)
    scales = np.random.default_rng(2).integers(0, 256, (16, 4 * 2 * 64 // 16), dtype=np.uint8)
    geometry = PageGeometry.opaque(
        data.shape[1] + scales.shape[1], page_tokens=4, fingerprint={"data": "fp4", "scale": "fp8/16", "heads": 2}
    )
    for tier in ("host", "shared", "disk"):
        with PageStore(config_of(directories, geometry, **{tier: 16})) as store:
            rows = np.concatenate([data, scales], axis=1)
            tokens = tokens_of(1, 64)
            store.save(tokens, source=store.lend(rows)[:]).transfer.result(120.0)
            out = np.full_like(rows, 0xEE)
            with store.match(tokens) as match:
                assert store.load(match, into=store.lend(out)[:]).result(120.0) == 16
            assert np.array_equal(out[:, : data.shape[1]], data)
            assert np.array_equal(out[:, data.shape[1] :], scales)
            assert store.stats().tiers[tier].bytes_written == data.nbytes + scales.nbytes
            with pytest.raises(GeometryError, match="bytes"):
                store.lend(data)


SIZES = list(itertools.product([1, 3, 63, 64, 576, 656, 1152, 4097], [1, 16, 64]))


@pytest.mark.parametrize("tier", ["host", "shared", "disk"])
def test_elements_of_any_size_round_trip(directories: Directories, tier: str) -> None:
    """C089, sgl-project/sglang#31600: elements of 576 and 656 bytes left the fast path, and the slow one crashed.

    24 sizes, 24 pages each; sanitizers: .ci/run runs the C++ tests of the same copies with them.
    """
    for number, (element, tokens) in enumerate(SIZES):
        geometry = PageGeometry.opaque(element * tokens, page_tokens=tokens, fingerprint={"element": element})
        place = Directories(directories.shared / str(number), directories.disk / str(number))
        for path in (place.shared, place.disk):
            path.parent.mkdir(mode=0o700, exist_ok=True)
        with Box(config_of(place, geometry, **{tier: 24}), slots=26) as box:
            box.save(tokens_of(number, 24 * tokens))
            box.arrays[0][:] = 0xEE
            with box.store.match(tokens_of(number, 24 * tokens)) as match:
                assert box.store.load(match, into=box.pool[1:25]).result(120.0) == 24, (element, tokens)
            assert np.array_equal(box.arrays[0][1:25], box.stamps(tokens_of(number, 24 * tokens)))
            assert (box.arrays[0][[0, 25]] == 0xEE).all()  # canaries


@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("page_bytes", [512, 4095, 4097, 3_098_112])
@pytest.mark.parametrize("direct", [True, False], ids=["", "without direct I/O"])
def test_pages_of_any_size_lie_aligned_on_any_file_system(
    directories: Directories,
    where: str,
    page_bytes: int,
    direct: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C091, vllm-project/vllm#52678: pages inside an aligned buffer were not aligned, and direct I/O refused them.

    Where a file system has no direct I/O, the page cache is used, and one line says so.
    """
    if not direct:
        monkeypatch.setattr(volumes._core, "file_direct_alignment", lambda _: 0)
    geometry = PageGeometry.opaque(page_bytes, page_tokens=1, fingerprint={"of": "cases"})
    place = directories if where == "disk" else Directories(directories.shared, directories.shared)
    with caplog.at_level(logging.WARNING, "stepwell"):
        for expected in (0, 3):
            with Box(config_of(place, geometry, disk=4), slots=8) as box:
                assert box.load(tokens_of(1, 3)) == expected  # the second time after a restart
                box.save(tokens_of(1, 3))
                assert box.load(tokens_of(1, 3)) == 3
                [member] = box.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
                assert member.held.direct_io <= direct
    lines = [record for record in caplog.records if "has no direct I/O" in record.getMessage()]
    assert len(lines) == (0 if member.held.direct_io else 2)  # one an open


def test_direct_io_that_was_not_asked_for_is_not_missed(
    directories: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    """C091, vllm-project/vllm#44016: who does without it on purpose hears nothing."""
    config = StoreConfig(
        geometry=PageGeometry.opaque(512, page_tokens=1, fingerprint={"of": "cases"}),
        disk=DiskTier("1MiB", str(directories.disk), volume_bytes="1MiB", direct_io=False),
    )
    with caplog.at_level(logging.WARNING, "stepwell"), Box(config) as box:
        box.save(tokens_of(1, 3))
        assert box.load(tokens_of(1, 3)) == 3
    assert "direct I/O" not in caplog.text


@pytest.mark.parametrize(("dtype", "raw", "axes"), [
    ("fp8_e4m3", np.uint8, "slot stream token head dim"),  # block first, an array a layer
    ("bfloat16", np.uint16, "stream slot token head dim"),  # K and V first
])  # fmt: skip
def test_offsets_come_from_strides(directories: Directories, dtype: str, raw: type, axes: str) -> None:
    """C094, LMCache/LMCache#2494: a block-first tensor was written at the offsets of a K/V-first one."""
    geometry = PageGeometry(
        model="strides", revision="1", layers=2, kv_heads=2, head_dim=8, dtype=dtype, page_tokens=4
    )
    sizes = {"slot": 10, "stream": 2, "token": 4, "head": 2, "dim": 8}
    shape = [sizes[name] for name in axes.split()]
    slot_axis = axes.split().index("slot")
    random = np.random.default_rng(4)
    source = [random.integers(0, np.iinfo(raw).max, shape, dtype=raw) for _ in range(2)]
    target = [np.full(shape, 0x77, raw) for _ in range(2)]
    with PageStore(config_of(directories, geometry, shared=8, disk=8)) as store:
        tokens = tokens_of(1, 32)
        store.save(tokens, source=store.lend(source, axes=axes)[1:9]).transfer.result(120.0)
        for evicted in (0, 8):
            store.evict(Tier.SHARED, evicted)
            for array in target:
                array[:] = 0x77
            with store.match(tokens) as match:
                assert store.load(match, into=store.lend(target, axes=axes)[1:9]).result(120.0) == 8
            for given, found in zip(source, target, strict=True):
                inner = np.arange(1, 9)
                assert np.array_equal(given.take(inner, slot_axis), found.take(inner, slot_axis))
                assert (found.take([0, 9], slot_axis) == 0x77).all()


def test_keys_shorter_than_a_page_match_nothing_and_split_nothing(directories: Directories) -> None:
    """C095, sgl-project/sglang#28692: a key of 63 tokens met a page of 64, and an edge of length 0 was made."""
    geometry = PageGeometry(
        model="long", revision="1", layers=1, kv_heads=1, head_dim=1, dtype="uint8", page_tokens=64
    )
    with Box(config_of(directories, geometry, host=8)) as box:
        tokens = tokens_of(1, 128)
        other = tokens.copy()
        other[63] += 1
        assert box.save(tokens[:64]).saved == 1
        for length, pages in ((63, 0), (1, 0), (0, 0), (65, 1), (127, 1), (128, 1)):
            assert box.load(tokens[:length]) == pages
            assert box.store.check() == ""
        assert box.load(other) == 0
        assert box.save(tokens[:63]).saved == 0
        assert box.save(other).saved == 2
        assert box.store.check() == ""
        assert box.store.evict(Tier.HOST, 8) == 3
        assert box.store.check() == ""
        assert box.save(tokens).saved == 2
        assert box.store.check() == ""


def test_many_requests_of_one_token_each_take_a_page_and_no_more(make_engine: MakeEngine) -> None:
    """C097, vllm-project/aibrix#2231: a buffer was sized by tokens, and each request was rounded up to a block.

    512 requests of one token in one call; half of them end between two calls.
    """
    engine = make_engine(device=520)
    store = engine.store
    sequences = store.open_many([prompt(number, 1) for number in range(512)])
    assert store.extend(sequences, [1] * 512).ok.all()
    assert store.stats().tiers["device"].arriving == 512
    tables = np.full((512, 4), -1, np.int32)
    store.block_tables(sequences, tables)
    assert len(set(tables[:, 0].tolist())) == 512
    assert (tables[:, 1:] == engine.scratch).all()
    for sequence in sequences[::2]:
        sequence.close()
    for old in (
        lambda: store.extend(sequences, [2] * 512),
        lambda: store.publish(sequences, [1] * 512),
        lambda: store.append(sequences, [7] * 512),
        lambda: store.block_tables(sequences, tables),
    ):
        with pytest.raises(LeaseClosedError):
            old()
    sequences[0].close()  # a second end does nothing
    rest = sequences[1::2]
    store.append(rest, [7] * 256)
    assert store.extend(rest, [2] * 256).ok.all()
    assert store.stats().tiers["device"].arriving == 256
    assert store.check() == ""


def test_the_directory_of_a_tier_is_the_one_that_was_named(directories: Directories, tmp_path: Path) -> None:
    """C092, ai-dynamo/dynamo#8438: in one version the path was /tmp whatever the setting said."""
    with Box(config_of(directories, disk=8)) as box:
        box.save(tokens_of(1, 16))
    assert directories.volumes("pages")
    assert {path.name for path in tmp_path.iterdir()} <= {"disk"}
