"""Check attributes and methods that modules and data modules use on ``self``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stratagem.discovery.catalog import moved_names
from stratagem.errors import nearest
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.source import Source, methods, short

#: Attributes of LightningModule that Module does not have, and their replacements.
SELF: Final[dict[str, tuple[str, str]]] = {
    "on_gpu": ('self.device.type == "cuda"', ""),
    "on_tpu": ('self.device.type == "xla"', "the trainer divides the loader: no sampler is needed"),
    **{name: (instead.replace("module", "self"), "") for name, instead in moved_names("exports").items()},
    "hparams_initial": ("self.hparams", ""),
    "fabric": ("self.trainer.run", ""),
    "use_ddp": ("self.trainer.world_size > 1", ""),
    "use_amp": ("self.trainer.precision", ""),
    "datamodule": ("self.trainer.datamodule", ""),
    "write_prediction": ('callbacks=["prediction_writer"]', ""),
    "write_prediction_dict": ('callbacks=["prediction_writer"]', ""),
    "summarize": ('callbacks=["model_summary"]', ""),
    "log_grad_norm": ('callbacks=["gradient_norms"]', ""),
    "get_progress_bar_dict": ("self.trainer.progress_bar_metrics", ""),
}
#: Attributes of LightningDataModule that DataModule does not have.
_DATA: Final[dict[str, tuple[str, str]]] = {"load_from_checkpoint": ("its __init__", "")}
#: Positional options of Lightning's `log`, in order.
LOG_ORDER: Final = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def on_self(source: Source) -> Iterator[Finding]:
    """Find attributes and methods on ``self`` that were renamed or removed."""
    for cls in source.of_role("module"):
        own = {method.name for method in methods(cls)} | stored(cls)
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute) and is_self(node.value):
                yield from _own_attribute(source, node, own)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_self(node.func.value):
                yield from _own_call(source, node, node.func.attr)
    for cls in source.of_role("data"):
        own = {method.name for method in methods(cls)} | stored(cls)
        for node in ast.walk(cls):
            known = own | installed.data_attributes()
            if isinstance(node, ast.Attribute) and is_self(node.value) and node.attr in _DATA.keys() - known:
                yield source.finding(node, CHANGE, f"self.{node.attr}", *_DATA[node.attr])


def _own_attribute(source: Source, node: ast.Attribute, own: set[str]) -> Iterator[Finding]:
    name, stored = node.attr, isinstance(node.ctx, ast.Store)
    if name == "hparams":
        yield from _hparams(source, node)
    elif stored and name == "truncated_bptt_steps":
        yield source.finding(node, CHECK, f"self.{name} = ...", "", "stratagem does not read it")
    elif not stored and name in SELF and name not in own and name not in installed.module_attributes():
        yield source.finding(node, CHANGE, f"self.{name}", *SELF[name])


def _hparams(source: Source, node: ast.Attribute) -> Iterator[Finding]:
    parent = source.parents.get(node)
    if isinstance(node.ctx, ast.Store):
        yield source.finding(node, CHANGE, "self.hparams = ...", "self.save_hyperparameters()", "hparams cannot be set")
    elif isinstance(parent, ast.Attribute) and not hasattr(dict, parent.attr):
        yield source.finding(node, SAME, f"self.hparams.{parent.attr}", "")


def _own_call(source: Source, node: ast.Call, method: str) -> Iterator[Finding]:
    if method in ("log", "log_dict"):
        yield from _log(source, node, method)
    elif method == "save_hyperparameters":
        yield from _saved(source, node)
    elif method in ("optimizers", "lr_schedulers", "manual_backward"):
        known = installed.parameters("Module", method)
        surplus = [short(value) for value in node.args[len(known) :]]
        surplus += [short(keyword) for keyword in node.keywords if keyword.arg not in known]
        if surplus:
            yield source.finding(node, CHANGE, f"self.{method}(..., {', '.join(surplus)})",
                                 f"self.{method}({', '.join(known)})")  # fmt: skip


def _log(source: Source, node: ast.Call, method: str) -> Iterator[Finding]:
    values = 2 if method == "log" else 1
    if len(node.args) > values:
        rest = list(map(short, node.args[values:]))
        named = ", ".join(f"{name}={value}" for name, value in zip(LOG_ORDER, rest, strict=False))
        yield source.finding(node, CHANGE, f"self.{method}(..., {', '.join(rest)})", f"self.{method}(..., {named})",
                             "options are keywords")  # fmt: skip
    known = installed.log_options() | {"name", "value", "dictionary", "values"}
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield source.finding(keyword, CHANGE, f"self.{method}(..., {short(keyword)})", "leave it out",
                                 nearest(keyword.arg, installed.log_options()))  # fmt: skip


def _saved(source: Source, node: ast.Call) -> Iterator[Finding]:
    known = installed.parameters("Module", "save_hyperparameters")
    objects = [value for value in node.args if not (isinstance(value, ast.Constant) and isinstance(value.value, str))]
    for value in objects:
        yield source.finding(node, SAME, f"self.save_hyperparameters({short(value)})", "")
    for keyword in node.keywords:
        if keyword.arg not in known:
            yield source.finding(keyword, CHANGE, f"self.save_hyperparameters({short(keyword)})",
                                 'self.save_hyperparameters("name", ...)', "pass the names to save")  # fmt: skip


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def stored(cls: ast.ClassDef) -> set[str]:
    """Return the attributes that the class sets on ``self``."""
    attributes = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in attributes if is_self(node.value)}
