"""Turn text into tokens and back, and conversations into prompts, as a GGUF file's vocabulary and template have it.

A template is applied to tokens, not to text: what a user writes is encoded apart from the marks around it, so that no
text of a user can be taken for a mark. Two are known: ChatML, where the vocabulary has its marks, and plain text with
names before the colons, for models that were not taught a template.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stepwell.demo.gguf_file import GgufError, GgufFile

Tokens = npt.NDArray[np.int32]

_CONTROL = 3  # a token_type: not text
_START, _END = "<|im_start|>", "<|im_end|>"

# What splits text before bytes are merged, by tokenizer.ggml.pre: digits that stay alone, and GPT-2's pattern.
_DIGITS_ALONE = {"smollm": True, "gpt-2": False, "default": False}


@dataclass(frozen=True, slots=True)
class Chat:
    """Encode conversations and decode answers. stop: the token that ends an answer; it is no part of one."""

    tokenizer: Tokenizer
    control: frozenset[int]
    start: int | None  # ChatML's marks; None: plain text
    end: int | None
    begin: int | None  # before everything else
    stop: int | None

    @property
    def template(self) -> str:
        """Return the template's name."""
        return "plain text" if self.start is None else "ChatML"

    def opening(self, system: str, said: str) -> Tokens:
        """Return the prompt of a conversation's first turn."""
        begin = [] if self.begin is None else [self.begin]
        if self.start is None:
            return _tokens(begin, self._encode(f"{system}\n\nUser: {said}\nAssistant:"))
        return _tokens(begin, self._part("system", system), self._part("user", said), self._answer())

    def reply(self, said: str) -> Tokens:
        """Return what a later turn adds after the answer before it."""
        if self.start is None or self.end is None:
            return _tokens(self._encode(f"\nUser: {said}\nAssistant:"))
        return _tokens([self.end], self._encode("\n"), self._part("user", said), self._answer())

    def text(self, tokens: npt.ArrayLike) -> str:
        """Return the text of an answer, or of its beginning; marks are left out."""
        ids = [token for token in np.asarray(tokens).tolist() if token not in self.control]
        text: str = self.tokenizer.decode(ids)
        return text

    def words(self, tokens: npt.ArrayLike) -> str:
        """Return the text of a part of a conversation without the names of roles that follow its marks."""
        parts: list[list[int]] = [[]]
        for token in np.asarray(tokens).tolist():
            if token == self.start:
                parts.append([])
            else:
                parts[-1].append(token)
        first, *turns = [self.text(part) for part in parts]
        return first + "".join(turn.partition("\n")[2] for turn in turns)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _part(self, role: str, text: str) -> list[int]:
        assert self.start is not None
        assert self.end is not None
        return [self.start, *self._encode(f"{role}\n{text}"), self.end, *self._encode("\n")]

    def _answer(self) -> list[int]:
        assert self.start is not None
        return [self.start, *self._encode("assistant\n")]


def read_chat(file: GgufFile) -> Chat:
    """Build the tokenizer that a file describes.

    Raises: GgufError for a vocabulary that is damaged or of a kind that cannot be used.
    """
    kind, split = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _DIGITS_ALONE:
        raise GgufError(
            f"{file.path}: its tokenizer is {kind} with {split}: only gpt2 (byte-level BPE) with "
            f"{', '.join(_DIGITS_ALONE)} can be used"
        )
    words = file.strings("tokenizer.ggml.tokens")
    ids = {word: number for number, word in enumerate(words)}
    merges = [merge.partition(" ")[::2] for merge in file.strings("tokenizer.ggml.merges")]
    if len(ids) != len(words):
        raise GgufError(f"{file.path}: {len(words) - len(ids)} words of its vocabulary are there twice")
    for merge in merges:
        if not {*merge, "".join(merge)} <= ids.keys():
            raise GgufError(f"{file.path}: the merge {' '.join(merge)!r} is not of words of the vocabulary")
    tokenizer = Tokenizer(models.BPE(ids, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _DIGITS_ALONE[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    end = ids.get(_END)
    start = ids.get(_START) if end is not None else None
    if start is None:
        end = None
    return Chat(
        tokenizer=tokenizer,
        control=_control(file, len(words)),
        start=start,
        end=end,
        begin=_special(file, "bos", len(words)) if file.metadata.get("tokenizer.ggml.add_bos_token") is True else None,
        stop=end if end is not None else _special(file, "eos", len(words)),
    )


def _special(file: GgufFile, which: str, vocab: int) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    if key not in file.metadata:
        return None
    token = file.integer(key)
    if not 0 <= token < vocab:
        raise GgufError(f"{file.path}: {key} is {token}, the vocabulary has {vocab}")
    return token


def _control(file: GgufFile, vocab: int) -> frozenset[int]:
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or types.shape != (vocab,):
        raise GgufError(f"{file.path}: tokenizer.ggml.token_type does not have a type for each of {vocab} words")
    return frozenset(np.flatnonzero(types == _CONTROL).tolist())


def _tokens(*parts: list[int]) -> Tokens:
    return np.array([token for part in parts for token in part], np.int32)
