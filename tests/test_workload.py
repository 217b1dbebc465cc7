"""The demo's requests: what a trace shares is shared, and equal seeds give equal requests."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stepwell.demo.workload import Request, TraceError, conversations, read_trace


def line(input_length: int, hash_ids: list[int], output_length: int = 320) -> str:
    return json.dumps(
        {
            "timestamp": 0,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": hash_ids,
        }
    )


LINES = "\n".join([line(1300, [0, 1, 2]), line(1024, [0, 1]), line(1025, [0, 5, 6], 31)]) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        return path

    return write


def test_a_block_is_a_page_and_equal_ids_are_equal_tokens(trace: Callable[[str], Path]) -> None:
    first, second, third = read_trace(trace(LINES)).requests
    assert [len(request.tokens) for request in (first, second, third)] == [40, 32, 33]
    assert [request.output_tokens for request in (first, second, third)] == [10, 10, 1]
    assert [request.id for request in (first, second, third)] == [0, 1, 2]
    assert first.tokens.dtype == np.int32
    np.testing.assert_array_equal(first.tokens[:32], second.tokens)
    np.testing.assert_array_equal(first.tokens[:16], third.tokens[:16])
    assert (first.tokens[16:32] != third.tokens[16:32]).any()
    assert first.tokens.min() >= 0
    assert first.tokens.max() < 512


def test_a_partial_block_without_an_id_is_the_requests_own(trace: Callable[[str], Path]) -> None:
    path = trace(line(700, [0]) + "\n" + line(700, [0]) + "\n" + line(200, []) + "\n")
    first, second, third = read_trace(path).requests
    assert [len(request.tokens) for request in (first, second, third)] == [21, 21, 6]
    np.testing.assert_array_equal(first.tokens[:16], second.tokens[:16])
    assert (first.tokens[16:] != second.tokens[16:]).any()


def test_a_partial_block_never_becomes_a_whole_page(trace: Callable[[str], Path]) -> None:
    path = trace(line(511, [0]) + "\n" + line(513, [0, 1]) + "\n")
    assert [len(request.tokens) for request in read_trace(path).requests] == [15, 17]


def test_a_seed_changes_tokens_and_not_their_sharing(trace: Callable[[str], Path]) -> None:
    path = trace(LINES)
    first, again = read_trace(path, seed=1).requests, read_trace(path, seed=1).requests
    other = read_trace(path, seed=2).requests
    np.testing.assert_array_equal(first[0].tokens, again[0].tokens)
    assert (first[0].tokens != other[0].tokens).any()
    np.testing.assert_array_equal(other[0].tokens[:32], other[1].tokens)


def test_different_blocks_never_share_a_page(trace: Callable[[str], Path]) -> None:
    ids = list(range(20_000, 22_000))
    path = trace(line(512 * len(ids), ids) + "\n")
    (request,) = read_trace(path, max_tokens=1 << 20).requests
    pages = request.tokens.reshape(-1, 16)
    assert len(np.unique(pages, axis=0)) == len(ids)
    assert len(np.unique(pages)) == 512


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_packed_traces_read_the_same(
    tmp_path: Path, trace: Callable[[str], Path], suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    packed = tmp_path / f"trace.jsonl.{suffix}"
    packed.write_bytes(pack(LINES.encode()))
    for one, other in zip(
        read_trace(packed).requests, read_trace(trace(LINES)).requests, strict=True
    ):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    packed.write_bytes(pack(LINES.encode())[:-20])
    with pytest.raises(TraceError, match="damaged after line"):
        read_trace(packed)


def test_what_does_not_fit_the_context_is_cut_to_a_prefix_and_counted(
    trace: Callable[[str], Path],
) -> None:
    path = trace(line(5120, list(range(10)), 6400) + "\n" + line(600, [0, 1], 64) + "\n")
    whole = read_trace(path, max_tokens=1024)
    assert (whole.capped_prompts, whole.capped_outputs, whole.dropped_tokens) == (0, 0, 0)
    assert whole.scale == 32
    cut = read_trace(path, max_tokens=100)
    assert (cut.capped_prompts, cut.capped_outputs, cut.dropped_tokens) == (1, 1, 160 - 75)
    first = cut.requests[0]
    assert len(first.tokens) + first.output_tokens == 100
    np.testing.assert_array_equal(first.tokens, whole.requests[0].tokens[:75])
    assert len(cut.requests[1].tokens) == 18


def test_a_limit_stops_before_the_next_line(trace: Callable[[str], Path]) -> None:
    assert len(read_trace(trace(LINES + "not json"), limit=3).requests) == 3


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("not json", "not a request"),
        ("", "not a request"),
        ("[1, 2]", "not a request"),
        ('{"input_length": 5, "output_length": 1}', "hash_ids"),
        (line(0, []), "input_length"),
        (line(5, [-1]), "hash_ids"),
        (line(5, [0], -1), "output_length"),
        (line(1025, [0]), "2 whole blocks and 1 tokens, the line has 1 hash_ids"),
        (line(1024, [0, 1, 2]), "2 whole blocks and 0 tokens, the line has 3 hash_ids"),
        (line(5, [0]).replace("320", '"x"'), "output_length"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    trace: Callable[[str], Path], bad: str, complaint: str
) -> None:
    path = trace(LINES + bad + "\n")
    with pytest.raises(TraceError, match=complaint) as caught:
        read_trace(path)
    assert f"{path}:4:" in str(caught.value)


def test_sizes_that_make_no_sense_are_refused(trace: Callable[[str], Path]) -> None:
    for wrong in ({"page_tokens": 7}, {"max_tokens": 3}, {"vocab": 1}):
        with pytest.raises(ValueError, match="page_tokens must divide"):
            read_trace(trace(LINES), **wrong)


def shape_of(requests: tuple[Request, ...]) -> list[tuple[int, list[int], int, int, int | None]]:
    return [
        (one.id, one.tokens.tolist(), one.output_tokens, one.conversation, one.follows)
        for one in requests
    ]


def test_equal_seeds_give_equal_conversations() -> None:
    first = conversations(3, users=5, turns=4)
    assert shape_of(first) == shape_of(conversations(3, users=5, turns=4))
    assert shape_of(first) != shape_of(conversations(4, users=5, turns=4))


def test_each_turn_follows_the_last_one_of_its_conversation() -> None:
    requests = conversations(3, users=6, turns=4)
    assert [request.id for request in requests] == list(range(24))
    for user in range(6):
        own = [request for request in requests if request.conversation == user]
        assert [one.follows for one in own] == [None, *(one.id for one in own[:-1])]


def test_users_share_system_prompts_and_fit_the_context() -> None:
    requests = conversations(3, users=20, turns=3, system_prompts=2, system_tokens=50)
    openings = {tuple(one.tokens[:50].tolist()) for one in requests if one.follows is None}
    assert len(openings) == 2
    for user in range(20):
        own = [one for one in requests if one.conversation == user]
        assert sum(len(one.tokens) + one.output_tokens for one in own) <= 1024
    with pytest.raises(ValueError, match="the context is 100"):
        conversations(3, users=1, turns=3, max_tokens=100)
