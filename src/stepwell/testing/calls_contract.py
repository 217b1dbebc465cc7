"""Hold single calls, and threads that call at once, to what a tier promises."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from stepwell.testing.crowd import (
    Crowd,
    abort_all,
    claim_all,
    claim_one,
    read_until_committed,
    run_together,
    write_and_commit,
)
from stepwell.testing.suite import PAGES, TierSuite
from stepwell.testing.tier import MOST_KEY_BYTES, Full, page_checksum


class CallsContract(TierSuite):
    """Capacity, claim, write, commit, read, abort, free; one thread, and several."""

    def test_a_new_tier_is_empty_and_has_room(self) -> None:
        it = self.start()
        assert it.tier.capacity_pages >= 2 * PAGES - 2, "the suite needs 8 pages at least"
        assert it.tier.page_bytes >= 16, "the suite needs pages of 16 bytes at least"
        it.assert_whole()

    def test_claims_take_each_slot_once_until_the_tier_is_full(self) -> None:
        it = self.start()
        pages = [it.page(number) for number in range(it.tier.capacity_pages)]
        slots = [it.claim(page) for page in pages]
        assert sorted(slots) == list(range(it.tier.capacity_pages)), f"one claim after the other was given {slots}"
        assert it.tier.claim([b"one more"]) == Full(needed=1, free=0)
        for slot in slots:
            it.tier.abort(slot)
        it.fill(1)
        assert it.tier.claim([b"one more"]) == Full(needed=1, free=0)
        it.assert_whole()

    def test_a_claim_that_finds_too_little_room_takes_nothing(self) -> None:
        it = self.start()
        it.fill(1)
        it.drop(next(iter(it.pages)))
        assert it.tier.claim([b"one", b"two"]) == Full(needed=2, free=1)
        it.assert_whole()
        it.put(1000)
        it.assert_whole()

    def test_a_claim_of_no_key_takes_nothing(self) -> None:
        it = self.start()
        assert it.tier.claim([]) == []
        it.assert_whole()

    # ---- write, commit, read

    def test_what_was_committed_is_read_back(self) -> None:
        it = self.start()
        for number in range(PAGES):
            it.put(number)
            it.assert_pages()
        it.assert_whole()

    def test_pages_of_one_claim_do_not_change_places(self) -> None:
        it = self.start()
        pages = [it.page(number) for number in range(PAGES)]
        slots = it.tier.claim([page.key for page in pages])
        assert not isinstance(slots, Full)
        for slot, page in reversed(list(zip(slots, pages, strict=True))):
            it.tier.write(slot, page.data)
        for slot, page in zip(slots, pages, strict=True):
            it.tier.commit(slot, page.checksum)
            it.pages[slot] = page
        it.assert_whole()

    def test_a_key_and_a_page_may_be_any_bytes(self) -> None:
        it = self.start()
        size = it.tier.page_bytes
        rows = (bytes(size), b"\xff" * size, b"\n" * size, bytes(range(256)) * (size // 256 + 1))
        keys = (b"\0", b"..", b"a/b", b"\xff" * MOST_KEY_BYTES, b"\0" * MOST_KEY_BYTES, b"A", b"a")
        held = {}
        for place, key in enumerate(keys):
            page = rows[place % len(rows)][:size]
            slots = it.tier.claim([key])
            assert not isinstance(slots, Full)
            it.tier.write(slots[0], page)
            it.tier.commit(slots[0], page_checksum(key, page))
            held[key] = page
        if it.tier.lasts:
            it.reopen()
        found = {record.key: it.tier.read(record.slot) for record in it.tier.recover()}
        assert found == held

    def test_a_page_can_be_read_only_once_it_is_committed(self) -> None:
        it = self.start()
        page = it.page(1)
        slot = it.claim(page)
        with it.refused("read of a slot that is claimed"):
            it.tier.read(slot)
        it.tier.write(slot, page.data)
        with it.refused("read of a slot that is written and not committed"):
            it.tier.read(slot)
        it.assert_pages()
        it.tier.commit(slot, page.checksum)
        it.pages[slot] = page
        it.assert_whole()

    def test_of_a_page_that_is_written_twice_the_second_counts(self) -> None:
        it = self.start()
        page = it.page(1, version=2)
        slot = it.claim(page)
        it.tier.write(slot, it.page(1, version=1).data)
        it.tier.write(slot, page.data)
        it.tier.commit(slot, page.checksum)
        it.pages[slot] = page
        it.assert_whole()

    # ---- abort, free

    @pytest.mark.parametrize("is_written", [False, True])
    def test_a_claim_that_is_aborted_gives_its_slot_back_and_publishes_nothing(self, is_written: bool) -> None:
        it = self.start()
        it.put(2)
        page = it.page(1)
        slot = it.claim(page)
        if is_written:
            it.tier.write(slot, page.data)
        it.tier.abort(slot)
        it.assert_whole()
        it.put(1, version=1)
        it.assert_whole()

    def test_what_was_freed_is_gone_and_its_slot_serves_others(self) -> None:
        it = self.start()
        for version in range(3):
            it.fill(100 * version, version)
            it.assert_whole()
            for slot in list(it.pages)[::2]:
                it.drop(slot)
            it.assert_whole()
        for slot in list(it.pages):
            it.drop(slot)
        it.assert_whole()

    # ---- threads

    def test_threads_that_write_read_and_free_never_see_what_is_not_so(self) -> None:
        it = self.start()
        crowd = Crowd(it.tier)
        jobs = [partial(crowd.write, writer, 60) for writer in range(1, 5)]
        jobs += [partial(crowd.read, reader, 120) for reader in range(1, 3)]
        run_together(jobs, what="writers and readers")
        it.assert_whole()

    def test_no_two_threads_are_given_one_slot(self) -> None:
        it = self.start()
        for _ in range(10):
            slots: list[list[int]] = [[] for _ in range(4)]
            run_together([partial(claim_all, it.tier, f"{n}", mine) for n, mine in enumerate(slots)], what="claims")
            assert sorted(slot for mine in slots for slot in mine) == list(range(it.tier.capacity_pages))
            run_together([partial(abort_all, it.tier, mine) for mine in slots], what="aborts")
            it.assert_whole()

    def test_threads_that_claim_one_key_get_one_slot(self) -> None:
        it = self.start()
        for _ in range(10):
            slots: list[int] = []
            run_together([partial(claim_one, it.tier, b"key", slots)] * 4, what="claims of one key")
            assert len(slots) == 1, f"slots {slots} were given for one key"
            it.tier.abort(slots[0])
        it.assert_whole()

    def test_readers_see_a_page_only_once_it_is_committed(self) -> None:
        it = self.start()
        for number in range(10):
            page = it.page(number)
            slot = it.claim(page)
            begun = threading.Event()
            readers = [partial(read_until_committed, it.tier, slot, page, begun)] * 2
            run_together([partial(write_and_commit, it.tier, slot, page, begun), *readers], what="readers of one page")
            it.pages[slot] = page
            it.assert_pages()
            it.drop(slot)
