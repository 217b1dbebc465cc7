"""When the keeper comes: at once when woken, soon while the store is used, seldom while it is not."""

from __future__ import annotations

import threading

import pytest

from stepwell.keeper import BUSY_INTERVAL, Keeper

NEVER = 1e6
LONG = 30.0


class Rounds:
    """What a keeper calls: counts, and says that there is more to do as often as it is told."""

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self.busy = 0

    def tick(self) -> bool:
        self.busy -= 1
        self.done.release()
        return self.busy >= 0

    def came(self, times: int) -> bool:
        return all(self.done.acquire(timeout=LONG) for _ in range(times))


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


def test_a_use_brings_rounds_that_idleness_does_not(rounds: Rounds) -> None:
    keeper = Keeper(rounds.tick, interval=NEVER, busy_interval=0.0)
    keeper.start()
    for _ in range(20):
        keeper.note_use()
        assert rounds.came(2)  # one, and one for what was noted in the index only after it
    keeper.stop()


def test_rounds_go_on_while_there_is_more_to_write(rounds: Rounds) -> None:
    keeper = Keeper(rounds.tick, interval=NEVER, busy_interval=0.0)
    rounds.busy = 10
    keeper.start()
    keeper.wake()
    assert rounds.came(11)
    keeper.stop()


def test_a_wake_does_not_wait_for_the_rhythm(rounds: Rounds) -> None:
    keeper = Keeper(rounds.tick, interval=NEVER, busy_interval=NEVER)
    keeper.start()
    keeper.note_use()
    keeper.wake()
    assert rounds.came(1)
    keeper.wake()
    assert rounds.came(1)
    keeper.stop()
    assert not keeper.is_running


def test_a_wake_during_a_round_brings_another(rounds: Rounds) -> None:
    class Waking(Rounds):
        def tick(self) -> bool:
            if self.done._value == 0:  # type: ignore[attr-defined]
                keeper.wake()
            return super().tick()

    waking = Waking()
    keeper = Keeper(waking.tick, interval=NEVER, busy_interval=NEVER)
    keeper.start()
    keeper.wake()
    assert waking.came(2)
    keeper.stop()


def test_the_rhythm_of_use_leaves_time_for_the_writing_itself() -> None:
    assert BUSY_INTERVAL <= 0.09  # of the 100 ms that FORMAT.md 2.4 states
