"""Base class of lossy hooks: check that averaged gradients are finite; skip the step on all ranks, or raise, if not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import GRADIENT_BUCKETS, Capabilities, hookimpl
from stratagem.api.capabilities import CHECKS_GRADIENTS
from stratagem.api.per_run import PerRun
from stratagem.api.readback import Readback
from stratagem.errors import ConfigError, StratagemError
from stratagem_buckets import CommHook

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem.api import RunContext


@define(eq=False)
class FiniteChecks:
    """The checks of one hook in one run."""

    #: Optimizer steps so far.
    steps: int = 0
    #: Whether each average since the last `result` was finite; on the device, so that the host does not wait.
    finite: list[Tensor] = field(factory=list)
    #: Whether `finite` has been read: the next average belongs to another step.
    was_read: bool = False
    warned: bool = False
    #: Whether the device skipped the latest steps; copies to the host that may not be complete.
    pending: list[Readback] = field(factory=list)
    #: Buckets may be checked by several threads.
    _lock: threading.Lock = field(init=False, factory=threading.Lock, repr=False)

    def check(self, average: Tensor) -> Tensor:
        """Return whether `average` is finite, as a 0-d tensor, and record it for `result`."""
        finite = is_finite(average)
        with self._lock:
            if self.was_read:
                self.finite, self.was_read = [], False
            self.finite.append(finite)
        return finite

    def result(self) -> Tensor | None:
        """Return whether all averages of this step were finite, on the device; None if there were none."""
        self.was_read = True
        return torch.stack(self.finite).all() if self.finite else None


@define(eq=False, kw_only=True)
class LossyHook(CommHook):
    """A hook that checks the averages it returns (`check`). All ranks have the same ones, so all decide the same."""

    capabilities = Capabilities(requires={GRADIENT_BUCKETS}, provides={CHECKS_GRADIENTS})
    #: What to do when averaged gradients are not finite: "skip" skips the step, counts it and warns once; "error" ends
    #: the run. With loss scaling the precision plugin decides instead.
    nonfinite: Literal["skip", "error"] = "skip"

    _checks: PerRun[FiniteChecks] = field(init=False, factory=lambda: PerRun(FiniteChecks), repr=False)

    def check(self, average: Tensor, run: RunContext) -> Tensor:
        """Return whether `average`, which this hook is about to return, is finite, as a 0-d tensor; record it."""
        return self._checks.of(run).check(average)

    def steps(self, run: RunContext) -> int:
        """Return how many optimizer steps `run` has made."""
        return self._checks.of(run).steps

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        if self.nonfinite == "error" and run.policy.loss_scaling:
            raise ConfigError(
                f"comm_hook.{run.name_of(self)}.nonfinite is 'error', and the precision scales the loss, so that "
                "gradients overflow in normal operation",
                expected="'skip'",
            )

    @hookimpl(wrapper=True)
    def step_optimizers(
        self, optimizers: list[torch.optim.Optimizer], closure: Callable[[], Tensor] | None, run: RunContext
    ) -> Generator[None, bool, bool]:
        checks = self._checks.of(run)
        if run.policy.loss_scaling:
            checks.was_read = True  # the precision finds the overflow in the gradients
            stepped = yield
        elif closure is None and self.nonfinite == "skip" and all(map(_can_skip, optimizers)):
            stepped = yield from self._step_on_device(optimizers, checks, run)
        elif closure is None:
            finite = self._are_finite(checks, run)
            if not finite:
                self._drop_gradients(optimizers, checks, run)
            stepped = (yield) and finite
        else:  # the gradients are computed and used within the step
            checks.was_read = True
            stepped = yield
            if not self._are_finite(checks, run):
                where = f" within a step of {type(optimizers[0]).__name__}, which cannot be skipped"
                raise self._error(run, where)
        checks.steps += 1
        return stepped

    def _are_finite(self, checks: FiniteChecks, run: RunContext) -> bool:
        """Return whether all averages of this step are finite. Collective where ranks average only their own shards."""
        result = checks.result()
        known = result is None or run.environment.simulated  # a plan has no values
        finite = known or bool(result)  # waits for the device
        return not run.peers.any(not finite) if run.shards_parameters else finite

    def _step_on_device(
        self, optimizers: list[Any], checks: FiniteChecks, run: RunContext
    ) -> Generator[None, bool, bool]:
        """Let the device decide whether to step, through `found_inf`, as for loss scaling; the host reads it later.

        Returns:
            False if it is already known that the step was skipped, as on the CPU.
        """
        self._count_skipped(checks, run)
        finite = checks.result()
        if finite is None and not run.shards_parameters:
            return (yield)
        bad = torch.zeros((), device=run.device) if finite is None else (~finite).float()
        if run.shards_parameters:  # a rank has only the averages of its own shards
            bad = run.peers.unchecked.all_reduce(bad, "max")
        above = getattr(optimizers[0], "found_inf", None)
        bad = bad if above is None else torch.maximum(bad, above)
        for optimizer in optimizers:
            optimizer.grad_scale, optimizer.found_inf = None, bad
        try:
            stepped = yield
            bad = optimizers[0].found_inf  # includes what the hooks below this one found
        finally:
            for optimizer in optimizers if above is None else ():
                del optimizer.grad_scale, optimizer.found_inf
        self.drop(bad, run)
        if above is not None:  # the hook above counts
            return stepped
        skipped = Readback({"skipped": bad})
        if not skipped.ready:
            checks.pending.append(skipped)
            return stepped
        if skipped.numbers()["skipped"]:
            self._warn(checks, run)
            return False
        return stepped

    def drop(self, bad: Tensor, run: RunContext) -> None:
        """Drop state of a step that was skipped, if `bad` (on the device) is 1 rather than 0."""

    def _count_skipped(self, checks: FiniteChecks, run: RunContext, *, wait: bool = False) -> None:
        """Count the steps that the device skipped, as far as that is known on the host."""
        while checks.pending and (wait or checks.pending[0].ready):
            if checks.pending.pop(0).numbers()["skipped"]:
                self._warn(checks, run)
                run.step.count_skipped()

    @hookimpl(optionalhook=True)
    def on_train_epoch_end(self, run: RunContext) -> None:
        self._count_skipped(self._checks.of(run), run, wait=True)

    def _drop_gradients(self, optimizers: list[Any], checks: FiniteChecks, run: RunContext) -> None:
        """Set gradients to None: an optimizer skips parameters without a gradient."""
        if self.nonfinite == "error":
            raise self._error(run)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
        if has_gradients:
            self._warn(checks, run)

    def _warn(self, checks: FiniteChecks, run: RunContext) -> None:
        if not checks.warned and run.is_global_zero:
            checks.warned = True
            warnings.warn(
                f"comm_hook {run.name_of(self)!r} averaged gradients that are not finite: this step is skipped, as "
                "later ones will be (trainer.position.skipped_steps counts them)",
                stacklevel=2,
            )

    def _error(self, run: RunContext, where: str = "") -> StratagemError:
        return StratagemError(
            f"comm_hook {run.name_of(self)!r} averaged gradients that are not finite{where}",
            expected="finite ones on all ranks",
            do=f"look for the cause in the loss, lower the learning rate, or (comm_hook.{run.name_of(self)}.nonfinite "
            'is "error") skip such steps with "skip"'
            if self.nonfinite == "error" and not where
            else "look for the cause in the loss, or lower the learning rate",
        )


def _can_skip(optimizer: Any) -> bool:
    """Return whether `optimizer` skips a step exactly when `found_inf` on the device is 1: torch's fused ones do."""
    # If its first step were skipped, torch's SGD would continue with momentum that was never initialized.
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not is_sgd


def is_finite(tensor: Tensor) -> Tensor:
    """Return whether all of `tensor` is finite, as a 0-d tensor: one pass, no synchronization."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)  # nan if an element is
    return torch.isfinite(low) & torch.isfinite(high)
