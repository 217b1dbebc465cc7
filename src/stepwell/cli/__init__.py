"""Offer stepwell on the command line. Imports nothing heavy before a command runs: `--help` answers in 0.2 s.

One module a command (or a family of them), each with `add(commands)`, which describes the command with argparse and
sets `run` to the function that carries it out and returns the exit code. What that function needs it imports itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from stepwell.cli import config, demo, directories, doctor, torture


class _Version(argparse.Action):
    """Print the version and end. It is looked up only then: the metadata of packages takes a while."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("stepwell")
        except metadata.PackageNotFoundError:
            parser.exit(1, "stepwell: its metadata cannot be read, so its version is not known\n")
        print(f"stepwell {version}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Describe the commands and their options."""
    parser = argparse.ArgumentParser(
        prog="stepwell",
        description="A KV cache for LLM serving in four tiers: device, host, shared memory, disk.",
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (demo, doctor, config, directories, torture):
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 only when all is well."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        print(end="", flush=True)
    except KeyboardInterrupt:
        print(f"stepwell {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output stopped early (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 1
    return code


