"""Layers of bitsandbytes in place of torch.nn.Linear; the module imports bitsandbytes."""

from __future__ import annotations

import logging
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import nn

_CAST = "MatMul8bitLt: inputs will be cast"
# Evaluation in 8 bits would log a line in each forward.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(lambda record: _CAST not in record.getMessage())


class FourBitLinear(bnb.nn.Linear4bit):
    """A frozen weight of 4 bits."""

    #: For the checks of a checkpoint: its tensor may have the dtype and shape of a plain layer.
    loads_converted = ("weight",)

    @classmethod
    def take_over(cls, layer: nn.Linear, quant_type: str, nested: bool, dtype: torch.dtype) -> None:
        """Make `layer`, whose hooks and other references stay, one of this class."""
        weight = layer.weight.detach()
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.quant_type, layer.nested = quant_type, nested
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        layer.quant_storage, layer.quant_state = torch.uint8, None
        # bitsandbytes would repack the weight in evaluation, into a form through which no gradient flows afterwards.
        layer.support_avx512bf16_for_cpu = False
        layer.weight = bnb.nn.Params4bit(
            torch.empty(0), requires_grad=False, quant_type=quant_type, compress_statistics=nested, module=layer
        )
        layer.quantize(weight)

    @property
    def logical_shape(self) -> torch.Size:
        assert self.quant_state is not None, "quantized when it is made"
        return torch.Size(self.quant_state.shape)

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> None:
        """Replace the weight."""
        packed, state = bnb.functional.quantize_4bit(
            weight.float().contiguous(),
            blocksize=self.weight.blocksize,
            compress_statistics=self.nested,
            quant_type=self.quant_type,
        )
        self.put(packed, state)

    def put(self, packed: torch.Tensor, state: QuantState) -> None:
        """Replace the weight by one that is quantized."""
        self.weight.data, self.weight.bnb_quantized = packed, True
        self.weight.quant_state = self.quant_state = state

    def dequantized(self) -> torch.Tensor:
        """Return the weight in fp32."""
        assert self.quant_state is not None, "quantized when it is made"
        return dequantize_4bit(self.weight.data, self.quant_state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.quant_state
        assert state is not None, "quantized when it is made"
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out: torch.Tensor = bnb.matmul_4bit(x.to(self.compute_dtype), self.weight, quant_state=state, bias=bias)
        return out.to(x.dtype)


class EightBitLinear(bnb.nn.Linear8bitLt):
    """A frozen weight of 8 bits, or one that is trained and rounded to 8 bits in each forward."""

    @classmethod
    def take_over(cls, layer: nn.Linear, threshold: float, *, trained: bool, dtype: torch.dtype) -> None:
        """Make `layer`, whose hooks and other references stay, one of this class."""
        weight = layer.weight.detach()
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.state, layer.index, layer.compute_dtype = bnb.MatmulLtState(), None, dtype
        layer.state.threshold, layer.state.has_fp16_weights = threshold, trained
        layer.state.use_pool = threshold > 0.0 and not trained
        if not trained:
            layer.weight = bnb.nn.Int8Params(torch.empty(0, dtype=torch.int8), requires_grad=False)
            layer.quantize(weight)

    @property
    def loads_converted(self) -> tuple[str, ...]:
        return () if self.state.has_fp16_weights else ("weight",)

    @property
    def logical_shape(self) -> torch.Size:
        return self.weight.shape

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> None:
        """Replace the weight."""
        rounded, scale, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
        self.put(rounded, scale)

    def put(self, rounded: torch.Tensor, scale: torch.Tensor) -> None:
        """Replace the weight by one that is quantized."""
        self.weight.data = self.state.CB = rounded
        self.state.SCB = scale

    def dequantized(self) -> torch.Tensor:
        """Return the weight in fp32."""
        return self.weight.data.float() * (self.state.SCB.float().unsqueeze(1) / 127.0)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if not self.state.has_fp16_weights and self.state.SCB is not None:
            self.state.CB, self.state.SCB = self.weight.data, self.state.SCB.to(self.weight.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state.has_fp16_weights:
            # Otherwise evaluation, and training with gradients that are zeroed in place, would use those of an earlier
            # step.
            self.state.CB = self.state.SCB = None
        # On a CPU the weights are rounded and not the inputs: for those, no kernel separates large features.
        self.state.is_training = self.training or x.device.type == "cpu"
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        flat = x.reshape(-1, x.shape[-1]).to(self.compute_dtype)  # its backward takes matrices only
        out: torch.Tensor = bnb.matmul(flat, self.weight, bias=bias, state=self.state)
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)


def quantized_layers(module: nn.Module) -> dict[str, FourBitLinear | EightBitLinear]:
    """Return the layers of this package in `module` by name; one that is used twice has two names."""
    return {
        name: part
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, FourBitLinear | EightBitLinear)
    }
