"""Let something happen just before or after one call of a store's index, as if another thread did it then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepwell import _core
from store_kit import Rig


class Turned:
    """The next call of one method of a rig's index does something else too; the calls after it do not.

    The method of the class is what is replaced, so that whoever has the index calls it, the core too.
    """

    def __init__(
        self, rig: Rig, name: str, *, before: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None
    ) -> None:
        target, call = rig.store._index, getattr(_core.Index, name)

        def turned(index: _core.Index, *args: Any, **kwargs: Any) -> Any:
            if index is not target:
                return call(index, *args, **kwargs)
            setattr(_core.Index, name, call)
            before()
            result = call(index, *args, **kwargs)
            after()
            return result

        setattr(_core.Index, name, turned)
