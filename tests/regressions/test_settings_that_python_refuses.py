"""Settings with which load_settings ended in a traceback of Python's own, or searched for minutes for lines of keys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from doctor_kit import GEOMETRY_TEXT
from stepwell import settings
from stepwell.cli import main
from stepwell.errors import StepwellUsageError
from stepwell.settings import load_settings

DIGITS = "9" * 5000
WHOLE = f'[shared]\ncapacity = "256MiB"\n{GEOMETRY_TEXT}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 20000, "nested too deeply"),
        ("geometry = " + "{a=" * 5000 + "1" + "}" * 5000, "nested too deeply"),
        (".".join(["shared"] * 2000) + " = 1", "shared names no setting"),
        ("[" + ".".join(["host"] * 2000) + "]", "host names no setting"),
        (f"epoch = {DIGITS}", "digits"),
        (f"{WHOLE}[disk]\npath = 'd'\ncapacity = 0x{'f' * 2000}", "more than a file can have"),
        (f"{WHOLE}[disk]\npath = \"d\\u0000\"\ncapacity = '1GiB'", "NUL"),
        (f"epoch = 18446744073709551616\n{WHOLE}", "2^64 - 1"),
    ],
    ids=["lists", "tables", "a key", "a table", "digits", "a size", "NUL", "an epoch"],
)
def test_a_file_that_is_no_configuration_is_refused_with_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "stepwell.toml"
    file.write_text(text)
    with pytest.raises(StepwellUsageError, match=message.replace("^", r"\^")):
        load_settings(file, environ={})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"epoch={DIGITS}", "2\\^64 - 1"),
        (f"geometry.shard=[{DIGITS}]", "is no list"),
        ("geometry.shard=" + "[" * 3000, "is no list"),
        (f"shared.capacity={DIGITS}GiB", "more than a file can have"),
        (f"host={1 << 63}", "more than a file can have"),
    ],
    ids=["an epoch", "a number in a list", "lists", "a size", "2^63"],
)
def test_an_argument_that_is_no_value_is_refused_with_a_sentence(tmp_path: Path, given: str, message: str) -> None:
    file = tmp_path / "stepwell.toml"
    file.write_text(WHOLE)
    with pytest.raises(StepwellUsageError, match=message):
        load_settings(file, environ={}, arguments=[given])


def test_an_epoch_of_many_noughts_is_its_number(tmp_path: Path) -> None:
    file = tmp_path / "stepwell.toml"
    file.write_text(WHOLE)
    for text, epoch in (("0" * 5000 + "7", 7), ("000", 0), (str(2**64 - 1), 2**64 - 1)):
        assert load_settings(file, environ={}, arguments=[f"epoch={text}"]).config.epoch == epoch


@pytest.mark.parametrize("name", ["shard", "model"])
def test_a_value_of_many_lines_is_not_parsed_once_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    parsed = [0]
    parse = settings.tomllib.loads

    def counted(text: str) -> dict[str, Any]:
        parsed[0] += len(text)
        assert parsed[0] < 2 * settings._MAX_PARSED, "this would go on for minutes"
        return parse(text)

    monkeypatch.setattr(settings.tomllib, "loads", counted)
    file = tmp_path / "stepwell.toml"
    lines = "1,\n" * 20000
    file.write_text(f"epoch = 3\n[geometry]\n{name} = " + (f"[{lines}]" if name == "shard" else f'"""{lines}"""'))
    with pytest.raises(StepwellUsageError, match="geometry"):
        load_settings(file, environ={})


def test_a_working_directory_that_is_gone_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    assert main(["config", "show", "--set", "shared.capacity=1GiB"]) == 0
    assert "the working directory has no stepwell.toml" in capsys.readouterr().out
