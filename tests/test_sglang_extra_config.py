"""`stepwell doctor --sglang` reads SGLang's extra config as SGLang does, and says what an engine would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell import Finding
from stepwell.adapters.sglang import check
from stepwell.adapters.sglang.extra_config import SUBJECT, check_extra_config, tiers_as_arguments
from stepwell.cli import main

GOOD: dict[str, Any] = {
    "backend_name": "stepwell",
    "module_path": "stepwell.adapters.sglang",
    "class_name": "StepwellStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "stepwell": {"shared": {"path": "/dev/shm/x", "capacity": "1GiB"}, "disk": {"path": "/x", "capacity": "2GiB"}},
}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name not in names}


def test_what_is_right_is_one_line_that_says_what_it_comes_to() -> None:
    (found,), settings = check_extra_config(json.dumps({**GOOD, "prefetch_timeout_base": 2, "prefetch_threshold": 64}))
    assert (found.verdict, found.subject) == ("ok", SUBJECT)
    assert found.found == (
        "shared 1GiB in /dev/shm/x, disk 2GiB in /x; loading a hit may take 2 s and 0.25 s per 1,024 tokens"
    )
    assert settings is not None
    assert tiers_as_arguments(settings) == [
        "shared.path=/dev/shm/x",
        "shared.capacity=1GiB",
        "disk.path=/x",
        "disk.capacity=2GiB",
    ]


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_file_is_read_by_its_ending(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"sglang.{ending}"
    table = '[stepwell.disk]\npath = "/x"\ncapacity = "2GiB"\ndirect_io = false\n'
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in without("stepwell").items()) + table
    disk = {"path": "/x", "capacity": "2GiB", "direct_io": False}
    file.write_text(toml if ending == "toml" else json.dumps({**GOOD, "stepwell": {"disk": disk}}))
    (found,), settings = check_extra_config(f"@{file}")
    assert found.verdict == "ok"
    assert settings is not None
    assert tiers_as_arguments(settings) == [
        "shared=none",
        "disk.path=/x",
        "disk.capacity=2GiB",
        "disk.direct_io=false",
    ]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "not a table"),
        ("@/nowhere/sglang.json", "/nowhere/sglang.json cannot be read: No such file or directory"),
        ("@/etc/stepwell/sglang", "SGLang reads files that end in .json, .toml, .yaml, .yml"),
        (without("module_path"), 'module_path is missing; SGLang wants "module_path": "stepwell.adapters.sglang"'),
        ({**GOOD, "class_name": "Stepwell"}, "class_name is 'Stepwell'"),
        ({**GOOD, "prefetch_treshold": 64}, "'prefetch_treshold' is no key of it"),
        ({**GOOD, "prefetch_threshold": "64"}, "prefetch_threshold is '64'"),
        ({**GOOD, "prefetch_timeout_base": -1}, "prefetch_timeout_base is -1"),
        ({**GOOD, "prefetch_timeout_per_ki_token": "1"}, "prefetch_timeout_per_ki_token is '1'"),
        ({**GOOD, "hicache_storage_pass_prefix_keys": 1}, "hicache_storage_pass_prefix_keys is 1"),
        (without("stepwell"), "'stepwell' is None"),
        ({**GOOD, "stepwell": {"shared": {"capacity": "8GB?"}}}, "'8GB?' is not a size"),
        ({**GOOD, "stepwell": {"disk": {"capacity": "8GiB"}}}, "disk.path: missing"),
        ({**GOOD, "stepwell": {"disk": {"path": "/x", "capacity": "8GiB", "sahre": 1}}}, "did you mean disk.share?"),
        ({**GOOD, "stepwell": {"shared": {"capacity": "8GiB"}, "load_bound": 0}}, "stepwell.load_bound is 0"),
    ],
)
def test_what_would_be_refused_is_a_fail_with_the_reason(extra: Any, said: str) -> None:
    (found,), settings = check_extra_config(extra if isinstance(extra, str) else json.dumps(extra))
    assert (found.verdict, settings) == ("fail", None)
    assert said in found.found
    assert found.why
    assert found.remedy


def test_a_file_without_its_at_sign_is_told(tmp_path: Path) -> None:
    file = tmp_path / "sglang.json"
    file.write_text(json.dumps(GOOD))
    (found,), _ = check_extra_config(str(file))
    assert f"a file is given as @{file}" in found.found


def test_what_works_but_worse_is_warned_of() -> None:
    found, settings = check_extra_config(json.dumps(without("interface_v1", "hicache_storage_pass_prefix_keys")))
    assert settings is not None
    assert [each.verdict for each in found] == ["warn", "warn"]
    assert [each.found.split()[0] for each in found] == ["interface_v1", "hicache_storage_pass_prefix_keys"]
    assert all(each.why and each.remedy for each in found)


def test_the_doctor_checks_the_tiers_of_the_extra_config_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside SGLang neither stepwell.toml nor STEPWELL_* is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPWELL_SHARED_CAPACITY", "3MiB")
    (tmp_path / "stepwell.toml").write_text('[disk]\npath = "/elsewhere"\ncapacity = "1MiB"\n')
    asked: dict[str, Any] = {}

    def sglang(**given: Any) -> Iterator[Finding]:
        asked.update(given)
        yield from ()

    monkeypatch.setattr(check, "check_sglang", sglang)
    disk = {"path": str(tmp_path / "disk"), "capacity": "64MiB"}
    extra = json.dumps({**GOOD, "stepwell": {"disk": disk}})
    assert main(["doctor", "--no-round", "--json", "--sglang", "--hicache-storage-backend-extra-config", extra]) == 0
    found = {each["subject"]: each["found"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "disk 64MiB in" in found[SUBJECT]
    assert "tiers disk" in found["configuration"]
    assert str(tmp_path / "disk") in found["disk directory"]
    assert (asked["has_config"], asked["shared_bytes"]) == (True, None)
    assert main(["doctor", "--no-round", "--hicache-storage-backend-extra-config", "{"]) == 1
    said = capsys.readouterr().out
    assert "[fail] SGLang extra config: not JSON" in said
    assert "not checked: the extra config would be refused" in said
    assert "/dev/shm/stepwell" not in said
