"""A small mover in Python passes the suite by pytest's option, and what could be wrong in it is found, by the test that
is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tier_kit import changed, run_pytest

MOVER = "--stepwell-mover"
SMALL = Path(__file__).with_name("small_mover.py").read_text()
FAULTS = {
    "goes on to land after a revoke": (
        [
            ("if self.over.is_set() or self.outcomes[page] is not PENDING:", "if self.outcomes[page] is FAILED:"),
            ("        self.is_stopped = True\n        with self.lock:  # nobody", "        with self.lock:  # nobody"),
        ],
        {"test_nothing_lands_once_a_batch_is_over"},
    ),
    "does not look at its deadline": (
        [("            self.revoke()\n        return self.over.is_set()", "            pass\n        return True")],
        {"test_nothing_lands_once_a_batch_is_over"},
    ),
    "tells of each batch twice": (
        [("self.told.append(transfer.tag)", "self.told.extend([transfer.tag] * 2)")],
        {"test_each_completion_is_told_once", "test_closing_with_patience_drains_and_says_so"},
    ),
    "does not tell of a batch that was stopped": (
        [("self.told.append(transfer.tag)", "self.told.extend([] if transfer.is_stopped else [transfer.tag])")],
        {"test_each_completion_is_told_once"},
    ),
    "counts a layer before it has landed": (
        [
            (
                "                if not self.is_stopped:\n                    for page in pages:\n",
                # It waits, so that who looks sees it, however busy the machine is.
                "                if not self.is_stopped:\n                    self.layers_done = layer + 1\n"
                "                    threading.Event().wait(0.001)\n"
                "                    for page in pages:\n",
            )
        ],
        {"test_a_layer_that_is_done_has_its_bytes"},
    ),
    "never says full": (
        [("if len(self.waiting) + len(self.running) >= self.most_transfers:", "if False:")],
        {"test_a_full_queue_says_so_and_loses_nothing"},
    ),
    "does what it has said it has no room for": (
        [
            (
                "                return Full(len(copies), 0)\n",
                "                transfer = SmallTransfer(self, list(copies), into, tag, by_layer, deadline)\n"
                "                self.waiting.append(transfer)\n"
                "                return Full(len(copies), 0)\n",
            )
        ],
        {"test_a_full_queue_says_so_and_loses_nothing"},
    ),
    "does not verify": (
        [('is_right = page_checksum(b"layer", piece) == checksums[layer]', "is_right = True")],
        {"test_a_source_that_changed_costs_its_page_alone", "test_batches_in_any_order_do_what_they_say"},
    ),
    "gives up the batch for a bad page": (
        [("self.outcomes[page] = FAILED", "self.outcomes = [FAILED] * len(self.copies)")],
        {"test_a_source_that_changed_costs_its_page_alone", "test_batches_in_any_order_do_what_they_say"},
    ),
    "says that it has drained what it has cancelled": (
        [("self.drained = not any(CANCELLED in transfer.outcomes for transfer in rest)", "self.drained = True")],
        {"test_closing_at_once_cancels_the_rest_and_says_so"},
    ),
    "leaves the last bytes of odd layers": (
        [
            (
                "self.into[copy.row, first : first + sizes[layer]] = np.frombuffer(piece, np.uint8)",
                "whole = len(piece) // 8 * 8\n"
                "            self.into[copy.row, first : first + whole] = np.frombuffer(piece, np.uint8)[:whole]",
            )
        ],
        {"test_each_page_has_the_bytes_of_its_source_and_nothing_else_is_touched"},
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mymover.py").write_text(SMALL)
    return tmp_path


def test_a_small_mover_passes_the_suite(place: Path) -> None:
    run = run_pytest(place, MOVER, "mymover:SmallMover")
    assert run.code == 0, run.output
    assert len(run.outcomes) >= 45
    assert run.named("skipped") == {"test_a_source_that_is_gone_costs_its_page_alone"}
    assert "stepwell: the contract of a mover, over mymover:SmallMover" in run.output


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_small_mover_is_found(fault: str, tmp_path: Path) -> None:
    changes, finders = FAULTS[fault]
    (tmp_path / "mymover.py").write_text(changed(SMALL, *changes))
    chosen = " or ".join(sorted(finders))
    run = run_pytest(tmp_path, MOVER, "mymover:SmallMover", "--tb=short", "-k", chosen)
    assert run.code == 1, run.output
    assert finders <= run.named("failed"), f"{sorted(finders - run.named('failed'))} passed"


def test_a_test_of_the_suite_is_chosen_as_the_summary_names_it(place: Path) -> None:
    one = "test_a_source_is_copied_as_it_was_put_last"
    run = run_pytest(place, MOVER, "mymover:SmallMover", f"stepwell.testing.mover_contract::MoverContract::{one}")
    assert run.outcomes == {one: "passed"}, run.output


SPECS = {
    "mymover": "give MODULE:MAKE, as in mypkg.mymover:make",
    "nowhere:make": "there is no module nowhere",
    "mymover:nothing": "mymover has no nothing",
    "mymover:PENDING": "PENDING is <Outcome.PENDING: 'pending'>; give a function of the bytes of each layer (ints)",
    "half:make": "it returned Half, which is not a Mover: it has no close, layer_bytes, lose, most_transfers, poll, sp",
    "raises:make": "for layers of [64, 64] it raised RuntimeError: no memory",
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_that_is_none_is_one_line_that_says_why(spec: str, place: Path) -> None:
    (place / "raises.py").write_text("def make(layer_bytes):\n    raise RuntimeError('no memory')\n")
    (place / "half.py").write_text(
        "class Half:\n    sources = 24\n    def put(self, source, page): ...\n    submit = put\n"
        "def make(layer_bytes): return Half()\n"
    )
    run = run_pytest(place, MOVER, spec)
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.output
    [line] = [line for line in run.output.splitlines() if line.strip()]
    assert line.startswith(f"ERROR: --stepwell-mover {spec}: {SPECS[spec]}"), line
