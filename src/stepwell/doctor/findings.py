"""Say what a check found: a verdict, the numbers, why it matters, and the line that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    verdict: fail: a store does not open, or will lose or harm something; warn: it works worse than it could.
    found: with the numbers. why: why it matters. remedy: a line for the shell, or for this command and the file
    (`--set NAME=VALUE`); more ways behind a `#`. Both are empty where all is well.
    """

    verdict: Verdict
    subject: str
    found: str
    why: str = ""
    remedy: str = ""


def ok(subject: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, found)


def warn(subject: str, found: str, *, why: str, remedy: str) -> Finding:
    """It works, worse than it could."""
    return Finding("warn", subject, found, why, remedy)


def fail(subject: str, found: str, *, why: str, remedy: str) -> Finding:
    """It does not work, or will do harm."""
    return Finding("fail", subject, found, why, remedy)


def size_setting(nbytes: int) -> str:
    """Return a size as a setting takes it, rounded down to whole MiB (KiB below one)."""
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"
