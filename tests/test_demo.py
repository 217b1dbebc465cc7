"""The demo: its engine serves the same logits whatever the tiers do, and its verdict sees every difference."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import cli
from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig
from stepwell.demo import run as demo_run
from stepwell.demo.engine import Engine, Running
from stepwell.demo.record import Record, compare
from stepwell.demo.scenario import Sizes, Summary
from stepwell.demo.transformer import Model, ModelConfig, make_model
from stepwell.demo.turns import Turns
from stepwell.demo.workload import Request, conversations
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


# ---- the command -----------------------------------------------------------------------------------------------------


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
        assert cli.main(["demo", "--quick", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert all(check["holds"] for check in report["checks"]) == (code == 0)


def test_an_act_that_dies_is_a_failure_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(demo_run.Path, "home", lambda: Path(demo_run.tempfile.gettempdir()) / "stepwell-test-home")
    assert cli.main(["demo", "--quick"]) == 1
    assert "failed" in capsys.readouterr().out


def test_sizes_of_the_demo_fit_its_requests() -> None:
    assert Sizes().device_pages >= ModelConfig().max_pages
