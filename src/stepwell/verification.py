"""Read every page of a tier directory's volumes, live or dead, and compare it with its checksums (FORMAT.md 4).

A page is damaged only if its generation stood still while it was read; one that a living writer changes is tried again.
Nothing is written, mapped or trusted, and no lock of a living process taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from stepwell import _core
from stepwell.clock import SystemClock
from stepwell.errors import VolumeError
from stepwell.geometry import PageGeometry
from stepwell.inspection import by_fingerprint
from stepwell.tiers.reader import (
    LOCK_SECONDS,
    RECORDS_AT_ONCE,
    Condition,
    Lock,
    NotReadableError,
    explain,
    look,
    open_volume,
    read_records,
)
from stepwell.tiers.volume_files import VolumeNames

__all__ = ["DamagedPage", "VolumeCheck", "verify_directory"]

CHECK_BYTES: Final = 32 << 20  # of pages checked between two looks at the terminal

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class DamagedPage:
    """A page with a wrong checksum whose generation stood still. key: "" where its record is damaged."""

    slot: int
    key: str
    what: str


@dataclass(frozen=True, slots=True)
class VolumeCheck:
    """What reading all pages of a volume found. read_bytes: of pages whose bytes were read to their end.

    changed: freed or rewritten while they were read, by a living writer. unreadable: a system call failed, or nothing
    says where their layers end. why: as in VolumeReport, for a volume of which nothing was read.
    """

    volume_id: str
    lock: Lock
    condition: Condition
    why: str
    right: int = 0
    changed: int = 0
    unreadable: int = 0
    damaged: tuple[DamagedPage, ...] = ()
    read_bytes: int = 0
    seconds: float = 0.0
    layer_bytes: tuple[int, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether nothing in it is damaged or unreadable; a volume that is of another format, or gone, is well."""
        return not self.damaged and self.unreadable == 0 and self.condition not in ("damaged", "unreadable")


def verify_directory(
    path: str,
    *,
    geometries: Iterable[PageGeometry] = (),
    progress: Progress | None = None,
    lock_seconds: float = LOCK_SECONDS,
) -> Iterator[VolumeCheck]:
    """Read every page of every readable volume and compare it with its checksums (FORMAT.md 4).

    A page is damaged only if its generation stood still meanwhile; one that a living writer changes is tried again.

    Args:
        path: the directory.
        geometries: those whose layers are known; others are found from the pages.
        progress: called with slots done and slots in all, after each piece of work.
        lock_seconds: as in inspect_directory.

    Yields:
        A check for each volume, as it is done.

    Raises:
        VolumeError: it is no tier directory, or one that a store would refuse; nothing was read.
    """
    known = by_fingerprint(geometries)
    try:
        view = look(path, lock_seconds=lock_seconds)
    except OSError as error:
        raise VolumeError(explain(error, path)) from error
    volumes = [names for names in view.listing.volumes.values() if names.metadata_name is not None]
    bar = _Bar(progress)
    for names in volumes:
        with suppress(NotReadableError):
            bar.total += open_volume(path, names)[0].slots
    for names in volumes:
        yield _check_volume(path, names, view.volume_locks[names.volume_id], known, bar)


@dataclass(slots=True)
class _Bar:
    report: Progress | None
    done: int = 0
    total: int = 0

    def advance(self, slots: int) -> None:
        self.done += slots
        if self.report is not None:
            self.report(self.done, max(self.total, self.done))


def _check_volume(
    path: str, names: VolumeNames, lock: Lock, geometries: Mapping[str, PageGeometry], bar: _Bar
) -> VolumeCheck:
    clock = SystemClock()
    began = clock.monotonic()
    tally = _Tally()
    condition: Condition = "readable"
    why = ""
    layer_bytes: tuple[int, ...] = ()
    try:
        header, reader = open_volume(path, names, direct=True)
        geometry = geometries.get(header.fingerprint.hex())
        if geometry is not None:
            with suppress(ValueError):  # a forged header: then its layers are found as any other's
                reader.use_layers(list(geometry.layer_bytes))
        for first, records in enumerate(read_records(reader)):
            keys = {int(slot): row for row, slot in enumerate(records.slots)}
            slots = np.sort(np.concatenate([records.slots, records.damaged]))
            piece = max(1, min(4096, CHECK_BYTES // header.page_bytes))
            here = min(RECORDS_AT_ONCE, header.slots - first * RECORDS_AT_ONCE)
            bar.advance(here - slots.size)
            for at in range(0, slots.size, piece):
                some = slots[at : at + piece]
                for slot, check in zip(some.tolist(), reader.check_pages(some), strict=True):
                    tally.add(slot, records.key(keys[slot]) if slot in keys else "", check, header.page_bytes)
                bar.advance(some.size)
        tally.settle(reader)
        layer_bytes = tuple(reader.layer_bytes)
    except NotReadableError as error:
        condition, why = error.condition, str(error)
    return VolumeCheck(
        volume_id=names.volume_id,
        lock=lock,
        condition=condition,
        why=why,
        right=tally.right,
        changed=tally.changed,
        unreadable=tally.unreadable,
        damaged=tuple(sorted(tally.damaged, key=lambda page: page.slot)),
        read_bytes=tally.read_bytes,
        seconds=clock.monotonic() - began,
        layer_bytes=layer_bytes,
    )


@dataclass(slots=True)
class _Tally:
    right: int = 0
    changed: int = 0
    unreadable: int = 0
    read_bytes: int = 0
    damaged: list[DamagedPage] = field(default_factory=list)
    unsettled: list[tuple[int, str]] = field(default_factory=list)  # judged before it was known where layers end

    def add(self, slot: int, key: str, check: _core.PageCheck, page_bytes: int) -> None:
        match check.verdict:
            case _core.PageVerdict.right:
                self.right += 1
                self.read_bytes += page_bytes
            case _core.PageVerdict.changed:
                self.changed += 1
            case _core.PageVerdict.unreadable:
                self.unreadable += 1
            case _core.PageVerdict.damaged if check.damage != _core.PageDamage.layers or check.layers:
                self.read_bytes += page_bytes if check.layers else 0
                self.damaged.append(DamagedPage(slot, key, _damage(check)))
            case _:
                self.unsettled.append((slot, key))

    def settle(self, reader: _core.VolumeReader) -> None:
        """Look again at what was judged too early."""
        again, self.unsettled = self.unsettled, []
        page_bytes = reader.page_bytes
        for slot, key in again:
            check = reader.check_pages(np.array([slot], np.uint32))[0]
            if check.verdict == _core.PageVerdict.no_layout:
                self.unreadable += 1
            elif check.verdict == _core.PageVerdict.damaged and not check.layers:
                self.damaged.append(DamagedPage(slot, key, "no layout of layers fits its checksums"))
            else:
                self.add(slot, key, check, page_bytes)


def _damage(check: _core.PageCheck) -> str:
    if check.damage == _core.PageDamage.record:
        return "its record"
    if check.damage == _core.PageDamage.checksums:
        return "its layer checksums"
    named = ", ".join(str(layer) for layer in check.layers[:8])
    more = f" and {len(check.layers) - 8} more" if len(check.layers) > 8 else ""
    return f"layer {named}{more}" if len(check.layers) == 1 else f"layers {named}{more}"
