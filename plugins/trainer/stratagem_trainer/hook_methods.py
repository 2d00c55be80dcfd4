"""Methods that are hooks by their names, without a mark: a callback's events, and what a logger writes.

A class states each hook as a method that does nothing, without the arguments that all of its hooks have: see
`stratagem_trainer.api.events`. A class that derives from it and from `HookMethods` has the hooks.

A class that derives from `Callback` or `Logger` overrides them. A method gets the arguments that it names; one that
names others, as Lightning's callbacks name ``pl_module``, gets them in order.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

from stratagem.api.markers import hookimpl, hookspec
from stratagem.errors import ConfigError, PluginError

#: The run that each logger belongs to in this process.
_RUNS: Final[weakref.WeakKeyDictionary[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class HookMethods:
    """Makes methods hooks: ``class CallbackEvents(EventMethods, HookMethods, trainer="TrainerView")``.

    The methods of its first base state the hooks. The class has them with the arguments of the hooks; those that a
    class overrides which derives from it are hooks without a mark.

    Args:
        by_hand: they may be called by hand, without the run.
        first: the types of the arguments that each hook has before those of its method; `run` comes after them.
    """

    __slots__ = ()
    #: By name.
    hooks: ClassVar[dict[str, Any]]
    called_by_hand: ClassVar[bool]

    def __init_subclass__(cls, *, by_hand: bool = False, **first: Any) -> None:
        if HookMethods not in cls.__bases__:
            super().__init_subclass__(**first)
            cls.mark_methods()
            return
        stated = {name: method for name, method in vars(cls.__bases__[0]).items() if not name.startswith("_")}
        cls.called_by_hand, cls.hooks = by_hand, {name: _hook(stated[name], first) for name in stated}
        for name, hook in cls.hooks.items():
            setattr(cls, name, _to_override(cls, stated[name], ", ".join([*hook.__annotations__][:-2])))

    @classmethod
    def mark_methods(cls) -> bool:
        """Mark the methods that the class overrides as hooks; return whether one had no mark."""
        base = next(each for each in cls.__mro__ if HookMethods in each.__bases__)
        found = _mark_all(cls, base)
        if cls.called_by_hand:
            _let_call_by_hand(cls)
        return found


def _hook(method: Any, first: dict[str, str]) -> Any:
    arguments = first | {name: text for name, text in method.__annotations__.items() if name != "return"}
    arguments["run"] = "RunContext"
    hook = eval(f"lambda {', '.join(arguments)}: None")  # noqa: S307 - pluggy reads names from the code
    hook.__name__ = hook.__qualname__ = method.__name__
    hook.__module__, hook.__doc__ = method.__module__, method.__doc__
    hook.__annotations__ = arguments | {"return": "None"}
    return hookspec(hook)


def _to_override(cls: type[Any], stated: Any, arguments: str) -> Callable[..., None]:
    def method(self: Any, *_: Any, **__: Any) -> None:
        pass

    method.__name__, method.__qualname__ = stated.__name__, f"{cls.__name__}.{stated.__name__}"
    method.__module__, method.__doc__ = stated.__module__, f"({arguments}): {stated.__doc__}"
    return method


def belongs_to(logger: Any, run: Any) -> None:
    """Let methods of `logger` that are called by hand write to `run`."""
    _RUNS[logger] = weakref.ref(run)


def _mark_all(cls: type[Any], base: type[Any]) -> bool:
    """Mark the methods of `cls` that replace those of `base` as hooks, as early or late as what they override.

    Returns:
        Whether there was one without a mark.

    What they override may be called with the arguments of another trainer: ``super().on_train_end(trainer, module)``.

    Raises:
        PluginError: one takes more arguments than its hook has, or a method has the name of an option.
    """
    found = False
    for option in getattr(cls, "__attrs_attrs__", ()):
        own = vars(cls).get(option.name)
        if isinstance(own, types.FunctionType | property) and not getattr(own, "fset", None):
            raise PluginError(
                f"{cls.__name__} defines {option.name}, an option of what it derives from", expected="another name",
                do=f"choose one, and pass {option.name}= to {cls.__name__}",
            )  # fmt: skip
    for name, specified in base.hooks.items():
        for owner in cls.__mro__:
            if name in vars(owner):
                break
        method = vars(owner)[name]
        # A mock has any attribute.
        if owner is base or method is None or isinstance(getattr(getattr(cls, name), "stratagem_impl", None), dict):
            continue
        if not isinstance(method, types.FunctionType):
            raise PluginError(f"{cls.__name__}.{name} is a {type(method).__name__}", expected="a method")
        arguments = tuple(specified.__annotations__)[:-1]
        hook = _as_hook(cls.__name__, name, method, arguments)
        markers = (getattr(vars(each).get(name), "stratagem_impl", None) for each in cls.__mro__)
        if inherited := next((each for each in markers if each and each is not hook.stratagem_impl), None):
            hook.stratagem_impl |= {when: inherited[when] for when in ("tryfirst", "trylast")}
        for each in (each for each in cls.__mro__ if hasattr(vars(each).get(name), "stratagem_impl")):
            setattr(each, name, _taking_all(vars(each)[name], arguments))
        setattr(cls, name, hook)
        found = True
    return found


def _as_hook(owner: str, hook: str, method: types.FunctionType, known: Sequence[str]) -> Any:
    """Return `method` marked as an implementation of `hook`, with the arguments that the hook has."""
    _, *own = inspect.signature(method).parameters.values()
    kinds = inspect.Parameter
    required = [each for each in own if each.default is kinds.empty and each.kind is not kinds.VAR_POSITIONAL]
    if all(each.name in known for each in own):
        return hookimpl(method)
    in_order = [each for each in known if each != "run"]
    takes_all = any(each.kind is kinds.VAR_POSITIONAL for each in own)
    if len(required) > len(in_order) or any(each.kind is kinds.KEYWORD_ONLY for each in required):
        raise PluginError(
            f"{owner}.{hook} takes ({', '.join(['self', *map(str, own)])})",
            expected=f"(self, {', '.join(in_order)}), or some of them by name",
        )
    positional = [each for each in own if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    names = in_order if takes_all else in_order[: len(positional)]

    def call(*values: Any, **named: Any) -> Any:
        return method(*values, **named)

    return hookimpl(_named_as(method, call, names))


def _taking_all(method: Any, known: Sequence[str]) -> Callable[..., Any]:
    """Return a hook so that `super()` may call it with all arguments that the hook has, too, in their order."""
    own = list(inspect.signature(method).parameters)[1:]

    def call(self: Any, *values: Any, **named: Any) -> Any:
        names = own if len(values) == len(own) < len(known) - 1 else known
        given = {"dataloader_idx": 0} | dict(zip(names, values, strict=False)) | named
        return method(self, *(given[name] if name in given else given["trainer"].run for name in own))

    call.stratagem_impl, call.by_hand = method.stratagem_impl, True  # type: ignore[attr-defined]
    return method if hasattr(method, "by_hand") else _named_as(method, call, known)


def _named_as(method: Any, call: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return `call` with the name of `method` and arguments called `names`, which pluggy passes in this order."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(call, attribute, getattr(method, attribute))
    # pluggy reads names from the code of what a function wraps.
    call.__wrapped__ = eval(f"lambda {', '.join(('self', *names))}: None")  # type: ignore[attr-defined]  # noqa: S307
    return call


def _let_call_by_hand(cls: type[Any]) -> None:
    """Let the methods of `cls` that are hooks be called without the run, outside of hooks."""
    for name in cls.hooks:
        method = vars(cls).get(name)
        marker = getattr(method, "stratagem_impl", None)
        if marker is not None and not marker["wrapper"] and not hasattr(method, "by_hand"):
            setattr(cls, name, _callable_by_hand(name, method))


def _callable_by_hand(hook: str, method: Any) -> Callable[..., Any]:
    """Return `method` of a logger so that a call without the run writes to the logger's own, on rank 0 only."""
    own, marker = list(inspect.signature(method).parameters)[1:], method.stratagem_impl
    names = own if "run" in own else [*own, "run"]

    def call(self: Any, *values: Any, **named: Any) -> Any:
        if len(values) == len(names):  # a hook
            return method(self, *values[: len(own)])
        return _by_hand(self, hook, own, functools.partial(method, self), dict(zip(own, values, strict=False)) | named)

    call.stratagem_impl, call.by_hand = marker, True  # type: ignore[attr-defined]
    return _named_as(method, call, names)


def _by_hand(logger: Any, hook: str, own: list[str], method: Callable[..., Any], given: dict[str, Any]) -> Any:
    from stratagem.api.readback import as_numbers
    from stratagem_trainer.hyperparameters import items_of

    run = given.get("run") or (_RUNS[logger]() if logger in _RUNS else None)
    if run is None:
        raise ConfigError(
            f"{type(logger).__name__}.{hook} was called outside a run", expected="a logger of a trainer",
            do="call it in the module's methods or in a callback, as self.logger",
        )  # fmt: skip
    if not run.is_global_zero:
        return None
    if hook == "log_metrics":
        if given.get("step") is None:
            given["step"] = 0 if run.progress is None else run.progress.global_step
        given["metrics"] = as_numbers(given["metrics"])
    else:
        given["params"] = items_of(given["params"], hook)
    given["run"] = run
    return method(**{name: given[name] for name in own})
