"""SGLang's whole engine over a storage backend: a prompt that comes from it is continued as if it had been computed.

The scheduler, the tokenizer and the detokenizer are SGLang's processes; the model is two layers of random weights, so
that tokens alone say little: logprobs are compared. A hit on the device and a hit in storage extend the same tokens
from the same KV by the same kernels, so that theirs are equal to the last bit; a cold run cuts its work otherwise.

`cached_tokens_details` says where the cached part of a prompt came from (managers/schedule_batch.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sglang_here  # noqa: F401  # skips this module where SGLang is not
from backends import Flags
from deployment_kit import HIT, Deployment, Start, assert_close, assert_from_storage, over, prompt, until_found
from engine_kit import Answered, Server


@over("A", "B", more=("file", "file-buffer"))
def test_a_prompt_comes_from_storage_after_a_flush_and_after_a_restart_and_after_a_kill(
    deployment: Deployment, start: Start, model: Path
) -> None:
    engine = deployment.start(start, model)
    cold = engine.generate(prompt(1))
    assert cold.cached == 0
    warm = engine.generate(prompt(1))
    assert warm.device == HIT
    assert_close(cold, warm)
    engine.flush()
    assert engine.generate(prompt(2)).cached == 0
    engine.flush()
    assert_from_storage(engine.generate(prompt(1)), warm)
    engine.stop()

    restarted = deployment.start(start, model)
    assert_from_storage(restarted.generate(prompt(1)), warm)
    # Killed while it writes: the answer is there before the pages are.
    known = {seed: restarted.generate(prompt(seed)) for seed in range(3, 6)}
    restarted.kill()

    after = deployment.start(start, model)
    assert_from_storage(after.generate(prompt(1)), warm)
    for seed, expected in known.items():
        again = after.generate(prompt(seed))
        assert again.storage <= HIT
        assert_close(again, expected)


@pytest.mark.long
@over("A", "B", "file")
def test_an_engine_killed_at_any_moment_leaves_nothing_wrong(deployment: Deployment, start: Start, model: Path) -> None:
    choose = random.Random(5)
    known: dict[int, Answered] = {}
    for _ in range(5):
        engine = deployment.start(start, model)
        for seed, expected in known.items():
            assert_close(engine.generate(prompt(seed)), expected)
        for _ in range(choose.randrange(3)):
            seed = 10 + len(known)
            known[seed] = engine.generate(prompt(seed))
        engine.start_to_generate(prompt(99))
        if choose.random() < 0.5:
            engine.generated()
        engine.kill()


@over("B", more=("A", "file"))
def test_two_ranks_keep_and_find_their_shards(deployment: Deployment, start: Start, model: Path) -> None:
    two = {"tp_size": 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    engine = deployment.start(start, model, **two)
    engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    assert warm.device == HIT
    engine.flush()
    assert_from_storage(engine.generate(prompt(1)), warm)
    engine.stop()
    assert_from_storage(deployment.start(start, model, **two).generate(prompt(1)), warm)


@over("A", more=("B", "file"))
def test_what_one_engine_stored_another_one_finds_while_both_run(
    deployment: Deployment, start: Start, model: Path
) -> None:
    first, second = deployment.start(start, model), deployment.start(start, model)
    first.generate(prompt(1))
    warm = first.generate(prompt(1))
    first.flush()
    assert_from_storage(until_found(second, prompt(1)), warm)
    # Both compute the same prompt at once, and another engine's pages are not damaged by it.
    for engine in (first, second):
        engine.start_to_generate(prompt(2))
    one, other = first.generated(), second.generated()
    assert_close(one, other)
    for engine in (first, second):
        engine.flush()
        again = engine.generate(prompt(2))
        assert again.storage == HIT
        assert_close(again, one)


@over("A", more=("B", "file"))
def test_with_delays_and_failures_of_its_calls_an_engine_answers_the_same(
    deployment: Deployment, start: Start, model: Path
) -> None:
    # hicache_storage.py:519: SGLang's own injector, around any backend.
    environment = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
    }
    engine = deployment.start(start, model, environment=environment)
    known = {seed: engine.generate(prompt(seed)) for seed in range(3)}
    from_storage = 0
    for _ in range(4):
        engine.flush()
        for seed, expected in known.items():
            again = engine.generate(prompt(seed))
            assert_close(again, expected)
            from_storage += again.storage
    assert from_storage > 0


@over("B", more=("A", "file"))
def test_a_backend_is_attached_and_cleared_and_detached_over_http(
    deployment: Deployment, start: Start, model: Path
) -> None:
    # buffer_only is refused without a backend at the start (arg_groups/hicache_hook.py:273): it has one, that goes.
    first = deployment.flags if "hicache_host_memory_mode" in deployment.arguments else None
    server: Server = start(model, backend=first, kind=Server, **deployment.arguments)
    place = "/hicache/storage-backend"
    if first is not None:
        assert server.ask("DELETE", place, admin=True)[0] == 200
    # http_server.py:1125: with the admin key alone.
    assert server.ask("PUT", place, _attach(deployment.flags))[0] in (401, 403)
    wrong = _attach(Flags("dynamic", deployment.flags.extra | {"module_path": "dynamic", "class_name": "Nothing"}))
    assert server.ask("PUT", place, wrong, admin=True)[0] == 400
    status, said = server.ask("PUT", place, _attach(deployment.flags), admin=True)
    assert status == 200, said
    server.generate(prompt(1))
    warm = server.generate(prompt(1))
    server.flush()
    assert_from_storage(server.generate(prompt(1)), warm)
    server.flush()
    assert server.ask("POST", f"{place}/clear", admin=True)[0] == 200
    assert server.generate(prompt(1)).cached == 0
    server.flush()
    for _ in range(2):  # the second has nothing left to detach, and says 200 too
        assert server.ask("DELETE", place, admin=True)[0] == 200
    assert server.generate(prompt(1)).cached == 0
    server.flush()
    assert server.ask("PUT", place, _attach(deployment.flags), admin=True)[0] == 200
    assert_from_storage(server.generate(prompt(1)), warm)


@pytest.mark.long
@over("A", "B")
def test_processes_that_sglang_spawns_find_the_backend_as_forks_do(
    deployment: Deployment, start: Start, model: Path
) -> None:
    # entrypoints/engine.py:1995: each of its processes imports SGLang and loads the plug-ins by itself.
    engine = deployment.start(start, model, spawn=True)
    engine.generate(prompt(1))
    warm = engine.generate(prompt(1))
    engine.flush()
    assert_from_storage(engine.generate(prompt(1)), warm)


def _attach(flags: Flags) -> dict[str, Any]:
    return {
        "hicache_storage_backend": flags.name,
        "hicache_storage_backend_extra_config_json": flags.arguments()["hicache_storage_backend_extra_config"],
        "hicache_storage_prefetch_policy": "wait_complete",
    }
