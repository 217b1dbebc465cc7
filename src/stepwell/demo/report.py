"""Write the HTML report of a run: one file that loads nothing, made by a pure function of the run.

The text is well-formed XML too, so that tests can take it apart. Every text that comes from outside (prompts, answers,
file names) passes charts.escape; the run itself is embedded as JSON in which <, > and & are \\u escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import secrets
from pathlib import Path

import msgspec

from stepwell.demo import analysis, figures
from stepwell.demo.analysis import ACTS, SOURCES, Cost
from stepwell.demo.charts import capacity, count, duration, escape, percent, rounded, size
from stepwell.demo.markup import MARKS, POLICY, STYLE, behind, figure, fills, key, paragraph, section, table
from stepwell.demo.results import TIERED, TIERS, Report
from stepwell.demo.scenario import Served
from stepwell.demo.tree import MOST_EDGES

MOST_ROWS = 100
"""Rows of a table; what it leaves out is in the embedded JSON."""

MOST_EMBEDDED = 200
"""Requests and edges of an act in the embedded JSON: a long trace must not make a file of many MB."""


def write_report(report: Report, path: Path) -> None:
    """Write the page whole: what was there stays until all of it is written. Raises: OSError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:  # new, and no link that somebody put into a directory of all
            file.write(render(report).encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def render(report: Report) -> str:
    """Return the page of a run: the same text for the same run."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    title = escape(f"stepwell demo: {report.model}, {report.verdict}")
    sections = (_verdict, _over_time, _return, _load_or_compute, _tree, _bytes, _answers, _raw)
    body = "\n".join(part(report) for part in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY.format(digest=digest))}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="referrer" content="no-referrer"/>'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n<main>\n{body}\n</main>\n</body></html>\n"
    )


# ---- sections -------------------------------------------------------------------------------------------------------


def _title(act: str) -> str:
    return ACTS.get(act, act)


def _verdict(report: Report) -> str:
    judged = [check for check in report.checks if check.holds is not None]
    holding, unjudged = sum(check.holds is True for check in judged), len(report.checks) - len(judged)
    verdict = report.verdict.capitalize()
    mark, kind = ("✓", "good") if report.ok else ("✗", "bad")
    tiered = [act for act in TIERED if act in report.runs]
    tokens = analysis.totals(report)
    reused, whole = sum(tokens[tier] for tier in TIERS), sum(tokens.values())
    verified = sum(sum(analysis.verified_bytes(report, act).values()) for act in tiered)
    failures = sum(run.checksum_failures for run in report.runs.values())
    cards = [
        (f"{holding} of {len(judged)}", f"checks hold; {unjudged} not judged" if unjudged else "checks hold"),
        (
            percent(reused, whole),
            f"of {count(whole)} prompt tokens of the acts with four tiers came from a tier ({count(reused)})",
        ),
        (size(verified), f"read from lower tiers and verified, {count(failures)} checksum failures"),
        (size(sum(report.runs[act].bytes_written.get("disk", 0) for act in tiered)), "written to SSD"),
    ]
    for one in analysis.returns(report):
        first = dict(one.steps).get("first prefix on the device")
        if first is not None:
            cards.append((duration(first), f"from {one.what} to the first cached prefix in a new process"))
    shown = "".join(f'<li class="card"><b>{escape(value)}</b><span>{escape(what)}</span></li>' for value, what in cards)
    checks = [(check.verdict, check.name, check.detail) for check in report.checks]
    when = f"{report.begun}; " if report.begun else ""
    return (
        f'<header><h1>stepwell demo: {escape(report.model)}</h1><p class="verdict {kind}">{mark} {verdict}</p>'
        + paragraph(f"{when}{count(report.requests)} requests, {duration(report.seconds)} in all", "quiet")
        + f'</header><ul class="cards">{shown}</ul>'
        + '<section id="verdict">'
        + table("What must hold, and whether it does", ("", "check", "detail"), checks, words=3)
        + _setting(report)
        + "</section>"
    )


def _setting(report: Report) -> str:
    rows: list[tuple[str, object]] = [("model", report.model)]
    if report.page_tokens:
        token = capacity(report.page_bytes // report.page_tokens)
        rows.append(("a page", f"{report.page_tokens} tokens, {capacity(report.page_bytes)}; {token} of KV a token"))
    if report.trace is not None:
        rows.append(("trace", report.trace))
    if (sizes := report.sizes) is not None:
        device, host = (pages * report.page_bytes for pages in (sizes.device_pages, sizes.host_pages))
        rows += [
            ("device tier", f"{count(sizes.device_pages)} pages, {capacity(device)}"),
            ("host tier", f"{count(sizes.host_pages)} pages, {capacity(host)}"),
            ("shared tier", f"{capacity(sizes.shared_bytes)} in volumes of {capacity(sizes.shared_volume_bytes)}"),
            ("disk tier", f"{capacity(sizes.disk_bytes)} in volumes of {capacity(sizes.disk_volume_bytes)}"),
            ("batch", f"{sizes.batch} sequences at once"),
        ]
    if (machine := report.machine) is not None:
        rows += [
            ("processor", f"{machine.processor}, {machine.cores} cores for this process"),
            ("memory", capacity(machine.memory_bytes)),
            ("load when it began", f"{machine.load:.2f} processes over a minute"),
            ("shared memory on", machine.shared_file_system),
            ("disk on", machine.disk_file_system),
            ("system", f"{machine.kernel}, Python {machine.python}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return (
        "<h3>On what</h3>"
        + table("Model, tiers and machine", ("", ""), rows, words=2)
        + (f'<ul class="quiet">{notes}</ul>' if notes else "")
    )


def _over_time(report: Report) -> str:
    acts = "".join(f"<li>{escape(span.title)}</li>" for span in analysis.spans(report))
    bins = [
        (
            f"{one.start:.6g}-{one.end:.6g} s",
            _title(one.act),
            count(one.requests),
            *(count(one.tokens[s]) for s in SOURCES),
        )
        for one in analysis.tokens_over_time(report)
    ]
    totals = []
    for act in ACTS:
        if act not in report.runs:
            continue
        run = report.runs[act]
        parts = {source: sum(analysis.sources(one)[source] for one in run.served) for source in SOURCES}
        totals.append(
            (_title(act), count(run.requests), count(sum(parts.values())), *(count(parts[s]) for s in SOURCES))
        )
    return section(
        "tokens",
        "Where prompt tokens came from",
        paragraph(
            "A prompt's tokens are found in a tier, nearest first, or computed. The oracles have a device pool that "
            "holds everything, or reuse nothing; the other acts have four small tiers, so that pages travel."
        ),
        key(fills(*SOURCES)),
        figure(figures.shares(report)),
        behind(
            "Tokens by act, as a table",
            table("Prompt tokens by act", ("act", "requests", "prompt tokens", *SOURCES), totals),
        ),
        "<h3>Over time</h3>",
        figure(
            figures.over_time(report),
            "A request counts when its first token came. Where nothing stands a process starts, compiles or ends.",
        ),
        f'<ol class="acts">{acts}</ol>',
        behind(
            "Tokens over time, as a table",
            table("Prompt tokens over time", ("from-to", "act", "requests", *SOURCES), bins[:MOST_ROWS], words=2),
        ),
    )


def _return(report: Report) -> str:
    back = analysis.returns(report)
    steps = list(dict.fromkeys(step for one in back for step, _ in one.steps))
    rows: list[list[object]] = []
    for step in steps:
        rows.append([step, *(duration(dict(one.steps)[step]) if step in dict(one.steps) else "-" for one in back)])
    rows.append(["opening the store itself took", *(duration(one.open_seconds) for one in back)])
    found = "".join(
        f"<li>After {escape(one.what)} the first prefix that was found is {_found(one.first_found)}; in all the act "
        f"finds {_found(one.reused)}.</li>"
        for one in back
    )
    head = ("step, after", *(one.what for one in back))
    return section(
        "return",
        "Killed, and back warm",
        paragraph(
            "The serving process is killed with SIGKILL while it serves. A new process opens the same directories and "
            "finds the prefixes in shared memory and on disk. Then the negative control runs: it swaps two pages "
            "behind every check, and must be seen to. Then the shared memory is removed, and what is left comes from "
            "disk."
        ),
        key(
            {f"phase-{kind}": words for kind, words, _, _ in figures.PHASES} | {"hit": "first cached prefix"},
            shapes={"hit": "diamond"},
            what="phases and marks",
        ),
        figure(figures.time_line(report)),
        table("The return, step by step: time since the kill, and since the removal", head, rows)
        if back
        else paragraph("Nothing was killed in this run."),
        f"<ul>{found}</ul>" if back else "",
        paragraph(
            "Most of it is starting Python and JAX, reading weights and compiling. Opening the store, with the volumes "
            "of the dead process adopted, has a line of its own.",
            "quiet",
        ),
    )


def _found(tokens: dict[str, int]) -> str:
    return ", ".join(f"{count(tokens[tier])} tokens from {tier}" for tier in TIERS if tokens.get(tier)) or "nothing"


def _load_or_compute(report: Report) -> str:
    curves, model = analysis.curves(report.measured), analysis.modelled(report)
    points = figures.traffic_points(report)
    computed = next((curve.cost for curve in curves if curve.source == "computed"), None)
    bytes_a_token = analysis.bytes_per_token(report)
    head = ["from", "fixed", "per 1000 tokens", "KV bytes/s", "pays here", "pays against a device slower than"]
    if model is not None:
        head.append("modelled: pays")
    rows = []
    for curve in curves:
        cost = curve.cost
        if curve.source == "computed" or cost is None:
            continue
        per_token = cost.per_token
        row = [
            curve.source,
            duration(cost.fixed) if cost.fixed else "none seen",
            duration(per_token * 1000),
            f"{size(float(f'{bytes_a_token / per_token:.2g}'))}/s" if per_token and bytes_a_token else "-",
            _pays(cost, computed, report.page_tokens),
            f"{rounded(1 / per_token)} tokens/s" if per_token else "-",
        ]
        rows.append(row if model is None else [*row, _pays(cost, model, report.page_tokens)])
    if computed is not None:
        row = ["computed", duration(computed.fixed), duration(computed.per_token * 1000), "-", "-"]
        row.append(f"{rounded(1 / computed.per_token)} tokens/s here" if computed.per_token else "-")
        rows.append(row if model is None else [*row, "-"])
    medians = [
        (
            curve.source,
            count(n),
            duration(seconds),
            count(sum(1 for one in report.measured if (one.source, one.tokens) == (curve.source, n))),
        )
        for curve in curves
        for n, seconds in curve.points
    ]
    said = (
        f"The dashed line is modelled, not measured: {count(report.gpu_tokens_per_second or 0)} prompt tokens of this "
        "model a second, as stated with --gpu-tokens-per-second, the same for each token."
        if model is not None
        else "State the rate of your device with --gpu-tokens-per-second N, and it is modelled beside these lines."
    )
    machine, load, busy = report.machine, report.measured_load, ""
    if report.measured and machine is not None and load is not None and load > machine.cores:
        busy = f"The machine was busy (load {load:.1f} on {machine.cores} cores): these times are upper bounds."
    return section(
        "load",
        "Load or compute",
        paragraph(
            "How long until a prefix is on the device: loaded from a tier, or computed again. Measured after the run, "
            "one prefix at a time with nothing else running in it, after what nearer tiers held was dropped; medians "
            "by length. Lengths beyond the marks are extrapolated by the lines of the table."
        ),
        paragraph(busy) if busy else "",
        figure(figures.load_or_compute(report)),
        table("A line through each: fixed time, time per token, and from which length on loading pays", head, rows)
        if rows
        else paragraph("Nothing was measured alone in this run, so there is no break-even to give."),
        paragraph(
            "The device of this demo is JAX on the CPU: its memory is host memory, so the copy to a GPU (over PCIe or "
            "NVLink) is in none of these figures. " + said
        ),
        behind(
            "What was measured alone, as a table",
            table("Medians by source and length", ("from", "tokens", "seconds", "samples"), medians),
        ),
        "<h3>In traffic</h3>",
        paragraph(
            "What the requests of the run met. This is not the speed of a tier: a request also waits for the steps of "
            "others in its batch, and for room. Each is put under the tier that held most of its prefix."
            + (f" Of {count(len(points))} every n-th is drawn." if len(points) > figures.MOST_MARKS else "")
        ),
        key(fills(*SOURCES), shapes=MARKS, what="marks"),
        figure(figures.in_traffic(report)),
        behind(
            "Requests in traffic, as a table",
            table(
                "What requests waited: under a tier until the prefix was on the device, computed until the first token",
                ("from", "request", "tokens", "seconds"),
                [(s, str(r), count(n), duration(t)) for s, n, t, r in points[:MOST_ROWS]],
            ),
        ),
    )


def _pays(load: Cost, compute: Cost | None, page_tokens: int) -> str:
    """Say which prefixes load faster, in whole pages."""
    if compute is None:
        return "-"
    found = analysis.break_even(load, compute)
    page = max(page_tokens, 1)
    if found.first is None or (found.last is not None and found.last < page):
        return "never"
    if found.last is not None:
        return f"up to {count(found.last // page * page)} tokens"
    return f"from {count(max(math.ceil(found.first / page), 1) * page)} tokens on"


def _tree(report: Report) -> str:
    acts = [act for act in TIERED if act in report.runs and report.runs[act].tree]
    is_cut = any(len(report.runs[act].tree) >= MOST_EDGES for act in acts)
    parts = []
    for act in acts:
        edges = report.runs[act].tree
        by_tier = analysis.pages_by_tier(edges)
        rows = [
            (
                count(number),
                "-" if edge.parent is None else count(edge.parent + 1),
                count(edge.first_page * report.page_tokens),
                count(edge.pages),
                count(edge.sequences),
                ", ".join(f"{run} {tier or 'nowhere'}" for tier, run in edge.nearest),
                figures.beginning(edge),
            )
            for number, edge in enumerate(edges[:MOST_ROWS], 1)
        ]
        head = ("edge", "under", "first token", "pages", "sequences", "pages by nearest tier", "begins with")
        parts += [
            f"<h3>{escape(_title(act))}</h3>",
            figure(
                figures.tree(report, act),
                f"{count(sum(by_tier.values()))} pages: "
                + ", ".join(f"{count(pages)} {tier or 'nowhere'}" for tier, pages in by_tier.items() if pages),
            ),
            behind("Edges, as a table", table("Edges of the tree, parents first", head, rows)),
        ]
    return section(
        "tree",
        "The radix tree",
        paragraph(
            "What the sequences of an act share, at its end. Down is deeper into the prompt, an edge is as wide as all "
            "pages from it downwards, and its colour is the fastest tier from which a request would get the page; 4× "
            "says that four sequences share it. Point at an edge for what it holds."
            + (f" The {MOST_EDGES} edges with most pages below them are drawn." if is_cut else "")
        )
        if acts
        else paragraph("No picture of the tree was taken in this run."),
        key(fills(*TIERS, "nowhere")) if acts else "",
        *parts,
    )


def _bytes(report: Report) -> str:
    acts = [act for act in ACTS if act in report.runs]
    rows = []
    for act in acts:
        run = report.runs[act]
        read = analysis.verified_bytes(report, act)
        rows.append(
            (
                _title(act),
                *(size(read[tier]) for tier in TIERS[1:]),
                size(sum(read.values())),
                count(run.checksum_failures),
                *(size(run.bytes_written.get(tier, 0)) for tier in TIERS[1:]),
            )
        )
    head = (
        "act",
        *(f"{tier} read" for tier in TIERS[1:]),
        "verified",
        "failures",
        *(f"{tier} written" for tier in TIERS[1:]),
    )
    swapped = report.runs.get("swapped")
    control = next((check for check in report.checks if "negative control" in check.name), None)
    said = ""
    if swapped is not None and control is not None:
        said = (
            "The negative control breaks the cache on purpose: two pages change places after their checksums were "
            f"checked, so its {count(swapped.checksum_failures)} checksum failures are no surprise, and only the "
            f"comparison of logits can see it. It {'did' if control.holds else 'DID NOT'}: {control.detail}."
        )
    return section(
        "bytes",
        "Bytes verified, and written",
        paragraph(
            "Every byte that is read from host memory, shared memory or disk is checked against the checksum that was "
            "made when it was written (CRC-32C, one for each layer of a page). A page that fails is a miss, never an "
            "answer."
        ),
        key(fills(*TIERS[1:])),
        figure(figures.verified(report)),
        table("Payload by act. Verified is all that was read; failures are of checksums", head, rows),
        paragraph(said) if said else "",
    )


def _answers(report: Report) -> str:
    if not report.answers:
        return ""
    served = {one.request: one for one in report.runs["served"].served} if "served" in report.runs else {}
    lines = []
    for one in report.answers[:MOST_ROWS]:
        source = figures.listed(analysis.sources(served[one.request])) if one.request in served else "-"
        lines.append(
            f'<tr><th scope="row" class="said">{escape(one.user)}</th><td class="n">{one.turn}</td>'
            f'<td class="said"><bdi>{escape(one.said)}</bdi></td><td class="said"><bdi>{escape(one.answer)}</bdi></td>'
            f"<td>{escape(source)}</td></tr>"
        )
    names = ("user", "turn", "said", "answer", "tokens of the prompt from")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return section(
        "answers",
        "What was said",
        paragraph(
            "As the act that was then killed answered it. The acts after it gave the same answers, or a check fails."
        ),
        '<div class="wide"><table><caption>Conversations, by request</caption><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>",
    )


def _raw(report: Report) -> str:
    parts = []
    for act in ACTS:
        if act not in report.runs:
            continue
        rows = [_request_row(one) for one in report.runs[act].served[:MOST_ROWS]]
        head = ("request", "prompt", *SOURCES, "answer", "admitted", "wait", "first token", "finished")
        caption = f"Requests of the act: {_title(act)}"
        if len(report.runs[act].served) > MOST_ROWS:
            caption += f" (the first {MOST_ROWS} of {count(len(report.runs[act].served))})"
        parts.append(behind(caption, table(caption, head, rows)))
    acts: list[tuple[object, ...]] = []
    for act in ACTS:
        if act in report.runs:
            run = report.runs[act]
            acts.append(
                (
                    _title(act),
                    count(run.requests),
                    count(run.prompt_tokens),
                    count(run.computed_tokens),
                    count(run.generated_tokens),
                    count(run.preemptions),
                    duration(run.opened),
                    duration(run.seconds),
                    ", ".join(f"{tier} {count(pages)}" for tier, pages in run.evicted_pages.items() if pages) or "-",
                    ", ".join(f"{reason} {count(pages)}" for reason, pages in run.misses.items() if pages) or "-",
                )
            )
    columns = (
        *("act", "requests", "prompt tokens", "computed tokens", "generated tokens", "preemptions", "open", "serving"),
        *("evicted pages", "missed pages"),
    )
    moments = [(f"{one.at:.3f} s", _title(one.act), one.what) for one in report.moments]
    return section(
        "raw",
        "Raw numbers",
        table("The acts. Computed tokens include generated ones", columns, acts),
        behind("Moments", table("Moments, seconds since the demo began", ("at", "act", "what"), moments, words=3)),
        *parts,
        paragraph("The run itself is in this file as JSON: the element script with the id run.", "quiet"),
        f'<script type="application/json" id="run">{embedded(report)}</script>',
    )


def _request_row(one: Served) -> tuple[object, ...]:
    parts = analysis.sources(one)
    times = (duration(value) for value in (one.admitted, one.wait, one.first_token, one.finished))
    return (one.request, count(one.prompt), *(count(parts[source]) for source in SOURCES), count(one.answer), *times)


def embedded(report: Report) -> str:
    """Return the run as JSON that cannot end the element it stands in; of a long act only its first requests."""
    runs = {
        name: msgspec.structs.replace(run, served=run.served[:MOST_EMBEDDED], tree=run.tree[:MOST_EMBEDDED])
        for name, run in report.runs.items()
    }
    short = msgspec.structs.replace(report, runs=runs, answers=report.answers[:MOST_EMBEDDED])
    text = json.dumps(msgspec.to_builtins(short), separators=(",", ":"))  # all that is not ASCII as \u escapes
    for letter in "<>&\x7f":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
