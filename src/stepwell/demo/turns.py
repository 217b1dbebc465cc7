"""Bring the turns of conversations to an engine, and keep what it answers: a turn waits for the one it follows.

Where another run is replayed its answers are given again, so that one difference does not change the prompts of all
later turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stepwell import Namespace
from stepwell.demo.engine import Hooks, Prompt, Running
from stepwell.demo.record import Record
from stepwell.demo.workload import Request

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Times:
    """When a request was admitted, had its prefix on the device, and its first token: seconds of a monotonic clock.

    found: tokens of the prefix by tier. Where it was suspended before its first token, `begun` and `found` are of the
    last time it began.
    """

    admitted: float
    begun: float = 0.0
    found: dict[str, int] = field(default_factory=dict)
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
        history: Record | None = None,
        replay: Record | None = None,
        reuse: bool = True,
        on_token: Callable[[Running, int], None] | None = None,
        on_finished: Callable[[Running], None] | None = None,
    ) -> None:
        """Args: max_tokens: the model's context; a prompt is cut to what fits beside its answer.

        record: gets every logit, and which token was likeliest. history: where the earlier turns stand that this run
        does not serve. replay: that too, and the answers to give. reuse: whether a prompt may start from cached pages.
        on_token: called with each token, the one that ends an answer too. on_finished: called after each request.
        """
        self._waiting = deque(requests)
        self._max_tokens = max_tokens
        self._record = record
        self._replay = replay
        self._known = [known for known in (record, replay, history) if known is not None]
        self._stops: dict[int, int | None] = {}
        self._reuse = reuse
        self._on_token = on_token
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
            self._stops[request.id] = request.stop
            stop = frozenset(() if request.stop is None else (request.stop,))
            return Prompt(request.id, tokens, request.output_tokens, stop=stop, namespace=alone)
        return None

    def _so_far(self, request: int) -> Tokens | None:
        """Prompt and answer of a request; None: it is not answered yet."""
        for known in self._known:
            served = known.served.get(request)
            if served is not None and served.prompt is not None and served.answer is not None:
                return np.concatenate([served.prompt, served.answer])
        return None

    def _tokens(self, request: Request) -> Tokens:
        before = None if request.follows is None else self._so_far(request.follows)
        tokens = request.tokens if before is None else np.concatenate([before, request.tokens])
        return np.ascontiguousarray(tokens[: self._max_tokens - request.output_tokens], dtype=np.int32)

    def _exact_until(self, request: Request, tokens: Tokens) -> int:
        """Where the first generated token of the conversation stands."""
        for known in self._known:
            if request.follows is not None and request.follows in known.served:
                return min(known.served[request.follows].exact_until, int(tokens.size))
        return int(tokens.size)

    def _choose(self, running: Running, logits: npt.NDArray[np.float32]) -> int:
        likeliest = int(logits.argmax())
        self._record.note_likeliest(running.prompt.id, likeliest)
        if self._replay is None:
            return likeliest
        answer, stop = self._replay.answer(running.prompt.id), self._stops[running.prompt.id]
        if len(running.produced) < answer.size:
            return int(answer[len(running.produced)])
        assert stop is not None, "an answer shorter than asked for was ended by its stop token"
        return stop

    def _begun(self, running: Running) -> None:
        times = self.times[running.prompt.id]
        if not times.first_token:  # afterwards its own answer is found again, which says nothing of the prompt
            times.begun = time.perf_counter()
            times.found = {tier.name.lower(): tokens for tier, tokens in running.sequence.reused.items()}

    def _token(self, running: Running, token: int) -> None:
        times = self.times[running.prompt.id]
        times.first_token = times.first_token or time.perf_counter()
        if self._on_token is not None:
            self._on_token(running, token)

    def _finished(self, running: Running) -> None:
        answer = np.array(running.produced, dtype=np.int32)
        if answer[-1] == self._stops[running.prompt.id]:
            answer = answer[:-1]  # it ends an answer and is no part of it
        self._record.finish(running.prompt.id, prompt=running.prompt.tokens, answer=answer)
        if self._on_finished is not None:
            self._on_finished(running)
