"""Tell the other ranks of an error that ends this process before it comes to their meeting: they would wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from stratagem.distributed.probe import ask, notify
from stratagem.distributed.rendezvous import Meeting, PortTakenError

if TYPE_CHECKING:
    from stratagem.api.world import World

#: How long a process that has failed waits for rank 0 to listen, and to take its message.
_LIMIT_S = 10.0

#: Set by torch's agent, which ends the other processes and starts all again.
_AGENT = "TORCHELASTIC_RUN_ID"


def tell(error: Exception, world: World | None) -> None:
    """Tell the ranks that wait for this process of the `error` that ends it.

    Args:
        world: this process's place, if it is known; otherwise the variables MASTER_ADDR and MASTER_PORT and a rank are
            used, if they are set.
    """
    place = None if _AGENT in os.environ else _store_place(world)
    # At a port that was taken another run listens, which is not concerned.
    if place is None or isinstance(error, PortTakenError):
        return
    with contextlib.suppress(Exception):
        if _answers(place):
            import torch.distributed as dist

            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=_LIMIT_S))
            Meeting(store, generation="0", number=1).fail(_report(error, world))


def _store_place(world: World | None) -> tuple[str, int] | None:
    """Return the address and port of a store that another rank or its launcher hosts; None if there is none."""
    if world is not None:
        alone = world.world_size == 1 or world.main_port is None or world.generation != "0" or world.rank == 0
        return None if alone else (world.main_address, int(world.main_port or 0))
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    rank = os.environ.get("RANK", os.environ.get("NODE_RANK", "0"))
    return (address, int(port)) if address is not None and port.isdecimal() and rank != "0" else None


def _answers(place: tuple[str, int]) -> bool:
    """Return whether a store answers; rank 0 may be about to start one."""
    deadline = time.monotonic() + _LIMIT_S
    if (answer := ask(*place, limit_s=_LIMIT_S)).kind == "nothing":
        notify(f"this process waits up to {_LIMIT_S:g} s to tell rank 0 at {place[0]}:{place[1]} of its error")
    while answer.kind == "nothing" and time.monotonic() < deadline:
        time.sleep(0.2)
        answer = ask(*place, limit_s=_LIMIT_S)
    return answer.kind == "store"


def _report(error: Exception, world: World | None) -> str:
    names = [f"{name} {os.environ[name]}" for name in ("RANK", "NODE_RANK") if name in os.environ]
    who = f"rank {world.rank}" if world is not None else ", ".join(names)
    what = f"process {os.getpid()} on {socket.gethostname()} ({who})"
    return f"{what} failed before it met the others, with {type(error).__name__}: {str(error).rstrip('.')}"
