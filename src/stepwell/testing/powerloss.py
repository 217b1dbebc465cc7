"""Replay what a power loss may leave of recorded file-layer calls. For tests.

    with record() as log: work                    every call that changes a file or a name, in order
    disk = Disk(base); disk.apply(call) ...       what is durable for certain after a prefix of them, and what may be
    disk.crash(random, Loss.SECTORS) -> Wreck     one of the states that may be found; .write(directory) makes it real

What the model grants and what it does not:
    a sync of a file makes its bytes and its size durable, nothing else: not its name
    a sync of a directory makes the names in it durable; until then a leading part of their changes may be there
    until the next sync each sector of 512 bytes may be as it was, or as any write since has left it, whatever became
    of the sectors beside it: so writes are dropped, torn and reordered
Stores through a mapping are not in the log: shared memory is gone with the machine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

from stepwell import _core

SECTOR = 512


class Kind(IntEnum):
    """What a call changed (csrc/recorder.h)."""

    CREATE = 0
    WRITE = 1
    RESIZE = 2
    SYNC = 3
    SYNC_DIRECTORY = 4
    RENAME = 5
    UNLINK = 6
    MAKE_DIRECTORY = 7
    REMOVE_DIRECTORY = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One call. file: what it is made on, whatever names that has. offset: of a write; the new size of a resize."""

    kind: Kind
    file: tuple[int, int] = (0, 0)
    path: str = ""
    target: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(slots=True)
class Recording:
    """The calls, in the order in which they took effect; complete once the `with` block of `record` is left."""

    calls: list[Call] = field(default_factory=list)

    @property
    def position(self) -> int:
        """How many calls have been recorded so far."""
        return _core.record_count()


@contextmanager
def record() -> Iterator[Recording]:
    """Record the calls of this process inside the `with` block. One at a time; calls are made one after the other."""
    recording = Recording()
    _core.record_start()
    try:
        yield recording
    finally:
        recording.calls += [
            Call(Kind(call.kind), call.file, call.path, call.target, call.offset, call.data)
            for call in _core.record_stop()
        ]


class Loss(Enum):
    """How much of what is not durable is lost.

    ALL: all of it. NONE: nothing, as where only the process dies. FILES: of each file and directory all or nothing.
    SECTORS: each sector and each name by itself.
    """

    ALL = "all"
    NONE = "none"
    FILES = "files"
    SECTORS = "sectors"


class _File:
    """A file: what is durable of it, and for each sector that was written since, the contents it went through."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.sectors: dict[int, list[bytes]] = {}
        self.sizes: list[int] = []

    def _sector(self, number: int) -> bytes:
        if number in self.sectors:
            return self.sectors[number][-1]
        return bytes(self.durable[number * SECTOR : (number + 1) * SECTOR]).ljust(SECTOR, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            number, start = divmod(offset + done, SECTOR)
            piece = data[done : done + SECTOR - start]
            old = self._sector(number)
            new = old[:start] + piece + old[start + len(piece) :]
            self.sectors.setdefault(number, []).append(new)
            done += len(piece)
        if offset + len(data) > self.size:
            self.sizes.append(offset + len(data))

    @property
    def size(self) -> int:
        return self.sizes[-1] if self.sizes else len(self.durable)

    def resize(self, size: int) -> None:
        if size < self.size:  # what is cut off reads as zeros if the file grows again
            self.write(size, bytes(self.size - size))
        self.sizes.append(size)

    def sync(self) -> None:
        self.durable = self.content({number: versions[-1] for number, versions in self.sectors.items()}, self.size)
        self.sectors.clear()
        self.sizes.clear()

    def content(self, chosen: dict[int, bytes], size: int) -> bytearray:
        data = bytearray(self.durable[:size]).ljust(size, b"\0")
        for number, sector in chosen.items():
            start = number * SECTOR
            if start < size:
                data[start : start + SECTOR] = sector[: size - start]
        return data

    def crash(self, chance: random.Random, loss: Loss) -> bytes:
        if loss is Loss.FILES:
            loss = chance.choice((Loss.ALL, Loss.NONE))
        if loss is Loss.ALL:
            return bytes(self.durable)
        if loss is Loss.NONE:
            return bytes(
                self.content({number: versions[-1] for number, versions in self.sectors.items()}, self.size)
            )
        kept = chance.choice((0.1, 0.5, 0.9))
        chosen = {
            number: versions[-1] if len(versions) == 1 else chance.choice(versions)
            for number, versions in self.sectors.items()
            if chance.random() < kept
        }
        sizes = [len(self.durable), *self.sizes]
        return bytes(self.content(chosen, chance.choice(sizes)))


class _Directory:
    """A directory: its durable names, and the changes since, each of which comes whole."""

    def __init__(self) -> None:
        self.durable: dict[str, _File | _Directory] = {}
        self.names: dict[str, _File | _Directory] = {}
        self._changes: list[dict[str, _File | _Directory | None]] = []

    def change(self, change: dict[str, _File | _Directory | None]) -> None:
        self._changes.append(change)
        _apply(self.names, change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self._changes.clear()

    def crash(self, chance: random.Random, loss: Loss) -> dict[str, _File | _Directory]:
        names = dict(self.durable)
        most = len(self._changes)
        kept = {Loss.ALL: 0, Loss.NONE: most}.get(loss)
        for change in self._changes[: chance.randint(0, most) if kept is None else kept]:
            _apply(names, change)
        return names


def _apply(names: dict[str, _File | _Directory], change: dict[str, _File | _Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass(slots=True)
class Wreck:
    """A state that a power loss may leave: files by path below the base, and directories."""

    files: dict[str, bytes] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)

    def write(self, target: Path) -> None:
        """Make it real below `target`, which is there and empty."""
        for name in self.directories:
            (target / name).mkdir(mode=0o700)
        for name, data in self.files.items():
            fd = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)


class Disk:
    """What lies below a directory, as a power loss would find it.

    Invariant: between two calls of `apply` the state is that after a prefix of the calls. What they did elsewhere, and
    to files that were there before, is not looked at.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        self._base = os.fspath(base)
        self._root = _Directory()
        self._files: dict[tuple[int, int], _File] = {}

    def apply(self, call: Call) -> None:
        """Carry out one more call."""
        match call.kind:
            case Kind.WRITE | Kind.RESIZE | Kind.SYNC:
                file = self._files.get(call.file)
                if file is None:
                    return
                if call.kind is Kind.WRITE:
                    file.write(call.offset, call.data)
                elif call.kind is Kind.RESIZE:
                    file.resize(call.offset)
                else:
                    file.sync()
            case Kind.SYNC_DIRECTORY:
                found = self._root if call.path == self._base else self._node(call.path)
                if isinstance(found, _Directory):
                    found.sync()
            case _:
                self._rename(call)

    def _rename(self, call: Call) -> None:
        directory, name = self._place(call.path)
        if directory is None:
            return
        match call.kind:
            case Kind.CREATE:
                self._files[call.file] = made = _File()
                directory.change({name: made})
            case Kind.MAKE_DIRECTORY:
                directory.change({name: _Directory()})
            case Kind.RENAME:
                target, new = self._place(call.target)
                node = directory.names.get(name)
                if node is not None and target is directory:
                    directory.change({name: None, new: node})
            case _:
                if name in directory.names:
                    directory.change({name: None})

    def _node(self, path: str) -> _File | _Directory | None:
        directory, name = self._place(path)
        return None if directory is None else directory.names.get(name)

    def _place(self, path: str) -> tuple[_Directory | None, str]:
        """Return the directory that a path is in, and its name there; None: it is not below the base."""
        parts = os.path.relpath(path, self._base).split(os.sep)
        directory = self._root
        for part in parts[:-1]:
            inner = directory.names.get(part)
            if not isinstance(inner, _Directory):
                return None, ""
            directory = inner
        return directory, parts[-1]

    def crash(self, chance: random.Random, loss: Loss) -> Wreck:
        """Choose one of the states that a power loss may leave now."""
        wreck = Wreck()
        self._crash_into(wreck, self._root, "", chance, loss)
        return wreck

    def _crash_into(self, wreck: Wreck, directory: _Directory, path: str, chance: random.Random, loss: Loss) -> None:
        for name, node in sorted(directory.crash(chance, loss).items()):
            if isinstance(node, _File):
                wreck.files[path + name] = node.crash(chance, loss)
            else:
                wreck.directories.append(path + name)
                self._crash_into(wreck, node, f"{path}{name}/", chance, loss)
