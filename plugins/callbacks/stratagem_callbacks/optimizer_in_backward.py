"""Step each parameter in backward, as soon as its gradient is complete, and free the gradient."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, LOSS_SCALING, STEPPED_COPIES, TEAMS, Capabilities, hookimpl
from stratagem.api.capabilities import CUSTOM_STEP, STEPS_IN_BACKWARD
from stratagem.errors import ConfigError
from stratagem_callbacks.hints import overridden
from stratagem_callbacks.parameter_steps import check_steps_some, of_whole_tensors, step_some
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Parameters may be on several devices, for each of which backward has a thread.
_LOCK = threading.Lock()
#: Methods of a module that step, or would find no gradients.
_METHODS = (
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "on_after_backward",
    "on_before_optimizer_step",
)  # fmt: skip


@define(eq=False, kw_only=True)
class OptimizerInBackward(Callback):
    """Step each parameter when its gradient is complete, and free the gradient: all never exist at once.

    Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024; as in torch's
    tutorial on fusing the optimizer step into the backward pass. The optimizer, its state and checkpoints stay as they
    are. What needs all gradients before a step is refused with a `ConfigError` before training; a parameter that gets
    two gradients in one step, or a loss that is a sum with a count, in the first step.
    """

    #: Also step optimizers other than torch's: each must step a parameter by its gradient and its state alone.
    any_optimizer: bool = False

    capabilities = Capabilities(
        provides={STEPS_IN_BACKWARD}, requires={CUSTOM_STEP},
        conflicts={GRADIENT_BUCKETS, LOSS_SCALING, STEPPED_COPIES, TEAMS},
    )  # fmt: skip

    _handles: list[Any] = field(init=False, factory=list)
    #: Parameters of the present batch that were stepped.
    _stepped: set[torch.Tensor] = field(init=False, factory=set)
    _is_due: bool = field(init=False, default=False)

    @hookimpl
    def on_train_start(self, trainer: TrainerView, module: torch.nn.Module, run: RunContext) -> None:
        _check(trainer, module, run, self.any_optimizer)
        self._is_due = True

    @hookimpl
    def on_train_epoch_start(self) -> None:
        self._is_due = True  # callbacks may thaw parameters

    @hookimpl
    def on_before_backward(self, run: RunContext) -> None:
        if not self._is_due:
            return
        self._stop()
        for optimizer in run.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for parameter in (each for each in group["params"] if each.requires_grad):
                    step = functools.partial(self._step, optimizer, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(step))

    def _step(self, optimizer: torch.optim.Optimizer, index: int, parameter: torch.nn.Parameter) -> None:
        with _LOCK:
            if parameter in self._stepped:
                raise _refusal(
                    f"a parameter of shape {tuple(parameter.shape)} got a second gradient before the step was complete",
                    "one backward for a batch, and checkpoint(use_reentrant=False)",
                )
            self._stepped.add(parameter)
            step_some(optimizer, optimizer.param_groups[index], [parameter])
            parameter.grad = None

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, outputs: Any) -> None:
        self._stepped.clear()
        if isinstance(outputs, dict) and "count" in outputs and "loss_normalization" not in trainer.settings.origins:
            raise _refusal("training_step returned a 'count', by which gradients are divided after backward", "a mean")

    @hookimpl
    def on_train_end(self) -> None:
        self._stop()

    @hookimpl
    def on_exception(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._is_due = False
        self._stepped.clear()
        while self._handles:
            self._handles.pop().remove()


def fits(trainer: TrainerView) -> bool:
    """Whether the optimizers of this fit can be stepped in backward, as far as the callback checks it."""
    try:
        _check(trainer, trainer.module, trainer.run)
    except ConfigError:
        return False
    return True


def _refusal(found: str, expected: str, do: str = "drop the callback") -> ConfigError:
    return ConfigError(f"optimizer_in_backward was chosen, and {found}", expected=expected, do=do)


def _check(trainer: TrainerView, module: torch.nn.Module, run: RunContext, any_optimizer: bool = False) -> None:
    """Refuse what needs gradients after backward.

    Raises:
        ConfigError: names it.
    """
    settings, name = trainer.settings, type(module).__name__
    if run.manual:
        raise _refusal(f"{name}.automatic_optimization is False", "a module that the trainer steps")
    if settings.accumulate_grad_batches != 1:
        raise _refusal(f"accumulate_grad_batches is {settings.accumulate_grad_batches}", "1")
    if settings.gradient_clip_val is not None:
        raise _refusal(f"gradient_clip_val is {settings.gradient_clip_val}, which needs all gradients", "None")
    if methods := overridden(module, _METHODS):
        raise _refusal(f"{name} defines {', '.join(methods)}", "a module without it: gradients are used in backward")
    _check_ranks(run)
    check_steps_some(run, "optimizer_in_backward", any_optimizer)


def _check_ranks(run: RunContext) -> None:
    """Refuse gradients that are averaged after autograd has accumulated them.

    Raises:
        ConfigError: replicas, on ranks or devices, are averaged, or a parameter that is not sharded.
    """
    title, expected = run.title_of(run.strategy), 'one process for each model, or strategy="fsdp"'
    shards = run.mesh.size("shard")
    if len(run.devices) > 1 or run.readers.world_size > shards:
        raise _refusal(f"{title} averages gradients of replicas", expected, 'choose strategy="fsdp"')
    if run.shards_parameters and (name := of_whole_tensors(run.optimizers)):
        raise _refusal(f"{name} computes over whole matrices, which {title} cuts", "another optimizer")
    assert run.module is not None, "it is trained"
    for name, parameter in run.module.named_parameters():
        if shards > 1 and parameter.requires_grad and not hasattr(parameter, "full_tensor"):
            raise _refusal(f"{title} averages {name!r} after backward, since it is not sharded", "none that is trained")
