"""Weights that change under an engine: no page of others is served, not before, not after, not after a restart.

HTTP's POST /update_weights_from_disk and Engine.update_weights_from_disk end in the model runner's updater
(managers/scheduler.py, model_executor/model_runner.py); a backend is not told (hicache_storage.py has no such call),
and the pages' hashes do not know the weights. HiCacheFile serves the old pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
from deployment_kit import HIT, Deployment, Start, assert_close, assert_from_storage, is_close, over, prompt
from engine_kit import Answered
from model_kit import Llama


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
