"""Importing this skips a module of tests where SGLang 0.5.23 is not, or may not be imported; each imports it first.

Otherwise the environment of this process, and of those it starts, is what SGLang needs on a CPU.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
VERSION = "0.5.23"  # whose files and lines these tests name


def _reason() -> str | None:
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "SGLang is not installed; tests/adapters/sglang/install makes an environment with it"
    if installed != VERSION:
        return f"SGLang {installed} is installed; these tests are of {VERSION}"
    if not own_run:
        return "run `pytest tests/adapters/sglang/real` by itself: SGLang warns, and elsewhere a warning is an error"
    return None


own_run = os.environ.get("SGLANG_ADAPTER_TESTS") == "1"  # conftest.py sets it
if _why := _reason():
    pytest.skip(_why, allow_module_level=True)

# SGLang compiles its hash with the ninja of its environment (cpp_utils/hash_binding.cpp). Without it the thread that
# fetches ends in silence, and no prefetch ever does.
_tools = str(Path(sys.executable).parent)
if _tools not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = f"{_tools}{os.pathsep}{os.environ['PATH']}"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "cpu"), str(HERE)])
os.environ |= {"SGLANG_ADAPTER_CPU": "1", "SGLANG_RUST_BUILD_MODE": "never", "TOKENIZERS_PARALLELISM": "false"}
if str(HERE / "cpu") not in sys.path:
    sys.path.insert(0, str(HERE / "cpu"))
    if "sitecustomize" not in sys.modules or not hasattr(sys, "_torchvision_schemas"):
        exec(compile((HERE / "cpu" / "sitecustomize.py").read_text(), "sitecustomize.py", "exec"), {})
