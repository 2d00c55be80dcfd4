"""``stratagem fit run.yaml``, and validate, test and predict."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.api import Command
from stratagem.errors import ConfigError, shown

if TYPE_CHECKING:
    import stratagem as sg
    from stratagem_fit.job import Job

_EPILOG = """\
Anything in the file can be said on the line, after the file:

  --trainer.ARGUMENT VALUE        --trainer.max_epochs 3, --trainer.strategy ddp
  --trainer.KIND.OPTION VALUE     --trainer.strategy.static_graph true
  --model CLASS, --data CLASS     another class; the file's arguments for the first one are dropped
  --model.ARGUMENT VALUE          --model.width 64, --data.batch_size 32, --model.encoder.depth 2
  --ckpt_path PATH                resume from (or evaluate) this file, or "last"
  --seed NUMBER
"""


class _OfRunFile(Command):
    """What fit, validate, test and predict have in common: they read a run file."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.usage = f"{parser.prog} [-h] FILE [--print-config] [--explain] [--NAME VALUE ...]"
        parser.add_argument("file", metavar="FILE", help="the run file, YAML or TOML")
        # Switches too stand after the file, where all is left to the run file's own reader; see `runfile.read`.
        parser.add_argument("--print-config", action="store_true", help="print all there is to say as YAML, do not run")
        parser.add_argument("--explain", action="store_true", help="print what would run, and why; do not run")
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="--NAME VALUE", help="see below")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_fit.job import prepare

        job = prepare(arguments.file, arguments.words)
        if arguments.print_config or "print_config" in job.file.switches:
            from stratagem_fit.printing import render

            print(render(job), end="")
        elif arguments.explain or "explain" in job.file.switches:
            print(explain(job))
        else:
            trainer, model, data = job.build()
            self.act(trainer, model, data, job.file.ckpt_path)
            trainer.close()
        return 0

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        """Do it."""
        raise NotImplementedError


class Fit(_OfRunFile):
    """``stratagem fit``"""

    help = "train the model of a run file"

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)


class _Measure(_OfRunFile):
    stage: ClassVar[str]

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        results = getattr(trainer, self.stage)(model, datamodule=data, ckpt_path=ckpt_path)
        if trainer.is_global_zero:
            print(table(results))


class Validate(_Measure):
    """``stratagem validate``"""

    help = "measure the model of a run file on its validation data"
    stage = "validate"


class Test(_Measure):
    """``stratagem test``"""

    help = "measure the model of a run file on its test data"
    stage = "test"


class Predict(_OfRunFile):
    """``stratagem predict``"""

    help = "predict with the model of a run file; a callback writes what it returns"

    def act(self, trainer: sg.Trainer, model: sg.Module, data: sg.DataModule | None, ckpt_path: str | None) -> None:
        plugins = [choice.plugin for choice in trainer.run.stack.active()]
        if not any(map(_receives_predictions, [model, *plugins])):
            raise ConfigError(
                "predict has nowhere to leave the predictions", expected="a callback that writes them",
                do="add {name: prediction_writer, dirpath: predictions} to trainer.callbacks of the run file",
            )  # fmt: skip
        trainer.predict(model, datamodule=data, ckpt_path=ckpt_path)


def _receives_predictions(receiver: Any) -> bool:
    """Whether `receiver` asks for what each batch gave: a progress bar hears of batches, and asks for nothing."""
    method = getattr(receiver, "on_predict_batch_end", None)
    return method is not None and "outputs" in inspect.signature(method).parameters


def table(results: Sequence[Mapping[str, float]]) -> str:
    """Return the metrics of each loader as lines for people."""
    rows = [(name, f"{value:.6g}") for metrics in results for name, value in metrics.items()]
    if not rows:
        return "nothing was logged"
    names, values = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{name:<{names}}  {value:>{values}}" for name, value in rows)


def explain(job: Job) -> str:
    """Return what would run: the model and the data with their arguments, then the trainer's stack."""
    lines = []
    for plan in (job.model, job.data):
        if plan is not None:
            lines.append(f"{plan.path} {plan.class_path}  ({plan.origin})")
            lines += [f"|   {name} = {shown(value, None)}  ({plan.origins[name]})" for name, value in _shown(plan)]
    return "\n".join([*lines, job.trainer().explain()])


def _shown(plan: Any) -> list[tuple[str, Any]]:
    from stratagem.api.redaction import redact

    return [(name, redact(name, value)) for name, value in plan.arguments.items()]
