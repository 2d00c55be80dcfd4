"""Read from the installed stratagem and its plugins what they accept, so that the rules are never outdated."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from stratagem.api import options as config
from stratagem.discovery import catalog, registry
from stratagem.errors import ConfigError, PluginError
from stratagem.stack.plugins import hook_functions
from stratagem_trainer.api.events import EVENTS

#: Modules with the classes of each kind.
MODULES = {
    "callback": "callbacks", "logger": "loggers", "strategy": "strategies", "precision": "precisions",
    "environment": "environments", "accelerator": "accelerators", "checkpoint": "checkpoints",
}  # fmt: skip

#: Methods that a module may define or call besides those of the base class.
_OPTIONAL_METHODS = {
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "training_step_end",
    "validation_step_end", "test_step_end", "setup", "teardown", "prepare_data",
}  # fmt: skip


# --- Trainer and Module ------------------------------------------------------------------------------------------


@cache
def trainer_arguments() -> frozenset[str]:
    """Return the arguments of `stratagem.Trainer`."""
    from stratagem import Trainer

    return frozenset(inspect.signature(Trainer.__init__).parameters) - {"self", "layers"}


@cache
def trainer_attributes() -> frozenset[str]:
    """Return the attributes of a trainer."""
    from stratagem import Trainer

    return frozenset(dir(Trainer)) | _assigned(Trainer)


@cache
def module_attributes() -> frozenset[str]:
    """Return the methods that a module may define, and those that it inherits."""
    from stratagem_trainer.module import Module

    return frozenset(dir(Module)) | frozenset(EVENTS) | _OPTIONAL_METHODS


@cache
def data_attributes() -> frozenset[str]:
    """Return the attributes that a data module inherits."""
    from stratagem import DataModule

    return frozenset(dir(DataModule))


@cache
def hooks() -> Mapping[str, tuple[str, ...]]:
    """Return the arguments of each hook, by its name."""
    return {name: tuple(inspect.signature(value).parameters) for name, value in hook_functions().items()}


@cache
def uncalled_methods() -> Mapping[str, tuple[str, str]]:
    """Return the methods of a LightningModule that stratagem refuses: what to write instead, and a note."""
    return _as_findings(catalog.moved_names("module_methods"))


@cache
def uncalled_by_data_modules() -> Mapping[str, tuple[str, str]]:
    """Return the methods of a LightningDataModule that stratagem refuses, in the same form."""
    return {**uncalled_methods(), **_as_findings(catalog.moved_names("data_methods"))}


@cache
def uncalled_by_callbacks() -> Mapping[str, tuple[str, str]]:
    """Return the methods of a Callback that stratagem refuses, in the same form."""
    return _as_findings(catalog.moved_names("callback_methods"), "@hookimpl ")


@cache
def uncalled_by_derived(module: str, name: str) -> Mapping[str, tuple[str, str]]:
    """Return the methods that stratagem refuses in a class derived from its class `name`, in the same form."""
    from stratagem_trainer.moved_methods import moved_methods

    return _as_findings(moved_methods(getattr(import_module(module), name)))


def _as_findings(table: Mapping[str, str], decorator: str = "") -> dict[str, tuple[str, str]]:
    def finding(expected: str, _: str, do: str) -> tuple[str, str]:
        method = re.match(r"(\w+)\(self", expected)
        if method is None:
            return expected, do
        return f"{decorator if method[1] in hooks() else ''}def {expected}", do

    return {name: finding(*instead.partition("; ")) for name, instead in table.items()}


def log_options() -> frozenset[str]:
    """Return the options of `Module.log`."""
    return frozenset(parameters("Module", "log")) - {"name", "value"}


@cache
def parameters(owner: str, method: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of ``stratagem.<owner>.<method>`` without self."""
    import stratagem

    found = dict(inspect.signature(getattr(getattr(stratagem, owner), method)).parameters)
    found.pop("self", None)
    return found


@cache
def scheduler_options() -> frozenset[str]:
    """Return the valid keys of a dict for a learning rate scheduler."""
    from stratagem_trainer.api.lr_schedulers import LRSchedulerConfig

    return frozenset(config.options(LRSchedulerConfig))


def refusal(argument: str, value: Any) -> str:
    """Return the error for `value` of an argument that is not a plugin; empty if it is valid."""
    from stratagem.config.settings import gather
    from stratagem_trainer.settings import TrainerSettings

    if argument in registry.arguments() or argument not in config.options(TrainerSettings):
        return ""
    try:
        gather(TrainerSettings, {argument: value})
    except ConfigError as error:
        return f"expected {error.expected}" if error.expected else str(error).rstrip(".")
    return ""


def _assigned(cls: type) -> frozenset[str]:
    """Return the attributes that the methods of `cls` set on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")


# --- Plugins -----------------------------------------------------------------------------------------------------


@cache
def has_plugin(kind: str, name: str) -> bool:
    """Return whether a plugin of that name is installed, or in the catalog."""
    installed = {entry.name.lower() for entry in registry.entries(kind)}
    known = {each.lower() for each in catalog.providers(kind)}
    return name.lower() in installed | known


@cache
def plugin_class(kind: str, name: str) -> type[Any] | None:
    """Return the class of an installed plugin; None if it is not installed, broken, or a preset of another one."""
    try:
        found = registry.find(kind, name).load()
    except PluginError:
        return None
    return found if isinstance(found, type) else None


def plugin_options(kind: str, name: str) -> frozenset[str] | None:
    """Return the options of an installed plugin; None if its class is unknown."""
    cls = plugin_class(kind, name)
    return None if cls is None else frozenset(config.options(cls))


def expression(kind: str, name: str) -> str:
    """Return the expression for a plugin in a script: its class if that can be imported, else its name."""
    cls = plugin_class(kind, name)
    by_name = f'{registry.argument_of(kind)}="{name}"'
    return by_name if cls is None else f"stratagem.{MODULES[kind]}.{cls.__name__}"


def num_positional(kind: str, name: str) -> int:
    """Return how many options of an installed plugin may be given without their names."""
    return len(getattr(plugin_class(kind, name), "positional", ()))
