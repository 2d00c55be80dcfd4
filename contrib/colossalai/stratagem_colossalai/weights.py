"""What a model was before an engine changed it: dtypes, frozen parameters, and the names of parameters in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.errors import ConfigError

#: Dtypes that fp32 masters represent exactly.
_MASTERED = (torch.float32, torch.bfloat16, torch.float16)
#: Optimizers that compute with whole matrices or layers; engines step flat shards.
_WHOLE_LAYERS = {"adafactor", "muon", "shampoo", "soap", "lars", "lamb", "novograd", "came", "galoreadamw8bit"}


class Originals:
    """Dtypes and frozen parameters of `module` before an engine converts them."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._dtypes = {name: value.dtype for name, value in _tensors(module)}
        rounded = dtype in (torch.float16, torch.bfloat16)
        #: Frozen parameters by name, where the engine rounds them.
        self._frozen = {
            name: parameter.detach().cpu().clone()
            for name, parameter in module.named_parameters()
            if rounded and not parameter.requires_grad
        }

    def widened(self, name: str, value: Any) -> Any:
        """Return the tensor `value`, which is in the state under `name`, in the dtype that it had."""
        if name in self._frozen:
            return self._frozen[name]
        if isinstance(value, torch.Tensor) and name in self._dtypes:
            return value.detach().to(self._dtypes[name])
        return value

    def remember(self, name: str, value: torch.Tensor) -> None:
        """Note that `value` was loaded under `name`."""
        if name in self._frozen:
            self._frozen[name] = value.detach().cpu().to(self._dtypes[name]).clone()

    def restore(self, module: nn.Module) -> None:
        """Convert the tensors of `module` to the dtypes that they had."""
        for name, value in _tensors(module):
            value.data = (
                self._frozen[name].to(value.device) if name in self._frozen else value.data.to(self._dtypes[name])
            )


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def check_parameters(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse parameters that the engine with `dtype` (None: fp32) would round or cannot shard.

    Raises:
        ConfigError: there is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.dtype not in _MASTERED:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, and Colossal-AI steps fp32 copies",
                expected="real parameters of at most 32 bits",
                do='convert it, or choose strategy="ddp"',
            )
        if dtype is None and parameter.dtype is not torch.float32:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, and Colossal-AI takes one dtype for all parameters",
                expected="torch.float32 without a precision of 16 bits",
                do='convert it with .float(), or set precision="bf16-mixed"',
            )
        if parameter.numel() == 0:
            raise ConfigError(
                f"parameter {name!r} has no elements, and Colossal-AI shards every parameter",
                expected="at least one element",
                do='leave the parameter out, or choose strategy="ddp"',
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise ConfigError(
                f"{name or type(part).__name__} has sparse gradients, and Colossal-AI flattens gradients",
                expected="dense gradients",
                do=f'set sparse=False for {name or "it"}, or choose strategy="ddp"',
            )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step flat shards of parameters.

    Raises:
        ConfigError: it computes with whole layers, or a group has nothing to shard.
    """
    kind = type(optimizer).__name__
    if kind.lower() in _WHOLE_LAYERS:
        raise ConfigError(
            f"configure_optimizers returned {kind}, which computes with whole layers, and Colossal-AI gives it flat "
            "shards of them",
            expected="an elementwise optimizer, such as AdamW",
            do='use such an optimizer, or choose strategy="ddp"',
        )
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise ConfigError(
                f"parameter group {number} of {kind} has no trainable parameter",
                expected="at least one in each group, which Colossal-AI shards",
                do="leave the group out of configure_optimizers",
            )


def group_names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the parameters in each group of `optimizer`."""
    names = parameter_names(module)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


class EngineOptimizer(torch.optim.Optimizer):
    """An engine's optimizer as a torch optimizer: the groups and state of the user's, the engine's `zero_grad`."""

    def __init__(self, engine: Any) -> None:  # not the base class's: groups and state are the engine's
        self.__dict__["engine"], self.__dict__["_opt_called"] = engine, True

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.engine.optimizer.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.engine.optimizer.optim.state

    def step(self, closure: Any = None) -> Any:
        return self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.drop_gradients()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["engine"].optimizer.optim, name)
