"""Measure, with nothing else running, how long a prefix takes to be on the device: computed, and from each tier.

In traffic a request waits for the steps of others too, so what it waited says little about a tier. Here one sequence is
opened at a time, after what the tiers above hold was dropped, and only loads that one tier served alone are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stepwell import Namespace, PageStore, Tier
from stepwell.demo.engine import Engine, Hooks, Prompt, Running
from stepwell.demo.record import Record
from stepwell.demo.scenario import Measured
from stepwell.demo.transformer import Model

Tokens = npt.NDArray[np.int32]

LENGTHS = 5
ROUNDS = 3
PATIENCE_SECONDS = 30.0
_EVERYTHING = 2**31 - 1


def measure(store: PageStore, model: Model, record: Record) -> list[Measured]:
    """Measure prefixes of the longest sequence of a record, at up to LENGTHS lengths, ROUNDS times each.

    What is computed for it is forgotten afterwards.
    """
    sequences = [record.sequence(request) for request in record.finished()]
    if not sequences:
        return []
    longest, page = max(sequences, key=len), model.config.page_tokens
    whole = (longest.size - 1) // page  # the last token is the request's own to compute
    lengths = sorted({max(1, whole * part // LENGTHS) * page for part in range(1, LENGTHS + 1)} if whole else set())
    # What is compiled on first use (a scatter for each number of pages) is no part of a load.
    for tokens in lengths:
        list(_loads(store, longest, tokens))
    found = []
    for round_ in range(ROUNDS):
        for tokens in lengths:
            found.append(_computed(store, model, longest[:tokens], salt=f"measure {round_} {tokens}"))
            found += _loads(store, longest, tokens)
    return found


def _computed(store: PageStore, model: Model, tokens: Tokens, *, salt: str) -> Measured:
    """Compute a prefix under a name of its own, so that nothing of it is found."""
    first: list[float] = []

    def on_token(running: Running, token: int) -> None:
        first.append(time.perf_counter())

    namespace = Namespace(salt=salt)
    prompts = iter([Prompt(0, tokens, 1, namespace=namespace)])
    engine = Engine(store, model, batch=1, hooks=Hooks(on_token=on_token))
    store.quiesce(PATIENCE_SECONDS)
    began = time.perf_counter()
    engine.serve(lambda: next(prompts, None))
    store.device.drain()
    store.quiesce(PATIENCE_SECONDS)
    store.forget(tokens, namespace=namespace)
    return Measured(source="computed", tokens=int(tokens.size), seconds=first[0] - began)


def _loads(store: PageStore, longest: Tokens, tokens: int) -> Iterator[Measured]:
    """Load a prefix from disk, then from where that has brought it: shared memory, host memory."""
    for above in ((Tier.SHARED, Tier.HOST, Tier.DEVICE), (Tier.HOST, Tier.DEVICE), (Tier.DEVICE,)):
        store.device.drain()
        store.quiesce(PATIENCE_SECONDS)
        for tier in above:
            store.evict(tier, _EVERYTHING)
        began = time.perf_counter()
        with store.open(longest[: tokens + 1]) as sequence:
            while not sequence.settled:
                sequence.promote()
                if not sequence.settled and not store.device.wait([sequence], PATIENCE_SECONDS):
                    break
            seconds = time.perf_counter() - began
            sources = [tier for tier, part in sequence.reused.items() if part]
            if sequence.ready == tokens and len(sources) == 1 and sources[0] is not Tier.DEVICE:
                yield Measured(source=sources[0].name.lower(), tokens=tokens, seconds=seconds)
