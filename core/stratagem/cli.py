"""The `stratagem` program: list, show, check and begin plugins, and run the subcommands that packages bring."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from stratagem._version import __version__
from stratagem.api.kinds import KINDS
from stratagem.distributed.process_variables import REPORTS_VARIABLE
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import StratagemError, nearest
from stratagem.stack import registry


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 0 done, 1 error (one sentence on stderr)."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = parser(arguments).parse_args(arguments)
        code = int(parsed.act(parsed))
        if sys.stdout is not None:
            sys.stdout.flush()  # a reader that has left is noticed here, not while the interpreter ends
        return code
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        return _READER_LEFT
    except StratagemError as error:
        if REPORTS_VARIABLE in os.environ:  # a launcher started this process, and shows what ended it
            raise
        # The notes are the traceback of a process that failed.
        print(f"stratagem: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


#: 128 + SIGPIPE: what a shell says of other programs whose reader left, as in `stratagem schema | head`.
_READER_LEFT = 141


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more; what is still to be written goes nowhere then."""
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


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the program's parser: with every subcommand, or of installed packages' only the one in `arguments`."""
    program = argparse.ArgumentParser(prog="stratagem", description="Train PyTorch models; every part is a plugin.")
    program.add_argument("--version", action="version", version=f"stratagem {__version__}")
    commands = program.add_subparsers(metavar="COMMAND", required=True)
    _add_plugins(commands)
    _add_explain(commands)
    _add_doctor(commands)
    _add_discovered(commands, arguments)
    return program


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what is here, what is broken, and a run of two processes")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(act=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from stratagem.devtools.doctor import examine, render

    report = examine()
    print(json.dumps(report, indent=2, ensure_ascii=False) if arguments.json else render(report))
    return int(bool(report["problems"]))


def _add_discovered(commands: Any, arguments: Sequence[str]) -> None:
    """Add the subcommands of installed packages; only the one that is called is imported."""
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for entry in registry.entries("command"):
        if called is not None and called != entry.name:
            continue
        command = entry.load()()
        parser = commands.add_parser(entry.name, help=command.help, description=command.help)
        command.add_arguments(parser)
        parser.set_defaults(act=command.run)


# --- stratagem plugins -------------------------------------------------------------------------------------------


def _add_plugins(commands: Any) -> None:
    parser = commands.add_parser("plugins", help="what is installed, and what it offers")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the installed plugins, by kind (imports none of them)")
    listing.add_argument("--kind", help=f"only this kind: {', '.join(KINDS)}")
    listing.add_argument("--json", action="store_true", help="for programs")
    listing.set_defaults(act=_list)
    show = actions.add_parser("show", help="one plugin: options, capabilities, hooks")
    show.add_argument("name", help="the name, or distribution:name")
    show.add_argument("--kind", help="where several kinds have a plugin of that name")
    show.add_argument("--json", action="store_true", help="for programs")
    show.set_defaults(act=_show)
    check = actions.add_parser("check", help="load every plugin; or prove one correct with the conformance kit")
    check.add_argument("name", nargs="?", help="run the conformance kit on this one: the name, or distribution:name")
    check.add_argument("--kind", help="where several kinds have a plugin of that name")
    check.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of processes")
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(act=_check)
    matrix = actions.add_parser("matrix", help="which plugins go together, and why others do not")
    matrix.add_argument("--html", metavar="FILE", help="write a page to FILE")
    matrix.add_argument("--presets", action="store_true", help="with strategies that are another one with options set")
    matrix.add_argument("--accelerator", default="cpu", help="the device to resolve for (default cpu)")
    matrix.add_argument("--json", action="store_true", help="for programs")
    matrix.set_defaults(act=_matrix)
    new = actions.add_parser("new", help="write the package of a new plugin: complete, small, working, to be changed")
    new.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    new.add_argument("name", metavar="NAME", help="what users will call it, such as my_idea")
    new.add_argument("--into", metavar="FOLDER", default=".", help="where to write it; here if not given")
    new.set_defaults(act=_new)


def _matrix(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    import attrs

    from stratagem.devtools.matrix import cells, render_html, render_markdown, summary

    table = cells(arguments.accelerator, arguments.presets)
    if arguments.html is not None:
        try:
            Path(arguments.html).write_text(render_html(table), encoding="utf-8")
        except OSError as error:
            raise StratagemError(f"{arguments.html} could not be written ({error.strerror})") from error
        print(f"{summary(table)} Written to {arguments.html}.")
    elif arguments.json:
        print(json.dumps([attrs.asdict(cell) for cell in table], indent=2))
    else:
        print(render_markdown(table))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    import shlex
    from pathlib import Path

    from stratagem.devtools.scaffold import write

    folder = write(arguments.kind, arguments.name, Path(arguments.into))
    print(f"wrote {folder}; next: cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from stratagem.stack.describe import check_entry

    if arguments.name is not None:
        return _check_one(_find_anywhere(arguments.name, _kind(arguments.kind)), arguments)
    rows = [{**_row(entry), "problem": check_entry(entry)} for entry in registry.entries()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['kind']} {row['name']}: {row['problem'] or 'ok'}")
    return int(any(row["problem"] for row in rows))


def _check_one(entry: registry.Entry, arguments: argparse.Namespace) -> int:
    try:
        from stratagem_testing.command import check
    except ModuleNotFoundError as error:
        raise StratagemError(
            f"the conformance kit needs {error.name}", do="run `pip install stratagem-testing`"
        ) from None
    if min(arguments.world_sizes) < 1:
        raise StratagemError(f"--world-sizes is {arguments.world_sizes}", expected="numbers of processes, at least 1")
    rows = check(entry, arguments.world_sizes, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    return int(not rows or any(row["outcome"] == "failed" for row in rows))


# --- stratagem explain -------------------------------------------------------------------------------------------


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser("explain", help="show what a script would run, without starting a process")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(act=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    import runpy

    os.environ["STRATAGEM_EXPLAIN"] = "json" if arguments.json else "text"
    sys.argv = [arguments.script, *arguments.arguments]
    if not os.path.exists(arguments.script):
        raise StratagemError(f"script {arguments.script!r} does not exist", do="check the path")
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        del os.environ["STRATAGEM_EXPLAIN"]
    raise StratagemError(f"{arguments.script} ended without launching a run", expected="a fit, or Run.launch")


def _list(arguments: argparse.Namespace) -> int:
    kind = _kind(arguments.kind)
    entries = registry.entries(kind)
    if arguments.json:
        rows = [_row(entry) for entry in entries]
        print(json.dumps(rows, indent=2))
        return 0
    if not entries:
        print("no plugins are installed; `pip install stratagem-ddp stratagem-precision ...` adds some")
        return 0
    width = max(len(entry.name) for entry in entries)
    current = None
    for entry in entries:
        if entry.kind != current:
            current = entry.kind
            print(f"{current}:")
        print(f"  {entry.name:<{width}}  {entry.distribution} {entry.version}")
    return 0


def _row(entry: registry.Entry) -> dict[str, str]:
    return {
        "kind": entry.kind, "name": entry.name, "distribution": entry.distribution, "version": entry.version,
        "value": entry.value,
    }  # fmt: skip


def _kind(kind: str | None) -> str | None:
    known = [*KINDS, "command"]
    if kind is None or kind in known:
        return kind
    raise StratagemError(f"kind {kind!r} is unknown", expected=", ".join(known), do=nearest(kind, known))


def _show(arguments: argparse.Namespace) -> int:
    from stratagem.stack.describe import describe, render

    kind = _kind(arguments.kind)
    description = describe(_find_anywhere(arguments.name, kind))
    print(json.dumps(description, indent=2) if arguments.json else render(description))
    return 0


def _find_anywhere(name: str, kind: str | None) -> registry.Entry:
    if kind is not None:
        return registry.find(kind, name)
    wanted = name.lower()
    everything = registry.entries()
    kinds = [e.kind for e in everything if wanted in (e.name.lower(), e.qualified_name.lower())]
    if len(set(kinds)) > 1:
        raise StratagemError(f"{name!r} is the name of a {' and of a '.join(kinds)}", do=f"add --kind {kinds[0]}")
    if kinds:
        return registry.find(kinds[0], name)
    hint = nearest(name, [entry.name for entry in everything])
    raise StratagemError(f"no installed plugin is called {name!r}", do=hint or "run `stratagem plugins list`")
