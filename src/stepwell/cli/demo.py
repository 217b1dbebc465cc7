"""`stepwell demo`: the main job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from stepwell.cli.arguments import Commands, positive


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "demo",
        help="serve a JAX decoder through all four tiers, kill it, serve again, and prove every logit",
        description=(
            "Serves requests of a small JAX transformer through device, host, shared memory and disk, compares every "
            "logit with an unbounded pool and with no reuse at all, kills the serving process with SIGKILL and serves "
            "warm again, then once more from disk alone. Exit code 0 only if all of it holds."
        ),
    )
    parser.add_argument("--quick", action="store_true", help="under one minute: fewer requests")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument(
        "--trace", metavar="FILE", help="serve a Mooncake JSONL trace (plain, .gz, .xz), a 512-token block as one page"
    )
    parser.add_argument("--requests", type=positive, metavar="N", help="how many requests to serve")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and schedule (default 0)")
    parser.add_argument("--directory", metavar="DIR", help="where the disk tier lies (default: a temporary directory)")
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Check what can be checked before anything heavy is imported, then run the demo."""
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
