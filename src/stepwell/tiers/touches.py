"""Tell the owners of neighbours' volumes which pages were read here, and learn which of ours were (FORMAT.md 8).

    note (any thread) -> a bounded table -tell-> the ring in our process file -read, by its owners-> touches of ours

All of it is a hint: it is bounded, it may be lost, and a false one costs a place in the order of eviction.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from stepwell.errors import StepwellUsageError
from stepwell.tiers.process_file import RING_ENTRIES, OwnProcessFile, Touch, read_touches
from stepwell.tiers.volume_files import open_ours


class Touches:
    """The touches of one process in one tier directory.

    Threads: note: any. The rest: one at a time.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._read_up_to: dict[str, int] = {}  # counters of neighbours' rings
        self._lock = threading.Lock()
        self._noted: dict[tuple[bytes, int], int] = {}  # GUARDED_BY(_lock): generation; last used last
        self.dropped = 0  # GUARDED_BY(_lock): what the ring had no room for

    def note(
        self,
        volume_ids: Sequence[bytes],
        slots: Sequence[int] | npt.NDArray[np.uint32],
        generations: Sequence[int] | npt.NDArray[np.uint64],
    ) -> None:
        """Remember that pages of neighbours' volumes were used, until the next tell().

        Of more than a ring holds until then, the rest is dropped.

        Args:
            volume_ids: 16 bytes each. slots, generations: as they were read; one of each a page, in the order of their
                chain.

        Raises:
            StepwellUsageError: something does not fit into an entry; nothing was noted.

        Cost: about half a microsecond a page.
        """
        rows = [
            (volume_id, int(slot), int(generation))
            for volume_id, slot, generation in zip(volume_ids, slots, generations, strict=True)
        ]
        if not all(len(v) == 16 and 0 <= s < 1 << 32 and 0 <= g < 1 << 64 for v, s, g in rows):
            raise StepwellUsageError("note_touches: a volume id has 16 bytes, a slot 32 bits, a generation 64")
        with self._lock:
            for volume_id, slot, generation in rows:
                self._noted.pop((volume_id, slot), None)
                if len(self._noted) < RING_ENTRIES:
                    self._noted[volume_id, slot] = generation
                else:
                    self.dropped += 1

    def tell(self, process: OwnProcessFile) -> bool:
        """Append what was noted to our ring. False: the file system failed, and it is lost."""
        with self._lock:
            told, self._noted = self._noted, {}
        if not told:
            return True
        try:
            process.append_touches([(volume_id, slot, touch) for (volume_id, slot), touch in told.items()])
        except OSError:
            return False
        return True

    def read(self, process_ids: Iterable[str], *, of: set[bytes]) -> list[Touch]:
        """Return what the rings of some processes say anew of some volumes; a ring not met before says nothing yet.

        Cost: four system calls a process, and one for what is new.
        """
        known, self._read_up_to = self._read_up_to, {}
        touches: list[Touch] = []
        for process_id in process_ids:
            try:
                descriptor = open_ours(f"{self._directory}/p-{process_id}.proc", os.O_RDONLY)
            except (OSError, ValueError):
                continue  # it has left since, or its file is none
            try:
                counter, found = read_touches(descriptor.fileno(), after=known.get(process_id))
            except OSError:
                continue
            finally:
                descriptor.close()
            self._read_up_to[process_id] = counter
            touches += [touch for touch in found if touch[0] in of]
        return touches
