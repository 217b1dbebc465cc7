"""Print conversations as they come: who said what, what the model answers, and where the prefix came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text

from stepwell.demo.scenario import Served
from stepwell.demo.texts import Spoken

if TYPE_CHECKING:
    from stepwell.demo.chat import Chat  # which needs tokenizers

TIERS = ("device", "host", "shared", "disk")


class TalkProgress(Progress):
    """Show the acts' progress and, below them, what is being said."""

    said: str = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn now."""
        yield from super().get_renderables()
        if self.said:
            yield Text(self.said, style="green", no_wrap=True, overflow="ellipsis")


class Talk:
    """Print the answers of one act after the other.

    On a terminal the answer under way is below the acts' progress; a finished one is printed above them.
    """

    def __init__(self, console: Console, progress: TalkProgress, chat: Chat, spoken: Sequence[Spoken]) -> None:
        self._console = console
        self._progress = progress
        self._chat = chat
        self._spoken = spoken
        self._width = max(len(one.user) for one in spoken)
        self._coming: dict[int, list[int]] = {}
        self.recomputed: dict[int, float] = {}  # by request: seconds to the first token without reuse

    def token(self, request: int, token: int) -> None:
        """Take the next token of an answer; the oldest answer under way is shown."""
        self._coming.setdefault(request, []).append(token)
        oldest = next(iter(self._coming))
        self._progress.said = f"{printable(self._spoken[oldest].user)}: {self.text(self._coming[oldest])}"

    def served(self, served: Served, answer: list[int]) -> None:
        """Print a finished answer."""
        self._coming.pop(served.request, None)
        self._progress.said = ""
        spoken = self._spoken[served.request]
        line = Text(printable(spoken.said) + "  ")
        line.append(self.text(answer) or "(no answer)", style="green")
        line.append("" if served.ended else " ...", style="dim")
        line.append(f"\n{self._source(served)}", style="dim")
        label = Text(f"  {printable(spoken.user):>{self._width}} {spoken.turn}  ", style="bold")
        for part in line.wrap(self._console, max(20, self._console.width - len(label))):
            part.rstrip()
            self._console.print(label + part, highlight=False, soft_wrap=True)
            label = Text(" " * len(label))

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, fit for a terminal."""
        return printable(self._chat.text(tokens)).strip()

    def _source(self, served: Served) -> str:
        parts = [f"{tier} {served.found[tier]}" for tier in TIERS if served.found.get(tier)]
        parts.append(f"computed {served.prompt - sum(served.found.values())}")
        line = f"{' · '.join(parts)} tokens; first token {served.first_token * 1e3:.0f} ms"
        beside = self.recomputed.get(served.request)
        return line if beside is None else f"{line} beside {beside * 1e3:.0f} ms recomputed"


def printable(text: str) -> str:
    """Return text on one line and without what would steer a terminal: a file or a model wrote it."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
