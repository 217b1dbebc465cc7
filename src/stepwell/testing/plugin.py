"""Run the contract of a tier from pytest's command line, without a file of tests: `pytest --stepwell-tier module:make`.

pytest loads this file in every run where stepwell is installed (entry point pytest11), so it imports nothing but pytest
until the option is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepwell.testing.tier import MakeTier

_OPTION = "--stepwell-tier"
_NODE = "stepwell.testing.contract"
_LEAST_PAGES = 8
_LEAST_BYTES = 16  # in fewer, two pages of random bytes may be the same
_CHOSEN = pytest.StashKey[list[str]]()
_SUITE = pytest.StashKey[type]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("stepwell", "the contract of a tier of your own (stepwell)")
    group.addoption(
        _OPTION,
        metavar="MODULE:MAKE",
        help="hold the tiers that MAKE(directory: Path) returns to stepwell.testing.tier.Tier; other tests run only "
        "if they are named",
    )
    group.addoption(
        "--stepwell-examples",
        type=int,
        default=100,
        metavar="N",
        help="random orders of calls that are tried (%(default)s)",
    )
    group.addoption(
        "--stepwell-directory",
        type=Path,
        metavar="DIR",
        help="where the directories for MAKE are made, and removed; by default where temporary ones are",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find what is to be tested, and say at once where that cannot be."""
    spec: str | None = config.getoption(_OPTION)
    if spec is None:
        return
    if find_spec("hypothesis") is None:
        raise pytest.UsageError(f"{_OPTION} needs hypothesis: pip install 'stepwell[test]', or hypothesis alone")
    sys.path.insert(0, str(config.invocation_params.dir))
    make = _find(spec)
    parent: Path | None = config.getoption("--stepwell-directory")
    examples: int = config.getoption("--stepwell-examples")
    if parent is not None and not parent.is_dir():
        raise pytest.UsageError(f"--stepwell-directory {parent}: no such directory")
    if examples < 1:
        raise pytest.UsageError(f"--stepwell-examples {examples}: give at least 1")
    _try(spec, make, parent)
    config.stash[_SUITE] = _suite(make, parent, examples)
    # A line of the summary names a test of the suite as pytest names any; there is no file of that name.
    chosen = [each for each in config.args if each.split("::")[0] == _NODE]
    others = [each for each in config.args if each not in chosen]
    config.stash[_CHOSEN] = chosen
    config.args[:] = others if config.args_source is pytest.Config.ArgsSource.ARGS else []


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which tier is tested."""
    spec: str | None = config.getoption(_OPTION)
    return [] if spec is None else [f"stepwell: the contract of a tier, over {spec}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the suite behind what was collected; before -k and -m choose."""
    if _SUITE not in config.stash:
        return
    chosen = config.stash[_CHOSEN]
    node = _SuiteModule.from_parent(session, path=Path(__file__).with_name("contract.py"), name=_NODE, nodeid=_NODE)
    for item in session.genitems(node):
        if not chosen or any(_is_within(item.nodeid, each) for each in chosen):
            items.append(item)


def _is_within(nodeid: str, chosen: str) -> bool:
    return nodeid == chosen or nodeid.startswith((f"{chosen}::", f"{chosen}["))


class _SuiteModule(pytest.Module):
    """A module that has the suite and nothing else, whatever the project calls its tests."""

    def _getobj(self) -> ModuleType:
        module = ModuleType(_NODE)
        module.TierContract = self.config.stash[_SUITE]  # type: ignore[attr-defined]
        return module

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        yield _SuiteClass.from_parent(self, name="TierContract")


class _SuiteClass(pytest.Class):
    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")


def _find(spec: str) -> MakeTier:
    """Import what MODULE:MAKE names."""
    name, colon, attribute = spec.partition(":")
    if not (name and colon and attribute):
        raise pytest.UsageError(f"{_OPTION} {spec}: give MODULE:MAKE, as in mypkg.mytier:make")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise pytest.UsageError(f"{_OPTION} {spec}: there is no module {missing}") from error
        raise pytest.UsageError(f"{_OPTION} {spec}: {name} imports {missing}, and there is no such module") from error
    except Exception as error:
        raise pytest.UsageError(f"{_OPTION} {spec}: {name} cannot be imported: {_told(error)}") from error
    found: object = module
    for part in attribute.split("."):
        if part not in dir(found):
            raise pytest.UsageError(f"{_OPTION} {spec}: {name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise pytest.UsageError(f"{_OPTION} {spec}: {attribute} is {found!r}; give a function of a directory (Path)")
    return found


def _try(spec: str, make: MakeTier, parent: Path | None) -> None:
    """Make a tier once, and look whether it is one."""
    from stepwell.testing.place import Place
    from stepwell.testing.tier import missing_parts

    with Place(parent) as place:
        try:
            tier = make(place.directory)
        except Exception as error:
            raise pytest.UsageError(f"{_OPTION} {spec}: in an empty directory it raised {_told(error)}") from error
        missing = missing_parts(tier)
        if missing:
            raise pytest.UsageError(
                f"{_OPTION} {spec}: it returned {type(tier).__name__}, which is not a Tier: it has no "
                f"{', '.join(missing)}; see help(stepwell.testing.tier.Tier)"
            )
        try:
            slots, page_bytes = tier.capacity_pages, tier.page_bytes
            tier.close()
        except Exception as error:
            raise pytest.UsageError(f"{_OPTION} {spec}: its tier raised {_told(error)}") from error
        for name, value, least in (("capacity_pages", slots, _LEAST_PAGES), ("page_bytes", page_bytes, _LEAST_BYTES)):
            if not isinstance(value, int) or value < least:
                raise pytest.UsageError(f"{_OPTION} {spec}: {name} is {value!r}; the suite needs at least {least}")


def _suite(make: MakeTier, parent: Path | None, examples: int) -> type:
    from stepwell.testing.contract import TierContract
    from stepwell.testing.tier import Tier

    class Suite(TierContract):
        def make(self, directory: Path) -> Tier:
            return make(directory)

    Suite.parent, Suite.examples = parent, examples
    Suite.__name__ = "TierContract"
    return Suite


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
