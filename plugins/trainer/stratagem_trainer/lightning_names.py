"""Every name of Lightning's API that a module, a data module or a callback may define: called, or refused by name.

A method that is defined and never called is hard to notice: training runs, and does something else. So a method that
stratagem does not call is refused when a run starts, with what to define instead. Names are those of Lightning 2.6 and
of its earlier versions. `stratagem_trainer.module` and `stratagem.api.hooks` list what is called; below is the rest.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from stratagem.api.capabilities import CUSTOM_CLIPPING, CUSTOM_STEP
from stratagem.errors import ConfigError, nearest
from stratagem_trainer.api.events import EVENTS, ModuleEvents
from stratagem_trainer.custom_step import STEP_METHODS
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.events import arguments_of, by_name
from stratagem_trainer.lightning_callbacks import Instead, refuse
from stratagem_trainer.module import Module, overrides

if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack


_OWN_LIST = "append what you need of each batch to a list of your own, and clear it there"

_LOADERS = "a loader that is complete when it is returned"

_STRATEGY = "choose a strategy, or write one (docs/strategy-in-60-lines.md)"

_DDP = Instead("Trainer(strategy=)", _STRATEGY)

#: Not called on a module.
MODULE: Final[dict[str, Instead]] = {
    "training_epoch_end": Instead("on_train_epoch_end(self)", _OWN_LIST),
    "validation_epoch_end": Instead("on_validation_epoch_end(self)", _OWN_LIST),
    "test_epoch_end": Instead("on_test_epoch_end(self)", _OWN_LIST),
    "training_end": Instead("training_step_end(self, output)"),
    "validation_end": Instead("on_validation_epoch_end(self)", _OWN_LIST),
    "test_end": Instead("on_test_epoch_end(self)", _OWN_LIST),
    "on_epoch_start": Instead("on_train_epoch_start(self)"),
    "on_epoch_end": Instead("on_train_epoch_end(self)"),
    "on_batch_start": Instead("on_train_batch_start(self, batch, batch_idx)"),
    "on_batch_end": Instead("on_train_batch_end(self, outputs, batch, batch_idx)"),
    "on_pretrain_routine_start": Instead("on_fit_start(self)"),
    "on_pretrain_routine_end": Instead("on_fit_start(self)"),
    "on_keyboard_interrupt": Instead("on_exception(self, exception)"),
    "on_train_dataloader": Instead("train_dataloader(self)", _LOADERS),
    "on_val_dataloader": Instead("val_dataloader(self)", _LOADERS),
    "on_test_dataloader": Instead("test_dataloader(self)", _LOADERS),
    "on_predict_dataloader": Instead("predict_dataloader(self)", _LOADERS),
    "tng_dataloader": Instead("train_dataloader(self)"),
    "get_progress_bar_dict": Instead("self.log(name, value, prog_bar=True)", "log what the bar is to show"),
    "tbptt_split_batch": Instead("automatic_optimization = False", "cut the sequence in training_step"),
    "on_hpc_save": Instead("on_save_checkpoint(self, checkpoint)"),
    "on_hpc_load": Instead("on_load_checkpoint(self, checkpoint)"),
    "on_post_move_to_device": Instead("on_fit_start(self)", "the model is on its device there"),
    "log_grad_norm": Instead('callbacks=["gradient_norms"]', "drop the method"),
    "configure_apex": Instead('Trainer(precision="16-mixed")', "drop the method: mixed precision is torch's"),
    "amp_scale_loss": Instead('Trainer(precision="16-mixed")', "drop the method: the precision scales the loss"),
    "configure_ddp": _DDP,
    "init_ddp_connection": _DDP,
    "get_from_queue": Instead("trainer.callback_metrics", "log what the launching process needs"),
    "add_to_queue": Instead("trainer.callback_metrics", "log what the launching process needs"),
}

#: Not called on a data module.
DATA_MODULE: Final[dict[str, Instead]] = {
    "on_save_checkpoint": Instead("state_dict(self), which is saved", "return there what is to be saved"),
    "on_load_checkpoint": Instead("load_state_dict(self, state_dict)"),
    **{name: MODULE[name] for name in MODULE if name.endswith("_dataloader")},
}

#: Arguments of Lightning methods that are not passed here, and what to do.
ARGUMENTS: Final[dict[str, str]] = {
    "optimizer_idx": "set automatic_optimization = False and step each of self.optimizers() in training_step",
    "opt_idx": "set automatic_optimization = False and step each of self.optimizers() in training_step",
    "hiddens": "set automatic_optimization = False and cut the sequence in training_step",
    "dataloader_iter": "take (self, batch, batch_idx), and read ahead in the loader",
}

#: The arguments of methods of a module and a data module that are not events, in order.
CALLED_WITH: Final[dict[str, tuple[str, ...]]] = {
    "optimizer_step": ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
    "optimizer_zero_grad": ("epoch", "batch_idx", "optimizer"),
    "backward": ("loss",),
    "configure_gradient_clipping": ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
    "lr_scheduler_step": ("scheduler", "metric"),
    "on_before_batch_transfer": ("batch", "dataloader_idx"),
    "transfer_batch_to_device": ("batch", "device", "dataloader_idx"),
    "on_after_batch_transfer": ("batch", "dataloader_idx"),
    "configure_callbacks": (),
    "configure_model": (),
    "configure_sharded_model": (),
    "configure_optimizers": (),
    "setup": ("stage",),
    "teardown": ("stage",),
    "prepare_data": (),
    **{f"on_{stage}_model_{mode}": () for stage in ("validation", "test", "predict") for mode in ("eval", "train")},
    "on_validation_model_zero_grad": (),
}

#: Those of a data module.
DATA_CALLED_WITH: Final[dict[str, tuple[str, ...]]] = {
    name: CALLED_WITH[name]
    for name in ("setup", "teardown", "prepare_data", "on_before_batch_transfer", "transfer_batch_to_device",
                 "on_after_batch_transfer")
} | {"state_dict": (), "load_state_dict": ("state_dict",), "on_exception": ("exception",)}  # fmt: skip

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

#: What a strategy must provide for a module to define these.
NEEDS: Final[dict[str, str]] = {
    **dict.fromkeys((*STEP_METHODS, "backward"), CUSTOM_STEP),
    "configure_gradient_clipping": CUSTOM_CLIPPING,
}


def check(module: Module, datamodule: Any, stack: Stack, stage: str) -> None:
    """Refuse methods of `module` and `datamodule` that would not be called; before a run, and again when it is set up.

    Raises:
        ConfigError: such a method, one that takes other arguments, or one that the strategy cannot call.
    """
    _check_names(module, MODULE, Module)
    _check_arguments(module, CALLED_WITH, Module)
    for step in _STEPS:
        if overrides(module, step):
            _check_known(module, step)
    _check_hidden(module)
    _warn_of_misspelled(module)
    for event in EVENTS:
        if overrides(module, event) and by_name(event, getattr(module, event)) is None:
            raise _takes_others(module, event, arguments_of(event))
    if datamodule is not None:
        _check_names(datamodule, _not_for_data(), DataModule)
        _check_arguments(datamodule, DATA_CALLED_WITH, DataModule)
    if stage == "fit":
        _check_strategy(module, stack)


def _warn_of_misspelled(module: Module) -> None:
    """Warn of methods that are called almost as an event, and that nothing calls."""
    known = {*EVENTS, *CALLED_WITH, *MODULE, *dir(Module)}
    for name in dir(type(module)):
        if name.startswith("on_") and name not in known and (hint := nearest(name, EVENTS)):
            warnings.warn(f"{type(module).__name__} defines {name}, which nothing calls; {hint}", stacklevel=2)


def _check_hidden(module: Module) -> None:
    """Refuse methods of a base class that comes after `Module`, whose own methods hide them."""
    bases = type(module).__mro__
    for base in bases[bases.index(ModuleEvents) :]:
        for name in vars(ModuleEvents):
            hidden = base not in Module.__mro__ and not name.startswith("__") and name in vars(base)
            if hidden and not overrides(module, name):
                raise ConfigError(
                    f"{type(module).__name__} inherits {name} from {base.__name__}, and Module's own hides it",
                    expected=f"{base.__name__} before Module in the bases of the class",
                )


def warn_of_uncalled(module: Module) -> None:
    """Warn of methods that are not called while a module optimizes by hand, unless it calls them itself."""
    uncalled = (*STEP_METHODS, "configure_gradient_clipping", "lr_scheduler_step")
    found = [name for name in uncalled if overrides(module, name)]
    if found:
        warnings.warn(
            f"{type(module).__name__} defines {', '.join(found)} and optimizes by hand, where nothing but its own "
            "training_step calls it",
            stacklevel=2,
        )


def _not_for_data() -> dict[str, Instead]:
    """Return what is refused on a data module: what is called on a module, or on a callback, too."""
    elsewhere = {*EVENTS, *CALLED_WITH} - {*DATA_CALLED_WITH}
    return {name: Instead(f"{name} on the Module, or on a Callback") for name in elsewhere} | MODULE | DATA_MODULE


def _check_names(owner: Any, names: Mapping[str, Instead], base: type[Any]) -> None:
    for name, instead in names.items():
        if overrides(owner, name, base):
            raise refuse(type(owner).__name__, name, instead)


def _check_arguments(owner: Any, called_with: Mapping[str, tuple[str, ...]], base: type[Any]) -> None:
    for name, arguments in called_with.items():
        if not overrides(owner, name, base):
            continue
        _check_known(owner, name)
        try:
            signature = inspect.signature(getattr(owner, name))
            if name == "configure_gradient_clipping":
                signature.bind("optimizer", gradient_clip_val=None, gradient_clip_algorithm=None)
            else:
                signature.bind(*arguments)
        except TypeError:
            raise _takes_others(owner, name, arguments) from None


def _check_known(owner: Any, name: str) -> None:
    """Refuse arguments that Lightning passed once."""
    for parameter in inspect.signature(getattr(owner, name)).parameters.values():
        if parameter.name in ARGUMENTS and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(owner).__name__}.{name} takes {parameter.name}, which is not passed",
                expected="a method without it", do=ARGUMENTS[parameter.name],
            )  # fmt: skip


def _takes_others(owner: Any, name: str, arguments: tuple[str, ...]) -> ConfigError:
    own = inspect.signature(getattr(owner, name))
    expected = f"({', '.join(('self', *arguments))})"
    return ConfigError(f"{type(owner).__name__}.{name} takes {own}", expected=expected, do="take these arguments")


def _check_strategy(module: Module, stack: Stack) -> None:
    provided = stack.strategy.capabilities.provides
    manual = not module.automatic_optimization
    for name, word in NEEDS.items():
        called = name == "backward" or not manual
        if called and overrides(module, name) and word not in provided:
            strategy = stack.strategies[-1]
            raise ConfigError(
                f"{type(module).__name__} defines {name}, which {strategy} cannot call",
                expected=f"a strategy that provides {word!r}",
                do=stack.strategy.how_to_provide(word)
                or "choose one (`stratagem plugins show NAME`), or drop the method",
            )
