"""Hold what a run of `stepwell torture` found, and print it."""

from __future__ import annotations

import statistics
from typing import Final

import msgspec

MOST_PROBLEMS: Final = 20  # that are told in full; all are counted


class Problem(msgspec.Struct, frozen=True):
    """Something that must never be, and the command that runs its world again (instants of kills differ)."""

    what: str
    text: str
    again: str


class Row(msgspec.Struct):
    """What came back of one arrangement of tiers.

    kills: of processes at work. judged: times that all pages were looked at after one. acknowledged: pages that a save
    said are resident. right: pages found again, compared byte by byte. allowed: acknowledged pages that were gone and
    may be (evicted, forgotten, damaged). lost, wrong, phantom: never. other: everything else that must
    not be: a crash, a hang, slots that do not add up, a budget that is passed, files that are left.
    damages: times that a file was damaged; checksum_failures: damaged pages that were met when all were looked at.
    first_hits: seconds from the start of a process after a kill to its first page, verified. points: kills by point.
    """

    tiers: str
    worlds: int = 0
    kills: int = 0
    judged: int = 0
    acknowledged: int = 0
    right: int = 0
    allowed: int = 0
    lost: int = 0
    wrong: int = 0
    phantom: int = 0
    other: int = 0
    damages: int = 0
    checksum_failures: int = 0
    first_hits: list[float] = msgspec.field(default_factory=list)
    points: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether a process was killed that had been acknowledged pages, and all were looked at after that."""
        return self.kills > 0 and self.judged > 0 and self.acknowledged > 0

    @property
    def is_well(self) -> bool:
        """Whether nothing was found that must not be."""
        return self.lost + self.wrong + self.phantom + self.other == 0


class Result(msgspec.Struct):
    """A whole run. settings: what it was asked for."""

    ok: bool
    seconds: float
    settings: dict[str, object]
    rows: list[Row]
    problems: list[Problem]

    @property
    def verdict(self) -> str:
        """Return what the rows come to, in words."""
        if not self.ok:
            return "FAILED"
        judged = [row.is_judged for row in self.rows]
        return "all of it holds" if all(judged) else "all that was judged holds" if any(judged) else "not judged"

    def as_json(self) -> bytes:
        """Return it for machines: first hits as a median and a longest, milliseconds."""
        built = {"verdict": self.verdict, **msgspec.to_builtins(self)}
        for row in built["rows"]:
            hits = row.pop("first_hits")
            row["first_hit_ms"] = {"median": _median_ms(hits), "longest": round(max(hits) * 1e3, 1) if hits else None}
        return msgspec.json.format(msgspec.json.encode(built), indent=1)

    def lines(self) -> list[str]:
        """Return it for people."""
        head = ("tiers", "kills", "acknowledged", "right", "lost, allowed", "lost", "wrong", "phantom", "other")
        table: list[tuple[str, ...]] = [(*head, "first hit after a kill")]
        for row in self.rows:
            numbers = (row.kills, row.acknowledged, row.right, row.allowed, row.lost, row.wrong, row.phantom, row.other)
            hit = _median_ms(row.first_hits)
            table.append((row.tiers, *map(str, numbers), "-" if hit is None else f"{hit:g} ms"))
        widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
        found = []
        for line in table:
            first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            found.append("  ".join([first.strip().ljust(widths[0]), *rest]))
        for row in self.rows:
            if not row.is_judged:
                found.append(f"{row.tiers}: not judged: no kill after an acknowledged page; give more kills or minutes")
            if row.damages:
                found.append(f"{row.tiers}: {row.damages} files damaged, {row.checksum_failures} bad pages refused")
            if row.points:
                never = [name for name, fired in row.points.items() if not fired]
                found.append(
                    f"{row.tiers}: killed at {len(row.points) - len(never)} points"
                    + (f"; never reached: {', '.join(never)}" if never else "")
                )
        for problem in self.problems:
            found += [f"{problem.what}: {problem.text}", f"  again: {problem.again}"]
        return found


def _median_ms(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds) * 1e3, 1) if seconds else None
