"""The doctor's tables are those of the real SGLang."""

from __future__ import annotations

import pytest

from stepwell.adapters.sglang import check

pytest.importorskip("sglang", reason="SGLang is not installed")


def test_the_installed_sglang_is_as_stepwell_uses_it() -> None:
    found = {each.subject: each for each in check.check_sglang()}
    parts = [f"SGLang {part}" for part in ("storage calls", "dynamic backend", "host pools", "configuration")]
    assert [found[part].found for part in (*parts, "SGLang weight updates")] == ["as stepwell uses them"] * 5
    assert found["SGLang"].verdict == "ok"
