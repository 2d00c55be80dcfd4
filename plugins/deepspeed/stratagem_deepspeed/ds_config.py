"""The user's own DeepSpeed configuration: read it, and check every key.

[Note: keys without effect]
DeepSpeed ignores most keys that it does not know, and some that it does. Here an unknown key is an error, and so is one
that has no effect. The keys are those of deepspeed 0.19.8 (config.py, zero/config.py, zero/offload_config.py,
precision_config.py and lr_schedules.py in runtime), listed here so that a configuration can be checked before deepspeed
is imported. "auto" is kept where a run determines the value, dropped where DeepSpeed has a default, and an error
elsewhere.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stratagem.api.paths import as_path
from stratagem.errors import ConfigError, nearest

AUTO = "auto"

# --- DeepSpeed's keys ----------------------------------------------------------------------------------------------

#: Kinds of values: the check, and how to describe them.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "count": (lambda value: type(value) is int and value >= 0, "a whole number, at least 0"),
    "some": (lambda value: type(value) is int and value >= 1, "a whole number, at least 1"),
    "number": (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "a number, at least 0"),
    "whole": (lambda value: type(value) is int, "a whole number"),
    "share": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
    "pair": (lambda value: _is_pair(value), "two numbers, at least 0 and below 1"),
    "interval": (lambda value: value == AUTO or (type(value) is int and value >= 1), 'a whole number, or "auto"'),
    "text": (lambda value: isinstance(value, str), "text"),
    "names": (lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of text"),
    "section": (lambda value: isinstance(value, dict), "a mapping"),
}


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(type(each) in (int, float) and 0 <= each < 1 for each in value)


def _all(kind: str, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_OFFLOAD_OPTIMIZER = {
    "device": ("none", "cpu", "nvme"), "nvme_path": "text", "buffer_count": "count", "ratio": "number",
    "cpuadam_cores_perc": "number",
    **_all("flag", "pin_memory pipeline_read pipeline_write fast_init super_offload"),
}  # fmt: skip
_OFFLOAD_PARAM = {
    "device": ("none", "cpu", "nvme"), "nvme_path": "text", "pin_memory": "flag",
    **_all("count", "buffer_count buffer_size max_in_cpu"),
}  # fmt: skip
_ZENFLOW = {
    "select_strategy": ("auto", "step", "epoch"),
    **_all("share", "topk_ratio auto_ratio pt_reserved_cores_perc"),
    **_all("interval", "select_interval update_interval"),
    **_all("flag", "overlap_step offload"), **_all("count", "full_warm_up_rounds"),
}  # fmt: skip
_FLOPS_PROFILER = {
    **_all("flag", "enabled detailed"), "recompute_fwd_factor": "number", "output_file": "text",
    "profile_step": "some", "module_depth": "whole", "top_modules": "some",
}  # fmt: skip
_COMMS_LOGGER = {**_all("flag", "enabled prof_all verbose debug"), "prof_ops": "names"}
_STAGE_3 = {
    **_all("count", "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
                    "max_reuse_distance module_granularity_threshold"),
    **_all("flag", "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential"),
}  # fmt: skip
_ZERO = {
    "stage": (0, 1, 2, 3),
    "offload_param": _OFFLOAD_PARAM, "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": _ZENFLOW, "leaf_module": "section",
    **_all("count", "reduce_bucket_size allgather_bucket_size sub_group_size zero_hpz_partition_size"),
    **_all("flag", "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
                   "overlap_comm compute_grad_norm load_from_fp32_weights ignore_unused_parameters "
                   "parameter_alignment zero_quantized_weights "
                   "zero_quantized_nontrainable_weights memory_efficient_linear "
                   "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
                   "save_muon_momentum_buffer_in_memory"),
    **_STAGE_3, **{f"stage3_{name}": kind for name, kind in _STAGE_3.items()},
}  # fmt: skip
_FP16 = {
    **_all("flag", "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads"),
    "loss_scale": "number", **_all("count", "initial_scale_power loss_scale_window hysteresis min_loss_scale"),
}  # fmt: skip
_BF16 = _all(
    "flag", "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
_ACTIVATION_CHECKPOINTING = {
    "number_checkpoints": "count",
    **_all("flag", "partition_activations contiguous_memory_optimization cpu_checkpointing profile "
                   "synchronize_checkpoint_boundary"),
}  # fmt: skip
_TOP: dict[str, Any] = {
    "zero_optimization": _ZERO, "fp16": _FP16, "bf16": _BF16, "bfloat16": _BF16,
    "activation_checkpointing": _ACTIVATION_CHECKPOINTING,
    "aio": {**_all("count", "block_size queue_depth intra_op_parallelism"),
            **_all("flag", "single_submit overlap_events use_gds")},
    "torch_autocast": {
        "enabled": "flag", "lower_precision_safe_modules": "names",
        "dtype": ("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"),
    },
    "optimizer": {"type": "text", "params": "section"}, "scheduler": {"type": "text", "params": "section"},
    "checkpoint": {"tag_validation": "text", "load_universal": "flag", "use_node_local_storage": "flag",
                   "parallel_write": {"pipeline_stage": "flag"}, "checkpoint_serialization": "flag",
                   "writer": "section"},
    "data_types": _all("text", "param_dtype buffer_dtype"),
    "gradient_allreduce_op": ("mean", "sum"), "communication_data_type": ("fp32", "fp16", "bf16"),
    "comms_logger": _COMMS_LOGGER, "flops_profiler": _FLOPS_PROFILER,
    "timers": "section", "datastates_ckpt": "section", "log_level": "text",
    **_all("section", "tensorboard wandb csv_monitor comet"),
    **_all("some", "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print"),
    "vocabulary_size": "count",
    **_all("number", "gradient_clipping gradient_predivide_factor"),
    **_all("flag", "managed_gradient_accumulation dump_state disable_python_gc prescale_gradients wall_clock_breakdown "
                   "memory_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
}  # fmt: skip

_ADAM = [
    "lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction", "adam_w_mode", "torch_adam", "foreach",
    "fp32_optimizer_states", "set_grad_none",
]  # fmt: skip
#: Optimizers that DeepSpeed makes itself, with the parameters that they accept if these are checked.
_OPTIMIZERS: dict[str, list[str] | None] = {
    "Adam": _ADAM, "AdamW": _ADAM, "Adagrad": None, "Lamb": None, "Lion": None, "Muon": None, "MuAdam": None,
    "MuAdamW": None, "MuSGD": None,
}  # fmt: skip
_WARMUP = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"]
_SCHEDULERS = {
    "LRRangeTest": ["lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
                    "lr_range_test_staircase", "last_batch_iteration"],
    "OneCycle": ["cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
                 "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum",
                 "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"],
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ["total_num_steps", *_WARMUP],
    "WarmupCosineLR": ["total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
                       "last_batch_iteration"],
}  # fmt: skip
#: Kinds of parameters of optimizers and schedulers, where they are known.
_PARAMETERS: dict[str, Any] = {
    **_all("number", "lr eps weight_decay momentum warmup_min_lr warmup_max_lr lr_range_test_min_lr "
                     "lr_range_test_step_rate cycle_min_lr cycle_max_lr decay_lr_rate decay_mom_rate cycle_min_mom "
                     "cycle_max_mom warmup_min_ratio cos_min_ratio"),
    **_all("flag", "amsgrad bias_correction adam_w_mode torch_adam fp32_optimizer_states set_grad_none nesterov "
                   "lr_range_test_staircase cycle_momentum maximize"),
    **_all("count", "warmup_num_steps cycle_first_stair_count cycle_second_stair_count decay_step_size"),
    **_all("some", "total_num_steps lr_range_test_step_size cycle_first_step_size cycle_second_step_size"),
    "betas": "pair", "warmup_type": ("log", "linear"), "last_batch_iteration": "whole",
}  # fmt: skip
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")

_GONE = "DeepSpeed has removed"
_NOT_USED = "of DeepSpeed's own, which this strategy does not use"
#: Keys that DeepSpeed has removed or renamed, and keys for what another part of a run does here.
_REFUSED = {
    "amp": (f"{_GONE} Apex", "use fp16 or bf16"),
    "sparse_attention": (f"{_GONE} sparse attention", ""),
    "elasticity": (f"{_GONE} elastic training", ""),
    "compression_training": (f"{_GONE} compression", ""),
    "quantize_training": (f"{_GONE} quantized training", ""),
    "eigenvalue": (f"{_GONE} quantized training", ""),
    "progressive_layer_drop": (f"{_GONE} progressive layer drop", ""),
    "curriculum_learning": (f"{_GONE} this form of curriculum learning", ""),
    "nebula": (f"{_GONE} Nebula", ""),
    "sparse_gradients": (f"{_GONE} compressed embedding gradients", "leave it out"),
    "graph_harvesting": (f"{_GONE} graph harvesting", ""),
    "zero_optimization.mics_shard_size": (f"{_GONE} MiCS", ""),
    "zero_optimization.mics_hierarchical_params_gather": (f"{_GONE} MiCS", ""),
    "zero_optimization.zeropp_loco_param": (f"{_GONE} LoCo", ""),
    "zero_optimization.round_robin_gradients": ("checkpoints are not read from masters in that order", ""),
    "zero_optimization.elastic_checkpoint": ("it applies only to checkpoints that DeepSpeed writes itself", ""),
    "checkpoint.load_universal": ("universal checkpoints are not supported", "use stratagem's own"),
    "zero_optimization.legacy_stage1": (f"{_GONE} the first form of stage 1", ""),
    "zero_optimization.cpu_offload": ("it has another name now", 'write "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_params": ("it has another name now", 'write "offload_param": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": ("it has another name now", 'write "offload_param": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "it has another name now", 'write "pin_memory" in offload_optimizer or offload_param'),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "it has another name now", "write stage3_gather_16bit_weights_on_model_save"),
    "aio.thread_count": ("it has another name now", "write intra_op_parallelism"),
    "optimizer.params.max_grad_norm": ("DeepSpeed's optimizers do not clip", "write gradient_clipping"),
    "zero_optimization.zero_quantized_gradients": (f"{_GONE} it for training, and would ignore it", ""),
    "data_types.grad_accum_dtype": (
        "the precision determines the dtype of gradients", "set precision of the trainer"),
    "data_types.keep_in_fp32_modules": (
        "DeepSpeed's conversion to 16 bits, which reads it, is not used", "convert these modules yourself"),
    "optimizer.legacy_fusion": ("DeepSpeed no longer reads it", ""),
    "disable_allgather": ("DeepSpeed no longer reads it", ""),
    "dataloader_drop_last": (f"it applies to a loader {_NOT_USED}", "set drop_last of your DataLoader"),
    "data_efficiency": (f"it applies to a loader {_NOT_USED}", "use a sampler of your own"),
    "pipeline": (f"it applies to an engine {_NOT_USED}", ""),
    "hybrid_engine": (f"it applies to an engine {_NOT_USED}", ""),
    "compile": (f"it applies to an engine {_NOT_USED}", "call torch.compile"),
    "weight_quantization": ("it applies to inference only", ""),
    "autotuning": ("it needs DeepSpeed's own launcher", ""),
    "tensor_parallel": ("this strategy has data parallelism only", ""),
    "expert_parallel": ("this strategy has data parallelism only", ""),
    "use_data_before_expert_parallelism": ("this strategy has data parallelism only", ""),
    "sequence_parallel_size": ("this strategy has data parallelism only", ""),
    "data_parallel_size": ("this strategy has data parallelism only", ""),
    "seq_parallel_communication_data_type": ("this strategy has data parallelism only", ""),
}  # fmt: skip
#: Keys whose "auto" is determined by the run or by another key of the configuration.
_RESOLVED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16.enabled", "bf16.enabled", "bfloat16.enabled",
    "scheduler.params.total_num_steps", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
}  # fmt: skip


# --- Reading -----------------------------------------------------------------------------------------------------


def read(source: Mapping[str, Any] | str | os.PathLike[str], origin: str, setting: str) -> dict[str, Any]:
    """Return the user's configuration, checked; "auto" is kept where only a run determines the value.

    Args:
        source: a mapping, or the path of a JSON file.
        origin: how error messages refer to the configuration.
        setting: the option or variable that names it.

    Raises:
        ConfigError: it is neither a mapping nor a file with one, or has a key or value that DeepSpeed would ignore.
    """
    values = source if isinstance(source, Mapping) else _from_file(_path(source, setting), setting)
    config = _checked(values, _TOP, "", origin)
    if "bfloat16" in config:
        if "bf16" in config:
            raise ConfigError(f"bf16 and bfloat16 of {origin} are both set, which are the same key", do="drop bfloat16")
        config["bf16"] = config.pop("bfloat16")
    config.setdefault("zero_optimization", {"stage": 0})
    if all(config.get(section, {}).get("enabled") is True for section in ("fp16", "bf16")):
        raise ConfigError(f"fp16.enabled and bf16.enabled of {origin} are both true", expected="one of the two")
    if config.get("managed_gradient_accumulation"):
        raise ConfigError(
            f"managed_gradient_accumulation of {origin} is true",
            expected="false: the trainer accumulates", do="drop it",
        )  # fmt: skip
    _check_optimizer(config.get("optimizer"), origin)
    _check_scheduler(config.get("scheduler"), origin)
    return config


def _path(source: str | os.PathLike[str], setting: str) -> Path:
    try:
        return as_path(source)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error.found}", expected=error.expected, do=error.do) from None


def _from_file(path: Path, setting: str) -> dict[str, Any]:
    expected = "a JSON file with DeepSpeed's configuration"
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise ConfigError(f"{setting} is {str(path)!r}, which does not exist", expected=expected) from None
    except IsADirectoryError:
        raise ConfigError(f"{setting} is {str(path)!r}, a folder", expected=expected) from None
    except OSError as error:
        raise ConfigError(
            f"{setting} is {str(path)!r}, which cannot be read ({error.strerror})", expected=expected
        ) from error
    except json.JSONDecodeError as error:
        what = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{path} ({setting}) is not JSON ({what})", do="fix that line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} ({setting}) is not text in UTF-8", expected=expected) from error
    except _DuplicateError as error:
        raise ConfigError(f"{path} ({setting}) has {error.args[0]!r} twice", expected="every key once") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} ({setting}) holds {_short(values)}", expected="a mapping")
    return values


class _DuplicateError(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateError(key)
        seen[key] = value
    return seen


def _checked(values: Mapping[str, Any], known: Mapping[str, Any], section: str, origin: str) -> dict[str, Any]:
    """Return a copy of `values`, without the keys for which DeepSpeed's defaults apply."""
    kept = {}
    for key, value in values.items():
        path = f"{section}.{key}" if section else str(key)
        _check_known(str(key), path, known, origin)
        if value is None or (value == AUTO and _is_left_to_deepspeed(section, key)):
            continue
        kept[key] = value if value == AUTO and path in _RESOLVED else _value(value, known[key], path, origin)
    return kept


def _check_known(key: str, path: str, known: Iterable[str], origin: str) -> None:
    if path in _REFUSED:
        why, do = _REFUSED[path]
        raise ConfigError(f"{path} of {origin} is set, and {why}", do=do or "drop it")
    if key not in known:
        raise ConfigError(f"{path} of {origin} is unknown to deepspeed 0.19.8", do=nearest(key, known) or "drop it")


def _is_left_to_deepspeed(section: str, key: str) -> bool:
    """Whether DeepSpeed's default replaces "auto" there; it has none for a device, a path, or what is enabled."""
    tuned = section.startswith("zero_optimization") or section in ("fp16", "bf16", "bfloat16", "data_types")
    return tuned and key not in ("stage", "device", "nvme_path", "enabled")


def _value(value: Any, kind: Any, path: str, origin: str) -> Any:
    """Return `value`, checked, in the type that DeepSpeed expects."""
    if isinstance(kind, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} of {origin} is {_short(value)}", expected="a mapping")
        return _checked(value, kind, path, origin)
    test, expected = _rule_of(kind)
    value = copy.deepcopy(value) if kind == "number" else _normalized(value)
    if not test(value):
        found = '"auto", which nothing here determines' if value == AUTO else _short(value)
        raise ConfigError(f"{path} of {origin} is {found}", expected=expected)
    return value


def _rule_of(kind: str | tuple[Any, ...]) -> tuple[Callable[[Any], bool], str]:
    if isinstance(kind, str):
        return _KINDS[kind]
    return lambda value: type(value) in (int, str) and value in kind, " or ".join(repr(choice) for choice in kind)


def _normalized(value: Any) -> Any:
    """Return a copy of `value`, with 5e8 as an integer and a path as text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else copy.deepcopy(value)


# --- Optimizers and schedulers -----------------------------------------------------------------------------------


def _check_optimizer(section: dict[str, Any] | None, origin: str) -> None:
    if section is None:
        return
    name = _type_of(section, "optimizer", origin)
    if name.lower() in _ONE_BIT:
        raise ConfigError(
            f"optimizer.type of {origin} is {name!r}, which deepspeed has removed by 0.19.8 (0.19.0 still had it)",
            expected="another optimizer, such as AdamW",
            do='for 1-bit gradients set strategy="ddp" with comm_hook="one_bit", without this configuration',
        )
    own = {known.lower(): known for known in _OPTIMIZERS}
    if name.lower() not in own and name not in _torch_optimizers():
        raise ConfigError(
            f"optimizer.type of {origin} is {name!r}",
            expected=f"{', '.join(_OPTIMIZERS)}, or a class of torch.optim",
            do=nearest(name, [*_OPTIMIZERS, *_torch_optimizers()]),
        )
    _check_parameters(section, "optimizer", _OPTIMIZERS.get(own.get(name.lower(), "")), origin)


def _torch_optimizers() -> list[str]:
    import torch

    base = torch.optim.Optimizer
    return [name for name, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, base)]


def _check_scheduler(section: dict[str, Any] | None, origin: str) -> None:
    if section is None:
        return
    name = _type_of(section, "scheduler", origin)
    if name not in _SCHEDULERS:
        raise ConfigError(
            f"scheduler.type of {origin} is {name!r}",
            expected=f"one that works with ZeRO: {', '.join(_SCHEDULERS)}",
            do=nearest(name, _SCHEDULERS) or "return the scheduler from configure_optimizers",
        )
    _check_parameters(section, "scheduler", _SCHEDULERS[name], origin)


def _type_of(section: Mapping[str, Any], path: str, origin: str) -> str:
    if "type" not in section:
        raise ConfigError(f"{path} of {origin} has no type", expected="the name of its class")
    name: str = section["type"]
    if not isinstance(section.get("params", {}), Mapping):
        raise ConfigError(f"{path}.params of {origin} is {_short(section['params'])}", expected="a mapping")
    return name


def _check_parameters(section: Mapping[str, Any], path: str, known: list[str] | None, origin: str) -> None:
    for key, value in section.get("params", {}).items():
        full = f"{path}.params.{key}"
        _check_known(str(key), full, [key] if known is None else known, origin)
        if value == AUTO and full not in _RESOLVED:
            raise ConfigError(f'{full} of {origin} is "auto", which nothing here determines', expected="a number")
        if value not in (None, AUTO) and key in _PARAMETERS:
            _value(value, _PARAMETERS[key], full, origin)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
