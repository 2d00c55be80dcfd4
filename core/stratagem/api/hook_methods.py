"""Methods that are hooks by their names, without a mark: a callback's events, and what a logger writes.

A class that derives from `CallbackEvents` or `LoggerMethods` overrides them. A method gets the arguments that it names;
one that names others, as Lightning's callbacks name ``pl_module``, gets them in order.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from stratagem.api.markers import hookimpl
from stratagem.errors import ConfigError, PluginError

_STAGES = ("validation", "test", "predict")

#: Arguments of events after `trainer` and `module`.
_AFTER_MODULE: Final[dict[str, tuple[str, ...]]] = {
    "setup": ("stage",),
    "on_train_batch_start": ("batch", "batch_idx"),
    "on_train_batch_end": ("outputs", "batch", "batch_idx"),
    "on_before_backward": ("loss",),
    "on_before_optimizer_step": ("optimizer",),
    "on_before_zero_grad": ("optimizer",),
    **{f"on_{stage}_batch_start": ("batch", "batch_idx", "dataloader_idx") for stage in _STAGES},
    **{f"on_{stage}_batch_end": ("outputs", "batch", "batch_idx", "dataloader_idx") for stage in _STAGES},
    "on_save_checkpoint": ("checkpoint",),
    "on_load_checkpoint": ("checkpoint",),
    "on_exception": ("exception",),
}

#: Arguments of what a logger writes.
_OF_LOGGERS: Final[dict[str, tuple[str, ...]]] = {"log_metrics": ("metrics", "step"), "log_hyperparams": ("params",)}

#: The run that each logger belongs to in this process.
_RUNS: Final[weakref.WeakKeyDictionary[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def belongs_to(logger: Any, run: Any) -> None:
    """Let methods of `logger` that are called by hand write to `run`."""
    _RUNS[logger] = weakref.ref(run)


class CallbackEvents:
    """Methods that do nothing, to override; see the hooks of the same names."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _mark_all(cls, CallbackEvents)

    def setup(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, stage): a fit, validation, test or prediction starts."""

    # --- Training --------------------------------------------------------------------------------------------------

    def on_fit_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): model, optimizers and loaders are ready."""

    def on_fit_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): training ended without an exception."""

    def on_sanity_check_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before the sanity check."""

    def on_sanity_check_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the sanity check."""

    def on_train_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before the first epoch."""

    def on_train_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last epoch."""

    def on_train_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before an epoch."""

    def on_train_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after an epoch and its validation."""

    def on_train_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx): before a batch is used."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx): after a batch."""

    def on_before_backward(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, loss): before backward."""

    def on_after_backward(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the gradients of a batch are accumulated."""

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, optimizer): before an optimizer step; gradients are not clipped yet."""

    def on_before_zero_grad(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, optimizer): before gradients are zeroed."""

    # --- Evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before validation."""

    def on_validation_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_validation_start`."""

    def on_validation_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a validation batch is used."""

    def on_validation_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a validation batch."""

    def on_validation_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last validation batch."""

    def on_validation_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after validation."""

    def on_test_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before testing."""

    def on_test_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_test_start`."""

    def on_test_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a test batch is used."""

    def on_test_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a test batch."""

    def on_test_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last test batch."""

    def on_test_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after testing."""

    def on_predict_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before predicting."""

    def on_predict_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_predict_start`."""

    def on_predict_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a batch is predicted."""

    def on_predict_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a batch is predicted."""

    def on_predict_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last batch is predicted."""

    def on_predict_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after predicting."""

    # --- Checkpoints and errors ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, checkpoint): add to the checkpoint what is to be saved."""

    def on_load_checkpoint(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, checkpoint): take from the checkpoint what `on_save_checkpoint` added."""

    def on_exception(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, exception): a call ends with an exception."""


class LoggerMethods:
    """What a logger writes. The methods may be called by hand within a run: rank 0 writes, other ranks do nothing."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _mark_all(cls, LoggerMethods)
        for name in _hooks_of(LoggerMethods):
            method = vars(cls).get(name)
            marker = getattr(method, "stratagem_impl", None)
            if marker is not None and not marker["wrapper"] and not hasattr(method, "by_hand"):
                setattr(cls, name, _callable_by_hand(name, method))

    def log_metrics(self, *_: Any, **__: Any) -> Any:
        """(metrics, step): write numbers by name. By hand, values may be tensors, and `step` is optional."""

    def log_hyperparams(self, *_: Any, **__: Any) -> Any:
        """(params): write hyper-parameters. By hand, a mapping, a namespace or a dataclass."""


def _hooks_of(base: type[Any]) -> Iterable[str]:
    return [name for name in vars(base) if not name.startswith("_")]


def _mark_all(cls: type[Any], base: type[Any]) -> None:
    """Mark the methods of `cls` that replace those of `base` as hooks.

    Raises:
        PluginError: one takes more arguments than its hook has.
    """
    for name in _hooks_of(base):
        owner = next(each for each in cls.__mro__ if name in vars(each))
        method = vars(owner)[name]
        if owner is base or method is None or hasattr(getattr(cls, name), "stratagem_impl"):
            continue
        if not isinstance(method, types.FunctionType):
            raise PluginError(f"{cls.__name__}.{name} is a {type(method).__name__}", expected="a method")
        setattr(cls, name, _as_hook(cls.__name__, name, method))


def _arguments_of(hook: str) -> list[str]:
    """Return the arguments of `hook` in order, as `stratagem.api.hooks` has them, with `run` last."""
    if hook in _OF_LOGGERS:
        return [*_OF_LOGGERS[hook], "run"]
    return ["trainer", "module", *_AFTER_MODULE.get(hook, ()), "run"]


def _as_hook(owner: str, hook: str, method: types.FunctionType) -> Callable[..., Any]:
    """Return `method` marked as an implementation of `hook`, with the arguments that the hook has."""
    known, (_, *own) = _arguments_of(hook), inspect.signature(method).parameters.values()
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


def _named_as(method: Any, call: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return `call` with the name of `method` and arguments called `names`, which pluggy passes in this order."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(call, attribute, getattr(method, attribute))
    # pluggy reads names from the code of what a function wraps.
    call.__wrapped__ = eval(f"lambda {', '.join(('self', *names))}: None")  # type: ignore[attr-defined]  # noqa: S307
    return call


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
    from stratagem.api.options import items_of
    from stratagem.api.readback import as_numbers

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
