"""What a caller does to a store, as plain data: each operation draws its arguments out of a few values, so that a seed,
hypothesis, or a line of text can all say the same run.

    save(path=(0, 2), space=1)      the pages of a path in the tree of prompts, in a namespace
    move(units=2)                   two units of the mover's work, in an order that the seed decides

An operation returns whether there was anything to do.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from stepwell.errors import StepwellError
from stepwell.index import Tier
from stepwell.mover import SaveOutcome, SaveResult
from stepwell.testing.caller import Caller, Held
from stepwell.testing.model import ARRIVING, RESIDENT, UNPINNED, BrokenPromise, Step, name
from stepwell.testing.pages import PAGE_TOKENS, Prefix, prefix
from stepwell.testing.world import World

MOST_PAGES: Final = 5
PATHS: Final = tuple(
    path for pages in range(1, MOST_PAGES + 1) for path in itertools.product(range(3 if pages < 4 else 2), repeat=pages)
)
"""A tree of prompts: three branches a level, two from the fourth on, so that prefixes are shared and part."""
POINTS: Final = (
    *("file.pread", "file.pwrite", "file.reserve", "file.sync", "file.open", "file.unlink", "file.*"),
    "volume.retire",
)
SPACES: Final = (0, 0, 0, 1, 2)
BELOW: Final = (1, 2, 3)
CALLERS: Final = (0, 0, 0, 1)

Value = int | float | str | bool | None | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: what it is called, how often it is done beside the others, and what its arguments may be."""

    name: str
    weight: float
    arguments: Mapping[str, Sequence[Value]]
    run: Callable[..., bool]


def operation(weight: float, **arguments: Sequence[Value]) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Make an operation of a method."""

    def mark(method: Callable[..., bool]) -> Callable[..., bool]:
        method.operation = (weight, arguments)  # type: ignore[attr-defined]
        return method

    return mark


def operations_of(kind: type) -> dict[str, Operation]:
    """Return the operations of a class, by name."""
    found = {}
    for each in dir(kind):
        method = getattr(kind, each)
        if hasattr(method, "operation"):
            weight, arguments = method.operation
            found[each] = Operation(each, weight, arguments, method)
    return found


class Operations:
    """The simple calls, keys, and care, on the stores of a world; and what happens to processes and files."""

    def __init__(self, world: World) -> None:
        self.world = world

    def do(self, name_: str, arguments: Mapping[str, Any]) -> bool:
        """Do one operation, and check what must be true after each. Returns whether there was anything to do."""
        world = self.world
        has_done = bool(getattr(self, name_)(**arguments))
        if world.failing_steps:
            world.failing_steps -= 1
            if world.failing_steps == 0:
                world.heal()
        for caller in world.callers:
            caller.check()
        return has_done

    def end(self) -> None:
        """Give everything back, and scan what is left."""
        if self.world.is_failing:
            self.world.heal()
        for caller in self.world.callers:
            caller.let_go()
            caller.settle()
            caller.check()
            caller.audit()

    def caller(self, who: int) -> Caller:
        """Return one of the processes."""
        return self.world.callers[who % len(self.world.callers)]

    # ---- simple calls ------------------------------------------------------------------------------------------------

    @operation(14, who=CALLERS, path=PATHS, space=SPACES)
    def save(self, who: int, path: tuple[int, ...], space: int) -> bool:
        """Save a prompt; its pages are on their way afterwards."""
        it, named = self.caller(who), prefix(path, space)
        slots = it.take(len(named.keys))
        if slots is None:
            return False
        model, keys = it.model, named.keys
        model.use_path(keys[: model.find(keys, it.keeping).pages])
        before = [model.states(key) for key in keys]
        with self.pinned(it, keys):
            result = it.store.save(named.tokens, source=it.fill(slots, keys), namespace=named.namespace)
            claimed = it.see(Step(wanted=keys, room=True))
        model.use_path(keys[: len(keys) - result.refused + 1])
        it.counted["saved"] += result.saved
        it.tally.save(result.saved, result.refused)
        self.check_save(it, keys, before, result, claimed)
        it.start(result.transfer, claimed, [], slots, claimed)
        return True

    @contextmanager
    def pinned(self, it: Caller, keys: Sequence[bytes]) -> Iterator[None]:
        """Have the model keep inside the `with` block what a save finds of its own chain, in all tiers together and in
        each: making room for the tail does not take the head."""
        alone = [[tier] for tier in it.keeping] if len(it.keeping) > 1 else []
        runs = [it.model.find(keys, tiers) for tiers in (it.keeping, *alone)]
        for change in (+1, -1):
            for found in runs:
                it.model.pin(keys[: found.pages], found.tiers, change)
            if change == 1:
                yield

    def check_save(
        self,
        it: Caller,
        keys: Sequence[bytes],
        before: Sequence[Sequence[int]],
        result: SaveResult,
        claimed: list[bytes],
    ) -> None:
        """A save writes each page where it is not (1), and refuses only where there is no room (6)."""
        if result.saved + result.present + result.pending + result.refused != len(keys):
            raise BrokenPromise(f"{result} does not add up to {len(keys)} pages")
        if result.saved != len(claimed):
            raise BrokenPromise(f"{result}: pages {list(map(name, claimed))} are on their way")
        if (result.full is None) != (result.refused == 0) and not it.world.is_failing and result.refused:
            raise BrokenPromise(f"{result} refuses without a word")
        if it.world.is_failing:
            return
        looked_at = len(keys) - result.refused
        free = {tier: it.index.claimable(tier) for tier in it.keeping}
        for row, key in enumerate(keys):
            lacking = it.model.claimable(key, it.keeping)
            if it.world.shape.selective:
                lacking = [tier for tier in lacking if tier != Tier.DISK]
            if row > looked_at:
                break
            may_refuse = all(it.model.may_refuse(tier, free[tier], keys) for tier in lacking)
            if lacking and it.model.is_ordered and not may_refuse:
                raise BrokenPromise(f"page {name(key)} is not written to tiers {lacking}, which have room: {free}")
        if any(ARRIVING in states for states in before) or result.pending == 0:
            return
        raise BrokenPromise(f"{result}: nothing was on its way")

    @operation(10, who=CALLERS, path=PATHS, space=SPACES, order=("page", "layer"), deadline=(None, None, None, 5.0))
    def load(self, who: int, path: tuple[int, ...], space: int, order: str, deadline: float | None) -> bool:
        """Begin to load what is cached of a prompt."""
        it, named = self.caller(who), prefix(path, space)
        slots = it.take(len(named.keys))
        if slots is None:
            return False
        with self.match(it, named) as match:
            keys, tiers = named.keys[: match.pages], self.tiers_of(match)
            it.model.pin(keys, tiers, +1)
            slots, spare = slots[: match.pages], slots[match.pages :]
            it.free.extend(spare)
            transfer = it.store.load(match, into=it.blank(slots), order=order, deadline=deadline)  # type: ignore[arg-type]
            claimed = it.see(Step(wanted=keys, room=True))
            it.start(transfer, keys, tiers, slots, claimed)
            it.model.pin(keys, tiers, -1)
        return True

    def match(self, it: Caller, named: Prefix) -> Any:
        """Match a prompt, and compare what it says with the model."""
        model, keys = it.model, named.keys
        usable = it.usable
        expected = model.find(keys, usable)
        match = it.store.match(named.tokens, namespace=named.namespace)
        it.counted["looked up"] += len(keys)
        it.counted["hits"] += match.pages
        it.tally.looked_up(len(keys), self.tiers_of(match), match.miss, match.pending // PAGE_TOKENS)
        found = (match.pages, self.tiers_of(match), match.pending // PAGE_TOKENS, match.miss)
        if it.world.is_shared and match.pages > expected.pages:
            self.check_borrowed(it, keys[expected.pages : match.pages], found[1][expected.pages :])
        elif found != tuple(expected) and not it.world.is_failing:
            match.close()
            raise BrokenPromise(f"a match says {found}, the model {tuple(expected)}")
        model.use_path(keys[: match.pages])
        model.pin(keys[: match.pages], found[1], +1)  # room for what is written to disk now is not made of these
        # More of a neighbour's pages may be on their way than the match could promise.
        it.see(Step(wanted=keys if it.world.is_shared else keys[: match.pages], room=True))
        model.pin(keys[: match.pages], found[1], -1)
        return match

    @staticmethod
    def check_borrowed(it: Caller, keys: Sequence[bytes], tiers: Sequence[int]) -> None:
        """What a look-up finds past the pages of its own is here too, or a neighbour had it and it is on its way."""
        it.world.known_to_somebody(it.epoch, keys)
        for key, tier in zip(keys, tiers, strict=True):
            if tier != Tier.HOST and it.state(key, 1)[tier] != RESIDENT:
                raise BrokenPromise(f"page {name(key)} is said to be in {Tier(tier)}, and is not")

    @staticmethod
    def tiers_of(match: Any) -> list[int]:
        """Return the tier of each page of a match."""
        return [int(tier) for _, pages, tier in match.spans for _ in range(pages)]

    @operation(4, who=CALLERS, path=PATHS, space=SPACES)
    def hold(self, who: int, path: tuple[int, ...], space: int) -> bool:
        """Match a prompt, and keep the match open."""
        it, named = self.caller(who), prefix(path, space)
        if len(it.held) >= 3:
            return False
        match = self.match(it, named)
        keys, tiers = named.keys[: match.pages], self.tiers_of(match)
        it.model.pin(keys, tiers, +1)
        it.held.append(Held(match, it.epoch, keys, tiers))
        return True

    @operation(4, who=CALLERS, which=range(3))
    def let_go(self, who: int, which: int) -> bool:
        """Close an open match."""
        it = self.caller(who)
        if not it.held:
            return False
        held = it.held.pop(which % len(it.held))
        held.match.close()
        if held.epoch == it.epoch:
            it.model.pin(held.keys, held.tiers, -1)
        return True

    @operation(4, who=CALLERS, which=range(3))
    def load_held(self, who: int, which: int) -> bool:
        """Load an open match: all of it must come, for it is pinned."""
        it = self.caller(who)
        if not it.held:
            return False
        held = it.held[which % len(it.held)]
        slots = it.take(len(held.keys))
        if slots is None:
            return False
        transfer = it.store.load(held.match, into=it.blank(slots))
        is_old = held.epoch != it.epoch
        claimed = it.see(Step(wanted=() if is_old else held.keys, room=True))
        if is_old:
            if transfer.pages and transfer.ok.any():
                raise BrokenPromise("pages of another epoch were served")
            it.tally.undelivered += transfer.pages
            it.free.extend(slots)
            return True
        it.start(transfer, held.keys, held.tiers, slots, claimed)
        return True

    # ---- what runs ---------------------------------------------------------------------------------------------------

    @operation(26, who=CALLERS, units=(1, 1, 1, 2, 4))
    def move(self, who: int, units: int) -> bool:
        """Let the mover do some units of work."""
        it = self.caller(who)
        count = 0
        while count < units and it.unit():
            count += 1
        return count > 0

    @operation(4, who=CALLERS)
    def settle(self, who: int) -> bool:
        """Let the mover do all there is to do."""
        return self.caller(who).settle() > 0

    @operation(1, who=CALLERS, which=range(3), how=("cancel", "revoke"))
    def stop(self, who: int, which: int, how: str) -> bool:
        """Cancel a transfer, or revoke the memory lent to it."""
        it = self.caller(who)
        if not it.running:
            return False
        each = it.running[which % len(it.running)]
        it.excuse([each])
        getattr(each.transfer, how)()
        it.see(Step(gives_up=True))
        it.poll()
        return True

    @operation(2, seconds=(0.1, 1.0, 6.0))
    def advance(self, seconds: float) -> bool:
        """Let time pass; deadlines that have passed hold from the next look on."""
        self.world.clock.advance(seconds)
        for it in self.world.callers:
            late = [each for each in it.running if not each.core.decided and each.transfer.done]
            it.excuse(late)
            it.see(Step(gives_up=True))
            it.poll()
        return True

    @operation(2.5, who=CALLERS)
    def tick(self, who: int) -> bool:
        """Do every background round."""
        it = self.caller(who)
        now = self.world.clock.monotonic()
        it.excuse([each for each in it.running if each.transfer.done and not each.core.done])
        ended = [chain for _, chain, at in it.pins if at <= now]
        it.pins = [pin for pin in it.pins if pin[2] > now]
        for chain in ended:
            it.model.unhold(chain)
        it.model.end_due(now)
        it.model.courtesies.clear()
        dropped = it.store._probes.dropped
        try:
            it.store.tick()
        except (StepwellError, OSError):
            if not self.world.is_failing:
                raise
        it.has_cancelled |= it.store._probes.dropped > dropped
        it.see(Step(room=True, mends=True, gives_up=True, returns=self.world.adoptable(it.epoch), spares=True))
        it.poll()
        self.world.check_budget()
        return True

    # ---- keys --------------------------------------------------------------------------------------------------------

    @operation(4, who=CALLERS, path=PATHS, space=SPACES, lease=(0.0, 1.0), readahead=(False, True))
    def probe(self, who: int, path: tuple[int, ...], space: int, lease: float, readahead: bool) -> bool:
        """Ask for keys; those found stay for a while, unless their room is needed."""
        it, named = self.caller(who), prefix(path, space)
        expected = it.model.find(named.keys, it.usable)
        before = {key: it.model.states(key) for key in it.model.asked}
        found = it.store.probe(named.rows, lease=lease, readahead=readahead)
        if it.world.is_shared and found.run > expected.pages:
            self.check_borrowed(it, named.keys[expected.pages : found.run], found.tiers.tolist()[expected.pages :])
        elif (found.run, found.tiers.tolist()) != (expected.pages, expected.tiers) and not it.world.is_failing:
            raise BrokenPromise(f"probe says {found}, the model {expected}")
        it.counted["looked up"] += len(named.keys)
        it.counted["hits"] += found.run
        it.tally.looked_up(len(named.keys), found.tiers.tolist(), expected.miss, expected.pending)
        run = named.keys[: found.run]
        it.model.use_keys(run)
        if readahead:
            it.model.carried.update(run)
        it.see(Step(wanted=named.keys if it.world.is_shared else run, room=True))
        if it.has_pressed:  # what has ended for room makes room for what is kept
            kept = it.kept()
            it.model.asked = {key: until for key, until in it.model.asked.items() if key in kept}
        # What had to end for what is kept now may have left since, for what is read ahead: it took room when it ended.
        kept = it.kept()
        for key, states in before.items():
            has_left = any(was == RESIDENT != now for was, now in zip(states, it.model.states(key), strict=True))
            if has_left and key not in kept:
                it.model.asked.pop(key, None)
        now = self.world.clock.monotonic()
        it.model.ask(run, now, now + lease, it.allowed())
        return True

    @operation(3, who=CALLERS, path=PATHS, space=SPACES, first=(0, 0, 1, 2))
    def load_keys(self, who: int, path: tuple[int, ...], space: int, first: int) -> bool:
        """Load pages by their keys, each on its own."""
        it, named = self.caller(who), prefix(path, space)
        keys, rows = named.keys[first:], named.rows[first:]
        slots = it.take(len(keys))
        if slots is None:
            return False
        usable = it.usable
        before = [it.model.nearest(key, usable)[0] for key in keys]
        damaged = {key for key in keys if any(it.model.damaged_in(key))}
        at = 0
        while at < len(keys):
            run = it.model.find(keys[at:], usable).pages
            it.model.use_keys(keys[at : at + run])
            at += run + 1
        it.join(keys, before)
        missed, delivered = it.misses() - it.tally.undelivered, it.delivered() - it.tally.delivered
        with it.waiting(Step(wanted=keys, named=keys, room=True)):
            ok = it.store.load_keys(rows, into=it.blank(slots))
        missed = it.misses() - it.tally.undelivered - missed
        it.tally.undelivered += missed
        came_from = it.delivered() - it.tally.delivered - delivered  # with the tiers as the store says them
        it.tally.delivered += came_from
        if came_from.total() != int(ok.sum()):
            raise BrokenPromise(f"stats() says {came_from} of the pages of which {ok} came")
        if missed > len(keys) - int(ok.sum()):
            raise BrokenPromise(f"stats() says {missed} more misses of {len(keys)} pages, of which {ok} came")
        for slot, key, came, tier in zip(slots, keys, ok.tolist(), before, strict=True):
            if came and not it.is_right(slot, key, it.epoch):
                raise BrokenPromise(f"wrong bytes were served for page {name(key)}")
            was_kept = tier is not None and it.model.states(key)[tier] == RESIDENT
            if not came and was_kept and key not in damaged and not it.world.is_failing:
                raise BrokenPromise(f"page {name(key)} is in {Tier(tier or 0)}, and did not come")
            it.counted["loaded"] += came
        kept = it.kept()
        it.model.deliver(
            key for key, came in zip(keys, ok.tolist(), strict=True) if came or (key in damaged and key not in kept)
        )
        it.give_back(slots)
        return True

    @operation(3, who=CALLERS, path=PATHS, space=SPACES, first=(0, 0, 1, 2))
    def save_keys(self, who: int, path: tuple[int, ...], space: int, first: int) -> bool:
        """Save pages under their keys, and wait: a whole chain, or what continues one known from its first page.

        Where a chain has no known beginning, records say less after a restart than the index knew; the model has no
        depths to tell (index_model.py has).
        """
        it, named = self.caller(who), prefix(path, space)
        first = first if it.model.is_rooted(named.keys[:first]) else 0
        keys, rows = named.keys[first:], named.rows[first:]
        slots = it.take(len(keys))
        if slots is None:
            return False
        model = it.model
        run = keys[: model.find(keys, it.keeping).pages]
        model.use_keys(run)
        model.claim(run, +1)
        before = [model.states(key) for key in keys]
        chain = named.keys[max(0, first - 1) :]

        def claimed() -> None:
            model.link(chain)
            model.use_keys(keys)
            model.claim(run, -1)
            model.forget_unknown(named.keys[::-1])

        with it.waiting(Step(wanted=keys, room=True), then=claimed):
            outcomes = it.store.save_keys(
                rows,
                source=it.fill(slots, keys),
                parent=named.keys[first - 1] if first else None,
                first_of_chain=first == 0,
            )
        for key, outcome, states in zip(keys, outcomes.tolist(), before, strict=True):
            here = [model.states(key)[tier] for tier in it.keeping]
            if outcome == SaveOutcome.STORED and RESIDENT not in here and not it.may_lose:
                raise BrokenPromise(f"page {name(key)} was stored, and is nowhere")
            if outcome == SaveOutcome.PRESENT and RESIDENT not in (*states, *model.states(key)):
                raise BrokenPromise(f"page {name(key)} is said to be present, and was nowhere")
            if outcome == SaveOutcome.PENDING and ARRIVING not in model.states(key):
                raise BrokenPromise(f"page {name(key)} is said to be on its way, and is not")
        it.tally.save(int((outcomes == SaveOutcome.STORED).sum()), int((outcomes == SaveOutcome.REFUSED).sum()))
        model.forget_unknown(named.keys)
        it.give_back(slots)
        return True

    # ---- care --------------------------------------------------------------------------------------------------------

    @operation(3, who=CALLERS, tier=BELOW, pages=(1, 2, 3, 100))
    def evict(self, who: int, tier: int, pages: int) -> bool:
        """Have pages of lowest rank leave a tier."""
        it = self.caller(who)
        before = self.resident(it, tier)
        count = it.store.evict(Tier(tier), pages)
        it.see(Step(room=True, spares=True))
        self.check_gone(it, count, {tier: before - self.resident(it, tier)})
        if count > pages:
            raise BrokenPromise(f"{count} pages left {Tier(tier)}, {pages} were to")
        if count < pages and it.model.is_ordered:
            left = [key for key in it.model.order[tier] if not it.model.pages[key].is_pinned(tier)]
            if any(key not in it.soft for key in left):
                raise BrokenPromise(f"{count} of {pages} pages left {Tier(tier)}, others could have")
        it.counted["evicted"] += count
        return count > 0

    @staticmethod
    def resident(it: Caller, tier: int) -> int:
        """Count the pages in a tier, of every epoch."""
        return it.index.counts(tier)["resident"] if tier in it.tiers else 0

    @staticmethod
    def check_gone(it: Caller, said: int, gone: Mapping[int, int]) -> None:
        """What is said to have left has left."""
        if said != sum(gone.values()):
            raise BrokenPromise(f"{said} pages are said to have left, {dict(gone)} did")

    @operation(2, who=CALLERS, path=PATHS, space=SPACES, keep=(0, 1, 3))
    def forget(self, who: int, path: tuple[int, ...], space: int, keep: int) -> bool:
        """Drop the pages of a prompt past its first ones, from every tier."""
        it, named = self.caller(who), prefix(path, space)
        model, keys = it.model, named.keys
        model.use_path(keys[: model.find(keys, it.usable).pages])
        dropped = [key for key in keys[keep:] if key in model.pages and not model.pages[key].holds]
        before = {tier: self.resident(it, tier) for tier in it.tiers}
        model.deliver(keys[keep:])
        count = it.store.forget(named.tokens, namespace=named.namespace, keep=keep * PAGE_TOKENS)
        # Also those behind a gap: a save of what is missing would bring them back.
        it.see(Step(named=dropped, spares=True))
        self.check_gone(it, count, {tier: before[tier] - self.resident(it, tier) for tier in it.tiers})
        for key in dropped:
            states = model.states(key)
            left = [tier for tier in it.tiers if states[tier] == RESIDENT and not model.pages[key].is_pinned(tier)]
            # What is borrowed is pinned in every tier, wherever the match has found it; so is what comes to a device.
            is_pinned = it.world.shape.device > 0 or (it.world.is_shared and left and model.pages[key].pins != UNPINNED)
            if left and key not in it.soft and not is_pinned:
                raise BrokenPromise(f"page {name(key)} was forgotten, and is in {left} still")
        return count > 0

    @operation(0.3, who=CALLERS)
    def clear(self, who: int) -> bool:
        """Drop every page that may leave; what probes keep may."""
        it = self.caller(who)
        dropped = it.store._probes.dropped
        count = it.store.clear()
        it.has_cancelled |= it.store._probes.dropped > dropped
        it.model.asked.clear()
        it.see(Step(room=True))
        for tier in it.tiers if it.model.is_ordered else ():
            for key in it.model.order[tier]:
                if not it.model.pages[key].is_pinned(tier) and key not in it.soft:
                    raise BrokenPromise(f"page {name(key)} is in {Tier(tier)} after all were dropped")
        return count > 0

    @operation(2, who=CALLERS, path=PATHS, space=SPACES, ttl=(1.0, 100.0))
    def pin(self, who: int, path: tuple[int, ...], space: int, ttl: float) -> bool:
        """Keep what is cached of a prompt."""
        it, named = self.caller(who), prefix(path, space)
        pin = it.store.pin(named.tokens, ttl=ttl, namespace=named.namespace)
        if pin.full is not None:
            if pin.full.needed + pin.full.pinned <= pin.full.allowed:
                raise BrokenPromise(f"{pin.full} refuses what it allows")
            it.model.use_path(it.model.coverable(named.keys))
            return True
        chain = it.model.hold(named.keys)
        if (pin.tokens, pin.pending) != (
            it.model.kept(chain) * PAGE_TOKENS,
            (len(chain) - it.model.kept(chain)) * PAGE_TOKENS,
        ):
            raise BrokenPromise(f"{pin} of {len(chain)} pages, of which {it.model.kept(chain)} are in a lasting tier")
        if chain:
            it.pins.append((pin, chain, self.world.clock.monotonic() + ttl))
        return bool(chain)

    @operation(1, who=CALLERS, which=range(3))
    def unpin(self, who: int, which: int) -> bool:
        """End a pin."""
        it = self.caller(who)
        if not it.pins:
            return False
        pin, chain, _ = it.pins.pop(which % len(it.pins))
        pin.close()
        it.model.unhold(chain)
        return True

    @operation(0.3, who=CALLERS, epoch=range(3))
    def set_epoch(self, who: int, epoch: int) -> bool:
        """Change the weights: pages of any other epoch are misses from now on."""
        it = self.caller(who)
        if epoch == it.epoch:
            return False
        it.excuse()
        it.has_cancelled = True
        it.store.set_epoch(epoch)
        it.epoch = epoch
        it.tally.is_blind = True
        known = it.model.turn(epoch)
        it.pins.clear()
        here = it.dump()
        if it.world.is_shared:
            it.world.known_to_somebody(epoch, here)
        for key, tiers in () if it.world.is_shared else here.items():
            page = known.get(key)
            if page is None or any(page.at[tier] not in (RESIDENT, ARRIVING) for tier in tiers):
                raise BrokenPromise(f"page {name(key)} of epoch {epoch} is in {tiers}, and was not")
        it.appear()
        for key, tiers in here.items():
            for tier in tiers:
                if key in known and known[key].damaged[tier]:
                    it.model.damage(key, tier)
        for key in known:
            it.model.stand(key, it.state(key, 1))
        it.model.remember(known)
        for held in it.held:
            if held.epoch == epoch:
                it.model.pin(held.keys, held.tiers, +1)
        for each in it.running:
            if each.epoch == epoch:
                it.model.claim(each.claimed, +1)
                it.model.pin(each.keys if each.tiers else (), each.tiers, +1)
        it.poll()
        return True

    # ---- what happens to processes and files -------------------------------------------------------------------------

    @operation(0.15, who=CALLERS)
    def reopen(self, who: int) -> bool:
        """Close the store and open it again."""
        if self.world.is_failing:
            return False
        self.world.reopen(self.caller(who))
        return True

    @operation(0.15, who=CALLERS)
    def crash(self, who: int) -> bool:
        """Kill the process in whatever it does, and start it again."""
        if self.world.is_shared or self.world.is_failing:
            return False
        self.world.crash(self.caller(who))
        return True

    @operation(1, who=CALLERS, path=PATHS, space=SPACES, tier=BELOW, page=range(MOST_PAGES))
    def damage(self, who: int, path: tuple[int, ...], space: int, tier: int, page: int) -> bool:
        """Change one bit of a page where a tier keeps it."""
        keys = prefix(path, space).keys
        it = self.caller(who)
        if self.world.is_shared or self.world.is_failing or it.model.damages > 3:
            return False
        return it.damage(keys[page % len(keys)], tier)

    @operation(0.2, point=POINTS, error=(errno.EIO, errno.ENOSPC), nth=(0, 1, 1, 2, 5), steps=(1, 3, 10))
    def fail(self, point: str, error: int, nth: int, steps: int) -> bool:
        """Have calls on files fail for a while."""
        if self.world.is_failing or self.world.is_shared:
            return False
        self.world.fail(point, error, nth=nth, steps=steps + 1)
        return True

    @operation(2, who=CALLERS)
    def stats(self, who: int) -> bool:
        """Compare what the store says that it has done with what it was seen to do."""
        it = self.caller(who)
        it.tally.check(it)
        return True

    @operation(0.5, who=CALLERS)
    def audit(self, who: int) -> bool:
        """Scan everything."""
        self.caller(who).audit()
        return True
