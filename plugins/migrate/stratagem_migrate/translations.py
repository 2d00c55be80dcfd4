"""What takes the place of an argument of the Trainer with a constant value, as arguments; for scripts and for YAML."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import frozen

from stratagem_migrate import installed
from stratagem_migrate.names import TABLES
from stratagem_migrate.source import UNKNOWN, constant, short

LEAVE_OUT: Final = "leave it out"
#: Strategies (and, in 1.x, accelerators) by names that they no longer have.
OLD_STRATEGIES: Final[dict[str, str]] = TABLES["strategies"]

#: New arguments: their names and texts; None stands for the value as it is. The name `CALLBACKS` adds a callback.
New = list[tuple[str, str | None]]
CALLBACKS: Final = "+callbacks"


@frozen(eq=False)
class Given:
    """An argument of a Trainer."""

    name: str
    #: Its value; `UNKNOWN` if the source does not show it.
    literal: Any
    #: The expression; None in YAML.
    node: ast.expr | None
    #: All arguments of the call.
    others: Mapping[str, Any]

    @property
    def text(self) -> str:
        return short(self.node) if self.node is not None else repr(self.literal)

    @property
    def is_off(self) -> bool:
        return self.literal is not UNKNOWN and self.literal in (None, False, 0, "", [])


def translated(given: Given) -> New | None:
    """Return the arguments in place of `given`; None if it stays, or if that cannot be told."""
    if given.name in RENAMED:
        return [(RENAMED[given.name], None)]
    answer = _TRANSLATIONS.get(given.name)
    if answer is None or (given.literal is UNKNOWN and given.name != "gpus"):
        return None
    return answer(given)


def as_in_lightning(given: Given) -> New | None:
    """Return what `translated` does, and for a Trainer of Lightning what keeps its numbers."""
    is_short = given.name == "accumulate_grad_batches" and "average_short_window" not in given.others
    if is_short and given.literal not in (1, None):
        return [(given.name, None), ("average_short_window", "False")]
    return translated(given)


def as_text(new: New, given: Given) -> str:
    """Return the arguments `new` as a call would have them."""
    texts = [(name, given.text if text is None else text) for name, text in new]
    written = [
        f"{name}={text}" if name != CALLBACKS else f"callbacks={text if text.startswith('{') else f'[{text}]'}"
        for name, text in texts
    ]
    return ", ".join(written) or LEAVE_OUT


def arguments_in(text: str) -> New:
    """Return the keyword arguments that a text of the tables consists of; none if it is more than that."""
    if "..." in text:  # for the user to fill in
        return []
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError:
        return []
    if (
        not isinstance(call, ast.Call)
        or call.args
        or not all(each.arg is not None and constant(each.value) is not UNKNOWN for each in call.keywords)
    ):
        return []
    return [(str(each.arg), _text(constant(each.value))) for each in call.keywords]


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value and "\\" not in value else repr(value)


# --- Devices -----------------------------------------------------------------------------------------------------


def _gpus(given: Given) -> New | None:
    literal = given.literal
    if literal is UNKNOWN:
        return _gpus_if_available(given)
    if isinstance(literal, str) and literal.isdigit():  # a number, or in early versions an index
        return None
    if given.is_off:
        return None if "devices" in given.others else [("accelerator", '"cpu"')]
    return [("accelerator", '"gpu"'), ("devices", None)]


def _gpus_if_available(given: Given) -> New | None:
    """Translate ``gpus=1 if torch.cuda.is_available() else 0``."""
    node = given.node
    if not isinstance(node, ast.IfExp):
        return None
    some, none = constant(node.body), constant(node.orelse)
    if not isinstance(some, int) or isinstance(some, bool) or some == 0 or none not in (0, None):
        return None
    test = ast.unparse(node.test)
    devices = str(some) if some == 1 else f"{some} if {test} else 1"
    return [("accelerator", f'"gpu" if {test} else "cpu"'), ("devices", devices)]


def _num_processes(given: Given) -> New | None:
    if given.literal == 1:
        return []
    uses_gpus = any(given.others.get(name) is not None for name in ("gpus", "devices", "tpu_cores"))
    return None if uses_gpus else [("accelerator", '"cpu"'), ("devices", None)]


def _tpu_cores(given: Given) -> New | None:
    return [] if given.is_off else [("accelerator", '"tpu"'), ("devices", None)]


def _devices(given: Given) -> New | None:
    is_off = given.literal in (0, "0", []) and given.literal is not False
    return [("accelerator", '"cpu"')] if is_off else None


# --- Strategies --------------------------------------------------------------------------------------------------


def _old_strategy(given: Given) -> New | None:
    name = str(given.literal).lower()
    kind = given.name if given.name in ("accelerator", "strategy") else "strategy"
    if not isinstance(given.literal, str):
        return [] if given.literal is None and given.name == "distributed_backend" else None
    if name == "auto" or (given.name != "distributed_backend" and installed.has_plugin(kind, name)):
        return None
    return arguments_in(OLD_STRATEGIES.get(name, "")) or None


def _plugins(given: Given) -> New | None:
    if given.literal is None or given.literal == []:
        return []
    new: New = []
    for name in given.literal if isinstance(given.literal, list | tuple) else [given.literal]:
        if not isinstance(name, str):
            return None
        if name.lower() in ("native_amp", "apex_amp"):
            found: New = [] if str(given.others.get("precision")) != "None" else [("precision", '"16-mixed"')]
        elif installed.has_plugin("strategy", name):
            found = [("strategy", _text(name))]
        else:
            found = arguments_in(OLD_STRATEGIES.get(name.lower(), ""))
            if not found:
                return None
        new += found
    return new


# --- The rest ----------------------------------------------------------------------------------------------------


def _dropped(*values: Any) -> Callable[[Given], New | None]:
    """Return a function that drops the argument if its value is one of `values`; else it is left."""
    return lambda given: [] if any(given.literal is each or given.literal == each for each in values) else None


def _callback(new: str) -> Callable[[Given], New | None]:
    return lambda given: [] if given.is_off or given.literal == -1 else [(CALLBACKS, new)]


def _checkpoint_callback(given: Given) -> New | None:
    return [("enable_checkpointing", None)] if isinstance(given.literal, bool) else None


def _early_stop(given: Given) -> New | None:
    if given.is_off:
        return []
    return [(CALLBACKS, '{"name": "early_stopping", "monitor": "val_loss"}')] if given.literal is True else None


def _weights_summary(given: Given) -> New | None:
    if given.literal == "full":
        return [(CALLBACKS, '{"name": "model_summary", "max_depth": -1}')]
    if given.literal is None or given.literal == "top":
        return [("enable_model_summary", str(given.literal == "top"))]
    return None


def _refresh_rate(given: Given) -> New | None:
    if given.literal == 0 and given.literal is not False:
        return [("enable_progress_bar", "False")]
    return [] if isinstance(given.literal, int) or given.literal is None else None


def _gradient_norms(given: Given) -> New | None:
    if given.literal in (None, -1, False):
        return []
    return [(CALLBACKS, '"gradient_norms"')] if given.literal in (2, 2.0, "2") else None


def _max_time(given: Given) -> New | None:
    if not isinstance(given.literal, dict):
        return None
    return [("max_time", f"timedelta({', '.join(f'{name}={value!r}' for name, value in given.literal.items())})")]


RENAMED: Final = {
    "replace_sampler_ddp": "use_distributed_sampler",
    "max_nb_epochs": "max_epochs",
    "min_nb_epochs": "min_epochs",
    "nb_gpu_nodes": "num_nodes",
    "gradient_clip": "gradient_clip_val",
    "row_log_interval": "log_every_n_steps",
    "train_percent_check": "limit_train_batches",
    "val_percent_check": "limit_val_batches",
    "test_percent_check": "limit_test_batches",
    "overfit_pct": "overfit_batches",
    "nb_sanity_val_steps": "num_sanity_val_steps",
}
#: Arguments that do nothing when they are off, and that only their author can replace when they are on.
_OFF: Final = (
    "ipus", "hpus", "auto_select_gpus", "resume_from_checkpoint", "process_position", "auto_lr_find",
    "auto_scale_batch_size", "terminate_on_nan", "truncated_bptt_steps", "stochastic_weight_avg", "benchmark",
    "move_metrics_to_cpu", "reload_dataloaders_every_epoch", "reload_dataloaders_every_n_epochs",
)  # fmt: skip
_TRANSLATIONS: Final[dict[str, Callable[[Given], New | None]]] = {
    **dict.fromkeys(_OFF, _dropped(None, False, 0)),
    "gpus": _gpus,
    "num_processes": _num_processes,
    "tpu_cores": _tpu_cores,
    "devices": _devices,
    "accelerator": _old_strategy,
    "distributed_backend": _old_strategy,
    "strategy": _old_strategy,
    "plugins": _plugins,
    "checkpoint_callback": _checkpoint_callback,
    "early_stop_callback": _early_stop,
    "weights_summary": _weights_summary,
    "weights_save_path": _dropped(None),
    "progress_bar_refresh_rate": _refresh_rate,
    "amp_backend": _dropped("native", None),
    "amp_level": _dropped(None),
    "track_grad_norm": _gradient_norms,
    "flush_logs_every_n_steps": _dropped(None),
    "log_gpu_memory": _callback('"device_stats"'),
    "automatic_optimization": _dropped(True, None),
    "enable_pl_optimizer": _dropped(True, False, None),
    "prepare_data_per_node": _dropped(True, None),
    "multiple_trainloader_mode": _dropped("max_size_cycle", None),
    "enable_autolog_hparams": _dropped(True, None),
    "model_registry": _dropped(None),
    "profiler": lambda given: [("profiler", '"simple"')] if given.literal is True else None,
    "max_time": _max_time,
    "gradient_clip_val": lambda given: [] if given.literal == 0 and given.literal is not False else None,
    "val_check_interval": _dropped(None),
}
