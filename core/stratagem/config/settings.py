"""Every argument of `Run` and `Trainer`, typed: what may be said in code, a file, the environment or a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from stratagem.config.moved_names import moved_argument
from stratagem.config.sources import Source, parse_choice
from stratagem.errors import ConfigError, nearest

S = TypeVar("S", bound="RunSettings")


@frozen
class PluginOption:
    """An option of a plugin that is yet to be built."""

    value: Any
    origin: str
    #: The value is text, to be parsed by the option's type.
    text: bool


@define(eq=False, kw_only=True)
class RunSettings:
    """Who trains where: the plugins of a run. Each kind takes a name, a mapping with a ``name``, or an instance."""

    #: Which device: "auto", a name, or an instance.
    accelerator: Any = "auto"
    #: How many devices of this node, or which: a count, -1 for all, a list of indices, "auto".
    devices: Any = "auto"
    #: Machines taking part; each starts the script itself.
    num_nodes: int = field(default=1, validator=at_least(1))
    #: How the model is spread over processes; a list stacks outer strategies over the last one.
    strategy: Any = "auto"
    #: Which dtypes, where.
    precision: Any = None
    #: How gradients travel; a list stacks.
    comm_hook: Any = None
    #: Who this process is among the others; found by itself under "auto".
    environment: Any = "auto"
    #: Who starts the other processes.
    launcher: Any = None
    #: How state reaches the disk.
    checkpoint: Any = None
    #: Anything else, of any kind.
    plugins: Any = ()
    #: Where logs and checkpoints go; the current directory by default.
    default_root_dir: Path = field(factory=Path.cwd)
    #: Give each process its own share of every loader.
    use_distributed_sampler: bool = True
    #: Let batch normalization see the batches of all processes; on every device and backend.
    sync_batchnorm: bool = False
    #: Compute these parts of the model again in backward instead of keeping their activations: a set of classes (or of
    #: their names), a torch policy, or ``{"policy": ..., "mode": "full" | "selective" | "offload"}``. Memory for time;
    #: "offload" keeps them on the CPU instead.
    activation_checkpointing: Any = None
    #: A ``run.lock`` of an earlier run: plugins, versions, options and arguments must be the same.
    lock: Path | None = None
    #: Ask torch, cuDNN and cuBLAS for deterministic kernels; slower, and an error where none exists.
    deterministic: bool | Literal["warn"] = False
    #: Of matrix products in fp32: "high" (TF32 on GPUs that have it) and "medium" are faster and less exact than
    #: "highest". By default what `torch.set_float32_matmul_precision` was given stays.
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None

    @property
    def writes_files(self) -> bool:
        """Whether this run may leave anything on the disk that nobody asked for."""
        return True

    @property
    def plugin_arguments(self) -> frozenset[str]:
        """The names of the arguments that choose plugins."""
        return frozenset((*CHOICES, "plugins"))

    #: Where each value that is not a default came from; filled by `gather`.
    origins: dict[str, str] = field(factory=dict, init=False, repr=False)
    #: Plugin options by kind and name; filled by `gather`.
    options: dict[str, dict[str, PluginOption]] = field(factory=dict, init=False, repr=False)


@define(eq=False, kw_only=True)
class TrainerSettings(RunSettings):
    """How long, how often, how far: the loop of a `Trainer`."""

    #: Act on events, in this order.
    callbacks: Any = ()
    #: Where metrics go; True is the default logger, False none.
    logger: Any = True
    #: -1 trains until max_steps, max_time or should_stop.
    max_epochs: int | None = field(default=None, validator=at_least_or_unlimited(0))
    min_epochs: int | None = field(default=None, validator=at_least(0))
    #: Optimizer steps before which nothing but max_epochs and max_steps ends training.
    min_steps: int | None = field(default=None, validator=at_least(0))
    #: Optimizer steps; -1 is no limit.
    max_steps: int = field(default=-1, validator=at_least_or_unlimited(0))
    #: Seconds, a timedelta, or "DD:HH:MM:SS".
    max_time: timedelta | str | None = field(default=None, validator=duration_or_text)
    #: Batches whose gradients are added up before one optimizer step; ``{0: 8, 5: 4}`` is 8 until epoch 5 and then 4.
    accumulate_grad_batches: int | dict[int, int] = field(default=1, validator=accumulation)
    #: Largest gradient norm (or value), see `gradient_clip_algorithm`.
    gradient_clip_val: float | None = field(default=None, validator=more_than(0))
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    #: Batches an epoch: a count, or a share of the loader.
    limit_train_batches: int | float | None = field(default=None, validator=batch_limit)
    limit_val_batches: int | float | None = field(default=None, validator=batch_limit)
    limit_test_batches: int | float | None = field(default=None, validator=batch_limit)
    limit_predict_batches: int | float | None = field(default=None, validator=batch_limit)
    #: Validate every so many batches, or after this share of an epoch.
    val_check_interval: int | float = field(default=1.0, validator=batch_limit)
    check_val_every_n_epoch: int = field(default=1, validator=at_least(1))
    #: Validation batches tried before training, to find errors early; -1 is all.
    num_sanity_val_steps: int = field(default=2, validator=at_least_or_unlimited(0))
    #: Optimizer steps between two rows of step metrics.
    log_every_n_steps: int = field(default=50, validator=at_least(1))
    enable_progress_bar: bool = True
    enable_checkpointing: bool = True
    #: Print the layers and their parameters when a fit begins; by default where the output is a terminal.
    enable_model_summary: bool | None = None
    #: Measure where time goes: ``"simple"`` stands for the callback of that name with ``_profiler``.
    profiler: Any = None
    #: Run this many batches of everything, once, and write nothing.
    fast_dev_run: bool | int = field(default=False, validator=at_least(0))
    #: Train on this many (or this share of the) batches, the same ones every epoch.
    overfit_batches: int | float = field(default=0, validator=batch_limit)
    #: Stop at the operation that made a gradient NaN; slow.
    detect_anomaly: bool = False
    #: Validate, test and predict under `torch.inference_mode` rather than `torch.no_grad`; sharded strategies cannot.
    inference_mode: bool = True
    #: Nothing but the loop: no logger, bar, checkpoints, lock or sanity check.
    barebones: bool = False

    @property
    def writes_files(self) -> bool:
        return not (self.barebones or self.fast_dev_run)


#: Arguments that choose plugins, with the kind each of them chooses.
CHOICES = {
    "strategy": "strategy", "precision": "precision", "comm_hook": "comm_hook", "environment": "environment",
    "launcher": "launcher", "accelerator": "accelerator", "checkpoint": "checkpoint", "callbacks": "callback",
    "logger": "logger",
}  # fmt: skip


def gather(cls: type[S], code: Mapping[str, Any], layers: Sequence[Source] = ()) -> S:
    """Return settings of class `cls` from `layers`, weakest first, and then `code`; None for a path means its default.

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
            if name in CHOICES:
                converted = _split_options(CHOICES[name], converted, values.get(name), layer, options)
            values[name], origins[name] = converted, layer.origin
        for kind, set_here in layer.options.items():
            for option, value in set_here.items():
                options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, layer.text)
    settings = build(cls, {name: value for name, value in values.items() if name != "default_root_dir" or value}, "")
    for name in ("default_root_dir", "lock"):
        if is_remote(folder := getattr(settings, name, None) or Path()):
            raise ConfigError(
                f"{name} is {str(folder)!r} ({origins[name]})", expected="a path on this machine",
                do=f"give the URL where it is meant, such as ModelCheckpoint(dirpath={str(folder)!r})",
            )  # fmt: skip
    settings.origins.update(origins)
    settings.options.update(options)
    return settings


def _convert(cls: type[Any], name: str, value: Any, layer: Source) -> Any:
    """Return `value` as argument `name` wants it."""
    known = option_names(cls)
    if name not in known:
        if layer.origin == "code":
            return convert_options(cls, {name: value}, "")  # says what is known
        raise ConfigError(
            f"{layer.origin} sets {name!r}, which is no argument", expected="an argument of the Trainer",
            do=moved_argument(name) or nearest(name, known) or "see --help",
        )  # fmt: skip
    if layer.text and (name in CHOICES or name in ("plugins", "profiler")):
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
    """Take the options out of a mapping, so that a stronger layer can set one of them; return the name."""
    is_mapping = isinstance(choice, Mapping) and isinstance(choice.get("name"), str)
    name = choice["name"] if is_mapping else choice
    if earlier is not None and not _same_name(name, earlier):
        options.pop(kind, None)  # they were another plugin's
    if not is_mapping:
        return choice
    for option, value in choice.items():
        if option != "name":
            options.setdefault(kind, {})[option] = PluginOption(value, layer.origin, text=False)
    return name


def _same_name(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one.lower() == other.lower()


def option_names(cls: type[Any]) -> list[str]:
    """Return the arguments of `cls`."""
    return list(option_types(cls))
