"""Patches of DeepSpeed's methods: errors that it does not report, and state that it never frees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError


def refuse_double_backward(engine: Any) -> None:
    """Refuse a backward with create_graph=True: its graph needs parameters that stage 3 has released."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    fetch = offload.pre_sub_module_backward_function

    def check_and_fetch(layer: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a gradient is computed with create_graph=True, and stage 3 releases the parameters of its graph",
                expected="a stage below 3, or another strategy, for second derivatives",
                do='choose strategy="deepspeed_stage_2" or strategy="fsdp"',
            )
        fetch(layer)

    offload.__dict__["pre_sub_module_backward_function"] = check_and_fetch


def let_zero_grad_drop_all(zero: Any) -> None:
    """Make `zero_grad` drop reduced gradients, too: at stage 2 they are not in `parameter.grad`, which it clears."""
    zero_grad, before_any = zero.zero_grad, zero.micro_step_id

    def drop_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        zero.micro_step_id = before_any
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids.clear()

    zero.zero_grad = drop_all


def zero_gradient_buffers(zero: Any) -> None:
    """Zero ZeRO's gradient buffers after a step, whose gradients would be used again for unused parameters."""
    kept = [getattr(zero, "grad_partitions_flat_buffer", None)]
    if getattr(zero, "cpu_offload", False):
        kept += [flat.grad for flat in zero.single_partition_of_fp32_groups]
        kept += getattr(zero, "accumulated_grads_in_cpu", {}).values()
    if getattr(zero, "offload_optimizer", False):
        kept += [flat.grad for flat in zero.fp32_partitioned_groups_flat]
    for tensor in kept:
        if tensor is not None:
            tensor.zero_()


def clear_model_caches() -> None:
    """Clear the caches in which stage 3 keeps models alive as long as the process."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    FWD_MODULE_STACK.clear()
    method = vars(Coordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Replace the method `name` of `owner` within the context."""
    own, missing = vars(owner), object()
    before = own.get(name, missing)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
