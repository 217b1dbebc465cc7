"""Say what a configuration comes to: every value with its origin, and what follows, down to pages and tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stepwell import _core
from stepwell.config import DiskTier, SharedTier, floor_bytes, parse_size, volume_bytes
from stepwell.errors import BudgetError
from stepwell.geometry import PageGeometry
from stepwell.settings import Origin, Settings, Sources, gather
from stepwell.tiers.directory import CoreHeaders

EXAMPLE_GEOMETRY: Final = PageGeometry(
    model="example", revision="none", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=16
)
"""Stands in where no source gives a geometry, because the engine does: pages of 2 MiB."""
_SMALL_EXAMPLE: Final = replace(EXAMPLE_GEOMETRY, layers=1, kv_heads=1)
"""Stands in where even one such page is more than a tier may hold: pages of 8 KiB."""
EXAMPLE: Final = Origin("default", "example")
DERIVED: Final = "derived"
_SLOT_ALIGNMENT: Final = 4096  # of host slots always, of disk slots at most: the file system may want less
_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One line of what a store would be opened with.

    name: dotted. value: plain (numbers, texts, lists), sizes in bytes. text: for people. origin: `file:line`, a
    variable, an argument, "default", or "derived".
    """

    name: str
    value: Any
    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a tier holds. volumes: 0 for tiers without. volume_bytes: what one takes in all its files."""

    pages: int
    volume_bytes: int = 0
    volumes: int = 0


def effective_values(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
) -> tuple[Settings, list[EffectiveValue]]:
    """Read the configuration as load_settings does, and list its values, in the order of the schema.

    Where no source gives a geometry (the engine does), its settings and what follows from them are left out.

    Raises:
        StepwellUsageError, BudgetError: as load_settings.
    """
    sources = gather(path, environ=environ, arguments=arguments)
    settings = settle_with_example(sources)
    values = []
    for name, value in settings.values().items():
        origin = settings.origins[name]
        if origin is EXAMPLE:
            continue
        values.append(_given(name, value, str(origin)))
    return settings, values + _derived(settings)


def settle_with_example(sources: Sources) -> Settings:
    """Check what the sources say; an example stands in for a geometry that none of them gives."""
    if sources.has("geometry"):
        return sources.settle()
    sources.add_table("geometry", EXAMPLE_GEOMETRY, EXAMPLE)
    try:
        return sources.settle()
    except BudgetError:
        sources.add_table("geometry", _SMALL_EXAMPLE, EXAMPLE)
        return sources.settle()


def has_geometry(settings: Settings) -> bool:
    """Return whether the geometry was given, by whatever source."""
    return settings.origins["geometry.model"] is not EXAMPLE


def show_size(nbytes: int) -> str:
    """Return a size for people: exact in the largest unit that has at most three digits before the point."""
    for unit, name in _UNITS:
        if nbytes >= unit:
            number = nbytes / unit
            return f"{number:.0f} {name}" if nbytes % unit == 0 else f"{number:.2f} {name}"
    return f"{nbytes} B"


def tier_capacity(settings: Settings, tier: str, *, alignment: int = _SLOT_ALIGNMENT) -> Capacity:
    """Return how much a tier that is configured holds when it has all of its capacity.

    alignment: of slots on disk, as its file system wants them.
    """
    config = settings.config
    if tier == "device":
        assert config.device is not None
        return Capacity(config.device.pages)
    page_bytes = config.geometry.page_bytes
    if tier == "host":
        return Capacity((config.host_bytes() or 0) // (-(-page_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT))
    given = config.shared if tier == "shared" else config.disk
    assert given is not None
    shape = _core.PageShape(list(config.geometry.layer_bytes), config.geometry.fingerprint())
    size = volume_bytes(given, name=tier)
    try:
        header = CoreHeaders(shape).plan(
            medium=1 if tier == "shared" else 2, volume_bytes=size, alignment=64 if tier == "shared" else alignment
        )
    except ValueError:  # not one page fits
        return Capacity(0, size, 0)
    total = header.metadata_bytes + header.pages_bytes
    volumes = parse_size(given.capacity, name=f"{tier}.capacity") // total
    return Capacity(volumes * header.slots, total, volumes)


def _given(name: str, value: Any, origin: str) -> EffectiveValue:
    if name.endswith((".capacity", "_bytes", ".share", "staging")) and value is not None:
        value = parse_size(value, name=name)
        return EffectiveValue(name, value, show_size(value), origin)
    if value is None:
        return EffectiveValue(name, None, "none" if name.startswith("geometry") else "by rule, see below", origin)
    if isinstance(value, bool):
        return EffectiveValue(name, value, str(value).lower(), origin)
    return EffectiveValue(name, value, str(value), origin)


def _derived(settings: Settings) -> list[EffectiveValue]:
    found: list[EffectiveValue] = []
    geometry = settings.config.geometry
    is_known = has_geometry(settings)

    def add(name: str, value: Any, text: str) -> None:
        found.append(EffectiveValue(name, value, text, DERIVED))

    if is_known:
        add("geometry.page_bytes", geometry.page_bytes, show_size(geometry.page_bytes))
        add("geometry.fingerprint", geometry.fingerprint().hex(), geometry.fingerprint().hex()[:16] + "...")
    for tier, given in (
        ("device", settings.config.device),
        ("host", settings.config.host),
        ("shared", settings.config.shared),
        ("disk", settings.config.disk),
    ):
        if given is None:
            continue
        capacity = tier_capacity(settings, tier)
        if isinstance(given, SharedTier | DiskTier):
            directory = os.path.abspath(os.path.expanduser(given.path))
            size, share = volume_bytes(given, name=tier), floor_bytes(given, name=tier)
            add(f"{tier}.directory", directory, directory)
            add(f"{tier}.effective_volume_bytes", size, show_size(size))
            add(f"{tier}.effective_share_bytes", share, show_size(share))
            if is_known:
                add(f"{tier}.volumes", capacity.volumes, str(capacity.volumes))
        if is_known:
            tokens = capacity.pages * geometry.page_tokens
            add(f"{tier}.pages", capacity.pages, f"{capacity.pages:,}")
            add(f"{tier}.tokens", tokens, f"{tokens:,}")
    staging = settings.config.staging_bytes()
    if staging != 0:  # else neighbours' pages come to the host tier
        text = "none: neighbours' pages are not read" if staging is None else f"at most {show_size(staging)}"
        add("effective_staging_bytes", staging, text)
    return found
