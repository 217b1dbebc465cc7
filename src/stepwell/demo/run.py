"""Run the demo: serve, compare, kill, serve warm, take the shared memory away, serve from disk, and prove each logit.

Every act is a process of its own (demo/serve.py), so that what survives is what the tiers keep. Any difference is
printed and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stepwell.demo.models import Conversations, ModelError, find_model, read_conversations
from stepwell.demo.record import Comparison, Record, compare
from stepwell.demo.results import TIERED, TIERS, Answer, Check, Moment, Report, look_at_machine, now
from stepwell.demo.scenario import Measured, Scenario, Served, Sizes, Summary, TreeEdge, requests_of
from stepwell.demo.talk import Talk, TalkProgress, printable
from stepwell.demo.transformer import ModelConfig
from stepwell.demo.workload import Request, longest_conversation, save_requests
from stepwell.endings import end_undisturbed, ended_in_order

TOLERANCE = 1e-3
"""Largest distance of logits where a prefix holds generated tokens: their KV was made by a decode in one run, by a
prefill in the other."""

KILL_AFTER = 3
WARM_REQUESTS = 24
TURNS = 4
NOTHING = "nothing found"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asked for. model: "auto", "smollm2", "random", or the path of a GGUF file.

    directory: where a temporary directory is made for the disk tier; None: where temporary files are.
    report: the file that becomes an HTML report of the run. gpu_tokens_per_second: of the device it is to model.
    """

    quick: bool = False
    as_json: bool = False
    model: str = "auto"
    prompts: str | None = None
    trace: str | None = None
    requests: int | None = None
    seed: int = 0
    directory: str | None = None
    report: str | None = None
    gpu_tokens_per_second: float | None = None


class ActError(Exception):
    """A serving process ended otherwise than it must."""


class Acts:
    """Start serving processes and read what they say.

    Invariant: every process started is waited for before this object's context ends.
    """

    def __init__(self, base: Scenario, progress: Progress, talk: Talk | None, *, began: float) -> None:
        self._base = base
        self._progress = progress
        self._talk = talk
        self._began = began
        self.moments: list[Moment] = []

    def note(self, act: str, what: str) -> None:
        """Note that something happens now."""
        self.moments.append(Moment(at=time.perf_counter() - self._began, act=act, what=what))

    def run(self, name: str, title: str, **changes: object) -> Summary:
        """Run one act to its end."""
        scenario = self.scenario(name, **changes)
        with self._process(name, scenario, title) as lines:
            for message in lines:
                if "summary" in message:
                    return msgspec.convert(message["summary"], Summary)
        raise ActError(f"{title}: the process ended without a summary")

    def measure(self, name: str, title: str, **changes: object) -> list[Measured]:
        """Run the act that measures loads and computations with nothing else running."""
        scenario = self.scenario(name, measure=True, picture=False, requests=0, **changes)
        with self._process(name, scenario, title) as lines:
            for message in lines:
                if "measured" in message:
                    return msgspec.convert(message["measured"], list[Measured])
        raise ActError(f"{title}: the process ended without measuring")

    def run_and_kill(self, name: str, title: str, **changes: object) -> Summary:
        """Run one act, let it serve on, and kill it with SIGKILL in mid-work."""
        scenario = self.scenario(name, serve_on=True, **changes)
        summary: Summary | None = None
        left = KILL_AFTER
        with self._process(name, scenario, title, expect_kill=True) as lines:
            for message in lines:
                if "summary" in message:
                    summary = msgspec.convert(message["summary"], Summary)
                elif summary is not None and "served_on" in message:
                    left -= 1
                    if left == 0:
                        return summary
        raise ActError(f"{title}: the process ended before it was killed")

    def scenario(self, name: str, **changes: object) -> Scenario:
        """Return the base scenario with changes; its record lies beside the others under its name."""
        record = str(Path(self._base.record).with_name(f"{name}.npz"))
        return msgspec.structs.replace(self._base, record=record, **changes)

    @contextmanager
    def _process(
        self, name: str, scenario: Scenario, title: str, *, expect_kill: bool = False
    ) -> Iterator[Iterator[dict[str, object]]]:
        task = self._progress.add_task(title, total=scenario.requests)
        if self._talk is not None or not self._progress.console.is_terminal:
            self._progress.console.print(f"{title} ...", highlight=False, style="bold")
        self.note(name, "started")
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # nothing is imported from the working directory
                    "-X",
                    "faulthandler",
                    "-m",
                    "stepwell.demo.serve",
                    msgspec.json.encode(scenario).decode(),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdout is not None

            def lines() -> Iterator[dict[str, object]]:
                assert process.stdout is not None
                for line in process.stdout:
                    message = msgspec.json.decode(line, type=dict[str, object])
                    self._hear(name, task, message)
                    yield message

            try:
                yield lines()
                if expect_kill:
                    process.kill()
                    self.note(name, "killed")
            except BaseException:
                process.kill()
                raise
            finally:
                code = process.wait()
                process.stdout.close()
                self.note(name, "ended")
            errors.seek(0)
            said = errors.read()[-4000:]
            if expect_kill and code != -signal.SIGKILL:
                raise ActError(f"{title}: expected to end by SIGKILL, ended with {code}\n{said}")
            if not expect_kill and code != 0:
                raise ActError(f"{title}: exit code {code}\n{said}")

    def _hear(self, name: str, task: TaskID, message: dict[str, object]) -> None:
        """Take what a process says on to who shows it."""
        if "opened" in message:
            self.note(name, "opened")
        elif "ready" in message:
            self.note(name, "serving")
        elif "summary" in message:
            self.note(name, "served")
        elif "token" in message and self._talk is not None:
            self._talk.token(msgspec.convert(message["of"], int), msgspec.convert(message["token"], int))
        elif "served" in message:
            self._progress.advance(task)
            if self._talk is not None:
                served = msgspec.convert(message["served"], Served)
                self._talk.served(served, msgspec.convert(message["answer"], list[int]))
                if name == "recompute":
                    self._talk.recomputed[served.request] = served.first_token


def run_demo(options: DemoOptions) -> int:
    """Run all acts, print the result; return 0 only if every check holds.

    Raises, before anything is started: ModelError, GgufError, PromptsError, TraceError for what cannot be served.
    """
    console = Console(stderr=options.as_json)
    if not console.is_terminal:
        console = Console(stderr=options.as_json, width=120)
    started, begun = time.perf_counter(), now()
    path, why, name = find_model(options.model if options.trace is None else "random")
    if path is None and options.prompts is not None:
        raise ModelError(f"--prompts need a model with a vocabulary, and this one has {why}")
    told = None if path is None else read_conversations(path, prompts=options.prompts, quick=options.quick)
    with ExitStack() as stack:
        stack.enter_context(ended_in_order())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwell-demo-")))
        beside = tempfile.TemporaryDirectory(prefix="stepwell-demo-", dir=options.directory)
        disk = Path(stack.enter_context(beside)) / "tier"
        shared = Path(tempfile.mkdtemp(prefix="stepwell-demo-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        stack.callback(shutil.rmtree, shared, ignore_errors=True)
        stack.callback(end_undisturbed)
        base = _base(options, told, shared=shared / "tier", disk=disk, work=work)
        machine = look_at_machine(shared, disk)
        notes = _notes(base, why)
        for note in (*notes, _told_sizes(base)):
            console.print(Text(printable(f"  {note}"), style="dim"))
        progress = stack.enter_context(_progress(console))
        talk = None if told is None else Talk(console, progress, told.chat, told.spoken)
        acts = Acts(base, progress, talk, began=started)
        try:
            if told is not None:
                console.print("dequantising the weights ...", highlight=False, style="bold")
                _unpack(told, work / "weights")
            checks, runs = _play(acts, base, unjudged=_too_small(options, told, base))
            measured = [] if options.report is None else _measure(acts, base)
            measured_load = None if options.report is None else round(os.getloadavg()[0], 2)
        except ActError as failure:
            progress.stop()
            console.print(Text.assemble(("failed:", "bold red"), f" {failure}"))
            return 1
        answers = [] if told is None else _answers(told, Record.load(work / "served.npz"))
        runs = runs if told is None else {name: _labelled(run, told) for name, run in runs.items()}
    report = Report(
        ok=not any(check.holds is False for check in checks),
        seconds=time.perf_counter() - started,
        model=name or base.config.name,
        requests=base.requests,
        trace=None if options.trace is None else os.fsencode(options.trace).decode(errors="replace"),
        notes=notes,
        checks=checks,
        runs=runs,
        answers=answers,
        moments=acts.moments,
        begun=begun,
        page_tokens=base.config.page_tokens,
        page_bytes=base.config.geometry().page_bytes,
        sizes=base.sizes,
        machine=machine,
        measured=measured,
        measured_load=measured_load,
        gpu_tokens_per_second=options.gpu_tokens_per_second,
    )
    if options.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _print(console, report)
    if options.report is not None and not _write_report(console, report, Path(options.report)):
        return 1
    return 0 if report.ok else 1


def _compilation_cache(work: Path) -> Path:
    """Return where compiled programs are kept: with the user's caches, else among what is removed at the end.

    They are run as they lie there: not from a directory that another user owns (HOME as sudo leaves it) or may write.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        cache = Path.home() / ".cache" / "stepwell" / "demo-jax"
        cache.mkdir(0o700, parents=True, exist_ok=True)
        status = cache.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return cache
    return work / "demo-jax"


def _unpack(told: Conversations, folder: Path) -> None:
    from stepwell.demo.gguf_model import unpack_weights

    try:
        unpack_weights(told.file, told.config, folder)
    except OSError as cause:
        raise ModelError(f"the weights in float32 do not go into {folder}: {cause}; set TMPDIR") from cause


def _write_report(console: Console, report: Report, path: Path) -> bool:
    from stepwell.demo.report import write_report

    try:
        write_report(report, path)
    except OSError as error:
        console.print(Text(f"  the report was not written: {error}", style="red"))
        return False
    console.print(Text(f"  report: {path}"))
    return True


def _base(options: DemoOptions, told: Conversations | None, *, shared: Path, disk: Path, work: Path) -> Scenario:
    count = options.requests or _requests_that_fill(options)
    users = -(-(count if options.trace is None else 0) // TURNS)
    users = max(users, 15 if options.quick else 40)
    base = Scenario(
        mode="tiers",
        seed=options.seed,
        requests=count,
        users=users,
        turns=TURNS,
        trace=options.trace,
        config=ModelConfig(seed=options.seed),
        sizes=_sizes(options),
        shared_path=str(shared),
        disk_path=str(disk),
        compilation_cache=str(_compilation_cache(work)),
        record=str(work / "record.npz"),
        picture=options.report is not None,
    )
    if told is None:
        return base
    requests = told.requests[: options.requests]
    save_requests(requests, work / "texts.json")
    return msgspec.structs.replace(
        base,
        requests=len(requests),
        users=len({request.conversation for request in requests}),
        config=told.config,
        sizes=_sizes_of_texts(requests, told.config, shared_room=shutil.disk_usage(shared.parent).free),
        weights=str(work / "weights"),
        texts=str(work / "texts.json"),
    )


def _requests_that_fill(options: DemoOptions) -> int:
    """Return how many requests of random weights or of a trace the tiers of _sizes are for."""
    if options.quick:
        return 15 * TURNS
    return 40 * TURNS if options.trace is None else 200


def _sizes(options: DemoOptions) -> Sizes:
    """Size the tiers to the work, so that pages travel: prompts of a trace are up to the model's whole context."""
    if options.trace is not None:
        return Sizes(device_pages=160)
    if options.quick:
        return Sizes(shared_bytes=4 << 20, shared_volume_bytes=2 << 20)
    return Sizes()


def _sizes_of_texts(requests: Sequence[Request], config: ModelConfig, *, shared_room: int) -> Sizes:
    """Size the tiers to the pages of all conversations, shared prompts counted once, so that pages travel.

    The device holds two of them; the host, which keeps what was loaded by its way, all: who asks third for a prompt
    that has left the device twice finds it there. Shared memory holds all, and what is served until the kill, where it
    has room (shared_room: free bytes; a container may have 64 MB, and SmolLM2's pages are 720 KiB).
    """
    begun: set[bytes] = set()
    reached: dict[int, int] = {}
    for request in requests:
        if request.follows is None:
            whole = request.tokens.size // config.page_tokens
            begun |= {request.tokens[: (n + 1) * config.page_tokens].tobytes() for n in range(whole)}
            reached[request.conversation] = -whole * config.page_tokens
        reached[request.conversation] += request.tokens.size + request.output_tokens
    pages = len(begun) + sum(-(-tokens // config.page_tokens) for tokens in reached.values())
    longest = -(-longest_conversation(requests) // config.page_tokens)
    page_bytes = config.geometry().page_bytes
    beside = 1 << 20  # of each volume, for its records, more than enough
    shared_volume = min((pages // 4 + 1) * page_bytes + beside, shared_room * 3 // 4 // 6)
    disk_volume = pages * page_bytes + beside
    return Sizes(
        device_pages=2 * longest + 4,
        host_pages=pages * 5 // 4,
        shared_bytes=6 * shared_volume,
        shared_volume_bytes=shared_volume,
        disk_bytes=6 * disk_volume,
        disk_volume_bytes=disk_volume,
        batch=2,
    )


def _too_small(options: DemoOptions, told: Conversations | None, base: Scenario) -> str:
    """Say why not every tier need serve hits in this run; empty: the tiers are sized so that each does."""
    if options.prompts is not None:
        return "prompts of your own need not fill the tiers"
    enough = len(told.requests) if told is not None else _requests_that_fill(options)
    if base.requests >= enough:
        return ""
    return f"too few requests to fill the tiers ({base.requests}, and {enough} do)"


def _play(acts: Acts, base: Scenario, *, unjudged: str) -> tuple[list[Check], dict[str, Summary]]:
    """Run the acts in order and check each.

    Args: unjudged: why a tier may serve nothing in this run; empty where each must.
    """
    directory = Path(base.record).parent

    def record(name: str) -> Record:
        return Record.load(directory / f"{name}.npz")

    warm = min(WARM_REQUESTS if base.texts is None else base.users, base.requests)
    last = base.requests - warm
    served, unbounded = str(directory / "served.npz"), str(directory / "unbounded.npz")
    runs = {"unbounded": acts.run("unbounded", "oracle 1: unbounded device pool", mode="unbounded")}
    runs["recompute"] = acts.run("recompute", "oracle 2: no reuse at all", mode="recompute", replay=unbounded)
    runs["served"] = acts.run_and_kill("served", "serve through four tiers, then SIGKILL")
    # Text is answered anew: the same answers come back. Random weights may waver at a tie, so theirs are given again.
    before = {"replay": served} if base.texts is None else {"history": served}
    again = {"first": last, "requests": warm, **before}
    runs["shared"] = acts.run("shared", "after SIGKILL: warm from shared memory", **again)
    runs["swapped"] = acts.run(
        "swapped", "negative control: a page swapped behind the tiers", swap_staged_page=True, **again
    )
    shutil.rmtree(base.shared_path)
    acts.note("disk", "removed")
    runs["disk"] = acts.run("disk", "shared memory removed: warm from disk", **again)
    ours = record("served")
    records = {name: record(name) for name in ("unbounded", "recompute", "shared", "swapped", "disk")}
    checks = [
        _compared(
            "oracle 1: every logit equal to an unbounded pool's, to the last bit", compare(ours, records["unbounded"])
        ),
        _compared(
            f"oracle 2: equal to no reuse (generated prefixes within {TOLERANCE})",
            compare(ours, records["recompute"], tolerance=TOLERANCE),
        ),
        _compared("after SIGKILL: the same logits", compare(records["shared"], ours, tolerance=TOLERANCE)),
        _compared("from disk alone: the same logits", compare(records["disk"], ours, tolerance=TOLERANCE)),
        *([] if base.texts is None else [_same_answers(ours, records)]),
        _negative(compare(records["swapped"], ours, tolerance=TOLERANCE), runs["swapped"]),
        _every_tier(runs, unjudged=unjudged),
        _has_hits("after SIGKILL prefixes come from shared memory", [runs["shared"]], ("shared",)),
        _has_hits("without shared memory prefixes come from disk", [runs["disk"]], ("disk",)),
        Check(
            name="no checksum failed",
            holds=all(run.checksum_failures == 0 for run in runs.values()),
            detail=f"{sum(run.checksum_failures for run in runs.values())} failures",
        ),
    ]
    return checks, runs


def _measure(acts: Acts, base: Scenario) -> list[Measured]:
    served = str(Path(base.record).with_name("served.npz"))
    return acts.measure("measured", "for the report: measure loads and computations alone", history=served)


def _same_answers(ours: Record, records: dict[str, Record]) -> Check:
    """Hold what greedy decoding chose, in every act but the negative control, against the answers that were served."""
    compared, other = 0, []
    for name in ("unbounded", "recompute", "shared", "disk"):
        for request in records[name].finished():
            chosen, answer = records[name].served[request].likeliest, ours.answer(request)
            compared += 1
            if chosen[: answer.size] != answer.tolist():
                other.append(f"request {request} ({name})")
    return Check(
        name="the same answers in all acts",
        holds=compared > 0 and not other,
        detail=f"{compared} answers, {ours.answered_tokens()} tokens in the act that was killed"
        + (f"; OTHERS: {', '.join(other)}" if other else ""),
    )


def _answers(told: Conversations, record: Record) -> list[Answer]:
    """Return what was said and answered."""
    return [
        Answer(
            request=request,
            user=told.spoken[request].user,
            turn=told.spoken[request].turn,
            said=told.spoken[request].said,
            answer=told.chat.text(record.answer(request)).strip(),
        )
        for request in sorted(record.finished())
    ]


def _labelled(run: Summary, told: Conversations) -> Summary:
    """Give the edges of a tree the text that they begin with."""
    tree: list[TreeEdge] = [msgspec.structs.replace(edge, label=told.chat.words(edge.tokens)) for edge in run.tree]
    return msgspec.structs.replace(run, tree=tree)


def _compared(name: str, result: Comparison) -> Check:
    detail = f"{result.equal} positions bit-equal"
    if result.close:
        detail += f", {result.close} within {result.largest:.2g}"
    if result.differences:
        detail += f"; {len(result.differences)} DIFFER: " + "; ".join(str(d) for d in result.differences[:3])
    return Check(name=name, holds=result.holds, detail=detail, equal=result.equal, close=result.close)


def _negative(result: Comparison, run: Summary) -> Check:
    found, name = len(result.differences), "negative control: a swapped page is seen"
    if not found and run.requests < 2:
        return Check(name=name, holds=None, detail="one request has no page of another to be given")
    return Check(
        name=name,
        holds=found > 0 and run.checksum_failures == 0,
        detail=f"{found} positions differ, as they must" if found else "nothing differs: the comparison is blind",
    )


def _has_hits(name: str, runs: list[Summary], tiers: tuple[str, ...]) -> Check:
    found = {tier: sum(run.reused_tokens.get(tier, 0) for run in runs) for tier in tiers}
    return Check(
        name=name,
        holds=all(found.values()),
        detail=", ".join(f"{tokens} tokens from {tier}" for tier, tokens in found.items()),
    )


def _every_tier(runs: dict[str, Summary], *, unjudged: str) -> Check:
    """Check that each tier serves; where one does not and need not, this run cannot tell."""
    check = _has_hits("every tier serves hits", [runs[name] for name in TIERED], TIERS)
    if check.holds or not unjudged:
        return check
    return msgspec.structs.replace(check, holds=None, detail=f"{unjudged}: {check.detail}")


def _notes(base: Scenario, why: str) -> list[str]:
    config = base.config
    weights = f"random weights (seed {base.seed})" if base.weights is None else f"weights {config.weights[:12]}"
    notes = [
        f"model: {why}" if base.trace is None else "model: random weights, for a trace has no texts",
        f"{config.name}: {config.layers} layers, {weights}",
    ]
    if base.trace is not None:
        _, trace = requests_of(base)
        assert trace is not None
        notes.append(
            f"trace: the first {base.requests} requests; a block of 512 tokens is one page of 16, lengths are divided "
            f"by {trace.scale}; {trace.capped_prompts} prompts cut to the model's context ({trace.dropped_tokens} "
            f"tokens), {trace.capped_outputs} answers shortened"
        )
    return notes


def _told_sizes(base: Scenario) -> str:
    """Return the sizes for the console; the result has them as numbers."""
    page, sizes = base.config.geometry().page_bytes, base.sizes
    return (
        f"a page is {base.config.page_tokens} tokens, {page // 1024} KiB; tiers: device {sizes.device_pages} pages, "
        f"host {sizes.host_pages} pages, shared {sizes.shared_bytes >> 20} MiB, disk {sizes.disk_bytes >> 20} MiB"
    )


def _progress(console: Console) -> TalkProgress:
    return TalkProgress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _print(console: Console, report: Report) -> None:
    served, recompute = report.runs["served"], report.runs["recompute"]
    console.print(_tier_table(served, report))
    console.print(
        f"  the first act: {served.requests} requests, {served.prompt_tokens} prompt tokens, "
        f"{sum(served.reused_tokens.values())} reused, {served.computed_tokens} computed (generated ones "
        f"included), {served.preemptions} preemptions; {served.seconds:.1f} s beside {recompute.seconds:.1f} s without "
        "reuse"
    )
    for check in report.checks:
        colour = {True: "green", False: "bold red", None: "yellow"}[check.holds]
        console.print(Text.assemble("  ", (check.verdict, colour), f"  {check.name}: {check.detail}"))
    verdict = (report.verdict, "bold green" if report.ok else "bold red")
    console.print(Text.assemble(verdict, f" ({report.seconds:.0f} s)"))


def _tier_table(served: Summary, report: Report) -> Table:
    """Show per tier what was reused and what moved; and how long the requests that lived on it mostly took."""
    recomputed = {one.request: one.first_token for one in report.runs["recompute"].served}
    table = Table(
        title="the three acts through all tiers (served, after SIGKILL, from disk)",
        caption="tokens and MB: by the tier they came from or went to; requests and their median times: by the tier "
        "that held most of the prefix",
    )
    moved = ("tier", "tokens reused", "MB read", "MB written")
    for column in (*moved, "requests mostly from it", "load ms", "first token ms", "recomputed ms"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    everything = [*served.served, *report.runs["shared"].served, *report.runs["disk"].served]
    for tier in (*TIERS, NOTHING):
        mine = [one for one in everything if (_mostly_from(one) or NOTHING) == tier]

        def median(values: list[float]) -> str:
            return f"{statistics.median(values) * 1e3:.1f}" if values else "-"

        is_below = tier in TIERS[1:]
        table.add_row(
            tier,
            str(sum(run.reused_tokens.get(tier, 0) for run in _tier_runs(report))) if tier in TIERS else "-",
            f"{sum(run.bytes_read.get(tier, 0) for run in _tier_runs(report)) / 1e6:.1f}" if is_below else "-",
            f"{sum(run.bytes_written.get(tier, 0) for run in _tier_runs(report)) / 1e6:.1f}" if is_below else "-",
            str(len(mine)),
            median([one.wait for one in mine]) if tier in TIERS else "-",
            median([one.first_token for one in mine]),
            median([recomputed[one.request] for one in mine if one.request in recomputed]),
        )
    return table


def _mostly_from(served: Served) -> str | None:
    """Return the tier that held most of what was found; None where nothing was."""
    return max(served.found, key=lambda tier: served.found[tier]) if any(served.found.values()) else None


def _tier_runs(report: Report) -> list[Summary]:
    return [report.runs[name] for name in TIERED]
