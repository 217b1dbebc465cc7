"""Which engines share pages: the identity and the index of a checkpoint, without SGLang."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import stepwell
from stepwell import StepwellUsageError
from stepwell.adapters.sglang.checkpoint import CheckpointIndex, WeightsSource, index_checkpoint, model_label
from stepwell.adapters.sglang.identity import EngineConfig, Identity, identity

LLAMA = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}


@dataclass(kw_only=True)
class Storage:
    """SGLang's HiCacheStorageConfig, as far as it is read (mem_cache/hicache_storage.py:28)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    dcp_rank: int = 0
    dcp_size: int = 1
    dp_rank: int = 0
    model_name: str = "served"


def engine(**changes: object) -> EngineConfig:
    given = {"weights": WeightsSource("/models/llama"), "model_config": LLAMA, "dtype": "bfloat16"}
    return EngineConfig(**{**given, **changes})  # type: ignore[arg-type]


def of(storage: Storage | None = None, **changes: object) -> Identity:
    return identity(storage if storage is not None else Storage(), engine=engine(**changes))


# ---- the identity ---------------------------------------------------------------------------------------------------


def test_the_fields_go_into_a_geometry() -> None:
    found = of(Storage(tp_rank=1, tp_size=2))
    geometry = stepwell.PageGeometry(
        model=found.model,
        revision=found.revision,
        layers=2,
        kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
        page_tokens=16,
        shard=found.shard,
        extra=found.fields,
    )
    assert geometry.shard == (1, 2)
    assert dict(geometry.extra)["compute_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config": {**LLAMA, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"quantization_details": (("rl_quant_profile", "x"),)},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"model_impl": "transformers"},
        {"is_deterministic": True},
        {"has_bigram_keys": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_engines_that_compute_other_bytes_do_not_share(changes: dict[str, object]) -> None:
    assert of(**changes).fields != of().fields


def test_neither_the_served_name_nor_the_place_is_part_of_it() -> None:
    moved = of(
        Storage(model_name="another"),
        weights=WeightsSource("/elsewhere/llama"),
        model_config={**LLAMA, "_name_or_path": "/elsewhere/llama", "transformers_version": "9"},
    )
    assert replace(moved, weights=of().weights) == of()


def test_a_renamed_model_or_another_revision_is_another() -> None:
    assert of(weights=WeightsSource("/models/other")).model != of().model
    assert of(weights=WeightsSource("/models/llama", revision="v2")).revision != of().revision


def test_the_order_of_a_configuration_does_not_matter() -> None:
    assert of(model_config=dict(reversed(list(LLAMA.items())))) == of()


def test_kv_scales_are_known_by_their_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text("{}")
    second.write_text("{}")
    same = of(quantization_param_path=str(first))
    assert same.fields == of(quantization_param_path=str(second)).fields != of().fields
    second.write_text('{"scale": 2}')
    assert same.fields != of(quantization_param_path=str(second)).fields
    with pytest.raises(StepwellUsageError, match=r"KV scales.*no\.json"):
        of(quantization_param_path=str(tmp_path / "no.json"))


def test_every_rank_that_holds_other_bytes_is_another_shard() -> None:
    sizes = {"tp_size": 2, "pp_size": 3, "attn_cp_size": 2}
    found = [
        of(Storage(tp_rank=tp, pp_rank=pp, attn_cp_rank=cp, **sizes))
        for tp in range(2)
        for pp in range(3)
        for cp in range(2)
    ]
    assert sorted(one.shard for one in found) == [(rank, 12) for rank in range(12)]
    assert len({one.fields for one in found}) == 12


def test_the_same_number_of_shards_split_otherwise_is_not_the_same() -> None:
    assert of(Storage(tp_size=2)).fields != of(Storage(pp_size=2)).fields


def test_copies_on_tensor_parallel_ranks_and_data_parallel_replicas_share() -> None:
    copies = [of(Storage(tp_rank=rank, tp_size=4, is_mla_model=True)) for rank in range(4)]
    assert set(map(repr, copies)) == {repr(copies[0])}
    assert copies[0].shard == (0, 1)
    assert of(Storage(dp_rank=1)) == of()
    assert of(Storage(is_mla_model=True)).fields != of().fields


def test_a_draft_has_an_identity_of_its_own_and_changes_not_the_targets(tmp_path: Path) -> None:
    def drafting(content: bytes) -> Identity:
        (tmp_path / "model.safetensors").write_bytes(content)
        return of(draft_weights=WeightsSource(str(tmp_path)), draft_details=(("algorithm", "EAGLE3"),))

    first, second = drafting(b"one"), drafting(b"other")
    assert first.fields == second.fields == of().fields
    assert len({first.draft_fields, second.draft_fields, of().draft_fields, of().fields}) == 4
    unknown = of(draft_weights=WeightsSource("/d", load_format="dummy"))
    assert unknown.draft_fields != of(draft_weights=WeightsSource("/e", load_format="dummy")).draft_fields


def test_without_sglangs_configuration_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_model = context.get_spec = context.get_lora = lambda: object()  # type: ignore[attr-defined]
    info = types.ModuleType("sglang.srt.speculative.spec_info")
    info.SpeculativeAlgorithm = object  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)
    monkeypatch.setitem(sys.modules, info.__name__, info)
    sys.modules["sglang.srt"].runtime_context = context  # type: ignore[attr-defined]
    with pytest.raises(StepwellUsageError, match=r"cannot be read.*0\.5\.23"):
        identity(Storage())


# ---- the index of a checkpoint --------------------------------------------------------------------------------------


def directory(at: Path, **files: bytes) -> WeightsSource:
    at.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (at / name.replace("__", ".").replace("_dash_", "-")).write_bytes(content)
    return WeightsSource(str(at))


def plain(at: Path) -> WeightsSource:
    return directory(at, model_dash_1__safetensors=b"one", model_dash_2__safetensors=b"two", config__json=b"{}")


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_a_directory_that_is_moved_with_its_times_keeps_its_index(tmp_path: Path) -> None:
    source = plain(tmp_path / "here")
    before = index_checkpoint(source)
    (tmp_path / "here").rename(tmp_path / "there")
    after = index_checkpoint(WeightsSource(str(tmp_path / "there")))
    assert (after.digest, after.files) == (before.digest, 2)


@pytest.mark.parametrize("change", ["time", "size", "name", "more", "fewer", "quantisation", "code", "shards"])
def test_another_file_or_a_changed_one_is_another_index(tmp_path: Path, change: str) -> None:
    source = plain(tmp_path)
    before = index_checkpoint(source).digest
    first = tmp_path / "model-1.safetensors"
    match change:
        case "time":
            touch(first)
        case "size":
            status = first.stat()
            first.write_bytes(b"longer")
            os.utime(first, ns=(0, status.st_mtime_ns))
        case "name":
            first.rename(tmp_path / "model-0.safetensors")
        case "more":
            directory(tmp_path, model_dash_3__safetensors=b"three")
        case "fewer":
            first.unlink()
        case "quantisation":
            directory(tmp_path, hf_quant_config__json=b"{}")
        case "code":
            directory(tmp_path, modeling_x__py=b"")
        case "shards":
            (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert index_checkpoint(source).digest != before


def test_what_is_not_loaded_does_not_count(tmp_path: Path) -> None:
    source = plain(tmp_path)
    before = index_checkpoint(source).digest
    directory(tmp_path, README__md=b"", tokenizer__json=b"", config__json=b"{ }")
    directory(tmp_path / "optimizer", state__pt=b"")
    assert index_checkpoint(source).digest == before


def test_the_latest_change_is_that_of_a_file_the_directory_or_a_link_on_the_way(tmp_path: Path) -> None:
    plain(tmp_path / "v1")
    plain(tmp_path / "v2")
    (tmp_path / "current").symlink_to("v1")
    source = WeightsSource(str(tmp_path / "current"))
    begun = index_checkpoint(source).changed_at
    assert begun == max((tmp_path / "v1").stat().st_ctime, (tmp_path / "current").lstat().st_ctime)
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(tmp_path / "current")  # as deployments do: the files themselves are old
    assert index_checkpoint(source).changed_at == (tmp_path / "current").lstat().st_ctime >= begun


def test_a_file_and_its_parts(tmp_path: Path) -> None:
    directory(tmp_path, model__gguf=b"one", other__gguf=b"other")
    alone = index_checkpoint(WeightsSource(str(tmp_path / "model.gguf"), load_format="gguf"))
    assert alone.files == 1
    for part in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / part).write_bytes(b"x")
    parts = WeightsSource(str(tmp_path / "m-00001-of-00002.gguf"), load_format="gguf")
    before = index_checkpoint(parts)
    assert before.files == 2
    touch(tmp_path / "m-00002-of-00002.gguf")
    assert index_checkpoint(parts).digest != before.digest


def hub(cache: Path, commit: str, blob: str) -> Path:
    """Lay out a repository as huggingface_hub does: blobs named for their content, links to them, a reference."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    for made in (repository / "blobs", repository / "refs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    (repository / "blobs" / blob).write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_hub_snapshot_is_known_by_its_blobs_on_any_host(tmp_path: Path) -> None:
    def indexed(cache: str, commit: str, blob: str) -> CheckpointIndex:
        return index_checkpoint(WeightsSource(str(hub(tmp_path / cache, commit * 40, blob * 64))))

    first = indexed("host1", "a", "b")
    touch(tmp_path / "host1" / "models--org--name" / "blobs" / ("b" * 64))
    assert indexed("host2", "c", "b").digest == first.digest
    assert indexed("host3", "a", "d").digest != first.digest


def test_a_repository_is_looked_up_where_it_was_downloaded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub(tmp_path, "a" * 40, "b" * 64)
    asked: list[tuple[str, dict[str, object]]] = []

    def snapshot_download(repository: str, **given: object) -> str:
        asked.append((repository, given))
        if repository != "org/name":
            raise FileNotFoundError("not in the cache")
        return str(snapshot)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    named = WeightsSource("org/name", download_dir=str(tmp_path))
    assert index_checkpoint(named).digest == index_checkpoint(WeightsSource(str(snapshot))).digest
    assert asked == [("org/name", {"revision": None, "cache_dir": str(tmp_path), "local_files_only": True})]
    reference = snapshot.parent.parent / "refs" / "main"
    assert index_checkpoint(named).changed_at >= reference.stat().st_ctime, "another revision is another reference"
    with pytest.raises(StepwellUsageError, match=r"'org/other'.*weights_id"):
        index_checkpoint(WeightsSource("org/other"))


def test_adapters_that_are_loaded_at_the_start_count(tmp_path: Path) -> None:
    source = plain(tmp_path / "model")
    adapter = directory(tmp_path / "adapter", adapter_model__safetensors=b"a", adapter_config__json=b"{}")
    with_one = dataclasses.replace(source, adapters=(("fine", adapter.path),))
    before = index_checkpoint(with_one).digest
    assert before != index_checkpoint(source).digest
    assert before != index_checkpoint(dataclasses.replace(source, adapters=(("other", adapter.path),))).digest
    touch(tmp_path / "adapter" / "adapter_config.json")  # its rank and scale
    assert index_checkpoint(with_one).digest != before


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (WeightsSource("/nowhere", load_format="dummy"), "load_format 'dummy'"),
        (WeightsSource("/nowhere", load_format="remote_instance"), "load_format 'remote_instance'"),
        (WeightsSource("/nowhere", load_format="a later one"), "load_format 'a later one'"),
        (WeightsSource("/nowhere", is_cached=True), "weight cache"),
        (WeightsSource("."), "has no weight files"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_no_file_names_the_weights_the_message_says_what_to_set(
    source: WeightsSource, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StepwellUsageError, match=why) as raised:
        index_checkpoint(source)
    assert '{"stepwell": {"weights_id": "..."}}' in str(raised.value)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("meta-llama/Llama-3-8B", "meta-llama/Llama-3-8B"),
        ("/models/llama/", "llama"),
        ("./llama", "llama"),
        ("/cache/models--org--name/snapshots/abc", "org/name"),
        ("/models/x.gguf", "x.gguf"),
        ("gpt2", "gpt2"),
        ("/", "/"),
    ],
)
def test_a_model_has_a_name_for_people(path: str, label: str) -> None:
    assert model_label(path) == label
