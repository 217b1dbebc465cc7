"""A reopen, or a background round, that waited while the store was closed brought the closed tier back to life: its
volumes stayed locked for as long as the process lived."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from stepwell.errors import StoreClosedError
from stepwell.index import Tier
from store_kit import Directories, OpenRig, chain


@pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])
def test_a_reopen_that_waits_while_the_store_is_closed_changes_nothing(
    open_rig: OpenRig, directories: Directories, monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    rig = open_rig()
    rig.save(chain(1, 3))
    round_ = rig.store._rounds[tier]
    held = round_.held

    def close_first(timeout: float) -> AbstractContextManager[bool]:
        monkeypatch.undo()
        rig.close()
        return held(timeout)

    monkeypatch.setattr(round_, "held", close_first)
    with pytest.raises(StoreClosedError):
        rig.store.reopen(tier)
    assert not [name for name in directories.names() if name.startswith("p-")]
    assert open_rig().load(chain(1, 3)) == 3


def test_a_round_that_waits_while_the_store_is_closed_does_nothing(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig()
    rig.save(chain(1, 3))
    rig.close()
    before = directories.names()
    for round_ in rig.store._rounds.values():
        assert not round_.run()
    assert directories.names() == before
