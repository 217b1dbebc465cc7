"""Remember records that could not be retired before their volume went out of use (FORMAT.md 3).

Slots and claims of a volume end with it, but not what its records say. This process may have it again in a moment
(reopened, or adopted after a sync had failed): a page that was forgotten here must not be found then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stepwell import _core

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class Debts:
    """By volume: slots, and the generations of the pages that left them.

    Threads: those of the tier (volume_tier.py).
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[int, int]] = {}

    def note(self, volume_id: str, volume: _core.Volume, slots: U32) -> None:
        """Remember slots of a volume, numbered within it, as their records are now."""
        if slots.size:
            generations = volume.generations(slots)
            self._of[volume_id] = dict(zip(slots.tolist(), generations.tolist(), strict=True))

    def among(self, volume_id: str, slots: U32, generations: U64) -> npt.NDArray[np.bool_]:
        """Say which pages of a volume had left, bool[n]; from now on it is the caller's to remember.

        A record that another process has written since is of another generation, and its page right. One of which the
        generation could not be read counts as written by nobody: a page may be lost by that.
        """
        owed = self._of.pop(volume_id, None)
        if owed is None:
            return np.zeros(slots.size, bool)
        pairs = zip(slots.tolist(), generations.tolist(), strict=True)
        return np.array([owed.get(slot) in (generation, 0) for slot, generation in pairs], bool)
