"""Check what threads did with one store, as it was recorded: is there an order of the calls that explains it all?

    recorder.py -> [Record, ...] -> check() -> [Violation, ...]

A history is cut into pages (`steps_of`): a page's part of each call, held to `PageModel` by `find_order`. What is
promised about whole calls is looked at apart (`_whole_calls`). Everything here is data: a history may be written by
hand, or changed, to see what the checker makes of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stepwell.index import ClaimOutcome, Tier
from stepwell.testing.linearize import NEVER, Operation, TooManyOrdersError, explain, find_order
from stepwell.testing.page_model import (
    ANY_EPOCH,
    ANY_SAVE,
    ANY_TIER,
    EVERYTHING,
    Claim,
    Drop,
    Find,
    Hold,
    Land,
    Miss,
    Page,
    PageModel,
    Release,
    Restart,
    Step,
    Turn,
    Unhold,
)

NOTHING: Final = 0
"""In place of the number of a save: no page was delivered."""
TORN: Final = -2
"""In place of the number of a save: what was delivered is the page of no save at all, or of another key."""

Tiers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a save came to. claims: for each page looked at, (tier, ClaimOutcome) of each tier asked.

    landed: for each of these pages, in which tiers it came to be. told: (saved, present, pending, refused) as the
    caller was told. had_deadline: the call gave one.
    """

    claims: tuple[tuple[tuple[int, int], ...], ...]
    landed: tuple[Tiers, ...]
    told: tuple[int, int, int, int]
    had_deadline: bool = False


@dataclass(frozen=True, slots=True)
class Matched:
    """What a match found: the tier of each page of the prefix, and the epoch that they were found under."""

    tiers: Tiers
    epoch: int = ANY_EPOCH


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load of an open match delivered. match: its number. saves: whose bytes each page has, NOTHING, or TORN.

    reasons: of each page that did not come, the name of its status, else "". had_deadline: the call gave one.
    came_late: bytes changed after the call had returned.
    """

    match: int
    saves: tuple[int, ...]
    reasons: tuple[str, ...]
    had_deadline: bool
    came_late: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A match was closed, and what was loaded by it has ended. match: its number."""

    match: int


@dataclass(frozen=True, slots=True)
class LoadedKeys:
    """What load_keys delivered, as in Loaded."""

    saves: tuple[int, ...]
    had_deadline: bool


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found: the tier of each leading page."""

    tiers: Tiers


@dataclass(frozen=True, slots=True)
class Kept:
    """What a pin keeps: the leading pages that are in a lasting tier; and behind them those that are on their way, or
    in another tier, which it keeps once they are in a lasting one."""

    pages: int
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Unpinned:
    """A pin was closed. pin: its number."""

    pin: int


@dataclass(frozen=True, slots=True)
class Forgot:
    """Forget dropped copies of the pages named but the first `keep`; while it looked them up it used them all."""

    copies: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """Clear dropped copies of all pages."""

    copies: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Copies left a tier because somebody asked."""

    tier: int
    asked: int
    copies: int


@dataclass(frozen=True, slots=True)
class Verified:
    """A pass read every page."""

    pages: int
    damaged: int


@dataclass(frozen=True, slots=True)
class Turned:
    """The epoch was set."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The store was closed, with nothing under way, and opened again under the same epoch."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The call raised what it must not raise, or waited for ever."""

    error: str


Result = (
    Saved | Matched | Loaded | Released | LoadedKeys | Probed | Kept | Unpinned | Forgot | Cleared | Evicted
    | Verified | Turned | Reopened | Failed
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """One call: who, what, for which pages, and what came of it.

    number: of the call, unique and above 0; a save's names its bytes. pages: numbers of the pages named, in order.
    invoked, returned: stamps of one counter. settled: by then nothing that the call began was under way any more, nor
    held anything; NEVER where that is not known.
    """

    number: int
    thread: int
    call: str
    pages: tuple[int, ...]
    invoked: int
    returned: int
    settled: int
    result: Result

    def __str__(self) -> str:
        pages = f" pages {_ranges(self.pages)}" if self.pages else ""
        when = f"[{self.invoked}..{self.returned}] thread {self.thread}"
        return f"{when}: {self.call} #{self.number}{pages}: {self.result}"


@dataclass(frozen=True, slots=True)
class Violation:
    """What cannot be: in one line; and the few calls that show it, a line each."""

    what: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"    {line}" for line in self.lines)])


@dataclass(slots=True)
class Checked:
    """What a check came to. configurations: looked at by the search, over all pages; steps: of all pages."""

    violations: list[Violation] = field(default_factory=list)
    steps: int = 0
    configurations: int = 0


def check(
    records: Sequence[Record], model: PageModel, *, only: Collection[int] | None = None, most: int = 4
) -> Checked:
    """Look for an order of the calls that gives what they came to, for each page, and look at whole calls.

    Args:
        records: of one store, all of them: a save that is left out makes its bytes unknown.
        model: of its configuration.
        only: pages to look at; None: all.
        most: pages that are reported; the rest of what is wrong most likely has the same cause.

    Returns:
        Checked, with what is wrong, the earliest first.
    """
    checked = Checked(violations=list(_whole_calls(records)))
    stuck: list[tuple[int, Violation]] = []
    for page, steps in sorted(steps_of(records).items()):
        if only is not None and page not in only:
            continue
        checked.steps += len(steps)
        try:
            verdict = find_order(steps, model)
        except TooManyOrdersError as error:
            checked.violations.append(Violation(f"page {page}: not decided: {error}", ()))
            continue
        checked.configurations += verdict.configurations
        if verdict.stuck is not None and len(stuck) < most:
            few = explain(steps, model)
            lines = ["at first: " + " | ".join(map(_state, few.begin[:3])), *(each.text for each in few.operations)]
            lines += ["before the last: " + _state(state) for state in few.stuck.states[:3]]
            what = f"page {page}: no order explains: {few.stuck.operation.text}"
            stuck.append((few.stuck.operation.returned, Violation(what, tuple(lines))))
    checked.violations.extend(violation for _, violation in sorted(stuck, key=lambda each: each[0]))
    return checked


# ---- a page's part of each call --------------------------------------------------------------------------------------


def steps_of(records: Sequence[Record]) -> dict[int, list[Operation[Step]]]:
    """Cut a history into pages: what each call came to for one page, as steps of `PageModel`.

    Returns:
        By page. A call may be several steps, each with its own time: a save claims before it returns, and its bytes
        land until it is settled.
    """
    pages = sorted({page for record in records for page in record.pages})
    found: dict[int, list[Operation[Step]]] = {page: [] for page in pages}
    delivered = _delivered(records)
    for record in sorted(records, key=lambda each: each.invoked):
        for page, operation in _steps(record, pages, records, delivered):
            found[page].append(operation)
    return found


def _steps(
    record: Record, pages: Sequence[int], records: Sequence[Record], delivered: dict[tuple[int, int], int]
) -> Iterator[tuple[int, Operation[Step]]]:
    result, named = record.result, record.pages
    match result:
        case Saved():
            for page, claims, landed in zip(named, result.claims, result.landed, strict=False):
                yield page, _step(record, Claim(record.number, claims), makes=(record.number,))
                for tier, outcome in claims:
                    if outcome == ClaimOutcome.NEW:
                        land = Land(record.number, tier, tier in landed)
                        yield page, _step(record, land, until=record.settled, uses=(record.number,))
        case Matched():
            for row, tier in enumerate(result.tiers):
                save = delivered.get((record.number, row), ANY_SAVE)
                find = Find(tier, save, record.number, result.epoch)
                yield named[row], _step(record, find, makes=(record.number,))
            if len(result.tiers) < len(named):
                yield named[len(result.tiers)], _step(record, Miss())
        case Released():
            for page in named:
                yield page, _step(record, Release(result.match), until=record.settled, uses=(result.match,))
        case LoadedKeys():
            may_fail = result.had_deadline or _overlaps(record, records, Turned)
            for page, save in zip(named, result.saves, strict=True):
                if save != NOTHING:
                    yield page, _step(record, Find(ANY_TIER, save))
                elif not may_fail:
                    yield page, _step(record, Miss())
        case Probed():
            for page, tier in zip(named, result.tiers, strict=False):
                yield page, _step(record, Find(tier))
            if len(result.tiers) < len(named):
                yield named[len(result.tiers)], _step(record, Miss())
        case Kept():
            for page in named[: result.pages]:
                yield page, _step(record, Hold(record.number), makes=(record.number,))
        case Unpinned():
            for page in named:
                yield page, _step(record, Unhold(result.pin), uses=(result.pin,))
        case Forgot():
            for page in named[result.keep :]:
                yield page, _step(record, Drop(not _is_used(page, record, records)))
        case Cleared():
            for page in pages:
                is_certain = not _is_used(page, record, records)
                is_alone = is_certain and not _is_matched(page, record, records)
                for tier in (EVERYTHING,) if is_alone else (Tier.HOST, Tier.SHARED, Tier.DISK):
                    yield page, _step(record, Drop(is_certain, tier))
        case Turned():
            for page in pages:
                yield page, _step(record, Turn(result.epoch))
        case Reopened():
            for page in pages:
                yield page, _step(record, Restart())
        case Loaded() | Evicted() | Verified() | Failed():
            pass


def _step(
    record: Record, step: Step, *, until: int | None = None, makes: Iterable[int] = (), uses: Iterable[int] = ()
) -> Operation[Step]:
    returned = record.returned if until is None else max(record.returned, until)
    text = f"[{record.invoked}..{'' if returned >= NEVER else returned}] thread {record.thread}: {_says(record, step)}"
    return Operation(record.invoked, returned, step, text, _changes(step), frozenset(makes), frozenset(uses))


def _changes(step: Step) -> bool:
    """Say whether other steps may depend on this one."""
    match step:
        case Find() | Miss() | Hold():
            return False
        case Claim():
            return any(outcome == ClaimOutcome.NEW for _, outcome in step.outcomes)
        case _:
            return True


def _delivered(records: Iterable[Record]) -> dict[tuple[int, int], int]:
    """Say whose bytes were loaded by each match: (its number, row) -> number of the save."""
    found: dict[tuple[int, int], int] = {}
    for record in records:
        if isinstance(record.result, Loaded):
            for row, save in enumerate(record.result.saves):
                if save != NOTHING:
                    found.setdefault((record.result.match, row), save)
    return found


def _overlaps(record: Record, records: Iterable[Record], kind: type[Result]) -> bool:
    """Say whether a call of some kind overlaps this one."""
    return any(
        isinstance(each.result, kind) and each.invoked < record.returned and record.invoked < each.returned
        for each in records
    )


def _is_used(page: int, record: Record, records: Iterable[Record]) -> bool:
    """Say whether somebody may pin a page, unseen, while forget or clear comes by: then it may be passed by."""
    for each in records:
        if each is record or each.invoked > record.returned or each.settled < record.invoked:
            continue
        match each.result:
            case Saved() | LoadedKeys() | Probed() | Forgot():
                is_user = page in each.pages
            case Kept(pages, pending):  # what comes while a pin covers it is kept
                is_user = page in each.pages[pages : pages + pending]
            case Verified():
                is_user = True
            case _:
                is_user = False
        if is_user:
            return True
    return False


def _is_matched(page: int, record: Record, records: Sequence[Record]) -> bool:
    """Say whether a match of a page is open while clear comes by: a load of it may bring the page up."""
    ends = {each.result.match: each.settled for each in records if isinstance(each.result, Released)}
    return any(
        isinstance(each.result, Matched)
        and page in each.pages
        and each.invoked < record.returned
        and record.invoked < ends.get(each.number, NEVER)
        for each in records
    )


# ---- what is promised about whole calls ------------------------------------------------------------------------------


def _whole_calls(records: Sequence[Record]) -> Iterator[Violation]:
    matches = {record.number: record for record in records if isinstance(record.result, Matched)}
    saves = {record.number: record for record in records if isinstance(record.result, Saved)}
    turns = [record for record in records if isinstance(record.result, Turned)]
    loaded: dict[tuple[int, int], tuple[int, Record]] = {}
    for record in records:
        result = record.result
        match result:
            case Failed():
                yield Violation(f"{record.call}: {result.error}", (str(record),))
            case Saved():
                yield from _count_of(record, result)
            case Loaded():
                of = matches[result.match]
                yield from _bytes_of(record, result.saves, saves)
                if result.came_late:
                    yield Violation("bytes landed after the call had returned", (str(record),))
                # A load of an open match delivers every page, but for a deadline, or an epoch set since the match.
                has_turned = any(t.invoked < record.returned and of.invoked < t.returned for t in turns)
                if not (result.had_deadline or has_turned) and NOTHING in result.saves:
                    yield Violation("pages of an open match did not come", (str(of), str(record)))
                yield from _epoch_of(record, result, of, turns)
                for row, save in enumerate(result.saves):
                    before = loaded.setdefault((result.match, row), (save, record)) if save > NOTHING else None
                    if before is not None and before[0] != save:
                        what = f"page {record.pages[row]} changed while it was pinned"
                        yield Violation(what, (str(of), str(before[1]), str(record)))
            case LoadedKeys():
                yield from _bytes_of(record, result.saves, saves)
            case Verified():
                if result.damaged:
                    yield Violation("pages were found damaged", (str(record),))
            case Evicted():
                if result.copies > result.asked:
                    yield Violation("more left than was asked", (str(record),))


def _epoch_of(record: Record, result: Loaded, of: Record, turns: Sequence[Record]) -> Iterator[Violation]:
    """A load that begins under another epoch than its match, and ends under it, delivers nothing."""
    if not isinstance(of.result, Matched) or of.result.epoch == ANY_EPOCH or not any(map(bool, result.saves)):
        return
    before = [turn for turn in turns if turn.invoked < record.returned]
    last = max(before, key=lambda each: each.invoked, default=None)
    if last is None or not isinstance(last.result, Turned) or last.result.epoch == of.result.epoch:
        return
    is_clear = all(turn is last or turn.returned < last.invoked for turn in before)
    if last.returned < record.invoked and is_clear:
        yield Violation("a load delivered pages of another epoch", (str(of), str(last), str(record)))


def _bytes_of(record: Record, delivered: Iterable[int], saves: dict[int, Record]) -> Iterator[Violation]:
    for page, save in zip(record.pages, delivered, strict=False):
        if save == NOTHING:
            continue
        by = saves.get(save)
        if save == TORN or by is None or page not in by.pages:
            what = "are those of no save" if save == TORN else f"are of #{save}, which did not save it"
            yield Violation(f"page {page}: the bytes delivered {what}", (str(record),))
        elif by.invoked > record.returned:
            yield Violation(f"page {page}: #{save} was read before it began", (str(record), str(by)))


def _count_of(record: Record, result: Saved) -> Iterator[Violation]:
    """What a save says adds up, and is what its claims came to."""
    saved, present, pending, refused = result.told
    if saved + present + pending + refused != len(record.pages):
        yield Violation(f"a save of {len(record.pages)} pages that does not add up", (str(record),))
    if len(result.claims) > len(record.pages):
        yield Violation("a save claimed more pages than it has", (str(record),))
    kinds = [{outcome for _, outcome in claims} for claims in result.claims]
    claimed = sum(ClaimOutcome.NEW in kind for kind in kinds)
    here = sum(ClaimOutcome.NEW not in kind and ClaimOutcome.PRESENT in kind for kind in kinds)
    beyond = len(record.pages) - len(result.claims)
    if record.call == "save_keys":  # it waits, and counts what is stored; what others bring may be here then
        coming = sum(
            ClaimOutcome.PENDING in kind and not kind & {ClaimOutcome.NEW, ClaimOutcome.PRESENT} for kind in kinds
        )
        wanted = [tuple(tier for tier, kind in claims if kind == ClaimOutcome.NEW) for claims in result.claims]
        stored = sum(new != () and new == landed for new, landed in zip(wanted, result.landed, strict=True))
        agrees = pending <= coming and (saved <= stored if result.had_deadline else saved == stored)
    else:
        agrees = (saved, refused) in ((claimed, beyond), (0, beyond + claimed)) and present == here
    if not agrees:
        yield Violation("a save that says otherwise than its claims", (str(record),))


# ---- in words --------------------------------------------------------------------------------------------------------


def _says(record: Record, step: Step) -> str:
    name = f"{record.call} #{record.number}"
    match step:
        case Claim():
            said = ", ".join(f"{ClaimOutcome(outcome).name.lower()} in {Tier(tier)}" for tier, outcome in step.outcomes)
            return f"{name} claims: {said or 'nothing'}"
        case Land():
            return f"{name}: {'resident' if step.is_here else 'not stored'} in {Tier(step.tier)}"
        case Find():
            where = "" if step.tier in (ANY_TIER, EVERYTHING) else f" in {Tier(step.tier)}"
            whose = "" if step.save == ANY_SAVE else f", bytes of #{step.save}"
            return f"{name} finds it{where}{whose}"
        case Miss():
            return f"{name} misses it"
        case Release():
            return f"{name} ends match #{step.lease}"
        case Hold():
            return f"{name} keeps it"
        case Unhold():
            return f"{name} ends pin #{step.number}"
        case Drop():
            where = "" if step.tier in (ANY_TIER, EVERYTHING) else f" in {Tier(step.tier)}"
            return f"{name} drops it{where}{'' if step.is_certain else ', unless another uses it'}"
        case Turn():
            return f"{name}: epoch {step.epoch}"
        case Restart():
            return f"{name}: closed and opened again"


def _state(page: Page) -> str:
    """Say what a page may be, in a line."""
    parts = [f"epoch {page.epoch}"]
    parts += [f"{Tier(c.tier)} has #{c.save} of epoch {c.epoch}" for c in sorted(page.copies)]
    parts += [f"{Tier(c.tier)} may have #{c.save} of epoch {c.epoch}" for c in sorted(page.promoted)]
    parts += [f"#{c.save} comes to {Tier(c.tier)} under epoch {c.epoch}" for c in sorted(page.coming)]
    parts += [f"match #{lease.number} pins it in {Tier(lease.tier)}" for lease in sorted(page.leases)]
    parts += [f"pin #{hold} keeps it" for hold in sorted(page.holds)]
    return "; ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers as runs: "3-7, 12"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
