"""Hold pages in private host memory, lost with the process: staging on the way to the device, or the last tier."""

from __future__ import annotations

from stepwell import _core
from stepwell.config import show_bytes
from stepwell.errors import BudgetError
from stepwell.index import Index, Tier
from stepwell.tiers.base import Recovered
from stepwell.tiers.limits import MemoryLimits


class HostSlab:
    """A private slab of page slots.

    Invariant: slots = capacity / slot size, all of them in the index from open() on.
    """

    def __init__(
        self,
        shape: _core.PageShape,
        *,
        capacity_bytes: int,
        page_bytes: int,
        limits: MemoryLimits | None = None,
        name: str = "host",
    ) -> None:
        """Args: name: what messages call it, after the setting that gave its capacity."""
        setting = "host.capacity" if name == "host" else name
        slots = capacity_bytes // (-(-page_bytes // 4096) * 4096)
        if slots < 1:
            raise BudgetError(
                f"{name}: capacity {capacity_bytes} bytes holds no page of {page_bytes} bytes (4 KiB aligned)"
            )
        # Looked at here, because the mapping would not say: its memory is taken page by page, as it is touched.
        most = (limits or MemoryLimits()).memory()
        if capacity_bytes > most.nbytes:
            raise BudgetError(
                f"{name}: capacity {show_bytes(capacity_bytes)} is more than {show_bytes(most.nbytes)} "
                f"({most.source}); lower {setting}"
            )
        try:
            self._slab = _core.Slab(shape, slots)
        except MemoryError as error:
            raise BudgetError(f"{name}: {show_bytes(capacity_bytes)} cannot be mapped; lower {setting}") from error

    @property
    def tier(self) -> Tier:
        """Which tier this is."""
        return Tier.HOST

    @property
    def medium(self) -> _core.Slab:
        """The slab."""
        return self._slab

    @property
    def slots(self) -> int:
        """Slots of the slab."""
        return self._slab.slots

    def open(self, index: Index) -> Recovered:
        """Add all slots as free; nothing outlives the process, so nothing is recovered."""
        index.add_slots(Tier.HOST, 0, self._slab.slots)
        return Recovered(0, 0)

    @property
    def most_pages(self) -> int:
        """The slots of the slab."""
        return self.slots

    @property
    def may_grow(self) -> bool:
        """Never: the slab was taken whole."""
        return False

    def grow(self, index: Index, free_pages: int) -> None:
        """Do nothing: the slab was taken whole."""

    def tick(self, index: Index, *, low_pages: int, high_pages: int) -> int:
        """Return how many pages to evict so that `high_pages` are free."""
        free = index.claimable(Tier.HOST)
        return high_pages - free if free < low_pages else 0

    def close(self, index: Index) -> None:
        """Keep the slab until it is dropped: views of it may still be staged."""
