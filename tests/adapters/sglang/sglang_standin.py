"""A stand-in for what the plug-in touches of SGLang 0.5.23: names, signatures and order of calls are those of SGLang.

That they are is what test_sglang_updates.py holds against the real one.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

_ROOTS = (
    "sglang",
    "sglang.srt",
    "sglang.srt.elastic_ep",
    "sglang.srt.managers",
    "sglang.srt.managers.scheduler_components",
    "sglang.srt.model_executor",
    "sglang.srt.model_executor.model_runner_components",
    "sglang.srt.plugins",
)


@dataclass
class Request:
    """Any of the requests: the real ones have some of these fields each."""

    weight_version: str | None = None
    selector: str = "all"
    tags: list[str] | None = None
    action: str = "checksum"
    new_version: str = ""
    flush_cache: bool = True
    fails: bool = False


@dataclass
class Result:
    success: bool
    message: str = ""


@dataclass
class Engine:
    """What the stand-ins share: settings, and a log of what happened, in order."""

    has_cache: bool = True
    tp_size: int = 1
    pp_size: int = 1
    elastic: str | None = None
    is_idle: bool = True
    log: list[str] = field(default_factory=list)
    on_write: Callable[[], None] = lambda: None


class HookType:
    AROUND = "around"


class HookRegistry:
    """plugins/hook_registry.py, hooks around functions only."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, Callable[..., Any]]] = []

    def register(self, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert hook_type == HookType.AROUND
        self.hooks.append((target, hook))

    def apply_hooks(self) -> None:
        import pkgutil

        for target, hook in self.hooks:
            owner, _, name = target.rpartition(".")
            resolved = pkgutil.resolve_name(owner)
            setattr(resolved, name, _wrap(getattr(resolved, name), hook))


def _wrap(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


@dataclass
class Installed:
    """The modules, once they are in sys.modules."""

    engine: Engine
    registry: HookRegistry
    scheduler: Any
    manager: Any
    updater: Any
    backup: Any


def install(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Installed:
    """Put the stand-in in the place of SGLang until the test ends."""

    class WeightUpdater:
        def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
            return _written("disk")

        def update_weights_from_ipc(self, recv_req: Request) -> tuple[bool, str]:
            return _written("ipc")

        def update_weights_from_tensor(self, named_tensors: object) -> tuple[bool, str]:
            return _written("tensor")

        def load_weights_from_distributed(self, named_tensors: object) -> tuple[bool, str]:
            return _written("distributed")

        def begin_weight_update(self) -> None:
            _written("begin")

        def end_weight_update(self, *, run_post_load: bool) -> None:
            _written("end")

    class ExpertBackupClient:
        def update_weights(self, weight_name_filter: object = None) -> None:
            _written("backup")

    def _written(what: str) -> tuple[bool, str]:
        engine.log.append(f"write {what}")
        engine.on_write()
        return True, ""

    class Scheduler:
        def flush_cache(self, empty_cache: bool = True) -> bool:
            engine.log.append("flush")
            return engine.is_idle

        def handle_update_weight_version(self, recv_req: Request) -> Result:
            return Result(True)

    class SchedulerWeightUpdaterManager:
        tp_cpu_group: object
        draft_worker: object

        def __init__(self, draft_worker: object = None, tp_cpu_group: object = None) -> None:
            self.draft_worker, self.tp_cpu_group = draft_worker, tp_cpu_group
            self.flush_cache = Scheduler().flush_cache
            self.runner = WeightUpdater()
            self._session = False

        def update_weights_from_disk(self, recv_req: Request) -> Result:
            self.runner.update_weights_from_disk("", "")
            return self._flushed(recv_req)

        def update_weights_from_ipc(self, recv_req: Request) -> Result:
            self.runner.update_weights_from_ipc(recv_req)
            return self._flushed(recv_req)

        def update_weights_from_distributed(self, recv_req: Request) -> Result:
            if not self._session:
                return Result(False)
            self.runner.load_weights_from_distributed([])
            return self._flushed(recv_req)

        def update_weights_from_tensor(self, recv_req: Request) -> Result:
            if not self._session:
                return Result(False)
            self.runner.update_weights_from_tensor([])
            return self._flushed(recv_req)

        def begin_weight_update(self, recv_req: Request) -> Result:
            if self._session:
                return Result(False)
            self.runner.begin_weight_update()
            self._session = True
            return Result(True)

        def end_weight_update(self, recv_req: Request) -> Result:
            if not self._session:
                return Result(False)
            self.runner.end_weight_update(run_post_load=False)
            self._session = False
            return Result(True)

        def release_memory_occupation(self, recv_req: Request) -> None:
            _written("release")

        def resume_memory_occupation(self, recv_req: Request) -> None:
            _written("resume")

        def check_weights(self, recv_req: Request) -> Result:
            _written(recv_req.action)
            return Result(True)

        def _flushed(self, recv_req: Request) -> Result:
            if recv_req.fails:
                return Result(False)
            return Result(not recv_req.flush_cache or self.flush_cache(empty_cache=False))

    registry = HookRegistry()
    modules = {name: types.ModuleType(name) for name in _ROOTS}

    def module(name: str, **members: object) -> None:
        made = types.ModuleType(name)
        vars(made).update(members)
        modules[name] = made

    requests = {
        f"{name}Req{way}": type(f"{name}Req{way}", (), {"__annotations__": dict.fromkeys(fields, object)})
        for name in (
            "UpdateWeightFromDisk",
            "UpdateWeightsFromIPC",
            "UpdateWeightsFromDistributed",
            "UpdateWeightsFromTensor",
            "BeginWeightUpdate",
            "EndWeightUpdate",
            "ReleaseMemoryOccupation",
            "ResumeMemoryOccupation",
            "CheckWeights",
            "UpdateWeightVersion",
        )
        for way, fields in (
            ("Input", ("weight_version", "selector", "tags", "action", "new_version")),
            ("Output", ("success",)),
        )
    }
    module("sglang.srt.managers.io_struct", **requests)
    module("sglang.srt.managers.scheduler", Scheduler=Scheduler)
    module(
        "sglang.srt.managers.scheduler_components.weight_updater",
        SchedulerWeightUpdaterManager=SchedulerWeightUpdaterManager,
    )
    module("sglang.srt.model_executor.model_runner_components.weight_updater", WeightUpdater=WeightUpdater)
    module("sglang.srt.elastic_ep.expert_backup_client", ExpertBackupClient=ExpertBackupClient)
    module("sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=HookType)
    module(
        "sglang.srt.runtime_context",
        get_memory=lambda: types.SimpleNamespace(enable_hierarchical_cache=engine.has_cache),
        get_parallel=lambda: types.SimpleNamespace(tp_size=engine.tp_size, pp_size=engine.pp_size),
        get_exec=lambda: types.SimpleNamespace(moe=types.SimpleNamespace(elastic_ep_backend=engine.elastic)),
    )
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, made)
    return Installed(engine, registry, Scheduler, SchedulerWeightUpdaterManager, WeightUpdater, ExpertBackupClient)
