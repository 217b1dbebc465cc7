"""What inspect and verify say of directories: live, dead, damaged on purpose, no directories at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_kit import DIRECTORY_CHILD, Child
from directory_child import VOLUME
from stepwell import _core, inspection, verification
from stepwell.cli import main
from stepwell.errors import StepwellUsageError, VolumeError
from stepwell.tiers.locks import try_lock
from stepwell.tiers.reader import NotReadableError, count_slots, open_volume
from stepwell.tiers.volume_files import list_directory
from store_kit import GEOMETRY, PAGE_BYTES, PAGE_TOKENS, Directories, OpenRig, chain
from volume_kit import FINGERPRINT, Volume, sealed

HERE = Path(__file__).parent

@pytest.fixture(params=[1, 2], ids=["shared", "disk"])
def medium(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def place(directories: Directories) -> Path:
    directories.shared.parent.mkdir(exist_ok=True)
    return directories.shared


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(DIRECTORY_CHILD, "worker")
    yield child
    child.close()


def contents(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_ino, status.st_mtime_ns, data)
    return found


# ---- live and dead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", ["shared", "disk"])
def test_a_living_process_is_told_with_what_it_holds(place: Path, child: Child, medium: str) -> None:
    child.ask("open", path=str(place), medium=medium)
    child.ask("grow")
    held = child.ask("grow")["held"]
    report = inspection.inspect_directory(str(place))
    assert report.media == (medium,)
    assert report.is_well
    [process] = report.processes
    assert process.pid == child.process.pid
    assert process.lock.is_held
    assert process.is_this_boot
    assert process.capacity_bytes == report.budget_bytes == 4 * VOLUME
    assert process.held_bytes == report.total_bytes > VOLUME
    assert {volume.volume_id for volume in report.volumes} == set(held)
    for volume in report.volumes:
        assert volume.lock.is_held
        assert f"pid {child.process.pid}" in volume.lock.why
        assert volume.header is not None
        assert volume.header.is_this_boot
        assert volume.header.medium == medium
    assert report.leftovers == report.strangers == ()
    assert child.ask("grow")["held"][:2] == held  # it was not disturbed


def test_after_sigkill_volumes_are_orphans_and_the_process_file_is_a_leftover(place: Path, child: Child) -> None:
    child.ask("open", path=str(place), medium="shared")
    [held] = child.ask("grow")["held"]
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    report = inspection.inspect_directory(str(place))
    [volume] = report.volumes
    assert (volume.volume_id, volume.lock.is_held, volume.condition) == (held, False, "readable")
    [leftover] = report.leftovers
    assert leftover.is_dead
    assert all(name.startswith("p-") for name in leftover.names)
    assert report.budget_bytes is None


def test_pages_of_a_closed_store_are_counted_listed_and_right(
    open_rig: OpenRig, directories: Directories
) -> None:
    rig = open_rig(shared=4 * 256 * 1024, disk=4 * 256 * 1024)
    for number in range(4):
        rig.save(chain(number, 6))
    rig.store.flush(timeout=30.0)
    rig.close()
    for directory in (directories.shared, directories.disk):
        report = inspection.inspect_directory(str(directory), geometries=[GEOMETRY])
        [model] = report.models
        assert (model.pages, model.tokens) == (24, 24 * PAGE_TOKENS)
        assert model.model == "stamped 1"
        pages = list(inspection.read_pages(str(directory)))
        assert len(pages) == 24
        chains = list(inspection.page_chains(pages))
        assert [(c.start, c.pages, c.depth) for c in chains] == [("root", 6, 0)] * 4
        [check] = verification.verify_directory(str(directory), geometries=[GEOMETRY])
        assert (check.right, check.damaged, check.read_bytes) == (24, (), 24 * PAGE_BYTES)
        [volume] = report.volumes
        assert volume.slots is not None
        assert 0 < volume.slots.first_stamp < volume.slots.last_stamp  # written at close


def test_looking_changes_nothing(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    (place / f"t-{'0' * 32}.vol").write_bytes(b"half born")
    (place / f"v-{'0' * 32}.lock").touch(0o600)
    (place / "notes.txt").write_text("mine")
    volume.flip(volume.pages, volume.page_at(1))
    before = contents(place)
    inspection.inspect_directory(str(place))
    list(inspection.read_pages(str(place)))
    list(verification.verify_directory(str(place)))
    assert main(["gc", str(place), "--orphans"]) == 0
    assert contents(place) == before


def test_no_volume_lock_is_tried_without_the_directory_lock(place: Path) -> None:
    volume = Volume(place)
    lock = try_lock(str(place / "directory.lock"))
    assert isinstance(lock, _core.Descriptor)
    try:
        report = inspection.inspect_directory(str(place), lock_seconds=0.0)
        assert f"pid {os.getpid()}" in report.note
        assert [v.lock.is_held for v in report.volumes] == [None]
        held = try_lock(str(place / f"v-{volume.id}.lock"))
        assert isinstance(held, _core.Descriptor)
        try:  # what /proc/locks shows is known all the same
            report = inspection.inspect_directory(str(place), lock_seconds=0.0)
            assert [v.lock.is_held for v in report.volumes] == [True]
        finally:
            held.close()
    finally:
        lock.close()
    assert [v.lock.is_held for v in inspection.inspect_directory(str(place)).volumes] == [False]


def test_a_volume_without_a_lock_file_has_a_writer_that_is_not_known(place: Path) -> None:
    volume = Volume(place)
    (place / f"v-{volume.id}.lock").unlink()
    [report] = inspection.inspect_directory(str(place)).volumes
    assert report.lock.is_held is None
    assert not (place / f"v-{volume.id}.lock").exists()


# ---- hostile bytes ---------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_header_is_told(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    whole = volume.header.encode()
    for at in range(4096):
        volume.write_header(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        report = volume.report()
        if 160 <= at < 176:  # the boot id, rewritten in place: only that is another then
            assert report.header is not None, at
            assert report.header.boot_id != whole[160:176].hex()
        else:
            assert report.condition == "damaged", at
            assert report.why
    volume.write_header(whole)
    assert volume.report().condition == "readable"


def test_every_field_of_a_header_may_hold_anything(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    whole = volume.header.encode()
    read = 0
    for at in range(8, 200, 4):
        for width in (4, 8):
            for value in (0, 1, 2, 7, 2**16, 2**24, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1):
                forged = value % 2 ** (8 * width)
                data = whole[:at] + forged.to_bytes(width, "little") + whole[at + width :]
                volume.write_header(sealed(data))
                report = volume.report()
                assert report.condition in ("readable", "damaged", "other format"), (at, value)
                if report.condition == "readable":
                    read += 1
                    volume.check()
    assert read > 0  # a fingerprint, a birth, an epoch are anybody's


def test_a_header_of_another_format_version_is_no_damage(place: Path) -> None:
    volume = Volume(place)
    data = volume.header.encode()
    volume.write_header(sealed(data[:8] + (9).to_bytes(4, "little") + data[12:]))
    report = inspection.inspect_directory(str(place))
    assert [v.condition for v in report.volumes] == ["other format"]
    assert "version 9" in report.volumes[0].why
    assert report.is_well
    assert volume.check().is_well


def test_every_flipped_byte_of_a_record_is_told(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    for at in range(192):
        volume.flip(volume.metadata, volume.record_at(2) + at)
        slots = volume.report().slots
        assert slots is not None
        empty = slots.odd + slots.never_written + slots.worn
        assert (slots.resident, slots.damaged + empty) == (3, 1 + volume.header.slots - 4), at
        check = volume.check()
        assert check.right == 3
        if at >= 8:  # the generation of a free slot is no damage
            assert [(page.slot, page.key, page.what) for page in check.damaged] == [(2, "", "its record")], at
        volume.flip(volume.metadata, volume.record_at(2) + at)
    assert volume.check().right == 4


@pytest.mark.parametrize("which", ["metadata", "pages"])
def test_a_truncated_volume_is_told_at_any_length(place: Path, which: str) -> None:
    volume = Volume(place, medium=2)
    path = getattr(volume, which)
    whole = path.read_bytes()
    for length in {0, 1, 191, *range(4000, 4200, 7), *range(0, len(whole), 997), len(whole) - 1}:
        os.truncate(path, length)
        assert volume.report().condition == "damaged", length
        assert volume.check().condition == "damaged", length
        path.write_bytes(whole)
    assert volume.check().right == 4


def test_a_volume_that_is_truncated_while_it_is_read_is_unreadable(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    names = list_directory(str(place)).volumes[volume.id]
    _, reader = open_volume(str(place), names)
    os.truncate(volume.pages, 100)
    if medium == 2:
        assert count_slots(reader).resident == 4
        assert [c.verdict for c in reader.check_pages(np.arange(4, dtype=np.uint32))] == [
            _core.PageVerdict.unreadable
        ] * 4
    os.truncate(volume.metadata, 100)
    with pytest.raises(NotReadableError, match="records from slot 0"):
        count_slots(reader)


def test_a_header_of_another_volume_is_damage(place: Path) -> None:
    volume = Volume(place)
    volume.header.volume_id = bytes(16)
    volume.write_header(volume.header.encode())
    assert "says it is volume 0000" in volume.report().why


def test_names_that_are_not_ours_are_told_and_not_opened(place: Path) -> None:
    Volume(place)
    outside = place.parent / "outside"
    outside.write_bytes(b"x" * 5000)
    ids = [f"{number:032x}" for number in range(4)]
    (place / f"v-{ids[0]}.vol").symlink_to(outside)
    os.link(outside, place / f"v-{ids[1]}.vol")
    os.mkfifo(place / f"v-{ids[2]}.vol")
    (place / f"v-{ids[3]}.vol").mkdir()
    (place / "evil\x1b[2J\n").touch()
    report = inspection.inspect_directory(str(place))
    whys = {stranger.name: stranger.why for stranger in report.strangers}
    assert whys[f"v-{ids[0]}.vol"] == "it is a symbolic link"
    assert whys[f"v-{ids[1]}.vol"] == "it has more than one name"
    assert whys[f"v-{ids[2]}.vol"] == whys[f"v-{ids[3]}.vol"] == "it is no regular file"
    assert len(report.volumes) == 1
    assert len(whys) == 5


def test_a_forged_process_file_says_nothing(place: Path) -> None:
    Volume(place)
    for name in (f"p-{'1' * 32}.proc", f"p-{'2' * 32}.proc"):
        (place / name).write_bytes(os.urandom(200))
    report = inspection.inspect_directory(str(place))
    assert [process.pid for process in report.processes] == [None, None]
    assert [leftover.is_dead for leftover in report.leftovers] == [True, True]


# ---- no directories --------------------------------------------------------------------------------------------------


def test_what_is_no_tier_directory_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(path: Path) -> str:
        with pytest.raises(VolumeError):
            list(verification.verify_directory(str(path)))
        return inspection.inspect_directory(str(path)).error

    assert "is not there" in why(tmp_path / "missing")
    (tmp_path / "file").touch()
    assert "is not a directory" in why(tmp_path / "file")
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "is empty" in why(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert "is a symbolic link" in why(tmp_path / "link")
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "other" / "photo.jpg").touch()
    assert "none of stepwell's names" in why(tmp_path / "other")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "written by others" in why(tmp_path / "open")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert f"belongs to user {uid}" in why(tmp_path / "empty")


def test_a_volume_that_is_not_there_cannot_be_listed(place: Path) -> None:
    volume = Volume(place)
    assert len(list(inspection.read_pages(str(place), volume_id=volume.id))) == 4
    with pytest.raises(StepwellUsageError, match="no volume 00"):
        list(inspection.read_pages(str(place), volume_id="0" * 32))


# ---- many pages, trees -----------------------------------------------------------------------------------------------


def test_thousands_of_pages_are_read_in_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.tiers.reader.RECORDS_AT_ONCE", 1000)
    monkeypatch.setattr("stepwell.verification.RECORDS_AT_ONCE", 1000)
    volume = Volume(place, layers=(40, 24), pages=0, slots=5500)
    writer = volume.open(_core.PageShape([40, 24], FINGERPRINT))
    row = np.zeros(64, np.uint8)
    for slot in range(5000):
        key = slot.to_bytes(4, "little")
        writer.write_page(slot, row, key=key, parent_state=0, depth=0, epoch=slot % 3)
    del writer
    slots = volume.report().slots
    assert slots is not None
    assert slots.resident == 5000
    assert slots.epochs == ((0, 1667), (1, 1667), (2, 1666))
    assert slots.never_written == volume.header.slots - 5000
    pages = list(inspection.read_pages(str(place)))
    assert [page.slot for page in pages] == list(range(5000))
    assert [page.key for page in pages] == [slot.to_bytes(4, "little").hex() for slot in range(5000)]
    seen: list[tuple[int, int]] = []
    [check] = verification.verify_directory(str(place), progress=lambda done, total: seen.append((done, total)))
    assert check.right == 5000
    assert seen[-1] == (volume.header.slots, volume.header.slots)


def page_of(key: str, parent: str | None, **others: Any) -> inspection.Page:
    fields: dict[str, Any] = {
        "volume_id": "v", "fingerprint": "f", "slot": 0, "depth": None, "epoch": 0, "kind": 1, "stamp": 0, "nbytes": 1,
    }  # fmt: skip
    return inspection.Page(key=key, parent=parent, **{**fields, **others})


def test_chains_branch_end_and_start_where_pages_do() -> None:
    pages = [
        page_of("b", "a"), page_of("a", ""), page_of("c", "b"), page_of("d", "b"), page_of("e", "d"),
        page_of("y", "x"), page_of("u", None), page_of("a", "", volume_id="again"),
    ]  # fmt: skip
    chains = [(c.level, c.start, c.first_key, c.last_key, c.pages) for c in inspection.page_chains(pages)]
    assert chains == [
        (0, "root", "a", "b", 2),
        (1, "branch", "c", "c", 1),
        (1, "branch", "d", "e", 2),
        (0, "lost parent", "y", "y", 1),
        (0, "unknown parent", "u", "u", 1),
    ]


def test_chains_that_run_in_a_circle_end() -> None:
    pages = [page_of("a", "c"), page_of("b", "a"), page_of("c", "b"), page_of("s", "s"), page_of("t", "b")]
    chains = list(inspection.page_chains(pages))
    assert sum(chain.pages for chain in chains) == 5
    assert {chain.start for chain in chains} == {"circle", "branch"}


def test_chains_may_be_deep() -> None:
    pages = [page_of(str(n), str(n - 1) if n else "") for n in range(20_000)]
    forks = [page_of(f"f{n}", str(n)) for n in range(20_000)]
    assert len(list(inspection.page_chains(pages))) == 1
    assert len(list(inspection.page_chains(pages + forks))) == 2 * 20_000 - 1


# ---- verify ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "equal": (1000,) * 5,
    "one": (777,),
    "opaque": (65536, 65536, 1234),
    "uneven": (300, 1, 5000, 64, 2),
    "uneven of an even sum": (100, 300, 200, 200),
}


@pytest.mark.parametrize("layers", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_flipped_bit_in_each_layer_names_page_and_layer(place: Path, medium: int, layers: tuple[int, ...]) -> None:
    volume = Volume(place, medium=medium, layers=layers)
    check = volume.check()
    assert (check.right, check.layer_bytes) == (4, layers)
    for slot in (0, 2, 3):  # slot 0: before it is known where layers end
        for layer, size in enumerate(layers):
            at = volume.page_at(slot) + sum(layers[:layer]) + size // 2
            volume.flip(volume.pages, at, bit=layer % 8)
            check = volume.check()
            [damaged] = check.damaged
            assert (damaged.slot, damaged.key, damaged.what) == (slot, volume.keys[slot].hex(), f"layer {layer}")
            assert check.right == 3
            assert not check.is_well
            volume.flip(volume.pages, at, bit=layer % 8)


def test_a_flipped_bit_in_layer_checksums_names_the_page(place: Path, medium: int) -> None:
    volume = Volume(place, medium=medium)
    volume.flip(volume.metadata, volume.header.checksums_offset + 4 * len(volume.layers) * 1 + 3)
    [damaged] = volume.check().damaged
    assert (damaged.slot, damaged.key, damaged.what) == (1, volume.keys[1].hex(), "its layer checksums")


def test_several_wrong_layers_are_named_together(place: Path) -> None:
    volume = Volume(place, layers=(100,) * 12)
    for layer in range(12):
        volume.flip(volume.pages, volume.page_at(1) + 100 * layer)
    [damaged] = volume.check().damaged
    assert damaged.what == "layers 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def test_the_only_page_is_damaged_whatever_its_layout_is(place: Path) -> None:
    volume = Volume(place, layers=(300, 1, 5000), pages=1)
    volume.flip(volume.pages, volume.page_at(0) + 400)
    check = volume.check()
    assert [page.what for page in check.damaged] == ["no layout of layers fits its checksums"]
    assert check.layer_bytes == ()


def test_a_page_of_another_key_in_its_place_is_damaged(place: Path) -> None:
    volume = Volume(place)
    data = volume.pages.read_bytes()
    other = data[volume.page_at(1) : volume.page_at(1) + 2000]
    volume.patch(volume.pages, volume.page_at(0), other)
    assert [page.slot for page in volume.check().damaged] == [0]


class Saver:
    """A process that saves, loads and evicts without end (store_child.py)."""

    def __init__(self, directories: Directories) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "store_child.py"), "zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(f"1 {directories.shared} {directories.disk}\n")
        self._process.stdin.flush()
        self.pid = 0
        self.wait_for(20)

    def wait_for(self, saves: int) -> None:
        """Return when it has saved so many times more."""
        assert self._process.stdout is not None
        while saves:
            words = self._process.stdout.readline().split()
            assert words, "the saver has gone"
            assert words[0] != "ended", words
            if words[0] == "pid":
                self.pid = int(words[1])
            else:
                saves -= 1

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


def test_pages_that_a_living_process_rewrites_are_never_damaged(directories: Directories) -> None:
    saver = Saver(directories)
    try:
        read = 0
        for directory in (directories.shared, directories.disk) * 15:
            saver.wait_for(10)
            report = inspection.inspect_directory(str(directory))
            assert report.is_well, report
            assert [v.lock.is_held for v in report.volumes] == [True] * len(report.volumes)
            for check in verification.verify_directory(str(directory)):
                assert check.is_well, check
                read += check.right
        assert read > 100
        saver.wait_for(20)  # and it lives on
    finally:
        saver.close()
    for directory in (directories.shared, directories.disk):
        for check in verification.verify_directory(str(directory)):
            assert check.is_well
            assert check.changed == 0


# ---- the command line ------------------------------------------------------------------------------------------------


def test_exit_codes_say_whether_all_is_well(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume = Volume(place)
    assert main(["inspect", str(place), "--pages", "--tree"]) == 0
    out = capsys.readouterr().out
    assert volume.id in out
    assert volume.keys[3].hex() in out
    assert "4 pages at depth 0 (root)" in out
    assert main(["verify", str(place)]) == 0
    assert "4 pages right" in capsys.readouterr().out
    volume.flip(volume.pages, volume.page_at(2))
    assert main(["inspect", str(place)]) == 0  # records are right
    assert main(["verify", str(place)]) == 1
    assert f"damaged: slot 2: layer 0: key {volume.keys[2].hex()}" in capsys.readouterr().out
    volume.flip(volume.metadata, volume.record_at(1) + 40)
    assert main(["inspect", str(place)]) == 1
    assert main(["inspect", str(place / "missing")]) == 1
    assert main(["verify", str(place / "missing")]) == 1
    assert main(["gc", str(place / "missing")]) == 1
    assert "missing is not there" in capsys.readouterr().out


def test_a_volume_is_one_line_unless_more_is_asked_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume = Volume(place)
    assert main(["inspect", str(place)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "  volume " in line or line.startswith("    ")]
    assert len(lines) == 1
    assert lines[0].count(volume.id) == 1
    assert ": orphan, " in lines[0]
    assert "4 of " in lines[0]
    assert main(["inspect", str(place), "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "never written" in said
    assert "born " in said
    volume.flip(volume.metadata, volume.record_at(1) + 40)
    assert main(["inspect", str(place)]) == 1
    assert "3 of " in (said := capsys.readouterr().out)
    assert "1 damaged records" in said
    volume.write_header(bytes(4096))
    assert main(["inspect", str(place)]) == 1
    assert "damaged: " in (said := capsys.readouterr().out)
    assert said.count(volume.id) == 1


def test_json_is_one_list_of_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume = Volume(place)
    assert main(["inspect", str(place), str(place / "no"), "--json", "--pages", "--tree"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first["is_well"]
    assert [page["key"] for page in first["pages"]] == [key.hex() for key in volume.keys]
    assert [run["pages"] for run in first["chains"]] == [4]
    assert "is not there" in second["error"]
    assert main(["verify", str(place), "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)
    assert result["volumes"][0]["right"] == 4


def test_a_configuration_names_the_model(
    open_rig: OpenRig, directories: Directories, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = open_rig(disk=0)
    rig.save(chain(0, 3))
    rig.close()
    config = tmp_path / "stepwell.toml"
    config.write_text(
        '[geometry]\nmodel = "stamped"\nrevision = "1"\nlayers = 2\nkv_heads = 2\nhead_dim = 32\ndtype = "uint8"\n'
        f"page_tokens = {PAGE_TOKENS}\n"
    )
    assert main(["inspect", str(directories.shared), "--config", str(config)]) == 0
    assert f"model stamped 1 ({GEOMETRY.fingerprint().hex()[:16]}): 3 pages, 12 tokens" in capsys.readouterr().out
    config.write_text("[geometry\n")
    assert main(["inspect", str(directories.shared), "--config", str(config)]) == 2


def test_a_reader_that_stops_early_is_no_error(place: Path) -> None:
    Volume(place, layers=(40, 24), pages=200, slots=300)
    command = [sys.executable, "-m", "stepwell.cli", "inspect", "--pages", str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in (0, 1)


def test_the_page_about_directories_runs(place: Path) -> None:
    Volume(place)
    text = (HERE.parent / "docs" / "directories.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0].replace("/dev/shm/stepwell", str(place))
    names: dict[str, Any] = {}
    exec(code, names)
    assert (len(names["pages"]), names["checks"][0].right, names["removed"].volumes) == (4, 4, ())
