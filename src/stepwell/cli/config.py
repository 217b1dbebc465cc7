"""`stepwell config show`: what a store would be opened with, and where each value came from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.cli.arguments import Commands, add_settings
from stepwell.cli.output import say

if TYPE_CHECKING:
    from stepwell import EffectiveValue


def add(commands: Commands) -> None:
    """Describe the commands."""
    parser = commands.add_parser("config", help="show the configuration: effective values, and where each came from")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print every value with its origin",
        description=(
            "Prints what a store would be opened with (arguments over STEPWELL_* variables over file over defaults) "
            "and what follows from it, down to pages and tokens. Exit code 0 only if it makes a configuration."
        ),
    )
    add_settings(show)
    show.add_argument("--json", action="store_true", help="print it as JSON on standard output")
    show.set_defaults(run=show_config)


def show_config(options: argparse.Namespace) -> int:
    """Print the configuration."""
    from stepwell import StepwellError, StepwellUsageError, effective_values

    try:
        settings, values = effective_values(options.config, arguments=options.set)
    except (StepwellUsageError, StepwellError) as error:
        say(f"stepwell config: {error}", to=sys.stderr)
        return 2
    if options.json:
        rows = {value.name: {"value": value.value, "origin": value.origin} for value in values}
        print(json.dumps({"file": settings.file, "looked_for": settings.looked_for, "values": rows}, indent=2))
        return _refuse_empty(values)
    say(f"# {settings.looked_for}")
    if not any(value.name == "geometry.model" for value in values):
        say("# no geometry: the engine gives it; pages and tokens of the tiers follow from it")
    width, text_width = (max(len(getattr(value, name)) for value in values) for name in ("name", "text"))
    for value in values:
        say(f"{value.name:{width}}  {value.text:{min(text_width, 40)}}  {value.origin}")
    return _refuse_empty(values)


def _refuse_empty(values: Sequence[EffectiveValue]) -> int:
    """Say which tiers have volumes that hold no page; return the exit code."""
    empty = [tier for tier in ("shared", "disk") if any((at.name, at.value) == (f"{tier}.pages", 0) for at in values)]
    for tier in empty:
        say(
            f"stepwell config: {tier}: a volume holds no page, a store refuses to open; raise {tier}.volume_bytes or "
            f"{tier}.capacity",
            to=sys.stderr,
        )
    return 2 if empty else 0
