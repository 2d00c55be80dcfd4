"""What DeepSpeed's engine is told: the options or the user's own configuration, completed for one run.

[Note: who decides]
A configuration for DeepSpeed says some things that arguments of the trainer say too: precision, accumulation, clipping,
batch sizes. Where both speak they must agree, else it is an error that names both; where one speaks it decides.
Accumulation is the trainer's in any case: the engine is told that each of its steps has one batch.
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
    """Return all that ``deepspeed.initialize`` is to know in `run`, in a dict of its own.

    Raises:
        ConfigError: the user's configuration contradicts an argument of the trainer, or asks for what this machine
            does not have.
    """
    config = _composed(options) if options.given is None else copy.deepcopy(dict(options.given))
    _set_precision(config, options, run)
    _set_batches(config, options, run)
    config["gradient_clipping"] = _clipping(config, options, run)
    config.setdefault("steps_per_print", sys.maxsize)
    if options.offloads_optimizer is not None:
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # any optimizer steps on the CPU, if slowly
    zero = config["zero_optimization"]
    if zero.get("overlap_comm") is None:
        zero["overlap_comm"] = zero.get("stage", 0) >= 2 and run.device.type != "cpu"
    if run.device.type == "cpu":
        _suit_the_cpu(config)
    _fill_scheduler(config, options, run)
    _check_folders(zero, options)
    return config


def micro_batch_size(options: DeepSpeedOptions, run: RunContext | None = None) -> int | None:
    """Return how many samples a batch of one process is said to have; None if nobody said so.

    A whole batch's size tells too, with `run` to divide it.
    """
    given = options.given or {}
    said = given.get("train_micro_batch_size_per_gpu", AUTO)
    if said != AUTO:
        return int(said)
    if options.logging_batch_size_per_gpu != AUTO:
        return int(options.logging_batch_size_per_gpu)
    whole = given.get("train_batch_size", AUTO)
    return None if run is None or whole == AUTO else int(whole) // (_accumulation(run)[0] * run.world_size)


def _check_folders(zero: Mapping[str, Any], options: DeepSpeedOptions) -> None:
    """Refuse a folder that is not there: DeepSpeed would make one, on whatever disk that path is."""
    for section in ("offload_optimizer", "offload_param"):
        if device_of(zero, section) != "nvme":
            continue
        folder, name = zero[section]["nvme_path"], options.called(f"{section}.nvme_path")
        if not os.path.isdir(folder):
            raise ConfigError(f"{name} is {folder!r}, which is no folder here", expected="one on a fast local disk")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{name} is {folder!r}, where this user may not write", expected="a folder of theirs")


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
    """Switch fp16 and bf16 on or off, in words that leave nothing to DeepSpeed."""
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
            f"{path} is {value} and nothing is computed in fp16, which alone scales the loss",
            expected="a precision of fp16",
            do="drop it",
        )
    if fp16.get(name, value) != value:
        raise ConfigError(
            f"{path} is {value} and fp16.{name} of {options.origin} is {fp16[name]}", expected="one of the two"
        )


def _check_precision(config: Mapping[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Refuse a configuration that says one precision where the trainer was asked for another."""
    asked = run.settings.precision
    if asked is None:
        return
    import torch

    wanted = dtype_of(run.policy)
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        said = enabled(config, section)
        if (said is True and wanted is not dtype) or (said is False and wanted is dtype):
            raise ConfigError(
                f"{section}.enabled of {options.origin} is {said} and {_argument(run, 'precision', asked)}",
                expected="the same precision",
                do=f'drop one of the two, or write "auto" for {section}.enabled',
            )
    if enabled(config, "torch_autocast") is True:
        raise ConfigError(
            f"torch_autocast.enabled of {options.origin} is True and {_argument(run, 'precision', asked)}",
            expected="one of the two",
        )


def _accumulation(run: RunContext) -> list[int]:
    """Return how many batches make a step, in the order of epochs; a loop of one's own is its own master."""
    factor = getattr(run.settings, "accumulate_grad_batches", 1)
    return [factor[epoch] for epoch in sorted(factor)] if isinstance(factor, Mapping) else [factor]


def _set_batches(config: dict[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Tell the engine of one batch a step, once what the user says of batches fits together."""
    factors, micro = _accumulation(run), micro_batch_size(options, run)
    _check_accumulation(config.get("gradient_accumulation_steps", AUTO), factors, options, run)
    _check_micro_batch(config.get("train_micro_batch_size_per_gpu", AUTO), options)
    _check_whole_batch(config.pop("train_batch_size", AUTO), micro, factors, options, run)
    config["train_micro_batch_size_per_gpu"] = micro or 1
    config["gradient_accumulation_steps"] = 1
    config["managed_gradient_accumulation"] = False


def _check_accumulation(said: Any, factors: list[int], options: DeepSpeedOptions, run: RunContext) -> None:
    if said == AUTO or [said] == factors:
        return
    found = f"gradient_accumulation_steps of {options.origin} is {said}"
    asked = getattr(run.settings, "accumulate_grad_batches", None)
    if asked is None:
        raise ConfigError(
            f"{found} and a loop of one's own accumulates by itself", expected="1", do='drop it, or write "auto"'
        )
    raise ConfigError(
        f"{found} and {_argument(run, 'accumulate_grad_batches', asked)}",
        expected="the same",
        do=f'set accumulate_grad_batches={said}, or write "auto"',
    )


def _check_micro_batch(said: Any, options: DeepSpeedOptions) -> None:
    logged = options.logging_batch_size_per_gpu
    if said != AUTO and logged not in (AUTO, said):
        raise ConfigError(
            f"train_micro_batch_size_per_gpu of {options.origin} is {said} and "
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
    """Return the largest norm of gradients, 0.0 for any; DeepSpeed's own default would clip at 1.0."""
    said = config.get("gradient_clipping", AUTO)
    asked = getattr(run.settings, "gradient_clip_val", None)
    if said != AUTO and asked is not None and float(said) != float(asked):
        raise ConfigError(
            f"gradient_clipping of {options.origin} is {said} and {_argument(run, 'gradient_clip_val', asked)}",
            expected="the same",
            do="drop one of the two",
        )
    return float(asked or 0.0) if said == AUTO else float(said)


def _suit_the_cpu(config: dict[str, Any]) -> None:
    """Leave out what only a GPU has use for; DeepSpeed would compile operations for it, or fail."""
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if device_of(zero, section) == "cpu":
            zero[section]["pin_memory"] = False  # it speeds up the way to another device
        elif device_of(zero, section) == "nvme":
            zero[section].setdefault("pin_memory", False)
    layers = config.get("activation_checkpointing", {})
    if layers.get("cpu_checkpointing") and not layers.get("partition_activations"):
        layers["cpu_checkpointing"] = False  # that is where they are; moving them there empties them
    optimizer = config.get("optimizer", {})
    if optimizer.get("type", "").lower() in ("adam", "adamw") and device_of(zero, "offload_optimizer") is None:
        _use_torch_adam(optimizer.setdefault("params", {}))


def _use_torch_adam(params: dict[str, Any]) -> None:
    """Ask for torch's Adam with the defaults of DeepSpeed's, which would be compiled for minutes to no use."""
    params["torch_adam"] = True
    params.setdefault("weight_decay", 0.0)
    for name in ("set_grad_none", "fp32_optimizer_states"):
        params.pop(name, None)
    if params.pop("bias_correction", True) is False:
        raise ConfigError("optimizer.params.bias_correction is false on a CPU", expected="true, as torch's Adam has it")


def _fill_scheduler(config: dict[str, Any], options: DeepSpeedOptions, run: RunContext) -> None:
    """Put values in the place of "auto" in the scheduler's section."""
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
    """Say what an argument of the trainer is, and where it was said if not in code."""
    origin = run.settings.origins.get(name, "by default")
    return f"{name} is {value!r}{'' if origin == 'code' else f' ({origin})'}"
