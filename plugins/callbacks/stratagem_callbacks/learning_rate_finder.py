"""Find a learning rate by a range test."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from attrs.converters import optional

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than, not_empty
from stratagem.errors import ConfigError
from stratagem_callbacks.batch_size_finder import set_found
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

#: Weight of earlier losses in the running average that ends the test early.
_SMOOTHING = 0.95
#: First steps to ignore: their losses depend more on the batches than on the rates.
_SKIPPED = 5
#: The loss must fall by this many standard deviations of the smoothed curve: noise alone falls by two or three.
_DEVIATIONS = 8.0
#: The chosen rate must come after this fraction of the fall, where the curve has left its flat start.
_MIN_FALL = 0.1


@define(eq=False, kw_only=True)
class LearningRateFinder(Callback):
    """Before training, increase the learning rate from `min_lr` to `max_lr`; train with the one where the loss fell
    fastest.

    Smith, 2015, "Cyclical Learning Rates for Training Neural Networks". The trial steps have no effect on training. If
    the loss falls no more than its noise, the learning rate is not changed, and a warning is raised. The rate is
    that of the first parameter group (whose rate is not 0). Other groups keep their ratios to it, as does the module's
    `attr_name`, and schedules multiply what was found: with schedules `configure_optimizers` is called again. One with
    rates of its own (OneCycleLR, CyclicLR) must compute them from `attr_name`. A resumed run does not search again.
    """

    #: Learning rate of the first step.
    min_lr: float = field(default=1e-8, validator=more_than(0))
    #: Learning rate of the last step.
    max_lr: float = field(default=1.0, validator=more_than(0))
    #: Number of steps: more are smoother and take longer.
    num_training_steps: int = field(default=100, validator=at_least(10))
    #: End early when the smoothed loss is this many times the best; None runs all steps.
    early_stop_threshold: float | None = field(default=4.0, validator=more_than(1))
    #: Train with the suggestion; otherwise only print it.
    update: bool = True
    #: Attribute (or hyper-parameter) of the module to set, if the module has it: to the suggestion, or where the first
    #: group has 1/10 of it, to 10 times the suggestion.
    attr_name: str = field(default="lr", validator=not_empty)
    #: File for a plot of the losses (PNG; needs matplotlib).
    plot: Path | None = field(default=None, converter=optional(Path))

    #: Rates tried and smoothed losses.
    results: dict[str, list[float]] = field(init=False, factory=dict)
    #: The rate that was found; None before, or if the loss fell no more than its noise.
    suggestion: float | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.min_lr >= self.max_lr:
            raise ConfigError(
                f"learning_rate_finder.min_lr is {self.min_lr} and max_lr {self.max_lr}", expected="min_lr below max_lr"
            )

    @hookimpl(trylast=True)  # after batch_size_finder, whose batches are those to try
    def on_fit_start(self, trainer: TrainerView, module: torch.nn.Module) -> None:
        if trainer.global_step or trainer.fast_dev_run:
            return
        with trainer.trial_steps("learning_rate_finder") as step:
            rates, losses = self._range_test(trainer, step)
        self.results = {"lr": rates, "loss": smooth(losses).tolist()}
        self.suggestion = steepest(rates, losses)
        if self.plot is not None and trainer.is_global_zero:
            draw(self.results, self.suggestion, self.plot)
        if self.suggestion is None:
            if trainer.is_global_zero:
                kept = trainer.optimizers[0].param_groups[0]["lr"]
                warnings.warn(
                    f"learning_rate_finder found no rate from {self.min_lr:g} to {self.max_lr:g} at which the loss "
                    f"falls more than its noise: training starts with lr={float(kept):g}. "
                    "Raise max_lr or num_training_steps, lower min_lr, or use larger batches",
                    stacklevel=2,
                )
            return
        trainer.print(f"learning_rate_finder: {self.suggestion:.3g}")
        if self.update:
            self._apply(trainer, module, self.suggestion)

    def _range_test(self, trainer: TrainerView, step: Any) -> tuple[list[float], list[float]]:
        (optimizer,) = trainer.optimizers
        _, ratios = _searched(trainer)
        rates: list[float] = []
        losses: list[float] = []
        smoothed = best = 0.0
        batches = itertools.chain.from_iterable(trainer.train_dataloader for _ in itertools.count())
        for number in range(self.num_training_steps):
            rate = self.min_lr * (self.max_lr / self.min_lr) ** (number / (self.num_training_steps - 1))
            for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
                group["lr"] = rate * ratio
            loss = float(step(next(batches), number))
            if not math.isfinite(loss):
                break
            smoothed = _SMOOTHING * smoothed + (1 - _SMOOTHING) * loss
            value = smoothed / (1 - _SMOOTHING ** (number + 1))
            rates.append(rate)
            losses.append(loss)
            best = value if number < _SKIPPED else min(best, value)
            if self.early_stop_threshold is not None and number > 10 and value > self.early_stop_threshold * best > 0:
                break
        return rates, losses

    def _apply(self, trainer: TrainerView, module: Any, rate: float) -> None:
        searched, ratios = _searched(trainer)
        rates = [rate * ratio for ratio in ratios]
        value = getattr(module, self.attr_name, module.hparams.get(self.attr_name))
        related = isinstance(value, int | float) and value > 0 and searched > 0
        set_found(module, self.attr_name, rate * (value / searched) if related else rate)
        if trainer.lr_scheduler_configs:
            trainer.configure_again()  # a schedule may compute with the rate
        if not (own := _own_rates(trainer)):
            _scale(trainer, rates)
        elif not torch.allclose(torch.tensor(own), torch.tensor(rates), rtol=1e-3, atol=0):
            raise ConfigError(
                f"learning_rate_finder found rates of {rates}, and the schedule's own rates are {own}",
                expected=f"rates that configure_optimizers computes from self.{self.attr_name}",
                do="compute them from it, or from another attribute and name it in learning_rate_finder.attr_name",
            )


def _searched(trainer: TrainerView) -> tuple[float, list[float]]:
    """Return the rate that the search replaces, that of the first group with one, and the ratios of groups to it."""
    rates = _own_rates(trainer) or [_base(group) for group in trainer.optimizers[0].param_groups]
    first = next(filter(None, rates), 0.0)
    return first, [rate / first if first else 1.0 for rate in rates]


def _base(group: dict[str, Any]) -> float:
    """Return the rate of a parameter group that its schedule multiplies."""
    return float(group.get("initial_lr", group["lr"]))


def _schedulers(trainer: TrainerView) -> list[Any]:
    return [part for config in trainer.lr_scheduler_configs for part in config.parts()]


def _own_rates(trainer: TrainerView) -> list[float]:
    """Return the rates that schedules do not multiply: the largest one of OneCycleLR or CyclicLR for each group."""
    of_groups = [float(group["max_lr"]) for group in trainer.optimizers[0].param_groups if "max_lr" in group]
    return of_groups or next((each.max_lrs for each in _schedulers(trainer) if hasattr(each, "max_lrs")), [])


def _scale(trainer: TrainerView, rates: list[float]) -> None:
    """Have schedules multiply `rates`, one of each parameter group, from their present step on."""
    groups = trainer.optimizers[0].param_groups
    for group, rate in zip(groups, rates, strict=True):
        base = _base(group)
        group["lr"] = float(group["lr"]) * (rate / base) if base else rate
        if "initial_lr" in group:
            group["initial_lr"] = rate
    for scheduler in _schedulers(trainer):
        for name, key in {"base_lrs": "initial_lr", "_last_lr": "lr"}.items():
            if hasattr(scheduler, name):
                setattr(scheduler, name, [group[key] for group in groups])


def steepest(lr: list[float], loss: list[float]) -> float | None:
    """Return the rate where `loss` falls fastest; None if it falls no more than its noise."""
    losses = torch.tensor(loss, dtype=torch.float64)
    if len(losses) < 2 * _SKIPPED:
        return None
    smoothed = smooth(loss)
    lowest = int(smoothed[_SKIPPED:-1].argmin()) + _SKIPPED  # later rates are too high: the loss rises
    start, end = float(losses[: max(_SKIPPED, len(losses) // 10)].mean()), float(smoothed[lowest])
    deviation = float((losses - smoothed)[: lowest + 1].std()) / math.sqrt(2 * math.sqrt(math.pi) * _width(len(losses)))
    fall = start - end
    if fall <= max(_DEVIATIONS * deviation, 1e-3 * abs(start)) or end >= loss[0]:
        return None
    slopes = torch.gradient(smoothed)[0]
    candidates = [i for i in range(_SKIPPED, lowest + 1) if smoothed[i] <= start - _MIN_FALL * fall]
    steep = min(candidates, key=lambda i: float(slopes[i]))
    return lr[steep] if slopes[steep] < 0 else None


def smooth(loss: list[float]) -> torch.Tensor:
    """Return `loss` smoothed with a Gaussian around each step: unlike a running average it has no lag."""
    steps = torch.arange(len(loss), dtype=torch.float64)
    weights = torch.exp(-0.5 * ((steps[:, None] - steps) / _width(len(loss))) ** 2)
    return (weights / weights.sum(1, keepdim=True)) @ torch.tensor(loss, dtype=torch.float64)


def _width(steps: int) -> float:
    return max(1.0, steps / 30)


def draw(results: dict[str, list[float]], suggestion: float | None, path: Path) -> None:
    """Write a plot of `results` to `path`.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"learning_rate_finder.plot is {str(path)!r}, which needs matplotlib", do="run `pip install matplotlib`"
        ) from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(results["lr"], results["loss"], color="#4063d8")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss, smoothed")
    if suggestion is not None:
        at = results["lr"].index(suggestion)
        axes.plot([suggestion], [results["loss"][at]], "o", color="#cb3c33", label=f"{suggestion:.3g}")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
