"""Remember which pages were saved once: what selective disk writes go by, when a page comes again.

A page that is written to disk at its first save and never asked for again has worn the disk for nothing: of the blocks
of the Mooncake conversation trace three in four are such. A page that is still in shared memory when it is found a
second time needs no memory; one that has left it since is known by this.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_LEAST_KEYS: Final = 32768
_MOST_SLOTS: Final = 1 << 22  # 32 MiB
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


class Seen:
    """A set of keys that forgets: a table of 64-bit fingerprints, one place for each, the newer takes the place.

    A key may be forgotten early (its page is then written a use later) or taken for another (a page is written a use
    early: at most one key in 2^41). It is memory of this process only.
    Threads: the caller's lock; a lost update is a key forgotten.
    """

    def __init__(self, pages: int) -> None:
        """Args: pages: that the store's tiers can hold; twice as many keys are remembered, and at least 32,768."""
        slots = 1 << (2 * max(_LEAST_KEYS, 2 * pages) - 1).bit_length()
        self._places: npt.NDArray[np.uint64] = np.zeros(min(slots, _MOST_SLOTS), np.uint64)

    def add(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Remember keys: uint8[n, k]. Returns which were remembered already: bool[n]. Cost: about 10 ns a key."""
        prints = _fingerprints(keys)
        places = (prints & np.uint64(self._places.size - 1)).astype(np.intp)
        known: npt.NDArray[np.bool_] = self._places[places] == prints
        self._places[places] = prints
        return known


def _fingerprints(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Mix each key into 64 bits, never 0: an engine's keys need not be hashes."""
    words = -(-keys.shape[1] // 8)
    padded = np.zeros((len(keys), words * 8), np.uint8)
    padded[:, : keys.shape[1]] = keys
    mixed = np.zeros(len(keys), np.uint64)
    for column in padded.view(np.uint64).T:
        mixed = (mixed ^ column) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint64(32)
    return mixed | np.uint64(1 << 63)
