"""Muon for matrices that are cut: a part of a matrix has other singular vectors than the matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon  # the orthogonalization has no public name


@contextlib.contextmanager
def whole_matrices(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Within, those of `optimizers` that are a `torch.optim.Muon` orthogonalize whole matrices. Collective.

    Each rank gathers the momentum of one matrix at a time, computes what one process would, and keeps its part.
    Momentum, weight decay and update stay in parts. (DTensor's own products round in bfloat16 between ranks.)
    """
    if not any(isinstance(each, torch.optim.Muon) for each in optimizers):
        yield
        return
    of_whole = _muon._zeropower_via_newtonschulz

    def of_parts(grad: Tensor, *arguments: Any) -> Tensor:
        if not isinstance(grad, DTensor):
            return of_whole(grad, *arguments)
        whole = of_whole(grad.full_tensor(), *arguments)
        return distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)

    _muon._zeropower_via_newtonschulz = of_parts  # type: ignore[assignment]
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = of_whole
