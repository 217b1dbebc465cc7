"""`stepwell inspect`, `verify`, `gc`: what tier directories hold, whether it is right, and what may go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from stepwell.cli.arguments import Commands
from stepwell.cli.output import escaped, say

if TYPE_CHECKING:
    from stepwell import PageGeometry
    from stepwell.inspection import DirectoryReport, VolumeReport
    from stepwell.removal import Plan, Removed
    from stepwell.verification import VolumeCheck

MOST_LINES = 50  # of damaged pages of one volume, without --json
MOST_INDENT = 24  # levels of --tree that are drawn by indentation
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add(commands: Commands) -> None:
    """Describe the three commands."""
    inspect = _add(
        commands,
        "inspect",
        "say what tier directories hold: processes, volumes, models, leftovers",
        "Reads names, locks and records of tier directories, live or dead; writes nothing and takes no lock of a "
        "living process. Exit code 1 if a directory or a volume cannot be read, or a record is damaged.",
    )
    inspect.add_argument("--pages", action="store_true", help="list each page: key, parent, depth, epoch, bytes")
    inspect.add_argument("--tree", action="store_true", help="show pages as prefix trees, one line an unbranched run")
    inspect.add_argument("--verbose", action="store_true", help="say all of each volume, in three lines instead of one")
    _add_config(inspect)
    inspect.set_defaults(run=run_inspect)

    verify = _add(
        commands,
        "verify",
        "read every page of tier directories and compare it with its checksums",
        "Reads every page of every readable volume, live or dead; writes nothing. A page that a living process "
        "rewrites meanwhile is tried again and never called damaged. Exit code 1 if anything is damaged or cannot be "
        "read.",
    )
    _add_config(verify)
    verify.set_defaults(run=run_verify)

    gc = _add(
        commands,
        "gc",
        "remove from tier directories what dead processes left",
        "Prints what would be removed, and removes it only with --yes: what is half born or half removed, files of "
        "dead processes, and the orphans (volumes without a living writer) that are chosen below. Where several "
        "choices are given, all must hold. An orphan is a warm cache: whoever opens the directory next serves it. "
        "Nothing that a living process holds, and nothing that is not stepwell's, is touched. Exit code 1 if "
        "something could not be removed.",
    )
    gc.add_argument("--yes", action="store_true", help="remove; without it, only say what would be removed")
    gc.add_argument("--orphans", action="store_true", help="choose all orphans")
    gc.add_argument("--other-format", action="store_true", help="choose those damaged, or of another format version")
    gc.add_argument("--older-than", type=duration, metavar="AGE", help="choose those born and written before: 7d, 12h")
    gc.add_argument("--fingerprint", type=fingerprint, metavar="HEX", help="choose those whose fingerprint begins so")
    gc.add_argument("--epoch-not", type=int, metavar="N", help="choose those that hold no page of epoch N")
    gc.set_defaults(run=run_gc)


def _add(commands: Commands, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("directories", nargs="+", metavar="DIR", help="a tier directory, shared or disk")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a stepwell.toml whose [geometry] names a model and its tokens: a volume has a fingerprint only (repeat)",
    )


def duration(text: str) -> float:
    """Read an age: 90s, 10m, 12h, 7d, 2w."""
    try:
        seconds = float(text[:-1]) * UNITS[text[-1:]]
    except (KeyError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: give a number with s, m, h, d or w, as 7d")
    return seconds


def fingerprint(text: str) -> str:
    """Read the beginning of a fingerprint."""
    if not 8 <= len(text) <= 64 or set(text.lower()) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is no fingerprint: give 8 to 64 hexadecimal digits")
    return text.lower()


# ---- the commands ----------------------------------------------------------------------------------------------------


def run_inspect(options: argparse.Namespace) -> int:
    """Print a report of each directory."""
    from stepwell import inspection
    from stepwell.errors import VolumeError

    geometries = read_geometries(options.config)
    if geometries is None:
        return 2
    is_well = True
    results = []
    for path in options.directories:
        report = inspection.inspect_directory(path, geometries=geometries)
        is_well = is_well and report.is_well
        result = asdict(report) | {"budget_bytes": report.budget_bytes, "is_well": report.is_well}
        results.append(result)
        if not options.json:
            print_lines(directory_lines(report, whole_volume_lines if options.verbose else volume_lines))
        if report.error:
            continue
        try:
            if options.json and options.pages:
                result["pages"] = [asdict(page) for page in inspection.read_pages(path)]
            if options.json and options.tree:
                result["chains"] = [asdict(chain) for chain in inspection.page_chains(inspection.read_pages(path))]
            if options.pages and not options.json:
                print_lines(page_lines(path))
            if options.tree and not options.json:
                print_lines(tree_lines(path))
        except VolumeError as error:  # the directory went away meanwhile
            is_well = False
            result["error"] = str(error)
            say(f"{path}: unreadable: {error}", to=sys.stderr)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0 if is_well else 1


def run_verify(options: argparse.Namespace) -> int:
    """Check every page of each directory."""
    from stepwell import StepwellError, verification

    geometries = read_geometries(options.config)
    if geometries is None:
        return 2
    is_well = True
    results = []
    for path in options.directories:
        result: dict[str, object] = {"path": path, "error": "", "volumes": []}
        if not options.json:
            say(f"{path}:")
        checks: list[VolumeCheck] = []
        began = time.monotonic()
        try:
            with progress_bar(f"verify {path}") as progress:
                for check in verification.verify_directory(path, geometries=geometries, progress=progress):
                    checks.append(check)
                    if not options.json:
                        print_lines(check_lines(check))
        except StepwellError as error:
            result["error"] = str(error)
            is_well = False
            if not options.json:
                say(f"  unreadable: {error}")
        else:
            is_well = is_well and all(check.is_well for check in checks)
            result["volumes"] = [asdict(check) | {"is_well": check.is_well} for check in checks]
            if not options.json:
                say(summary_line(checks, time.monotonic() - began))
        results.append(result)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0 if is_well else 1


def run_gc(options: argparse.Namespace) -> int:
    """Print what would be removed from each directory, and remove it with --yes."""
    from stepwell import StepwellError, removal

    selection = removal.Selection(
        orphans=options.orphans,
        other_format=options.other_format,
        older_than=options.older_than,
        fingerprint=options.fingerprint,
        epoch_not=options.epoch_not,
    )
    is_well = True
    results = []
    for path in options.directories:
        plan = removal.plan_removal(path, selection)
        planned = asdict(plan) | {"nbytes": plan.nbytes}
        result: dict[str, object] = {"plan": planned, "removed": None, "error": plan.error}
        results.append(result)
        if not options.json:
            print_lines(plan_lines(plan, is_asked=options.yes))
        is_well = is_well and not plan.error
        if not options.yes or plan.error:
            continue
        try:
            removed = removal.remove(plan)
        except StepwellError as error:
            is_well = False
            result["error"] = str(error)
            if not options.json:
                say(f"  failed: {error}")
            continue
        is_well = is_well and not removed.failed
        result["removed"] = asdict(removed)
        if not options.json:
            print_lines(removed_lines(removed))
    if options.json:
        print(json.dumps(results, indent=1))
    return 0 if is_well else 1


def read_geometries(files: list[str]) -> list[PageGeometry] | None:
    """Read the geometries of configuration files; None where one cannot be had, which is said."""
    from stepwell import StepwellUsageError, load_settings

    # Only the geometry matters here: the tiers of that file need not be this machine's. One is needed.
    geometry_alone = {"device": None, "shared": None, "disk": None, "host": "1TiB"}
    geometries = []
    for file in files:
        try:
            geometries.append(load_settings(file, environ={}, arguments=geometry_alone).config.geometry)
        except StepwellUsageError as error:
            say(f"--config {file}: {error}", to=sys.stderr)
            return None
    return geometries


def print_lines(lines: Iterator[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        say(line)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show progress on a terminal, where rich is installed; None: no one looks."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("slots"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escaped(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ---- lines -----------------------------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    """Write a size as a person reads it: 1536 -> 1.5 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, what: str) -> str:
    """Write a number of things."""
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def age(since_ns: int) -> str:
    """Write how long ago a moment was."""
    seconds = (time.time_ns() - since_ns) / 1e9
    if seconds < 0:
        return "in the future"
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * UNITS[unit]:
            return f"{seconds / UNITS[unit]:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


def directory_lines(report: DirectoryReport, of_volume: Callable[[VolumeReport], Iterator[str]]) -> Iterator[str]:
    """Describe a directory. of_volume: describes a volume."""
    if report.error:
        yield f"{report.path}: unreadable: {report.error}"
        return
    budget = report.budget_bytes
    kind = " and ".join(report.media) or "no volumes"
    of = "no living process" if budget is None else f"of {size(budget)}"
    yield f"{report.path}: {kind}, {size(report.total_bytes)} in volumes ({of}), LMDB {size(report.lmdb_bytes)} on disk"
    if report.note:
        yield f"  note: {report.note}"
    for process in report.processes:
        if not process.lock.is_held:
            continue  # a leftover, below
        if process.pid is None or process.capacity_bytes is None:
            yield f"  process {process.process_id[:8]}: alive ({process.lock.why}); its file is unreadable"
            continue
        lacks = f", lacks {size(process.want_bytes)}" if process.want_bytes else ""
        yield (
            f"  process {process.process_id[:8]}: pid {process.pid}, alive ({process.lock.why}); holds "
            f"{size(process.held_bytes or 0)} of a capacity of {size(process.capacity_bytes)}, share "
            f"{size(process.floor_bytes or 0)}{lacks}"
        )
    for volume in report.volumes:
        yield from of_volume(volume)
    for leftover in report.leftovers:
        yield f"  leftover: {leftover.what}: {', '.join(map(printable, leftover.names))} ({size(leftover.nbytes)})"
    for stranger in report.strangers:
        yield f"  foreign: {printable(stranger.name)}: {stranger.why}; left alone"
    for model in report.models:
        name = f"{model.model} ({model.fingerprint[:16]})" if model.model else model.fingerprint[:16]
        tokens = "" if model.tokens is None else f", {model.tokens} tokens"
        pages, volumes = count(model.pages, "page"), count(model.volumes, "volume")
        yield f"  model {name}: {pages}{tokens}, {size(model.page_bytes)} in {volumes}"


WRITERS = {True: "live", False: "orphan", None: "writer not known"}


def volume_lines(volume: VolumeReport) -> Iterator[str]:
    """Describe a volume in a line: whose, how full, of what, how old."""
    header, slots = volume.header, volume.slots
    line = f"  volume {volume.volume_id}: {WRITERS[volume.lock.is_held]}, {size(volume.nbytes)}"
    if header is None or slots is None:
        yield f"{line}, {volume.condition}: {volume.why}"
        return
    wrong = f", {slots.damaged} damaged records" if slots.damaged else ""
    yield (
        f"{line}, {slots.resident} of {count(header.slots, 'page')}{wrong}, "
        f"{header.model or f'fingerprint {header.fingerprint[:16]}'}, written {age(volume.written_ns)}"
    )


def whole_volume_lines(volume: VolumeReport) -> Iterator[str]:
    """Describe a volume with all that is known of it."""
    writer = WRITERS[volume.lock.is_held]
    files = " + ".join(name.rpartition(volume.volume_id)[2] for name in volume.files)  # its name is said once
    yield f"  volume {volume.volume_id}: {writer} ({volume.lock.why}), {size(volume.nbytes)}, {files}"
    header, slots = volume.header, volume.slots
    if header is None or slots is None:
        yield f"    {volume.condition}: {volume.why}"
        return
    boot = "this boot" if header.is_this_boot else "an earlier boot"
    known = f"{header.model}, {header.page_tokens} tokens a page, " if header.model else ""
    yield (
        f"    {header.medium}, format {header.format_version}, {known}fingerprint {header.fingerprint[:16]}, "
        f"{header.layers} layers, pages of {size(header.page_bytes)}, born {age(header.birth_ns)} at epoch "
        f"{header.epoch}, written {age(volume.written_ns)}, {boot}"
    )
    epochs = ", ".join(f"{pages} of epoch {epoch}" for epoch, pages in slots.epochs[:4])
    more = ", ..." if len(slots.epochs) > 4 else ""
    recency = f", last used {age(slots.first_stamp)} to {age(slots.last_stamp)}" if slots.last_stamp else ""
    wrong = f", {slots.damaged} damaged records" if slots.damaged else ""
    worn = f", {slots.worn} worn out" if slots.worn else ""
    yield (
        f"    {header.slots} slots: {slots.resident} pages ({size(slots.resident * header.page_bytes)}"
        f"{'; ' + epochs if epochs else ''}{more}), {slots.odd} free or being written, {slots.never_written} never "
        f"written{worn}{wrong}{recency}"
    )


def page_lines(path: str) -> Iterator[str]:
    """List pages."""
    from stepwell import inspection

    yield "  volume    slot     depth  epoch  bytes     key <- parent"
    for page in inspection.read_pages(path):
        parent = "?" if page.parent is None else page.parent or "-"
        depth = "?" if page.depth is None else page.depth
        place = f"  {page.volume_id[:8]}  {page.slot:<7}  {depth:<5}  {page.epoch:<5}  {page.nbytes:<8}"
        yield f"{place}  {page.key} <- {parent}"


def tree_lines(path: str) -> Iterator[str]:
    """Draw prefix trees: a line for each unbranched run of pages."""
    from stepwell import inspection

    above = ("", -1)
    for chain in inspection.page_chains(inspection.read_pages(path)):
        if (chain.fingerprint, chain.epoch) != above:
            above = (chain.fingerprint, chain.epoch)
            yield f"  tree of {chain.fingerprint[:16]}, epoch {chain.epoch}"
        indent = "  " * min(chain.level, MOST_INDENT) + (f"[{chain.level}] " if chain.level > MOST_INDENT else "")
        run = chain.first_key[:12] + (f"..{chain.last_key[:12]}" if chain.pages > 1 else "")
        start = "" if chain.start == "branch" else f" ({chain.start})"
        at = "" if chain.depth is None else f" at depth {chain.depth}"
        yield f"    {indent}{run}: {count(chain.pages, 'page')}{at}{start}"


def check_lines(check: VolumeCheck) -> Iterator[str]:
    """Describe what a check of a volume found."""
    writer = {True: "live", False: "orphan", None: "writer not known"}[check.lock.is_held]
    if check.condition != "readable":
        yield f"  volume {check.volume_id}: {check.condition}: {check.why}"
    rate = f" ({size(int(check.read_bytes / check.seconds))}/s)" if check.seconds > 0 else ""
    parts = f"{check.right} right, {len(check.damaged)} damaged, {check.changed} changed while read"
    cannot = f", {check.unreadable} unreadable" if check.unreadable else ""
    if check.condition == "readable" or check.right:
        yield f"  volume {check.volume_id}: {writer}: {parts}{cannot}; {size(check.read_bytes)}{rate}"
    for page in check.damaged[:MOST_LINES]:
        yield f"    damaged: slot {page.slot}: {page.what}{': key ' + page.key if page.key else ''}"
    if len(check.damaged) > MOST_LINES:
        yield f"    and {len(check.damaged) - MOST_LINES} more; --json names all"


def summary_line(checks: list[VolumeCheck], seconds: float) -> str:
    """Sum a directory up."""
    right = sum(check.right for check in checks)
    damaged = sum(len(check.damaged) for check in checks)
    changed = sum(check.changed for check in checks)
    unreadable = sum(check.unreadable for check in checks)
    read = sum(check.read_bytes for check in checks)
    volumes = sum(check.condition in ("damaged", "unreadable") for check in checks)
    bad = f", {volumes} of {len(checks)} volumes unreadable" if volumes else ""
    cannot = f", {unreadable} unreadable" if unreadable else ""
    rate = size(int(read / seconds)) if seconds > 0 else "0 B"
    return (
        f"  in all: {right} pages right, {damaged} damaged, {changed} changed while read{cannot}{bad}; "
        f"{size(read)} in {seconds:.1f} s, {rate}/s"
    )


def plan_lines(plan: Plan, *, is_asked: bool) -> Iterator[str]:
    """Describe what would be removed."""
    if plan.error:
        yield f"{plan.path}: unreadable: {plan.error}"
        return
    yield f"{plan.path}: {size(plan.nbytes)} to remove"
    if plan.note:
        yield f"  note: {plan.note}"
    for volume in plan.volumes:
        what = f"{volume.condition}: {volume.why}"
        if volume.header is not None:
            pages = volume.slots.resident if volume.slots is not None else 0
            what = f"{pages} pages of {volume.header.fingerprint[:16]}"
        nbytes = size(volume.nbytes + volume.lmdb_bytes)
        yield f"  remove volume {volume.volume_id}: orphan, {what}, last used {age(volume.age_since_ns)}, {nbytes}"
    for leftover in plan.leftovers:
        yield f"  remove {leftover.what}: {', '.join(leftover.names)} ({size(leftover.nbytes)})"
    for kept in plan.kept:
        yield f"  keep volume {kept.volume_id}: {kept.why} ({size(kept.nbytes)})"
    for stranger in plan.strangers:
        yield f"  leave {printable(stranger.name)}: {stranger.why}"
    if not is_asked and (plan.volumes or plan.leftovers):
        yield "  nothing was removed: add --yes to remove"
    if plan.selection.is_empty and any(kept.why == "an orphan, not selected" for kept in plan.kept):
        yield "  orphans are warm for whoever opens the directory next; --orphans or --older-than 7d choose them"


def removed_lines(removed: Removed) -> Iterator[str]:
    """Describe what was removed."""
    for kept in removed.kept:
        yield f"  kept volume {kept.volume_id}: {kept.why}"
    for failure in removed.failed:
        yield f"  failed: {failure}"
    counts = f"{count(len(removed.volumes), 'volume')} and {count(len(removed.leftovers), 'leftover file')}"
    yield f"  removed {counts}: {size(removed.nbytes)} freed"


def printable(name: str) -> str:
    """Write a name that anybody may have chosen so that it cannot steer a terminal."""
    return name if name.isprintable() else ascii(name)
