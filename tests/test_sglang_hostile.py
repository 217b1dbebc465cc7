"""The SGLang backend, given what is no argument: no call that SGLang's threads make raises, each answers "nothing" in
the shape that SGLang counts, says what was wrong in one line, and moves no byte. What it calls to attach refuses.

On stand-ins of torch and SGLang; lines are those of SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_pool_standin import (
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
from stepwell import StepwellUsageError
from test_sglang_storage import adapter, fill, hashes, open_storage, pages_of

__all__ = ["adapter", "open_storage"]

Open = Callable[..., Any]
KEYS = hashes(3)
MANY = np.arange(12)


def tensor(values: Any, dtype: Any = np.int64) -> Tensor:
    return Tensor(np.array(values, dtype=dtype))


class Unreadable(Tensor):
    """A tensor of which torch makes no array, and that it does not fill: bfloat16, sparse, of the device meta."""

    def numpy(self) -> np.ndarray:
        raise TypeError("Got unsupported ScalarType BFloat16")

    contiguous = view = cpu = detach = reshape = lambda self, *_: self

    def copy_(self, other: Tensor) -> Tensor:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation")


NO_KEYS = {
    "none": (None, 0),
    "a text": (KEYS[0], 64),
    "a number": (7, 0),
    "bytes": ([KEYS[0].encode()] * 3, 3),
    "a none among them": ([KEYS[0], None, KEYS[2]], 3),
    "a list among them": ([KEYS[0], [KEYS[1]], KEYS[2]], 3),
    "a set": (set(KEYS), 3),
    "an array": (np.array(KEYS), 3),
    "a generator": ((key for key in KEYS), 0),
}
NO_INDICES = {
    "none": None,
    "a list": list(range(12)),
    "an array": MANY,
    "floats": tensor(MANY, np.float32),
    "of bfloat16": Unreadable(MANY),
    "truths": tensor(MANY % 2 == 0, np.bool_),
    "negative": tensor(MANY - 12),
    "beyond the pool": tensor(MANY + 16 * 4),
    "far beyond": tensor(MANY + (1 << 62)),
    "too few": tensor(MANY[:11]),
    "too many": tensor(np.arange(16)),
    "none of them": tensor([]),
    "in rows": tensor(MANY.reshape(3, 4)),
    "a number": tensor(3),
    "no whole pages": tensor(MANY + 1),
    "backwards": tensor(MANY[::-1].copy()),
    "of steps": Tensor(np.arange(24)[::2]),
}
NO_EXTRA = {
    "a dict": {"prefix_keys": KEYS},
    "a text for keys": HiCacheStorageExtraInfo(KEYS[0]),  # type: ignore[arg-type]
    "numbers for keys": HiCacheStorageExtraInfo([1, 2]),  # type: ignore[list-item]
}
NO_PAGES = {
    "none": None,
    "a tensor": tensor(MANY),
    "a text": "abc",
    "too few": [tensor(MANY)] * 2,
    "a none among them": [None] * 3,
    "of other sizes": [tensor(MANY)] * 3,
    "unreadable": [Unreadable(np.zeros(384, np.float16))] * 3,
    "arrays": [np.zeros(384, np.float16)] * 3,
}
NO_TRANSFERS = {
    "a text": "kv",
    "a number": 3,
    "one alone": PoolTransfer(PoolName.MAMBA, None, KEYS),
    "names": [PoolName.MAMBA],
    "a none among them": [None],
    "of no name": [PoolTransfer(None, tensor(MANY), KEYS)],  # type: ignore[arg-type]
    "keys that are a text": [PoolTransfer(PoolName.KV, tensor(MANY), KEYS[0])],  # type: ignore[arg-type]
}


class Storage:
    """A backend with three pages kept, whose pool shows whether a byte was moved."""

    def __init__(self, open_storage: Open, caplog: pytest.LogCaptureFixture, pool: Any = None) -> None:
        self.pool = MHATokenToKVPoolHost("page_first") if pool is None else pool
        fill(self.pool)
        self.backend = open_storage(self.pool, StatePool())
        assert all(self.backend.batch_set_v1(KEYS, pages_of(self.pool, 0, 1, 2)))
        self.caplog = caplog
        self.before = self.pool.kv_buffer.array.tobytes()

    def gives(self, answer: Any, call: str, *args: Any) -> None:
        """Check what a call answers, that it has said why in one line, and that it has changed nothing."""
        self.backend._says._at = float("-inf")
        self.caplog.clear()
        with self.caplog.at_level(logging.WARNING, logger="stepwell"):
            assert getattr(self.backend, call)(*args) == answer
        said = [record for record in self.caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1, [record.getMessage() for record in said]
        assert said[0].exc_info is None, f"nobody foresaw this: {said[0].getMessage()}"
        assert said[0].getMessage().startswith(("set: " if call == "set" else f"{call}: ", "batch_exists: "))
        assert self.pool.kv_buffer.array.tobytes() == self.before
        assert self.backend.batch_exists(KEYS) == 3


@pytest.fixture
def storage(open_storage: Open, caplog: pytest.LogCaptureFixture) -> Storage:
    return Storage(open_storage, caplog)


@pytest.mark.parametrize("odd", NO_KEYS)
def test_what_are_no_keys_are_none_that_is_here(storage: Storage, odd: str) -> None:
    keys, count = NO_KEYS[odd]
    no, indices = [False] * count, tensor(MANY)
    storage.gives(0, "batch_exists", keys)
    storage.gives(no, "batch_get_v1", keys, indices)
    storage.gives(no, "batch_set_v1", keys, indices)
    storage.gives([None] * count, "batch_get", keys, None)
    storage.gives(False, "batch_set", keys, [storage.pool.get_data_page(0)] * 3)
    result = storage.backend.batch_exists_v2(keys, [])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})


@pytest.mark.parametrize("key", [None, 7, b"x", ["x"]])
def test_what_is_no_key_is_not_here(storage: Storage, key: Any) -> None:
    storage.gives(False, "exists", key)
    storage.gives(False, "set", key, storage.pool.get_data_page(0))
    storage.backend._says._at = float("-inf")
    assert storage.backend.get(key) is None


@pytest.mark.parametrize("odd", NO_INDICES)
def test_what_are_no_host_indices_move_nothing(storage: Storage, odd: str) -> None:
    indices = NO_INDICES[odd]
    storage.gives([False] * 3, "batch_get_v1", KEYS, indices)
    storage.gives([False] * 3, "batch_set_v1", hashes(3, "new"), indices)
    assert storage.backend.batch_exists(hashes(3, "new")) == 0


def test_indices_need_not_lie_side_by_side_or_be_of_64_bits(storage: Storage) -> None:
    spread = np.repeat(MANY, 2)[::2]
    for indices in (Tensor(spread), tensor(MANY, np.int32), tensor(MANY, np.uint8)):
        assert storage.backend.batch_get_v1(KEYS, indices) == [True] * 3


def test_a_page_of_the_pool_holds_one_page_alone(storage: Storage) -> None:
    twice = tensor([*range(4), *range(4), *range(4, 8)])
    storage.gives([False] * 3, "batch_get_v1", KEYS, twice)
    storage.gives([False] * 3, "batch_set_v1", hashes(3, "new"), twice)


def test_a_page_of_a_pool_that_hands_out_pages_holds_one_page_alone(
    open_storage: Open, caplog: pytest.LogCaptureFixture
) -> None:
    side = PageOnlyPool()
    storage = open_storage(MHATokenToKVPoolHost("page_first"), side)
    assert storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, pages_of(side, 0, 1), KEYS[:2])]) == {"mamba": [True] * 2}
    twice = PoolTransfer(PoolName.MAMBA, pages_of(side, 5, 5), KEYS[:2])
    assert storage.batch_get_v2([twice]) == {"mamba": [False] * 2}
    assert "name a page of the pool twice" in caplog.text


def test_a_key_that_is_named_twice_is_one_page(storage: Storage) -> None:
    new = hashes(2, "twice")
    named = [new[0], new[0], new[1]]
    assert storage.backend.batch_set_v1(named, pages_of(storage.pool, 0, 3, 1)) == [True] * 3
    assert storage.backend.batch_exists(named) == 3
    assert storage.backend.batch_get_v1(named, pages_of(storage.pool, 9, 10, 11)) == [True] * 3
    for page, of in ((9, 0), (10, 0), (11, 1)):
        assert np.array_equal(
            storage.pool.element(page).view(np.uint16), storage.pool.element(of).view(np.uint16)
        )


def test_batches_of_nothing_are_answered_with_nothing(storage: Storage) -> None:
    backend, none = storage.backend, tensor([])
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], none) == []
    assert backend.batch_set_v1([], none) == []
    assert backend.batch_get([], []) == []
    assert backend.batch_set([], [])
    assert backend.batch_get_v2([]) == {}
    assert backend.batch_set_v2([]) == {}
    assert backend.batch_exists_v2([], []).kv_hit_pages == 0
    assert backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, tensor([0]), [])]) == {"mamba": []}


@pytest.mark.parametrize("odd", NO_EXTRA)
def test_what_are_no_prefix_hashes_keep_nothing(storage: Storage, odd: str) -> None:
    storage.gives([False] * 3, "batch_set_v1", hashes(3, "new"), tensor(MANY), NO_EXTRA[odd])


@pytest.mark.parametrize("odd", NO_PAGES)
def test_what_are_no_pages_are_not_kept(storage: Storage, odd: str) -> None:
    storage.gives(False, "batch_set", hashes(3, "new"), NO_PAGES[odd])
    if odd not in ("none", "a none among them"):  # then the tensors are ours to make
        storage.gives([None] * 3, "batch_get", KEYS, NO_PAGES[odd])


@pytest.mark.parametrize("odd", NO_TRANSFERS)
def test_what_are_no_transfers_move_nothing(storage: Storage, odd: str) -> None:
    storage.gives({}, "batch_get_v2", NO_TRANSFERS[odd])
    storage.gives({}, "batch_set_v2", NO_TRANSFERS[odd])
    storage.backend._says._at = float("-inf")
    assert storage.backend.batch_exists_v2(KEYS, NO_TRANSFERS[odd]).kv_hit_pages == 0


def test_a_transfer_of_a_pool_that_nobody_registered_is_answered_key_by_key(storage: Storage) -> None:
    transfer = PoolTransfer(PoolName.DRAFT, tensor(MANY), KEYS)
    storage.gives({PoolName.DRAFT: [False] * 3}, "batch_get_v2", [transfer])
    storage.gives({PoolName.DRAFT: [False] * 3}, "batch_set_v2", [transfer])


def test_what_nobody_foresaw_is_a_miss_and_is_said_with_where_it_was(
    storage: Storage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of a pool")

    backend = storage.backend
    monkeypatch.setattr(type(backend._members["kv"].store), "probe", broken)
    monkeypatch.setattr(type(backend._members["kv"].store), "stats", broken)
    with caplog.at_level(logging.WARNING, logger="stepwell"):
        assert backend.batch_exists(KEYS) == 0
    assert "ZeroDivisionError: of a pool" in caplog.text
    assert caplog.records[-1].exc_info is not None
    assert backend.get_stats() is None, "which SGLang's scheduler calls, unified_radix_cache.py:3702"
    backend._says._at = float("-inf")
    backend.batch_exists(None)
    assert "(1 more since the last line)" in caplog.text


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=70), st.sampled_from(KEYS)), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from(list(NO_INDICES.values())), st.just(KEYS), st.just(tuple(KEYS)),
    st.lists(st.integers(-5, 70), max_size=16).map(tensor),
    st.builds(
        PoolTransfer, st.one_of(st.sampled_from(PoolName), st.none(), st.text(max_size=3)),
        st.one_of(st.none(), st.lists(st.integers(-5, 70), max_size=6).map(tensor)),
        st.one_of(st.none(), st.just(KEYS), st.lists(st.text(max_size=3), max_size=3)), st.sampled_from(PoolHitPolicy),
    ),
)  # fmt: skip
CALLS = {
    "batch_exists": 2, "batch_get_v1": 3, "batch_set_v1": 3, "batch_exists_v2": 3, "batch_get_v2": 2, "batch_set_v2": 2,
    "batch_get": 3, "batch_set": 4, "get": 3, "set": 4, "exists": 1,
}  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_it_is_given_no_call_raises_and_nobody_foresaw_none(storage: Storage, data: st.DataObject) -> None:
    call = data.draw(st.sampled_from(sorted(CALLS)))
    args = [data.draw(st.one_of(JUNK, st.lists(JUNK, max_size=3))) for _ in range(CALLS[call])]
    args = args[: data.draw(st.integers(1, len(args)))]
    if call in ("batch_get_v1", "batch_set_v1") and len(args) < 2:
        args.append(None)
    storage.backend._says._at = float("-inf")
    storage.caplog.clear()
    getattr(storage.backend, call)(*args)
    unforeseen = [record.getMessage() for record in storage.caplog.records if record.exc_info]
    assert unforeseen == []


# ---- pools --------------------------------------------------------------------------------------------------------




MADE = Callable[[], Any]
ODD_POOLS: dict[str, tuple[MADE, str, Any, str]] = {
    f"{field} {value!r}": (lambda: MHATokenToKVPoolHost("page_first"), field, value, f"{field} is {value!r}")
    for field, value in [
        ("page_size", 0), ("page_size", -4), ("page_size", 2.5), ("page_size", "4"),
        ("layer_num", 0), ("layer_num", None), ("head_num", 0), ("head_num", "two"), ("head_dim", 0),
        ("head_dim", None), ("v_head_dim", 0), ("size", 0), ("size", None), ("size", 65), ("size", True),
        ("layout", None), ("layout", ""), ("kv_buffer", None), ("kv_buffer", 7),
    ]
}  # fmt: skip
ODD_POOLS |= {
    f"latents: {field} {value!r}": (lambda: MLATokenToKVPoolHost("page_first"), field, value, f"{field} is {value!r}")
    for field, value in [("kv_cache_dim", 0), ("layer_num", 0), ("page_size", 0), ("kv_buffer", None)]
}


@pytest.mark.parametrize("odd", ODD_POOLS)
def test_a_pool_whose_fields_are_none_is_refused_at_attach_with_the_field(open_storage: Open, odd: str) -> None:
    make, field, value, said = ODD_POOLS[odd]
    pool = make()
    setattr(pool, field, value)
    with pytest.raises(StepwellUsageError) as raised:
        open_storage(pool)
    message = str(raised.value)
    assert message.startswith("host pool kv (")
    assert (said if value is not None or field == "layout" else f"{field} is None") in message or (
        field == "kv_buffer" and "kv_buffer is" in message
    )


@pytest.mark.parametrize(("field", "value"), [("layer_num", 9), ("head_num", 64), ("size", 6400)])
def test_a_buffer_that_is_smaller_than_the_pool_says_is_refused(open_storage: Open, field: str, value: int) -> None:
    pool = MHATokenToKVPoolHost("page_first")
    setattr(pool, field, value)
    with pytest.raises(StepwellUsageError, match="kv_buffer has 12288 bytes"):
        open_storage(pool)


def test_a_layout_that_nobody_knows_is_refused_at_attach(open_storage: Open) -> None:
    """SGLang's pools raise ValueError for it in each call (pool_host/mha.py:690)."""

    class Unknown(MHATokenToKVPoolHost):
        def get_page_buffer_meta(self, indices: Tensor) -> tuple[list[int], list[int]]:
            raise ValueError(f"Unsupported layout: {self.layout}")

        def get_data_page(self, index: int, flat: bool = True) -> Tensor:
            raise ValueError(f"Unsupported layout: {self.layout}")

        def get_dummy_flat_data_page(self) -> Tensor:
            return tensor(np.zeros(384), np.float16)

    pool = Unknown("page_first")
    pool.layout = "page_sideways"
    with pytest.raises(StepwellUsageError, match="page_sideways.*names neither addresses nor pages"):
        open_storage(pool)


class Answers(StatePool):
    """A pool that names what it was told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def get_page_buffer_meta(self, indices: Tensor) -> Any:
        return self.answer

    def get_dummy_flat_data_page(self) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    "answer",
    [None, ([], []), ([0], [4]), ([64], [0]), ([64], [-8]), ([64, 128], [4]), ([64], None), (None, [4]), ([None], [4]),
     ([64.5], ["x"]), ([[64]], [[4]]), 7],
    ids=repr,
)  # fmt: skip
def test_a_pool_that_names_no_addresses_and_hands_out_no_pages_is_refused(open_storage: Open, answer: Any) -> None:
    with pytest.raises(StepwellUsageError, match=r"host pool mamba \(Answers, layout page_first\)"):
        open_storage(MHATokenToKVPoolHost("page_first"), Answers(answer))


def test_a_pool_whose_pages_are_not_of_one_size_is_refused(open_storage: Open) -> None:
    class Uneven(PageOnlyPool):
        def get_dummy_flat_data_page(self) -> Tensor:
            return tensor(np.zeros(95), np.uint8)

    with pytest.raises(StepwellUsageError, match="makes 95 bytes, get_data_page 96"):
        open_storage(MHATokenToKVPoolHost("page_first"), Uneven())


@pytest.mark.parametrize("pool", [None, 7, "kv", object()])
def test_what_is_no_pool_is_refused_at_attach(open_storage: Open, pool: Any) -> None:
    with pytest.raises(StepwellUsageError, match=r"host pool kv \(.*\): size is None"):
        open_storage(pool)


def test_numbers_that_nobody_knows_are_kept_as_their_bytes(open_storage: Open) -> None:
    pool = MHATokenToKVPoolHost("page_first", dtype="float64")
    pool.kv_buffer.array[...] = np.random.default_rng(1).random(pool.kv_buffer.array.shape)
    storage = open_storage(pool)
    assert storage.batch_set_v1(KEYS, pages_of(pool, 0, 1, 2)) == [True] * 3
    assert storage.batch_get_v1(KEYS, pages_of(pool, 3, 4, 5)) == [True] * 3
    assert np.array_equal(pool.element(3), pool.element(0))
