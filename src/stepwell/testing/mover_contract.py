"""The suite that stepwell's mover passes, and that anyone can point at their own.

    pytest --stepwell-mover package.module:make

needs no file of tests. Or subclass it, and let pytest collect that:

    class TestMyMover(MoverContract):
        def make(self, layer_bytes: Sequence[int]) -> Mover: ...          # called again for each test

What must hold is said in `stepwell.testing.mover.Mover`. A test that a mover cannot be put to says why it was skipped.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from typing import ClassVar

import pytest

from stepwell.errors import StepwellUsageError
from stepwell.testing.mover import Copy, Full, Mover, Outcome
from stepwell.testing.mover_trial import PATIENCE, Batch, MoverTrial

LAYERS = (4096, 1024, 3072)
LARGE = (1 << 16, 1 << 16, 1 << 16, 1 << 16)
SIZES = [(1,), (7, 1, 130), (64,), (512, 512), LAYERS, (4096,), (65537, 3), LARGE]
_THREADS = 4
_BATCHES = 20
_SWITCH_SECONDS = 1e-5
"""In the 5 ms that a thread of Python runs as a rule it copies a whole batch, and nobody sees it half done."""


class MoverContract:
    """What holds for every mover. Subclass it and answer `make`.

    examples: how many random orders of calls are tried. is_single: it has no threads, and is called by one.
    """

    examples: ClassVar[int] = 30
    is_single: ClassVar[bool] = False

    def make(self, layer_bytes: Sequence[int]) -> Mover:
        """Return a mover of pages of such layers."""
        raise NotImplementedError

    def setup_method(self) -> None:
        """Have no mover yet, and threads of Python that take turns as often as they can."""
        self._trials: list[MoverTrial] = []
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)

    def teardown_method(self) -> None:
        """Close what a test has left open."""
        try:
            for trial in self._trials:
                trial.mover.close(PATIENCE)
        finally:
            sys.setswitchinterval(self._switch_interval)

    def start(self, layer_bytes: Sequence[int] = LAYERS, *, rows: int = 64) -> MoverTrial:
        """Make the mover of a test, and the memory beside it."""
        trial = MoverTrial(self.make(layer_bytes), rows=rows)
        self._trials.append(trial)
        return trial

    # ---- bytes ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("by_layer", [False, True], ids=["pages", "layers"])
    @pytest.mark.parametrize("layer_bytes", SIZES, ids=lambda sizes: "+".join(map(str, sizes)))
    def test_each_page_has_the_bytes_of_its_source_and_nothing_else_is_touched(
        self, layer_bytes: Sequence[int], by_layer: bool
    ) -> None:
        it = self.start(layer_bytes)
        assert list(it.mover.layer_bytes) == list(layer_bytes)
        batch = it.submit([Copy(source, 2 * source + 1) for source in (5, 0, 9, 3)], by_layer=by_layer)
        it.finish(batch)
        assert set(batch.transfer.outcomes) == {Outcome.LANDED}
        it.check_all()

    def test_a_source_is_copied_as_it_was_put_last(self) -> None:
        it = self.start()
        it.finish(it.submit([Copy(2, 0), Copy(3, 1)]))
        it.put(2)
        batch = it.submit([Copy(2, 2), Copy(3, 3)])
        it.finish(batch)
        assert set(batch.transfer.outcomes) == {Outcome.LANDED}
        it.check_all()

    # ---- what is told -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("end", ["itself", "cancel", "revoke", "deadline"])
    def test_each_page_has_one_outcome_and_keeps_it(self, end: str) -> None:
        it = self.start(LARGE)
        for _ in range(8):
            batch = it.submit(it.sixteen(), deadline=0.0 if end == "deadline" else None)
            it.end(batch, end)
            seen = list(batch.transfer.outcomes)
            while not batch.transfer.wait(0.0):
                now = list(batch.transfer.outcomes)
                assert len(now) == 16
                changed = [(was, is_) for was, is_ in zip(seen, now, strict=True) if was not in (Outcome.PENDING, is_)]
                assert changed == [], "an outcome changed"
                seen = now
            it.finish(batch)
            last = list(batch.transfer.outcomes)
            assert all(was in (Outcome.PENDING, is_) for was, is_ in zip(seen, last, strict=True)), "an outcome changed"
            assert end != "itself" or set(last) == {Outcome.LANDED}
            assert Outcome.FAILED not in last
        it.check_all()

    def test_each_completion_is_told_once(self) -> None:
        it = self.start(LARGE)
        ends = ("itself", "cancel", "revoke", "deadline")
        for number in range(24):
            batch = it.submit(it.sixteen(), deadline=0.0 if number % 4 == 3 else None)
            it.end(batch, ends[number % 4])
            it.poll()
            it.finish(batch)
        it.close(PATIENCE)
        it.check_told()

    # ---- layers -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("by_layer", [False, True], ids=["pages", "layers"])
    def test_a_layer_that_is_done_has_its_bytes(self, by_layer: bool) -> None:
        it = self.start(LARGE)
        for _ in range(8):
            batch = it.submit(it.sixteen(), by_layer=by_layer)
            before = 0
            while True:
                is_over = batch.transfer.wait(0.0)
                done = batch.transfer.layers_done
                assert before <= done <= len(LARGE), "layers_done went back, or beyond the last"
                it.check_layers(batch, done)
                before = done
                if is_over:
                    break
            it.finish(batch)
            assert batch.transfer.layers_done == len(LARGE)

    def test_layers_done_does_not_count_on_a_page_that_failed(self) -> None:
        it = self.start()
        it.mover.spoil(4)
        batch = it.submit([Copy(source, source) for source in range(8)], by_layer=True)
        it.finish(batch)
        assert batch.transfer.layers_done == len(LAYERS)
        it.check_layers(batch, len(LAYERS))

    # ---- nothing lands afterwards -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("by_layer", [False, True], ids=["pages", "layers"])
    @pytest.mark.parametrize("end", ["itself", "cancel", "revoke", "deadline"])
    def test_nothing_lands_once_a_batch_is_over(self, end: str, by_layer: bool) -> None:
        it = self.start(LARGE)
        for number in range(16):
            rows = number % 3 * 16  # what lands late is not in the rows of the next batch
            copies = [Copy(source, rows + source) for source in range(16)]
            batch = it.submit(copies, by_layer=by_layer, deadline=0.0 if end == "deadline" else None)
            for _ in range(0 if end == "deadline" else number):
                batch.transfer.wait(0.0)  # a little later each time
            it.end(batch, end)
            if end in ("cancel", "itself"):
                assert batch.transfer.wait(PATIENCE)
            assert batch.transfer.wait(0.0), f"it goes on after its {end}"
            it.check(batch)
            it.take_back(batch)
            after = it.submit([Copy(16, 60)])
            it.finish(after)
            it.check_all()
        it.close(PATIENCE)
        it.check_all()

    # ---- full -------------------------------------------------------------------------------------------------------

    def test_a_full_queue_says_so_and_loses_nothing(self) -> None:
        it = self.start(LARGE, rows=600)
        accepted: list[Batch] = []
        refused = 0
        for number in range(2 * it.mover.most_transfers + 2):
            rows = range(number % 37 * 16, number % 37 * 16 + 16)
            for batch in [each for each in accepted if each.has_row(rows[0])]:
                it.finish(batch)
            found = it.try_submit([Copy(place, row) for place, row in enumerate(rows)])
            if isinstance(found, Full):
                refused += 1
                it.finish(next(each for each in accepted if not each.is_over))
                continue
            accepted.append(found)
            under_way = sum(not each.transfer.wait(0.0) for each in accepted if not each.is_over)
            assert under_way <= it.mover.most_transfers, f"{under_way} batches are under way, and it does not say full"
        for batch in accepted:
            it.finish(batch)
            assert set(batch.transfer.outcomes) == {Outcome.LANDED}
        it.check_all()
        it.close(PATIENCE)
        it.check_told()

    # ---- closing ----------------------------------------------------------------------------------------------------

    def test_closing_with_patience_drains_and_says_so(self) -> None:
        it = self.start(LARGE)
        batches = [it.submit([Copy(source, source)]) for source in range(16)]
        assert it.close(PATIENCE) is True
        for batch in batches:
            assert batch.transfer.wait(0.0), "it is closed, and a batch is not over"
            assert set(batch.transfer.outcomes) == {Outcome.LANDED}
        it.check_all()
        it.check_told()

    def test_closing_at_once_cancels_the_rest_and_says_so(self) -> None:
        for _ in range(8):
            it = self.start(LARGE)
            batches = [it.submit([Copy(row % 16, row) for row in range(at, at + 16)]) for at in (0, 16, 32, 48)]
            is_drained = it.close(0.0)
            for batch in batches:
                assert batch.transfer.wait(0.0), "it is closed, and a batch is not over"
            outcomes = {outcome for batch in batches for outcome in batch.transfer.outcomes}
            assert outcomes <= {Outcome.LANDED, Outcome.CANCELLED}
            assert not (is_drained and Outcome.CANCELLED in outcomes), (
                "it says that all have ended, and some were cancelled"
            )
            it.check_told()
            for batch in batches:
                it.check(batch)
                it.take_back(batch)
            assert it.close(PATIENCE) == is_drained, "closed again it says something else"
            it.check_all()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def test_many_threads_submit_at_once_and_each_gets_what_it_asked_for(self) -> None:
        if self.is_single:
            pytest.skip("it has no threads: one calls it (is_single)")
        it = self.start(rows=_THREADS * 16)
        errors: list[BaseException] = []

        def use(first_row: int) -> None:
            try:
                for number in range(_BATCHES):
                    copies = [Copy((place + number) % 16, first_row + place) for place in range(16)]
                    while isinstance(batch := it.try_submit(copies), Full):
                        pass  # a batch of another thread ends meanwhile
                    it.poll()
                    it.finish(batch)
                    assert set(batch.transfer.outcomes) == {Outcome.LANDED}
            except BaseException as error:  # noqa: BLE001 raised below
                errors.append(error)

        threads = [threading.Thread(target=use, args=(16 * number,), daemon=True) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a thread waits for ever"
        if errors:
            raise errors[0]
        it.check_all()
        it.close(PATIENCE)
        it.check_told()

    # ---- sources that fail ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("by_layer", [False, True], ids=["pages", "layers"])
    @pytest.mark.parametrize("layer_bytes", [(64,), LAYERS, LARGE], ids=lambda sizes: "+".join(map(str, sizes)))
    def test_a_source_that_changed_costs_its_page_alone(self, layer_bytes: Sequence[int], by_layer: bool) -> None:
        it = self.start(layer_bytes)
        bad = {1, 6, 15}
        for source in bad:
            it.mover.spoil(source)
        self._check_costs(it, bad, by_layer)

    @pytest.mark.parametrize("by_layer", [False, True], ids=["pages", "layers"])
    def test_a_source_that_is_gone_costs_its_page_alone(self, by_layer: bool) -> None:
        it = self.start()
        bad = {0, 7}
        if not all(it.mover.lose(source) for source in bad):
            pytest.skip("its sources cannot be gone (lose() says False)")
        self._check_costs(it, bad, by_layer)

    def _check_costs(self, it: MoverTrial, bad: set[int], by_layer: bool) -> None:
        batch = it.submit([Copy(source, source) for source in range(16)], by_layer=by_layer)
        it.finish(batch)
        failed = {at for at, outcome in enumerate(batch.transfer.outcomes) if outcome is Outcome.FAILED}
        assert failed == bad, f"pages {sorted(failed)} failed, of sources {sorted(bad)} that are bad"
        it.check_all()
        again = it.submit([Copy(source, 20 + source) for source in range(16) if source not in bad], by_layer=by_layer)
        it.finish(again)
        assert set(again.transfer.outcomes) == {Outcome.LANDED}, "a page failed long after the bad ones"
        it.check_all()

    # ---- misuse -----------------------------------------------------------------------------------------------------

    def test_what_cannot_be_copied_is_refused_and_changes_nothing(self) -> None:
        it = self.start(rows=8)
        never_put = it.mover.sources - 1
        for copies in ([Copy(never_put, 0)], [Copy(0, 8)], [Copy(0, -1)], [Copy(0, 3), Copy(1, 3)], [Copy(-1, 0)]):
            with pytest.raises(StepwellUsageError):
                it.mover.submit(copies, into=it.memory, tag=999)
        it.check_all()
        batch = it.submit([Copy(0, 0)])
        it.finish(batch)
        it.close(PATIENCE)
        with pytest.raises(StepwellUsageError):
            it.mover.submit([Copy(0, 1)], into=it.memory, tag=999)
        with pytest.raises(StepwellUsageError):
            it.mover.put(0, bytes(sum(LAYERS)))
        it.check_told()
        it.check_all()

    # ---- any order --------------------------------------------------------------------------------------------------

    def test_batches_in_any_order_do_what_they_say(self) -> None:
        for seed in range(self.examples):
            it = self.start(random.Random(seed).choice(SIZES), rows=64)
            try:
                it.play(random.Random(seed), steps=60)
                it.close(random.Random(seed).choice((0.0, PATIENCE)))
                it.check_told()
                it.check_all()
            except AssertionError as error:
                raise AssertionError(f"order {seed}: {' '.join(it.log)}: {error}") from error
