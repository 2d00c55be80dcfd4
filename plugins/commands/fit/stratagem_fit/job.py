"""A run file made ready: classes found and arguments checked, then seeded and built."""

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
    """What a run file asks for, checked and not yet built."""

    file: RunFile
    model: Plan
    data: Plan | None

    def trainer(self) -> sg.Trainer:
        """Make the trainer: plugins are found, built and checked."""
        from stratagem import Trainer

        return Trainer(sources=self.file.trainer)

    def build(self) -> tuple[sg.Trainer, sg.Module, sg.DataModule | None]:
        """Seed, then make the trainer, the model and the data, in the order in which a script would."""
        from stratagem import DataModule, Module

        trainer = self.trainer()
        self.seed()
        model = _made(self.model, Module, "stratagem.Module")
        data = None if self.data is None else _made(self.data, DataModule, "stratagem.DataModule")
        return trainer, model, data

    def seed(self) -> None:
        """Seed everything, if the file says so."""
        seed(self.file.seed)


def prepare(path: str | Path, words: Sequence[str]) -> Job:
    """Read the run file at `path` and the `words` of the command line after it; import and check what they name.

    Raises:
        ConfigError: an unknown name, a class that is not there or of another kind, arguments that do not fit.
    """
    from stratagem import DataModule, Module

    file = read(path, words)
    _make_importable(file.path)
    seed(file.seed)  # modules may draw numbers when imported; again before building, as a script would
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
    """Find modules beside `file` first, as Python does for a script, and in the current directory."""
    for place in (os.getcwd(), str(file.absolute().parent)):
        if place not in sys.path:
            sys.path.insert(0, place)


def _made(plan: Plan, base: type[Any], kind: str) -> Any:
    from stratagem.training.module import original

    made = plan.build()
    if not isinstance(original(made), base):
        raise ConfigError(
            f"{plan.path} is {plan.class_path} ({plan.origin}), which returned a {type(made).__name__}",
            expected=f"a {kind}",
        )
    return made
