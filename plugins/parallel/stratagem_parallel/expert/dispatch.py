"""Send tokens to the ranks that hold their experts, and the results back.

[Note: the contract]
A module of experts has parameters with one row for each expert, and a forward that takes tokens (N, D), the numbers of
the experts of each token (N, K) and their weights (N, K), and returns (N, D): the sum over K of weight times expert's
result. The experts of Hugging Face's mixture models have this form. The forward itself runs on each rank with the rows
of its own experts, numbered from 0, K = 1 and weights of 1; the weights are applied where the tokens come from. No
token is dropped.

[Note: gradients of experts]
The gradients of all ranks' losses arrive at the rank with the expert, as a sum. The loss of a step is the mean over the
ranks, so the sum is divided by their number here, and averaged over the other axes as any gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigError
from stratagem_parallel.exchange import exchange

if TYPE_CHECKING:
    from stratagem.api import Collectives


class DispatchedExperts:
    """Calls the forward of `module`, each rank of `over` with the tokens of its own experts; see [Note: the contract].

    Args:
        name: of the module, for messages.
    """

    def __init__(self, module: nn.Module, name: str, over: Collectives) -> None:
        self.module: Any = module
        self.name, self.over = name, over
        #: Experts of all ranks, and of this one.
        self.number = int(getattr(module, "num_experts"))  # noqa: B009 - it is a number
        self.own = self.number // over.world_size
        self._forward = self.module.forward

    @torch._disable_dynamo  # a compiled layer calls it as it is
    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        tokens, indices, weights = self._checked(*arguments, *options.values())
        width, top = tokens.shape[-1], indices.shape[-1]
        chosen = indices.reshape(-1).long()
        order = chosen.argsort(stable=True)
        # What counts by values makes the host wait for a GPU (bincount, unique); this does not.
        wrong = (chosen < 0) | (chosen >= self.number)
        counts = chosen.new_zeros(self.number + 1)
        counts.index_add_(0, chosen.masked_fill(wrong, self.number), torch.ones_like(chosen))
        arriving = exchange(counts[:-1], self.over).view(self.over.world_size, self.own)
        leaving = counts[:-1].view_as(arriving)
        numbers = torch.stack([leaving.sum(1), arriving.sum(1), counts[-1].expand(len(leaving))])
        send, receive, beyond = self.over.values(numbers, self._evenly(len(chosen)))
        if beyond[0]:
            raise ConfigError(
                f"{self.name} was called with expert {int(chosen[wrong][0])}",
                expected=f"numbers from 0 to {self.number - 1}",
            )
        rows = exchange(tokens.reshape(-1, width)[order // top], self.over, send, receive)
        own = torch.arange(self.own, device=chosen.device).repeat(self.over.world_size)
        results = self._compute(rows, own.repeat_interleave(arriving.flatten(), output_size=sum(receive)))
        back = exchange(results, self.over, receive, send)[order.argsort()]
        combined = (back.view(-1, top, width) * weights.reshape(-1, top, 1)).sum(1)
        return combined.to(tokens.dtype).view(tokens.shape)

    def _evenly(self, rows: int) -> list[list[int]]:
        """Return how many of `rows` go to each rank and come from each, if all ranks get as many; none is beyond."""
        size = self.over.world_size
        shares = [rows // size + (rank < rows % size) for rank in range(size)]
        return [shares, [shares[self.over.rank]] * size, [0] * size]

    def _checked(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if len(arguments) == 3 and all(isinstance(each, Tensor) for each in arguments):
            tokens, indices, weights = arguments
            fits = indices.shape == weights.shape and indices.shape[:-1].numel() == tokens.shape[:-1].numel()
            if fits and not indices.is_floating_point():
                return tokens, indices, weights
        found = ", ".join(
            f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            for each in arguments
        )
        raise ConfigError(
            f"{self.name} of style 'expert' was called with {found}",
            expected="tokens (N, D), numbers of experts (N, K) and weights (N, K)",
            do="give the module this forward, or leave it out of the plan",
        )

    def _compute(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return the results of this rank's experts for `rows`, each with the expert of its number."""
        with self._own_parameters() as parameters:
            if len(rows):
                results: Tensor = self._forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))
            else:
                results = rows.new_zeros(rows.shape)
        if results.shape != rows.shape:
            raise ConfigError(
                f"{self.name} of style 'expert' returned {tuple(results.shape)} for tokens {tuple(rows.shape)}",
                expected="a result of the shape of the tokens",
            )
        if torch.is_grad_enabled() and not results.requires_grad:
            # The other ranks wait for this one in backward; and a gradient of zeros is not the same as none.
            results = _Link.apply(results, rows, *parameters)  # type: ignore[no-untyped-call]
        return results

    @contextlib.contextmanager
    def _own_parameters(self) -> Iterator[list[Tensor]]:
        """Within: the parameters of the module are plain tensors with the rows of this rank's experts."""
        owners = [
            (part, name) for part in self.module.modules() for name, p in part._parameters.items() if p is not None
        ]
        before: list[Any] = [part._parameters[name] for part, name in owners]
        own: list[Any] = [self._rows_of(parameter) for parameter in before]
        for (part, name), rows in zip(owners, own, strict=True):
            part._parameters[name] = rows
        self.module.num_experts = self.own
        try:
            yield own
        finally:
            for (part, name), parameter in zip(owners, before, strict=True):
                part._parameters[name] = parameter
            self.module.num_experts = self.number

    def _rows_of(self, parameter: Tensor) -> Tensor:
        rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not (rows.requires_grad and torch.is_grad_enabled()):
            return rows
        scaled: Tensor = _ScaleGradient.apply(rows, 1 / self.over.world_size)  # type: ignore[no-untyped-call]
        return scaled


class _ScaleGradient(torch.autograd.Function):
    """Returns its input; multiplies the gradient. See [Note: gradients of experts]."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class _Link(torch.autograd.Function):
    """Returns its first input; gives gradients of zeros to the others, which it does not depend on."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        ]
        return gradient, *zeros
