"""Watch SGLang's weights: the entry point `stepwell` of the group `sglang.srt.plugins`.

SGLang calls `register` in each of its processes (plugins/__init__.py:103). In a scheduler's, and nowhere else, it hooks
every way in which SGLang 0.5.23 changes weights, and tells the epoch (weights.py) before and after. It also notes the
prefetch timeouts that SGLang reads, at the start and at run time (bound.py).

Two layers are hooked. The scheduler's SchedulerWeightUpdaterManager takes every request for a change, on all
tensor-parallel ranks in the same order: there the ranks share a name and agree on a version. Below it, the runners'
WeightUpdater and the expert backup write the bytes: what reaches them with no request (experts that a failed rank took
with it, eplb/eplb_manager.py:337) may reach one rank alone, and switches that rank without asking the others.

Not hooked, since no page depends on it: moving experts between ranks, CUDA graphs, groups for weight transfer. LoRA
adapters stand in SGLang's own page hashes by their id (managers/schedule_batch.py:1166), which is drawn for each load;
those loaded at start have a stable one, and are in the epoch at the start (checkpoint.py).

An engine without a hierarchical cache passes through the hooks untouched. Where a hook's target is missing or has
another signature, none is set, one line is logged, and `weights_epoch().is_watched` stays false.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from stepwell.adapters.sglang.bound import last_timeout
from stepwell.adapters.sglang.weights import OneRank, Ranks, weights_epoch

_LOG = logging.getLogger("stepwell")

# What a scheduler's process has imported before it loads plug-ins (managers/scheduler.py:328). Hooks import what they
# hook, and in the other processes, before SGLang has set its environment, that is neither free nor safe.
_SCHEDULER = "sglang.srt.managers.scheduler"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_BACKUP = "sglang.srt.elastic_ep.expert_backup_client.ExpertBackupClient"
_REQUESTS = "sglang.srt.managers.io_struct"

# SGLang's objects come without types that mypy could hold against its version here: they are Any, and `missing_hooks`
# holds the names against the version that is installed.
Hook = Callable[..., Any]


def register() -> None:
    """Hook SGLang's weight updates, in a process that runs a scheduler.

    Threads: called once by SGLang's loader, before the scheduler is made (managers/scheduler.py:6323).
    """
    if _SCHEDULER not in sys.modules:
        return
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    # Apart from the weights: where it is missing, backends take the timeout of the start, and no update goes unseen.
    if not missing_of({READ_CONFIG: ("storage_backend_extra_config",)}, {}):
        registry.HookRegistry.register(READ_CONFIG, _read_config, registry.HookType.AROUND)
    missing = missing_hooks()
    if missing:
        _LOG.warning(
            "stepwell: this SGLang is not the one that stepwell knows (0.5.23); updates of weights are not watched: %s",
            "; ".join(missing),
        )
        return
    for target, hook in HOOKS.items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
    weights_epoch().watch(_are_installed)


def missing_hooks() -> list[str]:
    """Say what of SGLang the plug-in would hook or read and does not find: empty where all is as it must be.

    Imports SGLang, and with it torch.
    """
    return missing_of(_SIGNATURES, _FIELDS)


def missing_of(signatures: Mapping[str, tuple[str, ...]], fields: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Say what is missing, or is otherwise than asked.

    Args:
        signatures: of functions by their full names, the first parameters. fields: of classes, those annotated.
    """
    missing = []
    for target, parameters in signatures.items():
        try:
            found = tuple(inspect.signature(resolve_name(target)).parameters)
        except (ImportError, AttributeError, TypeError) as error:
            missing.append(f"{target} is missing ({error})")
            continue
        if found[: len(parameters)] != parameters:
            missing.append(f"{target} takes {found}, not {parameters}")
    for name, wanted in fields.items():
        try:
            annotations = inspect.get_annotations(resolve_name(name))
        except (ImportError, AttributeError) as error:
            missing.append(f"{name} is missing ({error})")
            continue
        missing += [f"{name} has no field {field}" for field in wanted if field not in annotations]
    return missing


def _are_installed() -> bool:
    """Return whether each hook is on its target's chain of wrappers, where SGLang's registry has put it."""
    return all(_is_wrapped(resolve_name(target), hook) for target, hook in HOOKS.items())


def _is_wrapped(function: Any, hook: Hook) -> bool:
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class _TensorParallel:
    """The tensor-parallel ranks of a manager: they take requests in one order, and meet in barriers of this group."""

    can_agree = True

    def __init__(self, group: Any) -> None:
        self._group = group

    def share(self, name: str) -> str:
        """Return the first rank's name: names are ASCII and of one length."""
        import torch

        letters = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)
        torch.distributed.broadcast(letters, group_src=0, group=self._group)
        return bytes(letters.tolist()).decode()

    def is_true_for_all(self, flag: bool) -> bool:
        """Return whether the flag is true on all ranks."""
        import torch

        least = torch.tensor([int(flag)], dtype=torch.int32)
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(least.item())


def _ranks_of(manager: Any) -> Ranks | None:
    """Return the ranks that change with this one, or None where no page is cached beside the device.

    What decides is the same on all ranks, whatever became of a backend on one of them: else one would wait for another
    that does not come.
    """
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel

    if not get_memory().enable_hierarchical_cache:
        return None
    parallel = get_parallel()
    # Stages of a pipeline change one after the other, each before it passes the request on
    # (managers/scheduler_pp_mixin.py:139): they cannot wait for one another, and pages depend on all stages before.
    # With elastic experts a rank may be gone while the others go on.
    if parallel.pp_size > 1 or get_exec().moe.elastic_ep_backend is not None:
        return OneRank(can_agree=False)
    if parallel.tp_size > 1:
        return _TensorParallel(manager.tp_cpu_group)
    return OneRank(can_agree=True)


# ---- around the manager: requests, on all ranks ---------------------------------------------------------------------


def _update(original: Hook, manager: Any, request: Any) -> Any:
    """Around an update that is whole in itself: from disk, from a checkpoint engine."""
    ranks = _ranks_of(manager)
    if ranks is None:
        return original(manager, request)
    with weights_epoch().change(ranks) as change:
        result = original(manager, request)
        change.finish(is_done=result.success, version=request.weight_version)
    return result


def _update_part(original: Hook, manager: Any, request: Any) -> Any:
    """Around an update that SGLang takes within a session only: from another process's tensors."""
    ranks = _ranks_of(manager)
    if ranks is None:
        return original(manager, request)
    with weights_epoch().part(ranks) as change:
        result = original(manager, request)
        change.finish(is_done=result.success and _is_whole(manager, request), version=request.weight_version)
    return result


def _begin(original: Hook, manager: Any, request: Any) -> Any:
    ranks = _ranks_of(manager)
    if ranks is None:
        return original(manager, request)
    with weights_epoch().session_begin(ranks, is_whole=_is_whole(manager, request)) as change:
        result = original(manager, request)
        change.finish(is_done=result.success, version=None)
    return result


def _end(original: Hook, manager: Any, request: Any) -> Any:
    ranks = _ranks_of(manager)
    if ranks is None:
        return original(manager, request)
    with weights_epoch().session_end(ranks) as change:
        result = original(manager, request)
        change.finish(is_done=result.success, version=None)
    return result


def _change_memory(original: Hook, manager: Any, request: Any) -> Any:
    """Around the release and return of device memory, which loses weights; what comes back is not ours to judge."""
    ranks = _ranks_of(manager)
    # No tags are all tags (managers/scheduler_components/weight_updater.py:339).
    if ranks is None or (request.tags and "weights" not in request.tags):
        return original(manager, request)
    with weights_epoch().change(ranks):
        return original(manager, request)


def _check(original: Hook, manager: Any, request: Any) -> Any:
    """Around a check, of which one kind fills the weights with noise (utils/weight_checker.py:140)."""
    ranks = _ranks_of(manager)
    if ranks is None or request.action in ("checksum", "compare", "snapshot"):
        return original(manager, request)
    with weights_epoch().change(ranks):
        return original(manager, request)


def _is_whole(manager: Any, request: Any) -> bool:
    """Return whether a request is about all models: a version names the weights of the target and of its draft."""
    return bool(request.selector == "all" or (request.selector == "target" and manager.draft_worker is None))


# ---- around the scheduler -------------------------------------------------------------------------------------------


def _flush(original: Hook, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    is_flushed = original(scheduler, *args, **kwargs)
    if is_flushed:
        weights_epoch().flushed()
    return is_flushed


def _label(original: Hook, scheduler: Any, request: Any) -> Any:
    """Around giving the present weights another name, which changes none of them."""
    result = original(scheduler, request)
    weights_epoch().label(request.new_version)
    return result


# ---- around the runners: bytes, on one rank -------------------------------------------------------------------------


def _write(original: Hook, *args: Any, **kwargs: Any) -> Any:
    weights_epoch().changed()
    return original(*args, **kwargs)


# ---- around the reading of an extra config --------------------------------------------------------------------------


def _read_config(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Note the prefetch timeout: the backend, which is made next, is not told of it (bound.py)."""
    result = original(*args, **kwargs)
    _, _, base, per_ki_token, _ = result
    last_timeout().seconds = (base, per_ki_token)
    return result


READ_CONFIG = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.parse_storage_backend_extra_config"
)
HOOKS: Mapping[str, Hook] = {
    f"{_MANAGER}.update_weights_from_disk": _update,
    f"{_MANAGER}.update_weights_from_ipc": _update,
    f"{_MANAGER}.update_weights_from_distributed": _update_part,
    f"{_MANAGER}.update_weights_from_tensor": _update_part,
    f"{_MANAGER}.begin_weight_update": _begin,
    f"{_MANAGER}.end_weight_update": _end,
    f"{_MANAGER}.release_memory_occupation": _change_memory,
    f"{_MANAGER}.resume_memory_occupation": _change_memory,
    f"{_MANAGER}.check_weights": _check,
    f"{_SCHEDULER}.Scheduler.flush_cache": _flush,
    f"{_SCHEDULER}.Scheduler.handle_update_weight_version": _label,
    f"{_UPDATER}.update_weights_from_disk": _write,
    f"{_UPDATER}.update_weights_from_ipc": _write,
    f"{_UPDATER}.update_weights_from_tensor": _write,
    f"{_UPDATER}.load_weights_from_distributed": _write,
    f"{_UPDATER}.begin_weight_update": _write,
    f"{_UPDATER}.end_weight_update": _write,
    f"{_BACKUP}.update_weights": _write,
}
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    **{target: ("self", "recv_req") for target in HOOKS if target.startswith(_MANAGER)},
    f"{_SCHEDULER}.Scheduler.flush_cache": ("self",),
    f"{_SCHEDULER}.Scheduler.handle_update_weight_version": ("self", "recv_req"),
    **{target: ("self",) for target in HOOKS if target.startswith((_UPDATER, _BACKUP))},
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
    "sglang.srt.runtime_context.get_memory": (),
    "sglang.srt.runtime_context.get_parallel": (),
    "sglang.srt.runtime_context.get_exec": (),
}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    _MANAGER: ("tp_cpu_group", "draft_worker"),
    f"{_REQUESTS}.UpdateWeightFromDiskReqInput": ("weight_version",),
    f"{_REQUESTS}.UpdateWeightsFromIPCReqInput": ("weight_version",),
    f"{_REQUESTS}.UpdateWeightsFromDistributedReqInput": ("weight_version", "selector"),
    f"{_REQUESTS}.UpdateWeightsFromTensorReqInput": ("weight_version", "selector"),
    f"{_REQUESTS}.BeginWeightUpdateReqInput": ("selector",),
    f"{_REQUESTS}.ReleaseMemoryOccupationReqInput": ("tags",),
    f"{_REQUESTS}.ResumeMemoryOccupationReqInput": ("tags",),
    f"{_REQUESTS}.CheckWeightsReqInput": ("action",),
    f"{_REQUESTS}.UpdateWeightVersionReqInput": ("new_version",),
    f"{_REQUESTS}.UpdateWeightFromDiskReqOutput": ("success",),
    f"{_REQUESTS}.UpdateWeightsFromIPCReqOutput": ("success",),
    f"{_REQUESTS}.UpdateWeightsFromDistributedReqOutput": ("success",),
    f"{_REQUESTS}.UpdateWeightsFromTensorReqOutput": ("success",),
    f"{_REQUESTS}.BeginWeightUpdateReqOutput": ("success",),
    f"{_REQUESTS}.EndWeightUpdateReqOutput": ("success",),
}
