"""Remove from a tier directory what the dead left: orphans that are chosen, and what is half born or half removed.

    plan_removal    what would go, what would stay and why; nothing is touched
    remove          looks again, under the locks, and removes what is still so

A volume goes only while its lock is ours, under the directory lock, by rename and unlink (FORMAT.md 7, Death). So a
living process keeps what it holds, and two removals, or a store that opens meanwhile, meet each other at the locks: who
comes second finds the volume held, or gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from stepwell import _core
from stepwell.clock import Clock, SystemClock
from stepwell.errors import StepwellUsageError, TierIOError, VolumeError
from stepwell.inspection import (
    DirectoryReport,
    Leftover,
    Stranger,
    VolumeReport,
    inspect_directory,
    process_names,
    report_volume,
)
from stepwell.tiers.entry import check_directory
from stepwell.tiers.locks import NotTaken, try_lock
from stepwell.tiers.reader import LOCK_SECONDS, Lock, explain, reader_lock
from stepwell.tiers.scan import Scanner, Sweep
from stepwell.tiers.volume_files import VolumeNames, list_directory, remove_files

__all__ = ["Kept", "Plan", "Removed", "Selection", "plan_removal", "remove"]

TURN_SECONDS: Final = 0.1
"""How long one turn may hold the directory lock, but for one volume: stores wait for it meanwhile."""

_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which orphans to remove: those for which all that is said here holds; none where nothing is said.

    Args:
        orphans: any orphan.
        other_format: its header is damaged, or of another format version.
        older_than: seconds since its birth, and since its files were last written.
        fingerprint: hexadecimal digits that its fingerprint begins with, at least 8.
        epoch_not: it holds no page of this epoch.

    Raises:
        StepwellUsageError: a value out of range.
    """

    orphans: bool = False
    other_format: bool = False
    older_than: float | None = None
    fingerprint: str | None = None
    epoch_not: int | None = None

    def __post_init__(self) -> None:
        if self.fingerprint is not None and not _FINGERPRINT.fullmatch(self.fingerprint):
            raise StepwellUsageError(f"fingerprint {self.fingerprint!r}: give 8 to 64 lowercase hexadecimal digits")
        if self.older_than is not None and not 0 <= self.older_than < float("inf"):
            raise StepwellUsageError(f"older_than is {self.older_than!r}: give seconds")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said: then no volume is selected."""
        return self == Selection()

    def why_not(self, volume: VolumeReport, now_ns: int) -> str:
        """Return why an orphan is not selected; "" where it is."""
        header, slots = volume.header, volume.slots
        if self.is_empty:
            return "an orphan, not selected"
        if volume.condition in ("unreadable", "gone"):
            return volume.why
        if self.other_format and volume.condition == "readable":
            return "of this format"
        if self.older_than is not None and now_ns - volume.age_since_ns < self.older_than * 1e9:
            return "not old enough"
        if self.fingerprint is not None and (header is None or not header.fingerprint.startswith(self.fingerprint)):
            return "of another fingerprint" if header is not None else "its fingerprint cannot be read"
        if self.epoch_not is not None:
            if slots is None:
                return "its epochs cannot be read"
            if self.epoch_not in dict(slots.epochs):
                return f"holds pages of epoch {self.epoch_not}"
            if sum(pages for _, pages in slots.epochs) < slots.resident:
                return "it names more epochs than are counted"
        return ""


@dataclass(frozen=True, slots=True)
class Kept:
    """A volume that stays, and why."""

    volume_id: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be removed from a directory. error: why nothing can be."""

    path: str
    selection: Selection
    error: str = ""
    volumes: tuple[VolumeReport, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    kept: tuple[Kept, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    note: str = ""

    @property
    def nbytes(self) -> int:
        """What would be freed, LMDB environments included."""
        volumes = sum(volume.nbytes + volume.lmdb_bytes for volume in self.volumes)
        return volumes + sum(leftover.nbytes for leftover in self.leftovers)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed. failed: sentences about what could not be; the next scan of any store tries leftovers again."""

    volumes: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    nbytes: int = 0
    kept: tuple[Kept, ...] = ()
    failed: tuple[str, ...] = ()


def plan_removal(
    path: str, selection: Selection, *, clock: Clock | None = None, lock_seconds: float = LOCK_SECONDS
) -> Plan:
    """Say what `remove` would remove."""
    return _plan_of(inspect_directory(path, lock_seconds=lock_seconds), selection, (clock or SystemClock()).wall_ns())


def _plan_of(report: DirectoryReport, selection: Selection, now_ns: int) -> Plan:
    volumes: list[VolumeReport] = []
    kept: list[Kept] = []
    for volume in report.volumes:
        why = volume.lock.why if volume.lock.is_held is not False else selection.why_not(volume, now_ns)
        if why:
            kept.append(Kept(volume.volume_id, volume.nbytes, why))
        else:
            volumes.append(volume)
    return Plan(
        path=report.path,
        selection=selection,
        error=report.error,
        volumes=tuple(volumes),
        leftovers=tuple(leftover for leftover in report.leftovers if leftover.is_dead),
        kept=tuple(kept),
        strangers=report.strangers,
        note=report.note,
    )


def remove(plan: Plan, *, clock: Clock | None = None, lock_seconds: float = 5.0) -> Removed:
    """Remove what a plan says, as far as it is still so.

    Args:
        plan: of `plan_removal`.
        clock: for ages and turns.
        lock_seconds: how long the directory lock is waited for, each turn.

    Returns:
        What is gone, what was kept because it is no longer as planned, and what failed.

    Raises:
        VolumeError: it is no tier directory, or one that a store would refuse.
        VolumeBusyError: the directory lock was held by others for lock_seconds; what was removed before stays removed.
        TierIOError: a lock or the directory cannot be looked at.
    """
    return _Remover(plan, clock or SystemClock()).run(lock_seconds)


@dataclass(slots=True)
class _Remover:
    plan: Plan
    clock: Clock
    volumes: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    nbytes: int = 0

    def run(self, lock_seconds: float) -> Removed:
        plan, path = self.plan, self.plan.path
        if plan.error:
            raise VolumeError(plan.error)
        wanted = [volume.volume_id for volume in plan.volumes]
        pending = [*wanted, *self._ids_of(plan.leftovers)]
        try:
            check_directory(path)
            while pending:
                with reader_lock(path, lock_seconds, flags=os.O_CREAT):
                    until = self.clock.monotonic() + TURN_SECONDS
                    listing = list_directory(path)
                    while pending:
                        self._remove_one(pending.pop(0), listing.volumes, wanted)
                        if self.clock.monotonic() >= until:
                            break
        except OSError as error:
            raise TierIOError(error.errno, f"stopped at {path}: {error.strerror or error}", path) from error
        return Removed(tuple(self.volumes), tuple(self.leftovers), self.nbytes, tuple(self.kept), tuple(self.failed))

    @staticmethod
    def _ids_of(leftovers: Iterable[Leftover]) -> list[str]:
        """Return a volume id, or "p-" and a process id, for each."""
        ids = []
        for leftover in leftovers:
            name = leftover.names[0]
            ids.append(name[:34] if name.startswith("p-") else name[2:34])
        return list(dict.fromkeys(ids))

    def _remove_one(self, name: str, volumes: dict[str, VolumeNames], wanted: list[str]) -> None:
        if name.startswith("p-"):
            self._remove_process(name)
            return
        names = volumes.get(name)
        if names is None:
            return  # gone already: another removal or a store's scan was first
        lock = try_lock(f"{self.plan.path}/v-{name}.lock")
        if lock is NotTaken.MISSING and names.metadata_name is not None:
            self._keep(names, "it has no lock file, so nothing shows that it has no writer")
        elif lock is NotTaken.MISSING:
            self._remove_files(names, is_volume=False)
        elif isinstance(lock, NotTaken):
            is_held = lock is NotTaken.HELD
            self._keep(names, "a living process holds it now" if is_held else "its lock is no file of ours")
        else:
            names.has_lock = True
            try:
                self._remove_held(names, is_wanted=name in wanted)
            finally:
                lock.close()

    def _remove_held(self, names: VolumeNames, *, is_wanted: bool) -> None:
        """Remove what is to be removed under an id whose lock is ours."""
        if names.metadata_name is None:
            self._remove_files(names, is_volume=False)
        elif not is_wanted:
            beside = {file: names.files[file] for file in names.leftovers()}
            self._remove_files(replace(names, files=beside, has_lock=False, lmdb=[]), is_volume=False)
        else:
            selection = self.plan.selection
            report = report_volume(
                self.plan.path, names, Lock(False, ""), geometries={}, with_slots=selection.epoch_not is not None
            )
            why = selection.why_not(report, self.clock.wall_ns())
            if why:
                self._keep(names, f"no longer as planned: {why}")
            else:
                self._remove_files(names, is_volume=True, lmdb_bytes=report.lmdb_bytes)

    def _remove_files(self, names: VolumeNames, *, is_volume: bool, lmdb_bytes: int = 0) -> None:
        nbytes = names.total_bytes + lmdb_bytes
        gone = list(names.files) or [f"v-{names.volume_id}"]
        try:
            Scanner(self.plan.path, _core.VolumeHeader.decode, Sweep()).remove_volume_or_raise(names)
        except OSError as error:
            self.failed.append(f"{self.plan.path}: volume {names.volume_id} is not wholly removed: {error.strerror}")
            return
        self.nbytes += nbytes
        if is_volume:
            self.volumes.append(names.volume_id)
        else:
            self.leftovers.extend(gone)

    def _remove_process(self, stem: str) -> None:
        path = self.plan.path
        lock = try_lock(f"{path}/{stem}.lock")
        if lock in (NotTaken.HELD, NotTaken.ODD):
            return
        try:
            names = process_names(path, stem[2:])
            nbytes = sum(_core.file_stat(f"{path}/{name}").size for name in names)
            remove_files(path, names)
        except OSError as error:
            self.failed.append(f"{path}: {stem} is not removed: {explain(error, stem)}")
        else:
            self.leftovers.extend(names)
            self.nbytes += nbytes
        finally:
            if not isinstance(lock, NotTaken):
                lock.close()

    def _keep(self, names: VolumeNames, why: str) -> None:
        self.kept.append(Kept(names.volume_id, names.total_bytes, why))
