"""Prepare the run of a run file: import classes, check arguments, then seed and build."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

from stratagem.errors import ConfigError
from stratagem_fit.plans import Plan, plan_section
from stratagem_fit.runfile import RunFile, read

if TYPE_CHECKING:
    import stratagem as sg


@define(eq=False, kw_only=True)
class Job:
    """The checked content of a run file, not built yet."""

    file: RunFile
    model: Plan
    data: Plan | None

    def trainer(self) -> sg.Trainer:
        """Return the trainer; its plugins are resolved and checked."""
        from stratagem import Trainer

        return Trainer.from_sources(self.file.trainer)

    def build(self) -> tuple[sg.Trainer, sg.Module, sg.DataModule | None]:
        """Build the trainer, seed, then build the model and the data, in the order of a script."""
        from stratagem import DataModule, Module

        trainer = self.trainer()
        seed(self.file.seed)
        model = _build(self.model, Module, "stratagem.Module")
        data = None if self.data is None else _build(self.data, DataModule, "stratagem.DataModule")
        return trainer, model, data


def prepare(path: str | Path, words: Sequence[str]) -> Job:
    """Read the run file at `path` and the command line `words` after it; import and check their classes.

    Raises:
        ConfigError: an unknown name, a missing class or one of another type, or invalid arguments.
    """
    from stratagem import DataModule, Module

    file = read(path, words)
    _make_importable(file.path)
    seed(file.seed)  # modules may use random numbers when imported; build() seeds again
    return Job(
        file=file,
        model=plan_section("model", file.model, Module, "stratagem.Module"),
        data=None if file.data is None else plan_section("data", file.data, DataModule, "stratagem.DataModule"),
    )


def seed(value: int | None) -> None:
    """Seed everything with `value`, unless it is None."""
    from stratagem import seed_everything

    if value is not None:
        seed_everything(value)


def _make_importable(file: Path) -> None:
    """Add the folder of `file` to sys.path, as Python does for a script, and then the current directory."""
    for folder in (os.getcwd(), str(file.absolute().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def _build(plan: Plan, base: type[Any], kind: str) -> Any:
    from stratagem_trainer.module import original

    built = plan.build()
    if not isinstance(original(built), base):
        raise ConfigError(
            f"{plan.path} is {plan.class_path} ({plan.origin}), which returned a {type(built).__name__}",
            expected=f"a {kind}",
        )
    return built
