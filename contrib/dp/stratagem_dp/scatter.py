"""Split a batch into one chunk for each device."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from stratagem_microbatches import batch_size, split


@frozen
class Chunk:
    """The arguments of a step for one replica."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    #: Number of samples.
    size: int


def scatter(inputs: tuple[tuple[Any, ...], dict[str, Any]], count: int) -> list[Chunk]:
    """Split the arguments of a step into at most `count` chunks along dimension 0, of the sizes of `torch.chunk`.

    Raises:
        ConfigError: `inputs` have no tensor that can be split, or tensors of several sizes.
    """
    if count == 1:
        return [Chunk(inputs[0], inputs[1], size=1)]
    size = batch_size(inputs, f"chunks for {count} devices")
    step = max(1, -(-size // count))
    sizes = [min(step, size - start) for start in range(0, max(1, size), step)]
    parts = zip(split(inputs, sizes), sizes, strict=True)
    return [Chunk(arguments, options, samples) for (arguments, options), samples in parts]
