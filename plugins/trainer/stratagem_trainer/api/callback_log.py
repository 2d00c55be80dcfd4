"""`LogsMetrics`: the methods `log` and `log_dict` of callbacks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

#: A callback and the module that is trained or evaluated in the call that began last, by the callback's id: a callback
#: may be equal to another, and its module refers to it.
_MODULES: dict[int, tuple[ReferenceType[Any], ReferenceType[Any]]] = {}


class LogsMetrics:
    """Logs through the module that is trained or evaluated."""

    __slots__ = ()

    def log(self, name: str, value: Tensor | float, *options: Any, **more: Any) -> None:
        """Record one number under `name`, as `Module.log` does, with its options.

        Raises:
            ConfigError: called where nothing can be logged, or as `Module.log` does.
        """
        self._module().log(name, value, *options, **more)

    def log_dict(self, values: Mapping[str, Tensor | float], *options: Any, **more: Any) -> None:
        """`log` every item of `values` with the same options."""
        self._module().log_dict(values, *options, **more)

    def _module(self) -> Any:
        known = _MODULES.get(id(self))
        module = None if known is None else known[1]()
        if module is None:
            raise ConfigError(
                f"{type(self).__name__}.log was called outside a run",
                expected="a call in an event of a trainer's callback",
            )
        return module


def _forget(key: int, _: Any) -> None:
    _MODULES.pop(key, None)


def let_log(callbacks: Iterable[Any], module: Any) -> None:
    """Let `callbacks` log through `module` from now on."""
    for callback in callbacks:
        if isinstance(callback, LogsMetrics):
            key = id(callback)
            _MODULES[key] = ref(callback, functools.partial(_forget, key)), ref(module)
