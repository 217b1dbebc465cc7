"""Checksums, copies, pools, the guard and fault points, through Python."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_kit import CHECKSUMS, EDGES, HASHES, Guarded, checksums_by, crc32c
from stepwell import _core

Bytes = npt.NDArray[np.uint8]


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def pool_of(
    shape: _core.PageShape,
    views: list[tuple[int, int, int, int, int, int, int]],
    *,
    streams: int,
    slots: int,
    writable: bool = True,
) -> _core.Pool:
    """Make a pool of rows (base, slot, outer, inner stride, outer, inner count, piece bytes)."""
    columns = list(zip(*views, strict=True))
    dtypes = (np.uint64, np.int64, np.int64, np.int64, np.uint32, np.uint32, np.uint64)
    arrays = [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]
    return _core.Pool(shape, streams, *arrays, slots, writable)


def pool_over(array: npt.NDArray[np.float16], *, writable: bool = True) -> _core.Pool:
    """Lend a layer-first pool [layers, streams, slots, tokens, heads, dim]."""
    layers, streams, slots, tokens, heads, dim = array.shape
    piece = dim * array.itemsize
    shape = _core.PageShape([streams * tokens * heads * piece] * layers, bytes(32))
    base, stride = array.__array_interface__["data"][0], array.strides
    views = [
        (
            base + layer * stride[0] + stream * stride[1],
            stride[2],
            stride[3],
            stride[4],
            tokens,
            heads,
            piece,
        )
        for layer in range(layers)
        for stream in range(streams)
    ]
    return pool_of(shape, views, streams=streams, slots=slots, writable=writable)


def test_crc32c_has_its_known_value() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert _core.crc32c(b"56789", _core.crc32c(b"1234")) == 0xE3069283
    assert _core.crc32c(b"") == 0


SIZES = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(max(0, edge - 70), edge + 70)) | st.integers(0, 9000)
PLACES = st.integers(0, 63)


@pytest.mark.parametrize("implementation", CHECKSUMS)
@given(SIZES, PLACES, PLACES, st.integers(0, 2**32 - 1))
def test_a_copy_of_any_size_and_alignment_writes_its_bytes_and_no_other_and_returns_their_checksum(
    implementation: str, size: int, from_place: int, to_place: int, crc: int
) -> None:
    source, target = Guarded(size, from_place), Guarded(size, to_place)
    source.fill(np.random.default_rng(size))
    before, expected = source.whole.copy(), target.whole.copy()
    expected[target.first : target.first + size] = source.inside
    with checksums_by(implementation):
        assert _core.crc32c_copy(target.inside, source.inside, crc) == crc32c(source.inside.tobytes(), crc)
        assert np.array_equal(target.whole, expected)
        target.inside[:] = 0
        _core.stream_copy(target.inside, source.inside)
        assert np.array_equal(target.whole, expected)
        assert np.array_equal(source.whole, before)


@pytest.mark.parametrize("implementation", CHECKSUMS)
@given(SIZES, SIZES, PLACES, st.integers(0, 2**32 - 1))
def test_a_checksum_is_that_of_the_definition_whether_made_at_once_in_parts_or_joined(
    implementation: str, first: int, second: int, place: int, crc: int
) -> None:
    memory = Guarded(first + second, place)
    memory.fill(np.random.default_rng(first))
    whole = crc32c(memory.inside.tobytes(), crc)
    a, b = memory.inside[:first], memory.inside[first:]
    with checksums_by(implementation):
        assert _core.crc32c(memory.inside, crc) == whole
        assert _core.crc32c(memory.inside.tobytes(), crc) == whole
        assert _core.crc32c(b, _core.crc32c(a, crc)) == whole
        assert _core.crc32c_combine(_core.crc32c(a, crc), _core.crc32c(b), second) == whole


def test_a_way_to_compute_that_the_machine_has_not_is_refused() -> None:
    for use, implementation, implementations in (
        (_core.use_crc32c, _core.crc32c_implementation, CHECKSUMS),
        (_core.use_sha256, _core.sha256_implementation, HASHES),
    ):
        assert implementation() == implementations[0]
        assert not use("abacus")
        assert implementation() == implementations[0]
        for name in reversed(implementations):
            assert use(name)
            assert implementation() == name


def test_a_copy_between_arrays_of_different_size_or_into_a_read_only_one_is_refused() -> None:
    target = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="target has 8 bytes, source 9"):
        _core.crc32c_copy(target, np.ones(9, np.uint8))
    with pytest.raises(ValueError, match="target has 8 bytes, source 7"):
        _core.stream_copy(target, np.ones(7, np.uint8))
    target.flags.writeable = False
    with pytest.raises(TypeError):
        _core.stream_copy(target, np.ones(8, np.uint8))
    assert not target.any()


def test_statuses_are_numbered_and_named_as_in_the_core() -> None:
    names = (
        "ok pending queue_full full cancelled deadline io_error checksum stale bus_fault "
        "closed poisoned invalid failed gone"
    )
    assert [status.name for status in _core.Status] == names.split()
    assert [status.value for status in _core.Status] == list(range(15))
    assert int(_core.Status.checksum) == 7


def test_a_shape_shows_what_it_was_made_of() -> None:
    shape = _core.PageShape([10, 20], bytes(range(32)))
    assert (shape.layers, shape.page_bytes, list(shape.layer_bytes)) == (2, 30, [10, 20])
    assert shape.fingerprint == bytes(range(32))
    with pytest.raises(ValueError, match="31 bytes, not 32"):
        _core.PageShape([1], bytes(31))
    with pytest.raises(ValueError, match="at least one layer"):
        _core.PageShape([], bytes(32))
    with pytest.raises(ValueError, match="4 GiB"):
        _core.PageShape([2**32], bytes(32))


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(0, 255),
    st.binary(max_size=64),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=1, max_size=100),
)
def test_layer_checksum_is_that_of_the_format(
    fingerprint: bytes, epoch: int, kind: int, key: bytes, layer: int, data: bytes
) -> None:
    shape = _core.PageShape([len(data)], fingerprint)
    seed = _core.page_seed(shape, key, epoch=epoch, kind=kind)
    prefix = (
        fingerprint
        + epoch.to_bytes(8, "little")
        + bytes([kind])
        + len(data).to_bytes(4, "little")
        + bytes([len(key)])
        + key
    )
    assert seed == crc32c(prefix)
    message = prefix + layer.to_bytes(4, "little") + data
    assert _core.layer_checksum(seed, layer, np.frombuffer(data, np.uint8)) == crc32c(message)


def test_a_key_of_more_than_64_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="65 bytes"):
        _core.page_seed(_core.PageShape([1], bytes(32)), bytes(65))


def test_a_pool_refuses_what_does_not_fit_it() -> None:
    array = np.zeros((2, 2, 3, 4, 2, 8), np.float16)
    pool = pool_over(array)
    page = np.zeros(2 * 2 * 4 * 2 * 8 * 2, np.uint8)
    assert (pool.slots, pool.layers, pool.writable) == (3, 2, True)
    with pytest.raises(ValueError, match="invalid"):
        pool.gather(3, page)
    with pytest.raises(ValueError, match="invalid"):
        pool.scatter(3, page)
    with pytest.raises(ValueError, match="target has 255 bytes, a page has 512"):
        pool.gather(0, page[:255])
    with pytest.raises(ValueError, match="source has 255 bytes"):
        pool.scatter(0, page[:255])
    with pytest.raises(ValueError, match="invalid"):
        pool_over(array, writable=False).scatter(0, page)
    with pytest.raises(ValueError, match=r"layer 0 have 16 bytes .* geometry says 17"):
        pool_of(
            _core.PageShape([17], bytes(32)),
            [(array.__array_interface__["data"][0], 16, 0, 0, 1, 1, 16)],
            streams=1,
            slots=1,
        )


def test_copies_release_the_gil() -> None:
    # With a switch interval of an hour another thread gets the GIL only where it is given up.
    source = random_bytes(1 << 20)
    target = np.zeros_like(source)
    ready, go = threading.Event(), threading.Lock()
    ran: list[bool] = []

    def wait_and_run() -> None:
        ready.set()
        with go:
            ran.append(True)

    interval = sys.getswitchinterval()
    go.acquire()
    sys.setswitchinterval(3600)
    try:
        thread = threading.Thread(target=wait_and_run)
        thread.start()
        ready.wait()
        go.release()
        for _ in range(1000):
            _core.crc32c_copy(target, source)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
    thread.join()


@pytest.fixture
def faults() -> Iterator[None]:
    _core.fault_clear()
    yield
    _core.fault_clear()


@pytest.mark.usefixtures("faults")
def test_fault_points_can_be_armed_and_cleared() -> None:
    _core.fault_arm("file.pread", "errno", nth=1, value=errno.EIO)
    assert _core.fault_reached("file.pread") == 0
    assert _core.fault_paused("*") == 0
    assert not _core.fault_wait_paused("file.pread", 0.0)
    _core.fault_resume("file.pread")
    with pytest.raises(ValueError, match="unknown fault action 'explode'"):
        _core.fault_arm("file.pread", "explode")


GUARD_PROGRAM = """
import faulthandler, sys
from stepwell import _core
before, after = sys.argv[1] == "before", sys.argv[1] == "after"
if before:
    faulthandler.enable()
assert _core.guard_install() and _core.guard_install()
assert _core.guard_is_ours()
if after:
    faulthandler.enable()
    assert not _core.guard_is_ours()
    faulthandler.disable()
    assert _core.guard_is_ours()
assert _core.guard_caught() == 0
import os, signal
os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_the_guard_lives_with_faulthandler_and_leaves_other_faults_to_it(when: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", GUARD_PROGRAM, when],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"},
    )
    assert result.returncode == -7, result.stderr  # SIGBUS
    assert ("Fatal Python error: Bus error" in result.stderr) == (when == "before")
    assert "AssertionError" not in result.stderr
