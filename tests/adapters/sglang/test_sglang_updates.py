"""The plug-in in the real SGLang 0.5.23: its own loader, registry, managers and updaters, on two ranks with gloo.

Skipped where SGLang is not installed. What an engine does with it over HTTP is tested beside the backend.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.adapters.sglang.checkpoint import WeightsSource, index_checkpoint

HAS_SGLANG = importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("torch") is not None
pytestmark = pytest.mark.skipif(not HAS_SGLANG, reason="sglang 0.5.23 and torch are not installed here")

CHILD = Path(__file__).with_name("sglang_updates_child.py")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
LIMIT_S = 900  # two processes import SGLang, which takes a minute on a busy machine


def write_model(at: Path) -> None:
    """A configuration, and a safetensors file of one tensor, `weight`, of four floats."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (at / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))


def await_a_later_start(changed_at: float) -> None:
    """Start processes until one began after a time: the clock of their starts ticks a hundred times a second."""
    script = "from stepwell.adapters.sglang.weights import _process_start; print(_process_start())"
    while float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout) <= changed_at:
        pass


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two ranks through every kind of update; what each saw."""
    directory = tmp_path_factory.mktemp("ranks")
    write_model(directory / "model")
    await_a_later_start(index_checkpoint(WeightsSource(str(directory / "model"))).changed_at)
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(CHILD), str(rank), "2", str(directory)],
                    stdout=subprocess.PIPE,
                    stderr=stack.enter_context((directory / f"stderr{rank}").open("w")),
                    text=True,
                )
            )
            for rank in range(2)
        ]
        try:
            printed = [child.communicate(timeout=LIMIT_S)[0] for child in children]
        finally:
            for child in children:
                child.kill()
    for rank, child in enumerate(children):
        assert child.returncode == 0, (directory / f"stderr{rank}").read_text()[-4000:]
    return [json.loads(lines.strip().splitlines()[-1]) for lines in printed]


pytestmark = [pytestmark, pytest.mark.timeout(LIMIT_S + 60)]


def seen(ranks: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return what was seen after a step: the same on both ranks."""
    first, second = (rank["seen"][what] for rank in ranks)
    assert first["epoch"] == second["epoch"]
    return dict(first)


def test_sglangs_own_loader_puts_every_hook_on(ranks: list[dict[str, Any]]) -> None:
    assert [rank["missing"] for rank in ranks] == [[], []]
    assert all(rank["is_watched"] for rank in ranks)


def test_the_identity_is_read_from_what_sglang_has_published(ranks: list[dict[str, Any]]) -> None:
    fields = [dict(rank["identity"]["fields"]) for rank in ranks]
    assert [rank["identity"]["shard"] for rank in ranks] == [[0, 2], [1, 2]]
    assert [rank["identity"]["model"] for rank in ranks] == ["model", "model"]
    assert {key: fields[0][key] for key in ("compute_dtype", "keys", "quantization", "kv_scales")} == {
        "compute_dtype": "bfloat16",
        "keys": "token",
        "quantization": "none",
        "kv_scales": "none",
    }
    assert {**fields[0], "tp_rank": 1} == fields[1]


def test_at_the_start_the_files_name_the_weights(ranks: list[dict[str, Any]]) -> None:
    assert {rank["start"] for rank in ranks} == {seen(ranks, "start")["epoch"]}
    assert ranks[0]["start"].startswith("files-")


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("disk", "version"),
        ("disk without a version", "random"),
        ("disk, version again", "random"),
        ("disk, flush refused", "random"),
        ("disk, not flushed", "random"),
        ("then flushed", "version"),
        ("tensor without a session", "random"),
        ("ipc, no engine", "random"),
        ("disk v7", "version"),
        ("KV released", "version"),
        ("weights released", "random"),
        ("disk v8", "version"),
        ("checked", "version"),
        ("reset", "random"),
        ("disk v9", "version"),
    ],
)
def test_the_epoch_after_each_update_is_the_same_on_all_ranks(
    ranks: list[dict[str, Any]], what: str, kind: str
) -> None:
    assert seen(ranks, what)["epoch"].partition("-")[0] == kind


def test_weights_are_written_under_a_random_epoch_that_is_not_the_one_before_or_after(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        before, wrote_any = rank["start"], 0
        for step in rank["seen"].values():
            for name in step["wrote"]:
                wrote_any += 1
                assert name.startswith("random-")
                assert name != before
            before = step["epoch"]
        assert wrote_any > 10


def test_a_rejected_flush_and_a_missing_engine_are_failures_of_sglang(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["seen"]["disk, flush refused"]["success"] is False
        assert rank["seen"]["ipc, no engine"]["success"] is False
        assert rank["seen"]["disk"]["success"] is True


def test_a_session_that_failed_on_one_rank_is_named_on_none(ranks: list[dict[str, Any]]) -> None:
    step = "distributed, failed on one rank"
    assert [rank["seen"][step]["success"] for rank in ranks] == [True, False]
    assert seen(ranks, step)["epoch"].startswith("random-")
    flushed = {rank["seen"][step]["flushed"] for rank in ranks}
    assert len(flushed) == 1
    assert flushed.pop().startswith("random-")


@pytest.mark.parametrize("way", ["distributed", "tensor"])
def test_a_session_is_named_after_its_end_and_a_flush(ranks: list[dict[str, Any]], way: str) -> None:
    step = seen(ranks, way)
    assert step["success"] is True
    assert step["meanwhile"].startswith("random-")
    assert step["epoch"].startswith("random-")
    assert step["meanwhile"] != step["epoch"]
    assert {rank["seen"][way]["flushed"] for rank in ranks} == {step["flushed"]}
    assert step["flushed"].startswith("version-")


def test_a_check_that_resets_the_weights_does(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["seen"]["reset"]["did"] for rank in ranks)


def test_what_sglang_writes_unasked_is_random_on_each_rank_alone(ranks: list[dict[str, Any]]) -> None:
    names = [rank["seen"]["unasked"]["epoch"] for rank in ranks]
    assert all(name.startswith("random-") for name in names)
    assert names[0] != names[1]


def test_followers_heard_every_name_in_order_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["told"][:-1] for rank in ranks)  # the last is that of the unasked change
    assert first == second
    assert len(first) == len(set(first))
