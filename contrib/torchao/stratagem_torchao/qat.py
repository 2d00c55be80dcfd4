"""Callback `int8_qat`: train with the rounding of an int8 or int4 model, and convert the module afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field
from torch import nn

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_torchao.layers import linear_layers, load, replace, restore, select
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class Int8QAT(Callback):
    """Round weights and inputs of linear layers to integers in forward; gradients ignore the rounding.

    Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR
    2018. Parameters stay in their dtype, under their names.
    """

    replaces_layers: ClassVar[bool] = True

    #: Bits of the weights: 4 halve the converted model again, and cost accuracy.
    weight_bits: Literal[4, 8] = 8
    #: Also round each token's inputs to int8, as integer kernels need; False is for kernels that only load integers.
    activations: bool = True
    #: How many weights of a row have one scale: fewer are more accurate and need more bytes. None is a whole row.
    group_size: int | None = field(default=None, validator=at_least(1))
    #: Patterns of names of the linear layers to round, such as `blocks.*.feed`; none is all of them.
    modules: list[str] = field(factory=list)
    #: Patterns of names of linear layers to leave as they are.
    skip: list[str] = field(factory=list)

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        load("callback 'int8_qat'", "drop the callback", "torchao.quantization.qat")
        from torchao.quantization.qat.fake_quantize_config import _infer_fake_quantize_configs
        from torchao.quantization.qat.linear import FakeQuantizedLinear

        configs = _infer_fake_quantize_configs(self._config())
        chosen = self._chosen(module, FakeQuantizedLinear)
        layers = linear_layers(module, FakeQuantizedLinear)
        for name in layers.keys() - chosen.keys():
            restore(layers[name])  # an earlier run chose it
        made_with = (self.weight_bits, self.activations, self.group_size)
        for layer in chosen.values():
            if layer.__dict__.get("made_with") != made_with:
                shape = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
                new = FakeQuantizedLinear.from_linear(shape, *configs)
                new.__dict__["made_with"] = made_with
                replace(layer, new)

    def convert(self, module: nn.Module) -> nn.Module:
        """Make the chosen layers of `module` integer layers, in place; return `module`.

        Args:
            module: one that was trained with this callback, or a new one with the weights of its checkpoint.

        Raises:
            ConfigError: the module is sharded over processes, it is converted already, or a pattern matches none of its
                layers.
        """
        load("callback 'int8_qat'", "drop the callback", "torchao.quantization.qat")
        from torchao.quantization import quantize_
        from torchao.quantization.qat.linear import FakeQuantizedLinear

        chosen = self._chosen(module, FakeQuantizedLinear)
        for name, layer in chosen.items():
            if hasattr(layer.weight, "device_mesh"):
                raise ConfigError(
                    f"{name}.weight is sharded over processes, and is to be converted to {self.weight_bits} bits",
                    expected="a module with whole weights",
                    do="save a checkpoint, and load it into a new module",
                )
        restore(module)
        layers = {id(layer) for layer in chosen.values()}
        quantize_(module, self._config(), filter_fn=lambda part, _: id(part) in layers)
        return module

    def _chosen(self, module: nn.Module, replaced: type[nn.Linear]) -> dict[str, nn.Linear]:
        layers = linear_layers(module, replaced)
        chosen = select(layers, self.modules, self.skip, "callbacks.int8_qat")
        if not chosen:
            raise ConfigError(
                f"callback 'int8_qat' found no linear layer in {type(module).__name__}",
                expected="a plain nn.Linear that no precision replaced",
                do="drop the callback, or the precision that replaces layers",
            )
        for name in chosen:
            if type(layers[name].weight).__module__.startswith("torchao."):
                raise ConfigError(
                    f"callback 'int8_qat' found that {name} of this {type(module).__name__} is converted to integers",
                    expected="layers whose weights are floating point",
                    do="use the converted module without it, or load a checkpoint into a new module",
                )
            inputs = layers[name].in_features
            if self.group_size is not None and inputs % self.group_size:
                raise ConfigError(
                    f"callbacks.int8_qat.group_size is {self.group_size}, and {name} has {inputs} inputs",
                    expected="a divisor of the number of inputs",
                    do=f'use another group_size, or skip=["{name}"]',
                )
        return {name: layers[name] for name in chosen}

    def _config(self) -> Any:
        import torch
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerAxis, PerGroup

        dtype = torch.int8 if self.weight_bits == 8 else torch.int4  # type: ignore[attr-defined]  # missing in the stubs
        granularity = PerAxis(0) if self.group_size is None else PerGroup(self.group_size)
        if self.activations:
            return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
