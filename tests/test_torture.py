"""`stepwell torture`: it finds nothing in a store that holds what it promises, and everything that does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell import cli
from stepwell.hashing import prefix_hashes
from stepwell.torture.ledger import Ledger, Line
from stepwell.torture.points import POINTS, occurrences
from stepwell.torture.results import Result, Row
from stepwell.torture.run import TortureOptions
from stepwell.torture.universe import PAGE_TOKENS, Universe

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SECONDS = 240  # until a run that takes a few seconds is taken to hang


def run(directory: Path, *arguments: str, program: str | None = None) -> tuple[int, dict[str, Any], str]:
    """Run the command in a process of its own, which forks. Returns (exit code, result, what it said)."""
    start = ["-m", "stepwell.cli"] if program is None else ["-c", program]
    done = subprocess.run(
        [sys.executable, *start, "torture", "--json", "--directory", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    result = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return done.returncode, result, done.stdout + done.stderr


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        ("--kills", "9"),
        ("--kills", "6", "--tiers", "both", "--processes", "2", "--rolling"),
        ("--kills", "6", "--tiers", "disk", "--damage", "--errors"),
        ("--points", "--occurrences", "1", "--tiers", "both", "--world", str(2 * POINTS.index("mover.unit"))),
    ],
    ids=["one", "rolling", "damage", "point"],
)
def test_a_store_that_is_killed_keeps_what_it_acknowledged(tmp_path: Path, how: tuple[str, ...]) -> None:
    code, result, said = run(tmp_path, *how)
    assert (code, result["problems"]) == (0, []), said
    assert sum(row["kills"] for row in result["rows"]) >= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sabotage", "verdict"),
    [("swap_saved_pages", "wrong"), ("lose_saved_pages", "lost"), ("return_dropped_pages", "phantom")],
)
def test_a_store_that_does_not_is_found_out(tmp_path: Path, sabotage: str, verdict: str) -> None:
    """The instants of kills are the machine's: what one seed does not meet, the next does."""
    for seed in range(8):
        how = ["--kills", "12", "--tiers", "shared", "--sabotage", sabotage, "--seed", str(seed)]
        code, result, said = run(tmp_path, *how)
        if code == 1:
            break
    assert code == 1, said
    assert sum(row[verdict] for row in result["rows"]) > 0
    assert {problem["what"] for problem in result["problems"]} <= {verdict, "other"}
    assert f"--seed {seed} --tiers shared --world " in result["problems"][0]["again"]


STRANGE = """
import sys, threading
from stepwell.torture import child, kennel
def hang(self):
    self._say("t")
    threading.Event().wait()
def leave(self):
    child.os._exit(7)
def crash(self):
    child.os.kill(child.os.getpid(), child.signal.SIGSEGV)
def wait_for(self, one, what):
    self.hear(60, lambda: "t" in one.said or one.is_over)
    kennel.PATIENCE = 0.1
    return patient(self, one, what)
patient, kennel.Kennel.wait_for = kennel.Kennel.wait_for, wait_for
child.Worker._live = {what}
from stepwell import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("what", "told"),
    [("hang", ["hangs", "in hang", "threading.py"]), ("leave", ["status 7"]), ("crash", ["status -11", "in crash"])],
)
def test_a_child_that_hangs_or_ends_by_itself_is_told_of(tmp_path: Path, what: str, told: list[str]) -> None:
    code, result, said = run(tmp_path, "--points", "--world", "0", "--tiers", "disk", program=STRANGE.format(what=what))
    assert code == 1, said
    assert result["rows"][0]["other"] > 0
    for words in told:
        assert words in result["problems"][0]["text"]


ENDED = """
import json, signal, sys
from stepwell.torture import run
def told(self):
    print(json.dumps([self._world.shared_directory.as_posix(), *(child.pid for child in self.kennel.children)]))
    sys.stdout.flush()
    signal.raise_signal(signal.{name})
run._Life._count_kill = told
from stepwell import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_run_ended_from_outside_takes_its_children_and_files_along(tmp_path: Path, name: str, code: int) -> None:
    program = ENDED.format(name=name)
    ended, _, said = run(tmp_path, "--processes", "2", "--tiers", "both", program=program)
    assert ended == code, said
    shared, *pids = json.loads(said.splitlines()[0])
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(shared).exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-bytes", "100"], "multiple of 16"),
        (["--rolling"], "--processes 2"),
        (["--processes", "9"], "--processes 9: at most 8"),
        (["--points", "--damage"], "leave --processes, --damage, --errors out"),
        (["--directory", "/nowhere"], "/nowhere"),
        (["--kills", "0"], "not a positive number"),
    ],
)
def test_what_cannot_be_asked_for_is_said_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["torture", *arguments])
    assert message in capsys.readouterr().err


# ---- its parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acknowledged", "verdict"),
    [((0, 0), "not judged"), ((5, 0), "all that was judged holds"), ((5, 5), "all of it holds")],
)
def test_what_was_not_judged_is_not_said_to_hold(acknowledged: tuple[int, int], verdict: str) -> None:
    rows = [Row(tiers, kills=1, judged=1, acknowledged=pages) for tiers, pages in zip("sd", acknowledged, strict=True)]
    result = Result(ok=True, seconds=1.0, settings={}, rows=rows, problems=[])
    assert result.verdict == verdict
    assert [": not judged: " in line for line in result.lines()].count(True) == acknowledged.count(0)
    assert not Row("shared", acknowledged=5, judged=1).is_judged


def test_a_world_is_run_again_with_what_was_asked_for() -> None:
    assert " --kills 70 " in TortureOptions(kills=70).again("disk", 3)
    assert " --minutes 0.5 " in TortureOptions(minutes=0.5).again("disk", 3)
    assert " --directory '/a b' " in TortureOptions(directory="/a b").again("disk", 3)
    assert " --occurrences 5 " in TortureOptions(points=True, occurrences=5).again("disk", 3)


def test_every_fault_point_of_the_core_is_named() -> None:
    found = set()
    for path in CSRC.glob("*.cc"):
        found |= set(re.findall(r'\b(?:reach|fails)\("([a-z_]+\.[a-z_]+)"\)', path.read_text()))
    assert found == set(POINTS)


def test_arrivals_to_kill_at_grow_further_and_further_apart() -> None:
    assert occurrences(8) == [1, 2, 3, 4, 6, 9, 13, 19]


@pytest.fixture(scope="module")
def universe() -> Universe:
    return Universe.made(5, pages=60, page_bytes=256)


def test_pages_are_named_by_the_keys_that_the_store_gives_them(universe: Universe) -> None:
    for chain in (*universe.chains, *universe.strangers):
        seed = None if chain.namespace is None else chain.namespace.seed()
        keys = prefix_hashes(chain.tokens, page_tokens=PAGE_TOKENS, seed=seed)
        assert [key.tobytes() for key in keys] == [universe.keys[page] for page in chain.pages]
    assert len(set(universe.keys)) == len(universe.keys)


def test_no_stranger_is_a_chain_that_is_saved(universe: Universe) -> None:
    assert all(any(page >= universe.known for page in chain.pages) for chain in universe.strangers)
    assert all(page < universe.known for chain in universe.chains for page in chain.pages)


def test_each_page_has_bytes_of_its_own_under_each_epoch(universe: Universe) -> None:
    rows = [universe.stamp(page, epoch) for page in range(len(universe.keys)) for epoch in (1, 2)]
    assert len({row.tobytes() for row in rows}) == len(rows)
    again = Universe.made(5, pages=60, page_bytes=256)
    assert np.array_equal(again.stamp(3, 1), universe.stamp(3, 1))


class Told:
    """A ledger, told of lines in short."""

    def __init__(self, universe: Universe, *, roomy: bool = True, alone: bool = True) -> None:
        self.ledger = Ledger(universe, roomy, alone)
        self._at = 0

    def __call__(self, child: int, what: str, *words: object) -> Ledger:
        self._at += 1
        self.ledger.apply([Line(self._at, child, what, tuple(map(str, words)))])
        return self.ledger


def names(universe: Universe, chain: int, first: int, last: int, epoch: int = 1) -> set[tuple[int, int]]:
    return {(page, epoch) for page in universe.chains[chain].pages[first:last]}


@pytest.fixture(scope="module")
def long(universe: Universe) -> int:
    """A chain of four pages at least."""
    return next(at for at, chain in enumerate(universe.chains) if len(chain.pages) >= 4)


def test_what_was_acknowledged_must_be_found_unless_pages_may_leave(universe: Universe, long: int) -> None:
    for roomy in (True, False):
        tell = Told(universe, roomy=roomy)
        assert tell(0, "b", long, 3, 1).held == set()
        tell(0, "a", long, 3, 1)
        assert tell.ledger.acknowledged == names(universe, long, 0, 3)
        assert tell.ledger.held == (names(universe, long, 0, 3) if roomy else set())


def test_what_is_being_forgotten_may_be_lost_and_then_must_not_be_found(universe: Universe, long: int) -> None:
    tell = Told(universe)
    tell(0, "b", long, 4, 1)
    tell(0, "a", long, 4, 1)
    assert tell(0, "f", long, 1, 1).held == names(universe, long, 0, 1)
    assert tell.ledger.gone == set()
    assert tell(0, "g", long, 1, 1).gone == names(universe, long, 1, 4)
    assert tell(0, "b", long, 2, 1).gone == names(universe, long, 2, 4)


def test_what_another_forgets_meanwhile_is_promised_by_nobody(universe: Universe, long: int) -> None:
    tell = Told(universe, alone=False)
    tell(0, "b", long, 4, 1)
    tell(1, "f", long, 1, 1)
    assert tell(0, "a", long, 4, 1).held == names(universe, long, 0, 1)
    assert tell(1, "g", long, 1, 1).gone == set()
    assert tell(0, "a", long, 4, 1).held == names(universe, long, 0, 4)


def test_a_forgetting_that_a_kill_cut_short_ends_with_its_process(universe: Universe, long: int) -> None:
    tell = Told(universe)
    tell(0, "f", long, 0, 1)
    tell.ledger.died(0)
    assert tell(1, "a", long, 2, 1).held == names(universe, long, 0, 2)


def test_after_an_eviction_only_what_is_still_there_is_promised(universe: Universe, long: int) -> None:
    tell = Told(universe)
    tell(0, "a", long, 4, 1)
    assert tell(0, "v", 1).held == set()
    pages = universe.chains[long].pages
    mask = 1 << pages[0] | 1 << pages[1]
    assert tell(0, "h", f"{mask:x}", 1).held == names(universe, long, 0, 2)


def test_after_a_clear_nothing_that_was_begun_may_be_found(universe: Universe, long: int) -> None:
    tell = Told(universe)
    tell(0, "b", long, 4, 1)
    tell(0, "a", long, 2, 1)
    tell(0, "v", 1)
    ledger = tell(0, "z", 1)
    assert (ledger.held, ledger.gone) == (set(), names(universe, long, 0, 4))


def test_another_epoch_may_cost_all_pages_of_the_one_before(universe: Universe, long: int) -> None:
    tell = Told(universe)
    tell(0, "a", long, 2, 1)
    ledger = tell(0, "x", 2)
    assert (ledger.held, ledger.epoch) == (set(), 2)


def test_lines_are_taken_in_the_order_of_their_times(universe: Universe, long: int) -> None:
    ledger = Ledger(universe, True, True)
    begin, end = Line(5, 0, "f", (str(long), "0", "1")), Line(6, 0, "n", (str(long), "0", "1"))
    ledger.apply([Line(9, 0, "a", (str(long), "2", "1")), end, begin])
    assert ledger.held == names(universe, long, 0, 2)


def test_the_table_says_what_was_found() -> None:
    row = Row("disk", kills=3, judged=3, acknowledged=10, right=20, allowed=1, lost=2, damages=4)
    row.first_hits = [0.01, 0.02, 0.5]
    row.points = {"file.open": 1, "file.sync": 0}
    result = Result(ok=False, seconds=1.0, settings={}, rows=[row], problems=[])
    head, numbers, *more = result.lines()
    columns = ["tiers", "kills", "acknowledged", "right", "lost, allowed", "lost", "wrong", "phantom", "other"]
    assert re.split(r"  +", head) == [*columns, "first hit after a kill"]
    assert numbers.split() == ["disk", "3", "10", "20", "1", "2", "0", "0", "0", "20", "ms"]
    assert more == ["disk: 4 files damaged, 0 bad pages refused", "disk: killed at 1 points; never reached: file.sync"]
    assert json.loads(result.as_json())["rows"][0]["first_hit_ms"] == {"median": 20.0, "longest": 500.0}
    assert not row.is_well
