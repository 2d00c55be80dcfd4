"""``stratagem doctor`` and ``stratagem plugins``, with ``list``, ``show``, ``new`` and others: arguments and printing.

The other modules are imported in `run`, because `stratagem --help` does not need them.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from stratagem import Command
from stratagem.discovery import registry
from stratagem.errors import StratagemError, nearest


class Doctor(Command):
    """The command ``stratagem doctor``."""

    help = "check the installation: versions, devices, plugins, and a two-process gloo run"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--machine", action="store_true", help="add the output of torch.utils.collect_env (takes seconds)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_devtools.doctor import examine, render

        report = examine(machine=arguments.machine)
        print(json.dumps(report, indent=2, ensure_ascii=False) if arguments.json else render(report))
        return int(bool(report["problems"]))


class List(Command):
    """The command ``stratagem plugins list``."""

    help = "list the installed plugins by kind (imports none of them)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kind", help=f"only this kind: {', '.join(registry.kind_names())}")
        parser.add_argument(
            "--presets", action="store_true", help="a row for each preset: a name for another's options"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_devtools.plugin_table import plugin_table, row

        entries = registry.entries(_known_kind(arguments.kind))
        if arguments.json:
            print(json.dumps([row(entry) for entry in entries], indent=2))
        elif entries:
            print(plugin_table(entries, presets=arguments.presets))
        else:
            print("no plugins are installed; `pip install stratagem-basics stratagem-ddp ...` adds some")
        return 0


class Show(Command):
    """The command ``stratagem plugins show``."""

    help = "show one plugin: options, capabilities, hooks"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", help="the name, or distribution:name")
        parser.add_argument("--kind", help="the kind, if several kinds have a plugin of that name")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_devtools.descriptions import describe, render

        description = describe(_find(arguments.name, arguments.kind))
        print(json.dumps(description, indent=2) if arguments.json else render(description))
        return 0


class New(Command):
    """The command ``stratagem plugins new``."""

    help = "write the package of a new plugin: a small working example to change"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", metavar="KIND", help=", ".join([*registry.kinds(), "command"]))
        parser.add_argument("name", metavar="NAME", help="name of the plugin, such as my_idea")
        parser.add_argument("--into", metavar="FOLDER", default=".", help="where to write it (default: here)")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_devtools.scaffold import write

        folder = write(arguments.kind, arguments.name, Path(arguments.into))
        print(f"wrote {folder}; next: cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest")
        return 0


class Check(Command):
    """The command ``stratagem plugins check``."""

    help = "load every plugin, or test one with the conformance kit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "name", nargs="?", help="plugin to test with the conformance kit: name, or distribution:name"
        )
        parser.add_argument("--kind", help="kind of the plugin, if several kinds have that name")
        parser.add_argument("--world-sizes", type=int, nargs="+", metavar="N", help="numbers of processes")
        parser.add_argument(
            "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the plugin; may be repeated"
        )
        parser.add_argument(
            "--tolerance", type=float, metavar="X", help="largest relative difference from plain training"
        )
        parser.add_argument(
            "--full-trace", action="store_true", help="show all frames of tracebacks, and what the checks print"
        )
        parser.add_argument(
            "--write", type=Path, metavar="README", help="write the result into this file, which the wheel carries"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from stratagem_devtools.plugin_table import row
        from stratagem_plugin_checks import check_entry

        if arguments.write is not None and arguments.name is None:
            raise StratagemError("--write is given without a name", expected="the plugin to check")
        if arguments.write is not None and not arguments.write.is_file():
            raise StratagemError(
                f"--write is {arguments.write}, which is not a file", expected="the package's README.md"
            )
        if arguments.name is not None:
            return _check_one(_find(arguments.name, arguments.kind), arguments)
        rows = [{**row(entry), "problem": check_entry(entry)} for entry in registry.entries()]
        if arguments.json:
            print(json.dumps(rows, indent=2))
        else:
            for each in rows:
                print(f"{each['kind']} {each['name']}: {each['problem'] or 'loads'}")
            broken = sum(bool(each["problem"]) for each in rows)
            print(
                f"{len(rows)} plugins: {len(rows) - broken} load, {broken} do not. Each was imported and its options "
                "and hooks were looked at; `stratagem plugins check NAME` trains with one in the conformance kit."
            )
        return int(any(each["problem"] for each in rows))


def _check_one(entry: registry.Entry, arguments: argparse.Namespace) -> int:
    try:
        from stratagem_testing.command import check
    except ModuleNotFoundError as error:
        raise StratagemError(
            f"the conformance kit needs {error.name}", do="run `pip install stratagem-testing`"
        ) from None
    if arguments.world_sizes and min(arguments.world_sizes) < 1:
        raise StratagemError(f"--world-sizes is {arguments.world_sizes}", expected="numbers of processes, at least 1")
    attributes: dict[str, Any] = {}
    if arguments.world_sizes:
        attributes["world_sizes"] = tuple(arguments.world_sizes)
    if arguments.tolerance is not None:
        attributes["tolerance"] = arguments.tolerance
    options = dict(map(_option, arguments.option))
    rows = check(entry, options, quiet=arguments.json, full_trace=arguments.full_trace, **attributes)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    if arguments.write is not None:
        from stratagem_devtools.conformance_results import write

        write(arguments.write, entry, rows)
    return int(not rows or any(each["outcome"] == "failed" for each in rows))


def _option(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise StratagemError(f"--option is {text!r}", expected="NAME=VALUE")
    return name, yaml.safe_load(value)


class Matrix(Command):
    """The command ``stratagem plugins matrix``."""

    help = "show which plugins can be combined, and why others cannot"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--html", metavar="FILE", help="write a page to FILE")
        parser.add_argument(
            "--presets", action="store_true", help="include presets (names for a strategy with preset options)"
        )
        parser.add_argument("--accelerator", default="cpu", help="accelerator to resolve for (default cpu)")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        import attrs

        from stratagem_devtools.matrix import cells, render_html, render_markdown, summary

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


# --- Which plugin -----------------------------------------------------------------------------------------------------


def _find(name: str, kind: str | None) -> registry.Entry:
    """Return the installed plugin of that name, of any kind if `kind` is None.

    Raises:
        StratagemError: there is no such kind; no plugin, or plugins of several kinds, have that name.
    """
    if (kind := _known_kind(kind)) is not None:
        return registry.find(kind, name)
    wanted = name.lower()
    everything = registry.entries()
    kinds = [entry.kind for entry in everything if entry.is_called(wanted)]
    if len(set(kinds)) > 1:
        raise StratagemError(f"{name!r} is the name of a {' and of a '.join(kinds)}", do=f"add --kind {kinds[0]}")
    if kinds:
        return registry.find(kinds[0], name)
    hint = nearest(name, [entry.name for entry in everything])
    raise StratagemError(
        f"no installed plugin is called {name!r}",
        do=hint or "run `stratagem plugins list`; install your own first, such as with `pip install -e FOLDER`",
    )


def _known_kind(kind: str | None) -> str | None:
    """Return `kind`.

    Raises:
        StratagemError: there is no such kind of plugin.
    """
    known = [*registry.kind_names(), "command"]
    if kind is None or kind in known:
        return kind
    raise StratagemError(f"kind {kind!r} is unknown", expected=", ".join(known), do=nearest(kind, known))
