"""Changes of DeepSpeed's methods: what it would do wrongly, or keep for the life of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    pass


def refuse_double_backward(engine: Any) -> None:
    """Refuse a backward that is differentiated: its graph refers to parameters that stage 3 frees at once."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    fetch = offload.pre_sub_module_backward_function

    def check_and_fetch(layer: nn.Module) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a gradient is computed with create_graph=True, and stage 3 frees the parameters that its graph needs",
                expected="a stage below 3, or another strategy, for gradients of gradients",
                do='choose strategy="deepspeed_stage_2" or strategy="fsdp"',
            )
        fetch(layer)

    offload.__dict__["pre_sub_module_backward_function"] = check_and_fetch


def let_zero_grad_drop_all(zero: Any) -> None:
    """At stage 2 gradients that were sent are kept elsewhere than at their parameters, where `zero_grad` looks."""
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
    """Zero what ZeRO keeps of gradients after a step: it would step a parameter again that gets none in the next."""
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
    """Empty what stage 3 remembers of models for as long as the process lives."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    FWD_MODULE_STACK.clear()
    method = vars(Coordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Have `owner` use another method for a while."""
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
