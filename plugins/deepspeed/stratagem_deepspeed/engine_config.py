"""The engine's configuration: made of the options or of the user's own configuration, and completed for one run.

[Note: settings of the trainer]
Some keys of a configuration for DeepSpeed are also arguments of the trainer: precision, accumulation, clipping, batch
sizes. If both are set they must agree, otherwise an error names both; if one is set it is used. The trainer always does
the accumulation: the engine is configured for one batch in each of its steps.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from stratagem.errors import ConfigError
from stratagem_deepspeed.ds_config import AUTO
from stratagem_deepspeed.zero_section import device_of, dtype_of, enabled

if TYPE_CHECKING:
    from stratagem.api import RunContext
    from stratagem_deepspeed.options import DeepSpeedOptions

_CHECKPOINTED_LAYERS = (
    "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
    "synchronize_checkpoint_boundary",
)  # fmt: skip
#: Options by the keys of the aio section.
_AIO = {
    "block_size": "block_size", "queue_depth": "queue_depth", "single_submit": "single_submit",
    "overlap_events": "overlap_events", "intra_op_parallelism": "thread_count",
}  # fmt: skip
_LOSS_SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


# --- For one run -------------------------------------------------------------------------------------------------


def engine_config(options: DeepSpeedOptions, run: RunContext) -> dict[str, Any]:
    """Return a new dict with the configuration for ``deepspeed.initialize`` in `run`.

    Raises:
        ConfigError: the user's configuration contradicts an argument of the trainer, or this machine lacks what it
            needs.
    """
    config = _composed(options) if options.user_config is None else copy.deepcopy(dict(options.user_config))
    _set_precision(config, options, run)
    _set_batches(config, options, run)
    config["gradient_clipping"] = _clipping(config, options, run)
    config.setdefault("steps_per_print", sys.maxsize)
    if options.offloads_optimizer is not None:
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # any optimizer steps on the CPU, though slowly
    zero = config["zero_optimization"]
    if zero.get("overlap_comm") is None:
        zero["overlap_comm"] = zero.get("stage", 0) >= 2 and run.device.type != "cpu"
    if run.device.type == "cpu":
        _adapt_to_cpu(config)
    _fill_scheduler(config, options, run)
    _check_folders(zero, options)
    return config


def micro_batch_size(options: DeepSpeedOptions, run: RunContext | None = None) -> int | None:
    """Return the configured number of samples in a batch of one process; None if it is not configured.

    With `run` it is also derived from the global batch size.
    """
    config = options.user_config or {}
    value = config.get("train_micro_batch_size_per_gpu", AUTO)
    if value != AUTO:
        return int(value)
    if options.logging_batch_size_per_gpu != AUTO:
        return int(options.logging_batch_size_per_gpu)
    whole = config.get("train_batch_size", AUTO)
    return None if run is None or whole == AUTO else int(whole) // (_accumulation(run)[0] * run.world_size)


def _check_folders(zero: Mapping[str, Any], options: DeepSpeedOptions) -> None:
    """Refuse a folder that does not exist: DeepSpeed would create it, possibly on another disk."""
    for section in ("offload_optimizer", "offload_param"):
        if device_of(zero, section) != "nvme":
            continue
        folder, name = zero[section]["nvme_path"], options.called(f"{section}.nvme_path")
        if not os.path.isdir(folder):
            raise ConfigError(f"{name} is {folder!r}, which is not a folder", expected="a folder on a fast local disk")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{name} is {folder!r}, which is not writable", expected="a folder that this user may write to"
            )


# --- From the options --------------------------------------------------------------------------------------------


def _composed(options: DeepSpeedOptions) -> dict[str, Any]:
    layers = {name: getattr(options, name) for name in _CHECKPOINTED_LAYERS}
    config = {
        "zero_optimization": options.zero_section(),
        "activation_checkpointing": {name: value for name, value in layers.items() if value is not None},
        "zero_allow_untested_optimizer": options.zero_allow_untested_optimizer,
    }
    if "nvme" in (options.offloads_optimizer, options.offloads_parameters):
        config["aio"] = {key: getattr(options, name) for key, name in _AIO.items()}
    return config


# --- Completed for the run ---------------------------------------------------------------------------------------


def _set_precision(config: dict[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Enable or disable fp16 and bf16 explicitly, so that no default of DeepSpeed's applies."""
    import torch

    _check_precision(config, options, run)
    dtype = options.engine_dtype(run.policy)
    config.setdefault("fp16", {})["enabled"] = dtype is torch.float16
    config.setdefault("bf16", {})["enabled"] = dtype is torch.bfloat16
    defaults = attrs.fields_dict(type(options))
    for name in _LOSS_SCALE:
        value = getattr(options, name)
        if value != defaults[name].default:
            _check_loss_scale(name, value, config["fp16"], options)
        if dtype is torch.float16:
            config["fp16"].setdefault(name, value)


def _check_loss_scale(name: str, value: float, fp16: Mapping[str, Any], options: DeepSpeedOptions) -> None:
    path = f"strategy.deepspeed.{name}"
    if not fp16["enabled"]:
        raise ConfigError(
            f"{path} is {value} and the precision is not fp16, and only fp16 scales the loss",
            expected="a precision of fp16", do="drop it",
        )  # fmt: skip
    if fp16.get(name, value) != value:
        raise ConfigError(
            f"{path} is {value} and fp16.{name} of {options.origin} is {fp16[name]}", expected="one of the two"
        )


def _check_precision(config: Mapping[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Refuse a configuration whose precision differs from that of the trainer."""
    requested = run.settings.precision
    if requested is None:
        return
    import torch

    wanted = dtype_of(run.policy)
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        value = enabled(config, section)
        if (value is True and wanted is not dtype) or (value is False and wanted is dtype):
            raise ConfigError(
                f"{section}.enabled of {options.origin} is {value} and {_argument(run, 'precision', requested)}",
                expected="the same precision", do=f'drop one of the two, or write "auto" for {section}.enabled',
            )  # fmt: skip
    if enabled(config, "torch_autocast") is True:
        raise ConfigError(
            f"torch_autocast.enabled of {options.origin} is True and {_argument(run, 'precision', requested)}",
            expected="one of the two",
        )


def _accumulation(run: RunContext) -> list[int]:
    """Return the number of batches in a step, by epochs; 1 in a loop of your own."""
    factor = getattr(run.settings, "accumulate_grad_batches", 1)
    return [factor[epoch] for epoch in sorted(factor)] if isinstance(factor, Mapping) else [factor]


def _set_batches(config: dict[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Configure the engine for one batch in each step, after checking that the user's batch sizes agree."""
    factors, micro = _accumulation(run), micro_batch_size(options, run)
    _check_accumulation(config.get("gradient_accumulation_steps", AUTO), factors, options, run)
    _check_micro_batch(config.get("train_micro_batch_size_per_gpu", AUTO), options)
    _check_whole_batch(config.pop("train_batch_size", AUTO), micro, factors, options, run)
    config["train_micro_batch_size_per_gpu"] = micro or 1
    config["gradient_accumulation_steps"] = 1
    config["managed_gradient_accumulation"] = False


def _check_accumulation(value: Any, factors: list[int], options: DeepSpeedOptions, run: RunContext) -> None:
    if value == AUTO or [value] == factors:
        return
    found = f"gradient_accumulation_steps of {options.origin} is {value}"
    requested = getattr(run.settings, "accumulate_grad_batches", None)
    if requested is None:
        raise ConfigError(
            f"{found} and a loop of your own accumulates itself", expected="1", do='drop it, or set "auto"'
        )
    raise ConfigError(
        f"{found} and {_argument(run, 'accumulate_grad_batches', requested)}",
        expected="the same", do=f'set accumulate_grad_batches={value}, or write "auto"',
    )  # fmt: skip


def _check_micro_batch(value: Any, options: DeepSpeedOptions) -> None:
    logged = options.logging_batch_size_per_gpu
    if value != AUTO and logged not in (AUTO, value):
        raise ConfigError(
            f"train_micro_batch_size_per_gpu of {options.origin} is {value} and "
            f"strategy.deepspeed.logging_batch_size_per_gpu is {logged}",
            expected="the same",
        )


def _check_whole_batch(
    whole: Any, micro: int | None, factors: list[int], options: DeepSpeedOptions, run: RunContext
) -> None:
    if whole == AUTO:
        return
    if any(whole != (micro or 0) * factor * run.world_size for factor in factors):
        product = f"{micro or 'samples'} a batch x {factors[0]} batches a step x {run.world_size} processes"
        raise ConfigError(
            f"train_batch_size of {options.origin} is {whole}, which is not {product}",
            expected="sizes that agree", do='write "auto" for train_batch_size',
        )  # fmt: skip


def _clipping(config: Mapping[str, Any], options: DeepSpeedOptions, run: RunContext) -> float:
    """Return the norm at which gradients are clipped; 0.0 for no clipping, since DeepSpeed's default is 1.0."""
    value = config.get("gradient_clipping", AUTO)
    requested = getattr(run.settings, "gradient_clip_val", None)
    if value != AUTO and requested is not None and float(value) != float(requested):
        raise ConfigError(
            f"gradient_clipping of {options.origin} is {value} and {_argument(run, 'gradient_clip_val', requested)}",
            expected="the same", do="drop one of the two",
        )  # fmt: skip
    return float(requested or 0.0) if value == AUTO else float(value)


def _adapt_to_cpu(config: dict[str, Any]) -> None:
    """Remove settings for GPUs only, for which DeepSpeed would compile ops, or fail."""
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if device_of(zero, section) == "cpu":
            zero[section]["pin_memory"] = False  # useful only for copies to another device
        elif device_of(zero, section) == "nvme":
            zero[section].setdefault("pin_memory", False)
    layers = config.get("activation_checkpointing", {})
    if layers.get("cpu_checkpointing") and not layers.get("partition_activations"):
        layers["cpu_checkpointing"] = False  # the inputs are there already, and DeepSpeed would clear them
    optimizer = config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw") and device_of(zero, "offload_optimizer") is None:
        _use_torch_adam(optimizer.setdefault("params", {}))


def _use_torch_adam(params: dict[str, Any]) -> None:
    """Use torch's Adam with DeepSpeed's defaults: DeepSpeed's own would be compiled for minutes without benefit."""
    params["torch_adam"] = True
    params.setdefault("weight_decay", 0.0)
    for name in ("set_grad_none", "fp32_optimizer_states"):
        params.pop(name, None)
    if params.pop("bias_correction", True) is False:
        raise ConfigError("optimizer.params.bias_correction is false on a CPU", expected="true, as torch's Adam has it")


def _fill_scheduler(config: dict[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Replace "auto" in the scheduler's section."""
    params = config.get("scheduler", {}).get("params", {})
    known = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": config.get("optimizer", {}).get("params", {}).get("lr"),
        "total_num_steps": getattr(run.settings, "max_steps", -1),
    }
    missing = {"warmup_max_lr": "optimizer.params.lr in it", "total_num_steps": "max_steps of the trainer"}
    for name in [name for name, value in params.items() if value == AUTO]:
        if known[name] in (None, -1):
            raise ConfigError(
                f'scheduler.params.{name} of {options.origin} is "auto"', expected=f"a number, or {missing[name]}"
            )
        params[name] = known[name]


def _argument(run: RunContext, name: str, value: Any) -> str:
    """Return the text "name is value", followed by where it was set if not in code."""
    origin = run.settings.origins.get(name, "by default")
    return f"{name} is {value!r}{'' if origin == 'code' else f' ({origin})'}"
