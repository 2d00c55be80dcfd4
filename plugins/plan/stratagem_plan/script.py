"""Run a training script on a cluster that does not exist, and say what one rank holds, computes and sends."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from stratagem.api.options import as_list, changes
from stratagem.api.world import World
from stratagem.errors import ConfigError, StratagemError
from stratagem_plan import operators
from stratagem_plan.assumptions import Assumptions, answers_scalar
from stratagem_plan.patches import (
    converting_fakes,
    counting_resizes,
    formatting_fakes,
    subclassing_fakes,
    without_waits,
)
from stratagem_plan.places import is_of_a_library, is_ours
from stratagem_plan.planned import Planned, PlannedAccelerator, PlannedEnvironment, Planner

#: Names plugins that a process is not to use.
DENY_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"
#: A step of more batches is planned with so many: the first, one that counts for all between, and the last.
_BATCHES = 3
#: Plugins that talk to other processes, write files, or say how training ended.
_LEFT_OUT = ("peer_diagnosis", "report", "ending", "interruption", "hints")


@define
class PlannedScript:
    """A script, and the cluster that it is planned for."""

    path: Path
    arguments: Sequence[str] = ()
    #: Devices of a node.
    devices: int = 1
    nodes: int = 1
    #: Bytes of each device; None if they are not known.
    memory: float | None = None
    num_steps: int = 2
    #: Arguments of the script's Trainer, or Run, that the plan replaces.
    settings: Mapping[str, Any] = field(factory=dict)
    #: Samples of a batch; None for as many as the script reads.
    micro_batch: int | None = None
    #: Batches of a step of a Trainer; None for as many as the script accumulates.
    accumulate: int | None = None
    #: Values by the place that asks for that of a tensor, such as ``train.py:30``.
    assume: Mapping[str, bool | float] = field(factory=dict)
    #: Trains in place of the file at `path`, which is only a name then.
    train: Callable[[], object] | None = None

    def on(self, rank: int) -> Planner:
        """Run the script as `rank`; return what was counted. Once in a process: torch keeps what a script registers.

        Raises:
            ConfigError: it never trains, or its steps depend on values.
        """
        world = World(
            rank=rank, local_rank=rank % self.devices, node_rank=rank // self.devices,
            world_size=self.devices * self.nodes, local_world_size=self.devices, num_nodes=self.nodes,
            store_hosted=True,
        )  # fmt: skip
        repeats = max(1, (self.accumulate or 1) - (_BATCHES - 1))
        planner = Planner(
            num_steps=self.num_steps, micro_batch=self.micro_batch, repeats=repeats, memory=self.memory,
            assumptions=Assumptions(self.assume),
        )  # fmt: skip
        operators.register()
        try:
            with (
                self._changed(world, planner),
                converting_fakes(),
                subclassing_fakes(),
                formatting_fakes(),
                without_waits(),
                counting_resizes(planner.counter),
                operators.Building(planner.fake, planner.counter),
                contextlib.closing(planner),
            ):
                self._start()
        except Planned:
            return planner
        except StratagemError:
            raise
        except (Exception, SystemExit) as error:
            if len(planner.ends) < self.num_steps:  # otherwise the script has caught what ends it
                raise self._explained(error) from error
        if len(planner.ends) >= self.num_steps:
            return planner
        trains = planner.run is not None or self.train is not None
        raise ConfigError(
            f"{self.path} has ended after {len(planner.ends)} optimizer steps", expected=f"{self.num_steps} of them",
            do="let it train longer" if trains else "plan the command that trains, with its arguments",
        )  # fmt: skip

    def _start(self) -> None:
        if self.train is not None:
            self.train()
            return
        argv, path = sys.argv, sys.path[:]
        sys.argv, sys.path[:0] = [str(self.path), *self.arguments], [str(self.path.parent.absolute())]
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = argv, path

    def _explained(self, error: BaseException) -> ConfigError:
        """Return the error for a script that `error` ended, with the line where it did."""
        asks_for_value = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        frames = [
            each
            for each in traceback.extract_tb(error.__traceback__)
            if not is_of_a_library(each.filename) and (asks_for_value or not is_ours(each.filename))
        ]
        place = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else str(self.path)
        if asks_for_value:
            if frames and is_ours(frames[-1].filename):
                return ConfigError(
                    f"{place} asks for the value of a tensor, for a plugin that this run chose",
                    expected="plugins that decide by shapes", do="plan with another precision, strategy or comm_hook",
                )  # fmt: skip
            line = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
            tell = f"tell it: `--assume {line}=VALUE`, or assume={{'{line}': VALUE}} from Python; or "
            return ConfigError(
                f"the step asks for the value of a tensor at {place}",
                expected="a step whose shapes decide what it does",
                do=f"{tell * (bool(frames) and answers_scalar(error))}"
                "plan without that line: tensors of a plan have shapes and no values",
            )
        first = (str(error).splitlines() or [""])[0]
        return ConfigError(
            f"{place} ended the script with {type(error).__name__}: {first}", expected="a script that trains",
            do="see whether it trains without `stratagem plan`, whose tensors have shapes and no values",
        )  # fmt: skip

    @contextlib.contextmanager
    def _changed(self, world: World, planner: Planner) -> Iterator[None]:
        """Within, every run of this process is planned."""
        denied = os.environ.get(DENY_VARIABLE)
        with tempfile.TemporaryDirectory(prefix="stratagem-plan-") as folder:

            def change(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
                values = {
                    "accelerator": PlannedAccelerator(num_devices=self.devices), "devices": self.devices,
                    "num_nodes": self.nodes, "environment": PlannedEnvironment(world=world),
                    "plugins": [*as_list(given.get("plugins", ())), planner], "default_root_dir": Path(folder),
                }  # fmt: skip
                values |= self.settings
                if not cls.for_trainer:
                    return values
                if self.accumulate is not None:
                    values["accumulate_grad_batches"] = min(self.accumulate, _BATCHES)
                callbacks = [each for each in as_list(given.get("callbacks") or ()) if not _saves(each)]
                return values | _QUIET | {"callbacks": callbacks}

            changes.append(change)
            os.environ[DENY_VARIABLE] = ",".join(filter(None, [denied, *_LEFT_OUT]))
            try:
                yield
            finally:
                changes.remove(change)
                os.environ.pop(DENY_VARIABLE, None)
                if denied is not None:
                    os.environ[DENY_VARIABLE] = denied


def _saves(callback: Any) -> bool:
    """Whether a callback, or its name or mapping, saves checkpoints."""
    name = callback.get("name") if isinstance(callback, Mapping) else callback
    return name == "model_checkpoint" or any(each.__name__ == "ModelCheckpoint" for each in type(callback).__mro__)


#: Arguments of a Trainer that write files, or run anything beside training.
_QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "limit_val_batches": 0, "fast_dev_run": False,
}  # fmt: skip
