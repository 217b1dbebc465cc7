"""Weights that change under an engine: no page of others is served, not before, not after, not after a restart.

HTTP's POST /update_weights_from_disk and Engine.update_weights_from_disk end in the model runner's updater
(managers/scheduler.py, model_executor/model_runner.py); a backend is not told (hicache_storage.py has no such call),
and the pages' hashes do not know the weights. HiCacheFile serves the old pages.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
from deployment_kit import (
    HIT,
    Deployment,
    Start,
    assert_close,
    assert_from_storage,
    is_close,
    over,
    prompt,
    until_found,
)
from engine_kit import Answered, EngineFailedError
from model_kit import Llama
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same model."""
    return Llama(seed=1).write(tmp_path_factory.mktemp("other"))


@pytest.fixture
def truth(start: Start, model: Path, other: Path) -> dict[Path, Answered]:
    """What each of the two says to the prompt, without any storage."""
    said = {}
    for weights in (model, other):
        engine = start(weights, backend=None)
        said[weights] = engine.generate(prompt(1))
        engine.stop()
    assert said[model].tokens != said[other].tokens
    return said


@over("A", more=("B",))
def test_after_an_update_only_pages_of_the_new_weights_are_served(
    deployment: Deployment, start: Start, model: Path, other: Path, truth: dict[Path, Answered]
) -> None:
    engine = deployment.start(start, model)
    engine.generate(prompt(1))
    old = engine.generate(prompt(1))
    engine.flush()

    assert engine.update(other, version="v2")["success"]
    first = engine.generate(prompt(1))
    assert first.storage == 0
    assert_close(first, truth[other])
    new = engine.generate(prompt(1))
    engine.flush()
    assert_from_storage(engine.generate(prompt(1)), new)
    engine.flush()

    assert engine.update(model, version=None)["success"]  # back, under no name: its epoch is random
    again = engine.generate(prompt(1))
    assert again.storage == 0
    assert_close(again, truth[model])
    engine.flush()

    assert not engine.update(model.parent / "nowhere", version="v3")["success"]
    engine.flush()
    failed = engine.generate(prompt(1))
    assert failed.storage == 0  # what the weights are now, nobody knows for sure
    assert_close(failed, truth[model])
    engine.stop()

    restarted = deployment.start(start, model)
    assert_from_storage(restarted.generate(prompt(1)), old)
    restarted.flush()
    # The name it had, with the weights it had then: its pages may be there still, but the old ones are not served.
    assert restarted.update(other, version="v2")["success"]
    assert_close(restarted.generate(prompt(1)), new)
    restarted.stop()

    # The other weights from the start: their epoch is their checkpoint's, which no page has.
    changed = deployment.start(start, other)
    fresh = changed.generate(prompt(1))
    assert fresh.storage == 0
    assert_close(fresh, truth[other])


@over("B", more=("A",))
def test_an_update_that_does_not_flush_leaves_no_old_page_under_the_new_name(
    deployment: Deployment, start: Start, model: Path, other: Path, truth: dict[Path, Answered]
) -> None:
    engine = deployment.start(start, model)
    engine.generate(prompt(1))
    engine.flush()
    engine.generate(prompt(1))
    assert engine.update(other, version="v2", flush=False)["success"]
    engine.generate(prompt(1))  # from the old KV on the device: SGLang was told to keep it
    engine.flush()
    after = engine.generate(prompt(1))
    assert_close(after, truth[other])
    engine.stop()
    restarted = deployment.start(start, model)
    restarted.flush()
    assert restarted.update(other, version="v2")["success"]
    assert_close(restarted.generate(prompt(1)), truth[other])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@over("A", "B")
def test_engines_that_took_the_same_version_of_the_same_weights_share_its_pages(
    deployment: Deployment, start: Start, model: Path, other: Path, truth: dict[Path, Answered], ranks: int
) -> None:
    # The version is told with the update (managers/io_struct.py: UpdateWeightFromDiskReqInput.weight_version); what it
    # counts from is stepwell's `weights_id`.
    deployment = deployment.with_settings(weights_id="run-1")
    more = {"tp_size": ranks, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}} if ranks > 1 else {}
    first, second = deployment.start(start, model, **more), deployment.start(start, model, **more)
    assert first.update(other, version="v2")["success"]
    first.generate(prompt(1))
    warm = first.generate(prompt(1))
    assert_close(warm, truth[other])
    first.flush()
    assert_from_storage(until_found(first, prompt(1)), warm)
    before = second.generate(prompt(1))
    assert before.storage == 0
    assert_close(before, truth[model])
    second.flush()
    assert second.update(other, version="v2")["success"]
    assert_from_storage(until_found(second, prompt(1)), warm)


@pytest.mark.long
@over("A", "B")
def test_an_update_that_fails_half_way_leaves_no_page_of_it_under_any_name(
    deployment: Deployment, start: Start, model: Path, other: Path, tmp_path: Path
) -> None:
    # model_runner_components/weight_updater.py:216-238: SGLang has written a part by then, and to go back it reads the
    # path of the failed ones again (:193), so that the scheduler dies of the second failure.
    half = tmp_path / "half"
    shutil.copytree(other, half)
    weights = load_file(half / "model.safetensors")
    last = "model.norm.weight"  # loaders of larger ones pad what is too small on a CPU
    assert last == max(weights)
    save_file(weights | {last: weights[last][1:].contiguous()}, half / "model.safetensors", {"format": "pt"})
    engine = deployment.start(start, model)
    engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    engine.flush()
    with contextlib.suppress(EngineFailedError):
        assert not engine.update(half, version="v2")["success"]
        assert engine.generate(prompt(1)).storage == 0
    engine.kill()
    again = deployment.start(start, model)
    assert_from_storage(again.generate(prompt(1)), warm)


@over(more=("file",))
def test_hicache_file_serves_pages_of_the_old_weights(
    deployment: Deployment, start: Start, model: Path, other: Path, truth: dict[Path, Answered]
) -> None:
    engine = deployment.start(start, model)
    engine.generate(prompt(1))
    engine.flush()
    assert engine.update(other, version="v2")["success"]
    wrong = engine.generate(prompt(1))
    assert wrong.storage == HIT
    assert not is_close(wrong, truth[other])
