"""The storage backends that the tests here are run over, as the flags that SGLang is given.

The engine and tree kits take `Flags` and know no backend; a `Store` is one with a place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

# Tails shorter than this never come from storage (unified_radix_cache.py:2152); SGLang's own threshold is 256.
THRESHOLD_TOKENS: Final = 32


@dataclass(frozen=True)
class Flags:
    """What chooses a backend. extra: --hicache-storage-backend-extra-config, before it is JSON."""

    name: str
    extra: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Give SGLang's arguments for it."""
        return {
            "hicache_storage_backend": self.name,
            "hicache_storage_backend_extra_config": json.dumps(self.extra),
        }


def file(folder: Path) -> Flags:
    """SGLang's own HiCacheFile (hicache_storage.py:702): a file per page, by the generic path."""
    return Flags("file", {"file_storage_path": str(folder), "prefetch_threshold": THRESHOLD_TOKENS})


def memory(*, v1: bool = True) -> Flags:
    """A dictionary in the process of the scheduler (memory_backend.py)."""
    return Flags("dynamic", _dynamic("memory_backend", "MemoryStorage", v1=v1))


def stepwell(settings: dict[str, Any], *, v1: bool = True) -> Flags:
    """Stepwell's adapter, with its settings."""
    return Flags("dynamic", _dynamic("stepwell.adapters.sglang", "StepwellStorage", v1=v1) | {"stepwell": settings})


@dataclass(frozen=True)
class Store:
    """A backend with a place for what it stores.

    checks: it delivers no byte that was not stored under that key for such a page; HiCacheFile does not look.
    """

    name: str
    checks: bool
    folders: tuple[Path, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def flags(self, *, v1: bool = True) -> Flags:
        """Choose it, with SGLang's interface v1 (zero copy) or the generic one; HiCacheFile has but the latter."""
        if self.name == "file":
            return file(self.folders[0])
        if self.name == "memory":
            return memory(v1=v1)
        return stepwell(self.settings, v1=v1)


# Four volumes: one for each of two ranks, and room; no test evicts.
_CAPACITY: Final = "256MiB"


def named(name: str, *, disk: Path, memory: Path, weights_id: str | None = None) -> Store:
    """Make a backend's places in a folder on disk and one in memory.

    weights_id: for trees, whose model was written after their process began: stepwell would not trust its files then.
    """
    shared = {"path": str(memory / "shared"), "capacity": _CAPACITY}
    on_disk = {"path": str(disk / "disk"), "capacity": _CAPACITY}
    settings = {
        "stepwell-shared": {"shared": shared},
        "stepwell-disk": {"disk": on_disk},
        "stepwell": {"shared": shared, "disk": on_disk},
    }
    if name in settings:
        folders = (memory / "shared", disk / "disk")
        known = {"weights_id": weights_id} if weights_id is not None else {}
        return Store(name, checks=True, folders=folders, settings={**settings[name], **known})
    return Store(name, checks=False, folders=(disk / name,))


def _dynamic(module: str, name: str, *, v1: bool) -> dict[str, Any]:
    return {
        "backend_name": name.lower(),
        "module_path": module,
        "class_name": name,
        "interface_v1": int(v1),
        "prefetch_threshold": THRESHOLD_TOKENS,
    }
