"""Log gradient norms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import Capabilities, hookimpl
from stratagem.api.capabilities import STEPS_IN_BACKWARD
from stratagem.errors import ConfigError
from stratagem_callbacks.logged_metrics import check_has_logger, log
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class GradientNorms(Callback):
    """Log the norm of all gradients before clipping, over all ranks, as ``grad_norm``.

    With several optimizers the names are ``grad_norm/0``, ``grad_norm/1``, ... Computed only on steps that are logged.
    """

    capabilities = Capabilities(conflicts={STEPS_IN_BACKWARD})

    #: Log the norm of each parameter's gradient, too, as ``grad_norm/<name>``; not with sharded parameters.
    per_parameter: bool = False

    _first_step: int = field(init=False, default=1)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        check_has_logger(trainer, "gradient_norms")
        self._first_step = trainer.global_step + 1
        if self.per_parameter and trainer.run.shards_parameters:
            raise ConfigError(
                f"gradient_norms.per_parameter is True and {trainer.run.title_of(trainer.run.strategy)} shards "
                "parameters",
                expected="False",
            )

    @hookimpl
    def on_before_optimizer_step(
        self, trainer: TrainerView, module: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunContext
    ) -> None:
        step = trainer.global_step + 1  # the number of this step
        if step % trainer.settings.log_every_n_steps and step != self._first_step:
            return
        several = len(run.optimizers) > 1
        name = f"grad_norm/{run.optimizers.index(optimizer)}" if several else "grad_norm"
        # Clipping with an infinite limit only computes the norm: unscaled, over all ranks, for any strategy and
        # precision.
        metrics: dict[str, Any] = {name: float(run.clip_gradients(optimizer, max_norm=math.inf))}
        if self.per_parameter:
            metrics |= _norms({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
        log(trainer, metrics, step)


def _norms(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of each of `gradients`, with one device synchronization."""
    if not gradients:
        return {}
    norms = torch._foreach_norm(list(gradients.values()))
    values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return {f"grad_norm/{name}": value for name, value in zip(gradients, values, strict=True)}
