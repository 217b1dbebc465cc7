"""Replays of public traces: with room for everything, the hits are those of the trace."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stepwell import _core

TRACES = Path(os.environ.get("STEPWELL_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
HOST = 1


def requests(name: str) -> Iterator[np.ndarray]:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set STEPWELL_TRACES to the folder that holds it")
    with lzma.open(path, "rt") as lines:
        for line in lines:
            start = line.index('"hash_ids"')
            yield np.array(json.loads("{" + line[start:])["hash_ids"], np.int32)


def keys_of(ids: np.ndarray) -> np.ndarray:
    """An id stands for the whole prefix up to its block, so it can be its page's key (8 bytes)."""
    return ids.astype("<u8").view(np.uint8).reshape(len(ids), 8)


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("mooncake_conversation.jsonl.xz", 105_710),
        ("agentic_coding.jsonl.xz", 4_124_869),
    ],
)
def test_unlimited_tier_hits_what_the_trace_repeats(name: str, hits: int) -> None:
    index = _core.Index(1)
    index.add_slots(HOST, 0, 200_000)
    space = index.open_namespace()
    found = accesses = 0
    for ids in requests(name):
        match = index.match_and_pin(space, ids, 1 << HOST)
        found += match.pages
        accesses += len(ids)
        if match.pages < len(ids):
            batch = index.claim_absent(space, ids, keys_of(ids), match.pages, len(ids), 1 << HOST)
            assert batch.full_at == 0xFFFFFFFF
            new = batch.outcomes[:, HOST] == 1
            pages = batch.pages[new]
            index.commit_many(pages, HOST, np.ascontiguousarray(batch.numbers[new, HOST]))
            index.unpin_pages(pages)
        if match.lease:
            assert index.release(match.lease)
    assert found == hits
    assert index.pages() == accesses - hits == index.counts(HOST)["resident"]
    assert index.leases() == 0
    assert index.check() == ""
