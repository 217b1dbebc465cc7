"""The weights' epoch: which name holds when, on one rank and on several, without SGLang."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from stepwell import StepwellUsageError
from stepwell.adapters.sglang.checkpoint import WeightsSource
from stepwell.adapters.sglang.weights import Change, OneRank, WeightsEpoch

ALONE = OneRank(can_agree=True)
NOWHERE = WeightsSource("/nowhere", load_format="dummy")


def epoch_at_start(weights_id: str = "w") -> WeightsEpoch:
    epoch = WeightsEpoch()
    epoch.at_start(weights_id, NOWHERE)
    return epoch


def update(epoch: WeightsEpoch, version: str | None, *, is_done: bool = True, is_flushed: bool = True) -> str:
    """Change the weights as SGLang does from disk; return the epoch while they changed."""
    with epoch.change(ALONE) as change:
        meanwhile = epoch.current
        if is_flushed:
            epoch.flushed()
        change.finish(is_done=is_done, version=version)
    return meanwhile


def of_version(version: str, weights_id: str = "w") -> str:
    epoch = epoch_at_start(weights_id)
    update(epoch, version)
    assert not epoch.is_random
    return epoch.current


def session(epoch: WeightsEpoch, *versions: str | None, is_whole: bool = True, is_done: bool = True) -> None:
    with epoch.session_begin(ALONE, is_whole=is_whole) as change:
        change.finish(is_done=True, version=None)
    for version in versions:
        with epoch.part(ALONE) as change:
            change.finish(is_done=is_done, version=version)
    with epoch.session_end(ALONE) as change:
        change.finish(is_done=True, version=None)


def fail_in(changing: AbstractContextManager[Change]) -> None:
    """Report a change as done, and raise: after what was reported, something went wrong."""
    try:
        with changing as change:
            change.finish(is_done=True, version="v1")
            raise ZeroDivisionError
    except ZeroDivisionError:
        return
    pytest.fail("what the body raised was swallowed")


@pytest.fixture
def checkpoint(tmp_path: Path) -> WeightsSource:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return WeightsSource(str(tmp_path))


def after(source: WeightsSource) -> float:
    """Return a time after everything in a checkpoint was written."""
    return max(entry.stat().st_ctime for entry in [Path(source.path), *Path(source.path).iterdir()]) + 1


# ---- at the start ----------------------------------------------------------------------------------------------------


def test_before_a_storage_says_what_the_weights_are_the_epoch_is_random() -> None:
    assert WeightsEpoch().is_random
    assert WeightsEpoch().current != WeightsEpoch().current


def test_the_same_id_is_the_same_epoch_in_another_process_and_another_id_another() -> None:
    assert epoch_at_start("a").current == epoch_at_start("a").current != epoch_at_start("b").current


def test_without_an_id_the_files_name_the_weights(checkpoint: WeightsSource) -> None:
    def start() -> str:
        return WeightsEpoch(began_at=after(checkpoint)).at_start(None, checkpoint)

    first = start()
    assert first.startswith("files-")
    assert start() == first
    (Path(checkpoint.path) / "model.safetensors").write_bytes(b"heavier weights")
    assert start() != first


def test_an_id_is_never_the_epoch_of_files(checkpoint: WeightsSource) -> None:
    files = WeightsEpoch(began_at=after(checkpoint)).at_start(None, checkpoint)
    assert epoch_at_start(files).current != files


def test_files_that_changed_after_the_process_began_name_nothing(checkpoint: WeightsSource) -> None:
    epoch = WeightsEpoch(began_at=after(checkpoint) - 2)
    assert epoch.at_start(None, checkpoint).startswith("random-")
    update(epoch, "v1")
    assert epoch.is_random, "a version is mixed with the epoch at the start, and there is none"


def test_by_default_a_process_began_when_it_did(checkpoint: WeightsSource) -> None:
    os.utime(Path(checkpoint.path) / "model.safetensors", (1, 1))  # the time of change is what no tool sets
    assert WeightsEpoch().at_start(None, checkpoint).startswith("random-")
    assert WeightsEpoch()._began_at < time.time() - 0.01


def test_weights_without_files_need_an_id() -> None:
    with pytest.raises(StepwellUsageError, match=r"load_format 'dummy'.*weights_id"):
        WeightsEpoch().at_start(None, NOWHERE)
    assert WeightsEpoch().at_start("mine", NOWHERE).startswith("id-")


def test_a_second_storage_finds_the_same_epoch() -> None:
    epoch = epoch_at_start()
    told: list[str] = []
    epoch.follow(told.append)
    assert epoch.at_start("w", NOWHERE) == epoch.current
    assert told == []


# ---- changes ---------------------------------------------------------------------------------------------------------


def test_storages_have_switched_before_the_weights_change() -> None:
    epoch = epoch_at_start()
    start = epoch.current
    told: list[tuple[str, int]] = []
    following = epoch.follow(lambda name: told.append((name, threading.get_ident())))
    with epoch.change(ALONE) as change:
        assert told == [(epoch.current, threading.get_ident())]
        assert epoch.current != start
        assert epoch.is_random
        assert following.is_current
        change.finish(is_done=True, version=None)


def test_each_change_has_a_name_of_its_own() -> None:
    epoch = epoch_at_start()
    names = {epoch.current, *(update(epoch, None) for _ in range(3)), epoch.current}
    assert len(names) == 4
    assert epoch.is_random


def test_a_version_names_the_weights_and_is_mixed_with_the_start() -> None:
    epoch = epoch_at_start()
    start = epoch.current
    meanwhile = update(epoch, "v1")
    assert epoch.current not in (start, meanwhile)
    assert epoch.current.startswith("version-")
    assert of_version("v1") == epoch.current, "another process that comes to the same weights finds the pages"
    assert len({of_version("v1"), of_version("v2"), of_version("v1", "other")}) == 3


def test_without_an_id_that_versions_count_from_they_name_nothing(checkpoint: WeightsSource) -> None:
    """Two training runs on one base both call what they send "1"."""
    epoch = WeightsEpoch(began_at=after(checkpoint))
    assert epoch.at_start(None, checkpoint).startswith("files-")
    assert update(epoch, "1").startswith("random-")


def test_a_failed_change_stays_random_and_its_version_is_free() -> None:
    epoch = epoch_at_start()
    update(epoch, "v1", is_done=False)
    assert epoch.is_random
    update(epoch, "v1")
    assert epoch.current == of_version("v1")


def test_a_change_that_raises_stays_random_and_asks_nobody() -> None:
    class Silent(OneRank):
        def is_true_for_all(self, flag: bool) -> bool:
            raise AssertionError("a rank that raises must not wait for others")

    epoch = epoch_at_start()
    fail_in(epoch.change(Silent(can_agree=True)))
    assert epoch.is_random
    epoch.flushed()
    assert epoch.is_random
    update(epoch, "v1")
    assert epoch.current == of_version("v1"), "and the next change is one like any other"


def test_a_version_that_comes_back_stays_random() -> None:
    epoch = epoch_at_start()
    update(epoch, "v1")
    update(epoch, "v2")
    update(epoch, "v1")
    assert epoch.is_random
    update(epoch, "v3")
    assert epoch.current == of_version("v3")


def test_a_version_that_named_the_weights_before_stays_random() -> None:
    epoch = epoch_at_start()
    start = epoch.current
    epoch.label("v1")
    assert epoch.current == start, "a name alone changes no weights"
    update(epoch, "v1")
    assert epoch.is_random


def test_ranks_that_cannot_agree_never_take_a_version() -> None:
    epoch = epoch_at_start()
    with epoch.change(OneRank(can_agree=False)) as change:
        epoch.flushed()
        change.finish(is_done=True, version="v1")
    assert epoch.is_random


def test_changes_that_come_unasked_are_random_and_end_what_waited() -> None:
    epoch = epoch_at_start()
    update(epoch, "v1", is_flushed=False)
    epoch.changed()
    epoch.flushed()
    assert epoch.is_random


def test_what_a_change_does_to_the_runners_is_not_another_change() -> None:
    epoch = epoch_at_start()
    with epoch.change(ALONE) as change:
        meanwhile = epoch.current
        epoch.changed()
        assert epoch.current == meanwhile
        epoch.flushed()
        change.finish(is_done=True, version="v1")
    assert epoch.current == of_version("v1")


# ---- SGLang's own cache ----------------------------------------------------------------------------------------------


def test_a_version_waits_until_the_old_weights_pages_are_gone() -> None:
    epoch = epoch_at_start()
    update(epoch, "v1", is_flushed=False)
    assert epoch.is_random
    epoch.flushed()
    assert epoch.current == of_version("v1")


def test_a_flush_before_the_change_does_not_count() -> None:
    epoch = epoch_at_start()
    epoch.flushed()
    update(epoch, "v1", is_flushed=False)
    assert epoch.is_random


def test_a_flush_changes_no_other_epoch() -> None:
    epoch = epoch_at_start()
    start = epoch.current
    epoch.flushed()
    assert epoch.current == start
    update(epoch, None, is_flushed=True)
    meanwhile = epoch.current
    epoch.flushed()
    assert epoch.current == meanwhile


def test_what_was_kept_between_a_change_and_the_flush_is_not_found_after_it() -> None:
    """Backups that go on over an update keep pages of the weights before under the random name (weight_updater.py:120:
    SGLang refuses to flush then, and asks for a flush later)."""
    epoch = epoch_at_start()
    meanwhile = update(epoch, None, is_flushed=False)
    told: list[str] = []
    epoch.follow(told.append)
    epoch.flushed()
    assert epoch.is_random
    assert epoch.current != meanwhile
    assert told == [epoch.current]


def test_all_ranks_have_one_name_after_a_flush() -> None:
    def work(rank: Rank, number: int, epoch: WeightsEpoch) -> None:
        with epoch.change(rank):
            pass
        epoch.flushed()

    assert len(set(names_of(on_ranks(3, work)))) == 1


def test_only_the_last_version_waits() -> None:
    epoch = epoch_at_start()
    update(epoch, "v1", is_flushed=False)
    update(epoch, "v2", is_flushed=False)
    epoch.flushed()
    assert epoch.current == of_version("v2")


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_has_its_version_once_it_has_ended_and_the_cache_is_flushed() -> None:
    epoch = epoch_at_start()
    session(epoch, "v1", "v1", "v1")
    assert epoch.is_random
    epoch.flushed()
    assert epoch.current == of_version("v1")


def test_within_a_session_the_epoch_is_random_and_each_part_has_its_own() -> None:
    epoch = epoch_at_start()
    names = [epoch.current]
    told: list[str] = []
    epoch.follow(told.append)
    with epoch.session_begin(ALONE, is_whole=True) as change:
        names.append(epoch.current)
        change.finish(is_done=True, version=None)
    for _ in range(2):
        with epoch.part(ALONE) as change:
            names.append(epoch.current)
            epoch.flushed()
            change.finish(is_done=True, version="v1")
        assert epoch.current == names[-1]
    with epoch.session_end(ALONE) as change:
        names.append(epoch.current)
        change.finish(is_done=True, version=None)
    assert len(set(names)) == 5
    assert told == names[1:]
    assert epoch.is_random, "the end changes weights too: a flush before it does not count"


@pytest.mark.parametrize(
    "versions", [(), (None,), ("v1", None), ("v1", "v2")], ids=["no part (RDMA)", "none", "some", "several"]
)
def test_a_session_without_one_version_stays_random(versions: tuple[str | None, ...]) -> None:
    epoch = epoch_at_start()
    session(epoch, *versions)
    epoch.flushed()
    assert epoch.is_random


def test_a_session_with_a_failed_part_stays_random() -> None:
    epoch = epoch_at_start()
    with epoch.session_begin(ALONE, is_whole=True) as change:
        change.finish(is_done=True, version=None)
    for is_done in (True, False, True):
        with epoch.part(ALONE) as change:
            change.finish(is_done=is_done, version="v1")
    with epoch.session_end(ALONE) as change:
        change.finish(is_done=True, version=None)
    epoch.flushed()
    assert epoch.is_random
    session(epoch, "v1")
    epoch.flushed()
    assert epoch.current == of_version("v1"), "the next session starts anew"


@pytest.mark.parametrize("disturb", ["raise", "unasked", "whole update", "silent change"])
def test_a_session_in_which_something_else_happened_stays_random(disturb: str) -> None:
    epoch = epoch_at_start()
    with epoch.session_begin(ALONE, is_whole=True) as change:
        change.finish(is_done=True, version=None)
    with epoch.part(ALONE) as change:
        change.finish(is_done=True, version="v1")
    if disturb == "raise":
        fail_in(epoch.part(ALONE))
    elif disturb == "unasked":
        epoch.changed()
    elif disturb == "whole update":
        update(epoch, "v2")
        assert epoch.is_random, "a session is open, and its weights are in pieces"
    else:
        with epoch.change(ALONE):
            pass
    with epoch.session_end(ALONE) as change:
        change.finish(is_done=True, version=None)
    epoch.flushed()
    assert epoch.is_random


def test_a_session_about_some_of_the_weights_has_no_version() -> None:
    epoch = epoch_at_start()
    session(epoch, "v1", is_whole=False)
    epoch.flushed()
    assert epoch.is_random


def test_a_session_that_sglang_refuses_to_open_leaves_the_open_one_alone() -> None:
    epoch = epoch_at_start()
    with epoch.session_begin(ALONE, is_whole=True) as change:
        change.finish(is_done=True, version=None)
    with epoch.session_begin(ALONE, is_whole=True) as change:
        change.finish(is_done=False, version=None)
    with epoch.part(ALONE) as change:
        change.finish(is_done=True, version="v1")
    with epoch.session_end(ALONE) as change:
        change.finish(is_done=True, version=None)
    epoch.flushed()
    assert epoch.current == of_version("v1")


def test_parts_and_ends_without_a_session_have_no_version() -> None:
    epoch = epoch_at_start()
    with epoch.part(ALONE) as change:
        epoch.flushed()
        change.finish(is_done=True, version="v1")
    assert epoch.is_random
    with epoch.session_end(ALONE) as change:
        epoch.flushed()
        change.finish(is_done=False, version=None)
    assert epoch.is_random


# ---- storages --------------------------------------------------------------------------------------------------------


def test_a_storage_that_cannot_switch_is_shut_until_it_can() -> None:
    epoch = epoch_at_start()
    failures = iter([True, False])

    def switch(name: str) -> None:
        if next(failures):
            raise OSError("no")

    following = epoch.follow(switch)
    assert following.is_current
    update(epoch, None)
    assert not following.is_current
    update(epoch, None)
    assert following.is_current


def test_a_storage_that_could_not_switch_is_shut_also_when_an_old_name_comes_back() -> None:
    epoch = epoch_at_start("a")

    def fail(name: str) -> None:
        raise OSError(name)

    following = epoch.follow(fail)
    epoch.at_start("b", NOWHERE)
    epoch.at_start("a", NOWHERE)
    assert not following.is_current


def test_one_that_cannot_switch_keeps_no_other_from_it() -> None:
    epoch = epoch_at_start()
    told: list[str] = []

    def fail(name: str) -> None:
        raise RuntimeError(name)

    epoch.follow(fail)
    epoch.follow(told.append)
    assert update(epoch, None) == told[0] == epoch.current


def test_a_storage_is_not_current_while_others_are_told() -> None:
    epoch = epoch_at_start()
    seen: list[bool] = []
    epoch.follow(lambda name: seen.append(second.is_current))
    second = epoch.follow(lambda name: None)
    update(epoch, None)
    assert seen == [False]
    assert second.is_current


def test_a_storage_that_has_left_is_told_nothing() -> None:
    epoch = epoch_at_start()
    told: list[str] = []
    leave = epoch.follow(told.append)
    leave()
    leave()
    update(epoch, None)
    assert told == []


def test_a_storage_opened_during_an_update_gets_the_random_epoch_and_then_the_version() -> None:
    epoch = WeightsEpoch()
    told: list[str] = []
    with epoch.change(ALONE) as change:
        epoch.follow(told.append)
        assert epoch.at_start("w", NOWHERE) == epoch.current
        assert epoch.is_random
        epoch.flushed()
        change.finish(is_done=True, version="v1")
    assert told == [of_version("v1")]


def test_a_storage_opened_after_an_update_gets_the_random_epoch() -> None:
    epoch = WeightsEpoch()
    update(epoch, "v1")
    assert epoch.at_start("w", NOWHERE) == epoch.current
    assert epoch.is_random, "the weights at the start are known now, but these are others"
    update(epoch, "v2")
    assert epoch.current == of_version("v2")


def test_nobody_is_told_between_a_change_and_its_storages() -> None:
    """Opening on another thread waits while a change is being told, and finds what it brought."""
    epoch = epoch_at_start()
    is_telling, may_go_on = threading.Event(), threading.Event()

    def switch(name: str) -> None:
        is_telling.set()
        assert may_go_on.wait(60)

    epoch.follow(switch)
    with ThreadPoolExecutor(2) as pool:
        changing = pool.submit(update, epoch, None)
        assert is_telling.wait(60)
        assert epoch.current.startswith("random-"), "read without the lock"
        opening = pool.submit(epoch.at_start, "w", NOWHERE)
        assert not opening.done()
        may_go_on.set()
        assert opening.result(60) == changing.result(60) == epoch.current


# ---- ranks -----------------------------------------------------------------------------------------------------------


class Gang:
    """Ranks in threads that meet, as those of a group do."""

    def __init__(self, size: int) -> None:
        self._meet = threading.Barrier(size, timeout=60)
        self._said: list[object] = [None] * size

    def rank(self, index: int) -> Rank:
        return Rank(self, index)

    def say(self, index: int, what: object) -> list[object]:
        self._said[index] = what
        self._meet.wait()
        said = list(self._said)
        self._meet.wait()
        return said


class Rank:
    can_agree = True

    def __init__(self, gang: Gang, index: int) -> None:
        self._gang = gang
        self._index = index

    def share(self, name: str) -> str:
        return str(self._gang.say(self._index, name)[0])

    def is_true_for_all(self, flag: bool) -> bool:
        return all(self._gang.say(self._index, flag))


def on_ranks(size: int, work: Callable[[Rank, int, WeightsEpoch], None]) -> list[WeightsEpoch]:
    """Do some work on each of several ranks at once; return their epochs."""
    gang, epochs = Gang(size), [epoch_at_start() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(work, gang.rank(index), index, epochs[index]) for index in range(size)]:
            done.result(60)
    return epochs


def names_of(epochs: list[WeightsEpoch]) -> Iterator[str]:
    return (epoch.current for epoch in epochs)


def test_all_ranks_draw_one_name() -> None:
    def work(rank: Rank, index: int, epoch: WeightsEpoch) -> None:
        with epoch.change(rank) as change:
            change.finish(is_done=True, version=None)

    names = set(names_of(on_ranks(3, work)))
    assert len(names) == 1
    assert re.fullmatch("random-[0-9a-f]{32}", names.pop())


def test_all_ranks_take_the_version() -> None:
    def work(rank: Rank, index: int, epoch: WeightsEpoch) -> None:
        with epoch.change(rank) as change:
            epoch.flushed()
            change.finish(is_done=True, version="v1")

    assert set(names_of(on_ranks(3, work))) == {of_version("v1")}


@pytest.mark.parametrize("reason", ["failed", "used before", "no start", "another change in a session"])
def test_where_one_rank_cannot_take_the_version_none_does(reason: str) -> None:
    def work(rank: Rank, index: int, epoch: WeightsEpoch) -> None:
        is_odd = index == 1
        if reason == "used before" and is_odd:
            epoch.label("v1")
        if reason == "no start" and is_odd:
            epoch = WeightsEpoch()
        if reason == "another change in a session":
            with epoch.session_begin(rank, is_whole=True) as change:
                change.finish(is_done=True, version=None)
            with epoch.part(rank) as change:
                change.finish(is_done=True, version="v1")
            if is_odd:
                epoch.changed()  # of its own: the others hear nothing of it until the end
            with epoch.session_end(rank) as change:
                change.finish(is_done=True, version=None)
        else:
            with epoch.change(rank) as change:
                change.finish(is_done=not (reason == "failed" and is_odd), version="v1")
        epoch.flushed()
        assert epoch.is_random

    on_ranks(3, work)


def test_a_rank_that_has_lost_the_others_goes_on_alone_under_a_random_name() -> None:
    class Lost:
        can_agree = True

        def share(self, name: str) -> str:
            raise RuntimeError("connection closed by peer")

        def is_true_for_all(self, flag: bool) -> bool:
            raise RuntimeError("connection closed by peer")

    epoch = epoch_at_start()
    start = epoch.current
    with epoch.change(Lost()) as change:
        assert epoch.current != start
        assert epoch.is_random
        change.finish(is_done=True, version="v1")
    epoch.flushed()
    assert epoch.is_random


def test_a_change_that_reports_nothing_has_failed() -> None:
    assert not Change().is_done
    epoch = epoch_at_start()
    with epoch.change(ALONE):
        epoch.flushed()
    assert epoch.is_random


def test_only_a_plug_in_makes_it_watched() -> None:
    epoch = WeightsEpoch()
    assert not epoch.is_watched
    epoch.watch(lambda: True)
    assert epoch.is_watched
