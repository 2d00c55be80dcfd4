"""Plan a save: the offset of each tensor, the same on all ranks, and the bytes that this rank writes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stratagem.api.json_tree import encode
from stratagem.errors import CheckpointError
from stratagem_checkpoints.cpu_copies import is_pinnable, wait_for
from stratagem_checkpoints.distinct import gather_distinct
from stratagem_checkpoints.raw_bytes import bytes_of

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: Offsets of tensors are multiples of this, so that any dtype can be mapped.
ALIGNMENT = 64
#: Maximum bytes of a piece, which has one checksum.
PIECE = 64 << 20
#: Maximum bytes of a block of memory for copies: torch rounds pinned blocks up to a power of two.
BLOCK = 1 << 30
#: Tensors up to this many bytes share a piece, and are read rather than mapped.
SMALL = 1 << 20


class Plan:
    """The layout of a state, and this rank's part of it."""

    def __init__(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size = 0, rank, world_size
        self.tensors: list[dict[str, Any]] = []
        self._sources: list[torch.Tensor] = []
        self.tree = encode(state, self._add)
        #: What this rank writes: (offset, content), in order.
        self.parts: list[tuple[int, torch.Tensor]] = []

    def divide(self, collectives: Collectives) -> None:
        """Compute this rank's `parts`. Collective.

        Raises:
            CheckpointError: no rank has the values of a tensor.
        """
        # The tensors that only other ranks have; those of which this rank has a shard, with the first of their ranks.
        lacks = tuple(number for number, tensor in enumerate(self._sources) if tensor.is_meta)
        first_of = functools.cache(lambda mesh: int(mesh.mesh.min()))
        sources = enumerate(self._sources)
        shards = [(number, first_of(each.device_mesh)) for number, each in sources if isinstance(each, DTensor)]
        held = gather_distinct(collectives, (lacks, shards))
        absent = {rank: set(lacking) for rank, (lacking, _) in held}
        missing = set.intersection(*absent.values())
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors of the checkpoint have values on no rank", do="tell the strategy's author"
            )
        # Small tensors may differ between ranks (BatchNorm statistics): one rank writes each of them.
        small = {n for n, each in enumerate(self._sources) if _is_small(each)}
        writers = {
            number: next(rank for rank, lacking in absent.items() if number not in lacking)
            for number in set.union(small, *absent.values())
        }
        # Several meshes may hold the same shards, each all of them: replicas, or the stages that share a tied tensor.
        meshes: dict[int, int] = {}
        for number, first in (shard for _, (_, shards_there) in held for shard in shards_there):
            meshes[number] = min(first, meshes.get(number, first))
        theirs = {number for number, first in shards if first != meshes[number]}
        self.parts = list(self._mine(writers, theirs))
        self._sources = []

    def copy(self, memory: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Copy this rank's parts into the blocks of `memory`, and new ones, so that training may change the originals.

        Returns:
            The blocks that were used, for the next save: copying into existing memory takes a fifth of the time.
        """
        devices = {part.device for _, part in self.parts if is_pinnable(part)}
        left = sum(part.numel() for _, part in self.parts)
        blocks, copies, used = list(memory or ()), [], 0
        number = 0
        for offset, part in self.parts:
            at = 0
            while at < part.numel():
                if number == len(blocks):
                    blocks.append(torch.empty(min(left, BLOCK), dtype=torch.uint8, pin_memory=bool(devices)))
                block = blocks[number]
                length = min(part.numel() - at, block.numel() - used)
                copy = block[used : used + length].copy_(part[at : at + length], non_blocking=True)
                copies.append((offset + at, copy))
                at, used, left = at + length, used + length, left - length
                if used == block.numel():
                    number, used = number + 1, 0
        wait_for(devices)
        self.parts = copies
        return blocks

    def _add(self, tensor: torch.Tensor, _: str) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = tensor.numel() * tensor.element_size()
        self.tensors.append({"dtype": dtype, "shape": list(tensor.shape), "offset": self.size, "bytes": size})
        self._sources.append(tensor)
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return len(self.tensors) - 1

    def _mine(self, writers: Mapping[int, int], theirs: set[int]) -> Iterator[tuple[int, torch.Tensor]]:
        same = [t for n, t in enumerate(self._sources) if not isinstance(t, DTensor) and n not in writers]
        share = -(-sum(t.numel() * t.element_size() for t in same) // self.world_size) or 1
        seen = 0
        for number, (entry, tensor) in enumerate(zip(self.tensors, self._sources, strict=True)):
            if isinstance(tensor, DTensor):
                if number not in theirs and _writes(tensor):
                    yield from ((entry["offset"] + begin, part) for begin, part in _shard_of(tensor))
                continue
            if number in writers:
                if writers[number] == self.rank and tensor.numel():
                    yield entry["offset"], _flat(tensor)
                continue
            # Large and equal on all ranks: each rank writes the same number of these bytes.
            size = tensor.numel() * tensor.element_size()
            begin, end = max(share * self.rank - seen, 0), min(share * (self.rank + 1) - seen, size)
            seen += size
            if begin < end:
                yield entry["offset"] + begin, _flat(tensor)[begin:end]


def _is_small(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= SMALL


def _writes(tensor: DTensor) -> bool:
    """Return whether this rank, among those with the same shard, is the one that writes it."""
    here = tensor.device_mesh.get_coordinate()
    assert here is not None, "this rank has a shard"
    return all(
        not placement.is_replicate() or position == 0
        for placement, position in zip(tensor.placements, here, strict=True)
    )


def _shard_of(tensor: DTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the contiguous parts of this rank's shard, each with its offset in the full tensor."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    yield from _rows(tensor.to_local(), list(offsets), list(tensor.shape), 0)


def _rows(part: torch.Tensor, offsets: list[int], shape: list[int], begin: int) -> Iterator[tuple[int, torch.Tensor]]:
    if part.numel() == 0:
        return
    inner = part.element_size()
    for size in shape[1:]:
        inner *= size
    first = begin + (offsets[0] * inner if offsets else 0)
    if list(part.shape[1:]) == shape[1:]:
        yield first, _flat(part)
        return
    for row in range(part.shape[0]):
        yield from _rows(part[row], offsets[1:], shape[1:], first + row * inner)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor` in row-major order; a copy on the CPU only if it is not contiguous."""
    contiguous = (tensor if tensor.is_contiguous() else tensor.cpu().contiguous()).view(-1)
    return contiguous.view(torch.uint8) if contiguous.numel() else torch.empty(0, dtype=torch.uint8)


def pieces(plan: Plan) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, content) of the pieces to write and hash; small parts next to each other share a piece.

    A piece may include the padding between two tensors that it joins. Any other gap between parts belongs to another
    rank.
    """
    starts = {entry["offset"] for entry in plan.tensors}
    ends = {entry["offset"] + entry["bytes"] for entry in plan.tensors}
    begin, joined = 0, bytearray()
    for offset, part in plan.parts:
        content, end = bytes_of(part), begin + len(joined)
        is_padding = end in ends and offset in starts and 0 <= offset - end < ALIGNMENT
        if joined and not ((offset == end or is_padding) and len(joined) + len(content) <= SMALL):
            yield begin, memoryview(joined)
            joined = bytearray()
        if len(content) > SMALL:
            yield from ((offset + at, content[at : at + PIECE]) for at in range(0, len(content), PIECE))
        elif joined:
            joined += bytes(offset - end) + content
        else:
            begin, joined = offset, bytearray(content)
    if joined:
        yield begin, memoryview(joined)
