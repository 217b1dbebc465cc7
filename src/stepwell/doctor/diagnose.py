"""Run all checks in order: configuration, machine, directories, then the round through the tiers."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stepwell.doctor.directories import check_directory
from stepwell.doctor.findings import Finding, fail, ok, warn
from stepwell.doctor.machine import check_machine
from stepwell.doctor.round import check_round
from stepwell.effective import EXAMPLE, has_geometry, settle_with_example, show_size
from stepwell.errors import StepwellError, StepwellUsageError
from stepwell.settings import Origin, Settings, Sources, gather

EXAMPLE_CAPACITY: Final = {"shared": "256MiB", "disk": "1GiB"}
_TIERS: Final = ("device", "host", "shared", "disk")


def diagnose(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
    shared: str | None = None,
    disk: str | None = None,
    with_round: bool = True,
    root: str | os.PathLike[str] = "/",
) -> Generator[Finding]:
    """Check this machine and a configuration, as the user who will run the engine.

    Args:
        path, environ, arguments: as load_settings.
        shared, disk: directories to check in place of the configured ones; where no source gives a capacity, an
            example stands in.
        with_round: also write, evict, kill, restart and read through each tier, in directories of its own beside the
            configured ones, which are removed again, also where the caller closes this iterator early.
        root: where /proc, /sys, /etc and /run are found.

    Returns:
        The findings, each as soon as it is known. A configuration that is refused is a finding too; the machine is
        checked all the same.
    """
    settings: Settings | None = None
    try:
        sources = gather(path, environ=environ, arguments=arguments)
        for tier, directory in (("shared", shared), ("disk", disk)):
            if directory is not None:
                sources.add_value((tier, "path"), directory, Origin("argument", f"--{tier} {directory}"))
                if not sources.has(tier, "capacity"):
                    sources.add_value((tier, "capacity"), EXAMPLE_CAPACITY[tier], EXAMPLE)
        is_example = not any(sources.has(tier) for tier in _TIERS)
        settings = _settle(sources, is_example=is_example)
        yield _say_configuration(settings, is_example=is_example)
    except (StepwellUsageError, StepwellError) as error:
        yield fail(
            "configuration",
            str(error),
            why="a store refuses to open with it; the tiers are not checked",
            remedy="stepwell config show  # until it prints every value; docs/configuration.md has them all",
        )
    yield from _guarded("machine", check_machine(settings, Path(root)))
    if settings is None:
        return
    unfit: dict[str, str] = {}
    for tier in ("shared", "disk"):
        if getattr(settings.config, tier) is None:
            continue
        for finding in check_directory(settings, tier, Path(root)):
            if finding.verdict == "fail" and finding.subject in (f"{tier} directory", f"{tier} file system"):
                unfit[tier] = finding.remedy
            yield finding
    if with_round:
        yield from _guarded("round", check_round(settings, unfit=unfit))


def _guarded(subject: str, checks: Iterator[Finding]) -> Iterator[Finding]:
    """Turn what the checks themselves run into, on a machine unlike all others, into a finding."""
    try:
        yield from checks
    except (OSError, StepwellError) as error:
        yield fail(
            subject,
            f"cannot be checked: {error}",
            why="what the doctor cannot look at, a store cannot either",
            remedy="ls -l /proc/meminfo /proc/self/mountinfo /proc/self/cgroup  # all three must be readable",
        )


def _settle(sources: Sources, *, is_example: bool) -> Settings:
    if is_example:
        sources.add_value(("shared", "capacity"), EXAMPLE_CAPACITY["shared"], EXAMPLE)
    return settle_with_example(sources)


def _say_configuration(settings: Settings, *, is_example: bool) -> Finding:
    config = settings.config
    tiers = [tier for tier in _TIERS if getattr(config, tier) is not None]
    geometry = (
        f"pages of {show_size(config.geometry.page_bytes)}"
        if has_geometry(settings)
        else f"no geometry (the engine gives it; pages of {show_size(config.geometry.page_bytes)} stand in)"
    )
    if is_example:
        return warn(
            "configuration",
            f"{settings.looked_for}; no tier is named, checking {EXAMPLE_CAPACITY['shared']} in {config.shared.path}"
            if config.shared
            else settings.looked_for,
            why="what is checked is an example, not what an engine will use",
            remedy="--config FILE  # see docs/configuration.md; or --set shared.capacity=8GiB and the like",
        )
    return ok("configuration", f"{settings.looked_for}; tiers {', '.join(tiers)}; {geometry}")
