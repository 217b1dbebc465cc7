"""A forked child hung where it dropped a Match or a pin while, as it was forked, the parent was in the index.

Another thread of the parent, that is: the child has the mutex of the index as it was, held, and nobody to release it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stepwell.errors import ForkedError
from store_kit import OpenRig, Rig, chain


@contextmanager
def scanning(rig: Rig) -> Iterator[None]:
    """Have another thread in the index most of the time."""
    stop = threading.Event()

    def scan() -> None:
        while not stop.is_set():
            rig.store.check()  # most of its time is spent under the mutex

    thread = threading.Thread(target=scan)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def exit_code_of_child(call: Callable[[], object]) -> int:
    """Do something in a forked child, while the parent's other thread has its turn; 0: it ended well, within 3 s."""
    sum(range(1_000_000))  # long enough for the other thread
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_drops_a_match_whatever_the_parent_was_doing(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, shared=1 << 20)
    tokens = chain(1, 200)
    rig.save(tokens)
    codes = []
    with scanning(rig):
        for _ in range(20):
            match = rig.store.match(tokens)
            codes.append(exit_code_of_child(match.close))
            match.close()
            if codes[-1] != 0:
                break
    assert set(codes) == {0}


def test_in_a_forked_child_a_pin_has_ended_whatever_the_parent_was_doing(open_rig: OpenRig) -> None:
    rig = open_rig(disk=0, shared=1 << 20, pin_fraction=0.9)
    tokens = chain(1, 100)
    rig.save(tokens)
    pin = rig.store.pin(tokens, ttl=3600.0)
    assert pin.tokens == tokens.size

    def use() -> None:
        assert (pin.closed, pin.kept) == (True, 0)
        assert "closed" in repr(pin)
        pin.close()
        with pytest.raises(ForkedError):
            rig.store.check()

    codes = []
    with scanning(rig):
        for _ in range(20):
            codes.append(exit_code_of_child(use))
            if codes[-1] != 0:
                break
    assert set(codes) == {0}
    with rig.store._pins._lock:
        assert exit_code_of_child(use) == 0
    assert pin.kept == tokens.size
    pin.close()
