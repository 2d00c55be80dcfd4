"""Stages 2 and 3: refuse user code that reads or changes `parameter.grad`, where ZeRO does not keep gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from stratagem.errors import ConfigError

#: Methods of a module that may read gradients.
_EVENTS = ("on_after_backward", "on_before_optimizer_step")


class GradientGuard:
    """Makes `parameter.grad` raise an error while user code runs that expects gradients."""

    def __init__(self, user: nn.Module, stage: int, stepped: set[int] | None) -> None:
        """`stepped` has the ids of the parameters that the optimizer steps; None means all trainable ones."""
        self._user, self._stage = user, stage
        named = [(name, each) for name, each in user.named_parameters() if each.requires_grad]
        self._named = [(name, each) for name, each in named if stepped is None or id(each) in stepped]
        self._classes: dict[type, type] = {}
        self._changes = [(each, type(each), self._without_gradient(type(each))) for _, each in self._named]
        #: Names of the module's methods that are wrapped.
        self._methods = [name for name in _EVENTS if callable(getattr(type(user), name, None))]
        for name in self._methods:
            user.__dict__[name] = self._guarded(getattr(user, name))

    def _without_gradient(self, cls: type) -> type:
        if cls not in self._classes:
            accessor = property(self._refuse, self._refuse, self._refuse)
            self._classes[cls] = type(cls.__name__, (cls,), {"grad": accessor, "__module__": cls.__module__})
        return self._classes[cls]

    def _refuse(self, parameter: Any, _: Any = None) -> Any:
        raise self._error(parameter)

    def _error(self, parameter: Any) -> ConfigError:
        name = next((name for name, each in self._named if each is parameter), "a parameter")
        return ConfigError(
            f"something reads or changes .grad of {name!r}, and at stage {self._stage} ZeRO keeps gradients in "
            "partitions elsewhere",
            expected="no access to gradients after backward",
            do='use gradient_clip_val, change them in parameter.register_hook, or choose strategy="ddp"',
        )

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(*arguments: Any, **options: Any) -> Any:
            with self.guarding():
                return method(*arguments, **options)

        return guarded

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Within: raise an error where `.grad` of a trainable parameter is read or changed."""
        for parameter, _, without in self._changes:
            parameter.__class__ = without
        try:
            yield
        finally:
            for parameter, before, _ in self._changes:
                parameter.__class__ = before

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within: allow DeepSpeed to access gradients inside `guarding`."""
        classes = [type(parameter) for parameter, _, _ in self._changes]
        for parameter, before, _ in self._changes:
            parameter.__class__ = before
        try:
            yield
        finally:
            for (parameter, _, _), cls in zip(self._changes, classes, strict=True):
                parameter.__class__ = cls

    def check_unset(self) -> None:
        """Refuse a gradient that user code has set, which the step would ignore."""
        for _, parameter in self._named:
            if parameter.grad is not None:
                raise self._error(parameter)

    def stop(self) -> None:
        """Restore the module's methods."""
        for name in self._methods:
            self._user.__dict__.pop(name, None)
