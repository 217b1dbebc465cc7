"""The quick form of neighbours_stress.py: processes of one directory that come, are stopped and killed, and go."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neighbours_stress import VOLUMES, kills, rolling, starters

PATIENCE = 60.0  # seconds; what takes so long does not come


@pytest.fixture(params=["shared"])
def medium(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(medium: str) -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm" if medium == "shared" else None))
    yield parent / "tier"
    shutil.rmtree(parent)


def assert_well(said: dict[str, Any]) -> None:
    assert said["failures"] == []
    assert said["loaded_pages"] > 0
    assert said["looks"]["locked"] > 0
    assert max(said["most_bytes"].values()) <= said["capacity_bytes"]


@pytest.mark.parametrize("medium", ["shared", "disk"], indirect=True)
def test_neighbours_of_the_killed_and_stopped_serve_right_bytes_within_one_budget(path: Path, medium: str) -> None:
    said = kills(path, medium, 3.5, seed=1)
    assert_well(said)
    assert said["kills"] >= 3
    assert sum(left["pages"] for left in said["left"]) > 0


def test_eight_that_start_at_once_each_get_their_share_of_what_the_dead_left(path: Path) -> None:
    said = starters(path, "shared", PATIENCE, seed=1)
    assert_well(said)
    assert said["volumes_before"] == VOLUMES
    assert said["volumes"] == [VOLUMES // 8] * 8


def test_a_new_process_gets_its_share_beside_the_old_one_and_the_rest_when_that_has_ended(path: Path) -> None:
    said = rolling(path, "shared", PATIENCE, seed=1)
    assert_well(said)
    assert said["adopted"] >= VOLUMES // 8
