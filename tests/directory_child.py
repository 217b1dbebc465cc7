"""Take part in a tier directory as processes that tests steer by lines of JSON.

    python directory_child.py worker    opens, grows, gives back, ... one directory at a time
    python directory_child.py zygote    forks victims, which run `scenario` with a fault armed

What tests in one process need too (tiny headers, configurations) is here as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from stepwell import _core
from stepwell.errors import StepwellError, VolumeBusyError
from stepwell.testing.faults import inject
from stepwell.tiers.directory import DirectoryConfig, HeldVolume, Machine
from stepwell.tiers.limits import Limit
from stepwell.tiers.volumes import TierDirectory

VOLUME = 64 << 10
SHAPES = {name: _core.PageShape([1024, 1024], name.encode() * 32) for name in "abcz"}


class TinyHeaders:
    """Headers of the core, with the shortest ring, so that a volume of 64 KiB holds pages."""

    def __init__(self, shape: _core.PageShape) -> None:
        self._shape = shape

    def plan(self, *, medium: int, volume_bytes: int, alignment: int) -> _core.VolumeHeader:
        return _core.VolumeHeader.plan(medium, self._shape, volume_bytes, alignment, 64)

    def decode(self, data: bytes, metadata_bytes: int, pages_bytes: int) -> _core.VolumeHeader:
        return _core.VolumeHeader.decode(data, metadata_bytes, pages_bytes)


class AmpleLimits:
    """Limits that never bind."""

    def total(self, path: str) -> Limit:
        return Limit(1 << 50, "nothing")

    def available(self, path: str) -> Limit:
        return Limit(1 << 50, "nothing")


def make_directory(
    path: str,
    medium: str,
    *,
    capacity: int = 4,
    floor: int = 1,
    fingerprint: str = "a",
    lock_timeout: float = 5.0,
    machine: Machine | None = None,
) -> TierDirectory:
    """Return a directory of volumes of 64 KiB; capacity and floor in volumes."""
    config = DirectoryConfig(
        path=path,
        medium="shared" if medium == "shared" else "disk",
        capacity_bytes=capacity * VOLUME,
        volume_bytes=VOLUME,
        floor_bytes=floor * VOLUME,
        fingerprint=SHAPES[fingerprint].fingerprint,
        lock_timeout=lock_timeout,
    )
    machine = machine or Machine(limits=AmpleLimits())
    return TierDirectory(config, TinyHeaders(SHAPES[fingerprint]), machine=machine)


def scenario(path: str, medium: str) -> None:
    """Do everything that a process does to a directory, so that a fault can strike at each call."""
    with make_directory(path, medium, floor=2) as directory:
        directory.adopt()
        directory.grow()
        grown = directory.grow()
        if isinstance(grown, HeldVolume):
            directory.give_back(grown)
        directory.wanted()
        if directory.held:
            directory.remove(directory.held[0])
        directory.grow()


class Worker:
    """Obeys commands on one directory at a time."""

    def __init__(self) -> None:
        self._directory: TierDirectory | None = None

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = getattr(self, "do_" + order.pop("do"))(**order)
        except VolumeBusyError as error:
            return {"busy": str(error), "held": self._held()}
        except (StepwellError, ValueError) as error:
            return {"failed": f"{type(error).__name__}: {error}", "held": self._held()}
        return {"answer": answer, "held": self._held()}

    def _held(self) -> list[str]:
        return [] if self._directory is None else [v.volume_id for v in self._directory.held]

    def _open(self) -> TierDirectory:
        assert self._directory is not None
        return self._directory

    def do_open(self, **config: Any) -> None:
        if self._directory is not None:
            self._directory.close()
        self._directory = make_directory(**config)
        self._directory.open()

    def do_adopt(self) -> int:
        return len(self._open().adopt())

    def do_grow(self) -> str:
        outcome = self._open().grow()
        return "grown" if isinstance(outcome, HeldVolume) else outcome.reason

    def do_answer(self) -> int:
        """Give back what is wanted; return how many volumes that were."""
        given, directory = 0, self._open()
        wanted = directory.wanted()
        while wanted > 0:
            volume = directory.held[0]
            wanted -= volume.total_bytes
            directory.give_back(volume)
            given += 1
        return given

    def do_give(self) -> None:
        for volume in self._open().held[-1:]:
            self._open().give_back(volume)

    def do_scan(self) -> dict[str, int]:
        view = self._open().scan()
        return {"total": view.total_bytes, "orphans": view.orphans, "unusable": view.unusable}

    def do_close(self) -> None:
        self._open().close()

    def do_fork(self) -> int:
        """Fork a child that uses nothing and lives until it is killed."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid

    def do_fork_and_end(self) -> int:
        """Fork a child that closes what it can and ends as Python ends; return its exit code."""
        pid = os.fork()
        if pid == 0:
            self._open().close()
            try:
                self._open().grow()
            except StepwellError:
                os._exit(1)
            except ValueError:
                sys.exit(0)
            os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Zygote:
    """Forks victims. It has no threads and nothing open, so they are as good as new processes."""

    def __init__(self) -> None:
        self._pid = 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, "do_" + order.pop("do"))(**order)  # type: ignore[no-any-return]

    def do_spawn(self, *, path: str, medium: str, nth: int, action: str) -> dict[str, Any]:
        self._pid = os.fork()
        if self._pid == 0:
            try:
                with inject("file.*", action, nth=nth):  # type: ignore[arg-type]
                    scenario(path, medium)
                os._exit(0)
            except VolumeBusyError:
                os._exit(3)
            finally:
                traceback.print_exc()
                os._exit(4)
        _, status = os.waitpid(self._pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return {"outcome": "stopped", "pid": self._pid}
        return self._ended(status)

    def do_end(self) -> dict[str, Any]:
        os.kill(self._pid, signal.SIGKILL)
        return self._ended(os.waitpid(self._pid, 0)[1])

    def _ended(self, status: int) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(status)
        return {"outcome": "killed" if code == -signal.SIGKILL else "exited", "code": code}


def main() -> None:
    obey: Callable[[dict[str, Any]], dict[str, Any]]
    obey = {"worker": Worker, "zygote": Zygote}[sys.argv[1]]().obey
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
