"""One training step: forward, backward, clipping, the optimizer. Calls only hooks that plugins implement."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stratagem.api.context import RunContext
from stratagem.api.parameters import needs_closure
from stratagem.api.run_parts import BACKWARD, PHASE, SINCE
from stratagem.errors import ConfigError, nearest, with_article

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.api.kinds import CopyStream
    from stratagem.checkpoint.background_save import Saver
    from stratagem.runtime.hook_caller import HookCaller
    from stratagem.stack.plugins import Stack


class SteppedRun(RunContext, Protocol):
    """What a step uses of a run."""

    stack: Stack
    saver: Saver
    progress: Any
    copy_stream: CopyStream | None


class Step:
    """The steps of one run."""

    def __init__(self, run: SteppedRun, hooks: HookCaller) -> None:
        self._run, self._hooks = run, hooks
        #: An optimizer steps, through the hooks.
        self.is_stepping = False
        #: Batches for which `training_step` returned None, in this fit.
        self.skipped_batches = 0
        #: Whether `training_step` takes the number of the batch.
        self._with_index = True
        #: How to differentiate, where the module that is trained defines it.
        self.custom_backward: Callable[[Tensor], None] | None = None
        #: Called with what `training_step` returned, before its backward; set by the training loop.
        self.after_forward: Callable[[Any], None] | None = None
        #: Called around each backward, with the loss before it is scaled; set by the training loop.
        self.before_backward: Callable[..., None] | None = None
        self.after_backward: Callable[[], None] | None = None

    def train_step(self, batch: Any, batch_idx: int, divisor: float, sync: bool, with_index: bool = True) -> Any:
        """Forward and backward of one batch, its loss divided by `divisor`; return what `training_step` returned.

        `sync` is False when this batch's gradients are only accumulated.
        """
        self._run.sync_gradients, self._with_index = sync, with_index
        if self._hooks.step_context is None:
            return self._forward_backward_inside(batch, batch_idx, divisor)
        with contextlib.ExitStack() as stack:
            self._hooks.enter_all(stack, "step_context", stage="train", sync=sync and not self._run.manual)
            return self._forward_backward_inside(batch, batch_idx, divisor)

    def _forward_backward_inside(self, batch: Any, batch_idx: int, divisor: float) -> Any:
        if self._hooks.forward_backward is None:
            return self.forward_backward(batch, batch_idx, divisor)
        return self._hooks.forward_backward(
            module=self._run.model, batch=batch, batch_idx=batch_idx, divisor=divisor, run=self._run
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call ``training_step`` of the wrapped model, with the arguments that it takes."""
        if self._with_index:
            return self._run.model("training_step", batch, batch_idx)
        return self._run.model("training_step", batch)

    def forward_backward(self, batch: Any, batch_idx: int, divisor: float) -> Any:
        """Forward and backward of one batch where no plugin answers the hook of this name."""
        output = self.training_step(batch, batch_idx)
        if self._run.manual:
            return output
        loss = output.get("loss") if isinstance(output, dict) else output
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1 and not loss.is_complex()):
            self._check_may_skip(output, batch_idx)
            return None
        if self.after_forward is not None:
            self.after_forward(output)
        self.backward(loss / divisor if divisor != 1 else loss)
        return output

    def _check_may_skip(self, output: Any, batch_idx: int) -> None:
        """Refuse an `output` of ``training_step`` that is not a loss; None may skip a batch where one process trains.

        Raises:
            ConfigError: it is neither a loss nor None, or the other ranks wait for its gradients.
        """
        check_loss(output, self._run.rank)
        if self._run.world_size > 1:
            raise ConfigError(
                f"training_step returned None on rank {self._run.rank} of {self._run.world_size}", expected="a loss",
                do="end training_step with `return loss`; to skip a batch, multiply it by zero: others wait for it",
            )  # fmt: skip
        if self.skipped_batches == 0:
            epoch = "" if self._run.progress is None else f" of epoch {self._run.progress.epoch}"
            warnings.warn(
                f"training_step returned None for batch {batch_idx}{epoch}: the batch is skipped. "
                "If that is not meant, end training_step with `return loss`",
                stacklevel=2,
            )
        self.skipped_batches += 1

    @contextlib.contextmanager
    def evaluate_context(self, stage: str) -> Iterator[None]:
        """Enter the step contexts for one forward without gradients."""
        with contextlib.ExitStack() as stack:
            if self._hooks.step_context is not None:
                self._hooks.enter_all(stack, "step_context", stage=stage, sync=True)
            yield

    def backward(self, loss: Tensor) -> None:
        """Scale `loss` through the precision, and differentiate it through the strategy."""
        self._run.activity[SINCE], self._run.activity[PHASE] = time.time(), BACKWARD
        if self.before_backward is not None:
            self.before_backward(loss=loss)
        if self._hooks.scale_loss is not None:
            loss = self._hooks.answered("scale_loss", self._hooks.scale_loss(loss=loss, run=self._run))
        if self._hooks.backward is None:
            self.differentiate(loss)
        else:
            self._hooks.answered("backward", self._hooks.backward(loss=loss, module=self._run.model, run=self._run))
        if self.after_backward is not None:
            self.after_backward()

    def differentiate(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, or the module's own `backward` if it defines one: for strategies' `backward`."""
        if self.custom_backward is None:
            loss.backward()
        else:
            self.custom_backward(loss)

    def clip_gradients(
        self, optimizer: Optimizer, max_norm: float | None = None, max_value: float | None = None
    ) -> Any:
        """Clip by norm or by value (one of the two); return the norm before clipping, or 0.0 by value.

        Raises:
            ConfigError: not one limit, or complex gradients by value.
        """
        if (max_norm is None) == (max_value is None):
            raise ConfigError(f"clip_gradients got max_norm={max_norm} and max_value={max_value}", expected="one limit")
        try:
            answer = self._hooks.clip_gradients(
                optimizer=optimizer, max_norm=max_norm, max_value=max_value, run=self._run
            )
        except NotImplementedError as error:
            if max_value is None or not _has_complex(optimizer):
                raise
            raise ConfigError(
                f"{type(optimizer).__name__} steps complex parameters, and gradients are clipped by value",
                expected="real parameters: complex numbers have no order",
                do='clip by norm (gradient_clip_algorithm="norm")',
            ) from error
        return self._hooks.answered("clip_gradients", answer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the loss scale, for a module that computes with them."""
        if self._run.policy.loss_scaling and not self._run.stack.precision_absorbed:
            self.clip_gradients(optimizer, max_value=math.inf)  # it unscales first, and changes nothing else

    def step_optimizers(
        self, optimizers: list[Optimizer], closure: Callable[[], Tensor] | None = None, **options: Any
    ) -> bool:
        """Make one step with `optimizers`; return False if all were skipped because gradients overflowed.

        Args:
            closure: only for one optimizer that evaluates the model itself.
            options: of the optimizer's own `step`.

        Raises:
            ConfigError: a plugin steps, which cannot pass `options` on.
        """
        if self._run.saver.busy:
            self._run.saver.check()
        self.is_stepping = True
        try:
            if options:
                return self._step_with(optimizers[0], closure, options)
            if self._hooks.step_optimizers is None and self._hooks.optimizer_step is None and closure is None:
                for optimizer in optimizers:
                    optimizer.step()
                return True
            answer = self._hooks.hook.step_optimizers(optimizers=optimizers, closure=closure, run=self._run)
            return bool(self._hooks.answered("step_optimizers", answer))
        except TypeError as error:
            if closure is not None or not needs_closure(optimizers[0]):
                raise
            raise ConfigError(
                f"{type(optimizers[0]).__name__}.step was called without a closure",
                expected="a closure: it evaluates the model itself, once or many times for each step",
                do="call step(closure); in optimizer_step, call optimizer.step(closure=optimizer_closure)",
            ) from error
        finally:
            self.is_stepping = False

    def step_one(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> bool:
        """Update the parameters of `optimizer` through the hook ``optimizer_step``; return whether they changed."""
        call = self._hooks.optimizer_step or self._hooks.hook.optimizer_step
        return bool(self._hooks.answered("optimizer_step", call(optimizer=optimizer, closure=closure, run=self._run)))

    def _step_with(self, optimizer: Optimizer, closure: Callable[[], Tensor] | None, options: dict[str, Any]) -> bool:
        if (hook := self.stepping_hook) is not None:
            raise ConfigError(
                f"optimizer.step got {', '.join(options)}, and {self._hooks.answering_plugin(hook)} steps it",
                expected="no options, which it does not pass on",
            )
        optimizer.step(**options if closure is None else {"closure": closure} | options)
        return True

    def count_skipped(self) -> None:
        """Report that an optimizer step which returned True turned out to have been skipped."""
        if self._run.progress is not None:
            self._run.progress.skipped_steps += 1

    def num_implementations(self, hook: str) -> int:
        """Return how many plugins of this run implement `hook`."""
        return len(getattr(self._hooks.hook, hook).get_hookimpls())

    @property
    def batches_copied(self) -> int:
        """How many batches were copied to the device beside its computation."""
        return 0 if self._run.copy_stream is None else self._run.copy_stream.batches

    @property
    def stepping_hook(self) -> str | None:
        """The hook through which a plugin steps optimizers, or takes part in it."""
        return next((hook for hook in ("optimizer_step", "step_optimizers") if getattr(self._hooks, hook)), None)


def check_loss(output: Any, rank: int) -> None:
    """Return if `output` of ``training_step`` on `rank` is a loss, or None (also under ``"loss"``) for a batch to skip.

    Raises:
        ConfigError: anything else.
    """
    keys, where = (list(output), " under 'loss'") if isinstance(output, dict) else ([], "")
    if isinstance(output, dict) and "loss" not in output:
        found = f"a dict with {', '.join(map(repr, keys))}" if keys else "an empty dict"
        near = next((key for key in keys if str(key).lower() == "loss"), None)
        hint = f"did you mean {near!r}" if near is not None else nearest("loss", list(map(str, keys)))
        raise ConfigError(f"training_step returned {found}", expected="one with 'loss'", do=hint or 'add "loss"')
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        return
    do = "return the loss as a tensor, or None to skip a batch"
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"training_step returned {with_article(type(loss))}{where}", expected="a loss", do=do)
    if loss.numel() != 1:
        raise ConfigError(
            f"training_step returned a loss of shape {tuple(loss.shape)}", expected="one number", do="take its mean"
        )
    if loss.is_complex():
        raise ConfigError("training_step returned a complex loss", expected="a real number", do="take its abs()")
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of rank {rank} reaches no trainable parameter", expected="a loss that was computed from them",
            do="compute it without detach() and no_grad; to skip a batch return the usual loss multiplied by zero",
        )  # fmt: skip


def _has_complex(optimizer: Optimizer) -> bool:
    return any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"])
