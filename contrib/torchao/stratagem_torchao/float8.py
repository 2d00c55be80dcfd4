"""Precision `fp8`: matrix products of linear layers in 8 bits, everything else in bf16."""

from __future__ import annotations

import contextlib
import fnmatch
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
#: In `filter_fqns`, as in torchtitan: the layers that torchao takes for too small to be faster in fp8.
SMALL = "auto_filter_small_kn"


@define(eq=False, kw_only=True)
class Float8Precision(Precision):
    """Compute linear layers in fp8 with torchao, and the rest in bf16.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Parameters keep their names: checkpoints can be loaded
    under any precision.
    """

    replaces_layers: ClassVar[bool] = True

    #: `tensorwise` has one scale for a tensor and is fastest, `rowwise` one for each row, which is more accurate;
    #: `rowwise_with_gw_hp` also computes the gradients of weights in bf16, and is the most accurate.
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    #: Round to fp8 and multiply in the wider dtype: the rounding of fp8 without its speed, on any device.
    emulate: bool = False
    #: Patterns of names of the linear layers to compute in fp8, such as `blocks.*.feed`; none is all of them.
    modules: list[str] = field(factory=list)
    #: Parts of names of linear layers to keep in bf16: the last layer often gains accuracy. `auto_filter_small_kn`
    #: keeps those that torchao takes for too small to be faster in fp8.
    filter_fqns: list[str] = field(factory=list)
    #: Have FSDP send weights as float8: a quarter of the bytes of fp32. Only with `tensorwise`.
    enable_fsdp_float8_all_gather: bool = False
    #: Compute the scales of all weights with one all-reduce after each optimizer step, not one for each weight in each
    #: gather.
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    #: `float32` keeps updates that bf16 loses (as `bf16-mixed` does), `bfloat16` halves the memory (as `bf16-true`).
    weights_dtype: Literal["float32", "bfloat16"] = "float32"

    #: The weights that FSDP sends as float8.
    _sent: list[Any] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        if self.enable_fsdp_float8_all_gather and self.recipe_name != "tensorwise":
            raise ConfigError(
                f"precision.fp8.enable_fsdp_float8_all_gather is True, and recipe_name is {self.recipe_name!r}",
                expected="'tensorwise': the rows of a weight that is sent have one scale",
                do="drop one of the two",
            )
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            raise ConfigError(
                "precision.fp8.precompute_float8_dynamic_scale_for_fsdp is True, and enable_fsdp_float8_all_gather is "
                "False",
                expected="both: only weights that are sent as float8 have such scales",
                do="set enable_fsdp_float8_all_gather, or drop it",
            )
        if SMALL in self.filter_fqns and self.recipe_name == "rowwise_with_gw_hp":
            raise ConfigError(
                f"precision.fp8.filter_fqns has {SMALL!r}, and recipe_name is {self.recipe_name!r}",
                expected="'tensorwise' or 'rowwise': torchao has no least sizes for others",
                do="name the layers",
            )

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
    def on_connect(self, run: RunContext) -> None:
        if not (self.emulate or _has_fp8(run.device, self.recipe_name)):
            found = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
            raise ConfigError(
                f"precision is 'fp8', and the device is {found}",
                expected=f"a GPU that multiplies fp8 matrices of recipe {self.recipe_name!r} (compute capability "
                f"{'8.9' if self.recipe_name == 'tensorwise' else '9.0'} or higher, or AMD's MI300)",
                do='use precision="bf16-mixed", or emulate=True, which rounds as fp8 does, without its speed',
            )

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        load("precision 'fp8'", 'use precision="bf16-mixed"')
        from stratagem_torchao.float8_linear import AutocastFloat8Linear, converted

        if self._is_true:
            module.bfloat16()
        layers = linear_layers(module, AutocastFloat8Linear)
        wanted, misfits = self._chosen(module, layers)
        for name in layers.keys() - wanted.keys():
            restore(layers[name])  # an earlier run had other options
        made_with = (self.recipe_name, self.emulate)
        new = [layer for layer in wanted.values() if getattr(layer, "made_with", None) != made_with]
        for layer in new:
            replace(layer, converted(layer, self.recipe_name, emulate=self.emulate))
        if new:
            note = f"; in bf16: {_misfit_words(layers, misfits)}" if misfits else ""
            run.print(f"precision 'fp8' computes {len(wanted)} of {len(layers)} linear layers in fp8{note}")

    def _chosen(self, module: nn.Module, layers: dict[str, nn.Linear]) -> tuple[dict[str, nn.Linear], list[str]]:
        """Return the layers to compute in fp8, and the names of those whose sizes fp8 does not have."""
        from torchao.float8 import _auto_filter_for_recipe

        parts = [each for each in self.filter_fqns if each != SMALL]
        kept = [name for each in parts for name in fnmatch.filter(layers, f"*{each}*") or [each]]
        chosen = select(layers, self.modules, kept, "precision.fp8", "filter_fqns")
        misfits = [name for name in chosen if _misfits(layers[name])]
        is_large = _auto_filter_for_recipe(self.recipe_name, []) if SMALL in self.filter_fqns else lambda *_: True
        wanted = {name: layers[name] for name in chosen if name not in misfits and is_large(layers[name], name)}
        if not wanted:
            raise ConfigError(
                f"precision is 'fp8', and {type(module).__name__} has {_misfit_words(layers, misfits)}",
                expected=f"a linear layer whose sizes are multiples of {MULTIPLE}"
                + (f", and large enough for {SMALL!r}" if len(misfits) < len(chosen) else ""),
                do='change the sizes, or use precision="bf16-mixed"',
            )
        return wanted, misfits

    @hookimpl(wrapper=True)
    def wrap_model(self) -> Generator[None, nn.Module, nn.Module]:
        model = yield
        if self.enable_fsdp_float8_all_gather:
            from stratagem_torchao.float8_all_gather import send_as_float8

            self._sent = send_as_float8(model)
            if not self._sent:
                raise ConfigError(
                    "precision.fp8.enable_fsdp_float8_all_gather is True, and FSDP gathers no weight in fp8",
                    expected='strategy="fsdp", without cpu_offload',
                    do="drop it",
                )
        return model

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
    def step_optimizers(self, run: RunContext) -> Generator[None, bool, bool]:
        stepped = yield
        if self.precompute_float8_dynamic_scale_for_fsdp:
            from stratagem_torchao.float8_all_gather import precompute_scales

            precompute_scales(self._sent, run.peers)
        return stepped

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
