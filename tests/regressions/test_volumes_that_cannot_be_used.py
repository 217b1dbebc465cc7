"""A volume that is no use kept the store from opening, for ever, or kept a neighbour from its share.

- A whole header, its checksum right, of more slots than a set of volumes takes raised ValueError from the
constructor, and in
  the keeper ended its thread. One whose pages have another size raised VolumeError, again and again.
- A volume whose slots are beyond mending (its file was truncated) can never be given back. It was the first to be
  chosen, and
  as one leaves at a time, no other was given back either.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from stepwell.clock import ManualClock
from stepwell.config import SharedTier, StoreConfig
from stepwell.store import PageStore
from store_kit import GEOMETRY, VOLUME_BYTES, Directories, OpenRig, chain
from volume_kit import sealed


def relabel(volume: Path, *, slots: int, page_bytes: int) -> None:
    """Give a shared volume a header of other sizes, whole and fitting its file."""
    header = bytearray(volume.read_bytes()[:4096])

    def up(nbytes: int, alignment: int = 4096) -> int:
        return -(-nbytes // alignment) * alignment

    [layers] = struct.unpack_from("<I", header, 72)
    [ring_entries] = struct.unpack_from("<I", header, 76)
    slot_bytes = up(page_bytes, 64)
    checksums = up(4096 + 192 * slots)
    recency = up(checksums + 4 * layers * slots)
    ring = up(recency + 16 * slots)
    pages = up(ring + 64 + 16 * ring_entries)
    size = pages + slot_bytes * slots
    struct.pack_into("<I", header, 68, slots)
    struct.pack_into("<QQ", header, 80, page_bytes, slot_bytes)
    struct.pack_into("<QQQQQQ", header, 104, 4096, checksums, recency, ring, pages, size)
    with volume.open("r+b") as file:
        file.write(sealed(bytes(header)))
        file.truncate(size)


@pytest.mark.parametrize(
    "sizes", [{"slots": 2**20 + 1, "page_bytes": GEOMETRY.page_bytes}, {"slots": 64, "page_bytes": 64}]
)
def test_a_store_opens_beside_a_volume_of_hostile_sizes(directories: Directories, sizes: dict[str, int]) -> None:
    config = StoreConfig(
        geometry=GEOMETRY, shared=SharedTier("2GiB", str(directories.shared), volume_bytes=VOLUME_BYTES)
    )
    PageStore(config).close()
    [volume] = directories.volumes("vol")
    relabel(volume, **sizes)  # sparse
    with PageStore(config) as store:
        assert store.stats().tiers["shared"].capacity > 0


def test_a_volume_beyond_mending_does_not_keep_others_from_being_given_back(
    directories: Directories, open_rig: OpenRig
) -> None:
    clock = ManualClock()
    sizes: dict[str, Any] = {"disk": 0, "shared": 3 * VOLUME_BYTES, "clock": clock}
    owner = open_rig(low_watermark=0.4, high_watermark=0.5, **sizes)
    number = 0
    while len(directories.volumes("vol")) < 3:
        owner.save(chain(number, 12))
        number += 1
        owner.round()
    os.truncate(directories.volumes("vol")[0], 8192)
    for each in range(number):
        owner.load(chain(each, 12))
    neighbour = open_rig(**sizes)
    for _ in range(40):
        owner.round()
        neighbour.round()
        if neighbour.store.stats().tiers["shared"].capacity > 0:
            break
        clock.advance(0.25)
    assert neighbour.store.stats().tiers["shared"].capacity > 0
