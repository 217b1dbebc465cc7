"""Say why a volume, or some pages of one, are not found again: each kind has a name, a count, and a line in the log.

Of a whole volume:
    replaced           the file says that it is another volume than its name
    truncated, grown   a file has not the size that the header states
    mixed-up           metadata and pages are of different volumes (or were never written: a crash of the kernel or of
                       the file system)
    header             the header is damaged
    format             another version of stepwell wrote it
    fingerprint        its pages are of another model, revision, dtype or shape
Of pages:
    epoch              of another epoch than the current one: kept for it, and the first to leave
    records            their record is damaged
    duplicate          another slot or volume has the key too
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from stepwell.tiers.directory import Header
from stepwell.tiers.volume_files import FORMAT_VERSION, HEADER_BYTES, header_checksum

_LOG = logging.getLogger("stepwell")
MOST_SAID: Final = 1024
"""Volumes and reasons that are remembered as said; what is noted beyond them is not counted any more."""


@dataclass(slots=True)
class ColdCounts:
    """What was not found again, counted by reason: volumes, or pages for epoch, records and duplicate.

    Invariant: what one volume is cold for is counted and logged once, however often it is looked at.
    """

    by_reason: dict[str, int] = field(default_factory=dict)
    _said: set[tuple[str, str]] = field(default_factory=set)

    def note(self, volume_id: str, reason: str, text: str, count: int = 1) -> None:
        """Count and log that a volume, or `count` pages of one, are cold."""
        if (volume_id, reason) in self._said or len(self._said) >= MOST_SAID:
            return
        self._said.add((volume_id, reason))
        self.by_reason[reason] = self.by_reason.get(reason, 0) + count
        _LOG.warning("volume %s: %s: %s", volume_id, reason, text)


def header_reason(data: bytes, metadata_bytes: int, pages_bytes: int, wrong: str) -> tuple[str, str]:
    """Return reason and text for a header that is not right: `wrong` says what the check found."""
    if len(data) < HEADER_BYTES:
        return "truncated", f"its metadata file ends after {len(data)} bytes, within the header"
    is_whole = data[:8] == b"STEPWELV" and int.from_bytes(data[-4:], "little") == header_checksum(data)
    if not is_whole or int.from_bytes(data[8:12], "little") != FORMAT_VERSION:
        return "header", wrong
    for name, size, at in (("metadata", metadata_bytes, 144), ("pages", pages_bytes, 152)):
        stated = int.from_bytes(data[at : at + 8], "little")
        if size != stated:
            reason = "truncated" if size < stated else "grown"
            return reason, f"its {name} file has {size} bytes, its header says {stated}"
    return "header", wrong


def fingerprint_text(theirs: Header, ours: Header, fingerprint: bytes) -> str:
    """Say how the pages of a volume differ from ours; the header has no more than their shape."""
    left = "left as it is until its room is needed"
    if (theirs.page_bytes, theirs.layers) != (ours.page_bytes, ours.layers):
        return (
            f"its pages have {theirs.page_bytes} bytes in {theirs.layers} layers, ours {ours.page_bytes} in "
            f"{ours.layers}; {left}"
        )
    if theirs.fingerprint == fingerprint:
        return f"its pages are of kind {theirs.kind} on medium {theirs.medium}; {left}"
    return (
        f"its pages are of fingerprint {theirs.fingerprint.hex()[:16]}, ours of {fingerprint.hex()[:16]} "
        f"(another model, revision, dtype, shard, or another order of the same shape); {left}"
    )
