"""Decide whether concurrent operations have an order that a sequential specification allows.

An operation takes effect at one instant between its invocation and its return. `find_order` looks for such instants; it
keeps every configuration (which open operations have taken effect, what state they left) that agrees with the returns
so far, and each configuration once. An operation is given its place only when a return needs one, which keeps them few.

Sources: Wing and Gong, "Testing and Verifying Concurrent Objects" (JPDC 1993), for the question; Lowe, "Testing for
Linearizability" (CCPE 2017), for memoized configurations and places found just in time; Horn and Kroening, "Faster
Linearizability Checking via P-Compositionality" (FORTE 2015), for looking at one object, here one page, at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Step = TypeVar("Step")
Asked = TypeVar("Asked", contravariant=True)

NEVER: Final = 1 << 62
"""The return of an operation that has not returned: it may take effect at any time from its invocation on, or not."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[Step]):
    """One operation on one object.

    invoked, returned: stamps of one counter. step: what the specification is asked. text: a line for people.
    changes: whether others may depend on it: what only looks, and forbids more than it allows, may be left out of an
    explanation. makes, uses: names of what it begins, and of what it ends or needs: left out together.
    """

    invoked: int
    returned: int
    step: Step
    text: str
    changes: bool = True
    makes: frozenset[Hashable] = frozenset()
    uses: frozenset[Hashable] = frozenset()


class Specification(Protocol[State, Asked]):
    """A sequential object. It may be nondeterministic: a step may leave several states."""

    def begin(self) -> State:
        """Return the state before the first step."""

    def apply(self, state: State, step: Asked) -> Iterable[State]:
        """Return the states that a step with this result may leave; none: it cannot have this result here."""


@dataclass(frozen=True, slots=True)
class Stuck(Generic[State, Step]):
    """The first return for which no order exists: the operation, the states possible before it, those open then."""

    operation: Operation[Step]
    states: tuple[State, ...]
    open: tuple[Operation[Step], ...]


@dataclass(frozen=True, slots=True)
class Pause(Generic[State]):
    """A moment at which no operation was open, after the return of this stamp, and the states possible then."""

    after: int
    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Verdict(Generic[State, Step]):
    """What came of a search.

    configurations: how many were looked at. pauses: before the end. stuck: None where there is an order.
    """

    configurations: int
    pauses: list[Pause[State]]
    stuck: Stuck[State, Step] | None


class TooManyOrdersError(Exception):
    """The search was given up: more configurations than were allowed agree with the returns so far."""


def find_order(
    operations: Sequence[Operation[Step]],
    specification: Specification[State, Step],
    *,
    begin: Iterable[State] | None = None,
    most: int = 200_000,
) -> Verdict[State, Step]:
    """Look for an order of some operations that agrees with their stamps and with the specification.

    Args:
        operations: in any order; several may be steps of one call and share its stamps.
        begin: the states one of which is the first; None: the specification's.
        most: configurations at one return.

    Returns:
        Verdict.

    Raises:
        TooManyOrdersError: more than `most` configurations at one return.

    Cost: at most (returns) x 2^(open at a time) x (states) applications; the open ones are as many as threads, and a
        few that linger.
    """
    # An invocation comes before a return of the same stamp: such operations overlap.
    events = sorted(
        [(operation.invoked, 0, i) for i, operation in enumerate(operations)]
        + [(operation.returned, 1, i) for i, operation in enumerate(operations) if operation.returned < NEVER]
    )
    open_bits: dict[int, int] = {}
    free_bits: list[int] = []
    configurations = {(0, state) for state in ((specification.begin(),) if begin is None else begin)}
    pauses: list[Pause[State]] = []
    looked_at = 0
    for stamp, is_return, number in events:
        if not is_return:
            open_bits[number] = free_bits.pop() if free_bits else 1 << len(open_bits)
            continue
        bit = open_bits[number]
        reached: set[tuple[int, State]] = set()
        seen = set(configurations)
        waiting = list(configurations)
        while waiting:
            done, state = waiting.pop()
            if done & bit:
                reached.add((done & ~bit, state))
                continue
            for other, other_bit in open_bits.items():
                if done & other_bit:
                    continue
                for after in specification.apply(state, operations[other].step):
                    configuration = (done | other_bit, after)
                    if configuration not in seen:
                        seen.add(configuration)
                        waiting.append(configuration)
            if len(seen) > most:
                raise TooManyOrdersError(f"more than {most} configurations at: {operations[number].text}")
        looked_at += len(seen)
        if not reached:
            states = tuple(dict.fromkeys(state for _, state in configurations))
            others = tuple(operations[i] for i in open_bits if i != number)
            return Verdict(looked_at, pauses, Stuck(operations[number], states, others))
        configurations = reached
        free_bits.append(open_bits.pop(number))
        if not open_bits:
            pauses.append(Pause(stamp, tuple(state for _, state in configurations)))
    return Verdict(looked_at, pauses, None)


@dataclass(frozen=True, slots=True)
class Explanation(Generic[State, Step]):
    """The few operations that cannot be ordered, by their stamps, and the states one of which was before the first."""

    begin: tuple[State, ...]
    operations: list[Operation[Step]]
    stuck: Stuck[State, Step]


def explain(
    operations: Sequence[Operation[Step]], specification: Specification[State, Step], *, changes: int = 6
) -> Explanation[State, Step]:
    """Find few of some operations that have no order, such that these have none either, with the same one stuck.

    What only looks is left out where it is not needed. What changes something stays, from some moment on at which
    nothing was open: before it there is what was possible then.

    Args:
        changes: how many of the last operations that change something are to be kept, if there are so many.

    Requires: find_order() is stuck.
    Cost: as many searches as there are operations left, each of them short.
    """
    verdict = find_order(operations, specification)
    assert verdict.stuck is not None, "the operations have an order"
    last = verdict.stuck.operation
    kept = sorted((each for each in operations if each.invoked < last.returned), key=lambda each: each.invoked)
    begin: tuple[State, ...] = (specification.begin(),)
    for pause in reversed(verdict.pauses):
        later = [each for each in kept if each.invoked > pause.after]
        if sum(each.changes for each in later) >= changes:
            kept, begin = later, pause.states
            break

    def stuck(fewer: Sequence[Operation[Step]]) -> Stuck[State, Step] | None:
        found = find_order(fewer, specification, begin=begin).stuck
        return found if found is not None and found.operation is last else None

    size = len(kept)
    while size > 0:
        at = len(kept)
        while at > 0:
            at = max(0, at - size)
            fewer = _without(kept, [each for each in kept[at : at + size] if not each.changes and each is not last])
            if len(fewer) < len(kept) and stuck(fewer):
                kept = fewer
                at = min(at, len(kept))
        size //= 2
    found = stuck(kept)
    assert found is not None, "what was left out made no difference"
    return Explanation(begin, kept, found)


def _without(
    operations: Sequence[Operation[Step]], away: Sequence[Operation[Step]]
) -> list[Operation[Step]]:
    """Take some operations away, and with them all that use what only they make."""
    gone = {id(each) for each in away}
    made_before = frozenset[Hashable]().union(*(each.makes for each in operations))
    while True:
        left = [each for each in operations if id(each) not in gone]
        lost = made_before - frozenset[Hashable]().union(*(each.makes for each in left))
        more = {id(each) for each in left if not lost.isdisjoint(each.uses)}
        if not more:
            return left
        gone |= more
