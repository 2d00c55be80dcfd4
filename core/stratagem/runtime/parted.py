"""A module whose weights are sharded says so when a program takes its ``state_dict()``, which lacks most of them."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

from torch import nn

from stratagem.runtime.hook_caller import HookCaller


class Parted:
    """Warns once when the ``state_dict()`` of a module that `strategy` shards, or that of a part, is taken.

    A plugin may take it, since it knows what it reads.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy, self._has_warned = strategy, False

    def watch(self, module: nn.Module) -> None:
        """Watch `module`, unless it is watched since an earlier fit."""
        if module.__dict__.setdefault("_stratagem_parted", self) is self:
            for part in module.modules():
                part.register_state_dict_post_hook(self)

    def __call__(self, module: nn.Module, *state: Any) -> None:
        if self._has_warned:
            return
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        if HookCaller.ask.__code__ in codes:
            return
        self._has_warned = True
        inside = (__file__, nn.modules.module.__file__)
        level = next(number for number, code in enumerate(codes, 1) if code.co_filename not in inside)
        warnings.warn(
            f"state_dict() has this rank's part of the weights alone, because {self._strategy} shards them: what "
            "torch.save writes of it lacks the others; for a file with whole weights, call "
            "trainer.save_checkpoint(path, weights_only=True), or run.save, on all ranks",
            stacklevel=level,
        )
