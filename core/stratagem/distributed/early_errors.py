"""Tell the other ranks of an error that ends this process before it comes to their meeting: they would wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stratagem.distributed.meeting import Meeting
from stratagem.distributed.probe import ask, notify
from stratagem.distributed.rendezvous import PortTakenError

if TYPE_CHECKING:
    from stratagem.api.world import World

#: How long a process that has failed waits for rank 0 to listen, and to take its message.
_LIMIT_S = 10.0

#: Set by torch's agent, which ends the other processes and starts all again.
_AGENT = "TORCHELASTIC_RUN_ID"

_earlier_hook: Any = None
_has_come = False
_world: World | None = None


def watch(world: World | None = None) -> None:
    """Tell the other ranks if an uncaught error ends this process before `has_come` is called.

    For processes that the user or a scheduler started; where a launcher or an agent watches them, it ends the others.

    Args:
        world: this process's place, once it is known; before that the variables MASTER_ADDR and MASTER_PORT and a rank
            are used, if they are set.
    """
    global _earlier_hook, _world
    _world = world or _world
    if _earlier_hook is None and _AGENT not in os.environ and _store_place() is not None:
        _earlier_hook, sys.excepthook = sys.excepthook, _tell


def has_come() -> None:
    """Stop watching: the others learn of errors in other ways."""
    global _has_come
    _has_come = True


def _store_place() -> tuple[str, int] | None:
    """Return the address and port of a store that another rank or its launcher hosts; None if there is none."""
    if _world is not None:
        alone = _world.world_size == 1 or _world.main_port is None or _world.generation != "0" or _world.rank == 0
        return None if alone else (_world.main_address, int(_world.main_port or 0))
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    rank = os.environ.get("RANK", os.environ.get("NODE_RANK", "0"))
    return (address, int(port)) if address is not None and port.isdecimal() and rank != "0" else None


def _tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    _earlier_hook(kind, error, trace)
    place = _store_place()
    # At a port that was taken another run listens, which is not concerned.
    if _has_come or place is None or not isinstance(error, Exception) or isinstance(error, PortTakenError):
        return
    with contextlib.suppress(Exception):
        if _answers(place):
            import torch.distributed as dist

            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=_LIMIT_S))
            Meeting(store, generation="0", number=1).fail(_report(error))


def _answers(place: tuple[str, int]) -> bool:
    """Return whether a store answers; rank 0 may be about to start one."""
    deadline = time.monotonic() + _LIMIT_S
    if (answer := ask(*place, limit_s=_LIMIT_S)).kind == "nothing":
        notify(f"this process waits up to {_LIMIT_S:g} s to tell rank 0 at {place[0]}:{place[1]} of its error")
    while answer.kind == "nothing" and time.monotonic() < deadline:
        time.sleep(0.2)
        answer = ask(*place, limit_s=_LIMIT_S)
    return answer.kind == "store"


def _report(error: BaseException) -> str:
    names = [f"{name} {os.environ[name]}" for name in ("RANK", "NODE_RANK") if name in os.environ]
    who = f"rank {_world.rank}" if _world is not None else ", ".join(names)
    what = f"process {os.getpid()} on {socket.gethostname()} ({who})"
    return f"{what} failed before it met the others, with {type(error).__name__}: {str(error).rstrip('.')}"
