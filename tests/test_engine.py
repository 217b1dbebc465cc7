"""The demo's engine: it batches, cuts prefills, gives way, begins again, and every answer stays what it was."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from stepwell.config import DeviceTier, SharedTier, StoreConfig
from stepwell.demo.engine import Engine, Hooks, Prompt, Running
from stepwell.demo.transformer import CHUNK_TOKENS, Model, ModelConfig, make_model
from stepwell.index import Tier
from stepwell.store import PageStore
from store_kit import Directories

CONFIG = ModelConfig(
    vocab=64, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32, page_tokens=4, max_pages=40
)
Tokens = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(CONFIG)


@contextmanager
def store_of(directories: Directories | None, *, device: int, host: int = 16) -> Iterator[PageStore]:
    """Open a store; with shared memory where there are directories. Afterwards nothing may be held."""
    shared = None if directories is None else SharedTier(1 << 19, str(directories.shared), volume_bytes=1 << 19)
    config = StoreConfig(geometry=CONFIG.geometry(), device=DeviceTier(pages=device), host=host * 4096, shared=shared)
    with PageStore(config) as store:
        yield store
        store.device.drain()
        assert store.flush(30.0)
        store.device.drain()  # slots of a lost pool that were pinned until now
        assert store.check() == ""
        assert store.stats().leases == 0
        assert store.stats().tiers["device"].pinned == 0


def prompt(number: int, tokens: int, output_tokens: int = 6, **others: Any) -> Prompt:
    drawn = np.random.default_rng(number).integers(0, CONFIG.vocab, tokens, dtype=np.int32)
    return Prompt(number, drawn, output_tokens, **others)


class Caller:
    """Bring prompts, and keep what happens."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.waiting = deque(prompts)
        self.events: list[tuple[str, int, int]] = []
        self.answers: dict[int, list[int]] = {}
        self.found: dict[int, dict[Tier, int]] = {}

    def next_prompt(self) -> Prompt | None:
        return self.waiting.popleft() if self.waiting else None

    def hooks(self) -> Hooks:
        def finished(running: Running) -> None:
            self.events.append(("finished", running.prompt.id, len(running.produced)))
            self.answers[running.prompt.id] = running.produced
            self.found[running.prompt.id] = running.sequence.reused

        return Hooks(
            on_begun=lambda running: self.events.append(("begun", running.prompt.id, running.computed)),
            on_logits=lambda running, first, rows: self.events.append(("logits", running.prompt.id, first + len(rows))),
            on_token=lambda running, token: self.events.append(("token", running.prompt.id, token)),
            on_finished=finished,
        )

    def of(self, number: int) -> list[tuple[str, int]]:
        return [(what, value) for what, one, value in self.events if one == number]


def serve(store: PageStore, model: Model, prompts: Iterable[Prompt], *, batch: int = 3) -> tuple[Caller, Engine]:
    caller = Caller(prompts)
    engine = Engine(store, model, batch=batch, hooks=caller.hooks())
    engine.serve(caller.next_prompt)
    return caller, engine


def answers(model: Model, prompts: Iterable[Prompt]) -> dict[int, list[int]]:
    """Answer prompts on a device that holds everything."""
    with store_of(None, device=100) as store:
        return serve(store, model, prompts)[0].answers


def test_the_caller_hears_of_all_that_happens_in_its_order(model: Model) -> None:
    with store_of(None, device=100) as store:
        caller, engine = serve(store, model, [prompt(1, 10, 3)])
    first, second, third = caller.answers[1]
    assert caller.of(1) == [
        ("begun", 0),
        ("logits", 10),
        ("token", first),
        ("logits", 11),
        ("token", second),
        ("logits", 12),
        ("token", third),
        ("finished", 3),
    ]
    assert engine.computed_tokens == 12


def test_a_long_prefill_does_not_hold_up_an_answer(model: Model) -> None:
    with store_of(None, device=100) as store:
        caller, _ = serve(store, model, [prompt(1, 5, 10), prompt(2, 2 * CHUNK_TOKENS + 9, 2)])
    chunks = [i for i, event in enumerate(caller.events) if event[:2] == ("logits", 2)][:3]
    assert [caller.events[i][2] for i in chunks] == [CHUNK_TOKENS, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 9]
    for before, after in itertools.pairwise(chunks):
        assert [event[:2] for event in caller.events[before:after]].count(("token", 1)) == 1


def test_more_prompts_than_fit_a_batch_are_all_answered_as_if_alone(model: Model) -> None:
    prompts = [prompt(number, 7 + 5 * number) for number in range(7)]
    alone = {}
    for one in prompts:
        alone |= answers(model, [one])
    with store_of(None, device=100) as store:
        caller, _ = serve(store, model, prompts)
    assert caller.answers == alone


def test_an_answer_ends_at_a_stop_token(model: Model) -> None:
    whole = answers(model, [prompt(1, 10, 8)])[1]
    stop = whole[4]
    assert answers(model, [prompt(1, 10, 8, stop=frozenset({stop}))])[1] == whole[: whole.index(stop) + 1]


def test_a_chosen_token_is_the_one_that_is_answered(model: Model) -> None:
    with store_of(None, device=100) as store:
        caller = Caller([prompt(1, 10, 3)])
        finished: list[Running] = []
        hooks = Hooks(choose=lambda running, logits: 40 + len(running.produced), on_finished=finished.append)
        Engine(store, model, batch=3, hooks=hooks).serve(caller.next_prompt)
    assert finished[0].produced == [40, 41, 42]
    assert finished[0].sequence.tokens[-3:].tolist() == [40, 41, 42]


@pytest.mark.parametrize("host", [3, 24])
def test_prompts_that_block_each_others_loads_are_answered_all_the_same(
    directories: Directories, model: Model, host: int
) -> None:
    prompts = [prompt(number, 33) for number in range(4)]
    expected = answers(model, prompts)
    with store_of(directories, device=14, host=host) as store:
        serve(store, model, prompts)
        store.device.drain()
        assert store.flush(30.0)
        store.evict(Tier.DEVICE, 100)
        store.evict(Tier.HOST, 100)
        caller, engine = serve(store, model, prompts)
    assert caller.answers == expected
    assert engine.preemptions > 0
    assert all(caller.found[number].get(Tier.SHARED, 0) > 0 for number in range(2))


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_whose_device_others_hold_says_so_with_numbers_and_goes_on_when_there_is_room(
    directories: Directories, model: Model, count: int
) -> None:
    prompts = [prompt(number, 33) for number in range(count)]
    expected = answers(model, prompts)
    with store_of(directories, device=14) as store:
        serve(store, model, prompts)
        store.device.drain()
        assert store.flush(30.0)
        store.evict(Tier.DEVICE, 100)
        caller = Caller(prompts)
        engine = Engine(store, model, batch=3, hooks=caller.hooks())
        with store.open(np.full(33, 1, np.int32)) as other:
            assert store.extend([other], [33]).ok.all()
            with pytest.raises(RuntimeError, match=r"too small for one request: device tier full: need \d+ pages"):
                engine.serve(caller.next_prompt)
        assert engine.preemptions == count - 1
        engine.serve(caller.next_prompt)
    assert caller.answers == expected


class FailingModel:
    """A model one of whose calls fails: before it donates the pool, or after."""

    def __init__(self, model: Model, *, call: int, after: bool) -> None:
        self.calls, self._fails_at, self._after = 0, call, after
        self.model = model._replace(
            prefill_chunk=self._counted(model.prefill_chunk), decode=self._counted(model.decode)
        )

    def _counted(self, compute: Any) -> Any:
        def call(*inputs: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
            self.calls += 1
            if self.calls == self._fails_at and not self._after:
                raise RuntimeError("out of memory")
            result: tuple[tuple[jax.Array, ...], jax.Array] = compute(*inputs)
            if self.calls == self._fails_at:
                raise RuntimeError("out of memory")
            return result

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before donation", "after donation"])
@pytest.mark.parametrize("call", [1, 2, 5, 9, 14])
def test_a_failed_step_is_recovered_from_and_every_answer_stays(
    directories: Directories, model: Model, call: int, after: bool
) -> None:
    prompts = [prompt(number, 20 + 3 * number) for number in range(5)]
    expected = answers(model, prompts)
    failing = FailingModel(model, call=call, after=after)
    with store_of(directories, device=14) as store:
        caller = Caller(prompts)
        engine = Engine(store, failing.model, batch=3, hooks=caller.hooks())
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.serve(caller.next_prompt)
        assert store.device.is_reset
        engine.recover()
        engine.serve(caller.next_prompt)
    assert failing.calls > call
    assert caller.answers == expected
