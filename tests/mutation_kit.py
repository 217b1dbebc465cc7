"""Change the files of tier directories as anybody of the same user could, while stores serve from them.

    python tests/mutation_kit.py [--mutations N] [--seed N]     10,000 take some minutes

The verdict, after each batch of changes: both stores answer in time, none of their calls raises, what they deliver is
what was saved, their counts add up; after each round they close, leave nothing behind, and open again. Checksums of
other bytes are never forged (FORMAT.md 2.3: a forger of the same user is out of scope); all others are at times.
LMDB's files are changed while no store is open (a damaged one that is mapped may end a process).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from child_kit import Child
from stepwell import _core
from stepwell.tiers.volume_files import header_checksum
from store_kit import Directories

CHILD = Path(__file__).with_name("mutation_child.py")
INTERESTING = (
    *(0, 1, 2, 63, 64, 65, 4095, 4096, 2**16, 2**20, 2**24, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
# FORMAT.md 2.1, 2.2, 8: offset, bytes.
HEADER = (
    *((0, 8), (8, 4), (12, 4), (16, 8), (32, 8), (64, 1), (65, 1), (66, 2), (68, 4), (72, 4), (76, 4), (80, 8)),
    *((88, 8), (96, 8), (104, 8), (112, 8), (120, 8), (128, 8), (136, 8), (144, 8), (152, 8), (160, 8)),
    *((176, 8), (184, 8)),
)
RECORD = ((0, 8), (8, 8), (16, 1), (17, 1), (18, 1), (19, 1), (20, 4), (24, 4), (28, 4), (32, 8), (96, 8), (160, 8))
PROCESS = ((0, 8), (8, 4), (16, 8), (32, 8), (40, 8), (56, 8), (64, 8), (72, 8), (80, 8), (88, 8))


class Mutator:
    """Changes one thing at a time. Invariant: `heal` makes the directories such that a store can be opened on them."""

    def __init__(self, rng: random.Random, directories: Directories, aside: Path) -> None:
        self.rng = rng
        self.roots = [directories.shared, directories.disk]
        self.aside = aside  # on the same file system as neither: copies, not renames, go there
        self.only = ""  # an id: no other's names are touched
        self.locks: list[int] = []
        self.done: Counter[str] = Counter()
        self._kinds: list[tuple[int, Callable[[], str | None]]] = [
            (14, self.flip_bits),
            (14, self.change_record),
            (8, self.change_header),
            (6, self.change_process_file),
            (8, self.truncate),
            (4, self.grow),
            (6, self.replace),
            (3, self.remove),
            (3, self.swap),
            (3, self.link),
            (4, self.make_stranger),
            (4, self.make_volume),
            (4, self.change_mode),
            (4, self.hold_lock),
            (3, self.let_locks_go),
            (2, self.move_directory),
        ]

    def mutate(self) -> str:
        """Make one change and say which."""
        weights = [weight for weight, _ in self._kinds]
        while True:
            [(_, kind)] = self.rng.choices(self._kinds, weights)
            try:
                what = kind()
            except OSError:  # a store was faster, or it cannot be done
                continue
            if what is not None:
                self.done[what] += 1
                return what

    # ---- what there is ----------------------------------------------------------------------------------------------

    def _names(self, *suffixes: str) -> list[Path]:
        found = []
        for root in self.roots:
            with contextlib.suppress(OSError):
                found += [root / name for name in sorted(os.listdir(root)) if name.endswith(suffixes)]
        return [path for path in found if self.only in path.name]

    def _any(self, *suffixes: str) -> Path | None:
        names = self._names(*suffixes)
        return self.rng.choice(names) if names else None

    def _volume(self) -> Path | None:
        return self._any(".vol", ".meta")

    def _value(self, before: int, nbytes: int) -> bytes:
        roll = self.rng.random()
        if roll < 0.4:
            value = self.rng.choice(INTERESTING)
        elif roll < 0.7:
            value = before + self.rng.randrange(-3, 4)
        else:
            value = before ^ (1 << self.rng.randrange(8 * nbytes))
        return (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")

    def _change_field(self, data: bytearray, fields: Sequence[tuple[int, int]]) -> None:
        offset, nbytes = self.rng.choice(fields)
        before = int.from_bytes(data[offset : offset + nbytes], "little")
        data[offset : offset + nbytes] = self._value(before, nbytes)

    @staticmethod
    @contextlib.contextmanager
    def _opened(path: Path) -> Iterator[int]:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _arrays(self, fd: int) -> tuple[int, int, int, int, int, int, int]:
        """Return slots, layers, and the offsets of the arrays, as the header says; nonsense is bounded."""
        head = os.pread(fd, 160, 0).ljust(160, b"\0")
        slots, layers = struct.unpack_from("<II", head, 68)
        offsets = [min(offset, 1 << 30) for offset in struct.unpack_from("<QQQQQ", head, 104)]
        return (min(slots, 1 << 20) or 1, min(layers, 64) or 1, *offsets)  # type: ignore[return-value]

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def flip_bits(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".proc")
        if path is None:
            return None
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            # Most of a volume is pages: each kind of array has its share.
            slots, layers, records, checksums, recency, ring, _ = self._arrays(fd)
            arrays = [(records, 192 * slots), (checksums, 4 * layers * slots), (recency, 16 * slots), (ring, 1024)]
            first, end = self.rng.choice([(0, size), (0, 200), *arrays])
            for _ in range(self.rng.randrange(1, 4)):
                at = first + self.rng.randrange(max(1, end))
                byte = os.pread(fd, 1, at)
                if byte:
                    os.pwrite(fd, bytes([byte[0] ^ (1 << self.rng.randrange(8))]), at)
        return "bits flipped"

    def change_record(self) -> str | None:
        path = self._volume()
        if path is None:
            return None
        with self._opened(path) as fd:
            slots, _, records, *_ = self._arrays(fd)
            at = records + 192 * self.rng.randrange(slots)
            record = bytearray(os.pread(fd, 192, at))
            other = os.pread(fd, 192, records + 192 * self.rng.randrange(slots))
            if len(record) < 192 or len(other) < 192:
                return None
            match self.rng.randrange(4):
                case 0:  # another page's key, or the whole record
                    record[32:96] = other[32:96]
                    record[17] = other[17]
                case 1:  # another page as parent: rings
                    record[96:160] = other[32:96]
                    record[18:20] = bytes([other[17], 1])
                case 2:
                    record[:] = other
                case _:
                    self._change_field(record, RECORD)
            if self.rng.random() < 0.8:
                record[188:] = struct.pack("<I", _core.crc32c(bytes(record[:188])))
            os.pwrite(fd, record, at)
        return "record forged"

    def change_header(self) -> str | None:
        path = self._volume()
        if path is None:
            return None
        with self._opened(path) as fd:
            header = bytearray(os.pread(fd, 4096, 0))
            if len(header) < 4096:
                return None
            for _ in range(self.rng.randrange(1, 3)):
                self._change_field(header, HEADER)
            header[4092:] = struct.pack("<I", header_checksum(bytes(header)))
            os.pwrite(fd, header, 0)
        return "header forged"

    def change_process_file(self) -> str | None:
        path = self._any(".proc")
        if path is None:
            return None
        with self._opened(path) as fd:
            record = bytearray(os.pread(fd, 100, 0).ljust(100, b"\0"))
            self._change_field(record, PROCESS)
            record[96:] = struct.pack("<I", _core.crc32c(bytes(record[:96])))
            os.pwrite(fd, record, 0)
            counter = self._value(int.from_bytes(os.pread(fd, 8, 4096), "little"), 8)
            os.pwrite(fd, counter + self._value(1024, 4), 4096)
            os.pwrite(fd, self.rng.randbytes(64), 4160 + 32 * self.rng.randrange(64))
        return "process file forged"

    def truncate(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".proc", ".lock")
        if path is None:
            return None
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            os.ftruncate(fd, self.rng.choice([0, 4096, self.rng.randrange(size + 1)]))
            if self.rng.random() < 0.6:
                os.ftruncate(fd, size)  # as long as before, with a hole in it
        return "truncated"

    def grow(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".proc", ".lock")
        if path is None:
            return None
        with self._opened(path) as fd:
            size = os.fstat(fd).st_size
            os.ftruncate(fd, size + self.rng.choice([1, 4096, 1 << 20]))
            if self.rng.random() < 0.7:
                os.ftruncate(fd, size)
        return "grown"

    # ---- names ------------------------------------------------------------------------------------------------------

    def _put(self, path: Path) -> str:
        """Put something at a free name."""
        others = self._names(".vol", ".meta", ".pages", ".lock")
        plain, links = ["empty", "noise", "copy"], ["symlink", "dangling", "hard link"]
        what = self.rng.choice([*plain, "directory", "fifo", "socket", *links])
        match what:
            case "empty":
                path.touch(0o600)
            case "noise":
                path.write_bytes(self.rng.randbytes(self.rng.randrange(1, 8192)))
            case "copy" if others:
                shutil.copyfile(self.rng.choice(others), path, follow_symlinks=False)
            case "directory":
                path.mkdir(0o700)
                (path / "inside").touch()
            case "fifo":
                os.mkfifo(path, 0o600)
            case "socket":
                with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError):
                    end.bind(str(path))
            case "symlink" if others:
                path.symlink_to(self.rng.choice(others))
            case "hard link" if others:
                os.link(self.rng.choice(others), path, follow_symlinks=False)
            case _:
                path.symlink_to(self.aside / "nothing")
        return what

    def replace(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".proc", ".lock")
        if path is None:
            return None
        self._remove(path)
        return f"replaced by {self._put(path)}"

    def remove(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".proc", ".lock")
        if path is None:
            return None
        self._remove(path)
        return "removed"

    def swap(self) -> str | None:
        suffix = self.rng.choice([".vol", ".meta", ".pages", ".lock", ".proc"])
        names = self._names(suffix)
        if len(names) < 2:
            return None
        one, other = self.rng.sample(names, 2)
        if one.parent != other.parent:
            return None
        aside = one.with_name(f"aside-{self.rng.randbytes(8).hex()}")
        os.rename(one, aside)
        os.rename(other, one)
        os.rename(aside, other)
        return "swapped"

    def link(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".lock", ".proc")
        if path is None:
            return None
        os.link(path, path.with_name(f"link-{self.rng.randrange(1000)}"), follow_symlinks=False)
        return "second name"

    def make_stranger(self) -> str | None:
        root, number = self.rng.choice(self.roots), self.rng.randbytes(16).hex()
        name = self.rng.choice(
            [f"v-{number}.vol", f"v-{number}.meta", f"v-{number}.pages", f"t-{number}.vol", f"x-{number}.pages",
             f"v-{number}.lock", f"p-{number}.lock", f"p-{number}.proc", f"v-{number}.lmdb", f"v-{number}.lmdb-old",
             f"v-{number.upper()}.vol", "\x1b[31mred\n", "-rf", "v-.vol"]
        )  # fmt: skip
        if os.path.lexists(root / name):  # a fifo there would keep who writes to it waiting
            return None
        return f"stranger: {self._put(root / name)}"

    def make_volume(self) -> str | None:
        """A copy of a volume under an id of its own, its header right and not, without a holder."""
        path = self._volume()
        if path is None or path.is_symlink():
            return None
        number = self.rng.randbytes(16)
        copy = path.with_name(f"v-{number.hex()}{path.suffix}")
        if path.suffix == ".meta":
            pages = path.with_suffix(".pages")
            shutil.copyfile(pages, copy.with_suffix(".pages"), follow_symlinks=False)
        aside = copy.with_name(f"aside-{number.hex()}")  # a name that no fifo has
        shutil.copyfile(path, aside, follow_symlinks=False)
        header = bytearray(aside.read_bytes()[:4096])
        if len(header) == 4096:
            header[16:32] = number
            if self.rng.random() < 0.4:
                self._change_field(header, HEADER)
            header[4092:] = struct.pack("<I", header_checksum(bytes(header)))
            with open(aside, "r+b") as file:
                file.write(header)
        os.rename(aside, copy)
        return "volume of another"

    def change_mode(self) -> str | None:
        path = self._any(".vol", ".meta", ".pages", ".lock", ".proc")
        if path is None or path.is_symlink():
            return None
        if os.geteuid() == 0 and self.rng.random() < 0.5:
            os.chown(path, self.rng.choice([0, 65534]), -1, follow_symlinks=False)
            return "owner"
        os.chmod(path, self.rng.choice([0o000, 0o400, 0o666, 0o777, 0o4755]))
        return "mode"

    def hold_lock(self) -> str | None:
        path = self._any("v-", ".lock")
        if path is None or path.name == "directory.lock" or len(self.locks) > 3:
            return None
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self.locks.append(fd)
        return "lock held"

    def let_locks_go(self) -> str | None:
        if not self.locks:
            return None
        os.close(self.locks.pop())
        return "lock let go"

    def move_directory(self) -> str | None:
        """Take the directory itself away, or bring it back; sometimes another stands in its place meanwhile."""
        root = self.rng.choice(self.roots)
        away = root.with_name(f"away-{root.name}")
        if away.exists():
            self._bring_back(root)
            return "directory back"
        os.rename(root, away)
        match self.rng.randrange(4):
            case 0:
                root.mkdir(0o700)
            case 1:
                root.symlink_to(away)
            case 2:
                root.touch()
            case _:
                pass
        return "directory away"

    def _bring_back(self, root: Path) -> None:
        away = root.with_name(f"away-{root.name}")
        if not away.exists():
            return
        if root.exists() or root.is_symlink():
            self._remove(root)
        os.rename(away, root)

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    # ---- between runs -----------------------------------------------------------------------------------------------

    def change_lmdb(self) -> str | None:
        """Change an LMDB environment. Requires: no store is open."""
        environments = self._names(".lmdb", ".lmdb-old")
        if not environments:
            return None
        path = self.rng.choice(environments)
        data = path / "data.mdb"
        roll = self.rng.randrange(6)
        if roll < 4 and data.is_file() and not data.is_symlink():
            size = data.stat().st_size
            with open(data, "r+b") as file:
                if roll == 0:
                    file.truncate(self.rng.randrange(size + 1))
                for _ in range(self.rng.randrange(1, 8)):
                    file.seek(self.rng.randrange(min(size, 1 << 15) or 1))
                    file.write(self.rng.randbytes(self.rng.randrange(1, 9)))
        elif roll == 4:
            self._remove(path)
            self._put(path)
        else:
            target = path.with_name(path.name.removesuffix("-old") + "-old")
            if not target.exists() and not target.is_symlink():
                self._put(target)
        self.done["lmdb"] += 1
        return "lmdb"

    def heal(self) -> None:
        """Give the user what is the user's again, and the directory lock a name that can be one."""
        while self.locks:
            os.close(self.locks.pop())
        for root in self.roots:
            self._bring_back(root)
            if not root.is_dir():
                continue
            os.chmod(root, 0o700)
            for name in os.listdir(root):
                path = root / name
                if name == "directory.lock" and (path.is_symlink() or not path.is_file() or path.stat().st_nlink != 1):
                    self._remove(path)
                elif path.is_file() and not path.is_symlink():
                    if os.geteuid() == 0:
                        os.chown(path, os.geteuid(), -1)
                    os.chmod(path, 0o600)


class Campaign:
    """Two stores that serve from one pair of directories, a mutator, and the verdict."""

    def __init__(self, seed: int, base: Path, *, batch: int = 10, batches: int = 10) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.batch, self.batches = batch, batches
        self.directories = Directories(base / "shared", base / "disk")
        self.mutator = Mutator(self.rng, self.directories, base)
        self.children = [Child(CHILD, str(seed * 2 + which)) for which in range(2)]
        self.totals: Counter[str] = Counter()
        self.last: list[str] = []

    def run(self, mutations: int) -> None:
        """Make so many changes; raise AssertionError with what came before a fault."""
        try:
            while sum(self.mutator.done.values()) < mutations:
                self.round()
        except BaseException as error:
            error.add_note(f"seed {self.seed}; the last changes: {self.last[-12:]}")
            raise
        finally:
            for child in self.children:
                child.close()
            self.mutator.heal()

    def round(self) -> None:
        """Open, serve under changes, close: nothing is left. LMDB's files are changed in between."""
        shared, disk = str(self.directories.shared), str(self.directories.disk)
        refusals = [child.ask("open", shared=shared, disk=disk)["refused"] for child in self.children]
        assert refusals == ["", ""], refusals
        for _ in range(self.batches):
            for child in self.children:
                child.send("work", count=12)
            for _ in range(self.batch):
                self.last.append(self.mutator.mutate())
            for child in self.children:
                answer = child.receive()
                self.totals.update(right=answer["right"], saved=answer["saved"])
        for child in self.children:
            child.ask("settle")
            left = child.ask("close")["left"]
            assert left == {"threads": [], "files": [], "maps": []}, left
        self.mutator.heal()
        for _ in range(3):
            with contextlib.suppress(OSError):
                if self.mutator.change_lmdb():
                    self.last.append("lmdb")
        self.totals["rounds"] += 1


def main() -> None:
    """Run a campaign of the size asked for and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="stepwell-mutation-", dir="/dev/shm"))
    began = time.monotonic()
    try:
        campaign = Campaign(arguments.seed, base)
        campaign.run(arguments.mutations)
    finally:
        shutil.rmtree(base)
    total = sum(campaign.mutator.done.values())
    print(f"{total} mutations in {time.monotonic() - began:.0f} s, no fault: {dict(campaign.totals)}")
    print(dict(campaign.mutator.done.most_common()))


if __name__ == "__main__":
    main()
