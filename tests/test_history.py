"""What threads do with a store has an order that the model of a page allows; and histories that have none are found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from stepwell.index import ClaimOutcome, Tier
from stepwell.store import PageStore
from stepwell.testing import hooks
from stepwell.testing.history import (
    TORN,
    Cleared,
    Forgot,
    Kept,
    Loaded,
    LoadedKeys,
    Matched,
    Probed,
    Record,
    Released,
    Reopened,
    Result,
    Saved,
    Turned,
    Unpinned,
    check,
)
from stepwell.testing.linearize import NEVER, Operation, TooManyOrdersError, explain, find_order
from stepwell.testing.page_model import PageModel
from stepwell.testing.recorder import DELAYS, KINDS, Plan, main, record, run
from stepwell.testing.workers import PAGE_BYTES, bytes_of, chains, save_of

NEW, PENDING, PRESENT, FULL = (
    int(ClaimOutcome.NEW),
    int(ClaimOutcome.PENDING),
    int(ClaimOutcome.PRESENT),
    int(ClaimOutcome.FULL),
)
SHARED, DISK, HOST = int(Tier.SHARED), int(Tier.DISK), int(Tier.HOST)
ONE_TIER = PageModel((SHARED,), evicts=True)
NO_EVICTION = PageModel((SHARED,), evicts=False)
ALL_TIERS = PageModel((HOST, SHARED, DISK), evicts=True)


# ---- the search, on a register ---------------------------------------------------------------------------------------


class Register:
    """A cell that holds a number, 0 at first: a step is ("write", n) or ("read", n)."""

    def begin(self) -> int:
        return 0

    def apply(self, state: int, step: tuple[str, int]) -> list[int]:
        kind, number = step
        if kind == "write":
            return [number]
        return [state] if state == number else []


def operations(*given: tuple[int, int, str, int]) -> list[Operation[tuple[str, int]]]:
    return [
        Operation(invoked, returned, (kind, number), f"{kind} {number}", kind == "write")
        for invoked, returned, kind, number in given
    ]


def test_operations_that_overlap_take_effect_in_any_order() -> None:
    for read in (0, 1):
        assert find_order(operations((1, 4, "write", 1), (2, 3, "read", read)), Register()).stuck is None


def test_an_operation_takes_effect_before_those_that_begin_after_its_return() -> None:
    found = find_order(operations((1, 2, "write", 1), (3, 4, "read", 0)), Register())
    assert found.stuck is not None
    assert found.stuck.operation.text == "read 0"
    assert found.stuck.states == (1,)


def test_two_readers_do_not_see_one_write_come_and_go() -> None:
    given = operations((1, 8, "write", 1), (2, 3, "read", 1), (4, 5, "read", 0))
    assert find_order(given, Register()).stuck is not None


def test_an_operation_that_never_returned_may_or_may_not_have_taken_effect() -> None:
    given = operations((1, NEVER, "write", 1), (2, 3, "read", 0), (4, 5, "read", 1), (6, 7, "read", 1))
    assert find_order(given, Register()).stuck is None
    assert find_order(given[:2], Register()).stuck is None


def brute_force(given: Sequence[Operation[tuple[str, int]]]) -> bool:
    """Try every order that agrees with the stamps."""

    def place(left: list[Operation[tuple[str, int]]], state: int) -> bool:
        if not left:
            return True
        first_return = min(each.returned for each in left)
        return any(
            place([other for other in left if other is not each], after)
            for each in left
            if each.invoked <= first_return
            for after in Register().apply(state, each.step)
        )

    return place(list(given), 0)


def test_the_search_says_what_trying_every_order_says() -> None:
    chance = random.Random(7)
    outcomes = set()
    for _ in range(400):
        stamps = list(range(12))
        chance.shuffle(stamps)
        pairs = [sorted(stamps[2 * i : 2 * i + 2]) for i in range(6)]
        given = operations(
            *((first, last, chance.choice(["write", "read", "read"]), chance.randrange(3)) for first, last in pairs)
        )
        expected = brute_force(given)
        assert (find_order(given, Register()).stuck is None) == expected
        outcomes.add(expected)
    assert outcomes == {True, False}


def test_an_explanation_keeps_what_cannot_be_ordered_and_little_else() -> None:
    many = [(10 * i, 10 * i + 1, "read", 1) for i in range(2, 50)]
    given = operations((1, 2, "write", 1), *many, (600, 601, "write", 2), (602, 603, "read", 1))
    few = explain(given, Register(), changes=1)
    assert [each.text for each in few.operations] == ["write 2", "read 1"]
    assert few.begin == (1,)
    assert few.stuck.operation is given[-1]


def test_a_search_that_grows_beyond_its_bound_says_so() -> None:
    given = operations(*((1, 100, "write", i) for i in range(12)), (2, 3, "read", 50))
    with pytest.raises(TooManyOrdersError, match="more than 1000 configurations at: read 50"):
        find_order(given, Register(), most=1000)


# ---- histories by hand -----------------------------------------------------------------------------------------------


class Story:
    """Records of calls on page 0, one after another unless stamps are given."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._clock = 0

    def call(
        self, call: str, result: Result, *, at: tuple[int, int] | None = None, settled: int | None = None
    ) -> int:
        first, last = at or (self._clock + 1, self._clock + 2)
        self._clock = max(self._clock, last)
        number = len(self.records) + 1
        until = last if settled is None else settled
        self.records.append(Record(number, 0, call, (0,), first, last, until, result))
        return number

    def save(
        self,
        outcome: int = NEW,
        *,
        lands: bool = True,
        at: tuple[int, int] | None = None,
        settled: int | None = None,
    ) -> int:
        told = {NEW: (1, 0, 0, 0), PRESENT: (0, 1, 0, 0), PENDING: (0, 0, 1, 0)}[outcome]
        landed = (SHARED,) if lands and outcome == NEW else ()
        return self.call("save", Saved((((SHARED, outcome),),), (landed,), told), at=at, settled=settled)

    def read(self, save: int, *, at: tuple[int, int] | None = None) -> int:
        return self.call("load_keys", LoadedKeys((save,), had_deadline=False), at=at)

    def miss(self, *, at: tuple[int, int] | None = None) -> int:
        return self.read(0, at=at)

    def match(self) -> int:
        return self.call("match", Matched((SHARED,)))

    def load(self, match: int, save: int, **how: bool) -> int:
        loaded = Loaded(match, (save,), ("",), had_deadline=how.get("had_deadline", False))
        return self.call("load", replace(loaded, came_late=how.get("came_late", False)))

    def close(self, match: int) -> int:
        return self.call("close", Released(match))

    def forget(self, *, at: tuple[int, int] | None = None) -> int:
        return self.call("forget", Forgot(1), at=at)

    def wrong(self, model: PageModel = ONE_TIER) -> list[str]:
        return [violation.what for violation in check(self.records, model).violations]


def test_what_a_save_published_is_found_until_it_is_forgotten() -> None:
    story = Story()
    first = story.save()
    story.read(first)
    story.save(PRESENT)
    story.read(first)
    story.forget()
    story.miss()
    story.read(story.save())
    assert story.wrong(NO_EVICTION) == []


def test_a_read_after_a_forget_that_nobody_overlaps_is_found() -> None:
    story = Story()
    first = story.save()
    story.forget()
    story.read(first)
    [what] = story.wrong()
    assert "load_keys #3 finds it, bytes of #1" in what


def test_a_forget_may_pass_by_what_another_call_uses() -> None:
    story = Story()
    first = story.save()
    story.forget(at=(3, 6))
    story.read(first, at=(4, 5))
    story.read(first)
    assert story.wrong() == []


def test_a_page_that_nothing_can_have_evicted_and_is_missed_is_found() -> None:
    story = Story()
    story.save()
    story.miss()
    assert story.wrong(ONE_TIER) == []
    assert len(story.wrong(NO_EVICTION)) == 1


def test_bytes_that_change_back_are_found() -> None:
    story = Story()
    first, second = story.save(), story.save()
    story.read(second)
    story.read(first)
    [what] = story.wrong()
    assert "load_keys #4 finds it, bytes of #1" in what


def test_bytes_of_a_save_that_had_not_begun_are_found() -> None:
    story = Story()
    story.read(2)
    story.save()
    assert "page 0: #2 was read before it began" in story.wrong()


def test_bytes_of_the_second_saver_after_it_was_told_present_are_found() -> None:
    story = Story()
    story.save()
    second = story.save(PRESENT)
    story.read(second)
    assert len(story.wrong()) == 1


def test_bytes_that_are_of_no_save_are_found() -> None:
    story = Story()
    story.save()
    story.read(TORN)
    assert "page 0: the bytes delivered are those of no save" in story.wrong()


def test_a_hit_before_the_bytes_were_published_is_found() -> None:
    story = Story()
    first = story.save(lands=False, settled=8)
    story.read(first, at=(3, 4))
    assert len(story.wrong()) == 1


def test_two_claims_of_one_place_at_once_are_found() -> None:
    story = Story()
    story.save(at=(1, 2), settled=9)
    story.save(at=(3, 4), settled=10)
    assert story.wrong() == []  # the first may have landed, and left, before the second came
    assert len(story.wrong(NO_EVICTION)) == 1
    other = Story()
    other.save(lands=False, at=(1, 2), settled=3)
    other.save(at=(4, 5))
    assert other.wrong(NO_EVICTION) == []  # a claim that was returned may be taken again


def test_a_page_that_is_pending_is_somebodys_to_bring() -> None:
    story = Story()
    story.save(at=(1, 2), settled=5)
    story.save(PENDING, at=(3, 4))
    assert story.wrong() == []
    alone = Story()
    alone.save()
    alone.save(PENDING)
    assert len(alone.wrong()) == 1


def test_a_page_of_an_open_match_that_is_missed_is_found() -> None:
    story = Story()
    first = story.save()
    match = story.match()
    story.miss()
    assert len(story.wrong()) == 1
    other = Story()
    first = other.save()
    match = other.match()
    other.load(match, first)
    other.close(match)
    other.miss()
    assert other.wrong() == []


def test_a_match_whose_pages_do_not_come_is_found_unless_a_deadline_explains_it() -> None:
    story = Story()
    story.save()
    match = story.match()
    story.load(match, 0, had_deadline=True)
    assert story.wrong() == []
    story.load(match, 0)
    assert story.wrong() == ["pages of an open match did not come"]
    story.call("set_epoch", Turned(1), at=(4, 20))
    assert story.wrong() == []


def test_a_match_whose_page_changes_is_found() -> None:
    story = Story()
    first, second = story.save(), story.save()
    match = story.match()
    story.load(match, second)
    story.load(match, first)
    assert "page 0 changed while it was pinned" in story.wrong()


def test_bytes_that_land_after_the_call_are_found() -> None:
    story = Story()
    first = story.save()
    story.load(story.match(), first, came_late=True)
    assert story.wrong() == ["bytes landed after the call had returned"]


def test_a_page_of_another_epoch_is_found() -> None:
    story = Story()
    first = story.save()
    story.call("set_epoch", Turned(1))
    story.miss()
    assert story.wrong(NO_EVICTION) == []
    story.read(first)
    assert len(story.wrong()) == 1
    back = Story()
    first = back.save()
    back.call("set_epoch", Turned(1))
    back.call("set_epoch", Turned(0))
    back.read(first)
    assert back.wrong(NO_EVICTION) == []


def test_a_load_under_another_epoch_than_its_match_is_found() -> None:
    story = Story()
    first = story.save()
    match = story.call("match", Matched((SHARED,), epoch=0))
    story.load(match, first)
    story.call("set_epoch", Turned(1))
    assert story.wrong() == []
    story.load(match, first, had_deadline=True)
    assert story.wrong() == ["a load delivered pages of another epoch"]
    story.records[-1] = replace(story.records[-1], invoked=story.records[-2].invoked)
    assert story.wrong() == []  # it may have been there before


def test_a_match_that_names_another_epoch_is_found() -> None:
    story = Story()
    story.save()
    story.call("set_epoch", Turned(1), at=(3, 8))
    story.call("match", Matched((SHARED,), epoch=0), at=(4, 5))
    assert story.wrong() == []
    story.call("match", Matched((SHARED,), epoch=1), at=(6, 7))
    assert len(story.wrong()) == 1


def test_a_page_that_a_pin_keeps_and_that_is_missed_is_found() -> None:
    story = Story()
    story.save()
    pin = story.call("pin", Kept(1))
    story.forget()
    story.call("clear", Cleared(0))
    assert story.wrong() == []
    story.miss()
    assert len(story.wrong()) == 1
    story.records.pop()
    story.call("unpin", Unpinned(pin))
    story.miss()
    assert story.wrong() == []


def test_an_acknowledged_page_that_is_gone_after_a_restart_is_found() -> None:
    story = Story()
    first = story.save()
    story.call("reopen", Reopened())
    story.read(first)
    assert story.wrong(NO_EVICTION) == []
    story.miss()
    assert len(story.wrong(NO_EVICTION)) == 1


def test_an_acknowledged_page_of_another_epoch_that_is_gone_after_a_restart_is_found() -> None:
    story = Story()
    first = story.save()
    story.call("set_epoch", Turned(1))
    story.call("reopen", Reopened())
    story.miss()
    story.call("set_epoch", Turned(0))
    story.read(first)
    assert story.wrong(NO_EVICTION) == []
    story.miss()
    assert len(story.wrong(NO_EVICTION)) == 1


def test_host_memory_does_not_outlive_a_restart() -> None:
    story = Story()
    first = story.call("save", Saved((((HOST, NEW),),), ((HOST,),), (1, 0, 0, 0)))
    story.call("reopen", Reopened())
    story.read(first)
    assert len(story.wrong(PageModel((HOST,), evicts=True))) == 1


def test_a_page_on_disk_comes_back_to_shared_memory_by_itself() -> None:
    story = Story()
    claims, landed = ((SHARED, FULL), (DISK, NEW)), (DISK,)
    first = story.call("save", Saved((claims,), (landed,), (1, 0, 0, 0)))
    story.call("probe", Probed((SHARED,)))
    story.read(first)
    assert story.wrong(ALL_TIERS) == []
    story.call("clear", Cleared(2))
    story.call("probe", Probed((HOST,)))
    assert len(story.wrong(ALL_TIERS)) == 1


def test_a_copy_written_to_disk_from_shared_memory_has_the_bytes_that_are_there() -> None:
    story = Story()
    first = story.save()
    second = story.call("save", Saved(((((SHARED, PRESENT), (DISK, NEW))),), ((DISK,),), (1, 0, 0, 0)))
    story.records = [*story.records]
    assert second == 2
    story.read(first)
    assert story.wrong(ALL_TIERS) == []
    story.read(second)
    assert len(story.wrong(ALL_TIERS)) == 1


def test_a_save_that_does_not_add_up_is_found() -> None:
    story = Story()
    story.call("save", Saved((((SHARED, NEW),),), ((SHARED,),), (1, 1, 0, 0)))
    assert "a save of 1 pages that does not add up" in story.wrong()
    other = Story()
    other.call("save", Saved((((SHARED, NEW),),), ((SHARED,),), (0, 1, 0, 0)))
    assert other.wrong() == ["a save that says otherwise than its claims"]


def test_a_violation_shows_the_calls_that_cannot_be_ordered() -> None:
    story = Story()
    first = story.save()
    for _ in range(50):
        story.read(first)
    story.forget()
    story.read(first)
    [violation] = check(story.records, ONE_TIER).violations
    assert str(violation).splitlines() == [
        "page 0: no order explains: [105..106] thread 0: load_keys #53 finds it, bytes of #1",
        "    at first: epoch 0",
        "    [1..2] thread 0: save #1 claims: new in shared",
        "    [1..2] thread 0: save #1: resident in shared",
        "    [103..104] thread 0: forget #52 drops it",
        "    [105..106] thread 0: load_keys #53 finds it, bytes of #1",
        "    before the last: epoch 0",
    ]


# ---- real histories --------------------------------------------------------------------------------------------------


def test_a_page_says_which_save_wrote_it() -> None:
    numbers = {page for chain in chains() for page in chain.pages}
    assert len(numbers) == 18
    for page in numbers:
        assert save_of(page, bytes_of(page, 77)) == 77
        assert save_of(page, bytes_of(page + 1, 77)) == TORN
    torn = bytes_of(3, 77)
    torn[-1] ^= 1
    assert save_of(3, torn) == TORN
    mixed = bytes_of(3, 77)
    mixed[PAGE_BYTES // 2 :] = bytes_of(3, 78)[PAGE_BYTES // 2 :]
    assert save_of(3, mixed) == TORN


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delays", [(), DELAYS], ids=["", "with delays"])
def test_what_threads_do_with_a_store_has_an_order(kind: str, delays: tuple[tuple[str, int], ...]) -> None:
    done = run(Plan(seed=1, kind=kind, delays=delays))
    assert done.violations == []
    assert len(done.records) > 500
    assert done.checked.steps > 500


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("threads", [2, 6])
def test_fewer_threads_and_more_have_an_order_too(threads: int) -> None:
    assert run(Plan(seed=3, kind="crowded", threads=threads, calls=60 // threads)).violations == []


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("kind", "spoil", "what"),
    [
        ("roomy", hooks.swap_saved_pages, "the bytes delivered are those of no save"),
        ("roomy", hooks.lose_saved_pages, "no order explains"),
        ("roomy", hooks.return_dropped_pages, "no order explains"),
    ],
)
def test_a_store_that_lies_is_found(kind: str, spoil: Callable[[PageStore], None], what: str) -> None:
    """A lie shows only where threads happen to look at it: one of a few runs has to."""
    for seed in range(1, 9):
        violations = run(Plan(seed=seed, kind=kind), prepare=spoil).violations
        if any(what in violation for violation in violations):
            assert f"again: python -m stepwell.testing.recorder --seed {seed}" in violations[0]
            return
    raise AssertionError("eight histories of a store that lies were all explained")


@pytest.mark.usefixtures("no_leaks")
def test_a_store_whose_core_fails_an_assertion_is_found() -> None:
    violations = run(Plan(seed=1, kind="memory", lives=1), prepare=lambda store: store._index.poison()).violations
    assert any("an assertion of the core failed" in violation for violation in violations)


# ---- real histories that are changed ---------------------------------------------------------------------------------

ROOMY = KINDS["roomy"].model()
Place = TypeVar("Place")


@pytest.fixture(scope="module")
def history() -> list[Record]:
    """What threads did with a store that loses nothing by itself."""
    return record(Plan(seed=2, kind="roomy"))


def changed(history: list[Record], record: Record, result: Result, page: int) -> list[str]:
    """Say what the checker makes of a history in which one result is another."""
    other = [replace(each, result=result) if each is record else each for each in history]
    return [violation.what for violation in check(other, ROOMY, only=[page]).violations]


def deliveries(history: list[Record]) -> list[tuple[Record, LoadedKeys, int, int]]:
    """Return (record, its result, row, page) of pages that load_keys delivered."""
    return [
        (each, each.result, row, each.pages[row])
        for each in history
        if isinstance(each.result, LoadedKeys)
        for row, save in enumerate(each.result.saves)
        if save > 0
    ]


def some(given: list[Place], most: int = 12) -> list[Place]:
    """Choose a few."""
    assert given, "the history has none"
    return random.Random(1).sample(given, min(most, len(given)))


def test_bytes_of_a_save_that_was_told_present_are_found(history: list[Record]) -> None:
    duplicates = {
        page: each.number
        for each in history
        if isinstance(each.result, Saved)
        for page, claims in zip(each.pages, each.result.claims, strict=False)
        if all(outcome == PRESENT for _, outcome in claims)
    }
    places = [place for place in deliveries(history) if place[3] in duplicates]
    for read, result, row, page in some(places):
        saves = (*result.saves[:row], duplicates[page], *result.saves[row + 1 :])
        assert changed(history, read, replace(result, saves=saves), page)


def test_a_page_in_the_place_of_another_is_found(history: list[Record]) -> None:
    for read, result, row, page in some(deliveries(history)):
        saves = (*result.saves[:row], TORN, *result.saves[row + 1 :])
        assert changed(history, read, replace(result, saves=saves), page)


def test_a_save_whose_bytes_were_read_and_that_landed_nowhere_is_found(history: list[Record]) -> None:
    read = {(save, page) for each, result, row, page in deliveries(history) for save in [result.saves[row]]}
    landed = [
        (each, each.result, row, page)
        for each in history
        if isinstance(each.result, Saved)
        for row, page in enumerate(each.pages[: len(each.result.landed)])
        if each.result.landed[row] and (each.number, page) in read
    ]
    for save, result, row, page in some(landed):
        nowhere = replace(result, landed=(*result.landed[:row], (), *result.landed[row + 1 :]))
        assert changed(history, save, nowhere, page)


def test_a_read_before_its_save_began_is_found(history: list[Record]) -> None:
    saves = {each.number: each for each in history}
    for read, result, row, page in some(deliveries(history)):
        first = saves[result.saves[row]].invoked
        early = [replace(each, invoked=first - 2, returned=first - 1) if each is read else each for each in history]
        assert check(early, ROOMY, only=[page]).violations


def test_a_miss_between_two_hits_that_nobody_was_there_to_explain_is_found(history: list[Record]) -> None:
    """One thread reads every page between the others' turns: page 0 three times, by three chains."""
    looker = max(each.thread for each in history)
    looks = [
        (each, after)
        for each, after in zip(history, history[3:], strict=False)
        if each.thread == after.thread == looker
        and isinstance(each.result, Matched)
        and isinstance(after.result, Matched)
        and each.pages[0] == after.pages[0] == 0
        and each.result.tiers
        and after.result.tiers
    ]
    for first, _ in some(looks):
        of_it = [
            each
            for each in history
            if isinstance(each.result, Loaded | Released) and each.result.match == first.number
        ]
        without = [each for each in history if each not in of_it]
        assert changed(without, first, Matched(()), 0)


def test_a_forget_that_forgot_nothing_is_found(history: list[Record]) -> None:
    """After each turn of the threads all is forgotten, and one page said to be there all the same."""
    quiet = max(each.settled for each in history) + 1
    chain = chains()[0]
    story = [*history, Record(10**6, 0, "forget", chain.pages, quiet, quiet + 1, quiet + 1, Forgot(0))]
    for page in chain.pages:
        story.append(Record(10**6 + 1 + page, 0, "probe", (page,), quiet + 2, quiet + 3, quiet + 3, Probed((SHARED,))))
        assert check(story, ROOMY, only=[page]).violations


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
def test_the_command_says_how_much_has_an_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--kind", "memory", "--calls", "5"]) == 0
    assert capsys.readouterr().out.endswith("all of it has an order\n")


@pytest.mark.usefixtures("no_leaks")
def test_the_command_shows_what_has_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.testing.workers.save_of", lambda page, row: TORN)
    assert main(["--rounds", "1", "--kind", "memory"]) == 1
    shown = capsys.readouterr().out
    assert "the bytes delivered are those of no save" in shown
    again = "again: python -m stepwell.testing.recorder --seed 1 --same-seed --rounds 20 --kind memory --threads 4"
    assert again in shown
