"""The configuration: one schema for arguments, mappings and the environment; every value checked once, loudly."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from stepwell.config import (
    DeviceTier,
    DiskTier,
    HostTier,
    SharedTier,
    StoreConfig,
    floor_bytes,
    from_env,
    from_mapping,
    parse_size,
    volume_bytes,
)
from stepwell.errors import BudgetError, GeometryError, StepwellUsageError
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
        (2**63, 2**63),
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


def test_a_size_beyond_all_floats_is_still_a_size() -> None:
    assert parse_size("9" * 400 + "KiB") > 2**1000


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
        ({"disk": {"capacity": "1GiB", "path": "/x", "direct_oi": True}}, "direct_oi.*did you mean direct_io"),
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


def test_the_environment_overrides_values_and_leaves_them_alone() -> None:
    values = {"geometry": GEOMETRY_VALUES, "shared": {"capacity": "1GiB"}}
    config = from_env(
        values,
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
            "STEPWELL_GEOMETRY_REVISION": "r2",
            "OTHER": "x",
        },
    )
    assert config.shared == SharedTier("8GiB", "/dev/shm/y")
    assert config.disk == DiskTier("9GiB", "/y", direct_io=False)
    assert (config.host_bytes(), config.copy_threads, config.low_watermark) == (2 * MIB, 3, 0.01)
    assert config.geometry.revision == "r2"
    assert str(config.epoch) == "7"
    assert values == {"geometry": GEOMETRY_VALUES, "shared": {"capacity": "1GiB"}}


def test_a_variable_that_names_nothing_is_refused_and_the_nearest_is_told() -> None:
    with pytest.raises(StepwellUsageError, match=r"STEPWELL_SHARED_CAPACITI.*did you mean STEPWELL_SHARED_CAPACITY"):
        from_env({"geometry": GEOMETRY_VALUES}, {"STEPWELL_SHARED_CAPACITI": "8GiB"})


def test_a_variable_cannot_set_a_field_of_what_is_no_table() -> None:
    with pytest.raises(StepwellUsageError, match="host"):
        from_env({"geometry": GEOMETRY_VALUES, "host": "1MiB"}, {"STEPWELL_HOST_CAPACITY": "2MiB"})


def test_an_epoch_from_the_environment_is_the_epoch_that_an_argument_gives() -> None:
    from stepwell.hashing import epoch_number

    config = from_env({"geometry": GEOMETRY_VALUES, "host": "1MiB"}, {"STEPWELL_EPOCH": "7"})
    assert epoch_number(config.epoch) == epoch_number(7)
