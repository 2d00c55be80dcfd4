"""Train a batch part by part: what a callback gets from `TrainerView.train_in_parts`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import ConfigError
from stratagem_trainer.metric_log import log_metric
from stratagem_trainer.metrics import LogOptions, StageMetrics, computes
from stratagem_trainer.signatures import takes
from stratagem_trainer.targets import read
from stratagem_trainer.token_loss import check_count

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_trainer.fit_state import FitState

_Entry = tuple[str, Any, dict[str, Any]]
#: A method that the user's module has while no part of a batch is computed.
_WITHOUT_COMPUTATION = "_stratagem_without_computation"


class PartSteps:
    """See `stratagem_trainer.api.trainer_view.PartSteps`."""

    def __init__(self, state: FitState) -> None:
        self._state, self._run = state, state.run
        self._with_index = takes(state.module.training_step, 2)
        self._targets = read(state.settings.loss_normalization)

    def train(self, part: Any, batch_idx: int, divisor: float, sync: bool) -> Any:
        outputs = self._run.step.train_step(part, batch_idx, divisor, sync, self._with_index)
        if self._state.sums_losses and isinstance(outputs, dict) and "count" in outputs:
            check_count(outputs["count"], self._run)  # a sum of counts would hide what they are
        return outputs

    def weight(self, part: Any, samples: int) -> float:
        return samples if self._targets is None else self._targets.count(part)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[_Entry]]:
        state = self._state
        before, state.stage_metrics = state.stage_metrics, _Recorded(state.stage_metrics)
        try:
            yield state.stage_metrics.entries
        finally:
            state.stage_metrics = before

    def publish(self, entries: list[_Entry]) -> None:
        for name, value, options in entries:
            call = LogOptions(**{option: options[option] for option in LogOptions._fields})
            log_metric(self._state, name, value, call, options["batch_size"], options["add_dataloader_idx"])

    def send_buffers(self) -> None:
        with self._calling("train", sync=False):
            pass

    def average_gradients(self) -> None:
        step = self._run.step
        events, step.before_backward, step.after_backward = (step.before_backward, step.after_backward), None, None
        try:
            with self._calling("train", sync=True) as one:
                step.backward(one)
        finally:
            step.before_backward, step.after_backward = events

    @contextlib.contextmanager
    def _calling(self, stage: str, sync: bool) -> Iterator[Tensor]:
        """Within the contexts of a step: call the wrapped model without a computation."""
        run, module = self._run, self._state.module
        with contextlib.ExitStack() as stack:
            run.sync_gradients = sync
            run.hooks.enter_all(stack, "step_context", stage=stage, sync=sync)
            module.__dict__[_WITHOUT_COMPUTATION] = functools.partial(_one, module)
            try:
                yield run.model(_WITHOUT_COMPUTATION)
            finally:
                del module.__dict__[_WITHOUT_COMPUTATION]


class _Recorded(StageMetrics):
    """Keeps the calls of `log`."""

    def __init__(self, of: StageMetrics) -> None:
        super().__init__(of.default_on_step, of.collectives)
        self.batch = of.batch
        self.entries: list[_Entry] = []

    def log(
        self, name: str, value: Any, options: LogOptions, batch_size: int | None = None, add_dataloader_idx: bool = True
    ) -> None:
        if computes(value):
            raise ConfigError(
                f"log({name!r}) got a {type(value).__name__}, and batches are computed in parts, some of them twice",
                expected="a number", do="log what it computes for the batch, or use it in validation_step",
            )  # fmt: skip
        # flat, with `reduce_fx` and `batch_size`, as `stratagem_microbatches.combined` reads them
        value = value.detach() if isinstance(value, torch.Tensor) else value
        added = {"batch_size": batch_size, "add_dataloader_idx": add_dataloader_idx}
        self.entries.append((name, value, options._asdict() | added))


class _Through(torch.autograd.Function):
    """Passes a number on, and adds zero to the gradient of a parameter in backward, without a tensor of its size."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, parameter: Tensor) -> Tensor:
        ctx.zero = parameter.new_zeros(()).expand(parameter.shape)
        return one.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.zero


def _one(module: torch.nn.Module) -> Tensor:
    """Return 1.0, whose backward reaches the parameters that have gradients, the last one first, and changes none."""
    reached = [parameter for parameter in module.parameters() if parameter.grad is not None]
    one = torch.ones((), device=reached[0].device if reached else None, requires_grad=True)
    for parameter in reached:
        one = _Through.apply(one, parameter)  # type: ignore[no-untyped-call]  # torch's
    return one
