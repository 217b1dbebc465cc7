"""A save under keys that found a page on its way, by a save that had given up, said that it was present. SGLang was
told that the page is kept, and it was lost where that write failed.
"""

from __future__ import annotations

import errno
import threading

import pytest

from stepwell import _core
from stepwell.mover import SaveOutcome
from stepwell.testing.faults import inject, resume, wait_paused
from store_kit import DISK_ONLY, OpenRig
from test_store_keys import keys_of, load, save

STORED, PRESENT, REFUSED, PENDING = (int(outcome) for outcome in SaveOutcome)


def test_a_page_whose_write_stands_in_the_disk_is_pending(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY)
    with inject("file.pwrite", "pause", nth=1):
        assert save(rig, keys_of(1), deadline=0.05) == [REFUSED]
        wait_paused("file.pwrite")
        assert save(rig, keys_of(1), deadline=0.05) == [PENDING]
        assert save(rig, keys_of(1), deadline=0.0) == [PENDING]
    assert rig.store.flush(30.0)
    outcome = save(rig, keys_of(1))
    assert outcome in ([PRESENT], [STORED])
    assert load(rig, keys_of(1)) == [True]


def test_a_save_waits_for_what_another_brings(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = open_rig(**DISK_ONLY)
    outcomes: list[int] = []
    with inject("file.pwrite", "pause", nth=1):
        assert save(rig, keys_of(1), deadline=0.05) == [REFUSED]
        wait_paused("file.pwrite")
        waits, wait = threading.Event(), rig.store._copies.wait

        def waiting(core: _core.Transfer, timeout: float | None) -> bool:
            waits.set()
            return wait(core, timeout)

        monkeypatch.setattr(rig.store._copies, "wait", waiting)
        second = threading.Thread(target=lambda: outcomes.extend(save(rig, keys_of(1), deadline=30.0)))
        second.start()
        assert waits.wait(30.0)
        resume("file.pwrite")
        second.join()
    assert outcomes in ([PRESENT], [REFUSED])  # refused: the write that had been given up was dropped
    assert load(rig, keys_of(1)) == [outcomes == [PRESENT]]


@pytest.mark.parametrize("deadline", [None, 5.0])
def test_a_key_that_is_named_twice_is_present_the_second_time(open_rig: OpenRig, deadline: float | None) -> None:
    rig = open_rig(**DISK_ONLY)
    assert save(rig, keys_of(1, 1, 2, 1), deadline=deadline) == [STORED, PRESENT, STORED, PRESENT]


def test_a_key_that_is_named_twice_and_not_written_is_refused_both_times(open_rig: OpenRig) -> None:
    rig = open_rig(**DISK_ONLY)
    with inject("file.pwrite", "errno", value=errno.EIO):
        assert save(rig, keys_of(1, 1)) == [REFUSED, REFUSED]
