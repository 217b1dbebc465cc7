"""Make a model that SGLang can serve, of random weights, in a folder of a few MiB: nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 512
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


@dataclass(frozen=True)
class Llama:
    """A Llama with the head size of a real one; the rest is as small as SGLang takes it.

    heads: of the queries, and as many of K and V, so that each of two ranks has one.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 128
    inner: int = 256
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write configuration, tokenizer and weights. Returns: the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder)
        hidden = self.heads * self.head_dim
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
        _write_json(folder / "config.json", config | _COMMON)
        shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden)}
        norms = {"model.norm.weight": hidden}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                shapes[f"{prefix}self_attn.{name}.weight"] = (hidden, hidden)
            for name in ("gate_proj", "up_proj"):
                shapes[f"{prefix}mlp.{name}.weight"] = (self.inner, hidden)
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, self.inner)
            for name in ("input_layernorm", "post_attention_layernorm"):
                norms[f"{prefix}{name}.weight"] = hidden
        _write_weights(folder, shapes, norms, seed=self.seed)
        return folder


@dataclass(frozen=True)
class MiniCPM3:
    """A model whose KV is one latent a token, the same on every tensor-parallel rank (MLA).

    Of SGLang's models with MLA it is the one that runs on a CPU by torch alone (models/minicpm3.py:201-269); DeepSeek's
    wants kernels for AMX or CUDA. Its latent has 64 elements, and 32 with the position in them.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    inner: int = 256
    latent: int = 64
    rope: int = 32
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write configuration, tokenizer and weights. Returns: the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder)
        hidden = self.heads * self.head_dim
        config = {
            "architectures": ["MiniCPM3ForCausalLM"],
            "model_type": "minicpm3",
            "hidden_size": hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": 48,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.head_dim,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": hidden,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
        }
        _write_json(folder / "config.json", config | _COMMON)
        shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden)}
        norms = {"model.norm.weight": hidden}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            attention = f"{prefix}self_attn."
            shapes |= {
                f"{attention}q_a_proj.weight": (48, hidden),
                f"{attention}q_b_proj.weight": (self.heads * (self.head_dim + self.rope), 48),
                f"{attention}kv_a_proj_with_mqa.weight": (self.latent + self.rope, hidden),
                f"{attention}kv_b_proj.weight": (self.heads * 2 * self.head_dim, self.latent),
                f"{attention}o_proj.weight": (hidden, hidden),
                f"{prefix}mlp.gate_proj.weight": (self.inner, hidden),
                f"{prefix}mlp.up_proj.weight": (self.inner, hidden),
                f"{prefix}mlp.down_proj.weight": (hidden, self.inner),
            }
            norms |= {
                f"{attention}q_a_layernorm.weight": 48,
                f"{attention}kv_a_layernorm.weight": self.latent,
                f"{prefix}input_layernorm.weight": hidden,
                f"{prefix}post_attention_layernorm.weight": hidden,
            }
        _write_weights(folder, shapes, norms, seed=self.seed)
        return folder


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _write_weights(folder: Path, shapes: dict[str, tuple[int, int]], norms: dict[str, int], *, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    # 0.08: with the usual 0.02 so small a model says the same whatever it is asked.
    weights = {name: torch.randn(shape, generator=random).mul(0.08).bfloat16() for name, shape in shapes.items()}
    weights |= {name: torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one word a token: "<pad> <s> </s> <unk> t4 t5 ..."."""
    words = [*_SPECIAL, *(f"t{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    added = [
        {"id": number, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, word in enumerate(_SPECIAL)
    ]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    _write_json(folder / "tokenizer.json", parts | tokenizer)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | names)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
