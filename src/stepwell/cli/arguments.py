"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def positive(text: str) -> int:
    """Read a number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def natural(text: str) -> int:
    """Read a number of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add --config and --set, which every command that reads the configuration has."""
    parser.add_argument(
        "--config", metavar="FILE", help="the configuration, TOML (default: $STEPWELL_CONFIG, else ./stepwell.toml)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="over the file and STEPWELL_* variables, e.g. shared.capacity=8GiB; disk=none leaves a tier out",
    )


def rate(text: str) -> float:
    """Read a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value
