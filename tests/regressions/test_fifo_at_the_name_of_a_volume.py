"""A fifo at the name of a disk volume's metadata kept the store's close, and every open of the process, waiting.

The copy of the index beside a volume is made from its records, read through a descriptor of its own. That was opened as
no other name is: it waited for the fifo's writer, for ever, and took any other file for the volume's. What went wrong
there also kept the order of pages of the volumes behind it from being written.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, OpenRig, Rig, chain


def stamps_of(rig: Rig) -> dict[str, int]:
    """Return for each volume the highest stamp in it."""
    members = rig.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
    return {member.held.volume_id: int(member.volume.recover()[9].max(initial=0)) for member in members}


def in_its_place(kind: str, path: Path) -> None:
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "short":
            path.write_bytes(bytes(100))
        case "directory":
            path.mkdir()
        case "second name":
            path.write_bytes(bytes(1 << 20))
            os.link(path, path.with_name("second"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "short", "directory", "second name"])
def test_another_file_at_the_name_of_a_volume_costs_what_is_beside_that_volume(
    directories: Directories, open_rig: OpenRig, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    rig = open_rig(slots=12, shared=0, disk=4 * VOLUME_BYTES)
    number = 0
    while len(directories.volumes("meta")) < 2:
        rig.save(chain(number, 12))
        number += 1
        rig.round()
    for saved in range(number):
        rig.save(chain(saved, 12))  # those that were refused while the tier grew
    disk = rig.store._tiers[Tier.DISK]
    while len(disk._indexes) < len(disk.members):  # type: ignore[attr-defined]
        rig.round()  # a thread opens them, one after the other
    in_its_place(kind, directories.volumes("meta")[0])
    with caplog.at_level(logging.WARNING, "stepwell"):
        rig.close()
    told = [record.getMessage() for record in caplog.records if "not brought up to date" in record.getMessage()]
    assert len(told) == 1
    assert directories.volumes("meta")[0].stem in told[0]
    again = open_rig(slots=12, shared=0, disk=4 * VOLUME_BYTES)
    assert all(stamp > 0 for stamp in stamps_of(again).values()), "the order of another volume's pages was not written"
