"""Hold a tier to serving no wrong byte, and to going on, where files are damaged and file calls fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepwell.testing import file_calls
from stepwell.testing.suite import PAGES, TierSuite
from stepwell.testing.tier import Tier, page_checksum
from stepwell.testing.trial import Page, Trial, assert_bytes


class FaultsContract(TierSuite):
    """Bytes that are not what was committed; each file call of each call of the tier failing once."""

    def test_a_page_that_does_not_have_its_checksum_is_not_served(self) -> None:
        it = self.start()
        page, other = it.page(1), it.page(2)
        slot = it.claim(page)
        it.tier.write(slot, page.data)
        it.tier.commit(slot, page_checksum(page.key, other.data))
        it.put(3)
        assert it.tier.read(slot) is None, "the bytes do not have the checksum that commit() was given, and were served"
        it.tier.free(slot)
        it.assert_whole()

    def test_the_page_of_another_key_is_not_served(self) -> None:
        it = self.start()
        page, other = it.page(1), it.page(2)
        slot = it.claim(page)
        it.tier.write(slot, other.data)
        it.tier.commit(slot, page_checksum(other.key, other.data))
        assert it.tier.read(slot) is None, "the checksum is that of another key, and the page was served"
        it.tier.free(slot)
        it.assert_whole()

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("at", ["first byte", "middle", "last byte"])
    def test_a_damaged_page_is_not_served_and_its_slot_is_used_again(self, at: str, restarts: bool) -> None:
        it = self.start_lasting() if restarts else self.start()
        slots = [it.put(number) for number in range(PAGES)]
        page = it.pages[slots[2]]
        size = it.tier.page_bytes
        offset = {"first byte": 0, "middle": size // 2, "last byte": size - 1}[at]

        def damage() -> None:
            if not it.place.damage(page.data, at=offset):
                pytest.skip("its pages are not found in files of its directory: nobody can damage one from outside")

        self._damaged(it, damage, [page], restarts=restarts)

    @pytest.mark.parametrize("restarts", [False, True])
    def test_pages_that_changed_places_are_not_served(self, restarts: bool) -> None:
        it = self.start_lasting() if restarts else self.start()
        slots = [it.put(number) for number in range(PAGES)]
        first, second = it.pages[slots[1]], it.pages[slots[3]]

        def exchange() -> None:
            if not it.place.exchange(first.data, second.data):
                pytest.skip("its pages are not found in files of its directory: nobody can exchange two from outside")

        self._damaged(it, exchange, [first, second], restarts=restarts)

    def test_a_file_that_was_cut_short_costs_pages_and_nothing_else(self) -> None:
        it = self.start_lasting()
        slots = [it.put(number) for number in range(PAGES)]
        it.tier.close()
        if not it.place.cut(it.pages[slots[2]].data):
            pytest.skip("its pages are not found in files of its directory: nobody can cut one")
        before = {page.key: page for page in it.pages.values()}
        try:
            it.reopen()
        except OSError:
            return  # it may refuse the whole directory
        it.pages = {}
        for record in it.tier.recover():
            data = it.tier.read(record.slot)
            if data is None:
                it.tier.free(record.slot)
            else:
                it.pages[record.slot] = before[record.key]
        it.assert_whole()

    # ---- a failing world

    @pytest.mark.parametrize("then", ["again", "abort"])
    def test_a_write_that_fails_publishes_nothing(self, then: str) -> None:
        it = self.start()
        it.put(1)
        for failure in self.failures():
            page = it.page(2, version=failure.nth)
            slot = it.claim(page)
            if failure.fails(it.tier.write, slot, page.data):
                self._assert_claimed(it, slot)
                if then == "again":
                    it.tier.write(slot, page.data)
            if then == "again":
                it.tier.commit(slot, page.checksum)
                it.pages[slot] = page
                it.assert_whole()
                it.drop(slot)
            else:
                it.tier.abort(slot)
                it.assert_whole()

    def test_a_write_that_is_cut_short_is_not_taken_for_whole(self) -> None:
        it = self.start()
        if self.may_fail:
            pytest.skip("its calls fail by themselves, and are made again until they do not")
        it.fill(0)
        half = it.tier.page_bytes // 2
        ends = {offset + half for page in it.pages.values() for _, offset in it.place.find(page.data)}
        if not ends:
            pytest.skip("its pages are not found in files of its directory: nobody knows where to cut a write")
        for version, end in enumerate(sorted(ends), 1):
            for slot in list(it.pages):
                it.drop(slot)
            for number in range(it.tier.capacity_pages):
                page = it.page(number, version)
                slot = it.claim(page)
                try:
                    with file_calls.files_end_at(end):
                        it.tier.write(slot, page.data)
                except OSError:
                    it.tier.abort(slot)
                else:
                    it.tier.commit(slot, page.checksum)
                    it.pages[slot] = page
            it.assert_whole()

    @pytest.mark.parametrize("then", ["again", "abort"])
    def test_a_commit_that_fails_publishes_nothing(self, then: str) -> None:
        it = self.start()
        it.put(1)
        for failure in self.failures():
            page = it.page(2, version=failure.nth)
            slot = it.claim(page)
            it.tier.write(slot, page.data)
            if failure.fails(it.tier.commit, slot, page.checksum):
                self._assert_claimed(it, slot)
                if then == "abort":
                    it.tier.abort(slot)
                    if it.tier.lasts:
                        it.crash()
                    it.assert_whole()
                    continue
                it.tier.commit(slot, page.checksum)
            it.pages[slot] = page
            it.assert_whole()
            it.drop(slot)

    def test_an_abort_that_fails_is_made_again(self) -> None:
        it = self.start()
        it.put(1)
        for failure in self.failures():
            page = it.page(2, version=failure.nth)
            slot = it.claim(page)
            it.tier.write(slot, page.data)
            if failure.fails(it.tier.abort, slot):
                self._assert_claimed(it, slot)
                it.tier.abort(slot)
            it.assert_whole()

    def test_a_free_that_fails_is_made_again(self) -> None:
        it = self.start()
        it.put(1)
        for failure in self.failures():
            slot = it.put(2, version=failure.nth)
            page = it.pages[slot]
            if failure.fails(it.tier.free, slot):
                data = it.tier.read(slot)
                if data is not None:
                    assert_bytes(data, page)
                it.drop(slot)
            else:
                del it.pages[slot]
            it.assert_whole()
            if it.tier.lasts:
                it.crash()
                it.assert_whole()

    def test_a_read_that_fails_changes_nothing(self) -> None:
        it = self.start()
        slot = it.put(1)
        for failure in self.failures():
            failure.fails(it.tier.read, slot)
            it.assert_whole()

    def test_a_tier_that_could_not_be_made_is_made_again_without_a_wrong_page(self) -> None:
        it = self.start_lasting()
        self.use(it)
        for failure in self.failures():
            it.tier.close()
            made: list[Tier] = []
            if not failure.fails(lambda made=made: made.append(self.make(it.place.directory))):  # type: ignore[misc]
                made[0].close()
            before = {page.key: page for page in it.pages.values()}
            it.reopen()
            it.pages = {record.slot: before[record.key] for record in it.tier.recover()}
            it.assert_whole()

    def _damaged(self, it: Trial, damage: Callable[[], None], victims: list[Page], *, restarts: bool) -> None:
        """Check that after this damage the victims are not served, that the others are, and that slots serve again."""
        before = {page.key: page for page in it.pages.values()}
        if restarts:
            it.reopen(meanwhile=damage)
        else:
            damage()
        it.pages = {}
        for record in it.tier.recover():
            page = before.pop(record.key)
            if page in victims:
                assert it.tier.read(record.slot) is None, f"{page.key!r} was damaged, and was served"
                it.tier.free(record.slot)
            else:
                it.pages[record.slot] = page
        # One that is damaged may be dropped at once where it is found so.
        assert all(page in victims and restarts for page in before.values()), f"lost: {sorted(before)}"
        it.assert_whole()
        for page in victims:
            it.put(page.number)
        it.assert_whole()

    def _assert_claimed(self, it: Trial, slot: int) -> None:
        """Check that a slot is not published."""
        with it.refused("read of a slot of which a call has failed"):
            it.tier.read(slot)
        it.assert_pages()
