"""A script for bsub: the job's options, and jsrun or mpirun, which starts the processes."""

from __future__ import annotations

import shlex
from typing import Literal

from attrs import frozen

from stratagem.errors import ConfigError
from stratagem_run.launchers.mpirun import Layout, open_mpi
from stratagem_run.options import cli_option, flag
from stratagem_run.program import Program
from stratagem_run.quantities import minutes, parse_memory, parse_signal, parse_time
from stratagem_run.resources import Extra, Queue
from stratagem_run.targets.base import Target, check_words, exports, job_lines


@frozen(kw_only=True, slots=False)
class Lsf(Extra, Queue, Target):
    """Runs in the folder in which it was submitted; its output goes to a file with the job's name and id."""

    title = "lsf"
    command = ("bsub",)
    machine = "a machine of an LSF cluster"

    #: jsrun exists on systems with IBM's Job Step Manager, which reserve whole nodes.
    launcher: Literal["mpirun", "jsrun"] = cli_option("", default="mpirun")
    signal: str | None = cli_option("", "NAME@SECONDS")

    def render(self, program: Program) -> str:
        options = job_lines("#BSUB", self._options(program), self.option)
        words = self._jsrun() if self.launcher == "jsrun" else self._mpirun(program)
        return "\n".join(
            ["#!/bin/bash", *options, "", *exports(program.variables), shlex.join([*words, *program.words]), ""]
        )

    def _options(self, program: Program) -> list[str]:
        name = self.name or program.title
        check_words({"name": name, "partition": self.partition, "account": self.account})
        options = {
            "-J": name,
            "-q": self.partition,
            "-P": self.account,
            "-W": self.time and "{:02}:{:02}".format(*divmod(minutes(parse_time(self.time)), 60)),
            "-o": f"{name}-%J.out",
        }
        return [
            *(self._whole_nodes() if self.launcher == "jsrun" else self._slots()),
            *(f"{key} {value}" for key, value in options.items() if value is not None),
            *self._early_signal(),
            *(["-r"] if self.requeue else []),
        ]

    def _early_signal(self) -> list[str]:
        if self.signal is None:
            return []
        found = parse_signal(self.signal)
        return [f"-wa {found.name.removeprefix('SIG')}", f"-wt {-(-found.seconds // 60)}"]

    # --- Slots, for mpirun ---------------------------------------------------------------------------------------

    def _slots(self) -> list[str]:
        needs = [f"span[ptile={self.processes}]"]
        needs += [] if self.cpus is None else [f"affinity[core({self.cpus})]"]
        needs += [] if self.memory is None else ["rusage[mem={}{}B]".format(*parse_memory(self.memory))]
        return [
            f"-n {(self.nodes or 1) * self.processes}",
            f'-R "{" ".join(needs)}"',
            *([] if self.gpus is None else [f'-gpu "num={self.gpus}/host"']),
        ]

    def _mpirun(self, program: Program) -> list[str]:
        exported = {"PYTHONUNBUFFERED": "1", **program.variables}
        layout = Layout(self.nodes or 1, self.processes, [], None, False, exported)
        return ["mpirun", *open_mpi(layout)]

    # --- Whole nodes, for jsrun ----------------------------------------------------------------------------------

    def _whole_nodes(self) -> list[str]:
        if self.memory is not None:
            raise ConfigError(
                f"{flag('memory')} is {self.memory} and jsrun is for jobs that have whole nodes", do="leave it out"
            )
        return [f"-nnodes {self.nodes or 1}"]

    def _jsrun(self) -> list[str]:
        """Return one resource set for each process."""
        cores = self.cpus or 1
        gpus, rest = divmod(self.gpus or 0, self.processes)
        if rest:
            raise ConfigError(
                f"--gpus is {self.gpus} and --devices is {self.devices}", expected="the same number of GPUs for each",
                do=f"pass --gpus {gpus * self.processes}",
            )  # fmt: skip
        return [
            "jsrun", f"--nrs={(self.nodes or 1) * self.processes}", f"--rs_per_host={self.processes}",
            "--tasks_per_rs=1", f"--cpu_per_rs={cores}", f"--gpu_per_rs={gpus}", f"--bind=packed:{cores}",
        ]  # fmt: skip
