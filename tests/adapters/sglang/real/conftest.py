"""Folders for what is stored, the model, the backends by name; skipped where SGLang is not (sglang_here.py)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    """Say to sglang_here.py whether this is a run of these tests by themselves."""
    os.environ["SGLANG_ADAPTER_TESTS"] = str(int(config.inipath == HERE / "pytest.ini"))


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory."""
    folder = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, memory_folder: Path) -> Any:
    """A backend of the name that a test is parametrized with (indirect), over folders of its own."""
    import backends

    return backends.named(request.param, disk=tmp_path, memory=memory_folder, weights_id="tiny")


@pytest.fixture
def deployment(request: pytest.FixtureRequest, tmp_path: Path, memory_folder: Path) -> Any:
    """A deployment of the name that a test is parametrized with (deployment_kit.over)."""
    import deployment_kit

    return deployment_kit.deployed(request.param, disk=tmp_path, memory=memory_folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    from model_kit import Llama

    return Llama().write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Any]:
    """Start engines; those left running are killed.

    The model is older than the process of which they are forks: stepwell trusts no files that are newer.
    """
    from engine_kit import engines

    with engines(tmp_path) as begin:
        yield begin
