"""Serve requests: a small engine with continuous batching over stepwell sequences.

A round: finish what has landed (drain) -> admit -> pick one prefill chunk and all decodes -> extend (suspend the
youngest where the device is full) -> one step on the pool -> publish, append, record. The engine never copies a page
and never names a tier.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell import Namespace, PageStore
from stepwell import Sequence as RunningSequence
from stepwell.demo.record import Record
from stepwell.demo.transformer import CHUNK_TOKENS, Model
from stepwell.demo.workload import Request

Tokens = npt.NDArray[np.int32]

IDLE_ROUNDS = 10_000
"""Rounds in a row without anything to wait for or to compute, after which the engine gives up: a bug, not a load."""


@dataclass(slots=True)
class Running:
    """One request between admission and its last token."""

    request: Request
    prompt: Tokens
    forced: Tokens | None  # answers to give instead of the greedy ones: replay
    sequence: RunningSequence | None
    computed: int = 0
    produced: list[int] = field(default_factory=list)
    admitted_at: float = 0.0
    first_token_at: float | None = None
    ready_at: float | None = None
    found: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Tokens so far."""
        return self.prompt.size + len(self.produced)

    @property
    def open_sequence(self) -> RunningSequence:
        """The sequence; it is there while the request runs."""
        assert self.sequence is not None
        return self.sequence


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """batch: sequences that run at once. reuse: whether a prompt may start from cached pages."""

    batch: int = 8
    reuse: bool = True


class Engine:
    """Serve requests one schedule after the other.

    Invariant: `running` holds at most `batch` requests; each holds one sequence.
    Threads: one; it owns the device pool.
    """

    def __init__(
        self, store: PageStore, model: Model, options: EngineOptions, *, history: Record | None = None
    ) -> None:
        """Args: history: where the earlier turns of conversations stand that this engine did not serve itself."""
        self._store = store
        self._model = model
        self._options = options
        self._running: list[Running] = []
        self._suspended: deque[Running] = deque()
        self._answers: dict[int, Tokens] = {}
        self._tables = np.zeros((options.batch, model.config.max_pages), dtype=np.int32)
        self._history = history
        self._is_crowded = False  # a request was suspended for room, and none has finished since
        self._idle_rounds = 0
        self.preemptions = 0
        self.computed_tokens = 0
        self.rounds = 0

    def serve(
        self,
        requests: Sequence[Request],
        *,
        record: Record,
        replay: Record | None = None,
        on_finished: Callable[[Running], None] | None = None,
    ) -> None:
        """Serve requests to the end, in order of arrival as far as batch and conversations allow.

        Args:
            record: gets every logit. replay: where given, answers are taken from it instead of the greedy choice, so
                that a difference of one run does not change the prompts of later turns.
            on_finished: called after each request.
        """
        waiting = deque(requests)
        while waiting or self._running or self._suspended:
            self.rounds += 1
            self._store.device.drain()
            self._admit(waiting, record, replay)
            prefill, decodes = self._pick()
            if prefill is None and not decodes:
                self._unblock()
                continue
            self._idle_rounds = 0
            self._step(prefill, decodes, record)
            for done in [r for r in self._running if len(r.produced) >= r.request.output_tokens]:
                self._finish(done, record, on_finished)

    # ---- admission ------------------------------------------------------------------------------------------------

    def _admit(self, waiting: deque[Request], record: Record, replay: Record | None) -> None:
        if self._is_crowded and self._running:
            return  # who came back now would take the room that somebody was suspended for
        self._is_crowded = False
        while self._suspended and len(self._running) < self._options.batch:
            back = self._suspended.popleft()
            back.open_sequence.resume()
            back.computed = 0
            back.ready_at = None
            self._running.append(back)
        held: list[Request] = []
        while waiting and len(self._running) < self._options.batch:
            request = waiting.popleft()
            if request.follows is not None and not self._is_answered(request.follows):
                held.append(request)  # its conversation's earlier turn is not answered yet
                continue
            prompt = self._prompt(request)
            forced = None if replay is None else replay.answer(request.id)
            running = Running(request, prompt, forced, None, admitted_at=time.perf_counter())
            alone = None if self._options.reuse else Namespace(salt=f"request {request.id}")
            running.sequence = self._store.open(prompt, namespace=alone, request_id=str(request.id))
            record.begin(request.id, exact_until=self._exact_until(request, prompt, record))
            self._running.append(running)
        waiting.extendleft(reversed(held))

    def _is_answered(self, request: int) -> bool:
        return request in self._answers or (self._history is not None and request in self._history.served)

    def _so_far(self, request: int) -> Tokens:
        """Prompt and answer of a request that was served, by this engine or before."""
        if request in self._answers:
            return self._answers[request]
        assert self._history is not None
        served = self._history.served[request]
        assert served.prompt is not None
        assert served.answer is not None
        return np.concatenate([served.prompt, served.answer])

    def _exact_until(self, request: Request, prompt: Tokens, record: Record) -> int:
        """Where the first generated token of the conversation stands."""
        if request.follows is None:
            return int(prompt.size)
        for known in (record, self._history):
            if known is not None and request.follows in known.served:
                return min(known.served[request.follows].exact_until, int(prompt.size))
        raise AssertionError(f"request {request.id} follows {request.follows}, which nobody served")

    def _prompt(self, request: Request) -> Tokens:
        if request.follows is None:
            prompt = request.tokens
        else:
            prompt = np.concatenate([self._so_far(request.follows), request.tokens])
        room = self._model.config.max_tokens - request.output_tokens
        return np.ascontiguousarray(prompt[:room], dtype=np.int32)

    # ---- choosing ---------------------------------------------------------------------------------------------------

    def _pick(self) -> tuple[Running | None, list[Running]]:
        """Choose one request to prefill and those to decode, and give them device pages."""
        decodes = [r for r in self._running if r.computed >= r.prompt.size and r.computed == r.total - 1]
        prefill = next((r for r in self._running if r not in decodes and self._is_ready(r)), None)
        chosen = [*decodes, *([prefill] if prefill is not None else [])]
        while chosen:
            upto = [min(r.computed + CHUNK_TOKENS, r.total) if r is prefill else r.total for r in chosen]
            extended = self._store.extend([r.open_sequence for r in chosen], upto)
            if not extended.ok.all():  # pages that are being written through are pinned until they are: let them land
                self._store.device.drain()
                self._store.quiesce(1.0)
                extended = self._store.extend([r.open_sequence for r in chosen], upto)
            if extended.ok.all():
                break
            if len(self._running) == 1:
                raise RuntimeError(f"the device pool is too small for one request: {extended.full}")
            victim = self._running[-1]
            self._suspend(victim)
            chosen = [r for r in chosen if r is not victim]
            decodes = [r for r in decodes if r is not victim]
            if prefill is victim:
                prefill = None
        return prefill, decodes

    def _is_ready(self, running: Running) -> bool:
        """Whether a request's prefix is settled: on the device, or its own to compute."""
        sequence = running.open_sequence
        if running.ready_at is not None:
            return True
        if sequence.loading or sequence.pending:
            sequence.promote()
        if sequence.loading or sequence.pending:
            return False
        running.computed = sequence.ready
        running.ready_at = time.perf_counter()
        running.found = {tier.name.lower(): tokens for tier, tokens in sequence.reused.items()}
        return True

    def _unblock(self) -> None:
        """Nothing can be computed now: let transfers land, or free the device if all wait for its slots."""
        stalled = [r for r in self._running if r.open_sequence.stalled]
        waiting = [r for r in self._running if r.open_sequence.pending and not r.open_sequence.loading]
        if stalled and len(stalled) + len(waiting) == len(self._running):
            if len(self._running) > 1:
                self._suspend(self._running[-1])
            else:
                stalled[0].open_sequence.compute()
        elif waiting and len(waiting) == len(self._running):
            waiting[0].open_sequence.compute()
        elif self._store.quiesce(0.05):
            self._idle_rounds += 1
            if self._idle_rounds > IDLE_ROUNDS:
                raise RuntimeError(f"nothing moves and nothing can be computed: {self._running}")
            threading.Event().wait(0.001)

    def _suspend(self, running: Running) -> None:
        self.preemptions += 1
        self._is_crowded = True
        running.open_sequence.suspend()
        self._running.remove(running)
        self._suspended.appendleft(running)

    # ---- computing ---------------------------------------------------------------------------------------------------

    def _step(self, prefill: Running | None, decodes: list[Running], record: Record) -> None:
        model, store = self._model, self._store
        chunk_logits = batch_logits = None
        with store.device.step() as pool:
            if prefill is not None:
                tokens, length = self._chunk(prefill)
                store.block_tables([prefill.open_sequence], self._tables)
                pool.arrays, chunk_logits = model.prefill_chunk(
                    model.weights,
                    pool.arrays,
                    tokens,
                    np.int32(prefill.computed),
                    np.int32(length),
                    self._tables[0].copy(),
                )
            if decodes:
                store.block_tables([r.open_sequence for r in decodes], self._tables)
                pool.arrays, batch_logits = model.decode(
                    model.weights,
                    pool.arrays,
                    self._batch([int(r.open_sequence.tokens[-1]) for r in decodes]),
                    self._batch([r.total - 1 for r in decodes]),
                    self._tables.copy(),
                    np.arange(self._options.batch) < len(decodes),
                )
        moved = list(decodes)
        if prefill is not None and chunk_logits is not None:
            rows = np.asarray(chunk_logits)[:length]
            record.add(prefill.request.id, prefill.computed, rows)
            prefill.computed += length
            self.computed_tokens += length
            moved.append(prefill)
        if batch_logits is not None:
            for running, row in zip(decodes, np.asarray(batch_logits), strict=False):
                record.add(running.request.id, running.total - 1, row[None])
                running.computed = running.total
            self.computed_tokens += len(decodes)
        store.publish([r.open_sequence for r in moved], [r.computed for r in moved])
        for running in moved:
            if running.computed == running.total:
                self._take_token(running, record)

    @staticmethod
    def _chunk(running: Running) -> tuple[Tokens, int]:
        start = running.computed
        length = min(CHUNK_TOKENS, running.total - start)
        tokens = np.zeros(CHUNK_TOKENS, dtype=np.int32)
        tokens[:length] = running.open_sequence.tokens[start : start + length]
        return tokens, length

    def _batch(self, values: list[int]) -> Tokens:
        padded = np.zeros(self._options.batch, dtype=np.int32)
        padded[: len(values)] = values
        return padded

    def _take_token(self, running: Running, record: Record) -> None:
        """Choose the next token: greedy, or the one that is replayed."""
        if running.first_token_at is None:
            running.first_token_at = time.perf_counter()
        if len(running.produced) >= running.request.output_tokens:
            return
        if running.forced is not None:
            token = int(running.forced[len(running.produced)])
        else:
            token = record.greedy(running.request.id, running.total - 1)
        running.produced.append(token)
        self._store.append([running.open_sequence], np.array([token], dtype=np.int32))

    def _finish(self, done: Running, record: Record, on_finished: Callable[[Running], None] | None) -> None:
        self._is_crowded = False
        done.open_sequence.close()
        self._running.remove(done)
        answer = np.array(done.produced, dtype=np.int32)
        whole = np.concatenate([done.prompt, answer])
        self._answers[done.request.id] = whole
        record.finish(done.request.id, prompt=done.prompt, answer=answer)
        if on_finished is not None:
            on_finished(done)
