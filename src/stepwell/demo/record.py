"""Keep what a run computed, so that another run can be held against it to the last bit.

For every position that was computed: a digest of its logits. From the first generated token of a conversation on: the
logits too, since the KV of such a token may have been made by a decode in one run and by a prefill in the other; then
the distance is what counts. Of a large vocabulary (49,152 for SmolLM2: 192 KiB a position) every n-th logit is kept, at
least KEPT_LOGITS: a row is the unembedding times a vector of the model's width (576), so that more of its logits than
that are as telling as all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]

KEPT_LOGITS = 1024


@dataclass(slots=True)
class Served:
    """One request: its prompt and answer, and per computed position a digest and maybe the logits.

    exact_until: first position whose token a decode produced, in this request or an earlier turn; before it every run
    must agree to the last bit. likeliest: what greedy decoding would have answered, whatever was answered.
    """

    exact_until: int = 0
    digests: dict[int, bytes] = field(default_factory=dict)
    logits: dict[int, Logits] = field(default_factory=dict)
    likeliest: list[int] = field(default_factory=list)
    prompt: Tokens | None = None
    answer: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which two runs do not agree as they must."""

    request: int
    position: int
    distance: float
    what: str

    def __str__(self) -> str:
        return f"request {self.request}, position {self.position}: {self.what} (largest distance {self.distance:.3g})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What holding one run against another found. equal, close: positions; differences: those that break the rule."""

    equal: int
    close: int
    largest: float
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether every position agrees, and there was something to agree on."""
        return not self.differences and self.equal + self.close > 0


class Record:
    """What one run computed, by request."""

    def __init__(self) -> None:
        self.served: dict[int, Served] = {}

    def begin(self, request: int, *, exact_until: int) -> None:
        """Open the record of a request."""
        self.served[request] = Served(exact_until=exact_until)

    def add(self, request: int, first: int, rows: Logits) -> None:
        """Take the logits of consecutive positions from `first` on.

        A position computed again (after a preemption) replaces what was there.
        """
        served = self.served[request]
        for offset, row in enumerate(np.ascontiguousarray(rows, dtype=np.float32)):
            position = first + offset
            served.digests[position] = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            if position >= served.exact_until - 1:  # the last exact position chooses the first generated token
                served.logits[position] = row[:: max(1, row.size // KEPT_LOGITS)].copy()

    def note_likeliest(self, request: int, token: int) -> None:
        """Note the next token of an answer that greedy decoding chooses."""
        self.served[request].likeliest.append(token)

    def finish(self, request: int, *, prompt: Tokens, answer: Tokens) -> None:
        """Note the tokens of a finished request."""
        served = self.served[request]
        served.prompt, served.answer = prompt, answer

    def answer(self, request: int) -> Tokens:
        """Return the answer a finished request got.

        Raises: KeyError where it was not served.
        """
        answer = self.served[request].answer
        if answer is None:
            raise KeyError(f"request {request} was not finished")
        return answer

    def sequence(self, request: int) -> Tokens:
        """Return the prompt and the answer of a finished request.

        Raises: KeyError where it was not served.
        """
        prompt = self.served[request].prompt
        if prompt is None:
            raise KeyError(f"request {request} was not finished")
        return np.concatenate([prompt, self.answer(request)])

    def answered_tokens(self) -> int:
        """Return how many tokens all answers have."""
        return sum(served.answer.size for served in self.served.values() if served.answer is not None)

    def finished(self) -> list[int]:
        """Return the ids of finished requests."""
        return [request for request, served in self.served.items() if served.answer is not None]

    def save(self, path: Path) -> None:
        """Write the record as arrays (numpy's format, nothing pickled)."""
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for request, served in self.served.items():
            if served.prompt is None or served.answer is None:
                continue
            positions = sorted(served.digests)
            kept = sorted(served.logits)
            arrays[f"{request}.prompt"] = served.prompt
            arrays[f"{request}.answer"] = served.answer
            arrays[f"{request}.likeliest"] = np.array(served.likeliest, dtype=np.int32)
            arrays[f"{request}.exact"] = np.array([served.exact_until], dtype=np.int64)
            arrays[f"{request}.positions"] = np.array(positions, dtype=np.int64)
            arrays[f"{request}.digests"] = np.frombuffer(
                b"".join(served.digests[p] for p in positions), dtype=np.uint8
            ).reshape(-1, 16)
            arrays[f"{request}.kept"] = np.array(kept, dtype=np.int64)
            arrays[f"{request}.logits"] = np.stack([served.logits[p] for p in kept])
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record that save() wrote."""
        record = cls()
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                request, part = name.split(".")
                if part != "prompt":
                    continue
                positions, digests = arrays[f"{request}.positions"], arrays[f"{request}.digests"]
                kept, logits = arrays[f"{request}.kept"], arrays[f"{request}.logits"]
                record.served[int(request)] = Served(
                    exact_until=int(arrays[f"{request}.exact"][0]),
                    digests={int(p): d.tobytes() for p, d in zip(positions, digests, strict=True)},
                    logits={int(p): row for p, row in zip(kept, logits, strict=True)},
                    likeliest=arrays[f"{request}.likeliest"].tolist(),
                    prompt=arrays[f"{request}.prompt"],
                    answer=arrays[f"{request}.answer"],
                )
        return record


def compare(run: Record, oracle: Record, *, tolerance: float | None = None) -> Comparison:
    """Hold a run against an oracle, at every position that both computed.

    Args:
        tolerance: None: every bit equal. Else: from the first generated token of a conversation on, logits may differ
            by at most this; before it they must be equal to the last bit.
    """
    equal = close = 0
    largest = 0.0
    differences: list[Difference] = []
    for request, ours in run.served.items():
        if ours.prompt is None or ours.answer is None:
            continue
        theirs = oracle.served.get(request)
        if theirs is None or theirs.prompt is None or theirs.answer is None:
            differences.append(Difference(request, -1, np.inf, "the oracle did not serve it"))
            continue
        for what, mine, its in (("prompts", ours.prompt, theirs.prompt), ("answers", ours.answer, theirs.answer)):
            if not np.array_equal(mine, its):
                differences.append(Difference(request, -1, np.inf, f"{what} differ"))
        for position, digest in ours.digests.items():
            other = theirs.digests.get(position)
            if other is None:
                continue
            if other == digest:
                equal += 1
                continue
            mine_logits, its_logits = ours.logits.get(position), theirs.logits.get(position)
            distance = (
                float(np.abs(mine_logits - its_logits).max())
                if mine_logits is not None and its_logits is not None
                else np.inf
            )
            if tolerance is not None and position >= ours.exact_until and distance <= tolerance:
                close += 1
                largest = max(largest, distance)
            else:
                differences.append(Difference(request, position, distance, "logits differ"))
    return Comparison(equal, close, largest, tuple(differences))
