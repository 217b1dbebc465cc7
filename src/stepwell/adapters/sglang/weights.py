"""Keep the weights' epoch: the name under which pages are saved, and which changes before the weights do.

    at the start --change--> random --done on all ranks, with a version--> random --cache flushed--> of the version
         ^                     ^  |                                          |                          |
         '-- never again --    '--+-- any further change, a failure ---------+--------------------------'

A page may be served only to an engine whose weights computed it. Pages of the epoch *at the start* are found again
after a restart, and those *of a version* by whoever takes it, another engine or this one after a restart, so these
names must say what the weights are; a *random* name is drawn where nobody knows, or knows yet, and its pages are never
found again: they are the first to leave.

Four rules follow from what SGLang does:

- The name changes before the first byte of the weights does, on each call that may change one: pages that are computed
  between two parts of an update belong to neither.
- A version says what the weights are only together with the user's `weights_id`: "1" of one training run is not "1" of
  another. Without one, and without a version, the name stays random until the process ends.
- A version is taken only once SGLang has flushed its own cache after the last change: until then its tree holds pages
  of the old weights, and would hand them to us to be stored under the version's name. (Under a random name it may: such
  pages go no further than SGLang's own tree carries them.)
- KV of one tensor-parallel rank depends on the weights of all, so a version is taken by all ranks or none.

There is one `WeightsEpoch` a process, `weights_epoch()`: SGLang's weights are the process's, and updates that came
before a backend was attached count. The plug-in (plugin.py) tells it of changes; storages follow it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from stepwell.adapters.sglang.checkpoint import WeightsSource, index_checkpoint

_LOG = logging.getLogger("stepwell")


class Ranks(Protocol):
    """The ranks that change their weights together, each of which makes the same calls in the same order."""

    @property
    def can_agree(self) -> bool:
        """Whether `is_true_for_all` may be asked once a change is over. If not, no version is ever taken."""

    def share(self, name: str) -> str:
        """Return the first rank's name, on all ranks."""

    def is_true_for_all(self, flag: bool) -> bool:
        """Return whether the flag is true on all ranks."""


class OneRank:
    """A rank that changes alone: what it draws and finds is what counts."""

    def __init__(self, *, can_agree: bool) -> None:
        self.can_agree = can_agree

    def share(self, name: str) -> str:
        """Return the name."""
        return name

    def is_true_for_all(self, flag: bool) -> bool:
        """Return the flag."""
        return flag


class Change:
    """A change of the weights under way: what its calls report.

    Invariant: it counts as done only where `finish` was called, and never with `is_done` false.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.version: str | None = None

    def finish(self, *, is_done: bool, version: str | None) -> None:
        """Report how the change ended: whether all of it was applied, and the version that the weights now have."""
        self.is_done = is_done
        self.version = version


class _Session:
    """Updates between begin and end, one change in parts: it has a version if all parts succeed and agree on it."""

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._versions: set[str | None] = set()

    def add(self, part: Change) -> None:
        self._is_whole = self._is_whole and part.is_done
        self._versions.add(part.version)

    @property
    def version(self) -> str | None:
        """The version of the whole, or None where it is not known: no part, a failed one, or several versions."""
        return next(iter(self._versions)) if self._is_whole and len(self._versions) == 1 else None


class Following:
    """A storage's place among those that are told of changes. Calling it ends that."""

    def __init__(self, epoch: WeightsEpoch, switch: Callable[[str], None]) -> None:
        self._epoch = epoch
        self._switch = switch
        self._switched_to: str | None = epoch.current

    def __call__(self) -> None:
        """Tell this storage no more. Idempotent."""
        self._epoch._leave(self)

    @property
    def is_current(self) -> bool:
        """Whether the storage has switched to the epoch that holds now. If not, it must neither serve nor save a page.

        Threads: any, without a lock. A change under way makes it false before the first byte of the weights changes.
        """
        return self._switched_to == self._epoch.current

    def _tell(self, epoch: str) -> None:
        self._switched_to = None
        try:
            self._switch(epoch)
        except Exception:  # noqa: BLE001 - whatever it was: the engine's update goes on, the storage stays shut
            _LOG.exception("stepwell: a storage could not switch to the weights' epoch %s: it serves nothing", epoch)
        else:
            self._switched_to = epoch


class WeightsEpoch:
    """Name the weights of this process.

    Invariant: while a byte of the weights may differ from what `current` says, `current` is random and was never used
    for other weights; every storage that follows has switched to it, or is not `is_current`.

    Threads: changes come on one thread (SGLang's scheduler makes all of them on its main thread); `at_start` and
    `follow` from any; `current` and `Following.is_current` take no lock. Storages are told on the thread of the change,
    with the lock held: what they call must not wait for another thread that calls `at_start` or `follow`.
    """

    def __init__(self, *, draw: Callable[[], str] | None = None, began_at: float | None = None) -> None:
        """Begin to watch.

        Args:
            draw: makes 128 random bits in hex; tests pass their own.
            began_at: when the process began (Unix time): weight files that changed later may not be the ones it loaded.
        """
        self._draw = draw if draw is not None else lambda: secrets.token_hex(16)
        self._began_at = began_at if began_at is not None else _process_start()
        self._lock = threading.RLock()
        self._current = self._random()
        self._start: str | None = None
        self._has_id = False
        self._has_changed = False
        self._awaits_flush: str | None = None
        self._is_flushed = False
        self._under_way = 0
        self._session: _Session | None = None
        self._versions_taken: set[str] = set()
        self._followers: list[Following] = []
        self._is_watched: Callable[[], bool] = lambda: False

    # ---- for storages ---------------------------------------------------------------------------------------------

    @property
    def current(self) -> str:
        """The epoch that holds now. Threads: any, without a lock."""
        return self._current

    @property
    def is_watched(self) -> bool:
        """Whether the plug-in sees every change of the weights in this process."""
        return self._is_watched()

    @property
    def is_random(self) -> bool:
        """Whether the epoch ends with the process: its pages will not be found after a restart."""
        return self._current.startswith("random-")

    def at_start(self, weights_id: str | None, source: WeightsSource) -> str:
        """Say what the weights were when the process began, and return the epoch that holds now.

        That is the epoch at the start unless the weights have changed since, or the files that should name them have.

        Args:
            weights_id: the user's name of the weights, and of what versions count from; None: the index of the
                checkpoint names them, and versions do not.
            source: where the engine has them from.

        Raises:
            StepwellUsageError: no id was given, and there are no files whose index could stand for one.
        """
        if weights_id is not None:
            start: str | None = _named("id", weights_id)
        else:
            index = index_checkpoint(source)
            start = _named("files", index.digest)
            if index.changed_at >= self._began_at:
                start = None
                _LOG.warning(
                    "stepwell: files of %s changed after this process began, so they may not be the weights that it "
                    "loaded: pages of this process will not be found after a restart (those of the next one will)",
                    source.path,
                )
        with self._lock:
            self._start, self._has_id = start, weights_id is not None
            if not self._has_changed:
                self._switch(start if start is not None else self._random())
            return self._current

    def follow(self, switch: Callable[[str], None]) -> Following:
        """Call `switch(epoch)` at each change from now on, on the thread of the change, before the weights change.

        One that raises is logged, and is not `is_current` until a later call succeeds. Follow first, then read
        `current` (or call `at_start`): what changes in between is told twice rather than not at all.
        """
        with self._lock:
            following = Following(self, switch)
            self._followers = [*self._followers, following]
            return following

    def _leave(self, following: Following) -> None:
        with self._lock:
            self._followers = [other for other in self._followers if other is not following]

    # ---- for the plug-in -------------------------------------------------------------------------------------------

    def watch(self, is_watched: Callable[[], bool]) -> None:
        """Let the plug-in answer whether every change is seen."""
        self._is_watched = is_watched

    @contextmanager
    def change(self, ranks: Ranks) -> Iterator[Change]:
        """Switch to a random epoch, let the weights change, and take the version that the change reports.

        The body reports by `Change.finish`. An exception that leaves it ends the change as failed, without asking the
        other ranks: they may be waiting in a collective of SGLang's own, and this rank is about to end.
        """
        with self._changing(ranks) as change:
            yield change
        self._end(change, ranks)

    @contextmanager
    def part(self, ranks: Ranks) -> Iterator[Change]:
        """Change some of the weights within a session: as `change`, and the version waits for the session's end."""
        with self._changing(ranks) as change:
            yield change
        self._add_to_session(change)

    @contextmanager
    def session_begin(self, ranks: Ranks, *, is_whole: bool) -> Iterator[Change]:
        """Open a session once the body reports that SGLang has.

        Args:
            ranks: those that open it.
            is_whole: whether the session is about all of the weights; one about some has no version of the whole.
        """
        with self._changing(ranks) as change:
            yield change
        if change.is_done:
            self._session = _Session(is_whole=is_whole)

    @contextmanager
    def session_end(self, ranks: Ranks) -> Iterator[Change]:
        """Close the session once the body reports that SGLang has, and take its version (the body has none)."""
        with self._changing(ranks) as change:
            yield change
        session, version = self._session, None
        if session is not None and change.is_done:
            self._session, version = None, session.version
        change.version = version
        self._end(change, ranks)

    def changed(self) -> None:
        """Switch to a random epoch of this rank's own, unless a change is under way: SGLang changes weights unasked."""
        with self._lock:
            if not self._under_way:
                self._add_to_session(Change())
                self._become_random(self._random())

    def flushed(self) -> None:
        """Note that SGLang's own cache is empty now: take the version that has waited for that, or another random name.

        Since the change SGLang may have kept pages of the weights before it under the random name: backups that were
        under way, requests that went on. From here on it has none of them, and must not find those again. Within a
        change there were none: SGLang flushes only once it has seen all backups end (managers/scheduler.py:5392), which
        it does on the thread that is busy with the change.
        """
        with self._lock:
            is_first_since = self._has_changed and not self._is_flushed and not self._under_way
            self._is_flushed = True
            self._take_version()
            if is_first_since and self.is_random:
                self._switch(_named("random", self._current))  # of what the ranks share: they need not meet

    def label(self, version: str) -> None:
        """Note that the present weights are called by a version. It is theirs: another change cannot have it."""
        with self._lock:
            self._versions_taken.add(version)

    @contextmanager
    def _changing(self, ranks: Ranks) -> Iterator[Change]:
        name = self._shared_random(ranks)
        with self._lock:
            self._under_way += 1
            self._become_random(name)
        change = Change()
        try:
            yield change
        except BaseException:
            self._add_to_session(Change())  # whatever the body reported before it raised
            raise
        finally:
            with self._lock:
                self._under_way -= 1

    def _add_to_session(self, part: Change) -> None:
        if self._session is not None:
            self._session.add(part)

    def _shared_random(self, ranks: Ranks) -> str:
        name = self._random()
        try:
            return ranks.share(name)
        except RuntimeError:  # torch's: a rank has gone
            _LOG.warning("stepwell: the ranks could not share an epoch; each has its own", exc_info=True)
            return name

    def _end(self, change: Change, ranks: Ranks) -> None:
        """Take the change's version if all ranks can. Each of them asks, whatever it found itself."""
        self._add_to_session(change)
        if not ranks.can_agree:
            return
        version = change.version if change.is_done and self._session is None else None
        # Two training runs on one base both call their weights "1", "2", ...: only the user knows that a version names
        # one content, and says so with an id of the run.
        is_ready = version is not None and version not in self._versions_taken and self._has_id
        try:
            is_agreed = ranks.is_true_for_all(is_ready)
        except RuntimeError:
            _LOG.warning("stepwell: the ranks could not agree on the weights' version: it is not taken", exc_info=True)
            return
        if version is None:
            return
        if not is_agreed:
            _LOG.warning(
                "stepwell: weights of version %r stay under a random epoch, and their pages end with this process: no "
                "weights_id was given that versions count from, it was used before, or on some rank the update failed",
                version,
            )
            return
        with self._lock:
            self._versions_taken.add(version)
            self._awaits_flush = version
            self._take_version()

    def _become_random(self, name: str) -> None:
        self._has_changed = True
        self._awaits_flush = None
        self._is_flushed = False
        self._switch(name)

    def _take_version(self) -> None:
        version, start = self._awaits_flush, self._start
        if version is not None and start is not None and self._is_flushed:
            self._awaits_flush = None
            self._switch(_named("version", start, version))

    def _switch(self, epoch: str) -> None:
        if epoch == self._current:
            return
        self._current = epoch  # first: who asks is_current from now on hears no
        _LOG.info("stepwell: the weights' epoch is %s", epoch)
        for following in self._followers:
            following._tell(epoch)

    def _random(self) -> str:
        return f"random-{self._draw()}"


@functools.cache
def weights_epoch() -> WeightsEpoch:
    """Return the epoch of this process's weights."""
    return WeightsEpoch()


def _named(*parts: str) -> str:
    """Name an epoch by its kind and a hash of what it is made of."""
    return f"{parts[0]}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _process_start() -> float:
    """Return when this process began, in Unix time (to 10 ms: /proc counts in ticks since the boot)."""
    with open("/proc/self/stat") as status:
        ticks = int(status.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
