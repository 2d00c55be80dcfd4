"""Which plugins are installed: list them without importing any, find one by name, load it when it is chosen.

Discovered means available, never active: a package is imported only when a run names its plugin. The two exceptions,
accelerators and environments under "auto", are asked one by one, so that a broken package is skipped, not fatal.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from attrs import frozen

from stratagem.errors import PluginError, nearest
from stratagem.stack import catalog

#: Comma-separated plugin or distribution names: only these exist for this process.
ALLOW_VARIABLE = "STRATAGEM_PLUGINS"
#: Comma-separated plugin or distribution names that do not exist for this process.
DENY_VARIABLE = "STRATAGEM_DISABLE_PLUGINS"


@frozen(kw_only=True)
class Entry:
    """An installed plugin, as its package's metadata describes it."""

    kind: str
    name: str
    #: ``module:attribute``
    value: str
    distribution: str
    version: str
    #: The requirements of the distribution that name the core, such as ``stratagem>=0.1``, as its metadata spells them.
    core_requirements: tuple[str, ...] = ()

    @property
    def qualified_name(self) -> str:
        return f"{self.distribution}:{self.name}"

    def load(self) -> Any:
        """Import the plugin and return its class or factory.

        Raises:
            PluginError: the package was made for another core version, or its import fails (chained).
        """
        check_core_version(self)
        try:
            return EntryPoint(self.name, self.value, f"stratagem.{self.kind}").load()
        except (Exception, SystemExit) as error:  # a module that exits must not take the program with it
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.distribution} {self.version} cannot be imported "
                f"({type(error).__name__}: {error})",
                do=f"repair or uninstall {self.distribution}, or choose another {self.kind}",
            ) from error


def entries(kind: str | None = None, hidden: bool = False) -> list[Entry]:
    """Return the installed plugins (of one `kind`), sorted; `hidden` also those that allow and deny lists hide."""
    listed = _scan() if hidden else _visible(os.environ.get(ALLOW_VARIABLE, ""), os.environ.get(DENY_VARIABLE, ""))
    return [entry for entry in listed if kind in (None, entry.kind)]


def refresh() -> None:
    """Forget what was discovered: packages were installed or removed while this process runs."""
    global _generation
    _generation += 1
    _scan.cache_clear()
    _visible.cache_clear()


def generation() -> int:
    """Return how often discovery was refreshed: what was computed from installed plugins holds for one number."""
    return _generation


_generation = 0


def find(kind: str, name: str) -> Entry:
    """Return the installed plugin of `kind` called `name` (any case, or ``distribution:name``).

    Raises:
        PluginError: nothing, or more than one package, answers to `name`.
    """
    wanted = name.lower()
    matches = [entry for entry in entries(kind) if wanted in (entry.name.lower(), entry.qualified_name.lower())]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = " or ".join(repr(entry.qualified_name) for entry in matches)
        raise PluginError(
            f"{kind} {name!r} is provided by {' and '.join(entry.distribution for entry in matches)}",
            expected="one package to answer to that name",
            do=f"write {choices}, or uninstall one of them",
        )
    raise _unknown(kind, wanted, name)


def _unknown(kind: str, wanted: str, name: str) -> PluginError:
    installed = [entry.name for entry in entries(kind)]
    hidden = [entry for entry in _scan() if entry.kind == kind and entry.name.lower() == wanted]
    if hidden:
        return PluginError(
            f"{kind} {name!r} is hidden by {ALLOW_VARIABLE} or {DENY_VARIABLE}", do="change that variable"
        )
    known = {other.lower(): package for other, package in catalog.providers(kind).items()}
    if package := known.get(wanted):
        return PluginError(f"{kind} {name!r} is not installed", do=f"run `pip install {package}`")
    elsewhere = next((entry.kind for entry in entries() if entry.name.lower() == wanted), "")
    hint = catalog.moved(wanted) or (
        f"{wanted!r} is a {elsewhere}" if elsewhere else nearest(name, [*installed, *known])
    )
    listing = ", ".join(sorted(installed)) or "none; see `pip install stratagem-...` in the README"
    return PluginError(f"{kind} {name!r} is unknown", expected=f"one of those installed: {listing}", do=hint)


@cache
def _scan() -> tuple[Entry, ...]:
    found: dict[tuple[str, str], Entry] = {}
    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group.startswith("stratagem."):
                entry = _describe(point, distribution)
                # The first on the path wins, as in an import; an editable install may leave its metadata there twice.
                found.setdefault((entry.kind, entry.qualified_name), entry)
    return tuple(sorted(found.values(), key=lambda entry: (entry.kind, entry.name, entry.distribution)))


def _describe(point: EntryPoint, distribution: Distribution) -> Entry:
    return Entry(
        kind=point.group.removeprefix("stratagem."),
        name=point.name,
        value=point.value,
        distribution=distribution.name,
        version=distribution.version,
        core_requirements=tuple(filter(_NAMES_CORE.match, distribution.requires or ())),
    )


#: Begins a requirement of the core. It is parsed when the plugin is loaded: a listing imports no parser.
_NAMES_CORE = re.compile(r"stratagem(?![-.\w])", re.IGNORECASE)


@cache
def _visible(allow: str, deny: str) -> tuple[Entry, ...]:
    """Return what the allow and deny lists, as they are in the environment, leave of the installed plugins."""
    allowed, denied = _names(allow), _names(deny)
    found = []
    for entry in _scan():
        titles = {entry.name.lower(), entry.distribution.lower(), entry.qualified_name.lower()}
        # The allow list is about runs; the commands that find out what a run lacks stay.
        if not titles & denied and (not allowed or titles & allowed or entry.kind == "command"):
            found.append(entry)
    return tuple(found)


def _names(text: str) -> set[str]:
    return {name.strip().lower() for name in text.split(",") if name.strip()}


def check_core_version(entry: Entry) -> None:
    """Refuse a plugin whose package was made for other versions of the core.

    Raises:
        PluginError: both versions are in it.
    """
    from stratagem._version import __version__

    do = f"install another version of {entry.distribution} or of stratagem"
    for requirement in entry.core_requirements:
        try:
            unmet = _unmet(requirement, __version__)
        except ValueError:
            raise PluginError(
                f"{entry.kind} {entry.name!r} of {entry.distribution} {entry.version} needs {requirement!r}",
                expected="a requirement such as 'stratagem>=0.1'", do=do,
            ) from None  # fmt: skip
        if unmet:
            raise PluginError(
                f"{entry.kind} {entry.name!r} of {entry.distribution} {entry.version} needs stratagem "
                f"{unmet} and this is {__version__}",
                do=do,
            )


@cache
def _unmet(requirement: str, version: str) -> str:
    """Return the versions that `requirement` allows (``>=0.1``) if `version` is not one of them; otherwise nothing."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return ""
    # A development version or a release candidate of 0.2 counts as 0.2.
    fits = parsed.specifier.contains(Version(version).base_version, prereleases=True)
    return "" if fits else str(parsed.specifier)
