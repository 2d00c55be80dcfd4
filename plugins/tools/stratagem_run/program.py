"""The program that every process runs: a script or a module, with its arguments."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from stratagem.errors import ConfigError, nearest


@frozen
class Program:
    """A script or a module, the interpreter, and the arguments of the script."""

    python: str
    #: ``("train.py",)`` or ``("-m", "package.train")``.
    target: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    #: Environment variables that the user exports to every process.
    variables: Mapping[str, str] = {}

    @property
    def words(self) -> list[str]:
        """The command that runs it in one process."""
        return [self.python, *self.target, *self.arguments]

    @property
    def title(self) -> str:
        """Its name for a job: lower-case letters, digits and dashes."""
        name = Path(self.target[-1]).stem if len(self.target) == 1 else self.target[-1].rpartition(".")[2]
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "train"

    def under(self, *module: str) -> list[str]:
        """Return the command that passes it to a Python module that starts programs, such as torchrun."""
        return [self.python, "-m", *module, *self.target, *self.arguments]


@frozen
class Start:
    """A command, and the variables that it adds to the environment."""

    words: list[str]
    variables: Mapping[str, str]


def program(
    script: str | None, module: str | None, arguments: list[str], variables: Mapping[str, str], python: str | None
) -> Program:
    """Return the program that the command line names.

    Raises:
        ConfigError: it names none, or both a script and a module.
    """
    if script is not None and module is not None:
        raise ConfigError(
            f"the script {script!r} and -m {module} are set", expected="one of them",
            do="pass arguments of the program after `--`",
        )  # fmt: skip
    if script is None and module is None:
        raise ConfigError(
            "no script is named", expected="a Python file, or -m and a module", do="write `stratagem run train.py`"
        )
    target = (str(script),) if module is None else ("-m", module)
    return Program(python or sys.executable, target, tuple(arguments), variables)


def check_exists(program: Program) -> None:
    """Check that the script or module is on this machine.

    Raises:
        ConfigError: it is not; names the nearest file.
    """
    name = program.target[-1]
    if len(program.target) > 1:
        _check_module(name)
    elif not (path := Path(name)).exists():
        files = sorted(each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ConfigError(f"script {name!r} does not exist", do=nearest(path.name, files) or "check the path")
    elif path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"{name!r} is a folder without __main__.py", expected="a Python script", do="check the path")


def _check_module(name: str) -> None:
    package = name.partition(".")[0]
    sys.path.insert(0, "")
    try:
        found = bool(package) and importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.remove("")
    if not found:
        raise ConfigError(
            f"-m is {name!r} and there is no module {package!r}", expected="a module that Python finds",
            do="write it with dots and without .py, or pass the path of the script without -m",
        )  # fmt: skip


def variables_of(texts: list[str]) -> dict[str, str]:
    """Return the variables of ``--env NAME=VALUE`` options.

    Raises:
        ConfigError: one is not of that form.
    """
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"--env is {text!r}", expected="NAME=VALUE", do=f"write --env {name or 'NAME'}=VALUE")
        variables[name] = value
    return variables
