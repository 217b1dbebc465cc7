"""Statistics that lie are found by the driver: each counter is held to what was seen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepwell.index import Tier
from stepwell.pins import Pins
from stepwell.stats import Counters
from stepwell.testing.driver import Failure, Totals, episode

pytestmark = pytest.mark.usefixtures("no_leaks")

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the stores say of the failures that they are given is not of interest."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


LIES: dict[str, tuple[type, str, Callable[[Call], Call]]] = {
    "lookups": (
        Counters,
        "looked_up",
        lambda call: lambda it, *given, **more: (call(it, *given, **more), call(it, *given, **more))[0],
    ),
    "'absent'": (
        Counters,
        "looked_up",
        lambda call: lambda it, asked, found, miss, pending, **more: call(it, asked, found, miss, 0, **more),
    ),
    "all misses": (Counters, "missed", lambda call: lambda it, reason, pages: None),
    "delivered_pages": (
        Counters,
        "delivered",
        lambda call: lambda it, found: call(it, {Tier.DISK: sum(found.values())}),
    ),
    "saved_pages": (Counters, "saved", lambda call: lambda it, pages, refused: call(it, pages + refused, 0)),
    "evicted_pages": (Counters, "evicted", lambda call: lambda it, tier, pages: call(it, Tier.HOST, pages)),
    "pins": (Pins, "count", lambda call: lambda it: 2 * call(it)),
}


@pytest.mark.parametrize("what", LIES)
def test_a_counter_that_lies_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, lie = LIES[what]
    monkeypatch.setattr(kind, name, lie(getattr(kind, name)))
    with pytest.raises(Failure, match=rf"stats\(\) says .*{what}"):
        episodes(20)


def episodes(count: int) -> None:
    """Run short episodes of a seed."""
    for number in range(count):
        episode(4, number, Totals(), steps=600)
