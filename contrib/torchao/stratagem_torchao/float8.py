"""Precision `fp8`: matrix products of linear layers in 8 bits, everything else in bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from stratagem.api import SIXTEEN_BIT_GRADIENTS, Capabilities, Precision, PrecisionPolicy, hookimpl
from stratagem.api.batches import map_batch
from stratagem.errors import ConfigError
from stratagem_torchao.layers import linear_layers, load, replace, restore, select

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

#: A GPU multiplies fp8 matrices whose sizes are multiples of this.
MULTIPLE = 16


@define(eq=False, kw_only=True)
class Float8Precision(Precision):
    """Compute linear layers in fp8 with torchao, and the rest in bf16.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Parameters keep their names: checkpoints can be loaded
    under any precision.
    """

    replaces_layers: ClassVar[bool] = True

    #: `tensorwise` has one scale for a tensor and is fastest, `rowwise` one for each row, which is more accurate;
    #: `rowwise_with_gw_hp` also computes the gradients of weights in bf16, and is the most accurate.
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    #: Round to fp8 and multiply in the wider dtype: the rounding of fp8 without its speed. None: where the device has
    #: no fp8 matrix products.
    emulate: bool | None = None
    #: Patterns of names of the linear layers to compute in fp8, such as `blocks.*.feed`; none is all of them.
    modules: list[str] = field(factory=list)
    #: Patterns of names of linear layers to keep in bf16: the last layer often gains accuracy.
    skip: list[str] = field(factory=list)
    #: `float32` keeps updates that bf16 loses (as `bf16-mixed` does), `bfloat16` halves the memory (as `bf16-true`).
    weights_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # the option decides
        return Capabilities(provides={SIXTEEN_BIT_GRADIENTS} if self._is_true else ())

    @property
    def _is_true(self) -> bool:
        """Whether everything is in bf16, without autocast."""
        return self.weights_dtype == "bfloat16"

    def policy(self) -> PrecisionPolicy:
        dtype = torch.bfloat16
        if self._is_true:
            return PrecisionPolicy(param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
        return PrecisionPolicy(compute_dtype=dtype)

    def preload(self, device_type: str) -> None:
        if device_type == "cpu":  # it looks at GPUs
            load("precision 'fp8'", 'use precision="bf16-mixed"')

    # --- The module ------------------------------------------------------------------------------------------------

    @hookimpl
    def init_context(self) -> AbstractContextManager[Any] | None:
        return _bf16_by_default() if self._is_true else None

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        load("precision 'fp8'", 'use precision="bf16-mixed"')
        from stratagem_torchao.float8_linear import AutocastFloat8Linear, converted

        if self._is_true:
            module.bfloat16()
        layers = linear_layers(module, AutocastFloat8Linear)
        chosen = select(layers, self.modules, self.skip, "precision.fp8")
        misfits = [name for name in chosen if _misfits(layers[name])]
        if len(misfits) == len(chosen):
            raise ConfigError(
                f"precision is 'fp8', and {type(module).__name__} has {_misfit_words(layers, misfits)}",
                expected=f"a linear layer whose sizes are multiples of {MULTIPLE}",
                do='change the sizes, or use precision="bf16-mixed"',
            )
        emulate = not _has_fp8(run.device, self.recipe) if self.emulate is None else self.emulate
        if not emulate and run.device.type == "cuda" and not _has_fp8(run.device, self.recipe):
            raise ConfigError(
                f"precision.fp8.emulate is False, and {torch.cuda.get_device_name(run.device)} has no fp8 products",
                expected=f"a GPU that has them for recipe {self.recipe!r}",
                do='drop it to emulate them, or use precision="bf16-mixed"',
            )
        wanted = {name: layers[name] for name in chosen if name not in misfits}
        for name in layers.keys() - wanted.keys():
            restore(layers[name])  # an earlier run had other options
        new = [layer for layer in wanted.values() if getattr(layer, "made_with", None) != (self.recipe, emulate)]
        for layer in new:
            replace(layer, converted(layer, self.recipe, emulate=emulate))
        if new:
            note = f", emulated on the device {run.device.type}" if emulate and self.emulate is None else ""
            note += f"; in bf16: {_misfit_words(layers, misfits)}" if misfits else ""
            run.print(f"precision 'fp8' computes {len(wanted)} of {len(layers)} linear layers in fp8{note}")

    # --- The step --------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, run: RunContext) -> AbstractContextManager[Any]:
        if self._is_true:
            return _bf16_by_default()
        return torch.autocast(run.device.type, torch.bfloat16, cache_enabled=not run.manual)

    @hookimpl(wrapper=True)
    def backward(self, run: RunContext) -> Generator[None, bool, bool]:
        with torch.autocast(run.device.type, enabled=False):
            return (yield)

    @hookimpl(wrapper=True)
    def transfer_batch(self) -> Generator[None, Any, Any]:
        batch = yield
        return map_batch(batch, _in_bf16) if self._is_true else batch


def _has_fp8(device: torch.device, recipe: str) -> bool:
    """Return whether `device` is a GPU that multiplies fp8 matrices."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= ((8, 9) if recipe == "tensorwise" else (9, 0))


def _misfits(layer: nn.Linear) -> bool:
    return bool(layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)


def _misfit_words(layers: dict[str, nn.Linear], misfits: list[str]) -> str:
    if not misfits:
        return "no linear layer to compute in fp8"
    sizes = [f"{name} ({layers[name].in_features} x {layers[name].out_features})" for name in misfits]
    more = f" and {len(sizes) - 5} more" if len(sizes) > 5 else ""
    return f"{', '.join(sizes[:5])}{more}, not multiples of {MULTIPLE}"


@contextlib.contextmanager
def _bf16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_bf16(leaf: Any) -> Any:
    data = leaf.data if isinstance(leaf, PackedSequence) else leaf
    return leaf.to(torch.bfloat16) if isinstance(data, torch.Tensor) and data.is_floating_point() else leaf
