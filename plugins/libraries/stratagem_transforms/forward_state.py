"""What a forward changes besides its output: buffers and attributes of modules, which can be what they were."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

#: The attributes of each module.
State = list[tuple[nn.Module, dict[str, Any]]]
#: Containers that `copy` copies whole; classes of users may hold more.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
#: Attributes of torch's modules, of which a forward changes `_buffers` alone.
_OF_TORCH = frozenset(nn.Module().__dict__)


def state_of(modules: Iterable[nn.Module]) -> State:
    """Return the attributes of `modules`, with copies of what can be changed in place: buffers, tensors, containers."""
    copies: dict[int, Any] = {}

    def kept(name: str, value: Any) -> Any:
        if name in _OF_TORCH:
            return value
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
            return copies.setdefault(id(value), value.clone())
        return value.copy() if type(value) in _CONTAINERS else value

    def all_of(values: dict[str, Any]) -> dict[str, Any]:
        return {name: kept(name, value) for name, value in values.items()}

    return [(module, all_of(vars(module)) | {"_buffers": all_of(module._buffers)}) for module in modules]


@contextlib.contextmanager
def having(state: State) -> Iterator[None]:
    """Within: modules have the attributes in `state`. Afterwards they have those of before, whatever was done."""
    before = [(module, dict(vars(module))) for module, _ in state]
    try:
        _set(state)
        yield
    finally:
        _set(before)


def unchanged(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Undo, at the end, what was done to buffers and to attributes of `modules`, and of all in them.

    Within, they are not compiled: that would take longer than a few calls, whose shapes are others.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    return having([(part, values | {"_compiled_call_impl": None}) for part, values in state_of(parts)])


def _set(state: State) -> None:
    for module, attributes in state:
        module.__dict__.clear()
        module.__dict__.update(attributes)


def nothing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


class RecomputedState:
    """Has a forward that backward computes again begin with the state of the first, which it changes once.

    Args:
        parts: the modules whose forward it is.
    """

    def __init__(self, *parts: nn.Module) -> None:
        modules = [each for part in parts for each in part.modules()]
        self._modules = [each for each in modules if each._buffers or not type(each).__module__.startswith("torch.nn")]

    def contexts(self, inner: Callable[[], Any] = nothing) -> tuple[Any, Any]:
        """Return contexts of a forward and of what backward computes again, within which are those of `inner`."""
        changed: State = []
        first, again = inner()
        return self._first(changed, first), self._again(changed, again)

    @contextlib.contextmanager
    def _first(self, changed: State, inner: AbstractContextManager[None]) -> Iterator[None]:
        state, before = state_of(self._modules), self._facts()
        with inner:
            yield
        if [(id(each), *rest) for each, *rest in before] != [(id(each), *rest) for each, *rest in self._facts()]:
            changed += state

    @contextlib.contextmanager
    def _again(self, changed: State, inner: AbstractContextManager[None]) -> Iterator[None]:
        with having(changed), having(state_of(module for module, _ in changed)), inner:
            yield

    def _facts(self) -> list[tuple[Any, int, int]]:
        """Return what tells whether something changed; it holds the values, whose ids others would get."""
        return [
            (each, getattr(each, "_version", 0), len(each) if isinstance(each, _CONTAINERS) else 0)
            for module in self._modules
            for each in (*vars(module).values(), *module._buffers.values())
        ]
