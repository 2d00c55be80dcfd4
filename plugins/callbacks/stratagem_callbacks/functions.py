"""Call functions on the events of a run, without writing a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.errors import ConfigError, nearest
from stratagem_trainer.api import Callback
from stratagem_trainer.api.events import EVENTS, arguments_of


def _event(name: str) -> Any:
    """Return a hook implementation that calls the user's function for event `name`, if there is one."""
    names = ", ".join(argument for argument in arguments_of(name) if argument != "run")
    namespace: dict[str, Any] = {}
    source = f"def {name}(self, {names}):\n    if {name!r} in self.on: self.on[{name!r}]({names})\n"
    exec(source, namespace)  # noqa: S102 - pluggy reads the names of arguments from the signature
    return hookimpl(namespace[name])


@define(eq=False, kw_only=True)
class LambdaCallback(Callback):
    """Call functions on events: ``LambdaCallback(on_train_epoch_end=lambda trainer, module: ...)``.

    By name: ``{"name": "lambda", "on": {"on_train_epoch_end": ...}}``.
    Each function gets the arguments of its hook, in the order of docs/hooks.md, without `run`.
    """

    #: Functions by event. For more than a few lines, write a class instead.
    on: dict[str, Callable[..., Any]] = field()

    def __init__(self, *, on: dict[str, Callable[..., Any]] | None = None, **events: Callable[..., Any]) -> None:
        if on is None and not events:
            raise TypeError("no function")
        for name in events:
            if name not in EVENTS:
                raise ConfigError(
                    f"option LambdaCallback.{name} is unknown", expected="on, or an event of docs/hooks.md",
                    do=nearest(name, ("on", *EVENTS)),
                )  # fmt: skip
        self.__attrs_init__(on={**(on or {}), **events} if events else on)  # type: ignore[attr-defined]

    @on.validator
    def _known(self, _: Any, value: dict[str, Any]) -> None:
        for name in value:
            if name not in EVENTS:
                raise ConfigError(
                    f"LambdaCallback.on names {name!r}", expected="an event of docs/hooks.md", do=nearest(name, EVENTS)
                )

    for _name in EVENTS:
        locals()[_name] = _event(_name)
    del _name
