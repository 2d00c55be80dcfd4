"""Checks before an engine is made: models and optimizers with which DeepSpeed fails or trains wrongly."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.errors import ConfigError
from stratagem_deepspeed.state import shape_of

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Dtypes that fp32 masters represent exactly.
_MASTERED = (torch.float32, torch.bfloat16, torch.float16)


def check_dtypes(module: nn.Module, engine_dtype: torch.dtype | None) -> None:
    """Refuse parameters of dtypes that the engine does not train.

    Args:
        engine_dtype: the 16-bit dtype to which the engine converts all parameters; None for 32 bits.

    Raises:
        ConfigError: there is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.dtype not in _MASTERED and (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, and DeepSpeed steps fp32 copies",
                expected="real parameters of at most 32 bits", do="convert it, or choose another strategy",
            )  # fmt: skip
        if engine_dtype is None and parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}, and DeepSpeed takes one dtype for all parameters",
                expected="torch.float32 without a precision of 16 bits",
                do='convert it with .float(), or set precision="bf16-mixed"',
            )


def check_sizes(module: nn.Module) -> None:
    """Refuse parameters without elements, which stage 3 cannot partition.

    Raises:
        ConfigError: there is one.
    """
    for name, parameter in module.named_parameters():
        if shape_of(parameter).numel() == 0:
            raise ConfigError(
                f"parameter {name!r} has no elements (shape {tuple(shape_of(parameter))}), and stage 3 gives each rank "
                "a partition of every parameter",
                expected="at least one element", do='leave the parameter out, or choose strategy="deepspeed_stage_2"',
            )  # fmt: skip


def check_integers(optimizer: Any, module: nn.Module) -> None:
    """Refuse an optimizer with parameters that are not floating-point numbers.

    Raises:
        ConfigError: there is one.
    """
    names = parameter_names(module)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise ConfigError(
                f"{type(optimizer).__name__} has the parameter {names.get(id(parameter), '?')!r} of {parameter.dtype}",
                expected="floating-point parameters, of which ZeRO steps fp32 copies",
                do="pass only parameters with requires_grad to the optimizer",
            )


def check_same_optimizers(optimizers: list[Any], module: nn.Module, run: RunContext) -> None:
    """Refuse different optimizers on different ranks. Collective.

    Raises:
        ConfigError: two ranks differ; on all ranks.
    """
    names = parameter_names(module)
    mine = [_described(optimizer, names) for optimizer in optimizers]
    every = run.collectives.all_gather_object(mine)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            one, other = _first_difference(every[0], theirs)
            raise ConfigError(
                f"configure_optimizers returned {other} on rank {rank} and {one} on rank 0",
                expected="the same on all ranks, each of which steps a partition",
                do="make an optimizer that does not depend on the rank",
            )


def _described(optimizer: Any, names: dict[int, str]) -> list[str]:
    """Return the class, the parameters of each group, and the options of each group."""
    described = [type(optimizer).__name__]
    for number, group in enumerate(optimizer.param_groups):
        parameters = ", ".join(names.get(id(parameter), "?") for parameter in group["params"])
        described.append(f"group {number} with {parameters}")
        described += [f"{key}={value!r} in group {number}" for key, value in group.items() if key != "params"]
    return described


def _first_difference(one: list[list[str]], other: list[list[str]]) -> tuple[str, str]:
    if len(one) != len(other):
        return f"{len(one)} optimizers", f"{len(other)} optimizers"
    for mine, theirs in zip(one, other, strict=True):
        for here, there in zip(mine, theirs, strict=False):
            if here != there:
                return here, there
    return "fewer parameter groups", "more parameter groups"


#: Optimizers that compute with whole matrices or layers.
_WHOLE_LAYERS = {"adafactor", "muon", "shampoo", "soap", "lars", "lamb", "novograd"}


def check_elementwise(optimizer: Any) -> None:
    """Refuse an optimizer that computes with whole matrices or layers: ZeRO flattens and partitions them.

    Raises:
        ConfigError: it is known to do so.
    """
    if type(optimizer).__name__.lower() in _WHOLE_LAYERS and not type(optimizer).__module__.startswith("deepspeed."):
        raise _whole_layers(type(optimizer).__name__)


def of_whole_layers(error: BaseException) -> BaseException:
    """Return the error of `check_elementwise` for that of torch's Muon, which looks at partitions under stage 3."""
    is_muons = isinstance(error, ValueError) and str(error).startswith("Muon only supports 2D")
    return _whole_layers("Muon") if is_muons else error


def _whole_layers(name: str) -> ConfigError:
    return ConfigError(
        f"configure_optimizers returned {name}, which computes with whole layers, and ZeRO gives it flat partitions of "
        "them",
        expected="an elementwise optimizer, such as AdamW",
        do='use such an optimizer, or a strategy that steps whole parameters, such as "ddp" or "fsdp"',
    )


def check_groups(optimizer: Any) -> None:
    """Refuse a parameter group without trainable parameters, of which ZeRO cannot make a flat tensor.

    Raises:
        ConfigError: there is one.
    """
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            raise ConfigError(
                f"parameter group {number} of {type(optimizer).__name__} has no trainable parameter",
                expected="at least one in each group, which ZeRO partitions",
                do="leave the group out of configure_optimizers",
            )


def check_tested(optimizer: Any, config: dict[str, Any], origin: str) -> None:
    """Refuse an optimizer that DeepSpeed would refuse, and name the key that allows it.

    Raises:
        ConfigError: DeepSpeed has not tested the optimizer, and the configuration does not allow untested ones.
    """
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    if not config.get("zero_allow_untested_optimizer") and not is_zero_supported_optimizer(optimizer):
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}, which DeepSpeed has not tested with ZeRO",
            expected="Adam or AdamW",
            do=f'set "zero_allow_untested_optimizer": true in {origin} if the optimizer is elementwise',
        )


def the_only(optimizers: list[Any], configured: str | None, run: RunContext) -> Any:
    """Return the optimizer of a run; None if DeepSpeed makes it, as its configuration says, which goes first.

    Raises:
        ConfigError: there are several, or a scheduler of the one that is dropped.
    """
    if len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed steps one",
            expected="one optimizer, with a parameter group instead of each",
        )
    if optimizers and configured is not None:
        dropped = f"{type(optimizers[0]).__name__} of configure_optimizers"
        if schedulers := run.lr_scheduler_configs:
            raise ConfigError(
                f"there are two optimizers: {dropped}, with {type(schedulers[0].scheduler).__name__}, and {configured}",
                expected="a scheduler of the optimizer that trains",
                do="drop the optimizer of the configuration, or put its scheduler there, too",
            )
        if run.is_global_zero:
            warnings.warn(f"{dropped} is not used: {configured} is", stacklevel=2)
        return None
    return optimizers[0] if optimizers else None
