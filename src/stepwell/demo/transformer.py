"""Run a small decoder over a paged KV pool: the engine's compute, in two compiled shapes.

Llama's architecture (RMSNorm, rotary positions, grouped query heads, SwiGLU; arXiv 2302.13971) in
float32. The weights are seeded random numbers (a cache is tried on them, not a language) or those
of a GGUF file (gguf_model.py): the programs take them as an argument and do not know.

Two programs, each compiled once, both donate the pool's arrays:

    prefill_chunk   CHUNK_TOKENS positions of one sequence, from any start, a short tail masked
    decode          one position of each of a fixed number of sequences

Layers run in lax.scan over stacked weights, and the stacked pool is carried through it, so a shape
compiles in about a second however deep the model is (30 layers unrolled: 3 to 8 s), and a demo
starts a process several times.

What does not change a result by a bit (tests/test_transformer.py): the slots a sequence lies in;
the other sequences of a batch and its row there; garbage in slots and parts of pages that it does
not own; where its prompt is cut into chunks; whether the pages before a chunk were computed by this
process or loaded. Keys that a position may not see get a probability of exactly 0 and a value of
exactly 0, and every sum runs over the whole block table in one order. Cuts are measured on XLA's
CPU backend, the rest follows from fixed shapes. What does change the last bits: a key computed by
decode instead of prefill_chunk, for its products have other shapes. An engine that must reproduce
an answer bit by bit publishes prompt pages alone, or feeds generated tokens to prefill_chunk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepwell import PageGeometry

CHUNK_TOKENS = 64

Arrays = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Size the model. The defaults make a page of 32 KiB and a context of 1024 tokens.

    weights: what names the weights, e.g. the hash of the file that they come from; empty where they
    are drawn from seed.
    """

    name: str = "stepwell-demo"
    weights: str = ""
    vocab: int = 512
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 256
    page_tokens: int = 16
    max_pages: int = 64
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"heads must be a multiple of kv_heads and head_dim even, got {self.heads}, "
                f"{self.kv_heads}, {self.head_dim}"
            )

    @property
    def max_tokens(self) -> int:
        """Return the longest context that a block table can name."""
        return self.max_pages * self.page_tokens

    def geometry(self) -> PageGeometry:
        """Return what a page of this model's KV is; its revision names all that decides it."""
        revision = hashlib.sha256(repr(asdict(self)).encode()).hexdigest()[:16]
        return PageGeometry(
            model=self.name,
            revision=revision,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="float32",
            page_tokens=self.page_tokens,
        )


class Layers(NamedTuple):
    """Hold the weights of all layers, stacked on a first axis."""

    attention_norm: jax.Array  # [layers, dim]
    query: jax.Array  # [layers, dim, heads * head_dim]
    key_value: jax.Array  # [layers, dim, 2 * kv_heads * head_dim]
    output: jax.Array  # [layers, heads * head_dim, dim]
    mlp_norm: jax.Array  # [layers, dim]
    gate_up: jax.Array  # [layers, dim, 2 * hidden]
    down: jax.Array  # [layers, hidden, dim]


class Weights(NamedTuple):
    """Hold a model's weights: a pytree of float32 arrays."""

    embedding: jax.Array  # [vocab, dim]
    layers: Layers
    norm: jax.Array  # [dim]
    unembedding: jax.Array | None  # [dim, vocab]; None: the embedding, transposed


def make_weights(config: ModelConfig) -> Weights:
    """Draw the weights from config.seed; the same numbers in every process and JAX version."""
    random = np.random.default_rng(config.seed)

    def draw(*shape: int) -> jax.Array:
        scale = shape[-2] ** -0.5
        return jnp.asarray(random.standard_normal(shape, np.float32) * np.float32(scale))

    layers, dim, hidden = config.layers, config.dim, config.hidden
    query_dim = config.heads * config.head_dim
    return Weights(
        embedding=draw(config.vocab, dim) * np.float32(config.vocab**0.5),
        layers=Layers(
            attention_norm=jnp.ones((layers, dim), jnp.float32),
            query=draw(layers, dim, query_dim),
            key_value=draw(layers, dim, 2 * config.kv_heads * config.head_dim),
            output=draw(layers, query_dim, dim),
            mlp_norm=jnp.ones((layers, dim), jnp.float32),
            gate_up=draw(layers, dim, 2 * hidden),
            down=draw(layers, hidden, dim),
        ),
        norm=jnp.ones(dim, jnp.float32),
        # Wide enough apart that greedy decoding is decided by more than the last bits.
        unembedding=draw(dim, config.vocab) * np.float32(4),
    )


def load_weights(folder: str | os.PathLike[str]) -> Weights:
    """Read weights from a folder: each array as float32 in NAME.npy, those of layers in layers.NAME.npy.

    unembedding may be left out: it is the embedding then.
    """
    arrays = {path.stem: jnp.asarray(np.load(path, mmap_mode="r")) for path in Path(folder).glob("*.npy")}
    return Weights(
        embedding=arrays["embedding"],
        layers=Layers(**{name: arrays[f"layers.{name}"] for name in Layers._fields}),
        norm=arrays["norm"],
        unembedding=arrays.get("unembedding"),
    )


class Model(NamedTuple):
    """Hold a model's weights and its two programs."""

    config: ModelConfig
    weights: Weights
    prefill_chunk: Callable[..., tuple[Arrays, jax.Array]]
    decode: Callable[..., tuple[Arrays, jax.Array]]


def make_model(config: ModelConfig, weights: Weights | None = None) -> Model:
    """Make a model; nothing is compiled before the first call of each program.

    Args:
        weights: drawn from config.seed where None. Requires: config.weights names them.

    The programs (P = max_pages, B = any number, compiled for each):
        prefill_chunk(weights, arrays, tokens int32[64], start, length, block_table int32[P])
            Compute positions start .. start + length - 1; tokens past length are ignored.
        decode(weights, arrays, tokens int32[B], positions int32[B], block_tables int32[B, P],
               active bool[B])
            Compute one position of each active row; the others return garbage.

    Each returns (arrays, logits [64 | B, vocab]) and donates `arrays`: (keys, values), both
    float32 [layers, pages + 1, page_tokens, kv_heads, head_dim]. The last slot takes masked writes.
    A block table names the slots of a sequence in order; entries past its end may be anything in
    range. Requires: the keys and values of all positions before are in the pool.
    """
    return Model(
        config=config,
        weights=make_weights(config) if weights is None else weights,
        prefill_chunk=jax.jit(partial(_prefill_chunk, config), donate_argnums=1),
        decode=jax.jit(partial(_decode, config), donate_argnums=1),
    )


def enable_compilation_cache(directory: str | os.PathLike[str]) -> None:
    """Keep compiled programs in a directory, so that the next process need not compile them."""
    settings: dict[str, str | float] = {
        "jax_compilation_cache_dir": os.fspath(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


# ---- the forward pass ----------------------------------------------------------------------------


def _prefill_chunk(
    config: ModelConfig,
    weights: Weights,
    arrays: Arrays,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
    block_table: jax.Array,
) -> tuple[Arrays, jax.Array]:
    offsets = jnp.arange(CHUNK_TOKENS, dtype=jnp.int32)
    positions = start + offsets
    slots, rows = _targets(config, arrays, positions, offsets < length, block_table[None])

    def attend(
        queries: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array
    ) -> jax.Array:
        pages = keys[layer, block_table], values[layer, block_table]
        return _attend(config, queries, *pages, positions, start + length)

    return _forward(config, weights, arrays, tokens, positions, slots, rows, attend)


def _decode(
    config: ModelConfig,
    weights: Weights,
    arrays: Arrays,
    tokens: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    active: jax.Array,
) -> tuple[Arrays, jax.Array]:
    slots, rows = _targets(config, arrays, positions, active, block_tables)

    def attend(
        queries: jax.Array, keys: jax.Array, values: jax.Array, layer: jax.Array
    ) -> jax.Array:
        def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            query, table, position = row
            pages = keys[layer, table], values[layer, table]
            return _attend(config, query[None], *pages, position[None], position + 1)[0]

        # One row after another: each is the same small product whatever the batch.
        mixed: jax.Array = jax.lax.map(one, (queries, block_tables, positions))
        return mixed

    return _forward(config, weights, arrays, tokens, positions, slots, rows, attend)


def _targets(
    config: ModelConfig,
    arrays: Arrays,
    positions: jax.Array,
    is_real: jax.Array,
    block_tables: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return where each position's key and value go: slot and row; the hidden slot if not real."""
    scratch = arrays[0].shape[1] - 1
    page = jnp.clip(positions // config.page_tokens, 0, config.max_pages - 1)
    slots = jnp.take_along_axis(
        jnp.broadcast_to(block_tables, (len(page), config.max_pages)), page[:, None], 1
    )[:, 0]
    return jnp.where(is_real, slots, scratch), positions % config.page_tokens


def _forward(
    config: ModelConfig,
    weights: Weights,
    arrays: Arrays,
    tokens: jax.Array,
    positions: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
    attend: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
) -> tuple[Arrays, jax.Array]:
    """Run n tokens through all layers, writing each key and value before it is attended to."""
    count = len(tokens)
    angles = _angles(config, positions)

    def layer(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[jax.Array, Layers]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        hidden, keys, values = carry
        number, weight = inputs
        normed = _norm(config, hidden, weight.attention_norm)
        query = (normed @ weight.query).reshape(count, config.heads, config.head_dim)
        pair = (normed @ weight.key_value).reshape(count, 2, config.kv_heads, config.head_dim)
        keys = keys.at[number, slots, rows].set(_rotate(pair[:, 0], angles))
        values = values.at[number, slots, rows].set(pair[:, 1])
        mixed = attend(_rotate(query, angles), keys, values, number)
        hidden = hidden + mixed.reshape(count, -1) @ weight.output
        gate, up = jnp.split(_norm(config, hidden, weight.mlp_norm) @ weight.gate_up, 2, axis=-1)
        hidden = hidden + (jax.nn.silu(gate) * up) @ weight.down
        return (hidden, keys, values), None

    numbers = jnp.arange(config.layers, dtype=jnp.int32)
    (hidden, keys, values), _ = jax.lax.scan(
        layer, (weights.embedding[tokens], *arrays), (numbers, weights.layers)
    )
    unembedding = weights.embedding.T if weights.unembedding is None else weights.unembedding
    return (keys, values), _norm(config, hidden, weights.norm) @ unembedding


def _attend(
    config: ModelConfig,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    known: jax.Array,
) -> jax.Array:
    """Attend from n positions to the pages of one sequence.

    Args:
        queries: [n, heads, head_dim].
        keys, values: [max_pages, page_tokens, kv_heads, head_dim].
        positions: int32[n]; position p sees the keys 0 to p.
        known: int32, positions whose key and value have been computed.

    Returns: [n, heads, head_dim].
    """
    seen = jnp.arange(config.max_tokens)
    keys = keys.reshape(config.max_tokens, config.kv_heads, config.head_dim)
    # Past those that are known a slot may hold anything, NaN too, and 0 * NaN is not 0.
    values = values.reshape(config.max_tokens, config.kv_heads, config.head_dim)
    values = jnp.where((seen < known)[:, None, None], values, 0.0)
    group = config.heads // config.kv_heads
    queries = queries.reshape(len(queries), config.kv_heads, group, config.head_dim)
    scores = jnp.einsum("nkgd,tkd->kgnt", queries, keys) * config.head_dim**-0.5
    scores = jnp.where(seen[None, :] <= positions[:, None], scores, -jnp.inf)
    return jnp.einsum("kgnt,tkd->nkgd", jax.nn.softmax(scores, axis=-1), values)


def _norm(config: ModelConfig, values: jax.Array, weight: jax.Array) -> jax.Array:
    mean = jnp.mean(values * values, -1, keepdims=True)
    return values * jax.lax.rsqrt(mean + config.norm_epsilon) * weight


def _angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-np.arange(half, dtype=np.float32) / half)
    angles = positions[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(values: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    cosine, sine = angles
    first, second = jnp.split(values, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)
