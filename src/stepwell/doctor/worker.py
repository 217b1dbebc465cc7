"""Be one process of the doctor's round: `python -m stepwell.doctor.worker ACT SPEC`, one JSON line on standard output.

    write   save pages, drop some from shared memory, say so, wait to be killed
    read    open what the dead left, read it back from shared memory, then from disk, compare every byte
    host    save, drop, save again, read back, within this process: host memory goes with it
    device  put pages on the device, write them through, drop them there, bring them back (loads jax)

Ends when standard input does: whoever asked is gone then.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell.config import DeviceTier, DiskTier, SharedTier, StoreConfig
from stepwell.geometry import PageGeometry
from stepwell.index import Tier
from stepwell.store import PageStore

PAGE_TOKENS: Final = 16
SPARE_PAGES: Final = 2
"""Slots beyond the pages: a tier without a free slot is evicted in the background, and the round counts its pages."""
PATIENCE: Final = 30.0  # seconds for anything that should take milliseconds
Rows = npt.NDArray[np.uint8]


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to do it with. shared, disk: directories of the round's own, None: without. Sizes in bytes."""

    pages: int
    page_bytes: int
    shared: str | None = None
    disk: str | None = None
    volume_bytes: int = 0
    direct_io: bool = True
    durability: Literal["process", "power"] = "process"
    copy_threads: int = 1
    io_threads: int = 1


class ActFailedError(Exception):
    """Something is not as it must be."""


def contents(pages: int, page_bytes: int) -> Rows:
    """Return the bytes of the round's pages: each a stream of its own, the same in every process."""
    rows = np.empty((pages, page_bytes), np.uint8)
    for number in range(pages):
        rows[number] = np.frombuffer(hashlib.shake_128(b"page %d" % number).digest(page_bytes), np.uint8)
    return rows


def tokens_of(pages: int) -> npt.NDArray[np.int32]:
    """Return the tokens of the round's pages."""
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32)


def config_of(spec: Spec, *, host: bool = False) -> StoreConfig:
    """Return a configuration whose directories are the round's own."""
    size = spec.volume_bytes
    return StoreConfig(
        geometry=PageGeometry.opaque(
            spec.page_bytes, page_tokens=PAGE_TOKENS, fingerprint={"model": "stepwell doctor"}
        ),
        host=(spec.pages + SPARE_PAGES) * (-(-spec.page_bytes // 4096) * 4096) if host else None,
        shared=SharedTier(size, spec.shared, volume_bytes=size) if spec.shared else None,
        disk=DiskTier(
            size, spec.disk, volume_bytes=size, direct_io=spec.direct_io, durability=spec.durability
        )
        if spec.disk
        else None,
        copy_threads=spec.copy_threads,
        io_threads=spec.io_threads,
    )


def require(holds: bool, what: str) -> None:
    """Fail the act unless something holds."""
    if not holds:
        raise ActFailedError(what)


def save_all(store: PageStore, rows: Rows) -> float:
    """Save the round's pages; return the seconds that it took."""
    pool = store.lend(rows)
    began = time.perf_counter()
    result = store.save(tokens_of(len(rows)), source=pool[:])
    require(result.transfer.wait(PATIENCE), f"saving was not done within {PATIENCE} s")
    took = time.perf_counter() - began
    require(result.saved == len(rows), f"{result.saved} of {len(rows)} pages were saved: {result.full or result}")
    require(bool(result.transfer.ok.all()), f"{int((~result.transfer.ok).sum())} pages were not written")
    return took


def load_and_compare(store: PageStore, tier: Tier, expected: Rows) -> dict[str, float]:
    """Load the first pages, all of which must come from one tier, and compare every byte.

    A page that is bad there and comes from another tier is right for an engine, and fails the act all the same.
    """
    rescued = store.stats().rescued_pages
    found = np.full_like(expected, 0xEE)
    pool = store.lend(found)
    with store.match(tokens_of(len(expected))) as match:
        at = {name.name.lower(): pages for name, pages in match.tiers.items()}
        require(match.tiers == {tier: len(expected)}, f"of {len(expected)} pages, found {at or 'none'}")
        began = time.perf_counter()
        transfer = store.load(match, into=pool[:])
        require(transfer.wait(PATIENCE), f"loading was not done within {PATIENCE} s")
        took = time.perf_counter() - began
    bad = int((~transfer.ok).sum()) + store.stats().rescued_pages - rescued
    require(bad == 0, f"{bad} of {len(expected)} pages could not be read")
    require(np.array_equal(found, expected), "the bytes read are not the bytes written")
    return {"bytes": float(expected.nbytes), "seconds": took}


def write(spec: Spec) -> dict[str, Any]:
    """Save pages, and leave the first half of them in shared memory alone with the disk's copies of all."""
    store = PageStore(config_of(spec))
    rows = contents(spec.pages, spec.page_bytes)
    seconds = save_all(store, rows)
    evicted = 0
    if spec.shared and spec.disk:
        evicted = store.evict(Tier.SHARED, spec.pages // 2)
        require(evicted == spec.pages // 2, f"{evicted} of {spec.pages // 2} pages left shared memory")
    say({"bytes": rows.nbytes, "seconds": seconds, "evicted": evicted})
    sys.stdin.read()  # killed here; or the doctor is gone
    return {}


def read(spec: Spec) -> dict[str, Any]:
    """Read back what a killed process left, from each tier in turn."""
    told: dict[str, Any] = {}
    began = time.perf_counter()
    with PageStore(config_of(spec)) as store:
        told["opened"] = time.perf_counter() - began
        rows = contents(spec.pages, spec.page_bytes)
        if spec.shared:
            kept = spec.pages - (spec.pages // 2 if spec.disk else 0)
            told["shared"] = load_and_compare(store, Tier.SHARED, rows[:kept])
            store.evict(Tier.SHARED, spec.pages)
        if spec.disk:
            told["disk"] = load_and_compare(store, Tier.DISK, rows)
        else:
            with store.match(tokens_of(spec.pages)) as match:
                require(match.pages == 0, f"{match.pages} pages were found that had been evicted")
    return told


def host(spec: Spec) -> dict[str, Any]:
    """Save to host memory, drop, save again, read back."""
    with PageStore(config_of(spec, host=True)) as store:
        rows = contents(spec.pages, spec.page_bytes)
        save_all(store, rows)
        require(store.evict(Tier.HOST, spec.pages) == spec.pages, "pages did not leave host memory")
        save_all(store, rows)
        return {"host": load_and_compare(store, Tier.HOST, rows)}


def device(spec: Spec) -> dict[str, Any]:
    """Put pages on the device and through to the tier below (host memory where there is no other), drop them, bring
    them back, compare."""
    geometry = PageGeometry(
        model="stepwell doctor", revision="1", layers=2, kv_heads=2, head_dim=32, dtype="float32",
        page_tokens=PAGE_TOKENS,
    )  # fmt: skip
    pages, tokens = spec.pages, np.arange(spec.pages * PAGE_TOKENS + 1, dtype=np.int32)
    host_bytes = 2 * pages * (-(-geometry.page_bytes // 4096) * 4096)
    below = config_of(spec)
    target = Tier.SHARED if below.shared else Tier.DISK if below.disk else Tier.HOST
    config = StoreConfig(
        geometry=geometry, device=DeviceTier(pages=pages + 2), host=host_bytes, shared=below.shared, disk=below.disk
    )
    shape = (geometry.layers, pages, PAGE_TOKENS, geometry.kv_heads, geometry.head_dim)
    streams = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + at for at in range(geometry.streams)]
    with PageStore(config) as store:

        def slots_of(sequence: Any) -> npt.NDArray[np.int32]:
            table = np.full((1, pages + 1), -1, np.int32)
            store.block_tables([sequence], table)
            return table[0, :pages]

        sequence = store.open(tokens)
        extended = store.extend([sequence], [tokens.size])
        require(bool(extended.ok.all()), f"no pages on the device: {extended.full}")
        slots = slots_of(sequence)
        with store.device.step() as pool:
            pool.arrays = tuple(
                array.at[:, slots].set(values) for array, values in zip(pool.arrays, streams, strict=True)
            )
        store.publish([sequence], [tokens.size])
        sequence.close()
        settle(store, lambda: store.stats().tiers[target.name.lower()].resident >= pages)
        if target != Tier.HOST:
            store.evict(Tier.HOST, 2 * pages)
        dropped = store.evict(Tier.DEVICE, pages + 2)
        require(dropped == pages, f"{dropped} of {pages} pages left the device")
        began = time.perf_counter()
        sequence = store.open(tokens)

        def is_back() -> bool:
            sequence.promote()
            return sequence.loading == 0

        settle(store, is_back)
        require(sequence.ready == pages * PAGE_TOKENS, f"{sequence.ready} of {pages * PAGE_TOKENS} tokens came back")
        slots = slots_of(sequence)
        with store.device.step() as pool:
            found = [np.asarray(array[:, slots]).astype(np.float32) for array in pool.arrays]
            backend = ", ".join(sorted({one.platform for one in pool.arrays[0].devices()}))
        took = time.perf_counter() - began
        same = all(np.array_equal(one, other) for one, other in zip(found, streams, strict=True))
        require(same, "the values read from the device are not those written")
        sequence.close()
    return {"device": {"bytes": float(pages * geometry.page_bytes), "seconds": took}, "backend": backend}


def settle(store: PageStore, is_done: Callable[[], bool]) -> None:
    """Do the store's half of steps until something holds."""
    for _ in range(200):
        require(store.quiesce(PATIENCE), f"transfers were not done within {PATIENCE} s")
        store.device.drain()
        if is_done():
            return
    raise ActFailedError(f"pages do not arrive: {store.stats()}")


def say(told: dict[str, Any]) -> None:
    """Print one line at once."""
    print(json.dumps(told), flush=True)


def main(act: str, text: str) -> int:
    """Do one act and say how it went."""
    spec = msgspec.json.decode(text, type=Spec)
    acts: dict[str, Callable[[Spec], dict[str, Any]]] = {"write": write, "read": read, "host": host, "device": device}
    try:
        told = acts[act](spec)
    except ActFailedError as error:
        say({"error": str(error)})
        return 1
    except Exception as error:  # noqa: BLE001  (whatever it is, the doctor tells it)
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    say(told)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
