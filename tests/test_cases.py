"""docs/cases.md and the tests that it names, held together: each case once, each test there, each test of a case named.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()
ROW = re.compile(r"^\| (C\d{3}) \| \[([^]]+)\]\((\S+)\) \| (.+) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def named_tests(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the tests of a file by name."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in found if node.name.startswith("test_")}


def test_the_table_has_80_cases_each_of_them_once() -> None:
    cases = [row[0] for row in ROW.findall(PAGE)]
    assert len(cases) == PAGE.count("\n| C") == 80
    assert cases == sorted(set(cases))


def test_every_row_names_its_report_and_where_it_stands_here() -> None:
    for case, report, address, wrong, here in ROW.findall(PAGE):
        assert address.startswith("https://"), case
        owner, _, number = report.partition("#")
        assert not number or address.endswith(f"/{owner}/issues/{number}"), case
        assert wrong.endswith("."), case
        assert NAME.search(here) or re.match(r"(Cannot arise: |Later, )", here), f"{case}: neither a test nor a reason"


def test_every_test_that_the_table_names_exists() -> None:
    known: dict[str, dict[str, ast.FunctionDef]] = {}
    for case, _, _, _, here in ROW.findall(PAGE):
        for file, name in NAME.findall(here):
            if file not in known:
                known[file] = named_tests(TESTS / file)
            assert name in known[file], f"{case}: there is no {file}::{name}"


def test_every_test_of_a_case_is_in_its_row_and_cites_its_report() -> None:
    rows = {case: set(NAME.findall(here)) for case, _, _, _, here in ROW.findall(PAGE)}
    count = 0
    for path in sorted((TESTS / "regressions").glob("test_cases_*.py")):
        for name, node in named_tests(path).items():
            cited = re.match(r"(C\d{3}), (\S+)", ast.get_docstring(node) or "")
            assert cited, f"{path.name}::{name} does not begin with its case and report"
            case = cited[1]
            assert (f"regressions/{path.name}", name) in rows[case], f"{name} is not in the row of {case}"
            count += 1
    assert count > 80
