"""The pages of `Trainer` and `Run`: every argument with its type, its default and its text, then the methods."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import attrs

import stratagem as sg
from pages.classes import members
from pages.text import code_span, option
from stratagem.config.settings import RunSettings
from stratagem.discovery import registry
from stratagem_trainer.option_texts import option_docs
from stratagem_trainer.settings import TrainerSettings

PLUGINS = """
`NameOr[Strategy]` stands for a plugin in one of three forms: its name, a mapping with its `name` and its options, or
an instance of `Strategy`.
"""

TRAINER = f"""# Trainer

`stratagem.Trainer(...)` trains, validates and tests a [module](module.md), and predicts with it. All arguments are
keywords. They can also be set in files, environment variables and on the command line: see
[Configuration](../configuration.md).
{PLUGINS}"""

RUN = f"""# Run

`stratagem.Run(...)` chooses plugins as the [trainer](trainer.md) does, for a training loop of your own. All arguments
are keywords, and set in code alone.
{PLUGINS}"""


#: Methods that `Run` inherits and that the user's own loop calls.
OF_CONTEXT = ("connect", "close", "init_context", "backward", "clip_gradients", "ask", "explain", "print")


def trainer_page(root: Path) -> str:
    """Return the page of the trainer."""
    own = {field.name for field in attrs.fields(TrainerSettings)} - {field.name for field in attrs.fields(RunSettings)}
    names = list(inspect.signature(sg.Trainer).parameters)
    return "\n".join([
        TRAINER,
        "## Arguments: plugins, devices and numerics\n",
        *_arguments(sg.Trainer, TrainerSettings, [name for name in names if name not in own]),
        "## Arguments: training, evaluation and logging\n",
        *_arguments(sg.Trainer, TrainerSettings, [name for name in names if name in own]),
        "## Methods\n",
        members(root, "stratagem_trainer.trainer.Trainer", attributes=False),
        "## What modules, callbacks and scripts read\n",
        "A callback gets the trainer as the argument `trainer`, a module has it as `self.trainer`.\n",
        members(root, "stratagem_trainer.api.trainer_view.TrainerView"),
        members(root, "stratagem_trainer.api.user_view.UserView"),
    ])  # fmt: skip


def run_page(root: Path) -> str:
    """Return the page of `Run`."""
    names = [name for name in inspect.signature(sg.Run).parameters if name != "settings"]
    return "\n".join([
        RUN, "## Arguments\n", *_arguments(sg.Run, RunSettings, names), "## Methods and attributes\n",
        members(root, "stratagem.runtime.run.Run"),
        members(root, "stratagem.runtime.context.Context", only=OF_CONTEXT),
        "It is what hooks receive as `run`: [what hooks receive](context.md) has the rest.\n",
    ])  # fmt: skip


def _arguments(owner: type, settings: type[Any], names: list[str]) -> list[str]:
    signature = inspect.signature(owner)
    documented = {kind.argument: kind.doc for kind in registry.kinds().values()} | option_docs(settings)
    return [
        option(
            name, code_span(str(signature.parameters[name].annotation)), repr(signature.parameters[name].default),
            documented.get(name, ""), owner.__name__.lower(),
        )
        for name in names
    ]  # fmt: skip
