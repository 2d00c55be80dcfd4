"""Call the event hooks of plugins and of the module."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem_trainer.api.events import EVENTS
from stratagem_trainer.api.events import arguments_of as arguments_of_hook
from stratagem_trainer.module import overrides

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState


class Events:
    """The events of one call in one process. Implementations are looked up once for each event."""

    def __init__(self, state: FitState) -> None:
        self.trainer, self.run, self.module = state.trainer, state.run, state.module
        self._known: dict[str, Callable[..., None] | None] = {}
        #: Returns a function that calls a method within what the strategy has hooks run in, the same in each call.
        self.within = functools.cache(self._within)

    def listener(self, name: str) -> Callable[..., None] | None:
        """Return a function that calls all implementations of event `name`; None if there are none."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def emit(self, name: str, **arguments: Any) -> None:
        """Call the implementations of event `name`: plugins in the order of the stack, then the module."""
        listener = self.listener(name)
        if listener is not None:
            listener(**arguments)

    def module_first(self, name: str, before: Callable[[], Any], then: Callable[[], None]) -> None:
        """Call `before` and the module, if it listens; `then`; the plugins, which can read what the module logged."""
        if overrides(self.module, name):
            before()
            self.within(getattr(self.module, name))()
        then()
        hook = self.run.hooks.implemented(name)
        if hook is not None:
            self.within(hook)(trainer=self.trainer, module=self.module, run=self.run)

    def _within(self, method: Callable[..., Any]) -> Callable[..., Any]:
        context = self.run.stack.strategy.hook_context()
        if context is None:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            with context:
                return method(*arguments, **options)

        return call

    def _find(self, name: str) -> Callable[..., None] | None:
        given = {"trainer": self.trainer, "module": self.module, "run": self.run}
        plugins = _direct(self.run.hooks.implemented(name), given)
        own = by_name(name, getattr(self.module, name)) if name in EVENTS and overrides(self.module, name) else None
        listener = own or plugins
        if own is not None and plugins is not None:

            def listener(**arguments: Any) -> Any:
                plugins(**arguments)
                return own(**arguments)

        return listener if listener is None else self.within(listener)


def _direct(caller: Any, given: dict[str, Any]) -> Callable[..., None] | None:
    """Return a function that calls the implementations of an event in pluggy's order, at a tenth of pluggy's cost.

    Args:
        caller: pluggy's caller of the event; None if no plugin listens.
        given: arguments that are the same in each call; the function takes the others.
    """
    if caller is None:
        return None
    found = caller.get_hookimpls()[::-1]  # the last one is called first
    if any(each.wrapper or each.hookwrapper for each in found):
        return functools.partial(caller, **given)
    calls = [_bound(each.function, each.argnames, given) for each in found]
    # A wrapper may call its arguments otherwise.
    own = set(calls[0][1]) & set(getattr(found[0].function, "__code__", _direct.__code__).co_varnames)
    if len(calls) == 1 and own == {*caller.spec.argnames} - given.keys():
        return calls[0][0]

    def call_all(**arguments: Any) -> None:
        values = given | arguments
        for function, names in calls:
            function(*map(values.__getitem__, names))

    return call_all


def _bound(function: Any, names: tuple[str, ...], given: dict[str, Any]) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return `function` with its first arguments, as far as they are `given`, and the names of the others."""
    first = tuple(itertools.takewhile(given.__contains__, names))
    return functools.partial(function, *(given[name] for name in first)), names[len(first) :]


def arguments_of(event: str) -> tuple[str, ...]:
    """Return what a module's method for `event` gets, in order."""
    return tuple(name for name in arguments_of_hook(event) if name not in ("trainer", "module", "run"))


def by_name(event: str, method: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that calls `method` with those keyword arguments of `event` that it takes.

    If their names differ, or it takes ``*arguments``, they are passed in order. None: it takes more than the event has.
    """
    names, parameters = arguments_of(event), inspect.signature(method).parameters.values()
    kinds = inspect.Parameter
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters):
        return method
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.default is kinds.empty and p.kind is not kinds.VAR_POSITIONAL]
    accepted = [p.name for p in named if p.name in names]
    takes_more = any(parameter.kind is kinds.VAR_POSITIONAL for parameter in parameters)
    if not takes_more and all(name in accepted for name in required):
        return lambda **arguments: method(**{name: arguments[name] for name in accepted})
    in_order = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.POSITIONAL_ONLY)]
    if len(required) > len(names) or any(p.kind is kinds.KEYWORD_ONLY and p.name in required for p in parameters):
        return None
    count = len(names) if takes_more else min(len(in_order), len(names))
    return lambda **arguments: method(*(arguments[name] for name in names[:count]))
