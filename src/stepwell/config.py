"""Hold the configuration of a store: its schema, and what must hold of its values.

Sizes are bytes: an int, or a string such as "8GiB" or "512 MiB" (binary units; "GB" is 10^9). Times are seconds.
Every value is checked once, when the store opens.
"""

from __future__ import annotations

import decimal
import os
import re
from typing import Literal

import msgspec

from stepwell.arrangement import STACKED, Arrangement
from stepwell.errors import BudgetError, StepwellUsageError
from stepwell.geometry import PageGeometry
from stepwell.hashing import epoch_number

MIB = 1 << 20
GIB = 1 << 30
MAX_SIZE = (1 << 63) - 1  # of a file, to the kernel

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

Size = int | str

_SLOT_ALIGNMENT = 4096  # of host slots
_MOST_DEVICE_PAGES = (1 << 31) - 2
"""Slots on a device are int32 in block tables and on the device itself; one more is the scratch slot."""


def parse_size(value: Size, *, name: str = "size") -> int:
    """Turn a size into bytes.

    Args:
        value: bytes, or a number with a unit: "64MiB", "1.5 GiB", "200GB".
        name: what the size is of; for the message.

    Raises:
        StepwellUsageError: not a size, negative, or more than a file can have.
    """
    size = _read_size(value, name)
    if not 0 <= size <= MAX_SIZE:
        shown = f"{size} bytes is negative" if size < 0 else f"more than {MAX_SIZE} bytes is more than a file can have"
        raise StepwellUsageError(f"{name}: {shown}; give 0 or more, below 8 EiB")
    return size


def _read_size(value: Size, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise StepwellUsageError(f"{name}: {value!r} is not a size; give bytes or e.g. '8GiB'")
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value)
    if found is None or found[2].lower() not in _UNITS:
        raise StepwellUsageError(f"{name}: {value!r} is not a size; give bytes or e.g. '8GiB'")
    return int(decimal.Decimal(found[1]) * _UNITS[found[2].lower()])  # exact, where a float is not


def show_bytes(nbytes: int) -> str:
    """Return a number of bytes for a message: exact, and where there are many in GiB too."""
    return f"{nbytes} bytes ({nbytes / GIB:,.1f} GiB)" if nbytes >= GIB else f"{nbytes} bytes"


class DeviceTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for a device tier that stepwell manages: a pool of JAX arrays.

    pages: slots of the pool; the arrays have one more, the scratch slot. step_bytes: how much one step() may scatter
    and gather at most. axes: of each array, in order, out of `layer stream slot token head dim`. slot, token, head and
    dim are needed; what is not named of layer and stream is what the arrays of the tuple stand for, layer by layer:

        "layer slot token head dim"    (keys, values), each [layers, pages + 1, page_tokens, kv_heads, dim]
        "stream slot token head dim"   one a layer: [streams, pages + 1, page_tokens, kv_heads, dim]
        "slot token head stream dim"   one a layer, a head's value beside its key
        "head slot token dim"          one a layer and stream: (k0, v0, k1, v1, ...)

    Layers of different sizes need axes without layer. The dtype is the geometry's, on CPU an unsigned integer as wide
    where that is a float narrower than 32 bits (`store.device.shapes` and `.dtype` say so exactly).
    """

    pages: int
    step_bytes: Size = 64 * MIB
    axes: str = STACKED


class HostTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for host memory: private to the process, lost with it. capacity: bytes."""

    capacity: Size


class SharedTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for a shared-memory tier: volumes in a tmpfs directory, alive past the process.

    capacity: bytes that the directory may hold in all, whoever put them there; this process adds nothing past it.
    path: the directory; made if missing, 0700. volume_bytes: size of a volume (default capacity / 32, between
    64 MiB and 4 GiB, at most the capacity). share: bytes this process may claim back from neighbours that have more
    than their own share (default capacity / 8, at least one volume).
    """

    capacity: Size
    path: str = "/dev/shm/stepwell"
    volume_bytes: Size | None = None
    share: Size | None = None


class DiskTier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for a tier on a local disk. Fields as in SharedTier; direct_io: O_DIRECT where the file system has it.

    write: "through": a save goes to disk as well as to shared memory. "selective": only a page that is used a second
    time does, from shared memory, in the background; so prompts that come once do not wear the disk. A use is a lookup
    that finds the page, or a save of one that has left shared memory; this process alone remembers it. Until then a
    page is in shared memory only, and lost with it. Needs a shared tier, and a large one: on a trace of conversations
    a quarter of the pages were written; hits fell from 36.0 to 31.4 % of what was asked for with shared memory for a
    tenth of the distinct pages, from 36.6 to 35.6 % with a quarter (benchmarks/results/selective.json).

    durability: what a page survives once a save's transfer says that it is on disk (`transfer.landed(Tier.DISK)`).
    "process": the end of the process, however it ends; a kernel crash or power loss takes what the kernel had not
    written yet. "power": those too: the transfer is done only when bytes and record are on the medium, with two or
    three syncs for all pages that wait at the time. Either way what comes back is verified before it is served. What
    was evicted or forgotten shortly before a power loss may be found again.
    """

    capacity: Size
    path: str
    volume_bytes: Size | None = None
    share: Size | None = None
    direct_io: bool = True
    write: Literal["through", "selective"] = "through"
    durability: Literal["process", "power"] = "process"


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hold everything a store is opened with.

    geometry: what a page's bytes are. epoch: of the weights; an int or any string. host: bytes or a HostTier.
    copy_threads, io_threads: workers (small on purpose; 2 cores may be all there is). queue_units: bound of each work
    queue.
    low_watermark, high_watermark: a tier with less than `low` of its
    slots free is evicted up to `high`, in the background. close_timeout: seconds that close() gives running transfers.
    staging: host memory for neighbours' pages in a store that has shared or disk and no host tier (with one, that is
    it): default a sixteenth of the larger of the two, at most 1 GiB, and a quarter of what the machine has left; taken
    as it is used, once a neighbour is there. 0: neighbours' pages are not read, with a host tier either.
    pin_fraction: how much of the smallest tier that pins keep pages in (shared, disk; else host) pin() may take,
    once it has grown to its capacity; and never more than three quarters of what there is.
    """

    geometry: PageGeometry
    device: DeviceTier | None = None
    host: HostTier | Size | None = None
    shared: SharedTier | None = None
    disk: DiskTier | None = None
    epoch: int | str = 0
    copy_threads: int = 1
    io_threads: int = 2
    queue_units: int = 4096
    low_watermark: float = 0.02
    high_watermark: float = 0.05
    close_timeout: float = 10.0
    staging: Size | None = None
    pin_fraction: float = 0.25

    def checked(self) -> StoreConfig:
        """Return this configuration once everything in it holds.

        Raises:
            StepwellUsageError: a value out of range; GeometryError: device axes that do not fit the geometry;
            BudgetError: a capacity that can hold nothing.
        """
        for name, given, wanted in (
            ("geometry", self.geometry, PageGeometry),
            ("device", self.device, DeviceTier),
            ("shared", self.shared, SharedTier),
            ("disk", self.disk, DiskTier),
        ):
            if given is not None and not isinstance(given, wanted):
                raise StepwellUsageError(f"{name}: {given!r} is no {wanted.__name__}; give {wanted.__name__}(...)")
        if all(tier is None for tier in (self.device, self.host, self.shared, self.disk)):
            raise StepwellUsageError("no tier: give at least one of device, host, shared, disk")
        if self.device is not None:
            pages = self.device.pages
            if isinstance(pages, bool) or not isinstance(pages, int):
                raise StepwellUsageError(f"device.pages: {pages!r} is not an int")
            if not 1 <= pages <= _MOST_DEVICE_PAGES:
                raise BudgetError(f"device: {pages} pages; give at least 1, at most {_MOST_DEVICE_PAGES}")
            Arrangement.of(self.geometry, self.device.axes)
        if self.device is not None and self.host is None:
            raise StepwellUsageError(
                "device: pages are staged through host memory on their way to the device; give host, e.g. '256MiB'"
            )
        for name, path in (("shared", self.shared and self.shared.path), ("disk", self.disk and self.disk.path)):
            if path is not None and not path:
                raise StepwellUsageError(f"{name}.path: {path!r} is empty; name a directory")
            if path is not None and "\0" in path:
                raise StepwellUsageError(f"{name}.path: {path!r} has a NUL, which no name has; name a directory")
        if self.shared is not None and self.disk is not None and _same(self.shared.path, self.disk.path):
            raise StepwellUsageError(
                f"shared.path, disk.path: both are {self.disk.path}; give each a directory of its own"
            )
        if self.disk is not None and self.disk.write not in ("through", "selective"):
            raise StepwellUsageError(f"disk.write: {self.disk.write!r} is neither 'through' nor 'selective'")
        if self.disk is not None and self.disk.durability not in ("process", "power"):
            raise StepwellUsageError(f"disk.durability: {self.disk.durability!r} is neither 'process' nor 'power'")
        if self.disk is not None and self.disk.write == "selective" and self.shared is None:
            raise StepwellUsageError(
                "disk.write: 'selective' keeps a page in shared memory until it is used a second time; give shared, "
                "e.g. SharedTier('4GiB'), or write='through'"
            )
        epoch_number(self.epoch)
        page = self.geometry.page_bytes
        for name, capacity in (
            ("host", self.host_bytes()),
            ("shared", _capacity(self.shared, "shared")),
            ("disk", _capacity(self.disk, "disk")),
        ):
            if capacity is not None and capacity < page:
                raise BudgetError(
                    f"{name}: capacity {capacity} bytes is less than one page of {page} bytes; raise {name}.capacity"
                )
        staging = None if self.staging is None else parse_size(self.staging, name="staging")
        if staging and self.host is not None:
            raise StepwellUsageError(
                f"staging: {staging} bytes beside a host tier; neighbours' pages come to that one: leave staging out, "
                "or give 0 to read none"
            )
        if staging and staging < page:
            raise BudgetError(
                f"staging: {staging} bytes is less than one page of {page} bytes; raise staging, or give 0 to read no "
                "neighbour's page"
            )
        for name, tier in (("shared", self.shared), ("disk", self.disk)):
            if tier is not None:
                volume_bytes(tier, name=name)
                floor_bytes(tier, name=name)
        for name, low, value, high in (
            ("copy_threads", 1, self.copy_threads, 256),
            ("io_threads", 1, self.io_threads, 256),
            ("queue_units", 16, self.queue_units, 1 << 20),
        ):
            if not isinstance(value, int) or not low <= value <= high:
                raise StepwellUsageError(f"{name}: {value!r} is not an int within {low}..{high}")
        if not 0.0 <= self.low_watermark <= self.high_watermark <= 0.5:
            raise StepwellUsageError(
                f"watermarks: low_watermark {self.low_watermark}, high_watermark {self.high_watermark}; "
                "give 0 <= low <= high <= 0.5"
            )
        if not 0.0 <= self.pin_fraction <= 0.9:
            raise StepwellUsageError(
                f"pin_fraction: {self.pin_fraction} is not within 0..0.9; a tier full of pins could take no page more"
            )
        if not self.close_timeout >= 0:  # nor is NaN
            raise StepwellUsageError(f"close_timeout: {self.close_timeout} s is negative or no number; give 0 or more")
        return self

    def staging_bytes(self) -> int | None:
        """Return the bytes of private memory for neighbours' pages beside the host tier, None where none are read.

        0: the host tier is what they come to.
        """
        if self.staging is not None and parse_size(self.staging, name="staging") == 0:
            return None
        tiers = [_capacity(self.shared, "shared"), _capacity(self.disk, "disk")]
        largest = max((capacity for capacity in tiers if capacity is not None), default=0)
        if largest == 0:
            return None
        if self.host is not None:
            return 0
        if self.staging is not None:
            return parse_size(self.staging, name="staging")
        slot = -(-self.geometry.page_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        return max(slot, min(GIB, largest // 16))

    def host_bytes(self) -> int | None:
        """Return the host capacity in bytes, None without a host tier."""
        if self.host is None:
            return None
        capacity = self.host.capacity if isinstance(self.host, HostTier) else self.host
        return parse_size(capacity, name="host.capacity")


def _same(one: str, other: str) -> bool:
    """Whether two paths are one directory, however they are spelt."""
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))


def _capacity(tier: SharedTier | DiskTier | None, name: str) -> int | None:
    return None if tier is None else parse_size(tier.capacity, name=f"{name}.capacity")


def volume_bytes(tier: SharedTier | DiskTier, *, name: str) -> int:
    """Return the size of a volume of this tier, bytes."""
    capacity = parse_size(tier.capacity, name=f"{name}.capacity")
    if tier.volume_bytes is None:
        return min(capacity, max(64 * MIB, min(4 * GIB, capacity // 32)))
    size = parse_size(tier.volume_bytes, name=f"{name}.volume_bytes")
    if not 0 < size <= capacity:
        raise BudgetError(
            f"{name}: capacity {show_bytes(capacity)} is smaller than one volume of {show_bytes(size)}; "
            f"raise {name}.capacity or lower {name}.volume_bytes"
        )
    return size


def floor_bytes(tier: SharedTier | DiskTier, *, name: str) -> int:
    """Return the bytes below which this process asks its neighbours to give back; at least one volume."""
    capacity = parse_size(tier.capacity, name=f"{name}.capacity")
    share = capacity // 8 if tier.share is None else parse_size(tier.share, name=f"{name}.share")
    if share > capacity:
        raise StepwellUsageError(
            f"{name}: share {share} bytes exceeds the capacity of {capacity} bytes; lower {name}.share"
        )
    return max(share, volume_bytes(tier, name=name))
