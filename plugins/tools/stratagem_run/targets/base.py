"""The base class of targets."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from stratagem.errors import ConfigError
from stratagem_run.options import cli_option, flag
from stratagem_run.program import Program, check_exists
from stratagem_run.resources import Resources


@frozen(kw_only=True, slots=False)
class Target(Resources):
    """Writes a job for a scheduler. Its fields are options of ``stratagem run --submit``."""

    #: What it is called in messages.
    title: ClassVar[str]
    #: The program that submits a job from its standard input, and what to say where it is missing.
    command: ClassVar[tuple[str, ...]]
    machine: ClassVar[str]

    name: str | None = cli_option("the job's name (default: that of the script)", "NAME")
    requeue: bool = cli_option("start the job again after a signal or a failure", default=False)

    def program(self, program: Program, *, python_given: bool) -> Program:
        """Return the program as the job starts it.

        Raises:
            ConfigError: the script does not exist; the job starts in the current folder.
        """
        check_exists(program)
        return program

    def render(self, program: Program) -> str:
        """Return the text of the job."""
        raise NotImplementedError

    def submit(self, text: str) -> int:
        """Submit `text`; return the exit code.

        Raises:
            ConfigError: the program that submits is not installed.
        """
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"{self.command[0]} is not installed on this machine", expected=self.machine,
                do="run it there, or add --dry to print the job",
            )  # fmt: skip
        print(f"+ {shlex.join(self.command)}", file=sys.stderr, flush=True)
        return subprocess.run(self.command, input=text, text=True, check=False).returncode

    @property
    def processes(self) -> int:
        """Processes on each node: as many as GPUs, unless stated."""
        return self.devices or self.gpus or 1


def check_words(options: Mapping[str, str | None]) -> None:
    """Refuse values that a scheduler would read as something else: they stand in comments of a script.

    Raises:
        ConfigError: names the option.
    """
    for name, value in options.items():
        if value is not None and not re.fullmatch(r"[\w.,:/@%+=\[\]-]+", value, re.ASCII):
            raise ConfigError(
                f"{flag(name)} is {value!r}",
                expected="letters, digits and .,:/@%+=[]-",
                do="leave other characters out",
            )


def job_lines(marker: str, options: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return a line for each option of a job; those that are `given` on the command line are not changed.

    Raises:
        ConfigError: one has a line break, and so would be another line of the script.
    """
    for each in given:
        if not each.isprintable():
            raise ConfigError(f"--option is {each!r}", expected="one option of the job, on one line")
    return [f"{marker} {each}" for each in (*options, *given)]


def exports(variables: Mapping[str, str]) -> list[str]:
    """Return lines that export `variables` in a shell, and make Python print at once."""
    both = {"PYTHONUNBUFFERED": "1", **variables}
    return [f"export {name}={shlex.quote(value)}" for name, value in both.items()]
