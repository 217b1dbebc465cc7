"""Do to the sequences of a world what engines do, as plain data; beside all that operations.py does to its stores.

    open_(path=(0, 2), space=1, extra=3)      a sequence of two pages and three tokens behind them
    extend(mask=5, less=0)                    pages for all tokens of the sequences 0 and 2
    step(mask=5, less=0)                      the engine computes these, in one step

An engine here writes pages whose bytes follow from their key (world.py), so that each page on the device says whether
it is the right one, wherever it has been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from stepwell.errors import DeviceResetError, StepwellUsageError
from stepwell.index import Tier
from stepwell.testing.model import ABSENT, ARRIVING, QUARANTINED, RESIDENT, BrokenPromise, Step, name
from stepwell.testing.operations import BELOW, CALLERS, MOST_PAGES, PATHS, SPACES, Operations, operation
from stepwell.testing.pages import PAGE_TOKENS, prefix
from stepwell.testing.sequence_model import Hold, State
from stepwell.testing.sequence_world import DEVICE, MOST_SEQUENCES, MOST_TOKENS, DeviceCaller, Open, StepFailedError

MASKS: Final = tuple(range(1, 1 << MOST_SEQUENCES))
CLAIMED: Final = 1
"""What sequence.py calls a slot whose page its sequence computes."""
WHICH: Final = tuple(range(MOST_SEQUENCES))
TRUNK: Final = tuple(path for path in PATHS if sum(path) < 2 and (len(path) > 1 or path == (0,)))
"""The middle of the tree of prompts: few pages, so that what one sequence has published another one finds."""


class SequenceOperations(Operations):
    """What engines do with sequences, and what happens to their device; beside all that Operations has."""

    def end(self) -> None:
        """Give everything back, and scan what is left; probes have ended by then."""
        self.advance(60.0)
        for who in range(len(self.world.callers)):
            self.tick(who)
        super().end()

    def caller(self, who: int) -> DeviceCaller:
        """Return one of the callers."""
        return cast("DeviceCaller", super().caller(who))

    @staticmethod
    def chosen(it: DeviceCaller, mask: int) -> list[Open]:
        """Return the sequences whose bit is set, and that may have something on the device."""
        return [each for place, each in enumerate(it.sequences) if mask >> place & 1 and each.is_usable]

    @staticmethod
    def one(it: DeviceCaller, which: int) -> Open | None:
        """Return one of the open sequences."""
        return it.sequences[which % len(it.sequences)] if it.sequences else None

    # ---- opening and loading -----------------------------------------------------------------------------------------

    @operation(11, who=CALLERS, path=TRUNK, space=SPACES, extra=range(4))
    def open_(self, who: int, path: tuple[int, ...], space: int, extra: int) -> bool:
        """Open a sequence: what is cached of its prompt is found, and begins to come to the device."""
        return self.open_many(who, (len(path),), path, space, extra)

    @operation(3, who=CALLERS, lengths=((1, 2), (3, 3), (2, 4, 1)), path=TRUNK, space=SPACES, extra=range(4))
    def open_many(self, who: int, lengths: tuple[int, ...], path: tuple[int, ...], space: int, extra: int) -> bool:
        """Open several sequences, each of the first pages of a path."""
        it = self.caller(who)
        if len(it.sequences) + len(lengths) > MOST_SEQUENCES:
            return False
        opened = []
        for length in lengths:
            named = prefix(path[:length], space)
            each = Open(PAGE_TOKENS, path[:length], extra, space, named.keys, it.epoch, it.turn)
            opened.append(each)
        it.expect(opened)
        it.opened = [key for each in opened for key in each.keys]
        namespace = prefix((), space).namespace
        sequences = it.store.open_many([self.tokens(each) for each in opened], namespace=namespace)
        for each, sequence in zip(opened, sequences, strict=True):
            if each.it is not sequence:
                raise BrokenPromise(f"{sequence!r} did not look")
        it.sequences += opened
        it.see(it.moved())
        it.opened = ()
        return True

    @staticmethod
    def tokens(it: Open) -> npt.NDArray[np.int32]:
        """Return the tokens of a sequence."""
        return np.array([token for branch in it.path for token in (7, 7, 7, branch)] + [7] * it.extra, np.int32)

    @operation(8, who=CALLERS, which=WHICH)
    def promote(self, who: int, which: int) -> bool:
        """Look again for pages that others have finished."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None or not each.is_usable:
            return False
        each.it.promote()
        it.see(it.moved())
        return True

    @operation(2, who=CALLERS, which=WHICH)
    def give_up(self, who: int, which: int) -> bool:
        """Stop waiting for what others bring."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None or not each.is_usable:
            return False
        before = each.it.loading
        each.it.compute()
        each.waits, each.pending = False, 0
        if each.it.loading == 0:
            each.stop_waiting()
        elif each.it.loading != before:
            raise BrokenPromise(f"{each.it!r}: {before} tokens were loading before compute()")
        return True

    # ---- computing ---------------------------------------------------------------------------------------------------

    @operation(9, who=CALLERS, mask=MASKS, less=(0, 0, 0, 1, 3, 6, -3))
    def extend(self, who: int, mask: int, less: int) -> bool:
        """Ask for pages for all but the last `less` tokens of some sequences; -3: for three more than they have."""
        it = self.caller(who)
        chosen = self.chosen(it, mask)
        if not chosen:
            return False
        upto = [max(1, each.tokens - less) for each in chosen]
        wanted = [-(-tokens // PAGE_TOKENS) for tokens in upto]
        before = [{key: it.model.states(key)[DEVICE] for key in each.keys} for each in chosen]
        try:
            extended = it.store.extend([each.it for each in chosen], upto)
        except StepwellUsageError:
            asked = [each for each, pages in zip(chosen, wanted, strict=True) if pages > len(each.places)]
            if all(each.target == each.ready for each in asked):
                raise
            return True
        for each, pages, ok in zip(chosen, wanted, extended.ok.tolist(), strict=True):
            if ok and pages > len(each.places):
                it.pin(each, -1)
                each.begin_computing()
                it.pin(each, +1)
        keys = [key for each in chosen for key in each.keys]
        it.see(Step(wanted=keys, room=True))
        if (extended.full is None) != bool(extended.ok.all()):
            raise BrokenPromise(f"{extended} does not say why")
        if extended.full is not None and extended.full.free >= extended.full.needed:
            raise BrokenPromise(f"{extended.full} has room, and refuses")
        taken: set[bytes] = set()
        for each, pages, ok, was, slots in zip(
            chosen, wanted, extended.ok.tolist(), before, it.tables(chosen), strict=True
        ):
            mine = self.claims(it, each, pages if ok else 0, was, taken)
            each.extended(pages if ok else 0, slots, mine.__contains__)
        for was in before:
            for key, state in was.items():
                if state != ARRIVING and it.model.states(key)[DEVICE] == ARRIVING and key not in taken:
                    raise BrokenPromise(f"page {name(key)} is on its way, and nobody computes it")
        return True

    @staticmethod
    def claims(it: DeviceCaller, each: Open, pages: int, was: Mapping[bytes, int], taken: set[bytes]) -> set[int]:
        """Say which of its new pages a sequence has a claim to: those that were not on the device, nor on their way.

        One that was on the device and left it for this call is claimed by one of those who look for it afterwards:
        which, the store says.
        """
        mine = set()
        holds = each.it._block["hold"].tolist()
        for page in range(len(each.places), min(pages, len(each.keys))) if each.turn == it.turn else ():
            key = each.keys[page]
            is_begun = it.model.states(key)[DEVICE] == ARRIVING and was[key] != ARRIVING and key not in taken
            if is_begun and (was[key] == ABSENT or holds[page] == CLAIMED):
                mine.add(page)
                taken.add(key)
        return mine

    @operation(10, who=CALLERS, mask=MASKS, less=(0, 0, 0, 1, 3, 5))
    def step(self, who: int, mask: int, less: int) -> bool:
        """Have the engine compute what it has pages for, but for the last `less` tokens, in one step."""
        it = self.caller(who)
        if it.device.is_reset:
            return False
        slots, pages = self.plan(it, self.chosen(it, mask), less)
        it.write(slots, pages)
        it.see(it.moved())
        return True

    @staticmethod
    def plan(it: DeviceCaller, chosen: Sequence[Open], less: int) -> tuple[list[int], list[bytes]]:
        """Say what an engine writes where."""
        slots, pages = [], []
        for each in chosen:
            most = min(len(each.places) * PAGE_TOKENS, each.tokens)
            if each.state is not State.COMPUTING or each.computed >= most:
                continue
            upto = max(each.computed + 1, most - less)
            for page in range(each.computed // PAGE_TOKENS, -(-upto // PAGE_TOKENS)):
                place = each.places[page]
                place.content = it.compute(each, page, upto)
                slots.append(place.slot)
                pages.append(place.content)
            each.computed = upto
        return slots, pages

    @operation(0.6, who=CALLERS, renews=(True, False))
    def fail_step(self, who: int, renews: bool) -> bool:
        """Have a step raise: the pool is lost, and with it all that sequences have there."""
        it = self.caller(who)
        if it.device.is_reset:
            return False
        try:
            it.write([it.device.scratch_slot], [bytes(it.page_bytes)], fails=True)
        except StepFailedError:
            self.lose(it)
        if renews:
            it.device.renew()
        return True

    @staticmethod
    def lose(it: DeviceCaller) -> None:
        """Judge the loss of the pool: no page is on the device any more; the slots of those in use come back later."""
        it.may_drop = True
        for each in it.sequences:
            if each.is_usable:
                it.end(each, State.LOST)
        here = [key for key, page in it.model.pages.items() if page.at[DEVICE] == RESIDENT]
        for key in here:
            it.model.damage(key, DEVICE)
        it.see(replace(it.moved(), named=here))
        left = [key for key in here if it.model.states(key)[DEVICE] in (ARRIVING, RESIDENT)]
        if left:
            raise BrokenPromise(f"the pool was lost, and pages {list(map(name, left))} are on the device")

    @operation(3, who=CALLERS)
    def renew(self, who: int) -> bool:
        """Give the device new arrays, where they were lost."""
        it = self.caller(who)
        if not it.device.is_reset:
            return False
        with contextlib.suppress(DeviceResetError):
            it.device.drain()
            raise BrokenPromise("a lost pool was used")
        it.see(it.moved())
        it.device.renew()
        return True

    @operation(9, who=CALLERS, mask=MASKS, less=(0, 0, 0, 2, 5))
    def publish(self, who: int, mask: int, less: int) -> bool:
        """Publish what was computed, but for the last `less` tokens."""
        it = self.caller(who)
        chosen = [each for each in self.chosen(it, mask) if each.state is State.COMPUTING]
        if not chosen:
            return False
        computed = [max(0, each.computed - less) for each in chosen]
        fresh: list[bytes] = []
        duplicates = 0
        wanted: list[bytes] = []

        def on_device(key: bytes) -> int:
            return RESIDENT if key in fresh else it.model.states(key)[DEVICE]

        for each, tokens in zip(chosen, computed, strict=True):
            wanted += each.keys[: tokens // PAGE_TOKENS]
            it.pin(each, -1)
            new, double = each.publish(tokens // PAGE_TOKENS, it.turn, on_device)
            it.pin(each, +1)
            fresh += new
            duplicates += double
        said = it.store.publish([each.it for each in chosen], computed)
        it.see(Step(wanted=wanted, room=True, lands=True))
        if said != (len(fresh), duplicates):
            raise BrokenPromise(f"publish() says {said}, the model {len(fresh), duplicates}")
        for key in fresh:
            if it.model.states(key)[DEVICE] != RESIDENT:
                raise BrokenPromise(f"page {name(key)} was published, and is not on the device")
        return True

    @operation(5, who=CALLERS, mask=MASKS, branch=(0, 0, 1, 2))
    def append(self, who: int, mask: int, branch: int) -> bool:
        """Add a generated token to some sequences, suspended ones too."""
        it = self.caller(who)
        chosen = [
            each
            for place, each in enumerate(it.sequences)
            if mask >> place & 1 and each.state is not State.LOST and each.tokens < MOST_TOKENS
        ]
        if not chosen:
            return False
        tokens = [7 if each.extra < PAGE_TOKENS - 1 else branch for each in chosen]
        it.store.append([each.it for each in chosen], np.array(tokens, np.int32))
        for each in chosen:
            each.extra += 1
            if each.extra == PAGE_TOKENS:
                each.path, each.extra = (*each.path, branch), 0
                each.keys = prefix(each.path, each.space).keys
        return True

    # ---- ending ------------------------------------------------------------------------------------------------------

    @operation(3, who=CALLERS, which=WHICH)
    def suspend(self, who: int, which: int) -> bool:
        """Take what a sequence has on the device away; it keeps its tokens."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None or not each.is_usable:
            return False
        it.end(each, State.SUSPENDED)
        each.it.suspend()
        it.see(replace(it.moved(), gives_up=True))
        return True

    @operation(6, who=CALLERS, which=WHICH)
    def resume(self, who: int, which: int) -> bool:
        """Open a sequence again, with all its tokens."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None:
            return False
        it.end(each, State.MATCHED)
        each.waits, each.epoch, each.turn = True, it.epoch, it.turn
        it.is_ending = True
        each.it.resume()
        it.see(it.moved())
        it.is_ending = False
        return True

    @operation(7, who=CALLERS, which=WHICH, how=("close", "abort"))
    def close(self, who: int, which: int, how: str) -> bool:
        """End a sequence."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None:
            return False
        it.end(each, State.SUSPENDED)
        getattr(each.it, how)()
        it.sequences.remove(each)
        del it._by_id[id(each.it)]
        it.see(replace(it.moved(), gives_up=True))
        return True

    # ---- the device's own --------------------------------------------------------------------------------------------

    @operation(6, who=CALLERS)
    def drain(self, who: int) -> bool:
        """Do the store's half of a step."""
        it = self.caller(who)
        if it.device.is_reset:
            return False
        it.drain()
        return True

    @operation(3, who=CALLERS, mask=MASKS)
    def wait(self, who: int, mask: int) -> bool:
        """Wait for some sequences, without patience."""
        it = self.caller(who)
        if it.device.is_reset:
            return False
        chosen = [each.it for each in self.chosen(it, mask)]
        settled = it.device.wait(chosen, 0.0)
        it.see(it.moved())
        if settled != [each for each in chosen if not (each.loading or each.pending)]:
            raise BrokenPromise(f"wait() returned {settled} of {chosen}")
        return True

    @operation(10, who=CALLERS)
    def land(self, who: int) -> bool:
        """Hand what a gather has brought to the mover."""
        return self.caller(who).land()

    @operation(0.5, who=CALLERS, how=("refused", "broken"))
    def spoil_gather(self, who: int, how: str) -> bool:
        """Have the device have no memory for the next gather, or its computation fail."""
        it = self.caller(who)
        it.may_drop = True
        setattr(it.arrays, how, 1)
        return True

    @operation(9, who=CALLERS, pages=(2, 3, 100, 100))
    def evict_device(self, who: int, pages: int) -> bool:
        """Have pages leave the device."""
        return self.evict(who, DEVICE, pages)

    @operation(12, who=CALLERS, which=WHICH)
    def serve(self, who: int, which: int) -> bool:
        """Bring one sequence as far as it gets: load, compute, publish."""
        it = self.caller(who)
        each = self.one(it, which)
        if each is None or not each.is_usable or it.device.is_reset:
            return False
        for _ in range(4 * MOST_PAGES):
            if each.state is State.COMPUTING or each.it.settled or each.it.stalled:
                break
            while it.unit() or it.land():
                pass
            it.drain()
            each.it.promote()
            it.see(it.moved())
            if each.it.loading == 0:
                break
        else:
            if not self.is_behind(it, each):
                raise BrokenPromise(f"{each.it!r} does not settle, and nothing moves")
            return True
        mask = 1 << it.sequences.index(each)
        self.extend(who, mask, 0)
        self.step(who, mask, 0)
        self.publish(who, mask, 0)
        return True

    @staticmethod
    def is_behind(it: DeviceCaller, each: Open) -> bool:
        """Say whether a sequence lacks a page that another one is computing, or whose slot on a lost pool is in use."""
        computing = {
            key
            for other in it.sequences
            for key, place in zip(other.keys, other.places, strict=False)
            if place.hold is Hold.CLAIMED
        }
        lacking = each.keys[each.ready : each.target]
        return any(key in computing or it.model.states(key)[DEVICE] == QUARANTINED for key in lacking)

    # ---- what operations.py has, with sequences open -----------------------------------------------------------------

    @operation(2, who=CALLERS, path=PATHS, space=SPACES, keep=(0, 1, 3))
    def forget(self, who: int, path: tuple[int, ...], space: int, keep: int) -> bool:
        """Drop the pages of a prompt past its first ones."""
        self.caller(who).soften_loads()
        return super().forget(who, path, space, keep)

    @operation(1, who=CALLERS, path=PATHS, space=SPACES, tier=BELOW, page=range(MOST_PAGES))
    def damage(self, who: int, path: tuple[int, ...], space: int, tier: int, page: int) -> bool:
        """Change one bit of a page where a tier keeps it; in host memory not between its check and its scatter."""
        loads = any(each.target > each.ready for each in self.caller(who).sequences)
        return not (tier == Tier.HOST and loads) and super().damage(who, path, space, tier, page)

    @operation(1, who=CALLERS, which=range(3), page=range(MOST_PAGES))
    def damage_held(self, who: int, which: int, page: int) -> bool:
        """Change one bit of a page that an open match has in host memory, and read it: it bars the way there from its
        quarantine, for it is not mended while the match is open."""
        it = self.caller(who)
        held = it.held[which % len(it.held)] if it.held else None
        if held is None or held.epoch != it.epoch or self.world.is_failing or self.world.is_shared:
            return False
        here = [key for key, tier in zip(held.keys, held.tiers, strict=True) if tier == Tier.HOST]
        loads = any(each.target > each.ready for each in it.sequences)
        if not here or loads or not it.damage(here[page % len(here)], Tier.HOST):
            return False
        self.load_held(who, which)
        return True

    @operation(0.3, who=CALLERS, epoch=range(3))
    def set_epoch(self, who: int, epoch: int) -> bool:
        """Change the weights: sequences go on with what they hold, and publish nothing more."""
        it = self.caller(who)
        if epoch == it.epoch:
            return False
        it.turn += 1
        it.may_drop = True
        done = super().set_epoch(who, epoch)
        for each in it.sequences:
            it.pin(each, +1)
        it.see(replace(it.moved(), wanted=[key for each in it.sequences for key in each.keys], room=True))
        return done
