"""Engines of several ranks and replicas, and of a model whose KV every rank holds: who keeps what, and who finds it.

A page belongs to a pipeline stage and, but for MLA, to a tensor-parallel rank (HiCacheStorageConfig,
managers/cache_controller.py:794); of MLA's copies only the first rank's is written (hicache_storage.py:69,
`is_storage_writer`). Data-parallel replicas are schedulers of their own (managers/data_parallel_controller.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
from deployment_kit import HIT, Deployment, Start, assert_close, assert_from_storage, over, prompt, until_found
from model_kit import MiniCPM3

from stepwell.inspection import Page, read_pages

PAGES = 25  # of a prompt, all of which are kept
TWO = {"environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}  # two ranks on one NUMA node: utils/numa_utils.py:463


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with MLA."""
    return MiniCPM3().write(tmp_path_factory.mktemp("latent"))


def named(deployment: Deployment) -> Deployment:
    """Name the weights: of files that are newer than an engine's process stepwell trusts no time."""
    return deployment.with_settings(weights_id="latent")


def kept(deployment: Deployment) -> Iterator[list[Page]]:
    """Read the pages that lie in each of the directories."""
    for folder in deployment.store.folders:
        if folder.exists():
            yield list(read_pages(str(folder)))


@over("B", more=("A",))
def test_latents_come_from_storage_after_a_flush_and_after_a_restart(
    deployment: Deployment, start: Start, latent_model: Path
) -> None:
    deployment = named(deployment)
    engine = deployment.start(start, latent_model)
    cold = engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    assert warm.device == HIT
    assert_close(cold, warm)
    engine.flush()
    assert_from_storage(engine.generate(prompt(1)), warm)
    engine.kill()
    assert_from_storage(deployment.start(start, latent_model).generate(prompt(1)), warm)


@pytest.mark.long
@over("A", "B")
def test_of_latents_that_two_ranks_hold_one_copy_is_kept_by_one_writer(
    deployment: Deployment, start: Start, latent_model: Path
) -> None:
    deployment = named(deployment)
    engine = deployment.start(start, latent_model, tp_size=2, **TWO)
    engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    assert warm.device == HIT
    engine.flush()
    # The second rank reads the pages of the first one's volumes, once it has seen them.
    assert_from_storage(until_found(engine, prompt(1)), warm)
    engine.stop()
    for pages in kept(deployment):
        assert len({page.volume_id for page in pages}) == 1
        assert len({page.key for page in pages}) == len(pages) == PAGES
    assert_from_storage(until_found(deployment.start(start, latent_model, tp_size=2, **TWO), prompt(1)), warm)


@pytest.mark.long
@over("A", "B")
def test_what_one_replica_of_an_engine_stored_the_other_one_finds(
    deployment: Deployment, start: Start, model: Path
) -> None:
    engine = deployment.start(start, model, dp_size=2, **TWO)
    engine.generate(prompt(1), replica=0)
    warm = engine.generate(prompt(1), replica=0)
    assert warm.device == HIT
    assert engine.generate(prompt(2), replica=1).cached == 0
    engine.flush()
    assert_from_storage(until_found(engine, prompt(1), replica=1), warm)
    engine.flush()
    assert until_found(engine, prompt(2), replica=0).storage == HIT
    engine.stop()
    for pages in kept(deployment):
        # Of a prompt that both have computed, before either saw the other's, both may keep pages.
        assert len({page.key for page in pages}) == 2 * PAGES
        assert len({page.fingerprint for page in pages}) == 1
    again = deployment.start(start, model, dp_size=2, **TWO)
    for replica in (1, 0):
        assert_from_storage(until_found(again, prompt(1), replica=replica), warm)


@pytest.mark.long
@over("B", more=("A",))
def test_each_stage_of_a_pipeline_keeps_and_finds_its_layers(deployment: Deployment, start: Start, model: Path) -> None:
    engine = deployment.start(start, model, pp_size=2, **TWO)
    engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    assert warm.device == HIT
    engine.flush()
    assert_from_storage(until_found(engine, prompt(1)), warm)
    engine.stop()
    for pages in kept(deployment):
        assert sorted(Counter(page.fingerprint for page in pages).values()) == [PAGES, PAGES]
    assert_from_storage(until_found(deployment.start(start, model, pp_size=2, **TWO), prompt(1)), warm)
