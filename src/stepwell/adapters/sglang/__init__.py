"""Serve SGLang's hierarchical cache from stepwell: `--hicache-storage-backend dynamic`, class `StepwellStorage`.

    SGLang's controller threads --hashes, slots--> StepwellStorage --keys--> PageStore --> mover <--> SGLang's host pool

Importing this package imports neither sglang nor torch: SGLang's plug-in loader does it in each of its processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepwell.adapters.sglang.storage import StepwellStorage

__all__ = ["StepwellStorage"]


def __getattr__(name: str) -> object:
    """Import the backend, and with it sglang, when it is first asked for."""
    if name == "StepwellStorage":
        from stepwell.adapters.sglang.storage import StepwellStorage

        return StepwellStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
