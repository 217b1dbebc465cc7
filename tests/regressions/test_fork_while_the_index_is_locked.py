"""A forked child hung where it dropped a Match while, as it was forked, another thread of the parent was in the index.

The child has the mutex of the index as it was, held, and nobody to release it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from store_kit import Rig, chain


def test_a_forked_child_drops_a_match_whatever_the_parent_was_doing(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig(disk=0, shared=1 << 20)
    tokens = chain(1, 200)
    rig.save(tokens)
    stop = threading.Event()

    def scan() -> None:
        while not stop.is_set():
            rig.store.check()  # most of its time is spent under the mutex

    scanning = threading.Thread(target=scan)
    scanning.start()
    codes = []
    for _ in range(20):
        match = rig.store.match(tokens)
        sum(range(1_000_000))  # long enough for the other thread to have its turn
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(3)
            match.close()
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        match.close()
        if codes[-1] != 0:
            break
    stop.set()
    scanning.join()
    assert set(codes) == {0}
