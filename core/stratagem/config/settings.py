"""The typed arguments of `Run` and `Trainer`, and how they are read from code, files, environment and command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from attrs import define, field, frozen

from stratagem.api.options import build, convert_options, option_types
from stratagem.api.paths import is_remote
from stratagem.api.validators import (
    accumulation,
    at_least,
    at_least_or_unlimited,
    batch_limit,
    duration_or_text,
    more_than,
)
from stratagem.config.sources import Source, parse_choice
from stratagem.discovery import registry
from stratagem.discovery.moved_names import moved_argument
from stratagem.errors import ConfigError, nearest

S = TypeVar("S", bound="RunSettings")


@frozen(eq=False, repr=False)
class PluginOption:
    """An option of a plugin that is not built yet."""

    value: Any
    origin: str
    #: The value is text, to be parsed by the option's type.
    text: bool


@define(eq=False, repr=False, kw_only=True)
class RunSettings:
    """The plugins of a run, and where it runs. Each kind takes a name, a mapping with a ``name``, or an instance."""

    #: Whether a Trainer has these arguments, and so calls the hooks of events.
    for_trainer: ClassVar[bool] = False
    #: The type of device: "auto", a name, or an instance.
    accelerator: Any = "auto"
    #: The devices of this node: a count, -1 for all, a list of indices, or "auto".
    devices: Any = "auto"
    #: The number of machines; start the script on each of them.
    num_nodes: int = field(default=1, validator=at_least(1))
    #: How the model is distributed over processes; a list stacks outer strategies around the last one.
    strategy: Any = "auto"
    #: The dtypes of parameters, compute and gradient reduction.
    precision: Any = None
    #: How gradients are sent; a list stacks hooks, outermost first.
    comm_hook: Any = None
    #: How a process finds its rank; "auto" detects it.
    environment: Any = "auto"
    #: How the processes of this node are started.
    launcher: Any = None
    #: The format of checkpoints.
    checkpoint: Any = None
    #: More plugins, of any kind: names, mappings, instances, or objects with `@hookimpl` methods.
    plugins: Any = ()
    #: The folder of logs and checkpoints; the current directory by default.
    default_root_dir: Path = field(factory=Path.cwd)
    #: Give each process its own share of every loader.
    use_distributed_sampler: bool = True
    #: Compute the statistics of batch normalization over all processes; on every device and backend.
    sync_batchnorm: bool = False
    #: Recompute these modules in backward instead of keeping their activations: a set of classes (or of their names), a
    #: torch policy, or ``{"policy": ..., "mode": "full" | "selective" | "offload"}``. Saves memory and costs time;
    #: "offload" keeps activations on the CPU.
    activation_checkpointing: Any = None
    #: Compile with `torch.compile`: True, a mode such as "max-autotune", or a mapping of options of the callback
    #: `compile`, such as ``{"dynamic": True, "modules": {Block}}``. Starts later and trains faster.
    compile: Any = None
    #: A ``run.lock`` of an earlier run: plugins, versions, options and arguments must be the same.
    lock: Path | None = None
    #: Use deterministic kernels of torch, cuDNN and cuBLAS; slower, and an error for an operation that has none.
    deterministic: bool | Literal["warn"] = False
    #: Precision of fp32 matrix products: "high" (TF32 on GPUs that have it) and "medium" are faster and less exact than
    #: "highest". By default the setting of `torch.set_float32_matmul_precision` is not changed.
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None

    @property
    def writes_files(self) -> bool:
        """Whether this run may write files that no argument requests explicitly."""
        return True

    @property
    def plugin_arguments(self) -> frozenset[str]:
        """The names of the arguments that choose plugins."""
        return frozenset((*registry.arguments(), "plugins"))

    #: What was chosen for kinds of plugins that other packages add, by argument; filled by `gather`.
    chosen: dict[str, Any] = field(factory=dict, init=False, repr=False)
    #: Where each value that is not a default came from; filled by `gather`.
    origins: dict[str, str] = field(factory=dict, init=False, repr=False)
    #: Plugin options by kind and name; filled by `gather`.
    options: dict[str, dict[str, PluginOption]] = field(factory=dict, init=False, repr=False)


@define(eq=False, repr=False, kw_only=True)
class TrainerSettings(RunSettings):
    """The arguments of a `Trainer`: those of a run, and those of its loops."""

    for_trainer: ClassVar[bool] = True
    #: Callbacks, called in this order.
    callbacks: Any = ()
    #: The loggers, one or several; True is the default logger, False means none.
    logger: Any = True
    #: The number of epochs; -1 trains until max_steps, max_time or should_stop.
    max_epochs: int | None = field(default=None, validator=at_least_or_unlimited(0))
    #: Epochs before which only max_epochs and max_steps end training.
    min_epochs: int | None = field(default=None, validator=at_least(0))
    #: Optimizer steps before which only max_epochs and max_steps end training.
    min_steps: int | None = field(default=None, validator=at_least(0))
    #: The most optimizer steps; -1 means no limit.
    max_steps: int = field(default=-1, validator=at_least_or_unlimited(0))
    #: The longest time to train: seconds, a timedelta, or "DD:HH:MM:SS".
    max_time: timedelta | dict[str, float] | str | None = field(default=None, validator=duration_or_text)
    #: Batches per optimizer step; ``{0: 8, 5: 4}`` accumulates 8 until epoch 5, and 4 from then on.
    accumulate_grad_batches: int | dict[int, int] = field(default=1, validator=accumulation)
    #: Divide the gradients of an epoch's last batches, if fewer than `accumulate_grad_batches`, by their own number.
    average_short_window: bool = True
    #: Largest gradient norm (or value), see `gradient_clip_algorithm`.
    gradient_clip_val: float | None = field(default=None, validator=more_than(0))
    #: "norm" limits the norm of all gradients together, "value" limits each number.
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    #: Training batches per epoch: a count (int), or a share of the loader (float).
    limit_train_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Validation batches of each loader: a count (int), or a share of the loader (float).
    limit_val_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Test batches of each loader: a count (int), or a share of the loader (float).
    limit_test_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Prediction batches of each loader: a count (int), or a share of the loader (float).
    limit_predict_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Validate every n batches (int), or after each such share of an epoch (float).
    val_check_interval: int | float = field(default=1.0, validator=batch_limit)
    #: Validate in every nth epoch; None counts the batches of `val_check_interval` over epochs.
    check_val_every_n_epoch: int | None = field(default=1, validator=at_least(1))
    #: Make the loaders of the module or the data module again for every nth epoch; 0 makes them once.
    reload_dataloaders_every_n_epochs: int = field(default=0, validator=at_least(0))
    #: Validation batches that run before training, to find errors early; -1 means all.
    num_sanity_val_steps: int = field(default=2, validator=at_least_or_unlimited(0))
    #: Optimizer steps between two rows of step metrics; the first and the last step of a fit have a row, too.
    log_every_n_steps: int = field(default=50, validator=at_least(1))
    #: Add a callback that shows progress, and metrics logged with ``prog_bar=True``, unless `callbacks` has one.
    enable_progress_bar: bool = True
    #: Add a callback that saves a checkpoint after validation, or after each epoch, unless `callbacks` has one.
    enable_checkpointing: bool = True
    #: Print the layers and their parameters when a fit begins; by default if the output is a terminal.
    enable_model_summary: bool | None = None
    #: Measure time: ``"simple"`` selects the callback with that name and the suffix ``_profiler``.
    profiler: Any = None
    #: Run this many batches of training, validation, test and prediction, and write no files.
    fast_dev_run: bool | int = field(default=False, validator=at_least(0))
    #: Train on this many batches (int), or this share (float); the same batches in every epoch.
    overfit_batches: int | float = field(default=0, validator=batch_limit)
    #: Raise an error at the operation that makes a gradient NaN; slow.
    detect_anomaly: bool = False
    #: Validate, test and predict under `torch.inference_mode` instead of `torch.no_grad`; not within a fit, nor with
    #: sharded strategies.
    inference_mode: bool = True
    #: Run the loop only: no logger, progress bar, checkpoints, lock file or sanity check.
    barebones: bool = False

    @property
    def writes_files(self) -> bool:
        return not (self.barebones or self.fast_dev_run)


def gather(cls: type[S], code: Mapping[str, Any], layers: Sequence[Source] = ()) -> S:
    """Return settings of class `cls` from `layers` and then `code`; later ones override earlier ones.

    None for `default_root_dir` means its default.

    Raises:
        ConfigError: an unknown argument, or a value of the wrong type or range, with the origin of the value.
    """
    given = {name: value for name, value in code.items() if not (name == "default_root_dir" and value is None)}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    options: dict[str, dict[str, PluginOption]] = {}
    for layer in (*layers, Source("code", given)):
        for name, value in layer.values.items():
            converted = _convert(cls, name, value, layer)
            if name in registry.arguments():
                converted = _split_options(registry.arguments()[name], converted, values.get(name), layer, options)
            values[name], origins[name] = converted, layer.origin
        for kind, set_here in layer.options.items():
            for option, value in set_here.items():
                options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, layer.text)
    chosen = {name: values.pop(name) for name in added_arguments(cls) if name in values}
    settings = build(cls, {name: value for name, value in values.items() if name != "default_root_dir" or value}, "")
    for name in ("default_root_dir", "lock"):
        if is_remote(folder := getattr(settings, name, None) or Path()):
            raise ConfigError(
                f"{name} is {str(folder)!r} ({origins[name]})", expected="a path on this machine",
                do=f"pass the URL to the plugin that writes there, such as ModelCheckpoint(dirpath={str(folder)!r})",
            )  # fmt: skip
    folder = settings.default_root_dir
    root = next(
        each for each in (folder, *folder.parents) if os.path.exists(each)
    )  # unlike Path.exists, where it may not be asked
    if not root.is_dir():
        raise ConfigError(
            f"default_root_dir is {str(folder)!r} ({origins.get('default_root_dir', 'default')}), and {root} is a file",
            expected="a folder, or a path where one can be made", do="name another folder",
        )  # fmt: skip
    settings.chosen.update(chosen)
    settings.origins.update(origins)
    settings.options.update(options)
    return settings


def _convert(cls: type[Any], name: str, value: Any, layer: Source) -> Any:
    """Return `value` converted to the type of argument `name`."""
    known = option_names(cls)
    if name in added_arguments(cls):
        return parse_choice(value) if layer.text else value
    if name not in known:
        if layer.origin == "code":
            return convert_options(cls, {name: value}, "")  # raises an error that lists the known names
        raise ConfigError(
            f"{layer.origin} sets {name!r}, which is not an argument", expected="an argument of the Trainer",
            do=moved_argument(name) or nearest(name, known) or "see --help",
        )  # fmt: skip
    if layer.text and (name in registry.arguments() or name in ("plugins", "profiler")):
        return parse_choice(value)
    try:
        return convert_options(cls, {name: value}, "", text=layer.text)[name]
    except ConfigError as error:
        if layer.origin == "code":
            raise
        raise ConfigError(f"{error.found} ({layer.origin})", expected=error.expected, do=error.do) from None


def _split_options(
    kind: str, choice: Any, earlier: Any, layer: Source, options: dict[str, dict[str, PluginOption]]
) -> Any:
    """Move the options out of a mapping, so that a later source can set one of them; return the name."""
    is_mapping = isinstance(choice, Mapping) and isinstance(choice.get("name"), str)
    name = choice["name"] if is_mapping else choice
    if earlier is not None and not _same_name(name, earlier):
        options.pop(kind, None)  # they belong to another plugin
    if not is_mapping:
        return choice
    for option, value in choice.items():
        if option != "name":
            options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, text=False)
    return name


def _same_name(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one.lower() == other.lower()


def added_arguments(cls: type[RunSettings]) -> list[str]:
    """Return the arguments that choose plugins of kinds which other packages add."""
    known, kinds = option_names(cls), registry.kinds().values()
    return [kind.argument for kind in kinds if kind.argument not in known and kind.needs_trainer <= cls.for_trainer]


def option_names(cls: type[Any]) -> list[str]:
    """Return the arguments of `cls`."""
    return list(option_types(cls))
