"""A save that lacked room asked for it over and over, for two seconds, where asking failed: it kept two cores busy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from stepwell.tiers.volume_tier import VolumeTier
from store_kit import VOLUME_BYTES, Directories, OpenRig, chain


def break_lock(directories: Directories) -> None:
    lock = directories.shared / "directory.lock"
    lock.unlink()
    lock.mkdir()


def remove_directory(directories: Directories) -> None:
    shutil.rmtree(directories.shared)
    directories.shared.write_bytes(b"")  # and it cannot be made anew


@pytest.mark.parametrize("harm", [break_lock, remove_directory])
def test_a_save_asks_once_for_room_that_cannot_be_had(
    directories: Directories,
    open_rig: OpenRig,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Directories], None],
) -> None:
    rig = open_rig(shared=4 * VOLUME_BYTES, disk=0, slots=1024, keeper=True)
    rig.save(chain(1, 4))
    grow, calls = VolumeTier.grow, []

    def counted(tier: VolumeTier, *given: Any) -> None:
        calls.append(tier)
        grow(tier, *given)

    monkeypatch.setattr(VolumeTier, "grow", counted)
    harm(directories)
    for number in range(2, 5):
        rig.save(chain(number, rig.store.stats().tiers["shared"].capacity + 1))
    assert len(calls) <= 12, "of three saves"
