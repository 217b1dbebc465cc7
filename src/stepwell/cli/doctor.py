"""`stepwell doctor`: this machine and this configuration, and the line that mends what is wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING

from stepwell.cli.arguments import Commands, add_settings, positive, rate
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
    group = parser.add_argument_group("SGLang")
    group.add_argument(
        "--sglang",
        action="store_true",
        help="also check the SGLang of this environment against every interface that stepwell uses of it (imports it)",
    )
    group.add_argument(
        "--hicache-size", type=rate, metavar="GB", help="as SGLang is given it: does it fit beside the shared tier?"
    )
    group.add_argument(
        "--hicache-host-memory-mode", choices=("cache", "buffer_only"), default="cache", help="as SGLang is given it"
    )
    group.add_argument("--ranks", type=positive, default=1, metavar="N", help="of SGLang on this host (default: 1)")
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
            for finding in chain(checks, _sglang(options) if options.sglang else ()):
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


def _sglang(options: argparse.Namespace) -> Iterator[Finding]:
    """Check SGLang, and its memory beside the shared tier of the same sources, where these can be read."""
    from stepwell import StepwellError, StepwellUsageError, load_settings, parse_size
    from stepwell.adapters.sglang.check import check_sglang

    # The engine gives the geometry; where a capacity is asked for, any will do.
    geometry = ("model=any", "revision=any", "layers=1", "kv_heads=1", "head_dim=8", "dtype=uint8", "page_tokens=1")
    own = [f"geometry.{each}" for each in geometry]
    has_config, shared_bytes = True, None
    for arguments in (options.set, [*options.set, *own]):
        try:
            shared = load_settings(options.config, arguments=arguments).config.shared
        except (StepwellUsageError, StepwellError):
            has_config = False
            continue
        has_config = True
        shared_bytes = None if shared is None else parse_size(shared.capacity, name="shared.capacity")
        break
    yield from check_sglang(
        shared_bytes=shared_bytes,
        has_config=has_config,
        hicache_gigabytes=options.hicache_size,
        mode=options.hicache_host_memory_mode,
        ranks=options.ranks,
    )


def show(finding: Finding) -> None:
    """Print one finding."""
    say(f"{'[' + finding.verdict + ']':6} {finding.subject}: {finding.found}")
    if finding.why:
        say(f"         why:  {finding.why}")
    if finding.remedy:
        say(f"         mend: {finding.remedy}")
