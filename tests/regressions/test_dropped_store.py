"""A store that is dropped ends there and then: nothing inside it refers back to it.

The rates asked the mover through a method of the store: store and rates kept each other, and with them the threads, the
files and the locks of the volumes, until Python came to look for cycles.
"""

from __future__ import annotations

import gc
import weakref

from store_kit import BOTH, Directories, Rig, chain


def test_a_store_that_is_dropped_ends_without_a_look_for_cycles(directories: Directories, no_leaks: None) -> None:
    rig = Rig(directories.config(host=16 * 4096, **BOTH))  # no keeper: its rounds hold the store while they run
    rig.save(chain(1, 4))
    assert rig.load(chain(1, 4)) == 4
    store = weakref.ref(rig.store)
    gc.collect()
    gc.disable()
    try:
        del rig
        assert store() is None
    finally:
        gc.enable()
