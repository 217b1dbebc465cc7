"""Names chosen by others reached the terminal with their control characters; `| head` and nohup ended in tracebacks."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doctor_kit import clean_environment
from stepwell.cli import main
from stepwell.cli.directories import progress_bar

HOSTILE = "red\x1b[31m\n[ok] lies\x9b\u202e\udcff"
SHOWN = r"red\x1b[31m\n[ok] lies\x9b\u202e\udcff"
COMMAND = [sys.executable, "-m", "stepwell.cli"]


@pytest.mark.parametrize("command", ["inspect", "verify", "gc", "config", "doctor"])
def test_a_name_steers_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.chdir(tmp_path)
    path = f"{tmp_path}/{HOSTILE}"
    settings = ["--set", "shared.capacity=64MiB", "--set", f"shared.path={path}"]
    arguments = {
        "config": ["config", "show", *settings],
        "doctor": ["doctor", "--no-round", *settings],
    }.get(command, [command, path])
    main(arguments)
    told = capsys.readouterr()
    assert SHOWN in told.out
    assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)
    assert "\n[ok] lies" not in told.out
    main([command, "none", "--config", path] if command in ("inspect", "verify") else arguments)
    assert "\x1b" not in capsys.readouterr().err


def test_what_the_stream_s_encoding_has_not_is_written_as_an_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["inspect", str(tmp_path / "dépôt")]) == 1
    assert rb"d\xe9p\xf4t" in stream.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments",
    [["config", "show"], ["config", "show", "--json"], ["doctor", "--no-round"], ["inspect", "none"]],
    ids=" ".join,
)
def test_a_reader_that_stops_early_is_no_error_of_ours(tmp_path: Path, arguments: list[str]) -> None:
    unread, written = os.pipe()
    os.close(unread)
    try:
        given = [] if arguments[0] == "inspect" else ["--set", "shared.capacity=64MiB"]
        ended = subprocess.run(
            [*COMMAND, *arguments, *given],
            stdout=written,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            cwd=tmp_path,
            check=False,
        )
    finally:
        os.close(written)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_closed_standard_output_is_no_error_of_ours(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec {' '.join(COMMAND)} config show --set shared.capacity=64MiB >&-"],
        stderr=subprocess.PIPE,
        env=clean_environment(),
        cwd=tmp_path,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_name_is_no_mark_up_of_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(f"verify [/no] [red]{HOSTILE}") as progress:
        assert progress is not None
        progress(1, 2)
    assert f"verify [/no] [red]{SHOWN}"[:40] in terminal.getvalue()


def test_ctrl_c_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **how: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("stepwell.inspection.inspect_directory", interrupted)
    assert main(["inspect", "none"]) == 130
    assert capsys.readouterr().err == "stepwell inspect: interrupted\n"
