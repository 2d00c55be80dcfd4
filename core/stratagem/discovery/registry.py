"""List the installed plugins without importing any, find one by name, load it when it is chosen.

An installed plugin is not active: its package is imported only if a run names it. The exceptions are accelerators and
environments under "auto", which are imported one by one; a broken package among them is skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.discovery import catalog
from stratagem.errors import PluginError, nearest

if TYPE_CHECKING:
    from stratagem.api.kinds import Kind

#: Comma-separated plugin or distribution names: only these are available in this process.
ALLOW_VARIABLE = "STRATAGEM_PLUGINS"
#: Comma-separated plugin or distribution names that are not available in this process.
DENY_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"


class Entry(NamedTuple):
    """An installed plugin, as described by the metadata of its package."""  # attrs takes as long to import as a scan

    kind: str
    name: str
    #: ``module:attribute``
    value: str
    distribution: str
    version: str
    #: The requirements of the distribution on the core, such as ``stratagem-core>=0.1``, as written in its metadata.
    core_requirements: tuple[str, ...] = ()

    @property
    def qualified_name(self) -> str:
        return f"{self.distribution}:{self.name}"

    def is_called(self, wanted: str) -> bool:
        """Whether `wanted`, in small letters, is the name or the qualified name."""
        return wanted == (self.qualified_name if ":" in wanted else self.name).lower()

    def load(self) -> Any:
        """Import the plugin and return its class or factory.

        Raises:
            PluginError: the package requires another version of the core, or its import fails (chained).
        """
        check_core_version(self)
        try:
            return EntryPoint(self.name, self.value, f"stratagem.{self.kind}").load()
        except (Exception, SystemExit) as error:  # a module that exits must not end the program
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.distribution} {self.version} cannot be imported "
                f"({type(error).__name__}: {error})",
                do=f"repair or uninstall {self.distribution}, or choose another {self.kind}",
            ) from error


def entries(kind: str | None = None, hidden: bool = False) -> list[Entry]:
    """Return the installed plugins (of one `kind`), sorted; with `hidden` also those that allow and deny lists hide."""
    listed = _scan() if hidden else _visible(os.environ.get(ALLOW_VARIABLE, ""), os.environ.get(DENY_VARIABLE, ""))
    return [entry for entry in listed if (entry.kind not in _NOT_CHOSEN if kind is None else entry.kind == kind)]


#: What packages have beside plugins and commands: kinds, and what ranks do before they connect.
_NOT_CHOSEN = ("kind", "meeting")


# --- Kinds -------------------------------------------------------------------------------------------------------


def kind_names() -> list[str]:
    """Return the names of the installed kinds of plugins that are not hidden, sorted; imports none."""
    return [entry.name for entry in entries("kind")]


def kinds() -> dict[str, Kind]:
    """Return the installed kinds of plugins by name, in order of their places."""
    return _kinds(os.environ.get(ALLOW_VARIABLE, ""), os.environ.get(DENY_VARIABLE, ""))


@cache
def _kinds(allow: str, deny: str) -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    # The engine's and those of the catalog first: what contradicts them is left out, as a broken package is, since a
    # run may not name either.
    ours = catalog.providers("kind")
    for entry in sorted(_visible(allow, deny), key=lambda each: ours.get(each.name, _ENGINE) != each.distribution):
        if entry.kind == "kind":
            try:
                kind = entry.load()
                _check_kind(entry, kind, found)
            except PluginError as error:
                warnings.warn(f"the program goes on without it: {error}", stacklevel=2)
            else:
                found[entry.name] = kind
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


#: The distribution of the engine's own kinds.
_ENGINE = "stratagem-core"
#: Arguments that exist, each with the distribution whose kinds may choose plugins by it.
_OWNERS: dict[str, str] = {}


def reserve(arguments: Iterable[str], owner: str) -> None:
    """Keep kinds of other distributions than `owner` from choosing plugins by one of these `arguments`."""
    _OWNERS.update(dict.fromkeys(arguments, owner) | _OWNERS)
    _kinds.cache_clear()


def _check_kind(entry: Entry, kind: Any, earlier: Mapping[str, Kind]) -> None:
    """Refuse a kind that contradicts what is known of `earlier` ones and of arguments.

    Raises:
        PluginError: names the package.
    """
    from stratagem.api import hooks, other_hooks
    from stratagem.api.kinds import Kind

    who = f"kind {entry.name!r} of {entry.distribution} {entry.version}"
    do = f"report it to its author, or uninstall {entry.distribution}"
    if not isinstance(kind, Kind) or kind.name != entry.name:
        found = f"Kind({kind.name!r}, ...)" if isinstance(kind, Kind) else repr(kind)
        raise PluginError(f"{who} is {found}", expected=f"stratagem.api.Kind({entry.name!r}, ...)", do=do)
    if entry.name in earlier:
        raise PluginError(f"{who} is also the kind of another package", expected="one package for a kind", do=do)
    others = {each.argument for each in earlier.values()}
    if kind.argument in others or _OWNERS.get(kind.argument, entry.distribution) != entry.distribution:
        raise PluginError(f"{who} has the argument {kind.argument!r}, which exists already", do=do)
    modules = (other_hooks, hooks, *(each.hooks for each in earlier.values()))
    if twice := sorted({name for each in modules for name in hooks_in(each)} & hooks_in(kind.hooks).keys()):
        raise PluginError(f"{who} adds the hook {twice[0]!r}, which exists already", do=do)


def hooks_in(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of `module` that specify hooks, by name; none for None."""
    found = {} if module is None else vars(module)
    return {name: value for name, value in found.items() if hasattr(value, "stratagem_spec")}


def arguments() -> dict[str, str]:
    """Return the arguments that choose plugins, each with the kind that it chooses."""
    return {kind.argument: kind.name for kind in kinds().values()}


def argument_of(kind: str) -> str:
    """Return the argument that chooses plugins of `kind`."""
    found = kinds().get(kind)
    return kind if found is None else found.argument


def dotted() -> tuple[str, ...]:
    """Return the kinds whose options can be set by a dotted name."""
    return tuple(kind.name for kind in kinds().values() if kind.dotted)


# --- Plugins -----------------------------------------------------------------------------------------------------


def refresh() -> None:
    """Clear the caches of discovery, after packages were installed or removed while this process runs."""
    global _generation
    _generation += 1
    _scan.cache_clear()
    _visible.cache_clear()
    _named.cache_clear()
    _kinds.cache_clear()


def generation() -> int:
    """Return how often `refresh` was called: a key for caches of values that depend on the installed plugins."""
    return _generation


_generation = 0


def find(kind: str, name: str) -> Entry:
    """Return the installed plugin of `kind` called `name` (any case, or ``distribution:name``).

    Raises:
        PluginError: no package, or more than one, provides `name`.
    """
    wanted = name.lower()
    lists = os.environ.get(ALLOW_VARIABLE, ""), os.environ.get(DENY_VARIABLE, "")
    matches = _named(*lists).get((kind, wanted), [])
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = " or ".join(repr(entry.qualified_name) for entry in matches)
        raise PluginError(
            f"{kind} {name!r} is provided by {' and '.join(entry.distribution for entry in matches)}",
            expected="one package that provides that name",
            do=f"write {choices}, or uninstall one of them",
        )
    raise _unknown(kind, wanted, name)


def _unknown(kind: str, wanted: str, name: str) -> PluginError:
    installed = [entry.name for entry in entries(kind)]
    hidden = [entry for entry in _scan() if entry.kind == kind and entry.name.lower() == wanted]
    if hidden:
        return PluginError(f"{kind} {name!r} is hidden by {hidden_by(hidden[0])}", do="change that variable")
    known = {other.lower(): package for other, package in catalog.providers(kind).items()}
    if package := known.get(wanted):
        return PluginError(f"{kind} {name!r} is not installed", do=catalog.how_to_install(package))
    others = (entry.kind for entry in entries() if entry.name.lower() == wanted and entry.kind in kinds())
    elsewhere = next(others, "")
    near = nearest(name, [*installed, *known])
    # Comm hook "fp16" is not a precision.
    is_ours = kind != "precision" and any(other.startswith(wanted) for other in (*installed, *known))
    instead = catalog.moved(wanted) or (f'use {argument_of(elsewhere)}="{wanted}"' if elsewhere else "")
    if instead and not is_ours:
        return PluginError(f"{kind} {name!r} is unknown", do=instead)
    listing = ", ".join(sorted(installed)) or "none; see `pip install stratagem-...` in the README"
    return PluginError(f"{kind} {name!r} is unknown", expected=f"one of those installed: {listing}", do=near)


@cache
def _scan() -> tuple[Entry, ...]:
    found: dict[tuple[str, str], Entry] = {}
    for distribution in distributions():
        for entry in _entries_of(distribution):
            # The first one on the path is used, as in an import. An editable install may have its metadata twice.
            found.setdefault((entry.kind, entry.qualified_name), entry)
    return tuple(sorted(found.values(), key=lambda entry: (entry.kind, entry.name, entry.distribution)))


def _entries_of(distribution: Distribution) -> list[Entry]:
    """Return the plugins of `distribution`; for one without plugins only its entry points are read, not parsed."""
    text = distribution.read_text("entry_points.txt") or ""
    if "stratagem." not in text:
        return []
    points = [point for point in distribution.entry_points if point.group.startswith("stratagem.")]
    if not points:
        return []
    name, version, requirements = _headers(distribution)
    core = tuple(filter(_NAMES_CORE.match, requirements))
    return [
        Entry(
            kind=point.group.removeprefix("stratagem."), name=point.name, value=point.value,
            distribution=name, version=version, core_requirements=core,
        )
        for point in points
    ]  # fmt: skip


def _headers(distribution: Distribution) -> tuple[str, str, list[str]]:
    """Return name, version and requirements of `distribution`.

    importlib.metadata would parse the file, with its long description, as an e-mail for each of the three.
    """
    headers = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    found: dict[str, list[str]] = {}
    for key, value in _HEADER.findall(headers):
        found.setdefault(key.lower(), []).append(value.strip())
    if "name" not in found or "version" not in found:  # another form of metadata, such as an .egg-info
        return distribution.name, distribution.version, distribution.requires or []
    return found["name"][0], found["version"][0], found.get("requires-dist", [])


_HEADER = re.compile(r"^(Name|Version|Requires-Dist):(.*)$", re.IGNORECASE | re.MULTILINE)


#: Matches a requirement on the core, or on what has the core's version and names that plugins import. It is parsed when
#: the plugin is loaded, so that listing imports no parser.
_NAMES_CORE = re.compile(r"stratagem([-_.](core|trainer))?(?![-.\w])", re.IGNORECASE)
#: The two orders in which builders write the form that most packages use.
_PLAIN = re.compile(r"stratagem(?:-core|-trainer)?(?:>=(\d+)\.(\d+),<(\d+)\.(\d+)|<(\d+)\.(\d+),>=(\d+)\.(\d+))")


@cache
def _visible(allow: str, deny: str) -> tuple[Entry, ...]:
    """Return the installed plugins that the allow and deny lists of the environment do not hide."""
    allowed, denied = _names(allow), _names(deny)
    found = []
    for entry in _scan():
        # A kind may be called as a plugin or a command is: a list means those.
        titles = {entry.distribution.lower(), entry.qualified_name.lower()} if entry.kind == "kind" else _titles(entry)
        # The allow list limits runs. Commands and kinds stay available, to find out what a run lacks.
        if not titles & denied and (not allowed or titles & allowed or entry.kind in ("command", "kind")):
            found.append(entry)
    return tuple(found)


@cache
def _named(allow: str, deny: str) -> dict[tuple[str, str], list[Entry]]:
    """Return the plugins of `_visible` by kind and each of their names, in small letters."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in _visible(allow, deny):
        for name in (entry.name, entry.qualified_name):
            found.setdefault((entry.kind, name.lower()), []).append(entry)
    return found


def hidden_by(entry: Entry) -> str:
    """Return the variable that hides `entry`: the deny list if it names it, else the allow list, which does not."""
    return DENY_VARIABLE if _titles(entry) & _names(os.environ.get(DENY_VARIABLE, "")) else ALLOW_VARIABLE


def list_remarks() -> list[str]:
    """Return a sentence for each name in the allow and deny lists that no installed plugin and no package has."""
    remarks = []
    for variable in (ALLOW_VARIABLE, DENY_VARIABLE):
        if listed := _names(os.environ.get(variable, "")):
            known = {title for entry in _scan() for title in _titles(entry)}
            for name in sorted(listed - known):
                hint = nearest(name, known)
                remarks.append(f"{variable} names {name!r}, which is not installed" + (f"; {hint}" if hint else ""))
    return remarks


def _titles(entry: Entry) -> set[str]:
    return {entry.name.lower(), entry.distribution.lower(), entry.qualified_name.lower()}


def _names(text: str) -> set[str]:
    return {name.strip().lower() for name in text.split(",") if name.strip()}


@cache
def check_core_version(entry: Entry) -> None:
    """Refuse a plugin whose package requires another version of the core.

    Raises:
        PluginError: names both versions.
    """
    from stratagem._version import __version__

    needs = f"{entry.kind} {entry.name!r} of {entry.distribution} {entry.version} needs"
    do = f"install another version of {entry.distribution} or of stratagem"
    for requirement in entry.core_requirements:
        try:
            unmet = _unmet(requirement, __version__)
        except ValueError:
            expected = "a requirement such as 'stratagem-core>=0.1'"
            raise PluginError(f"{needs} {requirement!r}", expected=expected, do=do) from None
        if unmet:
            raise PluginError(f"{needs} stratagem {unmet} and this is {__version__}", do=do)


@cache
def _unmet(requirement: str, version: str) -> str:
    """Return the versions that `requirement` allows (``>=0.1``) if `version` is not one of them; otherwise ""."""
    # Importing `packaging` takes a fifth of the time of a first `Trainer`.
    if (found := _PLAIN.fullmatch(requirement)) and (here := re.match(r"(\d+)\.(\d+)(\.\d+)*$", version)):
        numbers = [int(each) for each in found.groups() if each is not None]
        low, high = (numbers[:2], numbers[2:]) if found[1] else (numbers[2:], numbers[:2])
        if low <= [int(here[1]), int(here[2])] < high:
            return ""
    from packaging.requirements import Requirement
    from packaging.version import Version

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return ""
    # A development version or a release candidate of 0.2 counts as 0.2.
    fits = parsed.specifier.contains(Version(version).base_version, prereleases=True)
    return "" if fits else str(parsed.specifier)


# --- The source of a plugin that is not imported ----------------------------------------------------------------------


def definition(entry: Entry) -> str:
    """Return the source from the class or function of `entry` on; "" if it is not found."""
    module, _, name = entry.value.partition(":")
    for _ in range(4):  # modules, from the one that an entry point names to the one that defines its class
        source = _source(module)
        if found := re.search(rf"^(class|def) {re.escape(name)}\b", source, re.MULTILINE):
            return source[found.start() :]
        if not (origin := _imported_from(source, module, name)):
            break
        module = origin
    return ""


def _imported_from(source: str, module: str, name: str) -> str:
    """Return the module from which `module` imports `name`; "" if it does not."""
    for found in re.finditer(r"^\s*from (\.*[\w.]+) import (\([^)]*\)|[^\n]*)", source, re.MULTILINE):
        if re.search(rf"\b{re.escape(name)}\b", found[2]):
            return found[1] if not found[1].startswith(".") else f"{module}.{found[1].lstrip('.')}"
    return ""


@cache
def _source(module: str) -> str:
    """Return the source of `module`, found without importing its package; "" if there is none."""
    top, *rest = module.split(".")
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin)
            for part in rest:
                package = path.parent / part / "__init__.py"
                path = package if package.exists() else path.parent / f"{part}.py"
            return path.read_text(encoding="utf-8")
    return ""
