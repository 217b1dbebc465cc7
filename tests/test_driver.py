"""The seeded driver: the same seed is the same run, what it finds is shrunk and replayed, and its command can be ended
and gone on with."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.index import Tier
from stepwell.room import Room
from stepwell.testing import driver
from stepwell.testing.__main__ import main
from stepwell.testing.driver import (
    Failure,
    Totals,
    command,
    draw,
    episode,
    kinds_of,
    read,
    replay,
    shape_of,
    show,
    shrink,
    world,
)
from stepwell.testing.model import BrokenPromise

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the stores say of the failures that they are given is not of interest."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def trace(seed: int, steps: int) -> str:
    """Do an episode and return a digest of all there is to see after each of its steps."""
    random_ = random.Random(seed)
    shape, mover_seed = shape_of(random_), random_.randrange(1 << 30)
    digest = hashlib.sha256()
    with world(shape, mover_seed) as it:
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


@pytest.mark.parametrize("seed", range(6))
def test_the_same_seed_gives_the_same_run_byte_for_byte(seed: int) -> None:
    assert trace(seed, 400) == trace(seed, 400)


def test_another_seed_gives_another_run() -> None:
    assert len({trace(seed, 100) for seed in range(3)}) == 3


def test_many_steps_of_many_worlds_find_nothing() -> None:
    totals = Totals()
    for number in range(8):
        episode(2026, number, totals, steps=1500)
    assert totals.steps > 2 * totals.idle
    assert all(totals.counted[what] > 0 for what in ("hits", "saved", "loaded", "evicted"))


def too_many(self: Room, tier: Tier, pages: int) -> int:
    """Have twice as many pages leave as were asked for: what Room.evict must not do."""
    if pages <= 0 or tier not in self.all_tiers:
        return 0
    return self._free(tier, self._index.take_victims(tier, 2 * pages))


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
    assert main(["--seed", "1", "--steps", "20000"]) == 1
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


def test_a_run_in_slices_is_the_run_in_one(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for _ in range(20):
        ended = run_module("--seed", "5", "--steps", "9000", "--state", str(state), "--seconds", "0.1", "--json")
        assert ended.returncode == 0, ended.stderr
        if json.loads(ended.stdout)["steps"] >= 9000:
            break
    whole = run_module("--seed", "5", "--steps", "9000", "--json")

    def counted(said: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(said)
        return {key: found[key] for key in ("steps", "idle", "episodes", "operations", "counted")}

    assert counted(ended.stdout) == counted(whole.stdout)
    assert counted(state.read_text()) == counted(whole.stdout)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("save(who=0)", "the first step"),
        ("begin(host=1); dance()", "dance is no step"),
        ("begin(host=1); 1 + 1", "is no step"),
        ("begin(", "no steps"),
    ],
)
def test_steps_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(text)


def test_a_state_of_another_seed_or_of_nothing_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"seed": 3}')
    with pytest.raises(SystemExit, match="of seed 3"):
        main(["--seed", "4", "--state", str(state)])
    with pytest.raises(SystemExit, match="no state of a run"):
        main(["--seed", "3", "--state", str(state)])


def test_a_command_can_be_pasted_into_a_shell() -> None:
    steps = [("begin", {"host": 4, "seed": 1}), ("load", {"order": "page", "path": (0, 1)})]
    assert command(steps).endswith(""" --replay 'begin(host=4, seed=1); load(order='"'"'page'"'"', path=(0, 1))'""")
