"""Fail the first, second, ... n-th system call of the file layer, until none fails: what must hold after each.

    python tests/fail_every_call.py [--operation NAME ...] [--fault NAME ...] [--every N] [--quiet]

Prints how often each fault was placed in each operation; exits with 1 where something did not hold. CI runs a sample of
it (test_store_faults.py); all of it takes some minutes.

What must hold: the call succeeds, or says with a StepwellError that it did not; no page is served with wrong bytes; the
capacity of each tier adds up; no descriptor and no thread is left; a store that is opened next works, and finds nothing
that it must not.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell import _core
from stepwell.clock import ManualClock
from stepwell.errors import StepwellError
from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, Rig, assert_unpinned, assert_whole, chain


@dataclass(frozen=True)
class FaultKind:
    """What one call comes to: an errno, or only so many bytes moved."""

    action: str
    value: int
    points: str


FAULTS = {
    **{errno.errorcode[n]: FaultKind("errno", n, "file.*") for n in (5, 28, 30, 4, 24)},
    **{f"short-read-{n}": FaultKind("short", n, "file.pread") for n in (0, 1, 512)},
    **{f"short-write-{n}": FaultKind("short", n, "file.pwrite") for n in (0, 1, 512)},
}


@dataclass
class Scene:
    """One round: two directories, a store in them or none, and a clock that is turned by hand."""

    directories: Directories
    clock: ManualClock
    rig: Rig | None = None

    def open(self, volumes: int = 2, **others: float) -> Rig:
        sizes = dict.fromkeys(("shared", "disk"), volumes * VOLUME_BYTES)
        self.rig = Rig(self.directories.config(**sizes, **others), clock=self.clock)
        return self.rig

    def warm(self, volumes: int = 2) -> None:
        """Leave orphans with pages behind."""
        rig = self.open(volumes)
        for number in range(volumes * 6):
            rig.save(chain(number, 24))
            rig.round()
        rig.close()
        self.rig = None


def _opened(scene: Scene) -> None:
    scene.open()


def _warm(scene: Scene) -> None:
    scene.warm()


def _nothing(scene: Scene) -> None:
    """Start from empty directories."""


def _with_pages(scene: Scene) -> None:
    rig = scene.open()
    rig.save(chain(1, 8))
    rig.store.evict(Tier.SHARED, 4)


def _with_little_room(scene: Scene) -> None:
    rig = scene.open(4, low_watermark=0.4, high_watermark=0.5)
    for number in range(5):
        rig.save(chain(number, 24))
    scene.clock.advance(100.0)


def _rig(scene: Scene) -> Rig:
    assert scene.rig is not None
    return scene.rig


def _save(scene: Scene) -> None:
    _rig(scene).save(chain(2, 4))


def _load(scene: Scene) -> None:
    _rig(scene).load(chain(1, 8))
    _rig(scene).store.flush()


def _evict(scene: Scene) -> None:
    _rig(scene).store.evict(Tier.DISK, 4)
    _rig(scene).store.forget(chain(1, 8))


def _round(scene: Scene) -> None:
    for _ in range(2):
        with contextlib.suppress(StepwellError, OSError):  # as the keeper does, but for its log line
            _rig(scene).round()
        scene.clock.advance(100.0)


def _close(scene: Scene) -> None:
    _rig(scene).close()


def _reopen(scene: Scene) -> None:
    _rig(scene).store.reopen(Tier.DISK)
    _rig(scene).store.reopen(Tier.SHARED)


Step = Callable[[Scene], object]
OPERATIONS: dict[str, tuple[Step, Step]] = {
    "open": (_nothing, lambda scene: scene.open()),
    "adopt": (_warm, lambda scene: scene.open()),
    "save": (_opened, _save),
    "load": (_with_pages, _load),
    "evict": (_with_pages, _evict),
    "round": (_with_pages, _round),
    "growth": (_with_little_room, _round),
    "reopen": (_with_pages, _reopen),
    "close": (_with_pages, _close),
}


def _left_open(before: set[str]) -> list[str]:
    now = set(os.listdir("/proc/self/fd"))
    found = []
    for name in now - before:
        with contextlib.suppress(OSError):  # the one that lists
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


@contextlib.contextmanager
def _armed(kind: FaultKind, nth: int) -> Iterator[None]:
    _core.fault_arm(kind.points, kind.action, nth, kind.value)
    try:
        yield
    finally:
        _core.fault_clear()


def fail_nth(operation: str, fault: str, nth: int) -> bool:
    """Do an operation with its n-th call failing, and check what must hold. False: it has no so many calls."""
    prepare, act = OPERATIONS[operation]
    kind = FAULTS[fault]
    disk = Path(tempfile.mkdtemp(prefix="stepwell-fail-"))
    shared = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    before, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    scene = Scene(Directories(shared / "shared", disk / "disk"), ManualClock())
    try:
        prepare(scene)
        has_fired = False
        try:
            with _armed(kind, nth):
                try:
                    act(scene)
                finally:
                    has_fired = _core.fault_reached(kind.points) >= nth
        except StepwellError:
            assert has_fired, "it failed by itself"
        if scene.rig is not None and not scene.rig.store.closed:
            _look_at(scene, scene.rig)
            scene.rig.close()
        scene.rig = None
        left = _left_open(before)
        assert not left, f"descriptors are left: {left}"
        assert threading.active_count() == threads, "a thread is left"
        rig = scene.open()
        _look_at(scene, rig)
        assert rig.save(chain(77, 4)).transfer.ok.all(), "the store that comes next saves nothing"
        assert rig.load(chain(77, 4)) == 4
        rig.close()
        names = [name for name in scene.directories.names() if not name.startswith(("v-", "directory.lock"))]
        assert names == [], "leftovers that the next store does not remove"
        return has_fired
    finally:
        if scene.rig is not None:
            scene.rig.close()
        shutil.rmtree(disk)
        shutil.rmtree(shared)


def _look_at(scene: Scene, rig: Rig) -> None:
    rig.store.flush()
    for number in range(12):
        rig.load(chain(number, 24))  # compares what came
    for _ in range(2):  # a tier that had no room is read-only after the first round, and was tried in the second
        scene.clock.advance(100.0)
        with contextlib.suppress(StepwellError, OSError):
            rig.round()
    assert_whole(rig.store)
    assert_unpinned(rig.store)
    assert {tier.state for tier in rig.store.stats().tiers.values()} == {"serving"}


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", nargs="*", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--every", type=int, default=1, help="place a fault in every N-th call only")
    arguments = parser.parse_args()
    failed = total = 0
    for operation in arguments.operation:
        for fault in arguments.fault:
            nth = 1
            while True:
                try:
                    has_fired = fail_nth(operation, fault, nth)
                except AssertionError as error:
                    has_fired, failed = True, failed + 1
                    print(f"{operation}, {fault}, call {nth}: {error}")
                    print(f"    again: fail_every_call.fail_nth({operation!r}, {fault!r}, {nth})", flush=True)
                if not has_fired:
                    break
                total += 1
                nth += arguments.every
            print(f"{operation}: {fault}: {(nth - 1) // arguments.every} calls", flush=True)
    print(f"{total} faults placed, {failed} with something that did not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
