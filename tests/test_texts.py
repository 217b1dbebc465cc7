"""The demo's texts: a prompts file is checked, turns follow each other, and the built-in ones are whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gguf_kit import Tiny
from stepwell.demo.chat import Chat, read_chat
from stepwell.demo.gguf_file import read_gguf
from stepwell.demo.models import QUICK_TURNS, QUICK_USERS
from stepwell.demo.texts import PromptsError, read_texts, requests_of_texts
from stepwell.demo.workload import load_requests, longest_conversation, save_requests

GOOD = """
answer_tokens = 5

[systems]
clerk = "You are a clerk."
guide = "You are a guide."

[[conversations]]
user = "ada"
system = "clerk"
turns = ["When?", "And then?", "Why?"]

[[conversations]]
user = "ben"
system = "clerk"
turns = ["Where?"]

[[conversations]]
user = "cleo"
system = "guide"
turns = ["Who?", "How?"]
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "prompts.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return read_chat(read_gguf(Tiny().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")))


def test_every_user_has_their_turns_in_order(prompts: Callable[[str], Path], chat: Chat) -> None:
    requests, spoken = requests_of_texts(read_texts(prompts(GOOD)), chat)
    assert [request.id for request in requests] == list(range(6))
    said = {"ada": ["When?", "And then?", "Why?"], "ben": ["Where?"], "cleo": ["Who?", "How?"]}
    systems = {"ada": "You are a clerk.", "ben": "You are a clerk.", "cleo": "You are a guide."}
    latest: dict[str, int] = {}
    for request, one in zip(requests, spoken, strict=True):
        assert one.said == said[one.user][one.turn - 1]
        assert request.follows == latest.get(one.user)
        expected = chat.opening(systems[one.user], one.said) if one.turn == 1 else chat.reply(one.said)
        assert request.tokens.tolist() == expected.tolist()
        assert (request.output_tokens, request.stop) == (5, chat.stop)
        latest[one.user] = request.id
    assert [one.turn for one in spoken] == sorted(one.turn for one in spoken)


def test_rounds_are_in_the_order_of_the_file(prompts: Callable[[str], Path], chat: Chat) -> None:
    _, spoken = requests_of_texts(read_texts(prompts(GOOD)), chat)
    assert [one.user for one in spoken] == ["ada", "ben", "cleo", "ada", "cleo", "ada"]


def test_the_longest_conversation_has_all_turns_and_answers(prompts: Callable[[str], Path], chat: Chat) -> None:
    requests, spoken = requests_of_texts(read_texts(prompts(GOOD)), chat)
    ada = [request for request, one in zip(requests, spoken, strict=True) if one.user == "ada"]
    assert longest_conversation(requests) == sum(request.tokens.size + 5 for request in ada)


def test_saved_requests_are_the_requests(prompts: Callable[[str], Path], chat: Chat, tmp_path: Path) -> None:
    requests, _ = requests_of_texts(read_texts(prompts(GOOD)), chat)
    save_requests(requests, tmp_path / "texts.json")
    for ours, loaded in zip(requests, load_requests(tmp_path / "texts.json"), strict=True):
        assert loaded.tokens.dtype == np.int32
        assert loaded.tokens.tolist() == ours.tokens.tolist()
        assert (loaded.id, loaded.output_tokens, loaded.conversation) == (
            ours.id,
            ours.output_tokens,
            ours.conversation,
        )
        assert (loaded.follows, loaded.stop) == (ours.follows, ours.stop)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("clerk = ", "clerk : "), "Expected"),
        (('system = "guide"', 'system = "pilot"'), "cleo talks under .* 'pilot'; .systems. has clerk, guide"),
        (('user = "ben"', 'user = "ada"'), "'ada' is there twice"),
        (('user = "ben"', 'name = "ben"'), "unknown field `name`"),
        (('turns = ["Where?"]', "turns = []"), "length >= 1"),
        (('turns = ["Where?"]', 'turns = [""]'), "length >= 1"),
        (('turns = ["Where?"]', 'turns = "Where?"'), "Expected `array`, got `str`"),
        (("answer_tokens = 5", "answer_tokens = 0"), ">= 1"),
        (("answer_tokens = 5", "answer_token = 5"), "unknown field `answer_token`"),
        ((GOOD, "[systems]"), "missing required field `conversations`"),
    ],
    ids=str,
)
def test_a_prompts_file_that_is_wrong_is_refused_with_its_name(
    prompts: Callable[[str], Path], change: tuple[str, str], message: str
) -> None:
    path = prompts(GOOD.replace(*change, 1))
    with pytest.raises(PromptsError, match=message) as raised:
        read_texts(path)
    assert str(path) in str(raised.value)


def test_a_prompts_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptsError):
        read_texts(tmp_path / "prompts.toml")


def test_the_built_in_texts_share_their_system_prompts_and_so_do_the_quick_ones() -> None:
    texts = read_texts()
    quick = texts.limited(users=QUICK_USERS, turns=QUICK_TURNS)
    for some in (texts, quick):
        systems = [one.system for one in some.conversations]
        assert len(set(systems)) < len(systems)
        assert min(len(one.turns) for one in some.conversations) > 1
    assert len(quick.conversations) == QUICK_USERS
    for system in texts.systems.values():
        assert 250 < len(system.split()) < 500
