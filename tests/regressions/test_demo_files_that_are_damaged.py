"""Traces and prompts that ended the demo in a traceback, filled the memory, or steered the terminal."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gguf_kit import Tiny
from stepwell.cli import main
from stepwell.demo import texts, workload
from stepwell.demo.texts import PromptsError, read_texts
from stepwell.demo.workload import TraceError, read_trace

LINES = "".join(
    json.dumps({"input_length": 700 + n, "output_length": 20, "hash_ids": [1, n + 2]}) + "\n" for n in range(40)
).encode()


def test_a_damaged_gzip_trace_is_refused_or_read_whole_wherever_the_damage_is(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(LINES, mtime=0))
    (tmp_path / "whole.gz").write_bytes(whole)
    requests = read_trace(tmp_path / "whole.gz").requests
    refused = 0
    for at in range(len(whole)):
        damaged = whole[:]
        damaged[at] ^= 0xFF
        (tmp_path / "damaged.gz").write_bytes(damaged)
        try:
            assert len(read_trace(tmp_path / "damaged.gz").requests) == len(requests)  # its time stamp, say
        except TraceError:
            refused += 1
    assert refused > len(whole) // 2


def test_a_file_that_is_refused_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tiny(architecture="\x1b[31m").write(tmp_path / "model.gguf")
    (tmp_path / "prompts.toml").write_text(
        '[systems]\n[[conversations]]\nuser = "\\u001b[31m"\nsystem = ""\nturns = ["a"]\n'
    )
    Tiny().write(tmp_path / "right.gguf")
    for arguments in (
        ["--model", f"{tmp_path}/model.gguf"],
        ["--model", f"{tmp_path}/right.gguf", "--prompts", f"{tmp_path}/prompts.toml"],
    ):
        assert main(["demo", *arguments]) == 2
        said = capsys.readouterr().err
        assert r"\x1b[31m" in said
        assert "\x1b" not in said
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--trace", f"{tmp_path}/\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_line_without_an_end_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: type[bytes]
) -> None:
    monkeypatch.setattr(workload, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / ("trace.jsonl" if pack is bytes else "trace.gz")
    path.write_bytes(pack(LINES + bytes(1 << 16)))
    with pytest.raises(TraceError, match=r":41: a line of 65536 bytes is no request"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = " + "[" * 20000, "recursion"), ("answer_tokens = " + "9" * 5000, "digits"), ("#" * (1 << 20), "no prompts")],
    ids=["nested", "digits", "size"],
)
def test_prompts_that_cannot_be_read_are_refused_with_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.toml"
    file.write_text(text)
    with pytest.raises(PromptsError, match=message):
        read_texts(file)
    assert texts.BUILT_IN.stat().st_size < texts.MAX_FILE_BYTES // 4
