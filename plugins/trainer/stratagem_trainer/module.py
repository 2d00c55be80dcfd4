"""`Module`: a torch module with the steps of training, validation, test and prediction; and the dispatcher for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from stratagem.api.capabilities import CLIP_BY_NORM, CLIP_BY_VALUE
from stratagem.errors import ConfigError
from stratagem.runtime.step_module import COMPILER
from stratagem_trainer.api.events import ModuleEvents
from stratagem_trainer.hyperparameters import (
    Hyperparameters,
    HyperparametersMixin,
    arguments_from,
    check_loading_options,
    check_weights_only,
)
from stratagem_trainer.metric_log import log_metric, refuse_unknown_options
from stratagem_trainer.metrics import LogOptions
from stratagem_trainer.module_access import ModuleAccess
from stratagem_trainer.uncompiled import step_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from stratagem_trainer.api.metric_values import ReduceFx


#: Attribute of a module that has built its layers: whether they were trained since.
BUILT: Final = "_built"


class Module(ModuleEvents, HyperparametersMixin, ModuleAccess):
    """Override `training_step` and `configure_optimizers`, and other methods as needed.

    Methods that take part in events are those of `ModuleEvents`, such as ``on_train_epoch_end(self)``. A method of
    Lightning's that would not be called is refused when a run starts: see `stratagem_trainer.module_checks`.
    """

    #: False: `training_step` calls `manual_backward` and steps its optimizers itself.
    automatic_optimization = True
    #: False: a checkpoint may lack some of this module's weights, or hold others.
    strict_loading = True
    #: An input for `forward`: the graph that TensorBoard draws, and stages of a pipeline, are found with it.
    example_input_array: Any = None

    def __init__(self) -> None:
        super().__init__()
        # Plain attributes: not submodules, and the trainer is not pickled or copied with the module.
        self.__dict__["_fit"] = None
        self.__dict__["_hparams"] = Hyperparameters()

    # --- What a user overrides -----------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss (or a dict with ``"loss"``) of `batch`. Under manual optimization, anything."""
        raise _missing(self, "training_step", "fit")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Log what validation measures on `batch`."""
        raise _missing(self, "validation_step", "validate")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Log what testing measures on `batch`."""
        raise _missing(self, "test_step", "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the predictions for `batch`; the forward pass unless overridden."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return one optimizer, several, or a dict with ``optimizer`` and ``lr_scheduler``; None trains nothing."""
        raise _missing(self, "configure_optimizers", "fit")

    def configure_model(self) -> None:
        """Build layers after the processes have started, under the strategy's and precision's contexts.

        Called once, at the start of the first fit, validate, test or predict, or by `load_from_checkpoint`.
        """

    def configure_sharded_model(self) -> None:
        """The earlier name of `configure_model`; define one of the two."""

    def configure_callbacks(self) -> Any:
        """Return callbacks (one or a list) to add to the trainer's; they replace those of the same class."""
        return []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step `optimizer`; called at the end of each accumulation window.

        Args:
            epoch: the current epoch, from 0.
            batch_idx: number of the window's last batch in the epoch.
            optimizer: its ``step(closure)`` calls the closure, clips, and steps through strategy and precision.
            optimizer_closure: computes the last batch's loss and gradients and returns the loss; must be called.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Zero the gradients of `optimizer`; called between an accumulation window's first forward and backward."""
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Differentiate `loss`, which is divided and scaled already."""
        loss.backward(*arguments, **options)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of `optimizer`, which are complete and not scaled; called before each step."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step `scheduler`; `metric` is what ReduceLROnPlateau watches, None for others."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what to move to the device; `batch` is as the loader made it."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return `batch` on `device`."""
        from stratagem.api.batches import move_batch

        return move_batch(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what the step gets; `batch` is on the device."""
        return batch

    def on_validation_model_zero_grad(self) -> None:
        """Drop gradients before validation within training, if no accumulation window is open."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Switch to evaluation when validation starts."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Switch back when validation ends; unless overridden every submodule gets the mode it had."""
        self.train()

    def on_test_model_eval(self) -> None:
        """Switch to evaluation when testing starts."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Switch back when testing ends; unless overridden every submodule gets the mode it had."""
        self.train()

    def on_predict_model_eval(self) -> None:
        """Switch to evaluation when prediction starts."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Switch back when prediction ends; unless overridden every submodule gets the mode it had."""
        self.train()

    # A module may also define training_step_end(output), validation_step_end and test_step_end: what they return stands
    # for what the step returned.

    # --- What a user calls ---------------------------------------------------------------------------------------

    @refuse_unknown_options
    def log(
        self, name: str, value: Tensor | float, prog_bar: bool = False, logger: bool = True,
        on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: ReduceFx = "mean", *,
        sync_dist: bool = False, batch_size: int | None = None, rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
    ) -> None:  # fmt: skip
        """Record one number under `name`.

        Args:
            prog_bar: show it in the progress bar.
            logger: send it to the loggers (default True).
            on_step: record every step's value (default: in training).
            on_epoch: reduce over the epoch (default: outside training).
            reduce_fx: "mean" (weighted by batch size), "sum", "max", "min", or a callable on all values (as float64).
            sync_dist: reduce over all ranks too, at the time of reduction. Collective: log on all ranks.
            batch_size: weight of this value in the mean; found from the batch if not given.
            add_dataloader_idx: append "/dataloader_idx_0" where several loaders are evaluated; without it each needs a
                name of its own.
            rank_zero_only: this metric exists only on rank 0; excludes sync_dist.

        A callback's `log` in ``on_train_epoch_end`` is reduced at once, so that callbacks after it can read it.

        Raises:
            ConfigError: called where nothing can be logged (before or after training, a validation or a test; while
                predicting), a value that is not one number, or contradictory options.
        """
        options = LogOptions(on_step, on_epoch, prog_bar, logger, reduce_fx, sync_dist, rank_zero_only)
        log_metric(self._state, name, value, options, batch_size, add_dataloader_idx)

    @refuse_unknown_options
    def log_dict(
        self, values: Mapping[str, Tensor | float], prog_bar: bool = False, logger: bool = True,
        on_step: bool | None = None, on_epoch: bool | None = None, reduce_fx: ReduceFx = "mean", *,
        sync_dist: bool = False, batch_size: int | None = None, rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
    ) -> None:  # fmt: skip
        """`log` every item of `values` with the same options."""
        for name, value in values.items():
            self.log(
                name, value, prog_bar=prog_bar, logger=logger, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduce_fx,
                sync_dist=sync_dist, batch_size=batch_size, rank_zero_only=rank_zero_only,
                add_dataloader_idx=add_dataloader_idx,
            )  # fmt: skip

    def manual_backward(self, loss: Tensor) -> None:
        """Differentiate `loss` through the strategy and the precision; for manual optimization."""
        if self.automatic_optimization:
            raise ConfigError(
                f"{type(self).__name__}.manual_backward was called under automatic optimization",
                do="set automatic_optimization = False, or return the loss instead",
            )
        self.trainer.run.backward(loss)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> Any:
        """Clip the gradients of `optimizer` through strategy and precision; return the norm before, 0.0 by value.

        Args:
            gradient_clip_val: the limit; the trainer's if not given, and no clipping without either.
            gradient_clip_algorithm: "norm" or "value"; the trainer's if not given.

        Raises:
            ConfigError: another algorithm, or one that the strategy lacks.
        """
        run, settings = self.trainer.run, self.trainer.settings
        limit = settings.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = settings.gradient_clip_algorithm if gradient_clip_algorithm is None else gradient_clip_algorithm
        words = {"norm": CLIP_BY_NORM, "value": CLIP_BY_VALUE}
        if str(algorithm) not in words:
            raise ConfigError(f"clip_gradients got gradient_clip_algorithm={algorithm!r}", expected='"norm" or "value"')
        if not limit:
            return 0.0
        if words[str(algorithm)] not in run.strategy.capabilities.provides:
            raise ConfigError(
                f"clip_gradients is to clip by {algorithm}, which {run.title_of(run.strategy)} cannot",
                do="choose the other algorithm, or another strategy (`stratagem plugins show NAME`)",
            )
        option = "max_norm" if algorithm == "norm" else "max_value"
        return run.clip_gradients(getattr(optimizer, "optimizer", optimizer), **{option: float(limit)})

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: torch.device | str | None = None, *, strict: bool = True,
        weights_only: bool | None = None, **arguments: Any
    ) -> Module:  # fmt: skip
        """Build the module with its saved hyper-parameters, overridden by `arguments`, and load its weights.

        Args:
            map_location: the device to move the module to; it is loaded on the CPU.
            strict: False: the checkpoint may lack some of the weights, or hold others.
            weights_only: None or True: code in a checkpoint is never run.

        Raises:
            CheckpointError: no such file, not a single-file checkpoint, or the weights of another model.
            ConfigError: `map_location` is not a device.
        """
        from stratagem.api.state_fit import load_weights
        from stratagem.checkpoint.trained_part import check_part
        from stratagem_trainer.checkpoint_files import read_any

        check_loading_options(cls, map_location, arguments)
        check_weights_only("load_from_checkpoint", weights_only)
        state = read_any(checkpoint_path)
        module = cls(**arguments_from(cls, state, arguments, checkpoint_path))
        build(module)
        weights, frozen = state["state_dict"], state.get("frozen")
        strict = check_part(weights, frozen, module.state_dict(), module, strict, checkpoint_path)
        load_weights(module, weights, strict)
        return module if map_location is None else module.to(map_location)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fit": None}


def original(model: Any) -> Any:
    """Return the module behind ``torch.compile(module)``, made to compile its steps; anything else as it is."""
    inner, compiler = getattr(model, "_orig_mod", None), getattr(model, "dynamo_ctx", None)
    if not isinstance(inner, Module) or compiler is None:
        return model
    inner.__dict__[COMPILER] = step_compiler(compiler)
    return inner


def overrides(owner: Any, method: str, base: type[Any] = Module) -> bool:
    """Whether `owner` defines `method` itself, on its class or as an attribute, rather than inheriting `base`'s."""
    if callable(getattr(owner, "__dict__", {}).get(method)):
        return True
    own = getattr(type(owner), method, None)
    return own is not None and own is not getattr(base, method, None)


def build(module: Any) -> None:
    """Have `module` build its layers; a later stage, a second fit or another Trainer uses those that were built.

    Raises:
        ConfigError: it defines `configure_model` and `configure_sharded_model`.
    """
    if BUILT in module.__dict__:
        return
    if overrides(module, "configure_sharded_model"):
        if overrides(module, "configure_model"):
            raise ConfigError(
                f"{type(module).__name__} defines configure_model and configure_sharded_model", expected="one of them",
                do="keep configure_model",
            )  # fmt: skip
        module.configure_sharded_model()
    module.configure_model()
    module.__dict__[BUILT] = False


def _missing(module: Module, method: str, stage: str) -> ConfigError:
    return ConfigError(f"{type(module).__name__} has no {method}", expected=f"one, to {stage}", do="define it")
