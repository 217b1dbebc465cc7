"""Say what one serving process of the demo does: sizes, requests, what it is held to. Crosses processes as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepwell.demo.transformer import ModelConfig
from stepwell.demo.workload import Request, Trace, conversations, load_requests, read_trace

Mode = Literal["tiers", "unbounded", "recompute"]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Size tiers so that pages travel: the device holds a few requests, shared memory a part of what disk holds.

    The defaults are for pages of 32 KiB. host_pages, shared_bytes, disk_bytes: capacities. batch: sequences at once.
    """

    device_pages: int = 112
    host_pages: int = 96
    shared_bytes: int = 8 << 20
    shared_volume_bytes: int = 4 << 20
    disk_bytes: int = 512 << 20
    disk_volume_bytes: int = 16 << 20
    batch: int = 4


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One serving process.

    mode: "tiers": all four; "unbounded": a device pool that holds everything; "recompute": that, and no request finds
    anything.
    config, weights: the model, and the folder with its weights; drawn from the seed where there is none.
    requests: how many of the list; first: where it starts. texts: a file of requests (workload.save_requests), trace: a
    Mooncake file; the generator where there is neither. record: where the logits go.
    replay: a record whose answers are given again; history: one that only has the earlier turns. serve_on: after the
    record is saved, serve other requests until killed.
    swap_staged_page: the negative control: two pages on their way to the device change places, behind every check.
    picture: the summary has the radix tree. measure: serve nothing; measure loads and computations alone (measure.py).
    """

    mode: Mode
    seed: int
    requests: int
    users: int
    turns: int
    trace: str | None
    config: ModelConfig
    sizes: Sizes
    shared_path: str
    disk_path: str
    compilation_cache: str
    record: str
    weights: str | None = None
    texts: str | None = None
    first: int = 0
    replay: str | None = None
    history: str | None = None
    serve_on: bool = False
    swap_staged_page: bool = False
    picture: bool = False
    measure: bool = False


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went. prompt, answer: tokens; found: those of the prompt that were found, by tier; ended: the
    model ended the answer, rather than the limit.

    wait: seconds from admission until what was found was on the device; first_token: from admission to the first token.
    admitted, finished: seconds since its process began to serve (Moment "serving" of run.py).
    """

    request: int
    prompt: int
    answer: int
    ended: bool
    found: dict[str, int]
    wait: float
    first_token: float
    admitted: float
    finished: float


class TreeEdge(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of the radix tree of what an act served: whole pages between two forks.

    parent: its place in the list, None at the root; first_page: how deep it begins; sequences: how many have it;
    nearest: runs of (the fastest tier that holds them, pages), "" where none does; tokens: its first ones; label: their
    text, where there is a vocabulary.
    """

    parent: int | None
    first_page: int
    pages: int
    sequences: int
    nearest: list[tuple[str, int]]
    tokens: list[int]
    label: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """How long a prefix took to be on the device while nothing else ran. source: its tier, or "computed"."""

    source: str
    tokens: int
    seconds: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a serving process did. bytes by tier are payload; misses by reason, in pages; opened, seconds: how long it
    took to open the store, and to serve.
    """

    mode: Mode
    requests: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    reused_tokens: dict[str, int]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    misses: dict[str, int]
    evicted_pages: dict[str, int]
    checksum_failures: int
    preemptions: int
    opened: float
    seconds: float
    served: list[Served]
    tree: list[TreeEdge] = []


def requests_of(scenario: Scenario) -> tuple[list[Request], Trace | None]:
    """Return the requests of a scenario, and the trace they came from."""
    vocab, max_tokens = scenario.config.vocab, scenario.config.max_tokens
    if scenario.texts is not None:
        return load_requests(scenario.texts)[scenario.first : scenario.first + scenario.requests], None
    if scenario.trace is not None:
        trace = read_trace(
            scenario.trace,
            limit=scenario.first + scenario.requests,
            vocab=vocab,
            max_tokens=max_tokens,
            seed=scenario.seed,
        )
        return list(trace.requests[scenario.first :]), trace
    drawn = conversations(scenario.seed, users=scenario.users, turns=scenario.turns, vocab=vocab, max_tokens=max_tokens)
    return list(drawn[scenario.first : scenario.first + scenario.requests]), None
