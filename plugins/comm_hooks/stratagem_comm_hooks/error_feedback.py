"""Error feedback: keep what compression took from the gradients, and add it to the gradients of the next step.

[Note: error feedback]
A lossy hook sends less than it was given. The difference is the *residual*: it is added to the input of the next step,
so that no gradient is lost, only delayed. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.

Residuals are kept by parameter, because an engine may change its buckets between two steps, as DDP does after the
first. A bucket without parameters comes from a hook above; its residual is kept by *slot*: the bucket's index, and how
many messages of that bucket came before since the last forward. Residuals of an average that was not finite are
dropped.

In a compressed all-reduce each rank averages one *chunk* of the bucket and compresses the result a second time. The
residual of that second compression belongs to the average of all ranks, so it is kept separately, on the rank that
computed it (`Chunk`). When the bucket layout changes, it is added to this rank's residuals, multiplied by the number of
ranks, as the average will be divided by that number.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem_buckets import Bucket

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Tolerance for the quotient of two 16-bit losses.
_ROUNDING = 0.1

#: The parts of a bucket, in order: the key of each part's residual, and its number of elements.
Layout = list[tuple[str, int]]


@define(eq=False)
class Chunk:
    """The residual of the average of one chunk, which this rank computed."""

    layout: Layout
    #: Where the chunk starts in the bucket.
    start: int
    #: How many ranks were averaged.
    ranks: int
    residual: Tensor


@define(eq=False)
class ErrorFeedback:
    """The residuals of one rank in one run; see [Note: error feedback]."""

    residuals: dict[str, Tensor] = field(factory=dict)
    #: By slot.
    chunks: dict[str, Chunk] = field(factory=dict)
    #: The loss scale of the gradients that the residuals come from: a number, or a tensor with one element on the
    #: device. None without loss scaling.
    scale: float | Tensor | None = None
    #: ``run.gradient_scale`` of those gradients.
    gradient_scale: float = 1.0
    #: Messages since the last forward, by bucket.
    _messages: Counter[int] = field(factory=Counter)
    #: Names of parameters, by id.
    _names: dict[int, str] = field(factory=dict)
    #: By the key of the first part: the tensor that the residuals of a bucket are views of, in which `take` adds.
    _joined: dict[str, Tensor] = field(init=False, factory=dict)

    def begin(self) -> None:
        """Count messages from 0: a forward begins."""
        self._messages.clear()

    def slot(self, bucket: Bucket) -> str:
        """Return the slot of this message of `bucket`. Call it once for each message."""
        number = self._messages[bucket.index]
        self._messages[bucket.index] += 1
        return f"bucket {bucket.index}.{number}"

    def layout(self, bucket: Bucket, slot: str, run: RunContext) -> Layout:
        """Return the parts of `bucket`."""
        if not bucket.parameters:
            return [(slot, as_real(bucket.buffer).numel())]
        # The buffer of complex gradients may be real: DDP's is.
        sizes = [gradient.numel() * (2 if gradient.is_complex() else 1) for gradient in bucket.gradients]
        return list(zip(self._keys(bucket, run), sizes, strict=True))

    def _keys(self, bucket: Bucket, run: RunContext) -> list[str]:
        if run.module is not None and any(id(parameter) not in self._names for parameter in bucket.parameters):
            self._names = {id(parameter): name for name, parameter in run.module.named_parameters()}
        named = enumerate(map(id, bucket.parameters))
        return [self._names.get(number, f"bucket {bucket.index}, parameter {index}") for index, number in named]

    # --- Residuals -----------------------------------------------------------------------------------------------

    def take(self, bucket: Bucket, layout: Layout, length: int | None = None) -> Tensor:
        """Return the bucket plus its residuals, which are removed here, then zeros up to `length`, in fp32 or fp64.

        The caller owns the tensor; it may pass it to `keep`, which saves the next step an allocation.
        """
        gradients = as_real(bucket.buffer)
        count = gradients.numel()
        residuals = [self.residuals.pop(key, None) for key, _ in layout]
        values = self._take_joined(residuals, layout)
        if values is not None and len(values) == (length or count) and values.dtype == compute_dtype(gradients.dtype):
            values[:count] += gradients
        else:
            values = gradients.new_empty(length or count, dtype=compute_dtype(gradients.dtype))
            values[:count] = gradients
            if any(residual is not None for residual in residuals):
                self._joined.clear()  # the layout has changed: others may be outdated, too
                parts = zip(residuals, layout, strict=True)
                values[:count] += torch.cat([_of_size(residual, size, values) for residual, (_, size) in parts])
        values[count:] = 0.0
        return values

    def _take_joined(self, residuals: list[Tensor | None], layout: Layout) -> Tensor | None:
        """Return the tensor that `residuals`, those of `layout`, are consecutive views of; None if they are not."""
        joined = self._joined.pop(layout[0][0], None) if layout else None
        if joined is None:
            return None
        address = joined.data_ptr()
        for residual, (_, size) in zip(residuals, layout, strict=True):
            if residual is None or residual.numel() != size or (size and residual.data_ptr() != address):
                return None
            address += size * joined.itemsize
        return joined

    def keep(self, residual: Tensor, layout: Layout, finite: Tensor) -> None:
        """Keep `residual` (this object owns it from now on), or zeros if the average was not `finite`.

        What follows the last part of `layout` is ignored.
        """
        residual.masked_fill_(~finite, 0.0)
        if layout:
            self._joined[layout[0][0]] = residual
        sizes = [size for _, size in layout]
        for (key, size), part in zip(layout, residual[: sum(sizes)].split(sizes), strict=True):
            # There is one already if a layout was given up meanwhile.
            self.residuals[key] = part + _of_size(self.residuals[key], size, part) if key in self.residuals else part

    # --- Chunks --------------------------------------------------------------------------------------------------

    def take_chunk(self, slot: str, layout: Layout, start: int, like: Tensor) -> Tensor:
        """Return the residual of the chunk that begins at `start`, shaped like `like`, and remove it here."""
        chunk = self.chunks.get(slot)
        if chunk is not None and (chunk.layout, chunk.start, chunk.residual.numel()) != (layout, start, like.numel()):
            self.merge_chunks()
        chunk = self.chunks.pop(slot, None)
        return torch.zeros_like(like) if chunk is None else chunk.residual

    def keep_chunk(self, slot: str, chunk: Chunk, finite: Tensor) -> None:
        """Keep the residual of `chunk`, or zeros if the average was not `finite`."""
        chunk.residual.masked_fill_(~finite, 0.0)
        self.chunks[slot] = chunk

    def merge_chunks(self) -> None:
        """Add the residuals of chunks to those of parameters: the layout of the chunks has changed."""
        for chunk in self.chunks.values():
            end, begin = chunk.start + chunk.residual.numel(), 0
            for key, size in chunk.layout:
                low, high = max(begin, chunk.start), min(begin + size, end)
                if low < high:
                    residual = _of_size(self.residuals.get(key), size, chunk.residual).clone()
                    added = chunk.residual[low - chunk.start : high - chunk.start]
                    residual[low - begin : high - begin] += chunk.ranks * added
                    self.residuals[key] = residual
                begin += size
        self.chunks = {}

    # --- State ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all residuals: they include gradients of a step that was skipped."""
        self.residuals, self.chunks, self._joined = {}, {}, {}

    def drop(self, bad: Tensor) -> None:
        """Zero all residuals if `bad`, on the device, is 1 rather than 0: as `clear`, without synchronizing."""
        self._multiply(1 - bad)

    def _tensors(self) -> list[Tensor]:
        return [*self.residuals.values(), *(chunk.residual for chunk in self.chunks.values())]

    def _multiply(self, factor: Tensor | float) -> None:
        tensors = self._tensors()
        for dtype in {tensor.dtype for tensor in tensors}:
            by = factor if isinstance(factor, float) else factor.to(dtype)
            torch._foreach_mul_([each for each in tensors if each.dtype == dtype], by)

    def follow(self, scale: Tensor) -> None:
        """Rescale the residuals to the loss scale `scale`, which the next gradients will have.

        Runs on the device: the host does not wait. A loss of 0 has no scale: the last one stays.
        """
        before = scale if self.scale is None else self.scale
        ratio = scale / before
        # Scales change by whole factors; a quotient of two losses is off by their rounding.
        changed = torch.isfinite(ratio) & ((ratio - 1).abs() > _ROUNDING) & (ratio != 0)
        self._multiply(torch.where(changed, ratio, 1.0))
        self.scale = torch.where(torch.isfinite(scale) & (scale != 0), scale, before)

    def rescale(self, gradient_scale: float) -> None:
        """Rescale the residuals to gradients that are multiplied by `gradient_scale`."""
        self._multiply(gradient_scale / self.gradient_scale)
        self.gradient_scale = gradient_scale

    def norm(self) -> float:
        """Return the norm of all residuals."""
        norms = [torch.linalg.vector_norm(tensor) for tensor in self._tensors()]  # fp32, or fp64 under 64-true
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def state(self) -> dict[str, Any]:
        """Return the residuals as plain data, on the CPU. The keys are those of existing checkpoints."""
        return {
            "scale": _as_number(self.scale), "gradient_scale": self.gradient_scale,
            "rests": {key: _on_cpu(residual) for key, residual in self.residuals.items()},
            "chunks": {
                slot: {
                    "layout": [[key, size] for key, size in chunk.layout],
                    "start": chunk.start, "ranks": chunk.ranks, "rest": _on_cpu(chunk.residual),
                }
                for slot, chunk in self.chunks.items()
            },
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> ErrorFeedback:
        """Return the residuals of a `state`, on `device`."""
        chunks = {
            slot: Chunk(
                [(key, size) for key, size in saved["layout"]], saved["start"], saved["ranks"], saved["rest"].to(device)
            )
            for slot, saved in state["chunks"].items()
        }
        residuals = {key: residual.to(device) for key, residual in state["rests"].items()}
        return cls(residuals, chunks, state["scale"], state.get("gradient_scale", 1.0))

    @classmethod
    def mean(cls, ranks: list[ErrorFeedback]) -> ErrorFeedback:
        """Return the mean of the residuals of all `ranks`, for a run with another number of ranks."""
        for rank in ranks:
            rank.merge_chunks()
        keys = {key: residual for rank in ranks for key, residual in rank.residuals.items()}
        return cls(
            scale=ranks[0].scale,
            gradient_scale=ranks[0].gradient_scale,
            residuals={
                key: torch.stack([_of_size(rank.residuals.get(key), like.numel(), like) for rank in ranks]).mean(0)
                for key, like in keys.items()
            },
        )


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of the 1-D `tensor` with complex numbers as two real ones: a cast would drop the second."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_size(residual: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return `residual`, or zeros if it is None or has another size (its key then names something else now)."""
    return residual if residual is not None and residual.numel() == size else like.new_zeros(size)


def _as_number(scale: float | Tensor | None) -> float | None:
    number = None if scale is None else float(scale)
    return number if number is None or math.isfinite(number) else None


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
