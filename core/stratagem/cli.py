"""The `stratagem` program: it runs the subcommands of installed packages."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from stratagem._version import __version__
from stratagem.discovery import catalog, registry
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import StratagemError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 0 done, 1 error (one sentence on stderr)."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = parser(arguments).parse_args(arguments)
        code = int(parsed.act(parsed))
        if sys.stdout is not None:
            sys.stdout.flush()  # a closed pipe raises here, not while the interpreter ends
        return code
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return _READER_LEFT
    except StratagemError as error:
        from stratagem.distributed.process_variables import REPORTS_VARIABLE

        if REPORTS_VARIABLE in os.environ:  # a launcher started this process, and prints the error
            raise
        # The notes are the traceback of a process that failed.
        print(f"stratagem: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


#: 128 + SIGPIPE: the exit code of a program whose output pipe was closed, as in `stratagem schema | head`.
_READER_LEFT = 141


def _reader_has_left() -> bool:
    """Whether the pipe of standard output is closed; if so, redirect standard output to the null device."""
    try:
        number = sys.stdout.fileno()
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            return False
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    except (OSError, ValueError, AttributeError):
        return False
    return True


def parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the program's parser: with every subcommand, or with those that it needs to parse `arguments`.

    Raises:
        StratagemError: the subcommand that `arguments` call is not installed, or cannot be imported.
    """
    program = argparse.ArgumentParser(prog="stratagem", description="Train PyTorch models; every part is a plugin.")
    program.add_argument("--version", action="version", version=f"stratagem {__version__}")
    commands = program.add_subparsers(metavar="COMMAND", required=True)
    groups = {"": commands}
    for group, help_text in GROUPS.items():
        groups[group] = commands.add_parser(group, help=help_text).add_subparsers(metavar="ACTION", required=True)
    _add_discovered(groups, arguments)
    return program


#: Groups of subcommands, with their help: the entry point ``plugins.check`` is ``stratagem plugins check``.
GROUPS = {"plugins": "list the installed plugins, show one"}


def _add_discovered(groups: dict[str, Any], arguments: Sequence[str] | None) -> None:
    """Add the subcommands of installed packages: all, or those that `arguments` call or list with ``--help``."""
    words = [word for word in arguments or () if not word.startswith("-")]
    names = sorted({entry.name for entry in registry.entries("command")})
    for name in names:
        group, _, word = name.rpartition(".")
        path = [*filter(None, [group]), word]
        is_called = path == words[: len(path)]
        if group in groups and (arguments is None or is_called or path[:-1] == words):
            _add_command(groups[group], name, word, is_called, is_listed=arguments is not None and not is_called)
    if words:
        _check_known(words, groups, names)


def _add_command(group: Any, name: str, word: str, is_called: bool, *, is_listed: bool) -> None:
    """Add one subcommand. If it is broken, its help says why, and calling it is an error.

    Args:
        is_listed: only its name and help are needed: they are read from its source, if that has them.
    """
    try:
        entry = registry.find("command", name)
        if is_listed and (help_text := command_help(entry)):
            group.add_parser(word, help=help_text)
            return
        command = entry.load()()
    except StratagemError as error:
        if is_called:
            raise
        group.add_parser(word, help=str(error).replace("%", "%%"))
        return
    parser = group.add_parser(word, help=command.help, description=command.help)
    command.add_arguments(parser)
    parser.set_defaults(act=command.run)


def command_help(entry: registry.Entry) -> str:
    """Return the attribute `help` of the command of `entry`; "" if its source does not have it as one string."""
    body = registry.definition(entry).partition("\nclass ")[0]
    found = re.search(r'^    help = "([^"\\\n]*)"$', body, re.MULTILINE)
    return found[1] if found else ""


def _check_known(words: Sequence[str], groups: dict[str, Any], names: Sequence[str]) -> None:
    """Refuse a subcommand that is not installed; name the package that provides it, or the nearest name."""
    group = words[0] if words[0] in groups and len(words) > 1 else ""
    start = f"{group}." if group else ""
    word = words[1] if group else words[0]
    installed = {*groups[group].choices, *_within(group, names)}
    if word in installed:
        return
    title, provided = repr(f"{group} {word}".strip()), catalog.providers("command")
    if any(entry.name == start + word for entry in registry.entries("command", hidden=True)):
        raise StratagemError(f"command {title} is hidden by {registry.DENY_VARIABLE}", do="change that variable")
    if start + word in provided:
        raise StratagemError(f"command {title} is not installed", do=catalog.how_to_install(provided[start + word]))
    hint = nearest(word, [*installed, *_within(group, provided)])
    raise StratagemError(f"command {title} is unknown", expected=", ".join(sorted(installed)), do=hint)


def _within(group: str, names: Iterable[str]) -> list[str]:
    """Return the last words of those `names` that are in `group`."""
    return [word for head, _, word in (name.rpartition(".") for name in names) if head == group]
