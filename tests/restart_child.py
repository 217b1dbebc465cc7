"""The process that test_restart.py restarts and kills: a zygote that forks a saver for each line.

A line `seed how`: the saver says "saved" after each save, until it is killed, or (SIGTERM) closes its store.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from restart_kit import order_of
from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, Rig, chain


def serve(seed: int, shared: str, out: int) -> None:
    rng = random.Random(seed)
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    rig = Rig(Directories(Path(shared), Path("/nowhere")).config(shared=6 * VOLUME_BYTES, disk=0), keeper=True)
    os.write(out, f"{os.getpid()}\n".encode())
    while not is_stopping:
        number, pages = rng.randrange(12), rng.randrange(1, 16)
        if rng.random() < 0.8:
            rig.save(chain(number, pages))
        else:
            rig.load(chain(number, pages))
        os.write(out, b"saved\n")
    rig.close()


def die_in_order(shared: str) -> None:
    """Save and load chains, let the keeper write what was used, say in which order pages leave, and be killed."""
    rig = Rig(Directories(Path(shared), Path("/nowhere")).config(shared=6 * VOLUME_BYTES, disk=0))
    rng = random.Random(5)
    for _ in range(60):
        number, pages = rng.randrange(12), rng.randrange(1, 12)
        if rng.random() < 0.5:
            rig.save(chain(number, pages))
        else:
            rig.load(chain(number, pages))
    rig.round()
    print(*(key.hex() for key in order_of(rig, Tier.SHARED)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Fork a saver for each line read; wait for its end before the next."""
    if sys.argv[1] == "order":
        die_in_order(sys.argv[2])
    [shared] = sys.argv[1:]
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                serve(int(line.split()[0]), shared, 1)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
