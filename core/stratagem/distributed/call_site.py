"""Describe where a process is: the call in which it may wait for other ranks, and the user's line."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from stratagem.api.world import Collectives

if TYPE_CHECKING:
    from types import FrameType, TracebackType


#: Packages whose frames say nothing about where a user's program was.
_NOT_THE_USERS = frozenset({"stratagem", "torch", "pluggy", "deepspeed", *sys.stdlib_module_names} - {"__main__"})

#: Where the methods of `Collectives` are defined.
_COLLECTIVES = ("stratagem.api.world", "stratagem.distributed.process_group")
#: Functions of torch that wait for other ranks; they may be called without `Collectives`.
_TORCH_CALLS = {
    "torch._tensor": {"backward": "loss.backward()"},
    "torch.autograd": {"backward": "torch.autograd.backward()"},
    "torch.utils.data.dataloader": {"__next__": "the wait for the loader's next batch"},
    "torch.nn.parallel.distributed": {"forward": "the forward pass of DistributedDataParallel"},
}


def where(frame: FrameType | None) -> str:
    """Return where the code of `frame` is: the call in which it may wait for other ranks, and the user's line.

    A function may describe it better than by its name, in a local variable `waiting_in`.
    """
    frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
    line = next((each for each in frames if is_users(each.f_globals)), None)
    place = "" if line is None else f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno}"
    call = next(filter(None, map(_call, reversed(frames[: frames.index(line)] if line in frames else frames))), "")
    if not call:
        return f"{place} ({line.f_code.co_name})" if line is not None else "Python's own code"
    return f"{call} ({place})" if place else call


def _call(frame: FrameType) -> str:
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if "waiting_in" in frame.f_code.co_varnames:
        return str(frame.f_locals.get("waiting_in", ""))
    if module in _COLLECTIVES and not name.startswith("_") and hasattr(Collectives, name):
        return f"{name}()"
    if module == "torch.distributed.distributed_c10d" and not name.startswith("_") and name != "wrapper":
        return f"torch.distributed.{name}()"
    return _TORCH_CALLS.get(module, {}).get(name, "")


def innermost_user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of `trace` in the user's own code, as ``function (file:line)``; "" if there is none."""
    for frame, number in reversed(list(traceback.walk_tb(trace))):
        if is_users(frame.f_globals):
            return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{number})"
    return ""


def is_users(names: dict[str, Any]) -> bool:
    """Whether a module with the global `names` is the user's."""
    return package_of(names) not in _NOT_THE_USERS


def package_of(names: dict[str, Any]) -> str:
    """Return the outermost package of a module with the global `names`; "stratagem" for that of a plugin."""
    package = str(names.get("__name__", "")).partition(".")[0]
    return "stratagem" if package.startswith("stratagem_") else package
