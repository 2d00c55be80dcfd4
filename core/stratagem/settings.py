"""Every argument of `Run` and `Trainer`, typed: what may be said in code, a file, the environment or a command line."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from attrs import define, field

from stratagem.config import structure
from stratagem.errors import ConfigError
from stratagem.options import at_least, at_least_or_unlimited, batch_limit, more_than

S = TypeVar("S", bound="RunSettings")


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
    #: Ask torch for deterministic kernels; slower, and an error where none exists.
    deterministic: bool | Literal["warn"] = False
    #: Where each value that is not a default came from; filled by `gather`.
    origins: dict[str, str] = field(factory=dict, init=False, repr=False)


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
    #: Optimizer steps; -1 is no limit.
    max_steps: int = field(default=-1, validator=at_least_or_unlimited(0))
    #: Seconds, a timedelta, or "DD:HH:MM:SS".
    max_time: timedelta | str | None = None
    #: Batches whose gradients are added up before one optimizer step.
    accumulate_grad_batches: int = field(default=1, validator=at_least(1))
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
    #: Run this many batches of everything, once, and write nothing.
    fast_dev_run: bool | int = False
    #: Train on this many (or this share of the) batches, the same ones every epoch.
    overfit_batches: int | float = field(default=0, validator=batch_limit)
    #: Stop at the operation that made a gradient NaN; slow.
    detect_anomaly: bool = False
    #: Validate, test and predict under `torch.inference_mode` rather than `torch.no_grad`.
    inference_mode: bool = True
    #: Nothing but the loop: no logger, bar, checkpoints or sanity check.
    barebones: bool = False


#: Arguments that are part of the public signature and not built yet: refused, rather than ignored.
NOT_YET: dict[str, Any] = {
    "activation_checkpointing": None,
    "enable_model_summary": None,
    "lock": None,
    "profiler": None,
    "sync_batchnorm": False,
}


def gather(cls: type[S], code: Mapping[str, Any]) -> S:
    """Return settings of class `cls` from the arguments given in `code`; None for a path means its default.

    Raises:
        ConfigError: an unknown argument, or a value of the wrong type or range.
    """
    given = {name: value for name, value in code.items() if not (name == "default_root_dir" and value is None)}
    for name, nothing in NOT_YET.items():
        if given.pop(name, nothing) not in (nothing, False):
            raise ConfigError(f"{name} is {code[name]!r}", expected=f"{nothing!r}: this version does not have it yet")
    settings = structure(cls, given, "")
    settings.origins.update(dict.fromkeys(given, "code"))
    return settings
