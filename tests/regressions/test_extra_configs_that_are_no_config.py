"""The doctor's judgement of an extra config ended in a traceback for some of what a typing error makes: text of more
than 255 bytes that is no JSON, a tier smaller than its volumes, a number beyond all floats, a YAML key that is no text,
tables in tables without end, half of a surrogate pair. And of a file that holds no table it said that it is no JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell import StepwellUsageError, from_mapping
from stepwell.adapters.sglang.extra_config import check_extra_config
from stepwell.adapters.sglang.settings import read_settings
from test_sglang_extra_config import GOOD


def with_shared(**shared: Any) -> str:
    return json.dumps({**GOOD, "stepwell": {"shared": shared}})


CASES = {
    "a long text": ('{"stepwell":' * 40, "not JSON"),
    "a long name": (f"@{'a' * 300}.json", "cannot be read: File name too long"),
    "digits": ('{"prefetch_threshold": ' + "9" * 5000 + "}", "not JSON"),
    "beyond floats": (json.dumps({**GOOD, "prefetch_timeout_base": 10**400}), "prefetch_timeout_base is 1000"),
    "tables in tables": ("[" * 100_000, "nested too deep"),
    "a volume larger than its tier": (with_shared(capacity="1GiB", volume_bytes="2GiB"), "smaller than one volume"),
    "no byte of a tier": (json.dumps({**GOOD, "stepwell": {"host": 0}}), "host: capacity 0 bytes"),
    "half a pair in a key": (json.dumps({**GOOD, "\ud800": 1}), "'\\ud800' is no key of it"),
    "half a pair in a value": (json.dumps({**GOOD, "stepwell": {"host": 1, "lease": "\ud800"}}), "no text"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_extra_config_is_a_fail_that_can_be_printed(case: str) -> None:
    given, said = CASES[case]
    (found,), settings = check_extra_config(given)
    assert (found.verdict, settings) == ("fail", None)
    assert said in found.found
    found.found.encode()


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_a_file_that_holds_no_table_is_said_to(tmp_path: Path, ending: str) -> None:
    if ending == "yaml":
        pytest.importorskip("yaml")
    file = tmp_path / f"sglang.{ending}"
    file.write_text("[1]")
    (found,), _ = check_extra_config(f"@{file}")
    assert found.found == f"{file} holds [1], not a table of keys"


def test_keys_that_are_no_text_name_no_setting() -> None:
    """As YAML has them; SGLang gives them on."""
    tier = {"capacity": "1GiB"}
    for extra in ({**GOOD, 1: 2}, {"stepwell": {"shared": tier, None: 2}}):
        with pytest.raises(StepwellUsageError, match="is no key of it|names no setting"):
            read_settings(extra)
    with pytest.raises(StepwellUsageError, match=r"shared\.1 names no setting"):
        from_mapping({"shared": {**tier, 1: 2}})
