"""A device tier that could not be had raised what JAX raises: TypeError for 1.5 pages, RuntimeError without memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from sequence_kit import StepFailedError, config
from stepwell.errors import BudgetError, StepwellUsageError
from stepwell.store import PageStore
from store_kit import Directories


@pytest.mark.parametrize("pages", [1.5, "3", None, True])
def test_pages_that_are_no_number_are_refused(directories: Directories, pages: Any) -> None:
    with pytest.raises(StepwellUsageError, match=r"device\.pages"):
        PageStore(config(directories, device=pages))


@pytest.mark.parametrize("pages", [0, -1, (1 << 31) - 1, 1 << 40])
def test_pages_that_no_block_table_could_name_are_refused(directories: Directories, pages: int) -> None:
    with pytest.raises(BudgetError, match=f"device: {pages} pages"):
        PageStore(config(directories, device=pages))


def test_a_device_without_memory_is_a_budget_error_and_leaves_nothing(
    directories: Directories, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    engine = make_engine(shared=0)
    with pytest.raises(StepFailedError), engine.store.device.step():
        raise StepFailedError("the engine failed")
    with monkeypatch.context() as patch:
        patch.setattr(jnp, "zeros", no_memory)
        with pytest.raises(BudgetError, match=r"lower device\.pages: RESOURCE_EXHAUSTED"):
            PageStore(config(directories))
        with pytest.raises(BudgetError, match=r"lower device\.pages: RESOURCE_EXHAUSTED"):
            engine.store.device.renew()
    assert engine.store.device.is_reset
    engine.store.device.renew()
