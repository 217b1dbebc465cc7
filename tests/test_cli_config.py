"""`stepwell config show` and `stepwell doctor` on the command line: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import stepwell
from doctor_kit import GEOMETRY_TEXT, clean_environment
from stepwell.cli import main

FILE = f"""host = "1MiB"
[shared]
capacity = "64MiB"
path = "/dev/shm/x"
volume_bytes = "2MiB"
{GEOMETRY_TEXT}"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", clean_environment())
    return tmp_path


def test_every_value_is_shown_with_its_origin(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "stepwell.toml").write_text(FILE)
    monkeypatch.setattr(os, "environ", {"STEPWELL_SHARED_SHARE": "8MiB"})
    assert main(["config", "show", "--set", "copy_threads=2"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if not line.startswith("#")}
    assert out.startswith(f"# file stepwell.toml, found in {place}\n")
    assert lines["host.capacity"].split() == ["1", "MiB", "stepwell.toml:1"]
    assert lines["shared.share"].split() == ["8", "MiB", "STEPWELL_SHARED_SHARE"]
    assert lines["copy_threads"].split() == ["2", "--set", "copy_threads=2"]
    assert lines["io_threads"].split() == ["2", "default"]
    assert lines["geometry.page_bytes"].split() == ["4", "KiB", "derived"]
    assert lines["host.pages"].split() == ["256", "derived"]
    assert lines["host.tokens"].split() == ["4,096", "derived"]
    assert lines["shared.directory"].split() == ["/dev/shm/x", "derived"]


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_a_volume_that_holds_no_page_is_refused_as_a_store_refuses_it(
    place: Path, capsys: pytest.CaptureFixture[str], json_too: list[str]
) -> None:
    (place / "stepwell.toml").write_text(FILE)
    assert main(["config", "show", "--set", "shared.volume_bytes=100", *json_too]) == 2
    shown = capsys.readouterr()
    assert "shared.pages" in shown.out
    assert "shared: a volume holds no page, a store refuses to open; raise shared.volume_bytes" in shown.err


def test_the_pages_that_are_shown_are_those_that_a_store_has(
    place: Path, capsys: pytest.CaptureFixture[str], directories: object
) -> None:
    import stepwell as sw
    from store_kit import Directories

    assert isinstance(directories, Directories)
    (place / "stepwell.toml").write_text(
        FILE.replace("/dev/shm/x", str(directories.shared)).replace('"64MiB"', '"2MiB"')
        + f"[disk]\npath = '{directories.disk}'\ncapacity = '3MiB'\nvolume_bytes = '3MiB'\n"
    )
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["values"]
    with sw.PageStore(sw.load_settings().config) as store:
        capacities = {name: tier.capacity for name, tier in store.stats().tiers.items()}
    assert capacities == {name: shown[f"{name}.pages"]["value"] for name in capacities}
    assert shown["shared.volumes"] == {"value": 1, "origin": "derived"}


def test_without_a_geometry_what_the_engine_decides_is_left_out(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--set", "disk.capacity=100GiB", "--set", "disk.path=kv"]) == 0
    out = capsys.readouterr().out
    assert "# no geometry: the engine gives it" in out
    assert "geometry." not in out
    assert "disk.tokens" not in out
    assert str(place / "kv") in out
    assert "3.12 GiB" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "hots=1"], "--set hots=1: hots names no setting; did you mean host?"),
        (["--config", "absent.toml"], "absent.toml: cannot be read"),
        ([], "no tier: give at least one of device, host, shared, disk (no file: none was named"),
    ],
)
def test_what_makes_no_configuration_is_refused_with_exit_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["config", "show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"stepwell config: {words}")


def test_the_doctor_prints_verdict_reason_and_remedy_and_counts(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-round", "--set", "host=9000TiB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("[fail] memory: "))
    assert "host 9000 TiB" in lines[at]
    assert lines[at + 1].startswith("         why:  ")
    assert lines[at + 2].startswith("         mend: --set host=")
    assert lines[-1].endswith(" 1 fail")
    remedy = lines[at + 2].split()[-1]
    assert main(["doctor", "--no-round", "--set", "host=9000TiB", "--set", remedy]) == 0
    assert "[ok]   memory: " in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"stepwell {stepwell.__version__}\n"
