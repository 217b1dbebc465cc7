"""One tensor-parallel rank of SGLang 0.5.23 without its engine: the real weight updaters around a toy model.

Run as `python sglang_updates_child.py RANK RANKS DIRECTORY`; prints what it saw as one line of JSON. The model under
DIRECTORY and the file through which the ranks meet are made by the test.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import sglang.srt.managers.scheduler  # as in a scheduler's process, before the plug-ins
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.weight_checker import WeightChecker

from stepwell.adapters.sglang.identity import EngineConfig, identity
from stepwell.adapters.sglang.plugin import missing_hooks
from stepwell.adapters.sglang.weights import weights_epoch


class Model(torch.nn.Module):
    """Weights that note under which epoch they were written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.written_under: list[str] = []
        self.fails = False

    def load_weights(self, named: Any) -> None:
        """Take weights as SGLang's models do."""
        for name, value in named:
            self.written_under.append(weights_epoch().current)
            if self.fails:
                raise RuntimeError("as a model does whose shapes do not fit")
            dict(self.named_parameters())[name].data.copy_(value)


class Rank:
    """A rank: its model, SGLang's updaters around it, and what has been seen."""

    def __init__(self, is_odd: bool) -> None:
        self.model = Model()
        self.is_odd = is_odd
        self.is_idle = True
        # From SGLang's class, not from an instance: what the scheduler captures of itself is hooked in the same way.
        scheduler: Any = types.SimpleNamespace(
            flush=sglang.srt.managers.scheduler.Scheduler.flush_cache,
            record_weight_version_change=lambda new_version: None,
            _engine_paused=False,
            disaggregation_mode=None,
        )
        updater = WeightUpdater(
            tp_rank=int(is_odd),
            device="cpu",
            gpu_id=0,
            model_config=runtime_context.process_model_config(),
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda model, **given: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        checker = WeightChecker(get_model=lambda: self.model)
        runner = types.SimpleNamespace(
            weight_updater=updater,
            model=self.model,
            check_weights=lambda action, **given: checker.handle(action, allow_quant_error=False, role="target"),
        )
        worker = types.SimpleNamespace(
            model_runner=runner,
            weight_update_runners=lambda: [("target", runner)],
            deserialize_own_rank=lambda given: [("weight", torch.ones(4))],
        )
        self.updater = updater
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=types.SimpleNamespace(pause=lambda tag: None, resume=lambda tag: None),
            flush_cache=lambda empty_cache=True: scheduler.flush(_EmptyScheduler(self.is_idle), empty_cache),
            is_fully_idle=lambda ignore_waiting=False: True,
            scheduler=scheduler,
        )

    def seen(self, result: Any = None) -> dict[str, object]:
        """Return what a call left: whether it succeeded, the epoch, and under which it wrote."""
        wrote, self.model.written_under = sorted(set(self.model.written_under)), []
        return {"success": getattr(result, "success", None), "epoch": weights_epoch().current, "wrote": wrote}


class _EmptyScheduler:
    """What SGLang's Scheduler.flush_cache touches of a scheduler (managers/scheduler.py:5518)."""

    _engine_paused = False
    draft_worker = None
    waiting_queue: tuple[()] = ()

    def __init__(self, is_idle: bool) -> None:
        nothing = types.SimpleNamespace(
            reset=lambda: None,
            clear=lambda: None,
            reset_aux_cache_allocator=lambda: None,
            reset_metrics=lambda: None,
            is_stats_logging_rank=False,
        )
        self.tree_cache = self.req_to_token_pool = self.token_to_kv_pool_allocator = nothing
        self.grammar_manager = self.metrics_reporter = nothing
        self.running_batch = types.SimpleNamespace(reqs=[])
        self._is_idle = is_idle

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return self._is_idle


def _session(rank: Rank, part: Any, version: str | None) -> dict[str, object]:
    rank.manager.begin_weight_update(BeginWeightUpdateReqInput())
    results = [part(version) for _ in range(2)]
    meanwhile = weights_epoch().current
    rank.manager.end_weight_update(EndWeightUpdateReqInput())
    seen = {**rank.seen(), "success": all(result.success for result in results), "meanwhile": meanwhile}
    rank.manager.flush_cache()
    return {**seen, "flushed": weights_epoch().current}


def run(rank: Rank, path: str) -> dict[str, object]:
    """Do every kind of update, and return what was seen after each."""
    manager, seen = rank.manager, {}
    seen["start"] = rank.seen()

    def disk(version: str | None, **given: Any) -> dict[str, object]:
        return rank.seen(
            manager.update_weights_from_disk(
                UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", weight_version=version, **given)
            )
        )

    def tensor(version: str | None) -> Any:
        return manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version=version, flush_cache=False)
        )

    def distributed(version: str | None) -> Any:
        return manager.update_weights_from_distributed(
            UpdateWeightsFromDistributedReqInput(
                names=[], dtypes=[], shapes=[], weight_version=version, flush_cache=False
            )
        )

    seen["disk"] = disk("v1")
    seen["disk without a version"] = disk(None)
    seen["disk, version again"] = disk("v1")
    rank.is_idle = False
    seen["disk, flush refused"] = disk("busy")
    rank.is_idle = True
    seen["disk, not flushed"] = disk("v2", flush_cache=False)
    manager.flush_cache()
    seen["then flushed"] = rank.seen()

    rank.model.fails = rank.is_odd  # the roll back fails too, where it is tried: only a part of the ranks raises
    seen["distributed, failed on one rank"] = _session(rank, distributed, "v3")
    rank.model.fails = False
    seen["distributed"] = _session(rank, distributed, "v3")
    seen["tensor"] = _session(rank, tensor, "v4")
    seen["tensor without a session"] = rank.seen(tensor("v5"))

    seen["ipc, no engine"] = rank.seen(
        manager.update_weights_from_ipc(UpdateWeightsFromIPCReqInput(zmq_handles={}, weight_version="v6"))
    )
    seen["disk v7"] = disk("v7")
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    seen["KV released"] = rank.seen()
    manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
    seen["weights released"] = rank.seen()
    seen["disk v8"] = disk("v8")
    seen["checked"] = rank.seen(manager.check_weights(CheckWeightsReqInput(action="snapshot")))
    before = rank.model.weight.clone()
    seen["reset"] = rank.seen(manager.check_weights(CheckWeightsReqInput(action="reset_tensors")))
    seen["reset"]["did"] = not torch.equal(before, rank.model.weight)
    seen["disk v9"] = disk("v9")
    rank.updater.update_weights_from_disk(path, "auto")  # as SGLang does for experts that are missing
    seen["unasked"] = rank.seen()
    return seen


def main(index: int, size: int, directory: Path) -> dict[str, object]:
    """Load the plug-ins, meet the other ranks, and run."""
    load_plugins()
    model = str(directory / "model")
    arguments = ServerArgs(
        model_path=model,
        tp_size=size,
        device="cpu",
        dtype="bfloat16",
        enable_hierarchical_cache=True,
        page_size=16,
        attention_backend="torch_native",
        weight_version="default",
    )
    runtime_context.publish(
        arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=index, dp_rank=None, gpu_id=0)
    )
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=index, world_size=size)
    group = torch.distributed.new_group(list(range(size)), backend="gloo")
    held = runtime_context.get_parallel().override(tp_group=types.SimpleNamespace(cpu_group=group, world_size=size))
    held.__enter__()
    WeightUpdater.receive_weights_from_distributed = lambda self, **given: [("weight", torch.ones(4))]
    storage = types.SimpleNamespace(
        tp_rank=index,
        tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        dcp_rank=0,
        dcp_size=1,
    )
    found = identity(storage, engine=EngineConfig.of_process())
    start = weights_epoch().at_start(None, found.weights)
    told: list[str] = []
    weights_epoch().follow(told.append)
    seen = run(Rank(bool(index)), model)
    torch.distributed.barrier(group=group)
    held.__exit__(None, None, None)
    return {
        "missing": missing_hooks(),
        "is_watched": weights_epoch().is_watched,
        "identity": {"fields": found.fields, "model": found.model, "shard": found.shard},
        "start": start,
        "told": told,
        "seen": seen,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
    sys.stdout.flush()
