"""Bytes, names and texts that anybody may have written, read by Python: an answer, or the error that is documented."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stepwell import _core
from stepwell.errors import StepwellUsageError
from stepwell.settings import MAX_FILE_BYTES, load_settings
from stepwell.tiers import process_file
from stepwell.tiers.lmdb_index import MAX_STAMP, RECORD_BYTES, _decode, _parse
from stepwell.tiers.process_file import ProcessRecord
from stepwell.tiers.scan import is_other_format, wanted_of
from stepwell.tiers.volume_files import list_directory

U64 = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
VOLUME = bytes(range(16))
own_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


def checksummed(data: bytes) -> bytes:
    return data + struct.pack("<I", _core.crc32c(data))


# ---- process files ---------------------------------------------------------------------------------------------------


@given(st.one_of(st.binary(max_size=200), st.binary(min_size=96, max_size=96).map(checksummed)))
def test_any_bytes_are_a_process_record_or_none(data: bytes) -> None:
    record = process_file.decode(data)
    if record is not None:
        assert 0 <= wanted_of(record) <= record.want_bytes
        assert process_file.decode(record.encode()) == record


@given(
    head=st.tuples(st.binary(min_size=16, max_size=16), U64, st.binary(min_size=16, max_size=16)),
    sizes=st.lists(U64, min_size=5, max_size=5),
)
def test_a_record_that_wants_the_world_asks_for_no_more_than_what_lacks(
    head: tuple[bytes, int, bytes], sizes: list[int]
) -> None:
    record = process_file.decode(ProcessRecord(*head, *sizes).encode())
    assert record is not None
    lacking = max(min(record.floor_bytes, record.capacity_bytes) - record.held_bytes, 0)
    assert wanted_of(record) == min(record.want_bytes, lacking)
    assert record.excess_bytes >= 0


# ---- names -----------------------------------------------------------------------------------------------------------

HEX = st.text("0123456789abcdef", min_size=30, max_size=33)
NAMES = st.one_of(
    st.binary(min_size=1, max_size=60),
    st.tuples(
        st.sampled_from("vtxpa"),
        HEX,
        st.sampled_from(["vol", "meta", "pages", "lock", "lmdb", "lmdb-old", "proc", "x"]),
    ).map(lambda parts: f"{parts[0]}-{parts[1]}.{parts[2]}".encode()),
)


@own_file
@given(names=st.lists(NAMES, max_size=8, unique=True))
@example(names=[b"v-" + b"0" * 32 + b".vol\n", b"\xff\xfe", b"v-" + "٠".encode() * 32 + b".vol"])
def test_names_of_any_bytes_are_sorted_out_and_only_ours_count(tmp_path: Path, names: list[bytes]) -> None:
    for left in os.listdir(os.fsencode(tmp_path)):
        os.unlink(os.fsencode(tmp_path) + b"/" + left)
    made = set()
    for name in names:
        assume(b"/" not in name and b"\0" not in name and name not in (b".", b".."))
        with open(os.fsencode(tmp_path) + b"/" + name, "wb") as file:
            file.write(bytes(10))
        made.add(os.fsdecode(name))
    listing = list_directory(str(tmp_path))
    ours = {name for volume in listing.volumes.values() for name in volume.files}
    assert listing.total_bytes == 10 * len(ours)
    assert ours | set(listing.strangers) <= made
    for volume_id in listing.volumes:
        assert len(volume_id) == 32
        assert set(volume_id) <= set("0123456789abcdef")
    for name in ours:
        assert len(name) in (38, 39, 40)


# ---- headers and records ---------------------------------------------------------------------------------------------


@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda head: checksummed((b"STEPWELV" + head).ljust(4092, b"\0"))),
    ),
    metadata=U64,
    pages=U64,
)
def test_any_bytes_are_a_header_or_a_value_error(data: bytes, metadata: int, pages: int) -> None:
    is_other_format(data)
    try:
        header = _core.VolumeHeader.decode(data, metadata, pages)
    except ValueError:
        return
    assert header.encode() == data


@given(st.one_of(st.binary(min_size=192, max_size=192), st.binary(min_size=188, max_size=188).map(checksummed)))
def test_any_record_is_a_page_or_none_to_the_copy_of_the_index(record: bytes) -> None:
    assert len(record) == RECORD_BYTES
    page = _decode(3, record)
    assert page is None or 1 <= len(page.key) <= 64


# ---- what the child says of an LMDB environment ----------------------------------------------------------------------

ENTRY = st.tuples(U64, st.integers(0, 255), st.binary(min_size=64, max_size=64)).map(
    lambda entry: struct.pack("<QB7x64s", *entry)
)


@given(
    st.one_of(
        st.binary(max_size=400),
        st.builds(
            lambda magic, version, volume, count, entries: (
                struct.pack("<8sI16sI", magic, version, volume, count) + b"".join(entries)
            ),
            st.sampled_from([b"STEPWELM", b"STEPWELV"]),
            st.integers(0, 2),
            st.sampled_from([VOLUME, bytes(16)]),
            st.integers(0, 6) | st.integers(0, 2**32 - 1),
            st.lists(ENTRY, max_size=6),
        ),
    )
)
def test_any_stream_is_remembered_within_bounds_or_a_value_error(stream: bytes) -> None:
    try:
        remembered = _parse(stream, volume_id=VOLUME, limit_entries=5)
    except ValueError:
        return
    assert len(remembered.keys) == len(set(remembered.keys)) == remembered.stamps.size <= 5
    assert all(1 <= len(key) <= 64 for key in remembered.keys)
    assert (np.diff(remembered.stamps.astype(np.float64)) >= 0).all()
    assert remembered.stamps.max(initial=0) <= MAX_STAMP


# ---- settings --------------------------------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from(
        ["[geometry]\n", "[shared]\n", "[disk]\n", "[host]\n", "host = ", "shared.", "path = ", "capacity = ",
         "layers = ", '"1GiB"\n', "1\n", "-1\n", "1e400\n", "nan\n", "true\n", "[" * 40, "]" * 40, "{a={a=", "'''",
         '"""', "\\u0000", "= ", "\n", "#", "\x00", "9" * 400 + "\n", "1979-05-27\n"]
    ),
    max_size=20,
).map("".join)  # fmt: skip


@own_file
@given(
    text=st.one_of(PIECES, st.text(max_size=100)).map(lambda text: text.encode("utf-8", "surrogateescape"))
    | st.binary(max_size=100)
)
@example(text=b"host = " + b"[" * 30_000)
@example(text=b"a." * 20_000 + b"b = 1")
@example(text=b"shared.capacity = " + b"9" * 6000)
@example(text=b"x" * (MAX_FILE_BYTES + 1))
def test_any_configuration_file_is_settings_or_a_usage_error(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "stepwell.toml"
    path.write_bytes(text)
    values: dict[str, Any] = {}
    try:
        load_settings(path, environ={}, **values)
    except StepwellUsageError as error:
        assert len(str(error)) < 20_000


@pytest.mark.parametrize("depth", [10, 1000, 20_000])
def test_a_deeply_nested_file_is_a_usage_error(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "stepwell.toml"
    path.write_text("shared = " + "{a=" * depth + "1" + "}" * depth)
    with pytest.raises(StepwellUsageError):
        load_settings(path, environ={})
