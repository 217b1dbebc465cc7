"""Draw the charts of a report, each a function from a run to SVG: text from numbers, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.demo import analysis
from stepwell.demo.analysis import SOURCES, Curve, Span
from stepwell.demo.charts import (
    CHARACTER,
    WIDTH,
    Drawing,
    Scale,
    count,
    duration,
    linear,
    logarithmic,
    percent,
    size,
    spread,
    wrap,
)
from stepwell.demo.markup import SHAPE
from stepwell.demo.results import TIERED, TIERS, Report
from stepwell.demo.scenario import Served, TreeEdge

LEFT, RIGHT = 64.0, WIDTH - 16.0
MOST_MARKS = 800


def listed(tokens: dict[str, int]) -> str:
    """Say how many tokens came from where."""
    return ", ".join(f"{source} {count(tokens[source])}" for source in SOURCES if tokens.get(source))


# ---- where tokens came from -----------------------------------------------------------------------------------------


def shares(report: Report) -> str:
    """Draw one bar an act: its prompt tokens by where they came from."""
    acts = [act for act in analysis.ACTS if act in report.runs]
    drawing = Drawing(
        "shares",
        "Prompt tokens of each act by where they came from",
        "One bar for each act, its whole length all prompt tokens of the act. The table below has the numbers.",
        30 * len(acts) + 12,
    )
    left = 220.0
    for row, act in enumerate(acts):
        y = 6 + 30 * row
        tokens = {source: sum(analysis.sources(one)[source] for one in report.runs[act].served) for source in SOURCES}
        whole = sum(tokens.values())
        drawing.text(left - 10, y + 17, analysis.ACTS[act], "label", anchor="end")
        if not whole:
            drawing.text(left, y + 17, "no request", "tick")
        x = left
        for source in SOURCES:
            width = (RIGHT - left) * tokens[source] / whole if whole else 0.0
            if not tokens[source]:
                continue
            title = f"{analysis.ACTS[act]}: {count(tokens[source])} tokens, {percent(tokens[source], whole)}, {source}"
            drawing.rect(x, y + 2, width, 22, f"fill-{source} part", title=title)
            label = f"{source} {100 * tokens[source] / whole:.0f} %"
            if width > len(label) * CHARACTER + 10:
                drawing.text(x + 6, y + 17, label, f"on-{source}")
            x += width
    return drawing.svg()


def over_time(report: Report) -> str:
    """Draw prompt tokens over the run's time, stacked by where they came from, with acts and what was taken away."""
    bins, width = analysis.tokens_over_time(report), analysis.bin_width(report)
    drawing = Drawing(
        "over-time",
        "Prompt tokens over time, by the tier they came from",
        f"Stacked bars of {duration(width)} each over the {duration(report.seconds)} of the run; a request counts when "
        "it had its first token. Acts are bands with numbers. The table below has the numbers.",
        372,
    )
    top, bottom = 76.0, 322.0
    x = linear([report.seconds, *(one.end for one in bins)], LEFT, RIGHT)
    stacked: dict[float, int] = {}
    for one in bins:
        stacked[one.start] = stacked.get(one.start, 0) + sum(one.tokens.values())
    y = linear([value * 1.02 for value in stacked.values()], bottom, top)
    for number, span in enumerate(analysis.spans(report), 1):
        left, right = x(span.started), x(span.ended)
        drawing.rect(left, 48, right - left, bottom - 48, "band odd" if number % 2 else "band", title=span.title)
        if right - left > 12:
            drawing.text((left + right) / 2, 63, str(number), "act", anchor="middle")
    drawing.rows(y, LEFT, RIGHT, "")
    drawing.text(4, 63, "tokens", "label")
    drawing.columns(x, bottom, bottom, "seconds since the demo began")
    base: dict[float, float] = {}
    for one in bins:
        for source in reversed(SOURCES):
            tokens = one.tokens[source]
            if not tokens:
                continue
            below = base.get(one.start, 0.0)
            base[one.start] = below + tokens
            when = f"{one.start:.6g} to {one.end:.6g} s"
            title = f"{analysis.ACTS.get(one.act, one.act)}, {when}: {count(tokens)} tokens {source}"
            height = y(below) - y(below + tokens)
            drawing.rect(
                x(one.start) + 0.5,
                y(below + tokens),
                x(one.end) - x(one.start) - 1,
                height,
                f"fill-{source}",
                title=title,
            )
    _taken_away(drawing, report, x, 16.0, bottom)
    return drawing.svg()


def _taken_away(drawing: Drawing, report: Report, x: Scale, top: float, bottom: float) -> None:
    """Mark the kill and the removal with lines from above to below; labels stand beside them, in two rows.

    The removal comes later, so its label is above: the line of the kill begins below that, and its label ends before
    the line of the removal.
    """
    killed, removed = report.moment("served", "killed"), report.moment("disk", "removed")
    room = RIGHT
    for y, at, words in ((top, removed, "shared memory removed"), (top + 17, killed, "SIGKILL")):
        if at is not None:
            label = f"{words} at {at:.2f} s"
            is_late = x(at) + 5 + len(label) * CHARACTER * 1.1 > room
            drawing.line(x(at), y - 10, x(at), bottom, "event")
            drawing.text(
                x(at) + (-5 if is_late else 5), y, label, "event-label", anchor="end" if is_late else "start"
            )
            room = x(at)


# ---- the kill and the return ----------------------------------------------------------------------------------------

PHASES = (
    ("start", "Python, JAX, weights, opening the store", "started", "opened"),
    ("compile", "compiling", "opened", "serving"),
    ("serve", "serving its requests", "serving", "served"),
    ("after", "serving on until killed, or closing", "served", "ended"),
)


def time_line(report: Report) -> str:
    """Draw the processes around the kill as lanes on one clock."""
    lanes = [span for span in analysis.spans(report) if span.act in (*TIERED, "swapped")]
    drawing = Drawing(
        "time-line",
        "The kill and the return on one time line",
        "A lane for each serving process: starting, compiling, serving. Lines mark SIGKILL and the removal of shared "
        "memory; diamonds the first cached prefix on the device. The table below has the seconds.",
        66 + 58 * max(len(lanes), 1) + 50,
    )
    left, top = 190.0, 54.0
    bottom = top + 58 * max(len(lanes), 1)
    begin = lanes[0].started if lanes else 0.0
    end = max((span.ended for span in lanes), default=begin + 1)
    x = Scale(begin, end if end > begin else begin + 1, left, RIGHT)
    drawing.columns(x, top - 6, bottom, "seconds since the demo began")
    _taken_away(drawing, report, x, 16.0, bottom)
    back = {one.act: one for one in analysis.returns(report)}
    for row, span in enumerate(lanes):
        _lane(drawing, span, x, top + 58 * row, left)
        if span.act in back:
            one = back[span.act]
            steps = dict(one.steps)
            if "first prefix on the device" in steps:
                at = one.since + steps["first prefix on the device"]
                title = f"first cached prefix on the device, {duration(at - one.since)} after: {one.what}"
                drawing.mark(x(at), top + 58 * row + 16, "diamond", "hit", title=title, radius=6)
            words = "store open +" + duration(steps["store open"]) if "store open" in steps else ""
            if "first prefix on the device" in steps:
                words += " · first prefix +" + duration(steps["first prefix on the device"])
        elif span.act == "swapped":
            words = "made to fail: a page is swapped"
        else:
            words = "killed in mid-work" if span.killed is not None else ""
        is_late = x(span.started) + len(words) * CHARACTER > RIGHT
        if words:
            drawing.note(
                RIGHT if is_late else x(span.started),
                top + 58 * row + 44,
                words,
                "tick",
                anchor="end" if is_late else "start",
            )
    return drawing.svg()


def _lane(drawing: Drawing, span: Span, x: Scale, y: float, left: float) -> None:
    drawing.text(left - 12, y + 21, span.title, "label", anchor="end")
    moments = {
        "started": span.started,
        "opened": span.opened,
        "serving": span.serving,
        "served": span.served,
        "ended": span.ended if span.killed is None else span.killed,
    }
    for kind, words, first, last in PHASES:
        start, end = moments[first], moments[last]
        if start is not None and end is not None:
            title = f"{span.title}: {words}, {duration(end - start)}"
            drawing.rect(x(start), y + 6, max(x(end) - x(start), 0.5), 20, f"phase-{kind}", title=title)


# ---- load or compute ------------------------------------------------------------------------------------------------


def load_or_compute(report: Report) -> str:
    """Draw what was measured alone, by prefix length: each tier, computing, and the modelled device."""
    curves, model = analysis.curves(report.measured), analysis.modelled(report)
    drawing = Drawing(
        "load-or-compute",
        "Seconds until a prefix is on the device, by its length",
        "A line for each tier it is loaded from and one for computing it, medians measured with nothing else running, "
        "seconds on a logarithmic scale"
        + (", and a dashed line that is modelled from the stated rate." if model else ".")
        + " The table below has the numbers.",
        400,
    )
    top, bottom, right = 40.0, 348.0, RIGHT - 206
    lengths = [n for curve in curves for n, _ in curve.points]
    longest = float(max(lengths, default=0))
    seconds = [value for curve in curves for _, value in curve.points]
    if model and lengths:
        seconds += [model.seconds(min(lengths)), model.seconds(longest)]
    x, y = linear([longest * 1.02], LEFT, right), logarithmic(seconds, bottom, top)
    drawing.rows(y, LEFT, right, "seconds, logarithmic", is_time=True)
    drawing.columns(x, bottom, bottom, "tokens of the prefix")
    ends: list[tuple[float, str, str]] = []
    for curve in curves:
        _curve(drawing, curve, x, y)
        words = "computed (measured)" if curve.source == "computed" else f"from {curve.source}"
        ends.append((y(curve.points[-1][1]), curve.source, words))
    if model and lengths:
        first, rate = float(min(lengths)), report.gpu_tokens_per_second
        title = f"modelled: computed at {count(rate or 0)} tokens/s"
        drawing.path([(x(n), y(model.seconds(n))) for n in _steps(first, longest)], "stroke-model", title=title)
        ends.append((y(model.seconds(longest)), "model", f"modelled: {count(rate or 0)} tokens/s"))
    labels = spread([end[0] for end in ends], apart=17, low=top, high=bottom - 4)
    for (_, kind, words), at in zip(ends, labels, strict=True):
        if kind != "model":
            drawing.mark(right + 14, at, SHAPE[kind], f"fill-{kind}")
        else:
            drawing.line(right + 6, at, right + 22, at, "stroke-model")
        drawing.text(right + 28, at + 4, words, "label")
    if not curves:
        drawing.text((LEFT + right) / 2, (top + bottom) / 2, "nothing was measured alone", "label", anchor="middle")
    return drawing.svg()


def _steps(first: float, last: float) -> list[float]:
    return [first + (last - first) * step / 40 for step in range(41)] if last > first else [first]


def _curve(drawing: Drawing, curve: Curve, x: Scale, y: Scale) -> None:
    drawing.path([(x(n), y(seconds)) for n, seconds in curve.points], f"stroke-{curve.source}")
    for n, seconds in curve.points:
        title = f"{curve.source}: {count(n)} tokens in {duration(seconds)}"
        drawing.mark(x(n), y(seconds), SHAPE[curve.source], f"fill-{curve.source} dot", title=title)


def traffic_points(report: Report) -> list[tuple[str, int, float, int]]:
    """Return (source, tokens, seconds, request): what requests met in traffic.

    Of the acts with tiers: tokens found, and the wait until they were on the device, under the tier that held most of
    them. Of the act without reuse: the prompt, and the time to its first token, under "computed".
    """
    tiered = [one for act in TIERED if act in report.runs for one in report.runs[act].served]
    points = [
        (analysis.largest_source(one), sum(one.found.values()), one.wait, one.request)
        for one in tiered
        if any(one.found.values())
    ]
    recomputed: Sequence[Served] = report.runs["recompute"].served if "recompute" in report.runs else ()
    return points + [("computed", one.prompt, one.first_token, one.request) for one in recomputed]


def in_traffic(report: Report) -> str:
    """Draw what each request met in traffic, one mark a request."""
    points = traffic_points(report)
    points = points[:: -(-len(points) // MOST_MARKS) or 1]
    drawing = Drawing(
        "in-traffic",
        "What requests waited in traffic, by length",
        "A mark for each request: tokens found and the wait until they were on the device, by the tier that held most "
        "of them; and, of the act without reuse, the prompt and the time to the first token. A logarithmic scale.",
        330,
    )
    top, bottom = 40.0, 278.0
    x = linear([tokens * 1.02 for _, tokens, _, _ in points], LEFT, RIGHT)
    y = logarithmic([seconds for _, _, seconds, _ in points], bottom, top)
    drawing.rows(y, LEFT, RIGHT, "seconds, logarithmic", is_time=True)
    drawing.columns(x, bottom, bottom, "tokens found; of what was computed: tokens of the prompt")
    for source in reversed(SOURCES):
        for _, tokens, seconds, request in (point for point in points if point[0] == source):
            title = f"request {request}, {source}: {count(tokens)} tokens, {duration(seconds)}"
            drawing.mark(x(tokens), y(seconds), SHAPE[source], f"fill-{source} dot faint", title=title, radius=4)
    if not points:
        drawing.text((LEFT + RIGHT) / 2, (top + bottom) / 2, "no request", "label", anchor="middle")
    return drawing.svg()


# ---- the tree -------------------------------------------------------------------------------------------------------


def tree(report: Report, act: str) -> str:
    """Draw the radix tree at the end of an act as an icicle: down is deeper, wide is many pages."""
    edges, page = report.runs[act].tree, report.page_tokens
    cells = analysis.place(edges)
    pages = sum(edge.pages for edge in edges)
    depth = max((edge.first_page + edge.pages for edge in edges), default=1)
    row = min(max(300 / depth, 6.0), 24.0)
    top = 26.0
    drawing = Drawing(
        f"tree-{act}",
        f"Radix tree at the end of the act: {analysis.ACTS.get(act, act)}",
        f"{count(pages)} pages on {count(len(edges))} edges, {count(depth)} pages deep. An edge is as wide as all "
        "pages from it downwards, as high as it has pages, and coloured by the fastest tier that holds them.",
        top + row * depth + 12,
    )
    x = Scale(0, max(pages, 1), LEFT, RIGHT)
    y = Scale(0, depth, top, top + row * depth)
    tokens = Scale(0, depth * max(page, 1), top, top + row * depth)
    for value in tokens.ticks(6):
        drawing.line(LEFT - 5, tokens(value), LEFT, tokens(value), "axis")
        drawing.text(LEFT - 8, tokens(value) + 4, count(value), "tick", anchor="end")
    drawing.text(4, 13, "tokens deep", "label")
    for cell in cells:
        left, width = x(cell.left), x(cell.left + cell.width) - x(cell.left)
        first = cell.edge.first_page
        for tier, run in cell.edge.nearest:
            drawing.rect(
                left,
                y(first),
                width,
                y(first + run) - y(first),
                f"fill-{tier or 'nowhere'} cell",
                title=edge_words(cell.edge, page),
            )
            first += run
        _edge_label(drawing, cell.edge, left, width, y)
    if not edges:
        drawing.text((LEFT + RIGHT) / 2, top + 12, "no whole page was served", "label", anchor="middle")
    return drawing.svg()


def _edge_label(drawing: Drawing, edge: TreeEdge, left: float, width: float, y: Scale) -> None:
    """Write what an edge begins with, and how many share it, as far as its first run of pages has room."""
    tier, run = edge.nearest[0]
    height = y(edge.first_page + run) - y(edge.first_page)
    shared = f"{count(edge.sequences)}×" if edge.sequences > 1 else ""
    lines = wrap(f"{shared} {beginning(edge)}".strip(), width - 10, lines=min(int((height - 4) / 15), 4))
    if not lines and shared and height >= 16 and width > len(shared) * CHARACTER + 8:
        lines = [shared]
    for number, line in enumerate(lines):
        drawing.text(left + 5, y(edge.first_page) + 14 + 15 * number, line, f"on-{tier or 'nowhere'}")


def beginning(edge: TreeEdge) -> str:
    """Return what an edge begins with: some text, or tokens where there is no vocabulary."""
    text = " ".join(edge.label.split())[:160]
    return text or "tokens " + " ".join(str(token) for token in edge.tokens)


def edge_words(edge: TreeEdge, page_tokens: int) -> str:
    """Say of an edge what it is."""
    first = edge.first_page * page_tokens
    where = ", ".join(f"{run} {tier or 'nowhere'}" for tier, run in edge.nearest)
    return (
        f"tokens {count(first)} to {count(first + edge.pages * page_tokens)}, {count(edge.pages)} pages ({where}), in "
        f"{count(edge.sequences)} sequences: {beginning(edge)}"
    )


# ---- bytes ----------------------------------------------------------------------------------------------------------


def verified(report: Report) -> str:
    """Draw the bytes that each act read and verified, by tier."""
    acts = [act for act in analysis.ACTS if act in report.runs and report.runs[act].mode == "tiers"]
    drawing = Drawing(
        "verified",
        "Bytes read and verified, by act and tier",
        "One bar for each act with tiers: every byte read from a tier below the device was checked against its "
        "checksum. The table below has the numbers.",
        30 * len(acts) + 62,
    )
    left, bottom = 220.0, 30.0 * len(acts) + 8
    read = {act: analysis.verified_bytes(report, act) for act in acts}
    x = linear([sum(mine.values()) / 1e6 * 1.12 for mine in read.values()], left, RIGHT)
    drawing.columns(x, 4, bottom, "MB read and verified", most=8)
    for row, act in enumerate(acts):
        y = 6 + 30 * row
        drawing.text(left - 10, y + 17, analysis.ACTS[act], "label", anchor="end")
        at = 0.0
        for tier in TIERS[1:]:
            amount = read[act][tier] / 1e6
            if amount:
                title = f"{analysis.ACTS[act]}: {size(amount * 1e6)} ({count(amount * 1e6)} bytes) from {tier}"
                drawing.rect(x(at), y + 2, x(at + amount) - x(at), 22, f"fill-{tier} part", title=title)
            at += amount
        drawing.text(x(at) + 6, y + 17, size(at * 1e6), "tick")
    return drawing.svg()
