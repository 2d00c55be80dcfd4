"""The options of the strategy, under the names that other trainers use for DeepSpeed's."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import PrecisionPolicy
from stratagem.api.options import check, options
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_deepspeed import ds_config, zero_section
from stratagem_process_group import ProcessGroupStrategy, group_options_after

if TYPE_CHECKING:
    import torch

#: Environment variables that may name a configuration file; the first one that is set is used.
VARIABLES = ("STRATAGEM_DEEPSPEED_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH")

_PATH = "strategy.deepspeed"
#: Options that are used together with a `config`.
_BESIDE_A_CONFIG = {
    "config", "remote_device", "logging_batch_size_per_gpu", "logging_level", "load_full_weights",
    "exclude_frozen_parameters", "state_dict_type", "timeout", "start_timeout", "process_group_backend", "nccl", "gloo",
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
}  # fmt: skip
#: Options for transfers to and from a disk.
_FOR_NVME = (
    "nvme_path", "params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size",
    "queue_depth", "single_submit", "overlap_events", "thread_count",
)  # fmt: skip

_BUCKETS = (
    "contiguous_gradients", "allgather_partitions", "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size",
    "sub_group_size",
)  # fmt: skip


def _whole(value: Any) -> Any:
    """Convert 2e8 to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, float):
        raise ConfigError(f"{type(instance).__name__}.{attribute.name} is {value!r}", expected="a whole number")
    at_least(1)(instance, attribute, value)


def level_number(level: int | str) -> int:
    """Return a level of Python's logging, or its name, as a number.

    Raises:
        ConfigError: there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise ConfigError(f"{_PATH}.logging_level is {level!r}", expected="a level of Python's logging, such as 'INFO'")
    return number


@define(eq=False, kw_only=True, field_transformer=group_options_after("state_dict_type"))
class DeepSpeedOptions(ProcessGroupStrategy):
    """The options. A `config` of the user\'s replaces all of those that describe the engine."""

    #: Use ZeRO at `stage`. False is stage 0: nothing is partitioned, which needs the most memory.
    zero_optimization: bool = True
    #: What is partitioned over the processes: 1 optimizer state, 2 also gradients, 3 also parameters, 0 nothing. Higher
    #: stages save memory; 3 sends 1.5 times as many bytes as the others. None is 2, or what a `config` sets.
    stage: Literal[0, 1, 2, 3] | None = None
    #: At stage 3: where parameters are kept while the model is built. None keeps them on the device; "cpu" and "nvme"
    #: allow models that no device holds, and start more slowly.
    remote_device: Literal["cpu", "nvme"] | None = None
    #: Keep the optimizer's state in `offload_optimizer_device`, and step on the CPU: saves 12 bytes on the device for
    #: each parameter of the partition, for a slower step.
    offload_optimizer: bool = False
    #: At stage 3: keep parameters in `offload_params_device` while no layer computes with them.
    offload_parameters: bool = False
    #: "nvme" holds most and is slowest.
    offload_params_device: Literal["cpu", "nvme"] = "cpu"
    #: A folder on a fast local disk for what is offloaded to "nvme"; many writes wear out the system's disk.
    nvme_path: Path = Path("/local_nvme")
    #: Buffers for transfers of parameters from and to the disk; more of them prefetch further and need memory.
    params_buffer_count: int | float = field(default=5, converter=_whole, validator=_count)
    #: Elements in each of these buffers: at least as many as in the largest partition of a parameter.
    params_buffer_size: int | float = field(default=100_000_000, converter=_whole, validator=_count)
    #: Elements of parameters that stay in CPU memory instead of on the disk: less traffic, more memory.
    max_in_cpu: int | float = field(default=1_000_000_000, converter=_whole, validator=_count)
    #: "nvme" holds most and is slowest.
    offload_optimizer_device: Literal["cpu", "nvme"] = "cpu"
    #: Buffers for transfers of optimizer state from and to the disk: at least one for each tensor of a parameter's size
    #: that a step needs, which are 4 for Adam.
    optimizer_buffer_count: int | float = field(default=4, converter=_whole, validator=_count)
    #: Bytes of a disk request; ``stratagem deepspeed tune-nvme`` finds this and the next four for a disk.
    block_size: int | float = field(default=1_048_576, converter=_whole, validator=_count)
    #: Concurrent disk requests; more hide latency until the disk is busy.
    queue_depth: int | float = field(default=8, converter=_whole, validator=_count)
    #: Submit requests to the disk one by one rather than in batches.
    single_submit: bool = False
    #: Submit new requests while others complete.
    overlap_events: bool = True
    #: Threads that read and write; they compete with the optimizer's threads for cores.
    thread_count: int | float = field(default=1, converter=_whole, validator=_count)
    #: Use page-locked memory for what is offloaded: faster transfers to and from a GPU, and never swapped out.
    pin_memory: bool = False
    #: At stage 3: elements of parameters that are stepped at a time. Smaller ones bound the memory of a step.
    sub_group_size: int | float = field(default=1_000_000_000_000, converter=_whole, validator=_count)
    #: Copy gradients into one buffer as they are produced: less fragmentation for a copy.
    contiguous_gradients: bool = True
    #: Average gradients while backward still runs, at stages 2 and 3: faster, for a second `reduce_bucket_size`. None
    #: is True on a GPU.
    overlap_comm: bool | None = None
    #: Gather updated parameters in one collective. DeepSpeed has removed the alternative.
    allgather_partitions: bool = True
    #: Each rank gets only the gradients of its partition: less traffic than an all-reduce.
    reduce_scatter: bool = True
    #: Elements gathered at a time. 2e8 for all buckets needs about 3.6 GB of memory; 5e8 is faster and needs more.
    allgather_bucket_size: int | float = field(default=200_000_000, converter=_whole, validator=_count)
    #: Elements averaged at a time; one and a half times as many are allocated.
    reduce_bucket_size: int | float = field(default=200_000_000, converter=_whole, validator=_count)
    #: Allow optimizers that DeepSpeed has not tested with ZeRO; wrong for those that are not elementwise.
    zero_allow_untested_optimizer: bool = True
    #: Samples in a batch of one process, from which DeepSpeed computes throughput; "auto" uses the loader's.
    logging_batch_size_per_gpu: int | Literal["auto"] = field(default="auto", validator=at_least(1))
    #: DeepSpeed's own configuration, a mapping or a JSON file, instead of all options that describe the engine. None
    #: uses the file that STRATAGEM_DEEPSPEED_CONFIG_PATH or PL_DEEPSPEED_CONFIG_PATH names, if one is set.
    config: dict[str, Any] | Path | str | None = None
    #: The level of DeepSpeed's logger, as in `logging`, or its name. INFO logs about a page per run.
    logging_level: int | str = field(default=logging.WARNING, metadata={"example": "INFO"})
    #: With fp16: the loss scale. 0 is a dynamic one: the largest that does not overflow.
    loss_scale: float = field(default=0.0, validator=at_least(0), metadata={"example": 1024})
    #: With fp16: the dynamic loss scale starts at two to this power; a high one skips the first steps.
    initial_scale_power: int = field(default=16, validator=at_least(0), metadata={"example": 12})
    #: With fp16: steps without overflow before the loss scale doubles.
    loss_scale_window: int = field(default=1000, validator=at_least(1))
    #: With fp16: overflows before the loss scale halves.
    hysteresis: int = field(default=2, validator=at_least(1))
    #: With fp16: the smallest loss scale; an overflow there is an error.
    min_loss_scale: int = field(default=1, validator=at_least(1))
    #: Partition the inputs of checkpointed layers over the model-parallel ranks. This and the next four apply only to
    #: layers that the model calls through ``deepspeed.checkpointing.checkpoint``.
    partition_activations: bool = False
    #: Keep the inputs of checkpointed layers in CPU memory: saves device memory, for transfers.
    cpu_checkpointing: bool = False
    #: Copy the inputs of checkpointed layers into one buffer: less fragmentation. Needs `number_checkpoints`.
    contiguous_memory_optimization: bool = False
    #: The number of checkpointed layers, which `contiguous_memory_optimization` needs.
    number_checkpoints: int | None = field(default=None, validator=at_least(1))
    #: Synchronize the device before and after each checkpointed layer: slower, for profiling.
    synchronize_checkpoint_boundary: bool = False
    #: Load only the weights of a checkpoint, which must not be sharded: training starts at step 0 with a new optimizer.
    #: To resume from a file with optimizer state, leave this off.
    load_full_weights: bool = False
    #: Leave frozen parameters out of checkpoints: smaller files, which need the original weights to be loaded.
    exclude_frozen_parameters: bool = False
    #: "deepspeed" saves its own directory, which only DeepSpeed reads and only at the same world size. By default what
    #: ``Trainer(checkpoint=)`` selects, which every strategy reads.
    state_dict_type: Literal["deepspeed"] | None = None

    #: The user's configuration, checked; None if the options are used.
    user_config: Mapping[str, Any] | None = field(init=False, default=None)
    #: How error messages refer to the source of the engine's configuration.
    origin: str = field(init=False, default=_PATH)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check(self, _PATH)
        level_number(self.logging_level)
        source, setting = self._source()
        if source is None:
            self._check_effects()
        else:
            self._check_alone(setting)
            self.origin = setting if isinstance(source, Mapping) else f"{source} ({setting})"
            self.user_config = ds_config.read(source, self.origin, setting)
        zero_section.check_zero(self.zero, self.called)
        self._check_remote_device()

    # --- Derived settings ----------------------------------------------------------------------------------------

    @property
    def zero(self) -> Mapping[str, Any]:
        """The zero_optimization section of the options or of the user's configuration."""
        if self.user_config is None:
            return self.zero_section()
        section: Mapping[str, Any] = self.user_config.get("zero_optimization", {})
        return section

    @property
    def zero_stage(self) -> int:
        """What is partitioned: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
        return int(self.zero.get("stage", 0))

    @property
    def offloads_optimizer(self) -> str | None:
        """Where the optimizer's state is kept if not on the device: "cpu" or "nvme"."""
        return zero_section.device_of(self.zero, "offload_optimizer")

    @property
    def offloads_parameters(self) -> str | None:
        """Where idle parameters are kept if not on the device: "cpu" or "nvme"."""
        return zero_section.device_of(self.zero, "offload_param")

    @property
    def configured_optimizer(self) -> str | None:
        """The type of the optimizer that DeepSpeed makes, from the configuration."""
        return None if self.user_config is None else self.user_config.get("optimizer", {}).get("type")

    @property
    def configured_scheduler(self) -> str | None:
        """The type of the scheduler that DeepSpeed makes, from the configuration."""
        return None if self.user_config is None else self.user_config.get("scheduler", {}).get("type")

    def engine_dtype(self, policy: PrecisionPolicy) -> torch.dtype | None:
        """Return the 16-bit dtype that the engine computes in, None for 32 bits.

        Raises:
            ConfigError: 16 bits at stage 0.
        """
        dtype = zero_section.engine_dtype(self.user_config, policy)
        if dtype is not None and self.zero_stage == 0:
            raise ConfigError(
                f"{self.called('stage')} is 0 and the precision is {dtype}, with which DeepSpeed trains wrongly",
                expected="stage 1, 2 or 3, or 32 bits",
            )
        return dtype

    def zero_section(self) -> dict[str, Any]:
        """Return the zero_optimization section that the options describe."""
        if not self.zero_optimization:
            return {"stage": 0}
        stage = 2 if self.stage is None else self.stage
        section: dict[str, Any] = {"stage": stage, **{name: getattr(self, name) for name in _BUCKETS}}
        if self.overlap_comm is not None:
            section["overlap_comm"] = self.overlap_comm
        if self.offload_optimizer:
            section["offload_optimizer"] = {
                "device": self.offload_optimizer_device, "buffer_count": self.optimizer_buffer_count,
                "pin_memory": self.pin_memory, **self._nvme_path(self.offload_optimizer_device),
            }  # fmt: skip
        if self.offload_parameters:
            section["offload_param"] = {
                "device": self.offload_params_device, "buffer_count": self.params_buffer_count,
                "buffer_size": self.params_buffer_size, "max_in_cpu": self.max_in_cpu,
                "pin_memory": self.pin_memory, **self._nvme_path(self.offload_params_device),
            }  # fmt: skip
        return section

    def _nvme_path(self, device: str) -> dict[str, str]:
        return {"nvme_path": str(self.nvme_path)} if device == "nvme" else {}

    def called(self, key: str) -> str:
        """How the user wrote `key` of the zero_optimization section."""
        if self.user_config is not None:
            return f"zero_optimization.{key} of {self.origin}"
        return f"{_PATH}.{zero_section.OPTIONS.get(key, key)}"

    # --- Contradictions ------------------------------------------------------------------------------------------

    def _source(self) -> tuple[Any, str]:
        """Return the configuration to read, if any, and what names it."""
        if self.config == "":
            raise ConfigError(f"{_PATH}.config is ''", expected="a mapping or a JSON file", do="drop it to have none")
        if self.config is not None:
            return self.config, f"{_PATH}.config"
        for variable in VARIABLES:
            if os.environ.get(variable):
                return os.environ[variable], variable
        return None, ""

    def _check_alone(self, setting: str) -> None:
        """Refuse options that the configuration would replace without an error message."""
        replaced = [name for name in self._changed() if name not in _BESIDE_A_CONFIG]
        if replaced:
            raise ConfigError(
                f"{_PATH}.{replaced[0]} and {setting} are both set, and the configuration replaces all options that "
                "describe the engine",
                expected="one of the two", do=f"drop {', '.join(replaced)}, or set it in the configuration",
            )  # fmt: skip

    def _changed(self) -> list[str]:
        """Return the options that differ from their defaults."""
        return [name for name, option in options(type(self)).items() if getattr(self, option.name) != option.default]

    def _check_effects(self) -> None:
        """Refuse an option that has no effect."""
        changed = self._changed()
        for name, holds, wanted in self._conditions():
            if name in changed and not holds:
                raise ConfigError(
                    f"{_PATH}.{name} is {_shown(getattr(self, name))}, which has no effect",
                    expected=wanted, do="drop it",
                )  # fmt: skip
        if self.contiguous_memory_optimization and not (self.partition_activations and self.number_checkpoints):
            raise ConfigError(
                f"{_PATH}.contiguous_memory_optimization is True without partition_activations and number_checkpoints",
                expected="both",
            )

    def _conditions(self) -> list[tuple[str, bool, str]]:
        """Return what each option needs in order to have an effect."""
        stage = (2 if self.stage is None else self.stage) if self.zero_optimization else 0
        offloads = self.offload_optimizer or self.offload_parameters
        parameters_on_disk = self.offload_parameters and self.offload_params_device == "nvme"
        optimizer_on_disk = self.offload_optimizer and self.offload_optimizer_device == "nvme"
        on_disk = dict.fromkeys(_FOR_NVME, parameters_on_disk or optimizer_on_disk)
        on_disk |= dict.fromkeys(("params_buffer_count", "params_buffer_size", "max_in_cpu"), parameters_on_disk)
        on_disk["optimizer_buffer_count"] = optimizer_on_disk
        return [
            ("stage", self.zero_optimization or self.stage == 0, "zero_optimization=True with it"),
            ("offload_params_device", self.offload_parameters, "offload_parameters=True with it"),
            ("offload_optimizer_device", self.offload_optimizer, "offload_optimizer=True with it"),
            *((name, holds, 'offloading to "nvme"') for name, holds in on_disk.items()),
            ("pin_memory", offloads, "offload_optimizer=True or offload_parameters=True with it"),
            ("sub_group_size", stage == 3, "stage 3"),
            ("number_checkpoints", self.contiguous_memory_optimization, "contiguous_memory_optimization=True with it"),
        ]

    def _check_remote_device(self) -> None:
        if self.remote_device is None:
            return
        if self.zero_stage != 3:
            raise ConfigError(
                f"{_PATH}.remote_device is {self.remote_device!r} and {self.called('stage')} is {self.zero_stage}",
                expected="stage 3, the only one that partitions parameters while the model is built",
            )
        on_disk = self.offloads_parameters == "nvme"
        if on_disk is not (self.remote_device == "nvme"):
            raise ConfigError(
                f"{_PATH}.remote_device is {self.remote_device!r} and parameters are offloaded to "
                f"{self.offloads_parameters!r}",
                expected='"nvme" for both or for neither',
            )


def _shown(value: Any) -> str:
    return repr(str(value) if isinstance(value, Path) else value)
