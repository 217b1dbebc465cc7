"""Apply deliberate faults one at a time, and see that the suite fails with each: README.md.

    python tests/mutants/run.py                     what the table has no row of, or an old one
    python tests/mutants/run.py --only NAME ...     these, whatever the table says (NAME may have * and ?)
    python tests/mutants/run.py --sample 6 --installed --no-table    a few in Python, with the core that is installed

Exit code: 0 all were caught; 1 some were not; 2 the suite fails without a mutant, or a mutant is none.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import queue
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import mutant_list
from mutant_list import HERE, ROOT, TABLE, Mutant, Row
from scratch import LEAST_SECONDS, ListError, Outcome, Tree

SLACK = 10.0


@dataclass(slots=True)
class Run:
    """One run of the script: what it found, and what it must not forget when it is interrupted."""

    mutants: list[Mutant]  # all of the list
    trees: queue.SimpleQueue[Tree]
    total: int
    writes_table: bool
    rows: dict[str, Row]
    control_file: Path
    wrong: list[str] = field(default_factory=list)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    control: dict[str, tuple[str, float]] = field(default_factory=dict)
    """How long each command took without a mutant, and the digest of what it ran then."""

    def say(self, text: str) -> None:
        """Print a line of progress."""
        with self.lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def try_mutant(self, mutant: Mutant) -> None:
        """Apply a mutant, run what is to catch it until something fails, take it out again."""
        tree = self.trees.get()
        began = time.monotonic()
        caught: Outcome | None = None
        try:
            for line in mutant.catch:
                limit = self.limit_of(line, tree)
                tree.apply(mutant)
                try:
                    outcome = tree.run(line, limit=limit)
                finally:
                    tree.restore(mutant, ROOT)
                if outcome.has_failed:
                    caught = outcome
                    break
        except ListError as error:
            self.note_wrong(f"{mutant.name}: {error}")
            return
        finally:
            self.trees.put(tree)
        seconds = time.monotonic() - began
        if caught is None:
            row = Row(mutant.name, mutant.digest, "", "", "", seconds)
        else:
            row = Row(mutant.name, mutant.digest, caught.by, caught.how, caught.after, caught.seconds)
        with self.lock:
            self.done += 1
            self.rows[mutant.name] = row
            if self.writes_table:
                write_whole(TABLE, mutant_list.render(self.mutants, self.rows))
        found = " ".join(filter(None, (row.by, row.how, row.after))) if row.is_caught else "SURVIVED"
        self.say(f"{self.done:3d}/{self.total} {seconds:6.1f} s  {mutant.name}: {found}")

    def see_pass(self, line: str) -> None:
        """See that a command passes without a mutant; of one that does not each mutant tells that it is to catch."""
        tree = self.trees.get()
        try:
            self.limit_of(line, tree)
        except ListError as error:
            self.say(str(error))
        finally:
            self.trees.put(tree)

    def limit_of(self, line: str, tree: Tree) -> float:
        """Return for how long a command may run; the first time it is seen to pass without a mutant.

        Raises:
            ListError: it does not.
        """
        digest = mutant_list.digest_of(line)
        with self.lock:
            of, known = self.control.get(line, ("", 0.0))
        if of != digest:
            outcome = tree.run(line, limit=LEAST_SECONDS * SLACK)
            if outcome.has_failed:
                raise ListError(f"{line} fails without a mutant:\n{outcome.output[-4000:]}")
            known = outcome.seconds
            with self.lock:
                self.control[line] = (digest, known)
                write_whole(self.control_file, json.dumps(self.control, indent=1))
        return max(LEAST_SECONDS, SLACK * known)

    def note_wrong(self, text: str) -> None:
        """Remember what is wrong with the list or the suite."""
        with self.lock:
            self.wrong.append(text)
        self.say(f"WRONG {text}")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody finds half of it."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def choose(mutants: list[Mutant], rows: dict[str, Row], options: argparse.Namespace) -> list[Mutant]:
    """Say which mutants a run is about."""
    if options.only:
        chosen = [each for each in mutants if any(fnmatch.fnmatch(each.name, name) for name in options.only)]
    elif options.all or options.sample:
        chosen = mutants
    else:
        known = {name: row.digest for name, row in rows.items() if row.is_caught}
        chosen = [each for each in mutants if known.get(each.name) != each.digest]
    if options.installed:
        chosen = [each for each in chosen if each.is_python]
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    return chosen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tests/mutants/run.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants; * and ? stand for characters")
    parser.add_argument("--all", action="store_true", help="also those that the table says are caught")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--installed", action="store_true", help="build no core: mutants in Python, with the installed one"
    )
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that work side by side")
    parser.add_argument("--no-table", action="store_true", help="leave TABLE.md as it is")
    parser.add_argument("--list", action="store_true", help="print the names that would be tried, and end")
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build" / "mutants", help="where the copies and builds are"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the script. Returns the exit code."""
    options = parse(arguments)
    mutants = mutant_list.read_list()
    rows = mutant_list.read_table(TABLE.read_text()) if TABLE.exists() else {}
    chosen = choose(mutants, rows, options)
    if options.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    folder = options.scratch.resolve() / ("installed" if options.installed else "built")
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(min(options.jobs, max(1, len(chosen)))):
        trees.put(Tree(ROOT, folder / str(number), is_core_installed=options.installed))
    run = Run(mutants, trees, len(chosen), not options.no_table, rows, folder / "control.json")
    if run.control_file.exists():
        run.control = json.loads(run.control_file.read_text())
    with ThreadPoolExecutor(options.jobs) as pool:
        # The first ones while nothing is to be compiled for it.
        list(pool.map(run.see_pass, dict.fromkeys(mutant.catch[0] for mutant in chosen)))
        list(pool.map(run.try_mutant, chosen))
    for text in run.wrong:
        print(f"wrong: {text}", file=sys.stderr)
    survived = [
        mutant.name for mutant in chosen if (row := run.rows.get(mutant.name)) is not None and not row.is_caught
    ]
    print(f"{run.done} tried, {run.done - len(survived)} caught; survived: {', '.join(survived) or 'none'}")
    return 2 if run.wrong else 1 if survived else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
