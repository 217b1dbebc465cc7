"""The configuration: one schema for arguments, mappings and the environment; every value checked once, loudly."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepwell.config import (
    DeviceTier,
    DiskTier,
    HostTier,
    SharedTier,
    StoreConfig,
    floor_bytes,
    parse_size,
    volume_bytes,
)
from stepwell.errors import BudgetError, GeometryError, StepwellUsageError
from stepwell.settings import from_mapping, load_settings, setting_names, variable_name
from store_kit import GEOMETRY

MIB, GIB = 1 << 20, 1 << 30
GEOMETRY_VALUES = {
    "model": "m", "revision": "r", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "uint8", "page_tokens": 4,
}  # fmt: skip


# Sizes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        (" 1.5 MiB ", 3 * MIB // 2),
        ("200GB", 200 * 10**9),
        ("1kB", 1000),
        ("2TiB", 2 << 40),
        ("3b", 3),
        ("9007199254740993", 2**53 + 1),  # exact past what a float can hold
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(value: Any, expected: int) -> None:
    assert parse_size(value) == expected


@pytest.mark.parametrize(
    "value", ["", "GiB", "8 G", "8 XiB", "-1", "1e9", "8GiB8", "1.2.3", "nan", "inf", None, 1.5, True, [1], b"8"]
)
def test_what_is_no_size_is_refused_and_named(value: Any) -> None:
    with pytest.raises(StepwellUsageError, match=r"^disk\.capacity: .*not a size"):
        parse_size(value, name="disk.capacity")


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(StepwellUsageError, match="-5 bytes is negative"):
        parse_size(-5)


@pytest.mark.parametrize("value", [2**63, str(2**63), "8388608TiB", "9" * 400 + "KiB"])
def test_a_size_that_no_file_can_have_is_refused(value: Any) -> None:
    with pytest.raises(StepwellUsageError, match="more than a file can have"):
        parse_size(value)


# Volumes and shares


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [("32MiB", 32 * MIB), ("1GiB", 64 * MIB), ("8GiB", 256 * MIB), ("1TiB", 4 * GIB)],
)
def test_a_volume_is_a_32nd_of_the_capacity_between_64_mib_and_4_gib(capacity: str, expected: int) -> None:
    assert volume_bytes(SharedTier(capacity), name="shared") == expected


def test_a_share_is_an_eighth_and_at_least_one_volume() -> None:
    assert floor_bytes(SharedTier("8GiB"), name="shared") == GIB
    assert floor_bytes(SharedTier("64MiB"), name="shared") == 64 * MIB
    assert floor_bytes(SharedTier("8GiB", share=0), name="shared") == 256 * MIB
    with pytest.raises(StepwellUsageError, match=r"share .* exceeds the capacity"):
        floor_bytes(SharedTier("8GiB", share="9GiB"), name="shared")


@pytest.mark.parametrize("size", [0, "9GiB"])
def test_a_volume_that_is_empty_or_larger_than_the_capacity_is_refused(size: Any) -> None:
    with pytest.raises(BudgetError, match=r"raise disk\.capacity or lower disk\.volume_bytes"):
        volume_bytes(DiskTier("8GiB", "/x", volume_bytes=size), name="disk")


# Values out of range


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"copy_threads": 0}, "copy_threads: 0"),
        ({"io_threads": 257}, "io_threads: 257"),
        ({"queue_units": 15}, "queue_units: 15"),
        ({"low_watermark": 0.6}, "watermarks"),
        ({"low_watermark": 0.3, "high_watermark": 0.2}, "watermarks"),
        ({"high_watermark": float("nan")}, "watermarks"),
        ({"close_timeout": -1.0}, "close_timeout"),
        ({"close_timeout": float("nan")}, "close_timeout"),
        ({"device": DeviceTier(pages=4), "host": None}, "host"),
        ({"copy_threads": "2"}, "copy_threads"),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(values: dict[str, Any], words: str) -> None:
    given = {"geometry": GEOMETRY, "host": "1MiB"} | values
    with pytest.raises((StepwellUsageError, BudgetError), match=words):
        StoreConfig(**given).checked()


def test_host_may_be_a_size_or_a_tier() -> None:
    assert StoreConfig(geometry=GEOMETRY, host="1MiB").checked().host_bytes() == MIB
    assert StoreConfig(geometry=GEOMETRY, host=HostTier("1MiB")).checked().host_bytes() == MIB
    assert StoreConfig(geometry=GEOMETRY, disk=DiskTier("1MiB", "/x")).checked().host_bytes() is None


# Mappings


def test_a_mapping_gives_the_configuration_that_arguments_give() -> None:
    values = {
        "geometry": GEOMETRY_VALUES,
        "host": "1MiB",
        "shared": {"capacity": "8GiB", "path": "/dev/shm/x"},
        "disk": {"capacity": 10**9, "path": "/x", "direct_io": False},
        "epoch": "seven",
    }
    config = from_mapping(values)
    assert config.shared == SharedTier("8GiB", "/dev/shm/x")
    assert config.disk == DiskTier(10**9, "/x", direct_io=False)
    assert config.host_bytes() == MIB
    assert (config.geometry.model, config.geometry.layers, config.epoch) == ("m", 2, "seven")
    assert from_mapping(json.loads(json.dumps(values))) == config


def test_toml_gives_a_configuration() -> None:
    text = """
    host = "1MiB"
    copy_threads = 2
    [geometry]
    model = "m"
    revision = "r"
    layers = 2
    kv_heads = 2
    head_dim = 32
    dtype = "uint8"
    page_tokens = 4
    [disk]
    capacity = "1GiB"
    path = "/x"
    """
    config = from_mapping(tomllib.loads(text))
    assert (config.copy_threads, config.disk) == (2, DiskTier("1GiB", "/x"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hots": "1MiB"}, "hots.*did you mean host"),
        (
            {"disk": {"capacity": "1GiB", "path": "/x", "direct_oi": True}},
            r"disk\.direct_oi.*did you mean disk\.direct_io",
        ),
        (
            {"geometry": GEOMETRY_VALUES | {"stream": 1}, "host": 1},
            r"geometry\.stream .*did you mean geometry\.streams",
        ),
        ({"host": "1MiB", "device": {}}, r"device\.pages: missing"),
        ({"disk": {"capacity": "1GiB"}}, "path"),
        ({"host": "1MiB", "copy_threads": "many"}, "copy_threads"),
        ({"host": "1MiB", "geometry": {"model": "m"}}, "revision"),
        ({"host": [1]}, "host"),
    ],
)
def test_a_mapping_with_a_wrong_name_or_type_is_refused_and_the_nearest_name_is_told(
    values: dict[str, Any], words: str
) -> None:  # C113
    with pytest.raises(StepwellUsageError, match=words):
        from_mapping({"geometry": GEOMETRY_VALUES} | values)


def test_a_geometry_that_is_none_is_refused() -> None:
    with pytest.raises((GeometryError, StepwellUsageError), match="layers"):
        from_mapping({"geometry": GEOMETRY_VALUES | {"layers": 0}, "host": "1MiB"})


# The environment


def from_variables(environ: dict[str, str]) -> StoreConfig:
    """Read a configuration of which the geometry is given and all else comes from the environment."""
    return load_settings(environ=environ, arguments={"geometry": GEOMETRY_VALUES}).config


def test_every_kind_of_setting_can_come_from_the_environment() -> None:
    config = from_variables(
        {
            "STEPWELL_SHARED_CAPACITY": "8GiB",
            "STEPWELL_SHARED_PATH": "/dev/shm/y",
            "STEPWELL_HOST_CAPACITY": "2MiB",
            "STEPWELL_COPY_THREADS": "3",
            "STEPWELL_DISK_CAPACITY": "9GiB",
            "STEPWELL_DISK_PATH": "/y",
            "STEPWELL_DISK_DIRECT_IO": "false",
            "STEPWELL_LOW_WATERMARK": "0.01",
            "STEPWELL_EPOCH": "7",
            "STEPWELL_GEOMETRY_STREAMS": "1",
            "OTHER": "x",
        },
    )
    assert config.shared == SharedTier("8GiB", "/dev/shm/y")
    assert config.disk == DiskTier("9GiB", "/y", direct_io=False)
    assert (config.host_bytes(), config.copy_threads, config.low_watermark) == (2 * MIB, 3, 0.01)
    assert config.geometry.streams == 1
    assert str(config.epoch) == "7"


def test_a_variable_that_names_nothing_is_refused_and_the_nearest_is_told() -> None:
    with pytest.raises(StepwellUsageError, match=r"STEPWELL_SHARED_CAPACITI.*did you mean STEPWELL_SHARED_CAPACITY"):
        from_variables({"STEPWELL_SHARED_CAPACITI": "8GiB"})


def test_host_as_a_size_is_its_capacity_whichever_source_says_so() -> None:
    assert from_variables({"STEPWELL_HOST_CAPACITY": "2MiB"}).host_bytes() == 2 * MIB
    assert from_variables({"STEPWELL_HOST": "3MiB"}).host_bytes() == 3 * MIB


def test_an_epoch_from_the_environment_is_the_epoch_that_an_argument_gives() -> None:
    from stepwell.hashing import epoch_number

    config = from_variables({"STEPWELL_HOST": "1MiB", "STEPWELL_EPOCH": "7"})
    assert epoch_number(config.epoch) == epoch_number(7)


# Sources, one over the other

FILE = """
# what this machine has
epoch = "seven"
host = "2MiB"

[geometry]
model = "m"
revision = \"\"\"
r\"\"\"
layers = 2
kv_heads = 2
head_dim = 32
dtype = "uint8"
page_tokens = 4
shard = [
  0,
  1,
]

[shared]
capacity = "8GiB"
path = "/dev/shm/x"
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a configuration file into the working directory; without a call there is none."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str, name: str = "some.toml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write_text


def test_arguments_go_over_variables_over_the_file_over_defaults(write: Callable[[str], str]) -> None:
    settings = load_settings(
        write(FILE),
        environ={"STEPWELL_SHARED_CAPACITY": "4GiB", "STEPWELL_SHARED_SHARE": "1GiB", "STEPWELL_COPY_THREADS": "3"},
        arguments=["shared.share=2GiB", "disk.capacity=1GiB", "disk.path=/y"],
    )
    config = settings.config
    assert config.shared == SharedTier("4GiB", "/dev/shm/x", share="2GiB")
    assert config.disk == DiskTier("1GiB", "/y")
    assert (config.copy_threads, config.io_threads, config.host_bytes()) == (3, 2, 2 * MIB)
    assert settings.file == "some.toml"
    places = {name: (origin.kind, str(origin)) for name, origin in settings.origins.items()}
    assert places["epoch"] == ("file", "some.toml:3")
    assert places["host.capacity"] == ("file", "some.toml:4")
    assert places["geometry.revision"] == ("file", "some.toml:8")
    assert places["geometry.layers"] == ("file", "some.toml:10")
    assert places["geometry.shard"] == ("file", "some.toml:15")
    assert places["geometry.streams"] == ("default", "default")
    assert places["shared.path"] == ("file", "some.toml:22")
    assert places["shared.capacity"] == ("variable", "STEPWELL_SHARED_CAPACITY")
    assert places["shared.share"] == ("argument", "--set shared.share=2GiB")
    assert places["copy_threads"] == ("variable", "STEPWELL_COPY_THREADS")
    assert places["io_threads"] == ("default", "default")
    assert "device.pages" not in places
    assert set(settings.values()) == set(places)
    assert settings.values()["shared.capacity"] == "4GiB"


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("shared = { capacity = '1GiB', path = '/x' }", "shared.path", 1),
        ("[geometry]\n[shared]\n  'capacity' = '1GiB'\npath='/x'", "shared.capacity", 3),
        ("shared.capacity = '1GiB'\nshared.path = '/x'", "shared.path", 2),
        ("[shared]\r\ncapacity = '1GiB'\r\n\r\n# more\r\npath = '/x'\r\n", "shared.path", 5),
        ('epoch = """\n[shared]\npath = 1\n"""\n[shared]\ncapacity = 8192\npath = \'/x\'', "shared.path", 7),
    ],
)
def test_a_value_of_a_file_has_the_line_where_it_begins(
    write: Callable[[str], str], text: str, key: str, line: int
) -> None:
    settings = load_settings(write(text), environ={}, arguments={"geometry": GEOMETRY, "host": "1MiB"})
    assert str(settings.origins[key]) == f"some.toml:{line}"


def test_arguments_may_be_nested_dotted_or_the_structs_themselves(write: Callable[[str], str]) -> None:
    nested = load_settings(write(FILE), environ={}, arguments={"shared": {"share": "1GiB"}, "geometry": GEOMETRY})
    dotted = load_settings(write(FILE), environ={}, arguments={"shared.share": "1GiB", "geometry": GEOMETRY})
    struct = load_settings(
        write(FILE),
        environ={},
        arguments={"shared": SharedTier("8GiB", "/dev/shm/x", share="1GiB"), "geometry": GEOMETRY},
    )
    assert nested.config == dotted.config == struct.config
    assert nested.config.geometry == GEOMETRY
    assert str(nested.origins["shared.share"]) == "argument"


@pytest.mark.parametrize("how", ["argument", "text", "variable"])
def test_a_tier_of_the_file_can_be_left_out(write: Callable[[str], str], how: str) -> None:
    settings = load_settings(
        write(FILE),
        environ={"STEPWELL_SHARED": "none"} if how == "variable" else {},
        arguments={"argument": {"shared": None}, "text": ["shared=none"], "variable": None}[how],
    )
    assert settings.config.shared is None
    assert not any(name.startswith("shared") for name in settings.origins)


def test_an_epoch_given_as_text_is_a_number_where_it_is_one(write: Callable[[str], str]) -> None:
    assert load_settings(write(FILE), environ={}, arguments=["epoch=7"]).config.epoch == 7
    assert load_settings(write(FILE), environ={}, arguments={"epoch": "7"}).config.epoch == "7"


def test_a_list_given_as_text_is_read_as_toml(write: Callable[[str], str]) -> None:
    settings = load_settings(write(FILE), environ={"STEPWELL_GEOMETRY_SHARD": "[1, 4]"}, arguments=[])
    assert settings.config.geometry.shard == (1, 4)


@pytest.mark.parametrize(
    ("more", "environ", "arguments", "words"),
    [
        (
            "capacitty = 3",
            {},
            [],
            r"^some\.toml:23: shared\.capacitty names no setting; did you mean shared\.capacity\?",
        ),
        ("[disk]\ncapacity = 9\n[disk.more]\nx = 1", {}, [], r"^some\.toml:25: disk\.more names no setting"),
        ("[dosk]", {}, [], r"^some\.toml:23: dosk names no setting; did you mean disk\?"),
        ("pages = 3", {}, [], r"shared\.pages names no setting; did you mean device\.pages\?"),
        (
            "[disk]\ncapacity = 9",
            {},
            [],
            r"disk\.path: missing; give it in some\.toml or as disk\.path=.*some\.toml:23",
        ),
        ("[device]", {}, [], r"device\.pages: missing"),
        ("x = ", {}, [], r"^some\.toml:23: no TOML: Invalid value"),
        ("[shared]", {}, [], r"^some\.toml:23: no TOML: Cannot declare"),
        ("volume_bytes = '16 G'", {}, [], r"shared\.volume_bytes: '16 G' is not a size; give .*some\.toml:23\)$"),
        (
            "volume_bytes = '9GiB'",
            {},
            [],
            r"raise shared\.capacity .*some\.toml:21, shared\.volume_bytes: some\.toml:23\)$",
        ),
        (
            "[disk]\npath = '/dev/shm/x'\ncapacity = 9999",
            {},
            [],
            r"a directory of its own \(.*some\.toml:22, .*some\.toml:24",
        ),
        (
            "",
            {"STEPWELL_HOSTT_CAPACITY": "1"},
            [],
            r"STEPWELL_HOSTT_CAPACITY='1' .*did you mean STEPWELL_HOST_CAPACITY\?",
        ),
        ("", {"STEPWELL_COPY_THREADS": "many"}, [], r"copy_threads: 'many' \(STEPWELL_COPY_THREADS\): expected int"),
        (
            "",
            {"STEPWELL_COPY_THREADS": "0"},
            [],
            r"copy_threads: 0 .*1\.\.256 \(copy_threads: STEPWELL_COPY_THREADS\)$",
        ),
        ("", {"STEPWELL_GEOMETRY_LAYERS": "0"}, [], r"layers is 0.*\(geometry\.layers: STEPWELL_GEOMETRY_LAYERS\)$"),
        (
            "",
            {"STEPWELL_DISK_WRITE": "selectve"},
            [],
            r"^disk\.write: 'selectve' \(STEPWELL_DISK_WRITE\): give 'through' or 'selective'$",
        ),
        ("", {"STEPWELL_SHARE": "1"}, [], r"did you mean STEPWELL_SHARED_SHARE or STEPWELL_DISK_SHARE\?"),
        ("", {}, ["host"], r"--set host: no value"),
        ("", {}, ["capacity=2"], r"did you mean host\.capacity or shared\.capacity or disk\.capacity\?"),
        ("", {}, ["shared=1"], r"shared: '1' \(--set shared=1\) is no table; give shared\.NAME"),
        ("", {}, ["geometry.shard=0,1"], r"geometry\.shard: '0,1' .*no list; .*\[0, 1\]"),
        ("", {}, ["geometry.shard=[0, 'a']"], r"geometry\.shard: \[0, 'a'\] \(--set .*\): expected int"),
        ("", {}, ["low_watermark=nan"], r"low_watermark nan.*--set low_watermark=nan"),
        ("", {}, ["host=none", "shared=none"], r"no tier: .*file some\.toml, named by the caller"),
        ("", {}, {"hosts": 1}, r"^argument: hosts names no setting; did you mean host\?"),
        ("", {}, {"shared": 5}, r"shared: 5 \(argument\) is no table"),
        ("", {}, {"shared": 5, "shared.share": 1}, r"give one of both"),
    ],
)
def test_what_is_wrong_is_told_with_value_origin_and_remedy(
    write: Callable[[str], str], more: str, environ: dict[str, str], arguments: Any, words: str
) -> None:  # C113
    path = write(FILE + more)
    with pytest.raises((StepwellUsageError, BudgetError), match=words):
        load_settings(path, environ=environ, arguments=arguments)


# The file


def test_the_file_is_the_argument_s_else_the_variable_s_else_the_one_in_the_working_directory(
    write: Callable[..., str],
) -> None:
    for name in ("argument.toml", "variable.toml", "stepwell.toml"):
        write(FILE, name)
    environ = {"STEPWELL_CONFIG": "variable.toml"}
    assert load_settings("argument.toml", environ=environ).file == "argument.toml"
    assert load_settings(environ=environ).file == "variable.toml"
    found = load_settings(environ={})
    assert (found.file, "found in" in found.looked_for) == ("stepwell.toml", True)
    os.unlink("stepwell.toml")
    found = load_settings(environ={}, arguments={"geometry": GEOMETRY, "host": 9999})
    assert found.file is None
    assert "STEPWELL_CONFIG is not set" in found.looked_for
    with pytest.raises(StepwellUsageError, match=r"geometry: missing \(no file: none was named.*as geometry\.NAME"):
        load_settings(environ={})


@pytest.mark.parametrize(
    ("name", "words"),
    [("absent.toml", "absent.toml: cannot be read .*No such file"), (".", "Is a directory"), ("", "cannot be read")],
)
def test_a_file_that_was_named_and_cannot_be_read_is_refused(write: Any, name: str, words: str) -> None:
    with pytest.raises(StepwellUsageError, match=words):
        load_settings(name, environ={})


def test_an_empty_variable_is_no_file(write: Any) -> None:
    with pytest.raises(StepwellUsageError, match="STEPWELL_CONFIG is empty; name a file, or unset it"):
        load_settings(environ={"STEPWELL_CONFIG": ""})


def test_a_file_that_is_no_text_or_no_configuration_is_refused(write: Any, tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"# one\nx = '\xff'\n")
    with pytest.raises(StepwellUsageError, match=r"^bytes\.toml:2: byte 11 is not UTF-8"):
        load_settings("bytes.toml", environ={})
    with pytest.raises(StepwellUsageError, match="is no configuration"):
        load_settings("/dev/zero", environ={})


@pytest.mark.parametrize("kind", ["writable", "foreign", "fifo", "directory"])
def test_a_file_that_nobody_named_is_not_trusted_where_others_may_have_put_it_there(
    write: Callable[..., str], kind: str
) -> None:
    if kind == "fifo":
        os.mkfifo("stepwell.toml")
    elif kind == "directory":
        os.mkdir("stepwell.toml")
    else:
        write(FILE, "stepwell.toml")
    if kind == "writable":
        os.chmod("stepwell.toml", 0o666)
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown("stepwell.toml", 12345, 0)
    words = {
        "writable": r"mode 0666\); chmod o-w stepwell\.toml",
        "foreign": r"belongs to user 12345, .*--config stepwell\.toml or STEPWELL_CONFIG=stepwell\.toml",
        "fifo": "no regular file",
        "directory": "no regular file|Is a directory",
    }[kind]
    with pytest.raises(StepwellUsageError, match=words):
        load_settings(environ={})
    if kind == "foreign":  # following the advice
        assert load_settings(environ={"STEPWELL_CONFIG": "stepwell.toml"}).config.host_bytes() == 2 * MIB
    if kind == "writable":
        os.chmod("stepwell.toml", 0o664)
        assert load_settings(environ={}).config.host_bytes() == 2 * MIB


# The page about it


def test_the_page_about_configuration_has_every_setting_with_its_variable_and_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| `(STEPWELL_[^`]+)` \| ([^|]+?) \|", page, re.MULTILINE)
    expected = []
    for path in setting_names():
        owner: Any = StoreConfig if len(path) == 1 else type_of(path[0])
        expected.append((".".join(path), variable_name(path), default_of(owner, path[-1])))
    assert rows == expected


def type_of(table: str) -> Any:
    return {"geometry": type(GEOMETRY), "device": DeviceTier, "host": HostTier, "shared": SharedTier, "disk": DiskTier}[
        table
    ]


def default_of(owner: Any, name: str) -> str:
    """Return what the page says of a default: `value`, "required", or "derived" where None stands for a rule."""
    if dataclasses.is_dataclass(owner):
        default: Any = next(field for field in dataclasses.fields(owner) if field.name == name).default
        missing = default is dataclasses.MISSING
    else:
        default = next(field for field in msgspec.structs.fields(owner) if field.name == name).default
        missing = default is msgspec.NODEFAULT
    if missing:
        return "required"
    if default is None:
        return "derived"
    if isinstance(default, int) and default >= MIB:
        return f"`{default // MIB}MiB`"
    return f"`{json.dumps(default)}`"
