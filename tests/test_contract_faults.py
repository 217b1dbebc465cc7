"""What the contract is made of: FaultyTier, file calls that fail, a place that is damaged, threads, the machine."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.errors import StepwellUsageError
from stepwell.testing.contract import TierContract
from stepwell.testing.crowd import run_together
from stepwell.testing.faulty import FaultyTier, TierCrashedError, TierFault, scripted, seeded
from stepwell.testing.file_calls import before_call, fail_each_call, files_end_at
from stepwell.testing.place import Place
from stepwell.testing.tier import Full, Tier, missing_parts, page_checksum
from stepwell.testing.tier_machine import run_tier_machine
from stepwell.testing.trial import Page
from tier_kit import changed, readme_tier, tier_class

DirectoryTier = tier_class(readme_tier())
ONE = Page(1, 4096)


def put(tier: Tier, page: Page = ONE) -> int:
    slots = tier.claim([page.key])
    assert not isinstance(slots, Full)
    tier.write(slots[0], page.data)
    tier.commit(slots[0], page.checksum)
    return slots[0]


# ---- FaultyTier


def test_a_faulty_tier_without_a_fault_is_the_tier(tmp_path: Path) -> None:
    tier = FaultyTier(DirectoryTier(tmp_path), scripted())  # type: ignore[call-arg]
    assert missing_parts(tier) == []
    assert tier.read(put(tier)) == ONE.data
    assert tier.faults_met == 0


def test_an_error_comes_at_its_call_and_nothing_is_done(tmp_path: Path) -> None:
    fault = TierFault("commit", "error", nth=2, error=errno.ENOSPC)
    tier = FaultyTier(DirectoryTier(tmp_path), scripted(fault))  # type: ignore[call-arg]
    put(tier)
    with pytest.raises(OSError, match=r"No space left on device \(injected: commit\)") as raised:
        put(tier, Page(2, 4096))
    assert raised.value.errno == errno.ENOSPC
    assert [record.key for record in tier.recover()] == [ONE.key]
    put(tier, Page(3, 4096))
    assert tier.faults_met == 1


def test_a_short_write_leaves_half_a_page_and_says_so(tmp_path: Path) -> None:
    tier = FaultyTier(DirectoryTier(tmp_path), scripted(TierFault("write", "short", nth=1)))  # type: ignore[call-arg]
    slots = tier.claim([ONE.key])
    assert not isinstance(slots, Full)
    with pytest.raises(OSError, match="in the middle of a write"):
        tier.write(slots[0], ONE.data)
    tier.commit(slots[0], page_checksum(ONE.key, ONE.data[:2048] + bytes(2048)))
    assert tier.read(slots[0]) == ONE.data[:2048] + bytes(2048)


def test_a_corrupt_write_says_nothing_and_is_not_served(tmp_path: Path) -> None:
    tier = FaultyTier(DirectoryTier(tmp_path), scripted(TierFault("write", "corrupt")))  # type: ignore[call-arg]
    assert tier.read(put(tier)) is None


def test_a_delay_waits_before_the_call(tmp_path: Path) -> None:
    inner = DirectoryTier(tmp_path)  # type: ignore[call-arg]
    seen: list[int] = []
    delay = TierFault("commit", "delay")
    tier = FaultyTier(inner, scripted(delay), wait=lambda: seen.append(len(inner.recover())))
    put(tier)
    assert seen == [0]
    assert len(inner.recover()) == 1


@pytest.mark.parametrize(("action", "pages"), [("crash", 0), ("crash_after", 1)])
def test_a_crash_lets_nothing_through_any_more(action: str, pages: int, tmp_path: Path) -> None:
    inner = DirectoryTier(tmp_path)  # type: ignore[call-arg]
    tier = FaultyTier(inner, scripted(TierFault("commit", action)))  # type: ignore[arg-type]
    with pytest.raises(TierCrashedError, match="commit: the tier crashed"):
        put(tier)
    with pytest.raises(TierCrashedError, match="make another one at its place"):
        tier.recover()
    assert len(inner.recover()) == pages


def test_the_same_seed_gives_the_same_faults() -> None:
    calls = ["claim", "write", "commit", "read"] * 50

    def drawn(seed: int) -> list[TierFault | None]:
        choose = seeded(seed, rate=0.3)
        return [choose(call) for call in calls]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 30 < sum(fault is not None for fault in drawn(1)) < 90
    assert {fault.call for fault in drawn(1) if fault is not None and fault.action == "short"} == {"write"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TierFault("comit", "error"),  # type: ignore[arg-type]
        lambda: TierFault("commit", "eror"),  # type: ignore[arg-type]
        lambda: TierFault("commit", "error", nth=-1),
        lambda: TierFault("commit", "short"),
        lambda: TierFault("free", "corrupt"),
        lambda: seeded(1, rate=1.5),
        lambda: seeded(1, rate=0.5, actions=("eror",)),  # type: ignore[arg-type]
    ],
)
def test_a_fault_that_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(StepwellUsageError):
        make()


def run_suite(make: Callable[[Path], Tier], name: str) -> None:
    """Run one test of the suite over a tier."""

    class Suite(TierContract):
        def make(self, directory: Path) -> Tier:
            return make(directory)

    suite = Suite()
    suite.setup_method()
    try:
        getattr(suite, name)()
    finally:
        suite.teardown_method()


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (
            TierFault("read", "corrupt", nth=3),
            "test_what_was_committed_is_read_back",
            "wrong bytes were read, 1 of 4096",
        ),
        (TierFault("write", "corrupt", nth=3), "test_what_was_committed_is_read_back", "is not served"),
        (
            TierFault("read", "corrupt", nth=7),
            "test_threads_that_write_read_and_free_never_see_what_is_not_so",
            "wrong bytes",
        ),
        (
            TierFault("read", "corrupt"),
            "test_calls_in_any_order_do_what_the_model_says",
            "wrong bytes were read",
        ),
    ],
)
def test_the_suite_finds_a_tier_that_lies(fault: TierFault, name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_suite(lambda directory: FaultyTier(DirectoryTier(directory), scripted(fault)), name)  # type: ignore[call-arg]


def test_a_maker_of_something_else_is_told_what_is_missing() -> None:
    with pytest.raises(
        StepwellUsageError, match="not a Tier: it has no abort, capacity_pages, claim, close, commit, free"
    ):
        run_suite(lambda _: object(), "test_a_new_tier_is_empty_and_has_room")  # type: ignore[arg-type,return-value]


# ---- file calls


def test_each_file_call_of_a_block_fails_once(tmp_path: Path) -> None:
    def work() -> None:
        with open(tmp_path / "new", "wb") as file:
            file.write(b"page")
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp_path / "new", tmp_path / "page")

    met = [(failure.fails(work), failure.reached) for failure in fail_each_call()]
    assert met == [(True, name) for name in ("open", "write", "flush", "fsync", "__exit__", "replace")] + [(False, "")]


def test_a_close_that_fails_has_closed(tmp_path: Path) -> None:
    files = []

    def work() -> None:
        files.append(open(tmp_path / "page", "wb"))  # noqa: SIM115 it is closed below, or by the failure
        files[-1].close()

    assert [failure.fails(work) for failure in fail_each_call()] == [True, True, False]
    assert [file.closed for file in files] == [True, True]


def test_what_is_there_before_a_file_call_is_seen(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with before_call(2, lambda: seen.append(sorted(path.name for path in tmp_path.iterdir()))) as calls:
        (tmp_path / "old").touch()
        os.replace(tmp_path / "old", tmp_path / "new")
    assert calls.reached in ("replace", "close")
    assert seen == [["old"]]


def test_what_is_written_across_the_end_is_cut_short_in_the_block_alone(tmp_path: Path) -> None:
    file = os.open(tmp_path / "page", os.O_RDWR | os.O_CREAT)
    try:
        with files_end_at(6):
            assert os.pwrite(file, b"page", 4) == 2
            with pytest.raises(OSError, match="File too large"):
                os.pwrite(file, b"page", 6)
        assert os.pwrite(file, b"page", 4) == 4
    finally:
        os.close(file)


def test_only_the_calling_thread_is_watched_and_only_in_the_block(tmp_path: Path) -> None:
    def watch(*_: object) -> None:
        return

    def elsewhere() -> None:
        thread = threading.Thread(target=(tmp_path / "page").write_bytes, args=(b"page",))
        thread.start()
        thread.join()

    sys.setprofile(watch)
    try:
        [failure] = fail_each_call()
        assert not failure.reached
        [failure] = [failure for failure in fail_each_call() if not failure.fails(elsewhere)]
        assert not failure.reached
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(None)
    assert (tmp_path / "page").read_bytes() == b"page"


# ---- a place


def test_a_place_goes_back_to_what_was_kept(tmp_path: Path) -> None:
    with Place(tmp_path) as place:
        (place.directory / "kept").write_text("as it was")
        kept = place.keep()
        (place.directory / "kept").write_text("as it became")
        (place.directory / "later").touch()
        place.go_back(kept)
        assert [path.name for path in place.directory.iterdir()] == ["kept"]
        assert (place.directory / "kept").read_text() == "as it was"
        assert place.directory.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_pages_in_files_are_damaged_exchanged_and_cut(tmp_path: Path) -> None:
    first, second = Page(1, 64).data, Page(2, 64).data
    with Place(tmp_path) as place:
        one, two = place.directory / "one", place.directory / "two"
        one.write_bytes(b"head" + first + b"tail")
        two.write_bytes(second + first)
        assert place.exchange(first, second)
        assert one.read_bytes() == b"head" + second + b"tail"
        assert two.read_bytes() == first + second
        assert place.damage(first, at=63)
        assert two.read_bytes() == first[:63] + bytes([first[63] ^ 0x10]) + second
        assert place.cut(second)
        assert (one.stat().st_size, two.stat().st_size) == (4 + 32, 64 + 32)
        assert not place.damage(Page(3, 64).data, at=0)
        assert not place.exchange(first, second)


# ---- threads


def test_a_thread_that_fails_ends_the_others_and_is_told() -> None:
    def fails(_: threading.Event) -> None:
        raise RuntimeError("it failed")

    def goes_on(over: threading.Event) -> None:
        assert over.wait(60)

    with pytest.raises(RuntimeError, match="it failed"):
        run_together([goes_on, fails, goes_on], what="threads")


# ---- the machine


def test_what_the_machine_finds_is_told_in_a_few_calls() -> None:
    unlink = '        self.path(slot, "page").unlink(missing_ok=True)\n'
    forgetful = tier_class(changed(readme_tier(), (unlink, "")))
    with pytest.raises(AssertionError, match="was recovered; committed were") as raised:
        run_tier_machine(forgetful, parent=Path("/dev/shm"), may_fail=False, examples=200)  # type: ignore[arg-type]
    calls = [line for line in raised.value.__notes__ if "state." in line]
    told = [line for line in calls if "agrees" not in line and "teardown" not in line]
    # Four will do; where shrinking runs out of its time, on a busy machine, one or two may be left over.
    assert 4 <= len(told) <= 6, told
    names = [line.partition("state.")[2].partition("(")[0] for line in told]
    assert (names[0], names[-1]) == ("start", "restart")
    assert "put" in names[: names.index("free")]
