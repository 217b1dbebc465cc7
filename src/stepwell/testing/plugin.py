"""Run the contract of a tier, or of a mover, from pytest's command line, without a file of tests:
`pytest --stepwell-tier module:make`, `pytest --stepwell-mover module:make`.

pytest loads this file in every run where stepwell is installed (entry point pytest11), so it imports nothing but pytest
until an option is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stepwell.testing.mover import MakeMover
    from stepwell.testing.tier import MakeTier

_LEAST_PAGES = 8
_LEAST_BYTES = 16  # in fewer, two pages of random bytes may be the same

@dataclass(frozen=True)
class _Kind:
    """What can be put to a suite. module, name: of the suite; its tests are named as if they were in that module."""

    option: str
    what: str
    module: str
    name: str
    maker: str


_TIER = _Kind("--stepwell-tier", "a tier", "stepwell.testing.contract", "TierContract", "a directory (Path)")
_MOVER = _Kind(
    "--stepwell-mover", "a mover", "stepwell.testing.mover_contract", "MoverContract", "the bytes of each layer (ints)"
)
_KINDS = (_TIER, _MOVER)
_CHOSEN = pytest.StashKey[list[str]]()
_SUITES = pytest.StashKey[dict[_Kind, type]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("stepwell", "the contract of a tier or a mover of your own (stepwell)")
    group.addoption(
        _TIER.option,
        metavar="MODULE:MAKE",
        help="hold the tiers that MAKE(directory: Path) returns to stepwell.testing.tier.Tier; other tests run only "
        "if they are named",
    )
    group.addoption(
        _MOVER.option,
        metavar="MODULE:MAKE",
        help="hold the movers that MAKE(layer_bytes: Sequence[int]) returns to stepwell.testing.mover.Mover; other "
        "tests run only if they are named",
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
    specs = _specs(config)
    if not specs:
        return
    for kind in specs:
        if kind is _TIER and find_spec("hypothesis") is None:
            raise pytest.UsageError(
                f"{kind.option} needs hypothesis: pip install 'stepwell[test]', or hypothesis alone"
            )
    sys.path.insert(0, str(config.invocation_params.dir))
    makers = {kind: _find(kind, spec) for kind, spec in specs.items()}
    parent: Path | None = config.getoption("--stepwell-directory")
    examples: int = config.getoption("--stepwell-examples")
    if parent is not None and not parent.is_dir():
        raise pytest.UsageError(f"--stepwell-directory {parent}: no such directory")
    if examples < 1:
        raise pytest.UsageError(f"--stepwell-examples {examples}: give at least 1")
    suites = config.stash[_SUITES] = {}
    for kind, make in makers.items():
        if kind is _TIER:
            _try_tier(specs[kind], make, parent)
            suites[kind] = _tier_suite(make, parent, examples)
        else:
            _try_mover(specs[kind], make)
            suites[kind] = _mover_suite(make, examples)
    # A line of the summary names a test of a suite as pytest names any; there is no file of that name.
    nodes = {kind.module for kind in specs}
    chosen = [each for each in config.args if each.split("::")[0] in nodes]
    others = [each for each in config.args if each not in chosen]
    config.stash[_CHOSEN] = chosen
    config.args[:] = others if config.args_source is pytest.Config.ArgsSource.ARGS else []


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested."""
    return [f"stepwell: the contract of {kind.what}, over {spec}" for kind, spec in _specs(config).items()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the suites behind what was collected; before -k and -m choose."""
    if _SUITES not in config.stash:
        return
    chosen = config.stash[_CHOSEN]
    for kind, suite in config.stash[_SUITES].items():
        path = Path(__file__).with_name(f"{kind.module.rpartition('.')[2]}.py")
        node = _SuiteModule.from_parent(session, path=path, name=kind.module, nodeid=kind.module)
        node.kind, node.suite = kind, suite
        for item in session.genitems(node):
            if not chosen or any(_is_within(item.nodeid, each) for each in chosen):
                items.append(item)


def _specs(config: pytest.Config) -> dict[_Kind, str]:
    found = {kind: config.getoption(kind.option) for kind in _KINDS}
    return {kind: spec for kind, spec in found.items() if spec is not None}


def _is_within(nodeid: str, chosen: str) -> bool:
    return nodeid == chosen or nodeid.startswith((f"{chosen}::", f"{chosen}["))


class _SuiteModule(pytest.Module):
    """A module that has the suite and nothing else, whatever the project calls its tests."""

    kind: _Kind
    suite: type

    def _getobj(self) -> ModuleType:
        module = ModuleType(self.kind.module)
        setattr(module, self.kind.name, self.suite)
        return module

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        yield _SuiteClass.from_parent(self, name=self.kind.name)


class _SuiteClass(pytest.Class):
    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")


def _find(kind: _Kind, spec: str) -> Callable[..., Any]:
    """Import what MODULE:MAKE names."""
    name, colon, attribute = spec.partition(":")
    if not (name and colon and attribute):
        raise pytest.UsageError(f"{kind.option} {spec}: give MODULE:MAKE, as in mypkg.my{kind.what[2:]}:make")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise pytest.UsageError(f"{kind.option} {spec}: there is no module {missing}") from error
        raise pytest.UsageError(
            f"{kind.option} {spec}: {name} imports {missing}, and there is no such module"
        ) from error
    except Exception as error:
        raise pytest.UsageError(f"{kind.option} {spec}: {name} cannot be imported: {_told(error)}") from error
    found: object = module
    for part in attribute.split("."):
        if part not in dir(found):
            raise pytest.UsageError(f"{kind.option} {spec}: {name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise pytest.UsageError(f"{kind.option} {spec}: {attribute} is {found!r}; give a function of {kind.maker}")
    return found


def _try_tier(spec: str, make: MakeTier, parent: Path | None) -> None:
    """Make a tier once, and look whether it is one."""
    from stepwell.testing.place import Place
    from stepwell.testing.tier import missing_parts

    with Place(parent) as place:
        try:
            tier = make(place.directory)
        except Exception as error:
            raise pytest.UsageError(f"{_TIER.option} {spec}: in an empty directory it raised {_told(error)}") from error
        missing = missing_parts(tier)
        if missing:
            raise pytest.UsageError(
                f"{_TIER.option} {spec}: it returned {type(tier).__name__}, which is not a Tier: it has no "
                f"{', '.join(missing)}; see help(stepwell.testing.tier.Tier)"
            )
        try:
            slots, page_bytes = tier.capacity_pages, tier.page_bytes
            tier.close()
        except Exception as error:
            raise pytest.UsageError(f"{_TIER.option} {spec}: its tier raised {_told(error)}") from error
        for name, value, least in (("capacity_pages", slots, _LEAST_PAGES), ("page_bytes", page_bytes, _LEAST_BYTES)):
            if not isinstance(value, int) or value < least:
                raise pytest.UsageError(f"{_TIER.option} {spec}: {name} is {value!r}; the suite needs at least {least}")


def _try_mover(spec: str, make: MakeMover) -> None:
    """Make a mover once, and look whether it is one."""
    from stepwell.testing.mover import missing_parts

    try:
        mover = make([64, 64])
    except Exception as error:
        raise pytest.UsageError(f"{_MOVER.option} {spec}: for layers of [64, 64] it raised {_told(error)}") from error
    missing = missing_parts(mover)
    if missing:
        raise pytest.UsageError(
            f"{_MOVER.option} {spec}: it returned {type(mover).__name__}, which is not a Mover: it has no "
            f"{', '.join(missing)}; see help(stepwell.testing.mover.Mover)"
        )
    mover.close(0.0)


def _tier_suite(make: MakeTier, parent: Path | None, examples: int) -> type:
    from stepwell.testing.contract import TierContract
    from stepwell.testing.tier import Tier

    class Suite(TierContract):
        def make(self, directory: Path) -> Tier:
            return make(directory)

    Suite.parent, Suite.examples = parent, examples
    Suite.__name__ = "TierContract"
    return Suite


def _mover_suite(make: MakeMover, examples: int) -> type:
    from stepwell.testing.mover import Mover
    from stepwell.testing.mover_contract import MoverContract

    class Suite(MoverContract):
        def make(self, layer_bytes: Sequence[int]) -> Mover:
            return make(layer_bytes)

    Suite.examples = examples
    Suite.__name__ = "MoverContract"
    return Suite


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
