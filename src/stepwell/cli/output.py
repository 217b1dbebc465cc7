"""Print lines that hold what others chose (names, keys, paths): nothing in them steers a terminal."""

from __future__ import annotations

import sys
from typing import TextIO


def say(line: str, *, to: TextIO | None = None) -> None:
    """Print one line: what is not printable, or not of the stream's encoding, as an escape (`\\x1b`).

    to: the stream; None: standard output.
    """
    stream = sys.stdout if to is None else to
    text = escaped(line)
    encoding = (stream and stream.encoding) or "utf-8"  # closed streams are None, some have no encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def escaped(text: str) -> str:
    """Return a text with what is not printable as escapes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
