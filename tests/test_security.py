"""What docs/security.md promises, line by line: who may read and write what is in tier directories, what is trusted."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import logging
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stepwell
from stepwell import _core, inspection
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.errors import StepwellError, VolumeError
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.tiers import locks
from stepwell.tiers.lmdb_index import VolumeIndex
from stepwell.tiers.volume_files import header_checksum, open_ours
from store_kit import GEOMETRY, VOLUME_BYTES, Directories, OpenRig, Rig, chain

SOURCES = {
    path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(Path(stepwell.__file__).parent.rglob("*.py"))
}
SIZES = {"shared": 2 * VOLUME_BYTES, "disk": 2 * VOLUME_BYTES}
NOBODY = 65534
ID = "0123456789abcdef" * 2

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it acts as another user")


@contextlib.contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def everything(directories: Directories) -> list[Path]:
    return [p for root in (directories.shared, directories.disk) for p in (root, *sorted(root.rglob("*")))]


def serve(rig: Rig) -> None:
    """Save, evict, load, look after the volumes: all that opens and makes a file."""
    rig.save(chain(1, 8))
    rig.store.evict(Tier.SHARED, 4)
    rig.load(chain(1, 8))
    rig.round()


def as_another_user(act: Callable[[], str]) -> str:
    """Do something in a child that is nobody, and return what it says."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


# ---- modes, owners, other users --------------------------------------------------------------------------------------


def test_nobody_else_may_read_what_a_store_makes_whatever_the_umask(
    directories: Directories, open_rig: OpenRig
) -> None:
    with umask(0):
        rig = open_rig(**SIZES)
        serve(rig)
        rig.close()
        rig = open_rig(**SIZES)  # adopts, and reads the LMDB environments
        serve(rig)
        made = everything(directories)
        assert any(path.name == "data.mdb" for path in made)
        for path in made:
            status = path.lstat()
            assert stat.S_IMODE(status.st_mode) == (0o700 if stat.S_ISDIR(status.st_mode) else 0o600), path
            assert status.st_uid == os.geteuid()


@as_root
def test_another_user_can_neither_list_nor_read_nor_use_a_directory(
    directories: Directories, open_rig: OpenRig
) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    serve(rig)
    directories.shared.parent.chmod(0o755)
    [volume] = directories.volumes("vol")
    shared = str(directories.shared)
    config = StoreConfig(geometry=GEOMETRY, shared=SharedTier("1MiB", shared, volume_bytes=VOLUME_BYTES))
    denied = ("PermissionError", f"VolumeError: {shared} belongs to user 0", f"{shared} belongs to user 0")
    for act in (
        lambda: str(os.listdir(directories.shared)),
        lambda: volume.read_bytes().hex(),
        lambda: str(PageStore(config)),
        lambda: inspection.inspect_directory(shared).error,
    ):
        assert as_another_user(act).startswith(denied)


@as_root
@pytest.mark.parametrize("name", [f"v-{ID}.vol", f"v-{ID}.lock", f"p-{ID}.proc", f"p-{ID}.lock"])
def test_a_file_of_another_user_is_left_alone(
    directories: Directories, open_rig: OpenRig, name: str
) -> None:
    """Even by root, who could open it."""
    directories.shared.mkdir(0o700)
    path = directories.shared / name
    path.write_bytes(bytes(4096))
    os.chown(path, NOBODY, -1)
    before = path.lstat()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    serve(rig)
    with pytest.raises(ValueError, match="not a regular file of this user"):
        open_ours(str(path), os.O_RDONLY)
    after = path.lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_a_directory_that_became_anothers_to_write_is_refused_to_whoever_opens_it_then(
    directories: Directories, open_rig: OpenRig
) -> None:
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    serve(rig)
    directories.shared.chmod(0o770)
    with pytest.raises(VolumeError, match="can be written by others"):
        Rig(directories.config(shared=2 * VOLUME_BYTES, disk=0))
    directories.shared.chmod(0o700)


# ---- links, fifos, descriptors ---------------------------------------------------------------------------------------


def names_of(directory: Path) -> list[str]:
    """Every name that a store would make, open or remove in a directory."""
    volume = [f"{stage}-{ID}.{suffix}" for stage in "vtx" for suffix in ("vol", "meta", "pages")]
    return [*volume, f"v-{ID}.lock", f"v-{ID}.lmdb", f"v-{ID}.lmdb-old", f"p-{ID}.lock", f"p-{ID}.proc"]


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "link to a directory"])
def test_what_a_link_leads_to_is_not_touched(directories: Directories, open_rig: OpenRig, kind: str) -> None:
    """Under every name of the protocol, before stores open, serve and close there."""
    precious: list[Path] = []
    for root in (directories.shared, directories.disk):
        root.mkdir(0o700)
        outside = root.parent / f"outside-{root.name}"
        outside.mkdir()
        for name in names_of(root):
            victim = outside / name
            precious.append(victim)
            if kind == "link to a directory":
                victim.mkdir()
                (victim / "data.mdb").write_bytes(b"precious")
                (root / name).symlink_to(victim)
            else:
                victim.write_bytes(b"precious")
                if kind == "hard link":
                    os.link(victim, root / name)
                else:
                    (root / name).symlink_to(victim)
    for _ in range(2):
        rig = open_rig(**SIZES)
        serve(rig)
        rig.close()
    for victim in precious:
        kept = victim / "data.mdb" if victim.is_dir() else victim
        assert kept.read_bytes() == b"precious"


@pytest.mark.timeout(60)
def test_a_fifo_keeps_nobody_waiting(directories: Directories, open_rig: OpenRig) -> None:
    for root in (directories.shared, directories.disk):
        root.mkdir(0o700)
        for name in names_of(root):
            os.mkfifo(root / name)
    rig = open_rig(**SIZES)
    serve(rig)
    for root in (directories.shared, directories.disk):
        inspection.inspect_directory(str(root))
    rig.close()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_a_directory_lock_that_cannot_be_one_is_an_error_that_names_it(directories: Directories, kind: str) -> None:
    directories.shared.mkdir(0o700)
    path = directories.shared / "directory.lock"
    match kind:
        case "symlink":
            path.symlink_to(directories.shared / "elsewhere")
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(VolumeError, match=r"directory\.lock is not a regular file"):
        Rig(directories.config(shared=2 * VOLUME_BYTES, disk=0))
    assert not (directories.shared / "elsewhere").exists()


def test_no_program_that_is_started_has_a_descriptor_of_a_store(
    directories: Directories, open_rig: OpenRig
) -> None:
    rig = open_rig(**SIZES)
    serve(rig)
    roots = (str(directories.shared), str(directories.disk), "anon_inode:[event")
    seen = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(roots):
                seen += 1
                assert fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC, os.readlink(f"/proc/self/fd/{name}")
    assert seen > 6


# ---- what files say --------------------------------------------------------------------------------------------------


def test_sizes_that_a_header_names_cost_no_memory(directories: Directories, open_rig: OpenRig) -> None:
    """A sparse file with a whole, right header of 2^24 slots in 2^43 bytes is given up: not read, not allocated for."""
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    rig.close()
    [volume] = directories.volumes("vol")
    header = bytearray(volume.read_bytes()[:4096])
    slots, size = 2**24, 2**43
    struct.pack_into("<I", header, 68, slots)
    offsets = [4096, 1 << 33, 1 << 34, 1 << 35, 1 << 36]
    struct.pack_into("<QQQQQQ", header, 104, *offsets, size)
    struct.pack_into("<I", header, 4092, header_checksum(bytes(header)))
    with volume.open("r+b") as file:
        file.write(header)
        file.truncate(size)
    _core.VolumeHeader.decode(bytes(header), size, 0)  # right by itself
    before = peak()
    rig = open_rig(shared=2 * VOLUME_BYTES, disk=0)
    serve(rig)
    assert peak() - before < 64 << 20


def peak() -> int:
    """The most memory that this process had, bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_a_process_that_names_itself_badly_steers_no_terminal(tmp_path: Path) -> None:
    """Its name is in the message of a lock that was held too long."""
    own = Path("/proc/self/comm").read_text()
    try:
        Path(f"/proc/self/task/{os.getpid()}/comm").write_text("a\x1b[31m\nb")
        assert locks.process_named(os.getpid()) == f"pid {os.getpid()} (a\\x1b[31m\\nb)"
    finally:
        Path(f"/proc/self/task/{os.getpid()}/comm").write_text(own.strip())


def test_the_reader_of_lmdb_steers_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it says may be what a damaged file made of it."""
    path = tmp_path / "v.lmdb"
    path.mkdir()
    reader = [sys.executable, "-c", "import sys; sys.stdout.write('a\\x1b[31m\\nb'); sys.exit(1)"]
    index = VolumeIndex(str(path), volume_id=bytes(16), slots=4, reader=reader)
    with caplog.at_level(logging.WARNING, "stepwell"):
        reason = index.open(adopted=True).reason
    index.close()
    assert reason == "the reader ended with status 1: a\\x1b[31m\\nb"
    assert all(record.getMessage().isprintable() for record in caplog.records)


# ---- what the source does not do -------------------------------------------------------------------------------------


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    for source, nodes in SOURCES.items():
        for node in nodes:
            if isinstance(node, ast.Call):
                yield f"{source.parent.name}/{source.name}:{node.lineno}", node, ast.unparse(node.func)


def test_nothing_that_was_read_is_run() -> None:
    """No pickle, no eval, no shell, no listener; arrays are loaded without objects in them."""
    for source, nodes in SOURCES.items():
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.name for name in node.names] + [getattr(node, "module", None) or ""]
                forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "ctypes", "socketserver"}
                if source.parent.name == "torture":
                    forbidden -= {"ctypes"}  # prctl: a child dies with the one that started it
                assert not forbidden & {name.split(".")[0] for name in names}, source
    for where, call, name in calls():
        assert name not in ("eval", "exec", "os.system", "os.popen", "compile"), where
        assert not any(keyword.arg == "shell" for keyword in call.keywords), where
        assert not name.endswith((".listen", ".bind")), where
        if name == "np.load":
            allowed = [keyword.value for keyword in call.keywords if keyword.arg == "allow_pickle"]
            assert not allowed or ast.unparse(allowed[0]) == "False", where


def test_no_interpreter_is_started_with_the_working_directory_to_import_from() -> None:
    """Without -P, `python -m` imports from wherever the engine was started."""
    started = 0
    for source, nodes in SOURCES.items():
        for node in nodes:
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                started += 1
                assert "'-P'" in [ast.unparse(element) for element in node.elts], f"{source}:{node.lineno}"
    assert started >= 3


def test_names_in_tier_directories_are_opened_in_two_places() -> None:
    """Those look at owner, kind and links, behind the open, and never wait (csrc/file.h adds O_NOFOLLOW, O_CLOEXEC)."""
    openers = {where.split(":")[0] for where, _, name in calls() if name == "_core.file_open"}
    # The doctor's is in a directory that it made.
    assert openers == {"tiers/locks.py", "tiers/volume_files.py", "doctor/directories.py"}
    for where, _, name in calls():
        assert not (where.startswith("tiers/") and name == "os.open"), where


def test_a_store_that_cannot_be_opened_leaves_nothing_for_others(directories: Directories) -> None:
    directories.disk.mkdir(0o700)
    directories.shared.mkdir(0o700)
    config = StoreConfig(
        geometry=GEOMETRY,
        shared=SharedTier("1MiB", str(directories.shared), volume_bytes=VOLUME_BYTES),
        disk=DiskTier("1MiB", str(directories.disk / "not" / "there"), volume_bytes=VOLUME_BYTES),
    )
    with umask(0), pytest.raises(StepwellError):
        PageStore(config)
    assert all(not path.lstat().st_mode & 0o077 for path in everything(directories))
