"""The list of deliberate faults, and the table of what caught them, are of the sources as they are.

The faults themselves are tried by `tests/mutants/run.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.mutant_list import ROOT, TABLE, Mutant, Row, offences, read_list, read_table, render

MUTANTS = read_list()


def test_each_fault_can_be_put_in() -> None:
    """The old text of each stands once in its file, and the new one differs."""
    texts = {name: (ROOT / name).read_text() for name in {mutant.file for mutant in MUTANTS}}
    assert not [text for mutant in MUTANTS for text in offences(mutant, texts[mutant.file])]


def test_an_entry_that_cannot_be_put_in_is_found() -> None:
    right = Mutant("a", "b", "c.py", "old", "new", ("tests/test_x.py",))
    assert not offences(right, "an old text")
    assert offences(right, "an old text, as old as it gets")
    assert offences(right, "a text")
    assert offences(Mutant("a", "b", "c.py", "old", "old", right.catch), "an old text")
    assert offences(Mutant("a", "b", "c.py", "old", "new", ()), "an old text")
    assert offences(Mutant("a", "b", "c.py", "old", "new", ("make test",)), "an old text")


def test_what_is_to_catch_a_fault_exists() -> None:
    files = {
        line.split()[0].partition("::")[0] for mutant in MUTANTS for line in mutant.catch if line.startswith("tests/")
    }
    assert not [name for name in sorted(files) if not (ROOT / name).is_file()]


def test_the_table_says_of_each_fault_that_it_was_caught() -> None:
    """Run `python tests/mutants/run.py` where it does not: it tries what has no row, or has changed since."""
    rows = read_table(TABLE.read_text())
    stale = [mutant.name for mutant in MUTANTS if (row := rows.get(mutant.name)) is None or row.digest != mutant.digest]
    assert not stale, "not tried as they are now"
    assert not [mutant.name for mutant in MUTANTS if not rows[mutant.name].is_caught]
    assert render(MUTANTS, rows) == TABLE.read_text()
    assert len(MUTANTS) >= 40


def test_a_table_reads_as_it_was_written() -> None:
    mutant = Mutant("a", "breaks a | b", "c.py", "old", "new", ("tests/test_x.py",))
    other = Mutant("b", "breaks c", "c.py", "old", "newer", ("tests/test_x.py",))
    rows = {
        "a": Row("a", mutant.digest, "tests/test_x.py::test_y[a|b]", "crash SIGSEGV", "2 tests, 1 example", 1.5),
        "b": Row("b", other.digest, "", "", "", 20.0),
    }
    assert read_table(render([mutant, other], rows)) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[mutant]]\nname = "a"\ncatch = []\n', "missing"),
        ('[[mutant]]\nname = "a"\ncatch = []\nkind = "x"\n', "unexpected"),
        (2 * '[[mutant]]\nname="a"\nbreaks="b"\nfile="c"\nold="d"\nnew="e"\ncatch=["tests/f"]\n', "twice"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_list(tmp_path)
