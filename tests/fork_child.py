"""Processes around forks, for test_start_methods.py.

    python fork_child.py KIND SHARED   opens a store, keeps it busy from four threads, has children of a kind, says
                                       their pids, and goes on until it is killed; the children wait for a signal
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from stepwell.config import SharedTier, StoreConfig
from stepwell.index import Tier
from stepwell.tiers.volume_tier import VolumeTier
from store_kit import GEOMETRY, VOLUME_BYTES, Rig, chain

CHILDREN = 4


def config_of(shared: str) -> StoreConfig:
    """Two volumes to each of four."""
    given = SharedTier(8 * VOLUME_BYTES, shared, volume_bytes=VOLUME_BYTES, share=2 * VOLUME_BYTES)
    return StoreConfig(geometry=GEOMETRY, shared=given)


def held(rig: Rig) -> list[str]:
    tier = rig.store._tiers[Tier.SHARED]
    assert isinstance(tier, VolumeTier)
    return [member.held.volume_id for member in tier.members]


def serve(shared: str, number: int, said: Connection) -> None:
    """Be a process of its own: save, load, say what is held; end when told to."""
    rig = Rig(config_of(shared), keeper=True)
    rig.save(chain(number, 8))
    said.send((held(rig), rig.load(chain(number, 8))))
    said.recv()
    rig.close()


def wait_for_the_end() -> None:
    """Say that this process runs, and wait for a signal."""
    os.write(1, f"runs {os.getpid()}\n".encode())
    signal.pause()


def children(kind: str) -> Iterator[int]:
    """Start children of a kind, that say when they run."""
    tell = "import os, signal; os.write(1, f'runs {os.getpid()}\\n'.encode()); signal.pause()"
    for _ in range(CHILDREN):
        match kind:
            case "fork":
                pid = os.fork()
                if pid == 0:
                    wait_for_the_end()
                    os._exit(0)
                yield pid
            case "multiprocessing":
                process = multiprocessing.get_context("fork").Process(target=wait_for_the_end)
                process.start()
                assert process.pid is not None
                yield process.pid
            case "exec":
                pid = os.fork()
                if pid == 0:
                    os.execv(sys.executable, [sys.executable, "-S", "-c", tell])
                yield pid
            case "subprocess":
                yield subprocess.Popen([sys.executable, "-S", "-c", tell]).pid
            case _:
                raise ValueError(kind)


def parent(kind: str, shared: str) -> None:
    """Have children while the store is in use, and go on until killed."""
    rig = Rig(config_of(shared), keeper=True)
    rig.save(chain(1, 8))

    def use(number: int) -> None:
        while True:
            with rig.store.match(chain(1, 8)):
                rig.store.cached(chain(number, 8), tiers=(Tier.SHARED,))
                rig.store.stats()

    for number in range(3):
        threading.Thread(target=use, args=(number,), daemon=True).start()
    for pid in children(kind):
        os.write(1, f"child {pid}\n".encode())
    number = 2
    while True:
        rig.save(chain(number, 8))
        number += 1
        if number == 30:
            os.write(1, b"saved\n")


if __name__ == "__main__":
    parent(sys.argv[1], str(Path(sys.argv[2])))
