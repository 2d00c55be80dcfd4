"""Train the head first, and the pretrained backbone later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field
from torch import nn

from stratagem.api import hookimpl
from stratagem.api.validators import at_least, more_than, not_empty
from stratagem.errors import ConfigError, nearest
from stratagem_callbacks.finetuning import NORMS
from stratagem_callbacks.finetuning import BaseFinetuning as BaseFinetuning

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class BackboneFinetuning(BaseFinetuning):
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

    def freeze_before_training(self, module: nn.Module) -> None:
        """Freeze the backbone."""
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

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        states = checkpoint.get("callbacks", {})
        self._unfrozen = any(state.get("backbone_unfrozen", False) for state in states.values())

    @hookimpl
    def on_train_start(self, trainer: TrainerView, module: nn.Module) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"backbone_finetuning found {len(trainer.optimizers)} optimizers", expected="one")
        if not self._unfrozen and not self.train_bn:
            self._backbone(module).eval()  # on_train_epoch_start is not called when resuming within an epoch

    def finetune_function(self, module: nn.Module, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Train the backbone from its epoch on, and raise its learning rate."""
        backbone = self._backbone(module)
        if not self._unfrozen:
            if not self.train_bn:
                backbone.eval()
            if epoch >= self.unfreeze_backbone_at_epoch:
                self._unfreeze(module, optimizer)
            return
        *others, group = optimizer.param_groups
        group["lr"] = min(group["lr"] * self.multiplier, others[0]["lr"])

    def _unfreeze(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._unfrozen = True
        for part, training in self._modes:
            part.training = training
        parameters = list(self._backbone(module).parameters())
        new = self.filter_on_optimizer(optimizer, parameters)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the groups of the optimizer, and whether the backbone is unfrozen."""
        return super().state_dict() | {"backbone_unfrozen": self._unfrozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        super().load_state_dict(state)
        self._unfrozen = state["backbone_unfrozen"]
