"""Cases of kind 8 in docs/cases.md: keys that collide, and namespaces that meet."""

from __future__ import annotations

import numpy as np
import pytest

from case_kit import Box, config_of, tokens_of
from stepwell.hashing import Namespace, namespace_seed, prefix_hashes
from stepwell.index import Tier
from store_kit import VOLUME_BYTES, Directories, OpenRig, stamps_of

IMAGES = 1 << 15


def test_pages_of_one_image_are_never_anothers() -> None:
    """C060, LMCache/LMCache#4086: of a picture's id 16 bits were kept, and another picture had the same.

    A namespace a picture, 2^15 of them: all keys differ, so do their halves, and all their 16-byte heads and tails.
    """
    tokens = tokens_of(1, 4)
    random = np.random.default_rng(7).bytes(16 * IMAGES)
    ids = [random[at : at + 16].hex() for at in range(0, len(random), 16)]
    keys = np.concatenate(
        [prefix_hashes(tokens, page_tokens=4, seed=namespace_seed(None, image)) for image in ids]
    )
    for part in (keys, keys[:, :16], keys[:, 16:]):
        assert len({row.tobytes() for row in part}) == IMAGES


def test_keys_with_one_tail_or_head_are_different_keys(open_rig: OpenRig) -> None:
    """C060, LMCache/LMCache#4086: keys of an engine's own, alike in their first or last bytes, or a page apart."""
    rig = open_rig(shared=VOLUME_BYTES, disk=VOLUME_BYTES)
    base = np.frombuffer(b"picture " * 4, np.uint8)
    keys = np.tile(base, (64, 1))
    for number in range(32):
        keys[number, 0] = number  # all but one byte are equal
        keys[32 + number, 31] = number
    rig.rows[:32] = stamps_of(keys[::2])
    rig.store.save_keys(keys[::2], source=rig.pool[:32])
    ok = rig.store.load_keys(keys, into=rig.pool[:64])
    assert ok.tolist() == [True, False] * 32
    assert np.array_equal(rig.rows[:64:2], stamps_of(keys[::2]))


def test_the_same_image_a_page_later_is_another_page(open_rig: OpenRig) -> None:
    """C060, LMCache/LMCache#4086: a picture's id stood for all its span, wherever that began."""
    text, image = tokens_of(1, 4), tokens_of(2, 8)
    rig = open_rig(shared=VOLUME_BYTES, disk=0)
    rig.save(np.concatenate([text, image]))
    for moved in (image, np.concatenate([image, text]), np.concatenate([text[:3], image, text[:1]])):
        with rig.store.match(moved) as match:
            assert match.pages == 0
    with rig.store.match(np.concatenate([text, text, image])) as match:
        assert match.pages == 1


@pytest.mark.parametrize("other", [Namespace(salt="u2"), None, Namespace(adapter="u1"), Namespace(salt="")], ids=repr)
def test_every_tier_keeps_namespaces_apart(directories: Directories, other: Namespace | None) -> None:
    """C061, sgl-project/sglang#26747: memory kept them apart, and storage was keyed by tokens alone."""
    sizes = {"shared": 8, "disk": 16}
    with Box(config_of(directories, **sizes)) as box:
        box.save(tokens_of(1, 16), namespace=Namespace(salt="u1"))
        box.store.evict(Tier.SHARED, 8)
        assert box.load(tokens_of(1, 16), namespace=other) == 0
    with Box(config_of(directories, **sizes)) as box:  # and from disk alone, after a restart
        assert box.load(tokens_of(1, 16), namespace=other) == 0
        assert box.load(tokens_of(1, 16), namespace=Namespace(salt="u1")) == 4
