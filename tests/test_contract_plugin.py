"""pytest --stepwell-tier: what it runs and what not, what it says of a spec that is none, and what it costs others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test_house import HEAVY
from tier_kit import changed, readme_tier, run_pytest

TIER = "--stepwell-tier"
ONE = "test_what_was_committed_is_read_back"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mytier.py").write_text(readme_tier())
    return tmp_path


def test_a_test_of_the_suite_is_chosen_by_what_it_is_called(place: Path) -> None:
    assert run_pytest(place, TIER, "mytier:DirectoryTier", "-k", "read_back").outcomes == {ONE: "passed"}


def test_a_test_of_the_suite_is_chosen_as_the_summary_names_it(place: Path) -> None:
    run = run_pytest(place, TIER, "mytier:DirectoryTier", f"stepwell.testing.contract::TierContract::{ONE}")
    assert run.outcomes == {ONE: "passed"}, run.output
    name = "stepwell.testing.contract::TierContract::test_a_write_that_fails_publishes_nothing"
    run = run_pytest(place, TIER, "mytier:DirectoryTier", name)
    assert run.outcomes == {
        f"test_a_write_that_fails_publishes_nothing[{then}]": "passed" for then in ("again", "abort")
    }


def test_other_tests_run_only_if_they_are_named(place: Path) -> None:
    (place / "test_mine.py").write_text("def test_mine(): pass\n")
    (place / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    alone = run_pytest(place, TIER, "mytier:DirectoryTier", "-k", "read_back or mine")
    assert alone.outcomes == {ONE: "passed"}
    both = run_pytest(place, "test_mine.py", TIER, "mytier:DirectoryTier", "-k", "read_back or mine")
    assert both.outcomes == {"test_mine": "passed", ONE: "passed"}
    without = run_pytest(place)
    assert without.outcomes == {"test_mine": "passed"}


def test_how_a_project_calls_its_tests_does_not_hide_the_suite(place: Path) -> None:
    (place / "pytest.ini").write_text(
        "[pytest]\npython_files = check_*\npython_classes = Check*\npython_functions = check_*\n"
    )
    assert run_pytest(place, TIER, "mytier:DirectoryTier", "-k", "read_back").outcomes == {ONE: "passed"}


def test_a_tier_in_a_package_is_found_and_a_maker_may_be_any_callable(place: Path) -> None:
    (place / "mypkg").mkdir()
    (place / "mytier.py").rename(place / "mypkg" / "tier.py")
    (place / "mypkg" / "made.py").write_text(
        "from mypkg.tier import DirectoryTier\n"
        "class Makers:\n    @staticmethod\n    def small(directory): return DirectoryTier(directory, 8, 64)\n"
    )
    run = run_pytest(place, TIER, "mypkg.made:Makers.small", "--stepwell-examples", "10")
    assert run.code == 0, run.output


def test_a_tier_that_does_not_last_is_not_asked_for_what_lasts(place: Path) -> None:
    forgetful = changed(
        readme_tier(),
        ("lasts = True", "lasts = False"),
        ("            data = path.read_bytes()\n", "            path.unlink()\n            continue\n"),
    )
    (place / "mytier.py").write_text(forgetful)
    run = run_pytest(place, TIER, "mytier:DirectoryTier", "--stepwell-examples", "10", "-rs")
    assert run.code == 0, run.output
    assert {"test_what_was_committed_is_recovered_after_a_crash", "test_what_was_freed_is_not_recovered"} <= run.named(
        "skipped"
    )
    assert "test_nothing_is_found_of_a_tier_that_does_not_last" in run.named("passed")
    assert "nothing of this tier outlives it (lasts is False)" in run.output


def test_directories_are_made_where_they_were_asked_for_and_removed(place: Path) -> None:
    asked = place / "asked"
    asked.mkdir()
    (place / "noting.py").write_text(
        "from mytier import DirectoryTier\n"
        "def make(directory):\n"
        "    open('seen', 'a').write(f'{directory}\\n')\n"
        "    return DirectoryTier(directory)\n"
    )
    run = run_pytest(place, TIER, "noting:make", "--stepwell-directory", str(asked), "-k", "read_back or recovered")
    assert run.code == 0, run.output
    seen = (place / "seen").read_text().splitlines()
    assert all(Path(each).is_relative_to(asked) for each in seen)
    assert len(set(seen)) < len(seen), "none was made again"
    assert list(asked.iterdir()) == []


SPECS = {
    "mytier": "give MODULE:MAKE, as in mypkg.mytier:make",
    ":make": "give MODULE:MAKE, as in mypkg.mytier:make",
    "nowhere:make": "there is no module nowhere",
    "mytier.inner:make": "there is no module mytier.inner",
    "needs:make": "needs imports not_installed, and there is no such module",
    "broken:make": "broken cannot be imported: ZeroDivisionError: division by zero",
    "mytier:nothing": "mytier has no nothing",
    "mytier:README": "README is 'text'; give a function of a directory (Path)",
    "half:make": "it returned Half, which is not a Tier: it has no capacity_pages, free, lasts, recover; see help(",
    "raises:make": "in an empty directory it raised RuntimeError: no disk",
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_that_is_none_is_one_line_that_says_why(spec: str, place: Path) -> None:
    (place / "needs.py").write_text("import not_installed\n")
    (place / "broken.py").write_text("1 / 0\n")
    (place / "raises.py").write_text("def make(directory):\n    raise RuntimeError('no disk')\n")
    (place / "half.py").write_text(
        "class Half:\n    page_bytes = 64\n    def claim(self, keys): ...\n"
        "    write = commit = abort = read = close = claim\n"
        "def make(directory): return Half()\n"
    )
    with (place / "mytier.py").open("a") as file:
        file.write("README = 'text'\n")
    run = run_pytest(place, TIER, spec)
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.output
    [line] = [line for line in run.output.splitlines() if line.strip()]
    assert line.startswith(f"ERROR: --stepwell-tier {spec}: {SPECS[spec]}"), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stepwell-examples", "0"), "ERROR: --stepwell-examples 0: give at least 1"),
        (("--stepwell-directory", "nowhere"), "ERROR: --stepwell-directory nowhere: no such directory"),
    ],
)
def test_an_option_that_cannot_be_is_refused(arguments: tuple[str, str], message: str, place: Path) -> None:
    run = run_pytest(place, TIER, "mytier:DirectoryTier", *arguments)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert message in run.output


def test_without_hypothesis_the_plugin_says_what_to_install_and_breaks_no_other_run(place: Path) -> None:
    (place / "test_mine.py").write_text("def test_mine(): pass\n")
    (place / "without.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'hypothesis':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'hypothesis' else real(name, package)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-p', 'no:hypothesispytest', '-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "without.py"]
    plain = subprocess.run([*command, "-q"], cwd=place, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    asked = subprocess.run([*command, TIER, "mytier:DirectoryTier"], cwd=place, capture_output=True, text=True)
    assert asked.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs hypothesis: pip install 'stepwell[test]', or hypothesis alone" in asked.stderr


def test_without_the_option_the_plugin_loads_nothing_heavy() -> None:
    program = (
        "import pytest, sys\nbefore = set(sys.modules)\nimport stepwell.testing.plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert not {"hypothesis", *HEAVY} & set(loaded)
    assert [name for name in loaded if name.startswith("stepwell")] == [
        "stepwell",
        "stepwell.testing",
        "stepwell.testing.plugin",
    ]
