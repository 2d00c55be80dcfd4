"""Detect losses and gradients that are not finite, on the rank and in the batch where they appear."""

from __future__ import annotations

import functools
import math
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field

from stratagem.api import CUSTOM_CLIPPING, Capabilities, hookimpl
from stratagem.api.capabilities import CHECKS_GRADIENTS, STEPS_IN_BACKWARD
from stratagem.api.parameters import needs_closure
from stratagem.api.readback import Readback
from stratagem.errors import ConfigError, StratagemError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Where a loss scale or a comm hook skips steps whose numbers overflow, so many such losses in a row are an error.
_SKIPPED_LOSSES = 20

#: The parameter whose gradient it is ("" is the loss), the batch, the epoch, and the steps before.
_Place = tuple[str, int, int, int]


@define(eq=False, kw_only=True)
class Finite(Callback):
    """Check that the loss of each rank is finite in each batch, on CPUs and CUDA, for which the host does not wait."""

    #: Raise an error, which ends all ranks; warn once; or warn once and skip each optimizer step whose averaged
    #: gradients are not finite, on all ranks: for this the host waits in each step.
    action: Literal["error", "warn", "skip"] = "error"
    #: Check the gradients of each rank before they are averaged, too: reads all of them once more in each backward.
    #: Not with sharded parameters, nor with a loss scale, which lets gradients overflow.
    gradients: bool = False

    _watches: bool = field(init=False, default=False)
    #: A loss is judged after its backward.
    _is_late: bool = field(init=False, default=False)
    #: Losses in a row that are not finite, and how many of them are an error.
    _bad_losses: int = field(init=False, default=0)
    _most: int = field(init=False, default=1)
    #: Numbers on a GPU that are read next, and those on their way from there.
    _waiting: list[tuple[_Place, torch.Tensor]] = field(init=False, factory=list)
    _sent: tuple[list[_Place], Readback] | None = field(init=False, default=None)
    _handles: list[Any] = field(init=False, factory=list)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # an option decides
        return Capabilities(conflicts={STEPS_IN_BACKWARD} if self.action == "skip" else ())

    @hookimpl
    def on_train_start(self, trainer: TrainerView, module: torch.nn.Module, run: RunContext) -> None:
        self._watches, self._bad_losses = not run.environment.simulated, 0
        # With detect_anomaly the backward names the operation.
        self._is_late = run.device != torch.device("cpu") or trainer.settings.detect_anomaly
        self._most = _SKIPPED_LOSSES if run.policy.loss_scaling or run.provides(CHECKS_GRADIENTS) else 1
        if self.action == "skip":
            _check_that_steps_can_be_skipped(run)
        if self.gradients and self._watches:
            self._watch_gradients(trainer, module)

    def _watch_gradients(self, trainer: TrainerView, module: torch.nn.Module) -> None:
        run = trainer.run
        if run.shards_parameters or run.policy.loss_scaling:
            why = f"{run.title_of(run.strategy)} shards parameters"
            raise ConfigError(
                f"finite.gradients is True and {why if run.shards_parameters else 'a loss scale lets them overflow'}",
                expected="False",
            )
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(functools.partial(self._on_gradient, trainer, name)))

    @hookimpl
    def on_before_backward(self, trainer: TrainerView, loss: torch.Tensor) -> None:
        if not self._watches:
            return
        if not self._is_late:
            value = loss.item()
            if self._bad_losses or not math.isfinite(value):
                self._judge(trainer, _place(trainer), value)
        elif loss.is_cpu or loss.is_cuda:
            self._waiting.append((_place(trainer), loss.detach()))
            if self._sent is None or self._sent[1].ready:
                self._read(trainer)

    @hookimpl
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer, run: RunContext) -> None:
        if self.action == "skip" and not run.environment.simulated:
            parameters = _parameters([optimizer])
            is_bad = not _are_finite([parameter.grad for parameter in parameters if parameter.grad is not None])
            if run.peers.any(is_bad) if run.shards_parameters else is_bad:
                # an optimizer skips parameters without a gradient
                for parameter in parameters if run.manual else _parameters(run.optimizers):
                    parameter.grad = None
                run.step.count_skipped()

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        while self._sent is not None or self._waiting:
            self._read(trainer)
        self._stop()

    @hookimpl
    def on_exception(self) -> None:
        self._stop()

    def _on_gradient(self, trainer: TrainerView, name: str, gradient: torch.Tensor) -> None:
        values = _local_values(gradient.detach())
        total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).abs()
        if total.is_cuda:
            self._waiting.append((_place(trainer, name), total))
        else:
            self._judge(trainer, _place(trainer, name), total.item())

    def _read(self, trainer: TrainerView) -> None:
        """Send what waits on the GPU, and judge what has arrived from there."""
        sent, waiting = self._sent, self._waiting
        numbers = {str(index): number for index, (_, number) in enumerate(waiting)}
        self._sent, self._waiting = ([place for place, _ in waiting], Readback(numbers)) if waiting else None, []
        if sent is not None:
            for place, value in zip(sent[0], sent[1].numbers().values(), strict=True):
                self._judge(trainer, place, value)

    def _judge(self, trainer: TrainerView, place: _Place, value: float) -> None:
        """Report `value` if it is not finite."""
        name, batch_idx, epoch, step = place
        if math.isfinite(value):
            self._bad_losses = self._bad_losses if name else 0
            return
        self._bad_losses += not name
        if not self._watches or not (name or self._bad_losses >= self._most):
            return
        what = f"the gradient of {name!r} is not finite on rank {{}}" if name else f"the loss of rank {{}} is {value}"
        found = f"{what.format(trainer.global_rank)} in batch {batch_idx} of epoch {epoch}, after {step} steps, "
        found += f"as in {self._most - 1} batches before it" if self._most > 1 else "for the first time in this fit"
        do = "check that batch, and what training_step computes of it: detect_anomaly=True names the operation"
        before_step = not (name or self._is_late)
        if before_step and not trainer.run.shards_parameters and (bad := _bad_parameter(trainer.module)):
            found += f"; the parameter {bad!r} is not finite either"
            do = (
                "lower the learning rate, or set gradient_clip_val: "
                'checks={"name": "finite", "gradients": True} names the gradient'
            )
        if self.action == "error":
            raise StratagemError(found, expected="finite numbers", do=f"{do}; checks=None trains on")
        self._watches = False
        warnings.warn(f"{found}; {do}", stacklevel=2)

    def _stop(self) -> None:
        self._watches, self._sent, self._waiting = False, None, []
        while self._handles:
            self._handles.pop().remove()


def _check_that_steps_can_be_skipped(run: RunContext) -> None:
    skips = "a loss scale" if run.policy.loss_scaling else "a comm hook" if run.provides(CHECKS_GRADIENTS) else ""
    if closes_over := next(filter(needs_closure, run.optimizers), None):
        raise ConfigError(
            f"finite.action is 'skip' and {type(closes_over).__name__} moves the weights before it has all gradients",
            expected="'error' or 'warn'",
        )
    if skips or not run.provides(CUSTOM_CLIPPING):
        why = f"{skips} skips such steps" if skips else f"{run.title_of(run.strategy)} keeps the gradients to itself"
        raise ConfigError(f"finite.action is 'skip' and {why}", expected="'error' or 'warn'")


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[torch.nn.Parameter]:
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def _local_values(gradient: Any) -> torch.Tensor:
    gradient = gradient._values() if gradient.is_sparse else gradient
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _are_finite(gradients: list[Any]) -> bool:
    local = [_local_values(gradient) for gradient in gradients]
    return bool(torch.nn.utils.get_total_norm([each for each in local if each.numel()], math.inf).isfinite())


def _place(trainer: TrainerView, name: str = "") -> _Place:
    position = trainer.position
    return name, position.batches_done, position.epoch, position.global_step


def _bad_parameter(module: torch.nn.Module) -> str | None:
    """Return the name of the first parameter that is not finite on this rank."""
    for name, parameter in module.named_parameters():
        value: Any = parameter.detach()
        if not (value.to_local() if hasattr(value, "to_local") else value).isfinite().all():
            return name
    return None
