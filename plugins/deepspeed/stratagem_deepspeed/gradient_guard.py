"""Refuse user code that reads or changes `.grad` of what ZeRO keeps without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError

#: Methods of a module that may read gradients.
_EVENTS = ("on_after_backward", "on_before_optimizer_step")


class GradientGuard:
    """Makes `parameter.grad` raise an error while user code runs that expects gradients."""

    def __init__(self, user: nn.Module, stage: int, stepped: set[int] | None, zero: Any) -> None:
        """Guard parameters at stages 2 and 3, and at each the partitions in the groups of `zero`, the optimizer.

        `stepped` has the ids of the parameters that the optimizer steps; None means all trainable ones.
        """
        self._user, self._stage, self._groups = user, stage, zero.param_groups
        named = [(name, each) for name, each in user.named_parameters() if each.requires_grad and stage > 1]
        self._named = [(name, each) for name, each in named if stepped is None or id(each) in stepped]
        partitions = [each for group in self._groups for each in group["params"]]
        self._any_partition = torch.empty(0)
        self._any_partition.__class__ = self._without_gradient(type(self._any_partition))
        self._tensors = [*(each for _, each in self._named), *partitions]
        self._classes: list[type] = [type(each) for each in self._tensors]
        without = {cls: self._without_gradient(cls) for cls in self._classes}
        self._without = [without[cls] for cls in self._classes]
        #: Names of the module's methods that are wrapped.
        self._methods = [name for name in _EVENTS if callable(getattr(type(user), name, None))]
        for name in self._methods:
            user.__dict__[name] = self._guarded(getattr(user, name))

    def _without_gradient(self, cls: type) -> type:
        accessor = property(self._refuse, self._refuse, self._refuse)
        return type(cls.__name__, (cls,), {"grad": accessor, "__module__": cls.__module__})

    def _refuse(self, parameter: Any, _: Any = None) -> Any:
        raise self._error(parameter)

    def _error(self, parameter: Any) -> ConfigError:
        named = [repr(name) for name, each in self._named if each is parameter] or ["what optimizer.param_groups holds"]
        return ConfigError(
            f"something reads or changes .grad of {named[0]}, and at stage {self._stage} ZeRO keeps gradients in "
            "partitions elsewhere",
            expected="no access to gradients after backward" if self._stage > 1 else "those of module.parameters()",
            do='use gradient_clip_val, change them in parameter.register_hook, or choose strategy="ddp"',
        )

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(*arguments: Any, **options: Any) -> Any:
            with self.guarding():
                return method(*arguments, **options)

        return guarded

    @contextlib.contextmanager
    def guarding(self, refused: bool = True) -> Iterator[None]:
        """Within: raise an error where `.grad` is read or changed; or if not `refused`, let DeepSpeed do so."""
        before = [type(each) for each in self._tensors]
        empty = [group for group in self._groups if not group["params"]]  # stage 3 fills them while it steps
        for group in empty:
            group["params"] = [self._any_partition]
        _set_classes(self._tensors, self._without if refused else self._classes)
        try:
            yield
        finally:
            _set_classes(self._tensors, before)
            for group in empty:
                group["params"] = []

    def check_unset(self) -> None:
        """Refuse a gradient that user code has set, which the step would ignore."""
        for _, parameter in self._named:
            if parameter.grad is not None:
                raise self._error(parameter)

    def stop(self) -> None:
        """Restore the module's methods."""
        for name in self._methods:
            self._user.__dict__.pop(name, None)


def _set_classes(tensors: list[Any], classes: list[type]) -> None:
    for tensor, cls in zip(tensors, classes, strict=True):
        tensor.__class__ = cls
