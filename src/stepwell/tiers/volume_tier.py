"""Hold pages in volumes of a tier directory: what the shared and the disk tier have in common.

    directory: who holds which volume (tiers/volumes.py)   volume: bytes, records (csrc/volume.h)   index: slots, pages
    held volume --attach--> records recovered, slots in the index --tick--> more volumes, or fewer --close--> orphans

Slot numbers are volume number << 20 | slot, so that a volume is one range of slots in the index.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stepwell import _core
from stepwell.clock import Clock
from stepwell.config import DiskTier, SharedTier, floor_bytes, parse_size, volume_bytes
from stepwell.errors import BudgetError, StepwellError, TierIOError, VolumeBusyError, VolumeError
from stepwell.index import Index, Tier
from stepwell.tiers.base import Recovered
from stepwell.tiers.debts import Debts
from stepwell.tiers.directory import CoreHeaders, DirectoryConfig, HeldVolume, Machine
from stepwell.tiers.directory import Full as DirectoryFull
from stepwell.tiers.volumes import KEEPER_LOCK_SECONDS, TierDirectory

_LOG = logging.getLogger("stepwell")
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
SLOT_BITS: Final = 20
_OK: Final = _core.Status.ok.value
LEAST_SAMPLED: Final = 4
MOST_SAMPLED: Final = 8
"""Pages of an adopted volume that are read before it is taken for mixed up; the first one that is right ends it."""
LOOK_SECONDS: Final = 0.2
"""Seconds between two looks at what neighbours lack: each is a scan; a busy store's rounds come faster."""
LEAVE_PATIENCE: Final = 0.5
"""Seconds after which a volume that was to be given back and cannot is passed over for another."""
STAMPS_AT_ONCE: Final = 16384
"""Stamps taken from the index at once: its mutex is held for 0.3 ms."""
STAMPS_A_ROUND: Final = 2**22
"""The most that one round writes, while others are made meanwhile."""
GROW_RETRY: Final = 2.0
"""Seconds between two attempts to grow a directory that was full, or failed: each is a scan under its lock."""
FLOOR_RETRY: Final = 0.05
"""The same while this process is below its floor: a neighbour answers within a second, and its own look at what is
wanted must find the lock free now and then."""
BUSY_SECONDS: Final = 5.0
"""Seconds of attempts that all find the directory lock held, after which its holder is named in the log."""
EMPTY_SECONDS: Final = 2.0
"""Seconds without a volume after which it is said: in a rolling restart a neighbour's share comes within one."""
GROW_SECONDS: Final = 0.5
"""Seconds after which a round takes no further volume."""


@dataclass(slots=True)
class Member:
    """One volume in use. slots are [base, base + count) of the index.

    is_leaving: it goes out of use, since a time of the store's clock; is_wanted: because a neighbour lacks room, and so
    it stays if that has ended before; left: slots whose pages have left since, with their records as they were.
    is_lost: another process has it too.
    """

    held: HeldVolume
    volume: _core.Volume
    number: int
    base: int
    count: int
    is_leaving: bool = False
    leaving_since: float = 0.0
    is_wanted: bool = False
    left: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    is_lost: bool = False


class VolumeTier:
    """A tier made of volumes.

    Invariant: each member's slots are one range of the index; a volume is given back only when no page of it is
    claimed, resident or pinned.
    Threads: as PageTier says; the index and the medium are their own guards.
    """

    def __init__(
        self,
        tier: Tier,
        config: SharedTier | DiskTier,
        *,
        shape: _core.PageShape,
        fingerprint: bytes,
        epoch: int,
        clock: Clock,
        recency_seconds: float,
        machine: Machine | None = None,
    ) -> None:
        name = tier.name.lower()
        self._tier = tier
        self._shape = shape
        self._clock = clock
        self._recency_seconds = recency_seconds
        self._is_durable = isinstance(config, DiskTier) and config.durability == "power"
        self._set = _core.VolumeSet(tier is Tier.DISK, durable=self._is_durable)
        self._wants_direct_io = isinstance(config, DiskTier) and config.direct_io
        self._members: dict[int, Member] = {}
        self._debts = Debts()
        self._stop = _core.StopFlag()
        self._recovered_pages = 0
        self._full_at: float | None = None  # there was no room for another volume then; None: there may be
        self._retry_seconds = GROW_RETRY
        self._is_open = False
        self._busy_since: float | None = None  # no attempt to grow since has got the directory lock
        self._has_said_busy = self._has_said_budget = False
        self._empty_since: float | None = None  # it has had no volume since
        self._has_said_empty = self._has_said_removed = False
        self._looked_at = float("-inf")
        self._recency_at = clock.monotonic()
        self._machine = machine if machine is not None else Machine(clock=clock)
        self._capacity_bytes = parse_size(config.capacity, name=f"{name}.capacity")
        self._plan = DirectoryConfig(
            path=os.path.expanduser(config.path),
            medium="shared" if tier is Tier.SHARED else "disk",
            capacity_bytes=self._capacity_bytes,
            volume_bytes=volume_bytes(config, name=name),
            floor_bytes=floor_bytes(config, name=name),
            fingerprint=fingerprint,
            epoch=epoch,
            direct_io=config.direct_io if isinstance(config, DiskTier) else True,
        )
        self._directory = self._join_directory()

    @property
    def tier(self) -> Tier:
        """Which tier this is."""
        return self._tier

    @property
    def medium(self) -> _core.VolumeSet:
        """All volumes as one medium."""
        return self._set

    @property
    def directory(self) -> TierDirectory:
        """This process's part in the tier directory."""
        return self._directory

    @property
    def is_joined(self) -> bool:
        """Whether `directory.held` is all that is ours: not while the tier is being opened or reopened."""
        return self._is_open

    @property
    def members(self) -> list[Member]:
        """The volumes in use, in the order in which they were taken."""
        return list(self._members.values())

    @property
    def recovered_pages(self) -> int:
        """Pages of the epoch found again in volumes that were adopted."""
        return self._recovered_pages

    @property
    def cold(self) -> dict[str, int]:
        """What was not found again, by reason: tiers/cold.py."""
        return dict(self._directory.cold.by_reason)

    @property
    def why_empty(self) -> str:
        """Why no page finds room here whatever is evicted; "" where there is a volume."""
        if self._members:
            return ""
        if self._has_said_removed:
            return "this process holds no volume: somebody removed the directory"
        if self._has_said_budget:
            return "this process holds no volume: the machine has no room for one"
        return "this process holds no volume: others hold the directory"

    def _note_members(self) -> None:
        """Say it, once, where there has been no volume for longer than a neighbour takes to give one back."""
        if self._members:
            self._empty_since, self._has_said_empty = None, False
            return
        now = self._clock.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        if self._has_said_removed or self._has_said_budget:  # that is why
            return
        if self._has_said_empty or now - self._empty_since < EMPTY_SECONDS:
            return
        self._has_said_empty = True
        name = self._tier.name.lower()
        _LOG.warning(
            f"{name} tier: {self._directory.path} has had no room for a volume of {self._directory.volume_bytes} bytes "
            f"for {EMPTY_SECONDS:g} s, other processes hold it all; pages are refused until one gives back. Raise "
            f"{name}.capacity, or lower {name}.volume_bytes so that each process has a share"
        )

    def _join_directory(self) -> TierDirectory:
        return TierDirectory(self._plan, CoreHeaders(self._shape), machine=self._machine)

    def open(self, index: Index) -> Recovered:
        """Join the directory; adopt orphans, warm; have at least one volume if there is room for one."""
        self._directory.open()
        self._say_where_it_lies()
        pages = freed = 0
        try:
            if self._is_durable:
                self._sync_name()
            # The floor first, and what is above it after a second look: of several that start at once each has
            # come by then, and gets its own.
            adopted: list[HeldVolume] = []
            for adopt in (self._directory.adopt_to_floor, self._directory.adopt):
                adopted += adopt()
                found = self._attach_all(index)
                pages += found.pages
                freed += found.freed
            self._say_who_comes_from_another_boot(adopted)
            self._grow_past_unusable(index, len(adopted))
            self._note_members()
        except BaseException:
            for member in self.members:  # the store may go on without this tier, and open it again
                index.close_slots(self._tier, member.base)
                index.free_slots(self._tier, index.take_victims(self._tier, member.count, member.base, even_held=True))
                self._drop_slots(member, index)
            self.close(index)
            raise
        self._is_open = True
        return Recovered(pages, freed)

    def reopen(self, index: Index) -> Recovered:
        """Let go of every volume, and join the directory anew: what it holds is recovered as at open().

        Requires: nothing is read or written here any more, and no round of this tier runs.

        Raises:
            VolumeBusyError: pages are pinned here, or a call on their files has not returned; nothing was changed.
            BudgetError, VolumeError, TierIOError: as open(); then the tier has no volume, and may be reopened again.
        """
        was_open, self._is_open = self._is_open, False
        try:
            return self._reopen(index)
        except BaseException:
            if self._members:  # it did not come to the closing
                self._is_open = was_open
            raise

    def _reopen(self, index: Index) -> Recovered:
        counts = index.counts(self._tier)
        kept = counts["pinned"] + counts["arriving"] + counts["leaving"] - counts["owed"]
        if kept:
            raise VolumeBusyError(self._busy(kept))
        self._stamp_recency_now(index)
        for member in self._members.values():
            index.close_slots(self._tier, member.base)
        taken: dict[int, U32] = {}
        for number, member in self._members.items():
            taken[number] = index.take_victims(self._tier, member.count, member.base, even_held=True)
            index.free_slots(self._tier, taken[number])  # their records stay: that is what is recovered
        pages, slots, numbers = index.claim_quarantined(
            self._tier, sum(member.count for member in self._members.values()), even_retired=True
        )
        damaged = self._set_aside(index, pages, slots, numbers)
        for number, member in list(self._members.items()):
            left = self._drop_slots(member, index)
            kept += left
            if not left:
                self._let_go(number)
        if kept:
            for number, member in self._members.items():
                freed = np.concatenate([taken[number], damaged[damaged >> SLOT_BITS == number]])
                self._retire_free(member, freed - np.uint32(member.base), index)  # as in _stay()
                index.open_slots(self._tier, member.base)
            raise VolumeBusyError(self._busy(kept))
        self.close(index)
        self._stop = _core.StopFlag()
        self._full_at, self._is_open = None, False
        self._recovered_pages = 0  # they are found anew, the same ones
        self._directory = self._join_directory()
        return self.open(index)

    def _busy(self, pages: int) -> str:
        return (
            f"{self._tier} tier: {pages} pages are pinned, or in a call that has not returned: close the matches and "
            "sequences that hold them, and reopen again"
        )

    def _set_aside(
        self,
        index: Index,
        pages: npt.NDArray[np.uint32],
        slots: npt.NDArray[np.uint32],
        numbers: npt.NDArray[np.uint32],
    ) -> U32:
        """Free quarantined slots, and their records, as far as those can be written: damage is not recovered.

        Returns:
            Slots whose record stays. Recovered, their pages are verified when they are read.
        """
        stays: npt.NDArray[np.bool_] = self._set.retire(slots) != _OK
        for page, number in zip(pages.tolist(), numbers.tolist(), strict=True):
            index.mend(page, self._tier, number, True)
        index.free_slots(self._tier, slots)
        return np.ascontiguousarray(slots[stays])

    def _retire_free(self, member: Member, slots: U32, index: Index) -> None:
        """Retire the records of slots of a member that are free, numbered within it.

        Requires: its range is closed.
        """
        stay = slots[member.volume.retire(slots) != _OK]
        index.owe_slots(self._tier, stay + np.uint32(member.base))

    def _drop_slots(self, member: Member, index: Index) -> int:
        """Take a closed range of slots out of the index, with a last try at the records of those that are owed.

        Returns:
            How many of its slots are in use still: 0 where it is out.
        """
        used = index.drop_slots(self._tier, member.base)
        if not used:
            return 0
        owed = index.take_owed(self._tier, member.count, member.base)
        if owed.size < used:
            index.owe_slots(self._tier, owed)
            return used
        if not member.is_lost:  # else they are another's to write
            slots = owed - np.uint32(member.base)
            stay = slots[member.volume.retire(slots) != _OK]
            self._debts.note(member.held.volume_id, member.volume, stay)
        index.free_slots(self._tier, owed)
        return index.drop_slots(self._tier, member.base)

    def _let_go(self, number: int) -> None:
        held = self._members[number].held
        try:
            self._detach(number)
        finally:
            self._directory.give_back(held)

    def _say_where_it_lies(self) -> None:
        """Warn of a shared tier that is no memory, of a disk tier that is, and of one that cannot do what it was asked:
        they work, and not as one would think."""
        path, is_in_memory = self._directory.path, self._directory.is_in_memory
        if self._wants_direct_io and not self._directory.direct_io:
            _LOG.warning(
                "disk tier: the file system of %s has no direct I/O: pages go through the page cache, whose memory "
                "counts against a container's limit. Set disk.path on another one, or disk.direct_io to false",
                path,
            )
        if self._tier is Tier.SHARED and not is_in_memory:
            _LOG.warning(
                "shared tier: %s is on no tmpfs: its pages are written to that file system too. Set shared.path below "
                "/dev/shm, or mount a tmpfs there",
                path,
            )
        if self._tier is Tier.DISK and is_in_memory:
            _LOG.warning(
                "disk tier: %s is on a tmpfs: its pages are memory that no limit is checked against, and a reboot "
                "loses them. Set disk.path on a local disk",
                path,
            )

    def _say_who_comes_from_another_boot(self, adopted: list[HeldVolume]) -> None:
        rebooted = sum(held.is_rebooted for held in adopted)
        if rebooted:
            _LOG.info(
                "%s tier: %d volumes were last used in another boot of this machine; each page is verified before it "
                "is served, as always, and more of them than usual may be found damaged",
                self._tier.name.lower(),
                rebooted,
            )

    @property
    def most_pages(self) -> int:
        """Slots of as many volumes as the capacity has room for; 0 while this process has none to count."""
        slots = max((member.count for member in self.members), default=0)
        return slots * (self._capacity_bytes // max(1, self._directory.volume_bytes))

    @property
    def may_grow(self) -> bool:
        """Whether there may be room for another volume: none was refused or failed since the last was had."""
        return self._full_at is None and not self._directory.is_removed

    def grow(self, index: Index, free_pages: int) -> None:
        """Take volumes until `free_pages` slots are free, as far as there is room for them.

        Not for longer than half a second: the keeper has other duties, and who wants more asks again.
        """
        began = self._clock.monotonic()
        while index.claimable(self._tier) < free_pages and self._may_try_to_grow():
            if not self._grow_or_say(index) or self._clock.monotonic() - began >= GROW_SECONDS:
                return

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Write recency, grow, give back; return how many pages to evict."""
        self._stamp_recency(index)
        self._finish_leaving(index)
        self._note_members()
        now = self._clock.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look_at_neighbours(index)
            self.leave_suspect(index)
        free = index.claimable(self._tier)
        if free >= low_pages and self._directory.lacking_bytes == 0:
            return 0
        if self._may_try_to_grow() and self._grow_or_say(index):
            while self._directory.lacking_bytes > 0 and self._clock.monotonic() - now < GROW_SECONDS:
                if not self._grow_or_say(index):
                    break
            return 0
        return high_pages - free if free < low_pages else 0

    def _look_at_neighbours(self, index: Index) -> None:
        """Give back what they lack, take what the dead have left, keep warm what they read."""
        self._begin_anew_if_removed(index)
        wanted = self._directory.wanted()
        self._leave_lost(index)
        if wanted > 0:
            self._start_leaving(index, wanted)
        elif self._directory.view.wanted_bytes == 0:
            self._stay(index)
            self._directory.adopt_left()
        self._attach_all(index)
        self._apply_touches(index)

    def _apply_touches(self, index: Index) -> None:
        """Count what neighbours read in our volumes as used."""
        touches = self._directory.touched()
        if not touches:
            return
        members = {bytes.fromhex(member.held.volume_id): member for member in self._members.values()}
        by_volume: dict[bytes, list[tuple[int, int]]] = {}
        for volume_id, slot, generation in touches:
            by_volume.setdefault(volume_id, []).append((slot, generation))
        for volume_id, rows in by_volume.items():
            member = members.get(volume_id)
            if member is not None and not member.is_leaving:
                slots, generations = zip(*rows, strict=True)
                index.touch(member.volume, np.array(slots, np.uint32), np.array(generations, np.uint64))

    def close(self, index: Index) -> None:
        """Write recency, drop mappings, release locks: the volumes are orphans, warm for whoever comes next."""
        self._stop.set()
        self._stamp_recency_now(index)
        with ExitStack() as closing:  # whatever one of them raises, the others are let go, and then the directory
            closing.callback(self._directory.close)
            for number in self._members:
                closing.callback(self._detach, number)
            index.retry_owed(self._tier, index.counts(self._tier)["owed"], self._set)  # the last try

    def _stamp_recency_now(self, index: Index) -> None:
        self._recency_at = float("-inf")
        try:
            self._stamp_recency(index)
        except (StepwellError, OSError) as error:
            _LOG.warning("%s tier: order of pages not written at close: %s", self._tier.name.lower(), str(error))

    # ---- volumes in and out ------------------------------------------------------------------------------------------

    def _grow(self, index: Index) -> bool:
        """Take one more volume: an orphan of ours, or a new one. False: no room."""
        # Before there is a member the constructor waits; from then on it is the keeper, which has other duties.
        taken = self._directory.grow(lock_timeout=KEEPER_LOCK_SECONDS if self._is_open else None)
        self._busy_since, self._has_said_busy = None, False
        if isinstance(taken, DirectoryFull):
            # Below the floor a neighbour may have given back since.
            self._retry_in(FLOOR_RETRY if self._directory.lacking_bytes > 0 else GROW_RETRY)
            return False
        self._full_at, self._has_said_budget = None, False
        self._attach(taken, index)
        return True

    def _grow_or_say(self, index: Index) -> bool:
        """Take one more volume; where the capacity allows more than the machine has left now, say so."""
        try:
            return self._grow(index)
        except BudgetError as error:
            self._retry_in(GROW_RETRY)
            if not self._has_said_budget:
                self._has_said_budget = True
                _LOG.warning("%s tier does not grow: %s", self._tier.name.lower(), error)
        except VolumeBusyError as error:
            self._retry_in(FLOOR_RETRY)
            now = self._clock.monotonic()
            if self._busy_since is None:
                self._busy_since = now
            if not self._has_said_busy and now - self._busy_since >= BUSY_SECONDS:
                self._has_said_busy = True
                _LOG.warning("%s tier does not grow: %s", self._tier.name.lower(), error)
        except OSError:
            self._retry_in(GROW_RETRY)  # a disk that cannot be written now: each save would ask it again
            raise
        except StepwellError:  # a lock that is none, a volume of no use: who waits for room must not ask in a loop
            self._retry_in(FLOOR_RETRY)
            raise
        return False

    def _retry_in(self, seconds: float) -> None:
        self._full_at, self._retry_seconds = self._clock.monotonic(), seconds

    def _grow_past_unusable(self, index: Index, most: int) -> None:
        """Have a volume if there is room for one; those that cannot be used, `most` of them, are removed on the way."""
        for _ in range(most + 1):
            if self._members:
                return
            try:
                self._grow(index)
                return
            except VolumeError as error:
                _LOG.warning("not adopted: %s", error)

    def _may_try_to_grow(self) -> bool:
        is_due = self._full_at is None or self._clock.monotonic() - self._full_at >= self._retry_seconds
        return is_due and not self._directory.is_removed  # the next look makes it anew first

    def _attach_all(self, index: Index) -> Recovered:
        """Put to use what the directory holds and this tier has not; what cannot be used is told of and gone."""
        pages = freed = 0
        known = {member.held.volume_id for member in self._members.values()}
        for held in self._directory.held:
            if held.volume_id in known:
                continue
            try:
                found = self._attach(held, index)
            except VolumeError as error:
                _LOG.warning("not adopted: %s", error)
                continue
            pages += found.pages
            freed += found.freed
        return Recovered(pages, freed)

    def _attach(self, held: HeldVolume, index: Index) -> Recovered:
        """Open a held volume, recover what it holds, and put its slots into use."""
        header = held.header
        assert isinstance(header, _core.VolumeHeader), "the directory was opened with CoreHeaders"
        try:
            if header.slots > 1 << SLOT_BITS:
                raise RuntimeError(f"{header.slots} slots are more than the {1 << SLOT_BITS} of a volume in use")
            volume = _core.Volume(
                self._shape,
                header,
                held.metadata.detach(),
                held.pages.detach() if held.pages is not None else -1,
                held.direct_io,
                durable=self._is_durable,
            )
            if self._is_durable:
                self._make_durable(volume)
        except OSError as error:  # the machine's fault, not the volume's: it stays, warm
            self._directory.give_back(held)
            raise self._io_error(held, error) from error
        except RuntimeError as error:
            raise self._remove_damaged(held, "header", str(error)) from error
        number = self._set.add(volume)
        base, count = number << SLOT_BITS, volume.header.slots
        member = Member(held, volume, number, base, count)
        found: Recovered | None = Recovered(0, 0)
        try:
            if held.is_rebooted:
                volume.write_boot_id(self._machine.boot_id())
            if not held.is_adopted:
                volume.prefault(self._stop)  # ahead of need: no save pays for the first touch
            index.add_slots(self._tier, base, count, True)
            if held.is_adopted:
                found = self._recover(member, index)
            if found is not None:
                index.open_slots(self._tier, base)
        except OSError as error:
            index.drop_slots(self._tier, base)
            self._set.remove(number)
            del member, volume  # and its mapping: nothing of it is left when its lock goes
            self._directory.give_back(held)
            raise self._io_error(held, error) from error
        if found is None:
            index.drop_slots(self._tier, base)
            self._set.remove(number)
            del member, volume
            text = "its pages are not those that its records are about"
            never = "or were never written: a crash of the kernel or of the file system"
            raise self._remove_damaged(held, "mixed-up", f"{text} ({never})")
        self._members[number] = member
        self._after_attach(member)
        return found

    def _remove_damaged(self, held: HeldVolume, reason: str, text: str) -> VolumeError:
        """Remove a volume of no use: given back it would be the next that grow() takes, for ever."""
        self._directory.cold.note(held.volume_id, reason, f"{text}; removed")
        self._directory.remove(held)
        return VolumeError(f"{self._tier.name.lower()} volume {held.volume_id}: {text}")

    def _make_durable(self, volume: _core.Volume) -> None:
        """Sync a volume and its name before its pages count: the dead may have left them to the kernel alone."""
        if volume.sync() is not _core.Status.ok:
            raise OSError(errno.EIO, "a sync failed")
        _core.file_sync_directory(self._directory.path)

    def _sync_name(self) -> None:
        """Make the tier directory's own name durable, whoever made it."""
        parent = os.path.dirname(self._directory.path)
        try:
            _core.file_sync_directory(parent)
        except OSError as error:
            raise TierIOError(error.errno, f"disk tier: cannot sync {parent}: {error.strerror}", parent) from error

    def _io_error(self, held: HeldVolume, error: OSError) -> TierIOError:
        what = f"{self._tier.name.lower()} tier: volume {held.volume_id} cannot be opened: {error.strerror or error}"
        return TierIOError(error.errno, what, self._directory.path)

    def _detach(self, number: int) -> None:
        """Take a volume out of use: who holds no Member of it any more holds no mapping."""
        member = self._members.pop(number)
        try:
            self._before_detach(member)
        finally:
            self._set.remove(number)

    def _recover(self, member: Member, index: Index) -> Recovered | None:
        """Put the pages that a volume holds into the index; say what it holds and is not found again.

        Returns:
            None where the pages are not those of the records: the index has nothing of it then.
        """
        (
            slots, keys, key_lengths, parents, parent_lengths, parent_states, depths, kinds, epochs, stamps,
            generations, duplicate, damaged,
        ) = member.volume.recover()  # fmt: skip
        if not self._has_its_pages(member.volume, slots, keys, key_lengths, kinds, epochs):
            return None
        has_left = self._debts.among(member.held.volume_id, slots, generations)
        stays = ~has_left
        accepted = index.recover(
            self._tier,
            slots[stays] + np.uint32(member.base),
            keys[stays],
            key_lengths[stays],
            parents[stays],
            parent_lengths[stays],
            parent_states[stays],
            depths[stays],
            kinds[stays],
            epochs[stays],
            stamps[stays],
        )
        refused = slots[stays][accepted == 0]
        self._retire_free(member, np.concatenate([slots[has_left], refused]), index)
        duplicate += int(refused.size)
        epoch = index.epoch
        others = int(np.count_nonzero(epochs[stays][accepted != 0] != epoch))
        for reason, count, text in (
            ("epoch", others, f"{others} pages are of another epoch than {epoch}; kept for it until room is needed"),
            ("records", damaged, f"{damaged} records are damaged; freed"),
            ("duplicate", duplicate, f"{duplicate} pages are elsewhere too; freed"),
        ):
            if count:
                self._directory.cold.note(member.held.volume_id, reason, text, count)
        pages = int(accepted.sum()) - others
        self._recovered_pages += pages
        return Recovered(pages, duplicate + damaged)

    @staticmethod
    def _has_its_pages(
        volume: _core.Volume, slots: U32, keys: U8, key_lengths: U8, kinds: U8, epochs: npt.NDArray[np.uint64]
    ) -> bool:
        """Read one page of a volume; where it is not what its record says, a few more. One that is ends it."""
        if slots.size < LEAST_SAMPLED:
            return True
        row = np.empty(volume.header.page_bytes, dtype=np.uint8)
        for at in np.linspace(0, slots.size - 1, min(MOST_SAMPLED, slots.size)).astype(np.int64).tolist():
            key = keys[at, : key_lengths[at]].tobytes()
            status = volume.read_page(int(slots[at]), row, key=key, kind=int(kinds[at]), epoch=int(epochs[at]))
            if status is not _core.Status.checksum:  # right, or it cannot be said now
                return True
        return False

    def _leave_lost(self, index: Index) -> None:
        """Take volumes out of service whose files somebody removed, or their lock's name, so that another process has
        them too."""
        lost = set(self._directory.view.lost_ids)
        for member in self._members.values():
            if member.held.volume_id in lost and not member.is_leaving:
                _LOG.warning(
                    "%s tier: files of volume %s were removed by somebody, or its lock file was and another process "
                    "took the volume; letting it go",
                    self._tier.name.lower(),
                    member.held.volume_id,
                )
                self._lose(member, index)
        self._finish_leaving(index)

    def _lose(self, member: Member, index: Index) -> None:
        member.is_leaving, member.leaving_since = True, self._clock.monotonic()
        member.is_lost = True  # what pins keep in it is another's to overwrite
        index.close_slots(self._tier, member.base)
        index.free_slots(self._tier, index.take_owed(self._tier, member.count, member.base))

    def _begin_anew_if_removed(self, index: Index) -> None:
        """Where somebody removed the whole directory (a cleaner of old files), go on in a new one, empty.

        Open, the files of its volumes take room that nobody counts, and the next process finds nothing of them.
        """
        if not self._directory.is_removed:
            return
        if not self._has_said_removed:
            self._has_said_removed = True
            _LOG.warning(
                "%s tier: the directory %s was removed by somebody, or another one put in its place: the pages in it "
                "are lost; going on without them, in a new one",
                self._tier.name.lower(),
                self._directory.path,
            )
        for member in self._members.values():
            if not member.is_lost:
                self._lose(member, index)
        self._finish_leaving(index)
        self._directory.rejoin()
        if self._is_durable:
            self._sync_name()
        self._full_at, self._has_said_removed = None, False

    def leave_suspect(self, index: Index) -> None:
        """Take volumes out of service that a sync failed on; adopted anew, they are synced before anything else.

        Requires: as tick().
        """
        for member in self._members.values():
            if member.volume.is_suspect and (member.is_wanted or not member.is_leaving):
                _LOG.warning(
                    "%s tier: a sync of volume %s failed; what was not acknowledged is dropped, and the volume is "
                    "opened anew before it takes pages again. Look at the disk",
                    self._tier.name.lower(),
                    member.held.volume_id,
                )
                member.is_leaving, member.is_wanted, member.leaving_since = True, False, self._clock.monotonic()
                index.close_slots(self._tier, member.base)
        self._finish_leaving(index)

    def _start_leaving(self, index: Index, wanted_bytes: int) -> None:
        """Take volumes of lowest rank that keep nothing for a pin out of service, until they are what is wanted."""
        now = self._clock.monotonic()
        # One that does not come free (pinned, or its slots beyond mending) is not waited for.
        missing = wanted_bytes - sum(
            member.held.total_bytes
            for member in self._members.values()
            if member.is_leaving and now - member.leaving_since < LEAVE_PATIENCE
        )
        if missing <= 0:
            return
        held = index.counts(self._tier)["held"]  # a pin that begins from here on may hold one volume back
        order = index.rank_order(self._tier)
        numbers = order >> SLOT_BITS
        # Not one that a pin() would hold for hours: one after the other they would all go out of service, and none of
        # them be given back.
        keeping = set(numbers[max(0, order.size - held) :].tolist())
        position = np.arange(order.size)

        def rank(member: Member) -> float:
            mine = position[numbers == member.number]
            return float(mine.mean()) if mine.size else -1.0

        staying = [member for member in self._members.values() if not (member.is_leaving or member.number in keeping)]
        for member in sorted(staying, key=rank):
            if missing <= 0:
                break
            missing -= member.held.total_bytes
            member.is_leaving, member.is_wanted, member.leaving_since = True, True, now
            index.close_slots(self._tier, member.base)
        self._finish_leaving(index)

    def _stay(self, index: Index) -> None:
        """Put volumes that could not be given back in time to use again: nobody wants them any more."""
        for member in self._members.values():
            if member.is_leaving and member.is_wanted and not member.is_lost:
                member.is_leaving = member.is_wanted = False
                left, member.left = member.left, []
                for slots in left:  # what was forgotten from now on must not be found there again
                    self._retire_free(member, slots - np.uint32(member.base), index)
                index.open_slots(self._tier, member.base)

    def _finish_leaving(self, index: Index) -> None:
        """Give back what is leaving, once nothing holds it. Records stay: whoever adopts the volume finds it warm."""
        for number in [number for number, member in self._members.items() if member.is_leaving]:
            member = self._members[number]
            slots = index.take_victims(self._tier, member.count, member.base, even_held=member.is_lost)
            index.free_slots(self._tier, slots)
            if self._drop_slots(member, index):
                member.left.append(slots)
                continue
            held = member.held
            del member
            try:
                self._detach(number)
            finally:
                self._directory.give_back(held)

    def _stamp_recency(self, index: Index) -> None:
        """Write when pages were last used into their volumes, if it is time: for those used since the last time."""
        now = self._clock.monotonic()
        if now - self._recency_at < self._recency_seconds:
            return
        self._recency_at = now
        for _ in range(STAMPS_A_ROUND // STAMPS_AT_ONCE):
            if not index.has_stamps(self._tier):
                break
            slots, stamps = index.take_stamps(self._tier, STAMPS_AT_ONCE)
            numbers = slots >> SLOT_BITS
            for number in np.unique(numbers).tolist():
                member, mine = self._members.get(number), numbers == number
                if member is not None:
                    member.volume.write_recency(slots[mine] - np.uint32(member.base), stamps[mine])
        for member in self.members:
            self._after_recency(member)

    # ---- what a kind of tier adds ------------------------------------------------------------------------------------

    def _after_attach(self, member: Member) -> None:
        """A volume is in use."""

    def _after_recency(self, member: Member) -> None:
        """It was time to write when a volume's pages were used."""

    def _before_detach(self, member: Member) -> None:
        """A volume goes out of use."""


