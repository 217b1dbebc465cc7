"""Answer SGLang's storage calls: one PageStore a host pool, its pages under SGLang's own page hashes.

    batch_exists   hashes -> probe: the longest run that can be delivered in time, held for a while, read ahead
    batch_get_v1   hashes, host slots -> load_keys: verified copies into SGLang's host pool
    batch_set_v1   hashes, host slots -> save_keys: copies out of it, kept in every tier that outlives the process

SGLang 0.5.23 calls from its scheduler's main thread (construction, registration, clear, close) and from up to three
threads of its controller at once (backup_thread_func, prefetch_thread_func, prefetch_io_aux_func; cache_controller.py).
Whatever fails here, or is no argument, is a miss or a page that is not kept, and one log line a minute. SGLang catches
what most of these calls raise, and gives the whole operation up then (cache_controller.py:1188, :1349, :1441,
hybrid_cache_controller.py:1656); nothing catches what get_stats raises in its scheduler (unified_radix_cache.py:3702).
Only what it calls to attach, clear or detach raises (cache_controller.py:672, :689, storage_attachment.py:249).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

import stepwell as sw
from stepwell.adapters.sglang.bound import DEFAULT_TIMEOUT, LoadBound, RecomputeCost, Timeout, last_timeout
from stepwell.adapters.sglang.identity import Identity, identity
from stepwell.adapters.sglang.memory import warnings_of
from stepwell.adapters.sglang.metrics import SECONDS, Calls, Exporter, Snapshot, rank_label, snapshot_of
from stepwell.adapters.sglang.pools import HostPool, PoolPages, Whose, describe
from stepwell.adapters.sglang.settings import SglangSettings, read_settings
from stepwell.adapters.sglang.weights import Following, weights_epoch

T = TypeVar("T")

_KV: Final = PoolName.KV.value
_HASH_CHARACTERS: Final = 64
_MOST_FLAT_PAGES: Final = 16
"""Pages that are copied once more at a time, where SGLang hands pages out as tensors."""
_LOG_SECONDS: Final = 60.0
_LOG = logging.getLogger("stepwell")


class StepwellStorage(HiCacheStorage):  # type: ignore[misc]
    """Keep SGLang's KV pages in shared memory and on disk.

    Args:
        storage_config: of SGLang; its `extra_config` holds the table `stepwell` (settings.py).
        kwargs: SGLang gives an empty dict (backend_factory.py:155).

    Raises (constructor, on_host_pools_registered): StepwellError; SGLang then starts without the backend or refuses to
    attach it.

    Threads: as SGLang calls; any.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings: SglangSettings = read_settings(storage_config.extra_config)
        self._identity: Identity = identity(storage_config)
        self._prefetch = _prefetch_timeout()
        self._pools: dict[str, HostPool] = {}
        self._members: dict[str, _Member] = {}
        self._lock = threading.Lock()  # a member joins, all are told of an epoch, all are let go: one at a time
        self._is_open = False
        self._is_closed = False
        self._says = _Says()
        self._cost = RecomputeCost(time.monotonic)
        self._rank = rank_label(storage_config)
        self._exporter = Exporter(self._rank) if storage_config.enable_storage_metrics else None
        self._snapshot: Snapshot = {}
        self._snapshot_at = float("-inf")
        self._epoch_changes = 0
        self.registered_pools: dict[str, HostPool] = self._pools
        self._weights = weights_epoch()
        if self._settings.is_persistent and not (self._weights.is_watched or self._settings.adapter.weights_static):
            raise sw.StepwellUsageError(
                "updates of the weights are not watched in this process, so pages of old weights could be served after "
                "one: let SGLang load the plug-in `stepwell` (is SGLANG_PLUGINS set without it?), or say "
                '{"stepwell": {"weights_static": true}} where weights never change while the engine runs'
            )
        self._following: Following | None = None

    # ---- registration (SGLang's main thread) -----------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the host pool of the KV pages (cache_controller.py:617)."""
        self._take_pool(_KV, mem_pool_host)
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Take a further host pool; also after the backend is attached (hybrid_cache_controller.py:355-375)."""
        name = str(host_pool_name)
        self._take_pool(name, host_pool)
        if self._is_open and name not in self._members:
            self._join(self._open(name, host_pool))

    def on_host_pools_registered(self) -> None:
        """Open a store for each pool."""
        self._check_open()
        if self._is_open:
            return
        try:
            # Followed before it is asked for: a change in between is told twice rather than not at all.
            self._following = self._weights.follow(self._set_epoch)
            self._ask_epoch()
            for name, pool in self._pools.items():
                self._join(self._open(name, pool))
            self._is_open = True
            self._warn_of_memory()
        except BaseException:
            self.close()
            raise

    def _check_open(self) -> None:
        """Raise StepwellUsageError where the backend is closed: what it opened now nobody would close."""
        if self._is_closed:
            raise sw.StepwellUsageError("the backend is closed: attach another one")

    def _take_pool(self, name: str, pool: HostPool) -> None:
        """Take a host pool by its name.

        Raises:
            StepwellUsageError: the backend is closed, or open with another pool of that name: its pages would go on
                being read from, and written to, that one's memory.
        """
        self._check_open()
        member = self._members.get(name)
        if member is not None and member.pool is not pool:
            raise sw.StepwellUsageError(f"host pool {name} is registered already: detach the backend to change it")
        self._pools[name] = pool

    def _join(self, member: _Member) -> None:
        """Serve a pool from now on, under the epoch that holds now; not where the backend was closed meanwhile."""
        try:
            with self._lock:
                self._check_open()
                member.store.set_epoch(self._weights.current)
                self._members[member.name] = member
        except BaseException:
            member.store.close()
            raise

    def _open(self, name: str, pool: HostPool) -> _Member:
        pages = describe(pool, name, self._whose(name, pool), zero_copy=self._settings.zero_copy or name != _KV)
        config = sw.from_mapping(self._store_settings(pages.geometry))
        store = sw.PageStore(config)
        try:
            lent = None if pages.pointers is None else store.lend(pages.pointers)
        except BaseException:
            store.close()
            raise
        _LOG.info("host pool %s: %d pages of %d bytes, %s", name, pages.pages, pages.geometry.page_bytes, pages.form)
        key_tokens = pages.page_tokens if name == _KV else int(self._pools[_KV].page_size)
        bound = LoadBound(
            self._settings.adapter.load_bound, prefetch=self._prefetch, page_tokens=key_tokens, cost=self._cost
        )
        calls, rows = Calls(pages.geometry.page_bytes), (_Rows(pages, store), _Rows(pages, store))
        return _Member(name, pool, pages, store, lent, bound, key_tokens, calls, *rows)

    def _warn_of_memory(self) -> None:
        """Say once what of SGLang's host memory and of shared memory does not go together."""
        if self._rank != "tp0":
            return
        shared = self._settings.tiers.get("shared")
        capacity = shared.get("capacity") if isinstance(shared, dict) else shared
        for finding in warnings_of(
            sum(member.pages.pages * member.pages.geometry.page_bytes for member in self._members.values()),
            ranks=self._ranks(),
            shared_bytes=None if capacity is None else sw.parse_size(capacity, name="stepwell.shared.capacity"),
            mode=_host_memory_mode(),
        ):
            _LOG.warning("%s: %s: %s; %s", finding.subject, finding.found, finding.why, finding.remedy)

    def _whose(self, name: str, pool: HostPool) -> Whose:
        """Say whose bytes a pool's are.

        Of a model whose KV every rank holds (MLA) they are everybody's; those of its pools that are split nevertheless
        (Mamba states, an MHA draft) are the rank's.
        """
        config, who = self._config, self._identity
        fields = who.draft_fields if name.startswith(PoolName.DRAFT.value) else who.fields
        if config.is_mla_model and (name == PoolName.MAMBA.value or "MHA" in type(pool).__qualname__):
            fields = (*fields, ("tp_rank", config.tp_rank), ("tp_size", config.tp_size))
        return Whose(who.model, who.revision, who.shard, fields)

    def _store_settings(self, geometry: sw.PageGeometry) -> dict[str, Any]:
        """Return the settings of one pool's store: what the user gave, and shares of the directories by the ranks."""
        own = {"geometry": geometry, "epoch": self._weights.current, "io_threads": _IO_THREADS}
        given: dict[str, Any] = {**own, **self._settings.tiers}
        parts = self._ranks() * max(1, len(self._pools))
        for name in ("shared", "disk"):
            tier = given.get(name)
            if isinstance(tier, dict) and "share" not in tier and "capacity" in tier:
                capacity = sw.parse_size(tier["capacity"], name=f"stepwell.{name}.capacity")
                given[name] = {**tier, "share": min(capacity // 8, capacity // (2 * parts))}
                # A directory takes whole volumes: where two of the usual size for each rank do not fit, the last rank
                # to come would get none, and SGLang uses of a hit what all ranks have.
                if "volume_bytes" not in tier and capacity // (2 * parts) < _USUAL_VOLUME:
                    given[name]["volume_bytes"] = max(capacity // (2 * parts), min(capacity, 2 * geometry.page_bytes))
        if given.get("shared") is None and given.get("host") is None and given.get("disk") is not None:
            # What is read ahead must lie somewhere until SGLang has a place for it.
            given["host"] = max(_LEAST_STAGING, 2 * _BATCH_PAGES * geometry.page_bytes)
        return given

    def _ranks(self) -> int:
        config = self._config
        return int(config.tp_size) * int(config.pp_size) * max(1, int(config.attn_cp_size))

    # ---- the weights -----------------------------------------------------------------------------------------------

    def _ask_epoch(self) -> None:
        """Have the epoch at the start be named: by the user, else by the files of the checkpoint."""
        try:
            self._weights.at_start(self._settings.adapter.weights_id, self._identity.weights)
        except sw.StepwellUsageError:
            if self._settings.is_persistent:
                raise
            # Without a name it is random, and what is kept is lost with the process anyway.

    def _set_epoch(self, epoch: str) -> None:
        """Follow the weights: pages of any other epoch are misses from now on."""
        self._epoch_changes += self._is_open  # before, it is named for the first time
        with self._lock:
            for member in self._members.values():
                member.store.set_epoch(epoch)

    # ---- zero copy (v1) --------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Say how many leading pages can be delivered (hybrid_cache_controller.py:1442)."""
        return self._try("batch_exists", 0, lambda: self._probe(self._kv(), _as_keys(keys)))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool, each verified on the way (cache_controller.py:1116)."""
        no = [False] * _count(keys)
        return self._try("batch_get_v1", no, lambda: self._get(self._kv(), keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Keep pages of the host pool (cache_controller.py:1412): True where they are kept, or were before.

        A page that an earlier call is bringing still, when set_timeout has passed, is not kept: SGLang ends the
        operation at the first batch with such a page (cache_controller.py:1443-1448), and computes nothing anew.
        """
        no = [False] * _count(keys)
        return self._try("batch_set_v1", no, lambda: self._set(self._kv(), keys, host_indices, extra_info))

    # ---- several pools (v2) ----------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Say which prefix lengths can be restored from all pools (hicache_storage.py:321, HiCacheFile's at :891)."""
        none = PoolTransferResult.empty()
        return self._try("batch_exists_v2", none, lambda: self._restorable(_as_keys(keys), _transfers(pool_transfers)))

    def _restorable(self, keys: npt.NDArray[np.uint8], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        kv_pages = self._probe(self._kv(), keys)
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        usable = np.ones(kv_pages, dtype=np.bool_)  # by prefix length - 1
        for transfer in transfers:
            if not usable.any():
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # gates nothing, and no verdict is a legal one (hicache_storage.py:129-133)
            member = self._member(transfer.name)
            here = member.store.holds(keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys) if transfer.keys else 1)
                ends = _whole_windows(here, window)
            else:
                ends = np.logical_and.accumulate(here)
            if ends.any():
                hits[transfer.name] = int(np.flatnonzero(ends)[-1]) + 1
            usable &= ends
        lengths = (np.flatnonzero(usable) + 1).tolist()
        final = lengths[-1] if lengths else 0
        for transfer in transfers if final else ():  # hold and read ahead what the longest one needs
            if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
                trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
                first = max(0, final - max(1, len(transfer.keys or ()))) if trailing else 0
                self._probe(self._member(transfer.name), keys[first:final])
        return PoolTransferResult(final, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools (hybrid_cache_controller.py:1651)."""
        asked = self._asked("batch_get_v2", transfers)
        return {each.name: self._transfer("batch_get_v2", each, self._get) for each in asked}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Keep pages of several pools (hybrid_cache_controller.py:1711)."""

        def keep(member: _Member, keys: list[str], indices: torch.Tensor) -> list[bool]:
            return self._set(member, keys, indices, extra_info)

        asked = self._asked("batch_set_v2", transfers)
        return {each.name: self._transfer("batch_set_v2", each, keep) for each in asked}

    def _asked(self, call: str, transfers: Sequence[PoolTransfer] | None) -> Sequence[PoolTransfer]:
        none: Sequence[PoolTransfer] = ()
        return self._try(call, none, lambda: _transfers(transfers))

    def _transfer(
        self, call: str, transfer: PoolTransfer, do: Callable[[_Member, list[str], torch.Tensor], list[bool]]
    ) -> list[bool]:
        keys = transfer.keys
        no = [False] * _count(keys)
        if not no or transfer.host_indices is None:
            return no
        return self._try(call, no, lambda: do(self._member(transfer.name), keys, transfer.host_indices))

    # ---- pages as tensors (the generic calls) ----------------------------------------------------------------------

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Fill tensors with pages (cache_controller.py:1136); None where a page is missing."""
        misses: list[torch.Tensor | None] = [None] * _count(keys)
        targets = misses if target_locations is None else target_locations
        return self._try("batch_get", misses, lambda: self._get_flat(self._kv(), keys, targets))

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Keep pages that are given as tensors (cache_controller.py:1408). True: all are kept."""
        return self._try("batch_set", False, lambda: all(self._set_flat(self._kv(), keys, values)))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Fill a tensor with a page."""
        targets = [target_location]
        return self._try("get", None, lambda: self._get_flat(self._kv(), [key], targets)[0])

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Keep a page that is given as a tensor."""
        return self._try("set", False, lambda: all(self._set_flat(self._kv(), [key], [value])))

    def exists(self, key: str) -> bool:
        """Say whether a page can be delivered."""
        return self.batch_exists([key]) == 1

    # ---- care ------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every page in this engine's own volumes (POST /hicache/storage-backend/clear).

        No call finds them from then on. It waits for what is on its way, and for the disk to have it, for set_timeout
        at most, all pools together: where the disk hangs, or refuses, a crash before it has it brings them back
        (PageStore.clear). What fails raises: SGLang says so in its log (storage_attachment.py:249).
        """
        limit = time.monotonic() + self._settings.adapter.set_timeout

        def left() -> float:
            return max(0.0, limit - time.monotonic())

        stores = [member.store for member in list(self._members.values())]
        for store in stores:
            store.clear(deadline=left())
        # It passes by what is being read ahead for the last hits, or saved.
        for store in stores:
            store.flush(timeout=left())
            store.clear(deadline=left())

    def get_stats(self) -> StepwellMetrics | None:
        """Return what was moved since the last call, and what the stores hold and have done.

        SGLang asks in each round of its scheduler, where storage metrics are enabled (unified_radix_cache.py:3702): the
        stores are asked once a second at most. None: closed.
        """
        if self._is_closed:
            return None
        return self._try("get_stats", None, self._stats)

    def _stats(self) -> StepwellMetrics:
        found = StepwellMetrics()
        kv = self._members.get(_KV)
        if kv is not None:
            reads, writes = kv.calls.take_batches("get"), kv.calls.take_batches("set")
            found.prefetch_pgs.extend(batch.pages for batch in reads)
            found.prefetch_bandwidth.extend(batch.gigabytes_per_second for batch in reads if batch.nbytes)
            found.backup_pgs.extend(batch.pages for batch in writes)
            found.backup_bandwidth.extend(batch.gigabytes_per_second for batch in writes if batch.nbytes)
        now = time.monotonic()
        if now - self._snapshot_at >= SECONDS:
            self._snapshot_at = now
            self._snapshot = self._look()
            if self._exporter is not None:
                durations = {name: member.calls.take_durations() for name, member in list(self._members.items())}
                self._exporter.publish(self._snapshot, durations)
        found.stepwell = self._snapshot
        return found

    def _look(self) -> Snapshot:
        pools: dict[str, Snapshot] = {}
        for name, member in list(self._members.items()):
            try:
                pools[name] = snapshot_of(
                    member.store.stats(),
                    member.calls,
                    page_bytes=member.pages.geometry.page_bytes,
                    page_tokens=member.key_tokens,
                )
            except sw.StepwellError as error:
                self._says.warn("get_stats of host pool %s: %s", name, error)
        return {
            "rank": self._rank,
            "epoch": self._weights.current,
            "epoch_changes": self._epoch_changes,
            "is_watched": self._weights.is_watched,
            "pools": pools,
        }

    def close(self) -> None:
        """Finish or cancel what runs, and let the directories go. Pages in them stay. Idempotent."""
        if self._following is not None:
            self._following()
            self._following = None
        with self._lock:
            self._is_closed = True
            members, self._members = list(self._members.values()), {}
        if self._exporter is not None:
            self._exporter.close()
        failures: list[sw.StepwellError] = []
        for member in members:
            try:
                member.store.close()
            except sw.StepwellError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    # ---- what the calls are made of --------------------------------------------------------------------------------

    def _kv(self) -> _Member:
        return self._member(_KV)

    def _member(self, name: str) -> _Member:
        """Return a pool's store.

        Raises:
            StepwellUsageError: there is none. StepwellError: it did not follow a change of the weights: whatever it
            holds may be of others.
        """
        found = self._members.get(str(name))
        if found is None:
            raise sw.StepwellUsageError(f"host pool {name} is not registered, or the backend is closed")
        if self._following is None or not self._following.is_current:
            raise sw.StepwellError("the weights are changing, or have changed and this backend did not follow")
        return found

    def _probe(self, member: _Member, keys: npt.NDArray[np.uint8]) -> int:
        adapter = self._settings.adapter
        began = time.monotonic()
        run = member.store.probe(
            keys, lease=adapter.lease, readahead=adapter.read_ahead, within=member.bound.within()
        ).run
        member.calls.note("exists", time.monotonic() - began)
        if member.bound.learns and member.name == _KV and run < len(keys):
            self._cost.missed(keys[run].tobytes())
        return run

    def _deadline(self, member: _Member, count: int) -> float:
        """Return the seconds that a batch of pages may take: SGLang's own patience for as many tokens."""
        patience = member.bound.patience
        return patience.seconds + patience.per_page * count

    def _get(self, member: _Member, keys: list[str], indices: torch.Tensor) -> list[bool]:
        raw = _as_keys(keys)
        slots = member.pages.slots(indices, len(keys))
        if np.unique(slots).size != slots.size:
            raise sw.StepwellUsageError("host indices name a page of the pool twice: it can hold one only")
        if member.lent is None:
            targets = [member.pool.get_dummy_flat_data_page() for _ in keys]
            pages = self._get_flat(member, keys, targets)
            for slot, page in zip(slots.tolist(), pages, strict=True):
                if page is not None:
                    member.pool.set_from_flat_data_page(slot * member.pages.page_tokens, page)
            return [page is not None for page in pages]
        ok = member.load(raw, into=member.lent[slots], deadline=self._deadline(member, len(keys)))
        return ok.tolist()  # type: ignore[no-any-return]

    def _set(
        self, member: _Member, keys: list[str], indices: torch.Tensor, extra: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        raw = _as_keys(keys)
        slots = member.pages.slots(indices, len(keys))
        if member.bound.learns and member.name == _KV:
            self._cost.kept([key.tobytes() for key in raw])
        if member.lent is None:
            at = (slots * member.pages.page_tokens).tolist()
            return self._set_flat(member, keys, [member.pool.get_data_page(index, flat=True) for index in at])
        outcomes = member.save(
            raw,
            source=member.lent[slots],
            deadline=self._settings.adapter.set_timeout,
            **_chain(extra),
        )
        return _is_kept(outcomes)

    def _get_flat(
        self, member: _Member, keys: list[str], targets: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        raw = _as_keys(keys)
        for target in _listed("tensors to fill", targets, len(keys)):
            if target is not None:
                _check_tensor(target, member.pages.geometry.page_bytes)
        found: list[torch.Tensor | None] = [None] * len(keys)
        limit = time.monotonic() + self._deadline(member, len(keys))
        for first, last in _parts(len(keys)):
            with member.read_rows as rows:
                left = max(0.0, limit - time.monotonic())
                ok = member.load(raw[first:last], into=rows.lent[0 : last - first], deadline=left)
                for row in np.flatnonzero(ok).tolist():
                    found[first + row] = _fill(targets[first + row], rows.bytes[row])
            if not ok.all():
                break  # a leading run is all that SGLang uses (cache_controller.py:1140)
        return found

    def _set_flat(self, member: _Member, keys: list[str], pages: Sequence[torch.Tensor | None] | None) -> list[bool]:
        raw, pages = _as_keys(keys), _listed("pages", pages, len(keys))
        for page in pages:
            _check_tensor(page, member.pages.geometry.page_bytes)
        kept: list[bool] = [False] * len(keys)
        for first, last in _parts(len(keys)):
            with member.write_rows as rows:
                for row in range(last - first):
                    rows.bytes[row] = _bytes_of(pages[first + row])
                outcomes = member.save(
                    raw[first:last],
                    source=rows.lent[0 : last - first],
                    deadline=self._settings.adapter.set_timeout,
                )
            kept[first:last] = _is_kept(outcomes)
        return kept

    def _try(self, call: str, otherwise: T, do: Callable[[], T]) -> T:
        """Do a call; where it fails, say so at most once a minute and return a miss.

        What is neither misuse nor the world's failing is a fault of ours, of torch or of a pool: it is said with where
        it was. Raised, it would end, in SGLang's thread, what that thread still had to do.
        """
        try:
            return do()
        except (sw.StepwellError, sw.StepwellUsageError) as error:
            if not self._is_closed:
                self._says.warn("%s: %s", call, error)
        except Exception as error:  # noqa: BLE001 whatever it is, SGLang's thread goes on
            self._says.warn("%s failed, which it must not: %s: %s", call, type(error).__name__, error, error=error)
        return otherwise


@dataclass(frozen=True, slots=True)
class _Member:
    """A host pool and its store.

    lent: the pool's memory, None where pages are only handed out. key_tokens: of the KV page whose hash is a key.
    """

    name: str
    pool: HostPool
    pages: PoolPages
    store: sw.PageStore
    lent: sw.LentPool | None
    bound: LoadBound
    key_tokens: int
    calls: Calls
    read_rows: _Rows
    write_rows: _Rows

    def load(self, keys: npt.NDArray[np.uint8], *, into: sw.PoolSlice, deadline: float) -> npt.NDArray[np.bool_]:
        """Load pages, and note what it took."""
        began, ok = time.monotonic(), None
        try:
            ok = self.store.load_keys(keys, into=into, deadline=deadline)
            return ok
        finally:
            moved = 0 if ok is None else int(np.count_nonzero(ok))
            self.calls.note("get", time.monotonic() - began, pages=len(keys), moved=moved)

    def save(
        self, keys: npt.NDArray[np.uint8], *, source: sw.PoolSlice, deadline: float, **chain: Any
    ) -> npt.NDArray[np.uint8]:
        """Save pages, and note what it took: pages that were here before are not moved."""
        began, outcomes = time.monotonic(), None
        try:
            outcomes = self.store.save_keys(keys, source=source, deadline=deadline, **chain)
            return outcomes
        finally:
            moved = 0 if outcomes is None else int(np.count_nonzero(outcomes == sw.SaveOutcome.STORED))
            self.calls.note("set", time.monotonic() - began, pages=len(keys), moved=moved)


@dataclass
class StepwellMetrics(StorageMetrics):  # type: ignore[misc]
    """What get_stats returns: SGLang's lists since the last call, and a dict of everything (docs/sglang.md)."""

    stepwell: Snapshot = field(default_factory=dict)


class _Rows:
    """Memory for pages on their way between a tensor and a store; a context manager: one user at a time.

    Made when first used: where SGLang copies nothing it never is.
    """

    def __init__(self, pages: PoolPages, store: sw.PageStore) -> None:
        self._pages = pages
        self._store = store
        self._lock = threading.Lock()
        self._made: tuple[npt.NDArray[np.uint8], sw.LentPool] | None = None

    def __enter__(self) -> _Rows:
        self._lock.acquire()
        try:
            if self._made is None:
                rows = np.empty((_MOST_FLAT_PAGES, self._pages.geometry.page_bytes), dtype=np.uint8)
                self._made = (rows, self._store.lend(self._pages.flat(rows)))
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """uint8[16, page_bytes]."""
        assert self._made is not None, "within the block"
        return self._made[0]

    @property
    def lent(self) -> sw.LentPool:
        """The same, lent to the store."""
        assert self._made is not None, "within the block"
        return self._made[1]


class _Says:
    """Log a warning at most once a minute, with how many were kept back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._kept_back = 0

    def warn(self, message: str, *values: object, error: Exception | None = None) -> None:
        """Args: error: what is said with where it was raised."""
        with self._lock:
            if time.monotonic() - self._at < _LOG_SECONDS:
                self._kept_back += 1
                return
            self._at, kept_back, self._kept_back = time.monotonic(), self._kept_back, 0
        message += f" ({kept_back} more since the last line)" if kept_back else ""
        _LOG.warning(message, *values, exc_info=error)


_IO_THREADS: Final = 4
"""They wait more than they compute, and SGLang asks for 128 pages at once. Cold reads of pages of 2 MiB beside plain
files read by 8 threads, two interleaved runs on a busy machine of 2 cores: with 2 threads 2.2 and 3.8 times as fast,
with 4 threads 1.8 and 3.1, with 8 threads 4.2 and 1.6. That is no order above the noise: a page is one request."""
_BATCH_PAGES: Final = 128  # STORAGE_BATCH_SIZE, hicache_storage.py:21
_LEAST_STAGING: Final = 256 << 20
_USUAL_VOLUME: Final = 64 << 20  # of small directories: docs/configuration.md


def _as_keys(keys: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Turn SGLang's page hashes (hex of SHA-256) into keys, uint8[n, 32]; other texts are hashed.

    Raises:
        StepwellUsageError: they are no list of texts.
    """
    if not isinstance(keys, list | tuple):
        raise sw.StepwellUsageError(f"keys: {_kind(keys)}; give a list of texts")
    # Spaces at the joints say that every text has its 64 characters; a look at each would take as long as the rest.
    try:
        text = " ".join(keys)
    except TypeError:
        at = next(at for at, key in enumerate(keys) if not isinstance(key, str))
        raise sw.StepwellUsageError(f"keys: number {at} is {_kind(keys[at])}, not a text") from None
    joints = len(keys) - 1
    is_even = len(text) == _HASH_CHARACTERS * len(keys) + joints
    raw = b""
    if is_even and text[_HASH_CHARACTERS :: _HASH_CHARACTERS + 1] == " " * joints:
        raw = _from_hex(text)
    if len(raw) != 32 * len(keys):
        raw = b"".join(map(_as_key, keys))
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)


def _as_key(key: str) -> bytes:
    """Turn one text into a key, the same whatever it is asked for with."""
    raw = _from_hex(key) if len(key) == _HASH_CHARACTERS else b""
    if len(raw) == 32:
        return raw
    return hashlib.sha256(b"stepwell sglang key\0" + key.encode(errors="surrogatepass")).digest()


def _from_hex(text: str) -> bytes:
    """Read hex digits; spaces are passed over, so they show in the length. Empty: it holds something else."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _chain(extra: HiCacheStorageExtraInfo | None) -> dict[str, Any]:
    """Return what save_keys is told of the page before the first: SGLang passes hashes only where it was asked to.

    None: unknown; empty: there is none (hybrid_cache_controller.py:1432, cache_controller.py:1431-1437).

    Raises:
        StepwellUsageError: they are no list of texts.
    """
    if extra is not None and not isinstance(extra, HiCacheStorageExtraInfo):
        raise sw.StepwellUsageError(f"extra_info: {_kind(extra)}; give a HiCacheStorageExtraInfo")
    prefix = None if extra is None else extra.prefix_keys
    if prefix is None:
        return {}
    if not isinstance(prefix, list | tuple):
        raise sw.StepwellUsageError(f"extra_info.prefix_keys: {_kind(prefix)}; give a list of texts")
    return {"parent": _as_keys(prefix[-1:]).tobytes()} if prefix else {"first_of_chain": True}


def _whole_windows(here: npt.NDArray[np.bool_], window: int) -> npt.NDArray[np.bool_]:
    """Say for each page whether it and those before it, `window` in all or as many as there are, are here."""
    missing = np.concatenate([[0], np.cumsum(~here)])
    ends = np.arange(1, here.size + 1)
    return missing[ends] == missing[np.maximum(0, ends - window)]  # type: ignore[no-any-return]


def _parts(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, _MOST_FLAT_PAGES):
        yield first, min(count, first + _MOST_FLAT_PAGES)


def _is_kept(outcomes: npt.NDArray[np.uint8]) -> list[bool]:
    """Say of each page whether it is here now; what is on its way may still fail."""
    kept = (outcomes == sw.SaveOutcome.STORED) | (outcomes == sw.SaveOutcome.PRESENT)
    return kept.tolist()  # type: ignore[no-any-return]


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _count(keys: object) -> int:
    """Return for how many keys there must be an answer, whatever was given for them."""
    return len(keys) if isinstance(keys, Sized) else 0


def _listed(what: str, given: Sequence[T] | None, count: int) -> Sequence[T]:
    """Check that there is one of something for each key."""
    if not isinstance(given, list | tuple):
        raise sw.StepwellUsageError(f"{count} keys, and {what} {_kind(given)}; give a list")
    if len(given) != count:
        raise sw.StepwellUsageError(f"{count} keys, {len(given)} {what}")
    return given


def _transfers(given: Sequence[PoolTransfer] | None) -> Sequence[PoolTransfer]:
    """Check that they are transfers of pools; None: there is none."""
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise sw.StepwellUsageError(f"transfers: {_kind(given)}; give a list of PoolTransfer")
    for at, each in enumerate(given):
        if not isinstance(each, PoolTransfer):
            raise sw.StepwellUsageError(f"transfers: number {at} is {_kind(each)}, not a PoolTransfer")
        if not isinstance(each.name, str):
            raise sw.StepwellUsageError(f"transfers: the name of number {at} is {_kind(each.name)}, not a PoolName")
        if each.keys is not None and not isinstance(each.keys, list | tuple):
            raise sw.StepwellUsageError(f"transfers: the keys of pool {each.name} are {_kind(each.keys)}, not a list")
    return given


def _check_tensor(page: object, page_bytes: int) -> None:
    if not isinstance(page, torch.Tensor):
        raise sw.StepwellUsageError(f"a page {_kind(page)} was given; give a tensor")
    nbytes = page.numel() * page.element_size()
    if nbytes != page_bytes:
        raise sw.StepwellUsageError(f"a tensor of {nbytes} bytes was given for a page of {page_bytes}")


def _bytes_of(page: torch.Tensor) -> npt.NDArray[np.uint8]:
    try:
        return page.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError) as error:  # torch: sparse, or on a device without bytes
        raise sw.StepwellUsageError(f"a tensor of dtype {page.dtype} cannot be read: {error}") from error


def _fill(target: torch.Tensor | None, row: npt.NDArray[np.uint8]) -> torch.Tensor:
    if target is None:
        return torch.from_numpy(row.copy())
    try:
        target.copy_(torch.from_numpy(row).view(target.dtype).reshape(target.shape))
    except (TypeError, RuntimeError) as error:  # torch: sparse, one that autograd watches, memory that overlaps
        raise sw.StepwellUsageError(f"a tensor of dtype {target.dtype} cannot be filled: {error}") from error
    return target


def _host_memory_mode() -> str:
    """Return SGLang's `--hicache-host-memory-mode`; its default where it cannot be read."""
    try:
        from sglang.srt.runtime_context import get_memory

        return str(get_memory().hicache_host_memory_mode)
    except (ImportError, AttributeError, ValueError):
        return "cache"


def _prefetch_timeout() -> Timeout:
    """Return SGLang's prefetch timeout for the backend that is being made.

    It is taken out of what the backend sees (hybrid_cache_controller.py:404-413). Where the plug-in is, it has seen it;
    else it is that of the start: one that is given at run time, over HTTP, is not seen.
    """
    seen = last_timeout().seconds
    if seen is not None:
        return seen
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.runtime_context import get_server_args

        given = get_server_args().hicache_storage_backend_extra_config
        _, _, base, per_ki_token, _ = HybridCacheController.parse_storage_backend_extra_config(given)
    except (ImportError, AttributeError, ValueError, TypeError, OSError):
        return DEFAULT_TIMEOUT
    return float(base), float(per_ki_token)
