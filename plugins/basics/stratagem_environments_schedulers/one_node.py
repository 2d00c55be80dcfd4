"""Tell the ranks of one node which port rank 0 listens on, where only their launcher is common to them.

[Note: port files]
Rank 0 listens on a free port and writes it to a file in a folder that only this user can read. The folder is named
after the *launcher*: the nearest ancestor process without this process's rank variable, by its id and its start time,
which never come again. A wrapper script around each rank is not the launcher, since it has the variable.

A wrapper script may run two programs, one after the other, under the same launcher. So each rank reads a file once: it
leaves a note with the file's random name, and a process that finds the note of its own rank waits for the next file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from attrs import evolve

from stratagem.api import World
from stratagem.distributed.probe import Notices, notify
from stratagem.errors import ConfigError, LaunchError

#: What this process has shared or read, by the name of the rank variable: it connects more than once.
_shared: dict[str, tuple[int, Any]] = {}


def share_port(world: World, rank_variable: str, limit_s: float) -> World:
    """Return `world` with the port of a store that rank 0 hosts. All ranks of the node call it; see [Note: port files].

    Raises:
        LaunchError: rank 0 did not write a port within `limit_s` seconds.
    """
    if rank_variable not in _shared:
        folder = _folder(launcher_of(rank_variable))
        _shared[rank_variable] = _serve(folder) if world.rank == 0 else (_read(folder, world.rank, limit_s), None)
    return evolve(world, main_port=_shared[rank_variable][0], store_hosted=True)


def _serve(folder: Path) -> tuple[int, Any]:
    from stratagem.distributed.rendezvous import RendezvousStore

    listening = RendezvousStore()
    store = listening.serve()
    new = folder / f"new-{uuid.uuid4().hex}"
    new.write_text(f"{uuid.uuid4().hex} {listening.port}")
    new.replace(folder / "port")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return listening.port, store


def _read(folder: Path, rank: int, limit_s: float) -> int:
    notices = Notices()
    while True:
        with contextlib.suppress(OSError):  # not there yet, or removed by rank 0 of an earlier program
            name, _, port = (folder / "port").read_text().partition(" ")
            (folder / f"read-{name}-{rank}").touch(exist_ok=False)
            return int(port)
        if notices.waited_s > limit_s:
            raise LaunchError(
                f"rank {rank} waited {limit_s:g} s for rank 0, which writes its port to {folder}",
                do="check that all ranks run the same program, or export MASTER_ADDR and MASTER_PORT",
            )
        if notices.due():
            notify(f"rank {rank} waits for rank 0, which writes its port to {folder}; it waits {limit_s:g} s in all")
        time.sleep(0.02)
        _make(folder)  # rank 0 of an earlier program removes it


def _folder(launcher: str) -> Path:
    """Return the folder for the ranks of `launcher`; other users can neither read nor prepare it.

    Raises:
        ConfigError: another user owns a folder of that name.
    """
    parent = Path(tempfile.gettempdir()) / f"stratagem-ports-{os.getuid()}"
    _make(parent)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{parent} is not a folder of this user alone", expected="one that only this user can read",
            do="remove it, or export MASTER_PORT in each process",
        )  # fmt: skip
    _make(parent / launcher)
    return parent / launcher


def _make(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


# --- The launcher ------------------------------------------------------------------------------------------------


def launcher_of(rank_variable: str) -> str:
    """Return the id and start time of the process that started this rank, the same for all ranks of the node."""
    pid, mine = os.getppid(), os.environ.get(rank_variable)
    while pid > 1 and _variable_of(pid, rank_variable) == mine:
        pid = int(_status(pid)[1])
    fields = _status(pid)
    return f"{pid}-{fields[19] if len(fields) > 19 else 0}"


def _variable_of(pid: int, name: str) -> str | None:
    """Return a variable that process `pid` was started with; None if it has none, or where that cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{name}=".encode()
    return next((entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), None)


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ... start time at index 19."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
