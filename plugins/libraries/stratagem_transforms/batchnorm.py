"""Batch normalization over the batches of all ranks, on any device and backend.

The statistics and their gradients are those of the joined batch (Ioffe and Szegedy, 2015, "Batch Normalization",
over all processes). A few numbers per channel are sent: twice in forward (on CUDA once), once in backward.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from stratagem.api import hookimpl
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback
from stratagem_trainer.uncompiled import keep_uncompiled

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.api import Collectives, RunContext
    from stratagem.stack.plugins import Stack
    from stratagem_trainer.api import TrainerView

#: The ranks over which a layer computes its statistics; a copy of the layer uses only its own batch.
_PEERS: weakref.WeakKeyDictionary[nn.Module, Collectives] = weakref.WeakKeyDictionary()


@define(eq=False, kw_only=True)
class SyncBatchNorm(Callback):
    """Computes the statistics of batch normalization over the batches of all ranks."""

    @staticmethod
    def from_argument(value: bool, stack: Stack) -> dict[str, Any] | None:
        """Return the options for ``sync_batchnorm=value``; None to synchronize nothing.

        Raises:
            ConfigError: the strategy has several devices in one process.
        """
        if value and len(stack.devices) > stack.num_processes:
            raise ConfigError(
                f"sync_batchnorm is True, and {stack.strategies[-1]} trains on {len(stack.devices)} devices in one "
                "process",
                expected="one process for each device",
                do="drop it, or choose a strategy with one process for each device",
            )
        return {} if value else None

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if run.stage == "train" and run.world_size > 1 and synchronize(module, run.peers) == 0:
            raise ConfigError(
                f"sync_batchnorm is True and {type(module).__name__} has no batch normalization", do="drop it"
            )

    @hookimpl
    def on_fit_end(self, trainer: TrainerView) -> None:
        separate(trainer.module)

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        if run.module is not None:
            separate(run.module)


def synchronize(module: nn.Module, collectives: Collectives) -> int:
    """Make every batch normalization in `module` use the batches of all ranks; return how many there are.

    The layers become instances of a subclass; parameters and names in ``state_dict`` stay the same.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    for layer in layers:
        if not isinstance(layer, _Synced):
            layer.__class__ = _synced(type(layer))  # type: ignore[assignment]  # a subclass of its own class
        _PEERS[layer] = collectives
    return len(layers)


def separate(module: nn.Module) -> None:
    """Make every batch normalization in `module` use its own batch again, as before the run."""
    for part in module.modules():
        _PEERS.pop(part, None)
        original = type(part).__mro__[2] if isinstance(part, _Synced) else None
        if original is not None and type(part) is _CLASSES.get(original):  # else a strategy derived its class
            part.__class__ = original


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _synced(cls: type[nn.Module]) -> type[nn.Module]:
    return _CLASSES.setdefault(cls, type(f"Synced{cls.__name__}", (_Synced, cls), {}))


def _blank(cls: Any) -> Any:
    return cls.__new__(cls)


class _Synced:
    """Mixin for a class of batch normalization: computes statistics over all ranks."""

    def forward(self: Any, x: Tensor) -> Tensor:
        peers = _PEERS.get(self)
        own_statistics = self.training or self.running_mean is None
        if peers is None or peers.world_size == 1 or not own_statistics:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        self._check_input_dim(x)
        results: Any = _normalization(x).apply(x, self.weight, self.bias, self.eps, peers)
        y, mean, variance, count = results
        if self.training and self.track_running_stats:
            with torch.no_grad():
                self._update(mean, variance, count)
        return y  # type: ignore[no-any-return]

    def _update(self: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The subclass exists only in this process: pickle the layer as its original class.
        return _blank, (type(self).__mro__[2],), self.__dict__.copy()


keep_uncompiled(_Synced, "forward")  # its messages cannot be traced


def _normalization(x: Tensor) -> type[torch.autograd.Function]:
    return _Fused if x.is_cuda else _Normalize


class _Normalize(torch.autograd.Function):
    """Return ``(y, mean, variance, count)``; the statistics are over all ranks, and no gradient flows into them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, peers: Collectives) -> Any:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims = [dim for dim in range(x.dim()) if dim != 1]
        sums = wide.sum(dims)
        count = wide.new_full((1,), x.numel() / max(x.shape[1], 1))
        total = peers.unchecked.all_reduce(torch.cat([sums, count]), "sum")
        mean, count = total[:-1] / total[-1], total[-1]
        centered = wide - _spread(mean, x)
        variance = peers.unchecked.all_reduce(centered.square().sum(dims), "sum") / count
        inverse = (variance + eps).rsqrt()
        normalized = centered * _spread(inverse, x)
        ctx.save_for_backward(normalized, weight, inverse, count)
        ctx.peers, ctx.dims = peers, dims
        y = normalized if weight is None else normalized * _spread(weight, x)
        y = y if bias is None else y + _spread(bias, x)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normalized, weight, inverse, count = ctx.saved_tensors
        grad = gradients[0].to(normalized.dtype)
        of_bias, of_weight = grad.sum(ctx.dims), (grad * normalized).sum(ctx.dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = ctx.peers.unchecked.all_reduce(torch.cat([of_bias, of_weight]), "sum") / count
            mean, slope = (_spread(part, grad) for part in sums.chunk(2))
            scale = inverse if weight is None else inverse * weight
            grad_x = ((grad - mean - normalized * slope) * _spread(scale, grad)).to(gradients[0].dtype)
        if weight is None:
            return grad_x, None, None, None, None
        return grad_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


class _Fused(torch.autograd.Function):
    """As `_Normalize`, with torch's CUDA kernels; saves no large tensor for backward except the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, peers: Collectives) -> Any:
        x, channels, size = _dense(x), x.shape[1], x.numel() // max(x.shape[1], 1)
        weight = weight if weight is None else weight.contiguous()
        if size:
            mean, inverse = torch.batch_norm_stats(x, eps)  # (C,), fp32 for 16-bit inputs
            own = [mean, inverse.square().reciprocal() - eps, mean.new_full((1,), size)]
        else:
            dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
            own = [x.new_zeros(2 * channels + 1, dtype=dtype)]
        every = torch.stack(peers.unchecked.all_gather(torch.cat(own)))  # (ranks, 2 C + 1)
        means, variances, counts = every.split([channels, channels, 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = ((variances + (means - mean).square()) * counts).sum(0) / count
        inverse = (variance + eps).rsqrt()
        y = torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps) if size else torch.empty_like(x)
        ctx.save_for_backward(x, weight, mean, inverse, counts.flatten().to(torch.int32))
        ctx.peers = peers
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable  # the kernels have no derivative
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        grad, (of_x, of_weight, of_bias) = _dense(gradients[0]), ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        own = mean.new_zeros(2 * len(mean))
        if x.numel():
            *sums, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, inverse, weight, of_x, of_weight, of_bias
            )
            own = torch.cat(sums) if of_x else own
        if of_x:
            sums = ctx.peers.unchecked.all_reduce(own, "sum").chunk(2)
            weight = weight if weight is None else weight.to(mean.dtype)
            grad_x = torch.empty_like(x)
            if x.numel():
                grad_x = torch.batch_norm_backward_elemt(grad, x, mean, inverse, weight, sums[0], sums[1], counts)
        return grad_x, grad_weight if of_weight else None, grad_bias if of_bias else None, None, None


def _dense(x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, also in channels-last order; else a contiguous copy."""
    formats = (torch.channels_last,) if x.dim() == 4 else (torch.channels_last_3d,) if x.dim() == 5 else ()
    return x if any(x.is_contiguous(memory_format=each) for each in formats) else x.contiguous()


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Return `values`, one for each channel, in a shape that broadcasts to `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
