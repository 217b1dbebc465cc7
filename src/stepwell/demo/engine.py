"""Serve prompts: a small engine with continuous batching, chunked prefill and preemption, on stepwell's sequences.

A round: admit -> choose all decodes and a chunk of one prefill, get pages for them (suspend the youngest where there is
no room) -> a step on the pool -> publish, choose tokens, append them. docs/engine.md walks through this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell import Full, Namespace, PageStore, Sequence
from stepwell.demo.transformer import CHUNK_TOKENS, Model

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
PATIENCE_SECONDS = 10.0  # for pages that are on their way, before the engine makes do without them


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Ask for an answer: up to `output_tokens` >= 1 tokens, fewer where one of `stop` is chosen."""

    id: int
    tokens: Tokens
    output_tokens: int
    stop: frozenset[int] = frozenset()
    namespace: Namespace | None = None


@dataclass(slots=True, eq=False)
class Running:
    """One prompt between admission and its last token. computed: leading tokens whose KV is on the device."""

    prompt: Prompt
    sequence: Sequence
    produced: list[int] = field(default_factory=list)
    computed: int = 0
    is_begun: bool = False  # what was found of its prefix is on the device: the rest is its own to compute

    @property
    def upto(self) -> int:
        """Where its next computation ends: a chunk further, or at its last token."""
        return min(self.computed + CHUNK_TOKENS, self.sequence.tokens.size)

    @property
    def is_decoding(self) -> bool:
        """Whether all it lacks is the KV of the token that was chosen last."""
        return bool(self.produced) and self.computed == self.sequence.tokens.size - 1


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller is asked (choose: the next token) and told."""

    choose: Callable[[Running, Logits], int] = lambda running, logits: int(logits.argmax())
    on_begun: Callable[[Running], None] = lambda running: None  # its prefix is on the device; again after a preemption
    on_logits: Callable[[Running, int, Logits], None] = lambda running, first, rows: None  # of positions first, ...
    on_token: Callable[[Running, int], None] = lambda running, token: None
    on_finished: Callable[[Running], None] = lambda running: None


class Engine:
    """Serve prompts as they come: at most `batch` at once, the first of them gets room first. Threads: one."""

    def __init__(self, store: PageStore, model: Model, *, batch: int, hooks: Hooks | None = None) -> None:
        self._store, self._model, self._batch, self._hooks = store, model, batch, hooks or Hooks()
        self._running: list[Running] = []
        self._suspended: deque[Running] = deque()
        self._is_crowded = False  # one was suspended for room, and none has finished since
        self.preemptions = self.computed_tokens = 0

    def serve(self, next_prompt: Callable[[], Prompt | None]) -> None:
        """Serve until nothing runs and there is no next prompt. next_prompt: None where there is none now."""
        while self._admit(next_prompt):
            if chosen := self._choose():
                self._step(chosen)
            else:
                self._wait()

    def recover(self) -> None:
        """After a step that raised: begin again with a new pool and what lower tiers hold. serve() goes on then."""
        self._store.device.renew()
        self._suspended, self._running = deque([*self._running, *self._suspended]), []

    def _admit(self, next_prompt: Callable[[], Prompt | None]) -> bool:
        """Fill the batch: first with those that were suspended. False: there is nobody to serve."""
        self._store.device.drain()
        if self._is_crowded and self._running:
            return True  # who came in now would take the room that another was suspended for
        self._is_crowded = False
        while self._suspended and len(self._running) < self._batch:
            back = self._suspended.popleft()
            back.sequence.resume()
            back.computed, back.is_begun = 0, False
            self._running.append(back)
        while len(self._running) < self._batch and (prompt := next_prompt()) is not None:
            sequence = self._store.open(prompt.tokens, namespace=prompt.namespace, request_id=str(prompt.id))
            self._running.append(Running(prompt, sequence))
        return bool(self._running)

    def _choose(self) -> list[Running]:
        """Choose who computes in this round, at most one of them a prefill, and get pages for it."""
        chosen = [r for r in self._running if r.is_decoding]
        chosen += next(([r] for r in self._running if not r.is_decoding and self._is_begun(r)), [])
        while chosen and (full := self._extend(chosen)) is not None:
            if len(self._running) == 1:
                raise RuntimeError(f"the device pool is too small for one request: {full}")
            self._suspend_youngest()
            chosen = [r for r in chosen if r in self._running]
        return chosen

    def _is_begun(self, running: Running) -> bool:
        if not running.is_begun:
            running.sequence.promote()
            if running.sequence.settled:
                running.computed, running.is_begun = running.sequence.ready, True
                self._hooks.on_begun(running)
        return running.is_begun

    def _extend(self, chosen: list[Running]) -> Full | None:
        """Get device pages for what is computed next. Full: there are none, though all that could leave has left."""
        sequences, upto = [r.sequence for r in chosen], [r.upto for r in chosen]
        if self._store.extend(sequences, upto).full is None:
            return None
        self._store.device.drain()  # a published page stays until it is written through: let that happen
        self._store.quiesce(PATIENCE_SECONDS)
        return self._store.extend(sequences, upto).full

    def _suspend_youngest(self) -> None:
        self.preemptions += 1
        self._is_crowded = True
        self._suspended.appendleft(self._running.pop())
        self._suspended[0].sequence.suspend()

    def _wait(self) -> None:
        """Let pages land; where none would, suspend the youngest, or let the only one compute what it waits for."""
        if not self._store.device.wait([r.sequence for r in self._running], PATIENCE_SECONDS):
            if len(self._running) > 1:
                self._suspend_youngest()
            else:
                self._running[0].sequence.compute()

    def _step(self, chosen: list[Running]) -> None:
        """Compute, publish what is full, and choose a token for each whose tokens are all computed."""
        decodes, prefills = [r for r in chosen if r.is_decoding], [r for r in chosen if not r.is_decoding]
        calls = [(self._model.prefill_chunk, self._chunk(running)) for running in prefills]
        calls += [(self._model.decode, self._decode_batch(decodes))] if decodes else []
        logits = []
        with self._store.device.step() as pool:
            for compute, inputs in calls:
                pool.arrays, on_device = compute(self._model.weights, pool.arrays, *inputs)
                logits.append(on_device)
            on_host: list[Logits] = [np.asarray(rows) for rows in logits]  # waits: what fails, fails the step
        computed = [(running, on_host[0][: running.upto - running.computed]) for running in prefills]
        computed += [(running, on_host[-1][row : row + 1]) for row, running in enumerate(decodes)]
        for running, rows in computed:
            self._hooks.on_logits(running, running.computed, rows)
            running.computed += len(rows)
            self.computed_tokens += len(rows)
        self._store.publish([r.sequence for r, _ in computed], [r.computed for r, _ in computed])
        for running, rows in computed:
            if running.computed == running.sequence.tokens.size:
                self._take_token(running, self._hooks.choose(running, rows[-1]))

    def _chunk(self, running: Running) -> tuple[object, ...]:
        """Return (tokens, start, length, block table), the tokens padded to the one length that is compiled."""
        tokens, length = np.zeros(CHUNK_TOKENS, np.int32), running.upto - running.computed
        tokens[:length] = running.sequence.tokens[running.computed : running.upto]
        return tokens, np.int32(running.computed), np.int32(length), self._tables([running], rows=1)[0]

    def _decode_batch(self, decodes: list[Running]) -> tuple[object, ...]:
        """Return (tokens, positions, block tables, active), padded to a full batch by rows that are not active."""
        tokens, positions = np.zeros((2, self._batch), np.int32)
        tokens[: len(decodes)] = [running.produced[-1] for running in decodes]
        positions[: len(decodes)] = [running.computed for running in decodes]
        return tokens, positions, self._tables(decodes, rows=self._batch), np.arange(self._batch) < len(decodes)

    def _tables(self, chosen: list[Running], *, rows: int) -> Tokens:
        tables = np.empty((rows, self._model.config.max_pages), np.int32)
        self._store.block_tables([r.sequence for r in chosen], tables)
        return tables

    def _take_token(self, running: Running, token: int) -> None:
        running.produced.append(token)
        self._store.append([running.sequence], np.array([token], np.int32))
        self._hooks.on_token(running, token)
        if len(running.produced) >= running.prompt.output_tokens or token in running.prompt.stop:
            self._is_crowded = False
            self._running.remove(running)
            running.sequence.close()
            self._hooks.on_finished(running)
