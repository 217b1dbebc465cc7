"""A store that was closed just when its old LMDB environment had been read printed a traceback of its thread `sw-lmdb`:
what was remembered was to be put into an environment that was closed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.tiers import lmdb_index
from stepwell.tiers.lmdb_index import VolumeIndex

VOLUME = bytes(range(16))


def test_what_was_read_as_it_was_stopped_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v.lmdb"
    index = VolumeIndex(str(path), volume_id=VOLUME, slots=4)
    index.open(adopted=False)
    index.remember([b"key"], np.array([7], np.uint64))
    index.close()

    stop = threading.Event()
    read = lmdb_index._output_of

    def stopped_at_the_end(*given: Any, **named: Any) -> bytes:
        found = read(*given, **named)
        stop.set()
        return found

    monkeypatch.setattr(lmdb_index, "_output_of", stopped_at_the_end)
    assert list(VolumeIndex(str(path), volume_id=VOLUME, slots=4).open(adopted=True, stop=stop).keys) == []
    monkeypatch.undo()
    again = VolumeIndex(str(path), volume_id=VOLUME, slots=4)
    assert list(again.open(adopted=True).keys) == [b"key"]  # it is the next one's
    again.close()
