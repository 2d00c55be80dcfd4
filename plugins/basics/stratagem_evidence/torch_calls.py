"""The last collectives that torch's flight recorder has: also those that C++ code began, such as the buckets of DDP.

torch's own functions for this are private, and used here alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import cattrs
from cattrs.errors import BaseValidationError

from stratagem_evidence.ring import Record, Site
from stratagem_evidence.users_files import users_frame

#: Where NCCL's watchdog writes what it recorded, followed by the rank, when a collective times out.
_DUMP_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
_DUMP = "torch_calls_"
#: Collectives whose input is as large on all ranks.
_EQUAL = ("all_reduce", "broadcast", "reduce", "allreduce", "_all_gather_base", "_allgather_base")


def dump_into(folder: Path) -> None:
    """Have NCCL's watchdog write into `folder`, unless the user has chosen another place."""
    os.environ.setdefault(_DUMP_VARIABLE, str(folder / _DUMP))


def no_dump_into(folder: Path) -> None:
    """Undo `dump_into`."""
    if os.environ.get(_DUMP_VARIABLE) == str(folder / _DUMP):
        del os.environ[_DUMP_VARIABLE]


def write_calls(folder: Path, rank: int) -> None:
    """Write the last collectives of this process, if torch has recorded them."""
    from torch._C import _distributed_c10d
    from torch.distributed.distributed_c10d import _world

    c10d: Any = _distributed_c10d
    groups = {str(group.group_name): tuple(ranks) for group, ranks in _world.pg_group_ranks.items()}
    with contextlib.suppress(Exception):  # it is private, and this process is about to end
        recorded = pickle.loads(c10d._dump_fr_trace(True, True, False))  # noqa: S301 - of this process
        calls = json.dumps(cattrs.unstructure([*_calls(recorded, groups)]))
        (folder / f"{rank}.calls").write_text(calls)


def read_calls(folder: Path, rank: int) -> list[Record]:
    """Return the last collectives of `rank`, the oldest first, as the process or NCCL's watchdog wrote them."""
    own, dump = folder / f"{rank}.calls", folder / f"{_DUMP}{rank}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError, BaseValidationError):
        if own.exists():
            return cattrs.structure(json.loads(own.read_text()), list[Record])
        if dump.exists():
            recorded = _Plain(io.BytesIO(dump.read_bytes())).load()
            configs = recorded["pg_config"].values()
            return [*_calls(recorded, {each["name"]: tuple(json.loads(each["ranks"])) for each in configs})]
    return []


class _Plain(pickle.Unpickler):
    """Reads numbers, text, lists and mappings: a file may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def _calls(recorded: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Iterator[Record]:
    for entry in recorded["entries"]:
        name = entry["process_group"][0]
        if entry["is_p2p"] or name not in groups:
            continue
        op = entry["profiling_name"].partition(":")[2]
        sizes, dtypes, ranks = entry["input_sizes"], entry["input_dtypes"], groups[name]
        size = sum(map(prod, sizes)) if op in _EQUAL else None
        label = f"{','.join(map(str, ranks))}#{name} (torch)"
        dtype = dtypes[0].lower() if dtypes else ""
        site = Site(op, label, ranks, size, dtype, _place(entry))
        yield Record(entry["collective_seq_id"], entry["time_created_ns"] / 1e9, site)


def _place(entry: Mapping[str, Any]) -> str:
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    found = users_frame(frames)
    return "" if found is None else f"{os.path.basename(found[0])}:{found[1]}, {found[2]}"
