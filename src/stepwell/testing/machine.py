"""Let hypothesis drive a store: the operations of operations.py as rules of a state machine.

A failure shrinks to a few rules, and prints the one command that does them again without hypothesis.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Final

from hypothesis import HealthCheck, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from stepwell.testing.driver import SIZES, Steps, command, kinds_of, world
from stepwell.testing.operations import Operation, operations_of
from stepwell.testing.sequence_operations import SequenceOperations
from stepwell.testing.world import Shape

EXAMPLES: Final = 100
EXAMPLE_STEPS: Final = 100

shapes = st.builds(
    lambda geometry, sizes, selective, is_shared, device: shape(
        geometry, sizes, selective=selective, stores=1 + is_shared, device=device
    ),
    st.sampled_from((0, 1, 2)),
    st.sampled_from(tuple(dict.fromkeys(SIZES))),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0, 0, 6, 8, 12)),
)


def shape(geometry: int, sizes: tuple[int, int, int], *, selective: bool, stores: int, device: int = 0) -> Shape:
    """Make a shape of what was drawn; two processes have room for a volume each, and a device needs a host tier and
    pages of layers."""
    host, shared, disk = sizes
    is_selective = selective and shared > 0 and disk > 0
    if device and host:
        return Shape(min(geometry, 1), host, shared, disk, is_selective, 1, device)
    stores = stores if shared + disk else 1
    return Shape(geometry, host, stores * shared, stores * disk, is_selective, stores)


class StoreMachine(RuleBasedStateMachine):
    """A world, and an operation a rule. Every rule checks all that must hold after it.

    done: steps of all machines of the class that had something to do, and those that had not.
    """

    done: ClassVar[Counter[bool]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.steps: Steps = []
        self.known: frozenset[str] = frozenset()

    @initialize(shape=shapes, seed=st.integers(0, 1000))
    def begin(self, shape: Shape, seed: int) -> None:
        """Open the stores of a new world."""
        self.steps = [("begin", {**asdict(shape), "seed": seed})]
        self.context = world(shape, seed)
        kind = kinds_of(shape)[1]
        self.known = frozenset(operations_of(kind))
        self.operations = kind(self.context.__enter__())

    def do(self, name: str, arguments: dict[str, Any]) -> None:
        """Do one operation."""
        self.steps.append((name, arguments))
        try:
            self.done[self.operations.do(name, arguments)] += 1
        except BaseException:
            self.say()
            raise

    def say(self) -> None:
        """Print the command that does it again."""
        note(f"\nagain: {command(self.steps)}")

    def teardown(self) -> None:
        """End the world, and look at what is left."""
        if not self.steps:
            return
        try:
            self.operations.end()
        except BaseException:
            self.say()
            raise
        finally:
            self.context.__exit__(None, None, None)


def _rule_of(operation: Operation) -> Any:
    def run(self: StoreMachine, **arguments: Any) -> None:
        self.do(operation.name, arguments)

    run.__name__ = operation.name
    run.__doc__ = operation.run.__doc__
    given: dict[str, Any] = {name: st.sampled_from(tuple(values)) for name, values in operation.arguments.items()}
    made: Any = rule(**given)
    return precondition(lambda self: operation.name in self.known)(made(run))


def add_rules(machine: type[StoreMachine], kind: type) -> None:
    """Make a rule of each operation of a class; those that are done often, of several names."""
    for operation in operations_of(kind).values():
        for copy in range(max(1, round(operation.weight / 4))):
            setattr(machine, f"{operation.name}_{copy}" if copy else operation.name, _rule_of(operation))


add_rules(StoreMachine, SequenceOperations)  # it has those of all worlds


def run(steps: int, *, first_seed: int, told: Callable[[int], None] = lambda _: None) -> Counter[bool]:
    """Run machines until they have done so many steps; a seed decides a hundred examples of at most a hundred steps.

    Args: told: is called with the number of steps so far.
    Returns: steps that had something to do (True), and those that had not.
    Raises: what the store did wrong, with the rules that lead to it, as hypothesis prints them.
    """
    given = settings(
        max_examples=EXAMPLES,
        stateful_step_count=EXAMPLE_STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    done: Counter[bool] = Counter()
    for number in itertools.count(first_seed):
        machine = seed(number)(type("SeededMachine", (StoreMachine,), {"done": done}))
        try:
            run_state_machine_as_test(machine, settings=given)
        except BaseException as error:
            error.add_note(f"again: python -m stepwell.testing --hypothesis --seed {number} --steps 1")
            raise
        told(done.total())
        if done.total() >= steps:
            return done
    raise AssertionError("seeds do not end")
