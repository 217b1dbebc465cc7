"""Check the SGLang that is installed here against every interface that stepwell uses of it: `stepwell doctor --sglang`.

Each check is one line: ok, warn or fail, with the line that mends it. SGLang, and torch with it, is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pkgutil import resolve_name
from types import CodeType
from typing import Any, Final

import stepwell as sw
from stepwell.adapters.sglang.memory import SUBJECT, warnings_of
from stepwell.adapters.sglang.plugin import missing_hooks, missing_of

VERSION: Final = "0.5.23"
INSTALL: Final = f"pip install 'sglang=={VERSION}'"
_GROUP: Final = "sglang.srt.plugins"
_PLUGIN: Final = "stepwell"
_TROUBLE: Final = (ImportError, AttributeError, TypeError, ValueError, KeyError, OSError, RuntimeError, AssertionError)
"""What importing another SGLang, or this one beside another torch, runs into."""

_SRT: Final = "sglang.srt"
_STORAGE: Final = f"{_SRT}.mem_cache.hicache_storage"
_BACKEND: Final = f"{_STORAGE}.HiCacheStorage"
_CONTROLLER: Final = f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_POOLS: Final = f"{_SRT}.mem_cache.pool_host"
_MHA: Final = f"{_POOLS}.mha.MHATokenToKVPoolHost"
_MLA: Final = f"{_POOLS}.mla.MLATokenToKVPoolHost"

Signatures = Mapping[str, tuple[str, ...]]

_CALLS: Final[Signatures] = {
    f"{_BACKEND}.register_mem_pool_host": ("self", "mem_pool_host"),
    f"{_BACKEND}.register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
    f"{_BACKEND}.on_host_pools_registered": ("self",),
    f"{_BACKEND}.batch_exists": ("self", "keys", "extra_info"),
    f"{_BACKEND}.batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
    f"{_BACKEND}.batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
    f"{_BACKEND}.batch_exists_v2": ("self", "keys", "pool_transfers", "extra_info"),
    f"{_BACKEND}.batch_get_v2": ("self", "transfers", "extra_info"),
    f"{_BACKEND}.batch_set_v2": ("self", "transfers", "extra_info"),
    f"{_BACKEND}.batch_get": ("self", "keys", "target_locations", "target_sizes"),
    f"{_BACKEND}.batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
    f"{_BACKEND}.get": ("self", "key", "target_location", "target_sizes"),
    f"{_BACKEND}.set": ("self", "key", "value", "target_location", "target_sizes"),
    f"{_BACKEND}.exists": ("self", "key"),
    f"{_BACKEND}.clear": ("self",),
    f"{_BACKEND}.get_stats": ("self",),
    f"{_STORAGE}.PoolTransferResult.empty": (),
}
_CALL_FIELDS: Final[Signatures] = {
    f"{_STORAGE}.HiCacheStorageConfig": (
        "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank", "dcp_rank", "dcp_size",
        "is_mla_model", "enable_storage_metrics", "extra_config",
    ),
    f"{_STORAGE}.HiCacheStorageExtraInfo": ("prefix_keys",),
    f"{_STORAGE}.PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    f"{_STORAGE}.PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
    f"{_SRT}.observability.metrics_collector.StorageMetrics": (
        "prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth",
    ),
}  # fmt: skip
_MEMBERS: Final[Signatures] = {
    f"{_STORAGE}.PoolName": ("KV", "MAMBA", "DRAFT"),
    f"{_STORAGE}.PoolHitPolicy": ("ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"),
}
_DYNAMIC: Final[Signatures] = {
    f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory._create_dynamic_backend": (
        "backend_config", "storage_config", "mem_pool_host",
    ),
    f"{_CONTROLLER}.parse_storage_backend_extra_config": ("storage_backend_extra_config",),
    f"{_CONTROLLER}.attach_storage_backend": ("self", "storage_backend"),
}  # fmt: skip
_POOL_CALLS: Final[Signatures] = {
    f"{pool}.{call}": parameters
    for pool in (_MHA, _MLA)
    for call, parameters in (
        ("get_page_buffer_meta", ("self", "indices")),
        ("get_data_page", ("self", "index", "flat")),
        ("get_dummy_flat_data_page", ("self",)),
        ("set_from_flat_data_page", ("self", "index", "data_page")),
    )
}
_POOL_ATTRIBUTES: Final[Signatures] = {
    _MHA: ("kv_buffer", "layout", "page_size", "size", "layer_num", "head_num", "head_dim", "dtype"),
    _MLA: ("kv_buffer", "layout", "page_size", "size", "layer_num", "kv_cache_dim", "dtype"),
}
_RUNTIME: Final[Signatures] = {
    f"{_SRT}.runtime_context.{name}": ()
    for name in (
        "get_exec", "get_lora", "get_memory", "get_model", "get_parallel", "get_server_args", "get_spec",
        "process_model_config",
    )
}  # fmt: skip


def check_sglang(
    *,
    shared_bytes: int | None = None,
    has_config: bool = False,
    hicache_gigabytes: float | None = None,
    mode: str = "cache",
    ranks: int = 1,
    memory: sw.Limit | None = None,
) -> Iterator[sw.Finding]:
    """Check the SGLang of this environment, and how its host memory goes with a shared tier.

    Args:
        shared_bytes: capacity of the configured shared tier; None: there is none. has_config: whether the configuration
            was read at all; else nothing is said of memory.
        hicache_gigabytes: --hicache-size, of each rank. mode: --hicache-host-memory-mode. ranks: on this host.
        memory: what there is, by default this machine's.
    """
    version = _version()
    if version is None:
        yield _fail(
            "SGLang",
            "not installed in this environment",
            why="stepwell's backend runs inside SGLang: both must be in one environment",
            remedy=f"{INSTALL}  # here; or install stepwell where SGLang is, and ask there",
        )
        return
    if version == VERSION:
        yield _ok("SGLang", version)
    else:
        yield _warn(
            "SGLang",
            f"{version}; stepwell knows {VERSION}",
            why="its interfaces are no public ones, and change between versions; those used are checked below",
            remedy=INSTALL,
        )
    yield _interfaces("SGLang storage calls", lambda: [*missing_of(_CALLS, _CALL_FIELDS), *_missing_members(_MEMBERS)])
    yield _interfaces("SGLang dynamic backend", lambda: missing_of(_DYNAMIC, {}))
    yield _interfaces("SGLang host pools", lambda: [*missing_of(_POOL_CALLS, {}), *_missing_attributes()])
    yield _interfaces("SGLang configuration", lambda: missing_of(_RUNTIME, {}))
    yield _interfaces("SGLang weight updates", missing_hooks)
    yield _check_plugin()
    yield _ok(
        "SGLang limits",
        "the backend `dynamic` is refused by SGLang itself with decode context parallelism (DCP) and with "
        "page-envelope host pools; tails of a prompt below its prefetch threshold (prefetch_threshold, 256 tokens) "
        "are never asked of storage, and are computed",
    )
    if has_config:
        yield from _check_memory(shared_bytes, hicache_gigabytes, mode, ranks, memory)


def _version() -> str | None:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _interfaces(subject: str, look: Callable[[], list[str]]) -> sw.Finding:
    try:
        missing = look()
    except _TROUBLE as error:
        missing = [f"importing it fails: {error!r}"]
    if not missing:
        return _ok(subject, "as stepwell uses them")
    more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
    return _fail(
        subject,
        "; ".join(missing[:3]) + more,
        why="stepwell would not attach, or updates of weights would not be seen",
        remedy=INSTALL,
    )


def _missing_members(members: Signatures) -> list[str]:
    missing = []
    for name, wanted in members.items():
        try:
            found = resolve_name(name).__members__
        except (ImportError, AttributeError) as error:
            missing.append(f"{name} is missing ({error})")
            continue
        missing += [f"{name} has no {member}" for member in wanted if member not in found]
    return missing


def _missing_attributes() -> list[str]:
    """Say which attributes no method of a pool's class ever names: without memory to lend, none can be made here."""
    missing = []
    for name, wanted in _POOL_ATTRIBUTES.items():
        try:
            classes = resolve_name(name).__mro__
        except (ImportError, AttributeError) as error:
            missing.append(f"{name} is missing ({error})")
            continue
        named: set[str] = set()
        for each in classes:
            named.update(vars(each))
            named.update(*(code.co_names for member in vars(each).values() if (code := _code_of(member)) is not None))
        missing += [f"{name} has no {attribute}" for attribute in wanted if attribute not in named]
    return missing


def _code_of(member: Any) -> CodeType | None:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _check_plugin() -> sw.Finding:
    subject = "SGLang plug-in"
    why = "updates of weights are not watched without it: persistent tiers are refused unless weights_static is true"
    found = [entry for entry in metadata.entry_points(group=_GROUP) if entry.name == _PLUGIN]
    if not found:
        return _fail(
            subject,
            f"no entry point {_PLUGIN} of {_GROUP} is installed",
            why=why,
            remedy="pip install .  # in the checkout, or stepwell from an index: PYTHONPATH alone has no entry points",
        )
    try:
        given = resolve_name(f"{_SRT}.environ.envs").SGLANG_PLUGINS.get()
    except _TROUBLE as error:
        return _fail(subject, f"SGLANG_PLUGINS cannot be read: {error!r}", why=why, remedy=INSTALL)
    allowed = {name.strip() for name in (given or "").split(",") if name.strip()}
    if allowed and _PLUGIN not in allowed:
        return _fail(
            subject,
            f"installed, and left out by SGLANG_PLUGINS={given!r}",
            why=why,
            remedy=f"export SGLANG_PLUGINS={','.join([*sorted(allowed), _PLUGIN])}",
        )
    return _ok(subject, f"{found[0].value}, loaded by SGLang")


def _check_memory(
    shared_bytes: int | None, gigabytes: float | None, mode: str, ranks: int, memory: sw.Limit | None
) -> Iterator[sw.Finding]:
    if gigabytes is None:
        yield _ok(SUBJECT, "not compared; give --hicache-size as SGLang is given it, to see whether both fit")
        return
    # SGLang's gigabytes are 10^9 bytes, of each rank (pool_host/base.py:223).
    found = warnings_of(int(gigabytes * 1e9), ranks=ranks, shared_bytes=shared_bytes, mode=mode, memory=memory)
    yield from found
    if not found:
        yield _ok(SUBJECT, f"--hicache-size {gigabytes:g} of {ranks} rank(s), {mode}: fits what is configured here")


def _ok(subject: str, found: str) -> sw.Finding:
    return sw.Finding("ok", subject, found)


def _warn(subject: str, found: str, *, why: str, remedy: str) -> sw.Finding:
    return sw.Finding("warn", subject, found, why, remedy)


def _fail(subject: str, found: str, *, why: str, remedy: str) -> sw.Finding:
    return sw.Finding("fail", subject, found, why, remedy)
