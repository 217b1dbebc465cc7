"""verify() called pages damaged that it had not read: those of a transfer that set_epoch() or close() had cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stepwell.errors import StoreClosedError
from stepwell.store import VerifyResult
from stepwell.testing import faults
from store_kit import Directories, OpenRig, Rig, chain


def while_verifying(rig: Rig, do: Callable[[], Any]) -> VerifyResult | type[BaseException]:
    """Do something while verify() is at its first read; return what verify said."""
    said: list[VerifyResult | type[BaseException]] = []

    def verify() -> None:
        try:
            said.append(rig.store.verify())
        except StoreClosedError as error:
            said.append(type(error))

    thread = threading.Thread(target=verify)
    with faults.inject("file.pread", "pause"):
        thread.start()
        faults.wait_paused("file.pread")
        do()
    thread.join()
    return said[0]


def test_pages_cancelled_by_a_change_of_epoch_are_not_damaged(open_rig: OpenRig) -> None:
    rig = open_rig(shared=0, epoch=1)
    rig.save(chain(1, 8))
    said = while_verifying(rig, lambda: rig.store.set_epoch(2))
    assert isinstance(said, VerifyResult)
    assert said.damaged == 0
    assert said.pages <= 8


def test_verify_of_a_store_that_closes_says_so(directories: Directories) -> None:
    rig = Rig(directories.config(shared=0, close_timeout=0.0))
    rig.save(chain(1, 8))
    closing = threading.Thread(target=rig.close)

    def close() -> None:
        closing.start()
        while not rig.store.closed:
            pass

    said = while_verifying(rig, close)
    closing.join()
    assert said is StoreClosedError
