"""Tell the other ranks of an error that ends this process before they have met: they would wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from stratagem.distributed.meeting import Meeting
from stratagem.distributed.probe import ask
from stratagem.distributed.rendezvous import PortTakenError

#: How long a process that ends may take to tell the others.
_LIMIT_S = 2.0

_has_met = False
_earlier_hook: Any = None


def watch() -> None:
    """Tell the other ranks if an uncaught error ends this process before `ranks_have_met`.

    For processes that the user or a scheduler starts with MASTER_ADDR, MASTER_PORT and a rank. Where a launcher or an
    agent watches them, it ends the others.
    """
    global _earlier_hook
    if _earlier_hook is None and _place() is not None:
        _earlier_hook, sys.excepthook = sys.excepthook, _tell


def ranks_have_met() -> None:
    global _has_met
    _has_met = True


def _place() -> tuple[str, int] | None:
    """Return the address and port of the store, where the environment has them and a rank."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address is None or not port.isdecimal() or not {"RANK", "NODE_RANK"} & set(os.environ):
        return None
    return address, int(port)


def _tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    _earlier_hook(kind, error, trace)
    place = _place()
    # At a port that was taken another run listens, which is not concerned.
    if _has_met or place is None or not isinstance(error, Exception) or isinstance(error, PortTakenError):
        return
    with contextlib.suppress(Exception):
        if ask(*place, limit_s=_LIMIT_S).kind == "store":
            import torch.distributed as dist

            store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=_LIMIT_S))
            Meeting(store, generation="0", number=1).fail(_report(error))


def _report(error: BaseException) -> str:
    names = [f"{name} {os.environ[name]}" for name in ("RANK", "NODE_RANK") if name in os.environ]
    what = f"process {os.getpid()} on {socket.gethostname()} ({', '.join(names)})"
    return f"{what} failed before it met the others, with {type(error).__name__}: {str(error).rstrip('.')}"
