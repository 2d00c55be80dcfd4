"""Train the head first, and the pretrained backbone later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import nn

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than, not_empty
from stratagem.errors import ConfigError, nearest
from stratagem_callbacks.finetuning import NORMS, follow_new_group
from stratagem_callbacks.finetuning import BaseFinetuning as BaseFinetuning
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class BackboneFinetuning(Callback):
    """Freeze ``module.backbone``; from an epoch on train it too, with a learning rate that grows to that of the head.

    `configure_optimizers` must leave out frozen parameters: ``filter(lambda p: p.requires_grad, self.parameters())``.
    Only for one process: distributed strategies need the trainable parameters to stay the same.
    """

    positional: ClassVar[tuple[str, ...]] = ("unfreeze_backbone_at_epoch",)

    #: First epoch that trains the backbone, from 0.
    unfreeze_backbone_at_epoch: int = field(default=10, validator=at_least(1))
    #: Attribute of the module with the backbone.
    attr_name: str = field(default="backbone", validator=not_empty)
    #: Its first learning rate, as a fraction of the others'.
    backbone_initial_ratio_lr: float = field(default=0.1, validator=more_than(0))
    #: Factor for its learning rate in each epoch, up to the others'.
    multiplier: float = field(default=2.0, validator=at_least(1))
    #: Train BatchNorm modules of the backbone from the start, their statistics and their parameters.
    train_bn: bool = True

    _unfrozen: bool = field(init=False, default=False)
    #: Each submodule of the backbone, and whether it was in train mode.
    _modes: list[tuple[nn.Module, bool]] = field(init=False, factory=list)

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if run.stage != "train" or not run.owns_loop:
            return
        if run.world_size > 1:
            raise ConfigError(
                f"backbone_finetuning was chosen for {run.world_size} processes", expected="one",
                do="use a parameter group with a small learning rate for the backbone instead",
            )  # fmt: skip
        backbone = self._backbone(module)
        if not self._modes or self._modes[0][0] is not backbone:
            self._modes = [(part, part.training) for part in backbone.modules()]
        for part in backbone.modules():
            if not (self.train_bn and isinstance(part, NORMS)):
                for parameter in part.parameters(recurse=False):
                    parameter.requires_grad = False

    def _backbone(self, module: nn.Module) -> nn.Module:
        children = [name for name, _ in module.named_children()]
        backbone = getattr(module, self.attr_name, None)
        if not isinstance(backbone, nn.Module):
            raise ConfigError(
                f"backbone_finetuning.attr_name is {self.attr_name!r}",
                expected=f"a submodule of {type(module).__name__}: {', '.join(children) or 'it has none'}",
                do=nearest(self.attr_name, children),
            )
        return backbone

    @hookimpl(wrapper=True)
    def wrap_optimizers(
        self, run: RunContext
    ) -> Generator[None, list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
        optimizers = yield
        assert run.module is not None, "set before optimizers are made"
        if self._unfrozen:  # a resumed run: the parameter group of the checkpoint
            self._add_group(run, run.module, optimizers)
        return optimizers

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {})
        self._unfrozen = any(state.get("backbone_unfrozen", False) for state in states.values())

    @hookimpl
    def on_train_start(self, module: nn.Module) -> None:
        if not self._unfrozen and not self.train_bn:
            self._backbone(module).eval()  # on_train_epoch_start is not called when resuming within an epoch

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView, module: nn.Module) -> None:
        backbone = self._backbone(module)
        if not self._unfrozen:
            if not self.train_bn:
                backbone.eval()
            if trainer.current_epoch >= self.unfreeze_backbone_at_epoch:
                self._unfreeze(trainer, module)
            return
        (optimizer,) = trainer.optimizers
        *others, group = optimizer.param_groups
        group["lr"] = min(group["lr"] * self.multiplier, others[0]["lr"])

    def _unfreeze(self, trainer: TrainerView, module: nn.Module) -> None:
        self._unfrozen = True
        for part, training in self._modes:
            part.training = training
        self._add_group(trainer.run, module, trainer.optimizers)

    def _add_group(self, run: RunContext, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if len(optimizers) != 1:
            raise ConfigError(f"backbone_finetuning found {len(optimizers)} optimizers", expected="one")
        (optimizer,) = optimizers
        parameters = list(self._backbone(module).parameters())
        new = BaseFinetuning.filter_on_optimizer(optimizer, parameters)
        if not new:
            raise ConfigError(
                f"{type(module).__name__}.configure_optimizers gave the frozen backbone to the optimizer",
                expected="only parameters that require gradients",
                do="filter them: `filter(lambda p: p.requires_grad, self.parameters())`",
            )
        for parameter in parameters:
            parameter.requires_grad = True
        rate = float(optimizer.param_groups[0]["lr"]) * self.backbone_initial_ratio_lr
        optimizer.add_param_group({"params": new, "lr": rate, "initial_lr": rate})
        follow_new_group(run, optimizer, rate, "backbone_finetuning")

    def state_dict(self) -> dict[str, bool]:
        """Return whether the backbone is unfrozen."""
        return {"backbone_unfrozen": self._unfrozen}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore whether the backbone is unfrozen."""
        self._unfrozen = state["backbone_unfrozen"]
