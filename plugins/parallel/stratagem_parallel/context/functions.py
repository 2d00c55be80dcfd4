"""Replace functions of torch while a step runs, under every name that a module imported them by."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Place = tuple[dict[str, Any], str, Callable[..., Any], Callable[..., Any]]


class Replacements:
    """Functions, what takes their place, and the modules that name them; also those imported later.

    Args:
        pairs: each function and its replacement.
    """

    def __init__(self, pairs: Sequence[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
        self._pairs = {id(each): pair for pair in pairs for each in pair}
        self._places: list[Place] = []
        self._searched: set[str] = set()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Within: all names refer to the replacements. Afterwards a module imported meanwhile has the functions."""
        self._search()
        before = [(names, name, names.get(name, function)) for names, name, function, _ in self._places]
        for names, name, _, replacement in self._places:
            names[name] = replacement
        try:
            yield
        finally:
            for names, name, value in before:
                names[name] = value
            for names, name, function, _ in self._search():
                names[name] = function

    def _search(self) -> list[Place]:
        """Return the global names in modules that were not searched yet, and add them to the others."""
        if sys.modules.keys() <= self._searched:
            return []
        found: list[Place] = []
        for module_name, module in list(sys.modules.items()):
            if module_name in self._searched:
                continue
            self._searched.add(module_name)
            names = getattr(module, "__dict__", None)
            is_torchs_own = module_name != "torch.nn.functional" and module_name.startswith("torch.")
            if type(names) is dict and not is_torchs_own and not module_name.startswith("stratagem_parallel."):
                pairs = [(name, self._pairs.get(id(value))) for name, value in list(names.items())]
                found += [(names, name, *pair) for name, pair in pairs if pair is not None]
        self._places += found
        return found
