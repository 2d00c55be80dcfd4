"""What compiled steps run uncompiled, and how they are compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

#: By class: what `keep_uncompiled` named, until the first step is compiled.
_UNCOMPILED: dict[type, tuple[str, ...]] = {}


def keep_uncompiled(owner: type, *names: str) -> None:
    """Have compiled steps run these methods and properties of `owner` uncompiled.

    They read what changes with each batch, such as how many were logged. If torch traced that, it would compile the
    step for each value, and give up after eight: the step would no longer be compiled.
    """
    _UNCOMPILED[owner] = names


def step_compiler(compiler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that compiles a step with `compiler`, without what `keep_uncompiled` named."""

    def compiled(step: Any) -> Any:
        while _UNCOMPILED:  # only here, since it imports torch's compiler, which takes seconds
            owner, names = _UNCOMPILED.popitem()
            for name in names:
                found = inspect.getattr_static(owner, name)  # a base class may define it
                if isinstance(found, property):
                    setattr(owner, name, property(torch.compiler.disable(found.fget), doc=found.__doc__))
                else:
                    setattr(owner, name, torch.compiler.disable(found))
        return compiler(step)

    return compiled
