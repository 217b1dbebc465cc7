"""Whatever is done to the files of tier directories, while stores serve from them: no crash, no hang, no wrong byte."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mutation_kit import Campaign, Mutator
from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from store_kit import PAGE_TOKENS, VOLUME_BYTES, Directories, OpenRig, Rig, chain, stamps

CHAINS, PAGES = 30, 12
KEYS = {number: prefix_hashes(chain(number, PAGES), page_tokens=PAGE_TOKENS) for number in range(CHAINS)}


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sw-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_two_stores_serve_on_while_their_files_are_changed(base: Path) -> None:
    """300 changes; 10,000 by `python tests/mutation_kit.py --mutations 10000`."""
    campaign = Campaign(11, base)
    campaign.run(300)
    assert campaign.totals["right"] > 0, "nothing was served: nothing was tried"
    assert len(campaign.mutator.done) > 10


def found_pages(rig: Rig) -> set[tuple[int, int]]:
    """Load each page of each chain by its key and return which came; other bytes than its own fail the test."""
    found = set()
    for number, keys in KEYS.items():
        rig.rows[:PAGES] = 0xEE
        ok = rig.store.load_keys(keys, into=rig.pool[:PAGES])
        assert np.array_equal(rig.rows[:PAGES][ok], stamps(chain(number, PAGES))[ok]), "wrong bytes were served"
        found |= {(number, page) for page in np.flatnonzero(ok).tolist()}
    return found


@pytest.mark.parametrize("seed", range(4))
def test_damage_stays_in_the_volume_it_was_done_to(
    directories: Directories, open_rig: OpenRig, seed: int
) -> None:
    """Ten changes of bytes, sizes, header or records of one volume cost no page of the others."""
    config = directories.config(shared=0, disk=8 * VOLUME_BYTES)
    rig = open_rig(config, slots=PAGES)
    for number in range(CHAINS):
        rig.save(chain(number, PAGES))
        rig.round()
    everything = found_pages(rig)
    members = {member.held.volume_id: member for member in rig.store._tiers[Tier.DISK].members}
    victim = sorted(members)[seed % len(members)]
    _, keys, lengths, *_ = members.pop(victim).volume.recover()
    known = {key[:size].tobytes() for key, size in zip(keys, lengths, strict=True)}
    others = {(number, page) for number, page in everything if KEYS[number][page].tobytes() not in known}
    assert 0 < len(others) < len(everything)
    del members
    rig.close()

    mutator = Mutator(random.Random(seed), directories, directories.disk.parent)
    mutator.only = victim
    kinds = (mutator.flip_bits, mutator.change_record, mutator.change_header, mutator.truncate)
    for _ in range(10):
        mutator.rng.choice(kinds)()
    again = open_rig(config, slots=PAGES)
    assert found_pages(again) >= others
    again.save(chain(99, PAGES))
    assert again.load(chain(99, PAGES)) == PAGES


def test_a_changed_byte_of_a_page_costs_that_page(directories: Directories, open_rig: OpenRig) -> None:
    """On disk and in shared memory: all others come, and are right."""
    for sizes in ({"shared": 4 * VOLUME_BYTES, "disk": 0}, {"shared": 0, "disk": 4 * VOLUME_BYTES}):
        rig = open_rig(slots=PAGES, **sizes)
        for number in range(4):
            rig.save(chain(number, PAGES))
        [member] = rig.store._tiers[Tier.SHARED if sizes["shared"] else Tier.DISK].members
        slots, keys, lengths, *_ = member.volume.recover()
        header = member.volume.header
        [path] = directories.volumes("vol" if sizes["shared"] else "pages")
        for row in (0, 7, 20):
            with open(path, "r+b") as file:
                file.seek(header.pages_offset + header.slot_bytes * int(slots[row]) + 5)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
        changed = {keys[row, : lengths[row]].tobytes() for row in (0, 7, 20)}
        expected = {(n, p) for n in range(4) for p in range(PAGES) if KEYS[n][p].tobytes() not in changed}
        assert found_pages(rig) == expected
        assert rig.store.stats().checksum_failures == 3
        del member
        rig.close()
