"""`stepwell torture`: kill it at random, compare what comes back."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepwell.cli.arguments import Commands, natural, positive, rate
from stepwell.cli.output import escaped, say

MOST_PROCESSES = 8
"""More than that wait for each other's starts so long that deadlines pass, and nothing is wrong."""
SABOTAGES = ("lose_saved_pages", "return_dropped_pages", "swap_saved_pages")


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "torture",
        help="kill stores at random, start them again, and compare what comes back",
        description=(
            "Children save, load, evict, forget, pin and change epochs, and log what they were acknowledged; they are "
            "killed with SIGKILL at random instants and started again, and every page is compared: right; lost, which "
            "is allowed only where pages may leave; wrong or phantom, never. In temporary directories. Exit code 0 "
            "only if nothing was found that must not be."
        ),
    )
    parser.add_argument("--kills", type=positive, default=50, metavar="N", help="kills in all (default 50)")
    parser.add_argument("--minutes", type=rate, metavar="N", help="go on for so long, however many kills that is")
    parser.add_argument("--seed", type=natural, default=0, help="of pages, work and instants (default 0)")
    parser.add_argument(
        "--tiers",
        choices=("shared", "disk", "both"),
        help="only with shared memory, only with disk, only with both in one store (default: each of these in turn)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        default=1,
        metavar="N",
        help=f"at once on a directory (default 1, at most {MOST_PROCESSES})",
    )
    parser.add_argument("--rolling", action="store_true", help="start the new process before the old one ends")
    parser.add_argument("--points", action="store_true", help="kill at every fault point of the core in turn")
    parser.add_argument(
        "--occurrences", type=positive, default=3, metavar="N", help="with --points: arrivals at each (default 3)"
    )
    parser.add_argument("--damage", action="store_true", help="damage volumes too, between runs and while in use")
    parser.add_argument("--errors", action="store_true", help="let system calls fail meanwhile: EIO, ENOSPC and others")
    parser.add_argument("--pages", type=positive, default=240, metavar="N", help="different pages (default 240)")
    parser.add_argument("--page-bytes", type=positive, default=4096, metavar="N", help="bytes of a page (default 4096)")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="where the disk tier lies: in a temporary directory in DIR, which must be there",
    )
    parser.add_argument("--keep", action="store_true", help="leave the directories in which something was found")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("--world", type=natural, help=argparse.SUPPRESS)
    parser.add_argument("--sabotage", choices=SABOTAGES, default="", help=argparse.SUPPRESS)
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Torture, and print what was found."""
    if options.page_bytes % 16:
        parser.error(f"--page-bytes {options.page_bytes}: give a multiple of 16 (2 layers, 2 streams, 4 tokens)")
    if options.processes > MOST_PROCESSES:
        parser.error(
            f"--processes {options.processes}: at most {MOST_PROCESSES}; more wait for each other's starts until "
            "deadlines pass, with nothing wrong"
        )
    if options.rolling and options.processes < 2:
        parser.error("--rolling is for several processes: give --processes 2 or more")
    if options.points and (options.processes > 1 or options.damage or options.errors):
        parser.error("--points is for one process that nothing else harms: leave --processes, --damage, --errors out")
    folder = options.directory
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        parser.error(escaped(f"--directory {folder}: name one that is there and may be written"))
    from stepwell.torture.run import TortureOptions, torture

    names = [name for name in TortureOptions.__slots__ if hasattr(options, name)]
    asked = TortureOptions(**{name: getattr(options, name) for name in names})
    try:
        with progress_bar(None if options.minutes is not None or options.points else options.kills) as advance:
            result = torture(asked, advance)
    except OSError as error:
        say(f"stepwell torture: {error}", to=sys.stderr)
        return 2
    if options.json:
        print(result.as_json().decode())
    else:
        for line in result.lines():
            for part in line.split("\\n"):
                say(part)
        say(f"{result.verdict} ({result.seconds:.0f} s)")
    return 0 if result.ok else 1


@contextmanager
def progress_bar(kills: int | None) -> Iterator[Callable[[int], None]]:
    """Show kills on a terminal, where rich is installed. No thread of its own: this process forks."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=kills)

        def advance(count: int) -> None:
            bar.advance(task, count)
            bar.refresh()

        yield advance
