"""AdamW of torchao whose checkpoints hold plain tensors, by the names of parameters. Imports torchao.

    def configure_optimizers(self):
        return stratagem_torchao.AdamW8bit(self.parameters(), lr=1e-3)

[Note: quantized state]
torchao keeps a moment of a parameter with at least 4096 elements, in whole blocks, as a tensor subclass: codes of few
bits, and a scale for each block. A checkpoint has both as tensors of their own, ``exp_avg.codes`` and
``exp_avg.scale``, which any checkpoint format can store and which are restored exactly.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao import optim

from stratagem.errors import CheckpointError, ConfigError

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class _PlainState:
    """Mixed into an optimizer of torchao: converts its state, see [Note: quantized state]."""

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        if isinstance(p, DTensor):
            raise ConfigError(
                f"{type(self).__name__} got parameters that are sharded over processes",
                expected="whole parameters: blocks of its state would cross the borders of shards",
                do='use strategy="ddp", or torch.optim.AdamW, whose state is sharded',
            )
        buffer: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        return buffer

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._use_tensors()
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])  # type: ignore[attr-defined]
        # torchao compiles the update for each shape: up to a minute on a CPU, where it is hardly faster.
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            return super().step(closure)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the state with codes and scales as tensors of their own."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state | {"state": {number: _plain(entry) for number, entry in state["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or the state of ``torch.optim.AdamW``, which is quantized.

        Raises:
            CheckpointError: the state has another number of bits or another block size.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]  # type: ignore[attr-defined]
        state = {number: self._quantized(parameters[number], entry) for number, entry in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": state})  # type: ignore[misc]
        self._use_tensors()

    def _use_tensors(self) -> None:
        """Make learning rates tensors, which torchao requires; the state of another optimizer has numbers."""
        for group in self.param_groups:  # type: ignore[attr-defined]
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.tensor(float(group["lr"]))

    def _quantized(self, parameter: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        found = {key: value for key, value in entry.items() if key.split(".")[0] not in _MOMENTS}
        for key in _MOMENTS:
            parts = {part: entry[f"{key}.{part}"] for part in ("codes", "scale") if f"{key}.{part}" in entry}
            if not parts and key not in entry:
                continue
            buffer = self._new_buffer(parameter, key == "exp_avg")
            if not parts:
                found[key] = buffer.copy_(entry[key])
                continue
            for part, value in parts.items():
                mine = getattr(buffer, part, None)
                if mine is None or (mine.shape, mine.dtype) != (value.shape, value.dtype):
                    raise CheckpointError(
                        f"optimizer state {key}.{part} has {_shape(value)}",
                        expected=f"{_shape(mine)}, as {type(self).__name__} with its block_size has here",
                        do="resume with the optimizer that wrote it, or load only the weights",
                    )
                mine.copy_(value)
            found[key] = buffer
        return found


class AdamW8bit(_PlainState, optim.AdamW8bit):  # type: ignore[misc]  # torchao has no types
    """AdamW with moments of 8 bits: a quarter of the bytes of fp32. Dettmers et al., ICLR 2022."""


class AdamW4bit(_PlainState, optim.AdamW4bit):  # type: ignore[misc]
    """AdamW with moments of 4 bits. Li et al., "Memory Efficient Optimizers with 4-bit States", NeurIPS 2023."""


class AdamWFp8(_PlainState, optim.AdamWFp8):  # type: ignore[misc]
    """AdamW with moments in fp8 (e4m3) and a scale for each block."""


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in entry.items():
        if key in _MOMENTS and hasattr(value, "codes"):
            plain |= {f"{key}.codes": value.codes, f"{key}.scale": value.scale}
        else:
            plain[key] = value
    return plain


def _shape(tensor: Any) -> str:
    if tensor is None:
        return "no such tensor"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
