"""The tier that README writes passes the suite, and what could be wrong in it is found, by the test that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from store_kit import Directories
from tier_kit import changed, readme_tier, run_pytest

FAULTS = {
    "publishes before the bytes are complete": (
        [
            (
                '        with self.path(slot, "new").open("r+b") as file:\n',
                "        self.records[slot] = Record(slot, self.keys[slot], checksum)\n"
                '        with self.path(slot, "new").open("r+b") as file:\n',
            )
        ],
        {"test_a_commit_that_fails_publishes_nothing"},
    ),
    "writes where a page is looked for": (
        [
            ('self.path(slot, "new").write_bytes(page)', 'self.path(slot, "page").write_bytes(page)'),
            ('if not self.path(slot, "new").exists()', 'if not self.path(slot, "page").exists()'),
            ('with self.path(slot, "new").open', 'with self.path(slot, "page").open'),
            ('        self.path(slot, "new").replace(self.path(slot, "page"))  # all of it at once, or nothing\n', ""),
            (' and checksum == page_checksum(key, page).to_bytes(4, "little")', ""),
        ],
        {
            "test_a_crash_at_any_file_call_leaves_each_page_whole_or_absent",
            "test_claims_do_not_outlive_their_tier",
            "test_calls_in_any_order_do_what_the_model_says",
        },
    ),
    "leaves the file of a page that is freed": (
        [('        self.path(slot, "page").unlink(missing_ok=True)\n', "")],
        {
            "test_what_was_freed_is_not_recovered",
            "test_the_last_page_of_a_key_is_recovered",
            "test_calls_in_any_order_do_what_the_model_says",
        },
    ),
    "gives slots twice": (
        [("if slot not in self.keys]", "if slot not in self.records]")],
        {
            "test_a_new_tier_is_empty_and_has_room",
            "test_claims_take_each_slot_once_until_the_tier_is_full",
            "test_calls_in_any_order_do_what_the_model_says",
        },
    ),
    "does not verify": (
        [("return page if page_checksum(record.key, page) == record.checksum else None", "return page")],
        {
            "test_a_page_that_does_not_have_its_checksum_is_not_served",
            "test_a_damaged_page_is_not_served_and_its_slot_is_used_again",
            "test_pages_that_changed_places_are_not_served",
            "test_calls_in_any_order_do_what_the_model_says",
        },
    ),
    "does not verify what it recovers": (
        [(' and checksum == page_checksum(key, page).to_bytes(4, "little")', "")],
        {"test_a_damaged_page_is_not_served_and_its_slot_is_used_again"},
    ),
    "claims without a lock": (
        [("with self.lock:", "if True:")],
        {"test_no_two_threads_are_given_one_slot"},
    ),
    "takes a write that was cut short for whole": (
        [
            (
                'self.path(slot, "new").write_bytes(page)',
                'with self.path(slot, "new").open("wb", buffering=0) as file:\n            file.write(page)',
            )
        ],
        {"test_a_write_that_is_cut_short_is_not_taken_for_whole"},
    ),
    "keeps what it writes in a buffer of the process": (
        [
            ('with self.path(slot, "new").open("r+b") as file:', 'if file := self.path(slot, "new").open("r+b"):'),
            ("        self.records[slot] = Record(", "        self.file = file\n        self.records[slot] = Record("),
        ],
        {"test_what_was_committed_is_recovered_after_a_crash"},
    ),
}


def test_the_tier_of_the_readme_passes_the_suite(tmp_path: Path) -> None:
    (tmp_path / "mytier.py").write_text(readme_tier())
    run = run_pytest(tmp_path, "--stepwell-tier", "mytier:DirectoryTier")
    assert run.code == 0, run.output
    assert len(run.named("passed")) >= 40
    assert run.named("skipped") == {"test_nothing_is_found_of_a_tier_that_does_not_last"}
    assert "stepwell: the contract of a tier, over mytier:DirectoryTier" in run.output


def test_the_tier_of_the_readme_is_short() -> None:
    assert sum(1 for line in readme_tier().splitlines() if line.strip()) < 70


RACES = {"claims without a lock"}
MORE_TRIES = 7


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_tier_of_the_readme_is_found(fault: str, directories: Directories, tmp_path: Path) -> None:
    changes, finders = FAULTS[fault]
    (tmp_path / "mytier.py").write_text(changed(readme_tier(), *changes))
    directories.shared.mkdir()
    quick = ("--stepwell-directory", str(directories.shared), "--stepwell-examples", "50", "--tb=short")
    run = run_pytest(tmp_path, "--stepwell-tier", "mytier:DirectoryTier", *quick)
    for _ in range(MORE_TRIES if fault in RACES else 0):  # threads do not meet in every run
        if finders <= run.named("failed"):
            break
        run = run_pytest(tmp_path, "--stepwell-tier", "mytier:DirectoryTier", *quick)
    assert run.code == 1, run.output
    assert finders <= run.named("failed"), f"{sorted(finders - run.named('failed'))} passed"
