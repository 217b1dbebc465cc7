"""Read the list of deliberate faults and the table of what became of them; both are data."""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIST = HERE / "list"
TABLE = HERE / "TABLE.md"
KINDS = ("tests/", "driver ", "cpp ", "tsan ", "stress ")
"""What a line of `catch` begins with: see README.md."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `file`, `old` stands once, and `new` in its place breaks a promise.

    catch: commands of the suite that are to fail then, the cheapest first.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    catch: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Name the fault itself, so that a row of the table is seen to be of another one."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:8]

    @property
    def is_python(self) -> bool:
        """Tell whether nothing is to be compiled for it, nor for what is to catch it."""
        return self.file.endswith(".py") and all(line.startswith(("tests/", "driver ")) for line in self.catch)


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a mutant. by: what caught it, "" where nothing did. how: "", or "crash SIGSEGV", "hang", ..."""

    name: str
    digest: str
    by: str
    how: str
    after: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """Whether the suite failed."""
        return self.by != ""


def read_list(folder: Path = LIST) -> list[Mutant]:
    """Read every mutant, in the order of the files' names.

    Raises:
        ValueError: an entry lacks something, has something unknown, or a name is taken twice.
    """
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            catch = tuple(entry.pop("catch"))
            try:
                mutants.append(Mutant(catch=catch, **{name: text.strip("\n") for name, text in entry.items()}))
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('name')}: {error}") from error
    names = [mutant.name for mutant in mutants]
    if len(set(names)) != len(names):
        raise ValueError(f"names taken twice: {sorted({name for name in names if names.count(name) > 1})}")
    return mutants


def offences(mutant: Mutant, text: str) -> list[str]:
    """Say what is wrong with a mutant, given the text of its file."""
    found = []
    if (count := text.count(mutant.old)) != 1:
        found.append(f"{mutant.name}: its old text stands {count} times in {mutant.file}, not once")
    if mutant.old == mutant.new:
        found.append(f"{mutant.name}: its new text is the old one")
    if not mutant.catch:
        found.append(f"{mutant.name}: nothing is to catch it")
    found += [f"{mutant.name}: {line!r} is no command" for line in mutant.catch if not line.startswith(KINDS)]
    return found


def sources(root: Path) -> list[str]:
    """Name the files of a work tree, but for those that git ignores."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-zco", "--exclude-standard"], check=True, capture_output=True
    ).stdout
    return [name for name in listed.decode().split("\0") if name and (root / name).is_file()]


def digest_of(line: str) -> str:
    """Name what a command runs: the sources, and the tests that it is about with what these share."""
    digest = hashlib.sha256(line.encode())
    own = line.split()[0].partition("::")[0]
    for name in sorted(sources(ROOT)):
        path = Path(name)
        is_shared = path.parent == Path("tests") and path.suffix == ".py" and not path.name.startswith("test_")
        is_part = (
            name == own or is_shared if line.startswith("tests/") else name.startswith(("tests/cpp/", "tests/stress/"))
        )
        if is_part or name.startswith(("src/", "csrc/")):
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()


_HEAD = """\
# Deliberate faults, and what caught them

Written by `python tests/mutants/run.py`; README.md says how. A row is of the fault whose digest stands in its last
column: where the list has another one by now, the row is old, and tests/test_mutants.py says so.
"""
_COLUMNS = "| fault | breaks | in | caught by | after | s | digest |\n|---|---|---|---|---|---|---|\n"


def render(mutants: Iterable[Mutant], rows: Mapping[str, Row]) -> str:
    """Write the table, in the order of the list; what was not tried has no row."""
    lines = []
    caught = 0
    for mutant in mutants:
        row = rows.get(mutant.name)
        if row is None:
            continue
        caught += row.is_caught
        by = f"`{row.by}`" if row.by else "nothing"
        how = f" ({row.how})" if row.how else ""
        cells = (mutant.name, mutant.breaks, f"`{mutant.file}`", by + how, row.after, f"{row.seconds:.1f}", row.digest)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return f"{_HEAD}\n{caught} of {len(lines)} are caught.\n\n{_COLUMNS}{''.join(lines)}"


def read_table(text: str) -> dict[str, Row]:
    """Read the rows of a rendered table, by name."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in line.replace("\\|", "\0").strip("|").split("|")]
        cells = [cell.replace("\0", "|") for cell in cells]
        if not line.startswith("| ") or len(cells) != 7 or cells[0] == "fault":
            continue
        name, _, _, caught, after, seconds, digest = cells
        by, _, how = caught.partition("`")[2].partition("`") if caught.startswith("`") else ("", "", "")
        rows[name] = Row(name, digest, by, how.strip(" ()"), after, float(seconds))
    return rows
