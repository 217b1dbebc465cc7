"""A tier directory that somebody removes under a living store, as cleaners of old files do, is made anew.

The store went on to save into files without a name, said of each page that it had landed, and the next process found
none of them.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.clock import ManualClock
from stepwell.index import Tier
from store_kit import Directories, OpenRig, chain

TIERS = pytest.mark.parametrize("tier", [Tier.SHARED, Tier.DISK])


def only(tier: Tier) -> dict[str, int]:
    return {"disk" if tier is Tier.SHARED else "shared": 0}


def place(directories: Directories, tier: Tier) -> Path:
    return directories.shared if tier is Tier.SHARED else directories.disk


def remove(path: Path) -> None:
    shutil.rmtree(path)


def replace(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir(mode=0o700)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@TIERS
@pytest.mark.parametrize("do", [remove, replace, move_away])
def test_what_is_saved_after_the_directory_went_is_found_by_the_next_process(
    open_rig: OpenRig,
    directories: Directories,
    caplog: pytest.LogCaptureFixture,
    tier: Tier,
    do: Callable[[Path], None],
) -> None:
    caplog.set_level(logging.WARNING, logger="stepwell")
    clock = ManualClock()
    rig = open_rig(**only(tier), clock=clock)
    rig.save(chain(1, 9))
    path = place(directories, tier)
    pinned = rig.store.match(chain(1, 2))
    do(path)
    clock.advance(1.0)
    rig.round()
    assert [text for text in caplog.messages if "was removed by somebody" in text] == caplog.messages
    assert len(caplog.messages) == 1
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    pinned.close()
    for _ in range(3):
        clock.advance(1.0)
        rig.round()
    assert len(caplog.messages) == 1
    assert rig.load(chain(1, 9)) == 0
    assert rig.save(chain(2, 9)).full is None
    assert rig.load(chain(2, 9)) == 9
    assert rig.pages(tier) == 9
    assert len([name for name in os.listdir(path) if name.endswith(".proc")]) == 1
    rig.close()
    assert open_rig(**only(tier)).load(chain(2, 9)) == 9


@TIERS
def test_two_processes_go_on_in_one_new_directory(open_rig: OpenRig, directories: Directories, tier: Tier) -> None:
    clock = ManualClock()
    first, second = open_rig(**only(tier), clock=clock), open_rig(**only(tier), clock=clock)
    shutil.rmtree(place(directories, tier))
    for _ in range(3):
        clock.advance(1.0)
        first.round()
        second.round()
    first.save(chain(1, 5))
    second.round()
    assert second.load(chain(1, 5)) == 5
    assert second.store.stats().neighbours.delivered == 5


@TIERS
def test_where_no_directory_can_be_made_pages_are_refused_until_one_can(
    open_rig: OpenRig, directories: Directories, tier: Tier
) -> None:
    clock = ManualClock()
    rig = open_rig(**only(tier), clock=clock)
    path = place(directories, tier)
    shutil.rmtree(path)
    path.write_bytes(b"")
    clock.advance(1.0)
    with pytest.raises(Exception, match="is not a directory"):
        rig.round()
    refused = rig.save(chain(1, 3), wait=False).full
    assert refused is not None
    assert "somebody removed the directory" in str(refused)
    path.unlink()
    for _ in range(3):
        clock.advance(1.0)
        rig.round()
    assert rig.save(chain(1, 3)).full is None
