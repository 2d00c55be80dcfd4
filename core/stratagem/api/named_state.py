"""Logical state: tensors by the names a user would use, free of wrappers, ranks and engines.

[Note: logical optimizer state]
torch numbers the parameters of an optimizer; the numbers mean nothing in another process layout. Logical state keys by
parameter name instead::

    {"state": {"net.0.weight": {"momentum_buffer": ...}}, "param_groups": [{"lr": 0.1, "params": ["net.0.weight"]}]}

so that any strategy at any world size can read what any other wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.api.state_fit import check_optimizer_state, own_copy, taken_out

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by ``id``; a tied parameter has the name it was first registered under."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def logical_optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the state of `optimizer` keyed by the parameter names of `module`."""
    names = _names_in_order(optimizer, module)
    physical = optimizer.state_dict()
    return {
        "state": {names[number]: entry for number, entry in physical["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in physical["param_groups"]
        ],
    }


def physical_optimizer_state(logical: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return `logical` in the form that ``optimizer.load_state_dict`` accepts.

    Its tensors have memory of their own, since an optimizer keeps them and those of `logical` may be mapped from a
    file. Entries are taken out of ``logical["state"]``, so that each is freed once it is copied.

    Raises:
        CheckpointError: the state belongs to other parameters or other groups.
    """
    names = _names_in_order(optimizer, module)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    check_optimizer_state(logical, names, sizes)
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in logical["param_groups"]]
    state = {
        numbers[name]: {key: own_copy(value, parameters[numbers[name]]) for key, value in entry.items()}
        for name, entry in taken_out(logical["state"])
    }
    return {"state": state, "param_groups": groups}


def _names_in_order(optimizer: Optimizer, module: nn.Module) -> list[str]:
    names = parameter_names(module)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]
