"""The stages of a model: which modules and parameters each computes with, and how its part is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen
from torch import nn

from stratagem.errors import ConfigError


@frozen(eq=False)
class Stage:
    """One stage of the pipelined module."""

    #: Names of its modules, whose parameters and buffers belong to it with all that is in them.
    modules: tuple[str, ...]
    #: Names of parameters and buffers that it uses without a module around them.
    tensors: tuple[str, ...]
    #: Computes its output from what the stage before returned; for the first, from the arguments of the module's call.
    compute: Callable[[Any], Any]


@frozen(eq=False)
class Cut:
    """A model that was cut into stages."""

    #: The name of the pipelined module in the user's.
    where: str
    stages: tuple[Stage, ...]
    #: Makes one value, which the first stage takes, of the arguments of the module's call.
    bind: Callable[..., Any]
    #: Whether numbers may pass from stage to stage, along with tensors.
    passes_numbers: bool = False


def pipelined_sequence(user: nn.Module) -> str:
    """Return the name of the nn.Sequential that is cut: `sequential_module`, or the only one that `user` has.

    Raises:
        ConfigError: there is none, or there are several.
    """
    given = getattr(user, "sequential_module", None)
    if given is not None:
        if isinstance(given, nn.Sequential):
            names: dict[nn.Module, str] = {module: name for name, module in user.named_modules()}
            return names[given]
        raise ConfigError(
            f"{type(user).__name__}.sequential_module is a {type(given).__name__}", expected="an nn.Sequential",
            do="build it of its layers, or set strategy.parallel.split_points",
        )  # fmt: skip
    found = [name for name, child in user.named_children() if isinstance(child, nn.Sequential)]
    if len(found) == 1:
        return found[0]
    what = f"has {len(found)} nn.Sequential ({', '.join(found)})" if found else "has no nn.Sequential"
    raise ConfigError(
        f"{type(user).__name__} {what}, and strategy.parallel.pipeline cuts one into stages",
        expected="an nn.Sequential of its layers in the attribute sequential_module",
        do="set self.sequential_module, or strategy.parallel.split_points to the names of the modules that begin a "
        "stage",
    )


def cut_sequence(user: nn.Module, where: str, sizes: Sequence[int]) -> Cut:
    """Cut the nn.Sequential `where` of `user` into stages of `sizes` layers."""
    names = [f"{where}.{key}" if where else key for key in user.get_submodule(where)._modules]
    stages, start = [], 0
    for size in sizes:
        part = tuple(names[start : start + size])
        stages.append(Stage(part, (), _Chain(user, part)))
        start += size
    return Cut(where, tuple(stages), _one_input)


def _one_input(*arguments: Any, **options: Any) -> Any:
    (value,) = inspect.signature(nn.Sequential().forward).bind(*arguments, **options).args
    return value


class _Chain:
    """Calls modules one after another, looked up at each call: a wrapper may have replaced them."""

    def __init__(self, user: nn.Module, names: Sequence[str]) -> None:
        self.user, self.names = user, names

    def __call__(self, value: Any) -> Any:
        for name in self.names:
            value = self.user.get_submodule(name)(value)
        return value
