"""Gather what few ranks differ in."""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stratagem.api import Collectives


def gather_distinct(collectives: Collectives, value: Any) -> list[tuple[int, Any]]:
    """Return the different values of all ranks, each with the first rank that has it, in their order. Collective.

    All ranks compare checksums, and only one rank of those with the same value sends it: of thousands of ranks, those
    of a stage of the model have the same.

    Args:
        value: equal values have equal pickles: sorted tuples rather than sets.
    """
    digest = hashlib.sha256(pickle.dumps(value)).digest()
    digests = torch.stack(collectives.all_gather(torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64))).flatten()
    first: dict[int, int] = {}
    for rank, each in enumerate(digests.tolist()):
        first.setdefault(each, rank)
    if len(first) == 1:
        return [(0, value)]
    firsts = sorted(first.values())
    values = collectives.all_gather_object(value if collectives.rank in firsts else None)
    return [(rank, values[rank]) for rank in firsts]
