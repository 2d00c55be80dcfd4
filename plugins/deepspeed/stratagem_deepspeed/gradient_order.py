"""Stages 1 and 2: check that all ranks accumulate the gradients of the same parameters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError
from stratagem_process_group.comparison import are_equal

if TYPE_CHECKING:
    from stratagem.api import RunContext


class GradientOrder:
    """Records which parameters received gradients, in order, to compare the ranks.

    Stages 1 and 2 reduce buffers of gradients over the ranks. If ranks use different parameters, their buffers have
    different layouts, and gradients of different parameters would be added without an error message.
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
        """Check that all ranks recorded the same parameters since the last call. Collective.

        Raises:
            ConfigError: two ranks differ; on every rank.
        """
        seen = self._order if ordered else sorted(set(self._order))
        self._order = []
        if not are_equal(torch.tensor(fingerprint(repr(seen))), self._run.collectives):
            order = ", in the same order" if ordered else ""
            raise ConfigError(
                f"ranks used different parameters in one step{order and ', or in another order'}, and DeepSpeed would "
                "add the gradients of different parameters",
                expected=f"a loss that uses the same parameters on every rank{order}",
                do='add unused parameters times zero to the loss, or set strategy="ddp_find_unused_parameters_true"',
            )

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
