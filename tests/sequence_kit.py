"""What the tests of sequences share: a store with a tiny device pool, and an engine that writes stamps where a model
writes KV.

The KV of a token is a stamp: a function of the namespace, of every token up to it, of layer, stream, head and
dimension. So each page that is read back on the device says whether it is the right one, wherever it has been.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from device_kit import STACKED, Pages, cut, join, read_slots, write_slots
from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.hashing import Namespace
from stepwell.index import Tier
from stepwell.sequence import Sequence
from stepwell.store import PageStore
from stepwell.testing.stepped import SteppedStore
from stepwell.tiers.device_pool import LinearPool
from stepwell.tiers.device_queue import Result, ResultReadiness
from store_kit import Directories

PAGE_TOKENS = 4
LAYERS, HEADS, DIM = 2, 2, 4
GEOMETRY = PageGeometry(
    model="stamped", revision="s", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32", page_tokens=PAGE_TOKENS
)
PAGE_BYTES = GEOMETRY.page_bytes
HOST_SLOT_BYTES = 4096
VOLUME_BYTES = 128 * 1024  # 64 pages
WRITE_PAGES = 8  # the shapes of the two programs
READ_PAGES = 32

Tokens = npt.NDArray[np.int32]
Values = npt.NDArray[np.float32]


def prompt(number: int, tokens: int) -> Tokens:
    """Return tokens that no other number has."""
    return np.arange(tokens, dtype=np.int32) + number * 100_000


def stamps(tokens: Tokens, seed: bytes | None = None) -> Values:
    """Return the KV of some tokens, by page: float32[pages, layers, streams, page_tokens, heads, dim]; zero past the
    last token."""
    pages = -(-tokens.size // PAGE_TOKENS)
    out = np.zeros((pages, LAYERS, 2, PAGE_TOKENS, HEADS, DIM), np.float32)
    chain = hashlib.sha256(seed or b"")
    for position, token in enumerate(tokens.tolist()):
        chain.update(int(token).to_bytes(4, "little"))
        words = np.frombuffer(hashlib.shake_128(chain.digest()).digest(4 * LAYERS * 2 * HEADS * DIM), np.uint32)
        values = (words >> 8).astype(np.float32).reshape(LAYERS, 2, HEADS, DIM)  # exact: 24 bits
        out[position // PAGE_TOKENS, :, :, position % PAGE_TOKENS] = values
    return out


def bytes_of(pages: Values) -> Pages:
    """Return pages, float32[n, ...] in canonical order, as rows of bytes."""
    return np.ascontiguousarray(pages).reshape(len(pages), -1).view(np.uint8)


class StepFailedError(Exception):
    """What a failing step raises."""


class SteppedJaxStore(SteppedStore):
    """A stepped store with the arrays of a real one."""

    def _make_pool(self, device: DeviceTier) -> LinearPool[Any]:
        return PageStore._make_pool(self, device)


class StampEngine:
    """An engine: opens, waits, extends, computes stamps, publishes; and reads back what the device holds."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.scratch = store.device.scratch_slot
        pool = store.device.pool_for_testing()
        self.geometry, self.axes = pool.geometry, " ".join(pool.arrangement.axes)
        self.slot_axis = pool.arrangement.axes.index("slot")

    # ---- whole requests ----------------------------------------------------------------------------------------------

    def open(self, tokens: Tokens, **how: Any) -> Sequence:
        """Open a sequence; what the four numbers say must add up."""
        sequence = self.store.open(tokens, **how)
        assert_adds_up(sequence)
        return sequence

    def settle(self, sequence: Sequence, *, pending: bool = True, rounds: int = 200) -> None:
        """Wait until nothing of a sequence is under way, or until it is stalled."""
        for _ in range(rounds):
            assert_adds_up(sequence)
            if sequence.stalled or not (sequence.loading or (pending and sequence.pending)):
                return
            assert self.store.quiesce(30.0)
            self.store.device.drain()
            sequence.promote()
        raise AssertionError(f"{sequence!r} does not settle")

    def serve(self, tokens: Tokens, **how: Any) -> Sequence:
        """Open, load, compute and publish all of a prompt; the sequence stays open."""
        sequence = self.open(tokens, **how)
        self.settle(sequence)
        self.finish(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> tuple[int, int]:
        """Compute and publish what a settled sequence lacks."""
        total = sequence.tokens.size
        extended = self.store.extend([sequence], [total])
        assert extended.ok.all(), extended.full
        self.compute({sequence: total})
        return self.store.publish([sequence], [total])

    def cache(self, tokens: Tokens, **how: Any) -> None:
        """Serve a prompt, write it through, and end it."""
        self.serve(tokens, **how).close()
        self.land()

    def land(self) -> None:
        """Do what is left to do for published pages."""
        self.store.device.drain()
        assert self.store.flush(30.0)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def compute(self, upto: Mapping[Sequence, int], *, fail: bool = False) -> None:
        """Write the KV of tokens [ready, upto) of some sequences, in one step."""
        slots, pages = [], []
        for sequence, tokens in upto.items():
            first = sequence.ready // PAGE_TOKENS
            rows = stamps(sequence.tokens[:tokens], sequence._seed)[first:]
            pages.extend(rows)
            slots.extend(self.block(sequence)[first : first + len(rows)].tolist())
        self.write(slots, pages, fail=fail)

    def write(self, slots: Seq[int], pages: Seq[Values], *, fail: bool = False) -> None:
        """Write whole pages into slots, in one step."""
        with self.store.device.step() as pool:
            for at in range(0, len(slots), WRITE_PAGES):
                padding = WRITE_PAGES - len(slots[at : at + WRITE_PAGES])
                targets = np.array([*slots[at : at + WRITE_PAGES], *[self.scratch] * padding], np.int32)
                values = np.stack([*pages[at : at + WRITE_PAGES], *[np.zeros_like(pages[0])] * padding])
                pieces = cut(self.geometry, self.axes, bytes_of(values), self.store.device.dtype)
                pool.arrays = write_slots(pool.arrays, targets, pieces, self.slot_axis)
            if fail:
                raise StepFailedError("the engine failed")

    def block(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """Return a sequence's block table; the rest is the scratch slot."""
        out = np.full((1, READ_PAGES), -1, np.int32)
        self.store.block_tables([sequence], out)
        return out[0]

    def read(self, slots: Seq[int]) -> Values:
        """Read slots of the device in a step of its own."""
        padded = np.full(READ_PAGES, self.scratch, np.int32)
        padded[: len(slots)] = slots
        with self.store.device.step() as pool:
            arrays = [np.asarray(array) for array in read_slots(pool.arrays, padded, self.slot_axis)]
        pages = join(self.geometry, self.axes, arrays)[: len(slots)].view(np.float32)
        is_even = self.geometry.layer_head_dims is None
        return pages.reshape(-1, *(LAYERS, 2, PAGE_TOKENS, HEADS, DIM)) if is_even else pages

    def verify(self, sequence: Sequence, tokens: int | None = None) -> None:
        """Compare the first tokens of a sequence on the device with their stamps; those that are ready where not
        told."""
        count = sequence.ready if tokens is None else tokens
        expected = stamps(sequence.tokens[:count], sequence._seed)
        slots = self.block(sequence)[: len(expected)].tolist()
        assert self.scratch not in slots
        found = self.read(slots)
        partial_tokens = count % PAGE_TOKENS
        if partial_tokens:
            found[-1, :, :, partial_tokens:] = 0
        wrong = np.flatnonzero((found != expected).any(axis=(1, 2, 3, 4, 5)))
        assert wrong.size == 0, f"pages {wrong.tolist()} of {sequence!r} hold wrong bytes"


def assert_adds_up(sequence: Sequence) -> None:
    """The four numbers say where each token is, and one token at least is left to compute before it computes."""
    parts = (sequence.ready, sequence.loading, sequence.pending, sequence.missing)
    assert all(part >= 0 for part in parts), parts
    assert sum(parts) == sequence.tokens.size, (parts, sequence.tokens.size)


def config(
    directories: Directories,
    *,
    device: int = 16,
    host: int = 16,
    shared: int = 2,
    disk: int = 0,
    step_bytes: int = 1 << 20,
    axes: str = STACKED,
    geometry: PageGeometry = GEOMETRY,
    **others: Any,
) -> StoreConfig:
    """Configure a store: device and host in pages, shared and disk in volumes."""
    return StoreConfig(
        geometry=geometry,
        device=DeviceTier(pages=device, step_bytes=step_bytes, axes=axes),
        host=host * HOST_SLOT_BYTES,
        shared=SharedTier(shared * VOLUME_BYTES, str(directories.shared), volume_bytes=VOLUME_BYTES)
        if shared
        else None,
        disk=DiskTier(disk * VOLUME_BYTES, str(directories.disk), volume_bytes=VOLUME_BYTES) if disk else None,
        **others,
    )


def evict_all(store: PageStore, *tiers: Tier) -> None:
    """Empty some tiers; nothing in them may be pinned."""
    for tier in tiers:
        store.evict(tier, 1 << 20)
        assert store.stats().tiers[tier.name.lower()].resident == 0


def assert_all_returned(store: PageStore) -> None:
    """Nothing is held: no lease, no claim, no pin, no private slot; each tier can be emptied. Ends the keeper."""
    assert store._keeper is not None
    store._keeper.stop()  # else it may be about to give back the slots of what it has evicted
    store.device.drain()
    assert store.flush(30.0)
    store.device.drain()  # slots of a lost pool that were pinned until now
    assert store.check() == ""
    stats = store.stats()
    assert stats.leases == 0
    for name, tier in stats.tiers.items():
        assert (tier.pinned, tier.arriving, tier.leaving) == (0, 0, 0), (name, tier)
    evict_all(store, Tier.DEVICE)
    device = store.stats().tiers["device"]
    assert device.free + device.quarantined == device.capacity
    assert device.quarantined == 0
    assert store.check() == ""


def namespaces() -> list[Namespace | None]:
    """Return some namespaces that must not meet."""
    return [None, Namespace(adapter="a"), Namespace(salt="a")]


def flip_bit(directory: Path, page: Values, *, must: bool = True) -> None:
    """Change one bit of a page where a tier keeps it, behind the tier's back. must: it is kept there."""
    needle = page.tobytes()
    for path in filter(Path.is_file, sorted(directory.glob("v-*"))):
        at = path.read_bytes().find(needle)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([needle[100] ^ 1]))
            return
    assert not must, f"no file of {directory} holds the page"


def damage_host(store: PageStore, page: Values, *, must: bool = True) -> None:
    """Change one bit of a page where host memory keeps it. must: it is kept there."""
    rows = store._tiers[Tier.HOST].medium.view()  # type: ignore[attr-defined]
    found = np.flatnonzero((rows[:, :PAGE_BYTES] == bytes_of(page[None])).all(axis=1))
    rows[found, 100] ^= 1
    assert found.size or not must, "host memory does not hold the page"


class GatherGate(ResultReadiness):
    """Hold the results of gathers back until opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    @classmethod
    def of(cls, store: PageStore) -> GatherGate:
        """Put a closed gate before the gathers of a store."""
        gate = cls()
        store.device.pool_for_testing()._queue.readiness = gate
        return gate

    def open(self) -> None:
        self._opened.set()

    def wait(self, result: Result) -> None:
        assert self._opened.wait(30.0)
        super().wait(result)


MakeEngine = Callable[..., StampEngine]


@contextmanager
def engines(directories: Directories, axes: str = STACKED) -> Iterator[MakeEngine]:
    """Open stores with an engine each: `make(device=, host=, shared=, disk=, axes=)`. Afterwards each must give
    everything back."""
    opened: list[PageStore] = []

    def make(**sizes: Any) -> StampEngine:
        store = PageStore(config(directories, **{"axes": axes, **sizes}))
        opened.append(store)
        return StampEngine(store)

    try:
        yield make
        for store in opened:
            if not store.closed:
                for sequence in store._sequences._each_open():
                    sequence.close()
                if store.device.is_reset:
                    store.device.renew()
                assert_all_returned(store)
    finally:
        for store in opened:
            store.close()
