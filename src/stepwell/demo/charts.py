"""Draw SVG as text: scales, ticks, marks, and how numbers are written. Knows nothing of what is drawn.

Colours are classes (report.py has the style), so that light, dark and print differ in one place.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 960
CHARACTER = 7.3
"""Width of a character of a label, on average and rather too wide: labels are cut and kept apart by it."""


def escape(value: object) -> str:
    """Return text for an element or an attribute: on one line, without what steers a reader, all marks escaped.

    What is not printable (controls, surrogates, marks that turn the direction of writing) becomes a blank.
    """
    return html.escape("".join(letter if letter.isprintable() else " " for letter in str(value)))


# ---- numbers --------------------------------------------------------------------------------------------------------


def count(value: float) -> str:
    """Return a whole number with separators."""
    return f"{value:,.0f}"


def rounded(value: float) -> str:
    """Return a number of which two digits are meant."""
    return count(float(f"{value:.2g}"))


def duration(seconds: float) -> str:
    """Return a duration in a unit that suits it."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"


def size(value: float) -> str:
    """Return a number of bytes in a decimal unit that suits it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.0f} B"


def capacity(value: int) -> str:
    """Return the size of a tier or a memory, in the binary unit in which it is set."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:,.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{value} B"


def percent(part: float, whole: float) -> str:
    """Return a share, "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _at(value: float) -> str:
    """Return a coordinate, short."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


_LEAST = 1e-9  # a nanosecond; no value that is shown is finer

# ---- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Place values from low to high between two coordinates, evenly or by their logarithm. Requires low < high."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value; one outside is put on the edge."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round values: 1, 2 or 5 times powers of ten, evenly; powers of ten on a log scale."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        step = nice_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least` > 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= least * (1 - 1e-9))


def linear(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale from 0 that holds all values, whatever they are."""
    high = max(values, default=0.0)
    return Scale(0.0, high if high > _LEAST else 1.0, start, end)


def logarithmic(values: Sequence[float], start: float, end: float) -> Scale:
    """Return a scale over whole powers of ten that holds all values above 0."""
    positive = [max(value, _LEAST) for value in values if value > 0] or [1e-3, 1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return Scale(10.0**low, 10.0 ** max(high, low + 1), start, end, is_log=True)


# ---- marks ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Drawing:
    """Collect the marks of one chart. name: an id; title, description: what a reader who does not see it is told."""

    name: str
    title: str
    description: str
    height: float
    marks: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, title: str = "") -> None:
        """Draw a rectangle; title: what is said of it when pointed at."""
        place = f'x="{_at(x)}" y="{_at(y)}" width="{_at(max(width, 0))}" height="{_at(max(height, 0))}"'
        self.marks.append(f'<rect class="{kind}" {place}>{_title(title)}</rect>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line."""
        self.marks.append(f'<line class="{kind}" x1="{_at(x1)}" y1="{_at(y1)}" x2="{_at(x2)}" y2="{_at(y2)}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, title: str = "") -> None:
        """Draw a line through points."""
        steps = " L".join(f"{_at(x)} {_at(y)}" for x, y in points)
        self.marks.append(f'<path class="{kind}" d="M{steps}">{_title(title)}</path>')

    def mark(self, x: float, y: float, shape: str, kind: str, *, title: str = "", radius: float = 4.5) -> None:
        """Draw one of the shapes of SHAPES around a point."""
        self.marks.append(f'<path class="{kind}" d="{outline(shape, x, y, radius)}">{_title(title)}</path>')

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        """Write a label; anchor: start, middle, end."""
        kind = f' class="{kind}"' if kind else ""
        self.marks.append(f'<text{kind} x="{_at(x)}" y="{_at(y)}" text-anchor="{anchor}">{escape(words)}</text>')

    def note(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        """Write a label on paper of its own: what is below it does not run through it."""
        width = len(words) * CHARACTER * 0.92 + 6
        left = min(max(x - (width - 3 if anchor == "end" else 3), 0), WIDTH - width)
        self.rect(left, y - 12, width, 16, "paper")
        self.text(x, y, words, kind, anchor=anchor)

    def columns(self, scale: Scale, top: float, bottom: float, words: str, *, unit: str = "", most: int = 10) -> None:
        """Draw the axis below: ticks with numbers, and what they are."""
        self.line(scale.start, bottom, scale.end, bottom, "axis")
        for value in scale.ticks(most):
            self.line(scale(value), top, scale(value), bottom, "grid")
            self.text(scale(value), bottom + 17, f"{_tick(value)}{unit}", "tick", anchor="middle")
        self.text((scale.start + scale.end) / 2, bottom + 38, words, "label", anchor="middle")

    def rows(self, scale: Scale, left: float, right: float, words: str, *, is_time: bool = False) -> None:
        """Draw the axis at the left: lines across with numbers, and above them what they are."""
        for value in scale.ticks(5):
            self.line(left, scale(value), right, scale(value), "grid")
            label = _time_tick(value) if is_time else _tick(value)
            self.text(left - 8, scale(value) + 4, label, "tick", anchor="end")
        self.text(left, scale.end - 12, words, "label")

    def svg(self) -> str:
        """Return the whole as an element."""
        marks = "".join(self.marks)
        return (
            f'<div class="scroll"><svg class="chart" viewBox="0 0 {WIDTH} {_at(self.height)}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-text"><title id="{self.name}-title">{escape(self.title)}'
            f'</title><desc id="{self.name}-text">{escape(self.description)}</desc>{marks}</svg></div>'
        )


_ARM = 0.34
SHAPES = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    "triangle": ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    "cross": (
        *((-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM)),
        *((_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)),
    ),
    "octagon": tuple((math.cos(math.pi * step / 8), math.sin(math.pi * step / 8)) for step in range(1, 17, 2)),
}


def outline(shape: str, x: float, y: float, radius: float) -> str:
    """Return the path of one of SHAPES around a point."""
    return "M" + "L".join(f"{x + dx * radius:.1f} {y + dy * radius:.1f}" for dx, dy in SHAPES[shape]) + "Z"


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _tick(value: float) -> str:
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value / 1e6:,.10g} M"


def _time_tick(seconds: float) -> str:
    """Return a power of ten of seconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.999:
            return f"{seconds / scale:,.0f} {unit}"
    return f"{seconds * 1e9:,.3g} ns"


def wrap(words: str, room: float, *, lines: int) -> list[str]:
    """Break a label into lines of some width, the last one cut; nothing where not even a few letters fit."""
    letters = int(room / CHARACTER)
    if letters < 12 or lines < 1:
        return []
    return textwrap.wrap(words, letters, max_lines=lines, placeholder="…")


def spread(wanted: Sequence[float], *, apart: float, low: float, high: float) -> list[float]:
    """Return coordinates near the wanted ones, in their order, that lie apart from each other where there is room."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    placed = list(wanted)
    at = low - apart
    for place in order:
        at = placed[place] = max(wanted[place], at + apart)
    at = high + apart
    for place in reversed(order):
        at = placed[place] = min(placed[place], at - apart)
    return placed
