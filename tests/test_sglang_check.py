"""`stepwell doctor --sglang`: what of the installed SGLang is otherwise than stepwell uses it is named, with a remedy.

Here on a stand-in that is made of the tables of check.py; tests/adapters/sglang/real holds these against SGLang.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from stepwell import Finding, Limit
from stepwell.adapters.sglang import check, plugin
from stepwell.cli import main

GIB = 1 << 30


class Standin:
    """Modules of SGLang with every name that the tables hold; `lose` takes one away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.plugins: str | None = None
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            monkeypatch.delitem(sys.modules, name)
        signatures = {**check._CALLS, **check._DYNAMIC, **check._POOL_CALLS, **check._RUNTIME, **plugin._SIGNATURES}
        for target, parameters in signatures.items():
            self.put(target, eval(f"lambda {', '.join(parameters)}: None"))
        for name, fields in {**check._CALL_FIELDS, **plugin._FIELDS}.items():
            self.holder(name).__annotations__.update(dict.fromkeys(fields, "Any"))
        for name, members in check._MEMBERS.items():
            self.holder(name).__members__ = dict.fromkeys(members)
        for name, attributes in check._POOL_ATTRIBUTES.items():
            body = "; ".join(f"self.{attribute} = 0" for attribute in attributes)
            made: dict[str, Any] = {}
            exec(f"def make(self):\n    {body}", made)
            self.holder(name).__init__ = made["make"]
        envs = types.SimpleNamespace(SGLANG_PLUGINS=types.SimpleNamespace(get=lambda: self.plugins))
        self.put("sglang.srt.environ.envs", envs)

    def holder(self, name: str) -> Any:
        """Return a module or class, made where it is missing: as in Python, classes have capitals."""
        parent, _, last = name.rpartition(".")
        if last[:1].isupper():
            above = self.holder(parent)
            if not hasattr(above, last):
                setattr(above, last, type(last, (), {"__annotations__": {}}))
            return getattr(above, last)
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            self._monkeypatch.setitem(sys.modules, name, module)
            if parent:
                setattr(self.holder(parent), last, module)
        return sys.modules[name]

    def put(self, target: str, value: Any) -> None:
        parent, _, last = target.rpartition(".")
        setattr(self.holder(parent), last, value)

    def lose(self, target: str) -> None:
        parent, _, last = target.rpartition(".")
        delattr(self.holder(parent), last)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Standin:
    monkeypatch.setattr(check, "_version", lambda: check.VERSION)
    entry = types.SimpleNamespace(name="stepwell", value="stepwell.adapters.sglang.plugin:register")
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [entry] if group == check._GROUP else [])
    return Standin(monkeypatch)


def findings(**given: Any) -> dict[str, Finding]:
    found = list(check.check_sglang(**given))
    for each in found:
        assert each.found
        assert bool(each.why) == bool(each.remedy) == (each.verdict != "ok"), each
    assert len({each.subject for each in found}) >= len(found) - 1, "memory alone may have two lines"
    return {each.subject: each for each in found}


def verdicts(found: Mapping[str, Finding]) -> dict[str, str]:
    return {subject: each.verdict for subject, each in found.items() if each.verdict != "ok"}


def test_the_sglang_that_stepwell_knows_is_all_well(sglang: Standin) -> None:
    found = findings()
    assert verdicts(found) == {}
    assert len(found) == 8
    said = found["SGLang limits"].found
    assert all(word in said for word in ("DCP", "page-envelope", "prefetch threshold"))


@pytest.mark.parametrize(
    ("lost", "subject"),
    [
        (f"{check._BACKEND}.batch_get_v1", "SGLang storage calls"),
        (f"{check._STORAGE}.PoolTransfer", "SGLang storage calls"),
        (f"{check._STORAGE}.PoolHitPolicy", "SGLang storage calls"),
        (f"{check._CONTROLLER}.parse_storage_backend_extra_config", "SGLang dynamic backend"),
        (f"{check._MLA}.get_page_buffer_meta", "SGLang host pools"),
        (f"{check._MHA}.__init__", "SGLang host pools"),
        ("sglang.srt.runtime_context.process_model_config", "SGLang configuration"),
        (f"{plugin._UPDATER}.update_weights_from_disk", "SGLang weight updates"),
    ],
)
def test_a_name_that_is_gone_is_told_with_its_part(sglang: Standin, lost: str, subject: str) -> None:
    sglang.lose(lost)
    found = findings()
    assert verdicts(found) == {subject: "fail"}
    assert lost.removesuffix(".__init__").rpartition(".")[2] in found[subject].found


def test_a_call_with_other_parameters_and_a_field_that_is_gone_are_told(sglang: Standin) -> None:
    sglang.put(f"{check._BACKEND}.batch_exists", lambda self, hashes: 0)
    del sglang.holder(f"{check._STORAGE}.HiCacheStorageConfig").__annotations__["extra_config"]
    del sglang.holder(f"{check._STORAGE}.PoolHitPolicy").__members__["BLOCK_GROUPS"]
    said = findings()["SGLang storage calls"].found
    assert "batch_exists takes ('self', 'hashes')" in said
    assert "HiCacheStorageConfig has no field extra_config" in said
    assert "PoolHitPolicy has no BLOCK_GROUPS" in said


def test_an_import_that_breaks_is_a_finding(sglang: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(check, "missing_hooks", broken)
    found = findings()
    assert verdicts(found) == {"SGLang weight updates": "fail"}
    assert "libcuda.so.1" in found["SGLang weight updates"].found


def test_another_version_is_a_warning_and_is_checked_all_the_same(
    sglang: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_version", lambda: "0.6.0")
    assert verdicts(findings()) == {"SGLang": "warn"}
    assert len(findings()) == 8


@pytest.mark.parametrize(("plugins", "verdict"), [(None, {}), ("", {}), ("a, stepwell", {}), ("a,b", "fail")])
def test_a_filter_that_leaves_the_plug_in_out_is_seen(sglang: Standin, plugins: str | None, verdict: Any) -> None:
    sglang.plugins = plugins
    found = findings()
    assert verdicts(found) == ({"SGLang plug-in": "fail"} if verdict else {})
    if verdict:
        assert found["SGLang plug-in"].remedy == "export SGLANG_PLUGINS=a,b,stepwell"


def test_a_plug_in_that_is_not_installed_is_seen(sglang: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.metadata, "entry_points", lambda group: [])
    assert verdicts(findings()) == {"SGLang plug-in": "fail"}


@pytest.mark.parametrize(
    ("given", "verdict", "said"),
    [
        ({}, "ok", "not compared"),
        ({"hicache_gigabytes": 8.0, "shared_bytes": 20 * GIB}, "ok", "--hicache-size 8 of 1 rank(s), cache: fits"),
        ({"hicache_gigabytes": 8.0, "shared_bytes": 20 * GIB, "ranks": 2}, "warn", "beside a cache of 14.9 GiB"),
        ({"hicache_gigabytes": 8.0, "mode": "buffer_only"}, "warn", "no shared tier"),
        (
            {"hicache_gigabytes": 20.0, "mode": "buffer_only", "shared_bytes": 50 * GIB},
            "warn",
            "18.6 GiB of 1 rank(s) and 50.0 GiB shared are more than 64.0 GiB (MemTotal)",
        ),
    ],
)
def test_memory_is_compared_with_the_shared_tier(
    sglang: Standin, given: dict[str, Any], verdict: str, said: str
) -> None:
    found = findings(has_config=True, memory=Limit(64 * GIB, "MemTotal"), **given)[check.SUBJECT]
    assert found.verdict == verdict
    assert said in found.found


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's other checks are not of interest."""

    def none(*_: object, **__: object) -> Iterator[Finding]:
        yield from ()

    monkeypatch.setattr("stepwell.diagnose", none, raising=False)


@pytest.mark.usefixtures("quick")
def test_without_sglang_there_is_one_clear_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_version", lambda: None)
    assert main(["doctor", "--sglang"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[fail] SGLang: not installed in this environment"
    assert [line for line in lines if line.startswith("[")] == lines[:1]
    assert "pip install 'sglang==0.5.23'" in lines[2]
    assert main(["doctor"]) == 0


@pytest.mark.usefixtures("quick")
def test_the_command_takes_the_shared_tier_from_the_doctors_sources(
    sglang: Standin, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    file = tmp_path / "stepwell.toml"
    file.write_text('[shared]\ncapacity = "1MiB"\n')
    given = ["doctor", "--sglang", "--json", "--hicache-size", "0.02", "--ranks", "2", "--config", str(file)]
    assert main(given) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    said = {each["subject"]: each["found"] for each in found}
    assert said[check.SUBJECT] == "1 MiB shared beside a cache of 38 MiB in SGLang's host memory"
    assert main([*given, "--set", "shared.capacity=100MiB"]) == 0
    assert "fits" in capsys.readouterr().out
    buffer_only = ["--hicache-host-memory-mode", "buffer_only", "--set", "shared=none", "--set", "host=1MiB"]
    assert main([*given, *buffer_only]) == 0
    assert "no shared tier" in capsys.readouterr().out
