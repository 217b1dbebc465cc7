"""A hang-up left the demo's serving process, files and shared memory behind; so did a second Ctrl-C while they went."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from stepwell import cli
from stepwell.demo import run as demo_run
from stepwell.demo.models import Choice
from stepwell.demo.run import ActError
from stepwell.demo.scenario import Scenario

ARGUMENTS = ["demo", "--model", "random", "--quick"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo_run.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "home"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_demo_ended_from_outside_removes_its_files_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, second: signal.Signals
) -> None:
    made: list[Path] = []
    remove = shutil.rmtree
    before = [signal.getsignal(number) for number in (first, second)]
    for number in (first, second):  # where the demo sees to nothing, it is an exception and not the end of the tests
        signal.signal(number, signal.default_int_handler)

    def play(acts: object, base: Scenario, **how: object) -> None:
        made.extend([Path(base.shared_path).parent, Path(base.record).parent])
        signal.raise_signal(first)

    def disturbed(path: Path, **how: object) -> None:
        signal.raise_signal(second)
        remove(path, ignore_errors=True)

    monkeypatch.setattr(demo_run, "_play", play)
    monkeypatch.setattr(shutil, "rmtree", disturbed)
    try:
        code: object = cli.main(ARGUMENTS)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = None
    finally:
        for number, handler in zip((first, second), before, strict=True):
            signal.signal(number, handler)
    assert code == 128 + first
    assert len(made) == 2
    assert not any(path.exists() for path in made)


def test_a_hang_up_that_is_ignored_ends_no_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(acts: object, base: Scenario, **how: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise ActError("went on")

    monkeypatch.setattr(demo_run, "_play", play)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(ARGUMENTS) == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("why", ["no home", "not writable"])
def test_a_user_without_a_home_compiles_among_what_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path, why: str
) -> None:
    def without() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if why == "no home":
        monkeypatch.setattr(demo_run.Path, "home", without)
    else:
        home.write_text("a file, below which nothing can be made")
    caches = []

    def play(acts: object, base: Scenario, **how: object) -> None:
        caches.append(Path(base.compilation_cache))
        raise ActError("seen")

    monkeypatch.setattr(demo_run, "_play", play)
    assert cli.main(ARGUMENTS) == 1
    assert caches[0].parent.parent == tmp_path
    assert not caches[0].parent.exists()


def test_what_a_failed_process_said_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(acts: object, base: Scenario, **how: object) -> None:
        raise ActError("float32[2,3] [/no] [red]mark-up[/]")

    monkeypatch.setattr(demo_run, "_play", play)
    assert cli.main(ARGUMENTS) == 1
    assert "failed: float32[2,3] [/no] [red]mark-up[/]" in capsys.readouterr().out


def test_what_a_file_says_of_its_model_neither_steers_the_terminal_nor_is_mark_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(acts: object, base: Scenario, **how: object) -> None:
        raise ActError("seen")

    monkeypatch.setattr(demo_run, "_play", play)
    why = "\x1b[31m [/no] pip install 'stepwell[demo]'"
    monkeypatch.setattr(demo_run, "find_model", lambda wanted: Choice(None, why))
    assert cli.main(ARGUMENTS) == 1
    assert "model:  [31m [/no] pip install 'stepwell[demo]'" in capsys.readouterr().out


def test_a_disk_too_small_for_the_demo_is_said_without_a_traceback(tmp_path: Path) -> None:
    seen: list[Scenario] = []

    def play(acts: object, base: Scenario, **how: object) -> None:
        seen.append(base)
        raise ActError("seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "_play", play)
        assert cli.main(ARGUMENTS) == 1
    (tmp_path / "file").touch()
    scenario = msgspec.structs.replace(
        seen[0],
        shared_path=str(tmp_path / "shared"),
        disk_path=str(tmp_path / "file"),
        record=str(tmp_path / "record.npz"),
        compilation_cache=str(tmp_path / "jax"),
    )
    ended = subprocess.run(
        [sys.executable, "-m", "stepwell.demo.serve", msgspec.json.encode(scenario).decode()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("VolumeError: ")
    assert "is not a directory; name another" in ended.stderr


def test_a_negative_seed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([*ARGUMENTS, "--seed", "-5"])
    assert "-5 is negative" in capsys.readouterr().err
