"""Initialize a model that was built under `meta_init`: see [Note: recorded initialization]."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from stratagem.api.parameters import replace_parameter
from stratagem.errors import ConfigError
from stratagem_deferred_init.meta_init import INITIAL, RESETS, is_cut


class Materializer:
    """Allocates and initializes the modules of one model; keeps tied parameters tied.

    Args:
        root: the model; its parameters' names decide the random numbers.
        seed: the same on all ranks.
        device: where to allocate the parameters.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self._names = {module: name for name, module in root.named_modules()}
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def fill(self, part: nn.Module) -> None:
        """Allocate and initialize all parameters of `part` that are on the meta device.

        Raises:
            ConfigError: a parameter was never initialized, and its module has no ``reset_parameters``.
        """
        for module in part.modules():
            if any(parameter is not None and parameter.is_meta for parameter in module._parameters.values()):
                self._fill_one(module)

    def _fill_one(self, module: nn.Module) -> None:
        tied, fresh, cut = [], [], []
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) in self._made:
                filled = self._made[id(parameter)][1]
                tied.append((filled, filled.detach().clone()))
            elif is_cut(parameter):
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                cut.append((name, parameter))
                fresh.append((name, filled, getattr(parameter, INITIAL, None)))
            else:
                values = torch.empty_like(parameter, device=self.device)
                filled = type(parameter)(values, requires_grad=parameter.requires_grad)
                self._made[id(parameter)] = (parameter, filled)  # keeps the first alive: no other gets its id
                fresh.append((name, filled, getattr(parameter, INITIAL, None)))
                replace_parameter(filled, parameter)
                filled.__dict__.pop(INITIAL, None)
            setattr(module, name, filled)
        self._initialize(module, tied, fresh)
        for name, parameter in cut:
            filled = module._parameters[name] = _cut_like(module._parameters[name], parameter)
            self._made[id(parameter)] = (parameter, filled)

    def _initialize(self, module: nn.Module, tied: list[Any], fresh: list[Any]) -> None:
        """Give the `fresh` parameters of `module` their initial values; `tied` ones keep those that they have."""
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.no_grad():
            if all(initial and all(operation.repeatable for operation in initial) for _, _, initial in fresh):
                for name, filled, initial in fresh:
                    self._repeat(module, name, filled, initial or ())
                return
            self._reset(module, fresh[0][0])
            for name, filled, initial in fresh:
                self._repeat(module, name, filled, [operation for operation in initial or () if not operation.in_reset])
            for filled, before in tied:
                filled.copy_(before)  # tied parameters keep the values of the first module

    def _repeat(self, module: nn.Module, name: str, filled: nn.Parameter, initial: Any) -> None:
        self._seed(f"{self._names.get(module, '')}.{name}")
        for operation in initial:
            operation(filled)

    def _reset(self, module: nn.Module, empty: str) -> None:
        reset: Any = next((getattr(module, name) for name in RESETS if callable(getattr(module, name, None))), None)
        if reset is None:
            raise ConfigError(
                f"{type(module).__name__} has a parameter {empty!r} without values and no reset_parameters",
                expected="parameters that are initialized while the model is built, or a method that initializes them",
                do="initialize it in the module's constructor",
            )
        self._seed(self._names.get(module, ""))
        reset()

    def _seed(self, name: str) -> None:
        """Seed the next random numbers by `name`; for parameters on the CPU, do not seed the generators of devices."""
        seed = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "big")
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)


def _cut_like(whole: Any, model: Any) -> nn.Parameter:
    """Return this rank's part of `whole`, cut as the DTensor `model`. No rank waits for another."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(whole.detach(), model.device_mesh, model.placements, src_data_rank=None)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
