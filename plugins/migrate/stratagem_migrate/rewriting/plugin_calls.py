"""Rewrite options of callbacks, loggers and strategies that were renamed or removed."""

from __future__ import annotations

import ast
from typing import Any, Final

from stratagem_migrate import installed
from stratagem_migrate.names import DROP_IN, NAMES, OPTIONS, POSITIONS
from stratagem_migrate.rewriting import call_arguments
from stratagem_migrate.rewriting.edits import Edits
from stratagem_migrate.rewriting.references import Namespace, Target
from stratagem_migrate.source import UNKNOWN, constant

#: Values with which an option that no plugin has does nothing.
_OFF: Final = (None, False, "", 0)
#: Options that only change what is printed.
_SILENT: Final = {
    ("TQDMProgressBar", "process_position"), ("TQDMProgressBar", "leave"), ("RichProgressBar", "theme"),
    ("RichProgressBar", "leave"), ("RichProgressBar", "console_kwargs"), ("BackboneFinetuning", "verbose"),
    ("BackboneFinetuning", "rounding"), ("ProgressBar", "process_position"), ("StochasticWeightAveraging", "device"),
}  # fmt: skip
#: Options that no plugin has, with the values that Lightning's classes give them.
_DEFAULTS: Final[dict[tuple[str, str], Any]] = {
    ("BackboneFinetuning", "should_align"): True, ("BackboneFinetuning", "initial_denom_lr"): 10.0,
    ("LearningRateFinder", "mode"): "exponential", ("LearningRateFinder", "update_attr"): True,
    ("BatchSizeFinder", "batch_arg_name"): "batch_size", ("BatchSizeFinder", "margin"): 0.05,
}  # fmt: skip
#: Options with another name and the same meaning.
_RENAMED: Final = {
    ("ModelCheckpoint", "period"), ("ModelCheckpoint", "every_n_val_epochs"), ("CSVLogger", "flush_logs_every_n_steps"),
}  # fmt: skip
#: Sizes of `ModelParallelStrategy`, and of `ParallelStrategy`.
_SIZES: Final = {"data_parallel_size": "shard", "tensor_parallel_size": "tensor"}
#: Classes that are another one with an option set.
_WITH_OPTION: Final = {
    "DDPSpawnStrategy": ("DDPStrategy", "start_method", '"spawn"'),
    "DDPSpawnPlugin": ("DDPStrategy", "start_method", '"spawn"'),
}


def rewrite_plugin_calls(edits: Edits, names: Namespace) -> None:
    """Rewrite each call of a class that is a plugin here."""
    for node in edits.source.nodes:
        if not isinstance(node, ast.Call) or (name := edits.source.known(node.func)) is None:
            continue
        theirs = name.rpartition(".")[2]
        if theirs in _WITH_OPTION and edits.source.lightning(node.func) is not None:
            _rewrite_preset(edits, names, node, theirs)
        elif theirs == "ModelParallelStrategy":
            _rewrite_sizes(edits, names, node)
        elif theirs in NAMES and NAMES[theirs].plugin is not None and not NAMES[theirs].is_missing:
            _rewrite_options(edits, node, theirs)


def _rewrite_preset(edits: Edits, names: Namespace, node: ast.Call, theirs: str) -> None:
    ours, option, value = _WITH_OPTION[theirs]
    if node.args or any(each.arg in (None, option) for each in node.keywords):
        return
    edits.replaced.add(node.func)
    edits.replace(node.func, names.imported(Target("stratagem.strategies", ours)))
    edits.at(node, lambda call: call_arguments.append(call, option, value))


def _rewrite_sizes(edits: Edits, names: Namespace, node: ast.Call) -> None:
    """Rewrite a ``ModelParallelStrategy`` with both sizes; its "auto" has another meaning."""
    positional = list(_SIZES)[: len(node.args)]
    given = dict(zip(_SIZES, node.args, strict=False)) | {str(each.arg): each.value for each in node.keywords}
    known = installed.plugin_options("strategy", "parallel") or frozenset()
    if _SIZES.keys() - given.keys() or given.keys() - _SIZES.keys() - known:
        return
    if any(isinstance(each, ast.Starred) or constant(each) == "auto" for each in given.values()):
        return

    def change(call: Any) -> Any:
        call = call_arguments.name_positional(call, positional)
        for old, new in _SIZES.items():
            call = call_arguments.rename(call, old, new)
        return call

    edits.replaced.add(node.func)
    edits.replace(node.func, names.imported(Target("stratagem.strategies", "ParallelStrategy")))
    edits.at(node, change)


def _rewrite_options(edits: Edits, node: ast.Call, theirs: str) -> None:
    plugin = NAMES[theirs].plugin
    assert plugin is not None
    known = installed.plugin_options(*plugin)
    if known is None or theirs not in DROP_IN:
        return
    positional = installed.num_positional(*plugin)
    order = POSITIONS.get(theirs, ())
    if len(node.args) > positional:
        if len(order) < len(node.args) or any(isinstance(each, ast.Starred) for each in node.args):
            return
        names = order[: len(node.args)]
        edits.at(node, lambda call: call_arguments.name_positional(call, names))
        for name, value in zip(names, node.args, strict=False):
            _rewrite_option(edits, node, theirs, name, value, known)
    for keyword in node.keywords:
        if keyword.arg is not None:
            _rewrite_option(edits, node, theirs, keyword.arg, keyword.value, known)


def _rewrite_option(
    edits: Edits, node: ast.Call, theirs: str, name: str, value: ast.expr, known: frozenset[str]
) -> None:
    if name in known:
        return
    new = option_instead(theirs, name, constant(value), known)
    if new is None or any(each.arg == new for each in node.keywords):
        return

    def change(call: Any) -> Any:
        return call_arguments.rename(call, name, new) if new else call_arguments.remove(call, name)

    edits.at(node, change)


def option_instead(theirs: str, name: str, literal: Any, known: frozenset[str]) -> str | None:
    """Return the new name of an option, an empty string if it does nothing, and None if that cannot be told."""
    advice = OPTIONS.get(theirs, {}).get(name, "")
    if (theirs, name) in _RENAMED and advice[:-1] in known:
        return advice[:-1]
    if (theirs, name) in _SILENT or literal is None or (advice == "leave it out" and literal is not UNKNOWN):
        return ""
    if name == "refresh_rate" and isinstance(literal, int) and literal != 0:
        return ""
    if _DEFAULTS.get((theirs, name), UNKNOWN) == literal is not UNKNOWN:
        return ""
    is_off = literal is not UNKNOWN and any(literal is each or literal == each for each in _OFF)
    return "" if is_off and name in _DEFAULTS_OFF.get(theirs, ()) else None


#: Options that Lightning's classes do not use while they have one of the values `_OFF`.
_DEFAULTS_OFF: Final[dict[str, frozenset[str]]] = {
    "ModelCheckpoint": frozenset({
        "every_n_val_epochs", "prefix", "filepath", "period",
    }),
    "EarlyStopping": frozenset({"log_rank_zero_only"}),
    "CSVLogger": frozenset({"prefix"}),
    "TensorBoardLogger": frozenset({"prefix", "sub_dir"}),
    "WandbLogger": frozenset({"prefix", "anonymous", "offline", "experiment", "log_model", "checkpoint_name"}),
    "MLFlowLogger": frozenset({"prefix", "tags", "artifact_location", "run_id", "log_model"}),
}  # fmt: skip
