"""Run a training script on a cluster that does not exist, and say what one rank holds, computes and sends."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from stratagem.api.options import as_list, changes
from stratagem.api.world import World
from stratagem.errors import ConfigError
from stratagem_plan import operators
from stratagem_plan.counter import counting_resizes
from stratagem_plan.planned import Planned, PlannedAccelerator, PlannedEnvironment, Planner, converting_fakes

#: Names plugins that a process is not to use.
DENY_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"
#: Plugins that talk to other processes, or write files.
_LEFT_OUT = ("peer_diagnosis", "report")


@define
class PlannedScript:
    """A script, and the cluster that it is planned for."""

    path: Path
    arguments: Sequence[str] = ()
    #: Devices of a node.
    devices: int = 1
    nodes: int = 1
    num_steps: int = 2

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
        planner = Planner(num_steps=self.num_steps)
        operators.register()
        try:
            with (
                self._changed(world, planner),
                converting_fakes(),
                counting_resizes(planner.counter),
                operators.Building(planner.fake),
            ):
                runpy.run_path(str(self.path), run_name="__main__")
        except Planned:
            return planner
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(error) from error
        raise ConfigError(
            f"{self.path} has ended after {len(planner.ends)} optimizer steps", expected=f"{self.num_steps} of them",
            do="plan the command that trains, with its arguments" if planner.run is None else "let it train longer",
        )  # fmt: skip

    @contextlib.contextmanager
    def _changed(self, world: World, planner: Planner) -> Iterator[None]:
        """Within, every run of this process is planned."""
        argv, path, denied = sys.argv, sys.path[:], os.environ.get(DENY_VARIABLE, "")
        with tempfile.TemporaryDirectory(prefix="stratagem-plan-") as folder:

            def change(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
                values = {
                    "accelerator": PlannedAccelerator(num_devices=self.devices), "devices": self.devices,
                    "num_nodes": self.nodes, "environment": PlannedEnvironment(world=world),
                    "plugins": [*as_list(given.get("plugins", ())), planner], "default_root_dir": Path(folder),
                }  # fmt: skip
                return values | (_QUIET if cls.for_trainer else {})

            changes.append(change)
            sys.argv, sys.path[:0] = [str(self.path), *self.arguments], [str(self.path.parent.absolute())]
            os.environ[DENY_VARIABLE] = ",".join(filter(None, [denied, *_LEFT_OUT]))
            try:
                yield
            finally:
                changes.remove(change)
                sys.argv, sys.path[:] = argv, path
                os.environ[DENY_VARIABLE] = denied


#: Arguments of a Trainer that write files, or run anything beside training.
_QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "limit_val_batches": 0, "fast_dev_run": False,
}  # fmt: skip


def _depends_on_values(error: BaseException) -> ConfigError:
    """Return the error for a step that asks for the value of a tensor, with the line that does."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_of_a_user(each.filename)]
    place = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return ConfigError(
        f"the step asks for the value of a tensor{place}", expected="a step whose shapes decide what it does",
        do="plan without that line: tensors of a plan have shapes and no values",
    )  # fmt: skip


def _is_of_a_user(path: str) -> bool:
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(runpy.__file__) + "/")
    return not path.startswith((*inside[:2], "<")) and os.path.basename(path) != "runpy.py"
