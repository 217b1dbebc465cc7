"""Hold a tier to refusing what is misuse, and to having changed nothing then."""

from __future__ import annotations

from stepwell.testing.suite import TierSuite
from stepwell.testing.tier import MOST_KEY_BYTES
from stepwell.testing.trial import Trial


class MisuseContract(TierSuite):
    """Slots that are none or in another state, keys and pages that do not fit, a closed tier."""

    def test_a_slot_that_is_none_is_refused(self) -> None:
        it = self.start()
        self.use(it)
        page = it.page(1)
        for slot in (-1, it.tier.capacity_pages, 1 << 40):
            with it.refused(f"write to slot {slot}"):
                it.tier.write(slot, page.data)
            with it.refused(f"commit of slot {slot}"):
                it.tier.commit(slot, page.checksum)
            with it.refused(f"abort of slot {slot}"):
                it.tier.abort(slot)
            with it.refused(f"read of slot {slot}"):
                it.tier.read(slot)
            with it.refused(f"free of slot {slot}"):
                it.tier.free(slot)
        it.assert_whole()

    def test_a_slot_in_another_state_is_refused(self) -> None:
        it = self.start()
        self.use(it)
        page = it.page(100)
        slot = it.claim(page)
        with it.refused("commit of a slot that was not written"):
            it.tier.commit(slot, page.checksum)
        with it.refused("free of a slot that is claimed"):
            it.tier.free(slot)
        it.tier.write(slot, page.data)
        with it.refused("free of a slot that is written"):
            it.tier.free(slot)
        it.tier.commit(slot, page.checksum)
        it.pages[slot] = page
        with it.refused("a second commit"):
            it.tier.commit(slot, page.checksum)
        with it.refused("write to a slot that is committed"):
            it.tier.write(slot, it.page(101).data)
        with it.refused("abort of a slot that is committed"):
            it.tier.abort(slot)
        it.assert_whole()
        it.drop(slot)
        self._assert_free(it, slot)
        page = it.page(102)
        slot = it.claim(page)
        it.tier.abort(slot)
        self._assert_free(it, slot)
        it.assert_whole()

    def test_what_another_page_has_left_in_a_slot_is_not_committed(self) -> None:
        it = self.start()
        it.fill(1)
        slot = next(iter(it.pages))
        it.drop(slot)
        for aborted in (it.page(1000), it.page(1001)):
            page = it.page(2000)
            assert it.claim(page) == slot, "one slot is free"
            with it.refused("commit of a slot in which only the page before was written"):
                it.tier.commit(slot, page.checksum)
            it.tier.abort(slot)
            it.claim(aborted)
            it.tier.write(slot, aborted.data)
            it.tier.abort(slot)
        it.assert_whole()

    def test_a_key_that_is_here_is_refused(self) -> None:
        it = self.start()
        it.put(1)
        claimed = it.claim(it.page(2))
        for keys in ([it.page(1).key], [it.page(2).key], [b"new", it.page(1).key], [b"twice", b"twice"]):
            with it.refused(f"claim of {keys}"):
                it.tier.claim(keys)
        it.tier.abort(claimed)
        it.assert_whole()

    def test_a_key_without_bytes_or_with_too_many_is_refused(self) -> None:
        it = self.start()
        self.use(it)
        for key in (b"", b"k" * (MOST_KEY_BYTES + 1), b"k" * 5000):
            with it.refused(f"claim of a key of {len(key)} bytes"):
                it.tier.claim([b"new", key])
        it.assert_whole()

    def test_a_page_of_another_length_is_refused(self) -> None:
        it = self.start()
        page = it.page(1)
        slot = it.claim(page)
        it.tier.write(slot, page.data)
        for data in (b"", page.data[:-1], page.data + b"x"):
            with it.refused(f"write of {len(data)} bytes"):
                it.tier.write(slot, data)
        it.tier.commit(slot, page.checksum)
        it.pages[slot] = page
        it.assert_whole()

    def test_a_closed_tier_refuses_everything_but_close(self) -> None:
        it = self.start()
        committed, claimed = it.put(1), it.claim(it.page(2))
        page = it.page(2)
        it.tier.close()
        it.tier.close()
        with it.refused("claim in a closed tier"):
            it.tier.claim([b"new"])
        with it.refused("write to a closed tier"):
            it.tier.write(claimed, page.data)
        with it.refused("commit in a closed tier"):
            it.tier.commit(claimed, page.checksum)
        with it.refused("abort in a closed tier"):
            it.tier.abort(claimed)
        with it.refused("read from a closed tier"):
            it.tier.read(committed)
        with it.refused("free in a closed tier"):
            it.tier.free(committed)
        with it.refused("recover of a closed tier"):
            it.tier.recover()

    def _assert_free(self, it: Trial, slot: int) -> None:
        """Check that a slot that was given back is refused."""
        page = it.page(1)
        with it.refused("write to a free slot"):
            it.tier.write(slot, page.data)
        with it.refused("commit of a free slot"):
            it.tier.commit(slot, page.checksum)
        with it.refused("abort of a free slot"):
            it.tier.abort(slot)
        with it.refused("read of a free slot"):
            it.tier.read(slot)
        with it.refused("free of a free slot"):
            it.tier.free(slot)
