"""The base class of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from stratagem.errors import ConfigError
from stratagem_run.program import Program, Start

#: Programs that start several processes: name, variable that proves it, variable with the number of processes.
_STARTERS = (
    ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"),
)


@frozen(kw_only=True, slots=False)
class Launcher:
    """Builds the command that starts a program on some nodes. Its fields are options of ``stratagem run``."""

    #: What it is called in messages.
    title: ClassVar[str]

    @classmethod
    def suits(cls, nodes: object, variables: Mapping[str, str]) -> str | None:  # noqa: ARG003
        """Return why this launcher is the right one here, or None. Must read no option but the number of nodes."""
        return None

    def start(self, program: Program, variables: Mapping[str, str]) -> Start:
        """Return the command that runs `program`.

        Args:
            variables: the environment of this process.

        Raises:
            ConfigError: the options contradict each other, or the launcher is not installed.
        """
        raise NotImplementedError


def check_started_once(variables: Mapping[str, str], launcher: str) -> None:
    """Refuse to start processes from each of several processes that another program started.

    Raises:
        ConfigError: names the program and the variables.
    """
    for starter, evidence, size in _STARTERS:
        if evidence in variables and variables.get(size, "1") != "1":
            raise ConfigError(
                f"{starter} has started this command {variables[size]} times ({evidence} and {size} are set), and "
                f"each one would start {launcher}",
                expected="one of the two", do=f"run the script under {starter} itself, or run this command alone",
            )  # fmt: skip
