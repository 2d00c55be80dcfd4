"""State that an engine of DeepSpeed's has or will read from a folder; see [Note: state in the engine] in `native`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.api.state_fit import check_optimizer_state, check_weights
from stratagem.checkpoint.state_checks import on_all_ranks
from stratagem.errors import CheckpointError
from stratagem_deepspeed import consolidation, folder
from stratagem_deepspeed import state as logical

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_deepspeed.options import DeepSpeedOptions


class EngineState(dict[str, Any]):
    """Names and shapes of the tensors of a state, whose values are in `engine` or in the folder `path`."""

    def __init__(
        self, tensors: Mapping[str, Any], facts: dict[str, Any], engine: Any = None, path: Path | None = None
    ) -> None:
        super().__init__(tensors)
        self.facts, self.engine, self.path = facts, engine, path


def of_model(
    options: DeepSpeedOptions, engine: Any, zero: Any, groups: list[list[str]], module: nn.Module, run: RunContext
) -> EngineState:
    """Return the state of the model in `engine`, without gathering tensors."""
    excludes = options.exclude_frozen_parameters
    frozen = {name for name, parameter in module.named_parameters() if excludes and not parameter.requires_grad}
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if name not in frozen}
    tensors = {
        name: [list(logical.shape_of(value)), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, torch.Tensor) else None
        for name, value in own.items()
    }  # fmt: skip
    facts = {
        "stage": options.zero_stage,
        "world_size": run.world_size,
        "dtype": str(options.engine_dtype(run.policy) or torch.float32).removeprefix("torch."),
        "tensors": tensors,
        "groups": groups,
        "sizes": _sizes(zero),
        "without_frozen": excludes,
        "prefix": "" if engine is None else _prefix(engine, module),
        "tied": _tied(module),
        "untrained": _in_no_optimizer(module, groups),
    }
    return EngineState(without_values(tensors), facts, engine=engine)


def load_model(held: EngineState, engine: Any, zero: Any, module: nn.Module, strict: bool, run: RunContext) -> None:
    """Load the weights of `held` into the model. Collective.

    An engine that has not stepped yet reads the whole folder: weights, optimizer, scheduler, loss scale.

    Raises:
        CheckpointError: they belong to another model.
    """
    own = {name: getattr(value, "shape", None) for name, value in module.state_dict(keep_vars=True).items()}
    for name, value in module.named_parameters(remove_duplicate=False):
        own[name] = logical.shape_of(value)
    check_weights(own, held, strict)
    assert held.path is not None, "read from a folder"
    if run.optimizers and engine.global_steps == 0:
        _read_into(engine, held, zero, strict, run)
        return
    read = folder.as_data()(functools.partial(consolidation.weights, held.path, folder.TAG, held.facts))
    whole = on_all_ranks(run.collectives, read)
    logical.load_model_state(whole, module, zero, strict)


def load_optimizer(
    held: EngineState, engine: Any, zero: Any, groups: list[list[str]], strict: bool, run: RunContext
) -> None:
    """Load the optimizer's state of `held` into `engine`, unless it was read with the weights. Collective.

    Raises:
        CheckpointError: it belongs to other parameters or other groups.
    """
    saved = {"state": {}, "param_groups": [{"params": group} for group in held.facts["groups"]]}
    check_optimizer_state(saved, [name for group in groups for name in group], [len(group) for group in groups])
    if held.engine is not engine:
        _read_into(engine, held, zero, strict, run)


def _read_into(engine: Any, held: EngineState, zero: Any, strict: bool, run: RunContext) -> None:
    error = None
    if held.facts["sizes"] != _sizes(zero):
        error = CheckpointError(
            f"{held.path} holds flat tensors of {held.facts['sizes']} numbers",
            expected=f"{_sizes(zero)} as in this run",
            do="resume with the sub_group_size, groups and model that wrote it",
        )  # fmt: skip
    run.collectives.fail_together(error)
    try:
        with folder.as_data():
            engine.load_checkpoint(str(held.path), tag=folder.TAG, load_module_strict=strict)
    except Exception as caught:  # noqa: BLE001 - torch and DeepSpeed raise various errors
        error = consolidation.unreadable(held.path or Path(), caught)
        error.__cause__ = caught
    run.collectives.fail_together(error)
    held.engine = engine


def _sizes(zero: Any) -> list[int]:
    """Return the number of elements of each flat tensor of this rank."""
    return [] if zero is None else [flat.tensor.numel() for flat in logical.flats(zero, write=False)]


def _prefix(engine: Any, module: nn.Module) -> str:
    return next(f"{name}." for name, part in engine.module.named_modules() if part is module)


def _tied(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, with the first name of each."""
    names = parameter_names(module)
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every if names[id(parameter)] != name}


def _in_no_optimizer(module: nn.Module, groups: list[list[str]]) -> list[str]:
    known = {name for group in groups for name in group}
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in known]


def without_values(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors on the meta device with the given shapes and dtypes."""
    return {
        name: None if entry is None else torch.empty(entry[0], dtype=getattr(torch, entry[1]), device="meta")
        for name, entry in tensors.items()
    }
