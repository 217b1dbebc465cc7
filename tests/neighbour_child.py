"""A process beside the test's own on the same tier directories, steered by lines: see test_neighbours.py.

    python neighbour_child.py SHARED DISK    prints "ready"; then answers each line

    save NUMBER PAGES    prints the pages that are resident in every tier
    load NUMBER PAGES    prints the pages of the prefix that came, right to the last byte
    evict PAGES          from every tier; prints "done"
    (end of input)       closes the store
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, Rig, chain


def main(shared: str, disk: str) -> None:
    config = Directories(Path(shared), Path(disk)).config(shared=4 * VOLUME_BYTES, disk=4 * VOLUME_BYTES)
    rig = Rig(config, keeper=True)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            command, *numbers = line.split()
            values = [int(number) for number in numbers]
            if command == "save":
                print(int(rig.save(chain(*values)).transfer.ok.sum()), flush=True)
            elif command == "load":
                print(rig.load(chain(*values)), flush=True)
            else:
                for tier in list(rig.store.stats().tiers):
                    rig.store.evict(Tier[tier.upper()], values[0])
                print("done", flush=True)
    finally:
        rig.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
