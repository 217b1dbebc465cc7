"""An exception between a gather and the mover ended `sw-device`: nothing that was published later was written through,
and flush() waited for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sequence_kit import StampEngine, evict_all, prompt
from stepwell.index import Tier
from stepwell.tiers import device_queue

MakeEngine = Callable[..., StampEngine]


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no such thing")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["_rows_of", "submit_demotion"])
def test_a_gather_that_cannot_be_handed_over_costs_its_pages_and_no_other(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    engine = make_engine(device=24, shared=1)
    store = engine.store

    def failing(*_: object, **__: object) -> object:
        raise error

    with monkeypatch.context() as patch:
        if where == "submit_demotion":
            patch.setattr(store._copies, where, failing)
        else:
            patch.setattr(device_queue, where, failing)
        engine.cache(prompt(1, 17))
        engine.land()
    tiers = store.stats().tiers
    assert (tiers["shared"].resident, tiers["shared"].arriving) == (0, 0)
    assert store.check() == ""
    engine.cache(prompt(2, 17))
    assert store.flush(120.0)
    evict_all(store, Tier.DEVICE, Tier.HOST)
    found = engine.open(prompt(2, 17))
    engine.settle(found)
    assert found.ready == 16
    engine.verify(found)
