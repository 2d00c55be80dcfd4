"""Cut a model into stages, as the options of the strategy say."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_parallel.pipeline.balance import sizes_of_stages
from stratagem_parallel.pipeline.ghosts import Cut, called_module

if TYPE_CHECKING:
    from stratagem.api import Collectives


def cut(user: nn.Module, options: Any, stages: int, among: Collectives, device: torch.device | None = None) -> Cut:
    """Cut `user` into stages. Collective where `balance` measures times.

    Args:
        options: of the strategy.
        among: the ranks of the pipeline.
        device: to measure times on; by default the CPU.

    Raises:
        ConfigError: an option does not fit the model.
    """
    if options.split_points is not None:
        points = list(options.split_points)
        return Cut(user, called_module(user, points), points)
    where = pipelined_layers(user, stages)
    layers, example = layers_of(user.get_submodule(where)), getattr(user, "example_input_array", None)
    sizes = sizes_of_stages(options.balance, list(layers.values()), stages, example, among, device)
    keys = list(layers)
    points = [f"{where}.{keys[start]}" if where else keys[start] for start in accumulate(sizes[:-1])]
    is_called = user.get_submodule(where) in (getattr(user, "sequential_module", None), *user.children())
    return Cut(user, where if is_called else called_module(user, points), points)


def pipelined_layers(user: nn.Module, stages: int) -> str:
    """Return the name of the list of layers that is cut.

    It is `sequential_module`, or the only nn.Sequential that `user` has; else the largest list within it.

    Raises:
        ConfigError: there is none.
    """
    given = getattr(user, "sequential_module", None)
    if isinstance(given, nn.Sequential):
        names: dict[nn.Module, str] = {module: name for name, module in user.named_modules()}
        return names[given]
    if given is not None:
        raise ConfigError(
            f"{type(user).__name__}.sequential_module is a {type(given).__name__}", expected="an nn.Sequential",
            do="build it of its layers, or set strategy.parallel.split_points",
        )  # fmt: skip
    found = [name for name, child in user.named_children() if isinstance(child, nn.Sequential)]
    if len(found) == 1:
        return found[0]
    sizes = {
        name: sum(each.numel() for each in module.parameters())
        for name, module in user.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(layers_of(module)) >= stages
    }
    if any(sizes.values()):
        largest: str = max(sizes, key=sizes.__getitem__)
        return largest
    what = f"has {len(found)} nn.Sequential ({', '.join(found)})" if found else "has no nn.Sequential"
    raise ConfigError(
        f"{type(user).__name__} {what} and no list of {stages} layers, and strategy.parallel.pipeline cuts one into "
        "stages",
        expected="an nn.Sequential of its layers in the attribute sequential_module, or an nn.ModuleList",
        do="set self.sequential_module, or strategy.parallel.split_points to the names of the modules that begin a "
        "stage",
    )


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers in a list by their keys."""
    return {key: layer for key, layer in module._modules.items() if layer is not None}
