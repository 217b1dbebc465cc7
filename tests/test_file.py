"""The file layer as Python sees it: errors, ownership of descriptors, fault points."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stepwell import _core
from stepwell.testing.faults import fail_each, inject, reached, resume, wait_paused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


@pytest.fixture
def file(path: Path) -> _core.Descriptor:
    return _core.Descriptor(_core.file_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


def test_bytes_written_are_read_and_the_end_is_short(file: _core.Descriptor) -> None:
    fd = file.fileno()
    assert _core.file_pwrite(fd, b"hello", 2) == 5
    assert _core.file_pwrite(fd, memoryview(b"..world")[2:], 7) == 5
    assert _core.file_pread(fd, 100, 0) == b"\0\0helloworld"
    assert _core.file_pread(fd, 3, 7) == b"wor"
    assert _core.file_pread(fd, 3, 100) == b""


def test_a_failure_is_the_os_error_of_its_kind_with_the_path(path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        _core.file_open(path, os.O_RDONLY)
    assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, path)
    path.touch()
    with pytest.raises(FileExistsError):
        _core.file_open(str(path), os.O_CREAT | os.O_EXCL)
    with pytest.raises(NotADirectoryError):
        _core.file_list(os.fsencode(path))
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.file_pread(-1, 1, 0)


def test_an_argument_that_is_no_path_or_no_buffer_is_a_type_error(file: _core.Descriptor) -> None:
    with pytest.raises(TypeError):
        _core.file_open(7, os.O_RDONLY)
    with pytest.raises(ValueError, match="null"):
        _core.file_open("a\0b", os.O_RDONLY)
    with pytest.raises(TypeError):
        _core.file_pwrite(file.fileno(), "text", 0)


def test_names_that_are_no_text_survive(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.close(os.open(raw, os.O_CREAT))
    (name,) = _core.file_list(tmp_path)
    assert os.fsencode(name) == b"\xff\xfe"
    _core.file_unlink(tmp_path / name)
    assert _core.file_list(tmp_path) == []


def test_a_descriptor_is_closed_once_and_says_so(file: _core.Descriptor) -> None:
    fd = file.fileno()
    assert not file.closed
    file.close()
    file.close()
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.fileno()
    with pytest.raises(OSError, match="Bad"):
        os.fstat(fd)


def test_a_descriptor_that_nobody_holds_is_closed(path: Path) -> None:
    fd = _core.Descriptor(_core.file_open(path, os.O_CREAT)).fileno()
    with pytest.raises(OSError, match="Bad"):
        os.fstat(fd)


def test_a_detached_descriptor_stays_open_for_its_next_owner(file: _core.Descriptor) -> None:
    fd = file.detach()
    assert file.closed
    with pytest.raises(ValueError, match="detached"):
        file.detach()
    owner = _core.Descriptor(fd)
    assert os.fstat(fd).st_size == 0
    owner.close()


def test_a_lock_is_exclusive_within_a_process_and_ends_with_its_descriptor(
    file: _core.Descriptor, path: Path
) -> None:
    other = _core.Descriptor(_core.file_open(path, os.O_RDONLY))
    assert _core.file_lock(file.fileno())
    assert _core.file_lock(file.fileno())
    assert not _core.file_lock(other.fileno())
    file.close()
    assert _core.file_lock(other.fileno())


def test_a_child_has_neither_descriptor_nor_lock(file: _core.Descriptor, path: Path) -> None:
    assert _core.file_lock(file.fileno())
    fd = file.fileno()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(fd)
        except OSError:
            file.close()  # Closes nothing: it is not the child's.
            os._exit(0 if file.closed else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    other = _core.Descriptor(_core.file_open(path, os.O_RDONLY))
    assert not _core.file_lock(other.fileno())


def test_stat_tells_files_directories_and_links_apart(tmp_path: Path, path: Path) -> None:
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    plain, link, folder = (_core.file_stat(p) for p in (path, tmp_path / "link", tmp_path))
    assert (plain.is_regular, plain.size, plain.links, plain.uid) == (True, 5, 1, os.geteuid())
    assert (link.is_symlink, link.is_regular) == (True, False)
    assert (folder.is_directory, folder.is_regular) == (True, False)
    assert (plain.device, plain.inode) == (path.stat().st_dev, path.stat().st_ino)


def test_directories_are_made_listed_and_removed(tmp_path: Path) -> None:
    _core.file_mkdir(tmp_path / "d")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    _core.file_close(_core.file_open(tmp_path / "d" / "x", os.O_CREAT))
    with pytest.raises(OSError, match="not empty"):
        _core.file_rmdir(tmp_path / "d")
    _core.file_rename(tmp_path / "d" / "x", tmp_path / "y")
    _core.file_rmdir(tmp_path / "d")
    assert _core.file_list(tmp_path) == ["y"]


CALLS: dict[str, Callable[[Path, int], object]] = {
    "open": lambda path, fd: _core.file_open(path, os.O_RDONLY),
    "pread": lambda path, fd: _core.file_pread(fd, 1, 0),
    "pwrite": lambda path, fd: _core.file_pwrite(fd, b"x", 0),
    "truncate": lambda path, fd: _core.file_truncate(fd, 1),
    "reserve": lambda path, fd: _core.file_reserve(fd, 0, 1),
    "sync": lambda path, fd: _core.file_sync(fd),
    "lock": lambda path, fd: _core.file_lock(fd),
    "unlock": lambda path, fd: _core.file_unlock(fd),
    "rename": lambda path, fd: _core.file_rename(path, path),
    "unlink": lambda path, fd: _core.file_unlink(path),
    "mkdir": lambda path, fd: _core.file_mkdir(path.with_name("d")),
    "rmdir": lambda path, fd: _core.file_rmdir(path.with_name("d")),
    "list": lambda path, fd: _core.file_list(path.parent),
    "stat": lambda path, fd: _core.file_stat(path),
    "fstat": lambda path, fd: _core.file_fstat(fd),
    "statfs": lambda path, fd: _core.file_statfs(path),
    "direct_alignment": lambda path, fd: _core.file_direct_alignment(path),
}


@pytest.fixture
def no_other_thread() -> None:
    """Wait for threads of stores that earlier tests dropped: fault points are the process's, they reach them too."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("sw-"):
            thread.join(30.0)


@pytest.mark.parametrize("point", CALLS)
def test_each_call_is_a_fault_point_of_its_name(
    point: str, path: Path, file: _core.Descriptor, no_other_thread: None
) -> None:
    with inject(f"file.{point}", "errno", value=errno.ENXIO):
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)) as caught:
            CALLS[point](path, file.fileno())
        assert reached(f"file.{point}") == 1
        assert reached("file.*") == 1
    assert caught.value.errno == errno.ENXIO


def test_a_short_outcome_moves_less(file: _core.Descriptor) -> None:
    with inject("file.pwrite", "short", value=3):
        assert _core.file_pwrite(file.fileno(), b"hello", 0) == 3
    with inject("file.pread", "short", nth=2, value=1):
        assert [_core.file_pread(file.fileno(), 9, 0) for _ in range(3)] == [b"hel", b"h", b"hel"]


def test_a_failed_close_has_closed(path: Path) -> None:
    fd = _core.file_open(path, os.O_CREAT)
    with inject("file.close", "errno", value=errno.EIO), pytest.raises(OSError, match="error"):
        _core.file_close(fd)
    with pytest.raises(OSError, match="Bad"):
        os.fstat(fd)


def test_other_threads_run_while_a_call_stands(file: _core.Descriptor) -> None:
    fd = file.fileno()
    with inject("file.pwrite", "pause"):
        thread = threading.Thread(target=_core.file_pwrite, args=(fd, b"late", 0))
        thread.start()
        wait_paused("file.pwrite")
        assert _core.file_pread(fd, 9, 0) == b""
        resume("file.pwrite")
        thread.join()
    assert _core.file_pread(fd, 9, 0) == b"late"


def test_fail_each_fails_each_operation_once_and_ends(file: _core.Descriptor) -> None:
    fd, outcomes = file.fileno(), []
    for fault in fail_each("file.pread", errno.EIO):
        done = 0
        try:
            with fault:
                for _ in range(3):
                    _core.file_pread(fd, 1, 0)
                    done += 1
        except OSError:
            assert fault.has_fired
        outcomes.append(done)
        _core.file_pread(fd, 1, 0)  # Outside the block nothing fails.
    assert outcomes == [0, 1, 2, 3]


def test_fail_each_of_an_operation_without_end_is_an_assertion(file: _core.Descriptor) -> None:
    with pytest.raises(AssertionError, match=r"after 5 rounds file\.pread is still reached"):
        read_until_it_fails(file)


def read_until_it_fails(file: _core.Descriptor) -> None:
    for fault in fail_each("file.pread", errno.EIO, most=5):
        with fault, suppress(OSError):
            while True:
                _core.file_pread(file.fileno(), 1, 0)
