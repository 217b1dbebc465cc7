"""Directories for tiers, stores that are looked at and closed afterwards, and a check that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from stepwell.config import StoreConfig
from stepwell.testing import faults
from store_kit import Directories, OpenRig, Rig, assert_unpinned, assert_whole

# How long an example takes is the machine's matter, not the test's.
settings.register_profile("stepwell", deadline=None)
settings.load_profile("stepwell")

# A shell starts what it puts into the background with ctrl-C ignored, and Python leaves that so, here and in children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _sw_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it has ended since
            continue
    return sorted(name for name in names if name.startswith("sw-"))


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that lists
            continue
    return found


def _volume_mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split()[-1] for line in maps if ".vol" in line]


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor or a mapping of a volume behind."""
    before, threads, mappings = _descriptors(), _sw_threads(), _volume_mappings()
    yield
    faults._core.fault_clear()
    # Not "none": a test that failed before this one may keep its store alive in its traceback.
    assert _sw_threads() == threads
    assert _volume_mappings() == mappings
    after = _descriptors()
    assert {name: after[name] for name in after.keys() - before.keys()} == {}


@pytest.fixture
def directories(no_leaks: None, tmp_path: Path) -> Iterator[Directories]:
    """Two tier directories to be, in memory and on disk; what is in them afterwards goes."""
    parent = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    try:
        yield Directories(shared=parent / "shared", disk=tmp_path / "disk")
    finally:
        shutil.rmtree(parent)


@pytest.fixture
def open_rig(directories: Directories) -> Iterator[OpenRig]:
    """Open stores: `open_rig(host=, shared=, disk=, ...)` or `open_rig(config)`; those still open afterwards are whole.

    keeper: with its thread; else its rounds are `rig.round()`.
    """
    opened: list[Rig] = []

    def make(
        config: StoreConfig | None = None,
        *,
        slots: int = 256,
        clock: Any = None,
        keeper: bool = False,
        **sizes: Any,
    ) -> Rig:
        rig = Rig(config or directories.config(**sizes), slots=slots, clock=clock, keeper=keeper)
        opened.append(rig)
        return rig

    yield make
    try:
        for rig in opened:
            if not rig.store.closed:
                assert_whole(rig.store)
                assert_unpinned(rig.store)
    finally:
        for rig in opened:
            rig.close()


@pytest.fixture
def axes() -> str:
    """How make_engine's pools are cut into arrays; a module that asks for several parametrizes it."""
    return "layer slot token head dim"


@pytest.fixture
def make_engine(directories: Directories, axes: str) -> Iterator[Any]:
    """Open stores with a device tier and a stamping engine each; afterwards each must give everything back."""
    from sequence_kit import engines  # imports jax

    with engines(directories, axes) as make:
        yield make
