"""The page for authors of engines says what the code says, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stepwell.demo import engine
from store_kit import Directories

PAGE = Path(__file__).parents[1] / "docs" / "engine.md"
LINES = 200


def blocks(info: str) -> list[str]:
    """Return the page's code blocks with this info string, in their order."""
    return re.findall(rf"^```{info}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_is_the_engine_whole_and_in_order() -> None:
    rest = Path(engine.__file__).read_text()
    for block in blocks("python"):
        assert rest.startswith(block), f"the page has\n{block}\nwhere the file goes on with\n{rest[: len(block)]}"
        rest = rest.removeprefix(block).lstrip("\n")
    assert rest == ""


def test_the_engine_has_200_lines_at_most() -> None:
    assert len(Path(engine.__file__).read_text().splitlines()) <= LINES


def test_the_examples_of_the_page_run(directories: Directories) -> None:
    names: dict[str, Any] = {"shared_dir": str(directories.shared), "other_dir": str(directories.disk)}
    examples = blocks("python runs")
    assert len(examples) == 2
    for number, example in enumerate(examples, 1):
        exec(compile(example, f"{PAGE.name}, example {number}", "exec"), names)
