"""Stages 1 and 2: check that all ranks accumulate the gradients of the same parameters."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext


class GradientOrder:
    """Which parameters backward gave gradients to, in order.

    Stages 1 and 2 add up over the ranks what lies at the same place of their buffers: gradients of other parameters, if
    ranks use different ones, and nobody would notice.
    """

    def __init__(self, parameters: list[nn.Parameter], run: RunContext) -> None:
        self._run, self._order = run, list[int]()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, index))
            for index, parameter in enumerate(parameters)
        ]

    def _arrived(self, index: int, _: torch.Tensor) -> None:
        self._order.append(index)

    def compare(self, *, ordered: bool) -> None:
        """Make sure that all ranks have seen the same ones since the last time. Collective.

        Raises:
            ConfigError: they have not; on every rank.
        """
        seen = self._order if ordered else sorted(set(self._order))
        self._order = []
        mine = int.from_bytes(hashlib.sha256(repr(seen).encode()).digest()[:7], "big")
        # A CPU tensor, which does not wait for a GPU; unchecked, as every rank does this in each backward.
        extremes = self._run.collectives.unchecked.all_reduce(torch.tensor([mine, -mine]), "max").tolist()
        if extremes[0] != -extremes[1]:
            order = ", in the same order" if ordered else ""
            raise ConfigError(
                f"ranks used different parameters in one step{order and ', or in another order'}, and DeepSpeed would "
                "add up gradients of one with those of another",
                expected=f"a loss that uses the same parameters on every rank{order}",
                do='add the others with a factor of zero, or choose strategy="ddp_find_unused_parameters_true"',
            )

    def stop(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()
