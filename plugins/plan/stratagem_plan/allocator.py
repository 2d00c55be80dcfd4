"""What torch's CUDA allocator reserves for what a step allocates: it keeps freed memory, in pieces that may not fit.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11, with and without ``expandable_segments:True``.
"""

from __future__ import annotations

import bisect
import math

from attrs import define, field

_MIB = 1 << 20
#: Allocations are multiples of this; up to `_SMALL` they are in segments of their own.
GRAIN, _SMALL = 512, _MIB
#: What cuBLAS takes for itself on an H200 in torch 2.11: with the first product of matrices, and the first of backward.
LIBRARIES = {"forward": (32 * _MIB, _MIB), "backward": (32 * _MIB,)}
LIBRARY_BYTES = sum(map(sum, LIBRARIES.values()))
#: No segment is larger than two to this.
_SEGMENT_BITS = 50


@define(eq=False, slots=True)
class Block:
    """A part of a segment, and its neighbours."""

    #: Where it begins: segments that were reserved earlier come first.
    address: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None


@define(eq=False)
class _Pool:
    """Blocks for the operations of one stream, small ones or others."""

    is_small: bool
    #: Sorted by size and address.
    free: list[tuple[int, int, Block]] = field(factory=list)
    #: The last block, of a segment that can be extended.
    last: Block | None = None


@define(eq=False)
class Allocator:
    """Follows allocations; `reserved` is what ``torch.cuda.memory_reserved`` says, in bytes.

    Where the device is full, segments without a used block go back to it. Extended ones have no limit here.
    """

    is_expandable: bool
    #: Bytes of the device.
    limit: float = math.inf
    reserved: int = 0
    peak: int = 0
    #: The most bytes that the device had too few, with all free segments given back.
    lacking: float = 0
    #: How often free segments were given back.
    returns: int = 0
    _segments: int = 0
    _pools: dict[tuple[object, bool], _Pool] = field(factory=dict)

    def take(self, size: int, stream: object) -> Block:
        """Return a block of `size` bytes, a multiple of `GRAIN`, for operations of `stream`."""
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        at = bisect.bisect_left(pool.free, (size, 0))
        if self.is_expandable and at + 1 < len(pool.free) and pool.free[at][2] is pool.last:
            at += 1  # it could become as large as any
        block = pool.free.pop(at)[2] if at < len(pool.free) else self._reserve(size, pool)
        block.is_free = False
        rest = block.size - size
        if rest >= (GRAIN if is_small or self.is_expandable else _SMALL + GRAIN):
            block.size = size
            self._insert(Block(block.address + size, rest, pool, block, block.after))
        return block

    def give(self, block: Block) -> None:
        """Free a block: free neighbours become parts of it."""
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                block.size += other.size
                if other is block.before:
                    block.before, block.address = other.before, other.address
                else:
                    block.after = other.after
        self._insert(block)

    def _reserve(self, size: int, pool: _Pool) -> Block:
        """Return a new segment for `size` bytes, or the end of the segment that is extended."""
        grain = (2 if pool.is_small or (size >= 10 * _MIB and not self.is_expandable) else 20) * _MIB
        end = pool.last if self.is_expandable else None
        if end is not None:
            block = end if end.is_free else Block(end.address + end.size, 0, pool, end)
        else:
            self._segments += 1
            block = Block(self._segments << _SEGMENT_BITS, 0, pool)
        more = -(-(size - block.size) // grain) * grain
        if block.is_free:
            self._remove(block)
        block.size += more
        if self.is_expandable and block is not end:
            pool.last = block
            if end is not None:
                end.after = block
        if self.reserved + more > self.limit and not self.is_expandable:
            self._give_back()
            self.lacking = max(self.lacking, self.reserved + more - self.limit)
        self.reserved += more
        self.peak = max(self.peak, self.reserved)
        return block

    def _give_back(self) -> None:
        """Give free segments, of all streams, back to the device."""
        self.returns += 1
        for pool in self._pools.values():
            self.reserved -= sum(block.size for _, _, block in pool.free if block.is_whole)
            pool.free = [entry for entry in pool.free if not entry[2].is_whole]

    def _insert(self, block: Block) -> None:
        """Add a free block beside its neighbours."""
        block.is_free = True
        if block.before:
            block.before.after = block
        if block.after:
            block.after.before = block
        elif self.is_expandable:
            block.pool.last = block
        bisect.insort(block.pool.free, (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        del block.pool.free[bisect.bisect_left(block.pool.free, (block.size, block.address))]
