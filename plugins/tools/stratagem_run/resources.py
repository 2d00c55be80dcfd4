"""Options of launchers and targets that reserve something: nodes, devices, memory, time."""

from __future__ import annotations

from attrs import frozen

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_run.options import cli_option
from stratagem_run.quantities import parse_memory, parse_time


@frozen(kw_only=True, slots=False)
class Nodes:
    """Several nodes, each with the same number of processes."""

    nodes: int | None = cli_option("machines; for torchrun also MIN:MAX", validator=at_least(1))
    devices: int | None = cli_option("processes on each node, one for each device", validator=at_least(1))


@frozen(kw_only=True, slots=False)
class Resources(Nodes):
    """What a scheduler reserves for a job."""

    gpus: int | None = cli_option("GPUs of each node", validator=at_least(1))
    cpus: int | None = cli_option("CPU cores for each process", validator=at_least(1))
    memory: str | None = cli_option("memory of each node, such as 64G", "AMOUNT")
    time: str | None = cli_option("time limit, such as 24:00:00 or 90m", "TIME")

    def __attrs_post_init__(self) -> None:
        """Check what every scheduler would refuse, or wait for forever.

        Raises:
            ConfigError: a time or an amount cannot be read, or processes would have no GPU.
        """
        _ = self.time and parse_time(self.time), self.memory and parse_memory(self.memory)
        if self.devices is not None and self.gpus is not None and self.gpus < self.devices:
            raise ConfigError(
                f"--gpus is {self.gpus} and --devices is {self.devices}", expected="a GPU for each process of a node",
                do=f"pass --gpus {self.devices}, or --devices {self.gpus}",
            )  # fmt: skip


@frozen(kw_only=True, slots=False)
class Queue:
    """Where a scheduler puts a job, and the account that pays for it."""

    partition: str | None = cli_option("partition of SLURM, or queue of LSF", "NAME")
    account: str | None = cli_option("account of SLURM, or project of LSF", "NAME")


@frozen(kw_only=True, slots=False)
class Extra:
    """Options of the other program that have no name here."""

    option: tuple[str, ...] = cli_option(
        "one more word for the launcher, or one more option of the job: --option=--qos=high", "WORD", default=()
    )
