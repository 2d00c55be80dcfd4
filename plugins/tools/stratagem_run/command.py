"""The command ``stratagem run``: read its options, then start the script or submit it."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import attrs

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_run.launchers import LAUNCHERS, choose
from stratagem_run.options import build, declare
from stratagem_run.program import Program, Start, check_exists, program, variables_of
from stratagem_run.targets import TARGETS, target_of

_EPILOG = """\
Everything after `--` is passed to the script. The names in brackets are the launchers, or targets of --submit, that
have an option; elsewhere it is an error.
"""

_CLASSES = {f"--launcher {name}": cls for name, cls in LAUNCHERS.items()} | {
    f"--submit {name}": cls for name, cls in TARGETS.items()
}
#: Fields of classes; what remains of the namespace are options of the command itself.
_FIELDS = frozenset(name for cls in _CLASSES.values() for name in attrs.fields_dict(cls))


class Run(Command):
    """Starts a script on several devices and nodes with the launcher of the machine, or submits it to a scheduler."""

    help = "start a script on several devices and nodes, or submit it to SLURM, Kubernetes or LSF"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = _EPILOG
        parser.usage = f"{parser.prog} (SCRIPT | -m MODULE) [--nodes N] [--devices N] [options] [-- script arguments]"
        parser.allow_abbrev, parser.exit_on_error = False, False
        parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the Python file to run")
        parser.add_argument("-m", dest="module", metavar="MODULE", help="run this module, as `python -m` does")
        parser.add_argument("--dry", action="store_true", help="print the command, script or manifest; start nothing")
        parser.add_argument(
            "--env", action="append", default=[], metavar="NAME=VALUE", help="export it to all processes"
        )
        parser.add_argument("--python", metavar="PROGRAM", help="the interpreter (default: this one)")
        for name, known in (("launcher", ("auto", *LAUNCHERS, "jsrun")), ("submit", tuple(TARGETS))):
            action = parser.add_argument(f"--{name}", metavar="NAME", help=", ".join(known))
            action.completions = known  # type: ignore[attr-defined]  # read by `stratagem completion`
        declare(parser.add_argument_group("options of launchers and targets"), {**LAUNCHERS, **TARGETS})  # type: ignore[arg-type]
        # argparse would take arguments of the script for its own, and end the program with its usage.
        parser.parse_known_args = _Reader(parser)  # type: ignore[method-assign, assignment]

    def run(self, arguments: argparse.Namespace) -> int:
        given = {name: value for name, value in vars(arguments).items() if name in _FIELDS - {"launcher"}}
        variables = variables_of(arguments.env)
        started = program(arguments.script, arguments.module, arguments.words, variables, arguments.python)
        if arguments.submit is not None:
            return _submit(arguments, given, started)
        check_exists(started)
        cls, reason = choose(arguments.launcher or "auto", given, os.environ)
        launcher = build(cls, given, f"--launcher {cls.title}", _CLASSES)
        start = launcher.start(started, os.environ)
        line = _readable(shell_line(start)) if arguments.dry else ""
        print(f"stratagem run: {cls.title} ({reason})", file=sys.stderr)
        if arguments.dry:
            print(line)
            return 0
        return execute(start)


def _submit(arguments: argparse.Namespace, given: Mapping[str, object], started: Program) -> int:
    cls = target_of(arguments.submit)
    options = dict(given) if arguments.launcher is None else {**given, "launcher": arguments.launcher}
    target = build(cls, options, f"--submit {arguments.submit}", _CLASSES)
    program = target.program(started, python_given=arguments.python is not None)
    text = _readable(target.render(program))
    if arguments.dry:
        print(text, end="")
        return 0
    return target.submit(text)


def _readable(text: str) -> str:
    """Return `text`, which is printed or sent to a scheduler.

    Raises:
        ConfigError: an argument has bytes that are not UTF-8; the program could get them, a file of text cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"an argument or variable has the byte {ord(text[error.start]) - 0xDC00:#x}", expected="text in UTF-8",
            do="pass the path of a file that contains it",
        ) from None  # fmt: skip
    return text


# --- Reading the command line ------------------------------------------------------------------------------------


class _Reader:
    """Parses the words after ``stratagem run``: its own options up to ``--``, then the arguments of the script."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def __call__(
        self, words: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        own = list(words)
        at = own.index("--") if "--" in own else len(own)
        try:
            found, extra = argparse.ArgumentParser.parse_known_args(self.parser, own[:at], namespace)
        except argparse.ArgumentError as error:
            raise ConfigError(
                f"{error.argument_name} cannot be read: {error.message}", do="run `stratagem run --help`"
            ) from None
        if extra:
            raise self._unknown(extra[0])
        found.words = own[at + 1 :]
        return found, []

    def _unknown(self, word: str) -> ConfigError:
        known = [string for action in self.parser._actions for string in action.option_strings if len(string) > 2]
        close = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)
        hint = f"did you mean {close[0]!r}" if close else ""
        return ConfigError(
            f"{word!r} is not an option of stratagem run", expected="arguments of the script after `--`",
            do=hint or f"write `stratagem run SCRIPT [options] -- {word} ...` if it is one of the script's",
        )  # fmt: skip


# --- Running -----------------------------------------------------------------------------------------------------


def shell_line(start: Start) -> str:
    """Return the command as a line for a shell."""
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in start.variables.items()), shlex.join(start.words)]
    )


def execute(start: Start) -> int:
    """Replace this process by the command, which so gets signals and the terminal, and whose exit code is this one's.

    Raises:
        ConfigError: the program does not exist.
    """
    print(f"+ {shell_line(start)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    try:
        os.execvpe(start.words[0], start.words, {**os.environ, **start.variables})  # noqa: S606 - the user's command
    except OSError as error:
        raise ConfigError(f"{start.words[0]} cannot be run ({error.strerror})", do="check --python") from error
