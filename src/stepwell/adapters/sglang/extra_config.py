"""Read and judge SGLang's `--hicache-storage-backend-extra-config` without SGLang: text or @FILE, as SGLang reads it.

What SGLang would refuse at the start, what stepwell would refuse when it is attached, and what would work but worse.
SGLang 0.5.23 reads it in hybrid_cache_controller.py:378-438, and makes the backend of it in
storage/backend_factory.py:136-160.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import stepwell as sw
from stepwell.adapters.sglang.bound import DEFAULT_TIMEOUT
from stepwell.adapters.sglang.settings import SglangSettings, read_settings

SUBJECT: Final = "SGLang extra config"
FLAG: Final = "--hicache-storage-backend-extra-config"
_BACKEND: Final = {
    "backend_name": "stepwell",
    "module_path": "stepwell.adapters.sglang",
    "class_name": "StepwellStorage",
}
_PASS: Final = "hicache_storage_pass_prefix_keys"
_WHY: Final = "SGLang would not start with it, or refuse to attach it"


def check_extra_config(given: str) -> tuple[list[sw.Finding], SglangSettings | None]:
    """Judge an extra config.

    Args:
        given: as SGLang is given it: JSON, or @FILE with the ending .json, .toml, .yaml or .yml.

    Returns:
        The findings, one ok where there is nothing to say; and the settings, None where they would be refused.
    """
    found: list[sw.Finding] = []
    try:
        extra = _read(given)
        base, per_ki_token = _take_sglangs(extra)
        _check_backend(extra)
        passes_prefixes = extra.pop(_PASS, False)
        settings = read_settings(extra)
        config = _config_of(settings)
    except (sw.StepwellUsageError, sw.StepwellError) as error:
        return _refusal(str(error)), None
    except RecursionError:
        return _refusal("it is nested too deep, or holds itself"), None
    except UnicodeEncodeError as error:
        return _refusal(f"{error.object!a:.60} holds half of a surrogate pair, which is no text"), None
    if not settings.zero_copy:
        found.append(
            _warn(
                "interface_v1 is not set",
                why="every page is copied once more, as a tensor of its own",
                remedy='"interface_v1": 1, beside "class_name"',
            )
        )
    if not passes_prefixes:
        found.append(
            _warn(
                f"{_PASS} is not true",
                why="stepwell is not told which page comes before: after a restart pages leave a tier by use alone, "
                "and a prefix may lose its first pages before its last",
                remedy=f'"{_PASS}": true, beside "class_name"',
            )
        )
    if not found:
        bound = settings.adapter.load_bound
        shown = f"{base:g} s and {per_ki_token:g} s per 1,024 tokens" if bound == "prefetch-timeout" else repr(bound)
        tiers = ", ".join(
            f"{name} {tier.capacity} in {tier.path}"
            for name, tier in (("shared", config.shared), ("disk", config.disk))
            if tier is not None
        )
        found.append(sw.Finding("ok", SUBJECT, f"{tiers or 'host memory alone'}; loading a hit may take {shown}"))
    return found, settings


def _refusal(found: str) -> list[sw.Finding]:
    # What cannot be printed may be quoted in it: JSON has escapes for halves of surrogate pairs.
    printable = found.encode(errors="backslashreplace").decode()
    return [sw.Finding("fail", SUBJECT, printable, _WHY, f"{FLAG} as in docs/sglang.md")]


def tiers_as_arguments(settings: SglangSettings) -> list[str]:
    """Return the stores' settings as NAME=VALUE; tiers that lie in directories and are not named are none."""
    arguments: list[str] = []
    for name, value in {"shared": None, "disk": None, **settings.tiers}.items():
        if isinstance(value, Mapping):
            arguments += [f"{name}.{inner}={_as_text(each)}" for inner, each in value.items()]
        else:
            arguments.append(f"{name}={_as_text(value)}")
    return arguments


def _as_text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(given: str) -> dict[str, Any]:
    """Read the text or the file."""
    if not given.startswith("@"):
        try:
            value = json.loads(given)
        except ValueError as error:
            # Not Path.is_file(): it raises where the text is longer than a name may be.
            hint = f"; a file is given as @{given}" if os.path.isfile(given) else ""
            raise sw.StepwellUsageError(f"not JSON: {error}{hint}") from error
        return _as_table(value, "the text")
    path = Path(given[1:])
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise sw.StepwellUsageError(f"{path}: SGLang reads files that end in {', '.join(_READERS)}")
    try:
        value = reader(path.read_text())
    except OSError as error:
        raise sw.StepwellUsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except sw.StepwellUsageError:  # a ValueError too
        raise
    except ValueError as error:
        raise sw.StepwellUsageError(f"{path} is no {path.suffix[1:].upper()}: {error}") from error
    return _as_table(value, str(path))


def _read_yaml(text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")  # SGLang brings it, stepwell does not
    except ImportError as error:
        raise sw.StepwellUsageError(
            "PyYAML is not installed here, so a YAML file cannot be read: ask in SGLang's environment, or give JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


def _as_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise sw.StepwellUsageError(f"{where} holds {value!r:.60}, not a table of keys")
    return value


def _take_sglangs(extra: dict[str, Any]) -> tuple[float, float]:
    """Take out what SGLang takes out, but whether it passes hashes. Returns: its prefetch timeout."""
    threshold = extra.pop("prefetch_threshold", 256)
    if not isinstance(threshold, int):
        raise sw.StepwellUsageError(f"prefetch_threshold is {threshold!r}; give a whole number of tokens")
    timeout = []
    for name, default in zip(("prefetch_timeout_base", "prefetch_timeout_per_ki_token"), DEFAULT_TIMEOUT, strict=True):
        seconds = extra.pop(name, default)
        if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
            raise sw.StepwellUsageError(f"{name} is {seconds!r}; give seconds, 0 or more")
        timeout.append(float(seconds))
    extra.pop("tp_lcm_size", None)
    passes = extra.get(_PASS, False)
    if not isinstance(passes, bool):
        raise sw.StepwellUsageError(f"{_PASS} is {passes!r}; give true or false")
    return timeout[0], timeout[1]


def _check_backend(extra: Mapping[str, Any]) -> None:
    """Hold to the door `dynamic`: the three names of the class."""
    for name, wanted in _BACKEND.items():
        if name not in extra:
            raise sw.StepwellUsageError(f'{name} is missing; SGLang wants "{name}": "{wanted}"')
    for name in ("module_path", "class_name"):
        if extra[name] != _BACKEND[name]:
            raise sw.StepwellUsageError(f"{name} is {extra[name]!r}; stepwell's is {_BACKEND[name]!r}")


def _config_of(settings: SglangSettings) -> sw.StoreConfig:
    """Check the tiers as a store would. The engine says the geometry: any will do."""
    geometry = sw.PageGeometry(
        model="any", revision="any", layers=1, kv_heads=1, head_dim=8, dtype="uint8", page_tokens=1
    )
    return sw.from_mapping({"geometry": geometry, **settings.tiers})


def _warn(found: str, *, why: str, remedy: str) -> sw.Finding:
    return sw.Finding("warn", SUBJECT, found, why, remedy)
