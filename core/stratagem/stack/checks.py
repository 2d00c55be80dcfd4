"""Check that the plugins of a stack can be combined: hooks, order, capabilities."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from stratagem.api.capabilities import MULTI_PROCESS, Capabilities
from stratagem.api.kinds import Plugin
from stratagem.discovery import registry
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, PluginError, mistyped, nearest
from stratagem.stack.construction import make
from stratagem.stack.plugins import hook_functions, hook_implementations, hook_specifications

if TYPE_CHECKING:
    from stratagem.api.kinds import Strategy
    from stratagem.stack.plugins import Choice, Stack


def check_hooks(stack: Stack) -> None:
    specifications = hook_specifications()
    answers: dict[str, list[Choice]] = {}
    _check_listed_once(stack)
    every = [(choice, hook_implementations(choice.plugin)) for choice in stack.active()]
    for choice, implemented in every:
        for hook, marker in implemented.items():
            if hook not in specifications:
                if marker["optionalhook"]:
                    if hint := mistyped(hook, specifications):
                        warnings.warn(f"{choice} implements {hook!r}, which nothing calls; {hint}", stacklevel=2)
                    continue
                raise PluginError(
                    f"{choice} implements {hook!r}, which is not a hook of stratagem",
                    do=nearest(hook, specifications)
                    or "see docs/hooks.md; install the package that adds it, or mark it @hookimpl(optionalhook=True)",
                )
            if specifications[hook]["firstresult"] and not marker["wrapper"]:
                answers.setdefault(hook, []).append(choice)
    for hook, choices in answers.items():
        if len(choices) > 1:
            _explain_answers(hook, choices, stack)
            raise PluginError(
                f"hook {hook!r} is answered by {' and by '.join(str(choice) for choice in choices)}",
                expected="one plugin to answer and the others to wrap",
                do="drop one of them",
            )
    kinds = registry.kinds()
    for choice, implemented in every:
        duties = kinds[choice.kind].duties if choice.kind in kinds else ()
        outer = choice in stack.strategies[:-1]
        if missing := duties and [hook for hook in duties if hook not in implemented and not outer]:
            raise PluginError(
                f"{choice} does not implement {' and '.join(missing)}",
                expected=f"every {choice.kind} to do so",
                do="its author should add it; docs/hooks.md has the signature",
            )


def _check_listed_once(stack: Stack) -> None:
    known: dict[int, Choice] = {}
    for choice in stack.active():
        if known.setdefault(id(choice.plugin), choice) is not choice:
            raise ConfigError(f"{choice} is listed twice: both are the same object", expected="each object once",
                              do="drop one of them")  # fmt: skip


def _explain_answers(hook: str, choices: list[Choice], stack: Stack) -> None:
    """Refuse a strategy and another plugin that both answer `hook`, if another strategy leaves it to that plugin."""
    strategies = [choice for choice in choices if choice.kind == "strategy"]
    others = [choice for choice in choices if choice.kind != "strategy"]
    if strategies and others and (advice := _fitting_strategies(others[0], stack)):
        raise ConfigError(
            f"{others[0]} cannot be used with {strategies[0]}: both answer hook {hook!r}",
            expected=f"a strategy that leaves it to {others[0]}",
            do=advice,
        )


def check_order(stack: Stack) -> None:
    """Refuse strategies in an order that cannot work, and what kinds refuse of theirs."""
    for outer, inner in itertools.pairwise(stack.strategies):
        if not outer.plugin.outer:
            raise ConfigError(
                f"strategy is {[choice.name for choice in stack.strategies]}, and {outer} cannot wrap another strategy",
                expected="outer strategies, and one strategy inside them",
                do=f"put {inner} before it" if inner.plugin.outer else "drop one of them",
            )
    for kind in registry.kinds().values():
        if kind.check is not None and (choices := stack.of(kind.name)):
            kind.check(choices, stack)


def check_absorbed(stack: Stack) -> None:
    """Refuse options of a precision that a strategy applies itself: they would have no effect."""
    precision = stack.precision
    if stack.precision_absorbed and precision.origins:
        option, origin = next(iter(precision.origins.items()))
        raise ConfigError(
            f"precision.{precision.name}.{option} is set ({origin}), and {stack.strategies[-1]} applies the precision "
            "itself",
            expected="only the name of the precision", do="set an option of the strategy, if it has one for that",
        )  # fmt: skip


def needs_of(settings: Any, stack: Stack) -> dict[str, str]:
    """Return the capabilities that `settings` need, each with the arguments that need it, for messages."""
    needs = {}
    running = stack.environment.plugin.local_processes() or 1
    if stack.num_processes * stack.num_nodes > 1 or running > 1:
        needs[MULTI_PROCESS] = f"devices={settings.devices!r} with num_nodes={stack.num_nodes}"
    needs.update(settings.needs())
    return needs


def _capabilities(choice: Choice) -> Capabilities:
    capabilities = getattr(choice.plugin, "capabilities", Plugin.capabilities)
    if not isinstance(capabilities, Capabilities):
        raise PluginError(
            f"the capabilities of {choice} are a {type(capabilities).__name__}",
            expected="stratagem.Capabilities(provides=..., requires=..., conflicts=...)",
            do="report it to its author",
        )
    return capabilities


def check_capabilities(stack: Stack, needs: Mapping[str, str]) -> None:
    choices = stack.active()
    _check_replaced_layers(choices)
    every = [(choice, _capabilities(choice)) for choice in choices]
    provided = {word for _, own in every for word in own.provides}
    wanted: list[tuple[str, str, Choice | None]] = [(word, reason, None) for word, reason in needs.items()]
    wanted += [(word, str(choice), choice) for choice, own in every for word in sorted(own.requires)]
    for word, who, asker in wanted:
        if word not in provided:
            lacking = stack.accelerator if word.startswith("device:") else stack.strategies[-1]
            raise ConfigError(
                f"{who} needs {word!r}, which {lacking} does not provide",
                do=stack.strategy.how_to_provide(word) or _alternatives(word, asker),
            )
    for choice, own in every:
        if own.conflicts & provided:
            _check_conflicts(choice, own, every, stack)


def _check_conflicts(
    choice: Choice, own: Capabilities, every: Sequence[tuple[Choice, Capabilities]], stack: Stack
) -> None:
    for other, theirs in every:
        clash = sorted(own.conflicts & theirs.provides)
        if clash and other is not choice:
            if choice.kind == "strategy":
                advice = choice.plugin.how_to_avoid(clash[0])
            else:
                advice = _fitting_strategies(choice, stack) if other is stack.strategies[-1] else ""
            raise ConfigError(
                f"{choice} cannot be used with {other}, which provides {clash[0]!r}", do=advice or "drop one of the two"
            )


def _check_replaced_layers(choices: Sequence[Choice]) -> None:
    """Refuse two plugins that replace layers: the second finds none, or those that the first left out."""
    found = [choice for choice in choices if getattr(choice.plugin, "replaces_layers", False)]
    if len(found) > 1:
        raise ConfigError(
            f"{found[1]} cannot be used with {found[0]}: both replace layers of the module", expected="one of the two",
            do=f"drop {found[1]}, or {found[0]}",
        )  # fmt: skip


def _alternatives(word: str, asker: Choice | None) -> str:
    """Name the installed strategies that provide `word`, without presets. It imports them: only for an error."""
    entries = registry.entries("strategy")
    able = [entry.name for entry in entries if word in _provided_without_options(entry, registry.generation())]
    if not able:
        return "no installed strategy provides it" + (f"; drop {asker}" if asker else "")
    return f"choose a strategy that does: {', '.join(able)}"


def _fitting_strategies(asker: Choice, stack: Stack) -> str:
    """Advise strategies that go with `asker`, which the strategy of `stack` does not; "" if none is installed."""
    several = stack.num_processes * stack.num_nodes > 1
    names = [
        entry.name for entry in registry.entries("strategy") if _fits(entry, asker, several, registry.generation())
    ]
    return f"choose strategy {' or '.join(map(repr, names))}, or drop {asker}" if names else ""


def _fits(entry: registry.Entry, asker: Choice, several: bool, generation: int) -> bool:
    """Whether the strategy of `entry`, without options, can be used with `asker`, in several processes if asked."""
    strategy = _made_without_options(entry, generation)
    if strategy is None or strategy.outer:
        return False
    own, others = strategy.capabilities, _capabilities(asker)
    clashes = own.conflicts & others.provides or own.provides & others.conflicts or others.requires - own.provides
    return (
        not clashes
        and (not several or MULTI_PROCESS in own.provides)
        and not _answers(strategy) & _answers(asker.plugin)
    )


def _answers(plugin: Any) -> set[str]:
    """Return the hooks that `plugin` answers."""
    specifications, own = hook_specifications(), hook_implementations(plugin)
    known = own.keys() & specifications.keys()
    return {hook for hook in known if specifications[hook]["firstresult"] and not own[hook]["wrapper"]}


def _provided_without_options(entry: registry.Entry, generation: int) -> frozenset[str]:
    """Return what a strategy provides; empty for a preset, or a package that cannot be imported or needs options."""
    strategy = _made_without_options(entry, generation)
    return frozenset() if strategy is None else frozenset(strategy.capabilities.provides)


@functools.cache
def _made_without_options(entry: registry.Entry, generation: int) -> Strategy | None:  # noqa: ARG001 - a cache's key
    """Return a strategy with its defaults; None for a preset, a package that is broken, or one that needs options."""
    try:
        return cast("Strategy", make(entry, {})) if isinstance(entry.load(), type) else None
    except Exception:  # noqa: BLE001 - a broken package is not an alternative
        return None


def check_hook_arguments(choice: Choice) -> None:
    """Refuse hooks of a plugin that name an argument which the hook does not have.

    Raises:
        PluginError: names the hook and the argument.
    """
    functions = hook_functions()
    for hook in hook_implementations(choice.plugin).keys() & functions.keys():
        known = list(inspect.signature(functions[hook]).parameters)
        for name in inspect.signature(getattr(choice.plugin, hook)).parameters:
            if name not in known:
                moved = moved_names("hooks").get(hook) or moved_names("hook_arguments").get(name)
                raise PluginError(
                    f"{choice} takes {name} in {hook}", expected=f"arguments out of ({', '.join(known)})",
                    do=moved or nearest(name, known) or "leave it out",
                )  # fmt: skip
