"""Choose the accelerator and the environment under "auto": ask every installed one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from stratagem.api.kinds import Confidence, Evidence
from stratagem.discovery import catalog, registry
from stratagem.errors import ConfigError, PluginError
from stratagem.stack.construction import make
from stratagem.stack.plugins import Choice


def detect_accelerator() -> Choice:
    for entry, accelerator in _installed("accelerator"):
        if _ask(accelerator.count):
            reason = f"{accelerator.count()} found" if accelerator.indexed else "no other device found"
            return Choice(kind="accelerator", name=entry.name, plugin=accelerator, reason=reason, entry=entry)
    raise _nothing_installed("accelerator")


# --- The environment ---------------------------------------------------------------------------------------------


@frozen
class Candidate:
    """An installed environment, and what it says of this process."""

    entry: registry.Entry
    plugin: Any
    #: None: it is not present.
    evidence: Evidence | None
    #: What is wrong with its `detect`; it is then taken for absent.
    problem: str = ""

    def __str__(self) -> str:
        return f"environment {self.entry.name!r}"


def detect_environment() -> Choice:
    """Return the environment to use under "auto".

    Raises:
        ConfigError: two of them claim this process, and contradict each other.
        PluginError: none is installed.
    """
    candidates = environment_candidates()
    for each in candidates:
        if each.problem:
            warnings.warn(f"{each} is ignored: {each.problem}", stacklevel=2)
    found = choose(candidates)
    return Choice(
        kind="environment", name=found.entry.name, plugin=found.plugin, reason=str(found.evidence), entry=found.entry
    )


def environment_candidates() -> list[Candidate]:
    """Ask every installed environment; return those that are present first, and of these the most certain one."""
    found = []
    for entry, plugin in _installed("environment"):
        found.append(Candidate(entry, plugin, *_evidence(plugin)))
    return sorted(found, key=_order)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first of `candidates`, in the order of `environment_candidates`.

    One that is certain may have been started within another one: torchrun in a task of SLURM. The one that was started
    last has the higher precedence and knows the ranks. It cannot have fewer processes than the one around it.

    Raises:
        ConfigError: two of them claim this process, and contradict each other.
        PluginError: none is present.
    """
    present = [each for each in candidates if each.evidence is not None]
    if not present:
        raise _nothing_installed("environment")
    first, *others = present
    certain = [each for each in others if _confidence(each) is Confidence.CERTAIN]
    if _confidence(first) is Confidence.CERTAIN:
        for other in certain:
            _check_pair(first, other)
    return first


def _evidence(plugin: Any) -> tuple[Evidence | None, str]:
    try:
        found = plugin.detect()
    except Exception as error:  # noqa: BLE001 - a plugin that raises is not present
        return None, f"its detect() raised {type(error).__name__}: {error}"
    if found is None or isinstance(found, Evidence):
        return found, ""
    return None, f"its detect() returned {found!r} and not an Evidence"


def _order(candidate: Candidate) -> tuple[float, ...]:
    evidence = candidate.evidence
    if evidence is None:
        return (1,)
    # Of equals that do not contradict each other, the one that knows more: the rank, then the number of nodes.
    unknown = evidence.rank is None, _ask(candidate.plugin.num_nodes) is None
    return (0, -evidence.confidence, -candidate.plugin.precedence, *unknown)


def _confidence(candidate: Candidate) -> Confidence:
    assert candidate.evidence is not None, "it is present"
    return candidate.evidence.confidence


def _check_pair(first: Candidate, other: Candidate) -> None:
    """Refuse `other` beside `first`, both certain, if they cannot both be right."""
    one, two = first.evidence, other.evidence
    assert one is not None, "it is present"
    assert two is not None, "it is present"
    if first.plugin.precedence == other.plugin.precedence:
        for what in ("world_size", "rank"):
            here, there = getattr(one, what), getattr(two, what)
            if None not in (here, there) and here != there:
                raise _contradiction(first, other, f"{what} {here} and {there}", "two that agree, or one")
        return
    if one.world_size is None or two.world_size is None:
        return
    if one.world_size < two.world_size:
        expected = f"at least {two.world_size} processes: otherwise several of them train separate models"
        raise _contradiction(first, other, f"{one.world_size} and {two.world_size} processes", expected)
    are_same = (one.rank, one.world_size) == (two.rank, two.world_size)  # both read the same variables
    if not are_same and one.starters is not None and one.starters < two.world_size:
        what = f"{first.entry.name} was started {one.starters} times and {other.entry.name} has {two.world_size} tasks"
        raise _contradiction(first, other, what, "one of them in each task, all with the same address")


def _contradiction(first: Candidate, other: Candidate, what: str, expected: str) -> ConfigError:
    both = " and ".join(f"{each} ({each.evidence.reason})" for each in (first, other) if each.evidence is not None)
    names = " or ".join(f'environment="{each.entry.name}"' for each in (first, other))
    return ConfigError(
        f"{both} both started this process, and they contradict each other: {what}",
        expected=expected, do=f"set {names}, or unset the variables that were inherited from elsewhere",
    )  # fmt: skip


# --- What is installed -------------------------------------------------------------------------------------------


def _installed(kind: str) -> list[tuple[registry.Entry, Any]]:
    """Return the installed plugins of `kind` that can be built, highest precedence first; broken ones are skipped."""
    found = []
    for entry in registry.entries(kind):
        try:
            target = entry.load()
            if isinstance(target, type):  # presets ("gpu") are other names for the same plugins
                found.append((entry, make(entry, {})))
        except Exception:  # noqa: BLE001, S112 - a broken package must not affect a run that does not name it
            continue
    return sorted(found, key=lambda pair: -pair[1].precedence)


def _ask(question: Any) -> Any:
    try:
        return question()
    except Exception:  # noqa: BLE001 - a plugin that raises is not present
        return None


def _nothing_installed(kind: str) -> PluginError:
    package = next(iter(catalog.providers(kind).values()))
    return PluginError(f"no usable {kind} plugin is installed", do=catalog.how_to_install(package))
