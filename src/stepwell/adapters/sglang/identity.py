"""Say which bytes are interchangeable: what of an engine decides its pages, beside their geometry and the weights.

Two engines share pages only if every field here is equal. What is in it, and why:

- the model's *content*, not its place: the configuration as SGLang uses it (overrides included) is hashed here, and the
  weight files stand in the epoch (checkpoint.py). The name for people, `model`, is the last part of the path (of a Hub
  model the repository), so a directory that is moved keeps its cache, and one that is renamed starts cold. The name
  under which a model is served is no part of it: users give one name to many models, and one model many.
- precision: compute dtype, quantisation of the weights, and how KV is stored. Scales of an fp8 KV cache come with the
  checkpoint (they are in its index) or from a file, which is hashed.
- the shard: tensor, context and pipeline parallel rank. Models whose cache is a copy on every tensor-parallel rank
  (MLA) have one identity for all of them, so that copies share one page and one writer. Data-parallel replicas share.
- what a key means: under EAGLE SGLang hashes pairs of tokens (mem_cache/kv_cache_builder.py:401).

What is left out because it changes rounding only: attention backend, graphs, communication, expert parallelism.

SGLang 0.5.23 hands a backend its ranks (managers/cache_controller.py:794, class HiCacheStorageConfig) and neither dtype
nor model; both are in the configuration that it publishes in each process before it builds anything
(managers/scheduler.py:6327, runtime_context.py:1314), which is what `EngineConfig.of_process` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from stepwell import StepwellUsageError
from stepwell.adapters.sglang.checkpoint import WeightsSource, index_checkpoint, model_label

# Of a Hugging Face configuration, what says where it lies and who wrote it.
_NOT_CONTENT = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")


class StorageConfig(Protocol):
    """What is read of SGLang's HiCacheStorageConfig (mem_cache/hicache_storage.py:28)."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    dcp_rank: int
    dcp_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What is read of the configuration that SGLang publishes; tests make their own.

    Fields are named as SGLang's own, less their prefixes: `model_config` is the model's configuration as a dict,
    `draft_*` is about the model that drafts in speculative decoding.
    """

    weights: WeightsSource
    model_config: Mapping[str, object]
    dtype: str = "auto"
    quantization: str | None = None
    quantization_details: tuple[tuple[str, str], ...] = ()
    kv_cache_dtype: str = "auto"
    quantization_param_path: str | None = None
    model_impl: str = "auto"
    is_deterministic: bool = False
    has_bigram_keys: bool = False
    draft_weights: WeightsSource | None = None
    draft_details: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_process(cls) -> EngineConfig:
        """Read SGLang's configuration of this process.

        Raises:
            StepwellUsageError: SGLang has none here, or lacks a name that is read (another version of SGLang).
        """
        from sglang.srt import runtime_context
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        try:
            model, spec, lora = runtime_context.get_model(), runtime_context.get_spec(), runtime_context.get_lora()
            has_draft = spec.speculative_algorithm is not None and spec.speculative_draft_model_path is not None
            deterministic = runtime_context.get_exec().deterministic
            return cls(
                weights=WeightsSource(
                    path=model.model_path,
                    revision=model.revision,
                    load_format=_text(model.load_format),
                    download_dir=model.download_dir,
                    adapters=tuple(sorted((ref.lora_name, ref.lora_path) for ref in lora.lora_paths or ())),
                    is_cached=model.weight_cache_mode != "off",
                ),
                model_config=runtime_context.process_model_config().hf_config.to_dict(),
                dtype=_text(model.dtype),
                quantization=model.quantization,
                quantization_details=(
                    ("custom_weight_loader", _text(model.custom_weight_loader)),
                    ("model_loader_extra_config", _text(model.model_loader_extra_config)),
                    ("modelopt_quant", _text(model.modelopt_quant)),
                    ("quantize_and_serve", _text(model.quantize_and_serve)),
                    ("rl_quant_profile", _text(model.rl_quant_profile)),
                ),
                kv_cache_dtype=_text(model.kv_cache_dtype),
                quantization_param_path=model.quantization_param_path,
                model_impl=_text(model.model_impl),
                is_deterministic=bool(deterministic.enable_deterministic_inference),
                has_bigram_keys=SpeculativeAlgorithm.from_string(spec.speculative_algorithm).is_eagle(),
                draft_weights=WeightsSource(
                    path=spec.speculative_draft_model_path,
                    revision=spec.speculative_draft_model_revision,
                    load_format=_text(spec.speculative_draft_load_format or model.load_format),
                    download_dir=model.download_dir,
                    is_cached=model.weight_cache_mode != "off",
                )
                if has_draft
                else None,
                draft_details=(
                    ("algorithm", _text(spec.speculative_algorithm)),
                    ("kv_cache_dtype", _text(spec.speculative_draft_kv_cache_dtype)),
                    ("quantization", _text(spec.speculative_draft_model_quantization)),
                ),
            )
        except (AttributeError, ValueError) as error:
            raise StepwellUsageError(
                f"SGLang's configuration of this process cannot be read ({error}): stepwell knows that of SGLang 0.5.23"
            ) from error


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides an engine's pages beside their geometry and the weights' epoch.

    Args:
        fields: sorted (name, value) pairs for `PageGeometry.extra`.
        draft_fields: the same for pools of the model that drafts; its weights are in it, since the epoch is the
            target's.
        model: the model's name for people.
        revision: what the user asked the Hub for, or "default".
        shard: (rank, ranks) of all that splits a page of one position: tensor, context and pipeline.
        weights: where the weights are from, for `WeightsEpoch.at_start`.
    """

    fields: tuple[tuple[str, str | int], ...]
    draft_fields: tuple[tuple[str, str | int], ...]
    model: str
    revision: str
    shard: tuple[int, int]
    weights: WeightsSource


def identity(storage_config: StorageConfig, *, engine: EngineConfig | None = None) -> Identity:
    """Say what decides the bytes of this rank's pages.

    Args:
        storage_config: SGLang's, as given to the backend.
        engine: SGLang's configuration, by default that of this process.

    Raises:
        StepwellUsageError: SGLang's configuration or a file that it names cannot be read.
    """
    engine = engine if engine is not None else EngineConfig.of_process()
    ranks, shard = _ranks_of(storage_config)
    fields: dict[str, str | int] = {
        **ranks,
        "compute_dtype": engine.dtype,
        "config": _digest(_content(engine.model_config)),
        "deterministic": int(engine.is_deterministic),
        "keys": "bigram" if engine.has_bigram_keys else "token",
        "kv_cache_dtype": engine.kv_cache_dtype,
        "kv_scales": _file_digest(engine.quantization_param_path),
        "model_impl": engine.model_impl,
        "quantization": engine.quantization or "none",
        "quantization_details": _digest(engine.quantization_details),
    }
    return Identity(
        fields=tuple(sorted(fields.items())),
        draft_fields=tuple(sorted({**fields, "draft": _draft(engine)}.items())),
        model=model_label(engine.weights.path),
        revision=engine.weights.revision or "default",
        shard=shard,
        weights=engine.weights,
    )


def _ranks_of(config: StorageConfig) -> tuple[dict[str, str | int], tuple[int, int]]:
    """Return the ranks by name, and one number for all of them."""
    # A pipeline stage holds other layers, a context rank other positions, a decode-context rank other tokens of a page.
    splits = [
        ("pp", config.pp_rank, config.pp_size),
        ("attn_cp", config.attn_cp_rank, config.attn_cp_size),
        ("dcp", config.dcp_rank, config.dcp_size),
    ]
    if not config.is_mla_model:
        splits.append(("tp", config.tp_rank, config.tp_size))
    rank, size = 0, 1
    named: dict[str, str | int] = {"replicated_over_tp": int(config.is_mla_model)}
    for name, part, parts in splits:
        rank, size = rank * parts + part, size * parts
        named |= {f"{name}_rank": part, f"{name}_size": parts}
    return named, (rank, size)


def _draft(engine: EngineConfig) -> str:
    if engine.draft_weights is None:
        return "none"
    try:
        content = index_checkpoint(engine.draft_weights).digest
    except StepwellUsageError:
        # A draft without files: its path stands for it. Its stale KV costs accepted tokens, never a wrong answer.
        content = engine.draft_weights.path
    return _digest([content, engine.draft_details])


def _content(config: Mapping[str, object]) -> dict[str, object]:
    """Return a model's configuration without what says where it lies, at any depth."""
    return {
        name: _content(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _NOT_CONTENT
    }


def _digest(value: object) -> str:
    # What JSON does not know (a torch dtype) stands as text. A text with an address in it would make the cache cold in
    # each process, never wrong.
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _file_digest(path: str | None) -> str:
    if path is None:
        return "none"
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise StepwellUsageError(f"quantization_param_path {path!r} (KV scales) cannot be read: {error}") from error


def _text(value: object) -> str:
    """Return a setting as text: SGLang has enums, dicts and None in places."""
    text = value.value if isinstance(value, Enum) else value
    return text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str)
