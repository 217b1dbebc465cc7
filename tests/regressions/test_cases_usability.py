"""Cases of kind 16 in docs/cases.md: installing, configuring, and what an error says."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from case_kit import Box, bytes_of_volumes, child_script, config_of, tokens_of
from doctor_kit import mounted, needs_root
from stepwell import _core
from stepwell.config import SharedTier, StoreConfig
from stepwell.errors import BudgetError, StepwellUsageError
from stepwell.index import Tier
from stepwell.settings import from_mapping
from stepwell.store import PageStore
from stepwell.tiers import volumes
from store_kit import GEOMETRY, Directories


@needs_root
def test_a_capacity_that_is_a_byte_too_large_is_told_with_all_its_numbers(tmp_path: Path) -> None:
    """C108, sgl-project/sglang#8102: 'requesting 40 GB but only have 44.87 GB free': a reserve was left out."""
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs") as point:
        most = 8 << 20
        for asked in (most, most + 1):
            config = StoreConfig(
                geometry=GEOMETRY, shared=SharedTier(asked, str(point / "s"), volume_bytes=256 << 10)
            )
            if asked == most:
                PageStore(config).close()
                continue
            with pytest.raises(BudgetError) as refused:
                PageStore(config)
            text = str(refused.value)
            for word in (str(asked), str(most), str(point), "lower shared.capacity"):
                assert word in text, text


FORTY_PERCENT = """
from stepwell.config import SharedTier, StoreConfig
from stepwell.errors import StepwellError
try:
    rig = Rig(StoreConfig(geometry=GEOMETRY, shared=SharedTier({capacity}, {path!r}, volume_bytes={capacity})))
except StepwellError as error:
    print(type(error).__name__, flush=True); sys.stdin.read(); sys.exit(0)
pages = rig.store.stats().tiers["shared"].capacity
print(pages, flush=True)
sys.stdin.readline()  # all have what they get
for number in range(2 * pages // 8):
    rig.save(chain(number, 8)); rig.load(chain(number, 8))
stats = rig.store.stats()
print(stats.bus_faults + stats.io_errors + stats.checksum_failures, flush=True)
sys.stdin.read()
rig.close()
"""


@needs_root
def test_four_processes_that_ask_for_two_fifths_each_do_not_share_what_is_not_there(tmp_path: Path) -> None:
    """C110, sgl-project/sglang#29263: each passed the check alone, and together they took the machine down."""
    with mounted(tmp_path / "m", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs") as point:
        children = []
        for number in range(4):
            script = FORTY_PERCENT.format(capacity=(8 << 20) * 2 // 5, path=str(point / f"s{number}"))
            children.append(
                subprocess.Popen(
                    [sys.executable, "-c", child_script(Directories(point, point), script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [child.stdout.readline().strip() for child in children if child.stdout]
        held = [child for child, word in zip(children, said, strict=True) if word.isdigit() and word != "0"]
        faults = []
        for child in held:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            faults.append(child.stdout.readline().strip())
        used = sum(bytes_of_volumes(path) for path in point.iterdir())
        for child in children:
            child.communicate("")
        assert [child.returncode for child in children] == [0] * 4
        assert 1 <= len(held) <= 2, said
        assert all(word in ("BudgetError", "0") for word in said if not word.isdigit() or word == "0"), said
        assert faults == ["0"] * len(held)
        assert used <= 8 << 20


NO_CHILDREN = """
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system"):
        print("started:", event, arguments, flush=True)
sys.addaudithook(watch)
from stepwell.index import Tier
rig = Rig(directories.config(host=16 * 4096, shared=VOLUME_BYTES, disk=VOLUME_BYTES))
rig.save(chain(1, 4)); rig.store.evict(Tier.SHARED, 4); assert rig.load(chain(1, 4)) == 4
rig.round(); rig.close()
print("done", flush=True)
"""


def test_the_first_request_starts_no_compiler(directories: Directories) -> None:
    """C112, Tanguille/cluster#4196: an extension was compiled at the first prefill, where headers were missing.

    No process of any kind is started, with nothing on the path; that the wheel has all it needs: tests/test_wheel.py.
    """
    done = subprocess.run(
        [sys.executable, "-c", child_script(directories, NO_CHILDREN)],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": "/nonexistent"},
        check=False,
    )
    assert done.stdout == "done\n", (done.stdout, done.stderr)


def test_what_the_core_needs_is_there_before_the_first_request() -> None:
    """C112, Tanguille/cluster#4213: the module is one file, linked against nothing that a bare system lacks."""
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf")
    told = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", told))
    assert needed <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0",
                      "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # fmt: skip


GEOMETRY_VALUES = {
    "model": "m", "revision": "1", "layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "uint8", "page_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"disk": {"capacity": "1MiB", "path": "d", "direct_oi": True}}, "direct_io"),
        ({"disk": {"capacity": "1MiB", "path": "d", "direct_io": "yes please"}}, "direct_io"),
        ({"disk": {"path": "d"}}, "disk.capacity"),
        ({"disk": {"capacity": "1MiB", "path": "d", "write": "selective"}}, "selective"),
        ({"shared": {"capacity": 1, "path": "s"}}, "shared"),
        ({"disk": '{"capacity": "1MiB"}'}, "disk"),
        ({"sharde": {"capacity": "1MiB", "path": "s"}}, "shared"),
        ({"pin_fraction": "half"}, "pin_fraction"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(values: dict[str, object], words: str) -> None:
    """C113, LMCache/LMCache#4725: options were accepted, and nothing came of them."""
    with pytest.raises((StepwellUsageError, BudgetError), match=re.escape(words)):
        from_mapping({"geometry": GEOMETRY_VALUES, "shared" if "disk" in values else "host": None, **values})


def flags_of(path: Path) -> int:
    """Return the flags of this process's descriptors of a file, as the kernel tells them."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                text = Path(f"/proc/self/fdinfo/{name}").read_text()
                found |= int(re.findall(r"flags:\s+(\d+)", text)[0], 8)
        except OSError:  # the one that lists
            continue
    return found


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("has", [True, False])
def test_direct_io_is_what_it_is_said_to_be(
    directories: Directories, asked: bool, has: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C113, LMCache/LMCache#1522: the log said O_DIRECT, and the descriptors said no."""
    if not has:
        monkeypatch.setattr(volumes._core, "file_direct_alignment", lambda _: 0)
    config = config_of(directories, disk=8)
    assert config.disk is not None
    disk = msgspec.structs.replace(config.disk, direct_io=asked)
    with Box(msgspec.structs.replace(config, disk=disk)) as box:
        box.save(tokens_of(1, 16))
        [path] = directories.volumes("pages")
        [member] = box.store._tiers[Tier.DISK].members  # type: ignore[attr-defined]
        effective = bool(flags_of(path) & os.O_DIRECT)
        assert member.held.direct_io == effective
        assert effective <= (asked and has)
        assert ("has no direct I/O" in caplog.text) == (asked and not effective)


ORDERS = [" ".join(order) for order in itertools.permutations(["stepwell", "jax", "torch"])]


@pytest.mark.parametrize("order", ["stepwell jax", "jax stepwell", *ORDERS])
def test_the_order_of_imports_does_not_matter(directories: Directories, order: str) -> None:
    """C114, vllm-project/tpu-inference#3025: two copies of the symbols of XLA met, and the first to come won."""
    if "torch" in order and importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch")
    imports = "".join(f"import {'stepwell._core' if name == 'stepwell' else name}\n" for name in order.split())
    rest = child_script(
        directories,
        "import jax.numpy as jnp\n"
        "rig = Rig(directories.config(shared=VOLUME_BYTES, disk=0))\n"
        "assert float(jnp.ones(8).sum()) == 8\n"
        "rig.save(chain(1, 4)); assert rig.load(chain(1, 4)) == 4; rig.close()",
    )
    done = subprocess.run([sys.executable, "-c", imports + rest], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_core_exports_its_entry_and_nothing_else() -> None:
    """C114, vllm-project/tpu-inference#3025: what is hidden clashes with nothing."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm")
    told = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in told.stdout.splitlines()] == ["PyInit__core"]
