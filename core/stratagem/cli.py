"""The `stratagem` program: list and show plugins, explain a script, and run the subcommands of installed packages."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from stratagem._version import __version__
from stratagem.discovery import catalog, registry
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import StratagemError, nearest
from stratagem.stack.plugin_table import command_help


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
    groups = {"": commands, "plugins": _add_plugins(commands)}
    _add_explain(commands)
    _add_discovered(groups, arguments)
    return program


#: Commands that take subcommands of other packages: the entry point ``plugins.check`` is ``stratagem plugins check``.
GROUPS = ("plugins",)


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


def _check_known(words: Sequence[str], groups: dict[str, Any], names: Sequence[str]) -> None:
    """Refuse a subcommand that is not installed; name the package that provides it, or the nearest name."""
    group = words[0] if words[0] in groups and len(words) > 1 else ""
    start = f"{group}." if group else ""
    word = words[1] if group else words[0]
    installed = {*groups[group].choices, *_within(start, names)}
    if word in installed:
        return
    title, provided = repr(f"{group} {word}".strip()), catalog.providers("command")
    if any(entry.name == start + word for entry in registry.entries("command", hidden=True)):
        raise StratagemError(f"command {title} is hidden by {registry.DENY_VARIABLE}", do="change that variable")
    if start + word in provided:
        raise StratagemError(f"command {title} is not installed", do=f"run `pip install {provided[start + word]}`")
    hint = nearest(word, [*installed, *_within(start, provided)])
    raise StratagemError(f"command {title} is unknown", expected=", ".join(sorted(installed)), do=hint)


def _within(start: str, names: Iterable[str]) -> list[str]:
    """Return the last words of those `names` that are in the group with this `start`."""
    words = [name.removeprefix(start) for name in names if name.startswith(start)]
    return [word for word in words if "." not in word]


# --- stratagem plugins -------------------------------------------------------------------------------------------


def _add_plugins(commands: Any) -> Any:
    parser = commands.add_parser("plugins", help="list the installed plugins, show one")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the installed plugins by kind (imports none of them)")
    listing.add_argument("--kind", help=f"only this kind: {', '.join(registry.kind_names())}")
    listing.add_argument("--presets", action="store_true", help="a row for each preset: a name for another's options")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(act=_list)
    show = actions.add_parser("show", help="show one plugin: options, capabilities, hooks")
    show.add_argument("name", help="the name, or distribution:name")
    show.add_argument("--kind", help="the kind, if several kinds have a plugin of that name")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(act=_show)
    return actions


# --- stratagem explain -------------------------------------------------------------------------------------------


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser("explain", help="show what a script would run, without starting a process")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("script", help="path of the script")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # the message about a missing script must name nothing else
    parser.set_defaults(act=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    import runpy

    os.environ["STRATAGEM_EXPLAIN"] = "json" if arguments.json else "text"
    sys.argv = [arguments.script, *arguments.arguments]
    if not os.path.exists(arguments.script):
        raise StratagemError(f"script {arguments.script!r} does not exist", do="check the path")
    if os.path.isdir(arguments.script):
        raise StratagemError(f"{arguments.script!r} is a folder", expected="a Python script", do="check the path")
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        del os.environ["STRATAGEM_EXPLAIN"]
    raise StratagemError(f"{arguments.script} ended without launching a run", expected="a fit, or Run.launch")


def _list(arguments: argparse.Namespace) -> int:
    kind = known_kind(arguments.kind)
    entries = registry.entries(kind)
    if arguments.json:
        rows = [row(entry) for entry in entries]
        print(json.dumps(rows, indent=2))
        return 0
    if not entries:
        print("no plugins are installed; `pip install stratagem-basics stratagem-ddp ...` adds some")
        return 0
    from stratagem.stack.plugin_table import plugin_table

    print(plugin_table(entries, presets=arguments.presets))
    return 0


def row(entry: registry.Entry) -> dict[str, str]:
    """Return the row of `stratagem plugins list --json` for one plugin."""
    return {
        "kind": entry.kind, "name": entry.name, "distribution": entry.distribution, "version": entry.version,
        "value": entry.value,
    }  # fmt: skip


def known_kind(kind: str | None) -> str | None:
    """Return `kind`.

    Raises:
        StratagemError: there is no such kind of plugin.
    """
    known = [*registry.kind_names(), "command"]
    if kind is None or kind in known:
        return kind
    raise StratagemError(f"kind {kind!r} is unknown", expected=", ".join(known), do=nearest(kind, known))


def _show(arguments: argparse.Namespace) -> int:
    from stratagem.stack.describe import describe, render

    kind = known_kind(arguments.kind)
    description = describe(find_anywhere(arguments.name, kind))
    print(json.dumps(description, indent=2) if arguments.json else render(description))
    return 0


def find_anywhere(name: str, kind: str | None) -> registry.Entry:
    """Return the installed plugin of that name, of any kind if `kind` is None.

    Raises:
        StratagemError: no plugin, or plugins of several kinds, have that name.
    """
    if kind is not None:
        return registry.find(kind, name)
    wanted = name.lower()
    everything = registry.entries()
    kinds = [entry.kind for entry in everything if entry.is_called(wanted)]
    if len(set(kinds)) > 1:
        raise StratagemError(f"{name!r} is the name of a {' and of a '.join(kinds)}", do=f"add --kind {kinds[0]}")
    if kinds:
        return registry.find(kinds[0], name)
    hint = nearest(name, [entry.name for entry in everything])
    raise StratagemError(f"no installed plugin is called {name!r}", do=hint or "run `stratagem plugins list`")
