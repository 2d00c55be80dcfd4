"""Build a model without its values, and give it values later, part by part, the same at every number of processes.

A model that does not fit one process must not exist whole for a moment either. Under `without_values` parameters are
made on torch's meta device (buffers stay real: they are small and often computed). `give_values` then lets each module
fill its own parameters with ``reset_parameters``, with random numbers that depend on the seed and on the module's name
alone, so that it does not matter who fills which part, or when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError


@contextmanager
def without_values() -> Iterator[None]:
    """Within: parameters of modules that are built have shapes and dtypes, and no memory."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def has_no_values(module: nn.Module) -> bool:
    """Whether any parameter of `module` was made under `without_values` and has not been given values."""
    return any(parameter.is_meta for parameter in module.parameters())


class Filler:
    """Gives values to the parts of one model; keeps tied parameters tied.

    Args:
        root: the model; its modules' names decide the random numbers.
        seed: the same on all ranks.
        device: where the values are to be.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._names = {module: name for name, module in root.named_modules()}
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def fill(self, part: nn.Module) -> None:
        """Give values to all parameters of `part` that have none.

        Raises:
            ConfigError: a module has parameters of its own and no ``reset_parameters`` to fill them.
        """
        for module in part.modules():
            if any(parameter is not None and parameter.is_meta for parameter in module._parameters.values()):
                self._fill_one(module)

    def _fill_one(self, module: nn.Module) -> None:
        reset: Any = getattr(module, "reset_parameters", None)
        if not callable(reset):
            empty = next(name for name, parameter in module._parameters.items() if parameter is not None)
            raise ConfigError(
                f"{type(module).__name__} has a parameter {empty!r} and no reset_parameters",
                expected="a method that fills its own parameters: the model was built without values",
                do="define it, and call it at the end of __init__",
            )
        tied = []
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) in self._made:
                filled = self._made[id(parameter)][1]
                tied.append((filled, filled.detach().clone()))
            else:
                values = torch.empty_like(parameter, device=self.device)
                filled = type(parameter)(values, requires_grad=parameter.requires_grad)
                self._made[id(parameter)] = (parameter, filled)  # the empty one stays alive, or its id could come again
            module._parameters[name] = filled
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(self._seed_of(module))
            reset()
            for filled, values in tied:
                filled.copy_(values)  # the module that came first decides

    def _seed_of(self, module: nn.Module) -> int:
        text = f"{self.seed}/{self._names.get(module, '')}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
