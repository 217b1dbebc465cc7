"""The seeded driver: the same seed is the same run, what it finds is shrunk and replayed, and its command can be ended
and gone on with."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.index import Tier
from stepwell.room import Room
from stepwell.testing import driver
from stepwell.testing.__main__ import main, summary
from stepwell.testing.driver import (
    Failure,
    Totals,
    command,
    draw,
    episode,
    kinds_of,
    read,
    replay,
    show,
    shrink,
    world,
)
from stepwell.testing.model import BrokenPromise
from stepwell.testing.world import Shape

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the stores say of the failures that they are given is not of interest."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


SHAPES = {
    "one process": Shape(),
    "two processes": Shape(0, 4, 2, 2, stores=2),
    "two processes without host memory": Shape(1, 0, 2, 2, stores=2),
    "selective disk": Shape(1, 3, 1, 1, selective=True),
    "host memory alone": Shape(2, 5, 0, 0),
    "a device": Shape(1, 4, 1, 1, device=8, step_pages=1),
    "a device above selective disk": Shape(0, 4, 1, 1, selective=True, device=6),
}


def trace(shape: Shape, seed: int, steps: int) -> str:
    """Do an episode and return a digest of all there is to see after each of its steps."""
    random_ = random.Random(seed)
    digest = hashlib.sha256()
    with world(shape, random_.randrange(1 << 30)) as it:
        operations = kinds_of(shape)[1](it)
        for name, arguments in draw(shape, random_, steps):
            has_done = operations.do(name, arguments)
            digest.update(f"{name} {has_done}".encode())
            for caller in it.callers:
                for key, page in caller.model.pages.items():
                    digest.update(key + bytes(page.at) + bytes(page.pins))
                for tier in caller.tiers:
                    digest.update(repr((tier, caller.index.counts(tier))).encode())
                    digest.update(caller.index.rank_order(tier).tobytes())
                digest.update(caller.rows.tobytes())
        operations.end()
    return digest.hexdigest()


def test_volumes_have_the_same_names_in_every_run() -> None:
    """Which of several volumes comes first is which of several calls is the nth, and so which one fails."""

    def names() -> list[str]:
        with world(Shape(0, 0, 1, 2), 7) as it:
            it.callers[0].store.tick()
            return sorted(path.name for path in it.directory.rglob("*.pages"))

    assert names()
    assert names() == names()


@pytest.mark.parametrize("kind", SHAPES)
def test_the_same_seed_gives_the_same_run_byte_for_byte(kind: str) -> None:
    assert trace(SHAPES[kind], 1, 400) == trace(SHAPES[kind], 1, 400)


def test_a_run_does_not_depend_on_the_process_or_on_the_hash_seed() -> None:
    code = "import test_driver as t; print(*(t.trace(shape, 3, 150) for shape in t.SHAPES.values()))"
    here = Path(__file__).parent
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(here)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].split() == [trace(shape, 3, 150) for shape in SHAPES.values()]


def test_another_seed_gives_another_run() -> None:
    assert len({trace(Shape(), seed, 100) for seed in range(3)}) == 3


def test_many_steps_of_many_worlds_find_nothing() -> None:
    totals = Totals()
    for number in range(8):
        episode(2026, number, totals, steps=1500)
    assert totals.steps > 2 * totals.idle
    assert all(totals.counted[what] > 0 for what in ("hits", "saved", "loaded", "evicted"))


the_evict = Room.evict


def too_many(self: Room, tier: Tier, pages: int) -> int:
    """Have twice as many pages leave as were asked for: what Room.evict must not do."""
    return the_evict(self, tier, 2 * pages)


def broken(monkeypatch: pytest.MonkeyPatch, seed: int) -> Failure:
    """Break the store, and return what the driver finds."""
    monkeypatch.setattr(Room, "evict", too_many)
    for number in range(20):
        try:
            episode(seed, number, Totals(), steps=1000)
        except Failure as failure:
            return failure
    raise AssertionError("nothing was found")


def test_a_finding_is_shrunk_to_a_few_steps_that_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = broken(monkeypatch, 1)
    assert isinstance(failure.cause, BrokenPromise)
    small = shrink(failure)
    assert len(small.steps) <= 8
    again = read("\n".join(map(show, small.steps)))
    assert again == [(name, {**arguments}) for name, arguments in small.steps]
    with pytest.raises(Failure) as found:
        replay(again)
    assert str(found.value) == str(small)
    monkeypatch.undo()
    replay(again)  # and the store as it is does not fail


def test_the_command_prints_how_to_do_a_finding_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Room, "evict", too_many)
    monkeypatch.setattr(driver, "SHRINK_SECONDS", 10.0)
    assert main(["--seed", "1", "--steps", "20000", "--jobs", "1"]) == 1
    said = capsys.readouterr().err
    replayed = said.split("again: python -m stepwell.testing --replay ")[1].strip().strip("'")
    assert replayed.startswith("begin(")
    assert main(["--replay", replayed]) == 1
    monkeypatch.undo()
    assert main(["--replay", replayed]) == 0


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepwell.testing", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_it_ends_quietly_where_nobody_reads_what_it_prints() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "stepwell.testing", "--steps", "0"],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (1, "")


def counted(said: str) -> dict[str, Any]:
    """Return what does not depend on how fast it was."""
    found: dict[str, Any] = json.loads(said)
    return {key: found[key] for key in ("steps", "idle", "episodes", "operations", "counted")}


def test_a_run_in_slices_is_the_run_in_one(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for _ in range(20):
        ended = run_module("--seed", "5", "--steps", "9000", "--state", str(state), "--seconds", "0.1", "--json")
        assert ended.returncode == 0, ended.stderr
        if json.loads(ended.stdout)["steps"] >= 9000:
            break
    whole = run_module("--seed", "5", "--steps", "9000", "--jobs", "1", "--json")
    assert counted(ended.stdout) == counted(whole.stdout)
    assert counted(state.read_text()) == counted(whole.stdout)


# ---- side by side ----------------------------------------------------------------------------------------------------

WORKER = "'stepwell.testing.jobs' in sys.orig_argv"


def run_with(site: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Begin the command, with something done first in its process and in its workers', and worlds below `site`."""
    (site / "sitecustomize.py").write_text(
        "import os, pathlib, signal, sys\nfrom stepwell.room import Room\nfrom stepwell.testing import driver\n"
        f"driver.MEMORY = pathlib.Path({str(site)!r})\n{textwrap.dedent(code)}\n"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "stepwell.testing", *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_episodes_side_by_side_are_those_of_one_process(tmp_path: Path) -> None:
    said = [
        run_module("--seed", "6", "--steps", "14000", "--jobs", jobs, "--json", "--state", str(tmp_path / jobs))
        for jobs in ("1", "3")
    ]
    assert [each.returncode for each in said] == [0, 0], said
    assert counted(said[0].stdout) == counted(said[1].stdout)
    assert counted((tmp_path / "1").read_text()) == counted((tmp_path / "3").read_text())


def test_what_is_found_beside_other_episodes_is_shrunk_and_done_again(tmp_path: Path) -> None:
    code = """
        the_evict = Room.evict
        Room.evict = lambda self, tier, pages: the_evict(self, tier, 2 * pages)
    """
    with run_with(tmp_path, code, "--seed", "1", "--steps", "20000", "--jobs", "2") as ended:
        _, said = ended.communicate(timeout=300)
    assert ended.returncode == 1
    assert "seed 1, episode " in said
    assert "again: python -m stepwell.testing --replay 'begin(" in said


def test_an_episode_that_fails_beside_others_alone_is_named(tmp_path: Path) -> None:
    code = f"""
        the_evict = Room.evict
        if {WORKER}:
            Room.evict = lambda self, tier, pages: the_evict(self, tier, 2 * pages)
    """
    with run_with(tmp_path, code, "--seed", "1", "--steps", "20000", "--jobs", "2") as ended:
        _, said = ended.communicate(timeout=300)
    assert ended.returncode == 1
    assert "its steps, done again in another process, found nothing" in said
    number = said.split("again: python -m stepwell.testing --seed 1 --episode ")[1].strip()
    alone = run_module("--seed", "1", "--episode", number)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert "in 1 episodes" in alone.stdout


def test_an_episode_whose_process_dies_is_named(tmp_path: Path) -> None:
    code = f"""
        if {WORKER}:
            Room.evict = lambda self, tier, pages: os.kill(os.getpid(), signal.SIGKILL)
    """
    with run_with(tmp_path, code, "--seed", "1", "--steps", "20000", "--jobs", "2") as ended:
        said, why = ended.communicate(timeout=300)
    assert ended.returncode == 1
    assert "its process died: SIGKILL" in why
    assert "again: python -m stepwell.testing --seed 1 --episode " in why
    assert said


def children(pid: int) -> list[int]:
    told = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(each) for line in told for each in line.split()]


def test_an_interrupt_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    site, told = tmp_path / "site", tmp_path / "told"
    site.mkdir()
    os.mkfifo(told)
    code = f"""
        if {WORKER}:
            the_evict = Room.evict

            def evict(self, tier, pages):
                Room.evict = the_evict
                with open({str(told)!r}, "w") as fifo:
                    print("evicting", file=fifo)
                return the_evict(self, tier, pages)

            Room.evict = evict
    """
    with run_with(site, code, "--seed", "1", "--steps", "10000000", "--jobs", "2") as ended:
        with told.open() as fifo:
            assert fifo.readline() == "evicting\n"
        workers = children(ended.pid)
        assert len(workers) == 2
        ended.send_signal(signal.SIGINT)
        said, why = ended.communicate(timeout=300)
    assert (ended.returncode, why) == (130, "")
    assert "steps in " in said
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert [path.name for path in site.iterdir() if path.name.startswith("sw-test-")] == []


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("save(who=0)", "the first step"),
        ("begin(host=1); dance()", "dance is no step"),
        ("begin(host=1); 1 + 1", "1:16 is no step"),
        ("begin(", "no steps"),
        ("begin(seed=1, host=" + "(" * 10_000, "no steps"),
        ("begin(seed=" + "1+" * 50_000 + "1)", "no steps"),
        ("begin(seed=1" + "0" * 10_000 + ")", "4300 digits"),
        ("begin(seed=1, host=0x" + "f" * 10_000 + ")", "4300 digits"),
        ("begin(seed=1)\0", "null bytes"),
        ("begin(host=1)", "it has a seed"),
        ("begin(seed=1, hosts=1)", "it has a seed"),
        ("begin(seed=1, host='a')", "host is never 'a'"),
        ("begin(seed=1, host=True)", "host is never True"),
        ("begin(seed=1, host=-1)", "no such world"),
        ("begin(seed=1, stores=2)", "no such world"),
        ("begin(seed=1, device=4, host=0)", "no such world"),
        ("begin(seed=1); begin(seed=1)", "begin is no step of a world"),
        ("begin(seed=1); drain(who=0)", "drain is no step of a world"),
        ("begin(seed=1); move(who=0)", "move is given .who., it has .who, units."),
        ("begin(seed=1); move(**{'who': 0})", "move is given"),
        ("begin(seed=1); move(who=0, units=7)", "units is never 7"),
        ("begin(seed=1); move(who=0, units=print(1))", "malformed"),
        ("begin(seed=1); save(who=0, path={[]}, space=0)", "unhashable"),
    ],
)
def test_steps_that_are_none_are_refused(text: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=why):
        read(text)
    assert refused(capsys, "--replay", text)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command with what it must refuse: a line that says why, and the exit code of misuse."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no state of a run"),
        ("[]", "no state of a run"),
        ('{"seed": 3}', "no state of a run"),
        ('{"seed": 3, "steps": 1, "ep', "no state of a run"),
        (json.dumps({**summary(3, Totals()), "steps": "1"}), "'1' is no whole number"),
        (json.dumps({**summary(3, Totals()), "operations": {"save": "a"}}), "'a' is no whole number"),
        (json.dumps(summary(4, Totals())), "of seed 4, not 3"),
    ],
)
def test_a_state_of_another_seed_or_of_nothing_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.json"
    state.write_text(text)
    assert why in refused(capsys, "--seed", "3", "--state", str(state))
    assert state.read_text() == text


def test_a_state_that_cannot_be_kept_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no file" in refused(capsys, "--state", str(tmp_path))
    assert "is no file" in refused(capsys, "--state", "/dev/zero")
    assert "cannot be written" in refused(capsys, "--state", str(tmp_path / "none" / "state.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [
        ("--steps", "-1"),
        ("--seconds", "nan"),
        ("--seconds", "-1"),
        ("--jobs", "0"),
        ("--episode", "1", "--hypothesis"),
        ("--replay", "none"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *given)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert "rich" in refused(capsys, "--steps", "1")


def test_a_world_is_made_only_where_it_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "MEMORY", tmp_path / "none")
    assert driver.place() == Path(tempfile.gettempdir())
    monkeypatch.setattr(driver, "WORLD_BYTES", 1 << 60)
    assert "MiB free" in refused(capsys, "--steps", "1")


def test_the_model_knows_after_failures_what_continues_pages_that_are_nowhere() -> None:
    steps = """
        begin(geometry=0, host=4, shared=1, disk=1, selective=True, stores=1, device=0, step_pages=64, seed=151852560)
        save_keys(who=0, path=(0, 1, 1), space=0, first=0)
        save(who=0, path=(0, 1, 1, 0), space=2)
        save_keys(who=0, path=(1, 1, 1), space=0, first=0)
        hold(who=0, path=(0, 1), space=2)
        save(who=0, path=(2,), space=0)
        save(who=0, path=(0, 1, 1), space=0)
        settle(who=0)
        load_keys(who=0, path=(2,), space=0, first=0)
        save(who=0, path=(0, 0, 0, 0, 0), space=1)
        load(who=0, path=(0, 1, 1), space=0, order='page', deadline=None)
        settle(who=0)
        fail(point='file.pread', error=5, nth=0, steps=10)
        evict(who=0, tier=3, pages=100)
        save(who=0, path=(0,), space=0)
        load(who=0, path=(0,), space=0, order='page', deadline=None)
        save(who=0, path=(0,), space=0)
        move(who=0, units=1)
        move(who=0, units=1)
        move(who=0, units=1)
        probe(who=0, path=(0,), space=0, lease=0.0, readahead=False)
        save(who=0, path=(1, 0), space=0)
        hold(who=0, path=(0,), space=0)
        save_keys(who=0, path=(0, 1, 1), space=0, first=2)
    """
    replay(read(textwrap.dedent(steps)))


def test_a_pin_that_is_refused_uses_no_page_behind_a_damaged_one() -> None:
    steps = """
        begin(geometry=0, host=0, shared=2, disk=0, selective=False, stores=1, device=0, step_pages=64, seed=0)
        save_keys(who=0, path=(1, 1, 0, 1), space=1, first=0)
        pin(who=0, path=(1, 1, 0, 1), space=1, ttl=1.0)
        save_keys(who=0, path=(0, 0, 1), space=0, first=0)
        damage(who=0, path=(0, 0), space=0, tier=2, page=1)
        save(who=0, path=(2, 0), space=2)
        load(who=0, path=(0, 0), space=0, order='page', deadline=None)
        pin(who=0, path=(2,), space=2, ttl=1.0)
        move(who=0, units=4)
        pin(who=0, path=(0, 0, 1), space=0, ttl=1.0)
        audit(who=0)
    """
    replay(read(textwrap.dedent(steps)))


def test_a_command_can_be_pasted_into_a_shell() -> None:
    steps = [("begin", {"host": 4, "seed": 1}), ("load", {"order": "page", "path": (0, 1)})]
    assert command(steps).endswith(""" --replay 'begin(host=4, seed=1); load(order='"'"'page'"'"', path=(0, 1))'""")
