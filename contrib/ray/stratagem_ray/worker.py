"""One process of a run, in an actor of Ray. Nothing is imported here that could initialize a device."""

from __future__ import annotations

import io
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from attrs import frozen
from ray import cloudpickle

from stratagem.distributed.launched import report
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.distributed.rendezvous import RendezvousStore
from stratagem.errors import ConfigError

#: The variable that CUDA reads when it is initialized.
_GPUS = "CUDA_VISIBLE_DEVICES"


@frozen
class Place:
    """Where an actor runs."""

    address: str
    pid: int
    #: Ids of the GPUs that Ray reserved for it.
    gpus: list[str]


@frozen
class Answer:
    """What `main` returned or raised in one process, such that it can be sent to the driver."""

    rank: int
    #: The packed result, of rank 0 only.
    result: bytes | None = None
    #: The error report of `stratagem.distributed.launched`.
    failure: dict[str, Any] | None = None


class Worker:
    """The actor. Ray starts a process for it, which ends with it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._store: RendezvousStore | None = None

    def __repr__(self) -> str:
        """Return what Ray prints before each line of output."""
        return f"rank {self.rank}"

    def place(self) -> Place:
        return Place(ray.util.get_node_ip_address(), os.getpid(), [str(gpu) for gpu in ray.get_gpu_ids()])

    def reserve_store(self, address: str, for_others: bool) -> int:
        """Bind a port for the store, which is served once `run` is called; return the port."""
        self._store = RendezvousStore(address, for_others=for_others)
        return self._store.port

    def run(self, packed: bytes, variables: Mapping[str, str], gpus: list[str], folder: str | None) -> Answer:
        """Call the packed function with `variables` set, and the `gpus` of all processes of this node visible."""
        _enter(variables, gpus, folder)
        try:
            if self._store is not None:
                self._store.serve()
            result = _unpacked(packed, self.rank)()
            return Answer(self.rank, _pack(result) if self.rank == 0 else None)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code
            return Answer(self.rank, failure=None if code == 0 else _report(stop, self.rank))
        except BaseException as error:  # noqa: BLE001 - reported to the driver, which raises it
            return Answer(self.rank, failure=_report(error, self.rank))


def _unpacked(packed: bytes, rank: int) -> Any:
    try:
        return cloudpickle.loads(packed)
    except ImportError as error:
        raise ConfigError(
            f"rank {rank} cannot import a module of the script on {socket.gethostname()} ({error})",
            expected="the script's modules on every machine of the Ray cluster",
            do='install them there, or send this folder with launcher.ray.runtime_env={"working_dir": "."}',
        ) from error


def _enter(variables: Mapping[str, str], gpus: list[str], folder: str | None) -> None:
    for name in (PARENT_VARIABLE, REPORTS_VARIABLE):  # of a launcher that started Ray
        os.environ.pop(name, None)
    os.environ.update(variables)
    if gpus:  # local rank n trains on the nth of them; by default Ray shows each process its own alone
        os.environ[_GPUS] = ",".join(gpus)
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)


def _pack(result: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(result, file, pickle_module=cloudpickle)
    return file.getvalue()


def _report(error: BaseException, rank: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stratagem-ray-") as folder:
        report(error, rank, Path(folder))
        content: dict[str, Any] = json.loads((Path(folder) / f"{rank}.json").read_text())
    return content
