"""Say what tier directories hold, live or dead: as a reader that harms nobody.

    inspect_directory   processes, volumes, leftovers, strangers: numbers
    read_pages          each page by its record
    page_chains         those pages as prefix trees

Nothing is written, mapped or trusted, and no lock of a living process taken (tiers/reader.py). What is wrong with a
volume is a sentence in its report, never an exception. Whether the bytes of pages are right is `verification`'s
business, removing `removal`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stepwell import _core
from stepwell.errors import StepwellError, StepwellUsageError, VolumeError
from stepwell.geometry import PageGeometry
from stepwell.tiers.directory import boot_id
from stepwell.tiers.entry import check_directory
from stepwell.tiers.locks import is_ours
from stepwell.tiers.process_file import ProcessRecord
from stepwell.tiers.reader import (
    LOCK_SECONDS,
    Condition,
    Lock,
    NotReadableError,
    Records,
    Slots,
    View,
    count_slots,
    explain,
    look,
    open_volume,
    read_records,
)
from stepwell.tiers.scan import read_process
from stepwell.tiers.volume_files import Listing, VolumeNames, list_directory

__all__ = [
    "Chain",
    "DirectoryReport",
    "Header",
    "Leftover",
    "Lock",
    "ModelTotal",
    "Page",
    "ProcessReport",
    "Slots",
    "Stranger",
    "VolumeReport",
    "inspect_directory",
    "page_chains",
    "read_pages",
]

UNKNOWN_DEPTH: Final = 2**32 - 1


# ---- what is found ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process file. What it says is None where the file is damaged, missing or of another format."""

    process_id: str
    lock: Lock
    pid: int | None = None
    is_this_boot: bool | None = None
    capacity_bytes: int | None = None
    floor_bytes: int | None = None
    held_bytes: int | None = None
    want_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """A volume's header, FORMAT.md 2.1. model, page_tokens: of the known geometry with this fingerprint."""

    fingerprint: str
    kind: int
    medium: Literal["shared", "disk"]
    slots: int
    layers: int
    page_bytes: int
    slot_bytes: int
    alignment: int
    boot_id: str
    is_this_boot: bool
    birth_ns: int
    epoch: int
    format_version: int = 1
    model: str | None = None
    page_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class VolumeReport:
    """A volume: its files, who writes it, what it holds. header, slots: None unless it is readable.

    written_ns: when its files were last written, as the file system says; stores through a mapping leave no time.
    """

    volume_id: str
    files: tuple[str, ...]
    nbytes: int
    lmdb_bytes: int
    lock: Lock
    condition: Condition
    why: str
    written_ns: int
    header: Header | None = None
    slots: Slots | None = None

    @property
    def age_since_ns(self) -> int:
        """The last moment at which it is known to have been in use: its birth, or a later write."""
        return max(self.written_ns, self.header.birth_ns if self.header is not None else 0)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files of no volume: being born or removed by a living process, or left by a dead one."""

    names: tuple[str, ...]
    nbytes: int
    what: str
    is_dead: bool


@dataclass(frozen=True, slots=True)
class Stranger:
    """A name that is not ours to read or remove, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelTotal:
    """What all readable volumes of one fingerprint hold. tokens: None where its geometry is not known."""

    fingerprint: str
    model: str | None
    volumes: int
    pages: int
    page_bytes: int
    tokens: int | None


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """A tier directory as it was found. error: why nothing else is known; "" where it could be read."""

    path: str
    error: str = ""
    media: tuple[str, ...] = ()
    total_bytes: int = 0
    lmdb_bytes: int = 0
    processes: tuple[ProcessReport, ...] = ()
    volumes: tuple[VolumeReport, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    models: tuple[ModelTotal, ...] = ()
    note: str = ""

    @property
    def is_well(self) -> bool:
        """Whether all that is here can be read: a volume of another format version is no fault."""
        wrong = ("damaged", "unreadable")
        return not self.error and not any(
            volume.condition in wrong or (volume.slots is not None and volume.slots.damaged > 0)
            for volume in self.volumes
        )

    @property
    def budget_bytes(self) -> int | None:
        """The least capacity among living processes: what the directory is kept below. None: no process."""
        capacities = [p.capacity_bytes for p in self.processes if p.lock.is_held and p.capacity_bytes is not None]
        return min(capacities, default=None)


@dataclass(frozen=True, slots=True)
class Page:
    """A page by its record. parent, depth: None where they are not known; parent "": the first of its chain."""

    volume_id: str
    fingerprint: str
    slot: int
    key: str
    parent: str | None
    depth: int | None
    epoch: int
    kind: int
    stamp: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Pages of which each but the last has one child, the next: an edge of a prefix tree.

    level: how many branchings are above it. start: "root", "lost parent" (its parent is not here), "unknown parent",
    "branch" (its parent is the last page of the chain above it that is one level up), or "circle" (forged: from no page
    of it a way leads to a root).
    """

    level: int
    start: str
    first_key: str
    last_key: str
    pages: int
    depth: int | None
    fingerprint: str
    epoch: int


# ---- looking ---------------------------------------------------------------------------------------------------------


def inspect_directory(
    path: str, *, geometries: Iterable[PageGeometry] = (), lock_seconds: float = LOCK_SECONDS
) -> DirectoryReport:
    """Look at a tier directory.

    Args:
        path: the directory.
        geometries: those whose names and tokens are to be told: a header has only the fingerprint.
        lock_seconds: how long the directory lock is waited for; without it, a writer that another pid namespace hides
            is not seen, and the report says so.

    Returns:
        The report; one with `error` where the directory is none, or cannot be looked at.

    Cost: 192 bytes of records are read for each slot; 100,000 take well under a second.
    """
    known = by_fingerprint(geometries)
    try:
        view = look(path, lock_seconds=lock_seconds)
    except (StepwellError, OSError) as error:
        return DirectoryReport(path=path, error=explain(error, path))
    volumes = tuple(
        report_volume(path, names, view.volume_locks[names.volume_id], geometries=known)
        for names in view.listing.volumes.values()
        if names.metadata_name is not None
    )
    media = {("shared" if name.endswith(".vol") else "disk") for v in volumes for name in v.files}
    return DirectoryReport(
        path=path,
        media=tuple(sorted(media)),
        total_bytes=view.listing.total_bytes,
        lmdb_bytes=sum(_lmdb_bytes(path, names) for names in view.listing.volumes.values()),
        processes=tuple(_report_process(path, pid, view.process_locks[pid]) for pid in view.listing.processes),
        volumes=tuple(sorted(volumes, key=lambda v: (v.header.birth_ns if v.header else 0, v.volume_id))),
        leftovers=tuple(_leftovers(path, view)),
        strangers=tuple(_strangers(path, view.listing)),
        models=tuple(_totals(volumes)),
        note=view.note,
    )


def by_fingerprint(geometries: Iterable[PageGeometry]) -> dict[str, PageGeometry]:
    """Return geometries by what headers know of them."""
    return {geometry.fingerprint().hex(): geometry for geometry in geometries}


# ---- one volume ------------------------------------------------------------------------------------------------------


def report_volume(
    path: str, names: VolumeNames, lock: Lock, *, geometries: Mapping[str, PageGeometry], with_slots: bool = True
) -> VolumeReport:
    """Report a volume that has a metadata file, whatever is in it. with_slots: read its records too."""
    files = tuple(name for name in (names.metadata_name, names.pages_name) if name is not None)
    condition: Condition = "readable"
    header, slots, why = None, None, ""
    try:
        found, reader = open_volume(path, names)
        header = _report_header(found, geometries)
        if with_slots:
            slots = count_slots(reader)
        del reader  # and its descriptors
    except NotReadableError as error:
        condition, header, why = error.condition, None, str(error)
    return VolumeReport(
        volume_id=names.volume_id,
        files=files,
        nbytes=sum(names.files[name] for name in files),
        lmdb_bytes=_lmdb_bytes(path, names),
        lock=lock,
        condition=condition,
        why=why,
        written_ns=max((_written_ns(f"{path}/{name}") for name in files), default=0),
        header=header,
        slots=slots,
    )


def _report_header(header: _core.VolumeHeader, geometries: Mapping[str, PageGeometry]) -> Header:
    geometry = geometries.get(header.fingerprint.hex())
    return Header(
        fingerprint=header.fingerprint.hex(),
        kind=header.kind,
        medium="shared" if header.medium == 1 else "disk",
        slots=header.slots,
        layers=header.layers,
        page_bytes=header.page_bytes,
        slot_bytes=header.slot_bytes,
        alignment=header.alignment,
        boot_id=header.boot_id.hex(),
        is_this_boot=header.boot_id == boot_id(),
        birth_ns=header.birth_ns,
        epoch=header.epoch,
        model=None if geometry is None else f"{geometry.model} {geometry.revision}",
        page_tokens=None if geometry is None else geometry.page_tokens,
    )


def _written_ns(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def _lmdb_bytes(path: str, names: VolumeNames) -> int:
    """Return the sizes of LMDB environments by their files: opened they are never, a damaged one kills who opens it."""
    total = 0
    for name in names.lmdb:
        try:
            with os.scandir(f"{path}/{name}") as entries:
                total += sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        except OSError:
            continue
    return total


# ---- what is beside volumes ------------------------------------------------------------------------------------------


def _report_process(path: str, process_id: str, lock: Lock) -> ProcessReport:
    record: ProcessRecord | None = read_process(f"{path}/p-{process_id}.proc")
    if record is None or record.process_id.hex() != process_id:
        return ProcessReport(process_id, lock)
    return ProcessReport(
        process_id,
        lock,
        pid=record.pid,
        is_this_boot=record.boot_id == boot_id(),
        capacity_bytes=record.capacity_bytes,
        floor_bytes=record.floor_bytes,
        held_bytes=record.held_bytes,
        want_bytes=record.want_bytes,
    )


def _leftovers(path: str, view: View) -> Iterator[Leftover]:
    for names in view.listing.volumes.values():
        lock = view.volume_locks[names.volume_id]
        files = names.leftovers() if names.metadata_name else list(names.files)
        lone = [*names.lmdb, *([f"v-{names.volume_id}.lock"] if names.has_lock else [])]
        listed = tuple(files) if names.metadata_name else (*files, *lone)
        if not listed:
            continue
        if lock.is_held:
            what = "a volume that a living process is making or removing"
        elif names.metadata_name:
            what = "temporary files beside a volume"
        elif any(name.startswith("x-") for name in files):
            what = "a volume half removed"
        elif files:
            what = "a volume half born"
        else:
            what = "a lock or an LMDB environment without its volume"
        # Without a lock file nobody gives birth to them or removes them: any scan sweeps them away.
        is_lockless = not names.has_lock and not names.metadata_name and not view.note
        is_dead = lock.is_held is False or is_lockless
        yield Leftover(listed, sum(names.files[name] for name in files), what, is_dead)
    for process_id in view.listing.processes:
        lock = view.process_locks[process_id]
        present = process_names(path, process_id)
        if present and not lock.is_held:
            is_dead = lock.is_held is False or f"p-{process_id}.lock" not in present
            nbytes = sum(_size(f"{path}/{name}") for name in present)
            yield Leftover(present, nbytes, "the process file of a dead process", is_dead and not view.note)


def _strangers(path: str, listing: Listing) -> Iterator[Stranger]:
    locks = [f"v-{names.volume_id}.lock" for names in listing.volumes.values() if names.has_lock]
    processes = [f"p-{process_id}.{end}" for process_id in listing.processes for end in ("lock", "proc")]
    odd = [name for name in (*locks, *processes) if _is_odd(f"{path}/{name}")]
    for name in sorted([*listing.odd, *odd]):
        yield Stranger(name, _oddity(f"{path}/{name}"))
    for name in sorted(listing.strangers):
        yield Stranger(name, "no name of stepwell's")


def _oddity(path: str) -> str:
    try:
        status = _core.file_stat(path)
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if status.is_symlink:
        return "it is a symbolic link"
    if not status.is_regular:
        return "it is no regular file"
    if status.uid != os.geteuid():
        return f"it belongs to user {status.uid}"
    return "it has more than one name" if not is_ours(status) else "it was another file a moment ago"


def process_names(path: str, process_id: str) -> tuple[str, ...]:
    """Return the names of a process file that are there and are files of ours."""
    names = (f"p-{process_id}.proc", f"p-{process_id}.lock")
    return tuple(name for name in names if _is_ours_there(f"{path}/{name}"))


def _is_ours_there(path: str) -> bool:
    try:
        return is_ours(_core.file_stat(path))
    except OSError:
        return False


def _is_odd(path: str) -> bool:
    try:
        return not is_ours(_core.file_stat(path))
    except OSError:
        return False


def _size(path: str) -> int:
    try:
        return _core.file_stat(path).size
    except OSError:
        return 0


def _totals(volumes: Sequence[VolumeReport]) -> Iterator[ModelTotal]:
    readable: dict[str, list[tuple[Header, Slots]]] = {}
    for volume in volumes:
        if volume.header is not None and volume.slots is not None:
            readable.setdefault(volume.header.fingerprint, []).append((volume.header, volume.slots))
    for fingerprint, found in sorted(readable.items()):
        header = found[0][0]
        pages = sum(slots.resident for _, slots in found)
        yield ModelTotal(
            fingerprint=fingerprint,
            model=header.model,
            volumes=len(found),
            pages=pages,
            page_bytes=sum(slots.resident * header.page_bytes for header, slots in found),
            tokens=None if header.page_tokens is None else pages * header.page_tokens,
        )


# ---- pages -----------------------------------------------------------------------------------------------------------


def read_pages(path: str, *, volume_id: str | None = None) -> Iterator[Page]:
    """Read the records of all pages of a directory's readable volumes, or of one of them, slot by slot.

    Raises:
        VolumeError: it is no tier directory, or one that a store would refuse.
        StepwellUsageError: it has no such volume.
    """
    for names in _volumes_of(path, volume_id):
        try:
            header, reader = open_volume(path, names)
            for records in read_records(reader):
                yield from _pages_of(names.volume_id, header, records)
        except NotReadableError:
            continue  # inspect_directory says why


def _volumes_of(path: str, volume_id: str | None) -> list[VolumeNames]:
    try:
        check_directory(path)
        listing = list_directory(path)
    except OSError as error:
        raise VolumeError(explain(error, path)) from error
    volumes = [names for names in listing.volumes.values() if names.metadata_name is not None]
    if volume_id is None:
        return volumes
    chosen = [names for names in volumes if names.volume_id == volume_id]
    if not chosen:
        raise StepwellUsageError(f"{path} has no volume {volume_id}; `stepwell inspect` lists them")
    return chosen


def _pages_of(volume_id: str, header: _core.VolumeHeader, records: Records) -> Iterator[Page]:
    fingerprint, nbytes = header.fingerprint.hex(), header.page_bytes
    keys, parents = records.keys.tobytes().hex(), records.parents.tobytes().hex()
    rows = zip(
        records.slots.tolist(),
        records.key_lengths.tolist(),
        records.parent_lengths.tolist(),
        records.parent_states.tolist(),
        records.depths.tolist(),
        records.epochs.tolist(),
        records.kinds.tolist(),
        records.stamps.tolist(),
        strict=True,
    )
    for row, (slot, key_length, parent_length, state, depth, epoch, kind, stamp) in enumerate(rows):
        at = 128 * row  # hexadecimal digits of 64 bytes
        yield Page(
            volume_id=volume_id,
            fingerprint=fingerprint,
            slot=slot,
            key=keys[at : at + 2 * key_length],
            parent=None if state == 2 else parents[at : at + 2 * parent_length],
            depth=None if depth == UNKNOWN_DEPTH else depth,
            epoch=epoch,
            kind=kind,
            stamp=stamp,
            nbytes=nbytes,
        )


def page_chains(pages: Iterable[Page]) -> Iterator[Chain]:
    """Arrange pages as prefix trees, a line for each unbranched run, parents before children.

    A page that lies in several volumes counts once. Pages of different fingerprints, kinds or epochs share no tree.
    """
    trees: dict[tuple[str, int, int], dict[str, Page]] = {}
    for page in pages:
        trees.setdefault((page.fingerprint, page.kind, page.epoch), {}).setdefault(page.key, page)
    for tree in trees.values():
        yield from _tree_chains(tree)


def _tree_chains(tree: dict[str, Page]) -> Iterator[Chain]:
    children: dict[str, list[str]] = {}
    starts: list[tuple[str, str]] = []
    for key, page in tree.items():
        if page.parent is None:
            starts.append((key, "unknown parent"))
        elif page.parent == "":
            starts.append((key, "root"))
        elif page.parent in tree:
            children.setdefault(page.parent, []).append(key)
        else:
            starts.append((key, "lost parent"))
    left = set(tree)
    yield from _runs(tree, children, left, starts)
    for key in tree:  # what has no way to a start
        if key in left:
            yield from _runs(tree, children, left, [(key, "circle")])


def _runs(
    tree: dict[str, Page], children: dict[str, list[str]], left: set[str], starts: list[tuple[str, str]]
) -> Iterator[Chain]:
    """Walk down from some starts, and take what is met off `left`."""
    stack = [(key, start, 0) for key, start in reversed(starts)]
    while stack:
        key, start, level = stack.pop()
        if key not in left:
            continue
        left.remove(key)
        last, count = key, 1
        below = children.get(last, [])
        while len(below) == 1 and below[0] in left:
            last, count = below[0], count + 1
            left.remove(last)
            below = children.get(last, [])
        page = tree[key]
        yield Chain(level, start, key, last, count, page.depth, page.fingerprint, page.epoch)
        stack.extend((child, "branch", level + 1) for child in reversed(below) if child in left)
