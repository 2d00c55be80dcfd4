"""State that a plugin keeps for each run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from stratagem.api.context import RunContext

T = TypeVar("T")


class PerRun(Generic[T]):
    """Keep a value for each pair of run and module: a new module gets a new value, a closed run keeps none.

    A field of the plugin: ``_seen: PerRun[dict[int, Tensor]] = field(init=False, factory=lambda: PerRun(dict))``. A
    copy of the plugin, also one in another process, starts empty.

    Args:
        make: makes the value; a class, or a function that can be imported.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], T]] = weakref.WeakKeyDictionary()
        self._making = threading.Lock()

    def of(self, run: RunContext) -> T:
        """Return the value for `run`, made on first use."""
        kept = self._kept.get(run)
        if kept is None or kept[0]() is not run.module:
            kept = self._made(run)
        return kept[1]

    def _made(self, run: RunContext) -> tuple[Callable[[], Any], T]:
        with self._making:  # hooks may be called by several threads
            kept = self._kept.get(run)
            if kept is None or kept[0]() is not run.module:
                kept = self._kept[run] = (_no_module if run.module is None else weakref.ref(run.module), self._make())
            return kept

    def __reduce__(self) -> tuple[Any, ...]:
        return PerRun, (self._make,)


def _no_module() -> None:
    """Stand for the module of a run that has none yet."""
