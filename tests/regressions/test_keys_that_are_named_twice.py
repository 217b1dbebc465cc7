"""A key that one call names twice is one page: with selective disk writes its copy was planned twice, and returning the
second one's pin, which it never had, poisoned the store."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from stepwell.hashing import prefix_hashes
from stepwell.index import Tier
from stepwell.mover import SaveOutcome
from store_kit import PAGE_TOKENS, Directories, OpenRig, Rig, chain, stamps_of

KEYS = prefix_hashes(chain(1, 4), page_tokens=PAGE_TOKENS)[[0, 1, 1, 2, 0, 3, 3]]


def check(rig: Rig) -> None:
    for _ in range(3):
        rig.rows[: len(KEYS)] = 0xEE
        assert rig.store.load_keys(KEYS, into=rig.pool[: len(KEYS)]).all()
        assert np.array_equal(rig.rows[: len(KEYS)], stamps_of(KEYS))
        assert rig.store.probe(KEYS, lease=0.0).run == len(KEYS)
        assert rig.store.flush(10.0)
        assert rig.store.check() == ""


@pytest.mark.parametrize("write", ["through", "selective"])
def test_keys_that_are_named_twice_are_saved_and_found_once(
    open_rig: OpenRig, directories: Directories, write: str
) -> None:
    config = directories.config(host=64 * 4096)
    assert config.disk is not None
    rig = open_rig(msgspec.structs.replace(config, disk=msgspec.structs.replace(config.disk, write=write)))
    rig.rows[: len(KEYS)] = stamps_of(KEYS)
    outcomes = rig.store.save_keys(KEYS, source=rig.pool[: len(KEYS)])
    assert (outcomes == SaveOutcome.STORED).sum() == 4
    check(rig)
    assert rig.pages(Tier.DISK) == 4
    rig.store.evict(Tier.SHARED, 100)
    check(rig)


def test_keys_that_are_named_twice_are_had_from_a_neighbour(open_rig: OpenRig) -> None:
    owner, reader = open_rig(), open_rig()
    owner.save(chain(1, 4))
    reader.round()
    check(reader)
    assert reader.store.stats().neighbours.delivered == 4
