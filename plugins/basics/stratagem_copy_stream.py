"""Copy batches to a GPU beside the computation: on a CUDA stream of their own.

[Note: the copy stream]
Kernels of earlier batches are still queued on the current stream when the next batch is read. A copy queued behind them
begins when they are done; on a stream of its own it begins at once, and runs while they do. Then the current stream
waits for it, so that whatever uses the batch comes after the copy. Memory made on one stream and used on another must
be recorded there: it would be given to the next copy while kernels still read it.

No batch is read earlier than without it, so nothing changes for resuming, nor for methods of the user's that see a
batch before or after its transfer.

Recorded memory is free again when the kernels are done, not when they are queued. A process far ahead of the GPU would
fill it with batches, so it waits where it is more than a few batches ahead.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

from stratagem.api.batches import map_batch, move_leaf

#: Batches whose copies and kernels may be queued at a time.
_AHEAD: Final = 4
#: Smaller copies from pageable memory do not block.
_STAGED_BYTES: Final = 64 * 1024


class CopyStream:
    """Copies batches to `device`, see [Note: the copy stream]."""

    def __init__(self, device: torch.device, hints: bool = False) -> None:
        self.device = device
        #: Batches copied so far.
        self.batches = 0
        self._stream = torch.cuda.Stream(device)
        #: Of the latest batches: reached when kernels of the batch before are done.
        self._reached: deque[torch.cuda.Event] = deque()
        #: The kind of memory that batches come in has yet to be checked.
        self._check_is_due = hints

    def __call__(self, batch: Any) -> Any:
        """Return `batch` on the device, ready for the current stream."""
        self.batches += 1
        current, copied = torch.cuda.current_stream(self.device), []
        if len(self._reached) < _AHEAD:
            reached = torch.cuda.Event(blocking=True)
        else:
            reached = self._reached.popleft()
            reached.synchronize()

        def move(leaf: Any) -> Any:
            tensors = _copied_tensors(leaf)
            if not tensors:
                if not hasattr(leaf, "to"):
                    return leaf
                with torch.cuda.stream(current):  # its tensors are not known, so they cannot be recorded
                    return move_leaf(leaf, self.device)
            if self._check_is_due:
                self._check_memory(tensors)
            moved = move_leaf(leaf, self.device)
            copied.extend(_copied_tensors(moved, self.device.type))
            return moved

        with torch.cuda.stream(self._stream):
            result = map_batch(batch, move, is_leaf=lambda part: hasattr(part, "to"))
        current.wait_stream(self._stream)
        for tensor in copied:
            tensor.record_stream(current)
        reached.record(current)
        self._reached.append(reached)
        return result

    def _check_memory(self, tensors: list[torch.Tensor]) -> None:
        large = [tensor for tensor in tensors if tensor.nbytes > _STAGED_BYTES]
        self._check_is_due = not large
        if any(not tensor.is_pinned() for tensor in large):
            warnings.warn(
                f"batches come in pageable memory: this process waits for each copy to {self.device}. "
                "Pass pin_memory=True to the DataLoader",
                stacklevel=2,
            )


def _copied_tensors(leaf: Any, device_type: str = "cpu") -> list[torch.Tensor]:
    """Return the plain tensors that `leaf` consists of; none if it is not made of such on `device_type` alone."""
    given = [leaf.data, leaf.sorted_indices, leaf.unsorted_indices] if isinstance(leaf, PackedSequence) else [leaf]
    parts = [part for part in given if part is not None]
    plain = all(
        type(part) is torch.Tensor and part.layout is torch.strided and part.device.type == device_type
        for part in parts
    )
    return parts if plain else []
