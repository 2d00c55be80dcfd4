"""Check that a module has the methods that a call needs, and that those which it and a data module define are called.

A method that is defined and never called is hard to notice: training runs, and does something else. So a method that
another trainer calls and this one does not is refused when a run starts, with what to define instead. Such names are in
`stratagem.discovery.catalog.moved_names`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from stratagem.api.capabilities import (
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    MANUAL_OPTIMIZATION,
    MULTIPLE_OPTIMIZERS,
)
from stratagem.api.parameters import needs_closure
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem_trainer.api.events import EVENTS, ModuleEvents
from stratagem_trainer.custom_step import STEP_METHODS
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.events import arguments_of, by_name
from stratagem_trainer.module import Module, overrides
from stratagem_trainer.moved_methods import refuse_moved
from stratagem_trainer.signatures import takes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.stack.plugins import Stack
    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig


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


def check_instance(model: Any, stage: str) -> None:
    """Refuse a class where a module is expected."""
    if isinstance(model, type):
        name = model.__name__
        raise ConfigError(f"{stage} got the class {name}", expected="a module", do=f"call the class: {name}(...)")


def require(model: Any, method: str, stage: str) -> None:
    """Refuse a module that does not define `method`."""
    if isinstance(model, Module) and not overrides(model, method):
        raise ConfigError(f"{type(model).__name__} has no {method}", expected=f"one, to {stage}", do="define it")


def check_signature(model: Any) -> None:
    """Refuse a training_step that takes more than a batch and its number."""
    step = getattr(model, "training_step", None)
    if step is None or takes(step, 1) or takes(step, 2):
        return
    signature = inspect.signature(step)
    if moved_names("method_arguments").keys() & signature.parameters.keys():
        return  # `check` explains each of these
    raise ConfigError(
        f"{type(model).__name__}.training_step takes {signature}", expected="(batch, batch_idx) or (batch)",
        do="give the other parameters default values",
    )  # fmt: skip


def check(module: Module, datamodule: Any, stack: Stack, stage: str) -> None:
    """Refuse methods of `module` and `datamodule` that would not be called; before a run, and again when it is set up.

    Raises:
        ConfigError: such a method, one that takes other arguments, or one that the strategy cannot call.
    """
    refuse_moved(module, type(module).__name__, moved_names("module_methods"), overrides)
    _check_arguments(module, CALLED_WITH, Module)
    for step in _STEPS:
        if overrides(module, step):
            _check_known(module, step)
    _check_hidden(module)
    for event in EVENTS:
        if overrides(module, event) and by_name(event, getattr(module, event)) is None:
            raise _takes_others(module, event, arguments_of(event))
    if datamodule is not None:
        defines = functools.partial(overrides, base=DataModule)
        refuse_moved(datamodule, type(datamodule).__name__, _not_for_data(), defines)
        _check_arguments(datamodule, DATA_CALLED_WITH, DataModule)
    if stage == "fit":
        _check_strategy(module, stack)


def check_schedulers(optimizers: Sequence[Optimizer], configs: Sequence[LRSchedulerConfig]) -> None:
    """Refuse a scheduler that sets the learning rates of none of the `optimizers`.

    Raises:
        ConfigError: its optimizer was not returned by `configure_optimizers`.
    """
    groups = [id(group) for optimizer in optimizers for group in optimizer.param_groups]
    for config in configs:
        own = getattr(config.scheduler, "optimizer", None)
        # An optimizer that wraps another one has the same groups.
        if own is not None and not any(id(group) in groups for group in own.param_groups):
            raise ConfigError(
                f"configure_optimizers returned {type(config.scheduler).__name__} of an optimizer "
                f"({type(own).__name__}) that it did not return",
                expected="schedulers of the optimizers that it returns",
                do="return that optimizer, too, or make the scheduler of one that is returned",
            )


def check_optimizers(module: Module, optimizers: Sequence[Optimizer], stack: Stack) -> None:
    """Refuse `optimizers`, or a `module` that steps them itself, which the strategy cannot step so.

    Raises:
        ConfigError: it lacks a capability that this needs.
    """
    provides = stack.strategy.capabilities.provides
    needs = {
        MULTIPLE_OPTIMIZERS: len(optimizers) > 1,
        MANUAL_OPTIMIZATION: not module.automatic_optimization,
        CLOSURE_OPTIMIZERS: any(needs_closure(optimizer) for optimizer in optimizers),
    }
    for word, needed in needs.items():
        if needed and word not in provides:
            raise ConfigError(
                f"{type(module).__name__} needs {word!r}, which {stack.strategies[-1]} lacks",
                do="choose a strategy that provides it (`stratagem plugins show NAME`)",
            )


def _check_hidden(module: Module) -> None:
    """Refuse methods of a base class that comes after `Module`, whose own methods hide them."""
    bases = type(module).__mro__
    for base in bases[bases.index(ModuleEvents) :]:
        for name in dir(ModuleEvents):
            hidden = base not in Module.__mro__ and not name.startswith("__") and name in vars(base)
            if hidden and not overrides(module, name):
                raise ConfigError(
                    f"{type(module).__name__} inherits {name} from {base.__name__}, and Module's own hides it",
                    expected=f"{base.__name__} before Module in the bases of the class",
                )


def _not_for_data() -> dict[str, str]:
    """Return what is refused on a data module: what is called on a module, or on a callback, too."""
    elsewhere = {*EVENTS, *CALLED_WITH} - {*DATA_CALLED_WITH}
    names = {name: f"{name} on the Module, or on a Callback; move the code there" for name in elsewhere}
    return names | {**moved_names("module_methods"), **moved_names("data_methods")}


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
    """Refuse arguments that another trainer passes."""
    for parameter in inspect.signature(getattr(owner, name)).parameters.values():
        do = moved_names("method_arguments").get(parameter.name)
        if do and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(owner).__name__}.{name} takes {parameter.name}, which is not passed",
                expected="a method without it", do=do,
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
