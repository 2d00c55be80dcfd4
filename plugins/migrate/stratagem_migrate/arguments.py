"""Find arguments of the Trainer that were renamed, moved or removed, or whose values have another meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Final

from stratagem.errors import nearest
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.source import UNKNOWN, Source, constant, short
from stratagem_migrate.translations import LEAVE_OUT, OLD_STRATEGIES, Given, as_text, translated

WITHOUT_LOGGER: Final = "Trainer() without logger="


def trainer_calls(source: Source) -> Iterator[Finding]:
    """Yield a finding for each argument of each Trainer."""
    for node in source.calls_of("Trainer"):
        if node.args:
            yield source.finding(node.args[0], CHANGE, f"Trainer({short(node.args[0])}, ...)",
                                 "Trainer(name=value, ...)", "arguments are keywords")  # fmt: skip
        given = list(_keywords(source, node))
        for name, value in given:
            yield from _argument(source, name, value)
        if source.lightning(node.func) is not None:
            yield from _changed_defaults(source, node, {name for name, _ in given})


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
    given = Given(name, source.literal(node), node, {})
    old = f"{name}={given.text}"
    if name in installed.trainer_arguments():
        found = list(_VALUES[name](given)) if name in _VALUES else []
        instead = None if found else translated(given)
        if instead or (instead is not None and name in _LEFT_OUT):
            found = [(CHANGE, as_text(instead, given), _LEFT_OUT.get(name, ""))]
        elif not found and given.literal is not UNKNOWN and (refused := installed.refusal(name, given.literal)):
            found = [(CHANGE, "another value", refused)]
        for certainty, new, note in found or [(SAME, "", "")]:
            yield source.finding(node, certainty, old, new, note)
    elif name in MOVED:
        yield source.finding(node, CHANGE, old, _instead(given))
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


def _instead(given: Given) -> str:
    """Return what takes the place of an argument: what ``--write`` writes, as far as that is certain."""
    new, advice = translated(given), MOVED[given.name]
    if new is None or (not new and advice.startswith(LEAVE_OUT)):
        return _by_value(given) or advice.replace("VALUE", given.text)
    return as_text(new, given) + (" (of stratagem-xla)" if ("accelerator", '"tpu"') in new else "")


def _by_value(given: Given) -> str:
    """Return the advice that only some values of an argument need; an empty string for others."""
    literal = given.literal
    if given.name == "gpus" and isinstance(literal, str) and re.fullmatch(r"\d+", literal):
        return (
            f'accelerator="gpu", devices={literal}; if gpus="{literal}" meant the device with that index, '
            f"as in early versions, devices=[{literal}]"
        )
    if given.name == "distributed_backend":
        return OLD_STRATEGIES.get(str(literal).lower(), "")
    return 'precision="16-mixed"' if given.name == "amp_backend" and literal == "apex" else ""


#: What to write instead; VALUE stands for the value. What depends on the value is in `translations`.
MOVED: Final = {
    "gpus": 'accelerator="gpu", devices=VALUE',
    "num_processes": 'accelerator="cpu", devices=VALUE',
    "tpu_cores": 'accelerator="tpu", devices=VALUE (of stratagem-xla)',
    "ipus": 'accelerator="auto": IPUs are not supported',
    "hpus": 'accelerator="auto": HPUs are not supported',
    "auto_select_gpus": "devices=stratagem.find_usable_cuda_devices(n)",
    "distributed_backend": "strategy=VALUE",
    "replace_sampler_ddp": "use_distributed_sampler=VALUE",
    "resume_from_checkpoint": "trainer.fit(..., ckpt_path=VALUE)",
    "checkpoint_callback": "callbacks=[VALUE]",
    "early_stop_callback": "callbacks=[VALUE]",
    "weights_summary": "enable_model_summary=True",
    "weights_save_path": "stratagem.callbacks.ModelCheckpoint(dirpath=VALUE)",
    "progress_bar_refresh_rate": f"{LEAVE_OUT}, the bar is updated by time",
    "process_position": LEAVE_OUT,
    "amp_backend": f"{LEAVE_OUT}, mixed precision is torch's",
    "amp_level": f"{LEAVE_OUT}, mixed precision is torch's",
    "auto_lr_find": 'callbacks=["learning_rate_finder"]',
    "auto_scale_batch_size": 'callbacks=["batch_size_finder"]',
    "track_grad_norm": 'callbacks=["gradient_norms"]',
    "terminate_on_nan": (
        'detect_anomaly=True, or callbacks={"name": "early_stopping", "monitor": ...}, which stops at a NaN'
    ),
    "truncated_bptt_steps": (
        "automatic_optimization = False: split the sequence in training_step, and step after each part"
    ),
    "flush_logs_every_n_steps": "stratagem.loggers.CSVLogger(flush_every_n_steps=VALUE)",
    "log_gpu_memory": 'callbacks=["device_stats"]',
    "stochastic_weight_avg": 'callbacks=["stochastic_weight_averaging"]',
    "benchmark": "torch.backends.cudnn.benchmark = VALUE",
    "automatic_optimization": "automatic_optimization = VALUE in the module",
    "enable_pl_optimizer": LEAVE_OUT,
    "move_metrics_to_cpu": LEAVE_OUT,
    "prepare_data_per_node": f"{LEAVE_OUT}, prepare_data is called once on each node",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "multiple_trainloader_mode": "fit(model, CombinedLoader(loaders, mode))",
    "enable_autolog_hparams": f"{LEAVE_OUT}, save_hyperparameters decides what is logged",
    "model_registry": "fit(ckpt_path=path of a checkpoint)",
}

# --- Values with another meaning ---------------------------------------------------------------------------------

_Rows = Iterator[tuple[str, str, str]]

_NOT_AVAILABLE: Final = "not installed, and not in the catalog: `stratagem plugins list`"


def _accelerator(given: Given) -> _Rows:
    name = str(given.literal).lower()
    if not isinstance(given.literal, str) or name == "auto" or installed.has_plugin("accelerator", name):
        return
    if name in OLD_STRATEGIES:
        yield CHANGE, OLD_STRATEGIES[name], ""
    else:
        yield CHANGE, 'accelerator="auto"', _NOT_AVAILABLE


def _strategy(given: Given) -> _Rows:
    name = str(given.literal).lower()
    if not isinstance(given.literal, str) or name == "auto":
        return
    if not installed.has_plugin("strategy", name):
        yield CHANGE, OLD_STRATEGIES.get(name, ""), "" if name in OLD_STRATEGIES else _NOT_AVAILABLE
    elif name.startswith("fsdp"):
        yield (
            CHECK,
            "",
            "FSDP2, also on CPUs; set auto_wrap_policy, or the model is one unit (docs/sharded-training.md)",
        )


def _precision(given: Given) -> _Rows:
    name = str(given.literal).lower()
    if given.literal is UNKNOWN or given.literal is None:
        return
    if not installed.has_plugin("precision", name):
        yield CHANGE, '"16-mixed"' if "mixed" in name else "", _NOT_AVAILABLE
    elif name in ("16", "16-mixed"):
        yield CHECK, "", "CPUs use fp16 with loss scaling, too, not bf16"


def _devices(given: Given) -> _Rows:
    if isinstance(given.literal, str) and given.literal.isdigit() and given.literal != "0":
        yield CHECK, "", f"{given.literal} devices, not the device with that index, as gpus= meant in early versions"


def _plugins(given: Given) -> _Rows:
    for name in given.literal if isinstance(given.literal, list | tuple) else [given.literal]:
        if isinstance(name, str) and installed.has_plugin("strategy", name):
            yield CHANGE, f'strategy="{name}"', ""
        elif isinstance(name, str):
            new = {"native_amp": 'precision="16-mixed"', "apex_amp": 'precision="16-mixed"'}.get(name.lower())
            new = new or OLD_STRATEGIES.get(name.lower(), "")
            yield CHANGE, new, "" if new else _NOT_AVAILABLE
        elif name is UNKNOWN:
            yield CHECK, "", "each kind has its own argument: strategy=, precision=, environment=, checkpoint="
        elif name is None:
            yield CHANGE, LEAVE_OUT, ""


def _profiler(given: Given) -> _Rows:
    if isinstance(given.literal, str) and given.literal not in ("simple", "advanced", "pytorch"):
        yield CHANGE, 'profiler="simple", "advanced" or "pytorch"', ""


def _max_time(given: Given) -> _Rows:
    if isinstance(given.literal, dict):
        yield CHANGE, f"datetime.timedelta({', '.join(f'{k}={v}' for k, v in given.literal.items())})", ""


#: Arguments with a value that is left out, and why.
_LEFT_OUT: Final = {"gradient_clip_val": "0 is not a valid limit", "val_check_interval": ""}
_VALUES: Final[dict[str, Callable[[Given], _Rows]]] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "precision": _precision,
    "devices": _devices,
    "plugins": _plugins,
    "profiler": _profiler,
    "max_time": _max_time,
}
