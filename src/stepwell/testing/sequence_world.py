"""Hold the sequences of a store to their model: a caller with a device tier, its engine, and a world of such stores.

    operation (sequence_operations.py) -> store -> looks of sequences -> looked(): what was found is what there is
                                                -> see(): every page's state, as without sequences
                                                -> check(): numbers, slots, bytes on the device
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from msgspec.structs import replace

from stepwell import sequence as real
from stepwell.config import DeviceTier, StoreConfig
from stepwell.index import Tier
from stepwell.testing.caller import Caller
from stepwell.testing.model import ABSENT, ARRIVING, RESIDENT, After, BrokenPromise, Step, name
from stepwell.testing.numpy_device import NumpyPool
from stepwell.testing.operations import MOST_PAGES
from stepwell.testing.pages import PAGE_TOKENS, content
from stepwell.testing.sequence_model import SequenceModel, State, owns
from stepwell.testing.world import World

MOST_SEQUENCES: Final = 6
MOST_TOKENS: Final = (MOST_PAGES + 2) * PAGE_TOKENS
DEVICE: Final = int(Tier.DEVICE)
_TABLE_PAGES: Final = MOST_PAGES + 4


class StepFailedError(Exception):
    """What a failing step raises."""


class Open(SequenceModel):
    """An open sequence: the model of it, and the store's own."""

    __slots__ = ("it",)

    it: real.Sequence


class DeviceCaller(Caller):
    """A process whose store has a device tier: its sequences, and their engine.

    Invariant: `sequences` are the open ones, in the order of opening. turn: how often the weights have changed.
    """

    counts_all = False
    sequences: list[Open]

    # ---- the store ---------------------------------------------------------------------------------------------------

    def open(self, found: After, *, at_least: bool = False) -> None:
        """Open the store, as Caller; there are no sequences then."""
        self.sequences = []
        self._by_id: dict[int, Open] = {}
        self._opening: list[Open] = []
        self.turn = 0
        self.may_drop = False
        self.is_ending = False
        self.opened: Sequence[bytes] = ()
        self.private = 0
        self.checks = 0
        super().open(found, at_least=at_least)
        self.device = self.store.device
        self.arrays = cast("NumpyPool", self.device.pool_for_testing())
        self.theirs = self.store._running()
        self._look = self.theirs._look
        self.theirs._look = self._looking  # type: ignore[method-assign]
        self._table = np.empty((MOST_SEQUENCES, _TABLE_PAGES), np.int32)

    def begin_model(self) -> None:
        """Have the model know nothing. What sequences use, and when, is theirs: who leaves first is not judged."""
        super().begin_model()
        self.model.is_ordered = False

    def moved(self) -> Step:
        """Say what the store's half of a step may have done."""
        gives_up = self.is_ending or self.may_lose
        return Step(wanted=self.opened, room=bool(self.opened), lands=True, mends=True, gives_up=gives_up)

    @property
    def may_lose(self) -> bool:
        """Whether what is on its way may be lost: a pool, a gather, or what any caller's may be."""
        return self.may_drop or super().may_lose

    def expect(self, models: Sequence[Open]) -> None:
        """Have sequences of these models be the next ones that look for the first time."""
        self._opening = list(models)

    def _looking(self, sequence: real.Sequence, *, is_first: bool = False) -> None:
        """Look, in place of the store's own look: what it finds is compared with what the model says it must."""
        it = self._by_id.get(id(sequence))
        if it is None:
            it = self._opening.pop(0)
            it.it = sequence
            self._by_id[id(sequence)] = it
        self.see(self.moved())
        if it.turn != self.turn:
            self._look(sequence, is_first=is_first)
            it.stop_waiting()
            return
        found = self.model.find(it.usable_keys, [DEVICE, *self.usable])
        self._look(sequence, is_first=is_first)
        self.pin(it, -1)
        target = (sequence.ready + sequence.loading) // PAGE_TOKENS
        it.looked(found, target, self.model.states, sequence._block["slot"].tolist())
        self.check_stall(it)
        for place, key in zip(it.places, it.keys, strict=False):
            place.content = self.page(it.epoch, key)
        self.pin(it, +1)
        self.see(replace(self.moved(), wanted=it.keys[: found.pages], room=True))

    def pin(self, it: Open, change: int) -> None:
        """Count (+1) or return (-1) what a sequence pins; nothing where its pages are of another epoch."""
        if it.epoch == self.epoch:
            if it.leased:
                keys, tiers = zip(*it.leased, strict=True)
                self.model.pin(keys, tiers, change)
            self.model.claim(it.claimed, change)

    def end(self, it: Open, state: State) -> None:
        """Take back what a sequence had: it was suspended, lost or closed. What it loads comes to host memory still."""
        self.pin(it, -1)
        loads = it.keys[it.ready : it.target] if it.epoch == self.epoch else ()
        self.model.carried.update(loads)  # the transfer that brings or checks them goes on
        for key in loads:
            page = self.model.pages.get(key)
            if page is not None and ARRIVING in page.at:
                page.is_left = True
        it.ends(state)

    def soften_loads(self) -> None:
        """Have the model know which pages may stay: those that are on their way, or that a sequence loads."""
        self.model.courtesies.update(self.model.carried)
        self.model.courtesies.update(key for key, page in self.model.pages.items() if ARRIVING in page.at)
        for it in self.sequences:
            self.model.courtesies.update(it.keys[it.ready : it.target])

    def let_go(self) -> None:
        """Close what is open, sequences too."""
        super().let_go()
        for it in self.sequences:
            self.end(it, State.SUSPENDED)
            it.it.close()
        self.sequences.clear()
        self._by_id.clear()
        self.see(replace(self.moved(), gives_up=True))

    def settle(self) -> int:
        """Run what is under way to its end: all but what sequences compute."""
        if self.device.is_reset:
            self.device.renew()
        count = 0
        is_moving = True
        while is_moving:
            while self.unit():
                count += 1
            self.drain()
            is_moving = self.land() or self.unit()
        self.poll()
        self.may_drop = bool(self.arrays.refused or self.arrays.broken)
        if self.running:
            raise BrokenPromise(f"nothing is left to do, and {len(self.running)} transfers have not ended")
        for key, page in self.model.pages.items():
            if ARRIVING in page.at[DEVICE + 1 :]:
                raise BrokenPromise(f"nothing is left to do, and page {name(key)} has not arrived")
        self.check_returned()
        return count

    def landed(self) -> None:
        """Judge what a unit of the mover has done. What it finds damaged is given up on the device later."""
        self.may_drop = self.may_drop or super().may_lose
        super().landed()

    def drain(self) -> None:
        """Do the store's half of a step, and judge it."""
        self.device.drain()
        self.see(self.moved())

    def land(self) -> bool:
        """Land one gather, and judge it."""
        landed = self.store.land()
        if landed:
            self.see(Step(gives_up=self.may_lose))
        return landed

    # ---- an engine ---------------------------------------------------------------------------------------------------

    def page(self, epoch: int, key: bytes) -> bytes:
        """Return the bytes of a page."""
        return content(self.page_bytes, epoch, key).tobytes()

    def compute(self, it: Open, page: int, tokens: int) -> bytes:
        """Return what the engine writes into a page of a sequence whose first `tokens` tokens it computes."""
        whole = (page + 1) * PAGE_TOKENS
        if tokens >= whole:
            return self.page(self.epoch, it.keys[page])
        before = it.keys[page - 1] if page else bytes(1)
        return self.page(self.epoch, before + bytes([tokens % PAGE_TOKENS, it.space]))

    def write(self, slots: Sequence[int], pages: Sequence[bytes], *, fails: bool = False) -> None:
        """Write pages in one step."""
        with self.device.step() as handle:
            if slots:
                rows = np.frombuffer(b"".join(pages), np.uint8).reshape(len(slots), -1)
                handle.arrays = self.arrays.write(handle.arrays, slots, rows)  # type: ignore[assignment, arg-type]
            if fails:
                raise StepFailedError("the engine failed")

    # ---- after a step ------------------------------------------------------------------------------------------------

    def tables(self, sequences: Sequence[Open]) -> list[list[int]]:
        """Return the block tables of some sequences."""
        table, scratch = self._table, self.device.scratch_slot
        self.store.block_tables([it.it for it in sequences], table)
        found = []
        for row in table[: len(sequences)].tolist():
            count = row.index(scratch) if scratch in row else len(row)
            if any(slot != scratch for slot in row[count:]):
                raise BrokenPromise(f"a block table has a hole: {row}")
            found.append(row[:count])
        return found

    def check(self) -> None:
        """Hold every tier's slots to what the model says, and every sequence to its own."""
        slots: list[int] = []
        self.private = 0
        for it in self.sequences:
            given = it.it
            if (given._ready_pages, given._target_pages, given._pending_pages) != (it.ready, it.target, it.pending):
                raise BrokenPromise(f"{given!r}: the model says {it.numbers()} of it")
            if it.places:
                given_slots = given._page_rows["slot"][: given._page_count].tolist()
                it.same_slots(given_slots)
                slots += given_slots
                self.private += it.private
            elif given._page_count:
                raise BrokenPromise(f"{given!r} has {given._page_count} pages, the model says none")
        if len(set(slots)) < len(slots):
            owns(self.sequences)
        written = self.arrays.awaited_slots()
        if written and len(written) > self.index.counts(Tier.DEVICE)["arriving"] - self.private:
            raise BrokenPromise(f"scatters wait for slots {written}, and not so many pages are on their way")
        if not written.isdisjoint(slots):
            raise BrokenPromise(f"slots {written.intersection(slots)} of a sequence are still to be written by others")
        super().check()
        if not super().strangers:
            arriving = self.model.counts[DEVICE][ARRIVING]
            counts = self.index.counts(Tier.DEVICE)
            if counts["arriving"] != arriving + self.private:
                raise BrokenPromise(f"{counts}: {arriving} pages arrive, {self.private} slots are private")
        self.checks += 1
        if self.sequences and self.checks % 4 == 0:
            self.check_pins()
            self.check_one(self.sequences[self.checks // 4 % len(self.sequences)])

    def check_pins(self) -> None:
        """Hold the number of pinned pages of each tier to what is open, where nothing is under way that pins too."""
        is_moving = (
            *(self.running, self.model.asked, self.model.carried, self.theirs._unlanded),
            *(each.it._promotions for each in self.sequences),
            *(each.epoch != self.epoch for each in self.sequences),
            *(each.epoch != self.epoch for each in self.held),
            *(self.index.counts(Tier(tier))["arriving"] for tier in self.tiers if tier != DEVICE),
        )
        if any(is_moving):
            return
        pages = self.model.pages.values()
        if any(page.is_left for page in pages):  # it may be that another one brings it by now
            return
        for tier in self.tiers:
            pinned = sum(page.at[tier] == RESIDENT and page.is_pinned(tier) for page in pages)
            if (counts := self.index.counts(Tier(tier)))["pinned"] != pinned:
                raise BrokenPromise(f"{Tier(tier)}: {pinned} pages are pinned by what is open; {counts}")

    def check_stall(self, it: Open) -> None:
        """Hold a sequence that has just looked to what it says of its stall: it lacks a slot. Host memory has to have
        one as well."""
        lacking = [key for key in it.keys[it.ready : it.target] if self.model.states(key)[DEVICE] == ABSENT]
        if it.it.stalled and lacking and all(self.index.counts(tier)["free"] for tier in (Tier.DEVICE, Tier.HOST)):
            raise BrokenPromise(f"{it.it!r} is stalled, and there are free slots for {list(map(name, lacking))}")

    @property
    def strangers(self) -> int:
        """How many slots of a tier may be of pages that the model does not know; sequences compute into some."""
        return super().strangers or self.private

    def check_one(self, it: Open) -> None:
        """Hold one sequence to all that was promised."""
        given = it.it
        numbers = given.ready, given.loading, given.pending, given.missing
        if numbers != it.numbers():
            raise BrokenPromise(f"{given!r}: the model says {it.numbers()} of it")
        if given.lost != (it.state is State.LOST) or given.tokens.size != it.tokens:
            raise BrokenPromise(f"{given!r}: the model says {it.state.value}, {it.tokens} tokens")
        if not it.is_usable:
            return
        it.same_slots(self.tables([it])[0])
        for key in it.claimed if it.epoch == self.epoch else ():
            if self.model.states(key)[DEVICE] != RESIDENT:
                raise BrokenPromise(f"page {name(key)} was published by an open sequence, and is not on the device")
        if not self.device.is_reset:
            self.verify(it)

    def verify(self, it: Open) -> None:
        """Compare what the device holds for a sequence with what the model says."""
        known = [place for place in it.places if place.content is not None]
        if not known:
            return
        rows = self.arrays.peek([place.slot for place in known])
        for place, row in zip(known, rows, strict=True):
            if row.tobytes() != place.content:
                raise BrokenPromise(f"page {it.places.index(place)} of {it.it!r} holds wrong bytes")

    def audit(self) -> None:
        """Scan the index, and every page of the device."""
        super().audit()
        if not self.device.is_reset:
            labels = self.labels(DEVICE)
            rows = self.arrays.peek(list(labels) or [self.device.scratch_slot])
            for (key, epoch, _, _), row in zip(labels.values(), rows, strict=False):
                if row.tobytes() != self.page(epoch, key):
                    raise BrokenPromise(f"page {name(key)} is resident on the device, and its bytes are wrong there")

    def check_returned(self) -> None:
        """Where nothing is open or under way, nothing may be held. Requires: settle() has just been called."""
        if self.sequences or self.running or self.held or self.model.asked or self.pins:
            return
        for tier in self.tiers:
            counts = self.index.counts(Tier(tier))
            is_quarantined = tier == DEVICE and counts["quarantined"]  # a drain has mended what nobody held
            if counts["pinned"] or counts["arriving"] or counts["leaving"] or is_quarantined:
                raise BrokenPromise(f"nothing is open, and of {Tier(tier)} is held {counts}")


class SequenceWorld(World):
    """A world whose stores have a device tier of `device` slots.

    Args:
        step_pages: what one entry of a step dispatches.
    """

    def make_caller(self, number: int) -> Caller:
        """Begin one of the processes."""
        return DeviceCaller(self, number)

    def config(self, epoch: int) -> StoreConfig:
        """Return the configuration of the stores."""
        config = super().config(epoch)
        step_bytes = self.shape.step_pages * self.geometry.page_bytes
        return replace(config, device=DeviceTier(pages=self.shape.device, step_bytes=step_bytes))
