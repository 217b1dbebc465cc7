"""What docs/sglang.md and the README tell SGLang's users to copy is accepted as it stands."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepwell.adapters.sglang import metrics
from stepwell.adapters.sglang.settings import AdapterSettings, read_settings
from stepwell.cli import build_parser
from test_sglang_metrics import Client

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sglang.md").read_text()
README = (ROOT / "README.md").read_text().partition("## Serve SGLang")[2].partition("\n## ")[0]
OF_SGLANG = (
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
)  # fmt: skip
"""What SGLang takes out before a backend sees the rest (hybrid_cache_controller.py:404-413)."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def configs() -> list[dict[str, Any]]:
    found = [json.loads(block) for block in blocks(PAGE, "json")]
    found += [tomllib.loads(block) for block in blocks(PAGE, "toml")]
    found += [json.loads(each) for each in re.findall(r"'(\{.*?\})'", README)]
    return found


@pytest.mark.parametrize("config", configs())
def test_an_extra_config_is_accepted_and_names_the_backend(config: dict[str, Any]) -> None:
    assert config["hicache_storage_pass_prefix_keys"] is True
    settings = read_settings({name: value for name, value in config.items() if name not in OF_SGLANG})
    assert settings.zero_copy
    assert settings.is_persistent
    assert (config["module_path"], config["class_name"]) == ("stepwell.adapters.sglang", "StepwellStorage")


def test_there_are_configs_of_every_form_and_equal_ones_are_equal() -> None:
    found = configs()
    assert len(found) == 4
    assert found[0] == found[2], "the TOML says the same"


def test_every_setting_of_the_adapter_is_in_the_table_with_its_default() -> None:
    for name in AdapterSettings.__struct_fields__:
        default = getattr(AdapterSettings(), name)
        shown = "none" if default is None else f"`{json.dumps(default)}`"
        assert f"| `{name}` | {shown} |" in PAGE


def test_every_metric_is_in_the_table() -> None:
    client = Client()
    metrics.Exporter("tp0", client=client)
    shown = set(re.findall(r"`(stepwell_\w+)`", PAGE.partition("## Metrics")[2].partition("\n## ")[0]))
    assert shown == {
        f"{name}_total" if name in metrics._COUNTERS else name for name in client.registry
    }


def sglang_flags() -> set[str]:
    """Return the flags of SGLang that are named; tests/adapters/sglang holds them against the real one."""
    commands = [line for text in (PAGE, README) for block in blocks(text, "bash") for line in split(block)]
    assert sum("sglang.launch_server" in command for command in commands) >= 6
    return {
        flag
        for command in commands
        if "sglang.launch_server" in command
        for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", command)
    } | {"--admin-api-key", "--hicache-mem-layout", "--dp-size"}


def split(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def test_doctor_takes_what_the_page_gives_it() -> None:
    lines = [line for line in (PAGE + README).splitlines() if "stepwell doctor --sglang --hicache" in line]
    given = [line.split("stepwell doctor", 1)[1].split() for line in lines]
    assert len(given) == 2
    for each in given:
        assert build_parser().parse_args(["doctor", *each]).sglang


def test_flags_are_found_in_the_commands() -> None:
    assert {"--hicache-size", "--hicache-storage-backend-extra-config", "--tp-size"} <= sglang_flags()
