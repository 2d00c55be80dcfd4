"""Checkpoints of the trained parameters alone, such as adapters: what they keep, and which frozen weights they need.

In place of each frozen parameter the checkpoint has its shape and a few of its values, so that a model with other
frozen weights is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from stratagem.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

#: How many values of a frozen parameter are kept.
_NUM_VALUES: Final = 16
#: Relative distance of the values of the same weights in another precision, such as bf16, and of those that were
#: rounded to 8 or 4 bits on either side (0.24 was measured; of unrelated weights it is about 1.4).
_TOLERANCE: Final = 2e-2
_TOLERANCE_OF_ROUNDED: Final = 0.5


def trained_part(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, Any]:
    """Return the entries ``state_dict`` and ``frozen`` of a checkpoint of what is trained in `module`.

    Args:
        weights: the whole logical state of `module`.

    Raises:
        ConfigError: nothing is trained, or nothing is frozen.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad and name in weights}
    if not frozen or len(frozen) == len(parameters):
        raise ConfigError(
            f"trainable_only is True, and {type(module).__name__} has "
            + ("no frozen parameters" if not frozen else "frozen parameters only"),
            expected="parameters of both kinds", do="freeze the others with requires_grad_(False), or drop it",
        )  # fmt: skip
    kept = {name: value for name, value in weights.items() if name not in frozen}
    described = {name: _described(weights[name], parameters[name]) for name in sorted(frozen)}
    return {"state_dict": kept, "frozen": described}


def check_part(
    weights: Mapping[str, Any], frozen: Mapping[str, Any] | None, own: Mapping[str, Tensor], module: nn.Module,
    strict: bool, path: Any, values: bool = True,
) -> bool:  # fmt: skip
    """Check that `module`, whose whole state is `own`, has the `frozen` weights of the checkpoint of `weights`, if any.

    Args:
        strict: `weights` and `frozen` must name all tensors of the model, and no others.
        values: `own` has values, which are compared.

    Returns:
        Whether the model has to be loaded strictly.

    Raises:
        CheckpointError: it is another model.
    """
    if frozen is None:
        return strict
    lacking = sorted(set(own) - set(weights) - set(frozen)) if strict else []
    unknown = sorted((set(weights) | set(frozen)) - set(own)) if strict else []
    if lacking or unknown:
        name, has = (unknown[0], "does not have") if unknown else (lacking[0], "has beside them")
        raise CheckpointError(
            f"{path} holds what was trained in another model: {name!r} is a tensor that this model {has}",
            expected="the model that it was trained in, with the same adapters", do="build that model, then load",
        )  # fmt: skip
    held = dict(module.named_parameters(remove_duplicate=False))
    for name in (name for name in frozen if name in own and values):
        saved, here = frozen[name], _described(own[name], held.get(name, own[name]))
        tolerance = _TOLERANCE_OF_ROUNDED if saved.get("rounded") or here["rounded"] else _TOLERANCE
        if here["shape"] != list(saved["shape"]):
            found = f"has shape {tuple(here['shape'])}, not {tuple(saved['shape'])}"
        elif _differ(here["values"], saved["values"], tolerance):
            found = "has other values"
        else:
            continue
        raise CheckpointError(
            f"{path} holds only what was trained, and the frozen {name!r} of this model {found}",
            expected="the base model that it was trained on", do="load that model's weights first, then this file",
        )  # fmt: skip
    return False


def _described(tensor: Tensor, held: Tensor) -> dict[str, Any]:
    """Describe a logical `tensor`, which is `held` in the model: as integers, if it was rounded to 8 or 4 bits."""
    found: dict[str, Any] = {"shape": list(tensor.shape), "values": [], "rounded": not held.is_floating_point()}
    known = not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_complex()
    if known and tensor.numel():
        flat = tensor.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(_NUM_VALUES, flat.numel()), dtype=torch.float64).long()
        found["values"] = flat[places.to(flat.device)].double().tolist()
    return found


def _differ(one: list[float], other: list[float], tolerance: float) -> bool:
    comparable = bool(one and other) and one != other
    return comparable and (len(one) != len(other) or not math.dist(one, other) <= tolerance * math.hypot(*other))
