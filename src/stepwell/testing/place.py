"""Have a directory for a tier under test: crash what is in it, damage it, take it away again. For tests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


class Place:
    """A directory that a tier is made in, and made in again.

    Invariant: `directory` is the same path from construction to remove(); everything lies in a temporary directory of
    its own. A context manager: remove().
    Threads: one, and nobody writes to the directory meanwhile.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Args: parent: where the temporary directory is made; None: where the system has them."""
        self._root = Path(tempfile.mkdtemp(prefix="stepwell-tier-", dir=parent))
        self.directory = self._root / "tier"
        self.directory.mkdir(mode=0o700)
        self._kept = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def keep(self) -> Path:
        """Copy what a crash at this instant would leave: files as every process sees them, locks of nobody."""
        self._kept += 1
        copy = self._root / f"kept-{self._kept}"
        shutil.copytree(self.directory, copy, symlinks=True)
        return copy

    def go_back(self, kept: Path) -> None:
        """Have the directory be what keep() kept, whatever became of it since. Requires: its tier is closed."""
        shutil.rmtree(self.directory)
        kept.rename(self.directory)

    def remove(self) -> None:
        """Remove it all. Idempotent."""
        shutil.rmtree(self._root, ignore_errors=True)

    def damage(self, page: bytes, *, at: int) -> bool:
        """Flip one bit of a page wherever its bytes lie in files.

        Returns:
            Whether they were found: a tier may hold them elsewhere, or pack them.
        """
        changed = bytearray(page)
        changed[at] ^= 0x10
        return self.replace(page, bytes(changed))

    def exchange(self, first: bytes, second: bytes) -> bool:
        """Let two pages of one length change places in the files. Returns whether both were found."""
        if not (self.find(first) and self.find(second)):
            return False
        places = self.find(first)
        self.replace(second, first)
        for path, offset in places:
            _overwrite(path, offset, second)
        return True

    def cut(self, page: bytes) -> bool:
        """Cut every file short in the middle of a page that it holds. Returns whether there was one."""
        places = self.find(page)
        for path, offset in places:
            with path.open("r+b") as file:
                file.truncate(offset + len(page) // 2)
        return bool(places)

    def replace(self, page: bytes, by: bytes) -> bool:
        """Write other bytes over a page wherever it lies. Returns whether it was found."""
        places = self.find(page)
        for path, offset in places:
            _overwrite(path, offset, by)
        return bool(places)

    def find(self, page: bytes) -> list[tuple[Path, int]]:
        """Return where a page lies: in which files, from which byte on."""
        files = [path for path in sorted(self.directory.rglob("*")) if path.is_file() and not path.is_symlink()]
        found = ((path, path.read_bytes().find(page)) for path in files)
        return [(path, offset) for path, offset in found if offset >= 0]


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
