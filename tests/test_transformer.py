"""The demo's model: equal to a plain forward pass, bit-equal wherever only placement differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepwell.demo.transformer import (
    CHUNK_TOKENS,
    Arrays,
    Model,
    ModelConfig,
    enable_compilation_cache,
    make_model,
)
from stepwell.tiers.device import DevicePool

CONFIG = ModelConfig(layers=2, max_pages=24)
PAGES = 160
TOKENS = np.random.default_rng(7).integers(0, CONFIG.vocab, 333, dtype=np.int32)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(CONFIG)


def blank(fill: float = 0.0) -> Arrays:
    shape = (CONFIG.layers, PAGES + 1, CONFIG.page_tokens, CONFIG.kv_heads, CONFIG.head_dim)
    return jnp.full(shape, fill), jnp.full(shape, fill)


def table(seed: int | None = None, *, first: int = 0) -> np.ndarray:
    """Return a block table; in order from `first` without a seed, shuffled over the pool with."""
    if seed is None:
        return np.arange(first, first + CONFIG.max_pages, dtype=np.int32)
    shuffled = np.random.default_rng(seed).permutation(PAGES).astype(np.int32)
    return shuffled[: CONFIG.max_pages]


def prefill(
    model: Model, arrays: Arrays, tokens: np.ndarray, block_table: np.ndarray, start: int = 0
) -> tuple[Arrays, np.ndarray]:
    """Compute positions start.. in chunks; return the arrays and one row of logits a position."""
    logits = []
    for first in range(start, len(tokens), CHUNK_TOKENS):
        chunk = np.zeros(CHUNK_TOKENS, np.int32)
        length = min(CHUNK_TOKENS, len(tokens) - first)
        chunk[:length] = tokens[first : first + length]
        arrays, chunk_logits = model.prefill_chunk(
            model.weights, arrays, chunk, np.int32(first), np.int32(length), block_table
        )
        logits.append(np.asarray(chunk_logits)[:length])
    return arrays, np.concatenate(logits)


def decode(
    model: Model,
    arrays: Arrays,
    rows: dict[int, tuple[int, int, np.ndarray]],
    *,
    batch: int = 4,
) -> tuple[Arrays, dict[int, np.ndarray]]:
    """Decode {row: (token, position, block table)}; the other rows are inactive."""
    tokens, positions = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    tables = np.zeros((batch, CONFIG.max_pages), np.int32)
    active = np.zeros(batch, bool)
    for row, (token, position, block_table) in rows.items():
        tokens[row], positions[row], tables[row], active[row] = token, position, block_table, True
    arrays, logits = model.decode(model.weights, arrays, tokens, positions, tables, active)
    return arrays, {row: np.asarray(logits)[row] for row in rows}


def pages_of(arrays: Arrays, block_table: np.ndarray, tokens: int) -> np.ndarray:
    """Return the first `tokens` positions of a sequence, [2, layers, tokens, heads, dim]."""
    both = np.stack([np.asarray(array) for array in arrays])[:, :, block_table]
    return both.reshape(2, CONFIG.layers, -1, CONFIG.kv_heads, CONFIG.head_dim)[:, :, :tokens]


def reference_logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Run the model over a whole prompt in float64 numpy, without pages, chunks or a cache."""

    def norm(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(values: np.ndarray) -> np.ndarray:
        half = CONFIG.head_dim // 2
        frequency = CONFIG.rope_base ** -(np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(values))[:, None, None] * frequency)
        turned = (values[..., :half] + 1j * values[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    count, heads, dim = len(tokens), CONFIG.heads, CONFIG.head_dim
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    hidden = weights.embedding[tokens]
    causal = np.tril(np.ones((count, count), bool))
    for layer in range(CONFIG.layers):
        weight = type(weights.layers)(*(leaf[layer] for leaf in weights.layers))
        normed = norm(hidden, weight.attention_norm)
        query = rotate((normed @ weight.query).reshape(count, heads, dim))
        pair = (normed @ weight.key_value).reshape(count, 2, CONFIG.kv_heads, dim)
        key, value = rotate(pair[:, 0]), pair[:, 1]
        mixed = np.empty((count, heads, dim))
        for head in range(heads):
            shared = head // (heads // CONFIG.kv_heads)
            scores = np.where(causal, query[:, head] @ key[:, shared].T / np.sqrt(dim), -np.inf)
            odds = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = odds / odds.sum(-1, keepdims=True) @ value[:, shared]
        hidden = hidden + mixed.reshape(count, -1) @ weight.output
        gate, up = np.split(norm(hidden, weight.mlp_norm) @ weight.gate_up, 2, -1)
        hidden = hidden + gate / (1 + np.exp(-gate)) * up @ weight.down
    return norm(hidden, weights.norm) @ weights.unembedding


def test_paged_prefill_and_decode_agree_with_a_plain_forward_pass(model: Model) -> None:
    expected = reference_logits(model, TOKENS)
    arrays, logits = prefill(model, blank(), TOKENS[:-5], table(1))
    np.testing.assert_allclose(logits, expected[:-5], atol=2e-4, rtol=1e-4)
    for position in range(len(TOKENS) - 5, len(TOKENS)):
        arrays, rows = decode(model, arrays, {2: (int(TOKENS[position]), position, table(1))})
        np.testing.assert_allclose(rows[2], expected[position], atol=2e-4, rtol=1e-4)


def test_slots_do_not_change_a_bit(model: Model) -> None:
    arrays_a, logits_a = prefill(model, blank(), TOKENS, table())
    arrays_b, logits_b = prefill(model, blank(), TOKENS, table(3))
    np.testing.assert_array_equal(logits_a, logits_b)
    np.testing.assert_array_equal(
        pages_of(arrays_a, table(), len(TOKENS)), pages_of(arrays_b, table(3), len(TOKENS))
    )
    _, row_a = decode(model, arrays_a, {0: (5, len(TOKENS), table())})
    _, row_b = decode(model, arrays_b, {0: (5, len(TOKENS), table(3))})
    np.testing.assert_array_equal(row_a[0], row_b[0])


def test_garbage_that_a_sequence_does_not_own_does_not_change_a_bit(model: Model) -> None:
    _, clean = prefill(model, blank(), TOKENS, table(4))
    arrays, dirty = prefill(model, blank(np.nan), TOKENS, table(4))
    np.testing.assert_array_equal(clean, dirty)
    _, rows = decode(model, arrays, {1: (5, len(TOKENS), table(4))})
    assert np.isfinite(rows[1]).all()


def test_batch_mates_and_rows_do_not_change_a_bit(model: Model) -> None:
    tables = [table(first=first) for first in (0, 24, 48, 72)]
    lengths = [333, 40, 200, 129]
    arrays = blank()
    for block_table, length in zip(tables, lengths, strict=True):
        arrays, _ = prefill(model, arrays, TOKENS[:length], block_table)

    def copy() -> Arrays:
        return jnp.copy(arrays[0]), jnp.copy(arrays[1])

    alone = [decode(model, copy(), {0: (9 + i, lengths[i], tables[i])})[1][0] for i in range(4)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]):
        rows = {row: (9 + i, lengths[i], tables[i]) for row, i in enumerate(order)}
        _, logits = decode(model, copy(), rows)
        for row, i in enumerate(order):
            np.testing.assert_array_equal(logits[row], alone[i])


def test_inactive_rows_and_padding_write_to_the_hidden_slot_alone(model: Model) -> None:
    arrays, _ = decode(model, blank(7.0), {2: (5, 0, table())})
    arrays, _ = prefill(model, arrays, TOKENS[:70], table(first=24))
    for array in map(np.asarray, arrays):
        untouched = np.ones((PAGES, CONFIG.page_tokens), bool)
        untouched[0, 0] = False
        untouched[24:28] = False
        untouched[28, :6] = False
        assert (array[:, :PAGES][:, untouched] == 7.0).all()
        assert not (array[:, :PAGES][:, ~untouched] == 7.0).any()


@pytest.mark.parametrize("cached", [64, 320, 16, 48, 304, 17, 332])
def test_a_suffix_on_cached_pages_is_bit_equal_to_the_whole(model: Model, cached: int) -> None:
    """The start may be anywhere, at the end of a chunk or page or not: no place changes a bit."""
    whole, logits = prefill(model, blank(), TOKENS, table(5))
    pages = -(-cached // CONFIG.page_tokens)
    arrays = tuple(
        empty.at[:, table(6)[:pages]].set(full[:, table(5)[:pages]])
        for empty, full in zip(blank(), whole, strict=True)
    )
    arrays, suffix = prefill(model, arrays, TOKENS, table(6), start=cached)
    np.testing.assert_array_equal(suffix, logits[cached:])
    np.testing.assert_array_equal(
        pages_of(arrays, table(6), len(TOKENS)), pages_of(whole, table(5), len(TOKENS))
    )


def test_pages_carried_through_host_rows_by_the_pool_are_bit_equal(model: Model) -> None:
    pool = DevicePool(CONFIG.geometry(), PAGES)
    with pool.step() as handle:
        handle.arrays, logits = prefill(model, handle.arrays, TOKENS, table(5))
    gather = pool.queue_gather(table(5)[:20], generation=pool.generation)
    pool.drain()
    rows = np.concatenate(gather.host_views())
    pool.queue_scatter(table(6)[:20], rows, generation=pool.generation)
    with pool.step() as handle:
        handle.arrays, suffix = prefill(model, handle.arrays, TOKENS, table(6), start=320)
    np.testing.assert_array_equal(suffix, logits[320:])


def test_a_pages_bytes_are_named_by_its_geometry() -> None:
    geometry = CONFIG.geometry()
    assert geometry.page_bytes == 2 * CONFIG.layers * 16 * 2 * 32 * 4
    assert geometry.fingerprint() != replace(CONFIG, seed=1).geometry().fingerprint()
    assert geometry.fingerprint() == ModelConfig(layers=2, max_pages=24).geometry().fingerprint()


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        ModelConfig(heads=3, kv_heads=2)


def test_the_compilation_cache_fills_its_directory(tmp_path: Path) -> None:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        enable_compilation_cache(tmp_path)
        jax.jit(lambda value: value * 3 + 11)(jnp.arange(77)).block_until_ready()
        assert any(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
