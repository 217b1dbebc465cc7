"""Hold a tier to what is found of it when it is made again, after close() and after a crash at any file call."""

from __future__ import annotations

import itertools

import pytest

from stepwell.testing import file_calls
from stepwell.testing.suite import TierSuite
from stepwell.testing.trial import Story


class LastingContract(TierSuite):
    """Recovered is what was committed, all of it, whole; nothing that was not, or was freed."""

    def test_what_was_committed_is_recovered_after_close(self) -> None:
        it = self.start_lasting()
        self.use(it)
        it.reopen()
        it.assert_whole()
        it.put(50)
        it.reopen()
        it.assert_whole()

    def test_what_was_committed_is_recovered_after_a_crash(self) -> None:
        it = self.start_lasting()
        self.use(it)
        it.crash()
        it.assert_whole()
        it.put(50)
        it.crash()
        it.assert_whole()

    def test_what_was_freed_is_not_recovered(self) -> None:
        it = self.start_lasting()
        it.fill(1)
        for slot in list(it.pages)[1::2]:
            it.drop(slot)
        it.crash()
        it.assert_whole()
        for slot in list(it.pages)[1::2]:
            it.drop(slot)
        it.reopen()
        it.assert_whole()

    def test_the_last_page_of_a_key_is_recovered(self) -> None:
        it = self.start_lasting()
        for version in range(3):
            it.put(1, version)
            it.put(10 + version)
            it.crash()
            it.assert_whole()
            [slot] = [slot for slot, page in it.pages.items() if page.number == 1]
            it.drop(slot)
        it.crash()
        it.assert_whole()

    def test_a_full_tier_is_recovered_full(self) -> None:
        it = self.start_lasting()
        it.fill(1)
        it.reopen()
        it.assert_whole()

    def test_a_crash_at_any_file_call_leaves_each_page_whole_or_absent(self) -> None:
        it = self.start_lasting()
        for nth in itertools.count(1):
            story = Story(it)
            with file_calls.before_call(nth, story.keep) as calls:
                story.tell()
            if not calls.reached:
                if nth == 1:
                    pytest.skip("it makes no file calls from Python: there is nothing to crash at")
                break
            it.crash(story.kept)
            sure, under_way = story.sure_then, story.under_way_then
            when = f"crash before {calls.reached} (file call {nth})"
            it.pages = {}
            for record in it.tier.recover():
                page = sure.pop(record.key, under_way)
                assert page is not None, f"{when}: {record} was not committed, and is here"
                assert page.key == record.key, f"{when}: {record} was not committed, and is here"
                it.pages[record.slot] = page
            assert not sure, f"{when}: committed and lost: {sorted(sure)}"
            it.assert_whole()
            for slot in list(it.pages):
                it.drop(slot)

    def test_nothing_is_found_of_a_tier_that_does_not_last(self) -> None:
        it = self.start()
        if it.tier.lasts:
            pytest.skip("this tier lasts (lasts is True)")
        it.fill(1)
        it.tier.close()
        it.pages = {}
        it.reopen()
        it.assert_whole()

    @pytest.mark.parametrize("crashes", [False, True])
    def test_claims_do_not_outlive_their_tier(self, crashes: bool) -> None:
        it = self.start_lasting()
        it.put(1)
        it.claim(it.page(2))
        it.tier.write(it.claim(it.page(3)), it.page(3).data)
        if crashes:
            it.crash()
        else:
            it.reopen()
        it.assert_whole()
