"""Error feedback: what a rank has not sent yet, to be sent with the next step.

[Note: owed]
A hook that sends less than it was given remembers the rest, and adds it to what it is given next: no gradient is lost,
some come late. Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", ICML 2019.

The rest is kept by parameter, for an engine may change its buckets between two steps, as DDP does after the
first. A bucket that names no parameters comes from a hook above; its rest is kept by *place*: which bucket, and how
many messages of it came before, since the last forward. What is owed is dropped with an average that was not finite.

Where ranks average a *chunk* each and compress the result once more, the rank that does it owes what that takes from
the average itself. It is kept beside the rest, as owed by one rank on behalf of all (`Chunk`). When the layout it
belongs to is gone, it joins the rest: once for each rank, as the average will be divided by their number.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import Bucket

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: How far the quotient of two 16-bit losses may be off.
_ROUNDING = 0.1

#: The pieces of a bucket, in order: the key that each one's rest is kept under, and how many numbers it has.
Layout = list[tuple[str, int]]


@define(eq=False)
class Chunk:
    """What this rank owes to the average of a part of a bucket."""

    layout: Layout
    #: Where the part begins in the bucket.
    start: int
    #: How many ranks were averaged.
    ranks: int
    rest: Tensor


@define(eq=False)
class Owed:
    """What one rank owes in one run; see [Note: owed]."""

    rests: dict[str, Tensor] = field(factory=dict)
    #: By place.
    chunks: dict[str, Chunk] = field(factory=dict)
    #: What the loss was multiplied with when the gradients came that are owed: a number, or a tensor with one, on the
    #: device. None if with nothing.
    scale: float | Tensor | None = None
    #: Messages since the last forward, by bucket.
    _messages: Counter[int] = field(factory=Counter)
    #: Names of parameters, by id.
    _names: dict[int, str] = field(factory=dict)

    def begin(self) -> None:
        """Count messages from 0: a forward begins."""
        self._messages.clear()

    def place(self, bucket: Bucket) -> str:
        """Return the place of the message that `bucket` is. To be asked once for each message."""
        number = self._messages[bucket.index]
        self._messages[bucket.index] += 1
        return f"bucket {bucket.index}.{number}"

    def layout(self, bucket: Bucket, place: str, run: RunContext) -> Layout:
        """Return the pieces of `bucket`."""
        if not bucket.parameters:
            return [(place, as_real(bucket.buffer).numel())]
        # The buffer of complex gradients may be real: DDP's is.
        sizes = [gradient.numel() * (2 if gradient.is_complex() else 1) for gradient in bucket.gradients]
        return list(zip(self._keys(bucket, run), sizes, strict=True))

    def _keys(self, bucket: Bucket, run: RunContext) -> list[str]:
        if run.module is not None and any(id(parameter) not in self._names for parameter in bucket.parameters):
            self._names = {id(parameter): name for name, parameter in run.module.named_parameters()}
        named = enumerate(map(id, bucket.parameters))
        return [self._names.get(number, f"bucket {bucket.index}, parameter {index}") for index, number in named]

    # --- The rest ------------------------------------------------------------------------------------------------

    def plus(self, bucket: Bucket, layout: Layout) -> Tensor:
        """Return a bucket's numbers and what is owed to them, which is no longer owed: a new tensor in fp32 or fp64."""
        numbers = as_real(bucket.buffer)
        numbers = numbers.to(computed_in(numbers.dtype), copy=True)
        owed = [self.rests.pop(key, None) for key, _ in layout]
        if any(rest is not None for rest in owed):
            pieces = zip(owed, layout, strict=True)
            numbers += torch.cat([_fitting(rest, size, numbers) for rest, (_, size) in pieces])
        return numbers

    def keep(self, rest: Tensor, layout: Layout, finite: Tensor) -> None:
        """Owe `rest`, which becomes this object's, unless the average was not `finite`."""
        rest.masked_fill_(~finite, 0.0)
        for (key, size), piece in zip(layout, rest.split([size for _, size in layout]), strict=True):
            # Something is owed already if a layout was given up meanwhile.
            self.rests[key] = piece + _fitting(self.rests[key], size, piece) if key in self.rests else piece

    # --- Chunks --------------------------------------------------------------------------------------------------

    def of_chunk(self, place: str, layout: Layout, start: int, like: Tensor) -> Tensor:
        """Return what is owed to the chunk of a bucket that begins at `start`, like `like`; it is no longer owed."""
        chunk = self.chunks.get(place)
        if chunk is not None and (chunk.layout, chunk.start, chunk.rest.numel()) != (layout, start, like.numel()):
            self.settle()
        chunk = self.chunks.pop(place, None)
        return torch.zeros_like(like) if chunk is None else chunk.rest

    def keep_chunk(self, place: str, chunk: Chunk, finite: Tensor) -> None:
        """Owe what `chunk` says, unless the average was not `finite`."""
        chunk.rest.masked_fill_(~finite, 0.0)
        self.chunks[place] = chunk

    def settle(self) -> None:
        """Turn what is owed to chunks into rests: their layout is gone."""
        for chunk in self.chunks.values():
            end, begin = chunk.start + chunk.rest.numel(), 0
            for key, size in chunk.layout:
                low, high = max(begin, chunk.start), min(begin + size, end)
                if low < high:
                    rest = _fitting(self.rests.get(key), size, chunk.rest).clone()
                    rest[low - begin : high - begin] += chunk.ranks * chunk.rest[low - chunk.start : high - chunk.start]
                    self.rests[key] = rest
                begin += size
        self.chunks = {}

    # --- State ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Owe nothing any more: what was owed includes gradients of a step that was not made."""
        self.rests, self.chunks = {}, {}

    def drop(self, bad: Tensor) -> None:
        """Owe nothing any more if `bad`, on the device, is 1 rather than 0: as `clear`, without waiting."""
        self._multiply(1 - bad)

    def _multiply(self, factor: Tensor) -> None:
        tensors = [*self.rests.values(), *(chunk.rest for chunk in self.chunks.values())]
        for dtype in {tensor.dtype for tensor in tensors}:
            torch._foreach_mul_([each for each in tensors if each.dtype == dtype], factor.to(dtype))

    def follow(self, scale: Tensor) -> None:
        """Take it that the loss is multiplied with `scale` from now on, and owe accordingly more or less.

        All of it on the device: the host does not wait. A loss of 0 has no scale: the last one stays.
        """
        before = scale if self.scale is None else self.scale
        ratio = scale / before
        # Scales change by whole factors; a quotient of two losses is off by their rounding.
        changed = torch.isfinite(ratio) & ((ratio - 1).abs() > _ROUNDING) & (ratio != 0)
        self._multiply(torch.where(changed, ratio, 1.0))
        self.scale = torch.where(torch.isfinite(scale) & (scale != 0), scale, before)

    def norm(self) -> float:
        """Return the norm of all that is owed."""
        tensors = [*self.rests.values(), *(chunk.rest for chunk in self.chunks.values())]
        norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]  # fp32, or fp64 under 64-true
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def state(self) -> dict[str, Any]:
        """Return what is owed as plain data, on the CPU."""
        return {
            "scale": _as_number(self.scale),
            "rests": {key: _on_cpu(rest) for key, rest in self.rests.items()},
            "chunks": {
                place: {
                    "layout": [[key, size] for key, size in chunk.layout],
                    "start": chunk.start, "ranks": chunk.ranks, "rest": _on_cpu(chunk.rest),
                }
                for place, chunk in self.chunks.items()
            },
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Owed:
        """Return what `state` says."""
        chunks = {
            place: Chunk(
                [(key, size) for key, size in saved["layout"]], saved["start"], saved["ranks"], saved["rest"].to(device)
            )
            for place, saved in state["chunks"].items()
        }
        return cls({key: rest.to(device) for key, rest in state["rests"].items()}, chunks, state["scale"])

    @classmethod
    def mean(cls, everyone: list[Owed]) -> Owed:
        """Return what each rank owes if a new number of ranks is to owe as much as `everyone` did."""
        for owed in everyone:
            owed.settle()
        keys = {key: rest for owed in everyone for key, rest in owed.rests.items()}
        return cls(
            scale=everyone[0].scale,
            rests={
                key: torch.stack([_fitting(owed.rests.get(key), like.numel(), like) for owed in everyone]).mean(0)
                for key, like in keys.items()
            },
        )


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of the 1-D `tensor` with complex numbers as two real ones: a cast would drop the second."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: fp32, where it is not more already."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fitting(rest: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return `rest`; zeros if there is none, or one of another size: its place holds something else now."""
    return rest if rest is not None and rest.numel() == size else like.new_zeros(size)


def _as_number(scale: float | Tensor | None) -> float | None:
    number = None if scale is None else float(scale)
    return number if number is None or math.isfinite(number) else None


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
