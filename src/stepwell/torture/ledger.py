"""Keep account of what a store has acknowledged: which pages must be found, which must not, and which may be.

A child writes one line for each step into a pipe that outlives it, `time what numbers`: what it was acknowledged
*after* the store said so, what may take pages away *before* it is asked for. Whoever reads the lines of all children in
the order of their times knows what must be true at every instant of a kill.

    line                     meaning
    b CHAIN PAGES EPOCH      a save of a chain's first pages begins          they may be found from here on
    a CHAIN PAGES EPOCH      they are resident, said the store               they must be found
    f CHAIN KEEP EPOCH       forgetting a chain's pages past KEEP begins     they may be lost
    g CHAIN KEEP EPOCH       it has ended                                    they must not be found
    n CHAIN KEEP EPOCH       it has ended, and some may have been pinned     they may be found
    v EPOCH                  pages leave by an order: nothing is promised
    z EPOCH                  all pages have left (clear)                     none must be found
    h PAGES EPOCH            exactly these are resident (hexadecimal mask)   they must be found
    x EPOCH                  the epoch is being changed to this one          those of the old one may be lost
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stepwell.torture.universe import Universe

Name = tuple[int, int]
"""A page under an epoch."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a child's log. at: CLOCK_MONOTONIC, ns, the same clock for all processes."""

    at: int
    child: int
    what: str
    words: tuple[str, ...]

    @classmethod
    def read(cls, child: int, text: bytes) -> Line:
        """Read a line without its end."""
        at, what, *words = text.decode(errors="replace").split(" ", 2)
        return cls(int(at), child, what, tuple(words[0].split(" ")) if words and what.islower() else tuple(words))


@dataclass(slots=True)
class Ledger:
    """What a world's directories must, may and must not hold.

    Invariant: `held` and `gone` have no page in common; both are within `begun`.
    is_roomy: nothing is ever evicted for want of room, so that what was acknowledged must be found.
    knows_gone: nobody else can have a copy of what one process forgets.
    """

    universe: Universe
    is_roomy: bool
    knows_gone: bool
    epoch: int = 1
    begun: set[Name] = field(default_factory=set)
    acknowledged: set[Name] = field(default_factory=set)
    held: set[Name] = field(default_factory=set)
    gone: set[Name] = field(default_factory=set)
    _taking: dict[int, set[Name] | None] = field(default_factory=dict)  # by child; None: whatever there is

    def apply(self, lines: Iterable[Line]) -> None:
        """Take lines into account, in the order of their times."""
        for line in sorted(lines, key=lambda line: line.at):
            self._apply(line)

    def died(self, child: int) -> None:
        """Note that a child has ended: it takes nothing any more."""
        self._taking.pop(child, None)

    def _apply(self, line: Line) -> None:
        match line.what:
            case "b":
                names = self._pages(line)
                self.begun |= names
                self.gone -= names
            case "a":
                self._promise(self._pages(line))
            case "f":
                names = self._past(line)
                self.held -= names
                self._taking[line.child] = names
            case "g" | "n":
                names = self._past(line)
                self.held -= names  # what another acknowledged meanwhile too
                self._taking.pop(line.child, None)
                if self.knows_gone and line.what == "g":
                    self.gone |= names & self.begun
            case "v":
                self.held.clear()
                self._taking[line.child] = None
            case "z":
                self.held.clear()
                self._taking.pop(line.child, None)
                if self.knows_gone:
                    self.gone = set(self.begun)
            case "h":
                mask, epoch = int(line.words[0], 16), int(line.words[1])
                self._taking.pop(line.child, None)
                self.held.clear()
                self._promise({(page, epoch) for page in range(self.universe.known) if mask >> page & 1})
            case "x":
                self.held.clear()
                self.epoch = int(line.words[0])

    def _promise(self, names: set[Name]) -> None:
        self.acknowledged |= names
        if self.is_roomy and None not in self._taking.values():
            self.held |= names - set().union(*(taken for taken in self._taking.values() if taken is not None))

    def _pages(self, line: Line) -> set[Name]:
        chain, pages, epoch = map(int, line.words)
        return {(page, epoch) for page in self.universe.chains[chain].pages[:pages]}

    def _past(self, line: Line) -> set[Name]:
        chain, keep, epoch = map(int, line.words)
        return {(page, epoch) for page in self.universe.chains[chain].pages[keep:]}
