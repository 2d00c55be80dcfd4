"""Log how large gradients are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import Callback, hookimpl
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext, TrainerView


@define(eq=False, kw_only=True)
class GradientNorms(Callback):
    """Logs the norm of all gradients before clipping, over all ranks, as ``grad_norm`` (``grad_norm/0`` of several).

    Computed on the steps that are logged.
    """

    #: Also the norm of each parameter's gradient, as ``grad_norm/<name>``; where parameters are whole.
    per_parameter: bool = False

    _last_step: int = field(init=False, default=-1)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        if not (trainer.loggers or trainer.fast_dev_run):
            raise ConfigError(
                "gradient_norms has no logger to log to", expected="a logger", do="drop logger=False, or it"
            )
        if self.per_parameter and trainer.run.shards_parameters:
            raise ConfigError(
                f"gradient_norms.per_parameter is True and {trainer.run.title_of(trainer.run.strategy)} shards "
                "parameters",
                expected="False there",
            )

    @hookimpl
    def on_before_optimizer_step(
        self, trainer: TrainerView, module: torch.nn.Module, optimizer: torch.optim.Optimizer, run: RunContext
    ) -> None:
        step = trainer.global_step + 1  # the step that is about to be made
        if step % trainer.settings.log_every_n_steps:
            return
        several = len(run.optimizers) > 1
        name = f"grad_norm/{run.optimizers.index(optimizer)}" if several else "grad_norm"
        # Without a limit clipping only measures: unscaled, and over all ranks, as the strategy and the precision know.
        metrics: dict[str, Any] = {name: float(run.clip_gradients(optimizer, max_norm=math.inf))}
        if self.per_parameter:
            metrics |= _norms({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
        trainer.callback_metrics.update(metrics)
        if trainer.is_global_zero:
            run.log_metrics(metrics, step)


def _norms(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of each of `gradients`, waiting for the device once."""
    if not gradients:
        return {}
    norms = torch._foreach_norm(list(gradients.values()))
    values = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return {f"grad_norm/{name}": value for name, value in zip(gradients, values, strict=True)}
