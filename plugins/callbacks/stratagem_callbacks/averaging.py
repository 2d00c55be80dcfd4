"""Average the weights: exponential moving average (EMA), and stochastic weight averaging (SWA)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import nn
from torch.optim.swa_utils import SWALR

from stratagem.api import STEPPED_COPIES, TEAMS, Capabilities, hookimpl
from stratagem.api.validators import at_least, between, more_than, not_empty
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback
from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig
from stratagem_trainer.api.validators import batch_limit

if TYPE_CHECKING:
    from collections.abc import Generator

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that may be sharded. Collective if it is."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `whole` on the device of `parameter`, sharded in the same way."""
    whole = whole.to(parameter.device)
    if not hasattr(parameter, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


@define(eq=False, kw_only=True)
class WeightAveraging(Callback):
    """Average the weights while they are trained: derive from it to say when and how.

    Validation during training uses the average; training continues with the weights. Checkpoints have the average as
    the model's, and the weights beside it, for a run that resumes. At the end the model has the average. Costs one more
    copy of the parameters (of each rank's shards with a sharded strategy), within validation and after training two.
    """

    # If models differ between ranks, so would their averages.
    capabilities = Capabilities(conflicts={STEPPED_COPIES, TEAMS})

    #: Validate with the average while training, and save it as the model.
    evaluate: bool = True
    #: Leave the average in the model when training ends.
    keep: bool = True
    #: Average floating-point buffers, such as the statistics of batch normalization, too; else they are the model's.
    use_buffers: bool = False
    #: Returns the new average of a parameter: ``avg_fn(average, weight, num_averaged)``, as for torch's AveragedModel.
    #: By default all updates count equally.
    avg_fn: Callable[..., Any] | None = None
    #: Updates lists of averages in place: ``multi_avg_fn(averages, weights, num_averaged)``.
    multi_avg_fn: Callable[..., Any] | None = None

    #: The averages, by parameter name.
    average: dict[str, Any] = field(init=False, factory=dict)
    #: How often they were updated.
    num_averaged: int = field(init=False, default=0)
    #: The weights that are trained, while the module has the average.
    _trained: dict[str, Any] = field(init=False, factory=dict)
    #: What a checkpoint has of both.
    _pending: dict[str, dict[str, Any]] = field(init=False, factory=dict)
    #: The model of a fit, while it lasts.
    _fitting: nn.Module | None = field(init=False, default=None)
    _last_step: int = field(init=False, default=-1)

    def __attrs_post_init__(self) -> None:
        if self.avg_fn is not None and self.multi_avg_fn is not None:
            raise ConfigError(f"{self._name} has avg_fn and multi_avg_fn", expected="one of the two")

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average now; the same on all ranks. After each optimizer step unless overridden.

        Args:
            step_idx: number of the optimizer step that has just been done, from 0; None at the end of an epoch.
            epoch_idx: number of the epoch that has just ended, from 0; None after a step.
        """
        return step_idx is not None

    def update(self, averages: list[Any], weights: list[Any]) -> None:
        """Average `weights` into `averages`, in place; both are on one device, or shards on one mesh."""
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(averages, weights, self.num_averaged)
        elif self.avg_fn is not None:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(self.avg_fn(average, weight, self.num_averaged))
        else:
            torch._foreach_lerp_(averages, weights, 1 / (self.num_averaged + 1))

    @property
    def _name(self) -> str:
        return type(self).__name__

    @hookimpl
    def on_fit_start(self, trainer: TrainerView, module: nn.Module) -> None:
        self._last_step, self._fitting = trainer.global_step, module
        _refuse_second_average(trainer, self._name)
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ConfigError(
                f"{self._name} averages the parameters of a process, and "
                f"{trainer.run.title_of(trainer.run.strategy)} has some of them on other processes only",
                expected="a strategy of which every process holds all parameters, or shards of them",
                do="drop the callback, or set strategy.parallel.pipeline to 1",
            )
        if self._pending:
            pending, self._pending = self._pending, {}
            self.average, self._trained = (self._placed(pending[key], module) for key in ("average", "weights"))
        if self._trained and self._is_in(module):
            self._swap_out(trainer.run, module)
        self._trained = {}

    def _placed(self, saved: dict[str, Any], module: nn.Module) -> dict[str, Any]:
        """Return `saved` tensors as the model has them, with copies of its own where there are none."""
        tensors = self._averaged(module)
        if unknown := set(saved) - set(tensors):
            raise ConfigError(f"{self._name} has an average of {min(unknown)!r}", expected="parameters of this model")
        placed = {
            name: _like(saved[name], tensor) if name in saved else tensor.clone() for name, tensor in tensors.items()
        }
        return placed if saved else {}

    def _is_in(self, module: nn.Module) -> bool:
        """Whether the parameters of `module` are the average: nobody has changed them since. Collective if sharded."""
        return all(
            torch.equal(_whole(parameter.detach()), _whole(self.average[name]).to(parameter.dtype))
            for name, parameter in module.named_parameters()
        )

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, module: nn.Module) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            if self.should_update(step_idx=trainer.global_step - 1):
                self._update(module)

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView, module: nn.Module) -> None:
        if trainer.position.epoch_ended and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(module)

    def _averaged(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return what is averaged, by name."""
        buffers = module.named_buffers() if self.use_buffers else ()
        floating = {name: buffer for name, buffer in buffers if buffer.is_floating_point()}
        return {name: parameter.detach() for name, parameter in module.named_parameters()} | floating

    def _update(self, module: nn.Module) -> None:
        trained = self._averaged(module)
        if not self.average:
            self.average = {name: parameter.clone() for name, parameter in trained.items()}
            self.num_averaged = 1
            return
        groups: dict[Any, tuple[list[Any], list[Any]]] = {}  # one call for each mesh, and one for plain tensors
        for name, parameter in trained.items():
            averages, weights = groups.setdefault(getattr(parameter, "device_mesh", None), ([], []))
            averages.append(self.average[name])
            weights.append(parameter)
        with torch.no_grad():
            for averages, weights in groups.values():
                self.update(averages, weights)
        self.num_averaged += 1

    @hookimpl(tryfirst=True)
    def on_validation_start(self, trainer: TrainerView) -> None:
        if trainer.fitting and self.evaluate and self.average:
            self._swap_in(trainer.run, trainer.module)

    @hookimpl(tryfirst=True)  # other callbacks train on
    def on_validation_end(self, trainer: TrainerView) -> None:
        if trainer.fitting:
            self._swap_out(trainer.run, trainer.module)

    @hookimpl(wrapper=True)
    def model_state(self, module: nn.Module, run: RunContext) -> Generator[None, dict[str, Any], dict[str, Any]]:
        """Answer with the weights that are validated, within a fit."""
        if not (self.evaluate and self.average and module is self._fitting) or self._trained:
            return (yield)
        self._swap_in(run, module)
        state = yield
        state = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        self._swap_out(run, module)
        return state

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        if self.keep and self.average:
            self._swap_in(trainer.run, trainer.module)

    @hookimpl
    def on_fit_end(self) -> None:
        self._fitting = None

    @hookimpl(tryfirst=True)
    def on_exception(self, trainer: TrainerView) -> None:
        if trainer.run.shards_parameters:
            self._trained = {}  # restoring them is collective
        self._swap_out(trainer.run, trainer.module)

    def _swap_in(self, run: RunContext, module: nn.Module) -> None:
        self._trained = {name: tensor.clone() for name, tensor in self._averaged(module).items()}
        self._put(self.average, run, module)

    def _swap_out(self, run: RunContext, module: nn.Module) -> None:
        if self._trained:
            self._put(self._trained, run, module)
            self._trained = {}

    def _put(self, values: dict[str, Any], run: RunContext, module: nn.Module) -> None:
        if run.shards_parameters:  # the strategy may keep other copies of them
            state = {name: _whole(value).cpu() for name, value in values.items()}
            run.ask("load_model_state", state=state, module=module, strict=False)
            return
        with torch.no_grad():
            for name, tensor in self._averaged(module).items():
                tensor.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return full tensors: the averages, and the weights if those of the model are averages, too.

        Collective with a sharded strategy.
        """
        weights = self._trained
        if self.evaluate and self.average and not weights and self._fitting is not None:
            weights = self._averaged(self._fitting)
        tensors = {"average": self.average, "weights": weights}
        whole = {key: {name: _whole(each).cpu() for name, each in values.items()} for key, values in tensors.items()}
        return {**whole, "num_averaged": self.num_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages and the weights; they are moved to the device when training begins."""
        self._pending = {"average": dict(state["average"]), "weights": dict(state.get("weights", {}))}
        self.num_averaged = state["num_averaged"]


@define(eq=False, kw_only=True)
class EMA(WeightAveraging):
    """Keep an exponential moving average of the weights: ``average += (1 - decay) * (weight - average)``.

    Validation, checkpoints and the model at the end have the average; training continues with the weights. See
    `WeightAveraging`.
    """

    #: Weight of the old average at each update: closer to 1 is smoother and slower.
    decay: float = field(default=0.999, validator=between(0, 1))
    #: Update the average every n optimizer steps.
    every_n_steps: int = field(default=1, validator=at_least(1))
    #: First optimizer step to average.
    start_step: int = field(default=0, validator=at_least(0))
    avg_fn: None = field(init=False, default=None)
    multi_avg_fn: None = field(init=False, default=None)

    @property
    def _name(self) -> str:
        return "ema"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether this is one of every `every_n_steps` from `start_step` on."""
        done = None if step_idx is None else step_idx + 1
        return done is not None and done >= self.start_step and done % self.every_n_steps == 0

    def update(self, averages: list[Any], weights: list[Any]) -> None:
        """Move `averages` towards `weights`."""
        torch._foreach_lerp_(averages, weights, 1 - self.decay)


def _refuse_second_average(trainer: TrainerView, name: str) -> None:
    """Refuse optimizers with `train` and `eval`: what they evaluate is an average already."""
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
            raise ConfigError(
                f"{type(optimizer).__name__} averages the weights itself, and {name} does, too",
                expected="one of the two", do=f"drop {name}",
            )  # fmt: skip


def _rates(instance: Any, attribute: Any, value: float | list[float]) -> None:
    rates = value if isinstance(value, list) else [value]
    not_empty(instance, attribute, rates)
    for rate in rates:
        more_than(0)(instance, attribute, rate)


@define(eq=False, kw_only=True)
class StochasticWeightAveraging(Callback):
    """From `swa_epoch_start` on, train with a constant learning rate and average the weights at the end of each epoch.

    Izmailov et al., 2018, "Averaging Weights Leads to Wider Optima and Better Generalization". At the end the model has
    the average, with its BatchNorm statistics recomputed.
    """

    positional: ClassVar[tuple[str, ...]] = ("swa_lrs", "swa_epoch_start")

    # If models differ between ranks, so would their averages.
    capabilities = Capabilities(conflicts={STEPPED_COPIES, TEAMS})

    #: Learning rate during averaging, or that of each parameter group.
    swa_lrs: float | list[float] = field(validator=_rates)
    #: First epoch to average: its number from 0, or a fraction of ``max_epochs``.
    swa_epoch_start: int | float = field(default=0.8, validator=batch_limit)
    #: Epochs to anneal from the current learning rate to `swa_lrs`.
    annealing_epochs: int = field(default=10, validator=at_least(0))
    #: Shape of the annealing.
    annealing_strategy: Literal["cos", "linear"] = "cos"

    #: Number of epochs in the average.
    count: int = field(init=False, default=0)
    average: dict[str, Any] = field(init=False, factory=dict)
    _started: bool = field(init=False, default=False)

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        if trainer.run.shards_parameters:
            raise ConfigError(
                "stochastic_weight_averaging averages full parameters, and "
                f"{trainer.run.title_of(trainer.run.strategy)} shards them",
                do="use the callback 'ema', which averages shards",
            )
        _refuse_second_average(trainer, "stochastic_weight_averaging")
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"stochastic_weight_averaging found {len(trainer.optimizers)} optimizers", expected="one",
                do="average the weights in your own training loop",
            )  # fmt: skip
        module = trainer.module
        normalizes = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        if normalizes and type(module).forward is nn.Module.forward:
            raise ConfigError(
                "stochastic_weight_averaging recomputes BatchNorm statistics, and "
                f"{type(module).__name__} has no forward",
                expected="a forward that takes the first element of a batch",
            )
        if trainer.fast_dev_run:
            return
        start = self._first_epoch(trainer)
        if isinstance(self.swa_epoch_start, float) and trainer.max_epochs < 0:
            raise ConfigError(
                f"stochastic_weight_averaging.swa_epoch_start is {self.swa_epoch_start}, a fraction of max_epochs=-1",
                expected="the number of an epoch", do="set max_epochs, or swa_epoch_start to an epoch",
            )  # fmt: skip
        if not 0 <= start < (trainer.max_epochs if trainer.max_epochs > 0 else start + 1):
            raise ConfigError(
                f"stochastic_weight_averaging.swa_epoch_start is {self.swa_epoch_start}",
                expected=f"an epoch below max_epochs={trainer.max_epochs}, or a fraction of it from 0.0 to 1.0",
            )
        self.average = {name: value.to(trainer.run.device) for name, value in self.average.items()}

    def _first_epoch(self, trainer: TrainerView) -> int:
        start = self.swa_epoch_start
        return start if isinstance(start, int) else int(trainer.max_epochs * start)

    @hookimpl
    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        if self._started or trainer.fast_dev_run or trainer.current_epoch < self._first_epoch(trainer):
            return
        self._started = True
        self._use_swa_scheduler(trainer, trainer.optimizers)

    def _use_swa_scheduler(self, run: RunContext | TrainerView, optimizers: Any) -> None:
        (optimizer,) = optimizers
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        scheduler = SWALR(optimizer, self.swa_lrs, self.annealing_epochs, self.annealing_strategy)  # type: ignore[arg-type]  # a list, too
        run.lr_scheduler_configs[:] = [LRSchedulerConfig(scheduler=scheduler)]

    @hookimpl(wrapper=True)
    def wrap_optimizers(
        self, run: RunContext
    ) -> Generator[None, list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
        optimizers = yield
        if self._started:  # a resumed run: the scheduler of the checkpoint
            self._use_swa_scheduler(run, optimizers)
        return optimizers

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("callbacks", {}).values()
        self._started = any(state.get("swa_started", False) for state in states if isinstance(state, dict))

    @hookimpl
    def on_train_epoch_end(self, trainer: TrainerView, module: nn.Module) -> None:
        if not self._started or trainer.current_epoch < self._first_epoch(trainer) or not trainer.position.epoch_ended:
            return
        self.count += 1
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if self.count == 1:
                    self.average[name] = parameter.detach().clone()
                else:
                    self.average[name].lerp_(parameter.detach(), 1 / self.count)

    @hookimpl
    def on_train_end(self, trainer: TrainerView, module: nn.Module) -> None:
        if not self.count:
            return
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.average[name])
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            limit = trainer.num_training_batches
            batches = (b for number, b in enumerate(trainer.train_dataloader) if math.isinf(limit) or number < limit)
            _recompute_statistics(module, map(trainer.run.transfer, batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        return {"count": self.count, "average": dict(self.average), "swa_started": self._started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average."""
        self.count, self.average, self._started = state["count"], dict(state["average"]), state["swa_started"]


def _recompute_statistics(module: nn.Module, batches: Iterable[Any]) -> None:
    """Set the running statistics of BatchNorm modules in train mode to their means over `batches`."""
    norms = [part for part in module.modules() if part.training and isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        with torch.no_grad():
            for batch in batches:
                module(batch[0] if isinstance(batch, list | tuple) else batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
