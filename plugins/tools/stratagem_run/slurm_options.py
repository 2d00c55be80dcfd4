"""Options of srun and sbatch, which have the same names."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from stratagem_run.quantities import clock, parse_memory, parse_time
from stratagem_run.resources import Queue, Resources


@frozen(kw_only=True, slots=False)
class SlurmJob(Queue, Resources):
    """What SLURM reserves, for srun or for a job."""

    def reserved(self) -> dict[str, object]:
        """Return SLURM's options for what is set, by name; None for what is not."""
        return {
            "gpus-per-node": self.gpus,
            "cpus-per-task": self.cpus,
            "mem": self.memory and "{}{}".format(*parse_memory(self.memory)),
            "time": self.time and clock(parse_time(self.time)),
            "partition": self.partition,
            "account": self.account,
        }


def pairs(options: Mapping[str, object]) -> list[str]:
    """Return ``--name=value`` for each option that is not None."""
    return [f"--{name}={value}" for name, value in options.items() if value is not None]
