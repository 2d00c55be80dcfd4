"""A script for sbatch: the job's options, and srun, which starts the processes."""

from __future__ import annotations

import shlex
from typing import Literal

from attrs import frozen

from stratagem_run.options import cli_option
from stratagem_run.program import Program
from stratagem_run.quantities import parse_signal
from stratagem_run.resources import Extra
from stratagem_run.slurm_options import SlurmJob, pairs
from stratagem_run.targets.base import Target, check_words, exports, job_lines

#: Sent to the processes of a job before its time limit: the callback `preemption` saves and requeues the job.
_WARNING = "SIGUSR1@90"


@frozen(kw_only=True, slots=False)
class Slurm(Extra, SlurmJob, Target):
    """Runs in the folder in which it was submitted; its output goes to a file with the job's name and id."""

    title = "slurm"
    command = ("sbatch",)
    machine = "a machine of a SLURM cluster"

    launcher: Literal["srun"] = cli_option("", default="srun")
    signal: str | None = cli_option("a signal before the time limit, such as SIGUSR1@90", "NAME@SECONDS")

    def render(self, program: Program) -> str:
        options = job_lines("#SBATCH", self._options(program), self.option)
        # Since SLURM 22.05 srun does not take this from the job.
        cores = pairs({"cpus-per-task": self.cpus})
        start = shlex.join(["srun", "--kill-on-bad-exit=1", *cores, *program.words])
        return "\n".join(["#!/bin/bash", *options, "", *exports(program.variables), start, ""])

    def _options(self, program: Program) -> list[str]:
        name = self.name or program.title
        check_words({"name": name, "partition": self.partition, "account": self.account})
        early = self.signal or (_WARNING if self.requeue else None)
        found = None if early is None else parse_signal(early)
        return [
            *pairs({
                "job-name": name,
                "nodes": self.nodes or 1,
                "ntasks-per-node": self.processes,
                **self.reserved(),
                "signal": found and f"{found.name}@{found.seconds}",
            }),
            *(["--requeue"] if self.requeue else []),
            f"--output={name}-%j.out",
            "--open-mode=append",
        ]  # fmt: skip
