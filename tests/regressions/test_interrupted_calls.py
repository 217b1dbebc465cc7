"""Ctrl-C in a call that waits left the store and the caller's memory in use.

verify() never returned its pins: its pages could not be evicted nor their volumes given back any more. load_keys()
raised
while bytes were still to land, save_keys() while the source was still to be read.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from stepwell.hashing import prefix_hashes
from stepwell.mover import Transfer
from stepwell.testing import faults
from store_kit import PAGE_TOKENS, OpenRig, assert_unpinned, chain


def interrupted_at(point: str, call: Callable[[], object]) -> None:
    """Send SIGINT to a call whose worker is stopped at a point, once it waits for it."""
    main = threading.get_ident()

    def interrupt() -> None:
        faults.wait_paused(point)
        while sys._current_frames()[main].f_code is not Transfer.wait.__code__:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()


def test_an_interrupted_verify_pins_nothing(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0)
    rig.save(chain(1, 8))
    with faults.inject("file.pread", "pause"):
        interrupted_at("file.pread", rig.store.verify)
    assert rig.store.flush(30.0)
    assert_unpinned(rig.store)
    assert rig.store.clear() == 8


def test_nothing_lands_after_an_interrupted_load_of_keys(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0)
    tokens = chain(1, 8)
    rig.save(tokens)
    keys = prefix_hashes(tokens, page_tokens=PAGE_TOKENS)
    with faults.inject("file.pread", "pause"):
        interrupted_at("file.pread", lambda: rig.store.load_keys(keys, into=rig.pool[:8]))
        rig.rows[:] = 0x11
    assert rig.store.flush(30.0)
    assert (rig.rows == 0x11).all()


def test_nothing_of_a_later_source_is_saved_by_an_interrupted_save_of_keys(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0)
    keys = prefix_hashes(chain(1, 8), page_tokens=PAGE_TOKENS)
    rig.rows[:] = 0x22
    with faults.inject("file.pwrite", "pause"):
        interrupted_at("file.pwrite", lambda: rig.store.save_keys(keys, source=rig.pool[:8]))
        rig.rows[:] = 0x11  # the source is the caller's again
    assert rig.store.flush(30.0)
    rig.rows[:] = 0
    ok = rig.store.load_keys(keys, into=rig.pool[:8])
    assert (rig.rows[:8][ok] == 0x22).all(), "a page was read from the source after the call had raised"
