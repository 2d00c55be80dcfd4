"""Check that a saved state fits the model and the optimizer that load it; copy it to where it belongs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_optimizer_state(logical: dict[str, Any], names: list[str], sizes: list[int]) -> None:
    """Check that `logical` belongs to an optimizer of the parameters `names`, in groups of `sizes`.

    Raises:
        CheckpointError: it belongs to other parameters or other groups.
    """
    saved = [group["params"] for group in logical["param_groups"]]
    _check_same("optimizer state", "parameters", [name for group in saved for name in group], names)
    if [len(group) for group in saved] != sizes:
        raise CheckpointError(
            f"optimizer state has parameter groups of sizes {[len(group) for group in saved]}",
            expected=f"{sizes} as in this run's optimizer",
            do="resume with the optimizer that wrote it, or load only the weights",
        )


def taken_out(entries: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a dict and remove them from it, so that each is freed once the caller has used it."""
    for key in list(entries):
        yield key, entries.pop(key)


def own_copy(value: Any, parameter: Any) -> Any:
    """Return `value`; a copy if it is a tensor on its parameter's device, which the optimizer would keep."""
    if isinstance(value, torch.Tensor) and value.device == parameter.device:
        return value.clone()
    return value


def load_weights(module: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Put `state` into `module`.

    Raises:
        CheckpointError: names or shapes differ (names: only if `strict`, or if none fits).
    """
    check_weights({name: getattr(value, "shape", None) for name, value in module.state_dict().items()}, state, strict)
    module.load_state_dict(state, strict=strict)


def check_weights(shapes: Mapping[str, Any], state: Mapping[str, Any], strict: bool = True) -> None:
    """Check that `state` fits a model whose tensors have `shapes`; None is the shape of values that are not tensors.

    Raises:
        CheckpointError: names or shapes differ (names: only if `strict`, or if none fits).
    """
    if shapes and not shapes.keys() & state.keys():
        raise _nothing_fits(list(state), list(shapes))
    if strict:
        way_out = "or set strict_loading = False on the module (strict=False) to load what fits"
        _check_same("model state", "tensors", list(state), list(shapes), way_out)
    for name in [name for name in shapes if name in state]:
        mine, theirs = shapes[name], getattr(state[name], "shape", None)
        if mine != theirs:
            raise CheckpointError(
                f"model state {name!r} has shape {tuple(theirs or ())}",
                expected=f"{tuple(mine or ())} as in this model",
                do="load it into the model that wrote it",
            )


def _nothing_fits(saved: list[str], own: list[str]) -> CheckpointError:
    """Return an error that names what `saved` names begin with, and how they become those of the model."""
    old, new = (same[: same.rfind(".") + 1] for same in map(os.path.commonprefix, (saved, own)))
    end = os.path.commonprefix((f".{old}"[::-1], f".{new}"[::-1]))[::-1].partition(".")[2]  # noqa: RUF071 - no paths
    old, new = old.removesuffix(end), new.removesuffix(end)
    fits = not {new + name.removeprefix(old) for name in saved}.isdisjoint(own)
    rename = f"rename them: `stratagem checkpoint convert FILE NEW --rename '{old or '^'}={new}'`"
    begin = f"all begin with {old!r}" if old else f"are such as {next(iter(saved), None)!r}"
    return CheckpointError(
        f"model state has no tensor of this model: {f'its {len(saved)} names {begin}' if saved else 'it is empty'}",
        expected=f"names such as {own[0]!r}", do=rename if fits else "load it into the model that wrote it",
    )  # fmt: skip


def _check_same(what: str, items: str, found: Iterable[str], expected: Iterable[str], way_out: str = "") -> None:
    found_set, expected_set = set(found), set(expected)
    missing, unknown = sorted(expected_set - found_set), sorted(found_set - expected_set)
    if missing or unknown:
        parts = [f"lacks {_some(missing)}" if missing else "", f"has {_some(unknown)}" if unknown else ""]
        raise CheckpointError(
            f"{what} {' and '.join(part for part in parts if part)}",
            expected=f"the {items} of this model",
            do=f"load it into the model that wrote it, {way_out}".rstrip(", "),
        )


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
