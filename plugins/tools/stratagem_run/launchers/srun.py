"""srun: SLURM starts every process, in an allocation or in one that srun requests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from attrs import frozen

from stratagem.errors import ConfigError
from stratagem_run.launchers.base import Launcher, check_started_once
from stratagem_run.options import flag
from stratagem_run.program import Program, Start
from stratagem_run.resources import Extra
from stratagem_run.slurm_options import SlurmJob, pairs


@frozen(kw_only=True, slots=False)
class Srun(Extra, SlurmJob, Launcher):
    """Starts one task for each device, and ends all of them when one fails."""

    title = "srun"

    @classmethod
    def suits(cls, nodes: object, variables: Mapping[str, str]) -> str | None:  # noqa: ARG003
        job = variables.get("SLURM_JOB_ID")
        return job and f"SLURM_JOB_ID is {job}: this is an allocation of SLURM"

    def start(self, program: Program, variables: Mapping[str, str]) -> Start:
        check_started_once(variables, "srun")
        if shutil.which("srun") is None:
            raise ConfigError(
                "srun is not installed on this machine", expected="a machine of a SLURM cluster",
                do="run it on a login node, or choose another --launcher",
            )  # fmt: skip
        if "SLURM_JOB_ID" in variables:
            for name in ("partition", "account"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag(name)} is set, and the allocation {variables['SLURM_JOB_ID']} exists",
                        do=f"leave {flag(name)} out, or run this command outside of the allocation",
                    )
        # In a step (srun --pty bash) the resources of the job are in use: share them.
        overlap = ["--overlap"] if "SLURM_STEP_ID" in variables else []
        return Start(["srun", *overlap, *self._options(), *program.words], program.variables)

    def _options(self) -> list[str]:
        return [
            "--kill-on-bad-exit=1",
            *pairs({
                "nodes": self.nodes,
                "ntasks-per-node": self.devices,
                # Of the allocation, or of the step that this runs in, there may be another number in SLURM_NTASKS.
                "ntasks": self.nodes * self.devices if self.nodes and self.devices else None,
                **self.reserved(),
            }),
            *self.option,
        ]  # fmt: skip
