"""Read what a user gives stepwell in SGLang's `--hicache-storage-backend-extra-config`.

    {"backend_name": "stepwell", "module_path": "stepwell.adapters.sglang", "class_name": "StepwellStorage",
     "interface_v1": 1,
     "stepwell": {"shared": {"capacity": "8GiB"}, "disk": {"path": "/var/cache/stepwell", "capacity": "200GiB"}}}

The table `stepwell` has the schema of stepwell.toml less what the engine says (geometry, epoch, device), and a few
settings of its own. An unknown key is refused when the backend is attached, in the table and beside it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

import stepwell as sw

_TABLE: Final = "stepwell"
_BESIDE: Final = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", _TABLE)
"""What SGLang 0.5.23 leaves in the extra config: backend_factory.py:141-146, cache_controller.py:662-667; host pools
read `allocator` of it. The prefetch settings, `hicache_storage_pass_prefix_keys` and `tp_lcm_size` are taken out before
(hybrid_cache_controller.py:404-413, cache_controller.py:777)."""
_OF_THE_ENGINE: Final = ("geometry", "epoch", "device")


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the adapter asks beside the tiers.

    weights_id: name of the weights, where the checkpoint's index does not tell them (a rebuilt directory, a loader
    without files), and of what the versions of updates count from (a training run): with it, engines that have taken
    the same version share its pages. weights_static: the user's word that weights never change while this engine runs:
    a persistent tier is then taken without the plug-in that watches updates.
    load_bound: seconds that loading a hit may take. "prefetch-timeout": what SGLang's own timeout policy gives it, by
    its length; "auto": what recomputing was seen to take, at most that; a number: as it is; None: no bound. A hit is
    offered as far as it can be delivered in that time.
    lease: seconds for which pages of a hit are held for the read that follows. read_ahead: start bringing them into
    memory when they are asked for. set_timeout: seconds that SGLang's writer waits for a batch; what is not written by
    then is not kept.
    """

    weights_id: str | None = None
    weights_static: bool = False
    load_bound: float | Literal["prefetch-timeout", "auto"] | None = "prefetch-timeout"
    lease: float = 10.0
    read_ahead: bool = True
    set_timeout: float = 10.0


class SglangSettings(msgspec.Struct, frozen=True):
    """All of it.

    tiers: what is given of the store's own settings, nested, with no geometry yet. zero_copy: SGLang calls batch_get_v1
    and batch_set_v1, not the generic calls.
    """

    adapter: AdapterSettings
    tiers: Mapping[str, Any]
    zero_copy: bool

    @property
    def is_persistent(self) -> bool:
        """Whether pages outlive the process: then weights must be known by content."""
        return any(self.tiers.get(name) is not None for name in ("shared", "disk"))


def read_settings(extra: Mapping[str, Any] | None) -> SglangSettings:
    """Check the extra config of SGLang.

    Args:
        extra: `HiCacheStorageConfig.extra_config`: JSON as SGLang read it, inline or from @file (.json, .toml, .yaml).

    Raises:
        StepwellUsageError: the table is missing or holds no tier, an unknown key, a wrong type, a value out of range.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise sw.StepwellUsageError(f"extra config: it is of type {type(extra).__name__}; give a table")
    extra = extra or {}
    for name in extra:
        if name not in _BESIDE:
            raise sw.StepwellUsageError(f"extra config: {name!r} is no key of it{_nearest(name, _BESIDE)}")
    given = extra.get(_TABLE)
    if not isinstance(given, Mapping) or not given:
        raise sw.StepwellUsageError(
            f'extra config: {_TABLE!r} is {given!r}; give a table with the tiers, e.g. {{"{_TABLE}": {{"shared": '
            '{"capacity": "8GiB"}, "disk": {"path": "/var/cache/stepwell", "capacity": "200GiB"}}}'
        )
    own = {name: value for name, value in given.items() if name in AdapterSettings.__struct_fields__}
    tiers = {name: value for name, value in given.items() if name not in own}
    known = [name for name in sw.StoreConfig.__struct_fields__ if name not in _OF_THE_ENGINE]
    for name in tiers:
        if name in _OF_THE_ENGINE:
            raise sw.StepwellUsageError(f"extra config: {_TABLE}.{name}: SGLang says that itself; leave it out")
        if name not in known:
            hint = _nearest(name, (*known, *AdapterSettings.__struct_fields__))
            raise sw.StepwellUsageError(f"extra config: {_TABLE}.{name} names no setting{hint}")
    try:
        adapter = msgspec.convert(own, AdapterSettings)
    except msgspec.ValidationError as error:
        raise sw.StepwellUsageError(f"extra config: {_TABLE}: {error}") from error
    for name, value in (("lease", adapter.lease), ("set_timeout", adapter.set_timeout)):
        if not 0 < value < float("inf"):
            raise sw.StepwellUsageError(f"extra config: {_TABLE}.{name} is {value}; give a number of seconds above 0")
    if adapter.weights_id == "":
        raise sw.StepwellUsageError(
            f"extra config: {_TABLE}.weights_id is empty: it would name any weights; give their name, or leave it out"
        )
    if isinstance(adapter.load_bound, int | float) and not 0 < adapter.load_bound < float("inf"):
        raise sw.StepwellUsageError(
            f"extra config: {_TABLE}.load_bound is {adapter.load_bound}; give a number of seconds above 0, "
            '"prefetch-timeout", "auto", or null for none'
        )
    if not any(tiers.get(name) is not None for name in ("host", "shared", "disk")):
        raise sw.StepwellUsageError(f"extra config: {_TABLE} names no tier; give at least one of shared, disk, host")
    return SglangSettings(adapter, tiers, bool(extra.get("interface_v1", 0)))


def _nearest(name: object, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)  # YAML has keys that are no text
    return f"; did you mean {close[0]}?" if close else f"; the keys are {', '.join(known)}"
