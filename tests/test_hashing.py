"""Prefix hashes are SGLang's chain, recomputed here with hashlib alone."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_kit import HASHES, hashes_by
from stepwell import _core
from stepwell.errors import TokenError
from stepwell.hashing import as_tokens, namespace_seed, prefix_hashes

TOKENS = st.integers(0, 2**31 - 1)


class Foreign:
    """An array of another library, whose elements are no ints: they must not be looked at one by one."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __repr__(self) -> str:
        return f"Foreign({self._values})"

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[object]:
        return (object() for _ in self._values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype)


def chain(tokens: list[int], page_tokens: int, seed: bytes | None) -> list[bytes]:
    """Compute the chain one page at a time, as its definition reads."""
    digests, prior = [], seed or b""
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = tokens[start : start + page_tokens]
        prior = hashlib.sha256(prior + struct.pack(f"<{page_tokens}I", *page)).digest()
        digests.append(prior)
    return digests


def as_list(hashes: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in hashes]


@pytest.mark.parametrize("implementation", HASHES)
@given(
    st.lists(TOKENS, max_size=200),
    st.integers(1, 70),
    st.none() | st.binary(min_size=32, max_size=32),
    st.integers(0, 15),
)
def test_prefix_hashes_are_the_chain_of_hashlib(
    implementation: str, tokens: list[int], page_tokens: int, seed: bytes | None, place: int
) -> None:
    memory = np.zeros(place + len(tokens), np.int32)  # wherever the first token lies
    memory[place:] = tokens
    with hashes_by(implementation):
        hashes = prefix_hashes(memory[place:], page_tokens=page_tokens, seed=seed)
    assert hashes.dtype == np.uint8
    assert hashes.shape == (len(tokens) // page_tokens, 32)
    assert as_list(hashes) == chain(tokens, page_tokens, seed)


@pytest.mark.parametrize("implementation", HASHES)
def test_a_page_of_any_number_of_tokens_is_hashed_as_hashlib_does(implementation: str) -> None:
    """Around every block of SHA-256, with and without 32 bytes of the page before: that shifts all blocks."""
    tokens = np.random.default_rng(1).integers(0, 2**31, 3 * 80, np.int32)
    with hashes_by(implementation):
        for page_tokens in range(1, 81):
            for seed in (None, b"\xa5" * 32):
                chosen = tokens[: 3 * page_tokens]
                hashes = prefix_hashes(chosen, page_tokens=page_tokens, seed=seed)
                assert as_list(hashes) == chain(chosen.tolist(), page_tokens, seed)


def test_golden_vectors_stay() -> None:
    tokens = list(range(1000, 1040))
    hashes = prefix_hashes(tokens, page_tokens=16)
    assert as_list(hashes) == chain(tokens, 16, None)
    assert (
        hashes[0].tobytes().hex()
        == "4faa8bd53eda3d89d365baa1cce7abcbe618600132b7664d8cccf18db778a47c"
    )
    assert (
        hashes[1].tobytes().hex()
        == "fc228fb55a288afeb5f7d93117caa44931dc430d6ecf7fcfa3c029ac60e0c6b6"
    )
    seed = namespace_seed("lora-7", "tenant")
    assert seed is not None
    assert seed.hex() == "88f39ab5b5327d46e3c9eb33d4d3305c93b9090d16e4c789ddc730d0e50b8973"
    assert (
        prefix_hashes(tokens, page_tokens=16, seed=seed)[1].tobytes().hex()
        == "8d3ebaaf1da86fb7ab433eb0e54157523d185db13f83f543100f65486a09d56d"
    )


def test_hashes_do_not_depend_on_the_process() -> None:
    program = (
        "from stepwell.hashing import namespace_seed, prefix_hashes\n"
        "seed = namespace_seed('a', None)\n"
        "print(prefix_hashes(list(range(64)), page_tokens=16, seed=seed).tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    seed = hashlib.sha256(
        b"sglang-cache-namespace-v1" + b"\x01" + (1).to_bytes(8, "little") + b"a" + b"\x00"
    ).digest()
    assert outputs.pop().strip() == b"".join(chain(list(range(64)), 16, seed)).hex()


def test_a_chain_goes_on_from_the_last_hash() -> None:
    tokens = np.arange(320, dtype=np.int32)
    whole = prefix_hashes(tokens, page_tokens=16)
    first = prefix_hashes(tokens[:160], page_tokens=16)
    rest = prefix_hashes(tokens[160:], page_tokens=16, seed=first[-1].tobytes())
    assert np.array_equal(np.concatenate([first, rest]), whole)


def test_one_token_changes_the_hashes_of_its_page_and_all_after_it() -> None:
    tokens = np.arange(160, dtype=np.int32)
    before = prefix_hashes(tokens, page_tokens=16)
    tokens[48] += 1
    after = prefix_hashes(tokens, page_tokens=16)
    assert [bool((a == b).all()) for a, b in zip(before, after, strict=True)] == [True] * 3 + [
        False
    ] * 7


def test_the_default_namespace_has_no_seed_and_every_other_its_own() -> None:
    assert namespace_seed(None, None) is None
    parts = [None, "", "a", "b", "ab", "\x00", "é"]
    pairs = [
        (adapter, salt) for adapter in parts for salt in parts if (adapter, salt) != (None, None)
    ]
    seeds = {namespace_seed(adapter, salt) for adapter, salt in pairs}
    assert len(seeds) == len(pairs)
    assert all(seed is not None and len(seed) == 32 for seed in seeds)
    expected = hashlib.sha256(
        b"sglang-cache-namespace-v1\x00\x01" + (2).to_bytes(8, "little") + "é".encode()
    ).digest()
    assert namespace_seed(None, "é") == expected


def test_a_contiguous_int32_array_is_not_copied() -> None:
    tokens = np.arange(10, dtype=np.int32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        array("i", [1, 2, 3]),
        [np.int64(1), 2, np.uint8(3)],
        np.array([1, 2, 3], dtype=np.int64),
        np.array([1, 2, 3], dtype=np.uint64),
        np.array([1, 2, 3], dtype=np.int8),
        np.array([1, 2, 3], dtype=">i4"),
        np.array([1, 9, 2, 9, 3, 9], dtype=np.int32)[::2],
        Foreign([1, 2, 3]),
    ],
    ids=repr,
)
def test_other_integers_become_contiguous_int32(tokens: object) -> None:
    result = as_tokens(tokens)  # type: ignore[arg-type]
    assert result.dtype == np.dtype("=i4")
    assert result.flags.c_contiguous
    assert result.tolist() == [1, 2, 3]


def test_no_tokens_are_fine() -> None:
    assert as_tokens([]).shape == (0,)
    assert prefix_hashes([], page_tokens=16).shape == (0, 32)
    assert prefix_hashes(np.zeros(15, np.int32), page_tokens=16).shape == (0, 32)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, -1], "token 1 is -1"),
        ([5, 2**31], "token 1 is 2147483648"),
        ([5, 6, 2**70], f"token 2 is {2**70}"),
        ([5, True], "token 1 is True"),
        ([5, 1.0], r"token 1 is 1\.0"),
        ([5, "6"], "token 1 is '6'"),
        ([[5]], r"token 0 is \[5\]"),
        ("56", "token 0 is '5'"),
        (np.array([5, -1], np.int32), "token 1 is -1"),
        (np.array([5, 2**31], np.int64), "token 1 is 2147483648"),
        (np.array([5, 2**63], np.uint64), "token 1 is 9223372036854775808"),
        (np.array([5.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (np.array([5], object), "dtype object"),
        (np.zeros((2, 2), np.int32), r"shape \(2, 2\)"),
        (np.array(5, np.int32), r"shape \(\)"),
        (Foreign([5, -1]), "token 1 is -1"),
        (Foreign([5.0]), "dtype float64"),
    ],
)
def test_what_is_no_token_is_refused_with_position_and_value(tokens: object, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        as_tokens(tokens)  # type: ignore[arg-type]


def test_a_seed_or_page_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        prefix_hashes([1], page_tokens=16, seed=bytes(31))
    with pytest.raises(ValueError, match="page_tokens"):
        prefix_hashes([1], page_tokens=0)


@pytest.mark.parametrize("implementation", HASHES)
def test_sha256_is_that_of_hashlib_at_every_length(implementation: str) -> None:
    data = np.random.default_rng(2).integers(0, 256, 1000, np.uint8).tobytes()
    with hashes_by(implementation):
        for size in [*range(301), 511, 512, 513, 1000]:
            assert _core.sha256(data[:size]) == hashlib.sha256(data[:size]).digest()


def test_hashing_releases_the_gil() -> None:
    # With a switch interval of an hour another thread gets the GIL only where it is given up.
    tokens = np.zeros(1 << 18, np.int32)
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
            prefix_hashes(tokens, page_tokens=16)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
    thread.join()
