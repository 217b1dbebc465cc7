"""The README's example runs, and its claims of arithmetic hold."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

import stepwell as sw

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme_runs_and_is_warm_when_opened_again(directories) -> None:  # type: ignore[no-untyped-def]
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, object] = {"shared_dir": str(directories.shared), "disk_dir": str(directories.disk)}
    exec(compile(code[1], str(README), "exec"), names)
    pool = names["pool"]
    assert isinstance(pool, np.ndarray)
    assert np.array_equal(pool[:, :, 0:20], pool[:, :, 40:60])
    with sw.PageStore(names["config"]) as store, store.match(names["tokens"]) as match:  # type: ignore[arg-type]
        assert match.tokens == 320


@pytest.mark.parametrize("command", ["'.[demo]'", "'.[test]'"])
def test_the_readme_has_both_commands(command: str) -> None:
    assert (
        f"python3 -m venv .venv && .venv/bin/pip install {'-e ' if 'test' in command else ''}{command} && .venv/bin/"
        in README.read_text()
    )


def test_the_arithmetic_of_a_page_holds() -> None:
    geometry = sw.PageGeometry(
        model="m", revision="r", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=16
    )
    assert geometry.page_bytes == 2 << 20
    assert 192 + 4 * len(geometry.layer_bytes) + 16 == 336


def test_the_table_of_sglang_is_that_of_the_kept_result() -> None:
    path = README.parent / "benchmarks"
    spec = importlib.util.spec_from_file_location("kept", path / "kept.py")
    assert spec is not None
    assert spec.loader is not None
    kept = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kept)
    result = json.loads((path / "results" / "sglang.json").read_text())
    assert kept.sglang_summary(result) in README.read_text()
    assert f"commit {result['machine']['commit']}, SGLang" in README.read_text()
