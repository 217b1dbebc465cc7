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
STORAGE = ROOT / "src" / "stepwell" / "adapters" / "sglang" / "storage.py"
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
    threads = re.search(r"^_IO_THREADS: Final = (\d+)$", STORAGE.read_text(), re.MULTILINE)  # its module wants SGLang
    assert threads is not None
    assert f"| `io_threads` | `{threads[1]}` |" in PAGE


def test_every_metric_is_in_the_table() -> None:
    client = Client()
    metrics.Exporter("tp0", client=client)
    shown = set(re.findall(r"`(stepwell_\w+)`", PAGE.partition("## Metrics")[2].partition("\n## ")[0]))
    assert shown == {
        f"{name}_total" if name in metrics._COUNTERS else name for name in client.registry
    }


def test_doctor_takes_what_the_page_gives_it() -> None:
    lines = [line for line in (PAGE + README).splitlines() if "stepwell doctor --sglang --hicache" in line]
    given = [line.split("stepwell doctor", 1)[1].split() for line in lines]
    assert len(given) == 3
    for each in given:
        assert build_parser().parse_args(["doctor", *each]).sglang
