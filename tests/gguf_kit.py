"""A small GGUF file of Llama's architecture, written by gguf's own writer, and what numpy makes of it without us."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

LAYERS, HEADS, KV_HEADS, HEAD_DIM, DIM, HIDDEN = 2, 6, 2, 16, 96, 64
ROPE_BASE, EPSILON = 5000.0, 1e-4

Q4_1, Q8_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))


def byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte: printable ones stand for themselves, the rest from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    return letters


LETTERS = byte_letters()
MERGES = ["t h", "Ġ th", "Ġth e", "a n", "an d", "Ġ and", "e r", "1 9", "Ġ w", "Ġw a", "Ġwa t", "Ġwat er", "i s"]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*MARKS, *LETTERS.values(), *(merge.replace(" ", "") for merge in MERGES)]
IDS = {word: number for number, word in enumerate(WORDS)}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, outputs first."""
    layer = {
        "attn_norm": (DIM,),
        "attn_q": (HEADS * HEAD_DIM, DIM),
        "attn_k": (KV_HEADS * HEAD_DIM, DIM),
        "attn_v": (KV_HEADS * HEAD_DIM, DIM),
        "attn_output": (DIM, HEADS * HEAD_DIM),
        "ffn_norm": (DIM,),
        "ffn_gate": (HIDDEN, DIM),
        "ffn_up": (HIDDEN, DIM),
        "ffn_down": (DIM, HIDDEN),
    }
    named = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (len(WORDS), DIM), **named, "output_norm.weight": (DIM,)}


@dataclass(slots=True)
class Tiny:
    """What to write: change it, then write() it."""

    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=dict)  # keys with values that replace or add to the usual ones
    without: frozenset[str] = frozenset()  # keys and tensors to leave out
    words: list[str] = field(default_factory=lambda: list(WORDS))
    merges: list[str] = field(default_factory=lambda: list(MERGES))
    extra: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # more tensors
    seed: int = 0

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """Draw the weights."""
        random = np.random.default_rng(self.seed)
        drawn = {}
        for name, shape in shapes().items():
            scale = 1.0 if len(shape) == 1 or "embd" in name else shape[-1] ** -0.5
            drawn[name] = (random.standard_normal(shape) * scale).astype(np.float32)
        return {**drawn, **self.extra}

    def write(self, path: Path) -> Path:
        """Write the file: matrices as Q4_1, the embedding as Q8_0, the rest as F32."""
        writer = gguf.GGUFWriter(path, self.architecture)
        values: dict[str, Any] = {
            "general.name": "tiny",
            "llama.block_count": LAYERS,
            "llama.context_length": 2048,
            "llama.embedding_length": DIM,
            "llama.feed_forward_length": HIDDEN,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": EPSILON,
            "llama.rope.freq_base": ROPE_BASE,
            "llama.rope.dimension_count": HEAD_DIM,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.words,
            "tokenizer.ggml.merges": self.merges,
            "tokenizer.ggml.token_type": [3 if word in MARKS else 1 for word in self.words],
            "tokenizer.ggml.eos_token_id": 2,
        } | self.metadata
        for key, value in values.items():
            if key in self.without:
                continue
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for name, tensor in self.tensors().items():
            if name in self.without:
                continue
            kind = F32 if tensor.ndim == 1 else Q8_0 if "embd" in name else Q4_1
            raw = tensor if kind == F32 else gguf.quantize(tensor, kind)
            writer.add_tensor(name, raw, raw_dtype=None if kind == F32 else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


# ---- without us ------------------------------------------------------------------------------------------------------


def q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Dequantise rows of blocks of 32: scale f16, least f16, 16 bytes of which the low halves come first."""
    blocks = raw.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float64).T[..., None]
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    return (quants * scale + least).reshape(len(raw), -1)


def q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Dequantise rows of blocks of 32: scale f16, 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    return (blocks[:, 2:].view(np.int8) * scale).reshape(len(raw), -1)


def weights_of(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Return a file's weights by gguf's reader and the two functions above, [outputs, inputs], as they lie."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        raw = np.asarray(tensor.data)
        if tensor.tensor_type == F32:
            found[tensor.name] = raw.astype(np.float64)
        else:
            found[tensor.name] = q4_1(raw) if tensor.tensor_type == Q4_1 else q8_0(raw)
    return found


def logits_of(path: Path, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Run a whole prompt in float64: rope turns neighbours (2i, 2i + 1) of a head, as rows of a GGUF file have them."""
    weights = weights_of(path)

    def norm(values: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON) * weight

    def rotate(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        pairs = values[..., 0::2] + 1j * values[..., 1::2]
        angle = np.arange(len(values))[:, None, None] * ROPE_BASE ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turned = pairs * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], -1).reshape(values.shape)

    count = len(tokens)
    hidden = weights["token_embd.weight"][tokens]
    causal = np.tril(np.ones((count, count), bool))
    for layer in range(LAYERS):
        part = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"blk.{layer}.")}
        normed = norm(hidden, part["attn_norm"])
        query = rotate((normed @ part["attn_q"].T).reshape(count, HEADS, HEAD_DIM))
        key = rotate((normed @ part["attn_k"].T).reshape(count, KV_HEADS, HEAD_DIM))
        value = (normed @ part["attn_v"].T).reshape(count, KV_HEADS, HEAD_DIM)
        mixed = np.empty((count, HEADS, HEAD_DIM))
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = np.where(causal, query[:, head] @ key[:, shared].T / np.sqrt(HEAD_DIM), -np.inf)
            odds = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = odds / odds.sum(-1, keepdims=True) @ value[:, shared]
        hidden = hidden + mixed.reshape(count, -1) @ part["attn_output"].T
        normed = norm(hidden, part["ffn_norm"])
        gate = normed @ part["ffn_gate"].T
        hidden = hidden + gate / (1 + np.exp(-gate)) * (normed @ part["ffn_up"].T) @ part["ffn_down"].T
    output = weights.get("output.weight", weights["token_embd.weight"])
    return norm(hidden, weights["output_norm.weight"]) @ output.T


def encode(text: str) -> list[int]:
    """Encode ASCII text: digits alone, GPT-2's pattern on what is between them, then the first merges first."""
    pieces = [piece for part in re.split(r"(\d)", text) for piece in _split(part)]
    return [token for piece in pieces for token in _merge([LETTERS[byte] for byte in piece.encode()])]


def _split(text: str) -> list[str]:
    return re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+", text)


def _merge(letters: list[str]) -> list[int]:
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    while True:
        pairs = list(itertools.pairwise(letters))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best is None or best not in ranks:
            return [IDS[letter] for letter in letters]
        at = pairs.index(best)
        letters[at : at + 2] = ["".join(best)]
