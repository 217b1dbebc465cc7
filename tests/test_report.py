"""The report of a demo: a page that loads nothing, that no text can break, and whose charts say what the run says."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell import cli
from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig
from stepwell.demo import analysis, charts, figures
from stepwell.demo import run as demo_run
from stepwell.demo.analysis import SOURCES, BreakEven, Cost, break_even, curves, fit, place
from stepwell.demo.engine import Engine, Hooks, Prompt, Running
from stepwell.demo.markup import STYLE
from stepwell.demo.measure import measure
from stepwell.demo.record import Record
from stepwell.demo.report import MOST_EMBEDDED, embedded, render, write_report
from stepwell.demo.results import TIERS, Answer, Check, Moment, Report, look_at_machine
from stepwell.demo.scenario import Measured, Served, Sizes, Summary, TreeEdge
from stepwell.demo.transformer import ModelConfig, make_model
from stepwell.demo.tree import MOST_EDGES, draw_tree, pages_below
from stepwell.errors import StepwellUsageError
from stepwell.index import Tier
from stepwell.store import PageStore
from store_kit import PAGE_TOKENS, Directories, chain

HOSTILE = (
    "</script><script>alert(1)</script> <!-- ]]> \" onload='x' &amp; \x00\x1b[2J \u202eevil\u2028 <img src=//x.example>"
)
ACTS = ("unbounded", "recompute", "served", "shared", "swapped", "disk")
SECTIONS = {"verdict", "tokens", "return", "load", "tree", "bytes", "raw"}


def served(request: int, *, found: dict[str, int], prompt: int = 64, at: float = 0.5) -> Served:
    return Served(
        request=request,
        prompt=prompt,
        answer=4,
        ended=True,
        found=found,
        wait=0.01 * (request + 1),
        first_token=0.02 * (request + 1),
        admitted=at,
        finished=at + 1,
    )


def edge(parent: int | None, first_page: int, pages: int, *nearest: tuple[str, int], label: str = "") -> TreeEdge:
    return TreeEdge(
        parent=parent,
        first_page=first_page,
        pages=pages,
        sequences=2,
        nearest=list(nearest),
        tokens=[7, 8],
        label=label,
    )


def summary(requests: list[Served], **changes: Any) -> Summary:
    reused = {tier: sum(one.found.get(tier, 0) for one in requests) for tier in TIERS}
    one = Summary(
        mode="tiers",
        requests=len(requests),
        prompt_tokens=sum(one.prompt for one in requests),
        computed_tokens=9,
        generated_tokens=4 * len(requests),
        reused_tokens=reused,
        bytes_read={"device": 5, "host": 1_000, "shared": 2_000_000, "disk": 3_000_000},
        bytes_written={"device": 0, "host": 4_000, "shared": 5_000_000, "disk": 6_000_000},
        misses={"absent": 3},
        evicted_pages={"device": 2},
        checksum_failures=0,
        preemptions=1,
        opened=0.25,
        seconds=2.0,
        served=requests,
    )
    return msgspec.structs.replace(one, **changes)


def sample(*, said: str = "What is a page?", **changes: Any) -> Report:
    """Return a run in which something of everything happened."""
    runs, moments = {}, []
    for number, act in enumerate(ACTS):
        mode = {"unbounded": "unbounded", "recompute": "recompute"}.get(act, "tiers")
        found = [{"device": 16}, {"host": 16, "shared": 32}, {"disk": 48}, {}] if mode == "tiers" else [{}, {}]
        runs[act] = summary([served(n, found=one, at=0.3 * n) for n, one in enumerate(found)], mode=mode)
        begin = 10.0 * number
        what = {"started": 0.0, "opened": 2.0, "serving": 3.0, "served": 6.0, "ended": 7.5}
        moments += [Moment(at=begin + at, act=act, what=name) for name, at in what.items()]
    moments += [Moment(at=27.0, act="served", what="killed"), Moment(at=49.0, act="disk", what="removed")]
    root = edge(None, 0, 4, ("device", 3), ("", 1), label=said)
    tree = [root, edge(0, 4, 2, ("disk", 2)), edge(0, 4, 3, ("shared", 3))]
    for act in ("served", "shared", "disk"):
        runs[act] = msgspec.structs.replace(runs[act], tree=tree)
    report = Report(
        ok=True,
        seconds=60.0,
        model="a model",
        requests=4,
        trace=None,
        notes=[said],
        checks=[Check(name="negative control: seen", holds=True, detail=said)],
        runs=runs,
        answers=[Answer(request=n, user=said, turn=1, said=said, answer=said) for n in range(4)],
        moments=sorted(moments, key=lambda moment: moment.at),
        begun="2026-01-02 03:04:05 UTC",
        page_tokens=16,
        page_bytes=16_000,
        sizes=Sizes(),
        machine=look_at_machine(Path("/dev/shm"), Path("/")),
        measured=[
            Measured(source=source, tokens=n, seconds=seconds * n)
            for source, seconds in (("shared", 1e-5), ("disk", 4e-5), ("computed", 1e-3))
            for n in (64, 128)
        ],
    )
    return msgspec.structs.replace(report, **changes)


def parsed(page: str) -> ElementTree.Element:
    assert page.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(page)


def chart(page: str, name: str) -> ElementTree.Element:
    return next(
        svg for svg in parsed(page).iter("svg") if svg.get("aria-labelledby", "").startswith(f"{name}-title ")
    )


def titles(svg: ElementTree.Element, kind: str) -> list[str]:
    """Return what is said of the marks of a class when they are pointed at."""
    return [
        title.text or ""
        for mark in svg
        if kind in (mark.get("class") or "").split()
        for title in mark.iter("title")
    ]


def number(words: str) -> int:
    return int(words.replace(",", ""))


# ---- the page --------------------------------------------------------------------------------------------------------


def degenerate() -> dict[str, Report]:
    whole = sample()
    nothing = msgspec.structs.replace(
        whole, runs={}, answers=[], moments=[], measured=[], checks=[], notes=[], sizes=None, machine=None, seconds=0.0
    )
    one = summary([served(0, found={}, prompt=1, at=0.0)], seconds=0.0)
    at_once = msgspec.structs.replace(served(0, found={"disk": 9}), wait=0.0, first_token=0.0)
    still = [Moment(at=0.0, act="served", what=what) for what in ("started", "opened", "serving", "killed", "ended")]
    return {
        "nothing happened": nothing,
        "one request of one token": msgspec.structs.replace(nothing, runs={"served": one}),
        "everything at once": msgspec.structs.replace(nothing, runs={"served": one}, moments=still, page_tokens=0),
        "no request": msgspec.structs.replace(whole, runs={act: summary([]) for act in ACTS}),
        "no hit": msgspec.structs.replace(
            whole, runs={act: summary([served(n, found={}) for n in range(3)]) for act in ACTS}
        ),
        "hits in one tier alone": msgspec.structs.replace(
            whole, runs={act: summary([served(0, found={"disk": 64})]) for act in ACTS}
        ),
        "zero seconds": msgspec.structs.replace(
            whole,
            measured=[Measured(source="disk", tokens=16, seconds=0.0), Measured(source="disk", tokens=32, seconds=0.0)],
            runs={"served": summary([at_once])},
            gpu_tokens_per_second=1e-3,
        ),
        "one length": msgspec.structs.replace(whole, measured=[Measured(source="host", tokens=16, seconds=0.1)]),
        "an act without moments": msgspec.structs.replace(whole, moments=[]),
        "an act that did not end": msgspec.structs.replace(
            whole, moments=[moment for moment in whole.moments if moment.what == "started"]
        ),
        "not all was judged": msgspec.structs.replace(
            whole, checks=[*whole.checks, Check(name="every tier serves hits", holds=None, detail="too few requests")]
        ),
        "it does not hold": msgspec.structs.replace(whole, ok=False),
    }


@pytest.mark.parametrize("name", ["everything", *degenerate()])
def test_a_page_is_well_formed_and_has_every_section(name: str) -> None:
    page = render(sample() if name == "everything" else degenerate()[name])
    root = parsed(page)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert set(ids) >= SECTIONS
    for element in root.iter():
        for reference in (element.get("aria-labelledby") or "").split():
            assert reference in ids
    assert not re.search(r"\b(nan|inf)\b", page.partition("<body>")[2])
    for svg in root.iter("svg"):
        if svg.get("role") == "img":
            assert (svg.findtext("title") or "").strip()
            assert (svg.findtext("desc") or "").strip()
        assert svg.get("role") == "img" or svg.get("aria-hidden") == "true"


@pytest.mark.parametrize("name", ["everything", *degenerate()])
def test_every_mark_lies_inside_its_chart(name: str) -> None:
    root = parsed(render(sample() if name == "everything" else degenerate()[name]))
    for svg in root.iter("svg"):
        width, height = (float(value) for value in (svg.get("viewBox") or "").split()[2:])
        for mark in svg.iter():
            if mark.tag == "rect":
                x, y, w, h = (float(mark.get(name) or 0) for name in ("x", "y", "width", "height"))
                assert min(x, y, w, h) >= 0
                assert x + w <= width + 0.1
                assert y + h <= height + 0.1
            for x, y in ((mark.get("x"), mark.get("y")), (mark.get("x1"), mark.get("y2"))):
                if x is not None and y is not None:
                    assert 0 <= float(x) <= width
                    assert 0 <= float(y) <= height


def test_what_was_not_judged_counts_neither_as_holding_nor_as_failing() -> None:
    page = render(degenerate()["not all was judged"])
    assert "All that was judged holds" in page
    assert "<b>1 of 1</b><span>checks hold; 1 not judged</span>" in page
    assert '<th scope="row">not judged</th><td>every tier serves hits</td>' in page


def test_a_page_refers_to_nothing_outside_itself() -> None:
    page = render(sample())
    forbidden = {"src", "href", "action", "style", "srcset", "data", "poster", "background"}
    for element in parsed(page).iter():
        assert element.tag not in ("link", "iframe", "object", "embed", "img", "image", "use", "form", "base")
        assert not {name for name in element.keys() if name in forbidden or name.startswith("on")}  # noqa: SIM118
    assert not re.search(r"https?:|//[\w.]+\.\w|@import|url\(", page)
    [script] = parsed(page).iter("script")
    assert script.get("type") == "application/json"


def test_the_policy_allows_the_style_of_the_page_and_nothing_else() -> None:
    root = parsed(render(sample()))
    [style] = root.iter("style")
    digest = base64.b64encode(hashlib.sha256((style.text or "").encode()).digest()).decode()
    [policy] = [meta.get("content") for meta in root.iter("meta") if meta.get("http-equiv")]
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_no_text_can_leave_its_place() -> None:
    calm, hostile = sample(said="calm"), sample(said=HOSTILE, model=HOSTILE, trace=HOSTILE, begun=HOSTILE)
    page = render(hostile)
    tags = [element.tag for element in parsed(page).iter()]
    with_trace = msgspec.structs.replace(calm, trace="a trace")
    assert [tag for tag in tags if tag not in ("text",)] == [
        element.tag for element in parsed(render(with_trace)).iter() if element.tag not in ("text",)
    ]
    assert page.count("<script") == page.count("</script") == 1
    assert "<img" not in page
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]", page)


@given(text=st.text())
def test_any_text_is_escaped_and_stays_readable(text: str) -> None:
    escaped = charts.escape(text)
    assert not re.search("[<>\"']", escaped)
    assert html.unescape(escaped) == "".join(letter if letter.isprintable() else " " for letter in text)
    escaped.encode()


@pytest.mark.parametrize("said", ["calm", HOSTILE])
def test_the_run_is_in_the_page_as_json(said: str) -> None:
    report = sample(said=said)
    [script] = parsed(render(report)).iter("script")
    assert msgspec.json.decode(script.text or "", type=Report) == report


def test_the_same_run_is_the_same_page() -> None:
    report = sample()
    assert render(report) == render(msgspec.json.decode(msgspec.json.encode(report), type=Report))


def test_a_long_run_is_a_page_of_bounded_size() -> None:
    many = [served(n, found={"disk": 48}, at=0.001 * n) for n in range(5_000)]
    tree = [edge(None, 0, 3, ("disk", 3), label=HOSTILE) for _ in range(MOST_EDGES)]
    report = sample(
        runs={act: summary(many, tree=tree) for act in ACTS},
        answers=[Answer(request=n, user="u", turn=1, said="s" * 40, answer="a" * 60) for n in range(5_000)],
    )
    page = render(report)
    assert len(page.encode()) < 1_500_000
    parsed(page)
    kept = json.loads(embedded(report))["runs"]["served"]
    assert len(kept["served"]) == MOST_EMBEDDED
    assert kept["requests"] == 5_000


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")

    def refuse(*names: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(OSError, match="no"):
            write_report(sample(), path)
    assert path.read_text() == "before"
    write_report(sample(), path)
    assert path.read_text() == render(sample())
    assert list(tmp_path.iterdir()) == [path]


# ---- colours ---------------------------------------------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root\{([^}]*--paper[^}]*)\}", STYLE)
    return {name: dict(re.findall(r"--([\w-]+):(#\w+)", text)) for name, text in (("light", light), ("dark", dark))}


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours. Source: WCAG 2.2, relative luminance and contrast ratio."""

    def luminance(colour: str) -> float:
        digits = "".join(digit * 2 for digit in colour[1:]) if len(colour) == 4 else colour[1:]
        values = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_marks_stand_out(theme: str) -> None:
    colours = themes()[theme]
    for ground in ("paper", "raised"):
        for words in ("ink", "quiet", "good", "bad"):
            assert contrast(colours[words], colours[ground]) >= 4.5, (words, ground)
        for mark in SOURCES:
            assert contrast(colours[mark], colours[ground]) >= 3, (mark, ground)
    for mark in (*SOURCES, "nowhere"):
        assert contrast(colours[f"on-{mark}"], colours[mark]) >= 4.5, mark


# ---- charts say what the run says ------------------------------------------------------------------------------------


def tokens_of(report: Report, acts: tuple[str, ...] = ACTS) -> dict[str, int]:
    every = [one for act in acts for one in report.runs[act].served]
    return {source: sum(analysis.sources(one)[source] for one in every) for source in SOURCES}


@pytest.mark.parametrize("name", ["shares", "over-time"])
def test_bars_add_up_to_the_tokens_of_the_run(name: str) -> None:
    report = sample()
    svg = chart(render(report), name)
    drawn = {
        source: sum(number(re.findall(r": ([\d,]+) tokens", title)[0]) for title in titles(svg, f"fill-{source}"))
        for source in SOURCES
    }
    assert drawn == tokens_of(report)
    assert all(drawn.values())


def test_heights_of_stacked_bars_are_their_tokens() -> None:
    svg = chart(render(sample()), "over-time")
    bars = [
        (float(rect.get("height") or 0), number(re.findall(r": ([\d,]+) tokens", rect.findtext("title") or "")[0]))
        for rect in svg.iter("rect")
        if (rect.get("class") or "").startswith("fill-")
    ]
    scale = bars[0][0] / bars[0][1]
    assert all(height == pytest.approx(tokens * scale, abs=0.02) for height, tokens in bars)


def test_the_bytes_verified_are_those_that_were_read() -> None:
    report = sample()
    svg = chart(render(report), "verified")
    for tier in TIERS[1:]:
        drawn = [number(re.findall(r"\(([\d,]+) bytes\)", title)[0]) for title in titles(svg, f"fill-{tier}")]
        assert drawn == [report.runs[act].bytes_read[tier] for act in ("served", "shared", "swapped", "disk")]


def test_traffic_has_a_mark_for_each_request() -> None:
    report = sample()
    svg = chart(render(report), "in-traffic")
    drawn = {source: len(titles(svg, f"fill-{source}")) for source in SOURCES}
    assert drawn == {"device": 3, "host": 0, "shared": 3, "disk": 3, "computed": 2}
    assert "request 2, disk: 48 tokens, 30 ms" in titles(svg, "fill-disk")
    assert "request 1, computed: 64 tokens, 40 ms" in titles(svg, "fill-computed")


def test_the_tree_is_drawn_page_by_page() -> None:
    svg = chart(render(sample(said="Who are you?")), "tree-served")
    rects = [rect for rect in svg.iter("rect") if "cell" in (rect.get("class") or "")]
    kinds = [(rect.get("class") or "").split()[0] for rect in rects]
    assert kinds == ["fill-device", "fill-nowhere", "fill-disk", "fill-shared"]
    heights = [float(rect.get("height") or 0) for rect in rects]
    assert heights == pytest.approx([heights[1] * pages for pages in (3, 1, 2, 3)], abs=0.1)
    widths = [float(rect.get("width") or 0) for rect in rects]
    assert widths == pytest.approx([widths[0] * pages / 9 for pages in (9, 9, 2, 3)], abs=0.1)
    assert "Who are you?" in (rects[0].findtext("title") or "")
    assert any("Who are you?" in (text.text or "") for text in svg.iter("text"))


def test_the_kill_and_the_return_are_on_one_clock() -> None:
    back = {one.act: one for one in analysis.returns(sample())}
    steps = dict(back["shared"].steps)
    assert back["shared"].since == 27.0
    assert steps == {
        "process started": pytest.approx(3.0),
        "store open": pytest.approx(5.0),
        "ready to serve": pytest.approx(6.0),
        "first prefix on the device": pytest.approx(6.01),
        "its first token": pytest.approx(6.02),
    }
    assert back["shared"].first_found == {"device": 16, "host": 0, "shared": 0, "disk": 0}
    assert back["disk"].since == 49.0
    assert dict(back["disk"].steps)["store open"] == pytest.approx(3.0)
    page = render(sample())
    assert "first cached prefix on the device, 6.01 s after: SIGKILL" in titles(chart(page, "time-line"), "hit")[0]


@pytest.mark.parametrize(
    ("killed", "removed"),
    [(27.0, 27.5), (27.0, 30.0), (27.0, 35.0), (27.0, 49.0), (27.0, 59.0), (45.0, 52.0), (53.0, 58.0), (58.0, 59.0)],
)
def test_no_line_runs_through_a_label(killed: float, removed: float) -> None:
    taken = [Moment(at=killed, act="served", what="killed"), Moment(at=removed, act="disk", what="removed")]
    moments = [moment for moment in sample().moments if moment.what not in ("killed", "removed")]
    page = render(sample(moments=[*moments, *taken]))
    for name in ("over-time", "time-line"):
        svg = chart(page, name)
        marks = list(svg)
        events = [mark for mark in marks if mark.get("class") == "event"]
        assert len(events) == 2
        for at, label in enumerate(marks):
            if label.tag != "text" or label.get("class") not in ("event-label", "tick"):
                continue
            words, x, y = label.text or "", float(label.get("x") or 0), float(label.get("y") or 0)
            width = len(words) * charts.CHARACTER
            left = {"start": x, "end": x - width, "middle": x - width / 2}[label.get("text-anchor") or "start"]
            for line in events:
                across, top = float(line.get("x1") or 0), float(line.get("y1") or 0)
                is_crossed = left < across < left + width and top < y
                is_below = float(line.get("y2") or 0) <= y - 12
                has_paper = marks[at - 1].get("class") == "paper" and marks.index(line) < at
                assert not is_crossed or is_below or has_paper, words


def test_a_bar_ends_where_its_process_was_killed_and_every_mark_has_a_key() -> None:
    page = render(sample())
    after = titles(chart(page, "time-line"), "phase-after")
    # Served at 26, killed at 27, found to have ended at 27.5.
    assert after[0] == "Four tiers, then SIGKILL: serving on until killed, or closing, 1.00 s"
    keys = next(ul for ul in parsed(page).iter("ul") if ul.get("aria-label") == "phases and marks")
    assert [path.get("class") for path in keys.iter("path")][-1] == "hit"


def test_times_measured_on_a_busy_machine_are_said_to_be_upper_bounds() -> None:
    machine = msgspec.structs.replace(look_at_machine(Path("/dev/shm"), Path("/")), cores=2)
    said = "The machine was busy (load 3.4 on 2 cores): these times are upper bounds."
    assert said in render(sample(machine=machine, measured_load=3.4))
    assert "upper bounds" not in render(sample(machine=machine, measured_load=1.9))
    assert "upper bounds" not in render(sample(machine=machine, measured_load=3.4, measured=[]))


def test_rates_have_the_digits_that_are_meant() -> None:
    assert [charts.rounded(value) for value in (93_721.4, 9.96, 1_748_000)] == ["94,000", "10", "1,700,000"]
    sizes = [charts.capacity(value) for value in (512, 32 << 10, 7 << 19, 100 << 30, 0)]
    assert sizes == ["512 B", "32 KiB", "3.5 MiB", "100 GiB", "0 B"]


def test_only_the_stated_rate_is_modelled() -> None:
    without, with_rate = render(sample()), render(sample(gpu_tokens_per_second=20_000.0))
    assert not titles(chart(without, "load-or-compute"), "stroke-model")
    assert "modelled: pays" not in without
    assert titles(chart(with_rate, "load-or-compute"), "stroke-model") == ["modelled: computed at 20,000 tokens/s"]
    assert "modelled, not measured" in with_rate
    # 1/20,000 s a token is slower than shared memory (1e-5) and disk (4e-5) are here.
    assert with_rate.count("<td class=\"n\">from 16 tokens on</td>") == 4


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "compute", "found"),
    [
        (Cost(1.0, 0.1), Cost(0.0, 0.3), BreakEven(5.0)),
        (Cost(0.0, 0.1), Cost(0.0, 0.3), BreakEven(0.0)),
        (Cost(0.0, 0.3), Cost(0.0, 0.3), BreakEven(0.0)),
        (Cost(1.0, 0.3), Cost(0.0, 0.3), BreakEven(None)),
        (Cost(1.0, 0.4), Cost(0.0, 0.3), BreakEven(None)),
        (Cost(0.0, 0.4), Cost(0.0, 0.3), BreakEven(None)),
        (Cost(0.0, 0.4), Cost(1.0, 0.3), BreakEven(0.0, 10.0)),
    ],
)
def test_where_loading_pays(load: Cost, compute: Cost, found: BreakEven) -> None:
    result = break_even(load, compute)
    assert result.first == (None if found.first is None else pytest.approx(found.first))
    assert result.last == (None if found.last is None else pytest.approx(found.last))


@given(st.tuples(*[st.floats(0, 10) for _ in range(4)]), st.integers(1, 10_000))
def test_a_prefix_pays_exactly_where_it_loads_no_slower(costs: tuple[float, ...], tokens: int) -> None:
    load, compute = Cost(*costs[:2]), Cost(*costs[2:])
    found = break_even(load, compute)
    pays = found.first is not None and found.first <= tokens and (found.last is None or tokens <= found.last)
    margin = compute.seconds(tokens) - load.seconds(tokens)
    assert pays == (margin >= 0) or abs(margin) <= 1e-6 * tokens


def test_a_line_goes_through_points_on_a_line() -> None:
    assert fit([(16, 0.5 + 16 * 0.25), (32, 0.5 + 32 * 0.25), (64, 0.5 + 64 * 0.25)]) == Cost(
        pytest.approx(0.5), pytest.approx(0.25)
    )
    assert fit([(16, 1.0)]) is None


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=2, unique_by=lambda point: point[0]))
def test_no_line_begins_or_falls_below_zero(points: list[tuple[int, float]]) -> None:
    cost = fit(points)
    assert cost is not None
    assert cost.fixed >= 0
    assert cost.per_token >= 0


def test_curves_are_medians_by_length() -> None:
    measured = [Measured(source="disk", tokens=n, seconds=s) for n, s in ((32, 5.0), (32, 1.0), (32, 2.0), (16, 1.0))]
    [curve] = curves(measured)
    assert curve.points == ((16, 1.0), (32, 2.0))
    assert curve.samples == 4


# ---- scales and labels -----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e9), max_size=8))
def test_a_scale_from_zero_holds_its_values_and_has_ticks(values: list[float]) -> None:
    scale = charts.linear(values, 0, 100)
    assert all(0 <= scale(value) <= 100 for value in values)
    assert 1 <= len(scale.ticks(6)) <= 8


@given(st.lists(st.floats(0, 1e6), max_size=8))
def test_a_logarithmic_scale_holds_its_values_and_has_ticks(values: list[float]) -> None:
    scale = charts.logarithmic(values, 0, 100)
    assert all(0 <= scale(value) <= 100 for value in values)
    assert len(scale.ticks(5)) >= 2


@given(st.lists(st.floats(0, 300), max_size=6))
def test_labels_stay_apart(wanted: list[float]) -> None:
    placed = sorted(charts.spread(wanted, apart=17, low=0, high=300))
    assert all(later - earlier >= 17 - 1e-9 for earlier, later in itertools.pairwise(placed))
    assert all(-1e-9 <= at <= 300 + 1e-9 for at in placed)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (2.5e-6, "2.5 µs"), (0.00123, "1.23 ms"), (0.9999, "1.00 s"), (9.999, "10.00 s"), (1234.5, "1,234 s")],
)
def test_durations_are_in_a_unit_that_suits_them(seconds: float, words: str) -> None:
    assert charts.duration(seconds) == words


# ---- the tree --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_an_icicle_has_every_page_once_and_no_edge_over_another(paths: list[list[int]]) -> None:
    class Nowhere:
        """A store that has nothing."""

        def match(self, tokens: object) -> Any:
            return self

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *what: object) -> None: ...

        spans: tuple[()] = ()

        def cached(self, tokens: object, *, tiers: object) -> int:
            return 0

    sequences = [np.repeat(np.array(path, np.int32), PAGE_TOKENS) for path in paths]
    edges = draw_tree(Nowhere(), sequences, page_tokens=PAGE_TOKENS)  # type: ignore[arg-type]
    assert sum(one.pages for one in edges) == len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})
    cells = place(edges)
    for one in cells:
        assert one.width >= one.edge.pages
        if one.edge.parent is not None:
            above = cells[one.edge.parent]
            assert one.edge.first_page == above.edge.first_page + above.edge.pages
            assert above.left <= one.left
            assert one.left + one.width <= above.left + above.width
    by_level = sorted(cells, key=lambda cell: (cell.edge.parent is not None, cell.edge.parent or 0, cell.left))
    for one, other in itertools.pairwise(by_level):
        if one.edge.parent == other.edge.parent:
            assert one.left + one.width <= other.left


def test_a_tree_that_is_too_large_keeps_the_edges_with_most_below_them() -> None:
    edges = [edge(None, 0, 1, ("", 1)), edge(0, 1, 5, ("", 5)), edge(0, 1, 2, ("", 2)), edge(None, 0, 3, ("", 3))]
    assert pages_below(edges) == [8, 5, 2, 3]
    from stepwell.demo.tree import _keep_largest

    kept = _keep_largest(edges, 3)
    assert [(one.parent, one.pages) for one in kept] == [(None, 1), (0, 5), (None, 3)]


def test_a_tree_names_the_nearest_tier_of_each_page(open_rig: Any) -> None:
    rig = open_rig(host=0)
    one, other = chain(1, 3), np.concatenate([chain(1, 2), chain(7, 2)])
    for tokens in (one, other):
        rig.save(tokens)
    assert rig.store.flush(30.0)
    rig.store.evict(Tier.SHARED, 1)
    lookups = rig.store.stats().lookups
    for tokens in (one, other):
        assert rig.store.cached(tokens, tiers=(Tier.SHARED, Tier.DISK)) == tokens.size
        assert rig.store.cached(tokens, tiers=(Tier.DEVICE,)) == 0
    assert sum(rig.store.cached(tokens, tiers=(Tier.SHARED,)) for tokens in (one, other)) == one.size + other.size - 4
    assert rig.store.stats().lookups == lookups
    edges = draw_tree(rig.store, [one, other, chain(9, 1)], page_tokens=PAGE_TOKENS)
    assert [(one.parent, one.first_page, one.pages, one.sequences) for one in edges] == [
        (None, 0, 2, 2),
        (0, 2, 1, 1),
        (0, 2, 2, 1),
        (None, 0, 1, 1),
    ]
    assert edges[0].nearest == [("shared", 2)]
    assert sum(pages for one in edges for tier, pages in one.nearest if tier == "disk") == 1
    assert edges[3].nearest == [("", 1)]
    shown = rig.store.tree()  # what was asked for and never saved is in the picture alone
    rows = zip(shown.parents.tolist(), shown.first_pages.tolist(), shown.pages.tolist(), strict=True)
    assert sorted(rows) == sorted((-1 if one.parent is None else 0, one.first_page, one.pages) for one in edges[:3])
    assert edges[0].tokens == one[:8].tolist()


# ---- what is measured ------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab=64, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32, page_tokens=4, max_pages=32
)


def test_each_source_is_measured_alone_and_what_was_computed_for_it_is_forgotten(directories: Directories) -> None:
    config = StoreConfig(
        geometry=CONFIG.geometry(),
        device=DeviceTier(pages=40),
        host=32 * 4096,
        shared=SharedTier(1 << 19, str(directories.shared), volume_bytes=1 << 19),
        disk=DiskTier(1 << 19, str(directories.disk), volume_bytes=1 << 19),
    )
    tokens = np.random.default_rng(0).integers(0, 64, 41, dtype=np.int32)
    record = Record()
    record.begin(0, exact_until=41)
    with PageStore(config) as store:
        model = make_model(CONFIG)

        def finished(running: Running) -> None:
            record.finish(0, prompt=tokens, answer=np.array(running.produced, np.int32))

        prompts = iter([Prompt(0, tokens, 2)])
        Engine(store, model, batch=1, hooks=Hooks(on_finished=finished)).serve(lambda: next(prompts, None))
        assert store.flush(30.0)
        [edge_of_all] = draw_tree(store, [tokens], page_tokens=4)
        assert edge_of_all.nearest == [("device", 10)]
        measured = measure(store, model, record)
        assert store.flush(30.0)
        store.device.drain()
        assert store.check() == ""
        assert store.stats().leases == 0
        held = store.stats().tiers["disk"].resident
    assert {one.tokens for one in measured if one.source == "computed"} == {8, 16, 24, 32, 40}
    for source in ("computed", "disk", "shared"):
        assert sum(one.source == source for one in measured) == 15, source
    assert all(one.seconds > 0 and math.isfinite(one.seconds) for one in measured)
    assert held == 10


def test_what_is_no_tier_is_refused_and_no_tier_holds_nothing(open_rig: Any) -> None:
    rig = open_rig(host=0)
    rig.save(chain(1, 2))
    assert rig.store.cached(chain(1, 2), tiers=()) == 0
    with pytest.raises(StepwellUsageError, match="'disk' is no Tier"):
        rig.store.cached(chain(1, 2), tiers=("disk",))


def test_nothing_finished_is_nothing_to_measure(open_rig: Any) -> None:
    rig = open_rig(host=0)
    assert measure(rig.store, make_model(CONFIG), Record()) == []


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "{}/nowhere/report.html"], "no file can be written there"),
        (["--report", "{}"], "no file can be written there"),
        (["--gpu-tokens-per-second", "1000"], "give --report"),
        (["--report", "{}/report.html", "--gpu-tokens-per-second", "0"], "not a finite number above 0"),
        (["--report", "{}/report.html", "--gpu-tokens-per-second", "inf"], "not a finite number above 0"),
        (["--report", "{}/report.html", "--gpu-tokens-per-second", "many"], "invalid rate value"),
    ],
)
def test_what_cannot_be_written_or_modelled_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", *(argument.format(tmp_path) for argument in arguments)])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("is_writable", [True, False])
def test_the_command_writes_the_page_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_writable: bool
) -> None:
    def act(self: demo_run.Acts, name: str, title: str, **how: object) -> Summary:
        scenario = self.scenario(name, **how)
        Path(scenario.shared_path).mkdir(parents=True, exist_ok=True)
        record = Record()
        record.begin(0, exact_until=4)
        rows = np.random.default_rng(name == "swapped").standard_normal((4, 8)).astype(np.float32)
        record.add(0, 0, rows)
        record.finish(0, prompt=np.arange(4, dtype=np.int32), answer=np.arange(1, dtype=np.int32))
        record.save(Path(scenario.record))
        found = dict.fromkeys(TIERS, 4)
        return summary([served(0, found=found)], mode=scenario.mode)

    monkeypatch.setattr(demo_run.Acts, "run", act)
    monkeypatch.setattr(demo_run.Acts, "run_and_kill", act)
    monkeypatch.setattr(demo_run.Acts, "measure", lambda self, name, title, **how: sample().measured)
    monkeypatch.setattr(demo_run.Path, "home", lambda: tmp_path)
    path = tmp_path / "page" / "report.html"
    path.parent.mkdir()
    if not is_writable:
        whole = os.replace

        def refuse(source: Path, target: Path) -> None:
            if Path(target) == path:
                raise OSError("disk full")
            whole(source, target)

        monkeypatch.setattr("os.replace", refuse)
    code = cli.main(
        ["demo", "--quick", "--model", "random", "--json", "--report", str(path), "--gpu-tokens-per-second", "1000"]
    )
    out, err = capsys.readouterr()
    report = msgspec.json.decode(out, type=Report)
    assert report.ok
    assert report.gpu_tokens_per_second == 1000
    assert report.page_bytes == ModelConfig().geometry().page_bytes
    if is_writable:
        assert code == 0
        assert path.read_text() == render(report)
        assert str(path) in err.replace("\n", "")
    else:
        assert code == 1
        assert "disk full" in err
        assert list(path.parent.iterdir()) == []


def test_where_tokens_came_from_is_said_nearest_first() -> None:
    assert figures.listed({"disk": 1_600, "device": 16, "host": 0}) == "device 16, disk 1,600"
