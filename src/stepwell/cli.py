"""Offer stepwell on the command line. Imports nothing heavy before a command runs: `--help` answers in 0.2 s."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Describe the commands and their options."""
    parser = argparse.ArgumentParser(
        prog="stepwell",
        description="A KV cache for LLM serving in four tiers: device, host, shared memory, disk.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="serve a JAX decoder through all four tiers, kill it, serve again, and prove every logit",
        description=(
            "Serves requests of a small JAX transformer through device, host, shared memory and disk, compares every "
            "logit with an unbounded pool and with no reuse at all, kills the serving process with SIGKILL and serves "
            "warm again, then once more from disk alone. Exit code 0 only if all of it holds."
        ),
    )
    demo.add_argument("--quick", action="store_true", help="under one minute: fewer requests")
    demo.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    demo.add_argument(
        "--trace", metavar="FILE", help="serve a Mooncake JSONL trace (plain, .gz, .xz), a 512-token block as one page"
    )
    demo.add_argument("--requests", type=_positive, metavar="N", help="how many requests to serve")
    demo.add_argument("--seed", type=int, default=0, help="of weights, prompts and schedule (default 0)")
    demo.add_argument("--directory", metavar="DIR", help="where the disk tier lies (default: a temporary directory)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0 only when all is well."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    for what, path in (("--trace", options.trace), ("--directory", options.directory)):
        try:
            if path is not None and what == "--trace":
                with open(path, "rb"):
                    pass
            elif path is not None:
                os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            parser.error(f"{what} {path}: {error.strerror}")
    missing = [name for name in ("jax", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"stepwell demo needs {' and '.join(missing)}: pip install 'stepwell[demo]'", file=sys.stderr)
        return 2
    from stepwell.demo.run import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            quick=options.quick,
            as_json=options.json,
            trace=options.trace,
            requests=options.requests,
            seed=options.seed,
            directory=options.directory,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
