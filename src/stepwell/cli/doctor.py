"""`stepwell doctor`: this machine and this configuration, and the line that mends what is wrong."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Iterator
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
    group.add_argument(
        "--hicache-storage-backend-extra-config",
        metavar="JSON|@FILE",
        help="as SGLang is given it: is it accepted? Its tiers are those that are checked; --config is not read then",
    )
    group.add_argument("--ranks", type=positive, default=1, metavar="N", help="of SGLang on this host (default: 1)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print each finding as it comes."""
    from stepwell import diagnose

    findings = []
    config, arguments = options.config, options.set
    environ: dict[str, str] | None = None
    judged: list[Finding] = []
    is_refused = False
    if options.hicache_storage_backend_extra_config is not None:
        judged, tiers = _extra_config(options.hicache_storage_backend_extra_config)
        is_refused = tiers is None
        # Inside SGLang neither a file nor a variable of stepwell's is read.
        config, environ, arguments = os.devnull, {}, [*(tiers or ()), *options.set]
    with ended_in_order():
        checks = (
            _unchecked()
            if is_refused
            else diagnose(
                config,
                environ=environ,
                arguments=arguments,
                shared=options.shared,
                disk=options.disk,
                with_round=not options.no_round,
            )
        )
        with closing(checks):
            of_sglang = _sglang(options, config, environ, arguments) if options.sglang else ()
            for finding in chain(judged, checks, of_sglang):
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


def _unchecked() -> Generator[Finding, None, None]:
    """Say that tiers that nobody would open are not tried, nor any others in their place."""
    from stepwell import Finding

    yield Finding("warn", "machine and tiers", "not checked: the extra config would be refused", "", "mend it first")


def _extra_config(given: str) -> tuple[list[Finding], list[str] | None]:
    """Judge SGLang's extra config. Returns: findings; its tiers as NAME=VALUE, None where it would be refused."""
    from stepwell.adapters.sglang.extra_config import check_extra_config, tiers_as_arguments

    found, settings = check_extra_config(given)
    return found, None if settings is None else tiers_as_arguments(settings)


def _sglang(
    options: argparse.Namespace, config: str | None, environ: dict[str, str] | None, given: list[str]
) -> Iterator[Finding]:
    """Check SGLang, and its memory beside the shared tier of the same sources, where these can be read."""
    from stepwell import StepwellError, StepwellUsageError, load_settings, parse_size
    from stepwell.adapters.sglang.check import check_sglang

    # The engine gives the geometry; where a capacity is asked for, any will do.
    geometry = ("model=any", "revision=any", "layers=1", "kv_heads=1", "head_dim=8", "dtype=uint8", "page_tokens=1")
    own = [f"geometry.{each}" for each in geometry]
    has_config, shared_bytes = True, None
    for arguments in (given, [*given, *own]):
        try:
            shared = load_settings(config, environ=environ, arguments=arguments).config.shared
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
