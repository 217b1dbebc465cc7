"""What must hold for every file: layers, one reader of the environment, a complete public face, no sleeping in tests.

A rule is a function from the files to a list of offences, each "file:line: what is wrong"; each rule is also tried on a
file that breaks it, so that a rule which finds nothing because it looks at nothing is seen.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import stepwell

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stepwell"

# design: a file imports only lower layers, or what stands further left in its own. The core (_core) is below them all.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "clock"),
    ("geometry", "arrangement"),
    ("hashing", "config", "settings", "pool"),
    (
        "index",
        "tiers",
        "tiers.base",
        "tiers.limits",
        "tiers.host",
        # the directory of a volume tier, from a lock to a tier
        "tiers.locks",
        "tiers.volume_files",
        "tiers.entry",
        "tiers.process_file",
        "tiers.touches",
        "tiers.directory",
        "tiers.cold",
        "tiers.birth",
        "tiers.scan",
        "tiers.reader",
        "tiers.volumes",
        "tiers.neighbours",
        "tiers.lmdb_index",
        "tiers.lmdb_reader",
        "tiers.debts",
        "tiers.volume_tier",
        "tiers.shared",
        "tiers.disk",
        "tiers.device_queue",
        "tiers.device_pool",
        "tiers.device",
    ),
    ("waker", "mover", "keeper", "stats", "events"),
    ("lease", "pins", "seen", "health", "rates", "owed", "room", "rounds", "copies", "staging", "probes"),
    ("sequence", "store"),
    ("inspection", "verification", "removal"),  # tier directories without a store
    # what the command line shows of a configuration and of a machine
    (
        "effective",
        "doctor",
        "doctor.findings",
        "doctor.scratch",
        "doctor.machine",
        "doctor.directories",
        "doctor.worker",
        "doctor.round",
        "doctor.diagnose",
    ),
    ("",),  # stepwell itself, the public face
)
POSITION = {module: (layer, place) for layer, row in enumerate(LAYERS) for place, module in enumerate(row)}
PUBLIC_MODULES = ("errors", "inspection", "removal", "verification")  # part of the public face as wholes
APPLICATIONS = ("endings", "cli", "demo", "torture", "adapters")  # the top layer: they use the public face
JAX_MODULE = "tiers.device"
LMDB_MODULE = "tiers.lmdb_index"
ENVIRONMENT_MODULE = "settings"
# The imports of testing: the demo and the torture break themselves on purpose, and its children die at fault points.
NEGATIVE_CONTROLS = (("demo.serve", "testing.hooks"), ("torture.child", "testing.hooks"))
FAULT_INJECTION = (("torture.child", "testing.faults"),)
HEAVY = ("cachetools", "jax", "lmdb", "msgspec", "numpy", "rich", "sglang", "stepwell._core", "torch", "vllm")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file: its module's name without "stepwell." ("" is the package), its path to show, its tree."""

    module: str
    path: str
    tree: ast.Module

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"

    @classmethod
    def of(cls, module: str, text: str) -> Source:
        return cls(module, f"<{module}>", ast.parse(text))


def read_sources() -> list[Source]:
    sources = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(module, str(path.relative_to(ROOT)), ast.parse(path.read_text())))
    return sources


SOURCES = read_sources()
MODULES = {source.module for source in SOURCES}
TESTS = [
    Source(path.stem, str(path.relative_to(ROOT)), ast.parse(path.read_text()))
    for path in sorted((ROOT / "tests").rglob("*.py"))
]


def imports(source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (node, module, name or "") of each import anywhere in a file: TYPE_CHECKING and functions count too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, node.module or "", alias.name


def own_imports(source: Source, modules: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, module without "stepwell.") of each import from the package; a name of the public face is of ""."""
    for node, module, name in imports(source):
        if module == "stepwell" or module.startswith("stepwell."):
            inner = module.removeprefix("stepwell").removeprefix(".")
            submodule = f"{inner}.{name}".removeprefix(".")
            yield node, submodule if name and (submodule in modules or name == "_core") else inner


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def layer_offences(sources: list[Source]) -> list[str]:
    modules = {source.module for source in sources} | MODULES
    found = []
    for source in sources:
        if is_within(source.module, ("testing",)):
            continue
        is_application = is_within(source.module, APPLICATIONS)
        if not is_application and source.module not in POSITION:
            found.append(f"{source.path}:1: {source.module} has no layer; give it one in LAYERS")
            continue
        for node, target in own_imports(source, modules):
            if is_within(target, ("testing",)):
                if (source.module, target) not in (*NEGATIVE_CONTROLS, *FAULT_INJECTION):
                    found.append(source.at(node, "nothing outside tests imports stepwell.testing"))
            elif is_application:
                if target not in ("", *PUBLIC_MODULES) and not is_within(target, APPLICATIONS):
                    found.append(source.at(node, f"uses only the public face, not stepwell.{target}"))
            elif target == "_core":
                continue
            elif target not in POSITION:
                found.append(source.at(node, f"{source.module} may not import {target or 'stepwell'}"))
            elif POSITION[target] >= POSITION[source.module]:
                found.append(source.at(node, f"{source.module} is not above {target or 'stepwell'}"))
    return found


def importers(sources: list[Source], library: str) -> set[str]:
    return {
        source.module
        for source in sources
        for _, module, _ in imports(source)
        if module == library or module.startswith(library + ".")
    }


def environment_offences(sources: list[Source]) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        source.at(node, "only settings.load_settings reads the environment")
        for source in sources
        if source.module != ENVIRONMENT_MODULE
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {alias.name for alias in node.names} & names)
    ]


def sleep_offences(sources: list[Source]) -> list[str]:
    return [
        source.at(node, "tests do not sleep: use sequence points, a stepped mover, a manual clock")
        for source in sources
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr == "sleep")
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "sleep" for alias in node.names))
    ]


def version_offences(sources: list[Source]) -> list[str]:
    """Find names with a version; an adapter answers to those of its engine."""
    suffixed = re.compile(r"_v\d+$|V\d+$")
    sources = [source for source in sources if not source.module.startswith("adapters.")]
    found = [f"{s.path}:1: a version suffix" for s in sources if suffixed.search(s.module)]
    return found + [
        source.at(node, f"{node.name} has a version suffix: replace what it replaces")
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and suffixed.search(node.name)
    ]


def handler_offences(sources: list[Source]) -> list[str]:
    return [
        source.at(node, "a handler that only passes hides what it caught; contextlib.suppress names it")
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body)
    ]


def all_offences(sources: list[Source]) -> list[str]:
    """Find an `__all__` that is not sorted, or names something twice."""
    found = []
    for source in sources:
        for node in source.tree.body:
            if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "__all__":
                continue
            names = ast.literal_eval(node.value)
            if list(names) != sorted(names):
                found.append(source.at(node, "__all__ is not sorted"))
            if len(set(names)) != len(names):
                found.append(source.at(node, "__all__ names something twice"))
    return found


def todo_offences(paths: list[tuple[str, str]]) -> list[str]:
    # The words are put together here so that this file does not offend.
    mark = re.compile(r"\b(" + "|".join(("TO" "DO", "FIX" "ME", "X" "XX", "HA" "CK")) + r")\b(?!\(#\d+\))")
    return [
        f"{path}:{number}: {found[0]} without an issue number"
        for path, text in paths
        for number, line in enumerate(text.splitlines(), 1)
        if (found := mark.search(line)) is not None
    ]


# ---- Python ---------------------------------------------------------------------------------------------------------


def test_a_file_imports_only_lower_layers() -> None:
    assert not layer_offences(SOURCES)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("index", "from stepwell.store import PageStore"),
        ("index", "import stepwell.mover"),
        ("tiers.base", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stepwell.mover import Plan"),
        ("geometry", "def f():\n    from stepwell import hashing"),
        ("tiers.locks", "from stepwell.tiers import volumes"),
        ("store", "from stepwell import PageGeometry"),
        ("store", "from stepwell.testing.faults import inject"),
        ("demo.engine", "from stepwell.store import PageStore"),
        ("demo.engine", "from stepwell import _core"),
        ("demo.run", "from stepwell.testing.hooks import swap_staged_pages"),
        ("torture.run", "from stepwell.testing.faults import inject"),
        ("torture.child", "from stepwell.testing.index_model import Page"),
        ("stranger", "import os"),
    ],
)
def test_an_import_of_a_higher_layer_is_found(module: str, text: str) -> None:
    assert layer_offences([Source.of(module, text)])


def test_every_layer_names_modules_that_exist() -> None:
    not_yet = {"events"}  # its place is fixed, its file comes with the first event
    assert set(POSITION) - MODULES <= not_yet


def test_one_module_outside_the_demo_imports_jax() -> None:
    assert {m for m in importers(SOURCES, "jax") if not is_within(m, ("demo", "testing"))} == {JAX_MODULE}


def test_one_module_imports_lmdb() -> None:
    assert importers(SOURCES, "lmdb") == {LMDB_MODULE}


def test_hypothesis_is_imported_only_by_testing() -> None:
    assert all(is_within(module, ("testing",)) for module in importers(SOURCES, "hypothesis"))


def test_settings_is_the_only_reader_of_the_environment() -> None:
    assert not environment_offences(SOURCES)
    assert environment_offences([Source.of("store", "import os\nos.environ.get('STEPWELL_HOST')")])
    assert environment_offences([Source.of("store", "from os import getenv")])


def test_no_test_sleeps() -> None:
    assert not sleep_offences(TESTS)
    assert sleep_offences([Source.of("test_x", "import time\ntime.sleep(0.1)")])
    assert sleep_offences([Source.of("test_x", "from time import sleep")])


def test_no_name_has_a_version_suffix() -> None:
    assert not version_offences(SOURCES)
    assert version_offences([Source.of("store", "def match_v2(): ...")])
    assert version_offences([Source.of("store_v2", "")])


def test_no_handler_passes_in_silence() -> None:
    assert not handler_offences(SOURCES)
    assert handler_offences([Source.of("store", "try:\n    f()\nexcept OSError:\n    pass")])


def test_every_all_is_sorted() -> None:
    assert not all_offences(SOURCES)
    assert all_offences([Source.of("store", "__all__ = ['b', 'a']")])
    assert all_offences([Source.of("store", "__all__ = ['a', 'a']")])


def test_every_todo_has_an_issue_number() -> None:
    here = Path(__file__).resolve()
    paths = [
        path
        for folder in ("src", "csrc", "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cc", ".cpp", ".md") and path != here
    ]
    assert len(paths) > 50
    assert not todo_offences([(str(path.relative_to(ROOT)), path.read_text()) for path in paths])
    assert todo_offences([("x", "# TO" "DO later")])
    assert not todo_offences([("x", "# TO" "DO(#12) later")])


# ---- the public face -------------------------------------------------------------------------------------------------


def face_imports() -> dict[str, str]:
    """Return name -> module of what mypy sees: the imports under TYPE_CHECKING in __init__."""
    source = next(source for source in SOURCES if source.module == "")
    block = next(
        node
        for node in source.tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    inner = Source("", source.path, ast.Module(block.body, []))
    return {name: module for _, module, name in imports(inner)}


def test_the_public_face_is_complete() -> None:
    seen_by_mypy = face_imports()
    assert set(stepwell.__all__) == set(seen_by_mypy)
    assert set(stepwell.__all__) <= set(dir(stepwell))
    for name, module in seen_by_mypy.items():
        home = importlib.import_module(module)
        assert getattr(stepwell, name) is getattr(home, name), name


def test_a_name_outside_the_public_face_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PageStor'"):
        stepwell.PageStor  # noqa: B018


def test_the_readme_names_only_what_is_public() -> None:
    named = set(re.findall(r"\bsw\.(\w+)", (ROOT / "README.md").read_text()))
    assert "PageStore" in named
    assert named <= set(stepwell.__all__)


def test_star_import_gives_the_public_face() -> None:
    names: dict[str, object] = {}
    exec("from stepwell import *", names)
    assert set(stepwell.__all__) <= set(names)


def test_every_public_name_has_a_docstring() -> None:
    bare = []
    for name in stepwell.__all__:
        value = getattr(stepwell, name)
        # A dataclass without a docstring is given its signature; a Struct inherits none.
        text = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
        if not text or text.startswith(f"{name}("):
            bare.append(name)
        if inspect.isclass(value):
            bare += [
                f"{name}.{method}"
                for method, member in vars(value).items()
                if not method.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
                if not inspect.getdoc(member)
            ]
    assert not bare


def loaded_after(statements: str) -> list[str]:
    """Return which heavy modules a fresh interpreter holds after some statements."""
    program = f"import sys\n{statements}\nprint('loaded:', *(m for m in {HEAVY!r} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1].removeprefix("loaded:").split()


def test_importing_stepwell_loads_nothing_heavy() -> None:
    assert loaded_after("import stepwell") == []


def test_help_loads_nothing_heavy() -> None:
    asked = "import contextlib, stepwell.cli\nwith contextlib.suppress(SystemExit): stepwell.cli.main(['--help'])"
    assert loaded_after(asked) == []


def test_a_store_without_a_device_tier_loads_no_jax() -> None:
    assert "jax" not in loaded_after("import stepwell\nstepwell.PageStore, stepwell.load_settings")
    assert "jax" in loaded_after("import stepwell.tiers.device")


# ---- C++ -------------------------------------------------------------------------------------------------------------

CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# Sources that are not named for the last header that they see: a class in several files, a private header.
SOURCE_OF = {"volume_format": "volume", "volume_run": "volume", "volume_set": "volume", "transfer": "progress"}


def reading_order(readme: str) -> list[str]:
    """Return the headers in the order that csrc/README.md draws: `a, b <- c <- ...`, over indented lines."""
    drawing = next(block for block in re.findall(r"(?:^ {4}.*\n)+", readme, re.MULTILINE) if "<-" in block)
    return [name for name in re.split(r"[\s,]+|<-", drawing) if name and not name.startswith("bind/")]


def include_offences(name: str, text: str, order: list[str]) -> list[str]:
    """Find what a file of the core includes that is not to its left, or is not its to include."""
    path = Path(name)
    found = [
        f"csrc/{name}: includes {header}; only csrc/bind may"
        for _, header in INCLUDE.findall(text)
        if header == "Python.h" or header.startswith("nanobind/")
    ]
    own = SOURCE_OF.get(path.stem, path.stem) if path.suffix == ".cc" else path.stem
    if own not in order:
        return [*found, f"csrc/{name}: has no place in csrc/README.md's order"]
    limit = order.index(own) + (1 if path.suffix == ".cc" else 0)
    for mark, header in INCLUDE.findall(text):
        if mark == '"' and Path(header).stem not in order[:limit]:
            found.append(f"csrc/{name}: includes {header}, which is not to its left")
    return found


def test_a_core_file_includes_only_what_stands_to_its_left() -> None:
    order = reading_order((CSRC / "README.md").read_text())
    files = [path for path in sorted(CSRC.iterdir()) if path.suffix in (".h", ".cc")]
    assert {path.stem for path in files if path.suffix == ".h"} == set(order)
    assert not [text for path in files for text in include_offences(path.name, path.read_text(), order)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("queue.h", '#include "mover.h"\n'),
        ("status.cc", '#include "index.h"\n'),
        ("status.h", '#include "status.h"\n'),
        ("index.cc", "#include <Python.h>\n"),
        ("index.h", "  #  include <nanobind/nanobind.h>\n"),
        ("stranger.cc", '#include "status.h"\n'),
    ],
)
def test_an_include_from_the_right_is_found(name: str, text: str) -> None:
    assert include_offences(name, text, reading_order((CSRC / "README.md").read_text()))


def test_the_core_is_built_without_a_python_include_path() -> None:
    # find_package(Python) and nanobind stand inside if(SKBUILD), after the core; the C++ tests build without them.
    text = (ROOT / "CMakeLists.txt").read_text()
    core, _, rest = text.partition("if(SKBUILD)")
    assert rest
    assert not re.search(r"find_package\(\s*(Python|nanobind)", core)
    includes = re.findall(r"target_include_directories\(\s*stepwell_core\s+([^)]*)\)", text)
    links = re.findall(r"target_link_libraries\(\s*stepwell_core\s+([^)]*)\)", text)
    assert includes == ["PUBLIC csrc"]
    assert links == ["PUBLIC Threads::Threads"]


def test_every_core_file_is_in_the_table_of_the_readme() -> None:
    table = set(re.findall(r"^\| (\w+\.h) \|", (CSRC / "README.md").read_text(), re.MULTILINE))
    assert table == {path.name for path in CSRC.glob("*.h")}
