"""What each rank saves beside the state that all share, in a checkpoint under ``"ranks"``.

[Note: rows of ranks]
A format that writes whole tensors gets a list with the state of each rank, gathered from all. In a format that takes
shards a rank writes its state alone, as it does with its shards: it is a row of a tensor of bytes, (ranks, bytes), in
which a number, the length, is followed by what `torch.save` makes of a text in JSON and a list of tensors. So a save
sends 8 bytes of each rank and encodes nothing that grows with their number, and a reader decodes only the rows that it
asks for. If a few ranks have much more than the others, rows would be mostly padding: then all is gathered.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.api.json_tree import decode, encode
from stratagem.checkpoint.state_checks import check_rank, on_all_ranks
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Bytes of the number before the content of a row.
_LENGTH = 8
#: Bytes of padding that do not matter.
_PADDING = 1 << 20


def states_of_ranks(run: RunContext, state: Callable[[], Mapping[str, Any]]) -> Any:
    """Return what a checkpoint has of all ranks, if this one has what `state` returns. Collective.

    See [Note: rows of ranks].

    Raises:
        Exception: an error of `state`, or CheckpointError: a value of it cannot be saved; on all ranks.
    """
    collectives = run.collectives
    whole = run.whole_state or collectives.world_size == 1

    def encoded() -> tuple[dict[str, Any], bytes]:
        mine = dict(state())
        return mine, b"" if whole else _encoded(mine, f"ranks[{collectives.rank}]")

    mine, content = on_all_ranks(collectives, encoded, Exception)
    if whole:
        return collectives.all_gather_object(mine)
    lengths = torch.stack(collectives.all_gather(torch.tensor(len(content)))).tolist()
    longest = max(lengths)
    if longest * len(lengths) > 2 * sum(lengths) + _PADDING:
        return collectives.all_gather_object(mine)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    row = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
    ranks = torch.arange(collectives.world_size)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=collectives.rank)  # it sends nothing
    return DTensor.from_local(row[None], mesh, [Shard(0)], run_check=False)


def gathered(ranks: Any, run: RunContext) -> Any:
    """Return `ranks`, as `states_of_ranks` made it, whole: for a format that leaves shards to an engine. Collective."""
    local = getattr(ranks, "to_local", None)
    return ranks if local is None else torch.cat(run.collectives.all_gather(local()))


def ranks_in(state: Mapping[str, Any], path: Any) -> Sequence[Mapping[str, Any]]:
    """Return what each rank saved in the `state` that `path` holds: empty if it has nothing of ranks."""
    saved = state.get("ranks", [])
    if isinstance(saved, list | tuple):
        return saved
    if hasattr(saved, "to_local"):
        raise CheckpointError(
            "what ranks save is not at hand while a checkpoint in shards is written: each rank has its row alone",
            expected="a checkpoint that was written", do="read it from there",
        )  # fmt: skip
    return _Rows(saved, path)


class _Rows(Sequence[Mapping[str, Any]]):
    """The states of ranks, each decoded when it is used first."""

    def __init__(self, rows: Tensor, path: Any) -> None:
        self._rows, self._path = rows, path
        self._decoded = functools.cache(self._decode)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self._decoded(number % len(self))

    def _decode(self, number: int) -> Mapping[str, Any]:
        where = f"{self._path}: ranks[{number}]"
        try:
            rank: Mapping[str, Any] = _decoded(self._rows[number].numpy().tobytes())
        except Exception as error:
            raise CheckpointError(
                f"{where} cannot be read ({type(error).__name__})", expected="what that rank saved",
                do="use another checkpoint; no code of this one was executed",
            ) from error  # fmt: skip
        check_rank(rank, self._path, number)
        return rank


def _encoded(state: Mapping[str, Any], where: str) -> bytes:
    tensors: list[Tensor] = []

    def place(tensor: Tensor, _: str) -> int:
        # torch.save would write all that a view is a part of, and the name of a class that is not read back.
        tensors.append(tensor.cpu().clone().as_subclass(Tensor))
        return len(tensors) - 1

    try:
        text = json.dumps(encode(state, place, where))
    except (RuntimeError, ValueError) as error:  # a tensor without values, numbers without end, a circle
        raise CheckpointError(
            f"{where} cannot be saved ({type(error).__name__}: {str(error).splitlines()[0]})",
            expected="tensors with values, numbers, texts and containers of them", do="convert it in rank_state()",
        ) from error  # fmt: skip
    file = io.BytesIO(bytes(_LENGTH))
    file.seek(_LENGTH)
    # Not as a zip archive, whose directory is at the end: a file that ends with such a row would be taken for one.
    torch.save((text, tensors), file, _use_new_zipfile_serialization=False)
    length = file.tell() - _LENGTH
    file.seek(0)
    file.write(length.to_bytes(_LENGTH, "little"))
    return file.getvalue()


def _decoded(row: bytes) -> Any:
    end = _LENGTH + int.from_bytes(row[:_LENGTH], "little")
    text, tensors = torch.load(io.BytesIO(row[_LENGTH:end]), weights_only=True)
    return decode(json.loads(text), tensors)
