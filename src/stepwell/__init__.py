"""Keep the KV cache of an LLM server in four tiers: device, host, shared memory, disk.

    import stepwell as sw

    config = sw.StoreConfig(geometry=sw.PageGeometry(...), host="2GiB", disk=sw.DiskTier("200GiB", "/var/cache/kv"))
    with sw.PageStore(config) as store:
        pool = store.lend(array)
        store.save(tokens, source=pool[slots])
        with store.match(tokens) as match:
            store.load(match, into=pool[slots]).wait()

These names are the public face; everything else may change. Each is imported when it is first used (PEP 562), so that
`import stepwell` costs nothing, and jax is loaded only by who uses the managed device tier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell import errors, inspection, removal, verification
    from stepwell.config import (
        DeviceTier,
        DiskTier,
        HostTier,
        SharedTier,
        StoreConfig,
        parse_size,
    )
    from stepwell.doctor.diagnose import diagnose
    from stepwell.doctor.findings import Finding
    from stepwell.effective import EffectiveValue, effective_values
    from stepwell.errors import StepwellError, StepwellUsageError
    from stepwell.geometry import PageGeometry
    from stepwell.hashing import Namespace
    from stepwell.index import Miss, Residency, Tier
    from stepwell.lease import Match
    from stepwell.mover import Full, Inbox, SaveOutcome, SaveResult, Transfer
    from stepwell.pins import Pinned, PinsFull
    from stepwell.pool import LentPool, PoolPointers, PoolSlice
    from stepwell.rates import Within
    from stepwell.sequence import Extended, Sequence
    from stepwell.settings import Origin, Settings, from_mapping, load_settings
    from stepwell.stats import Stats, TierStats, Tree
    from stepwell.store import PageStore, Probe, Reopened, VerifyResult
    from stepwell.tiers.limits import Limit, memory_limit

__all__ = [
    "DeviceTier",
    "DiskTier",
    "EffectiveValue",
    "Extended",
    "Finding",
    "Full",
    "HostTier",
    "Inbox",
    "LentPool",
    "Limit",
    "Match",
    "Miss",
    "Namespace",
    "Origin",
    "PageGeometry",
    "PageStore",
    "Pinned",
    "PinsFull",
    "PoolPointers",
    "PoolSlice",
    "Probe",
    "Reopened",
    "Residency",
    "SaveOutcome",
    "SaveResult",
    "Sequence",
    "Settings",
    "SharedTier",
    "Stats",
    "StepwellError",
    "StepwellUsageError",
    "StoreConfig",
    "Tier",
    "TierStats",
    "Transfer",
    "Tree",
    "VerifyResult",
    "Within",
    "diagnose",
    "effective_values",
    "errors",
    "from_mapping",
    "inspection",
    "load_settings",
    "memory_limit",
    "parse_size",
    "removal",
    "verification",
]

_HOMES = {
    "config": ("DeviceTier", "DiskTier", "HostTier", "SharedTier", "StoreConfig", "parse_size"),
    "doctor.diagnose": ("diagnose",),
    "doctor.findings": ("Finding",),
    "effective": ("EffectiveValue", "effective_values"),
    "errors": ("StepwellError", "StepwellUsageError"),
    "geometry": ("PageGeometry",),
    "hashing": ("Namespace",),
    "index": ("Miss", "Residency", "Tier"),
    "lease": ("Match",),
    "mover": ("Full", "Inbox", "SaveOutcome", "SaveResult", "Transfer"),
    "pins": ("Pinned", "PinsFull"),
    "pool": ("LentPool", "PoolPointers", "PoolSlice"),
    "rates": ("Within",),
    "sequence": ("Extended", "Sequence"),
    "settings": ("Origin", "Settings", "from_mapping", "load_settings"),
    "stats": ("Stats", "TierStats", "Tree"),
    "store": ("PageStore", "Probe", "Reopened", "VerifyResult"),
    "tiers.limits": ("Limit", "memory_limit"),
}
_MODULES = ("errors", "inspection", "removal", "verification")  # public as wholes
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use, and keep it."""
    if name in _MODULES:
        return import_module(f"stepwell.{name}")
    if name == "__version__":
        return import_module("importlib.metadata").version("stepwell")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    value: object = getattr(import_module(f"stepwell.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public face."""
    return sorted([*__all__, "__version__"])
