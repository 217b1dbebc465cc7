"""Read the texts of a demo: who talks, under which system prompt, and what they say. The built-in ones: prompts.toml.

A prompts file is TOML:

    answer_tokens = 16                  # longest answer; may be left out

    [systems]                           # system prompts by name; several users share one
    clerk = "You are the clerk of ..."

    [[conversations]]                   # one user each
    user = "ada"
    system = "clerk"
    turns = ["When do you open?", "And on Sundays?"]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from stepwell.demo.workload import Request

if TYPE_CHECKING:
    from stepwell.demo.chat import Chat  # which needs tokenizers

BUILT_IN = Path(__file__).with_name("prompts.toml")
MAX_FILE_BYTES = 1 << 20  # a book, which no context holds

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class PromptsError(ValueError):
    """Report a prompts file that cannot be used; names the file and what is wrong in it."""


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user says, turn by turn, under a system prompt named here."""

    user: _Text
    system: str
    turns: Annotated[list[_Text], msgspec.Meta(min_length=1)]


class Texts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All texts of a demo."""

    systems: dict[str, _Text]
    conversations: Annotated[list[Conversation], msgspec.Meta(min_length=1)]
    answer_tokens: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16

    def limited(self, *, users: int, turns: int) -> Texts:
        """Return the first users and of each the first turns."""
        kept = [msgspec.structs.replace(one, turns=one.turns[:turns]) for one in self.conversations[:users]]
        return msgspec.structs.replace(self, conversations=kept)


def read_texts(path: str | os.PathLike[str] = BUILT_IN) -> Texts:
    """Read a prompts file.

    Raises: PromptsError for one that is not as described above; OSError.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES)
    if len(data) == MAX_FILE_BYTES:
        raise PromptsError(f"{path}: {MAX_FILE_BYTES} bytes and more are no prompts")
    try:
        texts = msgspec.toml.decode(data, type=Texts)
    except (ValueError, RecursionError) as cause:  # ValueError: of msgspec, of UTF-8, of a number of 4300 digits
        raise PromptsError(f"{path}: {cause}") from cause
    users = [one.user for one in texts.conversations]
    for one in texts.conversations:
        if one.system not in texts.systems:
            known = ", ".join(sorted(texts.systems)) or "none"
            raise PromptsError(f"{path}: {one.user} talks under a system prompt {one.system!r}; [systems] has {known}")
        if users.count(one.user) > 1:
            raise PromptsError(f"{path}: the user {one.user!r} is there twice: give each conversation its own name")
    return texts


class Spoken(msgspec.Struct, frozen=True):
    """Whose turn a request is, and what is said in it. turn: from 1."""

    user: str
    turn: int
    said: str


def requests_of_texts(texts: Texts, chat: Chat) -> tuple[tuple[Request, ...], list[Spoken]]:
    """Return the requests of all conversations and what each is.

    Every user has one turn a round while theirs last, in the order of the file, so that a request comes after the one
    it follows. Request n is what Spoken n says.
    """
    latest: dict[int, int] = {}
    requests: list[Request] = []
    spoken: list[Spoken] = []
    for turn in range(max(len(one.turns) for one in texts.conversations)):
        for number, one in enumerate(texts.conversations):
            if turn >= len(one.turns):
                continue
            said, follows = one.turns[turn], latest.get(number)
            tokens = chat.opening(texts.systems[one.system], said) if follows is None else chat.reply(said)
            latest[number] = len(requests)
            spoken.append(Spoken(one.user, turn + 1, said))
            requests.append(
                Request(
                    id=len(requests),
                    tokens=tokens,
                    output_tokens=texts.answer_tokens,
                    conversation=number,
                    follows=follows,
                    stop=chat.stop,
                )
            )
    return tuple(requests), spoken
