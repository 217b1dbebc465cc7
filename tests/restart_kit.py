"""What the tests of restarts share: the order in which pages leave, and what a death leaves of two directories."""

from __future__ import annotations

import shutil
from pathlib import Path

from stepwell.index import Tier
from store_kit import Directories, Rig


def order_of(rig: Rig, tier: Tier) -> list[bytes]:
    """Return the keys of a tier's pages, the first to leave first. Nothing is changed but their order: ask once."""
    index = rig.store._index
    pages, _, numbers = index.claim_victims(tier, 1 << 20)
    keys = [label[0] for label in index.labels(pages)]
    for page, number in zip(pages.tolist(), numbers.tolist(), strict=True):
        index.keep(page, tier, number)
    return keys


def left_by_a_death(directories: Directories, copy: Path) -> Directories:
    """Return directories as they would be if all who use `directories` were killed now: their files, and no locks."""
    left = Directories(shared=copy / "shared", disk=copy / "disk")
    for source, target in ((directories.shared, left.shared), (directories.disk, left.disk)):
        if source.exists():
            shutil.copytree(source, target)
            target.chmod(0o700)
    return left
