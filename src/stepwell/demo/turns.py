"""Bring the turns of conversations to an engine, and keep what it answers: a turn waits for the one it follows.

Where another run is replayed its answers are given again, so that one difference does not change the prompts of all
later turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell import Namespace
from stepwell.demo.engine import Hooks, Prompt, Running
from stepwell.demo.record import Record
from stepwell.demo.workload import Request

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Times:
    """When a request was admitted, had its prefix on the device, and its first token: seconds of a monotonic clock."""

    admitted: float
    begun: float = 0.0
    first_token: float = 0.0


class Turns:
    """Bring requests in their order, as far as conversations allow, and record what is computed for them.

    Invariant: a request that follows another is brought once that one is answered, by this run or an earlier one.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int,
        record: Record,
        replay: Record | None = None,
        reuse: bool = True,
        on_finished: Callable[[Running], None] | None = None,
    ) -> None:
        """Args: max_tokens: the model's context; a prompt is cut to what fits beside its answer.

        record: gets every logit. replay: where the earlier turns stand that this run does not serve, and the answers to
        give. reuse: whether a prompt may start from cached pages. on_finished: called after each request.
        """
        self._waiting = deque(requests)
        self._max_tokens = max_tokens
        self._record = record
        self._replay = replay
        self._reuse = reuse
        self._on_finished = on_finished
        self.times: dict[int, Times] = {}

    def hooks(self) -> Hooks:
        """Return what the engine calls."""
        return Hooks(
            choose=self._choose,
            on_begun=self._begun,
            on_logits=lambda running, first, rows: self._record.add(running.prompt.id, first, rows),
            on_token=self._token,
            on_finished=self._finished,
        )

    def next_prompt(self) -> Prompt | None:
        """Return the first request whose conversation has come so far; None: none has."""
        for number, request in enumerate(self._waiting):
            if request.follows is not None and self._so_far(request.follows) is None:
                continue
            del self._waiting[number]
            tokens = self._tokens(request)
            self._record.begin(request.id, exact_until=self._exact_until(request, tokens))
            self.times[request.id] = Times(admitted=time.perf_counter())
            alone = None if self._reuse else Namespace(salt=f"request {request.id}")
            return Prompt(request.id, tokens, request.output_tokens, namespace=alone)
        return None

    def _so_far(self, request: int) -> Tokens | None:
        """Prompt and answer of a request; None: it is not answered yet."""
        for known in (self._record, self._replay):
            served = None if known is None else known.served.get(request)
            if served is not None and served.prompt is not None and served.answer is not None:
                return np.concatenate([served.prompt, served.answer])
        return None

    def _tokens(self, request: Request) -> Tokens:
        before = None if request.follows is None else self._so_far(request.follows)
        tokens = request.tokens if before is None else np.concatenate([before, request.tokens])
        return np.ascontiguousarray(tokens[: self._max_tokens - request.output_tokens], dtype=np.int32)

    def _exact_until(self, request: Request, tokens: Tokens) -> int:
        """Where the first generated token of the conversation stands."""
        for known in (self._record, self._replay):
            if request.follows is not None and known is not None and request.follows in known.served:
                return min(known.served[request.follows].exact_until, int(tokens.size))
        return int(tokens.size)

    def _choose(self, running: Running, logits: npt.NDArray[np.float32]) -> int:
        if self._replay is not None:
            return int(self._replay.answer(running.prompt.id)[len(running.produced)])
        return int(logits.argmax())

    def _begun(self, running: Running) -> None:
        self.times[running.prompt.id].begun = time.perf_counter()

    def _token(self, running: Running, token: int) -> None:
        times = self.times[running.prompt.id]
        times.first_token = times.first_token or time.perf_counter()

    def _finished(self, running: Running) -> None:
        answer = np.array(running.produced, dtype=np.int32)
        self._record.finish(running.prompt.id, prompt=running.prompt.tokens, answer=answer)
        if self._on_finished is not None:
            self._on_finished(running)
