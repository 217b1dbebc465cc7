"""What an installed stepwell must have whoever built it: a wheel is tried with this file (see [tool.cibuildwheel])."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from stepwell import _core
from stepwell.index import Tier
from store_kit import VOLUME_BYTES, OpenRig, chain

TESTS = Path(__file__).parent
PROJECT = TESTS.parent / "pyproject.toml"


def package_folder() -> Path:
    spec = importlib.util.find_spec("stepwell")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi", "tiers/FORMAT.md"])
def test_the_package_carries(name: str) -> None:
    assert (package_folder() / name).is_file()


def test_the_stub_names_what_the_module_has() -> None:
    stub = (package_folder() / "_core.pyi").read_text()
    named = set(re.findall(r"^(?:class|def) (\w+)", stub, re.MULTILINE))
    has = {name for name in vars(_core) if not name.startswith("__")}
    assert len(has) > 20
    assert has <= named | set(re.findall(r"^(\w+):", stub, re.MULTILINE))


def test_the_distribution_carries_each_licence_that_it_names() -> None:
    distribution = importlib.metadata.distribution("stepwell")
    names = distribution.metadata.get_all("License-File") or []
    texts = {name: distribution.read_text(f"licenses/{name}") or "" for name in names}
    assert "Apache License" in texts["LICENSE"]
    # Both are linked into the module, and both ask for their notice beside a binary.
    assert "Wenzel Jakob" in texts["LICENSE-third-party.txt"]
    assert "Thibaut Goetghebuer-Planchon" in texts["LICENSE-third-party.txt"]


def test_the_tag_of_the_wheel_and_the_module_agree() -> None:
    wheel = importlib.metadata.distribution("stepwell").read_text("WHEEL") or ""
    tag = re.search(r"^Tag: (\w+)-(\w+)-", wheel, re.MULTILINE)
    assert tag is not None
    assert _core.__file__ is not None
    is_stable = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert tag[2] == ("abi3" if is_stable else f"cp3{sys.version_info[1]}")
    assert _core.__file__.endswith(".abi3.so") == is_stable


def test_the_command_answers() -> None:
    command = Path(sysconfig.get_path("scripts")) / "stepwell"
    said = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("usage: stepwell")


def test_pages_come_back_right_from_each_tier_and_after_a_restart(open_rig: OpenRig) -> None:
    tokens = chain(1, 12)
    with_host = open_rig(host=16 * 4096, shared=0, disk=0)  # a slot of the slab has 4 KiB
    with_host.save(tokens)
    assert with_host.load(tokens) == 12
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    rig.save(tokens)
    assert rig.load(tokens) == 12
    assert rig.store.evict(Tier.SHARED, 12) == 12
    with rig.store.match(tokens) as match:
        assert match.spans == [(0, 12, Tier.DISK)]
    assert rig.load(tokens) == 12
    rig.close()
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    assert rig.load(tokens) == 12


def test_the_tests_of_a_wheel_exist_and_need_no_jax() -> None:
    settings = tomllib.loads(PROJECT.read_text())["tool"]["cibuildwheel"]
    named = re.findall(r"tests/(\w+\.py)", settings["test-command"])
    assert Path(__file__).name in named
    texts = {name: (TESTS / name).read_text() for name in named}
    needing = re.compile("import " "jax|make_" "engine|sequence_" "kit")  # in pieces: this file is one of them
    assert [name for name, text in texts.items() if needing.search(text)] == []
