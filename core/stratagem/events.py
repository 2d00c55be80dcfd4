"""Tell plugins and the module what happens around the loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.module import EVENTS, overrides

if TYPE_CHECKING:
    from stratagem.trainer import Trainer


class Events:
    """The events of one call in one process. Who listens is looked up once for each event."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.run, self.module = trainer, trainer.run, trainer.module
        self._known: dict[str, Callable[..., None] | None] = {}

    def listener(self, name: str) -> Callable[..., None] | None:
        """Return a function that tells everybody of event `name`; None if nobody listens."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def emit(self, name: str, **arguments: Any) -> None:
        """Tell everybody of event `name`: plugins in the order of the stack, then the module."""
        listener = self.listener(name)
        if listener is not None:
            listener(**arguments)

    def module_first(self, name: str, then: Callable[[], None]) -> None:
        """Tell the module, do `then`, tell the plugins: what the module still logs is then there for them to read."""
        if overrides(self.module, name):
            getattr(self.module, name)()
        then()
        hook = self.run.implemented(name)
        if hook is not None:
            hook(trainer=self.trainer, module=self.module, run=self.run)

    def _find(self, name: str) -> Callable[..., None] | None:
        hook = self.run.implemented(name)
        own = getattr(self.module, name) if name in EVENTS and overrides(self.module, name) else None
        if own is None:
            given = {"trainer": self.trainer, "module": self.module, "run": self.run}
            return None if hook is None else functools.partial(hook, **given)

        def tell(**arguments: Any) -> None:
            if hook is not None:
                hook(trainer=self.trainer, module=self.module, run=self.run, **arguments)
            _call_with_accepted(own, arguments)

        return tell


def _call_with_accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    accepted = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        function(**arguments)
    else:
        function(**{name: value for name, value in arguments.items() if name in accepted})
