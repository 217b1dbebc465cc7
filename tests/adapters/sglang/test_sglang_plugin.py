"""The plug-in: what it hooks, when the epoch changes around each call, and that it stays out of the way otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
from sglang_standin import Engine, Installed, Request, Result, install

from stepwell.adapters.sglang import bound, plugin, weights
from stepwell.adapters.sglang.checkpoint import WeightsSource
from stepwell.adapters.sglang.weights import WeightsEpoch

NOWHERE = WeightsSource("/nowhere", load_format="dummy")


@pytest.fixture
def epoch(monkeypatch: pytest.MonkeyPatch) -> WeightsEpoch:
    made = WeightsEpoch()
    made.at_start("w", NOWHERE)
    monkeypatch.setattr(plugin, "weights_epoch", lambda: made)
    return made


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, epoch: WeightsEpoch) -> Installed:
    """SGLang's stand-in with the plug-in in it; no byte of its weights is ever written under the epoch at the start."""
    engine = Engine()
    start = epoch.current

    def on_write() -> None:
        assert epoch.current != start
        assert epoch.is_random
        engine.log.append(epoch.current)

    engine.on_write = on_write
    installed = install(monkeypatch, engine)
    plugin.register()
    installed.registry.apply_hooks()
    assert epoch.is_watched
    return installed


def test_sglang_finds_the_plug_in() -> None:
    found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "stepwell"]
    assert [entry.load() for entry in found] == [plugin.register]


def test_loading_it_imports_nothing_heavy_and_outside_a_scheduler_it_does_nothing() -> None:
    script = """if True:
        import json, sys
        from stepwell.adapters.sglang.plugin import register
        from stepwell.adapters.sglang.weights import weights_epoch
        register()
        heavy = ("sglang", "torch", "numpy", "stepwell._core", "lmdb", "msgspec")
        print(json.dumps([[name for name in heavy if name in sys.modules], weights_epoch().is_watched]))
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == [[], False]


def test_it_hooks_only_where_a_scheduler_runs(monkeypatch: pytest.MonkeyPatch, epoch: WeightsEpoch) -> None:
    installed = install(monkeypatch, Engine())
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin.register()
    assert installed.registry.hooks == []
    assert not epoch.is_watched


def test_it_is_watched_only_once_every_hook_is_on(monkeypatch: pytest.MonkeyPatch, epoch: WeightsEpoch) -> None:
    installed = install(monkeypatch, Engine())
    plugin.register()
    assert not epoch.is_watched, "registered, not applied"
    original = installed.manager.end_weight_update
    installed.registry.apply_hooks()
    assert epoch.is_watched
    installed.manager.end_weight_update = original  # as another plug-in might, that replaces what we wrapped
    assert not epoch.is_watched


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda it: delattr(it.manager, "end_weight_update"), "end_weight_update is missing"),
        (lambda it: setattr(it.manager, "begin_weight_update", lambda self, other: None), "not ('self', 'recv_req')"),
        (lambda it: delattr(it.backup, "update_weights"), "ExpertBackupClient.update_weights is missing"),
        (lambda it: it.manager.__annotations__.pop("draft_worker"), "has no field draft_worker"),
        (lambda it: sys.modules["sglang.srt.managers"].__dict__.pop("io_struct"), "io_struct"),
    ],
    ids=["method", "signature", "module", "field", "requests"],
)
def test_another_sglang_is_left_alone_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    epoch: WeightsEpoch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Installed], object],
    said: str,
) -> None:
    installed = install(monkeypatch, Engine())
    spoil(installed)
    if said == "io_struct":
        monkeypatch.delitem(sys.modules, "sglang.srt.managers.io_struct")
    plugin.register()
    assert installed.registry.hooks == []
    assert not epoch.is_watched
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert said in caplog.text
    assert any(said in line for line in plugin.missing_hooks())


def test_the_prefetch_timeout_of_each_extra_config_that_sglang_reads_is_noted(
    monkeypatch: pytest.MonkeyPatch, epoch: WeightsEpoch
) -> None:
    """A backend is not told: the timeout is taken out before (hybrid_cache_controller.py:404-413)."""
    made = bound.LastTimeout()
    monkeypatch.setattr(plugin, "last_timeout", lambda: made)
    installed = install(monkeypatch, Engine())

    class HybridCacheController:
        @staticmethod
        def parse_storage_backend_extra_config(storage_backend_extra_config: str | None) -> Any:
            given = json.loads(storage_backend_extra_config or "{}")
            base = given.pop("prefetch_timeout_base", 1)
            per_ki_token = given.pop("prefetch_timeout_per_ki_token", 0.25)
            return given, 256, float(base), float(per_ki_token), False

    controller = types.ModuleType(plugin.READ_CONFIG.rsplit(".", 2)[0])
    vars(controller).update(HybridCacheController=HybridCacheController)
    for name in ("sglang.srt.mem_cache", "sglang.srt.mem_cache.hybrid_cache"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
        setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], package)
    monkeypatch.setitem(sys.modules, controller.__name__, controller)
    sys.modules["sglang.srt.mem_cache.hybrid_cache"].__dict__["hybrid_cache_controller"] = controller
    plugin.register()
    installed.registry.apply_hooks()
    assert epoch.is_watched
    assert made.seconds is None
    read = controller.__dict__["HybridCacheController"].parse_storage_backend_extra_config
    assert read('{"prefetch_timeout_base": 3, "prefetch_timeout_per_ki_token": 0.5, "x": 1}')[0] == {"x": 1}
    assert made.seconds == (3.0, 0.5)
    with pytest.raises(json.JSONDecodeError):
        read("{")
    assert made.seconds == (3.0, 0.5)
    read(None)
    assert made.seconds == (1.0, 0.25)


def test_nothing_is_missing_where_all_is_there(sglang: Installed) -> None:
    assert plugin.missing_hooks() == [], "hooked already, too"


# ---- requests -------------------------------------------------------------------------------------------------------


def of_version(version: str) -> str:
    made = WeightsEpoch()
    made.at_start("w", NOWHERE)
    with made.change(weights.OneRank(can_agree=True)) as change:
        made.flushed()
        change.finish(is_done=True, version=version)
    return made.current


@pytest.mark.parametrize("way", ["update_weights_from_disk", "update_weights_from_ipc"])
def test_an_update_switches_first_and_takes_its_version_last(sglang: Installed, epoch: WeightsEpoch, way: str) -> None:
    result = getattr(sglang.manager(), way)(Request(weight_version="v1"))
    assert result == Result(True)
    write, meanwhile, flush = sglang.engine.log
    assert (write[:5], flush) == ("write", "flush")
    assert meanwhile != epoch.current == of_version("v1")


@pytest.mark.parametrize("way", ["update_weights_from_disk", "update_weights_from_ipc"])
@pytest.mark.parametrize("reason", ["no version", "failed", "not flushed", "flush refused"])
def test_an_update_that_cannot_be_named_stays_random(
    sglang: Installed, epoch: WeightsEpoch, way: str, reason: str
) -> None:
    sglang.engine.is_idle = reason != "flush refused"
    request = Request(
        weight_version=None if reason == "no version" else "v1",
        fails=reason == "failed",
        flush_cache=reason != "not flushed",
    )
    getattr(sglang.manager(), way)(request)
    assert epoch.is_random
    if reason != "not flushed":
        sglang.engine.is_idle = True
        assert sglang.scheduler().flush_cache()
        assert epoch.is_random


def test_an_update_without_a_flush_is_named_at_the_next_flush(sglang: Installed, epoch: WeightsEpoch) -> None:
    sglang.manager().update_weights_from_disk(Request(weight_version="v1", flush_cache=False))
    sglang.engine.is_idle = False
    assert not sglang.scheduler().flush_cache()
    assert epoch.is_random
    sglang.engine.is_idle = True
    assert sglang.scheduler().flush_cache(empty_cache=False)
    assert epoch.current == of_version("v1")


@pytest.mark.parametrize("way", ["update_weights_from_distributed", "update_weights_from_tensor"])
def test_a_session_is_named_once_it_has_ended_and_the_cache_is_flushed(
    sglang: Installed, epoch: WeightsEpoch, way: str
) -> None:
    manager = sglang.manager()
    manager.begin_weight_update(Request())
    for _ in range(2):
        getattr(manager, way)(Request(weight_version="v1"))
    manager.end_weight_update(Request())
    assert epoch.is_random
    names = [line for line in sglang.engine.log if line.startswith("random")]
    assert len(set(names)) == len(names) == 4
    sglang.scheduler().flush_cache()
    assert epoch.current == of_version("v1")


@pytest.mark.parametrize(
    ("draft", "at_begin", "of_part", "is_named"),
    [
        (None, "all", "all", True),
        (None, "target", "target", True),
        (object(), "target", "all", False),
        (object(), "all", "target", False),
        (object(), "all", "draft", False),
        (object(), "all", "all", True),
    ],
)
def test_a_session_about_one_of_two_models_is_not_named(
    sglang: Installed, epoch: WeightsEpoch, draft: object, at_begin: str, of_part: str, is_named: bool
) -> None:
    manager = sglang.manager(draft_worker=draft)
    manager.begin_weight_update(Request(selector=at_begin))
    manager.update_weights_from_tensor(Request(weight_version="v1", selector=of_part))
    manager.end_weight_update(Request())
    sglang.scheduler().flush_cache()
    assert epoch.is_random != is_named


def test_calls_that_sglang_refuses_are_not_named(sglang: Installed, epoch: WeightsEpoch) -> None:
    manager = sglang.manager()
    assert not manager.update_weights_from_tensor(Request(weight_version="v1")).success
    assert not manager.end_weight_update(Request()).success
    sglang.scheduler().flush_cache()
    assert epoch.is_random


@pytest.mark.parametrize("way", ["release_memory_occupation", "resume_memory_occupation"])
@pytest.mark.parametrize("tags", [None, [], ["weights"], ["kv_cache", "weights"]])
def test_memory_of_the_weights_that_goes_and_comes_is_unknown(
    sglang: Installed, epoch: WeightsEpoch, way: str, tags: list[str] | None
) -> None:
    getattr(sglang.manager(), way)(Request(tags=tags))
    assert epoch.is_random


@pytest.mark.parametrize("tags", [["kv_cache"], ["cuda_graph", "kv_cache"]])
def test_other_memory_is_no_matter(
    sglang: Installed, epoch: WeightsEpoch, tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang.engine, "on_write", lambda: None)
    start = epoch.current
    sglang.manager().release_memory_occupation(Request(tags=tags))
    sglang.manager().resume_memory_occupation(Request(tags=tags))
    assert epoch.current == start


def test_a_check_that_overwrites_the_weights_is_a_change_and_one_that_reads_them_is_none(
    sglang: Installed, epoch: WeightsEpoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sglang.engine, "on_write", lambda: None)
        start = epoch.current
        for action in ("snapshot", "compare", "checksum"):
            sglang.manager().check_weights(Request(action=action))
        assert epoch.current == start
    sglang.manager().check_weights(Request(action="reset_tensors"))
    assert epoch.is_random


def test_a_name_alone_changes_nothing_and_is_taken(sglang: Installed, epoch: WeightsEpoch) -> None:
    start = epoch.current
    sglang.scheduler().handle_update_weight_version(Request(new_version="v1"))
    assert epoch.current == start
    sglang.manager().update_weights_from_disk(Request(weight_version="v1"))
    assert epoch.is_random


@pytest.mark.parametrize("where", ["updater", "backup"])
def test_weights_that_sglang_writes_unasked_are_a_change(sglang: Installed, epoch: WeightsEpoch, where: str) -> None:
    if where == "updater":
        assert sglang.updater().update_weights_from_disk("/models/llama", load_format="auto") == (True, "")
    else:
        sglang.backup().update_weights(weight_name_filter=None)
    assert epoch.is_random


# ---- whom it concerns -----------------------------------------------------------------------------------------------


def test_an_engine_without_a_hierarchical_cache_passes_through(
    sglang: Installed, epoch: WeightsEpoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*given: Any, **named: Any) -> Any:
        raise AssertionError("the ranks were asked")

    sglang.engine.has_cache, sglang.engine.tp_size = False, 2
    monkeypatch.setattr(plugin, "_TensorParallel", unexpected)
    manager = sglang.manager()
    assert manager.update_weights_from_disk(Request(weight_version="v1")) == Result(True)
    assert manager.begin_weight_update(Request()) == Result(True)
    assert manager.update_weights_from_tensor(Request()) == Result(True)
    assert manager.end_weight_update(Request()) == Result(True)
    manager.release_memory_occupation(Request())
    manager.check_weights(Request(action="reset_tensors"))
    assert epoch.is_random, "the bytes were seen all the same, on this rank"


@pytest.mark.parametrize("setting", ["pipeline", "elastic experts"])
def test_ranks_that_cannot_wait_for_one_another_keep_a_random_epoch(
    sglang: Installed, epoch: WeightsEpoch, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang.engine.tp_size = 2
    if setting == "pipeline":
        sglang.engine.pp_size = 2
    else:
        sglang.engine.elastic = "mooncake"
    sglang.manager().update_weights_from_disk(Request(weight_version="v1"))
    assert epoch.is_random


def test_tensor_parallel_ranks_are_asked_once_before_and_once_after(
    sglang: Installed, epoch: WeightsEpoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Ranks:
        can_agree = True

        def __init__(self, group: object) -> None:
            assert group == "group"

        def share(self, name: str) -> str:
            asked.append("share")
            return "random-" + "0" * 32

        def is_true_for_all(self, flag: bool) -> bool:
            asked.append(f"agree {flag}")
            return False

    monkeypatch.setattr(plugin, "_TensorParallel", Ranks)
    sglang.engine.tp_size = 2
    sglang.manager(tp_cpu_group="group").update_weights_from_disk(Request(weight_version="v1"))
    assert asked == ["share", "agree True"]
    assert epoch.current == "random-" + "0" * 32
