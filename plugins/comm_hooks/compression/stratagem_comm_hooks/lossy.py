"""What all hooks share that may lose something: gradients that are not finite come out on all ranks, and are dealt with
there.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import CommHook, hookimpl
from stratagem.api.per_run import PerRun
from stratagem.api.readback import Readback
from stratagem.errors import ConfigError, StratagemError

if TYPE_CHECKING:
    from collections.abc import Callable

    from stratagem.api import RunContext


@define(eq=False)
class Watch:
    """What a hook has seen of one run."""

    #: Optimizer steps so far.
    steps: int = 0
    #: Whether each average since the last look was finite; on the device, for nobody to wait.
    finite: list[Tensor] = field(factory=list)
    #: What `finite` says is known: the next average belongs to another step.
    looked: bool = False
    warned: bool = False
    #: Whether the device has skipped the latest steps, on the way to the host.
    late: list[Readback] = field(factory=list)

    def see(self, average: Tensor) -> Tensor:
        """Remember whether `average` is finite; return that as a tensor without dimensions."""
        finite = is_finite(average)
        if self.looked:
            self.finite, self.looked = [], False
        self.finite.append(finite)
        return finite

    def look(self) -> Tensor | None:
        """Return whether all averages of this step were finite, on the device; None if there were none."""
        self.looked = True
        return torch.stack(self.finite).all() if self.finite else None


@define(eq=False, kw_only=True)
class Lossy(CommHook):
    """A hook that notes each average it returns (`see`); all ranks have the same, and so decide alike."""

    #: What becomes of a step whose averaged gradients are not finite: "skip" leaves the parameters as they are, counts
    #: and warns once; "error" ends the run. Where the precision scales the loss, it is the precision that decides.
    nonfinite: Literal["skip", "error"] = "skip"

    _watches: PerRun[Watch] = field(init=False, factory=lambda: PerRun(Watch), repr=False)

    def see(self, average: Tensor, run: RunContext) -> Tensor:
        """Note whether `average`, which this hook is about to return, is finite; return that as a tensor."""
        return self._watches.of(run).see(average)

    def steps(self, run: RunContext) -> int:
        """How many optimizer steps `run` has made."""
        return self._watches.of(run).steps

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        if self.nonfinite == "error" and run.policy.loss_scaling:
            raise ConfigError(
                f"comm_hook.{run.name_of(self)}.nonfinite is 'error', and the precision scales the loss, for which "
                "gradients that overflow are nothing unusual",
                expected="'skip'",
            )

    @hookimpl(wrapper=True)
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor] | None, run: RunContext
    ) -> Generator[None, bool, bool]:
        watch = self._watches.of(run)
        if run.policy.loss_scaling:
            watch.looked = True  # the precision finds the overflow in the gradients
            stepped = yield
        elif closure is None and self.nonfinite == "skip" and _can_skip(optimizer):
            stepped = yield from self._step_on_device(optimizer, watch, run)
        elif closure is None:
            fine = self._are_finite(watch, run)
            if not fine:
                self._let_pass_by(optimizer, watch, run)
            stepped = (yield) and fine
        else:  # the gradients come within the step, and go into it
            watch.looked = True
            stepped = yield
            if not self._are_finite(watch, run):
                raise self._refusal(run, f" within a step of {type(optimizer).__name__}, which cannot be skipped")
        watch.steps += 1
        return stepped

    def _are_finite(self, watch: Watch, run: RunContext) -> bool:
        """Whether this step's averages were. Ranks that saw those of their shards alone tell each other: collective."""
        finite = watch.look()
        fine = finite is None or bool(finite)  # waits for the device
        return not run.peers.any(not fine) if run.shards_parameters else fine

    def _step_on_device(self, optimizer: Any, watch: Watch, run: RunContext) -> Generator[None, bool, bool]:
        """Let the device decide whether to step, as it does for loss scaling: the host learns it later.

        Returns:
            False if the step is known to be skipped already, as it is on the CPU.
        """
        self._count_late(watch, run)
        finite = watch.look()
        if finite is None and not run.shards_parameters:
            return (yield)
        bad = torch.zeros((), device=run.device) if finite is None else (~finite).float()
        if run.shards_parameters:  # a rank saw the averages of its shards alone
            bad = run.peers.unchecked.all_reduce(bad, "max")
        above = getattr(optimizer, "found_inf", None)
        optimizer.grad_scale, optimizer.found_inf = None, bad if above is None else torch.maximum(bad, above)
        try:
            stepped = yield
            bad = optimizer.found_inf  # with what the hooks below this one have found
        finally:
            if above is None:
                del optimizer.grad_scale, optimizer.found_inf
        self.drop(bad, run)
        if above is not None:  # the hook above counts
            return stepped
        skipped = Readback({"skipped": bad})
        if not skipped.ready:
            watch.late.append(skipped)
            return stepped
        if skipped.numbers()["skipped"]:
            self._warn(watch, run)
            return False
        return stepped

    def drop(self, bad: Tensor, run: RunContext) -> None:
        """Forget what belongs to a step that was skipped, if `bad` is 1 (on the device) rather than 0."""

    def _count_late(self, watch: Watch, run: RunContext, *, wait: bool = False) -> None:
        """Count the steps that the device turns out to have skipped."""
        while watch.late and (wait or watch.late[0].ready):
            if watch.late.pop(0).numbers()["skipped"]:
                self._warn(watch, run)
                run.count_skipped_step()

    @hookimpl
    def on_train_epoch_end(self, run: RunContext) -> None:
        self._count_late(self._watches.of(run), run, wait=True)

    def _let_pass_by(self, optimizer: Any, watch: Watch, run: RunContext) -> None:
        """Take the gradients away: without any, an optimizer passes a parameter by."""
        if self.nonfinite == "error":
            raise self._refusal(run)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        for parameter in parameters:
            parameter.grad = None
        if has_gradients:
            self._warn(watch, run)

    def _warn(self, watch: Watch, run: RunContext) -> None:
        if not watch.warned and run.is_global_zero:
            watch.warned = True
            warnings.warn(
                f"comm_hook {run.name_of(self)!r} averaged gradients that are not finite: the step is skipped, and so "
                "will be others like it (trainer.position.skipped_steps counts them)",
                stacklevel=2,
            )

    def _refusal(self, run: RunContext, where: str = "") -> StratagemError:
        return StratagemError(
            f"comm_hook {run.name_of(self)!r} averaged gradients that are not finite{where}",
            expected="finite ones on all ranks",
            do=f"look for the cause in the loss, lower the learning rate, or (comm_hook.{run.name_of(self)}.nonfinite "
            'is "error") skip such steps with "skip"'
            if self.nonfinite == "error" and not where
            else "look for the cause in the loss, or lower the learning rate",
        )


def _can_skip(optimizer: Any) -> bool:
    """Whether `optimizer` steps or not as a number on the device tells it, exactly: torch's fused ones do."""
    # Skipped in its first step, torch's SGD would go on with momentum that was never set.
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not is_sgd


def is_finite(tensor: Tensor) -> Tensor:
    """Return whether all of `tensor` is finite, as a tensor without dimensions: one pass, no waiting."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.isfinite(torch.linalg.vector_norm(tensor, float("inf")))
