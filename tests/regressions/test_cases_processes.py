"""Cases of kind 10 in docs/cases.md: fork, spawn, and one directory opened more than once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from case_kit import child_script, run_child
from doctor_kit import mounted
from sequence_kit import StampEngine, evict_all, prompt
from stepwell.config import DiskTier, SharedTier, StoreConfig
from stepwell.errors import ForkedError, StepwellError
from stepwell.index import Tier
from store_kit import BOTH, GEOMETRY, VOLUME_BYTES, Directories, OpenRig, Rig, chain

MakeEngine = Callable[..., StampEngine]


def _ends() -> None:
    """What a child of multiprocessing does that has nothing to do with the store."""


def test_children_of_every_kind_that_never_use_the_store_harm_nothing(open_rig: OpenRig) -> None:
    """C072, jnwatson/py-lmdb#346: a child that only ended had released its parent's slot.

    A child that does use it: tests/test_store_faults.py::test_a_forked_child_is_refused_and_harms_nothing.
    """
    rig = open_rig(**BOTH)
    rig.save(chain(1, 4))
    rig.round()  # the LMDB environment is open
    rig.load(chain(1, 4))
    children: list[Callable[[], object]] = [
        lambda: subprocess.Popen(["true"]).wait(),
        lambda: subprocess.run(["true"], check=True, close_fds=False),
        lambda: os.waitpid(os.fork() or os._exit(0), 0),
    ]
    worker = multiprocessing.get_context("fork").Process(target=_ends)
    children.append(lambda: (worker.start(), worker.join()))
    for number, child in enumerate(children):
        child()
        for each in range(25):
            assert rig.save(chain(10 + 25 * number + each, 1)).transfer.ok.all()
            assert rig.load(chain(10 + 25 * number + each, 1)) == 1
        rig.store._tiers[Tier.DISK]._recency_at = float("-inf")  # type: ignore[attr-defined]
        rig.round()  # LMDB is written
    assert worker.exitcode == 0
    rig.close()
    assert open_rig(**BOTH).load(chain(1, 4)) == 4


ENDS_AS_PYTHON_ENDS = """
rig = Rig(directories.config(shared=VOLUME_BYTES, disk=VOLUME_BYTES), keeper=True)
rig.save(chain(1, 4)); rig.round()  # the LMDB environment is open
for how in ("end", "sys.exit", "exception"):
    child = os.fork()
    if child == 0:
        os.close(2)  # an exception's traceback is not ours
        if how == "end": break
        if how == "sys.exit": sys.exit(0)
        raise ValueError
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (how == "exception"), how
    for number in range(100):
        assert rig.save(chain(number, 1)).transfer.ok.all() and rig.load(chain(number, 1)) == 1
    rig.store._tiers[Tier.DISK]._recency_at = float("-inf")
    rig.round()
else:
    rig.close()
    print("done", flush=True)
"""


def test_a_child_that_ends_as_python_ends_harms_nothing(directories: Directories, open_rig: OpenRig) -> None:
    """C072, jnwatson/py-lmdb#346: the same where all that the child inherited is torn down: stores, pools, threads."""
    done = run_child(directories, "from stepwell.index import Tier\n" + ENDS_AS_PYTHON_ENDS)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert open_rig(**BOTH).load(chain(99, 1)) == 1


def config_at(shared: str, disk: str) -> StoreConfig:
    return StoreConfig(
        geometry=GEOMETRY,
        shared=SharedTier(2 * VOLUME_BYTES, shared, volume_bytes=VOLUME_BYTES),
        disk=DiskTier(2 * VOLUME_BYTES, disk, volume_bytes=VOLUME_BYTES),
    )


@pytest.mark.parametrize("alias", ["twice", "relative", "link above", "bind mount"])
def test_one_directory_by_two_names_is_one_directory(
    directories: Directories, open_rig: OpenRig, alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C073, jnwatson/py-lmdb#129: two environments of one path in a process broke each other.

    An environment belongs to a volume and is opened under the volume's lock, so none is opened twice.
    """
    first = open_rig(config_at(str(directories.shared), str(directories.disk)))
    first.save(chain(1, 4))
    first.round()
    match alias:
        case "twice":
            other = str(directories.disk)
        case "relative":
            monkeypatch.chdir(directories.disk.parent)
            other = "disk"
        case "link above":
            (tmp_path / "link").symlink_to(directories.disk.parent)
            other = str(tmp_path / "link" / "disk")
        case "bind mount":
            (tmp_path / "bound").mkdir(mode=0o700)
            if os.geteuid() != 0:
                pytest.skip("mounts take root")
            other = str(tmp_path / "bound")
            with mounted(tmp_path / "bound", "--bind", str(directories.disk)):
                _share(first, open_rig(config_at(str(directories.shared), other)), directories)
            return
    _share(first, open_rig(config_at(str(directories.shared), other)), directories)


CAME_AND_WENT = """
saved = []
for number in range({process}, 96, 8):
    rig = Rig(directories.config(shared=0, disk=64 * VOLUME_BYTES), keeper=True)
    if rig.save(chain(number, 2)).saved == 2:  # refused where others have not given its share back yet
        saved.append(number)
    for each in range(0, 96, 5):
        rig.load(chain(each, 2))  # compares what came
    stats = rig.store.stats()
    assert (stats.io_errors, stats.checksum_failures) == (0, 0), stats
    rig.close()  # LMDB is written
print(*saved)
"""


def test_processes_that_open_and_close_one_path_at_once_meet_no_error(
    directories: Directories, open_rig: OpenRig
) -> None:
    """C073, jnwatson/py-lmdb#340: openings of one path by several processes failed at random. Eight, 12 times each."""
    script = child_script(directories, CAME_AND_WENT)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script.replace("{process}", str(number))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    told = [child.communicate(timeout=240) for child in children]
    assert [child.returncode for child in children] == [0] * 8, told
    saved = [int(number) for said, _ in told for number in said.split()]
    assert len(saved) > 48
    rig = open_rig(shared=0, disk=64 * VOLUME_BYTES)
    assert [rig.load(chain(number, 2)) for number in saved] == [2] * len(saved)


def _share(first: Rig, second: Rig, directories: Directories) -> None:
    """Two stores share the volumes of a directory; the end of one is not the other's."""
    second.save(chain(2, 4))
    for rig in (first, second, first):
        rig.store._tiers[Tier.DISK]._recency_at = float("-inf")  # type: ignore[attr-defined]
        rig.round()
    held = [
        {member.held.volume_id for tier in (Tier.SHARED, Tier.DISK) for member in rig.store._tiers[tier].members}  # type: ignore[attr-defined]
        for rig in (first, second)
    ]
    assert held[0]
    assert held[1]
    assert not held[0] & held[1]
    assert len(directories.volumes("pages")) == 2
    first.close()
    for number in range(2, 30):
        assert second.save(chain(number, 2)).transfer.ok.all()
        assert second.load(chain(number, 2)) == 2
    second.round()
    second.close()


def test_a_child_of_a_process_with_jax_is_refused_at_once(make_engine: MakeEngine) -> None:
    """C075, jax-ml/jax#18852: a forked child hung on its first large array."""
    engine = make_engine(device=16)
    engine.cache(prompt(1, 17))
    evict_all(engine.store, Tier.DEVICE)
    calls: list[Callable[[], object]] = [
        lambda: engine.store.open(prompt(1, 17)),
        lambda: engine.store.match(prompt(1, 17)),
        lambda: engine.store.device,
        lambda: engine.store.stats(),
    ]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b""
        try:
            for call in calls:
                try:
                    call()
                    said += b"?"
                except ForkedError as error:
                    said += b"F" if "spawn" in str(error) else b"?"
                except StepwellError:
                    said += b"E"
            os.write(write, said)
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 100)
    os.close(read)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert said == b"F" * len(calls)
    again = engine.open(prompt(1, 17))
    engine.settle(again)
    assert again.ready == 16
    engine.verify(again)


SPAWNED = """
import multiprocessing
geometry = PageGeometry(
    model="large", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="float32", page_tokens=1024
)
def child(shared, disk):
    with Box(config_of(Directories(Path(shared), Path(disk)), geometry, shared=4)) as box:
        assert box.load(tokens_of(1, 4096)) == 4
if __name__ == "__main__":
    with Box(config_of(directories, geometry, shared=4)) as box:
        assert geometry.page_bytes == 1 << 20
        box.save(tokens_of(1, 4096))
    worker = multiprocessing.get_context("spawn").Process(
        target=child, args=(str(directories.shared), str(directories.disk))
    )
    worker.start(); worker.join()
    assert worker.exitcode == 0
"""


def test_a_spawned_child_works_on_shared_memory(directories: Directories, tmp_path: Path) -> None:
    """C075, jax-ml/jax#20734: use spawn, the error says; with pages of 1 MiB it works."""
    script = tmp_path / "spawned.py"  # a file: the child of spawn reads it again
    script.write_text(child_script(directories, "from stepwell.geometry import PageGeometry\n" + SPAWNED))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
