"""Find arguments of the Trainer that were renamed, moved or removed, or whose values have another meaning."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any, Final

from attrs import frozen

from stratagem.errors import nearest
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.source import UNKNOWN, Source, constant, short

_LEAVE_OUT: Final = "leave it out"
WITHOUT_LOGGER: Final = "Trainer() without logger="


@frozen
class Value:
    """The value of an argument: its source text, and its value if the script has a constant."""

    text: str
    literal: Any

    @property
    def is_off(self) -> bool:
        """Whether the value switches the feature off."""
        return self.literal in (None, False, 0, -1, "", "0") and self.literal is not UNKNOWN


def trainer_calls(source: Source) -> Iterator[Finding]:
    """Yield a finding for each argument of each Trainer."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and (source.known(node.func) or "").rpartition(".")[2] == "Trainer":
            if node.args:
                yield source.finding(node.args[0], CHANGE, f"Trainer({short(node.args[0])}, ...)",
                                     "Trainer(name=value, ...)", "arguments are keywords")  # fmt: skip
            names: set[str] = set()
            for name, value in _keywords(source, node):
                names.add(name)
                yield from _argument(source, name, value)
            if source.lightning(node.func) is not None:
                yield from _changed_defaults(source, node, names)


def _keywords(source: Source, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield names and values, including those of a constant dict; for another dict, ``**``."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
            continue
        value: ast.AST = keyword.value
        if isinstance(value, ast.Name):
            value = source.constants.get(value.id, value)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
            yield from ((each.arg or "**", each.value) for each in value.keywords)
        elif isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
            yield from ((str(key.value), each) for key, each in zip(value.keys, value.values, strict=True))  # type: ignore[union-attr]
        else:
            yield "**", keyword.value


def _argument(source: Source, name: str, node: ast.expr) -> Iterator[Finding]:
    if name == "**":
        yield source.finding(node, CHECK, f"Trainer(**{short(node)})", "", "its content is known only at run time")
        return
    value = Value(short(node), source.literal(node))
    old = f"{name}={value.text}"
    if name in installed.trainer_arguments():
        found = list(_VALUES[name](value)) if name in _VALUES else []
        if not found and value.literal is not UNKNOWN and (refused := installed.refusal(name, value.literal)):
            found = [(CHANGE, "another value", refused)]
        for certainty, new, note in found or [(SAME, "", "")]:
            yield source.finding(node, certainty, old, new, note)
        return
    moved = MOVED.get(name)
    if moved is not None:
        yield source.finding(node, CHANGE, old, moved(value) if callable(moved) else moved)
    else:
        hint = nearest(name, installed.trainer_arguments())
        yield source.finding(node, CHANGE, old, "", f"the Trainer has no such argument; {hint}".removesuffix("; "))


def _changed_defaults(source: Source, node: ast.Call, given: set[str]) -> Iterator[Finding]:
    if accumulates(node):
        yield source.finding(
            node, CHECK, "Trainer(accumulate_grad_batches=...)", "Trainer(average_short_window=False)",
            "an epoch that ends with fewer batches averages their gradients; Lightning divides by the whole number",
        )  # fmt: skip
    if not given & {"logger", "**", "barebones", "fast_dev_run"}:
        yield source.finding(
            node, CHECK, WITHOUT_LOGGER, 'logger="tensorboard" for event files',
            "the default writes stratagem_logs/version_0/metrics.csv",
        )  # fmt: skip


def accumulates(node: ast.Call) -> bool:
    """Whether a Trainer accumulates gradients, and does not say what happens at the end of an epoch."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    number = given.get("accumulate_grad_batches")
    return number is not None and constant(number) not in (1, None) and "average_short_window" not in given


# --- Arguments that were renamed or removed ----------------------------------------------------------------------


def _gpus(value: Value) -> str:
    given = value.literal
    if value.is_off and given != -1 and given != "0":
        return 'accelerator="cpu"'
    if isinstance(given, str) and re.fullmatch(r"\d+", given):
        return (
            f'accelerator="gpu", devices={given}; if gpus="{given}" meant the device with that index, '
            f"as in early versions, devices=[{given}]"
        )
    return f'accelerator="gpu", devices={value.text}'


def _num_processes(value: Value) -> str:
    return _LEAVE_OUT if value.literal == 1 else f'accelerator="cpu", devices={value.text}'


def _tpu_cores(value: Value) -> str:
    return _LEAVE_OUT if value.is_off else f'accelerator="tpu", devices={value.text} (of stratagem-xla)'


def _unless_off(new: str) -> Callable[[Value], str]:
    return lambda value: _LEAVE_OUT if value.is_off else new


def _checkpoint_callback(value: Value) -> str:
    return f"enable_checkpointing={value.text}" if isinstance(value.literal, bool) else f"callbacks=[{value.text}]"


def _early_stop(value: Value) -> str:
    if value.is_off:
        return _LEAVE_OUT
    return 'callbacks={"name": "early_stopping", "monitor": "val_loss"}' if value.literal is True else (
        f"callbacks=[{value.text}]")  # fmt: skip


def _weights_summary(value: Value) -> str:
    if value.is_off:
        return "enable_model_summary=False"
    if value.literal == "full":
        return 'callbacks={"name": "model_summary", "max_depth": -1}'
    return "enable_model_summary=True"


def _refresh_rate(value: Value) -> str:
    return "enable_progress_bar=False" if value.literal == 0 else f"{_LEAVE_OUT}, the bar is updated by time"


def _old_accelerator(value: Value) -> str:
    return OLD_STRATEGIES.get(str(value.literal).lower(), f"strategy={value.text}")


MOVED: Final[dict[str, str | Callable[[Value], str]]] = {
    "gpus": _gpus,
    "num_processes": _num_processes,
    "tpu_cores": _tpu_cores,
    "ipus": _unless_off('accelerator="auto": IPUs are not supported'),
    "hpus": _unless_off('accelerator="auto": HPUs are not supported'),
    "auto_select_gpus": _unless_off("devices=stratagem.find_usable_cuda_devices(n)"),
    "distributed_backend": _old_accelerator,
    "replace_sampler_ddp": lambda value: f"use_distributed_sampler={value.text}",
    "resume_from_checkpoint": lambda v: _LEAVE_OUT if v.is_off else f"trainer.fit(..., ckpt_path={v.text})",
    "checkpoint_callback": _checkpoint_callback,
    "early_stop_callback": _early_stop,
    "weights_summary": _weights_summary,
    "weights_save_path": lambda v: f"stratagem.callbacks.ModelCheckpoint(dirpath={v.text})",
    "progress_bar_refresh_rate": _refresh_rate,
    "process_position": _LEAVE_OUT,
    "amp_backend": lambda v: (
        f"{_LEAVE_OUT}, mixed precision is torch's" if v.literal != "apex" else 'precision="16-mixed"'
    ),
    "amp_level": f"{_LEAVE_OUT}, mixed precision is torch's",
    "auto_lr_find": _unless_off('callbacks=["learning_rate_finder"]'),
    "auto_scale_batch_size": _unless_off('callbacks=["batch_size_finder"]'),
    "track_grad_norm": _unless_off('callbacks=["gradient_norms"]'),
    "terminate_on_nan": _unless_off(
        'detect_anomaly=True, or callbacks={"name": "early_stopping", "monitor": ...}, which stops at a NaN'
    ),
    "truncated_bptt_steps": _unless_off(
        "automatic_optimization = False: split the sequence in training_step, and step after each part"
    ),
    "flush_logs_every_n_steps": lambda v: f"stratagem.loggers.CSVLogger(flush_every_n_steps={v.text})",
    "log_gpu_memory": _unless_off('callbacks=["device_stats"]'),
    "stochastic_weight_avg": _unless_off('callbacks=["stochastic_weight_averaging"]'),
    "benchmark": lambda v: f"torch.backends.cudnn.benchmark = {v.text}",
    "automatic_optimization": lambda v: f"automatic_optimization = {v.text} in the module",
    "enable_pl_optimizer": _LEAVE_OUT,
    "move_metrics_to_cpu": _LEAVE_OUT,
    "prepare_data_per_node": f"{_LEAVE_OUT}, prepare_data is called once on each node",
    "reload_dataloaders_every_epoch": _unless_off("reload_dataloaders_every_n_epochs=1"),
    "multiple_trainloader_mode": "fit(model, CombinedLoader(loaders, mode))",
    "enable_autolog_hparams": f"{_LEAVE_OUT}, save_hyperparameters decides what is logged",
    "model_registry": "fit(ckpt_path=path of a checkpoint)",
}

# --- Values with another meaning ---------------------------------------------------------------------------------

_Rows = Iterator[tuple[str, str, str]]

_NOT_AVAILABLE: Final = "not installed, and not in the catalog: `stratagem plugins list`"

#: Strategies (and, in 1.x, accelerators) by names that they no longer have.
OLD_STRATEGIES: Final[dict[str, str]] = tomllib.loads(
    files(__package__).joinpath("moved.toml").read_text(encoding="utf-8")
)["strategies"]


def _accelerator(value: Value) -> _Rows:
    name = str(value.literal).lower()
    if not isinstance(value.literal, str) or name == "auto" or installed.has_plugin("accelerator", name):
        return
    if name in OLD_STRATEGIES:
        yield CHANGE, OLD_STRATEGIES[name], ""
    else:
        yield CHANGE, 'accelerator="auto"', _NOT_AVAILABLE


def _strategy(value: Value) -> _Rows:
    name = str(value.literal).lower()
    if not isinstance(value.literal, str) or name == "auto":
        return
    if not installed.has_plugin("strategy", name):
        yield CHANGE, OLD_STRATEGIES.get(name, ""), "" if name in OLD_STRATEGIES else _NOT_AVAILABLE
    elif name.startswith("fsdp"):
        yield (
            CHECK,
            "",
            "FSDP2, also on CPUs; set auto_wrap_policy, or the model is one unit (docs/sharded-training.md)",
        )


def _precision(value: Value) -> _Rows:
    name = str(value.literal).lower()
    if value.literal is UNKNOWN or value.literal is None:
        return
    if not installed.has_plugin("precision", name):
        yield CHANGE, '"16-mixed"' if "mixed" in name else "", _NOT_AVAILABLE
    elif name in ("16", "16-mixed"):
        yield CHECK, "", "CPUs use fp16 with loss scaling, too, not bf16"


def _devices(value: Value) -> _Rows:
    if value.literal in (0, "0", []) and value.literal is not False:
        yield CHANGE, 'accelerator="cpu"', ""
    elif isinstance(value.literal, str) and value.literal.isdigit():
        yield CHECK, "", f"{value.literal} devices, not the device with that index, as gpus= meant in early versions"


def _plugins(value: Value) -> _Rows:
    given = value.literal if isinstance(value.literal, list | tuple) else [value.literal]
    for name in given:
        if isinstance(name, str) and installed.has_plugin("strategy", name):
            yield CHANGE, f'strategy="{name}"', ""
        elif isinstance(name, str):
            new = {"native_amp": 'precision="16-mixed"', "apex_amp": 'precision="16-mixed"'}.get(name.lower())
            new = new or OLD_STRATEGIES.get(name.lower(), "")
            yield CHANGE, new, "" if new else _NOT_AVAILABLE
        elif name is UNKNOWN:
            yield CHECK, "", "each kind has its own argument: strategy=, precision=, environment=, checkpoint="
    if value.literal is None:
        yield CHANGE, _LEAVE_OUT, ""


def _profiler(value: Value) -> _Rows:
    if value.literal is True:
        yield CHANGE, 'profiler="simple"', ""
    elif isinstance(value.literal, str) and value.literal not in ("simple", "advanced", "pytorch"):
        yield CHANGE, 'profiler="simple", "advanced" or "pytorch"', ""


def _max_time(value: Value) -> _Rows:
    if isinstance(value.literal, dict):
        yield CHANGE, f"datetime.timedelta({', '.join(f'{k}={v}' for k, v in value.literal.items())})", ""


def _clip(value: Value) -> _Rows:
    if value.literal == 0:
        yield CHANGE, _LEAVE_OUT, "0 is not a valid limit"


def _interval(value: Value) -> _Rows:
    if value.literal is None:
        yield CHANGE, _LEAVE_OUT, ""


_VALUES: Final[dict[str, Callable[[Value], _Rows]]] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "precision": _precision,
    "devices": _devices,
    "plugins": _plugins,
    "profiler": _profiler,
    "max_time": _max_time,
    "gradient_clip_val": _clip,
    "val_check_interval": _interval,
}
