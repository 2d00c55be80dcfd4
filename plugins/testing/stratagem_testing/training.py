"""Functions for the processes of a check: train a model with the plugin under test, and measure the process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem_testing.reference import Batch, part
from stratagem_trainer.settings import switched_off

#: Arguments of a trainer that writes no files and prints nothing.
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}

#: Offsets in Linux's `struct tcp_info`: bytes that wait to be sent (uint32), and those sent, then resent (uint64 each).
_TCPI_NOTSENT_BYTES, _TCPI_BYTES_SENT = 144, 200


def quiet(*plugins: Any) -> dict[str, Any]:
    """Return `QUIET` without the arguments that switch one of `plugins` off, which a trainer refuses."""
    refused = {name for name in QUIET for plugin in plugins if isinstance(plugin, switched_off(name))}
    return {name: value for name, value in QUIET.items() if name not in refused}


def train(
    rank: int, world_size: int, make: Callable[[], sg.Module], batches: list[Batch], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Fit ``make()`` on this process's share of each batch.

    Returns:
        ``weights`` by plain names, the number of ``steps``, and ``used``: the numbers of the batches that were not
        skipped because their gradients overflowed (without accumulation).
    """
    skipped = EveryBatch(lambda trainer: trainer.position.skipped_steps)
    callbacks = [skipped, *arguments.get("callbacks", ())]
    base = {} if "max_epochs" in arguments else QUIET  # a kit's arguments have what they need of it
    trainer = sg.Trainer(**(base | {"devices": world_size} | arguments | {"callbacks": callbacks}))
    trainer.fit(make(), share(trainer, batches))
    counts = [0, *skipped.results]
    used = [index for index, (before, after) in enumerate(itertools.pairwise(counts)) if before == after]
    return {"weights": weights_of(trainer), "steps": trainer.global_step, "used": used}


class EveryBatch(sg.Callback):
    """Calls a function with the trainer after each training batch, and appends its result to `results`."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.results = function, list[Any]()

    @sg.hookimpl
    def on_train_batch_end(self, trainer: Any) -> None:
        self.results.append(self.function(trainer))


def share(trainer: sg.Trainer, batches: list[Batch]) -> list[Batch]:
    """Return this process's part of every batch, according to the strategy's mesh."""
    trainer.run.connect()
    mesh = trainer.run.mesh
    return part(batches, mesh.data_shard, mesh.num_data_shards)


def shared_loader(trainer: sg.Trainer, batches: list[Batch]) -> DataLoader[Any]:
    """Return a loader of what `share` returns, for a trainer without a distributed sampler."""
    mine = share(trainer, batches)
    x, y = (torch.cat(parts) for parts in zip(*mine, strict=True))
    return loader((x, y), len(mine[0][0]))


def weights_of(trainer: sg.Trainer) -> dict[str, Tensor]:
    """Return the whole model by plain names, on every rank. Collective."""
    with trainer.run.gathered_state():
        state = trainer.run.ask("model_state", module=trainer.module)
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def weights_on_all_ranks(results: list[dict[str, Any]], look: str = "take the same steps on all") -> dict[str, Tensor]:
    """Return the ``weights`` of the ranks, after checking that they are bit-equal on all; `look` ends the error."""
    __tracebackhide__ = True
    first: dict[str, Tensor] = results[0]["weights"]
    for rank, result in enumerate(results):
        differing = [name for name in first if not torch.equal(first[name], result["weights"][name])]
        if differing:
            raise AssertionError(f"weights of rank {rank} and of rank 0 differ in {', '.join(differing)}; {look}")
    return first


def outcome(act: Callable[[], Any]) -> str:
    """Return the error that `act` raises as text, with "refused: " before a `StratagemError`; "nothing" if none."""
    try:
        act()
    except StratagemError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - reported
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loader(samples: Batch, batch_size: int) -> DataLoader[Any]:
    """Return a plain loader over `samples`, in order."""
    return DataLoader(TensorDataset(*samples), batch_size=batch_size)


def bytes_sent() -> int | None:
    """Return the number of bytes written to this process's TCP connections; None if the system does not count them."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                total += _bytes_sent_on(os.dup(int(name)))
    return total


def _bytes_sent_on(descriptor: int) -> int:
    with socket.socket(fileno=descriptor) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _TCPI_BYTES_SENT + 16:
        return 0
    # A busy machine sends late, and sends again what was not acknowledged in time.
    (waiting,) = struct.unpack_from("I", info, _TCPI_NOTSENT_BYTES)
    sent, resent = struct.unpack_from("QQ", info, _TCPI_BYTES_SENT)
    return int(sent - resent + waiting)


def resources_held() -> dict[str, Any]:
    """Return this process's resources: open descriptors, threads, process group, files in its working folder."""
    gc.collect()
    descriptors, tasks = Path("/proc/self/fd"), Path("/proc/self/task")
    return {
        "open files and ports": len(os.listdir(descriptors)) if descriptors.exists() else 0,
        "threads": len(os.listdir(tasks)) if tasks.exists() else threading.active_count(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "files": sorted(str(path) for path in Path.cwd().rglob("*")),
    }


def stable_resources() -> dict[str, Any]:
    """Return what this process holds once it no longer changes: threads and connections end a moment later."""
    held, since, deadline = resources_held(), time.monotonic(), time.monotonic() + 5
    while time.monotonic() < min(since + 0.5, deadline):
        time.sleep(0.1)
        now = resources_held()
        if now != held:
            held, since = now, time.monotonic()
    return held


class in_empty_folder:  # noqa: N801 - reads as a statement
    """Within: work in a new folder, which is removed at the end."""

    def __enter__(self) -> Path:
        # A server that a plugin started may still write there at the end.
        folder = tempfile.TemporaryDirectory(prefix="stratagem-test-", ignore_cleanup_errors=True)
        self._before, self._folder = Path.cwd(), folder
        os.chdir(self._folder.name)
        return Path(self._folder.name)

    def __exit__(self, *_: object) -> None:
        os.chdir(self._before)
        self._folder.cleanup()
