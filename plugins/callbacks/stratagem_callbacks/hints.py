"""Warn of likely mistakes that stop no run, and of choices that keep a GPU slow."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import nn
from torch.utils.data import DataLoader

from stratagem.api import hookimpl
from stratagem.errors import mistyped, nearest
from stratagem_trainer.api import Callback
from stratagem_trainer.api.events import EVENTS

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class Hints(Callback):
    """Warn on rank 0 of likely mistakes: misspelled methods and metrics, empty loaders, eval mode, slow choices."""

    @hookimpl
    def setup(self, trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
        _warn(run, misspelled_events(module), misspelled_hooks(trainer))

    @hookimpl(tryfirst=True)  # other plugins convert parameters, and a strategy may shard them
    def prepare_module(self, module: nn.Module, run: RunContext) -> None:
        if run.stage == "train":
            by_hand = uncalled_methods(module) if run.manual else ()
            _warn(run, by_hand, slow_choices(module, run), another_order(run))

    @hookimpl(tryfirst=True)  # other callbacks may freeze parts
    def on_fit_start(self, trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
        _warn(run, nothing_to_train(trainer, module), empty_loaders(trainer, "validate"), eval_modes(module))

    @hookimpl
    def on_sanity_check_end(self, trainer: TrainerView, run: RunContext) -> None:
        _warn(run, mistyped_monitors(trainer))

    @hookimpl
    def on_validation_start(self, trainer: TrainerView, run: RunContext) -> None:
        if trainer.state.fn == "validate":
            _warn(run, empty_loaders(trainer, "validate"))

    @hookimpl
    def on_test_start(self, trainer: TrainerView, run: RunContext) -> None:
        _warn(run, empty_loaders(trainer, "test"))

    @hookimpl
    def on_predict_start(self, trainer: TrainerView, run: RunContext) -> None:
        _warn(run, empty_loaders(trainer, "predict"))


def _warn(run: RunContext, *hints: Iterable[str]) -> None:
    """Warn of all `hints`, which are looked for on rank 0 alone."""
    for hint in (each for found in hints if run.is_global_zero for each in found):
        warnings.warn(hint, stacklevel=2)


# --- Methods -----------------------------------------------------------------------------------------------------


def misspelled_events(module: nn.Module) -> Iterator[str]:
    """Find methods that are called almost as an event, and that nothing calls."""
    known = {*EVENTS, *dir(_base(module))}
    for name in dir(type(module)):
        if name.startswith("on_") and name not in known and (hint := nearest(name, EVENTS)):
            yield f"{type(module).__name__} defines {name}, which nothing calls; {hint}"


#: Hooks that are methods of callbacks and loggers without a mark, and one of the engine's with such a name.
_HOOKS = sorted((*EVENTS, "log_hyperparams", "log_metrics", "on_connect"))


def misspelled_hooks(trainer: TrainerView) -> Iterator[str]:
    """Find methods of callbacks and loggers whose names are almost those of hooks that they lack."""
    for plugin in (*trainer.callbacks, *trainer.loggers):
        lacking = [hook for hook in _HOOKS if not hasattr(getattr(type(plugin), hook, None), "stratagem_impl")]
        for name in dir(type(plugin)):
            is_own = name.startswith(("on_", "log_")) and name not in _HOOKS
            if is_own and (hint := mistyped(name, lacking)):
                yield f"{trainer.run.title_of(plugin)} defines {name}, which nothing calls; {hint}"


def uncalled_methods(module: nn.Module) -> Iterator[str]:
    """Find methods that are not called while a module optimizes by hand, unless it calls them itself."""
    names = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
    if found := overridden(module, names):
        yield (
            f"{type(module).__name__} defines {', '.join(found)} and optimizes by hand, where nothing but its own "
            "training_step calls it"
        )


def overridden(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Return which of these methods `module` defines, rather than inheriting them from the Trainer's package."""
    base, own = _base(module), {name: getattr(module, name) for name in names}
    return [name for name, method in own.items() if getattr(method, "__func__", None) is not getattr(base, name)]


def _base(module: nn.Module) -> type[Any]:
    """Return the class of the Trainer's package that the user's classes derive from."""
    return next(cls for cls in type(module).__mro__ if cls.__module__.startswith("stratagem_trainer."))


# --- What is trained, and on what --------------------------------------------------------------------------------


def nothing_to_train(trainer: TrainerView, module: nn.Module) -> Iterator[str]:
    """Find that a fit has no optimizer, or no batches."""
    if not (trainer.optimizers or trainer.run.strategy.makes_optimizer()):
        yield f"{type(module).__name__}.configure_optimizers returned no optimizer: nothing is trained"
    if not trainer.num_training_batches:
        yield "limit_train_batches is 0: nothing is trained"


def eval_modes(module: nn.Module) -> Iterator[str]:
    """Find parts in eval mode, which they keep: right for frozen ones, and easily left behind by an evaluation."""
    name, do = type(module).__name__, "If that is not meant, call model.train() before fit"
    if not module.training:
        yield f"{name} is in eval mode and stays so: dropout is off, batch normalization keeps its statistics. {do}"
        return
    outermost: list[str] = []
    for path, part in module.named_modules():
        if not (part.training or any(path.startswith(f"{outer}.") for outer in outermost)):
            outermost.append(path)
    if outermost:
        shown = ", ".join(outermost[:5]) + (f" and {len(outermost) - 5} more" if len(outermost) > 5 else "")
        yield f"{name} has parts in eval mode, which stay so: {shown}. {do}"


#: The word of each stage in the names of its loaders, and what is not done without batches.
_STAGES = {"validate": ("val", "validated"), "test": ("test", "tested"), "predict": ("predict", "predicted")}


def empty_loaders(trainer: TrainerView, stage: str) -> Iterator[str]:
    """Find loaders of `stage` without batches; not if their limit is 0, and not an empty list."""
    word, done = _STAGES[stage]
    loaders, sizes = getattr(trainer, f"{word}_dataloaders"), getattr(trainer, f"num_{word}_batches")
    limit = getattr(trainer.settings, f"limit_{word}_batches")
    for index, size in enumerate(sizes):
        loader, number = (loaders[index], f" {index} of {len(sizes)}") if len(sizes) > 1 else (loaders, "")
        if size == 0 and limit != 0 and not isinstance(loader, list | tuple):
            yield (
                f"the {stage} loader{number} has no batches{_contents(loader)}: nothing is {done} with it. "
                "Check its data set, batch_size and drop_last, or leave the loader out"
            )


def _contents(loader: Any) -> str:
    """Return what `loader` makes its batches of, in parentheses; "" if that is not known."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not isinstance(loader.dataset, Sized):
        return ""
    return f" ({len(loader.dataset)} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last})"


# --- Metrics -----------------------------------------------------------------------------------------------------


def mistyped_monitors(trainer: TrainerView) -> Iterator[str]:
    """Find a callback or scheduler that monitors a metric which was not logged, a name with a mistake in typing.

    Not an error: training may log a metric of that name later.
    """
    logged, run = trainer.callback_metrics, trainer.run
    monitors = [(run.title_of(callback), getattr(callback, "monitor", None)) for callback in trainer.callbacks]
    monitors += [(type(each.scheduler).__name__, each.monitor) for each in trainer.lr_scheduler_configs if each.plateau]
    for who, name in monitors:
        if isinstance(name, str) and name not in logged:
            others = [other for other in logged if _without_numbers(other) != _without_numbers(name)]
            if hint := mistyped(name, others):
                yield (
                    f"{who} monitors {name!r}, which the sanity check did not log; {hint}. It is an error once "
                    "training needs it and has not logged it either"
                )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d", "", name)


# --- GPUs --------------------------------------------------------------------------------------------------------

#: Compute capabilities from which on there are tensor cores for 16 bits, and for TF32.
_VOLTA, _AMPERE = (7, 0), (8, 0)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def slow_choices(module: nn.Module, run: RunContext) -> Iterator[str]:
    """Find what keeps `module` from the tensor cores of the run's GPU."""
    if run.device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(run.device)
    if run.policy.compute_dtype in _SIXTEEN_BITS:
        if capability >= _VOLTA and _convolves_slowly(module):
            yield (
                f"the 2-d convolutions of {type(module).__name__} have weights in the order of torch.contiguous_format:"
                " in 16 bits they are faster after model.to(memory_format=torch.channels_last), with batches in that "
                "order"
            )
    elif run.settings.float32_matmul_precision is None and capability >= _AMPERE and _multiplies_in_full(module):
        yield (
            'matrix products are in fp32: float32_matmul_precision="high" uses TF32, many times as fast with 10 bits '
            'of mantissa; "highest" says that all 23 are wanted'
        )


def another_order(run: RunContext) -> Iterator[str]:
    """Find that `devices` names numbers that mean other GPUs to ``nvidia-smi``."""
    wanted = run.settings.devices
    is_count = isinstance(wanted, int) or (isinstance(wanted, str) and "," not in wanted)
    if run.device.type != "cuda" or is_count or "CUDA_DEVICE_ORDER" in os.environ:
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    if len(names) > 1:
        yield (
            f"devices is {wanted!r} among GPUs of several kinds ({', '.join(names)}): CUDA numbers the fastest first, "
            "nvidia-smi by place. Set CUDA_DEVICE_ORDER=PCI_BUS_ID in the environment for the same numbers"
        )


def _convolves_slowly(module: nn.Module) -> bool:
    weights = [part.weight for part in module.modules() if isinstance(part, nn.Conv2d)]
    known = [weight for weight in weights if not nn.parameter.is_lazy(weight)]
    return any(not weight.is_contiguous(memory_format=torch.channels_last) for weight in known)


def _multiplies_in_full(module: nn.Module) -> bool:
    try:
        allows = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch's newer switches were used, one for each backend
        return False
    return not allows and any(parameter.dtype is torch.float32 for parameter in module.parameters())
