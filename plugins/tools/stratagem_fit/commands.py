"""``stratagem fit run.yaml``, and validate, test and predict."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.api import Command
from stratagem.api.options import redact
from stratagem.discovery import registry
from stratagem.errors import ConfigError, shown

if TYPE_CHECKING:
    import stratagem as sg
    from stratagem_fit.job import Job

_EPILOG = """\
Options after the file override values of the file:

  --trainer.ARGUMENT VALUE        --trainer.max_epochs 3, --trainer.strategy ddp
  --trainer.KIND.OPTION VALUE     --trainer.strategy.static_graph true
  --model CLASS, --data CLASS     another class; the arguments in the file are dropped
  --model.ARGUMENT VALUE          --model.width 64, --data.batch_size 32, --model.encoder.depth 2
  --ckpt_path PATH                resume from (or evaluate) this file, or "last"
  --seed NUMBER
"""


class _RunFileCommand(Command):
    """Base class of fit, validate, test and predict, which read a run file."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.usage = f"{parser.prog} [-h] FILE [--print-config] [--explain] [--NAME VALUE ...]"
        parser.add_argument("file", metavar="FILE", help="the run file, YAML or TOML")
        # Flags may come after the file, too, where `runfile.read` parses everything.
        parser.add_argument("--print-config", action="store_true", help="print the full configuration; do not run")
        parser.add_argument("--explain", action="store_true", help="print the resolved plugins; do not run")
        words = parser.add_argument("words", nargs=argparse.REMAINDER, metavar="--NAME VALUE", help="see below")
        words.required = False  # the message about a missing FILE must name nothing else

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_fit.job import prepare

        job = prepare(arguments.file, arguments.words)
        if arguments.print_config or "print_config" in job.file.flags:
            from stratagem_fit.printing import render

            print(render(job), end="")
        elif arguments.explain or "explain" in job.file.flags:
            print(explain(job))
        else:
            trainer, model, data = job.build()
            trainer.outcome.how_to_resume = f"`stratagem fit {shlex.quote(arguments.file)} --ckpt_path last`"
            self.act(trainer, model, data, job.file.ckpt_path)
            trainer.close()
        return 0

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        """Run the stage of this command."""
        raise NotImplementedError


class Fit(_RunFileCommand):
    """The command ``stratagem fit``."""

    help = "train the model of a run file"

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)


class _Evaluate(_RunFileCommand):
    stage: ClassVar[str]

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        results = getattr(trainer, self.stage)(model, datamodule=data, ckpt_path=ckpt_path, verbose=False)
        if trainer.is_global_zero:
            print(table(results))


class Validate(_Evaluate):
    """The command ``stratagem validate``."""

    help = "evaluate the model of a run file on its validation data"
    stage = "validate"


class Test(_Evaluate):
    """The command ``stratagem test``."""

    help = "evaluate the model of a run file on its test data"
    stage = "test"


class Predict(_RunFileCommand):
    """The command ``stratagem predict``."""

    help = "predict with the model of a run file; a callback writes the predictions"

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        plugins = [choice.plugin for choice in trainer.run.stack.active()]
        if not any(map(_receives_predictions, [model, *plugins])):
            raise ConfigError(
                "no callback receives the predictions", expected="a callback that writes them",
                do="add {name: prediction_writer, dirpath: predictions} to trainer.callbacks of the run file",
            )  # fmt: skip
        trainer.predict(model, datamodule=data, ckpt_path=ckpt_path, return_predictions=False)


def _receives_predictions(receiver: Any) -> bool:
    """Return whether `receiver` uses the outputs of predict batches; a progress bar does not."""
    from stratagem import Module

    method = getattr(receiver, "on_predict_batch_end", None)
    if getattr(method, "__func__", None) is Module.on_predict_batch_end:
        return False  # it inherits the one that does nothing
    return method is not None and "outputs" in inspect.signature(method).parameters


def table(results: Sequence[Mapping[str, float]]) -> str:
    """Return the metrics of each loader as a text table."""
    rows = [(name, f"{value:.6g}") for metrics in results for name, value in metrics.items()]
    if not rows:
        return "nothing was logged"
    names, values = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{name:<{names}}  {value:>{values}}" for name, value in rows)


def explain(job: Job) -> str:
    """Return a description of the run: model and data with their arguments, then the resolved plugins.

    Values are as in a run file.
    """
    lines = []
    for plan in (job.model, job.data):
        if plan is not None:
            lines.append(f"{plan.path} {plan.class_path}  ({plan.origin})")
            for name, value in plan.arguments.items():
                lines.append(f"|   {name}: {_as_yaml(shown(redact(name, value), None))}  ({plan.origins[name]})")
    description = job.trainer().run.describe()
    values = [*description["arguments"].values(), *(o for each in description["plugins"] for o in each["options"])]
    for value in values:
        value["value"] = _as_yaml(value["value"])
    text = registry.find("command", "explain").load().text
    return "\n".join([*lines, text(description, assigns=": ")])


def _as_yaml(text: str) -> str:
    """Return a value that is written in Python as it is written in YAML; anything but a literal stays as it is."""
    import yaml

    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).removesuffix("...\n").strip()
    )
