"""Make the requests that the demo serves: from a trace, or as conversations drawn from a seed.

A trace names the blocks of each prompt but not its tokens (the Mooncake format: one JSON object a
line with timestamp, input_length, output_length and hash_ids, an id for each 512 tokens; equal ids
mean equal prompts up to there; some leave a last, partial block unnamed, whose tokens are then no
other request's). Here a block becomes one page, and its tokens a function of its id:
sharing is what the trace says, at 1/32 of the size.

Source: R. Qin et al., Mooncake (FAST 2025), the format of its published traces.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

TRACE_BLOCK_TOKENS = 512
MAX_LINE_BYTES = 1 << 24  # some million blocks: longer ones are of another file
_Length = Annotated[int, msgspec.Meta(ge=1)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
_UNNAMED = 2**48  # ids from here on are ours: one a request, for a last block without an id


class TraceError(ValueError):
    """Report a trace that cannot be read; names the file and the line."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Ask for one answer. Requests are served in the order of their ids.

    `tokens` is the prompt; where the request follows another it is what the user adds, and the
    prompt is that request's prompt, its answer, and these tokens. An answer ends before `stop`, or after
    `output_tokens`.
    """

    id: int
    tokens: Tokens
    output_tokens: int
    conversation: int
    follows: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Hold the requests of a trace and say what was changed to fit the model."""

    requests: tuple[Request, ...]
    scale: int  # tokens of the trace for each token here
    capped_prompts: int  # requests of whose prompt only a prefix is kept
    capped_outputs: int
    dropped_tokens: int  # of the prompts, after scaling


class _Line(msgspec.Struct, frozen=True):
    input_length: _Length
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[_BlockId]


def read_trace(
    path: str | Path,
    *,
    limit: int | None = None,
    vocab: int = 512,
    page_tokens: int = 16,
    max_tokens: int = 1024,
    seed: int = 0,
) -> Trace:
    """Read a Mooncake trace, plain, .gz or .xz, scaled so that a block of it is one page.

    Args:
        path: the trace.
        limit: how many requests to read; all where None.
        vocab: tokens are below it.
        page_tokens: what a block of 512 tokens becomes; must divide 512.
        max_tokens: the model's context. An answer takes at most a quarter of it, and of a prompt
            the prefix that fits beside the answer is kept.
        seed: other tokens for another seed, the same sharing.

    Returns: the requests in the order of the file, and what was capped.
    Raises: TraceError for a line that is not a request, with its number; OSError.
    """
    if TRACE_BLOCK_TOKENS % page_tokens or max_tokens < 4 or vocab < 2:
        raise ValueError(
            f"page_tokens must divide {TRACE_BLOCK_TOKENS}, max_tokens be 4 or more and vocab 2 or "
            f"more, got {page_tokens}, {max_tokens}, {vocab}"
        )
    scale = TRACE_BLOCK_TOKENS // page_tokens
    requests: list[Request] = []
    capped_prompts = capped_outputs = dropped_tokens = 0
    for line in _lines(Path(path), limit):
        wanted = max(1, line.output_length // scale)
        output_tokens = min(wanted, max_tokens // 4)
        full, rest = divmod(line.input_length, TRACE_BLOCK_TOKENS)
        length = full * page_tokens + (max(1, rest // scale) if rest else 0)
        kept = min(length, max_tokens - output_tokens)
        named = [*line.hash_ids, _UNNAMED + len(requests)]
        blocks = np.array(named[: -(-kept // page_tokens)], np.uint64)
        tokens = _block_tokens(blocks, seed=seed, vocab=vocab, page_tokens=page_tokens)
        requests.append(
            Request(
                id=len(requests),
                tokens=tokens[:kept],
                output_tokens=output_tokens,
                conversation=len(requests),
            )
        )
        capped_outputs += output_tokens < wanted
        capped_prompts += kept < length
        dropped_tokens += length - kept
    return Trace(tuple(requests), scale, capped_prompts, capped_outputs, dropped_tokens)


def conversations(
    seed: int,
    *,
    users: int,
    turns: int,
    system_prompts: int = 2,
    system_tokens: int = 200,
    user_tokens: int = 32,
    output_tokens: int = 16,
    vocab: int = 512,
    max_tokens: int = 1024,
) -> tuple[Request, ...]:
    """Draw conversations of several users on shared system prompts; equal for equal arguments.

    Every user has one turn a round, in an order of its own each round, so a request comes after the
    one it follows. System prompts are chosen unevenly: the first is the most common.

    Args:
        seed: decides tokens, lengths, choices and order.
        users: conversations.
        turns: requests of each.
        system_prompts: how many different ones there are.
        system_tokens: length of each.
        user_tokens: what a user says at a time, from half of this to one and a half.
        output_tokens: of each answer.
        vocab: tokens are below it.
        max_tokens: the model's context.

    Raises: ValueError where the longest conversation would not fit max_tokens.
    """
    longest = system_tokens + turns * (user_tokens * 3 // 2 + output_tokens)
    if longest > max_tokens:
        raise ValueError(
            f"a conversation of {turns} turns may reach {longest} tokens, the context is "
            f"{max_tokens}: fewer turns, or shorter ones"
        )
    random = np.random.default_rng(seed)
    systems = random.integers(0, vocab, (system_prompts, system_tokens), dtype=np.int32)
    odds = 1 / np.arange(1, system_prompts + 1)
    chosen = random.choice(system_prompts, users, p=odds / odds.sum())
    latest: dict[int, int] = {}
    requests: list[Request] = []
    for _ in range(turns):
        for user in random.permutation(users).tolist():
            length = random.integers(max(1, user_tokens // 2), user_tokens * 3 // 2 + 1)
            said = random.integers(0, vocab, length, dtype=np.int32)
            follows = latest.get(user)
            requests.append(
                Request(
                    id=len(requests),
                    tokens=np.concatenate([systems[chosen[user]], said])
                    if follows is None
                    else said,
                    output_tokens=output_tokens,
                    conversation=user,
                    follows=follows,
                )
            )
            latest[user] = requests[-1].id
    return tuple(requests)


def longest_conversation(requests: Sequence[Request]) -> int:
    """Return how many tokens the longest conversation may reach."""
    reached: dict[int, int] = {}
    for request in requests:
        before = reached.get(request.conversation, 0)
        reached[request.conversation] = before + request.tokens.size + request.output_tokens
    return max(reached.values())


class _Row(msgspec.Struct, frozen=True):
    """A request on disk."""

    id: int
    tokens: list[int]
    output_tokens: int
    conversation: int
    follows: int | None
    stop: int | None


def save_requests(requests: Sequence[Request], path: str | Path) -> None:
    """Write requests for load_requests(): JSON."""
    rows = [_Row(r.id, r.tokens.tolist(), r.output_tokens, r.conversation, r.follows, r.stop) for r in requests]
    Path(path).write_bytes(msgspec.json.encode(rows))


def load_requests(path: str | Path) -> list[Request]:
    """Read what save_requests() wrote."""
    rows = msgspec.json.decode(Path(path).read_bytes(), type=list[_Row])
    return [
        Request(r.id, np.array(r.tokens, np.int32), r.output_tokens, r.conversation, r.follows, r.stop) for r in rows
    ]


def _lines(path: Path, limit: int | None) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    number = 0
    try:
        with _open(path) as file:
            while limit is None or number < limit:
                text = file.readline(MAX_LINE_BYTES)
                if not text:
                    return
                number += 1
                if len(text) == MAX_LINE_BYTES:
                    raise TraceError(f"{path}:{number}: a line of {MAX_LINE_BYTES} bytes is no request")
                line = decoder.decode(text)
                full, rest = divmod(line.input_length, TRACE_BLOCK_TOKENS)
                if len(line.hash_ids) not in (full, full + (rest > 0)):
                    raise TraceError(
                        f"{path}:{number}: {line.input_length} tokens are {full} whole blocks and "
                        f"{rest} tokens, the line has {len(line.hash_ids)} hash_ids"
                    )
                yield line
    except msgspec.DecodeError as cause:
        raise TraceError(f"{path}:{number}: not a request: {cause}") from cause
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as cause:
        raise TraceError(f"{path}: damaged after line {number}: {cause}") from cause


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast("BinaryIO", lzma.open(path, "rb"))
    return path.open("rb")


def _block_tokens(
    blocks: npt.NDArray[np.uint64], *, seed: int, vocab: int, page_tokens: int
) -> Tokens:
    """Return the tokens of each block in turn: a function of seed, id and place alone.

    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its output function on a counter.
    """
    places = np.arange(page_tokens, dtype=np.uint64)
    counter = blocks[:, None] * np.uint64(page_tokens) + places + np.uint64(1)
    mixed = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(vocab)).astype(np.int32).ravel()
