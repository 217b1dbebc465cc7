"""close() freed a volume, mapping and all, in which another thread's evict() was just retiring a record."""

from __future__ import annotations

import threading
from pathlib import Path

from stepwell.index import Tier
from stepwell.testing import faults
from store_kit import Directories, Rig, chain


def test_a_volume_outlives_the_retirement_of_a_record_in_it(directories: Directories) -> None:
    rig = Rig(directories.config(disk=0))
    rig.save(chain(1, 8))
    evicting = threading.Thread(target=rig.store.evict, args=(Tier.SHARED, 1))
    with faults.inject("volume.retire", "pause"):
        evicting.start()
        faults.wait_paused("volume.retire")
        rig.close()
        assert ".vol" in Path("/proc/self/maps").read_text(), "the volume is gone while a record is written in it"
    evicting.join()
    assert ".vol" not in Path("/proc/self/maps").read_text()
