"""`stepwell doctor`: this machine and this configuration, and the line that mends what is wrong."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import TYPE_CHECKING

from stepwell.cli.arguments import Commands, add_settings
from stepwell.cli.output import say
from stepwell.endings import ended_in_order

if TYPE_CHECKING:
    from stepwell import Finding


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and this configuration, and try each tier",
        description=(
            "Checks what limits a store on this machine and what the configuration asks of it, then writes, evicts, "
            "kills, restarts and reads through each tier, in directories of its own beside the configured ones. Each "
            "line is ok, warn or fail, with the numbers and the line that mends it. Exit code 0 only without a fail. "
            "Run it as the user, and in the container, that will run the engine."
        ),
    )
    add_settings(parser)
    parser.add_argument(
        "--shared", metavar="DIR", help="in place of shared.path; capacity, where none is given: 256 MiB"
    )
    parser.add_argument("--disk", metavar="DIR", help="in place of disk.path; capacity, where none is given: 1 GiB")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on standard output")
    parser.add_argument("--no-round", action="store_true", help="only look: nothing is written through the tiers")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print each finding as it comes."""
    from stepwell import diagnose

    findings = []
    with ended_in_order():
        checks = diagnose(
            options.config,
            arguments=options.set,
            shared=options.shared,
            disk=options.disk,
            with_round=not options.no_round,
        )
        with closing(checks):
            for finding in checks:
                findings.append(finding)
                if not options.json:
                    show(finding)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in ("ok", "warn", "fail")}
    if options.json:
        rows = [
            {name: getattr(finding, name) for name in ("verdict", "subject", "found", "why", "remedy")}
            for finding in findings
        ]
        print(json.dumps({"findings": rows, "counts": counts}, indent=2))
    else:
        print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")
    return 1 if counts["fail"] else 0


def show(finding: Finding) -> None:
    """Print one finding."""
    say(f"{'[' + finding.verdict + ']':6} {finding.subject}: {finding.found}")
    if finding.why:
        say(f"         why:  {finding.why}")
    if finding.remedy:
        say(f"         mend: {finding.remedy}")
