"""SGLang's clear passed by the pages that were on their way: read ahead for a hit that was asked for a moment ago, or
being saved. They were found again right after it, although no call was to find any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_pool_standin import MHATokenToKVPoolHost
from stepwell import Tier
from stepwell.testing.faults import inject, resume, wait_paused
from test_sglang_storage import Open, adapter, fill, hashes, open_storage, pages_of

__all__ = ["adapter", "open_storage"]

KEYS = hashes(3)


@pytest.fixture
def pool() -> Any:
    made = MHATokenToKVPoolHost("page_first")
    fill(made)
    return made


def test_clear_takes_what_is_being_read_ahead(
    open_storage: Open, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(pool)
    assert all(storage.batch_set_v1(KEYS, pages_of(pool, 0, 1, 2)))
    store = storage._members["kv"].store
    store.evict(Tier.SHARED, 1000)
    flush = store.flush

    def let_go_on(timeout: float | None = None) -> bool:
        resume("mover.unit")
        return flush(timeout)

    monkeypatch.setattr(store, "flush", let_go_on)
    with inject("mover.unit", "pause", nth=1):
        assert storage.batch_exists(KEYS) == 3
        wait_paused("mover.unit")
        storage.clear()
    assert storage.batch_exists(KEYS) == 0
    assert not np.any(storage.batch_get_v1(KEYS, pages_of(pool, 3, 4, 5)))


def test_clear_waits_no_longer_than_it_may_for_a_disk_that_hangs(open_storage: Open, pool: Any) -> None:
    storage = open_storage(pool, set_timeout=0.05)
    assert all(storage.batch_set_v1(KEYS, pages_of(pool, 0, 1, 2)))
    storage._members["kv"].store.evict(Tier.SHARED, 1000)
    with inject("mover.unit", "pause", nth=1):
        storage.batch_exists(KEYS)
        wait_paused("mover.unit")
        storage.clear()  # the test ends because it does
