"""Read a configuration from where users write it: one schema for arguments, the environment and files.

    load_settings: arguments > environment (STEPWELL_*) > file (TOML) > defaults, and where each value came from

Every value is checked once; unknown names are refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import stat
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from stepwell.config import DeviceTier, DiskTier, HostTier, SharedTier, StoreConfig
from stepwell.errors import BudgetError, StepwellUsageError
from stepwell.geometry import PageGeometry

PREFIX: Final = "STEPWELL_"
FILE_VARIABLE: Final = "STEPWELL_CONFIG"
DEFAULT_FILE: Final = "stepwell.toml"
MAX_FILE_BYTES: Final = 1 << 16
"""A larger file is no configuration: whoever named it meant another."""
_EPOCH_DIGITS: Final = 21  # one more than any epoch has; Python reads no number of thousands
_MAX_PARSED: Final = 1 << 20
"""Characters parsed in search of the lines of keys: a statement of n lines is parsed n times, each time to its end."""

_TABLES: Final[Mapping[str, type]] = {
    "geometry": PageGeometry, "device": DeviceTier, "host": HostTier, "shared": SharedTier, "disk": DiskTier,
}  # fmt: skip
_LISTS: Final = frozenset({"geometry.shard", "geometry.layer_head_dims", "geometry.extra"})

Kind = Literal["argument", "variable", "file", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. place: the argument, the variable's name, or `file:line`."""

    kind: Kind
    place: str

    def __str__(self) -> str:
        return self.place


DEFAULT: Final = Origin("default", "default")


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration, and where each of its values came from.

    origins: by dotted name ("shared.capacity"), every setting of the tables that are there. file: the one that was
    read, None: none. looked_for: what decided that, in words.
    """

    config: StoreConfig
    origins: Mapping[str, Origin]
    file: str | None
    looked_for: str

    def values(self) -> dict[str, Any]:
        """Return every setting's value by dotted name, in the order of the schema."""
        found: dict[str, Any] = {}
        for path in setting_names():
            owner: Any = self.config if len(path) == 1 else getattr(self.config, path[0])
            if owner is None:
                continue
            if path == ("host", "capacity"):
                owner = HostTier(owner) if not isinstance(owner, HostTier) else owner
            found[".".join(path)] = getattr(owner, path[-1])
        return found


@dataclass(frozen=True, slots=True)
class _Given:
    """One setting of one source. The name of a table alone: it is there; with None: it is left out."""

    path: tuple[str, ...]
    value: Any
    origin: Origin


class Sources:
    """What the sources say, merged and not yet checked: `settle` makes Settings of it.

    Invariant: every name in it is one of the schema.
    """

    def __init__(self, *, file: str | None = None, looked_for: str = "") -> None:
        self._given: dict[tuple[str, ...], _Given] = {}
        self._file = file
        self._looked_for = looked_for

    @property
    def file(self) -> str | None:
        """The file that was read."""
        return self._file

    def has(self, *path: str) -> bool:
        """Return whether any source gives this setting, or any of this table."""
        return any(given[: len(path)] == path for given in self._given)

    def add(self, given: Iterable[_Given]) -> None:
        """Lay one source over those before it."""
        for each in given:
            if _is_table(each.path) and each.value is None:
                for path in [path for path in self._given if path[0] == each.path[0]]:
                    del self._given[path]
            else:
                self._given[each.path] = each

    def add_value(self, path: tuple[str, ...], value: Any, origin: Origin) -> None:
        """Give one setting, over all sources before."""
        self.add([_Given(path, value, origin)])

    def add_table(self, table: str, values: Mapping[str, Any] | PageGeometry, origin: Origin) -> None:
        """Give a table that no source names."""
        self.add(_flatten({table: values}, lambda path: origin))

    def settle(self) -> Settings:
        """Check it all.

        Raises:
            StepwellUsageError, BudgetError: a value is missing, of a wrong type, or out of range; the message names
            value, origin and remedy.
        """
        nested: dict[str, Any] = {}
        for path, each in self._given.items():
            if _is_table(path):
                nested.setdefault(path[0], {})
            else:
                (nested if len(path) == 1 else nested.setdefault(path[0], {}))[path[-1]] = each.value
        try:
            config = msgspec.convert(nested, StoreConfig, strict=False)
        except msgspec.ValidationError as error:
            raise StepwellUsageError(self._explain(str(error))) from error
        try:
            config.checked()
        except (StepwellUsageError, BudgetError) as error:
            origins_told = self._origins_in(str(error)) or (f" ({self._looked_for})" if self._looked_for else "")
            raise type(error)(f"{error}{origins_told}") from error
        origins = {}
        for path in setting_names():
            if len(path) == 1 or getattr(config, path[0]) is not None:
                origins[".".join(path)] = self._given[path].origin if path in self._given else DEFAULT
        return Settings(config, origins, self._file, self._looked_for)

    def _explain(self, message: str) -> str:
        """Turn msgspec's message into one that names the setting, its value, its origin and what to give."""
        what, _, at = message.partition(" - at `$")
        dotted = at.strip("`").lstrip(".")
        if missing := re.fullmatch(r"Object missing required field `([^`]+)`", what):
            name = f"{dotted}.{missing[1]}".lstrip(".")
            example = f"{name}=..." if name not in _TABLES else f"{name}.NAME=..."
            looked = f" ({self._looked_for})" if self._looked_for and not dotted else ""
            where = f"in {self._file} or " if self._file else ""
            table = self._given.get((dotted,))
            since = f" (table {dotted}: {table.origin})" if table is not None else ""
            return f"{name}: missing{looked}; give it {where}as {example}{since}"
        # What is inside a list is named by the setting that it is in.
        name = re.sub(r"\[.*", "", dotted)
        given = self._given.get(tuple(name.split(".")))
        if given is None or _is_table(given.path):
            return f"{name}: {what}{self._origins_in(f'{name} {what}')}"
        what = what.replace("`", "").replace("Expected", "expected")
        if what.startswith("Invalid enum value"):
            what = f"give {' or '.join(map(repr, _choices(given.path)))}"
        return f"{name}: {given.value!r} ({given.origin}): {what}"

    def _origins_in(self, message: str) -> str:
        """Name the origins of the settings that a message speaks of: a table and a field, or a field of no table."""
        words = set(re.findall(r"\w+", message))
        spoken = [
            f"{'.'.join(path)}: {each.origin}"
            for path, each in self._given.items()
            if words.issuperset(path) and not _is_table(path)
        ]
        return f" ({', '.join(spoken)})" if spoken else ""


def load_settings(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
) -> Settings:
    """Read the configuration: arguments over the environment over a file over defaults.

    Args:
        path: the file, TOML; None: the one that STEPWELL_CONFIG names, else ./stepwell.toml if it is there. A file that
            nobody named is read only where it belongs to this user or to root and others may not write it.
        environ: None: the process's. STEPWELL_SHARED_CAPACITY=8GiB sets shared.capacity, and so on: names of the schema
            in capitals, joined by one underscore. STEPWELL_DISK=none leaves the disk tier out.
        arguments: nested ({"shared": {"capacity": "8GiB"}}) or dotted ({"shared.capacity": "8GiB"}) names with values
            (None for a tier leaves it out), or texts as a command line has them: ["shared.capacity=8GiB"].

    Returns:
        Settings: the configuration, checked, and the origin of every value.

    Raises:
        StepwellUsageError: a file that cannot be read or is no TOML, an unknown name (the nearest known one is told), a
        wrong type, a value out of range; BudgetError: a capacity that can hold nothing. Names value, origin and remedy.
    """
    return gather(path, environ=environ, arguments=arguments).settle()


def gather(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | Sequence[str] | None = None,
) -> Sources:
    """Read all sources as load_settings does, and merge them without asking whether they make a configuration."""
    source = os.environ if environ is None else environ
    file, looked_for = _find_file(path, source)
    sources = Sources(file=file, looked_for=looked_for)
    if file is not None:
        sources.add(_from_file(file, is_named=path is not None or FILE_VARIABLE in source))
    sources.add(_from_environment(source))
    if isinstance(arguments, Mapping):
        sources.add(_flatten(_undotted(arguments), lambda path: Origin("argument", "argument")))
    elif arguments is not None:
        sources.add(_from_texts(arguments))
    return sources


def from_mapping(values: Mapping[str, Any]) -> StoreConfig:
    """Build a configuration from nested plain values (JSON, TOML, an engine's extra config).

    Raises:
        StepwellUsageError: an unknown name (the nearest known one is named), a wrong type, a value out of range.
        BudgetError: a tier that is smaller than one page or volume of it.
    """
    sources = Sources()
    sources.add(_flatten(values, lambda path: Origin("argument", "argument")))
    return sources.settle().config


def setting_names() -> list[tuple[str, ...]]:
    """Return the names of all settings, (name,) or (table, name), in the order of the schema."""
    names: list[tuple[str, ...]] = []
    for field in msgspec.structs.fields(StoreConfig):
        table = _TABLES.get(field.name)
        if table is None:
            names.append((field.name,))
        elif dataclasses.is_dataclass(table):
            names += [(field.name, inner.name) for inner in dataclasses.fields(table)]
        else:
            names += [(field.name, inner) for inner in table.__struct_fields__]  # type: ignore[attr-defined]
    return names


def _choices(path: Sequence[str]) -> tuple[str, ...]:
    """Return the values that a setting can have, one with a Literal for its type."""
    schema = StoreConfig if len(path) == 1 else _TABLES[path[0]]
    return typing.get_args(typing.get_type_hints(schema)[path[-1]])


def variable_name(path: Sequence[str]) -> str:
    """Return the name of the variable that sets a setting."""
    return PREFIX + "_".join(path).upper()


def _find_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the file to read, and in words what decided it."""
    if path is not None:
        return os.fspath(path), f"file {os.fspath(path)}, named by the caller"
    if FILE_VARIABLE in environ:
        if not environ[FILE_VARIABLE]:
            raise StepwellUsageError(f"{FILE_VARIABLE} is empty; name a file, or unset it")
        return environ[FILE_VARIABLE], f"file {environ[FILE_VARIABLE]}, named by {FILE_VARIABLE}"
    if os.path.lexists(DEFAULT_FILE):
        return DEFAULT_FILE, f"file {DEFAULT_FILE}, found in {os.getcwd()}"
    try:
        here = os.getcwd()
    except OSError:  # removed while we were in it
        here = "the working directory"
    return None, f"no file: none was named, {FILE_VARIABLE} is not set, {here} has no {DEFAULT_FILE}"


def _read_file(file: str, *, is_named: bool) -> str:
    """Return the text of a configuration file.

    Raises:
        StepwellUsageError: it cannot be read, is too large, no UTF-8, or was not named and is not to be trusted.
    """
    try:
        # Nobody named it: a fifo would keep us waiting for its writer.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (0 if is_named else os.O_NONBLOCK))
        with open(fd, "rb") as opened:
            if not is_named:
                _check_trust(file, os.fstat(fd))
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StepwellUsageError(f"{file}: cannot be read ({error.strerror}); name a readable file") from error
    if len(data) > MAX_FILE_BYTES:
        raise StepwellUsageError(f"{file}: more than {MAX_FILE_BYTES} bytes is no configuration; name another file")
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise StepwellUsageError(f"{file}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8") from error


def _check_trust(file: str, status: os.stat_result) -> None:
    """Refuse a file that merely lies in the working directory and that somebody else may have put there.

    It names directories that this process would make, fill and empty.
    """
    name = os.path.join(os.getcwd(), file)
    if not stat.S_ISREG(status.st_mode):
        raise StepwellUsageError(f"{name}: no regular file; remove it, or name a file")
    if status.st_uid not in (os.geteuid(), 0):
        raise StepwellUsageError(
            f"{name}: belongs to user {status.st_uid}, this process runs as {os.geteuid()}; "
            f"if it is to be used, name it: --config {file} or {FILE_VARIABLE}={file}"
        )
    if status.st_mode & stat.S_IWOTH:
        raise StepwellUsageError(
            f"{name}: anybody may write it (mode {stat.S_IMODE(status.st_mode):04o}); chmod o-w {file}"
        )


def _from_file(file: str, *, is_named: bool) -> Iterator[_Given]:
    text = _read_file(file, is_named=is_named)
    try:
        values = _parse(text)
    except tomllib.TOMLDecodeError as error:
        what, _, at = str(error).partition(" (at ")
        line = re.search(r"line (\d+)", at)
        number = int(line[1]) if line else text.rstrip("\n").count("\n") + 1
        raise StepwellUsageError(f"{file}:{number}: no TOML: {what}; mend the line") from error
    except ValueError as error:
        raise StepwellUsageError(f"{file}: no configuration: {error}; name another file") from error
    lines = _lines_of(text)

    def origin(path: tuple[str, ...]) -> Origin:
        # What stands inside an inline table has the line of its table.
        number = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        return Origin("file", f"{file}:{number}" if number else file)

    yield from _flatten(values, origin)


def _parse(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none (TOMLDecodeError), is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Return the line on which each table and key of a TOML text begins, of the first few where the search grows long.

    tomllib has no positions, but each statement is a text of its own: the fewest lines that parse.
    """
    left = _MAX_PARSED
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    pending: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        pending.append(line)
        statement = "\n".join(pending)
        left -= len(statement)
        if left < 0:
            break
        try:
            found = _parse(statement)
        except ValueError:
            continue
        first = number - len(pending) + 1
        pending = []
        paths = list(_key_paths(found))
        if line.lstrip().startswith("[") and first == number:
            table = paths[-1]
            lines.setdefault(table, first)
            continue
        for path in paths:
            lines.setdefault(table + path, first)
    return lines


def _key_paths(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key that a setting may have, outer ones first: at most two names.

    A list of tables counts as its first.
    """
    for name, value in values.items():
        yield (name,)
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict):
            yield from ((name, field) for field in inner)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    known = {variable_name(path): path for path in [*setting_names(), *((table,) for table in _TABLES)]}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        if variable not in known:
            same = [name for name, path in known.items() if path[1:] == (variable.removeprefix(PREFIX).lower(),)]
            nearest = f"; did you mean {' or '.join(same)}?" if same else _nearest(variable, [*known, FILE_VARIABLE])
            raise StepwellUsageError(f"{variable}={text!r} names no setting{nearest or '; unset it'}")
        yield _from_text(known[variable], text, Origin("variable", variable))


def _from_texts(texts: Sequence[str]) -> Iterator[_Given]:
    known = [*setting_names(), *((table,) for table in _TABLES)]
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise StepwellUsageError(f"--set {text}: no value; give NAME=VALUE, e.g. shared.capacity=8GiB")
        path = tuple(name.strip().split("."))
        if path not in known:
            raise StepwellUsageError(f"--set {text}: {_unknown(path)}")
        yield _from_text(path, value.strip(), Origin("argument", f"--set {text}"))


def _from_text(path: tuple[str, ...], text: str, origin: Origin) -> _Given:
    """Read a value that came as text: the schema turns it into a number, but where it takes both it must be told."""
    name = ".".join(path)
    value: Any = text
    if _is_table(path):
        return _of_table(path[0], None if text == "none" else text, origin)
    if path == ("epoch",) and text.isdecimal():  # "7" and 7 are two epochs
        value = int(text.lstrip("0")[:_EPOCH_DIGITS] or "0")
    elif name in _LISTS:
        try:
            value = _parse(f"value = {text}")["value"]
        except ValueError as error:
            raise StepwellUsageError(
                f"{name}: {text!r} ({origin}) is no list; write it as in TOML, e.g. [0, 1]"
            ) from error
    return _Given(path, value, origin)


def _of_table(table: str, value: Any, origin: Origin) -> _Given:
    """Read a value given to the name of a table: the capacity of host, or None."""
    if value is None:
        return _Given((table,), None, origin)
    if table == "host":
        return _Given(("host", "capacity"), value, origin)
    fields = ", ".join(path[1] for path in setting_names() if path[0] == table)
    raise StepwellUsageError(f"{table}: {value!r} ({origin}) is no table; give {table}.NAME=..., NAME one of {fields}")


def _undotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest names with a dot."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        table, _, field = name.partition(".")
        if not field:
            nested[name] = value
            continue
        inner = nested.setdefault(table, {})
        if not isinstance(inner, dict):
            raise StepwellUsageError(f"{name}: {table} is given too, as {inner!r}; give one of both")
        inner[field] = value
    return nested


def _flatten(values: Mapping[str, Any], origin: Callable[[tuple[str, ...]], Origin]) -> Iterator[_Given]:
    """Yield each setting of nested values.

    Raises:
        StepwellUsageError: a name that the schema has not, or a table that is none.
    """
    known = set(setting_names())
    for name, value in values.items():
        if name in _TABLES:
            table = _as_mapping(value)
            if table is None:
                yield _of_table(name, value, origin((name,)))
                continue
            yield _Given((name,), {}, origin((name,)))
            for field, inner in table.items():
                if (name, field) not in known:
                    raise StepwellUsageError(f"{origin((name, field))}: {_unknown((name, field))}")
                yield _Given((name, field), inner, origin((name, field)))
        elif (name,) in known:
            yield _Given((name,), value, origin((name,)))
        else:
            raise StepwellUsageError(f"{origin((name,))}: {_unknown((name,))}")


def _is_table(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and path[0] in _TABLES


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a table, of a tier or of a geometry; None: it is none of these."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, PageGeometry):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, DeviceTier | HostTier | SharedTier | DiskTier):
        return msgspec.structs.asdict(value)
    return None


def _unknown(path: tuple[str, ...]) -> str:
    """Say that a name is none of the schema, and which one is nearest: in its table, else anywhere."""
    name = ".".join(map(str, path))  # YAML has keys that are no text
    names = [*(".".join(known) for known in setting_names()), *_TABLES]
    same = [known for known in names if known.rpartition(".")[2] == path[-1]]  # right, but in another table or none
    if same:
        return f"{name} names no setting; did you mean {' or '.join(same)}?"
    near = _nearest(name, [known for known in names if known.startswith(f"{path[0]}.")]) if len(path) > 1 else ""
    near = near or _nearest(name, names) or f"; the tables are {', '.join(_TABLES)}"
    return f"{name} names no setting{near}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
