"""The store against the model of all it promises (stepwell.testing.model), step by step, as hypothesis chooses them.

100,000 steps: `python -m stepwell.testing --hypothesis --steps 100000`, as `.ci/run` does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stepwell.testing import machine


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the stores say of the failures that they are given is not of interest."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_leaks")
def test_whatever_is_done_to_a_store_it_keeps_its_promises() -> None:
    done = machine.run(10_000, first_seed=1)
    assert done[True] > done[False], "most steps had nothing to do: too little was tried"
