"""A doctor killed after its lock file was gone, or before it was made, left a directory that no doctor ever swept."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stepwell.doctor.scratch import LOCK, PREFIX, scratch_beside, sweep
from store_kit import Directories


class KilledError(Exception):
    """Stands for SIGKILL: nothing after it happens."""


def scratch_of(directories: Directories) -> list[Path]:
    return [path for path in directories.shared.parent.iterdir() if path.name.startswith(PREFIX)]


def test_a_doctor_killed_at_any_step_of_its_removal_is_swept(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, at = [0], [0]  # it is dead from the at-th call on; until none fires

    def counting(call: Any) -> Any:
        def counted(*given: Any, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] >= at[0]:
                raise KilledError
            return call(*given, **how)

        return counted

    unlink, rmdir = os.unlink, os.rmdir
    while True:
        at[0] += 1
        calls[0] = 0
        place = str(directories.shared)
        with monkeypatch.context() as patch, suppress(KilledError), scratch_beside(place) as made:
            os.mkdir(f"{made}/shared")
            for name in ("shared/a", "shared/b", "direct"):
                Path(f"{made}/{name}").touch()
            patch.setattr(os, "unlink", counting(unlink))
            patch.setattr(os, "rmdir", counting(rmdir))
        if not scratch_of(directories):
            break
        assert sweep(str(directories.shared.parent)) == 1
        assert scratch_of(directories) == []
    assert at[0] > 5


def test_a_directory_that_never_had_a_lock_is_swept_only_while_it_is_empty(directories: Directories) -> None:
    parent = directories.shared.parent
    parent.mkdir(exist_ok=True)
    (parent / f"{PREFIX}empty").mkdir()
    (parent / f"{PREFIX}other").mkdir()
    (parent / f"{PREFIX}other" / "file").touch()
    assert sweep(str(parent)) == 1
    assert [path.name for path in scratch_of(directories)] == [f"{PREFIX}other"]
    shutil.rmtree(parent / f"{PREFIX}other")


def test_a_doctor_whose_directory_is_swept_before_it_has_a_lock_makes_another(
    directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, swept = tempfile.mkdtemp, []

    def meddled(**how: Any) -> str:
        made = make(**how)
        if not swept:
            swept.append(sweep(str(directories.shared.parent)))
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", meddled)
    with scratch_beside(str(directories.shared)) as made:
        assert Path(made, LOCK).exists()
    assert swept == [1]
    assert scratch_of(directories) == []
