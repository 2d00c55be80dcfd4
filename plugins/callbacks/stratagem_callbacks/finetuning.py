"""`BaseFinetuning`: freeze parts of a model before training, and train them later; to derive from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import define, field
from torch import nn

from stratagem.api import hookimpl
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

NORMS = (nn.modules.batchnorm._BatchNorm,)


@define(eq=False, kw_only=True)
class BaseFinetuning(Callback):
    """Derive from it: `freeze_before_training` freezes, `finetune_function` trains more from some epoch on.

    Groups of parameters that `finetune_function` adds are made again when a run resumes. Only for one process:
    distributed strategies need the trainable parameters to stay the same.
    """

    #: Parameter names of each group, by optimizer, and how many groups `configure_optimizers` made.
    _groups: list[list[list[str]]] = field(init=False, factory=list)
    _saved: list[list[list[str]]] = field(init=False, factory=list)

    def freeze_before_training(self, module: nn.Module) -> None:
        """Freeze what is not trained from the start: ``self.freeze(module.backbone)``."""
        raise ConfigError(f"{type(self).__name__} has no freeze_before_training(module)", expected="one")

    def finetune_function(self, module: nn.Module, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Train more from `epoch` on: ``self.unfreeze_and_add_param_group(module.backbone, optimizer)``."""
        raise ConfigError(f"{type(self).__name__} has no finetune_function(module, epoch, optimizer)", expected="one")

    # --- What a derived class calls ----------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: nn.Module | Iterable[Any]) -> list[nn.Module]:
        """Return the modules in `modules` that have parameters of their own, or no children."""
        if not isinstance(modules, nn.Module):
            return [part for each in modules for part in BaseFinetuning.flatten_modules(each)]
        parts = modules.modules()
        return [part for part in parts if part._parameters or not list(part.children())]

    @staticmethod
    def filter_params(
        modules: nn.Module | Iterable[Any], train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """Yield the parameters of `modules` that require gradients, or not; those of BatchNorm with `train_bn` only."""
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(part, NORMS):
                yield from (each for each in part.parameters(recurse=False) if each.requires_grad == requires_grad)

    @staticmethod
    def freeze(modules: nn.Module | Iterable[Any], train_bn: bool = True) -> None:
        """Compute no gradients of the parameters of `modules`.

        Args:
            train_bn: BatchNorm is trained all the same; otherwise its running statistics are not updated either.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trained(part, train_bn and isinstance(part, NORMS))

    @staticmethod
    def make_trainable(modules: nn.Module | Iterable[Any]) -> None:
        """Compute gradients of the parameters of `modules`."""
        for part in BaseFinetuning.flatten_modules(modules):
            _set_trained(part, True)

    @staticmethod
    def filter_on_optimizer(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of `params` that `optimizer` does not have."""
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return [each for each in params if id(each) not in known]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: nn.Module | Iterable[Any], optimizer: torch.optim.Optimizer, lr: float | None = None,
        initial_denom_lr: float = 10.0, train_bn: bool = True,
    ) -> None:  # fmt: skip
        """Train `modules`, in a new group of `optimizer`.

        Args:
            lr: learning rate of the group; that of the first group divided by `initial_denom_lr` if not given.
            train_bn: BatchNorm is trained, too.
        """
        BaseFinetuning.make_trainable(modules)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else lr
        params = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn=train_bn))
        if params:
            optimizer.add_param_group({"params": params, "lr": rate, "initial_lr": rate})

    # --- Hooks -------------------------------------------------------------------------------------------------------

    @hookimpl
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if run.stage != "train" or not run.owns_loop:
            return
        if run.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} was chosen for {run.world_size} processes", expected="one",
                do="use parameter groups with small learning rates instead",
            )  # fmt: skip
        self.freeze_before_training(module)

    @hookimpl(wrapper=True)
    def wrap_optimizers(
        self, run: RunContext
    ) -> Generator[None, list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
        optimizers = yield
        assert run.module is not None, "set before optimizers are made"
        parameters = dict(run.module.named_parameters())
        for optimizer, saved in zip(optimizers, self._saved, strict=False):
            for names in saved[len(optimizer.param_groups) :]:  # a resumed run: what finetune_function had added
                new = [parameters[name] for name in names]
                own = {id(parameter) for parameter in new}
                for part in run.module.modules():
                    found = [each for each in part._parameters.values() if each is not None and id(each) in own]
                    for parameter in found:
                        parameter.requires_grad = True
                    if found and isinstance(part, NORMS):
                        part.track_running_stats = True
                rate = float(optimizer.param_groups[0]["lr"])
                optimizer.add_param_group({"params": new, "lr": rate, "initial_lr": rate})
                follow_new_group(run, optimizer, rate, type(self).__name__)
        self._saved = []
        return optimizers

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
        self._saved = next((state["finetuned_groups"] for state in states if "finetuned_groups" in state), [])

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView, module: nn.Module) -> None:
        for optimizer in trainer.optimizers:
            before = len(optimizer.param_groups)
            self.finetune_function(module, trainer.current_epoch, optimizer)
            for group in optimizer.param_groups[before:]:
                follow_new_group(trainer.run, optimizer, group["lr"], type(self).__name__)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._groups = [
            [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters in each group of each optimizer."""
        return {"finetuned_groups": self._groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._groups = state["finetuned_groups"]


def _set_trained(part: nn.Module, trained: bool) -> None:
    """Train the parameters of `part` itself, or freeze them; and so the running statistics of a BatchNorm module."""
    if isinstance(part, NORMS):
        part.track_running_stats = trained
    for parameter in part.parameters(recurse=False):
        parameter.requires_grad = trained


def follow_new_group(run: Any, optimizer: torch.optim.Optimizer, rate: float, who: str) -> None:
    """Let the schedulers of `optimizer` know its last group, whose first learning rate is `rate`.

    Raises:
        ConfigError: one does not support new groups.
    """
    for config in run.lr_scheduler_configs:
        scheduler = config.scheduler
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            continue
        if hasattr(scheduler, "max_lrs") or "max_lr" in optimizer.param_groups[0]:
            raise ConfigError(
                f"{who} adds a parameter group, which {type(scheduler).__name__} does not support",
                expected="another scheduler",
            )
        for name in ("base_lrs", "lr_lambdas"):
            if isinstance(getattr(scheduler, name, None), list):
                getattr(scheduler, name).append(rate if name == "base_lrs" else scheduler.lr_lambdas[-1])
