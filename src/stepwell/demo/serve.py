"""Run one serving process of the demo: `python -m stepwell.demo.serve SCENARIO`, JSON lines on standard output.

    {"opened": seconds}  {"ready": seconds}  {"token": n, "of": request} ...  {"served": {...}, "answer": [...]} ...
    {"summary": {...}}  {"serving_on": true}  {"served_on": request} ... until killed
    {"measured": [...]} in place of all but the first two, where the scenario is to measure

Tokens are said as they are chosen, where the requests are texts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from stepwell import DeviceTier, DiskTier, PageStore, SharedTier, StoreConfig
from stepwell.demo.engine import Engine, Running
from stepwell.demo.measure import measure
from stepwell.demo.record import Record
from stepwell.demo.scenario import Scenario, Served, Summary, requests_of
from stepwell.demo.transformer import Model, ModelConfig, enable_compilation_cache, load_weights, make_model
from stepwell.demo.tree import draw_tree
from stepwell.demo.turns import Turns
from stepwell.demo.workload import Request, conversations
from stepwell.errors import BudgetError, TierIOError, VolumeError


def say(**message: object) -> None:
    """Print one JSON line at once."""
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def open_store(scenario: Scenario, config: ModelConfig, tokens: int) -> PageStore:
    """Open the store that a scenario asks for; `tokens`: as many as an unbounded pool must hold."""
    geometry = config.geometry()
    sizes = scenario.sizes
    if scenario.mode != "tiers":
        pages = -(-tokens // config.page_tokens) + config.max_pages * sizes.batch
        return PageStore(StoreConfig(geometry=geometry, device=DeviceTier(pages=pages), host=16 * geometry.page_bytes))
    return PageStore(
        StoreConfig(
            geometry=geometry,
            device=DeviceTier(pages=sizes.device_pages),
            host=sizes.host_pages * geometry.page_bytes,
            shared=SharedTier(
                capacity=sizes.shared_bytes, path=scenario.shared_path, volume_bytes=sizes.shared_volume_bytes
            ),
            disk=DiskTier(capacity=sizes.disk_bytes, path=scenario.disk_path, volume_bytes=sizes.disk_volume_bytes),
        )
    )


def summarize(store: PageStore, scenario: Scenario, engine: Engine, done: list[Served], tokens: Totals) -> Summary:
    """Add up what a run did."""
    stats = store.stats()
    reused: dict[str, int] = {}
    for served in done:
        for tier, found in served.found.items():
            reused[tier] = reused.get(tier, 0) + found
    return Summary(
        mode=scenario.mode,
        requests=len(done),
        prompt_tokens=sum(served.prompt for served in done),
        computed_tokens=engine.computed_tokens,
        generated_tokens=tokens.generated,
        reused_tokens=reused,
        bytes_read={name: tier.bytes_read for name, tier in stats.tiers.items()},
        bytes_written={name: tier.bytes_written for name, tier in stats.tiers.items()},
        misses=stats.misses,
        evicted_pages=stats.evicted_pages,
        checksum_failures=stats.checksum_failures,
        preemptions=engine.preemptions,
        opened=tokens.opened,
        seconds=tokens.seconds,
        served=done,
    )


class Totals:
    """Times and counts of a run."""

    def __init__(self) -> None:
        self.opened = 0.0
        self.seconds = 0.0
        self.generated = 0


def warm_up(store: PageStore, model: Model, batch: int) -> None:
    """Compile every shape on the scratch slot, so that no request waits for a compiler."""
    store.device.warm()
    table = np.full(model.config.max_pages, store.device.scratch_slot, dtype=np.int32)
    with store.device.step() as pool:
        pool.arrays, _ = model.prefill_chunk(
            model.weights, pool.arrays, np.zeros(64, np.int32), np.int32(0), np.int32(0), table
        )
        pool.arrays, logits = model.decode(
            model.weights,
            pool.arrays,
            np.zeros(batch, np.int32),
            np.zeros(batch, np.int32),
            np.tile(table, (batch, 1)),
            np.zeros(batch, np.bool_),
        )
    logits.block_until_ready()


def main(argument: str) -> int:
    """Serve a scenario."""
    scenario = msgspec.json.decode(argument, type=Scenario)
    enable_compilation_cache(scenario.compilation_cache)
    config = scenario.config
    model = make_model(config, None if scenario.weights is None else load_weights(scenario.weights))
    requests, _ = requests_of(scenario)
    replay = None if scenario.replay is None else Record.load(Path(scenario.replay))
    history = None if scenario.history is None else Record.load(Path(scenario.history))
    totals = Totals()
    done: list[Served] = []
    started = time.perf_counter()
    needed = sum(r.tokens.size + r.output_tokens for r in requests) + config.max_tokens * scenario.sizes.batch
    with open_store(scenario, config, needed) as store:
        if scenario.swap_staged_page:
            from stepwell.testing.hooks import swap_staged_pages

            swap_staged_pages(store)
        totals.opened = time.perf_counter() - started
        say(opened=totals.opened)
        warm_up(store, model, scenario.sizes.batch)
        say(ready=time.perf_counter() - started)
        if scenario.measure:
            assert history is not None, "what is loaded is what was served"
            say(measured=measure(store, model, history))
            return 0
        record = Record()

        def finished(running: Running) -> None:
            times, answer = turns.times[running.prompt.id], record.answer(running.prompt.id)
            totals.generated += len(running.produced)
            served = Served(
                request=running.prompt.id,
                prompt=int(running.prompt.tokens.size),
                answer=int(answer.size),
                ended=int(answer.size) < len(running.produced),
                found=times.found,
                wait=times.begun - times.admitted,
                first_token=times.first_token - times.admitted,
                admitted=times.admitted - began,
                finished=time.perf_counter() - began,
            )
            done.append(served)
            say(served=served, answer=answer.tolist())

        turns = Turns(
            requests,
            max_tokens=config.max_tokens,
            record=record,
            history=history,
            replay=replay,
            reuse=scenario.mode != "recompute",
            on_token=None if scenario.texts is None else lambda running, token: say(token=token, of=running.prompt.id),
            on_finished=finished,
        )
        engine = Engine(store, model, batch=scenario.sizes.batch, hooks=turns.hooks())
        began = time.perf_counter()
        engine.serve(turns.next_prompt)
        totals.seconds = time.perf_counter() - began
        store.flush(30.0)
        record.save(Path(scenario.record))
        summary = summarize(store, scenario, engine, done, totals)
        if scenario.picture and scenario.mode == "tiers":
            sequences = [record.sequence(one.request) for one in done]
            tree = draw_tree(store, sequences, page_tokens=config.page_tokens)
            summary = msgspec.structs.replace(summary, tree=tree)
        say(summary=summary)
        if scenario.serve_on:
            say(serving_on=True)
            _serve_until_killed(scenario, store, model)
    return 0


def _serve_until_killed(scenario: Scenario, store: PageStore, model: Model) -> None:
    """Serve requests that nobody has seen, so that the kill finds saves under way."""
    vocab, max_tokens = model.config.vocab, model.config.max_tokens
    others = conversations(
        scenario.seed + 1,
        users=64,
        turns=2,
        system_tokens=200 if scenario.texts is None else 64,
        output_tokens=16 if scenario.texts is None else 4,
        vocab=vocab,
        max_tokens=max_tokens,
    )
    renumbered = [
        Request(
            r.id + 10**6, r.tokens, r.output_tokens, r.conversation, None if r.follows is None else r.follows + 10**6
        )
        for r in others
    ]
    turns = Turns(
        renumbered,
        max_tokens=max_tokens,
        record=Record(),
        on_finished=lambda running: say(served_on=running.prompt.id),
    )
    Engine(store, model, batch=scenario.sizes.batch, hooks=turns.hooks()).serve(turns.next_prompt)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except (BudgetError, TierIOError, VolumeError) as error:  # the world's doing: the sentence says what to do
        sys.exit(f"{type(error).__name__}: {error}")
