"""An engine spun for ever: requests whose prefixes lay in lower tiers each loaded a part of theirs, together more than
the device holds; whoever was suspended for room came back at once and took it.
"""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.config import DeviceTier, SharedTier, StoreConfig
from stepwell.demo.engine import Engine
from stepwell.demo.record import Record, compare
from stepwell.demo.transformer import ModelConfig, make_model
from stepwell.demo.turns import Turns
from stepwell.demo.workload import Request
from stepwell.store import PageStore
from store_kit import Directories

CONFIG = ModelConfig(
    vocab=64, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, hidden=32, page_tokens=4, max_pages=32
)


@pytest.mark.timeout(120)
def test_requests_that_together_exceed_the_device_are_loaded_one_after_the_other(directories: Directories) -> None:
    model = make_model(CONFIG)
    random = np.random.default_rng(5)
    requests = [
        Request(number, random.integers(0, 64, 116, dtype=np.int32), output_tokens=4, conversation=number)
        for number in range(4)
    ]
    config = StoreConfig(
        geometry=CONFIG.geometry(),
        device=DeviceTier(pages=40),  # a request needs 30
        host=8 * 4096,  # so that all of them load in turns, a few pages each
        shared=SharedTier("1MiB", str(directories.shared), volume_bytes="1MiB"),
    )
    records = []
    for _ in range(2):
        record = Record()
        with PageStore(config) as store:
            turns = Turns(requests, max_tokens=CONFIG.max_tokens, record=record)
            engine = Engine(store, model, batch=4, hooks=turns.hooks())
            engine.serve(turns.next_prompt)
            assert store.flush(30.0)
            assert store.check() == ""
        records.append(record)
        assert engine.preemptions <= 2 * len(requests), "who was suspended for room came back before there was any"
    assert engine.computed_tokens < sum(r.tokens.size for r in requests) / 2, "the second run found little"
    assert compare(records[1], records[0], tolerance=1e-3).holds
